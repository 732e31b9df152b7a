"""python tests/bench.py: what a step costs beyond what it must, as ratios within one run (a CPU, about 5 minutes).

python tests/bench.py              the tiny policy's steps by correction; vLLM against transformers; growth of time and
                                   memory
python tests/bench.py --full-size  one step at the size of Qwen3-0.6B with random weights: memory, seconds, the cost of
                                   recording the head (10 minutes, 20 GiB)

A random model's answers say nothing that a reward could judge: there the reward is the parity of the response's token
ids. Memory is the peak of the process' resident set over what it was when only the engine stood. Seconds by part come
from wrapping what train.py calls: its loop does not measure them."""
import csv
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
lesson1 = import_module("01_mismatch")
import numpy as np
import torch
import transformers

train = import_module("train")
QWEN3_06B = dict(vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                 num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=2048)
PARTS = {           # part of a step -> what is called for it
    "sampling": [(lesson1.Sampler, "sample")], "sync": [(lesson1.Sampler, "sync")],
    "log-probs": [(train.lesson5, "logprobs")],         # without a graph
    "update": [(torch.Tensor, "backward"), (torch.nn.utils, "clip_grad_norm_"), (torch.optim.AdamW, "step")]}


@contextmanager
def measured():
    """Within it, a list that gets {part: seconds, "step": seconds} of each step of train.py."""
    steps, seconds, replaced = [], dict.fromkeys(PARTS, 0.0), []

    def timed(part, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            name = "update" if kwargs.get("grad") else part      # log-probs with their graph are the update's
            seconds[name] += time.perf_counter() - start
            return result
        return call

    def report(out, row):
        steps.append({**seconds, "step": row["seconds"]})
        seconds.update(dict.fromkeys(PARTS, 0.0))
        original(out, row)
    original = train.report
    for owner, name, new in [(train, "report", report)] + [
            (owner, name, timed(part, getattr(owner, name))) for part, calls in PARTS.items() for owner, name in calls]:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)
    try:
        yield steps
    finally:
        for owner, name, old in replaced:
            setattr(owner, name, old)


def make_model(folder: Path, **changes) -> Path:
    """A Qwen3 with random weights and the tiny policy's tokenizer."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**lesson1.ARCHITECTURE, **changes})
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    lesson1.make_tokenizer().save_pretrained(folder)
    return folder


def memory(field: str) -> float:
    """VmRSS or VmHWM (its peak) of this process, GiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 2**20


