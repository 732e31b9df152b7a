"""Lesson 4: which correction does each part of the mismatch need?

Lesson 3 split a token's error into the engine's discrepancy d and the lag l of the sampler's old
weights. The Discrepancy-Lag Correction (DLC) has a remedy for each:

  center   The discrepancy's drift (lesson 3) is small, but it keeps its direction. Subtract it.
  clip     The lag ratio r = pi_theta / pi_theta_s corrects its token, but it spreads with every
           update. Cap it: f(r) = min(r, C).
  resync   Once few responses carry most of the weight, the rest of the batch says nothing, and no
           cap helps. If the effective sample size of the responses, (sum r)^2 / (n sum r^2), is
           below 1/2: sync, drop the batch, sample again.

With q = mu(. | prefix) and a the sampled token, the loss per token is

    L = -A [ sg(f(r_a)) log pi(a)  -  sum_v sg(q_v f(r_v)) log pi(v) ]     sg: a constant
             clip the lag             center: the mean of the first term under the engine

This is a RECONSTRUCTION. Of the DLC paper (Li, Zhou, Lan 2026) we could read the abstract only. The
center is that of score centering (arXiv 2609.20807), the weight that of CISPO (2506.13585). The cap
of 2 and the ESS of whole responses are our choices; figures/RESULTS.md compares others.

How good is a correction? Train with it and a stale sampler, train on-policy, and compare the two
policies: KL(on-policy || run), exact over the vocabulary, on fresh on-policy responses, averaged
over checkpoints. Another on-policy run gives the floor. The paper claims at most twice the floor.

Two comparisons follow: a stale sampler alone, and a stale sampler whose engine is off as well.

  python 04_dlc.py                           a CPU: four arms, then three, in 7 to 10 minutes
  python 04_dlc.py --model Qwen/Qwen3-0.6B   a CUDA GPU, 24 GB (not run yet)
  python figures/study.py 04                 twenty arms, two tasks, 3 to 8 seeds: hours
  python figures/study.py both               the second comparison with three engines, five seeds

Expect 4 floors without a correction, 19 with TIS, and 0.6 with DLC, which syncs 12 times in 80
steps. One run is a poor floor: over eight seeds it is 10 to 68, 8 to 70, and 1 to 5. Where the
engine is off as well, expect 24 floors from clip and resync without the center, and 1.6 with it.
Exercises: tests/EXERCISES.md.
"""
import copy
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import numpy as np

lesson1 = import_module("01_mismatch")   # before torch: it sets up torch's environment
lesson2 = import_module("02_importance_sampling")
lesson3 = import_module("03_decompose")
import torch
from torch import Tensor
from tqdm import tqdm

C = 2.0                # cap of the lag ratio
RESYNC_ESS = 0.5
HEAD = 128             # tokens that the sampler records per position, if the vocabulary has more
TAIL_FLOOR = 1e-6      # the trainer's tail mass is not taken to be smaller


# ---------------------------------------------------------------- clip the lag
# Not pi / mu, as TIS does: d is small, and the center takes its mean away without a weight.
# f maps lags l = log r to weights. advantage: (B,) with lags (B, T), (B, 1) with lags (B, T, K)
def clipped(lag: Tensor, advantage: Tensor) -> Tensor:
    """f(r) = min(r, C)."""
    return lesson2.ratio(lag).clamp(max=C)


def ppo_clipped(lag: Tensor, advantage: Tensor) -> Tensor:
    """f(r) = r, or 0 where PPO clips: r > 1.2 if A > 0, r < 0.8 if A < 0."""
    r = lesson2.ratio(lag)
    return torch.where(lesson2.ppo_keeps(r, advantage, 0.2, 0.2), r, 0.0)


@lesson2.correction
def lag_clip(x, C=C):
    """w = min(r, C) as a correction of lesson 2: the weight of train.py's --correction dlc."""
    return x.lag.clamp(max=C)


