"""Lesson 3: which part of each token's error is the engine's, which the stale weights'? How do they evolve?

Evaluate the trainer at the weights that the SAMPLER holds, and every sampled token's error splits exactly:

    log pi_theta - log mu  =  (log pi_{theta_s} - log mu)  +  (log pi_theta - log pi_{theta_s})
                           =   discrepancy d: numerics     +   lag l: stale weights

The two behave differently, and the paper that this project teaches derives its correction from how
("On the Origin and Evolution of Training-Inference Mismatch in LLM Reinforcement Learning", Li, Zhou,
Lan 2026; we could read its abstract only). This lesson follows both through training with a stale sampler, and
measures what each leaves in the gradient:

    drift   D = E_mu[ A sum_v q_v s_v ],   q = mu(. | prefix),  s_v = grad log pi(v | prefix)

sum_v q_v s_v is 0 for q = pi, and -grad KL(q || pi) otherwise (score centering, arXiv 2609.20807): where the mean
advantage of a prefix is above 0, training pulls the policy towards the engine's distribution, below 0 away from it.

Run it:  python 03_decompose.py            a CPU, under 2 min once the two policies exist
         python 03_decompose.py --study    the feedback loop as well: five paired seeds at two rates, 5 min, resumable
         --model Qwen/Qwen3-0.6B           a CUDA GPU (points 1 and 2; not run yet)
Expect:  the identity to 1e-15; lag 0 at each sync and growing with the age, above the discrepancy after one
         step; ESS near exp(-Var lag) only while the lag is small; a drift that points the same way step after
         step if the engine makes it, and slowly loses its direction if the lag does; next to no drift at the
         natural discrepancy, or with group-mean advantages. figures/03_decompose.json and .png.

Exercises (tests/test_03_decompose.py grades the functions):
 1. Write `split` (two lines) and break it: score the anchor with the trainer's current weights. Which of the two
    parts is then 0 for ever? test_split.
 2. Write `cross` and `norm2`: why does the norm of one gradient estimate overstate the norm of its mean, and the
    product of two independent halves not? 2 lines each; test_cross_halves.
 3. In `gradient_bias`, load weights that are all 1 % too large into the engine (1 line): is the drift that of
    1 % noise? Predict first: what does a factor on all logits do to q?
 4. Change `PERIOD` to 2 and to 40. Which of the two parts notices?
 5. Reach a number: an ESS of responses above 0.5 at the last age before a sync, by the learning rate alone. What does
    it cost?
 6. Find the bug: `python tests/exercises.py --bug 03 --seed 1`, then --seed 2, 3 (see the README).
"""
import copy
import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

lesson1 = import_module("01_mismatch")   # before torch: it hides the broken packages around it
lesson2 = import_module("02_importance_sampling")
import torch
import transformers
from torch import Tensor
from tqdm import tqdm

PERIOD = 10        # P: steps between syncs (staleness 9)
STEPS = 40
NOISES = (0.01, 0.02, 0.05, 0.1)   # relative weight noise loaded into the engine


# ---------------------------------------------------------------- the split
def split(logp: Tensor, logp_old: Tensor, logp_sampler: Tensor) -> tuple[Tensor, Tensor]:
    """(discrepancy, lag), nats. Their sum is log pi - log mu whatever the three are."""
    return logp_old - logp_sampler, logp - logp_old


# ---------------------------------------------------------------- a GRPO loop of a few lines
@dataclass
class Batch:
    """One step's batch, before the update."""
    step: int
    age: int                       # steps since the last sync
    rollout: "lesson1.Rollout"
    R: Tensor                      # (B,)
    advantage: Tensor              # (B,)
    logp: Tensor                   # (B, T) log pi at theta, with its graph
    logp_old: Tensor               # (B, T) log pi at theta_s, the sampler's weights
    head_logp: Tensor              # (B, T, K) log pi of the recorded head at theta, with its graph
    head_logp_old: Tensor          # (B, T, K) the same at theta_s
    vocabulary: int                # V; K = V: the head is everything
    dropped: int = 0               # tokens of the batch that this one replaces, see `grpo`

    @property
    def discrepancy(self) -> Tensor:
        return split(self.logp.detach(), self.logp_old, self.rollout.logp_sampler)[0]

    @property
    def lag(self) -> Tensor:
        return split(self.logp.detach(), self.logp_old, self.rollout.logp_sampler)[1]


