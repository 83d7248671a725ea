"""The loss of an update: policy loss, importance correction, KL, entropy bonus, aggregation; pure functions.

`objective` reads top-down: what a token contributes, fresh and replayed apart. Inside, everything works on the *flat
list of trained tokens* (`Tokens`), so that padding, micro-batches and context tokens cannot enter a result. A loss is
``sum(weights * values) / normaliser``: the weights and the normaliser depend on the whole step only, so that a
gradient does not depend on how the step was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gleanrl.algorithms.loss_statistics import Statistics, measure
from gleanrl.algorithms.policy_losses import (
    LOG_RATIO_LIMIT,
    POLICY_LOSSES,
    PolicyLoss,
    Scope,
    Surrogate,
    Tokens,
    find,
    replayed_surrogate,
    surrogate,
)
from gleanrl.config.settings import LossSettings
from gleanrl.utils.errors import UserError
from gleanrl.utils.registry import suggestion

__all__ = [
    "AGGREGATIONS",
    "POLICY_LOSSES",
    "LossConfig",
    "LossContext",
    "LossOutput",
    "Objective",
    "PolicyLoss",
    "Surrogate",
    "Tokens",
    "aggregate",
    "aggregation_of",
    "find",
    "kl_penalty",
    "loglinear",
    "normaliser",
    "objective",
    "policy_loss",
    "precompute",
    "scope_of",
    "surrogate",
    "token_weights",
    "value_loss",
]  # fmt: skip

LossConfig = LossSettings

K3_LIMIT = 10.0
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")


class LossOutput(NamedTuple):
    loss: Tensor  # scalar, carries the gradient
    metrics: dict[str, float]


class LossContext(NamedTuple):
    """What tokens need to know of one another, without gradient; [T] each, None where nothing asks for it."""

    precomputed: Tensor | None  # what the policy loss's own precompute answered
    weight: Tensor | None  # float, importance correction of a fresh token: 0 = left out, 1 = as it is
    kept: Tensor | None  # float, how many of its sequence's tokens are not left out
    length: Tensor | None  # float, how many tokens its sequence has

    def take(self, index: Tensor | slice) -> LossContext:
        """That of some of the tokens, by their indices, a mask or a slice."""
        return LossContext(*(None if value is None else value[index] for value in self))

    def split(self, sizes: Sequence[int]) -> list[LossContext]:
        """Those of so many tokens each, one after the other."""
        ends = list(accumulate(sizes, initial=0))
        return [self.take(slice(start, stop)) for start, stop in pairwise(ends)]


class Objective(NamedTuple):
    """The whole loss of T tokens, before weights and normaliser."""

    values: Tensor  # float [T], policy loss + KL - entropy bonus
    statistics: Statistics
    left_out_tokens: Tensor  # float scalar: tokens that a masking correction takes out of the denominator
    left_out_sequences: Tensor  # float scalar: likewise sequences, each token its share; 0 where none are counted


def objective(
    tokens: Tokens,
    config: LossSettings,
    *,
    kl_coefficient: float | None = None,
    entropy: Tensor | None = None,
    ref_logp: Tensor | None = None,
    context: LossContext | None = None,
    current_logp: Tensor | None = None,
) -> Objective:
    """What each token contributes. KL, entropy bonus and correction reach fresh tokens only.

    ``kl_coefficient`` defaults to that of ``config``, or 0 where the KL is in the reward. ``entropy`` float [T] of the
    policy at each token (with gradient if there is a coefficient for it), ``ref_logp`` float [T]. ``known``: the
    `precompute` of these tokens, needed where they are not all tokens of the loss's scope. ``current_logp`` float [T]:
    given where ``old_logp`` is as sampled and nothing was trained since, to measure how far trainer and sampler are
    apart. Raises `UserError` for an
    unknown loss, ValueError where a coefficient lacks its input.
    """
    loss = find(config)
    fresh = ~tokens.replayed
    if context is None:
        context = precompute(tokens, config)
    tokens = replace(tokens, precomputed=context.precomputed)
    policy = _by_origin(tokens.replayed, loss(tokens, config), replayed_surrogate(tokens, config))
    values, terms = policy.values, torch.zeros_like(policy.values)
    kl = None if ref_logp is None else kl_penalty(tokens.logp, ref_logp, config.kl)
    if kl_coefficient is None:
        kl_coefficient = config.kl_coefficient if config.kl_in == "loss" else 0.0
    if kl_coefficient:
        if kl is None:
            raise ValueError("loss.kl_coefficient needs the log-probs of a reference")
        terms = terms + kl_coefficient * torch.where(fresh, kl, 0.0)
    if config.entropy_coefficient:
        if entropy is None:
            raise ValueError("loss.entropy_coefficient needs the entropy of the policy")
        terms = terms - config.entropy_coefficient * torch.where(fresh, entropy, 0.0)

    left_out_tokens = left_out_sequences = values.new_zeros(())
    if context.weight is not None:
        included = context.weight > 0
        values, terms = torch.where(included, context.weight * values, 0.0), torch.where(included, terms, 0.0)
        left_out_tokens = (~included).sum().to(values.dtype)
    if context.kept is not None and context.length is not None:
        left_out_sequences = torch.where(context.kept == 0, 1 / context.length, 0.0).sum()
        if aggregation_of(config) == "seq-mean-token-mean":  # a mean over the tokens that are left
            scale = context.length / context.kept.clamp(min=1)
            values, terms = scale * values, scale * terms
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
            mismatch=_mismatch(tokens, current_logp),
            correction=context.weight,
        )
    return Objective(values + terms, statistics, left_out_tokens, left_out_sequences)


def _mismatch(tokens: Tokens, current_logp: Tensor | None) -> Tensor | None:
    """float [T], how far log-probs are from those of sampling: of fresh tokens the trainer's at the same weights, of
    replayed ones always the current policy's; None where nothing tells the former."""
    if tokens.behaviour_logp is None:
        return None if current_logp is None else current_logp - tokens.old_logp
    return torch.where(tokens.replayed, tokens.logp - tokens.old_logp, tokens.old_logp - tokens.behaviour_logp)


