"""Tests of what a run says about episodes without a score."""

from __future__ import annotations

from pathlib import Path

from gleanrl.runtime.failures import describe_failures, record_failures
from gleanrl.runtime.run_folder import Row, RunFolder
from gleanrl.types import Score, StopReason, Trajectory


def failed(reason: str, number: int) -> list[Trajectory]:
    return [Trajectory(f"t/{n}", "t", ((),), Score.failed(reason), StopReason.DONE) for n in range(number)]


def test_the_commonest_reason_is_that_of_the_steps_that_count(tmp_path: Path) -> None:
    """A resumed run repeats the steps after its checkpoint, and the reasons of the repeated ones no longer count."""
    folder = RunFolder(tmp_path)
    record_failures(folder, "training", 1, [*failed("no answer within 60 s", 2), *failed("no answer within 61 s", 1)])
    record_failures(folder, "evaluation", 2, failed("the judge refused", 2))
    record_failures(folder, "training", 2, failed("undone", 7))
    record_failures(folder, "training", 2, [])
    rows = [
        Row(1, 0.0, {"episode/failed": 3, "episode/ended": 10}),
        Row(2, 0.0, {"episode/failed": 0, "episode/ended": 10, "eval/failed": 2, "eval/attempts": 4}),
    ]
    line = describe_failures(folder, rows) or ""
    assert "3 of 20 training episodes" in line
    assert "2 of 4 evaluation attempts" in line
    assert "no answer within" in line
    assert "undone" not in line
