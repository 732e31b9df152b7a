"""Lesson 5: gates, replay and recording on a small mixture of experts, and on the real engine's routes."""
import copy
import json
import math
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import lesson1, rejected

lesson5 = import_module("05_router_replay")
lesson2, lesson3, lesson4 = lesson5.lesson2, lesson5.lesson3, lesson5.lesson4
SUM = lesson1.TASKS["sum"]


# ---------------------------------------------------------------- gates
def check_gates(gates):
    """VeOmni#719: logits [2, 1, 0, -1], softmax [.6439, .2369, .0871, .0321]; and a gradient for every expert's logit."""
    logits, picks = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.0, 3.0]]), torch.tensor([[0, 2], [3, 1]])
    normalised, raw = gates(logits, picks, True), gates(logits, picks, False)
    assert torch.allclose(normalised[0], torch.tensor([0.8808, 0.1192]), atol=1e-4) and torch.allclose(raw[0], torch.tensor([0.6439, 0.0871]), atol=1e-4)
    assert torch.allclose(normalised.sum(1), torch.ones(2)) and raw[1, 0] > raw[1, 1]
    logits.requires_grad_()
    g = torch.autograd.grad(gates(logits, picks, True)[0, 1], logits)[0][0]
    # d g_2 / d s_j = g_2 (1[j = 2] - g_j) for the picked, 0 for the others
    assert torch.allclose(g, torch.tensor([-0.8808 * 0.1192, 0, 0.1192 * 0.8808, 0]), atol=1e-4)
    assert torch.autograd.grad(gates(logits, picks, False)[0, 1], logits)[0][0, 1] < -0.01        # there all logits count
    assert gates(logits.bfloat16(), picks, True).dtype == torch.float32


WRONG_GATES = {
    "missing normalisation": lambda s, i, n: s.float().softmax(-1).gather(-1, i),
    "always normalised": lambda s, i, n: lesson5.gates(s, i, True),
    "softmax over the picked alone": lambda s, i, n: s.float().gather(-1, i).softmax(-1),
    "normalised by the trainer's own top k": lambda s, i, n: s.float().softmax(-1).gather(-1, i) / (s.float().softmax(-1).topk(i.shape[1]).values.sum(-1, keepdim=True) if n else 1),
    "from masked probabilities": lambda s, i, n: (s.float().softmax(-1) * (s >= s.topk(i.shape[1]).values[:, -1:])).gather(-1, i),
    "the sampler's gates, constants": lambda s, i, n: lesson5.gates(s.detach(), i, n) + 0 * s.sum(),
    "sigmoid": lambda s, i, n: s.float().sigmoid().gather(-1, i) / (s.float().sigmoid().gather(-1, i).sum(-1, keepdim=True) if n else 1),
    "own picks": lambda s, i, n: lesson5.gates(s, s.topk(i.shape[1]).indices, n),
    "in the router's dtype": lambda s, i, n: lesson5.gates(s, i, n).to(s.dtype),
}


def test_gates():
    check_gates(lesson5.gates)


@pytest.mark.parametrize("name", WRONG_GATES)
def test_gates_rejects(name):
    rejected(check_gates, WRONG_GATES[name])


# ---------------------------------------------------------------- replay, without an engine
def small_mixture(**changes):
    """Random weights; its routers see differences."""
    torch.manual_seed(0)
    config = lesson5.transformers.Qwen3MoeConfig(**{**lesson5.MIXTURE, **changes})
    model = lesson5.transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for router in lesson5.routers(model):
            router.weight.normal_()
    return model


def rollout_of(lengths=((9, 9), (6, 5), (9, 1), (4, 9)), seed=0):
    """Random tokens, left-padded prompts and right-padded responses."""
    rng = np.random.default_rng(seed)
    P, T, B = max(p for p, _ in lengths), max(t for _, t in lengths), len(lengths)
    prompt_mask = torch.tensor([[i >= P - p for i in range(P)] for p, _ in lengths])
    mask = torch.tensor([[i < t for i in range(T)] for _, t in lengths])
    ids = lambda n: torch.from_numpy(rng.integers(0, 10, (B, n)))
    return lesson1.Rollout(ids(P) * prompt_mask, prompt_mask, ids(T) * mask, mask, torch.zeros(B, T), torch.zeros(B, T, 0, dtype=torch.long), torch.zeros(B, T, 0),
                           ["stop"] * B, 1, 1.0, True)


