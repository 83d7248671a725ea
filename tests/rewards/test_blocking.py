"""Tests of `BlockingRewardAgent`: calls from many threads, errors, closing, and programs that end by returning, by
Ctrl-C or after a fork while calls wait."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gleanrl.rewards import BlockingRewardAgent, Request, RewardAgent
from gleanrl.types import Score
from gleanrl.utils.errors import UserError
from tests.rewards.graders import Scaled, troublesome
from tests.rewards.service import group_scored
from tests.rewards.worlds import make_task, make_trajectory

TASK = make_task()


class Slow:
    """A reward whose score is the number in the response, after ``seconds``; the response ``"hang"`` never returns."""

    version = "slow-1"

    def __init__(self, seconds: float = 0.05) -> None:
        self.seconds = seconds
        self.asked = self.active = self.most = self.cancelled = 0
        self.hanging = threading.Event()

    async def __call__(self, request: Request) -> float:
        self.asked += 1
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            if request.response == "hang":
                self.hanging.set()
                await asyncio.Event().wait()
            await asyncio.sleep(self.seconds)
            return float(request.response)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gleanrl-rewards")]


# --- scores -------------------------------------------------------------------------------------
def test_groups_are_scored_concurrently_and_returned_in_order() -> None:
    slow = Slow()
    groups = [[(TASK, f"{10 * g + i}") for i in range(4)] for g in range(16)]
    with BlockingRewardAgent(slow, max_concurrency=100) as agent:
        scores = agent.score_groups(group for group in groups)
        assert [[score.value for score in group] for group in scores] == [
            [10 * g + i for i in range(4)] for g in range(16)
        ]
        assert agent.score_groups([]) == []
        assert agent.score_groups([[], [(TASK, "3")]]) == [[], [Score(3.0)]]
    assert slow.most == 64
    assert alive() == []


def test_blocking_and_async_agents_accept_the_same_items_with_equal_scores() -> None:
    items: list[Any] = ["abc", [{"role": "assistant", "content": "four"}], make_trajectory(TASK, "a trajectory")]
    group = [(TASK, item) for item in items]

    async def awaited() -> list[Score]:
        async with RewardAgent(Scaled(2.0)) as agent:
            return await group_scored(agent, group)

    with BlockingRewardAgent(Scaled(2.0)) as agent:
        (scores,) = agent.score_groups([group])  # post-processing subtracts the best score
        single = [agent.submit(*item).result().value for item in group]
    assert [score.value for score in scores] == [score.value for score in asyncio.run(awaited())] == [-18, -16, 0]
    assert single == [6, 8, 24]


def test_calls_from_many_threads_share_identical_requests() -> None:
    slow = Slow(0.01)
    with BlockingRewardAgent(slow, max_concurrency=1000) as agent, ThreadPoolExecutor(32) as threads:

        def one(n: int) -> tuple[float, list[float]]:
            future = agent.submit(TASK, f"{n}")
            ((first, second),) = agent.score_groups([[(TASK, f"{n + 1000}"), (TASK, f"{n}")]], lane="eval")
            return future.result().value, [first.value, second.value]

        found = list(threads.map(one, range(200)))
        metrics = agent.metrics()
    assert found == [(n, [n + 1000, n]) for n in range(200)]
    assert slow.asked == 400  # identical requests share one call
    assert metrics["service/scored"] == 400
    assert metrics["service/cache_hits"] == 200


def test_a_coroutine_can_await_submitted_scores_without_blocking_its_loop() -> None:
    async def main(agent: BlockingRewardAgent) -> list[float]:
        asked = [asyncio.wrap_future(agent.submit(TASK, f"{n}")) for n in range(50)]
        return [score.value for score in await asyncio.gather(*asked)]

    slow = Slow(0.1)
    with BlockingRewardAgent(slow) as agent:
        assert asyncio.run(main(agent)) == list(range(50))
    assert slow.most == 50


def test_sync_rewards_run_in_threads_or_in_processes() -> None:
    group = [(TASK, "abc"), (TASK, "raise"), (TASK, "pid")]
    for isolation in ("thread", "process"):
        with BlockingRewardAgent(troublesome, isolation=isolation, workers=2) as agent:
            ((length, raised, pid),) = agent.score_groups([group])
        assert length == Score(3.0)
        assert not raised.valid
        assert "KeyError" in (raised.explanation or "")
        assert (pid.value == os.getpid()) == (isolation == "thread")


def test_a_second_agent_reads_the_scores_of_the_first_from_the_journal(tmp_path: Path) -> None:
    slow = Slow()
    for _ in range(2):
        with BlockingRewardAgent(slow, journal=tmp_path / "journal.sqlite") as agent:
            assert agent.score_groups([[(TASK, "1"), (TASK, "2")]]) == [[Score(1.0), Score(2.0)]]
    assert slow.asked == 2
    assert agent.metrics()["service/journal_hits"] == 2  # metrics() works on a closed agent


# --- what goes wrong ------------------------------------------------------------------------------
def test_a_failed_reward_gives_an_invalid_score_and_wrong_settings_raise(tmp_path: Path) -> None:
    with BlockingRewardAgent(Slow()) as agent:
        assert not agent.submit(TASK, "no number").result().valid
    with pytest.raises(UserError, match="max_concurency: Extra inputs"):
        BlockingRewardAgent(Slow(), max_concurency=3)
    with pytest.raises(UserError, match="no_such"):
        BlockingRewardAgent("tests.rewards.graders:no_such")
    (tmp_path / "journal.sqlite").mkdir()
    with pytest.raises(UserError, match="cannot be opened"):
        BlockingRewardAgent(Slow(), journal=tmp_path / "journal.sqlite")
    assert alive() == []


def test_an_outage_raises_a_user_error_in_the_callers() -> None:
    def down(request: Request) -> float:
        raise ConnectionError("refused")

    with BlockingRewardAgent(down, attempts=1) as agent, ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(agent.score_groups, [[(TASK, f"{n}.{i}") for i in range(8)]]) for n in range(8)]
        errors = [future.exception() for future in futures]
        stopped = [str(error) for error in errors if error is not None]
        assert stopped
        assert all("refused" in error for error in stopped)
        assert all(isinstance(error, UserError | None) for error in errors)
        with pytest.raises(UserError, match="refused"):
            agent.submit(TASK, "later").result()


def test_closing_raises_a_user_error_in_every_waiting_caller() -> None:
    slow = Slow()
    agent = BlockingRewardAgent(slow)
    with ThreadPoolExecutor(4) as threads:
        waiting: list[Future[Any]] = [agent.submit(TASK, "hang")]
        waiting += [threads.submit(agent.score_groups, [[(TASK, "hang"), (TASK, f"{n}")]]) for n in range(3)]
        assert slow.hanging.wait(10)
        closers = [threading.Thread(target=agent.close) for _ in range(3)]
        for thread in closers:
            thread.start()
        for future in waiting:
            with pytest.raises(UserError, match="was closed"):
                future.result(10)
        for thread in closers:
            thread.join(10)
    assert slow.active == 0
    assert alive() == []
    agent.close()
    for call in (lambda: agent.submit(TASK, "1"), lambda: agent.score_groups([[(TASK, "1")]])):
        with pytest.raises(UserError, match="was closed"):
            call()


def test_closing_warns_about_a_task_of_the_reward_that_does_not_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gleanrl.rewards.blocking._TEARDOWN_S", 0.1)
    left, done = list[asyncio.Task[None]](), threading.Event()

    async def stubborn() -> None:
        while not done.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    async def careless(request: Request) -> float:
        left.append(asyncio.create_task(stubborn()))
        await asyncio.sleep(0)
        return 1.0

    agent = BlockingRewardAgent(careless)
    assert agent.submit(TASK, "1").result().value == 1.0
    agent.close()
    assert "does not end" in caplog.text
    done.set()


def test_a_submit_concurrent_with_close_gives_its_score_or_raises() -> None:
    for _ in range(20):
        agent, outcomes = BlockingRewardAgent(Slow(0.0)), []

        def submit(agent: BlockingRewardAgent = agent, outcomes: list[Any] = outcomes) -> None:
            try:
                outcomes.extend(agent.submit(TASK, f"{n}") for n in range(10_000))
            except UserError as refused:
                outcomes.append(refused)

        threads = [threading.Thread(target=submit) for _ in range(2)]
        for thread in threads:
            thread.start()
        outcomes.append(agent.submit(TASK, "1"))
        agent.close()
        for thread in threads:
            thread.join(10)
        futures = [outcome for outcome in outcomes if isinstance(outcome, Future)]
        assert sum(isinstance(outcome, UserError) for outcome in outcomes) == 2
        for future in futures:
            error = future.exception(10)
            assert error is None or isinstance(error, UserError)


def test_cancelling_a_future_cancels_its_request() -> None:
    slow = Slow()
    with BlockingRewardAgent(slow) as agent:
        future = agent.submit(TASK, "hang")
        assert slow.hanging.wait(10)
        assert future.cancel()
        assert agent.submit(TASK, "1").result().value == 1.0
        assert (slow.cancelled, slow.active) == (1, 0)


def test_a_callback_may_submit_read_metrics_and_close_but_not_wait() -> None:
    go, later, seen = threading.Event(), Future(), Future()

    async def scored(request: Request) -> float:
        # blocks until the callback is added: a callback that is added to a finished future runs in the adding thread
        await asyncio.to_thread(go.wait, 10)
        return float(request.response)

    agent = BlockingRewardAgent(scored)

    def called(_: Future[Score]) -> None:
        try:
            with pytest.raises(RuntimeError, match="wait for itself"):
                agent.score_groups([[(TASK, "2")]])
            agent.submit(TASK, "3").add_done_callback(lambda future: later.set_result(future.result()))
            seen.set_result(agent.metrics()["service/scored"])
        except BaseException as error:
            seen.set_exception(error)

    agent.submit(TASK, "1").add_done_callback(called)
    go.set()
    assert seen.result(10) == 1
    assert later.result(10) == Score(3.0)
    agent.submit(TASK, "4").add_done_callback(lambda _: agent.close())
    agent._thread.join(10)
    assert alive() == []


def test_a_forked_child_gets_a_user_error_and_the_parent_goes_on() -> None:
    with BlockingRewardAgent(Slow()) as agent:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # the child must not return into pytest
            try:
                agent.submit(TASK, "1")
            except UserError as error:
                agent.close()
                os.write(writer, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        assert "one in each process" in os.read(reader, 1000).decode()
        os.close(reader)
        assert agent.submit(TASK, "1").result().value == 1.0


# --- the end of the program -------------------------------------------------------------------------
PROGRAM = r"""
import os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from gleanrl.rewards import BlockingRewardAgent
from tests.rewards.test_blocking import TASK, Slow

