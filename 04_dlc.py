"""Lesson 4: which correction does each part of the mismatch need?

Lesson 3 split a sampled token's error into the engine's discrepancy d and the stale weights' lag l. The
Discrepancy-Lag Correction (DLC) answers each with its own means: it centers the discrepancy, clips the lag, and
resynchronises the sampler when too little of its samples is left. With q = mu(. | prefix) as the engine recorded it,
r_v = pi_theta(v) / pi_{theta_s}(v) the lag ratio, f(r) = min(r, C), s_v = grad log pi_theta(v), the loss per token is

    L_t = -A [ sg(f(r_a)) log pi(a)  -  sum_v sg(q_v f(r_v)) log pi(v) ]         sg: a constant to the gradient
               clip the lag             center: its gradient is the first one's average under the engine

and the batch is refused, the sampler synced and the batch sampled again if ESS(r) = (sum r)^2 / (n sum r^2) < 1/2 before
the update, r being the product of a whole response's lag ratios (lesson 2).

This is a RECONSTRUCTION: of the paper ("On the Origin and Evolution of Training-Inference Mismatch in LLM
Reinforcement Learning", Li, Zhou, Lan 2026) we could read the abstract only. The centre is that of score centering
(arXiv 2609.20807); which clip, and the ESS of what (here: of whole responses), are our choices, and measured below.

Why a centre: E_q[A s] = E_q[A] b + Cov_q(A, s) with b = sum_v q_v s_v, and b is 0 only for q = pi. In the logits
b = q - pi: where the mean advantage of a prefix is above 0 training pulls the policy towards the engine, step after
step the same way. The centered score is e_a - q: its mean under the engine is 0, whatever the engine does. What
centering leaves is Cov_q(A, s) in place of Cov_pi(A, s), first order in q - pi as well.

The measure is KL(on-policy || run), per token, exact over the vocabulary, by the trainer, on fresh responses of an
on-policy run at the same step, mean over checkpoints; its floor is the same KL of other on-policy runs.

The head of a distribution is its K most likely tokens. The engine can record it at every position; where K is not the
whole vocabulary, the rest, the tail, is modelled. An arm is one way to train; arms are compared on the same seeds.

Run it:  python 04_dlc.py            a CPU: on-policy twice, none, TIS, DLC on the running sum, under 4 min
         python 04_dlc.py --study    every arm on two tasks, 3 to 5 seeds; the discrepancy alone on a third: 165 runs,
                                     under 2 h, resumable
         --model Qwen/Qwen3-0.6B     a CUDA GPU (not run yet)
Expect:  with a sampler that is hardly ever synced, no correction far from on-policy, TIS nearer, DLC near the floor
         with 5 to 11 syncs in 80 steps; numbers in figures/04_dlc.json, picture in figures/04_dlc.png.

Exercises (tests/test_04_dlc.py grades the functions):
 1. Write `centre` for K = V (three lines) and for a head with a modelled tail (four more); test_centre.
 2. Predict the centre's gradient where w = pi / q with full support (pass log q for `head_logp_old`, with f(r) = r), and
    where that weight is truncated: which of lesson 2's weights need no centering? test_untruncated_weight_needs_no_centre.
 3. Write `lag_ess` so that padding does not count (1 line; test_lag_ess), and find log-ratios whose ESS is 1 while half of
    the mass is gone (1 line; test_blind_spot_has_an_alarm).
 4. Write `ppo_rule` (2 lines; test_ppo_rule_reads_the_sign_for_every_token), swap it into the arm "dlc" of `ARMS` and run
    with --out runs/ppo: which clip stays nearer to on-policy? Then min(r, C) with C = 1.2 and C = 10.
 5. Reach a number: an arm without a centre below 2 floors in the default run (2 lines: compose what is there).
 6. Find the bug: `python tests/exercises.py --bug 04 --seed 1`, then --seed 2, 3 (see the README).
"""
import copy
import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np

lesson1 = import_module("01_mismatch")   # before torch: it hides the broken packages around it
lesson2 = import_module("02_importance_sampling")
lesson3 = import_module("03_decompose")
import torch
import transformers
from torch import Tensor
from tqdm import tqdm

C = 2.0                # cap of the lag ratio
RESYNC_ESS = 0.5
TAIL_FLOOR = 1e-6      # the trainer's tail mass is not taken to be smaller


# ---------------------------------------------------------------- clip the lag
def truncated(lag: Tensor, advantage: Tensor) -> Tensor:
    """f(r) = min(r, C), r = exp(lag): DLC's clip. Any shape."""
    return lesson2.ratio(lag).clamp(max=C)


def ppo_rule(lag: Tensor, advantage: Tensor) -> Tensor:
    """f(r) = r, 0 where PPO, with bounds 1 - 0.2 and 1 + 0.2, clips it for this sign of the advantage. lag (B, T) with
    advantage (B,), or (B, T, K) with (B, 1)."""
    r = lesson2.ratio(lag)
    return r * lesson2.ppo_keeps(r, advantage, 0.2, 0.2)