def check_replay(replay):
    """What replay is: own picks change nothing; other picks go through other experts; nothing is left behind."""
    for changes in ({}, {"norm_topk_prob": False}):
        model, rollout = small_mixture(**changes), rollout_of()
        plain = lesson1.score(model, rollout)
        routes = lesson5.own_routes(model, rollout)

        def scored(picks, m=model):
            with replay(m, picks):
                return lesson1.score(m, rollout)
        # bit-equal; the order of a pick's experts does not matter
        assert torch.equal(scored(routes), plain)
        assert torch.allclose(scored(routes.flip(-1)), plain, atol=1e-6)
        # one other expert at one place changes that row's tokens from there on, and no others
        other = routes.clone()
        other[1, 11, 1, 0] = next(e for e in range(8) if e not in routes[1, 11, 1])            # row 1: 6 of 9 prompt places, 5 tokens
        changed = (scored(other) - plain).abs() > 1e-6
        assert changed[1, 3:5].all() and not changed[1, :3].any() and not changed[[0, 2, 3]].any()
        # padding routes nobody: any ids there change nothing
        padding = ~torch.cat([rollout.prompt_mask, rollout.mask], 1)
        assert torch.allclose(scored(torch.where(padding[..., None, None], 7, routes)), plain, atol=1e-5)     # other sizes of the experts' batches round elsewhere
        # outside nothing is left, after an exception either
        assert torch.equal(lesson1.score(model, rollout), plain)
        with pytest.raises(ZeroDivisionError):
            with replay(model, other):
                1 / 0
        assert torch.equal(lesson1.score(model, rollout), plain)


@contextmanager
def leaking(model, routes):
    hooks = replayed(model, routes)
    yield


def replayed(model, routes, gates=None, change=lambda routes: routes, layer_of=lambda layer: layer):
    """Hooks of a replay with one thing wrong."""
    routes, hooks = change(routes), []
    for layer, router in enumerate(lesson5.routers(model)):
        def hook(router, inputs, output, picks=routes[:, :, layer_of(layer)].flatten(0, 1)):
            g = (gates or lesson5.gates)(output[0], picks, router.norm_topk_prob)
            return output[0], g.to(output[0].dtype), picks
        hooks.append(router.register_forward_hook(hook))
    return hooks


def replay_with(remove=True, **wrong):
    @contextmanager
    def context(model, routes):
        hooks = replayed(model, routes, **wrong)
        try:
            yield
        finally:
            for hook in hooks if remove else []:
                hook.remove()
    return context


@contextmanager
def cleaned_only_without_an_exception(model, routes):
    hooks = replayed(model, routes)
    yield
    for hook in hooks:
        hook.remove()


@contextmanager
def no_operation(model, routes):
    yield


WRONG_REPLAY = {
    "hooks left behind": replay_with(remove=False),
    "left behind after an exception": cleaned_only_without_an_exception,
    "silent no-op": no_operation,
    "padding prepended": replay_with(change=lambda r: torch.cat([r[:, -1:], r[:, :-1]], 1)),
    "off by one": replay_with(change=lambda r: torch.cat([r[:, 1:], r[:, -1:]], 1)),
    "layers shifted": replay_with(layer_of=lambda layer: (layer + 1) % 3),
    "one layer's picks everywhere": replay_with(layer_of=lambda layer: 0),
    "normalised always": replay_with(gates=lambda s, i, n: lesson5.gates(s, i, True)),
    "normalised twice over the top 3": replay_with(gates=lambda s, i, n: lesson5.gates(s, i, n) / s.float().softmax(-1).topk(3).values.sum(-1, keepdim=True)),
    "never normalised": replay_with(gates=lambda s, i, n: lesson5.gates(s, i, False)),
    "equal gates": replay_with(gates=lambda s, i, n: torch.full(i.shape, 0.5)),
    "ids through uint8 of a smaller range": replay_with(change=lambda r: r % 4),
}


