"""Runs a job whose learner, samplers, environments and reward agent are Ray actors.

`gleanrl train --runtime ray` calls `run_training`, `gleanrl evaluate --runtime ray` calls `run_evaluation`. The actors
are wrapped in classes that implement the same protocols as the parts of a local run. `RayBuilder` therefore only makes
other parts than `gleanrl.runtime.local.Builder`, and the code of the local runtime connects and runs them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from gleanrl.config import validate
from gleanrl.config.settings import Config
from gleanrl.learners.mapped import stored_weights
from gleanrl.learners.models import skeleton
from gleanrl.runtime.checkpoints import Checkpoints
from gleanrl.runtime.evaluation import EvaluationResult
from gleanrl.runtime.local import Builder, evaluate_with, set_up_libraries, train_with
from gleanrl.runtime.prepare import Prepared, check_tokenizer, prepare
from gleanrl.runtime.process import open_run
from gleanrl.runtime.ray.actors import ActorClient, ActorPool, LearnerLost
from gleanrl.runtime.ray.cluster import Cluster, import_ray, open_cluster
from gleanrl.runtime.ray.environments import EnvironmentService, RayEnvironments, pickle_taskset
from gleanrl.runtime.ray.learner import LearnerService, RankService, RayLearner
from gleanrl.runtime.ray.parts import Plans
from gleanrl.runtime.ray.rewards import RewardActor, make_reward_source
from gleanrl.runtime.ray.samplers import LANES, Lane, RaySampler, SamplerPool, SamplerService
from gleanrl.runtime.ray.weights import Backend, to_bytes
from gleanrl.runtime.rewards import JOURNAL, RewardSource, make_scorer
from gleanrl.runtime.run_folder import Checkpoint, OpenMonitors, RunFolder
from gleanrl.schedule.device_lock import DeviceLock, TakeDevice
from gleanrl.schedule.schedule import Schedule
from gleanrl.schedule.timeline import Timeline
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from gleanrl.utils.progress import Progress

T = TypeVar("T")


def run_training(config: Config, *, resume: bool, console: Progress, monitors: OpenMonitors) -> bool:
    """Train on Ray; see `gleanrl.runtime.local.run_training` for the arguments and the result.

    If the learner dies, the run resumes from its last checkpoint.

    Raises:
        UserError: a mistake that the user can fix, or actors died more often than ``ray.max_restarts`` allows.
    """
    validate.check(config)
    set_up_libraries(config)
    folder = RunFolder(config.path)
    with open_run(folder, config, console, resume=resume):
        make_scorer(config.reward)
        with open_cluster(config.ray, console, count_actors(config)) as cluster:
            restored = resume and Checkpoints(folder.checkpoints_path, config.checkpoint.keep).exist()
            prepared = prepare(config, console, mapped=True, restored=restored, ranks=config.learner.ranks)
            if restored:
                check_tokenizer(folder, config, prepared.tokenizer)
            with atomic.directory(folder.tokenizer_path) as written:
                prepared.tokenizer.save_pretrained(written)
            builder = RayBuilder.make(config, folder, prepared, console, cluster)
            lanes = ("train",) if builder.shares_sampler else LANES

            def work(started: RayBuilder, again: bool) -> Awaitable[bool]:
                return train_with(started, monitors, resume=resume or again)

            return _run_with_actors(builder, lanes, work, training=True)


def run_evaluation(config: Config, checkpoint: Checkpoint | None, console: Progress) -> EvaluationResult:
    """Evaluate on Ray; see `gleanrl.runtime.local.run_evaluation` for the arguments and the result.

    If the learner dies, the evaluation begins again.

    Raises:
        UserError: a mistake that the user can fix, or actors died more often than ``ray.max_restarts`` allows.
    """
    set_up_libraries(config)
    make_scorer(config.reward)
    with open_cluster(config.ray, console, count_actors(config)) as cluster:
        prepared = prepare(config, console, mapped=True, restored=checkpoint is not None)
        builder = RayBuilder.make(config, RunFolder(config.path), prepared, console, cluster)

        def work(started: RayBuilder, again: bool) -> Awaitable[EvaluationResult]:
            return evaluate_with(started, checkpoint)

        return _run_with_actors(builder, ("evaluate",), work, training=False)


def count_actors(config: Config) -> dict[str, int]:
    """Return the number of actors of each kind that a run with this configuration starts."""
    counts = {"learner": config.learner.ranks, "sampler": config.ray.samplers}
    if config.ray.environments:
        counts["environment"] = config.ray.environments
    if config.reward.name != "environment":
        counts["reward"] = 1
    return counts


def _run_with_actors(
    builder: RayBuilder, lanes: tuple[Lane, ...], work: Callable[[RayBuilder, bool], Awaitable[T]], *, training: bool
) -> T:
    """Start all actors, and return the result of ``work(builder, again)``.

    Whenever the learner dies, also while actors start or are called by ``work``, all actors are started again, and
    ``work`` is called again, with ``again`` True.

    Raises:
        KeyboardInterrupt: the learner died after Ctrl-C.
        UserError: the learner died more than ``ray.max_restarts`` times.
    """
    deaths = 0

    async def attempt() -> T:
        async with builder.start_actors(lanes, training=training) as started:
            try:
                return await work(started, deaths > 0)
            except (LearnerLost, UserError):
                raise
            except Exception:
                # The learner's death also makes other actors fail, for example those that are receiving its weights. In
                # this case, the next line raises `LearnerLost`.
                await started.actors.learner.ask("needs_estimates")
                raise

    while True:
        try:
            return asyncio.run(attempt())
        except LearnerLost as error:
            if builder.interruption.interrupted:
                builder.console.print(f"{error}; --resume continues from the last checkpoint")
                raise KeyboardInterrupt from None
            deaths += 1
            builder.cluster.restart(str(error), deaths, "starting all actors again")


async def _start_learner(learner: ActorClient, ranks: list[ActorClient], stack: AsyncExitStack) -> None:
    """Start the actors of the learner and of its other ranks, and make the learner.

    Until ``stack`` is closed, the ranks execute the learner's commands, and the learner gets a report if one dies.
    Raises `LearnerLost` if one of them dies meanwhile.
    """
    await asyncio.gather(*(each.start() for each in (learner, *ranks)))

    async def serve(rank: ActorClient, number: int) -> LearnerLost:
        try:
            await rank.ask("serve", number, *place)
            death = LearnerLost(f"{rank.name} ended")
        except LearnerLost as error:
            death = error
        learner.tell("rank_lost", str(death))
        return death

    serving: list[asyncio.Task[LearnerLost]] = []
    if ranks:
        place = await learner.ask("open_store")
        # Ranks of a node get consecutive numbers, because neighbours exchange the most.
        ranks.sort(key=lambda each: (each.node != learner.node, each.node))
        for number, rank in enumerate(ranks, start=1):
            rank.name = f"rank {number}"
            serving.append(asyncio.create_task(serve(rank, number)))
    building = asyncio.create_task(learner.ask("build"))
    for task in (building, *serving):
        stack.callback(task.cancel)
    await asyncio.wait((building, *serving), return_when=asyncio.FIRST_COMPLETED)
    for task in serving:
        if task.done():
            raise task.result()
    await building


@dataclass(frozen=True)
class Actors:
    """The actors of a run. None for ``environments`` or ``rewards``: the run does not use actors for these."""

    learner: ActorClient
    samplers: SamplerPool
    environments: ActorPool | None
    rewards: ActorPool | None


@dataclass(frozen=True)
class ModelShape:
    """Stands for the model in the driver's `Prepared`: it has the model's transformers configuration but no weights."""

    config: Any


@dataclass(frozen=True)
class RayBuilder(Builder):
    """A `Builder` whose learner, samplers, environments and rewards call Ray actors.

    Construct it by `make`. The parts can be made only by the copy that `start_actors` yields, in which ``actors`` is
    set.
    """

    cluster: Cluster = field(kw_only=True)
    model: list[Any] = field(kw_only=True)  # see `Plans`
    actors: Actors = field(default=None, kw_only=True)  # type: ignore[assignment]

    @classmethod
    def make(
        cls, config: Config, folder: RunFolder, prepared: Prepared, console: Progress, cluster: Cluster
    ) -> RayBuilder:
        """Make a builder, and move its model from this process to Ray's object store."""
        model = [import_ray().put((skeleton(prepared.model), to_bytes(stored_weights(prepared.model))))]
        absolute = RunFolder(folder.path.absolute())
        without_weights = replace(prepared, model=ModelShape(prepared.model.config))
        return cls(config, absolute, without_weights, console, cluster=cluster, model=model)

    @asynccontextmanager
    async def start_actors(self, lanes: tuple[Lane, ...], *, training: bool) -> AsyncIterator[RayBuilder]:
        """Start all actors and yield a builder that uses them. The actors are closed when the block ends.

        Each sampler actor makes a sampler for each of ``lanes``: "train", "evaluate" or both. With ``training`` False
        the learner cannot update, and scores are not written to the journal.
        """
        config, cluster, settings = self.config, self.cluster, self.config.ray
        colocated = settings.placement == "colocated"
        gpus = {kind: cluster.places[kind][1].get("GPU", 0) for kind in ("learner", "sampler")}
        common = (config, self.folder, self.model, self.prepared.tokenizer, colocated)
        arguments: tuple[Any, ...] = (Plans(*common, gpus["sampler"]), lanes)
        samplers = ActorPool(cluster, "sampler", settings.samplers, SamplerService, arguments)
        own_gpus = not colocated and min(gpus.values()) >= 1
        way = settings.transfer
        if way == "auto":
            way = "broadcast" if own_gpus and cluster.nodes > 1 else "memory"
        backend: Backend = "nccl" if own_gpus else "gloo"
        published = SamplerPool(samplers, way, fall_back=settings.transfer == "auto", backend=backend)
        environments = None
        if settings.environments:
            arguments = (pickle_taskset(self.prepared.taskset), config.environment)
            environments = ActorPool(cluster, "environment", settings.environments, EnvironmentService, arguments)
        rewards = None
        if config.reward.name != "environment":
            journal = self.folder.path.absolute() / JOURNAL if training and config.reward.journal else None
            rewards = ActorPool(cluster, "reward", 1, RewardActor, (None, config.reward, journal, {}))

        pools = [pool for pool in (samplers, environments, rewards) if pool is not None]
        plans = Plans(*common, gpus["learner"])
        arguments = (plans, self.seed("run"), training)
        learner = ActorClient(cluster, "learner", LearnerService, arguments, cluster.options("learner", 0))
        ranks: list[ActorClient] = []
        for number in range(1, config.learner.ranks):
            options = cluster.options("learner", number)
            ranks.append(ActorClient(cluster, f"rank {number}", RankService, (plans, training), options))
        async with AsyncExitStack() as stack:
            with self.console.stage("starting actors", 1 + len(ranks) + sum(pool.size for pool in pools)) as stage:
                for each in (*ranks, learner, *pools):
                    stack.push_async_callback(each.close)
                starting = (pool.start(stage.advance) for pool in pools)
                await asyncio.gather(_start_learner(learner, ranks, stack), *starting)
                stage.advance(1 + len(ranks))
            yield replace(self, actors=Actors(learner, published, environments, rewards))

    # --- parts, as `Builder` makes them -------------------------------------------------------------
    def learner(self, device_lock: DeviceLock | None, timeline: Timeline | None, *, trains: bool = True) -> Any:
        del trains  # not needed: `start_actors` has passed ``training`` to the learner's actor
        self.cluster.timeline = timeline
        if device_lock is not None:
            self.cluster.device_lock = device_lock
        return RayLearner(self.actors.learner)

    def sampler(self, schedule: Schedule, device_lock: TakeDevice | None, timeline: Any, **options: Any) -> Any:
        return RaySampler(self.actors.samplers, "train")

    def evaluation_sampler(self, schedule: Schedule, device_lock: TakeDevice | None, timeline: Any) -> Any:
        return RaySampler(self.actors.samplers, "evaluate")

    def rewards(self, folder: RunFolder | None) -> AbstractAsyncContextManager[RewardSource]:
        return nullcontext(make_reward_source(self.actors.rewards, self.cluster))

    def environment_pool(self) -> Any:
        environments = self.actors.environments
        return super().environment_pool() if environments is None else nullcontext(RayEnvironments(environments))
