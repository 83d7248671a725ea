"""Tests of `gleanrl.rewards.http.HttpReward` against a scripted HTTP server on loopback that shows many faults."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from gleanrl.rewards import RewardAgent
from gleanrl.rewards.http import HttpReward
from gleanrl.rewards.request import Request
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.http import retry_after
from gleanrl.utils.retry import Fatal, Retryable
from tests.rewards.service import Plan, Service, group_scored

TASK = Task("t", payload={"answer": 4})


def asked(says: str, own: Score | None = None) -> Request:
    messages = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": says})
    return Request(TASK, messages, says, own or Score.failed("none"))  # type: ignore[arg-type]


def served(plan: Plan, use: Callable[[Service, HttpReward], Awaitable[None]], **options: Any) -> Service:
    """Call ``use`` with a running service and a reward that sends to it, and return the service."""

    async def main() -> Service:
        async with Service(plan) as service:
            reward = HttpReward(f"{service.url}/score", **options)
            await use(service, reward)
            await reward.aclose()
            return service

    return asyncio.run(main())


def test_a_trajectory_is_sent_as_json_and_its_score_is_returned() -> None:
    async def use(service: Service, reward: HttpReward) -> None:
        score = await reward(asked("4, worth 7", Score(0.5)))
        assert (score.value, score.parts, score.explanation) == (7.0, {"length": 3.0}, "by its worth")

    service = served(Plan(), use, fields={"rubric": "strict"}, headers={"X-Team": "blue"})
    assert service.bodies == [
        {
            "rubric": "strict",
            "task_id": "t",
            "payload": {"answer": 4},
            "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4, worth 7"}],
            "response": "4, worth 7",
            "trajectory_id": "4, worth 7",
            "environment_score": 0.5,
        }
    ]
    assert service.headers[0]["x-team"] == "blue"


@pytest.mark.parametrize(
    ("fault", "cause", "said"),
    [
        ("429", "rate_limit", "no luck: 429"),
        ("500", "server", "no luck: 500"),
        ("503", "unavailable", "no luck: 503"),
        ("hang", "timeout", "did not answer within 0.3 s"),
        ("half", "connection", "http:"),
        ("garbage", "answer", "no JSON"),
        ("drop", "connection", "http:"),
    ],
)
def test_a_transient_fault_raises_retryable_and_the_next_call_succeeds(fault: str, cause: str, said: str) -> None:
    async def use(service: Service, reward: HttpReward) -> None:
        with pytest.raises(Retryable, match=said) as error:
            await reward(asked("worth 3"))
        assert error.value.cause == cause
        assert error.value.after_s == (7.5 if fault in ("429", "503") else None)
        assert (await reward(asked("worth 3"))).value == 3.0

    service = served(Plan(faults={fault: 1.0}, retry_after="7.5"), use, timeout_s=0.3 if fault == "hang" else 30.0)
    assert dict(service.met) == {fault: 1}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("status", [429, 503])
def test_a_service_that_refuses_a_few_requests_for_a_while_loses_none(count: int, status: int) -> None:
    async def main() -> list[Score]:
        ends_at: float | None = None  # the first request sets it, because starting may take longer on a busy machine

        def answer(path: str, body: Any) -> tuple[int, Any]:
            nonlocal ends_at
            ends_at = ends_at or time.monotonic() + 0.3
            if time.monotonic() < ends_at:
                return status, {"error": "not now"}
            return 200, {"score": float(body["response"])}

        async with Service(Plan(answer=answer)) as service:
            reward = HttpReward(f"{service.url}/score")
            async with RewardAgent(reward, attempts=2, backoff_s=0.02) as agent:
                scores = await group_scored(agent, [(TASK, str(n)) for n in range(count)])
            assert len(service.bodies) > 2 * count
            return scores

    assert [score.value for score in asyncio.run(main())] == list(range(count))


def test_a_refused_connection_raises_retryable_with_cause_unreachable() -> None:
    async def main() -> None:
        async with Service() as service:
            url = service.url
        with pytest.raises(Retryable) as error:
            await HttpReward(url)(asked("worth 3"))
        assert error.value.cause == "unreachable"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (400, {"error": {"message": "too long"}}, "status 400: too long"),
        (401, {"error": "who?"}, "who\\?; no key was sent: set api_key_env"),
        (404, {"detail": "nothing here"}, "status 404: nothing here"),
        (429, {"error": {"message": "pay first", "code": "insufficient_quota"}}, "pay first"),
        (200, {"value": 3}, "has no score"),
        (200, [3], "has no score"),
        (200, {"score": None}, "no number at score"),
        (200, {"score": "3"}, "no number at score"),
        (200, {"score": float("nan")}, "no number at score"),
        (200, {"score": 10**400}, "no number at score"),
        (200, {"score": 1, "turns": [0.5, None]}, "not a finite number"),
    ],
)
def test_permanent_errors_and_answers_without_a_score_raise_fatal(status: int, answer: Any, said: str) -> None:
    async def use(service: Service, reward: HttpReward) -> None:
        with pytest.raises(Fatal, match=said):
            await reward(asked("worth 3"))

    served(Plan(answer=lambda path, body: (status, answer)), use)


def test_the_score_option_is_a_path_into_the_answer() -> None:
    async def use(service: Service, reward: HttpReward) -> None:
        assert (await reward(asked("x"))).value == 0.25

    served(Plan(answer=lambda path, body: (200, {"data": [{"value": 0.25}]})), use, score="data.0.value")


def test_an_answer_may_give_turn_rewards() -> None:
    async def use(service: Service, reward: HttpReward) -> None:
        assert (await reward(asked("x"))).turns == (0.0, 1.5)

    served(Plan(answer=lambda path, body: (200, {"score": 1, "turns": [0, 1.5]})), use)


def test_lone_surrogates_and_arrays_are_sent_and_other_objects_refused() -> None:
    import numpy as np

    async def use(service: Service, reward: HttpReward) -> None:
        request = Request(Task("t", payload={"x": np.arange(2)}), ({"role": "assistant", "content": "\ud83d worth 2"},))
        assert (await reward(request)).value == 2.0
        with pytest.raises(Fatal, match="as JSON"):
            await reward(Request(Task("t", payload={"x": object()}), ()))

    assert served(Plan(), use).bodies[0]["payload"] == {"x": [0, 1]}


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-1"}, 0.0),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": formatdate(1_000_030, usegmt=True), "date": formatdate(1_000_000, usegmt=True)}, 30.0),
        ({"retry-after": formatdate(1_000_000, usegmt=True)}, 0.0),  # a date in the past
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
        ({}, None),
    ],
)
def test_retry_after_headers_are_read_as_seconds(fields: dict[str, str], seconds: float | None) -> None:
    assert retry_after(fields) == seconds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "localhost:8000"}, "give an address"),
        ({"url": "http://"}, "give an address"),
        ({"url": "http://localhost:99999"}, "65535"),
        ({"url": "http://[::1"}, "give an address"),
        ({"score": "a..b"}, "give the path"),
        ({"timeout_s": 0}, "must be positive"),
        ({"connections": 0}, "must be positive"),
        ({"fields": {"x": object()}}, "travel as JSON"),
        ({"api_key_env": "NOT_THERE"}, "NOT_THERE is not set"),
    ],
)
def test_invalid_settings_raise_a_one_line_user_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        HttpReward(**{"url": "http://localhost:1", **options})
    assert "\n" not in str(error.value)


def test_the_version_depends_on_the_settings_that_change_a_score() -> None:
    versions = {
        HttpReward(**options).version  # type: ignore[arg-type]
        for options in (
            {"url": "http://a"},
            {"url": "http://a/b"},
            {"url": "http://a?b=1"},
            {"url": "http://a", "version": "2"},
            {"url": "http://a", "score": "x"},
            {"url": "http://a", "fields": {"rubric": "strict"}},
        )
    }
    assert len(versions) == 6
    assert HttpReward("http://a").version == HttpReward("http://b:8000/", timeout_s=3).version


def test_a_service_that_moved_to_another_port_is_not_asked_for_scores_in_the_journal(tmp_path: Path) -> None:
    items = [(TASK, f"worth {n}") for n in range(20)]

    async def once() -> Service:
        async with Service() as service:
            reward = HttpReward(f"{service.url}/score")
            async with RewardAgent(reward, journal=tmp_path / "journal.sqlite") as agent:
                assert [score.value for score in await group_scored(agent, items)] == list(range(20))
            return service

    first, moved = asyncio.run(once()), asyncio.run(once())
    assert first.url != moved.url
    assert (len(first.bodies), len(moved.bodies)) == (20, 0)


@pytest.mark.parametrize(
    ("again_after_s", "pause_s", "echoes"), [(0.0, 0.0, False), (0.01, 0.05, False), (0.01, 0.0, True)]
)
def test_a_second_answer_to_a_request_is_not_taken_for_the_answer_to_the_next(
    again_after_s: float, pause_s: float, echoes: bool
) -> None:
    """The second answer comes with the first, while no request uses the connection, or during the next request."""

    async def use(service: Service, reward: HttpReward) -> None:
        async with RewardAgent(reward, backoff_s=0.01) as agent:
            for n in range(12):
                assert (await agent.score(TASK, f"worth {n}")).value == n
                await asyncio.sleep(pause_s)

    plan = Plan(again_after_s=again_after_s, echoes=echoes, latency=lambda random: 0.03 if echoes else 0.0)
    assert served(plan, use).connections > 1


def test_an_error_names_the_target_of_a_redirect() -> None:
    async def use(service: Service, reward: HttpReward) -> None:
        with pytest.raises(Fatal, match=r"redirects to https://grader\.example/v2"):
            await reward(asked("worth 3"))

    served(Plan(redirect="https://grader.example/v2"), use)


def test_an_answer_that_has_a_key_twice_gives_no_score() -> None:
    async def use(service: Service, reward: HttpReward) -> None:
        with pytest.raises(Retryable, match="'score' twice") as error:
            await reward(asked("worth 3"))
        assert error.value.cause == "answer"

    class Twice(dict[str, Any]):
        def items(self) -> Any:
            return [("score", 0), ("score", 1)]

    served(Plan(answer=lambda path, body: (200, Twice(score=0))), use)


def test_a_thousand_concurrent_requests_reuse_their_connections() -> None:
    count = 1000

    async def use(service: Service, reward: HttpReward) -> None:
        for n in (count, 100):
            scores = await asyncio.gather(*(reward(asked(f"worth {i}")) for i in range(n)))
            assert [score.value for score in scores] == list(range(n))

    service = served(Plan(latency=lambda random: 1.0), use)
    assert service.most > 160
    assert service.connections <= count


def test_the_connections_setting_bounds_the_open_connections() -> None:
    async def use(service: Service, reward: HttpReward) -> None:
        await asyncio.gather(*(reward(asked(f"worth {i}")) for i in range(40)))

    service = served(Plan(latency=lambda random: 0.01), use, connections=5)
    assert service.most <= 5
    assert service.connections == 5


def test_the_connection_limit_stays_below_the_limit_of_open_files() -> None:
    code = (
        "import resource; from gleanrl.utils.http import connection_limit as allowed;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (600, 1000)); print(allowed(50), allowed(4096), allowed(4096));"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["50", "488", "488", "1000"]


def test_one_client_works_in_successive_event_loops() -> None:
    async def once() -> float:
        async with Service() as service:
            reward._client.url = f"{service.url}/score"
            return (await reward(asked("worth 3"))).value

    reward = HttpReward("http://127.0.0.1:1/score")
    assert [asyncio.run(once()), asyncio.run(once())] == [3.0, 3.0]


def test_the_agent_scores_every_trajectory_correctly_through_a_faulty_service() -> None:
    """The service shows all faults at once. Only an answer without a score stays invalid, and it names the reason."""
    faults = {
        "429": 0.08,
        "500": 0.06,
        "503": 0.06,
        "hang": 0.04,
        "half": 0.05,
        "garbage": 0.05,
        "drop": 0.05,
        "no_score": 0.05,
    }
    plan = Plan(faults=faults, latency=lambda random: random.uniform(0.0, 0.02), seed=5)
    groups = [[(TASK, f"answer {g}.{i} worth {10 * g + i + 1}") for i in range(5)] for g in range(40)]

    async def main() -> tuple[Service, dict[int, list[Score]], dict[str, float]]:
        async with Service(plan) as service:
            reward = HttpReward(f"{service.url}/score", timeout_s=2.0)
            async with RewardAgent(reward, max_concurrency=100, attempts=3, backoff_s=0.01) as agent:
                scores = {index: scores async for index, scores in agent.score_groups(groups)}
                return service, scores, dict(agent.metrics())

    service, scores, metrics = asyncio.run(main())
    assert sorted(scores) == list(range(40))
    flat = [(10 * g + i + 1, score) for g in range(40) for i, score in enumerate(scores[g])]
    assert all(score.value == worth for worth, score in flat if score.valid)
    failed = [score.explanation or "" for _, score in flat if not score.valid]
    assert len(failed) == service.met["no_score"] > 0
    assert all("no number at score" in reason for reason in failed)
    assert set(service.met) == set(faults)
    assert metrics["service/retries"] == sum(service.met.values()) - service.met["no_score"]


def test_all_tries_of_a_request_share_an_idempotency_key_that_no_other_request_has() -> None:
    plan = Plan(faults={"500": 0.3, "hang": 0.1, "drop": 0.2, "garbage": 0.2}, repeats=2)
    items = [(TASK, f"worth {n}") for n in range(30)]

    async def once(plan: Plan) -> Service:
        """Score all items with a new agent, which has no cache or journal of an earlier one."""
        async with Service(plan) as service:
            reward = HttpReward("http://127.0.0.1:1/score", timeout_s=2.0)
            reward._client.url = f"{service.url}/score"
            expected = {text: Request(TASK, messages_of(text)).key(reward.version) for _, text in items}
            async with RewardAgent(reward, backoff_s=0.01) as agent:
                assert all(score.valid for score in await group_scored(agent, items))
            keys = [headers["idempotency-key"] for headers in service.headers]
            assert keys == [expected[body["response"]] for body in service.bodies]
            return service

    first, again = asyncio.run(once(plan)), asyncio.run(once(Plan()))
    assert len(first.bodies) > len(again.bodies) == 30 == len({h["idempotency-key"] for h in first.headers})


def messages_of(text: str) -> tuple[Message, ...]:
    return ({"role": "assistant", "content": text},)


def test_a_request_without_a_key_has_no_idempotency_header() -> None:
    async def use(service: Service, reward: HttpReward) -> None:
        await reward._client.request("POST", "", {"messages": []})

    assert "idempotency-key" not in served(Plan(), use).headers[0]


def test_a_hedged_request_has_its_own_idempotency_key() -> None:
    """With the same key, a service that honours idempotency keys would make the hedge wait for the slow request."""
    slow: set[str] = set()

    async def main() -> Service:
        async with Service() as service:
            answer = service._answer

            async def held(path: str, headers: Any, body: Any, *rest: Any) -> bool:
                if body["response"] == "slow" and headers["idempotency-key"] not in slow:
                    slow.add(headers["idempotency-key"])
                    await asyncio.sleep(0.0 if len(slow) == 2 else 30.0)
                return await answer(path, headers, body, *rest)

            service._answer = held  # type: ignore[method-assign]
            async with RewardAgent(HttpReward(f"{service.url}/score"), hedge_share=0.1) as agent:
                assert all(score.valid for score in await group_scored(agent, [(TASK, f"{i}") for i in range(64)]))
                assert (await group_scored(agent, [(TASK, "slow")]))[0].valid
            return service

    service = asyncio.run(main())
    keys = [h["idempotency-key"] for h, body in zip(service.headers, service.bodies, strict=True)
            if body["response"] == "slow"]  # fmt: skip
    assert len(keys) == 2
    assert keys[1] == f"{keys[0]}-second"


def test_waiting_for_a_connection_does_not_count_towards_the_timeout() -> None:
    async def main() -> list[Score]:
        async with Service(Plan(latency=lambda draws: 0.1)) as service:
            reward = HttpReward(f"{service.url}/score", connections=2)
            async with RewardAgent(reward, timeout_s=0.8, attempts=1, max_failed_fraction=1.0) as agent:
                scores = await group_scored(agent, [(TASK, f"worth {i}") for i in range(20)])
                assert service.most <= 2
                return scores

    assert [score.value for score in asyncio.run(main())] == [float(i) for i in range(20)]


def test_a_secret_from_the_environment_is_sent_in_the_body_and_redacted_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRADER_TOKEN", "s3cret-of-the-grader")
    fields = {"token": "env:GRADER_TOKEN", "deep": [{"x": "env:GRADER_TOKEN"}]}

    def answer(path: str, body: Any) -> tuple[int, Any]:
        return 200, {"score": 1.0, "explanation": f"you are {body['token']}"}

    async def use(service: Service, reward: HttpReward) -> None:
        assert (await reward(asked("4"))).explanation == "you are [GRADER_TOKEN]"
        assert "s3cret" not in repr(vars(reward)) + reward.version
        assert reward.version == HttpReward(f"{service.url}/score", fields=fields).version

    (body,) = served(Plan(answer=answer), use, fields=fields).bodies
    assert (body["token"], body["deep"]) == ("s3cret-of-the-grader", [{"x": "s3cret-of-the-grader"}])
