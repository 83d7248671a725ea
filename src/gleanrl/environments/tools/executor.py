"""Runs a model's Python code in a restricted process.

With the program bubblewrap, the process is isolated from the machine: Linux namespaces give it its own file system,
users, processes and network. Without bubblewrap, the process only has resource limits. `PythonTool` uses
`PythonSandbox`, and so can a reward that tests programs:

    sandbox = PythonSandbox(Limits(wall_s=2.0))
    ran = await sandbox.run("print(6 * 7)")
    print(ran.output, ran.error)

The code's process itself reports ``output`` and ``error``, so the code can fake them. A reward must not trust them.
Code cannot fake the result of another call. ``ended`` and ``seconds`` are measured outside the process.
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
# The process interrupts the code at the end of its wall time. If the code does not stop within this many seconds, the
# process is killed.
GRACE_S = 0.5
_START_S = 30.0
_MB = 1 << 20
_CALLS = 100  # the processor time of a session is limited to that of this many calls
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the resources that code may use. Raises ValueError for numbers out of range."""

    wall_s: float = 10.0
    """Wall-clock seconds of one call."""
    cpu_s: int = 10
    """Processor seconds of one call; all calls of a session together may use a hundred times as many."""
    memory_mb: int = 512
    """Address space of one process."""
    disk_mb: int = 64
    """With bubblewrap, size of the working folder, a tmpfs in memory; without it, size of each file."""
    processes: int = 1
    """1 = the code cannot fork, so that memory_mb limits all of its memory; unlimited without bubblewrap."""
    threads: int = 16
    """Number of threads that the code may start; unlimited without bubblewrap."""
    output_chars: int = 10_000
    """Characters that a call may print; further characters are dropped and counted."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)!r}: more than 0")
        if self.memory_mb < 64:
            raise ValueError(f"memory_mb = {self.memory_mb}: Python itself needs 64")


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a call."""

    output: str  # what the code printed and, if its last statement is an expression, the value of that
    error: str | None = None  # a traceback, or why the process ended; None if the code succeeded
    left_out: int = 0  # number of characters of output that were dropped
    ended: bool = False  # whether the process has ended; the next call of a session then finds no variables
    seconds: float = 0.0  # wall-clock time of the call

    @property
    def text(self) -> str:
        """Output and error as one text, which the model gets as the result of the tool."""
        dropped = f"\n[{self.left_out} more characters left out]" if self.left_out else ""
        said = self.output + dropped
        if self.error is None:
            return said if said.strip() else "(no output)"
        return f"{said.rstrip()}\n{self.error}" if said.strip() else self.error


# --- the process that code runs in ------------------------------------------------------------------
# Environment variables of the process. They make its results repeatable and its memory predictable. It inherits no
# variables, because those of this program may contain keys.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "MALLOC_ARENA_MAX": "1"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
_PYTHON = os.path.realpath(sys.executable)
# The first code that a new Python process runs: it reads `_program` from the socket and executes it.
_START = "import marshal, posix, sys; exec(marshal.loads(posix.read(int(sys.argv[1]), 1 << 20)))"


@cache
def _program() -> bytes:
    """Return the compiled `interpreter.py`. A new process reads it from its socket and executes it (`_START`)."""
    source = Path(__file__).with_name("interpreter.py").read_text(encoding="utf-8")
    return marshal.dumps(compile(source, "interpreter", "exec", dont_inherit=True))


@cache
def _packages() -> tuple[str, ...]:
    return tuple(sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))


