"""Tests of virtual time: asyncio code runs in the same order and with the same times, but without waiting."""

from __future__ import annotations

import asyncio
import time

import pytest

from gleanrl.simulate import virtual_time


def test_sleeping_for_days_takes_no_real_time_and_ends_at_the_exact_virtual_time() -> None:
    async def main() -> float:
        await asyncio.gather(asyncio.sleep(86_400), asyncio.sleep(200_000.5), asyncio.sleep(1))
        return asyncio.get_running_loop().time()

    started = time.perf_counter()
    assert virtual_time.run(main()) == 200_000.5
    assert time.perf_counter() - started < 5


def test_timers_fire_in_order() -> None:
    async def main() -> list[float]:
        seen = []

        async def note(delay: float) -> None:
            await asyncio.sleep(delay)
            seen.append(delay)

        await asyncio.gather(*map(note, [0.3, 0.1, 1e-9, 0.2, 7.0, 0.0]))
        return seen

    assert virtual_time.run(main()) == [0.0, 1e-9, 0.1, 0.2, 0.3, 7.0]


def test_timeouts_follow_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(60)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 30


def test_a_deadlock_raises_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.Deadlock, match="every task waits"):
        virtual_time.run(main())


def test_a_call_in_a_thread_takes_no_virtual_time() -> None:
    async def main() -> tuple[int, float]:
        with pytest.raises(ValueError, match="invalid literal"):
            await asyncio.to_thread(int, "x")
        return await asyncio.to_thread(int, "3"), asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == (3, 0.0)
