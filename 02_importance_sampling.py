"""Lesson 2: the gradient is under mu, not pi. What does each importance weight repair, and at what price?

The policy gradient is an expectation under the trainer's pi; the samples come from the engine's mu.
Importance sampling rewrites one into the other, at the level of the sequence y = y_1 ... y_T

    grad J = E_pi[R sum_t s_t] = E_mu[ w(y) A sum_t s_t ],   w(y) = prod_t pi(y_t) / mu(y_t)      (exact)

with s_t = grad log pi(y_t | y_<t) and A = R - b (any constant b is free, since E_pi[s_t] = 0); or, token by
token, with w_t = pi(y_t) / mu(y_t) = 1 + delta_t alone in front of s_t. As objectives the two agree to first
order, prod_t (1 + delta_t) = 1 + sum_t delta_t + ... (MiniRL, arXiv 2512.01374). Their gradients agree at delta = 0,
and differ by E_mu[sum_{t' != t} delta_t' A s_t] to first order: the token weight leaves the prefix, and what
follows, where mu put them. That term is measured here, like everything else in this lesson, without
noise: in a world of V^T responses that is small enough to be enumerated, with g = sum_t w_t A s_t and chi^2 = Var_mu(w).

    bias      || E[g] - grad J ||                   what no number of samples removes
    variance  tr Cov[g] = E||g||^2 - ||E g||^2      what n samples divide by n

Run it:  python 02_importance_sampling.py                          a CPU, about half a minute
         python 02_importance_sampling.py --model Qwen/Qwen3-0.6B   a CUDA GPU (not run yet)
Expect:  sequence IS without bias, its E[w^2] growing like (1 + chi^2)^T; token weights with less variance
         and hardly less bias than no weight; on real rollouts at the natural gap, weights so
         close to 1 that no correction matters; with stale weights, sequence weights that collapse.
         Numbers in figures/02_importance_sampling.json, picture in figures/02_importance_sampling.png.

Exercises (tests/test_02_importance_sampling.py grades the functions):
 1. Write `token_tis` and `sequence_tis` from their formulas. 1 line each; test_weight.
 2. Write `ess` in log space and float64. 2 lines; test_ess.
 3. CIS (arXiv 2609.32444) caps by confidence: min(pi/mu, 1 + 2.3 max(1 - pi, 0.005)). Register it as a
    correction (2 lines), and find its row in the table: whose bias, whose variance does it have?
 4. Predict from the table, without running: MSE(n) = bias^2 + variance / n. At which n does sequence IS overtake
    sequence TIS at noise 0.4? Then set N_SAMPLES to it and run.
 5. Reach a number: the MSE of seq-tis at noise 0.4 below 0.70, by its cap alone.
 6. Find the bug: `python tests/exercises.py --bug 02 --seed 1`, then --seed 2, 3 (see the README).
"""
import copy
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path

import numpy as np

lesson1 = import_module("01_mismatch")   # before torch: it hides the broken packages around it
import torch
import transformers
from torch import Tensor
from tqdm import tqdm

LOG_RATIO_LIMIT = 20.0   # log-ratios are clamped to +-20 before exp: e^20 is 5e8, never inf, and inf * 0 is NaN
N_SAMPLES = 4096         # at which mean squared errors are compared; has nothing to do with the V^T responses enumerated


# ---------------------------------------------------------------- the objective
def advantages(R: Tensor, group_size: int, kind: str = "std") -> Tensor:
    """Advantages (B,) from rewards (B,), B = prompts x group_size, a group's responses being neighbours.

    std:  (R - mean of the group) / std of the group      GRPO (arXiv 2402.03300); the population's std
    mean: R - mean of the group                           Dr. GRPO (arXiv 2503.20783)
    raw:  R                                               REINFORCE without a baseline
    No epsilon under the std. A group whose rewards are all equal has advantage exactly 0 under std and mean, also where
    the floating-point mean of equal numbers is not one of them."""
    if kind == "raw":
        return R
    group = R.view(-1, group_size)
    A = group - group.mean(1, keepdim=True)
    if kind == "std":
        A = A / group.std(1, keepdim=True, correction=0)
    equal = group.amax(1, keepdim=True) == group.amin(1, keepdim=True)   # not A == 0: the mean is rounded
    return torch.where(equal, 0.0, A).flatten()


