"""python tests/bench.py: what a step costs beyond what it must, as ratios within one run (about 5 minutes on two cores).

python tests/bench.py              the tiny policy's steps by correction; vLLM against transformers; growth of time and memory
python tests/bench.py --full-size  one step at the size of Qwen3-0.6B with random weights: memory, seconds, recording the head (10 minutes, 20 GiB)

A random model's answers say nothing that a reward could judge: there the reward is the parity of the response's token ids.
Memory is the peak of the process' resident set, evaluation and checkpoint included, over what it was when only the engine stood."""
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
lesson1 = import_module("01_mismatch")
import numpy as np
import torch
import transformers

train = import_module("train")
QWEN3_06B = dict(vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                 head_dim=128, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=lesson1.END, pad_token_id=lesson1.PAD, bos_token_id=None)


def make_model(folder: Path, **changes) -> Path:
    """A Qwen3 with random weights and the tiny policy's tokenizer."""
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**lesson1.ARCHITECTURE, **changes})).save_pretrained(folder)
    lesson1.make_tokenizer().save_pretrained(folder)
    return folder


def memory(field: str) -> float:
    """VmRSS or VmHWM (its peak) of this process, GiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 2**20


def rows_of(out: Path) -> list[dict]:
    with (out / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def child(argv: list[str]) -> None:
    """Runs train.py on a random model and prints one line of JSON: its rows, memory before, and the peak during the run."""
    lesson1.rewards = lambda task, digits, rollout, tokenizer: (rollout.ids.sum(1) % 2).float().cpu()
    args = dict(zip(argv[::2], argv[1::2]))
    lesson1.LOGITS_AT_ONCE = int(args.pop("--logits-at-once", lesson1.LOGITS_AT_ONCE))
    sampler = lesson1.Sampler(args["--model"])
    Path("/proc/self/clear_refs").write_text("5")                       # the peak starts anew
    before = memory("VmRSS")
    train.main([x for pair in args.items() for x in pair], sampler)
    print(json.dumps({"before": before, "peak": memory("VmHWM"), "rows": rows_of(Path(args["--out"]))}))


def run_child(folder: Path, **flags) -> dict:
    with tempfile.TemporaryDirectory() as out:
        argv = [x for name, value in {"model": folder, "out": out, "save-every": 1000, **flags}.items() for x in (f"--{name.replace('_', '-')}", str(value))]
        result = subprocess.run([sys.executable, __file__, "--child", *argv], capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stderr[-3000:])
    return json.loads(result.stdout.splitlines()[-1])


# ---------------------------------------------------------------- steps of the tiny policy
def steps_of(sampler, path: Path, steps: int, *flags: str) -> dict:
    """Medians over the steps of a run, warm ones: seconds of a step, of its necessary parts, and of all but sampling and sync."""
    with tempfile.TemporaryDirectory() as out:
        train.main(["--model", str(path), "--steps", str(steps), "--save-every", "1000", "--out", out, *flags], sampler)
        rows = rows_of(Path(out))[3:-1]
    part = lambda name: statistics.median(float(row[f"seconds_{name}"]) for row in rows)
    necessary = statistics.median(sum(float(row[f"seconds_{name}"]) for name in train.SECONDS) for row in rows)
    return {"step": part("step"), "necessary": necessary, **{name: part(name) for name in train.SECONDS}}


def corrections(sampler, path: Path) -> None:
    """Stale by up to 29 steps and never resynchronised, so that every correction scores with both weights."""
    stale = ["--staleness", "29", "--resync-ess", "0"]
    seconds = {name: steps_of(sampler, path, 30, *stale, "--correction", name) for name in train.CORRECTIONS}
    on_policy = steps_of(sampler, path, 30)
    print(f"\nnecessary parts (sampling, scoring, update, sync) over the step, target >= .90: {on_policy['necessary'] / on_policy['step']:.3f} "
          f"({', '.join(f'{name} ' + format(on_policy[name] / on_policy['step'], '.2f') for name in train.SECONDS)})")
    print("each correction's step over that of none, both stale: " + ", ".join(f"{name} {s['step'] / seconds['none']['step']:.2f}" for name, s in seconds.items()))
    forward = seconds["none"]["scoring"] - on_policy["scoring"]         # scoring with theta_s too
    both = on_policy["step"] - on_policy["sync"] + forward
    print(f"DLC's step over (none, on-policy, without its sync, + one forward), target <= 1.10: {seconds['dlc']['step'] / both:.2f} "
          f"({seconds['dlc']['step']:.3f} s over {both:.3f} s, of which one forward {forward:.3f})")


def against_transformers(sampler, path: Path) -> None:
    """Tokens a second of vLLM and of transformers' generate on the same policy, 256 responses of 9 tokens."""
    trainer, tokenizer, task = lesson1.load_model(path), transformers.AutoTokenizer.from_pretrained(path), lesson1.TASKS["sum"]
    _, prompts = lesson1.make_prompts(task, tokenizer, 256, np.random.default_rng(0))
    speed = {}
    for name, f in {"vLLM": lambda: int(sampler.sample(prompts, 9, seed=0).mask.sum()),
                    "generate": lambda: trainer.generate(torch.tensor(prompts), do_sample=True, top_k=0, max_new_tokens=9)[:, 9:].ne(lesson1.PAD).sum().item()}.items():
        f()
        start = time.perf_counter()
        tokens = sum(f() for _ in range(3))
        speed[name] = tokens / (time.perf_counter() - start)
    print(f"tokens a second: vLLM {speed['vLLM']:.0f}, transformers' generate {speed['generate']:.0f}: {speed['vLLM'] / speed['generate']:.1f} times")
    for head in (0, 4, 17):
        start = time.perf_counter()
        tokens = sum(int(sampler.sample(prompts, 9, seed=0, head=head).mask.sum()) for _ in range(3))
        print(f"  with a head of {head:2}: {1e6 * (time.perf_counter() - start) / tokens:.0f} microseconds a token")


