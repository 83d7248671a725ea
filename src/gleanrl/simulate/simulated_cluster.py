"""The processes of a simulated cluster that every event passes through, and the failures of its parts."""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import count

from gleanrl.simulate.cluster import OVERHEADS, Cluster, Overhead, expected_loss_s
from gleanrl.simulate.workload import Workload
from gleanrl.utils.errors import UserError

_HOUR = 3600.0
_MOST_TRIES = 100  # of one request, or on average of one episode; more would take for ever to simulate too


class Core:
    """One core of a processor that works on one event after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free_at = 0.0

    async def work(self, seconds: float) -> None:
        """Wait for those before, then so long."""
        if seconds > 0:
            self._free_at = max(self._free_at, self._clock()) + seconds
            await asyncio.sleep(self._free_at - self._clock())


class Outages:
    """When something is down: after an exponential time for ``restart_s``, again and again."""

    def __init__(self, mean_s: float, restart_s: float, draws: random.Random) -> None:
        self._mean_s, self._restart_s, self._draws = mean_s, restart_s, draws
        self._failures = [draws.expovariate(1 / mean_s)] if mean_s else [math.inf]

    def first(self, start: float, end: float) -> float | None:
        """The first failure after ``start`` and up to ``end``."""
        while self._failures[-1] <= end:
            self._failures.append(self._failures[-1] + self._restart_s + self._draws.expovariate(1 / self._mean_s))
        failure = self._failures[bisect_right(self._failures, start)]
        return failure if failure <= end else None

    def up_at(self, now: float) -> float:
        """``now``, or the end of the outage that holds then."""
        self.first(now, now)
        before = bisect_right(self._failures, now)
        return max(now, self._failures[before - 1] + self._restart_s) if before else now


class Machines:
    """What all simulated parts of a cluster share; counts what each of them was at work for."""

    def __init__(self, cluster: Cluster, workload: Workload, clock: Callable[[], float]) -> None:
        self.cluster, self.workload, self.clock = cluster, workload, clock
        self._driver = Core(clock)
        self._agent = self._driver if cluster.agent == "driver" else Core(clock)
        self._players = [Core(clock) for _ in range(cluster.players)]
        self._played = 0
        self._at_work: dict[Overhead, float] = dict.fromkeys(OVERHEADS, 0.0)  # seconds
        self.drained_s = 0.0  # in publications, until all that is being sampled has ended
        self.lost = 0  # trajectories and requests that began again
        engines = cluster.engines
        mean_s = cluster.sampler_mtbf * _HOUR * len(engines) / cluster.samplers
        self.samplers = [self._outages(f"sampler/{number}", mean_s) for number in range(len(engines))]
        self._agents = self._outages("agent", cluster.agent_mtbf * _HOUR)
        self._environments = random.Random(f"environments/{workload.seed}")

    async def driver(self, trajectories: int = 0, groups: int = 0) -> None:
        """The driver's work on so many trajectories or groups, after that of who played them."""
        await asyncio.gather(*(self._play() for _ in range(trajectories if self._players else 0)))
        seconds = trajectories * self.cluster.trajectory_s + groups * self.cluster.group_s
        await self._work(self._driver, "driver", seconds)

    async def pool(self) -> None:
        """The pool's work on a step, which the driver's process does."""
        await self._work(self._driver, "pool", self.cluster.pool_s(self.workload))

    async def request(self) -> None:
        """The reward agent's work on one request."""
        await self._work(self._agent, "agent", self.cluster.request_s)

    async def transfer(self) -> None:
        """A publication on its way."""
        if seconds := self.cluster.transfer_s:
            await asyncio.sleep(seconds)
            self._at_work["transfer"] += seconds

    def answered_s(self, latency: Callable[[], float]) -> float:
        """Seconds until a reward that is asked for now is there, outages of the agent included."""
        now = self.clock()
        asked, answered = self._agents.up_at(now), latency()
        for tries in count(1):
            if (failure := self._agents.first(asked, asked + answered)) is None:
                break
            if tries == _MOST_TRIES:
                raise _hopeless("agent", "reward agents", "a request", self.cluster.agent_mtbf)
            self.lost += 1
            asked, answered = self._agents.up_at(failure), latency()
        return asked - now + answered

    def environment_fails(self, seconds: float) -> bool:
        """Whether an episode of so many seconds is lost with its environment."""
        mean_s = self.cluster.environment_mtbf * _HOUR
        if mean_s and seconds > mean_s * math.log(_MOST_TRIES):
            raise _hopeless("environment", "environments", "an episode", self.cluster.environment_mtbf)
        failed = bool(mean_s) and self._environments.random() < -math.expm1(-seconds / mean_s)
        self.lost += failed
        return failed

    def learner_loss_s(self, step_s: float, since_s: float) -> float:
        """Mean seconds that failures of learners add to a step that begins so long after the last checkpoint."""
        mean_s = self.cluster.learner_mtbf * _HOUR
        rate = self.cluster.learners / mean_s if mean_s else 0.0
        return expected_loss_s(step_s, since_s, rate, self.cluster.restart)

    def at_work(self) -> Mapping[Overhead, float]:
        """Seconds until now, by what was at work."""
        return dict(self._at_work)

    async def _play(self) -> None:
        self._played += 1
        seconds = self.cluster.episode_s
        await self._players[self._played % len(self._players)].work(seconds)
        self._at_work["players"] += seconds / len(self._players)

    async def _work(self, core: Core, name: Overhead, seconds: float) -> None:
        await core.work(seconds)
        self._at_work[name] += seconds

    def _outages(self, name: str, mean_s: float) -> Outages:
        return Outages(mean_s, self.cluster.restart, random.Random(f"{name}/{self.workload.seed}"))


def _hopeless(option: str, who: str, what: str, hours: float) -> UserError:
    return UserError(
        f"{who} that fail every {hours * _HOUR:.3g} s lose {what} over {_MOST_TRIES:,} times; raise --{option}-mtbf"
    )
