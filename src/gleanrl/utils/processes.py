"""Runs methods of objects in worker processes, which are called from asyncio and can be killed.

`WorkerProcess` is one spawned process that holds an object and runs its methods. Many calls may be in progress at a
time, because an asynchronous method that awaits something lets the next call run. `ProcessPool` is a pool of such
processes, each of which runs one call at a time. The environment pool (`gleanrl.environments.pool`) uses
`WorkerProcess`, and isolated rewards (`gleanrl.rewards`) use `ProcessPool`.

A worker ignores Ctrl-C, because its parent handles it. When the parent ends, the worker and all processes that the
worker started are ended too. A call that takes too long is cancelled if it is awaiting something. If it blocks the
worker, the process is killed.

    class Squares(Served):
        def square(self, number: int) -> int:
            return number * number

    async def main():
        async with ProcessPool(Squares, count=2, timeout_s=10.0) as pool:
            print(await pool.call("square", 7))
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import wait
from types import ModuleType
from typing import Any, Self

from gleanrl.utils.errors import UserError, raised_at
from gleanrl.utils.importing import loaded_files, restore_files

GRACE_S = 2.0  # seconds that a worker has to close its object, or to cancel a call
START_S = 120.0  # seconds that a worker has to import its code and make its object
_HEADER = struct.Struct("<IQc")  # length of the body in bytes, number of the call, kind of the frame
_BUFFER = 1 << 20
_CALL, _CANCEL = b"C", b"X"  # kinds of frames sent to the worker
_AWAITING, _VALUE, _ERROR = b"A", b"V", b"E"  # kinds of frames sent by the worker


class WorkerTimeout(Exception):
    """The call took longer than its limit. It was cancelled, or its process was killed."""


class WorkerDied(Exception):
    """The worker process ended before it answered the call.

    ``never_began`` is True if the process had not begun the call. Then no part of the call has been executed, and
    another process can run it.
    """

    def __init__(self, message: str, *, never_began: bool = False) -> None:
        super().__init__(message)
        self.never_began = never_began


class RemoteError(Exception):
    """An error that the object's own code raised in the worker.

    It holds the error as text, because the type of the original may be unknown in this process or not picklable.
    """

    def __init__(self, kind: str, detail: str, traceback_text: str) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.detail, self.traceback_text = kind, detail, traceback_text

    def __reduce__(self) -> Any:
        return type(self), (self.kind, self.detail, self.traceback_text)

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return the error of the ``except`` block. ``detail`` ends with the line of the user's code that raised it."""
        detail = f"{error}{raised_at(error)}".strip()
        return cls(type(error).__name__, detail, "".join(traceback.format_exception(error)))


class Served:
    """Base class of the object that a worker holds. Its asynchronous methods run on the worker's event loop."""

    async def close(self) -> None:
        """Release resources. Called before the worker ends, unless it is killed. May take at most `GRACE_S` seconds."""


def pack(make: Callable[[], Served], *, raises: tuple[type[Exception], ...] = ()) -> bytes:
    """Return, in pickled form, everything that a worker needs to make its object.

    Args:
        make: function that makes the object. It is called in the worker.
        raises: types of the exceptions that reach the caller unchanged, in addition to `UserError`. All other errors in
            the worker reach the caller as `RemoteError`.

    Raises:
        pickle.PicklingError: ``make`` cannot be pickled.
    """
    try:
        # `make` is pickled separately, so that a worker knows the files that define it before it unpickles it.
        return pickle.dumps((dict(loaded_files()), sys.path, pickle.dumps((make, raises))))
    except Exception as error:
        raise pickle.PicklingError(str(error) or type(error).__name__) from error


@dataclass(slots=True, eq=False)
class _Call:
    number: int
    method: str
    on: str  # " on LABEL", a part of the message if the worker dies; empty if the call has no label
    timeout_s: float
    future: asyncio.Future[Any]
    may_await: bool  # whether the time that the call spends in awaiting is unlimited
    timer: asyncio.TimerHandle | None = None
    overdue: bool = False

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.future.done():  # the caller was cancelled
            return
        if self.overdue:
            self.future.set_exception(WorkerTimeout(f"{self.method} took over {self.timeout_s:g} s"))
        elif error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


