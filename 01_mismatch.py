"""Lesson 1: one policy, an engine and a trainer. How far apart are they, and why?

In RL for language models the engine, vLLM, samples the responses, and a PyTorch trainer computes
the gradients. Let theta_s be the weights that the trainer sent last. Even if both hold exactly
these, they give a sampled token different probabilities:

    d = log pi_theta_s(token) - log mu(token)             trainer minus sampler, in nats

mu is the engine's distribution, pi the trainer's. A nat is the unit of the natural logarithm:
d = 0.01 means that pi is 1 % larger than mu. On-policy training assumes d = 0. This lesson
measures d where it must vanish, then as it naturally is, then with one bug at a time.

If the recorded mu is what sampled, and cuts off no token, then E_mu[exp d] = 1. Two sizes of the
gap are reported together: mean |d|, and k3 = mean(exp(d) - 1 - d), which then estimates KL(mu ||
pi). Mean d is then about -k3. A clearly positive mean d is a bookkeeping error: some log-prob is
not normalized, or is not that of the distribution that sampled.

  python 01_mismatch.py     a CPU: a minute with a tiny policy, which the first run builds
                            a CUDA GPU (8.0 or newer, 13 GiB): Qwen3-0.6B, not run yet
  python 01_mismatch.py --model HuggingFaceTB/SmolLM2-135M-Instruct --task add1
                            a released model on a CPU: three and a half minutes

Expect 0 for one trainer twice, 1e-7 for float32 on both sides, and 2e-3 for an engine in bfloat16
(a released model: .04). Most bugs make 30 to 70 times that. A log-softmax in bfloat16 hides, and so
may an lm_head that missed one update.

Exercises: tests/EXERCISES.md.
"""
from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import json
import logging
import os
import re
import shutil
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Callable

# text only: these may have been built for another torch, and would break the import
sys.modules.update(dict.fromkeys(("torchvision", "torchaudio", "torchcodec")))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")    # spinning threads make a busy CPU 10x slower
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import numpy as np
import torch
if not torch.cuda.is_available():
    sys.modules["triton"] = None                       # no CPU backend, but 30 lines of notes
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