def weighted(correct):
    """The loss of a batch under a weight of lesson 2."""
    def loss(batch: Batch) -> Tensor:
        r = batch.rollout
        w = correct(batch.logp, batch.logp_old, r.logp_sampler, batch.advantage, r.mask)
        return lesson2.policy_loss(batch.logp, w, batch.advantage, r.mask, int(r.mask.sum()))
    return loss


def grpo(trainer, sampler, task, tokenizer, optimizer, loss, steps: int, period: int, seed: int, prompts: int = 32,
         group_size: int = 8, max_tokens: int | None = None, advantage: str = "std", head: int = 0, perturb=None, decay: bool = True,
         score=lambda model, rollout, old, grad: lesson1.score(model, rollout, head=True, grad=grad)):
    """Yields each step's Batch, then updates `trainer` on it. The sampler takes the trainer's weights when they are `period`
    steps old, through `perturb` (state dict -> state dict) if the engine is to hold others. A loss that returns None refuses
    its batch: the sampler is synced, the batch dropped and sampled again, once. score(model, rollout, old, grad): log-probs of
    the tokens and of the head under `model`, which is the trainer, or `old`, the trainer at the sampler's weights."""
    old, synced = copy.deepcopy(trainer), 0                        # theta_s, and the step at which it was theta
    vocabulary = trainer.config.get_text_config().vocab_size
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / steps if decay else 1.0)

    def sync():
        sampler.sync(trainer, perturb(trainer.state_dict()) if perturb else None)
        old.load_state_dict(trainer.state_dict())                  # copies: the anchor stays where the sampler is

    def draw_batch(attempt: int) -> Batch:
        """This step's prompts with other responses at each attempt, scored with both weights."""
        digits, questions = lesson1.make_prompts(task, tokenizer, prompts, np.random.default_rng([seed, step]))
        rollout = sampler.sample(questions, max_tokens or task.max_tokens, seed=[seed, step, attempt], group_size=group_size, head=head)
        R = lesson1.rewards(task, digits.repeat(group_size, 0), rollout, tokenizer)
        A = lesson2.advantages(R, group_size, advantage).to(lesson1.DEVICE)
        logp, head_logp = score(trainer, rollout, old, grad=True)
        logp_old, head_logp_old = score(old, rollout, old, grad=False)         # in the same micro-batches: another shape rounds elsewhere, and would count as lag
        return Batch(step, step - synced, rollout, R, A, logp, logp_old, head_logp, head_logp_old, vocabulary)

    for step in range(steps):
        if step == 0 or step - synced == period:
            sync()
            synced = step
        batch = draw_batch(attempt=1)
        value = loss(batch)
        if value is None:
            sync()
            synced, refused = step, batch
            batch = draw_batch(attempt=2)
            batch.dropped = int(refused.rollout.mask.sum())
            value = loss(batch)
        yield batch
        value.backward()
        torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


# ---------------------------------------------------------------- experiment 1: both parts through training
def sequence_lag(batch: Batch) -> Tensor:
    """(B,) the response's log-weight, sum_t l_t."""
    return lesson2.sequence_sum(batch.lag, batch.rollout.mask)[:, 0]


def measure(batch: Batch) -> dict:
    """What a step's batch says about both parts."""
    mask = batch.rollout.mask
    logp, logp_old, logp_sampler = (x[mask].double() for x in (batch.logp.detach(), batch.logp_old, batch.rollout.logp_sampler))
    d, l = split(logp, logp_old, logp_sampler)
    sequence = sequence_lag(batch).double()
    return {"step": batch.step, "age": batch.age, "reward": batch.R.mean().item(),
            "identity": ((logp - logp_sampler) - (d + l)).abs().max().item(),
            "d_rms": d.square().mean().sqrt().item(), "d_mean": d.mean().item(),
            "l_rms": l.square().mean().sqrt().item(), "l_mean": l.mean().item(),
            # |d| over 1 - p: the discrepancy on the log-odds, see lesson 1
            "d_odds": (d.abs().mean() / (1 - logp_sampler.exp()).mean()).item(),
            "mean_weight": lesson2.ratio(l).mean().item(), "ess_token": lesson2.ess(l), "ess_sequence": lesson2.ess(sequence),
            "ess_token_predicted": (-l.var()).exp().item(), "ess_sequence_predicted": (-sequence.var()).exp().item()}


