"""Lesson 3: the split, the loop that follows it, and the estimates of the drift, against oracles."""
import copy
import math
import sys
import types
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import exercises, lesson1, rejected

lesson3 = import_module("03_decompose")
lesson2, SUM, FREE = lesson3.lesson2, lesson1.SUM, lesson3.FREE


# ---------------------------------------------------------------- the split
def check_split(f):
    """mu = -1.00, old = -1.10, new = -1.40: discrepancy -0.10, lag -0.30, total -0.40."""
    d, l = f(torch.tensor([-1.40, -2.0]), torch.tensor([-1.10, -2.5]), torch.tensor([-1.00, -2.0]))
    assert torch.allclose(d, torch.tensor([-0.10, -0.5])), "the discrepancy is log pi_old - log mu"
    assert torch.allclose(l, torch.tensor([-0.30, 0.5])), "the lag is log pi - log pi_old"


WRONG_SPLIT = {
    "sampler minus trainer": lambda p, o, s: (s - o, o - p),
    "old evaluated with the current weights": lambda p, o, s: (p - s, p - p),
    "old taken from the engine": lambda p, o, s: (o - s, p - s),
    "parts swapped": lambda p, o, s: (p - o, o - s),
    "ratios for log-ratios": lambda p, o, s: ((o - s).exp(), (p - o).exp()),
}


def test_split():
    check_split(lesson3.split)


@pytest.mark.parametrize("name", WRONG_SPLIT)
def test_split_rejects(name):
    rejected(check_split, WRONG_SPLIT[name])


# ---------------------------------------------------------------- the loop, on the real engine
def loop(trainer, engine, tokenizer, correction="tis", lr=1e-3, **changes):
    settings = {"steps": 4, "period": 2, "seed": 0, "prompts": 8, "group_size": 4, **changes}
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=lr, weight_decay=0.0)
    loss = lesson3.weighted(lesson2.CORRECTIONS[correction])
    return lesson3.grpo(trainer, engine, SUM, tokenizer, optimizer, loss, **settings)


def discrepancy(batch):
    return batch.logp_old - batch.rollout.logp_sampler


def check_loop(grpo, trainer, engine, tokenizer):
    """The lag is exactly 0 at a sync and not after; an update leaves the discrepancy what it was."""
    ages = []
    for batch in grpo(trainer, engine, tokenizer):
        ages.append(batch.age)
        mask = batch.rollout.mask
        assert (batch.lag[mask].abs().max() == 0) == (batch.age == 0)
        assert discrepancy(batch)[mask].abs().max() < 1e-4                         # an fp32 engine
        row = lesson3.measure(batch)
        assert row["identity"] < 1e-12
        assert batch.age == 0 or row["rms l"] > 1e-3
    assert ages == [0, 1, 0, 1]


def aliased_old(trainer, engine, tokenizer):
    """`old` is the trainer itself: the snapshot moves with what it should hold still."""
    for batch in loop(trainer, engine, tokenizer):
        batch.logp_old = lesson1.logprobs(trainer, batch.rollout)
        yield batch


def old_never_refreshed(trainer, engine, tokenizer):
    first = copy.deepcopy(trainer)
    for batch in loop(trainer, engine, tokenizer):
        batch.logp_old = lesson1.logprobs(first, batch.rollout)
        yield batch


def other_layout(trainer, engine, tokenizer):
    """`old` row by row: another batch shape, whose rounding is booked as lag."""
    held = copy.deepcopy(trainer)
    for batch in loop(trainer, engine, tokenizer):
        if batch.age == 0:
            held.load_state_dict(trainer.state_dict())
        batch.logp_old = lesson1.row_alone(held, batch.rollout)
        batch.logp_old = batch.logp_old + 1e-7 * torch.arange(len(batch.rollout))[:, None]     # at least one rounding
        yield batch


def engine_for_old(trainer, engine, tokenizer):
    """The engine's own log-probs as pi_old: its discrepancy becomes lag."""
    for batch in loop(trainer, engine, tokenizer):
        batch.logp_old = batch.rollout.logp_sampler
        yield batch


def test_loop(trainer, engine, tokenizer):
    check_loop(loop, trainer, engine, tokenizer)


@pytest.mark.parametrize("wrong", [aliased_old, old_never_refreshed, other_layout, engine_for_old],
                         ids=lambda f: f.__name__)
def test_loop_rejects(wrong, trainer, engine, tokenizer):
    rejected(lambda f: check_loop(f, trainer, engine, tokenizer), wrong)


