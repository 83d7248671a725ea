"""Runs a taskset's environments in worker processes or in this process.

`EnvironmentPool` has the same interface in both cases. If an environment fails, its episode is lost and the run
continues: the caller gets an `EnvironmentFailure`. Only `UserError` and `EpisodeLost` reach the caller unchanged. The
rollout asks the pool for one environment per episode:

    async with EnvironmentPool(taskset, workers=2, timeout_s=60.0) as pool:
        environment = pool.environment(task)
        observation = await environment.reset()
"""

from __future__ import annotations

import asyncio
import copyreg
import inspect
import logging
import pickle
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from functools import partial
from itertools import count
from operator import attrgetter
from time import perf_counter
from typing import Any, Self

from gleanrl.environments.agent.endpoint import Endpoint
from gleanrl.protocols import Environment, EpisodeLost, ModelAddress, Observation, Taskset
from gleanrl.types import Message, Score, StopReason, Task
from gleanrl.utils.errors import UserError, defined_at
from gleanrl.utils.processes import RemoteError, Served, WorkerDied, WorkerProcess, WorkerTimeout, pack

_LEAD = 16  # a task moves to the least busy worker if its worker has over this many more live episodes
_HOMES = 65536  # number of tasks for which the pool remembers the worker of their latest episode
_BLOCKED_S = 0.1  # seconds for which calls in this process may keep the event loop from its next iteration
_WARN_S = 2.0  # after this many seconds of calls that take longer each, a warning names `environment.workers`
_log = logging.getLogger(__name__)


def _pickle_by_fields(kind: type[Any]) -> None:
    """Let pickle store only the values of the fields of the dataclass ``kind``.

    Every step pickles an observation, and this takes a third of the time of pickle's default for classes with slots.
    """
    values = attrgetter(*(own.name for own in fields(kind)))
    copyreg.pickle(kind, lambda instance: (kind, values(instance)))


_pickle_by_fields(Observation)
_pickle_by_fields(Score)


# --- failures ---------------------------------------------------------------------------------------
class EnvironmentFailure(Exception):
    """An environment failed during an episode. ``task_id`` is the id of the episode's task."""

    def __init__(self, task_id: str, message: str) -> None:
        super().__init__(f"task {task_id!r}: {message}")
        self.task_id = task_id

    # To unpickle an exception, Python by default calls `__init__` with the message as the only argument, which would
    # fail here.
    def __reduce__(self) -> Any:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class EnvironmentTimeout(EnvironmentFailure, TimeoutError):
    """A call of the environment (reset, step, conclude or close) took longer than the pool's ``timeout_s`` seconds."""


class EnvironmentDied(EnvironmentFailure):
    """The worker process that held the episode is gone, or the pool is closed.

    The process crashed or was killed, for example because another of its episodes took too long.
    """


