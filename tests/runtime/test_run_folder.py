"""Tests of RunFolder: it can be read in every state in which a run may have left it."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from gleanrl.runtime.run_folder import Row, RunFolder
from gleanrl.tracking.monitors import RunInfo
from gleanrl.utils.errors import UserError
from tests.tracking.report.synthetic import make_run


def test_an_empty_folder_reads_as_a_run_that_did_nothing_yet(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.read_config() == {}
    assert run.read_metrics() == []
    assert list(run.read_timeline()) == []
    assert run.rollout_steps() == []
    assert run.checkpoints() == []


def test_metrics_of_one_step_are_merged_and_a_half_written_line_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunFolder(tmp_path)
    run.metrics_path.write_text(
        '{"step": 1, "time": 10.0, "reward/mean": 0.5, "loss/policy": null}\n'
        '{"step": 0, "time": 5.0, "eval/greedy/success": 0.25}\n'
        '{"step": 1, "time": 11.0, "eval/greedy/success": 0.75}\n'
        '{"step": 2, "time": 12.0, "reward/me'
    )
    with caplog.at_level(logging.WARNING):
        rows = run.read_metrics()
    assert rows == [
        Row(0, 5.0, {"eval/greedy/success": 0.25}),
        Row(1, 11.0, {"reward/mean": 0.5, "eval/greedy/success": 0.75}),
    ]
    assert not caplog.records  # normal while a run is writing


def test_a_damaged_line_in_the_middle_is_skipped_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunFolder(tmp_path)
    run.metrics_path.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with caplog.at_level(logging.WARNING):
        assert [row.step for row in run.read_metrics()] == [1, 2]
    assert "metrics.jsonl: line 2" in caplog.text


def test_only_complete_checkpoints_are_listed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for name in ["step-2", "step-10", ".partial-1234-step-30", "best"]:
        (run.checkpoints_path / name).mkdir(parents=True)
    (run.checkpoints_path / "step-40").touch()
    assert [(c.step, c.path) for c in run.checkpoints()] == [(s, run.checkpoint_path(s)) for s in (2, 10)]


def test_rollout_steps_are_read_from_their_names(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.rollouts_path.mkdir()
    for step in [12, 3]:
        run.rollout_path(step).touch()
    (run.rollouts_path / "step-000004.jsonl.zst.tmp").touch()
    assert run.rollout_steps() == [3, 12]
    assert run.rollout_path(12).name == "step-000012.jsonl.zst"


def test_a_folder_without_a_run_or_a_broken_config_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run folder at .*nothing"):
        RunFolder.existing(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"neither config.toml nor metrics.jsonl"):
        RunFolder.existing(tmp_path)
    for damaged in (b"a = = 1", b"# f\xfcr"):
        (tmp_path / "config.toml").write_bytes(damaged)
        with pytest.raises(UserError, match=r"config.toml is not valid TOML"):
            RunFolder.existing(tmp_path).read_config()


def test_the_code_of_the_run_folder_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "docs" / "concepts" / "run-folder.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == 3
    make_run(tmp_path / "runs" / "quickstart", steps=3)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    names["Beep"](RunInfo(RunFolder("runs/quickstart"))).log(1, {"reward/success": 1.0})
    out = capsys.readouterr().out
    assert "alfworld:" in out
    assert "mean log-prob" in out
    assert out.endswith("watching quickstart\n\a\n")
