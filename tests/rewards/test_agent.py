"""Tests of `RewardAgent` in virtual time: limits, retries, the cache, cancellation, hedging, lanes, outages,
group post-processing and metrics."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards import Fatal, NotApplicable, Request, Retryable, RewardAgent, Scorer
from gleanrl.rewards.adapter import load_reward
from gleanrl.rewards.compose import Weighted
from gleanrl.rewards.text import Format
from gleanrl.simulate import virtual_time
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError
from tests.rewards.worlds import Service, busiest_window, make_task, make_trajectory, stream
from tests.strategies import examples

TASK = make_task()


class GradersPanic(BaseException):
    """An error of native code, such as the panics of libraries in Rust, which do not derive from `Exception`."""


async def ask(agent: RewardAgent, answer: Any, lane: Any = "train", task: Task = TASK) -> Score:
    return await agent.lane(lane).score(task, make_trajectory(task, str(answer)))


def run(reward: Any, use: Callable[[RewardAgent], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    """Return the result of ``use(agent)``, after a check that no job, permit or asyncio task is left over."""

    async def main() -> Any:
        async with RewardAgent(reward, **options) as agent:
            result = await use(agent)
            # one iteration of the event loop, so that cancelled calls can end
            await asyncio.sleep(0)
            assert (agent._jobs, agent._jobs_by_key) == (set(), {})
        assert agent._limiter.in_flight == agent._limiter.queued == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return virtual_time.run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


# --- concurrency and limits ---------------------------------------------------------------------
def test_ten_thousand_slow_requests_take_as_long_as_the_slowest() -> None:
    service = Service(latency=(1.0, 4.0))

    async def use(agent: RewardAgent) -> float:
        scores = await asyncio.gather(*(ask(agent, n) for n in range(10_000)))
        assert [score.value for score in scores] == list(range(10_000))
        return now()

    assert run(service, use, max_concurrency=10_000) < 4.01
    assert service.most_active == 10_000


@settings(max_examples=examples(15))
@given(
    slots=st.integers(1, 12),
    eval_slots=st.integers(1, 6),
    per_minute=st.one_of(st.none(), st.integers(20, 600)),
    seed=st.integers(0, 10_000),
)
def test_slots_and_requests_per_minute_are_never_exceeded(
    slots: int, eval_slots: int, per_minute: int | None, seed: int
) -> None:
    faults = {str(n): [Retryable("busy")] * stream(seed, n).randint(0, 3) for n in range(60)}
    service = Service(latency=(0.1, 5.0), faults=faults)

    async def use(agent: RewardAgent) -> None:
        names = [(n, "eval" if stream(seed, n).random() < 0.3 else "train") for n in range(60)]
        scores = await asyncio.gather(*(ask(agent, n, lane) for n, lane in names))
        assert [score.value for score in scores] == list(range(60))

    run(service, use, max_concurrency=slots, eval_concurrency=eval_slots, requests_per_minute=per_minute,
        down_after_s=1e9)  # fmt: skip
    assert service.most_active <= slots + eval_slots
    if per_minute is not None:
        assert busiest_window([(at, 1.0) for at, _ in service.calls]) <= per_minute


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 10_000))
def test_an_unreliable_service_misassigns_no_reward_and_no_failure_counts_as_zero(seed: int) -> None:
    """Of the calls, a fifth raise an error, one in twenty hangs, and one in a hundred returns NaN."""
    draws = {str(n): [stream(seed, n, call).random() for call in range(3)] for n in range(1, 601)}

    def fault(draw: float) -> Any:
        if draw < 0.20:
            return Retryable("500", cause="server") if draw < 0.15 else ValueError("no such thing")
        return "hang" if draw < 0.25 else math.nan if draw < 0.26 else None

    faults = {name: [fault(draw) for draw in row] for name, row in draws.items()}
    service = Service(faults=faults)
    groups = [[str(n + 1) for n in range(8 * g, 8 * g + 8)] for g in range(75)]

    async def use(agent: RewardAgent) -> dict[int, list[Score]]:
        items = [[(TASK, answer) for answer in group] for group in groups]
        return {index: scores async for index, scores in agent.score_groups(items)}

    results = run(service, use, attempts=3, timeout_s=10, max_failed_fraction=1.0)
    for index, group in enumerate(groups):
        for answer, score in zip(group, results[index], strict=True):
            outcomes = [fault(draw) for draw in draws[answer]]
            final = next((o for o in outcomes if not (isinstance(o, Retryable) or o == "hang")), outcomes[-1])
            assert score.valid == (final is None)
            assert score.value == float(answer) if score.valid else math.isnan(score.value) and score.explanation


# --- retries ------------------------------------------------------------------------------------
def test_a_retry_waits_for_the_retry_after_of_the_service() -> None:
    service = Service((1, 1), {"1": [Retryable("429", 37.0), ConnectionError("reset"), None]})
    score = run(service, lambda agent: ask(agent, 1), backoff_s=0.5)
    assert score.value == 1
    _, second, third = [at for at, _ in service.calls]
    assert 38.0 <= second <= 38.5 + 1
    assert 1.0 <= third - second <= 2.0 + 1e-9  # the second call takes 1 s, and the backoff at most another


def test_backoff_stays_below_its_growing_limit_and_the_last_error_is_the_explanation() -> None:
    service = Service((0, 0), {"1": [Retryable("busy", cause="server")] * 9})

    async def use(agent: RewardAgent) -> tuple[Score, Any]:
        return await ask(agent, 1), agent.metrics()

    score, metrics = run(service, use, attempts=6, backoff_s=1.0, max_backoff_s=4.0)
    assert not score.valid
    assert score.explanation == "busy"
    gaps = [b - a for (a, _), (b, _) in zip(service.calls, service.calls[1:], strict=False)]
    assert len(gaps) == 5
    assert all(gap <= limit for gap, limit in zip(gaps, [1, 2, 4, 4, 4], strict=True))
    assert metrics["service/retries"] == 5
    assert metrics["service/failed/server"] == 1


@pytest.mark.parametrize("error", [Fatal("bad request", cause="request"), ValueError("bug"), NotApplicable()])
def test_a_permanent_error_is_not_retried(error: Exception) -> None:
    service = Service((1, 1), {"1": [error]})
    score = run(service, lambda agent: ask(agent, 1))
    assert not score.valid
    assert service.asked("1") == 1


def test_a_request_frees_its_slot_while_it_waits_for_a_retry() -> None:
    service = Service((1, 1), {"1": [Retryable("busy", 100.0)]})

    async def use(agent: RewardAgent) -> None:
        slow = asyncio.create_task(ask(agent, 1))
        await asyncio.sleep(2)
        assert (await ask(agent, 2)).value == 2
        assert now() == 3
        assert (await slow).value == 1

    run(service, use, max_concurrency=1)


def test_a_hanging_request_times_out_without_affecting_others() -> None:
    service = Service((1, 1), {"1": ["hang", "hang"], "2": ["hang"]})

    async def use(agent: RewardAgent) -> Any:
        scores = await asyncio.gather(*(ask(agent, n) for n in range(1, 9)))
        return scores, agent.metrics()

    scores, metrics = run(service, use, timeout_s=5, attempts=2, max_concurrency=8)
    assert [score.valid for score in scores] == [False, *[True] * 7]
    assert scores[0].explanation == "no score within 5 s"
    assert metrics["service/timeouts"] == 3
    assert metrics["service/failed/timeout"] == 1
    assert service.cancelled == 3


def test_a_reward_that_raises_cancelled_error_gives_a_failed_score() -> None:
    async def reward(request: Request) -> float:
        raise asyncio.CancelledError

    assert "cancelled itself" in (run(reward, lambda agent: ask(agent, 1)).explanation or "")


@pytest.mark.parametrize("hedge", [0.0, 0.1])
def test_a_reward_that_cancels_its_own_task_gives_a_failed_score(hedge: float) -> None:
    async def reward(request: Request) -> float:
        if request.response == "-1":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        await asyncio.sleep(1)
        return 1.0

    async def use(agent: RewardAgent) -> list[Score]:
        scores = await asyncio.wait_for(asyncio.gather(*(ask(agent, n) for n in range(-1, 70))), 60)
        assert agent.metrics()["service/failed/cancelled"] == 1
        return scores

    own, *others = run(reward, use, hedge_share=hedge)
    assert not own.valid
    assert own.explanation == "the reward cancelled itself"
    assert [score.value for score in others] == [1.0] * 70


@pytest.mark.parametrize(
    "error", [SystemExit(0), GradersPanic("index out of range")], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_that_calls_exit_or_panics_fails_only_its_request(error: BaseException, is_async: bool) -> None:
    def grade(request: Request) -> float:
        if request.response == "bad":
            raise error
        return 1.0

    async def grade_async(request: Request) -> float:
        return grade(request)

    async def main() -> list[Score]:
        async with RewardAgent(grade_async if is_async else grade, max_failed_fraction=1.0) as agent:
            return await asyncio.gather(ask(agent, "bad"), ask(agent, "good"))

    bad, good = asyncio.run(main())
    assert good == Score(1.0)
    assert not bad.valid
    assert type(error).__name__ in (bad.explanation or "")


# --- identical requests ---------------------------------------------------------------------------
def test_identical_requests_share_one_call_and_later_ones_its_cached_score() -> None:
    service = Service((2, 2))

    async def use(agent: RewardAgent) -> Any:
        scores = await asyncio.gather(*(ask(agent, 7) for _ in range(50)), ask(agent, 7, "eval"), ask(agent, 8))
        assert (await ask(agent, 7)).value == 7
        assert [score.value for score in scores] == [7.0] * 51 + [8.0]
        return agent.metrics()

    metrics = run(service, use)
    assert (service.asked("7"), service.asked("8")) == (1, 1)
    assert metrics["service/cache_hits"] == 51


def test_the_cache_evicts_the_least_recently_used_score_and_keeps_no_failure() -> None:
    service = Service((0, 0), {"9": [Fatal("no")]})

    async def use(agent: RewardAgent) -> None:
        for answer in (1, 2, 1, 3, 1, 2):
            await ask(agent, answer)
        assert not (await ask(agent, 9)).valid
        assert (await ask(agent, 9)).valid
        assert len(agent._cache) == 2

    run(service, use, cache=2)
    assert [service.asked(answer) for answer in "123"] == [1, 2, 1]


def test_without_a_cache_identical_requests_are_called_separately() -> None:
    service = Service((1, 1))

    async def use(agent: RewardAgent) -> None:
        await asyncio.gather(*(ask(agent, 7) for _ in range(3)))

    run(service, use, cache=0)
    assert service.asked("7") == 3


def test_a_payload_that_is_not_json_gives_a_failed_score() -> None:
    async def use(agent: RewardAgent) -> Score:
        return await ask(agent, 1, task=make_task(x=object()))

    assert "JSON" in (run(Service(), use).explanation or "")


def test_a_payload_that_contains_itself_gives_a_failed_score() -> None:
    own: dict[str, Any] = {}
    own["own"] = own
    score = run(Service(), lambda agent: ask(agent, 1, task=make_task(x=own)))
    assert (score.explanation or "").startswith("the payload of task 't'")


# --- cancellation -----------------------------------------------------------------------------------
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 10_000), hedge=st.sampled_from([0.0, 0.2]))
def test_cancelled_requests_leave_no_jobs_permits_or_tasks(seed: int, hedge: float) -> None:
    service = Service((0.5, 3.0), {str(n): [Retryable("busy", 1.0)] for n in range(0, 40, 4)})

    async def use(agent: RewardAgent) -> None:
        tasks = [asyncio.create_task(ask(agent, n % 40)) for n in range(80)]
        for index, task in enumerate(tasks):
            if stream(seed, index).random() < 0.5:
                asyncio.get_running_loop().call_later(stream(seed, index, "at").uniform(0, 8), task.cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for index, result in enumerate(results):
            assert isinstance(result, asyncio.CancelledError) or result.value == index % 40

    run(service, use, max_concurrency=7, requests_per_minute=3000, hedge_share=hedge)
    assert service.active == 0


def test_cancelling_one_of_two_identical_requests_does_not_cancel_the_other() -> None:
    service = Service((2, 2))

    async def use(agent: RewardAgent) -> None:
        first, second = (asyncio.create_task(ask(agent, 1)) for _ in range(2))
        await asyncio.sleep(1)
        first.cancel()
        assert (await second).value == 1
        third = asyncio.create_task(ask(agent, 2))
        await asyncio.sleep(1)
        third.cancel()
        await asyncio.wait([third])
        assert (await ask(agent, 2)).value == 2  # from a new call: the cancelled one left no score

    run(service, use)
    assert (service.asked("1"), service.asked("2"), service.cancelled) == (1, 2, 1)


def test_closing_raises_in_waiting_calls_and_a_closed_agent_refuses_new_ones() -> None:
    async def main() -> None:
        agent = RewardAgent(Service((5, 5)))
        with pytest.raises(UserError, match="async with"):
            await ask(agent, 1)
        async with agent:
            waiting = asyncio.create_task(ask(agent, 1))
            await asyncio.sleep(1)
        with pytest.raises(UserError, match="closed"):
            await waiting
        with pytest.raises(UserError, match="closed"):
            await ask(agent, 2)

    virtual_time.run(main())


# --- hedging: slow requests are sent twice ------------------------------------------------------------
def test_the_slowest_requests_are_hedged_and_the_first_answer_wins() -> None:
    class Uneven(Service):
        async def __call__(self, request: Request) -> Any:
            first = not self.asked(request.response)
            slow = int(request.response) % 20 == 0 and first
            self.latency = (60.0, 60.0) if slow else (1.0, 2.0)
            return await super().__call__(request)

    async def use(agent: RewardAgent) -> Any:
        # batches of fifty: after the first one the agent knows which latency is slow
        for start in range(1, 201, 50):
            scores = await asyncio.gather(*(ask(agent, n) for n in range(start, start + 50)))
            assert [score.value for score in scores] == list(range(start, start + 50))
        return now(), agent.metrics()

    service = Uneven()
    time, metrics = run(service, use, hedge_share=0.1, timeout_s=100)
    assert time < 60 + 3 * 5  # only the first batch has to wait for its slow requests
    assert metrics["service/hedged"] >= 8
    assert service.cancelled == metrics["service/hedged"]
    without, _ = run(Uneven(), use, timeout_s=100)
    assert without >= 4 * 60


def test_a_hedge_that_fails_does_not_affect_the_first_request() -> None:
    class Second(Service):
        async def __call__(self, request: Request) -> Any:
            if request.response != "99":
                return await super().__call__(request)
            await asyncio.sleep(0)
            self.calls.append((now(), "99"))
            if self.asked("99") == 2:
                raise Fatal("not twice")
            await asyncio.sleep(9)
            return 99

    async def use(agent: RewardAgent) -> Score:
        await asyncio.gather(*(ask(agent, n) for n in range(64)))
        return await ask(agent, 99)

    service = Second()
    assert run(service, use, hedge_share=0.1).value == 99
    assert service.asked("99") == 2


# --- lanes ----------------------------------------------------------------------------------------
def test_the_training_and_evaluation_lanes_do_not_delay_each_other() -> None:
    service = Service((10, 10))

    async def use(agent: RewardAgent) -> list[float]:
        async def timed(answer: int, lane: str) -> float:
            await ask(agent, answer, lane)
            return now()

        evaluation = [asyncio.create_task(timed(n, "eval")) for n in range(1000)]
        await asyncio.sleep(5)
        train = await asyncio.gather(*(timed(n, "train") for n in range(2000, 2010)))
        assert train == [15.0] * 10
        assert max(await asyncio.gather(*evaluation)) == 200.0
        return []

    run(service, use, max_concurrency=10, eval_concurrency=50)


# --- the service is down ------------------------------------------------------------------------------
def test_too_many_failures_raise_one_error_in_waiting_calls_and_stop_new_requests() -> None:
    service = Service((1, 1), {str(n): [Fatal(f"401 for {n}")] for n in range(40)})

    async def use(agent: RewardAgent) -> None:
        tasks = [asyncio.create_task(ask(agent, n)) for n in range(100)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = {str(result) for result in results if isinstance(result, UserError)}
        (message,) = errors
        assert "100% of the last 32 rewards failed" in message
        assert "401 for" in message
        asked = len(service.calls)
        with pytest.raises(UserError, match="max_failed_fraction"):
            await ask(agent, 101)
        assert len(service.calls) == asked

    run(service, use, max_concurrency=8)
    assert 32 <= len(service.calls) <= 40


def test_a_third_of_failed_requests_does_not_stop_the_agent() -> None:
    service = Service((1, 1), {str(n): [Fatal("no")] for n in range(0, 300, 3)})

    async def use(agent: RewardAgent) -> int:
        return sum(not score.valid for score in await asyncio.gather(*(ask(agent, n) for n in range(300))))

    assert run(service, use, max_concurrency=10) == 100


def test_only_failures_for_down_after_s_count_as_an_outage() -> None:
    service = Service((1, 1), {str(n): [Retryable("connection refused")] * 99 for n in range(8)})

    async def use(agent: RewardAgent) -> float:
        results = await asyncio.gather(*(ask(agent, n) for n in range(8)), return_exceptions=True)
        assert all(isinstance(result, UserError) and "connection refused" in str(result) for result in results)
        return now()

    assert 120 <= run(service, use, attempts=1000, max_backoff_s=10, down_after_s=120) < 140


def test_one_request_that_never_succeeds_is_not_an_outage() -> None:
    service = Service((1, 1), {"1": [Retryable("bad luck")] * 30})
    assert not run(service, lambda agent: ask(agent, 1), attempts=20, down_after_s=60).valid


def test_a_user_error_from_the_reward_stops_the_agent_at_once() -> None:
    service = Service((1, 1), {"3": [UserError("JUDGE_KEY is not set")]})

    async def use(agent: RewardAgent) -> None:
        results = await asyncio.gather(*(ask(agent, n) for n in range(6)), return_exceptions=True)
        assert any(isinstance(result, UserError) for result in results)
        with pytest.raises(UserError, match="JUDGE_KEY is not set"):
            await ask(agent, 7)

    run(service, use)


# --- groups ---------------------------------------------------------------------------------------
class Ranked(Service):
    """A service with post-processing that subtracts the best score of the group from each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.groups: list[list[float]] = []

    async def post_process_scores(self, scores: list[Score]) -> list[Any]:
        self.groups.append([score.value for score in scores])
        return [score.value - max(s.value for s in scores if s.valid) for score in scores]


