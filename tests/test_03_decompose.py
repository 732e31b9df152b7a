"""Lesson 3: the split, the loop that follows it, and the estimates of the drift, against oracles."""
import copy
import json
import math
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import lesson1, rejected

lesson3 = import_module("03_decompose")
lesson2 = lesson3.lesson2
SUM = lesson1.TASKS["sum"]


# ---------------------------------------------------------------- the split
def check_split(f):
    """mu = -1.00, old = -1.10, new = -1.40: discrepancy -0.10, lag -0.30, total -0.40."""
    d, l = f(torch.tensor([-1.40, -2.0]), torch.tensor([-1.10, -2.5]), torch.tensor([-1.00, -2.0]))
    assert torch.allclose(d, torch.tensor([-0.10, -0.5])) and torch.allclose(l, torch.tensor([-0.30, 0.5]))


WRONG_SPLIT = {
    "sampler minus trainer": lambda p, o, s: (s - o, o - p),
    "anchor scored with the current weights": lambda p, o, s: (p - s, p - p),
    "anchor taken from the engine": lambda p, o, s: (o - s, p - s),
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
    return lesson3.grpo(trainer, engine, SUM, tokenizer, optimizer, lesson3.weighted(lesson2.CORRECTIONS[correction]), **settings)


def check_loop(grpo, trainer, engine, tokenizer):
    """The lag is exactly 0 at a sync and not after; an update leaves the discrepancy what it was."""
    ages = []
    for batch in grpo(trainer, engine, tokenizer):
        ages.append(batch.age)
        mask = batch.rollout.mask
        assert (batch.lag[mask].abs().max() == 0) == (batch.age == 0)
        assert batch.discrepancy[mask].abs().max() < 1e-4                         # an fp32 engine
        row = lesson3.measure(batch)
        assert row["identity"] < 1e-12
        assert batch.age == 0 or row["l_rms"] > 1e-3
    assert ages == [0, 1, 0, 1]


def aliased_anchor(trainer, engine, tokenizer):
    """`old` is the trainer itself: the snapshot moves with what it should hold still."""
    for batch in loop(trainer, engine, tokenizer):
        batch.logp_old = lesson1.score(trainer, batch.rollout)
        yield batch


def stale_anchor(trainer, engine, tokenizer):
    """`old` is never refreshed at a sync."""
    first = copy.deepcopy(trainer)
    for batch in loop(trainer, engine, tokenizer):
        batch.logp_old = lesson1.score(first, batch.rollout)
        yield batch


def other_layout(trainer, engine, tokenizer):
    """`old` scored row by row: another batch shape, whose rounding is booked as lag."""
    held = copy.deepcopy(trainer)
    for batch in loop(trainer, engine, tokenizer):
        if batch.age == 0:
            held.load_state_dict(trainer.state_dict())
        batch.logp_old = torch.cat([lesson1.score(held, batch.rollout[i:i + 1]) for i in range(len(batch.rollout))])
        batch.logp_old = batch.logp_old + 1e-7 * torch.arange(len(batch.rollout))[:, None]     # at the least one rounding apart
        yield batch


def engine_for_anchor(trainer, engine, tokenizer):
    """The engine's own log-probs as pi_old: its discrepancy becomes lag."""
    for batch in loop(trainer, engine, tokenizer):
        batch.logp_old = batch.rollout.logp_sampler
        yield batch


def test_loop(trainer, engine, tokenizer):
    check_loop(loop, trainer, engine, tokenizer)


@pytest.mark.parametrize("wrong", [aliased_anchor, stale_anchor, other_layout, engine_for_anchor], ids=lambda f: f.__name__)
def test_loop_rejects(wrong, trainer, engine, tokenizer):
    rejected(lambda f: check_loop(f, trainer, engine, tokenizer), wrong)


def test_loop_is_the_run_of_train_py(trainer, engine, tokenizer, tmp_path):
    """Two loops, written independently, one training, with gradients that are clipped: the CSV of train.py."""
    train = import_module("train")
    train.main(["--steps", "10", "--prompts", "8", "--group-size", "4", "--staleness", "4", "--correction", "token-is", "--lr", "3e-3",
                "--out", str(tmp_path / "a")], engine)
    lines = (tmp_path / "a" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","))) for line in lines[1:]]
    assert any(float(row["grad_norm"]) > 1 for row in rows) and any(0 < float(row["grad_norm"]) < 1 for row in rows)
    for batch, row in zip(loop(trainer, engine, tokenizer, "token-is", lr=3e-3, steps=10, period=5), rows, strict=True):
        mine = lesson3.measure(batch)
        assert abs(mine["reward"] - float(row["reward"])) < 1e-6
        assert abs(mine["l_rms"] - float(row["lag_rms"])) < 1e-5 * max(1, mine["l_rms"])


