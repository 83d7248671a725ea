"""Calls to worker processes (`gleanrl.utils.processes`): results, errors, time limits, cancellation, worker death.

The tests start real worker processes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gleanrl.utils import processes
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.processes import ProcessPool, RemoteError, Served, WorkerDied, WorkerProcess, WorkerTimeout, pack
from tests.environments.test_pool import gone

FILE = """
from gleanrl.utils.processes import Served

class Mine(Served):
    def greet(self):
        return "from a file"
"""


class ListedError(Exception):
    pass


class Worker(Served):
    def pid(self) -> int:
        return os.getpid()

    def add(self, *numbers: int) -> int:
        return sum(numbers)

    async def sleep(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "awake"

    def block(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self, kind: str) -> None:
        raise {"known": ListedError, "user": UserError, "other": KeyError, "exit": SystemExit}[kind]("why")

    def give(self, what: str) -> Any:
        return Unloadable() if what == "unloadable" else (lambda: 0) if what == "lambda" else b"x" * 3_000_000


class Unloadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


class FailsInConstructor(Served):
    def __init__(self) -> None:
        raise UserError("cannot be made")


class ExitsInConstructor(Served):
    def __init__(self) -> None:
        os._exit(4)


def run_in_pool(
    body: Callable[[ProcessPool], Awaitable[None]], make: Any = Worker, *, count: int = 1, timeout_s: float = 20.0
) -> None:
    async def run() -> None:
        async with ProcessPool(make, count=count, timeout_s=timeout_s, raises=(ListedError,)) as pool:
            await body(pool)

    asyncio.run(run())


def test_calls_return_values_or_raise_errors_without_ending_the_process() -> None:
    async def body(pool: ProcessPool) -> None:
        pid = await pool.call("pid")
        assert pid != os.getpid()
        assert await pool.call("add", 1, 2, 3) == 6
        assert await pool.call("sleep", 0.01) == "awake"
        assert len(await pool.call("give", "much")) == 3_000_000
        with pytest.raises(ListedError, match="why"):
            await pool.call("fail", "known")
        with pytest.raises(UserError, match="why"):
            await pool.call("fail", "user")
        for kind, name in (("other", "KeyError"), ("exit", "SystemExit")):
            with pytest.raises(RemoteError) as caught:
                await pool.call("fail", kind)
            assert caught.value.kind == name
            assert "in fail" in caught.value.traceback_text
        for what in ("unloadable", "lambda"):
            with pytest.raises(RemoteError):
                await pool.call("give", what)
        assert await pool.call("pid") == pid

    run_in_pool(body)


def test_a_process_that_blocks_or_dies_is_replaced_and_one_that_awaits_is_kept() -> None:
    async def body(pool: ProcessPool) -> None:
        pids = {await pool.call("pid")}
        with pytest.raises(WorkerTimeout, match="block"):
            await pool.call("block", 600)
        pids.add(await pool.call("pid"))
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await pool.call("die")
        pids.add(await pool.call("pid"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await pool.call("block", 600)
        pids.add(await pool.call("pid"))
        assert len(pids) == 4
        # `sleep` awaits, so that the call can be cancelled without killing its process.
        with pytest.raises(WorkerTimeout, match="sleep"):
            await pool.call("sleep", 600)
        assert await pool.call("pid") in pids

    run_in_pool(body, timeout_s=0.5)


def test_a_pool_starts_a_process_per_concurrent_call_up_to_its_count() -> None:
    async def body(pool: ProcessPool) -> None:
        await asyncio.gather(*(pool.call("sleep", 0.1) for _ in range(5)))
        assert len(set(await asyncio.gather(*(pool.call("pid") for _ in range(8))))) == 2

    run_in_pool(body, count=2)


@pytest.mark.parametrize(
    ("make", "error"), [(FailsInConstructor, UserError), (ExitsInConstructor, WorkerDied), (dict, RemoteError)]
)
def test_every_call_raises_if_the_constructor_of_the_served_object_fails(make: Any, error: type[Exception]) -> None:
    async def body(pool: ProcessPool) -> None:
        for _ in range(2):
            with pytest.raises(error):
                await pool.call("pid")

    run_in_pool(body, make)


def test_a_factory_that_cannot_be_pickled_raises_when_the_pool_is_created() -> None:
    with pytest.raises(pickle.PicklingError):
        ProcessPool(lambda: Worker(), count=1, timeout_s=1.0)


def test_a_worker_serves_a_class_that_is_loaded_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)

    async def body(pool: ProcessPool) -> None:
        assert await pool.call("greet") == "from a file"

    run_in_pool(body, load_object(f"{file}:Mine"))


def test_one_process_runs_calls_concurrently_and_its_death_reports_which_never_began() -> None:
    async def run() -> None:
        worker = WorkerProcess(pack(Worker), timeout_s=20.0)
        sleeping = [asyncio.ensure_future(worker.call("sleep", 0.3)) for _ in range(50)]
        assert await worker.call("add", 1, 1) == 2
        assert not any(task.done() for task in sleeping)
        assert await asyncio.gather(*sleeping) == ["awake"] * 50
        results = await asyncio.gather(
            worker.call("die", label="the deadly one"), worker.call("pid"), return_exceptions=True
        )
        assert [type(result) for result in results] == [WorkerDied, WorkerDied]
        assert [result.never_began for result in results if isinstance(result, WorkerDied)] == [False, True]
        assert "the deadly one" in str(worker.death)
        with pytest.raises(WorkerDied):
            await worker.call("pid")
        await worker.close()

    asyncio.run(run())


def test_a_call_that_is_cancelled_before_it_begins_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.2)

    async def run() -> None:
        worker = WorkerProcess(pack(Worker), timeout_s=0.5)
        await worker.call("pid")
        blocking = asyncio.ensure_future(worker.call("block", 0.3))
        await asyncio.sleep(0.05)  # the process blocks, so the call and its cancellation arrive together
        waiting = asyncio.ensure_future(worker.call("sleep", 0.0))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await blocking
        await asyncio.sleep(1.0)  # longer than the time limit and the grace
        assert await worker.call("add", 1, 1) == 2
        await worker.close()

    asyncio.run(run())


ORPHANS = """
import asyncio, subprocess
from gleanrl.utils.processes import Served, WorkerProcess, pack

