"""Lesson 2: the gradient is under mu, not pi. What does each importance weight repair, and at what
price?

The policy gradient is an expectation under the trainer's pi, but the engine samples from mu.
Importance sampling rewrites one as the other. For a response of T tokens y_t, and the scores
s_t = grad log pi(y_t), this is exact with A = R - b for any constant b:

    grad J = E_pi[A sum_t s_t] = E_mu[w A sum_t s_t],    w = prod_t w_t,    w_t = pi(y_t) / mu(y_t)

Most systems give each token its own w_t instead of w. What does that cost? Write w_t = 1 + delta_t
and take T = 2. The two objectives agree to first order, but for a constant (MiniRL, 2512.01374):

    sequence weight   E_mu[A w_1 w_2]      =  E_mu[A (1 + delta_1 + delta_2 + delta_1 delta_2)]
    token weight      E_mu[A (w_1 + w_2)]  =  E_mu[A (2 + delta_1 + delta_2)]

But the gradient of a second-order term is of first order. Since grad w_t = w_t s_t, the gradients are

    sequence weight   E_mu[A (w_1 w_2 s_1 + w_1 w_2 s_2)]  =  grad J
    token weight      E_mu[A (w_1 s_1 + w_2 s_2)]  =  grad J - E_mu[A (delta_2 s_1 + delta_1 s_2)] - ...

A token weight corrects its own token and leaves all others where mu put them. This lesson computes
the error of every weight exactly, in a world small enough to enumerate. For g = sum_t w_t A s_t,

    bias      ||E_mu[g] - grad J||           no number of samples removes it
    variance  E_mu||g||^2 - ||E_mu[g]||^2    n samples divide it by n

  python 02_importance_sampling.py                           a CPU: half a minute
  python 02_importance_sampling.py --model Qwen/Qwen3-0.6B   a CUDA GPU, not run yet

Expect no bias from sequence IS, but an E[w^2] that grows like (1 + chi^2)^T. Expect token weights to
remove hardly any bias. In real rollouts expect weights near 1 until the sampler is stale.
Exercises: tests/EXERCISES.md.
"""
import copy
from dataclasses import dataclass
from importlib import import_module

import numpy as np

lesson1 = import_module("01_mismatch")   # before torch: it hides what would break torch's imports
import torch
from torch import Tensor
from tqdm import tqdm

ROUNDING = 1e-6          # rewards that differ by less, relative to the largest, are equal
LOG_RATIO_LIMIT = 20.0   # log-ratios are clamped to +-20, so that no ratio is inf: inf * 0 is NaN
N_SAMPLES = 4096         # the n at which mean squared errors are compared
NOISES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)                                # on the exact world's logits
SIZES = {"tiny": (512, 9, 1.5e-3), "cpu": (16, 64, 1e-6), "gpu": (64, 256, 1e-6)}  # prompts, T, lr


# ---------------------------------------------------------------- the objective
def inside(mask: Tensor, x) -> Tensor:
    """x where the mask is True, 0 on padding. (x * mask would keep a NaN: NaN * 0 is NaN.)"""
    return torch.where(mask, x, 0.0)


def advantages(R: Tensor, group_size: int, kind: str = "std") -> Tensor:
    """Advantages (B,) from rewards (B,) of any real dtype. The responses of a group are neighbors.

    std:  (R - group mean) / group std    GRPO (arXiv 2402.03300); population std, no epsilon
    mean: R - group mean                  Dr. GRPO (arXiv 2503.20783)
    raw:  R                               REINFORCE without a baseline

    Means and stds are taken in float64. The result is float32, or float64 if R is. A group of equal
    rewards has advantage exactly 0. Raises ValueError if a reward is NaN or infinite."""
    if not R.isfinite().all():
        raise ValueError(f"rewards must be finite, but some are {R[~R.isfinite()].tolist()}")
    dtype = torch.promote_types(R.dtype, torch.float32)
    if kind == "raw":
        return R.to(dtype)
    group = R.double().view(-1, group_size)
    A = (group - group.mean(1, keepdim=True)).to(dtype)
    if kind == "std":
        A = A / group.std(1, keepdim=True, correction=0).to(dtype)
    spread = group.amax(1, keepdim=True) - group.amin(1, keepdim=True)
    equal = spread <= ROUNDING * group.abs().amax(1, keepdim=True)
    return torch.where(equal, 0.0, A).flatten()


