"""Parts of published designs that `atlas_arms.py` names by path: a ranking, a loss, an estimator and three curricula.

The curricula wrap the run's `ReplayCurriculum` and change the groups that it plans. `atlas.py` puts them in its place.
docs/reference/atlas.md states where each part differs from its publication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.algorithms.advantages import ESTIMATORS, Rewards, estimator
from gleanrl.algorithms.loss import TokenLosses, Tokens, replay_loss
from gleanrl.config.settings import LossSettings
from gleanrl.experience.pool.ranking import TaskTrajectories, ranking
from gleanrl.experience.replay.curriculum import ReplayCurriculum
from gleanrl.experience.replay.restarts import beginning
from gleanrl.experience.replay.selection import ranked
from gleanrl.protocols import Metrics
from gleanrl.types import Group, GroupSpec, Segment

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


class _Wrapped:
    """A curriculum that passes everything to ``inner``. Runs with it cannot be resumed."""

    def __init__(self, inner: ReplayCurriculum, seed: int) -> None:
        self.inner, self._random, self._steps = inner, np.random.default_rng([seed, 1]), 0

    async def propose(self, count: int) -> list[GroupSpec]:
        return await self.inner.propose(count)

    def observe(self, groups: Sequence[Group], training: Metrics) -> Metrics:
        self._steps += 1
        return self.inner.observe(groups, training)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError("the state of the random generator is not saved")


class AttachToEveryGroup(_Wrapped):
    """Adds up to ``replay.per_group`` stored successes to every group whose task has some, and selects no tasks.

    Needs ``replay.task_ratio = 0``. `attach_replayed` does the same after sampling.
    """

    async def propose(self, count: int) -> list[GroupSpec]:
        specs, pool = await self.inner.propose(count), self.inner.pool
        names = [spec.task.id for spec in specs]
        stored, retired = pool.stored(names), pool.retired(names)
        attached, keys = [], []
        for spec in specs:
            own = [] if spec.task.id in retired else stored[spec.task.id]
            order = ranked(own, pool.settings.select, self._random, step=self._steps)
            chosen = [own[index] for index in order[: pool.settings.per_group]]
            keys += [each.key for each in chosen]
            attached.append(replace(spec, replayed=tuple(each.trajectory for each in chosen)))
        pool.used(keys)
        return attached


class WithoutPrefix(_Wrapped):
    """Plays the tasks that ``replay.restart_share`` restarts from their beginning."""

    async def propose(self, count: int) -> list[GroupSpec]:
        return [replace(spec, start=()) for spec in await self.inner.propose(count)]


class RandomCut(_Wrapped):
    """Restarts the tasks that ``replay.restart_share`` restarts after a random number of turns of the same success.

    The number is drawn uniformly, from one turn to all but one. When a task is no longer restarted depends on the
    usual rule, as if its start had moved by it.
    """

    async def propose(self, count: int) -> list[GroupSpec]:
        specs = await self.inner.propose(count)
        stored = self.inner.pool.stored([spec.task.id for spec in specs if spec.start])
        cut: list[GroupSpec] = []
        for spec in specs:
            if spec.start:
                segments = [each.trajectory.segments[0] for each in reversed(stored[spec.task.id])]
                success = next(segment for segment in segments if _begins_with(segment, spec.start))
                turns = sum(turn.sampled for turn in success)
                spec = replace(spec, start=beginning(success, int(self._random.integers(1, turns))))
            cut.append(spec)
        return cut


def _begins_with(segment: Segment, start: Segment) -> bool:
    return len(segment) > len(start) and all(
        np.array_equal(own.tokens, turn.tokens) for own, turn in zip(segment, start, strict=False)
    )
