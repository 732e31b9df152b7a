"""Lesson 2's objective and weights against slow specifications, and against the wrong versions."""
import json
import math
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from conftest import rejected

lesson2 = import_module("02_importance_sampling")


# ---------------------------------------------------------------- advantages
def check_advantages(f):
    R = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.2, 0.2, 0.2, 0.8])
    A = f(R, 4, "std")
    assert torch.allclose(A[:4], torch.tensor([1.0, -1.0, -1.0, 1.0]))
    s = math.sqrt(3)
    assert torch.allclose(A[4:], torch.tensor([-1 / s, -1 / s, -1 / s, s]), atol=1e-6)
    assert torch.allclose(f(R, 4, "mean"), torch.tensor([0.5, -0.5, -0.5, 0.5, -0.15, -0.15, -0.15, 0.45]))
    assert torch.equal(f(R, 4, "raw"), R)
    for kind in ("std", "mean"):
        for value in (0.0, 1.0, 0.1, 1 / 3, 0.7):                       # 0.1 eight times: the float mean is not 0.1
            assert (f(torch.full((16,), value), 8, kind) == 0).all()


def wrong_advantages(group):
    def f(R, group_size, kind):
        return R if kind == "raw" else group(R, group_size, kind).flatten()
    return f


WRONG_ADVANTAGES = {
    "mean of the batch": wrong_advantages(lambda R, G, k: (R - R.mean()) / (R.std(correction=0) if k == "std" else 1)),
    "sample's std": wrong_advantages(lambda R, G, k: ((g := R.view(-1, G)) - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-8 if k == "std" else 1)),
    "groups interleaved": wrong_advantages(lambda R, G, k: ((g := R.view(G, -1)) - g.mean(0)) / (g.std(0, correction=0) + 1e-8 if k == "std" else 1)),
    "epsilon instead of a rule": wrong_advantages(lambda R, G, k: ((g := R.view(-1, G)) - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True, correction=0) + 1e-8 if k == "std" else 1)),
    "equal groups give NaN": wrong_advantages(lambda R, G, k: ((g := R.view(-1, G)) - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True, correction=0) if k == "std" else 1)),
}


def test_advantages():
    check_advantages(lesson2.advantages)


@pytest.mark.parametrize("name", WRONG_ADVANTAGES)
def test_advantages_rejects(name):
    rejected(check_advantages, WRONG_ADVANTAGES[name])


# ---------------------------------------------------------------- the loss
def check_policy_loss(f):
    # a fixed denominator: two of five tokens kept
    log_ratio = torch.tensor([[0.1, -1.5, 0.8, -10.0, 0.3]])
    mask, one = torch.ones(1, 5, dtype=torch.bool), torch.ones(1)
    weight = log_ratio.exp() * torch.tensor([[1, 0, 0, 0, 1]])
    logp = torch.full((1, 5), -1.0, requires_grad=True)
    loss = f(logp, weight, one, mask, 5)
    assert abs(loss.item() - 0.4910) < 1e-4
    loss.backward()
    assert torch.allclose(logp.grad, -weight / 5)
    # all masked: 0, with gradients that are finite and 0
    logp = torch.full((1, 5), -math.inf, requires_grad=True)
    loss = f(logp, torch.zeros(1, 5), one, ~mask, 5)
    loss.backward()
    assert loss.item() == 0 and (logp.grad == 0).all()
    # padded rows do not dilute: 1 per token is 1
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert f(torch.full((2, 4), -1.0), torch.ones(2, 4), torch.ones(2), mask, 4).item() == 1.0
    # a sequence's advantage goes to each of its tokens, the centre is subtracted before
    logp = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    loss = f(logp, torch.tensor([[2.0, 1.0], [1.0, 1.0]]), torch.tensor([1.0, -0.5]), torch.ones(2, 2, dtype=torch.bool), 4,
             torch.full((2, 2), 0.25))
    assert abs(loss.item() - -(1 * (-2 - 0.25 - 2 - 0.25) - 0.5 * (-3 - 0.25 - 4 - 0.25)) / 4) < 1e-6