def test_replay():
    check_replay(lesson5.replay)
    check_replay(replay_with())


@pytest.mark.parametrize("name", WRONG_REPLAY)
def test_replay_rejects(name):
    rejected(check_replay, WRONG_REPLAY[name])


def check_router_gradient(replay):
    """One layer, one prompt token, one response token, so that one pick decides: a trainer that prefers {a, b}, replayed with
    {a, c}, uses expert c, and c's row of the router learns."""
    model, rollout = small_mixture(num_experts=4, num_hidden_layers=1), rollout_of(((1, 1),))
    a, b, c = lesson5.own_routes(small_mixture(num_experts=4, num_hidden_layers=1, num_experts_per_tok=3), rollout)[0, 0, 0].tolist()
    assert lesson5.own_routes(model, rollout)[0, 0, 0].tolist() == [a, b]
    router, experts = lesson5.routers(model)[0], model.model.layers[0].mlp.experts.down_proj
    with replay(model, torch.tensor([a, c]).expand(1, 2, 1, 2).contiguous()):
        lesson1.score(model, rollout, grad=True).sum().backward()
    assert router.weight.grad is not None                             # constant gates would leave none
    assert router.weight.grad[[a, c]].abs().amax(1).min() > 1e-5
    others = [e for e in range(4) if e not in (a, c)]
    assert router.weight.grad[others].abs().max() < 1e-8              # normalised over the picked: the others' logits cancel
    assert experts.grad[[a, c]].abs().amax((1, 2)).min() > 1e-6 and experts.grad[others].abs().max() == 0


def test_router_gradient():
    check_router_gradient(lesson5.replay)
    masked = lambda s, i, n: (lambda p: p / p.sum(-1, keepdim=True))((s.float().softmax(-1) * (s >= s.topk(2).values[:, -1:])).gather(-1, i) + 1e-9)
    for wrong in (no_operation, replay_with(gates=lambda s, i, n: lesson5.gates(s.detach(), i, n)), replay_with(gates=lambda s, i, n: lesson5.gates(s, i, False)),
                  replay_with(gates=masked)):
        rejected(check_router_gradient, wrong)


def test_a_second_forward_pass_replays_the_same():
    """Gradient checkpointing runs the layers again in the backward pass."""
    model, rollout = small_mixture(), rollout_of()
    routes = lesson5.own_routes(model, rollout).roll(1, -2).contiguous()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        ids = torch.cat([rollout.prompt_ids, rollout.ids], 1)
        with lesson5.replay(model, routes):
            model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients))


def test_micro_batches_replay_their_own_rows(monkeypatch):
    model, rollout = small_mixture(), rollout_of()
    routes = lesson5.own_routes(model, rollout).roll(3, 1).contiguous()
    whole = lesson5.score(model, rollout, routes)
    assert (whole - lesson1.score(model, rollout)).abs().max() > 1e-2
    monkeypatch.setattr(lesson1, "LOGITS_AT_ONCE", 1)
    assert torch.allclose(lesson5.score(model, rollout, routes), whole, atol=1e-6)
    assert torch.equal(lesson5.own_routes(model, rollout), lesson5.own_routes(model, rollout)) and lesson5.own_routes(model, rollout).shape == routes.shape
    logp, head = lesson5.score(model, rollout, routes, head=True)
    assert head.shape[-1] == 0 and torch.allclose(logp, whole, atol=1e-6)


@pytest.mark.parametrize("change, message", [
    (lambda r: None, "no routes"), (lambda r: r[:, :, :2], "layers"), (lambda r: r[..., :1], "experts a token"), (lambda r: r[0], "layers"),
    (lambda r: r + 1, "8 experts"), (lambda r: r - 1, "8 experts"), (lambda r: r.to(torch.uint8), "int64"),
    (lambda r: r[:, :-1].contiguous(), "input tokens"), (lambda r: r[:3], "input tokens")],
    ids=["none", "a layer missing", "an expert missing", "no batch", "too large", "negative", "uint8", "too short", "a row missing"])
