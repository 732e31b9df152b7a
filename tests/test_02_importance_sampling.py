"""Lesson 2's objective and weights against slow specifications, and against the wrong versions."""
import json
import math
from importlib import import_module

import pytest
import torch
from conftest import rejected

lesson2 = import_module("02_importance_sampling")
lesson1 = lesson2.lesson1
ONE = torch.ones(1)
PHI = {"kpop": {"phi": 0.05}}          # kpop's default, in place of the phi that masks a tenth


# ---------------------------------------------------------------- advantages
def check_advantages(f):
    R = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.2, 0.2, 0.2, 0.8])
    A = f(R, 4, "std")
    assert torch.allclose(A[:4], torch.tensor([1.0, -1.0, -1.0, 1.0])), "group 1, std"
    s = math.sqrt(3)
    assert torch.allclose(A[4:], torch.tensor([-1 / s, -1 / s, -1 / s, s]), atol=1e-6), "group 2, std"
    mean = torch.tensor([0.5, -0.5, -0.5, 0.5, -0.15, -0.15, -0.15, 0.45])
    assert torch.allclose(f(R, 4, "mean"), mean), "mean"
    assert torch.equal(f(R, 4, "raw"), R), "raw"
    for kind in ("std", "mean"):
        for value in (0.0, 1.0, 0.1, 1 / 3, 0.7):                       # 0.1 eight times: the float mean is not 0.1
            assert (f(torch.full((16,), value), 8, kind) == 0).all(), f"equal rewards {value}: A is exactly 0"
        # rewards equal but for the last bit are equal
        for value in (0.1, 1.0, -7.3):
            almost = torch.full((8,), value)
            almost[0] = torch.nextafter(almost[0], torch.tensor(9.0))
            assert (f(almost, 8, kind) == 0).all(), f"rewards equal up to rounding, {value}: A is exactly 0"
    # a small difference counts, near 0 and, in float64, near 1
    small = f(torch.tensor([0.0, 2e-6]), 2, "std")
    assert torch.allclose(small, torch.tensor([-1.0, 1.0])), "small rewards, no epsilon"
    close = torch.tensor([1.0, 1.0, 1.0, 1 + 1e-5], dtype=torch.float64)
    assert torch.allclose(f(close, 4, "std"), torch.tensor([-1 / s, -1 / s, -1 / s, s]).double()), "float64 rewards"
    # any real dtype
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        A = f(torch.tensor([1, 0, 0, 0]).to(dtype), 4, "std")
        assert A.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), dtype
        assert torch.allclose(A.float(), torch.tensor([s, -1 / s, -1 / s, -1 / s])), dtype
        assert f(torch.tensor([1, 0]).to(dtype), 2, "raw").tolist() == [1.0, 0.0], dtype
    A = torch.tensor([s, -1 / s, -1 / s, -1 / s])
    # float64 inside: in float32 the sum overflows
    assert torch.allclose(f(torch.tensor([3e38, 3e38, 3e38, 0.0]), 4, "std"), -A.flip(0)), "large rewards"


def check_refusal(f):
    """A reward that is no number is one clear error, not a group of NaN."""
    for kind in ("std", "mean", "raw"):
        for bad in (math.nan, math.inf):
            try:
                A = f(torch.tensor([1.0, bad, 0.0, 1.0]), 2, kind)
            except ValueError as error:
                assert str(bad) in str(error) and "reward" in str(error)
            else:
                raise AssertionError(f"a reward {bad} gave {A.tolist()}")


def wrong_advantages(group):
    def f(R, group_size, kind):
        return R.float() if kind == "raw" else group(R.float(), group_size, kind).flatten()
    return f


def centered(R, G):
    g = R.view(-1, G)
    return g, g - g.mean(1, keepdim=True)


def divided(R, G, kind, epsilon, correction=0):
    g, A = centered(R, G)
    return A / (g.std(1, keepdim=True, correction=correction) + epsilon) if kind == "std" else A


def only_bitwise_equal(R, group_size, kind):
    """What lesson 2 did once: groups equal up to the last bit give [-2.83, 0, 0, ...]."""
    g = R.double().view(-1, group_size)
    A = divided(R.double(), group_size, kind, 0)
    A = torch.where(g.amax(1, keepdim=True) == g.amin(1, keepdim=True), 0.0, A).flatten()
    return R if kind == "raw" else A.to(torch.promote_types(R.dtype, torch.float32))


def in_float32_only(R, group_size, kind):
    return R if kind == "raw" else divided(R, group_size, kind, 0).flatten().nan_to_num(0)


def float32_inside(R, group_size, kind):
    right, A = lesson2.advantages(R, group_size, kind), divided(R.float(), group_size, kind, 0).flatten()
    return torch.where(right == 0, 0.0, A).to(right.dtype)


def smoothed(R, group_size):
    A = lesson2.advantages(R, group_size, "mean")
    return A / (R.double().view(-1, group_size).std(1, correction=0) + 1e-6).repeat_interleave(group_size).to(A.dtype)


WRONG_ADVANTAGES = {
    "mean of the batch": wrong_advantages(lambda R, G, k: (R - R.mean()) / (R.std(correction=0) if k == "std" else 1)),
    "sample's std": wrong_advantages(lambda R, G, k: divided(R, G, k, 1e-8, 1)),
    "groups interleaved": wrong_advantages(lambda R, G, k: divided(R.view(G, -1).T.reshape(-1), G, k, 1e-8)),
    "epsilon instead of a rule": wrong_advantages(lambda R, G, k: divided(R, G, k, 1e-8)),
    "equal groups give NaN": wrong_advantages(lambda R, G, k: divided(R, G, k, 0)),
    "only bitwise equal rewards are equal": only_bitwise_equal,
    "floating dtypes only": in_float32_only,
    "computed in float32": lambda R, G, k: R.float() if k == "raw" else float32_inside(R, G, k),
    "an absolute tolerance": lambda R, G, k: torch.where(
        ((g := R.double().view(-1, G)).amax(1) - g.amin(1) < 1e-4).repeat_interleave(G), 0.0,
        lesson2.advantages(R, G, k)),
    "epsilon under the std": lambda R, G, k: lesson2.advantages(R, G, k) if k != "std" else smoothed(R, G),
}


def test_advantages():
    check_advantages(lesson2.advantages)


def test_rewards_that_are_no_numbers_are_refused():
    check_refusal(lesson2.advantages)
    for wrong in (only_bitwise_equal, lambda R, G, k: lesson2.advantages(R.nan_to_num(0, 0, 0), G, k)):
        rejected(check_refusal, wrong)


def test_the_advantages_of_the_lessons_runs_are_those_of_float32():
    """Groups of 8 with rewards 0 and 1, as all lessons have: bit for bit what float32 alone gives."""
    for right in range(9):
        R = torch.tensor([1.0] * right + [0.0] * (8 - right))
        for kind in ("std", "mean"):
            float32 = divided(R, 8, kind, 0)[0] if 0 < right < 8 else torch.zeros(8)
            assert torch.equal(lesson2.advantages(R, 8, kind), float32)


@pytest.mark.parametrize("name", WRONG_ADVANTAGES)
def test_advantages_rejects(name):
    rejected(check_advantages, WRONG_ADVANTAGES[name])