class EnvironmentRaised(EnvironmentFailure):
    """The environment's own code raised an exception.

    ``kind`` is the name of the exception's type, ``detail`` its message, ``traceback_text`` its traceback. All three
    are text, because the exception may have been raised in another process and may not be picklable.
    """

    def __init__(self, task_id: str, kind: str, detail: str, traceback_text: str) -> None:
        super().__init__(task_id, f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail
        self.traceback_text = traceback_text


@dataclass(slots=True)
class PoolStats:
    """Counts since the pool was made."""

    episodes: int = 0  # number of environments that the pool has made
    raised: int = 0  # number of calls that ended in `EnvironmentRaised`
    timeouts: int = 0  # number of calls that ended in `EnvironmentTimeout`
    died: int = 0  # number of calls that ended in `EnvironmentDied`
    workers_replaced: int = 0  # number of worker processes that died and were replaced


# --- the pool ---------------------------------------------------------------------------------------
class EnvironmentPool:
    """Runs a taskset's environments in ``workers`` processes, or in this process if ``workers`` is 0.

    All episodes of a task run in the same worker, unless that worker is much busier than another one. So an environment
    can reuse what it has cached for the task. Observations do not depend on the worker. A worker runs many episodes at
    a time. While an environment computes without awaiting, the other episodes of its worker wait.

    ``timeout_s`` is the most seconds that a reset, step, conclude or close may take, from the moment at which the
    worker begins it. A call that takes longer raises `EnvironmentTimeout`. If the call awaits, it is cancelled. If it
    blocks, its worker is killed and replaced. The other live episodes of that worker then raise `EnvironmentDied`, but
    episodes whose reset had not begun move to another worker. With ``workers=0``, only a call that awaits can be timed
    out.

    Use as ``async with EnvironmentPool(taskset, workers=2) as pool``. At the end of the block, or when this process
    dies, every worker ends, and with it all processes that its environments started.
    """

    def __init__(self, taskset: Taskset, *, workers: int = 0, timeout_s: float = 60.0) -> None:
        self.stats = PoolStats()
        self.taskset = taskset
        self.timeout_s = timeout_s
        self.count = workers
        self.endpoint = Endpoint()
        """Where agents call the model. Its server runs in this process."""
        self.packed = b""  # the pickled taskset that every worker process loads; empty if there are no workers
        self._workers: list[WorkerProcess] = []
        self.load: dict[WorkerProcess, int] = {}  # number of live episodes of each worker
        self._homes: OrderedDict[str, int] = OrderedDict()  # task id -> index of its worker, in order of last use
        # Only for calls in this process: the seconds of those that did not await, in the present iteration of the event
        # loop, and of all of them that took longer than `_BLOCKED_S`.
        self._iteration_s = 0.0
        self._blocked_s = 0.0

    async def __aenter__(self) -> Self:
        """Start the workers and wait until each has loaded its copy of the taskset.

        Raises:
            UserError: the taskset cannot be pickled, or a worker process cannot load it.
        """
        if self.count:
            try:
                self.packed = pack(partial(_Episodes, self.taskset), raises=(EpisodeLost, EnvironmentFailure))
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
        """Return the environment of a new episode of ``task``.

        The caller must close the environment, because the worker keeps it in memory until then.
        """
        self.stats.episodes += 1
        return _Episode(self, task)

    async def close(self) -> None:
        """End all workers and the endpoint. Calls that are still running raise `EnvironmentDied`."""
        self._workers = []
        await self.endpoint.close()
        await asyncio.gather(*(worker.close() for worker in self.load))

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return tuple(worker.pid for worker in self._workers)

    @property
    def live(self) -> tuple[int, ...]:
        """Number of live episodes of each worker."""
        return tuple(self.load[worker] for worker in self._workers)

    @property
    def blocked(self) -> bool:
        """Whether calls in this process have taken so long that others wait for the event loop's next iteration."""
        return self._iteration_s > _BLOCKED_S

    def note_call(self, seconds: float, call: str) -> None:
        """Note a call in this process that has not awaited, and so has blocked the event loop."""

        def next_iteration() -> None:
            self._iteration_s = 0.0

        if not self._iteration_s:
            asyncio.get_running_loop().call_soon(next_iteration)
        self._iteration_s += seconds
        if seconds < _BLOCKED_S:
            return
        warned, self._blocked_s = self._blocked_s >= _WARN_S, self._blocked_s + seconds
        if self._blocked_s >= _WARN_S and not warned:
            _log.warning(
                "environments have blocked the run for %.1f s (%s took %.2f s without awaiting); environment.workers = "
                "N runs them in N processes",
                self._blocked_s,
                call,
                seconds,
            )

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
        """Return the worker of the task's latest episode, or the least busy worker.

        The least busy worker is returned if the task is new, or if the task's own worker is much busier.

        Raises:
            EnvironmentDied: the pool is closed.
        """
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
        worker = self._workers[home]
        if worker.death is not None:
            self._replace(worker)
        if self._workers[home] is worker and worker.death is not None:  # it had not started
            self.load.pop(worker, None)
            self._workers[home] = self._start()
        return self._workers[home]


class _Episodes(Served):
    """Holds a taskset and its live episodes, in a worker process or in this process. Each episode has a number."""

    def __init__(self, taskset: Taskset) -> None:
        self._taskset = taskset
        self._live: dict[int, Environment] = {}

    async def reset(self, episode: int, task: Task) -> Observation:
        environment = self._taskset.environment(task)
        if not isinstance(environment, Environment):
            raise TypeError(
                f"{type(self._taskset).__name__}.environment returned a {type(environment).__name__}, which does not "
                f"derive from gleanrl.protocols.Environment{defined_at(self._taskset.environment)}"
            )
        self._live[episode] = environment
        return await self._observation(environment.reset)

    async def step(self, episode: int, message: Message) -> Observation:
        return await self._observation(self._live[episode].step, message)

    async def run(self, episode: int, model: ModelAddress) -> Observation:
        return await self._observation(self._live[episode].run, model)

    async def conclude(self, episode: int, stop: StopReason) -> Score | None:
        method = self._live[episode].conclude
        score = await self._awaited(method, stop)
        try:
            return None if score is None else Score.of(score)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{method.__qualname__} returned {score!r:.80}: {error}{defined_at(method)}") from None

    async def _observation(self, method: Callable[..., Awaitable[Any]], *args: Any) -> Observation:
        """Call ``reset``, ``step`` or ``run`` of an environment, and check that it returns an observation."""
        observation = await self._awaited(method, *args)
        if not isinstance(observation, Observation):
            raise TypeError(
                f"{method.__qualname__} returned {observation!r:.80}, not an Observation{defined_at(method)}"
            )
        return observation

    async def _awaited(self, method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Return what ``method`` of an environment returns, after a check that it is asynchronous."""
        returned = method(*args)
        if not inspect.isawaitable(returned):
            raise TypeError(f"{method.__qualname__} must be an `async def`{defined_at(method)}")
        return await returned

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
            raise RuntimeError(f"task {self._task.id!r}: an environment can only be reset once; make another one")
        self._open = True
        return await self._call("reset", self._task)

    async def step(self, message: Message) -> Observation:
        if not self._open:
            raise RuntimeError(f"task {self._task.id!r}: reset before step, and no step after close")
        return await self._call("step", message)

    async def run(self, model: ModelAddress) -> Observation:
        """Run the agent. Its time limit counts from the model's last answer, and not while it waits for the model."""
        pool = self._pool
        running = asyncio.ensure_future(self._call("run", model))
        try:
            while not running.done():
                left = pool.timeout_s - pool.endpoint.idle_s(model.key)
                if left <= 0:
                    pool.stats.timeouts += 1
                    why = f"the agent made no model call for {pool.timeout_s:g} s (environment.timeout_s)"
                    raise EnvironmentTimeout(self._task.id, why)
                await asyncio.wait([running], timeout=left)
            return running.result()
        finally:
            running.cancel()
            await asyncio.wait([running])

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
        except EnvironmentFailure as error:  # logged and not raised, because the episode is over
            _log.warning("closing an environment failed: %s", error)

    async def _call(self, method: str, *args: Any) -> Any:
        """Call a method of `_Episodes` for this episode.

        A failure is counted in the pool's `stats` and raised as an `EnvironmentFailure`.
        """
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
                    label, may_await = f"task {task_id!r}", method == "run"
                    return await self._worker.call(method, self._number, *args, label=label, may_await=may_await)
                except WorkerDied as error:
                    if method != "reset" or not error.never_began:
                        raise
                    # The worker died before it began this episode, so another worker can run it.
        except WorkerTimeout:
            failure = EnvironmentTimeout(task_id, f"{method} took over {pool.timeout_s:g} s (environment.timeout_s)")
        except WorkerDied as error:
            failure = EnvironmentDied(task_id, str(error))
        except RemoteError as error:
            failure = EnvironmentRaised(task_id, error.kind, error.detail, error.traceback_text)
        except EnvironmentFailure as error:  # raised by a closed pool, or by an environment that runs in a service
            failure = error
        pool.stats.raised += isinstance(failure, EnvironmentRaised)
        pool.stats.timeouts += isinstance(failure, EnvironmentTimeout)
        pool.stats.died += isinstance(failure, EnvironmentDied)
        raise failure

    async def _call_here(self, method: str, *args: Any) -> Any:
        """Call the method in this process. Raises the same errors as `WorkerProcess.call`.

        The event loop has its next iteration after `_BLOCKED_S` of calls that do not await. Otherwise all episodes
        whose turn it is would block it one after the other, and no signal and no time limit would be noticed meanwhile.
        """
        while self._pool.blocked:  # noqa: ASYNC110 - unlike an event, this keeps the order of the calls
            await asyncio.sleep(0)
        awaited: list[bool] = []  # no longer empty once the call has let the event loop run
        iteration = asyncio.get_running_loop().call_soon(awaited.append, True)
        started = perf_counter()
        clock = asyncio.timeout(None if method == "run" else self._pool.timeout_s)
        try:
            async with clock:
                return await getattr(self._here, method)(self._number, *args)
        except (UserError, EpisodeLost, EnvironmentFailure, KeyboardInterrupt):
            raise
        except BaseException as error:  # also SystemExit, so that an environment cannot end the run
            caller = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and caller is not None and caller.cancelling():
                raise
            if isinstance(error, TimeoutError) and clock.expired():
                raise WorkerTimeout from None
            raise RemoteError.of(error) from None
        finally:
            iteration.cancel()
            if not awaited:
                self._pool.note_call(perf_counter() - started, f"{method} of task {self._task.id!r}")