def test_bad_routes_are_refused(change, message):
    model, rollout = small_mixture(), rollout_of()
    routes = lesson5.own_routes(model, rollout)
    routes[0, 0, 0, 0], routes[0, 0, 0, 1] = 0, 7
    plain = lesson1.score(model, rollout)
    with pytest.raises(ValueError, match=message):
        with lesson5.replay(model, change(routes)):
            lesson1.score(model, rollout)
    assert torch.equal(lesson1.score(model, rollout), plain)


def check_refusals(check_routes):
    """The model's own routes pass; every kind of others does not."""
    model = small_mixture()
    routes = lesson5.own_routes(model, rollout_of())
    check_routes(model, routes)
    for wrong in (None, routes[:, :, :2], routes[..., :1], routes[0], routes.clamp(min=7) + 1, routes - 8, routes.to(torch.int32)):
        try:
            check_routes(model, wrong)
        except ValueError:
            continue
        except Exception as error:                     # another error is not the one clear line
            assert False, error
        assert False, "accepted"


def refuses_only(*kinds):
    def check(model, routes):
        if "missing" in kinds and routes is None:
            raise ValueError
        if "shape" in kinds and routes.shape[2:] != (3, 2):
            raise ValueError
        if "range" in kinds and (routes.min() < 0 or routes.max() > 7):
            raise ValueError
        if "dtype" in kinds and routes.dtype != torch.int64:
            raise ValueError
    return check


WRONG_REFUSALS = {f"not {name}": refuses_only(*({"missing", "shape", "range", "dtype"} - {name})) for name in ("missing", "shape", "range", "dtype")}


def test_refusals():
    check_refusals(lesson5.check_routes)
    check_refusals(refuses_only("missing", "shape", "range", "dtype"))


@pytest.mark.parametrize("name", WRONG_REFUSALS)
def test_refusals_rejects(name):
    rejected(check_refusals, WRONG_REFUSALS[name])


def test_a_dense_model_has_no_router(trainer):
    with pytest.raises(ValueError, match="no router"):
        lesson5.routers(trainer)


# ---------------------------------------------------------------- the measures
def check_flips(flips):
    """Two rows of one prompt place and two tokens: the places that score a token are those before it."""
    rollout = rollout_of(((1, 2), (1, 1)))
    a = torch.tensor([0, 2]).expand(2, 3, 2, 2).clone()                       # (B, P + T, L, k)
    b = a.flip(-1).clone()                                                  # the same sets
    assert flips(a, b, rollout).tolist() == [[0, 0]] * 3
    b[0, 0, 0] = torch.tensor([2, 5])                                        # scores row 0's first token
    b[0, 1, 1] = torch.tensor([6, 7])                                        # its second
    b[0, 2] = 7                                                              # the last token scores nothing
    b[1, 1] = 7                                                              # row 1 ends before
    assert flips(a, b, rollout).tolist() == [[1, 0], [0, 2], [0, 0]]


WRONG_FLIPS = {
    "order counts": lambda a, b, r: (a[:, 0:-1][r.mask] != b[:, 0:-1][r.mask]).sum(-1),
    "places of the tokens themselves": lambda a, b, r: lesson5.flips(torch.cat([a[:, 1:], a[:, :1]], 1), torch.cat([b[:, 1:], b[:, :1]], 1), r),
    "sets, not experts": lambda a, b, r: (lesson5.flips(a, b, r) > 0).long(),
    "padding counted": lambda a, b, r: lesson5.flips(a, b, lesson1.replace(r, mask=torch.ones_like(r.mask))),
    "overlap": lambda a, b, r: a.shape[-1] - lesson5.flips(a, b, r),
}


def test_flips():
    check_flips(lesson5.flips)


@pytest.mark.parametrize("name", WRONG_FLIPS)
def test_flips_rejects(name):
    rejected(check_flips, WRONG_FLIPS[name])