slow = Slow()
def said(error):
    os.write(1, f"{type(error).__name__} {error}\n".encode())
"""


def ended(code: str, tmp_path: Path, *, interrupt: bool = False) -> tuple[int, str, str, float]:
    """Run a program. Return its exit status, output, errors, and the seconds from its line "ready" to its end."""
    root = Path(__file__).parents[2]
    with (tmp_path / "errors").open("w+") as errors:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM + code],
            cwd=root,
            env={**os.environ, "JOURNAL": str(tmp_path / "journal.sqlite")},
            text=True,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert program.stdout is not None
        line = program.stdout.readline()
        started = time.monotonic()
        if interrupt:
            program.send_signal(signal.SIGINT)
        # communicate() would lose output that was buffered together with the first line
        rest = program.stdout.read()
        status = program.wait(60)
        seconds = time.monotonic() - started
        errors.seek(0)
        said = errors.read()
    assert line == "ready\n", said
    return status, rest, said, seconds


WAITS = """
agent = BlockingRewardAgent(slow, journal=os.environ["JOURNAL"])
agent.score_groups([[(TASK, "1")]])
def ready():
    slow.hanging.wait()
    threading.Event().wait(0.2)  # the request has begun, but the main thread may still be on its way to wait for it
    print("ready", flush=True)