# ---------------------------------------------------------------- the loss
def check_policy_loss(f):
    # a fixed denominator: two of five tokens kept
    log_ratio = torch.tensor([[0.1, -1.5, 0.8, -10.0, 0.3]])
    mask = torch.ones(1, 5, dtype=torch.bool)
    weight = log_ratio.exp() * torch.tensor([[1, 0, 0, 0, 1]])
    logp = torch.full((1, 5), -1.0, requires_grad=True)
    loss = f(logp, weight, ONE, mask, 5)
    assert abs(loss.item() - 0.4910) < 1e-4, "rejected tokens stay in the denominator"
    loss.backward()
    assert torch.allclose(logp.grad, -weight / 5), "the gradient of a token is -A w / N"
    # N is the whole batch's, not what this micro-batch has
    assert abs(f(logp, weight, ONE, mask, 20).item() - 0.4910 / 4) < 1e-4, "divide by n_tokens"
    # all masked: 0, with gradients that are finite and 0
    logp = torch.full((1, 5), -math.inf, requires_grad=True)
    loss = f(logp, torch.zeros(1, 5), ONE, ~mask, 5)
    loss.backward()
    assert loss.item() == 0 and (logp.grad == 0).all(), "nothing but padding"
    # padded rows do not dilute: 1 per token is 1
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert f(torch.full((2, 4), -1.0), torch.ones(2, 4), torch.ones(2), mask, 4).item() == 1.0, "padded rows"
    # a sequence's advantage goes to each of its tokens, the center is subtracted before
    logp = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    weight, A, mask = torch.tensor([[2.0, 1.0], [1.0, 1.0]]), torch.tensor([1.0, -0.5]), torch.ones(2, 2).bool()
    loss = f(logp, weight, A, mask, 4, torch.full((2, 2), 0.25))
    assert abs(loss.item() - -(1 * (-2 - 0.25 - 2 - 0.25) - 0.5 * (-3 - 0.25 - 4 - 0.25)) / 4) < 1e-6, "the center"
    # the center has a gradient, +A / N; the weight has none
    center, weight = torch.full((2, 2), 0.25, requires_grad=True), weight.requires_grad_()
    f(logp.requires_grad_(), weight, A, mask, 4, center).backward()
    assert center.grad is not None and torch.allclose(center.grad, A[:, None].expand(2, 2) / 4), "the center's gradient"
    assert weight.grad is None or (weight.grad == 0).all(), "the weight is a constant"
    # padding: NaN and inf in the weight, the center, the log-probs, and the advantage of a masked row
    mask = torch.tensor([[True, True, False], [False, False, False]])
    right = -(2.0 * (3 * -1.0 - 0.5) + 2.0 * (1 * -1.0 - 0.5)) / 7
    for bad in (math.nan, math.inf, 5.0):
        for where in ("weight", "center", "advantage", "logp"):
            x = {"logp": torch.full((2, 3), -1.0), "weight": torch.tensor([[3.0, 1.0, 0.0]] * 2),
                 "center": torch.full((2, 3), 0.5), "advantage": torch.tensor([2.0, 1.0])}
            if where == "advantage":
                x[where][1] = bad
            else:
                x[where][~mask] = bad
            x["logp"].requires_grad_(), x["center"].requires_grad_()
            loss = f(x["logp"], x["weight"], x["advantage"], mask, 7, x["center"])
            assert abs(loss.item() - right) < 1e-6, f"{bad} on padding, in {where}"
            loss.backward()
            for key, grad in (("logp", [[-6.0, -2, 0], [0, 0, 0]]), ("center", [[2.0, 2, 0], [0, 0, 0]])):
                why = f"{key}'s gradient: {bad} on padding, in {where}"
                assert torch.allclose(x[key].grad, torch.tensor(grad) / 7), why
    # a NaN on a response token must show
    logp = torch.tensor([[-1.0, math.nan]])
    assert f(logp, torch.ones(1, 2), ONE, torch.ones(1, 2).bool(), 2).isnan(), "a NaN inside a response is hidden"


def weighted_sum(p, w, A, m, c):
    return torch.where(m, A[:, None] * (w.detach() * p - c), 0.0)


WRONG_LOSS = {
    "mean over what survived": lambda p, w, A, m, n, c=0.0:
        -weighted_sum(p, w, A, m, c).sum() / max(int(((w != 0) & m).sum()), 1),
    "mean over padding too": lambda p, w, A, m, n, c=0.0: -weighted_sum(p, w, A, m, c).mean(),
    "mean of the sequences' means": lambda p, w, A, m, n, c=0.0:
        -(weighted_sum(p, w, A, m, c).sum(1) / m.sum(1).clamp(min=1)).mean(),
    "sign": lambda p, w, A, m, n, c=0.0: -lesson2.policy_loss(p, w, A, m, n, c),
    "mask multiplied": lambda p, w, A, m, n, c=0.0: -(A[:, None] * (w * p - c) * m).sum() / n,
    "center added": lambda p, w, A, m, n, c=0.0: lesson2.policy_loss(p, w, A, m, n, -1 * c),
    "center weighted": lambda p, w, A, m, n, c=0.0: lesson2.policy_loss(p - c, w, A, m, n),
    "advantages of the sequences mixed": lambda p, w, A, m, n, c=0.0: lesson2.policy_loss(p, w, A.flip(0), m, n, c),
    "mean over the mask, not n_tokens": lambda p, w, A, m, n, c=0.0:
        lesson2.policy_loss(p, w, A, m, max(int(m.sum()), 1), c),
    "center detached": lambda p, w, A, m, n, c=0.0:
        lesson2.policy_loss(p, w, A, m, n, c.detach() if isinstance(c, torch.Tensor) else c),
    "center leaks from padding": lambda p, w, A, m, n, c=0.0:
        lesson2.policy_loss(p, w, A, m, n) + (A[:, None] * c * torch.ones_like(p)).sum() / n,
    "where after the product": lambda p, w, A, m, n, c=0.0: -weighted_sum(p, w, A, m, c).sum() / n,
    "weight not detached": lambda p, w, A, m, n, c=0.0:
        -torch.where(m, A[:, None] * (w * p - c), 0.0).sum() / n,
    "nan_to_num": lambda p, w, A, m, n, c=0.0: -(A[:, None] * (w.detach() * p - c) * m).nan_to_num(0, 0, 0).sum() / n,
    "advantage of a masked row not masked": lambda p, w, A, m, n, c=0.0: -(A * torch.where(
        m, w.detach().nan_to_num() * torch.where(m, p, 0.0) - c, 0.0).sum(1)).sum() / n,
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
    nan = [torch.where(mask, x, math.nan) for x in (logp, old, sampler)]
    assert torch.equal(weight(*nan, torch.where(mask.any(1), A, math.nan), mask), w)
    far = weight(logp, old, sampler - 100, A, mask)
    assert torch.isfinite(far).all() and torch.isfinite(weight(logp - 100, old, sampler, A, mask)).all()
    w = weight(logp, old - 100, sampler - 200, torch.zeros(4), mask)
    assert lesson2.policy_loss(logp, w, torch.zeros(4), mask, 11).item() == 0     # 0 times a huge weight: 0, not NaN


# A slow specification of every weight: one response (lists over its tokens), one token t at a time.
# p, o, q: log pi, log pi_old, log mu; A: its advantage; others: the whole batch's (p, q), for snis.
def product(p, q):
    return math.exp(sum(p) - sum(q))


def clipped(r, A, low, high):
    """Would min(r A, clip(r) A) be flat here?"""
    return abs(A) > 0 and min(r * A, max(1 - low, min(r, 1 + high)) * A) != r * A


def two_event_kl(a, b):
    return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))


def spec_prefix_is(p, o, q, A, t, others):
    return math.exp(max(-20, min(20, sum(p[i] - q[i] for i in range(t + 1)))))      # it passes e^20 on the way


def spec_kpop(p, o, q, A, t, others, phi=0.05):
    a, b = math.exp(p[t]), math.exp(q[t])
    return float(max(two_event_kl(a, b), two_event_kl(b, a)) <= phi)


def spec_icepop(p, o, q, A, t, others, low=0.5, high=5.0):
    return math.exp(p[t] - q[t]) if low <= math.exp(p[t] - q[t]) <= high else 0.0