# ---------------------------------------------------------------- center the discrepancy
# With s_v = grad log pi(v), E_q[A s] = E_q[A] b + Cov_q(A, s), where b = sum_v q_v s_v is 0 only if
# q = pi. The center subtracts E_q[A] b. For two tokens, pi = (.5, .5) and q = (.6, .4), the first
# logit receives E[A s]:
#
#     A of the two tokens      under pi: right      under q      under q, centered
#     (1, 1)                        0                .10               0
#     (1, 0)                       .25               .30              .24
#     (0, 1)                      -.25              -.20             -.24
#
# Uncentered, each step errs toward the first token, and the errors accumulate. With the weight r
# the mean is sum_v q_v r_v s_v, and q_v r_v = pi_v exp(-d_v): again 0 but for the discrepancy. A
# cap makes a mean of its own, as min(r, C) is not r. On the task SUM, where d is far below l, the
# center mostly removes this one.
def center(head_logp: Tensor, head_logp_old: Tensor, head_logp_sampler: Tensor, advantage: Tensor,
           vocabulary: int, f=clipped) -> Tensor:
    """sum_v sg(q_v f(r_v)) log pi(v), (B, T) in nats. Its gradient is the mean of f(r) s under mu.

    head_logp*: (B, T, K) log-probs of the sampler's K most likely tokens under pi_theta, with its
    graph, under pi_old and under mu, normalized over the full vocabulary. K = vocabulary is exact.
    Else the other tokens, the tail, are modeled (as in arXiv 2609.20807, eq. 12, which has no
    pi_old). Then f must be bounded, as ppo_clipped is not for A < 0, and only the gradient has a
    meaning. Raises ValueError for K = 0."""
    K, A = head_logp.shape[-1], advantage[:, None]
    if K == 0:
        raise ValueError("a center needs the sampler's most likely tokens: sample with head=K")
    pi, old, q = (x.detach().exp() for x in (head_logp, head_logp_old, head_logp_sampler))
    # coefficient of log pi(v): q_v f(r_v). Not 0 * inf where the sampler cannot go
    coefficient = torch.where(q > 0, q * f(head_logp.detach() - head_logp_old, A), 0.0)
    if K < vocabulary:
        # Only the tail's masses are known: 1 - sum_head. Model it as a multiple of pi:
        #     q_v = kappa_q pi_v,   pi_old,v = kappa_s pi_v,   hence r_v = 1 / kappa_s
        tail_pi, tail_old, tail_q = (1 - x.sum(-1, keepdim=True) for x in (pi, old, q))
        kappa_q, kappa_s = (x.clamp(min=0) / tail_pi.clamp(min=TAIL_FLOOR)
                            for x in (tail_q, tail_old))
        # sum_tail q_v f(r_v) s_v = kappa_q f(1 / kappa_s) sum_tail pi_v s_v, and since
        # sum_v pi_v s_v = 0, sum_tail pi_v s_v = -sum_head pi_v s_v: the head is enough
        alpha = torch.where(kappa_q > 0, kappa_q * f(-kappa_s.log(), A), 0.0)
        coefficient = coefficient - alpha * pi
    return (coefficient * head_logp).sum(-1)


# ---------------------------------------------------------------- resync the sampler
def lag_ess(lag: Tensor, mask: Tensor) -> float:
    """Effective sample size of the responses' lag ratios, as a share of their number. lag, mask
    (B, T). It is taken before any clipping: a cap lifts it and hides what it should show. Responses
    without a token do not count. Raises ValueError if none has one, and if a lag is NaN."""
    # r of a response = prod_t r_t;  ESS = (sum r)^2 / (n sum r^2)
    return lesson2.ess(lesson2.sequence_sum(lag, mask)[mask.any(1), 0])


