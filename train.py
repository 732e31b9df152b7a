"""GRPO end to end: vLLM samples, a separate PyTorch trainer learns, and the mismatch is in every row.

Of GRPO (arXiv 2402.03300) this is the group-relative advantage with one optimizer step a batch; no KL penalty; the loss is
a mean over the batch's tokens. With a fresh sampler PPO's ratio is 1 and its clip does nothing; with a stale one see --correction.

A step, in the order of the loop in `train`:
 1. sync     the sampler takes the trainer's weights once they are older than        Sampler.sync (01)
             --staleness steps
 2. sample   G responses to each of the prompts, from the sampler's mu               Sampler.sample (01)
 3. score    discrepancy d = log pi_old - log mu, lag l = log pi - log pi_old,       score (01; 05: --replay)
             pi_old being the trainer at the sampler's weights
             if ESS(exp(l)) < --resync-ess: drop the batch, back to 1 with a sync    ess (02), see 04
 4. reward   each response, its advantage within its group, and the weight w of      rewards (01), advantages (02)
             --correction; for dlc also the centre c                                 CORRECTIONS (02), centre (04)
 5. update   L = -sum A (w log pi - c) / N; gradient norm clipped to 1; AdamW        policy_loss (02)

Run it:  python train.py                  a CPU: the tiny policy learns the running sum, half a minute
         python train.py --staleness 63   the sampler's weights are up to 63 steps old: training goes astray
         python train.py --staleness 63 --correction dlc      center the score, clip the lag, resynchronise (lesson 4)
         python train.py --resume runs/dlc-s63-seed0          goes on where that run was killed: the same CSV, on a CPU bit for bit
         torchrun --nproc-per-node 2 train.py                 several processes: FSDP2, a sampler each (run on CPUs only)
         python train.py --model Qwen/Qwen3-0.6B              a CUDA GPU (the default there): not run yet
A run lives in --out: run.json (its flags), metrics.csv (a row a step), checkpoint-<step>/ (which transformers and vLLM load as
any model), and, once it has ended, train.png and summary.json. Columns of the CSV: age of the sampler's weights in steps; mean reward; mean length and the share cut
off at --max-tokens; mean |d| and k3 of the discrepancy; mean |l| and rms of the lag; of the batch as first drawn, the
effective sample size of tokens and of responses and the mean lag ratio (predicted 1); whether it was dropped for a
resynchronised one, and how many tokens and seconds that cost; mean weight; loss (its value says nothing, its gradient
does), gradient norm before clipping, learning rate; response tokens; tokens left out because the engine gave them no finite
log-prob; whether float16 overflowed and the step was skipped; seconds by part.
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
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np

if "LOCAL_RANK" in os.environ:     # torchrun: each process sees one GPU, its own; vLLM takes the first that it sees
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(os.environ["LOCAL_RANK"])] if visible else os.environ["LOCAL_RANK"]
lesson1 = import_module("01_mismatch")   # before torch: it hides the broken packages around it
lesson2 = import_module("02_importance_sampling")
lesson4 = import_module("04_dlc")
lesson5 = import_module("05_router_replay")
import torch
import torch.distributed
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))     # torchrun sets them
SECONDS = ("sampling", "scoring", "update", "sync")
COLUMNS = ["step", "age", "reward", "length", "truncated", "discrepancy_abs", "discrepancy_k3", "lag_abs", "lag_rms",
           "ess_token", "ess_sequence", "mean_ratio", "resynced", "dropped_tokens", "dropped_seconds",
           "weight", "loss", "grad_norm", "lr", "tokens", "not_finite", "skipped", *(f"seconds_{s}" for s in SECONDS), "seconds_step"]
KEEP = 2               # checkpoints
HELD_OUT = [2**40, 7]  # the held-out prompts' seed; no run's seed and step
CORRECTIONS = {**lesson2.CORRECTIONS, "dlc": lesson4.lag_clip}     # dlc: with the centre, and resynchronised


# ---------------------------------------------------------------- the command line
def positive(kind):
    """An argparse type: a finite number of that kind above 0."""
    def convert(text):
        value = kind(text)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError
        return value
    convert.__name__ = f"positive {kind.__name__}"
    return convert


def parse(argv):
    """The flags, their defaults for this model, the trainer and the tokenizer; exit code 2 and one line if one is bad."""
    parser = lesson1.Parser(prog="train.py", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", help=f"a local directory or a hub name (default: {lesson1.HUB_MODEL} on a GPU, else the tiny policy)")
    add("--steps", type=positive(int), help="optimizer steps (80; --quick: 4)")
    add("--prompts", type=positive(int), help="prompts a step (32, for which --lr is chosen; not tiny: 16; --quick: 8)")
    add("--group-size", type=positive(int), default=8, help="responses a prompt; a group of 1 has no advantage")
    add("--max-tokens", type=positive(int), help="longest response (9, what the task needs; not tiny: 256)")
    add("--lr", type=positive(float), help="learning rate of AdamW, falling linearly to 0 (1.5e-3; not tiny: 1e-6)")
    add("--advantage", choices=["std", "mean", "raw"], default="std", help="see advantages in lesson 2")
    add("--staleness", type=int, default=0, help="how old the sampler's weights may get, in steps; 0 syncs before each")
    add("--correction", choices=list(CORRECTIONS), default="none", help="the importance weight, see lesson 2; dlc: see lesson 4")
    add("--resync-ess", type=float, help="sync and sample again where the lag ratio's effective sample size is below this share "
        "of the batch, 0 to 1; 0 never (0.5 with --correction dlc, else 0)")
    add("--resync-level", choices=["sequence", "token"], default="sequence", help="whose ratios that is: whole responses' or tokens'")
    add("--head", type=positive(int), help="with --correction dlc: how many of the sampler's most likely tokens (the distribution's "
        "head) are recorded for the centre (the vocabulary; not tiny: 128)")
    add("--replay", choices=["none", "r2", "r3"], default="none", help="a mixture of experts: whose router picks the trainer replays, its "
        "own at the sampler's weights (r2) or the sampler's (r3), see lesson 5")
    add("--engine-dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="vLLM's")
    add("--trainer-dtype", choices=["bfloat16", "float16", "float32"], help="the trainer computes in it, by autocast; its weights stay "
        "float32 (float32; on a GPU bfloat16)")
    add("--head-fp32", action="store_true", help="the model's output layer (its head) in float32, in the engine and in the trainer")
    add("--seed", type=lesson1.seed, default=0, help="of the prompts and of the sampling, 0 to 2^32 - 1")
    add("--out", type=Path, help="the run's folder (runs/<correction>-s<staleness>-seed<seed>, with -<replay> in it if there is any, and -quick)")
    add("--save-every", type=positive(int), default=20, help=f"steps between checkpoints; the newest {KEEP} are kept")
    add("--quick", action="store_true", help="4 steps of 8 prompts, to see that everything works")
    add("--resume", type=Path, metavar="RUN", help="a run's folder: goes on from its newest checkpoint, with its flags")
    args = parser.parse_args(argv)
    if args.resume:
        if args != parser.parse_args(["--resume", str(args.resume)]):
            parser.error("--resume takes all its settings from the run: no other flag goes with it")
        args = resumed(parser, args.resume)
    if args.group_size < 2:
        parser.error("--group-size must be at least 2: an advantage compares a group's responses")
    if args.staleness < 0:
        parser.error(f"--staleness must be at least 0, not {args.staleness}")
    if args.resync_ess is not None and not 0 <= args.resync_ess <= 1:
        parser.error(f"--resync-ess must be between 0 and 1, not {args.resync_ess}")
    if args.head and args.correction != "dlc":
        parser.error("--head is what the centre of --correction dlc is made from: no other correction reads it")
    if not args.resume:
        args.checkpoint = None
    if args.model and Path(args.model).exists():
        args.model = str(Path(args.model).resolve())       # a run can be resumed from elsewhere
    args.out = args.out or lesson1.ROOT / "runs" / (
        f"{args.correction}-s{args.staleness}" + (f"-{args.replay}" if args.replay != "none" else "") + f"-seed{args.seed}" + ("-quick" if args.quick else ""))
    if (args.out / "metrics.csv").exists() and not args.resume:
        parser.error(f"--out {args.out} holds a run already: --resume it, choose another folder, or delete this one")
    try:
        lesson1.check_vllm()
        lesson1.check_writable(args.out)
        args.path = lesson1.find_model(args.model)
        args.trainer = lesson1.load_model(args.checkpoint or args.path)
        if args.replay != "none":
            lesson5.routers(args.trainer)
    except ValueError as error:
        parser.error(str(error))
    if args.head_fp32:
        lesson1.head_in_float32(args.trainer)
    args.tokenizer = transformers.AutoTokenizer.from_pretrained(args.path)
    tiny = lesson1.is_tiny(args.tokenizer)
    args.steps = args.steps or (4 if args.quick else 80)
    args.prompts = args.prompts or (8 if args.quick else 32 if tiny else 16)
    args.max_tokens = args.max_tokens or (lesson1.TASKS["sum"].max_tokens if tiny else 256)
    args.lr = args.lr or (1.5e-3 if tiny else 1e-6)
    args.resync_ess = (0.5 if args.correction == "dlc" else 0.0) if args.resync_ess is None else args.resync_ess
    args.vocabulary = args.trainer.config.get_text_config().vocab_size
    args.head = (args.head or (args.vocabulary if tiny else 128)) if args.correction == "dlc" else 0
    args.trainer_dtype = args.trainer_dtype or ("bfloat16" if lesson1.DEVICE.type == "cuda" else "float32")
    if args.head > args.vocabulary:
        parser.error(f"--head {args.head} is more than the vocabulary of {args.vocabulary}")
    if args.correction == "snis" and WORLD > 1:
        parser.error("--correction snis divides by the mean over the whole batch: it runs in one process only")
    if args.prompts % WORLD:
        parser.error(f"--prompts {args.prompts} cannot be split among {WORLD} processes")
    if lesson1.is_mixture(args.trainer.config) and args.replay == "none" and RANK == 0:
        print("a mixture of experts without --replay: its router may pick other experts in the engine than in the trainer, see lesson 5")
    return args


def resumed(parser, out: Path) -> argparse.Namespace:
    """The flags of the run in `out`, with its newest whole checkpoint (None: it begins anew)."""
    if (out / "summary.json").exists():
        parser.error(f"--resume {out}: this run has ended")
    try:
        flags = json.loads((out / "run.json").read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--resume {out}: no run.json of a run there ({error})")
    if flags.pop("processes", None) != WORLD:
        parser.error(f"--resume {out}: the run had another number of processes")
    saved = checkpoints(out)
    return argparse.Namespace(**flags, out=out, resume=out, checkpoint=out / f"checkpoint-{saved[-1]}" if saved else None)


# ---------------------------------------------------------------- what a run leaves behind
def append_row(path: Path, row: dict) -> None:
    """One whole line, on the disk; a disk that fills up in the middle of it leaves the lines before."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if size == 0:
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        os.truncate(path, size)
        raise