def policy_loss(logp: Tensor, weight: Tensor, advantage: Tensor, mask: Tensor, n_tokens: int,
                center: Tensor | float = 0.0) -> Tensor:
    """The one loss of all lessons. logp, weight, mask, center (B, T), advantage (B,) -> scalar.

    The weight is a constant to the gradient. Padding is ignored, even if it is NaN. n_tokens counts
    the response tokens of the whole batch BEFORE any is rejected: rejecting a token (weight 0)
    removes its gradient, and does not make the others' larger."""
    A, w, logp, c = (inside(mask, x) for x in (advantage[:, None], weight.detach(), logp, center))
    # L = -sum_t A (sg(w) log pi - c) / N
    return -(A * (w * logp - c)).sum() / n_tokens


# ---------------------------------------------------------------- the weights
def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio in nats, clamped."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum over each response, without its padding: (B, T) -> (B, 1)."""
    return inside(mask, x).sum(1, keepdim=True)


class Ratios:
    """What all weights are made of. Log-probs (B, T) in nats, advantage (B,), mask (B, T)."""

    def __init__(self, logp, logp_old, logp_sampler, advantage, mask):
        self.logp, self.logp_old, self.logp_sampler = logp, logp_old, logp_sampler
        self.advantage, self.mask = advantage, mask
        log_ratio = logp - logp_sampler
        total = sequence_sum(log_ratio, mask)
        self.token = ratio(log_ratio)                                    # (B, T) rho = pi / mu
        self.lag = ratio(logp - logp_old)                                # (B, T) r = pi / pi_old
        self.sequence = ratio(total)                                     # (B, 1) prod_t rho
        self.mean_log = total / mask.sum(1, keepdim=True).clamp(min=1)   # (B, 1) mean_t log rho


def between(x: Tensor, low: float, high: float) -> Tensor:
    return (x >= low) & (x <= high)


def ppo_keeps(r: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """PPO's clip as a mask (B, T), arXiv 1707.06347. The gradient of min(r A, clip(r, 1 - low,
    1 + high) A) is that of r A where this is True, and 0 elsewhere."""
    A = advantage[:, None]
    return ~(((A > 0) & (r > 1 + high)) | ((A < 0) & (r < 1 - low)))


def binary_kl(logp: Tensor, logp_sampler: Tensor) -> Tensor:
    """The larger of KL(p || q), KL(q || p) over the two events {this token, any other}, in nats."""
    p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (logp, logp_sampler))
    this, other = (p / q).log(), ((1 - p) / (1 - q)).log()
    return torch.maximum(p * this + (1 - p) * other, -q * this - (1 - q) * other)


# Each weight is one line: a function of x: Ratios. rho covers discrepancy and lag together. (Yao et
# al. cap pi_old / mu, beside PPO's clipped r. DeepSeek's pi_old is our mu.) The unit of KPop's phi is
# not settled: choose phi by the share of tokens that it masks, which is said to be 10 to 30 %.
def none(x):                       return torch.ones_like(x.token)       # mu's samples pass for pi's
# one weight per token
def token_is(x):                   return x.token
def tis(x, C=2.0):                 return x.token.clamp(max=C)           # Yao et al. 2025
def icepop(x, low=0.5, high=5.0):  return x.token * between(x.token, low, high)  # arXiv 2510.18855
def kpop(x, phi=0.05):             return (binary_kl(x.logp, x.logp_sampler) <= phi).to(x.token)
# one weight per response
def seq_is(x):                     return x.sequence                     # exact
def seq_tis(x, C=2.0):             return x.sequence.clamp(max=C)        # richardli.xyz/rl-collapse
def seq_mis(x, C=2.0):             return x.sequence * (x.sequence <= C)            # the same page
def geo(x):                        return ratio(x.mean_log)              # GSPO, arXiv 2507.18071
def snis(x):                       return x.sequence / x.sequence[x.mask.any(1)].mean()
# a trust region
def ppo(x, low=0.2, high=0.2):     return x.lag * ppo_keeps(x.lag, x.advantage, low, high)
def minirl(x, low=0.2, high=0.27, C=5.0):                                # arXiv 2512.01374
    return x.token.clamp(max=C) * ppo_keeps(x.lag, x.advantage, low, high)