def mean_ratio(lag: Tensor, mask: Tensor) -> float:
    """Mean lag ratio of the tokens. Predicted: 1, its mean under pi_old. It falls if mass moves to
    where the sampler does not look. The ESS does not fall then: halve all r, and it is the same."""
    return lesson2.ratio(lag[mask].double()).mean().item()


# ---------------------------------------------------------------- the three together
def dlc_loss(batch, f=clipped, centered: bool = True, resync_ess: float = RESYNC_ESS):
    """The loss of one of lesson 3's batches. None refuses it: sync the sampler and sample again.
    The other arguments switch the parts. Padding may be NaN. Raises ValueError as its parts do."""
    mask, lag, A, c = batch.rollout.mask, batch.lag, batch.advantage, 0.0
    # resync: ESS(r) < 1/2, strictly, before the update
    if lag_ess(lag, mask) < resync_ess:
        return None
    # clip the lag, and nothing but the lag: w = f(r_a)
    w = f(lag, A)                                                                   # (B, T)
    # center the discrepancy: c = sum_v sg(q_v f(r_v)) log pi(v)
    if centered:
        heads = batch.head_logp, batch.head_logp_old, batch.rollout.head_logp       # (B, T, K)
        heads = (lesson2.inside(mask[..., None], x) for x in heads)
        c = center(*heads, A, batch.vocabulary, f)
    # L = -sum A (w log pi - c) / N
    return lesson2.policy_loss(batch.logp, w, A, mask, int(mask.sum()), c)


def laws() -> list[dict]:
    """Predicted | measured: each part on a few numbers."""
    pi, q = (torch.tensor([[p]]).log() for p in ([0.5, 0.5], [0.6, 0.4]))           # (1, 1, 2)
    logits = pi.clone().requires_grad_()
    value = center(logits.log_softmax(-1), pi, q, torch.ones(1), vocabulary=2)
    pull = torch.autograd.grad(value.sum(), logits)[0][0, 0, 0].item()
    lag, half = torch.tensor([[20.0, 1, 1, 1, 1, 1], [0.5] * 6]).log()[..., None]   # each (6, 1)
    mask = torch.ones(6, 1, dtype=torch.bool)
    rows = [("the engine's pull on the first logit, two tokens", 0.1, pull),
            ("f(20)", C, clipped(lag, torch.ones(6))[0, 0].item()),
            ("ESS, r = 20 1 1 1 1 1", 25**2 / (6 * 405), lag_ess(lag, mask)),
            ("ESS, all r = 1/2", 1.0, lag_ess(half, mask)),
            ("mean ratio, all r = 1/2", 0.5, mean_ratio(half, mask))]
    return [dict(zip(("law", "predicted", "measured"), row)) for row in rows]


# ---------------------------------------------------------------- the arms
none, tis = (lesson3.weighted(lesson2.CORRECTIONS[name]) for name in ("none", "tis"))
ARMS = {      # name -> arguments of lesson 3's loop; figures/study.py has more
    "on-policy": {"loss": none, "period": 1},
    "none": {"loss": none},
    "tis": {"loss": tis},
    "lag clip + resync": {"loss": partial(dlc_loss, centered=False)},
    "dlc": {"loss": dlc_loss, "head": HEAD}}


@dataclass(frozen=True)
class Setting:
    """What all arms of one comparison share."""
    arms: tuple = ("on-policy", "none", "tis", "dlc")
    task: lesson1.Task = lesson1.SUM
    steps: int = 80
    period: int = 64                   # steps between syncs of a stale arm
    lr: float = 1.5e-3
    prompts: int = 32                  # per step, each with 8 responses
    max_tokens: int | None = None      # of a response; None: what the task needs
    every: int = 1                     # steps between checkpoints, at which the KL is taken
    optimizer: type = torch.optim.AdamW
    advantage: str = "std"
    decay: bool = True                 # of the learning rate


SIZES = {     # tiny was tuned with a simulated engine, on other seeds and policies
    "tiny": Setting(),
    "cpu": Setting(steps=8, period=8, lr=1e-6, prompts=1, max_tokens=32),
    "gpu": Setting(lr=1e-6, prompts=8, max_tokens=256, every=20)}
