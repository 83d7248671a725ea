"""Scores a stored trajectory again before it is replayed (``replay.reverify``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, runtime_checkable

from gleanrl.experience.replay.recall import Disagrees, Reverify
from gleanrl.protocols import Environment, Reward
from gleanrl.rollout.player import conclude_score
from gleanrl.rollout.renderer import Renderer
from gleanrl.types import ENVIRONMENT_SCORE, UNPROCESSED_SCORE, Message, Score, StopReason, Task, Trajectory


def make_reverifier(reward: Reward | None, environment: Callable[[Task], Environment], renderer: Renderer) -> Reverify:
    """Return the function with which a run scores a stored trajectory again.

    ``reward``: is asked again, and may not answer from memory. None: the environment gives the score, so the actions of
    the trajectory are played again in a fresh environment of its task.
    """
    if reward is not None:
        ask = reward.score_again if isinstance(reward, Rescoring) else reward.score

        async def ask_again(task: Task, trajectory: Trajectory) -> Score:
            return compared(trajectory, await ask(task, as_played(trajectory)))

        return ask_again

    async def play_again(task: Task, trajectory: Trajectory) -> Score:
        return await played_again(environment(task), renderer, trajectory)

    return play_again


@runtime_checkable
class Rescoring(Protocol):
    """A reward that keeps its scores and can be asked to ignore them."""

    async def score_again(self, task: Task, what: Trajectory) -> Score: ...


def as_played(trajectory: Trajectory) -> Trajectory:
    """The trajectory as its environment left it: with the environment's score, which rewards may build on.

    Without one, as in pools that do not hold it, the environment's score is unknown, so invalid.
    """
    info = {key: value for key, value in trajectory.info.items() if key not in (ENVIRONMENT_SCORE, UNPROCESSED_SCORE)}
    own = trajectory.info.get(ENVIRONMENT_SCORE)
    score = Score.failed("what the environment gave is not known") if own is None else Score(own)
    return replace(trajectory, score=score, info=info)


def compared(trajectory: Trajectory, now: Score) -> Score:
    """The stored score if its reward gives ``now`` what it gave before post-processing.

    Post-processing itself cannot be verified: its group is gone. Raises `Disagrees` where the reward gives another.
    """
    before = trajectory.info.get(UNPROCESSED_SCORE)
    if before is None or not now.valid:
        return now
    if not math.isclose(now.value, before, rel_tol=0.0, abs_tol=1e-6):
        raise Disagrees(f"scores {now.value:g} now, not {before:g} as before its group was post-processed")
    return trajectory.score


async def played_again(environment: Environment, renderer: Renderer, trajectory: Trajectory) -> Score:
    """What ``environment``, not begun yet and closed here, gives for the trajectory's actions.

    An action is the message that `Renderer.parse` makes of the sampled tokens, as it was when they were sampled.
    Invalid if no score was given. Whatever the environment raises is raised.

    Raises:
        Disagrees: the episode ends earlier or later than it did.
    """
    actions = list(_said(renderer.with_tools(trajectory.info.get("tools", ())), trajectory))
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
        with suppress(Exception):  # what closing breaks is the environment's own
            await environment.close()
    if observation.done != (trajectory.stop is StopReason.DONE):
        raise Disagrees(f"is {'over' if observation.done else 'not over'} after its {len(actions)} turns now")
    return score


def _said(renderer: Renderer, trajectory: Trajectory) -> Iterator[Message]:
    calls = 0
    for turn in trajectory.sampled_turns():
        yield (message := renderer.parse(turn.tokens, calls))
        calls += len(message.get("tool_calls", ()))
