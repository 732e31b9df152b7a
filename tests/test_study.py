"""figures/study.py: lesson 4's study, on records written by hand and in runs of seconds."""

import json
import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from conftest import lesson1, rejected

study, tests = import_module("study"), import_module("test_04_dlc")
lesson2, lesson3, lesson4 = study.lesson2, study.lesson3, study.lesson4
FRESH, STALE = study.FRESH, study.STALE
A, MASK, V = tests.A, tests.MASK, tests.V
EVERY = [prefixes + part for prefixes in (FRESH, STALE) for part in study.PARTS]


# ---------------------------------------------------------------- the feedback loop
def feedback_record(seed=0, **changes):
    """Four steps. On-policy lags 0 1 2 3 and 0 1 2 5; w = r's ESS falls below 1/2 at step 2."""
    flat = {"ESS": [1.0] * 4, "KL": [0.0, 0.1, 0.1, 0.2], "reward": [0.0] * 4}
    return {"seed": seed, "lr": 1e-3,
            "on-policy": {**flat, "lag": [0, 1.0, 2, 3], "KL": [0.0] * 4},
            "on-policy, other samples": {**flat, "lag": [0, 1.0, 2, 5]},
            "w = 1": {**flat, "lag": [0, 1.5, 4, 9], "ESS": [1, 0.4, 0.1, 0.1], "KL": [0, 0.2, 0.4, 0.9]},
            "w = r": {**flat, "lag": [0, 1.2, 3, 4], "ESS": [1, 0.6, 0.4, 0.6], "KL": [0, 0.1, 0.2, 0.31], **changes}}


def check_feedback_rows(feedback_rows):
    row, = feedback_rows([feedback_record()])
    assert row["w = r: ESS < 1/2"] == 2                          # floor .1: harm is above .3
    want = {"w = r: excess before": 0.2, "w = r: excess after": 0.5, "w = 1: excess before": 0.5, "w = 1: excess after": 3.5}
    for key, value in want.items():
        assert row[key] == pytest.approx(value), key
    assert row["w = r: harm"] == 3 and row["w = 1: harm"] == 2
    never, = feedback_rows([feedback_record(ESS=[1.0] * 4)])
    assert never["w = r: ESS < 1/2"] is None is never["w = r: excess after"]
    assert never["w = r: excess before"] == pytest.approx((0.2 + 1 + 0) / 3)


def on(change):
    return lambda records: study.feedback_rows([change(r) for r in records])


WRONG_FEEDBACK = {
    "the ESS of w = 1": on(lambda r: {**r, "w = r": {**r["w = r"], "ESS": r["w = 1"]["ESS"]}}),
    "no on-policy control": on(lambda r: {**r, **{name: {**r[name], "lag": [0.0] * 4} for name in ("on-policy", "on-policy, other samples")}}),
    "one on-policy run": on(lambda r: {**r, "on-policy, other samples": {**r["on-policy, other samples"], "lag": r["on-policy"]["lag"]}}),
    "arms swapped": on(lambda r: {**r, "w = r": {**r["w = 1"], "ESS": r["w = r"]["ESS"]}, "w = 1": r["w = r"]}),
    "a floor of 0": on(lambda r: {**r, "on-policy, other samples": {**r["on-policy, other samples"], "KL": [0.0] * 4}}),
}


def test_feedback_rows():
    check_feedback_rows(study.feedback_rows)


@pytest.mark.parametrize("name", WRONG_FEEDBACK)
def test_feedback_rows_rejects(name):
    rejected(check_feedback_rows, WRONG_FEEDBACK[name])


def test_the_lags_weight():
    p, o, s = (torch.tensor([[x, x]], requires_grad=True) for x in (-1.4, -1.1, -1.0))
    w = study.lag_is(p, o, s, torch.ones(1), torch.tensor([[True, False]]))
    assert not w.requires_grad and abs(w[0, 0].item() - math.exp(-0.3)) < 1e-6 and w[0, 1] == 0


