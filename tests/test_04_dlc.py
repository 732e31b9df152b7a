"""Lesson 4: centre, clip, resynchronisation against closed forms in float64, and the loop on the real engine."""
import copy
import json
import math
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from conftest import lesson1, rejected

lesson4 = import_module("04_dlc")
lesson2, lesson3 = lesson4.lesson2, lesson4.lesson3
SUM = lesson1.TASKS["sum"]
V, T, B = 7, 3, 4
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
A = torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64)


def unclipped(lag, advantage):
    """f(r) = r."""
    return lesson2.ratio(lag)


RULES = {"truncated": lesson4.truncated, "ppo": lesson4.ppo_rule, "unweighted": lesson4.unweighted, "unclipped": unclipped}


def distributions(lag: float = 0.8, discrepancy: float = 0.3, seed: int = 0):
    """Trainer's logits, log pi_old and log mu (B, T, V) in float64."""
    rng = torch.Generator().manual_seed(seed)
    logits, e_lag, e_engine = torch.randn(3, B, T, V, generator=rng, dtype=torch.float64)
    old = logits + lag * e_lag
    return logits, old.log_softmax(-1), (old + discrepancy * e_engine).log_softmax(-1)


def gradient(logits, value):
    """Of value(log-probs with a graph) with respect to the logits."""
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(value(logits.log_softmax(-1)), logits)[0]


def token_gradients(logits, coefficients):
    """sum_v c_v (e_v - pi), the closed form of grad sum_v c_v log pi_v."""
    return coefficients - logits.softmax(-1) * coefficients.sum(-1, keepdim=True)


# ---------------------------------------------------------------- the centre
def check_centre(centre):
    """K = V: sum_v q_v f(r_v) (e_v - pi), for every rule; and the same from a head, in whatever order, where the tails are
    proportional. In float64, 1e-12."""
    logits, old, q = distributions()
    for name, f in RULES.items():
        weight = torch.stack([f((logits.log_softmax(-1) - old)[..., v], A) for v in range(V)], -1)      # token by token
        expected = token_gradients(logits, q.exp() * weight)
        assert torch.allclose(gradient(logits, lambda p: centre(p, old, q, A, V, f).sum()), expected, atol=1e-12), name
        # proportional tails: tokens 4, 5, 6 keep pi's proportions, with other masses
        pi = logits.softmax(-1)
        for mass_old, mass_q in ((0.5, 1.7), (2.5, 0.2)):
            proportional = []
            for x, mass in ((old.exp(), mass_old), (q.exp(), mass_q)):
                tail = (mass * pi[..., 4:]).clamp(max=0.3)
                tail = pi[..., 4:] * (tail.sum(-1, keepdim=True) / pi[..., 4:].sum(-1, keepdim=True))
                proportional.append(torch.cat([x[..., :4] * (1 - tail.sum(-1, keepdim=True)) / x[..., :4].sum(-1, keepdim=True), tail], -1).log())
            o, m = proportional
            weight = torch.stack([f((logits.log_softmax(-1) - o)[..., v], A) for v in range(V)], -1)
            expected = token_gradients(logits, m.exp() * weight)
            head = torch.tensor([2, 0, 3, 1])
            got = gradient(logits, lambda p: centre(p[..., head], o[..., head], m[..., head], A, V, f).sum())
            assert torch.allclose(got, expected, atol=1e-12), (name, mass_old)
    # a head whose mass exceeds 1 by float noise has no tail: its coefficients alone are left
    peaked = torch.tensor([0.7, 0.2, 0.1 - 1e-9, 1e-9, 0, 0, 0], dtype=torch.float64).log().clamp(min=-60).expand(1, 1, V)
    over = torch.tensor([0.6, 0.3, 0.1 + 1e-6], dtype=torch.float64).log().expand(1, 1, 3)
    got = gradient(peaked, lambda p: centre(p[..., :3], over, over, A[:1], V, lesson4.truncated).sum())
    expected = token_gradients(peaked, torch.nn.functional.pad((over.exp() * (peaked[..., :3] - over).exp()), (0, V - 3)))
    assert torch.allclose(got, expected, atol=1e-5)


def centre_with(*, under="sampler", detach=True, f_inside=True, tail="modelled", clamp=True, tail_weight=True, double=False, own_rule=None):
    """lesson4.centre with one thing wrong."""
    def wrong(head_logp, head_logp_old, head_logp_sampler, advantage, vocabulary, f=lesson4.truncated):
        pi, old, q = (x.exp() for x in (head_logp, head_logp_old, head_logp_sampler))
        pi = pi.detach() if detach else pi
        lag = head_logp - head_logp_old
        weight = (own_rule or f)(lag.detach() if detach else lag, advantage[:, None])
        c = {"sampler": q, "trainer": pi, "old": old}[under] * (weight if f_inside else 1.0)
        if head_logp.shape[-1] < vocabulary and tail != "dropped":
            rest = lambda x: (1 - x.sum(-1, keepdim=True)).clamp(min=0 if clamp else -1)
            rho_q, rho_s = (rest(x) / rest(pi).clamp(min=1e-6) for x in (q, old))
            c = c - rho_q * (f(-rho_s.log(), advantage[:, None]) if tail_weight else 1.0) * pi
        if double:       # the most likely token once more, as if it were not in the head
            c = torch.cat([c, c[..., :1]], -1)
            head_logp = torch.cat([head_logp, head_logp[..., :1]], -1)
        return (c * head_logp).sum(-1)
    return wrong


WRONG_CENTRE = {
    "under pi": centre_with(under="trainer"),
    "under pi_old": centre_with(under="old"),
    "not detached": centre_with(detach=False),
    "f left out": centre_with(f_inside=False),
    "another rule than the sampled token's": centre_with(own_rule=lesson4.truncated),
    "the sampled token's sign for nobody else": centre_with(own_rule=lambda lag, A: lesson2.ratio(lag)),
    "tail dropped": centre_with(tail="dropped"),
    "tail masses not clamped": centre_with(clamp=False),
    "f left out of the tail": centre_with(tail_weight=False),
    "a token twice": centre_with(double=True),
    "minus": lambda *args: -lesson4.centre(*args),
    "nothing": lambda head_logp, *rest: 0.0 * head_logp.sum(-1),
}


def test_centre():
    check_centre(lesson4.centre)
    check_centre(centre_with())          # the harness of the wrong versions is right where nothing is


