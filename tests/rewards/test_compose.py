"""Tests of `gleanrl.rewards.compose.Weighted`: the weighted sum is exact, parts run concurrently and are all logged,
and a failed part never counts as 0."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards import NotApplicable, RewardAgent, Scorer
from gleanrl.rewards.adapter import load_reward, verl
from gleanrl.rewards.compose import ATTEMPTS, Weighted
from gleanrl.rewards.http import HttpReward
from gleanrl.rewards.request import Request
from gleanrl.simulate import virtual_time
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import Fatal, Retryable
from tests.rewards.service import Plan, Service, group_scored
from tests.rewards.worlds import busiest_window, count_rows, make_task, make_trajectory

REQUEST = Request(Task("t"), ({"role": "assistant", "content": "abc"},), "r", Score(0.25))
Reward = Callable[[Request], Awaitable[Any]]


def constant(value: Any, seconds: float = 0.0, calls: list[str] | None = None) -> Reward:
    """Return a reward that gives ``value`` after ``seconds`` and appends the trajectory's id to ``calls``."""

    async def reward(request: Request) -> Any:
        if calls is not None:
            calls.append(request.trajectory_id)
        await asyncio.sleep(seconds)
        return value

    return reward


def failing(*errors: Exception | None, then: float = 1.0) -> Reward:
    """Return a reward that raises one of ``errors`` in each call (None: scores) and afterwards always scores."""
    left = list(errors)

    async def reward(request: Request) -> float:
        if left and (error := left.pop(0)) is not None:
            raise error
        return then

    return reward


def scored(weighted: Weighted, request: Request = REQUEST) -> Score:
    async def main() -> Score:
        return await weighted(request)

    return virtual_time.run(main())


def test_a_weighted_sum_logs_the_score_of_every_part() -> None:
    judge = Score(0.5, parts={"judge": 5.0, "cost/prompt_tokens": 10.0}, explanation="fine")
    other = Score(1.0, parts={"cost/prompt_tokens": 3.0})
    weighted = Weighted(
        {
            "judge": {"reward": constant(judge), "weight": 2.0},
            "other": constant(other),
            "length": {"reward": lambda request: len(request.response), "weight": -0.5, "clip": [0, 2]},
            "seen": {"reward": constant(9.0), "weight": 0},
            "environment": {"weight": 4},
        }
    )
    score = scored(weighted)
    assert score.value == 2 * 0.5 + 1.0 - 0.5 * 2 + 4 * 0.25
    assert score.parts == {
        "judge": 0.5,
        "judge/judge": 5.0,
        "cost/prompt_tokens": 13.0,
        "other": 1.0,
        "length": 3.0,
        "seen": 9.0,
        "environment": 0.25,
    }
    assert score.explanation == "judge: fine"


def test_parts_run_concurrently() -> None:
    async def main() -> float:
        await Weighted({name: constant(1.0, seconds) for name, seconds in (("a", 3.0), ("b", 5.0), ("c", 4.0))})(
            REQUEST
        )
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 5.0


@pytest.mark.parametrize(
    ("failure", "raised", "said"),
    [
        (failing(Fatal("no")), Fatal, "b: no"),
        (failing(KeyError("gone")), Fatal, "b: 'gone'"),
        (failing(NotApplicable()), NotApplicable, "b: the reward does not apply"),
        (failing(Retryable("busy", 7.0, cause="rate_limit")), Retryable, "b: busy"),
        (failing(TimeoutError()), Retryable, "b: timeout: of its own"),
        (failing(ConnectionError("reset")), Retryable, "b: reset"),
        (constant(Score.failed("not mine")), Fatal, "b: not mine"),
        (constant(float("nan")), Fatal, "b: .*not a finite number"),
        (failing(UserError("a mistake")), UserError, "^a mistake$"),
    ],
)
def test_a_failed_part_fails_the_sum_with_an_error_that_names_the_part(
    failure: Reward, raised: type[Exception], said: str
) -> None:
    with pytest.raises(raised, match=said) as error:
        scored(Weighted({"a": constant(1.0), "b": failure}))
    assert type(error.value) is raised
    if "busy" in said:
        assert (getattr(error.value, "after_s", None), getattr(error.value, "cause", None)) == (7.0, "rate_limit")


