"""GRPO end to end: vLLM samples, a PyTorch trainer learns, and every step measures the mismatch.

One step, in the order of the loop in `train`:

  1. sync       theta_s <- theta, once the sampler's weights are more than --staleness steps old
  2. sample     G responses to each prompt from mu, the engine's distribution at theta_s
  3. log-probs  log pi_old (the trainer at theta_s) and log pi (the trainer now) of every token:
                    log pi - log mu  =  (log pi_old - log mu)  +  (log pi - log pi_old)
                                     =     discrepancy d       +        lag l          (lesson 3)
  4. judge      if ESS(exp l) < --resync-ess, drop the batch and go back to 1, once    (lesson 4)
  5. weigh      advantage A within each group, weight w and center c of --correction   (2 and 4)
  6. update     L = -sum A (w log pi - c) / N, gradient norm clipped to 1, one AdamW step

Compared with GRPO as published (arXiv 2402.03300): one optimizer step per batch, no KL penalty,
and the loss averages over the N tokens of the batch. PPO's clip is one of the corrections.

  python train.py                                    the tiny policy on a CPU, about 40 s
  python train.py --staleness 63                     a stale sampler: training goes astray
  python train.py --staleness 63 --correction dlc    the same, corrected
  python train.py --resume runs/dlc-s63-seed0        goes on where that run was stopped
  torchrun --nproc-per-node 2 train.py               several processes: FSDP2, a sampler each
  python train.py --model Qwen/Qwen3-0.6B            a CUDA GPU of 24 GB (not run yet)

A run lives in --out: run.json (its flags), checkpoint-<step>/ (its newest policy, which
transformers and vLLM load like any other), train.png, summary.json, and metrics.csv:

  step, age                     age of the sampler's weights, in steps
  reward, length, cut_off       mean reward, mean response tokens, share cut off at --max-tokens
  discrepancy, k3, lag          mean |d|, k3 of d (see lesson 1), mean |l|, all in nats
  ess, ess_tokens, mean_ratio   of the batch as first drawn: effective sample size of the lag ratios
                                of responses and of tokens, as shares; mean lag ratio of the tokens
  dropped_tokens, dropped_seconds   what step 4 threw away
  weight, loss, grad_norm       mean w; L (only its gradient has a meaning); the norm, not clipped
  tokens, not_finite            N; tokens left out of N, as the engine gave no finite log-prob
  seconds                       of the whole step
"""
import argparse
import copy
import csv
import json
import math
import os
import shutil
import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if WORLD > 1:   # torchrun: each process is to see one GPU, its own, since vLLM takes the first one
    present = ",".join(str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*")))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", present).split(",")
    if gpus != [""]:
        if int(os.environ["LOCAL_WORLD_SIZE"]) > len(gpus):
            sys.exit(f"train.py: error: more processes than GPUs, and there are {len(gpus)}")
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(os.environ["LOCAL_RANK"])]

lesson1 = import_module("01_mismatch")   # before torch: it hides broken packages around it
lesson2 = import_module("02_importance_sampling")
lesson3 = import_module("03_decompose")
lesson4 = import_module("04_dlc")
lesson5 = import_module("05_router_replay")
import torch
import torch.distributed as distributed
import transformers
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict)

CORRECTIONS = {**lesson2.CORRECTIONS, "dlc": lesson4.lag_clip}   # dlc: with a center and resyncs
DTYPES = ["bfloat16", "float16", "float32"]
DEFAULTS = {     # flags that depend on the model: the tiny policy, any other on a CPU, on a GPU
    "tiny": {"prompts": 32, "max_tokens": 9, "lr": 1.5e-3, "head": len(lesson1.CHARACTERS),
             "engine_dtype": "bfloat16", "trainer_dtype": "float32"},
    "cpu": {"prompts": 8, "max_tokens": 64, "lr": 3e-6, "head": 64,
            "engine_dtype": "float32", "trainer_dtype": "float32"},
    "gpu": {"prompts": 16, "max_tokens": 256, "lr": 1e-6, "head": 128,
            "engine_dtype": "bfloat16", "trainer_dtype": "bfloat16"}}