def spec_seq_mis(p, o, q, A, t, others, C=2.0):
    return product(p, q) if product(p, q) <= C else 0.0


def spec_ppo(p, o, q, A, t, others, low=0.2, high=0.2):
    r = math.exp(p[t] - o[t])
    return 0.0 if clipped(r, A, low, high) else r


def spec_minirl(p, o, q, A, t, others, low=0.2, high=0.27, C=5.0):
    return 0.0 if clipped(math.exp(p[t] - o[t]), A, low, high) else min(math.exp(p[t] - q[t]), C)


def spec_dsv32(p, o, q, A, t, others, delta=0.5, low=0.2, high=0.2):
    r = math.exp(p[t] - q[t])
    dropped = A < 0 and (sum(q) - sum(p)) / len(p) > delta
    return 0.0 if clipped(r, A, low, high) or dropped else r


SPEC = {
    "none": lambda p, o, q, A, t, others: 1.0,
    "token-is": lambda p, o, q, A, t, others: math.exp(p[t]) / math.exp(q[t]),
    "tis": lambda p, o, q, A, t, others, C=2.0: min(math.exp(p[t] - q[t]), C),
    "icepop": spec_icepop,
    "kpop": spec_kpop,
    "prefix-is": spec_prefix_is,
    "seq-is": lambda p, o, q, A, t, others: product(p, q),
    "seq-tis": lambda p, o, q, A, t, others, C=2.0: min(product(p, q), C),
    "seq-mis": spec_seq_mis,
    "geo": lambda p, o, q, A, t, others: product(p, q) ** (1 / len(p)),
    "snis": lambda p, o, q, A, t, others: product(p, q) / (sum(product(*each) for each in others) / len(others)),
    "ppo": spec_ppo,
    "minirl": spec_minirl,
    "dsv32": spec_dsv32,
}
SETTINGS = {   # others than the defaults
    "tis": {"C": 1.3}, "icepop": {"low": 0.8, "high": 1.5}, "kpop": {"phi": 0.2},
    "seq-tis": {"C": 1.3}, "seq-mis": {"C": 5.0}, "ppo": {"low": 0.4, "high": 0.1},
    "minirl": {"low": 0.4, "high": 0.1, "C": 1.3}, "dsv32": {"delta": 0.1, "low": 0.4, "high": 0.1}}


def compare(name, f, logp, old, sampler, A, lengths, why, tolerance=1e-9, **settings):
    """f's weights, token by token, against the specification; padding holds rubbish."""
    mask = torch.arange(logp.shape[1]) < torch.tensor(lengths)[:, None]
    full = [x.masked_fill(~mask, 5.0 * (i + 1)).requires_grad_(i == 0) for i, x in enumerate((logp, old, sampler))]
    w = f(*full, A, mask, **settings)
    assert not w.requires_grad, "the weight is a constant to the gradient"
    rows = [[x[i, :n].double().tolist() for x in (logp, old, sampler)] for i, n in enumerate(lengths)]
    others = [(p, q) for p, _, q in rows]
    for i, (p, o, q) in enumerate(rows):
        for t in range(lengths[i]):
            right = SPEC[name](p, o, q, A[i].item(), t, others, **settings)
            assert abs(w[i, t].item() - right) < tolerance * max(1, right), f"{why}: response {i}, token {t}"
        assert (w[i, lengths[i]:] == 0).all(), "0 on padding"


