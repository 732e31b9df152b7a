"""train.py on the shared engine: the loop, its record, and everything that may go wrong."""
import ast
import copy
import csv
import errno
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import lesson1, rejected
from torch.optim.optimizer import register_optimizer_step_pre_hook

train, draw = import_module("train"), import_module("figures.draw")
lesson2, lesson3, lesson4, lesson5 = train.lesson2, train.lesson3, train.lesson4, train.lesson5
SMALL = ["--steps", "2", "--prompts", "4", "--group-size", "4"]


@pytest.fixture(autouse=True)
def steps_only(request, monkeypatch):
    """The picture and the held-out prompts take longer than two steps: they are for tests that ask."""
    if "picture" not in request.fixturenames:
        monkeypatch.setattr(draw, "draw_run", lambda rows, path: None)
    if "evaluated" not in request.fixturenames:
        monkeypatch.setattr(lesson3, "held_out", lambda *args: {"sampled": 0.0, "greedy": 0.0})


@pytest.fixture
def picture():
    """The test's runs draw theirs."""


@pytest.fixture
def evaluated():
    """The test's runs answer the held-out prompts."""


def run(out, engine, *extra):
    """A small run; its rows as dicts of strings."""
    train.main([*SMALL, "--out", str(out), *extra], engine)
    return read(out)


def read(out):
    with (out / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def untimed(rows):
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


def column(rows, name):
    return [float(row[name]) for row in rows]


def refused(capsys, argv, engine=None, code=2):
    """What the run prints on stderr before it exits with this code."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        train.main([str(x) for x in argv], engine)
    assert exit.value.code == code
    return capsys.readouterr().err


def fail(message):
    def failing(*args, **kwargs):
        pytest.fail(message)
    return failing


# ---------------------------------------------------------------- the loop
def test_same_seed_same_csv(tmp_path, engine):
    one, two = run(tmp_path / "a", engine), run(tmp_path / "b", engine)
    assert untimed(one) == untimed(two) and len(one) == 2
    assert untimed(one) != untimed(run(tmp_path / "c", engine, "--seed", "1"))
    assert column(one, "lag") == [0, 0] and column(one, "age") == [0, 0]            # on-policy


def test_lag_is_exactly_zero_at_a_sync_and_not_after(tmp_path, engine):
    rows = run(tmp_path / "a", engine, "--steps", "4", "--staleness", "1")
    assert [row["age"] for row in rows] == ["0", "1", "0", "1"]
    assert [lag == 0 for lag in column(rows, "lag")] == [True, False, True, False]
    assert max(column(rows, "discrepancy")) < 1e-5          # an fp32 engine: the discrepancy is not lag
    assert column(rows, "lag")[1] > 1e-3


@pytest.mark.parametrize("name", list(train.CORRECTIONS))
def test_two_steps_of_every_correction(name, tmp_path, engine):
    rows = run(tmp_path / "a", engine, "--staleness", "1", "--correction", name)
    assert len(rows) == 2 and all(np.isfinite(float(v)) for row in rows for v in row.values())
    assert abs(float(rows[0]["weight"]) - 1) < 1e-4                                 # an fp32 engine at age 0


def test_the_correction_reaches_the_loss(tmp_path, engine):
    none = run(tmp_path / "none", engine, "--steps", "4", "--staleness", "3")
    tis = run(tmp_path / "tis", engine, "--steps", "4", "--staleness", "3", "--correction", "tis")
    assert column(none, "weight") == [1] * 4 and column(tis, "weight")[-1] != 1
    first, last = (abs(float(none[k]["loss"]) - float(tis[k]["loss"])) for k in (0, -1))
    assert first < 1e-6 and last > 1e-4


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


def changed(monkeypatch, engine, change):
    """The engine, whose training rollouts go through change(rollout)."""
    sample = engine.sample

    def changing(*args, **kwargs):
        rollout = sample(*args, **kwargs)
        if "group_size" in kwargs:
            change(rollout)
        return rollout
    monkeypatch.setattr(engine, "sample", changing)


def texts(rollout):
    return ["".join(lesson1.CHARACTERS[i] for i in ids[m].tolist()) for ids, m in zip(rollout.ids, rollout.mask)]


def right(prompt, text):
    """The running sum, graded without lesson 1."""
    return text.endswith(".") and text[:-1][-1:] == str(sum(int(d) for d in prompt[:8]) % 10)


def test_the_gradient_of_a_step_is_the_formula(tmp_path, engine, uneven, monkeypatch):
    """One step against an independent gradient of -sum A log pi / N, before clipping: the CSV's norm."""
    calls = spy(monkeypatch, engine)
    row = run(tmp_path / "a", engine, "--steps", "1", "--advantage", "std", "--model", str(uneven))[0]
    rollout, model = next(filter(is_training, calls))[2], lesson1.load_model(uneven)
    lengths = rollout.mask.sum(1)
    assert len(set(lengths.tolist())) > 2
    R = torch.tensor([float(right(p, text)) for p, text in zip(rollout.prompt_ids, texts(rollout))]).view(4, 4)
    std = R.std(1, correction=0, keepdim=True)
    A = torch.where(std > 0, (R - R.mean(1, keepdim=True)) / std.clamp(min=1e-9), 0.0).flatten()
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
    assert abs(float(row["length"]) - N / 16) < 1e-9
    assert abs(float(row["cut_off"]) - sum(not t.endswith(".") for t in texts(rollout)) / 16) < 1e-9


# ---------------------------------------------------------------- micro-batches
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
    flags = ["--staleness", "1", "--lr", "1e-4", "--model", str(uneven), "--correction", *correction]
    for size in (1, 3, 5, 16):
        seen = gradients.setdefault(size, [])

        def seen_and_clipped(parameters, limit):
            parameters = list(parameters)
            seen.append(torch.cat([p.grad.flatten() for p in parameters]))
            return clip(parameters, limit)
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", seen_and_clipped)
        monkeypatch.setattr(lesson1, "LOGITS_AT_ONCE", size * 10 * 17 if size < 16 else 2**27)
        run(tmp_path / str(size), engine, *flags)
    for step, tolerance in ((0, 1e-6), (1, 1e-5)):
        whole = gradients[16][step]
        assert whole.norm() > 1e-2
        for size in (1, 3, 5):
            assert (gradients[size][step] - whole).norm() < tolerance * whole.norm(), (size, step)


def peak_of_saved_tensors(f):
    """Bytes of the activations that autograd holds at once while f runs, at most."""
    now = peak = 0

    class Held:
        def __init__(self, tensor):
            self.tensor = tensor

    def free(size):
        nonlocal now
        now -= size

    def pack(tensor):
        nonlocal now, peak
        if tensor.is_leaf and tensor.requires_grad:          # a parameter: there anyway
            return tensor
        held, size = Held(tensor), tensor.numel() * tensor.element_size()
        now += size
        peak = max(peak, now)
        weakref.finalize(held, free, size)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.tensor if isinstance(x, Held) else x):
        f()
    return peak