def unweighted(lag: Tensor, advantage: Tensor) -> Tensor:
    """f(r) = 1."""
    return torch.ones_like(lag)


# ---------------------------------------------------------------- center the discrepancy
def centre(head_logp: Tensor, head_logp_old: Tensor, head_logp_sampler: Tensor, advantage: Tensor, vocabulary: int,
           f=truncated) -> Tensor:
    """sum_v sg(q_v f(r_v)) log pi(v), (B, T), nats: its gradient is the mean of the weighted score under the engine.

    head_logp*: (B, T, K) log-probs of the sampler's K most likely tokens under pi_theta (with its graph), pi_{theta_s}
    and mu, normalised over the full vocabulary. K = vocabulary: exact. Otherwise the tail is modelled (arXiv
    2609.20807, eq. 12, with a third policy): mu and pi_{theta_s} are multiples of pi there, and sum_v pi_v s_v = 0
    turns the tail's part into one over the head; f must be bounded then. A difference in GRADIENT is what the model
    costs, not one in value."""
    pi, old, q = (x.detach().exp() for x in (head_logp, head_logp_old, head_logp_sampler))
    # coefficient of log pi(v): q_v f(r_v)
    coefficient = q * f(head_logp.detach() - head_logp_old, advantage[:, None])
    if head_logp.shape[-1] < vocabulary:
        tail_pi, tail_old, tail_q = (1 - x.sum(-1, keepdim=True) for x in (pi, old, q))
        # rho_x = (1 - x_H) / (1 - pi_H);  on the tail r = 1 / rho_s
        rho_q, rho_s = (x.clamp(min=0) / tail_pi.clamp(min=TAIL_FLOOR) for x in (tail_q, tail_old))
        # alpha = rho_q f(1 / rho_s);  q_v f(r_v) - alpha pi_v
        coefficient = coefficient - rho_q * f(-rho_s.log(), advantage[:, None]) * pi
    return (coefficient * head_logp).sum(-1)


# ---------------------------------------------------------------- resynchronise the sampler
def lag_ess(lag: Tensor, mask: Tensor, level: str = "sequence") -> float:
    """Effective sample size of the lag ratio, share of n, before any clipping: of the tokens' ratios, or (level
    "sequence") of the responses' products. lag, mask (B, T). Blind to what all ratios have in common: see `mean_ratio`."""
    return lesson2.ess(lag[mask] if level == "token" else lesson2.sequence_sum(lag, mask)[:, 0])


def mean_ratio(lag: Tensor, mask: Tensor) -> float:
    """Mean lag ratio of the tokens. Predicted 1, since E_{pi_s}[pi / pi_s] = 1 (and mu is pi_s up to the discrepancy); below
    it, the trainer's mass has gone where the sampler does not look, which the ESS does not see."""
    return lesson2.ratio(lag[mask].double()).mean().item()


# ---------------------------------------------------------------- the three together
def dlc_loss(logp: Tensor, logp_old: Tensor, head_logp: Tensor, head_logp_old: Tensor, head_logp_sampler: Tensor, advantage: Tensor,
             mask: Tensor, vocabulary: int, f=truncated, resync_ess: float = RESYNC_ESS) -> Tensor | None:
    """The Discrepancy-Lag Correction (reconstructed, see the top of this file) of a whole batch: a scalar, or None where
    the batch is refused: sync the sampler, drop the batch, sample it again. resync_ess 0 never refuses.

    logp, logp_old, mask (B, T), head_* (B, T, K), advantage (B,)."""
    lag = (logp - logp_old).detach()
    # resynchronise: ESS(r) < 1/2, strictly, before the update
    if lag_ess(lag, mask) < resync_ess:
        return None
    # clip the lag, and nothing but the lag: w = f(r_a)
    w = torch.where(mask, f(lag, advantage), 0.0)
    # center the discrepancy: sum_v sg(q_v f(r_v)) log pi(v)
    c = centre(head_logp, head_logp_old, head_logp_sampler, advantage, vocabulary, f)
    # L = -sum A (w log pi - c) / N
    return lesson2.policy_loss(logp, w, advantage, mask, int(mask.sum()), c)


# ---------------------------------------------------------------- the arms
def dlc(batch, **settings):
    """dlc_loss of one of lesson 3's batches."""
    r = batch.rollout
    return dlc_loss(batch.logp, batch.logp_old, batch.head_logp, batch.head_logp_old, r.head_logp, batch.advantage, r.mask, batch.vocabulary, **settings)


def lag_clip(logp, logp_old, logp_sampler, advantage, mask):
    """w_t = min(pi / pi_old, C), in the contract of lesson 2's weights."""
    return torch.where(mask, truncated((logp - logp_old).detach(), advantage), 0.0)


