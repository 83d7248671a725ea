"""Runs a job whose parts are Ray actors. The local runtime connects them; they implement the same protocols.

`gleanrl train --runtime ray` calls `run_training`, `gleanrl evaluate --runtime ray` calls `run_evaluation`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gleanrl.config import validate
from gleanrl.config.settings import Config
from gleanrl.protocols import Metrics
from gleanrl.runtime.local import Builder, evaluate_with, set_up_libraries, train_with
from gleanrl.runtime.prepare import Prepared, prepare
from gleanrl.runtime.process import open_run
from gleanrl.runtime.ray.actors import ActorClient, ActorPool, run_together
from gleanrl.runtime.ray.cluster import Cluster, import_ray, open_cluster
from gleanrl.runtime.ray.environments import EnvironmentService, RayEnvironments, pickle_taskset
from gleanrl.runtime.ray.learner import LearnerService, RayLearner
from gleanrl.runtime.ray.lock import LockAnswers
from gleanrl.runtime.ray.parts import Plans, record_spans
from gleanrl.runtime.ray.rewards import ray_reward_source, reward_actors
from gleanrl.runtime.ray.samplers import LANES, Lane, RaySampler, SamplerPool, SamplerService
from gleanrl.runtime.ray.weights import LearnerLost
from gleanrl.runtime.rewards import RewardSource, make_scorer
from gleanrl.runtime.run_folder import OpenMonitors, RunFolder
from gleanrl.schedule.device_lock import DeviceLock, TakeDevice
from gleanrl.schedule.schedule import Schedule
from gleanrl.schedule.timeline import Timeline
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from gleanrl.utils.progress import Progress


def run_training(config: Config, *, resume: bool, console: Progress, monitors: OpenMonitors) -> bool:
    """Train as `gleanrl.runtime.local.run_training` does.

    A learner that dies is replaced, at most ``ray.max_restarts`` times; the run continues from its last checkpoint.

    Raises:
        UserError: a mistake that the user can fix.
    """
    validate.check(config)
    set_up_libraries(config)
    folder = RunFolder(config.path)
    with open_run(folder, config, resume=resume):
        make_scorer(config.reward)
        with open_cluster(config.ray, console, count_actors(config), ranks=config.learner.ranks) as cluster:
            prepared = prepare(config, console)
            with atomic.directory(folder.tokenizer_path) as partial:
                prepared.tokenizer.save_pretrained(partial)
            builder = RayBuilder.make(config, folder, prepared, console, cluster)
            deaths, most = 0, config.ray.max_restarts
            while True:
                try:
                    return asyncio.run(_train(builder, monitors, resume=resume or deaths > 0))
                except LearnerLost as error:
                    deaths += 1
                    if deaths > most:
                        raise UserError(
                            f"{error}; deaths of the learner: {deaths}, more than ray.max_restarts = {most}; "
                            "go on from its last checkpoint with --resume"
                        ) from None
                    cluster.counts["actors_restarted"] += 1
                    console.print(f"{error}; the run goes on from its last checkpoint ({deaths} of {most})")


def run_evaluation(config: Config, checkpoint: Path | None, console: Progress) -> Metrics:
    """Evaluate as `gleanrl.runtime.local.run_evaluation` does.

    Raises:
        UserError: a mistake that the user can fix.
    """
    set_up_libraries(config)
    make_scorer(config.reward)
    with open_cluster(config.ray, console, count_actors(config), ranks=config.learner.ranks) as cluster:
        builder = RayBuilder.make(config, RunFolder(config.path), prepare(config, console), console, cluster)
        try:
            return asyncio.run(_evaluate(builder, checkpoint))
        except LearnerLost as error:
            raise UserError(f"{error}; its checkpoint was not evaluated, give the same command again") from None


def count_actors(config: Config) -> dict[str, int]:
    """Return the number of actors of each kind."""
    counts = {"learner": 1, "sampler": config.ray.samplers}
    if config.ray.environments:
        counts["environment"] = config.ray.environments
    if config.reward.name != "environment":
        counts["reward"] = 1
    return counts


async def _train(builder: RayBuilder, monitors: OpenMonitors, *, resume: bool) -> bool:
    async with builder.start_actors(LANES, training=True) as started:
        return await train_with(started, monitors, resume=resume)


async def _evaluate(builder: RayBuilder, checkpoint: Path | None) -> Metrics:
    async with builder.start_actors(("evaluate",), training=False) as started:
        return await evaluate_with(started, checkpoint)


@dataclass
class Actors:
    """The actors of a run while they are at work."""

    learner: ActorPool
    samplers: SamplerPool
    environments: ActorPool | None
    rewards: ActorPool | None
    locks: LockAnswers
    timeline: Timeline | None = None


@dataclass(frozen=True)
class ModelShape:
    """A model's configuration, without its weights."""

    config: Any


