"""Lesson 5: gates, replay and recording on small mixtures of experts, and on the real engine's routes."""
import copy
import json
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import lesson1, rejected

lesson5 = import_module("05_router_replay")
study, draw = import_module("study"), import_module("draw")
lesson2, lesson3, lesson4 = study.lesson2, study.lesson3, study.lesson4
SUM = lesson1.SUM


# ---------------------------------------------------------------- gates
def check_gates(gates):
    """VeOmni#719: logits [2, 1, 0, -1], softmax [.6439, .2369, .0871, .0321]; and whose logits get a gradient."""
    logits, picks = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.0, 3.0]]), torch.tensor([[0, 2], [3, 1]])
    normalized, raw = gates(logits, picks, True), gates(logits, picks, False)
    close = lambda a, b: torch.allclose(a, torch.tensor(b), atol=1e-4)
    assert close(normalized[0], [0.8808, 0.1192]), "normalized: p_i over the sum of the picked p_j"
    assert close(raw[0], [0.6439, 0.0871]), "not normalized: p_i, a softmax over all experts"
    assert close(normalized.sum(1), [1.0, 1.0]) and raw[1, 0] > raw[1, 1], "in the order of the picks"
    logits.requires_grad_()
    g = torch.autograd.grad(gates(logits, picks, True)[0, 1], logits)[0][0]
    # d g_2 / d s_j = g_2 (1[j = 2] - g_j) for the picked, 0 for the others
    assert close(g, [-0.8808 * 0.1192, 0, 0.1192 * 0.8808, 0]), "gradients reach the picked logits, and no others"
    all_count = torch.autograd.grad(gates(logits, picks, False)[0, 1], logits)[0][0, 1]
    assert all_count < -0.01, "not normalized: all logits count"
    rough = torch.tensor([[2.0, 1.015625, 0.3, -1.0]]).bfloat16()
    exact = rough.double().softmax(-1)[:, [0, 1]]
    for form, right in ((True, exact / exact.sum()), (False, exact)):
        g = gates(rough, torch.tensor([[0, 1]]), form)
        assert g.dtype == torch.float32, "float32, whatever the router's dtype"
        assert torch.allclose(g.double(), right, atol=1e-6), "computed in float32 too"


def p_over_sum(s, i, n):
    """As transformers writes it."""
    p = s.float().softmax(-1).gather(-1, i)
    return p / p.sum(-1, keepdim=True) if n else p


def masked_gates(s, i, n):
    p = (s.float().softmax(-1) * (s >= s.topk(i.shape[1]).values[:, -1:])).gather(-1, i)
    return p / (p.sum(-1, keepdim=True) + 1e-9) if n else p


def sigmoid_gates(s, i, n):
    p = s.float().sigmoid().gather(-1, i)
    return p / p.sum(-1, keepdim=True) if n else p


def by_own_top_k(s, i, n):
    p = s.float().softmax(-1)
    return p.gather(-1, i) / (p.topk(i.shape[1]).values.sum(-1, keepdim=True) if n else 1)


WRONG_GATES = {
    "missing normalization": lambda s, i, n: p_over_sum(s, i, False),
    "always normalized": lambda s, i, n: p_over_sum(s, i, True),
    "softmax over the picked alone": lambda s, i, n: s.float().gather(-1, i).softmax(-1),
    "normalized by the trainer's own top k": by_own_top_k,
    "from masked probabilities": masked_gates,
    "the sampler's gates, constants": lambda s, i, n: p_over_sum(s.detach(), i, n) + 0 * s.sum(),
    "sigmoid": sigmoid_gates,
    "own picks": lambda s, i, n: p_over_sum(s, s.topk(i.shape[1]).indices, n),
    "in the router's dtype": lambda s, i, n: p_over_sum(s, i, n).to(s.dtype),
    "softmax in bfloat16": lambda s, i, n: p_over_sum(s.bfloat16().softmax(-1).log(), i, n),
    "float32 only at the end": lambda s, i, n: s.softmax(-1).gather(-1, i).float() / (
        s.softmax(-1).gather(-1, i).sum(-1, keepdim=True) if n else 1),
}


def test_gates():
    check_gates(lesson5.gates)
    check_gates(p_over_sum)


@pytest.mark.parametrize("name", WRONG_GATES)
def test_gates_rejects(name):
    rejected(check_gates, WRONG_GATES[name])


def test_gates_of_picks_far_below_the_best_are_finite():
    """104 nats below it the probabilities themselves are 0 in float32; so is their sum."""
    logits = torch.tensor([[0.0, -200.0, -201.0]], requires_grad=True)
    g = lesson5.gates(logits, torch.tensor([[1, 2]]), True)
    assert torch.allclose(g, torch.tensor([[0.7310586, 0.2689414]]))
    assert torch.autograd.grad(g[0, 0], logits)[0].isfinite().all()