@pytest.mark.parametrize("name", WRONG_CENTRE)
def test_centre_rejects(name):
    rejected(check_centre, WRONG_CENTRE[name])


def test_scores_have_mean_zero_under_their_own_policy():
    """sum_v pi_v s_v = 0, so that the centre of an engine without error is none."""
    logits, _, _ = distributions()
    same = logits.log_softmax(-1)
    assert gradient(logits, lambda p: lesson4.centre(p, same, same, A, V).sum()).abs().max() < 1e-14


def test_untruncated_weight_needs_no_centre():
    """w = pi / q over the full support: q w = pi. A truncated one does, and so does a support that was cut."""
    logits, _, q = distributions()
    value = lambda f, s: gradient(logits, lambda p: lesson4.centre(p, q, s, A, V, f).sum()).abs().max()
    assert value(unclipped, q) < 1e-14
    assert value(lesson4.truncated, q) > 1e-2
    cut = q.clone()
    cut[..., 0] = -torch.inf
    assert value(unclipped, cut) > 1e-2 and torch.isfinite(value(unclipped, cut))


# ---------------------------------------------------------------- the loss
def loss_gradient(loss, logits, old, q, a, **settings):
    """Gradient (B, T, V) of the loss with the sampled tokens a (B, T), full head."""
    pick = lambda x: x.gather(-1, a[..., None])[..., 0]
    return gradient(logits, lambda p: loss(pick(p), pick(old), p, old, q, A, MASK, V, **{"resync_ess": 0, **settings}))


def closed_form(logits, old, q, a, f):
    """-A (f(r_a) (e_a - pi) - sum_v q_v f(r_v) (e_v - pi)) / N."""
    weight = torch.stack([f((logits.log_softmax(-1) - old)[..., v], A) for v in range(V)], -1)
    sampled = torch.nn.functional.one_hot(a, V).double() * weight
    g = -A[:, None, None] * (token_gradients(logits, sampled) - token_gradients(logits, q.exp() * weight))
    return torch.where(MASK[..., None], g, 0.0) / MASK.sum()


def check_loss(loss):
    """The closed form for every rule; then what is left of it without discrepancy, without lag, without either; its mean."""
    rng = torch.Generator().manual_seed(1)
    a = torch.randint(0, V, (B, T), generator=rng)
    e_a = torch.nn.functional.one_hot(a, V).double()
    scale = torch.where(MASK, -A[:, None] / MASK.sum(), 0.0)[..., None]
    logits, old, q = distributions()
    pi = logits.softmax(-1)
    for name, f in RULES.items():
        assert torch.allclose(loss_gradient(loss, logits, old, q, a, f=f), closed_form(logits, old, q, a, f), atol=1e-12), name

    # no lag: pure score centering, e_a - q in the logits
    _, _, engine = distributions(lag=0.0)
    assert torch.allclose(loss_gradient(loss, logits, logits.log_softmax(-1), engine, a), scale * (e_a - engine.exp()), atol=1e-12)
    # no discrepancy, no v clipped: the lag-weighted score, without a centre
    _, near, _ = distributions(lag=0.1)
    r = pi / near.exp()
    assert r.max() < 2
    lag_weighted = scale * r.gather(-1, a[..., None]) * (e_a - pi)
    assert torch.allclose(loss_gradient(loss, logits, near, near, a), lag_weighted, atol=1e-12)
    # ... and some clipped: apart by sum_v pi_s f(r_v) s_v
    r = pi / old.exp()
    assert (r > 2).any()
    f_r = r.clamp(max=2)
    apart = token_gradients(logits, old.exp() * f_r)
    assert apart.abs().max() > 1e-2
    assert torch.allclose(loss_gradient(loss, logits, old, old, a), scale * (f_r.gather(-1, a[..., None]) * (e_a - pi) - apart), atol=1e-12)
    # neither: REINFORCE, token by token
    same = logits.log_softmax(-1)
    assert torch.allclose(loss_gradient(loss, logits, same, same, a), scale * (e_a - pi), atol=1e-12)
    # the mean over the engine's own draws is 0 under a constant advantage, whatever the engine
    mean = sum(q.exp()[..., v, None] * loss_gradient(loss, logits, old, q, torch.full((B, T), v)) for v in range(V))
    assert mean.abs().max() < 1e-14


def loss_with(*, centre=lesson4.centre, centre_f=None, whole_ratio=False, sequence=False, detach=True):
    def wrong(logp, logp_old, head_logp, head_logp_old, head_logp_sampler, advantage, mask, vocabulary, f=lesson4.truncated, resync_ess=0.5):
        lag = logp - logp_old
        lag = lag.detach() if detach else lag
        if whole_ratio:          # the discrepancy inside the clipped ratio
            lag = lag + (head_logp_old - head_logp_sampler).detach()[..., 0]
        if sequence:
            lag = lesson2.sequence_sum(lag, mask).expand_as(lag)
        w = torch.where(mask, f(lag, advantage), 0.0)
        mean = centre(head_logp, head_logp_old, head_logp_sampler, advantage, vocabulary, centre_f or f)
        return lesson2.policy_loss(logp, w, advantage, mask, int(mask.sum()), mean)
    return wrong


WRONG_LOSS = {
    "no centre": loss_with(centre=lambda p, *rest: torch.zeros_like(p[..., 0])),
    "discrepancy inside the clipped ratio": loss_with(whole_ratio=True),
    "a response's ratio for the token's": loss_with(sequence=True),
    "weight not detached": loss_with(detach=False),
    "sign rule for the sampled token only": loss_with(centre_f=lambda lag, A: lesson2.ratio(lag).clamp(max=2)),
    "centre's sign": loss_with(centre=lambda *args: -lesson4.centre(*args)),
    **{f"centre {name}": loss_with(centre=WRONG_CENTRE[name]) for name in ("under pi", "not detached", "f left out", "a token twice")},
}


def test_loss():
    check_loss(lesson4.dlc_loss)
    check_loss(loss_with())


@pytest.mark.parametrize("name", WRONG_LOSS)
def test_loss_rejects(name):
    rejected(check_loss, WRONG_LOSS[name])


