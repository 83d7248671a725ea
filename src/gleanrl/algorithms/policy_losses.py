"""Policy losses by name, each a function of a flat list of tokens: what one token contributes, to be minimised.

A loss sees trained tokens only, in any order, and answers one value for each. Most need nothing but the token itself.
Some need its whole sequence (gspo) or the whole update (clip_cov, kl_cov): these say so by their ``scope`` and get
what they ask for from their ``precompute``, which sees all those tokens. So the gradient of an update does not
depend on how it was cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from inspect import Parameter, signature
from math import log
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gleanrl.config.settings import LossSettings
from gleanrl.utils.errors import UserError
from gleanrl.utils.registry import Registry, suggestion

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: far outside every clip, far inside float32
Scope = Literal["token", "sequence", "update"]


@dataclass(frozen=True)
class Tokens:
    """T trained tokens, in any order: the rows of a padded batch, without padding and context."""

    logp: Tensor  # float [T], under the policy in training; carries the gradient
    old_logp: Tensor  # float [T], denominator of the ratio
    advantages: Tensor  # float [T]
    sequence: Tensor  # int64 [T], which sequence a token belongs to
    replayed: Tensor  # bool [T], from the experience pool
    behaviour_logp: Tensor | None = None  # float [T], as sampled, where it differs from old_logp
    precomputed: Tensor | None = None  # [T], what the precompute of the loss answered for each token

    def take(self, index: Tensor | slice) -> Tokens:
        """Some of these tokens, by their indices, a mask or a slice."""
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
        """float [T]: the sum of ``values`` [T] over each token's sequence, as far as it is among these tokens."""
        if not values.numel():
            return values
        totals = values.new_zeros(int(self.sequence.max()) + 1).index_add_(0, self.sequence, values)
        return totals[self.sequence]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """float [T]: the mean of ``values`` [T] over each token's sequence, as far as it is among these tokens."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values))


class Surrogate(NamedTuple):
    """What a policy loss answers for T tokens. A flag that is None is False everywhere."""

    values: Tensor  # float [T], to be minimised
    clipped_high: Tensor | None = None  # bool [T], the upper bound of the ratio decides the value
    clipped_low: Tensor | None = None  # bool [T], its lower bound does
    clipped_dual: Tensor | None = None  # bool [T], the bound on a negative advantage times a large ratio does


@dataclass(frozen=True)
class PolicyLoss:
    """A named policy loss and what it needs."""

    name: str
    function: Callable[..., Surrogate | Tensor]
    scope: Scope  # the tokens that one token's value depends on
    precompute: Callable[..., Tensor] | None  # (all tokens of the scope, settings, **options) -> [T], without gradient
    aggregation: str
    ratio: bool  # its values hold pi / pi_old, so that only pi_old / pi_behaviour is left to be corrected

    def __call__(self, tokens: Tokens, settings: LossSettings) -> Surrogate:
        result = self.function(tokens, settings, **_taken(self._options[0], settings.options))
        return result if isinstance(result, Surrogate) else Surrogate(result)

    def precomputed(self, tokens: Tokens, settings: LossSettings) -> Tensor | None:
        """[T], what the precompute answers for all tokens of the scope; None without one."""
        if self.precompute is None:
            return None
        return self.precompute(tokens, settings, **_taken(self._options[1], settings.options))

    @cached_property
    def options(self) -> frozenset[str] | None:
        """Names of the options that the loss or its precompute takes; None = any."""
        ours, precomputes = self._options
        return None if ours is None or precomputes is None else ours | precomputes

    @cached_property
    def _options(self) -> tuple[frozenset[str] | None, frozenset[str] | None]:
        return _options_of(self.function), frozenset() if self.precompute is None else _options_of(self.precompute)


def _options_of(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the parameters behind tokens and settings; None where ``**options`` takes any."""
    parameters = list(signature(function).parameters.values())[2:]
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _taken(names: frozenset[str] | None, options: dict[str, Any]) -> dict[str, Any]:
    return options if names is None else {name: value for name, value in options.items() if name in names}


POLICY_LOSSES: Registry[PolicyLoss] = Registry("loss.name", PolicyLoss, "@gleanrl.algorithms.loss.surrogate(...)")