# ---------------------------------------------------------------- what is loaded into the engine
def test_weight_noise_is_drawn_once_and_ties_stay_tied(trainer):
    perturb = lesson3.weight_noise(0.1, seed=3)
    state = trainer.state_dict()
    one, two = perturb(state), perturb(state)
    assert all(torch.equal(one[n], two[n]) for n in state)
    assert one["lm_head.weight"] is one["model.embed_tokens.weight"]
    matrix = "model.layers.0.mlp.up_proj.weight"
    relative = one[matrix] / state[matrix] - 1
    assert abs(relative.std().item() - 0.1) < 0.005 and abs(relative.mean().item()) < 0.005
    twice = {n: 2 * v for n, v in state.items()}
    twice["lm_head.weight"] = twice["model.embed_tokens.weight"]
    assert torch.allclose(perturb(twice)[matrix], 2 * one[matrix])               # the noise belongs to the matrix, not to its value
    fresh = lesson3.weight_noise(0.1, seed=3, fresh=True)
    first, second = fresh(state)[matrix], fresh(state)[matrix]
    assert torch.equal(first, one[matrix]) and not torch.allclose(second, first)
    other = lesson3.weight_noise(0.1, seed=4)(state)
    assert not torch.equal(other[matrix], one[matrix])
    gate = one["model.layers.0.mlp.gate_proj.weight"] / state["model.layers.0.mlp.gate_proj.weight"] - 1
    assert abs(np.corrcoef(gate.flatten(), relative.flatten())[0, 1]) < 0.05     # another matrix, another noise


def test_fake_quantisation(trainer):
    state = trainer.state_dict()
    for bits in (4, 8):
        rounded = lesson3.fake_quantised(bits)(state)
        w, q = state["model.layers.0.mlp.up_proj.weight"], rounded["model.layers.0.mlp.up_proj.weight"]
        step = w.abs().amax(1, keepdim=True) / (2**(bits - 1) - 1)
        assert (q - w).abs().max() <= step.max() / 2 + 1e-6 and ((q / step).round() - q / step).abs().max() < 1e-3
        assert max(len(row.unique()) for row in q) <= 2**bits - 1
        assert {n for n in state if not torch.equal(rounded[n], state[n])} == {n for n in state if n.endswith("_proj.weight")}


def test_the_perturbed_weights_reach_the_engine(trainer, engine, tokenizer):
    perturb = lesson3.weight_noise(0.1, seed=0)
    batch = next(loop(trainer, engine, tokenizer, perturb=perturb))
    noisy = copy.deepcopy(trainer)
    noisy.load_state_dict(perturb(trainer.state_dict()))
    mask = batch.rollout.mask
    assert (lesson1.score(noisy, batch.rollout) - batch.rollout.logp_sampler)[mask].abs().max() < 1e-5
    assert batch.discrepancy[mask].abs().mean() > 1e-2 and batch.lag[mask].abs().max() == 0


def test_every_sync_goes_through_perturb(trainer, engine, tokenizer):
    perturb, noisy = lesson3.weight_noise(0.1, seed=0), copy.deepcopy(trainer)
    for batch in loop(trainer, engine, tokenizer, perturb=perturb, steps=3, period=1):
        noisy.load_state_dict(perturb(trainer.state_dict()))
        assert (lesson1.score(noisy, batch.rollout) - batch.rollout.logp_sampler)[batch.rollout.mask].abs().max() < 1e-5


