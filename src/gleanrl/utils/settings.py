"""What the configurations of all kinds of job have in common: base classes, number types and the shared sections.

`gleanrl.config.settings` (training of language models) and `gleanrl.embodied.settings` build on this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

T = TypeVar("T")

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
OrNone = Annotated[T | None, BeforeValidator(lambda value: None if value == "none" else value)]
"""Type of a setting whose default is not None but that may be None. TOML has no null value, so that None is written as
the text ``"none"`` there."""
_CHANGEABLE = "may change on --resume"
Changeable = Annotated[T, _CHANGEABLE]
"""Type of a setting, or of a whole section, that may change when a run is resumed. All others must stay the same.

These settings decide how long a run lasts, on which machine and how fast it runs, and what it reports. So all
metrics of a run folder belong to one experiment. The only exceptions are ``learner.lr`` and ``replay.enabled``, which
metrics record at each step.
"""


class Settings(BaseModel):
    """Base class of a section of a configuration. A section is immutable, and its values are checked.

    Unknown keys are refused, and so are infinite numbers and NaN. The docstring under a field is the field's
    description, which the CLI prints.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @classmethod
    def changeable(cls) -> Iterator[str]:
        """Yield the dotted name, such as ``run.steps``, of each setting of type `Changeable`."""
        for name, field in cls.model_fields.items():
            section = field.annotation
            if not (isinstance(section, type) and issubclass(section, Settings)):
                if _CHANGEABLE in field.metadata:
                    yield name
                continue
            inner = section.model_fields if _CHANGEABLE in field.metadata else section.changeable()
            yield from (f"{name}.{key}" for key in inner)


class RunSettings(Settings):
    name: Changeable[str] = Field(default="run", pattern=r"^\.?[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    """Name of the run, and of its folder. Letters, digits, dots, hyphens and underscores are allowed, but not "." or
    "..". If it is not set, the name of the preset or of the configuration file is used."""
    folder: Changeable[str] = "runs"
    """Folder that contains the run folders. The folder of this run is `folder/name`."""
    seed: NonNegative = 0
    """Seed of all random draws of the run."""
    steps: Changeable[Positive] = 20
    """Total number of steps of the run, including those before it was resumed. It may be raised to continue a finished
    run; a learning rate that decays to the last step then follows the longer schedule."""
    threads: Changeable[NonNegative] = 0
    """Number of CPU threads that PyTorch uses for one operation; 0 = PyTorch's default, usually one per core."""


class CheckpointSettings(Settings):
    every: NonNegative = 10
    """Number of steps between two checkpoints; 0 = no checkpoints in between. With any value, a checkpoint is also
    saved when the run ends or is interrupted."""
    keep: Positive = 2
    """Number of checkpoints to keep. When a newer one has been saved, older ones are deleted."""


class MonitorSettings(Settings):
    use: tuple[str, ...] = ("file", "console")
    """Where metrics are written: any of file, console, tensorboard, wandb, trackio and mlflow, or the import path of a
    `Monitor` class. Without file, the report has no metrics of the run to show."""
    project: str = "gleanrl"
    """Name of the project or experiment under which wandb, trackio and mlflow store the run."""


class JobConfig(Settings):
    """All settings of one run. Each kind of job has a subclass that adds the sections that it needs."""

    kind: ClassVar[str]
    """Name of this kind of job, "language model" or "embodied". The command line selects the modules that run the job
    by it."""

    run: RunSettings = RunSettings()

    @property
    def path(self) -> Path:
        """Path of the run folder."""
        return Path(self.run.folder) / self.run.name

    def plan(self) -> dict[str, str]:
        """Return a description of what the run will do: one line of text for each topic, keyed by the topic's name."""
        return {"run folder": str(self.path)}

    def to_toml(self) -> str:
        """Return the resolved configuration as TOML. Reading the TOML gives a configuration equal to this one.

        A configuration that was made in Python may have values in its tables ``options`` that TOML lacks. A tuple is
        read back as a list; None raises `TypeError`.
        """
        return tomli_w.dumps(_toml_values(self))


def _toml_values(settings: Settings) -> dict[str, Any]:
    """Return the settings as nested dicts. None is left out where it is the default; elsewhere it is ``"none"``."""
    values: dict[str, Any] = {}
    for name, value in settings:
        if value is not None:
            values[name] = _toml_values(value) if isinstance(value, Settings) else value
        elif type(settings).model_fields[name].default is not None:
            values[name] = "none"
    return values
