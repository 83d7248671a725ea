"""Runs the reward agent as a Ray actor, so that one process sends all requests of a cluster to the reward service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gleanrl.config.settings import RewardSettings
from gleanrl.protocols import Metrics
from gleanrl.rewards import EnvironmentReward
from gleanrl.rewards.agent import RewardAgent
from gleanrl.rewards.request import Answer, Item
from gleanrl.runtime.ray.actors import ActorDied, ActorPool, Service
from gleanrl.runtime.ray.cluster import CALLS, Cluster, death_or_cause, import_ray
from gleanrl.runtime.rewards import RewardSource
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError

Lane = Literal["train", "eval"]
_METRICS_S = 10.0  # seconds to wait for the reward agent's metrics; then a step is logged without them


class RewardActor(Service):
    """Holds a reward agent inside an actor. `reward_actor` starts it for any training loop; a run has it in a pool.

    The first call opens the agent. Therefore an actor that Ray restarts (``max_restarts``) continues with its journal.
    """

    def __init__(
        self,
        _driver: Any,
        reward: Any,
        settings: RewardSettings | None,
        journal: Path | None,
        overrides: Mapping[str, Any],
    ) -> None:
        self._arguments = (reward, settings, journal, overrides)
        self._opening: asyncio.Future[RewardAgent] | None = None

    async def start(self) -> None:
        """Open the agent. Raises `UserError` if there is no such reward, or a setting has no meaning."""
        await self._agent()

    async def handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the agent.

        "score_groups" with ``(groups, lane)`` returns the scores of all groups in their order. "score" with ``(task,
        trajectory, lane)`` returns one score. "score_again", "finish" and "metrics" are the methods of `RewardAgent`.
        """
        agent = await self._agent()
        if method == "score_groups":
            groups, lane = arguments
            results = {index: scores async for index, scores in agent.score_groups(groups, lane=lane)}
            return [results[index] for index in range(len(groups))]
        if method == "score":
            task, trajectory, lane = arguments
            return await agent.lane(lane).score(task, trajectory)
        if method == "metrics":
            return dict(agent.metrics())
        return await getattr(agent, method)(*arguments)

    async def close(self) -> None:
        if self._opening is not None:
            await (await self._opening).aclose()

    async def _agent(self) -> RewardAgent:
        if self._opening is None:
            reward, settings, journal, overrides = self._arguments
            agent = RewardAgent(reward, settings, journal=journal, **overrides)
            self._opening = asyncio.ensure_future(agent.__aenter__())
        return await asyncio.shield(self._opening)


# --- for any training loop ----------------------------------------------------------------------------
@dataclass(frozen=True)
class RewardHandle:
    """A `Reward` that calls a reward actor from any process of the cluster. It can be pickled and passed on.

    Attributes:
        actor: Ray's own handle of a `RewardActor`.

    Every call raises `UserError` if the agent does, or if the actor is dead.
    """

    actor: Any

    def score_groups(self, groups: Iterable[Sequence[Item]], *, lane: Lane = "train") -> list[list[Score]]:
        """Return the scores of all groups, in their order. Blocks as `gleanrl.rewards.BlockingRewardAgent` does."""
        with _clear_errors():
            return import_ray().get(self.actor.handle.remote("score_groups", (list(groups), lane)))

    async def score(self, task: Task, trajectory: Answer, *, lane: Lane = "train") -> Score:
        """Return the score of one trajectory. If scoring failed, the score is invalid and holds the reason."""
        with _clear_errors():
            return await self.actor.handle.remote("score", (task, trajectory, lane))

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        """Return the scores of a complete group after post-processing."""
        with _clear_errors():
            return list(await self.actor.handle.remote("finish", (task, list(scores))))

    def metrics(self) -> Metrics:
        """Return the metrics since the last call; docs/howto/rewards.md lists the names."""
        with _clear_errors():
            return import_ray().get(self.actor.handle.remote("metrics", ()))

    def close(self) -> None:
        """Close the agent and end the actor; does nothing if the actor is dead."""
        ray = import_ray()
        try:
            ray.get(self.actor.close.remote())
        except ray.exceptions.RayActorError:
            return
        ray.kill(self.actor)


def reward_actor(
    reward: Any = None,
    settings: RewardSettings | None = None,
    *,
    journal: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> RewardHandle:
    """Start a reward agent as an actor, and wait until it is open.

    Args:
        reward, settings, overrides: see `gleanrl.rewards.RewardAgent`; a reward that is not an import path is pickled.
        journal: a file that the actor can reach on whichever node it runs.
        options: Ray's options for the actor: ``name``, ``lifetime``, ``num_cpus``, ``max_restarts``, ...

    Raises:
        UserError: Ray is not installed, there is no such reward, or a setting has no meaning.
    """
    ray = import_ray("a reward actor")
    absolute = Path(journal).absolute() if journal is not None else None  # actors have another working directory
    remote = ray.remote(RewardActor).options(**{"max_concurrency": CALLS, **(options or {})})
    handle = RewardHandle(remote.remote(None, reward, settings, absolute, overrides))
    try:
        with _clear_errors():
            ray.get(handle.actor.start.remote())
    except UserError:
        ray.kill(handle.actor)
        raise
    return handle


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Raise the actor's errors as a `UserError` of one line, where possible."""
    try:
        yield
    except import_ray().exceptions.RayError as error:
        raised = death_or_cause(error)
        if isinstance(raised, str):
            raise UserError(
                f"the reward actor is dead ({raised}); start another: what its journal holds is not asked again"
            ) from None
        if isinstance(raised, UserError):
            raise UserError(str(raised)) from None
        raise


# --- the reward agent of a run ------------------------------------------------------------------------
@dataclass(frozen=True)
class RayReward:
    """A `Reward` that uses one lane of a run's reward actor.

    If the actor dies, the call is made again on its replacement. Scores in the journal are not requested again.
    """

    actors: ActorPool
    lane: Lane

    async def score(self, task: Task, trajectory: Answer) -> Score:
        return await self.actors.call("score", task, trajectory, self.lane)

    async def score_again(self, task: Task, trajectory: Answer) -> Score:
        """See `RewardAgent.score_again`."""
        return await self.actors.call("score_again", task, trajectory)

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        return await self.actors.call("finish", task, list(scores))


def make_reward_source(actors: ActorPool | None, cluster: Cluster) -> RewardSource:
    """Return the reward of a run; if ``actors`` is None, its environments score. The metrics include the cluster's."""
    if actors is None:
        reward = EnvironmentReward()
        return RewardSource(reward, reward, cluster.metrics)

    def metrics() -> Metrics:
        collected: dict[str, float] = {}
        for actor in actors.members.values():
            try:
                collected |= actor.ask_blocking("metrics", timeout_s=_METRICS_S)
            except ActorDied:  # the actor is being replaced
                continue
        return {**collected, **cluster.metrics()}

    return RewardSource(RayReward(actors, "train"), RayReward(actors, "eval"), metrics)