def test_the_loop_does_what_its_arguments_say(trainer, engine, tokenizer):
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3, weight_decay=0.0)
    rates = []
    for batch in lesson3.grpo(trainer, engine, SUM, tokenizer, optimizer, lesson3.weighted(lesson2.CORRECTIONS["none"]), 3, 1, 0, prompts=6,
                              group_size=4, advantage="raw", decay=False):
        rates.append(optimizer.param_groups[0]["lr"])
        assert torch.equal(batch.advantage, batch.R) and batch.R.any() and len(batch.R) == 24
    assert rates == [1e-3] * 3
    assert next(loop(trainer, engine, tokenizer, max_tokens=5)).rollout.ids.shape[1] == 5


def test_weighted_loss_counts_response_tokens():
    batch = lesson3.Batch(0, 0, SimpleNamespace(mask=torch.tensor([[True, True], [True, False]]), logp_sampler=torch.full((2, 2), -1.0)), None,
                          torch.ones(2), torch.full((2, 2), -1.0), torch.full((2, 2), -1.0), *[torch.zeros(2, 2, 0)] * 2, 17)
    assert lesson3.weighted(lesson2.CORRECTIONS["none"])(batch).item() == 1.0


# ---------------------------------------------------------------- the estimates
def noisy_halves(mean, n, generator):
    """Two independent estimates of a mean vector, each with noise far above it."""
    return tuple(mean + torch.randn(len(mean), generator=generator, dtype=torch.float64) / n**0.5 for _ in range(2))


def check_cross_halves(functions):
    """Means of known norms and cosine under noise: |a|^2 = 4, |b|^2 = 1, a . b = 1, noise |e|^2 = 50 a half."""
    cross, norm2 = functions
    a, b = torch.zeros(2, 5000, dtype=torch.float64)
    a[:4], b[0] = 1.0, 1.0
    generator = torch.Generator().manual_seed(0)
    draws = [(noisy_halves(a, 100, generator), noisy_halves(b, 100, generator)) for _ in range(400)]
    for value, right in (([norm2(x) for x, _ in draws], 4.0), ([norm2(y) for _, y in draws], 1.0), ([cross(x, y) for x, y in draws], 1.0),
                         ([cross(x, x) for x, _ in draws], 4.0)):
        assert abs(np.mean(value) - right) < 5 * np.std(value) / 20 and np.std(value) / 20 < 0.1


WRONG_HALVES = {
    "the norm of the mean of the halves": (lesson3.cross, lambda a: ((a[0] + a[1]) / 2).square().sum().item()),
    "the mean of the halves' norms": (lesson3.cross, lambda a: (a[0].square().sum() + a[1].square().sum()).item() / 2),
    "within the halves": (lambda a, b: ((a[0] @ b[0] + a[1] @ b[1]) / 2).item(), lesson3.norm2),
    "sum for mean": (lambda a, b: (a[0] @ b[1] + a[1] @ b[0]).item(), lesson3.norm2),
}


def test_cross_halves():
    check_cross_halves((lesson3.cross, lesson3.norm2))
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert abs(lesson3.cosine((a, a), (b, b)) - math.sqrt(0.5)) < 1e-6
    assert math.isnan(lesson3.cosine((a, -a), (b, b))) and math.isnan(lesson3.cosine((a, -a), (a, -a)))


@pytest.mark.parametrize("name", WRONG_HALVES)
def test_cross_halves_rejects(name):
    rejected(check_cross_halves, WRONG_HALVES[name])


def check_drift(f, trainer, rollout, A):
    """E[A sum_v q_v s_v] against the gradient of -KL(q || pi), weighted by A, built from the whole logits."""
    q = torch.zeros(*rollout.ids.shape, 17).scatter_(2, rollout.head_ids, rollout.head_logp.exp())
    logp = torch.log_softmax(lesson1.response_logits(trainer, rollout), -1)
    kl = torch.where(rollout.mask, (q * (q.clamp(min=1e-30).log() - logp)).sum(-1), 0.0)
    oracle = lesson3.flat_gradient(trainer, -(A[:, None] * kl).sum() / rollout.mask.sum())
    drift = f(trainer, rollout, A)
    assert (drift - oracle).norm() < 1e-4 * oracle.norm()


