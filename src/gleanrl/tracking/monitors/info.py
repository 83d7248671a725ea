"""What a monitor is told about the run that it will see."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gleanrl.runtime.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The one argument of every monitor.

    ``resumed_step`` is the last step that the resumed checkpoint holds; None = a new run.
    ``config`` is the resolved configuration, as plain nested values.
    """

    folder: RunFolder
    project: str = "gleanrl"
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed_step: int | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    def remembered_id(self, tracker: str, fresh: str | None = None) -> str:
        """The id under which ``tracker`` knows this run: made once (or ``fresh``), found again on resume."""
        path = self.folder.path / "trackers" / f"{tracker}.id"
        if self.resumed_step is not None and path.exists():
            return path.read_text(encoding="utf-8").strip()
        path.parent.mkdir(parents=True, exist_ok=True)
        made = fresh or uuid.uuid4().hex[:12]
        path.write_text(made + "\n", encoding="utf-8")
        return made

    def flat_config(self) -> dict[str, Any]:
        """``{"schedule.batch": 16, ...}``, for trackers whose parameters have no sections."""
        return dict(_flatten("", self.config))


def _flatten(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat += _flatten(f"{prefix}{key}.", value)
        else:
            flat.append((f"{prefix}{key}", value))
    return flat