def test_flip_statistics():
    s = lesson5.flip_statistics(torch.tensor([[0, 1], [2, 1], [0, 0], [0, 0]]))
    assert s == {"picks": 3 / 8, "tokens": 0.5, "tokens_predicted": 1 - 0.75 * 0.5, "experts": 1.0, "by_layer": [0.25, 0.5]}


def check_beyond(beyond):
    d = torch.tensor([0.5, -0.5, 0.05, -0.05, 0.8]).double()
    assert beyond(torch.tensor([np.log(1.5), 0.0]), 1.5) == 0                 # exceeds: strictly
    assert beyond(d, 1.1) == 3 / 5 and beyond(d, 2) == 1 / 5 and beyond(-d, 2) == 1 / 5


WRONG_BEYOND = {
    "one side": lambda d, tau: (d.exp() > tau).double().mean().item(),
    "log tau as tau - 1": lambda d, tau: (d.abs() > tau - 1).double().mean().item(),
    "at tau too": lambda d, tau: (d.abs() >= np.log(tau)).double().mean().item(),
    "a count": lambda d, tau: (d.abs() > np.log(tau)).sum().item(),
    "1 - (tau - 1) for the inverse": lambda d, tau: ((d.exp() > tau) | (d.exp() < 2 - tau)).double().mean().item(),
}


def test_beyond():
    check_beyond(lesson5.beyond)


@pytest.mark.parametrize("name", WRONG_BEYOND)
def test_beyond_rejects(name):
    rejected(check_beyond, WRONG_BEYOND[name])


# ---------------------------------------------------------------- the real engine
@pytest.fixture
def mixture_trainer(mixture):
    return lesson1.load_model(mixture)


def test_recorded_routes_are_those_of_the_tokens(mixture_trainer, mixture_engine, tokenizer):
    """An fp32 engine picks as the fp32 trainer; rows one place off do not. Prompts of two lengths: left padding."""
    mixture_engine.sync(mixture_trainer)
    _, prompts = lesson1.make_prompts(SUM, tokenizer, 16, np.random.default_rng(0))
    rollout = mixture_engine.sample([p if i % 2 else p[4:] for i, p in enumerate(prompts)], 9, seed=0)
    assert rollout.routes.dtype == torch.int64 and rollout.routes.shape == (16, 9 + rollout.ids.shape[1], 3, 2)
    share = lambda routes: (lesson5.flips(routes, lesson5.own_routes(mixture_trainer, rollout), rollout) > 0).double().mean()
    assert share(rollout.routes) < 0.01
    assert share(rollout.routes.roll(1, 1)) > 0.1 and share(rollout.routes.roll(-1, 1)) > 0.1 and share(rollout.routes.roll(1, 2)) > 0.1
    # replayed, the gap stays what fp32 makes it; the same routes one place off open it
    d = lambda routes: (lesson5.score(mixture_trainer, rollout, routes) - rollout.logp_sampler)[rollout.mask].abs().mean()
    assert d(rollout.routes) < 1e-5 and d(rollout.routes.roll(1, 1)) > 1e-2
    assert torch.equal(rollout[3:5].routes, rollout.routes[3:5])


def test_a_mixtures_weights_reach_the_engine(mixture_trainer, mixture_engine, tokenizer, monkeypatch):
    """Also a second time; without the step that vLLM leaves out the canary stops the run."""
    for seed in range(2):
        with torch.no_grad():
            for parameter in mixture_trainer.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        assert mixture_engine.sync(mixture_trainer) < 1e-5
    monkeypatch.setattr(lesson1, "pack_experts", lambda model: None)
    with pytest.raises(lesson1.SyncError):
        mixture_engine.sync(mixture_trainer)
    monkeypatch.undo()
    assert mixture_engine.sync(mixture_trainer) < 1e-5