@pytest.mark.parametrize("name", ["old-is-the-live-model", "old-is-never-refreshed"])
def test_a_hunt_shows_a_wrong_number(name, trainer, engine, tokenizer):
    """The bug does not crash: the lag is 0 where it should not be, or is not 0 where it should be."""
    module = types.ModuleType("bug_03")
    module.__dict__.update(__file__=lesson3.__file__)
    sys.modules[module.__name__] = module                           # dataclasses look there
    exec(compile(exercises.with_bug("03", name), name, "exec"), module.__dict__)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
    loss = module.weighted(lesson2.CORRECTIONS["tis"])
    run = module.grpo(trainer, engine, SUM, tokenizer, optimizer, loss, 20, 10, 0, prompts=8, group_size=4)
    rows = [module.measure(batch) for batch in run]
    laws, said = module.laws(rows), module.verdict({"run": rows, "laws": module.laws(rows)})
    if name == "old-is-the-live-model":
        assert all(row["rms l"] == 0 for row in rows) and "still 0" in said
    else:
        assert laws[1]["measured"] > 1e-2                           # rms l at a sync


def test_loop_is_the_run_of_train_py(trainer, engine, tokenizer, tmp_path):
    """Two loops, written independently, one training, with gradients that are clipped: the CSV of train.py."""
    train = import_module("train")
    train.main(["--steps", "10", "--prompts", "8", "--group-size", "4", "--staleness", "4", "--correction", "token-is",
                "--lr", "3e-3", "--out", str(tmp_path / "a")], engine)
    lines = (tmp_path / "a" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), map(float, line.split(",")))) for line in lines[1:]]
    assert any(row["grad_norm"] > 1 for row in rows) and any(0 < row["grad_norm"] < 1 for row in rows)
    run = loop(trainer, engine, tokenizer, "token-is", lr=3e-3, steps=10, period=5)
    for batch, row in zip(run, rows, strict=True):
        lag = batch.lag[batch.rollout.mask].abs().mean().item()
        assert abs(batch.R.mean().item() - row["reward"]) < 1e-6
        assert abs(lag - row["lag"]) < 1e-5 * max(1, lag)


class Faulty:
    """An engine whose rollouts have something wrong with them from the second on."""

    def __init__(self, engine, change):
        self.engine, self.change, self.n = engine, change, 0

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def sample(self, *args, **kwargs):
        rollout, self.n = self.engine.sample(*args, **kwargs), self.n + 1
        return self.change(rollout) if self.n > 1 else rollout


def not_finite(rollout):
    logp = rollout.logp_sampler.clone()
    logp[0, 0], logp[1, 0], logp[2, 0] = float("nan"), float("-inf"), float("inf")
    return replace(rollout, logp_sampler=logp.masked_fill(~rollout.mask, float("nan")))       # padding may be anything


@pytest.mark.parametrize("change, error, words", [
    (lambda r: replace(r, neutral=False), ValueError, "step 1: .*not from mu"),
    (lambda r: replace(r, version=r.version - 1), ValueError, "step 1: .*not from mu"),
    (not_finite, RuntimeError, "step 1: 3 sampled tokens have no finite log mu")],
    ids=["not neutral", "other version", "not finite"])
def test_the_loop_stops_at_a_rollout_that_is_not_mus(change, error, words, trainer, engine, tokenizer):
    with pytest.raises(error, match=words):
        list(loop(trainer, Faulty(engine, change), tokenizer))


def test_the_loop_notices_a_sync_that_is_not_its_own(trainer, engine, tokenizer):
    run = loop(trainer, engine, tokenizer)
    next(run)
    engine.sync(trainer)
    with pytest.raises(ValueError, match="not from mu"):
        next(run)


def test_held_out(trainer, moved, engine, tokenizer):
    """Against the same prompts and seeds by hand; the sampler had other weights before."""
    engine.sync(moved)
    result = lesson3.held_out(trainer, engine, SUM, tokenizer, 200)
    digits, prompts = lesson1.make_prompts(SUM, tokenizer, 200, np.random.default_rng([2**40, 7]))
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        rollout = engine.sample(prompts, 9, 0, temperature=temperature)
        texts = tokenizer.batch_decode(rollout.ids, skip_special_tokens=True)
        right = [text[:8][-1:] == str(row.sum() % 10) for text, row in zip(texts, digits)]
        assert abs(result[name] - np.mean(right)) < 0.03                       # a few end early
    assert result["greedy"] > result["sampled"] + 0.1
    short = lesson3.held_out(trainer, engine, SUM, tokenizer, 20, max_tokens=5)
    assert short == {"sampled": 0.0, "greedy": 0.0}                              # nothing ends in five tokens