def dsv32(x, delta=0.5, low=0.2, high=0.2):                              # arXiv 2512.02556
    dropped = (x.advantage[:, None] < 0) & (-x.mean_log > delta)
    return x.token * ppo_keeps(x.token, x.advantage, low, high) * ~dropped


def correction(f):
    """Puts the contract of all weights around f(x, **settings) -> (B, T) or (B, 1). The result is a
    function (logp, logp_old, logp_sampler, advantage, mask, **settings) -> (B, T), whose weights are
    constants to the gradient, and 0 on padding."""
    @torch.no_grad()
    def weight(logp, logp_old, logp_sampler, advantage, mask, **settings):
        return inside(mask, f(Ratios(logp, logp_old, logp_sampler, advantage, mask), **settings))
    return weight


CORRECTIONS = {f.__name__.replace("_", "-"): correction(f) for f in (   # train.py --correction NAME
    none, token_is, tis, icepop, kpop, seq_is, seq_tis, seq_mis, geo, snis, ppo, minirl, dsv32)}


def ess(log_weight: Tensor) -> float:
    """Effective sample size of n weights, from their logs (n,), as a share of n. Raises ValueError
    if there is no weight above 0 (log -inf), or one that is NaN or infinite."""
    x = log_weight.double()
    if not len(x) or not x.max().isfinite():
        raise ValueError("an effective sample size needs finite weights, at least one above 0")
    w = (x - x.max()).exp()              # the largest is 1: no overflow, and no rounding of 1/2
    # (sum w)^2 / (n sum w^2)
    return (w.sum()**2 / (len(w) * w.square().sum())).item()


# ---------------------------------------------------------------- the exact world
@dataclass
class World:
    """All B = V^T responses of a tabular policy, in float64. Response i spells i in base V."""
    V: int
    T: int
    tables: dict[str, list[Tensor]]      # "pi", "old", "mu": T tables (V^t, V), log-probs per prefix
    R: Tensor                            # (B,) reward of the response

    def __post_init__(self):
        self.logp, self.logp_old, self.logp_sampler = map(self.of_tokens, self.tables.values())
        self.mu = self.logp_sampler.sum(1).exp()                # (B,) the sampler draws it so often
        self.A = self.R - self.mu @ self.R                      # (B,) b = E_mu[R]
        self.pi = [logp.exp() for logp in self.tables["pi"]]
        # ||s_t||^2 = ||e_a - pi||^2 = 1 - 2 pi_a + sum_v pi_v^2
        sums = [pi.square().sum(1, keepdim=True).expand_as(pi) for pi in self.pi]
        self.score_norm2 = 1 - 2 * self.logp.exp() + self.of_tokens(sums)                    # (B, T)
        # grad J, by enumeration under pi itself
        A_under_pi = self.logp.sum(1).exp() * self.A
        self.true_gradient = self.gradient(A_under_pi[:, None].expand_as(self.logp))

    def of_tokens(self, tables: list[Tensor]) -> Tensor:
        """The entries (B, T) that belong to the responses' tokens, from T tables (V^t, V)."""
        return torch.stack([table.flatten().repeat_interleave(self.V**(self.T - 1 - t))
                            for t, table in enumerate(tables)], 1)

    def weights(self, name: str, **settings) -> Tensor:
        """(B, T), by the very function that train.py uses."""
        mask = torch.ones_like(self.logp, dtype=torch.bool)
        return CORRECTIONS[name](self.logp, self.logp_old, self.logp_sampler, self.A, mask, **settings)

    def gradient(self, coefficient: Tensor) -> Tensor:
        """sum over responses and tokens of coefficient (B, T) x s_t, in the logits of all prefixes."""
        parts = []
        for t, pi in enumerate(self.pi):
            at = coefficient[:, t].view(*pi.shape, -1).sum(-1)             # (V^t, V)
            # in the logits of its own prefix, grad log pi(a) = e_a - pi
            parts.append((at - pi * at.sum(1, keepdim=True)).flatten())
        return torch.cat(parts)

    def expected(self, w: Tensor) -> Tensor:
        """E_mu[g], g = sum_t w_t A s_t."""
        return self.gradient((self.mu * self.A)[:, None] * w)

    def second_moment(self, w: Tensor) -> Tensor:
        """E_mu||g||^2. A response's tokens stand at different prefixes, whose logits are different
        coordinates: the squares add."""
        return self.mu @ ((w * self.A[:, None])**2 * self.score_norm2).sum(1)


