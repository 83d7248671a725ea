"""Runs a model's Python code in a process where it can do no harm.

An `Executor` starts the process: `Bubblewrap` with a file system, users, processes and network of its own, or `Plain`
with limits only. `PythonSandbox` picks the executor and runs code; `PythonTool` and rewards that test programs use it:

    sandbox = PythonSandbox(Limits(wall_s=2.0))
    ran = await sandbox.run("print(6 * 7)")
    print(ran.output, ran.error)

What the code's process says is the code's word. It can print anything and end itself before its last line. It cannot
answer in another call's name, and only ``ended`` and ``seconds`` are seen from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import marshal
import os
import platform
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Literal, Protocol

from gleanrl.utils.errors import UserError

Isolation = Literal["auto", "bubblewrap", "none"]
GRACE_S = 0.5  # after the wall time, for the code to be interrupted before its process is killed
_START_S = 30.0
_MB = 1 << 20
_CALLS = 100  # of a session: the processor time of all its calls, in calls
_INTERPRETER = Path(__file__).with_name("interpreter.py")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What code may use. Raises ValueError for a number that makes no sense."""

    wall_s: float = 10.0  # of one call
    cpu_s: int = 10  # of one call; the calls of a session have a hundred times as much in all
    memory_mb: int = 512  # address space of a process
    disk_mb: int = 64  # of its folder, which bubblewrap keeps in memory; without it, of a file
    processes: int = 1  # 1: nothing can be forked, and memory_mb bounds all of it
    threads: int = 16
    output_chars: int = 10_000  # what a call may print; more is dropped and counted

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)!r}: more than 0")
        if self.memory_mb < 64:
            raise ValueError(f"memory_mb = {self.memory_mb}: Python itself needs 64")


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a call. ``text`` is all of it as a model is shown it."""

    output: str  # what was printed, and the value of a last expression
    error: str | None = None  # a traceback, or why the process ended
    left_out: int = 0  # characters of output that were dropped
    ended: bool = False  # the process is gone: a session starts again without its variables
    seconds: float = 0.0

    @property
    def text(self) -> str:
        dropped = f"\n[{self.left_out} more characters left out]" if self.left_out else ""
        said = self.output + dropped
        if self.error is None:
            return said if said.strip() else "(no output)"
        return f"{said.rstrip()}\n{self.error}" if said.strip() else self.error


# --- where code runs --------------------------------------------------------------------------------
@dataclass(slots=True)
class Running:
    """A process that an executor started. ``folder``: its own, to be removed with it."""

    process: asyncio.subprocess.Process
    folder: str | None = None

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it leads a group of its own
            os.killpg(self.process.pid, signal.SIGKILL)

    async def end(self, patience_s: float = 0.0) -> str:
        """Kill it with everything that it started, after ``patience_s`` to end by itself. Returns how it ended."""
        if patience_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), patience_s)
        self.kill()
        code = await self.process.wait()
        if self.folder is not None:
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
        number = code - 128 if code > 128 else -code  # bubblewrap adds 128
        if number == signal.SIGXCPU:
            return "its processor time was used up"
        if number > 0:
            with contextlib.suppress(ValueError):
                return f"it was killed by {signal.Signals(number).name}"
        return f"it ended with status {code}"


class Executor(Protocol):
    """Starts processes that code runs in."""

    name: str
    isolated: bool

    async def start(self, command: Sequence[str], limits: Limits, descriptor: int) -> Running:
        """Start a command that inherits ``descriptor``. Raises OSError."""
        ...


class Plain:
    """A process with limits, an empty environment and a folder of its own. It reads all that this program can read."""

    name, isolated = "none", False

    async def start(self, command: Sequence[str], limits: Limits, descriptor: int) -> Running:
        folder = tempfile.mkdtemp(prefix="gleanrl-python-")
        environment = {**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
        return Running(await _started(command, descriptor, env=environment, cwd=folder), folder)


class Bubblewrap:
    """A process in namespaces of its own: the system's libraries read-only, a folder in memory, no network."""

    name, isolated = "bubblewrap", True

    async def start(self, command: Sequence[str], limits: Limits, descriptor: int) -> Running:
        if limits.processes > 1 and os.geteuid() == 0:
            raise OSError("processes = 1 is the most for root, to whom the kernel refuses no process")
        with tempfile.TemporaryFile() as rules:
            rules.write(seccomp_filter(forks=limits.processes > 1))
            rules.seek(0)
            arguments = bubblewrap_command(limits, rules.fileno())
            return Running(await _started([*arguments, *command], descriptor, rules.fileno(), env={}, cwd="/"))