SAVE_EVERY = 20                          # steps between checkpoints
WHOLE = StateDictOptions(full_state_dict=WORLD > 1)


# ---------------------------------------------------------------- the loop
def train(args, trainer, tokenizer, sampler, saved: dict | None):
    """Trains the trainer and returns the policy. `saved`: where a stopped run goes on. Raises
    FloatingPointError where nothing finite is left, ValueError where the responses are not mu's."""
    task, correct, V = lesson1.SUM, CORRECTIONS[args.correction], lesson1.vocabulary(trainer)
    first, synced, old = 0, 0, copy.deepcopy(trainer)    # old: the trainer at theta_s
    if saved:
        first, synced = saved["step"], saved["synced"]
        trainer.load_state_dict(saved["trainer"])
        old.load_state_dict(saved["old"])
        sampler.sync(old)
        version = sampler.version
    if WORLD > 1:
        shard(trainer)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=args.lr, weight_decay=0.0)
    scaler = torch.amp.GradScaler(lesson1.DEVICE.type, enabled=args.trainer_dtype == "float16")
    if saved:
        set_optimizer_state_dict(trainer, optimizer, saved["optimizer"], options=WHOLE)
        scaler.load_state_dict(saved["scaler"])
    autocast = torch.autocast(lesson1.DEVICE.type, getattr(torch, args.trainer_dtype),
                              enabled=args.trainer_dtype != "float32")
    logprobs, routes_for = autocast(lesson5.logprobs), autocast(lesson5.routes_for)
    share = args.prompts * args.group_size // WORLD
    mine = slice(RANK * share, (RANK + 1) * share)       # this process' responses

    for step in range(first, args.steps):
        start, dropped_tokens, dropped_seconds = time.perf_counter(), 0, 0.0
        for attempt in (1, 2):           # the second one only where the first batch is refused
            # 1. sync: theta_s <- theta
            if step == 0 or step - synced > args.staleness or attempt == 2:
                old.load_state_dict(get_model_state_dict(trainer, options=WHOLE))
                sampler.sync(old)
                synced, version = step, sampler.version

            # 2. sample: y ~ mu at theta_s. All randomness comes from the seed, step and attempt
            digits, prompts = lesson1.make_prompts(
                task, tokenizer, args.prompts, np.random.default_rng([args.seed, step]))
            rollout = widen(sampler.sample(
                prompts, args.max_tokens, seed=[args.seed, step, attempt],
                group_size=args.group_size, head=args.head, rows=mine))
            if not rollout.neutral or rollout.version != version:
                raise ValueError(f"step {step}: these responses are not from mu at theta_s")
            R = lesson1.rewards(task, digits.repeat(args.group_size, 0)[mine], rollout, tokenizer)
            mask = rollout.mask & rollout.logp_sampler.isfinite()      # others are not trained on
            rollout.head_logp = torch.where(mask[..., None], rollout.head_logp, 0.0)

            # 3. log-probs: log pi - log mu = d + l
            rollout.routes = routes_for(args.replay, old, rollout)     # None: nothing is replayed
            logp, head_logp = logprobs(trainer, rollout, rollout.routes, head=True)
            logp_old, head_logp_old = logp, head_logp
            if step > synced:
                logp_old, head_logp_old = logprobs(old, rollout, rollout.routes, head=True)
            logp, logp_old, logp_sampler, mask, R, ended, lengths = gather(
                logp, logp_old, rollout.logp_sampler, mask, R, rollout.ended, rollout.mask.sum(1))
            lag, N = logp - logp_old, int(mask.sum())
            if N == 0:
                raise FloatingPointError(f"step {step}: the engine gave no token a finite log-prob")

            # 4. judge: is enough of this batch left? At age 0 every ratio is 1, and so is the ESS
            if attempt == 1:
                ess, ess_tokens = lesson4.lag_ess(lag, mask), lesson2.ess(lag[mask])
                mean_ratio = lesson4.mean_ratio(lag, mask)
            if ess >= args.resync_ess or step == synced:
                break
            dropped_tokens, dropped_seconds = N, time.perf_counter() - start

        # 5. weigh: the advantage within each group, the importance weight
        A = lesson2.advantages(R, args.group_size, args.advantage).to(lesson1.DEVICE)
        w = correct(logp, logp_old, logp_sampler, A, mask)

        # 6. update: L = -sum A (w log pi - c) / N, micro-batch by micro-batch
        loss, c, (my_w, my_A, my_mask) = 0.0, 0.0, (x[mine] for x in (w, A, mask))
        for rows in lesson1.micro_batches(rollout, V):
            part = rollout[rows]
            logp_part, head_part = logprobs(trainer, part, part.routes, head=True, grad=True)
            if args.correction == "dlc":
                c = lesson4.center(head_part, head_logp_old[rows], part.head_logp, my_A[rows], V)
            loss_part = lesson2.policy_loss(logp_part, my_w[rows], my_A[rows], my_mask[rows], N, c)
            scaler.scale(WORLD * loss_part).backward()                 # FSDP2 averages gradients
            loss += loss_part.item()
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
        grad_norm = (grad_norm if WORLD == 1 else grad_norm.full_tensor()).item()
        # in float16 the scaler skips such a step and halves its scale; below 1 that is no help
        if not math.isfinite(grad_norm) and scaler.get_scale() <= 1:
            raise FloatingPointError(f"step {step}: the gradient is not finite")
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - step / args.steps)            # falls linearly to 0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

        d = lesson1.gap(logp_old[mask], logp_sampler[mask])
        report(args.out, {
            "step": step, "age": step - synced, "reward": R.mean().item(),
            "length": lengths.double().mean().item(), "cut_off": 1 - ended.double().mean().item(),
            "discrepancy": d["mean |d|"], "k3": d["k3"], "lag": lag[mask].abs().mean().item(),
            "ess": ess, "ess_tokens": ess_tokens, "mean_ratio": mean_ratio,
            "dropped_tokens": dropped_tokens, "dropped_seconds": dropped_seconds,
            "weight": w[mask].mean().item(), "loss": gather(torch.tensor([loss]))[0].sum().item(),
            "grad_norm": grad_norm, "tokens": N, "not_finite": int(lengths.sum()) - N,
            "seconds": time.perf_counter() - start})
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == args.steps:
            save(args.out / "state.pt", {
                "step": step + 1, "synced": synced, "old": old.state_dict(),
                "trainer": get_model_state_dict(trainer, options=WHOLE),
                "optimizer": get_optimizer_state_dict(trainer, optimizer, options=WHOLE),
                "scaler": scaler.state_dict()})
    old.load_state_dict(get_model_state_dict(trainer, options=WHOLE))
    return old


