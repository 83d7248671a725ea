"""The server of sandboxes and its sessions, as seen from asyncio. Nothing that a session says is taken on trust."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from gleanrl.environments.tools.sandbox.interpreter import FRAME
from gleanrl.environments.tools.sandbox.limits import GRACE_S, Limits, Ran

_START_S = 30.0  # for a server; a session's start counts as its first call's
_END_S = 5.0  # for a session to be heard of that was killed
_ENDING_BYTES = 1 << 16  # of the frame that ends a call, or says that there is no session
_CALLS = 100  # of a session that has several: their processor time in all, in calls
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from gleanrl.environments.tools.sandbox.server import main; "
    "del sys.path[0]; main(sys.argv[2], int(sys.argv[3]))"
)


class OpenSession:
    """The process of a session.

    Args:
        once: it has one call.
    """

    def __init__(
        self, server: Server, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, once: bool
    ) -> None:
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it ended
        self._server, self._number, self._reader, self._writer = server, number, reader, writer
        self._once = once
        self._started = self._begun = False
        self._calls = count()

    async def call(self, code: str, limits: Limits, started: float) -> Ran:
        """Raises OSError where no code could be run at all, and for nothing that code does."""
        number = next(self._calls)
        request = {"call": number, "code": code, "wall_s": limits.wall_s, "cpu_s": limits.cpu_s}
        body = json.dumps({**request, "output_chars": limits.output_chars}).encode()
        pieces: list[bytes] = []
        ending: _Ending | None = None
        why: str | None = None
        if self._begun:
            self._server.tell("go", self._number)
        try:
            async with asyncio.timeout(limits.wall_s + GRACE_S):
                self._writer.write(FRAME.pack(len(body), b"r") + body)
                await self._writer.drain()
                if not self._begun:
                    await self._begin()
                ending = await self._listen(number, pieces, 4 * limits.output_chars)
        except TimeoutError:
            await self.close()
            why = f"TimeoutError: the code ran for more than {limits.wall_s:g} s and its process was killed"
        except _NotStarted:
            raise
        except (OSError, asyncio.IncompleteReadError, _Nonsense):
            why = f"the process is gone: {await self.close()}"
        if not self._begun:
            raise _NotStarted(f"the sandbox did not start: {why}")
        if ending is not None and ending.threads:
            await self.close()
        elif ending is not None and not self._once:
            self._server.tell("stop", self._number)  # nothing goes on between calls, whatever the code left behind
        text = b"".join(pieces).decode("utf-8", "replace")
        return Ran(
            text[: limits.output_chars],
            ending.error if ending is not None else why,
            left_out=max(0, len(text) - limits.output_chars) + (ending.left_out if ending is not None else 0),
            ended=ending is None or ending.threads,
            seconds=perf_counter() - started,
        )

    async def _begin(self) -> None:
        """No code has run yet, so that what is said here is true. Raises OSError where there is no session."""
        size, kind = FRAME.unpack(await self._reader.readexactly(FRAME.size))
        failed = (await self._reader.readexactly(min(size, _ENDING_BYTES))).decode("utf-8", "replace")
        if kind != b"s" or failed:
            await self.close()
            raise _NotStarted(failed)
        self._begun = True

    async def _listen(self, number: int, pieces: list[bytes], most: int) -> _Ending:
        """Until the call ends. The other end may be anything by now."""
        while True:
            size, kind = FRAME.unpack(await self._reader.readexactly(FRAME.size))
            if kind == b"o" and 0 < size <= most:
                most -= size
                pieces.append(await self._reader.readexactly(size))
            elif kind == b"d" and size <= _ENDING_BYTES:
                return _Ending(await self._reader.readexactly(size), number)
            else:
                raise _Nonsense

    async def close(self) -> str:
        """Why it ended."""
        self._writer.close()
        if not self.over.done():
            self._server.tell("kill", self._number)
        try:
            async with asyncio.timeout(_END_S):
                return await asyncio.shield(self.over)
        except TimeoutError:
            return "nobody knows"


class _NotStarted(OSError):
    """No code was run."""


class _Nonsense(Exception):
    """What no interpreter of ours says."""


class _Ending:
    """What a session says at the end of a call. Raises `_Nonsense` for what ours does not say."""

    def __init__(self, body: bytes, number: int) -> None:
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            raise _Nonsense from None
        match said:
            case {"call": int(call), "error": None | str() as error, "left_out": int(left), "threads": int(threads)}:
                pass
            case _:
                raise _Nonsense
        if call != number or not 0 <= left < 1 << 63:
            raise _Nonsense
        # JSON knows halves of characters, which no tokenizer and no file takes
        self.error = None if error is None else error.encode("utf-8", "replace").decode()
        self.left_out, self.threads = left, threads != 0


class Server:
    """The process that forks sessions."""

    def __init__(self, kind: str, packages: bool) -> None:
        self.kind = kind
        self.dead = False
        self._numbers = count()
        self._sessions: dict[int, OpenSession] = {}
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._unsent: deque[tuple[bytes, socket.socket | None]] = deque()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")} if packages else ()
        config = {"isolation": kind, "packages": sorted(filter(os.path.isdir, paths)), "scratch": tempfile.gettempdir()}
        source = str(Path(__file__).parents[4])
        arguments = [_BOOT, source, json.dumps(config), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", "-c", *arguments],
                pass_fds=[theirs.fileno()],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Ctrl-C is the program's business
            )
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._hear)

    async def started(self) -> None:
        async with asyncio.timeout(_START_S):
            await self._ready

    async def open(self, limits: Limits, *, once: bool) -> OpenSession:
        ours, theirs = socket.socketpair()
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            number = next(self._numbers)
            opened = self._sessions[number] = OpenSession(self, number, reader, writer, once)
            order = {"do": "open", "id": number, "limits": asdict(limits), "calls": 1 if once else _CALLS}
            self._send(order, theirs)
        except BaseException:
            theirs.close()
            raise
        return opened

    def tell(self, what: str, number: int) -> None:
        """``go``, ``stop`` or ``kill`` a session. The server hears of it as soon as it listens."""
        self._send({"do": what, "id": number}, None)

    def abandon(self) -> None:
        """It ends by itself, since nobody is at the other end. Also once the loop is closed."""
        if self._loop.is_closed():
            self._control.close()
        else:
            self._lost("it was given up")

    async def close(self) -> None:
        """Returns when all of it has ended."""
        self._lost("it was closed")
        try:
            await asyncio.wait_for(asyncio.to_thread(self._process.wait), _END_S)
        except TimeoutError:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _send(self, order: Mapping[str, Any], descriptor: socket.socket | None) -> None:
        """Takes the descriptor over."""
        if self.dead:
            self._ended(order["id"], "its server is gone")
            return self._sent(descriptor)
        self._unsent.append((json.dumps(order).encode(), descriptor))
        if len(self._unsent) == 1:
            self._loop.add_writer(self._control, self._send_on)
            self._send_on()

    def _send_on(self) -> None:
        while self._unsent:
            data, descriptor = self._unsent[0]
            try:
                socket.send_fds(self._control, [data], [descriptor.fileno()] if descriptor is not None else [])
            except BlockingIOError:  # it is busy: again when there is room
                return
            except OSError as error:
                return self._lost(f"its server is gone ({error})")
            self._unsent.popleft()
            self._sent(descriptor)
        self._loop.remove_writer(self._control)

    def _sent(self, descriptor: socket.socket | None) -> None:
        if descriptor is not None:
            descriptor.close()

    def _hear(self) -> None:
        try:
            said = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            return self._lost("its server ended")
        news = json.loads(said)
        if "ended" in news:
            self._ended(news["ended"], news["why"])
        elif self._ready.done():
            pass
        elif "failed" in news:
            self._ready.set_exception(OSError(news["failed"]))
        else:
            self._ready.set_result(None)

    def _ended(self, number: int, why: str) -> None:
        opened = self._sessions.pop(number, None)
        if opened is not None and not opened.over.done():
            opened.over.set_result(why)

    def _lost(self, why: str) -> None:
        if not self.dead:
            self.dead = True
            self._loop.remove_reader(self._control)
            self._loop.remove_writer(self._control)
            self._control.close()
            while self._unsent:
                self._sent(self._unsent.popleft()[1])
        if not self._ready.done():
            self._ready.set_exception(OSError(why))
            self._ready.exception()  # perhaps nobody waits for it
        for number in list(self._sessions):
            self._ended(number, why)


def _environment() -> dict[str, str]:
    """Nothing of this program's: it may hold keys. What is set makes runs repeat and memory predictable."""
    one = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX")
    return {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", **dict.fromkeys(one, "1")}
