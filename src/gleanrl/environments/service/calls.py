"""What a taskset computes itself: one call after the other, each for so long at most, and so many that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from gleanrl.environments.pool import EnvironmentDied, EnvironmentPool, EnvironmentRaised
from gleanrl.environments.service.encoding import encode
from gleanrl.environments.service.episodes import Refused
from gleanrl.protocols import Split, Taskset
from gleanrl.rollout.tool_calls import tools_of
from gleanrl.types import Task
from gleanrl.utils.errors import NoExpert
from gleanrl.utils.processes import RemoteError, WorkerDied, WorkerProcess, WorkerTimeout

MOST = 64  # calls that are under way or wait
_AFTER_S = 5  # to wait before the next try
Call = Callable[[Any], Any]  # of the taskset


class _Place(Protocol):
    """Where calls are made, one at a time."""

    @property
    def pids(self) -> Sequence[int]: ...
    async def call(self, call: Call) -> Any: ...
    async def close(self) -> None: ...


class Calls:
    """The calls that clients ask for. The same one, asked for again while it is under way, is not made again."""

    def __init__(self, taskset: Taskset, pool: EnvironmentPool, timeout_s: float) -> None:
        self._place: _Place = _Process(pool, timeout_s) if pool.worker_pids else _Thread(taskset, timeout_s)
        self._turn = asyncio.Lock()
        self._pending: dict[Hashable, asyncio.Task[Any]] = {}

    @property
    def pids(self) -> Sequence[int]:
        """Of the process in which they are made, where it is another than this."""
        return self._place.pids

    @property
    def pending(self) -> int:
        return len(self._pending)

    async def call(self, key: Hashable, call: Call) -> Any:
        """What ``call`` returns; ``key`` says whether it is the same as another.

        Raises:
            Refused: too many wait, or the server is closed meanwhile.
            EnvironmentFailure, UserError: as `EnvironmentPool` has them; it raised or took too long.
        """
        pending = self._pending.get(key)
        if pending is None:
            if len(self._pending) >= MOST:
                raise Refused(503, "full", f"{MOST} calls of the taskset wait already", _AFTER_S)
            pending = self._pending[key] = asyncio.get_running_loop().create_task(self._made(call))
            pending.add_done_callback(lambda _: self._pending.pop(key, None))
        try:
            return await asyncio.shield(pending)
        except asyncio.CancelledError:
            if not pending.cancelled():  # it is the request that was
                raise
        raise Refused.draining()

    async def close(self) -> None:
        """Refuse what is not done, and end what it is done in."""
        for pending in self._pending.values():
            pending.cancel()
        await self._place.close()

    async def _made(self, call: Call) -> Any:
        async with self._turn:
            return await self._place.call(call)


class _Process:
    """A worker that plays no episodes: it can be ended, and what it computes does not hold up requests."""

    def __init__(self, pool: EnvironmentPool, timeout_s: float) -> None:
        self._pool, self._timeout_s = pool, timeout_s
        self._worker: WorkerProcess | None = None  # begun when it is needed

    @property
    def pids(self) -> Sequence[int]:
        return () if self._worker is None else (self._worker.pid,)

    async def call(self, call: Call) -> Any:
        if self._worker is None or self._worker.death is not None:
            self._worker = self._pool.further_worker(self._timeout_s)
        try:
            return await self._worker.call("apply", call)
        except WorkerTimeout:
            raise _too_long(self._timeout_s) from None
        except WorkerDied as error:
            raise EnvironmentDied("", str(error)) from None
        except RemoteError as error:
            raise EnvironmentRaised("", error.kind, error.detail, error.traceback_text) from None

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()  # it has nothing to put away
            await self._worker.close()


class _Thread:
    """For a server without workers. A call that is too long cannot be ended: nothing else is called until it is."""

    pids: Sequence[int] = ()

    def __init__(self, taskset: Taskset, timeout_s: float) -> None:
        self._taskset, self._timeout_s = taskset, timeout_s
        self._work: SimpleQueue[tuple[Call, asyncio.Future[Any]] | None] = SimpleQueue()
        self._late: asyncio.Future[Any] | None = None
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="taskset", daemon=True).start()

    async def call(self, call: Call) -> Any:
        if self._late is not None and not self._late.done():
            detail = "the taskset is still at a call that took too long (with --workers 0 it cannot be ended)"
            raise Refused(503, "full", detail, _AFTER_S)
        made: asyncio.Future[Any] = self._loop.create_future()
        self._work.put((call, made))
        done, _ = await asyncio.wait((made,), timeout=self._timeout_s)
        if not done:
            self._late = made
            made.add_done_callback(lambda late: late.exception())  # nobody else looks at it
            raise _too_long(self._timeout_s)
        return made.result()

    async def close(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            call, made = work
            value, error = None, None
            try:
                value = call(self._taskset)
            except BaseException as raised:  # SystemExit too: a taskset that exits costs its request
                error = Refused.of(raised)
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(_settle, made, value, error)


def _settle(made: asyncio.Future[Any], value: Any, error: Refused | None) -> None:
    if made.done():
        return
    if error is None:
        made.set_result(value)
    else:
        made.set_exception(error)


def _too_long(seconds: float) -> Refused:
    return Refused(500, "timeout", f"the taskset took over {seconds:g} s (--taskset-timeout-s)")


# --- calls, which travel to the worker; what they give is what is sent -----------------------------
def tasks(split: Split, count: int) -> Call:
    return partial(_tasks, split, count)


def prepare(tasks: Sequence[Task], workers: int) -> Call:
    return partial(_prepare, tasks, workers)


def demonstrate(task: Task, seed: int, noise: float) -> Call:
    return partial(_demonstrate, task, seed, noise)


def tools(task: Task) -> Call:
    return partial(_tools, task)


def _tasks(split: Split, count: int, taskset: Any) -> list[bytes]:
    return [encode(task) for task in taskset.tasks(split, count)]


def _prepare(tasks: Sequence[Task], workers: int, taskset: Any) -> bytes:
    taskset.prepare(tasks, workers=workers)
    return encode({"prepared": len(tasks)})


def _demonstrate(task: Task, seed: int, noise: float, taskset: Any) -> bytes | str:
    """What is sent; why there is no expert, as a text."""
    try:
        messages, score = taskset.demonstrate(task, seed=seed, noise=noise)
    except NoExpert as error:
        return str(error)
    return encode({"messages": messages, "score": score})


def _tools(task: Task, taskset: Any) -> bytes:
    return encode({"tools": list(tools_of(taskset, task))})
