"""Tests of `gleanrl train --runtime ray --sampler.name vllm`, whose vLLM engines run in actors."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.conftest import outcome
from tests.runtime.ray_world import commands, find_losses, gone
from tests.runtime.test_ray_run import Start

if find_spec("vllm") is None or find_spec("ray") is None:
    pytest.skip("vLLM or Ray is not installed in this environment: make vllm", allow_module_level=True)

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.heavy, pytest.mark.timeout(600)]
SETTINGS = (
    *("--sampler.name", "vllm", "--sampler.options.kv_cache_memory_bytes", str(1 << 26)),
    *("--model.hidden_size", "64", "--model.heads", "2", "--model.kv_heads", "1"),  # heads that vLLM has kernels for
    *("--learner.lr", "1e-2"),  # large, so that a missed update changes the result
)


@pytest.fixture
def start() -> Iterator[Start]:
    with commands(*SETTINGS) as start:
        yield start


def test_a_run_with_one_vllm_actor_equals_the_local_runtime_bit_for_bit(start: Start, tmp_path: Path) -> None:
    local, ray = (start(tmp_path / runtime, "--run.steps", "4", runtime=runtime) for runtime in ("local", "ray"))
    for command in (local, ray):
        ended = command.wait()
        assert ended.status == 0, ended.stderr
        assert "Traceback" not in ended.stderr + ended.stdout
    one, other = outcome(local.run), outcome(ray.run)
    for each in (one, other):  # the optimizer's file holds torch's random state too, which vLLM draws from in passing
        each["weights"] = {name: data for name, data in each["weights"].items() if name.endswith(".safetensors")}
    assert one["weights"]
    assert one == other


def test_a_killed_vllm_actor_is_restarted_and_no_step_or_rollout_is_lost(start: Start, tmp_path: Path) -> None:
    steps = 40
    command = start(
        tmp_path, "--run.steps", str(steps), "--ray.samplers", "2", "--ray.transfer", "broadcast",
        "--schedule.preset", "bounded_async", "--evaluation.every", "0", "--evaluation.at_start", "false",
    )  # fmt: skip
    command.until_step(3)
    processes = set(command.tree())
    command.kill("Sampler")
    ended = command.wait()
    assert ended.status == 0, ended.stderr
    assert not find_losses(command.run, steps, in_order=False)
    assert len(re.findall(r"^sampler \d died: .*; starting another \(1 of 3\)$", ended.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in ended.stderr + ended.stdout
    rows = [row.metrics for row in command.run.read_metrics()]
    assert sum(row.get("service/actors_restarted", 0) for row in rows) == 1
    assert not gone(processes)


def test_a_vllm_actor_whose_tensor_parallel_worker_is_killed_is_replaced(start: Start, tmp_path: Path) -> None:
    steps = 8
    command = start(
        tmp_path, "--run.steps", str(steps), "--sampler.options.tensor_parallel_size", "2", "--evaluation.every", "0",
        "--evaluation.at_start", "false", "--model.kv_heads", "2",
    )  # fmt: skip
    command.until_step(2)
    processes = command.tree()
    worker = next(pid for pid, (title, _) in processes.items() if title.strip().endswith("TP1"))
    os.kill(worker, signal.SIGKILL)
    ended = command.wait()
    assert ended.status == 0, ended.stderr
    assert not find_losses(command.run, steps)
    died = r"^sampler died: VllmWorker-1, .* died with exit code -9: .*; starting another \(1 of 3\)$"
    assert len(re.findall(died, ended.stderr, re.MULTILINE)) == 1, ended.stderr
    assert "--resume" not in ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    assert not gone(set(processes))
