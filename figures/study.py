"""The long experiments behind the README: lessons 3, 4 and 5 with every arm and several seeds.

    python figures/study.py 03      the feedback loop
    python figures/study.py 04      every correction on two tasks
    python figures/study.py 05      training with router replay
    python figures/study.py train   train.py: four arms, three seeds, for figures/train.json

A study writes figures/NN_study.json after each run. Stopped and started again it goes on where it
was: a record that is there is not made again. Delete the file after a change of the code."""
import argparse
import copy
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
lesson1 = import_module("01_mismatch")   # before numpy and torch: it decides what they import
lesson2, lesson3 = import_module("02_importance_sampling"), import_module("03_decompose")
lesson4, lesson5 = import_module("04_dlc"), import_module("05_router_replay")
import numpy as np
import torch
from tqdm import tqdm

STUDIES = {}        # "03" -> function(path of the JSON) that runs the study


def study(lesson: str):
    """Registers the study of a lesson."""
    def register(function):
        STUDIES[lesson] = function
        return function
    return register


def resumable(path: Path, plan: dict, run) -> dict:
    """{key: run(*arguments)} for each {key: arguments} of the plan. `path` holds all records so far
    after each run, one per line, and what it holds is not run again. NaN becomes null."""
    try:
        records = json.loads(path.read_text())
    except (OSError, ValueError):
        records = {}
    for number, (key, arguments) in enumerate(plan.items(), 1):
        if key not in records:
            print(f"run {number} of {len(plan)}: {key}", flush=True)
            record = json.dumps(run(*arguments))
            records[key] = json.loads(record, parse_constant=lambda name: None)
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = (f"{json.dumps(key)}: {json.dumps(record)}" for key, record in records.items())
            path.with_suffix(".tmp").write_text("{\n" + ",\n".join(lines) + "\n}\n")
            os.replace(path.with_suffix(".tmp"), path)
    return {key: records[key] for key in plan}


# ---------------------------------------------------------------- lesson 3
# The weight w = r = pi / pi_old, not clipped: it repairs the lag alone.
lag_is = lesson2.correction(lambda x: x.lag)


