"""Defines every setting of an embodied run, by section, with its default and its meaning."""

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
    """An id that `gymnasium.make_vec` accepts: a registered id, or `module:Id` if a module registers it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`."""
    count: Positive = 4
    """Number of environments that are stepped together."""
    chunk: Positive = 1
    """Number of actions that the policy returns at once. If an episode ends inside a chunk, the rest is skipped."""
    vectorization: Literal["sync", "async"] = "sync"
    """sync steps environments one after the other in this process. async runs each in its own process."""


class ScheduleSettings(Settings):
    chunk_steps: Positive = 16
    """Chunk steps in a trajectory. A step of the run is one trajectory of all environments and its updates."""
    warmup: NonNegative = 10
    """Number of steps at the start with random actions and no updates, which only fill the buffer."""
    lag: NonNegative = 1
    """Trajectory k is always sampled by the policy of step k - lag. With 0, sampling and learning alternate; with more,
    sampling continues while the learner is working. With every value, runs repeat bit for bit."""


class LearnerSettings(Settings):
    """Settings of soft actor-critic (Haarnoja et al., 2018) with automatic temperature.

    The options ``critics`` and ``layer_norm`` are those of RLPD (Ball et al., 2023).
    """

    update_ratio: PositiveFloat = 1.0
    """Number of updates for each chunk step of each environment."""
    batch: Positive = 256
    """Number of chunk steps in the batch of an update."""
    gamma: Fraction = 0.99
    """Discount for one environment step."""
    tau: Annotated[float, Field(gt=0.0, le=1.0)] = 0.005
    """Share by which the target networks move towards the critics at each update."""
    actor_lr: PositiveFloat = 3e-4
    critic_lr: PositiveFloat = 3e-4
    temperature_lr: PositiveFloat = 3e-4
    initial_temperature: PositiveFloat = 1.0
    target_entropy: float | None = None
    """Entropy that the temperature keeps the policy at. None: minus the number of action values in a chunk."""
    hidden_size: Positive = 256
    layers: Positive = 2
    critics: Annotated[int, Field(ge=2)] = 2
    """Number of critics. With more than 2, each target is the lower value of two critics drawn at random, and the
    policy is trained on the mean of all."""
    layer_norm: bool = False
    """Whether the critics use layer norm."""
    device: str = "cpu"
    """Device of the updates. The policy that acts is on the CPU."""


class BufferSettings(Settings):
    max_rows: Positive | None = None
    """Number of chunk steps to keep. The oldest are dropped, in whole segments. None = keep all."""
    window: NonNegative = 0
    """Number of newest trajectories to sample from; 0 = all."""
    on_disk: bool = True
    """Store the buffer in the run folder, so that it may be larger than memory and a checkpoint only adds links."""
    segment_mb: Positive = 16
    """Approximate size of a file."""


class DemonstrationSettings(Settings):
    """The demonstrations, if any, that are mixed into every batch as in RLPD (Ball et al., 2023)."""

    path: str | None = None
    """Folder of a run, a buffer or a buffer's checkpoint. The buffer may be one of RLinf."""
    expert: str | None = None
    """Expert to record instead of a path: pendulum, mountain_car, or an import path of a function from observations
    [B, D] to actions [B, C * A] in [-1, 1]."""
    chunk_steps: Positive = 200
    """Number of chunk steps that are recorded from the expert in each environment."""
    newest: NonNegative = 0
    """Number of newest trajectories to use; 0 = all."""
    share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of demonstrations in a batch."""

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
    """Number of episodes, which start in the same way in every evaluation."""


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
        """Number of chunk steps that each step of the run adds to the buffer."""
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