class WorkerProcess:
    """One worker process and the calls that are made to it.

    The process is started by the constructor and never restarted. Calls may be made before it is ready.

    The worker begins its calls in order. It begins the next call when the present one is answered *or awaits
    something*. So the first call in the queue is the one whose code the worker is executing. The time limit of a call
    starts when the call becomes the first in the queue, so that a call cannot time out while it waits for a slow one.

    Args:
        packed: result of `pack`.
        timeout_s: seconds that a call may take.
        forked: whether the process is forked from a server process that has imported `gleanrl` (the start method
            "forkserver" of `multiprocessing`). It then starts in milliseconds. It does not import the main module.
        on_death: function that is called once, with this object, when the process has ended, unless `close` ended it.

    Attributes:
        death: reason why the process has ended or is being ended; None while it runs normally.
        started: whether the worker has made its object.
        ready: future whose result is set when the object has been made, and whose exception is set if that failed.
    """

    def __init__(
        self,
        packed: bytes,
        *,
        timeout_s: float,
        forked: bool = False,
        on_death: Callable[[WorkerProcess], None] | None = None,
    ) -> None:
        self.death: str | None = None
        self.started = False
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._on_death = on_death
        self._numbers = count()
        # Both dicts are keyed by the number of the call.
        self._queue: dict[int, _Call] = {}  # the call that the worker is executing, then those not yet begun, in order
        self._awaiting: dict[int, _Call] = {}  # calls that have begun and await something
        self._writer: asyncio.StreamWriter | None = None
        self._early: list[bytes] = []  # frames to send once the connection is open
        ours, theirs = socket.socketpair()
        context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
        self._process = context.Process(target=_run, args=(theirs,))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        main = sys.modules["__main__"]
        try:  # SIGINT is blocked, so that Ctrl-C cannot reach the new process before it ignores the signal
            if forked:
                # Otherwise every process imports the main module again, which may take seconds.
                sys.modules["__main__"] = ModuleType("__main__")
            self._process.start()
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        atexit.register(self._kill_group)  # ends the worker if the program never closes it
        self._life = self._loop.create_task(self._live(ours))
        self.ready = self._loop.create_future()
        # Read the exception, because asyncio logs one that is never read, and not every caller awaits `ready`.
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._begin(_Call(next(self._numbers), "start", "", START_S, self.ready, may_await=False), packed)

    async def call(self, method: str, *args: Any, label: str = "", may_await: bool = False) -> Any:
        """Call a method of the worker's object and return its result.

        Args:
            method: name of the method.
            args: picklable arguments, passed by position.
            label: what the call is for. The error message names it if the worker dies during the call.
            may_await: count only the time in which the call blocks the worker, and not that in which it awaits.

        Raises:
            WorkerTimeout: the call took longer than ``timeout_s``.
            WorkerDied: the process ended before it answered the call.
            UserError: the method raised it. Errors of the types that were given to `pack` as ``raises`` are raised too.
            RemoteError: the method raised an error of any other type.
        """
        if self.death is not None:
            raise WorkerDied(self.death)
        on = f" on {label}" if label else ""
        future = self._loop.create_future()
        call = _Call(next(self._numbers), method, on, self._timeout_s, future, may_await)
        self._begin(call, pickle.dumps((method, args), protocol=pickle.HIGHEST_PROTOCOL))
        try:
            return await call.future
        except asyncio.CancelledError:
            self._send(call.number, _CANCEL)
            raise

    def kill(self, why: str = "its worker process was killed") -> None:
        """Kill the process and all processes that it started.

        Unfinished calls raise `WorkerDied` with the message ``why``.
        """
        self.death = self.death or why
        self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(OSError):  # raised if the process has ended or has no process group yet
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError, ValueError):  # raised if the process has ended
            self._process.kill()

    async def close(self) -> None:
        """Let the worker close its object, and wait until the process has ended.

        Unfinished calls raise `WorkerDied`.
        """
        self._on_death = None
        self.death = self.death or "its worker process was closed"
        self._fail_all()
        if self._writer is not None:
            self._writer.close()
        await asyncio.shield(self._life)  # a cancelled caller does not stop the task that ends the process

    def _begin(self, call: _Call, body: bytes) -> None:
        self._queue[call.number] = call
        self._send(call.number, _CALL, body)
        if len(self._queue) == 1:
            self._start_clock()

    def _send(self, number: int, kind: bytes, body: bytes = b"") -> None:
        frame = _HEADER.pack(len(body), number, kind) + body
        if self._writer is None:
            self._early.append(frame)
        elif not self._writer.is_closing():
            self._writer.write(frame)

    def _start_clock(self) -> None:
        head = next(iter(self._queue.values()), None)
        if head is not None and head.timer is None:
            head.timer = self._loop.call_later(head.timeout_s, self._too_late, head)

    def _too_late(self, call: _Call) -> None:
        if not call.overdue and call.number in self._awaiting:  # the worker can cancel this call and keep the others
            self._send(call.number, _CANCEL)
            call.timer = self._loop.call_later(GRACE_S, self._too_late, call)
        else:
            self.kill(f"its worker process hung{call.on}")
        call.overdue = True

    async def _live(self, connection: socket.socket) -> None:
        """Read answers until the worker closes the connection. Then end the process and let unfinished calls fail."""
        reader, self._writer = await asyncio.open_connection(sock=connection, limit=_BUFFER)
        self._writer.writelines(self._early)
        self._early.clear()
        if self.death is not None:
            self._writer.close()
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):  # raised when the connection is closed
                while True:
                    number, kind, body = await _read_frame(reader)
                    call = self._queue.pop(number, None)
                    if kind == _AWAITING:
                        if call is not None:
                            self._awaiting[number] = call
                            if call.may_await and call.timer is not None:
                                call.timer.cancel()
                    elif (call := call or self._awaiting.pop(number, None)) is not None:
                        try:
                            value = pickle.loads(body) if body else None
                        except Exception as raised:
                            kind, value = _ERROR, RemoteError.of(raised)
                        if number == 0:  # the call that makes the object
                            self.started = kind == _VALUE
                            if not self.started:
                                self.kill(f"its worker process could not start: {value}")
                        call.settle(error=value) if kind == _ERROR else call.settle(value)
                    self._start_clock()
            if not await self._ended(GRACE_S + 1.0):
                self._kill_group()
                await self._ended(None)
        finally:  # also if the event loop is shut down, which cancels this task
            self._kill_group()  # kills also processes that the worker started and left running
        self._process.join()
        exit_code = self._process.exitcode
        how = f"ended with status {exit_code}"
        if exit_code is not None and exit_code < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-exit_code).name}"
        self._process.close()
        self._writer.close()
        atexit.unregister(self._kill_group)
        head = next(iter(self._queue.values()), None)
        if not self.started:
            how += " while it started"
        else:
            how += " while idle" if head is None else head.on
            for call in list(self._queue.values())[1:]:
                del self._queue[call.number]
                call.settle(error=WorkerDied(self.death or f"its worker process {how}", never_began=True))
        self.death = self.death or f"its worker process {how}"
        self._fail_all()
        if self._on_death is not None:
            self._on_death(self)

    async def _ended(self, timeout_s: float | None) -> bool:
        """Wait until the process ends, at most ``timeout_s`` seconds (None = no limit). Return whether it has ended."""
        ended = asyncio.Event()
        self._loop.add_reader(self._process.sentinel, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), timeout_s)
        except TimeoutError:
            return False
        finally:
            self._loop.remove_reader(self._process.sentinel)
        return True

    def _fail_all(self) -> None:
        calls = [*self._awaiting.values(), *self._queue.values()]
        self._awaiting.clear()
        self._queue.clear()
        for call in calls:
            call.settle(error=WorkerDied(self.death or ""))