WRONG_LOSS = {
    "mean over what survived": lambda p, w, A, m, n, c=0.0: -((A[:, None] * (w * p - c) * m).sum()) / max(int(((w != 0) & m).sum()), 1),
    "mean over padding too": lambda p, w, A, m, n, c=0.0: -torch.where(m, A[:, None] * (w * p - c), 0.0).mean(),
    "mean of the sequences' means": lambda p, w, A, m, n, c=0.0: -(torch.where(m, A[:, None] * (w * p - c), 0.0).sum(1) / m.sum(1).clamp(min=1)).mean(),
    "sign": lambda p, w, A, m, n, c=0.0: -lesson2.policy_loss(p, w, A, m, n, c),
    "mask multiplied": lambda p, w, A, m, n, c=0.0: -(A[:, None] * (w * p - c) * m).sum() / n,
    "centre added": lambda p, w, A, m, n, c=0.0: lesson2.policy_loss(p, w, A, m, n, -c if isinstance(c, torch.Tensor) else c),
    "centre weighted": lambda p, w, A, m, n, c=0.0: lesson2.policy_loss(p - c, w, A, m, n),
    "advantages of the sequences mixed": lambda p, w, A, m, n, c=0.0: lesson2.policy_loss(p, w, A.flip(0), m, n, c),
}


def test_policy_loss():
    check_policy_loss(lesson2.policy_loss)


@pytest.mark.parametrize("name", WRONG_LOSS)
def test_policy_loss_rejects(name):
    rejected(check_policy_loss, WRONG_LOSS[name])


# ---------------------------------------------------------------- the weights
@pytest.mark.parametrize("name", lesson2.CORRECTIONS)
def test_every_weight_keeps_the_contract(name):
    """Detached, 0 where masked, finite at any log-ratio, untouched by what stands in the padding."""
    generator = torch.Generator().manual_seed(0)
    logp, old, sampler = (-torch.rand(4, 6, generator=generator).requires_grad_() for _ in range(3))
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 0])[:, None]
    A = torch.tensor([1.0, -1.0, 0.5, 0.0])
    weight = lesson2.CORRECTIONS[name]
    w = weight(logp, old, sampler, A, mask)
    assert w.shape == (4, 6) and not w.requires_grad and (w[~mask] == 0).all() and (w >= 0).all()
    noisy = torch.where(mask, logp, -1e4)
    assert torch.equal(weight(noisy, torch.where(mask, old, 3.0), torch.where(mask, sampler, 0.0), A, mask), w)
    far = weight(logp, old, sampler - 100, A, mask)
    assert torch.isfinite(far).all() and torch.isfinite(weight(logp - 100, old, sampler, A, mask)).all()
    loss = lesson2.policy_loss(logp, weight(logp, old - 100, sampler - 200, torch.zeros(4), mask), torch.zeros(4), mask, 11)
    assert loss.item() == 0                                             # advantage 0 times a huge weight: 0, not NaN


# A slow specification of every weight: one response (lists over its tokens), one token t at a time.
# p, o, q: log pi, log pi_old, log mu; A: its advantage; others: the whole batch's (p, q), for snis.
def product(p, q):
    return math.exp(sum(p) - sum(q))


def clipped(r, A, low, high):
    """Would min(r A, clip(r) A) be flat here?"""
    return abs(A) > 0 and min(r * A, max(1 - low, min(r, 1 + high)) * A) != r * A


def two_event_kl(a, b):
    return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))


SPEC = {
    "none": lambda p, o, q, A, t, others: 1.0,
    "token-is": lambda p, o, q, A, t, others: math.exp(p[t]) / math.exp(q[t]),
    "tis": lambda p, o, q, A, t, others: min(math.exp(p[t] - q[t]), 2.0),
    "icepop": lambda p, o, q, A, t, others: math.exp(p[t] - q[t]) if 0.5 <= math.exp(p[t] - q[t]) <= 5.0 else 0.0,
    "kpop": lambda p, o, q, A, t, others: float(max(two_event_kl(math.exp(p[t]), math.exp(q[t])), two_event_kl(math.exp(q[t]), math.exp(p[t]))) <= 0.05),
    "seq-is": lambda p, o, q, A, t, others: product(p, q),
    "seq-tis": lambda p, o, q, A, t, others: min(product(p, q), 2.0),
    "seq-mis": lambda p, o, q, A, t, others: product(p, q) if product(p, q) <= 2.0 else 0.0,
    "geo": lambda p, o, q, A, t, others: product(p, q) ** (1 / len(p)),
    "snis": lambda p, o, q, A, t, others: product(p, q) / (sum(product(*each) for each in others) / len(others)),
    "ppo": lambda p, o, q, A, t, others: 0.0 if clipped(math.exp(p[t] - o[t]), A, 0.2, 0.2) else math.exp(p[t] - o[t]),
    "minirl": lambda p, o, q, A, t, others: 0.0 if clipped(math.exp(p[t] - o[t]), A, 0.2, 0.27) else min(math.exp(p[t] - q[t]), 5.0),
    "dsv32": lambda p, o, q, A, t, others: 0.0 if (clipped(math.exp(p[t] - q[t]), A, 0.2, 0.2) or A < 0 and (sum(q) - sum(p)) / len(p) > 0.5) else math.exp(p[t] - q[t]),
}


