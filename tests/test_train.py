"""train.py on the shared engine: the loop, its record, and everything that may go wrong."""
import copy
import csv
import errno
import json
import math
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from conftest import lesson1, rejected

train = import_module("train")
SMALL = ["--steps", "2", "--prompts", "4", "--group-size", "4"]


def run(out, engine, *extra):
    """A small run; its rows as dicts of strings."""
    train.main([*SMALL, "--out", str(out), *extra], engine)
    return read(out)


def read(out):
    with (out / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def untimed(rows):
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


def test_same_seed_same_csv(tmp_path, engine):
    one, two = run(tmp_path / "a", engine), run(tmp_path / "b", engine)
    assert untimed(one) == untimed(two) and len(one) == 2
    other = run(tmp_path / "c", engine, "--seed", "1")
    assert untimed(one) != untimed(other)


def test_lag_is_exactly_zero_at_a_sync_and_not_after(tmp_path, engine):
    rows = run(tmp_path / "a", engine, "--steps", "4", "--staleness", "1")
    assert [row["age"] for row in rows] == ["0", "1", "0", "1"]
    assert [float(row["lag_abs"]) == 0 for row in rows] == [True, False, True, False]
    assert all(float(row["discrepancy_abs"]) < 1e-5 for row in rows)          # an fp32 engine: the discrepancy is not lag
    assert float(rows[1]["lag_abs"]) > 1e-3


def test_on_policy_lag_is_zero_at_every_step(tmp_path, engine):
    assert all(float(row["lag_abs"]) == 0 and row["age"] == "0" for row in run(tmp_path / "a", engine))


@pytest.mark.parametrize("name", list(train.CORRECTIONS))
def test_two_steps_of_every_correction(name, tmp_path, engine):
    rows = run(tmp_path / "a", engine, "--staleness", "1", "--correction", name)
    assert len(rows) == 2 and all(torch.isfinite(torch.tensor([float(v) for v in row.values()])).all() for row in rows)
    assert abs(float(rows[0]["weight"]) - 1) < 1e-4                            # an fp32 engine at age 0


def test_the_correction_reaches_the_loss(tmp_path, engine):
    none = run(tmp_path / "none", engine, "--steps", "4", "--staleness", "3")
    tis = run(tmp_path / "tis", engine, "--steps", "4", "--staleness", "3", "--correction", "tis")
    assert all(float(row["weight"]) == 1 for row in none) and float(tis[-1]["weight"]) != 1
    assert untimed(none)[0]["loss"] == untimed(tis)[0]["loss"] and untimed(none)[-1]["loss"] != untimed(tis)[-1]["loss"]


@pytest.fixture
def uneven(trainer, tokenizer, tmp_path):
    """A checkpoint whose responses are of many lengths: it takes a 5 for the end as often as not."""
    with torch.no_grad():
        weight = trainer.model.embed_tokens.weight
        weight[lesson1.END] += 1.5 * weight[5]
    trainer.save_pretrained(tmp_path / "uneven")
    tokenizer.save_pretrained(tmp_path / "uneven")
    return tmp_path / "uneven"


def spy(monkeypatch, engine):
    """Records what the run samples: (prompts, keyword arguments, rollout) of each call."""
    calls, sample = [], engine.sample

    def recorded(prompts, max_tokens, seed, **kwargs):
        rollout = sample(prompts, max_tokens, seed, **kwargs)
        calls.append((prompts, {"seed": seed, **kwargs}, rollout))
        return rollout
    monkeypatch.setattr(engine, "sample", recorded)
    return calls


def is_training(call):
    return "group_size" in call[1]


def test_the_gradient_of_a_step_is_the_formula(tmp_path, engine, uneven, monkeypatch):
    """One step against an independent gradient of -sum A log pi / N, before clipping: the CSV's norm."""
    calls = spy(monkeypatch, engine)
    row = run(tmp_path / "a", engine, "--steps", "1", "--advantage", "std", "--model", str(uneven))[0]
    rollout, model = next(filter(is_training, calls))[2], lesson1.load_model(uneven)
    lengths = rollout.mask.sum(1)
    assert len(set(lengths.tolist())) > 2
    texts = ["".join(lesson1.CHARACTERS[i] for i in ids[m].tolist()) for ids, m in zip(rollout.ids, rollout.mask)]
    sums = [sum(p[:8].tolist()) % 10 for p in rollout.prompt_ids]
    R = torch.tensor([float(t.endswith(".") and "".join(c for c in t if c.isdigit())[-1:] == str(s)) for t, s in zip(texts, sums)])
    R = R.view(4, 4)
    A = torch.where(R.std(1, keepdim=True) > 0, (R - R.mean(1, keepdim=True)) / R.std(1, correction=0, keepdim=True).clamp(min=1e-9), 0.0).flatten()
    assert A.abs().sum() > 0
    N, loss = int(lengths.sum()), 0
    for ids, m, prompt, a in zip(rollout.ids, rollout.mask, rollout.prompt_ids, A):
        text = torch.cat([prompt, ids[m]])
        logp = torch.log_softmax(model(input_ids=text[None]).logits[0], -1)
        loss = loss - a * sum(logp[t - 1, text[t]] for t in range(9, len(text))) / N
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters())).item()
    assert abs(float(row["grad_norm"]) / norm - 1) < 1e-4 and abs(float(row["loss"]) - loss.item()) < 1e-6
    assert abs(float(row["reward"]) - R.mean().item()) < 1e-6 and int(row["tokens"]) == N
    assert abs(float(row["length"]) - N / 16) < 1e-9 and abs(float(row["truncated"]) - rollout.finish_reasons.count("length") / 16) < 1e-9