def growth(rows: list[dict]) -> list[dict]:
    """For each stretch between syncs, least-squares fits a t and a sqrt(t) to the lag's rms at age t."""
    fits = []
    for start in range(0, len(rows), PERIOD):
        t, rms = (np.array([row[key] for row in rows[start:start + PERIOD]], float) for key in ("age", "l_rms"))
        fit = {"from step": start}
        for name, shape in (("t", t), ("sqrt(t)", t**0.5)):
            a = shape @ rms / (shape @ shape)
            fit[name] = float(np.mean((rms - a * shape)**2)**0.5 / rms[1:].mean())     # misfit, share of the mean
        fits.append(fit)
    return fits


def lag_over_discrepancy(rows: list[dict]) -> float:
    """rms lag over rms discrepancy one step after a sync, mean over the syncs."""
    return float(np.mean([row["l_rms"] / row["d_rms"] for row in rows if row["age"] == 1]))


def slope(values) -> tuple[float, float]:
    """Least-squares slope per step and its standard error."""
    x = np.arange(len(values))
    (a, _), covariance = np.polyfit(x, values, 1, cov=True)
    return float(a), float(covariance[0, 0]**0.5)


def follow(trainer, sampler, tokenizer, seed: int, steps: int, max_tokens: int, lr: float, prompts: int) -> dict:
    """One stale run under TIS: every step's measurement, growth and slopes."""
    trainer = copy.deepcopy(trainer)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=lr, weight_decay=0.0)
    run = grpo(trainer, sampler, lesson1.TASKS["sum"], tokenizer, optimizer, weighted(lesson2.CORRECTIONS["tis"]), steps, PERIOD, seed,
               prompts=prompts, max_tokens=max_tokens, decay=False)             # a constant rate: the lag's growth is the updates' doing
    rows = [measure(batch) for batch in tqdm(run, total=steps, desc="stale run")]
    return {"rows": rows, "growth": growth(rows), "d_rms_slope": slope([r["d_rms"] for r in rows]), "d_odds_slope": slope([r["d_odds"] for r in rows])}


# ---------------------------------------------------------------- what can be loaded into the engine
def weight_noise(size: float, seed: int, fresh: bool = False):
    """state -> state x (1 + size eps), eps normal, drawn in float32 matrix by matrix: the same at every call, or
    with `fresh` another at each call."""
    calls = 0

    def perturb(state: dict) -> dict:
        nonlocal calls
        rng, loaded, result = torch.Generator().manual_seed(seed + 1000 * calls * fresh), {}, {}
        calls += 1
        for name, value in state.items():
            if value.data_ptr() not in loaded:                     # a tied matrix has two names, and one noise
                loaded[value.data_ptr()] = value * (1 + size * torch.randn(value.shape, generator=rng).to(value.device))
            result[name] = loaded[value.data_ptr()]
        return result
    return perturb


def fake_quantised(bits: int):
    """state -> state whose projection matrices are rounded to `bits` bits, symmetric, a scale a row."""
    def perturb(state: dict) -> dict:
        top = 2**(bits - 1) - 1
        scale = {n: v.abs().amax(1, keepdim=True) / top for n, v in state.items() if n.endswith("_proj.weight")}
        return {n: (v / scale[n]).round() * scale[n] if n in scale else v for n, v in state.items()}
    return perturb


# ---------------------------------------------------------------- experiment 2: the bias in the gradient
def cross(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """Inner product of two means, each estimated on two independent halves: only products across the halves, so
    that the sampling noise of one half never meets itself."""
    return ((a[0] @ b[1] + a[1] @ b[0]) / 2).item()


def norm2(a: tuple[Tensor, Tensor]) -> float:
    """Squared norm of a mean from two independent halves. Unbiased; can come out below 0 where there is nothing."""
    return (a[0] @ a[1]).item()


def cosine(a, b) -> float:
    """Cosine of two means from halves; NaN where a norm drowns in noise."""
    size = norm2(a) * norm2(b)
    return cross(a, b) / size**0.5 if norm2(a) > 0 and norm2(b) > 0 else float("nan")


def flat_gradient(model, value: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))]).double()