# ---------------------------------------------------------------- what is loaded into the engine
def check_noise(parameter_noise):
    """Drawn once per matrix, relative to it; drawn anew only if `fresh`; a tied matrix stays tied."""
    rng = torch.Generator().manual_seed(0)
    state = {name: torch.randn(64, 128, generator=rng) for name in ("embedding", "up", "gate")}
    state["lm_head"] = state["embedding"]
    perturb = parameter_noise(0.1, seed=3)
    one, two = perturb(state), perturb(state)
    assert all(torch.equal(one[n], two[n]) for n in state), "the noise is the same at each call"
    assert one["lm_head"] is one["embedding"] and list(one) == list(state)
    up, gate = (one[n] / state[n] - 1 for n in ("up", "gate"))
    assert abs(up.std().item() - 0.1) < 0.005 and abs(up.mean().item()) < 0.005
    assert abs(np.corrcoef(gate.flatten(), up.flatten())[0, 1]) < 0.05            # another matrix, another noise
    twice = {n: 2 * v for n, v in state.items()}
    twice["lm_head"] = twice["embedding"]
    assert torch.allclose(perturb(twice)["up"], 2 * one["up"])                    # the noise belongs to the matrix
    fresh = parameter_noise(0.1, seed=3, fresh=True)
    first, second = fresh(state)["up"], fresh(state)["up"]
    assert torch.equal(first, one["up"]) and not torch.allclose(second, first)
    assert not torch.equal(parameter_noise(0.1, seed=4)(state)["up"], one["up"])


def per_name(size, seed, fresh=False):
    """A tied matrix gets two noises."""
    perturb = lesson3.parameter_noise(size, seed, fresh)
    return lambda state: perturb({name: value.clone() for name, value in state.items()})


WRONG_NOISE = {
    "a new one at each call": lambda size, seed, fresh=False: lesson3.parameter_noise(size, seed, True),
    "never a new one": lambda size, seed, fresh=False: lesson3.parameter_noise(size, seed),
    "a tied matrix gets two": per_name,
    "not relative": lambda size, seed, fresh=False: lambda state: {
        n: state[n] + (x - 1) for n, x in lesson3.parameter_noise(size, seed, fresh)(
            {n: torch.ones_like(v) for n, v in state.items()}).items()},
}


def test_noise():
    check_noise(lesson3.parameter_noise)


@pytest.mark.parametrize("name", WRONG_NOISE)
def test_noise_rejects(name):
    rejected(check_noise, WRONG_NOISE[name])


def test_fake_quantization(trainer):
    state = trainer.state_dict()
    for bits in (4, 8):
        rounded = lesson3.fake_quantized(bits)(state)
        w, q = state["model.layers.0.mlp.up_proj.weight"], rounded["model.layers.0.mlp.up_proj.weight"]
        step = w.abs().amax(1, keepdim=True) / (2**(bits - 1) - 1)
        assert (q - w).abs().max() <= step.max() / 2 + 1e-6 and ((q / step).round() - q / step).abs().max() < 1e-3
        assert max(len(row.unique()) for row in q) <= 2**bits - 1
        changed = {n for n in state if not torch.equal(rounded[n], state[n])}
        assert changed == {n for n in state if n.endswith("_proj.weight")}


def test_every_sync_goes_through_perturb(trainer, engine, tokenizer):
    """The engine holds the noisy weights: a trainer that holds them too agrees with it."""
    perturb, noisy = lesson3.parameter_noise(0.1, seed=0), copy.deepcopy(trainer)
    for batch in loop(trainer, engine, tokenizer, perturb=perturb, steps=3, period=1):
        noisy.load_state_dict(perturb(trainer.state_dict()))
        mask = batch.rollout.mask
        assert (lesson1.logprobs(noisy, batch.rollout) - batch.rollout.logp_sampler)[mask].abs().max() < 1e-5
        assert discrepancy(batch)[mask].abs().mean() > 1e-2 and batch.lag[mask].abs().max() == 0


def test_the_loop_does_what_its_arguments_say(trainer, engine, tokenizer):
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3, weight_decay=0.0)
    loss = lesson3.weighted(lesson2.CORRECTIONS["none"])

    def rates(**changes):
        for batch in lesson3.grpo(trainer, engine, SUM, tokenizer, optimizer, loss, 3, 1, 0, prompts=6, group_size=4,
                                  **changes):
            assert len(batch.R) == 24 and batch.R.any()
            assert torch.equal(batch.advantage, batch.R) == (changes.get("advantage") == "raw")
            yield optimizer.param_groups[0]["lr"]

    assert list(rates(advantage="raw", decay=False)) == [1e-3] * 3
    assert list(rates()) == pytest.approx([1e-3, 1e-3, 2e-3 / 3])    # at the yield: the rate of the update before
    assert next(loop(trainer, engine, tokenizer, max_tokens=5)).rollout.ids.shape[1] == 5


def test_weighted_loss_counts_response_tokens():
    rollout = SimpleNamespace(mask=torch.tensor([[True, True], [True, False]]), logp_sampler=torch.full((2, 2), -1.0))
    batch = lesson3.Batch(0, 0, rollout, None, torch.ones(2), torch.full((2, 2), -1.0), torch.full((2, 2), -1.0),
                          *[torch.zeros(2, 2, 0)] * 2, 17)
    assert lesson3.weighted(lesson2.CORRECTIONS["none"])(batch).item() == 1.0


