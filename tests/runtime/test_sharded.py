"""Tests of a learner of several processes: if one rank fails, all end soon and the error is one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

from gleanrl.cli import main as cli
from gleanrl.config.settings import Config
from gleanrl.learners.distributed.ranks import environment
from gleanrl.runtime.sharded import learner_ranks
from gleanrl.utils.errors import UserError

PATIENCE_S = 90.0  # enough on a busy machine; a rank that waits for lost peers would take 30 minutes


def lead(case: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.runtime.sharded_world", case]
    return subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a process; return its exit status and its own error lines."""
    try:
        said = process.communicate(timeout=PATIENCE_S)[1]
    finally:
        process.kill()
    return process.returncode, "\n".join(line for line in said.splitlines() if line.startswith("gleanrl: "))


@pytest.mark.heavy
def test_a_failure_of_rank_0_in_the_middle_of_a_pass_ends_all_ranks() -> None:
    line = "gleanrl: rank 0 of 2: MemoryError: no memory is left"
    assert ended(lead("fails")) == (2, line)


@pytest.mark.heavy
def test_a_failure_of_rank_0_under_torchrun_ends_all_ranks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    first, second = (lead("fails", RANK=rank, **world) for rank in "01")
    assert ended(first) == (2, "gleanrl: rank 0 of 2: MemoryError: no memory is left")
    assert ended(second)[0] == 1


@pytest.mark.slow
def test_an_interrupt_while_the_model_is_broadcast_ends_all_ranks() -> None:
    assert ended(lead("interrupted")) == (130, "gleanrl: interrupted")


@pytest.mark.slow
def test_a_rank_that_exits_before_the_process_group_exists_ends_all_ranks() -> None:
    line = "gleanrl: rank 1 ended with status 3 before it began; what it said is above"
    assert ended(lead("stillborn")) == (2, line)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = Config.model_validate({"learner": {"ranks": 3}, "model": {"device": "cuda"}})
    line = r"3 ranks of the learner on this machine, but 2 CUDA devices .*lower learner\.ranks"
    with pytest.raises(UserError, match=line), learner_ranks(config):
        pass


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2 in the environment, but no RANK: start with torchrun, or unset WORLD"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}, "but no MASTER_ADDR"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE = 'many' in the environment is no number"),
    ],
)
def test_incomplete_or_malformed_torchrun_variables_are_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        environment(variables)


def test_an_evaluation_under_torchrun_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["evaluate", "quickstart"]) == 2
    assert "gleanrl evaluate is one process, but WORLD_SIZE = 2" in capsys.readouterr().err


def test_a_single_process_needs_no_torchrun_variables() -> None:
    assert environment({}) is None
    assert environment({"WORLD_SIZE": "1"}) is None