def checkpoints(out: Path) -> list[int]:
    """The steps of the whole checkpoints, in order."""
    return sorted(int(p.name.split("-")[1]) for p in out.glob("checkpoint-*") if p.name.split("-")[1].isdigit())


def save_checkpoint(model, weights: dict, tokenizer, state: dict, out: Path, step: int) -> None:
    """A directory that transformers and vLLM load, and `state`, all that a run needs to go on: under its name once it is whole."""
    new = out / f"checkpoint-{step}.tmp"
    shutil.rmtree(new, ignore_errors=True)
    model.save_pretrained(new, state_dict=weights)
    tokenizer.save_pretrained(new)
    torch.save(state, new / "state.pt")
    os.replace(new, out / f"checkpoint-{step}")
    for old in checkpoints(out)[:-KEEP]:
        doomed = out / f"checkpoint-{old}.tmp"                         # half deleted it must not look whole
        os.replace(out / f"checkpoint-{old}", doomed)
        shutil.rmtree(doomed)


def rewind(path: Path, step: int) -> None:
    """Leaves the header and the rows before `step` in metrics.csv, and no torn checkpoint: what came after happens again."""
    for torn in path.parent.glob("checkpoint-*.tmp"):
        shutil.rmtree(torn)
    if path.exists() and step == 0:
        path.unlink()
    elif path.exists():
        new = path.with_suffix(".tmp")
        new.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:1 + step]))
        os.replace(new, path)