# ---------------------------------------------------------------- the free tokens
def check_demonstrate(demonstrate):
    """The letters are a habit that depends on the digit, the letter before and the place; digits and end are right."""
    rng = np.random.default_rng(0)
    digits = rng.integers(0, 10, (20_000, 4))
    ids = demonstrate(FREE.answer(digits), digits, rng, 0)
    assert ids.shape == (20_000, 13) and (ids[:, -1] == lesson1.END).all()
    triples, a = ids[:, :12].reshape(-1, 4, 3), lesson1.CHARACTERS.index("a")
    assert (triples[..., 2] == (digits + 3) % 10).all()
    letters = triples[..., :2] - a
    assert letters.min() == 0 and letters.max() == 3
    first, second = (letters[..., 0] - digits) % 4, (letters[..., 1] - letters[..., 0] - np.arange(4)) % 4
    for rank in (first, second):
        assert np.abs(np.bincount(rank.ravel()) / rank.size - [0.4, 0.3, 0.2, 0.1]).max() < 0.01
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02


def shifted(change):
    """FREE's demonstrations with other letters."""
    def demonstrate(shown, digits, rng, step):
        ids, a = FREE.demonstrate(shown, digits, rng, step), lesson1.CHARACTERS.index("a")
        letters = ids[:, :12].reshape(-1, 4, 3)[..., :2] - a                      # a view
        letters = change(letters.copy(), digits) % 4 + a
        ids[:, :12].reshape(-1, 4, 3)[..., :2] = letters
        return ids
    return demonstrate


WRONG_DEMONSTRATIONS = {
    "the digit does not matter": shifted(lambda x, digits: x - digits[..., None]),
    "the place does not matter": shifted(lambda x, digits: x - np.arange(4)[:, None] * [0, 1]),
    "the letter before does not matter": shifted(lambda x, digits: np.stack([x[..., 0], x[..., 1] - x[..., 0]], -1)),
}


def test_the_letters_are_a_habit_that_depends_on_digit_letter_and_place():
    check_demonstrate(FREE.demonstrate)


@pytest.mark.parametrize("name", WRONG_DEMONSTRATIONS)
def test_the_letters_reject(name):
    rejected(check_demonstrate, WRONG_DEMONSTRATIONS[name])


# ---------------------------------------------------------------- the estimates
def noisy_halves(mean, n, generator):
    """Two independent estimates of a mean vector, each with noise far above it."""
    return tuple(mean + torch.randn(len(mean), generator=generator, dtype=torch.float64) / n**0.5 for _ in range(2))


def estimates(f, *means):
    """f of 400 estimates of these means, and its standard error."""
    generator = torch.Generator().manual_seed(0)
    values = [f(*(noisy_halves(mean, 100, generator) for mean in means)) for _ in range(400)]
    assert np.std(values) / 20 < 0.1
    return np.mean(values), np.std(values) / 20


def vectors():
    """|a|^2 = 4, |b|^2 = 1, a . b = 1, and 0; the noise has |e|^2 = 50 per half."""
    a, b, zero = torch.zeros(3, 5000, dtype=torch.float64)
    a[:4], b[0] = 1.0, 1.0
    return a, b, zero


def check_cross(cross):
    a, b, zero = vectors()
    for pair, right in (((a, b), 1.0), ((-a, b), -1.0), ((zero, b), 0.0)):
        mean, error = estimates(cross, *pair)
        assert abs(mean - right) < 5 * error, f"over many estimates cross averages {mean:.2f}, not {right}"
    # (1 2) and (2 2), (2 3) and (5 1): (7 + 10) / 2
    halves = [tuple(torch.tensor(x) for x in pair) for pair in (([1.0, 2.0], [2.0, 2.0]), ([2.0, 3.0], [5.0, 1.0]))]
    assert abs(cross(*halves) - 8.5) < 1e-9, "the mean of the two products across the halves"


def check_norm2(norm2):
    a, b, zero = vectors()
    for vector, right in ((a, 4.0), (b, 1.0), (zero, 0.0)):
        mean, error = estimates(norm2, vector)
        assert abs(mean - right) < 5 * error, f"over many estimates norm2 averages {mean:.2f}, not {right}"
    x = torch.tensor([1.0, 2.0])
    assert abs(norm2((x, -x)) + 5) < 1e-9, "the product of the halves, also where it is negative"


WRONG_CROSS = {
    "within the halves": lambda a, b: ((a[0] @ b[0] + a[1] @ b[1]) / 2).item(),
    "sum for mean": lambda a, b: (a[0] @ b[1] + a[1] @ b[0]).item(),
    "the product of the means of the halves": lambda a, b: ((a[0] + a[1]) @ (b[0] + b[1]) / 4).item(),
    "one of the two products": lambda a, b: (a[0] @ b[1]).item(),
    "not below 0": lambda a, b: max(lesson3.cross(a, b), 0.0),
    "a geometric mean": lambda a, b: math.copysign(
        abs((a[0] @ b[1] * (a[1] @ b[0])).item())**0.5, (a[0] @ b[1]).item()),
}
WRONG_NORM2 = {
    "the norm of the mean of the halves": lambda a: ((a[0] + a[1]) / 2).square().sum().item(),
    "the mean of the halves' norms": lambda a: (a[0].square().sum() + a[1].square().sum()).item() / 2,
    "of one half": lambda a: a[0].square().sum().item(),
    "not below 0": lambda a: max(lesson3.norm2(a), 0.0),
}


