"""Runs a job whose parts are Ray actors. The local runtime connects them; they implement the same protocols.

`gleanrl train --runtime ray` calls `run_training`, `gleanrl evaluate --runtime ray` calls `run_evaluation`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from gleanrl.config import validate
from gleanrl.config.settings import Config
from gleanrl.protocols import Metrics
from gleanrl.runtime.evaluator import EvaluationWork
from gleanrl.runtime.local import Builder, evaluate_with, set_up_libraries, train_with
from gleanrl.runtime.prepare import Prepared, prepare
from gleanrl.runtime.process import begun, claimed
from gleanrl.runtime.ray.actors import ActorClient, ActorPool, together
from gleanrl.runtime.ray.cluster import Cluster, import_ray, open_cluster
from gleanrl.runtime.ray.environments import EnvironmentService, RayEnvironments, pickle_taskset
from gleanrl.runtime.ray.learner import LearnerService, RayLearner
from gleanrl.runtime.ray.parts import LockAnswers, Plans, record_spans, without_model
from gleanrl.runtime.ray.rewards import ray_reward_source, reward_actors
from gleanrl.runtime.ray.samplers import LANES, Lane, SamplerPool, SamplerService
from gleanrl.runtime.ray.weights import LearnerLost
from gleanrl.runtime.rewards import RewardSource, make_scorer
from gleanrl.runtime.run_folder import OpenMonitors, RunFolder
from gleanrl.schedule.device_lock import DeviceLock
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
    with claimed(folder, resume=resume), begun(folder, config, resume=resume):
        make_scorer(config.reward)
        with open_cluster(config.ray, console, _kinds(config), ranks=config.learner.ranks) as cluster:
            prepared = prepare(config, console)
            with atomic.directory(folder.tokenizer_path) as partial:
                prepared.tokenizer.save_pretrained(partial)
            builder = RayBuilder.of(config, folder, prepared, console, cluster)
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
    with open_cluster(config.ray, console, _kinds(config), ranks=config.learner.ranks) as cluster:
        folder = RunFolder(config.path)
        builder = RayBuilder.of(config, folder, prepare(config, console), console, cluster)
        try:
            return asyncio.run(_evaluate(builder, checkpoint))
        except LearnerLost as error:
            raise UserError(f"{error}; its checkpoint was not evaluated, give the same command again") from None


def _kinds(config: Config) -> dict[str, int]:
    """Return the number of actors of each kind."""
    rewards = 0 if config.reward.name == "environment" else 1
    counts = {
        "learner": 1, "sampler": config.ray.samplers, "environment": config.ray.environments, "reward": rewards
    }  # fmt: skip
    return {kind: count for kind, count in counts.items() if count}


async def _train(builder: RayBuilder, monitors: OpenMonitors, *, resume: bool) -> bool:
    async with builder.actors_started(LANES, training=True):
        return await train_with(builder, monitors, resume=resume)


async def _evaluate(builder: RayBuilder, checkpoint: Path | None) -> Metrics:
    async with builder.actors_started(("evaluate",), training=False):
        return await evaluate_with(builder, checkpoint)


@dataclass
class _Actors:
    """The actors of a run while they are at work."""

    learner: ActorPool
    samplers: SamplerPool
    environments: ActorPool | None
    rewards: ActorPool | None
    locks: LockAnswers
    lanes: tuple[Lane, ...]
    timeline: Timeline | None = None

    def pools(self) -> list[ActorPool]:
        return [p for p in (self.learner, self.samplers.actors, self.environments, self.rewards) if p is not None]


@dataclass(frozen=True)
class RayBuilder(Builder):
    """Makes a run's parts from actors; use it inside `actors_started`."""

    cluster: Cluster = field(kw_only=True)
    model: list[Any] = field(kw_only=True)  # [reference]
    _actors: list[_Actors] = field(default_factory=list, kw_only=True)  # at most one

    @classmethod
    def of(cls, config: Config, folder: RunFolder, prepared: Prepared, console: Progress, cluster: Cluster) -> Self:
        """Make a builder whose model lies in Ray's store instead of in this process."""
        reference = import_ray().put(prepared.model.cpu())
        absolute = RunFolder(folder.path.absolute())
        return cls(config, absolute, without_model(prepared), console, None, cluster=cluster, model=[reference])

    @asynccontextmanager
    async def actors_started(self, lanes: tuple[Lane, ...], *, training: bool) -> AsyncIterator[None]:
        """Start all actors; they end with the block."""
        actors = self._make_actors(lanes, training=training)
        async with AsyncExitStack() as stack:
            with self.console.stage("starting actors", sum(pool.size for pool in actors.pools())) as stage:
                for pool in actors.pools():
                    stack.push_async_callback(pool.close)
                await together(pool.start(stage.advance) for pool in actors.pools())
            self._actors.append(actors)
            stack.callback(self._actors.clear)
            yield

    def _make_actors(self, lanes: tuple[Lane, ...], *, training: bool) -> _Actors:
        config, cluster, settings = self.config, self.cluster, self.config.ray
        locks = LockAnswers()
        colocated = settings.placement == "colocated"

        def plans(kind: str) -> Plans:
            return Plans(config, self.folder, self.model, self.prepared.tokenizer, colocated, cluster.gpus(kind))

        async def learner_news(client: ActorClient, spans: Any) -> None:
            record_spans(self._timeline, client, spans)

        async def sampler_news(client: ActorClient, news: Any) -> None:
            samplers.stats[client], spans = news
            record_spans(self._timeline, client, spans)

        learner = ActorPool(
            *(cluster, "learner", 1, LearnerService, (plans("learner"), self.seed("run"), training)),
            answers={**locks.answers, "news": learner_news},
            restarts=0,  # the whole run goes back to its last checkpoint instead
        )
        sampling = ActorPool(
            *(cluster, "sampler", settings.samplers, SamplerService, (plans("sampler"), lanes)),
            answers={**locks.answers, "news": sampler_news},
        )
        own_gpus = not colocated and min(cluster.gpus("learner"), cluster.gpus("sampler")) >= 1
        way = settings.transfer
        if way == "auto":
            way = "broadcast" if own_gpus and cluster.nodes > 1 else "memory"
        samplers = SamplerPool(
            sampling, way, fall_back=settings.transfer == "auto", backend="nccl" if own_gpus else "gloo"
        )
        for pool in (learner, sampling):
            pool.left.append(locks.forget)
        environments = None
        if settings.environments:
            arguments = (pickle_taskset(self.prepared.taskset), config.environment)
            environments = ActorPool(cluster, "environment", settings.environments, EnvironmentService, arguments)
        rewards = reward_actors(cluster, config.reward, self.folder if training else None)
        return _Actors(learner, samplers, environments, rewards, locks, lanes)

    @property
    def _timeline(self) -> Timeline | None:
        return self._actors[0].timeline if self._actors else None

    # --- parts, as `Builder` makes them -------------------------------------------------------------
    def learner(self, device_lock: DeviceLock | None, timeline: Timeline | None, *, trains: bool = True) -> Any:
        del trains  # the actor knows it from its start
        actors = self._actors[0]
        actors.timeline = timeline
        if device_lock is not None:
            actors.locks.device_lock = device_lock
        return RayLearner(actors.learner)

    def sampler(
        self, schedule: Schedule, device_lock: Callable[[Any], Any] | None, timeline: Any, **instead: Any
    ) -> Any:
        """``instead`` is what the actors give their evaluation's sampler."""
        actors = self._actors[0]
        training = "train" in actors.lanes and not isinstance(timeline, EvaluationWork)
        return actors.samplers.sampler("train" if training else "evaluate")

    def rewards(self, folder: RunFolder | None) -> AbstractAsyncContextManager[RewardSource]:
        return ray_reward_source(self._actors[0].rewards, self.cluster)

    def pool(self) -> Any:
        environments = self._actors[0].environments
        return super().pool() if environments is None else RayEnvironments(environments)
