"""Lesson 1: one policy, two engines. How far apart are they at the same weights, and why?

In RL for language models vLLM samples the responses and a PyTorch trainer computes the gradients.
Both hold the same weights theta_s, and yet they give a sampled token a different probability:

    d = log pi_{theta_s}(token) - log mu(token)          (trainer minus sampler, in nats)

mu is the engine's distribution, pi the trainer's. On-policy training assumes d = 0. This lesson
builds the policy, the sampler and the trainer's scoring that all other files use, and measures d:
first where it must vanish (the control), then as it naturally is, then with one bug at a time.

Two sizes are always given together: mean |d|, and k3 = mean(exp(d) - 1 - d) >= 0, an estimate of
KL(mu || pi). Where the recorded mu is what sampled, and could sample all that pi can, E_mu[exp(d)] = 1
and so mean d = -k3 <= 0. A mean d clearly above zero therefore accuses the records: some log-prob,
mu's or pi's, is not that of a distribution.

Words: an arm is one pairing of engine and trainer in the measurement; a sync gives the engine the
trainer's weights; a tied head is an output layer that shares its matrix with the embedding; the head of
a distribution is its K most likely tokens.

Run it:  python 01_mismatch.py                          a CPU, the tiny policy: built once, then about 20 s
         python 01_mismatch.py --model Qwen/Qwen3-0.6B   a CUDA GPU (its default model; not run yet)
Expect:  control exactly 0, fp32 against fp32 about 1e-7, bf16 about 2e-3, the bugs 6 to 70 times that
         (log-softmax in bf16: only 1.4 times, the bug that hides best);
         table and laws in figures/01_mismatch.json, the picture in figures/01_mismatch.png.

Exercises (tests/test_01_mismatch.py grades the functions):
 1. Rewrite `token_logp` with `logsumexp` and without a (B, T, V) log-softmax. 3 lines; test_token_logp.
 2. Rewrite `gap` for one list of log-prob pairs in plain Python, no torch. 8 lines; test_gap.
 3. Predict, then run: which of the natural arms gets smaller when the policy is more certain of its
    tokens? Run train.py, then `python 01_mismatch.py --model runs/none-s0-seed0/checkpoint-80`.
 4. Break `response_logits`: leave out `position_ids`, then `attention_mask`. Which of the two matters
    to rows of different lengths, and why? 1 line each; test_padded_row_equals_its_row_alone.
 5. Reach a number: mean |d| of "bf16 engine | fp32 trainer" below 3e-4, with engine and trainer as they are.
 6. Find the bug: `python tests/exercises.py --bug 01 --seed 1`, then --seed 2, 3 (see the README).
"""
import argparse
import copy
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MethodType

# This project is text only. An installed torchvision, torchaudio or torchcodec that was built for
# another torch would break every import of a transformers model: None marks them as absent.
sys.modules.update(dict.fromkeys(("torchvision", "torchaudio", "torchcodec")))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")   # waiting threads sleep: spinning ones make a busy CPU ten times slower

import numpy as np
import torch
if not torch.cuda.is_available():
    sys.modules["triton"] = None    # it has no CPU backend, and leaves 30 lines of notes at exit
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)   # its retries, where there is no network
import transformers
from torch import Tensor
from tqdm import tqdm

transformers.utils.logging.disable_progress_bar()
ROOT = Path(__file__).resolve().parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HUB_MODEL = "Qwen/Qwen3-0.6B"       # the default where there is a GPU; elsewhere the tiny policy
CANARY_FLOOR, CANARY_ROUNDING = 1e-4, 3   # a sync may leave a gap of floor + 3 x what rounding explains
MAX_MODEL_LEN = 2048                # tokens of prompt and response together
LOGITS_AT_ONCE = 2**27              # float32 logits a micro-batch may hold (512 MiB)

# ---------------------------------------------------------------- the task
CHARACTERS = "0123456789=.abcd_"    # a token each: digit = its id, "." ends a response, "_" pads
EQUALS, END, LETTER_A, PAD = (CHARACTERS.index(c) for c in "=.a_")


@dataclass(frozen=True)
class Task:
    """A task with a verifiable reward, and the warm start that teaches its format.

    sum:  prompt d1..d8, response s1..s8 and the end, s_i = (s_{i-1} + d_i) mod 10.
          Reward 1 if the last digit is s8 and the response ends.
    free: prompt d1..d4, response four times (letter letter digit) and the end. Reward 1 if the
          digits are (d_i + 3) mod 10 and the response ends; the letters are free.
    stop: like sum, but s_i = s_{i-1} - d_i from i = 5 on, and the policy chooses where to stop.
          Reward: correct digits / 8, so that stopping early costs.
    """
    name: str
    length: int          # digits in a prompt
    max_tokens: int      # the longest right response, its end included
    steps: int           # of the warm start
    slip: float          # share of the demonstrated digits that a random digit replaces
    stop_steps: int = 0  # further steps, on demonstrations that stop early


TASKS = {
    "sum": Task("sum", length=8, max_tokens=9, steps=350, slip=0.1),
    "free": Task("free", length=4, max_tokens=13, steps=280, slip=0.28),
    "stop": Task("stop", length=8, max_tokens=9, steps=350, slip=0.1, stop_steps=200),
}


def right_digits(task: Task, digits: np.ndarray) -> np.ndarray:
    """The digits (n, L) that a right response to the prompts' digits (n, L) holds."""
    if task.name == "free":
        return (digits + 3) % 10
    sign = np.where((np.arange(task.length) >= 4) & (task.name == "stop"), -1, 1)
    return np.cumsum(sign * digits, axis=1) % 10