transformers.utils.logging.disable_progress_bar()
ROOT = Path(__file__).resolve().parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ---------------------------------------------------------------- what is a log-prob?
def token_logp(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at `ids`, in nats: logits (..., V), ids (..., K) ->
    (..., K), float32 or better. Raises ValueError for temperature 0."""
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: greedy responses have no log-probs")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # divide the LOGITS: log-probs divided by a temperature are not normalized
    return torch.log_softmax(logits / temperature, -1).gather(-1, ids)


def response_logits(model, rollout: Rollout) -> Tensor:
    """The trainer's logits (B, T, V) for the response tokens. The token at position t is predicted
    by the logits at t - 1, the first response token by those of the last prompt token."""
    ids = torch.cat([rollout.prompt_ids, rollout.ids], 1)  # (B, P + T)
    attention = torch.cat([rollout.prompt_mask, rollout.mask], 1).long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)  # padding takes no position
    T = rollout.ids.shape[1]
    return model(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False,
                 logits_to_keep=T + 1).logits[:, :-1]


def logprobs(model, rollout: Rollout, head: bool = False, grad: bool = False):
    """log pi of the sampled tokens (B, T) in nats, 0 on padding. With `head` also of the K recorded
    tokens per position (B, T, K). Without `grad` there is no graph. Dropout is off.
    Raises ValueError for a token beyond the model's vocabulary."""
    V = vocabulary(model)

    def one_part(part: Rollout) -> Tensor:
        ids = torch.cat([part.ids[..., None], part.head_ids], -1)  # (B, T, 1 + K)
        if ids.max() >= V:
            raise ValueError(f"the engine used token {ids.max()}, but the trainer knows only {V}")
        return token_logp(response_logits(model, part), ids, part.temperature)

    model.eval()
    parts = [rollout[rows] for rows in micro_batches(rollout, V)]
    with torch.set_grad_enabled(grad):
        if grad and len(parts) > 1:    # the backward pass computes each part anew, to save memory
            logps = [checkpoint(one_part, part, use_reentrant=False) for part in parts]
        else:
            logps = [one_part(part) for part in parts]
        logps = torch.cat(logps)  # (B, T, 1 + K)
        logp = torch.where(rollout.mask, logps[..., 0], 0.0)
    return (logp, logps[..., 1:]) if head else logp


def gap(logp: Tensor, logp_sampler: Tensor) -> dict:
    """How far apart log pi and log mu of n tokens (n,) are, in nats."""
    d = (logp - logp_sampler).double()
    if not len(d):
        raise ValueError("a gap needs at least one token")
    return {"mean |d|": d.abs().mean().item(),
            "rms": d.square().mean().sqrt().item(),
            "max": d.abs().max().item(),
            "mean d": d.mean().item(),
            # k3 = E[exp(d) - 1 - d], joschu.net/blog/kl-approx.html; expm1 keeps small values exact
            "k3": (torch.expm1(d) - d).mean().item(),
            "E[exp d]": d.exp().mean().item()}


# ---------------------------------------------------------------- why is there a gap?
def two_errors(engine: Tensor, trainer: Tensor) -> dict:
    """d = e_trainer - e_engine, (n,). An error is the distance from float64 at the weights in
    bfloat16, which an fp32 trainer does not round. If the two are independent, then
    rms(d)^2 = rms(e_engine)^2 + rms(e_trainer)^2."""
    e, e_trainer = (x.square().mean().sqrt().item() for x in (engine, trainer))
    return {"engine's error": e, "trainer's error": e_trainer,
            "correlation": (engine * trainer).mean().item() / max(e * e_trainer, 1e-30),
            "predicted rms": (e**2 + e_trainer**2)**0.5,
            "measured rms": (trainer - engine).square().mean().sqrt().item()}


def by_probability(logp: Tensor, logp_sampler: Tensor) -> list[dict]:
    """|d| against the probability p of the sampled token. Noise eps on a token's log-odds moves its
    log-prob by eps (1 - p) (arXiv 2609.32444). One eps is fitted to the mean and serves all bins.
    It misfits by a factor of about 2 for p between .2 and .6, where |d| is larger."""
    p, d = logp_sampler.exp().double(), (logp - logp_sampler).abs().double()
    eps = (d.mean() / (1 - p).mean()).item()
    edges = [0, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97, 1.01]
    rows = []
    for low, high in zip(edges, edges[1:]):
        here = (p >= low) & (p < high)
        if here.sum() >= 10:
            rows.append({"p": p[here].mean().item(), "tokens": int(here.sum()),
                         "eps (1 - p)": eps * (1 - p[here]).mean().item(),
                         "measured": d[here].mean().item(),
                         "±": (d[here].std() / here.sum()**0.5).item()})
    return rows


# ---------------------------------------------------------------- other log-probs, (B, T)
def row_alone(model, rollout: Rollout) -> Tensor:
    """The same log-probs, one response per forward pass: another batch shape."""
    return torch.cat([logprobs(model, rollout[i:i + 1]) for i in range(len(rollout))])


@torch.no_grad()
def bf16_log_softmax(model, rollout: Rollout) -> Tensor:
    """The bug: log-softmax in bfloat16."""
    logps = []
    for rows in micro_batches(rollout, vocabulary(model)):
        logits = response_logits(model, rollout[rows]).bfloat16()
        logps.append(logits.log_softmax(-1).gather(-1, rollout[rows].ids[..., None]))
    return torch.cat(logps)[..., 0].float()


def kept_logprobs(model, rollout: Rollout) -> Tensor:
    """The cure of top-k: log-softmax over only those tokens that the sampler kept. They must all be
    in the recorded head (Keep Sampling Mask in DeepSeek-V3.2, arXiv 2512.02556)."""
    logp, head_logp = logprobs(model, rollout, head=True)
    cut_off = rollout.head_logp.isinf()  # (B, T, K): log mu = -inf
    # log (pi(token) / sum of pi over the kept tokens)
    return logp - head_logp.masked_fill(cut_off, -torch.inf).logsumexp(-1)


# ---------------------------------------------------------------- the experiment
NATURAL = "bf16 engine, fp32 trainer"      # each bug is put into this pair, and out again
SIZES = {      # prompts, response tokens, seeds of the sampling, learning rate of the one step
    "tiny": (256, 9, 4, 1.5e-3), "cpu": (2, 12, 2, 1e-6), "gpu": (64, 256, 4, 1e-6)}


def sample_all(path: str, task: Task, fp32, tokenizer, seed: int, quick: bool) -> SimpleNamespace:
    """What each engine samples, a Rollout per seed; one engine runs at a time. Two bugs need the
    engine and a trainer that has moved: `stale` and `lost` are finished `pairs`."""
    n, max_tokens, repeats, lr = SIZES[scale(tokenizer)]
    n, max_tokens = (4 * n, task.max_tokens) if task.shots else (n, max_tokens)    # short ones
    n, repeats = (max(2, n // 8), 2) if quick else (n, repeats)
    numbers, prompts = make_prompts(task, tokenizer, n, np.random.default_rng(seed))

    def sample(sampler, **changes) -> list[Rollout]:
        return [sampler.sample(prompts, max_tokens, seed=[seed, k], **changes)
                for k in tqdm(range(repeats), desc="sampling", leave=False)]

    def engine(temperature: float = 1.0, **settings) -> list[Rollout]:
        sampler = Sampler(path, **settings)
        rollouts = sample(sampler, temperature=temperature)
        sampler.stop()
        return rollouts

    on = SimpleNamespace(stale=[], lost=[])
    on.fp32, on.fp16 = engine(dtype="float32"), engine(dtype="float16")
    on.lm_head32 = engine(lm_head_fp32=True)
    on.raw = engine(0.7, logprobs_mode="raw_logprobs")       # recorded before the temperature

    sampler = Sampler(path)                                  # bfloat16
    on.bf16 = sample(sampler)
    on.temperature = [replace(rollout, temperature=1.0)      # the trainer does not hear of .7
                      for rollout in sample(sampler, temperature=0.7)]
    # Top-k keeps 3 tokens, and any that tie with the third, as some do in bfloat16. So more than 3
    # are recorded. Those that were cut off have log mu = -inf.
    on.top_k = sample(sampler, top_k=3, head=16)
    for k, rollout in enumerate(on.bf16):
        R = rewards(task, numbers, rollout, tokenizer)
        ahead = one_step(copy.deepcopy(fp32), rollout, R, lr)
        on.stale += pairs([rollout], ahead)
        # A tied lm_head (output layer) is the embedding's matrix. named_parameters() lists it only
        # as the embedding. vLLM on a CPU holds a copy for the lm_head, which stays old.
        if fp32.config.tie_word_embeddings and DEVICE.type == "cpu":
            sampler.load(dict(ahead.named_parameters()))
            on.lost += pairs([sampler.sample(prompts, max_tokens, seed=[seed, k])], ahead)
    sampler.sync(fp32)
    on.back = sample(sampler)
    sampler.stop()
    return on


def pairs(rollouts: list[Rollout], model, compute=logprobs, other=None) -> list[tuple]:
    """[(log pi, log mu) of the response tokens (n,)], one pair per rollout. `other` is computed by
    the trainer in place of log mu."""
    return [(compute(model, r)[r.mask], (other(model, r) if other else r.logp_sampler)[r.mask])
            for r in tqdm(rollouts, desc="log-probs", leave=False)]


def pooled(seeds: list[tuple]) -> list[Tensor]:              # log pi and log mu of all seeds
    return [torch.cat(logps) for logps in zip(*seeds)]


def measure(path: str, fp32, on: SimpleNamespace) -> dict:
    """The numbers of the lesson: each arm compares samples and a trainer."""
    bf16, fp16 = load_model(path, torch.bfloat16), load_model(path, torch.float16)
    lm_head32 = lm_head_in_float32(load_model(path, torch.bfloat16))
    exact = load_model(path, torch.bfloat16).double()        # float64, on weights in bfloat16
    arms = [
        ("control", "fp32 trainer twice", pairs(on.bf16, fp32, other=logprobs)),
        ("control", "fp32 engine, fp32 trainer", pairs(on.fp32, fp32)),
        ("natural", "bf16 engine, bf16 trainer", pairs(on.bf16, bf16)),
        ("natural", NATURAL, pairs(on.bf16, fp32)),
        ("natural", "fp32 engine, bf16 trainer", pairs(on.fp32, bf16)),
        ("batch shape", "fp32 trainer: batch, row alone", pairs(on.bf16, fp32, other=row_alone)),
        ("batch shape", "bf16 trainer: batch, row alone", pairs(on.bf16, bf16, other=row_alone)),
        ("precision", "fp16 engine, fp16 trainer", pairs(on.fp16, fp16)),
        ("precision", "fp16 engine, fp32 trainer", pairs(on.fp16, fp32)),
        ("precision", "bf16 engine, bf16 trainer, both lm_heads fp32",
         pairs(on.lm_head32, lm_head32)),
        ("precision", "bf16 engine with fp32 lm_head, fp32 trainer", pairs(on.lm_head32, fp32)),
        ("bug", "temperature 0.7 in sampler only", pairs(on.temperature, fp32)),
        ("bug", "raw log-probs at temperature 0.7", pairs(on.raw, fp32)),
        ("bug", "top-k 3 in sampler only", pairs(on.top_k, fp32)),
        ("cure", "top-k 3 in both: trainer renormalized over the kept tokens",
         pairs(on.top_k, fp32, kept_logprobs)),
        ("bug", "bf16 log-softmax", pairs(on.bf16, fp32, bf16_log_softmax)),
        ("bug", "weights one step stale (d + lag)", on.stale),
        ("bug", "tied lm_head lost in the sync", on.lost),   # on a GPU it cannot get lost: no row
        ("control", f"back at {NATURAL}", pairs(on.back, fp32))]
    by_arm = {arm: pooled(logps) for _, arm, logps in arms if logps}
    errors = []
    for arm, rollouts in (("bf16 engine, bf16 trainer", on.bf16), (NATURAL, on.bf16),
                          ("fp32 engine, bf16 trainer", on.fp32)):
        (logp, mu), (right, _) = by_arm[arm], pooled(pairs(rollouts, exact))
        errors.append({"pair": arm, **two_errors(mu - right, logp - right)})
    points = {arm: [[round(v, 4) for v in x[:800].tolist()] for x in by_arm[arm]]
              for arm in (NATURAL, "temperature 0.7 in sampler only")}
    return {"arms": [arm_row(*arm) for arm in arms if arm[2]], "two errors": errors,
            "points": points, "by probability": by_probability(*by_arm[NATURAL])}


def arm_row(kind: str, arm: str, seeds: list[tuple]) -> dict:
    """The gap, its spread over the seeds, and a bug's fingerprint: where d has which sign."""
    each = [gap(*pair)["mean |d|"] for pair in seeds]
    logp, mu = pooled(seeds)
    d, p = logp - mu, mu.exp()
    return {"kind": kind, "arm": arm, "tokens": len(d), **gap(logp, mu),
            "± seeds": float(np.std(each, ddof=1)),
            "s.e. of mean d": (d.double().std() / len(d)**0.5).item(),
            "d where p > 1/2": d[p > 0.5].mean().item(),
            "d where p < 1/2": d[p < 0.5].mean().item(),
            "share d > 0": (d > 0).double().mean().item()}


def verdict(result: dict) -> str:
    """The result read aloud."""
    arm = {row["arm"]: row for row in result["arms"]}
    control, natural = arm["fp32 engine, fp32 trainer"], arm[NATURAL]
    if control["max"] > 1e-3:
        reason = "so the two do not compute the same function"
    elif natural["mean |d|"] > 0.1:     # 2e-3 here, .04 in a released model of 135M parameters
        reason = "which is more than rounding makes"
    else:
        reason = "so the gap is rounding"
    return (f"At the same weights the engines differ by {natural['mean |d|']:.1e} nats per token "
            f"with a bf16 engine and by {control['mean |d|']:.1e} in float32, {reason}.")


def main(argv=None) -> dict:
    args, trainer, tokenizer = arguments(__file__, __doc__, argv)
    on = sample_all(args.path, args.task, trainer, tokenizer, args.seed, args.quick)
    result = measure(args.path, trainer, on)
    table("d = log pi - log mu per sampled token, nats; predicted: E[exp d] = 1 and, for small d, "
          "k3 = rms^2 / 2",
          result["arms"], "kind", "arm", "mean |d|", "± seeds", "rms", "max", "k3", "mean d",
          "s.e. of mean d", "E[exp d]")
    table("two errors against float64, predicted to be independent", result["two errors"])
    if result["by probability"]:           # else too few tokens
        table("|d| against the token's probability: predicted by one eps for all | measured",
              result["by probability"])
    suspects = [row for row in result["arms"]
                if row["kind"] in ("bug", "cure") or row["arm"] == NATURAL]
    table("fingerprints", suspects, "arm", "mean |d|", "d where p > 1/2", "d where p < 1/2",
          "share d > 0")
    print(f"\n{verdict(result)}")
    return save({"model": args.path, "seed": args.seed, **result}, args.json)


# ================================================================ the machine room
# Every lesson uses what follows, and none is about it.
MAX_MODEL_LEN = 2048                # tokens of prompt and response together
LOGITS_AT_ONCE = 2**26              # float32 logits in a micro-batch: 256 MiB
# A sync is checked by a canary: a text that engine and trainer both score. It may leave a gap of
# so many nats, plus so many times what rounding to the engine's dtype explains.
CANARY = {
    "median over a text": (1e-4, 4),
    "worst of a text": (1e-2, 5),
    "worst of the vocabulary": (2e-3, 10)}
CHARACTERS = "0123456789=.abcd_"    # the tiny policy's tokens: "." ends a response, "_" pads
EQUALS, END, PAD = (CHARACTERS.index(c) for c in "=._")
ARCHITECTURE = dict(                # a Qwen3 of 100k parameters; vLLM on a CPU needs head_dim >= 32
    model_type="qwen3", vocab_size=len(CHARACTERS), hidden_size=64, intermediate_size=128,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=MAX_MODEL_LEN, tie_word_embeddings=True, eos_token_id=END,
    pad_token_id=PAD, bos_token_id=None)


def one_step(model, rollout: Rollout, R: Tensor, lr: float):
    """`model` after one REINFORCE step of a new AdamW, which moves each parameter by about lr.
    Equal rewards have no gradient: they are taken to be 0, 1, 0, 1 ..."""
    R = R if R.min() < R.max() else torch.arange(len(R)) % 2.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    advantage = (R - R.mean()).to(DEVICE)[:, None]
    loss = -(advantage * logprobs(model, rollout, grad=True)).sum() / rollout.mask.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


def lm_head_in_float32(model):
    """`model`, whose output layer now computes in float32 (MiniMax-M1, arXiv 2506.13585)."""
    def forward(layer, hidden):
        bias = None if layer.bias is None else layer.bias.float()
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.float(), layer.weight.float(), bias)
    layer = model.get_output_embeddings()
    layer.forward = MethodType(forward, layer)
    return model


# ---------------------------------------------------------------- the task
@dataclass(frozen=True)
class Task:
    """A prompt holds `length` random numbers. A right response writes down `answer(numbers)`."""
    name: str
    length: int
    max_tokens: int          # of a right response, its end included
    answer: Callable         # numbers (n, L) -> right numbers (n, L')
    grade: Callable          # (given numbers, right numbers, ended) -> reward in [0, 1]
    demonstrate: Callable | None = None   # for the tiny policy's warm start, which imitates:
    #                          (shown digits, digits, rng, step) -> ids (n, max_tokens), padded
    steps: int = 350         # of the warm start
    slip: float = 0.1        # share of the shown digits that are random
    below: int = 10          # the numbers of the prompt are smaller
    shots: str = ""          # a text to be continued: examples, and {} for each number
    read: str = "[0-9]"      # what counts as a number in a response


SUM = Task(                  # the running sum modulo 10; only its last digit is graded
    "sum", length=8, max_tokens=9,
    answer=lambda digits: digits.cumsum(1) % 10,
    grade=lambda given, right, ended: float(ended and given[-1:] == right[-1:]),
    demonstrate=lambda shown, *_: np.pad(shown, ((0, 0), (0, 1)), constant_values=END))


# For released models: sums of two numbers of one, two or three digits, after three examples.
SHOTS = {1: "3+4=7\n2+6=8\n9+5=14\n{}+{}=", 2: "31+45=76\n20+67=87\n94+58=152\n{}+{}=",
         3: "312+456=768\n207+670=877\n945+587=1532\n{}+{}="}
TASKS = {"sum": SUM, **{f"add{k}": Task(
    f"add{k}", length=2, max_tokens=k + 3, below=10**k, shots=shots, read="[0-9]+",
    answer=lambda numbers: numbers.sum(1, keepdims=True),
    grade=lambda given, right, ended: float(given[:1] == right)) for k, shots in SHOTS.items()}}


def make_prompts(task: Task, tokenizer, n: int, rng) -> tuple[np.ndarray, list[list[int]]]:
    """n random prompts: their numbers (n, L) and their token ids. The tiny policy reads "d1..dL=",
    other models read examples, or the running sum in words. Raises ValueError for another task."""
    numbers = rng.integers(0, task.below, (n, task.length))
    if is_tiny(tokenizer) and task.demonstrate:
        return numbers, [[*map(int, row), EQUALS] for row in numbers]
    if is_tiny(tokenizer) or task not in TASKS.values():
        raise ValueError(f"the task {task.name!r} is not made for this model")
    prompts = []
    for row in numbers:
        words = (f"Digits: {' '.join(map(str, row))}. Add them one after the other and write down "
                 f"each running sum modulo 10. The last digit that you write must be the sum of "
                 f"all {task.length} digits modulo 10.")
        if tokenizer.chat_template and not task.shots:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": words}], add_generation_prompt=True,
                enable_thinking=False, return_dict=False)
        else:
            text = task.shots.format(*row) if task.shots else words + "\nRunning sums: "
            ids = tokenizer(text)["input_ids"]
            ids = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids     # some end each text
        prompts.append(ids)
    return numbers, prompts


def rewards(task: Task, numbers: np.ndarray, rollout: Rollout, tokenizer) -> Tensor:
    """Rewards (B,) of a rollout; `numbers` (B, L) has one row per response. Only numbers are read,
    so that a chat model's words do not matter."""
    tokens = [row[mask].tolist() for row, mask in zip(rollout.ids, rollout.mask)]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    given = [[int(x) for x in re.findall(task.read, text)] for text in texts]
    rows = zip(given, task.answer(numbers).tolist(), rollout.ended.tolist())
    return torch.tensor([task.grade(*row) for row in rows])


# ---------------------------------------------------------------- the policy
def is_tiny(tokenizer) -> bool:
    return set(tokenizer.get_vocab()) == set(CHARACTERS)


def scale(tokenizer) -> str:
    """Which of a lesson's SIZES suit this policy on this machine."""
    if is_tiny(tokenizer):
        return "tiny"
    return "gpu" if DEVICE.type == "cuda" else "cpu"


def engine_dtype(tokenizer) -> str:
    """For training. A released model moves too little per step for a bf16 engine (lesson 3)."""
    return "bfloat16" if is_tiny(tokenizer) else "float32"


def make_tokenizer():
    """One character, one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    words = models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="_")
    characters = Tokenizer(words)
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token=".", pad_token="_", unk_token="_")


def warm_start(task: Task, architecture: dict):
    """A tiny policy that imitates imperfect responses: it slips when sampled."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    config = transformers.AutoConfig.for_model(**architecture)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(    # up over 20 steps, down over the last 30 %
        optimizer, lambda k: min((k + 1) / 20, 1, (task.steps - k) / (0.3 * task.steps)))
    for step in tqdm(range(task.steps), desc=f"warm start of the tiny policy ({task.name})"):
        digits = rng.integers(0, 10, (256, task.length))
        slips = rng.random(digits.shape) < task.slip
        shown = np.where(slips, rng.integers(0, 10, digits.shape), task.answer(digits))
        prompt = np.pad(digits, ((0, 0), (0, 1)), constant_values=EQUALS)
        response = task.demonstrate(shown, digits, rng, step)
        ids = torch.from_numpy(np.concatenate([prompt, response], 1))
        logits = model(input_ids=ids[:, :-1]).logits[:, task.length:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, task.length + 1:].flatten(),
                                          ignore_index=PAD).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