def check_memory(backward, tmp_path, engine):
    """A batch of eight micro-batches holds the activations of one at a time: at most 1.3 times what a batch of one
    holds."""
    peaks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", backward)
        patch.setattr(lesson1, "LOGITS_AT_ONCE", 8 * 10 * 17)
        for prompts in (2, 16):
            argv = ["--steps", "1", "--prompts", str(prompts), "--correction", "dlc"]
            peaks.append(peak_of_saved_tensors(lambda: run(tmp_path / str(prompts), engine, *argv)))
    assert 2**16 < peaks[0] and peaks[1] <= 1.3 * peaks[0], peaks


def test_memory_holds_one_micro_batch_at_a_time(tmp_path, engine):
    backward, kept = torch.Tensor.backward, []
    check_memory(backward, tmp_path / "right", engine)

    def graphs_kept(loss):
        kept.append(loss)
        backward(loss, retain_graph=True)
    rejected(lambda wrong: check_memory(wrong, tmp_path / "wrong", engine), graphs_kept)


# ---------------------------------------------------------------- the three policies
def test_the_correction_gets_the_three_policies(tmp_path, engine, uneven, monkeypatch):
    """What reaches a weight: mu as the engine recorded it, pi at its weights, pi now."""
    seen, sampled = [], spy(monkeypatch, engine)
    tis = lesson2.CORRECTIONS["tis"]
    monkeypatch.setitem(train.CORRECTIONS, "tis", lambda *args: seen.append(args) or tis(*args))
    rows = run(tmp_path / "a", engine, "--staleness", "1", "--correction", "tis", "--model", str(uneven))
    start = lesson1.load_model(uneven)
    for (logp, old, mu, A, mask), (_, _, rollout), row in zip(seen, filter(is_training, sampled), rows, strict=True):
        assert torch.equal(mu, rollout.logp_sampler) and torch.equal(mask, rollout.mask)
        assert (old - lesson1.logprobs(start, rollout)).abs().max() < 1e-6          # at both steps: it kept its weights
        assert abs(float(row["weight"]) - tis(logp, old, mu, A, mask)[mask].mean().item()) < 1e-6
        assert abs(float(row["lag"]) - (logp - old)[mask].abs().mean().item()) < 1e-6
        assert abs(float(row["k3"]) - lesson1.gap(old[mask], mu[mask])["k3"]) < 1e-9
    assert torch.equal(seen[0][0], seen[0][1]) and (seen[1][0] - seen[1][1])[seen[1][4]].abs().max() > 1e-3


STALE = ["--steps", "8", "--prompts", "8", "--staleness", "7", "--lr", "3e-3"]


@pytest.mark.parametrize("name", ["none", "ppo", "dlc"])
def test_it_is_the_run_of_lessons_3_and_4(name, tmp_path, engine, trainer, tokenizer):
    """Two loops, written independently, one training: rewards, lags, and when the batch was refused."""
    rows = run(tmp_path / "a", engine, *STALE, "--correction", name)
    loss = lesson4.dlc_loss if name == "dlc" else lesson3.weighted(lesson2.CORRECTIONS[name])
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-3, weight_decay=0.0)
    batches = lesson3.grpo(trainer, engine, lesson1.SUM, tokenizer, optimizer, loss, steps=8, period=8, seed=0,
                           prompts=8, group_size=4, head=17 if name == "dlc" else 0)
    for batch, row in zip(batches, rows, strict=True):
        assert abs(batch.R.mean().item() - float(row["reward"])) < 1e-6
        assert batch.age == int(row["age"]) and batch.dropped == int(row["dropped_tokens"])
        assert abs(batch.lag[batch.rollout.mask].abs().mean().item() - float(row["lag"])) < 1e-5
    resynced = [row for row in rows if int(row["dropped_tokens"])]
    assert (0 < len(resynced) < 8) == (name == "dlc")
    for row in rows if name == "dlc" else []:
        assert (float(row["ess"]) < 0.5) == (float(row["dropped_seconds"]) > 0) == (row in resynced)
        assert row not in resynced or (row["age"] == "0" and float(row["lag"]) == 0)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["syncs"] == 1 + len(resynced)
    assert summary["dropped_tokens"] == sum(column(rows, "dropped_tokens"))


def test_dlc_differs_from_the_lag_clip_by_its_center_and_uses_the_head_it_is_told(tmp_path, engine, monkeypatch):
    """One update at age 1: the whole vocabulary, a head of 4, no center at all; the ESS rule switched off."""
    off = ["--staleness", "1", "--steps", "3", "--resync-ess", "0", "--correction", "dlc"]
    whole, small = run(tmp_path / "whole", engine, *off), run(tmp_path / "small", engine, *off, "--head", "4")
    monkeypatch.setattr(lesson4, "center", lambda *a: 0.0)
    none = run(tmp_path / "none", engine, *off)
    assert {row["dropped_tokens"] for row in whole + small + none} == {"0"}
    norms = [float(rows[1]["grad_norm"]) for rows in (whole, small, none)]
    assert len(set(norms)) == 3 and abs(norms[0] - norms[1]) < abs(norms[0] - norms[2])