def test_lag_clip_is_min_r_C():
    logp, old = torch.tensor([[-1.0, -3.0, -1.0]]), torch.tensor([[-1.5, -1.0, -3.0]])
    w = lesson4.lag_clip(logp.requires_grad_(), old, None, A[:1].float(), torch.tensor([[True, True, True]]))
    assert torch.allclose(w, torch.tensor([[math.exp(0.5), math.exp(-2.0), 2.0]])) and not w.requires_grad
    assert lesson4.lag_clip(logp, old, None, A[:1].float(), torch.tensor([[True, True, False]]))[0, 2] == 0


def check_ppo_rule(rule):
    """r, and 0 for A > 0 above 1.2 and for A < 0 below .8: (B, T, K) with (B, 1), (B, T) with (B,)."""
    r = torch.tensor([1.25, 0.75, 1.15, 0.85])
    lag = r.log().expand(2, 1, 4)
    f = rule(lag, torch.tensor([1.0, -1.0])[:, None])
    assert torch.allclose(f, torch.stack([r * torch.tensor([0, 1, 1, 1]), r * torch.tensor([1, 0, 1, 1])])[:, None])
    assert torch.allclose(rule(lag[:, :, 0], torch.tensor([1.0, -1.0])), f[:, :, 0])


WRONG_RULE = {
    "clamped, not dropped": lambda lag, A: lag.exp().clamp(0.8, 1.2),
    "whatever the sign": lambda lag, A: lag.exp() * ((lag.exp() < 1.2) & (lag.exp() > 0.8)),
    "the other sign": lambda lag, A: lesson4.ppo_rule(lag, -A),
    "weight 1 where it is kept": lambda lag, A: (lesson4.ppo_rule(lag, A) > 0).float(),
    "bounds .2 and .27": lambda lag, A: lesson2.ratio(lag) * lesson2.ppo_keeps(lesson2.ratio(lag), A, 0.2, 0.27),
    "log-ratio for ratio": lambda lag, A: lag * (lesson4.ppo_rule(lag, A) > 0),
}


def test_ppo_rule_reads_the_sign_for_every_token():
    check_ppo_rule(lesson4.ppo_rule)


@pytest.mark.parametrize("name", WRONG_RULE)
def test_ppo_rule_rejects(name):
    rejected(check_ppo_rule, WRONG_RULE[name])


# ---------------------------------------------------------------- the resynchronisation rule
def check_ess(lag_ess):
    """Hand-made log-ratios, with rubbish under the mask: (sum w)^2 / (n sum w^2)."""
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]], dtype=torch.bool)
    lag = torch.tensor([[math.log(2), math.log(3)], [math.log(5), 40.0], [0.0, math.log(4)]], dtype=torch.float64)
    tokens, responses = np.array([2, 3, 5, 1, 4.0]), np.array([6, 5, 4.0])
    assert abs(lag_ess(lag, mask, "token") - tokens.sum()**2 / (5 * (tokens**2).sum())) < 1e-12
    assert abs(lag_ess(lag, mask, "sequence") - responses.sum()**2 / (3 * (responses**2).sum())) < 1e-12
    assert lag_ess(lag, mask) == lag_ess(lag, mask, "sequence")
    assert abs(lag_ess(lag + 600, mask, "token") - lag_ess(lag, mask, "token")) < 1e-9        # in log space


def ess_with(change=lambda x: x, padded=False, total=False, mean=False):
    def wrong(lag, mask, level="sequence"):
        lag = change(lag)
        mask = torch.ones_like(mask) if padded else mask
        if level == "token":
            x = lag[mask]
        else:
            x = (lesson2.sequence_mean if mean else lesson2.sequence_sum)(lag, mask)[:, 0]
        return lesson2.ess(x) * (len(x) if total else 1)
    return wrong


WRONG_ESS = {
    "after clipping": ess_with(lambda x: x.clamp(max=math.log(2))),
    "over padding": ess_with(padded=True),
    "masked to weight one": ess_with(lambda x: torch.where(x == 40.0, 0.0, x), padded=True),
    "a number, not a share": ess_with(total=True),
    "of the geometric mean": ess_with(mean=True),
    "of the inverse ratio": ess_with(lambda x: -x),
    "not in log space": lambda lag, mask, level="sequence": (lambda w: (w.sum()**2 / (len(w) * (w**2).sum())).item())(
        lag.float()[mask].exp() if level == "token" else lesson2.sequence_sum(lag.float(), mask)[:, 0].exp()),
    "levels swapped": lambda lag, mask, level="sequence": lesson4.lag_ess(lag, mask, {"token": "sequence", "sequence": "token"}[level]),
}


def test_lag_ess():
    check_ess(lesson4.lag_ess)
    check_ess(ess_with())


@pytest.mark.parametrize("name", WRONG_ESS)
def test_lag_ess_rejects(name):
    rejected(check_ess, WRONG_ESS[name])


def refuses(loss, log_weights) -> bool:
    """Does the loss refuse a batch of one-token responses with these log-ratios?"""
    logp = torch.tensor(log_weights, dtype=torch.float64)[:, None]
    old, mask, head = torch.zeros_like(logp), torch.ones_like(logp, dtype=torch.bool), logp[..., None]
    return loss(logp, old, head, head, head, torch.ones(len(logp), dtype=torch.float64), mask, 1) is None


def check_trigger(loss):
    """Strictly below one half: two of four responses left is exactly one half, and is trained on."""
    gone = -800.0                                     # a weight of 0
    assert not refuses(loss, [0, 0, gone, gone])
    assert refuses(loss, [0, gone, gone, gone])
    assert refuses(loss, [0, 0, gone, gone, gone])
    assert not refuses(loss, [0, 0, 0, gone])
    assert not refuses(loss, [-1.0, -1.0, -1.0, -1.0])      # the blind spot: all have lost the same
    assert refuses(loss, [3.0, 0.0, 0.0, 0.0, 0.0, 0.0])      # clipped at 2 the ESS would be .88
    assert not refuses(lambda *a: loss(*a, resync_ess=0), [0, gone, gone, gone])
    # two tokens a response: products of 11, 1, 1, 1 have an ESS of .39, the tokens' ratios one of .71
    logp, mask = torch.tensor([[1.2, 1.2], [0, 0], [0, 0], [0, 0]], dtype=torch.float64), torch.ones(4, 2, dtype=torch.bool)
    head = logp[..., None]
    assert loss(logp, torch.zeros_like(logp), head, head, head, torch.ones(4, dtype=torch.float64), mask, 1) is None


