"""The long experiments behind the README: lessons 3, 4 and 5 with every arm and several seeds.

    python figures/study.py 03      the feedback loop: on-policy, w = 1, w = r
    python figures/study.py 04      every correction under a lag, on two tasks
    python figures/study.py both    corrections under a discrepancy, alone and with a lag
    python figures/study.py 05      training with router replay
    python figures/study.py train   train.py: four arms, three seeds, for figures/train.json
    python figures/study.py pretrained MODEL     the sync that loses updates, on a released model of
                                                 about 135 million parameters, SmolLM2-135M-Instruct

A study writes figures/NN_study.json after each run. Stopped and started again it goes on where it
was: a record that is there is not made again. Delete the file after a change of the code. Set
OMP_NUM_THREADS=1: a run depends on how many threads round its sums."""
import argparse
import copy
import itertools
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
FEEDBACK = {"on-policy": ("none", 1), "on-policy, other samples": ("none", 1),
            "w = 1": ("none", None), "w = r": ("r", None)}       # arm -> weight, period (None: never)
LOW, HARM = 0.5, 3                   # an ESS; what counts as harm, in floors


def feedback(trainer, sampler, tokenizer, seed: int, lr: float, steps: int = 24) -> dict:
    """Trains four times from the same weights at a constant rate. w = 1 and w = r never sync the sampler,
    and see the same samples. Per arm and step: ESS of responses; rms of log pi_theta - log pi_start in
    nats, on one set of the start's responses; KL(on-policy || arm) on the on-policy run's fresh ones."""
    rng = np.random.default_rng([seed, 99])
    _, prompts = lesson1.make_prompts(lesson1.SUM, tokenizer, 64, rng)
    sampler.sync(trainer)
    fixed = sampler.sample(prompts, lesson1.SUM.max_tokens, seed=[seed, 99], group_size=4)
    start, on_policy, record = lesson1.logprobs(trainer, fixed), {}, {"seed": seed, "lr": lr}
    for arm, (weight, period) in FEEDBACK.items():
        model, reference = copy.deepcopy(trainer), copy.deepcopy(trainer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        correct = lag_is if weight == "r" else lesson2.CORRECTIONS[weight]
        # w = 1 and w = r share their seed; neither on-policy run has it
        its_seed = seed + (1000 * (list(FEEDBACK).index(arm) + 1) if period else 0)
        run = lesson3.grpo(model, sampler, lesson1.SUM, tokenizer, optimizer, lesson3.weighted(correct),
                           steps, period or steps, its_seed, decay=False)
        rows = {"ESS": [], "lag": [], "KL": [], "reward": []}
        for batch in tqdm(run, total=steps, desc=f"feedback: lr {lr}, seed {seed}, {arm}"):
            if arm == "on-policy":
                on_policy[batch.step] = copy.deepcopy(model.state_dict()), batch.rollout
            state, fresh = on_policy[batch.step]
            reference.load_state_dict(state)
            rows["KL"].append(lesson4.kl(reference, model, fresh)[fresh.mask].mean().item())
            rows["lag"].append(lesson3.rms((lesson1.logprobs(model, fixed) - start)[fixed.mask]))
            rows["ESS"].append(lesson3.measure(batch)["ESS of responses"])
            rows["reward"].append(batch.R.mean().item())
        record[arm] = rows
    return record


def feedback_rows(records: list[dict]) -> list[dict]:
    """A row per run. Excess: rms lag over the mean of both on-policy runs, averaged from step 1 to the step
    before w = r's own ESS falls below 1/2, and from there on. Harm: KL above three floors; a rate's floor is
    the mean KL between its on-policy runs."""
    rows = []
    for r in records:
        low = first(range(len(r["w = r"]["ESS"])), -np.array(r["w = r"]["ESS"]), -LOW)
        honest = (np.array(r["on-policy"]["lag"]) + r["on-policy, other samples"]["lag"]) / 2
        floor = np.mean([x["on-policy, other samples"]["KL"] for x in records if x["lr"] == r["lr"]])
        row = {"lr": r["lr"], "seed": r["seed"], "w = r: ESS < 1/2": low}
        for name in ("w = r", "w = 1"):
            excess = (np.array(r[name]["lag"]) - honest)[1:]
            end = len(excess) + 1 if low is None else low
            row[f"{name}: excess before"] = float(excess[:end - 1].mean()) if end > 1 else None
            row[f"{name}: excess after"] = float(excess[end - 1:].mean()) if end <= len(excess) else None
            row[f"{name}: harm"] = first(range(len(r[name]["KL"])), r[name]["KL"], HARM * floor)
        rows.append(row)
    return rows


@study("03")
def study_03(path: Path) -> None:
    """The feedback loop: eight seeds at two learning rates. The drift's directions: four seeds."""
    policy = lesson1.policy()
    trainer, tokenizer, sampler = lesson1.load_model(policy), lesson1.make_tokenizer(), lesson1.Sampler(policy)
    plan = {f"lr {lr}, seed {seed}": (seed, lr) for seed in range(8) for lr in (1.5e-3, 5e-4)}
    runs = resumable(path, plan, partial(feedback, trainer, sampler, tokenizer))
    free = lesson1.load_model(lesson1.policy(lesson3.FREE))
    resumable(path, {f"directions, seed {seed}": (seed,) for seed in range(4)},
              lambda seed: lesson3.drift_directions(free, sampler, tokenizer, seed))
    lesson1.table("rms lag in nats over that of on-policy runs, before and after w = r's ESS < 1/2",
                  feedback_rows([*runs.values()]))


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


ALONE = replace(lesson4.BOTH, period=1)              # the discrepancy without a lag
SETTINGS = {       # found with a simulated engine, on other seeds and policies; nothing was tuned here
    "sum": lesson4.Setting(),
    "sum, lr 7e-4": lesson4.Setting(lr=7e-4),
    "stop": lesson4.Setting(task=STOP, steps=60, period=60, lr=1e-3),
    "free, raw": ALONE, "free, mean": replace(ALONE, advantage="mean"), "both": lesson4.BOTH}
ENGINES = {        # what the engine is sent in place of the trainer's weights: seed -> state -> state
    "5% noise": partial(lesson3.parameter_noise, lesson4.NOISE),
    "10% noise": partial(lesson3.parameter_noise, 0.1),
    "int4": lambda seed: lesson3.fake_quantized(4)}


# ------------------------------- the arms: losses of lesson 3's batches
def unweighted(lag, advantage):
    """f(r) = 1."""
    return torch.ones_like(lag)


def two_sided(lag, advantage):
    """f(r) = r inside [1 / C, C]."""
    return lesson2.ratio(lag).clamp(1 / lesson4.C, lesson4.C)


def dlc(**switches) -> dict:
    """An arm: DLC with some of its parts switched."""
    head = lesson4.HEAD if switches.get("centered", True) else 0
    return {"loss": partial(lesson4.dlc_loss, **switches), "head": head}


def resynced(loss, ess=lambda batch: lesson4.lag_ess(batch.lag, batch.rollout.mask)):
    """The loss, and DLC's rule before it: a batch of too low an ESS is refused."""
    return lambda batch: None if ess(batch) < lesson4.RESYNC_ESS else loss(batch)


def ess_of_tokens(batch) -> float:
    return lesson2.ess(batch.lag[batch.rollout.mask])


def discrepancy_centered(batch):
    """DLC's clip, and only the discrepancy's part of its center: sum_v (q_v - pi_old,v) f(r_v) s_v."""
    mask, A = batch.rollout.mask, batch.advantage
    head, old, q = (lesson2.inside(mask[..., None], x) for x in (
        batch.head_logp, batch.head_logp_old, batch.rollout.head_logp))
    c = lesson4.center(head, old, q, A, batch.vocabulary) - lesson4.center(head, old, old, A, batch.vocabulary)
    return lesson2.policy_loss(batch.logp, lesson4.clipped(batch.lag, A), A, mask, int(mask.sum()), c)


class Due:
    """When lesson 3's loop syncs: it compares an age with this. At a period, or once `now` is set."""
    def __init__(self, period: int):
        self.period, self.now = period, False

    def __eq__(self, age: int) -> bool:
        due = self.now or age == self.period
        self.now = self.now and not due
        return due


def kept(period: int) -> dict:
    """DLC that trains on a batch of too low an ESS, and syncs after the update."""
    due = Due(period)

    def loss(batch):
        due.now = lesson4.lag_ess(batch.lag, batch.rollout.mask) < lesson4.RESYNC_ESS
        return lesson4.dlc_loss(batch, resync_ess=0)
    return {"loss": loss, "head": lesson4.HEAD, "period": due}


none, tis, token_is, seq_mis, ppo = (lesson3.weighted(lesson2.CORRECTIONS[name]) for name in (
    "none", "tis", "token-is", "seq-mis", "ppo"))
ARMS_04 = {
    **{name: lesson4.ARMS[name] for name in ("on-policy", "none", "tis")},
    "none + resync": {"loss": resynced(none)},
    "dlc, no resync": dlc(resync_ess=0),
    "dlc": lesson4.ARMS["dlc"],
    "lag clip + resync": lesson4.ARMS["lag clip + resync"],
    "dlc, token ESS": {"loss": resynced(partial(lesson4.dlc_loss, resync_ess=0), ess_of_tokens), "head": lesson4.HEAD},
    "dlc, kept batch": kept,
    "token-is": {"loss": token_is},
    "lag clip": dlc(centered=False, resync_ess=0),
    "lag clip, jitter": dlc(centered=False, resync_ess=0),
    "centering": dlc(f=unweighted, resync_ess=0),
    "discrepancy center": {"loss": discrepancy_centered, "head": lesson4.HEAD},
    "dlc, two-sided": dlc(f=two_sided),
    "dlc, ppo rule": dlc(f=lesson4.ppo_clipped),
    "seq-mis": {"loss": seq_mis},
    "ppo": {"loss": ppo},
    "none, periodic": {"loss": none},
    "dlc, periodic": dlc(resync_ess=0),
    "tis + resync": {"loss": resynced(tis)},
    "centering + resync": dlc(f=unweighted)}
MAIN_04 = ["on-policy", "none", "tis", "none + resync", "dlc, no resync", "dlc", "lag clip + resync"]
WEIGHTING = ["token-is", "tis", "lag clip"]        # without a resync: on these the alarms are judged
BOTH = ["on-policy", "none", "tis", "none + resync", "tis + resync", "lag clip + resync", "centering + resync", "dlc"]
JITTER = 1e-6                             # relative, on the start's weights
FRESH, STALE = lesson4.FRESH, lesson4.STALE
EARLY = 4                                 # response positions that count as early
PARTS = {"": slice(None), ", early": slice(EARLY), ", late": slice(EARLY, None)}
COMMON = 0.2                              # nats: a threshold that is the same for all prefixes
LEVELS = {                                # alarms: a record -> does it ring, step by step
    "ESS of tokens < 1/2": lambda r: np.array(r["ESS of tokens"]) < 0.5,
    "ESS of responses < 1/2": lambda r: np.array(r["ESS of responses"]) < 0.5,
    "mean ratio < 0.8": lambda r: np.array(r["mean ratio"]) < 0.8}


def training_04(model, sampler, tokenizer, setting: str, arm: str, seed: int, **changes):
    """Lesson 4's loop in one of the SETTINGS."""
    its, its_arm = SETTINGS[setting], ARMS_04.get(arm, {})
    its_arm = its_arm(its.period) if callable(its_arm) else its_arm
    return lesson4.training(model, sampler, tokenizer, its, arm, seed, **{**its_arm, **changes})


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
           engine: str = "", period: int | None = None, **changes) -> dict:
    """One run's record: as in lesson 4, and the KL by position, the ESS of tokens, the discrepancy, the
    seconds without the measuring, and the entropy at the end. engine: one of ENGINES, or natural."""
    model, other, began = copy.deepcopy(start), copy.deepcopy(start), time.perf_counter()
    rows, at, kls, its = [], [], [], SETTINGS[setting]
    if engine:
        changes["perturb"] = ENGINES[engine](seed)
    if arm == "lag clip, jitter":
        model.load_state_dict(lesson3.parameter_noise(JITTER, seed)(model.state_dict()))
    if period:
        changes["period"] = period
    for batch in training_04(model, sampler, tokenizer, setting, arm, seed, **changes):
        paused, lag, mask = time.perf_counter(), batch.lag, batch.rollout.mask
        numbers = lesson3.measure(batch)
        rows.append({"reward": batch.R.mean().item(), "mean ratio": lesson4.mean_ratio(lag, mask),
                     **{key: numbers[key] for key in ("ESS of tokens", "ESS of responses", "rms d", "d on log-odds")},
                     "synced": batch.age == 0, "dropped": batch.dropped})
        if batch.step in reference:
            state, fresh = reference[batch.step]
            other.load_state_dict(state)
            at.append(batch.step)
            stale = lesson4.stale_prefixes(arm, reference, batch)
            kls.append({prefixes + part: value for prefixes, rollout in ((FRESH, fresh), (STALE, stale))
                        for part, value in by_position(lesson4.kl(other, model, rollout), rollout.mask).items()})
        began += time.perf_counter() - paused
    record = {"setting": setting, "arm": arm, "seed": seed, "engine": engine, "period": period,
              "syncs": sum(row["synced"] for row in rows), "dropped tokens": sum(row["dropped"] for row in rows),
              "seconds": round(time.perf_counter() - began, 1), "entropy": entropy(model, batch.rollout)}
    end = lesson3.held_out(model, sampler, its.task, tokenizer, 8 * its.prompts)
    record |= {"accuracy": end["sampled"], "greedy accuracy": end["greedy"], "checkpoints": at}
    short = lambda values: [float(f"{v:.3g}") for v in values]
    for key in ("reward", "mean ratio", "ESS of tokens", "ESS of responses", "rms d", "d on log-odds"):
        record[key] = short(row[key] for row in rows)
    record |= {key: short(k[key] for k in kls) for key in (FRESH, STALE)}
    # of the parts only the mean over checkpoints is kept
    means = {key: np.nanmean([k[key] for k in kls]) for key in kls[0] if key not in (FRESH, STALE)}
    return record | {key: float(f"{value:.3g}") for key, value in means.items()}


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
def key_04(setting: str, arm: str, seed: int, engine: str = "", period: int | None = None) -> str:
    more = [engine] * bool(engine) + [f"period {period}"] * bool(period)
    return ", ".join([f"{setting}: {arm}", f"seed {seed}", *more])


