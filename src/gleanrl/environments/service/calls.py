"""Calls a taskset's methods on behalf of clients: one call at a time, with a time limit and a bounded queue."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Hashable
from functools import partial
from typing import Any

from gleanrl.environments.pool import EnvironmentDied, EnvironmentPool, EnvironmentRaised
from gleanrl.environments.service.bodies import encode
from gleanrl.environments.service.episodes import DRAINING, Refused
from gleanrl.protocols import Taskset
from gleanrl.types import Score
from gleanrl.utils.processes import RemoteError, WorkerDied, WorkerProcess, WorkerTimeout

MOST = 64  # maximum number of calls under way or waiting; further calls are refused
_AFTER_S = 5  # number of seconds that a refused client should wait before it tries again


class Calls:
    """Makes the calls that clients request. Clients whose calls are equal and wait at the same time share one call.

    If the pool has workers, calls are made in a separate process that plays no episodes, so that a call that takes too
    long can be killed and requests of episodes are not blocked. If the pool has no workers, calls are made in a thread.
    A thread cannot be ended: if a call in a thread takes too long, further calls are refused until it returns.
    """

    def __init__(self, taskset: Taskset, pool: EnvironmentPool, timeout_s: float) -> None:
        self._taskset, self._pool, self._timeout_s = taskset, pool, timeout_s
        self._closed = False
        self._worker: WorkerProcess | None = None
        self._thread: asyncio.Future[Any] | None = None  # done when the last call in a thread has returned
        self._one_at_a_time = asyncio.Lock()
        self._pending: dict[Hashable, asyncio.Task[Any]] = {}

    async def call(self, method: str, *args: Any) -> Any:
        """Return the result of `call_taskset` for this method and these arguments.

        Raises:
            Refused: too many calls wait, the call took too long or failed, or the server was closed.
        """
        if self._closed:
            raise Refused(*DRAINING)
        key = (method, encode(args))
        pending = self._pending.get(key)
        if pending is None:
            if len(self._pending) >= MOST:
                raise Refused(503, "full", f"{MOST} calls of the taskset wait already", _AFTER_S)
            pending = self._pending[key] = asyncio.get_running_loop().create_task(self._make(method, args))
            pending.add_done_callback(lambda _: self._pending.pop(key, None))
            # Read the exception, because asyncio logs one that is never read, and all clients may have given up.
            pending.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(pending)
        except asyncio.CancelledError:
            # If the call itself was cancelled, the server is closing and the client gets a refusal. Otherwise only the
            # client's request was cancelled.
            if not pending.cancelled():
                raise
        except Exception as error:
            raise Refused.of(error) from error
        raise Refused(*DRAINING)

    async def close(self) -> None:
        """Cancel the calls that are not done, so that their clients get a refusal, and end the worker process.

        Further calls are refused too.
        """
        self._closed = True
        for pending in self._pending.values():
            pending.cancel()
        if self._worker is not None:
            self._worker.kill()  # killed at once, because the process has nothing to clean up
            await self._worker.close()

    async def _make(self, method: str, args: tuple[Any, ...]) -> Any:
        too_long = Refused(500, "timeout", f"the taskset took over {self._timeout_s:g} s (--taskset-timeout-s)")
        async with self._one_at_a_time:
            if self._pool.worker_pids:
                if self._worker is None or self._worker.death is not None:
                    self._worker = WorkerProcess(self._pool.packed, timeout_s=self._timeout_s)
                try:
                    return await self._worker.call("apply", partial(call_taskset, method, args))
                except WorkerTimeout:
                    raise too_long from None
                except WorkerDied as error:
                    raise EnvironmentDied("", str(error)) from None
                except RemoteError as error:
                    raise EnvironmentRaised("", error.kind, error.detail, error.traceback_text) from None
            if self._thread is not None and not self._thread.done():
                detail = "the taskset is still at a call that took too long (with --workers 0 it cannot be ended)"
                raise Refused(503, "full", detail, _AFTER_S)
            loop = asyncio.get_running_loop()
            done = self._thread = loop.create_future()

            def run() -> None:
                value, error = None, None
                try:
                    value = call_taskset(method, args, self._taskset)
                except BaseException as raised:  # includes SystemExit: a taskset that exits fails only this request
                    error = Refused.of(raised)
                with contextlib.suppress(RuntimeError):  # the event loop was closed during the call
                    loop.call_soon_threadsafe(done.set_result, (value, error))

            threading.Thread(target=run, name="taskset", daemon=True).start()
            finished, _ = await asyncio.wait((done,), timeout=self._timeout_s)
            if not finished:
                raise too_long
            value, error = done.result()
            if error is not None:
                raise error
            return value


def call_taskset(method: str, args: tuple[Any, ...], taskset: Taskset) -> Any:
    """Call a method of the taskset and return its result as JSON.

    The result is the body of the answer; for the method ``tasks`` it is a list with the JSON of each task. The process
    that makes the call also encodes the result, because encoding a long list of tasks takes as long as computing it.
    """
    match method:
        case "tasks":
            return [encode(task) for task in taskset.tasks(*args)]
        case "prepare":
            tasks = args[0]
            taskset.prepare(tasks, workers=os.cpu_count() or 1)
            return encode({"prepared": len(tasks)})
        case "demonstrate":
            task, seed, noise = args
            messages, score = taskset.demonstrate(task, seed=seed, noise=noise)
            return encode({"messages": messages, "score": Score.of(score)})
        case _:
            return encode({"tools": list(taskset.tools(*args))})