def trigger_with(below):
    """dlc_loss with another rule for refusing."""
    def wrong(logp, logp_old, *rest, resync_ess=0.5):
        return None if below((logp - logp_old).detach()[:, 0], resync_ess) else lesson4.dlc_loss(logp, logp_old, *rest, resync_ess=0)
    return wrong


WRONG_TRIGGER = {
    "at exactly one half": trigger_with(lambda lag, half: lesson2.ess(lag) <= half),
    "above one half": trigger_with(lambda lag, half: lesson2.ess(lag) > half),
    "after clipping": trigger_with(lambda lag, half: lesson2.ess(lag.clamp(max=math.log(2))) < half),
    "of the tokens": lambda logp, logp_old, head, old, q, A, mask, V, resync_ess=0.5: None if lesson4.lag_ess((logp - logp_old).detach(), mask, "token") < resync_ess else 0.0,
    "mean weight instead": trigger_with(lambda lag, half: lag.exp().mean() < half),
    "also where it is switched off": trigger_with(lambda lag, half: lesson2.ess(lag) < 0.5),
    "never": trigger_with(lambda lag, half: False),
    "always": trigger_with(lambda lag, half: True),
}


def test_trigger():
    check_trigger(lesson4.dlc_loss)


def check_trigger_and_clip(module):
    """min(r, C): DLC's clip of a whole module."""
    check_trigger(module.dlc_loss)
    assert torch.equal(module.truncated(torch.tensor([-1.0, 0.5, 3.0]), None), torch.tensor([-1.0, 0.5, math.log(2)]).exp())


def test_truncation():
    check_trigger_and_clip(lesson4)


@pytest.mark.parametrize("name", WRONG_TRIGGER)
def test_trigger_rejects(name):
    rejected(check_trigger, WRONG_TRIGGER[name])


def test_blind_spot_has_an_alarm():
    lag, mask = torch.full((8, 2), -1.0), torch.ones(8, 2, dtype=torch.bool)
    assert lesson4.lag_ess(lag, mask) == pytest.approx(1) and lesson4.mean_ratio(lag, mask) == pytest.approx(math.exp(-1))


# ---------------------------------------------------------------- the loop, on the real engine
class Recorder:
    """A Sampler that can do one thing wrong."""

    def __init__(self, engine, wrong=""):
        self.engine, self.wrong, self.rollouts, self.synced = engine, wrong, [], 0

    @property
    def version(self):
        return self.engine.version

    def sync(self, model, state=None):
        self.synced += 1
        if self.wrong == "no sync" and self.synced > 1:
            return
        if self.wrong == "prefix cache kept" and self.synced > 1:
            self.engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(model.state_dict().items())})
            self.engine.version += 1
            return
        self.engine.sync(model, state)

    def sample(self, prompts, *args, **kwargs):
        prompts = [p[:-1] * 20 + p for p in prompts]                # 169 tokens: prefix blocks of 128 are cached
        same = self.rollouts and self.wrong == "old batch kept"
        self.rollouts.append(self.rollouts[-1] if same else self.engine.sample(prompts, *args, **kwargs))
        return self.rollouts[-1]


def check_resync(trainer, engine, tokenizer, wrong=""):
    """A loss that refuses step 2: what is trained on then comes from the trainer's weights, and so does the anchor."""
    sampler, refused, trained = Recorder(engine, wrong), [], []

    def loss(batch):
        if batch.step == 2 and not refused:
            refused.append(batch)
            return None
        trained.append(batch)
        return -batch.logp[batch.rollout.mask].mean()                # moves the weights whatever the rewards

    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-3, weight_decay=0.0)
    run = lesson3.grpo(trainer, sampler, SUM, tokenizer, optimizer, loss, steps=5, period=10, seed=0, prompts=4, group_size=2)
    for batch in run:
        mask = batch.rollout.mask
        # the anchor is the sampler's weights, whenever it was synced: an fp32 engine differs by rounding
        assert batch.discrepancy[mask].abs().max() < 2e-4
        assert batch.age == (batch.step - 2 if batch.step >= 2 else batch.step)
        assert (batch.lag[mask].abs().max() == 0) == (batch.age == 0)
        assert batch.dropped == (int(refused[0].rollout.mask.sum()) if batch.step == 2 else 0)
        assert batch.rollout.version == sampler.version
        assert batch is trained[-1]
    assert sampler.synced == 2 and len(trained) == 5
    assert (trained[2].rollout.prompt_ids == refused[0].rollout.prompt_ids).all()            # the same prompts, other responses
    shape = [min(x.shape[1] for x in (trained[2].rollout.ids, refused[0].rollout.ids))]
    assert not torch.equal(trained[2].rollout.ids[:, :shape[0]], refused[0].rollout.ids[:, :shape[0]])


def test_resync(trainer, engine, tokenizer):
    check_resync(trainer, engine, tokenizer)


@pytest.mark.parametrize("wrong", ["no sync", "prefix cache kept", "old batch kept"])
def test_resync_rejects(wrong, trainer, engine, tokenizer):
    rejected(lambda w: check_resync(trainer, engine, tokenizer, w), wrong)
    engine.llm.reset_prefix_cache()


def test_resync_rejects_an_aliased_anchor(trainer, engine, tokenizer, monkeypatch):
    monkeypatch.setattr(lesson3.copy, "deepcopy", lambda x: x)
    rejected(lambda w: check_resync(trainer, engine, tokenizer, w), "aliased")


def test_resync_goes_through_perturb_and_the_period_counts_from_it(trainer, engine, tokenizer):
    """A refusal at step 2, a period of 3: ages 0 1 0 1 2 0 1; the engine holds the noisy weights after each sync."""
    noise, refused, ages = lesson3.weight_noise(0.1, 0), [], []

    def loss(batch):
        if batch.step == 2 and not refused:
            refused.append(batch)
            return None
        return -batch.logp[batch.rollout.mask].mean()
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3, weight_decay=0.0)
    noisy = copy.deepcopy(trainer)
    for batch in lesson3.grpo(trainer, engine, SUM, tokenizer, optimizer, loss, steps=7, period=3, seed=0, prompts=4, group_size=2, perturb=noise):
        if batch.age == 0:
            noisy.load_state_dict(noise(trainer.state_dict()))
        ages.append(batch.age)
        assert (lesson1.score(noisy, batch.rollout) - batch.rollout.logp_sampler)[batch.rollout.mask].abs().max() < 2e-4
    assert ages == [0, 1, 0, 1, 2, 0, 1]