def reward(task: Task, digits: np.ndarray, text: str, ended: bool) -> float:
    """Reward in [0, 1] of one response `text` to one prompt's `digits` (L,). Reads the digits only,
    so that the characters of the tiny policy and the words of a chat model are judged alike."""
    answer = [int(c) for c in re.findall("[0-9]", text)]
    right = right_digits(task, np.asarray(digits)[None])[0].tolist()
    if task.name == "stop":
        return sum(a == r for a, r in zip(answer, right)) / task.length
    if task.name == "sum":
        answer, right = answer[-1:], right[-1:]
    return float(ended and answer == right)


def demonstrations(task: Task, digits: np.ndarray, rng, stop_early: bool = False) -> np.ndarray:
    """Token ids (n, max_tokens) of imperfect responses, padded: what the warm start imitates."""
    n = len(digits)
    slips = rng.random(digits.shape) < task.slip
    shown = np.where(slips, rng.integers(0, 10, digits.shape), right_digits(task, digits))
    tokens = np.full((n, task.max_tokens), PAD)
    if task.name == "free":
        rank = rng.choice(4, size=(n, task.length, 2), p=[0.4, 0.3, 0.2, 0.1])
        first = (rank[..., 0] + digits) % 4                              # a habit that depends on the
        second = (rank[..., 1] + first + np.arange(task.length)) % 4     # digit, the letter, the place
        triples = np.stack([LETTER_A + first, LETTER_A + second, shown], -1)
        tokens[:, :-1] = triples.reshape(n, -1)
    else:
        tokens[:, :-1] = shown
    tokens[:, -1] = END
    if stop_early:                                   # from the second digit on, stop with chance 0.65
        stop = np.minimum(1 + rng.geometric(0.65, n), task.length)
        tokens[np.arange(n), stop] = END
        tokens[np.arange(task.max_tokens) > stop[:, None]] = PAD
    return tokens


def make_prompts(task: Task, tokenizer, n: int, rng) -> tuple[np.ndarray, list[list[int]]]:
    """n random prompts: their digits (n, L) and their token ids. The tiny policy reads "d1..dL=",
    any other model reads the running sum in words, through its chat template if it has one."""
    digits = rng.integers(0, 10, (n, task.length))
    if is_tiny(tokenizer):
        return digits, [[*map(int, row), EQUALS] for row in digits]
    if task.name != "sum":
        raise ValueError(f"the task {task.name!r} exists for the tiny policy only")
    prompts = []
    for row in digits:
        words = (f"Digits: {' '.join(map(str, row))}. Add them one after the other and write down each "
                 f"running sum modulo 10. The last digit that you write must be the sum of all "
                 f"{task.length} digits modulo 10.")
        if tokenizer.chat_template:
            prompts.append(tokenizer.apply_chat_template(
                [{"role": "user", "content": words}], add_generation_prompt=True,
                enable_thinking=False, return_dict=False))
        else:
            prompts.append(tokenizer(words + "\nRunning sums: ")["input_ids"])
    return digits, prompts


def rewards(task: Task, digits: np.ndarray, rollout: "Rollout", tokenizer) -> Tensor:
    """Rewards (B,) of a rollout; `digits` (B, L) has a row a response."""
    texts = tokenizer.batch_decode([row[m].tolist() for row, m in zip(rollout.ids, rollout.mask)],
                                   skip_special_tokens=True)
    return torch.tensor([reward(task, d, text, finish == "stop")
                         for d, text, finish in zip(digits, texts, rollout.finish_reasons)])


# ---------------------------------------------------------------- the policy
def is_tiny(tokenizer) -> bool:
    return set(tokenizer.get_vocab()) == set(CHARACTERS)


def make_tokenizer():
    """One character, one token: a tokenizer that vLLM and transformers load like any other."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    characters = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="_"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token=".", pad_token="_", unk_token="_")


ARCHITECTURE = dict(                # a Qwen3 of 100k parameters; vLLM on a CPU needs head_dim >= 32
    vocab_size=len(CHARACTERS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_MODEL_LEN,
    tie_word_embeddings=True, eos_token_id=END, pad_token_id=PAD, bos_token_id=None)


def warm_start(task: Task, architecture: dict):
    """A tiny Qwen3 that imitates `demonstrations`: right if greedy, it slips when it samples. Returns the model
    and its sampled accuracy (mean reward of 1,024 responses drawn by transformers)."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    kind = "qwen3_moe" if "num_experts" in architecture else "qwen3"
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **architecture))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    total = task.steps + task.stop_steps
    schedule = torch.optim.lr_scheduler.LambdaLR(    # up over 20 steps, down over the last 30 %
        optimizer, lambda k: min((k + 1) / 20, 1, (total - k) / (0.3 * total)))
    for step in tqdm(range(total), desc=f"warm start of the tiny policy ({task.name})"):
        digits = rng.integers(0, 10, (256, task.length))
        response = demonstrations(task, digits, rng, stop_early=step >= task.steps)
        prompt = np.pad(digits, ((0, 0), (0, 1)), constant_values=EQUALS)
        ids = torch.from_numpy(np.concatenate([prompt, response], 1))
        logits = model(input_ids=ids[:, :-1]).logits[:, task.length:]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, task.length + 1:].flatten(), ignore_index=PAD)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    digits, prompts = make_prompts(task, tokenizer := make_tokenizer(), 1024, rng)
    responses = model.eval().generate(
        torch.tensor(prompts), do_sample=True, top_k=0, max_new_tokens=task.max_tokens)[:, task.length + 1:]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    ended = (responses == END).any(1).tolist()
    return model, float(np.mean([reward(task, *row) for row in zip(digits, texts, ended)]))


def file_hashes(folder: Path) -> dict:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest()
            for f in sorted(folder.iterdir()) if f.name != "policy.json"}


