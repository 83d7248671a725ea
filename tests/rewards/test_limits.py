"""Tests of `gleanrl.rewards.limits.RateLimiter` in virtual time: the limits hold in every window of a minute, and the
lanes do not delay each other."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.rewards.limits import Permit, RateLimiter
from gleanrl.simulate import virtual_time
from tests.rewards.worlds import busiest_window
from tests.strategies import examples

LANES = {"train": (4, 0.75), "eval": (2, 0.25)}


@settings(max_examples=examples(40))
@given(
    per_minute=st.integers(1, 400),
    arrivals=st.lists(st.floats(0, 90), min_size=1, max_size=60),
    slots=st.integers(1, 20),
)
def test_requests_per_minute_holds_in_every_window(per_minute: int, arrivals: list[float], slots: int) -> None:
    limiter = RateLimiter({"train": (slots, 1.0)}, requests_per_minute=per_minute)
    lane, passed = limiter.lanes["train"], []

    async def one(arrival: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(arrival)
        await limiter.acquire(Permit("train"))
        assert lane.in_flight <= slots
        passed.append((loop.time(), 1.0))
        await asyncio.sleep(0.1)
        limiter.release(lane)

    async def main() -> None:
        await asyncio.gather(*map(one, arrivals))

    virtual_time.run(main())
    assert len(passed) == len(arrivals)
    assert busiest_window(passed) <= per_minute
    assert limiter.in_flight == 0


@settings(max_examples=examples(40))
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=80),
    corrections=st.lists(st.integers(-40, 40), min_size=80, max_size=80),
)
def test_tokens_per_minute_counts_the_corrected_numbers_of_tokens(sizes: list[int], corrections: list[int]) -> None:
    limiter = RateLimiter({"train": (1, 1.0)}, tokens_per_minute=1000)
    lane, passed = limiter.lanes["train"], []

    async def main() -> None:
        for size, correction in zip(sizes, corrections, strict=False):
            really = max(size + correction, 0)
            await limiter.acquire(Permit("train"), lambda size=size: size)
            passed.append((asyncio.get_running_loop().time(), float(really)))
            limiter.correct(really - size)
            limiter.release(lane)

    virtual_time.run(main())
    # the last request of a window may turn out up to 40 tokens larger than its estimate
    assert busiest_window(passed) <= 1000 + 40


def test_at_least_ninety_percent_of_a_rate_can_be_used() -> None:
    limiter = RateLimiter({"train": (1000, 1.0)}, requests_per_minute=600)

    async def main() -> float:
        await asyncio.gather(*(limiter.acquire(Permit("train")) for _ in range(6000)))
        return asyncio.get_running_loop().time()

    limiter.lanes["train"].slots = 10_000
    assert 10 * 60 * 0.9 < virtual_time.run(main()) < 10 * 60 * 1.1


def test_a_request_larger_than_the_burst_passes_and_delays_the_next_ones() -> None:
    limiter = RateLimiter({"train": (9, 1.0)}, tokens_per_minute=600)  # 9.5 tokens a second

    async def main() -> list[float]:
        times = []
        for tokens in (300, 1, 1):
            await limiter.acquire(Permit("train"), lambda tokens=tokens: tokens)
            times.append(asyncio.get_running_loop().time())
        return times

    first, second, third = virtual_time.run(main())
    assert first == 0
    assert second == pytest.approx((300 - 30 + 1) / 9.5, rel=0.01)
    assert third - second == pytest.approx(1 / 9.5, rel=0.01)


def test_lanes_divide_a_rate_by_their_shares_whatever_waits_in_the_other_lane() -> None:
    limiter = RateLimiter({"train": (10_000, 0.75), "eval": (10_000, 0.25)}, requests_per_minute=60)
    passed: list[str] = []

    async def one(name: str) -> None:
        await limiter.acquire(Permit(name))
        passed.append(name)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(one("eval"))
            await asyncio.sleep(30)
            before = len(passed)
            for _ in range(30):
                group.create_task(one("train"))
            await asyncio.sleep(40)
            mixed = passed[before : before + 40]
            assert 27 <= mixed.count("train") <= 30  # the share of 0.75, although 170 evaluation requests came before

    virtual_time.run(main())
    assert passed.count("eval") == 200


def test_each_lane_has_its_own_slots_and_shared_slots_follow_the_lane_shares() -> None:
    async def main() -> None:
        limiter = RateLimiter(LANES)
        for _ in range(4):
            await limiter.acquire(Permit("train"))
        full = asyncio.create_task(limiter.acquire(Permit("train")))
        await limiter.acquire(Permit("eval"))  # does not wait
        await asyncio.sleep(1)
        assert not full.done()
        limiter.release(limiter.lanes["train"])
        await full
        shared = RateLimiter(LANES, slots=1)
        order: list[str] = []

        async def one(name: str) -> None:
            await shared.acquire(Permit(name))
            order.append(name)
            await asyncio.sleep(1)
            shared.release(shared.lanes[name])

        await asyncio.gather(*(one("eval") for _ in range(8)), *(one("train") for _ in range(6)))
        assert order[:9].count("train") == 6

    virtual_time.run(main())


def test_cancelled_waiters_hold_no_permit() -> None:
    async def main() -> None:
        limiter = RateLimiter({"train": (1, 1.0)}, requests_per_minute=60)
        lane = limiter.lanes["train"]
        await limiter.acquire(Permit("train"))
        waiting = [asyncio.create_task(limiter.acquire(Permit("train"))) for _ in range(3)]
        await asyncio.sleep(5)
        waiting[0].cancel()
        limiter.release(lane)  # lets the second through ...
        waiting[1].cancel()  # ... which is cancelled in the same instant
        await asyncio.wait(waiting[:2])
        await waiting[2]
        assert (limiter.queued, limiter.in_flight, lane.in_flight) == (0, 1, 1)
        limiter.release(lane)
        assert limiter.in_flight == 0

    virtual_time.run(main())
