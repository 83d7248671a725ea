"""A run inside this process: parts are built here and wired to one another, and torn down in order."""

from __future__ import annotations

import asyncio
import fcntl
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gleanrl import atomic, batch
from gleanrl.checkpoints import Checkpoints
from gleanrl.config import Config
from gleanrl.context import Renderer
from gleanrl.curriculum import Plan, TaskStream
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.errors import UserError
from gleanrl.evaluation import evaluate
from gleanrl.importing import load_object
from gleanrl.learners.torch import TorchLearner
from gleanrl.monitors import Console, RunInfo, load_monitors
from gleanrl.protocols import Metrics, Reward, Sampler
from gleanrl.rewards import EnvironmentReward
from gleanrl.rollout import Player
from gleanrl.runfolder import RunFolder
from gleanrl.runtime.baselines import baselines
from gleanrl.runtime.evaluator import BackgroundEvaluator
from gleanrl.runtime.observer import RunObserver
from gleanrl.runtime.prepare import Prepared, prepare
from gleanrl.samplers.transformers import TransformersSampler
from gleanrl.schedule import DeviceLease, Pacer, Schedule
from gleanrl.seeding import derive
from gleanrl.timeline import Timeline
from gleanrl.train import Run, restore, train


def run_training(config: Config, *, resume: bool, console: Console) -> bool:
    """Train as configured. True if the run is complete, False if it was interrupted and can be resumed.

    Raises:
        UserError: whatever the user can mend.
    """
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    folder = RunFolder(config.path)
    with claimed(folder, resume=resume):
        prepared = prepare(config, console)
        atomic.write_text(folder.config_path, config.to_toml())
        prepared.tokenizer.save_pretrained(folder.tokenizer_path)
        return asyncio.run(_train(Builder(config, folder, prepared, console), resume=resume))


def run_evaluation(config: Config, checkpoint: Path | None, console: Console) -> Metrics:
    """Evaluate the configuration's model, or a checkpoint of its run, on its held-out tasks.

    Raises:
        UserError: whatever the user can mend.
    """
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    prepared = prepare(config, console)
    return asyncio.run(_evaluate(Builder(config, RunFolder(config.path), prepared, console), checkpoint))


async def _evaluate(builder: Builder, checkpoint: Path | None) -> Metrics:
    async with AsyncExitStack() as stack:
        schedule = Schedule.from_settings(builder.config.schedule)
        sampler = await stack.enter_async_context(closing(builder.sampler(schedule, None, None)))
        if checkpoint is not None:
            learner = builder.learner(None, None)
            learner.load(checkpoint)
            await sampler.publish(learner.weights(), 0)
        pool = await stack.enter_async_context(builder.pool())
        settings = builder.config.evaluation
        tasks = builder.prepared.evaluation
        stage = stack.enter_context(
            builder.console.stage("evaluating", len(tasks) * (settings.samples + settings.greedy))
        )
        metrics, _ = await evaluate(
            builder.player(pool, sampler),
            EnvironmentReward(),
            tasks,
            seed=builder.seed("evaluation"),
            samples=settings.samples,
            greedy=settings.greedy,
            done=stage.advance,
        )
    return {**metrics, **builder.baselines()}


async def _train(builder: Builder, *, resume: bool) -> bool:
    async with builder.run(resume=resume) as run:
        if run.step == 0:
            run.observer.log(0, builder.baselines())
        with interrupting(run, builder.console):
            await train(run)
        if not run.interrupted:
            run.learner.export(builder.folder.path / "model")
        return not run.interrupted