# ---------------------------------------------------------------- several processes (torchrun)
def gather(*tensors):
    """The rows (B, ...) of all processes, in order. A process alone has them all."""
    if WORLD == 1:
        return tensors
    parts = [None] * WORLD
    distributed.all_gather_object(parts, [x.cpu() for x in tensors])
    return [torch.cat(rows).to(lesson1.DEVICE) for rows in zip(*parts)]


def widen(rollout):
    """The rollout, padded to the longest response of all processes: they need as many micro-batches."""
    missing = int(gather(torch.tensor([rollout.ids.shape[1]]))[0].max()) - rollout.ids.shape[1]
    for name in ("ids", "mask", "logp_sampler", "head_ids", "head_logp", "routes"):
        x = getattr(rollout, name)                       # (B, T, ...), routes (B, P + T, ...)
        if x is not None:
            setattr(rollout, name, torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)))
    return rollout


def shard(model) -> None:
    """FSDP2: each process keeps a part of every layer's weights, gradients and optimizer state."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    for layer in lists[0] if lists else []:              # the outermost list: the layers
        fully_shard(layer)
    fully_shard(model)


# ---------------------------------------------------------------- what a run leaves behind
def report(out: Path, row: dict) -> None:
    """A line on the screen, and a whole line at the end of metrics.csv."""
    if RANK > 0:
        return
    notes = {"batch dropped, resynced": row["dropped_tokens"] > 0,
             "no gradient: each group's rewards are equal": row["grad_norm"] == 0,
             "many responses are cut off: raise --max-tokens": row["cut_off"] > 0.5,
             "{not_finite} tokens without a finite log-prob": row["not_finite"] > 0}
    line = ("step {step:3d}  reward {reward:.3f}  |d| {discrepancy:.1e}  k3 {k3:.1e}  |lag| {lag:.1e}  "
            "age {age:2d}  ESS {ess:.2f}  grad {grad_norm:.1e}  {seconds:.1f} s")
    line += "".join(f"  ({note})" for note, holds in notes.items() if holds)
    print(line.format(**row), flush=True)
    path = out / "metrics.csv"
    header = "" if path.exists() else ",".join(row) + "\n"
    with path.open("a") as file:
        file.write(header + ",".join(map(str, row.values())) + "\n")


def save(path: Path, state: dict) -> None:
    """The state appears whole: a kill leaves the one before."""
    if RANK == 0:
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)


def rewind(out: Path) -> dict | None:
    """A stopped run's state. The steps after it happen again: their rows go."""
    if not (out / "state.pt").exists():
        (out / "metrics.csv").unlink(missing_ok=True)
        return None
    state = torch.load(out / "state.pt", map_location="cpu")
    with (out / "metrics.csv").open("r+b") as file:
        for _ in range(1 + state["step"]):
            file.readline()
        file.truncate()
    return state


