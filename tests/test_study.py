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
def expected_arm(name, batch):
    """What each arm's loss is, written out."""
    lag, total = (batch.logp - batch.logp_old).detach(), (batch.logp - batch.rollout.logp_sampler).detach()
    r, rho = lag.exp(), total.exp()
    product = torch.where(MASK, total, 0.0).sum(1, keepdim=True).exp()
    weight = {
        "tis": rho.clamp(max=2),
        "seq-mis": (product * (product <= 2)).expand_as(r),
        "ppo": tests.ppo(lag, A),
        "dlc, ppo rule": tests.ppo(lag, A),
        **{name: torch.ones_like(r) for name in ("on-policy", "none", "centering")},
    }.get(name, r.clamp(max=2))
    f = {"centering": tests.unweighted, "dlc, ppo rule": tests.ppo}.get(name, tests.at_most_two)
    centered = name in ("dlc", "dlc, no resync", "dlc, ppo rule", "dlc, periodic", "centering")
    c = tests.right_center(batch.head_logp, batch.head_logp_old, batch.rollout.head_logp, A, V, f) if centered else 0.0
    return lesson2.policy_loss(batch.logp, weight, A, MASK, int(MASK.sum()), c)


@pytest.mark.parametrize("name", study.ARMS_04)
def test_every_arm_is_what_its_name_says(name):
    refuse = {"dlc", "lag clip + resync", "dlc, ppo rule"}
    centered = {"dlc", "dlc, no resync", "dlc, ppo rule", "dlc, periodic", "centering"}
    assert study.RESYNCED == refuse and study.MAIN_04 == ["on-policy", "none", "tis", "dlc, no resync", "dlc"]
    assert (study.ARMS_04[name].get("head", 0) == lesson4.HEAD) == (name in centered)
    seen = {True: 0, False: 0}
    for seed in range(8):
        logits, _, _ = tests.distributions(seed=seed)
        _, old, q = tests.distributions(1.2, seed=seed + 100)
        a = torch.randint(0, V, MASK.shape, generator=torch.Generator().manual_seed(seed))
        x = logits.clone().requires_grad_()
        batch = tests.make_batch(x, old, q, a)
        value = study.ARMS_04[name]["loss"](batch)
        refused = name in refuse and tests.right_ess(batch.lag, MASK) < 0.5
        seen[refused] += 1
        assert (value is None) == refused
        if not refused:
            got, want = (
                torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in (value, expected_arm(name, batch))
            )
            tests.close(got, want, name)
    assert seen[False] and (seen[True] or name not in refuse)


def test_the_plan_is_the_one_of_the_records():
    """165 runs and the tail; figures/04_study.json holds them all, under these keys; nothing would be run again."""
    records = json.loads((lesson1.ROOT / "figures" / "04_study.json").read_text())
    plan = study.plan_04()
    plan |= study.periodic_04(records)
    assert len(plan) == 165 and set(records) == {"tail", *plan}
    for key, run in plan.items():
        record = records[key]
        assert (record["setting"], record["arm"], record["seed"], record["noise"], record["period"]) == (
            *run,
            *(0.0, None)[len(run) - 3 :],
        )
    assert sum(run[0] == "sum" for run in plan.values()) == 5 * 5 + 7 * 3 + 8


def test_periodic_arms_get_the_syncs_of_dlc_with_their_own_seed():
    """80 steps: 5 syncs make a period of 16, 11 one of 8."""
    records = {
        study.key_04(name, "dlc", seed): {"syncs": syncs}
        for name in ("sum", "stop")
        for seed, syncs in enumerate((5, 11, 60))
    }
    runs = list(study.periodic_04(records).values())
    assert [run[-1] for run in runs] == [16, 8, 2, 12, 6, 1] and {run[1] for run in runs} == {"dlc, periodic"}