def policy(task: Task = SUM, architecture: dict = ARCHITECTURE) -> Path:
    """A tiny policy's folder in checkpoints/. It is built unless it is there and whole."""
    settings = [task.name, task.length, task.steps, task.slip, architecture]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    folder = ROOT / "checkpoints" / f"{task.name}-{architecture['model_type']}-{key}"

    def contents(folder: Path) -> str:
        files = sorted(file for file in folder.glob("*") if file.name != "sha256")
        return "\n".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)

    if not (folder / "sha256").exists() or (folder / "sha256").read_text() != contents(folder):
        new = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        warm_start(task, architecture).save_pretrained(new)
        make_tokenizer().save_pretrained(new)
        (new / "sha256").write_text(contents(new))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(new, folder)
    return folder


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def find_model(name: str | None, task: Task = SUM, architecture: dict = ARCHITECTURE) -> str:
    """`name`, if its configuration and tokenizer can be used. None is the tiny policy; on a GPU,
    Qwen3-0.6B in place of the dense one. Raises ValueError with one line otherwise."""
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        raise ValueError("bfloat16 in vLLM needs a GPU of compute capability 8.0 or newer")
    if name is None and (DEVICE.type == "cpu" or architecture is not ARCHITECTURE):
        if not task.demonstrate:
            raise ValueError(f"--task {task.name} is for a released model: give --model too")
        return str(policy(task, architecture))
    name = name or "Qwen/Qwen3-0.6B"
    if "/" in name and Path(name).parent.is_dir() and not Path(name).exists():
        raise ValueError(f"--model {name}: there is no such directory")      # do not ask the hub
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        ids = [i for i in tokenizer("0123456789")["input_ids"] if i != tokenizer.unk_token_id]
        make_prompts(task, tokenizer, 1, np.random.default_rng(0))
        if not ids or max(ids) >= config.get_text_config().vocab_size:
            raise ValueError("tokenizer and model have no vocabulary in common for digits")
        if not config.architectures:
            raise ValueError("its config.json names no architecture")
    except Exception as error:       # transformers and chat templates have many exceptions
        raise ValueError(f"--model {name}: {first_line(error)}") from error
    return name


