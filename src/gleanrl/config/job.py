"""What the configurations of all jobs share: the run they describe, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import tomli_w
from pydantic import Field

from gleanrl.config.settings import NonNegative, Positive, Settings


class RunSettings(Settings):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    folder: str = "runs"
    """Where run folders are made: `folder/name`."""
    seed: NonNegative = 0
    """Redraws everything: tasks, warm start, sampling."""
    steps: Positive = 20
    threads: NonNegative = 0
    """CPU threads of the tensor library; 0 = all cores."""


class JobConfig(Settings):
    """All settings of a run."""

    kind: ClassVar[str] = "language model"
    """Which job it is."""
    identity: ClassVar[tuple[str, ...]] = ()
    """Keys that make it the same run: they cannot change on --resume."""

    run: RunSettings = RunSettings()

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.run.folder) / self.run.name

    def plan(self) -> dict[str, str]:
        """What a run will do: a line of text under a name each."""
        return {"run folder": str(self.path)}

    def to_toml(self) -> str:
        """The resolved configuration; reading it back gives an equal one."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value
