"""Defines every setting of an embodied run, by section, with its default and its meaning."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gleanrl.utils.settings import (
    Changeable,
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
    """Id of a Gymnasium environment: a registered id, or `module:Id` if importing the module registers it. Its actions
    must be a bounded Box."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`, such as the environment's own options."""
    count: Positive = 4
    """Number of copies of the environment that are stepped together."""
    chunk: Positive = 1
    """Number of actions that the policy returns at once (an action chunk). They are executed one after the other
    without a new observation. If an episode ends inside a chunk, the remaining actions are skipped."""
    vectorization: Changeable[Literal["sync", "async"]] = "sync"
    """How the training environments are stepped. sync: one after the other, in the process of the run. async: at the
    same time, each in its own process. The results are the same."""


class ScheduleSettings(Settings):
    chunk_steps: Positive = 16
    """Number of chunk steps (executions of one action chunk) of every environment in a trajectory. Each step of the run
    samples one trajectory, which covers all environments, and then makes the updates that are due."""
    warmup: NonNegative = 10
    """Number of steps at the start of the run in which actions are random and no updates are made, to fill the buffer.
    0 = none."""
    lag: NonNegative = 1
    """Number of steps by which the policy that samples a trajectory is older than the newest one. 0: sampling and
    learning alternate. 1 or more: they overlap, which is faster but less on-policy. With every value, a run is
    reproducible bit for bit."""


class LearnerSettings(Settings):
    """Settings of soft actor-critic (Haarnoja et al., 2018) with automatic temperature.

    The options ``critics`` and ``layer_norm`` are those of RLPD (Ball et al., 2023).
    """

    update_ratio: PositiveFloat = 1.0
    """Number of updates per chunk step that each environment adds to the buffer. It may be a fraction. Higher values
    learn more from the same data, at a higher cost."""
    batch: Positive = 256
    """Number of chunk steps in the batch of an update, demonstrations included. Updates begin once the buffer has
    enough of them."""
    gamma: Fraction = 0.99
    """Discount factor per environment step (not per chunk step), from 0 to 1."""
    tau: Annotated[float, Field(gt=0.0, le=1.0)] = 0.005
    """Fraction by which the target critics move towards the critics after each update, above 0 and at most 1. Smaller
    values give more stable, but slower targets."""
    actor_lr: PositiveFloat = 3e-4
    """Learning rate of the policy (Adam, constant)."""
    critic_lr: PositiveFloat = 3e-4
    """Learning rate of the critics (Adam, constant)."""
    temperature_lr: PositiveFloat = 3e-4
    """Learning rate of the entropy temperature (Adam, constant)."""
    initial_temperature: PositiveFloat = 1.0
    """Initial value of the entropy temperature, the factor of the entropy bonus, which is adapted to reach
    `target_entropy`."""
    target_entropy: float | None = None
    """Entropy in nats towards which the temperature is adapted. None: minus the number of values in an action chunk
    (action dimensions x `environment.chunk`)."""
    hidden_size: Positive = 256
    """Width of the hidden layers of the policy and of each critic."""
    layers: Positive = 2
    """Number of hidden layers of the policy and of each critic."""
    critics: Annotated[int, Field(ge=2)] = 2
    """Number of critics, at least 2. Targets are the minimum over two critics, which are drawn at random for each
    update if there are more. The policy is trained on the minimum of two critics, or on the mean of more."""
    layer_norm: bool = False
    """Whether the critics have layer normalisation, which keeps their values from diverging at a high
    `update_ratio`."""
    device: Changeable[str] = "cpu"
    """Device of the updates, such as cpu or cuda. The policy that samples always runs on the CPU."""


class BufferSettings(Settings):
    max_rows: Positive | None = None
    """Maximum number of chunk steps that the buffer keeps, over all environments. The oldest are dropped, usually a
    whole file at a time, but never the newest trajectory. The whole trajectories in it must hold at least the share
    of a batch that is sampled from them. None = keep all."""
    window: NonNegative = 0
    """Number of the newest trajectories, each of `schedule.chunk_steps` in all environments, from which batches are
    sampled. They must hold at least the share of a batch that is sampled from them. 0 = all in the buffer."""
    on_disk: bool = True
    """Store the buffer in files in the run folder. It may then be larger than the memory, and a checkpoint only adds
    links to these files. false: the buffer is kept in memory."""
    segment_mb: Positive = 16
    """Approximate size of one of the buffer's files, in MiB."""


class DemonstrationSettings(Settings):
    """The demonstrations, if any, that are mixed into every batch as in RLPD (Ball et al., 2023)."""

    path: str | None = None
    """Folder from which demonstrations are loaded: an earlier run, a buffer, or a checkpoint of a buffer, also one of
    RLinf. Excludes `expert`. None = not from a folder."""
    expert: str | None = None
    """Expert whose demonstrations are recorded before the run: pendulum, mountain_car, or the import path of a function
    from observations [B, D] to action chunks [B, C * A] with values in [-1, 1]. Excludes `path`. None = no expert."""
    chunk_steps: Positive = 200
    """Number of chunk steps that the expert records in each environment, rounded up to whole trajectories."""
    newest: NonNegative = 0
    """Number of the newest trajectories of the demonstrations from which batches are sampled; 0 = all."""
    share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Fraction of each batch that consists of demonstrations, above 0 and below 1. It has no effect without `path` or
    `expert`."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is not None and self.expert is not None:
            raise ValueError("takes a path or an expert, not both")
        return self

    @property
    def given(self) -> bool:
        return self.path is not None or self.expert is not None


class EvaluationSettings(Settings):
    every: Changeable[NonNegative] = 25
    """Number of steps between evaluations; 0 = only before the first and after the last step. The mean action of the
    policy is evaluated, without noise."""
    episodes: Positive = 8
    """Number of episodes per evaluation, each in an environment of its own. All evaluations use the same initial
    states."""


class EmbodiedConfig(JobConfig):
    """All settings of an embodied run."""

    kind: ClassVar[str] = "embodied"

    job: Literal["embodied"] = "embodied"
    """Kind of job. This key must be in a configuration file of an embodied run; without it, the file trains a language
    model."""
    environment: EnvironmentSettings = EnvironmentSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    learner: LearnerSettings = LearnerSettings()
    buffer: BufferSettings = BufferSettings()
    demonstrations: DemonstrationSettings = DemonstrationSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: Changeable[CheckpointSettings] = CheckpointSettings()
    monitor: Changeable[MonitorSettings] = MonitorSettings()

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