def policy_loss(logp: Tensor, weight: Tensor, advantage: Tensor, mask: Tensor, n_tokens: int,
                centre: Tensor | float = 0.0) -> Tensor:
    """The one loss, -sum_t A (sg(w) log pi - centre) / N. logp, weight, mask, centre (B, T), advantage (B,) -> scalar. What
    stands on padding, NaN too, does not matter.

    n_tokens counts the response tokens of the whole batch BEFORE any is rejected: a rejected token
    (weight 0) takes its gradient with it, and does not make the others' larger. (Frameworks differ:
    dividing by the tokens that survived raises the step size the more is rejected.)"""
    # L = -sum_t A (sg(w) log pi - centre) / N
    per_token = -advantage[:, None] * (weight * logp - centre)
    return torch.where(mask, per_token, 0.0).sum() / n_tokens


# ---------------------------------------------------------------- the weights
CORRECTIONS = {}   # name -> weight(logp, logp_old, logp_sampler, advantage, mask) -> (B, T)


def correction(name: str):
    """Registers a weight under the name that `train.py --correction` takes. Decided here, for all of
    them: the weight is a constant to the gradient, and 0 where the mask is 0."""
    def register(function):
        """function computes the weight; what is registered, and returned, keeps the contract."""
        @torch.no_grad()
        def weight(logp, logp_old, logp_sampler, advantage, mask, **settings):
            return torch.where(mask, function(logp, logp_old, logp_sampler, advantage, mask, **settings), 0.0)
        weight.__doc__ = function.__doc__
        CORRECTIONS[name] = weight
        return weight
    return register


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio, clamped in log space."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum over the response (B, 1), padding left out."""
    return torch.where(mask, x, 0.0).sum(1, keepdim=True)


def sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the response (B, 1), padding left out."""
    return sequence_sum(x, mask) / mask.sum(1, keepdim=True).clamp(min=1)


def ppo_keeps(r: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """PPO's clip as a mask (arXiv 1707.06347): the gradient of min(r A, clip(r, 1 - low, 1 + high) A) is
    that of r A, or 0 where A > 0 and r > 1 + high, and where A < 0 and r < 1 - low. True where it is kept; A = 0 is."""
    A = advantage[:, None]
    return ~(((A > 0) & (r > 1 + high)) | ((A < 0) & (r < 1 - low)))


@correction("none")
def none(logp, logp_old, logp_sampler, advantage, mask):
    """w = 1: mu's samples are taken for pi's own."""
    return torch.ones_like(logp)


@correction("token-is")
def token_is(logp, logp_old, logp_sampler, advantage, mask):
    """w_t = pi / mu at the token."""
    return ratio(logp - logp_sampler)


@correction("tis")
def token_tis(logp, logp_old, logp_sampler, advantage, mask, C=2.0):
    """w_t = min(pi / mu, C): truncated IS (Yao et al. 2025, fengyao.notion.site/off-policy-rl, who truncate
    pi_old / mu beside PPO's clipped pi / pi_old; here, and below, one ratio covers discrepancy and lag)."""
    return ratio(logp - logp_sampler).clamp(max=C)


@correction("icepop")
def token_mis(logp, logp_old, logp_sampler, advantage, mask, low=0.5, high=5.0):
    """w_t = pi / mu inside the band [low, high], else 0: token MIS, IcePop (Ring-1T, arXiv 2510.18855)."""
    rho = ratio(logp - logp_sampler)
    return rho * ((rho >= low) & (rho <= high))


@correction("kpop")
def kpop(logp, logp_old, logp_sampler, advantage, mask, phi=0.05):
    """w_t = 1 where the binary KLs of {the token, any other} are at most phi nats both ways, else 0
    (KPop, ringtech.notion.site/kpop). The unit of the published phi (0.1 to 2) is not settled: in nats it
    would mask almost nothing, and 10 to 30 % are said to be masked. Choose phi by that fraction."""
    return (binary_kl(logp, logp_sampler) <= phi).to(logp.dtype)


def binary_kl(logp: Tensor, logp_sampler: Tensor) -> Tensor:
    """max(KL(p || q), KL(q || p)) in nats, of the two-event distributions (p, 1 - p) and (q, 1 - q)."""
    p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (logp, logp_sampler))
    log_odds = (p / q).log() - ((1 - p) / (1 - q)).log()
    # KL(p || q) = p (log p/q - log (1-p)/(1-q)) + log (1-p)/(1-q)
    return torch.maximum(p * log_odds + ((1 - p) / (1 - q)).log(), -q * log_odds - ((1 - p) / (1 - q)).log())