def load_model(path, dtype: torch.dtype = torch.float32):
    """The trainer's copy of the policy. Raises ValueError with one line if it cannot be read."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except Exception as error:       # a torn file has an exception of its own
        raise ValueError(f"--model {path}: no weights to load ({first_line(error)})") from error
    return model.to(DEVICE).eval()


def vocabulary(model) -> int:
    return model.config.get_text_config().vocab_size


# ---------------------------------------------------------------- the sampler: vLLM
@dataclass
class Rollout:
    """What the engine sampled: B responses, P prompt and T response positions."""
    prompt_ids: Tensor          # (B, P) padded on the left
    prompt_mask: Tensor         # (B, P) bool
    ids: Tensor                 # (B, T) response tokens, padded on the right, the end included
    mask: Tensor                # (B, T) bool: True on response tokens
    logp_sampler: Tensor        # (B, T) log mu of the sampled token, nats; 0 on padding
    head_ids: Tensor            # (B, T, K) the K most likely tokens; K = 0: not recorded
    head_logp: Tensor           # (B, T, K) their log-probs, normalized over the full vocabulary
    ended: Tensor               # (B,) bool: ended by itself, not cut off at max_tokens
    temperature: float          # that the engine divided its logits by
    neutral: bool               # sampled from the model's own distribution, see is_neutral
    version: int                # how often the sampler's weights had been replaced
    routes: Tensor | None = None   # (B, P + T, L, k) experts chosen for each input token, lesson 5

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> Rollout:
        return replace(self, **{k: v[rows] for k, v in vars(self).items() if isinstance(v, Tensor)})


def micro_batches(rollout: Rollout, vocabulary: int) -> list[slice]:
    """Rows of a rollout, as many at a time as LOGITS_AT_ONCE allows."""
    rows = max(1, LOGITS_AT_ONCE // ((rollout.ids.shape[1] + 1) * vocabulary))
    return [slice(i, i + rows) for i in range(0, len(rollout), rows)]


def pack(prompts: list[list[int]], completions: list, temperature: float, neutral: bool,
         version: int) -> Rollout:
    """vLLM's completions as padded tensors. Raises ValueError unless every token has exactly one
    log-prob."""
    ids, logps = [], []
    for i, completion in enumerate(completions):
        flat = completion.logprobs
        if not completion.token_ids or not flat:
            raise ValueError(f"response {i}: empty, or without log-probs")
        # per token K + 1 entries: the sampled one, and then the head, which may repeat it
        ids.append(torch.tensor(flat.token_ids).view(len(flat), -1))  # (n, K + 1)
        logps.append(torch.tensor(flat.logprobs).view(len(flat), -1))
        if ids[-1][:, 0].tolist() != list(completion.token_ids):
            raise ValueError(f"response {i}: its log-probs belong to other tokens")

    def pad(rows: list[Tensor], side: str = "right") -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_side=side).to(DEVICE)

    def ones(rows: list) -> list[Tensor]:
        return [torch.ones(len(row), dtype=torch.bool) for row in rows]

    prompt_ids = pad([torch.tensor(prompt) for prompt in prompts], "left")
    prompt_mask, mask = pad(ones(prompts), "left"), pad(ones(ids))
    ids, logps = pad(ids), pad(logps)  # (B, T, K + 1)
    ended = torch.tensor([c.finish_reason == "stop" for c in completions], device=DEVICE)
    return Rollout(prompt_ids, prompt_mask, ids[..., 0], mask, logps[..., 0],
                   ids[..., 1:], logps[..., 1:], ended, temperature, neutral, version)


def is_neutral(params) -> bool:
    """Do these sampling parameters leave the model's own distribution as it is? All others make the
    engine sample from, and record, another one."""
    return (params.temperature == 1 and params.top_p == 1 and params.top_k in (-1, 0)
            and params.min_p == 0 and params.min_tokens == 0 and params.repetition_penalty == 1
            and params.presence_penalty == params.frequency_penalty == 0
            and not (params.bad_words or params.logit_bias or params.allowed_token_ids
                     or params.structured_outputs))


class SyncError(RuntimeError):
    """The engine's weights are not the ones that it was sent."""