def test_a_missing_environment_score_fails_the_sum_and_does_not_count_as_zero() -> None:
    with pytest.raises(Fatal, match="environment: the environment gave no score"):
        scored(Weighted({"environment": {"weight": 1}}), Request(Task("t"), ()))


def test_a_retry_does_not_repeat_the_parts_that_are_scored() -> None:
    calls: list[str] = []
    weighted = Weighted({"paid": constant(1.0, 1.0, calls), "b": failing(Retryable("busy"), Retryable("busy"))})

    async def main() -> Score:
        async with RewardAgent(weighted, attempts=3, backoff_s=0.1) as agent:
            return (await group_scored(agent, [(Task("t"), "abc")]))[0]

    assert virtual_time.run(main()).value == 2.0
    assert len(calls) == 1


def test_a_timeout_of_one_part_keeps_the_scores_of_the_others() -> None:
    calls: list[str] = []
    slow = [100.0, 1.0]

    async def sometimes(request: Request) -> float:
        await asyncio.sleep(slow.pop(0))
        return 1.0

    async def main() -> Score:
        parts = {"paid": constant(1.0, 1.0, calls), "slow": sometimes}
        async with RewardAgent(Weighted(parts), attempts=3, backoff_s=0.1, timeout_s=10.0) as agent:
            return (await group_scored(agent, [(Task("t"), "abc")]))[0]

    assert virtual_time.run(main()).value == 2.0
    assert len(calls) == 1


def test_a_fatal_part_cancels_the_others() -> None:
    async def main() -> tuple[float, int]:
        with pytest.raises(Fatal):
            await Weighted({"slow": constant(1.0, 100.0), "b": failing(Fatal("no"))})(REQUEST)
        return asyncio.get_running_loop().time(), len(asyncio.all_tasks())

    assert virtual_time.run(main()) == (0.0, 1)


# --- on_failure = "renormalise" -------------------------------------------------------------------------
def test_renormalise_leaves_out_a_failed_part() -> None:
    parts = {
        "a": {"reward": constant(0.5), "weight": 1},
        "b": {"reward": failing(Fatal("no")), "weight": 2},
        "c": {"reward": constant(1.0), "weight": -1},
    }
    score = scored(Weighted(parts, on_failure="renormalise"))
    assert score.value == (0.5 - 1.0) * 4 / 2
    assert score.parts == {"a": 0.5, "c": 1.0, "left_out": 1.0}
    assert score.explanation == "b: no"


def test_a_part_with_retryable_errors_is_retried_before_it_is_left_out() -> None:
    weighted = Weighted({"a": constant(0.5), "b": failing(*[Retryable("busy")] * 9)}, on_failure="renormalise")
    for _ in range(ATTEMPTS - 1):
        with pytest.raises(Retryable, match="b: busy"):
            scored(weighted)
    assert scored(weighted).parts == {"a": 0.5, "left_out": 1.0}


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_a_part_is_left_out_before_the_attempts_of_the_request_are_used_up(attempts: int) -> None:
    calls: list[str] = []

    async def busy(request: Request) -> float:
        calls.append(request.response)
        raise Retryable("busy", cause="server")

    async def main() -> list[Score]:
        scores = []
        for table, policy in (({"reward": busy, "weight": 0}, "fail"), (busy, "renormalise")):
            weighted = Weighted({"a": constant(0.5), "b": table}, on_failure=policy)  # type: ignore[arg-type]
            async with RewardAgent(weighted, attempts=attempts, backoff_s=0.1) as agent:
                scores += await group_scored(agent, [(Task("t"), "abc")])
        return scores

    assert [score.parts for score in virtual_time.run(main())] == [{"a": 0.5, "left_out": 1.0}] * 2
    assert len(calls) == 2 * min(attempts, ATTEMPTS)


def test_renormalise_is_fatal_if_all_parts_with_weight_failed() -> None:
    parts = {
        "a": failing(Fatal("no")),
        "b": constant(Score.failed("never")),
        "seen": {"reward": constant(1), "weight": 0},
    }
    with pytest.raises(Fatal, match="no part could be scored: a: no; b: never"):
        scored(Weighted(parts, on_failure="renormalise"))


