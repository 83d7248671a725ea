"""Tests of sync rewards in threads and worker processes (`gleanrl.rewards.executors`): threads that hang are replaced,
and processes that hang are killed."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gleanrl.rewards import RewardAgent, executors
from gleanrl.simulate import virtual_time
from gleanrl.types import Score
from gleanrl.utils.errors import UserError
from tests.rewards.worlds import make_task, make_trajectory

TROUBLE = "tests.rewards.graders:troublesome"


async def ask(agent: RewardAgent, answer: str, **payload: Any) -> Score:
    task = make_task(**payload)
    return await agent.score(task, make_trajectory(task, answer))


def until(true: Callable[[], bool]) -> None:
    """Wait up to 10 s until the condition holds."""
    deadline = time.monotonic() + 10
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert true()


def gone(pid: int) -> bool:
    """Whether the process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:  # it has ended; if between opening and reading, the error is ESRCH
        return True


# --- threads --------------------------------------------------------------------------------------
def test_a_sync_reward_runs_in_as_many_threads_as_the_workers_setting() -> None:
    active, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(4, timeout=30)

    def reward(request: Any) -> float:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        together.wait()
        with lock:
            active -= 1
        return 1.0

    async def main() -> None:
        async with RewardAgent(reward, workers=4) as agent:
            scores = await asyncio.gather(*(ask(agent, str(n)) for n in range(12)))
            assert all(score.value == 1.0 for score in scores)

    asyncio.run(main())
    assert most == 4


def test_slow_calls_of_evaluation_do_not_delay_the_training_rewards_of_a_sync_reward() -> None:
    release = threading.Event()

    def reward(request: Any) -> float:
        if request.response.startswith("slow"):
            release.wait(30)
        return 1.0

    async def main() -> None:
        async with RewardAgent(reward, workers=2) as agent:
            evaluation = agent.lane("eval")
            slow = [asyncio.create_task(evaluation.score(make_task(), f"slow {n}")) for n in range(6)]
            await asyncio.sleep(0.1)
            async with asyncio.timeout(10):
                assert all(score.valid for score in await asyncio.gather(*(ask(agent, str(n)) for n in range(20))))
            assert not any(task.done() for task in slow)
            release.set()
            assert all(score.valid for score in await asyncio.gather(*slow))

    asyncio.run(main())


def test_long_waits_for_a_thread_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gleanrl.rewards.agent.LONG_QUEUE_S", 0.05)

    async def main(workers: int) -> int:
        async with RewardAgent(lambda request: time.sleep(0.1) or 1.0, workers=workers) as agent:
            await asyncio.gather(*(ask(agent, str(n)) for n in range(8)))
        return sum("reward.workers" in record.getMessage() for record in caplog.records)

    assert asyncio.run(main(8)) == 0
    assert asyncio.run(main(2)) == 1


def test_threads_that_hang_are_replaced_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def reward(request: Any) -> float:
        if request.response.startswith("hang"):
            release.wait(60)
        return 1.0

    async def main() -> list[Score]:
        async with RewardAgent(reward, workers=2, timeout_s=0.1, attempts=1, max_failed_fraction=1.0) as agent:
            hung = await asyncio.gather(*(ask(agent, f"hang {n}") for n in range(6)))
            assert [score.explanation for score in hung] == ["no score within 0.1 s"] * 6
            scores = await asyncio.gather(*(ask(agent, str(n)) for n in range(20)))
            release.set()
            return scores

    with caplog.at_level(logging.WARNING):
        assert [score.value for score in asyncio.run(main())] == [1.0] * 20
    assert len([record for record in caplog.records if "hangs in its thread" in record.getMessage()]) == 1


def test_while_too_many_threads_hang_other_calls_wait_without_losing_an_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executors, "MAX_HUNG_THREADS", 2)
    release = threading.Event()

    def reward(request: Any) -> float:
        if request.response.startswith("hang"):
            release.wait(60)
        return 1.0

    async def main() -> None:
        async with RewardAgent(
            reward, workers=2, timeout_s=0.1, attempts=1, max_failed_fraction=1.0, backoff_s=0.01, max_backoff_s=0.02
        ) as agent:
            assert (await ask(agent, "quick")).value == 1.0
            assert not any(score.valid for score in await asyncio.gather(ask(agent, "hang 1"), ask(agent, "hang 2")))
            waiting = asyncio.create_task(ask(agent, "later"))
            await asyncio.wait([waiting], timeout=0.5)
            assert not waiting.done()
            assert agent.metrics()["service/unreachable"] > 1
            release.set()
            assert (await waiting).value == 1.0

    asyncio.run(main())


def test_without_a_free_thread_before_the_first_answer_a_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "MAX_HUNG_THREADS", 0)

    async def main() -> str | None:
        async with RewardAgent(lambda request: 1.0, attempts=2, backoff_s=0.01) as agent:
            return (await ask(agent, "x")).explanation

    assert "isolation = 'process'" in (asyncio.run(main()) or "")


def test_a_thread_that_cannot_be_started_loses_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, [True, False, False, False, False, False, False]

    def starting(thread: threading.Thread) -> None:
        if thread.name == "gleanrl-reward" and left and not left.pop(0):
            raise RuntimeError("can't start new thread")
        start(thread)

    def reward(request: Any) -> float:
        time.sleep(0.02)
        return 1.0

    async def main() -> None:
        monkeypatch.setattr(threading.Thread, "start", starting)
        async with RewardAgent(reward, workers=4, attempts=1, backoff_s=0.05) as agent:
            assert (await ask(agent, "first")).value == 1.0
            scores = await asyncio.gather(*(ask(agent, str(n)) for n in range(12)))
            assert [score.value for score in scores] == [1.0] * 12
            assert not left

    asyncio.run(main())