def test_any_correction_can_be_resynced(tmp_path, engine):
    tis = run(tmp_path / "tis", engine, *STALE, "--correction", "tis", "--resync-ess", "0.9")
    never = run(tmp_path / "never", engine, *STALE, "--correction", "tis")
    assert 0 < sum(column(tis, "dropped_tokens")) and sum(column(never, "dropped_tokens")) == 0
    assert all((int(row["dropped_tokens"]) > 0) == (float(row["ess"]) < 0.9) for row in tis)
    assert min(column(never, "ess")) < 0.5
    assert column(never, "ess_tokens")[0] == 1 and column(never, "ess_tokens")[1:] != column(never, "ess")[1:]


# ---------------------------------------------------------------- replay
def small_gpt2(folder, tokenizer):
    """A model without model.layers."""
    torch.manual_seed(0)
    config = lesson1.transformers.GPT2Config(vocab_size=17, n_positions=64, n_embd=32, n_layer=2, n_head=2,
                                             bos_token_id=None, eos_token_id=lesson1.END)
    lesson1.transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_replay_is_refused_for_a_model_without_routers(tmp_path, tiny, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr(lesson1, "Sampler", fail("vLLM was started"))
    for model in (tiny, small_gpt2(tmp_path / "gpt2", tokenizer)):
        error = refused(capsys, ["--model", model, "--replay", "r3", "--out", tmp_path / "a"])
        assert error.count("\n") == 1 and "no router" in error


def test_replay_reaches_both_policies_and_every_micro_batch(tmp_path, mixture, mixture_engine, monkeypatch):
    """A mixture of experts, stale by one step: what each kind of replay does to both parts; in parts as in one."""
    flags = ["--model", str(mixture), "--staleness", "1", "--steps", "4"]
    live, r2, r3 = (run(tmp_path / kind, mixture_engine, *flags, "--replay", kind) for kind in ("none", "r2", "r3"))
    lags = [float(rows[1]["lag"]) for rows in (live, r2, r3)]
    assert all(abs(lag - lags[0]) > 1e-4 for lag in lags[1:])             # the same first update: the picks differ
    assert abs(float(live[0]["loss"]) - float(r2[0]["loss"])) < 1e-6 and max(column(r2 + r3, "discrepancy")) < 1e-4
    monkeypatch.setattr(lesson1, "LOGITS_AT_ONCE", 3 * 10 * 17)
    for kind, whole in (("r2", r2), ("r3", r3)):
        parts = run(tmp_path / f"{kind}-parts", mixture_engine, *flags, "--replay", kind)
        for one, two in zip(whole, parts, strict=True):
            for name in ("reward", "lag", "grad_norm", "loss"):
                assert abs(float(one[name]) - float(two[name])) < 1e-3 * max(1, abs(float(one[name]))), (kind, name)


# ---------------------------------------------------------------- prompts, accuracy, learning rate
def test_prompts_and_seeds_are_new_at_every_step_and_held_out_prompts_are_not_trained_on(
        tmp_path, engine, evaluated, monkeypatch):
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
    assert sorted(c[1]["temperature"] for c in held_out) == [0.0] * 4 + [1.0] * 4


def test_accuracy_is_measured_before_and_after_with_the_weights_of_each(tmp_path, engine, tiny, evaluated, monkeypatch):
    calls = spy(monkeypatch, engine)
    run(tmp_path / "a", engine, "--lr", "3e-2", "--steps", "3", "--staleness", "2")         # a rate that ruins it
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    held_out = [c for c in calls if not is_training(c)]
    models = lesson1.load_model(tiny), lesson1.load_model(tmp_path / "a" / "checkpoint-3")
    for name, two, model in zip(("before", "after"), (held_out[:2], held_out[2:]), models):
        for prompts, settings, rollout in two:
            key = "sampled" if settings["temperature"] else "greedy"
            if key == "sampled":                                                            # those weights sampled
                assert (lesson1.logprobs(model, rollout) - rollout.logp_sampler).abs().max() < 1e-4
            correct = sum(right(p, text) for p, text in zip(prompts, texts(rollout)))
            assert abs(summary[name][key] - correct / 32) < 1e-6
    assert summary["before"]["greedy"] > 0.9 and summary["after"]["sampled"] != summary["before"]["sampled"]


def test_learning_rate_falls_linearly_and_is_the_step_that_is_taken(tmp_path, engine, tiny):
    rates = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: rates.append(optimizer.param_groups[0]["lr"]))
    run(tmp_path / "a", engine, "--steps", "4", "--lr", "1e-3")
    hook.remove()
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    run(tmp_path / "b", engine, "--steps", "1", "--lr", "1e-3")
    after, before = lesson1.load_model(tmp_path / "b" / "checkpoint-1"), lesson1.load_model(tiny)
    step = max((a - b).abs().max().item() for a, b in zip(after.parameters(), before.parameters()))
    assert abs(step - 1e-3) < 1e-5                       # AdamW's first step is the learning rate, in every coordinate


