"""Lesson 4: which correction does each part of the mismatch need?

Lesson 3 split a token's error into the engine's discrepancy d and the lag l of the sampler's old
weights. They do harm in different ways. The Discrepancy-Lag Correction (DLC) treats each apart:

  center   The discrepancy is small, but it pulls the same way at every step, whatever the reward.
           Subtract that part.
  clip     The lag ratio r = pi_theta / pi_old is a true importance weight, but every update spreads
           it further. Cap it: f(r) = min(r, C).
  resync   Once few responses carry all the weight, no cap helps. If the effective sample size of
           the responses, (sum r)^2 / (n sum r^2), is below 1/2: sync the sampler, drop the batch,
           sample it again.

With q = mu(. | prefix) and s_v = grad log pi(v | prefix), the loss per token is

    L = -A [ sg(f(r_a)) log pi(a)  -  sum_v sg(q_v f(r_v)) log pi(v) ]     sg: a constant
             clip the lag             center: the mean of the first term under the engine

This is a RECONSTRUCTION. Of the DLC paper (Li, Zhou, Lan 2026) we could read the abstract only. The
center is that of score centering (arXiv 2609.20807). The cap of 2 and the ESS of whole responses
are our choices; figures/RESULTS.md compares others.

How good is a correction? Train on-policy, train with the correction and a stale sampler, and
compare the two policies: KL(on-policy || run), exact over the vocabulary, on fresh responses of the
on-policy run, averaged over checkpoints. A second on-policy run gives the floor.

  python 04_dlc.py                           a CPU: on-policy, none, TIS and DLC in 3 minutes
  python 04_dlc.py --model Qwen/Qwen3-0.6B   a CUDA GPU, 24 GB (not run yet)
  python figures/study.py 04                 twelve arms, two tasks, 3 to 5 seeds: 75 minutes

Expect 33 floors without a correction, 12 with TIS, and 1.1 with DLC, which syncs 4 times in 80
steps. Seeds differ much: over five of them DLC is at 0.9 to 4.7. Exercises: tests/EXERCISES.md.
"""
import copy
import math
import time
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Callable

import numpy as np

lesson1 = import_module("01_mismatch")   # before torch: it hides the broken packages around it
lesson2 = import_module("02_importance_sampling")
lesson3 = import_module("03_decompose")
import torch
from torch import Tensor
from tqdm import tqdm

C = 2.0                # cap of the lag ratio
RESYNC_ESS = 0.5
TAIL_FLOOR = 1e-6      # the trainer's tail mass is not taken to be smaller


# ---------------------------------------------------------------- clip the lag
# A rule f maps lags l = log r to weights of the same shape. `advantage` is (B,) beside lags (B, T),
# and (B, 1) beside lags (B, T, K).
def clipped(lag: Tensor, advantage: Tensor) -> Tensor:
    """f(r) = min(r, C)."""
    return lesson2.ratio(lag).clamp(max=C)


def ppo_clipped(lag: Tensor, advantage: Tensor) -> Tensor:
    """f(r) = r, or 0 where PPO clips: r > 1.2 if A > 0, r < 0.8 if A < 0."""
    r = lesson2.ratio(lag)
    return torch.where(lesson2.ppo_keeps(r, advantage, 0.2, 0.2), r, 0.0)


def unweighted(lag: Tensor, advantage: Tensor) -> Tensor:
    """f(r) = 1."""
    return torch.ones_like(lag)


# train.py's --correction dlc: the weight f(r_a), in the contract of lesson 2
lag_clip = lesson2.correction(lambda x, C=C: x.lag.clamp(max=C))


