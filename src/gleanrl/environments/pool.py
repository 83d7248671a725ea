"""Plays a taskset's environments in worker processes or in this process. A failure costs trajectories, never the run.

`EnvironmentPool` has the same interface in both cases. An error in an environment reaches the caller as an
`EnvironmentFailure`, except that a `UserError` stays a `UserError`. The rollout asks the pool for one environment per
episode:

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

_LEAD = 16  # by how many live episodes a task's own worker may exceed the least busy one
_HOMES = 65536  # tasks whose worker is remembered
_log = logging.getLogger(__name__)

# Every step pickles an observation. Pickling its fields takes a third of the time of the default for slotted classes.
copyreg.pickle(Observation, lambda o: (Observation, (o.messages, o.done, o.score, o.info, o.tools)))
copyreg.pickle(Score, lambda s: (Score, (s.value, s.valid, s.parts, s.explanation, s.applicable)))


# --- failures ---------------------------------------------------------------------------------------
class EnvironmentFailure(Exception):
    """An episode failed in its environment. ``task_id`` is the id of its task."""

    def __init__(self, task_id: str, message: str) -> None:
        super().__init__(f"task {task_id!r}: {message}")
        self.task_id = task_id

    def __reduce__(self) -> Any:  # the default would call __init__ with the message alone
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
    """Plays a taskset's environments in ``workers`` processes; 0 = in this process.

    A task's episodes go to one worker if its load allows, so that an engine can reuse what it cached for the task.
    Observations do not depend on the worker. An environment that computes without awaiting blocks its worker.

    ``timeout_s`` limits each reset, step and close, from the moment at which the worker begins it. A call that takes
    longer raises `EnvironmentTimeout`. If the call awaits, it is cancelled. If it blocks, its worker is killed and
    replaced. The other live episodes of that worker then raise `EnvironmentDied`, but episodes that had not begun move
    to another worker. With ``workers=0``, only a call that awaits can be timed out.

    Use as ``async with EnvironmentPool(taskset, workers=2) as pool``. At the end of the block, or when this process
    dies, every worker ends, and with it all processes that its environments started.
    """

    def __init__(self, taskset: Taskset, *, workers: int = 0, timeout_s: float = 60.0) -> None:
        self.stats = PoolStats()
        self.taskset = taskset
        self.timeout_s = timeout_s
        self.count = workers
        self.packed = b""  # the pickled taskset that a worker process starts with; empty if there are no workers
        self._workers: list[WorkerProcess] = []
        self.load: dict[WorkerProcess, int] = {}  # live episodes
        self._homes: OrderedDict[str, int] = OrderedDict()  # task id -> index of its worker, most recent last

    async def __aenter__(self) -> Self:
        """Start the workers and wait until each holds the taskset.

        Raises:
            UserError: the taskset cannot be sent to a worker process or made there.
        """
        if self.count:
            try:
                self.packed = pack(partial(_Episodes, self.taskset), raises=(EpisodeLost,))
                self._workers = [self._start() for _ in range(self.count)]
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
        """Make an episode of ``task``. The caller must close it, because its worker keeps it until then."""
        self.stats.episodes += 1
        return _Episode(self, task)

    async def close(self) -> None:
        """End all workers. Requests that are still running raise `EnvironmentDied`."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.close() for worker in workers))

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._workers)

    @property
    def live(self) -> tuple[int, ...]:
        """Number of live episodes of each worker."""
        return tuple(self.load[worker] for worker in self._workers)

    def _start(self) -> WorkerProcess:
        worker = WorkerProcess(self.packed, timeout_s=self.timeout_s, on_death=self._replace)
        self.load[worker] = 0
        return worker

    def _replace(self, dead: WorkerProcess) -> None:
        if dead not in self._workers:
            return
        _log.warning("an environment worker was lost: %s", dead.death)
        if dead.started:  # a worker that failed to start is replaced only when an episode needs it
            self.stats.workers_replaced += 1
            self.load.pop(dead, None)
            self._workers[self._workers.index(dead)] = self._start()

    def choose_worker(self, task_id: str) -> WorkerProcess:
        """Return the worker that had this task last, unless it is much busier than another."""
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
            self.load.pop(self._workers[home], None)
            self._workers[home] = self._start()
        return self._workers[home]


