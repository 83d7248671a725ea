"""`PythonSandbox`: isolation from files, processes and the network, limits, sessions, and running without isolation.

The tests run hostile code in real sandboxes. After each test, a fixture checks that the next call works and that no
process is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import platform
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gleanrl.environments.tools import executor
from gleanrl.environments.tools.executor import Limits, PythonSandbox, Ran
from gleanrl.utils.errors import UserError

SOURCE = Path(__file__).parents[3] / "src"
SANDBOXES = ["none"] if executor.bubblewrap_missing() else ["none", "bubblewrap"]
LIMITS = Limits(wall_s=1.0, cpu_s=1, memory_mb=256, disk_mb=8, output_chars=1000)
isolated = pytest.mark.skipif(bool(executor.bubblewrap_missing()), reason=executor.bubblewrap_missing())
KERNEL = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
# The kernel refuses root no thread, and the sandbox sets no limit under older kernels.
THREADS_LIMITED = os.geteuid() != 0 and KERNEL >= (5, 14)


@dataclass
class World:
    """A sandbox, and the event loop that it runs on, which the tests of this module share."""

    runner: asyncio.Runner
    sandbox: PythonSandbox

    def run(self, code: str) -> Ran:
        return self.runner.run(self.sandbox.run(code))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    if reason := executor.bubblewrap_missing():
        pytest.skip(reason)
    with asyncio.Runner() as runner:
        yield World(runner, PythonSandbox(LIMITS, isolation="bubblewrap"))


@pytest.fixture(autouse=True)
def sandbox_still_works(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, check that a call in the shared sandbox works and that no further process is left."""
    yield
    if "world" in request.fixturenames:
        ran = request.getfixturevalue("world").run("6 * 7")
        assert (ran.output, ran.error) == ("42\n", None)
        # One process may be left, which was started in advance for the next call.
        assert len(sandboxes()) <= 1


