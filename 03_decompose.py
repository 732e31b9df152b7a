"""Lesson 3: which part of each token's error is the engine's, which the stale weights'?

Evaluate the trainer at theta_s, the weights that the SAMPLER holds. Then the error of every sampled
token splits exactly:

    log pi_theta - log mu  =  (log pi_theta_s - log mu)  +  (log pi_theta - log pi_theta_s)
                           =    discrepancy d: numerics  +       lag l: stale weights

The two behave differently, and from that the paper that this project teaches derives its correction
("On the Origin and Evolution of Training-Inference Mismatch in LLM Reinforcement Learning", Li,
Zhou, Lan 2026; we could read its abstract only). This lesson follows both through training with a
stale sampler. Then it measures a bias that they leave in the gradient:

    drift   D = E_mu[A sum_v q_v s_v],   q = mu(. | prefix),   s_v = grad log pi(v | prefix)

sum_v q_v s_v is 0 if q = pi, and -grad KL(q || pi) otherwise (score centering, arXiv 2609.20807). So
the drift pulls the policy towards the engine's distribution where the mean advantage of a prefix is
above 0, and away from it where that is below 0.

  python 03_decompose.py                           a CPU: 2 minutes, with two tiny policies
  python 03_decompose.py --model Qwen/Qwen3-0.6B   a CUDA GPU: the stale run only; not run yet
  python figures/study.py 03                       the feedback loop, five paired seeds: 5 minutes

Expect a lag of exactly 0 at each sync, and of tens of times the discrepancy one step later. Expect a
drift that keeps its direction as long as the engine makes it, and loses it if the lag does. Expect
next to no drift at the natural discrepancy, and little of it with group-mean advantages.

Exercises: tests/EXERCISES.md.
"""
import copy
import itertools
from dataclasses import dataclass
from importlib import import_module

import numpy as np

lesson1 = import_module("01_mismatch")   # before torch: it hides the broken packages around it
lesson2 = import_module("02_importance_sampling")
import torch
from torch import Tensor
from tqdm import tqdm

STEPS, PERIOD = 40, 10               # of the stale run; steps between its syncs
NOISES = (0.01, 0.02, 0.05, 0.1)     # relative size of the parameter noise in the engine
SIZES = {   # of the stale run: prompts per step, longest response (None: the task's), learning rate
    "tiny": (32, None, 1.5e-3), "cpu": (4, 64, 1e-6), "gpu": (8, 256, 1e-6)}


# ---------------------------------------------------------------- the split
def split(logp: Tensor, logp_old: Tensor, logp_sampler: Tensor) -> tuple[Tensor, Tensor]:
    """(discrepancy, lag) in nats, both of the shape of the three log-probs."""
    # log pi - log mu = (log pi_old - log mu) + (log pi - log pi_old)
    return logp_old - logp_sampler, logp - logp_old


# ---------------------------------------------------------------- the drift
def flat_gradient(model, value: Tensor) -> Tensor:
    """Gradient of `value` in all parameters, as one float64 vector."""
    gradients = torch.autograd.grad(value, list(model.parameters()))
    return torch.cat([g.flatten() for g in gradients]).double()


def policy_gradient(model, rollout, A: Tensor) -> Tensor:
    """E[A s] as a parameter gradient, a mean over response tokens. A (B,)."""
    logp = lesson1.logprobs(model, rollout, grad=True)                           # (B, T)
    # A s = grad of A log pi(token)
    return flat_gradient(model, (A[:, None] * logp).sum() / rollout.mask.sum())


def drift(model, rollout, A: Tensor) -> Tensor:
    """D = E[A sum_v q_v s_v], likewise. q is the recorded head, which must be the vocabulary."""
    _, head_logp = lesson1.logprobs(model, rollout, head=True, grad=True)        # (B, T, V)
    # sum_v q_v s_v = grad of sum_v sg(q_v) log pi_v; where top-k cut mu, q_v = exp(-inf) = 0
    expected = (rollout.head_logp.exp() * head_logp).sum(-1)                     # (B, T)
    expected = torch.where(rollout.mask, expected, 0.0)
    return flat_gradient(model, (A[:, None] * expected).sum() / rollout.mask.sum())


def in_halves(f, model, rollout, A: Tensor) -> tuple[Tensor, Tensor]:
    """f on each half of the prompts: two independent estimates of one mean. The norm of a single
    estimate is mostly noise. A product across the halves is not, as no noise meets itself."""
    half = len(rollout) // 2
    return f(model, rollout[:half], A[:half]), f(model, rollout[half:], A[half:])


