"""What code in a sandbox must not be able to do; after each attempt this process is well and the next call works."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from gleanrl.errors import UserError
from gleanrl.sandbox import Limits, PythonSandbox, Ran

WALLS = ("namespaces", "landlock")
SOURCE = Path(__file__).parents[2] / "src"


@dataclass
class World:
    """A sandbox that lasts for several tests."""

    runner: asyncio.Runner
    sandbox: PythonSandbox

    def run(self, code: str) -> Ran:
        return self.runner.run(self.sandbox.run(code))


def skip_where_the_kernel_refuses(error: UserError) -> NoReturn:
    """Only then: a wall that does not stand, or a server that breaks, is a failure."""
    reasons = str(error).partition("(")[2].partition("). Allow")[0].split("; ")
    refusals = ("not permitted", "No space left", "not implemented", "no Landlock", "Landlock: version", "no filter")
    if not all(any(refusal in reason for refusal in refusals) for reason in reasons):
        raise error
    pytest.skip(str(error))


def opened(runner: asyncio.Runner, isolation: Any, limits: Limits) -> PythonSandbox:
    async def start() -> PythonSandbox:
        sandbox = PythonSandbox(limits, isolation=isolation)
        await sandbox.start()
        return sandbox

    try:
        return runner.run(start())
    except UserError as error:
        skip_where_the_kernel_refuses(error)


@pytest.fixture(scope="module", params=WALLS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with asyncio.Runner() as runner:
        sandbox = opened(
            runner, request.param, Limits(wall_s=1.0, cpu_s=1, memory_mb=256, disk_mb=8, output_chars=1000)
        )
        yield World(runner, sandbox)
        runner.run(sandbox.close())


@pytest.fixture(autouse=True)
def well(world: World) -> Iterator[None]:
    """Before and after each attempt: a call works, and nothing but the server is left of ours."""
    yield
    ran = world.run("6 * 7")
    assert (ran.output, ran.error) == ("42\n", None)
    server = world.sandbox._starting
    assert server is not None
    control = server.result()._process.pid
    assert not [pid for pid in descendants(control) if is_session(pid, control)]


def descendants(pid: int) -> list[int]:
    try:
        children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(deeper for child in children for deeper in descendants(child))]


def is_session(pid: int, control: int) -> bool:
    """Not the server itself, which with namespaces is the only child of the process that was started."""
    return not (descendants(control) and pid == descendants(control)[0] and len(descendants(control)) == 1) and alive(
        pid
    )


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_fork_bomb(world: World) -> None:
    ran = world.run(
        "import os\ncount = 0\nfor _ in range(1000):\n    try:\n        os.fork()\n        count += 1\n"
        "    except OSError:\n        pass\ncount"
    )
    assert ran.output == "0\n"


def test_programs_are_not_started(world: World) -> None:
    ran = world.run("import subprocess, sys\nsubprocess.run([sys.executable, '-c', '1'])")
    assert ran.error is not None
    ran = world.run("import os, sys\nos.execv(sys.executable, ['x'])")
    assert "PermissionError" in (ran.error or "")


def test_a_memory_hog(world: World) -> None:
    ran = world.run("held = []\nwhile True:\n    held.append(bytearray(10 << 20))")
    assert "MemoryError" in (ran.error or "")
    assert ran.seconds < 5


def test_memory_that_counts_for_nobody(world: World) -> None:
    ran = world.run("import os\nos.memfd_create('x')")
    assert "PermissionError" in (ran.error or "")


@pytest.mark.parametrize(
    "body", ["pass", "sum(range(1000))", "try:\n        1 / 0\n    except Exception:\n        pass"]
)
def test_an_endless_loop_is_interrupted(world: World, body: str) -> None:
    ran = world.run(f"print('begun')\nwhile True:\n    {body}")
    assert ran.output == "begun\n"
    assert "TimeoutError: the code ran for more than 1 s" in (ran.error or "")
    assert ran.seconds < 6


def test_a_loop_that_will_not_be_interrupted_is_killed(world: World) -> None:
    ran = world.run(
        "import time, signal\nprint('begun')\nsignal.setitimer(signal.ITIMER_REAL, 0)\n"
        "while True:\n    try:\n        time.sleep(1)\n    except BaseException:\n        pass"
    )
    assert ran.output == "begun\n"
    assert "was killed" in (ran.error or "")
    assert ran.ended


def test_a_limit_cannot_be_raised(world: World) -> None:
    ran = world.run(
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n"
        "try:\n    resource.setrlimit(resource.RLIMIT_CPU, (999, 999))\n"
        "except (OSError, ValueError):\n    print('kept')\n"
        "while True:\n    pass"
    )
    assert ran.output == "kept\n"
    assert ran.error is not None


def test_huge_output_is_cut_and_counted(world: World) -> None:
    ran = world.run("print('x' * 5_000_000)")
    assert ran.output == "x" * 1000
    assert ran.left_out == 4_999_001
    assert ran.text.endswith("[4999001 more characters left out]")
    endless = world.run("while True:\n    print('y' * 1000)")
    assert endless.output == "y" * 1000
    assert "TimeoutError" in (endless.error or "")
    below = world.run("import os\nfor fd in (1, 2):\n    os.write(fd, b'z' * 1000)")
    assert (below.output, below.error) == ("", None)


def test_a_flood_of_what_looks_like_answers_ends_the_call(world: World) -> None:
    ran = world.run("import os\nwhile True:\n    os.write(3, b'\\xff\\xff\\xff\\x7fo' + b'q' * 100)")
    assert ran.ended
    assert "the process is gone" in (ran.error or "")
    forged = world.run("import os, struct\nfor body in (b'[1]', b'{', b'[' * 60000):\n"
                       "    os.write(3, struct.pack('<Ic', len(body), b'd') + body)")  # fmt: skip
    assert "the process is gone" in (forged.error or "")


SECRETS = ["/etc/passwd", "/etc/shadow", "/proc/self/environ", "/proc/1/environ", "/sys", "/var"]


@pytest.mark.parametrize("path", SECRETS)
def test_files_outside_are_not_read(world: World, path: str) -> None:
    ran = world.run(f"import os\nprint(os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read())")
    assert ran.output == ""
    assert "Error" in (ran.error or "")


def test_this_programs_files_are_not_read(world: World, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("sesame")
    for path in (tmp_path / "secret", Path(__file__), SOURCE / "gleanrl" / "types.py"):
        ran = world.run(f"open({str(path)!r}).read()")
        assert "Error" in (ran.error or "")
        assert ran.output == ""
    ran = world.run("import gleanrl.types")
    assert "ModuleNotFoundError" in (ran.error or "")


def test_files_outside_are_not_written(world: World, tmp_path: Path) -> None:
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
        "import os\nos.symlink('/etc/passwd', 'link')\nopen('link').read()",
        "import os\nos.mknod('device', 0o666 | 0o020000, os.makedev(1, 1))",
    ):
        ran = world.run(code)
        assert "Error" in (ran.error or ""), code
    assert victim.read_text() == "as it was"
    assert victim.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


def test_its_own_folder_is_writable_bounded_and_gone_with_the_call(world: World) -> None:
    ran = world.run(
        "import tempfile\nopen('a', 'w').write('mine')\nwith tempfile.NamedTemporaryFile('w+') as f:\n"
        "    f.write('too')\nopen('a').read()"
    )
    assert (ran.output, ran.error) == ("'mine'\n", None)
    assert world.run("import os\nos.listdir('.')").output == "[]\n"
    ran = world.run("with open('big', 'wb') as f:\n    while True:\n        f.write(bytes(1 << 20))")
    assert "OSError" in (ran.error or "")


def test_the_parents_environment_is_unknown(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "sesame")
    ran = world.run("import os\nsorted(os.environ.items())")
    assert "sesame" not in ran.output
    assert "TMPDIR" in ran.output
    parents = [os.getpid(), os.getppid(), 1]
    for pid in parents:
        ran = world.run(f"open('/proc/{pid}/environ', 'rb').read()")
        assert "Error" in (ran.error or "")


def test_no_network_not_even_the_loopback(world: World) -> None:
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
            "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "import socket\nsocket.getaddrinfo('example.com', 80)",
        ):
            assert world.run(code).error is not None, code
        listener.join()
    assert not reached.is_set()


def test_other_processes_are_neither_killed_nor_read(world: World) -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as victim:
        for target in (victim.pid, os.getpid(), world.sandbox._starting.result()._process.pid):  # type: ignore[union-attr]
            ran = world.run(f"import os, signal\nos.kill({target}, signal.SIGKILL)")
            assert "Error" in (ran.error or "")
            trace = (
                "import ctypes\nlibrary = ctypes.CDLL(None, use_errno=True)\n"
                f"[library.ptrace(16, {target}, 0, 0), ctypes.get_errno()]"
            )
            assert world.run(trace).output == "[-1, 1]\n"
            ran = world.run(f"import resource\nresource.prlimit({target}, resource.RLIMIT_NOFILE, (3, 3))")
            assert "Error" in (ran.error or "")
        world.run("import os, signal\nos.kill(-1, signal.SIGKILL)")
        world.run("import os, signal\nos.kill(0, signal.SIGKILL)")
        world.run("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
        world.run("import os, signal\nos.killpg(0, signal.SIGKILL)")
        assert victim.poll() is None
        assert victim.stdin is not None
        victim.stdin.close()


def test_no_namespaces_mounts_or_modules(world: World) -> None:
    code = (
        "import ctypes\nlibrary = ctypes.CDLL(None, use_errno=True)\n"
        "[library.unshare(0x10000000), library.mount(b'x', b'/tmp', b'tmpfs', 0, None), library.chroot(b'/'),\n"
        " library.syscall(321, 0, 0, 0), library.syscall(425, 1, 0), library.setns(0, 0), library.prctl(1, 0, 0, 0, 0)]"
    )
    assert world.run(code).output == f"{[-1] * 7}\n"


def test_ending_by_itself_or_crashing_costs_only_the_call(world: World) -> None:
    ran = world.run("print('before')\nimport os\nos._exit(3)")
    assert ran.output == "before\n"
    assert ran.ended
    assert "status 3" in (ran.error or "")
    ran = world.run("import ctypes\nctypes.string_at(0)")
    assert ran.ended
    assert "SIG" in (ran.error or "")
    assert world.run("raise SystemExit").error is None
    assert world.run("raise SystemExit('bad')").error == "SystemExit: bad"
    deep = world.run("def f():\n    return f()\nf()")
    assert "RecursionError" in (deep.error or "")


def test_many_at_once(world: World) -> None:
    async def all_of_them() -> list[Ran]:
        return await asyncio.gather(*[world.sandbox.run(f"{n} * 2") for n in range(24)])

    assert [ran.output for ran in world.runner.run(all_of_them())] == [f"{2 * n}\n" for n in range(24)]


def test_a_cancelled_call_is_ended(world: World) -> None:
    async def cancelled() -> float:
        started = time.perf_counter()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await world.sandbox.run("while True:\n    pass")
        return time.perf_counter() - started

    assert world.runner.run(cancelled()) < 1.8
