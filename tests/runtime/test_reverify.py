"""A stored episode played again: the same actions, and what counts as going otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gleanrl.experience.recall import Disagrees
from gleanrl.protocols import Observation
from gleanrl.rewards import EnvironmentReward
from gleanrl.rollout import Player
from gleanrl.runtime.reverify import reverifier
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.settings import ContextSettings
from gleanrl.types import Message, Score, StopReason, Task, Trajectory
from tests.loop_world import renderer

TASK = Task("t")


@dataclass
class Listening:
    """Ends after ``turns`` actions with the share of them that went left; ``fails`` at that action."""

    turns: int = 3
    fails: int = -1
    scored: bool = True
    heard: list[Message] = field(default_factory=list)
    closed: bool = False

    def _seen(self) -> Observation:
        score = Score(sum("left" in m["content"] for m in self.heard) / self.turns) if self.scored else None
        return Observation((Message(role="user", content="where?"),), done=len(self.heard) == self.turns, score=score)

    async def reset(self) -> Observation:
        return self._seen()

    async def step(self, message: Message) -> Observation:
        if len(self.heard) == self.fails:
            raise RuntimeError("stuck")
        self.heard.append(message)
        return self._seen()

    async def close(self) -> None:
        self.closed = True
        raise OSError("already gone")


def played(policy: Any = "linear", *, turns: int = 3) -> tuple[Trajectory, Listening]:
    """An episode of the real rollout, thinking included, and the environment that it was played in."""
    environment, r = Listening(), renderer()
    says = ["left", "<think> right </think> left", "right"]

    def script(prompt: object, seed: int) -> Sequence[int]:
        text = says[len(environment.heard)]
        return [*r.tokenizer(text, add_special_tokens=False)["input_ids"], r.end_of_turn]

    context = ContextSettings(policy=policy, max_turns=turns, max_tokens_per_turn=64)
    player = Player(lambda task: environment, ScriptedSampler(script), r, context, 1.0, 10_000)
    return asyncio.run(player.play(TASK, trajectory_id="x", seed=0)), environment


def again(trajectory: Trajectory, environment: Listening) -> Score:
    play = reverifier(EnvironmentReward(), lambda task: environment, renderer())
    return asyncio.run(awaited(play(TASK, trajectory)))


async def awaited(call: Awaitable[Score]) -> Score:
    return await call


@pytest.mark.parametrize("policy", ["linear", "strip_thinking", "window"])
@pytest.mark.parametrize("turns", [2, 3])
def test_the_environment_hears_what_it_heard(policy: str, turns: int) -> None:
    trajectory, first = played(policy, turns=turns)
    assert len(first.heard) == turns
    assert trajectory.stop is (StopReason.DONE if turns == 3 else StopReason.MAX_TURNS)
    second = Listening()
    assert again(trajectory, second) == trajectory.score
    assert second.heard == first.heard
    assert second.closed


@pytest.mark.parametrize(
    ("trajectory", "turns", "said"),
    [
        (played()[0], 2, "is over after 2 of its 3 turns now"),
        (played()[0], 4, "is not over after its 3 turns now"),
        (played(turns=2)[0], 2, "is over after its 2 turns now"),
    ],
)
def test_an_episode_that_ends_elsewhere_disagrees(trajectory: Trajectory, turns: int, said: str) -> None:
    environment = Listening(turns)
    with pytest.raises(Disagrees, match=f"^{said}$"):
        again(trajectory, environment)
    assert environment.closed


def test_an_environment_that_fails_or_gives_no_score_disagrees_with_nothing() -> None:
    broken = Listening(fails=1)
    with pytest.raises(RuntimeError, match="stuck"):
        again(played()[0], broken)
    assert broken.closed
    assert not again(played()[0], Listening(scored=False)).valid


def test_a_reward_that_scores_trajectories_is_asked_itself() -> None:
    class Judge:
        async def score(self, task: Task, trajectory: Trajectory) -> Score:
            return Score(0.25, explanation=f"{task.id} {trajectory.id}")

        async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
            return scores

    def environment(task: Task) -> Listening:
        raise AssertionError("it was not asked to score")

    trajectory = replace(played()[0], id="y")
    score = asyncio.run(awaited(reverifier(Judge(), environment, renderer())(TASK, trajectory)))
    assert score == Score(0.25, explanation="t y")