def cross(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """Inner product of two means, from two independent estimates of each. Unbiased."""
    return ((a[0] @ b[1] + a[1] @ b[0]) / 2).item()


def norm2(a: tuple[Tensor, Tensor]) -> float:
    """Squared norm of a mean, likewise. Where there is nothing it can fall below 0."""
    return (a[0] @ a[1]).item()


def root(x: float) -> float:
    """sqrt(x), or NaN for a squared norm that is not above 0: it drowns in noise."""
    return x**0.5 if x > 0 else float("nan")


def cosine(pairs: list) -> float:
    """Cosine of two means, over one or more pairs of them. It is a ratio of averages, since a single
    cosine divides by norms that noise can push below 0. It can exceed 1."""
    product = np.mean([cross(a, b) for a, b in pairs])
    first, second = (np.mean([norm2(pair[i]) for pair in pairs]) for i in (0, 1))
    return float(product / (root(first) * root(second)))


# ---------------------------------------------------------------- GRPO with a stale sampler
@dataclass
class Batch:
    """One step's batch, before the update. B responses, T positions, K recorded tokens."""
    step: int
    age: int                   # steps since the last sync
    rollout: "lesson1.Rollout"
    R: Tensor                  # (B,) rewards
    advantage: Tensor          # (B,)
    logp: Tensor               # (B, T) log pi at theta, with its graph
    logp_old: Tensor           # (B, T) log pi at theta_s, the sampler's weights
    head_logp: Tensor          # (B, T, K) log pi of the recorded head at theta, with its graph
    head_logp_old: Tensor      # (B, T, K) the same at theta_s
    vocabulary: int            # V; K = V: the head is everything
    dropped: int = 0           # tokens of the refused batch that this one replaces

    @property
    def discrepancy(self) -> Tensor:
        return split(self.logp.detach(), self.logp_old, self.rollout.logp_sampler)[0]

    @property
    def lag(self) -> Tensor:
        return split(self.logp.detach(), self.logp_old, self.rollout.logp_sampler)[1]

    @property
    def lag_of_responses(self) -> Tensor:
        """(B,) a response's log-weight, sum_t l_t."""
        return lesson2.sequence_sum(self.lag, self.rollout.mask)[:, 0]


def grpo(trainer, sampler, task, tokenizer, optimizer, loss, steps: int, period: int, seed: int,
         prompts: int = 32, group_size: int = 8, max_tokens: int | None = None,
         advantage: str = "std", head: int = 0, perturb=None, decay: bool = True,
         logprobs=lambda model, rollout, old, grad: lesson1.logprobs(model, rollout, True, grad)):
    """The loop of train.py as a generator: yields each step's Batch, then updates on loss(batch).

    The sampler is synced once its weights are `period` steps old, through `perturb` (state -> state)
    if it is to hold others. A loss of None refuses the batch: the sampler is synced, and the prompts
    are sampled once more. logprobs(model, rollout, old, grad) evaluates `model`, which is either the
    trainer or `old`, the trainer at theta_s. Raises ValueError or RuntimeError with the step."""
    old, synced = copy.deepcopy(trainer), 0            # theta_s, and the step at which it was theta
    V, lr = lesson1.vocabulary(trainer), optimizer.param_groups[0]["lr"]
    for step in range(steps):
        dropped = 0
        for attempt in (1, 2):            # the second one only where `loss` refuses the first batch
            # 1. sync: theta_s <- theta
            if step == 0 or step - synced == period or attempt == 2:
                old.load_state_dict(trainer.state_dict())
                sampler.sync(trainer, perturb(trainer.state_dict()) if perturb else None)
                synced = step

            # 2. sample: y ~ mu at theta_s. All randomness comes from the seed, step and attempt
            digits, questions = lesson1.make_prompts(
                task, tokenizer, prompts, np.random.default_rng([seed, step]))
            rollout = sampler.sample(questions, max_tokens or task.max_tokens,
                                     seed=[seed, step, attempt], group_size=group_size, head=head)
            if not rollout.neutral or rollout.version != sampler.version:
                raise ValueError(f"step {step}: not sampled from mu at the sampler's weights")
            if missing := int((rollout.mask & ~rollout.logp_sampler.isfinite()).sum()):
                raise RuntimeError(f"step {step}: {missing} sampled tokens have no finite log mu")

            # 3. log-probs: log pi - log mu = d + l. Both in the same micro-batches: another shape
            # would round elsewhere, and its rounding would count as lag
            logp, head_logp = logprobs(trainer, rollout, old, grad=True)
            logp_old, head_logp_old = logprobs(old, rollout, old, grad=False)

            # 4. judge and 5. weigh: L = -sum A (w log pi - c) / N, or None
            R = lesson1.rewards(task, digits.repeat(group_size, 0), rollout, tokenizer)
            A = lesson2.advantages(R, group_size, advantage).to(lesson1.DEVICE)
            batch = Batch(step, step - synced, rollout, R, A, logp, logp_old,
                          head_logp, head_logp_old, V, dropped)
            value = loss(batch)
            if value is not None:
                break
            dropped = int(rollout.mask.sum())
        else:
            raise RuntimeError(f"step {step}: the loss refuses a batch that has no lag")
        yield batch

        # 6. update
        value.backward()
        torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps) if decay else lr      # falls linearly to 0
        optimizer.step()
        optimizer.zero_grad()


