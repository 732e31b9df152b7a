"""Lesson 3: which part of each token's error is the engine's, which the stale weights'?

Evaluate the trainer at theta_s, the weights of the SAMPLER. Then each token's error splits exactly:

    log pi_theta - log mu  =  (log pi_theta_s - log mu)  +  (log pi_theta - log pi_theta_s)
                           =    discrepancy d: numerics  +       lag l: stale weights

Only at theta_s do both engines hold the same weights, so only there is the gap numerics alone. This
split is the base of the paper that this project follows ("On the Origin and Evolution of Training-
Inference Mismatch in LLM Reinforcement Learning", Li, Zhou, Lan 2026; we read only its abstract).
The lesson trains with a stale sampler and follows both parts. It also measures the part of the
gradient's bias that is the same whichever token is sampled:

    drift   D = E_mu[A b],   b = sum_v q_v s_v,   q = mu(. | prefix), s_v = grad log pi(v | prefix)

If q = pi, b is 0: scores have mean 0 under their own policy. If not, b is the direction from pi
towards q (score centering, arXiv 2609.20807). Where the mean advantage is positive, the drift pulls
the policy towards the engine's distribution.

At last it shows an error that no sync cures: an engine of 16 bits does not see small updates.

  python 03_decompose.py                           a CPU: 3 to 5 minutes, with two tiny policies
  python 03_decompose.py --model Qwen/Qwen3-0.6B   a CUDA GPU: the stale run only; not run yet
  python figures/study.py 03                       does the lag feed on itself? eight seeds: 25 min

Expect a lag of exactly 0 at each sync, and of tens of times the discrepancy one step later. Expect
the drift of a fixed error of the engine, here made large, to keep its direction, and the lag's to
lose it. Expect hardly any drift at the natural discrepancy, or with group-mean advantages.
Exercises: tests/EXERCISES.md.
"""
import copy
import itertools
from dataclasses import dataclass
from importlib import import_module

import numpy as np

lesson1 = import_module("01_mismatch")   # before torch: it sets up torch's environment
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
    parts = torch.autograd.grad(value, list(model.parameters()))
    return torch.cat([part.flatten() for part in parts]).double()


def policy_gradient(model, rollout, A: Tensor) -> Tensor:
    """E[A s] as a parameter gradient, a mean over response tokens. A (B,)."""
    logp = lesson1.logprobs(model, rollout, grad=True)                           # (B, T)
    # A s = grad of A log pi(token)
    return flat_gradient(model, (A[:, None] * logp).sum() / rollout.mask.sum())


def drift(model, rollout, A: Tensor) -> Tensor:
    """D = E[A sum_v q_v s_v], likewise. q is the recorded head: the engine's K most likely tokens,
    here all of them."""
    _, head_logp = lesson1.logprobs(model, rollout, head=True, grad=True)        # (B, T, V)
    # sum_v q_v s_v = grad of sum_v sg(q_v) log pi_v; where top-k cut mu, q_v = exp(-inf) = 0
    expected = lesson2.inside(rollout.mask, (rollout.head_logp.exp() * head_logp).sum(-1))
    return flat_gradient(model, (A[:, None] * expected).sum() / rollout.mask.sum())


def in_halves(f, model, rollout, A: Tensor) -> tuple[Tensor, Tensor]:
    """f on each half of the prompts: two estimates of one mean. The norm of either is mostly noise.
    Their noises are independent, so the expectation of their product is that of the means."""
    half = len(rollout) // 2
    return f(model, rollout[:half], A[:half]), f(model, rollout[half:], A[half:])