def draw(out: Path) -> None:
    """The run's picture, from its CSV."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    column = {name: [float(row[name]) for row in rows] for name in COLUMNS}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4))
    left.plot(column["step"], column["reward"], "k-")
    left.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title=f"{out.name}: reward")
    floor = 1e-5                                                      # where an exact 0 is drawn
    for name, style, label in (("discrepancy_abs", "k--", "discrepancy, mean |d|"), ("lag_abs", "k.-", "lag, mean |l|")):
        middle.semilogy(column["step"], [max(v, floor) for v in column[name]], style, label=label)
    middle.set(xlabel="step", ylabel="nats a token", title="the engine's part and the stale weights' part\n"
               + ("(the lag is exactly 0)" if not any(column["lag_abs"]) else f"(an exact 0 is drawn at {floor:g})"))
    middle.legend(fontsize=8)
    right.plot(column["step"], column["ess_sequence"], "k.-", label="ESS of responses")
    right.plot(column["step"], column["ess_token"], "-", color="0.6", label="ESS of tokens")
    right.plot(column["step"], column["mean_ratio"], "k:", label="mean lag ratio (predicted 1)")
    resynced = [step for step, was in zip(column["step"], column["resynced"]) if was]
    right.plot(resynced, [0.02] * len(resynced), "k^", label="batch dropped, sampler resynchronised")
    right.axhline(0.5, color="k", linewidth=0.6)
    right.set(xlabel="step", ylabel="share of the batch; ratio", ylim=(0, 1.9), title=f"what is left of the stale samples\n({len(resynced)} resynchronisations)")
    right.legend(fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(out / "train.png", dpi=110)
    plt.close(figure)


class Clock:
    """Seconds by part of a step; waits for the GPU, so that each part pays for its own kernels."""

    def __init__(self):
        self.seconds = dict.fromkeys(SECONDS, 0.0)

    @contextmanager
    def __call__(self, part: str):
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[part] += time.perf_counter() - start


# ---------------------------------------------------------------- several processes (torchrun)
def every(x: torch.Tensor) -> torch.Tensor:
    """The entries (n,) of all processes."""
    if WORLD == 1:
        return x
    parts = [None] * WORLD
    torch.distributed.all_gather_object(parts, x.cpu())
    return torch.cat(parts).to(x.device)


def whole_weights(trainer) -> dict:
    """The state dict, all of it on every process."""
    return trainer.state_dict() if WORLD == 1 else get_model_state_dict(trainer, options=StateDictOptions(full_state_dict=True))


def shard(trainer) -> None:
    """FSDP2: each process keeps a part of every layer's weights, gradients and optimizer state."""
    mesh = init_device_mesh(lesson1.DEVICE.type, (WORLD,))
    for layer in trainer.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(trainer, mesh=mesh)


