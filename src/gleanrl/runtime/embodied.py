"""Runs an embodied job, which trains a control policy with SAC, in this process. Example: ``gleanrl train pendulum``.

`run_training` builds the environments, the buffers, the actor worker and the rollout worker from the configuration, and
closes them at the end. `gleanrl.embodied.loop.Training` is the training loop.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from gleanrl.buffer import MixedReplayBuffer, TrajectoryReplayBuffer
from gleanrl.embodied import demonstrations
from gleanrl.embodied.actor import BUFFERS, ActorWorker, read_state
from gleanrl.embodied.chunks import Progress
from gleanrl.embodied.loop import Training
from gleanrl.embodied.networks import Actor
from gleanrl.embodied.rollout import Rollout, RolloutWorker, evaluate
from gleanrl.embodied.sac import SAC
from gleanrl.embodied.settings import EmbodiedConfig
from gleanrl.runtime.checkpoints import Checkpoints
from gleanrl.runtime.evaluation import EvaluationResult
from gleanrl.runtime.process import handle_signals, open_run
from gleanrl.runtime.run_folder import POLICY, Checkpoint, OpenMonitors, RunFolder, RunInfo
from gleanrl.schedule.timeline import Timeline
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from gleanrl.utils.progress import Progress as Display
from gleanrl.utils.seeding import derive

if TYPE_CHECKING:
    from gleanrl.embodied.environments import Environments

log = logging.getLogger(__name__)

DEVICE_WORK = ("sample", "train", "evaluate", "checkpoint")


def check(config: EmbodiedConfig) -> None:
    """Raise `UserError` if settings of different sections contradict each other.

    The check covers that ``demonstrations.expert`` exists and that each buffer can hold its share of a batch.
    """
    if config.demonstrations.expert is not None:
        demonstrations.find_expert(config.demonstrations.expert)
    batch, rows, settings = config.learner.batch, config.rows_per_step, config.demonstrations
    own, shown = MixedReplayBuffer.divide(batch, settings.share if settings.given else 0.0)
    takes = f"and a batch takes {{}} (learner.batch = {batch})"
    largest, window = config.buffer.max_rows, config.buffer.window
    # Only whole trajectories are dropped, and never the newest one.
    if largest is not None and (kept := max(largest // rows, 1) * rows) < own:
        whole = f"whole trajectories of {rows} chunk steps, so {kept} of them,"
        raise UserError(f"buffer.max_rows = {largest} keeps {whole} {takes.format(own)}")
    if window and window * rows < own:
        raise UserError(f"buffer.window = {window} trajectories hold {window * rows} chunk steps, {takes.format(own)}")
    if settings.expert is not None:
        count = -(-settings.chunk_steps // config.schedule.chunk_steps)
        there = rows * (min(settings.newest, count) if settings.newest else count)
        if there < shown:
            key = "newest" if 0 < settings.newest < count else "chunk_steps"
            given = f"demonstrations.{key} = {getattr(settings, key)} give {there} chunk steps"
            raise UserError(f"{given}, {takes.format(shown)}")


def check_parts(config: EmbodiedConfig, console: Display) -> None:
    """Make an environment and look for the demonstrations, for a dry run. Raises `UserError` if this fails."""
    if config.demonstrations.path is not None:
        demonstrations.find_buffer(Path(config.demonstrations.path))
    with console.stage("making an environment"), open_environments(config, "training", 1):
        pass


def warnings(config: EmbodiedConfig) -> list[str]:
    """Return warnings about unfavourable combinations of settings. The list is always empty for embodied jobs.

    The function exists because the command line calls it for every kind of job.
    """
    return []


def run_training(config: EmbodiedConfig, *, resume: bool, console: Display, monitors: OpenMonitors) -> bool:
    """Train, and return True if all steps are done, or False if the run was interrupted and can be resumed.

    Args:
        resume: continue from the newest checkpoint in the run folder; if there is none, start from step 0.
        monitors: function that starts the run's monitors.

    Raises:
        UserError: a mistake in the configuration, or a damaged file.
    """
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    folder = RunFolder(config.path)
    with open_run(folder, config, console, resume=resume):
        return asyncio.run(_train(config, folder, console, monitors, resume=resume))


async def _train(
    config: EmbodiedConfig, folder: RunFolder, console: Display, monitors: OpenMonitors, *, resume: bool
) -> bool:
    """Build and connect the parts of the run, train, and close the parts in reverse order."""
    steps = config.run.steps
    checkpoints = Checkpoints(folder.checkpoints_path, config.checkpoint.keep, unchecked=(BUFFERS,))
    found = checkpoints.latest() if resume else None
    with ExitStack() as stack:
        timeline = stack.enter_context(Timeline(folder.timeline_path))
        environments = stack.enter_context(open_environments(config, "training", config.environment.count))
        held_out = stack.enter_context(open_environments(config, "evaluation", config.evaluation.episodes))

        # The folder may contain the buffers of a run that was killed. The buffers of the checkpoint replace them, so a
        # damaged file among them must not prevent the run from being resumed. Until the checkpoint is loaded, they are
        # kept, because the checkpoint may be damaged too.
        live, replaced = folder.path / BUFFERS, folder.path / f"{BUFFERS}.replaced"
        if found is not None and live.exists() and not replaced.exists():
            live.rename(replaced)
        shutil.rmtree(live, ignore_errors=True)
        sac = SAC(environments.obs_size, environments.action_size, config.learner, config.run.seed)
        window, max_rows = config.buffer.window, config.buffer.max_rows
        online = stack.enter_context(open_buffer(config, folder, "online", window, max_rows))
        shown = None
        if config.demonstrations.given:
            shown = stack.enter_context(
                open_buffer(config, folder, "demonstrations", config.demonstrations.newest, None)
            )
            if found is None:
                _demonstrate(config, shown, console)
        actor = ActorWorker(sac, online, shown, config)
        if found is not None:
            actor.load(found[0], found[1]["step"])
            shutil.rmtree(replaced, ignore_errors=True)
            console.print(f"resuming {folder.path} at step {actor.step} of {steps}")
        actor.check()
        worker = make_worker(config, environments, actor.progress)

        first_step = actor.step
        resumed = first_step if resume else None
        values = config.model_dump(mode="json")
        info = RunInfo(folder, project=config.monitor.project, config=values, resumed_step=resumed)
        monitor = monitors(info)
        stack.callback(monitor.close)
        stage = stack.enter_context(console.stage("training", steps, done=actor.step))
        evaluated = {row.step for row in folder.read_metrics() if "eval/return" in row.metrics}
        policy = _empty_policy(config, environments)
        since = perf_counter()

        def record_rollout(rollout: Rollout) -> None:
            timeline.record("sample", rollout.started, rollout.ended)

        def log_step(step: int, metrics: dict[str, float], learned: tuple[float, float]) -> None:
            nonlocal since
            timeline.record("train", *learned)
            now = perf_counter()
            busy = {f"time/{kind}_s": timeline.busy(kind, since, now) for kind in DEVICE_WORK}
            monitor.log(step, {**metrics, "time/step_s": now - since, **busy})
            since = now
            stage.advance(1)

        def evaluate_and_save(step: int) -> None:
            stopping = step == steps or training.interrupted
            every = config.evaluation.every
            due = step in (0, steps) or (every and step % every == 0 and not stopping)
            if due and step not in evaluated:
                with timeline.span("evaluate"):
                    policy.load_state_dict(actor.published[-1].state)
                    monitor.log(step, evaluate(policy.mean, held_out))
            every = config.checkpoint.every
            if step and (stopping or (every and step % every == 0)):
                with timeline.span("checkpoint"):
                    checkpoints.save(step, {}, actor.save)

        training = Training(worker, actor, steps, config.schedule.lag, record_rollout, log_step, evaluate_and_save)
        try:
            with handle_signals(training, console):
                await training.run()
            if training.interrupted and actor.step > first_step:  # the interruption may have come in an evaluation
                checkpoints.save(actor.step, {}, actor.save)
        except asyncio.CancelledError:
            if not training.interrupted:
                raise
        except Exception:
            if actor.step > first_step and not training.learning:
                try:
                    checkpoints.save(actor.step, {}, actor.save)
                except Exception as error:  # the error that ends the run matters more
                    log.warning("the run's last state could not be saved: %s", error)
            raise
        complete = actor.step >= steps
        if complete:
            with atomic.file(folder.path / POLICY) as partial:
                save_file(dict(actor.published[-1].state), partial)
        return complete


def run_evaluation(config: EmbodiedConfig, checkpoint: Checkpoint | None, console: Display) -> EvaluationResult:
    """Evaluate the policy in ``checkpoint``, or the randomly initialised policy if ``checkpoint`` is None.

    Raises:
        UserError: a mistake in the configuration, or a damaged file.
    """
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    with open_environments(config, "evaluation", config.evaluation.episodes) as environments:
        sac = SAC(environments.obs_size, environments.action_size, config.learner, config.run.seed)
        if checkpoint is not None:
            sac.load_state_dict(read_state(checkpoint.path)["sac"])
        with console.stage("evaluating"):
            return EvaluationResult(evaluate(sac.actor.cpu().mean, environments))


@contextmanager
def open_environments(config: EmbodiedConfig, use: str, count: int) -> Iterator[Environments]:
    """Yield ``count`` environments, which are closed when the block ends.

    ``use`` ("training", "evaluation" or "demonstrations") is mixed into the seed, so that each use has its own random
    numbers. Raises `UserError` if the environments cannot be made.
    """
    settings = config.environment
    try:
        from gleanrl.embodied.environments import Environments
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        raise UserError("environments need the package 'gymnasium': pip install 'gleanrl[embodied]'") from None
    environments = Environments(
        settings.id,
        settings.options,
        count=count,
        chunk=settings.chunk,
        seed=derive(config.run.seed, use),
        vectorization=settings.vectorization if use == "training" else "sync",
    )
    try:
        yield environments
    finally:
        environments.close()


def open_buffer(
    config: EmbodiedConfig, folder: RunFolder, name: str, window: int, max_rows: int | None
) -> TrajectoryReplayBuffer:
    """Open the run's trajectory buffer ``name`` ("online" or "demonstrations"), in memory or in the run folder.

    ``window`` is the number of newest trajectories that are sampled, and ``max_rows`` the number of chunk steps that
    are kept (None = all). The caller closes the buffer.
    """
    path = folder.path / BUFFERS / name if config.buffer.on_disk else None
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    return TrajectoryReplayBuffer(
        path,
        seed=derive(config.run.seed, "buffer", name) % 2**31,
        sample_window_size=window,
        max_rows=max_rows,
        segment_bytes=config.buffer.segment_mb << 20,
        rank=0,
    )


def _demonstrate(config: EmbodiedConfig, buffer: TrajectoryReplayBuffer, console: Display) -> None:
    """Fill ``buffer`` from the stored buffer ``demonstrations.path``, or with episodes of ``demonstrations.expert``."""
    settings = config.demonstrations
    if settings.path is not None:
        demonstrations.load(buffer, Path(settings.path))
    if settings.expert is not None:
        expert = demonstrations.find_expert(settings.expert)
        with open_environments(config, "demonstrations", config.environment.count) as environments:
            mean = demonstrations.record(buffer, make_worker(config, environments, None), expert, settings.chunk_steps)
        console.print(f"demonstrations: mean return {mean:.4g} of {settings.expert}")
    console.print(f"demonstrations: {buffer.total_samples} chunk steps")


def make_worker(
    config: EmbodiedConfig, environments: Environments, progress: Sequence[Progress] | None
) -> RolloutWorker:
    schedule, policy = config.schedule, _empty_policy(config, environments)
    return RolloutWorker(
        environments,
        policy,
        chunk_steps=schedule.chunk_steps,
        warmup=schedule.warmup,
        seed=config.run.seed,
        progress=progress,
    )


def _empty_policy(config: EmbodiedConfig, environments: Environments) -> Actor:
    """Make a policy network of the configured size. Its weights are arbitrary, because the caller replaces them."""
    sizes = (environments.obs_size, environments.action_size, config.learner.hidden_size, config.learner.layers)
    return Actor(*sizes, torch.Generator().manual_seed(0))
