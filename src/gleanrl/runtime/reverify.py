"""Scoring a stored trajectory again before it is replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from gleanrl.context import Renderer
from gleanrl.experience.recall import Disagrees, Reverify
from gleanrl.protocols import Environment, Reward
from gleanrl.rewards import EnvironmentReward
from gleanrl.types import Score, StopReason, Task, Trajectory


def reverifier(reward: Reward, environment: Callable[[Task], Environment], renderer: Renderer) -> Reverify:
    """How a run scores a stored trajectory again: as ``reward`` does.

    Where the environment gives the score, its actions are played again in a fresh environment of the task.
    """
    if not isinstance(reward, EnvironmentReward):
        return reward.score

    async def play_again(task: Task, trajectory: Trajectory) -> Score:
        return await played_again(environment(task), renderer, trajectory)

    return play_again


async def played_again(environment: Environment, renderer: Renderer, trajectory: Trajectory) -> Score:
    """What ``environment``, not begun yet and closed here, gives for the trajectory's actions.

    An action is the message that `Renderer.parse` makes of the sampled tokens, as it was when they were sampled.
    Invalid if no score was given. Whatever the environment raises is raised.

    Raises:
        Disagrees: the episode ends earlier or later than it did.
    """
    actions = [renderer.parse(turn.tokens) for turn in trajectory.sampled_turns()]
    try:
        observation = await environment.reset()
        score = observation.score
        for turn, action in enumerate(actions):
            if observation.done:
                raise Disagrees(f"is over after {turn} of its {len(actions)} turns now")
            observation = await environment.step(action)
            score = observation.score or score
    finally:
        with suppress(Exception):  # what closing breaks is the environment's own
            await environment.close()
    if observation.done != (trajectory.stop is StopReason.DONE):
        raise Disagrees(f"is {'over' if observation.done else 'not over'} after its {len(actions)} turns now")
    return score or Score.failed("the environment gave no score")
