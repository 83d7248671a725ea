"""Runs environments in Ray actors.

Each actor has an environment pool and serves many episodes at a time. If it dies, its episodes raise `EpisodeLost`, and
the run starts them again on other actors.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from itertools import count
from typing import Any

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.protocols import Environment, Observation, Taskset
from gleanrl.runtime.ray.actors import ActorClient, ActorPool, Service
from gleanrl.types import Message, Score, StopReason, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import loaded_files, restore_files


class EnvironmentService(Service):
    """The service of an environment actor. It runs an `EnvironmentPool` and its open environments."""

    def __init__(self, _driver: Any, taskset: bytes, settings: EnvironmentSettings) -> None:
        files, body = pickle.loads(taskset)
        restore_files(files)
        self._pool = EnvironmentPool(pickle.loads(body), workers=settings.workers, timeout_s=settings.timeout_s)
        self._open: dict[int, Environment] = {}  # number of the episode -> its environment

    async def start(self) -> None:
        await self._pool.__aenter__()

    async def handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Run a call of an `_Episode`. The first of ``arguments`` is the number of the episode.

        "begin" with ``(number, task)`` makes and resets an environment. "close" closes it. Any other ``method`` is a
        method of the environment, which is called with the remaining arguments.
        """
        number, *rest = arguments
        if method == "begin":
            environment = self._open[number] = self._pool.environment(*rest)
            return await environment.reset()
        if method == "close":
            if (environment := self._open.pop(number, None)) is not None:
                await environment.close()
            return None
        return await getattr(self._open[number], method)(*rest)

    async def close(self) -> None:
        await self._pool.close()


def pickle_taskset(taskset: Taskset) -> bytes:
    """Pickle the taskset and the user's source files that define it, for the actors to import.

    Raises `UserError` if the taskset cannot be pickled.
    """
    try:
        return pickle.dumps((loaded_files(), pickle.dumps(taskset)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"{type(taskset).__name__} cannot be held by environment actors ({error}); define it at the top level of a "
            "module or file, or set ray.environments = 0"
        ) from error


@dataclass(frozen=True)
class RayEnvironments:
    """Makes environments that run in the environment actors. Replaces `gleanrl.environments.pool.EnvironmentPool`."""

    actors: ActorPool

    def environment(self, task: Task) -> Environment:
        """Make the environment of an episode of ``task``. Its methods raise `EpisodeLost` if the actor died.

        All episodes of a task run on the same actor, which can reuse what it has cached for the task. If this actor is
        much busier than the others, another one is used.
        """
        return _Episode(self.actors, task)


class _Episode(Environment):
    _numbers = count(1)

    def __init__(self, actors: ActorPool, task: Task) -> None:
        self._actors, self._task = actors, task
        self._number = next(self._numbers)
        self._actor: ActorClient | None = None

    async def reset(self) -> Observation:
        if self._actor is not None:
            raise RuntimeError(f"task {self._task.id!r}: an environment is reset once; make another")
        self._actor = await self._actors.member(self._task.id)
        self._actor.load += 1
        return await self._actor.play("begin", self._number, self._task)

    async def step(self, message: Message) -> Observation:
        if self._actor is None:
            raise RuntimeError(f"task {self._task.id!r}: reset before step, and no step after close")
        return await self._actor.play("step", self._number, message)

    async def conclude(self, stop: StopReason) -> Score | None:
        return None if self._actor is None else await self._actor.play("conclude", self._number, stop)

    async def close(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            actor.load -= 1
            actor.tell("close", self._number)
