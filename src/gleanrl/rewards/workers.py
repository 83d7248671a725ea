"""Where reward functions run that would hold up the event loop: threads, or processes that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import loaded_files, restore_files
from gleanrl.utils.retry import NO_THREAD, Fatal, Retryable, cause_of, is_retryable

log = logging.getLogger(__name__)

_START_S = 120.0  # for a process to import what it runs
_HANGING = 256  # threads that may hang in calls that were given up, at least


# --- threads --------------------------------------------------------------------------------------
class Threads(Executor):
    """Daemon threads, made as they are needed; whoever calls bounds how many calls run at once.

    No thread can be ended, so a call that was given up goes on in its own, and another thread takes its place. Too many
    of them (`_HANGING`, or four times ``count``) would use up the machine: then nobody is called until one ends.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.hung = 0
        self._most_hung = max(_HANGING, 4 * count)
        self._told = False
        self._idle = self._live = 0
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    async def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(*args)`` in a thread. Raises `Retryable`, which counts as no try, where too many calls hang."""
        if self.hung >= self._most_hung:
            raise Retryable(
                f"{self.hung} calls hang in their threads, and no thread can be ended; isolation = 'process' can",
                cause=NO_THREAD,
            )
        call = _Call(self, partial(fn, *args))
        try:
            return await asyncio.get_running_loop().run_in_executor(self, call)
        except asyncio.CancelledError:
            if call.give_up() and not self._told:
                self._told = True
                log.warning(
                    "a call of the reward hangs in its thread, which no one can end; another takes its place, up to %d "
                    "times; isolation = 'process' would end it",
                    self._most_hung,
                )
            raise

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                try:
                    threading.Thread(target=self._work, name="gleanrl-reward", daemon=True).start()
                except RuntimeError as error:  # the machine has no more
                    raise Retryable(f"{error}, and {self.hung} hang in their calls", cause=NO_THREAD) from None
                self._live += 1
            self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Each thread ends once it has nothing more to do; none is waited for."""
        with self._lock:
            for _ in range(self._live):
                self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del item, future, call  # or an idle thread would keep them
            with self._lock:
                self._idle += 1


class _Call:
    """A call in a thread, which may be given up while it runs."""

    def __init__(self, threads: Threads, fn: Callable[[], Any]) -> None:
        self._threads, self._fn = threads, fn
        self._running = self._given_up = False

    def __call__(self) -> Any:
        self._running = True
        try:
            return self._fn()
        except StopIteration as error:  # no future can hold one
            raise RuntimeError("StopIteration") from error
        finally:
            with self._threads._lock:
                self._running = False
                self._threads.hung -= self._given_up

    def give_up(self) -> bool:
        """Whether it goes on."""
        with self._threads._lock:
            self._given_up = self._running
            self._threads.hung += self._given_up
            return self._given_up


# --- processes ------------------------------------------------------------------------------------
class Processes:
    """Worker processes, each with its own copy of an object whose methods they run; one that hangs is killed.

    Args:
        make: makes the object in each process; picklable.
        count: processes at most; they start as they are needed.
        timeout_s: how long a call may take; its clock starts when a process takes it up.

    Raises:
        UserError: ``make`` cannot be pickled.
    """

    def __init__(self, make: Callable[[], Any], count: int, timeout_s: float) -> None:
        try:
            self._make = pickle.dumps((dict(loaded_files()), list(sys.path), pickle.dumps(make)))
        except Exception as error:
            raise UserError(
                f"isolation = 'process' needs a reward that can be pickled ({error}); give its import path instead"
            ) from None
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(count)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    async def call(self, method: str, *args: Any) -> Any:
        """What the method returned.

        Raises:
            Retryable, Fatal, UserError: as the method did (`Fatal` for what is neither); `Retryable` where it took
                too long or its process died.
        """
        async with self._free:
            process = self._idle.pop() if self._idle else self._start()
            try:
                kind, value = await process.ask((method, args), self._timeout_s)
            finally:
                if process.alive:
                    self._idle.append(process)
                else:
                    self._all.discard(process)
        if kind == "value":
            return value
        raise value

    async def close(self) -> None:
        """End them all now."""
        processes, self._all = self._all, set()
        for process in processes:
            process.kill()
        for process in processes:
            await asyncio.to_thread(process.join)

    def _start(self) -> _Process:
        process = _Process(self._make)
        self._all.add(process)
        return process


class _Process:
    """One worker process; asked one thing at a time."""

    def __init__(self, make: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self.alive = True
        self._ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()
        self._answer: asyncio.Future[tuple[str, Any]] = self._loop.create_future()
        self._ready = self._answer  # the first thing that it says
        self._loop.add_reader(self._ours.fileno(), self._readable)

    async def ask(self, what: Any, timeout_s: float) -> tuple[str, Any]:
        try:
            async with asyncio.timeout(_START_S):
                kind, value = await self._ready
            if kind == "error":
                self.kill()
                return kind, value
            self._answer = self._loop.create_future()
            self._ours.send_bytes(pickle.dumps(what))
            async with asyncio.timeout(timeout_s):
                return await self._answer
        except TimeoutError:
            self.kill()
            raise Retryable(f"no score within {timeout_s:g} s; its process was killed", cause="timeout") from None
        except OSError as error:
            self.kill()
            raise Retryable(f"its process died ({error})", cause="died") from None
        except asyncio.CancelledError:
            self.kill()
            raise

    def kill(self) -> None:
        """End it now, with all that it started."""
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._ours.fileno())
        self._ours.close()
        assert self._process.pid is not None
        with contextlib.suppress(OSError):  # no group of its own yet, or gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def join(self) -> None:
        self._process.join()

    def _readable(self) -> None:
        try:
            answer = pickle.loads(self._ours.recv_bytes())
        except (EOFError, OSError):
            answer = None
        except Exception as error:  # what it returned cannot be rebuilt here
            answer = "error", Fatal(f"{type(error).__name__}: {error}", cause="answer")
        if answer is None:
            self.kill()
            answer = "error", Retryable("its process died", cause="died")
        if not self._answer.done():  # done: given up
            self._answer.set_result(answer)


def _serve(connection: Connection, make: bytes) -> None:
    """The life of a worker process."""
    with contextlib.suppress(OSError):
        os.setsid()  # so that what it starts can be ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    loop = asyncio.new_event_loop()
    try:
        files, path, target = pickle.loads(make)
        sys.path[:] = path
        restore_files(files)
        served = pickle.loads(target)()
        connection.send_bytes(pickle.dumps(("value", None)))
    except BaseException as error:
        connection.send_bytes(pickle.dumps(("error", _portable(error, mistake=True))))
        return
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, args = pickle.loads(connection.recv_bytes())
            try:
                value = getattr(served, method)(*args)
                value = loop.run_until_complete(value) if asyncio.iscoroutine(value) else value
                answer = pickle.dumps(("value", value))
            except BaseException as error:
                answer = pickle.dumps(("error", _portable(error)))
            connection.send_bytes(answer)


def _portable(error: BaseException, *, mistake: bool = False) -> Exception:
    """The error as one that every process knows."""
    if isinstance(error, Retryable | Fatal | UserError):
        return error
    if is_retryable(error):
        return Retryable(f"{type(error).__name__}: {error}", cause=cause_of(error))
    text = f"{type(error).__name__}: {error}"
    return UserError(f"the reward cannot be loaded in its worker process: {text}") if mistake else Fatal(text)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)