def test_cross():
    check_cross(lesson3.cross)


def test_norm2():
    check_norm2(lesson3.norm2)


@pytest.mark.parametrize("name", WRONG_CROSS)
def test_cross_rejects(name):
    rejected(check_cross, WRONG_CROSS[name])


@pytest.mark.parametrize("name", WRONG_NORM2)
def test_norm2_rejects(name):
    rejected(check_norm2, WRONG_NORM2[name])


def check_cosine(cosine):
    """Of one pair, and a ratio of means over several; NaN where a norm drowns in noise."""
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert abs(cosine([((a, a), (b, b))]) - math.sqrt(0.5)) < 1e-6
    assert math.isnan(cosine([((a, -a), (b, b))])) and math.isnan(cosine([((a, -a), (a, -a))]))
    # products 1 and 2, squares 1 and 4 of the one, 2 and 1 of the other: 1.5 / sqrt(2.5 x 1.5)
    c = torch.tensor([0.0, 1.0])
    pairs = [((a, a), (b, b)), ((2 * c, 2 * c), (c, c))]
    assert abs(cosine(pairs) - 1.5 / 3.75**0.5) < 1e-6
    # one pair alone has a norm below 0, the mean has not: products -.5 and 1, squares -1 and 4, 1 and 2
    x = torch.tensor([2.0, 0.0])
    assert abs(cosine([((a, -a), (a, a)), ((x, x), (b, b))]) - 1 / (1.5 * 1.5)**0.5) < 1e-6


WRONG_COSINE = {
    "the mean of the cosines": lambda pairs: float(np.mean([lesson3.cosine([pair]) for pair in pairs])),
    "of the sums of both": lambda pairs: lesson3.cosine([tuple(
        tuple(sum(pair[i][h] for pair in pairs) for h in (0, 1)) for i in (0, 1))]),
    "0 for noise": lambda pairs: np.nan_to_num(lesson3.cosine(pairs)),
}


def test_cosine():
    check_cosine(lesson3.cosine)


@pytest.mark.parametrize("name", WRONG_COSINE)
def test_cosine_rejects(name):
    rejected(check_cosine, WRONG_COSINE[name])


def noisy_rollout(trainer):
    """Responses of two lengths, and a q that is pi with noise on its logits: no engine needed."""
    rng = torch.Generator().manual_seed(0)
    B, P, T, V = 8, 9, 7, 17
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[::2, -2:] = False
    ids = torch.randint(0, V, (B, P + T), generator=rng)
    rollout = lesson1.Rollout(ids[:, :P], torch.ones(B, P, dtype=torch.bool), ids[:, P:], mask, torch.zeros(B, T),
                              torch.zeros(B, T, 0, dtype=torch.long), torch.zeros(B, T, 0), torch.ones(B), 1.0, True, 0)
    with torch.no_grad():
        logits = lesson1.response_logits(trainer, rollout)
    head_logp, head_ids = (logits + torch.randn(B, T, V, generator=rng)).log_softmax(-1).sort(descending=True)
    return replace(rollout, head_ids=head_ids, head_logp=head_logp)


def check_drift(f, trainer):
    """E[A sum_v q_v s_v] against the gradient of -KL(q || pi), weighted by A, built from the whole logits."""
    rollout = noisy_rollout(trainer)
    A = torch.linspace(-1, 1, len(rollout))
    q = torch.zeros(*rollout.ids.shape, 17).scatter_(2, rollout.head_ids, rollout.head_logp.exp())
    logp = torch.log_softmax(lesson1.response_logits(trainer, rollout), -1)
    kl = torch.where(rollout.mask, (q * (q.clamp(min=1e-30).log() - logp)).sum(-1), 0.0)
    oracle = lesson3.flat_gradient(trainer, -(A[:, None] * kl).sum() / rollout.mask.sum())
    drift = f(trainer, rollout, A)
    assert (drift - oracle).norm() < 1e-4 * oracle.norm(), "not the gradient of -sum A KL(q || pi) / N"


def trainers_distribution(model, rollout, A):
    head_logp = lesson1.logprobs(model, rollout, head=True)[1]
    return lesson3.drift(model, replace(rollout, head_logp=head_logp.detach()), A)


WRONG_DRIFT = {
    "the sampled token's score": lesson3.policy_gradient,
    "without the advantage": lambda model, rollout, A: lesson3.drift(model, rollout, torch.ones_like(A)),
    "under the trainer's distribution": trainers_distribution,
    "a mean over padding too": lambda m, r, A: lesson3.drift(m, r, A) * r.mask.sum() / r.mask.numel(),
    "padding counts": lambda m, r, A: lesson3.drift(m, replace(r, mask=torch.ones_like(r.mask)), A),
    "the other sign": lambda m, r, A: -lesson3.drift(m, r, A),
}