def make_world(discrepancy: float, lag: float, seed: int, V=4, T=6, same_everywhere=False) -> World:
    """pi_old has the same V probabilities at every prefix, each time in another order. The logits of
    pi differ from pi_old's by `lag` x noise, those of mu by `discrepancy` x noise, drawn anew at each
    prefix. With `same_everywhere` the noise is shuffled along with the probabilities, so that chi^2
    is the same everywhere. Reward 1 if the tokens sum to 0 modulo V: each of them can spoil it."""
    rng = torch.Generator().manual_seed(seed)
    base, lag_noise, engine_noise = torch.randn(3, V, generator=rng, dtype=torch.float64)
    tables = {"pi": [], "old": [], "mu": []}
    for t in range(T):
        order = torch.rand(V**t, V, generator=rng, dtype=torch.float64).argsort(1)
        noise = lag_noise[order], engine_noise[order]
        if not same_everywhere:
            noise = torch.randn(2, V**t, V, generator=rng, dtype=torch.float64)
        tables["pi"].append((base[order] + lag * noise[0]).log_softmax(-1))
        tables["old"].append(base[order].log_softmax(-1))
        tables["mu"].append((base[order] + discrepancy * noise[1]).log_softmax(-1))
    tokens = torch.cartesian_prod(*[torch.arange(V)] * T).view(-1, T)
    return World(V, T, tables, (tokens.sum(1) % V == 0).double())


def relative(truth: Tensor, bias: Tensor, variance: Tensor, n: int) -> dict:
    """Bias and variance relative to the true gradient, and the error of n samples' mean."""
    size2, expected = truth @ truth, truth + bias
    bias2, variance = bias.square().sum() / size2, variance / size2
    cosine = expected @ truth / expected.norm() / truth.norm()
    return {"bias": bias2.sqrt().item(), "cosine": cosine.item(), "variance": variance.item(),
            "MSE": (bias2 + variance / n).item(), "||grad J||": size2.sqrt().item()}


def moments(world: World, w: Tensor) -> dict:
    """Exact bias and variance under the weights w (B, T)."""
    expected = world.expected(w)
    variance = world.second_moment(w) - expected @ expected
    return relative(world.true_gradient, expected - world.true_gradient, variance, N_SAMPLES)


def snis_moments(world: World, n: int = N_SAMPLES) -> dict:
    """Self-normalized IS is a ratio of two means. By the delta method, with f = A sum_t s_t, its bias
    is -E_mu[rho^2 (f - grad J)] / n, and its variance that of rho (f - grad J)."""
    truth, rho = world.true_gradient, world.weights("seq-is")
    rho2, rho2_f = world.mu @ rho[:, 0]**2, world.expected(rho**2)         # E[rho^2], E[rho^2 f]
    variance = world.second_moment(rho) - 2 * truth @ rho2_f + rho2 * truth @ truth
    return relative(truth, -(rho2_f - rho2 * truth) / n, variance, n)


def kpop_phi(world: World, share: float = 0.1) -> float:
    """The phi that masks about this share of the tokens, and at least one."""
    kl, order = binary_kl(world.logp, world.logp_sampler).flatten().sort()
    p = (world.mu[:, None] / world.T).expand_as(world.logp).flatten()[order]   # of each token
    phi = kl.round(decimals=6).unique() + 1e-6
    masked = 1 - p.cumsum(0)[torch.searchsorted(kl, phi, right=True) - 1]
    phi, masked = phi[masked > 1e-12], masked[masked > 1e-12]
    return phi[(masked - share).abs().argmin()].item()


def all_moments(world: World) -> dict:
    """{name: moments} of every weight."""
    settings = {"kpop": {"phi": kpop_phi(world)}}
    result = {name: moments(world, world.weights(name, **settings.get(name, {})))
              for name in CORRECTIONS}
    return {**result, "snis": snis_moments(world)}


def exact_world(seed: int, T: int, worlds: int) -> list[dict]:
    """Moments of every weight, averaged over a few worlds: by noise, and at noise 0.4 by length."""
    rows = []
    for noise, t in tqdm([*((noise, T) for noise in NOISES), *((0.4, t) for t in range(1, T))],
                         desc="exact world"):
        each = [all_moments(make_world(noise, noise, seed + k, T=t)) for k in range(worlds)]
        for name in CORRECTIONS:
            mean = {key: float(np.mean([m[name][key] for m in each])) for key in each[0][name]}
            rows.append({"noise": noise, "T": t, "weight": name, **mean,
                         "± worlds": float(np.std([m[name]["bias"] for m in each], ddof=1))})
    return rows


