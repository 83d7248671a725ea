"""`Episodes`, the live episodes of the environment service: repeated requests, expiry, limits, errors and closing.

The tests run on a virtual clock.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import Response

from gleanrl.environments.service.episodes import Episodes, Refused
from gleanrl.protocols import Environment, EpisodeLost, Observation
from gleanrl.simulate import virtual_time
from gleanrl.types import Message, Score, StopReason, Task
from tests.strategies import examples

TASK = Task("t")


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


@dataclass
class Slow(Environment):
    """An environment that takes 1 s for reset and step, and counts its calls.

    The message "end" ends the episode, and "raise" makes the step raise.
    """

    heard: list[str] = field(default_factory=list)
    resets: int = 0
    closed: int = 0
    close_s: float = 0.0

    async def reset(self) -> Observation:
        self.resets += 1
        return await self.seen()

    async def step(self, message: Message) -> Observation:
        self.heard.append(message["content"])
        if message["content"] == "raise":
            raise ValueError("no such door")
        return await self.seen(done=message["content"] == "end")

    async def close(self) -> None:
        await asyncio.sleep(self.close_s)
        self.closed += 1

    async def seen(self, done: bool = False) -> Observation:
        text = " ".join(self.heard)
        await asyncio.sleep(1.0)
        return Observation(({"role": "user", "content": text},), done, Score(float(len(self.heard))))


@dataclass
class World:
    made: list[Slow] = field(default_factory=list)
    close_s: float = 0.0

    def environment(self, task: Task) -> Slow:
        self.made.append(Slow(close_s=self.close_s))
        return self.made[-1]


def run(body: Callable[[World, Episodes], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        world = World(close_s=options.pop("close_s", 0.0))
        episodes = Episodes(world.environment, options.pop("most", 8), options.pop("idle_timeout_s", 60.0), **options)
        await body(world, episodes)
        await episodes.close()
        assert [e.closed for e in world.made] == [1] * len(world.made)

    virtual_time.run(main())


async def refused(call: Awaitable[Response]) -> tuple[int, str]:
    with pytest.raises(Refused) as caught:
        await call
    return caught.value.answer.status_code, json.loads(caught.value.answer.body)["error"]


def now() -> float:
    return asyncio.get_running_loop().time()


def test_an_episode_without_requests_expires_after_the_idle_timeout() -> None:
    async def body(world: World, episodes: Episodes) -> None:
        await asyncio.gather(episodes.create("a", TASK), episodes.create("b", TASK))
        await asyncio.sleep(58)
        # This step ends at 60 s, from when on the episode is idle.
        await episodes.step("b", 1, say("x"))
        assert episodes.live == 2
        await asyncio.sleep(1.5)
        assert episodes.live == 1
        assert (world.made[0].closed, world.made[1].closed) == (1, 0)
        assert await refused(episodes.step("a", 1, say("x"))) == (404, "unknown")
        with pytest.raises(Refused, match="it expired after 60 s without a request"):
            episodes.evaluate("a")
        await asyncio.sleep(119.5 - now())
        # Any request restarts the idle time.
        episodes.evaluate("b")
        await asyncio.sleep(59.5)
        assert episodes.live == 1
        await asyncio.sleep(1.0)
        assert episodes.live == 0
        assert episodes.counts.expired == 2

    run(body)


def test_a_repeated_request_restarts_the_idle_time() -> None:
    async def body(world: World, episodes: Episodes) -> None:
        for _ in range(5):
            await episodes.create("a", TASK)
            await asyncio.sleep(40)
        assert episodes.live == 1

    run(body)


def test_an_episode_does_not_expire_during_a_step() -> None:
    async def body(world: World, episodes: Episodes) -> None:
        await episodes.create("a", TASK)
        await episodes.step("a", 1, say("x"))
        assert episodes.live == 1

    run(body, idle_timeout_s=0.5)


def test_a_repeated_request_gets_the_same_answer_and_is_executed_once() -> None:
    async def body(world: World, episodes: Episodes) -> None:
        first = await asyncio.gather(*(episodes.create("a", TASK) for _ in range(3)))
        assert first[0] is first[1] is first[2]
        early = asyncio.ensure_future(episodes.step("a", 1, say("go")))
        await asyncio.sleep(0.5)
        # The connection is lost while the step is executed.
        early.cancel()
        again = await episodes.step("a", 1, say("go"))
        # Reset and one step have taken 1 s each, so that the step was not executed again.
        assert now() == pytest.approx(2.0)
        assert await episodes.step("a", 1, say("go")) is again
        assert (world.made[0].resets, world.made[0].heard) == (1, ["go"])
        assert json.loads(again.body) == {
            "id": "a",
            "step": 1,
            "observation": json.loads(again.body)["observation"],
        }

    run(body)


def test_wrong_requests_get_the_errors_conflict_busy_over_or_unknown() -> None:
    async def body(world: World, episodes: Episodes) -> None:
        await episodes.create("a", TASK)
        assert await refused(episodes.create("a", Task("other"))) == (409, "conflict")
        assert await refused(episodes.step("a", 2, say("x"))) == (409, "conflict")
        under_way = asyncio.ensure_future(episodes.step("a", 1, say("x")))
        await asyncio.sleep(0)
        assert await refused(episodes.step("a", 2, say("y"))) == (409, "busy")
        assert await refused(episodes.step("a", 1, say("y"))) == (409, "busy")
        await under_way
        assert await refused(episodes.step("a", 1, say("y"))) == (409, "conflict")
        assert await refused(episodes.create("a", TASK)) == (409, "conflict")
        await episodes.step("a", 2, say("end"))
        assert await refused(episodes.step("a", 3, say("x"))) == (409, "over")
        assert json.loads((await episodes.step("a", 2, say("end"))).body)["observation"]["done"]
        assert await refused(episodes.step("b", 1, say("x"))) == (404, "unknown")
        assert world.made[0].heard == ["x", "end"]

    run(body)


def test_a_failed_episode_is_over_and_repeats_its_error() -> None:
    async def body(world: World, episodes: Episodes) -> None:
        await episodes.create("a", TASK)
        failed = await episodes.step("a", 1, say("raise"))
        assert (failed.status_code, json.loads(failed.body)) == (
            500,
            {"error": "raised", "detail": "no such door", "kind": "ValueError"},
        )
        assert await episodes.step("a", 1, say("raise")) is failed
        assert await refused(episodes.step("a", 2, say("x"))) == (409, "over")
        assert json.loads(episodes.evaluate("a").body) == {
            "id": "a",
            "step": 0,
            "done": True,
            "score": {
                "value": 0.0,
                "valid": True,
                "parts": {},
                "explanation": None,
                "applicable": True,
                "turns": None,
            },
        }
        await asyncio.sleep(0)
        # The environment is closed after the failure, and not only when the episode is released.
        assert world.made[0].closed == 1

    run(body)


def test_episodes_that_are_still_closing_count_towards_the_instance_limit() -> None:
    async def body(world: World, episodes: Episodes) -> None:
        await asyncio.gather(*(episodes.create(f"e{i}", TASK) for i in range(2)))
        with pytest.raises(Refused, match="--max-instances") as caught:
            await episodes.create("e2", TASK)
        assert (caught.value.answer.status_code, caught.value.answer.headers["retry-after"]) == (429, "1")
        released = asyncio.ensure_future(episodes.release("e0"))
        # The environment takes 5 s to close.
        await asyncio.sleep(4.0)
        assert await refused(episodes.create("e2", TASK)) == (429, "full")
        assert json.loads((await released).body) == {"released": True}
        assert (await episodes.create("e2", TASK)).status_code == 200
        episodes.room = lambda: "no memory"
        await episodes.release("e1")
        assert await refused(episodes.create("e3", TASK)) == (503, "full")
        episodes.draining = True
        assert await refused(episodes.create("e3", TASK)) == (503, "draining")
        assert (await episodes.step("e2", 1, say("x"))).status_code == 200

    run(body, most=2, close_s=5.0)


def test_a_release_ends_a_running_step_and_rejects_a_later_create() -> None:
    async def body(world: World, episodes: Episodes) -> None:
        await episodes.create("a", TASK)
        under_way = asyncio.ensure_future(episodes.step("a", 1, say("x")))
        await asyncio.sleep(0.1)
        await episodes.release("a")
        assert await refused(under_way) == (409, "over")
        assert json.loads((await episodes.release("a")).body) == {"released": False}
        # The client has given up, and its release arrives before its request to create the episode.
        await episodes.release("late")
        assert await refused(episodes.create("late", TASK)) == (409, "conflict")
        assert (len(world.made), episodes.live) == (1, 0)

    run(body)


def test_an_episode_that_its_environment_lost_becomes_unknown() -> None:
    """The environment is itself a client of another service, which was restarted. The client must begin again."""

    class Losing(Slow):
        async def step(self, message: Message) -> Observation:
            raise EpisodeLost("no episode there")

    async def body(world: World, episodes: Episodes) -> None:
        episodes.environment = lambda task: world.made.append(Losing()) or world.made[-1]
        await episodes.create("a", TASK)
        answer = await episodes.step("a", 1, say("x"))
        assert (answer.status_code, json.loads(answer.body)["error"]) == (404, "unknown")
        assert await refused(episodes.step("a", 1, say("x"))) == (404, "unknown")
        assert (episodes.live, episodes.counts.failed) == (0, 0)
        await episodes.close()
        assert [made.closed for made in world.made] == [1]

    run(body)


def test_conclude_is_executed_once_and_ends_the_episode() -> None:
    class Concluded(Slow):
        concluded = 0

        async def conclude(self, stop: StopReason) -> Score:
            self.concluded += 1
            await asyncio.sleep(1.0)
            return Score(0.5, explanation=stop)

    async def body(world: World, episodes: Episodes) -> None:
        episodes.environment = lambda task: world.made.append(Concluded()) or world.made[-1]
        await episodes.create("a", TASK)
        step = await episodes.step("a", 1, say("x"))
        assert json.loads(step.body)["step"] == 1
        asked = [asyncio.ensure_future(episodes.conclude("a", StopReason.MAX_TURNS)) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert await refused(episodes.step("a", 1, say("x"))) == (409, "busy")
        answers = await asyncio.gather(*asked)
        assert answers[0] is answers[1] is await episodes.conclude("a", StopReason.MAX_TURNS)
        assert json.loads(answers[0].body)["score"]["value"] == 0.5
        assert json.loads(episodes.evaluate("a").body)["score"]["value"] == 0.5
        assert await refused(episodes.conclude("a", StopReason.CONTEXT_FULL)) == (409, "conflict")
        assert await refused(episodes.step("a", 2, say("x"))) == (409, "over")
        assert vars(world.made[0])["concluded"] == 1

    run(body)


def test_closing_waits_for_running_requests_up_to_finish_s_and_refuses_the_rest() -> None:
    async def body(world: World, episodes: Episodes) -> None:
        await asyncio.gather(*(episodes.create(id, TASK) for id in "abc"))
        quick = asyncio.ensure_future(episodes.step("a", 1, say("x")))
        await asyncio.sleep(0.9)
        slow = asyncio.ensure_future(episodes.step("b", 1, say("x")))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(episodes.close(finish_s=0.5))
        assert (await quick).status_code == 200
        assert await refused(slow) == (503, "draining")
        assert now() == pytest.approx(2.4)
        await closing
        assert await refused(episodes.step("c", 1, say("x"))) == (404, "unknown")

    run(body)


@settings(max_examples=examples(150))
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3), st.booleans()), max_size=12))
def test_no_repeated_step_request_is_executed_twice(plan: Sequence[tuple[str, int, bool]]) -> None:
    """Each step of two episodes is sent up to four times, concurrently or in sequence, and some are cancelled."""

    async def body(world: World, episodes: Episodes) -> None:
        said: dict[str, list[str]] = {"a": [], "b": []}
        await asyncio.gather(episodes.create("a", TASK), episodes.create("b", TASK))
        for number, (id, more, at_once) in enumerate(plan):
            text, step = str(number), len(said[id]) + 1
            said[id].append(text)
            calls = [lambda: episodes.step(id, step, say(text))] * (1 + more)  # noqa: B023
            if at_once:
                tries = [asyncio.ensure_future(call()) for call in calls]
                await asyncio.sleep(0.5)
                for given_up in tries[1:]:
                    given_up.cancel()
                answers = [await tries[0]]
            else:
                answers = [await call() for call in calls]
            shown = {json.loads(answer.body)["observation"]["messages"][0]["content"] for answer in answers}
            assert shown == {" ".join(said[id])}
        assert {id: e.heard for id, e in zip("ab", world.made, strict=True)} == said

    run(body, idle_timeout_s=1e6)