# ---------------------------------------------------------------- what a run leaves behind
def test_what_a_run_leaves_behind_loads_everywhere(tmp_path, engine, picture, evaluated, capsys):
    run(tmp_path / "a", engine, "--steps", "3")
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"checkpoint-0", "checkpoint-3", "metrics.csv", "run.json", "summary.json", "train.png"}
    assert (tmp_path / "a" / "train.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert "step   2" in out and "held-out accuracy, 32 prompts" in out
    model = lesson1.load_model(tmp_path / "a" / "checkpoint-3")
    engine.sync(model)
    path = lesson1.find_model(str(tmp_path / "a" / "checkpoint-3"))
    rollout = lesson1.Sampler(path, "float32").sample([[1, 2, 3, 10]], 9, seed=0, group_size=8)   # vLLM, as it is
    assert torch.equal(rollout.ids, engine.sample([[1, 2, 3, 10]], 9, seed=0, group_size=8).ids)
    assert (lesson1.logprobs(model, rollout) - rollout.logp_sampler).abs().max() < 1e-5


def test_a_full_disk_ends_the_run_in_one_line(tmp_path, engine, monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(train, "save", full)
    error = refused(capsys, [*SMALL, "--out", tmp_path / "a"], engine)
    assert error.count("\n") == 1 and "No space left" in error and len(read(tmp_path / "a")) == 2


@pytest.mark.parametrize("cleans_up_badly", [False, True])
def test_an_interrupted_run_keeps_what_it_had(cleans_up_badly, tmp_path, engine, monkeypatch, capsys):
    calls, sample = [], engine.sample

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:                       # two steps, then Ctrl-C
            try:
                raise KeyboardInterrupt
            finally:
                if cleans_up_badly:               # seen: an UnboundLocalError from a `finally` of vLLM
                    raise UnboundLocalError("tok")
        return sample(*args, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "sample", interrupted)
        error = refused(capsys, [*SMALL, "--steps", 3, "--out", tmp_path / "a"], engine, code=130)
    assert f"--resume {tmp_path / 'a'}" in error and len(read(tmp_path / "a")) == 2
    train.main(["--resume", str(tmp_path / "a")], engine)
    assert untimed(read(tmp_path / "a")) == untimed(run(tmp_path / "b", engine, "--steps", "3"))


def test_interrupted_before_the_first_step_leaves_nothing_in_the_way(tmp_path, engine, evaluated, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(engine, "sync", interrupted)
        refused(capsys, [*SMALL, "--out", tmp_path / "a"], engine, code=130)
    assert len(run(tmp_path / "a", engine)) == 2


def test_an_error_of_another_kind_is_not_hidden(tmp_path, engine, monkeypatch):
    monkeypatch.setattr(engine, "sample", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "a", engine)


def test_what_cannot_be_saved_is_refused_before_vllm_starts(tmp_path, tiny, tokenizer, trainer, capsys, monkeypatch):
    """A released model's generation_config.json may hold what transformers refuses to write."""
    monkeypatch.setattr(lesson1, "Sampler", fail("vLLM was started"))
    trainer.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    assert "temperature" in refused(capsys, ["--model", tmp_path / "model", "--out", tmp_path / "a"])


# ---------------------------------------------------------------- resuming
class Killed(BaseException):
    """Stands for kill -9: nothing of the run's own clean-up happens after it."""


RESUMED = ["--steps", "7", "--staleness", "3", "--lr", "3e-3", "--correction", "dlc"]


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(train, "SAVE_EVERY", 2)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, engine):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "draw_run", lambda rows, path: None)
        patch.setattr(lesson3, "held_out", lambda *args: {})
        return untimed(run(tmp_path_factory.mktemp("whole") / "a", engine, *RESUMED))


def interrupt(monkeypatch, where, call):
    """Kills the run at the given call of a function of train.py or of what it uses, before it has done anything;
    or half-way through a line of metrics.csv."""
    owner, name = where
    real, calls = getattr(owner, name.removesuffix(", half")), []

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            if name.endswith("half"):
                with (args[0] / "metrics.csv").open("a") as file:
                    file.write("3,0,0.2")
            raise Killed
        return real(*args, **kwargs)
    monkeypatch.setattr(owner, name.removesuffix(", half"), killed)


@pytest.mark.parametrize("where, call", [
    ((train, "report"), 1), ((train, "report"), 4), ((train, "report, half"), 6), ((train, "save"), 2),
    ((train.torch, "save"), 1), ((train.torch, "save"), 3), ((train.os, "replace"), 1), ((train.os, "replace"), 4),
    ((draw, "draw_run"), 1), ((train.os, "replace"), 5)], ids=lambda x: x[1] if isinstance(x, tuple) else str(x))
def test_a_killed_run_resumes_bit_for_bit(where, call, uninterrupted, often, tmp_path, engine, monkeypatch):
    """Before a row, in the middle of one, before the state or the summary is there: the CSV is that of the run that
    was left alone."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, where, call)
        run(tmp_path / "a", engine, *RESUMED)
    assert not (tmp_path / "a" / "summary.json").exists()
    train.main(["--resume", str(tmp_path / "a")], engine)
    assert untimed(read(tmp_path / "a")) == uninterrupted
    assert {path.name for path in (tmp_path / "a").glob("*.*")} == {"metrics.csv", "run.json", "summary.json"}
    assert (tmp_path / "a" / "checkpoint-7" / "model.safetensors").exists()


def check_resume(uninterrupted, tmp_path, engine):
    """Killed before row 5, with weights of the sampler one step old in the state; resumed from step 4."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, (train, "report"), 6)
        run(tmp_path, engine, *RESUMED)
    train.main(["--resume", str(tmp_path)], engine)
    assert untimed(read(tmp_path)) == uninterrupted


def test_resume(uninterrupted, often, tmp_path, engine):
    check_resume(uninterrupted, tmp_path / "a", engine)


@pytest.mark.parametrize("lost", ["optimizer", "trainer", "old", "synced", "step", "metrics"])
def test_resume_rejects_a_forgotten_part(lost, uninterrupted, often, tmp_path, engine, tiny, monkeypatch):
    load = torch.load

    def forgetful(path, **kwargs):
        state = load(path, **kwargs)
        if lost == "optimizer":
            for entry in state["optimizer"]["state"].values():
                entry["exp_avg"].zero_()
        elif lost == "trainer":
            state["trainer"] = lesson1.load_model(tiny).state_dict()
        elif lost == "old":
            state["old"] = {k: v * 1.01 for k, v in state["old"].items()}
        elif lost == "metrics":
            state["metrics"] = ""
        else:
            state[lost] = 5 - (lost == "synced")
        return state
    monkeypatch.setattr(train.torch, "load", forgetful)
    rejected(lambda _: check_resume(uninterrupted, tmp_path / "a", engine), lost)


def test_kill_minus_nine(tmp_path, engine16):
    """The real thing: the command as a new user types it, in a process of its own, SIGKILL, then --resume: the CSV of a
    run that was left alone."""
    flags = ["--steps", "32", "--prompts", "4", "--group-size", "4", "--staleness", "4", "--correction", "dlc"]
    command = [sys.executable, str(lesson1.ROOT / "train.py"), *flags, "--out", str(tmp_path / "a")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
        while process.poll() is None and not (tmp_path / "a" / "state.pt").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, (tmp_path / "log").read_text()[-2000:]
    assert "step  19" in (tmp_path / "log").read_text() and not (tmp_path / "a" / "summary.json").exists()
    train.main(["--resume", str(tmp_path / "a")], engine16)
    train.main([*flags, "--out", str(tmp_path / "b")], engine16)
    rows = read(tmp_path / "a")
    assert untimed(rows) == untimed(read(tmp_path / "b")) and len(rows) == 32
    assert 1e-5 < column(rows, "discrepancy")[0] < 1e-2                                 # bf16 by default


def test_what_cannot_be_resumed_says_so(tmp_path, engine, capsys):
    run(tmp_path / "a", engine)
    for argv, message in ((["--resume", tmp_path / "a"], "has ended"), (["--resume", tmp_path / "b"], "run.json"),
                          (["--resume", tmp_path / "a", "--lr", "1"], "no other")):
        error = refused(capsys, argv, engine)
        assert error.splitlines()[-1].startswith("train.py: error: ") and message in error


# ---------------------------------------------------------------- faults
def test_tokens_without_a_finite_logprob_are_counted_and_not_trained_on(tmp_path, engine, monkeypatch, capsys):
    """NaN and -inf from the engine: the gradient is that of the tokens that are left."""
    def broken(rollout):
        rollout.logp_sampler[0, 1], rollout.logp_sampler[3, 0] = float("nan"), float("-inf")
        if rollout.head_logp.shape[-1]:
            rollout.head_logp[0, 1] = float("nan")
    for name, *flags in (("none",), ("dlc",), ("dlc", "--head", "6"), ("seq-is",), ("snis",)):
        flags = ["--correction", name, *flags, "--staleness", "1"]
        name += str(len(flags))
        healthy = run(tmp_path / f"healthy-{name}", engine, *flags)
        with monkeypatch.context() as patch:
            changed(patch, engine, broken)
            rows = run(tmp_path / f"broken-{name}", engine, *flags)
        assert column(rows, "not_finite") == [2, 2] and column(healthy, "not_finite") == [0, 0]
        assert int(rows[0]["tokens"]) == int(healthy[0]["tokens"]) - 2 and rows[0]["length"] == healthy[0]["length"]
        assert all(np.isfinite(float(v)) for row in rows for v in row.values())
        assert "not finite 2" in capsys.readouterr().out
    model = lesson1.load_model(tmp_path / "broken-dlc6" / "checkpoint-2")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_left_out_token_has_no_gradient(tmp_path, engine, monkeypatch):
    """As if its advantage were 0, but for the smaller N."""
    def without(rollout):
        rollout.logp_sampler[0, 1] = float("nan")
    policy_loss, norms = lesson2.policy_loss, {}

    def zeroed(logp, weight, advantage, mask, n_tokens, center=0.0):
        weight = weight.clone()
        weight[0, 1] = 0
        return policy_loss(logp, weight, advantage, mask, n_tokens - 1, center)
    with monkeypatch.context() as patch:
        changed(patch, engine, without)
        norms["left out"] = run(tmp_path / "a", engine, "--steps", "1")[0]["grad_norm"]
    norms["all"] = run(tmp_path / "b", engine, "--steps", "1")[0]["grad_norm"]
    monkeypatch.setattr(lesson2, "policy_loss", zeroed)
    norms["zeroed"] = run(tmp_path / "c", engine, "--steps", "1")[0]["grad_norm"]
    a, b, c = map(float, norms.values())
    assert abs(a - c) < 1e-6 * a and abs(a - b) > 1e-4 * a


def stops(capsys, tmp_path, engine, *flags):
    error = refused(capsys, [*SMALL, "--out", tmp_path / "a", *flags], engine)
    assert error.count("\n") == 1 and error.startswith("train.py: error: "), error
    return error


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path, engine, monkeypatch, capsys):
    monkeypatch.setitem(train.CORRECTIONS, "none", lambda logp, *rest: torch.full_like(logp, float("inf")))
    assert "not finite" in stops(capsys, tmp_path, engine) and read(tmp_path / "a") == []


def test_an_engine_without_any_finite_logprob_stops_the_run(tmp_path, engine, monkeypatch, capsys):
    changed(monkeypatch, engine, lambda rollout: rollout.logp_sampler.fill_(float("nan")))
    assert "step 0" in stops(capsys, tmp_path, engine)


def test_float16_that_overflows_at_every_step_stops_the_run(tmp_path, engine, tiny, monkeypatch, capsys):
    """The scale falls from 2^16 to 1, and the weights stay what they were; then it is the gradient's fault."""
    ratios = []
    monkeypatch.setitem(train.CORRECTIONS, "none", lambda logp, old, *rest: (
        ratios.append((logp - old).abs().max().item()), torch.full_like(logp, float("inf")))[1])
    error = stops(capsys, tmp_path, engine, "--steps", "40", "--trainer-dtype", "float16", "--staleness", "40")
    rows = read(tmp_path / "a")
    assert "step 16: the gradient is not finite" in error and len(rows) == 16 and ratios == [0.0] * 17


def test_float16_resumes_with_its_scale(tmp_path, engine, often, monkeypatch, capsys):
    """Halved four times before the run is killed: the other twelve are left."""
    monkeypatch.setitem(train.CORRECTIONS, "none", lambda logp, *rest: torch.full_like(logp, float("inf")))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, (train, "report"), 5)
        run(tmp_path / "a", engine, "--steps", "40", "--trainer-dtype", "float16")
    assert "step 16: the gradient" in refused(capsys, ["--resume", tmp_path / "a"], engine)