# ---------------------------------------------------------------- predicted | measured
def chi2(world: World) -> Tensor:
    """chi^2(pi || mu) = sum_a pi^2 / mu - 1 at every prefix, all in one vector."""
    return torch.cat([(pi**2 / mu.exp()).sum(1) - 1 for pi, mu in zip(world.pi, world.tables["mu"])])


def laws(seed: int, T: int, rows: list[dict]) -> list[dict]:
    """What theory says of the exact world, beside what the world does. rows: exact_world's."""
    result = []

    def law(text: str, predicted, measured):
        result.append({"law": text, "predicted": float(predicted), "measured": float(measured)})

    def second(world: World):                                                # E_mu[w^2]
        return world.mu @ world.weights("seq-is")[:, 0]**2

    world = make_world(0.2, 0.2, seed, T=T)
    law("sequence IS: bias", 0, moments(world, world.weights("seq-is"))["bias"])
    for t in range(1, T + 1):
        world = make_world(0.6, 0.6, seed, T=t, same_everywhere=True)
        law(f"sequence IS: E[w^2] = (1 + chi^2)^T, T = {t}", (1 + chi2(world)[0])**t, second(world))
    world = make_world(0.1, 0.1, seed, T=T)
    law("  where chi^2 differs: at most (1 + max chi^2)^T", (1 + chi2(world).max())**T, second(world))

    # TIS at one prefix: E_mu[min(rho, C) A s] - E_pi[A s] = -E_mu[(rho - C)+ A s]
    world, C = make_world(0.6, 0.6, seed, T=1, same_everywhere=True), 1.2
    bias = world.expected(world.weights("tis", C=C)) - world.true_gradient
    predicted = world.expected((world.weights("token-is") - C).clamp(min=0))
    law(f"TIS, T = 1, C = {C}: bias = ||E[(rho - C)+ A s]||", predicted.norm(), bias.norm())

    # the token weight: prod_t' (1 + delta_t') - (1 + delta_t) = sum_{t' != t} delta_t' + ...
    world = make_world(0.05, 0.05, seed, T=T)
    rho = world.weights("token-is")
    first_order = world.expected((rho - 1).sum(1, keepdim=True) - (rho - 1))
    law("token-is: bias, about ||E[sum_{t' != t} delta_t' A s_t]||", first_order.norm(),
        world.expected(world.weights("seq-is") - rho).norm())
    for name in ("none", "token-is"):
        two = [make_world(noise, noise, seed, T=T) for noise in (0.01, 0.02)]
        half, whole = (moments(world, world.weights(name))["bias"] for world in two)
        law(f"{name}: bias when the mismatch is halved, times", 0.5, half / whole)
        mine = [r for r in rows if r["weight"] == name and r["noise"] == 0.4 and r["T"] > 1]
        lengths, bias, size = (np.log([r[key] for r in mine]) for key in ("T", "bias", "||grad J||"))
        law(f"{name}: bias grows like T^x, x at most", 2, np.polyfit(lengths, bias + size, 1)[0])
        law("  relative to the gradient, which shrinks", np.nan, np.polyfit(lengths, bias, 1)[0])

    # C = sqrt(2 E[w^2]) n^(1/4) is best for a bound, (2 M E[w^2] / C)^2 + M^2 C^2 / n
    world, caps = make_world(0.4, 0.4, seed, T=T), np.geomspace(0.01, 300, 80)
    errors = [moments(world, world.weights("seq-tis", C=C)) for C in caps]
    for n in (256, 65_536):
        best = np.argmin([m["bias"]**2 + m["variance"] / n for m in errors])
        law(f"seq-tis: the best cap of a bound; the best cap, n = {n}",
            (2 * second(world))**0.5 * n**0.25, caps[best])
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for std in (0.3, 0.83):
        law(f"log-normal weights, std {std}: ESS = exp(-Var log w)", np.exp(-std**2), ess(std * x))
    return result