def test_pack_places_routes_beside_their_tokens_and_counts_them():
    """Prompts of 2 and 1 tokens, responses of 1 and 3."""
    flat = lambda n: SimpleNamespace(token_ids=list(range(1, n + 1)), logprobs=[-1.0] * n, __len__=lambda: n)

    class Flat(SimpleNamespace):
        def __len__(self):
            return len(self.token_ids)
    done = lambda n, rows, value: SimpleNamespace(token_ids=list(range(1, n + 1)), logprobs=Flat(token_ids=list(range(1, n + 1)), logprobs=[-1.0] * n), finish_reason="stop",
                                                  routed_experts=np.full((rows, 1, 2), value, np.uint8) + np.arange(rows, dtype=np.uint8)[:, None, None])
    rollout = lesson1.pack([[5, 6], [7]], [done(1, 2, 10), done(3, 3, 250)], 0, 1.0, True)
    assert rollout.routes[..., 0, 0].tolist() == [[10, 11, 0, 0, 0], [0, 250, 251, 252, 0]]
    for rows in (1, 3):
        with pytest.raises(ValueError, match="routes for"):
            lesson1.pack([[5, 6]], [done(1, rows, 0)], 0, 1.0, True)


def test_r2_and_r3_replay_what_they_say(mixture_trainer, mixture_engine, tokenizer):
    """After a step: R2's picks are the old weights', R3's the engine's; and what the loop of lesson 3 scores with them."""
    _, prompts = lesson1.make_prompts(SUM, tokenizer, 8, np.random.default_rng(0))
    old = copy.deepcopy(mixture_trainer)
    mixture_engine.sync(old)
    rollout = mixture_engine.sample(prompts, 9, seed=0)
    with torch.no_grad():
        for parameter in mixture_trainer.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    assert lesson5.routes_for("none", old, rollout) is None and lesson5.routes_for("r3", old, rollout) is rollout.routes
    assert torch.equal(lesson5.routes_for("r2", old, rollout), lesson5.own_routes(old, rollout))
    assert not torch.equal(lesson5.own_routes(mixture_trainer, rollout), lesson5.own_routes(old, rollout))
    live, old_live = lesson1.score(mixture_trainer, rollout), lesson1.score(old, rollout)
    broken = lesson1.replace(rollout, routes=rollout.routes.roll(1, 1))                # so that the engine's picks are not old's
    for kind, routes in (("none", None), ("r2", lesson5.own_routes(old, rollout)), ("r3", broken.routes)):
        scored = lesson5.replayed_score(kind)
        assert torch.equal(scored(mixture_trainer, broken, old, False)[0], lesson5.score(mixture_trainer, rollout, routes))
        assert torch.equal(scored(old, broken, old, False)[0], lesson5.score(old, rollout, broken.routes) if kind == "r3" else old_live)
    assert (lesson5.score(mixture_trainer, rollout, lesson5.own_routes(old, rollout)) - live).abs().max() > 1e-2


def test_jump_finds_a_jump_and_replay_takes_it_away(mixture_trainer, mixture_engine, tokenizer):
    mixture_engine.sync(mixture_trainer)
    digits, prompts = lesson1.make_prompts(SUM, tokenizer, 16, np.random.default_rng(0))
    rollout, ahead = mixture_engine.sample(prompts, 9, seed=0), copy.deepcopy(mixture_trainer)
    lesson1.one_step(ahead, rollout, lesson1.rewards(SUM, digits, rollout, tokenizer), 1.5e-3)
    result = lesson5.jump(mixture_trainer, ahead, rollout, points=21)
    assert result["jump"] > 1e-2 and result["jump_width"] < 1e-6 and result["flips_at"]
    assert result["step_at_a_flip"] > 3 * result["step_elsewhere"] and result["step_at_a_flip"] > 3 * result["step_replayed"]


