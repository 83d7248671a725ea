"""Monitors (`gleanrl.tracking.monitors`) write the metrics of a run. An error in a monitor does not stop the run."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest

from gleanrl.protocols import Metrics
from gleanrl.runtime.run_folder import Row, RunFolder
from gleanrl.tracking.monitors import Console, Monitors, RunInfo, load_monitors
from gleanrl.tracking.monitors.file import FileMonitor
from gleanrl.utils.errors import UserError
from gleanrl.utils.settings import MonitorSettings


def info(tmp_path: Path, resumed: int | None = None) -> RunInfo:
    config = {"schedule": {"batch": 16, "preset": "sync"}, "seed": 3}
    return RunInfo(RunFolder(tmp_path / "run"), project="tests", config=config, resumed_step=resumed)


class Broken:
    calls = 0

    def __init__(self, info: RunInfo) -> None:
        self.info = info

    def log(self, step: int, metrics: Metrics) -> None:
        self.calls += 1
        raise ConnectionError("no network")

    def close(self) -> None:
        raise ConnectionError("no network")


# --- the file monitor, which writes metrics.jsonl -----------------------------------------------
def test_a_logged_step_is_on_disk_immediately_and_nan_becomes_null(tmp_path: Path) -> None:
    about = info(tmp_path)
    monitor = FileMonitor(about)
    monitor.log(1, {"reward/mean": 0.5, "loss/policy": math.nan, "loss/kl": math.inf})
    assert [row.metrics for row in about.folder.read_metrics()] == [{"reward/mean": 0.5}]
    line = json.loads(about.folder.metrics_path.read_text())
    assert line["loss/policy"] is None
    assert line["time"] > 1e9


def test_resuming_drops_the_rows_after_the_checkpoint(tmp_path: Path) -> None:
    first = FileMonitor(info(tmp_path))
    for step in range(8):
        first.log(step, {"reward/mean": step / 10})
    first.close()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        # A crash while a row was being written leaves an incomplete line.
        file.write('{"step": 8, "rew')
    again = FileMonitor(info(tmp_path, resumed=5))
    again.log(6, {"reward/mean": 0.99})
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert [row.step for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert rows[-1].metrics == {"reward/mean": 0.99}
    assert rows[5].metrics == {"reward/mean": 0.5}


def test_a_new_run_in_an_existing_folder_overwrites_the_old_metrics(tmp_path: Path) -> None:
    FileMonitor(info(tmp_path)).log(1, {"a": 1.0})
    FileMonitor(info(tmp_path)).log(1, {"b": 2.0})
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert [row.metrics for row in rows] == [{"b": 2.0}]
    assert isinstance(rows[0], Row)


# --- all monitors -------------------------------------------------------------------------------
def test_a_failing_monitor_is_reported_once_and_the_others_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = MonitorSettings(use=(f"{Path(__file__)}:Broken", "file"))
    with caplog.at_level(logging.WARNING):
        monitors = load_monitors(settings, info(tmp_path))
        for step in range(3):
            monitors.log(step, {"reward/mean": 0.1})
        monitors.close()
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 3
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ["monitor Broken failed (ConnectionError: no network); the run goes on"]


def test_a_user_defined_monitor_receives_metrics_and_run_info(tmp_path: Path) -> None:
    broken = Broken(info(tmp_path))
    monitors = Monitors([broken])
    monitors.log(1, {})
    assert (broken.calls, broken.info.name) == (1, "run")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", "unknown monitor 'tensorbord'; did you mean 'tensorboard'?"),
        ("xyz", "unknown monitor 'xyz'; known: console, file"),
        ("no_such_package.monitors:Mine", "no_such_package"),
    ],
)
def test_an_unknown_monitor_name_raises_an_error_with_suggestions(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_monitors(MonitorSettings(use=(name,)), info(tmp_path))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_tracker_whose_package_is_missing_raises_an_error_that_names_the_extra(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [
        m for m in sys.modules if m == name or m.startswith((f"{name}.", f"gleanrl.tracking.monitors.{name}"))
    ]:
        monkeypatch.delitem(sys.modules, module)
    # With None in `sys.modules`, importing the package raises ImportError, as if it were not installed.
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"monitor '{name}' needs .*: pip install 'gleanrl\[{name}\]'"):
        load_monitors(MonitorSettings(use=(name,)), info(tmp_path))


def test_the_default_monitors_import_neither_torch_nor_a_tracker() -> None:
    code = (
        "import sys, gleanrl.tracking.monitors as m;"
        "print([n for n in ('torch','tensorboard','wandb','trackio','mlflow') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_console_passed_by_the_caller_is_used_as_the_console_monitor(tmp_path: Path) -> None:
    console = Console()
    seen: list[int] = []
    console.log = lambda step, metrics: seen.append(step)  # type: ignore[method-assign]
    load_monitors(MonitorSettings(use=("console",)), info(tmp_path), console=console).log(4, {})
    assert seen == [4]