# ---------------------------------------------------------------- the arms
def synthetic(seed=0, spread=0.8):
    """A batch whose three policies differ, of responses whose products have an ESS below 1/2 and whose tokens do not."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, V, generator=rng, dtype=torch.float64).requires_grad_()
    _, old, q = distributions(seed=seed + 1)
    old = (logits.detach() + spread * torch.randn(B, T, V, generator=rng, dtype=torch.float64)).log_softmax(-1)
    logp = logits.log_softmax(-1)
    a = torch.randint(0, V, (B, T), generator=rng)
    pick = lambda x: torch.where(MASK, x.gather(-1, a[..., None])[..., 0], 0.0)
    rollout = lesson1.Rollout(*[torch.zeros(B, 1)] * 2, a, MASK, pick(q), torch.arange(V).expand(B, T, V), q, ["stop"] * B, 0, 1.0, True)
    return logits, lesson3.Batch(0, 1, rollout, A, A, pick(logp), pick(old), logp, old, V)


def batch_gradient(loss, seed, spread=0.8):
    """Of the arm's loss with respect to the logits, None where it refuses."""
    logits, batch = synthetic(seed, spread)
    value = loss(batch)
    return None if value is None else torch.autograd.grad(value, logits)[0]


def test_a_batchs_policies_reach_dlc_loss_each_in_its_place():
    logits, batch = synthetic()
    r = batch.rollout
    explicit = lesson4.dlc_loss(batch.logp, batch.logp_old, batch.head_logp, batch.head_logp_old, r.head_logp, A, MASK, V, resync_ess=0)
    assert torch.equal(torch.autograd.grad(explicit, logits, retain_graph=True)[0], torch.autograd.grad(lesson4.dlc(batch, resync_ess=0), logits)[0])


def expected_arm(name, batch):
    """What each arm's loss is, written out."""
    lag, total = batch.logp - batch.logp_old, batch.logp - batch.rollout.logp_sampler
    r, rho = lag.detach().exp(), total.detach().exp()
    product = torch.where(MASK, total, 0.0).sum(1, keepdim=True).detach().exp()
    weight = {"tis": rho.clamp(max=2), "seq-mis": (product * (product <= 2)).expand_as(r), "ppo": lesson4.ppo_rule(lag.detach(), A), "lag clip": r.clamp(max=2),
              "lag clip + resync": r.clamp(max=2), "dlc, ppo rule": lesson4.ppo_rule(lag.detach(), A)}.get(name, torch.ones_like(r) if name in ("on-policy", "none", "centering") else r.clamp(max=2))
    f = lesson4.unweighted if name == "centering" else lesson4.ppo_rule if name == "dlc, ppo rule" else lesson4.truncated
    c = lesson4.centre(batch.head_logp, batch.head_logp_old, batch.rollout.head_logp, A, V, f) if "dlc" in name or name == "centering" else 0.0
    return lesson2.policy_loss(batch.logp, torch.where(MASK, weight, 0.0), A, MASK, int(MASK.sum()), c)


@pytest.mark.parametrize("name", lesson4.ARMS)
def test_every_arm_is_what_its_name_says(name):
    refuse = {"dlc", "lag clip + resync", "dlc, ppo rule"}
    assert lesson4.RESYNCED == refuse and lesson4.CENTERED == {"dlc", "dlc, no resync", "dlc, ppo rule", "dlc, periodic", "centering"}
    seen = {"refused": 0, "kept": 0}
    for seed in range(8):
        logits, batch = synthetic(seed, 1.2)
        ess = {level: lesson4.lag_ess(batch.lag, MASK, level) for level in ("token", "sequence")}
        got, want = batch_gradient(lesson4.ARMS[name], seed, 1.2), torch.autograd.grad(expected_arm(name, batch), logits)[0]
        if name in refuse and ess["sequence"] < 0.5:
            seen["refused"] += 1
            assert got is None
        else:
            seen["kept"] += 1
            assert got is not None and torch.allclose(got, want, atol=1e-12)
    assert seen["kept"] and (seen["refused"] or name not in refuse)
    assert not any(batch_gradient(lesson4.ARMS[name], seed, 0.05) is None for seed in range(3))


def test_head_of_the_real_engine(moved, engine, tokenizer):
    """The whole vocabulary comes back, each token once; the centered score's mean under it is 0; the head with the modelled
    tail comes near."""
    engine.sync(moved)
    _, prompts = lesson1.make_prompts(SUM, tokenizer, 8, np.random.default_rng(0))
    rollout = engine.sample(prompts, 9, seed=0, head=-1)
    ids = rollout.head_ids[rollout.mask]
    assert (ids.sort(-1).values == torch.arange(17)).all()
    assert torch.allclose(rollout.head_logp[rollout.mask].exp().sum(-1), torch.ones(1), atol=1e-5)
    sampled = (ids == rollout.ids[rollout.mask][:, None])
    assert torch.allclose(rollout.head_logp[rollout.mask][sampled], rollout.logp_sampler[rollout.mask])


def test_tail_model_reaches_the_exact_centre():
    errors = lesson4.tail_errors(*lesson4.peaked(2000, 4, 0), (1, 8, 128, 1000, 1999))
    assert errors[-1]["modelled"] < 1e-3 < errors[0]["modelled"]
    for row in errors[:-1]:
        assert row["modelled"] < row["dropped"]


# ---------------------------------------------------------------- the measure
def check_kl(kl, trainer, moved, rollout):
    """Against the definition, position by position."""
    got = kl(trainer, moved, rollout)
    with torch.no_grad():
        p, q = (lesson1.response_logits(m, rollout).double().softmax(-1) for m in (trainer, moved))
    expected = (p * (p / q).log()).sum(-1)
    assert torch.allclose(got[rollout.mask].double(), expected[rollout.mask], atol=1e-5) and expected[rollout.mask].mean() > 1e-3


def test_kl(tiny, moved, engine, tokenizer):
    trainer = lesson1.load_model(tiny)
    engine.sync(trainer)
    _, prompts = lesson1.make_prompts(SUM, tokenizer, 8, np.random.default_rng(0))
    rollout = engine.sample(prompts, 9, seed=0)
    check_kl(lesson4.kl, trainer, moved, rollout)
    swapped = lambda p, q, r: lesson4.kl(q, p, r)
    sampled_only = lambda p, q, r: lesson1.score(p, r) - lesson1.score(q, r)
    weighted = lambda p, q, r: lesson4.kl(p, q, r) * (lesson1.score(p, r) - lesson1.score(q, r)).exp()
    for wrong in (swapped, sampled_only, weighted):
        rejected(lambda f: check_kl(f, trainer, moved, rollout), wrong)


