"""Episodes whose sampler or environment is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from gleanrl.protocols import Completion, Environment, EpisodeLost, Observation, SamplingParams, Session
from gleanrl.rollout import BEGINNINGS, Player
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.settings import ContextSettings
from gleanrl.types import IntArray, Message, StopReason, Task, Trajectory
from tests.loop_world import GuessEnvironment, renderer

TASK = Task("one", payload={"word": "right"})


@dataclass
class Fragile(ScriptedSampler):
    """Its first sessions are lost: when they open, or with their second turn."""

    losses: int = 0
    when: str = "sample"
    seeds: list[int] = field(default_factory=list)

    def __init__(self, losses: int, when: str) -> None:
        super().__init__(lambda *_: renderer().spoken("right").tolist())
        self.losses, self.when, self.seeds = losses, when, []

    @asynccontextmanager
    async def session(self, seed: int) -> AsyncIterator[Session]:
        self.seeds.append(seed)
        lost = len(self.seeds) <= self.losses
        if lost and self.when == "open":
            raise EpisodeLost("sampler 1 died")
        async with super().session(seed) as inner:
            yield Losing(inner) if lost and self.when == "sample" else inner


@dataclass
class Losing:
    inner: Session
    asked: int = 0

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
        self.asked += 1
        if self.asked == 2:
            raise EpisodeLost("sampler 1 died")
        return await self.inner.sample(prompt, params)


class Lost(GuessEnvironment):
    async def step(self, message: Message) -> Observation:
        raise EpisodeLost("environment 0 died")


def played(sampler: Any, *environments: Environment) -> Trajectory:
    made = iter(environments)
    player = Player(lambda task: next(made), sampler, renderer(), ContextSettings(), 1.0, 10_000)
    return asyncio.run(player.play(TASK, trajectory_id="t", seed=3))


@pytest.mark.parametrize("when", ["open", "sample"])
@pytest.mark.parametrize("losses", [0, 1, 4])
def test_an_episode_that_is_lost_is_played_again_from_its_start(when: str, losses: int) -> None:
    sampler = Fragile(losses, when)
    trajectory = played(sampler, *(GuessEnvironment(TASK) for _ in range(5)))
    assert sampler.seeds == [3] * (losses + 1)
    whole = played(Fragile(0, when), GuessEnvironment(TASK))
    assert trajectory.score.value == 1.0
    assert [turn.tokens.tolist() for turn in trajectory.turns()] == [turn.tokens.tolist() for turn in whole.turns()]
    assert trajectory.info["turns"] == 2


def test_so_is_one_whose_environment_is_lost() -> None:
    trajectory = played(Fragile(0, "open"), Lost(TASK), Lost(TASK), GuessEnvironment(TASK))
    assert trajectory.score.value == 1.0


def test_an_episode_that_is_always_lost_counts_as_failed() -> None:
    trajectory = played(Fragile(99, "sample"), *(GuessEnvironment(TASK) for _ in range(BEGINNINGS)))
    assert not trajectory.score.valid
    assert trajectory.stop is StopReason.ERROR
    assert trajectory.score.explanation == f"lost {BEGINNINGS} times: sampler 1 died"
    assert trajectory.segments == ()
