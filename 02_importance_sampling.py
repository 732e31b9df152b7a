"""Lesson 2: the gradient is under mu, not pi.

The policy gradient wants an expectation under the trainer's policy pi, and the samples come from the
engine's mu. Importance sampling rewrites one into the other: E_pi[f] = E_mu[(pi / mu) f].

This file holds the objective that train.py optimises: group-relative advantages, the weights that
correct for mu, and one loss.
"""
import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0   # log-ratios are clamped to +-20 before exp: e^20 is 5e8, never inf, and inf * 0 is NaN


# ---------------------------------------------------------------- the objective
def advantages(R: Tensor, group_size: int, kind: str = "std") -> Tensor:
    """Advantages (B,) from rewards (B,), B = prompts x group_size, a group's responses being neighbours.

    std:  (R - mean of the group) / std of the group      GRPO (arXiv 2402.03300); the population's std
    mean: R - mean of the group                           Dr. GRPO (arXiv 2503.20783)
    raw:  R                                               REINFORCE without a baseline
    A group whose rewards are all equal has advantage exactly 0 under std and mean."""
    if kind == "raw":
        return R
    group = R.view(-1, group_size)
    A = group - group.mean(1, keepdim=True)
    if kind == "std":
        A = A / group.std(1, keepdim=True, correction=0)
    equal = group.amax(1, keepdim=True) == group.amin(1, keepdim=True)   # not A == 0: the mean is rounded
    return torch.where(equal, 0.0, A).flatten()


def policy_loss(logp: Tensor, weight: Tensor, advantage: Tensor, mask: Tensor, n_tokens: int,
                centre: Tensor | float = 0.0) -> Tensor:
    """The one loss. logp, weight, mask (B, T), advantage (B,) -> scalar.

    n_tokens counts the response tokens of the whole batch BEFORE any is rejected: a rejected token
    (weight 0) takes its gradient with it, and does not make the others' larger."""
    # L = -sum_t A (sg(w) log pi - centre) / N
    per_token = -advantage[:, None] * (weight * logp - centre)
    return torch.where(mask, per_token, 0.0).sum() / n_tokens


# ---------------------------------------------------------------- the weights
CORRECTIONS = {}   # name -> weight(logp, logp_old, logp_sampler, advantage, mask) -> (B, T)


def correction(name: str):
    """Registers a weight under the name that `train.py --correction` takes. Decided here, for all of
    them: the weight is a constant to the gradient, and 0 where the mask is."""
    def register(function):
        @torch.no_grad()
        def weight(logp, logp_old, logp_sampler, advantage, mask):
            return torch.where(mask, function(logp, logp_old, logp_sampler, advantage, mask), 0.0)
        CORRECTIONS[name] = weight
        return weight
    return register


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio, clamped in log space."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@correction("none")
def none(logp, logp_old, logp_sampler, advantage, mask):
    """w = 1: the samples are taken for pi's own."""
    return torch.ones_like(logp)


@correction("tis")
def token_tis(logp, logp_old, logp_sampler, advantage, mask, C=2.0):
    """w = min(pi / mu, C): truncated importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl)."""
    return ratio(logp - logp_sampler).clamp(max=C)