@pytest.mark.parametrize("correction", [["snis"], ["dlc", "--head", "6"]], ids=lambda c: c[0])
def test_micro_batches_make_the_same_run(correction, tmp_path, engine, uneven, monkeypatch):
    """One micro-batch or many, responses of many lengths, stale weights, a weight of the whole batch: the same CSV."""
    flags = ["--steps", "3", "--staleness", "2", "--model", str(uneven), "--correction", *correction]
    whole = run(tmp_path / "a", engine, *flags)
    monkeypatch.setattr(lesson1, "LOGITS_AT_ONCE", 3 * 10 * 17)
    parts = run(tmp_path / "b", engine, *flags)
    for one, two in zip(untimed(whole), untimed(parts), strict=True):
        for name in one:
            assert abs(float(one[name]) - float(two[name])) < 1e-4 * max(1, abs(float(one[name]))), name


@pytest.mark.parametrize("correction", [["tis"], ["dlc"], ["dlc", "--head", "6"]], ids=" ".join)
def test_micro_batches_of_any_size_have_one_gradient(correction, tmp_path, engine, uneven, monkeypatch):
    """Before clipping, in float32, at age 0: equal to 1e-6 of its norm; at age 1, after an update: to 1e-5."""
    gradients, clip = {}, torch.nn.utils.clip_grad_norm_
    for size in (1, 3, 5, 16):
        seen = gradients.setdefault(size, [])

        def seen_and_clipped(parameters, limit):
            parameters = list(parameters)
            seen.append(torch.cat([p.grad.flatten() for p in parameters]))
            return clip(parameters, limit)
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", seen_and_clipped)
        monkeypatch.setattr(lesson1, "LOGITS_AT_ONCE", size * 10 * 17 if size < 16 else 2**27)
        run(tmp_path / str(size), engine, "--steps", "2", "--staleness", "1", "--lr", "1e-4", "--model", str(uneven), "--correction", *correction)
    for step, tolerance in ((0, 1e-6), (1, 1e-5)):
        whole = gradients[16][step]
        assert whole.norm() > 1e-2
        for size in (1, 3, 5):
            assert (gradients[size][step] - whole).norm() < tolerance * whole.norm(), (size, step)


def test_the_correction_gets_the_three_policies(tmp_path, engine, uneven, monkeypatch):
    """What reaches a weight: mu as the engine recorded it, pi at its weights, pi now."""
    seen, sampled = [], spy(monkeypatch, engine)
    tis = train.lesson2.CORRECTIONS["tis"]
    monkeypatch.setitem(train.CORRECTIONS, "tis", lambda *args: seen.append(args) or tis(*args))
    rows = run(tmp_path / "a", engine, "--staleness", "1", "--correction", "tis", "--model", str(uneven), "--steps", "2")
    start = lesson1.load_model(uneven)
    for (logp, old, mu, A, mask), (_, _, rollout), row in zip(seen, filter(is_training, sampled), rows, strict=True):
        assert torch.equal(mu, rollout.logp_sampler) and torch.equal(mask, rollout.mask)
        assert (old - lesson1.score(start, rollout)).abs().max() < 1e-6             # at both steps: the sampler kept its weights
        assert abs(float(row["weight"]) - tis(logp, old, mu, A, mask)[mask].mean().item()) < 1e-6
        lag = (logp - old)[mask]
        assert abs(float(row["lag_abs"]) - lag.abs().mean().item()) < 1e-6 and abs(float(row["lag_rms"]) - lag.square().mean().sqrt().item()) < 1e-6
    assert torch.equal(seen[0][0], seen[0][1]) and (seen[1][0] - seen[1][1])[seen[1][4]].abs().max() > 1e-3


STALE = ["--steps", "8", "--prompts", "8", "--staleness", "7", "--lr", "3e-3"]