def child(argv: list[str]) -> None:
    """Runs train.py on a random model and prints one line of JSON: its steps, memory before, and its peak."""
    lesson1.rewards = lambda task, digits, rollout, tokenizer: (rollout.ids.sum(1) % 2).float().cpu()
    train.lesson3.held_out = lambda *args: {"sampled": 0.0, "greedy": 0.0}
    args = dict(zip(argv[::2], argv[1::2]))
    lesson1.LOGITS_AT_ONCE = int(args.pop("--logits-at-once", lesson1.LOGITS_AT_ONCE))
    sampler = lesson1.Sampler(args["--model"])
    Path("/proc/self/clear_refs").write_text("5")                       # the peak starts anew
    before = memory("VmRSS")
    with measured() as steps:
        train.main([x for pair in args.items() for x in pair], sampler)
    with (Path(args["--out"]) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    print(json.dumps({"before": before, "peak": memory("VmHWM"), "steps": steps, "rows": rows}))


def run_child(folder: Path, **flags) -> dict:
    with tempfile.TemporaryDirectory() as out:
        flags = {"model": folder, "out": out, **flags}
        argv = [x for name, value in flags.items() for x in (f"--{name.replace('_', '-')}", str(value))]
        result = subprocess.run([sys.executable, __file__, "--child", *argv], capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stderr[-3000:])
    return json.loads(result.stdout.splitlines()[-1])


# ---------------------------------------------------------------- steps of the tiny policy
def steps_of(sampler, path: Path, *flags: str) -> dict:
    """Medians over the warm steps of a run: seconds of a step, of its parts, and of all parts together."""
    with tempfile.TemporaryDirectory() as out, measured() as steps:
        train.main(["--model", str(path), "--steps", "19", "--out", out, *flags], sampler)
    warm = [{**step, "parts": sum(step[part] for part in PARTS)} for step in steps[3:-1]]
    return {name: statistics.median(step[name] for step in warm) for name in warm[0]}


def corrections(sampler, path: Path) -> None:
    """Stale by up to 18 steps and never resynced, so that every correction needs both policies' log-probs."""
    stale = ["--staleness", "18", "--resync-ess", "0"]
    seconds = {name: steps_of(sampler, path, *stale, "--correction", name) for name in train.CORRECTIONS}
    fresh = steps_of(sampler, path)
    shares = ", ".join(f"{part} {fresh[part] / fresh['step']:.2f}" for part in PARTS)
    print(f"\nnecessary parts over the step, target >= .90: {fresh['parts'] / fresh['step']:.3f} ({shares})")
    over = ", ".join(f"{name} {s['step'] / seconds['none']['step']:.2f}" for name, s in seconds.items())
    print(f"each correction's step over that of none, both stale: {over}")
    forward = seconds["none"]["log-probs"] - fresh["log-probs"]         # those at theta_s too
    both = fresh["step"] - fresh["sync"] + forward
    dlc = seconds["dlc"]["step"]
    print("DLC's step over (none, on-policy, without its sync, + one forward), target <= 1.10: "
          f"{dlc / both:.2f} ({dlc:.3f} s over {both:.3f} s, of which one forward {forward:.3f})")


def against_transformers(sampler, path: Path) -> None:
    """Tokens per second of vLLM and of transformers' generate on the same policy, 256 responses of 9 tokens."""
    trainer, tokenizer = lesson1.load_model(path), transformers.AutoTokenizer.from_pretrained(path)
    _, prompts = lesson1.make_prompts(lesson1.SUM, tokenizer, 256, np.random.default_rng(0))

    def vllm(head: int = 0) -> int:
        return int(sampler.sample(prompts, 9, seed=0, head=head).mask.sum())

    def generate() -> int:
        ids = trainer.generate(torch.tensor(prompts), do_sample=True, top_k=0, max_new_tokens=9)
        return ids[:, 9:].ne(lesson1.PAD).sum().item()

    def per_second(f, *args) -> float:
        f(*args)
        start = time.perf_counter()
        return sum(f(*args) for _ in range(3)) / (time.perf_counter() - start)

    ours, theirs = per_second(vllm), per_second(generate)
    print(f"tokens per second: vLLM {ours:.0f}, transformers' generate {theirs:.0f}: {ours / theirs:.1f} times")
    for head in (0, 4, 17):
        print(f"  with a head of {head:2}: {1e6 / per_second(vllm, head):.0f} microseconds per token")


def growth() -> None:
    """One thing doubled at a time: time and memory of a step against the base."""
    base = {"prompts": 16, "group_size": 8, "max_tokens": 32, "head": 64, "steps": 3, "correction": "dlc",
            "staleness": 2, "resync_ess": 0, "logits_at_once": 2**25}
    with tempfile.TemporaryDirectory() as folder:
        small, large = (make_model(Path(folder) / str(V), vocab_size=V) for V in (16_384, 32_768))
        doubled = {"base": (small, {}), "batch": (small, {"prompts": 32}), "length": (small, {"max_tokens": 64}),
                   "K": (small, {"head": 128}), "vocabulary": (large, {}),
                   "micro-batch": (small, {"logits_at_once": 2**26})}
        results = {}
        for name, (model, changes) in doubled.items():
            r = run_child(model, **{**base, **changes})
            step = r["steps"][1]                                          # warm, stale
            results[name] = {"memory": r["peak"] - r["before"], "sampling": step["sampling"],
                             "training": step["log-probs"] + step["update"]}
    b = results["base"]
    print("\ndoubled once, over the base (128 responses, 32 tokens, K = 64, V = 16,384, micro-batches of 128 MiB of "
          f"logits: {b['memory']:.2f} GiB, sampling {b['sampling']:.1f} s, training {b['training']:.1f} s)")
    for name, r in results.items():
        print(f"  {name:12}" + "".join(f"{key} x {r[key] / b[key]:.2f}   " for key in r))


# ---------------------------------------------------------------- full size
def full_size() -> None:
    """One step of train.py on Qwen3-0.6B's configuration: 4 sequences, DLC with a head of 128."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), **QWEN3_06B)
        r = run_child(path, prompts=2, group_size=2, max_tokens=48, steps=1, correction="dlc", head=128)
        step, row = r["steps"][0], r["rows"][0]
        parts = ", ".join(f"{part} {step[part]:.1f} s" for part in PARTS)
        print(f"a step of 4 responses, {row['tokens']} tokens, K = 128: peak {r['peak']:.1f} GiB (of which the engine, "
              f"before the trainer is loaded, {r['before']:.1f}); {parts}; "
              f"|d| {float(row['discrepancy']):.1e}, gradient norm {float(row['grad_norm']):.4g}")
        sampler = lesson1.Sampler(path)
        prompts = [[1, 2, 3, lesson1.EQUALS]] * 4
        for head in (0, 128):
            sampler.sample(prompts, 4, seed=0, head=head)
            start = time.perf_counter()
            tokens = int(sampler.sample(prompts, 48, seed=0, head=head).mask.sum())
            milliseconds = 1e3 * (time.perf_counter() - start) / tokens
            print(f"sampling with a head of {head:3}: {milliseconds:.1f} milliseconds per token")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    elif sys.argv[1:] == ["--full-size"]:
        full_size()
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        path = lesson1.policy()
        sampler = lesson1.Sampler(path)
        corrections(sampler, path)
        against_transformers(sampler, path)
        growth()


if __name__ == "__main__":
    main()
