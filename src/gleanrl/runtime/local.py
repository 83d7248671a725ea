"""Runs a job in this process, whose environments and further learner ranks may use worker processes.

`gleanrl train` calls `run_training`, `gleanrl evaluate` calls `run_evaluation`. `Builder` builds the parts of a run
from its configuration. `gleanrl.runtime.ray` derives its own builder from it and also calls `train_with` and
`evaluate_with`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from gleanrl import samplers
from gleanrl.algorithms.advantages import ESTIMATORS, Estimator
from gleanrl.algorithms.batch import Batch, assign_advantages, build_samples
from gleanrl.config import validate
from gleanrl.config.settings import Config, ReplaySettings
from gleanrl.curriculum.plan import Plan
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.experience import ReplayCurriculum
from gleanrl.experience.guidance.guidance import GUIDANCE_FILE, Guide, load_retriever
from gleanrl.experience.replay.reverify import make_reverifier
from gleanrl.experience.replay.updates import ReplayUpdateLearner, make_policy_estimator
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.distributed.sharded import ShardedEngine
from gleanrl.learners.engine import LocalEngine
from gleanrl.learners.models import compute_dtype
from gleanrl.learners.torch import TorchLearner
from gleanrl.protocols import Curriculum, Learner, Metrics, Sampler
from gleanrl.rewards import EnvironmentReward, Scorer
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.runtime.checkpoints import Checkpoints, restore
from gleanrl.runtime.evaluation import (
    BackgroundEvaluator,
    EvaluationResult,
    EvaluationWork,
    evaluate,
    measure_baselines,
)
from gleanrl.runtime.experience import check_policy, open_pool
from gleanrl.runtime.failures import describe_failures
from gleanrl.runtime.observer import RunObserver
from gleanrl.runtime.prepare import Prepared, check_tokenizer, prepare
from gleanrl.runtime.process import handle_signals, open_run
from gleanrl.runtime.rewards import RewardSource, make_scorer, reward_source
from gleanrl.runtime.run_folder import MODEL_STEP, Checkpoint, OpenMonitors, RunFolder, RunInfo
from gleanrl.runtime.sharded import learner_ranks
from gleanrl.samplers import SAMPLERS, is_deterministic, shares_with_evaluation
from gleanrl.schedule.collapse import CollapseWatch
from gleanrl.schedule.device_lock import DeviceLock, TakeDevice, make_order
from gleanrl.schedule.schedule import Schedule
from gleanrl.schedule.timeline import Timeline
from gleanrl.train import Run, train
from gleanrl.types import SUCCESS, Group
from gleanrl.utils import atomic
from gleanrl.utils.importing import load_object
from gleanrl.utils.interruption import Interruption
from gleanrl.utils.progress import Progress
from gleanrl.utils.seeding import derive

log = logging.getLogger(__name__)


def run_training(config: Config, *, resume: bool, console: Progress, monitors: OpenMonitors) -> bool:
    """Train, and return True if all steps are done, or False if the run was interrupted and can be resumed.

    Args:
        resume: continue from the newest checkpoint in the run folder; if there is none, start from step 0.
        monitors: function that starts the run's monitors.

    Raises:
        UserError: a mistake that the user can fix, such as a wrong setting, a damaged file or a full disk.
    """
    validate.check(config)
    set_up_libraries(config)
    folder = RunFolder(config.path)
    with learner_ranks(config) as ranks, open_run(folder, config, console, resume=resume):
        scorer = make_scorer(config.reward)
        restored = resume and Checkpoints(folder.checkpoints_path, config.checkpoint.keep).exist()
        count = 1 if ranks is None else ranks.count
        prepared = prepare(config, console, mapped=count > 1, restored=restored, ranks=count)
        if restored:
            check_tokenizer(folder, config, prepared.tokenizer)
        with atomic.directory(folder.tokenizer_path) as partial:
            prepared.tokenizer.save_pretrained(partial)
        builder = Builder(config, folder, prepared, console, scorer, ranks)
        return asyncio.run(train_with(builder, monitors, resume=resume))


def run_evaluation(config: Config, checkpoint: Checkpoint | None, console: Progress) -> EvaluationResult:
    """Evaluate a model on the held-out tasks of ``config``.

    The model is the one in ``checkpoint``; if ``checkpoint`` is None, it is the model that a run with this
    configuration starts from (after its warm start).

    Raises:
        UserError: a mistake that the user can fix, such as a wrong setting or a damaged checkpoint.
    """
    samplers.check(config.sampler)
    set_up_libraries(config)
    scorer = make_scorer(config.reward)
    prepared = prepare(config, console, trains=False, restored=checkpoint is not None)
    builder = Builder(config, RunFolder(config.path), prepared, console, scorer)
    return asyncio.run(evaluate_with(builder, checkpoint))


def set_up_libraries(config: Config) -> None:
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    # transformers shows a progress bar while it loads the shards of a model, which would garble our own progress bars.
    transformers_logging.disable_progress_bar()


async def evaluate_with(builder: Builder, checkpoint: Checkpoint | None) -> EvaluationResult:
    if checkpoint is not None:
        check_tokenizer(checkpoint.run, builder.config, builder.prepared.tokenizer)
    async with AsyncExitStack() as stack:
        schedule = Schedule.from_settings(builder.config.schedule)
        sampler = builder.evaluation_sampler(schedule, None, None)
        stack.push_async_callback(sampler.close)
        if checkpoint is not None:
            learner = builder.learner(None, None, trains=False)
            learner.load(checkpoint.path)
            await sampler.publish(learner.weights(), checkpoint.step)
        pool = await stack.enter_async_context(builder.environment_pool())
        rewards = await stack.enter_async_context(builder.rewards(None))
        settings, tasks = builder.config.evaluation, builder.prepared.evaluation
        episodes = len(tasks) * (settings.samples + settings.greedy)
        stage = stack.enter_context(
            builder.console.stage("evaluating", episodes, at_once=builder.config.sampler.max_rows)
        )
        evaluation = await evaluate(
            builder.player(pool, sampler),
            rewards.evaluation,
            tasks,
            seed=builder.seed("evaluation"),
            samples=settings.samples,
            greedy=settings.greedy,
            success_threshold=builder.config.reward.success_threshold,
            done=stage.advance,
        )
    metrics = {**evaluation.metrics(), **builder.measure_baselines()}
    return EvaluationResult(metrics, evaluation, builder.prepared.tokenizer)


async def train_with(builder: Builder, monitors: OpenMonitors, *, resume: bool) -> bool:
    async with builder.run(monitors, resume=resume) as run:
        logged = {name for row in builder.folder.read_metrics() for name in row.metrics}
        if not any(name.startswith("eval/baseline") for name in logged):
            run.observer.log(0, builder.measure_baselines())
        try:
            with handle_signals(run.interruption, builder.console):
                await train(run)
        except asyncio.CancelledError:
            if not run.interruption.interrupted:
                raise
        if not run.interruption.interrupted:
            run.learner.export(builder.folder.model_path)
            atomic.write_text(builder.folder.model_path / MODEL_STEP, f"{run.step}\n")
            if failures := describe_failures(builder.folder, builder.folder.read_metrics()):
                log.warning(failures)
        return not run.interruption.interrupted


@dataclass(frozen=True)
class Builder:
    """Makes the parts of a run (learner, samplers, environments, rewards, ...) from its configuration."""

    config: Config
    folder: RunFolder
    prepared: Prepared
    console: Progress
    scorer: Scorer | None = None  # if None, `rewards` makes the scorer that the configuration names
    ranks: Ranks | None = None  # the processes among which the learner is sharded; None = this process only
    interruption: Interruption = field(default_factory=Interruption)  # set by Ctrl-C

    @asynccontextmanager
    async def run(self, monitors: OpenMonitors, *, resume: bool) -> AsyncIterator[Run]:
        """Build and connect all parts of the run, and yield the `Run` that `gleanrl.train.train` executes.

        With ``resume``, the newest checkpoint is loaded. When the block ends, also by an error, the parts are closed in
        reverse order.
        """
        config, folder, tokenizer = self.config, self.folder, self.prepared.tokenizer
        schedule = Schedule.from_settings(config.schedule)
        checkpoints = Checkpoints(folder.checkpoints_path, config.checkpoint.keep)
        found = checkpoints.latest() if resume else None
        newest = -1 if found is None else found[1]["step"]
        async with AsyncExitStack() as stack:
            timeline = stack.enter_context(Timeline(folder.timeline_path))
            device_lock = DeviceLock(timeline=timeline)
            # The samplers are made before the learner, because they copy the model and the learner may add LoRA
            # adapters to it.
            sampler = self.sampler(schedule, device_lock, timeline)
            stack.push_async_callback(sampler.close)
            evaluation_sampler = sampler
            if not self.shares_sampler:
                evaluation_sampler = self.evaluation_sampler(schedule, device_lock, timeline)
                stack.push_async_callback(evaluation_sampler.close)
            # The warm start consumes random numbers only if it is not cached. Without a new seed here, the run would
            # depend on the cache.
            torch.manual_seed(self.seed("run"))
            learner = self.learner(device_lock, timeline)
            environments = await stack.enter_async_context(self.environment_pool())
            rewards = await stack.enter_async_context(self.rewards(folder))

            # The estimator "remax" compares each group with the reward of a greedy rollout of the same task.
            greedy = "reward_baselines" in self.estimator.needs
            group = config.schedule.group
            curriculum: Curriculum = self.prepared.order(
                config.tasks,
                group=group,
                seed=self.seed("tasks"),
                greedy=greedy,
                success_threshold=config.reward.success_threshold,
            )
            # `updated` is the learner that the training loop calls. With `replay.pool_updates` it wraps `learner` and
            # adds updates on replayed successes to each step.
            updated: Learner = learner
            estimate = make_policy_estimator(learner, self.max_context)
            experience = stack.enter_context(
                open_pool(
                    config,
                    folder,
                    tokenizer,
                    resume=resume,
                    newest=newest,
                    uses_pool=found is not None and "replay" in found[1]["plan"]["curriculum"],
                    max_context=self.max_context,
                )
            )
            if experience is not None:
                reverify = None
                if config.replay.reverify:
                    own = None if isinstance(rewards.train, EnvironmentReward) else rewards.train
                    reverify = make_reverifier(own, environments.environment, self.renderer())
                replay = curriculum = ReplayCurriculum(
                    curriculum,
                    experience,
                    config.replay,
                    total_batches=config.run.steps,
                    group=group,
                    seed=self.seed("replay"),
                    temperature=config.sampler.temperature,
                    staleness=schedule.staleness,
                    ordered=schedule.ordered,
                    estimate=estimate,
                    reverify=reverify,
                    keep_marks=config.checkpoint.keep + 1,
                    kept_steps=lambda: watch.kept_steps if config.checkpoint.return_on_collapse else (),
                    first_step=max(newest, 0),
                )
                if config.replay.pool_updates:
                    updated = ReplayUpdateLearner(
                        learner,
                        experience,
                        config,
                        seed=self.seed("practice"),
                        max_context=self.max_context,
                        begun=lambda: replay.on,
                        reverify=reverify,
                    )
            guide = None
            if config.guidance.enabled:
                if newest < 0:
                    # The run starts from step 0, but an earlier start that was killed may have written this file.
                    (folder.path / GUIDANCE_FILE).unlink(missing_ok=True)
                guide = Guide(
                    config.guidance,
                    load_retriever(config.guidance, folder.path),
                    self.renderer(),
                    seed=self.seed("guidance"),
                    success_threshold=config.reward.success_threshold,
                )
                stack.push_async_callback(guide.close)
                curriculum = guide.curriculum(curriculum)

            plan = Plan(curriculum, schedule.batch)
            controller = restore(found, learner, plan, schedule, config.run.steps)
            watch = CollapseWatch()
            if found is not None:
                watch.load_state_dict(found[1]["watch"])
            if experience is not None:
                # Also if the pool was rewound to a checkpoint: another run may have used it while this one had replay
                # turned off, and set its own tasks.
                experience.set_tasks(self.prepared.train)
            if resume:
                for step in folder.rollout_steps():
                    if step > controller.version:  # of steps that are lost, and made again
                        folder.rollout_path(step).unlink()
                self.console.print(f"resuming {folder.path} at step {controller.version} of {config.run.steps}")
            device_lock.order = make_order(config.schedule.device_first, lambda: controller.ahead)
            await sampler.publish(learner.weights(), controller.version)
            if experience is not None:
                await check_policy(experience, estimate)
            player = self.player(environments, sampler)
            if guide is not None:
                player = guide.player(player)

            info = RunInfo(
                folder,
                project=config.monitor.project,
                config=config.model_dump(mode="json"),
                resumed_step=controller.version if resume else None,
            )
            monitor = monitors(info)
            stack.callback(monitor.close)
            stage = self.console.stage("training", config.run.steps, done=controller.version)
            observer = RunObserver(
                folder,
                monitor,
                timeline,
                rollouts_per_step=config.monitor.rollouts_per_step,
                counters=lambda: {**player.sampler.stats(), "environment_s": player.environment_clock.seconds},
                gauges=rewards.metrics,
                training=stack.enter_context(stage),
            )
            evaluated = set() if config.evaluation.at_start else {0}
            for row in folder.read_metrics():
                if any(name.startswith("eval/sampled") for name in row.metrics):
                    evaluated.add(row.step)
            evaluator = BackgroundEvaluator(
                player,
                evaluation_sampler,
                rewards.evaluation,
                self.prepared.evaluation,
                config.evaluation,
                config.reward.success_threshold,
                self.seed("evaluation"),
                learner.weights,
                observer.evaluated,
                self.console,
                at_once=config.sampler.max_rows,
                done=evaluated,
            )
            yield Run(
                seed=config.run.seed,
                total_steps=config.run.steps,
                settings=config.schedule,
                player=player,
                rewards=rewards.train if guide is None else guide.reward(rewards.train),
                learner=updated,
                plan=plan,
                make_batch=partial(self.make_batch, learner=learner, updated=updated, guide=guide),
                evaluator=evaluator,
                checkpoints=checkpoints,
                checkpoint_every=config.checkpoint.every,
                evaluate_every=config.evaluation.every,
                observer=observer,
                timeline=timeline,
                controller=controller,
                watch=watch,
                return_on_collapse=config.checkpoint.return_on_collapse,
                success_threshold=config.reward.success_threshold,
                interruption=self.interruption,
            )

    async def make_batch(
        self, groups: Sequence[Group], *, learner: TorchLearner, updated: Learner, guide: Guide | None
    ) -> Batch:
        """Turn finished groups into a batch (samples, advantages and loss weights) for an update of ``updated``.

        ``learner`` computes the model estimates, such as values and reference log-probs, which some advantage
        estimators and a KL penalty in the reward need.
        """
        if guide is not None:
            # Guidance inserted text into some prompts. Where a member must not train with this text, it is removed.
            groups = guide.strip(groups)
        if isinstance(updated, ReplayUpdateLearner):
            updated.remember(groups)
        config = self.config
        observations = config.loss.observation_coefficient > 0
        built = build_samples(groups, self.max_context, observations=observations)
        estimates = await learner.estimate(built.samples) if learner.needs_estimates else None
        # Guided members are trained like replayed ones. They must not depend on settings of replay that is off, because
        # a resumed run may change these.
        replay = config.replay if config.replay.enabled else ReplaySettings()
        return assign_advantages(built, config.credit, config.loss, self.max_context, estimates, replay)

    def measure_baselines(self) -> Metrics:
        config = self.config
        # The expert gets the environment's own score. The threshold of another reward would not fit it.
        own = config.reward.name == "environment"
        return measure_baselines(
            self.prepared.taskset,
            self.prepared.evaluation,
            max_turns=config.context.max_turns,
            seed=config.run.seed,
            progress=self.console,
            success_threshold=config.reward.success_threshold if own else SUCCESS,
        )

    @property
    def estimator(self) -> Estimator:
        return ESTIMATORS.get(self.config.credit.estimator)

    @property
    def max_context(self) -> int:
        """The maximum number of tokens in a context: the smaller one of the model's limit and ``model.max_context``."""
        own = getattr(self.prepared.model.config, "max_position_embeddings", None)
        return min(self.config.model.max_context, own or self.config.model.max_context)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sampler's weights and of the learner's forward pass."""
        return compute_dtype(self.config.model, self.prepared.model.device)

    def learner(
        self, device_lock: DeviceLock | None, timeline: Timeline | None, *, trains: bool = True
    ) -> TorchLearner:
        config, tokenizer = self.config, self.prepared.tokenizer
        return TorchLearner(
            self.prepared.model,
            config.learner,
            config.loss,
            total_steps=config.run.steps,
            groups_per_step=config.schedule.batch,
            pad_token=tokenizer.pad_token_id or 0,
            temperature=config.sampler.temperature,
            critic=config.critic if "values" in self.estimator.needs else None,
            tokenizer=tokenizer,
            compute_dtype=self.dtype,
            # A server that samples may have another dtype than the samplers of this run, so it converts them itself.
            published_dtype=None if "server_dtype" in config.sampler.options else self.dtype,
            device_lock=device_lock,
            timeline=timeline,
            engine=LocalEngine if self.ranks is None else partial(ShardedEngine, self.ranks),
            trains=trains,
        )

    def sampler(self, schedule: Schedule, device_lock: TakeDevice | None, timeline: Any, **options: Any) -> Any:
        """Make the configured sampler. ``options`` take precedence over ``sampler.options`` of the configuration.

        If ``device_lock`` is None, the sampler uses the device without taking turns. If ``timeline`` is None, it
        records no spans.
        """
        settings = self.config.sampler
        if settings.name == "vllm":
            learner = self.config.learner
            options |= {"lora_rank": learner.lora_rank, "lora_targets": learner.lora_targets}
        return load_object(SAMPLERS.get(settings.name, settings.name))(
            self.prepared.model,
            max_rows=settings.max_rows,
            max_context=self.max_context,
            deterministic=is_deterministic(self.config),
            inflight=schedule.inflight,
            dtype=self.dtype,
            device_lock=device_lock,
            timeline=timeline,
            **{**settings.options, **options},
        )

    def evaluation_sampler(self, schedule: Schedule, device_lock: TakeDevice | None, timeline: Any) -> Any:
        """Make the sampler for evaluations, whose device holds and timeline spans are named "evaluate".

        ``sampler.evaluation_options`` of the configuration take precedence over ``sampler.options``.
        """
        options = self.config.sampler.evaluation_options
        if device_lock is None:
            return self.sampler(schedule, None, None, **options)
        work = EvaluationWork(device_lock, timeline)
        return self.sampler(schedule, work.device_lock, work, **options)

    @property
    def shares_sampler(self) -> bool:
        """Whether evaluations during training use training's sampler."""
        return shares_with_evaluation(self.config)

    def rewards(self, folder: RunFolder | None) -> AbstractAsyncContextManager[RewardSource]:
        return reward_source(self.config.reward, folder, self.scorer)

    def environment_pool(self) -> EnvironmentPool:
        settings = self.config.environment
        return EnvironmentPool(self.prepared.taskset, workers=settings.workers, timeout_s=settings.timeout_s)

    def renderer(self) -> Renderer:
        options, bodies = self.config.context.template_options, self.config.loss.observation_coefficient > 0
        return Renderer(self.prepared.tokenizer, template_options=options, bodies=bodies)

    def player(self, pool: EnvironmentPool, sampler: Sampler) -> Player:
        return Player(
            pool.environment,
            sampler,
            self.renderer(),
            self.config.context,
            temperature=self.config.sampler.temperature,
            max_context=self.max_context,
            endpoint=pool.endpoint.open if isinstance(pool, EnvironmentPool) else None,
        )

    def seed(self, name: str) -> int:
        return derive(self.config.run.seed, name)


@asynccontextmanager
async def closing(sampler: Any) -> AsyncIterator[Any]:
    """Yield ``sampler`` and close it when the block ends.

    `contextlib.aclosing` cannot be used, because it calls ``aclose``, and a sampler's method is named ``close``.
    """
    try:
        yield sampler
    finally:
        await sampler.close()