# ---------------------------------------------------------------- real rollouts
def weight_statistics(log_ratio: Tensor, mask: Tensor) -> dict:
    """What the weights pi / mu of real responses look like, from log pi - log mu (B, T) in nats."""
    log_ratio = log_ratio.double()
    token, response = log_ratio[mask], sequence_sum(log_ratio, mask)[mask.any(1), 0]
    prefix = inside(mask, log_ratio).cumsum(1)             # (B, T) log-weight of the first t tokens
    w, lengths = ratio(token), [t for t in range(mask.shape[1]) if mask[:, t].any()]
    return {"tokens": len(w), "mean weight": w.mean().item(), "± s.e.": (w.std() / len(w)**0.5).item(),
            "chi^2": w.var().item(), "ESS of tokens": ess(token), "ESS of responses": ess(response),
            "exp(-Var)": (-response.var()).exp().item(),   # the ESS of log-normal weights
            "mean weight of responses": ratio(response).mean().item(),
            "share > 2": (w > 2).double().mean().item(),
            "outside [.5, 5]": (~between(w, 0.5, 5)).double().mean().item(),
            "ESS by length": [ess(prefix[mask[:, t], t]) for t in lengths]}


def real_world(path: str, trainer, tokenizer, seed: int, quick: bool) -> list[dict]:
    """Weights of responses that vLLM sampled: the natural gap, one bug of lesson 1, stale weights."""
    n, max_tokens, lr = SIZES[lesson1.scale(tokenizer)]
    sampler, rng, rows = lesson1.Sampler(path), np.random.default_rng(seed), []
    digits, prompts = lesson1.make_prompts(lesson1.SUM, tokenizer, n // 8 if quick else n, rng)
    rollout = sampler.sample(prompts, max_tokens, seed=[seed, 0])
    top_k = sampler.sample(prompts, max_tokens, seed=[seed, 0], top_k=3)

    def add(name, model, r):
        statistics = weight_statistics(lesson1.logprobs(model, r) - r.logp_sampler, r.mask)
        rows.append({"rollouts": name, **statistics})

    add("natural: bf16 vLLM, fp32 trainer", trainer, rollout)
    add("bug: top-k 3 in the sampler only", trainer, top_k)
    R = lesson1.varied(lesson1.rewards(lesson1.SUM, digits, rollout, tokenizer))
    ahead = copy.deepcopy(trainer)
    for step in range(1, 9):             # each the first step of a new Adam, all on one batch
        lesson1.one_step(ahead, rollout, R, lr)
        if step in (1, 2, 8):
            add(f"stale: trainer {step} step{'s' * (step > 1)} ahead", ahead, rollout)
    return rows


def verdict(rollouts: list[dict]) -> str:
    """The result read aloud. It follows the numbers."""
    natural, stale = rollouts[0], rollouts[-1]["ESS of responses"]
    ess, mean = natural["ESS of responses"], natural["mean weight"]
    finding = "there is nothing to correct"
    if abs(mean - 1) > 0.01:
        finding = "the recorded mu is not what sampled"
    if ess < 0.99:
        finding = "there is something to correct"
    return (f"At the natural gap the ESS of responses is {ess:.4f} and the mean token weight {mean:.4f}: "
            f"{finding}. Eight steps ahead the ESS is {stale:.4f}.")


def main(argv=None) -> dict:
    args, trainer, tokenizer = lesson1.arguments(__file__, __doc__, argv)
    T, worlds = (4, 2) if args.quick else (6, 5)
    rows = exact_world(args.seed, T, worlds)
    theory = laws(args.seed, T, rows)
    rollouts = real_world(args.path, trainer, tokenizer, args.seed, args.quick)
    for noise in (0.1, 0.4):
        lesson1.table(f"exact world, T = {T}, noise {noise}: relative to the true gradient, n = {N_SAMPLES}",
                      [row for row in rows if row["noise"] == noise and row["T"] == T],
                      "weight", "bias", "± worlds", "cosine", "variance", "MSE")
    lesson1.table("predicted | measured", theory)
    lesson1.table("real rollouts: w = pi / mu, of mean 1", rollouts, *list(rollouts[0])[:-1])
    print(f"\n{verdict(rollouts)}")
    result = {"moments": rows, "laws": theory, "rollouts": rollouts}
    return lesson1.save({"model": args.path, "seed": args.seed, **result}, args.json)


if __name__ == "__main__":
    main()