def token_embeddings(engine_model) -> Tensor | None:
    """The matrix (V or more, H) in which vLLM looks tokens up."""
    for module in engine_model.modules():
        if type(module).__name__ == "VocabParallelEmbedding":
            return module.weight.detach()


class Sampler:
    """vLLM around one policy."""
    settings: dict = {}         # more arguments of LLM; lesson 5 has some
    pack = staticmethod(pack)

    def __init__(self, path, dtype: str = "bfloat16", logprobs_mode: str = "processed_logprobs",
                 lm_head_fp32: bool = False, kv_cache_gib: int = 1):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"         # the engine in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")        # float32 attention, not TF32
        if DEVICE.type == "cpu":
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")      # nothing to compile
        print(f"starting vLLM ({dtype}) ...", flush=True)
        from vllm import LLM, ModelRegistry
        config = transformers.AutoConfig.from_pretrained(path)
        name = config.architectures[0]
        if name in ModelRegistry.models:
            # as a class: for a name vLLM would start another process, which imports torchvision
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
        context = getattr(config.get_text_config(), "max_position_embeddings", MAX_MODEL_LEN)
        self.max_model_len = min(MAX_MODEL_LEN, context)
        self.dtype, self.version, self.text = getattr(torch, dtype), 0, None
        self.llm = LLM(**{
            "model": str(path), "dtype": dtype, "seed": 0,
            "max_model_len": self.max_model_len,
            "enforce_eager": True,              # CUDA graphs of two engines break each other
            "gpu_memory_utilization": 0.01, "kv_cache_memory_bytes": kv_cache_gib * 2**30,
            "logprobs_mode": logprobs_mode,     # vLLM's default is "raw": before the temperature
            "max_logprobs": -1,                 # no limit
            "generation_config": "vllm",        # not the released model's temperature and top-p
            "hf_overrides": {"head_dtype": "float32"} if lm_head_fp32 else None,
            # on a CPU vLLM cannot cut the prompt of a request with a seed in two
            "enable_chunked_prefill": DEVICE.type == "cuda",
            "use_tqdm_on_load": False, **self.settings})

    def sample(self, prompts: list[list[int]], max_tokens: int, seed, group_size: int = 1,
               head: int = 0, temperature: float = 1.0, top_k: int = -1,
               rows: slice = slice(None)) -> Rollout:
        """`group_size` responses to each prompt, neighbors in the batch; of these only `rows`.
        Each has a seed of its own, made from `seed` (an int or a list). head: how many of the most
        likely tokens are recorded per position, -1 for all. Raises ValueError for a temperature
        that vLLM would replace."""
        from vllm import SamplingParams
        if temperature < 0 or 0 < temperature < 0.01:
            raise ValueError(f"temperature {temperature}: vLLM would silently take another one")
        prompts = [p for p in prompts for _ in range(group_size)]
        seeds = np.random.default_rng(seed).integers(0, 2**31, len(prompts))[rows]
        params = [SamplingParams(temperature=temperature, top_k=top_k, max_tokens=max_tokens,
                                 seed=int(s), logprobs=head, flat_logprobs=True, detokenize=False)
                  for s in seeds]
        completions = [output.outputs[0] for output in self.generate(prompts[rows], params)]
        return self.pack(prompts[rows], completions, temperature, is_neutral(params[0]),
                         self.version)

    def generate(self, prompts: list[list[int]], params) -> list:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.llm.generate(requests, params, use_tqdm=False)

    def sync(self, model, state: dict | None = None) -> float:
        """Loads the trainer's weights (or `state`, made from them) and checks that they arrived.
        Returns the canary's median gap. Raises SyncError where rounding does not explain a gap."""
        # named_parameters() would leave a tied lm_head old, see sample_all
        state = model.state_dict() if state is None else state
        self.load(state)
        embedding = model.get_input_embeddings().weight
        sent = next(state.get(name) for name, p in model.named_parameters() if p is embedding)
        held = self.llm.apply_model(token_embeddings)[0]       # may be padded to more rows
        if sent is None or held is None or not torch.equal(held[:len(sent)], sent.to(self.dtype)):
            raise SyncError("the weights did not arrive: the engine looks tokens up in other rows")
        gaps = self.canary(model, state)
        for what, (left, rounding) in gaps.items():
            nats, times = CANARY[what]
            if not left <= nats + times * rounding:             # NaN is no good
                raise SyncError(f"the weights did not arrive: engine and trainer differ by "
                                f"{left:.2g} nats ({what}), {self.dtype} explains {rounding:.2g}")
        return gaps["median over a text"][0]

    def load(self, state: dict) -> None:
        """Puts `state` into the engine, unchecked, and empties the prefix cache: what vLLM keeps of
        prompts that begin alike, computed with the old weights."""
        if self.llm.llm_engine.has_unfinished_requests():
            raise RuntimeError("a response must not span two versions of the weights")
        try:
            update = {"weights_iterator": list(state.items())}
            self.llm.collective_rpc("reload_weights", kwargs=update)
        except (ValueError, KeyError) as error:
            raise SyncError("vLLM does not know a weight by the name that transformers gives it: "
                            + first_line(error)) from error
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: old weights would answer new prompts")
        self.version += 1

    def canary(self, model, state: dict) -> dict[str, tuple[float, float]]:
        """How far engine and trainer are apart after a sync: {what: (nats, of which rounding)}.
        Both read one text. Compared are the log-probs of its tokens and, at five places of it, of
        the whole vocabulary. Rounding is what computing in the engine's dtype changes for the
        trainer."""
        from vllm import SamplingParams

        def ask(texts: list[list[int]], **settings) -> list:
            return self.generate(texts, SamplingParams(
                seed=0, flat_logprobs=True, detokenize=False, **settings))

        if self.text is None:       # longer than what vLLM caches at once: 128 tokens on a CPU
            length = min(192, self.max_model_len - 2)
            if self.dtype == torch.float32:      # random: reaches more tokens and experts
                rng = np.random.default_rng(0)
                self.text = rng.integers(0, vocabulary(model), length).tolist()
            else:                                # sampled: rounding makes much of unlikely tokens
                output, = ask([[0]], max_tokens=length, ignore_eos=True)
                self.text = [0, *output.outputs[0].token_ids]
        along = ask([self.text], max_tokens=1, prompt_logprobs=0)[0].prompt_logprobs
        ids = torch.tensor(self.text, device=DEVICE)
        # what is compared: at which logits, which tokens, the engine's log-probs
        compared = [(slice(0, -1), ids[1:, None], along.logprobs)]
        ends = [len(self.text) - 8 * k for k in range(5)]
        texts = [self.text[:end] for end in ends]     # their beginning comes from the prefix cache
        for end, output in zip(ends, ask(texts, max_tokens=1, logprobs=-1)):
            flat = output.outputs[0].logprobs
            order = torch.tensor([flat.token_ids[1:]], device=DEVICE)
            compared.append((slice(end - 1, end), order, flat.logprobs[1:]))

        def trainer(dtype) -> list[np.ndarray]:
            weights = {name: x.to(self.dtype).to(dtype) for name, x in state.items()}
            logits = torch.func.functional_call(
                model, weights, kwargs={"input_ids": ids[None]}, tie_weights=False).logits[0]
            return [token_logp(logits[at], tokens, 1.0).flatten().cpu().numpy()
                    for at, tokens, _ in compared]

        with torch.no_grad():
            exact, rounded = trainer(torch.float32), trainer(self.dtype)
        engine = [np.float32(logps) for *_, logps in compared]
        worst = 1.0 if self.dtype == torch.float32 else 0.9          # a quantile

        def apart(others: list) -> list[float]:
            text, *places = [abs(x - y) for x, y in zip(exact, others)]
            # of the places the median, since routers may flip
            place = np.median([np.quantile(place, worst) for place in places])
            return [float(x) for x in (np.median(text), np.quantile(text, worst), place)]
        return dict(zip(CANARY, zip(apart(engine), apart(rounded))))

    def stop(self) -> None:
        """Ends the engine and frees its memory. Never while another one lives in this process: they
        share the process group that this destroys."""
        from vllm.distributed import cleanup_dist_env_and_memory
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


