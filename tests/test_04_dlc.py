"""Lesson 4: center, clip and resync against closed forms in float64, and the loop on the real engine."""

import copy
import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from conftest import lesson1, rejected

lesson4 = import_module("04_dlc")
lesson2, lesson3 = lesson4.lesson2, lesson4.lesson3
V, T, B = 7, 3, 4
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
A = torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64)


# The rules as the tests understand them: a wrong one in the lesson does not make other functions look wrong.
def at_most_two(lag, advantage):
    return lag.exp().clamp(max=2)


def ppo(lag, advantage):
    r, sign = lag.exp(), advantage[:, None]
    return torch.where(torch.where(sign > 0, r > 1.2, (sign < 0) & (r < 0.8)), 0.0, r)


def unweighted(lag, advantage):
    return torch.ones_like(lag)


def unclipped(lag, advantage):
    return lag.clamp(-20, 20).exp()


RULES = {"clipped": at_most_two, "ppo": ppo, "unweighted": unweighted, "unclipped": unclipped}


def distributions(lag: float = 0.8, discrepancy: float = 0.3, seed: int = 0):
    """Trainer's logits, log pi_old and log mu (B, T, V) in float64."""
    rng = torch.Generator().manual_seed(seed)
    logits, e_lag, e_engine = torch.randn(3, B, T, V, generator=rng, dtype=torch.float64)
    old = logits + lag * e_lag
    return logits, old.log_softmax(-1), (old + discrepancy * e_engine).log_softmax(-1)


def gradient(logits, value):
    """Of value(log-probs with a graph) with respect to the logits."""
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(value(logits.log_softmax(-1)), logits)[0]


def token_gradients(logits, coefficients):
    """sum_v c_v (e_v - pi), the closed form of grad sum_v c_v log pi_v."""
    return coefficients - logits.softmax(-1) * coefficients.sum(-1, keepdim=True)


def close(got, expected, what: str, atol: float = 1e-12):
    assert got.isfinite().all(), f"{what}: not finite"
    error = (got - expected).abs().max().item()
    assert error <= atol, f"{what}: off by {error:.1e}"


# ---------------------------------------------------------------- the center
def check_center(center):
    """K = V: sum_v q_v f(r_v) (e_v - pi), for every rule; and the same from a head, in whatever order, where
    the tails are
    proportional. In float64, 1e-12."""
    logits, old, q = distributions()
    for name, f in RULES.items():
        weight = torch.stack([f((logits.log_softmax(-1) - old)[..., v], A) for v in range(V)], -1)  # token by token
        expected = token_gradients(logits, q.exp() * weight)
        close(gradient(logits, lambda p: center(p, old, q, A, V, f).sum()), expected, f"the whole vocabulary, {name}")
        # proportional tails: tokens 4, 5, 6 keep pi's proportions, with other masses
        pi = logits.softmax(-1)
        for mass_old, mass_q in ((0.5, 1.7), (2.5, 0.2)):
            proportional = []
            for x, mass in ((old.exp(), mass_old), (q.exp(), mass_q)):
                tail = (mass * pi[..., 4:]).clamp(max=0.3)
                tail = pi[..., 4:] * (tail.sum(-1, keepdim=True) / pi[..., 4:].sum(-1, keepdim=True))
                proportional.append(
                    torch.cat(
                        [x[..., :4] * (1 - tail.sum(-1, keepdim=True)) / x[..., :4].sum(-1, keepdim=True), tail], -1
                    ).log()
                )
            o, m = proportional
            weight = torch.stack([f((logits.log_softmax(-1) - o)[..., v], A) for v in range(V)], -1)
            expected = token_gradients(logits, m.exp() * weight)
            head = torch.tensor([2, 0, 3, 1])
            got = gradient(logits, lambda p: center(p[..., head], o[..., head], m[..., head], A, V, f).sum())
            close(got, expected, f"a head of four, {name}")
    # a head whose mass exceeds 1 by float noise has no tail: its coefficients alone are left
    peaked = (
        torch.tensor([0.7, 0.2, 0.1 - 1e-9, 1e-9, 0, 0, 0], dtype=torch.float64).log().clamp(min=-60).expand(1, 1, V)
    )
    over = torch.tensor([0.6, 0.3, 0.1 + 1e-6], dtype=torch.float64).log().expand(1, 1, 3)
    got = gradient(peaked, lambda p: center(p[..., :3], over, over, A[:1], V, at_most_two).sum())
    expected = token_gradients(peaked, torch.nn.functional.pad(over.exp() * (peaked[..., :3] - over).exp(), (0, V - 3)))
    close(got, expected, "a head of mass above 1", 1e-5)
    # the trainer has no tail, the engine has one of a millionth: kappa_q is at most 1, not 1e24
    certain = torch.tensor([40.0, 39.0, 0, 0, 0, 0, 0]).expand(1, 1, V)
    engine, anchor = (torch.tensor([0.73, 0.27 - tail]).log().expand(1, 1, 2) for tail in (1e-6, 0))
    got = gradient(certain, lambda p: center(p[..., :2], anchor, engine, A[:1].float(), V, at_most_two).sum())
    assert got.isfinite().all() and got.abs().max() < 0.2, f"a trainer without a tail: {got.abs().max():.1e}"
    # tokens that the engine cannot draw: 0 * inf is no part of the center
    cut = q.clone()
    cut[..., 0] = -torch.inf
    unbounded = lambda lag, advantage: lag.exp()
    anchor = old.clone()
    anchor[..., 0] = -torch.inf
    weight = (logits.log_softmax(-1) - old).exp()
    weight[..., 0] = 0.0
    close(
        gradient(logits, lambda p: center(p, anchor, cut, A, V, unbounded).sum()),
        token_gradients(logits, cut.exp() * weight),
        "a token out of reach",
    )


def center_with(
    *,
    under="sampler",
    detach=True,
    f_inside=True,
    tail="modeled",
    clamp=True,
    floor=1e-6,
    tail_weight=True,
    double=False,
    own_rule=None,
    reach=True,
):
    """A center with one thing wrong."""

    def wrong(head_logp, head_logp_old, head_logp_sampler, advantage, vocabulary, f=at_most_two):
        pi, old, q = (x.exp() for x in (head_logp, head_logp_old, head_logp_sampler))
        pi = pi.detach() if detach else pi
        lag = head_logp - head_logp_old
        weight = (own_rule or f)(lag.detach() if detach else lag, advantage[:, None])
        c = {"sampler": q, "trainer": pi, "old": old}[under] * (weight if f_inside else 1.0)
        c = torch.where(q > 0, c, 0.0) if reach else c
        if head_logp.shape[-1] < vocabulary and tail != "dropped":
            rest = lambda x: (1 - x.sum(-1, keepdim=True)).clamp(min=0 if clamp else -1)
            kappa_q, kappa_s = (rest(x) / rest(pi).clamp(min=floor) for x in (q, old))
            r_tail = f(-kappa_s.log(), advantage[:, None]) if tail_weight else torch.ones_like(kappa_s)
            c = c - torch.where(kappa_q == 0, 0.0, kappa_q * r_tail) * pi
        if double:  # the most likely token once more, as if it were not in the head
            c = torch.cat([c, c[..., :1]], -1)
            head_logp = torch.cat([head_logp, head_logp[..., :1]], -1)
        return (c * head_logp).sum(-1)

    return wrong


