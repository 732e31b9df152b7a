"""Lesson 4: which correction does each part of the mismatch need?

Lesson 3 split a sampled token's error into the engine's discrepancy d and the stale weights' lag l. The
Discrepancy-Lag Correction (DLC) answers each with its own means: it centers the discrepancy, clips the lag, and
resynchronises the sampler when too little of its samples is left. With q = mu(. | prefix) as the engine recorded it,
r_v = pi_theta(v) / pi_{theta_s}(v) the lag ratio, f(r) = min(r, C), s_v = grad log pi_theta(v), the loss per token is

    L_t = -A [ sg(f(r_a)) log pi(a)  -  sum_v sg(q_v f(r_v)) log pi(v) ]         sg: a constant to the gradient
               clip the lag             center: what the first term is on average under the engine

and the batch is refused, the sampler synced and the batch sampled again if ESS(r) < 1/2 before the update.

This is a RECONSTRUCTION: of the paper ("On the Origin and Evolution of Training-Inference Mismatch in LLM
Reinforcement Learning", Li, Zhou, Lan 2026) we could read the abstract only. The centre is that of score centering
(arXiv 2609.20807); which clip, and the ESS of what (here: of whole responses), are our choices, and measured below.

Why a centre: E_q[A s] = E_q[A] b + Cov_q(A, s) with b = sum_v q_v s_v, and b is 0 only for q = pi. In the logits
b = q - pi: where the mean advantage of a prefix is above 0 training pulls the policy towards the engine, step after
step the same way. The centered score is e_a - q: its mean under the engine is 0, whatever the engine does. What
centering leaves is Cov_q(A, s) in place of Cov_pi(A, s), first order in q - pi as well.

The measure is KL(on-policy || run), per token, exact over the vocabulary, by the trainer, on fresh responses of an
on-policy run at the same step, mean over checkpoints; its floor is the same KL of other on-policy runs.

Run it:  python 04_dlc.py            a CPU: on-policy twice, none, TIS, DLC on the running sum, under 4 min
         python 04_dlc.py --study    every arm, both tasks, 3 to 5 seeds, the discrepancy alone: about 2 h, resumable
         --model Qwen/Qwen3-0.6B     a CUDA GPU (not run yet)
Expect:  with a sampler that is hardly ever synced, no correction far from on-policy, TIS nearer, DLC near the floor
         with a handful of syncs; numbers in figures/04_dlc.json, picture in figures/04_dlc.png.

Exercises (tests/test_04_dlc.py grades the functions):
 1. Write `centre` for K = V (two lines) and for a head with a modelled tail (six more); test_centre.
 2. Predict the centre's gradient where w = pi / q with full support, and where the weight is truncated: which of lesson
    2's weights need no centering? test_untruncated_weight_needs_no_centre.
 3. Write `lag_ess` so that padding does not count, and find log-ratios whose ESS is 1 while half of the mass is gone
    (1 line each); test_lag_ess.
 4. Replace min(r, C) by PPO's rule (1 line: `f=ppo_rule`), run `--study`'s arm "dlc, ppo rule", compare.
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
    """f(r) = r, 0 where PPO clips it for this sign of the advantage. lag (B, T) with advantage (B,), or (B, T, K)
    with (B, 1)."""
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
    turns the tail's part into one over the head. A difference in GRADIENT is what the model costs, not one in value."""
    pi, old, q = (x.detach().exp() for x in (head_logp, head_logp_old, head_logp_sampler))
    # c_v = q_v f(r_v)
    c = q * f(head_logp.detach() - head_logp_old, advantage[:, None])
    if head_logp.shape[-1] < vocabulary:
        tail_pi, tail_old, tail_q = (1 - x.sum(-1, keepdim=True) for x in (pi, old, q))
        # rho_x = (1 - x_H) / (1 - pi_H);  on the tail r = 1 / rho_s
        rho_q, rho_s = (x.clamp(min=0) / tail_pi.clamp(min=TAIL_FLOOR) for x in (tail_q, tail_old))
        # alpha = rho_q f(1 / rho_s);  c_v = q_v f(r_v) - alpha pi_v
        c = c - rho_q * f(-rho_s.log(), advantage[:, None]) * pi
    return (c * head_logp).sum(-1)