def sandboxes() -> list[int]:
    """Return the pids of the sandbox processes that this process has started and that are alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if executor._START.encode() in (path / "cmdline").read_bytes() and parent == os.getpid():
                found.append(int(path.name))
    return found


def using(work: Callable[[PythonSandbox], Awaitable[Any]], isolation: Any = "bubblewrap", **limits: Any) -> Any:
    async def run() -> Any:
        return await work(PythonSandbox(Limits(**{"wall_s": 1.0, **limits}), isolation=isolation))

    return asyncio.run(run())


def test_code_cannot_fork_processes(world: World) -> None:
    ran = world.run(
        "import os\ncount = 0\nfor _ in range(1000):\n    try:\n        os.fork()\n        count += 1\n"
        "    except OSError:\n        pass\ncount"
    )
    assert ran.output == "0\n"


@isolated
def test_code_that_exceeds_the_memory_limit_gets_a_memory_error() -> None:
    # The time limit is long because a busy machine needs seconds to fill this memory.
    code = "held = []\nwhile True:\n    held.append(bytearray(10 << 20))"
    ran = using(lambda sandbox: sandbox.run(code), wall_s=30.0, cpu_s=30, memory_mb=256)
    assert "MemoryError" in (ran.error or "")


SECRETS = ["/etc/passwd", "/etc/shadow", "/proc/self/environ", "/proc/1/environ", "/sys", "/var"]


@pytest.mark.parametrize(
    "code",
    [
        # kinds of memory that the limit of the address space or of the disk does not count
        "import os\nos.memfd_create('x')",
        "import mmap\n[mmap.mmap(-1, 100 << 20) for _ in range(10)]",
        "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=10)",
        "open('sparse', 'wb').truncate(1 << 40)",
        # starting programs
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', '1'])",
        # reading files outside the sandbox
        "import gleanrl.types",
        f"open({__file__!r}).read()",
        *[f"import os\nos.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read()" for path in SECRETS],
    ],
)
def test_forbidden_operations_raise_an_error_in_the_code(world: World, code: str) -> None:
    ran = world.run(code)
    assert ran.output == ""
    assert "Error" in (ran.error or "")
    assert not ran.ended


def test_the_number_of_threads_is_limited(world: World) -> None:
    ran = world.run(
        "import threading, time\nthreading.stack_size(1 << 15)\ncount, refused = 0, False\n"
        "while count > 16 or not refused:\n    try:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n        count += 1\n"
        "    except RuntimeError:\n        refused = True\n        time.sleep(0.01)\ncount"
    )
    assert ran.ended
    assert ran.seconds < 5
    if THREADS_LIMITED:
        assert ran.error is None
        assert 0 < int(ran.output) <= LIMITS.threads


@pytest.mark.parametrize(
    "body", ["pass", "sum(range(1000))", "try:\n        1 / 0\n    except Exception:\n        pass"]
)
def test_an_endless_loop_is_interrupted_at_the_time_limit(world: World, body: str) -> None:
    ran = world.run(f"print('begun')\nwhile True:\n    {body}")
    assert ran.output == "begun\n"
    assert "TimeoutError: the code ran for more than 1 s" in (ran.error or "")
    assert ran.seconds < 6


def test_a_loop_that_catches_the_interrupt_is_killed(world: World) -> None:
    ran = world.run(
        "import time, signal\nprint('begun')\nsignal.setitimer(signal.ITIMER_REAL, 0)\n"
        "while True:\n    try:\n        time.sleep(1)\n    except BaseException:\n        pass"
    )
    assert ran.output == "begun\n"
    assert "was killed" in (ran.error or "")
    assert ran.ended


@pytest.mark.parametrize(
    "code",
    [
        "sum(iter(int, 1))",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\nwhile True:\n    pass",
        "import gc\ngc.callbacks.append(lambda *_: sum(iter(int, 1)))\ngc.collect()",
        "class Evil:\n    def __del__(self):\n        sum(iter(int, 1))\nEvil()\n1",
        "import os, signal, sys\nos.kill(os.getpid(), signal.SIGSTOP)\nsum(iter(int, 1))",
    ],
)
def test_code_that_never_runs_the_interrupt_handler_is_killed(world: World, code: str) -> None:
    ran = world.run(code)
    assert "was killed" in (ran.error or "")
    assert ran.seconds < 5


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError('x' * 10**8)",
        "raise SystemExit('x' * 10**8)",
        "raise type('x' * 10**8, (Exception,), {})",
        "error = ValueError()\nerror.__notes__ = ['x' * 1000] * 10**4\nraise error",
        "class Bad:\n    def __str__(self):\n        raise RuntimeError\nraise SystemExit(Bad())",
        "class Bad(Exception):\n    def __str__(self):\n        while True:\n            pass\nraise Bad",
        "deep = []\nfor _ in range(100_000):\n    deep = [deep]\ndeep",
        "eval('(' * 100_000)",
    ],
)
@isolated
def test_the_report_of_an_error_has_a_bounded_length(code: str) -> None:
    # The time limit leaves a busy machine time to build the large errors; one of the codes never ends.
    wall_s = 1.0 if "while True" in code else 5.0
    ran = using(lambda sandbox: sandbox.run(code), wall_s=wall_s, cpu_s=5, memory_mb=256)
    assert 0 < len(ran.error or "") <= 4010
    assert not ran.ended, ran.error


def test_code_cannot_raise_its_cpu_limit(world: World) -> None:
    ran = world.run(
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n"
        "try:\n    resource.setrlimit(resource.RLIMIT_CPU, (999, 999))\n"
        "except (OSError, ValueError):\n    print('kept')\n"
        "while True:\n    pass"
    )
    assert ran.output == "kept\n"
    assert ran.error is not None


def test_output_over_the_limit_is_cut_and_its_length_reported(world: World) -> None:
    ran = world.run("print('x' * 5_000_000)")
    assert ran.output == "x" * 1000
    assert ran.left_out == 4_999_001
    assert ran.text.endswith("[4999001 more characters left out]")
    endless = world.run("while True:\n    print('y' * 1000)")
    assert endless.output == "y" * 1000
    assert "TimeoutError" in (endless.error or "")
    below = world.run("import os\nfor fd in (1, 2):\n    os.write(fd, b'z' * 1000)")
    assert (below.output, below.error) == ("", None)


def test_code_that_floods_the_result_pipe_is_ended(world: World) -> None:
    ran = world.run("import os\nwhile True:\n    os.write(3, b'\\xff\\xff\\xff\\x7fo' + b'q' * 100)")
    assert ran.ended
    assert "the process is gone" in (ran.error or "")


@pytest.mark.parametrize("frame", ["start d 0 0 4\nfine", "0123456789abcdef d 0 0 4\nfine", "x", "a b c d e\n", "\n"])
def test_a_forged_result_ends_the_session(world: World, frame: str) -> None:
    async def forged() -> tuple[Ran, Ran, Ran]:
        session = world.sandbox.session()
        try:
            # A thread writes the forged result between the calls, when it cannot know the nonce of the next request.
            write = f"threading.Timer(0.2, os.write, (3, {frame.encode()!r})).start()"
            first = await session.run(f"import os, threading\n{write}\nos.write(3, {frame.encode()!r})\n1")
            second = await session.run("2")
            return first, second, await session.run("3")
        finally:
            await session.close()

    first, second, third = world.runner.run(forged())
    assert first.ended
    assert first.output == ""
    assert (second.output, third.output) == ("2\n", "3\n")


def test_code_cannot_change_files_outside_its_folder(world: World, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    victim.chmod(0o644)
    library = os.__file__
    for code in (
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"open({str(victim)!r}, 'a').write('more')",
        f"import os\nos.truncate({str(victim)!r}, 0)",
        f"import os\nos.remove({str(victim)!r})",
        f"import os\nos.chmod({str(victim)!r}, 0o777)",
        f"import os\nos.utime({str(victim)!r}, (0, 0))",
        f"open({library!r}, 'a')",
        f"import os\nos.chmod({library!r}, 0o600)",
        "open('/new', 'w')",
        "import os\nos.mkdir('/usr/lib/new')",
        f"import os\nos.link({str(victim)!r}, 'link')",
        f"import os\nos.rename({str(victim)!r}, 'moved')",
        "import os\nos.symlink('/etc/passwd', 'link')\nopen('link').read()",
        "import os\nos.mknod('device', 0o666 | 0o020000, os.makedev(1, 1))",
    ):
        ran = world.run(code)
        assert "Error" in (ran.error or ""), code
    assert victim.read_text() == "as it was"
    assert victim.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


def test_the_folder_of_a_call_is_writable_limited_and_removed_after_the_call(world: World) -> None:
    ran = world.run(
        "import tempfile\nopen('a', 'w').write('mine')\nwith tempfile.NamedTemporaryFile('w+') as f:\n"
        "    f.write('too')\nopen('a').read()"
    )
    assert (ran.output, ran.error) == ("'mine'\n", None)
    # The folder is not compared with an empty list, because an installation below /tmp has its mount point in it.
    assert world.run("import os\n'a' in os.listdir('.')").output == "False\n"
    ran = world.run("with open('big', 'wb') as f:\n    while True:\n        f.write(bytes(1 << 20))")
    assert "OSError" in (ran.error or "")


@pytest.mark.parametrize(
    "code",
    [
        "number = 0\nwhile True:\n    open(f'{number}', 'w').close()\n    number += 1",
        "number, data = 0, bytes(7 << 20)\nwhile True:\n    open(f'{number}', 'wb').write(data)\n    number += 1",
        "import os\nheld, data = [], bytes(7 << 20)\nwhile True:\n    held.append(open('f', 'wb', buffering=0))\n"
        "    os.unlink('f')\n    held[-1].write(data)",
        "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
    ],
    ids=["many", "large", "nameless", "deep"],
)
def test_code_cannot_exceed_the_disk_limit(world: World, code: str) -> None:
    ran = world.run(code)
    assert ran.error is not None
    assert ran.seconds < 5


def test_file_descriptors_are_not_inherited(world: World) -> None:
    assert world.run("with open('/dev/null', 'w') as nowhere:\n    print('lost', file=nowhere)").error is None
    ran = world.run(
        "import os\nfound = []\nfor number in range(5000):\n    try:\n        os.fstat(number)\n"
        "        found.append(number)\n    except OSError:\n        pass\nfound"
    )
    assert ran.output == "[0, 1, 2, 3]\n"


def test_environment_variables_of_other_processes_cannot_be_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "sesame")
    ran = world.run("import os\nsorted(os.environ.items())")
    assert "sesame" not in ran.output
    assert "TMPDIR" in ran.output
    parents = [os.getpid(), os.getppid(), 1]
    for pid in parents:
        ran = world.run(f"open('/proc/{pid}/environ', 'rb').read()")
        assert "Error" in (ran.error or "")


def test_code_has_no_network_not_even_loopback(world: World) -> None:
    reached = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]

        def accept() -> None:
            with contextlib.suppress(TimeoutError):
                server.accept()
                reached.set()

        listener = threading.Thread(target=accept)
        listener.start()
        for code in (
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}))",
            f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}')",
            "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0abstract')",
            "import socket\nsocket.getaddrinfo('example.com', 80)",
        ):
            assert world.run(code).error is not None, code
        listener.join()
    assert not reached.is_set()


def test_code_cannot_kill_trace_or_limit_other_processes(world: World) -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as victim:
        for target in (victim.pid, os.getpid()):
            ran = world.run(f"import os, signal\nos.kill({target}, signal.SIGKILL)")
            assert "Error" in (ran.error or "")
            trace = (
                "import ctypes\nlibrary = ctypes.CDLL(None, use_errno=True)\n"
                f"[library.ptrace(16, {target}, 0, 0), ctypes.get_errno()]"
            )
            assert world.run(trace).output == "[-1, 1]\n"
            ran = world.run(f"import resource\nresource.prlimit({target}, resource.RLIMIT_NOFILE, (3, 3))")
            assert "Error" in (ran.error or "")
        world.run("import os, signal\nos.kill(0, signal.SIGKILL)")
        world.run("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
        world.run("import os, signal\nos.killpg(0, signal.SIGKILL)")
        assert victim.poll() is None
        assert victim.stdin is not None
        victim.stdin.close()


def test_code_cannot_change_flags_of_files_outside(world: World) -> None:
    ran = world.run(
        "import fcntl, os\nwith open(os.__file__) as library:\n    for request in (0x40086602, 0x401C5820):\n"
        "        try:\n            fcntl.ioctl(library, request, bytes(64))\n            print('changed')\n"
        "        except OSError as error:\n            print(error.errno)"
    )
    assert ran.error is None
    assert len(ran.output.split()) == 2  # both requests were made
    assert "changed" not in ran.output


def test_namespace_mount_bpf_and_io_uring_system_calls_fail(world: World) -> None:
    code = (
        "import ctypes\nlibrary = ctypes.CDLL(None, use_errno=True)\n"
        "[library.unshare(0x10000000), library.mount(b'x', b'/tmp', b'tmpfs', 0, None), library.chroot(b'/'),\n"
        " library.syscall(321, 0, 0, 0), library.syscall(425, 1, 0), library.setns(0, 0)]"
    )
    assert world.run(code).output == f"{[-1] * 6}\n"


def test_code_that_exits_or_crashes_ends_only_its_own_call(world: World) -> None:
    ran = world.run("print('before')\nimport os\nos._exit(3)")
    assert ran.output == "before\n"
    assert ran.ended
    assert "status 3" in (ran.error or "")
    ran = world.run("import ctypes\nctypes.string_at(0)")
    assert ran.ended
    assert "SIG" in (ran.error or "")
    assert world.run("raise SystemExit").error is None
    assert world.run("import atexit\natexit.register(lambda: sum(iter(int, 1)))\n1").text == "1\n"
    assert world.run("import os, sys\nos.execv(sys.executable, ['x'])").error is not None
    assert world.run("raise SystemExit('bad')").error == "SystemExit: bad"
    deep = world.run("def f():\n    return f()\nf()")
    assert "RecursionError" in (deep.error or "")


def test_concurrent_calls_return_their_own_results(world: World) -> None:
    async def all_of_them() -> list[Ran]:
        return await asyncio.gather(*[world.sandbox.run(f"{n} * 2") for n in range(24)])

    assert [ran.output for ran in world.runner.run(all_of_them())] == [f"{2 * n}\n" for n in range(24)]


def test_cancelling_a_call_ends_it_promptly(world: World) -> None:
    async def cancelled() -> float:
        started = time.perf_counter()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await world.sandbox.run("while True:\n    pass")
        return time.perf_counter() - started

    assert world.runner.run(cancelled()) < 1.8


def test_a_session_keeps_variables_and_files_until_it_ends() -> None:
    async def work(sandbox: PythonSandbox) -> None:
        before = sandboxes()
        session, other = sandbox.session(), sandbox.session()
        assert (await session.run("import math\nx = 3\nopen('f', 'w').write('kept')")).output == "4\n"
        assert (await other.run("x")).error is not None
        assert (await session.run("x + math.floor(1.5), open('f').read()")).output == "(4, 'kept')\n"
        assert "ZeroDivisionError" in ((await session.run("x = 5\n1 / 0")).error or "")
        interrupted = await session.run("x = 6\nwhile True:\n    pass")
        assert "TimeoutError" in (interrupted.error or "")
        assert not interrupted.ended
        assert (await session.run("x")).output == "6\n"
        assert (await session.run("import os\nos._exit(0)")).ended
        assert "NameError" in ((await session.run("x")).error or "")
        await session.close()
        await other.close()
        assert sandboxes() == before

    for isolation in SANDBOXES:
        using(work, isolation)


def test_threads_that_still_run_after_a_call_end_the_session() -> None:
    async def work(sandbox: PythonSandbox) -> None:
        session = sandbox.session()
        ran = await session.run("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n'on'")
        assert ran.output == "'on'\n"
        assert ran.ended
        await session.close()

    for isolation in SANDBOXES:
        using(work, isolation)


def test_random_numbers_set_order_and_hashes_are_the_same_in_every_call() -> None:
    async def work(sandbox: PythonSandbox) -> list[str]:
        code = "import random\n(random.random(), list({'a', 'b', 'c'}), hash('text'))"
        return [(await sandbox.run(code)).output for _ in range(2)]

    first, second = using(work, "auto")
    assert first == second
    assert using(work, "auto") == [first, first]


def test_without_isolation_time_and_memory_limits_apply_and_nothing_is_left() -> None:
    async def work(sandbox: PythonSandbox) -> None:
        assert sandbox.isolation == "none"
        assert "TimeoutError" in ((await sandbox.run("while True:\n    pass")).error or "")
        assert "MemoryError" in ((await sandbox.run("bytearray(10**10)")).error or "")
        ran = await sandbox.run("import os, time\nif not (child := os.fork()):\n    time.sleep(60)\nchild, os.getcwd()")
        left.extend(eval(ran.output))

    left: list[Any] = []
    using(work, "none")
    child, folder = left
    deadline = time.monotonic() + 10
    while command(Path(f"/proc/{child}")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not Path(folder).exists()


def test_without_bubblewrap_auto_warns_once_and_isolation_bubblewrap_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    executor.bubblewrap_missing.cache_clear()
    executor.warn_unisolated.cache_clear()
    try:
        for _ in range(2):
            assert PythonSandbox(isolation="auto").isolation == "none"
        with pytest.raises(UserError, match="bubblewrap"):
            PythonSandbox(isolation="bubblewrap")
    finally:
        executor.bubblewrap_missing.cache_clear()
    assert caplog.text.count("WITHOUT isolation") == 1


@isolated
def test_bubblewrap_missing_detects_a_bubblewrap_that_does_not_isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    executor.bubblewrap_missing.cache_clear()
    monkeypatch.setattr(executor, "_bubblewrap", lambda disk_mb: ("bwrap", "--dev-bind", "/", "/"))
    try:
        assert "files" in executor.bubblewrap_missing()
    finally:
        executor.bubblewrap_missing.cache_clear()


def test_a_sandbox_process_that_cannot_start_raises_an_os_error() -> None:
    """It must not be returned as a result, because a reward would take it for an error of the model's program."""

    async def work(sandbox: PythonSandbox) -> None:
        with pytest.raises(OSError, match="OverflowError"):
            await sandbox.run("1")

    for isolation in SANDBOXES:
        # The limit in bytes is larger than the kernel can represent, so that setting it fails.
        using(work, isolation, memory_mb=1 << 50)


