"""Calls of a taskset itself on behalf of clients: one after the other, with a time limit and a bounded queue."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from gleanrl.environments.pool import EnvironmentDied, EnvironmentPool, EnvironmentRaised
from gleanrl.environments.service.bodies import encode
from gleanrl.environments.service.episodes import Refused
from gleanrl.protocols import Split, Taskset
from gleanrl.types import Task
from gleanrl.utils.errors import NoExpert
from gleanrl.utils.processes import RemoteError, WorkerDied, WorkerProcess, WorkerTimeout

MOST = 64  # calls that are under way or wait
_AFTER_S = 5  # to wait before the next attempt
Call = Callable[[Any], Any]  # of the taskset


class Calls:
    """The calls that clients ask for. The same call, asked for again while it is under way, is not made again.

    With workers they are made in a process that plays no episodes: it can be killed, and does not block requests.
    Without, they are made in a thread; a call that takes too long cannot be ended there, and until it ends no other
    is made.
    """

    def __init__(self, taskset: Taskset, pool: EnvironmentPool, timeout_s: float) -> None:
        self._taskset, self._pool, self._timeout_s = taskset, pool, timeout_s
        self._worker: WorkerProcess | None = None
        self._late: asyncio.Future[Any] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._pending: dict[Hashable, asyncio.Task[Any]] = {}

    async def call(self, key: Hashable, call: Call) -> Any:
        """Make the call and return its result; calls with the same ``key`` are the same.

        Raises:
            Refused: too many wait, it took too long, or the server is closed meanwhile.
            EnvironmentFailure, UserError: as `EnvironmentPool` has them.
        """
        pending = self._pending.get(key)
        if pending is None:
            if len(self._pending) >= MOST:
                raise Refused(503, "full", f"{MOST} calls of the taskset wait already", _AFTER_S)
            pending = self._pending[key] = asyncio.get_running_loop().create_task(self._make(call))
            pending.add_done_callback(lambda _: self._pending.pop(key, None))
        try:
            return await asyncio.shield(pending)
        except asyncio.CancelledError:
            if not pending.cancelled():  # it is the request that was
                raise
        raise Refused.draining()

    async def close(self) -> None:
        """Refuse what is not done, and end the process."""
        for pending in self._pending.values():
            pending.cancel()
        if self._worker is not None:
            self._worker.kill()  # it has nothing to clean up
            await self._worker.close()

    async def _make(self, call: Call) -> Any:
        async with self._one_at_a_time:
            if not self._pool.worker_pids:
                return await self._in_thread(call)
            if self._worker is None or self._worker.death is not None:
                self._worker = self._pool.further_worker(self._timeout_s)
            try:
                return await self._worker.call("apply", call)
            except WorkerTimeout:
                raise self._too_long() from None
            except WorkerDied as error:
                raise EnvironmentDied("", str(error)) from None
            except RemoteError as error:
                raise EnvironmentRaised("", error.kind, error.detail, error.traceback_text) from None

    async def _in_thread(self, call: Call) -> Any:
        if self._late is not None and not self._late.done():
            detail = "the taskset is still at a call that took too long (with --workers 0 it cannot be ended)"
            raise Refused(503, "full", detail, _AFTER_S)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            value, error = None, None
            try:
                value = call(self._taskset)
            except BaseException as raised:  # SystemExit too: a taskset that exits costs its request
                error = Refused.of(raised)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set_result, (value, error))

        threading.Thread(target=run, name="taskset", daemon=True).start()
        finished, _ = await asyncio.wait((done,), timeout=self._timeout_s)
        if not finished:
            self._late = done
            raise self._too_long()
        value, error = done.result()
        if error is not None:
            raise error
        return value

    def _too_long(self) -> Refused:
        return Refused(500, "timeout", f"the taskset took over {self._timeout_s:g} s (--taskset-timeout-s)")


# --- calls, which travel to the worker ---------------------------------------------------------------
def list_tasks(split: Split, count: int, taskset: Any) -> list[bytes]:
    """Return each task as JSON."""
    return [encode(task) for task in taskset.tasks(split, count)]


def prepare(tasks: Sequence[Task], workers: int, taskset: Any) -> None:
    taskset.prepare(tasks, workers=workers)


def demonstrate(task: Task, seed: int, noise: float, taskset: Any) -> bytes | str:
    """Return the answer's body; as a text, why there is no expert."""
    try:
        messages, score = taskset.demonstrate(task, seed=seed, noise=noise)
    except NoExpert as error:
        return str(error)
    return encode({"messages": messages, "score": score})


def list_tools(task: Task, taskset: Any) -> bytes:
    """Return the answer's body."""
    return encode({"tools": list(taskset.tools(task))})