# ---------------------------------------------------------------- resynchronise the sampler
def lag_ess(lag: Tensor, mask: Tensor, level: str = "sequence") -> float:
    """Effective sample size of the lag ratio, share of n, before any clipping: of the tokens' ratios, or (level
    "sequence") of the responses' products. lag, mask (B, T). Blind to what all ratios have in common: see `mean_ratio`."""
    return lesson2.ess(lag[mask] if level == "token" else lesson2.sequence_sum(lag, mask)[:, 0])


def mean_ratio(lag: Tensor, mask: Tensor) -> float:
    """Mean lag ratio of the tokens. Predicted 1, since E_{pi_s}[pi / pi_s] = 1; below it, the trainer's mass has gone
    where the sampler does not look, which the ESS does not see."""
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
    mean = centre(head_logp, head_logp_old, head_logp_sampler, advantage, vocabulary, f)
    # L = -sum A (w log pi - centre) / N
    return lesson2.policy_loss(logp, w, advantage, mask, int(mask.sum()), mean)


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
    """Mean over all response tokens, over the early ones, over the late ones (NaN where there is none)."""
    early = (torch.arange(mask.shape[1], device=mask.device) < EARLY).expand_as(mask)
    return [values[where].double().mean().item() for where in (mask, mask & early, mask & ~early)]


@torch.no_grad()
def entropy(model, rollout) -> float:
    """Entropy of the policy, nats a token, on a rollout's prefixes."""
    parts = [lesson1.response_logits(model, rollout[rows]).float().log_softmax(-1)
             for rows in lesson1.micro_batches(rollout, model.config.get_text_config().vocab_size)]
    return torch.cat([-(x.exp() * x).sum(-1) for x in parts])[rollout.mask].mean().item()


def held_out(trainer, sampler, setting: Setting, tokenizer, n: int) -> dict:
    """Mean reward on n prompts that no run trains on, sampled and greedy, and the share of right digits after EARLY."""
    task = lesson1.TASKS[setting.task]
    digits, prompts = lesson1.make_prompts(task, tokenizer, n, np.random.default_rng([2**40, 7]))
    sampler.sync(trainer)
    result = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        rollout = sampler.sample(prompts, setting.max_tokens or task.max_tokens, seed=0, temperature=temperature)
        result[name] = lesson1.rewards(task, digits, rollout, tokenizer).mean().item()
        if setting.task == "stop" and name == "sampled":
            ids, right = rollout.ids.cpu().numpy(), lesson1.right_digits(task, digits)
            T = min(ids.shape[1], task.length)
            result["late"] = float((ids[:, EARLY:T] == right[:, EARLY:T]).sum() / right[:, EARLY:].size)
    return result


class Reference:
    """The on-policy run that all others are held against: its weights and its own responses at every checkpoint, on disk."""

    def __init__(self, start, sampler, tokenizer, setting: Setting, policy_id: str):
        key = hashlib.sha256(json.dumps([asdict(setting), policy_id]).encode()).hexdigest()[:8]
        self.folder, self.model, self.setting = lesson1.ROOT / "runs" / "04_dlc" / f"{setting.task}-{key}", copy.deepcopy(start), setting
        self.last = range(0, setting.steps, setting.every)[-1]
        if not (self.folder / f"{self.last}.pt").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            model = copy.deepcopy(start)
            for batch in training(model, sampler, tokenizer, setting, "on-policy", REFERENCE_SEED, desc="reference"):
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
def training(model, sampler, tokenizer, setting: Setting, arm: str, seed: int, noise: float = 0.0, period: int | None = None, desc: str = ""):
    """Lesson 3's loop for one arm, with a progress bar."""
    optimizer = getattr(torch.optim, setting.optimizer)(model.parameters(), lr=setting.lr, weight_decay=0.0)
    perturb = lesson3.weight_noise(noise, seed) if noise else None
    period = period or (1 if arm == "on-policy" else setting.period)
    return tqdm(lesson3.grpo(model, sampler, lesson1.TASKS[setting.task], tokenizer, optimizer, ARMS[arm], setting.steps, period, seed, setting.prompts,
                             max_tokens=setting.max_tokens, advantage=setting.advantage, head=setting.head if arm in CENTERED else 0,
                             perturb=perturb, decay=setting.decay), total=setting.steps, desc=desc or f"{setting.task}: {arm}, seed {seed}")