def test_one_overflow_in_float16_is_skipped(tmp_path, engine, monkeypatch):
    calls, none = [], lesson2.CORRECTIONS["none"]
    monkeypatch.setitem(train.CORRECTIONS, "none", lambda logp, *rest: (
        calls.append(1), none(logp, *rest) * (float("inf") if len(calls) == 1 else 1))[1])
    rows = run(tmp_path / "a", engine, "--steps", "3", "--trainer-dtype", "float16", "--staleness", "3")
    assert [np.isfinite(norm) for norm in column(rows, "grad_norm")] == [False, True, True]
    assert [lag > 0 for lag in column(rows, "lag")] == [False, False, True]


def test_a_token_that_the_trainer_does_not_have_is_refused(tmp_path, engine, monkeypatch, capsys):
    """An engine whose vocabulary is padded."""
    def padded(rollout):
        rollout.head_ids[0, 0, 0] = 17
    changed(monkeypatch, engine, padded)
    error = stops(capsys, tmp_path, engine, "--correction", "dlc")
    assert "token 17" in error and "knows only 17" in error


def test_a_sync_that_fails_ends_the_run_in_one_line(tmp_path, engine, monkeypatch, capsys):
    """The engine drops what it is sent: at the second step it lacks the first one's update."""
    load, sent = engine.load, []

    def lossy(state):
        sent.append(state)
        if len(sent) == 1:
            load(state)
    monkeypatch.setattr(engine, "load", lossy)
    assert "did not arrive" in stops(capsys, tmp_path, engine) and len(read(tmp_path / "a")) == 1