def policy_gradient(model, rollout, A: Tensor) -> Tensor:
    """E[A s] as a parameter gradient, a mean over response tokens."""
    logp = lesson1.score(model, rollout, grad=True)
    return flat_gradient(model, -lesson2.policy_loss(logp, torch.ones_like(logp), A, rollout.mask, int(rollout.mask.sum())))


def drift(model, rollout, A: Tensor) -> Tensor:
    """E[A sum_v q_v s_v], q being the recorded distribution of the sampler (head = the whole vocabulary)."""
    _, head_logp = lesson1.score(model, rollout, head=True, grad=True)
    # sum_v sg(q_v) log pi_v; exp(-inf) log pi = 0 where the sampler's support was cut
    expected = (rollout.head_logp.exp() * head_logp).sum(-1)
    return flat_gradient(model, (A[:, None] * torch.where(rollout.mask, expected, 0.0)).sum() / rollout.mask.sum())


def in_halves(f, model, rollout, A: Tensor) -> tuple[Tensor, Tensor]:
    """f on the first and on the second half of the prompts."""
    half = len(rollout) // 2
    return f(model, rollout[:half], A[:half]), f(model, rollout[half:], A[half:])


def gradient_bias(trainer, engine, clean, tokenizer, seed: int, quick: bool) -> list[dict]:
    """At the free-tokens policy's own weights: the engine with something loaded into it against the clean one.
    |D| / |S|: drift over on-policy gradient; cos(G, S): the gradient from mu's samples against the on-policy one. All
    are ratios of unbiased estimates: cosines can exceed 1, and how far the clean engine's is from 1 tells the noise."""
    task, group_size, n = lesson1.TASKS["free"], 8, 32 if quick else 128
    digits, prompts = lesson1.make_prompts(task, tokenizer, n, np.random.default_rng(seed))
    arms = [("natural bf16", None, -1)] + [(f"weight noise {s:.0%}", weight_noise(s, seed), -1) for s in NOISES] + [
        ("int8 weights", fake_quantised(8), -1), ("int4 weights", fake_quantised(4), -1), ("top-k 3", None, 3)]
    clean.sync(trainer)
    on_policy = clean.sample(prompts, task.max_tokens, seed=[seed, 0], group_size=group_size)

    def advantage(rollout, kind):
        R = lesson1.rewards(task, digits.repeat(group_size, 0), rollout, tokenizer)
        return lesson2.advantages(R, group_size, kind).to(lesson1.DEVICE)

    S = {kind: in_halves(policy_gradient, trainer, on_policy, advantage(on_policy, kind)) for kind in ("raw", "mean")}

    def one_arm(name, rollout) -> list[dict]:
        size = lesson1.gap(lesson1.score(trainer, rollout)[rollout.mask], rollout.logp_sampler[rollout.mask])
        rows = []
        for kind in S:
            A = advantage(rollout, kind)
            D, G = in_halves(drift, trainer, rollout, A), in_halves(policy_gradient, trainer, rollout, A)
            share = norm2(D) / norm2(S[kind])
            rows.append({"arm": name, "abs": size["abs"], "k3": size["k3"], "advantage": kind, "drift": share**0.5 if share > 0 else float("nan"),
                         "drift_against_S": cosine(D, S[kind]), "cosine": cosine(G, S[kind])})
        return rows

    rows = one_arm("clean fp32 engine, other samples", clean.sample(prompts, task.max_tokens, seed=[seed, 1], group_size=group_size, head=-1))
    for name, perturb, top_k in tqdm(arms, desc="drift at fixed weights"):
        engine.sync(trainer, perturb(trainer.state_dict()) if perturb else None)
        rows += one_arm(name, engine.sample(prompts, task.max_tokens, seed=[seed, 2], group_size=group_size, head=-1, top_k=top_k))
    return rows


APART = (1, 2, 4, 8, 16)