def test_dlc_is_the_run_of_lesson_4(tmp_path, engine, trainer, tokenizer):
    """Two loops, written independently, one training: rewards, lags, and when the batch was refused."""
    lesson4 = train.lesson4
    rows = run(tmp_path / "a", engine, *STALE, "--correction", "dlc")
    setting = lesson4.Setting("sum", steps=8, period=8, lr=3e-3, prompts=8)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-3, weight_decay=0.0)
    batches = lesson4.lesson3.grpo(trainer, engine, lesson1.TASKS["sum"], tokenizer, optimizer, lesson4.ARMS["dlc"], 8, 8, seed=0,
                                   prompts=setting.prompts, group_size=4, head=setting.head)
    for batch, row in zip(batches, rows, strict=True):
        assert abs(batch.R.mean().item() - float(row["reward"])) < 1e-6
        assert batch.age == int(row["age"]) and batch.dropped == int(row["dropped_tokens"])
        assert abs(batch.lag[batch.rollout.mask].abs().mean().item() - float(row["lag_abs"])) < 1e-5
    resynced = [row for row in rows if row["resynced"] == "1"]
    assert 0 < len(resynced) < 8
    for row in rows:
        assert (float(row["ess_sequence"]) < 0.5) == (row in resynced) and (float(row["dropped_seconds"]) > 0) == (row in resynced)
        assert row not in resynced or (row["age"] == "0" and float(row["lag_abs"]) == 0)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["syncs"] == 1 + len(resynced)


def test_dlc_differs_from_the_lag_clip_by_its_centre_and_uses_the_head_it_is_told(tmp_path, engine, monkeypatch):
    """One update at age 1: the whole vocabulary, a head of 4, no centre at all; the ESS rule switched off."""
    off = ["--staleness", "1", "--steps", "3", "--resync-ess", "0", "--correction", "dlc"]
    whole, small = run(tmp_path / "whole", engine, *off), run(tmp_path / "small", engine, *off, "--head", "4")
    monkeypatch.setattr(train.lesson4, "centre", lambda *a: 0.0)
    none = run(tmp_path / "none", engine, *off)
    assert {row["resynced"] for row in whole + small + none} == {"0"}
    norms = [float(rows[1]["grad_norm"]) for rows in (whole, small, none)]
    assert len(set(norms)) == 3 and abs(norms[0] - norms[1]) < abs(norms[0] - norms[2])


def test_replay_is_refused_for_a_dense_model(tmp_path, tiny, capsys, monkeypatch):
    monkeypatch.setattr(lesson1, "Sampler", lambda *a, **k: pytest.fail("vLLM was started"))
    with pytest.raises(SystemExit) as exit:
        train.main(["--model", str(tiny), "--replay", "r3", "--out", str(tmp_path / "a")])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and "no router" in error


def test_replay_reaches_both_policies_and_every_micro_batch(tmp_path, mixture, mixture_engine, monkeypatch):
    """A mixture of experts, stale by one step: what each kind of replay does to discrepancy and lag; and in parts as in one."""
    flags = ["--model", str(mixture), "--staleness", "1", "--steps", "4"]
    live, r2, r3 = (run(tmp_path / kind, mixture_engine, *flags, "--replay", kind) for kind in ("none", "r2", "r3"))
    lags = [float(rows[1]["lag_abs"]) for rows in (live, r2, r3)]
    assert len(set(lags)) >= 2 and all(abs(a - lags[0]) > 1e-4 for a in lags[1:])             # the same first update: the picks differ
    assert live[0]["loss"] == r2[0]["loss"] and all(float(row["discrepancy_abs"]) < 1e-4 for row in r2 + r3)
    monkeypatch.setattr(lesson1, "LOGITS_AT_ONCE", 3 * 10 * 17)
    for kind, whole in (("r2", r2), ("r3", r3)):
        for one, two in zip(untimed(whole), untimed(run(tmp_path / f"{kind}-parts", mixture_engine, *flags, "--replay", kind)), strict=True):
            for name in ("reward", "lag_abs", "grad_norm", "loss"):
                assert abs(float(one[name]) - float(two[name])) < 1e-3 * max(1, abs(float(one[name]))), (kind, name)


def test_any_correction_can_be_resynchronised_at_either_level(tmp_path, engine):
    token = run(tmp_path / "token", engine, *STALE, "--correction", "tis", "--resync-ess", "0.9", "--resync-level", "token")
    never = run(tmp_path / "never", engine, *STALE, "--correction", "tis")
    assert any(row["resynced"] == "1" for row in token) and not any(row["resynced"] == "1" for row in never)
    assert all((row["resynced"] == "1") == (float(row["ess_token"]) < 0.9) for row in token)
    assert min(float(row["ess_sequence"]) for row in never) < 0.5


def test_prompts_and_seeds_are_new_at_every_step_and_held_out_prompts_are_not_trained_on(tmp_path, engine, monkeypatch):
    calls = spy(monkeypatch, engine)
    run(tmp_path / "a", engine, "--steps", "3")
    run(tmp_path / "b", engine, "--steps", "3", "--seed", "1")
    training, held_out = [c for c in calls if is_training(c)], [c for c in calls if not is_training(c)]
    prompts = [tuple(p) for c in training for p in c[0]]
    assert len(set(prompts)) == len(prompts) == 2 * 3 * 4
    assert len({str(c[1]["seed"]) for c in training}) == 6
    assert all(c[1]["group_size"] == 4 for c in training)
    evaluated = {tuple(p) for c in held_out for p in c[0]}
    assert not evaluated & set(prompts) and len(evaluated) == 32
    assert [c[1]["temperature"] for c in held_out] == [0.0, 1.0] * 4