def test_a_group_is_post_processed_once_and_failed_scores_stay_failed() -> None:
    reward = Ranked(faults={"2": [Fatal("no")]})

    async def use(agent: RewardAgent) -> list[Score]:
        scores = await asyncio.gather(*(ask(agent, n) for n in (1, 2, 3)))
        return list(await agent.finish(TASK, scores))

    scores = run(reward, use)
    assert [score.value for score in scores if score.valid] == [-2.0, 0.0]
    assert scores[1].explanation == "no"
    assert len(reward.groups) == 1


@pytest.mark.parametrize("returned", [[1.0], None, [math.nan, math.nan], ["1", "2"]])
def test_invalid_post_processing_fails_its_group_and_no_other(returned: Any) -> None:
    reward = Ranked()
    good = reward.post_process_scores

    async def post_process_scores(scores: list[Score]) -> Any:
        return returned if scores[0].value == 13.0 else await good(scores)

    reward.post_process_scores = post_process_scores  # type: ignore[method-assign]

    async def use(agent: RewardAgent) -> None:
        bad = await agent.finish(TASK, [Score(13.0), Score(2.0)])
        assert [score.valid for score in bad] == [False, False]
        assert "post-processing" in (bad[0].explanation or "")
        assert [s.value for s in await agent.finish(TASK, [Score(1.0), Score(2.0)])] == [-1.0, 0.0]

    run(reward, use)