def sampled_score(model, rollout, A):
    return lesson3.policy_gradient(model, rollout, A)


def without_advantage(model, rollout, A):
    return lesson3.drift(model, rollout, torch.ones_like(A))


def trainers_distribution(model, rollout, A):
    head = lesson1.score(model, rollout, head=True)[1]
    moved = copy.copy(rollout)
    moved.head_logp = head.detach()
    return lesson3.drift(model, moved, A)


def mean_over_padding(model, rollout, A):
    return lesson3.drift(model, rollout, A) * rollout.mask.sum() / rollout.mask.numel()


@pytest.fixture
def noisy_batch(trainer, engine, tokenizer):
    return next(loop(trainer, engine, tokenizer, perturb=lesson3.weight_noise(0.1, seed=0), head=-1, advantage="raw", max_tokens=7))


def test_drift(trainer, noisy_batch):
    rollout = noisy_batch.rollout
    check_drift(lesson3.drift, trainer, rollout, noisy_batch.R + 0.5)
    rollout.mask[::2, -2:] = False                                                # responses of two lengths
    check_drift(lesson3.drift, trainer, rollout, torch.linspace(-1, 1, len(rollout)))


@pytest.mark.parametrize("wrong", [sampled_score, without_advantage, trainers_distribution, mean_over_padding], ids=lambda f: f.__name__)
def test_drift_rejects(wrong, trainer, noisy_batch):
    rollout = noisy_batch.rollout
    rollout.mask[::2, -2:] = False                                                # responses of two lengths
    A = torch.linspace(-1, 1, len(rollout))
    rejected(lambda f: check_drift(f, trainer, rollout, A), wrong)


def test_halves_are_disjoint_and_keep_their_advantages():
    halves = lesson3.in_halves(lambda model, rows, A: (list(rows), A.tolist()), None, np.arange(6.0), torch.arange(6.0))
    assert halves == (([0, 1, 2], [0, 1, 2]), ([3, 4, 5], [3, 4, 5]))


def test_drift_vanishes_without_a_discrepancy(trainer, engine, tokenizer):
    batch = next(loop(trainer, engine, tokenizer, head=-1))
    A = torch.ones(len(batch.rollout))
    assert lesson3.drift(trainer, batch.rollout, A).norm() < 1e-4 * lesson3.policy_gradient(trainer, batch.rollout, A).norm()


def test_drift_of_a_truncated_support_is_finite(trainer, engine):
    engine.sync(trainer)
    rollout = engine.sample([[1, 2, 3, 4, 5, 6, 7, 8, 10]], 9, seed=0, group_size=4, head=-1, top_k=2)
    assert torch.isinf(rollout.head_logp).any()
    D = lesson3.drift(trainer, rollout, torch.ones(4))
    assert torch.isfinite(D).all() and D.norm() > 0


# ---------------------------------------------------------------- the arithmetic of the report
def test_growth_tells_a_line_from_a_root():
    for name, shape in (("t", lambda t: 0.3 * t), ("sqrt(t)", lambda t: 0.3 * t**0.5)):
        rows = [{"age": age, "l_rms": (1 + k) * shape(age)} for k in range(2) for age in range(lesson3.PERIOD)]
        for fit in lesson3.growth(rows):
            assert fit[name] < 1e-9 and all(fit[other] > 0.05 for other in ("t", "sqrt(t)") if other != name)
        assert [fit["from step"] for fit in lesson3.growth(rows)] == [0, lesson3.PERIOD]


def check_slope(slope):
    """Against the textbook: sum (x - x') (y - y') / sum (x - x')^2, and the error sqrt(RSS / (n - 2) / sum (x - x')^2)."""
    y = 3 + 0.02 * np.arange(50) + 0.1 * np.random.default_rng(0).standard_normal(50)
    x = np.arange(50) - 24.5
    right = x @ (y - y.mean()) / (x @ x)
    error = (np.square(y - y.mean() - right * x).sum() / 48 / (x @ x))**0.5
    a, e = slope(y)
    assert abs(a - right) < 1e-9 and abs(e / error - 1) < 1e-6