def test_the_sandbox_process_ends_when_its_parent_is_killed() -> None:
    code = (
        "import asyncio, os\nfrom gleanrl.environments.tools.executor import Limits, PythonSandbox\n"
        "async def main():\n    sandbox = PythonSandbox(Limits(wall_s=60, cpu_s=4321))\n    await sandbox.run('1')\n"
        "    asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), 9)\n"
        "    await sandbox.run('while True: pass')\nasyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCE)}) as program:
        assert program.wait(60) == -9
    deadline = time.monotonic() + 10
    while any(b",CPU=4322," in command(path) for path in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def command(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return (path / "cmdline").read_bytes()
    return b""


@pytest.mark.parametrize("limits", [{"wall_s": 0}, {"memory_mb": 1}, {"processes": -1}])
def test_limits_out_of_range_raise(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        Limits(**limits)


def test_a_garbage_collected_sandbox_ends_its_prestarted_process() -> None:
    async def main() -> None:
        before = set(sandboxes())
        for _ in range(3):
            await PythonSandbox(LIMITS, isolation="none").run("1")
        for _ in range(100):
            if set(sandboxes()) <= before:
                return
            await asyncio.sleep(0.1)
        raise AssertionError("processes are left")

    asyncio.run(main())


def test_a_sandbox_whose_calls_had_to_wait_can_be_used_in_another_event_loop() -> None:
    sandbox = PythonSandbox(LIMITS, isolation="none", concurrency=1)

    async def main() -> list[str]:
        return [ran.output for ran in await asyncio.gather(*(sandbox.run(str(number)) for number in range(3)))]

    for _ in range(2):
        assert asyncio.run(main()) == ["0\n", "1\n", "2\n"]


def test_a_sandbox_does_not_keep_a_reference_to_a_closed_event_loop() -> None:
    sandbox = PythonSandbox(LIMITS, isolation="none")

    async def main() -> Any:
        await sandbox.run("1")
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None
