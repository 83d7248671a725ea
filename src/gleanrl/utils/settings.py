"""What the configurations of all jobs share: validated sections, constrained types, and the run they describe.

`gleanrl.config.settings` (language models) and `gleanrl.embodied.settings` build on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]


class Settings(BaseModel):
    """A section: immutable and checked, with unknown keys refused. A docstring under a field is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class RunSettings(Settings):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    folder: str = "runs"
    """Where run folders are made: `folder/name`."""
    seed: NonNegative = 0
    """Redraws everything: tasks, warm start, sampling."""
    steps: Positive = 20
    threads: NonNegative = 0
    """CPU threads of the tensor library; 0 = all cores."""


class CheckpointSettings(Settings):
    every: NonNegative = 10
    """Steps between checkpoints; 0 = only at the end, on interruption and where an error ends the run between steps."""
    keep: Positive = 2


class MonitorSettings(Settings):
    use: tuple[str, ...] = ("file", "console")
    """Of: file console tensorboard wandb trackio mlflow, or import paths of a `Monitor`."""
    project: str = "gleanrl"


class JobConfig(Settings):
    """All settings of a run; a subclass for each kind of job adds its sections."""

    kind: ClassVar[str]
    """Name of the job."""
    identity: ClassVar[tuple[str, ...]] = ()
    """Keys that make it the same run: they cannot change on --resume."""

    run: RunSettings = RunSettings()

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.run.folder) / self.run.name

    def plan(self) -> dict[str, str]:
        """What a run will do: lines of text by name."""
        return {"run folder": str(self.path)}

    def to_toml(self) -> str:
        """The resolved configuration as TOML; reading it back gives an equal one."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))
