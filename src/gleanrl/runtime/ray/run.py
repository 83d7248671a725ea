"""A run whose parts are Ray actors: the local runtime's wiring, with other parts behind the same protocols."""

from __future__ import annotations

import asyncio
import uuid
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
from gleanrl.runtime.ray.cluster import Cluster, library, opened
from gleanrl.runtime.ray.crew import Crew, together
from gleanrl.runtime.ray.device_lock import Leases
from gleanrl.runtime.ray.environments import EnvironmentService, RayEnvironments, taskset_bytes
from gleanrl.runtime.ray.learner import LearnerService, RayLearner
from gleanrl.runtime.ray.link import Link
from gleanrl.runtime.ray.parts import Plans, recorded, without_model
from gleanrl.runtime.ray.rewards import reward_crew, scored_by
from gleanrl.runtime.ray.samplers import LANES, Lane, SamplerCrew, SamplerService
from gleanrl.runtime.ray.transfer import Transfer
from gleanrl.runtime.ray.weights import LearnerLost, packed
from gleanrl.runtime.rewards import RewardSource, make_scorer
from gleanrl.runtime.run_folder import OpenMonitors, RunFolder
from gleanrl.schedule.device_lock import DeviceLock
from gleanrl.schedule.schedule import Schedule
from gleanrl.schedule.timeline import Timeline
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from gleanrl.utils.progress import Progress


def run_training(config: Config, *, resume: bool, console: Progress, monitors: OpenMonitors) -> bool:
    """As `gleanrl.runtime.local.run_training`. A learner that dies is replaced, and the run goes on from its last
    checkpoint, ``ray.max_restarts`` times at most.

    Raises:
        UserError: whatever the user can mend.
    """
    validate.check(config)
    set_up_libraries(config)
    folder = RunFolder(config.path)
    with claimed(folder, resume=resume), begun(folder, config, resume=resume):
        make_scorer(config.reward)
        with opened(config.ray, console, _kinds(config), ranks=config.learner.ranks) as cluster:
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
    """As `gleanrl.runtime.local.run_evaluation`.

    Raises:
        UserError: whatever the user can mend.
    """
    set_up_libraries(config)
    make_scorer(config.reward)
    with opened(config.ray, console, _kinds(config), ranks=config.learner.ranks) as cluster:
        folder = RunFolder(config.path)
        builder = RayBuilder.of(config, folder, prepare(config, console), console, cluster)
        try:
            return asyncio.run(_evaluate(builder, checkpoint))
        except LearnerLost as error:
            raise UserError(f"{error}; its checkpoint was not evaluated, give the same command again") from None


def _kinds(config: Config) -> dict[str, int]:
    """How many actors there are of each kind."""
    rewards = 0 if config.reward.name == "environment" else 1
    counts = {
        "learner": 1, "sampler": config.ray.samplers, "environment": config.ray.environments, "reward": rewards
    }  # fmt: skip
    return {kind: count for kind, count in counts.items() if count}


async def _train(builder: RayBuilder, monitors: OpenMonitors, *, resume: bool) -> bool:
    async with builder.hired(LANES, builder.folder):
        return await train_with(builder, monitors, resume=resume)


async def _evaluate(builder: RayBuilder, checkpoint: Path | None) -> Metrics:
    async with builder.hired(("evaluate",), None):
        return await evaluate_with(builder, checkpoint)


@dataclass
class _Staff:
    """The actors of a run while there are any."""

    learner: Crew
    samplers: SamplerCrew
    environments: Crew | None
    rewards: Crew | None
    leases: Leases
    lanes: tuple[Lane, ...]
    timeline: Timeline | None = None