def test_accuracy_is_measured_before_and_after_with_the_weights_of_each(tmp_path, engine, tiny, monkeypatch):
    calls = spy(monkeypatch, engine)
    run(tmp_path / "a", engine, "--lr", "3e-2", "--steps", "3", "--staleness", "2", "--save-every", "3")      # a rate that ruins it
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    held_out = [c for c in calls if not is_training(c)]
    models = lesson1.load_model(tiny), lesson1.load_model(tmp_path / "a" / "checkpoint-3")
    for name, (greedy, sampled), model in zip(("before", "after"), (held_out[:2], held_out[2:]), models):
        assert (lesson1.score(model, sampled[2]) - sampled[2].logp_sampler).abs().max() < 1e-4              # those weights sampled
        for key, (prompts, _, rollout) in (("greedy", greedy), ("sampled", sampled)):
            right = [text.endswith(".") and text[:-1][-1:] == str(sum(p[:8]) % 10) for p, text in zip(
                prompts, ["".join(lesson1.CHARACTERS[i] for i in ids[m].tolist()) for ids, m in zip(rollout.ids, rollout.mask)])]
            assert abs(summary[name][key] - sum(right) / 32) < 1e-6
    assert summary["before"]["greedy"] > 0.9 and summary["after"]["sampled"] != summary["before"]["sampled"]


def test_learning_rate_falls_linearly_and_is_the_step_that_is_taken(tmp_path, engine, tiny):
    rows = run(tmp_path / "a", engine, "--steps", "4", "--lr", "1e-3", "--save-every", "1")
    assert [float(row["lr"]) for row in rows] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    rows = run(tmp_path / "b", engine, "--steps", "1", "--lr", "1e-3")
    after, before = lesson1.load_model(tmp_path / "b" / "checkpoint-1"), lesson1.load_model(tiny)
    step = max((a - b).abs().max().item() for a, b in zip(after.parameters(), before.parameters()))
    assert abs(step - 1e-3) < 1e-5                                             # AdamW's first step is the learning rate, in every coordinate


def test_a_sampler_that_changed_behind_the_loops_back_is_noticed(tmp_path, engine, monkeypatch):
    sample = engine.sample

    def behind(*args, **kwargs):
        engine.version += 1
        return sample(*args, **kwargs)
    monkeypatch.setattr(engine, "sample", behind)
    with pytest.raises(AssertionError):
        run(tmp_path / "a", engine)


def test_equal_rewards_give_a_step_without_gradient_and_say_so(tmp_path, engine, tiny, monkeypatch, capsys):
    monkeypatch.setattr(lesson1, "rewards", lambda task, digits, rollout, tokenizer: torch.full((len(rollout),), 0.1))
    rows = run(tmp_path / "a", engine)
    assert all(float(row["grad_norm"]) == 0 and float(row["loss"]) == 0 for row in rows)
    assert "no gradient" in capsys.readouterr().out
    after, before = lesson1.load_model(tmp_path / "a" / "checkpoint-2"), lesson1.load_model(tiny)
    assert all(torch.equal(a, b) for a, b in zip(after.parameters(), before.parameters()))


def test_truncated_responses_are_counted_and_reported(tmp_path, engine, capsys):
    rows = run(tmp_path / "a", engine, "--max-tokens", "3")
    assert all(float(row["truncated"]) > 0.9 and float(row["reward"]) == 0 for row in rows)
    assert "raise --max-tokens" in capsys.readouterr().out


def test_sampling_that_is_not_neutral_is_refused(tmp_path, engine, monkeypatch):
    sample = engine.sample
    monkeypatch.setattr(engine, "sample", lambda *a, **k: sample(*a, **{**k, "temperature": 0.9}))
    with pytest.raises(AssertionError, match="not the distribution"):
        run(tmp_path / "a", engine)


# ---------------------------------------------------------------- what a run leaves behind
def test_checkpoints_load_everywhere_and_the_newest_two_stay(tmp_path, engine, capsys):
    run(tmp_path / "a", engine, "--steps", "3", "--save-every", "1")
    assert sorted(p.name for p in tmp_path.joinpath("a").iterdir()) == ["checkpoint-2", "checkpoint-3", "metrics.csv", "run.json", "summary.json", "train.png"]
    model = lesson1.load_model(tmp_path / "a" / "checkpoint-3")
    engine.sync(model)
    path = lesson1.find_model(str(tmp_path / "a" / "checkpoint-3"))
    rollout = lesson1.Sampler(path, "float32").sample([[1, 2, 3, 10]], 9, seed=0, group_size=8)      # vLLM loads it as it is
    assert torch.equal(rollout.ids, engine.sample([[1, 2, 3, 10]], 9, seed=0, group_size=8).ids)
    assert (lesson1.score(model, rollout) - rollout.logp_sampler).abs().max() < 1e-5
    out = capsys.readouterr().out
    assert "held-out accuracy, 32 prompts: greedy" in out and "all the rest" in out