def policy(task_name: str = "sum", architecture: dict = ARCHITECTURE) -> Path:
    """The tiny policy's checkpoint for a task: taken from checkpoints/ if it is there and whole,
    else built (about a minute at most) and put there in one rename."""
    settings = {"task": asdict(TASKS[task_name]), "architecture": architecture}
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    folder = ROOT / "checkpoints" / f"{task_name}-{key}"
    try:
        card = json.loads((folder / "policy.json").read_text())
        whole = card["settings"] == settings and card["sha256"] == file_hashes(folder)
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        model, accuracy = warm_start(TASKS[task_name], architecture)
        new = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        model.save_pretrained(new)
        make_tokenizer().save_pretrained(new)
        card = {"settings": settings, "accuracy": accuracy, "sha256": file_hashes(new)}
        (new / "policy.json").write_text(json.dumps(card, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(new, folder)
    print(f"tiny policy: task {task_name}, sampled accuracy {card['accuracy']:.2f} ({folder})")
    return folder


def find_model(name: str | None, architecture: dict | None = None) -> str:
    """`name`, if transformers finds a configuration, a tokenizer and a common vocabulary there; if it is None the
    tiny policy of that `architecture`, or else the default model. Raises ValueError with one line for people otherwise."""
    if name is None and (architecture or DEVICE.type == "cpu"):
        return str(policy("sum", architecture or ARCHITECTURE))
    name = HUB_MODEL if name is None else name
    if "/" in name and Path(name).parent.is_dir() and not Path(name).exists():     # no hub name: do not ask the network
        raise ValueError(f"--model {name}: there is no such directory")
    part = "model"
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        part = "tokenizer"
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        ids = tokenizer("0123456789")["input_ids"]
        if not ids:
            raise ValueError("its files hold no vocabulary")   # transformers makes an empty one without a word
    except Exception as error:   # whatever is wrong there, transformers has an exception of its own for it
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"--model {name}: no {part} there that transformers can load ({reason})") from error
    known = [i for i in ids if i != tokenizer.unk_token_id]
    if not known or max(ids) >= config.get_text_config().vocab_size:
        raise ValueError(f"--model {name}: tokenizer and model have no vocabulary in common for digits "
                         f"(ids {ids}, model's vocabulary {config.get_text_config().vocab_size})")
    return name


def load_model(path, dtype: torch.dtype = torch.float32):
    """The trainer's copy of the policy. Raises ValueError with one line if its weights cannot be read."""
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE).eval()
    except Exception as error:   # as above: a torn file has an exception of its own
        raise ValueError(f"--model {path}: no weights that transformers can load ({str(error).strip().splitlines()[0]})") from error


# ---------------------------------------------------------------- the sampler: vLLM
@dataclass
class Rollout:
    """What the engine sampled, as it sampled it. B responses, P prompt and T response positions."""
    prompt_ids: Tensor         # (B, P) left-padded
    prompt_mask: Tensor        # (B, P) bool
    ids: Tensor                # (B, T) response tokens, right-padded, the end of sequence included
    mask: Tensor               # (B, T) bool: 1 on response tokens
    logp_sampler: Tensor       # (B, T) log mu of the sampled token, nats; 0 on padding
    head_ids: Tensor           # (B, T, K) the K most likely tokens, K = 0: not recorded
    head_logp: Tensor          # (B, T, K) their log-probs, normalised over the full vocabulary
    finish_reasons: list[str]  # "stop": ended by itself, "length": cut off at max_tokens
    version: int               # how often the sampler's weights had been replaced
    temperature: float         # that the engine divided its logits by
    neutral: bool              # sampled from the model's own distribution, see is_neutral
    routes: Tensor | None = None   # (B, P + T, L, k) the k experts that each of L layers chose for each input
    #                                token; None: a dense model, see lesson 5

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> "Rollout":
        """Some of the responses, in the same padding."""
        cut = {f.name: getattr(self, f.name)[rows] for f in fields(self)
               if isinstance(getattr(self, f.name), (Tensor, list))}
        return replace(self, **cut)


def pack(prompts: list[list[int]], completions: list, version: int, temperature: float,
         neutral: bool) -> Rollout:
    """vLLM's completions (token_ids, flat logprobs, finish_reason) as padded tensors.

    The flat lists run over the positions, K + 1 entries each: [sampled, top 1, ..., top K, sampled, top 1,
    ...]. The sampled token may stand again in the top K: slot 0 is never part of the head. Token ids are used as they
    came; nothing is tokenised again. Raises ValueError where a completion has not one log-prob a token, or not
    one row of experts for each token but the last."""
    B, P, T = len(prompts), max(map(len, prompts)), max(len(c.token_ids) for c in completions)
    K = len(completions[0].logprobs.logprobs) // len(completions[0].logprobs) - 1
    prompt_ids, prompt_mask = np.zeros((B, P), np.int64), np.zeros((B, P), bool)
    slots, logps, mask = np.zeros((B, T, K + 1), np.int64), np.zeros((B, T, K + 1), np.float32), np.zeros((B, T), bool)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        n, flat = len(completion.token_ids), completion.logprobs
        if len(flat) != n or len(flat.token_ids) != n * (K + 1):
            raise ValueError(f"response {i}: {n} tokens, but log-probs for {len(flat)}")
        prompt_ids[i, P - len(prompt):], prompt_mask[i, P - len(prompt):] = prompt, True
        slots[i, :n] = np.reshape(flat.token_ids, (n, K + 1))
        logps[i, :n] = np.reshape(flat.logprobs, (n, K + 1))
        mask[i, :n] = True
        if slots[i, :n, 0].tolist() != list(completion.token_ids):
            raise ValueError(f"response {i}: the log-probs are not those of its tokens")
    routes = None
    if completions[0].routed_experts is not None:                # a row an input token; the last one never went in
        routes = np.zeros((B, P + T, *completions[0].routed_experts.shape[1:]), np.int64)
        for i, (prompt, completion) in enumerate(zip(prompts, completions)):
            rows = len(prompt) + len(completion.token_ids) - 1
            if len(completion.routed_experts) != rows:
                raise ValueError(f"response {i}: {rows} input tokens, but routes for {len(completion.routed_experts)}")
            routes[i, P - len(prompt):P - len(prompt) + rows] = completion.routed_experts
        routes = torch.from_numpy(routes).to(DEVICE)
    tensors = [torch.from_numpy(x).to(DEVICE) for x in (
        prompt_ids, prompt_mask, slots[..., 0], mask, logps[..., 0], slots[..., 1:], logps[..., 1:])]
    return Rollout(*tensors, [c.finish_reason for c in completions], version, temperature, neutral, routes)


