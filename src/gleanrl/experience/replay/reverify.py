"""Scores a stored trajectory again before it is replayed (``replay.reverify``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, runtime_checkable

from gleanrl.experience.replay.recall import Disagrees, Reverify
from gleanrl.protocols import Environment, Reward
from gleanrl.rollout.player import conclude_score
from gleanrl.rollout.renderer import Renderer
from gleanrl.types import ENVIRONMENT_SCORE, UNPROCESSED_SCORE, Message, Score, StopReason, Task, Trajectory


@runtime_checkable
class Rescoring(Protocol):
    """A reward that stores its scores, and can score again without using the stored ones."""

    async def score_again(self, task: Task, what: Trajectory) -> Score: ...


def make_reverifier(reward: Reward | None, environment: Callable[[Task], Environment], renderer: Renderer) -> Reverify:
    """Return the function with which a run scores a stored trajectory again.

    ``reward`` scores the trajectory again, without using stored scores. None: the environment gives the score, so the
    actions of the trajectory are played again in a new environment of its task.
    """
    if reward is None:

        async def replay(task: Task, trajectory: Trajectory) -> Score:
            return await replay_actions(environment(task), renderer, trajectory)

        return replay

    score = reward.score_again if isinstance(reward, Rescoring) else reward.score

    async def rescore(task: Task, trajectory: Trajectory) -> Score:
        # A reward may use the environment's score, which trajectories from other sources may not have recorded.
        info = {key: v for key, v in trajectory.info.items() if key not in (ENVIRONMENT_SCORE, UNPROCESSED_SCORE)}
        own = trajectory.info.get(ENVIRONMENT_SCORE)
        played = Score.failed("what the environment gave is not known") if own is None else Score(own)
        now = await score(task, replace(trajectory, score=played, info=info))

        # Post-processing depends on the group, which is not stored. So only the score before it can be verified.
        before = trajectory.info.get(UNPROCESSED_SCORE)
        if before is None or not now.valid:
            return now
        if not math.isclose(now.value, before, rel_tol=0.0, abs_tol=1e-6):
            raise Disagrees(f"scores {now.value:g} now, not {before:g} as before its group was post-processed")
        return trajectory.score

    return rescore


async def replay_actions(environment: Environment, renderer: Renderer, trajectory: Trajectory) -> Score:
    """Play the trajectory's actions in ``environment`` and return the score. Resets the environment and closes it.

    As during sampling, an action is the message that `Renderer.parse` makes of the sampled tokens. The score is invalid
    if the environment gives none. Errors of the environment are raised.

    Raises:
        Disagrees: the episode ends earlier or later than the recorded one.
    """
    renderer = renderer.with_tools(trajectory.info.get("tools", ()))
    actions: list[Message] = []
    calls = 0  # number of tool calls so far; the messages number their calls
    for turn in trajectory.sampled_turns():
        actions.append(renderer.parse(turn.tokens, calls))
        calls += len(actions[-1].get("tool_calls", ()))
    try:
        observation = await environment.reset()
        score = observation.score
        for turn, action in enumerate(actions):
            if observation.done:
                raise Disagrees(f"is over after {turn} of its {len(actions)} turns now")
            observation = await environment.step(action)
            score = observation.score or score
        score = score or Score.failed("the environment gave no score")
        if not observation.done and trajectory.stop in (StopReason.MAX_TURNS, StopReason.CONTEXT_FULL):
            score = await conclude_score(environment, trajectory.stop, score)
    finally:
        with suppress(Exception):  # an error of closing says nothing about the score
            await environment.close()
    if observation.done != (trajectory.stop is StopReason.DONE):
        raise Disagrees(f"is {'over' if observation.done else 'not over'} after its {len(actions)} turns now")
    return score
