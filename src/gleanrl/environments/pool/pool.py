"""Environments in worker processes: many episodes a worker, and a failure costs trajectories, never the run.

`EnvironmentPool` has one surface for both places an environment can live: in worker processes, or
(``workers=0``) in this one. What an environment does wrong reaches the caller as an
`EnvironmentFailure`, whichever place it was in; a `UserError` stays one.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

from gleanrl.environments.pool.failures import (
    EnvironmentDied,
    EnvironmentFailure,
    EnvironmentRaised,
    EnvironmentTimeout,
    described,
)
from gleanrl.environments.pool.wire import Kind, encode
from gleanrl.environments.pool.worker import NotStarted, Worker
from gleanrl.protocols import Concluding, Environment, EpisodeLost, Observation, Taskset
from gleanrl.types import Message, Score, StopReason, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import loaded_files

__all__ = [
    "EnvironmentDied",
    "EnvironmentFailure",
    "EnvironmentPool",
    "EnvironmentRaised",
    "EnvironmentTimeout",
    "PoolStats",
]

_LEAD = 16  # live episodes that a task's own worker may have more than the least busy one
_HOMES = 65536  # tasks whose worker is remembered
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PoolStats:
    """Counts since the pool opened."""

    episodes: int = 0
    raised: int = 0
    timeouts: int = 0
    died: int = 0
    workers_replaced: int = 0


class EnvironmentPool:
    """Plays a taskset's environments, in ``workers`` processes or (0) in this one.

    A task's episodes go to one worker where load allows, so that what an engine remembers of a task is
    used again; where an episode runs never changes what it answers. An environment that computes without
    awaiting blocks its worker, one that awaits does not.

    ``timeout_s`` bounds each reset, step and close from the moment its worker is on it. A request over it
    raises `EnvironmentTimeout`. One that awaits is cancelled; one that blocks has its worker killed and
    replaced, which costs that worker's other live episodes (`EnvironmentDied`), but not those that had
    only waited to begin. In this process only what awaits can be timed.

    Use as ``async with EnvironmentPool(taskset, workers=2) as pool``. Leaving the block, or the death of
    this process, ends every worker and what its environments started.
    """

    def __init__(self, taskset: Taskset, *, workers: int = 0, timeout_s: float = 60.0) -> None:
        self.stats = PoolStats()
        self._taskset = taskset
        self._count = workers
        self._timeout_s = timeout_s
        self._workers: list[Worker] = []
        self._homes: OrderedDict[str, int] = OrderedDict()  # task id -> index of its worker, recent last
        self._encoded = b""

    async def __aenter__(self) -> Self:
        """Start the workers and wait until each holds the taskset.

        Raises:
            UserError: the taskset cannot be sent to a worker process or rebuilt there.
        """
        if self._count:
            self._encoded = _encode_taskset(self._taskset)
            self._workers = [self._start() for _ in range(self._count)]
            try:
                for worker in self._workers:
                    await worker.ready
            except EnvironmentFailure as error:
                await self.close()
                raise UserError(_start_failure(self._taskset, error)) from error
            except BaseException:
                await self.close()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def environment(self, task: Task) -> Environment:
        """One episode of ``task``, not begun. Close it, or its worker keeps it until the pool closes."""
        self.stats.episodes += 1
        return _PooledEpisode(self, task) if self._count else _LocalEpisode(self, task)

    async def close(self) -> None:
        """End all workers; requests still open fail with `EnvironmentDied`."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.close() for worker in workers))

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._workers)

    def further_worker(self, timeout_s: float) -> Worker:
        """One more process that holds the taskset, and plays no episodes. It is the caller's to close."""
        return Worker(self._encoded, timeout_s, lambda dead: None)

    def _start(self) -> Worker:
        return Worker(self._encoded, self._timeout_s, self._replace)

    def _replace(self, dead: Worker) -> None:
        if dead not in self._workers:
            return
        _log.warning("an environment worker was lost: %s", dead.death)
        if dead.started:  # one that cannot even start is tried again when an episode needs it
            self.stats.workers_replaced += 1
            self._workers[self._workers.index(dead)] = self._start()

    def _worker_for(self, task_id: str) -> Worker:
        """The worker that had this task last, unless it is much busier than another."""
        if not self._workers:
            raise EnvironmentDied(task_id, "the pool is closed")
        load = [worker.episodes for worker in self._workers]
        least = min(range(len(load)), key=load.__getitem__)
        home = self._homes.pop(task_id, least)
        if load[home] > load[least] + _LEAD:
            home = least
        self._homes[task_id] = home
        if len(self._homes) > _HOMES:
            self._homes.popitem(last=False)
        if self._workers[home].death is not None:
            self._workers[home] = self._start()
        return self._workers[home]

    async def _counted(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except EnvironmentRaised:
            self.stats.raised += 1
            raise
        except EnvironmentTimeout:
            self.stats.timeouts += 1
            raise
        except EnvironmentDied:
            self.stats.died += 1
            raise


class _PooledEpisode:
    def __init__(self, pool: EnvironmentPool, task: Task) -> None:
        self._pool = pool
        self._task = task
        self._id = next(_episodes)
        self._worker: Worker | None = None

    async def reset(self) -> Observation:
        if self._worker is not None:
            raise RuntimeError(f"task {self._task.id!r}: an environment is reset once; make another")
        return await self._pool._counted(self._begin())

    async def _begin(self) -> Observation:
        body = encode(self._task)
        while True:
            self._worker = worker = self._pool._worker_for(self._task.id)
            worker.episodes += 1
            try:
                return await worker.ask(Kind.RESET, self._id, self._task.id, body)
            except NotStarted:  # another episode's fault: begin on another worker
                continue

    async def step(self, message: Message) -> Observation:
        if self._worker is None:
            raise RuntimeError(f"task {self._task.id!r}: reset before step, and no step after close")
        return await self._pool._counted(self._worker.ask(Kind.STEP, self._id, self._task.id, encode(message)))

    async def conclude(self, stop: StopReason) -> Score | None:
        if self._worker is None:
            return None
        return await self._pool._counted(self._worker.ask(Kind.CONCLUDE, self._id, self._task.id, encode(stop)))

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.episodes -= 1
        if worker.death is not None:
            return
        try:
            await self._pool._counted(worker.ask(Kind.CLOSE, self._id, self._task.id))
        except EnvironmentFailure as error:  # the episode is over: nobody needs to fail for it
            _log.warning("closing an environment failed: %s", error)


class _LocalEpisode:
    def __init__(self, pool: EnvironmentPool, task: Task) -> None:
        self._pool = pool
        self._task = task
        self._environment: Environment | None = None

    async def reset(self) -> Observation:
        if self._environment is not None:
            raise RuntimeError(f"task {self._task.id!r}: an environment is reset once; make another")

        async def begin() -> Observation:
            self._environment = self._pool._taskset.environment(self._task)
            return await self._environment.reset()

        return await self._guarded("reset", begin)

    async def step(self, message: Message) -> Observation:
        environment = self._environment
        if environment is None:
            raise RuntimeError(f"task {self._task.id!r}: reset before step, and no step after close")
        return await self._guarded("step", lambda: environment.step(message))

    async def conclude(self, stop: StopReason) -> Score | None:
        environment = self._environment
        if not isinstance(environment, Concluding):
            return None
        return await self._guarded("conclude", lambda: environment.conclude(stop))

    async def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is None:
            return
        try:
            await self._guarded("close", environment.close)
        except EnvironmentFailure as error:
            _log.warning("closing an environment failed: %s", error)

    async def _guarded(self, verb: str, action: Callable[[], Awaitable[Any]]) -> Any:
        return await self._pool._counted(self._timed(verb, action))

    async def _timed(self, verb: str, action: Callable[[], Awaitable[Any]]) -> Any:
        limit = self._pool._timeout_s
        clock = asyncio.timeout(limit)
        try:
            async with clock:
                return await action()
        except (UserError, EpisodeLost, EnvironmentFailure, KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BaseException as error:  # SystemExit too: an environment that exits costs its episode
            if isinstance(error, TimeoutError) and clock.expired():
                late = f"{verb} took over {limit:g} s (environment.timeout_s)"
                raise EnvironmentTimeout(self._task.id, late) from error
            raise EnvironmentRaised(self._task.id, *described(error)) from error


_episodes = count(1)


def _encode_taskset(taskset: Taskset) -> bytes:
    try:
        # Pickled twice, so that a worker can import the files that define it before it rebuilds it.
        return encode((loaded_files(), encode(taskset)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(_start_failure(taskset, error)) from error


def _start_failure(taskset: Taskset, error: Exception) -> str:
    reason = str(error.args[0]) if error.args else type(error).__name__
    if isinstance(error, EnvironmentRaised):
        reason = f"{error.kind}: {error.detail}"
    return (
        f"{type(taskset).__name__} cannot be held by worker processes ({reason}); define it at the top level of a "
        "module or file (and let a script run only under `if __name__ == '__main__':`), or set environment.workers = 0"
    )
