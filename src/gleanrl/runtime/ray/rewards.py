"""Runs the reward agent as a Ray actor, so that a single process sends all reward requests of a cluster.

Its limits on concurrency and rate, its cache and its journal then apply to the whole cluster. Other training loops call
`reward_actor`:

    rewards = reward_actor("my_rewards.py:score", journal="rewards.sqlite")
    scores = rewards.score_groups(groups)
"""

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
_METRICS_S = 10.0  # seconds to wait for the reward agent's metrics before a step is logged without them


class RewardActor(Service):
    """A reward agent inside an actor. `reward_actor` starts it directly; a run on Ray starts it in an `ActorPool`.

    Any first call opens the agent, not only `start`. If Ray restarts the actor (``max_restarts``), it does not call
    `start` again, but the next call opens the agent with its journal.
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
        """Open the agent. Raises `UserError` if the reward does not exist or a setting is not valid."""
        await self._agent()

    async def handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call the agent and return the result.

        "score_groups" takes ``(groups, lane)`` and returns a list of scores for each group, in the order of the groups.
        "score" takes ``(task, trajectory, lane)`` and returns one score. A lane is the agent's queue of requests of
        training ("train") or of evaluation ("eval"). "score_again", "finish" and "metrics" call the methods of
        `RewardAgent` with these names.
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
    """A `Reward` that calls a reward actor. It can be pickled and used in any process of the cluster.

    Every method but `close` raises `UserError` if the agent raises one, or if the actor is dead.

    Attributes:
        actor: Ray's handle of a `RewardActor`.
    """

    actor: Any

    def score_groups(self, groups: Iterable[Sequence[Item]], *, lane: Lane = "train") -> list[list[Score]]:
        """Return a list of scores for each group, in the order of the groups. Blocks until all are scored."""
        with _clear_errors():
            return import_ray().get(self.actor.handle.remote("score_groups", (list(groups), lane)))

    async def score(self, task: Task, trajectory: Answer, *, lane: Lane = "train") -> Score:
        """Return the score of one trajectory. If scoring fails, the score is invalid and its explanation states why."""
        with _clear_errors():
            return await self.actor.handle.remote("score", (task, trajectory, lane))

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        """Apply the agent's post-processing to the scores of a complete group, and return the new scores."""
        with _clear_errors():
            return list(await self.actor.handle.remote("finish", (task, list(scores))))

    def metrics(self) -> Metrics:
        """Return the agent's metrics since the last call. docs/howto/rewards.md lists their names."""
        with _clear_errors():
            return import_ray().get(self.actor.handle.remote("metrics", ()))

    def close(self) -> None:
        """Close the agent and kill the actor. Does nothing if the actor is dead."""
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
    """Start a reward agent in a Ray actor, wait until it is ready, and return a handle that calls it.

    Args:
        reward: the reward or its name, as for `gleanrl.rewards.RewardAgent`. A reward that is an object instead of an
            import path is pickled and sent to the actor.
        settings: settings of the agent.
        journal: path of the journal. It must be accessible on every node on which Ray may start the actor.
        options: Ray's options for the actor, such as ``name``, ``lifetime``, ``num_cpus`` and ``max_restarts``.
        overrides: single settings of the agent, by name.

    Raises:
        UserError: Ray is not installed, the reward does not exist, or a setting is not valid.
    """
    ray = import_ray("a reward actor")
    # An actor has another working directory, in which a relative path would denote another file.
    absolute = Path(journal).absolute() if journal is not None else None
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
    """Convert Ray's errors from the block: a `UserError` of the agent, and the actor's death, become a `UserError`.

    Any other exception of the agent is raised as Ray's error, which contains the actor's traceback.
    """
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
    """The `Reward` of a run on Ray, which calls the run's reward actor.

    ``lane`` is "train" or "eval": the agent's queue for requests of training or of evaluation (see `RewardLane`).

    If the actor dies, the call is repeated on its replacement, which takes finished scores from the journal instead of
    requesting them again.
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
    """Return the rewards of a run on Ray. If ``actors`` is None, these are the environments' own scores.

    The run logs ``metrics`` of the result with each step, so it also returns the metrics of ``cluster``.
    """
    if actors is None:
        reward = EnvironmentReward()
        return RewardSource(reward, reward, cluster.metrics)

    def metrics() -> Metrics:
        collected: dict[str, float] = {}
        for actor in actors.members.values():
            try:
                collected |= actor.ask_blocking("metrics", timeout_s=_METRICS_S)
            except ActorDied:  # the pool replaces the actor; the metrics of its last step are lost
                continue
        return {**collected, **cluster.metrics()}

    return RewardSource(RayReward(actors, "train"), RayReward(actors, "eval"), metrics)