def cross(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """Inner product of two means, from two independent estimates of each. Unbiased."""
    return ((a[0] @ b[1] + a[1] @ b[0]) / 2).item()


def norm2(a: tuple[Tensor, Tensor]) -> float:
    """Squared norm of a mean, likewise. Where there is nothing it can fall below 0."""
    return (a[0] @ a[1]).item()


def root(x: float) -> float:
    """sqrt(x), or NaN for a squared norm that noise has pushed to 0 or below."""
    return x**0.5 if x > 0 else float("nan")


def cosine(pairs: list) -> float:
    """Cosine of two means. Products and squared norms are averaged over all pairs, and only then
    divided. It can exceed 1."""
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
    def lag(self) -> Tensor:
        return split(self.logp.detach(), self.logp_old, self.rollout.logp_sampler)[1]

    @property
    def lag_of_responses(self) -> Tensor:
        return lesson2.sequence_sum(self.lag, self.rollout.mask)[:, 0]            # (B,) sum_t l_t


def grpo(trainer, sampler, task, tokenizer, optimizer, loss, steps: int, period: int, seed: int,
         prompts: int = 32, group_size: int = 8, max_tokens: int | None = None,
         advantage: str = "std", head: int = 0, perturb=None, decay: bool = True,
         logprobs=lambda model, rollout, old, grad: lesson1.logprobs(model, rollout, True, grad)):
    """A loop like train.py's: yields each step's Batch, then updates the trainer on loss(batch).
    A sync comes when the sampler's weights are `period` steps old, or when the loss is None: such a
    batch is dropped and sampled once more. perturb(state) changes what the engine is sent.
    logprobs(model, rollout, old, grad) is called with the trainer as the model, then with `old`,
    its copy at theta_s, which lesson 5 needs in both calls.
    ValueError: a rollout is not from mu at theta_s. RuntimeError: a token has no finite log mu."""
    old, synced = copy.deepcopy(trainer), 0            # theta_s, and the step at which it was theta
    V, lr = lesson1.vocabulary(trainer), optimizer.param_groups[0]["lr"]
    for step in range(steps):
        dropped = 0
        for attempt in (1, 2):           # the second one only where the first batch is refused
            # 1. sync: theta_s <- theta
            if step == 0 or step - synced == period or attempt == 2:
                old.load_state_dict(trainer.state_dict())
                sampler.sync(trainer, perturb(trainer.state_dict()) if perturb else None)
                synced, version = step, sampler.version

            # 2. sample: y ~ mu at theta_s. All randomness comes from the seed, step and attempt
            digits, questions = lesson1.make_prompts(
                task, tokenizer, prompts, np.random.default_rng([seed, step]))
            rollout = sampler.sample(questions, max_tokens or task.max_tokens,
                                     seed=[seed, step, attempt], group_size=group_size, head=head)
            if not rollout.neutral or rollout.version != version:
                raise ValueError(f"step {step}: these responses are not from mu at theta_s")
            if missing := int((rollout.mask & ~rollout.logp_sampler.isfinite()).sum()):
                raise RuntimeError(f"step {step}: {missing} sampled tokens have no finite log mu")
            R = lesson1.rewards(task, digits.repeat(group_size, 0), rollout, tokenizer)

            # 3. log-probs: log pi - log mu = d + l. Both in one batch shape: other shapes round
            #    elsewhere, and that would count as lag
            logp, head_logp = logprobs(trainer, rollout, old, grad=True)
            logp_old, head_logp_old = logprobs(old, rollout, old, grad=False)

            # 4. judge and 5. weigh: L = -sum A (w log pi - c) / N, or None; c: lesson 4's center
            A = lesson2.advantages(R, group_size, advantage).to(lesson1.DEVICE)
            batch = Batch(step, step - synced, rollout, R, A, logp, logp_old,
                          head_logp, head_logp_old, V, dropped)
            value = loss(batch)
            if value is not None:
                break
            dropped = int(rollout.mask.sum())
        yield batch

        # 6. update: gradient norm clipped to 1
        value.backward()
        torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
        if decay:
            optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)    # falls linearly to 0
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
    rng = np.random.default_rng([2**40, 7])                             # no run's [seed, step]
    digits, prompts = lesson1.make_prompts(task, tokenizer, n, rng)
    sampler.sync(model)

    def accuracy(temperature: float) -> float:
        rollout = sampler.sample(prompts, max_tokens or task.max_tokens, 0, temperature=temperature)
        return lesson1.rewards(task, digits, rollout, tokenizer).mean().item()
    return {"sampled": accuracy(1.0), "greedy": accuracy(0.0)}