def drift_directions(trainer, engine, tokenizer, seed: int, steps: int, period: int, perturb) -> dict:
    """Train on the free tokens (raw rewards, SGD) and compare the drift's direction from step to step: {steps
    apart: cosine}, over all pairs of steps, also across syncs. With period > 1 the steps at a sync are left out:
    there is no lag there."""
    trainer, task = copy.deepcopy(trainer), lesson1.TASKS["free"]
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.04)
    drifts = {}
    for batch in tqdm(grpo(trainer, engine, task, tokenizer, optimizer, weighted(lesson2.CORRECTIONS["none"]), steps, period, seed,
                           prompts=48, advantage="raw", head=-1, perturb=perturb, decay=False), total=steps, desc="drift in training"):
        if batch.age or period == 1:
            drifts[batch.step] = in_halves(drift, trainer, batch.rollout, batch.advantage)
    result = {}
    for apart in APART:
        pairs = [(drifts[k], drifts[k + apart]) for k in drifts if k + apart in drifts]
        if pairs:
            # a ratio of means: single cosines divide by norms that noise can push below zero
            product = np.mean([cross(a, b) for a, b in pairs])
            squares = np.mean([norm2(a) for a, _ in pairs]) * np.mean([norm2(b) for _, b in pairs])
            result[str(apart)] = float(product / squares**0.5) if squares > 0 else float("nan")
    return result


# ---------------------------------------------------------------- experiment 3: the feedback loop (--study)
@torch.no_grad()
def lag_is(logp, logp_old, logp_sampler, advantage, mask):
    """w = r = pi / pi_old, nothing truncated: the importance weight of the lag."""
    return torch.where(mask, lesson2.ratio(logp - logp_old), 0.0)


def feedback(trainer, sampler, own, tokenizer, seed: int, lr: float, steps: int = 24) -> list[dict]:
    """From the same weights and the same samples (the sampler is never synced), train on with w = 1 and with w = r.
    Each step: the lag's rms on the sampler's prefixes and on the run's own (a second engine with its weights)."""
    start, rows, task = trainer, {}, lesson1.TASKS["sum"]
    _, prompts = lesson1.make_prompts(task, tokenizer, 128, np.random.default_rng([seed, 99]))
    for name, weight in (("w = 1", lesson2.CORRECTIONS["none"]), ("w = r", lag_is)):
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        rows[name] = []
        for batch in tqdm(grpo(model, sampler, task, tokenizer, optimizer, weighted(weight), steps, steps, seed, decay=False), total=steps, desc=f"feedback: lr {lr}, seed {seed}, {name}"):
            own.sync(model)
            fresh = own.sample(prompts, task.max_tokens, seed=[seed, batch.step, 2])
            lag_own = (lesson1.score(model, fresh) - lesson1.score(start, fresh))[fresh.mask]
            row = measure(batch)
            rows[name].append({"ess": row["ess_sequence"], "sampler": row["l_rms"], "own": lag_own.square().mean().sqrt().item(), "reward": row["reward"]})
    return [{"step": k, "seed": seed, "lr": lr, **{f"{key} {name}": rows[name][k][key] for name in rows for key in rows[name][k]}} for k in range(steps)]


def feedback_ratios(rows: list[dict]) -> dict:
    """Growth of the lag's rms, w = r over w = 1, from step 1 (the first step is the same under both) until the ESS of w = 1
    falls below 1/2, and from there to the end; NaN where w = 1 did not grow."""
    first = next((row["step"] for row in rows if row["ess w = 1"] < 0.5), len(rows))
    result = {"lr": rows[0]["lr"], "seed": rows[0]["seed"], "first step with ESS < 1/2": first}
    for prefixes in ("sampler", "own"):
        for part, (a, b) in {"before": (1, min(first, len(rows) - 1)), "after": (min(first, len(rows) - 1), len(rows) - 1)}.items():
            grown = {name: rows[b][f"{prefixes} {name}"] - rows[a][f"{prefixes} {name}"] for name in ("w = 1", "w = r")}
            result[f"{prefixes} prefixes, {part}"] = grown["w = r"] / grown["w = 1"] if b > a and grown["w = 1"] > 0 else float("nan")
    return result


def study(trainer, sampler, own, tokenizer, policy_name: str, seeds=range(5), rates=(1.5e-3, 5e-4)) -> list:
    """The feedback loop over paired seeds and two learning rates; a run that runs/03_study holds is not run again."""
    runs = []
    for lr in rates:
        for seed in seeds:
            path = lesson1.ROOT / "runs" / "03_study" / f"{policy_name}-lr{lr}-seed{seed}.json"
            rows = read_json(path)
            if not rows:
                rows = lesson1.save_json(feedback(trainer, sampler, own, tokenizer, seed, lr), path)
            runs.append(rows)
    return runs