# ---------------------------------------------------------------- the routers of every family
SIZE = dict(vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, num_experts_per_tok=2)
QWEN = {**SIZE, "head_dim": 16, "num_experts": 8}
DEEPSEEK = {**SIZE, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 8,
            "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1}
GLM = {**SIZE, "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
       "first_k_dense_replace": 1}
SOFTMAX = {      # do the gates sum to 1?
    "qwen2_moe": ({**QWEN, "shared_expert_intermediate_size": 16}, False),
    "qwen3_moe": ({**QWEN, "norm_topk_prob": True}, True),
    "qwen3_5_moe_text": (QWEN, True),
    "mixtral": ({**SIZE, "head_dim": 16, "num_local_experts": 8}, True),
    "olmoe": (QWEN, False),
    "ernie4_5_moe": ({**SIZE, "moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0}, True),
    "deepseek_v2": (DEEPSEEK, False),
}
OTHERS = {       # what the refusal names
    "deepseek_v2": ({**DEEPSEEK, "routed_scaling_factor": 16.0}, "DeepseekV2TopkRouter cannot be replayed"),
    "deepseek_v3": ({**DEEPSEEK, "head_dim": 8}, "DeepseekV3TopkRouter cannot be replayed"),
    "glm4_moe": (GLM, "Glm4MoeTopkRouter cannot be replayed"),
    "dots1": (GLM, "Dots1TopkRouter cannot be replayed"),
    "gpt_oss": ({**SIZE, "head_dim": 16, "num_local_experts": 8}, "GptOssForCausalLM has no router"),
    "gpt2": (dict(vocab_size=32, n_embd=32, n_layer=2, n_head=2), "GPT2LMHeadModel has no router"),
}


def random_model(kind: str, config: dict):
    """Random weights; its routers see differences, and a bias of their choice has an effect."""
    torch.manual_seed(0)
    config = lesson1.transformers.AutoConfig.for_model(kind, **{"pad_token_id": 0, **config})
    model = lesson1.transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if x.dim() >= 2 and x.is_floating_point():
                x.normal_(0, 0.3)
            if "e_score_correction_bias" in name:
                x.normal_()
    return model


@pytest.mark.parametrize("kind", SOFTMAX)
def test_a_softmax_router_replays_its_own_picks(kind):
    config, normalized = SOFTMAX[kind]
    model, rollout = random_model(kind, config), rollout_of()
    assert lesson5.is_mixture(model.config) and lesson5.normalizes(model) is normalized
    routes, live = lesson5.own_routes(model, rollout), lesson1.logprobs(model, rollout)
    assert routes.shape == (4, 18, len(lesson5.routers(model)), 2)
    assert (lesson5.logprobs(model, rollout, routes) - live).abs().max() < 2e-6
    assert (lesson5.logprobs(model, rollout, (routes + 1) % 8) - live).abs().max() > 1e-3


@pytest.mark.parametrize("kind", OTHERS)
def test_any_other_router_is_refused_by_name(kind):
    """F1: own picks would change its log-probs."""
    config, message = OTHERS[kind]
    model, rollout = random_model(kind, config), rollout_of()
    for call in (lesson5.normalizes, lambda m: lesson5.own_routes(m, rollout),
                 lambda m: lesson5.routes_for("r2", m, rollout),
                 lambda m: lesson5.logprobs(m, rollout, torch.zeros(4, 18, 2, 2, dtype=torch.long)),
                 lambda m: lesson5.routes_for("r3", m, rollout)):
        with pytest.raises(ValueError, match=message) as error:
            call(model)
        assert "\n" not in str(error.value)


def check_normalizes(normalizes):
    """True and false by what the routers do; refused what neither form explains. The model stays as it is."""
    for norm in (True, False):
        model = small_mixture(norm_topk_prob=norm)
        live = lesson1.logprobs(model, rollout_of())
        assert normalizes(model) is norm and normalizes(model) is norm
        assert torch.equal(lesson1.logprobs(model, rollout_of()), live), "hooks are left behind"
    for change in (lambda s, g, i: (s, 2 * g, i), lambda s, g, i: (s, s.sigmoid().gather(-1, i), i),
                   lambda s, g, i: (s, g.flip(-1), i)):
        model = small_mixture()
        lesson5.routers(model)[1].register_forward_hook(lambda router, inputs, output, f=change: f(*output))
        try:
            normalizes(model)
        except ValueError:
            continue
        assert False, "accepted"


WRONG_NORMALIZES = {
    "from the configuration": lambda m: m.config.norm_topk_prob,
    "always": lambda m: True,
    "the first layer only": lambda m: only_layer(m, 0),
    "sums only": lambda m: all_sums(m),
}


def outputs_of(model):
    outputs = []
    with lesson5.hooked(model, lambda layer, output: outputs.append(output)):
        model(input_ids=torch.arange(16)[None], use_cache=False)
    return outputs


def only_layer(model, layer):
    s, g, i = outputs_of(model)[layer]
    form = bool(torch.allclose(p_over_sum(s, i, True), g, atol=1e-6))
    if not torch.allclose(p_over_sum(s, i, form), g, atol=1e-6):
        raise ValueError
    return form


def all_sums(model):
    sums = torch.cat([g.sum(-1) for _, g, _ in outputs_of(model)])
    if (sums > 1 + 1e-4).any():
        raise ValueError
    return bool(torch.allclose(sums, torch.ones(len(sums))))


def test_normalizes():
    check_normalizes(lesson5.normalizes)


@pytest.mark.parametrize("name", WRONG_NORMALIZES)
def test_normalizes_rejects(name):
    rejected(check_normalizes, WRONG_NORMALIZES[name])


# ---------------------------------------------------------------- replay, without an engine
def small_mixture(**changes):
    """Random weights; its routers see differences."""
    torch.manual_seed(0)
    config = lesson1.transformers.AutoConfig.for_model(**{**lesson5.MIXTURE, **changes})
    model = lesson1.transformers.AutoModelForCausalLM.from_config(config).eval()
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
    return lesson1.Rollout(
        ids(P) * prompt_mask, prompt_mask, ids(T) * mask, mask, torch.zeros(B, T),
        torch.zeros(B, T, 0, dtype=torch.long), torch.zeros(B, T, 0), torch.ones(B, dtype=torch.bool),
        temperature=1.0, neutral=True, version=1)


def check_replay(replay):
    """What replay is: own picks change nothing; other picks go through other experts; nothing is left behind."""
    for changes in ({}, {"norm_topk_prob": False}):
        model, rollout = small_mixture(**changes), rollout_of()
        plain = lesson1.logprobs(model, rollout)
        routes = lesson5.own_routes(model, rollout)

        def replayed(picks, m=model):
            with replay(m, picks):
                return lesson1.logprobs(m, rollout)
        assert torch.allclose(replayed(routes), plain, atol=1e-6), "own picks change nothing"
        assert torch.allclose(replayed(routes.flip(-1)), plain, atol=1e-6), "the order in a pick does not matter"
        # one other expert at one place changes that row's tokens from there on, and no others; row 1: 6 of 9 prompt
        # places, 5 tokens
        other = routes.clone()
        other[1, 11, 1, 0] = next(e for e in range(8) if e not in routes[1, 11, 1])
        changed = (replayed(other) - plain).abs() > 1e-5
        assert changed[1, 3:5].all(), "other picks, other experts"
        assert not changed[1, :3].any() and not changed[[0, 2, 3]].any(), "other tokens' picks are changed too"
        # padding routes nobody; other sizes of the experts' batches round elsewhere
        padding = ~torch.cat([rollout.prompt_mask, rollout.mask], 1)
        at_7 = torch.where(padding[..., None, None], 7, routes)
        assert torch.allclose(replayed(at_7), plain, atol=1e-5), "padding may hold any expert, twice the same too"
        assert torch.equal(lesson1.logprobs(model, rollout), plain), "outside nothing is left"
        with pytest.raises(ZeroDivisionError):
            with replay(model, other):
                1 / 0
        assert torch.equal(lesson1.logprobs(model, rollout), plain), "after an exception nothing is left"
    seen = []                                                                # another hook is none of replay's business
    handle = lesson5.routers(model)[0].register_forward_hook(lambda router, inputs, output: seen.append(output))
    replayed(routes)
    lesson1.logprobs(model, rollout)
    assert len(seen) == 2, "another hook on the router is gone"
    handle.remove()
    for wrong in (routes[:, :, :2], routes - 8, routes[:, :-1], None):
        try:
            replayed(wrong)
        except ValueError:
            continue
        except Exception as error:
            assert False, f"no ValueError but {error!r}"
        assert False, "routes of another model or another batch are replayed"
    half, dtypes = small_mixture().bfloat16(), []
    with replay(half, routes):
        half.model.layers[0].mlp.experts.register_forward_pre_hook(lambda m, inputs: dtypes.append(inputs[2].dtype))
        lesson1.logprobs(half, rollout)
    assert dtypes == [torch.bfloat16], "gates in the dtype of the router's own"


def replayed(model, routes, gates=None, change=lambda routes: routes, layer_of=lambda layer: layer, checked=True,
             cast=True):
    """Hooks of a replay with one thing wrong."""
    if checked:
        lesson5.check_routes(model, routes)
    routes, hooks = change(routes), []
    for layer, router in enumerate(lesson5.routers(model)):
        def hook(router, inputs, output, picks=routes[:, :, layer_of(layer)].flatten(0, 1)):
            if len(output[0]) != len(picks) and checked:
                raise ValueError("other tokens")
            g = (gates or p_over_sum)(output[0], picks, model.config.norm_topk_prob)
            return output[0], g.to(output[1].dtype) if cast else g, picks
        hooks.append(router.register_forward_hook(hook))
    return hooks


def replay_with(remove=True, clear=False, **wrong):
    @contextmanager
    def context(model, routes):
        hooks = replayed(model, routes, **wrong)
        try:
            yield
        finally:
            for hook in hooks if remove else []:
                hook.remove()
            for router in lesson5.routers(model) if clear else []:
                router._forward_hooks.clear()
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


def twice(s, i, n):
    return p_over_sum(s, i, n) / s.float().softmax(-1).topk(3).values.sum(-1, keepdim=True)


WRONG_REPLAY = {
    "hooks left behind": replay_with(remove=False),
    "left behind after an exception": cleaned_only_without_an_exception,
    "clears other people's hooks": replay_with(clear=True),
    "silent no-op": no_operation,
    "routes not checked": replay_with(checked=False),
    "gates not cast back": replay_with(cast=False),
    "padding prepended": replay_with(change=lambda r: torch.cat([r[:, -1:], r[:, :-1]], 1)),
    "off by one": replay_with(change=lambda r: torch.cat([r[:, 1:], r[:, -1:]], 1)),
    "layers shifted": replay_with(layer_of=lambda layer: (layer + 1) % 3),
    "layers swapped": replay_with(layer_of=lambda layer: 2 - layer),
    "one layer's picks everywhere": replay_with(layer_of=lambda layer: 0),
    "normalized always": replay_with(gates=lambda s, i, n: p_over_sum(s, i, True)),
    "normalized twice over the top 3": replay_with(gates=twice),
    "never normalized": replay_with(gates=lambda s, i, n: p_over_sum(s, i, False)),
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
    """One layer, one prompt token, one response token, so that one pick decides: a trainer that prefers {a, b},
    replayed with {a, c}, uses expert c, and c's row of the router learns."""
    model, rollout = small_mixture(num_experts=4, num_hidden_layers=1), rollout_of(((1, 1),))
    wider = small_mixture(num_experts=4, num_hidden_layers=1, num_experts_per_tok=3)
    a, b, c = lesson5.own_routes(wider, rollout)[0, 0, 0].tolist()
    assert lesson5.own_routes(model, rollout)[0, 0, 0].tolist() == [a, b]
    router, experts = lesson5.routers(model)[0], model.model.layers[0].mlp.experts.down_proj
    with replay(model, torch.tensor([a, c]).expand(1, 2, 1, 2).contiguous()):
        lesson1.logprobs(model, rollout, grad=True).sum().backward()
    assert router.weight.grad is not None, "constant gates leave the router without a gradient"
    assert router.weight.grad[[a, c]].abs().amax(1).min() > 1e-5, "the picked experts' rows of the router learn"
    others = [e for e in range(4) if e not in (a, c)]
    assert router.weight.grad[others].abs().max() < 1e-8, "normalized over the picked, the others' logits cancel"
    assert experts.grad[[a, c]].abs().amax((1, 2)).min() > 1e-6 and experts.grad[others].abs().max() == 0


WRONG_GRADIENT = {
    "silent no-op": no_operation,
    "constant gates": replay_with(gates=lambda s, i, n: p_over_sum(s.detach(), i, n)),
    "never normalized": replay_with(gates=lambda s, i, n: p_over_sum(s, i, False)),
    "masked": replay_with(gates=masked_gates),
}


def test_router_gradient():
    check_router_gradient(lesson5.replay)
    check_router_gradient(replay_with())


@pytest.mark.parametrize("name", WRONG_GRADIENT)
def test_router_gradient_rejects(name):
    rejected(check_router_gradient, WRONG_GRADIENT[name])


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
    whole = lesson5.logprobs(model, rollout, routes)
    assert (whole - lesson1.logprobs(model, rollout)).abs().max() > 1e-2
    own = lesson5.own_routes(model, rollout)
    monkeypatch.setattr(lesson1, "LOGITS_AT_ONCE", 1)
    assert torch.allclose(lesson5.logprobs(model, rollout, routes), whole, atol=1e-6)
    assert torch.equal(lesson5.own_routes(model, rollout), own) and own.shape == routes.shape
    logp, head = lesson5.logprobs(model, rollout, routes, head=True)
    assert head.shape[-1] == 0 and torch.allclose(logp, whole, atol=1e-6)


def check_gradient_in_parts(logprobs, monkeypatch):
    """With replay too the gradient does not depend on how many micro-batches there are; and the backward pass computes
    each of them anew, so that memory holds one at a time."""
    model, rollout, gradients, calls = small_mixture(), rollout_of(), [], []
    routes = lesson5.own_routes(model, rollout).roll(1, -2).contiguous()
    lesson5.routers(model)[0].register_forward_hook(lambda router, inputs, output: calls.append(len(output[0])))
    for at_once in (2**26, 1):
        with monkeypatch.context() as patch:
            patch.setattr(lesson1, "LOGITS_AT_ONCE", at_once)
            calls.clear()
            logprobs(model, rollout, routes, grad=True).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert calls == [18] * 8, "four rows, each computed twice"
    largest = max(g.abs().max() for g in gradients[0])
    assert all((a - b).abs().max() < 1e-6 * largest for a, b in zip(*gradients)), "another gradient in parts"


def in_parts(run):
    def logprobs(model, rollout, routes, grad):
        parts = [slice(i, i + 1) for i in range(4)] if lesson1.LOGITS_AT_ONCE == 1 else [slice(None)]
        return torch.cat([run(model, rollout[rows], routes[rows]) for rows in parts])
    return logprobs


def replayed_around_the_checkpoint(model, rollout, routes):
    """Its second forward pass, in the backward pass, is live."""
    with lesson5.replay(model, routes):
        return lesson5.checkpoint(lambda: lesson1.logprobs(model, rollout, grad=True), use_reentrant=False)


def all_parts_kept(model, rollout, routes):
    with lesson5.replay(model, routes):
        return lesson1.logprobs(model, rollout, grad=True)


WRONG_PARTS = {
    "replay around the checkpoint": in_parts(replayed_around_the_checkpoint),
    "every part's activations kept": in_parts(all_parts_kept),
    "without replay": lambda model, rollout, routes, grad: lesson1.logprobs(model, rollout, grad=True)
    * (1 if lesson1.LOGITS_AT_ONCE == 1 else 1.001),
}


def test_gradient_in_parts(monkeypatch):
    check_gradient_in_parts(lesson5.logprobs, monkeypatch)


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_gradient_in_parts_rejects(name, monkeypatch):
    def check(f):
        try:
            check_gradient_in_parts(f, monkeypatch)
        except torch.utils.checkpoint.CheckpointError as error:
            raise AssertionError from error
    rejected(check, WRONG_PARTS[name])


@pytest.mark.parametrize("change, message", [
    (lambda r: None, "no routes"), (lambda r: r[:, :, :2], "3 layers"), (lambda r: r[..., :1], "2 experts"),
    (lambda r: r[0], "int64"), (lambda r: r + 1, "row 0, input token 0, layer 0: .* of 8 experts"),
    (lambda r: r - 1, "row 0, input token 0, layer 0"), (lambda r: r.to(torch.uint8), "int64"),
    (lambda r: r[:, :-1].contiguous(), "input tokens"), (lambda r: r[:3], "input tokens")],
    ids=["none", "a layer missing", "an expert missing", "no batch", "too large", "negative", "uint8", "too short",
         "a row missing"])
def test_bad_routes_are_refused(change, message):
    model, rollout = small_mixture(), rollout_of()
    routes = lesson5.own_routes(model, rollout)
    routes[0, 0, 0, 0], routes[0, 0, 0, 1] = 0, 7
    plain = lesson1.logprobs(model, rollout)
    with pytest.raises(ValueError, match=message) as error:
        with lesson5.replay(model, change(routes)):
            lesson1.logprobs(model, rollout)
    assert "\n" not in str(error.value) and torch.equal(lesson1.logprobs(model, rollout), plain)


def check_refusals(check_routes):
    """The model's own routes pass; every kind of others does not."""
    model, rollout = small_mixture(), rollout_of()
    routes, real = lesson5.own_routes(model, rollout), torch.cat([rollout.prompt_mask, rollout.mask], 1)
    padded = torch.where(real[..., None, None], routes, 0)
    check_routes(model, routes)
    check_routes(model, padded)
    check_routes(model, padded, real)
    fewer, wider = small_mixture(num_experts=4), small_mixture(num_experts=16, num_experts_per_tok=3)
    check_routes(wider, lesson5.own_routes(wider, rollout))
    twice_the_same = padded.clone()
    twice_the_same[1, 5] = 3
    zeros = torch.zeros_like(routes)
    for m, wrong, where in ((model, None, None), (model, routes[:, :, :2], None), (model, routes[..., :1], None),
                            (model, routes[0], None), (model, routes.clamp(min=7) + 1, None), (model, routes - 8, None),
                            (model, routes.to(torch.int32), None), (fewer, routes.clamp(min=4), None),
                            (model, twice_the_same, real), (model, zeros, real)):
        try:
            check_routes(m, wrong, where)
        except ValueError as error:
            if where is not None:
                row = "row 1, input token 5" if wrong is twice_the_same else "row 0, input token 0"
                assert row in str(error), "the message names the row"
            continue
        except Exception as error:                     # another error is not the one clear line
            assert False, error
        assert False, "accepted"


def refuses_only(*kinds):
    def check(model, routes, real=None):
        E = 8 if "hard-coded" in kinds else model.config.num_experts
        if "missing" in kinds and routes is None:
            raise ValueError
        if "shape" in kinds and (routes.dim() != 4 or routes.shape[2:] != (3, model.config.num_experts_per_tok)):
            raise ValueError
        if "range" in kinds and (routes.min() < 0 or routes.max() >= E):
            raise ValueError
        if "dtype" in kinds and routes.dtype != torch.int64:
            raise ValueError
        if "twice" in kinds and real is not None:
            same = (routes.sort(-1).values.diff(dim=-1) == 0).flatten(2).any(-1)
            if "everywhere" not in kinds:
                same = same & real
            if same.any():
                row, token = same.nonzero()[0].tolist()
                raise ValueError("" if "unnamed" in kinds else f"row {row}, input token {token}")
    return check


KINDS = {"missing", "shape", "range", "dtype", "twice"}
WRONG_REFUSALS = {**{f"not {name}": refuses_only(*(KINDS - {name})) for name in sorted(KINDS)},
                  "sizes hard-coded": refuses_only(*KINDS, "hard-coded"),
                  "row not named": refuses_only(*KINDS, "unnamed"),
                  "padding judged": refuses_only(*KINDS, "everywhere")}


def test_refusals():
    check_refusals(lesson5.check_routes)
    check_refusals(refuses_only(*KINDS))


@pytest.mark.parametrize("name", WRONG_REFUSALS)
def test_refusals_rejects(name):
    def check(f):
        try:
            check_refusals(f)
        except (ValueError, AttributeError, TypeError) as error:
            raise AssertionError from error
    rejected(check, WRONG_REFUSALS[name])


def test_a_dense_model_has_no_router(trainer):
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no router"):
        lesson5.routers(trainer)
    assert not lesson5.is_mixture(trainer.config) and lesson5.is_mixture(small_mixture().config)


def test_an_engines_broken_routes_are_refused_with_their_row():
    """F10: zeros at a real token; a response's last token and padding hold zeros and are none of its business."""
    model, rollout = small_mixture(), rollout_of()
    routed = torch.cat([rollout.prompt_mask, rollout.mask], 1)
    for row, (p, t) in enumerate(((9, 9), (6, 5), (9, 1), (4, 9))):
        routed[row, 9 + t - 1] = False
    routes = torch.where(routed[..., None, None], lesson5.own_routes(model, rollout), 0)
    whole = lesson1.replace(rollout, routes=routes)
    assert lesson5.routes_for("r3", model, whole) is routes
    for value in (0, -1, 8):
        message = rf"row 2, input token 8, layer 1: the pick \[{value}, {value}\]"
        broken = routes.clone()
        broken[2, 8, 1] = value
        with pytest.raises(ValueError, match=message):
            lesson5.routes_for("r3", model, lesson1.replace(rollout, routes=broken))
    with pytest.raises(ValueError, match="no routes were recorded"):      # an engine that does not record them
        lesson5.routes_for("r3", model, rollout)


# ---------------------------------------------------------------- the measures
def check_flips(flips):
    """Two rows, prompts of one and of two tokens: the places that predict a token are those before it."""
    rollout = rollout_of(((1, 2), (2, 1)))
    a = torch.tensor([0, 2]).expand(2, 4, 2, 2).clone()                       # (B, P + T, L, k)
    b = a.flip(-1).clone()
    assert flips(a, b, rollout).tolist() == [[0, 0]] * 3, "the same sets in another order"
    b[0, 1, 0] = torch.tensor([2, 5])                                        # predicts row 0's first token
    b[0, 2, 1] = torch.tensor([6, 7])                                        # its second
    b[0, 3], b[0, 0] = 7, 7                                                  # the last token predicts nothing; padding
    b[1, 2] = 7                                                              # row 1 ends before
    assert flips(a, b, rollout).tolist() == [[1, 0], [0, 2], [0, 0]]


def one_place_on(a, b, r):
    return lesson5.flips(torch.cat([a[:, 1:], a[:, :1]], 1), torch.cat([b[:, 1:], b[:, :1]], 1), r)


def first_rows_prompt(a, b, r):
    p = int(r.prompt_mask[0].sum())
    a, b = (x[:, p - 1:p - 1 + r.mask.shape[1]][r.mask] for x in (a, b))
    return a.shape[-1] - (a[..., :, None] == b[..., None, :]).any(-1).sum(-1)


WRONG_FLIPS = {
    "order counts": lambda a, b, r: (a[:, 1:-1][r.mask] != b[:, 1:-1][r.mask]).sum(-1),
    "places of the tokens themselves": one_place_on,
    "the first row's prompt length for all": first_rows_prompt,
    "sets, not experts": lambda a, b, r: (lesson5.flips(a, b, r) > 0).long(),
    "padding counted": lambda a, b, r: lesson5.flips(a, b, lesson1.replace(r, mask=torch.ones_like(r.mask))),
    "overlap": lambda a, b, r: a.shape[-1] - lesson5.flips(a, b, r),
}


def test_flips():
    check_flips(lesson5.flips)


@pytest.mark.parametrize("name", WRONG_FLIPS)
def test_flips_rejects(name):
    rejected(check_flips, WRONG_FLIPS[name])


def test_flip_row():
    d = torch.tensor([3.0, 4.0, 0.5, -0.5])
    row = lesson5.flip_row(d, torch.tensor([[0, 1], [2, 1], [0, 0], [0, 0]]))
    assert row == {"picks that flip": 3 / 8, "by layer": [0.25, 0.5], "experts per token": 1.0,
                   "tokens with a flip": 0.5, "if layers are independent": 1 - 0.75 * 0.5,
                   "rms d: no flip": 0.5, "rms d: flip": 12.5**0.5}


def test_gap_row():
    """Mean over the seeds, ± between them; the tail beside lesson 1's sizes."""
    zeros = torch.zeros(4)
    first, second = torch.tensor([0.2, -0.2, 0.0, 0.0]), torch.tensor([0.8, 0.0, 0.0, 0.0])
    row = lesson5.gap_row([(first, zeros), (second, zeros)])
    assert row["tokens"] == 8 and row["max"] == pytest.approx(0.8) and row["mean |d|"] == pytest.approx(0.15)
    assert row["mean |d| ±"] == pytest.approx(0.1 / 2**0.5) and (row["F(1.1)"], row["F(2)"]) == (3 / 8, 1 / 8)
    k3 = [lesson1.gap(x, zeros)["k3"] for x in (first, second)]
    assert row["k3 by seed"] == k3 and row["k3"] == np.mean(k3) and row["k3 ±"] == np.std(k3, ddof=1)


def check_beyond(beyond):
    d = torch.tensor([0.5, -0.5, 0.05, -0.05, 0.8]).double()
    assert beyond(torch.tensor([np.log(1.5), 0.0]), 1.5) == 0, "exceeds: strictly"
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


# ---------------------------------------------------------------- what the numbers say
def natural(live, replayed, flip=0.005):
    """The two rows that the verdict reads, from k3 by seed."""
    rows = [{"policy": "MoE", "situation": "natural, fp32 trainer", "replay": kind, "picks that flip": flip,
             "k3": float(np.mean(k3)), "k3 ±": float(np.std(k3, ddof=1)), "k3 by seed": k3}
            for kind, k3 in (("none", live), ("r3", replayed))]
    return [{"policy": "dense", "situation": "natural, fp32 trainer", "replay": "none"}, *rows,
            {"policy": "MoE", "situation": "one step stale", "replay": "none"}]


def check_verdict(verdict):
    """F6: it follows the numbers, also where they are contrary."""
    helps = verdict(natural([4e-5, 8e-5], [2e-5, 2e-5]))
    assert all(x in helps for x in ("0.50% of the picks flip", "67%", "(50% to 75% by seed)", "removes"))
    for contrary in (([4e-5, 8e-5], [2e-5, 9e-5]), ([2e-5, 2e-5], [5e-4, 7e-4]), ([3e-5, 3e-5], [3e-5, 2e-5])):
        says = verdict(natural(*contrary))
        assert "does not lower" in says and "-" not in says and "removes" not in says
    none = verdict(natural([1e-14, 2e-14], [1e-14, 2e-14], flip=0.0))
    assert "nothing to replay" in none and "%" in none and "removes" not in none


def share_alone(rows):
    share = 1 - rows[2]["k3"] / rows[1]["k3"]
    return f"{rows[1]['picks that flip']:.2%} of the picks flip, {share:.0%}: replay removes them."


def by_the_mean(rows):
    if rows[2]["k3"] > rows[1]["k3"]:
        return "Replay does not lower k3."
    return lesson5.verdict(natural([4e-5, 8e-5], [2e-5, 2e-5]))


WRONG_VERDICT = {"whatever was measured": share_alone, "by the mean alone": by_the_mean,
                 "never helps": lambda rows: "does not lower",
                 "always the same": lambda rows: lesson5.verdict(natural([4e-5, 8e-5], [2e-5, 2e-5]))}


def test_verdict():
    check_verdict(lesson5.verdict)


@pytest.mark.parametrize("name", WRONG_VERDICT)
def test_verdict_rejects(name):
    rejected(check_verdict, WRONG_VERDICT[name])


def test_the_picture_is_drawn_whatever_was_measured(tmp_path):
    """C2: no flip anywhere, no gap after replay, null where there was no token."""
    whole = draw.load("05_router_replay")
    for change in ("as it is", "no flips", "no gap", "replay hurts"):
        result = copy.deepcopy(whole)
        for row in result["gap"]:
            if change == "no flips" and row["policy"] == "MoE":
                row |= {"picks that flip": 0.0, "by layer": [0.0] * 3, "tokens with a flip": 0.0, "rms d: flip": None}
            if change == "no gap":
                row |= {"k3": 0.0, "k3 ±": 0.0}
            if change == "replay hurts" and row["replay"] == "r3":
                row["k3"] *= 100
        if change == "no flips":
            result["jump"] |= {"flips at": [], "step at a flip": None}
        figure = draw.draw_05(result)
        titles = " ".join(axes.get_title() for axes in figure.axes)
        assert ("does not lower" in titles) == (change in ("no gap", "replay hurts"))
        assert ("no pick flips" in titles) == (change == "no flips")
        figure.savefig(tmp_path / "picture.png")
        draw.plt.close(figure)


# ---------------------------------------------------------------- the real engine
@pytest.fixture
def mixture_trainer(mixture):
    return lesson1.load_model(mixture)


@pytest.fixture(scope="module")
def mixture_engine16(mixture_engine, mixture):
    """In bfloat16, as the lesson has it."""
    return lesson5.RoutedSampler(mixture)


def test_recorded_routes_are_those_of_the_tokens(mixture_trainer, mixture_engine, tokenizer):
    """An fp32 engine picks as the fp32 trainer; rows one place off do not. Prompts of two lengths: left padding."""
    mixture_engine.sync(mixture_trainer)
    _, prompts = lesson1.make_prompts(SUM, tokenizer, 16, np.random.default_rng(0))
    rollout = mixture_engine.sample([p if i % 2 else p[4:] for i, p in enumerate(prompts)], 9, seed=0)
    assert rollout.routes.dtype == torch.int64 and rollout.routes.shape == (16, 9 + rollout.ids.shape[1], 3, 2)
    own = lesson5.own_routes(mixture_trainer, rollout)
    share = lambda routes: (lesson5.flips(routes, own, rollout) > 0).double().mean()
    assert share(rollout.routes) < 0.01
    assert all(share(rollout.routes.roll(*by)) > 0.1 for by in ((1, 1), (-1, 1), (1, 2)))
    # replayed, the gap stays what fp32 makes it; the same routes one place off open it
    for routes, low, high in ((rollout.routes, 0, 1e-5), (rollout.routes.roll(1, 1), 1e-2, 10)):
        d = (lesson5.logprobs(mixture_trainer, rollout, routes) - rollout.logp_sampler)[rollout.mask]
        assert low <= d.abs().mean() < high
    assert torch.equal(rollout[3:5].routes, rollout.routes[3:5])
    assert lesson5.routes_for("r3", mixture_trainer, rollout) is rollout.routes


def test_a_mixtures_weights_reach_the_engine(mixture_trainer, mixture_engine, tokenizer, monkeypatch):
    """Also a second time; without the step that vLLM leaves out the canary stops the run."""
    for seed in range(2):
        with torch.no_grad():
            for parameter in mixture_trainer.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        assert mixture_engine.sync(mixture_trainer) < 1e-5
    monkeypatch.setattr(lesson5, "pack_experts", lambda model: None)
    with pytest.raises(lesson1.SyncError):
        mixture_engine.sync(mixture_trainer)
    monkeypatch.undo()
    assert mixture_engine.sync(mixture_trainer) < 1e-5


class Flat(SimpleNamespace):
    """vLLM's flat log-probs of n tokens, without a head."""
    def __len__(self):
        return len(self.token_ids)


def completion(n, rows, value):
    """A completion of n tokens, with the experts `value`, `value` + 1, ... of its rows; the second pick is one more."""
    tokens = list(range(1, n + 1))
    experts = (value + np.arange(rows))[:, None, None] + np.arange(2)
    return SimpleNamespace(token_ids=tokens, logprobs=Flat(token_ids=tokens, logprobs=[-1.0] * n), finish_reason="stop",
                           routed_experts=experts.astype(np.uint8))


def check_pack(pack):
    """Prompts of 2 and 1 tokens, responses of 1 and 3."""
    rollout = pack([[5, 6], [7]], [completion(1, 2, 10), completion(3, 3, 250)], 1.0, True, 4)
    assert rollout.routes.dtype == torch.int64 and rollout.routes.shape == (2, 5, 1, 2)
    assert rollout.routes[..., 0, 0].tolist() == [[10, 11, 0, 0, 0], [0, 250, 251, 252, 0]], "beside their tokens"
    assert rollout.routes[1, 1:4, 0, 1].tolist() == [251, 252, 253]
    assert (rollout.temperature, rollout.neutral, rollout.version) == (1.0, True, 4), "the rest is lesson 1's"
    for rows in (1, 3):
        try:
            pack([[5, 6]], [completion(1, rows, 0)], 1.0, True, 0)
        except ValueError:
            continue
        assert False, f"{rows} rows for 2 input tokens are accepted"


def placed(start=lambda P, p: P - p, dtype=np.int64, strict=True, drop=False):
    """A `pack` with one thing wrong."""
    def pack(prompts, completions, temperature, neutral, version):
        rollout = lesson1.pack(prompts, completions, *((1.0, True, 0) if drop else (temperature, neutral, version)))
        P, T = rollout.prompt_ids.shape[1], rollout.ids.shape[1]
        routes = np.zeros((len(prompts), P + T + 1, 1, 2), dtype)
        for i, (p, c) in enumerate(zip(prompts, completions)):
            rows = len(p) + len(c.token_ids) - 1
            if strict and rows != len(c.routed_experts):
                raise ValueError
            routes[i, start(P, len(p)):][:len(c.routed_experts)] = c.routed_experts
        return lesson1.replace(rollout, routes=torch.from_numpy(routes[:, :P + T]))
    return pack


def without_routes(*args):
    return lesson1.replace(lesson1.pack(*args), routes=torch.zeros(2, 5, 1, 2, dtype=torch.long))


WRONG_PACK = {
    "routes ignored": without_routes, "left-aligned": placed(start=lambda P, p: 0),
    "one token late": placed(start=lambda P, p: P - p + 1), "uint8": placed(dtype=np.uint8),
    "not counted": placed(strict=False), "the rest dropped": placed(drop=True)}


def test_pack_places_routes_beside_their_tokens_and_counts_them():
    check_pack(lesson5.RoutedSampler.pack)
    check_pack(placed())


@pytest.mark.parametrize("name", WRONG_PACK)
def test_pack_rejects(name):
    rejected(check_pack, WRONG_PACK[name])


def test_r2_and_r3_replay_what_they_say(mixture_trainer, mixture_engine, tokenizer):
    """After a step: R2's picks are the old weights', R3's the engine's; and what lesson 3's loop computes with them."""
    _, prompts = lesson1.make_prompts(SUM, tokenizer, 8, np.random.default_rng(0))
    old = copy.deepcopy(mixture_trainer)
    mixture_engine.sync(old)
    rollout = mixture_engine.sample(prompts, 9, seed=0)
    with torch.no_grad():
        for parameter in mixture_trainer.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    assert lesson5.routes_for("none", old, rollout) is None and lesson5.routes_for("r3", old, rollout) is rollout.routes
    old_routes = lesson5.own_routes(old, rollout)
    assert torch.equal(lesson5.routes_for("r2", old, rollout), old_routes)
    assert not torch.equal(lesson5.own_routes(mixture_trainer, rollout), old_routes)
    live, old_live = lesson1.logprobs(mixture_trainer, rollout), lesson1.logprobs(old, rollout)
    engines = (rollout.routes + 1) % 8                            # so that the engine's picks are not old's
    broken = lesson1.replace(rollout, routes=torch.where(engines == engines.flip(-1), torch.tensor([0, 1]), engines))
    for kind, routes in (("none", None), ("r2", old_routes), ("r3", broken.routes)):
        broken.routes[:, -1] = torch.tensor([0, 1])
        both = study.with_replay(kind)
        at_theta = lesson5.logprobs(mixture_trainer, rollout, routes)
        assert torch.equal(both(mixture_trainer, broken, old, False)[0], at_theta)
        at_old = lesson5.logprobs(old, rollout, broken.routes) if kind == "r3" else old_live
        assert torch.equal(both(old, broken, old, False)[0], at_old)
    assert (lesson5.logprobs(mixture_trainer, rollout, old_routes) - live).abs().max() > 1e-2


def stepped(trainer, engine, tokenizer, n):
    """A rollout, and the trainer one step later."""
    engine.sync(trainer)
    digits, prompts = lesson1.make_prompts(SUM, tokenizer, n, np.random.default_rng(0))
    rollout = engine.sample(prompts, 9, seed=0)
    R = lesson1.rewards(SUM, digits, rollout, tokenizer)
    return rollout, lesson1.one_step(copy.deepcopy(trainer), rollout, R, 1.5e-3)


def test_jump_finds_a_jump_and_replay_takes_it_away(mixture_trainer, mixture_engine, tokenizer):
    """And without a flip on the way it has none to show, and does not die."""
    rollout, ahead = stepped(mixture_trainer, mixture_engine, tokenizer, 16)
    result = lesson5.jump(mixture_trainer, ahead, rollout, points=21)
    assert result["jump"] > 1e-2 and result["within"] < 1e-6 and result["flips at"]
    assert result["step at a flip"] > 3 * result["elsewhere"] and result["step at a flip"] > 3 * result["replayed"]
    near = copy.deepcopy(mixture_trainer)
    with torch.no_grad():
        for parameter in near.model.embed_tokens.parameters():
            parameter.add_(1e-7)
    none = lesson5.jump(mixture_trainer, near, rollout[:2], points=3)
    assert none["flips at"] == [] and none["jump"] < 1e-6 and np.isnan(none["step at a flip"]) and none["elsewhere"] > 0


def test_jump_reports_what_it_replayed(mixture_trainer, mixture_engine, tokenizer):
    """On few points: the replayed curve starts with the live one and leaves it; picks flip where it says."""
    rollout, ahead = stepped(mixture_trainer, mixture_engine, tokenizer, 8)
    result = lesson5.jump(mixture_trainer, ahead, rollout, points=6)
    model = copy.deepcopy(mixture_trainer).double()
    model.set_experts_implementation("eager")
    start, end = copy.deepcopy(model.state_dict()), copy.deepcopy(ahead).double().state_dict()
    picks, live, fixed = [], [], []
    for u in result["u"]:
        model.load_state_dict({name: torch.lerp(value, end[name], u) for name, value in start.items()})
        picks.append(lesson5.own_routes(model, rollout))
        live.append(lesson1.logprobs(model, rollout)[rollout.mask])
        fixed.append(lesson5.logprobs(model, rollout, picks[0])[rollout.mask])
    live, fixed = torch.stack(live), torch.stack(fixed)
    token = int(((live[0] - result["log pi"][0]).abs() + (live[-1] - result["log pi"][-1]).abs()).argmin())
    assert result["log pi"] == pytest.approx(live[:, token].tolist(), abs=1e-9)
    assert result["log pi, replayed"] == pytest.approx(fixed[:, token].tolist(), abs=1e-9)
    assert result["log pi, replayed"][0] == pytest.approx(result["log pi"][0], abs=1e-6)
    flipped = torch.stack([(lesson5.flips(a, b, rollout) > 0).any(1) for a, b in zip(picks, picks[1:])])
    assert result["flips at"] == torch.nonzero(flipped[:, token]).flatten().tolist()
    steps = live.diff(dim=0).abs()
    assert result["elsewhere"] == pytest.approx(steps[~flipped].mean().item(), rel=1e-6)
    assert result["step at a flip"] == pytest.approx(steps[flipped].mean().item(), rel=1e-6)
    assert result["replayed"] == pytest.approx(fixed.diff(dim=0).abs().mean().item(), rel=1e-6)
    assert result["largest"] == pytest.approx(steps.max().item())
    assert result["flips per token"] == pytest.approx(flipped.sum(0).double().mean().item())


def test_one_policy_measures_each_situation_with_its_own_weights(mixture, mixture_trainer, mixture_engine, tokenizer):
    """On the fp32 engine: natural agrees to rounding, the noise is gone when the next repeat begins, R2 stands where
    there is a lag and replays the weights before the step; the trainer is left as it was."""
    before = [p.clone() for p in mixture_trainer.parameters()]
    rows = lesson5.one_policy(mixture, mixture_trainer, mixture_engine, tokenizer, 0, True)
    rows = {(r["situation"], r["replay"]): r for r in rows}
    both = "natural, fp32 trainer", "natural, bf16 trainer", "parameter noise 2%"
    stale = {("one step stale", kind) for kind in ("none", "r2", "r3")}
    assert set(rows) == {(s, kind) for s in both for kind in ("none", "r3")} | stale
    exact, rounded, noise = (rows[s, "none"] for s in both)
    assert exact["mean |d|"] < 1e-5 and 1e-3 < rounded["mean |d|"] < noise["mean |d|"] < 5e-2
    assert exact["picks that flip"] < 1e-3 < rounded["picks that flip"]
    stale = {k: rows["one step stale", k] for k in ("none", "r2", "r3")}
    # an fp32 engine picks as the old weights do
    assert stale["r2"]["k3"] == pytest.approx(stale["r3"]["k3"], rel=1e-2)
    assert stale["r2"]["k3"] != stale["none"]["k3"] and stale["none"]["rms d: flip"] > stale["none"]["rms d: no flip"]
    assert all(torch.equal(a, b) for a, b in zip(before, mixture_trainer.parameters()))


# ---------------------------------------------------------------- the study
def test_gradients_replay_what_they_say(mixture_trainer, mixture_engine, tokenizer, monkeypatch):
    """R2 is the live gradient at the sync and not later; cosine and size are those of each kind's own gradient."""
    rows = study.gradients(mixture_trainer, mixture_engine, tokenizer, 0, steps=5)
    assert [row["steps after a sync"] for row in rows] == [0, 1, 4]
    assert rows[0]["r2: cosine"] == pytest.approx(1, abs=1e-6) and rows[0]["r2: size"] == pytest.approx(1, abs=1e-5)
    for row in rows[1:]:
        assert row["r2: cosine"] < 0.999 and row["r2: cosine"] == pytest.approx(row["r3: cosine"], abs=2e-2)
    logprobs, sizes = lesson5.logprobs, {None: 1, "r2": 2, "r3": 3}
    monkeypatch.setattr(lesson5, "routes_for", lambda kind, *args: None if kind == "none" else kind)
    monkeypatch.setattr(lesson5, "logprobs", lambda model, rollout, routes, grad:
                        logprobs(model, rollout, grad=grad) * sizes[routes])
    row, = study.gradients(mixture_trainer, mixture_engine, tokenizer, 0, steps=1)
    assert [row["r2: cosine"], row["r3: cosine"], row["r2: size"], row["r3: size"]] == pytest.approx([1, 1, 2, 3])


def test_the_study_trains_with_what_it_names(monkeypatch):
    """Arm, seed, period, weight and log-probs of every run."""
    calls, weights = [], lesson2.CORRECTIONS
    monkeypatch.setattr(study, "run_04", lambda start, sampler, tokenizer, reference, setting, arm, seed, engine, period,
                        **changes: calls.append((setting, arm, seed, period, *changes.values())) or {})
    monkeypatch.setattr(study, "with_replay", lambda kind: kind)
    monkeypatch.setattr(lesson3, "weighted", lambda correct: correct)
    records = {key: study.run_05(None, None, None, {}, *arguments) for key, arguments in study.plan_05().items()}
    assert len(records) == 30 and study.SETTINGS["replay"] == lesson4.Setting(steps=60, period=60, every=4)
    assert calls == [("replay", "on-policy", seed, 1, weights["none"], "none") for seed in range(3)] + [
        ("replay", "minirl", seed, period, weights["minirl"], kind)
        for period in (2, 8, 32) for kind in ("none", "r2", "r3") for seed in range(3)]
    assert all(record["replay"] in key for key, record in records.items())


def test_a_run_of_the_study(mixture_trainer, mixture_engine, tokenizer, tmp_path, monkeypatch):
    """A small one, from the reference to the row of the table."""
    monkeypatch.setitem(study.SETTINGS, "replay", lesson4.Setting(steps=2, period=2, prompts=2, every=1))
    reference = study.reference_04(mixture_trainer, mixture_engine, tokenizer, "replay", tmp_path)
    one = lambda *arguments: study.run_05(mixture_trainer, mixture_engine, tokenizer, reference, *arguments)
    records = study.resumable(tmp_path / "05_study.json", {"floor": ("none", 1, 0), "r3": ("r3", 2, 0)}, one)
    rows = study.replay_rows({"gradients": [], **records})
    assert [(row["synced every"], row["replay"]) for row in rows] == [(1, "none"), (2, "r3")]
    assert rows[0]["KL / floor"] == [1.0]
    assert records["r3"]["syncs"] == 1 and records["floor"]["syncs"] == 2


def test_the_records_in_figures_are_those_of_the_plan():
    records = draw.load("05_study")
    assert set(records) == {"gradients", *study.plan_05()}
    assert [row["replay"] for row in study.replay_rows(records)] == ["none"] + ["none", "r2", "r3"] * 3


# ---------------------------------------------------------------- the command
def test_quick_run(mixture_engine16, engine16, tmp_path, capsys, monkeypatch):
    """The lesson as it is, on the session's engines."""
    monkeypatch.setattr(lesson5, "RoutedSampler", lambda path: mixture_engine16)
    monkeypatch.setattr(lesson1, "Sampler", lambda path: engine16)
    result = lesson5.main(["--quick", "--out", str(tmp_path)])
    assert "of the picks flip" in capsys.readouterr().out
    assert json.loads((tmp_path / "05_router_replay.json").read_text()) == result
    rows = {(r["policy"], r["replay"]): r for r in result["gap"] if r["situation"] == "natural, fp32 trainer"}
    assert set(rows) == {("dense", "none"), ("MoE", "none"), ("MoE", "r3")}
    assert 1e-4 < rows["MoE", "none"]["picks that flip"] < 0.05 and rows["MoE", "r3"]["k3"] < rows["MoE", "none"]["k3"]
    assert (tmp_path / "05_router_replay.png").stat().st_size > 10_000


@pytest.mark.parametrize("kind", ["dense", "sigmoid"])
def test_what_cannot_be_replayed_is_refused_before_vllm_starts(kind, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lesson1.Sampler, "__init__", lambda *a, **k: pytest.fail("vLLM was started"))
    if kind == "sigmoid":
        monkeypatch.setattr(lesson1, "load_model", lambda path: random_model("glm4_moe", GLM))
    with pytest.raises(SystemExit) as exit:
        lesson5.main(["--model", str(tiny), "--out", str(tmp_path)])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit.value.code == 2
    assert ("no router" if kind == "dense" else "Glm4MoeTopkRouter cannot be replayed") in error
