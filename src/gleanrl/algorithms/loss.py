"""The loss of an update: policy loss, importance correction, KL, entropy bonus and aggregation, as pure functions.

`objective` computes the loss of each token, all terms included, for a learner. `padded_policy_loss` computes the policy
loss of padded tensors, for the training loop of another library. To add a policy loss, decorate a function of `Tokens`
and settings with `@policy_loss`, and set ``loss.name = "file.py:function"`` (for a loss in this file, the name given to
the decorator). The policy loss applies to fresh tokens only. The loss of replayed tokens is chosen in the same way,
with the decorator `@replay_loss` and the setting ``loss.replay_mode``.

The losses work on a flat list of trained tokens, so that padding, micro-batches and context tokens cannot change a
result. The loss of an update is ``sum(weights * values) / normaliser``, where ``values`` are the tokens' losses. The
weights and the normaliser do not depend on how the update's tokens are cut into chunks and micro-batches, so the
gradient does not depend on it either.

The loss of a token may depend on other tokens (for gspo on its sequence, for clip_cov and kl_cov on the whole update).
A loss declares the tokens that it depends on as its ``scope``. Its ``precompute`` function receives all tokens of the
scope, without gradient, and the loss receives the result.

In formulas, A is the advantage, pi the probability of a token under the policy in training, pi_old the probability in
the denominator of the ratio u = pi / pi_old, and pi_behaviour the probability recorded at sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from inspect import Parameter, signature
from itertools import accumulate, pairwise
from math import log
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
from pydantic import Field
from torch import Tensor

from gleanrl.algorithms.loss_statistics import Statistics, measure
from gleanrl.config.settings import LossSettings
from gleanrl.utils.errors import UserError
from gleanrl.utils.registry import Registry, check_values
from gleanrl.utils.text import nearest

LossConfig = LossSettings
"""The settings of a loss, as the functions of this module take them."""

LOG_RATIO_LIMIT = 20.0  # bound of |log ratio|; exp(20) = 5e8 is far beyond every clip and far within float32's range
K3_LIMIT = 10.0  # bound of the k3 estimate of the KL
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
Scope = Literal["token", "sequence", "update"]
_Share = Annotated[float, Field(gt=0, le=1)]


# --- the interface of a policy loss ---
@dataclass(frozen=True)
class Tokens:
    """A flat list of T trained tokens, in any order, without padding and context tokens."""

    logp: Tensor
    """float [T]: log-probs under the policy in training; they carry the gradient."""
    old_logp: Tensor
    """float [T]: log-probs in the denominator of the probability ratio."""
    advantages: Tensor
    """float [T]: advantage of each token."""
    sequence: Tensor
    """int64 [T]: index of the sequence (trajectory) that a token belongs to."""
    off_policy: Tensor
    """bool [T]: True if replayed, or if sampled with guidance texts that were removed afterwards."""
    behaviour_logp: Tensor | None = None
    """float [T]: log-probs recorded at sampling; None if ``old_logp`` holds them."""
    precomputed: Tensor | None = None
    """[T]: result of the ``precompute`` of the loss that receives these tokens."""

    def take(self, index: Tensor | slice) -> Tokens:
        """Return those of these tokens that an index tensor, a bool mask [T] or a slice selects."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        some: dict[str, Any] = {name: None if value is None else value[index] for name, value in values.items()}
        return Tokens(**some)

    @cached_property
    def log_ratio(self) -> Tensor:
        """float [T]: log of `ratio`, clamped to ±20."""
        return (self.logp - self.old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @cached_property
    def ratio(self) -> Tensor:
        """float [T]: probability of each token now, divided by its probability under ``old_logp``."""
        return self.log_ratio.exp()

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Return float [T]: for each token, the sum of ``values`` [T] over these tokens that are in its sequence."""
        if not values.numel():
            return values
        totals = values.new_zeros(int(self.sequence.max()) + 1).index_add_(0, self.sequence, values)
        return totals[self.sequence]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return float [T]: for each token, the mean of ``values`` [T] over these tokens that are in its sequence."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values))


class TokenLosses(NamedTuple):
    """The result of a policy loss for T tokens. A ``clipped_...`` field that is None means that no token is clipped."""

    values: Tensor
    """float [T]: loss of each token, to be minimised."""
    clipped_high: Tensor | None = None
    """bool [T]: whether the upper bound of the ratio determines the value."""
    clipped_low: Tensor | None = None
    """bool [T]: whether the lower bound of the ratio determines the value."""
    clipped_dual: Tensor | None = None
    """bool [T]: whether the dual-clip bound (for A < 0) determines the value."""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss: its name, its function and its properties. The parameters of `policy_loss` describe the fields."""

    name: str
    function: Callable[..., TokenLosses | Tensor]
    scope: Scope
    precompute: Callable[..., Tensor] | None
    aggregation: str
    ratio: bool
    zero_without_advantage: bool

    def __call__(self, tokens: Tokens, settings: LossSettings) -> TokenLosses:
        result = self.function(tokens, settings, **_taken(self._options[0], settings.options))
        return _checked(f"loss.name {self.name!r}", result, tokens)

    def precomputed(self, tokens: Tokens, settings: LossSettings) -> Tensor | None:
        """Return [T], the result of ``precompute`` for all tokens of the scope; None if the loss has no precompute."""
        if self.precompute is None:
            return None
        found = self.precompute(tokens, settings, **_taken(self._options[1], settings.options))
        return _checked_precompute(f"loss.name {self.name!r}", found, tokens)

    @cached_property
    def options(self) -> frozenset[str] | None:
        """Names of the options that the loss or its precompute accepts; None if one of them accepts any name."""
        ours, precomputes = self._options
        return None if ours is None or precomputes is None else ours | precomputes

    @cached_property
    def required(self) -> list[str]:
        """Names of the options that must be given, because the loss or its precompute has no default for them."""
        functions = [function for function in (self.function, self.precompute) if function is not None]
        parameters = [p for function in functions for p in list(signature(function).parameters.values())[2:]]
        variadic = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
        return [p.name for p in parameters if p.default is Parameter.empty and p.kind not in variadic]

    @cached_property
    def _options(self) -> tuple[frozenset[str] | None, frozenset[str] | None]:
        return _options_of(self.function), frozenset() if self.precompute is None else _options_of(self.precompute)


def _checked(name: str, result: Any, tokens: Tokens) -> TokenLosses:
    """Return the result of a loss function as `TokenLosses`.

    Raises `UserError` unless it has one value for each of ``tokens``, with a gradient if their log-probs have one.
    """
    losses = result if isinstance(result, TokenLosses) else TokenLosses(result)
    if not isinstance(losses.values, Tensor):
        raise UserError(f"{name} returned {type(losses.values).__name__}, not a tensor or TokenLosses")
    for field, value in losses._asdict().items():
        if value is not None and value.shape != tokens.logp.shape:
            wanted = list(tokens.logp.shape)
            raise UserError(f"{name} returned {field} of shape {list(value.shape)}, not one for each token: {wanted}")
    if torch.is_grad_enabled() and tokens.logp.requires_grad and not losses.values.requires_grad:
        raise UserError(f"{name} returned values without a gradient, so nothing would be learned; use tokens.logp")
    return losses


def _checked_precompute(name: str, result: Any, tokens: Tokens) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != tokens.logp.shape:
        found = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise UserError(f"{name}: precompute returned {found}, not one value for each token: {list(tokens.logp.shape)}")
    return result


def _options_of(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of the parameters after tokens and settings; None if ``**options`` accepts any name."""
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
    zero_without_advantage: bool = False,
) -> Callable[[Callable[..., TokenLosses | Tensor]], PolicyLoss]:
    """Return a decorator that registers ``function(tokens, settings, **options)`` as a policy loss under ``name``.

    The function returns `TokenLosses`, or only the tokens' losses float [T]. It and ``precompute`` each receive those
    of ``loss.options`` that they have as a parameter.

    Args:
        scope: the tokens that the loss of one token depends on: "token" (itself), "sequence" (its whole sequence) or
            "update" (all tokens of an update).
        precompute: ``precompute(tokens, settings, **options) -> [T]``, called without gradient with all tokens of the
            scope. The loss finds the result in ``tokens.precomputed``. None for the scope "token".
        aggregation: aggregation mode of the loss if ``loss.aggregation`` is "auto".
        ratio: whether the loss contains the ratio pi / pi_old. An importance correction multiplies such a loss by
            pi_old / pi_behaviour, and a loss without the ratio by pi / pi_behaviour.
        zero_without_advantage: whether the loss of a token with advantage 0 is 0 and has no gradient. A learner then
            skips trajectories without an advantage, which saves their passes.
    """
    _check_scope(name, scope, precompute)
    return lambda function: POLICY_LOSSES.add(
        PolicyLoss(name, function, scope, precompute, aggregation, ratio, zero_without_advantage)
    )


def _check_scope(name: str, scope: Scope, precompute: Callable[..., Tensor] | None) -> None:
    if scope not in get_args(Scope):
        raise ValueError(f"loss {name!r}: unknown scope {scope!r}{nearest(scope, get_args(Scope), list_all=True)}")
    if (scope == "token") != (precompute is None):
        raise ValueError(f"loss {name!r}: precompute is needed for the scopes sequence and update, and only for them")


def find(settings: LossSettings) -> PolicyLoss:
    """Return the policy loss named in ``settings``.

    Raises `UserError` if the name or an option is unknown, an option has a value that the loss does not take, or an
    option without a default is missing.
    """
    loss = POLICY_LOSSES.get(settings.name)
    for option in loss.required:
        if option not in settings.options:
            raise UserError(f"loss.options.{option}: the policy loss {loss.name!r} has no default for it; set it")
    if settings.options and loss.options is not None:
        for option in settings.options.keys() - loss.options:
            hint = nearest(option, loss.options, list_all=True)
            raise UserError(f"loss.options.{option}: the policy loss {loss.name!r} has no such option{hint}")
    for function in filter(None, (loss.function, loss.precompute)):
        check_values("loss.options", function, settings.options)
    return loss


# --- the interface of a loss of replayed tokens ---
@dataclass(frozen=True)
class ReplayLoss:
    """A loss of replayed tokens: its name, its function and its scope. `replay_loss` describes the fields."""

    name: str
    function: Callable[[Tokens, LossSettings], TokenLosses | Tensor]
    scope: Scope
    precompute: Callable[[Tokens, LossSettings], Tensor] | None
    zero_without_advantage: bool

    def __call__(self, tokens: Tokens, settings: LossSettings) -> TokenLosses:
        return _checked(f"loss.replay_mode {self.name!r}", self.function(tokens, settings), tokens)


REPLAY_LOSSES: Registry[ReplayLoss] = Registry(
    "loss.replay_mode", ReplayLoss, "@gleanrl.algorithms.loss.replay_loss(...)"
)


def replay_loss(
    name: str,
    *,
    scope: Scope = "token",
    precompute: Callable[[Tokens, LossSettings], Tensor] | None = None,
    zero_without_advantage: bool = False,
) -> Callable[[Callable[[Tokens, LossSettings], TokenLosses | Tensor]], ReplayLoss]:
    """Return a decorator that registers ``function(tokens, settings)`` as a loss of replayed tokens under ``name``.

    Unlike a policy loss, it has no options. The function receives the R replayed tokens only. Their ``old_logp`` holds
    the recorded log-probs, or the current ones with ``replay_importance = "current"``. It returns `TokenLosses`, or
    only the tokens' losses float [R]. They are multiplied by ``replay_coefficient`` afterwards.

    Args:
        scope: as in `policy_loss`, but of the replayed tokens only.
        precompute: ``precompute(tokens, settings) -> [R]``, as in `policy_loss`.
        zero_without_advantage: as in `policy_loss`.
    """
    _check_scope(name, scope, precompute)
    return lambda function: REPLAY_LOSSES.add(ReplayLoss(name, function, scope, precompute, zero_without_advantage))


# --- the whole loss of a token ---
class LossOutput(NamedTuple):
    """The aggregated loss of an update, and its metrics."""

    loss: Tensor  # scalar, carries the gradient
    metrics: dict[str, float]


class LossContext(NamedTuple):
    """What `precompute` computes from all tokens of the loss's scope, without gradient, for T of these tokens.

    Each field is a tensor of shape [T], or None if the loss does not need it.
    """

    precomputed: Tensor | None  # result of the policy loss's ``precompute``
    weight: Tensor | None  # float, factor of the importance correction on a token's loss; 0 = the token is left out
    kept: Tensor | None  # float, number of tokens of a token's sequence that the correction does not leave out
    length: Tensor | None  # float, number of tokens of a token's sequence
    replay_precomputed: Tensor | None = None  # result of the ``precompute`` of the loss of replayed tokens

    def take(self, index: Tensor | slice) -> LossContext:
        """Return the `LossContext` of those tokens that an index tensor, a bool mask [T] or a slice selects."""
        return LossContext(*(None if value is None else value[index] for value in self))

    def split(self, sizes: Sequence[int]) -> list[LossContext]:
        """Split this `LossContext` into those of consecutive tokens; ``sizes`` holds the number of tokens of each."""
        ends = list(accumulate(sizes, initial=0))
        return [self.take(slice(start, stop)) for start, stop in pairwise(ends)]


class Objective(NamedTuple):
    """The loss of each of T tokens with all terms, before weights and normaliser are applied.

    A correction in mode "mask" leaves tokens out of the loss, and the denominator must be reduced by them.
    """

    values: Tensor  # float [T], policy loss + KL term - entropy bonus
    statistics: Statistics
    left_out_tokens: Tensor  # float scalar: number of tokens that the correction leaves out
    # float scalar: number of sequences of which all tokens are left out, or 0 if the aggregation mode does not count
    # sequences. Each token of such a sequence adds 1 / length, so that the results of micro-batches can be added.
    left_out_sequences: Tensor
    # float [T], or None for 1: the correction's factor of other terms of a token, such as the loss of a critic. It is 0
    # for a token that is left out.
    factor: Tensor | None


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
    """Compute the loss of each token. KL term, entropy bonus and correction apply to fresh tokens only.

    Args:
        kl_coefficient: factor of the KL term. By default that of ``config``, or 0 if the KL is part of the reward.
        entropy: float [T], entropy of the policy at each token, with gradient if the entropy bonus has a coefficient.
        ref_logp: float [T], log-probs under the reference model.
        context: the result of `precompute` for these tokens. Needed if they are not all tokens of the loss's scope.
        current_logp: float [T], the trainer's log-probs, for the mismatch metrics. Given only if ``old_logp`` holds the
            log-probs recorded at sampling and the weights have not changed since the start of the step.

    Raises:
        UserError: if the loss of fresh or of replayed tokens is unknown.
        ValueError: if a term has a coefficient but its input is missing.
    """
    loss = find(config)
    fresh = ~tokens.off_policy
    # Micro-batches with observation tokens may have no trained token, and a correction may leave out all tokens. A loss
    # and its precompute need not handle that: a maximum over no tokens, for example, is an error.
    trained = tokens.logp.numel() > 0
    if context is None:
        context = precompute(tokens, config) if trained else LossContext(None, None, None, None)
    tokens = replace(tokens, precomputed=context.precomputed)
    trained = trained and (context.weight is None or bool(context.weight.any()))
    policy = loss(tokens, config) if trained else TokenLosses(0.0 * tokens.logp)
    if bool(tokens.off_policy.any()):
        replayed = replace(tokens, precomputed=context.replay_precomputed).take(tokens.off_policy)
        policy = _merge(tokens.off_policy, policy, replayed_loss(replayed, config))
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
    factor: Tensor | None = None
    if context.weight is not None:
        included = context.weight > 0
        values, terms = torch.where(included, context.weight * values, 0.0), torch.where(included, terms, 0.0)
        factor = included.to(values.dtype)
        left_out_tokens = (~included).sum().to(values.dtype)
        if context.kept is not None and context.length is not None:
            left_out_sequences = torch.where(context.kept == 0, 1 / context.length, 0.0).sum()
            if aggregation_of(config) == "seq-mean-token-mean":  # divide by the kept tokens, not by all of the sequence
                scale = context.length / context.kept.clamp(min=1)
                values, terms, factor = scale * values, scale * terms, scale * factor
    with torch.no_grad():
        # The mismatch is the trainer's log-probs minus those recorded at sampling. For fresh tokens, the trainer's
        # log-probs are those before the update (the proximal ones); for replayed tokens, the current ones.
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
    return Objective(values + terms, statistics, left_out_tokens, left_out_sequences, factor)


def _merge(off_policy: Tensor, losses: TokenLosses, of_replayed: TokenLosses) -> TokenLosses:
    """Return ``losses`` with those of the R replayed tokens, which ``off_policy`` bool [T] marks, replaced.

    A ``clipped_...`` field that is None counts as False everywhere. If the dtypes differ, the result has the wider one.
    """
    merged = []
    for every, replayed in zip(losses, of_replayed, strict=True):
        every = torch.zeros_like(off_policy) if every is None else every
        replayed = torch.zeros_like(off_policy[off_policy]) if replayed is None else replayed
        dtype = torch.promote_types(every.dtype, replayed.dtype)
        merged.append(every.to(dtype).masked_scatter(off_policy, replayed.to(dtype)))
    return TokenLosses(*merged)


# --- quantities that depend on several tokens ----------------------------------------------------
def scope_of(config: LossSettings) -> Scope:
    """Return which tokens `precompute` must get in one call.

    "token": any tokens; "sequence": all tokens of each sequence; "update": all tokens of the update.
    """
    scopes = {find(config).scope, REPLAY_LOSSES.get(config.replay_mode).scope}
    if config.correction != "none" and (_counts_sequences(config) or config.correction_level != "token"):
        scopes.add("sequence")
    return "update" if "update" in scopes else "sequence" if "sequence" in scopes else "token"


def _counts_sequences(config: LossSettings) -> bool:
    """Return whether the correction leaves out tokens and the aggregation mode takes means over sequences."""
    return config.correction == "mask" and aggregation_of(config) != "token-mean"


@torch.no_grad()
def precompute(tokens: Tokens, config: LossSettings) -> LossContext:
    """Compute the `LossContext` of ``tokens``, without gradient. They must be all tokens of the loss's scope."""
    loss = find(config)
    tokens = replace(tokens, logp=tokens.logp.detach())
    of_replayed, replayed = REPLAY_LOSSES.get(config.replay_mode), None
    if of_replayed.precompute is not None and bool(tokens.off_policy.any()):
        seen = _with_ratio(tokens.take(tokens.off_policy), config)
        found = _checked_precompute(
            f"loss.replay_mode {of_replayed.name!r}", of_replayed.precompute(seen, config), seen
        )
        replayed = found.new_zeros(tokens.logp.shape).masked_scatter(tokens.off_policy, found)
    if config.correction == "none":
        return LossContext(loss.precomputed(tokens, config), None, None, None, replayed)
    weight = correction_weight(tokens, config, ratio=loss.ratio)
    included = weight > 0
    precomputed = kept = length = None
    # Tokens that are left out count as untrained. If all are, neither this nor the loss is called (`objective`).
    seen = loss.precomputed(tokens.take(included), config) if bool(included.any()) else None
    if seen is not None:
        precomputed = seen.new_zeros(weight.shape).masked_scatter(included, seen)
    if _counts_sequences(config):
        kept, length = (tokens.sequence_sum(x.to(weight.dtype)) for x in (included, torch.ones_like(weight)))
    return LossContext(precomputed, weight, kept, length, replayed)


def correction_weight(tokens: Tokens, config: LossSettings, *, ratio: bool = True) -> Tensor:
    """Return float [T]: the importance correction, a factor on each token's loss; 1 for replayed tokens.

    It corrects for the difference between the policy that sampled a token and the one that the loss assumes.

    The factor is computed from w, which is pi_old / pi_behaviour if the loss contains a probability ratio (``ratio``),
    and pi / pi_behaviour otherwise. ``correction_level`` chooses which w is used: "token" that of the token, "sequence"
    the product over its sequence, "geometric" the geometric mean over its sequence. With the correction "truncate" the
    factor is min(w, cap) (truncated importance sampling). With "mask" it is w, or 0 if w is outside [floor, cap]
    (decoupled PPO of AReaL, arXiv 2505.24298).
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
    """Approximate the log-probs under the weights before the update (the proximal policy), without a forward pass.

    The result, float [T] without gradient, lies on the line from ``behaviour_logp`` (recorded at sampling) to ``logp``
    (current), float [T] each. ``staleness`` int or float [T] is the number of steps d between the weights that sampled
    a token and those before the update. The result lies d / (d + 1) of the way along the line; at d = 0 it is
    ``behaviour_logp`` (arXiv 2512.06547; AReaL's "loglinear").
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
    """Compute the aggregated policy loss of N sequences with L positions each, and its metrics.

    The loss has no terms for KL and entropy; add them with `kl_penalty` and `aggregate`. Positions outside the mask may
    hold any value, also NaN. Inputs of a lower precision than float32 are computed in float32.

    Args:
        logp: float [N, L], log-probs under the policy in training, with gradient.
        old_logp: float [N, L], log-probs in the denominator of the probability ratio.
        advantages: float [N, L].
        mask: bool or 0/1 [N, L], True at trained tokens.
        off_policy: bool [N, L], [N, 1] or [N], True for replayed tokens; by default no token is replayed.
        config: settings of the loss.
        behaviour_logp: float [N, L], log-probs recorded at sampling, for the correction and the mismatch metrics. May
            be left out if ``old_logp`` holds them.

    Raises:
        UserError: if the loss or the aggregation mode is unknown.
    """
    mask = mask.bool()
    if off_policy is None:
        off_policy = torch.zeros_like(mask)
    elif off_policy.ndim == 1:
        off_policy = off_policy[:, None]

    def trained(values: Tensor) -> Tensor:
        return values[mask].to(torch.promote_types(values.dtype, torch.float32))

    tokens = Tokens(
        logp=trained(logp),
        old_logp=trained(old_logp),
        advantages=trained(advantages),
        sequence=mask.nonzero()[:, 0],
        off_policy=off_policy.bool().expand_as(mask)[mask],
        behaviour_logp=None if behaviour_logp is None else trained(behaviour_logp),
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

    ``values`` carry the gradient, ``old_values`` are the predictions before the update, and ``returns`` the targets;
    float [T] each. The clipped value lies within ``clip`` of the old value; None turns clipping off. A value that is
    further from its old value gets no gradient if the clipped value has the larger error (PPO, arXiv 1707.06347).
    """
    error = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return error / 2


def aggregation_of(config: LossSettings) -> str:
    """Return the aggregation mode of the settings; for "auto", the mode that the policy loss declares."""
    return find(config).aggregation if config.aggregation == "auto" else config.aggregation


def token_weights(mask: Tensor, mode: str, *, scale: float | None = None) -> Tensor:
    """Return float32 [N, L]: the weight of each token under aggregation ``mode``, 0 outside ``mask`` bool [N, L].

    ``scale`` is the divisor of the mode seq-mean-token-sum-norm, by default L. Raises `UserError` if the mode is
    unknown.
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
    """Return the divisor of an update's weighted sum of losses.

    It is ``tokens``, the update's number of trained tokens, in the mode token-mean, and ``sequences``, its number of
    sequences with a trained token, in the other modes.
    """
    return tokens if mode == "token-mean" else sequences


def aggregate(values: Tensor, mask: Tensor, mode: str, *, scale: float | None = None) -> Tensor:
    """Aggregate ``values`` float [N, L] at the trained tokens, which ``mask`` [N, L] marks, to a scalar.

    The mode token-mean takes the mean over all trained tokens. The other modes compute one number for each sequence
    that has a trained token, and take the mean of these numbers. The number is the sum over the sequence's trained
    tokens (seq-mean-token-sum), their mean (seq-mean-token-mean), or their sum divided by ``scale``
    (seq-mean-token-sum-norm; by default L; Dr. GRPO, arXiv 2503.20783). The result is 0 if no token is trained. Values
    outside the mask may be anything. Raises `UserError` if the mode is unknown.
    """
    mask = mask.bool()
    weights = token_weights(mask, mode, scale=scale)[mask]  # float32, in which a lower precision is summed
    total = normaliser(mode, float(mask.sum()), float(mask.any(-1).sum()))
    return (weights * values[mask]).sum() / max(total, 1.0)


def kl_penalty(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) for each token, in the shape of ``logp``.

    With d = logp - ref_logp, the kinds of estimates are (Schulman, "Approximating KL divergence"):

    * "k1" or "kl": d.
    * "abs": |d|.
    * "k2" or "mse": d^2 / 2.
    * "k3" or "low_var_kl": exp(-d) + d - 1, with d clamped to [-20, 20] and the result to [-10, 10].
    * with an appended "+", such as "k3+": the value of that kind with the gradient of k2, which is unbiased.

    Raises `UserError` if the kind is unknown.
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
@policy_loss("ppo", zero_without_advantage=True)
def ppo(tokens: Tokens, settings: LossSettings) -> TokenLosses:
    """Compute the clipped loss of PPO, with a lower and an upper bound of the ratio and a dual clip; see `clipped`.

    Sources: PPO (arXiv 1707.06347), dual clip (arXiv 1912.09729), two bounds (DAPO, arXiv 2503.14476). With recomputed
    log-probs as ``old_logp`` and a correction, this is decoupled PPO (arXiv 2110.00641).
    """
    return clipped(tokens.ratio, tokens.advantages, settings.clip_low, settings.clip_high, settings.dual_clip)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> TokenLosses:
    """Compute the clipped loss of T tokens from ``ratio`` and ``advantages``, float [T] each.

    The loss is max(-A u, -A clip(u, 1 - low, 1 + high)), where A is the advantage and u the ratio. If ``dual`` is given
    and A < 0, the loss is at most -A * dual.
    """
    values = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    negative = advantages < 0
    above, below = (advantages > 0) & (ratio > 1 + high), negative & (ratio < 1 - low)
    if dual is None:
        return TokenLosses(values, above, below)
    bound = -advantages * dual
    exceeding = negative & (values > bound)
    return TokenLosses(torch.where(exceeding, bound, values), above, below, exceeding)


def mean_log_ratio(tokens: Tokens, settings: LossSettings) -> Tensor:
    """Return float [T]: for each token, the mean of log(pi / pi_old) over its sequence."""
    return tokens.sequence_mean(tokens.logp - tokens.old_logp)


@policy_loss(
    "gspo",
    scope="sequence",
    precompute=mean_log_ratio,
    aggregation="seq-mean-token-mean",
    zero_without_advantage=True,
)
def gspo(tokens: Tokens, settings: LossSettings) -> TokenLosses:
    """Compute PPO's clipped loss with one ratio per sequence, the geometric mean of its tokens' ratios (GSPO).

    The gradient of the ratio flows through each token's own log-prob (arXiv 2507.18071).
    """
    assert tokens.precomputed is not None
    # logp - logp.detach() is exactly 0 and only carries the gradient. It is computed first, because adding logp to the
    # small mean would lose digits of the mean.
    log_ratio = tokens.precomputed + (tokens.logp - tokens.logp.detach())
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return clipped(ratio, tokens.advantages, settings.clip_low, settings.clip_high)


@policy_loss("cispo", zero_without_advantage=True)
def cispo(tokens: Tokens, settings: LossSettings) -> TokenLosses:
    """Compute -clip(u, 1 - low, 1 + high) * A * log pi, with no gradient through the ratio u (arXiv 2506.13585).

    Unlike in PPO, a token whose ratio is clipped still has a gradient.
    """
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    ratio = tokens.ratio.detach()
    values = -ratio.clamp(low, high) * tokens.advantages * tokens.logp
    return TokenLosses(values, ratio > high, ratio < low)


@policy_loss("reinforce", ratio=False, zero_without_advantage=True)
def reinforce(tokens: Tokens, settings: LossSettings) -> Tensor:
    """Compute -A * log pi, the loss of REINFORCE (Williams 1992)."""
    return -tokens.advantages * tokens.logp


@policy_loss("gpg", ratio=False, zero_without_advantage=True)
def gpg(tokens: Tokens, settings: LossSettings) -> Tensor:
    """Compute -A * log pi, the loss of group policy gradient, meant for the estimator ``gpg`` (arXiv 2504.02546)."""
    return -tokens.advantages * tokens.logp


# --- losses that limit the update of tokens with a high covariance of log-prob and advantage ------
def covariance(tokens: Tokens) -> Tensor:
    """Return float [T]: each token's term (A - mean A) * (log pi - mean log pi) of a covariance.

    Training on tokens with a high value lowers the entropy of the policy. The means are over fresh tokens. Replayed
    tokens get -inf.
    """
    fresh = ~tokens.off_policy
    count = fresh.sum()

    def centred(values: Tensor) -> Tensor:
        return values - torch.where(fresh, values, 0.0).sum() / count

    values = centred(tokens.advantages) * centred(tokens.logp.detach())
    return torch.where(fresh, values, -torch.inf)


def clip_cov_choice(
    tokens: Tokens, settings: LossSettings, share: _Share = 2e-4, low: float = 1.0, high: float = 5.0
) -> Tensor:
    """Return bool [T]: True for tokens that are drawn at random to get no gradient.

    They are drawn from the fresh tokens that are not clipped and whose `covariance` is between ``low`` and ``high``.
    Their number is ``share`` times the number of all fresh tokens, at least one, or fewer if too few tokens qualify.
    """
    values = covariance(tokens)
    plain = clipped(tokens.ratio, tokens.advantages, settings.clip_low, settings.clip_high)
    candidates = (values > low) & (values < high)
    for flag in (plain.clipped_high, plain.clipped_low):
        if flag is not None:
            candidates &= ~flag
    # The random number of a token is a hash of its values, so that the choice does not depend on the order of tokens.
    seed = tokens.old_logp.double() * 12.9898 + tokens.advantages.double() * 78.233 + tokens.sequence * 37.719
    draw = (seed.sin() * 43758.5453).frac().abs()
    return _highest(torch.where(candidates, draw, -torch.inf), _count(tokens, share))


@policy_loss("clip_cov", scope="update", precompute=clip_cov_choice, zero_without_advantage=True)
def clip_cov(tokens: Tokens, settings: LossSettings) -> TokenLosses:
    """Compute PPO's clipped loss, but without gradient for a few tokens of high covariance (arXiv 2505.22617).

    Options, which `clip_cov_choice` takes: ``share``, the fraction of an update's fresh tokens that get no gradient;
    ``low`` and ``high``, the bounds of their covariance.
    """
    assert tokens.precomputed is not None
    plain = clipped(tokens.ratio, tokens.advantages, settings.clip_low, settings.clip_high)
    return plain._replace(values=torch.where(tokens.precomputed, 0.0, plain.values))


def kl_cov_choice(tokens: Tokens, settings: LossSettings, share: _Share = 2e-4) -> Tensor:
    """Return bool [T]: True for the fraction ``share`` of the fresh tokens (at least one) with highest `covariance`."""
    return _highest(covariance(tokens), _count(tokens, share))


@policy_loss("kl_cov", scope="update", precompute=kl_cov_choice)
def kl_cov(tokens: Tokens, settings: LossSettings, coefficient: float = 1.0) -> TokenLosses:
    """Compute -A * u without clipping, plus a penalty on a few tokens of highest covariance (arXiv 2505.22617).

    The penalty is ``coefficient`` * |log u|. Options: ``coefficient``, and ``share``, the fraction of an update's fresh
    tokens that get the penalty, which `kl_cov_choice` takes.
    """
    assert tokens.precomputed is not None
    penalty = coefficient * tokens.log_ratio.abs()
    return TokenLosses(-tokens.advantages * tokens.ratio + torch.where(tokens.precomputed, penalty, 0.0))


def _count(tokens: Tokens, share: float) -> int:
    return max(1, int(share * int((~tokens.off_policy).sum())))


def _highest(values: Tensor, count: int) -> Tensor:
    """Return bool [T]: True for the ``count`` highest of ``values`` [T].

    If values tie, no more than ``count`` are chosen. -inf is never chosen.
    """
    chosen = torch.zeros_like(values, dtype=torch.bool)
    chosen[values.topk(min(count, values.numel())).indices] = True
    return chosen & (values > -torch.inf)


# --- replayed tokens ------------------------------------------------------------------------------
@replay_loss("clip", zero_without_advantage=True)
def replay_clip(tokens: Tokens, settings: LossSettings) -> TokenLosses:
    """Compute PPO's clipped loss with the upper bound ``replay_clip_high``; see `clipped`."""
    return clipped(tokens.ratio, tokens.advantages, settings.clip_low, settings.replay_clip_high, settings.dual_clip)


@replay_loss("shape", zero_without_advantage=True)
def replay_shape(tokens: Tokens, settings: LossSettings) -> Tensor:
    """Compute -A w / (w + beta), where w is the ratio and beta is ``replay_shape`` (LUFFY, arXiv 2504.14945).

    Its gradient is beta w / (w + beta)^2 times that of -A log pi; the factor is 0.083 at w = 1 and beta = 0.1.
    """
    # w / (w + beta) equals sigmoid(log w - log beta), whose gradient stays accurate where w is large.
    return -tokens.advantages * (tokens.log_ratio - log(settings.replay_shape)).sigmoid()


def replayed_loss(tokens: Tokens, settings: LossSettings) -> TokenLosses:
    """Compute the loss of R replayed tokens. It does not depend on the policy loss chosen for fresh tokens.

    ``old_logp`` must hold the recorded log-probs, and ``precomputed`` the result of the loss's ``precompute``.
    ``settings.replay_mode`` chooses the loss. With ``replay_importance = "current"`` the ratio is 1 and only carries
    the gradient.
    """
    result = REPLAY_LOSSES.get(settings.replay_mode)(_with_ratio(tokens, settings), settings)
    return result._replace(values=settings.replay_coefficient * result.values)


def _with_ratio(tokens: Tokens, settings: LossSettings) -> Tokens:
    """Return replayed tokens with the denominator of their ratio that ``replay_importance`` chooses."""
    return replace(tokens, old_logp=tokens.logp.detach()) if settings.replay_importance == "current" else tokens
