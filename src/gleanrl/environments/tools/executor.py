"""Runs a model's Python code in a restricted process.

With bubblewrap, the process is isolated: it has a file system, users, processes and a network of its own. Without
bubblewrap, it only has resource limits. `PythonTool` and rewards that test programs use `PythonSandbox`:

    sandbox = PythonSandbox(Limits(wall_s=2.0))
    ran = await sandbox.run("print(6 * 7)")
    print(ran.output, ran.error)

``output`` and ``error`` come from the code's process, so the code can fake them or end its process early. It cannot
fake the answer to another call, and ``ended`` and ``seconds`` are measured outside the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
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
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Literal

from gleanrl.utils.errors import UserError

Isolation = Literal["auto", "bubblewrap", "none"]
GRACE_S = 0.5  # seconds after the wall time in which the code can be interrupted before its process is killed
_START_S = 30.0
_MB = 1 << 20
_CALLS = 100  # a session may use as much processor time as this many calls
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on what code may use. Raises ValueError for numbers out of range."""

    wall_s: float = 10.0  # time of one call
    cpu_s: int = 10  # processor time of one call; a session may use a hundred times as much over all its calls
    memory_mb: int = 512  # address space of one process
    disk_mb: int = 64  # size of the process's folder, which is kept in memory; without bubblewrap, of each file
    processes: int = 1  # 1 = the code cannot fork, so that memory_mb limits all of its memory
    threads: int = 16
    output_chars: int = 10_000  # characters that a call may print; further ones are dropped and counted

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)!r}: more than 0")
        if self.memory_mb < 64:
            raise ValueError(f"memory_mb = {self.memory_mb}: Python itself needs 64")


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a call."""

    output: str  # printed text, and the value of a last expression
    error: str | None = None  # a traceback, or why the process ended
    left_out: int = 0  # number of characters of output that were dropped
    ended: bool = False  # whether the process is gone; a session then starts again without its variables
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """Output and error as one text for the model."""
        dropped = f"\n[{self.left_out} more characters left out]" if self.left_out else ""
        said = self.output + dropped
        if self.error is None:
            return said if said.strip() else "(no output)"
        return f"{said.rstrip()}\n{self.error}" if said.strip() else self.error


# --- the process that code runs in ------------------------------------------------------------------
# These variables make runs repeatable and memory predictable. No variable is inherited, because this program's
# environment may hold keys.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "MALLOC_ARENA_MAX": "1"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
_PYTHON = os.path.realpath(sys.executable)
_START = "import marshal, posix, sys; exec(marshal.loads(posix.read(int(sys.argv[1]), 1 << 20)))"  # see `_program`


@cache
def _program() -> bytes:
    """Return `interpreter.py`, compiled. A new process reads this from its socket first."""
    source = Path(__file__).with_name("interpreter.py").read_text(encoding="utf-8")
    return marshal.dumps(compile(source, "interpreter", "exec", dont_inherit=True))


@cache
def _packages() -> tuple[str, ...]:
    return tuple(sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))


@cache
def _bubblewrap(disk_mb: int) -> tuple[str, ...]:
    """Return the bubblewrap command that precedes the interpreter's command, without the filter of system calls."""
    command = [shutil.which("bwrap") or "bwrap", "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
    command += ["--unshare-uts", "--die-with-parent", "--cap-drop", "ALL"]
    for name, value in {**_ENVIRONMENT, "HOME": "/tmp", "TMPDIR": "/tmp"}.items():
        command += ["--setenv", name, value]
    if "--size" in subprocess.run(["bwrap", "--help"], capture_output=True, text=True, timeout=10, check=False).stdout:
        command += ["--size", str(disk_mb * _MB)]
    command += ["--tmpfs", "/tmp"]  # mounted first, or it would hide a Python installation below /tmp
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
    shown: list[str] = []
    for path in sorted({*system, sys.base_prefix, _PYTHON, *_packages()}, key=len):
        if not os.path.exists(path) or any(path.startswith(outer + "/") for outer in shown):
            continue
        shown.append(path)
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    return (*command, "--dev", "/dev", "--chdir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/")


# For each architecture: its number, the refused system calls, the numbers of fork and vfork, and the number of clone.
# Refused are calls that use memory beyond any limit (memfd_create memfd_secret shmget msgget) and calls that could be
# used to attack the kernel (unshare setns mount bpf userfaultfd io_uring_setup add_key keyctl ptrace).
_ARCHITECTURES = {
    "x86_64": (0xC000003E, (319, 447, 29, 68, 272, 308, 165, 321, 323, 425, 248, 250, 101), (57, 58), 56),
    "aarch64": (0xC00000B7, (279, 447, 194, 186, 97, 268, 40, 280, 282, 425, 217, 219, 117), (), 220),
}
_CLONE3, _CLONE_THREAD, _CLONE_NAMESPACES = 435, 0x00010000, 0x7E020000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _EAGAIN, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x0005000B, 0x00050026


def seccomp_filter(*, forks: bool) -> bytes:
    """Return a filter of system calls, as a classic BPF program.

    It is needed because the kernel does not apply the limit on processes to root, so that only a filter stops a fork
    bomb of root. Raises OSError if the numbers of this machine's system calls are not known.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(f"no filter of system calls for {platform.machine()}")
    architecture, refused, fork_calls, clone = _ARCHITECTURES[platform.machine()]
    code = [(_LOAD, 4, 0, 0), (_EQUAL, architecture, 1, 0), (_RETURN, _KILL, 0, 0), (_LOAD, 0, 0, 0)]
    code += [(_AT_LEAST, 0x40000000, 0, 1), (_RETURN, _ENOSYS, 0, 0)]  # refuse system calls of the x32 ABI
    for number in refused:
        code += [(_EQUAL, number, 0, 1), (_RETURN, _EPERM, 0, 0)]
    code += [(_EQUAL, _CLONE3, 0, 1), (_RETURN, _ENOSYS, 0, 0)]  # the C library then falls back to clone
    for number in () if forks else fork_calls:
        code += [(_EQUAL, number, 0, 1), (_RETURN, _EAGAIN, 0, 0)]
    code += [(_EQUAL, clone, 0, 3), (_LOAD, 16, 0, 0)]  # load the flags of clone
    if forks:
        code += [(_ANY_BIT, _CLONE_NAMESPACES, 0, 1), (_RETURN, _EPERM, 0, 0)]
    else:
        code += [(_ANY_BIT, _CLONE_THREAD, 1, 0), (_RETURN, _EAGAIN, 0, 0)]
    return b"".join(
        struct.pack("<HBBI", kind, true, false, value) for kind, value, true, false in [*code, (_RETURN, _ALLOW, 0, 0)]
    )


_CHECK = """
import os, socket
reached = []
def reach(what, how):
    try:
        how()
        reached.append(what)
    except OSError:
        pass
reach("files", lambda: open("/etc/passwd").read())
reach("processes", lambda: os.listdir("/proc/1"))
reach("the network", lambda: socket.create_connection(("127.0.0.1", PORT), 1))
if os.access("/", os.W_OK):
    reached.append("its own root")
reached
"""


@cache
def bubblewrap_missing() -> str:
    """Return why code cannot be isolated on this machine; empty if it can be. The isolation is tested only once."""
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not installed; apt-get install bubblewrap"
    sandbox = PythonSandbox(isolation="bubblewrap", _checked=True)
    try:
        # Run in a thread, because the caller's thread may have a running event loop.
        with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as threads:
            code = _CHECK.replace("PORT", str(listening.getsockname()[1]))
            ran = threads.submit(asyncio.run, sandbox.run(code)).result()
    except OSError as error:
        return f"bubblewrap cannot make namespaces here: {error}"
    if ran.error is not None:
        return ran.error
    return "" if ran.output == "[]\n" else f"code reaches {ran.output.strip()}"


@cache
def warn_unisolated(reason: str) -> None:
    """Log a warning that code runs without isolation, once for each reason."""
    _log.warning("the Python tool runs code WITHOUT isolation, with limits only: %s", reason)


# --- running code -----------------------------------------------------------------------------------
class PythonSandbox:
    """Runs Python code, each call in a new process. A `session` keeps one process for several calls.

    The process for the next call is started ahead of time, while the model samples. It ends with the sandbox or the
    event loop.

    Args:
        isolation: ``bubblewrap``, or ``none`` (a process with limits, for code that you trust). ``auto`` is bubblewrap
            if this machine has it, else none, with a warning in the log.
        packages: whether code may import the installed packages, not only Python's own library.
        concurrency: number of calls that run at once; further calls wait. None = the number of processors.

    Raises:
        UserError: the requested isolation is not available on this machine.
    """

    _next: tuple[asyncio.Task[Ran], asyncio.Future[str]] | None = None  # next call, and a future of its code

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        isolation: Isolation = "auto",
        packages: bool = True,
        concurrency: int | None = None,
        _checked: bool = False,
    ) -> None:
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
        self.limits = limits or Limits()
        self.packages = packages
        self.isolation: Isolation = "none" if missing or isolation == "none" else "bubblewrap"
        self._turns = asyncio.Semaphore(concurrency or os.cpu_count() or 1)

    async def run(self, code: str) -> Ran:
        """Run code in a process of its own. Errors of the code are in the result and are not raised.

        Raises:
            OSError: no process could be started, so the code was not run.
        """
        async with self._turns:
            if self._next is None or self._next[0].get_loop() is not asyncio.get_running_loop():
                self._next = self._prepare_call()
            call, given = self._next
            self._next = self._prepare_call()
            given.set_result(code)
            return await call

    def _prepare_call(self) -> tuple[asyncio.Task[Ran], asyncio.Future[str]]:
        loop = asyncio.get_running_loop()
        given: asyncio.Future[str] = loop.create_future()
        same = copy.copy(self)  # a task that referred to the sandbox itself would keep it alive
        same._next = None
        call = loop.create_task(same._call(given))
        owner = weakref.ref(self)

        def forget(_: asyncio.Task[Ran]) -> None:  # the loop cancelled it at its end; a task keeps its loop alive
            sandbox = owner()
            if sandbox is not None and sandbox._next is not None and sandbox._next[0] is call:
                sandbox._next = None

        call.add_done_callback(forget)
        return call, given

    def __del__(self) -> None:
        if self._next is not None:  # the process that waits for a call which does not come
            call, _ = self._next
            with contextlib.suppress(RuntimeError):  # the loop is closed
                call.get_loop().call_soon_threadsafe(call.cancel)

    async def _call(self, given: asyncio.Future[str]) -> Ran:
        """Start a process, wait for code, and run it. When this is cancelled, the process ends."""
        session = Session(self, calls=1)
        try:
            with contextlib.suppress(OSError):  # `Session.call` tries again to start a process
                await session.start()
            code = await given
            if session.ended:  # for example, if the system killed the waiting process to free memory
                await session.close()
            return await session.call(code)
        finally:
            await session.close()

    def session(self) -> Session:
        """Return an interpreter that keeps its variables between calls. The caller must close it."""
        return Session(self, calls=_CALLS)


class _Nonsense(Exception):
    """The process sent what `interpreter.py` does not send."""


class Session:
    """Runs calls in one process, so that they share variables. If the process ends, the next call starts another one.

    Once the process has run code, nothing that it sends is trusted.
    """

    def __init__(self, sandbox: PythonSandbox, *, calls: int) -> None:
        self._sandbox = sandbox
        self._calls = calls
        self._process: asyncio.subprocess.Process | None = None
        self._folder: str | None = None  # working folder of a process without bubblewrap, removed when it ends
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    @property
    def ended(self) -> bool:
        """Whether the process ended by itself."""
        return self._process is not None and self._process.returncode is not None

    async def run(self, code: str) -> Ran:
        """Run code in the session's process. Errors are reported as by `PythonSandbox.run`."""
        async with self._sandbox._turns:
            return await self.call(code)

    async def start(self) -> None:
        """Start the process. Raises OSError if it cannot be started, or if its limits cannot be set."""
        limits, isolated = self._sandbox.limits, self._sandbox.isolation == "bubblewrap"
        if isolated and limits.processes > 1 and os.geteuid() == 0:
            raise OSError("processes = 1 is the most for root, to whom the kernel refuses no process")
        bounds = {
            "AS": limits.memory_mb * _MB,
            "FSIZE": limits.disk_mb * _MB,
            "CPU": limits.cpu_s * self._calls + 1,
            "CORE": 0,
            "NOFILE": 64,
            "SIGPENDING": 1024,
        }
        kernel = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
        if isolated and kernel >= (5, 14):  # older kernels also count the user's processes outside the sandbox
            bounds["NPROC"] = limits.processes + limits.threads
        ours, theirs = socket.socketpair()
        command = [_PYTHON, "-P", "-s", "-S", "-B", "-c", _START, str(theirs.fileno())]
        command += [",".join(f"{name}={value}" for name, value in bounds.items()), self._sandbox.isolation]
        command += _packages() if self._sandbox.packages else ()
        with contextlib.ExitStack() as inherited:
            inherited.enter_context(theirs)
            inherit = [theirs.fileno()]
            if isolated:
                rules, write = os.pipe()
                inherited.callback(os.close, rules)
                with os.fdopen(write, "wb") as stream:
                    stream.write(seccomp_filter(forks=limits.processes > 1))
                inherit.append(rules)
                command = [*_bubblewrap(limits.disk_mb), "--seccomp", str(rules), "--", *command]
                environment, folder = {}, "/"
            else:
                self._folder = folder = tempfile.mkdtemp(prefix="gleanrl-python-")
                environment = {**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            self._writer.write(_program())
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    pass_fds=inherit,
                    env=environment,
                    cwd=folder,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,  # so that Ctrl-C in the terminal reaches only this program
                )
            except BaseException:
                await self.close()
                raise
        try:
            async with asyncio.timeout(_START_S):
                failed = (await self._frame("start", 1 << 16))[3]
        except (TimeoutError, asyncio.IncompleteReadError, OSError, _Nonsense):
            assert self._process.stderr is not None
            said, how = self._process.stderr, await self.close(patience_s=1.0)
            failed = (await said.read(1000)).decode("utf-8", "replace").strip() or how
        except BaseException:
            await self.close()
            raise
        if failed:
            await self.close()
            raise OSError(f"the sandbox did not start: {failed}")

    async def call(self, code: str) -> Ran:
        """Run code. The caller must hold the sandbox's semaphore. Raises OSError if the process cannot be started."""
        began = perf_counter()
        limits, nonce = self._sandbox.limits, secrets.token_hex(8)
        if self._process is None:
            await self.start()
        assert self._writer is not None
        request = marshal.dumps((nonce, code, limits.wall_s, limits.output_chars))
        pieces: list[str] = []
        error: str | None = None
        left_out, room, ended = 0, limits.output_chars, True
        try:
            async with asyncio.timeout(limits.wall_s + GRACE_S):
                self._writer.write(len(request).to_bytes(4, "little") + request)
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
            error = f"TimeoutError: the code ran for more than {limits.wall_s:g} s and its process was killed"
        except _Nonsense:
            error = f"the process is gone: {await self.close()}"
        except (OSError, asyncio.IncompleteReadError):  # the process closed the connection
            error = f"the process is gone: {await self.close(patience_s=1.0)}"
        except BaseException:
            await self.close()
            raise
        if ended:
            await self.close()
        return Ran("".join(pieces), error, left_out, ended, perf_counter() - began)

    async def _frame(self, nonce: str, longest: int) -> tuple[str, int, int, str]:
        """Read a frame and return its kind, the number of characters left out, the number of threads, and the body."""
        try:
            given, kind, *numbers = (await self._reader.readuntil(b"\n")).decode("ascii").split()
            left_out, threads, length = (int(number) for number in numbers)
        except (ValueError, asyncio.LimitOverrunError):
            raise _Nonsense from None
        if not secrets.compare_digest(given, nonce) or min(left_out, threads, length) < 0 or length > longest:
            raise _Nonsense
        return kind, left_out, threads, (await self._reader.readexactly(length)).decode("utf-8", "replace")

    async def close(self, patience_s: float = 0.0) -> str:
        """End the process and all processes that it started, and return how it ended.

        The process first gets ``patience_s`` seconds to end by itself.
        """
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        code = 0
        if process is not None:
            if patience_s:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), patience_s)
            with contextlib.suppress(OSError):  # the process leads a process group of its own
                os.killpg(process.pid, signal.SIGKILL)
            code = await process.wait()
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        number = code - 128 if code > 128 else -code  # bubblewrap reports signal n as status 128 + n
        if number == signal.SIGXCPU:
            return "its processor time was used up"
        if number in set(signal.Signals):
            return f"it was killed by {signal.Signals(number).name}"
        return f"it ended with status {code}"