# ---------------------------------------------------------------- the run
def accuracy(sampler, task, args, temperature: float) -> float:
    """Mean reward on held-out prompts (their own random stream; 10^8 prompts exist)."""
    digits, prompts = lesson1.make_prompts(task, args.tokenizer, 8 * args.prompts, np.random.default_rng(HELD_OUT))
    rollout = sampler.sample(prompts, args.max_tokens, seed=0, temperature=temperature)
    return lesson1.rewards(task, digits, rollout, args.tokenizer).mean().item()


def train(args, sampler, before: dict) -> None:
    """The loop, written out; it leaves the sampler with the last weights. before: the accuracy at the start, which a
    checkpoint carries to the end."""
    trainer, device = args.trainer, lesson1.DEVICE
    task, correct = lesson1.TASKS["sum"], CORRECTIONS[args.correction]
    old, first, synced = copy.deepcopy(trainer), 0, 0                  # the trainer at the sampler's weights; these weights' step
    if WORLD > 1:
        shard(trainer)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=args.lr, betas=(0.9, 0.999), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / args.steps)
    scaler = torch.amp.GradScaler(device.type, enabled=args.trainer_dtype == "float16")      # its small gradients would become 0
    if args.checkpoint:
        saved = torch.load(args.checkpoint / "state.pt", map_location="cpu")
        first, synced = saved["step"], saved["synced"]
        set_optimizer_state_dict(trainer, optimizer, saved["optimizer"], options=StateDictOptions(full_state_dict=WORLD > 1))
        schedule.load_state_dict(saved["schedule"])
        scaler.load_state_dict(saved["scaler"])
        old.load_state_dict(saved["old"])
        del saved
        sampler.sync(old)
        version = sampler.version
    share = args.prompts * args.group_size // WORLD                    # responses of this process
    mine, skips = slice(RANK * share, (RANK + 1) * share), 0
    for step in range(first, args.steps):
        begin, clock, dropped = time.perf_counter(), Clock(), {"resynced": 0, "dropped_tokens": 0, "dropped_seconds": 0.0}
        due = step == 0 or step - synced > args.staleness
        while True:
            # 1. sync: theta_s <- theta
            if due:
                with clock("sync"):
                    old.load_state_dict(whole_weights(trainer))        # a copy: it must not move with the trainer
                    sampler.sync(old)
                    synced, version = step, sampler.version

            # 2. sample: y ~ mu at theta_s. All randomness comes from the seed and the step
            with clock("sampling"):
                digits, prompts = lesson1.make_prompts(task, args.tokenizer, args.prompts, np.random.default_rng([args.seed, step]))
                rollout = sampler.sample(prompts, args.max_tokens, seed=[args.seed, step, 1 + dropped["resynced"]],
                                         group_size=args.group_size, head=args.head, rows=mine)
                assert rollout.neutral and rollout.version == version, "not the distribution that the loss is about"
                if WORLD > 1:                                          # every process needs the same number of micro-batches
                    rollout = lesson1.widen(rollout, int(every(torch.tensor([rollout.ids.shape[1]])).max()))
            mask = rollout.mask & rollout.logp_sampler.isfinite()      # a token without a finite log-prob is not trained on
            if not_finite := int(every((rollout.mask & ~mask).flatten()).sum()):
                rollout = lesson1.replace(rollout, head_logp=torch.where(mask[..., None], rollout.head_logp, 0.0))
            n_tokens = int(every(mask.sum()[None]).sum())
            if n_tokens == 0:
                raise FloatingPointError(f"step {step}: the engine gave no token a finite log-prob")

            # 3. score: log pi at theta, and at theta_s, in the same micro-batches: another batch shape rounds elsewhere
            autocast = torch.autocast(device.type, getattr(torch, args.trainer_dtype), enabled=args.trainer_dtype != "float32")
            parts = lesson1.micro_batches(rollout, args.vocabulary)
            with clock("scoring"), autocast:
                routes = lesson5.routes_for(args.replay, old, rollout)             # None: nothing is replayed
                logp, head_logp = lesson5.score(trainer, rollout, routes, head=True, grad=len(parts) == 1)   # one part: its graph serves the update
                logp_now = logp.detach()
                logp_old, head_logp_old = lesson5.score(old, rollout, routes, head=True) if step > synced else (logp_now, head_logp.detach())
            lag = every((logp_now - logp_old)[mask])
            lag_of_responses = every(lesson2.sequence_sum(logp_now - logp_old, mask)[:, 0])
            if not dropped["resynced"]:
                judged = {"ess_token": lesson2.ess(lag), "ess_sequence": lesson2.ess(lag_of_responses), "mean_ratio": lesson2.ratio(lag.double()).mean().item()}
            # resynchronise: ESS(r) < 1/2 before the update. At age 0 all r are 1, and the ESS is 1 up to rounding
            if not judged[f"ess_{args.resync_level}"] < args.resync_ess or step == synced:
                break
            due, dropped = True, {"resynced": 1, "dropped_tokens": n_tokens, "dropped_seconds": round(time.perf_counter() - begin, 4)}

        # 4. reward, the advantage within each group, and from all these the weight
        R = lesson1.rewards(task, digits.repeat(args.group_size, 0)[mine], rollout, args.tokenizer)
        A = lesson2.advantages(R, args.group_size, args.advantage).to(device)
        w = correct(logp_now, logp_old, torch.where(mask, rollout.logp_sampler, 0.0), A, mask)

        # 5. update: the parts' losses, over the whole batch's token count, add up to the batch's loss
        with clock("update"):
            loss = 0.0
            for rows in parts:
                with autocast:
                    part_logp, part_head = (logp, head_logp) if len(parts) == 1 else lesson5.score(
                        trainer, rollout[rows], None if routes is None else routes[rows], head=True, grad=True)
                centre = lesson4.centre(part_head, head_logp_old[rows], rollout.head_logp[rows], A[rows], args.vocabulary) if args.head else 0.0
                part_loss = lesson2.policy_loss(part_logp, w[rows], A[rows], mask[rows], n_tokens, centre)
                scaler.scale(part_loss * WORLD).backward()             # FSDP2 takes the mean over the processes
                loss += part_loss.item()
            scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
            grad_norm = (grad_norm.full_tensor() if WORLD > 1 else grad_norm).item()
            if not math.isfinite(grad_norm) and not scaler.is_enabled():     # a scaler skips such a step and lowers its scale
                raise FloatingPointError(f"step {step}: the gradient is not finite; the weights are still those of the step before")
            lr, scale = schedule.get_last_lr()[0], scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped = scaler.get_scale() < scale                       # float16: the gradient overflowed, the weights stay
            skips = skips + 1 if skipped else 0
            if skips == 5:
                raise FloatingPointError(f"step {step}: the gradient overflowed float16 five times in a row")
            if not skipped:
                schedule.step()

        # what the step was: log pi - log mu = discrepancy + lag
        discrepancy = lesson1.gap(*(every(x[mask]) for x in (logp_old, rollout.logp_sampler)))
        R, weight = every(R), every(w[mask]).mean().item()
        cut = every(torch.tensor([float(reason == "length") for reason in rollout.finish_reasons])).mean().item()
        no_gradient = not every(A).any()
        seconds = time.perf_counter() - begin
        row = {"step": step, "age": step - synced, "reward": R.mean().item(), "length": n_tokens / len(R), "truncated": cut,
               "discrepancy_abs": discrepancy["abs"], "discrepancy_k3": discrepancy["k3"], "lag_abs": lag.abs().mean().item(), "lag_rms": lag.double().square().mean().sqrt().item(),
               **judged, **dropped, "weight": weight, "loss": every(torch.tensor([loss])).sum().item(), "grad_norm": grad_norm, "lr": lr, "tokens": n_tokens, "not_finite": not_finite, "skipped": int(skipped),
               **{f"seconds_{part}": round(s, 4) for part, s in clock.seconds.items()}, "seconds_step": round(seconds, 4)}
        if RANK == 0:
            append_row(args.out / "metrics.csv", row)
            print(f"step {step:3d}  reward {row['reward']:.3f}  |d| {discrepancy['abs']:.1e} k3 {discrepancy['k3']:.1e}  "
                  f"lag {row['lag_abs']:.1e} (age {step - synced})  ESS {judged['ess_sequence']:.2f}  grad {grad_norm:.2e}  {n_tokens / seconds:5.0f} tok/s  "
                  + " ".join(f"{name} {s:.2f}" for name, s in clock.seconds.items()) + " s"
                  + (f"  resynchronised: {dropped['dropped_tokens']} tokens dropped" if dropped["resynced"] else "")
                  + ("  skipped: float16 overflowed" if skipped else "")
                  + (f"  {not_finite} tokens without a finite log-prob: left out" if not_finite else "")
                  + ("  every group's rewards are equal: no gradient" if no_gradient else "")
                  + (f"  {cut:.0%} cut off: raise --max-tokens" if cut > 0.5 else ""), flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            state = {"step": step + 1, "synced": synced, "before": before, "old": old.state_dict(), "schedule": schedule.state_dict(), "scaler": scaler.state_dict(),
                     "optimizer": get_optimizer_state_dict(trainer, optimizer, options=StateDictOptions(full_state_dict=WORLD > 1))}
            weights = whole_weights(trainer)
            if RANK == 0:
                save_checkpoint(trainer, weights, args.tokenizer, state, args.out, step + 1)
    old.load_state_dict(whole_weights(trainer))
    sampler.sync(old)                                                  # for the accuracy at the end


def left_behind(out: Path) -> str:
    """What an unfinished run can be used for."""
    rows = len((out / "metrics.csv").read_text().splitlines()) - 1 if (out / "metrics.csv").exists() else 0
    saved = sorted(p.name for p in out.glob("checkpoint-*") if not p.name.endswith(".tmp"))
    return f"{out} holds {rows} steps in metrics.csv and {', '.join(saved) or 'no checkpoint yet (--resume begins anew)'}"


def main(argv=None, sampler=None) -> None:
    """argv as on the command line. `sampler`: a running Sampler of the same model, to be used and resynchronised."""
    if WORLD > 1 and not torch.distributed.is_initialized():            # before vLLM makes a world of its own
        torch.distributed.init_process_group("nccl" if lesson1.DEVICE.type == "cuda" else "gloo")
    if RANK > 0:
        torch.distributed.barrier()                                     # the first process builds the tiny policy
    args = parse(argv)
    if WORLD > 1 and RANK == 0:
        torch.distributed.barrier()
    flags = {k: v for k, v in vars(args).items() if k not in ("out", "resume", "checkpoint", "path", "trainer", "tokenizer", "vocabulary")}
    try:
        if RANK == 0 and not args.resume:
            lesson1.save_json({**flags, "model": str(args.path), "processes": WORLD}, args.out / "run.json")
        if RANK == 0 and args.resume:
            rewind(args.out / "metrics.csv", int(args.checkpoint.name.split("-")[1]) if args.checkpoint else 0)
        sampler = sampler or lesson1.Sampler(args.path, args.engine_dtype, head_fp32=args.head_fp32)
        task, temperatures = lesson1.TASKS["sum"], {"greedy": 0.0, "sampled": 1.0}
        if args.checkpoint:
            before = torch.load(args.checkpoint / "state.pt", map_location="cpu")["before"]
        else:
            sampler.sync(args.trainer)      # a running one may hold anything
            before = {name: accuracy(sampler, task, args, t) for name, t in temperatures.items()}
        if RANK == 0:
            print(f"held-out accuracy before: greedy {before['greedy']:.3f}, sampled {before['sampled']:.3f}")
        train(args, sampler, before)
        after = {name: accuracy(sampler, task, args, t) for name, t in temperatures.items()}
    except (OSError, lesson1.SyncError, FloatingPointError, ValueError) as error:
        print(f"train.py: error: {error}; {left_behind(args.out)}", file=sys.stderr)
        sys.exit(1)
    except BaseException as error:
        # Ctrl-C, also where vLLM's clean-up raised an error of its own over it
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        print(f"\ninterrupted: {left_behind(args.out)}; go on with --resume {args.out}", file=sys.stderr)
        sys.exit(130)
    if RANK > 0:
        return
    draw(args.out)
    with (args.out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    total = sum(float(row["seconds_step"]) for row in rows)
    split = {part: sum(float(row[f"seconds_{part}"]) for row in rows) / total for part in SECONDS}
    split["all the rest"] = 1 - sum(split.values())
    syncs = sum(row["age"] == "0" for row in rows)
    lesson1.save_json({"held_out_prompts": 8 * args.prompts, "before": before, "after": after, "syncs": syncs, "seconds": total, "split": split}, args.out / "summary.json")
    print(f"\n{syncs} syncs in {args.steps} steps, {sum(int(row['resynced']) for row in rows)} of them because too little of the samples was left "
          f"({sum(int(row['dropped_tokens']) for row in rows)} tokens dropped)")
    print(f"{args.steps} steps in {total:.0f} s: " + ", ".join(f"{part} {share:.1%}" for part, share in split.items()))
    print(f"held-out accuracy, {8 * args.prompts} prompts: " + ", ".join(f"{name} {before[name]:.3f} -> {after[name]:.3f}" for name in before))
    print(f"{args.out}: metrics.csv, summary.json, train.png, checkpoint-{args.steps}/" + ("  (--quick: everything works; 4 steps teach nothing)" if args.quick else ""))


if __name__ == "__main__":
    main()