def test_feedback_starts_every_arm_at_the_same_weights(trainer, engine, tokenizer):
    """w = 1 and w = r see the same samples, the on-policy runs others; the first is its own reference."""
    start = {name: value.clone() for name, value in trainer.state_dict().items()}
    record = study.feedback(trainer, engine, tokenizer, seed=0, lr=1e-3, steps=2)
    assert all(torch.equal(v, start[n]) for n, v in trainer.state_dict().items())
    rewards = [record[arm]["reward"][0] for arm in study.FEEDBACK]
    assert rewards[2] == rewards[3] and len(set(rewards)) == 3
    for arm in study.FEEDBACK:
        assert record[arm]["lag"][0] == 0 and record[arm]["lag"][1] > 1e-3 and abs(record[arm]["KL"][0]) < 1e-9
        assert (record[arm]["KL"][1] > 1e-6) == (arm != "on-policy")
    assert record["on-policy"]["ESS"] == [1, 1] and record["w = r"]["ESS"][1] < 1


def test_a_finished_run_of_the_study_is_not_run_again(tmp_path, monkeypatch, tiny):
    runs, path = [], tmp_path / "03_study.json"
    monkeypatch.setattr(study, "feedback", lambda trainer, sampler, tokenizer, seed, lr: runs.append((lr, seed)) or {
        **feedback_record(), "seed": seed, "lr": lr})
    monkeypatch.setattr(lesson1, "Sampler", lambda *args, **kwargs: None)
    monkeypatch.setattr(lesson3, "drift_directions", lambda *args: [{"drift made by": "lag", "1": 0.5}])
    study.STUDIES["03"](path)
    assert sorted(runs) == [(lr, seed) for lr in (5e-4, 1.5e-3) for seed in range(8)]
    records = json.loads(path.read_text())
    del records["lr 0.0005, seed 3"]
    path.write_text(json.dumps(records))
    study.STUDIES["03"](path)
    assert runs[16:] == [(5e-4, 3)]


# ---------------------------------------------------------------- the task
def test_early_stop():
    """Digits 5 to 8 are subtracted; a correct digit is worth 1/8 wherever the response ends; from step 350 on
    responses end
    after the second digit or later, padded."""
    digits = np.array([[1, 2, 3, 4, 5, 6, 7, 8]])
    right = study.STOP.answer(digits)
    assert right.tolist() == [[1, 3, 6, 0, 5, 9, 2, 4]]
    grade = study.STOP.grade
    assert (
        grade([1, 3, 6], right[0].tolist(), False) == 3 / 8 and grade(right[0].tolist(), right[0].tolist(), True) == 1
    )
    assert grade([], right[0].tolist(), True) == 0 and grade([3, 1, 6, 9], right[0].tolist(), True) == 1 / 8
    shown = np.tile(right, (4000, 1))
    whole, cut = (study.STOP.demonstrate(shown, shown, np.random.default_rng(0), step) for step in (349, 350))
    assert (whole[:, :8] == right).all() and (whole[:, 8] == lesson1.END).all()
    ends = (cut == lesson1.END).argmax(1)
    assert ((cut == lesson1.END).sum(1) == 1).all() and ends.min() == 2 and ends.max() == 8
    for row, end in zip(cut, ends):
        assert (row[:end] == right[0][:end]).all() and (row[end + 1 :] == lesson1.PAD).all()
    assert abs((ends == 2).mean() - 0.65) < 0.03 and abs((ends == 3).mean() - 0.35 * 0.65) < 0.03


# ---------------------------------------------------------------- the arms
def two_sided(lag, advantage):
    return lag.exp().clamp(0.5, 2)


CENTERED = {        # arm -> the weight inside its center
    **dict.fromkeys(("dlc", "dlc, no resync", "dlc, periodic", "dlc, token ESS", "dlc, kept batch", "discrepancy center"), tests.at_most_two),
    **dict.fromkeys(("centering", "centering + resync"), tests.unweighted),
    "dlc, ppo rule": tests.ppo, "dlc, two-sided": two_sided}
REFUSING = {"none + resync", "dlc", "lag clip + resync", "dlc, token ESS", "dlc, two-sided", "dlc, ppo rule", "tis + resync", "centering + resync"}