right_center = center_with()
WRONG_CENTER = {
    "under pi": center_with(under="trainer"),
    "under pi_old": center_with(under="old"),
    "not detached": center_with(detach=False),
    "f left out": center_with(f_inside=False),
    "another rule than the sampled token's": center_with(own_rule=at_most_two),
    "the sampled token's sign for nobody else": center_with(own_rule=unclipped),
    "tail dropped": center_with(tail="dropped"),
    "tail masses not clamped": center_with(clamp=False),
    "tail floor of 1e-30": center_with(floor=1e-30),
    "f left out of the tail": center_with(tail_weight=False),
    "0 times inf": center_with(reach=False),
    "a token twice": center_with(double=True),
    "minus": lambda *args: -right_center(*args),
    "nothing": lambda head_logp, *rest: 0.0 * head_logp.sum(-1),
}


def test_center():
    check_center(lesson4.center)
    check_center(right_center)  # the harness of the wrong versions is right where nothing is


@pytest.mark.parametrize("name", WRONG_CENTER)
def test_center_rejects(name):
    rejected(check_center, WRONG_CENTER[name])


def test_scores_have_mean_zero_under_their_own_policy():
    """sum_v pi_v s_v = 0, so that the center of an engine without error is none."""
    logits, _, _ = distributions()
    same = logits.log_softmax(-1)
    assert gradient(logits, lambda p: lesson4.center(p, same, same, A, V).sum()).abs().max() < 1e-14


def test_unclipped_weight_needs_no_center():
    """w = pi / q over the full support: q w = pi. A clipped one does, and so does a support that was cut."""
    logits, _, q = distributions()
    value = lambda f, s: gradient(logits, lambda p: lesson4.center(p, q, s, A, V, f).sum()).abs().max()
    assert value(unclipped, q) < 1e-14
    assert value(at_most_two, q) > 1e-2
    cut = q.clone()
    cut[..., 0] = -torch.inf
    assert value(unclipped, cut) > 1e-2 and torch.isfinite(value(unclipped, cut))


def test_without_a_head_there_is_no_center():
    nothing = torch.zeros(B, T, 0)
    with pytest.raises(ValueError):
        lesson4.center(nothing, nothing, nothing, A, V)


def test_the_example_beside_the_center():
    """The table in the lesson's comment, and laws()."""
    q = torch.tensor([[[0.6, 0.4]]], dtype=torch.float64)
    half, both = torch.full_like(q, 0.5).log(), torch.ones(1, dtype=torch.float64)
    for advantages, right, under_q, centered in (
        ((1, 1), 0, 0.10, 0),
        ((1, 0), 0.25, 0.30, 0.24),
        ((0, 1), -0.25, -0.20, -0.24),
    ):
        a = torch.tensor(advantages, dtype=torch.float64)
        first = lambda p, c: gradient(
            half, lambda logp: ((p * a).detach() * logp).sum() - c * lesson4.center(logp, half, q.log(), both, 2).sum()
        )[0, 0, 0].item()
        assert [first(half.exp(), 0), first(q, 0), first(q, (q * a).sum())] == pytest.approx(
            [right, under_q, centered], abs=1e-12
        )
    for law in lesson4.laws():
        assert law["measured"] == pytest.approx(law["predicted"], rel=1e-6), law


# ---------------------------------------------------------------- the loss
def make_batch(logits, old, q, a, mask=MASK, advantage=A):
    """One of lesson 3's batches, with the sampled tokens a (B, T) and the whole vocabulary as head."""
    pick = lambda x: torch.where(mask, x.gather(-1, a[..., None])[..., 0], 0.0)
    logp, n = logits.log_softmax(-1), len(mask)
    nobody = torch.zeros(n, 1, dtype=torch.long)
    rollout = lesson1.Rollout(
        nobody,
        nobody.bool(),
        a,
        mask,
        pick(q),
        torch.arange(logits.shape[-1]).expand(*a.shape, -1),
        q,
        torch.ones(n, dtype=torch.bool),
        1.0,
        True,
        0,
    )
    return lesson3.Batch(0, 1, rollout, advantage, advantage, pick(logp), pick(old), logp, old, logits.shape[-1])


def loss_gradient(loss, logits, old, q, a, **settings):
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(make_batch(logits, old, q, a), **{"resync_ess": 0, **settings}), logits)[0]


def closed_form(logits, old, q, a, f):
    """-A (f(r_a) (e_a - pi) - sum_v q_v f(r_v) (e_v - pi)) / N."""
    weight = torch.stack([f((logits.log_softmax(-1) - old)[..., v], A) for v in range(V)], -1)
    sampled = torch.nn.functional.one_hot(a, V).double() * weight
    g = -A[:, None, None] * (token_gradients(logits, sampled) - token_gradients(logits, q.exp() * weight))
    return torch.where(MASK[..., None], g, 0.0) / MASK.sum()


