"""GRPO end to end: vLLM samples, a PyTorch trainer learns, and every step measures the mismatch.

The loop in `train` has six steps: sync, sample, log-probs, judge, weigh, update. It is GRPO (arXiv
2402.03300) with a mean over tokens, no KL penalty, and one update per batch. A sync gives the
sampler the trainer's weights; from then on they are called theta_s. Let mu be the engine's
distribution and pi_old the trainer's, both at theta_s, and pi the trainer's now. For each token

    log pi - log mu  =  (log pi_old - log mu)  +  (log pi - log pi_old)
                     =     discrepancy d       +        lag l                          (lesson 3)

  python train.py                                    the tiny policy on a CPU, about a minute
  python train.py --staleness 63                     a stale sampler: training goes astray
  python train.py --staleness 63 --correction dlc    the same, corrected
  python train.py --resume runs/dlc-s63-seed0        goes on from that run's last state.pt
  torchrun --nproc-per-node 2 train.py               several processes: FSDP2, a sampler each
  python train.py --model Qwen/Qwen3-0.6B            a CUDA GPU of 24 GB (not run yet)

A run's folder (--out) holds run.json (its flags), metrics.csv (one row per step), state.pt (for
--resume), checkpoint-0/ and checkpoint-<steps>/ (for transformers and vLLM), and at the end
summary.json and train.png. The columns of metrics.csv:

  step, age                       age: steps since the last sync
  reward, length, cut_off         mean reward; mean tokens per response; share cut off
  discrepancy, k3, lag            mean |d|; k3 of d (lesson 1); mean |l|; in nats
  ess, ess_tokens, mean_ratio     effective sample size of exp(l), a share of the responses, of the
                                  tokens; mean exp(l). If a batch is dropped, they are that batch's
  dropped_tokens, dropped_seconds    of that batch; else 0
  weight, grad_norm, loss         mean importance weight; gradient norm before clipping; the loss
  tokens, not_finite, seconds     trained on; left out without a finite log mu; of the whole step
"""
import argparse
import copy
import json
import os
import time
from importlib import import_module
from pathlib import Path

