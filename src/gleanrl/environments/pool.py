"""Plays a taskset's environments in worker processes, or in this one. A failure costs trajectories, never the run.

`EnvironmentPool` has the same surface for both places. What an environment does wrong reaches the caller as an
`EnvironmentFailure` in both; a `UserError` stays one. The rollout asks the pool for one environment an episode:

    async with EnvironmentPool(taskset, workers=2, timeout_s=60.0) as pool:
        environment = pool.environment(task)
        observation = await environment.reset()
"""

from __future__ import annotations

import asyncio
import copyreg
import logging
import pickle
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Self

from gleanrl.protocols import Environment, EpisodeLost, Observation, Taskset
from gleanrl.types import Message, Score, StopReason, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.processes import RemoteError, Served, WorkerDied, WorkerProcess, WorkerTimeout, pack

_LEAD = 16  # live episodes that a task's own worker may have more than the least busy one
_HOMES = 65536  # tasks whose worker is remembered
_log = logging.getLogger(__name__)

# Every step has an observation. Pickled by its fields it takes a third of the time that a slotted dataclass does.
copyreg.pickle(Observation, lambda o: (Observation, (o.messages, o.done, o.score, o.info, o.tools)))
copyreg.pickle(Score, lambda s: (Score, (s.value, s.valid, s.parts, s.explanation, s.applicable)))


# --- failures ---------------------------------------------------------------------------------------
class EnvironmentFailure(Exception):
    """An episode that failed in its environment. ``task_id`` names its task."""

    def __init__(self, task_id: str, message: str) -> None:
        super().__init__(f"task {task_id!r}: {message}")
        self.task_id = task_id

    def __reduce__(self) -> Any:  # the default calls __init__ with the message alone
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class EnvironmentTimeout(EnvironmentFailure, TimeoutError):
    """A reset, step or close took longer than the pool's ``timeout_s``."""


class EnvironmentDied(EnvironmentFailure):
    """The worker process that held the episode is gone: it crashed, was killed, or hung on another episode."""