def resynchronised(loss):
    """`loss`, which refuses a batch by DLC's rule."""
    return lambda batch: None if lag_ess(batch.lag, batch.rollout.mask) < RESYNC_ESS else loss(batch)


weighted = lambda name: lesson3.weighted(lesson2.CORRECTIONS[name])
ARMS = {               # name -> loss of a batch; "on-policy" and "periodic" differ in how often the sampler is synced
    "on-policy": weighted("none"),
    "none": weighted("none"),
    "tis": weighted("tis"),
    "dlc, no resync": partial(dlc, resync_ess=0),
    "dlc": dlc,
    "seq-mis": weighted("seq-mis"),
    "ppo": weighted("ppo"),
    "centering": partial(dlc, f=unweighted, resync_ess=0),
    "lag clip": lesson3.weighted(lag_clip),
    "lag clip + resync": resynchronised(lesson3.weighted(lag_clip)),
    "dlc, ppo rule": partial(dlc, f=ppo_rule),
    "dlc, periodic": partial(dlc, resync_ess=0),
}
MAIN = list(ARMS)[:5]                                     # five seeds in the study; the others three
CENTERED = {name for name in ARMS if "dlc" in name or name == "centering"}       # these need the head recorded
RESYNCED = {"dlc", "lag clip + resync", "dlc, ppo rule"}


@dataclass(frozen=True)
class Setting:
    """What all arms of one experiment share."""
    task: str
    steps: int
    period: int                  # steps between syncs of every arm but on-policy
    lr: float
    prompts: int = 32
    max_tokens: int | None = None
    optimizer: str = "AdamW"
    advantage: str = "std"
    decay: bool = True
    every: int = 2               # steps between checkpoints, at which the KL is taken
    head: int = -1               # tokens recorded for the centre; -1: the vocabulary


SETTINGS = {                     # found with a simulated engine, on other seeds and policies; nothing is tuned here
    "sum": Setting("sum", steps=80, period=64, lr=1.5e-3),
    "sum, lr 7e-4": Setting("sum", steps=80, period=64, lr=7e-4),
    "stop": Setting("stop", steps=60, period=60, lr=1e-3),
    "free, raw": Setting("free", steps=100, period=1, lr=0.04, prompts=16, optimizer="SGD", advantage="raw", decay=False, every=10),
    "free, mean": Setting("free", steps=100, period=1, lr=0.04, prompts=16, optimizer="SGD", advantage="mean", decay=False, every=10),
}
FULL_SIZE = Setting("sum", steps=80, period=64, lr=1e-6, prompts=8, max_tokens=256, every=20, head=128)
REFERENCE_SEED = 2**32           # of the on-policy run that all are held against: no --seed reaches it
EARLY = 4                        # response positions that count as early
HARM, COMMON = 3, 0.2            # harm: so many floors; and in nats, the same for fresh and the sampler's prefixes


# ---------------------------------------------------------------- the measure
@torch.no_grad()
def kl(reference, model, rollout) -> Tensor:
    """KL(reference || model) at every response position (B, T), nats, exact over the vocabulary; both evaluated by the
    trainer on the same prefixes."""
    parts = []
    for rows in lesson1.micro_batches(rollout, model.config.get_text_config().vocab_size):
        log_p, log_q = (lesson1.response_logits(m, rollout[rows]).float().log_softmax(-1) for m in (reference, model))
        parts.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.cat(parts)


def by_position(values: Tensor, mask: Tensor) -> list[float]:
    """Mean over all response tokens, over the first EARLY ones, over the later ones (NaN where there is none)."""
    early = (torch.arange(mask.shape[1], device=mask.device) < EARLY).expand_as(mask)
    return [values[where].double().mean().item() for where in (mask, mask & early, mask & ~early)]


@torch.no_grad()
def entropy(model, rollout) -> float:
    """Entropy of the policy, nats a token, on a rollout's prefixes."""
    parts = []
    for rows in lesson1.micro_batches(rollout, model.config.get_text_config().vocab_size):
        log_p = lesson1.response_logits(model, rollout[rows]).float().log_softmax(-1)
        parts.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(parts)[rollout.mask].mean().item()


def held_out(trainer, sampler, setting: Setting, tokenizer, n: int) -> dict:
    """Mean reward on n prompts that no run trains on, sampled and greedy."""
    task = lesson1.TASKS[setting.task]
    digits, prompts = lesson1.make_prompts(task, tokenizer, n, np.random.default_rng([2**40, 7]))
    sampler.sync(trainer)
    result = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        rollout = sampler.sample(prompts, setting.max_tokens or task.max_tokens, seed=0, temperature=temperature)
        result[name] = lesson1.rewards(task, digits, rollout, tokenizer).mean().item()
    return result