# ---------------------------------------------------------------- both parts through training
def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def measure(batch: Batch) -> dict:
    """What a step's batch says about both parts, in nats."""
    r, l_response = batch.rollout, batch.lag_of_responses.double()
    logp, logp_old, logp_sampler = (x.detach()[r.mask].double() for x in (
        batch.logp, batch.logp_old, r.logp_sampler))
    d, l = split(logp, logp_old, logp_sampler)                                   # (n,)
    return {"step": batch.step, "age": batch.age, "reward": batch.R.mean().item(),
            "identity": ((logp - logp_sampler) - (d + l)).abs().max().item(),
            "rms d": rms(d), "mean d": d.mean().item(),
            # |d| over 1 - p: the discrepancy on the log-odds, see lesson 1
            "d on log-odds": (d.abs().mean() / (1 - logp_sampler.exp()).mean()).item(),
            "rms l": rms(l), "mean l": l.mean().item(),
            "mean r (1)": lesson2.ratio(l).mean().item(),
            # if log r is normal, ESS(r) = exp(-Var log r)
            "exp(-Var l)": (-l.var()).exp().item(), "ESS of tokens": lesson2.ess(l),
            "exp(-Var sum l)": (-l_response.var()).exp().item(),
            "ESS of responses": lesson2.ess(l_response)}


def slope(values) -> tuple[float, float]:
    """Least-squares slope of the values per step, and its standard error."""
    (a, _), covariance = np.polyfit(np.arange(len(values)), values, 1, cov=True)
    return float(a), float(covariance[0, 0]**0.5)


def laws(rows: list[dict]) -> list[dict]:
    """Predicted | measured over the stale run."""
    next_step = [row["rms l"] / (row["rms d"] or np.nan) for row in rows if row["age"] == 1]
    result = [
        ("log pi - log mu = d + l: largest difference, nats", 0, max(r["identity"] for r in rows)),
        ("rms l at a sync: largest, nats", 0, max(r["rms l"] for r in rows if r["age"] == 0)),
        ("rms l over rms d, one step after a sync", "> 1", float(np.mean(next_step)))]
    for key in ("rms d", "d on log-odds"):
        values = [row[key] for row in rows]
        a, error = (100 * len(rows) / np.mean(values) * x for x in slope(values))
        result.append((f"{key}: change over the run, % of its mean", 0, float(a), float(error)))
    return [dict(zip(("law", "predicted", "measured", "±"), row)) for row in result]


# ---------------------------------------------------------------- other parameters for the engine
def parameter_noise(size: float, seed: int, fresh: bool = False):
    """state -> state x (1 + size eps), eps standard normal: one for all calls, or `fresh` ones."""
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
    def rounded(matrix: Tensor) -> Tensor:
        scale = matrix.abs().amax(1, keepdim=True) / (2**(bits - 1) - 1)
        return (matrix / scale).round() * scale
    return lambda state: {name: rounded(value) if name.endswith("_proj.weight") else value
                          for name, value in state.items()}


# ---------------------------------------------------------------- the drift on free tokens
def four_triples(shown: np.ndarray, digits: np.ndarray, rng, step: int) -> np.ndarray:
    """Token ids (n, 13): four times (letter letter digit), and the end. A letter is a habit, which
    depends on the digit, the letter before and the place. No reward holds it there."""
    rank = rng.choice(4, size=(*digits.shape, 2), p=[0.4, 0.3, 0.2, 0.1])        # (n, 4, 2)
    first = (rank[..., 0] + digits) % 4
    second = (rank[..., 1] + first + np.arange(4)) % 4
    a = lesson1.CHARACTERS.index("a")
    triples = np.stack([a + first, a + second, shown], -1)                       # (n, 4, 3)
    return np.pad(triples.reshape(-1, 12), ((0, 0), (0, 1)), constant_values=lesson1.END)


FREE = lesson1.Task(     # only the digits are graded: a drift can move the letters
    "free", length=4, max_tokens=13, steps=280, slip=0.28, answer=lambda digits: (digits + 3) % 10,
    grade=lambda given, right, ended: float(ended and given == right), demonstrate=four_triples)