def test_by_position():
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    values = torch.tensor([[1.0, 1, 1, 1, 4, 6], [3.0, 3, 3, 3, 99, 99]])
    assert lesson4.by_position(values, mask) == [2.6, 2.0, 5.0]
    assert math.isnan(lesson4.by_position(values, mask & (torch.arange(6) < 4))[2])


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A setting of seconds, whose reference lands in a folder of its own."""
    monkeypatch.setattr(lesson1, "ROOT", tmp_path)
    return lesson4.Setting("sum", steps=4, period=4, lr=3e-3, prompts=4, every=2)


def test_the_reference_repeated_is_at_distance_zero(trainer, engine, tokenizer, small):
    """The same seed is the same run, at every checkpoint and on both kinds of prefixes; another seed and a stale run are not."""
    reference = lesson4.Reference(trainer, engine, tokenizer, small, "a")
    one = lambda arm, seed: lesson4.run(trainer, engine, tokenizer, small, arm, seed, reference)
    same, other, stale = one("on-policy", lesson4.REFERENCE_SEED), one("on-policy", 0), one("none", 0)
    assert same["kl fresh"] == [0.0, 0.0] and same["kl sampler"] == [0.0, 0.0] and same["at"] == [0, 2]
    assert other["kl fresh"][0] == 0 and other["kl fresh"][1] > 1e-3
    assert stale["syncs"] == 1 and other["syncs"] == 4 and stale["kl fresh"][1] != other["kl fresh"][1]
    assert stale["ess_sequence"][0] == 1 and stale["ess_sequence"][3] < 0.99 and other["ess_sequence"] == [1.0] * 4
    assert len(stale["reward"]) == 4 and 0 <= stale["sampled"] <= 1


def test_a_reference_is_kept_for_its_settings_and_policy_alone(trainer, engine, tokenizer, small, monkeypatch):
    lesson4.Reference(trainer, engine, tokenizer, small, "a")
    runs = []
    monkeypatch.setattr(lesson4, "training", lambda *args, **kwargs: runs.append(args) or [])
    lesson4.Reference(trainer, engine, tokenizer, small, "a")
    assert not runs
    lesson4.Reference(trainer, engine, tokenizer, small, "b")
    lesson4.Reference(trainer, engine, tokenizer, lesson4.replace(small, lr=1e-3), "a")
    lesson4.Reference(trainer, engine, tokenizer, small, "a", anew=True)
    assert len(runs) == 3


def test_a_study_goes_on_where_it_stopped(engine, tmp_path, monkeypatch, tiny):
    setting = lesson4.Setting("sum", steps=3, period=3, lr=3e-3, prompts=4, every=2)
    monkeypatch.setattr(lesson4, "SETTINGS", {"sum": setting})
    monkeypatch.setattr(lesson4, "plan", lambda: [("sum", "dlc", 0, 0.0, None), ("sum", "none", 0, 0.0, None), ("sum", "dlc, periodic", 0, 0.0, "as dlc")])
    monkeypatch.setattr(lesson1, "policy", lambda name: tiny)
    monkeypatch.setattr(lesson1, "ROOT", tmp_path)
    real, runs, path = lesson4.run, [], tmp_path / "04_dlc.json"

    def interrupted(*args):
        runs.append(args[4])
        if len(runs) == 2:
            raise KeyboardInterrupt
        return real(*args)
    monkeypatch.setattr(lesson4, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lesson4.study(engine, {"default": 1}, {}, path)
    kept = json.loads(path.read_text())
    assert list(kept["study"]) == ["sum; dlc; seed 0; noise 0; period None"] and kept["default"] == 1
    result = lesson4.study(engine, {"default": 2}, kept["study"], path)
    assert runs == ["dlc", "none", "none", "dlc, periodic"]
    assert result["study"]["sum; dlc; seed 0; noise 0; period None"] == kept["study"]["sum; dlc; seed 0; noise 0; period None"]
    periodic = result["study"]["sum; dlc, periodic; seed 0; noise 0; period as dlc"]
    assert periodic["syncs"] == result["study"]["sum; dlc; seed 0; noise 0; period None"]["syncs"]
    # records of other settings are run again, and what the plan no longer holds goes
    monkeypatch.setattr(lesson4, "SETTINGS", {"sum": lesson4.replace(setting, lr=1e-3)})
    monkeypatch.setattr(lesson4, "plan", lambda: [("sum", "none", 0, 0.0, None)])
    again = lesson4.study(engine, {}, result["study"], path)
    assert runs[-1] == "none" and len(runs) == 5 and list(again["study"]) == ["sum; none; seed 0; noise 0; period None"]


def record(arm, fresh, seed=0, **changes):
    return {"setting": "sum", "task": "sum", "arm": arm, "seed": seed, "noise": 0.0, "period": None, "sampled": 0.5, "syncs": 2, "dropped": 0, "seconds": 1.0,
            "at": [0, 2, 4], "kl fresh": fresh, "kl sampler": [x / 10 for x in fresh], "kl fresh late": [None, *fresh[1:]], "reward": [0.1] * 6,
            "ess_token": [1.0] * 6, "ess_sequence": [1.0] * 6, "mean_ratio": [1.0] * 6, **changes}


def test_the_measure_compares_both_models_on_both_kinds_of_prefixes(trainer, moved, engine, tokenizer, small):
    """compare, by hand: the reference's weights and responses of that step, the run's model, the run's own rollout."""
    reference = lesson4.Reference(trainer, engine, tokenizer, small, "a")
    engine.sync(moved)
    _, prompts = lesson1.make_prompts(SUM, tokenizer, 6, np.random.default_rng(5))
    own = engine.sample(prompts, 9, seed=5)
    saved = torch.load(reference.folder / "2.pt")
    then = copy.deepcopy(trainer)
    then.load_state_dict(saved["weights"])

    class Step:
        step, rollout = 2, own
    got = reference.compare(moved, Step)
    for kind, rollout in (("fresh", lesson1.Rollout(**saved["rollout"])), ("sampler", own)):
        with torch.no_grad():
            p, q = (lesson1.response_logits(m, rollout).double().softmax(-1) for m in (then, moved))
        assert got[kind][0] == pytest.approx((p * (p / q).log()).sum(-1)[rollout.mask].mean().item(), rel=1e-3)


