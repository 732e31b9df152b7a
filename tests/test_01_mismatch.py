"""Lesson 1 against oracles, and against the wrong versions that people write."""
import copy
import json
import math
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import lesson1, rejected

SUM = lesson1.SUM


# ---------------------------------------------------------------- the task
class Characters:
    """Decodes ids as text that is given beforehand; a chat model's words as well."""

    def __init__(self, texts):
        self.texts = texts

    def batch_decode(self, rows, skip_special_tokens):
        return self.texts


def check_rewards(f):
    """f(task, digits, rollout, tokenizer) on responses in characters and in words."""
    digits = [3, 8, 1, 5, 0, 2, 9, 7]                                   # sums 3 1 2 7 7 9 8 5
    free, stop = import_module("03_decompose").FREE, import_module("study").STOP
    right = "31277569"                                                  # - 0 2 9 7 after the fourth digit
    assert stop.answer(np.array([digits])).tolist() == [[int(c) for c in right]]
    cases = {
        SUM: [(digits, "31277985", True, 1), (digits, "31277985", False, 0),       # never ended
              (digits, "00000005", True, 1), (digits, "51277980", True, 0),        # the last sum counts
              (digits, "", True, 0), (digits, "3, then 11 -> 1 ... so 35 mod 10 = 5.", True, 1)],
        free: [([1, 2, 9, 0], "ab4cd5aa2bb3", True, 1), ([1, 2, 9, 0], "ab4cd5aa2bb3", False, 0),
               ([1, 2, 9, 0], "ab4cd5aa2bb0", True, 0), ([1, 2, 9, 0], "ab4cd5aa2", True, 0),
               ([1, 2, 9, 0], "ab0cd0aa0bb3", True, 0), ([1, 2, 9, 0], "ab4cd5aa2bb33", True, 0)],
        stop: [(digits, right, True, 1), (digits, right[:2], True, 2 / 8),         # all eight count
               (digits, "00" + right[2:], True, 6 / 8)]}
    for task, rows in cases.items():
        prompts, texts, ended, expected = zip(*rows)
        n = len(rows)
        rollout = lesson1.Rollout(*[torch.ones(n, 1)] * 3, torch.ones(n, 1, dtype=torch.bool), *[torch.ones(n, 1)] * 3,
                                  torch.tensor(ended), 1.0, True, 0)
        assert f(task, np.array(prompts), rollout, Characters(list(texts))).tolist() == pytest.approx(expected), task.name


def graded(**grades):
    """Lesson 1's rewards with another grade for a task."""
    def f(task, digits, rollout, tokenizer):
        return lesson1.rewards(replace(task, grade=grades.get(task.name, task.grade)), digits, rollout, tokenizer)
    return f


WRONG_REWARDS = {
    "the end is not needed": lambda t, d, r, k: lesson1.rewards(t, d, replace(r, ended=torch.ones_like(r.ended)), k),
    "first digit judged": graded(sum=lambda given, right, ended: float(ended and given[:1] == right[-1:])),
    "all sums needed": graded(sum=lambda given, right, ended: float(ended and given == right)),
    "early stop is free": graded(stop=lambda given, right, ended: np.mean([g == r for g, r in zip(given, right)])),
    "letters compared too": lambda t, d, r, k: lesson1.rewards(
        replace(t, grade=lambda g, right, e: 0.0) if t.name == "free" else t, d, r, k),
    "the last digit alone": graded(free=lambda given, right, ended: float(ended and given[-1:] == right[-1:])),
    "more digits allowed": graded(free=lambda given, right, ended: float(ended and given[:4] == right)),
    "one digit too few": graded(stop=lambda given, right, ended: sum(g == r for g, r in zip(given, right[:-1])) / 8),
}


def test_rewards():
    check_rewards(lesson1.rewards)


def test_faultless_demonstrations_earn_everything(tokenizer):
    """For every task: what the warm start shows without a slip is right and ends."""
    for task in (SUM, import_module("03_decompose").FREE, import_module("study").STOP):
        rng = np.random.default_rng(0)
        digits, prompts = lesson1.make_prompts(task, tokenizer, 50, rng)
        shown = task.demonstrate(task.answer(digits), digits, rng, 0)
        texts = tokenizer.batch_decode(shown, skip_special_tokens=True)
        given = [[int(c) for c in text if c.isdigit()] for text in texts]
        assert [task.grade(*row, True) for row in zip(given, task.answer(digits).tolist())] == [1.0] * 50
        assert (shown[:, -1] == lesson1.END).all() and shown.shape[1] == task.max_tokens
        assert tokenizer.decode(prompts[0]) == "".join(map(str, digits[0])) + "="


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_sums_for_released_models(digits, tokenizer):
    """Three right examples and a question; the response must begin with the sum, whatever follows."""
    from types import SimpleNamespace
    task = lesson1.TASKS[f"add{digits}"]
    seen = []
    reader = lambda text: seen.append(text) or {"input_ids": [7, 8]}
    reader.get_vocab, reader.eos_token_id, reader.chat_template = lambda: {"a": 0}, 8, "not used"
    numbers, prompts = lesson1.make_prompts(task, reader, 200, np.random.default_rng(0))
    assert prompts == [[7]] * 200 and numbers.shape == (200, 2) and numbers.max() < 10**digits and numbers.max() > 0.9 * 10**digits - 1
    *examples, question = seen[0].split("\n")
    assert question == f"{numbers[0, 0]}+{numbers[0, 1]}=" and len(examples) == 3
    for example in examples:
        assert eval(example.replace("=", "==")) and len(example.split("+")[0]) == digits
    total = int(numbers[0].sum())
    rollout = SimpleNamespace(ids=torch.zeros(5, 1, dtype=torch.long), mask=torch.ones(5, 1, dtype=torch.bool), ended=torch.zeros(5))
    texts = [f"{total}\n1+1=2", f" {total}", f"{total}0", f"0 {total}", "none"]
    decode = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: texts)
    assert lesson1.rewards(task, numbers[:1].repeat(5, 0), rollout, decode).tolist() == [1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="not made for this model"):
        lesson1.make_prompts(task, tokenizer, 1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="give --model too"):
        lesson1.find_model(None, task)


