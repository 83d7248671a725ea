"""Settings that the configurations of all jobs have in common: checked sections, constrained types, and the run.

`gleanrl.config.settings` (language models) and `gleanrl.embodied.settings` build on this module.
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
    """A section of a configuration. It is immutable and checked, and unknown keys are refused.

    The docstring under a field is its description.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class RunSettings(Settings):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    folder: str = "runs"
    """Folder in which run folders are made, as `folder/name`."""
    seed: NonNegative = 0
    """Seed of all random draws: tasks, warm start, sampling."""
    steps: Positive = 20
    threads: NonNegative = 0
    """CPU threads of the tensor library; 0 = all cores."""


class CheckpointSettings(Settings):
    every: NonNegative = 10
    """Steps between checkpoints; 0 = only at the end, on interruption and if an error ends the run between steps."""
    keep: Positive = 2


class MonitorSettings(Settings):
    use: tuple[str, ...] = ("file", "console")
    """Any of file, console, tensorboard, wandb, trackio, mlflow, or import paths of a `Monitor`."""
    project: str = "gleanrl"


class JobConfig(Settings):
    """All settings of a run. Each kind of job has a subclass that adds its sections."""

    kind: ClassVar[str]
    """Name of this kind of job."""
    identity: ClassVar[tuple[str, ...]] = ()
    """Keys that identify a run. Their values cannot change on --resume."""

    run: RunSettings = RunSettings()

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.run.folder) / self.run.name

    def plan(self) -> dict[str, str]:
        """Return what a run will do, as lines of text by name."""
        return {"run folder": str(self.path)}

    def to_toml(self) -> str:
        """Return the resolved configuration as TOML. Reading the TOML gives an equal configuration."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))