@dataclass(frozen=True)
class RayBuilder(Builder):
    """Makes a run's parts of actors; `hired` must be open meanwhile."""

    cluster: Cluster = field(kw_only=True)
    model: list[Any] = field(kw_only=True)  # a reference to it
    _staff: list[_Staff] = field(default_factory=list, kw_only=True)

    @classmethod
    def of(cls, config: Config, folder: RunFolder, prepared: Prepared, console: Progress, cluster: Cluster) -> Self:
        """With the model in Ray's store instead of in this process."""
        reference = library().put(packed(prepared.model.cpu()))
        prepared = without_model(prepared)
        absolute = RunFolder(folder.path.absolute())
        return cls(config, absolute, prepared, console, None, cluster=cluster, model=[reference])

    @asynccontextmanager
    async def hired(self, lanes: tuple[Lane, ...], folder: RunFolder | None) -> AsyncIterator[None]:
        """The actors are at work while the block runs."""
        staff = self._made(lanes, folder)
        crews = [staff.learner, staff.samplers.crew, staff.environments, staff.rewards]
        async with AsyncExitStack() as stack:
            with self.console.stage("starting actors", sum(crew.count for crew in crews if crew)) as stage:
                for crew in filter(None, crews):
                    stack.push_async_callback(crew.close)
                await together(crew.start(stage.advance) for crew in crews if crew)
            stack.callback(staff.samplers.transfer.close)
            self._staff.append(staff)
            stack.callback(self._staff.clear)
            yield

    def _made(self, lanes: tuple[Lane, ...], folder: RunFolder | None) -> _Staff:
        config, cluster = self.config, self.cluster
        leases = Leases()
        colocated = config.ray.placement == "colocated"

        def plans(kind: str) -> Plans:
            return Plans(config, self.folder, self.model, self.prepared.tokenizer, colocated, cluster.gpus(kind))

        async def heard(link: Link, spans: Any) -> None:
            recorded(self._timeline, link, spans)

        async def sampled(link: Link, news: Any) -> None:
            samplers.stats[link], spans = news
            recorded(self._timeline, link, spans)

        seed = self.seed("run")
        learner = Crew(
            cluster, "learner", 1, LearnerService, (plans("learner"), seed, folder is not None),
            answers={**leases.answers, "news": heard}, restarts=0,
        )  # fmt: skip
        crew = Crew(
            cluster, "sampler", config.ray.samplers, SamplerService, (plans("sampler"), lanes),
            answers={**leases.answers, "news": sampled},
        )  # fmt: skip
        samplers = SamplerCrew(crew, self._transfer("train" if folder is not None else f"evaluate-{uuid.uuid4().hex}"))
        for each in (learner, crew):
            each.left.append(leases.forget)
        environments = None
        if config.ray.environments:
            given = (taskset_bytes(self.prepared.taskset), config.environment)
            environments = Crew(cluster, "environment", config.ray.environments, EnvironmentService, given)
        return _Staff(learner, samplers, environments, reward_crew(cluster, config.reward, folder), leases, lanes)

    def _transfer(self, name: str) -> Transfer:
        settings, cluster = self.config.ray, self.cluster
        way = settings.transfer if settings.transfer != "auto" else "memory" if cluster.nodes == 1 else "broadcast"
        nccl = settings.placement == "disaggregated" and min(cluster.gpus(kind) for kind in ("learner", "sampler")) >= 1
        return Transfer(
            way,
            fall_back=settings.transfer == "auto",
            folder=self.folder.path,
            console=self.console,
            name=name,
            nccl=nccl,
            port=settings.port,
            latecomers=settings.max_restarts > 0,
        )

    @property
    def _timeline(self) -> Timeline | None:
        return self._staff[0].timeline if self._staff else None

    # --- parts, as `Builder` has them ---------------------------------------------------------------
    def learner(self, device_lock: DeviceLock | None, timeline: Timeline | None, *, trains: bool = True) -> Any:
        del trains  # its actor was told
        staff = self._staff[0]
        staff.timeline = timeline
        if device_lock is not None:
            staff.leases.device_lock = device_lock
        return RayLearner(staff.learner)

    def sampler(
        self, schedule: Schedule, device_lock: Callable[[Any], Any] | None, timeline: Any, **instead: Any
    ) -> Any:
        """``instead`` is what the actors give their sampler of evaluation."""
        staff = self._staff[0]
        training = "train" in staff.lanes and not isinstance(timeline, EvaluationWork)
        return staff.samplers.sampler("train" if training else "evaluate")

    def rewards(self, folder: RunFolder | None) -> AbstractAsyncContextManager[RewardSource]:
        return scored_by(self._staff[0].rewards, self.cluster)

    def pool(self) -> Any:
        crew = self._staff[0].environments
        return super().pool() if crew is None else RayEnvironments(crew)
