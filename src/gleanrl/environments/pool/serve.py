"""The inside of a worker process: holds a taskset and plays episodes for the pool at the other end of a socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import threading
import time
from typing import Any

from gleanrl.environments.pool.failures import described
from gleanrl.environments.pool.wire import Kind, Wire, decode, encode
from gleanrl.protocols import Concluding, Environment, EpisodeLost, Taskset
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import restore_files


def serve(connection: socket.socket, grace_s: float) -> None:
    """Serve until the other end hangs up; then close what is open and end within ``grace_s`` seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's business
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.setpgid(0, 0)  # a group of its own, so that what an environment starts can be ended with it
    watched = os.dup(connection.fileno())
    threading.Thread(target=_end_with_parent, args=(watched, grace_s), daemon=True).start()
    asyncio.run(_serve(connection))


def _end_with_parent(watched: int, grace_s: float) -> None:
    """Wait for the hang-up in a thread: it comes through also while an environment blocks the main one."""
    poll = select.poll()
    poll.register(watched, getattr(select, "POLLRDHUP", select.POLLHUP))
    poll.poll()
    time.sleep(grace_s)
    os.killpg(0, signal.SIGKILL)


async def _serve(connection: socket.socket) -> None:
    server = _Server()
    await asyncio.get_running_loop().create_connection(lambda: server.wire, sock=connection)
    await server.hung_up.wait()
    await server.close()


class _Server:
    def __init__(self) -> None:
        self.wire = Wire(self._received, self._lost)
        self.hung_up = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._taskset: Taskset | None = None
        self._episodes: dict[int, Environment] = {}
        self._running: dict[int, asyncio.Task[None]] = {}  # by request

    def _lost(self) -> None:
        self.hung_up.set()

    def _received(self, kind: Kind, request: int, episode: int, body: bytes) -> None:
        if kind is Kind.CANCEL:
            if request in self._running:
                self._running[request].cancel()
            return
        self._running[request] = self._loop.create_task(self._answer(kind, request, episode, body))
        # The loop runs callbacks in order: this one right after the request's first stretch, before the next request's.
        self._loop.call_soon(self._tell_if_awaiting, request, episode)

    def _tell_if_awaiting(self, request: int, episode: int) -> None:
        if request in self._running:
            self.wire.send(Kind.AWAITING, request, episode)

    async def _answer(self, kind: Kind, request: int, episode: int, body: bytes) -> None:
        try:
            answer, value = await self._act(kind, episode, body)
            body = encode(value)
        except UserError as error:
            answer, body = Kind.MISTAKE, encode(str(error))
        except EpisodeLost as error:
            answer, body = Kind.LOST, encode(str(error))
        except BaseException as error:  # SystemExit too: an environment that exits costs its episode, not the worker
            answer, body = Kind.RAISED, encode(described(error))
        del self._running[request]
        self.wire.send(answer, request, episode, body)
        if self._taskset is None:  # it cannot be rebuilt here: no request can be served
            self.hung_up.set()

    async def _act(self, kind: Kind, episode: int, body: bytes) -> tuple[Kind, Any]:
        if kind is Kind.STEP:  # first, for it is by far the most frequent
            return Kind.VALUE, await self._episodes[episode].step(decode(body))
        if kind is Kind.RESET:
            assert self._taskset is not None  # the first request brought it
            environment = self._episodes[episode] = self._taskset.environment(decode(body))
            return Kind.VALUE, await environment.reset()
        if kind is Kind.CONCLUDE:
            environment = self._episodes[episode]
            return Kind.VALUE, await environment.conclude(decode(body)) if isinstance(environment, Concluding) else None
        if kind is Kind.CLOSE:
            environment = self._episodes.pop(episode, None)
            return Kind.VALUE, await environment.close() if environment is not None else None
        if kind is Kind.CALL:
            return Kind.VALUE, decode(body)(self._taskset)
        files, pickled = decode(body)
        restore_files(files)
        self._taskset = decode(pickled)
        return Kind.READY, None

    async def close(self) -> None:
        self.wire.close()
        for task in list(self._running.values()):
            task.cancel()
        for environment in self._episodes.values():
            with contextlib.suppress(Exception):
                await environment.close()