def reference_folder(setting: Setting, policy_id: str) -> Path:
    """Where the reference of these settings, started from this policy, is kept."""
    key = hashlib.sha256(json.dumps([asdict(setting), policy_id]).encode()).hexdigest()[:8]
    return lesson1.ROOT / "runs" / "04_dlc" / f"{setting.task}-{key}"


class Reference:
    """The on-policy run that all others are held against: its weights and its own responses at every checkpoint, kept on
    disk. Run where they are not there yet, or with `anew`."""

    def __init__(self, start, sampler, tokenizer, setting: Setting, policy_id: str, anew: bool = False):
        self.folder, self.model = reference_folder(setting, policy_id), copy.deepcopy(start)
        last = range(0, setting.steps, setting.every)[-1]
        if anew or not (self.folder / f"{last}.pt").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            model = copy.deepcopy(start)
            for batch in training(model, sampler, tokenizer, setting, "on-policy", REFERENCE_SEED, desc=f"{setting.task}: reference"):
                if batch.step % setting.every == 0:
                    new = self.folder / "new.tmp"
                    torch.save({"weights": model.state_dict(), "rollout": vars(batch.rollout)}, new)
                    new.replace(self.folder / f"{batch.step}.pt")

    def compare(self, model, batch) -> dict:
        """KL from the reference at this step: on its fresh responses, and on the prefixes of the run's own sampler."""
        saved = torch.load(self.folder / f"{batch.step}.pt", map_location=lesson1.DEVICE)
        self.model.load_state_dict(saved["weights"])
        fresh = lesson1.Rollout(**saved["rollout"])
        return {name: by_position(kl(self.model, model, rollout), rollout.mask) for name, rollout in (("fresh", fresh), ("sampler", batch.rollout))}


# ---------------------------------------------------------------- one run
def training(model, sampler, tokenizer, setting: Setting, arm: str, seed: int, noise: float = 0.0, period: int | None = None, desc: str = "", **changes):
    """Lesson 3's loop for one arm, with a progress bar; `changes` to the loop's arguments."""
    optimizer = getattr(torch.optim, setting.optimizer)(model.parameters(), lr=setting.lr, weight_decay=0.0)
    perturb = lesson3.weight_noise(noise, seed) if noise else None
    period = period or (1 if arm == "on-policy" else setting.period)
    # lesson 5 passes a loss of its own
    arguments = {"loss": ARMS.get(arm), "head": setting.head if arm in CENTERED else 0, **changes}
    return tqdm(lesson3.grpo(model, sampler, lesson1.TASKS[setting.task], tokenizer, optimizer, steps=setting.steps, period=period, seed=seed, prompts=setting.prompts,
                             max_tokens=setting.max_tokens, advantage=setting.advantage, perturb=perturb, decay=setting.decay, **arguments), total=setting.steps, desc=desc or f"{setting.task}: {arm}, seed {seed}")


def run(start, sampler, tokenizer, setting: Setting, arm: str, seed: int, reference: Reference, noise: float = 0.0, period: int | None = None, **changes) -> dict:
    """One arm, one seed: a record of its curves, syncs, seconds (without the measuring) and accuracy, ready for JSON."""
    model, rows, at, kls, began, measuring = copy.deepcopy(start), [], [], [], time.perf_counter(), 0.0
    for batch in training(model, sampler, tokenizer, setting, arm, seed, noise, period, **changes):
        paused, mask = time.perf_counter(), batch.rollout.mask
        rows.append({"reward": batch.R.mean().item(), "synced": batch.age == 0, "dropped": batch.dropped, "mean_ratio": mean_ratio(batch.lag, mask),
                     "ess_token": lag_ess(batch.lag, mask, "token"), "ess_sequence": lag_ess(batch.lag, mask)})
        if batch.step % setting.every == 0:
            at.append(batch.step)
            kls.append(reference.compare(model, batch))
        measuring += time.perf_counter() - paused
    record = {"task": setting.task, "advantage": setting.advantage, "arm": arm, "seed": seed, "noise": noise,
              "syncs": sum(row["synced"] for row in rows), "dropped": sum(row["dropped"] for row in rows),
              "seconds": time.perf_counter() - began - measuring, "entropy": entropy(model, batch.rollout),
              **held_out(model, sampler, setting, tokenizer, 8 * setting.prompts), "at": at}
    short = lambda values: [float(f"{v:.4g}") for v in values]
    for key in ("reward", "mean_ratio", "ess_token", "ess_sequence"):
        record[key] = short([row[key] for row in rows])
    for prefixes in ("fresh", "sampler"):
        for i, part in enumerate(("", " early", " late")):
            record[f"kl {prefixes}{part}"] = short([k[prefixes][i] for k in kls])
    return record