def plan_04() -> dict:
    """{key: arguments of run_04} of all runs under a lag but the periodic ones. Eight seeds on the running
    sum, five on early stop for the arms that a sentence compares; five and three for the others."""
    others = [arm for arm in ARMS_04 if arm not in MAIN_04 + BOTH and not arm.endswith("periodic")]
    runs = [("sum", arm, seed) for arm in MAIN_04 for seed in range(8)]
    runs += [("sum", arm, seed) for arm in others for seed in range(5 if arm in WEIGHTING else 3)]
    runs += [("stop", arm, seed) for arm in MAIN_04 for seed in range(5)]
    runs += [("stop", arm, seed) for arm in others if "jitter" not in arm for seed in range(3)]
    # milder staleness, so that quiet runs are among those on which the alarms are judged
    runs += [("sum, lr 7e-4", "on-policy", seed) for seed in range(3)]
    runs += [(name, arm, seed, "", period) for name in ("sum", "sum, lr 7e-4") for arm in WEIGHTING
             for period in (4, 16) for seed in range(2)]
    return {key_04(*run): run for run in runs}


def periodic_04(records: dict) -> dict:
    """Runs without a resync that are synced about as often as DLC was with that seed, evenly spaced."""
    runs = []
    for name, seeds in (("sum", 8), ("stop", 5)):
        for arm in ("none, periodic", "dlc, periodic"):
            for seed in range(seeds):
                syncs = records[key_04(name, "dlc", seed)]["syncs"]
                runs.append((name, arm, seed, "", -(-SETTINGS[name].steps // syncs)))
    return {key_04(*run): run for run in runs}


def plan_both() -> dict:
    """The discrepancy alone, synced before every step; and together with a lag. Five seeds."""
    runs = [("both", arm, seed, engine) for engine in ("5% noise", "", "int4") for arm in BOTH
            for seed in range(5) if arm != "on-policy" or engine == ""]
    runs += [(f"free, {kind}", arm, seed, engine) for kind in ("raw", "mean") for engine in ("", "5% noise", "10% noise")
             for arm in ("none", "tis", "centering") for seed in range(5 if kind == "raw" else 3)]
    return {key_04(*run): run for run in runs}


def runner_04():
    """run_04 with the policies and references that a run needs, each made once."""
    tokenizer, sampler = lesson1.make_tokenizer(), lesson1.Sampler(lesson1.policy())
    started, references = {}, {}

    def one(setting: str, *arguments) -> dict:
        task = SETTINGS[setting].task
        if setting not in references:
            started[setting] = lesson1.load_model(lesson1.policy(task))
            references[setting] = reference_04(started[setting], sampler, tokenizer, setting, ROOT / "runs")
        return run_04(started[setting], sampler, tokenizer, references[setting], setting, *arguments)
    return one, sampler, tokenizer


@study("04")
def study_04(path: Path) -> None:
    """Every correction under a lag, on two tasks."""
    one, sampler, tokenizer = runner_04()
    start = lesson1.load_model(lesson1.policy())
    resumable(path, {"tail": (0,)}, lambda seed: tail_04(start, sampler, tokenizer, seed))
    plan = plan_04()
    main = {key: run for key, run in plan.items() if run[1] in MAIN_04 and len(run) == 3}
    plan = main | periodic_04(resumable(path, main, one)) | plan         # in this order
    records = list(resumable(path, plan, one).values())
    for name in ("sum", "stop"):
        lesson1.table(f"{name}: KL in floors, a number per seed", arm_rows(main_runs(records, name)))
    lesson1.table("which alarm rings before the harm?", alarms(records))


@study("both")
def study_both(path: Path) -> None:
    """Corrections under a discrepancy, alone and with a lag, on the free tokens."""
    records = [*resumable(path, plan_both(), runner_04()[0]).values()]
    lesson1.table("both sources: KL in floors, a number per seed", both_rows(records))


# ------------------------------- what the records say
def mean_kl(record: dict, key: str = FRESH) -> float:
    """Mean over the checkpoints at which there is such a position, in nats."""
    return float(np.mean([v for v in np.atleast_1d(record[key]) if v is not None]))


def floor(records: list[dict], key: str = FRESH) -> float:
    """The KL between two on-policy runs: mean over the on-policy seeds."""
    return float(np.mean([mean_kl(r, key) for r in records if r["arm"] == "on-policy"]))


def rank_test(a: list, b: list) -> float:
    """Chance that a random split of all values gives ranks to `a` as low as its own: p, one-sided, exact."""
    values = np.array([*a, *b])
    ranks = [(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values]
    sums = np.array([sum(split) for split in itertools.combinations(ranks, len(a))])
    return float((sums <= sum(ranks[:len(a)])).mean())


def arm_rows(records: list[dict]) -> list[dict]:
    """A row per arm, a number per seed; dropped tokens and seconds are means. The second half leaves out
    the first half of the checkpoints, of the run and of its floor. p: that DLC's KL is lower by chance."""
    def over(r: dict, key: str) -> float:
        return mean_kl(r, key) / floor(records, key)

    late = [{**r, FRESH: r[FRESH][len(r[FRESH]) // 2:]} for r in records]
    its = {arm: [over(r, FRESH) for r in records if r["arm"] == arm] for arm in dict.fromkeys(r["arm"] for r in records)}
    rows = []
    for arm, floors in its.items():
        mine = [r for r in records if r["arm"] == arm]
        rows.append({"arm": arm, "accuracy": [r["accuracy"] for r in mine], "KL / floor": floors,
                     "second half": [mean_kl(r) / floor(late) for r in late if r["arm"] == arm],
                     "at most 2": f"{sum(x <= 2 for x in floors)} of {len(floors)}",
                     "p, DLC lower": rank_test(its["dlc"], floors) if "dlc" in its and arm != "dlc" else None,
                     "on the sampler's prefixes": [over(r, STALE) for r in mine], "syncs": [r["syncs"] for r in mine],
                     "dropped tokens": float(np.mean([r["dropped tokens"] for r in mine])),
                     "seconds": float(np.mean([r["seconds"] for r in mine]))})
    return rows


def both_rows(records: list[dict]) -> list[dict]:
    """A row per engine and arm of the setting with both sources, a number per seed."""
    runs, rows = [r for r in records if r["setting"] == "both"], []
    for engine, arm in dict.fromkeys((r["engine"], r["arm"]) for r in runs):
        mine = [r for r in runs if (r["engine"], r["arm"]) == (engine, arm)]
        rows.append({"engine": engine or "natural", "arm": arm, "KL / floor": [mean_kl(r) / floor(runs) for r in mine],
                     "entropy": [r["entropy"] for r in mine], "reward": [r["accuracy"] for r in mine],
                     "syncs": [r["syncs"] for r in mine],
                     "dropped tokens": float(np.mean([r["dropped tokens"] for r in mine]))})
    return rows


def constancy(records: list[dict]) -> list[dict]:
    """Does the discrepancy stay about constant? Its change over a run, in % of its mean (a least-squares
    line), mean and standard deviation over the seeds; as it is, and on the log-odds of the token (|d| / (1 - p))."""
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in records):
        mine, row = [r for r in records if r["arm"] == arm], {"arm": arm}
        row["accuracy"] = float(np.mean([r["accuracy"] for r in mine]))
        for key in ("rms d", "d on log-odds"):
            changes = [100 * len(r[key]) * lesson3.slope(r[key])[0] / np.mean(r[key]) for r in mine]
            row |= {f"{key}: change, %": float(np.mean(changes)), f"{key}: ±": float(np.std(changes))}
        rows.append({**row, "seeds": len(mine)})
    return rows


def threshold(records: list[dict], key: str = FRESH, floors: float = HARM) -> np.ndarray:
    """What counts as harm, checkpoint by checkpoint: a number of floors, or of the on-policy runs' mean
    at this checkpoint if that is more (two such runs are furthest apart while they learn fastest)."""
    curve = np.mean([r[key] for r in records if r["arm"] == "on-policy"], 0)
    return floors * np.maximum(curve, curve.mean())


def first(steps, values, above):
    """The first of the steps at which the value is above a number, or one number per step. None: never."""
    limits = np.broadcast_to(above, len(values))
    return next((k for k, v, limit in zip(steps, values, limits) if v > limit), None)


def main_runs(records: list[dict], setting: str) -> list[dict]:
    """A task's runs with the setting's period, or about DLC's number of syncs: not the milder ones."""
    return [r for r in records if r["setting"] == setting and (not r["period"] or r["arm"].endswith("periodic"))]


def alarms(records: list[dict]) -> list[dict]:
    """Runs that weight by the lag and are never resynced, by task, alarm and what counts as harm: did the
    alarm ring before the harm, at the same step, or later (or never)? How often in runs without harm?"""
    rows, tasks = [], {"sum": ("sum", "sum, lr 7e-4"), "stop": ("stop",)}
    for (task, settings), level, floors in itertools.product(tasks.items(), LEVELS, (2, 3, 5, 10)):
        row = {"task": task, "alarm": level, "harm, floors": floors, "before": 0, "same step": 0, "later": 0,
               "quiet": 0, "false": 0, "leads": []}
        for setting in settings:
            runs = [r for r in records if r["setting"] == setting]
            limits = threshold(runs, floors=floors) if runs else []
            for r in (r for r in runs if r["arm"] in WEIGHTING):
                harm = first(r["checkpoints"], r[FRESH], limits)
                rung = first(range(len(r["reward"])), LEVELS[level](r).astype(float), 0.5)
                if harm is None:
                    row["quiet"] += 1
                    row["false"] += rung is not None
                elif rung is None:
                    row["later"] += 1
                else:
                    row["before" if rung < harm else "same step" if rung == harm else "later"] += 1
                    row["leads"].append(harm - rung)
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
    record = run_04(start, sampler, tokenizer, reference, "replay", arm, seed, "", period,
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


# ---------------------------------------------------------------- a released model
ADD = lesson1.TASKS["add1"]
LAST = 23                               # step of the last batch


def normal_share(d, A) -> float:
    """Share of tokens that PPO's clip (0.2) stops, if d = log pi - log mu (n,) is normal and independent of A."""
    normal = torch.distributions.Normal(d.mean(), d.std().clamp(min=1e-12))
    high, low = 1 - normal.cdf(torch.tensor(1.2, device=d.device).log()), normal.cdf(torch.tensor(0.8, device=d.device).log())
    return ((A > 0).float().mean() * high + (A < 0).float().mean() * low).item()


def pretrained(trainer, engines, tokenizer, contract: str, arm: str, period: int, seed: int) -> dict:
    """One run's record: per step the sampler's reward, the sizes of the three parts in nats, the share of weights
    that the engine sees changed, and of tokens that PPO would clip though the lag is 0 (predicted, measured).
    At the end what the trainer's own policy answers, and what its weights do as the engine holds them."""
    forward, dtype = lesson3.CONTRACTS[contract]
    model, held, rows, answers = copy.deepcopy(trainer), copy.deepcopy(trainer), [], {}
    autocast = torch.autocast(lesson1.DEVICE.type, forward, enabled=forward != torch.float32)
    logprobs = autocast(lesson1.logprobs)
    its = {"none": {"loss": none}, "tis": {"loss": tis}, "centering": dlc(f=unweighted, resync_ess=0), "dlc": dlc()}[arm]
    loss, scale = its["loss"], 1024 if forward == torch.float16 else 1    # AdamW does not see the scale
    run = lesson3.grpo(
        model, engines[dtype], ADD, tokenizer, torch.optim.AdamW(model.parameters(), lr=3e-6, weight_decay=0.0),
        lambda batch: None if (value := loss(batch)) is None else scale * value, LAST + 1, period, seed, prompts=8,
        head=min(its.get("head", 0), lesson1.vocabulary(model)), decay=False,
        logprobs=lambda model, rollout, old, grad: logprobs(model, rollout, True, grad))
    start = torch.cat([p.detach().flatten() for p in trainer.parameters()])
    for batch in tqdm(run, total=LAST + 1, desc=f"{contract}, {arm}, seed {seed}"):
        held.load_state_dict(lesson3.cast(model.state_dict(), dtype))
        r, mask = batch.rollout, batch.rollout.mask
        if batch.step == LAST:
            judge = engines["judge"], ADD, tokenizer, 128
            answers = {"trainer": lesson3.held_out(model, *judge), "as the engine holds it": lesson3.held_out(held, *judge)}
        if batch.age == 0:
            logp_held = logprobs(held, r)
            parts = {"arithmetic": logp_held - r.logp_sampler, "cast": batch.logp_old - logp_held}
        else:       # the sampler holds older weights: only the whole discrepancy is known
            parts = {"discrepancy": batch.logp_old - r.logp_sampler}
        ratio = (batch.logp.detach() - r.logp_sampler).exp()
        d, A = ratio.log()[mask], batch.advantage[:, None].expand_as(mask)[mask]
        now = torch.cat([p.detach().flatten() for p in model.parameters()])
        rows.append({
            "reward": batch.R.mean().item(), **{f"mean |{name}|": x[mask].abs().mean().item() for name, x in parts.items()},
            "mean |lag|": batch.lag[mask].abs().mean().item(), "mean |log pi - log mu|": d.abs().mean().item(),
            "synced": batch.age == 0, "dropped": batch.dropped, **lesson3.visible(now, start, dtype),
            "clipped, predicted": normal_share(d, A),
            "clipped": (~lesson2.ppo_keeps(ratio, batch.advantage, 0.2, 0.2))[mask].double().mean().item()})
    keys = dict.fromkeys(key for row in rows for key in row)
    return {"contract": contract, "arm": arm, "period": period, "seed": seed, "answers": answers,
            **{key: [row.get(key) for row in rows] for key in keys}}


def plan_pretrained() -> dict:
    """{key: arguments}: the four contracts; corrections of a broken one; a stale sampler under an exact one."""
    runs = []
    for seed in range(3):
        runs += [(contract, "none", 1, seed) for contract in ("fp32 | bf16", "fp32 | fp32", "bf16 | bf16", "fp16 | fp16")]
        runs += [("fp32 | bf16", arm, 1, seed) for arm in ("tis", "centering", "dlc")]
        runs += [("fp32 | fp32", arm, 12, seed) for arm in ("none", "tis", "dlc")]
    return {f"{contract}, {arm}, synced every {period}, seed {seed}": (contract, arm, period, seed)
            for contract, arm, period, seed in runs}


@study("pretrained")
def study_pretrained(path: Path, model: str) -> None:
    """The four precision contracts on a released model, and what corrections do to a broken one."""
    model = lesson1.find_model(model, ADD)
    trainer, tokenizer = lesson1.load_model(model), lesson1.transformers.AutoTokenizer.from_pretrained(model)
    engines = {}

    def one(contract: str, *arguments) -> dict:
        for name, dtype in ((lesson3.CONTRACTS[contract][1],) * 2, ("judge", torch.float32)):
            if name not in engines:
                engines[name] = lesson1.Sampler(model, str(dtype).removeprefix("torch."))
        return pretrained(trainer, engines, tokenizer, contract, *arguments)
    resumable(path, plan_pretrained(), one)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lesson", choices=sorted(STUDIES))
    parser.add_argument("model", nargs="?", help="for pretrained: a directory or a hub name")
    parser.add_argument("--out", type=Path, default=ROOT / "figures", help="folder of the JSON")
    args = parser.parse_args(argv)
    if (args.lesson == "pretrained") != bool(args.model):
        parser.error("pretrained, and no other study, needs a model")
    STUDIES[args.lesson](args.out / f"{args.lesson}_study.json", *[args.model] * bool(args.model))


if __name__ == "__main__":
    main()