# Lag and discrepancy together: free tokens, which no reward holds, and raw rewards (lesson 3). The
# engine's parameters are off by 5 % all the time: more than any engine, so that a minute shows it.
BOTH = Setting(("on-policy", "lag clip + resync", "dlc"), lesson3.FREE, steps=100, period=50,
               lr=0.04, prompts=16, every=10, optimizer=torch.optim.SGD, advantage="raw",
               decay=False)
NOISE = 0.05
REFERENCE_SEED = 2**32                 # no --seed reaches it


def training(model, sampler, tokenizer, setting: Setting, name: str, seed: int, **arm):
    """Lesson 3's loop for one arm: yields a batch per step and trains `model`."""
    arm["head"] = min(arm.get("head", 0), lesson1.vocabulary(model))
    steps = lesson3.grpo(model, sampler, setting.task, tokenizer, seed=seed, **{
        "optimizer": setting.optimizer(model.parameters(), lr=setting.lr, weight_decay=0.0),
        "steps": setting.steps, "period": setting.period, "prompts": setting.prompts,
        "max_tokens": setting.max_tokens, "advantage": setting.advantage, "decay": setting.decay,
        **arm})
    return tqdm(steps, total=setting.steps, desc=f"{setting.task.name}: {name}, seed {seed}")


# ---------------------------------------------------------------- the measure
FRESH, STALE = "KL, fresh prefixes", "KL, sampler's prefixes"     # whose responses it is taken on


def stale_prefixes(name: str, reference: dict, batch):
    """The responses for STALE: the arm's own samples. An on-policy arm has no stale sampler. It is
    judged on what the start policy wrote, as a sampler that is never synced goes on to do."""
    return reference[0][1] if name == "on-policy" else batch.rollout


@torch.no_grad()
def kl(reference, model, rollout) -> Tensor:
    """KL(reference || model) at each response position, (B, T) in nats, over the vocabulary."""
    parts = []
    for rows in lesson1.micro_batches(rollout, lesson1.vocabulary(model)):
        log_p, log_other = (lesson1.response_logits(m, rollout[rows]).float().log_softmax(-1)
                            for m in (reference, model))                            # (b, T, V)
        # KL(p || other) = sum_v p_v (log p_v - log other_v)
        parts.append((log_p.exp() * (log_p - log_other)).sum(-1))
    return torch.cat(parts)


def reference_run(start, sampler, tokenizer, setting: Setting) -> dict:
    """{step: (state, rollout)}: the on-policy run that all others are compared with."""
    model, arm = copy.deepcopy(start), ARMS["on-policy"]
    batches = training(model, sampler, tokenizer, setting, "reference", REFERENCE_SEED, **arm)
    return {batch.step: (copy.deepcopy(model).cpu().state_dict(), batch.rollout)
            for batch in batches if batch.step % setting.every == 0}


def run(start, sampler, tokenizer, setting: Setting, name: str, seed: int, reference: dict,
        **arm) -> dict:
    """One arm, one seed: its steps and its held-out accuracy."""
    model, other, steps, dropped = copy.deepcopy(start), copy.deepcopy(start), [], 0
    for batch in training(model, sampler, tokenizer, setting, name, seed, **arm):
        lag, mask, dropped = batch.lag, batch.rollout.mask, dropped + batch.dropped
        steps.append({"step": batch.step, "age": batch.age, "reward": batch.R.mean().item(),
                      "ESS of responses": lag_ess(lag, mask), "mean ratio": mean_ratio(lag, mask)})
        if batch.step in reference:
            state, fresh = reference[batch.step]
            other.load_state_dict(state)
            stale = stale_prefixes(name, reference, batch)
            for prefixes, rollout in ((FRESH, fresh), (STALE, stale)):
                values = kl(other, model, rollout)[rollout.mask]
                steps[-1][prefixes] = values.double().mean().item()
    accuracy = lesson3.held_out(model, sampler, setting.task, tokenizer, 8 * setting.prompts,
                                setting.max_tokens)["sampled"]
    return {"arm": name, "seed": seed, "accuracy": accuracy, "dropped tokens": dropped,
            "steps": steps}