async def _started(
    command: Sequence[str], *descriptors: int, env: dict[str, str], cwd: str
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        pass_fds=descriptors,
        env=env,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is the program's business
    )


# What is set makes runs repeat and memory predictable. Nothing of this program's: it may hold keys.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "MALLOC_ARENA_MAX": "1"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)


def bubblewrap_command(limits: Limits, rules: int) -> list[str]:
    """The command line in front of the interpreter's. ``rules``: descriptor of the filter of system calls."""
    size = ["--size", str(limits.disk_mb * _MB)] if "--size" in _bubblewrap_options() else []
    namespaces = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command = [shutil.which("bwrap") or "bwrap", *namespaces]
    command += ["--die-with-parent", "--cap-drop", "ALL", "--seccomp", str(rules)]
    for name, value in {**_ENVIRONMENT, "HOME": "/tmp", "TMPDIR": "/tmp"}.items():
        command += ["--setenv", name, value]
    command += [*size, "--tmpfs", "/tmp"]  # before the others, or it would hide an installation below /tmp
    for path in _readable():
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    command += ["--dev", "/dev", "--chdir", "/tmp"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--"]


def _readable() -> list[str]:
    """What Python needs; none inside another."""
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
    paths = {*system, sys.base_prefix, os.path.realpath(sys.executable), *_packages(), str(_INTERPRETER)}
    found: list[str] = []
    for path in sorted(paths, key=len):
        if os.path.exists(path) and not any(path.startswith(outer + "/") for outer in found):
            found.append(path)
    return found


def _packages() -> list[str]:
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def _interpreter(sandbox: PythonSandbox, calls: int, descriptor: int) -> list[str]:
    """The command line of the interpreter; see `interpreter.main`."""
    limits, executor = sandbox.limits, sandbox.executor
    bounds = {
        "AS": limits.memory_mb * _MB,
        "FSIZE": limits.disk_mb * _MB,
        "CPU": limits.cpu_s * calls + 1,
        "CORE": 0,
        "NOFILE": 64,
        "SIGPENDING": 1024,
    }
    kernel = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    if executor.isolated and kernel >= (5, 14):  # before it, the user's other processes are counted too
        bounds["NPROC"] = limits.processes + limits.threads
    shown = ",".join(f"{name}={value}" for name, value in bounds.items())
    kind = "isolated" if executor.isolated else "plain"
    python = [os.path.realpath(sys.executable), "-P", "-s", "-S", "-B", str(_INTERPRETER)]
    return [*python, str(descriptor), shown, kind, *(_packages() if sandbox.packages else [])]


# Calls that no limit bounds or that open a way to the kernel: memfd_create memfd_secret shmget msgget | unshare setns
# mount bpf userfaultfd io_uring_setup add_key keyctl ptrace; then fork and vfork; then clone, clone3.
_ARCHITECTURES = {
    "x86_64": (0xC000003E, (319, 447, 29, 68, 272, 308, 165, 321, 323, 425, 248, 250, 101), (57, 58), 56),
    "aarch64": (0xC00000B7, (279, 447, 194, 186, 97, 268, 40, 280, 282, 425, 217, 219, 117), (), 220),
}
_CLONE3, _CLONE_THREAD, _CLONE_NAMESPACES = 435, 0x00010000, 0x7E020000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _EAGAIN, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x0005000B, 0x00050026


def seccomp_filter(*, forks: bool) -> bytes:
    """A filter of system calls (classic BPF). Without it a root's fork bomb has no bound: no limit counts for root.

    Raises OSError where this machine's system calls are not known.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(f"no filter of system calls for {platform.machine()}")
    architecture, refused, fork_calls, clone = _ARCHITECTURES[platform.machine()]
    code = [(_LOAD, 4, 0, 0), (_EQUAL, architecture, 1, 0), (_RETURN, _KILL, 0, 0), (_LOAD, 0, 0, 0)]
    code += [(_AT_LEAST, 0x40000000, 0, 1), (_RETURN, _ENOSYS, 0, 0)]  # x32
    for number in refused:
        code += [(_EQUAL, number, 0, 1), (_RETURN, _EPERM, 0, 0)]
    code += [(_EQUAL, _CLONE3, 0, 1), (_RETURN, _ENOSYS, 0, 0)]  # the C library then takes clone
    for number in () if forks else fork_calls:
        code += [(_EQUAL, number, 0, 1), (_RETURN, _EAGAIN, 0, 0)]
    code += [(_EQUAL, clone, 0, 3), (_LOAD, 16, 0, 0)]  # its flags
    if forks:
        code += [(_ANY_BIT, _CLONE_NAMESPACES, 0, 1), (_RETURN, _EPERM, 0, 0)]
    else:
        code += [(_ANY_BIT, _CLONE_THREAD, 1, 0), (_RETURN, _EAGAIN, 0, 0)]
    return b"".join(
        struct.pack("<HBBI", kind, true, false, value) for kind, value, true, false in [*code, (_RETURN, _ALLOW, 0, 0)]
    )


@cache
def _bubblewrap_options() -> str:
    return subprocess.run(["bwrap", "--help"], capture_output=True, text=True, timeout=10, check=False).stdout


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
reach("processes", lambda: os.listdir("/proc/1"))
reach("the network", lambda: socket.create_connection(("127.0.0.1", PORT), 1))
if os.access("/", os.W_OK):
    open_walls.append("its own root")
open_walls
"""


@cache
def bubblewrap_missing() -> str:
    """Why code cannot be isolated on this machine; empty if it can. The walls are tried once."""
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not installed; apt-get install bubblewrap"

    async def check() -> str:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            code = _CHECK.replace("PORT", str(listening.getsockname()[1]))
            ran = await PythonSandbox(Limits(), isolation="bubblewrap", _checked=True).run(code)
        if ran.error is not None:
            return ran.error
        return "" if ran.output == "[]\n" else f"code reaches {ran.output.strip()}"

    try:
        # In a thread: this may be called where an event loop runs.
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as threads:
            return threads.submit(asyncio.run, check()).result()
    except OSError as error:
        return f"bubblewrap cannot make namespaces here: {error}"


@cache
def warn_unisolated(reason: str) -> None:
    _log.warning("the Python tool runs code WITHOUT isolation, with limits only: %s", reason)


# --- running code -----------------------------------------------------------------------------------
class PythonSandbox:
    """Runs Python code, each call in a process of its own that ends with it; `session` keeps one for several calls.

    Args:
        isolation: ``bubblewrap``, or ``none`` (a process with limits, for code that you trust). ``auto`` is bubblewrap
            where this machine has it and otherwise none, which the log says once.
        packages: code may import the installed packages and not only Python's own library.
        concurrency: calls at once; others wait. None: as many as there are processors.

    Raises:
        UserError: this machine does not have the isolation asked for.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        isolation: Isolation = "auto",
        packages: bool = True,
        concurrency: int | None = None,
        _checked: bool = False,
    ) -> None:
        self.limits = limits or Limits()
        self.packages = packages
        self._turns = asyncio.Semaphore(concurrency or os.cpu_count() or 1)
        if isolation not in ("auto", "bubblewrap", "none"):
            raise UserError(f"isolation = {isolation!r}: auto, bubblewrap or none")
        missing = bubblewrap_missing() if isolation != "none" and not _checked else ""
        if missing and isolation == "bubblewrap":
            raise UserError(
                f"isolation = 'bubblewrap' cannot be had on this machine: {missing}. Install bubblewrap and allow user "
                "namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns, the "
                "seccomp profile of a container); isolation = 'none' is for code that you trust"
            )
        if missing:
            warn_unisolated(missing)
        self.executor: Executor = Plain() if missing or isolation == "none" else Bubblewrap()

    async def run(self, code: str) -> Ran:
        """Run it alone. Never raises for what the code does.

        Raises:
            OSError: no process could be started; no code was run.
        """
        session = Session(self, calls=1)
        try:
            return await session.run(code)
        finally:
            await session.close()

    def session(self) -> Session:
        """An interpreter that keeps its variables between calls. Close it."""
        return Session(self, calls=_CALLS)


class Session:
    """Calls that share their variables, in one process. After a call whose process ended, the next starts another."""

    def __init__(self, sandbox: PythonSandbox, *, calls: int) -> None:
        self._sandbox = sandbox
        self._calls = calls
        self._open: _Interpreter | None = None

    async def run(self, code: str) -> Ran:
        """As `PythonSandbox.run`."""
        async with self._sandbox._turns:
            began = perf_counter()
            try:
                if self._open is None:
                    self._open = await _Interpreter.start(self._sandbox, self._calls)
                ran = await self._open.call(code, self._sandbox.limits, began)
            except BaseException:
                await self.close()
                raise
            if ran.ended:
                await self.close()
            return ran

    async def close(self) -> None:
        """End the process with everything that it started."""
        interpreter, self._open = self._open, None
        if interpreter is not None:
            await interpreter.close()


class _Nonsense(Exception):
    """What no interpreter of ours sends."""


@dataclass(slots=True)
class _Interpreter:
    """The process of a session. Once it has run code, nothing that it sends is trusted."""

    running: Running
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, sandbox: PythonSandbox, calls: int) -> _Interpreter:
        """Raises OSError where it cannot be started, or its limits cannot be set."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = _interpreter(sandbox, calls, theirs.fileno())
            try:
                running = await sandbox.executor.start(command, sandbox.limits, theirs.fileno())
            except BaseException:
                ours.close()
                raise
        opened = cls(running, *await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(_START_S):
                failed = (await opened._frame("start", 1 << 16))[3]
        except (TimeoutError, asyncio.IncompleteReadError, OSError, _Nonsense):
            assert running.process.stderr is not None
            how = await opened.close(patience_s=1.0)
            said = (await running.process.stderr.read(1000)).decode("utf-8", "replace").strip()
            failed = said or how
        except BaseException:
            await opened.close()
            raise
        if failed:
            await opened.close()
            raise OSError(f"the sandbox did not start: {failed}")
        return opened

    async def call(self, code: str, limits: Limits, began: float) -> Ran:
        nonce = secrets.token_hex(8)
        request = marshal.dumps((nonce, code, limits.wall_s, limits.output_chars))
        pieces: list[str] = []
        error: str | None = None
        left_out, room, ended = 0, limits.output_chars, False
        try:
            async with asyncio.timeout(limits.wall_s + GRACE_S):
                self.writer.write(len(request).to_bytes(4, "little") + request)
                while True:
                    kind, dropped, threads, text = await self._frame(nonce, 4 * limits.output_chars + (1 << 16))
                    if kind == "d":
                        error, left_out, ended = text or None, dropped, threads > 0
                        break
                    room -= len(text)
                    if kind != "o" or not text or room < 0:
                        raise _Nonsense
                    pieces.append(text)
        except TimeoutError:
            self.running.kill()
            error, ended = (
                f"TimeoutError: the code ran for more than {limits.wall_s:g} s and its process was killed",
                True,
            )
        except _Nonsense:
            error, ended = f"the process is gone: {await self.close()}", True
        except (OSError, asyncio.IncompleteReadError):  # it hung up
            error, ended = f"the process is gone: {await self.close(patience_s=1.0)}", True
        return Ran("".join(pieces), error, left_out, ended, perf_counter() - began)

    async def _frame(self, nonce: str, longest: int) -> tuple[str, int, int, str]:
        """Kind, characters left out, threads and body."""
        try:
            given, kind, *numbers = (await self.reader.readuntil(b"\n")).decode("ascii").split()
            left_out, threads, length = (int(number) for number in numbers)
        except (ValueError, asyncio.LimitOverrunError):
            raise _Nonsense from None
        if not secrets.compare_digest(given, nonce) or min(left_out, threads, length) < 0 or length > longest:
            raise _Nonsense
        return kind, left_out, threads, (await self.reader.readexactly(length)).decode("utf-8", "replace")

    async def close(self, patience_s: float = 0.0) -> str:
        """Why it ended."""
        self.writer.close()
        return await self.running.end(patience_s)
