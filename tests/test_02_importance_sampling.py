"""Lesson 2's objective and weights against slow specifications, and against the wrong versions."""
import math
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


def check_tis(f):
    """mu = -1.00, old = -1.10, new = -1.40: total log-ratio -0.40."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    logp = torch.tensor([[-1.40, -1.0, -0.5]], requires_grad=True)
    old, sampler = torch.tensor([[-1.10, -1.5, -0.5]]), torch.tensor([[-1.00, -2.0, -0.5]])
    w = f(logp, old, sampler, torch.ones(1), mask)
    assert torch.allclose(w, torch.tensor([[0.67032, 2.0, 1.0]]), atol=1e-5)         # e^1 is capped at 2
    lesson2.policy_loss(logp, w, torch.ones(1), mask, 1).backward()
    assert torch.allclose(logp.grad, -w.detach())                                    # w is a constant


WRONG_TIS = {
    "not detached": lambda p, o, s, A, m: (p - s).exp().clamp(max=2),
    "upside down": lambda p, o, s, A, m: (s - p).detach().exp().clamp(max=2),
    "cap on the log-ratio": lambda p, o, s, A, m: (p - s).detach().clamp(max=2).exp(),
    "old for current": lambda p, o, s, A, m: (o - s).exp().clamp(max=2),
    "lag only": lambda p, o, s, A, m: (p - o).detach().exp().clamp(max=2),
    "corrected twice": lambda p, o, s, A, m: ((p - s).exp() * (o - s).exp()).detach().clamp(max=2),
    "masked, not capped": lambda p, o, s, A, m: torch.where((p - s).exp() > 2, 0.0, (p - s).exp()).detach(),
    "floored too": lambda p, o, s, A, m: (p - s).detach().exp().clamp(0.8, 2),
}


def test_token_tis():
    check_tis(lesson2.CORRECTIONS["tis"])


@pytest.mark.parametrize("name", WRONG_TIS)
def test_token_tis_rejects(name):
    rejected(check_tis, WRONG_TIS[name])