# ---------------------------------------------------------------- what the tail model costs
def centre_gradient(logits: Tensor, logp_old: Tensor, logp_sampler: Tensor, K: int, tail: bool = True) -> Tensor:
    """Gradient (N, V) with respect to the trainer's logits (N, V) of the centre from the sampler's top K; K = V: exact.
    Without `tail` the tokens outside the head are forgotten instead of modelled."""
    logits = logits.detach().requires_grad_()
    ids = logp_sampler.topk(K).indices
    head = [x.gather(1, ids)[None] for x in (logits.log_softmax(-1), logp_old, logp_sampler)]
    value = centre(*head, torch.ones(1), logits.shape[1] if tail else K)
    return torch.autograd.grad(value.sum(), logits)[0]


def tail_errors(logits: Tensor, logp_old: Tensor, logp_sampler: Tensor, sizes) -> list[dict]:
    """|| gradient at K - exact || / || exact ||, over all positions, with and without the tail model."""
    exact, rows = centre_gradient(logits, logp_old, logp_sampler, logits.shape[1]), []
    for K in sizes:
        error = {name: ((centre_gradient(logits, logp_old, logp_sampler, K, tail) - exact).norm() / exact.norm()).item()
                 for name, tail in (("modelled", True), ("dropped", False))}
        rows.append({"K": K, "mass": logp_sampler.topk(K).values.exp().sum(-1).mean().item(), **error})
    return rows


def peaked(V: int, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, logp_old, logp_sampler), (n, V) in float64: probabilities like 1 / rank^2, a lag of 0.3 on the logits and a
    discrepancy of 0.05, both independent from token to token."""
    rng = torch.Generator().manual_seed(seed)
    logits = (-2 * torch.arange(1, V + 1, dtype=torch.float64).log()).expand(n, V)
    old = logits + 0.3 * torch.randn(n, V, generator=rng, dtype=torch.float64)
    return logits, old.log_softmax(-1), (old + 0.05 * torch.randn(n, V, generator=rng, dtype=torch.float64)).log_softmax(-1)


def tail_model(start, sampler, tokenizer, setting: Setting, seed: int) -> dict:
    """The tail model's error against K: on real responses, four steps after a sync, where the engine recorded the whole
    vocabulary; and on 150,000 tokens."""
    peak = {"peaked, V = 150,000": tail_errors(*peaked(150_000, 16, seed), (1, 8, 32, 128, 512, 2048))}
    if setting.head != -1:
        return peak
    model = copy.deepcopy(start)
    setting = replace(setting, steps=5, decay=False)
    for batch in training(model, sampler, tokenizer, setting, "dlc, no resync", seed, desc="tail model"):
        last = batch
    mask, V = last.rollout.mask, last.vocabulary
    # from the order in which the engine ranked the tokens to that of the vocabulary
    with torch.no_grad():
        order = lambda x: torch.full((*mask.shape, V), -torch.inf, device=x.device).scatter(2, last.rollout.head_ids, x)[mask].double()
        logits, logp_old, logp_sampler = map(order, (last.head_logp, last.head_logp_old, last.rollout.head_logp))
    return {f"the policy, V = {V}, 4 steps stale": tail_errors(logits, logp_old, logp_sampler, (1, 2, 4, 8, 12, 16)), **peak}


# ---------------------------------------------------------------- the study
def plan() -> list[tuple]:
    """(setting, arm, seed, noise, period) of every run. period None: the setting's; "as dlc": about as many syncs as DLC had
    with this seed, at equal distances."""
    runs = []
    for name in ("sum", "stop"):
        runs += [(name, arm, seed, 0.0, "as dlc" if arm == "dlc, periodic" else None) for arm in ARMS for seed in range(5 if arm in MAIN else 3)]
    # the discrepancy alone: a sampler synced at every step, a relative weight noise in the engine, one draw a seed
    runs += [(f"free, {kind}", arm, seed, noise, None) for kind in ("raw", "mean") for noise in (0.0, 0.05, 0.1) for arm in ("none", "tis", "centering") for seed in range(3)]
    # milder staleness, so that quiet runs are among those on which the levels of the ESS are judged
    runs += [("sum, lr 7e-4", "on-policy", seed, 0.0, None) for seed in range(3)]
    runs += [(name, arm, seed, 0.0, period) for name in ("sum", "sum, lr 7e-4") for arm in ("none", "tis") for period in (4, 16) for seed in range(2)]
    return runs


def study(sampler, result: dict, done: dict, path: Path) -> dict:
    """Every run of the plan. `path`, the lesson's JSON, is written after each of them; what it held before (`done`), from the
    same policy and settings, is not run again. It does not know that you changed the code: delete "study" there then."""
    started, references, records = {}, {}, {}
    for number, (name, arm, seed, noise, period) in enumerate(plan()):
        setting = SETTINGS[name]
        if setting.task not in started:
            folder = lesson1.policy(setting.task)
            started[setting.task] = (lesson1.load_model(folder), transformers.AutoTokenizer.from_pretrained(folder), lesson1.file_hashes(folder)["model.safetensors"])
        start, tokenizer, policy_id = started[setting.task]
        key = f"{name}; {arm}; seed {seed}; noise {noise:g}; period {period}"
        if period == "as dlc":
            period = -(-setting.steps // records[f"{name}; dlc; seed {seed}; noise 0; period None"]["syncs"])
        record = done.get(key)
        if record is None or record["reference"] != reference_folder(setting, policy_id).name:
            print(f"run {number + 1} of {len(plan())}: {key}", flush=True)
            if name not in references:
                references[name] = Reference(start, sampler, tokenizer, setting, policy_id)
            record = {"setting": name, "period": period, "reference": references[name].folder.name,
                      **run(start, sampler, tokenizer, setting, arm, seed, references[name], noise, period)}
        records[key] = record
        result["study"] = {**done, **records}
        lesson1.save_json(result, path)
    result["study"] = records
    return result


# ---------------------------------------------------------------- what the records say
def mean_kl(record: dict, prefixes: str = "fresh", part: str = "") -> float:
    """Mean over the checkpoints at which there is such a position."""
    return float(np.mean([v for v in record[f"kl {prefixes}{part}"] if v is not None]))


def floor(records: list[dict], prefixes: str = "fresh", part: str = "") -> float:
    """The KL between two on-policy runs: mean over the on-policy seeds, the reference being the other one."""
    return float(np.mean([mean_kl(r, prefixes, part) for r in records if r["arm"] == "on-policy"]))


def arm_rows(records: list[dict]) -> list[dict]:
    """A row an arm: every seed's accuracy, KL over the floor on both kinds of prefixes, syncs; dropped tokens and seconds."""
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in records):
        mine = [r for r in records if r["arm"] == arm]
        rows.append({"arm": arm, "seeds": len(mine), "accuracy": [r["sampled"] for r in mine],
                     "fresh": [mean_kl(r) / floor(records) for r in mine], "sampler": [mean_kl(r, "sampler") / floor(records, "sampler") for r in mine],
                     "syncs": [r["syncs"] for r in mine], "dropped": float(np.mean([r["dropped"] for r in mine])), "seconds": float(np.mean([r["seconds"] for r in mine]))})
    return rows


