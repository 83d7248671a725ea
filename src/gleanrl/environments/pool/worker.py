"""One worker process as the pool sees it: its requests, their clocks, its death and its end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from gleanrl.environments.pool.failures import EnvironmentDied, EnvironmentRaised, EnvironmentTimeout
from gleanrl.environments.pool.serve import serve
from gleanrl.environments.pool.wire import Kind, Wire, decode
from gleanrl.protocols import EpisodeLost
from gleanrl.utils.errors import UserError

_GRACE_S = 2.0  # for a worker to close its environments, or to give up a request that awaits
_START_S = 120.0  # for a worker to import and unpickle its taskset
_numbers = count(1)


class NotStarted(Exception):
    """The worker died before it came to this request: any other worker can take it."""


@dataclass(slots=True, eq=False)
class _Request:
    kind: Kind
    episode: int
    task_id: str
    timeout_s: float
    future: asyncio.Future[Any]
    id: int = field(default_factory=lambda: next(_numbers))
    timer: asyncio.TimerHandle | None = None
    overdue: bool = False

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.future.done():  # its caller was cancelled
            return
        if self.overdue:
            took = f"{self.kind.name.lower()} took over {self.timeout_s:g} s (environment.timeout_s)"
            self.future.set_exception(EnvironmentTimeout(self.task_id, took))
        elif error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


class Worker:
    """A process and the requests that it has. It starts at once, takes requests at once, and is never restarted.

    The worker takes its requests in order, and goes to the next one when the first is answered *or awaits
    something*. So the request at the head of the queue is the one that it is on, and only then does that
    request's clock run: an episode that waits behind a slow one is not late.
    """

    def __init__(self, taskset: bytes, timeout_s: float, died: Callable[[Worker], None]) -> None:
        self.episodes = 0  # live ones, for balance
        self.death: str | None = None  # why, once it is dead
        self.started = False
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._timeout_s = timeout_s
        self._died = died
        self._queue: dict[int, _Request] = {}  # in order; the head is what the worker is on
        self._awaiting: dict[int, _Request] = {}
        self._lost = asyncio.Event()
        self._wire = Wire(self._received, self._lost.set)
        ours, theirs = socket.socketpair()
        self._process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, _GRACE_S))
        with _interrupts_held():  # a Ctrl-C must not reach it before it can ignore it
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        theirs.close()
        self._life = self._loop.create_task(self._live(ours))
        atexit.register(self.kill)  # where nobody closes the pool
        self.ready.add_done_callback(self._start_over)
        self._ask(_Request(Kind.TASKSET, 0, "", _START_S, self.ready), taskset)

    async def ask(self, kind: Kind, episode: int, task_id: str, body: bytes = b"") -> Any:
        """What the environment answered.

        Raises:
            EnvironmentFailure: it raised, took too long, or died.
            NotStarted: the worker died before it came to this (a reset only).
            UserError: the environment says that the user made a mistake.
            EpisodeLost: it lives behind a service, which lost it.
        """
        request = _Request(kind, episode, task_id, self._timeout_s, self._loop.create_future())
        if self.death is not None:
            raise EnvironmentDied(task_id, self.death)
        self._ask(request, body)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._wire.send(Kind.CANCEL, request.id)
            raise

    def _ask(self, request: _Request, body: bytes) -> None:
        self._queue[request.id] = request
        self._wire.send(request.kind, request.id, request.episode, body)
        if len(self._queue) == 1:
            self._start_clock()

    def _start_over(self, ready: asyncio.Future[None]) -> None:
        error = None if ready.cancelled() else ready.exception()
        self.started = error is None
        if error is not None:
            self.death = self.death or f"its worker process could not start: {error}"
            self._fail_all(self.death)
            self.kill()

    def _start_clock(self) -> None:
        head = next(iter(self._queue.values()), None)
        if head is not None and head.timer is None:
            head.timer = self._loop.call_later(head.timeout_s, self._too_late, head)

    def _too_late(self, request: _Request) -> None:
        request.overdue = True
        if request.id in self._awaiting:  # it can be given up alone, unless it now blocks
            self._wire.send(Kind.CANCEL, request.id)
            request.timer = self._loop.call_later(_GRACE_S, self._hung, request)
        else:
            self._hung(request)

    def _hung(self, request: _Request) -> None:
        self.death = f"its worker process hung on task {request.task_id!r}"
        self.kill()

    def _received(self, kind: Kind, request_id: int, episode: int, body: bytes) -> None:
        if kind is Kind.AWAITING:
            self._awaiting[request_id] = self._queue.pop(request_id)
            return self._start_clock()
        request = self._queue.pop(request_id, None) or self._awaiting.pop(request_id)
        try:
            value = decode(body)
        except Exception as error:
            request.settle(error=EnvironmentRaised(request.task_id, type(error).__name__, str(error), ""))
        else:
            match kind:
                case Kind.RAISED:
                    request.settle(error=EnvironmentRaised(request.task_id, *value))
                case Kind.MISTAKE:
                    request.settle(error=UserError(value))
                case Kind.LOST:
                    request.settle(error=EpisodeLost(value))
                case _:
                    request.settle(value)
        self._start_clock()

    def kill(self) -> None:
        """End it now, with all that its environments started."""
        with contextlib.suppress(OSError):  # no group of its own yet, or gone
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError, ValueError):  # it may have ended and been closed
            self._process.kill()

    async def close(self) -> None:
        """Let it close its environments, and see it gone. Requests still open fail."""
        self._died = lambda worker: None
        self._fail_all("the pool was closed")
        self._wire.close()
        await self._life

    async def _live(self, connection: socket.socket) -> None:
        await self._loop.create_connection(lambda: self._wire, sock=connection)
        await self._lost.wait()
        ended = await self._ended(_GRACE_S + 1.0)
        self.kill()  # if not the worker, then what it left behind
        if not ended:
            await self._ended(None)
        self._process.join()
        how = _told(self._process.exitcode)
        self._process.close()
        atexit.unregister(self.kill)
        self._bury(how)

    async def _ended(self, timeout_s: float | None) -> bool:
        """Whether the process ended within ``timeout_s``."""
        ended = asyncio.Event()
        self._loop.add_reader(self._process.sentinel, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), timeout_s)
        except TimeoutError:
            return False
        finally:
            self._loop.remove_reader(self._process.sentinel)
        return True

    def _bury(self, how: str) -> None:
        on = next(iter(self._queue.values()), None)
        when = "while it started" if not self.started else f"on task {on.task_id!r}" if on is not None else "while idle"
        self.death = self.death or f"its worker process {how} {when}"
        for request in [r for r in self._queue.values() if r is not on and r.kind is Kind.RESET and self.started]:
            del self._queue[request.id]
            request.settle(error=NotStarted())
        self._fail_all(self.death)
        self._died(self)

    def _fail_all(self, why: str) -> None:
        requests = [*self._awaiting.values(), *self._queue.values()]
        self._awaiting.clear()
        self._queue.clear()
        for request in requests:
            request.settle(error=EnvironmentDied(request.task_id, why))


def _told(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with status {exit_code}"


@contextlib.contextmanager
def _interrupts_held() -> Any:
    """Hold SIGINT back; a process started meanwhile begins with it held back too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