def check_weight(name, f):
    """A batch in which every cap, band and clip bites somewhere and spares somewhere; padding holds rubbish."""
    generator = torch.Generator().manual_seed(3)
    B, T = 24, 7
    old = -2.5 * torch.rand(B, T, generator=generator, dtype=torch.float64) - 0.05
    logp = (old + 0.35 * torch.randn(B, T, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    sampler = (old + 0.7 * torch.randn(B, T, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    sampler[:4] = (sampler[:4] + 1.2).clamp(max=-0.01)                                   # responses that mu likes much better
    sampler[4:8, ::2] -= 2.0                                                             # and tokens that pi does
    lengths = [1 + i % T for i in range(B)]
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    A = torch.tensor([1.0, -1.0, 0.5, -0.3, 0.0, 2.0, -2.0, 1.0] * 3, dtype=torch.float64)
    full = [x.masked_fill(~mask, 5.0 * (i + 1)).requires_grad_(i == 0) for i, x in enumerate((logp, old, sampler))]
    w = f(*full, A, mask)
    assert not w.requires_grad, "the weight is a constant to the gradient"
    rows = [[x[i, :n].tolist() for x in (logp, old, sampler)] for i, n in enumerate(lengths)]
    others = [(p, q) for p, _, q in rows]
    for i, (p, o, q) in enumerate(rows):
        for t in range(lengths[i]):
            right = SPEC[name](p, o, q, A[i].item(), t, others)
            assert abs(w[i, t].item() - right) < 1e-9 * max(1, right), (i, t)
        assert (w[i, lengths[i]:] == 0).all()
    # overflow: a log-ratio of 100 and advantage 0 make a loss of 0, not NaN
    far = f(torch.full((1, 2), -1.0), torch.full((1, 2), -1.0), torch.full((1, 2), -101.0), torch.zeros(1), torch.ones(1, 2, dtype=torch.bool))
    assert torch.isfinite(far).all()
    if name == "token-is":
        assert abs(far[0, 0].item() / math.exp(20) - 1) < 1e-5
    # an empty response counts for nothing
    p, q, some = torch.tensor([[-1.0], [-1.0], [-9.0]]), torch.tensor([[-2.0], [-1.0], [-1.0]]), torch.tensor([[True], [True], [False]])
    w = f(p, p, q, torch.ones(3), some)
    right = [SPEC[name]([x], [x], [y], 1.0, 0, [([-1.0], [-2.0]), ([-1.0], [-1.0])]) for x, y in ((-1.0, -2.0), (-1.0, -1.0))]
    assert torch.allclose(w[:, 0], torch.tensor([*right, 0.0]), atol=1e-6)
    # nothing left: all masked
    nothing = f(torch.full((2, 2), -1.0), torch.full((2, 2), -1.0), torch.full((2, 2), -2.0), torch.ones(2), torch.zeros(2, 2, dtype=torch.bool))
    assert (nothing == 0).all()


@pytest.mark.parametrize("name", SPEC)
def test_weight(name):
    check_weight(name, lesson2.CORRECTIONS[name])


def e(x):
    return x.detach().clamp(-20, 20).exp()


def where(m, x):
    return torch.where(m, x, 0.0)


def total(p, s, m):
    return where(m, (p - s).detach()).sum(1, keepdim=True)


def spread(x, m):
    return where(m, x.expand_as(m))


WRONG_WEIGHTS = [
    ("token-is", "not detached", lambda p, o, s, A, m: where(m, (p - s).clamp(-20, 20).exp())),
    ("token-is", "upside down", lambda p, o, s, A, m: where(m, e(s - p))),
    ("token-is", "old for current", lambda p, o, s, A, m: where(m, e(o - s))),
    ("token-is", "lag only", lambda p, o, s, A, m: where(m, e(p - o))),
    ("token-is", "corrected twice", lambda p, o, s, A, m: where(m, e(p - s) * e(o - s))),
    ("token-is", "padding included", lambda p, o, s, A, m: e(p - s)),
    ("token-is", "overflows", lambda p, o, s, A, m: where(m, (p - s).detach().exp())),
    ("tis", "cap on the log-ratio", lambda p, o, s, A, m: where(m, e((p - s).clamp(max=2)))),
    ("tis", "masked, not capped", lambda p, o, s, A, m: where(m, e(p - s) * (e(p - s) <= 2))),
    ("tis", "floored too", lambda p, o, s, A, m: where(m, e(p - s).clamp(0.5, 2))),
    ("tis", "discrepancy only", lambda p, o, s, A, m: where(m, e(o - s).clamp(max=2))),
    ("tis", "the gradient flows through", lambda p, o, s, A, m: where(m, (p - s).clamp(-20, 20).exp().clamp(max=2))),
    ("icepop", "clamped to the band", lambda p, o, s, A, m: where(m, e(p - s).clamp(0.5, 5))),
    ("icepop", "band on the inverse ratio", lambda p, o, s, A, m: where(m, e(p - s) * ((e(s - p) >= 0.5) & (e(s - p) <= 5)))),
    ("icepop", "indicator only", lambda p, o, s, A, m: where(m, ((e(p - s) >= 0.5) & (e(p - s) <= 5)).double())),
    ("icepop", "survivors rescaled", lambda p, o, s, A, m: (lambda w: w * m.sum() / (w > 0).sum().clamp(min=1))(where(m, e(p - s) * ((e(p - s) >= 0.5) & (e(p - s) <= 5))))),
    ("kpop", "one direction only", lambda p, o, s, A, m: where(m, ((a := e(p)) * (a / e(s)).log() + (1 - a) * ((1 - a) / (1 - e(s))).log() <= 0.05).double())),
    ("kpop", "without the other event", lambda p, o, s, A, m: where(m, (torch.maximum(e(p) * (p - s), e(s) * (s - p)) <= 0.05).double())),
    ("seq-is", "mean for sum", lambda p, o, s, A, m: spread(e(total(p, s, m) / m.sum(1, keepdim=True).clamp(min=1)), m)),
    ("seq-is", "padding in the product", lambda p, o, s, A, m: spread(e((p - s).sum(1, keepdim=True)), m)),
    ("seq-is", "product up to the token", lambda p, o, s, A, m: where(m, e(where(m, (p - s).detach()).cumsum(1)))),
    ("seq-is", "product over the batch", lambda p, o, s, A, m: where(m, e(total(p, s, m).sum()).expand_as(p))),
    ("seq-tis", "each token capped", lambda p, o, s, A, m: spread(where(m, e(p - s).clamp(max=2)).masked_fill(~m, 1).prod(1, keepdim=True), m)),
    ("seq-tis", "dropped, not capped", lambda p, o, s, A, m: spread(e(total(p, s, m)) * (e(total(p, s, m)) <= 2), m)),
    ("seq-tis", "cap on the sum of logs", lambda p, o, s, A, m: spread(e(total(p, s, m).clamp(max=2)), m)),
    ("seq-mis", "capped, not dropped", lambda p, o, s, A, m: spread(e(total(p, s, m)).clamp(max=2), m)),
    ("seq-mis", "small ratios dropped too", lambda p, o, s, A, m: spread((r := e(total(p, s, m))) * (r <= 2) * (r >= 0.5), m)),
    ("seq-mis", "indicator only", lambda p, o, s, A, m: spread((e(total(p, s, m)) <= 2).double(), m)),
    ("geo", "sum for mean", lambda p, o, s, A, m: spread(e(total(p, s, m)), m)),
    ("geo", "divided by the padded length", lambda p, o, s, A, m: spread(e(total(p, s, m) / p.shape[1]), m)),
    ("geo", "arithmetic mean of ratios", lambda p, o, s, A, m: spread(where(m, e(p - s)).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1), m)),
    ("snis", "sum to one", lambda p, o, s, A, m: spread((r := e(total(p, s, m))) / r[m.any(1)].sum(), m)),
    ("snis", "normalised by the tokens' mean", lambda p, o, s, A, m: spread((r := e(total(p, s, m))) / where(m, r.expand_as(p)).sum() * m.sum(), m)),
    ("snis", "not normalised", lambda p, o, s, A, m: spread(e(total(p, s, m)), m)),
    ("ppo", "ratio against mu", lambda p, o, s, A, m: where(m, e(p - s) * lesson2.ppo_keeps(e(p - s), A, 0.2, 0.2))),
    ("ppo", "clipped whatever the sign", lambda p, o, s, A, m: where(m, e(p - o) * ((e(p - o) >= 0.8) & (e(p - o) <= 1.2)))),
    ("ppo", "signs swapped", lambda p, o, s, A, m: where(m, e(p - o) * lesson2.ppo_keeps(e(p - o), -A, 0.2, 0.2))),
    ("ppo", "clamped, gradient kept", lambda p, o, s, A, m: where(m, e(p - o).clamp(0.8, 1.2))),
    ("minirl", "clip on the whole ratio", lambda p, o, s, A, m: where(m, e(p - s).clamp(max=5) * lesson2.ppo_keeps(e(p - s), A, 0.2, 0.27))),
    ("minirl", "lag for the weight", lambda p, o, s, A, m: where(m, e(p - o).clamp(max=5) * lesson2.ppo_keeps(e(p - o), A, 0.2, 0.27))),
    ("minirl", "untruncated", lambda p, o, s, A, m: where(m, e(p - s) * lesson2.ppo_keeps(e(p - o), A, 0.2, 0.27))),
    ("dsv32", "both signs masked", lambda p, o, s, A, m: where(m, e(p - s) * lesson2.ppo_keeps(e(p - s), A, 0.2, 0.2)) * (-total(p, s, m) / m.sum(1, keepdim=True).clamp(min=1) <= 0.5)),
    ("dsv32", "sum for mean", lambda p, o, s, A, m: where(m, e(p - s) * lesson2.ppo_keeps(e(p - s), A, 0.2, 0.2)) * ~((A[:, None] < 0) & (-total(p, s, m) > 0.5))),
    ("dsv32", "direction of the mean", lambda p, o, s, A, m: where(m, e(p - s) * lesson2.ppo_keeps(e(p - s), A, 0.2, 0.2)) * ~((A[:, None] < 0) & (total(p, s, m) / m.sum(1, keepdim=True).clamp(min=1) > 0.5))),
]


@pytest.mark.parametrize("name, wrong", [(n, f) for n, _, f in WRONG_WEIGHTS], ids=[f"{n}: {why}" for n, why, _ in WRONG_WEIGHTS])
def test_weight_rejects(name, wrong):
    rejected(lambda f: check_weight(name, f), wrong)


def test_three_policies_on_fixed_numbers():
    """mu = -1.00, old = -1.10, new = -1.40: discrepancy -0.10, lag -0.30, total -0.40."""
    p, o, s = (torch.tensor([[x]]) for x in (-1.40, -1.10, -1.00))
    mask, A = torch.ones(1, 1, dtype=torch.bool), torch.ones(1)
    w = {name: f(p, o, s, A, mask).item() for name, f in lesson2.CORRECTIONS.items()}
    assert abs(w["tis"] - 0.67032) < 1e-5 and abs(w["token-is"] - 0.67032) < 1e-5 and abs(w["ppo"] - math.exp(-0.3)) < 1e-5


def test_a_sequence_ratio_grows_with_length_and_its_geometric_mean_does_not():
    for T, right in ((10, 1.127), (100, 3.320)):
        mask = torch.ones(1, T, dtype=torch.bool)
        p, s, A = torch.full((1, T), -0.988), torch.full((1, T), -1.0), torch.ones(1)
        assert abs(lesson2.sequence_is(p, p, s, A, mask)[0, 0].item() - right) < 1e-3
        assert abs(lesson2.geometric(p, p, s, A, mask)[0, 0].item() - 1.01207) < 1e-4


def test_detachment_is_the_sign_of_the_gradient():
    """logp = mu = -2, A = 1: d/dlogp of -(w logp) is -1; through the weight it would be +1."""
    logp = torch.tensor([[-2.0]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    w = lesson2.token_is(logp, logp, torch.tensor([[-2.0]]), torch.ones(1), mask)
    lesson2.policy_loss(logp, w, torch.ones(1), mask, 1).backward()
    assert logp.grad.item() == -1


def check_ess(f):
    assert abs(f(torch.zeros(7)) - 1) < 1e-12
    assert abs(f(torch.tensor([0.0, -1e4, -1e4, -1e4])) - 0.25) < 1e-12                   # one weight has it all
    assert abs(f(torch.tensor([3.0, 1.0, 2.0]).log()) - 36 / (3 * 14)) < 1e-6
    assert abs(f(torch.tensor([3.0, 1.0, 2.0]).log() + 900) - 36 / (3 * 14)) < 1e-4       # scale-free, in log space


WRONG_ESS = {
    "of ratios already formed": lambda x: (x.exp().sum()**2 / x.exp().square().sum() / len(x)).item(),
    "not a fraction": lambda x: lesson2.ess(x) * len(x),
    "exp(-Var), the law for its definition": lambda x: (-x.double().var(correction=0)).exp().item(),
    "clamped at 20": lambda x: lesson2.ess(x.clamp(-20, 20)),
    "mean for sum": lambda x: ((2 * x.double().logsumexp(0)) - (2 * x.double()).logsumexp(0)).exp().item(),
}


def test_ess():
    check_ess(lesson2.ess)


@pytest.mark.parametrize("name", WRONG_ESS)
def test_ess_rejects(name):
    rejected(check_ess, WRONG_ESS[name])


# ---------------------------------------------------------------- the exact world
@pytest.fixture(scope="module")
def world():
    """Enough mismatch that every cap, band and clip bites, alike at every prefix."""
    world = lesson2.make_world(1.3, 0.6, seed=1, V=3, T=4, same_everywhere=True)
    w = {name: lesson2.weights(world, name) for name in lesson2.CORRECTIONS}
    for name in ("tis", "icepop", "minirl", "dsv32"):
        assert not torch.equal(w[name], w["token-is"]), name
    assert not torch.equal(w["ppo"], lesson2.ratio(world.logp - world.logp_old)) and not torch.equal(w["seq-tis"], w["seq-is"])
    return world


def test_the_world_is_enumerated_completely(world):
    assert len(world.R) == 81
    for logp in (world.logp, world.logp_old, world.logp_sampler):
        assert abs(logp.sum(1).exp().sum().item() - 1) < 1e-12
    assert not torch.allclose(world.logp, world.logp_old) and not torch.allclose(world.logp_old, world.logp_sampler)
    assert (lesson2.chi2(world) - lesson2.chi2(world)[0]).abs().max() < 1e-12 and lesson2.chi2(world)[0] > 0.01
    uneven = lesson2.make_world(0.4, 0.3, seed=1, V=3, T=4)
    assert lesson2.chi2(uneven).std() > 0.01


def test_the_world_is_what_it_says():
    engine_only, lag_only = lesson2.make_world(0.4, 0.0, seed=1, V=3, T=4), lesson2.make_world(0.0, 0.4, seed=1, V=3, T=4)
    assert torch.equal(engine_only.logp, engine_only.logp_old) and not torch.allclose(engine_only.logp_old, engine_only.logp_sampler)
    assert torch.equal(lag_only.logp_old, lag_only.logp_sampler) and not torch.allclose(lag_only.logp, lag_only.logp_old)
    tokens = torch.cartesian_prod(*[torch.arange(3)] * 4)
    assert torch.equal(engine_only.R, (tokens.sum(1) % 3 == 0).double())
    assert abs(engine_only.mu @ engine_only.A) < 1e-12 and engine_only.A.abs().max() > 0.1
    last = engine_only.pi[3]                                                     # the same probabilities at each prefix, in other orders
    assert torch.allclose(last.sort(1).values, last.sort(1).values[:1].expand_as(last)) and len({tuple(r) for r in last.tolist()}) > 1


def test_moments_against_every_response_written_out(world):
    """Bias, cosine, variance and MSE from the B gradients of single responses, one by one."""
    B = len(world.R)
    for name in ("seq-tis", "token-is", "none"):
        w = lesson2.weights(world, name)
        each = torch.stack([lesson2.gradient(world, torch.eye(B, dtype=torch.float64)[i][:, None] * w * world.A[:, None]) for i in range(B)])
        mean, truth = world.mu @ each, world.true_gradient
        size2 = truth.square().sum()
        variance = (world.mu @ each.square().sum(1) - mean.square().sum()) / size2
        right = {"gradient": size2.sqrt(), "bias": (mean - truth).norm() / truth.norm(), "cosine": torch.cosine_similarity(mean, truth, 0), "variance": variance,
                 "mse": (mean - truth).square().sum() / size2 + variance / lesson2.N_SAMPLES}
        for key, value in lesson2.moments(world, w).items():
            assert abs(value - right[key].item()) < 1e-9 * max(1, abs(value)), (name, key)


def test_snis_moments_against_every_response_written_out(world):
    B, n = len(world.R), 64
    rho, truth = lesson2.weights(world, "seq-is")[:, 0], world.true_gradient
    each = torch.stack([lesson2.gradient(world, torch.eye(B, dtype=torch.float64)[i][:, None] * world.A[:, None].expand(B, 4)) for i in range(B)])
    Z = rho[:, None] * (each - truth)
    assert (world.mu @ Z).norm() < 1e-12
    bias = -(world.mu * rho) @ Z / n
    variance = world.mu @ Z.square().sum(1) / (truth @ truth)
    got = lesson2.snis_moments(world, n)
    assert abs(got["bias"] - (bias.norm() / truth.norm()).item()) < 1e-9 and abs(got["variance"] - variance.item()) < 1e-6
    assert abs(got["cosine"] - torch.cosine_similarity(truth + bias, truth, 0).item()) < 1e-9
    assert abs(got["mse"] - (got["bias"]**2 + got["variance"] / n)) < 1e-9


def test_the_table_takes_each_estimator_by_its_own_method(world):
    table = lesson2.all_moments(world)
    assert list(table) == list(lesson2.CORRECTIONS) and table["snis"] == lesson2.snis_moments(world)
    assert table["kpop"] == lesson2.moments(world, lesson2.weights(world, "kpop", phi=lesson2.kpop_phi(world)))
    assert table["tis"] == lesson2.moments(world, lesson2.weights(world, "tis"))


def autograd_world(world):
    """The same world with its logits as leaves: log pi (B, T) by an independent route."""
    V, T = world.V, world.logp.shape[1]
    logits = [pi.log().clone().requires_grad_() for pi in world.pi]
    tokens = torch.cartesian_prod(*[torch.arange(V)] * T)
    logp, prefix = [], torch.zeros(len(tokens), dtype=torch.long)
    for t in range(T):
        logp.append(logits[t].log_softmax(-1)[prefix, tokens[:, t]])
        prefix = prefix * V + tokens[:, t]
    return logits, torch.stack(logp, 1)


@pytest.mark.parametrize("name", lesson2.CORRECTIONS)
def test_expected_gradient_is_autograd_of_the_loss(world, name):
    logits, logp = autograd_world(world)
    assert (logp - world.logp).abs().max() < 1e-12
    w = lesson2.weights(world, name)
    mask = torch.ones_like(w, dtype=torch.bool)
    loss = lesson2.policy_loss(logp, w * world.mu[:, None], world.A, mask, 1)             # E_mu, by weights mu
    oracle = torch.cat([g.flatten() for g in torch.autograd.grad(-loss, logits)])
    assert (oracle - lesson2.gradient(world, (world.mu * world.A)[:, None] * w)).abs().max() < 1e-12


def test_true_gradient_is_autograd_of_the_expected_reward(world):
    logits, logp = autograd_world(world)
    oracle = torch.autograd.grad(logp.sum(1).exp() @ world.R, logits)
    assert (torch.cat([g.flatten() for g in oracle]) - world.true_gradient).abs().max() < 1e-12


def test_sequence_is_is_unbiased_and_its_second_moment_is_a_power(world):
    exact = lesson2.moments(world, lesson2.weights(world, "seq-is"))
    assert exact["bias"] < 1e-12 and abs(exact["cosine"] - 1) < 1e-12
    second = world.mu @ lesson2.weights(world, "seq-is")[:, 0]**2
    assert abs(second.item() / (1 + lesson2.chi2(world)[0].item())**4 - 1) < 1e-12
    for name in ("none", "token-is", "tis", "geo", "ppo"):
        assert lesson2.moments(world, lesson2.weights(world, name))["bias"] > 0.05


def test_without_mismatch_every_estimator_is_reinforce():
    same = lesson2.make_world(0.0, 0.0, seed=1, V=3, T=4)
    for name in lesson2.CORRECTIONS:
        assert (lesson2.weights(same, name) - 1).abs().max() < 1e-12, name
        assert lesson2.moments(same, lesson2.weights(same, name))["bias"] < 1e-12


@pytest.mark.parametrize("name", [n for n in lesson2.CORRECTIONS if n != "snis"])
def test_exact_moments_against_monte_carlo(world, name):
    """Bias along and variance of the estimate from n = 64 draws, within five standard errors."""
    n, repeats = 64, 500
    estimates, truth = lesson2.monte_carlo(world, name, n, repeats), world.true_gradient
    expected = lesson2.gradient(world, (world.mu * world.A)[:, None] * lesson2.weights(world, name))
    for direction in (truth, torch.randn(len(truth), generator=torch.Generator().manual_seed(0), dtype=torch.float64)):
        along = estimates @ direction
        assert abs(along.mean() - expected @ direction) < 5 * along.std() / repeats**0.5
    deviation = (estimates - expected).square().sum(1)
    exact = lesson2.moments(world, lesson2.weights(world, name))["variance"] * (truth @ truth) / n
    assert abs(deviation.mean() - exact) < 5 * deviation.std() / repeats**0.5


def test_snis_delta_method_against_monte_carlo():
    world, n, repeats = lesson2.make_world(0.4, 0.3, seed=1, V=3, T=4), 512, 800      # it is for small mismatch
    estimates, truth = lesson2.monte_carlo(world, "snis", n, repeats), world.true_gradient
    error = (estimates - truth).square().sum(1) / (truth @ truth)
    delta = lesson2.snis_moments(world, n)
    mse = delta["bias"]**2 + delta["variance"] / n
    assert abs(error.mean() - mse) < 5 * error.std() / repeats**0.5 + 0.05 * mse       # the next order in 1 / n


def test_kpop_phi_masks_about_the_asked_fraction():
    world = lesson2.make_world(0.3, 0.3, seed=2)
    kept = lesson2.weights(world, "kpop", phi=lesson2.kpop_phi(world, 0.2))
    masked = (world.mu[:, None] * (kept == 0)).sum().item() / kept.shape[1]
    assert abs(masked - 0.2) < 0.01


def test_weight_statistics_by_hand():
    x = [[0.1, -0.8], [0.8, 1.7], [0.3, -0.2], [0.05, 0.0]]
    s = lesson2.weight_statistics(torch.tensor(x, dtype=torch.float64), torch.ones(4, 2, dtype=torch.bool))
    w, sums = [math.exp(v) for row in x for v in row], [sum(row) for row in x]
    mean = sum(w) / 8
    variance = sum((v - mean)**2 for v in w) / 7
    sums_mean = sum(sums) / 4
    right = {"mean_weight": mean, "standard_error": (variance / 8)**0.5, "chi2": variance, "truncated": 2 / 8, "masked": 2 / 8,
             "token_ess": sum(w)**2 / 8 / sum(v * v for v in w), "sequence_ess": sum(map(math.exp, sums))**2 / 4 / sum(math.exp(2 * v) for v in sums),
             "predicted_ess": math.exp(-sum((v - sums_mean)**2 for v in sums) / 3), "sequence_mean_weight": sum(map(math.exp, sums)) / 4}
    for name, value in right.items():
        assert abs(s[name] - value) < 1e-9, name


def test_weight_statistics():
    """Log-normal weights of known spread, responses of two lengths, rubbish in the padding."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(6) < torch.where(torch.arange(40_000) % 2 == 0, 6, 3)[:, None]
    x = 0.1 * torch.randn(40_000, 6, generator=generator) - 0.005
    s = lesson2.weight_statistics(x.masked_fill(~mask, 9.0), mask)
    assert s["tokens"] == 20_000 * 9 and abs(s["mean_weight"] - 1) < 5 * s["standard_error"]
    assert abs(s["token_ess"] - math.exp(-0.01)) < 1e-3 and s["length"] == [1, 2, 3, 4, 5, 6]
    for t, measured in zip(s["length"], s["ess_by_length"]):
        assert abs(measured - math.exp(-0.01 * t)) < 5e-3
    assert s["truncated"] == 0 and s["masked"] == 0
    shifted = lesson2.weight_statistics(torch.full((4, 2), math.log(3.0)), torch.ones(4, 2, dtype=torch.bool))
    assert shifted["truncated"] == 1 and shifted["masked"] == 0 and abs(shifted["sequence_mean_weight"] - 9) < 1e-5
    assert abs(shifted["token_ess"] - 1) < 1e-9                                        # scale-free: the mean weight is the alarm


def test_quick_run(tmp_path):
    run = subprocess.run([sys.executable, str(lesson2.lesson1.ROOT / "02_importance_sampling.py"), "--quick", "--out", str(tmp_path)],
                         capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "02_importance_sampling.png").stat().st_size > 10_000
    result = json.loads((tmp_path / "02_importance_sampling.json").read_text())
    exact, real = result["exact"], result["real"]
    for law, predicted, measured in exact["laws"]:
        if law.startswith(("sequence IS: E", "TIS, one prefix")):
            assert abs(measured / predicted - 1) < 1e-9, law
        if "halved" in law:
            assert abs(measured - 0.5) < 0.03, law
        if "neglects" in law:
            assert abs(measured / predicted - 1) < 0.2 and measured > 1e-4, law
        if "at most" in law:
            assert 1 < measured <= predicted, law
        if "log-normal" in law:
            assert abs(measured / predicted - 1) < 0.02, law
        if "relative bias" in law:
            assert measured < 1e-12, law
    natural, stale = real["natural: bf16 vLLM, fp32 trainer"], real["stale: trainer 8 steps ahead"]
    assert abs(natural["mean_weight"] - 1) < 5 * natural["standard_error"] and natural["sequence_ess"] > 0.99
    assert stale["sequence_ess"] < 0.5