def check_weight(name, f):
    """A batch in which every cap, band and clip bites somewhere and spares somewhere; padding holds rubbish."""
    generator = torch.Generator().manual_seed(3)
    B, T = 24, 7
    old = -2.5 * torch.rand(B, T, generator=generator, dtype=torch.float64) - 0.05
    logp = (old + 0.35 * torch.randn(B, T, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    sampler = (old + 0.7 * torch.randn(B, T, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    sampler[:4] = (sampler[:4] + 1.2).clamp(max=-0.01)           # responses that mu likes much better
    sampler[4:8, ::2] -= 2.0                                     # and tokens that pi does
    lengths = [1 + i % T for i in range(B)]
    A = torch.tensor([1.0, -1.0, 0.5, -0.3, 0.0, 2.0, -2.0, 1.0] * 3, dtype=torch.float64)
    compare(name, f, logp, old, sampler, A, lengths, "a mixed batch")
    # overflow: a log-ratio of 100 and advantage 0 make a loss of 0, not NaN
    p, q, both = torch.full((1, 2), -1.0), torch.full((1, 2), -101.0), torch.ones(1, 2, dtype=torch.bool)
    far = f(p, p, q, torch.zeros(1), both)
    assert torch.isfinite(far).all(), "a log-ratio of 100"
    if name == "token-is":
        assert abs(far[0, 0].item() / math.exp(20) - 1) < 1e-5
    # an empty response counts for nothing
    p, q = torch.tensor([[-1.0], [-1.0], [-9.0]]), torch.tensor([[-2.0], [-1.0], [-1.0]])
    w = f(p, p, q, torch.ones(3), torch.tensor([[True], [True], [False]]))
    batch = [([-1.0], [-2.0]), ([-1.0], [-1.0])]
    right = [SPEC[name](p, p, q, 1.0, 0, batch) for p, q in batch]
    assert torch.allclose(w[:, 0], torch.tensor([*right, 0.0]), atol=1e-6), "a response without tokens"
    # nothing left: all masked
    p = torch.full((2, 2), -1.0)
    assert (f(p, p, p - 1, torch.ones(2), torch.zeros(2, 2, dtype=torch.bool)) == 0).all(), "nothing but padding"
    # both sides of each edge, for both signs of A: pi/mu = pi/pi_old = r
    edges = [0.19, 0.21, 0.48, 0.52, 0.74, 0.78, 0.79, 0.81, 0.835, 1.17, 1.19, 1.21, 1.23, 1.26, 1.28]
    edges += [1.98, 2.02, 4.9, 5.1]
    edges = torch.tensor(edges, dtype=torch.float64).log()[:, None].repeat(2, 1)
    A = torch.ones(len(edges), dtype=torch.float64)
    A[len(edges) // 2:] = -1
    base = torch.full_like(edges, -2.0)
    compare(name, f, base + edges, base, base, A, [1] * len(edges), "the edges of caps, bands and clips")
    # in log space: improbable tokens, and products of many ratios, in float32
    p = torch.full((2, 3), -110.0)
    compare(name, f, p, p - 0.1, p - 0.4, torch.tensor([1.0, -1.0]), [3, 2], "log-probs of -110", 1e-5)
    half = torch.tensor([-5.0] * 200 + [-25.0] * 200)
    p = torch.stack([half, half.flip(0)])
    q = p.flip(0)
    compare(name, f, p, q, q, torch.tensor([1.0, -1.0]), [400, 400], "400 tokens", 1e-5)
    # the settings are settings
    if name in SETTINGS:
        A = torch.tensor([1.0, -1.0, 0.5, -0.3, 0.0, 2.0, -2.0, 1.0] * 3, dtype=torch.float64)
        compare(name, f, logp, old, sampler, A, lengths, f"with {SETTINGS[name]}", **SETTINGS[name])


@pytest.mark.parametrize("name", SPEC)
def test_weight(name):
    check_weight(name, lesson2.CORRECTIONS[name])


def e(x):
    return x.detach().clamp(-20, 20).exp()


def where(m, x):
    return torch.where(m, x, 0.0)


def total(p, s, m):
    return where(m, (p - s).detach()).sum(1, keepdim=True)


def mean_log(p, s, m):
    return total(p, s, m) / m.sum(1, keepdim=True).clamp(min=1)


def seq(p, s, m):
    return e(total(p, s, m))


def prefix(p, s, m):
    return e(where(m, (p - s).detach()).cumsum(1))


def spread(x, m):
    return where(m, x.expand_as(m))


def band(x, low=0.5, high=5):
    return (x >= low) & (x <= high)


def rescaled(w, m):
    return w * m.sum() / (w > 0).sum().clamp(min=1)


def keeps(r, A, high=0.2, low=0.2):
    return lesson2.ppo_keeps(r, A, low, high)


def one_way_kl(p, s):
    a, b = e(p), e(s)
    return a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()


def dropped(A, mean, delta=0.5):
    return (A[:, None] < 0) & (mean > delta)


def narrow(r, A, low, high):
    """PPO's clip with the inverse of its upper bound as the lower one."""
    return lesson2.ppo_keeps(r, A, 1 - 1 / (1 + high), high)


def by_token(p, s, m):
    return where(m, e(p - s)).masked_fill(~m, 1)


WRONG_WEIGHTS = [
    ("token-is", "not detached", lambda p, o, s, A, m: where(m, (p - s).clamp(-20, 20).exp())),
    ("token-is", "upside down", lambda p, o, s, A, m: where(m, e(s - p))),
    ("token-is", "old for current", lambda p, o, s, A, m: where(m, e(o - s))),
    ("token-is", "lag only", lambda p, o, s, A, m: where(m, e(p - o))),
    ("token-is", "corrected twice", lambda p, o, s, A, m: where(m, e(p - s) * e(o - s))),
    ("token-is", "padding included", lambda p, o, s, A, m: e(p - s)),
    ("token-is", "overflows", lambda p, o, s, A, m: where(m, (p - s).detach().exp())),
    ("prefix-is", "without the token itself", lambda p, o, s, A, m: where(m, prefix(p, s, m) / e(p - s))),
    ("prefix-is", "from the end", lambda p, o, s, A, m: where(m, seq(p, s, m) / prefix(p, s, m) * e(p - s))),
    ("prefix-is", "padding not masked", lambda p, o, s, A, m: prefix(p, s, m)),
    ("prefix-is", "padding in the product", lambda p, o, s, A, m: where(m, e((p - s).flip(1).cumsum(1).flip(1)))),
    ("prefix-is", "the whole response", lambda p, o, s, A, m: spread(seq(p, s, m), m)),
    ("prefix-is", "mean for sum", lambda p, o, s, A, m:
        where(m, e(where(m, (p - s).detach()).cumsum(1) / m.cumsum(1).clamp(min=1)))),
    ("prefix-is", "a product of clamped ratios", lambda p, o, s, A, m: where(m, by_token(p, s, m).cumprod(1))),
    ("prefix-is", "lag only", lambda p, o, s, A, m: where(m, prefix(p, o, m))),
    ("prefix-is", "along the batch", lambda p, o, s, A, m: where(m, e(where(m, (p - s).detach()).cumsum(0)))),
    ("prefix-is", "not detached", lambda p, o, s, A, m: where(m, where(m, p - s).cumsum(1).clamp(-20, 20).exp())),
    ("tis", "cap on the log-ratio", lambda p, o, s, A, m: where(m, e((p - s).clamp(max=2)))),
    ("tis", "masked, not capped", lambda p, o, s, A, m: where(m, e(p - s) * (e(p - s) <= 2))),
    ("tis", "floored too", lambda p, o, s, A, m: where(m, e(p - s).clamp(0.5, 2))),
    ("tis", "discrepancy only", lambda p, o, s, A, m: where(m, e(o - s).clamp(max=2))),
    ("tis", "the gradient flows through", lambda p, o, s, A, m: where(m, (p - s).clamp(-20, 20).exp().clamp(max=2))),
    ("tis", "a quotient of probabilities", lambda p, o, s, A, m: where(m, (p.detach().exp() / s.exp()).clamp(max=2))),
    ("tis", "cap written in", lambda p, o, s, A, m, **settings: where(m, e(p - s).clamp(max=2))),
    ("icepop", "clamped to the band", lambda p, o, s, A, m: where(m, e(p - s).clamp(0.5, 5))),
    ("icepop", "band on the inverse ratio", lambda p, o, s, A, m: where(m, e(p - s) * band(e(s - p)))),
    ("icepop", "indicator only", lambda p, o, s, A, m: where(m, band(e(p - s)).double())),
    ("icepop", "survivors rescaled", lambda p, o, s, A, m: rescaled(where(m, e(p - s) * band(e(p - s))), m)),
    ("icepop", "band written in", lambda p, o, s, A, m, **settings: where(m, e(p - s) * band(e(p - s)))),
    ("kpop", "one direction only", lambda p, o, s, A, m: where(m, (one_way_kl(p, s) <= 0.05).double())),
    ("kpop", "without the other event", lambda p, o, s, A, m:
        where(m, (torch.maximum(e(p) * (p - s), e(s) * (s - p)) <= 0.05).double())),
    ("seq-is", "mean for sum", lambda p, o, s, A, m: spread(e(mean_log(p, s, m)), m)),
    ("seq-is", "padding in the product", lambda p, o, s, A, m: spread(e((p - s).sum(1, keepdim=True)), m)),
    ("seq-is", "product up to the token", lambda p, o, s, A, m: where(m, e(where(m, (p - s).detach()).cumsum(1)))),
    ("seq-is", "product over the batch", lambda p, o, s, A, m: where(m, e(total(p, s, m).sum()).expand_as(p))),
    ("seq-tis", "each token capped", lambda p, o, s, A, m:
        spread(where(m, e(p - s).clamp(max=2)).masked_fill(~m, 1).prod(1, keepdim=True), m)),
    ("seq-tis", "dropped, not capped", lambda p, o, s, A, m: spread(seq(p, s, m) * (seq(p, s, m) <= 2), m)),
    ("seq-tis", "cap on the sum of logs", lambda p, o, s, A, m: spread(e(total(p, s, m).clamp(max=2)), m)),
    ("seq-tis", "a product of ratios", lambda p, o, s, A, m:
        spread(by_token(p, s, m).prod(1, keepdim=True).clamp(max=2), m)),
    ("seq-tis", "cap written in", lambda p, o, s, A, m, **settings: spread(seq(p, s, m).clamp(max=2), m)),
    ("seq-mis", "capped, not dropped", lambda p, o, s, A, m: spread(seq(p, s, m).clamp(max=2), m)),
    ("seq-mis", "small ratios dropped too", lambda p, o, s, A, m: spread((r := seq(p, s, m)) * band(r, 0.5, 2), m)),
    ("seq-mis", "indicator only", lambda p, o, s, A, m: spread((seq(p, s, m) <= 2).double(), m)),
    ("geo", "sum for mean", lambda p, o, s, A, m: spread(seq(p, s, m), m)),
    ("geo", "divided by the padded length", lambda p, o, s, A, m: spread(e(total(p, s, m) / p.shape[1]), m)),
    ("geo", "arithmetic mean of ratios", lambda p, o, s, A, m:
        spread(where(m, e(p - s)).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1), m)),
    ("snis", "sum to one", lambda p, o, s, A, m: spread((r := seq(p, s, m)) / r[m.any(1)].sum(), m)),
    ("snis", "normalized by the tokens' mean", lambda p, o, s, A, m:
        spread((r := seq(p, s, m)) / where(m, r.expand_as(p)).sum() * m.sum(), m)),
    ("snis", "not normalized", lambda p, o, s, A, m: spread(seq(p, s, m), m)),
    ("ppo", "ratio against mu", lambda p, o, s, A, m: where(m, e(p - s) * keeps(e(p - s), A))),
    ("ppo", "clipped whatever the sign", lambda p, o, s, A, m: where(m, e(p - o) * band(e(p - o), 0.8, 1.2))),
    ("ppo", "signs swapped", lambda p, o, s, A, m: where(m, e(p - o) * keeps(e(p - o), -A))),
    ("ppo", "clamped, gradient kept", lambda p, o, s, A, m: where(m, e(p - o).clamp(0.8, 1.2))),
    ("ppo", "lower bound 1 / 1.2", lambda p, o, s, A, m: where(m, e(p - o) * narrow(e(p - o), A, 0.2, 0.2))),
    ("ppo", "upper bound 1.24", lambda p, o, s, A, m: where(m, e(p - o) * keeps(e(p - o), A, high=0.24))),
    ("ppo", "upper bound 1.16", lambda p, o, s, A, m: where(m, e(p - o) * keeps(e(p - o), A, high=0.16))),
    ("ppo", "lower bound .76", lambda p, o, s, A, m: where(m, e(p - o) * keeps(e(p - o), A, low=0.24))),
    ("ppo", "bounds written in", lambda p, o, s, A, m, **settings: where(m, e(p - o) * keeps(e(p - o), A))),
    ("minirl", "clip on the whole ratio", lambda p, o, s, A, m:
        where(m, e(p - s).clamp(max=5) * keeps(e(p - s), A, 0.27))),
    ("minirl", "lag for the weight", lambda p, o, s, A, m: where(m, e(p - o).clamp(max=5) * keeps(e(p - o), A, 0.27))),
    ("minirl", "uncapped", lambda p, o, s, A, m: where(m, e(p - s) * keeps(e(p - o), A, 0.27))),
    ("dsv32", "both signs masked", lambda p, o, s, A, m:
        where(m, e(p - s) * keeps(e(p - s), A) * (-mean_log(p, s, m) <= 0.5))),
    ("dsv32", "sum for mean", lambda p, o, s, A, m:
        where(m, e(p - s) * keeps(e(p - s), A) * ~dropped(A, -total(p, s, m)))),
    ("dsv32", "direction of the mean", lambda p, o, s, A, m:
        where(m, e(p - s) * keeps(e(p - s), A) * ~dropped(A, mean_log(p, s, m)))),
]


@pytest.mark.parametrize("name, wrong", [(name, wrong) for name, _, wrong in WRONG_WEIGHTS],
                         ids=[f"{name}: {why}" for name, why, _ in WRONG_WEIGHTS])
def test_weight_rejects(name, wrong):
    rejected(lambda f: check_weight(name, f), wrong)


def test_three_policies_on_fixed_numbers():
    """mu = -1.00, old = -1.10, new = -1.40: discrepancy -0.10, lag -0.30, total -0.40."""
    p, o, s = (torch.tensor([[x]]) for x in (-1.40, -1.10, -1.00))
    w = {name: f(p, o, s, ONE, torch.ones(1, 1, dtype=torch.bool)).item() for name, f in lesson2.CORRECTIONS.items()}
    for name, right in (("tis", 0.67032), ("token-is", 0.67032), ("ppo", math.exp(-0.3))):
        assert abs(w[name] - right) < 1e-5


def test_a_sequence_ratio_grows_with_length_and_its_geometric_mean_does_not():
    for T, right in ((10, 1.127), (100, 3.320)):
        mask, p, s = torch.ones(1, T, dtype=torch.bool), torch.full((1, T), -0.988), torch.full((1, T), -1.0)
        assert abs(lesson2.CORRECTIONS["seq-is"](p, p, s, ONE, mask)[0, 0].item() - right) < 1e-3
        assert abs(lesson2.CORRECTIONS["geo"](p, p, s, ONE, mask)[0, 0].item() - 1.01207) < 1e-4


def test_detachment_is_the_sign_of_the_gradient():
    """logp = mu = -2, A = 1: d/dlogp of -(w logp) is -1; through the weight it would be +1."""
    logp, mask = torch.tensor([[-2.0]], requires_grad=True), torch.ones(1, 1, dtype=torch.bool)
    w = lesson2.CORRECTIONS["token-is"](logp, logp, torch.tensor([[-2.0]]), ONE, mask)
    lesson2.policy_loss(logp, w, ONE, mask, 1).backward()
    assert logp.grad.item() == -1


def check_ess(f):
    assert abs(f(torch.zeros(7)) - 1) < 1e-12, "equal weights: 1"
    assert abs(f(torch.tensor([0.0, -1e4, -1e4, -1e4])) - 0.25) < 1e-12, "one weight has it all"
    logs = torch.tensor([3.0, 1.0, 2.0]).log()
    assert abs(f(logs) - 36 / (3 * 14)) < 1e-6, "weights 3, 1, 2"
    for shift in (900, -900):
        assert abs(f(logs + shift) - 36 / (3 * 14)) < 1e-4, "scale-free, in log space"
    for huge in (1e30, -1e30):
        assert f(torch.tensor([huge, huge])) == 1, f"equal logs {huge}"
    # the exact 1/2: a trigger below 1/2 must not fire by rounding
    for n in range(2, 130, 2):
        for high in (0.0, 0.3, -5.1, 17.7, 300.0):
            logs = torch.full((n,), high)
            logs[::2] = high - 1000
            assert f(logs) == 0.5, f"half of {n} weights are 0: exactly one half"
    assert isinstance(f(logs), float), "a float"
    assert f(torch.tensor([0.0, -math.inf])) == 0.5, "a weight of 0"


WRONG_ESS = {
    "of ratios already formed": lambda x: (x.exp().sum()**2 / x.exp().square().sum() / len(x)).item(),
    "not a fraction": lambda x: lesson2.ess(x) * len(x),
    "exp(-Var), the law for its definition": lambda x: (-x.double().var(correction=0)).exp().item(),
    "clamped at 20": lambda x: lesson2.ess(x.clamp(-20, 20)),
    "mean for sum": lambda x: ((2 * x.double().logsumexp(0)) - (2 * x.double()).logsumexp(0)).exp().item(),
    "differences of logs": lambda x:
        (2 * x.double().logsumexp(0) - (2 * x.double()).logsumexp(0)).exp().item() / len(x),
    "by softmax, which rounds": lambda x: 1 / (len(x) * x.double().softmax(0).square().sum().item()),
    "weights of 0 not counted": lambda x: lesson2.ess(x[x > -900]),
    "a tensor": lambda x: torch.tensor(lesson2.ess(x)),
}


def check_ess_refuses(f):
    """Nothing, or nothing that is a number, has no effective sample size."""
    for bad in ([], [-math.inf, -math.inf], [0.0, math.nan], [0.0, math.inf]):
        try:
            value = f(torch.tensor(bad))
        except ValueError as error:
            assert "effective sample size" in str(error)
        else:
            raise AssertionError(f"log-weights {bad} gave {value}")


def test_ess():
    check_ess(lesson2.ess)


def test_ess_refuses():
    check_ess_refuses(lesson2.ess)
    for wrong in (lambda x: lesson2.ess(x) if len(x) else 0.0,
                  lambda x: lesson2.ess(x.nan_to_num(0, 0, 0)) if len(x) else lesson2.ess(x),
                  lambda x: lesson2.ess(x) if not x.isnan().any() else math.nan):
        rejected(check_ess_refuses, wrong)


@pytest.mark.parametrize("name", WRONG_ESS)
def test_ess_rejects(name):
    rejected(check_ess, WRONG_ESS[name])


# ---------------------------------------------------------------- the exact world
def monte_carlo(world, name, n, repeats, seed=0):
    """`repeats` estimates (repeats, parameters), each from n responses drawn from mu."""
    B, T = world.logp.shape
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(world.mu.expand(repeats, B), n, replacement=True, generator=rng)
    w = []
    for rows in drawn if name == "snis" else [drawn.flatten()]:             # snis looks at its batch
        log_probs = (x[rows] for x in (world.logp, world.logp_old, world.logp_sampler))
        w.append(lesson2.CORRECTIONS[name](*log_probs, world.A[rows], torch.ones(len(rows), T, dtype=torch.bool)))
    coefficient = torch.zeros(repeats * B, T, dtype=torch.float64)
    at = (drawn + B * torch.arange(repeats)[:, None]).flatten()
    coefficient.index_add_(0, at, torch.cat(w) * world.A[drawn.flatten(), None] / n)
    return coefficient.view(repeats, B * T) @ scores(world).flatten(0, 1)


def scores(world):
    """s_t of every token of every response, in the logits of all prefixes: (B, T, parameters)."""
    B, T = world.logp.shape
    basis = torch.eye(B * T, dtype=torch.float64).view(B * T, B, T)
    return torch.stack([world.gradient(x) for x in basis]).view(B, T, -1)


@pytest.fixture(scope="module")
def world():
    """Enough mismatch that every cap, band and clip bites, alike at every prefix."""
    world = lesson2.World(1.3, 0.6, seed=1, V=3, T=4, same_everywhere=True)
    w = {name: world.weights(name) for name in lesson2.CORRECTIONS}
    for name in ("tis", "icepop", "minirl", "dsv32"):
        assert not torch.equal(w[name], w["token-is"]), name
    assert not torch.equal(w["ppo"], lesson2.ratio(world.logp - world.logp_old))
    assert not torch.equal(w["seq-tis"], w["seq-is"])
    return world


@pytest.fixture(scope="module")
def each(world):
    """The gradients f = A sum_t s_t of single responses' tokens: (B, T, parameters)."""
    return scores(world) * world.A[:, None, None]


def test_the_world_is_enumerated_completely(world):
    assert len(world.R) == 81
    for logp in (world.logp, world.logp_old, world.logp_sampler):
        assert abs(logp.sum(1).exp().sum().item() - 1) < 1e-12
    assert not torch.allclose(world.logp, world.logp_old) and not torch.allclose(world.logp_old, world.logp_sampler)
    assert (world.chi2 - world.chi2[0]).abs().max() < 1e-12 and world.chi2[0] > 0.01
    # chi^2 at the first prefix, from the responses themselves: marginal probabilities of the first token
    pi, mu = (x[::27, 0].exp() for x in (world.logp, world.logp_sampler))
    assert abs(world.chi2[0] - ((pi - mu)**2 / mu).sum()) < 1e-12 and len(world.chi2) == 1 + 3 + 9 + 27
    assert lesson2.World(0.4, 0.3, seed=1, V=3, T=4).chi2.std() > 0.01


def test_the_world_is_what_it_says():
    engine_only, lag_only = lesson2.World(0.4, 0.0, seed=1, V=3, T=4), lesson2.World(0.0, 0.4, seed=1, V=3, T=4)
    assert torch.equal(engine_only.logp, engine_only.logp_old) and torch.equal(lag_only.logp_old, lag_only.logp_sampler)
    assert not torch.allclose(engine_only.logp_old, engine_only.logp_sampler)
    assert not torch.allclose(lag_only.logp, lag_only.logp_old)
    tokens = torch.cartesian_prod(*[torch.arange(3)] * 4)
    assert torch.equal(engine_only.R, (tokens.sum(1) % 3 == 0).double())
    assert abs(engine_only.mu @ engine_only.A) < 1e-12 and engine_only.A.abs().max() > 0.1
    last = engine_only.pi[3]                                # the same probabilities at each prefix, in other orders
    old = lesson2.World(0.0, 0.0, seed=1, V=3, T=4).pi[3]
    assert torch.allclose(old.sort(1).values, old.sort(1).values[:1].expand_as(old))
    assert len({tuple(row) for row in old.tolist()}) > 1
    assert torch.equal(last, old)


def test_moments_against_every_response_written_out(world, each):
    """Bias, cosine, variance and MSE from the B gradients of single responses, one by one."""
    truth = world.true_gradient
    size2 = truth.square().sum()
    for name in ("seq-tis", "token-is", "none"):
        g = (each * world.weights(name)[..., None]).sum(1)
        mean = world.mu @ g
        bias2, variance = (mean - truth).square().sum() / size2, (world.mu @ (g - mean).square().sum(1)) / size2
        right = {"||grad J||": size2.sqrt(), "bias": bias2.sqrt(), "cosine": torch.cosine_similarity(mean, truth, 0),
                 "variance": variance, "MSE": bias2 + variance / lesson2.N_SAMPLES}
        got = lesson2.moments(world, name)
        assert set(got) == set(right)
        for key, value in got.items():
            assert abs(value - right[key].item()) < 1e-9 * max(1, abs(value)), (name, key)


def test_snis_moments_against_every_response_written_out(world, each):
    n, rho, truth = 64, world.weights("seq-is")[:, 0], world.true_gradient
    Z = rho[:, None] * (each.sum(1) - truth)
    assert (world.mu @ Z).norm() < 1e-12
    bias = -(world.mu * rho) @ Z / n
    variance = world.mu @ Z.square().sum(1) / (truth @ truth)
    got = lesson2.moments(world, "snis", n)
    assert abs(got["bias"] - (bias.norm() / truth.norm()).item()) < 1e-9
    assert abs(got["variance"] - variance.item()) < 1e-6
    assert abs(got["cosine"] - torch.cosine_similarity(truth + bias, truth, 0).item()) < 1e-9
    assert abs(got["MSE"] - (got["bias"]**2 + got["variance"] / n)) < 1e-9


def test_kpop_is_measured_at_the_phi_that_masks_a_tenth(world):
    phi = lesson2.kpop_phi(world)
    assert lesson2.moments(world, "kpop") == lesson2.moments(world, "kpop", phi=phi)
    assert lesson2.moments(world, "kpop") != lesson2.moments(world, "kpop", phi=0)


def check_table(exact_world):
    """Means over the worlds of each reward, noise, length and weight; the MSE at three n."""
    rows = exact_world(3, 3, 2)
    assert len(rows) == 2 * 8 * len(lesson2.CORRECTIONS), "a row per reward, noise or length, and weight"
    for reward in ("modulo", "additive"):
        mine = {(r["noise"], r["T"], r["weight"]): r for r in rows if r["reward"] == reward}
        assert {key[:2] for key in mine} >= {(0.02, 3), (0.8, 3), (0.4, 1), (0.4, 2)}
        for name in ("tis", "snis"):
            row, worlds = mine[0.4, 2, name], [lesson2.World(0.4, 0.4, seed, T=2, reward=reward) for seed in (3, 4)]
            a, b = (lesson2.moments(world, name) for world in worlds)
            for key in a:
                assert abs(row[key] - (a[key] + b[key]) / 2) < 1e-12 * max(1, abs(a[key])), f"the mean of {key}"
            assert abs(row["± worlds"] - abs(a["bias"] - b["bias"]) / 2**0.5) < 1e-12, "the spread between worlds"
            for n in (1024, 16384):
                mse = sum(lesson2.moments(world, name, n)["MSE"] for world in worlds) / 2
                assert abs(row[f"MSE, n = {n}"] - mse) < 1e-12 * max(1, mse), f"the MSE at n = {n}"
            assert row["MSE, n = 1024"] > row["MSE"] > row["MSE, n = 16384"]


def wrong_table(change):
    return lambda *args: change(lesson2.exact_world(*args))


def bias_kept(rows):
    """The MSE at another n from the table's bias: right but for snis, whose bias falls like 1 / n."""
    return [{**r, **{f"MSE, n = {n}": r["MSE"] + r["variance"] * (1 / n - 1 / 4096) for n in (1024, 16384)}}
            for r in rows]


WRONG_TABLES = {
    "one reward twice": lambda rows: 2 * rows[:len(rows) // 2],
    "one reward under both names": lambda rows: [
        {**r, "reward": name} for name in ("modulo", "additive") for r in rows[:len(rows) // 2]],
    "the rewards exchanged": lambda rows: [
        {**r, "reward": "additive" if r["reward"] == "modulo" else "modulo"} for r in rows],
    "the bias of n = 4096 at every n": bias_kept,
    "one MSE for all n": lambda rows: [{**r, "MSE, n = 1024": r["MSE"], "MSE, n = 16384": r["MSE"]} for r in rows],
}


def test_the_table_averages_over_worlds():
    check_table(lesson2.exact_world)


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_the_table_rejects(name):
    rejected(check_table, wrong_table(WRONG_TABLES[name]))


# ---------------------------------------------------------------- the additive reward
def check_additive(reward):
    tokens = torch.cartesian_prod(*[torch.arange(3)] * 2)
    assert reward(tokens, 3).tolist() == [1, 0.5, 0.5, 0.5, 0, 0, 0.5, 0, 0], "the share of tokens that are 0"
    assert reward(tokens, 3).dtype == torch.float64


WRONG_ADDITIVE = {
    "of the whole": lambda tokens, V: (tokens.sum(1) == 0).double(),
    "a sum": lambda tokens, V: (tokens == 0).double().sum(1),
    "of the batch": lambda tokens, V: (tokens == 0).double().mean(0),
    "of the tokens' values": lambda tokens, V: tokens.double().mean(1),
    "in float32": lambda tokens, V: (tokens == 0).float().mean(1),
}


def test_the_additive_reward():
    check_additive(lesson2.REWARDS["additive"])
    world = lesson2.World(0.4, 0.3, seed=1, V=3, T=4, reward="additive")
    tokens = torch.cartesian_prod(*[torch.arange(3)] * 4)
    assert torch.equal(world.R, (tokens == 0).double().mean(1)) and abs(world.mu @ world.A) < 1e-12
    assert torch.equal(world.logp_sampler, lesson2.World(0.4, 0.3, seed=1, V=3, T=4).logp_sampler), "the same policies"


@pytest.mark.parametrize("name", WRONG_ADDITIVE)
def test_the_additive_reward_rejects(name):
    rejected(check_additive, WRONG_ADDITIVE[name])


def test_what_prefix_and_token_weights_repair():
    """At noise .4, of the bias of no weight: next to nothing where one token can spoil the reward, a good part where
    rewards add up; the prefix more than the token, and at more variance."""
    found = {(reward, name): [lesson2.moments(lesson2.World(0.4, 0.4, seed, reward=reward), name) for seed in range(3)]
             for reward in lesson2.REWARDS for name in ("none", "token-is", "prefix-is", "seq-is")}
    mean = lambda reward, name, key="bias": sum(m[key] for m in found[reward, name]) / 3
    left = {(reward, name): mean(reward, name) / mean(reward, "none") for reward, name in found}
    assert 0.9 < left["modulo", "token-is"] < 1 and 0.6 < left["modulo", "prefix-is"] < 0.85
    assert 0.5 < left["additive", "token-is"] < 0.75 and 0.25 < left["additive", "prefix-is"] < 0.5
    for reward in lesson2.REWARDS:
        token, prefix, whole = (mean(reward, name, "variance") for name in ("token-is", "prefix-is", "seq-is"))
        assert token < prefix < whole


def test_prefix_is_leaves_the_tokens_after_t_alone():
    """The weight of token t is the product of the ratios up to t, whose mean under mu is 1."""
    world = lesson2.World(0.4, 0.4, seed=1, V=3, T=3)
    rho = world.weights("token-is")
    for t in range(3):
        assert torch.allclose(world.weights("prefix-is")[:, t], rho[:, :t + 1].prod(1))
    assert torch.allclose(world.mu @ world.weights("prefix-is"), torch.ones(3, dtype=torch.float64))


def autograd_world(world):
    """The same world with its logits as leaves: log pi (B, T) by an independent route."""
    V, T = world.V, world.T
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
    w = world.weights(name)
    mask = torch.ones_like(w, dtype=torch.bool)
    loss = lesson2.policy_loss(logp, w * world.mu[:, None], world.A, mask, 1)             # E_mu, by weights mu
    oracle = torch.cat([g.flatten() for g in torch.autograd.grad(-loss, logits)])
    assert (oracle - world.expected(w)).abs().max() < 1e-12


def test_true_gradient_is_autograd_of_the_expected_reward(world):
    logits, logp = autograd_world(world)
    oracle = torch.autograd.grad(logp.sum(1).exp() @ world.R, logits)
    assert (torch.cat([g.flatten() for g in oracle]) - world.true_gradient).abs().max() < 1e-12


def test_the_two_gradients_of_the_docstring():
    """T = 2: the token weight lacks E_mu[A (delta_2 w_1 s_1 + delta_1 w_2 s_2)], exactly; the objectives
    differ by E_mu[A], a constant, and E_mu[A delta_1 delta_2]."""
    world = lesson2.World(0.5, 0.3, seed=4, V=3, T=2)
    rho = world.weights("token-is")
    delta = rho - 1
    assert (world.expected(rho) - (world.true_gradient - world.expected(delta.flip(1) * rho))).abs().max() < 1e-12
    assert world.expected(delta.flip(1) * rho).norm() > 0.1 * world.true_gradient.norm()
    sequence, token = (world.mu * world.A) @ rho.prod(1), (world.mu * world.A) @ rho.sum(1)
    gap = (world.mu * world.A) @ delta.prod(1) - world.mu @ world.A
    assert abs(sequence - token - gap) < 1e-12
    # by autograd: the gradients of the two objectives are the two lines
    logits, logp = autograd_world(world)
    w, A = (logp - world.logp_sampler).exp(), (world.mu * world.A)
    for objective, line in ((A @ w.prod(1), world.true_gradient), (A @ w.sum(1), world.expected(rho))):
        oracle = torch.cat([g.flatten() for g in torch.autograd.grad(objective, logits, retain_graph=True)])
        assert (oracle - line).abs().max() < 1e-12


def test_sequence_is_is_unbiased_and_its_second_moment_is_a_power(world):
    exact = lesson2.moments(world, "seq-is")
    assert exact["bias"] < 1e-12 and abs(exact["cosine"] - 1) < 1e-12
    second = world.mu @ world.weights("seq-is")[:, 0]**2
    assert abs(second.item() / (1 + world.chi2[0].item())**4 - 1) < 1e-12
    for name in ("none", "token-is", "tis", "geo", "ppo"):
        assert lesson2.moments(world, name)["bias"] > 0.05


def test_without_mismatch_every_weight_is_reinforce():
    same = lesson2.World(0.0, 0.0, seed=1, V=3, T=4)
    for name in lesson2.CORRECTIONS:
        assert (same.weights(name) - 1).abs().max() < 1e-12, name
        assert lesson2.moments(same, name, **PHI.get(name, {}))["bias"] < 1e-12


@pytest.mark.parametrize("name", [n for n in lesson2.CORRECTIONS if n != "snis"])
def test_exact_moments_against_monte_carlo(world, name):
    """Bias along and variance of the estimate from n = 64 draws, within five standard errors."""
    n, repeats = 64, 500
    estimates, truth = monte_carlo(world, name, n, repeats), world.true_gradient
    expected = world.expected(world.weights(name))
    for direction in (truth, torch.randn(len(truth), generator=torch.Generator().manual_seed(0), dtype=torch.float64)):
        along = estimates @ direction
        assert abs(along.mean() - expected @ direction) < 5 * along.std() / repeats**0.5
    deviation = (estimates - expected).square().sum(1)
    exact = lesson2.moments(world, name, **PHI.get(name, {}))["variance"] * (truth @ truth) / n
    assert abs(deviation.mean() - exact) < 5 * deviation.std() / repeats**0.5


@pytest.mark.parametrize("discrepancy, lag, V, T, n, repeats",
                         [(0.4, 0.3, 3, 4, 512, 800), (0.4, 0.4, 4, 4, 4096, 100)])
def test_snis_delta_method_against_monte_carlo(discrepancy, lag, V, T, n, repeats):
    world = lesson2.World(discrepancy, lag, seed=1, V=V, T=T)                          # it is for small mismatch
    estimates, truth = monte_carlo(world, "snis", n, repeats), world.true_gradient
    error = (estimates - truth).square().sum(1) / (truth @ truth)
    mse = lesson2.moments(world, "snis", n)["MSE"]
    assert abs(error.mean() - mse) < 5 * error.std() / repeats**0.5 + 0.05 * mse       # the next order in 1 / n


def test_kpop_phi_masks_about_the_asked_share():
    world = lesson2.World(0.3, 0.3, seed=2)
    kept = world.weights("kpop", phi=lesson2.kpop_phi(world, 0.2))
    masked = (world.mu[:, None] * (kept == 0)).sum().item() / world.T
    assert abs(masked - 0.2) < 0.01
    # and always some, if the share is too small for a single one
    small = lesson2.World(0.3, 0.3, seed=2, V=3, T=1)
    assert (small.weights("kpop", phi=lesson2.kpop_phi(small, 1e-9)) == 0).any()


def check_laws(laws):
    """Where theory is exact or a bound, the measured value obeys it."""
    seen = set()
    for row in laws:
        law, predicted, measured = row["law"], row["predicted"], row["measured"]
        if "(1 + chi^2)^T, T" in law or law.startswith("tis, T = 1"):
            seen.add("equal")
            assert abs(measured / predicted - 1) < 1e-9, law
        elif "half the noise" in law:
            seen.add("half")
            assert abs(measured - 0.5) < 0.03, law
        elif "about" in law:
            seen.add("first order")
            assert abs(measured / predicted - 1) < 0.2 and measured > 1e-4, law
        elif "if chi^2 varies" in law:
            seen.add("bound")
            assert 1 < measured <= predicted, law
        elif "log-normal" in law:
            seen.add("log-normal")
            assert abs(measured / predicted - 1) < 0.02, law
        elif law == "seq-is: bias":
            seen.add("unbiased")
            assert measured < 1e-12, law
    assert len(seen) == 6, seen


# ---------------------------------------------------------------- real rollouts
def test_weight_statistics_by_hand():
    x = [[0.1, -0.8], [0.8, 1.7], [0.3, -0.2], [0.05, 0.0]]
    s = lesson2.weight_statistics(torch.tensor(x, dtype=torch.float64), torch.ones(4, 2, dtype=torch.bool))
    w, sums = [math.exp(v) for row in x for v in row], [sum(row) for row in x]
    mean = sum(w) / 8
    variance = sum((v - mean)**2 for v in w) / 7
    sums_mean, products = sum(sums) / 4, [math.exp(v) for v in sums]
    right = {"tokens": 8, "mean weight": mean, "± s.e.": (variance / 8)**0.5, "chi^2": variance, "share > 2": 2 / 8,
             "outside [.5, 5]": 2 / 8, "ESS of tokens": sum(w)**2 / 8 / sum(v * v for v in w),
             "ESS of responses": sum(products)**2 / 4 / sum(v * v for v in products),
             "exp(-Var)": math.exp(-sum((v - sums_mean)**2 for v in sums) / 3),
             "mean weight of responses": sum(products) / 4}
    for name, value in right.items():
        assert abs(s[name] - value) < 1e-9, name
    assert set(s) == {*right, "ESS by length"}


def test_weight_statistics():
    """Log-normal weights of known spread, responses of two lengths, rubbish in the padding."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(6) < torch.where(torch.arange(40_000) % 2 == 0, 6, 3)[:, None]
    x = 0.1 * torch.randn(40_000, 6, generator=generator) - 0.005
    s = lesson2.weight_statistics(x.masked_fill(~mask, 9.0), mask)
    assert s["tokens"] == 20_000 * 9 and abs(s["mean weight"] - 1) < 5 * s["± s.e."]
    assert abs(s["ESS of tokens"] - math.exp(-0.01)) < 1e-3 and len(s["ESS by length"]) == 6
    for t, measured in enumerate(s["ESS by length"], 1):
        assert abs(measured - math.exp(-0.01 * t)) < 5e-3
    assert s["share > 2"] == 0 and s["outside [.5, 5]"] == 0
    shifted = lesson2.weight_statistics(torch.full((4, 2), math.log(3.0)), torch.ones(4, 2, dtype=torch.bool))
    assert shifted["share > 2"] == 1 and shifted["outside [.5, 5]"] == 0
    assert abs(shifted["mean weight of responses"] - 9) < 1e-5
    assert abs(shifted["ESS of tokens"] - 1) < 1e-9                 # scale-free: the mean weight is the alarm


def test_a_response_without_tokens_is_no_weight_of_1():
    """Responses [-3, -3] and two that are all padding: the ESS is 1; counted as weight 1 they make .55."""
    for logs, empty, right in (([-3.0, -3.0], 2, 1.0), ([3.0, 0.0], 6, (math.exp(3) + 1)**2 / 2 / (math.exp(6) + 1))):
        x = torch.tensor([*logs, *[0.0] * empty])[:, None]
        mask = torch.tensor([True] * len(logs) + [False] * empty)[:, None]
        s = lesson2.weight_statistics(x, mask)
        assert abs(s["ESS of responses"] - right) < 1e-9 and s["tokens"] == 2


def test_the_last_line_follows_the_numbers():
    def said(ess, mean, stale=0.18):
        return lesson2.verdict([{"ESS of responses": ess, "mean weight": mean}, {"ESS of responses": stale}])

    clean = said(0.9998, 1.0001)
    assert "weights are close to 1" in clean and "0.9998" in clean and "0.18" in clean
    for ess, mean in ((0.34, 1.0), (0.95, 1.0), (1.0, 0.9), (1.0, 1.1), (math.nan, 1.0), (1.0, math.nan)):
        assert "weights are not close to 1" in said(ess, mean)


def test_quick_run(tmp_path, engine16, tiny, monkeypatch, capsys):
    """The whole lesson, with the session's engine at the checkpoint's weights."""
    def shared(path):
        engine16.sync(lesson1.load_model(path))
        return engine16

    monkeypatch.setattr(lesson1, "Sampler", shared)
    result = lesson2.main(["--quick", "--out", str(tmp_path)])
    assert (tmp_path / "02_importance_sampling.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "02_importance_sampling.json").read_text()) == result
    check_laws(result["laws"])
    real = {row["rollouts"]: row for row in result["rollouts"]}
    natural, stale = real["natural: bf16 vLLM, fp32 trainer"], real["stale: trainer 8 steps ahead"]
    assert abs(natural["mean weight"] - 1) < 5 * natural["± s.e."] and natural["ESS of responses"] > 0.99
    assert stale["ESS of responses"] < 0.5 and abs(real["bug: top-k 3 in the sampler only"]["mean weight"] - 1) > 0.05
    output = capsys.readouterr().out
    assert lesson2.verdict(result["rollouts"]) in output and "weights are close to 1" in output
    assert all(f"\n{name} " in output for name in lesson2.CORRECTIONS)
    assert len(result["moments"]) == 2 * (6 + 3) * len(lesson2.CORRECTIONS)
