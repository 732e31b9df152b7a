"""train.py on the shared engine: the loop, its record, and everything that may go wrong."""
import csv
import errno
import os
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from conftest import lesson1

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
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]


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


@pytest.mark.parametrize("name", list(train.lesson2.CORRECTIONS))
def test_two_steps_of_every_correction(name, tmp_path, engine):
    rows = run(tmp_path / "a", engine, "--staleness", "1", "--correction", name)
    assert len(rows) == 2 and all(torch.isfinite(torch.tensor([float(v) for v in row.values()])).all() for row in rows)
    assert abs(float(rows[0]["weight"]) - 1) < 1e-4                            # an fp32 engine at age 0
    assert name in ("none", "kpop") or float(rows[1]["weight"]) != 1


def test_the_correction_reaches_the_loss(tmp_path, engine):
    none = run(tmp_path / "none", engine, "--steps", "4", "--staleness", "3")
    tis = run(tmp_path / "tis", engine, "--steps", "4", "--staleness", "3", "--correction", "tis")
    assert all(float(row["weight"]) == 1 for row in none) and float(tis[-1]["weight"]) != 1
    assert untimed(none)[0]["loss"] == untimed(tis)[0]["loss"] and untimed(none)[-1]["loss"] != untimed(tis)[-1]["loss"]


def test_the_gradient_of_a_step_is_the_formula(tmp_path, engine, tiny, monkeypatch):
    """One step against an independent gradient of -sum A log pi / N, before clipping: the CSV's norm."""
    seen = {}
    sample = engine.sample
    monkeypatch.setattr(engine, "sample", lambda *a, **k: seen.setdefault("rollout", sample(*a, **k)) if k.get("group_size") else sample(*a, **k))
    row = run(tmp_path / "a", engine, "--steps", "1", "--advantage", "mean")[0]
    rollout, model = seen["rollout"], lesson1.load_model(tiny)
    texts = ["".join(lesson1.CHARACTERS[i] for i in ids[m].tolist()) for ids, m in zip(rollout.ids, rollout.mask)]
    sums = [sum(p[:8].tolist()) % 10 for p in rollout.prompt_ids]
    R = torch.tensor([float(t.endswith(f"{s}.")) for t, s in zip(texts, sums)])
    A = (R.view(4, 4) - R.view(4, 4).mean(1, keepdim=True)).flatten()
    N = sum(map(len, texts))
    loss = 0
    for text, prompt, a in zip(texts, rollout.prompt_ids, A):
        ids = torch.cat([prompt, torch.tensor([lesson1.CHARACTERS.index(c) for c in text])])
        logp = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        loss = loss - a * sum(logp[t - 1, ids[t]] for t in range(9, len(ids))) / N
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters())).item()
    assert abs(float(row["grad_norm"]) / norm - 1) < 1e-4 and abs(float(row["loss"]) - loss.item()) < 1e-6
    assert abs(float(row["reward"]) - R.mean().item()) < 1e-6 and int(row["tokens"]) == N


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
    assert sorted(p.name for p in tmp_path.joinpath("a").iterdir()) == ["checkpoint-2", "checkpoint-3", "metrics.csv", "train.png"]
    model = lesson1.load_model(tmp_path / "a" / "checkpoint-3")
    engine.sync(model)
    path = lesson1.find_model(str(tmp_path / "a" / "checkpoint-3"))
    rollout = lesson1.Sampler(path, "float32").sample([[1, 2, 3, 10]], 9, seed=0, group_size=8)      # vLLM loads it as it is
    assert torch.equal(rollout.ids, engine.sample([[1, 2, 3, 10]], 9, seed=0, group_size=8).ids)
    assert (lesson1.score(model, rollout) - rollout.logp_sampler).abs().max() < 1e-5
    out = capsys.readouterr().out
    assert "held-out accuracy, 32 prompts: greedy" in out and "all the rest" in out


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    train.append_row(path, ["a", "b"])
    monkeypatch.setattr(train.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError):
        train.append_row(path, [1, 2])
    assert path.read_text().splitlines() == ["a,b"]


def test_a_full_disk_ends_the_run_in_one_line(tmp_path, engine, monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(train, "save_checkpoint", full)
    with pytest.raises(SystemExit) as exit:
        run(tmp_path / "a", engine)
    error = capsys.readouterr().err
    assert exit.value.code == 1 and error.count("\n") == 1 and "No space left" in error
    assert len(read(tmp_path / "a")) == 2


def test_an_interrupted_run_keeps_what_it_had(tmp_path, engine, monkeypatch):
    calls, sample = [], engine.sample

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:                       # two evaluations, two steps, then Ctrl-C
            raise KeyboardInterrupt
        return sample(*args, **kwargs)
    monkeypatch.setattr(engine, "sample", interrupted)
    with pytest.raises(SystemExit) as exit:
        run(tmp_path / "a", engine, "--steps", "9", "--save-every", "1")
    assert exit.value.code == 130 and len(read(tmp_path / "a")) == 2
    lesson1.load_model(tmp_path / "a" / "checkpoint-2")
    assert not list(tmp_path.glob("a/*.tmp"))


# ---------------------------------------------------------------- bad arguments
@pytest.mark.parametrize("argv", [
    ["--steps", "0"], ["--steps", "-3"], ["--steps", "x"], ["--prompts", "0"], ["--group-size", "0"], ["--group-size", "1"],
    ["--max-tokens", "0"], ["--lr", "0"], ["--lr", "-1e-3"], ["--lr", "nan"], ["--lr", "inf"], ["--staleness", "-1"], ["--seed", "-1"],
    ["--correction", "magic"], ["--advantage", "best"], ["--save-every", "0"], ["--no-such-flag"],
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