def threshold(records: list[dict], prefixes: str = "fresh") -> np.ndarray:
    """What counts as harm, checkpoint by checkpoint: HARM times the floor, or times the on-policy runs' mean at this
    checkpoint where that is more (two on-policy runs are furthest apart while they learn fastest)."""
    curve = np.mean([r[f"kl {prefixes}"] for r in records if r["arm"] == "on-policy"], 0)
    return HARM * np.maximum(curve, curve.mean())


def first(steps, values, above):
    """The first of the steps at which the value is above (a number, or one a step); None if there is none."""
    above = np.broadcast_to(above, len(values))
    return next((k for k, v, limit in zip(steps, values, above) if v > limit), None)


def main_runs(records: list[dict], name: str) -> list[dict]:
    """A task's runs with its own period, or DLC's number of syncs: not those of milder staleness."""
    return [r for r in records if r["setting"] == name and (r["period"] is None or r["arm"] == "dlc, periodic")]


def alarms(records: list[dict]) -> list[dict]:
    """Of stale runs that are never resynchronised: did the level's alarm come before the harm (fresh KL above the threshold), and
    how often in runs that stayed below?"""
    levels = {"ESS of tokens < 1/2": lambda r: np.array(r["ess_token"]) < 0.5, "ESS of responses < 1/2": lambda r: np.array(r["ess_sequence"]) < 0.5,
              "ESS of responses x min(1, mean ratio) < 1/2": lambda r: np.array(r["ess_sequence"]) * np.minimum(1, r["mean_ratio"]) < 0.5,
              "mean ratio < 0.8": lambda r: np.array(r["mean_ratio"]) < 0.8}
    # periodic DLC is synced more often the earlier DLC's alarm rang: it is no independent case
    stale = [r for r in records if r["arm"] not in RESYNCED | {"on-policy", "dlc, periodic"} and r["task"] != "free"]
    limits = {name: threshold([r for r in records if r["setting"] == name]) for name in {r["setting"] for r in stale}}
    rows = []
    for level, rings in levels.items():
        row = {"level": level, "before": 0, "late": 0, "quiet": 0, "false": 0, "leads": []}
        for r in stale:
            harm = first(r["at"], r["kl fresh"], limits[r["setting"]])
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


def prefixes(records: list[dict]) -> list[dict]:
    """A row an arm of the early-stop task: KL at early and late positions on both kinds of prefixes, and the first step above a
    common threshold and above three times the prefixes' own floor, seed by seed."""
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in records):
        mine, row = [r for r in records if r["arm"] == arm], {"arm": arm}
        for kind in ("fresh", "sampler"):
            for part in (" early", " late"):
                row[kind + part] = [mean_kl(r, kind, part) for r in mine]
            row[f"{kind} above {COMMON}"] = [first(r["at"], r[f"kl {kind}"], COMMON) for r in mine]
            row[f"{kind} above 3 floors"] = [first(r["at"], r[f"kl {kind}"], threshold(records, kind)) for r in mine]
        rows.append(row)
    return rows