WRONG_SLOPE = {
    "through the origin": lambda y: (float(np.arange(len(y)) @ y / np.square(np.arange(len(y))).sum()), lesson3.slope(y)[1]),
    "last minus first": lambda y: ((y[-1] - y[0]) / (len(y) - 1), lesson3.slope(y)[1]),
    "the error's square": lambda y: (lesson3.slope(y)[0], lesson3.slope(y)[1]**2),
    "the error of the intercept": lambda y: (lesson3.slope(y)[0], float(np.polyfit(np.arange(len(y)), y, 1, cov=True)[1][1, 1]**0.5)),
}


def test_slope_and_its_error():
    check_slope(lesson3.slope)


@pytest.mark.parametrize("name", WRONG_SLOPE)
def test_slope_rejects(name):
    rejected(check_slope, WRONG_SLOPE[name])


def test_measure_reports_the_effective_sample_size_of_the_lag_alone(trainer, engine, tokenizer):
    batch = next(loop(trainer, engine, tokenizer))
    mask = batch.rollout.mask
    lag = 0.3 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    batch.logp = (batch.logp_old + lag).masked_fill(~mask, 7.0)
    batch.rollout.logp_sampler = batch.rollout.logp_sampler - 0.5 * torch.rand(mask.shape)       # a discrepancy, which must not matter
    row = lesson3.measure(batch)
    w = lag[mask].double().exp()
    assert abs(row["ess_token"] - (w.sum()**2 / len(w) / w.square().sum()).item()) < 1e-6
    s = torch.where(mask, lag, 0.0).sum(1).double().exp()
    assert abs(row["ess_sequence"] - (s.sum()**2 / len(s) / s.square().sum()).item()) < 1e-6
    assert abs(row["mean_weight"] - w.mean().item()) < 1e-6 and row["d_rms"] > 0.1
    l, sequence = lag[mask].double().numpy(), torch.where(mask, lag, 0.0).sum(1).double().numpy()
    d = (batch.logp_old - batch.rollout.logp_sampler)[mask].double().numpy()
    p = batch.rollout.logp_sampler[mask].double().exp().numpy()
    right = {"d_rms": np.sqrt(np.mean(d**2)), "d_mean": d.mean(), "l_rms": np.sqrt(np.mean(l**2)), "l_mean": l.mean(), "d_odds": np.abs(d).mean() / (1 - p).mean(),
             "ess_token_predicted": np.exp(-l.var(ddof=1)), "ess_sequence_predicted": np.exp(-sequence.var(ddof=1))}
    for name, value in right.items():
        assert abs(row[name] - value) < 1e-5, name


def check_feedback_ratios(feedback_ratios):
    grown = {"sampler w = 1": [0, 2, 3, 6, 7, 9, 12, 16], "sampler w = r": [0, 2, 2.2, 4, 4, 4, 4.5, 5], "own w = 1": [0, 1, 2, 3, 5, 8, 13, 21],
             "own w = r": [0, 1, 2, 3, 5, 8, 13, 21]}
    rows = [{"step": k, "seed": 0, "lr": 1e-3, "ess w = 1": 1 - 0.2 * k, "ess w = r": 1.0, **{name: float(each[k]) for name, each in grown.items()}} for k in range(8)]
    ratios = feedback_ratios(rows)
    assert ratios["first step with ESS < 1/2"] == 3                          # grows from 2 to 6, then to 16; under w = r from 2 to 4, then to 5
    assert math.isnan(feedback_ratios([{**row, "ess w = 1": 0.1} for row in rows])["own prefixes, before"])
    assert abs(ratios["sampler prefixes, before"] - 0.5) < 1e-9 and abs(ratios["sampler prefixes, after"] - 0.1) < 1e-9
    assert ratios["own prefixes, before"] == ratios["own prefixes, after"] == 1