def check_loss(loss):
    """The closed form for every rule; then what is left of it without discrepancy, without lag, without
    either; its mean."""
    rng = torch.Generator().manual_seed(1)
    a = torch.randint(0, V, (B, T), generator=rng)
    e_a = torch.nn.functional.one_hot(a, V).double()
    scale = torch.where(MASK, -A[:, None] / MASK.sum(), 0.0)[..., None]
    logits, old, q = distributions()
    pi = logits.softmax(-1)
    for name, f in RULES.items():
        close(loss_gradient(loss, logits, old, q, a, f=f), closed_form(logits, old, q, a, f), f"rule {name}")
        uncentered = (
            scale * f((logits.log_softmax(-1) - old).gather(-1, a[..., None])[..., 0], A)[..., None] * (e_a - pi)
        )
        close(loss_gradient(loss, logits, old, q, a, f=f, centered=False), uncentered, f"rule {name}, centered=False")

    # no lag: pure score centering, e_a - q in the logits
    _, _, engine = distributions(lag=0.0)
    close(loss_gradient(loss, logits, logits.log_softmax(-1), engine, a), scale * (e_a - engine.exp()), "no lag")
    # no discrepancy, no v clipped: the lag-weighted score, without a center
    _, near, _ = distributions(lag=0.1)
    r = pi / near.exp()
    assert r.max() < 2
    close(loss_gradient(loss, logits, near, near, a), scale * r.gather(-1, a[..., None]) * (e_a - pi), "no discrepancy")
    # ... and some clipped: apart by sum_v pi_old f(r_v) s_v
    r = pi / old.exp()
    assert (r > 2).any()
    f_r = r.clamp(max=2)
    apart = token_gradients(logits, old.exp() * f_r)
    assert apart.abs().max() > 1e-2
    close(
        loss_gradient(loss, logits, old, old, a),
        scale * (f_r.gather(-1, a[..., None]) * (e_a - pi) - apart),
        "the mean that the clip makes",
    )
    # neither: REINFORCE, token by token
    same = logits.log_softmax(-1)
    close(loss_gradient(loss, logits, same, same, a), scale * (e_a - pi), "neither")
    # the mean over the engine's own draws is 0 under a constant advantage, whatever the engine
    mean = sum(q.exp()[..., v, None] * loss_gradient(loss, logits, old, q, torch.full((B, T), v)) for v in range(V))
    close(mean, torch.zeros_like(mean), "mean over the engine's draws", 1e-14)


def loss_with(
    *, center=right_center, center_f=None, whole_ratio=False, sequence=False, detach=True, always=False, rescaled=False
):
    def wrong(batch, f=at_most_two, centered=True, resync_ess=0.5):
        r, A = batch.rollout, batch.advantage
        lag = batch.logp - batch.logp_old
        lag = lag.detach() if detach else lag
        if whole_ratio:  # the discrepancy inside the clipped ratio
            lag = lag + batch.logp_old - batch.rollout.logp_sampler
        if sequence:
            lag = lesson2.sequence_sum(lag, r.mask).expand_as(lag)
        w = torch.where(r.mask, f(lag, A), 0.0)
        mean = (
            center(batch.head_logp, batch.head_logp_old, r.head_logp, A, batch.vocabulary, center_f or f)
            if centered or always
            else 0.0
        )
        n = w.detach().sum() if rescaled else r.mask.sum()
        return -(A[:, None] * (w * batch.logp - mean) * r.mask).sum() / n

    return wrong


WRONG_LOSS = {
    "no center": loss_with(center=lambda p, *rest: torch.zeros_like(p[..., 0])),
    "center where there should be none": loss_with(always=True),
    "discrepancy inside the clipped ratio": loss_with(whole_ratio=True),
    "a response's ratio for the token's": loss_with(sequence=True),
    "weight not detached": loss_with(detach=False),
    "sign rule for the sampled token only": loss_with(center_f=unclipped),
    "center's sign": loss_with(center=lambda *args: -right_center(*args)),
    "divided by the weights": loss_with(rescaled=True),
    **{
        f"center {name}": loss_with(center=WRONG_CENTER[name])
        for name in ("under pi", "not detached", "f left out", "a token twice")
    },
}


@pytest.fixture
def right_parts(monkeypatch):
    """What dlc_loss calls is right, so that its own mistakes are graded alone."""
    monkeypatch.setattr(lesson4, "center", right_center)
    monkeypatch.setattr(lesson4, "lag_ess", right_ess)
    monkeypatch.setattr(lesson4, "clipped", at_most_two)


def test_loss(right_parts):
    check_loss(lesson4.dlc_loss)
    check_loss(loss_with())


@pytest.mark.parametrize("name", WRONG_LOSS)
def test_loss_rejects(name):
    rejected(check_loss, WRONG_LOSS[name])


def check_padding(loss):
    """NaN log-probs on padding, NaN heads there, and the NaN advantage of a response without tokens reach nothing."""
    logits, old, q = distributions()
    mask, advantage, a = MASK.clone(), A.clone(), torch.zeros(B, T, dtype=torch.long)
    mask[3], advantage[3] = False, torch.nan
    for f, rubbish in ((at_most_two, torch.nan), (ppo, torch.nan), (at_most_two, 0.0)):
        clean = logits.clone().requires_grad_()
        batch = make_batch(clean, old, q, a, mask, torch.where(advantage.isnan(), 0.0, advantage))
        expected = torch.autograd.grad(loss(batch, f=f, resync_ess=0.01), clean)[0]
        x = logits.clone().requires_grad_()
        batch = make_batch(x, old, q, a, mask, advantage)
        nan = lambda y: y + torch.where(mask[..., None] if y.dim() == 3 else mask, 0.0, torch.nan)  # a graph to it
        batch = replace(
            batch,
            logp=nan(batch.logp),
            logp_old=nan(batch.logp_old),
            head_logp=nan(batch.head_logp),
            head_logp_old=nan(batch.head_logp_old),
            rollout=replace(
                batch.rollout,
                head_logp=torch.where(mask[..., None], batch.rollout.head_logp, rubbish),
                logp_sampler=nan(batch.rollout.logp_sampler),
            ),
        )
        value = loss(batch, f=f, resync_ess=0.01)
        assert value is not None and value.isfinite(), f"the loss is {value}"
        close(torch.autograd.grad(value, x)[0], expected, "NaN on padding")


def multiplied(batch, f=at_most_two, centered=True, resync_ess=0.5):
    """The mask as a factor: NaN * 0."""
    return loss_with()(batch, f, centered, resync_ess)


def one_by_one(batch, f=at_most_two, centered=True, resync_ess=0.5):
    """The value is masked, the heads are not: the gradient is NaN."""
    r, A = batch.rollout, batch.advantage
    c = right_center(batch.head_logp, batch.head_logp_old, r.head_logp, A, batch.vocabulary, f)
    return lesson2.policy_loss(batch.logp, f(batch.lag, A), A, r.mask, int(r.mask.sum()), c)


def test_padding_is_ignored_even_if_it_is_nan(right_parts):
    check_padding(lesson4.dlc_loss)


@pytest.mark.parametrize("wrong", [multiplied, one_by_one])
def test_padding_rejects(wrong):
    rejected(check_padding, wrong)


def test_lag_clip_is_min_r_C():
    logp, old = torch.tensor([[-1.0, -3.0, -1.0]]), torch.tensor([[-1.5, -1.0, -3.0]])
    w = lesson4.lag_clip(logp.requires_grad_(), old, old - 1, A[:1].float(), torch.tensor([[True, True, True]]))
    assert torch.allclose(w, torch.tensor([[math.exp(0.5), math.exp(-2.0), 2.0]])) and not w.requires_grad
    assert lesson4.lag_clip(logp, old, old - 1, A[:1].float(), torch.tensor([[True, True, False]]))[0, 2] == 0