@dataclass(frozen=True)
class Builder:
    """Makes the parts of a run from its configuration."""

    config: Config
    folder: RunFolder
    prepared: Prepared
    console: Console

    @asynccontextmanager
    async def run(self, *, resume: bool) -> AsyncIterator[Run]:
        """All parts of a run, wired; closed in reverse order whatever happens."""
        config, schedule = self.config, Schedule.from_settings(self.config.schedule)
        async with AsyncExitStack() as stack:
            timeline = stack.enter_context(Timeline(self.folder.timeline_path))
            lease = DeviceLease(timeline=timeline)
            # samplers first: they copy the plain model, before a learner adds adapters to it
            sampler = await stack.enter_async_context(closing(self.sampler(schedule, lease, timeline)))
            spare = await stack.enter_async_context(closing(self.sampler(schedule, lambda _: lease("evaluate"), None)))
            learner = self.learner(lease, timeline)
            plan = Plan(TaskStream(self.prepared.train, config.schedule.group, self.seed("tasks")), schedule.batch)
            checkpoints = Checkpoints(self.folder.checkpoints_path, config.checkpoint.keep)
            pacer = Pacer(schedule, config.run.steps)
            if resume:
                pacer = restore(checkpoints, learner, plan, schedule, config.run.steps)
                self.console.print(f"resuming {self.folder.path} at step {pacer.version} of {config.run.steps}")
            await sampler.publish(learner.weights(), pacer.version)
            pool = await stack.enter_async_context(self.pool())
            player, reward = self.player(pool, sampler), EnvironmentReward()
            observer = stack.enter_context(self.observer(timeline, sampler, pacer.version, resume=resume))
            yield Run(
                seed=config.run.seed,
                total_steps=config.run.steps,
                schedule=schedule,
                settings=config.schedule,
                player=player,
                rewards=reward,
                learner=learner,
                plan=plan,
                batch=lambda groups: batch.build(groups, config.credit, config.loss, self.max_context),
                evaluator=self.evaluator(player, spare, reward, learner, observer),
                checkpoints=checkpoints,
                checkpoint_every=config.checkpoint.every,
                evaluate_every=config.evaluation.every,
                observer=observer,
                timeline=timeline,
                pacer=pacer,
            )

    @contextmanager
    def observer(self, timeline: Timeline, sampler: Any, step: int, *, resume: bool) -> Iterator[RunObserver]:
        """Monitors and progress bar, open while the block runs."""
        config = self.config
        info = RunInfo(
            self.folder,
            project=config.monitor.project,
            config=config.model_dump(mode="json"),
            resumed_step=step if resume else None,
        )
        with ExitStack() as stack:
            monitors = load_monitors(config.monitor, info, console=self.console)
            stack.callback(monitors.close)
            training = stack.enter_context(self.console.stage("training", config.run.steps, done=step))
            yield RunObserver(
                self.folder,
                monitors,
                timeline,
                rollouts_per_step=config.monitor.rollouts_per_step,
                counters=sampler.stats,
                training=training,
            )

    def baselines(self) -> Metrics:
        config = self.config
        return baselines(
            self.prepared.taskset,
            self.prepared.evaluation,
            max_turns=config.context.max_turns,
            seed=config.run.seed,
            progress=self.console,
        )

    def evaluator(
        self, player: Player, sampler: Sampler, reward: Reward, learner: TorchLearner, observer: RunObserver
    ) -> BackgroundEvaluator:
        return BackgroundEvaluator(
            player,
            sampler,
            reward,
            self.prepared.evaluation,
            self.config.evaluation,
            self.seed("evaluation"),
            learner.weights,
            observer.evaluated,
            self.console,
            done=evaluated_steps(self.folder),
        )

    @property
    def max_context(self) -> int:
        """Tokens that model and configuration both allow."""
        own = getattr(self.prepared.model.config, "max_position_embeddings", None)
        return min(self.config.model.max_context, own or self.config.model.max_context)

    def learner(self, lease: DeviceLease | None, timeline: Timeline | None) -> TorchLearner:
        config, tokenizer = self.config, self.prepared.tokenizer
        return TorchLearner(
            self.prepared.model,
            config.learner,
            config.loss,
            total_steps=config.run.steps,
            groups_per_step=config.schedule.batch,
            pad_token=tokenizer.pad_token_id or 0,
            temperature=config.sampler.temperature,
            tokenizer=tokenizer,
            device_lease=lease,
            timeline=timeline,
        )

    def sampler(self, schedule: Schedule, lease: Callable[[Any], Any] | None, timeline: Timeline | None) -> Any:
        settings = self.config.sampler
        deterministic = settings.deterministic if settings.deterministic != "auto" else schedule.staleness == 0
        factory = TransformersSampler if settings.name == "transformers" else load_object(settings.name)
        return factory(
            self.prepared.model,
            max_rows=settings.max_rows,
            max_context=self.max_context,
            deterministic=deterministic,
            inflight=schedule.inflight,
            device_lease=lease,
            timeline=timeline,
            **settings.options,
        )

    def pool(self) -> EnvironmentPool:
        settings = self.config.environment
        return EnvironmentPool(self.prepared.taskset, workers=settings.workers, timeout_s=settings.timeout_s)

    def player(self, pool: EnvironmentPool, sampler: Sampler) -> Player:
        return Player(
            pool.environment,
            sampler,
            Renderer(self.prepared.tokenizer),
            self.config.context,
            temperature=self.config.sampler.temperature,
            max_context=self.max_context,
        )

    def seed(self, name: str) -> int:
        return derive(self.config.run.seed, name)


def evaluated_steps(folder: RunFolder) -> frozenset[int]:
    """Steps that the run has evaluated already."""
    rows = folder.read_metrics() if folder.metrics_path.exists() else []
    return frozenset(row.step for row in rows if any(name.startswith("eval/sampled") for name in row.metrics))


@asynccontextmanager
async def closing(sampler: Any) -> AsyncIterator[Any]:
    """Close a sampler at the end (its method is called close, not aclose)."""
    try:
        yield sampler
    finally:
        await sampler.close()


@contextmanager
def claimed(folder: RunFolder, *, resume: bool) -> Iterator[None]:
    """The run folder is this process's alone while the block runs.

    Raises:
        UserError: another process holds it, or it holds a run and ``resume`` is off (or none and it is on).
    """
    if resume and not folder.config_path.exists():
        raise UserError(f"{folder.path} holds no run to resume; leave --resume out to start one")
    if not resume and folder.config_path.exists():
        raise UserError(f"{folder.path} already holds a run; continue it with --resume or choose another --run.name")
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = (folder.path / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot make the run folder {folder.path}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder.path} is in use by another process") from None
        yield


@contextmanager
def interrupting(run: Run, console: Console) -> Iterator[None]:
    """Ctrl-C (or SIGTERM) ends the run cleanly at a step boundary; a second one ends it now."""
    loop = asyncio.get_running_loop()
    current = asyncio.current_task()

    def stop() -> None:
        if run.interrupted and current is not None:
            current.cancel()
            return
        console.print("stopping: the step under way is finished and saved; press Ctrl-C again to stop at once")
        run.interrupt()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
