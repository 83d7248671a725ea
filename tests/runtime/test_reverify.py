"""Tests of reverification: a stored episode is played again with the same actions, and its score is compared."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gleanrl.config.settings import ContextSettings, RewardSettings, ScheduleSettings
from gleanrl.experience.replay.recall import Disagrees
from gleanrl.experience.replay.reverify import make_reverifier
from gleanrl.protocols import Environment, Observation
from gleanrl.rewards import Request, RewardAgent
from gleanrl.rollout.player import Player
from gleanrl.rollout.tool_calls import Call, call_message
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.simulate import virtual_time
from gleanrl.train import train
from gleanrl.types import GROUP_SIZE, GROUP_UID, Message, Score, StopReason, Task, Trajectory
from gleanrl.utils import serialize
from tests.loop_world import make_run, renderer

TASK = Task("t")


@dataclass
class Listening(Environment):
    """An environment that ends after ``turns`` actions; the score is the share of actions that contain "left".

    Action number ``fails`` raises.
    """

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
    """Play an episode with the real player, with a thinking turn; return it and its environment."""
    environment, r = Listening(), renderer()
    says = ["left", "<think> right </think> left", "right"]

    def script(prompt: object, seed: int) -> Sequence[int]:
        text = says[len(environment.heard)]
        return [*r.tokenizer(text, add_special_tokens=False)["input_ids"], r.end_of_turn]

    context = ContextSettings(policy=policy, max_turns=turns, max_tokens_per_turn=64)
    player = Player(lambda task: environment, ScriptedSampler(script), r, context, 1.0, 10_000)
    return asyncio.run(player.play(TASK, trajectory_id="x", seed=0)), environment


def again(trajectory: Trajectory, environment: Listening) -> Score:
    play = make_reverifier(None, lambda task: environment, renderer())
    return asyncio.run(awaited(play(TASK, trajectory)))


async def awaited(call: Awaitable[Score]) -> Score:
    return await call


@pytest.mark.parametrize("policy", ["linear", "strip_thinking", "window"])
@pytest.mark.parametrize("turns", [2, 3])
def test_the_environment_gets_the_same_messages_again(policy: str, turns: int) -> None:
    trajectory, first = played(policy, turns=turns)
    assert len(first.heard) == turns
    assert trajectory.stop is (StopReason.DONE if turns == 3 else StopReason.MAX_TURNS)
    second = Listening()
    assert again(trajectory, second) == trajectory.score
    assert second.heard == first.heard
    assert second.closed


def test_the_environment_gets_the_same_tool_calls_again() -> None:
    tools = ({"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}},)

    @dataclass
    class Calling(Listening):
        def _seen(self) -> Observation:
            score = Score(float(sum("tool_calls" in m for m in self.heard)))
            where = Message(role="user", content="where?")
            return Observation((where,), done=len(self.heard) == 2, score=score, tools=tools)

    r, first, second = renderer().with_tools(tools), Calling(), Calling()
    message = Message(role="assistant", content="", tool_calls=[call_message(Call("go", {"to": "left"}), 0)])
    player = Player(
        lambda task: first,
        ScriptedSampler(lambda *_: r.spoken(message).tolist()),
        renderer(),
        ContextSettings(),
        1.0,
        9999,
    )
    trajectory = asyncio.run(player.play(TASK, trajectory_id="x", seed=0))
    assert trajectory.score.value == 2
    assert again(trajectory, second) == trajectory.score
    assert second.heard == first.heard


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


def test_an_environment_that_raises_or_gives_no_score_is_no_disagreement() -> None:
    broken = Listening(fails=1)
    with pytest.raises(RuntimeError, match="stuck"):
        again(played()[0], broken)
    assert broken.closed
    assert not again(played()[0], Listening(scored=False)).valid


def test_a_reward_that_scores_trajectories_is_called_without_the_environment() -> None:
    class Judge:
        async def score(self, task: Task, trajectory: Trajectory) -> Score:
            return Score(0.25, explanation=f"{task.id} {trajectory.id}")

        async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
            return scores

    def environment(task: Task) -> Listening:
        raise AssertionError("it was not asked to score")

    trajectory = replace(played()[0], id="y")
    score = asyncio.run(awaited(make_reverifier(Judge(), environment, renderer())(TASK, trajectory)))
    assert score == Score(0.25, explanation="t y")


# --- a reward agent, which caches scores ------------------------------------------------------------------
class Judge:
    """A reward that adds a bonus to the environment's score and keeps its requests."""

    def __init__(self) -> None:
        self.bonus = 0.25
        self.heard: list[Request] = []

    async def compute_score(self, request: Request) -> float:
        self.heard.append(request)
        return request.own.value + self.bonus