def check_ppo_clipped(rule):
    """r, and 0 for A > 0 above 1.2 and for A < 0 below .8: (B, T, K) with (B, 1), (B, T) with (B,). Close to
    the bounds."""
    r = torch.tensor([1.21, 1.19, 0.81, 0.79, 5.0, 0.2])
    lag = r.log().expand(3, 1, 6)
    f = rule(lag, torch.tensor([1.0, -1.0, 0.0])[:, None])
    kept = torch.tensor([[0, 1, 1, 1, 0, 1], [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1.0]])
    close(f, (r * kept)[:, None], "lags (B, T, K), advantages (B, 1)", 1e-6)
    close(rule(lag[:, 0], torch.tensor([1.0, -1.0, 0.0])), f[:, 0], "lags (B, T), advantages (B,)", 1e-6)


ppo_with = lambda low, high: lambda lag, A: torch.where(
    torch.where(A[:, None] > 0, lag.exp() > high, (A[:, None] < 0) & (lag.exp() < low)), 0.0, lag.exp()
)
WRONG_RULE = {
    "clamped, not dropped": lambda lag, A: lag.exp().clamp(0.8, 1.2),
    "whatever the sign": lambda lag, A: lag.exp() * ((lag.exp() < 1.2) & (lag.exp() > 0.8)),
    "the other sign": lambda lag, A: ppo(lag, -A),
    "weight 1 where it is kept": lambda lag, A: (ppo(lag, A) > 0).float(),
    "log-ratio for ratio": lambda lag, A: lag * (ppo(lag, A) > 0),
    **{
        f"bounds {low:.3g} and {high:.3g}": ppo_with(low, high)
        for low, high in ((0.8, 1.27), (0.8, 1.24), (0.8, 1.16), (1 / 1.2, 1.2), (0.76, 1.2), (0.84, 1.2))
    },
}


def test_ppo_clipped():
    check_ppo_clipped(lesson4.ppo_clipped)
    check_ppo_clipped(ppo)


@pytest.mark.parametrize("name", WRONG_RULE)
def test_ppo_clipped_rejects(name):
    rejected(check_ppo_clipped, WRONG_RULE[name])


# ---------------------------------------------------------------- the resync rule
def check_ess(lag_ess):
    """Hand-made log-ratios, with rubbish under the mask: (sum w)^2 / (n sum w^2) of the responses."""

    def expect(lag, mask, right, what):
        got = lag_ess(lag, mask)
        assert abs(got - right) < 1e-9, f"{what}: {got}, not {right}"

    mask = torch.tensor([[1, 1], [1, 0], [1, 1]], dtype=torch.bool)
    lag = torch.tensor([[math.log(2), math.log(3)], [math.log(5), 40.0], [0.0, math.log(4)]], dtype=torch.float64)
    responses = np.array([6, 5, 4.0])
    right = responses.sum() ** 2 / (3 * (responses**2).sum())
    expect(lag, mask, right, "three responses")
    expect(torch.where(mask, lag, torch.nan), mask, right, "NaN on padding")
    expect(lag + 600 * torch.tensor([[1, 0], [1, 0], [1, 0]]), mask, right, "the same, times exp(600)")
    # responses without a token do not count, neither as weight 1 nor as 0
    one = torch.tensor([[-3.0], [-3], [0], [0]])
    expect(one, one < 0, 1.0, "two equal responses and two masked ones")
    one = torch.tensor([[3.0], [0], [0], [0], [0], [0], [0], [0]])
    expect(
        one,
        torch.tensor([[True]] * 2 + [[False]] * 6),
        (math.exp(3) + 1) ** 2 / (2 * (math.exp(6) + 1)),
        "weights 20 and 1, and six masked",
    )
    # products of 400 tokens: neither exp(100) nor exp(-100) may overflow; and sums, not means
    long = torch.full((2, 400), 0.5)
    long[:, 200:] = -0.5
    expect(long, torch.ones(2, 400, dtype=torch.bool), 1.0, "400 tokens, half of them at .5, half at -.5")
    expect(torch.full((2, 400), -0.5), torch.ones(2, 400, dtype=torch.bool), 1.0, "400 tokens at -.5")
    expect(
        torch.tensor([[2.0], [0], [0]]),
        torch.ones(3, 1, dtype=torch.bool),
        (math.exp(2) + 2) ** 2 / (3 * (math.exp(4) + 2)),
        "before clipping",
    )


def ess_with(change=lambda x: x, padded=False, zeroed=False, total=False, mean=False, empty=False, tokens=False):
    def wrong(lag, mask):
        lag = change(lag)
        lag = torch.where(mask, lag, 0.0) if zeroed else lag
        counted = torch.ones_like(mask) if padded else mask
        x = torch.where(counted, lag, 0.0).sum(1) / (counted.sum(1).clamp(min=1) if mean else 1)
        x = x if empty or padded else x[mask.any(1)]
        x = (lag[mask] if tokens else x).double()
        w = (x - x.max()).exp()
        return (w.sum() ** 2 / (w**2).sum() / (1 if total else len(w))).item()

    return wrong


right_ess = ess_with()


def in_floats(lag, mask):
    """Products of ratios, not sums of logs."""
    w = torch.where(mask, lag.float().exp(), 1.0).prod(1)[mask.any(1)]
    return (w.sum() ** 2 / (len(w) * (w**2).sum())).item()


WRONG_ESS = {
    "after clipping": ess_with(lambda x: x.clamp(max=math.log(2))),
    "lags clipped first, both sides": ess_with(lambda x: x.clamp(-math.log(2), math.log(2))),
    "over padding": ess_with(padded=True),
    "masked to weight one": ess_with(zeroed=True, padded=True),
    "a response without a token counts": ess_with(empty=True),
    "a number, not a share": ess_with(total=True),
    "of the geometric mean": ess_with(mean=True),
    "of the inverse ratio": ess_with(lambda x: -x),
    "not in log space": in_floats,
    "of the tokens": ess_with(tokens=True),
}


def test_lag_ess():
    check_ess(lesson4.lag_ess)
    check_ess(right_ess)


@pytest.mark.parametrize("name", WRONG_ESS)
def test_lag_ess_rejects(name):
    rejected(check_ess, WRONG_ESS[name])


def test_lag_ess_refuses_what_has_no_ess():
    """NaN never passes as "large enough", and a batch without tokens is one clear error."""
    ones = torch.ones(2, 2, dtype=torch.bool)
    for lag, mask in (
        (torch.tensor([[0.0, torch.nan], [0, 0]]), ones),
        (torch.zeros(2, 2), ~ones),
        (torch.full((2, 2), torch.inf), ones),
    ):
        with pytest.raises(ValueError):
            lesson4.lag_ess(lag, mask)