# ---------------------------------------------------------------- table and picture
def show(values, digits: int = 2) -> str:
    """A cell: every seed's value."""
    return " ".join("-" if v is None else f"{v:.{digits}f}" if isinstance(v, float) else str(v) for v in values)


def report_arms(title: str, records: list[dict]) -> None:
    print(f"\n{title}: KL(on-policy || run) over its floor, {floor(records):.2g} nats a token on fresh prefixes, {floor(records, 'sampler'):.2g} on the sampler's"
          f"\n{'':18}seeds  accuracy at the end             KL / floor                     on the sampler's prefixes      syncs             dropped tokens  seconds")
    for row in arm_rows(records):
        print(f"{row['arm']:18}{row['seeds']:5}  {show(row['accuracy']):32}{show(row['fresh'], 1):31}{show(row['sampler'], 1):31}{show(row['syncs']):18}{row['dropped']:14.0f}{row['seconds']:9.0f}")


def blind_spot(records: list[dict]) -> str:
    """How often the ESS of responses says that all is well while a fifth of the trainer's mass is out of the sampler's sight: in
    stale runs that are never resynchronised."""
    steps = [(e, m) for r in records if r["arm"] not in RESYNCED | {"on-policy"} for e, m in zip(r["ess_sequence"], r["mean_ratio"])]
    return f"{sum(m < 0.8 and e >= 0.5 for e, m in steps)} of {len(steps)} stale steps have an ESS of at least 1/2 and a mean ratio below .8; {sum(m < 0.8 for e, m in steps)} a mean ratio below .8"


def report(result: dict) -> None:
    """The tables, predicted beside measured."""
    lag, mask = torch.full((8, 3), -0.5), torch.ones(8, 3, dtype=torch.bool)
    print(f"\nwhat the ESS cannot see, by construction: all log-ratios -0.5 give an ESS of {lag_ess(lag, mask):.2f} and a mean ratio of {mean_ratio(lag, mask):.2f}")
    print(f"in these runs: {blind_spot(list(result['default'].values()))}")
    print("\nthe centre from a head of K with the modelled tail: error of its gradient, relative")
    for name, rows in result["tail"].items():
        for row in rows:
            print(f"{name:36} K = {row['K']:5}  mass of the head {row['mass']:.5f}   modelled {row['modelled']:8.1e}   tail dropped {row['dropped']:8.1e}")
    records = list(result["default"].values())
    report_arms(f"{records[0]['task']}, sampler synced every {result['settings']['period']} steps, one seed", records)
    if "study" not in result:
        return
    every = list(result["study"].values())
    for name in ("sum", "stop"):
        report_arms(f"study, {name}", main_runs(every, name))
    print("\nstudy, stop: KL by position (early: the first four tokens), and the step at which it first exceeds 0.2 nats, and three times its own floor")
    for row in prefixes([r for r in every if r["setting"] == "stop"]):
        print(f"{row['arm']:18}" + "".join(f"| {kind} prefixes: early {np.mean(row[kind + ' early']):.3f} late {np.mean(row[kind + ' late']):.3f}  above .2 {show(row[f'{kind} above 0.2']):16} above 3 floors {show(row[f'{kind} above 3 floors']):16}"
                                               for kind in ("fresh", "sampler")))
    for kind in ("raw", "mean"):
        mine = [r for r in every if r["setting"] == f"free, {kind}"]
        at_zero = [r for r in mine if r["arm"] == "none" and not r["noise"]]
        base = float(np.mean([mean_kl(r) for r in at_zero]))
        print(f"\nstudy, free tokens, {kind} advantage, synced every step: KL / floor ({base:.2g}) and entropy (on-policy {np.mean([r['entropy'] for r in at_zero]):.2f}), a noise draw each; reward")
        for noise in (0.0, 0.05, 0.1):
            for arm in ("none", "tis", "centering"):
                cell = [r for r in mine if r["arm"] == arm and r["noise"] == noise]
                print(f"weight noise {noise:4.0%}  {arm:12}{show([mean_kl(r) / base for r in cell], 1):18} entropy {show([r['entropy'] for r in cell]):18} reward {show([r['sampled'] for r in cell]):18}")
    print(f"\nstudy: {blind_spot(every)}")
    print("\nstudy: which level of the ESS warns?             harmed runs: warned before | late or never    quiet runs: false alarms    median lead, steps")
    for row in alarms(every):
        print(f"{row['level']:48}{row['before']:27} | {row['late']:13}{row['false']:18} of {row['quiet']}{np.median(row['leads']) if row['leads'] else float('nan'):22.0f}")


