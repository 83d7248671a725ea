"""Advantages: how much better than its group a trajectory did, per trained token.

Every estimator is one pure function of `Rewards`, registered by name. Numbers agree with verl's estimators
of the same name. Statistics are computed in float64 and without a loop over rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor

from gleanrl.errors import UserError
from gleanrl.registry import Registry, suggestion

EPSILON = 1e-6  # of the deviation that advantages are divided by


@dataclass(frozen=True)
class Rewards:
    """What an estimator sees: N trajectories of L positions in G groups.

    ``baseline`` tells which members give a group's mean and deviation; invalid ones never do, and whatever
    an estimator answers for them is discarded.
    """

    token_rewards: Tensor  # float64 [N, L], 0 for invalid members
    mask: Tensor  # bool [N, L], trained tokens
    group: Tensor  # int64 [N], 0 .. G-1
    valid: Tensor  # bool [N]
    baseline: Tensor  # bool [N]
    groups: int

    @cached_property
    def scores(self) -> Tensor:
        """float64 [N]: the sum of a trajectory's token rewards."""
        return self.token_rewards.sum(-1)

    @cached_property
    def counts(self) -> Tensor:
        """float64 [N]: baseline members of each trajectory's group."""
        return self.sum_by_group(self.baseline.double())[self.group]

    @cached_property
    def means(self) -> Tensor:
        """float64 [N]: mean score of the baseline members of each trajectory's group; 0 if there are none."""
        low, high = self._range(self.baseline)
        total = self.sum_by_group(torch.where(self.baseline, self.scores, 0.0))
        mean = total / self.sum_by_group(self.baseline.double()).clamp(min=1)
        # Equal scores have exactly their own mean: rounding must not turn "no signal" into a tiny one.
        return torch.where(low == high, low, mean)[self.group]

    @cached_property
    def deviations(self) -> Tensor:
        """float64 [N]: standard deviation (n-1) of the baseline members of each trajectory's group, 1 where it is 0."""
        squares = torch.where(self.baseline, (self.scores - self.means) ** 2, 0.0)
        variance = self.sum_by_group(squares)[self.group] / (self.counts - 1).clamp(min=1)
        return torch.where(variance > 0, variance.sqrt(), 1.0)

    @cached_property
    def zero_variance(self) -> Tensor:
        """bool [N]: members of groups with at least two valid members that all earned the same."""
        low, high = self._range(self.valid)
        several = self.sum_by_group(self.valid.double()) >= 2
        return (several & (low == high))[self.group]

    def sum_by_group(self, values: Tensor) -> Tensor:
        """float64 [G] from float64 [N]."""
        return values.new_zeros(self.groups).index_add_(0, self.group, values)

    def _range(self, members: Tensor) -> tuple[Tensor, Tensor]:
        """Lowest and highest score of the ``members`` of each group, float64 [G]."""
        low, high = (
            self.scores.new_full((self.groups,), empty).scatter_reduce(
                0, self.group, torch.where(members, self.scores, empty), reduction
            )
            for empty, reduction in ((torch.inf, "amin"), (-torch.inf, "amax"))
        )
        return low, high


Estimator = Callable[..., tuple[Tensor, Tensor]]
"""(rewards, **options) -> advantages and returns, float64 [N, L] or anything that broadcasts to it."""

ESTIMATORS: Registry[Estimator] = Registry("credit.estimator")
_GROUP_LOCAL: set[str] = set()


def estimator(name: str, *, group_local: bool) -> Callable[[Estimator], Estimator]:
    """Register an estimator. ``group_local``: a group's advantages do not depend on the rest of the batch."""
    if group_local:
        _GROUP_LOCAL.add(name)
    return ESTIMATORS.add(name)


def is_group_local(name: str) -> bool:
    """Whether a batch may be consumed in chunks under this estimator. Raises `UserError` for an unknown name."""
    ESTIMATORS.get(name)
    return name in _GROUP_LOCAL


def estimate(
    name: str,
    token_rewards: Tensor,
    mask: Tensor,
    group: Tensor,
    *,
    baseline_members: Tensor | None = None,
    valid: Tensor | None = None,
    zero_variance: Literal["keep", "drop"] = "keep",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, float32 [N, L] each, 0 outside ``mask`` and for invalid members.

    ``token_rewards`` float [N, L]; ``mask`` bool or 0/1 [N, L], the trained tokens; ``group`` int64 [N], any ids.
    ``baseline_members`` bool [N]: who gives a group's mean and deviation (default: all). ``valid`` bool [N]: members
    whose score could be computed (default: all); the others enter no statistic. ``zero_variance="drop"`` zeroes all
    of a group whose valid members earned the same. Raises `UserError` for an unknown name or option.
    """
    function = ESTIMATORS.get(name)
    known = [parameter for parameter in signature(function).parameters if parameter != "rewards"]
    for option in options:
        if option not in known:
            raise UserError(f"credit.estimator {name!r} has no option {option!r}{suggestion(option, known)}")
    rewards = _rewards(token_rewards, mask, group, baseline_members, valid)
    keep = rewards.mask & rewards.valid[:, None]
    if zero_variance == "drop":
        keep = keep & ~rewards.zero_variance[:, None]
    advantages, returns = function(rewards, **options)
    return torch.where(keep, advantages, 0.0).float(), torch.where(keep, returns, 0.0).float()


def zero_variance_members(scores: Tensor, group: Tensor) -> Tensor:
    """bool [N]: who is in a group of two or more that all earned the same; ``scores`` float [N], ``group`` as above."""
    column = scores[:, None]
    return _rewards(column, torch.ones_like(column), group, None, None).zero_variance


def _rewards(
    token_rewards: Tensor, mask: Tensor, group: Tensor, baseline_members: Tensor | None, valid: Tensor | None
) -> Rewards:
    valid = torch.ones_like(group, dtype=torch.bool) if valid is None else valid.bool()
    baseline = valid if baseline_members is None else valid & baseline_members.bool()
    ids, dense = torch.unique(group, return_inverse=True)
    token_rewards = torch.where(valid[:, None], token_rewards.double(), 0.0)
    return Rewards(token_rewards, mask.bool(), dense, valid, baseline, ids.numel())


@estimator("grpo", group_local=True)
def grpo(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """(r - mean) / (std + 1e-6), std with n-1; a lone baseline member has mean 0 and std 1 (arXiv 2402.03300)."""
    advantages = _centred(rewards) / (rewards.deviations + EPSILON)
    return advantages[:, None], advantages[:, None]


@estimator("dr_grpo", group_local=True)
def dr_grpo(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """r - mean, without the division that favours easy and hard tasks (arXiv 2503.20783)."""
    advantages = _centred(rewards)
    return advantages[:, None], advantages[:, None]


@estimator("rloo", group_local=True)
def rloo(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """r minus the mean of the *other* baseline members, which is n/(n-1) (r - mean) (arXiv 2402.14740).

    A member outside the baseline is compared with all of it; a lone baseline member keeps its raw score.
    """
    others = rewards.counts - 1
    leave_one_out = (rewards.scores - rewards.means) * rewards.counts / others.clamp(min=1)
    lone = rewards.baseline & (others <= 0)
    advantages = torch.where(rewards.baseline, leave_one_out, rewards.scores - rewards.means)
    advantages = torch.where(lone, rewards.scores, advantages)
    return advantages[:, None], advantages[:, None]


def _centred(rewards: Rewards) -> Tensor:
    """r - mean, where fewer than two baseline members give no baseline: mean 0."""
    return rewards.scores - torch.where(rewards.counts > 1, rewards.means, 0.0)