import numpy as np

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if WORLD > 1:   # torchrun: each process is to see one GPU, its own, since vLLM takes the first one
    present = map(str, range(len([*Path("/dev").glob("nvidia[0-9]*")])))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(present)).split(",")
    if gpus != [""] and len(gpus) < int(os.environ["LOCAL_WORLD_SIZE"]):
        raise SystemExit(f"train.py: more processes than GPUs, of which there are {len(gpus)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(os.environ["LOCAL_RANK"]) % len(gpus)]

lesson1 = import_module("01_mismatch")   # before torch: it sets up torch's environment
lesson2 = import_module("02_importance_sampling")
lesson3 = import_module("03_decompose")
lesson4 = import_module("04_dlc")
lesson5 = import_module("05_router_replay")
import torch
from torch.distributed.checkpoint import state_dict as shards

CORRECTIONS = {**lesson2.CORRECTIONS, "dlc": lesson4.lag_clip}   # dlc: with a center and resyncs
BY_MODEL = "steps", "prompts", "max_tokens", "lr", "head", "engine_dtype", "trainer_dtype"
DEFAULTS = {     # of these flags: for the tiny policy, for any other model on a CPU, on a GPU
    "tiny": (80, 32, 9, 1.5e-3, len(lesson1.CHARACTERS), "bfloat16", "float32"),
    "cpu": (20, 8, 64, 3e-6, 64, "float32", "float32"),
    "gpu": (80, 16, 256, 1e-6, 128, "bfloat16", "bfloat16")}
SAVE_EVERY = 20                          # steps between writes of state.pt
WHOLE = shards.StateDictOptions(full_state_dict=WORLD > 1)       # not this process' shard


# ---------------------------------------------------------------- the loop
def train(args, trainer, tokenizer, sampler, saved: dict | None):
    """Trains the trainer and returns the policy. `saved`: where a stopped run goes on. Raises
    FloatingPointError if a gradient is not finite, ValueError if the responses are not mu's."""
    task, correct = lesson1.TASKS[args.task], CORRECTIONS[args.correction]
    V = lesson1.vocabulary(trainer)
    first, synced, old = 0, 0, copy.deepcopy(trainer)    # old: the trainer at theta_s
    if WORLD > 1:                        # FSDP2: a part of every layer's state for each process
        lists = (m for m in trainer.modules() if isinstance(m, torch.nn.ModuleList))
        for module in (*next(lists, ()), trainer):       # the outermost list has the layers
            torch.distributed.fsdp.fully_shard(module)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=args.lr, weight_decay=0.0)
    scaler = torch.amp.GradScaler(lesson1.DEVICE.type, enabled=args.trainer_dtype == "float16")
    autocast = torch.autocast(lesson1.DEVICE.type, getattr(torch, args.trainer_dtype),
                              enabled=args.trainer_dtype != "float32")
    logprobs, routes_for = autocast(lesson5.logprobs), autocast(lesson5.routes_for)
    share = args.prompts * args.group_size // WORLD
    mine = slice(RANK * share, (RANK + 1) * share)       # this process' responses
    if saved:
        shards.set_state_dict(trainer, optimizer, model_state_dict=saved["trainer"],
                             optim_state_dict=saved["optimizer"], options=WHOLE)
        scaler.load_state_dict(saved["scaler"])
        old.load_state_dict(saved["old"])
        sampler.sync(old)
        first, synced, version = saved["step"], saved["synced"], sampler.version

    for step in range(first, args.steps):
        start, dropped = time.perf_counter(), {"dropped_tokens": 0, "dropped_seconds": 0.0}
        for attempt in (1, 2):           # the second one only if the first batch is dropped
            # 1. sync: theta_s <- theta, if theta_s is more than --staleness steps old
            if step == 0 or step - synced > args.staleness or attempt == 2:
                old.load_state_dict(shards.get_model_state_dict(trainer, options=WHOLE))
                sampler.sync(old)
                synced, version = step, sampler.version

            # 2. sample: y ~ mu at theta_s. All randomness comes from the seed, step and attempt
            digits, prompts = lesson1.make_prompts(
                task, tokenizer, args.prompts, np.random.default_rng([args.seed, step]))
            rollout = widen(sampler.sample(
                prompts, args.max_tokens, seed=[args.seed, step, attempt],
                group_size=args.group_size, head=args.head or 0, rows=mine))
            mask = rollout.mask & rollout.logp_sampler.isfinite()      # others are not trained on
            if not rollout.neutral or rollout.version != version or not mask.any():
                raise ValueError(f"step {step}: not sampled from mu at theta_s, or no mu is finite")
            R = lesson1.rewards(task, digits.repeat(args.group_size, 0)[mine], rollout, tokenizer)

            # 3. log-probs: log pi - log mu = d + l. Both policies have the same micro-batches:
            #    another shape would round elsewhere, and count as lag
            rollout.routes = routes_for(args.replay, old, rollout)     # None: nothing is replayed
            logp, head_logp = logprobs(trainer, rollout, rollout.routes, head=True)
            logp_old, head_logp_old = logp, head_logp
            if step > synced:
                logp_old, head_logp_old = logprobs(old, rollout, rollout.routes, head=True)
            logp, logp_old, logp_sampler, mask, R, ended, lengths = gather(
                logp, logp_old, rollout.logp_sampler, mask, R, rollout.ended, rollout.mask.sum(1))
            lag, N = logp - logp_old, int(mask.sum())

            # 4. judge: is enough of this batch left? If ESS(exp l) < --resync-ess, back to 1, once.
            #    At age 0 every ratio is 1, and so is the ESS
            if attempt == 1:
                judged = {"ess": lesson4.lag_ess(lag, mask), "ess_tokens": lesson2.ess(lag[mask]),
                          "mean_ratio": lesson4.mean_ratio(lag, mask)}
            if judged["ess"] >= args.resync_ess or step == synced:
                break
            dropped = {"dropped_tokens": N, "dropped_seconds": time.perf_counter() - start}

        # 5. weigh: the advantage A within each group, the importance weight w of --correction
        A = lesson2.advantages(R, args.group_size, args.advantage).to(lesson1.DEVICE)
        w = correct(logp, logp_old, logp_sampler, A, mask)

        # 6. update: L = -sum A (w log pi - c) / N, micro-batch by micro-batch; one AdamW step
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
        if not np.isfinite(grad_norm) and scaler.get_scale() <= 1:    # float16: larger ones halve
            raise FloatingPointError(f"step {step}: the gradient is not finite")
        optimizer.param_groups[0]["lr"] = args.lr * (1 - step / args.steps)    # falls linearly to 0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

        d = lesson1.gap(logp_old[mask], logp_sampler[mask])
        report(args.out, {
            "step": step, "age": step - synced, "reward": R.mean().item(),
            "length": lengths.double().mean().item(), "cut_off": (~ended).double().mean().item(),
            "discrepancy": d["mean |d|"], "k3": d["k3"], "lag": lag[mask].abs().mean().item(),
            **judged, **dropped, "weight": w[mask].mean().item(), "grad_norm": grad_norm,
            "loss": gather(torch.tensor([loss]))[0].sum().item(), "tokens": N,
            "not_finite": int(lengths.sum()) - N, "seconds": time.perf_counter() - start})
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == args.steps:
            weights, moments = shards.get_state_dict(trainer, optimizer, options=WHOLE)
            save(args.out, {"step": step + 1, "synced": synced, "old": old.state_dict(), "trainer":
                            weights, "optimizer": moments, "scaler": scaler.state_dict()})
    old.load_state_dict(shards.get_model_state_dict(trainer, options=WHOLE))
    return old


