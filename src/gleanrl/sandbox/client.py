"""Running code in a sandbox, from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from gleanrl.errors import UserError
from gleanrl.sandbox.interpreter import FRAME
from gleanrl.sandbox.limits import GRACE_S, Limits, Ran

log = logging.getLogger(__name__)

Isolation = Literal["auto", "namespaces", "landlock", "none"]

_START_S = 30.0  # for a server; a session's start counts as its first call's
_END_S = 5.0  # for a session to be heard of that was killed
_ENDING_BYTES = 1 << 16  # of the frame that ends a call
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from gleanrl.sandbox.server import main; "
    "del sys.path[0]; main(sys.argv[2], int(sys.argv[3]))"
)
_CHECK = """
import os, socket
open_walls = []
def reach(what, how):
    try:
        how()
        open_walls.append(what)
    except OSError:
        pass
reach("files", lambda: open("/etc/passwd").read())
reach("folders", lambda: os.listdir("/proc/1"))
reach("the network", lambda: socket.socket())
reach("signals to other processes", lambda: os.kill(os.getppid() or 1 << 21, 0))
open_walls
"""


class PythonSandbox:
    """Runs Python code, each call in a process of its own that ends with it; `session` keeps one for several calls.

    Args:
        isolation: ``namespaces`` (a root, processes and a network of its own), ``landlock`` (no files, sockets, signals
            or forks), ``none`` (a process with limits, for code that you trust). ``auto`` is the first of the first two
            that this machine lets us have, and never less.
        packages: code may import the installed packages, beside Python's own library.
        concurrency: calls at once; others wait. None: as many as there are processors.

    One belongs to the event loop that it is first used in. `start` may be called to know at once whether it works.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        isolation: Isolation = "auto",
        packages: bool = True,
        concurrency: int | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.active: str | None = None  # the isolation, once started
        self._isolation: Isolation = isolation
        self._packages = packages
        self._turns = asyncio.Semaphore(concurrency or os.cpu_count() or 1)
        self._starting: asyncio.Task[_Server] | None = None

    async def run(self, code: str) -> Ran:
        """Run it alone. Never raises for what the code does.

        Raises:
            UserError: this machine lets us have no isolation as asked for.
        """
        session = self.session()
        try:
            return await session.run(code)
        finally:
            await session.close()

    def session(self) -> Session:
        """An interpreter that keeps its variables between calls. Close it."""
        return Session(self)

    async def start(self) -> str:
        """The isolation that is active: namespaces, landlock or none. Raises `UserError` as `run` does."""
        await self._server()
        assert self.active is not None
        return self.active

    async def close(self) -> None:
        """End all that still runs."""
        starting, self._starting = self._starting, None
        if starting is not None:
            with contextlib.suppress(UserError, asyncio.CancelledError):
                await (await starting).close()

    async def _server(self) -> _Server:
        server = self._starting
        if server is not None and server.done() and (server.exception() is not None or server.result().dead):
            server = None
        if server is None:
            server = self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(server)

    async def _start(self) -> _Server:
        kinds = ["namespaces", "landlock"] if self._isolation == "auto" else [self._isolation]
        reasons = []
        for kind in kinds:
            server = _Server(kind, self._packages)
            try:
                await server.started()
                await self._check(server)
            except (OSError, TimeoutError) as error:
                await server.close()
                reasons.append(f"{kind}: {error}")
                continue
            if self.active != kind:
                log.info("Python sandbox: isolation by %s, limits %s", kind, asdict(self.limits))
            self.active = kind
            return server
        raise UserError(
            f"no Python sandbox with isolation = {self._isolation!r} on this machine ({'; '.join(reasons)}). Allow "
            "user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns, the "
            'seccomp profile of a container), or take a kernel with Landlock 3; isolation = "none" is for code that '
            "you trust"
        )

    async def _check(self, server: _Server) -> None:
        """Try the walls once. Raises OSError if one is not there."""
        session = Session(self, server)
        try:
            ran = await session.run(_CHECK)
        finally:
            await session.close()
        if ran.error is not None:
            raise OSError(ran.error)
        if server.kind != "none" and ran.output.strip() != "[]":
            raise OSError(f"code reaches {ran.output.strip()}")


class Session:
    """Calls that share their variables, in one process. After a call whose process ended, the next begins anew."""

    def __init__(self, sandbox: PythonSandbox, server: _Server | None = None) -> None:
        self._sandbox = sandbox
        self._own_server = server
        self._open: _Open | None = None

    async def run(self, code: str) -> Ran:
        """As `PythonSandbox.run`."""
        server = self._own_server or await self._sandbox._server()
        async with self._sandbox._turns:
            started = perf_counter()
            if self._open is None or self._open.over.done():
                await self.close()
                self._open = await server.open(self._sandbox.limits)
            try:
                return await self._open.call(code, self._sandbox.limits, started)
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        """End the process, with all that it started."""
        opened, self._open = self._open, None
        if opened is not None:
            await opened.close()


