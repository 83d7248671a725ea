"""Runs sync rewards, which would block the event loop, in threads or in worker processes that can be killed.

Used by `gleanrl.rewards.adapter` and `gleanrl.rewards.math`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from gleanrl.utils.errors import UserError
from gleanrl.utils.processes import ProcessPool, RemoteError, Served, WorkerDied, WorkerTimeout
from gleanrl.utils.retry import NO_THREAD, Fatal, Retryable, cause_of, is_retryable

log = logging.getLogger(__name__)

MAX_HUNG_THREADS = 256
"""When this many threads hang in cancelled calls, `Threads.call` makes no further calls."""


class Threads(Executor):
    """An executor with daemon threads. A thread is started whenever a call finds none idle.

    The executor does not limit the number of concurrent calls; its caller must. A thread cannot be killed, so a
    cancelled call continues in its thread and the next call gets another thread. While `MAX_HUNG_THREADS` threads hang
    in cancelled calls, `call` raises `Retryable`.

    `ThreadPoolExecutor` is not used, because it neither replaces hung threads nor limits their number, and because the
    interpreter cannot exit while one of its threads hangs.
    """

    def __init__(self) -> None:
        self.hung = 0
        self._warned = False
        self._threads = self._idle = 0
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` in a thread and return its result.

        Raises:
            Retryable: too many cancelled calls hang in their threads, or the system cannot start another thread. The
                cause is `NO_THREAD`, by which retries recognise that the call was not made.
        """
        if self.hung >= MAX_HUNG_THREADS:
            raise Retryable(
                f"{self.hung} calls hang in their threads, and no thread can be ended; isolation = 'process' can",
                cause=NO_THREAD,
            )
        running = abandoned = False

        def run() -> Any:
            nonlocal running
            running = True
            try:
                return function(*args)
            except StopIteration as error:  # a future cannot hold a StopIteration
                raise RuntimeError("StopIteration") from error
            finally:
                with self._lock:
                    running = False
                    self.hung -= abandoned

        try:
            return await asyncio.get_running_loop().run_in_executor(self, run)
        except asyncio.CancelledError:
            with self._lock:
                abandoned = running
                self.hung += abandoned
            if abandoned and not self._warned:
                self._warned = True
                log.warning(
                    "a call of the reward hangs in its thread, which cannot be ended; another takes its place, up to "
                    "%d times; isolation = 'process' would end it",
                    MAX_HUNG_THREADS,
                )
            raise

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `concurrent.futures.Executor.submit`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                try:
                    threading.Thread(target=self._work, name="gleanrl-reward", daemon=True).start()
                except RuntimeError as error:  # the system cannot start another thread
                    raise Retryable(f"{error}, and {self.hung} hang in their calls", cause=NO_THREAD) from None
                self._threads += 1
            self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Make all threads end after the calls that are queued now, without waiting for them.

        Both arguments are ignored. Queued calls are not cancelled.
        """
        with self._lock:
            for _ in range(self._threads):
                self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, function = item
            if future.set_running_or_notify_cancel():
                try:
                    result = function()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del item, future, function  # else an idle thread would keep these objects alive
            with self._lock:
                self._idle += 1


class Processes(ProcessPool):
    """A pool of worker processes. Each process creates an object with ``make`` and runs calls of the object's methods.

    A process in which a call exceeds its time limit is killed.

    Args:
        make: creates the object in each process; must be picklable.
        count: maximum number of processes, which are started when they are needed.
        timeout_s: time limit of a call in seconds, counted from the time at which a process starts the call.

    Raises:
        UserError: ``make`` cannot be pickled.
    """

    def __init__(self, make: Callable[[], Any], count: int, timeout_s: float) -> None:
        try:
            served = partial(_ServedObject, make)
            super().__init__(served, count=count, timeout_s=timeout_s, raises=(Retryable, Fatal))
        except pickle.PicklingError as error:
            raise UserError(
                f"isolation = 'process' needs a reward that can be pickled ({error}); give its import path instead"
            ) from None

    async def call(self, method: str, *args: Any) -> Any:
        """Run a method of the object in a worker process and return its result.

        Raises:
            Retryable: the method raised a retryable error, the call took too long, or its process died.
            Fatal: the method raised any other error, except `UserError`.
            UserError: the method raised it.
        """
        try:
            return await super().call("run", method, *args)
        except WorkerTimeout:
            message = f"no score within {self.timeout_s:g} s; its process was killed"
            raise Retryable(message, cause="timeout") from None
        except WorkerDied as error:
            raise Retryable(str(error), cause="died") from None
        except RemoteError as error:
            raise Fatal(str(error), cause="raised") from None


class _ServedObject(Served):
    """Runs inside a worker process: creates the object and calls its methods."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._object = make()

    async def run(self, method: str, *args: Any) -> Any:
        try:
            returned = getattr(self._object, method)(*args)
            return await returned if inspect.isawaitable(returned) else returned
        except (Retryable, Fatal, UserError):
            raise
        except Exception as error:
            if is_retryable(error):
                raise Retryable(f"{type(error).__name__}: {error}", cause=cause_of(error)) from None
            raise