def draw(result: dict, path: Path) -> None:
    """The picture, from the JSON alone."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.8))
    styles = {"on-policy": ("-", "0.6"), "none": (":", "0"), "tis": ("--", "0.3"), "dlc": ("-", "0")}
    for r in result["default"].values():
        style, shade = styles[r["arm"]]
        left.semilogy(r["at"][1:], r["kl fresh"][1:], style, color=shade, label=f"{r['arm']}: {r['syncs']} syncs, accuracy {r['sampled']:.2f}")
        middle.plot(r["reward"], style, color=shade)
        right.plot(r["ess_sequence"], style, color=shade)
    over = {row["arm"]: row["fresh"][0] for row in arm_rows(list(result["default"].values()))}
    left.set(xlabel="step", ylabel="KL(on-policy || run), nats a token", ylim=(2e-5, 2), title=f"One seed, synced every {result['settings']['period']} steps:\n"
             f"none {over['none']:.0f}, TIS {over['tis']:.0f}, DLC {over['dlc']:.1f} times the floor")
    left.legend(fontsize=8, loc="lower left")
    middle.set(xlabel="step", ylabel="mean reward")
    right.set(xlabel="step", ylabel="ESS of the batch trained on (1 after a resync)")
    if "study" in result:
        every = list(result["study"].values())
        middle.clear()
        for name, marker, shift in (("sum", "o", -0.15), ("stop", "^", 0.15)):
            rows = arm_rows(main_runs(every, name))
            for i, row in enumerate(rows):
                middle.semilogy([i + shift] * row["seeds"], row["fresh"], "k" + marker, markersize=5, markerfacecolor="w" if name == "stop" else "k",
                                label={"sum": "running sum", "stop": "early stop"}[name] if i == 0 else None)
        middle.axhspan(0.1, 2, color="0.9", zorder=0)
        middle.axhline(1, color="k", linewidth=0.6)
        middle.set_xticks(range(len(rows)), [row["arm"] for row in rows], rotation=40, ha="right")
        middle.set(ylabel="KL / floor, a mark a seed", title="Study: with one or two syncs no arm is within\ntwice the floor (grey) on both tasks", ylim=(0.5, None))
        middle.legend(fontsize=8)
        right.clear()
        stop = [r for r in every if r["setting"] == "stop" and r["seed"] == 0]
        for arm, shade in (("on-policy", "0.75"), ("dlc, no resync", "0.4"), ("dlc", "0")):
            r = next(r for r in stop if r["arm"] == arm)
            right.semilogy(r["at"][1:], r["kl fresh"][1:], "-", color=shade, linewidth=2, label=f"{arm}: fresh prefixes")
            right.semilogy(r["at"][1:], r["kl sampler"][1:], ":", color=shade, linewidth=2, label=f"{arm}: the sampler's")
        right.set(xlabel="step", ylabel="KL(on-policy || run), nats a token", ylim=(1e-3, 0.4), title="Early stop, one seed: on the sampler's prefixes\nthe run without resync looks best")
        right.legend(fontsize=7, ncol=2, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv=None) -> dict:
    """Runs the lesson and returns what its JSON holds. argv as on the command line."""
    args, path, trainer = lesson1.lesson_arguments("04_dlc.py", __doc__, argv, study="every arm, both tasks, 3 to 5 seeds; resumable")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    setting = SETTINGS["sum"] if lesson1.is_tiny(tokenizer) else FULL_SIZE
    if args.quick:
        setting = replace(setting, steps=6, prompts=8, period=6)
    sampler = lesson1.Sampler(path)
    result = {"settings": {"seed": args.seed, "quick": args.quick, "period": setting.period},
              "tail": tail_model(trainer, sampler, tokenizer, setting, args.seed), "default": {}}
    reference = Reference(trainer, sampler, tokenizer, setting, str(path), anew=True)
    for arm in ("on-policy", "none", "tis", "dlc"):
        result["default"][arm] = run(trainer, sampler, tokenizer, setting, arm, args.seed, reference)
    before = lesson3.read_json(args.out / "04_dlc.json") or {}
    if args.study:
        result = study(sampler, result, before.get("study", {}), args.out / "04_dlc.json")
    elif "study" in before and not args.changed:
        result["study"] = before["study"]                        # a plain run does not lose what the study found
    result = lesson1.save_json(result, args.out / "04_dlc.json")
    report(result)
    rows = {row["arm"]: row for row in arm_rows(list(result["default"].values()))}
    print(f"\nKL from on-policy training, over that of another on-policy run: none {rows['none']['fresh'][0]:.1f}, TIS {rows['tis']['fresh'][0]:.1f}, "
          f"DLC {rows['dlc']['fresh'][0]:.1f} with {rows['dlc']['syncs'][0]} syncs in {setting.steps} steps. One seed.")
    draw(result, args.out / "04_dlc.png")
    print(f"picture: {args.out / '04_dlc.png'}")
    return result


if __name__ == "__main__":
    main()
