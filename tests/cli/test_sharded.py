"""Tests of runs whose learner has several processes, started by torchrun or by the command itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.conftest import TIMEOUT, CommandLine

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]
SYNC = ("--schedule.preset", "sync", "--schedule.chunks", "1")  # groups in an order that does not depend on timing


def weights_are_close(gleanrl: CommandLine, ours: str, theirs: str) -> None:
    one, other = (load_file(gleanrl.run(name).path / "model" / "model.safetensors") for name in (ours, theirs))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor - other[name]).abs().max() < 1e-5, name


def torchrun(gleanrl: CommandLine, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gleanrl", *argv]
    return subprocess.run(
        command, cwd=gleanrl.folder, env=gleanrl.environment, capture_output=True, text=True, timeout=TIMEOUT,
        check=False,
    )  # fmt: skip


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_run_under_torchrun_gives_the_weights_of_one_process(gleanrl: CommandLine) -> None:
    assert gleanrl.train("one", *SYNC).status == 0
    done = torchrun(gleanrl, "train", "tiny.toml", "--run.name", "two", *SYNC)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: ") == 1  # only rank 0 prints
    weights_are_close(gleanrl, "two", "one")
    wrong = torchrun(gleanrl, "train", "tiny.toml", "--run.name", "three", "--learner.ranks", "4")
    assert "gleanrl: learner.ranks = 4, but torchrun started 2" in wrong.stderr


def test_a_run_whose_rank_was_killed_resumes_with_one_process(gleanrl: CommandLine) -> None:
    assert gleanrl.train("one", *SYNC, "--run.steps", "12").status == 0
    job = gleanrl.start("train", "tiny.toml", "--run.name", "two", *SYNC, "--learner.ranks", "2", "--run.steps", "500")
    job.until("step 3: reward")
    started = [pid for pid in children(job.pid) if b"runtime.sharded" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(started) == 1
    os.kill(started[0], signal.SIGKILL)
    ended = job.wait()
    assert ended.status == 2
    assert ended.complaint == "rank 1 ended with signal 9; continue from the last checkpoint with --resume"
    assert len(gleanrl.run("two").read_metrics()) >= 2
    again = gleanrl.train("two", *SYNC, "--resume", "--run.steps", "12")
    assert again.status == 0, again.stderr
    weights_are_close(gleanrl, "two", "one")


def test_ctrl_c_ends_all_ranks_and_leaves_a_checkpoint(gleanrl: CommandLine) -> None:
    many = (*SYNC, "--learner.ranks", "2")
    job = gleanrl.start("train", "tiny.toml", "--run.name", "two", *many, "--run.steps", "500")
    job.until("step 2: reward")
    (child,) = [pid for pid in children(job.pid) if b"runtime.sharded" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    job.kill(signal.SIGINT)
    ended = job.wait()
    assert ended.status == 130, ended.stderr
    assert not Path(f"/proc/{child}").exists()
    steps = len(gleanrl.run("two").checkpoints())
    assert steps