def expected_arm(name, batch):
    """What each arm's loss is, written out."""
    lag, total = (batch.logp - batch.logp_old).detach(), (batch.logp - batch.rollout.logp_sampler).detach()
    r, rho = lag.exp(), total.exp()
    product = torch.where(MASK, total, 0.0).sum(1, keepdim=True).exp()
    unweighted = ("on-policy", "none", "none + resync", "none, periodic", "centering", "centering + resync")
    weight = {
        **dict.fromkeys(("tis", "tis + resync"), rho.clamp(max=2)), "token-is": rho,
        "seq-mis": (product * (product <= 2)).expand_as(r), "ppo": tests.ppo(lag, A), "dlc, ppo rule": tests.ppo(lag, A),
        "dlc, two-sided": two_sided(lag, A), **dict.fromkeys(unweighted, torch.ones_like(r)),
    }.get(name, r.clamp(max=2))
    c, heads = 0.0, (batch.head_logp, batch.head_logp_old, batch.rollout.head_logp)
    if name in CENTERED:
        c = tests.right_center(*heads, A, V, CENTERED[name])
    if name == "discrepancy center":                         # sum_v (q_v - pi_old,v) f(r_v) log pi_v
        head, old, q = heads
        f = (head.detach() - old).exp().clamp(max=2)
        c = ((q.exp() - old.exp()) * f * head).sum(-1)
    return lesson2.policy_loss(batch.logp, weight, A, MASK, int(MASK.sum()), c)


def arm_of(name) -> dict:
    arm = study.ARMS_04[name]
    return arm(64) if callable(arm) else arm


@pytest.mark.parametrize("name", study.ARMS_04)
def test_every_arm_is_what_its_name_says(name):
    arm, seen = arm_of(name), {True: 0, False: 0}
    assert (arm.get("head", 0) == lesson4.HEAD) == (name in CENTERED)
    for seed in range(8):
        logits, _, _ = tests.distributions(seed=seed)
        _, old, q = tests.distributions(1.2 if seed % 2 else 0.3, seed=seed + 100)
        a = torch.randint(0, V, MASK.shape, generator=torch.Generator().manual_seed(seed))
        x = logits.clone().requires_grad_()
        batch = tests.make_batch(x, old, q, a)
        value = arm["loss"](batch)
        ess = lesson2.ess(batch.lag[MASK]) if "token ESS" in name else tests.right_ess(batch.lag, MASK)
        refused = name in REFUSING and ess < 0.5
        seen[refused] += 1
        assert (value is None) == refused
        if name == "dlc, kept batch":
            assert arm["period"].now == (ess < 0.5)          # trained on, and synced before the next step
        if not refused:
            got, want = (torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in (value, expected_arm(name, batch)))
            tests.close(got, want, name)
    assert seen[False] and (seen[True] or name not in REFUSING)


def test_due_is_the_period_or_the_next_age():
    due = study.Due(4)
    assert [age == due for age in (1, 2, 4)] == [False, False, True]
    due.now = True
    assert [age == due for age in (2, 1)] == [True, False]               # once


def test_the_records_are_the_plans():
    """figures/*_study.json holds runs of the plan, under its keys."""
    records = {study_: json.loads((lesson1.ROOT / "figures" / f"{study_}_study.json").read_text()) for study_ in ("04", "both")}
    plan = study.plan_04()
    plan |= study.periodic_04(records["04"])
    for name, its_plan in (("04", plan), ("both", study.plan_both())):
        assert set(records[name]) - {"tail"} <= set(its_plan)
        for key, record in records[name].items():
            if key != "tail":
                run = its_plan[key]
                assert (record["setting"], record["arm"], record["seed"], record["engine"], record["period"]) == (
                    *run, *("", None)[len(run) - 3:])


def test_the_plan_compares_arms_on_enough_seeds():
    plan = list(study.plan_04().values())
    for setting, seeds in (("sum", 8), ("stop", 5)):
        for arm in study.MAIN_04:
            assert [run[2] for run in plan if run[:2] == (setting, arm) and len(run) == 3] == list(range(seeds))
    both = list(study.plan_both().values())
    assert all(len([run for run in both if run[0] == "both" and run[1] == arm]) == (5 if arm == "on-policy" else 15) for arm in study.BOTH)


def test_periodic_arms_get_the_syncs_of_dlc_with_their_own_seed():
    """80 steps: 5 syncs make a period of 16, 11 one of 8."""
    records = {study.key_04(name, "dlc", seed): {"syncs": (5, 11, 60, 5, 5, 5, 5, 5)[seed]} for name in ("sum", "stop") for seed in range(8)}
    runs = list(study.periodic_04(records).values())
    assert [run[-1] for run in runs if run[:2] == ("sum", "none, periodic")] == [16, 8, 2, 16, 16, 16, 16, 16]
    assert [run[-1] for run in runs if run[:2] == ("stop", "dlc, periodic")] == [12, 6, 1, 12, 12] and len(runs) == 26