class GroupJudge(Judge):
    """A judge that then subtracts the best score of the group."""

    def post_process_scores(self, scores: list[Score]) -> list[float]:
        best = max(score.value for score in scores)
        return [score.value - best for score in scores]


async def differs(check: Awaitable[Score], stored: float) -> bool:
    try:
        return (await check).value != stored
    except Disagrees:
        return True


async def trained(folder: Path, agent: RewardAgent) -> list[tuple[Task, Trajectory]]:
    """Run training; return the sampled trajectories with their tasks, after encoding and decoding."""
    run = make_run(folder, ScheduleSettings(batch=2, group=3), steps=3)
    run.rewards = agent
    await train(run)
    groups = [group for _, groups, _ in run.observer.steps for group in groups]
    stored = [(group.spec.task, serialize.encode(t)) for group in groups for t in group.trajectories]
    return [(task, serialize.decode(record, Trajectory)) for task, record in stored]


@pytest.mark.parametrize("kind", [Judge, GroupJudge])
def test_a_reward_agent_gets_the_same_requests_again_and_does_not_use_its_cache(
    tmp_path: Path, kind: type[Judge]
) -> None:
    async def main() -> None:
        judge = kind()
        async with RewardAgent(judge, journal=tmp_path / "rewards.sqlite") as agent:
            sampled = await trained(tmp_path, agent)
            first = {request.trajectory_id: request for request in judge.heard}
            check = make_reverifier(agent, lambda task: Listening(), renderer())
            for times in (1, 2):
                judge.heard.clear()
                scores = [await check(task, trajectory) for task, trajectory in sampled]
                assert [s.value for s in scores] == [trajectory.score.value for _, trajectory in sampled]
                assert len(judge.heard) == len(sampled), times
            for request in judge.heard:
                asked = first.get(request.trajectory_id)
                if asked is None:  # an identical request of another trajectory was sent instead
                    continue
                alone = {name: value for name, value in asked.info.items() if name not in (GROUP_UID, GROUP_SIZE)}
                assert replace(request, nonce="") == replace(asked, info=alone)
            judge.bonus = 0.5
            for task, trajectory in sampled:
                assert await differs(check(task, trajectory), trajectory.score.value)
        assert {trajectory.score.value for _, trajectory in sampled} > {0.0 if kind is GroupJudge else 1.25}

    virtual_time.run(main())


def test_a_weighted_reward_adds_the_environment_s_score_and_not_the_stored_sum() -> None:
    parts = {"environment": {"weight": 1.0}, "bonus": {"reward": bonus, "weight": 1.0}}
    settings = RewardSettings(name="weighted", options={"parts": parts})
    trajectory = replace(played()[0], score=Score(1.0))

    async def main() -> None:
        async with RewardAgent(None, settings) as agent:
            stored = trajectory.rescored(await agent.score(TASK, trajectory), "environment_score")
            again = await make_reverifier(agent, lambda task: Listening(), renderer())(TASK, stored)
            assert (stored.score.value, again.value) == (1.5, 1.5)
            unknown = await make_reverifier(agent, lambda task: Listening(), renderer())(
                TASK, trajectory.scored(stored.score)
            )
            assert not unknown.valid

    virtual_time.run(main())


async def bonus(request: Request) -> float:
    return 0.5
