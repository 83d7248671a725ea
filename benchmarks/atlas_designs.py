"""Parts of published designs that `atlas_arms.py` names by path: a ranking, losses and estimators.

docs/reference/atlas.md states where each part differs from its publication.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gleanrl.algorithms.advantages import ESTIMATORS, Rewards, estimator
from gleanrl.algorithms.loss import TokenLosses, Tokens, replay_loss
from gleanrl.config.settings import LossSettings
from gleanrl.experience.pool.ranking import TaskTrajectories, ranking

AGE_DECAY = 10.0  # steps after which the priority of a trajectory has fallen to 1/e
SECOND_MOMENT = 0.04  # bound of the mean squared log ratio of the tokens that are trained on


@ranking("fresh_per", by_entropy=False)
def fresh_per(trajectories: TaskTrajectories, random: np.random.Generator) -> np.ndarray:
    """Draw trajectories without replacement, with probabilities in proportion to exp(-age / 10).

    Adding Gumbel noise to log weights and sorting is equivalent to drawing one after the other.
    """
    return np.argsort(trajectories.age / AGE_DECAY - random.gumbel(size=trajectories.age.size), kind="stable")


def within_second_moment(tokens: Tokens, settings: LossSettings) -> Tensor:
    """Return bool [R]: True for the tokens that remain when those with the largest squared log ratio are left out.

    As few are left out as are needed for the mean squared log ratio of the others to be at most 0.04.
    """
    squares, order = tokens.log_ratio.square().sort()
    counts = torch.arange(1, squares.numel() + 1, device=squares.device)
    kept = torch.zeros_like(squares, dtype=torch.bool)
    kept[order] = squares.cumsum(0) <= SECOND_MOMENT * counts  # the running mean of sorted values never falls
    return kept


@replay_loss("m2po", scope="update", precompute=within_second_moment)
def m2po(tokens: Tokens, settings: LossSettings) -> TokenLosses:
    """Compute -A u without clipping, and 0 for the tokens outside `within_second_moment` of the update's replayed ones.

    A token that is left out still counts in the denominator of the loss, as a clipped one does. It is reported as
    clipped.
    """
    assert tokens.precomputed is not None
    left_out = ~tokens.precomputed.bool()
    return TokenLosses(
        (-tokens.advantages * tokens.ratio).masked_fill(left_out, 0.0),
        clipped_high=left_out & (tokens.log_ratio > 0),
        clipped_low=left_out & (tokens.log_ratio <= 0),
    )


def policy_has_left(tokens: Tokens, settings: LossSettings) -> Tensor:
    """Return [R]: min(1, p / b), where p is a trajectory's probability now and b the one recorded at sampling."""
    return tokens.sequence_sum(tokens.log_ratio).clamp(max=0).exp()


@replay_loss("topr", scope="sequence", precompute=policy_has_left)
def topr(tokens: Tokens, settings: LossSettings) -> TokenLosses:
    """Compute -A log pi where A > 0, without a ratio, and -A min(1, p / b) log pi where A < 0."""
    assert tokens.precomputed is not None
    weights = torch.where(tokens.advantages > 0, 1.0, tokens.precomputed)
    return TokenLosses(-tokens.advantages * weights * tokens.logp, clipped_low=tokens.advantages * (1 - weights) < 0)


@estimator("signs", group_local=True, group_baseline=False)
def signs(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Compute 1 for scores of at least one half, and -1 for lower ones. No trajectory is compared with another one."""
    advantages = torch.where(rewards.scores >= 0.5, 1.0, -1.0)[:, None]
    return advantages, advantages


@estimator("compared_apart", group_local=True, group_baseline=True)
def compared_apart(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Compute the advantages of ``grpo`` for the fresh members and for the replayed members of a group, each apart."""
    stored = replace(rewards, baseline=rewards.valid & ~rewards.baseline)
    fresh, replayed = (ESTIMATORS.get("grpo")(each)[0] for each in (rewards, stored))
    # a single stored trajectory has none that it can be compared with
    advantages = torch.where(rewards.baseline[:, None], fresh, replayed.masked_fill(stored.lone[:, None], 0.0))
    return advantages, advantages


@estimator("recalibrated", group_local=False, group_baseline=True)
def recalibrated(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Compute the advantage of ``grpo`` for fresh members, and a recalibrated one for replayed members.

    The latter is the score minus the median over the batch's groups of their fresh members' mean score, and 0 where
    that is negative. It is not divided by a deviation.
    """
    fresh = ESTIMATORS.get("grpo")(rewards)[0]
    sums = rewards.sum_by_group(torch.where(rewards.baseline, rewards.scores, 0.0))
    counts = rewards.sum_by_group(rewards.baseline.double())
    median = (sums / counts.clamp(min=1))[counts > 0].quantile(0.5) if bool((counts > 0).any()) else 0.0
    replayed = (rewards.scores - median).clamp(min=0)[:, None]
    advantages = torch.where(rewards.baseline[:, None], fresh, replayed)
    return advantages, advantages


@estimator("discounted", group_local=True, group_baseline=True, needs=["turns"])
def discounted(rewards: Rewards, *, turns: Tensor, gamma: float = 0.95) -> tuple[Tensor, Tensor]:
    """Compute the advantage of ``grpo``, plus that of ``grpo`` on gamma^T r, for a trajectory of T turns.

    As in ``gigpo``, shorter successes are better, and advantages have two terms. But no turns are compared: all tokens
    of a trajectory have the same advantage.
    """
    last = torch.where(rewards.trained, turns, -1).amax(1).clamp(min=0)
    grpo, shorter = ESTIMATORS.get("grpo"), replace(rewards, given=rewards.token_rewards * gamma ** last[:, None])
    advantages = grpo(rewards)[0] + grpo(shorter)[0]
    return advantages, advantages