# ---------------------------------------------------------------- runs
@pytest.fixture
def small(monkeypatch):
    """Settings of seconds."""
    sum_ = lesson4.Setting(steps=4, period=4, lr=3e-3, prompts=4, every=2)
    monkeypatch.setattr(study, "SETTINGS", {"sum": sum_, "free, raw": replace(
        sum_, lr=0.04, optimizer=torch.optim.SGD, advantage="raw", decay=False)})
    return sum_


def test_a_reference_is_made_once_and_is_lesson_4s(trainer, engine, tokenizer, small, tmp_path, monkeypatch):
    made, want = study.reference_04(trainer, engine, tokenizer, "sum", tmp_path), lesson4.reference_run(
        trainer, engine, tokenizer, small
    )
    monkeypatch.setattr(study, "training_04", None)
    kept = study.reference_04(trainer, engine, tokenizer, "sum", tmp_path)
    for reference in (made, kept):
        assert list(reference) == list(want) == [0, 2]
        for (state, rollout), (right_state, right_rollout) in zip(reference.values(), want.values()):
            assert all(torch.equal(value, state[name]) for name, value in right_state.items())
            assert torch.equal(rollout.ids, right_rollout.ids) and torch.equal(rollout.mask, right_rollout.mask)


def test_a_runs_record_is_lesson_4s_and_more(trainer, engine, tokenizer, small, tmp_path, monkeypatch):
    """The same run in both: curves to three digits, accuracy, syncs, dropped tokens. Positions, ESS of tokens
    and entropy by hand."""
    small = replace(small, lr=1e-2, steps=6)
    monkeypatch.setitem(study.SETTINGS, "sum", small)
    reference = study.reference_04(trainer, engine, tokenizer, "sum", tmp_path)
    batches, models, training = [], [], study.training_04
    monkeypatch.setattr(
        study,
        "training_04",
        lambda model, *a, **k: (models.append(model), (batches.append(b) or b for b in training(model, *a, **k)))[1],
    )
    record = study.run_04(trainer, engine, tokenizer, reference, "sum", "dlc", 7)
    right = lesson4.run(trainer, engine, tokenizer, small, "dlc", 7, reference, **lesson4.ARMS["dlc"])
    for key in ("reward", "mean ratio", "ESS of responses", FRESH, STALE):
        assert record[key] == pytest.approx([step[key] for step in right["steps"] if key in step], rel=5e-3), key
    assert (
        record["checkpoints"] == [0, 2, 4]
        and record["accuracy"] == right["accuracy"]
        and record["syncs"] == sum(step["age"] == 0 for step in right["steps"]) > 1
    )
    assert (
        record["dropped tokens"] == right["dropped tokens"] > 0
        and 0 <= record["greedy accuracy"] <= 1
        and record["seconds"] > 0
    )
    assert record["ESS of tokens"] == pytest.approx([lesson2.ess(b.lag[b.rollout.mask]) for b in batches], rel=5e-3)
    assert record["entropy"] == pytest.approx(study.entropy(models[0], batches[-1].rollout), rel=1e-5)
    # the mean is that of its parts, which are means over the checkpoints
    mask = reference[0][1].mask
    assert (mask.sum(1) <= 9).all() and record[f"{STALE}, early"] >= 0 and record[f"{FRESH}, late"] >= 0
    assert min(record[f"{FRESH}, {part}"] for part in ("early", "late")) <= study.mean_kl(record) * 1.01
    assert record["rms d"] == pytest.approx([lesson3.measure(b)["rms d"] for b in batches], rel=5e-3)


def test_an_on_policy_run_is_judged_on_what_the_start_policy_wrote(trainer, engine, tokenizer, small, tmp_path):
    """Its STALE prefixes are those of the reference's first step: the floor of a sampler that is never synced."""
    reference = study.reference_04(trainer, engine, tokenizer, "sum", tmp_path)
    batch = type("Batch", (), {"rollout": "its own"})
    assert lesson4.stale_prefixes("on-policy", reference, batch) is reference[0][1]
    assert lesson4.stale_prefixes("dlc", reference, batch) == "its own"