def weighted(correct):
    """The loss of a batch under a weight of lesson 2."""
    def loss(batch: Batch) -> Tensor:
        r = batch.rollout
        w = correct(batch.logp, batch.logp_old, r.logp_sampler, batch.advantage, r.mask)
        return lesson2.policy_loss(batch.logp, w, batch.advantage, r.mask, int(r.mask.sum()))
    return loss


def held_out(model, sampler, task, tokenizer, n: int, max_tokens: int | None = None) -> dict:
    """Mean reward of `model` on n prompts that no run trains on. Syncs the sampler to it."""
    rng, result = np.random.default_rng([2**40, 7]), {}                 # no run's [seed, step]
    digits, prompts = lesson1.make_prompts(task, tokenizer, n, rng)
    sampler.sync(model)
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        rollout = sampler.sample(prompts, max_tokens or task.max_tokens, 0, temperature=temperature)
        result[name] = lesson1.rewards(task, digits, rollout, tokenizer).mean().item()
    return result


# ---------------------------------------------------------------- both parts through training
def measure(batch: Batch) -> dict:
    """What a step's batch says about both parts, in nats."""
    mask = batch.rollout.mask
    logp, logp_old, logp_sampler = (x.detach()[mask].double() for x in (
        batch.logp, batch.logp_old, batch.rollout.logp_sampler))
    d, l = split(logp, logp_old, logp_sampler)
    l_response = batch.lag_of_responses.double()
    return {"step": batch.step, "age": batch.age, "reward": batch.R.mean().item(),
            "identity": ((logp - logp_sampler) - (d + l)).abs().max().item(),
            "rms d": d.square().mean().sqrt().item(), "mean d": d.mean().item(),
            # |d| over 1 - p: the discrepancy on the log-odds, see lesson 1
            "d on log-odds": (d.abs().mean() / (1 - logp_sampler.exp()).mean()).item(),
            "rms l": l.square().mean().sqrt().item(), "mean l": l.mean().item(),
            "mean r (1)": lesson2.ratio(l).mean().item(),
            # if log r is normal, ESS(r) = exp(-Var log r)
            "exp(-Var l)": (-l.var()).exp().item(), "ESS of tokens": lesson2.ess(l),
            "exp(-Var sum l)": (-l_response.var()).exp().item(),
            "ESS of responses": lesson2.ess(l_response)}


def slope(values) -> tuple[float, float]:
    """Least-squares slope of the values per step, and its standard error."""
    (a, _), covariance = np.polyfit(np.arange(len(values)), values, 1, cov=True)
    return float(a), float(covariance[0, 0]**0.5)


def misfit(rows: list[dict], power: float) -> float:
    """Misfit of rms l = a age^power between two syncs, as a share of the lag's mean."""
    t, y = (np.array([row[key] for row in rows], float) for key in ("age", "rms l"))
    x = t**power
    # least squares: a = sum x y / sum x^2
    a = x @ y / (x @ x)
    return float(np.mean((y - a * x)**2)**0.5 / y[1:].mean())


def laws(rows: list[dict]) -> list[dict]:
    """Predicted | measured over the stale run. NaN where there is nothing to divide by."""
    next_step = [np.divide(row["rms l"], row["rms d"]) for row in rows if row["age"] == 1]
    result = [
        ("log pi - log mu = d + l: largest difference, nats", 0, max(r["identity"] for r in rows)),
        ("rms l at a sync: largest, nats", 0, max(r["rms l"] for r in rows if r["age"] == 0)),
        ("rms l over rms d, one step after a sync", "> 1", float(np.mean(next_step)))]
    for key in ("rms d", "d on log-odds"):
        values = [row[key] for row in rows]
        a, error = 100 * len(rows) / np.mean(values) * np.array(slope(values))
        result.append((f"{key}: change over the run, % of its mean", 0, float(a), float(error)))
    stretches = [rows[k:k + PERIOD] for k in range(0, len(rows), PERIOD)]
    for name, power in (("t", 1), ("sqrt(t)", 0.5)):
        misfits = [misfit(stretch, power) for stretch in stretches]
        result.append((f"rms l grows like {name} between syncs: misfits", "-", misfits))
    return [dict(zip(("law", "predicted", "measured", "±"), row)) for row in result]