@correction("seq-is")
def sequence_is(logp, logp_old, logp_sampler, advantage, mask):
    """w = prod_t pi / mu over the whole response: the exact rewriting."""
    return ratio(sequence_sum(logp - logp_sampler, mask)).expand_as(logp)


@correction("seq-tis")
def sequence_tis(logp, logp_old, logp_sampler, advantage, mask, C=2.0):
    """w = min(prod_t pi / mu, C) (Liu, Li et al. 2025, richardli.xyz/rl-collapse)."""
    return ratio(sequence_sum(logp - logp_sampler, mask)).clamp(max=C).expand_as(logp)


@correction("seq-mis")
def sequence_mis(logp, logp_old, logp_sampler, advantage, mask, C=2.0):
    """w = prod_t pi / mu if it is at most C, else 0: the response is dropped (ibid.)."""
    rho = ratio(sequence_sum(logp - logp_sampler, mask))
    return (rho * (rho <= C)).expand_as(logp)


@correction("geo")
def geometric(logp, logp_old, logp_sampler, advantage, mask):
    """w = (prod_t pi / mu)^(1/T): GSPO's ratio (arXiv 2507.18071), without its clip."""
    return ratio(sequence_mean(logp - logp_sampler, mask)).expand_as(logp)


@correction("snis")
def self_normalised(logp, logp_old, logp_sampler, advantage, mask):
    """w_i = rho_i / mean_j rho_j over the batch's responses: self-normalised IS."""
    rho = ratio(sequence_sum(logp - logp_sampler, mask))
    return (rho / rho[mask.any(1)].mean()).expand_as(logp)


@correction("ppo")
def ppo_clip(logp, logp_old, logp_sampler, advantage, mask, low=0.2, high=0.2):
    """w_t = r = pi / pi_old, 0 where PPO clips it: the lag alone, the engine's part uncorrected."""
    r = ratio(logp - logp_old)
    return r * ppo_keeps(r, advantage, low, high)


@correction("minirl")
def minirl(logp, logp_old, logp_sampler, advantage, mask, low=0.2, high=0.27, C=5.0):
    """w_t = min(pi / mu, C), 0 where PPO would clip the lag ratio pi / pi_old (MiniRL, arXiv 2512.01374)."""
    return ratio(logp - logp_sampler).clamp(max=C) * ppo_keeps(ratio(logp - logp_old), advantage, low, high)


@correction("dsv32")
def off_policy_sequence_mask(logp, logp_old, logp_sampler, advantage, mask, delta=0.5, low=0.2, high=0.2):
    """PPO's weight on pi / mu, and 0 for a whole response with A < 0 and mean_t log mu / pi > delta
    (DeepSeek-V3.2, arXiv 2512.02556; its pi_old is the engine's probability)."""
    r = ratio(logp - logp_sampler)
    dropped = (advantage[:, None] < 0) & (sequence_mean(logp_sampler - logp, mask) > delta)
    return r * ppo_keeps(r, advantage, low, high) * ~dropped


def ess(log_weight: Tensor) -> float:
    """Effective sample size of n weights as a fraction of n, from their logs (n,): (sum w)^2 / (n sum w^2), in float64."""
    x = log_weight.double()
    return (2 * x.logsumexp(0) - (2 * x).logsumexp(0)).exp().item() / len(x)


# ---------------------------------------------------------------- the exact world
@dataclass
class World:
    """All B = V^T responses of a tabular policy, row i being i in base V, in float64."""
    V: int
    pi: list[Tensor]       # T x (V^t, V): pi now, at each prefix
    logp: Tensor           # (B, T) log pi of each response's tokens
    logp_old: Tensor       # (B, T) log pi at the sampler's weights
    logp_sampler: Tensor   # (B, T) log mu
    R: Tensor              # (B,)   reward of the whole response

    @cached_property
    def mu(self) -> Tensor:
        """(B,) probability with which the sampler draws each response."""
        return self.logp_sampler.sum(1).exp()

    @cached_property
    def A(self) -> Tensor:
        """(B,) reward minus the fixed baseline E_mu[R]."""
        return self.R - self.mu @ self.R

    @cached_property
    def score_norm2(self) -> Tensor:
        """(B, T) || s_t ||^2 = || e_a - pi ||^2 = 1 - 2 pi_a + sum_v pi_v^2."""
        T = self.logp.shape[1]
        sum_pi2 = [pi.square().sum(1).repeat_interleave(self.V**(T - t)) for t, pi in enumerate(self.pi)]
        return 1 - 2 * self.logp.exp() + torch.stack(sum_pi2, 1)

    @cached_property
    def true_gradient(self) -> Tensor:
        """grad J = E_pi[A sum_t s_t], by enumeration under pi itself."""
        probability = self.logp.sum(1).exp()
        return gradient(self, (probability * self.A)[:, None].expand_as(self.logp))


