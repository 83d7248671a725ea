"""Locates and reads the files of a run's folder.

Readers never write, and accept incomplete files: the folder of a running, interrupted or crashed run can be
read like that of a finished one.
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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: a folder is renamed to a checkpoint's name only once all its files are written."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Row:
    """All metrics of one step; ``time`` is the Unix time, in seconds, of the step's last line."""

    step: int
    time: float
    metrics: dict[str, float]


def find_run(name: Path | str) -> Path:
    """Return the folder ``name``, or ``runs/NAME`` if only that exists. The folder need not hold a run."""
    path, under = Path(name), Path("runs") / name
    return under if not path.is_dir() and under.is_dir() else path


class RunFolder:
    """Paths and readers of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = path = Path(path)
        self.config_path = path / "config.toml"
        self.metrics_path = path / "metrics.jsonl"
        self.timeline_path = path / "timeline.jsonl"
        self.events_path = path / "events"  # TensorBoard's folder
        self.rollouts_path = path / "rollouts"
        self.checkpoints_path = path / "checkpoints"
        self.tokenizer_path = path / "tokenizer"
        self.experience_path = path / "experience.sqlite"
        self.report_path = path / "report.html"

    @classmethod
    def existing(cls, path: Path | str) -> RunFolder:
        """Return the run at ``path``.

        Raises:
            UserError: there is no run at ``path``.
        """
        folder = cls(path)
        if not folder.path.is_dir():
            raise UserError(f"no run folder at {folder.path}; give the folder that `gleanrl train` wrote")
        if not folder.metrics_path.exists() and not folder.config_path.exists():
            raise UserError(f"{folder.path} is not a run folder: it has neither config.toml nor metrics.jsonl")
        return folder

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def rollout_path(self, step: int) -> Path:
        return self.rollouts_path / f"step-{step:06d}.jsonl.zst"

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints_path / f"step-{step}"

    # --- readers --------------------------------------------------------------------------------
    def read_config(self) -> dict[str, Any]:
        """Return the resolved configuration; empty if the run ended before it wrote config.toml.

        Raises:
            UserError: config.toml is not TOML.
        """
        try:
            return tomllib.loads(self.config_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{self.config_path} is not valid TOML: {error}") from None

    def read_metrics(self) -> list[Row]:
        """Return one row for each step, in order. Lines of one step are merged; a half-written last line is skipped."""
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

    def read_timeline(self) -> Iterator[dict[str, Any]]:
        """Yield spans ``{"kind", "start", "end", ...}`` in seconds since the run's start, as written."""
        if self.timeline_path.exists():
            yield from read_timeline(self.timeline_path)

    def pool_path(self) -> Path:
        """Return the path of the run's experience pool, which may not exist: ``replay.path``, or one in this folder."""
        named = self.read_config().get("replay", {}).get("path")
        return Path(named) if named else self.experience_path

    def rollout_steps(self) -> list[int]:
        """Return the steps that have a rollout file, in order."""
        return sorted(_find_numbered(self.rollouts_path, _ROLLOUTS))

    def read_rollouts(self, step: int) -> Iterator[RolloutRecord]:
        """Yield the trajectories that a step learned from. Raises `UserError` for a line that is not a record."""
        return read_rollouts(self.rollout_path(step))

    def checkpoints(self) -> list[Checkpoint]:
        """Return complete checkpoints, oldest first (`gleanrl.runtime.checkpoints` checks and loads them)."""
        found = _find_numbered(self.checkpoints_path, _CHECKPOINT)
        return [Checkpoint(step, found[step]) for step in sorted(found) if found[step].is_dir()]


OpenMonitors = Callable[["RunInfo"], Monitor]
"""Function that starts a run's monitors. The command line passes `gleanrl.tracking.monitors.load_monitors`."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Describes the run that a monitor watches; the only argument of every monitor.

    ``resumed_step`` is the last step in the resumed checkpoint, or None for a new run.
    ``config`` is the resolved configuration as plain nested values.
    """

    folder: RunFolder
    project: str = "gleanrl"
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed_step: int | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    def remembered_id(self, tracker: str, fresh: str | None = None) -> str:
        """Return this run's id at ``tracker``.

        A new run stores ``fresh``, or a random id if that is None, in the run folder. A resumed run reads the stored
        id.
        """
        path = self.folder.path / "trackers" / f"{tracker}.id"
        if self.resumed_step is not None and path.exists():
            return path.read_text(encoding="utf-8").strip()
        path.parent.mkdir(parents=True, exist_ok=True)
        made = fresh or uuid.uuid4().hex[:12]
        path.write_text(made + "\n", encoding="utf-8")
        return made

    def flat_config(self) -> dict[str, Any]:
        """Return ``{"schedule.batch": 16, ...}``, for trackers whose parameters have no sections."""
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
    """Yield the objects of a JSON-lines file that may be missing or still growing; incomplete lines are skipped."""
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