# ---------------------------------------------------------------- several processes (torchrun)
def gather(*tensors):
    """The rows (B, ...) of all processes, in order. A process alone has them all."""
    if WORLD == 1:
        return tensors
    everyones = [None] * WORLD
    torch.distributed.all_gather_object(everyones, [x.cpu() for x in tensors])
    return [torch.cat(rows).to(lesson1.DEVICE) for rows in zip(*everyones)]


def widen(rollout):
    """Pads the rollout to the longest response of any process: FSDP2 needs equal micro-batches."""
    T, wide = rollout.ids.shape[1], {}
    missing = int(gather(torch.tensor([T]))[0].max()) - T
    for name in ("ids", "mask", "logp_sampler", "head_ids", "head_logp", "routes"):
        x = getattr(rollout, name)       # (B, T, ...); routes (B, P + T, ...), or None
        if x is not None:
            wide[name] = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return lesson1.replace(rollout, **wide)


# ---------------------------------------------------------------- what a run leaves behind
def report(out: Path, row: dict) -> None:
    """A line on the screen, and a whole line at the end of metrics.csv."""
    if RANK == 0:
        line = ("step {step:3d}  reward {reward:.3f}  cut off {cut_off:.2f}  |d| {discrepancy:.1e}"
                "  k3 {k3:.1e}  |lag| {lag:.1e}  age {age:2d}  ESS {ess:.2f}  grad {grad_norm:.1e}"
                "  dropped {dropped_tokens}  not finite {not_finite}  {seconds:.1f} s")
        print(line.format(**row), flush=True)
        with (out / "metrics.csv").open("a") as file:
            header = "" if file.tell() else ",".join(row) + "\n"
            file.write(header + ",".join(map(str, row.values())) + "\n")


def save(out: Path, state: dict) -> None:
    """Replaces state.pt as a whole. It has the rows so far: those after it happen again."""
    if RANK == 0:
        state["metrics"] = (out / "metrics.csv").read_text()
        torch.save(state, out / "state.tmp")
        os.replace(out / "state.tmp", out / "state.pt")