@dataclass(frozen=True)
class RayBuilder(Builder):
    """Makes a run's parts from actors; `start_actors` yields the one that has them."""

    cluster: Cluster = field(kw_only=True)
    model: list[Any] = field(kw_only=True)  # [reference]
    actors: Actors = field(default=None, kw_only=True)  # type: ignore[assignment]

    @classmethod
    def make(
        cls, config: Config, folder: RunFolder, prepared: Prepared, console: Progress, cluster: Cluster
    ) -> RayBuilder:
        """Make a builder whose model lies in Ray's store instead of in this process."""
        model = [import_ray().put(prepared.model.cpu())]
        absolute = RunFolder(folder.path.absolute())
        without_weights = replace(prepared, model=ModelShape(prepared.model.config))
        return cls(config, absolute, without_weights, console, cluster=cluster, model=model)

    @asynccontextmanager
    async def start_actors(self, lanes: tuple[Lane, ...], *, training: bool) -> AsyncIterator[RayBuilder]:
        """Start all actors, which end with the block, and yield a builder that uses them."""
        config, cluster, settings = self.config, self.cluster, self.config.ray
        colocated = settings.placement == "colocated"
        gpus = {kind: cluster.gpus(kind) for kind in ("learner", "sampler")}
        common = (config, self.folder, self.model, self.prepared.tokenizer, colocated)
        locks = LockAnswers()

        async def take_learner_news(client: ActorClient, spans: Any) -> None:
            record_spans(actors.timeline, client, spans)

        async def take_sampler_news(client: ActorClient, news: Any) -> None:
            actors.samplers.stats[client], spans = news
            record_spans(actors.timeline, client, spans)

        learner = ActorPool(
            *(cluster, "learner", 1, LearnerService),
            (Plans(*common, gpus["learner"]), self.seed("run"), training),
            answers={**locks.answers, "news": take_learner_news},
            restarts=0,  # the whole run goes back to its last checkpoint instead
        )
        samplers = ActorPool(
            *(cluster, "sampler", settings.samplers, SamplerService),
            (Plans(*common, gpus["sampler"]), lanes),
            answers={**locks.answers, "news": take_sampler_news},
        )
        for pool in (learner, samplers):
            pool.left.append(locks.forget)
        own_gpus = not colocated and min(gpus.values()) >= 1
        way = settings.transfer
        if way == "auto":
            way = "broadcast" if own_gpus and cluster.nodes > 1 else "memory"
        weights = SamplerPool(
            samplers, way, fall_back=settings.transfer == "auto", backend="nccl" if own_gpus else "gloo"
        )
        environments = None
        if settings.environments:
            arguments = (pickle_taskset(self.prepared.taskset), config.environment)
            environments = ActorPool(cluster, "environment", settings.environments, EnvironmentService, arguments)
        rewards = reward_actors(cluster, config.reward, self.folder if training else None)
        actors = Actors(learner, weights, environments, rewards, locks)

        pools = [pool for pool in (learner, samplers, environments, rewards) if pool is not None]
        async with AsyncExitStack() as stack:
            with self.console.stage("starting actors", sum(pool.size for pool in pools)) as stage:
                for pool in pools:
                    stack.push_async_callback(pool.close)
                await run_together(pool.start(stage.advance) for pool in pools)
            yield replace(self, actors=actors)

    # --- parts, as `Builder` makes them -------------------------------------------------------------
    def learner(self, device_lock: DeviceLock | None, timeline: Timeline | None, *, trains: bool = True) -> Any:
        del trains  # the actor knows it from its start
        self.actors.timeline = timeline
        if device_lock is not None:
            self.actors.locks.device_lock = device_lock
        return RayLearner(self.actors.learner)

    def sampler(self, schedule: Schedule, device_lock: TakeDevice | None, timeline: Any, **options: Any) -> Any:
        return RaySampler(self.actors.samplers, "train")

    def evaluation_sampler(self, schedule: Schedule, device_lock: TakeDevice | None, timeline: Any) -> Any:
        return RaySampler(self.actors.samplers, "evaluate")

    def rewards(self, folder: RunFolder | None) -> AbstractAsyncContextManager[RewardSource]:
        return ray_reward_source(self.actors.rewards, self.cluster)

    def environment_pool(self) -> Any:
        environments = self.actors.environments
        return super().environment_pool() if environments is None else RayEnvironments(environments)
