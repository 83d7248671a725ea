"""What watches a run writes what it saw, and never stops the run."""

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


# --- metrics.jsonl ------------------------------------------------------------------------------
def test_every_logged_step_is_on_disk_at_once(tmp_path: Path) -> None:
    about = info(tmp_path)
    monitor = FileMonitor(about)
    monitor.log(1, {"reward/mean": 0.5, "loss/policy": math.nan, "loss/kl": math.inf})
    assert [row.metrics for row in about.folder.read_metrics()] == [{"reward/mean": 0.5}]
    line = json.loads(about.folder.metrics_path.read_text())
    assert line["loss/policy"] is None
    assert line["time"] > 1e9


def test_resuming_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    first = FileMonitor(info(tmp_path))
    for step in range(8):
        first.log(step, {"reward/mean": step / 10})
    first.close()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')  # the crash
    again = FileMonitor(info(tmp_path, resumed=5))
    again.log(6, {"reward/mean": 0.99})
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert [row.step for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert rows[-1].metrics == {"reward/mean": 0.99}
    assert rows[5].metrics == {"reward/mean": 0.5}


def test_a_new_run_in_an_old_folder_starts_its_own_file(tmp_path: Path) -> None:
    FileMonitor(info(tmp_path)).log(1, {"a": 1.0})
    FileMonitor(info(tmp_path)).log(1, {"b": 2.0})
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert [row.metrics for row in rows] == [{"b": 2.0}]
    assert isinstance(rows[0], Row)


# --- all of them --------------------------------------------------------------------------------
def test_a_monitor_that_fails_is_named_once_and_the_others_go_on(
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


def test_a_monitor_of_the_users_own_gets_the_run(tmp_path: Path) -> None:
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
def test_a_wrong_name_is_one_clear_line(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_monitors(MonitorSettings(use=(name,)), info(tmp_path))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_missing_package_names_the_extra(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [
        m for m in sys.modules if m == name or m.startswith((f"{name}.", f"gleanrl.tracking.monitors.{name}"))
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)  # importing it raises, as if it were not installed
    with pytest.raises(UserError, match=rf"monitor '{name}' needs .*: pip install 'gleanrl\[{name}\]'"):
        load_monitors(MonitorSettings(use=(name,)), info(tmp_path))


def test_the_default_monitors_import_neither_torch_nor_a_tracker() -> None:
    code = (
        "import sys, gleanrl.tracking.monitors as m;"
        "print([n for n in ('torch','tensorboard','wandb','trackio','mlflow') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_console_is_the_one_that_the_caller_shares(tmp_path: Path) -> None:
    console = Console()
    seen: list[int] = []
    console.log = lambda step, metrics: seen.append(step)  # type: ignore[method-assign]
    load_monitors(MonitorSettings(use=("console",)), info(tmp_path), console=console).log(4, {})
    assert seen == [4]