def test_checkpoints_are_ordered_by_number_and_appear_whole(tmp_path, trainer, tokenizer, monkeypatch):
    for step in (8, 9, 10, 11):
        train.save_checkpoint(trainer, trainer.state_dict(), tokenizer, {}, tmp_path, step)
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-10", "checkpoint-11"}
    monkeypatch.setattr(tokenizer.__class__, "save_pretrained", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError):
        train.save_checkpoint(trainer, trainer.state_dict(), tokenizer, {}, tmp_path, 12)
    assert not (tmp_path / "checkpoint-12").exists() and (tmp_path / "checkpoint-10").exists()


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path, monkeypatch):
    path, row = tmp_path / "metrics.csv", dict.fromkeys(train.COLUMNS, 1)
    train.append_row(path, row)
    before = path.read_text()
    assert before.splitlines() == [",".join(train.COLUMNS), ",".join("1" * len(train.COLUMNS))]
    monkeypatch.setattr(train.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError):
        train.append_row(path, row)
    assert path.read_text() == before


def test_a_full_disk_ends_the_run_in_one_line(tmp_path, engine, monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(train, "save_checkpoint", full)
    with pytest.raises(SystemExit) as exit:
        run(tmp_path / "a", engine)
    error = capsys.readouterr().err
    assert exit.value.code == 1 and error.count("\n") == 1 and "No space left" in error
    assert len(read(tmp_path / "a")) == 2


@pytest.mark.parametrize("cleans_up_badly", [False, True])
def test_an_interrupted_run_keeps_what_it_had(cleans_up_badly, tmp_path, engine, monkeypatch, capsys):
    calls, sample = [], engine.sample

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:                       # two evaluations, two steps, then Ctrl-C
            try:
                raise KeyboardInterrupt
            finally:
                if cleans_up_badly:               # seen: an UnboundLocalError from a `finally` of vLLM
                    raise UnboundLocalError("tok")
        return sample(*args, **kwargs)
    monkeypatch.setattr(engine, "sample", interrupted)
    with pytest.raises(SystemExit) as exit:
        run(tmp_path / "a", engine, "--steps", "9", "--save-every", "1")
    assert exit.value.code == 130 and len(read(tmp_path / "a")) == 2
    assert "holds 2 steps in metrics.csv and checkpoint-1, checkpoint-2" in capsys.readouterr().err
    lesson1.load_model(tmp_path / "a" / "checkpoint-2")
    assert not list(tmp_path.glob("a/*.tmp"))


def test_an_error_of_another_kind_is_not_hidden(tmp_path, engine, monkeypatch):
    monkeypatch.setattr(engine, "sample", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "a", engine)


# ---------------------------------------------------------------- resuming
class Killed(BaseException):
    """Stands for kill -9: nothing of the run's own clean-up happens after it."""


RESUMED = ["--steps", "7", "--staleness", "3", "--lr", "3e-3", "--correction", "dlc", "--save-every", "2"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, engine):
    return untimed(run(tmp_path_factory.mktemp("whole") / "a", engine, *RESUMED))


def interrupt(monkeypatch, where, call):
    """Kills the run at the given call of a function of train.py, lesson 1 or shutil, before or half-way through."""
    owner, name = where
    real, calls = getattr(owner, name), []

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise Killed
        return real(*args, **kwargs)
    monkeypatch.setattr(owner, name, killed)


@pytest.mark.parametrize("where, call", [((train, "append_row"), 1), ((train, "append_row"), 4), ((train, "append_row"), 6), ((train, "save_checkpoint"), 2), ((train.torch, "save"), 1),
                                         ((train.torch, "save"), 3), ((train.os, "replace"), 4), ((train.shutil, "rmtree"), 4), ((train, "draw"), 1)],
                         ids=lambda x: x[1] if isinstance(x, tuple) else str(x))
def test_a_killed_run_resumes_bit_for_bit(where, call, uninterrupted, tmp_path, engine, monkeypatch):
    """Before a row, between two parts of a checkpoint, while old ones are deleted: the CSV is that of the uninterrupted run."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, where, call)
        run(tmp_path / "a", engine, *RESUMED)
    train.main(["--resume", str(tmp_path / "a")], engine)
    assert untimed(read(tmp_path / "a")) == uninterrupted
    assert not list(tmp_path.glob("a/*.tmp")) or where[1] in ("save", "rmtree", "replace")
    assert (tmp_path / "a" / "checkpoint-7" / "state.pt").exists() and (tmp_path / "a" / "summary.json").exists()


def check_resume(uninterrupted, tmp_path, engine):
    """Killed before row 5, with weights of the sampler one step old at the checkpoint; resumed from step 4."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, (train, "append_row"), 6)
        run(tmp_path, engine, *RESUMED)
    train.main(["--resume", str(tmp_path)], engine)
    assert untimed(read(tmp_path)) == uninterrupted


@pytest.mark.parametrize("lost", ["optimizer", "schedule", "old", "synced"])
def test_resume_rejects_a_forgotten_part(lost, uninterrupted, tmp_path, engine, monkeypatch):
    check_resume(uninterrupted, tmp_path / "right", engine)
    load = torch.load

    def forgetful(path, **kwargs):
        state = load(path, **kwargs)
        if lost == "optimizer":
            for entry in state["optimizer"]["state"].values():
                entry["exp_avg"].zero_()
        elif lost == "schedule":
            state["schedule"].update(last_epoch=0, _step_count=1)
        elif lost == "old":
            state["old"] = {k: v * 1.01 for k, v in state["old"].items()}
        else:
            state["synced"] = 4
        return state
    monkeypatch.setattr(train.torch, "load", forgetful)
    rejected(lambda _: check_resume(uninterrupted, tmp_path / "wrong", engine), lost)


def test_kill_minus_nine(tmp_path, engine):
    """The real thing: SIGKILL in the middle of a run of its own process, then --resume in another: the CSV of a run that was left alone."""
    import signal
    import time
    flags = ["--steps", "24", "--prompts", "4", "--group-size", "4", "--save-every", "2", "--staleness", "4", "--correction", "dlc", "--engine-dtype", "float32"]
    command = [sys.executable, str(lesson1.ROOT / "train.py"), *flags, "--out", str(tmp_path / "a")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not len(train.checkpoints(tmp_path / "a")) >= 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "a" / "summary.json").exists()
    result = subprocess.run([sys.executable, str(lesson1.ROOT / "train.py"), "--resume", str(tmp_path / "a")], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-2000:]
    assert train.checkpoints(tmp_path / "a") == [22, 24]
    train.main([*flags, "--out", str(tmp_path / "b")], engine)
    assert untimed(read(tmp_path / "a")) == untimed(read(tmp_path / "b"))


def test_what_cannot_be_resumed_says_so(tmp_path, engine, capsys):
    run(tmp_path / "a", engine)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "run.json").write_text(json.dumps({**json.loads((tmp_path / "a" / "run.json").read_text()), "processes": 2}))
    for argv, message in ((["--resume", str(tmp_path / "a")], "has ended"), (["--resume", str(tmp_path / "c")], "number of processes"), (["--resume", str(tmp_path / "b")], "no run.json"),
                          (["--resume", str(tmp_path / "a"), "--lr", "1"], "no other flag")):
        with pytest.raises(SystemExit) as exit:
            train.main(argv, engine)
        error = capsys.readouterr().err
        assert exit.value.code == 2 and error.count("\n") == 1 and message in error