def is_neutral(params) -> bool:
    """Do these sampling parameters leave the model's own distribution as it is? Each of them that
    masks, reweighs or repeats makes the engine sample from, and record, another distribution."""
    return (params.temperature == 1 and params.top_p == 1 and params.top_k in (-1, 0) and params.min_p == 0
            and params.min_tokens == 0 and params.repetition_penalty == 1
            and params.presence_penalty == params.frequency_penalty == 0
            and not (params.bad_words or params.logit_bias or params.allowed_token_ids
                     or params.structured_outputs))


def is_mixture(config) -> bool:
    """Is this the configuration of a mixture of experts?"""
    return any(getattr(config.get_text_config(), name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def pack_experts(model) -> None:
    """On a CPU vLLM keeps the experts' matrices in its kernel's layout, and reload_weights (0.30.0) leaves them out of it
    without a word: log-probs .2 nats off, which the canary sees. This is the step that it leaves out."""
    for layer in model.modules():
        if hasattr(layer, "w13_weight"):
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


class SyncError(RuntimeError):
    """The engine's weights are not the ones that it was sent."""


class Sampler:
    """vLLM around one policy: start, sample, take new weights."""

    def __init__(self, path, dtype: str = "bfloat16", logprobs_mode: str = "processed_logprobs",
                 gpu_memory_utilization: float = 0.3, head_fp32: bool = False):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")      # the engine in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if DEVICE.type == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")          # GiB
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")             # nothing to compile on a CPU
        print(f"starting vLLM ({dtype}) ...", flush=True)
        from vllm import LLM, ModelRegistry
        config = transformers.AutoConfig.from_pretrained(path)
        architecture = config.architectures[0]
        if architecture in ModelRegistry.models:   # registered as a class; under its name alone vLLM would
            #                                        start another process, which imports torchvision, to look at it
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
        self.dtype = getattr(torch, dtype)
        self.version = 0
        self.mixture = is_mixture(config)
        self.max_model_len = min(MAX_MODEL_LEN, config.get_text_config().max_position_embeddings)
        self.llm = LLM(
            model=str(path), dtype=dtype, seed=0, enforce_eager=DEVICE.type == "cpu",
            max_model_len=self.max_model_len, gpu_memory_utilization=gpu_memory_utilization,
            hf_overrides={"head_dtype": "float32"} if head_fp32 else None,   # the output layer, see head_in_float32
            logprobs_mode=logprobs_mode,   # vLLM's own default is "raw_logprobs": before the temperature
            max_logprobs=-1, generation_config="vllm",   # not the released model's temperature and top-p
            enable_chunked_prefill=DEVICE.type == "cuda",   # on a CPU vLLM cannot cut a seeded request's prompt in two
            enable_return_routed_experts=self.mixture, enable_prefix_caching=not self.mixture,   # a cached prefix has no routes
            use_tqdm_on_load=False)

    def sample(self, prompts: list[list[int]], max_tokens: int, seed, group_size: int = 1, head: int = 0,
               temperature: float = 1.0, top_k: int = -1, rows: slice = slice(None)) -> Rollout:
        """`group_size` responses to each prompt (token ids), neighbours in the batch; of these only `rows`.

        seed: an int or a list of ints; each response of the whole batch gets its own seed from it.
        head: how many of the most likely tokens to record at each position; -1: the vocabulary.
        temperature, top_k: anything but the defaults samples from another distribution."""
        from vllm import SamplingParams
        prompts = [p for p in prompts for _ in range(group_size)]
        seeds = np.random.default_rng(seed).integers(0, 2**31, len(prompts))[rows]
        prompts = prompts[rows]
        params = [SamplingParams(temperature=temperature, top_p=1.0, top_k=top_k, min_p=0.0, min_tokens=0,
                                 max_tokens=max_tokens, seed=int(s), logprobs=head, flat_logprobs=True,
                                 detokenize=False) for s in seeds]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return pack(prompts, [o.outputs[0] for o in outputs], self.version, temperature, is_neutral(params[0]))

    def sync(self, model, state: dict | None = None) -> float:
        """Load the trainer's weights (or `state`, made from them) and check by a canary that they arrived.

        Returns the canary's gap. Raises SyncError if it is larger than rounding explains, RuntimeError if
        old cache blocks survive. Sends state_dict(), not named_parameters(): that lists a tied matrix once,
        as the embedding, and vLLM, which holds a head of its own, would keep the old one without a word.
        What moves the log-probs less than rounding does, the canary cannot see."""
        state = model.state_dict() if state is None else state
        self.load(state)
        gap_now, rounding = self.canary(model, state)
        if not gap_now <= CANARY_FLOOR + CANARY_ROUNDING * rounding:
            raise SyncError(f"after the sync engine and trainer differ by {gap_now:.2g} nats a token, where "
                            f"computing in {self.dtype} explains {rounding:.2g}: the weights did not arrive")
        return gap_now

    def load(self, state: dict) -> None:
        """Put `state` into the engine, unchecked; forget what was computed with the old weights."""
        assert not self.llm.llm_engine.has_unfinished_requests(), "a response must not span two versions"
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(state.items())})
        if self.mixture and DEVICE.type == "cpu":
            self.llm.apply_model(pack_experts)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: old weights would answer new prompts")
        self.version += 1

    def canary(self, model, state: dict) -> tuple[float, float]:
        """Median |d| on a fixed text between the engine and the trainer's model with `state`, and the median |d|
        between that model and itself when it computes in the engine's dtype: what rounding explains (nats). The
        median, because in a mixture of experts a few tokens that take another expert make the mean."""
        from vllm import SamplingParams
        ids = torch.arange(64, device=DEVICE)[None] % 13                          # ids that any vocabulary has
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        output = self.llm.generate([{"prompt_token_ids": ids[0].tolist()}], params, use_tqdm=False)[0]
        logp_engine = torch.tensor(output.prompt_logprobs.logprobs, device=DEVICE)

        def logp_trainer(weights):
            logits = torch.func.functional_call(model, weights, kwargs={"input_ids": ids}, tie_weights=False).logits
            return token_logp(logits[0, :-1], ids[0, 1:], temperature=1.0)

        with torch.no_grad():
            logp = logp_trainer(state)
            logp_rounded = logp_trainer({k: v.to(self.dtype) for k, v in state.items()})
        return (logp - logp_engine).abs().median().item(), (logp - logp_rounded).abs().median().item()


