"""Defines the layout of a run folder and reads its files.

The readers never write to the folder and accept incomplete files, so that the folder of a running, interrupted or
crashed run can be read in the same way as that of a finished run. Example:

    run = RunFolder.existing("runs/sudoku")
    for row in run.read_metrics():
        print(row.step, row.metrics.get("reward/mean"))
"""

from __future__ import annotations

import json
import logging
import re
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gleanrl.protocols import Monitor
from gleanrl.runtime.records import RolloutRecord, read_rollouts
from gleanrl.schedule.timeline import read_timeline
from gleanrl.utils.errors import UserError

log = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"step-(\d+)")
_ROLLOUTS = re.compile(r"step-(\d+)\.jsonl\.zst")

POLICY = "policy.safetensors"
"""File in the folder of an embodied run: the policy after the last step."""

MODEL_STEP = "step.txt"
"""File in the folder of an exported model: the number of steps that it was trained for. The metrics of its run do not
tell this, because the run may have been continued."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of a run.

    The checkpoint is complete, because its folder gets this name only when all files are written. It may have been
    damaged since; `gleanrl.runtime.checkpoints.find_checkpoint` verifies it.
    """

    step: int
    """Number of finished steps."""
    path: Path
    """Folder of the checkpoint."""

    @property
    def run(self) -> RunFolder:
        """The run that the checkpoint belongs to."""
        return RunFolder(self.path.resolve().parents[1])


@dataclass(frozen=True, slots=True)
class Row:
    """All metrics that were logged for one step. ``time`` is when the last of them was logged (Unix time, seconds)."""

    step: int
    time: float
    metrics: dict[str, float]


def find_run(name: Path | str) -> Path:
    """Return the path ``name``, or ``runs/NAME`` if only the latter is a folder.

    It is not checked that the folder exists or that it contains a run; see `RunFolder.existing`.
    """
    path, under = Path(name), Path("runs") / name
    return under if not path.is_dir() and under.is_dir() else path