def refuses(loss, log_weights, **settings) -> bool:
    """Does the loss refuse a batch of responses with these log-ratios of their tokens? NaN: padding."""
    lag = torch.tensor(log_weights, dtype=torch.float64)
    lag = lag[:, None] if lag.dim() == 1 else lag
    mask = ~lag.isnan()
    lag = torch.where(mask, lag, 5.0)  # rubbish
    n, length = lag.shape
    batch = make_batch(
        torch.zeros(n, length, 2, dtype=torch.float64),
        *torch.full((2, n, length, 2), 0.5, dtype=torch.float64).log(),
        torch.zeros(n, length, dtype=torch.long),
        mask,
        torch.ones(n, dtype=torch.float64),
    )
    batch.logp, batch.logp_old = lag - 900, torch.full_like(lag, -900.0)
    return loss(batch, **settings) is None


def check_trigger(loss):
    """Strictly below one half: two of four responses left is exactly one half, and is trained on."""
    gone, pad = -800.0, torch.nan  # a weight of 0; no token

    def expect(refused, log_weights, what, **settings):
        assert refuses(loss, log_weights, **settings) == refused, f"{what}: {'not ' * refused}refused"

    expect(False, [0, 0, gone, gone], "exactly one half")
    expect(False, [0] * 8 + [-1000.0] * 8, "exactly one half of 16")
    expect(True, [0, gone, gone, gone], "one of four is left")
    expect(True, [0, 0, gone, gone, gone], "two of five are left")
    expect(False, [0, 0, 0, gone], "three of four are left")
    expect(False, [-1.0, -1.0, -1.0, -1.0], "the blind spot: all have lost the same")
    expect(True, [3.0, 0.0, 0.0, 0.0, 0.0, 0.0], "one weight of 20: clipped at 2 the ESS would be .88")
    expect(False, [0, gone, gone, gone], "resync_ess=0", resync_ess=0)
    expect(True, [0, 0, 0, gone], "resync_ess=0.8", resync_ess=0.8)
    # two tokens per response: products of 11, 1, 1, 1 have an ESS of .39, the tokens' ratios one of .71
    expect(True, [[1.2, 1.2], [0, 0], [0, 0], [0, 0]], "products")
    # padding decides nothing: counted, these would be .55 and .22, and 1.0
    expect(False, [[3.0], [3.0], [pad], [pad], [pad], [pad], [pad]], "responses without a token")
    expect(True, [[3.0, pad], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], "a short response")
    expect(False, [[0.0, pad], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], "a short response among equals")


def trigger_with(below):
    """A loss with another rule for refusing."""

    def wrong(batch, f=at_most_two, centered=True, resync_ess=0.5):
        return None if below(batch, resync_ess) else 0.0

    return wrong


of_responses = lambda batch: torch.where(batch.rollout.mask, batch.lag, 0.0).sum(1)[batch.rollout.mask.any(1)]
everything = lambda batch: torch.ones_like(batch.rollout.mask)
WRONG_TRIGGER = {
    "at exactly one half": trigger_with(lambda b, half: half > 0 and right_ess(b.lag, b.rollout.mask) <= half),
    "above one half": trigger_with(lambda b, half: right_ess(b.lag, b.rollout.mask) > half),
    "after clipping": trigger_with(lambda b, half: right_ess(b.lag.clamp(max=math.log(2)), b.rollout.mask) < half),
    "of the tokens": trigger_with(lambda b, half: lesson2.ess(b.lag[b.rollout.mask]) < half),
    "padding decides": trigger_with(lambda b, half: right_ess(b.lag, everything(b)) < half),
    "padding has weight 1": trigger_with(
        lambda b, half: right_ess(torch.where(b.rollout.mask, b.lag, 0.0), everything(b)) < half
    ),
    "mean weight instead": trigger_with(lambda b, half: of_responses(b).exp().mean() < half),
    "resync_ess ignored": trigger_with(lambda b, half: right_ess(b.lag, b.rollout.mask) < 0.5),
    "never": trigger_with(lambda b, half: False),
    "always": trigger_with(lambda b, half: True),
}


def test_trigger(right_parts):
    check_trigger(lesson4.dlc_loss)


@pytest.mark.parametrize("name", WRONG_TRIGGER)
def test_trigger_rejects(name):
    rejected(check_trigger, WRONG_TRIGGER[name])


def test_dlc_loss_with_the_lessons_own_parts():
    check_loss(lesson4.dlc_loss)
    check_trigger(lesson4.dlc_loss)
    check_padding(lesson4.dlc_loss)


def check_clip(clipped):
    close(
        clipped(torch.tensor([-1.0, 0.5, 0.6931, 3.0, 900.0]), None),
        torch.tensor([math.exp(-1), math.exp(0.5), 2.0, 2.0, 2.0]),
        "min(r, 2)",
        1e-4,
    )


def test_clip():
    check_clip(lesson4.clipped)
    for wrong in (
        unclipped,
        unweighted,
        lambda lag, A: lag.exp().clamp(0.5, 2),
        lambda lag, A: lag.exp() * (lag.exp() <= 2),
        lambda lag, A: lag.exp().clamp(max=5),
    ):
        rejected(check_clip, wrong)


def check_mean_ratio(mean_ratio):
    """exp of each token's lag, averaged over the tokens."""
    lag, mask = torch.tensor([[math.log(2), 0.0], [-math.log(2), torch.nan]]), torch.tensor(
        [[True, True], [True, False]]
    )
    assert abs(mean_ratio(lag, mask) - 3.5 / 3) < 1e-6, f"{mean_ratio(lag, mask)}, not 3.5 / 3"


def test_mean_ratio():
    check_mean_ratio(lesson4.mean_ratio)
    for wrong in (
        lambda lag, mask: lag[mask].mean().item(),
        lambda lag, mask: lag[mask].mean().exp().item(),
        lambda lag, mask: lag.exp().mean().item(),
        lambda lag, mask: torch.where(mask, lag, 0.0).exp().mean().item(),
        lambda lag, mask: torch.where(mask, lag, 0.0).sum(1).exp().mean().item(),
    ):
        rejected(check_mean_ratio, wrong)


def test_blind_spot_has_an_alarm():
    lag, mask = torch.full((8, 2), -1.0), torch.ones(8, 2, dtype=torch.bool)
    assert lesson4.lag_ess(lag, mask) == pytest.approx(1) and lesson4.mean_ratio(lag, mask) == pytest.approx(
        math.exp(-1)
    )