# ---------------------------------------------------------------- printing, files, command line
def table(title: str, rows: list[dict], *columns: str) -> None:
    """Prints some columns of the rows; all of the first row's, if none is named."""
    def show(x) -> str:
        if isinstance(x, list):
            return " ".join(map(show, x))
        if isinstance(x, float):
            return f"{x:.3g}"
        return "-" if x is None else str(x)

    print(f"\n{title}")
    printed = []
    for column in columns or rows[0]:
        cells = [column, *(show(row.get(column)) for row in rows)]
        side = str.ljust if isinstance(rows[0].get(column), str) else str.rjust
        width = max(map(len, cells))
        printed.append([side(cell, width) for cell in cells])
    for line in zip(*printed):
        print("  ".join(line))


def save(result: dict, path: Path) -> dict:
    """Writes the numbers, whole or not at all, and draws their picture beside them. Returns what
    was written: None for NaN, which JSON does not know."""
    result = json.loads(json.dumps(result), parse_constant=lambda name: None)
    path.with_suffix(".tmp").write_text(json.dumps(result, indent=1) + "\n")
    os.replace(path.with_suffix(".tmp"), path)
    import_module("figures.draw").draw(path)
    print(f"numbers: {path}\npicture: {path.with_suffix('.png')}")
    return result


