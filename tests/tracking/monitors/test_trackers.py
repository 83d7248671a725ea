"""Each tracker monitor writes to its real package, without a network, and continues the same run after a resume.

A test is skipped if its package is not installed.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gleanrl.runtime.run_folder import RunFolder
from gleanrl.tracking.monitors import RunInfo, load_monitors
from gleanrl.utils.settings import MonitorSettings


def run_and_resume(tracker: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> RunFolder:
    """Log steps 1 to 3 with value 0.25, resume from step 2, and log step 3 again with value 0.75."""
    folder = RunFolder(tmp_path / "a-run")
    config = {"schedule": {"batch": 16}, "monitors": {"use": ["file"]}}
    for resumed, steps, value in [(None, (1, 2, 3), 0.25), (2, (3,), 0.75)]:
        about = RunInfo(folder, project="gleanrl-tests", config=config, resumed_step=resumed)
        monitors = load_monitors(MonitorSettings(use=(tracker,)), about)
        for step in steps:
            monitors.log(step, {"reward/mean": value, "eval/sampled/pass@1": 0.5})
        monitors.log_texts(steps[-1], {"task-7": "user: where?\n\nassistant: in the drawer"})
        monitors.close()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("gleanrl")]
    return folder


def test_tensorboard_has_one_value_per_step_after_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run_and_resume("tensorboard", tmp_path, caplog)
    events = EventAccumulator(str(folder.events_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.25), (3, 0.75)]
    assert "eval/sampled/pass@1" in events.Tags()["scalars"]
    text = events.Tensors("samples/0")[-1]
    assert b"in the drawer" in text.tensor_proto.string_val[0]


def test_mlflow_continues_the_same_run_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    # The file store is the only local store that works without SQLAlchemy.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    folder = run_and_resume("mlflow", tmp_path, caplog)
    client = mlflow.tracking.MlflowClient()
    experiment = client.get_experiment_by_name("gleanrl-tests")
    assert experiment is not None
    # Deleted runs are included, so none was created in between.
    (run,) = client.search_runs([experiment.experiment_id], run_view_type=mlflow.entities.ViewType.ALL)
    assert run.info.run_name == "a-run"
    assert run.info.status == "FINISHED"
    assert run.data.params["schedule.batch"] == "16"
    assert [m.value for m in client.get_metric_history(run.info.run_id, "reward/mean")] == [0.25, 0.25, 0.25, 0.75]
    assert run.data.metrics["eval/sampled/pass_1"] == 0.5
    [text] = (tmp_path / "mlruns").rglob("step-000003-0.txt")
    assert "in the drawer" in text.read_text()
    assert (folder.path / "trackers" / "mlflow.id").read_text().strip() == run.info.run_id


def test_wandb_continues_the_same_run_id_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = run_and_resume("wandb", tmp_path, caplog)
    name = (folder.path / "trackers" / "wandb.id").read_text().strip()
    written = list((folder.path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    # The first run and the resumed run have the same id, and each writes a folder that is named after its start time.
    # If both start in the same second, there is only one folder.
    assert len(written) in (1, 2)
    assert b"reward/mean" in b"".join(path.read_bytes() for path in written)
    tables = list((folder.path / "wandb").rglob("samples*.table.json"))
    assert tables
    assert "in the drawer" in tables[0].read_text()


def test_trackio_continues_the_same_run_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    folder = run_and_resume("trackio", tmp_path, caplog)
    name = "a-run-" + (folder.path / "trackers" / "trackio.id").read_text().strip()
    assert storage.get_runs("gleanrl-tests") == [name]
    rows = storage.get_logs("gleanrl-tests", name)
    assert "in the drawer" in repr([row["samples"] for row in rows if "samples" in row])
    values = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert values == [0.25, 0.25, 0.25, 0.75]