def conclude(args, after: dict, policy, tokenizer) -> None:
    """The policy, the picture, the summary. A run without summary.json can be resumed."""
    rows = np.atleast_1d(np.genfromtxt(args.out / "metrics.csv", delimiter=",", names=True))
    for part in (policy, tokenizer):
        part.save_pretrained(args.out / f"checkpoint-{args.steps}")
    import_module("figures.draw").draw_run(rows, args.out / "train.png")
    summary = {"held_out_prompts": 8 * args.prompts, "before": args.before, "after": after,
               "syncs": int((rows["age"] == 0).sum()), "seconds": rows["seconds"].sum(),
               "dropped_tokens": int(rows["dropped_tokens"].sum())}
    (args.out / "summary.tmp").write_text(json.dumps(summary, indent=1) + "\n")
    os.replace(args.out / "summary.tmp", args.out / "summary.json")
    (args.out / "state.pt").unlink()     # as large as four policies
    lesson1.table(f"{args.out}: held-out accuracy, {8 * args.prompts} prompts", [
        {"policy": "before", **args.before}, {"policy": "after", **after}])


# ---------------------------------------------------------------- the command line
def parse(argv):
    """The parser and the flags as they are given: None is what depends on the model."""
    parser = argparse.ArgumentParser(prog="train.py", description=__doc__.split("\n")[0])
    add, dtypes = parser.add_argument, ["bfloat16", "float16", "float32"]
    add("--model", help="a directory or a hub name (a tiny policy; on a GPU Qwen3-0.6B)")
    add("--task", choices=lesson1.TASKS, default="sum", help="add1 to add3: for released models")
    add("--steps", type=int, help="optimizer steps (tiny 80, cpu 20, gpu 80; --quick 4)")
    add("--prompts", type=int, help="prompts per step (tiny 32, cpu 8, gpu 16; --quick 8)")
    add("--group-size", type=int, default=8, help="responses per prompt (8)")
    add("--max-tokens", type=int, help="longest response (tiny 9, cpu 64, gpu 256)")
    add("--lr", type=float, help="AdamW's, falling linearly to 0 (tiny 1.5e-3, cpu 3e-6, gpu 1e-6)")
    add("--advantage", choices=["std", "mean", "raw"], default="std", help="see lesson 2 (std)")
    add("--staleness", type=int, default=0, help="steps that the sampler may be behind (0)")
    add("--correction", choices=[*CORRECTIONS], default="none", help="see lessons 2 and 4 (none)")
    add("--resync-ess", type=float, help="drop a batch below this ESS, and sync (0; dlc 0.5)")
    add("--head", type=int, help="tokens recorded per position for dlc (tiny 17, cpu 64, gpu 128)")
    add("--engine-dtype", choices=dtypes, help="vLLM's (bfloat16; cpu float32)")
    add("--trainer-dtype", choices=dtypes, help="autocast's (float32; gpu bfloat16)")
    add("--lm-head-fp32", action="store_true", help="the output layer in float32 on both sides")
    add("--replay", choices=["none", "r2", "r3"], default="none", help="of routers, see lesson 5")
    add("--seed", type=lesson1.seed, default=0, help="of prompts and sampling (0)")
    add("--out", type=Path, help="the run's folder (runs/<correction>-s<staleness>-seed<seed>)")
    add("--quick", action="store_true", help="4 steps of 8 prompts: does everything work?")
    add("--resume", type=Path, metavar="RUN", help="go on with the run in that folder")
    args = parser.parse_args(argv)
    if args.resume and args != parser.parse_args(["--resume", str(args.resume)]):
        parser.error("--resume takes its flags from the run: no other one goes with it")
    return parser, args


