"""Lesson 1 against oracles, and against the wrong versions that people write."""
import json
import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import lesson1, rejected

SUM, FREE, STOP = (lesson1.TASKS[name] for name in ("sum", "free", "stop"))


# ---------------------------------------------------------------- the task
def check_reward(f):
    digits = [3, 8, 1, 5, 0, 2, 9, 7]                                   # sums 3 1 2 7 7 9 8 5
    assert f(SUM, digits, "31277985", True) == 1
    assert f(SUM, digits, "31277985", False) == 0                       # never ended
    assert f(SUM, digits, "00000005", True) == 1                        # only the last sum counts
    assert f(SUM, digits, "51277980", True) == 0
    assert f(SUM, digits, "", True) == 0
    assert f(SUM, digits, "3, then 11 -> 1, ... and so the answer is 35 mod 10 = 5.", True) == 1   # words
    assert f(FREE, [1, 2, 9, 0], "ab4cd5aa2bb3", True) == 1
    assert f(FREE, [1, 2, 9, 0], "ab4cd5aa2bb3", False) == 0
    assert f(FREE, [1, 2, 9, 0], "ab4cd5aa2bb0", True) == 0
    assert f(FREE, [1, 2, 9, 0], "ab4cd5aa2", True) == 0
    right = "31277 5 6 9".replace(" ", "")                              # - 0 2 9 7 after the fourth digit
    assert lesson1.right_digits(STOP, np.array([digits])).tolist() == [[3, 1, 2, 7, 7, 5, 6, 9]]
    assert f(STOP, digits, right, True) == 1
    assert f(STOP, digits, right[:2], True) == 2 / 8                    # all eight count
    assert f(STOP, digits, "00" + right[2:], True) == 6 / 8


def right_list(task, digits):
    return lesson1.right_digits(task, np.array([digits]))[0].tolist()


WRONG_REWARD = {
    "the end is not needed": lambda t, d, text, ended: lesson1.reward(t, d, text, True),
    "first digit judged": lambda t, d, text, ended: lesson1.reward(t, d, text[::-1], ended) if t is SUM else lesson1.reward(t, d, text, ended),
    "all sums needed": lambda t, d, text, ended: float(ended and [int(c) for c in text if c.isdigit()] == right_list(t, d)) if t is SUM else lesson1.reward(t, d, text, ended),
    "early stop is free": lambda t, d, text, ended: np.mean([int(a) == r for a, r in zip(text, right_list(t, d))]) if t is STOP else lesson1.reward(t, d, text, ended),
    "letters compared too": lambda t, d, text, ended: lesson1.reward(t, d, text, ended) if t is not FREE else float(text == "".join(map(str, right_list(t, d)))),
}


def test_reward():
    check_reward(lesson1.reward)


@pytest.mark.parametrize("name", WRONG_REWARD)
def test_reward_rejects(name):
    rejected(check_reward, WRONG_REWARD[name])


@pytest.mark.parametrize("task", [SUM, FREE, STOP], ids=lambda task: task.name)
def test_faultless_demonstrations_earn_everything(task, tokenizer):
    rng = np.random.default_rng(0)
    digits, prompts = lesson1.make_prompts(task, tokenizer, 50, rng)
    shown = lesson1.demonstrations(replace(task, slip=0.0), digits, rng)
    texts = tokenizer.batch_decode(shown, skip_special_tokens=True)
    assert [lesson1.reward(task, d, text, True) for d, text in zip(digits, texts)] == [1.0] * 50
    assert (shown[:, -1] == lesson1.END).all()
    assert tokenizer.decode(prompts[0]) == "".join(map(str, digits[0])) + "="
    slipped = lesson1.demonstrations(task, digits.repeat(100, 0), rng)
    wrong = (slipped != shown.repeat(100, 0))[:, :-1] & (shown.repeat(100, 0)[:, :-1] < 10)
    per_digit = wrong.sum() / (5000 * task.length)
    assert abs(per_digit - 0.9 * task.slip) < 0.01        # one random digit in ten is the right one by luck
    if task is STOP:
        early = lesson1.demonstrations(task, digits.repeat(100, 0), rng, stop_early=True)
        length = (early < 10).sum(1)
        assert length.min() == 2 and abs((length == 2).mean() - 0.65) < 0.03
        assert ((early == lesson1.END).sum(1) == 1).all()


