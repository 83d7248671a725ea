"""A channel holds so many items and no more, keeps their order, and tells everybody that it was closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gleanrl.embodied.channel import Closed, LocalChannel


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


async def settle() -> None:
    """Let everybody go as far as they get."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_who_puts_waits_for_room_and_who_takes_for_items() -> None:
    async def test() -> None:
        channel, done = LocalChannel[int](2), list[int]()

        async def put() -> None:
            for number in range(5):
                await channel.put(number)
                done.append(number)

        putting = asyncio.create_task(put())
        await settle()
        assert done == [0, 1]
        assert channel.size() == 2
        assert await channel.get() == 0
        await settle()
        assert done == [0, 1, 2]
        assert [await channel.get() for _ in range(4)] == [1, 2, 3, 4]
        await putting
        taking = asyncio.create_task(channel.get())
        await settle()
        assert not taking.done()
        await channel.put(9)
        assert await taking == 9

    run(test)


def test_keys_are_queues_of_their_own() -> None:
    async def test() -> None:
        channel = LocalChannel[str](1)
        await channel.put("a", key="left")
        await channel.put("b", key="right")  # has room although the other is full
        assert await channel.get(key="right") == "b"
        assert await channel.get(key="left") == "a"
        assert channel.size(key="left") == channel.size(key="right") == 0

    run(test)


def test_closing_wakes_who_waits_and_what_is_in_it_can_still_be_taken() -> None:
    async def test() -> None:
        channel, empty = LocalChannel[int](1), LocalChannel[int](1)
        await channel.put(1)
        putting, taking = asyncio.create_task(channel.put(2)), asyncio.create_task(empty.get())
        await settle()
        channel.close()
        empty.close()
        with pytest.raises(Closed):
            await putting
        with pytest.raises(Closed):
            await taking
        assert await channel.get() == 1
        with pytest.raises(Closed):
            await channel.get()
        with pytest.raises(Closed):
            await channel.put(3)

    run(test)


def test_an_error_reaches_who_takes() -> None:
    async def test() -> None:
        channel = LocalChannel[int](1)
        taking = asyncio.create_task(channel.get())
        await settle()
        channel.close(ZeroDivisionError("of the sampler"))
        channel.close()  # changes nothing
        with pytest.raises(ZeroDivisionError, match="of the sampler"):
            await taking

    run(test)


def test_a_cancelled_taker_takes_nothing_along() -> None:
    async def test() -> None:
        channel = LocalChannel[int](1)
        given_up, taking = asyncio.create_task(channel.get()), asyncio.create_task(channel.get())
        await settle()
        given_up.cancel()
        await channel.put(5)
        assert await taking == 5

    run(test)