def test_jump_reports_what_it_replayed(mixture_trainer, mixture_engine, tokenizer):
    """On few points: the replayed curve starts with the live one and leaves it; picks flip where it says, and nowhere else."""
    mixture_engine.sync(mixture_trainer)
    digits, prompts = lesson1.make_prompts(SUM, tokenizer, 8, np.random.default_rng(0))
    rollout, ahead = mixture_engine.sample(prompts, 9, seed=0), copy.deepcopy(mixture_trainer)
    lesson1.one_step(ahead, rollout, lesson1.rewards(SUM, digits, rollout, tokenizer), 1.5e-3)
    result = lesson5.jump(mixture_trainer, ahead, rollout, points=6)
    model = copy.deepcopy(mixture_trainer).double()
    model.set_experts_implementation("eager")
    start, end = model.state_dict(), copy.deepcopy(ahead).double().state_dict()
    start = {name: value.clone() for name, value in start.items()}
    picks, live, fixed = [], [], []
    for u in result["u"]:
        logp, routes = lesson5.path_logp(model, start, end, u, rollout)
        picks.append(routes)
        live.append(logp[rollout.mask])
        fixed.append(lesson5.path_logp(model, start, end, u, rollout, picks[0])[0][rollout.mask])
    token = next(i for i in range(len(live[0])) if abs(live[0][i].item() - result["live"][0]) < 1e-12 and abs(live[-1][i].item() - result["live"][-1]) < 1e-12)
    assert result["replayed"] == pytest.approx([x[token].item() for x in fixed], abs=1e-9) and result["replayed"][0] == pytest.approx(result["live"][0], abs=1e-9)
    flipped = torch.stack([(lesson5.flips(a, b, rollout) > 0).any(1) for a, b in zip(picks, picks[1:])])
    assert result["flips_at"] == torch.nonzero(flipped[:, token]).flatten().tolist()
    steps = torch.stack(live).diff(dim=0).abs()
    assert result["step_elsewhere"] == pytest.approx(steps[~flipped].mean().item(), rel=1e-6) and result["step_at_a_flip"] == pytest.approx(steps[flipped].mean().item(), rel=1e-6)


def test_one_policy_measures_each_situation_with_its_own_weights(mixture, mixture_trainer, mixture_engine, tokenizer):
    """On the fp32 engine: natural agrees to rounding, the noise is gone when the next repeat begins, R2 stands where there is a lag
    and replays the weights before the step; the trainer is left as it was."""
    before = [p.clone() for p in mixture_trainer.parameters()]
    rows = {(r["situation"], r["replay"]): r for r in lesson5.one_policy(mixture, mixture_trainer, mixture_engine, tokenizer, 0, True)}
    assert set(rows) == {(s, k) for s in ("natural, fp32 trainer", "natural, bf16 trainer", "weight noise 2%") for k in ("none", "r3")} | {("one step stale", k) for k in ("none", "r2", "r3")}
    natural, rounded, noise = (rows[s, "none"] for s in ("natural, fp32 trainer", "natural, bf16 trainer", "weight noise 2%"))
    assert natural["abs"] < 1e-5 and 1e-3 < rounded["abs"] < noise["abs"] < 5e-2
    assert natural["flips"]["picks"] < 1e-3 < rounded["flips"]["picks"]
    stale = {k: rows["one step stale", k]["k3"] for k in ("none", "r2", "r3")}
    assert stale["r2"] == pytest.approx(stale["r3"], rel=1e-2) and stale["r2"] != stale["none"]          # an fp32 engine picks as the old weights do
    assert rows["one step stale", "none"]["rms where one does"] > rows["one step stale", "none"]["rms where no pick flips"]
    assert all(torch.equal(a, b) for a, b in zip(before, mixture_trainer.parameters()))


def test_gradients_replay_what_they_say(mixture_trainer, mixture_engine, tokenizer, monkeypatch):
    """R2 is the live gradient at the sync and not later; with nothing replayed both are the live one, of its own size."""
    rows = lesson5.gradients(mixture_trainer, mixture_engine, tokenizer, 0, True)
    assert [row["age"] for row in rows] == [0, 1, 4] and rows[0]["r2"] == pytest.approx(1, abs=1e-9) and rows[0]["r2 size"] == pytest.approx(1, abs=1e-6)
    assert all(row["r2"] < 0.999 and row["r2"] == pytest.approx(row["r3"], abs=2e-2) for row in rows[1:])
    monkeypatch.setattr(lesson5, "routes_for", lambda *args: None)
    assert all(row[key] == pytest.approx(1, abs=1e-9) for row in lesson5.gradients(mixture_trainer, mixture_engine, tokenizer, 0, True) for key in ("r2", "r3", "r2 size"))
    gradient = lesson5.replayed_gradient
    monkeypatch.setattr(lesson5, "routes_for", lambda kind, *args: kind)
    monkeypatch.setattr(lesson5, "replayed_gradient", lambda model, rollout, A, routes: gradient(model, rollout, A, None) * {None: 1, "r2": 2, "r3": 3}[routes])
    assert [rows[0][f"{kind} size"] for rows in [lesson5.gradients(mixture_trainer, mixture_engine, tokenizer, 0, True)] for kind in ("r2", "r3")] == pytest.approx([2, 3])