def test_the_letters_are_a_habit_that_depends_on_digit_letter_and_place():
    rng = np.random.default_rng(0)
    digits = rng.integers(0, 10, (20_000, 4))
    shown = lesson1.demonstrations(FREE, digits, rng)[:, :12].reshape(-1, 4, 3) - [lesson1.LETTER_A, lesson1.LETTER_A, 0]
    first, second = (shown[..., 0] - digits) % 4, (shown[..., 1] - shown[..., 0] - np.arange(4)) % 4
    for rank in (first, second):
        assert np.abs(np.bincount(rank.ravel()) / rank.size - [0.4, 0.3, 0.2, 0.1]).max() < 0.01
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02


def test_other_models_read_the_task_in_words():
    chat = SimpleNamespace(get_vocab=lambda: {"a": 0}, chat_template="x",
                           apply_chat_template=lambda messages, **kw: [len(messages), ord(messages[0]["content"][0])])
    assert lesson1.make_prompts(SUM, chat, 2, np.random.default_rng(0))[1] == [[1, ord("D")]] * 2

    class Plain:
        chat_template = None

        def get_vocab(self):
            return {"a": 0}

        def __call__(self, text):
            return {"input_ids": [len(text)]}

    assert lesson1.make_prompts(SUM, Plain(), 1, np.random.default_rng(0))[1][0][0] > 100
    with pytest.raises(ValueError, match="tiny policy only"):
        lesson1.make_prompts(FREE, chat, 1, np.random.default_rng(0))


# ---------------------------------------------------------------- the policy
def test_policy_is_built_once_and_a_torn_or_stale_cache_is_rebuilt(tmp_path, monkeypatch):
    builds = []
    build = lesson1.warm_start
    monkeypatch.setattr(lesson1, "ROOT", tmp_path)
    monkeypatch.setattr(lesson1, "warm_start", lambda task, architecture: builds.append(task) or build(task, architecture))
    monkeypatch.setitem(lesson1.TASKS, "sum", replace(SUM, steps=2))
    folder = lesson1.policy("sum")
    assert lesson1.policy("sum") == folder and len(builds) == 1
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])                  # torn
    assert lesson1.policy("sum") == folder and len(builds) == 2
    lesson1.load_model(folder)
    (folder / "policy.json").write_text('{"accuracy":')                # torn
    lesson1.policy("sum")
    assert len(builds) == 3
    monkeypatch.setitem(lesson1.TASKS, "sum", replace(SUM, steps=3))   # other settings: stale
    assert lesson1.policy("sum") != folder and len(builds) == 4


def test_tiny_policy(tiny, trainer, tokenizer):
    card = json.loads((tiny / "policy.json").read_text())
    assert 0.2 <= card["accuracy"] <= 0.5
    assert tokenizer("3=.a_")["input_ids"] == [3, 10, 11, 12, 16] and tokenizer.eos_token == "."
    assert trainer.lm_head.weight is trainer.model.embed_tokens.weight


def test_models_that_cannot_be_used_are_refused_in_one_line(tmp_path, tiny, capsys):
    def refusal(path):
        with pytest.raises(SystemExit) as exit:
            lesson1.main(["--model", str(path), "--out", str(tmp_path)])
        assert exit.value.code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and str(path) in error
        return error

    assert "no such directory" in refusal(tmp_path / "nothing-here")
    (tmp_path / "lacks").mkdir()
    (tmp_path / "lacks" / "config.json").write_text((tiny / "config.json").read_text())
    assert "no tokenizer" in refusal(tmp_path / "lacks")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "lacks" / name).write_text((tiny / name).read_text())
    assert "no weights" in refusal(tmp_path / "lacks")
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "lacks" / "config.json").write_text(json.dumps({**config, "vocab_size": 5}))
    assert "no vocabulary in common" in refusal(tmp_path / "lacks")