def read_json(path: Path):
    """What a JSON file holds; None if it is missing or torn."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


# ---------------------------------------------------------------- table and picture
def report(result: dict) -> None:
    """The tables, predicted beside measured."""
    rows, fits = result["follow"]["rows"], result["follow"]["growth"]
    print(f"\n{'step':>4} {'age':>3} {'reward':>6}  {'rms d':>8} {'mean d':>9} {'d on log-odds':>13}  {'rms l':>8} {'mean l':>9}  mean r (1) | ESS token: exp(-Var) | measured   ESS sequence: exp(-Var) | measured")
    for r in rows[::max(1, len(rows) // 20)]:
        print(f"{r['step']:4d} {r['age']:3d} {r['reward']:6.3f}  {r['d_rms']:8.1e} {r['d_mean']:9.1e} {r['d_odds']:13.1e}  {r['l_rms']:8.1e} {r['l_mean']:9.1e}  {r['mean_weight']:10.3f}"
              f"{r['ess_token_predicted']:23.3f} | {r['ess_token']:.3f}{r['ess_sequence_predicted']:28.3f} | {r['ess_sequence']:.3f}")
    print(f"\n{'':82}predicted |  measured")
    laws = [("log pi - log mu = discrepancy + lag, by definition: largest difference, nats", 0, f"{max(r['identity'] for r in rows):.1e}"),
            ("lag at a sync: largest rms", 0, f"{max(r['l_rms'] for r in rows if r['age'] == 0):.1e}")]
    for name, unit, expected in (("d_rms", "rms discrepancy, nats", "0"), ("d_odds", "discrepancy on the log-odds", "0")):
        mean, (a, error) = np.mean([r[name] for r in rows]), result["follow"][f"{name}_slope"]
        laws.append((f"{unit} (mean {mean:.1e}): change over the run, % of the mean", expected, f"{100 * a * len(rows) / mean:.0f} ± {100 * error * len(rows) / mean:.0f}"))
    for name in ("t", "sqrt(t)"):
        laws.append((f"rms lag as a {name}: misfit, share of the mean, by stretch between syncs", "-", " ".join(f"{fit[name]:.2f}" for fit in fits)))
    for law, predicted, measured in laws:
        print(f"{law:82}{predicted:>9} | {measured:>9}")
    if "drift" in result:
        print(f"\n{'loaded into the engine':34}{'mean |d|':>9}{'k3':>9}   raw: |D|/|S|  cos(D,S)  cos(G,S)   group mean: |D|/|S|  cos(D,S)  cos(G,S)")
        show = lambda x, width, digits: f"{'noise' if x is None else f'{x:.{digits}f}':>{width}}"
        for raw, mean in zip(result["drift"][::2], result["drift"][1::2]):
            print(f"{raw['arm']:34}{raw['abs']:9.1e}{raw['k3']:9.1e}" + "".join(
                show(row["drift"], width, 3) + show(row["drift_against_S"], 10, 2) + show(row["cosine"], 10, 3) for row, width in ((raw, 15), (mean, 22))))
        print("\ncosine of the drift with itself, steps apart:  " + "".join(f"{a:>8}" for a in APART))
        for name, cosines in result["directions"].items():
            print(f"{name:47}" + "".join(show(cosines.get(str(a)), 8, 2) for a in APART))
    if "study" in result:
        keys = ["first step with ESS < 1/2", *(f"{p} prefixes, {part}" for p in ("sampler", "own") for part in ("before", "after"))]
        print("\nfeedback loop: growth of the lag a step, w = r over w = 1 (below 1: the weight damps the loop)\n     lr  seed  " + "  ".join(keys))
        for row in map(feedback_ratios, result["study"]):
            print(f"{row['lr']:7g}  {row['seed']:4d}  " + "  ".join(f"{row[k]:{len(k)}.2f}" for k in keys))


def draw(result: dict, path: Path) -> None:
    """The picture, from the JSON alone."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows = result["follow"]["rows"]
    step = [r["step"] for r in rows]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.4))
    left.semilogy(step, [max(r["l_rms"], 1e-4) for r in rows], "k.-", label="lag (0 at a sync: drawn at 1e-4)")
    left.semilogy(step, [r["d_rms"] for r in rows], "-", color="0.55", linewidth=2, label="discrepancy")
    left.set(xlabel="step", ylabel="rms over the step's tokens (nats)", ylim=(5e-5, 30), title=f"One step after a sync the lag is\n{lag_over_discrepancy(rows):.0f} times the discrepancy")
    left.legend(loc="upper left")
    for level, style, shade in (("token", "s--", "0.55"), ("sequence", "o-", "0")):
        middle.plot(step, [r[f"ess_{level}"] for r in rows], style, color=shade, markersize=4, label=f"ESS of the lag ratio, {level} level")
    middle.axhline(0.5, color="k", linewidth=0.8)
    for r in rows:
        if r["age"] == 0:
            middle.axvline(r["step"], color="k", linestyle=":", linewidth=0.8)
    middle.set(xlabel="step (dotted: sync)", ylabel="share of the samples", ylim=(0, 1.3), title="Whole responses run out of effective\nsamples first")
    middle.legend(fontsize=8, loc="upper left")
    for (name, cosines), style in zip(result.get("directions", {}).items(), ("ko-", "kx:", "k^--")):
        right.plot([int(a) for a in cosines], np.array(list(cosines.values()), float), style, label=name)
    right.axhline(0, color="k", linewidth=0.5)
    right.set(xlabel="steps apart", ylabel="cosine of the drift with itself", ylim=(-0.8, 1.15), title="The engine's drift keeps its direction,\nthe lag's loses it" if result.get("directions") else "Drift: measured on the tiny policy only")
    if result.get("directions"):
        right.legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv=None) -> dict:
    """Runs the lesson and returns what its JSON holds. argv as on the command line."""
    args, path, trainer = lesson1.lesson_arguments("03_decompose.py", __doc__, argv, study="the feedback loop, over five seeds")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tiny = lesson1.is_tiny(tokenizer)
    sampler = lesson1.Sampler(path)
    steps = 2 * PERIOD if args.quick else STEPS
    max_tokens, lr, prompts = (lesson1.TASKS["sum"].max_tokens, 1.5e-3, 32) if tiny else (256, 1e-6, 8)
    result = {"settings": {"seed": args.seed, "period": PERIOD, "quick": args.quick}, "follow": follow(trainer, sampler, tokenizer, args.seed, steps, max_tokens, lr, prompts)}
    if tiny:                                     # the other tasks are posed to the tiny policy only
        free = lesson1.load_model(free_path := lesson1.policy("free"))
        clean = lesson1.Sampler(free_path, dtype="float32")
        result["drift"] = gradient_bias(free, sampler, clean, tokenizer, args.seed, args.quick)
        span, period = (9, 4) if args.quick else (24, 8)
        result["directions"] = {name: drift_directions(free, sampler, tokenizer, args.seed, span, every, perturb) for name, every, perturb in (
            ("discrepancy: one weight noise of 10%, no lag", 1, weight_noise(0.1, args.seed)),
            ("control: new weight noise of 10% every step", 1, weight_noise(0.1, args.seed, fresh=True)),
            (f"lag: natural bf16, synced every {period} steps", period, None))}
        before = read_json(args.out / "03_decompose.json") or {}
        if args.study:
            result["study"] = study(trainer, sampler, clean, tokenizer, Path(path).name)
        elif "study" in before and not args.changed:
            result["study"] = before["study"]                # a plain run does not lose what the study found
    result = lesson1.save_json(result, args.out / "03_decompose.json")
    report(result)
    last = [r for r in result["follow"]["rows"] if r["age"] == PERIOD - 1]
    print(f"\nOne step after a sync the lag is {lag_over_discrepancy(result['follow']['rows']):.1f} times the discrepancy; "
          f"at age {PERIOD - 1} the responses' ESS is {np.mean([r['ess_sequence'] for r in last]):.2f}, the tokens' {np.mean([r['ess_token'] for r in last]):.2f}.")
    draw(result, args.out / "03_decompose.png")
    print(f"picture: {args.out / '03_decompose.png'}")
    return result


if __name__ == "__main__":
    main()
