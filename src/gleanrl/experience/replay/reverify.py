"""Scores a stored trajectory again before it is replayed (setting ``replay.reverify``).

The recorded score may be out of date, because the reward or the environment may have changed since.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, runtime_checkable

from gleanrl.experience.replay.recall import Disagrees, Reverify
from gleanrl.protocols import Environment, Reward
from gleanrl.rollout.player import conclude_score, sum_of_rewards
from gleanrl.rollout.renderer import Renderer
from gleanrl.types import ENVIRONMENT_SCORE, UNPROCESSED_SCORE, Message, Score, StopReason, Task, Trajectory


@runtime_checkable
class Rescoring(Protocol):
    """A reward that caches its scores. Its ``score_again`` computes a score without reading or writing the cache."""

    async def score_again(self, task: Task, what: Trajectory) -> Score: ...


def make_reverifier(reward: Reward | None, environment: Callable[[Task], Environment], renderer: Renderer) -> Reverify:
    """Return the function with which `ReplayCurriculum` scores a stored trajectory again.

    If ``reward`` is given, the function calls it again and bypasses its cache. If ``reward`` is None, the environment
    computes the scores of the run. The function then plays the actions of the trajectory again in a new environment of
    the task, which ``environment`` makes.

    The function raises `Disagrees` as `Reverify` says.
    """
    if reward is None:

        async def replay(task: Task, trajectory: Trajectory) -> Score:
            return await replay_actions(environment(task), renderer, trajectory)

        return replay

    score = reward.score_again if isinstance(reward, Rescoring) else reward.score

    async def rescore(task: Task, trajectory: Trajectory) -> Score:
        # During sampling, the reward received a trajectory with the environment's score, and may have used that score.
        # So restore it from ``info``. A trajectory from another source may lack it; its score is then invalid.
        info = {key: v for key, v in trajectory.info.items() if key not in (ENVIRONMENT_SCORE, UNPROCESSED_SCORE)}
        own = trajectory.info.get(ENVIRONMENT_SCORE)
        missing = (
            "the environment's score was not stored with the trajectory; to replay it, set replay.reverify = false"
        )
        played = Score.failed(missing) if own is None else Score(own)
        now = await score(task, replace(trajectory, score=played, info=info))

        # If the reward post-processed the scores of the group (`Reward.finish`), the recorded score depends on the
        # other members. They are not stored, so compare the trajectory's score before post-processing, which ``info``
        # holds.
        before = trajectory.info.get(UNPROCESSED_SCORE)
        if before is None or not now.valid:
            return now
        if not math.isclose(now.value, before, rel_tol=0.0, abs_tol=1e-6):
            raise Disagrees(f"scores {now.value:g} now, not {before:g} as before its group was post-processed")
        return trajectory.score

    return rescore


async def replay_actions(environment: Environment, renderer: Renderer, trajectory: Trajectory) -> Score:
    """Play the trajectory's actions in ``environment`` and return the score that the environment gives.

    The function resets the environment and closes it. As during sampling, each action is the message that
    `Renderer.parse` makes of the sampled tokens of a turn. The score is invalid if the environment gives none.
    Exceptions of the environment are not caught, except those of closing it.

    Raises:
        Disagrees: the episode ends earlier or later than the recorded one.
    """
    renderer = renderer.with_tools(trajectory.info.get("tools", ()))
    actions: list[Message] = []
    calls = 0  # number of tool calls in the messages so far, from which `Renderer.parse` numbers the next calls
    for segment in trajectory.segments:
        for position, turn in enumerate(segment):
            if turn.sampled:
                actions.append(renderer.parse(turn.tokens, calls, segment[:position]))
                calls += len(actions[-1].get("tool_calls", ()))
    try:
        observation = await environment.reset()
        score, rewards = observation.score, []
        for turn, action in enumerate(actions):
            if observation.done:
                raise Disagrees(f"is over after {turn} of its {len(actions)} turns now")
            observation = await environment.step(action)
            score = observation.score or score
            rewards.append(observation.reward)
        if not observation.done and trajectory.stop in (StopReason.MAX_TURNS, StopReason.CONTEXT_FULL):
            score = await conclude_score(environment, trajectory.stop, score)
        score = score or sum_of_rewards(rewards)
    finally:
        with suppress(Exception):  # the score is complete, so an error while closing does not matter
            await environment.close()
    if observation.done != (trajectory.stop is StopReason.DONE):
        raise Disagrees(f"is {'over' if observation.done else 'not over'} after its {len(actions)} turns now")
    return score