def test_a_runs_record_is_that_of_its_batches(trainer, engine, tokenizer, small, monkeypatch):
    """ESS of both levels, mean ratio, syncs and dropped tokens, from the batches themselves; noise drawn once a run, by its seed;
    the head that the setting asks for."""
    small = lesson4.replace(small, lr=1e-2, steps=6, head=5)
    reference, batches, heads, seeds = lesson4.Reference(trainer, engine, tokenizer, small, "a"), [], [], []
    training, sample, noise = lesson4.training, engine.sample, lesson3.weight_noise

    def seen(*args, **kwargs):
        for batch in training(*args, **kwargs):
            batches.append((batch.lag[batch.rollout.mask], lesson3.sequence_lag(batch), batch.age, batch.dropped))
            yield batch
    monkeypatch.setattr(lesson4, "training", seen)
    monkeypatch.setattr(engine, "sample", lambda *a, **k: heads.append(k.get("head", 0)) or sample(*a, **k))
    monkeypatch.setattr(lesson3, "weight_noise", lambda *a, **k: seeds.append((a, k)) or noise(*a, **k))
    record = lesson4.run(trainer, engine, tokenizer, small, "dlc", 7, reference, noise=0.01)
    for key, right in (("ess_token", [lesson2.ess(b[0]) for b in batches]), ("ess_sequence", [lesson2.ess(b[1]) for b in batches]), ("mean_ratio", [b[0].double().exp().mean().item() for b in batches])):
        assert record[key] == pytest.approx(right, rel=1e-3), key
    assert record["syncs"] == sum(b[2] == 0 for b in batches) > 1 and record["dropped"] == sum(b[3] for b in batches) > 0
    assert seeds == [((0.01, 7), {})] and heads[:-2] == [5] * (len(batches) + sum(b[3] > 0 for b in batches)) and heads[-2:] == [0, 0]