def test_the_arguments_of_a_run_reach_lesson_3s_loop(trainer, small, monkeypatch):
    """Noise drawn once per run, by its seed; periods; the free tokens' SGD on that very model, constant rate
    and raw rewards."""
    seen, noises = {}, []
    monkeypatch.setattr(lesson3, "grpo", lambda model, *a, **k: seen.update(k) or iter(()))
    monkeypatch.setattr(lesson3, "parameter_noise", lambda *a: noises.append(a) or "noise")
    for setting, arm, changes in (
        ("sum", "tis", {"period": 2}),
        ("free, raw", "none", {"perturb": lesson3.parameter_noise(0.05, 3)}),
    ):
        list(study.training_04(trainer, None, None, setting, arm, 3, **changes))
        assert seen["seed"] == 3 and seen["prompts"] == 4 and seen["steps"] == 4
        assert seen["optimizer"].param_groups[0]["params"][0] is next(trainer.parameters())
        if setting == "sum":
            assert (
                isinstance(seen["optimizer"], torch.optim.AdamW)
                and seen["period"] == 2
                and seen["advantage"] == "std"
                and seen["decay"] is True
            )
        else:
            assert isinstance(seen["optimizer"], torch.optim.SGD) and seen["optimizer"].param_groups[0]["lr"] == 0.04
            assert seen["advantage"] == "raw" and seen["decay"] is False and seen["perturb"] == "noise"
    with pytest.raises(UnboundLocalError):  # no batch: nothing to record
        study.run_04(trainer, None, None, {}, "sum", "tis", 7, "5% noise")
    assert noises == [(0.05, 3)] and seen["perturb"]({}) == {}


def test_a_study_goes_on_where_it_stopped(tmp_path):
    """Records are kept one per line, and not made again; NaN is null; a torn file is begun anew."""
    path, runs = tmp_path / "new" / "04_study.json", []

    def run(name, value):
        runs.append(name)
        if name == "stop" and len(runs) == 2:
            raise KeyboardInterrupt
        return {"name": name, "value": [value, math.nan]}

    plan = {"a": ("go", 1), "b": ("stop", 2)}
    with pytest.raises(KeyboardInterrupt):
        study.resumable(path, plan, run)
    assert json.loads(path.read_text()) == {"a": {"name": "go", "value": [1, None]}}
    records = study.resumable(path, plan, run)
    assert runs == ["go", "stop", "stop"] and list(records) == ["a", "b"] and len(path.read_text().splitlines()) == 4
    assert study.resumable(path, {"b": ("never", 0)}, run) == {"b": records["b"]} and runs == ["go", "stop", "stop"]
    path.write_text(path.read_text()[:40])
    study.resumable(path, {"c": ("go", 1)}, run)
    assert list(json.loads(path.read_text())) == ["c"]


# ---------------------------------------------------------------- the modeled tail
def test_tail_model_reaches_the_exact_center():
    errors = study.tail_errors("x", *study.peaked(2000, 4, 0), (1, 8, 128, 1000, 1999))
    assert errors[-1]["error, tail modeled"] < 1e-3 < errors[0]["error, tail modeled"]
    for row in errors[:-1]:
        assert row["error, tail modeled"] < row["error, tail dropped"]
    assert [row["mass of the head"] for row in errors] == sorted(row["mass of the head"] for row in errors)


def test_tail_model_takes_pi_old_for_pi_old(trainer, engine, tokenizer, monkeypatch):
    """What it hands on: the trainer's log-probs, those at theta_s, the engine's, at the same tokens."""
    seen = []
    monkeypatch.setattr(study, "tail_errors", lambda *args: seen.append(args) or [])
    study.tail_04(trainer, engine, tokenizer, 0, lesson4.Setting(steps=5, prompts=4))
    (_, logits, old, q, _), (_, large, *_) = seen
    assert logits.shape[1] == 17 and large.shape == (16, 150_000) and (logits.exp().sum(1) - 1).abs().max() < 1e-4
    assert (old - q).abs().max() < 1e-3 < (logits - old).abs().max()  # an fp32 engine holds theta_s


# ---------------------------------------------------------------- what the records say
def test_by_position():
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    values = torch.tensor([[1.0, 1, 1, 1, 4, 6], [3.0, 3, 3, 3, 99, 99]])
    assert study.by_position(values, mask) == {"": 2.6, ", early": 2.0, ", late": 5.0}
    assert math.isnan(study.by_position(values, mask & (torch.arange(6) < 4))[", late"])


def test_entropy(trainer):
    rollout = tests.some_rollout()
    with torch.no_grad():
        p = lesson1.response_logits(trainer, rollout).double().softmax(-1)[rollout.mask]
    assert study.entropy(trainer, rollout) == pytest.approx(-(p * p.log()).sum(-1).mean().item(), abs=1e-4)