def make_world(discrepancy: float, lag: float, seed: int, V: int = 4, T: int = 6, same_everywhere: bool = False) -> World:
    """pi_old has the same V probabilities at every prefix, each time in another order; the logits of pi differ
    from pi_old's by `lag` x noise, those of mu by `discrepancy` x noise, drawn anew at each prefix. With
    `same_everywhere` the noise is shuffled along with the probabilities, so that chi^2(pi || mu) is the
    same at every prefix. Reward 1 if the tokens sum to 0 modulo V: each of them can spoil it."""
    rng = torch.Generator().manual_seed(seed)
    base, lag_noise, engine_noise = torch.randn(3, V, generator=rng, dtype=torch.float64)
    columns = {"pi": [], "old": [], "mu": []}
    for t in range(T):
        order = torch.rand(V**t, V, generator=rng, dtype=torch.float64).argsort(1)
        e_lag, e_engine = ((lag_noise[order], engine_noise[order]) if same_everywhere else
                           torch.randn(2, V**t, V, generator=rng, dtype=torch.float64))
        for name, logits in (("old", base[order]), ("pi", base[order] + lag * e_lag),
                             ("mu", base[order] + discrepancy * e_engine)):
            columns[name].append(logits.log_softmax(-1))
    tables = {name: torch.stack([x.flatten().repeat_interleave(V**(T - 1 - t)) for t, x in enumerate(each)], 1)
              for name, each in columns.items()}
    tokens = torch.cartesian_prod(*[torch.arange(V)] * T).view(-1, T)
    R = (tokens.sum(1) % V == 0).double()
    return World(V, [x.exp() for x in columns["pi"]], tables["pi"], tables["old"], tables["mu"], R)


def gradient(world: World, coefficient: Tensor) -> Tensor:
    """sum over responses and tokens of coefficient (B, T) x grad log pi, with respect to all logits.
    In the logits of its prefix, grad log pi(a) = e_a - pi; the prefixes' logits are stacked to one vector."""
    parts = []
    for t, pi in enumerate(world.pi):
        at = coefficient[:, t].view(world.V**t, world.V, -1).sum(-1)         # per prefix and token
        parts.append((at - pi * at.sum(-1, keepdim=True)).flatten())
    return torch.cat(parts)


def squared_norm(world: World, weight: Tensor) -> Tensor:
    """|| sum_t w_t A s_t ||^2 of each response (B,): its tokens stand at different prefixes, whose logits
    are different coordinates, so that the squares add."""
    return ((weight * world.A[:, None])**2 * world.score_norm2).sum(1)


def weights(world: World, name: str, **settings) -> Tensor:
    """A correction's weights (B, T) for every response, from the very function that train.py uses."""
    return CORRECTIONS[name](world.logp, world.logp_old, world.logp_sampler, world.A,
                             torch.ones_like(world.logp, dtype=torch.bool), **settings)


def moments(world: World, w: Tensor) -> dict:
    """Exact bias and variance of the mean of g = sum_t w_t A s_t, relative to the true gradient's norm."""
    truth, expected = world.true_gradient, gradient(world, (world.mu * world.A)[:, None] * w)
    size2 = truth @ truth
    bias2 = (expected - truth).square().sum() / size2
    variance = (world.mu @ squared_norm(world, w) - expected @ expected) / size2
    return {"gradient": size2.sqrt().item(), "bias": bias2.sqrt().item(), "cosine": (expected @ truth / expected.norm() / truth.norm()).item(),
            "variance": variance.item(), "mse": (bias2 + variance / N_SAMPLES).item()}


