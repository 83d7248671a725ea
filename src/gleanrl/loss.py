"""Policy losses as pure functions: per token, aggregated over a mask, with their metrics.

Inside, everything works on the *flat list of trained tokens* (`Tokens`), so that padding, micro-batches and
context tokens cannot enter a result. A loss is ``sum(weights * values) / normaliser``: the weights and the
normaliser depend on the whole step only, so that a gradient does not depend on how the step was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gleanrl.errors import UserError
from gleanrl.loss_statistics import Statistics, measure
from gleanrl.registry import Registry, suggestion
from gleanrl.settings import LossSettings

LossConfig = LossSettings

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: far outside every clip, far inside float32
K3_LIMIT = 10.0
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Tokens:
    """T trained tokens, in any order: the rows of a padded batch, without padding and context."""

    logp: Tensor  # float [T], under the policy in training; carries the gradient
    old_logp: Tensor  # float [T], denominator of the ratio
    advantages: Tensor  # float [T]
    sequence: Tensor  # int64 [T], which sequence a token belongs to
    replayed: Tensor  # bool [T], from the experience pool
    behaviour_logp: Tensor | None = None  # float [T], as sampled, where it differs from old_logp

    @cached_property
    def log_ratio(self) -> Tensor:
        return (self.logp - self.old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @cached_property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()


class TokenLoss(NamedTuple):
    """What a policy loss answers for T tokens."""

    values: Tensor  # float [T], to be minimised
    clipped_high: Tensor  # bool [T], no gradient: the ratio is above its bound for a positive advantage
    clipped_low: Tensor  # bool [T], no gradient: the ratio is below its bound for a negative advantage
    clipped_dual: Tensor  # bool [T], no gradient: the bound on a negative advantage times a large ratio


class LossOutput(NamedTuple):
    loss: Tensor  # scalar, carries the gradient
    metrics: dict[str, float]


PolicyLoss = Callable[[Tokens, LossSettings], TokenLoss]
POLICY_LOSSES: Registry[PolicyLoss] = Registry("loss.name")


@POLICY_LOSSES.add("ppo")
def ppo(tokens: Tokens, config: LossSettings) -> TokenLoss:
    """max(-A u, -A clip(u, 1-low, 1+high)), and at most -A c for A < 0 (arXiv 1707.06347, 1912.09729, 2503.14476)."""
    advantages, ratio = tokens.advantages, tokens.ratio
    low, high = 1 - config.clip_low, 1 + config.clip_high
    values = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    negative = advantages < 0
    dual = torch.zeros_like(negative)
    if config.dual_clip is not None:
        bound = -advantages * config.dual_clip
        dual = negative & (values > bound)
        values = torch.where(dual, bound, values)
    return TokenLoss(values, (advantages > 0) & (ratio > high), negative & (ratio < low), dual)


class Objective(NamedTuple):
    """The whole loss of T tokens, before weights and normaliser."""

    values: Tensor  # float [T], policy loss + KL - entropy bonus
    statistics: Statistics


def objective(
    tokens: Tokens,
    config: LossSettings,
    *,
    entropy: Tensor | None = None,
    ref_logp: Tensor | None = None,
) -> Objective:
    """Policy loss, KL to a reference and entropy bonus per token; the last two on fresh tokens only.

    ``entropy`` float [T] of the policy at each token (with gradient if there is a coefficient for it) and
    ``ref_logp`` float [T]. Raises `UserError` for an unknown loss, ValueError where a coefficient lacks its input.
    """
    policy = POLICY_LOSSES.get(config.name)(tokens, config)
    values, fresh = policy.values, ~tokens.replayed
    kl = None
    if ref_logp is not None:
        kl = kl_penalty(tokens.logp, ref_logp, config.kl)
    if config.kl_coefficient:
        if kl is None:
            raise ValueError("loss.kl_coefficient needs the log-probs of a reference")
        values = values + config.kl_coefficient * torch.where(fresh, kl, 0.0)
    if config.entropy_coefficient:
        if entropy is None:
            raise ValueError("loss.entropy_coefficient needs the entropy of the policy")
        values = values - config.entropy_coefficient * torch.where(fresh, entropy, 0.0)
    with torch.no_grad():
        statistics = measure(
            tokens.replayed,
            policy=policy.values,
            log_ratio=tokens.log_ratio,
            clip_high=policy.clipped_high,
            clip_low=policy.clipped_low,
            clip_dual=policy.clipped_dual,
            entropy=entropy,
            kl=kl,
            mismatch=None if tokens.behaviour_logp is None else tokens.old_logp - tokens.behaviour_logp,
        )
    return Objective(values, statistics)


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    replayed: Tensor | None = None,
    *,
    config: LossSettings,
    behaviour_logp: Tensor | None = None,
) -> LossOutput:
    """The aggregated policy loss of N sequences of L positions, and its metrics.

    ``logp``, ``old_logp``, ``advantages``, ``behaviour_logp`` float [N, L]; ``mask`` bool or 0/1 [N, L], the trained
    tokens; ``replayed`` bool [N, L] or [N, 1] or [N]. Positions outside the mask may hold anything, NaN included. The
    terms for KL and entropy are not in it (`kl_penalty`, `aggregate`). ``behaviour_logp`` only feeds the mismatch
    metrics. Raises `UserError` for an unknown loss or aggregation.
    """
    mask = mask.bool()
    if replayed is None:
        replayed = torch.zeros_like(mask)
    elif replayed.ndim == 1:
        replayed = replayed[:, None]
    tokens = Tokens(
        logp=logp[mask],
        old_logp=old_logp[mask],
        advantages=advantages[mask],
        sequence=mask.nonzero()[:, 0],
        replayed=replayed.bool().expand_as(mask)[mask],
        behaviour_logp=None if behaviour_logp is None else behaviour_logp[mask],
    )
    result = objective(tokens, config.model_copy(update={"kl_coefficient": 0.0, "entropy_coefficient": 0.0}))
    weights = token_weights(mask, config.aggregation, scale=config.aggregation_scale)[mask]
    total = normaliser(config.aggregation, float(mask.sum()), float(mask.any(-1).sum()))
    loss = (weights * result.values).sum() / max(total, 1.0)
    return LossOutput(loss, {"loss/policy": float(loss.detach()), **result.statistics.metrics()})


def token_weights(mask: Tensor, mode: str, *, scale: float | None = None) -> Tensor:
    """float32 [N, L]: the weight of each token in the sum of ``mode``, 0 outside ``mask`` bool [N, L].

    ``scale``: divisor of seq-mean-token-sum-norm, default L. Raises `UserError` for an unknown mode.
    """
    if mode not in AGGREGATIONS:
        raise UserError(f"loss.aggregation: unknown value {mode!r}{suggestion(mode, AGGREGATIONS)}")
    weights = mask.float()
    if mode == "seq-mean-token-mean":
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1)
    elif mode == "seq-mean-token-sum-norm":
        weights = weights / (scale or mask.shape[-1])
    return weights


def normaliser(mode: str, tokens: float, sequences: float) -> float:
    """What the weighted sum of a step is divided by: its trained tokens, its non-empty sequences, or nothing.

    seq-mean-token-sum-norm is a sum over the batch by a fixed length, not a mean over sequences.
    """
    return {"token-mean": tokens, "seq-mean-token-sum-norm": 1.0}.get(mode, sequences)


def aggregate(values: Tensor, mask: Tensor, mode: str, *, scale: float | None = None) -> Tensor:
    """Scalar from ``values`` float [N, L] over ``mask`` [N, L]; 0 where nothing is trained.

    token-mean: mean over all trained tokens. seq-mean-token-sum: sum a sequence, mean over non-empty sequences.
    seq-mean-token-mean: mean a sequence, mean over non-empty sequences. seq-mean-token-sum-norm: sum of everything
    divided by ``scale`` (default L). Values outside the mask may be anything. Raises `UserError` for an unknown mode.
    """
    mask = mask.bool()
    weights = token_weights(mask, mode, scale=scale)[mask].to(values.dtype)
    total = normaliser(mode, float(mask.sum()), float(mask.any(-1).sum()))
    return (weights * values[mask]).sum() / max(total, 1.0)


def kl_penalty(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Estimates of KL(policy || reference) per token, same shape as ``logp``; d = logp - ref_logp.

    k1 or kl: d. abs: |d|. k2 or mse: d^2/2. k3 or low_var_kl: exp(-d) + d - 1 with d in +-20 and the result in +-10
    (Schulman, "Approximating KL divergence"). Raises `UserError` for an unknown kind.
    """
    difference = logp - ref_logp
    if kind in ("k1", "kl"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("k2", "mse"):
        return difference.square() / 2
    if kind in ("k3", "low_var_kl"):
        difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return ((-difference).exp() + difference - 1).clamp(-K3_LIMIT, K3_LIMIT)
    raise UserError(f"loss.kl: unknown value {kind!r}{suggestion(kind, ('k1', 'kl', 'abs', 'k2', 'mse', 'k3'))}")