def test_drift(trainer):
    check_drift(lesson3.drift, trainer)


@pytest.mark.parametrize("name", WRONG_DRIFT)
def test_drift_rejects(name, trainer):
    rejected(lambda f: check_drift(f, trainer), WRONG_DRIFT[name])


def test_halves_are_disjoint_and_keep_their_advantages():
    halves = lesson3.in_halves(lambda model, rows, A: (list(rows), A.tolist()), None, np.arange(6.0), torch.arange(6.0))
    assert halves == (([0, 1, 2], [0, 1, 2]), ([3, 4, 5], [3, 4, 5]))


def test_drift_of_the_engine(trainer, engine, tokenizer):
    """None without a discrepancy; finite where a top-k sampler gives tokens no probability."""
    batch = next(loop(trainer, engine, tokenizer, head=-1))
    A = torch.ones(len(batch.rollout))
    G = lesson3.policy_gradient(trainer, batch.rollout, A)
    assert lesson3.drift(trainer, batch.rollout, A).norm() < 1e-4 * G.norm()
    rollout = engine.sample([[1, 2, 3, 4, 5, 6, 7, 8, 10]], 9, seed=0, group_size=4, head=-1, top_k=2)
    assert torch.isinf(rollout.head_logp).any()
    D = lesson3.drift(trainer, rollout, torch.ones(4))
    assert torch.isfinite(D).all() and D.norm() > 0


# ---------------------------------------------------------------- the arithmetic of the tables
def check_slope(slope):
    """Against the textbook: sum (x - x') (y - y') / sum (x - x')^2; its error sqrt(RSS / (n - 2) / sum (x - x')^2)."""
    y = 3 + 0.02 * np.arange(50) + 0.1 * np.random.default_rng(0).standard_normal(50)
    x = np.arange(50) - 24.5
    right = x @ (y - y.mean()) / (x @ x)
    error = (np.square(y - y.mean() - right * x).sum() / 48 / (x @ x))**0.5
    a, e = slope(y)
    assert abs(a - right) < 1e-9, f"the slope is {right:.5f}, not {a:.5f}"
    assert abs(e / error - 1) < 1e-6, f"its standard error is {error:.2e}, not {e:.2e}"


WRONG_SLOPE = {
    "through the origin": lambda y: (np.arange(len(y)) @ y / np.square(np.arange(len(y))).sum(), lesson3.slope(y)[1]),
    "last minus first": lambda y: ((y[-1] - y[0]) / (len(y) - 1), lesson3.slope(y)[1]),
    "the error's square": lambda y: (lesson3.slope(y)[0], lesson3.slope(y)[1]**2),
    "the error of the intercept": lambda y: (
        lesson3.slope(y)[0], float(np.polyfit(np.arange(len(y)), y, 1, cov=True)[1][1, 1]**0.5)),
}


def test_slope():
    check_slope(lesson3.slope)


@pytest.mark.parametrize("name", WRONG_SLOPE)
def test_slope_rejects(name):
    rejected(check_slope, WRONG_SLOPE[name])


def made_up_run(lag=lambda age: 0.5 * age, d=0.01, ess=0.2):
    """The rows of a run of three stretches; d grows by 20 % of its mean from end to end."""
    n = 3 * lesson3.PERIOD
    return [{"step": k, "age": k % lesson3.PERIOD, "identity": 1e-16 * k, "rms l": lag(k % lesson3.PERIOD),
             "rms d": d * (1 + 0.2 * (k - (n - 1) / 2) / n), "d on log-odds": 3 * d, "ESS of tokens": 0.8,
             "ESS of responses": ess if k % lesson3.PERIOD else 1.0} for k in range(n)]


def test_laws():
    laws = [law.values() for law in lesson3.laws(made_up_run())]
    measured = [measured for _, _, measured, *_ in laws]
    assert measured[:2] == [pytest.approx(2.9e-15), 0] and 45 < measured[2] < 55
    assert abs(measured[3] - 20) < 1e-6 and abs(measured[4]) < 1e-6              # % of the mean, over the run
    assert [predicted for _, predicted, *_ in laws] == [0, 0, "> 1", 0, 0]
    shifted_lag = lesson3.laws(made_up_run(lag=lambda age: 0.25 + age))
    assert shifted_lag[1]["measured"] == 0.25                                    # a lag at a sync is shown, not hidden