# ---------------------------------------------------------------- the trainer's side
def widen(rollout: Rollout, T: int) -> Rollout:
    """The rollout, padded on the right to T response positions."""
    pad = lambda x: torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, T - rollout.ids.shape[1]))
    names = ("ids", "mask", "logp_sampler", "head_ids", "head_logp", *(("routes",) if rollout.routes is not None else ()))
    return replace(rollout, **{name: pad(getattr(rollout, name)) for name in names})


def micro_batches(rollout: Rollout, vocabulary: int) -> list[slice]:
    """Rows of a rollout, as many at a time as LOGITS_AT_ONCE allows."""
    rows = max(1, LOGITS_AT_ONCE // ((rollout.ids.shape[1] + 1) * vocabulary))
    return [slice(i, i + rows) for i in range(0, len(rollout), rows)]


def response_logits(model, rollout: Rollout) -> Tensor:
    """The trainer's logits (B, T, V) for the response tokens. The token at position t is scored by the
    logits at t - 1: the first response token by those of the last prompt token."""
    ids = torch.cat([rollout.prompt_ids, rollout.ids], 1)                    # (B, P + T)
    attention = torch.cat([rollout.prompt_mask, rollout.mask], 1).long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)                       # padding on the left does not count
    T = rollout.ids.shape[1]
    return model(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False,
                 logits_to_keep=T + 1).logits[:, :-1]


def head_in_float32(model) -> None:
    """From now on the output layer of `model` computes in float32, whatever the layers before it and autocast do: half
    of a bf16 engine's error comes from there (MiniMax-M1, arXiv 2506.13585). A deep copy of the model keeps it."""
    def forward(head, hidden):
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.float(), head.weight.float())
    model.lm_head.forward = MethodType(forward, model.lm_head)