def test_missing_vllm_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(lesson1.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit:
        lesson1.main([])
    assert exit.value.code == 2 and capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------- what is a log-prob?
def check_token_logp(f):
    # logits [0, ln 3], token 1, T = 0.5
    logits = torch.tensor([[0.0, math.log(3)]])
    assert abs(f(logits, torch.tensor([1]), 0.5).item() - -0.105361) < 1e-6
    # a large vocabulary, bf16 logits: float32 out, within 5e-5 of float64
    logits = (3 * torch.randn(2, 4, 50_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    ids = torch.randint(50_000, (2, 4), generator=torch.Generator().manual_seed(1))
    exact = torch.log_softmax(logits.double() / 0.7, -1)
    logp = f(logits, ids, 0.7)
    assert logp.dtype == torch.float32 and logp.shape == (2, 4)
    assert (logp - exact.gather(-1, ids[..., None])[..., 0]).abs().max() < 5e-5
    # several ids a position, each normalised over the full vocabulary
    heads = torch.randint(50_000, (2, 4, 3), generator=torch.Generator().manual_seed(2))
    assert (f(logits, heads, 0.7) - exact.gather(-1, heads)).abs().max() < 5e-5
    assert f(logits.double(), ids, 1.0).dtype == torch.float64


def pick(logp, ids):
    return logp.gather(-1, ids) if ids.dim() == logp.dim() else logp.gather(-1, ids[..., None])[..., 0]


def keep(logits):
    return logits if logits.dtype == torch.float64 else logits.float()


WRONG_LOGP = {
    "temperature forgotten": lambda x, ids, t: pick(torch.log_softmax(keep(x), -1), ids),
    "temperature upside down": lambda x, ids, t: pick(torch.log_softmax(keep(x) * t, -1), ids),
    "temperature after the softmax": lambda x, ids, t: pick(torch.log_softmax(keep(x), -1) / t, ids),
    "log-softmax in bf16": lambda x, ids, t: pick(torch.log_softmax(x / t, -1), ids).to(keep(x).dtype),
    "logits for log-probs": lambda x, ids, t: pick(keep(x) / t, ids),
    "head normalised over itself": lambda x, ids, t: torch.log_softmax(pick(keep(x) / t, ids), -1) if ids.dim() == x.dim() else pick(torch.log_softmax(keep(x) / t, -1), ids),
}


def test_token_logp():
    check_token_logp(lesson1.token_logp)


@pytest.mark.parametrize("name", WRONG_LOGP)
def test_token_logp_rejects(name):
    rejected(check_token_logp, WRONG_LOGP[name])


def check_gap(f):
    logp, logp_sampler = [-1.0, -2.5, -0.1, -7.0], [-1.3, -2.4, -0.1, -6.0]    # d = .3 -.1 0 -1
    g = f(torch.tensor(logp), torch.tensor(logp_sampler))
    d = [a - b for a, b in zip(logp, logp_sampler)]
    right = {"abs": sum(map(abs, d)) / 4, "rms": math.sqrt(sum(x * x for x in d) / 4), "max": 1.0, "mean": sum(d) / 4,
             "k3": sum(math.exp(x) - 1 - x for x in d) / 4, "outside": 2 / 4,
             "ppl": math.exp(-sum(logp) / 4) / math.exp(-sum(logp_sampler) / 4) - 1, "weight": sum(map(math.exp, d)) / 4}
    for name, value in right.items():
        assert abs(g[name] - value) < 1e-6, name
    edges = torch.tensor([1.24, 1.26, 0.81, 0.79, 1.0], dtype=torch.float64).log()
    assert abs(f(edges - 3, torch.full((5,), -3.0, dtype=torch.float64))["outside"] - 2 / 5) < 1e-9
    small = f(torch.tensor([-1.0 + 1e-6], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64))
    assert abs(small["k3"] / 0.5e-12 - 1) < 1e-3                                # no cancellation


WRONG_GAP = {
    "sampler minus trainer": lambda a, b: lesson1.gap(b, a),
    "k1 for k3": lambda a, b: {**lesson1.gap(a, b), "k3": (b - a).mean().item()},
    "k3 of the other direction": lambda a, b: {**lesson1.gap(a, b), "k3": (torch.expm1(b - a) - (b - a)).mean().item()},
    "k3 by cancellation": lambda a, b: {**lesson1.gap(a, b), "k3": ((a - b).float().exp() - 1 - (a - b).float()).mean().item()},
    "mean before abs": lambda a, b: {**lesson1.gap(a, b), "abs": (a - b).mean().abs().item()},
    "band on d, not on the ratio": lambda a, b: {**lesson1.gap(a, b), "outside": ((a - b).abs() > 0.25).double().mean().item() / 2},
    "perplexities swapped": lambda a, b: {**lesson1.gap(a, b), "ppl": torch.expm1((a - b).mean()).item()},
}


def test_gap():
    check_gap(lesson1.gap)


@pytest.mark.parametrize("name", WRONG_GAP)
def test_gap_rejects(name):
    rejected(check_gap, WRONG_GAP[name])


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
    a = completion([7, 11], [[(7, -2.0), (5, -0.5), (7, -2.0)], [(11, -0.1), (11, -0.1), (3, -3.0)]])
    b = completion([4], [[(4, -1.0), (4, -1.0), (6, -1.5)]], "length")
    r = f([[1, 2, 10], [3, 10]], [a, b], 5, 1.0, True)
    assert r.prompt_ids.tolist() == [[1, 2, 10], [0, 3, 10]] and r.prompt_mask.tolist() == [[True] * 3, [False, True, True]]
    assert r.ids[0].tolist() == [7, 11] and r.ids[1, 0] == 4
    assert r.mask.tolist() == [[True, True], [True, False]]
    assert torch.allclose(r.logp_sampler, torch.tensor([[-2.0, -0.1], [-1.0, 0.0]]))
    assert r.head_ids[0].tolist() == [[5, 7], [11, 3]]                       # slot 0 is not part of the head
    assert torch.allclose(r.head_logp[0], torch.tensor([[-0.5, -2.0], [-0.1, -3.0]]))
    assert r.finish_reasons == ["stop", "length"] and r.version == 5 and len(r) == 2
    part = r[1:2]
    assert len(part) == 1 and part.finish_reasons == ["length"] and part.mask.shape == (1, 2) and part.version == 5


def with_slot_0(*args):
    r = lesson1.pack(*args)
    return replace(r, head_ids=torch.cat([r.ids[..., None], r.head_ids[..., :-1]], -1))


def right_padded_prompts(*args):
    r = lesson1.pack(*args)
    return replace(r, prompt_ids=r.prompt_ids.roll(-1, 1), prompt_mask=r.prompt_mask.roll(-1, 1))


def mask_without_end(*args):
    r = lesson1.pack(*args)
    return replace(r, mask=r.mask & (r.ids != lesson1.END))


@pytest.mark.parametrize("wrong", [with_slot_0, right_padded_prompts, mask_without_end], ids=lambda f: f.__name__)
def test_pack_rejects(wrong):
    rejected(check_pack, wrong)


def test_pack():
    check_pack(lesson1.pack)


def test_a_completion_needs_one_logprob_a_token():
    short = completion([7, 11, 4, 11], [[(7, -2.0)], [(11, -0.1)], [(4, -1.0)]])
    with pytest.raises(ValueError, match="4 tokens, but log-probs for 3"):
        lesson1.pack([[1]], [short], 0, 1.0, True)
    other = completion([7], [[(8, -2.0)]])
    with pytest.raises(ValueError, match="not those of its tokens"):
        lesson1.pack([[1]], [other], 0, 1.0, True)


def test_completions_are_never_tokenised_again():
    class DecodeOnly:                       # encode(decode(x)) != x: it must not be asked to encode
        def batch_decode(self, rows, **kwargs):
            return ["".join("0123456789=.abcd_"[i] for i in row).replace(".", "") for row in rows]
    rollout = lesson1.pack([[3, 10]], [completion([5, 11], [[(5, -1.0)], [(11, -1.0)]])], 0, 1.0, True)
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
    return lesson1.pack(prompts, completions, 0, 1.0, True)


def small_model(**changes):
    torch.manual_seed(0)
    config = lesson1.transformers.Qwen3Config(**{**lesson1.ARCHITECTURE, "initializer_range": 0.3, **changes})
    return lesson1.transformers.Qwen3ForCausalLM(config)


def check_score(f):
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


def wrong_score(logits_of):
    def score(model, rollout, head=False):
        with torch.no_grad():
            logits = logits_of(model, rollout)
        logp, heads = (lesson1.token_logp(logits, ids, rollout.temperature) for ids in (rollout.ids, rollout.head_ids))
        return torch.where(rollout.mask, logp, 0.0), heads
    return score


def everything(model, rollout, attention=True):
    ids = torch.cat([rollout.prompt_ids, rollout.ids], 1)
    mask = torch.cat([rollout.prompt_mask, rollout.mask], 1).long() if attention else None
    return model(input_ids=ids, attention_mask=mask).logits


WRONG_SCORE = {
    "logits of the token itself": wrong_score(lambda m, r: everything(m, r)[:, -r.ids.shape[1]:]),
    "shifted by two": wrong_score(lambda m, r: everything(m, r)[:, -r.ids.shape[1] - 2:-2]),
    "no attention mask": wrong_score(lambda m, r: everything(m, r, attention=False)[:, -r.ids.shape[1] - 1:-1]),
    "aligned as if prompts were padded on the right": wrong_score(lambda m, r: torch.stack([
        row[n - 1: n - 1 + r.ids.shape[1]] for row, n in zip(everything(m, r), r.prompt_mask.sum(1))])),
    "log-probs of padding": lambda m, r, head=False: (lesson1.score(m, r) - (~r.mask).float(), lesson1.score(m, r, head=True)[1]),
    "temperature ignored": lambda m, r, head=False: lesson1.score(m, replace(r, temperature=1.0), head=True),
    "with gradient": lambda m, r, head=False: lesson1.score(m, r, head=True, grad=True),
}


def test_padded_row_equals_its_row_alone():
    check_score(lesson1.score)


@pytest.mark.parametrize("name", WRONG_SCORE)
def test_score_rejects(name):
    rejected(check_score, WRONG_SCORE[name])


def test_first_response_token_is_scored_by_the_last_prompt_logit():
    """A model that says at t, with +20, which token stands at t + 1: right alignment gives about 0, any shift about -20."""
    class NextToken(torch.nn.Module):
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=17))
        def forward(self, input_ids, attention_mask, position_ids, use_cache, logits_to_keep):
            following = torch.cat([input_ids[:, 1:], input_ids[:, :1]], 1)
            return SimpleNamespace(logits=20.0 * torch.nn.functional.one_hot(following, 17)[:, -logits_to_keep:])
    assert lesson1.score(NextToken(), random_rollout()).abs().max() < 1e-6


def test_score_is_deterministic_and_dropout_is_off():
    model = small_model(attention_dropout=0.5).train()
    rollout = random_rollout()
    assert torch.equal(lesson1.score(model, rollout), lesson1.score(model, rollout))


def test_micro_batches_change_neither_scores_nor_gradients(monkeypatch):
    model, rollout = small_model(), random_rollout()

    def score_and_gradient():
        model.zero_grad()
        logp = lesson1.score(model, rollout, grad=True)
        logp.sum().backward()
        return logp.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    assert len(lesson1.micro_batches(rollout, 17)) == 1
    logp, gradient = score_and_gradient()
    monkeypatch.setattr(lesson1, "LOGITS_AT_ONCE", 3 * 5 * 17)
    assert [len(rollout[rows]) for rows in lesson1.micro_batches(rollout, 17)] == [3, 1]
    parts, gradient_parts = score_and_gradient()
    assert (parts - logp).abs().max() < 1e-5
    assert (gradient_parts - gradient).norm() < 1e-5 * gradient.norm()


def test_bf16_weights_float64_arithmetic_stays_float64(trainer):
    exact = trainer.bfloat16().double()
    assert lesson1.score(exact, random_rollout()).dtype == torch.float64


# ---------------------------------------------------------------- the measurement's arithmetic
def test_widen_pads_every_field_on_the_right():
    rollout = replace(random_rollout(), routes=torch.ones(len(random_rollout()), random_rollout().prompt_ids.shape[1] + random_rollout().ids.shape[1], 2, 1, dtype=torch.long))
    T = rollout.ids.shape[1]
    wide = lesson1.widen(rollout, T + 2)
    for name in ("ids", "mask", "logp_sampler", "head_ids", "head_logp"):
        old, new = getattr(rollout, name), getattr(wide, name)
        assert new.shape[1] == T + 2 and torch.equal(new[:, :T], old) and not new[:, T:].any(), name
    assert torch.equal(wide.routes[:, :-2], rollout.routes) and not wide.routes[:, -2:].any() and torch.equal(wide.prompt_ids, rollout.prompt_ids)
    model = small_model()
    assert torch.allclose(lesson1.score(model, wide)[:, :T], lesson1.score(model, rollout), atol=1e-5)


def test_head_in_float32_is_a_float32_product():
    model = small_model().bfloat16()
    hidden = torch.randn(2, 3, model.config.hidden_size).bfloat16()
    lesson1.head_in_float32(model)
    logits = model.lm_head(hidden)
    assert logits.dtype == torch.float32 and torch.equal(logits, hidden.float() @ model.lm_head.weight.float().T)


def test_one_step_makes_what_was_rewarded_likelier():
    model, rollout = small_model(), random_rollout()
    before = lesson1.score(model, rollout).sum(1)
    lesson1.one_step(model, rollout, torch.tensor([1.0, 0.0, 0.0, 0.0]), lr=1e-3)
    change = lesson1.score(model, rollout).sum(1) - before
    assert change[0] > 0 and change[0] > change[1:].max() and change[1:].mean() < 0


def test_explain_predicts_the_rms_gap_from_two_errors():
    generator = torch.Generator().manual_seed(0)
    shared, a, b = torch.randn(3, 100_000, generator=generator, dtype=torch.float64)
    independent, correlated = lesson1.explain([("x", torch.stack([3 * a, 4 * b])), ("y", torch.stack([3 * a + shared, 4 * b + shared]))])
    assert abs(independent["independent"] - 5) < 0.05 and abs(independent["measured"] - 5) < 0.05
    assert abs(correlated["independent"] - math.sqrt(27)) < 0.05 and abs(correlated["measured"] - 5) < 0.05
    for row in (independent, correlated):
        assert abs(row["predicted"] - row["measured"]) < 1e-9          # an identity


def test_by_probability_finds_the_law_that_made_the_data():
    p = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.98 + 0.01
    rows = lesson1.by_probability(p.log() + 0.03 * (1 - p), p.log())
    assert all(abs(row["measured"] / row["predicted"] - 1) < 1e-6 for row in rows) and len(rows) > 6


# ---------------------------------------------------------------- the real engine
@pytest.fixture
def prompts(tokenizer):
    return lesson1.make_prompts(SUM, tokenizer, 24, np.random.default_rng(1))[1]


def difference(model, rollout):
    return (lesson1.score(model, rollout) - rollout.logp_sampler)[rollout.mask].abs()


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


@pytest.mark.parametrize("canary, good", [((0.5e-4, 0.0), True), ((2e-4, 0.0), False), ((0.015, 0.01), True), ((0.05, 0.01), False),
                                          ((math.nan, 0.01), False), ((0.01, math.nan), False)], ids=str)
def test_how_much_of_a_gap_a_sync_may_leave(canary, good, engine, trainer, monkeypatch):
    """(gap, what rounding explains) in nats: of 240 healthy bf16 syncs of a run the largest had 1.6 times the latter, an fp32 one 2e-6."""
    monkeypatch.setattr(engine, "canary", lambda *args: canary)
    if good:
        assert engine.sync(trainer) == canary[0]
    else:
        with pytest.raises(lesson1.SyncError):
            engine.sync(trainer)


def test_the_canary_measures_the_median_gap(engine, moved, tiny):
    """An engine that kept the old weights, against the trainer alone: the fp32 engine is the old trainer to 1e-6."""
    original = lesson1.load_model(tiny)
    engine.load(original.state_dict())
    gap, rounding = engine.canary(moved, moved.state_dict())
    ids = torch.arange(64)[None] % 13
    with torch.no_grad():
        new, old = (torch.log_softmax(m(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None]) for m in (moved, original))
    assert gap > 0.1 and abs(gap - (new - old).abs().median().item()) < 1e-4 and rounding == 0


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
    for ids, n, finish in zip(rollout.ids.tolist(), lengths.tolist(), rollout.finish_reasons):
        assert (ids[n - 1] == lesson1.END) == (finish == "stop") and lesson1.END not in ids[:n - 1]
        assert finish == "stop" or n == 9
    # the head is the whole vocabulary: ids once each, probabilities that sum to one, the sampled token's own among them
    heads, logps = rollout.head_ids[rollout.mask], rollout.head_logp[rollout.mask]
    assert heads.shape[1] == 17 and (heads.sort(1).values == torch.arange(17)).all()
    assert (logps.exp().sum(1) - 1).abs().max() < 1e-5
    own = logps[heads == rollout.ids[rollout.mask][:, None]]
    assert torch.equal(own, rollout.logp_sampler[rollout.mask])
    _, head = lesson1.score(trainer, rollout, head=True)
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
    d = (lesson1.score(trainer, rollout) - rollout.logp_sampler)[rollout.mask]
    assert not rollout.neutral and d.max() < 1e-5 and d.mean() < -0.05


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


# ---------------------------------------------------------------- the script
def test_quick_run(tmp_path):
    run = subprocess.run([sys.executable, str(lesson1.ROOT / "01_mismatch.py"), "--quick", "--out", str(tmp_path)],
                         capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "01_mismatch.png").stat().st_size > 10_000
    result = json.loads((tmp_path / "01_mismatch.json").read_text())
    rows = {row["arm"]: row for row in result["table"]}
    assert rows["fp32 trainer twice"]["max"] == 0
    assert rows["fp32 engine | fp32 trainer"]["max"] < 1e-4
    natural = rows["bf16 engine | fp32 trainer"]
    assert rows["back at bf16 engine | fp32 trainer"]["abs"] == natural["abs"]
    assert 1e-4 < natural["abs"] < 1e-2 and natural["spread"] > 0
    for arm, size in {"temperature 0.7 in sampler only": 20, "raw log-probs at T = 0.7": 20, "top-k 3 in sampler only": 10,
                      "weights one step stale": 5, "tied head lost in the sync": 2, "bf16 log-softmax": 1.05}.items():
        assert rows[arm]["abs"] > size * natural["abs"], arm
    assert rows["temperature 0.7 in sampler only"]["mean"] < -0.01 and rows["raw log-probs at T = 0.7"]["mean"] > 0.01
    assert "nanobind" not in run.stderr
    # an fp32 side differs from float64 on the rounded weights by the weights' rounding, on either side of the pair; a bf16 side by more
    both16, engine16, trainer16 = result["why"]
    assert 0.5 < engine16["trainer"] / trainer16["engine"] < 2 and engine16["trainer"] > 1e-4
    assert engine16["engine"] > 1.5 * engine16["trainer"] and trainer16["trainer"] > 1.5 * trainer16["engine"]
    assert all(abs(why["predicted"] / why["measured"] - 1) < 1e-6 for why in result["why"])


# ---------------------------------------------------------------- any other causal language model
@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """Another architecture, tokenizer and vocabulary, an untied head, prompts in words: random weights."""
    import string
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    folder, transformers = tmp_path_factory.mktemp("llama"), lesson1.transformers
    vocabulary = {c: i for i, c in enumerate([*string.printable, "<unk>", "<eos>"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=vocabulary["<eos>"], bos_token_id=None,
        initializer_range=0.1)).save_pretrained(folder)
    return folder


def test_any_causal_model_that_both_libraries_load(llama):
    path = lesson1.find_model(str(llama))
    tokenizer, model = lesson1.transformers.AutoTokenizer.from_pretrained(path), lesson1.load_model(path)
    sampler = lesson1.Sampler(path, "float32")
    digits, prompts = lesson1.make_prompts(SUM, tokenizer, 24, np.random.default_rng(0))
    assert sum(map(len, prompts)) > 2048                             # more than vLLM puts into one step
    rollout = sampler.sample(prompts, 12, seed=0, group_size=2, head=4)
    assert difference(model, rollout).max() < 1e-5 and rollout.head_ids.shape == (48, rollout.ids.shape[1], 4)
    assert lesson1.rewards(SUM, digits.repeat(2, 0), rollout, tokenizer).shape == (48,)
    with torch.no_grad():
        model.lm_head.weight.add_(0.01)
        model.lm_head.weight[::2].mul_(1.1)
    sampler.sync(model)
    assert difference(model, sampler.sample(prompts, 12, seed=0)).max() < 1e-5