def growth() -> None:
    """One thing doubled at a time: time and memory of a step against the base."""
    base = {"prompts": 16, "group_size": 8, "max_tokens": 32, "head": 64, "steps": 3, "correction": "dlc", "staleness": 2, "resync_ess": 0, "logits_at_once": 2**25}
    with tempfile.TemporaryDirectory() as folder:
        small, large = (make_model(Path(folder) / str(V), vocab_size=V) for V in (16_384, 32_768))
        results = {}
        for name, (model, changes) in {"base": (small, {}), "batch": (small, {"prompts": 32}), "length": (small, {"max_tokens": 64}), "K": (small, {"head": 128}),
                                       "vocabulary": (large, {}), "micro-batch": (small, {"logits_at_once": 2**26})}.items():
            r = run_child(model, **{**base, **changes})
            row = r["rows"][1]                                            # warm, stale
            results[name] = {"memory": r["peak"] - r["before"], "sampling": float(row["seconds_sampling"]), "training": float(row["seconds_scoring"]) + float(row["seconds_update"])}
    print(f"\ndoubled once, over the base ({base['prompts'] * base['group_size']} responses, {base['max_tokens']} tokens, K = {base['head']}, V = 16,384, "
          f"micro-batches of {base['logits_at_once'] * 4 / 2**20:.0f} MiB of logits: {results['base']['memory']:.2f} GiB, sampling {results['base']['sampling']:.1f} s, training {results['base']['training']:.1f} s)")
    for name, r in results.items():
        print(f"  {name:12}" + "".join(f"{key} x {r[key] / results['base'][key]:.2f}   " for key in r))


# ---------------------------------------------------------------- full size
def full_size() -> None:
    """One step of train.py on Qwen3-0.6B's configuration: 4 sequences, DLC with a head of 128."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), **QWEN3_06B)
        r = run_child(path, prompts=2, group_size=2, max_tokens=48, steps=1, correction="dlc", head=128)
        row = r["rows"][0]
        print(f"a step of 4 responses, {row['tokens']} tokens, K = 128: peak {r['peak']:.1f} GiB (of which the engine, before the trainer is loaded, {r['before']:.1f}); "
              + ", ".join(f"{part} {float(row[f'seconds_{part}']):.1f} s" for part in train.SECONDS) + f"; |d| {float(row['discrepancy_abs']):.1e}, gradient norm {float(row['grad_norm']):.4g}")
        sampler = lesson1.Sampler(path)
        prompts = [[1, 2, 3, lesson1.EQUALS]] * 4
        for head in (0, 128):
            sampler.sample(prompts, 4, seed=0, head=head)
            start = time.perf_counter()
            tokens = int(sampler.sample(prompts, 48, seed=0, head=head).mask.sum())
            print(f"sampling with a head of {head:3}: {1e3 * (time.perf_counter() - start) / tokens:.1f} milliseconds a token")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    elif sys.argv[1:] == ["--full-size"]:
        full_size()
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        path = lesson1.policy("sum")
        sampler = lesson1.Sampler(path)
        corrections(sampler, path)
        against_transformers(sampler, path)
        growth()


if __name__ == "__main__":
    main()