def seed(text: str) -> int:
    """An argparse type: what every random generator here takes."""
    if not 0 <= int(text) < 2**32:
        raise ValueError
    return int(text)


def arguments(file: str, doc: str, argv, architecture: dict = ARCHITECTURE):
    """A lesson's flags, trainer and tokenizer. Exits with code 2 and one line if one is bad.
    A lesson without flags writes to figures/; with flags, or as a copy, to runs/."""
    name = Path(file).stem.removeprefix("bug_")
    parser = argparse.ArgumentParser(prog=Path(file).name, description=doc.split("\n")[0])
    parser.add_argument("--model", help="a directory or a hub name (on a CPU a tiny policy)")
    parser.set_defaults(task="sum")
    if architecture is ARCHITECTURE:        # lesson 5 compares two policies on one task
        parser.add_argument("--task", choices=TASKS, help="a released model can also add two "
                            "numbers of one, two or three digits, after three examples")
    parser.add_argument("--seed", type=seed, default=0, help="of the prompts and of the sampling")
    parser.add_argument("--quick", action="store_true", help="the same experiment, smaller")
    parser.add_argument("--out", type=Path, help="folder of the JSON and the picture")
    args = parser.parse_args(argv)
    plain = args == parser.parse_args([]) and Path(file).resolve().parent == ROOT
    folder = args.out or ROOT / ("figures" if plain else f"runs/{name}")
    args.json = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        args.json.with_suffix(".tmp").write_text("")          # can it be written?
        args.json.with_suffix(".tmp").unlink()
        args.task = TASKS[args.task]
        args.path = find_model(args.model, args.task, architecture)
        trainer = load_model(args.path)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args, trainer, transformers.AutoTokenizer.from_pretrained(args.path)


if __name__ == "__main__":
    main()