# ---------------------------------------------------------------- the arms
def test_every_arm_is_what_its_name_says():
    """A batch of which DLC refuses some: on-policy and none weigh nothing, TIS the whole ratio; only DLC asks
    for a head."""
    arms, seen = ("on-policy", "none", "tis", "lag clip + resync", "dlc"), []
    for seed in range(8):
        logits, _, _ = distributions(seed=seed)
        _, old, q = distributions(1.2, seed=seed + 100)
        a = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))

        def of(loss):
            x = logits.clone().requires_grad_()
            value = loss(make_batch(x, old, q, a))
            return None if value is None else torch.autograd.grad(value, x)[0]

        for name, arm in lesson4.ARMS.items():
            total = make_batch(logits, old, q, a)
            rho = (total.logp - total.rollout.logp_sampler).exp().clamp(max=2) if name == "tis" else torch.ones(B, T)
            if name in ("dlc", "lag clip + resync"):
                refused = lesson4.lag_ess(total.lag, MASK) < 0.5
                seen.append(refused)
                want = None if refused else closed_form(logits, old, q, a, at_most_two)
                if name != "dlc" and not refused:                # no center
                    r = total.lag.exp().clamp(max=2)
                    want = of(lambda b: lesson2.policy_loss(b.logp, r, A, MASK, int(MASK.sum())))
            else:
                want = of(lambda b: lesson2.policy_loss(b.logp, rho, A, MASK, int(MASK.sum())))
            got = of(arm["loss"])
            assert (got is None) == (want is None)
            if got is not None:
                close(got, want, name)
    assert True in seen and False in seen
    assert tuple(lesson4.ARMS) == arms
    assert [arm.get("head", 0) > 0 for arm in lesson4.ARMS.values()] == [False] * 4 + [True]
    assert [arm.get("period") for arm in lesson4.ARMS.values()] == [1, None, None, None, None]


# ---------------------------------------------------------------- the loop, on the real engine
class Recorder:
    """A Sampler that can do one thing wrong."""

    def __init__(self, engine, wrong=""):
        self.engine, self.wrong, self.rollouts, self.synced = engine, wrong, [], 0

    @property
    def version(self):
        return self.engine.version

    def sync(self, model, state=None):
        self.synced += 1
        if self.wrong == "no sync" and self.synced > 1:
            return
        if self.wrong == "prefix cache kept" and self.synced > 1:
            self.engine.llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": list(model.state_dict().items())}
            )
            self.engine.version += 1
            return
        self.engine.sync(model, state)

    def sample(self, prompts, *args, **kwargs):
        prompts = [p[:-1] * 20 + p for p in prompts]  # 169 tokens: prefix blocks of 128 are cached
        same = self.rollouts and self.wrong == "old batch kept"
        self.rollouts.append(
            replace(self.rollouts[-1], version=self.version) if same else self.engine.sample(prompts, *args, **kwargs)
        )
        return self.rollouts[-1]


def check_resync(trainer, engine, tokenizer, wrong=""):
    """A loss that refuses step 2: what is trained on then comes from the trainer's weights, and so does pi_old."""
    sampler, refused, trained = Recorder(engine, wrong), [], []

    def loss(batch):
        if batch.step == 2 and not refused:
            refused.append(batch)
            return None
        trained.append(batch)
        return -batch.logp[batch.rollout.mask].mean()  # moves the weights whatever the rewards

    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-3, weight_decay=0.0)
    run = lesson3.grpo(
        trainer, sampler, lesson1.SUM, tokenizer, optimizer, loss, steps=5, period=10, seed=0, prompts=4, group_size=2
    )
    for batch in run:
        mask = batch.rollout.mask
        # pi_old is at the sampler's weights, whenever it was synced: an fp32 engine differs by rounding
        assert (batch.logp_old - batch.rollout.logp_sampler)[mask].abs().max() < 2e-4
        assert batch.age == (batch.step - 2 if batch.step >= 2 else batch.step)
        assert (batch.lag[mask].abs().max() == 0) == (batch.age == 0)
        assert batch.dropped == (int(refused[0].rollout.mask.sum()) if batch.step == 2 else 0)
        assert batch.rollout.version == sampler.version
        assert batch is trained[-1]
    assert sampler.synced == 2 and len(trained) == 5
    assert (trained[2].rollout.prompt_ids == refused[0].rollout.prompt_ids).all()  # the same prompts, other responses
    shape = min(x.shape[1] for x in (trained[2].rollout.ids, refused[0].rollout.ids))
    assert not torch.equal(trained[2].rollout.ids[:, :shape], refused[0].rollout.ids[:, :shape])


def test_resync(trainer, engine, tokenizer):
    check_resync(trainer, engine, tokenizer)


@pytest.mark.parametrize("wrong", ["no sync", "prefix cache kept", "old batch kept"])
def test_resync_rejects(wrong, trainer, engine, tokenizer):
    rejected(lambda w: check_resync(trainer, engine, tokenizer, w), wrong)
    engine.llm.reset_prefix_cache()


def test_resync_rejects_an_old_policy_that_is_the_live_one(trainer, engine, tokenizer, monkeypatch):
    monkeypatch.setattr(lesson3.copy, "deepcopy", lambda x: x)
    rejected(lambda w: check_resync(trainer, engine, tokenizer, w), "aliased")


def test_resync_goes_through_perturb_and_the_period_counts_from_it(trainer, engine, tokenizer):
    """A refusal at step 2, a period of 3: ages 0 1 0 1 2 0 1; the engine holds the noisy weights after each sync."""
    noise, refused, ages = lesson3.parameter_noise(0.1, 0), [], []

    def loss(batch):
        if batch.step == 2 and not refused:
            refused.append(batch)
            return None
        return -batch.logp[batch.rollout.mask].mean()

    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3, weight_decay=0.0)
    noisy = copy.deepcopy(trainer)
    for batch in lesson3.grpo(
        trainer,
        engine,
        lesson1.SUM,
        tokenizer,
        optimizer,
        loss,
        steps=7,
        period=3,
        seed=0,
        prompts=4,
        group_size=2,
        perturb=noise,
    ):
        if batch.age == 0:
            noisy.load_state_dict(noise(trainer.state_dict()))
        ages.append(batch.age)
        assert (lesson1.logprobs(noisy, batch.rollout) - batch.rollout.logp_sampler)[
            batch.rollout.mask
        ].abs().max() < 2e-4
    assert ages == [0, 1, 0, 1, 2, 0, 1]


def test_head_of_the_real_engine(moved, engine, tokenizer):
    """The whole vocabulary comes back, each token once, whether -1 or its size is asked for."""
    engine.sync(moved)
    _, prompts = lesson1.make_prompts(lesson1.SUM, tokenizer, 8, np.random.default_rng(0))
    rollout, again = (engine.sample(prompts, 9, seed=0, head=head) for head in (-1, lesson1.vocabulary(moved)))
    assert torch.equal(rollout.head_ids, again.head_ids) and torch.equal(rollout.head_logp, again.head_logp)
    ids = rollout.head_ids[rollout.mask]
    assert (ids.sort(-1).values == torch.arange(17)).all()
    assert torch.allclose(rollout.head_logp[rollout.mask].exp().sum(-1), torch.ones(1), atol=1e-5)
    sampled = ids == rollout.ids[rollout.mask][:, None]
    assert torch.allclose(rollout.head_logp[rollout.mask][sampled], rollout.logp_sampler[rollout.mask])