reporter = threading.Thread(target=ready)
reporter.start()
"""


def test_ctrl_c_ends_a_program_that_waits_for_scores(tmp_path: Path) -> None:
    code = WAITS + "with agent:\n    agent.score_groups([[(TASK, 'hang'), (TASK, '2')]])\n"
    status, _, errors, seconds = ended(code, tmp_path, interrupt=True)
    assert status == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1
    assert seconds < 100  # it would hang for ever


def test_a_program_that_does_not_close_the_agent_ends_while_threads_wait(tmp_path: Path) -> None:
    code = """
def wait():
    try:
        agent.submit(TASK, "hang").result()
    except BaseException as error:
        said(error)
threading.Thread(target=wait).start()
ThreadPoolExecutor(1).submit(wait)
reporter.join()
"""
    status, out, errors, seconds = ended(WAITS + code, tmp_path)
    assert (status, errors) == (0, "")
    assert out == "UserError the reward agent was closed\n" * 2
    assert seconds < 100  # it would hang for ever


def test_a_program_that_does_not_close_the_agent_ends_while_a_worker_process_hangs(tmp_path: Path) -> None:
    code = """
from tests.rewards.graders import troublesome
agent = BlockingRewardAgent(troublesome, isolation="process", workers=2, journal=os.environ["JOURNAL"])
print(*(score.value for score in agent.score_groups([[(TASK, "abc")]])[0]), file=sys.stderr)
agent.submit(TASK, "hang")
print("ready", flush=True)
"""
    status, _, errors, seconds = ended(code, tmp_path)
    assert (status, errors) == (0, "3.0\n")
    assert seconds < 100  # it would hang for ever
