"""Tests of `RewardAgent.score_groups` in virtual time: each group is yielded as soon as its last reward is known,
groups are read from the source only while there is room, and errors reach the consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.rewards import Request, RewardAgent
from gleanrl.simulate import virtual_time
from gleanrl.types import Message
from gleanrl.utils.errors import UserError
from tests.rewards.worlds import make_task, make_trajectory
from tests.strategies import examples

TASK = make_task()


async def sleep_then_score(request: Request) -> float:
    """Sleep for the number of seconds that is written in the response, and return this number as the score."""
    await asyncio.sleep(float(request.response))
    return float(request.response)


def group(*seconds: float) -> list[Any]:
    """Return a group with one response for each number of seconds."""
    return [(TASK, str(s)) for s in seconds]


async def _all(results: AsyncIterator[Any]) -> list[Any]:
    return [result async for result in results]


def now() -> float:
    return asyncio.get_running_loop().time()


@settings(max_examples=examples(30))
@given(st.lists(st.lists(st.floats(0, 50), max_size=5), max_size=12))
def test_each_group_is_yielded_as_soon_as_its_last_reward_is_known(groups: list[list[float]]) -> None:
    async def main() -> None:
        seen = []
        async with RewardAgent(sleep_then_score, timeout_s=100) as agent:
            async for index, scores in agent.score_groups(group(*seconds) for seconds in groups):
                assert [score.value for score in scores] == groups[index]
                assert now() == pytest.approx(max(groups[index], default=0.0), abs=1e-6)
                seen.append(index)
        assert sorted(seen) == list(range(len(groups)))

    virtual_time.run(main())


def test_a_group_may_hold_texts_message_lists_and_trajectories() -> None:
    async def main() -> None:
        conversation = [*TASK.prompt, Message(role="assistant", content="2")]
        items = [(TASK, "1"), (TASK, conversation), (TASK, make_trajectory(TASK, "3"))]
        async with RewardAgent(sleep_then_score) as agent:
            results = [scores async for _, scores in agent.score_groups([items], lane="eval")]
        assert [score.value for score in results[0]] == [1.0, 2.0, 3.0]

    virtual_time.run(main())


def test_an_endless_source_is_read_only_as_far_as_max_concurrency_allows() -> None:
    taken = 0

    def endless() -> Iterator[list[Any]]:
        nonlocal taken
        while True:
            taken += 1
            yield group(1 + taken % 7, 1 + taken % 11)

    async def main() -> None:
        got = 0
        async with RewardAgent(sleep_then_score, max_concurrency=20, cache=0) as agent:
            async for _ in agent.score_groups(endless()):
                got += 1
                # at most 2 x max_concurrency = 40 members are in work, which are 20 groups of two
                assert taken - got <= 21
                if got == 500:
                    break
            await asyncio.sleep(0.1)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())


def test_a_slow_consumer_limits_how_far_the_source_is_read_ahead() -> None:
    taken = 0

    async def source() -> AsyncIterator[list[Any]]:
        nonlocal taken
        for _ in range(200):
            taken += 1
            yield group(1)

    async def main() -> None:
        async with RewardAgent(sleep_then_score, max_concurrency=5, cache=0) as agent:
            count = 0
            async for _ in agent.score_groups(source()):
                await asyncio.sleep(10)
                count += 1
                assert taken <= count + 11
            assert count == 200

    virtual_time.run(main())


def test_a_slow_source_is_awaited_and_its_exception_reaches_the_consumer() -> None:
    async def late() -> AsyncIterator[list[Any]]:
        yield group(1)
        await asyncio.sleep(100)
        yield group(2)
        raise LookupError("no more rows")

    async def main() -> None:
        seen = []

        async def consume() -> None:
            async for index, _ in agent.score_groups(late()):
                seen.append((index, now()))

        async with RewardAgent(sleep_then_score) as agent:
            with pytest.raises(LookupError, match="no more rows"):
                await consume()
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}
        assert seen == [(0, 1.0)]

    virtual_time.run(main())


def test_an_exception_of_the_source_is_raised_although_the_consumer_was_busy_when_it_came() -> None:
    async def broken() -> AsyncIterator[list[Any]]:
        yield group(1)
        await asyncio.sleep(2)
        raise LookupError("no more rows")

    async def main() -> None:
        seen = []

        async def consume() -> None:
            async for index, _ in agent.score_groups(broken()):
                seen.append(index)
                await asyncio.sleep(10)

        async with RewardAgent(sleep_then_score) as agent:
            with pytest.raises(LookupError, match="no more rows"):
                await consume()
        assert seen == [0]

    virtual_time.run(main())


def test_a_source_that_cancels_itself_raises_an_error() -> None:
    async def broken() -> AsyncIterator[list[Any]]:
        yield group(1)
        raise asyncio.CancelledError

    async def main() -> None:
        async with RewardAgent(sleep_then_score) as agent:
            with pytest.raises(RuntimeError, match="the source of the groups cancelled itself"):
                await asyncio.wait_for(_all(agent.score_groups(broken())), 60)

    virtual_time.run(main())


def test_an_outage_is_raised_to_the_consumer() -> None:
    async def broken(request: Request) -> float:
        raise ConnectionRefusedError("port 1")

    async def main() -> None:
        async with RewardAgent(broken, attempts=1) as agent:
            results = agent.score_groups([group(n) for n in range(100)])
            with pytest.raises(UserError, match=r"100% of the last 32 rewards failed.*port 1"):
                await asyncio.wait_for(_all(results), 1000)

    virtual_time.run(main())


def test_a_source_that_cannot_be_iterated_raises_its_error() -> None:
    class Rows:
        def __iter__(self) -> Iterator[Any]:
            raise FileNotFoundError("rows.jsonl")

    async def main() -> None:
        async with RewardAgent(sleep_then_score) as agent:
            with pytest.raises(FileNotFoundError):
                await asyncio.wait_for(_all(agent.score_groups(Rows())), 5)

    virtual_time.run(main())