def record(arm, fresh, seed=0, **changes):
    return {
        "setting": "sum",
        "arm": arm,
        "seed": seed,
        "engine": "",
        "period": None,
        "accuracy": 0.5,
        "syncs": 2,
        "dropped tokens": 0,
        "seconds": 1.0,
        "checkpoints": [0, 2, 4],
        FRESH: fresh,
        STALE: [x / 10 for x in fresh],
        "reward": [0.1] * 6,
        "ESS of tokens": [1.0] * 6,
        "ESS of responses": [1.0] * 6,
        "mean ratio": [1.0] * 6,
        **changes,
    }


def test_rows_of_the_arms():
    records = [
        record("on-policy", [0.0, 0.1, 0.2]),
        record("on-policy", [0.0, 0.3, 0.6], 1),
        record("none", [0.0, 1.0, 5.0]),
    ]
    rows = {row["arm"]: row for row in study.arm_rows(records)}
    assert study.floor(records) == pytest.approx(0.2)
    assert rows["on-policy"]["KL / floor"] == pytest.approx([0.5, 1.5]) and rows["none"]["KL / floor"] == pytest.approx(
        [10.0]
    )
    assert rows["none"]["on the sampler's prefixes"] == pytest.approx([10.0])
    assert rows["none"]["second half"] == pytest.approx([3.0 / 0.3]) and rows["on-policy"][
        "second half"
    ] == pytest.approx([0.5, 1.5])


def check_constancy(constancy):
    """d grows by half of its mean in one run and shrinks by as much in the other; on the log-odds it grows by 10 % a step in both."""
    up, down = [0.75, 1.0, 1.25], [1.25, 1.0, 0.75]
    odds = [0.9, 1.0, 1.1]
    row, = constancy([record("dlc", [0.0] * 3, seed, **{"rms d": d, "d on log-odds": odds}) for seed, d in enumerate((up, down))])
    assert row["rms d: change, %"] == pytest.approx(0, abs=1e-9) and row["rms d: ±"] == pytest.approx(75)
    assert row["d on log-odds: change, %"] == pytest.approx(30) and row["seeds"] == 2


WRONG_CONSTANCY = {
    "one run only": lambda records: study.constancy(records[:1]),
    "keys swapped": lambda records: study.constancy([{**r, "rms d": r["d on log-odds"], "d on log-odds": r["rms d"]} for r in records]),
    "not relative": lambda records: study.constancy([{**r, "d on log-odds": [x + 1 for x in r["d on log-odds"]]} for r in records]),
}


def test_constancy():
    check_constancy(study.constancy)


@pytest.mark.parametrize("name", WRONG_CONSTANCY)
def test_constancy_rejects(name):
    rejected(check_constancy, WRONG_CONSTANCY[name])


def check_threshold(threshold):
    """Floor .2 on the mean, .5 at the second checkpoint; other arms do not count."""
    records = [
        record("on-policy", [0.0, 0.4, 0.1]),
        record("on-policy", [0.1, 0.6, 0.0], 1),
        record("none", [9.0, 9.0, 9.0]),
    ]
    assert np.allclose(threshold(records), [0.6, 1.5, 0.6]) and np.allclose(
        threshold(records, STALE), [0.06, 0.15, 0.06]
    )


WRONG_THRESHOLD = {
    "the mean alone": lambda records, key=FRESH: np.full(3, 3 * study.floor(records, key)),
    "the checkpoint alone": lambda records, key=FRESH: 3 * np.mean([r[key] for r in records[:2]], 0),
    "of all arms": lambda records, key=FRESH: study.threshold([{**r, "arm": "on-policy"} for r in records], key),
    "always fresh": lambda records, key=FRESH: study.threshold(records),
    "the floor itself": lambda records, key=FRESH: study.threshold(records, key) / 3,
}


def test_threshold_follows_the_floor_where_it_is_high():
    check_threshold(study.threshold)
    assert (
        study.first([0, 2, 4], [0.5, 1.4, 0.7], np.array([0.6, 1.5, 0.6])) == 4
        and study.first([0, 2], [0.1, 0.2], 0.2) is None
    )


@pytest.mark.parametrize("name", WRONG_THRESHOLD)
def test_threshold_rejects(name):
    rejected(check_threshold, WRONG_THRESHOLD[name])


def test_main_runs_leave_the_milder_ones_out():
    runs = [
        record("tis", [0.0]),
        record("tis", [0.0], period=16),
        record("dlc, periodic", [0.0], period=16),
        record("tis", [0.0], setting="stop"),
    ]
    assert study.main_runs(runs, "sum") == [runs[0], runs[2]]


