"""Runs an embodied job in this process: ``gleanrl train pendulum``.

`run_training` makes the parts of the run from its configuration (`Builder`), connects them, and closes them in reverse
order. The loop itself is `gleanrl.embodied.loop.Training`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import save_file

from gleanrl.buffer import MixedReplayBuffer, TrajectoryReplayBuffer
from gleanrl.embodied import demonstrations
from gleanrl.embodied.actor import BUFFERS, ActorWorker, read_state
from gleanrl.embodied.chunks import Progress, VectorEnvironments
from gleanrl.embodied.evaluation import evaluate
from gleanrl.embodied.loop import Training
from gleanrl.embodied.networks import Actor
from gleanrl.embodied.rollout import Rollout, RolloutWorker
from gleanrl.embodied.sac import SAC
from gleanrl.embodied.settings import EmbodiedConfig
from gleanrl.protocols import Metrics, Monitor
from gleanrl.runtime.checkpoints import Checkpoints
from gleanrl.runtime.process import handle_signals, open_run
from gleanrl.runtime.run_folder import OpenMonitors, RunFolder, RunInfo
from gleanrl.schedule.timeline import Timeline
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from gleanrl.utils.progress import Progress as Display
from gleanrl.utils.progress import Stage
from gleanrl.utils.seeding import derive

POLICY = "policy.safetensors"
DEVICE_WORK = ("sample", "train", "evaluate", "checkpoint")


def check(config: EmbodiedConfig) -> None:
    """Check settings that depend on other sections. Raises `UserError` that says what to change."""
    if config.demonstrations.expert is not None:
        demonstrations.find_expert(config.demonstrations.expert)
    batch, rows, settings = config.learner.batch, config.rows_per_step, config.demonstrations
    own, shown = MixedReplayBuffer.divide(batch, settings.share if settings.given else 0.0)
    takes = f"and a batch takes {{}} (learner.batch = {batch})"
    largest, window = config.buffer.max_rows, config.buffer.window
    if largest is not None and largest < own:
        raise UserError(f"buffer.max_rows = {largest} chunk steps are kept, {takes.format(own)}")
    if window and window * rows < own:
        raise UserError(f"buffer.window = {window} trajectories hold {window * rows} chunk steps, {takes.format(own)}")
    if settings.expert is not None:
        count = -(-settings.chunk_steps // config.schedule.chunk_steps)
        there = rows * (min(settings.newest, count) if settings.newest else count)
        if there < shown:
            key = "newest" if 0 < settings.newest < count else "chunk_steps"
            given = f"demonstrations.{key} = {getattr(settings, key)} give {there} chunk steps"
            raise UserError(f"{given}, {takes.format(shown)}")


def warnings(config: EmbodiedConfig) -> list[str]:
    """Return warnings about settings that work badly together: none are known."""
    return []


def run_training(config: EmbodiedConfig, *, resume: bool, console: Display, monitors: OpenMonitors) -> bool:
    """Train as configured. Returns whether the run is complete; an interrupted one can be resumed.

    Raises:
        UserError: a mistake in the configuration, or a damaged file.
    """
    _set_threads(config)
    folder = RunFolder(config.path)
    with open_run(folder, config, resume=resume):
        return asyncio.run(_train(Builder(config, folder, console), monitors, resume=resume))


async def _train(builder: Builder, monitors: OpenMonitors, *, resume: bool) -> bool:
    with builder.training(monitors, resume=resume) as training:
        try:
            with handle_signals(training, builder.console):
                await training.run()
        except asyncio.CancelledError:
            if not training.interrupted:
                raise
        complete = training.actor.step >= training.steps
        if complete:
            with atomic.file(builder.folder.path / POLICY) as partial:
                save_file(dict(training.actor.published[-1].state), partial)
        return complete


def run_evaluation(config: EmbodiedConfig, checkpoint: Path | None, console: Display) -> Metrics:
    """Evaluate a checkpoint of the run, or the policy that training starts from (None).

    Raises:
        UserError: a mistake in the configuration, or a damaged file.
    """
    _set_threads(config)
    builder = Builder(config, RunFolder(config.path), console)
    with builder.environments("evaluation", config.evaluation.episodes) as environments:
        actor = SAC(environments.obs_size, environments.action_size, config.learner, config.run.seed).actor
        if checkpoint is not None:
            actor.load_state_dict(read_state(checkpoint)["sac"]["actor"])
        with console.stage("evaluating"):
            return evaluate(actor.cpu().mean, environments)


def _set_threads(config: EmbodiedConfig) -> None:
    if config.run.threads:
        torch.set_num_threads(config.run.threads)


@dataclass(frozen=True)
class Builder:
    """Makes the parts of a run from its configuration."""

    config: EmbodiedConfig
    folder: RunFolder
    console: Display

    @contextmanager
    def training(self, monitors: OpenMonitors, *, resume: bool) -> Iterator[Training]:
        """Yield a run that is ready to start, and close its parts in reverse order."""
        config = self.config
        checkpoints = Checkpoints(self.folder.checkpoints_path, config.checkpoint.keep, unchecked=(BUFFERS,))
        found = checkpoints.latest() if resume else None
        with ExitStack() as stack:
            timeline = stack.enter_context(Timeline(self.folder.timeline_path))
            environments = stack.enter_context(self.environments("training", config.environment.count))
            evaluated = stack.enter_context(self.environments("evaluation", config.evaluation.episodes))
            actor = self.actor(stack, environments, fresh=found is None)
            if found is not None:
                actor.load(found[0], found[1]["step"])
                self.console.print(f"resuming {self.folder.path} at step {actor.step} of {config.run.steps}")
            actor.check()
            worker = self.worker(environments, actor.progress)
            info = RunInfo(
                self.folder,
                project=config.monitor.project,
                config=config.model_dump(mode="json"),
                resumed_step=actor.step if resume else None,
            )
            monitor = monitors(info)
            stack.callback(monitor.close)
            stage = stack.enter_context(self.console.stage("training", config.run.steps, done=actor.step))
            observer = Observer(monitor, timeline, stage)
            boundary = Boundary(config, actor, checkpoints, observer, evaluated, _empty_policy(environments, config))
            boundary.evaluated = {row.step for row in self.folder.read_metrics() if "eval/return" in row.metrics}
            steps, lag = config.run.steps, config.schedule.lag
            training = Training(worker, actor, steps, lag, observer.sampled, observer.step, boundary)
            boundary.training = training
            yield training

    def actor(self, stack: ExitStack, environments: VectorEnvironments, *, fresh: bool) -> ActorWorker:
        """Make the learner and its buffers. A ``fresh`` run removes buffers of one killed before it saved."""
        config, path = self.config, self.folder.path / BUFFERS
        if fresh:
            shutil.rmtree(path, ignore_errors=True)
        sac = SAC(environments.obs_size, environments.action_size, config.learner, config.run.seed)
        buffer = self.buffer(stack, "online", config.buffer.window, config.buffer.max_rows)
        shown = None
        if config.demonstrations.given:
            shown = self.buffer(stack, "demonstrations", config.demonstrations.newest, None)
            if fresh:
                self.demonstrate(shown)
        return ActorWorker(sac, buffer, shown, config)

    def buffer(self, stack: ExitStack, name: str, window: int, max_rows: int | None) -> TrajectoryReplayBuffer:
        settings = self.config.buffer
        path = self.folder.path / BUFFERS / name if settings.on_disk else None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        made = TrajectoryReplayBuffer(
            path,
            seed=derive(self.config.run.seed, "buffer", name) % 2**31,
            sample_window_size=window,
            max_rows=max_rows,
            segment_bytes=settings.segment_mb << 20,
            rank=0,
        )
        stack.callback(made.close)
        return made

    def demonstrate(self, buffer: TrajectoryReplayBuffer) -> None:
        """Fill the buffer of demonstrations from the configured source."""
        config, settings = self.config, self.config.demonstrations
        if settings.path is not None:
            demonstrations.load(buffer, Path(settings.path))
        if settings.expert is not None:
            expert = demonstrations.find_expert(settings.expert)
            with self.environments("demonstrations", config.environment.count) as environments:
                mean = demonstrations.record(buffer, self.worker(environments, None), expert, settings.chunk_steps)
            self.console.print(f"demonstrations: mean return {mean:.4g} of {settings.expert}")
        self.console.print(f"demonstrations: {buffer.total_samples} chunk steps")

    def worker(self, environments: VectorEnvironments, progress: Sequence[Progress] | None) -> RolloutWorker:
        schedule = self.config.schedule
        return RolloutWorker(
            environments,
            _empty_policy(environments, self.config),
            chunk_steps=schedule.chunk_steps,
            warmup=schedule.warmup,
            seed=self.config.run.seed,
            progress=progress,
        )

    @contextmanager
    def environments(self, use: str, count: int) -> Iterator[VectorEnvironments]:
        """Make environments whose random streams depend on ``use``. Raises `UserError` where that is not possible."""
        settings = self.config.environment
        try:
            from gleanrl.embodied.environments import Environments
        except ModuleNotFoundError as error:
            if error.name != "gymnasium":
                raise
            raise UserError("environments need the package 'gymnasium': pip install 'gleanrl[embodied]'") from None
        made = Environments(
            settings.id,
            settings.options,
            count=count,
            chunk=settings.chunk,
            seed=derive(self.config.run.seed, use),
            vectorization=settings.vectorization if use == "training" else "sync",
        )
        try:
            yield made
        finally:
            made.close()


@dataclass
class Observer:
    """Logs each step's metrics and how its time was spent."""

    monitor: Monitor
    timeline: Timeline
    stage: Stage
    since: float = field(default_factory=perf_counter)

    def sampled(self, rollout: Rollout) -> None:
        self.timeline.record("sample", rollout.started, rollout.ended)

    def step(self, step: int, metrics: dict[str, float], learned: tuple[float, float]) -> None:
        self.timeline.record("train", *learned)
        now = perf_counter()
        busy = {f"time/{kind}_s": self.timeline.busy(kind, self.since, now) for kind in DEVICE_WORK}
        self.monitor.log(step, {**metrics, "time/step_s": now - self.since, **busy})
        self.since = now
        self.stage.advance(1)