# ---------------------------------------------------------------- the command line
def parse(argv):
    """The parser, and its flags; None is what depends on the model."""
    def by_model(name: str) -> str:
        return ", ".join(f"{model} {row[name]}" for model, row in DEFAULTS.items())
    parser = argparse.ArgumentParser(prog="train.py", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", help="a directory or a hub name (a tiny policy; on a GPU Qwen3-0.6B)")
    add("--steps", type=int, help="optimizer steps (80; --quick 4)")
    add("--prompts", type=int, help=f"prompts per step ({by_model('prompts')}; --quick 8)")
    add("--group-size", type=int, default=8, help="responses per prompt (8)")
    add("--max-tokens", type=int, help=f"longest response ({by_model('max_tokens')})")
    add("--lr", type=float, help=f"AdamW's, falling linearly to 0 ({by_model('lr')})")
    add("--advantage", choices=["std", "mean", "raw"], default="std", help="see lesson 2")
    add("--staleness", type=int, default=0, help="how old, in steps, the sampler may get (0)")
    add("--correction", choices=[*CORRECTIONS], default="none", help="see lesson 2; dlc: lesson 4")
    add("--resync-ess", type=float, help="drop a batch below this ESS, and sync (0; dlc 0.5)")
    add("--head", type=int, help=f"tokens recorded per position, for dlc ({by_model('head')})")
    add("--engine-dtype", choices=DTYPES, help=f"vLLM's ({by_model('engine_dtype')})")
    add("--trainer-dtype", choices=DTYPES, help="of the trainer's forward pass, by autocast over "
        f"float32 weights ({by_model('trainer_dtype')})")
    add("--lm-head-fp32", action="store_true", help="the output layer in float32 on both sides")
    add("--replay", choices=["none", "r2", "r3"], default="none", help="of routers, see lesson 5")
    add("--seed", type=lesson1.seed, default=0, help="of prompts and sampling (0)")
    add("--out", type=Path, help="the run's folder (runs/<correction>-s<staleness>-seed<seed>)")
    add("--quick", action="store_true", help="4 steps of 8 prompts: does everything work?")
    add("--resume", type=Path, metavar="RUN", help="go on with the run in that folder")
    args = parser.parse_args(argv)
    if args.resume and args != parser.parse_args(["--resume", str(args.resume)]):
        parser.error("--resume takes its settings from the run: no other flag goes with it")
    return parser, args


def settle(args):
    """The flags of the whole run. Raises ValueError or OSError where they make no run."""
    if args.resume:
        if (args.resume / "summary.json").exists():
            raise ValueError(f"--resume {args.resume}: this run has ended")
        flags = json.loads((args.resume / "run.json").read_text())
        return argparse.Namespace(**{**flags, "out": args.resume, "resume": args.resume})
    for name in ("steps", "prompts", "group_size", "max_tokens", "lr", "head"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0")
    if args.resync_ess is None:
        args.resync_ess = 0.5 if args.correction == "dlc" else 0.0
    if args.group_size < 2 or args.staleness < 0 or not 0 <= args.resync_ess <= 1:
        raise ValueError("--group-size is at least 2, --staleness at least 0, --resync-ess in [0, 1]")
    if args.head and args.correction != "dlc":
        raise ValueError("--head is recorded for --correction dlc only")
    if args.quick:
        args.steps, args.prompts = args.steps or 4, args.prompts or 8
    replay = "" if args.replay == "none" else f"-{args.replay}"
    name = f"{args.correction}-s{args.staleness}{replay}-seed{args.seed}" + "-quick" * args.quick
    args.steps, args.out = args.steps or 80, args.out or lesson1.ROOT / "runs" / name
    if (args.out / "metrics.csv").exists():
        raise ValueError(f"--out {args.out} holds a run: --resume or delete it, or choose another")
    return args


def load(args):
    """The trainer and the tokenizer; settles what depends on them. Raises like `settle`."""
    args.out.mkdir(parents=True, exist_ok=True)
    if RANK > 0:
        distributed.barrier()            # the first process builds the tiny policy
    args.model = lesson1.find_model(args.model)
    if WORLD > 1 and RANK == 0:
        distributed.barrier()
    if Path(args.model).exists():
        args.model = str(Path(args.model).resolve())
    trainer = lesson1.load_model(args.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    for name, value in DEFAULTS[lesson1.scale(tokenizer)].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.head = args.head if args.correction == "dlc" else 0
    if args.head > lesson1.vocabulary(trainer):
        raise ValueError(f"--head {args.head} is more than the vocabulary")
    if args.prompts % WORLD:
        raise ValueError(f"--prompts {args.prompts} cannot be split among {WORLD} processes")
    if args.replay != "none":
        lesson5.router_rule(trainer)
    for part in (trainer, tokenizer):    # what cannot be saved is refused now, not at the end
        part.save_pretrained(args.out / "checkpoint.tmp")
    shutil.rmtree(args.out / "checkpoint.tmp")
    if args.lm_head_fp32:
        lesson1.lm_head_in_float32(trainer)
    spacing = {"bfloat16": 256, "float16": 2048}.get(args.engine_dtype)
    if spacing and args.trainer_dtype != args.engine_dtype and all(
            torch.equal(x, x.bfloat16().float()) for x in trainer.parameters()):
        print(f"The {args.engine_dtype} engine sees an update of a weight w only once it exceeds about "
              f"|w| / {spacing}, this {args.trainer_dtype} trainer at once: they will drift apart.")
    return trainer, tokenizer


def main(argv=None, sampler=None) -> None:
    """`sampler`: a running Sampler of the same model, so that tests can share one engine."""
    parser, args = parse(argv)
    if WORLD > 1 and not distributed.is_initialized():   # before vLLM makes a world of its own
        distributed.init_process_group("nccl" if lesson1.DEVICE.type == "cuda" else "gloo")
    try:
        args = settle(args)
        trainer, tokenizer = load(args)
        saved = rewind(args.out) if args.resume else None
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        mixture = lesson5.is_mixture(trainer.config)
        make = lesson5.RoutedSampler if mixture else lesson1.Sampler
        sampler = sampler or make(args.model, args.engine_dtype, lm_head_fp32=args.lm_head_fp32,
                                  kv_cache_gib=2)
        held_out = lesson1.SUM, tokenizer, 8 * args.prompts, args.max_tokens
        if not args.resume:
            args.before = lesson3.held_out(trainer, sampler, *held_out)
            if RANK == 0:
                (args.out / "run.json").write_text(json.dumps(vars(args), indent=1, default=str))
        policy = train(args, trainer, tokenizer, sampler, saved)
        after = lesson3.held_out(policy, sampler, *held_out)
    except (Exception, KeyboardInterrupt) as error:
        stopped = isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt)
        known = OSError, ValueError, FloatingPointError, lesson1.SyncError
        if not stopped and not isinstance(error, known):
            raise
        print(f"train.py: {'interrupted' if stopped else f'error: {error}'}; what is done is in "
              f"{args.out}: --resume goes on", file=sys.stderr)
        sys.exit(130 if stopped else 1)
    if RANK > 0:
        return
