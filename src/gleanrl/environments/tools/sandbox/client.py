"""Running code in a sandbox, from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import asdict
from time import perf_counter
from typing import Literal

from gleanrl.environments.tools.sandbox.limits import Limits, Ran
from gleanrl.environments.tools.sandbox.process import OpenSession, Server
from gleanrl.utils.errors import UserError

log = logging.getLogger(__name__)

Isolation = Literal["auto", "namespaces", "landlock", "none"]

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
        self._starting: asyncio.Task[Server] | None = None

    async def run(self, code: str) -> Ran:
        """Run it alone. Never raises for what the code does.

        Raises:
            UserError: this machine lets us have no isolation as asked for.
            OSError: no process could be had for it just now; no code was run.
        """
        session = Session(self, once=True)
        try:
            return await session.run(code)
        finally:
            await session.close()

    def session(self) -> Session:
        """An interpreter that keeps its variables between calls; between them it stands still. Close it."""
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

    def abandon(self) -> None:
        """As `close`, once its event loop is closed, and without waiting."""
        starting, self._starting = self._starting, None
        if starting is not None and starting.done() and not starting.cancelled() and starting.exception() is None:
            starting.result().abandon()

    async def _server(self) -> Server:
        server = self._starting
        done = server is not None and server.done()
        if server is None or (done and (server.cancelled() or server.exception() or server.result().dead)):
            server = self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(server)

    async def _start(self) -> Server:
        kinds = ["namespaces", "landlock"] if self._isolation == "auto" else [self._isolation]
        reasons = []
        for kind in kinds:
            server = Server(kind, self._packages)
            try:
                await server.started()
                await self._check(server)
            except (OSError, TimeoutError) as error:
                await server.close()
                reasons.append(f"{kind}: {error}")
                continue
            except BaseException:
                server.abandon()
                raise
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

    async def _check(self, server: Server) -> None:
        """Try the walls once. Raises OSError if one is not there."""
        session = Session(self, server, once=True)
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

    def __init__(self, sandbox: PythonSandbox, server: Server | None = None, *, once: bool = False) -> None:
        self._sandbox = sandbox
        self._own_server = server
        self._once = once
        self._open: OpenSession | None = None

    async def run(self, code: str) -> Ran:
        """As `PythonSandbox.run`."""
        server = self._own_server or await self._sandbox._server()
        async with self._sandbox._turns:
            try:
                return await self._call(server, code)
            except OSError:
                if not server.dead or self._own_server is not None:
                    raise
            return await self._call(await self._sandbox._server(), code)  # that one died before it ran any code

    async def _call(self, server: Server, code: str) -> Ran:
        started = perf_counter()
        if self._open is None or self._open.over.done():
            await self.close()
            self._open = await server.open(self._sandbox.limits, once=self._once)
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