def test_measure_reports_the_effective_sample_size_of_the_lag_alone(trainer):
    rollout = noisy_rollout(trainer)
    mask, rng = rollout.mask, torch.Generator().manual_seed(0)
    lag, d = (0.3 * torch.randn(mask.shape, generator=rng) for _ in range(2))     # d must not matter to the ESS
    old = -0.7 - torch.rand(mask.shape, generator=rng)
    rollout = replace(rollout, logp_sampler=(old - d).clamp(max=-0.1))
    batch = lesson3.Batch(3, 2, rollout, torch.arange(8.0), None, (old + lag).masked_fill(~mask, 7.0), old,
                          *[torch.zeros(*mask.shape, 0)] * 2, 17)
    row = lesson3.measure(batch)
    l, d = lag[mask].double().numpy(), (old - rollout.logp_sampler)[mask].double().numpy()
    response = torch.where(mask, lag, 0.0).sum(1).double().numpy()
    p = rollout.logp_sampler[mask].double().exp().numpy()
    share = lambda w: w.sum()**2 / len(w) / np.square(w).sum()
    right = {"step": 3, "age": 2, "reward": 3.5, "rms d": np.sqrt(np.mean(d**2)), "mean d": d.mean(),
             "rms l": np.sqrt(np.mean(l**2)), "mean l": l.mean(), "d on log-odds": np.abs(d).mean() / (1 - p).mean(),
             "mean r (1)": np.exp(l).mean(), "ESS of tokens": share(np.exp(l)),
             "ESS of responses": share(np.exp(response)), "exp(-Var l)": np.exp(-l.var(ddof=1)),
             "exp(-Var sum l)": np.exp(-response.var(ddof=1))}
    assert set(row) == {*right, "identity"} and row["identity"] < 1e-12
    for name, value in right.items():
        assert abs(row[name] - value) < 1e-5, name


# ---------------------------------------------------------------- what is said follows the numbers
def made_up(**changes):
    rows = made_up_run(**changes)
    return {"run": rows, "laws": lesson3.laws(rows)}


def test_verdict():
    large = lesson3.verdict(made_up())
    assert " times the discrepancy" in large and "0.20, below one half" in large
    small = lesson3.verdict(made_up(lag=lambda age: 0.002 * age, ess=0.97))
    assert "the lag is 0.2" in small and "0.97, not below one half" in small
    still = lesson3.verdict(made_up(lag=lambda age: 0.0))
    assert "still 0" in still and "times" not in still


def test_titles():
    import draw

    def titles(result):
        figure = draw.draw_03(result)
        draw.plt.close(figure)
        return [axes.get_title() for axes in figure.axes]

    def directions(engine, control, lag):
        return [{"drift made by": name, **dict(zip(("1", "2", "4"), values))} for name, values in (
            ("discrepancy: x", engine), ("control: y", control), ("lag: z", lag))]

    seen = titles(made_up() | {"directions": directions((1, 1, 0.99), (0.2, -0.1, 0), (0.6, 0.4, 0.1))})
    assert len(seen) == 3 and "48 to 55 times" in seen[0]
    assert "Of 27 steps" in seen[1] and "in 27 for responses" in seen[1]
    assert "keeps its direction" in seen[2] and "loses it within 4 steps" in seen[2]
    contrary = made_up(lag=lambda age: 0.0, ess=0.9)
    seen = titles(contrary | {"directions": directions((1, 0.5, 0.1), (0.2, None, 0), (0.9, 0.9, 0.9))})
    assert "still 0" in seen[0] and "in 0 for responses" in seen[1]
    assert "does not keep" in seen[2] and "does not lose it" in seen[2]
    assert len(titles(contrary)) == 2                                              # a released model has no third panel


def test_quick_run(tmp_path, monkeypatch, engine, engine16, capsys):
    """The lesson itself, on the engines that are there already."""
    monkeypatch.setattr(lesson1, "Sampler", lambda path, dtype="bfloat16": engine if dtype == "float32" else engine16)
    monkeypatch.setattr(lesson3, "CONTRACTS", {"fp32 | bf16": lesson3.CONTRACTS["fp32 | bf16"]})
    result = lesson3.main(["--quick", "--out", str(tmp_path)])
    assert (tmp_path / "03_decompose.png").stat().st_size > 10_000
    rows, out = result["run"], capsys.readouterr().out
    assert all(row["identity"] < 1e-12 for row in rows)
    assert all((row["rms l"] == 0) == (row["age"] == 0) for row in rows)
    assert all(1e-4 < row["rms d"] < 0.1 for row in rows)
    assert out.count("\nOne step after a sync the lag is ") == 1 and "times the discrepancy" in out
    drift = {(row["loaded into the engine"], row["advantage"]): row["|D| / |S|"] or 0.0 for row in result["drift"]}
    assert drift["parameter noise 10%", "raw"] > 3 * drift["parameter noise 10%", "mean"]
    assert drift["parameter noise 10%", "raw"] > 3 * drift["natural bf16", "raw"]
    assert len(drift) == 2 * 9 and len(result["directions"]) == 3
    assert [row["step"] for row in result["lost updates"]] == [0, 1, 2]