def test_post_processing_that_calls_exit_fails_its_group() -> None:
    reward = Ranked()

    async def post_process_scores(scores: list[Score]) -> Any:
        raise SystemExit(0)

    reward.post_process_scores = post_process_scores  # type: ignore[method-assign]
    bad = run(reward, lambda agent: agent.finish(TASK, [Score(1.0), Score(2.0)]))
    assert [score.valid for score in bad] == [False, False]


# --- metrics ----------------------------------------------------------------------------------------
def test_metrics_cover_the_time_since_the_last_call() -> None:
    async def reward(request: Request) -> dict[str, float]:
        await asyncio.sleep(float(request.response))
        return {"score": 1.0, "cost/prompt_tokens": 100, "cost/completion_tokens": 10}

    async def use(agent: RewardAgent) -> None:
        tasks = [asyncio.create_task(ask(agent, n)) for n in range(1, 101)]
        await asyncio.sleep(0.5)
        early = agent.metrics()
        assert (early["time/reward_in_flight"], early["time/reward_queued"]) == (50, 50)
        await asyncio.gather(*tasks)
        late = agent.metrics()
        assert late["service/scored"] == 100
        assert late["service/prompt_tokens"] == 10_000
        assert late["service/completion_tokens"] == 1000
        assert late["time/reward_answer_p50_s"] == pytest.approx(50.5)
        assert late["time/reward_p99_s"] > late["time/reward_answer_p99_s"]  # waiting for a slot counts too
        assert agent.metrics()["service/scored"] == 0

    run(reward, use, max_concurrency=50, timeout_s=1000)


