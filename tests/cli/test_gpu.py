"""Tests of whole runs on a GPU by the command line."""

from __future__ import annotations

import pytest
import torch

from tests.cli.conftest import CommandLine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.heavy,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_run_on_a_gpu_trains_resumes_and_can_be_evaluated(gleanrl: CommandLine, dtype: str) -> None:
    settings = ("--model.device", "cuda", "--model.dtype", dtype)
    assert gleanrl.train("gpu", *settings, "--run.steps", "3").status == 0
    again = gleanrl.train("gpu", *settings, "--run.steps", "6", "--resume")
    assert again.status == 0, again.stderr
    rows = [row.metrics for row in gleanrl.run("gpu").read_metrics() if "learner/grad_norm" in row.metrics]
    assert len(rows) == 6
    assert all(row["learner/grad_norm"] >= 0 for row in rows)
    assert rows[-1]["learner/memory_gib/max"] > 0
    ended = gleanrl("evaluate", "runs/gpu")
    assert ended.status == 0, ended.stderr


def test_more_ranks_than_gpus_are_one_line(gleanrl: CommandLine) -> None:
    many = str(torch.cuda.device_count() + 1)
    ended = gleanrl.train("gpu", "--model.device", "cuda", "--learner.ranks", many)
    assert ended.status == 2
    assert "CUDA devices" in ended.stderr
    assert "Traceback" not in ended.stderr