# ---------------------------------------------------------------- faults
def test_tokens_without_a_finite_logprob_are_counted_and_not_trained_on(tmp_path, engine, monkeypatch, capsys):
    """NaN and -inf from the engine: the gradient is that of the tokens that are left."""
    sample = engine.sample

    def broken(*args, **kwargs):
        rollout = sample(*args, **kwargs)
        if "group_size" in kwargs:
            rollout.logp_sampler[0, 1], rollout.logp_sampler[3, 0] = float("nan"), float("-inf")
            if rollout.head_logp.shape[-1]:
                rollout.head_logp[0, 1] = float("nan")
        return rollout
    for flags in ((), ("--correction", "dlc"), ("--correction", "seq-is")):
        healthy = run(tmp_path / f"healthy-{len(flags) and flags[1]}", engine, *flags, "--staleness", "1")
        with monkeypatch.context() as patch:
            patch.setattr(engine, "sample", broken)
            rows = run(tmp_path / f"broken-{len(flags) and flags[1]}", engine, *flags, "--staleness", "1")
        assert [row["not_finite"] for row in rows] == ["2", "2"] and [row["not_finite"] for row in healthy] == ["0", "0"]
        assert int(rows[0]["tokens"]) == int(healthy[0]["tokens"]) - 2
        assert all(torch.isfinite(torch.tensor([float(v) for v in row.values()])).all() for row in rows)
        assert "2 tokens without a finite log-prob" in capsys.readouterr().out
    model = lesson1.load_model(tmp_path / "broken-dlc" / "checkpoint-2")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path, engine, monkeypatch, capsys):
    monkeypatch.setitem(train.CORRECTIONS, "none", lambda logp, *rest: torch.full_like(logp, float("inf")))
    with pytest.raises(SystemExit) as exit:
        run(tmp_path / "a", engine)
    error = capsys.readouterr().err
    assert exit.value.code == 1 and error.count("\n") == 1 and "not finite" in error and "holds 0 steps" in error