def test_post_processing_uses_as_many_threads_as_workers() -> None:
    class Slow:
        def __init__(self) -> None:
            self.busy = self.most = 0
            self.lock = threading.Lock()
            self.together = threading.Barrier(2, timeout=30)

        def compute_score(self, request: Request) -> float:
            return 1.0

        def post_process_scores(self, scores: list[Score]) -> list[Score]:
            with self.lock:
                self.busy += 1
                self.most = max(self.most, self.busy)
            self.together.wait()
            with self.lock:
                self.busy -= 1
            return scores

    async def main(reward: Slow, summed: bool) -> None:
        async with RewardAgent(Weighted({"a": reward}) if summed else reward, workers=2) as agent:
            scores = await asyncio.gather(*(agent.finish(TASK, [Score(1.0, parts={"a": 1.0})]) for _ in range(10)))
            assert all(score.valid for (score,) in scores)

    for summed in (False, True):
        reward = Slow()
        asyncio.run(main(reward, summed))
        assert reward.most == 2


def test_a_method_named_finish_of_a_reward_is_not_called() -> None:
    class Grader:
        async def compute_score(self, request: Request) -> float:
            return 1.0

        def finish(self) -> None:
            raise AssertionError("it belongs to the user")

    async def use(agent: RewardAgent) -> list[Score]:
        return await agent.finish(TASK, [Score(1.0)])

    assert run(Grader(), use) == [Score(1.0)]