# ---------------------------------------------------------------- runs
@pytest.fixture
def small(monkeypatch):
    """Settings of seconds."""
    sum_ = lesson4.Setting(steps=4, period=4, lr=3e-3, prompts=4)
    monkeypatch.setattr(study, "SETTINGS", {"sum": sum_, "free, raw": replace(sum_, task=lesson1.SUM, lr=0.04)})
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
    """The same run in both: curves to four digits, accuracy, syncs, dropped tokens. Positions, ESS of tokens
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
        assert record[key] == pytest.approx([step[key] for step in right["steps"] if key in step], rel=1e-3), key
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
    assert record["ESS of tokens"] == pytest.approx([lesson2.ess(b.lag[b.rollout.mask]) for b in batches], rel=1e-3)
    assert record["entropy"] == pytest.approx(study.entropy(models[0], batches[-1].rollout), rel=1e-5)
    for k in (2, 4):  # the mean is that of its parts
        n = reference[k][1].mask[:, :4].sum().item(), reference[k][1].mask[:, 4:].sum().item()
        parts = [record[f"{FRESH}, {part}"][k // 2] for part in ("early", "late")]
        assert record[FRESH][k // 2] == pytest.approx(np.average(parts, weights=n), rel=2e-3)


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
                and seen.get("advantage", "std") == "std"
                and seen.get("decay", True)
            )
        else:
            assert isinstance(seen["optimizer"], torch.optim.SGD) and seen["optimizer"].param_groups[0]["lr"] == 0.04
            assert seen["advantage"] == "raw" and seen["decay"] is False and seen["perturb"] == "noise"
    with pytest.raises(UnboundLocalError):  # no batch: nothing to record
        study.run_04(trainer, None, None, {}, "sum", "tis", 7, 0.05)
    assert noises == [(0.05, 3), (0.05, 7)]


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
        "noise": 0.0,
        "period": None,
        "accuracy": 0.5,
        "syncs": 2,
        "dropped tokens": 0,
        "seconds": 1.0,
        "checkpoints": [0, 2, 4],
        FRESH: fresh,
        STALE: [x / 10 for x in fresh],
        f"{FRESH}, late": [None, *fresh[1:]],
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
    assert study.floor(records) == pytest.approx(0.2) and study.mean_kl(records[0], f"{FRESH}, late") == pytest.approx(
        0.15
    )
    assert rows["on-policy"]["KL / floor"] == pytest.approx([0.5, 1.5]) and rows["none"]["KL / floor"] == pytest.approx(
        [10.0]
    )
    assert rows["none"]["on the sampler's prefixes"] == pytest.approx([10.0])
    assert rows["none"]["second half"] == pytest.approx([3.0 / 0.3]) and rows["on-policy"][
        "second half"
    ] == pytest.approx([0.5, 1.5])


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


def test_alarms():
    """Harm at the checkpoint of step 2 or 4; an alarm in the same step is late."""
    low = lambda step: [1.0] * step + [0.4] * (6 - step)
    responses, tokens, mean = "ESS of responses", "ESS of tokens", "mean ratio"
    records = [
        record("on-policy", [0.1] * 3),
        record("none", [0.0, 0.4, 0.4], **{responses: low(1)}),
        record("tis", [0.0, 0.2, 0.4], **{responses: low(4)}),
        record("ppo", [0.0, 0.2, 0.2], **{responses: low(5)}),
        record("lag clip", [0.0, 0.1, 0.3], **{tokens: low(3), mean: [0.7] * 6}),
        record("dlc", [9.0] * 3),
        record("dlc, periodic", [9.0] * 3),
    ]
    # other settings have floors of their own, and the free tokens are another question
    records += [
        record("on-policy", [50.0] * 3, setting="stop"),
        record("none", [1.0] * 3, setting="free, raw", **{responses: low(0)}),
    ]
    rows = {row["alarm"]: row for row in study.alarms(records)}
    sequence, token, mass = rows["ESS of responses < 1/2"], rows["ESS of tokens < 1/2"], rows["mean ratio < 0.8"]
    assert (sequence["before"], sequence["late"], sequence["quiet"], sequence["false"], sequence["leads"]) == (
        1,
        1,
        2,
        1,
        [1],
    )
    assert (token["before"], token["false"]) == (0, 1) and (mass["before"], mass["false"]) == (0, 1)
    assert rows["ESS of responses x min(1, mean ratio) < 1/2"]["before"] == 1


def test_positions():
    base = {
        f"{FRESH}, early": [0.1] * 3,
        f"{FRESH}, late": [None, 0.5, 0.7],
        f"{STALE}, early": [0.1] * 3,
        f"{STALE}, late": [None, None, 0.1],
    }
    rows = study.positions([record("on-policy", [0.05, 0.05, 0.05], **base), record("tis", [0.0, 0.1, 0.3], **base)])
    assert rows[1][f"{FRESH}, above 0.2"] == [4] and rows[1][f"{STALE}, above 0.2"] == [None]
    assert rows[1][f"{FRESH}, above 3 floors"] == [4] == rows[1][f"{STALE}, above 3 floors"] and rows[1][
        f"{FRESH}, late"
    ] == [pytest.approx(0.6)]


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
    assert {name: len(lines) - 2 for name, lines in tables.items()} == {
        "arms-sum": 12,
        "arms-stop": 12,
        "arms-short": 7,
        "positions": 8,
        "free": 9,
        "alarms": 4,
        "tail": 12,
    }
    assert "| dlc | .96 .97 .97 .96 .96 | .9 2.1 1.2 4.7 1.1 |" in "\n".join(tables["arms-sum"])
    assert all(len({line.replace("\\|", "").count("|") for line in lines}) == 1 for lines in tables.values())
