"""Tests of `RewardAgent` in virtual time with a service that is unreachable for a while or requests long waits, and
with identical requests in both lanes. No reward is lost, and no call waits for ever."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from gleanrl.rewards import Fatal, Request, Retryable, RewardAgent
from gleanrl.types import Score
from gleanrl.utils.errors import UserError
from tests.rewards.test_agent import ask, now, run
from tests.rewards.worlds import busiest_window

Outage = tuple[float, float]


class Leaving:
    """A service that answers after 1 s. In an outage (from, to) it refuses calls, and calls under way fail."""

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
    """Start ``count`` requests, one ``every`` seconds, without waiting for the earlier ones; return their scores."""
    asked = []
    for n in range(count):
        asked.append(asyncio.create_task(ask(agent, n)))
        await asyncio.sleep(every)
    return list(await asyncio.gather(*asked))


@pytest.mark.parametrize("error", [ConnectionRefusedError("gone"), Retryable("gone", cause="unreachable")])
def test_an_outage_of_half_a_minute_loses_no_reward(error: Exception) -> None:
    service = Leaving((20.5, 50.5), error=error)

    async def use(agent: RewardAgent) -> None:
        scores = await one_after_another(agent, 400, 0.1)
        assert [score.value for score in scores] == list(range(400))
        metrics = agent.metrics()
        assert metrics["service/unreachable"] == service.refused > 400
        assert metrics["service/scored"] == 400
        assert not [name for name in metrics if name.startswith("service/failed")]

    run(service, use, max_concurrency=400)


@pytest.mark.parametrize("cause", ["rate_limit", "unavailable"])
def test_a_service_that_refuses_everything_for_a_while_loses_no_reward(cause: str) -> None:
    """It refuses from the start, as one that loads a model, and again later."""
    service = Leaving((0.0, 12.0), (40.5, 60.5), error=Retryable("come back later", cause=cause))

    async def use(agent: RewardAgent) -> None:
        scores = await one_after_another(agent, 800, 0.1)
        assert [score.value for score in scores] == list(range(800))

    run(service, use, max_concurrency=800)


def test_refusals_of_single_requests_count_as_attempts() -> None:
    """A request may be refused because it breaks the service: it must not hold its group for ten minutes."""

    async def reward(request: Request) -> float:
        await asyncio.sleep(1.0)
        if int(request.response) % 10 == 3:
            raise Retryable("out of memory", cause="unavailable")
        return 1.0

    async def use(agent: RewardAgent) -> float:
        scores = await one_after_another(agent, 100, 1.0)
        assert [n for n, score in enumerate(scores) if not score.valid] == list(range(3, 100, 10))
        return now()

    assert run(reward, use) < 100 + 30


def test_requests_that_are_refused_alone_hold_up_a_run_once_at_most() -> None:
    """With one request in flight, a service that refuses it looks like one that refuses everything."""

    async def reward(request: Request) -> float:
        await asyncio.sleep(1.0)
        if int(request.response) % 10 == 3:
            raise Retryable("out of memory", cause="unavailable")
        return 1.0

    async def use(agent: RewardAgent) -> list[float]:
        seconds = []
        for n in range(30):
            begun = now()
            assert (await ask(agent, n)).valid == (n % 10 != 3)
            seconds.append(now() - begun)
        return seconds

    seconds = run(reward, use, down_after_s=300.0)
    assert 300 <= seconds[3] < 300 + 60
    assert max(seconds[4:]) < 30


def test_after_an_outage_no_request_waits_longer_than_the_outage_lasted() -> None:
    service = Leaving((10.5, 13.5))

    async def use(agent: RewardAgent) -> float:
        scores = await one_after_another(agent, 2_000, 0.01)
        assert [score.value for score in scores] == list(range(2_000))
        assert service.refused > 300
        return now()

    # the interrupted requests are retried at most 3 s after the outage, before the last new request starts at 20 s
    assert run(service, use, max_concurrency=2_000) <= 20.0 + 1.0


def test_refused_connections_do_not_count_as_attempts_but_other_failures_do() -> None:
    class Reward(Leaving):
        async def __call__(self, request: Request) -> float:
            await super().__call__(request)
            if request.response == "13":
                tried.append(now())
                raise Retryable("broken", after_s=6.5, cause="server")
            return float(request.response)

    service, tried = Reward((20.0, 50.0)), []

    async def use(agent: RewardAgent) -> None:
        scores = await one_after_another(agent, 20, 1.0)
        assert [n for n, score in enumerate(scores) if not score.valid] == [13]
        assert scores[13].explanation == "broken"

    run(service, use, attempts=3)
    assert len(tried) == 3
    assert tried[0] < 20
    assert tried[-1] > 50


def test_a_service_that_never_answered_stops_the_run_within_seconds() -> None:
    service = Leaving((0.0, 1e9))

    async def use(agent: RewardAgent) -> float:
        results = await asyncio.gather(*(ask(agent, n) for n in range(100)), return_exceptions=True)
        assert any(isinstance(result, UserError) and "nobody is there" in str(result) for result in results)
        return now()

    assert run(service, use) < 8  # four waits of up to 0.5, 1, 2 and 4 s


def test_a_service_that_stays_unreachable_stops_the_run_after_down_after_s() -> None:
    service = Leaving((20.0, 1e9))

    async def use(agent: RewardAgent) -> float:
        results = await asyncio.gather(*(ask(agent, n) for n in range(200)), return_exceptions=True)
        assert all(isinstance(result, UserError) and "nobody is there" in str(result) for result in results[40:])
        return now()

    assert 320 <= run(service, use, max_concurrency=2, down_after_s=300.0) < 320 + 60


def test_a_request_that_alone_is_refused_fails_after_down_after_s() -> None:
    """With several backends, one may be gone for ever: the others answer, so the service as a whole is not down."""

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


def test_each_long_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    service = Leaving((20.0, 70.0), (100.0, 105.0), (150.0, 190.0))

    async def use(agent: RewardAgent) -> None:
        await one_after_another(agent, 250, 1.0)

    with caplog.at_level(logging.WARNING):
        run(service, use, max_backoff_s=2.0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(text.startswith("the reward has only failed for 1") and "nobody is there" in text for text in said)


# --- a service that requests a long wait --------------------------------------------------------------
class Busy:
    """Rejects each request ``times`` times with a retry-after of ``after_s`` seconds, then scores it."""

    def __init__(self, after_s: float, times: int = 1) -> None:
        self.after_s, self.times, self.asked = after_s, times, Counter[str]()

    async def __call__(self, request: Request) -> float:
        await asyncio.sleep(1.0)
        self.asked[request.response] += 1
        if self.asked[request.response] <= self.times:
            raise Retryable("quota of the day", self.after_s, cause="rate_limit")
        return 1.0


def test_a_retry_after_of_a_day_fails_at_once_and_the_explanation_names_it() -> None:
    async def use(agent: RewardAgent) -> float:
        score = await ask(agent, 1)
        assert all(said in (score.explanation or "") for said in ("86400 s", "600 s", "quota of the day"))
        assert agent.metrics()["service/failed/rate_limit"] == 1
        return now()

    assert run(Busy(86400.0), use) == 1.0


def test_a_retry_after_of_a_day_for_every_request_stops_the_run() -> None:
    async def use(agent: RewardAgent) -> float:
        results = await asyncio.gather(*(ask(agent, n) for n in range(64)), return_exceptions=True)
        assert any(isinstance(result, UserError) and "86400 s" in str(result) for result in results)
        return now()

    assert run(Busy(86400.0), use) < 10.0


def test_a_retry_after_of_minutes_is_logged_once_and_obeyed(caplog: pytest.LogCaptureFixture) -> None:
    async def use(agent: RewardAgent) -> float:
        scores = await asyncio.gather(*(ask(agent, n) for n in range(20)))
        assert all(score.valid for score in scores)
        return now()

    with caplog.at_level(logging.WARNING):
        assert 302 <= run(Busy(300.0), use) < 304
    assert [record.getMessage() for record in caplog.records] == [
        "the reward service asks to be left alone for 300 s; the requests wait: quota of the day"
    ]


# --- identical requests in both lanes -----------------------------------------------------------------
@pytest.mark.parametrize(("first", "then"), [("eval", "train"), ("train", "eval")])
def test_a_request_made_in_both_lanes_runs_in_the_lane_that_is_free_first(first: str, then: str) -> None:
    asked = Counter[str]()

    async def reward(request: Request) -> float:
        asked[request.response] += 1
        await asyncio.sleep(1.0)
        return 1.0

    async def use(agent: RewardAgent) -> float:
        queue = [asyncio.create_task(ask(agent, n, first)) for n in range(10)]
        await asyncio.sleep(0.25)
        await ask(agent, 9, then)
        ended = now()
        await asyncio.gather(*queue)
        return ended

    assert run(reward, use, max_concurrency=1, eval_concurrency=1) == 1.25
    assert set(asked.values()) == {1}


@pytest.mark.parametrize("cancelled", ["first", "both"])
def test_cancelling_a_request_queued_in_both_lanes_frees_both_queues(cancelled: str) -> None:
    async def reward(request: Request) -> float:
        await asyncio.sleep(1.0)
        return 1.0

    async def use(agent: RewardAgent) -> None:
        blocks = [asyncio.create_task(ask(agent, n, lane)) for n, lane in enumerate(("train", "eval"))]
        await asyncio.sleep(0.1)
        waiting = [asyncio.create_task(ask(agent, 7, lane)) for lane in ("train", "eval")]
        await asyncio.sleep(0.1)
        assert agent._limiter.queued == 1
        for task in waiting if cancelled == "both" else waiting[:1]:
            task.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(results[1], Score) == (cancelled == "first")
        await asyncio.gather(*blocks)
        assert not any(lane.waiting or lane.in_flight for lane in agent._limiter.lanes.values())
        assert (await ask(agent, 8)).valid

    run(reward, use, max_concurrency=1, eval_concurrency=1)


# --- tokens of failed tries----------------------------------------------------------------------------
def test_tokens_per_minute_counts_the_tokens_of_failed_tries() -> None:
    times: list[float] = []

    async def reward(request: Request) -> float:
        times.append(now())
        raise Fatal("no score", cost={"cost/prompt_tokens": 90, "cost/completion_tokens": 10})

    async def use(agent: RewardAgent) -> float:
        for n in range(100):
            await ask(agent, n)
        assert agent.metrics()["service/prompt_tokens"] == 9000
        return now()

    assert run(reward, use, tokens_per_minute=1000, max_failed_fraction=1.0, down_after_s=1e9) >= 9 * 60
    assert busiest_window([(at, 100.0) for at in times]) <= 1000 + 100