def feedback(trainer, sampler, own, tokenizer, seed: int, lr: float, steps: int = 24) -> list[dict]:
    """Trains twice from the same weights, with w = 1 and with w = r. The sampler keeps them: both
    see the same samples. A row per step: ESS of responses; rms of the lag in nats on the sampler's
    prefixes and on the run's own, which the engine `own` samples at the run's weights; reward."""
    rows = [{"step": k, "seed": seed, "lr": lr} for k in range(steps)]
    rng = np.random.default_rng([seed, 99])
    _, prompts = lesson1.make_prompts(lesson1.SUM, tokenizer, 128, rng)
    for name, weight in (("w = 1", lesson2.CORRECTIONS["none"]), ("w = r", lag_is)):
        model = copy.deepcopy(trainer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        run = lesson3.grpo(model, sampler, lesson1.SUM, tokenizer, optimizer,
                           lesson3.weighted(weight), steps, steps, seed, decay=False)
        for batch in tqdm(run, total=steps, desc=f"feedback: lr {lr}, seed {seed}, {name}"):
            own.sync(model)
            fresh = own.sample(prompts, lesson1.SUM.max_tokens, seed=[seed, batch.step, 2])
            lag = (lesson1.logprobs(model, fresh) - lesson1.logprobs(trainer, fresh))[fresh.mask]
            row = lesson3.measure(batch)
            rows[batch.step] |= {
                f"ess {name}": row["ESS of responses"], f"sampler {name}": row["rms l"],
                f"own {name}": lesson3.rms(lag), f"reward {name}": row["reward"]}
    return rows


def feedback_ratios(rows: list[dict]) -> dict:
    """How much the lag's rms grows under w = r, over how much it grows under w = 1. Before: from
    step 1 (step 0 is the same under both) until the ESS under w = 1 falls below 1/2. After: from
    there to the last step. NaN for a stretch of no steps, or if w = 1 did not let the lag grow."""
    last = len(rows) - 1
    low = next((row["step"] for row in rows if row["ess w = 1"] < 0.5), len(rows))
    result = {"lr": rows[0]["lr"], "seed": rows[0]["seed"], "first step with ESS < 1/2": low}
    for prefixes in ("sampler", "own"):
        for part, a, b in (("before", 1, min(low, last)), ("after", min(low, last), last)):
            one, r = (rows[b][f"{prefixes} {name}"] - rows[a][f"{prefixes} {name}"]
                      for name in ("w = 1", "w = r"))
            grows = b > a and one > 0
            result[f"{prefixes} prefixes, {part}"] = r / one if grows else float("nan")
    return result


@study("03")
def study_03(path: Path) -> None:
    """The feedback loop: five paired seeds at two learning rates."""
    policy = lesson1.policy()
    trainer, tokenizer = lesson1.load_model(policy), lesson1.make_tokenizer()
    sampler, own = lesson1.Sampler(policy), lesson1.Sampler(policy, dtype="float32")
    plan = {f"lr {lr}, seed {seed}": (seed, lr) for lr in (1.5e-3, 5e-4) for seed in range(5)}
    runs = resumable(path, plan, partial(feedback, trainer, sampler, own, tokenizer))
    lesson1.table("growth of the lag, w = r over w = 1 (below 1: the weight damps the loop)",
                  [feedback_ratios(rows) for rows in runs.values()])


# ---------------------------------------------------------------- lesson 4
def up_then_down(digits: np.ndarray) -> np.ndarray:
    """Right digits (n, 8): the running sum modulo 10 adds the first four, and subtracts the others."""
    return (digits * [1, 1, 1, 1, -1, -1, -1, -1]).cumsum(1) % 10


def stops_early(shown: np.ndarray, digits: np.ndarray, rng, step: int) -> np.ndarray:
    """Token ids (n, 9). The last 200 steps of the warm start end after a digit from the second on,
    with a chance of 0.65 each."""
    n, length = shown.shape
    ids = np.pad(shown, ((0, 0), (0, 1)), constant_values=lesson1.END)
    if step >= 350:
        end = np.minimum(1 + rng.geometric(0.65, n), length)
        ids[np.arange(n), end] = lesson1.END
        ids[np.arange(length + 1) > end[:, None]] = lesson1.PAD
    return ids


STOP = lesson1.Task(    # the policy chooses its length: stopping early costs the digits not written
    "stop", length=8, max_tokens=9, steps=550, answer=up_then_down,
    grade=lambda given, right, ended: sum(a == b for a, b in zip(given, right)) / len(right),
    demonstrate=stops_early)


SETTINGS = {       # found with a simulated engine, on other seeds and policies; nothing was tuned here
    "sum": lesson4.Setting(),
    "sum, lr 7e-4": lesson4.Setting(lr=7e-4),
    "stop": lesson4.Setting(STOP, steps=60, period=60, lr=1e-3),
    "free, raw": lesson4.Setting(lesson3.FREE, steps=100, period=1, lr=0.04, prompts=16, every=10),
    "free, mean": lesson4.Setting(lesson3.FREE, steps=100, period=1, lr=0.04, prompts=16, every=10)}
LOOP = {kind: {"advantage": kind.split(", ")[1], "decay": False} for kind in ("free, raw", "free, mean")}


def unweighted(lag, advantage):
    """f(r) = 1."""
    return torch.ones_like(lag)


def dlc(**switches) -> dict:
    """An arm: DLC with some of its parts switched."""
    head = lesson4.HEAD if switches.get("centered", True) else 0
    return {"loss": partial(lesson4.dlc_loss, **switches), "head": head}


ARMS_04 = {        # the first five with five seeds, the others with three
    **{name: lesson4.ARMS[name] for name in ("on-policy", "none", "tis")},
    "dlc, no resync": dlc(resync_ess=0),
    "dlc": lesson4.ARMS["dlc"],
    "seq-mis": {"loss": lesson3.weighted(lesson2.CORRECTIONS["seq-mis"])},
    "ppo": {"loss": lesson3.weighted(lesson2.CORRECTIONS["ppo"])},
    "centering": dlc(f=unweighted, resync_ess=0),
    "lag clip": dlc(centered=False, resync_ess=0),
    "lag clip + resync": dlc(centered=False),
    "dlc, ppo rule": dlc(f=lesson4.ppo_clipped),
    "dlc, periodic": dlc(resync_ess=0)}
MAIN_04 = list(ARMS_04)[:5]
RESYNCED = {"dlc", "lag clip + resync", "dlc, ppo rule"}
FRESH, STALE = lesson4.FRESH, lesson4.STALE
EARLY = 4                                 # response positions that count as early
PARTS = {"": slice(None), ", early": slice(EARLY), ", late": slice(EARLY, None)}
HARM, COMMON = 3, 0.2                     # harm, in floors; in nats, the same for all prefixes
LEVELS = {                                # alarms: a record -> does it ring, step by step
    "ESS of tokens < 1/2": lambda r: np.array(r["ESS of tokens"]) < 0.5,
    "ESS of responses < 1/2": lambda r: np.array(r["ESS of responses"]) < 0.5,
    "ESS of responses x min(1, mean ratio) < 1/2":
        lambda r: np.array(r["ESS of responses"]) * np.minimum(1, r["mean ratio"]) < 0.5,
    "mean ratio < 0.8": lambda r: np.array(r["mean ratio"]) < 0.8}


def training_04(model, sampler, tokenizer, setting: str, arm: str, seed: int, **changes):
    """Lesson 4's loop in one of the SETTINGS. The free tokens are trained by SGD, at a constant rate."""
    its = SETTINGS[setting]
    if setting in LOOP:
        changes |= {**LOOP[setting], "optimizer": torch.optim.SGD(model.parameters(), lr=its.lr)}
    return lesson4.training(model, sampler, tokenizer, its, arm, seed, **{**ARMS_04.get(arm, {}), **changes})


def reference_04(start, sampler, tokenizer, setting: str, folder: Path) -> dict:
    """{step: (state, rollout)} of the on-policy run that all others are compared with. Kept on disk."""
    path = folder / f"04_reference-{setting.replace(', ', '-').replace(' ', '-')}.pt"
    if not path.exists():
        model, reference = copy.deepcopy(start), {}
        batches = training_04(model, sampler, tokenizer, setting, "on-policy", lesson4.REFERENCE_SEED)
        for batch in batches:
            if batch.step % SETTINGS[setting].every == 0:
                reference[batch.step] = copy.deepcopy(model.state_dict()), batch.rollout
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(reference, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
    return torch.load(path, map_location=lesson1.DEVICE, weights_only=False)


@torch.no_grad()
def entropy(model, rollout) -> float:
    """Entropy of the policy in nats per token, on a rollout's prefixes."""
    parts = []
    for rows in lesson1.micro_batches(rollout, lesson1.vocabulary(model)):
        logp = lesson1.response_logits(model, rollout[rows]).float().log_softmax(-1)
        parts.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(parts)[rollout.mask].mean().item()


def by_position(values, mask) -> dict:
    """Mean over all response tokens, over the early ones, and over the late ones (NaN: there are none)."""
    return {part: values[:, where][mask[:, where]].double().mean().item() for part, where in PARTS.items()}


def run_04(start, sampler, tokenizer, reference: dict, setting: str, arm: str, seed: int,
           noise: float = 0.0, period: int | None = None, **changes) -> dict:
    """One run's record: as in lesson 4, and the KL by position, the ESS of tokens, the seconds without
    the measuring, and the entropy at the end. noise: relative size of a parameter noise in the engine.
    changes: of the arguments of lesson 3's loop."""
    model, other, began = copy.deepcopy(start), copy.deepcopy(start), time.perf_counter()
    rows, at, kls = [], [], []
    if noise:
        changes["perturb"] = lesson3.parameter_noise(noise, seed)
    if period:
        changes["period"] = period
    for batch in training_04(model, sampler, tokenizer, setting, arm, seed, **changes):
        paused, lag, mask = time.perf_counter(), batch.lag, batch.rollout.mask
        rows.append({"reward": batch.R.mean().item(), "mean ratio": lesson4.mean_ratio(lag, mask),
                     "ESS of tokens": lesson2.ess(lag[mask]), "ESS of responses": lesson4.lag_ess(lag, mask),
                     "synced": batch.age == 0, "dropped": batch.dropped})
        if batch.step in reference:
            state, fresh = reference[batch.step]
            other.load_state_dict(state)
            at.append(batch.step)
            kls.append({prefixes + part: value for prefixes, rollout in ((FRESH, fresh), (STALE, batch.rollout))
                        for part, value in by_position(lesson4.kl(other, model, rollout), rollout.mask).items()})
        began += time.perf_counter() - paused
    its = SETTINGS[setting]
    record = {"setting": setting, "arm": arm, "seed": seed, "noise": noise, "period": period,
              "syncs": sum(row["synced"] for row in rows), "dropped tokens": sum(row["dropped"] for row in rows),
              "seconds": round(time.perf_counter() - began, 1), "entropy": entropy(model, batch.rollout)}
    end = lesson3.held_out(model, sampler, its.task, tokenizer, 8 * its.prompts)
    record |= {"accuracy": end["sampled"], "greedy accuracy": end["greedy"], "checkpoints": at}
    short = lambda values: [float(f"{v:.4g}") for v in values]
    for key in ("reward", "mean ratio", "ESS of tokens", "ESS of responses"):
        record[key] = short(row[key] for row in rows)
    return record | {key: short(k[key] for k in kls) for key in kls[0]}


# ------------------------------- the tail of the center, modeled and dropped
def tail_errors(name: str, logits, logp_old, logp_sampler, sizes) -> list[dict]:
    """Relative error of the center's gradient in the logits, if only the top K are known. All of them
    (N, V). Dropped instead of modeled: the head passes for the whole vocabulary."""
    def gradient(K: int, vocabulary: int):
        x, ids = logits.detach().requires_grad_(), logp_sampler.topk(K).indices
        heads = [y.gather(1, ids)[None] for y in (x.log_softmax(-1), logp_old, logp_sampler)]
        return torch.autograd.grad(lesson4.center(*heads, torch.ones(1), vocabulary).sum(), x)[0]

    V, rows = logits.shape[1], []
    exact = gradient(V, V)
    for K in sizes:
        modeled, dropped = ((gradient(K, v) - exact).norm() / exact.norm() for v in (V, K))
        mass = logp_sampler.topk(K).values.exp().sum(-1).mean()
        rows.append({"distributions": name, "K": K, "mass of the head": mass.item(),
                     "error, tail modeled": modeled.item(), "error, tail dropped": dropped.item()})
    return rows


def peaked(V: int, n: int, seed: int) -> tuple:
    """Logits, log pi_old and log mu (n, V), float64: probabilities like 1 / rank^2, a lag of 0.3 on the
    logits and a discrepancy of 0.05, both independent from token to token."""
    rng = torch.Generator().manual_seed(seed)
    e_lag, e_engine = (torch.randn(n, V, generator=rng, dtype=torch.float64) for _ in range(2))
    logits = (-2 * torch.arange(1, V + 1, dtype=torch.float64).log()).expand(n, V)
    old = logits + 0.3 * e_lag
    return logits, old.log_softmax(-1), (old + 0.05 * e_engine).log_softmax(-1)


def tail_04(start, sampler, tokenizer, seed: int, setting=lesson4.Setting(steps=5)) -> list[dict]:
    """The tail's errors on the policy's own responses, four steps after a sync at a constant rate, and
    on 150,000 tokens."""
    arm = {**ARMS_04["dlc, no resync"], "decay": False}
    for batch in lesson4.training(copy.deepcopy(start), sampler, tokenizer, setting, "tail", seed, **arm):
        pass
    mask = batch.rollout.mask
    order = batch.rollout.head_ids[mask].argsort(-1)                  # ties go by the vocabulary
    policies = batch.head_logp, batch.head_logp_old, batch.rollout.head_logp
    policy = [x.detach()[mask].gather(-1, order).double() for x in policies]
    return [*tail_errors("the policy, V = 17, four steps stale", *policy, (1, 2, 4, 8, 12, 16)),
            *tail_errors("like 1 / rank^2, V = 150,000", *peaked(150_000, 16, seed), (1, 8, 32, 128, 512, 2048))]


# ------------------------------- the plan
def key_04(setting: str, arm: str, seed: int, noise: float = 0.0, period: int | None = None) -> str:
    more = [f"noise {noise:g}"] * bool(noise) + [f"period {period}"] * bool(period)
    return ", ".join([f"{setting}: {arm}", f"seed {seed}", *more])


def plan_04() -> dict:
    """{key: arguments of run_04} of all runs but DLC's periodic twins."""
    runs = [(name, arm, seed) for name in ("sum", "stop") for arm in ARMS_04 if arm != "dlc, periodic"
            for seed in range(5 if arm in MAIN_04 else 3)]
    # the discrepancy alone: synced at every step, a parameter noise in the engine, drawn once per seed
    runs += [(f"free, {kind}", arm, seed, noise) for kind in ("raw", "mean") for noise in (0.0, 0.05, 0.1)
             for arm in ("none", "tis", "centering") for seed in range(3)]
    # milder staleness, so that quiet runs are among those on which the alarms are judged
    runs += [("sum, lr 7e-4", "on-policy", seed) for seed in range(3)]
    runs += [(name, arm, seed, 0.0, period) for name in ("sum", "sum, lr 7e-4") for arm in ("none", "tis")
             for period in (4, 16) for seed in range(2)]
    return {key_04(*run): run for run in runs}


def periodic_04(records: dict) -> dict:
    """The runs without a resync, whose syncs are about as many as DLC's with that seed, evenly spaced."""
    runs = []
    for name in ("sum", "stop"):
        for seed in range(3):
            syncs = records[key_04(name, "dlc", seed)]["syncs"]
            runs.append((name, "dlc, periodic", seed, 0.0, -(-SETTINGS[name].steps // syncs)))
    return {key_04(*run): run for run in runs}


@study("04")
def study_04(path: Path) -> None:
    """Every correction on two tasks, and the discrepancy alone on a third."""
    tokenizer, sampler = lesson1.make_tokenizer(), lesson1.Sampler(lesson1.policy())
    started, references = {}, {}

    def begin(setting: str) -> tuple:
        task = SETTINGS[setting].task
        if task.name not in started:
            started[task.name] = lesson1.load_model(lesson1.policy(task))
        if setting not in references:
            references[setting] = reference_04(started[task.name], sampler, tokenizer, setting, ROOT / "runs")
        return started[task.name], references[setting]

    def one(setting: str, *arguments) -> dict:
        start, reference = begin(setting)
        return run_04(start, sampler, tokenizer, reference, setting, *arguments)

    resumable(path, {"tail": (0,)}, lambda seed: tail_04(begin("sum")[0], sampler, tokenizer, seed))
    plan = plan_04()
    plan |= periodic_04(resumable(path, plan, one))
    records = list(resumable(path, plan, one).values())
    for name in ("sum", "stop"):
        lesson1.table(f"{name}: KL in floors, a number per seed", arm_rows(main_runs(records, name)))
    lesson1.table("which alarm rings before the harm?", alarms(records))


# ------------------------------- what the records say
def mean_kl(record: dict, key: str = FRESH) -> float:
    """Mean over the checkpoints at which there is such a position, in nats."""
    return float(np.mean([v for v in record[key] if v is not None]))


def floor(records: list[dict], key: str = FRESH) -> float:
    """The KL between two on-policy runs: mean over the on-policy seeds."""
    return float(np.mean([mean_kl(r, key) for r in records if r["arm"] == "on-policy"]))


def arm_rows(records: list[dict]) -> list[dict]:
    """A row per arm, a number per seed; dropped tokens and seconds are means. The second half leaves out
    the first half of the checkpoints, of the run and of its floor."""
    def over(r: dict, key: str) -> float:
        return mean_kl(r, key) / floor(records, key)

    late = [{**r, FRESH: r[FRESH][len(r[FRESH]) // 2:]} for r in records]
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in records):
        mine = [r for r in records if r["arm"] == arm]
        rows.append({"arm": arm, "accuracy": [r["accuracy"] for r in mine],
                     "KL / floor": [over(r, FRESH) for r in mine],
                     "second half": [mean_kl(r) / floor(late) for r in late if r["arm"] == arm],
                     "on the sampler's prefixes": [over(r, STALE) for r in mine], "syncs": [r["syncs"] for r in mine],
                     "dropped tokens": float(np.mean([r["dropped tokens"] for r in mine])),
                     "seconds": float(np.mean([r["seconds"] for r in mine]))})
    return rows


def threshold(records: list[dict], key: str = FRESH) -> np.ndarray:
    """What counts as harm, checkpoint by checkpoint: HARM times the floor, or times the on-policy runs'
    mean at this checkpoint if that is more (two such runs are furthest apart while they learn fastest)."""
    curve = np.mean([r[key] for r in records if r["arm"] == "on-policy"], 0)
    return HARM * np.maximum(curve, curve.mean())


def first(steps, values, above):
    """The first of the steps at which the value is above a number, or one number per step. None: never."""
    limits = np.broadcast_to(above, len(values))
    return next((k for k, v, limit in zip(steps, values, limits) if v > limit), None)


def main_runs(records: list[dict], setting: str) -> list[dict]:
    """A task's runs with the setting's period, or about DLC's number of syncs: not the milder ones."""
    return [r for r in records if r["setting"] == setting and (not r["period"] or r["arm"] == "dlc, periodic")]


def alarms(records: list[dict]) -> list[dict]:
    """Stale runs without a resync: did the alarm ring before the harm (fresh KL above the threshold)? How
    often did it ring in runs that were not harmed? "late" holds ties and alarms that never rang."""
    # periodic DLC is synced more often the earlier DLC's alarm rang: it is no independent case
    stale = [r for r in records if r["arm"] not in RESYNCED | {"on-policy", "dlc, periodic"}
             and not r["setting"].startswith("free")]
    limits = {name: threshold([r for r in records if r["setting"] == name]) for name in {r["setting"] for r in stale}}
    rows = []
    for level, rings in LEVELS.items():
        row = {"alarm": level, "before": 0, "late": 0, "quiet": 0, "false": 0, "leads": []}
        for r in stale:
            harm = first(r["checkpoints"], r[FRESH], limits[r["setting"]])
            rung = first(range(len(r["reward"])), rings(r).astype(float), 0.5)
            if harm is None:
                row["quiet"] += 1
                row["false"] += rung is not None
            elif rung is not None and rung < harm:
                row["before"] += 1
                row["leads"].append(harm - rung)
            else:
                row["late"] += 1
        rows.append(row)
    return rows


def positions(records: list[dict]) -> list[dict]:
    """A row per arm: KL at early and late positions, on both kinds of prefixes, and the first step above a
    common threshold and above three of the prefixes' own floors. A number per seed."""
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in records):
        mine, row = [r for r in records if r["arm"] == arm], {"arm": arm}
        for prefixes in (FRESH, STALE):
            limits = threshold(records, prefixes)
            for part in (", early", ", late"):
                row[prefixes + part] = [mean_kl(r, prefixes + part) for r in mine]
            row[f"{prefixes}, above {COMMON}"] = [first(r["checkpoints"], r[prefixes], COMMON) for r in mine]
            row[f"{prefixes}, above {HARM} floors"] = [first(r["checkpoints"], r[prefixes], limits) for r in mine]
        rows.append(row)
    return rows


# ---------------------------------------------------------------- lesson 5
SETTINGS["replay"] = lesson4.Setting(steps=60, period=60, every=4)


def with_replay(kind: str):
    """How lesson 3's loop computes log-probs under a kind of replay. R2 replays the picks of `old` at
    the trainer's weights only: at those of `old` they are the live ones."""
    def with_head(model, rollout, old, grad: bool):
        live = kind == "r2" and model is old
        routes = None if live else lesson5.routes_for(kind, old, rollout)
        return lesson5.logprobs(model, rollout, routes, head=True, grad=grad)
    return with_head


def run_05(start, sampler, tokenizer, reference: dict, kind: str, period: int, seed: int) -> dict:
    """One run's record. A period of 1 is on-policy without a weight, the others have MiniRL's."""
    arm, weight = ("on-policy", "none") if period == 1 else ("minirl", "minirl")
    record = run_04(start, sampler, tokenizer, reference, "replay", arm, seed, period=period,
                    loss=lesson3.weighted(lesson2.CORRECTIONS[weight]), logprobs=with_replay(kind))
    return {**record, "replay": kind}


def gradients(trainer, engine, tokenizer, seed: int, steps: int = 17) -> list[dict]:
    """Cosine and size of the replayed policy's gradient E[A s] against the live one's, at a sync and
    some steps of training later."""
    model, rows = copy.deepcopy(trainer), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.0)
    run = lesson3.grpo(model, engine, lesson1.SUM, tokenizer, optimizer,
                       lesson3.weighted(lesson2.CORRECTIONS["tis"]), steps, 100, seed, decay=False)
    for batch in run:
        if batch.step not in (0, 1, 4, 16):
            continue
        r, g = batch.rollout, {}
        flipped = lesson5.flips(lesson5.own_routes(model, r), r.routes, r) > 0
        for kind in ("none", "r2", "r3"):
            routes = lesson5.routes_for(kind, trainer, r)
            logp = lesson5.logprobs(model, r, routes, grad=True)
            # E[A s], a mean over response tokens
            value = (batch.advantage[:, None] * logp).sum() / r.mask.sum()
            g[kind] = lesson3.flat_gradient(model, value)
        row = {"steps after a sync": batch.step, "picks that flip": flipped.double().mean().item()}
        for kind in ("r2", "r3"):
            size, live = g[kind].norm(), g["none"]
            row[f"{kind}: cosine"] = (g[kind] @ live / size / live.norm()).item()
            row[f"{kind}: size"] = (size / live.norm()).item()
        rows.append(row)
    return rows


def plan_05() -> dict:
    """{key: (kind of replay, steps between syncs, seed)}."""
    runs = [("none", 1, seed) for seed in range(3)]
    runs += [(kind, period, seed) for period in (2, 8, 32) for kind in ("none", "r2", "r3")
             for seed in range(3)]
    return {f"synced every {period}, replay {kind}, seed {seed}": (kind, period, seed)
            for kind, period, seed in runs}


@study("05")
def study_05(path: Path) -> None:
    """Training with a stale sampler under no replay, R2 and R3; and what replay does to the gradient."""
    policy = lesson1.policy(architecture=lesson5.MIXTURE)
    start, tokenizer = lesson1.load_model(policy), lesson1.make_tokenizer()
    sampler = lesson5.RoutedSampler(policy)
    reference = reference_04(start, sampler, tokenizer, "replay", ROOT / "runs")
    first = resumable(path, {"gradients": (0,)}, partial(gradients, start, sampler, tokenizer))
    records = resumable(path, plan_05(), partial(run_05, start, sampler, tokenizer, reference))
    lesson1.table("the replayed policy's gradient against the live one's", first["gradients"])
    lesson1.table("MiniRL's weight: KL in floors and accuracy, a number per seed", replay_rows(records))


def replay_rows(records: dict) -> list[dict]:
    """A row per arm, a number per seed."""
    runs, rows = [r for r in records.values() if isinstance(r, dict)], []
    for period, kind in dict.fromkeys((r["period"], r["replay"]) for r in runs):
        mine = [r for r in runs if (r["period"], r["replay"]) == (period, kind)]
        rows.append({"synced every": period, "replay": kind,
                     "KL / floor": [mean_kl(r) / floor(runs) for r in mine],
                     "accuracy": [r["accuracy"] for r in mine]})
    return rows


# ---------------------------------------------------------------- train.py
TRAIN = {"on-policy": ["--staleness", "0"], "stale, none": ["--staleness", "15"],
         "stale, tis": ["--staleness", "15", "--correction", "tis"],
         "stale, dlc": ["--staleness", "15", "--correction", "dlc"]}
SHOWN = 0, 5, 10, 20, 40, 60, 79        # steps of the README's table


def run_train(sampler, arm: str, seed: int, flags=()) -> dict:
    """One run of train.py: its summary, and some columns of its metrics.csv."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [*TRAIN[arm], "--seed", str(seed), "--out", folder, *flags]
        import_module("train").main(argv, sampler)
        rows = np.genfromtxt(Path(folder) / "metrics.csv", delimiter=",", names=True)
        summary = json.loads((Path(folder) / "summary.json").read_text())
    return {"arm": arm, "seed": seed, "summary": summary,
            **{name: rows[name].tolist() for name in ("reward", "discrepancy", "loss", "lag")}}


def train_json(records: list[dict]) -> dict:
    """What figures/train.json holds."""
    result = {"seeds": sorted({r["seed"] for r in records})}
    for arm in dict.fromkeys(r["arm"] for r in records):
        mine = [r for r in records if r["arm"] == arm]
        steps = [step for step in SHOWN if step < len(mine[0]["reward"])]
        at = {step: [r["reward"][step] for r in mine] for step in steps}
        result[arm] = {
            "curves": [[round(v, 3) for v in r["reward"]] for r in mine],
            "reward": {str(step): {"mean": round(float(np.mean(values)), 3), "low": round(min(values), 3),
                                   "high": round(max(values), 3)} for step, values in at.items()},
            "discrepancy": {str(step): round(float(np.mean([r["discrepancy"][step] for r in mine])), 6)
                            for step in steps},
            "loss": {"low": min(min(r["loss"]) for r in mine), "high": max(max(r["loss"]) for r in mine)},
            "largest lag": max(max(r["lag"]) for r in mine), "summaries": [r["summary"] for r in mine]}
    return result


@study("train")
def study_train(path: Path) -> None:
    """The runs of the README's "Is my run normal?"."""
    plan = {f"{arm}, seed {seed}": (arm, seed) for arm in TRAIN for seed in range(3)}
    records = resumable(path, plan, partial(run_train, lesson1.Sampler(lesson1.policy())))
    lesson1.save(train_json([*records.values()]), path.with_name("train.json"))


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lesson", choices=sorted(STUDIES))
    parser.add_argument("--out", type=Path, default=ROOT / "figures", help="folder of the JSON")
    args = parser.parse_args(argv)
    STUDIES[args.lesson](args.out / f"{args.lesson}_study.json")


if __name__ == "__main__":
    main()