def test_a_failed_part_of_weight_zero_does_not_change_the_score() -> None:
    parts = {"a": constant(0.5), "seen": {"reward": failing(Fatal("no")), "weight": 0}}
    score = scored(Weighted(parts))
    assert (score.value, score.parts) == (0.5, {"a": 0.5, "left_out": 1.0})


def test_an_infinite_sum_is_fatal() -> None:
    with pytest.raises(Fatal, match="sum of the parts is inf"):
        scored(Weighted({"a": constant(1e308), "b": constant(1e308)}))


WEIGHTS = st.floats(-5, 5).filter(lambda weight: abs(weight) > 1e-3)
PARTS = st.lists(st.tuples(WEIGHTS, st.floats(-10, 10), st.booleans()), min_size=1, max_size=5)


@given(PARTS.filter(lambda parts: any(there for _, _, there in parts)))
def test_the_remaining_parts_are_scaled_to_the_total_absolute_weight(parts: list[tuple[float, float, bool]]) -> None:
    table = {
        f"p{i}": {"reward": constant(value) if there else failing(Fatal("no")), "weight": weight}
        for i, (weight, value, there) in enumerate(parts)
    }
    whole = sum(abs(weight) for weight, _, _ in parts)
    left = sum(abs(weight) for weight, _, there in parts if there)
    total = sum(weight * value for weight, value, there in parts if there)
    score = scored(Weighted(table, on_failure="renormalise"))
    assert score.value == pytest.approx(total * whole / left)


# --- post-processing, threads and settings ----------------------------------------------------------------
class Ranked:
    """A reward whose post-processing replaces each score by its rank in the group, and fails for a score of 13."""

    async def compute_score(self, request: Request) -> float:
        return float(request.response)

    def post_process_scores(self, scores: Sequence[Score]) -> list[float]:
        if any(score.value == 13.0 for score in scores):
            return [float("nan")] * len(scores)
        ordered = sorted(score.value for score in scores)
        return [float(ordered.index(score.value)) for score in scores]


def grouped(parts: dict[str, Any], responses: Sequence[str]) -> list[Score]:
    async def main() -> list[Score]:
        async with RewardAgent(Weighted(parts)) as agent:
            return await group_scored(agent, [(Task("t"), response) for response in responses])

    return virtual_time.run(main())


def test_post_processing_of_a_part_sees_the_whole_group() -> None:
    scores = grouped({"rank": {"reward": Ranked, "weight": 10}, "one": constant(1.0)}, ["7", "3", "5"])
    assert [score.value for score in scores] == [21.0, 1.0, 11.0]
    assert [score.parts["rank"] for score in scores] == [2.0, 0.0, 1.0]


def test_failed_post_processing_of_a_part_makes_the_whole_group_invalid() -> None:
    scores = grouped({"rank": Ranked, "one": constant(1.0)}, ["7", "13"])
    assert not any(score.valid for score in scores)
    assert all("rank" in (score.explanation or "") for score in scores)


def test_a_sync_part_uses_at_most_sixteen_threads_by_default() -> None:
    busy, most, lock = Counter[str](), Counter[str](), threading.Lock()

    def slow(request: Request) -> float:
        with lock:
            busy["now"] += 1
            most["ever"] = max(most["ever"], busy["now"])
        time.sleep(0.01)
        with lock:
            busy["now"] -= 1
        return 1.0

    async def main() -> list[Score]:
        weighted = Weighted({"slow": slow})
        requests = [Request(Task("t"), ({"role": "assistant", "content": str(i)},), str(i)) for i in range(50)]
        scores = await asyncio.gather(*(weighted(request) for request in requests))
        await weighted.aclose()
        return scores

    assert [score.value for score in asyncio.run(main())] == [1.0] * 50
    assert 1 < most["ever"] <= 16