def _by_origin(replayed: Tensor, fresh: Surrogate, off_policy: Surrogate) -> Surrogate:
    """Token by token the one or the other; a flag that is None is False."""
    none = torch.zeros_like(replayed)
    pairs = ((none if a is None else a, none if b is None else b) for a, b in zip(fresh, off_policy, strict=True))
    return Surrogate(*(torch.where(replayed, b, a) for a, b in pairs))


# --- what tokens need to know of one another --------------------------------------------------------
def scope_of(config: LossSettings) -> Scope:
    """Which tokens `precompute` must see at once: each alone, whole sequences, or all of an update."""
    scope = find(config).scope
    if scope == "token" and config.correction != "none":
        return "sequence" if _counts_sequences(config) or config.correction_level != "token" else "token"
    return scope


def _counts_sequences(config: LossSettings) -> bool:
    """Whether tokens that are left out change a mean over their sequence or over all sequences."""
    return config.correction == "mask" and aggregation_of(config) != "token-mean"


@torch.no_grad()
def precompute(tokens: Tokens, config: LossSettings) -> LossContext:
    """The precompute of all tokens of the loss's scope; nothing in it carries a gradient."""
    loss = find(config)
    tokens = replace(tokens, logp=tokens.logp.detach())
    if config.correction == "none":
        return LossContext(loss.precomputed(tokens, config), None, None, None)
    weight = correction_weight(tokens, config, ratio=loss.ratio)
    included = weight > 0
    precomputed = kept = length = None
    seen = loss.precomputed(tokens.take(included), config)  # as if the tokens that are left out were not trained
    if seen is not None:
        precomputed = seen.new_zeros(weight.shape).masked_scatter(included, seen)
    if _counts_sequences(config):
        kept, length = (tokens.sequence_sum(x.to(weight.dtype)) for x in (included, torch.ones_like(weight)))
    return LossContext(precomputed, weight, kept, length)


def correction_weight(tokens: Tokens, config: LossSettings, *, ratio: bool = True) -> Tensor:
    """float [T]: weight of each token's loss for having been sampled by another policy; 1 for replayed tokens.

    w = pi_old / pi_behaviour, or pi / pi_behaviour for a loss without a ratio of its own; over the token, the product
    over its sequence, or that product's geometric mean. truncate: min(w, cap) (truncated importance sampling).
    mask: 0 where w leaves [floor, cap], else w (decoupled PPO of AReaL, arXiv 2505.24298).
    """
    behaviour = tokens.old_logp if tokens.behaviour_logp is None else tokens.behaviour_logp
    drift = (tokens.old_logp if ratio else tokens.logp.detach()) - behaviour
    if config.correction_level == "sequence":
        drift = tokens.sequence_sum(drift)
    elif config.correction_level == "geometric":
        drift = tokens.sequence_mean(drift)
    weight = drift.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if config.correction == "truncate":
        weight = weight.clamp(max=config.correction_cap)
    else:
        inside = (weight <= config.correction_cap) & (weight >= config.correction_floor)
        weight = torch.where(inside, weight, 0.0)
    return torch.where(tokens.replayed, 1.0, weight)