@pytest.mark.parametrize("known", [False, True])
def test_tokens_per_minute_holds_from_the_first_request_on(known: bool) -> None:
    """With ``known``, the reward says how long an answer may be. Otherwise the first answer shows it."""
    sent: list[tuple[float, float]] = []

    class Judge(Scorer):
        max_tokens = 500 if known else None

        async def __call__(self, request: Request) -> Score:
            sent.append((now(), 510.0))
            await asyncio.sleep(20.0)
            return Score(1.0, parts={"cost/prompt_tokens": 10.0, "cost/completion_tokens": 500.0})

    async def use(agent: RewardAgent) -> None:
        await asyncio.gather(*(ask(agent, f"{n:040}") for n in range(200)))
        assert now() < 1.2 * 200 * 510 / 10_000 * 60

    run(Judge(), use, tokens_per_minute=10_000)
    assert busiest_window(sent) <= 10_000 + 510
    assert sum(at < 20.0 for at, _ in sent) == (7 if known else 1)


def test_tokens_per_minute_does_not_delay_a_reward_that_reports_no_tokens() -> None:
    async def use(agent: RewardAgent) -> float:
        await asyncio.gather(*(ask(agent, n) for n in range(100)))
        return now()

    assert run(Service(latency=(1.0, 1.0)), use, tokens_per_minute=10_000) < 5.0