def test_the_study_trains_with_what_it_names(mixture_trainer, mixture_engine, tokenizer, monkeypatch):
    """Arm, seed, period, weight and scoring of every run; the reference's own settings."""
    calls, references = [], []
    monkeypatch.setattr(lesson4, "run", lambda start, engine, tokenizer, setting, arm, seed, reference, **changes: calls.append((setting, arm, seed, changes)) or {})
    monkeypatch.setattr(lesson4, "Reference", lambda start, engine, tokenizer, setting, policy_id: references.append(setting) or True)
    monkeypatch.setattr(lesson5, "replayed_score", lambda kind: kind)
    monkeypatch.setattr(lesson3, "weighted", lambda correct: correct)
    lesson5.study(mixture_trainer, mixture_engine, tokenizer, "a", {}, lambda records: None)
    assert references == [lesson5.STUDY] and all(setting == lesson5.STUDY for setting, *_ in calls)
    weights = lesson2.CORRECTIONS
    assert [(arm, seed, c["period"], c["score"], c["loss"]) for _, arm, seed, c in calls] == [("on-policy", seed, 1, "none", weights["none"]) for seed in range(3)] + [
        ("minirl", seed, period, kind, weights["minirl"]) for period in (2, 8, 32) for kind in ("none", "r2", "r3") for seed in range(3)]


def test_a_study_goes_on_where_it_stopped(mixture_trainer, mixture_engine, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(lesson5, "STUDY", lesson4.Setting("sum", steps=2, period=2, lr=1e-3, prompts=2, every=2))
    monkeypatch.setattr(lesson1, "ROOT", tmp_path)
    runs, saved = [], []
    real = lesson4.run
    monkeypatch.setattr(lesson4, "run", lambda *args, **kwargs: runs.append(kwargs) or real(*args, **kwargs))
    records = lesson5.study(mixture_trainer, mixture_engine, tokenizer, "a", {}, saved.append)
    assert len(runs) == len(saved) == len(records) == 30 and {r["period"] for r in runs} == {1, 2, 8, 32}
    assert lesson5.study(mixture_trainer, mixture_engine, tokenizer, "a", records, saved.append) == records and len(runs) == 30
    del records["minirl; r3; period 8; seed 1"]
    assert len(lesson5.study(mixture_trainer, mixture_engine, tokenizer, "a", records, saved.append)) == 30 and len(runs) == 31
    lesson5.study(mixture_trainer, mixture_engine, tokenizer, "another policy", records, saved.append)
    assert len(runs) == 61


def test_quick_run_and_redrawn_picture(mixture, tmp_path):
    result = subprocess.run([sys.executable, str(lesson1.ROOT / "05_router_replay.py"), "--quick", "--out", str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "of the picks flip" in result.stdout
    saved = json.loads((tmp_path / "05_router_replay.json").read_text())
    natural = {r["replay"]: r for r in saved["gap"] if r["policy"] == "MoE" and r["situation"] == "natural, fp32 trainer"}
    assert 1e-4 < natural["none"]["flips"]["picks"] < 0.05 and set(natural) == {"none", "r3"}
    (tmp_path / "05_router_replay.png").unlink()
    lesson5.draw(saved, tmp_path / "05_router_replay.png")
    assert (tmp_path / "05_router_replay.png").stat().st_size > 10_000


def test_a_dense_model_is_refused_in_one_line(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lesson1, "Sampler", lambda *a, **k: pytest.fail("vLLM was started"))
    with pytest.raises(SystemExit) as exit:
        lesson5.main(["--model", str(tiny), "--out", str(tmp_path)])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and "dense" in error