def check_alarms(alarms):
    """Harm at the checkpoint of step 2 or 4; an alarm in the same step is a tie."""
    low = lambda step: [1.0] * step + [0.4] * (6 - step)
    responses, tokens, mean = "ESS of responses", "ESS of tokens", "mean ratio"
    records = [
        record("on-policy", [0.1] * 3),
        record("lag clip", [0.0, 0.4, 0.4], **{responses: low(1)}),
        record("none", [9.0] * 3),
        record("tis", [0.0, 0.2, 0.4], **{responses: low(4)}),
        record("token-is", [0.0, 0.2, 0.2], **{responses: low(5)}),
        record("ppo", [0.0, 9.0, 9.0]),
        record("lag clip", [0.0, 0.1, 0.3], **{tokens: low(3), mean: [0.7] * 6}),
        record("dlc", [9.0] * 3),
        record("dlc, periodic", [9.0] * 3),
    ]
    # other settings have floors of their own, and the free tokens are another question
    records += [
        record("on-policy", [50.0] * 3, setting="stop"),
        record("none", [1.0] * 3, setting="free, raw", **{responses: low(0)}),
    ]
    rows = {row["alarm"]: row for row in alarms(records) if row["task"] == "sum" and row["harm, floors"] == 3}
    responses, tokens = rows["ESS of responses < 1/2"], rows["ESS of tokens < 1/2"]
    counts = [responses[key] for key in ("before", "same step", "later", "quiet", "false", "leads")]
    assert counts == [1, 1, 0, 2, 1, [1, 0]] and rows["mean ratio < 0.8"]["false"] == 1
    assert [tokens[key] for key in ("before", "same step", "later", "quiet", "false")] == [0, 0, 2, 2, 1]
    ten = next(row for row in alarms(records) if (row["task"], row["harm, floors"]) == ("sum", 10))
    assert ten["quiet"] == 4


WRONG_ALARMS = {
    "a tie is late": lambda records: [{**row, "same step": 0, "later": row["later"] + row["same step"]} for row in study.alarms(records)],
    "all arms": lambda records: study.alarms([{**r, "arm": "tis" if r["arm"] in ("ppo", "none") else r["arm"]} for r in records]),
    "one floor for all tasks": lambda records: study.alarms([{**r, "setting": "sum"} for r in records]),
    "false alarms over all runs": lambda records: [{**row, "false": row["false"] + row["before"]} for row in study.alarms(records)],
}


def test_alarms():
    check_alarms(study.alarms)


@pytest.mark.parametrize("name", WRONG_ALARMS)
def test_alarms_rejects(name):
    rejected(check_alarms, WRONG_ALARMS[name])


def check_rank_test(rank_test):
    """Two against two: the lowest sum of ranks comes in 1 of 6 splits; ties share a rank."""
    assert rank_test([1, 2], [3, 4]) == pytest.approx(1 / 6) and rank_test([3, 4], [1, 2]) == 1
    assert rank_test([1, 3], [2, 4]) == pytest.approx(2 / 6) and rank_test([1, 1], [1, 1]) == 1
    assert rank_test([1, 2, 3], [4]) == pytest.approx(1 / 4)


WRONG_RANK = {
    "two-sided": lambda a, b: min(1, 2 * study.rank_test(a, b)), "reversed": lambda a, b: study.rank_test(b, a),
    "ties broken by order": lambda a, b: study.rank_test(a, np.array(b) + 1e-9),
    "strictly lower": lambda a, b: study.rank_test(a, b) - 1 / 6,
}


def test_rank_test():
    check_rank_test(study.rank_test)


@pytest.mark.parametrize("name", WRONG_RANK)
def test_rank_test_rejects(name):
    rejected(check_rank_test, WRONG_RANK[name])


def test_positions():
    base = {f"{FRESH}, early": 0.1, f"{FRESH}, late": 0.6, f"{STALE}, early": 0.1, f"{STALE}, late": 0.1}
    rows = study.positions([record("on-policy", [0.05, 0.05, 0.05], **base), record("tis", [0.0, 0.1, 0.3], **base)])
    assert rows[1][f"{FRESH}, above 0.2"] == [4] and rows[1][f"{STALE}, above 0.2"] == [None]
    assert rows[1][f"{FRESH}, above 3 floors"] == [4] == rows[1][f"{STALE}, above 3 floors"]
    assert rows[1][f"{FRESH}, late"] == [0.6]