def snis_moments(world: World, n: int = N_SAMPLES) -> dict:
    """Self-normalised IS is a ratio of two means, no mean itself. Delta method, with f = A sum_t s_t:
    bias = -E[rho^2 (f - grad J)] / n, covariance = Cov of rho (f - grad J), over n."""
    truth, rho = world.true_gradient, weights(world, "seq-is")
    second = gradient(world, (world.mu * world.A)[:, None] * rho**2)           # E[rho^2 f]
    rho2 = (world.mu @ rho[:, 0]**2).item()
    bias = -(second - rho2 * truth) / n
    variance = world.mu @ squared_norm(world, rho) - 2 * truth @ second + rho2 * truth @ truth
    size2 = truth @ truth
    expected = truth + bias
    return {"gradient": size2.sqrt().item(), "bias": (bias.norm() / size2.sqrt()).item(), "cosine": (expected @ truth / expected.norm() / truth.norm()).item(),
            "variance": (variance / size2).item(), "mse": ((bias @ bias + variance / n) / size2).item()}


def monte_carlo(world: World, name: str, n: int, repeats: int, seed: int = 0) -> Tensor:
    """`repeats` estimates (repeats, parameters), each from n responses drawn from mu."""
    rng = torch.Generator().manual_seed(seed)
    estimates = []
    for _ in range(repeats):
        drawn = torch.multinomial(world.mu, n, replacement=True, generator=rng)
        w = CORRECTIONS[name](world.logp[drawn], world.logp_old[drawn], world.logp_sampler[drawn], world.A[drawn],
                              torch.ones(n, world.logp.shape[1], dtype=torch.bool))
        coefficient = torch.zeros_like(world.logp).index_add_(0, drawn, w * world.A[drawn, None] / n)
        estimates.append(gradient(world, coefficient))
    return torch.stack(estimates)


def chi2(world: World) -> Tensor:
    """chi^2(pi || mu) = sum_a pi^2 / mu - 1 at every prefix, all in one vector."""
    V, T = world.V, world.logp.shape[1]
    each = []
    for t in range(T):
        step = V**(T - 1 - t)
        pi, mu = (x[::step, t].exp().view(-1, V) for x in (world.logp, world.logp_sampler))
        each.append((pi**2 / mu).sum(1) - 1)
    return torch.cat(each)


# ---------------------------------------------------------------- experiment 1: the exact world
def kpop_phi(world: World, fraction: float = 0.1) -> float:
    """The phi that masks, of the tokens that mu draws, the share nearest to `fraction` and above 0."""
    kl = binary_kl(world.logp, world.logp_sampler)
    probability = world.mu[:, None].expand_as(kl) / kl.shape[1]
    masked = {phi: probability[kl > phi].sum().item() for phi in (kl.round(decimals=6).unique() + 1e-6).tolist()}
    return min((phi for phi in masked if masked[phi] > 1e-12), key=lambda phi: abs(masked[phi] - fraction))


def all_moments(world: World) -> dict:
    """name -> moments, for every estimator."""
    return {name: snis_moments(world) if name == "snis" else
            moments(world, weights(world, name, **({"phi": kpop_phi(world)} if name == "kpop" else {})))
            for name in CORRECTIONS}


