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
    """A reward that keeps its scores and can be asked to ignore them."""

    async def score_again(self, task: Task, what: Trajectory) -> Score: ...


def make_reverifier(reward: Reward | None, environment: Callable[[Task], Environment], renderer: Renderer) -> Reverify:
    """Return the function with which a run scores a stored trajectory again.

    ``reward``: is asked again, and may not answer from memory. None: the environment gives the score, so the actions of
    the trajectory are played again in a fresh environment of its task.
    """
    if reward is None:

        async def replay(task: Task, trajectory: Trajectory) -> Score:
            return await replay_actions(environment(task), renderer, trajectory)

        return replay

    score = reward.score_again if isinstance(reward, Rescoring) else reward.score

    async def rescore(task: Task, trajectory: Trajectory) -> Score:
        # A reward may build on the score of the environment. Pools of other origin do not hold that one.
        info = {key: v for key, v in trajectory.info.items() if key not in (ENVIRONMENT_SCORE, UNPROCESSED_SCORE)}
        own = trajectory.info.get(ENVIRONMENT_SCORE)
        played = Score.failed("what the environment gave is not known") if own is None else Score(own)
        now = await score(task, replace(trajectory, score=played, info=info))

        # Post-processing depends on the group, which is gone: only what the reward gave before it can be verified.
        before = trajectory.info.get(UNPROCESSED_SCORE)
        if before is None or not now.valid:
            return now
        if not math.isclose(now.value, before, rel_tol=0.0, abs_tol=1e-6):
            raise Disagrees(f"scores {now.value:g} now, not {before:g} as before its group was post-processed")
        return trajectory.score

    return rescore


async def replay_actions(environment: Environment, renderer: Renderer, trajectory: Trajectory) -> Score:
    """What ``environment``, not begun yet and closed here, gives for the trajectory's actions.

    An action is the message that `Renderer.parse` makes of the sampled tokens, as it was when they were sampled.
    Invalid if no score was given. Whatever the environment raises is raised.

    Raises:
        Disagrees: the episode ends earlier or later than it did.
    """
    renderer = renderer.with_tools(trajectory.info.get("tools", ()))
    actions: list[Message] = []
    calls = 0  # of tools so far, which the messages number
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