def test_an_engine_without_any_finite_logprob_stops_the_run(tmp_path, engine, monkeypatch, capsys):
    sample = engine.sample

    def broken(*args, **kwargs):
        rollout = sample(*args, **kwargs)
        rollout.logp_sampler.fill_(float("nan"))
        return rollout
    monkeypatch.setattr(engine, "sample", broken)
    with pytest.raises(SystemExit) as exit:
        run(tmp_path / "a", engine)
    error = capsys.readouterr().err
    assert exit.value.code == 1 and error.count("\n") == 1 and "no token a finite log-prob" in error


def test_float16_that_overflows_at_every_step_stops_the_run(tmp_path, engine, monkeypatch, capsys):
    """One overflow is skipped and said so, the schedule waits; five in a row end the run."""
    monkeypatch.setitem(train.CORRECTIONS, "none", lambda logp, *rest: torch.full_like(logp, float("inf")))
    with pytest.raises(SystemExit) as exit:
        run(tmp_path / "a", engine, "--steps", "9", "--trainer-dtype", "float16")
    out, error = capsys.readouterr()
    rows = read(tmp_path / "a")
    assert exit.value.code == 1 and "five times in a row" in error and len(rows) == 4 and "skipped: float16 overflowed" in out
    assert all(row["skipped"] == "1" and float(row["lr"]) == 1.5e-3 for row in rows)


def test_a_token_that_the_trainer_does_not_have_is_refused(tmp_path, engine, monkeypatch, capsys):
    """An engine whose vocabulary is padded."""
    sample = engine.sample

    def padded(*args, **kwargs):
        rollout = sample(*args, **kwargs)
        if "group_size" in kwargs:
            rollout.head_ids[0, 0, 0] = 17
        return rollout
    monkeypatch.setattr(engine, "sample", padded)
    with pytest.raises(SystemExit) as exit:
        run(tmp_path / "a", engine, "--correction", "dlc")
    error = capsys.readouterr().err
    assert exit.value.code == 1 and error.count("\n") == 1 and "token 17" in error and "vocabulary has 17" in error


# ---------------------------------------------------------------- precision
def test_precision_flags_reach_both_sides(tmp_path, engine, tiny):
    """The trainer's dtype on the shared fp32 engine: its error, and a gradient that is still the float32 one (float16's is scaled
    and scaled back); then float16 on both sides, in an engine of its own."""
    rows = {name: run(tmp_path / name, engine, "--prompts", "16", "--steps", "1", *flags)[0] for name, flags in {
        "float32": (), "bfloat16": ("--trainer-dtype", "bfloat16"), "float16": ("--trainer-dtype", "float16"), "head": ("--trainer-dtype", "bfloat16", "--head-fp32")}.items()}
    error = {name: float(row["discrepancy_k3"]) for name, row in rows.items()}
    norm = {name: float(row["grad_norm"]) for name, row in rows.items()}
    assert error["float32"] < 1e-10 < error["float16"] < error["bfloat16"] / 10 and error["head"] < 0.8 * error["bfloat16"]
    assert abs(norm["float16"] / norm["float32"] - 1) < 1e-2 and abs(norm["bfloat16"] / norm["float32"] - 1) < 5e-2
    train.main([*SMALL, "--steps", "1", "--prompts", "16", "--out", str(tmp_path / "both"), "--model", str(tiny), "--engine-dtype", "float16", "--trainer-dtype", "float16", "--head-fp32"])
    assert 1e-10 < float(read(tmp_path / "both")[0]["discrepancy_k3"]) < error["bfloat16"] / 10


def test_a_float32_head_under_autocast(trainer, engine, tokenizer):
    """The output layer's own error goes; a deep copy keeps it so."""
    _, prompts = lesson1.make_prompts(lesson1.TASKS["sum"], tokenizer, 16, np.random.default_rng(0))
    engine.sync(trainer)
    rollout = engine.sample(prompts, 9, seed=0)
    exact = lesson1.score(trainer, rollout)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = lesson1.score(trainer, rollout)
        lesson1.head_in_float32(trainer)
        head = lesson1.score(trainer, rollout)
        copied = copy.deepcopy(trainer)
        assert torch.equal(lesson1.score(copied, rollout), head)
        with torch.no_grad():
            trainer.lm_head.weight.mul_(2)
        assert torch.equal(lesson1.score(copied, rollout), head) and not torch.equal(lesson1.score(trainer, rollout), head)
    error = lambda logp: (logp - exact)[rollout.mask].square().mean()
    assert error(head) < 0.8 * error(rounded)


