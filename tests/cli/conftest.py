"""Fixtures for command-line tests: a tiny configuration whose whole run takes a second, and ways to run commands."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gleanrl.cli.main import main
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.utils import serialize
from tests.builders import checkpoint_tensors

HERE = Path(__file__).parent
ENVIRONMENT = HERE / "parity.py"
CONFIG = f"""
[run]
steps = 6
threads = 1

[environment]
name = "{ENVIRONMENT}:Parity"
train_tasks = 10
eval_tasks = 3
warm_start_tasks = 8

[model]
hidden_size = 32
layers = 2
max_context = 128
vocabulary = 128

[learner]
lr = 5e-4

[warm_start]
demonstrations = 20
steps = 12
batch = 4

[context]
max_turns = 2
max_tokens_per_turn = 6

[schedule]
batch = 2
group = 4
chunks = 2

[evaluation]
every = 3
samples = 2

[checkpoint]
every = 2
"""
TIMEOUT = 240.0  # seconds; long, because the machine may be busy
_numbers = count()


@dataclass
class Ended:
    """The result of a command: its exit status (negative for a signal) and its output."""

    status: int | None
    stdout: str
    stderr: str

    @property
    def complaint(self) -> str:
        """The one line of an error; fails if there is a stack trace or more than one such line."""
        assert "Traceback" not in self.stderr, self.stderr
        assert "never retrieved" not in self.stderr, self.stderr
        found = [line for line in self.stderr.splitlines() if line.startswith("gleanrl: ")]
        lines = [line for line in found if not line.startswith("gleanrl: warning: ")]
        assert len(lines) == 1, self.stderr
        assert self.stderr.endswith(lines[0] + "\n"), self.stderr
        return lines[0].removeprefix("gleanrl: ")


@dataclass
class Job:
    """A running command."""

    pid: int
    server: Server
    stdout: Path
    stderr: Path

    def wait(self) -> Ended:
        status = self.server.ask({"wait": self.pid, "timeout": TIMEOUT})["status"]
        assert status is not None, f"hung: {self.stderr.read_text()}"
        return Ended(status, self.stdout.read_text(), self.stderr.read_text())

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def until(self, said: str) -> None:
        """Wait until the command has printed ``said`` on standard error."""
        end = time.monotonic() + TIMEOUT
        while said not in (self.stderr.read_text() if self.stderr.exists() else ""):
            assert time.monotonic() < end, self.stderr.read_text()
            time.sleep(0.01)


class Server:
    """The process that starts commands; see `launcher`."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "launcher.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