def loglinear(behaviour_logp: Tensor, logp: Tensor, staleness: Tensor) -> Tensor:
    """float [T], without gradient: the proximal log-prob without a forward pass of the proximal policy.

    Between what was recorded and the current ``logp``, d / (d + 1) of the way for tokens sampled d steps before the
    update's first weights: at staleness 0 the recorded one (arXiv 2512.06547; AReaL's "loglinear"). ``behaviour_logp``
    and ``logp`` float [T], ``staleness`` int or float [T], d.
    """
    staleness = staleness.to(behaviour_logp.dtype)
    share = staleness / (staleness + 1)
    return behaviour_logp + share * (logp.detach() - behaviour_logp)


# --- on padded tensors ------------------------------------------------------------------------------
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
    terms for KL and entropy are not in it (`kl_penalty`, `aggregate`). ``behaviour_logp``, where it differs from
    ``old_logp``, feeds the mismatch metrics and the correction. Raises `UserError` for an unknown loss or aggregation.
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
    mode = aggregation_of(config)
    weights = token_weights(mask, mode, scale=config.aggregation_scale)[mask]
    total = normaliser(
        mode,
        float(mask.sum() - result.left_out_tokens),
        float(mask.any(-1).sum() - result.left_out_sequences),
    )
    loss = (weights * result.values).sum() / max(total, 1.0)
    return LossOutput(loss, {"loss/policy": float(loss.detach()), **result.statistics.metrics()})


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """float [T]: half the squared error of a critic, the larger of the plain one and that of the clipped value.

    ``values`` carry the gradient, ``old_values`` are those that gave the advantages; a value further than ``clip``
    from its old one gets no gradient where that would lower the error (PPO, arXiv 1707.06347). float [T] each.
    """
    error = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return error / 2


def aggregation_of(config: LossSettings) -> str:
    """The aggregation mode of a configuration, "auto" resolved."""
    return find(config).aggregation if config.aggregation == "auto" else config.aggregation


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
    """What the weighted sum of a step is divided by: its trained tokens, or its non-empty sequences."""
    return tokens if mode == "token-mean" else sequences


def aggregate(values: Tensor, mask: Tensor, mode: str, *, scale: float | None = None) -> Tensor:
    """Scalar from ``values`` float [N, L] over ``mask`` [N, L]; 0 where nothing is trained.

    token-mean: mean over all trained tokens. seq-mean-token-sum: sum a sequence, mean over non-empty sequences.
    seq-mean-token-mean: mean a sequence, mean over non-empty sequences. seq-mean-token-sum-norm: sum a sequence divided
    by ``scale`` (default L), mean over non-empty sequences (Dr. GRPO, arXiv 2503.20783). Values outside the mask may be
    anything. Raises `UserError` for an unknown mode.
    """
    mask = mask.bool()
    weights = token_weights(mask, mode, scale=scale)[mask].to(values.dtype)
    total = normaliser(mode, float(mask.sum()), float(mask.any(-1).sum()))
    return (weights * values[mask]).sum() / max(total, 1.0)


def kl_penalty(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Estimates of KL(policy || reference) per token, same shape as ``logp``; d = logp - ref_logp.

    k1 or kl: d. abs: |d|. k2 or mse: d^2/2. k3 or low_var_kl: exp(-d) + d - 1 with d in +-20 and the result in +-10
    (Schulman, "Approximating KL divergence"). With a trailing + the value is that of its kind and the gradient that
    of k2, the unbiased one. Raises `UserError` for an unknown kind.
    """
    difference = logp - ref_logp
    if kind.endswith("+") and kind[:-1] in KL_KINDS:
        straight = difference.square() / 2
        return kl_penalty(logp, ref_logp, kind[:-1]).detach() + (straight - straight.detach())
    if kind in ("k1", "kl"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("k2", "mse"):
        return difference.square() / 2
    if kind in ("k3", "low_var_kl"):
        difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return (torch.expm1(-difference) + difference).clamp(-K3_LIMIT, K3_LIMIT)
    raise UserError(f"loss.kl: unknown value {kind!r}{suggestion(kind, KL_KINDS)}")
