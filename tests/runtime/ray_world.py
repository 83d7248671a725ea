"""Runs the command line as a subprocess with a Ray of its own, and finds and kills the processes of the run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gleanrl.runtime.run_folder import RunFolder
from tests.cli.conftest import CONFIG, Ended

ROOT = Path(__file__).parents[2]
RANK = "Rank"
KINDS = ("Learner", RANK, "Sampler", "Environment", "Reward")  # of processes that a run starts again when they die
BATCH, GROUP = 2, 4  # groups per step and members per group of the tiny configuration
TIMEOUT = 280.0  # seconds; long, because the machine may be busy
REWARD = '''
"""A reward that notes whom it was asked about."""

def even(request):
    with open("asked.txt", "a") as out:
        out.write("x")
    return float(len(request.response) % 2 == 0)
'''


@dataclass
class Command:
    """A running ``gleanrl VERB --runtime RUNTIME`` in an operating-system session of its own."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def said(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder / "runs" / "tiny")

    def until_step(self, step: int) -> None:
        """Wait until the command has reported at least step ``step``."""
        self.until(rf"^step ({'|'.join(str(n) for n in range(step, step + 200))}): reward")

    def until(self, pattern: str) -> None:
        end = time.monotonic() + TIMEOUT
        while not re.search(pattern, self.said, re.MULTILINE):
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.said}"
            assert time.monotonic() < end, self.said
            time.sleep(0.02)

    def actors(self, kind: str) -> list[int]:
        """Return the process ids of the run's actors of one kind; `RANK` are the learner's ranks other than rank 0."""
        return [pid for pid, (title, _) in self.tree().items() if f"ray::{kind}Actor" in title]

    def tree(self) -> dict[int, tuple[str, int]]:
        """Return the title and parent of every process that descends from this command, by process id."""
        everything = {}
        for folder in Path("/proc").iterdir():
            try:
                title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                everything[int(folder.name)] = (title, int(stat[1])) if stat[0] != "Z" else ("", 0)
            except (ValueError, OSError):
                continue
        own = {self.process.pid}
        while more := {pid for pid, (_, parent) in everything.items() if parent in own} - own:
            own |= more
        return {pid: everything[pid] for pid in own - {self.process.pid} if pid in everything}

    def kill(self, kind: str) -> None:
        victim = self.actors(kind)[0]
        os.kill(victim, signal.SIGKILL)

    def wait(self, within_s: float = TIMEOUT) -> Ended:
        try:
            status = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"hung:\n{self.said}") from None
        return Ended(status, (self.folder / "out").read_text(), self.said)


@contextmanager
def commands(*common: str) -> Iterator[Callable[..., Command]]:
    """Yield `start` with the common settings added; kill the commands that still run when the block ends."""
    started: list[Command] = []

    def start_one(folder: Path, *settings: str, runtime: str = "ray", verb: str = "train tiny.toml") -> Command:
        started.append(start(folder, *common, *settings, runtime=runtime, verb=verb))
        return started[-1]

    try:
        yield start_one
    finally:
        for command in started:
            if command.process.poll() is None:
                command.process.kill()
                command.process.wait()


def start(folder: Path, *settings: str, runtime: str, verb: str = "train tiny.toml") -> Command:
    folder.mkdir(exist_ok=True)
    (folder / "tiny.toml").write_text(CONFIG)
    (folder / "reward.py").write_text(REWARD)
    command = [sys.executable, "-m", "gleanrl", *verb.split(), "--runtime", runtime, *settings]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
    return Command(process, folder)


class Actor(NamedTuple):
    """The newest actor of its kind."""

    pid: int
    node: str  # Ray's id of its node


@contextmanager
def nodes(count: int, *, cpus: int) -> Iterator[tuple[str, Callable[[str], Actor], Callable[[], None]]]:
    """Start a Ray cluster of nodes on this machine.

    Yields its address, a function that finds an actor of a kind, and one that ends the node that was started last.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster()

    def newest(kind: str) -> Actor:
        table = cluster.global_state.actor_table(None).values()
        found = max(
            (row for row in table if row["ActorClassName"] == f"{kind}Actor" and row["Pid"]),
            key=lambda row: row["StartTime"],
        )
        return Actor(found["Pid"], found["Address"]["NodeID"])

    try:
        started = [cluster.add_node(num_cpus=cpus, include_dashboard=False) for _ in range(count)]
        yield cluster.address, newest, lambda: cluster.remove_node(started[-1])
    finally:
        cluster.shutdown()


def find_losses(run: RunFolder, steps: int, *, in_order: bool = True) -> list[str]:
    """Return what a run of ``steps`` steps has lost or repeated: steps, tickets and trajectories.

    ``in_order``: whether the steps use the tickets in the order of their numbers, as with the schedule "sync".
    """
    losses = []
    rows = [row.step for row in run.read_metrics() if "reward/mean" in row.metrics]
    if rows != list(range(1, steps + 1)):
        losses.append(f"steps {rows}")
    tickets, seen = Counter[int](), Counter[str]()
    for step in range(1, steps + 1):
        records = list(run.read_rollouts(step))
        seen.update(record.trajectory.id for record in records)
        tickets.update(record.ticket for record in records)
        own = Counter(record.ticket for record in records)
        if in_order and own != dict.fromkeys(range(BATCH * (step - 1), BATCH * step), GROUP):
            losses.append(f"members of each ticket of step {step}: {dict(own)}")
    if tickets != dict.fromkeys(range(BATCH * steps), GROUP):
        losses.append(f"members of each ticket: {dict(sorted(tickets.items()))}")
    if repeated := [each for each, times in seen.items() if times > 1]:
        losses.append(f"repeated trajectories: {repeated}")
    return losses


def gone(pids: set[int], within_s: float = 20.0) -> set[int]:
    """Wait for processes to end; return those of ``pids`` that are still alive after ``within_s`` seconds."""
    end = time.monotonic() + within_s
    while (left := {pid for pid in pids if alive(pid)}) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