def test_held_out_accuracy_is_that_of_the_runs_weights(trainer, tokenizer):
    """The sampler gets them; prompts of no run; sampled at temperature 1, greedy at 0."""
    calls = []

    class Stub:
        def sync(self, model):
            calls.append(model)

        def sample(self, prompts, max_tokens, seed, temperature):
            calls.append((prompts, temperature))
            ids = torch.tensor([[*lesson1.right_digits(SUM, np.array([p[:8]]))[0].tolist(), lesson1.END] for p in prompts])
            if temperature == 1.0:
                ids[: len(ids) // 2, 7] = (ids[: len(ids) // 2, 7] + 1) % 10
            return lesson1.Rollout(*[torch.zeros(len(ids), 1)] * 2, ids, torch.ones_like(ids, dtype=torch.bool), *[torch.zeros(len(ids), 1)] * 3, ["stop"] * len(ids), 0, temperature, True)
    result = lesson4.held_out(trainer, Stub(), lesson4.SETTINGS["sum"], tokenizer, 8)
    assert calls[0] is trainer and result == {"sampled": 0.5, "greedy": 1.0}
    assert {temperature for _, temperature in calls[1:]} == {0.0, 1.0} and calls[1][0] == calls[2][0]
    trained_on = [lesson1.make_prompts(SUM, tokenizer, 32, np.random.default_rng([seed, step]))[1] for seed in range(5) for step in range(80)]
    assert not {tuple(p) for p in calls[1][0]} & {tuple(p) for prompts in trained_on for p in prompts}


def test_no_run_can_share_the_references_seed():
    with pytest.raises(ValueError):
        lesson1.seed(str(lesson4.REFERENCE_SEED))


def test_periodic_arms_get_the_syncs_of_dlc_with_their_own_seed(engine, tmp_path, monkeypatch, tiny):
    """5 steps: 2 syncs with seed 0 make a period of 3, 4 with seed 1 one of 2."""
    setting = lesson4.Setting("sum", steps=5, period=5, lr=3e-3, prompts=4, every=2)
    monkeypatch.setattr(lesson4, "SETTINGS", {"sum": setting})
    monkeypatch.setattr(lesson4, "plan", lambda: [("sum", arm, seed, 0.0, period) for seed in (0, 1) for arm, period in (("dlc", None), ("dlc, periodic", "as dlc"))])
    monkeypatch.setattr(lesson1, "policy", lambda name: tiny)
    monkeypatch.setattr(lesson1, "ROOT", tmp_path)
    monkeypatch.setattr(lesson4, "Reference", lambda start, sampler, tokenizer, setting, policy_id: type("R", (), {"folder": lesson4.reference_folder(setting, policy_id)}))
    periods = {}
    monkeypatch.setattr(lesson4, "run", lambda start, sampler, tokenizer, setting, arm, seed, reference, noise, period: periods.update({(arm, seed): period}) or {"syncs": (2, 4)[seed]})
    lesson4.study(engine, {}, {}, tmp_path / "x.json")
    assert periods["dlc, periodic", 0] == 3 and periods["dlc, periodic", 1] == 2 and periods["dlc", 0] is None


def test_blind_spot_counts_stale_runs_only():
    runs = [record("none", [0.0], ess_sequence=[0.9, 0.4, 0.5, 0.6], mean_ratio=[0.7, 0.7, 0.9, 0.7]), record("on-policy", [0.0], ess_sequence=[1.0], mean_ratio=[0.1]),
            record("dlc", [0.0], ess_sequence=[1.0], mean_ratio=[0.1])]
    assert lesson4.blind_spot(runs).startswith("2 of 4 stale steps") and lesson4.blind_spot(runs).endswith("3 a mean ratio below .8")


def test_tail_model_takes_the_anchor_for_the_anchor(trainer, engine, tokenizer, monkeypatch):
    """What it hands on: the trainer's logits, its log-probs at theta_s, the engine's, each in the order of the vocabulary."""
    seen = []
    monkeypatch.setattr(lesson4, "tail_errors", lambda *args: seen.append(args) or [])
    lesson4.tail_model(trainer, engine, tokenizer, lesson4.replace(lesson4.SETTINGS["sum"], prompts=4), 0)
    logits, old, q, _ = next(args for args in seen if args[0].shape[1] == 17)
    assert (logits.exp().sum(1) - 1).abs().max() < 1e-4 and (old - q).abs().max() < 1e-3 < (logits - old).abs().max()       # an fp32 engine holds theta_s


def test_rows_of_the_arms():
    records = [record("on-policy", [0.0, 0.1, 0.2]), record("on-policy", [0.0, 0.3, 0.6], 1), record("none", [0.0, 1.0, 5.0])]
    rows = {row["arm"]: row for row in lesson4.arm_rows(records)}
    assert lesson4.floor(records) == pytest.approx(0.2) and lesson4.mean_kl(records[0], "fresh", " late") == pytest.approx(0.15)
    assert rows["on-policy"]["fresh"] == pytest.approx([0.5, 1.5]) and rows["none"]["fresh"] == pytest.approx([10.0]) and rows["none"]["sampler"] == pytest.approx([10.0])


def check_threshold(threshold):
    """Floor .2 on the mean, .5 at the second checkpoint; other arms do not count."""
    records = [record("on-policy", [0.0, 0.4, 0.1]), record("on-policy", [0.1, 0.6, 0.0], 1), record("none", [9.0, 9.0, 9.0])]
    assert np.allclose(threshold(records), [0.6, 1.5, 0.6]) and np.allclose(threshold(records, "sampler"), [0.06, 0.15, 0.06])


WRONG_THRESHOLD = {
    "the mean alone": lambda records, prefixes="fresh": np.full(3, 3 * lesson4.floor(records, prefixes)),
    "the checkpoint alone": lambda records, prefixes="fresh": 3 * np.mean([r[f"kl {prefixes}"] for r in records[:2]], 0),
    "of all arms": lambda records, prefixes="fresh": lesson4.threshold([{**r, "arm": "on-policy"} for r in records], prefixes),
    "always fresh": lambda records, prefixes="fresh": lesson4.threshold(records),
    "the floor itself": lambda records, prefixes="fresh": lesson4.threshold(records, prefixes) / 3,
}


def test_threshold_follows_the_floor_where_it_is_high():
    check_threshold(lesson4.threshold)
    assert lesson4.first([0, 2, 4], [0.5, 1.4, 0.7], np.array([0.6, 1.5, 0.6])) == 4 and lesson4.first([0, 2], [0.1, 0.2], 0.2) is None


@pytest.mark.parametrize("name", WRONG_THRESHOLD)
def test_threshold_rejects(name):
    rejected(check_threshold, WRONG_THRESHOLD[name])


def test_main_runs_leave_the_milder_ones_out():
    runs = [record("tis", [0.0], period=None), record("tis", [0.0], period=16), record("dlc, periodic", [0.0], period=16), record("tis", [0.0], setting="stop")]
    assert lesson4.main_runs(runs, "sum") == [runs[0], runs[2]]


def check_alarms(alarms):
    """Harm at the checkpoint of step 2 or 4; an alarm in the same step is late."""
    low = lambda step: [1.0] * step + [0.4] * (6 - step)
    records = [record("on-policy", [0.1] * 3), record("none", [0.0, 0.4, 0.4], ess_sequence=low(1)), record("tis", [0.0, 0.2, 0.4], ess_sequence=low(4)),
               record("ppo", [0.0, 0.2, 0.2], ess_sequence=low(5)), record("lag clip", [0.0, 0.1, 0.3], ess_token=low(3), mean_ratio=[0.7] * 6),
               record("dlc", [9.0] * 3), record("dlc, periodic", [9.0] * 3)]
    # other settings have floors of their own, and the free tokens are another question
    records += [record("on-policy", [50.0] * 3, setting="stop"), record("none", [1.0] * 3, setting="free, raw", task="free", ess_sequence=low(0))]
    rows = {row["level"]: row for row in alarms(records)}
    sequence, token, mass = rows["ESS of responses < 1/2"], rows["ESS of tokens < 1/2"], rows["mean ratio < 0.8"]
    assert (sequence["before"], sequence["late"], sequence["quiet"], sequence["false"], sequence["leads"]) == (1, 1, 2, 1, [1])
    assert (token["before"], token["false"]) == (0, 1) and (mass["before"], mass["false"]) == (0, 1)
    assert rows["ESS of responses x min(1, mean ratio) < 1/2"]["before"] == 1


def test_alarms():
    check_alarms(lesson4.alarms)


def test_prefixes():
    base = {"kl fresh early": [0.1] * 3, "kl fresh late": [None, 0.5, 0.7], "kl sampler early": [0.1] * 3, "kl sampler late": [None, None, 0.1]}
    rows = lesson4.prefixes([record("on-policy", [0.05, 0.05, 0.05], **base), record("tis", [0.0, 0.1, 0.3], **base)])
    assert rows[1]["fresh above 0.2"] == [4] and rows[1]["sampler above 0.2"] == [None]
    assert rows[1]["fresh above 3 floors"] == [4] and rows[1]["sampler above 3 floors"] == [4] and rows[1]["fresh late"] == [pytest.approx(0.6)]


def test_entropy(trainer, engine, tokenizer):
    engine.sync(trainer)
    _, prompts = lesson1.make_prompts(SUM, tokenizer, 4, np.random.default_rng(0))
    rollout = engine.sample(prompts, 9, seed=0, head=-1)
    p = rollout.head_logp[rollout.mask].double()
    assert lesson4.entropy(trainer, rollout) == pytest.approx(-(p.exp() * p).sum(-1).mean().item(), abs=1e-4)


def test_quick_run_and_redrawn_picture(tmp_path):
    result = subprocess.run([sys.executable, str(lesson1.ROOT / "04_dlc.py"), "--quick", "--out", str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "KL from on-policy training" in result.stdout and "an ESS of 1.00 and a mean ratio of 0.61" in result.stdout
    saved = json.loads((tmp_path / "04_dlc.json").read_text())
    assert list(saved["default"]) == ["on-policy", "none", "tis", "dlc"]
    (tmp_path / "04_dlc.png").unlink()
    lesson4.draw(saved, tmp_path / "04_dlc.png")
    assert (tmp_path / "04_dlc.png").stat().st_size > 10_000


def test_the_study_takes_no_other_flag(capsys):
    for flags in (["--study", "--quick"], ["--study", "--seed", "3"]):
        with pytest.raises(SystemExit) as exit:
            lesson4.main(flags)
        assert exit.value.code == 2 and capsys.readouterr().err.count("\n") == 1