def prepare(args):
    """The trainer, the tokenizer, the state of a run that is resumed. Completes the flags. Raises
    ValueError or OSError, before vLLM is started, if they make no run."""
    if args.resume:
        flags = json.loads((args.resume / "run.json").read_text())
        vars(args).update(flags, out=args.resume, resume=args.resume)
    sizes = args.steps, args.prompts, args.max_tokens, args.lr, args.head
    if not all(size is None or 0 < size < np.inf for size in sizes):
        raise ValueError("--steps, --prompts, --max-tokens, --lr and --head must be above 0")
    if args.resync_ess is None:
        args.resync_ess = lesson4.RESYNC_ESS if args.correction == "dlc" else 0.0
    if args.group_size < 2 or args.staleness < 0 or not 0 <= args.resync_ess <= 1:
        raise ValueError("--group-size is 2 or more, --staleness 0 or more, --resync-ess 0 to 1")
    if args.head and args.correction != "dlc":
        raise ValueError("--head is recorded for --correction dlc only")
    name = f"{args.correction}-s{args.staleness}-seed{args.seed}" + "-quick" * args.quick
    args.out = args.out or lesson1.ROOT / "runs" / name
    args.out.mkdir(parents=True, exist_ok=True)
    if (args.out / ("summary.json" if args.resume else "run.json")).exists():
        raise ValueError(f"{args.out} holds a run {'that has ended' if args.resume else 'already'}")
    task = lesson1.TASKS[args.task]
    # builds the tiny policy, if there is none yet
    path = [lesson1.find_model(args.model, task) if RANK == 0 else None]
    if WORLD > 1:
        torch.distributed.broadcast_object_list(path)
    args.model = str(Path(path[0]).resolve() if Path(path[0]).exists() else path[0])
    trainer = lesson1.load_model(args.model)
    tokenizer = lesson1.transformers.AutoTokenizer.from_pretrained(args.model)
    defaults = dict(zip(BY_MODEL, DEFAULTS[lesson1.scale(tokenizer)]))
    defaults.update({"steps": 4, "prompts": 8} if args.quick else {})
    defaults.update({"max_tokens": task.max_tokens} if task.shots else {})
    for name, value in defaults.items():
        if getattr(args, name) is None and (name != "head" or args.correction == "dlc"):
            setattr(args, name, value)
    if (args.head or 0) > lesson1.vocabulary(trainer) or args.prompts % WORLD:
        raise ValueError(f"--head exceeds the vocabulary, or --prompts is no multiple of {WORLD}")
    if args.replay != "none":
        lesson5.normalizes(trainer)      # no routers, or none that can be replayed
    if args.engine_dtype == "bfloat16" and args.trainer_dtype != "bfloat16" and all(
            torch.equal(x, x.bfloat16().float()) for x in trainer.parameters()):
        print("A bfloat16 engine sees a change of a weight w only beyond about |w| / 256. The "
              f"{args.trainer_dtype} trainer sees every change, so that the two will drift apart.")
    if args.lm_head_fp32:
        lesson1.lm_head_in_float32(trainer)
    state = args.out / "state.pt"
    saved = torch.load(state, map_location="cpu") if args.resume and state.exists() else None
    if RANK == 0:
        for part in (trainer, tokenizer):                # what cannot be saved fails here
            part.save_pretrained(args.out / "checkpoint-0")
        (args.out / "metrics.csv").write_text(saved["metrics"] if saved else "")
    return trainer, tokenizer, saved


def main(argv=None, sampler=None) -> None:
    """`sampler`: a running Sampler of the same model, so that tests can share one engine."""
    parser, args = parse(argv)
    if WORLD > 1 and not torch.distributed.is_initialized():   # before vLLM makes its own world
        torch.distributed.init_process_group("nccl" if lesson1.DEVICE.type == "cuda" else "gloo")
    try:
        trainer, tokenizer, saved = prepare(args)
        start = lesson5.RoutedSampler if lesson5.is_mixture(trainer.config) else lesson1.Sampler
        sampler = sampler or start(args.model, args.engine_dtype, lm_head_fp32=args.lm_head_fp32,
                                   kv_cache_gib=2)
        held_out = lesson1.TASKS[args.task], tokenizer, 8 * args.prompts, args.max_tokens
        if RANK == 0 and not args.resume:
            args.before = lesson3.held_out(trainer, sampler, *held_out)
            (args.out / "run.json").write_text(json.dumps(vars(args), default=str, indent=1))
        policy = train(args, trainer, tokenizer, sampler, saved)
        if RANK == 0:
            conclude(args, lesson3.held_out(policy, sampler, *held_out), policy, tokenizer)
    except BaseException as error:
        if KeyboardInterrupt in (type(error), type(error.__context__)):    # vLLM may raise over it
            parser.exit(130, f"interrupted: --resume {args.out} goes on, if run.json is there\n")
        if isinstance(error, (OSError, ValueError, FloatingPointError, lesson1.SyncError)):
            parser.exit(2, f"train.py: error: {error}\n")
        raise


if __name__ == "__main__":
    main()
