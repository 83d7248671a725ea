"""Calls of the taskset in the environment service: equal calls share one result, and time and number are limited."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gleanrl.environments.pool import EnvironmentPool
from gleanrl.environments.service.calls import MOST, Calls
from gleanrl.environments.service.client import Problem, ServiceTaskset
from gleanrl.environments.service.episodes import Refused
from gleanrl.types import Task
from tests.environments.service.world import Echo, served
from tests.environments.test_pool import gone

HOARDING = "tests.environments.service.hoarding:Hoarding"


@pytest.mark.parametrize("workers", ["1", "0"])
def test_equal_calls_are_computed_once_and_a_call_over_the_time_limit_fails(workers: str, tmp_path: Path) -> None:
    options = ("--environment.options.folder", str(tmp_path), "--taskset-timeout-s", "1.5", "--workers", workers)
    with served(HOARDING, *options) as (process, url):
        taskset: Any = ServiceTaskset(url=url, timeout_s=20.0, patience_s=0.0)

        async def ask(split: str, count: int) -> Any:
            return await taskset.client.ask("/tasks", {"split": split, "count": count})

        async def together() -> None:
            answers = await asyncio.gather(*(ask("train", count) for count in (3, 3, 4, 3)))
            assert [len(answer["tasks"]) for answer in answers] == [3, 3, 4, 3]
            assert (await ask("train", 3))["tasks"] == answers[0]["tasks"]
            made = {int(pid) for pid in (tmp_path / "train").read_text().split()}
            assert len((tmp_path / "train").read_text().split()) == 2
            (worker,) = (await taskset.client.ask("/profile"))["workers"] or (0,)
            # With workers, the taskset is called in a process that is neither the server, whose event loop it would
            # block, nor the worker that plays episodes.
            assert (process.pid in made, worker in made) == (workers == "0", False)
            asking = [asyncio.ensure_future(ask("warm_start", 5)) for _ in range(3)]
            for problem in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(problem, Problem)
                assert (problem.status, problem.error) == (500, "timeout")
                assert problem.detail == "the taskset took over 1.5 s (--taskset-timeout-s)"
            (stuck,) = (tmp_path / "warm_start").read_text().split()
            # The process that took too long is replaced. The server's own process cannot be.
            if workers == "1":
                assert gone([int(stuck)])
                assert len((await ask("eval", 5))["tasks"]) == 5
            else:
                assert int(stuck) == process.pid
                with pytest.raises(Exception, match="still at a call that took too long"):
                    await ask("eval", 5)

        asyncio.run(together())
        assert process.poll() is None


# --- without workers ----------------------------------------------------------------------------
class Waiting(Echo):
    """A taskset whose lists of tasks wait until the event ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["go"] = threading.Event()

    def tasks(self, split: Any, count: int) -> Any:
        assert self.__dict__["go"].wait(20)
        return super().tasks(split, count)


def calling(body: Callable[[Calls, threading.Event], Awaitable[None]], timeout_s: float) -> None:
    async def main() -> None:
        taskset = Waiting()
        async with EnvironmentPool(taskset) as pool:
            calls = Calls(taskset, pool, timeout_s)
            try:
                await body(calls, taskset.__dict__["go"])
            finally:
                await calls.close()

    asyncio.run(main())


async def refusal(call: Awaitable[Any]) -> bytes:
    with pytest.raises(Refused) as refused:
        await call
    return bytes(refused.value.answer.body)


def test_at_most_most_different_calls_wait_and_an_equal_call_is_always_accepted() -> None:
    async def body(calls: Calls, go: threading.Event) -> None:
        asked = [asyncio.ensure_future(calls.call("tasks", "train", number)) for number in range(MOST)]
        await asyncio.sleep(0)
        assert b"wait already" in await refusal(calls.call("tools", Task("t")))
        # This call is equal to one that waits already.
        again = asyncio.ensure_future(calls.call("tasks", "train", 3))
        await asyncio.sleep(0)
        go.set()
        assert [len(tasks) for tasks in await asyncio.gather(*asked)] == list(range(MOST))
        assert len(await again) == 3
        assert b"tools" in await calls.call("tools", Task("t"))

    calling(body, 30.0)


def test_without_workers_calls_are_refused_until_an_overdue_call_has_ended() -> None:
    async def body(calls: Calls, go: threading.Event) -> None:
        assert b'"timeout"' in await refusal(calls.call("tasks", "train", 1))
        assert b"cannot be ended" in await refusal(calls.call("tools", Task("t")))
        go.set()
        async with asyncio.timeout(20):
            while True:
                try:
                    assert b"tools" in await calls.call("tools", Task("t"))
                    return
                except Refused:
                    await asyncio.sleep(0.01)

    calling(body, 0.2)


def test_closing_refuses_calls_that_are_not_finished() -> None:
    async def body(calls: Calls, go: threading.Event) -> None:
        asked = [asyncio.ensure_future(calls.call("tasks", "train", number)) for number in range(3)]
        await asyncio.sleep(0.01)
        await calls.close()
        for call in asked:
            assert b"draining" in await refusal(call)
        go.set()
        assert b"draining" in await refusal(calls.call("tools", Task("t")))  # also calls that come later

    calling(body, 30.0)


def test_a_call_that_fails_after_its_client_has_given_up_logs_nothing() -> None:
    reports: list[str] = []

    async def body(calls: Calls, go: threading.Event) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context["message"]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(calls.call("tasks", "train", 1), 0.05)
        await asyncio.sleep(0.3)  # the call has exceeded its time limit
        gc.collect()
        await asyncio.sleep(0)
        go.set()

    calling(body, 0.1)
    assert reports == []