# ---------------------------------------------------------------- center the discrepancy
# E_q[A s] = E_q[A] b + Cov_q(A, s), and b = sum_v q_v s_v is 0 only if q = pi. An example with two
# tokens: pi = (.5, .5), and an engine with q = (.6, .4). In the logits s_v = e_v - pi, and centered
# e_v - q. The first logit receives E[A s] =
#
#     A of the two tokens      under pi: right      under q      under q, centered
#     (1, 1)                        0                .10               0
#     (1, 0)                       .25               .30              .24
#     (0, 1)                      -.25              -.20             -.24
#
# Without the center each update is wrong by .05 or .10, always towards the first token. The engine's
# error moves along with the policy, so that these errors add up. Centered, an update is 4 % short.
#
# The center does a second thing. A capped weight has a mean of its own, even where q = pi_old:
# sum_v pi_old,v f(r_v) s_v is 0 for f(r) = r, since pi_old,v r_v = pi_v, but not for min(r, C). On the
# running sum d is a hundredth of the lag, and removing that mean is nearly all that the center does.
def center(head_logp: Tensor, head_logp_old: Tensor, head_logp_sampler: Tensor, advantage: Tensor,
           vocabulary: int, f=clipped) -> Tensor:
    """sum_v sg(q_v f(r_v)) log pi(v), (B, T) in nats. Its gradient is the mean of f(r) s under mu.

    head_logp*: (B, T, K) log-probs of the sampler's K most likely tokens under pi_theta, with its
    graph, under pi_old, and under mu, all normalized over the full vocabulary. K = vocabulary is
    exact. Else the other tokens, the tail, are modeled (arXiv 2609.20807, eq. 12, with a third
    policy), and then f must be bounded. The model gives the gradient, not the value. Raises
    ValueError if no head was recorded."""
    K = head_logp.shape[-1]
    if K == 0:
        raise ValueError("a center needs the sampler's most likely tokens: sample with head=K")
    pi, old, q = (x.detach().exp() for x in (head_logp, head_logp_old, head_logp_sampler))
    # coefficient of log pi(v): q_v f(r_v), which is 0 where the sampler cannot go
    f_r = f(head_logp.detach() - head_logp_old, advantage[:, None])
    coefficient = torch.where(q > 0, q * f_r, 0.0)
    if K < vocabulary:
        # Of the tail only the masses are known, 1 - sum_head. Model it as a multiple of pi:
        #     q_v = kappa_q pi_v,   pi_old,v = kappa_s pi_v,   so that r_v = 1 / kappa_s
        tail_pi, tail_old, tail_q = (1 - x.sum(-1, keepdim=True) for x in (pi, old, q))
        kappa_q, kappa_s = (x.clamp(min=0) / tail_pi.clamp(min=TAIL_FLOOR)
                            for x in (tail_q, tail_old))
        # Then sum_tail q_v f(r_v) s_v = kappa_q f(1 / kappa_s) sum_tail pi_v s_v, and since
        # sum_v pi_v s_v = 0, sum_tail pi_v s_v = -sum_head pi_v s_v: only the head is needed
        coefficient = coefficient - kappa_q * f(-kappa_s.log(), advantage[:, None]) * pi
    return torch.where(coefficient == 0, 0.0, coefficient * head_logp).sum(-1)


# ---------------------------------------------------------------- resync the sampler
def lag_ess(lag: Tensor, mask: Tensor) -> float:
    """Effective sample size of the responses' lag ratios, as a share of their number. lag and mask
    (B, T). It is taken before any clipping: a cap lifts it and hides what it should show. Responses
    without a token do not count. Raises ValueError if none has one, or if a lag is NaN."""
    # r of a response = prod_t r_t;  ESS = (sum r)^2 / (n sum r^2)
    return lesson2.ess(lesson2.sequence_sum(lag, mask)[mask.any(1), 0])


def mean_ratio(lag: Tensor, mask: Tensor) -> float:
    """Mean lag ratio of the tokens. Predicted 1, since E_pi_old[pi / pi_old] = 1. If all ratios fall
    alike, the trainer has moved its mass to where the sampler does not look. The ESS cannot see
    that, because it does not change when all ratios are multiplied by one number."""
    return lesson2.ratio(lag[mask].double()).mean().item()


# ---------------------------------------------------------------- the three together
def dlc_loss(batch, f=clipped, centered: bool = True, resync_ess: float = RESYNC_ESS):
    """The loss of one of lesson 3's batches. None refuses the batch: then the caller syncs the sampler
    and samples again. The other arguments switch the three parts. With f=unweighted, centered=False
    and resync_ess=0 nothing is corrected. Padding is ignored, even if it is NaN."""
    r, lag, A, c = batch.rollout, batch.lag, batch.advantage, 0.0
    # resync: ESS(r) < 1/2, strictly, before the update
    if lag_ess(lag, r.mask) < resync_ess:
        return None
    # clip the lag, and nothing but the lag: w = f(r_a)
    w = torch.where(r.mask, f(lag, A), 0.0)                                         # (B, T)
    # center the discrepancy: c = sum_v sg(q_v f(r_v)) log pi(v)
    if centered:
        heads = batch.head_logp, batch.head_logp_old, r.head_logp                   # (B, T, K)
        heads = [torch.where(r.mask[..., None], x, 0.0) for x in heads]
        c = center(*heads, A, batch.vocabulary, f)
    # L = -sum A (w log pi - c) / N
    return lesson2.policy_loss(batch.logp, w, A, r.mask, int(r.mask.sum()), c)


