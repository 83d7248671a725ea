"""Shared by sampler and learner actors: building their parts, the driver's device lock, spans for its timeline.

`Plans` and `RemoteLock` are used inside an actor, `LockAnswers` and `record_spans` in the driver.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from gleanrl.config.settings import Config
from gleanrl.learners.models import resolve_device
from gleanrl.runtime.local import Builder, set_up_libraries
from gleanrl.runtime.prepare import Prepared
from gleanrl.runtime.ray.actors import ActorClient, Endpoint
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.schedule.device_lock import DeviceHold, DeviceLock
from gleanrl.schedule.timeline import Timeline
from gleanrl.utils.progress import Silent

Span = tuple[str, float, float, dict[str, Any]]


@dataclass(frozen=True)
class Plans:
    """The settings and the model that an actor builds its parts from."""

    config: Config
    folder: RunFolder
    model: list[Any]  # [reference] to the model, in a list so that Ray does not fetch it on the way
    tokenizer: Any
    colocated: bool  # the actor shares its device with others and takes turns by the driver's lock
    gpus: float  # the actor's share

    async def builder(self) -> Builder:
        """Make a builder whose model is this actor's own, on its device."""
        config = self.config
        set_up_libraries(config)
        device = "cpu" if config.model.device == "auto" and not self.gpus else config.model.device
        model = (await self.model[0]).to(resolve_device(device))
        config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
        no_tasks: Any = None
        prepared = Prepared(no_tasks, (), (), (), model, self.tokenizer)
        return Builder(config, self.folder, prepared, Silent())

    def device_lock(self, driver: Endpoint) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
        """Return the driver's lock if the device is shared with other actors, else one for the actor's own work."""
        return RemoteLock(driver) if self.colocated else DeviceLock()


def without_model(prepared: Prepared) -> Prepared:
    """Return a copy for the driver, which holds the model's configuration without its weights."""
    return replace(prepared, model=ModelShape(prepared.model.config))


@dataclass(frozen=True)
class ModelShape:
    """A model's configuration, without its weights."""

    config: Any


# --- spans ------------------------------------------------------------------------------------------
class Spans:
    """Records an actor's spans until the driver gets them."""

    def __init__(self) -> None:
        self._kept: list[Span] = []

    def record(self, kind: str, start: float, end: float, **tags: Any) -> None:
        self._kept.append((kind, start, end, tags))

    def drain(self) -> list[Span]:
        kept, self._kept = self._kept, []
        return kept


def record_spans(timeline: Timeline | None, client: ActorClient, spans: list[Span]) -> None:
    """Put an actor's spans onto the driver's timeline."""
    if timeline is not None:
        for kind, start, end, tags in spans:
            timeline.record(kind, start + client.clock_offset, end + client.clock_offset, **tags)


# --- the device lock --------------------------------------------------------------------------------
class RemoteLock:
    """The driver's `DeviceLock`, inside an actor."""

    def __init__(self, driver: Endpoint) -> None:
        self._driver = driver

    @asynccontextmanager
    async def __call__(self, work: Any) -> AsyncIterator[RemoteHold]:
        number = await self._driver.call("acquire", work)
        try:
            yield RemoteHold(self._driver, number)
        finally:
            self._driver.tell("release", number)


class RemoteHold:
    """A `DeviceHold` inside an actor.

    Only the driver knows what waits. Therefore `wanted` is always true, and `give_way` returns at once if nothing
    waits.
    """

    wanted = True

    def __init__(self, driver: Endpoint, number: int) -> None:
        self._driver, self._number = driver, number

    async def give_way(self) -> None:
        await self._driver.call("give_way", self._number)


class LockAnswers:
    """Answers `RemoteLock` in the driver. What a dead actor held is released (`forget`)."""

    def __init__(self) -> None:
        self.device_lock = DeviceLock()
        """The run's lock, once there is a run."""
        self._numbers = count(1)
        self._held: dict[int, tuple[ActorClient, Any, DeviceHold]] = {}

    @property
    def answers(self) -> dict[str, Callable[..., Any]]:
        return {"acquire": self.acquire, "release": self.release, "give_way": self.give_way}

    async def acquire(self, client: ActorClient, work: Any) -> int:
        context = self.device_lock(work)
        held = await context.__aenter__()
        number = next(self._numbers)
        self._held[number] = (client, context, held)
        return number

    async def release(self, _client: ActorClient, number: int) -> None:
        if (found := self._held.pop(number, None)) is not None:
            await found[1].__aexit__(None, None, None)

    async def give_way(self, _client: ActorClient, number: int) -> None:
        held = self._held[number][2]
        if held.wanted:
            await held.give_way()

    async def forget(self, client: ActorClient) -> None:
        for number in [number for number, (owner, _, _) in self._held.items() if owner is client]:
            await self.release(client, number)