def laws(seed: int, T: int) -> list[tuple]:
    """(law, predicted, measured) in the exact world."""
    rows = []
    world = make_world(0.2, 0.2, seed, T=T)
    rows.append(("sequence IS: relative bias", 0.0, moments(world, weights(world, "seq-is"))["bias"]))
    for t in range(1, T + 1):
        w = make_world(0.6, 0.6, seed, T=t, same_everywhere=True)
        rows.append((f"sequence IS: E[w^2] = (1 + chi^2)^T, T = {t}", (1 + chi2(w)[0].item())**t,
                     (w.mu @ weights(w, "seq-is")[:, 0]**2).item()))
    uneven = make_world(0.1, 0.1, seed, T=T)
    rows.append((f"  ... noise differs by prefix: at most (1 + max chi^2)^T, T = {T}", (1 + chi2(uneven).max().item())**T,
                 (uneven.mu @ weights(uneven, "seq-is")[:, 0]**2).item()))

    # TIS at a fixed prefix: E_mu[min(rho, C) f] - E_pi[f] = -E_mu[(rho - C)+ f]
    one, C = make_world(0.6, 0.6, seed, T=1, same_everywhere=True), 1.2
    rho = weights(one, "token-is")
    bias = gradient(one, (one.mu * one.A)[:, None] * weights(one, "tis", C=C)) - one.true_gradient
    predicted = gradient(one, -(one.mu * one.A)[:, None] * (rho - C).clamp(min=0))
    rows.append((f"TIS, one prefix, C = {C}: || -E[(rho - C)+ f] ||", predicted.norm().item(), bias.norm().item()))

    # MiniRL: prod_t' (1 + delta_t') - (1 + delta_t) = sum_{t' != t} delta_t' + second order
    slight = make_world(0.05, 0.05, seed, T=T)
    rho, under_mu = weights(slight, "token-is"), (slight.mu * slight.A)[:, None]
    neglected = gradient(slight, under_mu * (weights(slight, "seq-is") - rho))
    first_order = gradient(slight, under_mu * ((rho - 1).sum(1, keepdim=True) - (rho - 1)))
    rows.append(("token for sequence weight neglects || E[sum_{t' != t} delta_t' A s_t] ||", first_order.norm().item(), neglected.norm().item()))
    for name in ("none", "token-is"):
        bias = {}
        for size in (0.02, 0.01):
            halved = make_world(size, size, seed, T=T)
            bias[size] = moments(halved, weights(halved, name))["bias"]
        rows.append((f"{name}: bias when the mismatch is halved, times", 0.5, bias[0.01] / bias[0.02]))

    # the cap that minimises the BOUND (2K(1 + chi^2)/C)^2 + K^2 C^2 / n, beside the best cap
    wide = make_world(0.4, 0.4, seed, T=T)
    second, caps = (wide.mu @ weights(wide, "seq-is")[:, 0]**2).item(), np.geomspace(0.01, 300, 80)
    errors = [moments(wide, weights(wide, "seq-tis", C=C)) for C in caps]
    for n in (256, 65_536):
        best = caps[int(np.argmin([m["bias"]**2 + m["variance"] / n for m in errors]))]
        rows.append((f"sequence TIS: cap sqrt(2(1 + chi^2)) n^(1/4) (a bound's), best cap, n = {n}", (2 * second)**0.5 * n**0.25, best))
    for spread in (0.3, 0.83):
        x = spread * torch.randn(200_000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        rows.append((f"log-normal weights, std {spread}: ESS = exp(-Var log w)", np.exp(-spread**2), ess(x)))
    return rows


def exact_world(seed: int, quick: bool) -> dict:
    """Every number of the enumerated world, averaged over a few of them."""
    T, seeds, shown = (4, 2, (0.1, 0.4)) if quick else (6, 5, (0.1, 0.4))
    average = lambda each: {name: {key: float(np.mean([e[name][key] for e in each])) for key in each[0][name]} for name in each[0]}
    sizes, lengths = [0.02, 0.05, 0.1, 0.2, 0.4, 0.8], list(range(1, T + 1))
    draw_worlds = lambda size, T: [make_world(size, size, seed + k, T=T) for k in range(seeds)]
    each = {size: list(map(all_moments, draw_worlds(size, T))) for size in tqdm(sizes, desc="exact world: mismatch")}
    by_length = [average(list(map(all_moments, draw_worlds(shown[1], t)))) for t in tqdm(lengths, desc="exact world: length")]
    tables = []
    for size in shown:
        monte_carlo_mse = []
        for world in draw_worlds(size, T):
            truth, estimates = world.true_gradient, monte_carlo(world, "snis", N_SAMPLES, 50 if quick else 100)
            monte_carlo_mse.append(((estimates - truth).square().sum(1).mean() / (truth @ truth)).item())
        tables.append({"size": size, "rows": average(each[size]), "snis_mse_monte_carlo": float(np.mean(monte_carlo_mse)),
                       "spread": {name: float(np.std([m[name]["bias"] for m in each[size]], ddof=1)) for name in CORRECTIONS}})
    growth = []
    for name in ("none", "token-is"):
        relative = [m[name]["bias"] for m in by_length[1:]]
        absolute = [m[name]["bias"] * m[name]["gradient"] for m in by_length[1:]]
        exponent = lambda y: float(np.polyfit(np.log(lengths[1:]), np.log(y), 1)[0])
        growth += [(f"{name}: exponent of T in the bias, T = 2 to {T} (bound: richardli.xyz/rl-collapse)", "<= 2", exponent(absolute)),
                   (f"  ... in the bias relative to the gradient, which itself shrinks with T", "-", exponent(relative))]
    return {"V": 4, "T": T, "responses": 4**T, "worlds": seeds, "tables": tables, "sizes": sizes, "lengths": lengths,
            "by_size": [average(each[size]) for size in sizes], "by_length": by_length, "laws": laws(seed, T) + growth}


# ---------------------------------------------------------------- experiment 2: real rollouts
def weight_statistics(log_ratio: Tensor, mask: Tensor) -> dict:
    """What the weights pi / mu of real responses look like: log-ratios (B, T). chi^2 = Var_mu(w), which is E[w^2] - 1
    where E[w] = 1."""
    token, sequence = log_ratio[mask].double(), sequence_sum(log_ratio.double(), mask)[:, 0]
    n = len(token)
    rho = ratio(token)
    lengths = range(1, mask.shape[1] + 1)
    prefix = torch.where(mask, log_ratio.double(), 0.0).cumsum(1)            # log-weight of the first t tokens
    return {"tokens": n, "mean_weight": rho.mean().item(), "standard_error": (rho.std() / n**0.5).item(),
            "token_ess": ess(token), "sequence_ess": ess(sequence), "predicted_ess": (-sequence.var()).exp().item(),
            "chi2": rho.var().item(), "sequence_mean_weight": ratio(sequence).mean().item(),
            "truncated": (rho > 2).double().mean().item(), "masked": ((rho < 0.5) | (rho > 5)).double().mean().item(),
            "length": [t for t in lengths if mask[:, t - 1].any()],
            "ess_by_length": [ess(prefix[mask[:, t - 1], t - 1]) for t in lengths if mask[:, t - 1].any()]}


def real_world(path: str, trainer, seed: int, quick: bool) -> dict:
    """Weights on responses that vLLM sampled: natural gap, stale weights, one bug of lesson 1."""
    tokenizer, task = transformers.AutoTokenizer.from_pretrained(path), lesson1.TASKS["sum"]
    tiny = lesson1.is_tiny(tokenizer)
    n, max_tokens, lr = ((512, task.max_tokens, 1.5e-3) if tiny else (64, 256, 1e-6))
    sampler = lesson1.Sampler(path)
    rng = np.random.default_rng(seed)
    digits, prompts = lesson1.make_prompts(task, tokenizer, n // (8 if quick else 1), rng)
    rollout = sampler.sample(prompts, max_tokens, seed=[seed, 0])
    bug = sampler.sample(prompts, max_tokens, seed=[seed, 0], top_k=3)
    result = {"natural: bf16 vLLM, fp32 trainer": weight_statistics(lesson1.score(trainer, rollout) - rollout.logp_sampler, rollout.mask),
              "bug: top-k 3 in the sampler only": weight_statistics(lesson1.score(trainer, bug) - bug.logp_sampler, bug.mask)}
    ahead = copy.deepcopy(trainer)
    for step in range(1, 9):
        R = lesson1.rewards(task, digits, rollout, tokenizer)
        lesson1.one_step(ahead, rollout, R, lr)
        if step in (1, 2, 8):
            result[f"stale: trainer {step} step{'s' * (step > 1)} ahead"] = weight_statistics(
                lesson1.score(ahead, rollout) - rollout.logp_sampler, rollout.mask)
    return result


# ---------------------------------------------------------------- table and picture
def report(result: dict) -> None:
    """The tables, predicted beside measured."""
    exact, real = result["exact"], result["real"]
    print(f"\nexact world: V = {exact['V']}, T = {exact['T']}, {exact['responses']} responses enumerated, {exact['worlds']} worlds; "
          f"all relative to the true gradient, MSE at n = {N_SAMPLES}")
    print(" " * 12 + "".join(f"| logit noise {table['size']}:{'':39}" for table in exact["tables"]))
    print(f"{'estimator':12}" + f"|{'bias':>8} ± worlds {'cosine':>8}{'variance':>10}{'MSE':>9}{'':>13}" * 2)
    for name in CORRECTIONS:
        cells = []
        for table in exact["tables"]:
            m = table["rows"][name]
            note = f" (MC {table['snis_mse_monte_carlo']:.3f})" if name == "snis" else ""
            cells.append(f"|{m['bias']:8.4f} ± {table['spread'][name]:.4f} {m['cosine']:8.4f}{m['variance']:10.0f}{m['mse']:9.3f}{note:13}")
        print(f"{name:12}" + "".join(cells))
    print("snis is no mean over samples: delta method, and Monte Carlo (MC) beside it")
    print(f"\n{'law':92}predicted |  measured")
    for law, predicted, measured in exact["laws"]:
        print(f"{law:92}{predicted if isinstance(predicted, str) else f'{predicted:.4g}':>9} | {measured:9.4g}")
    print("\nreal rollouts of vLLM: the weight pi / mu      predicted | measured mean weight      chi^2  ESS token  sequence (exp(-Var))   > 2   outside [.5, 5]")
    for name, s in real.items():
        print(f"{name:49}{1:5} | {s['mean_weight']:9.5f} ± {s['standard_error']:.5f}{s['chi2']:12.2e}{s['token_ess']:11.4f}{s['sequence_ess']:10.4f} "
              f"({s['predicted_ess']:.4f}){100 * s['truncated']:8.3f}%{100 * s['masked']:8.3f}%")


SHOWN = {"none": "o", "token-is": "s", "minirl": "D", "geo": "*", "seq-tis": "v", "seq-is": "^"}   # and their markers


def draw(result: dict, path: Path) -> None:
    """The picture, from the JSON alone."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    exact, real = result["exact"], result["real"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.8))
    for axes, x, each in ((left, exact["sizes"], exact["by_size"]), (middle, exact["lengths"], exact["by_length"])):
        for name, marker in SHOWN.items():
            axes.plot(x, [max(m[name]["bias"], 1e-4) for m in each], "k-", marker=marker, markersize=7,
                      markerfacecolor="w" if marker in "^*D" else "k", linewidth=0.8, label=f"{name}: bias")
        for name, style in (("seq-is", "--"), ("token-is", ":")):
            axes.plot(x, [(m[name]["variance"] / N_SAMPLES)**0.5 for m in each], style, color="0.5", linewidth=2.5, label=f"{name}: noise")
        axes.set(ylabel="relative to the true gradient", yscale="log", ylim=(8e-5, 300))
    left.set(xlabel=f"logit noise between mu, pi_old and pi (T = {exact['T']})", xscale="log",
             title=f"Bias against noise at n = {N_SAMPLES}:\nonly seq-is has no bias (drawn at 1e-4)")
    left.set_xticks(exact["sizes"], [str(x) for x in exact["sizes"]], minor=False)
    left.set_xticks([], minor=True)
    middle.set(xlabel=f"length T (noise {exact['tables'][1]['size']})", title="Only seq-is has no bias at any length;\nits noise is what it costs")
    left.legend(ncol=2, fontsize=8, loc="upper left")
    for (name, s), style, shade in zip(real.items(), ("o-", "s-", "^--", "v--", "D--"), ("0", "0.6", "0", "0.3", "0.6")):
        right.plot(s["length"], s["ess_by_length"], style, color=shade, label=name, markersize=4)
    right.axhline(0.5, color="k", linewidth=0.6)
    right.set(xlabel="tokens of the response", ylabel="ESS of the product of weights, share of n", ylim=(0, 1.55), yticks=(0, 0.5, 1),
              title="Real vLLM rollouts: the natural gap costs\nno samples, stale weights do")
    right.legend(fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv=None) -> dict:
    """Runs the lesson and returns what its JSON holds. argv as on the command line."""
    args, path, trainer = lesson1.lesson_arguments("02_importance_sampling.py", __doc__, argv)
    result = {"exact": exact_world(args.seed, args.quick), "real": real_world(path, trainer, args.seed, args.quick)}
    report(result)
    natural = result["real"]["natural: bf16 vLLM, fp32 trainer"]
    print(f"\nAt the natural gap {100 * natural['truncated']:.3f} % of the ratios exceed 2 and the ESS of whole responses is {natural['sequence_ess']:.4f}: "
          "there is nothing to correct. Stale weights are another matter.")
    lesson1.save_json(result, args.out / "02_importance_sampling.json")
    draw(result, args.out / "02_importance_sampling.png")
    print(f"picture: {args.out / '02_importance_sampling.png'}")
    return result


if __name__ == "__main__":
    main()