# ---------------------------------------------------------------- several processes
def test_two_processes_make_the_same_run_as_one(tmp_path, tiny):
    """Two gloo ranks, FSDP2, a sampler each: losses, gradient norms and the final weights of one process on the same global batch."""
    flags = ["--model", str(tiny), "--steps", "4", "--prompts", "4", "--group-size", "4", "--staleness", "1", "--correction", "dlc", "--engine-dtype", "float32", "--save-every", "2"]
    one = subprocess.run([sys.executable, str(lesson1.ROOT / "train.py"), *flags, "--out", str(tmp_path / "one")], capture_output=True, text=True, timeout=240)
    assert one.returncode == 0, one.stderr[-2000:]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(lesson1.ROOT / "train.py")]
    two = subprocess.run([*launch, *flags, "--out", str(tmp_path / "two")], capture_output=True, text=True, timeout=300)
    assert two.returncode == 0, two.stderr[-3000:]
    rows, others = read(tmp_path / "one"), read(tmp_path / "two")
    assert len(rows) == len(others) == 4
    for a, b in zip(untimed(rows), untimed(others)):
        for name in a:
            assert abs(float(a[name]) - float(b[name])) < 1e-5 * max(1, abs(float(a[name]))), name
    a, b = (lesson1.load_model(tmp_path / name / "checkpoint-4") for name in ("one", "two"))
    assert max((x - y).abs().max() for x, y in zip(a.parameters(), b.parameters())) < 1e-5
    assert a.config.architectures == b.config.architectures == ["Qwen3ForCausalLM"]


# ---------------------------------------------------------------- bad arguments
@pytest.mark.parametrize("argv", [
    ["--steps", "0"], ["--steps", "-3"], ["--steps", "x"], ["--prompts", "0"], ["--group-size", "0"], ["--group-size", "1"],
    ["--max-tokens", "0"], ["--lr", "0"], ["--lr", "-1e-3"], ["--lr", "nan"], ["--lr", "inf"], ["--staleness", "-1"], ["--seed", "-1"],
    ["--resync-ess", "1.5"], ["--resync-ess", "-0.1"], ["--resync-ess", "nan"], ["--resync-level", "batch"], ["--head", "0"],
    ["--head", "8", "--correction", "tis"], ["--correction", "magic"], ["--replay", "r4"], ["--advantage", "best"], ["--save-every", "0"], ["--no-such-flag"],
    ["--engine-dtype", "int8"], ["--trainer-dtype", "float8"], ["--resume", "/no/such/run"], ["--resume", "/no/such/run", "--steps", "3"],
    ["--model", "/no/such/model"], ["--out", "/proc/nothing/here"], ["--out", __file__]], ids=" ".join)
def test_bad_arguments_are_refused_in_one_line(argv, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lesson1, "Sampler", lambda *a, **k: pytest.fail("vLLM was started"))
    monkeypatch.setattr(lesson1, "load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as exit:
        train.main(["--out", str(tmp_path / "a"), *argv])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and error.startswith("train.py: error: ")
    assert argv[0] in error


def test_a_folder_that_holds_a_run_is_refused(tmp_path, engine, capsys):
    run(tmp_path / "a", engine)
    before = (tmp_path / "a" / "metrics.csv").read_bytes()
    with pytest.raises(SystemExit) as exit:
        run(tmp_path / "a", engine)
    assert exit.value.code == 2 and "holds a run already" in capsys.readouterr().err
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == before


def test_quick_run_as_a_new_user_starts_it(tmp_path):
    result = subprocess.run([sys.executable, str(lesson1.ROOT / "train.py"), "--quick", "--out", str(tmp_path / "a")],
                            capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "step   3" in result.stdout and "sampled" in result.stdout
    assert (tmp_path / "a" / "train.png").stat().st_size > 10_000
    rows = read(tmp_path / "a")
    assert all(1e-4 < float(row["discrepancy_abs"]) < 1e-2 for row in rows)           # bf16 by default


def test_a_quick_try_does_not_block_the_real_run(tmp_path, engine, monkeypatch):
    monkeypatch.setattr(lesson1, "policy", lambda *args, tiny=lesson1.policy("sum"): tiny)
    monkeypatch.setattr(lesson1, "ROOT", tmp_path)
    for extra in (["--quick"], []):
        train.main([*SMALL, *extra], engine)
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"none-s0-seed0-quick", "none-s0-seed0"}


def test_interrupted_before_the_first_step_leaves_nothing_in_the_way(tmp_path, engine, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(engine, "sync", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(SystemExit):
            run(tmp_path / "a", engine)
    assert "0 steps in metrics.csv and no checkpoint yet (--resume begins anew)" in capsys.readouterr().err
    assert len(run(tmp_path / "a", engine)) == 2


def test_a_sync_that_fails_ends_the_run_in_one_line(tmp_path, engine, monkeypatch, capsys):
    monkeypatch.setattr(engine, "canary", lambda *a: (0.5, 0.0))
    with pytest.raises(SystemExit) as exit:
        run(tmp_path / "a", engine)
    error = capsys.readouterr().err
    assert exit.value.code == 1 and error.count("\n") == 1 and "did not arrive" in error