@cache
def _bubblewrap(disk_mb: int) -> tuple[str, ...]:
    """Return the arguments of a bubblewrap command. The caller appends the seccomp filter and the command to run."""
    command = [shutil.which("bwrap") or "bwrap", "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
    command += ["--unshare-uts", "--die-with-parent", "--cap-drop", "ALL"]
    for name, value in {**_ENVIRONMENT, "HOME": "/tmp", "TMPDIR": "/tmp"}.items():
        command += ["--setenv", name, value]
    if "--size" in subprocess.run(["bwrap", "--help"], capture_output=True, text=True, timeout=10, check=False).stdout:
        command += ["--size", str(disk_mb * _MB)]
    # Mount /tmp before the folders below. Mounted after them, it would hide a Python installation that is below /tmp.
    command += ["--tmpfs", "/tmp"]
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
    shown: list[str] = []
    for path in sorted({*system, sys.base_prefix, _PYTHON, *_packages()}, key=len):
        if not os.path.exists(path) or any(path.startswith(outer + "/") for outer in shown):
            continue
        shown.append(path)
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    return (*command, "--dev", "/dev", "--chdir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/")


# The numbers that a seccomp filter needs, by architecture: the architecture's own number, the system calls that are
# always refused, fork and vfork, and clone. The refused calls are, in this order, those whose memory no limit covers
# (memfd_create memfd_secret shmget msgget) and those with which code could attack the kernel (unshare setns mount bpf
# userfaultfd io_uring_setup add_key keyctl ptrace).
_ARCHITECTURES = {
    "x86_64": (0xC000003E, (319, 447, 29, 68, 272, 308, 165, 321, 323, 425, 248, 250, 101), (57, 58), 56),
    "aarch64": (0xC00000B7, (279, 447, 194, 186, 97, 268, 40, 280, 282, 425, 217, 219, 117), (), 220),
}
_CLONE3, _CLONE_THREAD, _CLONE_NAMESPACES = 435, 0x00010000, 0x7E020000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _EAGAIN, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x0005000B, 0x00050026


def seccomp_filter(*, forks: bool) -> bytes:
    """Return a seccomp filter, which refuses dangerous system calls, as a classic BPF program.

    If ``forks`` is False, the filter also refuses to start processes. The limit on processes (RLIMIT_NPROC) is not
    enough for this, because the kernel does not apply it to root. Raises OSError if the numbers of the system calls are
    not known for this machine's architecture.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(f"no filter of system calls for {platform.machine()}")
    architecture, refused, fork_calls, clone = _ARCHITECTURES[platform.machine()]
    code = [(_LOAD, 4, 0, 0), (_EQUAL, architecture, 1, 0), (_RETURN, _KILL, 0, 0), (_LOAD, 0, 0, 0)]
    code += [(_AT_LEAST, 0x40000000, 0, 1), (_RETURN, _ENOSYS, 0, 0)]  # refuse system calls of the x32 ABI
    for number in refused:
        code += [(_EQUAL, number, 0, 1), (_RETURN, _EPERM, 0, 0)]
    # The filter cannot see the flags of clone3, which are in memory. If clone3 is missing, the C library uses clone.
    code += [(_EQUAL, _CLONE3, 0, 1), (_RETURN, _ENOSYS, 0, 0)]
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
    """Return the reason why code cannot be isolated on this machine; an empty text if it can be isolated.

    The first call runs code that tries to leave a sandbox. Later calls return the same result without a test.
    """
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not installed; apt-get install bubblewrap"
    sandbox = PythonSandbox(isolation="bubblewrap", _checked=True)
    try:
        # `asyncio.run` needs a thread without a running event loop, and the caller's thread may have one.
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
    """Log a warning that code runs without isolation, with the reason. The same reason is logged only once."""
    _log.warning("the Python tool runs code WITHOUT isolation, with limits only: %s", reason)


# --- running code -----------------------------------------------------------------------------------
# The semaphores of sandboxes in use, by event loop and id of the sandbox. They are no attribute of the sandbox, because
# it is pickled for worker processes, and a semaphore that is in use cannot be.
_turns: weakref.WeakValueDictionary[tuple[asyncio.AbstractEventLoop, int], asyncio.Semaphore]
_turns = weakref.WeakValueDictionary()


class PythonSandbox:
    """Runs Python code, each call in a new process. A `session` keeps one process for several calls.

    To save time, the process for the next call is started in advance and waits for its code, for example while the
    model samples. It ends when the sandbox is deleted or the event loop is shut down.

    Args:
        isolation: "bubblewrap", or "none" for a process that only has limits, which is for code that you trust. "auto"
            is "bubblewrap" if that works on this machine, otherwise "none", with a warning in the log.
        packages: whether code may import the installed packages, and not only Python's standard library.
        concurrency: maximum number of calls that run at the same time in one event loop; further calls wait. None =
            the number of processors.

    Raises:
        UserError: the requested isolation is not available on this machine.
    """

    # The next call, whose process has been started, and the future through which it will get its code.
    _next: tuple[asyncio.Task[Ran], asyncio.Future[str]] | None = None

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
        self._concurrency = concurrency or os.cpu_count() or 1

    @property
    def turns(self) -> asyncio.Semaphore:
        """The semaphore that limits the calls of the running event loop. It exists only while a call uses it."""
        key = (asyncio.get_running_loop(), id(self))
        return _turns.setdefault(key, asyncio.Semaphore(self._concurrency))

    async def run(self, code: str) -> Ran:
        """Run code in a separate process. Errors of the code are in the result and are not raised.

        Raises:
            OSError: no process could be started, so the code was not run.
        """
        async with self.turns:
            if self._next is None or self._next[0].get_loop() is not asyncio.get_running_loop():
                self._next = self._prepare_call()
            call, given = self._next
            self._next = self._prepare_call()
            given.set_result(code)
            return await call

    def _prepare_call(self) -> tuple[asyncio.Task[Ran], asyncio.Future[str]]:
        loop = asyncio.get_running_loop()
        given: asyncio.Future[str] = loop.create_future()
        same = copy.copy(self)  # a task that refers to the sandbox itself would prevent its deletion
        same._next = None
        call = loop.create_task(same._call(given))
        owner = weakref.ref(self)

        # When the loop is shut down, it cancels the task. The sandbox then drops its reference to the task, because the
        # task would keep the loop in memory.
        def forget(_: asyncio.Task[Ran]) -> None:
            sandbox = owner()
            if sandbox is not None and sandbox._next is not None and sandbox._next[0] is call:
                sandbox._next = None

        call.add_done_callback(forget)
        return call, given

    def __del__(self) -> None:
        if self._next is not None:  # cancel the call that waits for its code, which ends its process
            call, _ = self._next
            # A closed loop raises RuntimeError. Its shutdown has then already cancelled the call.
            with contextlib.suppress(RuntimeError):
                call.get_loop().call_soon_threadsafe(call.cancel)

    async def _call(self, given: asyncio.Future[str]) -> Ran:
        """Start a process, wait until ``given`` has the code, and run the code. A cancelled call kills its process."""
        session = Session(self, calls=1)
        try:
            # If the process cannot be started now, `Session.call` below tries again and raises the error.
            with contextlib.suppress(OSError):
                await session.start()
            code = await given
            # While the process waited for code, the system may have killed it to free memory. `Session.call` then
            # starts another one.
            if session.ended:
                await session.close()
            return await session.call(code)
        finally:
            await session.close()

    def session(self) -> Session:
        """Return a session, whose calls share one process and its variables. The caller must close it."""
        return Session(self, calls=_CALLS)


class _Nonsense(Exception):
    """Raised if the process sends something that `interpreter.py` never sends."""


class Session:
    """Runs calls in one process, so that they share variables. If the process ends, the next call starts another one.

    The code can make its process send anything. So all that is received from the process is checked, and a process that
    sends invalid data is killed.
    """

    def __init__(self, sandbox: PythonSandbox, *, calls: int) -> None:
        self._sandbox = sandbox
        self._calls = calls
        self._process: asyncio.subprocess.Process | None = None
        self._folder: str | None = None  # temporary working folder; None with bubblewrap
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    @property
    def ended(self) -> bool:
        """Whether the process has ended although `close` was not called."""
        return self._process is not None and self._process.returncode is not None

    async def run(self, code: str) -> Ran:
        """Run code in the session's process. Returns and raises the same as `PythonSandbox.run`."""
        async with self._sandbox.turns:
            return await self.call(code)

    async def start(self) -> None:
        """Start the process, and wait until it can run code.

        Raises:
            OSError: the process cannot be started, or its limits cannot be set.
        """
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
        # Kernels before 5.14 also count the user's processes outside the sandbox, so that even the first thread of the
        # code could exceed the limit.
        if isolated and kernel >= (5, 14):
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
        """Run code as `run` does. The caller must have acquired the sandbox's semaphore, which limits concurrency."""
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
        """Read a frame, whose format is described in `interpreter.py`, and return it without its nonce and length.

        Returns the kind, the number of characters of output that were dropped, the number of threads, and the body.
        Raises `_Nonsense` if the frame is invalid, has another nonce, or its body has more than ``longest`` bytes.
        """
        try:
            given, kind, *numbers = (await self._reader.readuntil(b"\n")).decode("ascii").split()
            left_out, threads, length = (int(number) for number in numbers)
        except (ValueError, asyncio.LimitOverrunError):
            raise _Nonsense from None
        if not secrets.compare_digest(given, nonce) or min(left_out, threads, length) < 0 or length > longest:
            raise _Nonsense
        return kind, left_out, threads, (await self._reader.readexactly(length)).decode("utf-8", "replace")

    async def close(self, patience_s: float = 0.0) -> str:
        """Kill the process and all processes that it started. Returns a text that says how the process ended.

        It first waits up to ``patience_s`` seconds for the process to end by itself, so that the text tells its reason.
        """
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        code = 0
        try:
            if process is not None:
                try:
                    if patience_s:
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(process.wait(), patience_s)
                finally:  # also if the caller is cancelled
                    with contextlib.suppress(OSError):  # kill the process group, which the process leads
                        os.killpg(process.pid, signal.SIGKILL)
                code = await process.wait()
        finally:
            if folder is not None:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        number = code - 128 if code > 128 else -code  # bubblewrap reports signal n as status 128 + n
        if number == signal.SIGXCPU:
            return "its processor time was used up"
        if number in set(signal.Signals):
            return f"it was killed by {signal.Signals(number).name}"
        return f"it ended with status {code}"