class EnvironmentRaised(EnvironmentFailure):
    """The environment's own code raised.

    ``kind`` is the exception's type name, ``detail`` its message, ``traceback_text`` its traceback. All are text,
    because the exception itself may live in another process and need not be picklable.
    """

    def __init__(self, task_id: str, kind: str, detail: str, traceback_text: str) -> None:
        super().__init__(task_id, f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail
        self.traceback_text = traceback_text


def timed_out(task_id: str, verb: str, timeout_s: float) -> EnvironmentTimeout:
    return EnvironmentTimeout(task_id, f"{verb} took over {timeout_s:g} s (environment.timeout_s)")


@dataclass(slots=True)
class PoolStats:
    """Counts since the pool opened."""

    episodes: int = 0
    raised: int = 0
    timeouts: int = 0
    died: int = 0
    workers_replaced: int = 0


# --- the pool ---------------------------------------------------------------------------------------
class EnvironmentPool:
    """Plays a taskset's environments, in ``workers`` processes or (0) in this one.

    A task's episodes go to one worker where load allows, so that an engine can use again what it remembers of the
    task. Where an episode runs never changes its observations. An environment that computes without awaiting blocks
    its worker, one that awaits does not.

    ``timeout_s`` bounds each reset, step and close from the moment its worker begins it. A longer one raises
    `EnvironmentTimeout`. If it awaits, it is cancelled. If it blocks, its worker is killed and replaced, which costs
    the other live episodes of that worker (`EnvironmentDied`) but not those that had not begun. In this process only
    what awaits can be timed.

    Use as ``async with EnvironmentPool(taskset, workers=2) as pool``. At the end of the block, or at the death of
    this process, every worker ends with everything that its environments started.
    """

    def __init__(self, taskset: Taskset, *, workers: int = 0, timeout_s: float = 60.0) -> None:
        self.stats = PoolStats()
        self.taskset = taskset
        self.timeout_s = timeout_s
        self._count = workers
        self._workers: list[WorkerProcess] = []
        self._load: dict[WorkerProcess, int] = {}  # live episodes
        self._homes: OrderedDict[str, int] = OrderedDict()  # task id -> index of its worker, recent last
        self._packed = b""

    async def __aenter__(self) -> Self:
        """Start the workers and wait until each holds the taskset.

        Raises:
            UserError: the taskset cannot be sent to a worker process or made there.
        """
        if self._count:
            try:
                self._packed = pack(partial(_Episodes, self.taskset), raises=(EpisodeLost,))
                self._workers = [self._start() for _ in range(self._count)]
                await asyncio.gather(*(worker.ready for worker in self._workers))
            except (RemoteError, WorkerDied, WorkerTimeout, pickle.PicklingError) as error:
                await self.close()
                raise UserError(
                    f"{type(self.taskset).__name__} cannot be held by worker processes ({error}); define it at the top "
                    "level of a module or file (and let a script run only under `if __name__ == '__main__':`), or set "
                    "environment.workers = 0"
                ) from error
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
        """End all workers; requests that are not done raise `EnvironmentDied`."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.close() for worker in workers))

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._workers)

    @property
    def live(self) -> tuple[int, ...]:
        """Live episodes of each worker."""
        return tuple(self._load[worker] for worker in self._workers)

    def further_worker(self, timeout_s: float) -> WorkerProcess:
        """One more process that holds the taskset and plays no episodes: `call("apply", fn)` is ``fn(taskset)``.

        The caller closes it.
        """
        return WorkerProcess(self._packed, timeout_s=timeout_s)

    def _start(self) -> WorkerProcess:
        worker = WorkerProcess(self._packed, timeout_s=self.timeout_s, on_death=self._replace)
        self._load[worker] = 0
        return worker

    def _replace(self, dead: WorkerProcess) -> None:
        if dead not in self._workers:
            return
        _log.warning("an environment worker was lost: %s", dead.death)
        if dead.started:  # one that cannot even start is tried again when an episode needs it
            self.stats.workers_replaced += 1
            self._load.pop(dead, None)
            self._workers[self._workers.index(dead)] = self._start()

    def _worker_for(self, task_id: str) -> WorkerProcess:
        """The worker that had this task last, unless it is much busier than another."""
        if not self._workers:
            raise EnvironmentDied(task_id, "the pool is closed")
        load = self.live
        least = load.index(min(load))
        home = self._homes.pop(task_id, least)
        if load[home] > load[least] + _LEAD:
            home = least
        self._homes[task_id] = home
        if len(self._homes) > _HOMES:
            self._homes.popitem(last=False)
        if self._workers[home].death is not None:
            self._load.pop(self._workers[home], None)
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


def _made(taskset: Taskset, task: Task) -> Environment:
    """Make the environment of ``task``. Raises `TypeError` if it does not derive from `Environment`."""
    environment = taskset.environment(task)
    if not isinstance(environment, Environment):
        raise TypeError(
            f"{type(taskset).__name__}.environment returned a {type(environment).__name__}, which does not derive from "
            "gleanrl.protocols.Environment"
        )
    return environment


class _Episodes(Served):
    """Inside a worker process: the taskset and its live episodes by number."""

    def __init__(self, taskset: Taskset) -> None:
        self._taskset = taskset
        self._live: dict[int, Environment] = {}

    def reset(self, episode: int, task: Task) -> Awaitable[Observation]:
        self._live[episode] = environment = _made(self._taskset, task)
        return environment.reset()

    def step(self, episode: int, message: Message) -> Awaitable[Observation]:
        return self._live[episode].step(message)

    def conclude(self, episode: int, stop: StopReason) -> Awaitable[Score | None]:
        return self._live[episode].conclude(stop)

    async def release(self, episode: int) -> None:
        environment = self._live.pop(episode, None)
        if environment is not None:
            await environment.close()

    def apply(self, function: Callable[[Taskset], Any]) -> Any:
        return function(self._taskset)

    async def close(self) -> None:
        await asyncio.gather(*(environment.close() for environment in self._live.values()), return_exceptions=True)


class _PooledEpisode(Environment):
    _numbers = count(1)

    def __init__(self, pool: EnvironmentPool, task: Task) -> None:
        self._pool = pool
        self._task = task
        self._number = next(self._numbers)
        self._worker: WorkerProcess | None = None

    async def reset(self) -> Observation:
        if self._worker is not None:
            raise RuntimeError(f"task {self._task.id!r}: an environment is reset once; make another")
        return await self._pool._counted(self._begin())

    async def _begin(self) -> Observation:
        while True:
            self._worker = worker = self._pool._worker_for(self._task.id)
            self._pool._load[worker] += 1
            try:
                return await self._ask(worker, "reset", self._task)
            except _NeverBegan:  # another episode's fault: begin on another worker
                continue

    async def step(self, message: Message) -> Observation:
        if self._worker is None:
            raise RuntimeError(f"task {self._task.id!r}: reset before step, and no step after close")
        return await self._pool._counted(self._ask(self._worker, "step", message))

    async def conclude(self, stop: StopReason) -> Score | None:
        if self._worker is None:
            return None
        return await self._pool._counted(self._ask(self._worker, "conclude", stop))

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if worker in self._pool._load:
            self._pool._load[worker] -= 1
        try:
            if worker.death is None:
                await self._pool._counted(self._ask(worker, "release"))
        except EnvironmentFailure as error:  # the episode is over: nothing depends on it
            _log.warning("closing an environment failed: %s", error)

    async def _ask(self, worker: WorkerProcess, method: str, *args: Any) -> Any:
        task_id = self._task.id
        try:
            return await worker.call(method, self._number, *args, label=f"task {task_id!r}")
        except WorkerTimeout:
            raise timed_out(task_id, method, self._pool.timeout_s) from None
        except WorkerDied as error:
            kind = _NeverBegan if error.never_began and method == "reset" else EnvironmentDied
            raise kind(task_id, str(error)) from None
        except RemoteError as error:
            raise EnvironmentRaised(task_id, error.kind, error.detail, error.traceback_text) from None


class _NeverBegan(EnvironmentFailure):
    """The worker died before it came to this reset."""


class _LocalEpisode(Environment):
    def __init__(self, pool: EnvironmentPool, task: Task) -> None:
        self._pool = pool
        self._task = task
        self._environment: Environment | None = None

    async def reset(self) -> Observation:
        if self._environment is not None:
            raise RuntimeError(f"task {self._task.id!r}: an environment is reset once; make another")

        async def begin() -> Observation:
            self._environment = environment = _made(self._pool.taskset, self._task)
            return await environment.reset()

        return await self._ask("reset", begin)

    async def step(self, message: Message) -> Observation:
        environment = self._environment
        if environment is None:
            raise RuntimeError(f"task {self._task.id!r}: reset before step, and no step after close")
        return await self._ask("step", lambda: environment.step(message))

    async def conclude(self, stop: StopReason) -> Score | None:
        environment = self._environment
        if environment is None:
            return None
        return await self._ask("conclude", lambda: environment.conclude(stop))

    async def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is None:
            return
        try:
            await self._ask("close", environment.close)
        except EnvironmentFailure as error:
            _log.warning("closing an environment failed: %s", error)

    async def _ask(self, verb: str, action: Callable[[], Awaitable[Any]]) -> Any:
        return await self._pool._counted(self._timed(verb, action))

    async def _timed(self, verb: str, action: Callable[[], Awaitable[Any]]) -> Any:
        clock = asyncio.timeout(self._pool.timeout_s)
        try:
            async with clock:
                return await action()
        except (UserError, EpisodeLost, EnvironmentFailure, KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BaseException as error:  # SystemExit too: an environment that exits costs its episode
            if isinstance(error, TimeoutError) and clock.expired():
                raise timed_out(self._task.id, verb, self._pool.timeout_s) from error
            remote = RemoteError.of(error)
            raise EnvironmentRaised(self._task.id, remote.kind, remote.detail, remote.traceback_text) from error