def token_logp(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at `ids`, in float32 (float64 logits stay float64).
    logits (..., T, V), ids (..., T) or (..., T, K) -> nats in the shape of ids."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(-1, ids) if ids.dim() == logits.dim() else logp.gather(-1, ids[..., None])[..., 0]


def score(model, rollout: Rollout, head: bool = False, grad: bool = False):
    """log pi of the sampled tokens (B, T) in nats, 0 on padding; with `head` also of the recorded
    head ids (B, T, K). Micro-batched, with dropout off, without gradient unless `grad`. Raises ValueError
    for a token that the model does not have (an engine may pad its vocabulary)."""
    model.eval()
    V, parts = model.config.get_text_config().vocab_size, []
    largest = max(int(ids.max()) for ids in (rollout.ids, rollout.head_ids) if ids.numel())
    if largest >= V:
        raise ValueError(f"the engine used token {largest}, but the trainer's vocabulary has {V}: they must be the same model")
    with torch.set_grad_enabled(grad):
        for rows in micro_batches(rollout, V):
            part = rollout[rows]
            ids = torch.cat([part.ids[..., None], part.head_ids], -1) if head else part.ids[..., None]
            parts.append(token_logp(response_logits(model, part), ids, part.temperature))      # one log-softmax for all ids
        logps = torch.cat(parts)                                                               # (B, T, 1 + K)
        logp = torch.where(rollout.mask, logps[..., 0], 0.0)
    return (logp, logps[..., 1:]) if head else logp


def gap(logp: Tensor, logp_sampler: Tensor) -> dict:
    """The gap of n sampled tokens, from log pi and log mu (n,), nats."""
    d = (logp - logp_sampler).double()
    return {
        "abs": d.abs().mean().item(),
        "rms": d.square().mean().sqrt().item(),
        "max": d.abs().max().item(),
        "mean": d.mean().item(),
        # k3 = E[exp(d) - 1 - d], http://joschu.net/blog/kl-approx.html; expm1 keeps its small values
        "k3": (torch.expm1(d) - d).mean().item(),
        "outside": ((d.exp() < 0.8) | (d.exp() > 1.25)).double().mean().item(),
        # exp(-mean log pi) / exp(-mean log mu) - 1
        "ppl": torch.expm1(-d.mean()).item(),
        # E_mu[exp(d)], 1 if mu is what sampled
        "weight": d.exp().mean().item(),
    }


# ---------------------------------------------------------------- the measurement
def one_step(model, rollout: Rollout, R: Tensor, lr: float) -> None:
    """One REINFORCE step of AdamW on the rollout: the trainer is now one step ahead of the sampler."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    logp = score(model, rollout, grad=True)
    (-((R - R.mean()).to(DEVICE)[:, None] * logp).sum() / rollout.mask.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def bf16_logp(model, rollout: Rollout) -> Tensor:
    """The bug: log-softmax in bfloat16."""
    with torch.no_grad():
        return torch.cat([response_logits(model, rollout[rows]).bfloat16().log_softmax(-1).gather(
            -1, rollout[rows].ids[..., None])[..., 0].float()
            for rows in micro_batches(rollout, model.config.get_text_config().vocab_size)])


def record(arms: dict, kind: str, name: str, mask: Tensor, logp: Tensor, logp_other: Tensor) -> None:
    """Adds one seed's log-probs of the response tokens, trainer's and sampler's, to an arm."""
    arms.setdefault(name, (kind, []))[1].append((logp[mask], logp_other[mask]))


def precision_arms(arms: dict, roll_fp16: Rollout, roll_head: Rollout, fp32, fp16, bf16_head) -> None:
    """What a system can do about the gap: float16 on both sides (its mantissa is 8 times finer than bfloat16's; arXiv
    2510.26788), or the output layer in float32 on both sides."""
    for name, roll, trainer in (("fp16 engine | fp16 trainer", roll_fp16, fp16), ("fp16 engine | fp32 trainer", roll_fp16, fp32),
                                ("bf16, fp32 heads | bf16 trainer", roll_head, bf16_head), ("bf16, fp32 head | fp32 trainer", roll_head, fp32)):
        record(arms, "precision", name, roll.mask, score(trainer, roll), roll.logp_sampler)


def healthy_arms(arms: dict, errors: dict, roll16: Rollout, roll32: Rollout, fp32, bf16, exact) -> None:
    """The control, the natural gap of three pairs with each side's error against `exact`, the batch's shape."""
    record(arms, "control", "fp32 trainer twice", roll16.mask, score(fp32, roll16), score(fp32, roll16))
    record(arms, "control", "fp32 engine | fp32 trainer", roll32.mask, score(fp32, roll32), roll32.logp_sampler)
    for name, roll, trainer in (("bf16 engine | bf16 trainer", roll16, bf16), ("bf16 engine | fp32 trainer", roll16, fp32),
                                ("fp32 engine | bf16 trainer", roll32, bf16)):
        logp, truth = score(trainer, roll), score(exact, roll)
        record(arms, "natural", name, roll.mask, logp, roll.logp_sampler)
        errors.setdefault(name, []).append(torch.stack([roll.logp_sampler - truth, logp - truth])[:, roll.mask])
    for name, trainer in ("fp32", fp32), ("bf16", bf16):
        alone = torch.cat([score(trainer, roll16[i:i + 1]) for i in range(len(roll16))])
        record(arms, "batch shape", f"{name} trainer: batch | row alone", roll16.mask, score(trainer, roll16), alone)


def bug_arms(arms: dict, roll16: Rollout, sample, fp32, ahead, engine16: Sampler, engine_raw: Sampler) -> None:
    """The bugs: each is put into "bf16 engine | fp32 trainer" and taken out again. sample(engine, **changes) draws the
    same prompts; `ahead` is the trainer one optimizer step later."""
    def bug(name, rollout, logp):
        record(arms, "bug", name, rollout.mask, logp, rollout.logp_sampler)

    cold = sample(engine16, temperature=0.7)
    bug("temperature 0.7 in sampler only", cold, score(fp32, replace(cold, temperature=1.0)))
    cold = sample(engine_raw, temperature=0.7)
    bug("raw log-probs at T = 0.7", cold, score(fp32, cold))
    truncated = sample(engine16, top_k=3)
    bug("top-k 3 in sampler only", truncated, score(fp32, truncated))
    bug("bf16 log-softmax", roll16, bf16_logp(fp32, roll16))
    bug("weights one step stale", roll16, score(ahead, roll16))
    if fp32.config.tie_word_embeddings:
        engine16.load(dict(ahead.named_parameters()))            # no lm_head.weight among them
        headless = sample(engine16)
        bug("tied head lost in the sync", headless, score(ahead, headless))
        engine16.sync(fp32)
    again = sample(engine16)
    record(arms, "control", "back at bf16 engine | fp32 trainer", again.mask, score(fp32, again), again.logp_sampler)


def measure(path: str, fp32, seed: int, quick: bool) -> tuple[dict, list]:
    """Every arm, over several seeds of the sampling; fp32: the trainer. Returns {arm: (kind, [(log pi, log mu) a seed])} on
    the response tokens, and for each pair of engines its two errors against float64."""
    tokenizer, task = transformers.AutoTokenizer.from_pretrained(path), TASKS["sum"]
    tiny = is_tiny(tokenizer)
    n, repeats = (256 if tiny else 64) // (8 if quick else 1), 2 if quick else 4
    max_tokens, lr = (task.max_tokens, 1.5e-3) if tiny else (256, 1e-6)
    bf16 = load_model(path, torch.bfloat16)
    exact = copy.deepcopy(bf16).double()          # float64 arithmetic on the bf16-rounded weights
    fp16, bf16_head = load_model(path, torch.float16), load_model(path, torch.bfloat16)
    head_in_float32(bf16_head)
    engine16, engine32, engine_fp16 = (Sampler(path, dtype, gpu_memory_utilization=0.15) for dtype in ("bfloat16", "float32", "float16"))
    engine_head = Sampler(path, "bfloat16", head_fp32=True, gpu_memory_utilization=0.15)
    engine_raw = Sampler(path, "bfloat16", logprobs_mode="raw_logprobs", gpu_memory_utilization=0.15)
    digits, prompts = make_prompts(task, tokenizer, n, np.random.default_rng(seed))
    arms, errors = {}, {}
    for repeat in tqdm(range(repeats), desc="measuring"):
        def sample(engine, **changes):
            return engine.sample(prompts, max_tokens, seed=[seed, repeat], **changes)
        roll16, roll32 = sample(engine16), sample(engine32)
        healthy_arms(arms, errors, roll16, roll32, fp32, bf16, exact)
        precision_arms(arms, sample(engine_fp16), sample(engine_head), fp32, fp16, bf16_head)
        ahead = copy.deepcopy(fp32)
        one_step(ahead, roll16, rewards(task, digits, roll16, tokenizer), lr)
        bug_arms(arms, roll16, sample, fp32, ahead, engine16, engine_raw)
    return arms, [(name, torch.cat(e, 1).double()) for name, e in errors.items()]


def explain(errors: list) -> list[dict]:
    """Each pair's rms gap from its two errors e against float64, d = e_trainer - e_engine:
    rms^2 = rms_engine^2 + rms_trainer^2 - 2 corr rms_engine rms_trainer, corr = E[e e'] / (rms rms'). With
    the measured corr that is an identity, a check of the bookkeeping; corr = 0 is the prediction."""
    rows = []
    for name, (engine, trainer) in errors:
        rms_engine, rms_trainer = (e.square().mean().sqrt().item() for e in (engine, trainer))
        corr = (engine * trainer).mean().item() / max(rms_engine * rms_trainer, 1e-30)
        independent = rms_engine**2 + rms_trainer**2
        rows.append({"pair": name, "engine": rms_engine, "trainer": rms_trainer, "corr": corr,
                     "predicted": max(0.0, independent - 2 * corr * rms_engine * rms_trainer)**0.5,
                     "independent": independent**0.5,
                     "measured": (trainer - engine).square().mean().sqrt().item()})
    return rows


def by_probability(logp: Tensor, logp_sampler: Tensor) -> list[dict]:
    """Mean |d| against the sampled token's probability. Noise eps on a token's log-odds moves its
    log-prob by (1 - p) eps (confidence-dependent IS, arXiv 2609.32444): |d| = eps (1 - p), with one eps,
    fitted to the overall mean, for all bins."""
    p, d = logp_sampler.exp().double(), (logp - logp_sampler).abs().double()
    eps = (d.mean() / (1 - p).mean()).item()
    edges = [0, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97, 1.01]
    rows = []
    for low, high in zip(edges, edges[1:]):
        here = (p >= low) & (p < high)
        if here.sum() >= 10:
            rows.append({"p": p[here].mean().item(), "n": int(here.sum()), "measured": d[here].mean().item(),
                         "error": (d[here].std() / here.sum()**0.5).item(),
                         "predicted": eps * (1 - p[here]).mean().item()})
    return rows


# ---------------------------------------------------------------- table, laws, picture
def summarise(arms: dict, errors: list) -> dict:
    """The numbers of the lesson, ready for JSON."""
    table = []
    for name, (kind, pairs) in arms.items():
        each = [gap(*pair)["abs"] for pair in pairs]
        logp, logp_sampler = (torch.cat(x) for x in zip(*pairs))
        d, p = logp - logp_sampler, logp_sampler.exp()
        table.append({"kind": kind, "arm": name, "tokens": len(d), "spread": float(np.std(each, ddof=1)),
                      **gap(logp, logp_sampler), "positive": (d > 0).double().mean().item(),
                      "likely": d[p > 0.5].mean().item(), "unlikely": d[p < 0.5].mean().item()})
    natural = [torch.cat(x) for x in zip(*arms["bf16 engine | fp32 trainer"][1])]
    bug = [torch.cat(x) for x in zip(*arms["temperature 0.7 in sampler only"][1])]
    points = {name: [[round(v, 4) for v in x[:800].tolist()] for x in pair]
              for name, pair in (("natural", natural), ("temperature 0.7 in sampler only", bug))}
    return {"table": table, "why": explain(errors), "probability": by_probability(*natural), "points": points}


def report(result: dict) -> None:
    """The tables: the arms, what theory predicts beside what was measured, the bugs' fingerprints."""
    rows = {row["arm"]: row for row in result["table"]}
    natural, again = rows["bf16 engine | fp32 trainer"], rows["back at bf16 engine | fp32 trainer"]
    print(f"\n{'':36}mean |d| ± seeds       rms      max    mean d       k3  % outside  ppl gap %  E[exp d]")
    kind = None
    for row in result["table"]:
        if row["kind"] != kind:
            kind = row["kind"]
            print(f"-- {kind}")
        print(f"{row['arm']:36}{row['abs']:8.2e} ± {row['spread']:.0e}  {row['rms']:8.1e} {row['max']:8.1e} {row['mean']:9.1e} "
              f"{row['k3']:8.1e} {100 * row['outside']:10.2f} {100 * row['ppl']:10.3f} {row['weight']:9.4f}")

    print(f"\n{'':66}predicted |  measured")
    laws = [("the trainer against itself: mean |d|", 0, rows["fp32 trainer twice"]["abs"]),
            ("back at the baseline after all bugs: change of mean |d|", 0, again["abs"] - natural["abs"])]
    for why in result["why"]:
        pair, row = why["pair"], rows[why["pair"]]
        laws += [(f"{pair}: k3 = rms^2 / 2, d being small", row["rms"]**2 / 2, row["k3"]),
                 (f"{pair}: E_mu[exp d] - 1, s.e. {row['rms'] / row['tokens']**0.5:.0e}", 0, row["weight"] - 1),
                 (f"{pair}: rms gap from independent errors", why["independent"], why["measured"]),
                 (f"{'':17} ... and from their correlation, {why['corr']:+.2f} (identity)", why["predicted"], why["measured"])]
    for law, predicted, measured in laws:
        print(f"{law:66}{predicted:9.4g} | {measured:9.4g}")

    print("\nwhose error is it? rms against float64 arithmetic on the bf16-rounded weights (an fp32 side computes exactly, on "
          "unrounded weights: its error is the rounding of the weights)")
    for why in result["why"]:
        print(f"{why['pair']:36}engine {why['engine']:.2e}   trainer {why['trainer']:.2e}")
    print("\nmean |d| against the probability p of the sampled token:   eps (1 - p), eps fitted | measured")
    for row in result["probability"]:
        print(f"  p about {row['p']:.4f}, {row['n']:5d} tokens{row['predicted']:48.1e} | {row['measured']:.1e} ± {row['error']:.0e}")
    print("\nfingerprints                        size x natural   mean d where p > 1/2   where p < 1/2   share of d > 0")
    for row in result["table"]:
        if row["kind"] == "bug" or row is natural:
            print(f"{row['arm']:36}{row['abs'] / natural['abs']:14.1f}{row['likely']:23.1e}{row['unlikely']:16.1e}{row['positive']:17.2f}")


def draw(result: dict, path: Path) -> None:
    """The picture, from the JSON alone."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows = {r["arm"]: r for r in result["table"]}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.4))
    for (name, (logp, logp_sampler)), marker, shade in zip(result["points"].items(), "x.", ("0.6", "0.0")):
        left.plot(logp_sampler, logp, marker, color=shade, markersize=4, label=name, zorder=3 - len(marker))
    low = min(min(p[1]) for p in result["points"].values())
    left.plot([low, 0], [low, 0], "k-", linewidth=0.6)
    left.set(xlabel="log mu, engine (nats)", ylabel="log pi, trainer (nats)",
             title="Same weights, two engines:\non the diagonal but for a bug")
    left.legend()
    odds = [np.log(r["p"] / (1 - r["p"])) for r in result["probability"]]
    middle.errorbar(odds, [r["measured"] for r in result["probability"]], [r["error"] for r in result["probability"]], fmt="ko-", label="measured")
    middle.plot(odds, [r["predicted"] for r in result["probability"]], "k--", label="eps (1 - p), one eps fitted")
    middle.set(xlabel="log-odds of the sampled token, log p / (1 - p)", ylabel="mean |d| (nats)", yscale="log",
               title="bf16 engine | fp32 trainer:\na certain token hardly moves")
    middle.legend()
    x = np.arange(len(result["why"]))
    for shift, key, shade, label in ((-0.15, "measured", "0.3", "measured"), (0.15, "independent", "0.8", "predicted: independent errors")):
        right.bar(x + shift, [r[key] for r in result["why"]], 0.28, color=shade, edgecolor="k", label=label)
    for i, row in enumerate(result["why"]):
        right.text(i, 1.02 * max(row["measured"], row["independent"]), f"corr {row['corr']:+.2f}", ha="center")
    right.set_xticks(x, [r["pair"].replace(" | ", "\n") for r in result["why"]])
    right.set(ylabel="rms gap (nats)", ylim=(0, 1.45 * max(r["measured"] for r in result["why"])),
              title=f"Two rounding errors make the gap\n(rms of fp32 against fp32: {rows['fp32 engine | fp32 trainer']['rms']:.0e})")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---------------------------------------------------------------- the command line
class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line on stderr and exits with code 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def seed(text: str) -> int:
    """An argparse type: what every random generator here takes."""
    value = int(text)
    if not 0 <= value < 2**32:
        raise ValueError
    return value


def check_writable(folder: Path) -> None:
    """Makes the folder and writes a file there. Raises ValueError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"writable.{os.getpid()}.tmp"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out {folder} cannot be written: {error.strerror}") from error


def check_vllm() -> None:
    """Raises ValueError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vllm is not installed: pip install -r requirements.txt")


def save_json(result: dict, path: Path) -> dict:
    """Written beside its place and renamed: never half a file. NaN, which JSON does not know, becomes null.
    Returns the result as it will be read back."""
    def plain(x):
        if isinstance(x, dict):
            return {str(k): plain(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [plain(v) for v in x]
        return None if isinstance(x, float) and not np.isfinite(x) else x
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".tmp")
    new.write_text(json.dumps(plain(result), indent=1, allow_nan=False) + "\n")
    os.replace(new, path)
    return plain(result)


def lesson_arguments(prog: str, doc: str, argv, study: str | None = None, architecture: dict | None = None) -> tuple:
    """A lesson's flags (`study`: what its --study adds), the path of its model (by default the tiny policy of that `architecture`, if
    there is one), and the trainer loaded from there. Exits with code 2 and one line if any of them is bad."""
    parser = Parser(prog=prog, description=doc.split("\n")[0])
    parser.add_argument("--model", help="a local directory or a hub name (default: "
                        + ("a tiny mixture of experts)" if architecture else f"{HUB_MODEL} on a GPU, else the tiny policy)"))
    parser.add_argument("--seed", type=seed, default=0, help="of the prompts and of the sampling, 0 to 2^32 - 1")
    parser.add_argument("--quick", action="store_true", help="the same experiment, smaller")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the picture (figures; where any other flag is given, "
                        "runs/<lesson>, so that what the README shows stays)")
    if study:
        parser.add_argument("--study", action="store_true", help=study)
    args = parser.parse_args(argv)
    args.changed = bool(args.model is not None or args.seed or args.quick)
    if study and args.study and args.changed:
        parser.error("--study is one fixed experiment on the tiny policy: it goes with --out and no other flag")
    args.out = args.out or (ROOT / "runs" / Path(prog).stem if args.changed else ROOT / "figures")
    try:
        check_vllm()
        check_writable(args.out)
        path = find_model(args.model, ARCHITECTURE if study and args.study and architecture is None else architecture)
        trainer = load_model(path)
    except ValueError as error:
        parser.error(str(error))
    return args, path, trainer


def main(argv=None) -> dict:
    """Runs the lesson and returns what its JSON holds. argv as on the command line."""
    args, path, trainer = lesson_arguments("01_mismatch.py", __doc__, argv)
    result = summarise(*measure(path, trainer, args.seed, args.quick))
    result["settings"] = {"model": args.model or ("tiny" if DEVICE.type == "cpu" else HUB_MODEL), "seed": args.seed, "quick": args.quick}
    report(result)
    natural, floor = (next(r for r in result["table"] if r["arm"] == arm) for arm in ("bf16 engine | fp32 trainer", "fp32 engine | fp32 trainer"))
    print(f"\nAt the same weights the two engines differ by {natural['abs']:.1e} nats a token (k3 {natural['k3']:.1e}), "
          f"in fp32 by {floor['abs']:.0e}: the gap is rounding.")
    save_json(result, args.out / "01_mismatch.json")
    draw(result, args.out / "01_mismatch.png")
    print(f"picture: {args.out / '01_mismatch.png'}")
    return result


if __name__ == "__main__":
    main()