def test_a_scorer_that_was_made_with_the_options_of_the_settings_is_used() -> None:
    settings = RewardSettings(name="length", options={"target": 3})
    scorer = load_reward(settings.name, options=settings.options)
    assert RewardAgent(scorer, settings)._scorer is scorer  # as a run makes it
    with pytest.raises(UserError, match="is made already and takes no options"):
        RewardAgent(scorer, options={"target": 4})


def test_options_that_are_objects_are_kept_when_a_setting_is_replaced() -> None:
    settings = RewardSettings(name="weighted", options={"parts": {"format": {"reward": Format(".*")}}})
    assert RewardAgent(settings=settings, timeout_s=5.0).settings.options == settings.options


def test_the_journal_is_closed_although_closing_the_reward_fails(tmp_path: Path) -> None:
    class Grader:
        async def compute_score(self, request: Request) -> float:
            return 1.0

        def close(self) -> None:
            raise RuntimeError("not today")

    async def main() -> RewardAgent:
        agent = RewardAgent(Grader(), journal=tmp_path / "rewards.sqlite")
        with pytest.raises(RuntimeError, match="not today"):
            async with agent:
                await ask(agent, "a")
        return agent

    assert asyncio.run(main())._journal is None


def test_tokens_per_minute_limits_the_tokens_that_the_service_reports() -> None:
    times: list[float] = []

    async def reward(request: Request) -> dict[str, float]:
        times.append(now())
        return {"score": 1.0, "cost/prompt_tokens": 90, "cost/completion_tokens": 10}

    async def use(agent: RewardAgent) -> float:
        for n in range(100):
            await ask(agent, n)
        return now()

    assert run(reward, use, tokens_per_minute=1000) >= 9 * 60
    assert busiest_window([(at, 100.0) for at in times]) <= 1000 + 100


def test_invalid_settings_raise_a_user_error() -> None:
    with pytest.raises(UserError, match="max_concurrency"):
        RewardAgent(Service(), max_concurrency=0)
    with pytest.raises(UserError, match="no_such"):
        RewardAgent(Service(), no_such=1)