# ---------------------------------------------------------------- the measure
def some_rollout(n: int = 6, length: int = 9):
    """Random digits in prompts and responses, without an engine. The last response is short."""
    rng = torch.Generator().manual_seed(0)
    prompts, ids = torch.randint(0, 10, (n, 9), generator=rng), torch.randint(0, 10, (n, length), generator=rng)
    mask, empty = torch.ones(n, length, dtype=torch.bool), torch.zeros(n, length, 0)
    mask[-1, 4:] = False
    return lesson1.Rollout(
        prompts,
        torch.ones_like(prompts, dtype=torch.bool),
        ids,
        mask,
        torch.zeros(n, length),
        empty.long(),
        empty,
        torch.ones(n, dtype=torch.bool),
        1.0,
        True,
        0,
    )


def check_kl(kl, trainer, moved, rollout):
    """Against the definition, position by position."""
    got = kl(trainer, moved, rollout)
    with torch.no_grad():
        p, q = (lesson1.response_logits(m, rollout).double().softmax(-1) for m in (trainer, moved))
    expected = (p * (p / q).log()).sum(-1)
    assert got.shape == rollout.mask.shape and not got.requires_grad, "a KL per position, without a graph"
    close(got[rollout.mask].double(), expected[rollout.mask], "KL(reference || model)", 1e-5)
    assert expected[rollout.mask].mean() > 1e-3


kl_of = (
    lambda p, q, r, m: (
        (log_p := lesson1.response_logits(p, r).float().log_softmax(-1))
        - lesson1.response_logits(q, r).float().log_softmax(-1)
    )
    .mul(m(log_p))
    .sum(-1)
)
WRONG_KL = {
    "swapped": lambda p, q, r: kl_of(q, p, r, torch.exp).detach(),
    "sampled tokens only": lambda p, q, r: lesson1.logprobs(p, r) - lesson1.logprobs(q, r),
    "of uniform tokens": lambda p, q, r: kl_of(p, q, r, lambda log_p: torch.full_like(log_p, 1 / 17)).detach(),
    "weighted once more": lambda p, q, r: kl_of(p, q, r, torch.exp).detach()
    * (lesson1.logprobs(p, r) - lesson1.logprobs(q, r)).exp(),
    "with its graph": lambda p, q, r: kl_of(p, q, r, torch.exp),
    "one number": lambda p, q, r: kl_of(p, q, r, torch.exp).detach().mean(),
}


def test_kl(tiny, moved):
    check_kl(lesson4.kl, lesson1.load_model(tiny), moved, some_rollout())


@pytest.mark.parametrize("name", WRONG_KL)
def test_kl_rejects(name, tiny, moved):
    trainer = lesson1.load_model(tiny)
    rejected(lambda f: check_kl(f, trainer, moved, some_rollout()), WRONG_KL[name])


def test_kl_in_micro_batches(tiny, moved, monkeypatch):
    monkeypatch.setattr(lesson1, "LOGITS_AT_ONCE", 1)
    check_kl(lesson4.kl, lesson1.load_model(tiny), moved, some_rollout())


SMALL = lesson4.Setting(steps=4, period=4, lr=3e-3, prompts=4, every=2)


@pytest.fixture(scope="module")
def reference(tiny, engine, tokenizer):
    return lesson4.reference_run(lesson1.load_model(tiny), engine, tokenizer, SMALL)


def kls(run, prefixes):
    return [step[prefixes] for step in run["steps"] if prefixes in step]


def test_the_reference_repeated_is_at_distance_zero(trainer, engine, tokenizer, reference):
    """The same seed is the same run, at every checkpoint and on both kinds of prefixes; another seed and a
    stale run are not."""
    one = lambda arm, seed: lesson4.run(trainer, engine, tokenizer, SMALL, arm, seed, reference, **lesson4.ARMS[arm])
    same, other, stale = one("on-policy", lesson4.REFERENCE_SEED), one("on-policy", 0), one("none", 0)
    assert list(reference) == [0, 2]
    assert kls(same, lesson4.FRESH) == [0.0, 0.0] == kls(same, lesson4.STALE)
    assert kls(other, lesson4.FRESH)[0] == 0 and kls(other, lesson4.FRESH)[1] > 1e-3
    assert kls(stale, lesson4.FRESH)[1] != kls(other, lesson4.FRESH)[1]
    # no sampler of its own is stale: it is judged on what the start policy wrote
    assert kls(other, lesson4.STALE)[1] != kls(other, lesson4.FRESH)[1]
    ages, ess = (
        [[step[key] for step in run["steps"]] for run in (stale, other)] for key in ("age", "ESS of responses")
    )
    assert ages == [[0, 1, 2, 3], [0, 0, 0, 0]] and ess[1] == [1.0] * 4 and ess[0][0] == 1 and ess[0][3] < 0.99
    assert 0 <= stale["accuracy"] <= 1 and stale["dropped tokens"] == 0
    start = lesson1.load_model(lesson1.policy()).state_dict()
    assert all(torch.equal(value, start[name]) for name, value in trainer.state_dict().items())  # `start` is left alone