def surrogate(
    name: str,
    *,
    scope: Scope = "token",
    precompute: Callable[..., Tensor] | None = None,
    aggregation: str = "token-mean",
    ratio: bool = True,
) -> Callable[[Callable[..., Surrogate | Tensor]], PolicyLoss]:
    """Decorator: make ``function(tokens, settings, **options) -> Surrogate`` or values float [T] a policy loss.

    Args:
        scope: what one token's value depends on: itself, its whole sequence, or all tokens of an update.
        precompute: ``precompute(tokens, settings, **options) -> [T]`` sees the whole scope without gradient; its result
            comes back as ``tokens.precomputed``. A loss of scope "token" has none. Each of the two gets those of
            ``loss.options`` that they have as a parameter.
        aggregation: used where ``loss.aggregation`` is "auto".
        ratio: False where the values hold no probability ratio; a correction then weighs them by pi / pi_behaviour.
    """
    if (scope == "token") != (precompute is None):
        raise ValueError(f"loss {name!r}: precompute is needed for the scopes sequence and update, and only for them")
    return lambda function: POLICY_LOSSES.add(PolicyLoss(name, function, scope, precompute, aggregation, ratio))


def find(settings: LossSettings) -> PolicyLoss:
    """The loss that ``settings`` names. Raises `UserError` for an unknown name, or an option that it does not take."""
    loss = POLICY_LOSSES.get(settings.name)
    if settings.options and loss.options is not None:
        for option in settings.options.keys() - loss.options:
            hint = suggestion(option, loss.options)
            raise UserError(f"loss.options.{option}: {loss.name!r} has no such option{hint}")
    return loss


# --- the losses -----------------------------------------------------------------------------------
@surrogate("ppo")
def ppo(tokens: Tokens, settings: LossSettings) -> Surrogate:
    """max(-A u, -A clip(u, 1-low, 1+high)), and at most -A c for A < 0 (arXiv 1707.06347, 1912.09729, 2503.14476).

    With ``old_logp`` a recomputed (proximal) log-prob and a correction this is decoupled PPO (arXiv 2110.00641).
    """
    return clipped(tokens.ratio, tokens.advantages, settings.clip_low, settings.clip_high, settings.dual_clip)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Surrogate:
    """The clipped surrogate of T tokens; ``ratio`` and ``advantages`` float [T]."""
    values = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    negative = advantages < 0
    above, below = (advantages > 0) & (ratio > 1 + high), negative & (ratio < 1 - low)
    if dual is None:
        return Surrogate(values, above, below)
    bound = -advantages * dual
    exceeding = negative & (values > bound)
    return Surrogate(torch.where(exceeding, bound, values), above, below, exceeding)


def mean_log_ratio(tokens: Tokens, settings: LossSettings) -> Tensor:
    """float [T]: mean of log pi / pi_old over each token's sequence."""
    return tokens.sequence_mean(tokens.logp - tokens.old_logp)


@surrogate("gspo", scope="sequence", precompute=mean_log_ratio, aggregation="seq-mean-token-mean")
def gspo(tokens: Tokens, settings: LossSettings) -> Surrogate:
    """PPO's clip on the geometric-mean ratio of the sequence, its gradient through each token (arXiv 2507.18071)."""
    assert tokens.precomputed is not None
    # The difference first: it is an exact 0, and a sum with logp would cost digits of a small mean.
    log_ratio = tokens.precomputed + (tokens.logp - tokens.logp.detach())
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return clipped(ratio, tokens.advantages, settings.clip_low, settings.clip_high)


@surrogate("cispo")
def cispo(tokens: Tokens, settings: LossSettings) -> Surrogate:
    """-sg(clip(u)) A log pi: a clipped token keeps its gradient, at the clip's weight (arXiv 2506.13585)."""
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    ratio = tokens.ratio.detach()
    values = -ratio.clamp(low, high) * tokens.advantages * tokens.logp
    return Surrogate(values, ratio > high, ratio < low)


@surrogate("reinforce", ratio=False)
def reinforce(tokens: Tokens, settings: LossSettings) -> Tensor:
    """-A log pi; a correction weighs it by the capped pi / pi_behaviour (Williams 1992)."""
    return -tokens.advantages * tokens.logp


@surrogate("gpg", ratio=False)
def gpg(tokens: Tokens, settings: LossSettings) -> Tensor:
    """-A log pi, as "group policy gradient" writes it; meant for the estimator of that name (arXiv 2504.02546)."""
    return -tokens.advantages * tokens.logp


