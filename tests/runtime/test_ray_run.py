"""Tests of `gleanrl train --runtime ray` as a subprocess: it equals the local runtime and survives killed actors."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gleanrl.runtime.run_folder import RunFolder
from tests.cli.conftest import assert_same
from tests.runtime.ray_world import Command, commands, gone

pytestmark = [pytest.mark.ray, pytest.mark.heavy, pytest.mark.timeout(600)]
BATCH, GROUP = 2, 4  # groups per step and members per group of the tiny configuration


Start = Callable[..., Command]


@pytest.fixture
def start() -> Iterator[Start]:
    pytest.importorskip("ray", reason="ray is not installed")
    with commands() as start:
        yield start


def assert_exact(run: RunFolder, steps: int) -> None:
    """Assert that every step is there once, with all members of its own groups and no others."""
    rows = [row.step for row in run.read_metrics() if "reward/mean" in row.metrics]
    assert rows == list(range(1, steps + 1))
    seen: Counter[str] = Counter()
    for step in range(1, steps + 1):
        records = list(run.read_rollouts(step))
        tickets = Counter(record.ticket for record in records)
        assert tickets == {BATCH * (step - 1) + n: GROUP for n in range(BATCH)}
        seen.update(record.trajectory.id for record in records)
    assert set(seen.values()) == {1}


def test_a_run_with_one_sampler_actor_equals_the_local_runtime_bit_for_bit(start: Start, tmp_path: Path) -> None:
    settings = ("--run.steps", "4", "--run.threads", "1")
    local = start(tmp_path / "local", *settings, runtime="local")
    assert local.wait().status == 0
    for number, (placement, way) in enumerate((("colocated", "auto"), ("disaggregated", "broadcast"))):
        own = ("--ray.placement", placement, "--ray.transfer", way)
        command = start(tmp_path / str(number), *settings, *own)
        ended = command.wait()
        assert ended.status == 0, ended.stderr
        assert_same(local.run, command.run)


def test_a_learner_of_two_ranks_equals_the_local_runtime_and_survives_a_killed_rank(
    start: Start, tmp_path: Path
) -> None:
    settings = ("--run.steps", "4", "--run.threads", "1", "--learner.ranks", "2")
    local = start(tmp_path / "local", *settings, runtime="local")
    assert local.wait().status == 0
    command = start(tmp_path / "ray", *settings)
    ended = command.wait()
    assert ended.status == 0, ended.stderr
    assert_same(local.run, command.run)

    command = start(tmp_path / "killed", *settings[2:], "--run.steps", "12", "--evaluation.every", "0")
    command.until_step(3)
    processes = set(command.tree())
    (rank,) = [pid for pid, (title, _) in command.tree().items() if "gleanrl.runtime.sharded" in title]
    os.kill(rank, signal.SIGKILL)
    command.until(r"^learner: rank 1 ended with signal 9; the run goes on from its last checkpoint \(1 of 3\)$")
    ended = command.wait()
    assert ended.status == 0, ended.stderr
    assert_exact(command.run, 12)
    assert "Traceback" not in ended.stderr + ended.stdout
    assert not gone(processes)


TRAP = '''
"""The default loss. Whatever loads it dies where it first gives its weights of some number away."""

import os
import signal
from pathlib import Path

from gleanrl.algorithms.loss import POLICY_LOSSES
from gleanrl.runtime.ray.weights import WeightSource

fallen = Path("fallen").absolute()

def trapped(gives):
    async def fall(self, number, *rest):
        if number >= 5 and not fallen.exists():
            fallen.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await gives(self, number, *rest)
    return fall

for name in ("put", "broadcast"):
    setattr(WeightSource, name, trapped(getattr(WeightSource, name)))
loss = POLICY_LOSSES.get("ppo")
'''


@pytest.mark.parametrize("way", ["memory", "broadcast"])
def test_a_learner_that_dies_in_a_publication_continues_from_its_checkpoint(
    start: Start, tmp_path: Path, way: str
) -> None:
    (tmp_path / "trap.py").write_text(TRAP)
    steps = 8
    command = start(
        tmp_path, "--run.steps", str(steps), "--ray.transfer", way, "--ray.samplers", "2",
        "--loss.name", "trap.py:loss",
        "--evaluation.every", "0", "--evaluation.at_start", "false",
    )  # fmt: skip
    ended = command.wait()
    assert ended.status == 0, ended.stderr
    assert (tmp_path / "fallen").exists()
    assert_exact(command.run, steps)
    assert len(re.findall(_death("Learner"), ended.stderr, re.MULTILINE)) == 1
    assert "starting another" not in ended.stderr  # no sampler died
    assert "Traceback" not in ended.stderr + ended.stdout
    rows = [row.metrics for row in command.run.read_metrics()]
    assert sum(row.get("service/actors_restarted", 0) for row in rows) == 1


def test_a_learner_that_is_killed_while_actors_start_is_started_again(start: Start, tmp_path: Path) -> None:
    command = start(tmp_path, "--run.steps", "2", "--evaluation.every", "0", "--evaluation.at_start", "false")
    command.until(r"^starting actors")
    while not command.actors("Learner"):
        time.sleep(0.02)
    command.kill("Learner")
    ended = command.wait()
    assert ended.status == 0, ended.stderr
    assert_exact(command.run, 2)
    assert len(re.findall(_death("Learner"), ended.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in ended.stderr + ended.stdout


def test_a_kill_of_each_kind_of_actor_loses_no_step_and_no_rollout(start: Start, tmp_path: Path) -> None:
    steps, every = 60, 5
    command = start(
        tmp_path, "--run.steps", str(steps), "--ray.samplers", "2", "--reward.name", "reward.py:even",
        "--checkpoint.every", str(every), "--evaluation.every", "0",
    )  # fmt: skip
    at, processes = 3, set[int]()
    for kind, number in (("Sampler", 2), ("Environment", 1), ("Reward", 1), ("Learner", 1)):
        command.until_step(at)
        assert len(command.actors(kind)) == number
        processes |= set(command.tree())
        command.kill(kind)
        command.until(_death(kind))
        at = _steps(command) + every + 1
    ended = command.wait()
    assert ended.status == 0, ended.stderr
    assert_exact(command.run, steps)
    for kind in ("Sampler", "Environment", "Reward", "Learner"):
        assert len(re.findall(_death(kind), ended.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in ended.stderr + ended.stdout
    assert "(raylet)" not in ended.stderr + ended.stdout
    rows = [row.metrics for row in command.run.read_metrics()]
    assert 2 <= sum(row.get("service/actors_restarted", 0) for row in rows) <= 4  # rows of repeated steps are replaced
    assert not gone(processes)


def _death(kind: str) -> str:
    name = "reward" if kind == "Reward" else kind.lower()
    return rf"^{name}( \d)? died: .*; (starting another|the run goes on from its last checkpoint) \(1 of 3\)$"


def _steps(command: Command) -> int:
    return max((int(n) for n in re.findall(r"^step (\d+): reward", command.said, re.MULTILINE)), default=0)


def test_a_death_beyond_max_restarts_ends_the_run_with_one_line(start: Start, tmp_path: Path) -> None:
    command = start(
        tmp_path, "--run.steps", "500", "--ray.max_restarts", "0", "--evaluation.every", "0", "--evaluation.at_start",
        "false",
    )  # fmt: skip
    command.until_step(2)
    command.kill("Sampler")
    ended = command.wait()
    assert ended.status == 2
    assert re.fullmatch(r"sampler died: .*\(ray.max_restarts\)", ended.complaint)
    assert command.run.checkpoints()


def test_ctrl_c_or_a_killed_driver_leaves_no_process(start: Start, tmp_path: Path) -> None:
    command = start(tmp_path, "--run.steps", "500", "--evaluation.every", "0")
    command.until_step(2)
    processes = set(command.tree())
    assert len(processes) > 5
    os.killpg(command.process.pid, signal.SIGINT)  # to all processes of the group, as a terminal does
    ended = command.wait()
    assert ended.status == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "continue with: gleanrl train tiny.toml" in ended.stderr
    assert command.run.checkpoints()
    assert not gone(processes)

    done = _steps(command)
    again = start(tmp_path, "--run.steps", "500", "--evaluation.every", "0", "--resume")
    again.until_step(done + 3)
    processes = set(again.tree())
    again.process.kill()
    assert again.wait().status == -signal.SIGKILL
    assert not gone(processes, within_s=200)  # Ray's agents look for their dead server for a minute
