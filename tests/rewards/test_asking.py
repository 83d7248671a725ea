"""A service that goes away and comes back, in virtual time: nothing is lost and nothing waits for ever."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from gleanrl.errors import UserError
from gleanrl.rewards import Request, Retryable, RewardAgent
from gleanrl.types import Score
from tests.rewards.test_agent import ask, now, run

Outage = tuple[float, float]


class Leaving:
    """Answers in a second and accepts nobody in an ``outage`` (from, to); what is under way then is lost."""

    version = "leaving-1"

    def __init__(self, *outages: Outage, error: Exception | None = None) -> None:
        self.outages = outages
        self.error = error or ConnectionRefusedError("nobody is there")
        self.refused = 0

    async def __call__(self, request: Request) -> float:
        if self.away():
            self.refused += 1
            raise self.error
        await asyncio.sleep(1.0)
        if self.away():
            raise ConnectionResetError("it went away")
        return float(request.response)

    def away(self) -> bool:
        return any(start <= now() < end for start, end in self.outages)


async def one_after_another(agent: RewardAgent, count: int, every: float) -> list[Score]:
    """Asked at intervals, each without waiting for those before."""
    asked = []
    for n in range(count):
        asked.append(asyncio.create_task(ask(agent, n)))
        await asyncio.sleep(every)
    return list(await asyncio.gather(*asked))


@pytest.mark.parametrize("error", [ConnectionRefusedError("gone"), Retryable("gone", cause="unreachable")])
def test_half_a_minute_without_the_service_costs_no_reward(error: Exception) -> None:
    service = Leaving((20.5, 50.5), error=error)

    async def use(agent: RewardAgent) -> None:
        scores = await one_after_another(agent, 400, 0.1)
        assert [score.value for score in scores] == list(range(400))
        metrics = agent.metrics()
        assert metrics["service/unreachable"] == service.refused > 400
        assert metrics["service/scored"] == 400
        assert not [name for name in metrics if name.startswith("service/failed")]

    run(service, use, max_concurrency=400)


def test_other_failures_still_count_while_tries_that_find_nobody_do_not() -> None:
    class Reward(Leaving):
        async def __call__(self, request: Request) -> float:
            await super().__call__(request)
            if request.response == "13":
                tried.append(now())
                raise Retryable("broken", cause="server")
            return float(request.response)

    service, tried = Reward((20.0, 50.0)), []

    async def use(agent: RewardAgent) -> None:
        scores = await one_after_another(agent, 20, 1.0)
        assert [n for n, score in enumerate(scores) if not score.valid] == [13]
        assert scores[13].explanation == "broken"

    run(service, use, attempts=3, backoff_s=10.0)
    assert len(tried) == 3
    assert tried[0] < 20
    assert tried[-1] > 50


def test_a_service_that_never_answered_is_not_waited_for() -> None:
    service = Leaving((0.0, 1e9))

    async def use(agent: RewardAgent) -> float:
        results = await asyncio.gather(*(ask(agent, n) for n in range(100)), return_exceptions=True)
        assert any(isinstance(result, UserError) and "nobody is there" in str(result) for result in results)
        return now()

    assert run(service, use) < 8  # four waits of up to 0.5, 1, 2 and 4 s


def test_a_service_that_stays_away_stops_the_run_in_time() -> None:
    service = Leaving((20.0, 1e9))

    async def use(agent: RewardAgent) -> float:
        results = await asyncio.gather(*(ask(agent, n) for n in range(200)), return_exceptions=True)
        assert all(isinstance(result, UserError) and "nobody is there" in str(result) for result in results[40:])
        return now()

    assert 320 <= run(service, use, max_concurrency=2, down_after_s=300.0) < 320 + 60


def test_what_alone_finds_nobody_ends_too() -> None:
    """One backend of several may be gone for ever: the others answer, so the service is not down."""

    class Reward(Leaving):
        async def __call__(self, request: Request) -> float:
            if request.response == "13":
                raise ConnectionRefusedError("nobody is there")
            return await super().__call__(request)

    async def use(agent: RewardAgent) -> tuple[Score, float]:
        others = asyncio.create_task(one_after_another(agent, 13, 100.0))
        await asyncio.sleep(5.0)
        score = await ask(agent, 13)
        ended = now()
        assert all(other.valid for other in await others)
        return score, ended

    score, ended = run(Reward(), use, down_after_s=300.0)
    assert not score.valid
    assert 305 <= ended < 305 + 60


@pytest.mark.parametrize("hangs", [False, True])
def test_an_answer_that_came_while_the_loop_stood_still_counts(hangs: bool) -> None:
    """In real time: the answer and the end of its time are seen in the same turn of the loop."""
    asked: list[str] = []

    async def reward(request: Request) -> float:
        asked.append(request.response)
        if hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0.05)
        for _ in range(5):  # a client needs some turns to read what it got
            await asyncio.sleep(0)
        return 1.0

    async def main() -> tuple[Score, float]:
        async with RewardAgent(reward, timeout_s=0.2, attempts=1) as agent:
            scoring = asyncio.create_task(ask(agent, "x"))
            started = now()
            await asyncio.sleep(0.01)
            time.sleep(0.5)  # noqa: ASYNC251 - stands still
            return await scoring, now() - started

    score, seconds = asyncio.run(main())
    assert score.valid == (not hangs)
    assert asked == ["x"]
    assert seconds < 30


def test_a_long_silence_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    service = Leaving((20.0, 70.0), (100.0, 105.0), (150.0, 190.0))

    async def use(agent: RewardAgent) -> None:
        await one_after_another(agent, 250, 1.0)

    with caplog.at_level(logging.WARNING):
        run(service, use, max_backoff_s=2.0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(text.startswith("the reward has only failed for 1") and "nobody is there" in text for text in said)