# ---------------------------------------------------------------- the modeled tail, K by K
def center_gradient(logits, logp_old, logp_sampler, K: int, tail: bool = True) -> Tensor:
    """Gradient (N, V) of the center in the trainer's logits, from the sampler's top K. All (N, V).
    Without `tail` the other tokens are left out instead of modeled."""
    logits = logits.detach().requires_grad_()
    ids = logp_sampler.topk(K).indices
    head = [x.gather(1, ids)[None] for x in (logits.log_softmax(-1), logp_old, logp_sampler)]
    value = center(*head, torch.ones(1), logits.shape[1] if tail else K)
    return torch.autograd.grad(value.sum(), logits)[0]


def tail_errors(name: str, logits, logp_old, logp_sampler, sizes) -> list[dict]:
    """|| gradient from K - exact gradient || / || exact gradient ||, over all N positions."""
    policies = logits, logp_old, logp_sampler
    exact, rows = center_gradient(*policies, logits.shape[1]), []
    for K in sizes:
        modeled, dropped = (center_gradient(*policies, K, tail) for tail in (True, False))
        rows.append({"distributions": name, "K": K,
                     "mass of the head": logp_sampler.topk(K).values.exp().sum(-1).mean().item(),
                     "error, tail modeled": ((modeled - exact).norm() / exact.norm()).item(),
                     "error, tail dropped": ((dropped - exact).norm() / exact.norm()).item()})
    return rows