@dataclass
class CommandLine:
    """Runs commands in a folder that holds ``tiny.toml``."""

    folder: Path
    server: Server
    environment: dict[str, str]
    extra: dict[str, str] = field(default_factory=dict)

    def start(self, *argv: str, triggers: Sequence[dict[str, Any]] = (), teardown: bool = False) -> Job:
        number = next(_numbers)
        out, err = self.folder / f"{number}.out", self.folder / f"{number}.err"
        request = {
            "argv": argv, "cwd": str(self.folder), "env": self.extra,
            "stdout": str(out), "stderr": str(err), "triggers": list(triggers), "teardown": teardown,
        }  # fmt: skip
        return Job(self.server.ask({"start": request})["pid"], self.server, out, err)

    def __call__(self, *argv: str, triggers: Sequence[dict[str, Any]] = (), teardown: bool = False) -> Ended:
        """``gleanrl ...`` in a process of its own; with ``teardown`` the interpreter also frees its modules."""
        return self.start(*argv, triggers=triggers, teardown=teardown).wait()

    def here(self, *argv: str) -> Ended:
        """Run ``gleanrl ...`` in this process, which is faster, for commands that run no training."""
        out, err = io.StringIO(), io.StringIO()
        with ExitStack() as stack:
            stack.enter_context(chdir(self.folder))
            stack.enter_context(patch.dict(os.environ, self.extra))
            stack.enter_context(patch("warnings.showwarning"))
            stack.enter_context(redirect_stdout(out))
            stack.enter_context(redirect_stderr(err))
            try:
                status = main(argv)
            except SystemExit as end:  # --help, or an argument that argparse refuses
                status = int(end.code or 0)
        return Ended(status, out.getvalue(), err.getvalue())

    def train(self, name: str, *argv: str, at: tuple[str, int, str] | None = None) -> Ended:
        """``gleanrl train tiny.toml --run.name NAME ...``; ``at`` is (function, number of the call, event)."""
        triggers = [{"at": at[0], "call": at[1], "event": at[2]}] if at else []
        return self("train", "tiny.toml", "--run.name", name, *argv, triggers=triggers)

    def python(self, *argv: str) -> Ended:
        """Run ``python -m gleanrl ...`` in a new interpreter, as a user does."""
        command = [sys.executable, "-m", "gleanrl", *argv]
        done = subprocess.run(
            command, cwd=self.folder, env={**self.environment, **self.extra}, capture_output=True, text=True,
            timeout=TIMEOUT, check=False,
        )  # fmt: skip
        return Ended(done.returncode, done.stdout, done.stderr)

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.folder / "runs" / name)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of all commands; they share a cache, so that only the first run trains a warm start."""
    cache = str(tmp_path_factory.mktemp("cache"))
    here = {"GLEANRL_CACHE": cache, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **here}


@pytest.fixture(scope="session")
def server(environment: dict[str, str]) -> Iterator[Server]:
    server = Server(environment)
    yield server
    server.close()


@pytest.fixture(scope="session")
def make_gleanrl(
    server: Server, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], CommandLine]:
    def make() -> CommandLine:
        folder = tmp_path_factory.mktemp("work")
        (folder / "tiny.toml").write_text(CONFIG)
        return CommandLine(folder, server, environment)

    return make


@pytest.fixture
def gleanrl(make_gleanrl: Callable[[], CommandLine]) -> CommandLine:
    return make_gleanrl()


@pytest.fixture(scope="session")
def whole(make_gleanrl: Callable[[], CommandLine]) -> tuple[CommandLine, Ended]:
    """A complete, undisturbed run, which all tests of the session may read and compare with."""
    gleanrl = make_gleanrl()
    ended = gleanrl("train", "tiny.toml", "--run.name", "whole", teardown=True)
    assert ended.status == 0, ended.stderr
    return gleanrl, ended


def outcome(folder: RunFolder) -> dict[str, Any]:
    """Return the results of a run without measured times: weights (as bytes), metrics and rollouts."""
    weights = {str(path.relative_to(folder.path)): path.read_bytes() for path in folder.path.rglob("*.safetensors")}
    for path in folder.path.rglob("tensors/.metadata"):
        checkpoint = path.parents[1]
        for name, tensor in checkpoint_tensors(checkpoint).items():
            weights[f"{checkpoint.relative_to(folder.path)}/{name}"] = tensor.numpy().tobytes()
    rows = [
        (row.step, {name: value for name, value in row.metrics.items() if not timed(name)})
        for row in folder.read_metrics()
    ]
    rollouts = []
    for step in folder.rollout_steps():
        for record in folder.read_rollouts(step):
            kept = replace(record.trajectory, info={"turns": record.trajectory.info["turns"]})
            rollouts.append(json.loads(serialize.to_json(replace(record, trajectory=kept))))
    return {"weights": weights, "metrics": rows, "rollouts": rollouts}


def timed(name: str) -> bool:
    """Return whether a metric depends on timing; a trajectory's bytes do too, since it stores its duration."""
    return (
        name in ("pool/bytes", "pool/failure_bytes")
        or name.startswith(("time/", "device/", "service/"))
        or name.endswith(("_s", "_per_s"))
    )


def assert_same(one: RunFolder, other: RunFolder) -> None:
    first, second = outcome(one), outcome(other)
    assert first["metrics"] == second["metrics"]
    assert first["rollouts"] == second["rollouts"]
    assert first["weights"].keys() == second["weights"].keys()
    assert [name for name, data in first["weights"].items() if data != second["weights"][name]] == []
