"""Tests of `gleanrl.rollout.player.Player`: episodes that lose their sampler or environment are played again, episodes
out of turns or context are concluded, and every environment is closed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, cast

import pytest

from gleanrl.config.settings import ContextSettings
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.experience.guidance.guidance import GuidedEnvironment
from gleanrl.experience.replay.reverify import replay_actions
from gleanrl.protocols import Completion, Environment, EpisodeLost, Observation, SamplingParams, Session, Taskset
from gleanrl.rollout import player as rollout
from gleanrl.rollout.player import MAX_ATTEMPTS, Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.schedule.step_metrics import group_metrics
from gleanrl.types import LAST_OBSERVATION, Group, GroupSpec, IntArray, Message, Score, StopReason, Task, Trajectory
from tests.loop_world import GuessEnvironment, renderer

TASK = Task("one", payload={"word": "right"})


@dataclass
class Fragile(ScriptedSampler):
    """A sampler whose first ``losses`` sessions raise EpisodeLost, when they open or at their second turn."""

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


def playing(sampler: Any, *environments: Environment) -> Coroutine[Any, Any, Trajectory]:
    made = iter(environments)
    player = Player(lambda task: next(made), sampler, renderer(), ContextSettings(), 1.0, 10_000)
    return player.play(TASK, trajectory_id="t", seed=3)


def played(sampler: Any, *environments: Environment) -> Trajectory:
    return asyncio.run(playing(sampler, *environments))


@pytest.mark.parametrize("when", ["open", "sample"])
@pytest.mark.parametrize("losses", [0, 1, 4])
def test_an_episode_that_loses_its_sampler_is_played_again_with_the_same_seed(when: str, losses: int) -> None:
    sampler = Fragile(losses, when)
    trajectory = played(sampler, *(GuessEnvironment(TASK) for _ in range(5)))
    assert sampler.seeds == [3] * (losses + 1)
    whole = played(Fragile(0, when), GuessEnvironment(TASK))
    assert trajectory.score.value == 1.0
    assert [turn.tokens.tolist() for turn in trajectory.turns()] == [turn.tokens.tolist() for turn in whole.turns()]
    assert trajectory.info["turns"] == 2


def test_an_episode_that_loses_its_environment_is_played_again() -> None:
    trajectory = played(Fragile(0, "open"), Lost(TASK), Lost(TASK), GuessEnvironment(TASK))
    assert trajectory.score.value == 1.0


def test_an_episode_that_is_lost_in_every_attempt_is_invalid() -> None:
    trajectory = played(Fragile(99, "sample"), *(GuessEnvironment(TASK) for _ in range(MAX_ATTEMPTS)))
    assert not trajectory.score.valid
    assert trajectory.stop is StopReason.ERROR
    assert "sampler 1 died" in str(trajectory.score.explanation)
    assert trajectory.segments == ()


@dataclass
class AtTheEnd(GuessEnvironment):
    """An environment that never ends by itself and gives its score only in ``conclude``."""

    worth: float = 0.25
    ended: list[StopReason] = field(default_factory=list)

    async def reset(self) -> Observation:
        return replace(await super().reset(), score=None)

    async def step(self, message: Message) -> Observation:
        return replace(await super().step(message), done=False, score=None)

    async def conclude(self, stop: StopReason) -> Score | None:
        self.ended.append(stop)
        return Score(self.worth)


class AtTheEnds(Taskset):
    def tasks(self, split: str, count: int) -> list[Task]:
        return [TASK][:count]

    def environment(self, task: Task) -> AtTheEnd:
        return AtTheEnd(task)


def cut_short(environment: Any, *, max_context: int = 10_000, max_turns: int = 3) -> Trajectory:
    sampler = ScriptedSampler(lambda *_: renderer().spoken("right").tolist())
    make = environment if callable(environment) else lambda task: environment
    player = Player(make, sampler, renderer(), ContextSettings(max_turns=max_turns), 1.0, max_context)
    return asyncio.run(player.play(TASK, trajectory_id="t", seed=3))


@dataclass
class Unrenderable(GuessEnvironment):
    """Answers with a message that the chat template refuses, as the last observation or before."""

    last: bool = True

    async def step(self, message: Message) -> Observation:
        observation = await super().step(message)
        return replace(observation, messages=(Message(role="user", content="refuse this"),), done=self.last)


@pytest.mark.parametrize("last", [True, False])
def test_an_observation_that_the_chat_template_refuses_costs_only_its_episode(last: bool) -> None:
    tokenizer = renderer().tokenizer
    refuse = "{% for m in messages %}{% if 'refuse' in m.content %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    tokenizer.chat_template = refuse + tokenizer.chat_template
    shown = Renderer(tokenizer, bodies=True)
    sampler = ScriptedSampler(lambda *_: shown.spoken("right").tolist())
    player = Player(lambda task: Unrenderable(task, last=last), sampler, shown, ContextSettings(), 1.0, 10_000)
    trajectory = asyncio.run(player.play(TASK, trajectory_id="t", seed=3))
    assert trajectory.stop is (StopReason.DONE if last else StopReason.ERROR)
    assert trajectory.score.valid is last  # the model does not see the last one
    assert trajectory.ending == ()


def test_an_episode_out_of_turns_or_context_gets_its_score_from_conclude() -> None:
    environment = AtTheEnd(TASK)
    trajectory = cut_short(environment)
    assert (trajectory.stop, trajectory.score.value) == (StopReason.MAX_TURNS, 0.25)
    assert environment.ended == [StopReason.MAX_TURNS]
    assert trajectory.info[LAST_OBSERVATION], "the model had no turn in which to see it"
    environment = AtTheEnd(TASK)
    trajectory = cut_short(environment, max_context=40, max_turns=40)
    assert (trajectory.stop, trajectory.score.value) == (StopReason.CONTEXT_FULL, 0.25)
    assert environment.ended == [StopReason.CONTEXT_FULL]
    assert LAST_OBSERVATION not in trajectory.info, "it is in the context"


def test_success_metrics_of_a_graded_reward_use_the_threshold() -> None:
    trajectory = cut_short(AtTheEnd(TASK))
    groups = [Group(GroupSpec(TASK, fresh=1), (trajectory,), ticket=0)]
    names = ("reward/success", "groups/all_solved", "groups/none_solved")
    assert [group_metrics(groups, 0.25)[name] for name in names] == [1, 1, 0]
    assert [group_metrics(groups, 0.3)[name] for name in names] == [0, 0, 1]


def test_a_part_of_a_score_neither_replaces_another_metric_nor_hides_the_others_as_nan() -> None:
    trajectory = cut_short(AtTheEnd(TASK))
    parts = [{"success": 0.0, "mean": 9.0, "style": math.nan, "speed": math.nan}, {"success": 0.5, "style": 3.0}]
    members = tuple(replace(trajectory, score=Score(0.75, parts=of_member)) for of_member in parts)
    metrics = group_metrics([Group(GroupSpec(TASK, fresh=2), members, ticket=0)])
    assert (metrics["reward/success"], metrics["reward/mean"]) == (1.0, 0.75)
    assert (metrics["reward/part/success"], metrics["reward/part/mean"], metrics["reward/style"]) == (0.25, 9.0, 3.0)
    assert "reward/speed" not in metrics


@pytest.mark.parametrize(("limit", "cut"), [(16, 0), (1, 3)])
def test_turns_truncated_by_max_tokens_per_turn_are_counted(limit: int, cut: int) -> None:
    sampler = ScriptedSampler(lambda *_: renderer().spoken("right").tolist())
    settings = ContextSettings(max_turns=3, max_tokens_per_turn=limit)
    player = Player(AtTheEnd, sampler, renderer(), settings, 1.0, 10_000)
    trajectory = asyncio.run(player.play(TASK, trajectory_id="t", seed=3))
    assert (trajectory.info["turns"], trajectory.info["cut_turns"]) == (3, cut)
    metrics = group_metrics([Group(GroupSpec(TASK, fresh=1), (trajectory,), ticket=0)])
    assert metrics["episode/cut_turns"] == cut / 3


def test_conclude_is_not_called_if_the_episode_has_a_score() -> None:
    @dataclass
    class Scored(AtTheEnd):
        async def step(self, message: Message) -> Observation:
            return replace(await super().step(message), score=Score(0.5))

    environment = Scored(TASK)
    assert cut_short(environment).score.value == 0.5
    assert environment.ended == []
    assert not cut_short(GuessEnvironment(replace(TASK, payload={"word": "right", "broken": "step"}))).score.valid


@pytest.mark.parametrize("workers", [0, 1])
def test_conclude_works_through_an_environment_pool(workers: int) -> None:
    async def play() -> Trajectory:
        async with EnvironmentPool(AtTheEnds(), workers=workers) as pool:
            sampler = ScriptedSampler(lambda *_: renderer().spoken("right").tolist())
            player = Player(pool.environment, sampler, renderer(), ContextSettings(max_turns=2), 1.0, 10_000)
            return await player.play(TASK, trajectory_id="t", seed=3)

    trajectory = asyncio.run(play())
    assert (trajectory.stop, trajectory.score.value) == (StopReason.MAX_TURNS, 0.25)


def test_conclude_works_through_a_guided_environment() -> None:
    guided = GuidedEnvironment(AtTheEnd(TASK), cast(Any, None), cast(Any, None), TASK, 100)
    assert asyncio.run(guided.conclude(StopReason.MAX_TURNS)) == Score(0.25)
    plain = GuidedEnvironment(GuessEnvironment(TASK), cast(Any, None), cast(Any, None), TASK, 100)
    assert asyncio.run(plain.conclude(StopReason.MAX_TURNS)) is None


def test_conclude_gives_the_score_when_actions_are_replayed() -> None:
    trajectory = cut_short(AtTheEnd(TASK))
    assert asyncio.run(replay_actions(AtTheEnd(TASK, worth=0.75), renderer(), trajectory)).value == 0.75


@dataclass
class Earning(Environment):
    """An environment whose observation ``i`` has the reward ``rewards[i]`` and the score ``scores[i]``, if given."""

    rewards: tuple[Any, ...]
    scores: tuple[Any, ...] = ()
    seen: int = 0

    async def reset(self) -> Observation:
        index, self.seen = self.seen, self.seen + 1
        score = self.scores[index] if index < len(self.scores) else None
        done = self.seen == len(self.rewards)
        return Observation(({"role": "user", "content": "left"},), done, score, self.rewards[index])

    async def step(self, message: Message) -> Observation:
        return await self.reset()


class Earnings(Taskset):
    def tasks(self, split: str, count: int) -> list[Task]:
        return [TASK][:count]

    def environment(self, task: Task) -> Earning:
        return Earning((None, 0.5, None, -2.0, 4.0))


@pytest.mark.parametrize("policy", ["linear", "window"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_turn_keeps_its_reward_and_without_a_score_their_sum_is_the_score(workers: int, policy: Any) -> None:
    async def play() -> Trajectory:
        async with EnvironmentPool(Earnings(), workers=workers) as pool:
            sampler = ScriptedSampler(lambda *_: renderer().spoken("right").tolist())
            context = ContextSettings(policy=policy, window_turns=1)
            player = Player(pool.environment, sampler, renderer(), context, 1.0, 10_000)
            return await player.play(TASK, trajectory_id="t", seed=3)

    trajectory = asyncio.run(play())
    assert len(trajectory.segments) == (1 if policy == "linear" else 3)
    assert [turn.reward for turn in trajectory.sampled_turns()] == [0.5, None, -2.0, 4.0]
    assert all(turn.reward is None for turn in trajectory.turns() if not turn.sampled)
    assert trajectory.score == Score(2.5)
    assert asyncio.run(replay_actions(Earnings().environment(TASK), renderer(), trajectory)) == Score(2.5)


def test_metrics_have_the_mean_reward_of_each_turn() -> None:
    played = [cut_short(Earning((None, *rewards))) for rewards in [(1.0, None, 0.5), (0.0, 2.0), (None, float("nan"))]]
    metrics = group_metrics([Group(GroupSpec(TASK, fresh=3), tuple(played), ticket=0)])
    turns = {name: value for name, value in metrics.items() if name.startswith("turn_reward/")}
    assert turns == {"turn_reward/01": 0.5, "turn_reward/02": 2.0, "turn_reward/03": 0.5}
    assert metrics["reward/mean"] == 1.75


def test_a_score_of_the_environment_counts_and_not_the_sum_of_its_turn_rewards() -> None:
    scored = cut_short(Earning((None, 0.5, 1.0), (0.0, 0.25)))
    assert (scored.score, [turn.reward for turn in scored.sampled_turns()]) == (Score(0.25), [0.5, 1.0])
    invalid = cut_short(Earning((None, 0.5, 1.0), (0.0, Score.failed("no judge"))))
    assert invalid.score.explanation == "no judge"
    at_the_end = cut_short(Earning((None, 0.5, None), (None, None, Score(1.0, turns=(0.75, 0.0)))))
    assert (at_the_end.score, [turn.reward for turn in at_the_end.sampled_turns()]) == (Score(1.0), [0.75, 0.0])
    too_many = cut_short(Earning((None, None), (None, Score(1.0, turns=(0.75, 0.0)))))
    assert not too_many.score.valid
    unscored = cut_short(Earning((None, None)))
    assert not unscored.score.valid


@pytest.mark.parametrize("rewards", [(None, float("nan")), (None, float("inf")), (None, "much"), (0.5, 1.0)])
def test_a_reward_that_is_not_finite_or_that_no_message_earned_fails_the_episode(rewards: tuple[Any, ...]) -> None:
    trajectory = cut_short(Earning(rewards))
    assert (trajectory.stop, trajectory.score.valid) == (StopReason.ERROR, False)


@dataclass
class Counted(GuessEnvironment):
    """An environment that records how many sampler sessions were open at its close, with the fault ``fails``."""

    sampler: ScriptedSampler | None = None
    fails: str = ""
    closings: list[int] = field(default_factory=list)  # number of open sessions at each close

    async def step(self, message: Message) -> Observation:
        if self.fails == "lost":
            raise EpisodeLost("environment 0 died")
        if self.fails == "slow":
            await asyncio.sleep(60)
        return await super().step(message)

    async def close(self) -> None:
        assert self.sampler is not None
        self.closings.append(self.sampler.open_sessions)
        if self.fails == "close":
            raise RuntimeError("it does not close")
        if self.fails == "stuck":
            await asyncio.sleep(60)


def counted(sampler: ScriptedSampler, number: int, fails: str = "") -> list[Counted]:
    return [Counted(TASK, sampler=sampler, fails=fails) for _ in range(number)]


@pytest.mark.parametrize(
    ("losses", "fails"), [(0, ""), (2, ""), (MAX_ATTEMPTS, ""), (0, "lost"), (0, "close")], ids=str
)
def test_every_environment_is_closed_after_its_session(losses: int, fails: str) -> None:
    """The session is closed first, because other episodes may wait for it; none waits for an environment."""
    sampler = Fragile(losses, "sample")
    environments = counted(sampler, MAX_ATTEMPTS, fails)
    played(sampler, *environments)
    begun = MAX_ATTEMPTS if fails == "lost" else min(losses + 1, MAX_ATTEMPTS)
    assert [environment.closings for environment in environments] == [[0]] * begun + [[]] * (MAX_ATTEMPTS - begun)


def test_the_environment_is_closed_if_the_sampler_raises() -> None:
    def broken(*_: Any) -> list[int]:
        raise MemoryError("no room")

    sampler = ScriptedSampler(broken)
    environments = counted(sampler, 1)
    with pytest.raises(MemoryError):
        played(sampler, *environments)
    assert environments[0].closings == [0]


@pytest.mark.parametrize("fails", ["slow", "close"])
def test_the_environment_of_a_cancelled_episode_is_closed(fails: str) -> None:
    sampler = ScriptedSampler(lambda *_: renderer().spoken("right").tolist(), delay=0.01)
    environments = counted(sampler, 1, fails)

    async def test() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(playing(sampler, *environments), 0.015)
        assert environments[0].closings == [0]

    asyncio.run(test())


def test_cancelling_does_not_wait_for_an_environment_that_does_not_close(monkeypatch: Any) -> None:
    monkeypatch.setattr(rollout, "CLOSE_TIMEOUT_S", 0.05)
    sampler = ScriptedSampler(lambda *_: renderer().spoken("right").tolist(), delay=30)
    environments = counted(sampler, 1, "stuck")

    async def test() -> None:
        started = perf_counter()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(playing(sampler, *environments), 0.05)
        assert perf_counter() - started < 10
        assert environments[0].closings == [0]

    asyncio.run(test())