def test_a_sampler_that_changed_behind_the_loops_back_is_noticed(tmp_path, engine, monkeypatch, capsys):
    sample = engine.sample

    def behind(*args, **kwargs):
        engine.version += 1
        return sample(*args, **kwargs)
    monkeypatch.setattr(engine, "sample", behind)
    assert "step 0" in stops(capsys, tmp_path, engine)


def test_sampling_that_is_not_neutral_is_refused(tmp_path, engine, monkeypatch, capsys):
    sample = engine.sample
    monkeypatch.setattr(engine, "sample", lambda *a, **k: sample(*a, **{**k, "temperature": 0.9}))
    assert "step 0" in stops(capsys, tmp_path, engine)


def test_no_check_is_an_assert():
    """python -O drops those."""
    tree = ast.parse((lesson1.ROOT / "train.py").read_text())
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree))


def test_equal_rewards_give_a_step_without_gradient(tmp_path, engine, tiny, monkeypatch):
    monkeypatch.setattr(lesson1, "rewards", lambda task, digits, rollout, tokenizer: torch.full((len(rollout),), 0.1))
    rows = run(tmp_path / "a", engine)
    assert column(rows, "grad_norm") == [0, 0] and column(rows, "loss") == [0, 0]
    after, before = lesson1.load_model(tmp_path / "a" / "checkpoint-2"), lesson1.load_model(tiny)
    assert all(torch.equal(a, b) for a, b in zip(after.parameters(), before.parameters()))


def test_cut_off_responses_are_counted_and_shown(tmp_path, engine, capsys):
    rows = run(tmp_path / "a", engine, "--max-tokens", "3")
    assert min(column(rows, "cut_off")) > 0.9 and column(rows, "reward") == [0, 0]
    assert "cut off 1.00" in capsys.readouterr().out


# ---------------------------------------------------------------- precision
def test_precision_flags_reach_both_sides(tmp_path, engine, tiny):
    """The trainer's dtype on the shared fp32 engine: its error, and a gradient that is still the float32 one (float16's
    is scaled and scaled back); then float16 on both sides, in an engine of its own."""
    flags = {"float32": (), "bfloat16": ("--trainer-dtype", "bfloat16"), "float16": ("--trainer-dtype", "float16"),
             "lm_head": ("--trainer-dtype", "bfloat16", "--lm-head-fp32")}
    rows = {name: run(tmp_path / name, engine, "--prompts", "16", "--steps", "1", *f)[0] for name, f in flags.items()}
    error = {name: float(row["k3"]) for name, row in rows.items()}
    norm = {name: float(row["grad_norm"]) for name, row in rows.items()}
    assert error["float32"] < 1e-10 < error["float16"] < error["bfloat16"] / 10
    assert error["lm_head"] < 0.8 * error["bfloat16"]
    assert abs(norm["float16"] / norm["float32"] - 1) < 1e-2 and abs(norm["bfloat16"] / norm["float32"] - 1) < 5e-2
    both = run(tmp_path / "both", None, "--steps", "1", "--prompts", "16", "--model", str(tiny), "--engine-dtype",
               "float16", "--trainer-dtype", "float16", "--lm-head-fp32")
    assert 1e-10 < float(both[0]["k3"]) < error["bfloat16"] / 10


def test_a_float32_lm_head_under_autocast(trainer, engine, tokenizer):
    """The output layer's own error goes; a deep copy keeps it so."""
    _, prompts = lesson1.make_prompts(lesson1.SUM, tokenizer, 16, np.random.default_rng(0))
    engine.sync(trainer)
    rollout = engine.sample(prompts, 9, seed=0)
    exact = lesson1.logprobs(trainer, rollout)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = lesson1.logprobs(trainer, rollout)
        lesson1.lm_head_in_float32(trainer)
        lm_head = lesson1.logprobs(trainer, rollout)
        copied = copy.deepcopy(trainer)
        assert torch.equal(lesson1.logprobs(copied, rollout), lm_head)
        with torch.no_grad():
            trainer.lm_head.weight.mul_(2)
        assert torch.equal(lesson1.logprobs(copied, rollout), lm_head)
        assert not torch.equal(lesson1.logprobs(trainer, rollout), lm_head)
    error = lambda logp: (logp - exact)[rollout.mask].square().mean()
    assert error(lm_head) < 0.8 * error(rounded)


@pytest.fixture
def released(tmp_path):
    """A model that is not the tiny policy, its weights bfloat16 numbers, as released ones are."""
    torch.manual_seed(0)
    config = lesson1.transformers.Qwen3Config(**{**lesson1.ARCHITECTURE, "vocab_size": 18})
    lesson1.transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "released")
    tokenizer = lesson1.make_tokenizer()
    tokenizer.add_tokens("z")
    tokenizer.save_pretrained(tmp_path / "released")
    return tmp_path / "released"