class _Episodes(Served):
    """Holds a taskset and its live episodes by number, in a worker process or in this process."""

    def __init__(self, taskset: Taskset) -> None:
        self._taskset = taskset
        self._live: dict[int, Environment] = {}

    def reset(self, episode: int, task: Task) -> Awaitable[Observation]:
        environment = self._taskset.environment(task)
        if not isinstance(environment, Environment):
            raise TypeError(
                f"{type(self._taskset).__name__}.environment returned a {type(environment).__name__}, which does not "
                "derive from gleanrl.protocols.Environment"
            )
        self._live[episode] = environment
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


class _Episode(Environment):
    """One episode of a pool, played in a worker process or in this process."""

    _numbers = count(1)

    def __init__(self, pool: EnvironmentPool, task: Task) -> None:
        self._pool, self._task = pool, task
        self._open = False
        self._number = next(self._numbers)
        self._worker: WorkerProcess | None = None
        self._here = None if pool.count else _Episodes(pool.taskset)

    async def reset(self) -> Observation:
        if self._open:
            raise RuntimeError(f"task {self._task.id!r}: an environment is reset once; make another")
        self._open = True
        return await self._call("reset", self._task)

    async def step(self, message: Message) -> Observation:
        if not self._open:
            raise RuntimeError(f"task {self._task.id!r}: reset before step, and no step after close")
        return await self._call("step", message)

    async def conclude(self, stop: StopReason) -> Score | None:
        return await self._call("conclude", stop) if self._open else None

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self._here is None:
            if self._worker in self._pool.load:
                self._pool.load[self._worker] -= 1
            if self._worker is None or self._worker.death is not None:
                return
        try:
            await self._call("release")
        except EnvironmentFailure as error:  # only logged, because the episode is over
            _log.warning("closing an environment failed: %s", error)

    async def _call(self, method: str, *args: Any) -> Any:
        """Call a method of `_Episodes` for this episode. Counts failures and raises them as `EnvironmentFailure`."""
        pool, task_id = self._pool, self._task.id
        failure: EnvironmentFailure
        try:
            if self._here is not None:
                return await self._call_here(method, *args)
            while True:
                if method == "reset":
                    self._worker = pool.choose_worker(task_id)
                    pool.load[self._worker] += 1
                assert self._worker is not None
                try:
                    return await self._worker.call(method, self._number, *args, label=f"task {task_id!r}")
                except WorkerDied as error:
                    if method != "reset" or not error.never_began:
                        raise
                    # The worker died because of another episode, before this one began. Try another worker.
        except WorkerTimeout:
            failure = EnvironmentTimeout(task_id, f"{method} took over {pool.timeout_s:g} s (environment.timeout_s)")
        except WorkerDied as error:
            failure = EnvironmentDied(task_id, str(error))
        except RemoteError as error:
            failure = EnvironmentRaised(task_id, error.kind, error.detail, error.traceback_text)
        except EnvironmentFailure as error:  # the pool is closed, or the environment runs in a service that failed
            failure = error
        pool.stats.raised += isinstance(failure, EnvironmentRaised)
        pool.stats.timeouts += isinstance(failure, EnvironmentTimeout)
        pool.stats.died += isinstance(failure, EnvironmentDied)
        raise failure

    async def _call_here(self, method: str, *args: Any) -> Any:
        """Call the method in this process. Raises the same errors as `WorkerProcess.call`."""
        clock = asyncio.timeout(self._pool.timeout_s)
        try:
            async with clock:
                return await getattr(self._here, method)(self._number, *args)
        except (UserError, EpisodeLost, EnvironmentFailure, KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BaseException as error:  # SystemExit too: an environment that exits loses only its episode
            if isinstance(error, TimeoutError) and clock.expired():
                raise WorkerTimeout from None
            raise RemoteError.of(error) from None