def ratios_of(change):
    return lambda rows: lesson3.feedback_ratios(change(rows))


WRONG_RATIOS = {
    "from step 0": ratios_of(lambda rows: [{**row, **({k: v for k, v in rows[0].items() if " w = " in k and "ess" not in k} if row["step"] == 1 else {})} for row in rows]),
    "the ESS of w = r": ratios_of(lambda rows: [{**row, "ess w = 1": row["ess w = r"]} for row in rows]),
    "upside down": ratios_of(lambda rows: [{**row, **{f"{p} w = {a}": row[f"{p} w = {b}"] for p in ("sampler", "own") for a, b in ("1r", "r1")}} for row in rows]),
    "sizes for growth": lambda rows: {**lesson3.feedback_ratios(rows), "sampler prefixes, before": rows[3]["sampler w = r"] / rows[3]["sampler w = 1"]},
}


def test_feedback_ratios():
    check_feedback_ratios(lesson3.feedback_ratios)


@pytest.mark.parametrize("name", WRONG_RATIOS)
def test_feedback_ratios_rejects(name):
    rejected(check_feedback_ratios, WRONG_RATIOS[name])


def test_the_lags_weight():
    p, o, s = (torch.tensor([[x, x]], requires_grad=True) for x in (-1.4, -1.1, -1.0))
    w = lesson3.lag_is(p, o, s, torch.ones(1), torch.tensor([[True, False]]))
    assert not w.requires_grad and abs(w[0, 0].item() - math.exp(-0.3)) < 1e-6 and w[0, 1] == 0


def test_feedback_starts_both_arms_at_the_same_weights(trainer, engine, tokenizer):
    start = copy.deepcopy(trainer.state_dict())
    rows = lesson3.feedback(trainer, engine, engine, tokenizer, seed=0, lr=1e-3, steps=2)
    assert all(torch.equal(v, start[n]) for n, v in trainer.state_dict().items())
    for key in ("ess", "sampler", "own", "reward"):
        assert rows[0][f"{key} w = 1"] == rows[0][f"{key} w = r"]
    assert rows[0]["own w = 1"] == rows[0]["sampler w = 1"] == 0 and rows[1]["own w = 1"] > 1e-3


def test_a_torn_study_is_run_again_and_a_finished_one_is_not(tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(lesson1, "ROOT", tmp_path)
    monkeypatch.setattr(lesson3, "feedback", lambda *args: runs.append(args[4:]) or [{"step": 0, "seed": args[4]}])
    study = lambda: lesson3.study(None, None, None, None, "tiny", seeds=(3, 4), rates=(1e-3,))
    assert study() == [[{"step": 0, "seed": 3}], [{"step": 0, "seed": 4}]] == study() and runs == [(3, 1e-3), (4, 1e-3)]
    next((tmp_path / "runs" / "03_study").glob("*seed4.json")).write_text('[{"step":')
    assert study()[1] == [{"step": 0, "seed": 4}] and runs[2:] == [(4, 1e-3)]
    assert lesson3.read_json(tmp_path / "nothing") is None


def test_the_study_goes_with_no_other_flag(capsys):
    with pytest.raises(SystemExit) as exit:
        lesson3.main(["--study", "--quick"])
    assert exit.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_quick_run(tmp_path):
    run = subprocess.run([sys.executable, str(lesson1.ROOT / "03_decompose.py"), "--quick", "--out", str(tmp_path)],
                         capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "03_decompose.png").stat().st_size > 10_000
    result = json.loads((tmp_path / "03_decompose.json").read_text())
    rows = result["follow"]["rows"]
    assert all(row["identity"] < 1e-12 for row in rows)
    assert all((row["l_rms"] == 0) == (row["age"] == 0) for row in rows)
    assert all(1e-4 < row["d_rms"] < 0.1 for row in rows)
    drift = {(row["arm"], row["advantage"]): row["drift"] or 0.0 for row in result["drift"]}
    assert drift["weight noise 10%", "raw"] > 3 * drift["weight noise 10%", "mean"] and drift["weight noise 10%", "raw"] > 3 * drift["natural bf16", "raw"]