def test_a_runs_record_is_that_of_its_batches(trainer, engine, tokenizer, reference, monkeypatch):
    """Each number from the batches themselves; the KL on the reference's responses of that step, and on the
    run's own; the
    head that the arm asks for, cut to the vocabulary; what held_out says of the trained model."""
    setting, batches, heads, models, given = replace(SMALL, lr=1e-2, steps=6), [], [], [], []
    training, sample, right_kl = lesson4.training, engine.sample, lesson4.kl
    monkeypatch.setattr(
        lesson4,
        "training",
        lambda model, *a, **k: (models.append(model), (batches.append(b) or b for b in training(model, *a, **k)))[1],
    )
    monkeypatch.setattr(engine, "sample", lambda *a, **k: heads.append(k.get("head", 0)) or sample(*a, **k))
    monkeypatch.setattr(
        lesson4, "kl", lambda p, q, r: given.append((copy.deepcopy(p.state_dict()), q, r)) or right_kl(p, q, r)
    )
    monkeypatch.setattr(lesson3, "held_out", lambda *a: {"sampled": 0.25, "greedy": a[0] is models[0]})
    record = lesson4.run(trainer, engine, tokenizer, setting, "dlc", 7, reference, **lesson4.ARMS["dlc"])
    column = lambda key: [step[key] for step in record["steps"]]
    for key, right in (
        ("ESS of responses", [lesson2.ess(b.lag_of_responses) for b in batches]),
        ("reward", [b.R.mean().item() for b in batches]),
        ("mean ratio", [b.lag[b.rollout.mask].double().exp().mean().item() for b in batches]),
        ("age", [b.age for b in batches]),
        ("step", list(range(6))),
    ):
        assert column(key) == pytest.approx(right, rel=1e-3), key
    assert record["dropped tokens"] == sum(b.dropped for b in batches) > 0 and record["accuracy"] == 0.25
    assert heads == [17] * (6 + sum(b.dropped > 0 for b in batches))
    assert [step["step"] for step in record["steps"] if lesson4.FRESH in step] == [0, 2]
    for (state, model, rollout), step, fresh in zip(given, (0, 0, 2, 2), (True, False) * 2):
        assert model is models[0] and rollout is (reference[step][1] if fresh else batches[step].rollout)
        assert all(torch.equal(value, state[name]) for name, value in reference[step][0].items())


def test_no_run_can_share_the_references_seed():
    with pytest.raises(ValueError):
        lesson1.seed(str(lesson4.REFERENCE_SEED))


def run_record(arm, kls, ages=(0, 1, 2), dropped=0, seed=0):
    steps = [
        {"step": k, "age": age, "reward": 0.5, "ESS of responses": 1.0, "mean ratio": 0.9 + 0.01 * k}
        for k, age in enumerate(ages)
    ]
    for step, value in zip(steps[::2], kls):
        step |= {lesson4.FRESH: value, lesson4.STALE: value / 10}
    return {"arm": arm, "seed": seed, "accuracy": 0.5, "dropped tokens": dropped, "steps": steps}


def check_over_floor(over_floor):
    """Two on-policy runs make the floor, .2; two checkpoints each."""
    rows = over_floor(
        [
            run_record("on-policy", [0.0, 0.2]),
            run_record("on-policy", [0.2, 0.4], seed=1),
            run_record("dlc", [0.0, 0.8], (0, 0, 1), 7),
        ]
    )
    fresh, stale = (f"{prefixes} / floor" for prefixes in (lesson4.FRESH, lesson4.STALE))
    assert [row[fresh] for row in rows] == pytest.approx([0.5, 1.5, 2.0]), "fresh prefixes"
    assert [row[stale] for row in rows] == pytest.approx([0.5, 1.5, 2.0]), "the sampler's prefixes"
    assert (
        [row["syncs"] for row in rows] == [1, 1, 2]
        and rows[2]["dropped tokens"] == 7
        and rows[2]["lowest mean ratio"] == 0.9
    )
    none = over_floor([run_record("on-policy", [0.0, 0.0]), run_record("dlc", [0.0, 0.8])])
    assert [row[fresh] for row in none] == [None, None], "without a floor there is no ratio"


def over_floor_with(base=lambda r: r["arm"] == "on-policy", pool=np.mean):
    def wrong(records):
        rows = lesson4.over_floor(records)
        for prefixes in (lesson4.FRESH, lesson4.STALE):
            floor = pool([pool(kls(r, prefixes)) for r in records if base(r)])
            for row, r in zip(rows, records):
                row[f"{prefixes} / floor"] = pool(kls(r, prefixes)) / floor if floor else None
        return rows

    return wrong


WRONG_FLOOR = {
    "of all arms": over_floor_with(lambda r: True),
    "of the first seed": over_floor_with(lambda r: r["arm"] == "on-policy" and r["seed"] == 0),
    "largest for mean": over_floor_with(pool=np.max),
}


def test_over_floor():
    check_over_floor(lesson4.over_floor)
    check_over_floor(over_floor_with())


@pytest.mark.parametrize("name", WRONG_FLOOR)
def test_over_floor_rejects(name):
    rejected(check_over_floor, WRONG_FLOOR[name])


def test_the_closing_line_follows_the_numbers():
    rows = lambda *kls: [
        {"arm": arm, f"{lesson4.FRESH} / floor": x} for arm, x in zip(("on-policy", "none", "tis", "dlc"), kls)
    ]
    assert "none 33.0, tis 12.1, dlc 1.1. DLC keeps" in lesson4.verdict(rows(1, 33.0, 12.1, 1.1))
    assert "none 1.5, tis 2.0, dlc 9.0. DLC does not keep" in lesson4.verdict(rows(1, 1.5, 2.0, 9.0))
    assert "does not keep" in lesson4.verdict(rows(1, 1, 1, math.nan))
    assert "no floor" in lesson4.verdict(rows(None, None, None, None))


@pytest.fixture
def in_process(engine16, monkeypatch):
    """The lesson takes the shared engine instead of starting one."""
    dtypes = []
    monkeypatch.setattr(lesson1, "Sampler", lambda path, dtype="bfloat16": dtypes.append(dtype) or engine16)
    return dtypes


def test_quick_run(in_process, tmp_path, capsys, monkeypatch):
    """Lag alone, then lag and discrepancy: the stale arms of the second, and only these, have a noisy engine."""
    noisy, grpo = [], lesson3.grpo
    monkeypatch.setattr(lesson3, "grpo", lambda *a, **k: noisy.append(bool(k.get("perturb"))) or grpo(*a, **k))
    result = lesson4.main(["--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert in_process == ["bfloat16"] and printed.count("KL from on-policy training") == 2 and "predicted" in printed
    for part, arms in ((result, ("on-policy", "none", "tis", "dlc")), (result["both"], ("on-policy", "lag clip + resync", "dlc"))):
        assert tuple(run["arm"] for run in part["runs"]) == arms == tuple(row["arm"] for row in part["arms"])
        assert all(len(run["steps"]) == 6 for run in part["runs"])
    assert noisy == [False] * 7 + [True, True] and (tmp_path / "04_dlc.png").stat().st_size > 10_000


def test_a_run_that_learns_nothing_has_no_floor(in_process, tmp_path, capsys, monkeypatch):
    """At a learning rate of 0 the floor is 0: the table has dashes, the last line says so, nothing dies."""
    monkeypatch.setitem(lesson4.SIZES, "tiny", lesson4.Setting(steps=2, period=2, lr=0.0, prompts=2))
    monkeypatch.setattr(lesson4, "BOTH", replace(lesson4.BOTH, steps=2, period=2, prompts=2, every=2))
    result = lesson4.main(["--out", str(tmp_path)])
    assert {row[f"{lesson4.FRESH} / floor"] for row in result["arms"]} == {
        None
    } and "no floor" in capsys.readouterr().out