def test_an_exception_becomes_the_explanation_with_the_line_of_the_user_s_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def reward(request):\n"
        "    if request.response == 'stop':\n        raise StopIteration\n"
        "    raise ValueError('bad\\nline')\n"
        "async def reward_async(request):\n    return reward(request)\n"
    )

    async def main() -> None:
        for name, isolation in (("reward", "thread"), ("reward_async", "thread"), ("reward", "process")):
            async with RewardAgent(f"{file}:{name}", isolation=isolation, attempts=1) as agent:
                assert (await ask(agent, "x")).explanation == f"ValueError: bad line ({file}:4)"
        async with RewardAgent(f"{file}:reward") as agent:
            assert "StopIteration" in ((await ask(agent, "stop")).explanation or "")

    asyncio.run(main())


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("loops", [1, 2])
def test_an_agent_that_is_opened_again_scores_as_at_first(isolation: str, loops: int) -> None:
    options: dict[str, Any] = {"isolation": isolation, "workers": 2, "timeout_s": 20.0, "attempts": 1}
    agent = RewardAgent(TROUBLE, cache=0, **options)

    async def main(times: int) -> None:
        for _ in range(times):
            async with agent:
                scores = await asyncio.gather(*(ask(agent, "x" * n) for n in range(1, 7)))
                assert [score.value for score in scores] == [1, 2, 3, 4, 5, 6]

    for _ in range(loops):
        asyncio.run(main(4 // loops))


# --- processes --------------------------------------------------------------------------------------
def test_a_worker_process_that_hangs_is_killed_with_its_children_and_replaced(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def main() -> None:
        options = {"isolation": "process", "workers": 1, "timeout_s": 2.0, "attempts": 1, "max_failed_fraction": 1.0}
        async with RewardAgent(TROUBLE, **options) as agent:
            assert (await ask(agent, "four")).value == 4
            started = time.monotonic()
            hung = await ask(agent, "spawn and hang", pids=str(pids))
            assert hung.explanation == "no score within 2 s; its process was killed"
            assert time.monotonic() - started < 20
            died, after = await asyncio.gather(ask(agent, "die"), ask(agent, "after"))
            assert "SIGKILL" in (died.explanation or "")
            assert after.value == 5
            assert "missing" in ((await ask(agent, "raise")).explanation or "")
            last = int((await ask(agent, "pid")).value)
        assert gone(last)

    asyncio.run(main())
    worker, child = map(int, pids.read_text().split())
    until(lambda: gone(worker) and gone(child))


def test_worker_processes_take_options_and_post_process_groups() -> None:
    async def main() -> None:
        async with RewardAgent("tests.rewards.graders:Scaled", isolation="process", workers=1,
                               options={"scale": 2.0}) as agent:  # fmt: skip
            async for _, scores in agent.score_groups([[(make_task(), "x" * n) for n in (1, 2)]]):
                assert [score.value for score in scores] == [-2.0, 0.0]

    asyncio.run(main())


def test_cancelling_a_call_kills_its_worker_process() -> None:
    async def main() -> None:
        async with RewardAgent(TROUBLE, isolation="process", workers=1) as agent:
            pid = int((await ask(agent, "pid")).value)
            waiting = asyncio.create_task(ask(agent, "hang"))
            await asyncio.sleep(0.3)
            assert agent._limiter.in_flight == 1
            waiting.cancel()
            await asyncio.wait([waiting])
            assert (await ask(agent, "four")).value == 4
            assert gone(pid)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "cause"), [("timeout", "timeout"), ("refused", "unreachable"), ("reset", "connection")]
)
def test_the_cause_of_an_error_is_kept_across_processes(name: str, cause: str) -> None:
    async def main() -> None:
        async with RewardAgent(TROUBLE, isolation="process", workers=1, attempts=1) as agent:
            assert not (await ask(agent, name)).valid
            assert agent.metrics()[f"service/failed/{cause}"] == 1

    asyncio.run(main())


def test_a_reward_that_workers_cannot_unpickle_or_import_raises_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pickled.*import path"):
        RewardAgent(lambda request: 1.0, isolation="process")
    file = tmp_path / "main_only.py"
    file.write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    raise RuntimeError('only here')\ndef fn(r):\n    return 1\n"
    )

    async def main() -> None:
        async with RewardAgent(f"{file}:fn", isolation="process", workers=1) as agent:
            with pytest.raises(UserError, match="only here"):
                await ask(agent, "x")

    asyncio.run(main())


def test_an_async_reward_runs_on_the_loop_despite_process_isolation(caplog: pytest.LogCaptureFixture) -> None:
    active = most = 0

    async def reward(request: Any) -> float:
        nonlocal active, most
        active, most = active + 1, max(most, active + 1)
        await asyncio.sleep(1.0)
        active -= 1
        return float(os.getpid())

    async def main() -> list[Score]:
        async with RewardAgent(reward, isolation="process", workers=2) as agent:
            return await asyncio.gather(*(ask(agent, str(n)) for n in range(50)))

    with caplog.at_level(logging.WARNING):
        assert [score.value for score in virtual_time.run(main())] == [float(os.getpid())] * 50
    assert most == 50
    assert "isolation = 'process'" in caplog.text