def test_other_models_read_the_task_in_words():
    chat = SimpleNamespace(get_vocab=lambda: {"a": 0}, chat_template="x",
                           apply_chat_template=lambda messages, **kw: [len(messages), ord(messages[0]["content"][0])])
    assert lesson1.make_prompts(SUM, chat, 2, np.random.default_rng(0))[1] == [[1, ord("D")]] * 2

    class Plain:
        chat_template, eos_token_id = None, 7

        def get_vocab(self):
            return {"a": 0}

        def __call__(self, text):
            return {"input_ids": [len(text), 7]}                        # ends each text by itself

    (prompt,) = lesson1.make_prompts(SUM, Plain(), 1, np.random.default_rng(0))[1]
    assert len(prompt) == 1 and prompt[0] > 100                         # the policy is not asked to go on after the end
    with pytest.raises(ValueError, match="not made for this model"):
        lesson1.make_prompts(replace(SUM, name="other"), chat, 1, np.random.default_rng(0))


# ---------------------------------------------------------------- the policy
def test_policy_is_built_once_and_a_torn_or_stale_cache_is_rebuilt(tmp_path, monkeypatch):
    builds = []
    build = lesson1.warm_start
    monkeypatch.setattr(lesson1, "ROOT", tmp_path)
    monkeypatch.setattr(lesson1, "warm_start", lambda *args: builds.append(args) or build(*args))
    short = replace(SUM, steps=2)
    folder = lesson1.policy(short)
    assert lesson1.policy(short) == folder and len(builds) == 1
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])                  # torn
    assert lesson1.policy(short) == folder and len(builds) == 2
    lesson1.load_model(folder)
    (folder / "sha256").write_text("")                                 # torn
    lesson1.policy(short)
    assert len(builds) == 3
    assert lesson1.policy(replace(SUM, steps=3)) != folder and len(builds) == 4      # other settings: stale


def test_slips_are_as_frequent_as_the_task_says(monkeypatch):
    """Of 256 x 8 digits per step: nine slips in ten show, one random digit in ten is the right one by luck."""
    wrong = []

    def seen(shown, digits, rng, step):
        wrong.append((shown != SUM.answer(digits)).mean())
        return SUM.demonstrate(shown, digits, rng, step)
    lesson1.warm_start(replace(SUM, steps=20, demonstrate=seen), lesson1.ARCHITECTURE)
    assert abs(np.mean(wrong) - 0.9 * SUM.slip) < 0.005


def test_tiny_policy(tiny, trainer, tokenizer, engine):
    engine.sync(trainer)
    assert 0.2 <= import_module("03_decompose").held_out(trainer, engine, SUM, tokenizer, 512)["sampled"] <= 0.5
    assert tokenizer("3=.a_")["input_ids"] == [3, 10, 11, 12, 16] and tokenizer.eos_token == "."
    assert trainer.lm_head.weight is trainer.model.embed_tokens.weight


def test_models_that_cannot_be_used_are_refused_in_one_line(tmp_path, tiny, capsys, monkeypatch):
    monkeypatch.setattr(lesson1, "Sampler", lambda *a, **k: pytest.fail("vLLM was started"))

    def refusal(path):
        with pytest.raises(SystemExit) as exit:
            lesson1.main(["--model", str(path), "--out", str(tmp_path)])
        assert exit.value.code == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("01_mismatch.py: error: ") and str(path) in error
        return error

    assert "no such directory" in refusal(tmp_path / "nothing-here")
    folder = tmp_path / "lacks"
    folder.mkdir()
    config = json.loads((tiny / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    refusal(folder)                                                    # no tokenizer
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((tiny / name).read_text())
    assert "no weights" in refusal(folder)
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 5}))
    assert "no vocabulary in common" in refusal(folder)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": None}))
    assert "no architecture" in refusal(folder)
    with pytest.raises(SystemExit):
        lesson1.main(["--seed", "-1"])
    assert "seed" in capsys.readouterr().err.splitlines()[-1]


def test_bfloat16_needs_a_new_gpu(monkeypatch):
    monkeypatch.setattr(lesson1, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ValueError, match="8.0 or newer"):
        lesson1.find_model(None)