# ---------------------------------------------------------------- the sync that loses updates
def check_cast(cast):
    """1 + 1/256 lies between two bf16 numbers and is a float16 number; float32 keeps all."""
    x = torch.tensor([1.0, 1 + 1 / 256 + 1e-6, 1 + 2**-20])
    for dtype, right in ((torch.bfloat16, [1, 1 + 1 / 128, 1]), (torch.float16, [1, 1 + 1 / 256, 1]), (torch.float32, x.tolist())):
        held = cast({"w": x}, dtype)["w"]
        assert held.dtype == torch.float32 and held.tolist() == right


right_cast = lesson3.cast
WRONG_CAST = {
    "not cast": lambda state, dtype: state,
    "always bf16": lambda state, dtype: right_cast(state, torch.bfloat16),
    "left in the dtype": lambda state, dtype: {name: x.to(dtype) for name, x in state.items()},
    "cut, not rounded": lambda state, dtype: {name: x if dtype == torch.float32 else (
        x.view(torch.int32) & (-65536 if dtype == torch.bfloat16 else -8192)).view(torch.float32) for name, x in state.items()},
}


def test_cast():
    check_cast(lesson3.cast)


@pytest.mark.parametrize("name", WRONG_CAST)
def test_cast_rejects(name):
    rejected(check_cast, WRONG_CAST[name])


def check_visible(visible):
    """At 1 a bf16 engine sees a change beyond 1 / 256; at 1.9 the same, not 1.9 / 256."""
    start = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.8984375])
    moved = start + torch.tensor([0, 0.0038, 0.0041, -0.0041, 0.006])
    assert list(visible(moved, start, torch.bfloat16).values()) == [0.6, 0.6]
    assert list(visible(moved, start, torch.float16).values()) == [0.8, 0.8]
    assert list(visible(start, start, torch.float32).values()) == [0, 0]


def spaced(factor):
    return lambda weights, start, dtype: {**lesson3.visible(weights, start, dtype), "weights seen to change, predicted":
                                          ((weights - start).abs() > start.abs() * torch.finfo(dtype).eps * factor).double().mean().item()}


WRONG_VISIBLE = {
    "a whole spacing": spaced(1), "half of |w| eps": spaced(1 / 2), "an eighth of it": spaced(1 / 8),
    "whatever has changed": lambda weights, start, dtype: {**lesson3.visible(weights, start, dtype), "measured":
                                                           (weights != start).double().mean().item()},
    "growth only": lambda weights, start, dtype: {**lesson3.visible(weights, start, dtype), "measured":
                                                  (weights.to(dtype) > start.to(dtype)).double().mean().item()},
}


def test_visible():
    check_visible(lesson3.visible)


@pytest.mark.parametrize("name", WRONG_VISIBLE)
def test_visible_rejects(name):
    rejected(check_visible, WRONG_VISIBLE[name])


def check_lost_updates(lost_updates, trainer, samplers, tokenizer):
    """The cast is 0 at the start, and in float32 always; a bf16 engine loses most of the first update; the
    arithmetic part is what it was."""
    rows = {(row["trainer | engine"], row["step"]): row for row in lost_updates(trainer, samplers, tokenizer, 0, 2)}
    for name in ("fp32 | bf16", "fp32 | fp32"):
        assert rows[name, 0]["mean |cast|"] == rows[name, 0]["mean |movement|"] == rows[name, 0]["measured"] == 0
    lossy, exact = rows["fp32 | bf16", 1], rows["fp32 | fp32", 1]
    assert exact["mean |cast|"] == 0 and exact["mean |arithmetic|"] < 1e-5 and exact["measured"] > 0.99
    assert lossy["mean |cast|"] > 0.6 * lossy["mean |movement|"] > 1e-4 and 0.05 < lossy["measured"] < 0.3
    assert 0.5 < lossy["mean |arithmetic|"] / rows["fp32 | bf16", 0]["mean |arithmetic|"] < 2


def without(name, wrong):
    """The experiment with one of its functions replaced."""
    def lost_updates(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lesson3, name, wrong)
            return lesson3.lost_updates(*args)
    return lost_updates


@pytest.fixture
def by_dtype(monkeypatch, engine, engine16):
    """Two contracts, on the engines that are there already."""
    monkeypatch.setattr(lesson3, "CONTRACTS", {name: lesson3.CONTRACTS[name] for name in ("fp32 | bf16", "fp32 | fp32")})
    return {torch.bfloat16: engine16, torch.float32: engine}


def test_a_bf16_engine_loses_updates(trainer, by_dtype, tokenizer):
    check_lost_updates(lesson3.lost_updates, trainer, by_dtype, tokenizer)


@pytest.mark.parametrize("name", ["not cast", "always bf16"])
def test_lost_updates_rejects(name, trainer, by_dtype, tokenizer):
    rejected(lambda f: check_lost_updates(f, trainer, by_dtype, tokenizer), without("cast", WRONG_CAST[name]))