@pytest.mark.parametrize(
    ("parts", "options", "said"),
    [
        ({}, {}, "at least one needs a weight"),
        ({"a": {"reward": constant(1), "weight": 0}}, {}, "at least one needs a weight"),
        ({"a": {"reward": constant(1), "wieght": 1}}, {}, "did you mean 'weight'"),
        ({"a": {"weight": 1}}, {}, "parts.a: name its reward"),
        ({"a": {"reward": constant(1), "weight": "2"}}, {}, "parts.a: weight = '2'"),
        ({"a": {"reward": constant(1), "weight": float("nan")}}, {}, "parts.a: weight"),
        ({"a": {"reward": constant(1), "clip": [1, 0]}}, {}, "parts.a: clip"),
        ({"a": {"reward": constant(1), "clip": 3}}, {}, "parts.a: clip"),
        ({"a": "nowhere:fn"}, {}, "parts.a: import path 'nowhere:fn'"),
        ({"a/b": constant(1)}, {}, "cannot be a part's name"),
        ({"a": constant(1)}, {"on_failure": "ignore"}, "fail or renormalise"),
        ([constant(1)], {}, "a table of rewards"),
    ],
)
def test_invalid_parts_raise_a_one_line_user_error(parts: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        Weighted(parts, **options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_version_changes_with_everything_that_changes_a_score() -> None:
    def version(
        weight: float = 1.0, name: str = "a", policy: Any = "fail", clip: Any = None, value: Any = Ranked
    ) -> str:
        return Weighted({name: {"reward": value, "weight": weight, "clip": clip}}, on_failure=policy).version

    others = [
        version(2.0),
        version(name="b"),
        version(policy="renormalise"),
        version(clip=[0, 1]),
        version(value=Other),
    ]
    assert len({version(), *others}) == len(others) + 1
    assert version() == version()


class Other(Ranked):
    version = "other"


# --- limits of single parts -------------------------------------------------------------------------------
class Narrow:
    """A reward that declares with ``slots`` how many calls it takes at once; each call takes ``seconds``."""

    def __init__(self, slots: int = 2, seconds: float = 1.0) -> None:
        self.slots, self.seconds = slots, seconds
        self.busy = self.most = 0

    async def __call__(self, request: Request) -> float:
        self.busy += 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(self.seconds)
        self.busy -= 1
        return float(len(request.response))


@pytest.mark.parametrize("summed", [False, True])
def test_waiting_for_a_slot_does_not_count_towards_the_timeout(summed: bool) -> None:
    narrow = Narrow()
    quick = constant(1.0, 0.1)
    reward = Weighted({"narrow": narrow, "quick": {"reward": quick, "weight": 0}}) if summed else narrow

    async def main() -> float:
        async with RewardAgent(reward, timeout_s=1.5, attempts=1) as agent:
            scores = await group_scored(agent, [(Task("t"), "x" * n) for n in range(20)])
            assert [score.value for score in scores] == list(range(20))
            return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == pytest.approx(10.0)
    assert narrow.most == 2


def test_the_explanation_of_a_timeout_names_the_slow_part() -> None:
    parts = {"slow": constant(1.0, 9.0), "quick": constant(1.0)}

    async def main() -> str | None:
        async with RewardAgent(Weighted(parts), timeout_s=2.0, attempts=2, backoff_s=0.1) as agent:
            (score,) = await group_scored(agent, [(Task("t"), "abc")])
            assert agent.metrics()["service/failed/timeout"] == 1
            return score.explanation

    assert virtual_time.run(main()) == "slow: no score within 2 s"


def test_a_part_that_raises_cancelled_error_fails_the_sum_and_is_named() -> None:
    async def reward(request: Request) -> float:
        raise asyncio.CancelledError

    with pytest.raises(Fatal, match="b: the reward cancelled itself"):
        scored(Weighted({"a": constant(1.0), "b": reward}))


def test_the_workers_setting_bounds_the_threads_of_a_part() -> None:
    together = threading.Barrier(3, timeout=30)
    active, most, lock = 0, 0, threading.Lock()

    def slow(request: Request) -> float:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        time.sleep(0.05)
        together.wait()
        with lock:
            active -= 1
        return 1.0

    async def main() -> list[Score]:
        async with RewardAgent(Weighted({"slow": slow}), workers=3) as agent:
            return await group_scored(agent, [(Task("t"), "x" * n) for n in range(9)])

    assert [score.value for score in asyncio.run(main())] == [1.0] * 9
    assert most == 3


def test_process_isolation_runs_sync_parts_in_processes_and_async_parts_on_the_loop() -> None:
    async def here(request: Request) -> float:
        return float(os.getpid())

    parts = {"there": "tests.rewards.graders:troublesome", "here": {"reward": here, "weight": 0}}

    async def main() -> Score:
        async with RewardAgent(Weighted(parts), isolation="process", workers=1) as agent:
            return (await group_scored(agent, [(Task("t"), "pid")]))[0]

    score = asyncio.run(main())
    assert score.parts["here"] == os.getpid()
    assert score.parts["there"] != os.getpid()


def test_a_part_that_was_loaded_before_keeps_its_own_number_of_threads() -> None:
    mine = load_reward(lambda request: 1.0, settings=RewardSettings(workers=5))
    weighted = Weighted({"mine": mine, "other": lambda request: 1.0})
    RewardAgent(weighted, workers=2)
    assert [part.scorer.lane_slots for part in weighted._parts] == [5, 2]


def test_evaluation_does_not_delay_training_although_a_part_has_one_thread() -> None:
    def slow(request: Request) -> float:
        time.sleep(0.05)
        return 1.0

    async def main() -> int:
        async with RewardAgent(Weighted({"slow": slow}), workers=1) as agent:

            async def one(lane: Any, n: int) -> None:
                await agent.lane(lane).score(Task("t"), "x" * n)

            evaluation = [asyncio.create_task(one("eval", n)) for n in range(40)]
            await asyncio.sleep(0.1)
            await asyncio.gather(*(one("train", n) for n in range(100, 103)))
            ended = sum(task.done() for task in evaluation)
            await asyncio.gather(*evaluation)
            return ended

    assert asyncio.run(main()) < 12


class Voting(Scorer):
    """A reward of three votes, each of which takes 2 s and 100 tokens."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, float]] = []

    def split(self, request: Request) -> Sequence[Request]:
        return () if request.part else [replace(request, part=str(vote)) for vote in range(3)]

    def combine(self, request: Request, scores: Sequence[Score]) -> Score:
        return scores[0]

    async def __call__(self, request: Request) -> Score:
        self.sent.append((asyncio.get_running_loop().time(), 100.0))
        await asyncio.sleep(2.0)
        return Score(1.0, parts={"cost/completion_tokens": 100.0})


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
def test_the_calls_of_all_parts_share_the_rates(limit: str) -> None:
    one, two = Voting(), Voting()
    parts = {
        "one": one,
        "inner": {"reward": Weighted({"two": two})},
        "environment": {"weight": 1},
        "format": {"reward": "format"},  # it is computed here, so it does not count
    }

    async def main() -> float:
        async with RewardAgent(Weighted(parts), **{limit: 60 if limit == "requests_per_minute" else 6000}) as agent:
            tasks = [agent.score(make_task(), make_trajectory(make_task(), str(n), own=Score(0.5))) for n in range(30)]
            assert all(score.valid for score in await asyncio.gather(*tasks))
            return asyncio.get_running_loop().time()

    seconds = virtual_time.run(main())
    sent = sorted(one.sent + two.sent)
    assert len(sent) == 30 * 6
    assert busiest_window(sent) <= 6000 + (100 if limit == "tokens_per_minute" else 0)
    assert 120 < seconds < 240


def test_a_part_of_ones_own_may_say_that_it_calls_no_service() -> None:
    class Here:
        calls_service = False

        async def compute_score(self, request: Request) -> float:
            return 1.0

    async def main(reward: Any) -> float:
        async with RewardAgent(Weighted({"a": reward}), requests_per_minute=60) as agent:
            await group_scored(agent, [(Task("t"), "x" * n) for n in range(120)])
            return asyncio.get_running_loop().time()

    assert virtual_time.run(main(Here)) == 0.0
    assert virtual_time.run(main(constant(1.0))) > 60.0


# --- parts whose service is away ------------------------------------------------------------------------
REFUSED, BUSY = ConnectionRefusedError("nobody is there"), Retryable("busy", 4.0, cause="unavailable")


class Away:
    """A reward that raises ``error`` between two times in seconds, and scores 1 otherwise."""

    def __init__(self, start: float, end: float, error: Exception = REFUSED) -> None:
        self.start, self.end, self.error = start, end, error

    async def __call__(self, request: Request) -> float:
        await asyncio.sleep(0.0)
        if self.start <= asyncio.get_running_loop().time() < self.end:
            raise self.error
        return 1.0


async def one_a_second(agent: RewardAgent, count: int) -> list[Score]:
    tasks = []
    for n in range(count):
        tasks.append(asyncio.create_task(agent.score(Task("t"), "x" * n)))
        await asyncio.sleep(1.0)
    return list(await asyncio.gather(*tasks))


@pytest.mark.parametrize("error", [REFUSED, BUSY])
@pytest.mark.parametrize("on_failure", ["fail", "renormalise"])
def test_an_outage_of_half_a_minute_loses_no_part(on_failure: Any, error: Exception) -> None:
    async def main() -> list[Score]:
        weighted = Weighted({"a": constant(0.5), "b": Away(10.0, 40.0, error)}, on_failure=on_failure)
        async with RewardAgent(weighted) as agent:
            scores = await one_a_second(agent, 60)
            assert (agent.metrics()["service/unreachable"] > 0) == (error is REFUSED)
            return scores

    assert [score.parts for score in virtual_time.run(main())] == [{"a": 0.5, "b": 1.0}] * 60


def test_a_part_that_stays_unreachable_is_left_out_after_down_after_s() -> None:
    async def main() -> float:
        weighted = Weighted({"a": constant(0.5), "b": Away(10.0, 1e9)}, on_failure="renormalise")
        async with RewardAgent(weighted, down_after_s=200.0, max_backoff_s=10.0) as agent:
            scores = await one_a_second(agent, 60)
            assert [score.parts for score in scores[10:]] == [{"a": 0.5, "left_out": 1.0}] * 50
            return asyncio.get_running_loop().time()

    assert 110.0 <= virtual_time.run(main()) < 125.0


def test_a_part_with_a_retry_after_of_a_day_is_left_out() -> None:
    busy = failing(Retryable("quota", 86400.0, cause="rate_limit"))
    assert scored(Weighted({"a": constant(0.5), "b": busy}, on_failure="renormalise")).parts["left_out"] == 1.0


# --- costs and stored scores of parts ---------------------------------------------------------------------
def paid(calls: list[str], seconds: float = 0.0) -> Reward:
    return constant(Score(1.0, parts={"cost/prompt_tokens": 10.0}), seconds, calls)


def test_the_tokens_of_every_part_are_counted_once_even_if_the_sum_fails() -> None:
    bad = Retryable("unreadable", cost={"cost/prompt_tokens": 3.0})

    async def main(*errors: Exception) -> float:
        weighted = Weighted({"paid": paid([]), "b": failing(*errors)})
        async with RewardAgent(weighted, attempts=3, backoff_s=0.1, cache=0) as agent:
            await group_scored(agent, [(Task("t"), "abc")])
            return agent.metrics().get("service/prompt_tokens", 0.0)

    assert virtual_time.run(main()) == 10.0
    assert virtual_time.run(main(bad)) == 13.0
    assert virtual_time.run(main(bad, bad, bad)) == 19.0
    assert virtual_time.run(main(bad, Fatal("no", cost={"cost/prompt_tokens": 5.0}))) == 18.0


def test_a_resumed_run_computes_only_the_missing_parts(tmp_path: Path) -> None:
    calls: list[str] = []
    trajectory = make_trajectory(make_task(), "abc", own=Score(0.5))

    async def main(patience: float) -> tuple[int, Score | None, float]:
        parts = {"paid": paid(calls), "slow": constant(1.0, 50.0), "environment": {"weight": 1.0}}
        async with RewardAgent(Weighted(parts), journal=tmp_path / "rewards.sqlite") as agent:
            asking = asyncio.ensure_future(agent.score(make_task(), trajectory))
            done, _ = await asyncio.wait([asking], timeout=patience)
            assert agent._journal is not None
            spent = agent.metrics().get("service/prompt_tokens", 0.0)
            return count_rows(agent._journal.path), asking.result() if done else None, spent

    assert virtual_time.run(main(20.0))[:2] == (1, None)  # the environment's score is not in the journal
    _, score, spent = virtual_time.run(main(60.0))
    assert score is not None
    assert score.value == 2.5
    assert (len(calls), spent) == (1, 0.0)


def test_scoring_again_leaves_no_parts_in_the_journal(tmp_path: Path) -> None:
    async def main() -> None:
        weighted = Weighted({"a": constant(1.0), "b": constant(1.0, 0.1)})
        async with RewardAgent(weighted, journal=tmp_path / "rewards.sqlite") as agent:
            for _ in range(3):
                assert (await agent.score_again(Task("t"), "abc")).value == 2.0

    virtual_time.run(main())
    assert count_rows(tmp_path / "rewards.sqlite") == 0


def test_two_parts_with_the_same_path_on_different_hosts_do_not_share_scores(tmp_path: Path) -> None:
    def late(random: Any) -> float:
        return 0.3

    async def main(status: int) -> Score:
        ones, twos = (
            Plan(answer=lambda *_: (200, {"score": 1})),
            Plan(answer=lambda *_: (status, {"score": 2}), latency=late),
        )
        async with Service(ones) as one, Service(twos) as two:
            parts = {"one": HttpReward(f"{one.url}/score"), "two": HttpReward(f"{two.url}/score")}
            async with RewardAgent(Weighted(parts), journal=tmp_path / "rewards.sqlite") as agent:
                score = await agent.score(Task("t"), "abc")
            if status == 200:
                assert (len(one.bodies), len(two.bodies)) == (0, 1)
            return score

    assert not asyncio.run(main(400)).valid
    assert asyncio.run(main(200)).parts == {"one": 1.0, "two": 2.0}


def test_a_scored_part_is_not_computed_again_after_another_part_failed(tmp_path: Path) -> None:
    calls: list[str] = []

    async def late(request: Request) -> float:
        await asyncio.sleep(1.0)
        raise Fatal("no")

    async def main(other: Reward, journal: Path | None) -> Score:
        weighted = Weighted({"paid": paid(calls), "b": other})
        async with RewardAgent(weighted, journal=journal) as agent:
            for _ in range(2):
                (score,) = await group_scored(agent, [(Task("t"), "abc")])
            return score

    assert not virtual_time.run(main(late, None)).valid
    assert len(calls) == 1
    assert not virtual_time.run(main(late, tmp_path / "rewards.sqlite")).valid
    assert virtual_time.run(main(constant(1.0), tmp_path / "rewards.sqlite")).value == 2.0
    assert len(calls) == 2


def test_a_payload_that_is_not_json_can_be_scored() -> None:
    assert scored(Weighted({"a": constant(1.0)}), Request(Task("t", (), {"x": object()}), ())).value == 1.0


def test_a_part_that_post_processing_replaces_is_not_counted_as_left_out() -> None:
    class MeanForNone:
        async def compute_score(self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
            if solution_str == "bad":
                raise Fatal("no")
            return 1.0

        def post_process_scores(self, scores: list[float | None]) -> list[float]:
            return [0.5 if score is None else score for score in scores]

    async def main() -> list[Score]:
        task = Task("t", (), {"data_source": "d", "reward_model": {"ground_truth": "x"}})
        parts = {"verl": verl(MeanForNone()), "other": constant(1.0)}
        async with RewardAgent(Weighted(parts, on_failure="renormalise")) as agent:
            return await group_scored(agent, [(task, "good"), (task, "bad")])

    good, bad = virtual_time.run(main())
    assert (good.value, dict(good.parts)) == (2.0, {"verl": 1.0, "other": 1.0})
    assert (bad.value, dict(bad.parts)) == (1.5, {"verl": 0.5, "other": 1.0})


def test_closing_closes_all_parts_if_one_raises() -> None:
    closed = []

    class Closing(Scorer):
        version = "1"

        def __init__(self, name: str) -> None:
            self.name = name

        async def __call__(self, request: Request) -> Score:
            return Score(1.0)

        async def aclose(self) -> None:
            await asyncio.sleep(0)
            closed.append(self.name)
            if self.name == "b":
                raise OSError("the connection is gone")

    with pytest.raises(OSError, match="gone"):
        asyncio.run(Weighted({name: Closing(name) for name in "abc"}).aclose())
    assert sorted(closed) == ["a", "b", "c"]