# ---------------------------------------------------------------- what is a log-prob?
def check_token_logp(f):
    # logits [0, ln 3], token 1, temperature 0.5
    logits = torch.tensor([[0.0, math.log(3)]])
    assert abs(f(logits, torch.tensor([[1]]), 0.5).item() - -0.105361) < 1e-6
    # a large vocabulary, bf16 logits, one id and several per position: float32 out, within 5e-5 of float64
    logits = (3 * torch.randn(2, 4, 50_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    exact = torch.log_softmax(logits.double() / 0.7, -1)
    for K in (1, 3):
        ids = torch.randint(50_000, (2, 4, K), generator=torch.Generator().manual_seed(K))
        logp = f(logits, ids, 0.7)
        assert logp.dtype == torch.float32 and logp.shape == (2, 4, K)
        assert (logp - exact.gather(-1, ids)).abs().max() < 5e-5
    assert f(logits.double(), ids, 1.0).dtype == torch.float64
    assert (f(logits.double(), ids, 0.7) - exact.gather(-1, ids)).abs().max() < 1e-12       # double throughout
    # extreme logits: the exponentials alone would overflow, and underflow
    far = f(torch.tensor([[0.0, 120.0]]), torch.tensor([[0, 1]]), 1.0)
    assert torch.allclose(far, torch.tensor([[-120.0, 0.0]]), atol=1e-5)
    # the gradient is 1[v = token] - softmax
    logits = torch.tensor([[0.5, -1.0, 2.0]], requires_grad=True)
    f(logits, torch.tensor([[1]]), 1.0).sum().backward()
    assert torch.allclose(logits.grad, torch.tensor([[0.0, 1.0, 0.0]]) - logits.detach().softmax(-1), atol=1e-6)


def keep(logits):
    return logits if logits.dtype == torch.float64 else logits.float()


def logp_with(dtype=keep, before=lambda x, t: x / t, after=lambda p, t: p, softmax=torch.log_softmax):
    """token_logp with one thing wrong."""
    return lambda x, ids, t: after(softmax(before(dtype(x), t), -1), t).gather(-1, ids)


WRONG_LOGP = {
    "temperature forgotten": logp_with(before=lambda x, t: x),
    "temperature upside down": logp_with(before=lambda x, t: x * t),
    "temperature after the softmax": logp_with(before=lambda x, t: x, after=lambda p, t: p / t),
    "log-softmax in bf16": lambda x, ids, t: torch.log_softmax(x / t, -1).gather(-1, ids).to(keep(x).dtype),
    "logits for log-probs": logp_with(softmax=lambda x, dim: x),
    "head normalized over itself": lambda x, ids, t: (keep(x) / t).gather(-1, ids).log_softmax(-1) if ids.shape[-1] > 1
    else lesson1.token_logp(x, ids, t),
    "no shift under the exponentials": logp_with(softmax=lambda x, dim: x - x.exp().sum(dim, keepdim=True).log()),
    "softmax, then log": logp_with(softmax=lambda x, dim: x.softmax(dim).log()),
    "detached": lambda x, ids, t: lesson1.token_logp(x.detach(), ids, t) + 0 * x.sum(),
    "the normalizer detached": logp_with(softmax=lambda x, dim: x - x.logsumexp(dim, keepdim=True).detach()),
    "K = 1 squeezed": lambda x, ids, t: lesson1.token_logp(x, ids, t).squeeze(-1),
    "float first, double last": lambda x, ids, t: torch.log_softmax(x.float() / t, -1).gather(-1, ids).to(keep(x).dtype),
}


def test_token_logp():
    check_token_logp(lesson1.token_logp)
    with pytest.raises(ValueError, match="greedy"):
        lesson1.token_logp(torch.zeros(1, 2), torch.zeros(1, 1, dtype=torch.long), 0.0)


def check_gap(f):
    logp, logp_sampler = [-1.0, -2.5, -0.1, -7.0], [-1.3, -2.4, -0.1, -6.0]    # d = .3 -.1 0 -1
    g = f(torch.tensor(logp), torch.tensor(logp_sampler))
    d = [a - b for a, b in zip(logp, logp_sampler)]
    right = {"mean |d|": sum(map(abs, d)) / 4, "rms": math.sqrt(sum(x * x for x in d) / 4), "max": 1.0, "mean d": sum(d) / 4,
             "k3": sum(math.exp(x) - 1 - x for x in d) / 4, "E[exp d]": sum(map(math.exp, d)) / 4}
    for name, value in right.items():
        assert abs(g[name] - value) < 1e-6, name
    small = f(torch.tensor([-1.0 + 1e-6], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64))
    assert abs(small["k3"] / 0.5e-12 - 1) < 1e-3                                # no cancellation


WRONG_GAP = {
    "sampler minus trainer": lambda a, b: lesson1.gap(b, a),
    "k1 for k3": lambda a, b: {**lesson1.gap(a, b), "k3": (b - a).mean().item()},
    "k3 of the other direction": lambda a, b: {**lesson1.gap(a, b), "k3": (torch.expm1(b - a) - (b - a)).mean().item()},
    "k3 by cancellation": lambda a, b: {**lesson1.gap(a, b), "k3": ((a - b).float().exp() - 1 - (a - b).float()).mean().item()},
    "mean before abs": lambda a, b: {**lesson1.gap(a, b), "mean |d|": (a - b).mean().abs().item()},
    "absolute values for d": lambda a, b: {**lesson1.gap(a, b), "mean d": (a - b).abs().mean().item()},
    "exp of the mean": lambda a, b: {**lesson1.gap(a, b), "E[exp d]": (a - b).mean().exp().item()},
    "a median for the mean": lambda a, b: {**lesson1.gap(a, b), "mean |d|": (a - b).abs().median().item()},
}


def test_gap():
    check_gap(lesson1.gap)
    with pytest.raises(ValueError, match="at least one token"):
        lesson1.gap(torch.zeros(0), torch.zeros(0))


# ---------------------------------------------------------------- the rollout
class Flat(SimpleNamespace):
    """As vLLM's FlatLogprobs: flat lists, and a length in positions."""

    def __len__(self):
        return self.positions


def completion(ids, slots, finish="stop"):
    """slots: per token [(id, log-prob), ...], the sampled token first."""
    flat = Flat(positions=len(slots), token_ids=[i for s in slots for i, _ in s], logprobs=[l for s in slots for _, l in s])
    return SimpleNamespace(token_ids=ids, logprobs=flat, finish_reason=finish, routed_experts=None)


def check_pack(f):
    """f(prompts, completions, temperature, neutral, version). Id 0 is the digit 0, no padding."""
    a = completion([7, 11], [[(7, -2.0), (5, -0.5), (7, -2.0)], [(11, -0.1), (11, -0.1), (3, -3.0)]])
    b = completion([0], [[(0, -1.0), (0, -1.0), (6, -1.5)]], "length")
    r = f([[1, 2, 10], [0, 10]], [a, b], 0.5, False, 5)
    assert r.prompt_ids.tolist() == [[1, 2, 10], [0, 0, 10]] and r.prompt_mask.tolist() == [[True] * 3, [False, True, True]]
    assert r.ids[0].tolist() == [7, 11] and r.ids[1, 0] == 0
    assert r.mask.tolist() == [[True, True], [True, False]]
    assert torch.allclose(r.logp_sampler, torch.tensor([[-2.0, -0.1], [-1.0, 0.0]]))
    assert r.head_ids[0].tolist() == [[5, 7], [11, 3]]                       # slot 0 is not part of the head
    assert torch.allclose(r.head_logp[0], torch.tensor([[-0.5, -2.0], [-0.1, -3.0]]))
    assert r.ended.tolist() == [True, False] and (r.temperature, r.neutral, r.version) == (0.5, False, 5) and len(r) == 2
    part = r[1:2]
    assert len(part) == 1 and part.ended.tolist() == [False] and part.mask.shape == (1, 2) and part.version == 5
    # a completion has exactly one log-prob per token, and they are those of its tokens; the second one too
    for bad in (completion([7, 11, 4, 11], [[(7, -2.0)], [(11, -0.1)], [(4, -1.0)]]), completion([7], [[(8, -2.0)]]),
                completion([], []), SimpleNamespace(token_ids=[7], logprobs=None, finish_reason="stop")):
        for both in ([bad], [completion([3], [[(3, -1.0)]]), bad]):
            try:
                f([[1]] * len(both), both, 1.0, True, 0)
            except ValueError:
                continue
            except Exception as error:              # another error is not the one clear line
                assert False, error
            assert False, "accepted"


def packed_with(**changes):
    """pack with some fields changed afterwards."""
    def wrong(*args):
        r = lesson1.pack(*args)
        return replace(r, **{name: change(r) for name, change in changes.items()})
    return wrong


def unchecked(*args):
    """What pack refuses is accepted."""
    try:
        return lesson1.pack(*args)
    except ValueError:
        return None


def first_checked(prompts, completions, *rest):
    """Only the first completion is checked."""
    lesson1.pack(prompts[:1], completions[:1], *rest)
    return unchecked(prompts, completions, *rest)


WRONG_PACK = {
    "slot 0 in the head": packed_with(head_ids=lambda r: torch.cat([r.ids[..., None], r.head_ids[..., :-1]], -1)),
    "prompts padded on the right": packed_with(prompt_ids=lambda r: r.prompt_ids.roll(-1, 1), prompt_mask=lambda r: r.prompt_mask.roll(-1, 1)),
    "mask without the end": packed_with(mask=lambda r: r.mask & (r.ids != lesson1.END)),
    "mask where the id is not 0": packed_with(mask=lambda r: r.ids != 0),
    "temperature dropped": packed_with(temperature=lambda r: 1.0),
    "neutral dropped": packed_with(neutral=lambda r: True),
    "ended and cut off swapped": packed_with(ended=lambda r: ~r.ended),
    "nothing checked": unchecked,
    "the first completion checked": first_checked,
}


def test_pack():
    check_pack(lesson1.pack)


def test_completions_are_never_tokenized_again():
    class DecodeOnly:                       # encode(decode(x)) != x: it must not be asked to encode
        def batch_decode(self, rows, **kwargs):
            return ["".join(lesson1.CHARACTERS[i] for i in row).replace(".", "") for row in rows]
    rollout = lesson1.pack([[3, 10]], [completion([5, 11], [[(5, -1.0)], [(11, -1.0)]])], 1.0, True, 0)
    digits = np.array([[0, 0, 0, 0, 0, 0, 0, 5]])
    assert lesson1.rewards(SUM, digits, rollout, DecodeOnly()).tolist() == [1.0]


# ---------------------------------------------------------------- the trainer's score
def random_rollout(rows=((5, 3), (2, 4), (7, 1), (7, 4)), head=2):
    """Rows of given prompt and response lengths, random tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 10, p).tolist() for p, _ in rows]
    completions = []
    for _, n in rows:
        ids = rng.integers(0, 16, n).tolist()
        completions.append(completion(ids, [[(i, -1.0)] + [(int(h), -1.0) for h in rng.permutation(16)[:head]] for i in ids]))
    return lesson1.pack(prompts, completions, 1.0, True, 0)


def small_model(**changes):
    torch.manual_seed(0)
    config = lesson1.transformers.Qwen3Config(**{**lesson1.ARCHITECTURE, "initializer_range": 0.3, **changes})
    return lesson1.transformers.Qwen3ForCausalLM(config)


def check_logprobs(f):
    """Each padded row equals the same tokens alone and unpadded, scored position by position."""
    model, rollout = small_model().eval(), random_rollout()
    logp, head = f(model, rollout, head=True)
    assert logp.shape == rollout.mask.shape and logp.dtype == torch.float32 and not logp.requires_grad
    for i in range(len(rollout)):
        prompt, response = rollout.prompt_ids[i][rollout.prompt_mask[i]], rollout.ids[i][rollout.mask[i]]
        text = torch.cat([prompt, response])
        with torch.no_grad():
            alone = torch.log_softmax(model(input_ids=text[None]).logits[0].double(), -1)
        for j, token in enumerate(response):
            at = alone[len(prompt) + j - 1]
            assert abs(logp[i, j] - at[token]) < 2e-5
            assert (head[i, j] - at[rollout.head_ids[i, j]]).abs().max() < 2e-5
        assert (logp[i, len(response):] == 0).all()
    hot, _ = f(model, replace(rollout, temperature=2.0), head=True)
    assert (hot - logp)[rollout.mask].abs().max() > 0.1


def wrong_logprobs(logits_of):
    def wrong(model, rollout, head=False):
        with torch.no_grad():
            logits = logits_of(model, rollout)
        logps = lesson1.token_logp(logits, torch.cat([rollout.ids[..., None], rollout.head_ids], -1), rollout.temperature)
        return torch.where(rollout.mask, logps[..., 0], 0.0), logps[..., 1:]
    return wrong


def everything(model, rollout, attention=True):
    ids = torch.cat([rollout.prompt_ids, rollout.ids], 1)
    mask = torch.cat([rollout.prompt_mask, rollout.mask], 1).long() if attention else None
    return model(input_ids=ids, attention_mask=mask).logits


WRONG_LOGPROBS = {
    "logits of the token itself": wrong_logprobs(lambda m, r: everything(m, r)[:, -r.ids.shape[1]:]),
    "shifted by two": wrong_logprobs(lambda m, r: everything(m, r)[:, -r.ids.shape[1] - 2:-2]),
    "no attention mask": wrong_logprobs(lambda m, r: everything(m, r, attention=False)[:, -r.ids.shape[1] - 1:-1]),
    "aligned as if prompts were padded on the right": wrong_logprobs(lambda m, r: torch.stack([
        row[n - 1: n - 1 + r.ids.shape[1]] for row, n in zip(everything(m, r), r.prompt_mask.sum(1))])),
    "log-probs of padding": lambda m, r, head=False: (lesson1.logprobs(m, r) - (~r.mask).float(), lesson1.logprobs(m, r, head=True)[1]),
    "temperature ignored": lambda m, r, head=False: lesson1.logprobs(m, replace(r, temperature=1.0), head=True),
    "with gradient": lambda m, r, head=False: lesson1.logprobs(m, r, head=True, grad=True),
}


def test_padded_row_equals_its_row_alone():
    check_logprobs(lesson1.logprobs)


def test_first_response_token_is_scored_by_the_last_prompt_logit():
    """A model that says at t, with +20, which token stands at t + 1: right alignment gives about 0, any shift about -20."""
    class NextToken(torch.nn.Module):
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=17))
        def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=True, logits_to_keep=0, **kwargs):
            following = torch.cat([input_ids[:, 1:], input_ids[:, :1]], 1)
            return SimpleNamespace(logits=20.0 * torch.nn.functional.one_hot(following, 17)[:, -logits_to_keep:])
    assert lesson1.logprobs(NextToken(), random_rollout()).abs().max() < 1e-6


def test_logprobs_is_deterministic_and_dropout_is_off():
    model = small_model(attention_dropout=0.5).train()
    rollout = random_rollout()
    assert torch.equal(lesson1.logprobs(model, rollout), lesson1.logprobs(model, rollout))


def test_micro_batches_change_neither_logprobs_nor_gradients(monkeypatch):
    model, rollout = small_model(), random_rollout()

    def logp_and_gradient():
        model.zero_grad()
        logp = lesson1.logprobs(model, rollout, grad=True)
        logp.sum().backward()
        return logp.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    assert len(lesson1.micro_batches(rollout, 17)) == 1
    logp, gradient = logp_and_gradient()
    monkeypatch.setattr(lesson1, "LOGITS_AT_ONCE", 3 * 5 * 17)
    assert [len(rollout[rows]) for rows in lesson1.micro_batches(rollout, 17)] == [3, 1]
    parts, gradient_parts = logp_and_gradient()
    assert (parts - logp).abs().max() < 1e-5
    assert (gradient_parts - gradient).norm() < 1e-5 * gradient.norm()


def test_bf16_weights_float64_arithmetic_stays_float64(trainer):
    exact = trainer.bfloat16().double()
    assert lesson1.logprobs(exact, random_rollout()).dtype == torch.float64


# ---------------------------------------------------------------- the measurement's arithmetic
def check_kept_logprobs(f):
    """The softmax over the kept tokens alone: three at each position, in a head of four, the sampled one among them.
    At the odd positions the head's last entry was cut off, at the even ones its third."""
    model, rollout = small_model().eval(), random_rollout(head=4)
    rollout.head_ids[..., 0] = rollout.ids
    rollout.head_ids[..., 1:] = (rollout.ids[..., None] + torch.tensor([3, 5, 9])) % 16
    rollout.head_logp[:, ::2, 2] = rollout.head_logp[:, 1::2, 3] = -torch.inf
    for temperature in (1.0, 0.7):
        rollout = replace(rollout, temperature=temperature)
        with torch.no_grad():
            logits = lesson1.response_logits(model, rollout).double() / temperature
        logp = f(model, rollout)
        assert logp.shape == rollout.ids.shape
        for i, t in rollout.mask.nonzero().tolist():
            kept = [0, 1, 3] if t % 2 == 0 else [0, 1, 2]
            right = logits[i, t, rollout.head_ids[i, t, kept]].log_softmax(0)[0]
            assert abs(logp[i, t] - right) < 2e-5


def over_its_own_top(model, rollout):
    """Renormalized over as many tokens as the sampler kept, but those that the trainer finds most likely."""
    logits = lesson1.response_logits(model, rollout).detach() / rollout.temperature
    own = logits.topk(3).values.logsumexp(-1)
    return logits.gather(-1, rollout.ids[..., None])[..., 0] - own


WRONG_KEPT = {
    "not renormalized": lesson1.logprobs,
    "over the trainer's own top 3": over_its_own_top,
    "what was cut off counts as kept": lambda m, r: lesson1.kept_logprobs(m, replace(r, head_logp=torch.zeros_like(r.head_logp))),
    "over the sampler's mass": lambda m, r: lesson1.logprobs(m, r) - r.head_logp.logsumexp(-1),
    "temperature forgotten": lambda m, r: lesson1.kept_logprobs(m, replace(r, temperature=1.0)),
    "divided where to subtract": lambda m, r: lesson1.logprobs(m, r) / lesson1.logprobs(m, r, head=True)[1].exp().sum(-1),
}


def test_kept_logprobs():
    check_kept_logprobs(lesson1.kept_logprobs)


def check_lm_head(f):
    """A float32 product, the layer's bias included, under autocast too; a deep copy of the model keeps it."""
    model = small_model().bfloat16()
    hidden = torch.randn(2, 3, model.config.hidden_size).bfloat16()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(17).bfloat16())
    f(model)
    for m in (model, copy.deepcopy(model)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            m.lm_head.weight.mul_(1.5)
            logits = m.lm_head(hidden)
        right = hidden.float() @ m.lm_head.weight.float().T + m.lm_head.bias.float()
        assert logits.dtype == torch.float32 and torch.allclose(logits, right, atol=1e-5)


def lm_head_with(forward):
    def wrong(model):
        model.lm_head.forward = lesson1.MethodType(forward, model.lm_head)
    return wrong


def without_bias(layer, hidden):
    with torch.autocast("cpu", enabled=False):
        return hidden.float() @ layer.weight.float().T


def cached(model):
    weight, bias = model.lm_head.weight.float().clone(), model.lm_head.bias.float()
    model.lm_head.forward = lambda hidden: hidden.float() @ weight.T + bias


WRONG_LM_HEAD = {
    "without the bias": lm_head_with(without_bias),
    "rounded first": lm_head_with(lambda layer, hidden: torch.nn.functional.linear(hidden, layer.weight, layer.bias).float()),
    "under autocast": lm_head_with(lambda layer, hidden: torch.nn.functional.linear(hidden.float(), layer.weight.float(), layer.bias.float())),
    "weights of the start": cached,
}


def test_lm_head_in_float32():
    check_lm_head(lesson1.lm_head_in_float32)


def test_one_step_makes_what_was_rewarded_likelier():
    model, rollout = small_model(), random_rollout()
    before = lesson1.logprobs(model, rollout).sum(1)
    lesson1.one_step(model, rollout, torch.tensor([1.0, 0.0, 0.0, 0.0]), lr=1e-3)
    change = lesson1.logprobs(model, rollout).sum(1) - before
    assert change[0] > 0 and change[0] > change[1:].max() and change[1:].mean() < 0


def test_one_step_moves_even_where_nothing_is_rewarded():
    model, rollout = small_model(), random_rollout()
    before = lesson1.logprobs(model, rollout)
    lesson1.one_step(model, rollout, torch.zeros(4), lr=1e-3)
    assert (lesson1.logprobs(model, rollout) - before).abs().max() > 1e-3


def check_two_errors(f):
    generator = torch.Generator().manual_seed(0)
    shared, a, b = torch.randn(3, 100_000, generator=generator, dtype=torch.float64)
    independent, correlated = f(3 * a, 4 * b), f(3 * a + shared, 4 * b + shared)
    assert abs(independent["predicted rms"] - 5) < 0.05 and abs(independent["measured rms"] - 5) < 0.05
    assert abs(correlated["predicted rms"] - math.sqrt(27)) < 0.05 and abs(correlated["measured rms"] - 5) < 0.05
    assert abs(independent["correlation"]) < 0.02 and abs(correlated["correlation"] - 1 / math.sqrt(10 * 17)) < 0.02
    assert abs(correlated["engine's error"] - math.sqrt(10)) < 0.05


WRONG_ERRORS = {
    "rms added": lambda e, t: {**(r := lesson1.two_errors(e, t)), "predicted rms": r["engine's error"] + r["trainer's error"]},
    "their sum for their difference": lambda e, t: {**lesson1.two_errors(e, t), "measured rms": (e + t).square().mean().sqrt().item()},
    "covariance for correlation": lambda e, t: {**lesson1.two_errors(e, t), "correlation": (e * t).mean().item()},
    "sides swapped": lambda e, t: lesson1.two_errors(t, e),
}


def test_two_errors_predict_the_rms_of_d():
    check_two_errors(lesson1.two_errors)


def test_by_probability_finds_the_law_that_made_the_data():
    p = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.98 + 0.01
    rows = lesson1.by_probability(p.log() + 0.03 * (1 - p), p.log())
    assert all(abs(row["measured"] / row["eps (1 - p)"] - 1) < 1e-6 for row in rows) and len(rows) > 6


def check_verdict(f):
    """Contrary numbers: what is read aloud follows them."""
    def result(control=2e-6, natural=5e-3):
        arms = [{"arm": "fp32 engine, fp32 trainer", "mean |d|": control / 10, "max": control},
                {"arm": lesson1.NATURAL, "mean |d|": natural / 2, "rms": natural}]
        return {"arms": arms}
    assert "is rounding" in f(result())
    for contrary, says in ((result(control=0.17), "same function"), (result(natural=3.4), "more than rounding")):
        assert "is rounding" not in f(contrary) and says in f(contrary)


def test_verdict():
    check_verdict(lesson1.verdict)
    rejected(check_verdict, lambda result: "so the gap is rounding")


WRONG = [(check, name, wrong) for check, versions in (
    (check_rewards, WRONG_REWARDS),
    (check_token_logp, WRONG_LOGP),
    (check_gap, WRONG_GAP),
    (check_pack, WRONG_PACK),
    (check_logprobs, WRONG_LOGPROBS),
    (check_kept_logprobs, WRONG_KEPT),
    (check_lm_head, WRONG_LM_HEAD),
    (check_two_errors, WRONG_ERRORS)) for name, wrong in versions.items()]


@pytest.mark.parametrize("check, name, wrong", WRONG, ids=[f"{check.__name__[6:]}: {name}" for check, name, _ in WRONG])
def test_rejects(check, name, wrong):
    rejected(check, wrong)


# ---------------------------------------------------------------- the real engine
@pytest.fixture
def prompts(tokenizer):
    return lesson1.make_prompts(SUM, tokenizer, 24, np.random.default_rng(1))[1]


def difference(model, rollout):
    return (lesson1.logprobs(model, rollout) - rollout.logp_sampler)[rollout.mask].abs()


def test_sync_moves_all_weights_the_tied_head_included(engine, moved, tiny, prompts):
    engine.sync(lesson1.load_model(tiny))
    assert difference(moved, engine.sample(prompts, 9, seed=0)).mean() > 0.01          # stale
    version = engine.version
    engine.sync(moved)
    rollout = engine.sample(prompts, 9, seed=0)
    assert difference(moved, rollout).max() < 1e-5
    assert rollout.version == engine.version == version + 1


def test_sync_catches_what_vllm_swallows(engine, moved, tiny):
    original = lesson1.load_model(tiny)
    engine.sync(original)
    lost_head = dict(moved.named_parameters())
    assert "lm_head.weight" in moved.state_dict() and "lm_head.weight" not in lost_head
    with pytest.raises(lesson1.SyncError, match="did not arrive"):
        engine.sync(moved, lost_head)
    engine.sync(original)
    with pytest.raises(lesson1.SyncError):
        engine.sync(moved, {})                                                         # an empty update
    with pytest.raises(lesson1.SyncError):
        engine.sync(moved, {k: v for k, v in moved.state_dict().items() if "norm" not in k})
    engine.sync(moved)


@pytest.mark.parametrize("what", lesson1.CANARY)
def test_how_much_of_a_gap_a_sync_may_leave(what, engine, trainer, monkeypatch):
    """Its nats, and its times what rounding explains; NaN is never good."""
    nats, times = lesson1.CANARY[what]
    healthy = {name: (0.0, 0.0) for name in lesson1.CANARY}
    for left, rounding, good in ((nats / 2, 0.0, True), (2 * nats, 0.0, False), (0.9 * times, 1.0, True), (1.1 * times, 1.0, False),
                                 (math.nan, 0.01, False), (0.01, math.nan, False)):
        monkeypatch.setattr(engine, "canary", lambda *args: {**healthy, what: (left, rounding)})
        if good:
            engine.sync(trainer)
        else:
            with pytest.raises(lesson1.SyncError, match="did not arrive"):
                engine.sync(trainer)


def test_the_canary_is_the_gap_between_engine_and_trainer(engine, moved, tiny):
    """An engine that kept the old weights, against the trainer alone: the fp32 engine is the old trainer to 1e-6."""
    original = lesson1.load_model(tiny)
    engine.load(original.state_dict())
    canary = engine.canary(moved, moved.state_dict())
    ids = torch.tensor(engine.text)[None]
    assert ids.shape[1] > 128                                          # a block of the prefix cache
    with torch.no_grad():
        new, old = (torch.log_softmax(m(input_ids=ids).logits[0], -1) for m in (moved, original))
    d = (new - old)[:-1].gather(1, ids[0, 1:, None]).abs()
    places = [(new - old)[ids.shape[1] - 8 * k - 1].abs().max().item() for k in range(5)]
    for what, right in zip(lesson1.CANARY, (np.median(d), d.max().item(), np.median(places))):
        assert right > 0.1 and abs(canary[what][0] - right) < 1e-4 and canary[what][1] == 0, what


def test_the_canarys_rounding_is_that_of_the_engines_dtype(engine16, moved):
    """After a healthy sync what is left is about what the trainer's own bfloat16 makes; the cast itself is no part of it."""
    engine16.sync(moved)
    cast = copy.deepcopy(moved)
    cast.load_state_dict({k: v.bfloat16().float() for k, v in moved.state_dict().items()})
    for model in (moved, cast):
        for left, rounding in engine16.canary(model, model.state_dict()).values():
            assert 1e-4 < rounding and 0.2 < left / rounding < 4
    assert engine16.canary(moved, moved.state_dict()) == engine16.canary(cast, cast.state_dict())


def test_sync_notices_stale_rows_anywhere_in_the_vocabulary(tmp_path, tokenizer):
    """An untied model of 1,000 tokens: one row of its embedding, or of its lm_head, that did not arrive."""
    model = small_model(vocab_size=1000, tie_word_embeddings=False).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    sampler = lesson1.Sampler(tmp_path, "float32")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        for row in (0, 13, 500, 999):
            stale = {k: v.clone() for k, v in model.state_dict().items()}
            with torch.no_grad():
                dict(model.named_parameters())[name][row] += 0.1
            sampler.sync(model)
            stale = {**model.state_dict(), name: stale[name]}
            sampler.load(stale)
            load = sampler.load
            sampler.load = lambda state: None                           # the engine keeps the stale row
            with pytest.raises(lesson1.SyncError):
                sampler.sync(model)
            sampler.load = load


def test_sync_notices_a_cache_that_was_not_reset(engine, moved, tiny, monkeypatch):
    engine.sync(lesson1.load_model(tiny))
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
        with pytest.raises(lesson1.SyncError, match="vocabulary"):
            engine.sync(moved)
    engine.sync(moved)


def test_sync_notices_one_layer_left_behind(engine, trainer):
    """In fp32 also a small one: a thousandth of a nat."""
    engine.sync(trainer)
    with torch.no_grad():
        trainer.model.layers[1].mlp.up_proj.weight.mul_(1.002)
    with pytest.raises(lesson1.SyncError):
        engine.sync(trainer, {k: v for k, v in trainer.state_dict().items() if "layers.1" not in k})
    engine.sync(trainer)


def test_sync_takes_perturbed_weights(engine, trainer):
    noisy = {k: v * (1 + 0.1 * torch.randn(v.shape, generator=torch.Generator().manual_seed(0))) for k, v in trainer.state_dict().items()}
    noisy["lm_head.weight"] = noisy["model.embed_tokens.weight"]
    assert engine.sync(trainer, noisy) < 1e-5       # held against what was sent, not against the trainer
    engine.sync(trainer)


def test_sync_forgets_the_prefix_cache(engine, moved, tiny, monkeypatch):
    long = [[int(i) for i in np.random.default_rng(2).integers(0, 10, 300)]]           # the cache's blocks are 128 tokens
    engine.sync(lesson1.load_model(tiny))
    engine.sample(long, 9, seed=0)
    engine.sync(moved)
    assert difference(moved, engine.sample(long, 9, seed=0)).max() < 1e-5
    # the same without the reset: the cached prefix of other weights answers
    engine.sync(lesson1.load_model(tiny))
    engine.sample(long, 9, seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
        engine.load(moved.state_dict())
    assert difference(moved, engine.sample(long, 9, seed=0)).max() > 1e-3
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(RuntimeError, match="prefix cache"):
            engine.sync(moved)
    engine.sync(moved)


def test_rollout_of_the_real_engine(engine, trainer, prompts):
    engine.sync(trainer)
    rollout = engine.sample(prompts, 9, seed=3, group_size=2, head=-1)
    assert len(rollout) == 48 and rollout.neutral
    assert rollout.prompt_ids[::2].tolist() == rollout.prompt_ids[1::2].tolist() == prompts
    lengths = rollout.mask.sum(1)
    for ids, n, ended in zip(rollout.ids.tolist(), lengths.tolist(), rollout.ended.tolist()):
        assert (ids[n - 1] == lesson1.END) == ended and lesson1.END not in ids[:n - 1]
        assert ended or n == 9
    # the head is the whole vocabulary: ids once each, probabilities that sum to one, the sampled token's own among them
    heads, logps = rollout.head_ids[rollout.mask], rollout.head_logp[rollout.mask]
    assert heads.shape[1] == 17 and (heads.sort(1).values == torch.arange(17)).all()
    assert (logps.exp().sum(1) - 1).abs().max() < 1e-5
    own = logps[heads == rollout.ids[rollout.mask][:, None]]
    assert torch.equal(own, rollout.logp_sampler[rollout.mask])
    _, head = lesson1.logprobs(trainer, rollout, head=True)
    assert (head - rollout.head_logp)[rollout.mask].abs().max() < 2e-4        # down to very unlikely tokens
    top = engine.sample(prompts, 9, seed=3, group_size=2, head=3)
    assert torch.equal(top.ids, rollout.ids) and top.head_ids.shape[2] == 3
    assert torch.allclose(top.head_logp[top.mask], logps.topk(3).values)


def test_seeds_belong_to_the_request(engine, trainer, prompts):
    engine.sync(trainer)
    one, two, other = (engine.sample(prompts, 9, seed=s) for s in ([5, 0], [5, 0], [5, 1]))
    assert torch.equal(one.ids, two.ids) and torch.equal(one.logp_sampler, two.logp_sampler)
    assert not torch.equal(one.ids, other.ids)
    group = engine.sample([prompts[0]], 9, seed=0, group_size=16)
    assert len({tuple(row) for row in group.ids.tolist()}) > 4              # a group's responses differ


def test_temperature_on_both_sides_agrees_on_one_side_does_not(engine, trainer, prompts):
    engine.sync(trainer)
    cold = engine.sample(prompts, 9, seed=0, temperature=0.5)
    assert cold.temperature == 0.5 and not cold.neutral
    assert difference(trainer, cold).max() < 1e-5
    assert difference(trainer, replace(cold, temperature=1.0)).mean() > 0.05


def test_truncated_support_is_recorded_as_it_was_sampled(engine, trainer, prompts):
    engine.sync(trainer)
    rollout = engine.sample(prompts, 9, seed=0, top_k=2)
    d = (lesson1.logprobs(trainer, rollout) - rollout.logp_sampler)[rollout.mask]
    assert not rollout.neutral and d.max() < 1e-5 and d.mean() < -0.05


def test_a_trainer_that_keeps_the_same_tokens_agrees(engine16, trainer, prompts):
    """In bfloat16, where several tokens tie with the third: top-k keeps them all, and a head of three misses some."""
    engine16.sync(trainer)
    gaps = {}
    for head in (3, 16):
        rollout = engine16.sample(prompts, 9, seed=0, group_size=8, top_k=3, head=head)
        d = (lesson1.kept_logprobs(trainer, rollout) - rollout.logp_sampler)[rollout.mask]
        gaps[head] = d.mean().abs() / d.std() * len(d)**0.5, d.abs().mean()
        kept = rollout.head_logp.isfinite().sum(-1)[rollout.mask]
    assert kept.min() == 3 and 3 < kept.max() < 16
    assert gaps[16][1] < 5e-3 and gaps[16][0] < 4 < gaps[3][0]


@pytest.mark.parametrize("changes", [
    {"temperature": 0.9}, {"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.01}, {"min_tokens": 9}, {"repetition_penalty": 1.1},
    {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"bad_words": ["a"]}, {"logit_bias": {3: 1.0}}, {"allowed_token_ids": [3]}], ids=str)
def test_neutral_means_nothing_masks_or_reweighs(changes, engine):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 9}
    assert lesson1.is_neutral(SamplingParams(**neutral))
    assert not lesson1.is_neutral(SamplingParams(**{**neutral, **changes}))
    assert not lesson1.is_neutral(SamplingParams(**neutral, structured_outputs=StructuredOutputsParams(regex="[0-9]")))


def test_temperatures_that_vllm_would_replace_are_refused(engine, prompts):
    for temperature in (-1.0, 0.001):
        with pytest.raises(ValueError, match="another one"):
            engine.sample(prompts, 9, seed=0, temperature=temperature)


def test_a_response_never_spans_two_versions(engine, trainer, monkeypatch):
    monkeypatch.setattr(engine.llm.llm_engine, "has_unfinished_requests", lambda: True)
    with pytest.raises(RuntimeError, match="two versions"):
        engine.sync(trainer)


# ---------------------------------------------------------------- the script
def test_quick_run(tmp_path):
    """In a process of its own: it stops its engines."""
    run = subprocess.run([sys.executable, str(lesson1.ROOT / "01_mismatch.py"), "--quick", "--out", str(tmp_path)],
                         capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "01_mismatch.png").stat().st_size > 10_000
    result = json.loads((tmp_path / "01_mismatch.json").read_text())
    rows = {row["arm"]: row for row in result["arms"]}
    kinds = [row["kind"] for row in result["arms"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {"control": 3, "natural": 3, "batch shape": 2, "precision": 4, "bug": 6, "cure": 1}
    assert rows["fp32 trainer twice"]["max"] == 0
    assert rows["fp32 engine, fp32 trainer"]["max"] < 1e-4
    natural = rows[lesson1.NATURAL]
    assert rows[f"back at {lesson1.NATURAL}"]["mean |d|"] == natural["mean |d|"]
    assert 1e-4 < natural["mean |d|"] < 1e-2 and natural["± seeds"] > 0
    for arm, size in {"temperature 0.7 in sampler only": 20, "raw log-probs at temperature 0.7": 20, "top-k 3 in sampler only": 10,
                      "weights one step stale (d + lag)": 5, "bf16 log-softmax": 1.05}.items():
        assert rows[arm]["mean |d|"] > size * natural["mean |d|"], arm
    cure = rows["top-k 3 in both: trainer renormalized over the kept tokens"]
    assert 1e-4 < cure["mean |d|"] < 2 * natural["mean |d|"] and abs(cure["mean d"]) < 4 * cure["s.e. of mean d"]
    assert rows["tied lm_head lost in the sync"]["mean |d|"] != natural["mean |d|"]
    assert rows["temperature 0.7 in sampler only"]["mean d"] < -0.01 < 0.01 < rows["raw log-probs at temperature 0.7"]["mean d"]
    # an fp32 side differs from float64 on the rounded weights by their rounding, on either side; a bf16 side by more
    _, engine16, trainer16 = result["two errors"]
    assert 0.5 < engine16["trainer's error"] / trainer16["engine's error"] < 2 and engine16["trainer's error"] > 1e-4
    assert engine16["engine's error"] > 1.5 * engine16["trainer's error"]
    assert trainer16["trainer's error"] > 1.5 * trainer16["engine's error"]
    assert "is rounding" in run.stdout and "nanobind" not in run.stderr


def test_a_copy_never_writes_to_figures(tmp_path, monkeypatch, tiny):
    """Only the lesson itself without flags does."""
    monkeypatch.setattr(lesson1, "find_model", lambda *args: str(tiny))
    where = lambda file, argv: lesson1.arguments(file, "doc", argv)[0].json
    original = lesson1.ROOT / "02_importance_sampling.py"
    assert where(original, []) == lesson1.ROOT / "figures" / "02_importance_sampling.json"
    monkeypatch.setattr(lesson1, "ROOT", tmp_path)
    assert where(original, []) == where(tmp_path / "02_importance_sampling.py", ["--quick"]) \
        == tmp_path / "runs" / "02_importance_sampling" / "02_importance_sampling.json"
    assert where(tmp_path / "exercises" / "bug_02_importance_sampling.py", []).parent == tmp_path / "runs" / "02_importance_sampling"
    assert where(original, ["--out", str(tmp_path / "x")]).parent == tmp_path / "x"


# ---------------------------------------------------------------- any other causal language model
def test_any_causal_model_that_both_libraries_load():
    """A few of tests/models.py, in a process of its own: it stops its engines."""
    names = ["llama-adds-eos", "phi", "gpt2"]
    run = subprocess.run([sys.executable, str(lesson1.ROOT / "tests" / "models.py"), *names], capture_output=True, text=True, timeout=300)
    gaps = {line.split()[0]: line.split()[1:] for line in run.stdout.splitlines() if line.split()[0] in names}
    assert list(gaps) == names, run.stderr[-2000:]
    for name, (word, gap) in gaps.items():
        assert word == "gap" and float(gap) < 1e-5, name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_vllm_is_started_with(device, tiny, monkeypatch):
    """The arguments for a GPU, built without one: no CUDA graphs, a cache of a fixed size, float32 attention in float32."""
    import vllm
    seen = {}
    monkeypatch.setattr(vllm, "LLM", lambda **settings: seen.update(settings))
    monkeypatch.setattr(lesson1, "DEVICE", torch.device(device))
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    sampler = lesson1.Sampler(tiny, "float32", lm_head_fp32=True, kv_cache_gib=2)
    assert seen["enforce_eager"] is True and seen["kv_cache_memory_bytes"] == 2 * 2**30 and seen["gpu_memory_utilization"] < 0.05
    assert seen["logprobs_mode"] == "processed_logprobs" and seen["generation_config"] == "vllm"
    assert seen["enable_chunked_prefill"] == (device == "cuda") and seen["hf_overrides"] == {"head_dtype": "float32"}
    assert seen["max_model_len"] == sampler.max_model_len == lesson1.MAX_MODEL_LEN
    assert lesson1.os.environ["TRITON_F32_DEFAULT"] == "ieee" and lesson1.os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_a_weight_under_another_name_is_one_line(engine, trainer):
    with pytest.raises(lesson1.SyncError, match="by the name"):
        engine.sync(trainer, {**trainer.state_dict(), "model.unheard_of.weight": torch.zeros(3)})
    engine.sync(trainer)


def test_no_line_of_the_reading_path_is_wider_than_100_columns():
    for path in lesson1.ROOT.glob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 100, f"{path.name}:{number}"