class ProcessPool:
    """A pool of worker processes, each of which runs one call at a time. A process starts when a call first needs it.

    If a call is cancelled, or blocks for longer than ``timeout_s``, its process is killed. A later call starts a new
    process in its place.

    Args:
        make: function that makes the object of a worker. Each process calls it once.
        count: largest number of processes.
        timeout_s: seconds that a call may take, counted from when a process begins it.
        raises: types of the exceptions that reach the caller unchanged; see `pack`.

    Raises:
        pickle.PicklingError: ``make`` cannot be pickled.
    """

    def __init__(
        self,
        make: Callable[[], Served],
        *,
        count: int,
        timeout_s: float,
        raises: tuple[type[Exception], ...] = (),
    ) -> None:
        self._packed = pack(make, raises=raises)
        self.timeout_s = timeout_s
        self._count = count
        self._slots = asyncio.Semaphore(count)
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, method: str, *args: Any) -> Any:
        """Call ``method`` on the object of a free worker and return the result. Waits if all workers are busy.

        Raises the errors of `WorkerProcess.call`, and `UserError` if ``make`` fails.
        """
        async with (slots := self._slots):
            if slots is not self._slots:
                raise WorkerDied("its pool of processes was closed", never_began=True)
            worker = None
            while self._idle and worker is None:
                idle = self._idle.pop()
                worker = idle if idle.death is None else None
            if worker is None:
                worker = WorkerProcess(self._packed, timeout_s=self.timeout_s, on_death=self._all.discard)
                self._all.add(worker)
            try:
                try:
                    await asyncio.shield(worker.ready)
                except RemoteError as error:
                    raise UserError(f"a worker process cannot start: {error}") from None
                answer = await worker.call(method, *args)
            except asyncio.CancelledError:  # the call may block its process, and then only killing the process ends it
                worker.kill("its call was cancelled")
                raise
            finally:
                if worker.death is None:
                    self._idle.append(worker)
            return answer

    async def close(self) -> None:
        """Kill all processes and wait until they have ended. Unfinished calls raise `WorkerDied`."""
        self._slots = asyncio.Semaphore(self._count)  # calls that wait for the old one find that the pool was closed
        workers, self._all, self._idle = self._all, set(), []
        for worker in workers:
            worker.kill()
        await asyncio.gather(*(worker.close() for worker in workers))


