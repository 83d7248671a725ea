"""The loss of an update: policy loss, importance correction, KL, entropy bonus and aggregation, as pure functions.

`objective` computes each token's part of the loss that a learner minimises. `padded_policy_loss` computes the policy
loss of padded tensors, for another trainer's loop. To add a policy loss, decorate a function of `Tokens` with
`@policy_loss` and set ``loss.name = "file.py:function"``, or the name given to the decorator if it is in this file. The
policy loss is that of fresh tokens only: replayed tokens always get `replayed_loss`, whatever ``loss.name`` is.

All functions work on the flat list of trained tokens, so that padding, micro-batches and context tokens cannot change a
result. A loss is ``sum(weights * values) / normaliser``. Weights and normaliser depend on the whole step only, so a
gradient does not depend on how the step is cut into chunks and micro-batches. If a token's loss depends on further
tokens (gspo: its sequence; clip_cov, kl_cov: the whole update), the policy loss declares them as its ``scope``. Its
``precompute`` sees all tokens of the scope, without gradient, and the loss receives the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from inspect import Parameter, signature
from itertools import accumulate, pairwise
from math import log
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gleanrl.algorithms.loss_statistics import Statistics, measure
from gleanrl.config.settings import LossSettings
from gleanrl.utils.errors import UserError
from gleanrl.utils.registry import Registry
from gleanrl.utils.text import nearest

LossConfig = LossSettings

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: far beyond every clip and far within the range of float32
K3_LIMIT = 10.0
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
Scope = Literal["token", "sequence", "update"]


# --- what a policy loss is ---
@dataclass(frozen=True)
class Tokens:
    """T trained tokens, in any order: the rows of a padded batch, without padding and context."""

    logp: Tensor  # float [T], under the policy in training; carries the gradient
    old_logp: Tensor  # float [T], denominator of the ratio
    advantages: Tensor  # float [T]
    sequence: Tensor  # int64 [T], which sequence a token belongs to
    off_policy: Tensor  # bool [T], replayed, or sampled with guidance that the tokens no longer contain
    behaviour_logp: Tensor | None = None  # float [T], log-probs as sampled, where they differ from old_logp
    precomputed: Tensor | None = None  # [T], what the loss's ``precompute`` returned for each token

    def take(self, index: Tensor | slice) -> Tokens:
        """Return some of these tokens, selected by indices, a mask or a slice."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        some: dict[str, Any] = {name: None if value is None else value[index] for name, value in values.items()}
        return Tokens(**some)

    @cached_property
    def log_ratio(self) -> Tensor:
        return (self.logp - self.old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @cached_property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Return float [T]: for each token, the sum of ``values`` [T] over those of these tokens in its sequence."""
        if not values.numel():
            return values
        totals = values.new_zeros(int(self.sequence.max()) + 1).index_add_(0, self.sequence, values)
        return totals[self.sequence]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return float [T]: for each token, the mean of ``values`` [T] over those of these tokens in its sequence."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values))


class TokenLosses(NamedTuple):
    """The result of a policy loss for T tokens. A flag that is None is False everywhere."""

    values: Tensor  # float [T], to be minimised
    clipped_high: Tensor | None = None  # bool [T], the upper bound of the ratio determines the value
    clipped_low: Tensor | None = None  # bool [T], the lower bound of the ratio determines the value
    clipped_dual: Tensor | None = None  # bool [T], the dual-clip bound (negative advantages) determines the value


@dataclass(frozen=True)
class PolicyLoss:
    """A named policy loss and what it needs."""

    name: str
    function: Callable[..., TokenLosses | Tensor]
    scope: Scope  # the tokens that one token's value depends on
    precompute: Callable[..., Tensor] | None  # (all tokens of the scope, settings, **options) -> [T], without gradient
    aggregation: str
    ratio: bool  # its values contain pi / pi_old, so that a correction only multiplies by pi_old / pi_behaviour

    def __call__(self, tokens: Tokens, settings: LossSettings) -> TokenLosses:
        result = self.function(tokens, settings, **_taken(self._options[0], settings.options))
        return result if isinstance(result, TokenLosses) else TokenLosses(result)

    def precomputed(self, tokens: Tokens, settings: LossSettings) -> Tensor | None:
        """Return [T], the result of ``precompute`` for all tokens of the scope; None if the loss has none."""
        if self.precompute is None:
            return None
        return self.precompute(tokens, settings, **_taken(self._options[1], settings.options))

    @cached_property
    def options(self) -> frozenset[str] | None:
        """Names of the options that the loss or its precompute takes; None if it takes any."""
        ours, precomputes = self._options
        return None if ours is None or precomputes is None else ours | precomputes

    @cached_property
    def _options(self) -> tuple[frozenset[str] | None, frozenset[str] | None]:
        return _options_of(self.function), frozenset() if self.precompute is None else _options_of(self.precompute)


def _options_of(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of the parameters after tokens and settings; None if ``**options`` takes any name."""
    parameters = list(signature(function).parameters.values())[2:]
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _taken(names: frozenset[str] | None, options: dict[str, Any]) -> dict[str, Any]:
    return options if names is None else {name: value for name, value in options.items() if name in names}


POLICY_LOSSES: Registry[PolicyLoss] = Registry("loss.name", PolicyLoss, "@gleanrl.algorithms.loss.policy_loss(...)")


def policy_loss(
    name: str,
    *,
    scope: Scope = "token",
    precompute: Callable[..., Tensor] | None = None,
    aggregation: str = "token-mean",
    ratio: bool = True,
) -> Callable[[Callable[..., TokenLosses | Tensor]], PolicyLoss]:
    """Decorator: register ``function(tokens, settings, **options)``, which returns `TokenLosses` or values float [T].

    Args:
        scope: what one token's value depends on: itself, its whole sequence, or all tokens of an update.
        precompute: ``precompute(tokens, settings, **options) -> [T]`` sees the whole scope without gradient; the loss
            finds the result in ``tokens.precomputed``. A loss of scope "token" has no precompute. Loss and precompute
            each receive those of ``loss.options`` that they have as a parameter.
        aggregation: used where ``loss.aggregation`` is "auto".
        ratio: False if the values contain no probability ratio; a correction then multiplies them by pi / pi_behaviour.
    """
    if (scope == "token") != (precompute is None):
        raise ValueError(f"loss {name!r}: precompute is needed for the scopes sequence and update, and only for them")
    return lambda function: POLICY_LOSSES.add(PolicyLoss(name, function, scope, precompute, aggregation, ratio))


def find(settings: LossSettings) -> PolicyLoss:
    """Return the loss that ``settings`` names. Raises `UserError` for an unknown name or option."""
    loss = POLICY_LOSSES.get(settings.name)
    if settings.options and loss.options is not None:
        for option in settings.options.keys() - loss.options:
            hint = nearest(option, loss.options, list_all=True)
            raise UserError(f"loss.options.{option}: {loss.name!r} has no such option{hint}")
    return loss


# --- the whole loss of a token ---
class LossOutput(NamedTuple):
    loss: Tensor  # scalar, carries the gradient
    metrics: dict[str, float]


class LossContext(NamedTuple):
    """Further inputs to the loss of T tokens, without gradient.

    Each field is a tensor of shape [T], or None if the loss does not need it.
    """

    precomputed: Tensor | None  # the result of the policy loss's own ``precompute``
    weight: Tensor | None  # float, importance correction of a fresh token: 0 = left out, 1 = unchanged
    kept: Tensor | None  # float, number of tokens of its sequence that the correction keeps
    length: Tensor | None  # float, number of tokens of its sequence

    def take(self, index: Tensor | slice) -> LossContext:
        """Return the context of some of the tokens, selected by indices, a mask or a slice."""
        return LossContext(*(None if value is None else value[index] for value in self))

    def split(self, sizes: Sequence[int]) -> list[LossContext]:
        """Split the context into consecutive parts; ``sizes`` gives the tokens of each."""
        ends = list(accumulate(sizes, initial=0))
        return [self.take(slice(start, stop)) for start, stop in pairwise(ends)]


class Objective(NamedTuple):
    """The whole loss of T tokens, before weights and normaliser."""

    values: Tensor  # float [T], policy loss + KL - entropy bonus
    statistics: Statistics
    left_out_tokens: Tensor  # float scalar: number of tokens that a masking correction removes from the denominator
    left_out_sequences: Tensor  # float scalar: number of sequences removed (each token adds 1 / length); 0 if unused


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
    """Compute the loss of each token. KL, entropy bonus and correction apply to fresh tokens only.

    ``kl_coefficient`` defaults to that of ``config``, or 0 where the KL is in the reward. ``entropy`` float [T]: of the
    policy at each token (with gradient if it has a coefficient). ``ref_logp`` float [T]: log-probs of the reference.
    ``context``: the result of `precompute` for these tokens, needed if they are not all tokens of the loss's scope.
    ``current_logp`` float [T]: the trainer's log-probs, given if ``old_logp`` is as sampled and nothing was trained
    since; their difference is the mismatch of trainer and sampler. Raises `UserError` for an unknown loss,
    ValueError if a term with a coefficient lacks its input.
    """
    loss = find(config)
    fresh = ~tokens.off_policy
    if context is None:
        context = precompute(tokens, config)
    tokens = replace(tokens, precomputed=context.precomputed)
    policy = _merge(tokens.off_policy, loss(tokens, config), replayed_loss(tokens, config))
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
        if aggregation_of(config) == "seq-mean-token-mean":  # the mean is over the kept tokens
            scale = context.length / context.kept.clamp(min=1)
            values, terms = scale * values, scale * terms
    with torch.no_grad():
        # Difference between the trainer's log-probs and those recorded at sampling. Fresh tokens use the trainer's
        # log-probs at the weights that sampled, replayed tokens those of the current policy.
        mismatch: Tensor | None = None
        if tokens.behaviour_logp is not None:
            gap = tokens.old_logp - tokens.behaviour_logp
            mismatch = torch.where(tokens.off_policy, tokens.logp - tokens.old_logp, gap)
        elif current_logp is not None:
            mismatch = current_logp - tokens.old_logp
        statistics = measure(
            tokens.off_policy,
            policy=policy.values,
            log_ratio=tokens.log_ratio,
            clip_high=policy.clipped_high,
            clip_low=policy.clipped_low,
            clip_dual=policy.clipped_dual,
            entropy=entropy,
            kl=kl,
            mismatch=mismatch,
            correction=context.weight,
        )
    return Objective(values + terms, statistics, left_out_tokens, left_out_sequences)


def _merge(off_policy: Tensor, of_fresh: TokenLosses, of_replayed: TokenLosses) -> TokenLosses:
    """Take ``of_replayed`` where ``off_policy`` (bool [T]), else ``of_fresh``. A flag that is None is False."""
    merged = []
    for fresh, replayed in zip(of_fresh, of_replayed, strict=True):
        no = torch.zeros_like(off_policy)
        merged.append(torch.where(off_policy, no if replayed is None else replayed, no if fresh is None else fresh))
    return TokenLosses(*merged)


# --- what depends on several tokens --------------------------------------------------------------
def scope_of(config: LossSettings) -> Scope:
    """Return which tokens `precompute` must see at once: each alone, whole sequences, or all of an update."""
    scope = find(config).scope
    if scope == "token" and config.correction != "none":
        return "sequence" if _counts_sequences(config) or config.correction_level != "token" else "token"
    return scope


def _counts_sequences(config: LossSettings) -> bool:
    """Return whether leaving out tokens changes a mean over their sequence or over all sequences."""
    return config.correction == "mask" and aggregation_of(config) != "token-mean"


@torch.no_grad()
def precompute(tokens: Tokens, config: LossSettings) -> LossContext:
    """Compute the context of ``tokens``, which must be all tokens of the loss's scope; without gradient."""
    loss = find(config)
    tokens = replace(tokens, logp=tokens.logp.detach())
    if config.correction == "none":
        return LossContext(loss.precomputed(tokens, config), None, None, None)
    weight = correction_weight(tokens, config, ratio=loss.ratio)
    included = weight > 0
    precomputed = kept = length = None
    seen = loss.precomputed(tokens.take(included), config)  # the tokens that are left out count as not trained
    if seen is not None:
        precomputed = seen.new_zeros(weight.shape).masked_scatter(included, seen)
    if _counts_sequences(config):
        kept, length = (tokens.sequence_sum(x.to(weight.dtype)) for x in (included, torch.ones_like(weight)))
    return LossContext(precomputed, weight, kept, length)


def correction_weight(tokens: Tokens, config: LossSettings, *, ratio: bool = True) -> Tensor:
    """Return float [T]: weight of each token's loss because another policy sampled it; 1 for replayed tokens.

    w is pi_old / pi_behaviour, or pi / pi_behaviour for a loss that contains no ratio. ``correction_level`` chooses the
    token's own w, the product over its sequence, or the geometric mean over its sequence. With the correction
    "truncate" the weight is min(w, cap) (truncated importance sampling). With "mask" it is w, but 0 where w is outside
    [floor, cap] (decoupled PPO of AReaL, arXiv 2505.24298).
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
    return torch.where(tokens.off_policy, 1.0, weight)


def loglinear(behaviour_logp: Tensor, logp: Tensor, staleness: Tensor) -> Tensor:
    """Approximate the proximal log-prob, float [T] without gradient, without a forward pass of the proximal policy.

    The result lies between the recorded ``behaviour_logp`` and the current ``logp`` (float [T] each), d / (d + 1) of
    the way for a token sampled d steps before the update's first weights, so that at d = 0 it is the recorded one
    (arXiv 2512.06547; AReaL's "loglinear"). ``staleness`` int or float [T] is d.
    """
    staleness = staleness.to(behaviour_logp.dtype)
    share = staleness / (staleness + 1)
    return behaviour_logp + share * (logp.detach() - behaviour_logp)


# --- on padded tensors ------------------------------------------------------------------------------
def padded_policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    off_policy: Tensor | None = None,
    *,
    config: LossSettings,
    behaviour_logp: Tensor | None = None,
) -> LossOutput:
    """Compute the aggregated policy loss of N sequences of L positions, and its metrics.

    ``logp``, ``old_logp``, ``advantages``, ``behaviour_logp`` float [N, L]; ``mask`` bool or 0/1 [N, L], the trained
    tokens; ``off_policy`` bool [N, L] or [N, 1] or [N]. Positions outside the mask may hold anything, NaN included. The
    loss has no terms for KL and entropy; add them with `kl_penalty` and `aggregate`. ``behaviour_logp``, needed where
    it differs from ``old_logp``, enters the mismatch metrics and the correction. Raises `UserError` for an unknown loss
    or aggregation.
    """
    mask = mask.bool()
    if off_policy is None:
        off_policy = torch.zeros_like(mask)
    elif off_policy.ndim == 1:
        off_policy = off_policy[:, None]
    tokens = Tokens(
        logp=logp[mask],
        old_logp=old_logp[mask],
        advantages=advantages[mask],
        sequence=mask.nonzero()[:, 0],
        off_policy=off_policy.bool().expand_as(mask)[mask],
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
    """Return float [T]: half the squared error of a critic's value or of its clipped value, whichever is larger.

    ``values`` carry the gradient; the advantages were computed from ``old_values``; float [T] each. A value further
    than ``clip`` from its old value gets no gradient if the clipped value's error is larger (PPO, arXiv 1707.06347).
    """
    error = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return error / 2


def aggregation_of(config: LossSettings) -> str:
    """Return the aggregation mode of a configuration, with "auto" resolved."""
    return find(config).aggregation if config.aggregation == "auto" else config.aggregation


def token_weights(mask: Tensor, mode: str, *, scale: float | None = None) -> Tensor:
    """Return float32 [N, L]: the weight of each token under aggregation ``mode``, 0 outside ``mask`` bool [N, L].

    ``scale``: divisor of seq-mean-token-sum-norm, default L. Raises `UserError` for an unknown mode.
    """
    if mode not in AGGREGATIONS:
        raise UserError(f"loss.aggregation: unknown value {mode!r}{nearest(mode, AGGREGATIONS, list_all=True)}")
    weights = mask.float()
    if mode == "seq-mean-token-mean":
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1)
    elif mode == "seq-mean-token-sum-norm":
        weights = weights / (scale or mask.shape[-1])
    return weights


def normaliser(mode: str, tokens: float, sequences: float) -> float:
    """Return the divisor of a step's weighted sum: its number of trained tokens, or of non-empty sequences."""
    return tokens if mode == "token-mean" else sequences


def aggregate(values: Tensor, mask: Tensor, mode: str, *, scale: float | None = None) -> Tensor:
    """Aggregate ``values`` float [N, L] over ``mask`` [N, L] to a scalar, 0 if nothing is trained.

    token-mean: mean over all trained tokens. The other modes take the mean over non-empty sequences: seq-mean-token-sum
    of each sequence's sum, seq-mean-token-mean of its mean, and seq-mean-token-sum-norm of its sum divided by ``scale``
    (default L; Dr. GRPO, arXiv 2503.20783). Values outside the mask may be anything. Raises `UserError` for an unknown
    mode.
    """
    mask = mask.bool()
    weights = token_weights(mask, mode, scale=scale)[mask].to(values.dtype)
    total = normaliser(mode, float(mask.sum()), float(mask.any(-1).sum()))
    return (weights * values[mask]).sum() / max(total, 1.0)


def kl_penalty(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) per token, in the shape of ``logp``. Below, d = logp - ref_logp.

    k1 or kl: d. abs: |d|. k2 or mse: d^2/2. k3 or low_var_kl: exp(-d) + d - 1 with d in +-20 and the result in +-10
    (Schulman, "Approximating KL divergence"). A kind with a trailing +, such as k3+, has the value of the kind without
    it and the gradient of k2, which is unbiased. Raises `UserError` for an unknown kind.
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
    raise UserError(f"loss.kl: unknown value {kind!r}{nearest(kind, KL_KINDS, list_all=True)}")


# --- the losses -----------------------------------------------------------------------------------
@policy_loss("ppo")
def ppo(tokens: Tokens, settings: LossSettings) -> TokenLosses:
    """max(-A u, -A clip(u, 1-low, 1+high)), at most -A c if A < 0 (arXiv 1707.06347, 1912.09729, 2503.14476).

    u is the ratio. With a recomputed (proximal) ``old_logp`` and a correction this is decoupled PPO (arXiv 2110.00641).
    """
    return clipped(tokens.ratio, tokens.advantages, settings.clip_low, settings.clip_high, settings.dual_clip)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> TokenLosses:
    """Compute the clipped loss of T tokens; ``ratio`` and ``advantages`` float [T]."""
    values = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    negative = advantages < 0
    above, below = (advantages > 0) & (ratio > 1 + high), negative & (ratio < 1 - low)
    if dual is None:
        return TokenLosses(values, above, below)
    bound = -advantages * dual
    exceeding = negative & (values > bound)
    return TokenLosses(torch.where(exceeding, bound, values), above, below, exceeding)


def mean_log_ratio(tokens: Tokens, settings: LossSettings) -> Tensor:
    """float [T]: mean of log pi / pi_old over each token's sequence."""
    return tokens.sequence_mean(tokens.logp - tokens.old_logp)


@policy_loss("gspo", scope="sequence", precompute=mean_log_ratio, aggregation="seq-mean-token-mean")
def gspo(tokens: Tokens, settings: LossSettings) -> TokenLosses:
    """PPO's clip of a sequence's geometric-mean ratio, whose gradient flows through each token (arXiv 2507.18071)."""
    assert tokens.precomputed is not None
    # The difference, exactly 0, is taken first: adding logp to a small mean would lose digits of the mean.
    log_ratio = tokens.precomputed + (tokens.logp - tokens.logp.detach())
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return clipped(ratio, tokens.advantages, settings.clip_low, settings.clip_high)


@policy_loss("cispo")
def cispo(tokens: Tokens, settings: LossSettings) -> TokenLosses:
    """-clip(ratio) A log pi, ratio without gradient; a clipped token still has a gradient (arXiv 2506.13585)."""
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    ratio = tokens.ratio.detach()
    values = -ratio.clamp(low, high) * tokens.advantages * tokens.logp
    return TokenLosses(values, ratio > high, ratio < low)


@policy_loss("reinforce", ratio=False)
def reinforce(tokens: Tokens, settings: LossSettings) -> Tensor:
    """-A log pi (Williams 1992). A correction multiplies the value by the capped pi / pi_behaviour."""
    return -tokens.advantages * tokens.logp


@policy_loss("gpg", ratio=False)
def gpg(tokens: Tokens, settings: LossSettings) -> Tensor:
    """-A log pi, the loss of "group policy gradient", meant for the estimator ``gpg`` (arXiv 2504.02546)."""
    return -tokens.advantages * tokens.logp


# --- losses that restrain tokens with a high covariance of log-prob and advantage -----------------
def covariance(tokens: Tokens) -> Tensor:
    """float [T]: (A - mean A) (log pi - mean log pi); a high covariance lowers the entropy.

    The means are over fresh tokens. Replayed tokens get -inf.
    """
    fresh = ~tokens.off_policy
    count = fresh.sum()

    def centred(values: Tensor) -> Tensor:
        return values - torch.where(fresh, values, 0.0).sum() / count

    values = centred(tokens.advantages) * centred(tokens.logp.detach())
    return torch.where(fresh, values, -torch.inf)


def clip_cov_choice(
    tokens: Tokens, settings: LossSettings, share: float = 2e-4, low: float = 1.0, high: float = 5.0
) -> Tensor:
    """Return bool [T]: tokens drawn from the unclipped fresh tokens whose covariance is between ``low`` and ``high``.

    ``share`` of all fresh tokens are drawn, but at least one.
    """
    values = covariance(tokens)
    plain = clipped(tokens.ratio, tokens.advantages, settings.clip_low, settings.clip_high)
    candidates = (values > low) & (values < high)
    for flag in (plain.clipped_high, plain.clipped_low):
        if flag is not None:
            candidates &= ~flag
    # A token's random number is a hash of its values, so that the choice does not depend on the order of tokens.
    seed = tokens.old_logp.double() * 12.9898 + tokens.advantages.double() * 78.233 + tokens.sequence * 37.719
    draw = (seed.sin() * 43758.5453).frac().abs()
    return _highest(torch.where(candidates, draw, -torch.inf), _count(tokens, share))


@policy_loss("clip_cov", scope="update", precompute=clip_cov_choice)
def clip_cov(tokens: Tokens, settings: LossSettings) -> TokenLosses:
    """PPO without the gradient of a few tokens of high covariance (arXiv 2505.22617).

    Options: ``share`` of an update's tokens that get no gradient; ``low`` and ``high``, bounds of their covariance.
    """
    assert tokens.precomputed is not None
    plain = clipped(tokens.ratio, tokens.advantages, settings.clip_low, settings.clip_high)
    return plain._replace(values=torch.where(tokens.precomputed, 0.0, plain.values))


def kl_cov_choice(tokens: Tokens, settings: LossSettings, share: float = 2e-4) -> Tensor:
    """Return bool [T]: the ``share`` of the fresh tokens (at least one) with the highest covariance."""
    return _highest(covariance(tokens), _count(tokens, share))


@policy_loss("kl_cov", scope="update", precompute=kl_cov_choice)
def kl_cov(tokens: Tokens, settings: LossSettings, coefficient: float = 1.0) -> TokenLosses:
    """-A u, not clipped, plus a penalty |log u| on the tokens of highest covariance (arXiv 2505.22617).

    Options: ``share`` of an update's tokens that get the penalty; ``coefficient`` of the penalty.
    """
    assert tokens.precomputed is not None
    penalty = coefficient * tokens.log_ratio.abs()
    return TokenLosses(-tokens.advantages * tokens.ratio + torch.where(tokens.precomputed, penalty, 0.0))


def _count(tokens: Tokens, share: float) -> int:
    return max(1, int(share * int((~tokens.off_policy).sum())))


def _highest(values: Tensor, count: int) -> Tensor:
    """Return bool [T]: the ``count`` highest of ``values`` [T], no more even if values tie; -inf is never chosen."""
    chosen = torch.zeros_like(values, dtype=torch.bool)
    chosen[values.topk(min(count, values.numel())).indices] = True
    return chosen & (values > -torch.inf)


# --- replayed tokens ------------------------------------------------------------------------------
def replayed_loss(tokens: Tokens, settings: LossSettings) -> TokenLosses:
    """Compute the loss of replayed tokens. It does not depend on the policy loss chosen for fresh tokens.

    ``old_logp`` holds the recorded log-probs. `replay_mode` chooses the loss:

    * "clip": PPO with a separate upper bound, `replay_clip_high`.
    * "shape": -A w / (w + beta), where w is the ratio, without clipping (LUFFY, arXiv 2504.14945). Its gradient is that
      of -A log pi times beta w / (w + beta)^2, which is 0.083 at w = 1 and beta = 0.1.
    """
    current = settings.replay_importance == "current"
    log_ratio = tokens.logp - tokens.logp.detach() if current else tokens.log_ratio
    if settings.replay_mode == "shape":
        # w / (w + beta) as a sigmoid, whose gradient stays accurate where w is large
        result = TokenLosses(-tokens.advantages * (log_ratio - log(settings.replay_shape)).sigmoid())
    else:
        ratio = log_ratio.exp() if current else tokens.ratio
        result = clipped(ratio, tokens.advantages, settings.clip_low, settings.replay_clip_high, settings.dual_clip)
    return result._replace(values=settings.replay_coefficient * result.values)