# ---------------------------------------------------------------- a released model
def check_normal_share(normal_share):
    """Of d ~ N(0.1, 0.5) and three quarters A > 0: what is above log 1.2 for these, below log 0.8 for the others."""
    rng = torch.Generator().manual_seed(0)
    d = 0.1 + 0.5 * torch.randn(400_000, generator=rng)
    A = torch.where(torch.rand(len(d), generator=rng) < 0.75, 1.0, -1.0)
    clipped = ((A > 0) & (d.exp() > 1.2)) | ((A < 0) & (d.exp() < 0.8))
    assert abs(normal_share(d, A) - clipped.double().mean().item()) < 2e-3
    assert normal_share(d, torch.zeros(len(d))) == 0


WRONG_SHARE = {
    "signs swapped": lambda d, A: study.normal_share(d, -A), "the sampler minus the trainer": lambda d, A: study.normal_share(-d, A),
    "both sides for all": lambda d, A: study.normal_share(d, A) + study.normal_share(d, -A),
    "centered": lambda d, A: study.normal_share(d - d.mean(), A),
}


def test_normal_share():
    check_normal_share(study.normal_share)


@pytest.mark.parametrize("name", WRONG_SHARE)
def test_normal_share_rejects(name):
    rejected(check_normal_share, WRONG_SHARE[name])


@pytest.mark.parametrize("arm, period", [("none", 1), ("dlc", 2)])
def test_a_run_of_the_released_model(arm, period, trainer, engine, engine16, tokenizer, monkeypatch):
    """With the tiny policy in its place: the parts at each sync, what is clipped, what both policies answer."""
    monkeypatch.setattr(study, "ADD", lesson1.SUM)
    monkeypatch.setattr(study, "LAST", 1)
    engines = {torch.bfloat16: engine16, "judge": engine}
    record = study.pretrained(trainer, engines, tokenizer, "fp32 | bf16", arm, period, 0)
    assert record["synced"] == [True, period == 1] and record["mean |lag|"][0] == 0 == record["measured"][0]
    assert (record["mean |lag|"][1] > 0) == (period == 2)
    assert 1e-4 < record["mean |arithmetic|"][0] < 2e-2 and record["mean |cast|"][0] > 0       # it is not on the bf16 grid
    assert record["clipped"][0] == 0 == record["clipped, predicted"][0]
    assert {policy: set(said) for policy, said in record["answers"].items()} == {
        policy: {"sampled", "greedy"} for policy in ("trainer", "as the engine holds it")}


def test_the_plan_of_the_released_model():
    plan = study.plan_pretrained()
    assert len(plan) == 30 and {run[0] for run in plan.values()} == set(lesson3.CONTRACTS)
    with pytest.raises(SystemExit):
        study.main(["pretrained"])
    with pytest.raises(SystemExit):
        study.main(["04", "some/model"])


# ---------------------------------------------------------------- pictures and tables
def test_the_pictures_and_tables_of_lesson_4_are_made_from_the_records(tmp_path):
    draw = import_module("draw")
    for name, source in (("04_dlc", "04_dlc"), ("04_study", "04_study"), ("first", "04_study")):
        path = tmp_path / f"{source}.json"
        path.write_text((lesson1.ROOT / "figures" / path.name).read_text())
        draw.draw(path, name)
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000 and draw.SOURCES[name] == source
    tables = {
        name: draw.TABLES[name]().splitlines()
        for name in ("arms-sum", "arms-stop", "arms-short", "positions", "free", "alarms", "tail")
    }
    records = draw.records_04()
    arms = {setting: list(dict.fromkeys(r["arm"] for r in study.main_runs(records, setting))) for setting in ("sum", "stop")}
    for name, rows in (("arms-sum", len(arms["sum"])), ("arms-stop", len(arms["stop"])), ("alarms", 24), ("tail", 12),
                       ("arms-short", len([arm for arm in arms["sum"] if arm in study.MAIN_04]))):
        assert len(tables[name]) - 2 == rows, name
    accuracy = [r["accuracy"] for r in study.main_runs(records, "sum") if r["arm"] == "dlc"]
    line, = [line for line in tables["arms-sum"] if line.startswith("| dlc |")]
    assert line.split(" | ")[1].split() == [f"{x:.2f}".removeprefix("0") for x in accuracy]
    assert all(len({line.replace("\\|", "").count("|") for line in lines}) == 1 for lines in tables.values())