# --- the worker's side ------------------------------------------------------------------------------
def _run(connection: socket.socket) -> None:
    """Serve the parent's calls until the parent closes the connection. The main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.setpgid(0, 0)  # start a new process group, so that processes that the worker starts can be killed with it
    threading.Thread(target=_end_with_parent, args=(None, GRACE_S), daemon=True).start()
    asyncio.run(_Server().serve(connection))
    _end_with_parent(0.1, 0.0)  # the parent's end closes the connection a moment before it can be noticed otherwise


def _end_with_parent(timeout_s: float | None, grace_s: float) -> None:
    """Wait until the parent has ended, and ``grace_s`` more, then kill this process and the processes that it started.

    If the parent has not ended after ``timeout_s`` seconds (None = no limit), return: it kills the processes itself.
    Runs in a thread too, because the main thread may be blocked. There, the object has `GRACE_S` seconds to close, the
    same time as in `WorkerProcess.close`.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and wait([parent.sentinel], timeout_s):
        time.sleep(grace_s)
        os.killpg(0, signal.SIGKILL)


class _Server:
    _served: Served | None = None
    _raises: tuple[type[Exception], ...] = ()

    async def serve(self, connection: socket.socket) -> None:
        """Answer calls until the parent closes the connection or the object cannot be made. Then close the object."""
        reader, self._writer = await asyncio.open_connection(sock=connection, limit=_BUFFER)
        self._running: dict[int, asyncio.Task[None]] = {}
        loop = asyncio.get_running_loop()
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            number, kind, body = await _read_frame(reader)
            await self._run_call(number, body)
            while self._served is not None:
                number, kind, body = await _read_frame(reader)
                if kind == _CANCEL:
                    if number in self._running:
                        self._running[number].cancel()
                    continue
                self._running[number] = loop.create_task(self._run_call(number, body))
                # The loop runs callbacks in the order in which they were scheduled. So this callback runs after the
                # call has ended or first awaits something, and before the next call begins.
                loop.call_soon(self._report_awaiting, number)
                # The call begins before a cancellation of it is read. A task that is cancelled earlier runs nothing of
                # the call, so no answer would be sent.
                await asyncio.sleep(0)
        for task in self._running.values():
            task.cancel()
        with contextlib.suppress(Exception):
            if self._served is not None:
                await self._served.close()
            else:
                await self._writer.drain()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _report_awaiting(self, number: int) -> None:
        if number in self._running:
            self._writer.write(_HEADER.pack(0, number, _AWAITING))

    async def _run_call(self, number: int, body: bytes) -> None:
        """Run one call and send its answer. The first call makes the object, later calls run one of its methods."""
        kind, answer = _VALUE, b""
        try:
            if self._served is None:
                files, path, packed = pickle.loads(body)
                sys.path[:] = path
                restore_files(files)
                make, self._raises = pickle.loads(packed)
                self._served, value = make(), None
            else:
                method, args = pickle.loads(body)
                value = getattr(self._served, method)(*args)
                if inspect.isawaitable(value):
                    value = await value
            if value is not None:
                answer = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except BaseException as error:  # includes SystemExit, which ends only this call and not the worker
            kind, answer = _ERROR, b""
            if isinstance(error, (UserError, *self._raises)):
                with contextlib.suppress(Exception):  # raised if the error's arguments cannot be pickled
                    answer = pickle.dumps(error)
            answer = answer or pickle.dumps(RemoteError.of(error))
        self._running.pop(number, None)
        self._writer.write(_HEADER.pack(len(answer), number, kind) + answer)


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Read one frame and return the number of its call, its kind and its body."""
    length, number, kind = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return number, kind, await reader.readexactly(length)