class _Open:
    """The process of a session."""

    def __init__(
        self, server: _Server, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it ended
        self.scratch: tempfile.TemporaryDirectory[str] | None = None
        self._server, self._number, self._reader, self._writer = server, number, reader, writer

    async def call(self, code: str, limits: Limits, started: float) -> Ran:
        request = {"code": code, "wall_s": limits.wall_s, "cpu_s": limits.cpu_s, "output_chars": limits.output_chars}
        body = json.dumps(request).encode()
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(limits.wall_s + GRACE_S):
                self._writer.write(FRAME.pack(len(body), b"r") + body)
                await self._writer.drain()
                ending = await self._listen(pieces, 4 * limits.output_chars)
        except TimeoutError:
            await self.close()
            error = f"TimeoutError: the code ran for more than {limits.wall_s:g} s and its process was killed"
            return Ran(_text(pieces), error, ended=True, seconds=perf_counter() - started)
        except (OSError, asyncio.IncompleteReadError, _Nonsense):
            why = await self.close()
            return Ran(_text(pieces), f"the process is gone: {why}", ended=True, seconds=perf_counter() - started)
        if "failed" in ending:
            raise OSError(f"{ending['failed']}")
        error, left_out = ending.get("error"), ending.get("left_out")
        still = bool(ending.get("threads"))
        if still:
            await self.close()
        return Ran(
            _text(pieces),
            str(error) if error is not None else None,
            left_out=left_out if isinstance(left_out, int) else 0,
            ended=still,
            seconds=perf_counter() - started,
        )

    async def _listen(self, pieces: list[bytes], most: int) -> Mapping[str, Any]:
        """Until the call ends. The other end may be anything by now: nothing that it says is taken on trust."""
        while True:
            size, kind = FRAME.unpack(await self._reader.readexactly(FRAME.size))
            most -= size if kind == b"o" else 0
            if size > _ENDING_BYTES + max(most, 0) or most < 0:
                raise _Nonsense
            body = await self._reader.readexactly(size)
            if kind == b"o":
                pieces.append(body)
                continue
            try:
                ending = json.loads(body)
            except (ValueError, RecursionError):
                raise _Nonsense from None
            if not isinstance(ending, dict):
                raise _Nonsense
            return ending

    async def close(self) -> str:
        """Why it ended."""
        self._writer.close()
        if not self.over.done():
            self._server.kill(self._number)
        try:
            async with asyncio.timeout(_END_S):
                why = await asyncio.shield(self.over)
        except TimeoutError:
            why = "nobody knows"
        if self.scratch is not None:
            self.scratch.cleanup()
        return why


class _Nonsense(Exception):
    """What no interpreter of ours says."""


class _Server:
    """The process that forks sessions."""

    def __init__(self, kind: str, packages: bool) -> None:
        self.kind = kind
        self.dead = False
        self._numbers = count()
        self._sessions: dict[int, _Open] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")} if packages else ()
        config = json.dumps({"isolation": kind, "packages": sorted(filter(os.path.isdir, paths))})
        source = str(Path(__file__).parents[2])
        command = [sys.executable, "-P", "-s", "-S", "-B", "-c", _BOOT, source, config, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Ctrl-C is the program's business
            )
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control, self._hear)

    async def started(self) -> None:
        async with asyncio.timeout(_START_S):
            await self._ready

    async def open(self, limits: Limits) -> _Open:
        ours, theirs = socket.socketpair()
        scratch = None
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            number = next(self._numbers)
            opened = self._sessions[number] = _Open(self, number, reader, writer)
            if self.kind != "namespaces":  # which have one in memory
                scratch = opened.scratch = tempfile.TemporaryDirectory(prefix="gleanrl-sandbox-")
            order = {"do": "open", "id": number, "limits": asdict(limits), "scratch": scratch.name if scratch else ""}
            try:
                socket.send_fds(self._control, [json.dumps(order).encode()], [theirs.fileno()])
            except OSError as error:
                self._ended(number, f"its server is gone ({error})")
        return opened

    def kill(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._control.send(json.dumps({"do": "kill", "id": number}).encode())

    async def close(self) -> None:
        """Returns when all of it has ended."""
        self._lost("it was closed")
        try:
            await asyncio.wait_for(asyncio.to_thread(self._process.wait), _END_S)
        except TimeoutError:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

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
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
        if not self._ready.done():
            self._ready.set_exception(OSError(why))
        for number in list(self._sessions):
            self._ended(number, why)


def _environment() -> dict[str, str]:
    """Nothing of this program's: it may hold keys. What is set makes runs repeat and memory predictable."""
    one = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX")
    return {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", **dict.fromkeys(one, "1")}


def _text(pieces: list[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace")
