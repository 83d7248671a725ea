"""Every setting of an embodied run, by section, with its default and its meaning."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gleanrl.utils.settings import (
    CheckpointSettings,
    Fraction,
    JobConfig,
    MonitorSettings,
    NonNegative,
    Positive,
    PositiveFloat,
    Settings,
)


class EnvironmentSettings(Settings):
    id: str = "Pendulum-v1"
    """What `gymnasium.make_vec` takes: a registered id, or `module:Id` where a module registers it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`."""
    count: Positive = 4
    """Environments that are stepped together."""
    chunk: Positive = 1
    """Actions that the policy gives at once; an episode that ends on the way takes the rest of them no more."""
    vectorization: Literal["sync", "async"] = "sync"
    """sync: one after the other in this process. async: a process each."""


class ScheduleSettings(Settings):
    chunk_steps: Positive = 16
    """Chunk steps of a trajectory; a step of the run is one trajectory of all environments and its updates."""
    warmup: NonNegative = 10
    """First steps that act at random and only fill the buffer."""
    lag: NonNegative = 1
    """Trajectory k is sampled by the policy of step k - lag, exactly: 0 strictly alternates, more lets sampling go on
    while the learner is at work. Every value repeats bit for bit."""


class LearnerSettings(Settings):
    """Soft actor-critic (Haarnoja et al. 2018) with automatic temperature; RLPD's (Ball et al. 2023) options."""

    update_ratio: PositiveFloat = 1.0
    """Updates for each chunk step of each environment."""
    batch: Positive = 256
    """Chunk steps of an update."""
    gamma: Fraction = 0.99
    """Discount of one environment step."""
    tau: Annotated[float, Field(gt=0.0, le=1.0)] = 0.005
    """How far the target networks follow at each update."""
    actor_lr: PositiveFloat = 3e-4
    critic_lr: PositiveFloat = 3e-4
    temperature_lr: PositiveFloat = 3e-4
    initial_temperature: PositiveFloat = 1.0
    target_entropy: float | None = None
    """None: minus the number of action values of a chunk."""
    hidden_size: Positive = 256
    layers: Positive = 2
    critics: Annotated[int, Field(ge=2)] = 2
    """Above 2, each target is the lower value of two of them drawn at random and the policy follows their mean."""
    layer_norm: bool = False
    """Layer norm in the critics."""
    device: str = "cpu"
    """Of the updates; the policy that acts is on the CPU."""


class BufferSettings(Settings):
    max_rows: Positive | None = None
    """Chunk steps kept; the oldest go, by whole segments. None = all."""
    window: NonNegative = 0
    """Sample from so many of the newest trajectories; 0 = from all."""
    on_disk: bool = True
    """In the run folder, so that it may be larger than memory and a checkpoint of it is a few links."""
    segment_mb: Positive = 16
    """About the size of a file."""


class DemonstrationSettings(Settings):
    """Demonstrated chunk steps, mixed into every batch as in RLPD."""

    path: str | None = None
    """A run, or the folder of a buffer or of a checkpoint of one (RLinf's too)."""
    expert: str | None = None
    """Instead: pendulum, mountain_car, or an import path of a function from observations [B, D] to actions [B, C * A]
    in [-1, 1]."""
    chunk_steps: Positive = 200
    """Chunk steps that the expert shows in each environment."""
    newest: NonNegative = 0
    """Use only so many of the newest trajectories; 0 = all."""
    share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Of demonstrations in a batch."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is not None and self.expert is not None:
            raise ValueError("takes a path or an expert, not both")
        return self

    @property
    def given(self) -> bool:
        return self.path is not None or self.expert is not None


class EvaluationSettings(Settings):
    every: NonNegative = 25
    """Steps between evaluations of the policy's mean action; 0 = only at the start and at the end."""
    episodes: Positive = 8
    """The same ones every time."""


class EmbodiedConfig(JobConfig):
    """All settings of an embodied run."""

    kind: ClassVar[str] = "embodied"

    job: Literal["embodied"] = "embodied"
    environment: EnvironmentSettings = EnvironmentSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    learner: LearnerSettings = LearnerSettings()
    buffer: BufferSettings = BufferSettings()
    demonstrations: DemonstrationSettings = DemonstrationSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    monitor: MonitorSettings = MonitorSettings()

    identity: ClassVar[tuple[str, ...]] = (
        "run.seed",
        *(f"environment.{name}" for name in EnvironmentSettings.model_fields if name != "vectorization"),
        *(f"schedule.{name}" for name in ScheduleSettings.model_fields),
        *(f"learner.{name}" for name in ("hidden_size", "layers", "critics", "layer_norm", "initial_temperature")),
        *(f"demonstrations.{name}" for name in ("path", "expert", "chunk_steps")),
    )

    @property
    def rows_per_step(self) -> int:
        """Chunk steps that a step of the run adds to the buffer."""
        return self.schedule.chunk_steps * self.environment.count

    def plan(self) -> dict[str, str]:
        rows, chunk, every = self.run.steps * self.rows_per_step, self.environment.chunk, self.evaluation.every
        warmup = min(self.schedule.warmup, self.run.steps) * self.rows_per_step
        updates = int((rows - warmup) * self.learner.update_ratio)
        shown = self.demonstrations.path or self.demonstrations.expert
        return {
            "run folder": str(self.path),
            "training": f"{self.run.steps} steps x {self.environment.count} {self.environment.id} x "
            f"{self.schedule.chunk_steps} chunks of {chunk} = {rows * chunk} environment steps, "
            f"{warmup * chunk} of them at random",
            "updates": f"{updates} of SAC on {self.learner.batch} chunk steps"
            + (f", {self.demonstrations.share:.0%} of them from {shown}" if shown else ""),
            "evaluation": f"{self.evaluation.episodes} episodes, "
            + (f"every {every} steps" if every else "at the start and at the end"),
        }