def peaked(V: int, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, log pi_old and log mu (n, V) in float64: probabilities like 1 / rank^2, a lag of 0.3 on
    the logits and a discrepancy of 0.05, both independent from token to token."""
    rng = torch.Generator().manual_seed(seed)
    e_lag, e_engine = (torch.randn(n, V, generator=rng, dtype=torch.float64) for _ in range(2))
    logits = (-2 * torch.arange(1, V + 1, dtype=torch.float64).log()).expand(n, V)
    old = logits + 0.3 * e_lag
    return logits, old.log_softmax(-1), (old + 0.05 * e_engine).log_softmax(-1)


def tail_model(trainer, sampler, tokenizer, setting, seed: int) -> list[dict]:
    """The modeled tail's errors: on 150,000 tokens, and on the policy's own responses four steps
    after a sync if the engine records the whole vocabulary."""
    rows = tail_errors("peaked", *peaked(150_000, 16, seed), (1, 8, 32, 128, 512, 2048))
    if setting.head != -1:
        return rows
    short, arm = replace(setting, steps=5, decay=False), replace(ARMS["dlc"], loss=without_resync)
    for batch in training(copy.deepcopy(trainer), sampler, tokenizer, short, arm, seed):
        pass
    policies = batch.head_logp, batch.head_logp_old, batch.rollout.head_logp         # (B, T, V)
    policies = [x.detach()[batch.rollout.mask].double() for x in policies]           # (N, V)
    return tail_errors("the policy", *policies, (1, 2, 4, 8, 12, 16)) + rows


def laws() -> list[dict]:
    """Predicted | measured: each part of DLC on an input of a few numbers."""
    half, q = (torch.tensor([[p]], dtype=torch.float64).log() for p in ([0.5, 0.5], [0.6, 0.4]))

    def first_logit(A: list[float], centered: bool) -> float:
        """E_q[A s] in the example above `center`."""
        logits = half.clone().requires_grad_()
        logp, A = logits.log_softmax(-1), torch.tensor(A, dtype=torch.float64)
        value = (q.exp() * A * logp).sum()
        if centered:
            value = value - (q.exp() * A).sum() * center(logp, half, q, torch.ones(1), 2).sum()
        return torch.autograd.grad(value, logits)[0][0, 0].item()

    one_of_six, all_halved = torch.zeros(6, 1), torch.full((6, 1), math.log(0.5))
    one_of_six[0] = math.log(20)
    mask = torch.ones(6, 1, dtype=torch.bool)
    rows = [("two tokens, A = (1, 1): E_q[A s]", 0.10, first_logit([1, 1], False)),
            ("two tokens, A = (1, 1): centered", 0.0, first_logit([1, 1], True)),
            ("two tokens, A = (1, 0): centered", 0.24, first_logit([1, 0], True)),
            ("f(r) at r = 20", C, clipped(one_of_six, torch.ones(6))[0, 0].item()),
            ("six responses, one with r = 20: ESS", 25**2 / (6 * 405), lag_ess(one_of_six, mask)),
            ("six responses, all with r = 1/2: ESS", 1.0, lag_ess(all_halved, mask)),
            ("six responses, all with r = 1/2: mean ratio", 0.5, mean_ratio(all_halved, mask))]
    return [dict(zip(("law", "predicted", "measured"), row)) for row in rows]


# ---------------------------------------------------------------- the arms
@dataclass(frozen=True)
class Arm:
    """One way to train."""
    name: str
    loss: Callable               # of one of lesson 3's batches
    head: bool = False           # does the loss need the sampler's distribution at each position?
    period: int | None = None    # steps between syncs; None: the setting's


def weighted(name: str):
    return lesson3.weighted(lesson2.CORRECTIONS[name])


def without_resync(batch) -> Tensor:
    return dlc_loss(batch, resync_ess=0)


ARMS = {arm.name: arm for arm in (     # figures/study.py has more
    Arm("on-policy", weighted("none"), period=1),
    Arm("none", weighted("none")),
    Arm("tis", weighted("tis")),
    Arm("dlc", dlc_loss, head=True))}


@dataclass(frozen=True)
class Setting:
    """What all arms of one comparison share."""
    task: lesson1.Task = lesson1.SUM
    steps: int = 80
    period: int = 64                   # steps between syncs of a stale arm
    lr: float = 1.5e-3
    prompts: int = 32                  # per step, each with 8 responses
    max_tokens: int | None = None      # of a response; None: what the task needs
    head: int = -1                     # tokens recorded for the center; -1: the vocabulary
    every: int = 2                     # steps between checkpoints, at which the KL is taken
    optimizer: type = torch.optim.Adam
    advantage: str = "std"
    decay: bool = True                 # of the learning rate, linearly to 0


SIZES = {   # the first was chosen on other seeds and policies, with a simulated engine
    "tiny": Setting(),
    "cpu": Setting(steps=8, period=8, lr=1e-6, prompts=1, max_tokens=32, head=128),
    "gpu": Setting(lr=1e-6, prompts=8, max_tokens=256, head=128, every=20)}
REFERENCE_SEED = 2**32                 # no --seed reaches it


def training(model, sampler, tokenizer, setting: Setting, arm: Arm, seed: int, **changes):
    """Lesson 3's loop for one arm: yields a batch per step and trains `model`. `changes` replace
    arguments of that loop."""
    arguments = {"optimizer": setting.optimizer(model.parameters(), lr=setting.lr), "loss": arm.loss,
                 "steps": setting.steps, "period": arm.period or setting.period, "seed": seed,
                 "prompts": setting.prompts, "max_tokens": setting.max_tokens,
                 "advantage": setting.advantage, "head": setting.head if arm.head else 0,
                 "decay": setting.decay, **changes}
    steps = lesson3.grpo(model, sampler, setting.task, tokenizer, **arguments)
    return tqdm(steps, total=setting.steps, desc=f"{setting.task.name}: {arm.name}, seed {seed}")


# ---------------------------------------------------------------- the measure
FRESH, STALE = "KL, fresh prefixes", "KL, sampler's prefixes"     # whose responses it is taken on


@torch.no_grad()
def kl(reference, model, rollout) -> Tensor:
    """KL(reference || model) at each response position, (B, T) in nats, exact over the vocabulary.
    Both are evaluated by the trainer on the rollout's prefixes."""
    parts = []
    for rows in lesson1.micro_batches(rollout, lesson1.vocabulary(model)):
        p, q = (lesson1.response_logits(m, rollout[rows]).float().log_softmax(-1)
                for m in (reference, model))                                        # (b, T, V)
        # KL(p || q) = sum_v p_v (log p_v - log q_v)
        parts.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(parts)


def reference_run(start, sampler, tokenizer, setting: Setting, **changes) -> dict:
    """{step: (state, rollout)}: the checkpoints of the on-policy run that all runs are compared with."""
    model, reference = copy.deepcopy(start), {}
    arm = replace(ARMS["on-policy"], name="reference")
    for batch in training(model, sampler, tokenizer, setting, arm, REFERENCE_SEED, **changes):
        if batch.step % setting.every == 0:
            state = {name: x.to("cpu", copy=True) for name, x in model.state_dict().items()}
            reference[batch.step] = state, batch.rollout
    return reference


def run(start, sampler, tokenizer, setting: Setting, arm: Arm, seed: int, reference: dict,
        **changes) -> dict:
    """One arm, one seed: its curves, syncs and held-out accuracy. The seconds leave out measuring."""
    model, other, began = copy.deepcopy(start), copy.deepcopy(start), time.perf_counter()
    record = {"arm": arm.name, "seed": seed, "synced at": [], "dropped tokens": 0, "reward": [],
              "ESS of responses": [], "mean ratio": [], "checkpoints": [], FRESH: [], STALE: []}
    for batch in training(model, sampler, tokenizer, setting, arm, seed, **changes):
        paused, rollout = time.perf_counter(), batch.rollout
        record["synced at"] += [batch.step] if batch.age == 0 else []
        record["dropped tokens"] += batch.dropped
        record["reward"].append(batch.R.mean().item())
        record["ESS of responses"].append(lag_ess(batch.lag, rollout.mask))
        record["mean ratio"].append(mean_ratio(batch.lag, rollout.mask))
        if batch.step in reference:
            state, fresh = reference[batch.step]
            other.load_state_dict(state)
            record["checkpoints"].append(batch.step)
            for prefixes, responses in ((FRESH, fresh), (STALE, rollout)):
                values = kl(other, model, responses)[responses.mask]
                record[prefixes].append(values.double().mean().item())
        began += time.perf_counter() - paused
    record["seconds"] = time.perf_counter() - began
    return record | lesson3.held_out(model, sampler, setting.task, tokenizer, 8 * setting.prompts,
                                     setting.max_tokens)


def mean_kl(record: dict, prefixes: str = FRESH) -> float:
    """Mean over the checkpoints; a missing value does not count."""
    return float(np.nanmean(np.array(record[prefixes], float)))


def floor(records: list[dict], prefixes: str = FRESH) -> float:
    """KL between two on-policy runs: mean over the on-policy seeds, against the reference."""
    return float(np.mean([mean_kl(r, prefixes) for r in records if r["arm"] == "on-policy"]))


def over_floor(records: list[dict]) -> list[dict]:
    """The table of the arms, one row per record. With a floor of 0 there are no ratios: None."""
    rows, floors = [], {prefixes: floor(records, prefixes) for prefixes in (FRESH, STALE)}
    for r in records:
        ratios = {prefixes: mean_kl(r, prefixes) / floors[prefixes] if floors[prefixes] else None
                  for prefixes in floors}
        rows.append({"arm": r["arm"], "accuracy": r["sampled"], "KL / floor": ratios[FRESH],
                     "on the sampler's prefixes": ratios[STALE], "syncs": len(r["synced at"]),
                     "dropped tokens": r["dropped tokens"], "seconds": r["seconds"]})
    return rows


# ---------------------------------------------------------------- main
def closing(rows: list[dict], steps: int) -> str:
    """The table of the arms read aloud."""
    kl = {row["arm"]: row["KL / floor"] for row in rows}
    syncs = next(row["syncs"] for row in rows if row["arm"] == "dlc")
    if kl["dlc"] is None:
        return "The two on-policy runs do not differ: there is no floor to compare with."
    within = "within" if kl["dlc"] <= 2 else "not within"
    return (f"KL from on-policy training, in floors: none {kl['none']:.1f}, TIS {kl['tis']:.1f}, DLC "
            f"{kl['dlc']:.1f} with {syncs} syncs in {steps} steps. DLC is {within} twice the floor. "
            "One seed.")


def main(argv=None) -> dict:
    args, trainer, tokenizer = lesson1.arguments(__file__, __doc__, argv)
    setting = SIZES[lesson1.scale(tokenizer)]
    if args.quick:
        setting = replace(setting, steps=6, prompts=min(8, setting.prompts), period=6)
    # a released model's weights are bf16 numbers, and a bf16 engine would miss most small updates
    sampler = lesson1.Sampler(args.path, "bfloat16" if lesson1.is_tiny(tokenizer) else "float32")
    tail = tail_model(trainer, sampler, tokenizer, setting, args.seed)
    reference = reference_run(trainer, sampler, tokenizer, setting)
    runs = [run(trainer, sampler, tokenizer, setting, arm, args.seed, reference)
            for arm in ARMS.values()]
    result = {"seed": args.seed, "steps": setting.steps, "period": setting.period, "laws": laws(),
              "tail": tail, "arms": over_floor(runs), "runs": runs}
    result = lesson1.save(result, args.json)
    lesson1.table("predicted | measured", result["laws"])
    lesson1.table("the center from the sampler's K most likely tokens: its gradient's error",
                  result["tail"])
    lesson1.table(f"{setting.steps} steps; synced every step on-policy, else every {setting.period}, "
                  f"under DLC also where the ESS is below {RESYNC_ESS}", result["arms"])
    print(f"\n{closing(result['arms'], setting.steps)}")
    return result


if __name__ == "__main__":
    main()