def gradient_bias(trainer, engine, clean, tokenizer, seed: int, quick: bool) -> list[dict]:
    """At the free-tokens policy's own weights: drift D and gradient G of mu's samples against the
    gradient S of a clean engine's samples. Other samples of that engine show the noise."""
    n, group_size = 16 if quick else 128, 8
    digits, prompts = lesson1.make_prompts(FREE, tokenizer, n, np.random.default_rng(seed))
    arms = [("on-policy", clean, 0, None, -1), ("clean fp32, other samples", clean, 1, None, -1),
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
            G, D = (in_halves(f, trainer, rollout, A) for f in (policy_gradient, drift))
            S.setdefault(kind, G)                                        # the first arm's
            rows.append({
                "loaded into the engine": name, "mean |d|": size["mean |d|"], "k3": size["k3"],
                "advantage": kind, "|D| / |S|": root(norm2(D)) / root(norm2(S[kind])),
                "cos(D, S)": cosine([(D, S[kind])]), "cos(G, S)": cosine([(G, S[kind])])})
    return rows[2:]


DIRECTIONS = {      # what makes the drift -> steps between syncs, parameter noise (size, fresh?)
    "discrepancy: one parameter noise of 10%": (1, (0.1, False)),
    "control: a new one at each step": (1, (0.1, True)),
    "lag: synced every 8 steps": (8, None)}


def drift_directions(trainer, engine, tokenizer, seed: int, steps: int = 24,
                     prompts: int = 48) -> list[dict]:
    """Trains on the free tokens. A row per source of drift: {steps apart: cosine of the drift with
    itself}, over all pairs of steps; and its size in the second half over that in the first. A step
    at a sync has no lag, and is left out unless every step is one."""
    rows = []
    for name, (period, noise) in DIRECTIONS.items():
        model, drifts = copy.deepcopy(trainer), {}
        run = grpo(model, engine, FREE, tokenizer, torch.optim.SGD(model.parameters(), lr=0.04),
                   weighted(lesson2.CORRECTIONS["none"]), steps, period, seed,
                   prompts=prompts, advantage="raw", head=-1, decay=False,
                   perturb=parameter_noise(noise[0], seed, noise[1]) if noise else None)
        for batch in tqdm(run, total=steps, desc="drift in training"):
            if batch.age or period == 1:
                drifts[batch.step] = in_halves(drift, model, batch.rollout, batch.advantage)
        row = {"drift made by": name}
        for apart in (1, 2, 4, 8, 16):
            pairs = [(drifts[k], drifts[k + apart]) for k in drifts if k + apart in drifts]
            row |= {str(apart): cosine(pairs)} if pairs else {}
        early, late = (np.mean([norm2(drifts[k]) for k in drifts if (k >= steps / 2) == half])
                       for half in (False, True))
        rows.append({**row, "size, late / early": root(late) / root(early)})
    return rows


# ---------------------------------------------------------------- the sync that loses updates
# An engine of 16 bits rounds the weights that it is sent. Let pi_held be the trainer at the rounded
# weights. Then the discrepancy has two parts, and a sync cures neither:
#
#     log pi_theta_s - log mu  =  (log pi_held - log mu)  +  (log pi_theta_s - log pi_held)
#                              =       arithmetic         +              cast
#
# A released model's weights are bf16 numbers: at first nothing is lost. But bf16 numbers near w are
# |w| / 256 to |w| / 128 apart. A change of w that is smaller than half of that is rounded away. At
# small learning rates most updates stay below it for many steps: the sampler sees only a part of
# what the trainer learns.
CONTRACTS = {   # trainer | engine -> the trainer's autocast, the engine's dtype
    "fp32 | bf16": (torch.float32, torch.bfloat16), "bf16 | bf16": (torch.bfloat16, torch.bfloat16),
    "fp16 | fp16": (torch.float16, torch.float16), "fp32 | fp32": (torch.float32, torch.float32)}


def cast(state: dict, dtype: torch.dtype) -> dict:
    """The weights as an engine of this dtype holds them, but in float32."""
    return {name: value.to(dtype).float() for name, value in state.items()}


def visible(weights: Tensor, start: Tensor, dtype: torch.dtype) -> dict:
    """Share of the weights (n,) whose change since `start` an engine of this dtype sees. Predicted:
    those that moved by more than half the spacing of its numbers."""
    # from 2^(k - 1) to 2^k numbers are 2^(k - 1) eps apart
    half = 2.0 ** (start.frexp().exponent - 1) * torch.finfo(dtype).eps / 2
    seen = (weights - start).abs() > half
    return {"weights seen to change, predicted": seen.double().mean().item(),
            "measured": (weights.to(dtype) != start.to(dtype)).double().mean().item()}


def lost_updates(trainer, samplers: dict, tokenizer, seed: int, steps: int) -> list[dict]:
    """Trains from bf16 weights at a small rate, synced before every step, under each contract. In
    nats: mean |arithmetic|, mean |cast|, and how far the policy has moved since the start, mean
    |log pi_theta - log pi_start|. samplers: {dtype: Sampler}."""
    start, rows = copy.deepcopy(trainer), []
    start.load_state_dict(cast(trainer.state_dict(), torch.bfloat16))
    for name, (forward, dtype) in CONTRACTS.items():
        model, held = copy.deepcopy(start), copy.deepcopy(start)
        autocast = torch.autocast(lesson1.DEVICE.type, forward, enabled=forward != torch.float32)
        logprobs = autocast(lesson1.logprobs)
        run = grpo(model, samplers[dtype], lesson1.SUM, tokenizer,
                   torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.0),
                   weighted(lesson2.CORRECTIONS["none"]), steps, 1, seed, prompts=16, decay=False,
                   logprobs=lambda model, rollout, old, grad: logprobs(model, rollout, True, grad))
        for batch in tqdm(run, total=steps, desc=name):
            if batch.step not in (0, 1, 2, 4, 8, 16):
                continue
            held.load_state_dict(cast(model.state_dict(), dtype))
            logp_held, logp_start = (logprobs(policy, batch.rollout) for policy in (held, start))
            parts = (logp_held - batch.rollout.logp_sampler, batch.logp_old - logp_held,
                     batch.logp_old - logp_start)
            sizes = [x[batch.rollout.mask].abs().mean().item() for x in parts]
            now, then = (torch.cat([p.detach().flatten() for p in policy.parameters()])
                         for policy in (model, start))
            rows.append({"trainer | engine": name, "step": batch.step,
                         "mean |arithmetic|": sizes[0], "mean |cast|": sizes[1],
                         "mean |movement|": sizes[2], **visible(now, then, dtype)})
    return rows