def mean_kl(record: dict, prefixes: str) -> float:
    return float(np.mean([step[prefixes] for step in record["steps"] if prefixes in step]))


def over_floor(records: list[dict]) -> list[dict]:
    """A row per record: its mean KL over the on-policy arm's, the floor. None if the floor is 0."""
    rows, floors = [], [r for r in records if r["arm"] == "on-policy"]
    for r in records:
        row = {"arm": r["arm"], "accuracy": r["accuracy"]}
        for prefixes in (FRESH, STALE):
            floor = np.mean([mean_kl(x, prefixes) for x in floors])
            row[f"{prefixes} / floor"] = mean_kl(r, prefixes) / floor if floor else None
        rows.append({**row, "syncs": sum(step["age"] == 0 for step in r["steps"]),
                     "dropped tokens": r["dropped tokens"],
                     "lowest mean ratio": min(step["mean ratio"] for step in r["steps"])})
    return rows


def compare(start, sampler, tokenizer, setting: Setting, seed: int, perturb=None) -> dict:
    """All arms of a setting. perturb: what the stale arms' engine is sent for the weights."""
    reference = reference_run(start, sampler, tokenizer, setting)
    runs = []
    for name in setting.arms:
        arm = ARMS[name] if name == "on-policy" else {**ARMS[name], "perturb": perturb}
        runs.append(run(start, sampler, tokenizer, setting, name, seed, reference, **arm))
    return {"period": setting.period, "arms": over_floor(runs), "runs": runs}


def verdict(rows: list[dict]) -> str:
    """A table of arms read aloud. It follows the numbers."""
    multiples = {row["arm"]: row[f"{FRESH} / floor"] for row in rows}
    if multiples["dlc"] is None:
        return "The two on-policy runs do not differ: there is no floor to compare with."
    sizes = ", ".join(f"{name} {x:.1f}" for name, x in multiples.items() if name != "on-policy")
    keeps = "keeps" if multiples["dlc"] <= 2 else "does not keep"
    return f"KL from on-policy training, in floors: {sizes}. DLC {keeps} within two. One seed."


def main(argv=None) -> dict:
    args, trainer, tokenizer = lesson1.arguments(__file__, __doc__, argv)
    setting, both = replace(SIZES[lesson1.scale(tokenizer)], task=args.task), BOTH
    setting = replace(setting, max_tokens=None) if args.task.shots else setting
    if args.quick:
        setting, both = (replace(x, steps=6, period=6, prompts=min(8, x.prompts), every=2)
                         for x in (setting, both))
    sampler = lesson1.Sampler(args.path, lesson1.engine_dtype(tokenizer))
    result = {"model": args.path, "seed": args.seed, "laws": laws(),
              **compare(trainer, sampler, tokenizer, setting, args.seed)}
    if lesson1.is_tiny(tokenizer):          # other policies do not know the free tokens
        free = lesson1.load_model(lesson1.policy(lesson3.FREE))
        noise = lesson3.parameter_noise(NOISE, args.seed)
        result["both"] = compare(free, sampler, tokenizer, both, args.seed, noise)
    result = lesson1.save(result, args.json)
    lesson1.table("predicted | measured", result["laws"])
    for title, its in (("lag alone", result), ("lag and discrepancy", result.get("both"))):
        if its:
            lesson1.table(f"{title}: synced every {its['period']} steps, DLC also if its ESS is "
                          f"below {RESYNC_ESS}", its["arms"])
            print(f"\n{verdict(its['arms'])}")
    return result


if __name__ == "__main__":
    main()
