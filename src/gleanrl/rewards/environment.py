"""The default reward: the score that the environment gave."""

from __future__ import annotations

from collections.abc import Sequence

from gleanrl.rewards.request import Request
from gleanrl.types import Score, Task, Trajectory


class EnvironmentReward:
    """A `Reward` that keeps each trajectory's own score."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return trajectory.score

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        return scores


async def own_score(request: Request) -> Score:
    """The environment's score as a reward function, for sums of rewards."""
    return request.own
