"""Tests of `gleanrl train --runtime ray` as a subprocess: it equals the local runtime and survives killed actors."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import assert_same, outcome
from tests.runtime.ray_world import RANK, Command, commands, find_losses, gone, nodes

pytestmark = [pytest.mark.ray, pytest.mark.heavy, pytest.mark.timeout(600)]

Start = Callable[..., Command]


@pytest.fixture
def start() -> Iterator[Start]:
    pytest.importorskip("ray", reason="ray is not installed")
    with commands() as start:
        yield start


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


REPLAY = {
    "replay.enabled": "true",
    "replay.start_progress": "0",
    "replay.keep_failures": "2",
    "replay.restart_share": "0.5",
    "loss.observation_coefficient": "0.03",
}


@pytest.mark.parametrize("own", [("--runtime", "ray"), ("--learner.ranks", "2")])
def test_what_the_pool_adds_to_a_step_is_the_same_on_ray_and_on_two_ranks(
    start: Start, tmp_path: Path, own: tuple[str, str]
) -> None:
    settings = ["--run.steps", "6", "--run.threads", "1"]
    settings += [text for name, value in REPLAY.items() for text in (f"--{name}", value)]
    local = start(tmp_path / "local", *settings, runtime="local")
    assert local.wait().status == 0
    steps = [metrics for _, metrics in outcome(local.run)["metrics"] if "replay_update/0/trajectories" in metrics]
    assert sum(metrics["replay_update/0/trajectories"] for metrics in steps) > 0
    assert sum(metrics["loss/observation"] for metrics in steps) > 0
    if own[0] == "--runtime":
        other = start(tmp_path / "other", *settings, runtime=own[1])
        assert other.wait().status == 0, other.said
        assert_same(local.run, other.run)
        return
    other = start(tmp_path / "other", *settings, *own, runtime="local")
    assert other.wait().status == 0, other.said
    one, two = outcome(local.run), outcome(other.run)
    for (_, first), (_, second) in zip(one["metrics"], two["metrics"], strict=True):
        for name in ("loss/policy", "replay_update/0/learner/grad_norm", "loss/observation"):
            if name in first:
                assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-5)


def test_a_learner_on_two_nodes_equals_the_local_runtime_and_survives_a_killed_rank(
    start: Start, tmp_path: Path
) -> None:
    settings = ("--run.steps", "4", "--run.threads", "1", "--learner.ranks", "2")
    local = start(tmp_path / "local", *settings, runtime="local")
    assert local.wait().status == 0
    with nodes(2, cpus=3) as (address, actors, _):
        settings += ("--ray-address", address, "--ray.learner_cpus", "2")  # so that a node has no room for both ranks
        command = start(tmp_path / "ray", *settings)
        command.until_step(1)
        assert len({actors(kind).node for kind in ("Learner", RANK)}) == 2
        ended = command.wait()
        assert ended.status == 0, ended.stderr
        one, two = outcome(local.run), outcome(command.run)
        assert one["rollouts"] == two["rollouts"]
        assert one["weights"] == two["weights"]
        losses = [
            [metrics["loss/policy"] for _, metrics in each["metrics"] if "loss/policy" in metrics]
            for each in (one, two)
        ]
        assert losses[0] == losses[1]

        settings = (*settings[2:], "--run.steps", "8", "--evaluation.every", "0", "--evaluation.at_start", "false")
        command = start(tmp_path / "killed", *settings)
        command.until_step(3)
        learner, rank = (actors(kind).pid for kind in ("Learner", RANK))
        os.kill(rank, signal.SIGKILL)
        command.until(_death("Learner"))
        ended = command.wait()
        assert ended.status == 0, ended.stderr
        assert not find_losses(command.run, 8)
        assert "Traceback" not in ended.stderr + ended.stdout
        assert not gone({learner, *(actors(kind).pid for kind in ("Learner", RANK))})


def test_a_run_whose_node_is_gone_ends_with_one_line(start: Start, tmp_path: Path) -> None:
    with nodes(2, cpus=3) as (address, actors, end_node):
        settings = ("--learner.ranks", "2", "--ray.learner_cpus", "2", "--ray.wait_s", "10", "--ray.max_restarts", "1")
        command = start(tmp_path, "--run.steps", "1000", "--ray-address", address, *settings)
        command.until_step(1)
        assert len({actors(kind).node for kind in ("Learner", RANK)}) == 2
        end_node()
        ended = command.wait()
    assert ended.status != 0
    assert "ray.wait_s" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr + ended.stdout


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
    assert not find_losses(command.run, steps)
    assert len(re.findall(_death("Learner"), ended.stderr, re.MULTILINE)) == 1
    assert "starting another" not in ended.stderr  # no sampler died
    assert "Traceback" not in ended.stderr + ended.stdout
    rows = [row.metrics for row in command.run.read_metrics()]
    assert sum(row.get("service/actors_restarted", 0) for row in rows) == 1


@pytest.mark.parametrize(("appears", "victim"), [("Learner", "Learner"), (RANK, "Learner"), (RANK, RANK)])
def test_a_learner_that_is_killed_while_actors_start_is_started_again(
    start: Start, tmp_path: Path, appears: str, victim: str
) -> None:
    command = start(
        tmp_path, "--run.steps", "2", "--evaluation.every", "0", "--evaluation.at_start", "false",
        "--learner.ranks", "2" if appears == RANK else "1",
    )  # fmt: skip
    ranks = kill_once_there(command, appears, victim)
    ended = command.wait()
    assert ended.status == 0, ended.stderr
    assert not find_losses(command.run, 2)
    assert len(re.findall(_death("Learner"), ended.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in ended.stderr + ended.stdout
    assert not gone(ranks, within_s=100)  # without their rank 0, they would try to connect to it for 5 minutes


def test_an_evaluation_whose_learner_is_killed_begins_again(start: Start, tmp_path: Path) -> None:
    """One process evaluates what several have trained, as after torchrun, where ``learner.ranks`` is 1."""
    ranks = ("--learner.ranks", "2", "--learner.offload_state", "true")
    trained = start(tmp_path, "--run.steps", "2", "--evaluation.every", "0", *ranks, runtime="local")
    assert trained.wait().status == 0
    command = start(tmp_path, "--learner.ranks", "1", verb="evaluate runs/tiny")
    kill_once_there(command, "Learner", "Learner")
    ended = command.wait()
    assert ended.status == 0, ended.stderr
    assert len(re.findall(_death("Learner"), ended.stderr, re.MULTILINE)) == 1


def test_a_learner_and_the_only_sampler_may_be_killed_at_once(start: Start, tmp_path: Path) -> None:
    command = start(tmp_path, "--run.steps", "8", "--evaluation.every", "0", "--evaluation.at_start", "false")
    command.until_step(3)
    command.kill("Sampler")  # its successor needs the weights that are lost with the learner
    command.kill("Learner")
    ended = command.wait()
    assert ended.status == 0, ended.stderr
    assert not find_losses(command.run, 8)
    assert "Traceback" not in ended.stderr + ended.stdout


def kill_once_there(command: Command, appears: str, victim: str) -> set[int]:
    """Kill a process of kind ``victim`` once it and one of kind ``appears`` are there. Returns the learner's ranks."""
    command.until(r"^starting actors")
    while not (command.actors(appears) and command.actors(victim)):
        time.sleep(0.02)
    ranks = set(command.actors(RANK))
    command.kill(victim)
    return ranks


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
    assert not find_losses(command.run, steps)
    for kind in ("Sampler", "Environment", "Reward", "Learner"):
        assert len(re.findall(_death(kind), ended.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in ended.stderr + ended.stdout
    assert "(raylet)" not in ended.stderr + ended.stdout
    rows = [row.metrics for row in command.run.read_metrics()]
    assert 2 <= sum(row.get("service/actors_restarted", 0) for row in rows) <= 4  # rows of repeated steps are replaced
    assert not gone(processes)


def _death(kind: str) -> str:
    who = "(learner|rank 1)" if kind == "Learner" else kind.lower()
    return rf"^{who}( \d died| died)?: .*; starting (another|all actors again) \(1 of 3\)$"


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


def test_a_learner_that_dies_after_ctrl_c_is_not_started_again(start: Start, tmp_path: Path) -> None:
    command = start(tmp_path, "--run.steps", "500", "--evaluation.every", "0", "--evaluation.at_start", "false")
    command.until_step(2)
    (learner,) = command.actors("Learner")
    os.kill(learner, signal.SIGSTOP)  # so that the step does not end before the learner is killed
    os.kill(command.process.pid, signal.SIGINT)
    command.until("^stopping")
    os.kill(learner, signal.SIGKILL)
    ended = command.wait()
    assert ended.status == 130, ended.stderr
    assert "continue with: gleanrl train tiny.toml" in ended.stderr
    assert "starting all actors again" not in ended.stderr
    assert "Traceback" not in ended.stderr