@pytest.mark.parametrize("flags, engine_dtype, warned", [
    ([], "float32", False), (["--engine-dtype", "bfloat16"], "bfloat16", True),
    (["--engine-dtype", "bfloat16", "--trainer-dtype", "bfloat16"], "bfloat16", False),
    (["--trainer-dtype", "bfloat16"], "float32", False)], ids=lambda x: " ".join(x) if isinstance(x, list) else str(x))
def test_the_precision_contract(flags, engine_dtype, warned, released, tiny, tmp_path, capsys, monkeypatch):
    """Engine and trainer see the same weights by default. One line where flags make the engine lose updates."""
    started = []

    def sampler(path, dtype, **kwargs):
        started.append((dtype, kwargs))
        raise ValueError("far enough")
    monkeypatch.setattr(lesson1, "Sampler", sampler)
    for model, dtype, expected in ((released, engine_dtype, warned), (tiny, "bfloat16", False)):
        given = flags if model is released else []
        capsys.readouterr()
        with pytest.raises(SystemExit):
            train.main(["--model", str(model), "--out", str(tmp_path / "a"), *given])
        out = capsys.readouterr().out
        assert ("|w| / 256" in out) == expected and out.count("\n") == expected
        assert started[-1][0] == dtype and started[-1][1]["kv_cache_gib"] == 2


# ---------------------------------------------------------------- several processes
class Stub:
    """A sampler without vLLM, for a model that vLLM need not know: random responses, log-probs of the model itself."""
    version = 0

    def sync(self, model):
        self.model, self.version = copy.deepcopy(model), self.version + 1

    def sample(self, prompts, max_tokens, seed, group_size, head, rows):
        ids = torch.tensor([p for p in prompts for _ in range(group_size)])
        B, rng = len(ids), torch.Generator().manual_seed(int(np.random.default_rng(seed).integers(2**31)))
        response = torch.randint(0, 10, (B, max_tokens), generator=rng)
        lengths = torch.randint(1, max_tokens + 1, (B,), generator=rng)
        mask, zeros = torch.arange(max_tokens) < lengths[:, None], torch.zeros(B, max_tokens)
        head = torch.zeros(B, max_tokens, 0)
        rollout = lesson1.Rollout(ids, ids >= 0, response, mask, zeros, head.long(), head, lengths < max_tokens,
                                  1.0, True, self.version)[rows]
        T = int(rollout.mask.sum(1).max())
        rollout = lesson1.replace(rollout, **{name: getattr(rollout, name)[:, :T] for name in (
            "ids", "mask", "logp_sampler", "head_ids", "head_logp")})
        return lesson1.replace(rollout, logp_sampler=lesson1.logprobs(self.model, rollout) + 0.1)


def gpt2_run(model, out):
    """Three steps of a GPT-2 without vLLM; its rows and weights."""
    args = Namespace(correction="tis", trainer_dtype="float32", lr=1e-3, prompts=4, group_size=4, max_tokens=6, steps=3, task="sum",
                     seed=0, staleness=1, head=None, replay="none", resync_ess=0.0, advantage="std", out=out)
    out.mkdir(exist_ok=True)
    tokenizer = lesson1.transformers.AutoTokenizer.from_pretrained(model)
    policy = train.train(args, lesson1.load_model(model), tokenizer, Stub(), None)
    torch.save(policy.state_dict(), out / f"policy-{train.RANK}.pt")


CASES = {"none": ["--staleness", "1"], "tis": ["--staleness", "3", "--correction", "tis"],
         "snis": ["--staleness", "3", "--correction", "snis"],
         "dlc": ["--staleness", "3", "--correction", "dlc", "--lr", "3e-3"]}


def several(model, gpt2, out, sampler=None):
    """The same runs in one process or in several."""
    if train.WORLD > 1:
        torch.distributed.init_process_group("gloo")         # before vLLM makes a world of its own
    gpt2_run(gpt2, out / "gpt2")
    sampler = sampler or lesson1.Sampler(model, "float32")
    argv = [*SMALL, "--steps", "4", "--model", str(model)]
    for name, flags in CASES.items():
        train.main([*argv, *flags, "--out", str(out / name)], sampler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "SAVE_EVERY", 2)
        with patch.context() as kill, pytest.raises(Killed):
            interrupt(kill, (train, "report"), 4)
            train.main([*argv, *CASES["tis"], "--out", str(out / "killed")], sampler)
        train.main(["--resume", str(out / "killed")], sampler)


def test_two_processes_make_the_same_run_as_one(tmp_path, engine, uneven, tokenizer):
    """Two gloo ranks, FSDP2, a sampler each: losses, gradient norms and the final weights of one process on the same
    batch; for a model that has no model.layers too; and for a run that is killed and resumed."""
    gpt2, one, two = small_gpt2(tmp_path / "gpt2", tokenizer), tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    code = (f"import sys\nsys.path[:0] = {[str(lesson1.ROOT), str(lesson1.ROOT / 'tests')]}\n"
            "import test_train\ntest_train.draw.draw_run = test_train.lesson3.held_out = lambda *args: {}\n"
            f"test_train.several(*map(test_train.Path, {[str(uneven), str(gpt2), str(two)]}))\n")
    (tmp_path / "ranks.py").write_text(code)
    result = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
                             str(tmp_path / "ranks.py")], capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    several(uneven, gpt2, one, engine)
    assert untimed(read(one / "killed")) == untimed(read(one / "tis"))
    for name in ("gpt2", "killed", *CASES):
        rows, others = untimed(read(one / name)), untimed(read(two / name))
        for a, b in zip(rows, others, strict=True):
            for key in a:
                assert abs(float(a[key]) - float(b[key])) < 1e-5 * max(1, abs(float(a[key]))), (name, key)
        if name != "gpt2":
            a, b = (lesson1.load_model(folder / name / "checkpoint-4") for folder in (one, two))
            assert max((x - y).abs().max() for x, y in zip(a.parameters(), b.parameters())) < 1e-5
            assert a.config.architectures == b.config.architectures == ["Qwen3ForCausalLM"]
    assert sum(column(read(two / "dlc"), "dropped_tokens")) > 0                 # a batch was refused by both
    states = [torch.load(folder / "gpt2" / f"policy-{rank}.pt") for folder, rank in ((one, 0), (two, 0), (two, 1))]
    start = lesson1.load_model(gpt2).state_dict()
    for name, value in states[0].items():
        assert all((value - state[name]).abs().max() < 1e-5 for state in states[1:])
    assert any(not torch.equal(value, start[name]) for name, value in states[0].items())