class RunFolder:
    """The paths of the files in a run folder, and methods that read them. The folder need not exist."""

    def __init__(self, path: Path | str) -> None:
        self.path = path = Path(path)
        self.config_path = path / "config.toml"
        self.lock_path = path / ".lock"  # locked by the process that runs the job
        self.metrics_path = path / "metrics.jsonl"
        self.timeline_path = path / "timeline.jsonl"
        self.events_path = path / "events"  # TensorBoard's event files
        self.rollouts_path = path / "rollouts"
        self.checkpoints_path = path / "checkpoints"
        self.tokenizer_path = path / "tokenizer"
        self.experience_path = path / "experience.sqlite"
        self.pool_start_path = path / "experience.start"  # see `gleanrl.runtime.experience.open_pool`
        self.report_path = path / "report.html"
        self.log_path = path / "run.log"
        self.failures_path = path / "failures.jsonl"  # see `gleanrl.runtime.failures`
        self.evaluations_path = path / "evaluations"  # one folder for each `gleanrl evaluate`
        self.model_path = path / "model"  # the model after the last step
        self.exports_path = path / "exports"  # the folders that `gleanrl export` writes
        self.evaluation_path = path / "evaluation.json"  # only in the folder of an evaluation

    @classmethod
    def existing(cls, path: Path | str) -> RunFolder:
        """Return the run folder at ``path``.

        Raises:
            UserError: ``path`` is not a folder, or it contains neither config.toml nor metrics.jsonl.
        """
        folder = cls(path)
        if not folder.path.is_dir():
            raise UserError(f"no run folder at {folder.path}; give the folder that `gleanrl train` wrote")
        if not folder.metrics_path.exists() and not folder.config_path.exists():
            raise UserError(f"{folder.path} is not a run folder: it has neither config.toml nor metrics.jsonl")
        return folder

    @property
    def name(self) -> str:
        """Name of the run, which is that of the folder."""
        return self.path.resolve().name

    @property
    def exported_step(self) -> int | None:
        """Number of steps of the model that the run has written at its end; None if it has not.

        It is written after everything else. A run that was continued keeps the earlier one until then.
        """
        path = self.model_path / MODEL_STEP
        return int(path.read_text()) if path.exists() else None

    def rollout_path(self, step: int) -> Path:
        """Return the path of the rollouts that ``step`` was trained on."""
        return self.rollouts_path / f"step-{step:06d}.jsonl.zst"

    def checkpoint_path(self, step: int) -> Path:
        """Return the path of the checkpoint after ``step`` finished steps."""
        return self.checkpoints_path / f"step-{step}"

    # --- readers --------------------------------------------------------------------------------
    def read_config(self) -> dict[str, Any]:
        """Return the run's configuration, with defaults filled in, or an empty dict if there is no config.toml.

        Raises:
            UserError: config.toml is not valid TOML.
        """
        try:
            return tomllib.loads(self.config_path.read_bytes().decode())
        except FileNotFoundError:
            return {}
        except ValueError as error:  # of the decoding or of the parser
            raise UserError(f"{self.config_path} is not valid TOML: {error}") from None

    def read_metrics(self) -> list[Row]:
        """Return one row for each step, ordered by step.

        The file may have several lines for a step (training, evaluation, a repeated step after a resume). They are
        merged, and the later line takes precedence. Lines that are not valid JSON are skipped.
        """
        rows: dict[int, Row] = {}
        for line in read_json_lines(self.metrics_path):
            step, time = line.pop("step", None), line.pop("time", None)
            if not isinstance(step, int):
                continue
            numbers = {name: float(value) for name, value in line.items() if isinstance(value, (int, float))}
            before = rows.get(step)
            merged = {**before.metrics, **numbers} if before else numbers
            when = float(time) if time is not None else before.time if before else 0.0
            rows[step] = Row(step, when, merged)
        return [rows[step] for step in sorted(rows)]

    def read_evaluation(self) -> dict[str, Any] | None:
        """Return the content of evaluation.json, which the folder of an evaluation has; None in the folder of a run.

        Raises:
            UserError: the file is not valid JSON.
        """
        try:
            return json.loads(self.evaluation_path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(f"{self.evaluation_path} is not valid JSON: {error}") from None

    def read_timeline(self) -> Iterator[dict[str, Any]]:
        """Yield the spans of the timeline as ``{"kind", "start", "end", ...}``, in the order of the file.

        Times are in seconds since the start of the run.
        """
        if self.timeline_path.exists():
            yield from read_timeline(self.timeline_path)

    def pool_path(self) -> Path:
        """Return the path of the run's experience pool: ``replay.path`` if it is set, else a file in this folder.

        If a relative ``replay.path`` does not exist, it counts from the directory in which the run was started. The
        file may not exist.
        """
        return self.locate_pool(self.read_config().get("replay", {}).get("path"))

    def locate_pool(self, named: str | None) -> Path:
        """Return the path of the experience pool if ``replay.path`` is ``named``; see `pool_path`."""
        path = Path(named or self.experience_path)
        if not path.exists() and self.pool_start_path.exists():
            start = json.loads(self.pool_start_path.read_text(encoding="utf-8"))
            if start["pool"] == named:
                path = Path(start["file"] or path)
        return path

    def rollout_steps(self) -> list[int]:
        """Return the steps that have a rollout file, in ascending order."""
        return sorted(_find_numbered(self.rollouts_path, _ROLLOUTS))

    def read_rollouts(self, step: int) -> Iterator[RolloutRecord]:
        """Yield the records in the rollout file of ``step``; see `gleanrl.runtime.records.read_rollouts`."""
        return read_rollouts(self.rollout_path(step))

    def checkpoints(self) -> list[Checkpoint]:
        """Return all checkpoints, ordered by step. They are not verified; see `Checkpoint`."""
        found = _find_numbered(self.checkpoints_path, _CHECKPOINT)
        return [Checkpoint(step, found[step]) for step in sorted(found) if found[step].is_dir()]


OpenMonitors = Callable[["RunInfo"], Monitor]
"""A function that starts the monitors of a run. The command line passes one that calls
`gleanrl.tracking.monitors.load_monitors`."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Describes the run that a monitor logs. A monitor is constructed with a `RunInfo` as its only argument."""

    folder: RunFolder
    """Folder of the run."""
    project: str = "gleanrl"
    """Name of the project or experiment (``monitor.project``)."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the run, with defaults filled in, as nested dicts of JSON values."""
    resumed_step: int | None = None
    """Number of steps finished in the checkpoint from which the run was resumed; None for a new run."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.folder.name

    def remembered_id(self, tracker: str, fresh: Callable[[], str] | None = None) -> str:
        """Return the id under which this run is known to ``tracker`` (e.g. "wandb"), so that a resumed run keeps it.

        A new run uses the result of ``fresh`` as its id, or a random id if ``fresh`` is None, and stores it in the run
        folder. A resumed run returns the stored id.
        """
        path = self.folder.path / "trackers" / f"{tracker}.id"
        if self.resumed_step is not None and path.exists():
            return path.read_text(encoding="utf-8").strip()
        path.parent.mkdir(parents=True, exist_ok=True)
        made = fresh() if fresh is not None else uuid.uuid4().hex[:12]
        path.write_text(made + "\n", encoding="utf-8")
        return made

    def flat_config(self) -> dict[str, Any]:
        """Return the configuration as a flat dict, such as ``{"schedule.batch": 16}``.

        For trackers that do not support nested parameters.
        """
        flat: dict[str, Any] = {}
        sections: list[tuple[str, Mapping[str, Any]]] = [("", self.config)]
        while sections:
            prefix, values = sections.pop()
            for key, value in values.items():
                if isinstance(value, Mapping):
                    sections.append((f"{prefix}{key}.", value))
                else:
                    flat[prefix + key] = value
        return flat


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file that has one per line. Yields nothing if the file does not exist.

    Lines that are not valid JSON are skipped, with a warning unless it is the last line, which another process may be
    writing.
    """
    if not path.exists():
        return
    skipped, number = 0, 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
            except ValueError:
                skipped = number
                continue
            if isinstance(value, dict):
                yield value
    if skipped and skipped != number:
        log.warning("%s: line %d is not JSON and was skipped", path, skipped)


def _find_numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := pattern.fullmatch(path.name):
            found[int(match[1])] = path
    return found