@dataclass
class Boundary:
    """Evaluates and saves between two steps."""

    config: EmbodiedConfig
    actor: ActorWorker
    checkpoints: Checkpoints
    observer: Observer
    environments: VectorEnvironments
    policy: Actor
    training: Training | None = None
    evaluated: set[int] = field(default_factory=set)  # steps

    def __call__(self, step: int) -> None:
        stopping = step == self.config.run.steps or (self.training is not None and self.training.interrupted)
        every = self.config.evaluation.every
        if step not in self.evaluated and (
            step in (0, self.config.run.steps) or (every and step % every == 0 and not stopping)
        ):
            with self.observer.timeline.span("evaluate"):
                self.policy.load_state_dict(self.actor.published[-1].state)
                self.observer.monitor.log(step, evaluate(self.policy.mean, self.environments))
        every = self.config.checkpoint.every
        if step and (stopping or (every and step % every == 0)):
            with self.observer.timeline.span("checkpoint"):
                self.checkpoints.save(step, {}, self.actor.save)


def _empty_policy(environments: VectorEnvironments, config: EmbodiedConfig) -> Actor:
    """Make a policy whose weights are still to be loaded."""
    sizes = (environments.obs_size, environments.action_size, config.learner.hidden_size, config.learner.layers)
    return Actor(*sizes, torch.Generator().manual_seed(0))