def test_more_processes_than_gpus_are_refused():
    """Each process takes one GPU. The third of three would take none, and all would wait for it for ever."""
    world = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
    result = subprocess.run([sys.executable, str(lesson1.ROOT / "train.py")], env={**os.environ, **world},
                            capture_output=True, text=True, timeout=60)
    assert result.returncode != 0 and result.stderr.count("\n") == 1 and "more processes than GPUs" in result.stderr


# ---------------------------------------------------------------- the command line
@pytest.mark.parametrize("argv", [
    ["--steps", "0"], ["--steps", "-3"], ["--steps", "x"], ["--prompts", "0"], ["--group-size", "0"],
    ["--group-size", "1"], ["--max-tokens", "0"], ["--lr", "0"], ["--lr", "-1e-3"], ["--lr", "nan"], ["--lr", "inf"],
    ["--staleness", "-1"], ["--seed", "-1"], ["--resync-ess", "1.5"], ["--resync-ess", "-0.1"], ["--resync-ess", "nan"],
    ["--head", "0"], ["--head", "8", "--correction", "tis"], ["--correction", "magic"], ["--replay", "r4"],
    ["--advantage", "best"], ["--no-such-flag"], ["--engine-dtype", "int8"], ["--trainer-dtype", "float8"],
    ["--resume", "/no/such/run"], ["--resume", "/no/such/run", "--steps", "3"], ["--model", "/no/such/model"],
    ["--out", "/proc/nothing/here"], ["--out", __file__]], ids=" ".join)
def test_bad_arguments_are_refused_before_a_model_is_loaded(argv, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lesson1, "Sampler", fail("vLLM was started"))
    monkeypatch.setattr(lesson1, "load_model", fail("a model was loaded"))
    error = refused(capsys, ["--out", tmp_path / "a", *argv])
    last = error.splitlines()[-1]
    assert last.startswith("train.py: error: ") and "Traceback" not in error
    assert argv[0] in last or argv[-1] in last or "/proc/nothing" in last


def test_a_head_beyond_the_vocabulary_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lesson1, "Sampler", fail("vLLM was started"))
    assert "--head" in refused(capsys, ["--head", 18, "--correction", "dlc", "--out", tmp_path / "a"])


def test_help_tells_the_defaults(capsys):
    """The numbers in the help are those of DEFAULTS."""
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    tiny, cpu, gpu = (dict(zip(train.BY_MODEL, row)) for row in train.DEFAULTS.values())
    for name in ("steps", "prompts", "max_tokens", "head"):
        assert f"(tiny {tiny[name]}, cpu {cpu[name]}, gpu {gpu[name]}" in text, name
    assert f"(tiny {tiny['lr']*1e3:g}e-3, cpu {cpu['lr']*1e6:g}e-6, gpu {gpu['lr']*1e6:g}e-6)" in text
    assert f"({tiny['engine_dtype']}; cpu {cpu['engine_dtype']})" in text and gpu["engine_dtype"] == "bfloat16"
    assert f"({tiny['trainer_dtype']}; gpu {gpu['trainer_dtype']})" in text and cpu["trainer_dtype"] == "float32"


def test_a_folder_that_holds_a_run_is_refused(tmp_path, engine, capsys):
    run(tmp_path / "a", engine)
    before = (tmp_path / "a" / "metrics.csv").read_bytes()
    assert "holds a run already" in refused(capsys, [*SMALL, "--out", tmp_path / "a"], engine)
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == before


def test_a_quick_try_does_not_block_the_real_run(tmp_path, engine16, tiny, monkeypatch):
    monkeypatch.setattr(lesson1, "policy", lambda *args: tiny)
    monkeypatch.setattr(lesson1, "ROOT", tmp_path)
    train.main(["--quick"], engine16)
    train.main(SMALL, engine16)
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"none-s0-seed0-quick", "none-s0-seed0"}
    rows = read(tmp_path / "runs" / "none-s0-seed0-quick")
    assert len(rows) == 4 and int(rows[0]["tokens"]) > 8 * 8
    assert all(1e-4 < d < 1e-2 for d in column(rows, "discrepancy"))                    # bf16


def test_every_column_is_in_the_docstring(tmp_path, engine):
    words = train.__doc__.split("columns of metrics.csv")[1].replace(",", " ").split()
    assert set(run(tmp_path / "a", engine, "--steps", "1")[0]) <= set(words)


def test_the_study_makes_what_the_readme_shows(engine16, capsys):
    """Two arms of two steps: the JSON of figures/train.json, from which its picture and its tables are made."""
    study = import_module("figures.study")
    records = [study.run_train(engine16, arm, seed, ["--prompts", "4", "--steps", "2"])
               for arm in ("on-policy", "stale, tis") for seed in (0, 1)]
    made, kept = study.train_json(records), json.loads((lesson1.ROOT / "figures" / "train.json").read_text())
    assert made["seeds"] == [0, 1] and made.keys() <= kept.keys()
    for arm in ("on-policy", "stale, tis"):
        assert made[arm].keys() == kept[arm].keys() and len(made[arm]["curves"]) == 2
        assert made[arm]["reward"]["0"]["low"] <= made[arm]["reward"]["0"]["mean"] <= made[arm]["reward"]["0"]["high"]
        assert all(summary["after"].keys() == {"sampled", "greedy"} for summary in made[arm]["summaries"])
    assert made["on-policy"]["largest lag"] == 0 < made["stale, tis"]["largest lag"]
