"""Environments in actors: each plays many episodes, and its death costs them no more than a new beginning."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from itertools import count
from typing import Any

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments.pool import (
    EnvironmentDied,
    EnvironmentFailure,
    EnvironmentPool,
    EnvironmentRaised,
    EnvironmentTimeout,
)
from gleanrl.protocols import Concluding, Environment, EpisodeLost, Observation, Taskset
from gleanrl.runtime.ray.crew import Crew
from gleanrl.runtime.ray.link import ActorDied, Host, Link
from gleanrl.types import Message, Score, StopReason, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import loaded_files, restore_files

_KINDS: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (EnvironmentDied, EnvironmentRaised, EnvironmentTimeout, EpisodeLost)
}


class EnvironmentService:
    """Inside an actor: an environment pool."""

    def __init__(self, _host: Host, taskset: bytes, settings: EnvironmentSettings) -> None:
        files, body = pickle.loads(taskset)
        restore_files(files)
        self._pool = EnvironmentPool(pickle.loads(body), workers=settings.workers, timeout_s=settings.timeout_s)
        self._open: dict[int, Environment] = {}

    async def start(self) -> None:
        await self._pool.__aenter__()

    async def reset(self, number: int, task: bytes) -> bytes | tuple[Any, ...]:
        environment = self._open[number] = self._pool.environment(pickle.loads(task))
        return await _answered(environment.reset())

    async def step(self, number: int, message: Message) -> bytes | tuple[Any, ...]:
        return await _answered(self._open[number].step(message))

    async def conclude(self, number: int, stop: StopReason) -> bytes | tuple[Any, ...]:
        environment = self._open[number]
        assert isinstance(environment, Concluding)  # as every episode of a pool
        return await _answered(environment.conclude(stop))

    async def leave(self, number: int) -> None:
        if (environment := self._open.pop(number, None)) is not None:
            await environment.close()

    async def close(self) -> None:
        await self._pool.close()


async def _answered(answer: Any) -> bytes | tuple[Any, ...]:
    """An observation or a score, encoded; or the name and arguments of a failure, which itself cannot be pickled."""
    try:
        return pickle.dumps(await answer)
    except EnvironmentRaised as error:
        return (type(error).__name__, error.task_id, error.kind, error.detail, error.traceback_text)
    except EpisodeLost as error:
        return (type(error).__name__, str(error))
    except EnvironmentFailure as error:
        return (type(error).__name__, error.task_id, str(error).removeprefix(f"task {error.task_id!r}: "))


def taskset_bytes(taskset: Taskset) -> bytes:
    """The taskset and the files that define it. Raises `UserError` where it cannot travel."""
    try:
        return pickle.dumps((loaded_files(), pickle.dumps(taskset)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"{type(taskset).__name__} cannot be held by environment actors ({error}); define it at the top level of a "
            "module or file, or set ray.environments = 0"
        ) from error


class RayEnvironments:
    """Environment actors as one, with the surface of `gleanrl.environments.pool.EnvironmentPool`."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew

    async def __aenter__(self) -> RayEnvironments:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing: the actors are their crew's."""

    def environment(self, task: Task) -> Environment:
        """One episode of ``task``; a task's episodes go to one actor where load allows. `EpisodeLost` if that dies."""
        return _Episode(self.crew, task)


class _Episode:
    _numbers = count(1)

    def __init__(self, crew: Crew, task: Task) -> None:
        self._crew, self._task = crew, task
        self._number = next(self._numbers)
        self._link: Link | None = None

    async def reset(self) -> Observation:
        if self._link is not None:
            raise RuntimeError(f"task {self._task.id!r}: an environment is reset once; make another")
        self._link = await self._crew.member(self._task.id)
        self._link.load += 1
        return await self._ask("reset", pickle.dumps(self._task))

    async def step(self, message: Message) -> Observation:
        return await self._ask("step", message)

    async def conclude(self, stop: StopReason) -> Score | None:
        return None if self._link is None else await self._ask("conclude", stop)

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.load -= 1
            link.tell("leave", self._number)

    async def _ask(self, method: str, argument: Any) -> Any:
        if self._link is None:
            raise RuntimeError(f"task {self._task.id!r}: reset before step, and no step after close")
        try:
            answer = await self._link.call(method, self._number, argument)
        except ActorDied as error:
            self._crew.cluster.counts["episodes_lost"] += 1
            raise EpisodeLost(str(error)) from None
        if isinstance(answer, bytes):
            return pickle.loads(answer)
        raise _KINDS[answer[0]](*answer[1:])
