"""Time that a service had, without the time in which nobody listened."""

from __future__ import annotations

import asyncio
import time

import pytest

from gleanrl.rewards.clock import Clock
from gleanrl.simulate import virtual_time


def outcome(work_s: float, limit_s: float, stall_s: float) -> tuple[bool, float]:
    """Whether work of so many seconds ends within the limit, the loop standing still meanwhile; and seconds taken."""

    async def timed() -> bool:
        try:
            async with Clock(limit_s):
                await asyncio.sleep(work_s)
                for _ in range(5):  # a client needs some turns to read what it got
                    await asyncio.sleep(0)
                return True
        except TimeoutError:
            return False

    async def main() -> tuple[bool, float]:
        working = asyncio.create_task(timed())
        await asyncio.sleep(0.01)
        started = time.monotonic()
        time.sleep(stall_s)  # noqa: ASYNC251 - stands still
        return await working, time.monotonic() - started

    return asyncio.run(main())


def test_an_answer_that_came_while_the_loop_stood_still_counts() -> None:
    ended, _ = outcome(work_s=0.05, limit_s=0.3, stall_s=0.6)
    assert ended


def test_what_does_not_end_is_cut_off_once_the_loop_turns_again() -> None:
    ended, seconds = outcome(work_s=60.0, limit_s=0.3, stall_s=0.6)
    assert not ended
    assert 0.6 <= seconds < 30


def test_a_loop_that_stands_still_again_and_again_costs_no_answer() -> None:
    """Ten turns of a quarter of a second each, as where thousands of answers are read: the answer needs eight."""

    async def main() -> bool:
        async def timed() -> bool:
            try:
                async with Clock(0.1):
                    for _ in range(8):
                        await asyncio.sleep(0)
                    return True
            except TimeoutError:
                return False

        working = asyncio.create_task(timed())
        for _ in range(10):
            await asyncio.sleep(0)
            time.sleep(0.25)  # noqa: ASYNC251 - stands still
        return await working

    assert asyncio.run(main())


@pytest.mark.parametrize(("work", "ends"), [(4.9, True), (5.1, False)])
def test_without_a_stall_it_is_exact(work: float, ends: bool) -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        clock = Clock(5.0)
        try:
            async with clock:
                await asyncio.sleep(work)
        except TimeoutError:
            assert not ends
        assert clock.expired() is not ends
        return loop.time()

    assert virtual_time.run(main()) == pytest.approx(min(work, 5.0))


def test_who_is_cancelled_from_outside_is_cancelled() -> None:
    async def main() -> None:
        async def wait() -> None:
            async with Clock(5.0):
                await asyncio.Event().wait()

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    virtual_time.run(main())
