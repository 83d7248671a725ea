"""Advantages: how much better than its group a trajectory did, per trained token.

What an estimator sees and is, and those built in, are in `gleanrl.algorithms.estimators`; this is how they are called.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from gleanrl.algorithms.estimators import ESTIMATORS, Estimator, Rewards, estimator
from gleanrl.utils.errors import UserError
from gleanrl.utils.registry import suggestion

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "Rewards",
    "check_options",
    "estimate",
    "estimator",
    "is_group_local",
    "zero_variance_members",
]


def is_group_local(name: str) -> bool:
    """Whether a batch may be consumed in chunks under this estimator. Raises `UserError` for an unknown name."""
    return ESTIMATORS.get(name).group_local


def check_options(name: str, options: Iterable[str]) -> None:
    """Raises `UserError` for the first of ``options`` that the estimator does not take, or for an unknown name."""
    known = ESTIMATORS.get(name).options
    for option in options:
        if option not in known:
            raise UserError(
                f"credit.options.{option}: estimator {name!r} has no such option{suggestion(option, known)}"
            )


@torch.no_grad()
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

    ``token_rewards`` [N, L] of any dtype; ``mask`` bool or 0/1 [N, L], the trained tokens; ``group`` int [N], any ids.
    ``baseline_members`` bool [N]: who gives a group's mean and deviation and the statistics of whitening (default:
    all). ``valid`` bool [N]: members whose score could be computed (default: all); the others enter no statistic and
    may hold anything. ``zero_variance="drop"`` zeroes all of a group whose valid members earned the same. ``options``
    are the estimator's. An estimator of one advantage a trajectory returns the same tensor twice.

    Raises:
        UserError: an unknown name or option, or an option's value that cannot be.
        ValueError: shapes that do not fit, a missing ``values`` or ``reward_baselines``, a valid member whose reward
            is not finite, or an estimator whose answer is not.
    """
    check_options(name, options)
    if zero_variance not in ("keep", "drop"):
        raise UserError(f"credit.zero_variance = {zero_variance!r}: must be keep or drop")
    rewards = _rewards(token_rewards, mask, group, baseline_members, valid)
    kept = rewards.valid & ~rewards.zero_variance if zero_variance == "drop" else rewards.valid
    advantages, returns = ESTIMATORS.get(name)(rewards, **options)
    dense = _dense(name, advantages, rewards.mask, kept)
    return dense, dense if returns is advantages else _dense(name, returns, rewards.mask, kept)


def zero_variance_members(scores: Tensor, group: Tensor) -> Tensor:
    """bool [N]: who is in a group of two or more that all earned the same; ``scores`` float [N], ``group`` as above."""
    column = scores[:, None]
    return _rewards(column, torch.ones_like(column), group, None, None).zero_variance


def _rewards(
    token_rewards: Tensor, mask: Tensor, group: Tensor, baseline_members: Tensor | None, valid: Tensor | None
) -> Rewards:
    valid = torch.ones_like(group, dtype=torch.bool) if valid is None else valid.bool()
    baseline = valid if baseline_members is None else valid & baseline_members.bool()
    members = token_rewards.shape[:1]
    if token_rewards.ndim != 2 or mask.shape != token_rewards.shape:
        raise ValueError(f"token_rewards {list(token_rewards.shape)} and mask {list(mask.shape)} must both be [N, L]")
    if not group.shape == valid.shape == baseline.shape == members:
        raise ValueError(f"group, valid and baseline_members must be [N], here N = {members[0]}")
    ids, dense = torch.unique(group, return_inverse=True)
    rewards = Rewards(token_rewards, mask.bool(), dense, valid, baseline, ids.numel())
    finite = rewards.scores.isfinite()
    if not bool(finite.all()):
        raise ValueError(f"the reward of valid member {int((~finite).nonzero()[0])} is not finite")
    return rewards


def _dense(name: str, values: Tensor, mask: Tensor, kept: Tensor) -> Tensor:
    """float32 [N, L], 0 outside ``mask`` and for members that are not ``kept``."""
    if values.shape not in (mask.shape, (mask.shape[0], 1)):
        wanted = f"{[mask.shape[0], 1]} or {list(mask.shape)}"
        raise ValueError(f"estimator {name!r} gave shape {list(values.shape)}, not {wanted}")
    if values.shape != mask.shape:  # what is the same at every token is rounded and zeroed once
        dense = torch.where(mask, torch.where(kept[:, None], values, 0.0).float(), 0.0)
    elif bool(kept.all()):
        dense = torch.where(mask, values.float(), 0.0)
    else:
        dense = torch.where(mask & kept[:, None], values.float(), 0.0)
    # The sum is cheap to look at; it alone may overflow.
    if not bool(dense.sum().isfinite()) and not bool(dense.isfinite().all()):
        row = int((~dense.isfinite()).any(-1).nonzero()[0])
        raise ValueError(f"estimator {name!r} gave member {row} an advantage or return that is not finite")
    return dense