# ---------------------------------------------------------------- other parameters for the engine
def parameter_noise(size: float, seed: int, fresh: bool = False):
    """state -> state x (1 + size eps), eps standard normal: the same at each call, or a `fresh` one."""
    seeds = itertools.count(seed, 1000 if fresh else 0)

    def perturb(state: dict) -> dict:
        rng, noisy = torch.Generator().manual_seed(next(seeds)), {}
        for value in state.values():
            if value.data_ptr() not in noisy:          # a tied matrix has two names, and one noise
                eps = torch.randn(value.shape, generator=rng).to(value.device)
                noisy[value.data_ptr()] = value * (1 + size * eps)
        return {name: noisy[value.data_ptr()] for name, value in state.items()}
    return perturb


def fake_quantized(bits: int):
    """state -> state with its projections rounded to `bits` bits: symmetric, one scale per row."""
    def perturb(state: dict) -> dict:
        result = dict(state)
        for name in [name for name in state if name.endswith("_proj.weight")]:
            scale = state[name].abs().amax(1, keepdim=True) / (2**(bits - 1) - 1)
            result[name] = (state[name] / scale).round() * scale
        return result
    return perturb


# ---------------------------------------------------------------- the drift on free tokens
def four_triples(shown: np.ndarray, digits: np.ndarray, rng, step: int) -> np.ndarray:
    """Token ids (n, 13): four times (letter letter digit), and the end. The letters are a habit that
    depends on the prompt's digit, on the letter before and on the place."""
    rank = rng.choice(4, size=(*digits.shape, 2), p=[0.4, 0.3, 0.2, 0.1])        # (n, 4, 2)
    first = (rank[..., 0] + digits) % 4
    second = (rank[..., 1] + first + np.arange(digits.shape[1])) % 4
    a = lesson1.CHARACTERS.index("a")
    triples = np.stack([a + first, a + second, shown], -1)                       # (n, 4, 3)
    return np.pad(triples.reshape(len(digits), -1), ((0, 0), (0, 1)), constant_values=lesson1.END)


# The reward ignores the letters, like the wording of a chain of thought: a drift can move them.
FREE = lesson1.Task(
    "free", length=4, max_tokens=13, steps=280, slip=0.28, answer=lambda digits: (digits + 3) % 10,
    grade=lambda given, right, ended: float(ended and given == right), demonstrate=four_triples)


def gradient_bias(trainer, engine, clean, tokenizer, seed: int, quick: bool) -> list[dict]:
    """The free-tokens policy at its own weights. |D| / |S| is the drift over the on-policy gradient.
    cos(G, S) compares the gradient from mu's samples with the on-policy one, which comes from the
    clean engine; how far that engine's own other samples are from 1 shows the noise."""
    n, group_size = 32 if quick else 128, 8
    digits, prompts = lesson1.make_prompts(FREE, tokenizer, n, np.random.default_rng(seed))
    arms = [("on-policy", clean, 0, None, -1),         # name, engine, sampling seed, perturb, top-k
            ("clean fp32 engine, other samples", clean, 1, None, -1),
            ("natural bf16", engine, 2, None, -1)]
    arms += [(f"parameter noise {x:.0%}", engine, 2, parameter_noise(x, seed), -1) for x in NOISES]
    arms += [(f"int{bits} weights", engine, 2, fake_quantized(bits), -1) for bits in (8, 4)]
    arms += [("top-k 3", engine, 2, None, 3)]
    S, rows = {}, []
    for name, sampler, k, perturb, top_k in tqdm(arms, desc="drift at fixed weights"):
        sampler.sync(trainer, perturb(trainer.state_dict()) if perturb else None)
        rollout = sampler.sample(prompts, FREE.max_tokens, seed=[seed, k], group_size=group_size,
                                 head=-1, top_k=top_k)
        R = lesson1.rewards(FREE, digits.repeat(group_size, 0), rollout, tokenizer)
        mask, logp = rollout.mask, lesson1.logprobs(trainer, rollout)
        size = lesson1.gap(logp[mask], rollout.logp_sampler[mask])
        for kind in ("raw", "mean"):
            A = lesson2.advantages(R, group_size, kind).to(lesson1.DEVICE)
            G = in_halves(policy_gradient, trainer, rollout, A)
            if name == "on-policy":
                S[kind] = G
                continue
            D = in_halves(drift, trainer, rollout, A)
            rows.append({
                "loaded into the engine": name, "mean |d|": size["mean |d|"], "k3": size["k3"],
                "advantage": kind, "|D| / |S|": root(norm2(D)) / root(norm2(S[kind])),
                "cos(D, S)": cosine([(D, S[kind])]), "cos(G, S)": cosine([(G, S[kind])])})
    return rows


