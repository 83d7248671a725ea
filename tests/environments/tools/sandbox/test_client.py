"""Sessions, limits on processes, what is said where there is no isolation, and ends of all kinds."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gleanrl.environments.tools.sandbox import Limits, PythonSandbox
from gleanrl.environments.tools.sandbox import client as client_module
from gleanrl.utils.errors import UserError
from tests.environments.tools.sandbox.worlds import alive, descendants, opened, skip_where_the_kernel_refuses

SOURCE = Path(__file__).parents[4] / "src"


def using(work: Callable[[PythonSandbox], Awaitable[Any]], isolation: str = "auto", **limits: Any) -> Any:
    with asyncio.Runner() as runner:
        sandbox = opened(runner, isolation, Limits(**{"wall_s": 1.0, **limits}))

        async def episode() -> Any:
            try:
                return await work(sandbox)
            finally:
                await sandbox.close()

        return runner.run(episode())


def has_ended(pid: int, descriptor: int | None = None) -> bool:
    """Waits for it, for ten seconds."""
    try:
        descriptor = os.pidfd_open(pid) if descriptor is None else descriptor
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        return bool(poll.poll(10_000))
    finally:
        os.close(descriptor)


def server_of(sandbox: PythonSandbox) -> Any:
    assert sandbox._starting is not None
    return sandbox._starting.result()


def test_a_session_keeps_its_variables_and_its_files_until_it_ends() -> None:
    async def work(sandbox: PythonSandbox) -> None:
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
        assert not [p for p in descendants(server_of(sandbox)._process.pid)[1:] if alive(p)]

    using(work)


def test_threads_that_go_on_end_the_session() -> None:
    async def work(sandbox: PythonSandbox) -> None:
        session = sandbox.session()
        ran = await session.run("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n'on'")
        assert ran.output == "'on'\n"
        assert ran.ended
        await session.close()

    using(work)


def test_code_repeats_itself() -> None:
    async def work(sandbox: PythonSandbox) -> list[str]:
        code = "import random\n(random.random(), list({'a', 'b', 'c'}), hash('text'))"
        return [(await sandbox.run(code)).output for _ in range(2)]

    first, second = using(work)
    assert first == second
    assert using(work) == [first, first]


def test_processes_where_they_are_allowed_are_counted_and_end_with_the_call() -> None:
    bomb = (
        "import os, time\ncount = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            time.sleep(60)\n"
        "            os._exit(0)\n        count += 1\nexcept OSError:\n    pass\ncount"
    )

    async def work(sandbox: PythonSandbox) -> None:
        if sandbox.active != "namespaces":
            pytest.skip("processes are allowed in namespaces only")
        assert 1 <= int((await sandbox.run(bomb)).output) <= 8
        session = sandbox.session()
        assert 1 <= int((await session.run(bomb)).output) <= 8
        assert 1 <= int((await session.run(bomb)).output) <= 8  # those of the first call are gone
        left = [p for p in descendants(server_of(sandbox)._process.pid) if alive(p)]
        assert len(left) <= 2  # the server, and the session
        await session.close()
        endless = await sandbox.run(
            "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
        )
        assert "TimeoutError" in (endless.error or "")
        assert (await sandbox.run("1")).output == "1\n"

    with asyncio.Runner() as runner:
        sandbox = PythonSandbox(Limits(wall_s=1.0, processes=6, threads=2))
        try:
            runner.run(sandbox.start())
        except UserError as error:
            skip_where_the_kernel_refuses(error)

        async def all_of_it() -> None:
            try:
                await work(sandbox)
            finally:
                await sandbox.close()

        runner.run(all_of_it())


def test_a_server_that_is_killed_costs_the_calls_that_it_had() -> None:
    async def work(sandbox: PythonSandbox) -> None:
        before = server_of(sandbox)
        running = asyncio.create_task(sandbox.run("while True:\n    pass"))
        await sandbox.run("1")
        os.kill(before._process.pid, signal.SIGKILL)
        ran = await running
        assert ran.ended
        assert (await sandbox.run("2")).output == "2\n"
        assert server_of(sandbox) is not before

    using(work, wall_s=20.0)


def test_nothing_is_left_when_the_program_is_killed() -> None:
    code = (
        "import asyncio, sys\nfrom gleanrl.environments.tools.sandbox import Limits, PythonSandbox\n"
        "async def main():\n    sandbox = PythonSandbox(Limits(wall_s=60, cpu_s=60))\n    await sandbox.start()\n"
        "    print(sandbox._starting.result()._process.pid, flush=True)\n"
        "    await sandbox.run('while True: pass')\nasyncio.run(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(SOURCE)}
    ) as program:
        assert program.stdout is not None
        line = program.stdout.readline()
        if not line:
            pytest.skip("no isolation on this machine")
        server = int(line)
        ended = os.pidfd_open(server)
        program.kill()
    assert has_ended(server, ended), "the server outlived its program"


def test_without_isolation_there_are_still_limits_but_only_if_asked_for() -> None:
    async def work(sandbox: PythonSandbox) -> None:
        assert sandbox.active == "none"
        assert "TimeoutError" in ((await sandbox.run("while True:\n    pass")).error or "")
        assert "MemoryError" in ((await sandbox.run("bytearray(10**10)")).error or "")
        ran = await sandbox.run("import os, time\nif not (child := os.fork()):\n    time.sleep(60)\nchild")
        assert has_ended(int(ran.output))

    using(work, isolation="none")


def test_a_machine_without_isolation_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(client_module.Server):
        async def started(self) -> None:
            raise OSError(1, "unshare: Operation not permitted")

    monkeypatch.setattr(client_module, "Server", Refusing)
    with pytest.raises(UserError, match=r"namespaces: .*unshare.*landlock: .*") as told:
        asyncio.run(PythonSandbox().run("1"))
    assert "\n" not in str(told.value)
    assert "user.max_user_namespaces" in str(told.value)


def test_a_wall_that_does_not_stand_is_found_before_any_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_CHECK", client_module._CHECK.replace("/etc/passwd", "/dev/null"))
    for isolation in ("namespaces", "landlock"):
        with pytest.raises(UserError, match=r"code reaches \['files'\]|no .* on this machine"):
            asyncio.run(PythonSandbox(isolation=isolation).run("1"))  # type: ignore[arg-type]


def test_a_session_that_cannot_be_had_is_no_result() -> None:
    """Of no program: a reward must not take it for a failing one."""

    async def work(sandbox: PythonSandbox) -> None:
        sandbox.limits = Limits(memory_mb=1 << 50)  # more than the kernel counts to
        with pytest.raises(OSError, match="OverflowError"):
            await sandbox.run("1")

    using(work, isolation="none")


def test_one_process_is_the_most_that_landlock_can_end() -> None:
    async def start() -> None:
        await PythonSandbox(Limits(processes=2), isolation="landlock").start()

    with pytest.raises(UserError, match=r"processes = 1 is the most|no Landlock|Landlock: version|no filter"):
        asyncio.run(start())


@pytest.mark.parametrize("limits", [{"wall_s": 0}, {"memory_mb": 1}, {"processes": -1}])
def test_limits_that_make_no_sense(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        Limits(**limits)


@pytest.mark.parametrize(
    "user", [["--reuid", "65534", "--regid", "65534", "--clear-groups"], ["--bounding-set=-all", "--inh-caps=-all"]]
)
def test_it_needs_no_privileges(user: list[str], tmp_path: Path) -> None:
    """As another user, with the system's Python, which such a user can read; and as a root that may do nothing."""
    python = next((p for p in ("/usr/bin/python3", sys.executable) if os.access(p, os.X_OK)), None)
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None or python is None:
        pytest.skip("only root can become somebody else")
    source = tmp_path / "src"
    shutil.copytree(SOURCE / "gleanrl" / "sandbox", source / "gleanrl" / "sandbox")
    for name in ("__init__.py", "errors.py"):
        shutil.copy(SOURCE / "gleanrl" / name, source / "gleanrl" / name)
    for folder in (source, *source.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith(str(tmp_path.parents[1])):
            folder.chmod(0o755)
    code = (
        "import asyncio, json\n"
        "from gleanrl.environments.tools.sandbox import Limits, PythonSandbox\n"
        "from gleanrl.utils.errors import UserError\n"
        "async def main():\n    s = PythonSandbox(Limits(wall_s=1), packages=False)\n"
        "    try:\n        await s.start()\n"
        "    except UserError as error:\n        return print(json.dumps([str(error)]))\n"
        "    codes = ['6 * 7', 'import os; os.fork()', 'open(\"/etc/passwd\")']\n"
        "    print(json.dumps([s.active] + [(await s.run(c)).text[-60:] for c in codes]))\n    await s.close()\n"
        "asyncio.run(main())"
    )
    version = subprocess.run([python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True)
    if version.stdout.strip() != b"True":
        pytest.skip("the system's Python is too old")
    done = subprocess.run(
        [setpriv, *user, python, "-c", code],
        capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(source), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    active, *texts = json.loads(done.stdout)
    if not texts:
        pytest.skip(active)
    assert active in ("namespaces", "landlock")
    assert texts[0] == "42\n"
    assert "Error" in texts[1]
    assert "Error" in texts[2]