class Spawning(Served):
    async def spawn(self):
        print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
        await asyncio.sleep(1000)

async def main():
    await WorkerProcess(pack(Spawning), timeout_s=1000.0).call("spawn")

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_what_a_worker_has_started_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ORPHANS)
    with subprocess.Popen([sys.executable, str(tmp_path / "program.py")], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        started = int(program.stdout.readline())
        program.kill()
    assert gone([started])


def test_closing_the_pool_kills_a_process_that_blocks() -> None:
    async def body(pool: ProcessPool) -> None:
        pid = await pool.call("pid")
        blocked = asyncio.ensure_future(pool.call("block", 600))
        await asyncio.sleep(0.1)
        await pool.close()
        with pytest.raises(WorkerDied):
            await blocked
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run_in_pool(body)


def test_closing_the_pool_raises_in_a_call_that_waits_for_a_process_and_starts_none_for_it(tmp_path: Path) -> None:
    file, starts = tmp_path / "mine.py", tmp_path / "starts"
    file.write_text(FILE.replace("class", f"open({str(starts)!r}, 'a').write('.')\nclass"))

    async def body(pool: ProcessPool) -> None:
        await pool.call("greet")
        before = starts.read_text()
        running, waiting = (asyncio.ensure_future(pool.call("greet")) for _ in range(2))
        await asyncio.sleep(0)
        await pool.close()
        for call in (running, waiting):
            with pytest.raises(WorkerDied, match=r"killed|closed"):
                await call
        assert starts.read_text() == before

    run_in_pool(body, load_object(f"{file}:Mine"))


def test_closing_a_worker_while_it_starts_logs_no_unretrieved_exception() -> None:
    async def main() -> list[str]:
        said: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
        worker = WorkerProcess(pack(Worker), timeout_s=5.0)
        await worker.close()
        del worker
        gc.collect()
        await asyncio.sleep(0)
        return said

    assert asyncio.run(main()) == []