def run(start, sampler, tokenizer, setting: Setting, arm: str, seed: int, reference: Reference, noise: float = 0.0, period: int | None = None) -> dict:
    """One arm, one seed: a record of its curves, syncs, seconds (without the measuring) and accuracy, ready for JSON."""
    model, rows, at, kls, began, measuring = copy.deepcopy(start), [], [], [], time.perf_counter(), 0.0
    for batch in training(model, sampler, tokenizer, setting, arm, seed, noise, period):
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
    """The tail model's error against K: on real responses, four steps after a sync, and on 150,000 tokens."""
    model = copy.deepcopy(start)
    setting = replace(setting, steps=5, decay=False)
    for batch in training(model, sampler, tokenizer, setting, "dlc, no resync", seed, desc="tail model"):
        last = batch
    mask, V = last.rollout.mask, last.vocabulary
    with torch.no_grad():
        order = lambda x: torch.full((*mask.shape, V), -torch.inf, device=x.device).scatter(2, last.rollout.head_ids, x)[mask].double()
        logits, logp_old, logp_sampler = map(order, (last.head_logp, last.head_logp_old, last.rollout.head_logp))
    result = {f"the policy, V = {V}, 4 steps stale": tail_errors(logits, logp_old, logp_sampler, (1, 2, 4, 8, 12, 16))}
    result["peaked, V = 150,000"] = tail_errors(*peaked(150_000, 16, seed), (1, 8, 32, 128, 512, 2048))
    return result


# ---------------------------------------------------------------- the study
def plan() -> list[tuple]:
    """(setting, arm, seed, noise, period) of every run. period None: the setting's; "as dlc": as many syncs as DLC had."""
    runs = []
    for name in ("sum", "stop"):
        runs += [(name, arm, seed, 0.0, "as dlc" if arm == "dlc, periodic" else None) for arm in ARMS for seed in range(5 if arm in MAIN else 3)]
    # the discrepancy alone: a sampler synced at every step, a relative weight noise in the engine, one draw a seed
    runs += [(f"free, {kind}", arm, seed, noise, None) for kind in ("raw", "mean") for noise in (0.0, 0.05, 0.1) for arm in ("none", "tis", "centering") for seed in range(3)]
    # milder staleness, so that quiet runs are among those on which the levels of the ESS are judged
    runs += [("sum, lr 7e-4", "on-policy", seed, 0.0, None) for seed in range(3)]
    runs += [(name, arm, seed, 0.0, period) for name in ("sum", "sum, lr 7e-4") for arm in ("none", "tis") for period in (4, 16) for seed in range(2)]
    return runs


def study(sampler, path: Path) -> dict:
    """Every run of the plan; `path` (the lesson's JSON) is written after each, and what it holds is not run again."""
    result = lesson3.read_json(path) or {}
    done, starts, references = result.get("study", {}), {}, {}
    kept = {}
    for number, (name, arm, seed, noise, period) in enumerate(plan()):
        setting = SETTINGS[name]
        if setting.task not in starts:
            folder = lesson1.policy(setting.task)
            starts[setting.task] = (lesson1.load_model(folder), transformers.AutoTokenizer.from_pretrained(folder), lesson1.file_hashes(folder)["model.safetensors"])
        start, tokenizer, policy_id = starts[setting.task]
        if name not in references:
            references[name] = Reference(start, sampler, tokenizer, setting, policy_id)
        if period == "as dlc":
            period = -(-setting.steps // kept[f"{name}; dlc; seed {seed}; noise 0; period None"]["syncs"])
            key = f"{name}; {arm}; seed {seed}; noise 0; period as dlc"
        else:
            key = f"{name}; {arm}; seed {seed}; noise {noise:g}; period {period}"
        record = done.get(key)
        if record is None or record["reference"] != references[name].folder.name:
            print(f"run {number + 1} of {len(plan())}: {key}", flush=True)
            record = {"setting": name, "period": period, "reference": references[name].folder.name,
                      **run(start, sampler, tokenizer, setting, arm, seed, references[name], noise, period)}
        kept[key] = record
        result["study"] = {**done, **kept}
        lesson1.save_json(result, path)
    result["study"] = kept
    return result


def main(argv=None) -> dict:
    """Runs the lesson and returns what its JSON holds. argv as on the command line."""
    args, path, trainer = lesson1.lesson_arguments("04_dlc.py", __doc__, argv, study="every arm, both tasks, 3 to 5 seeds; resumable")
    sampler = lesson1.Sampler(path)
    result = study(sampler, args.out / "04_dlc.json")
    return result


if __name__ == "__main__":
    main()