# --- losses on the tokens whose log-prob and advantage move together ------------------------------
def covariance(tokens: Tokens) -> Tensor:
    """float [T]: (A - mean A) (log pi - mean log pi), each token's part of what lowers the entropy.

    The means are those of fresh tokens, and so is the answer: -inf for replayed ones.
    """
    fresh = ~tokens.replayed
    count = fresh.sum()

    def centred(values: Tensor) -> Tensor:
        return values - torch.where(fresh, values, 0.0).sum() / count

    values = centred(tokens.advantages) * centred(tokens.logp.detach())
    return torch.where(fresh, values, -torch.inf)


def clip_cov_choice(
    tokens: Tokens, settings: LossSettings, share: float = 2e-4, low: float = 1.0, high: float = 5.0
) -> Tensor:
    """bool [T]: a random ``share`` of the fresh tokens (one at least) of those with a covariance inside the band."""
    values = covariance(tokens)
    plain = clipped(tokens.ratio, tokens.advantages, settings.clip_low, settings.clip_high)
    candidates = (values > low) & (values < high)
    for flag in (plain.clipped_high, plain.clipped_low):
        if flag is not None:
            candidates &= ~flag
    # A draw that is a hash of the token: the same tokens in another order give the same choice.
    seed = tokens.old_logp.double() * 12.9898 + tokens.advantages.double() * 78.233 + tokens.sequence * 37.719
    draw = (seed.sin() * 43758.5453).frac().abs()
    return _highest(torch.where(candidates, draw, -torch.inf), _count(tokens, share))


@surrogate("clip_cov", scope="update", precompute=clip_cov_choice)
def clip_cov(tokens: Tokens, settings: LossSettings) -> Surrogate:
    """PPO without the gradient of a few tokens of high covariance (arXiv 2505.22617).

    Options: ``share`` of an update's tokens, ``low`` and ``high``, the band of covariances they are drawn from.
    """
    assert tokens.precomputed is not None
    plain = clipped(tokens.ratio, tokens.advantages, settings.clip_low, settings.clip_high)
    return plain._replace(values=torch.where(tokens.precomputed, 0.0, plain.values))


def kl_cov_choice(tokens: Tokens, settings: LossSettings, share: float = 2e-4) -> Tensor:
    """bool [T]: the ``share`` of the fresh tokens (one at least) with the highest covariance."""
    return _highest(covariance(tokens), _count(tokens, share))


@surrogate("kl_cov", scope="update", precompute=kl_cov_choice)
def kl_cov(tokens: Tokens, settings: LossSettings, coefficient: float = 1.0) -> Surrogate:
    """-A u without clip, and a penalty |log u| on the tokens of highest covariance (arXiv 2505.22617).

    Options: ``share`` of an update's tokens that are held back, ``coefficient`` of their penalty.
    """
    assert tokens.precomputed is not None
    penalty = coefficient * tokens.log_ratio.abs()
    return Surrogate(-tokens.advantages * tokens.ratio + torch.where(tokens.precomputed, penalty, 0.0))


def _count(tokens: Tokens, share: float) -> int:
    return max(1, int(share * int((~tokens.replayed).sum())))


def _highest(values: Tensor, count: int) -> Tensor:
    """bool [T]: the ``count`` highest of ``values`` [T] and never more, whatever ties; -inf is not chosen."""
    chosen = torch.zeros_like(values, dtype=torch.bool)
    chosen[values.topk(min(count, values.numel())).indices] = True
    return chosen & (values > -torch.inf)


# --- replayed tokens ------------------------------------------------------------------------------
def replayed_surrogate(tokens: Tokens, settings: LossSettings) -> Surrogate:
    """The loss of replayed tokens, whatever that of fresh ones is; ``old_logp`` is what was recorded.

    clip: PPO with an upper bound of its own. shape: -A w / (w + beta), no clip (LUFFY, arXiv 2504.14945), whose
    gradient is beta w / (w + beta)^2 of the unshaped one: 0.083 at w = 1 and beta = 0.1.
    """
    current = settings.replay_importance == "current"
    log_ratio = tokens.logp - tokens.logp.detach() if current else tokens.log_ratio
    if settings.replay_mode == "shape":
        # w / (w + beta), written so that its slope keeps its digits where w is large
        result = Surrogate(-tokens.advantages * (log_ratio - log(settings.replay_shape)).sigmoid())
    else:
        ratio = log_ratio.exp() if current else tokens.ratio
        result = clipped(ratio, tokens.advantages, settings.clip_low, settings.replay_clip_high, settings.dual_clip)
    return result._replace(values=settings.replay_coefficient * result.values)