def drift_directions(trainer, engine, tokenizer, seed: int, steps: int, period: int, perturb):
    """Trains on the free tokens (raw rewards, SGD): {steps apart: cosine of the drift with itself},
    over all pairs of steps, also across syncs. The steps at a sync have no lag: if only some steps
    are synced, these are left out."""
    trainer, drifts, result = copy.deepcopy(trainer), {}, {}
    run = grpo(trainer, engine, FREE, tokenizer, torch.optim.SGD(trainer.parameters(), lr=0.04),
               weighted(lesson2.CORRECTIONS["none"]), steps, period, seed, prompts=48,
               advantage="raw", head=-1, perturb=perturb, decay=False)
    for batch in tqdm(run, total=steps, desc="drift in training"):
        if batch.age or period == 1:
            drifts[batch.step] = in_halves(drift, trainer, batch.rollout, batch.advantage)
    for apart in (1, 2, 4, 8, 16):
        pairs = [(drifts[k], drifts[k + apart]) for k in drifts if k + apart in drifts]
        if pairs:
            result[str(apart)] = cosine(pairs)
    return result


def closing(result: dict) -> str:
    """The stale run read aloud."""
    ratio = next(law["measured"] for law in result["laws"] if law["predicted"] == "> 1")
    oldest = max(row["age"] for row in result["run"])
    ess = np.mean([row["ESS of responses"] for row in result["run"] if row["age"] == oldest])
    if not ratio:
        return "One step after a sync the lag is 0: no update has moved the trainer away from `old`."
    return (f"One step after a sync the lag is {ratio:.2g} times the discrepancy. After {oldest} "
            f"steps the ESS of the responses is {ess:.2f}, {'too low' if ess < 0.5 else 'enough'} "
            "to train on.")


def main(argv=None) -> dict:
    args, trainer, tokenizer = lesson1.arguments(__file__, __doc__, argv)
    prompts, max_tokens, lr = SIZES[lesson1.scale(tokenizer)]
    sampler, steps = lesson1.Sampler(args.path), 2 * PERIOD if args.quick else STEPS
    # a constant rate, so that the lag grows by the updates alone
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=lr, weight_decay=0.0)
    run = grpo(trainer, sampler, lesson1.SUM, tokenizer, optimizer,
               weighted(lesson2.CORRECTIONS["tis"]), steps, PERIOD, args.seed,
               prompts=prompts, max_tokens=max_tokens, decay=False)
    rows = [measure(batch) for batch in tqdm(run, total=steps, desc="stale run")]
    result = {"run": rows, "laws": laws(rows)}
    if lesson1.is_tiny(tokenizer):          # other policies do not know the free tokens
        path = lesson1.policy(FREE)
        free, clean = lesson1.load_model(path), lesson1.Sampler(path, dtype="float32")
        result["drift"] = gradient_bias(free, sampler, clean, tokenizer, args.seed, args.quick)
        steps, period = (9, 4) if args.quick else (24, 8)
        arms = {"discrepancy: one parameter noise of 10%": (1, parameter_noise(0.1, args.seed)),
                "control: a new one at each step": (1, parameter_noise(0.1, args.seed, fresh=True)),
                f"lag: synced every {period} steps": (period, None)}
        result["directions"] = [{"drift made by": name, **drift_directions(
            free, sampler, tokenizer, args.seed, steps, *arm)} for name, arm in arms.items()]

    result = lesson1.save(result, args.json)
    lesson1.table("a stale run, every second step", result["run"][::2])
    lesson1.table("predicted | measured", result["laws"], "law", "predicted", "measured", "±")
    if "drift" in result:
        lesson1.table("the drift at fixed weights", result["drift"])
        lesson1.table("cosine of the drift with itself, steps apart", result["directions"])
    print(f"\n{closing(result)}")
    return result


if __name__ == "__main__":
    main()
