"""The folder of a session on a real file system."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from gleanrl.environments.tools.sandbox import Limits, PythonSandbox, scratch
from gleanrl.environments.tools.sandbox.scratch import exceeded, make, remove
from tests.environments.tools.sandbox.worlds import World

ROOT = Path(__file__).parents[4]
SOURCE = ROOT / "src"
LIMITS = Limits(disk_mb=1, threads=10_000)


def test_what_is_in_it_is_counted(tmp_path: Path) -> None:
    """In a process of its own: this one may hold nameless files of other tests."""
    check = (
        f"from tests.environments.tools.sandbox.test_scratch import check_counting; check_counting({str(tmp_path)!r})"
    )
    subprocess.run([sys.executable, "-c", check], check=True, env={**os.environ, "PYTHONPATH": f"{SOURCE}:{ROOT}"})


def check_counting(within: str) -> None:
    scratch.MAX_FILES = 40
    folder, own = make(within), os.getpid()
    inner = Path(folder, "a", "b")
    inner.mkdir(parents=True)
    assert exceeded(own, folder, LIMITS) is None
    (inner / "sparse").touch()
    os.truncate(inner / "sparse", 1 << 30)
    assert exceeded(own, folder, LIMITS) is None
    (inner / "full").write_bytes(os.urandom(1 << 20))
    assert exceeded(own, folder, LIMITS) == "its files took more than 1 MB"
    held, again = (inner / "full").open("rb"), (inner / "full").open("rb")
    (inner / "full").unlink()
    assert exceeded(own, folder, LIMITS) == "its files took more than 1 MB"
    assert exceeded(own, folder, Limits(disk_mb=2, threads=10_000)) is None  # it is there once
    held.close()
    again.close()
    assert exceeded(own, folder, LIMITS) is None
    for number in range(40):
        (inner / str(number)).touch()
    assert exceeded(own, folder, LIMITS) == "it had more than 40 files"
    remove(folder)
    assert not Path(folder).exists()
    assert exceeded(own, folder, LIMITS) is None


@pytest.mark.skipif(os.path.realpath("/proc/self") == "/proc/self", reason="needs /proc")
def test_it_is_removed_however_deep_and_whatever_its_rights(tmp_path: Path) -> None:
    folder = make(str(tmp_path))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    os.symlink(precious, Path(folder, "link"))
    here = os.open(folder, os.O_DIRECTORY)
    for _ in range(1050):  # deeper than Python calls itself, and a longer path than can be
        os.mkdir("inside", dir_fd=here)
        there = os.open("inside", os.O_DIRECTORY, dir_fd=here)
        os.fchmod(here, 0)
        os.close(here)
        here = there
    os.close(here)
    os.chmod(folder, 0o700)
    remove(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert (precious / "file").exists()


def test_nothing_is_left_of_it(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kind = world.sandbox.active
    assert kind is not None

    async def calls() -> None:
        sandbox = PythonSandbox(Limits(wall_s=1.0), isolation=kind)  # type: ignore[arg-type]
        await sandbox.run(
            "import os\nfor _ in range(50):\n    os.mkdir('d')\n    os.chdir('d')\nopen('f', 'w').write('x')"
        )
        session = sandbox.session()
        await session.run("open('f', 'w').write('x')")
        assert bool(os.listdir(tmp_path)) == (kind == "landlock")
        await sandbox.close()

    world.runner.run(calls())
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_it_when_the_program_is_killed(world: World, tmp_path: Path) -> None:
    if world.sandbox.active != "landlock":
        pytest.skip("it lies in memory")
    code = (
        "import asyncio, sys\nfrom gleanrl.environments.tools.sandbox import Limits, PythonSandbox\n"
        "async def main():\n    sandbox = PythonSandbox(Limits(wall_s=60, cpu_s=60), isolation='landlock')\n"
        '    session = sandbox.session()\n    await session.run(\'open("f", "w").write("x")\')\n'
        "    print(sandbox._starting.result()._process.pid, flush=True)\n"
        "    await session.run('while True: pass')\nasyncio.run(main())"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as program:
        assert program.stdout is not None
        server = os.pidfd_open(int(program.stdout.readline()))
        assert list(tmp_path.glob("*/f"))
        program.kill()
    poll = select.poll()
    poll.register(server, select.POLLIN)
    assert poll.poll(10_000), "the server outlived its program"
    os.close(server)
    assert not list(tmp_path.iterdir())