# ---------------------------------------------------------------- main
def verdict(result: dict) -> str:
    """The stale run read aloud. It follows the numbers."""
    ratio = next(law["measured"] for law in result["laws"] if law["law"].startswith("rms l over"))
    if not ratio:
        return "One step after a sync the lag is still 0: no update has moved the trainer."
    ess = np.mean([row["ESS of responses"] for row in result["run"] if row["age"] == PERIOD - 1])
    side = "below" if ess < 0.5 else "not below"
    return (f"One step after a sync the lag is {ratio:.2g} times the discrepancy. Just before the "
            f"next sync the ESS of responses is {ess:.2f}, {side} one half.")


def main(argv=None) -> dict:
    args, trainer, tokenizer = lesson1.arguments(__file__, __doc__, argv)
    prompts, max_tokens, lr = SIZES[lesson1.scale(tokenizer)]
    max_tokens = args.task.max_tokens if args.task.shots else max_tokens
    sampler = lesson1.Sampler(args.path, lesson1.engine_dtype(tokenizer))
    steps = 2 * PERIOD if args.quick else STEPS
    start = copy.deepcopy(trainer)                             # the run changes the trainer
    # with TIS, the usual choice
    run = grpo(trainer, sampler, args.task, tokenizer,
               torch.optim.AdamW(trainer.parameters(), lr=lr, weight_decay=0.0),
               weighted(lesson2.CORRECTIONS["tis"]), steps, PERIOD, args.seed,
               prompts=prompts, max_tokens=max_tokens, decay=False)             # a constant rate
    rows = [measure(batch) for batch in tqdm(run, total=steps, desc="stale run")]
    result = {"model": args.path, "seed": args.seed, "run": rows, "laws": laws(rows)}
    if lesson1.is_tiny(tokenizer):          # other policies do not know the free tokens
        path = lesson1.policy(FREE)
        free, clean = lesson1.load_model(path), lesson1.Sampler(path, dtype="float32")
        result["drift"] = gradient_bias(free, sampler, clean, tokenizer, args.seed, args.quick)
        samplers = {torch.bfloat16: sampler, torch.float32: clean,
                    torch.float16: lesson1.Sampler(args.path, "float16")}
        result["lost updates"] = lost_updates(start, samplers, tokenizer, args.seed,
                                              3 if args.quick else 17)
        size = {"steps": 5, "prompts": 8} if args.quick else {}
        result["directions"] = drift_directions(free, sampler, tokenizer, args.seed, **size)
    result = lesson1.save(result, args.json)
    lesson1.table("a stale run, every second step", result["run"][::2])
    lesson1.table("predicted | measured", result["laws"], "law", "predicted", "measured", "±")
    if "drift" in result:
        lesson1.table("the drift at fixed weights", result["drift"])
        lesson1.table("cosine of the drift with itself, steps apart", result["directions"])
        lesson1.table("a sync before every step, at lr 3e-5: does the engine see the updates?",
                      result["lost updates"])
    print(f"\n{verdict(result)}")
    return result


if __name__ == "__main__":
    main()
