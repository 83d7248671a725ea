"""The driver's device lock for actors that share a device: `RemoteLock` in an actor, `LockAnswers` in the driver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from gleanrl.runtime.ray.actors import ActorClient, ActorServer
from gleanrl.schedule.device_lock import DeviceHold, DeviceLock


class RemoteLock:
    """The driver's `DeviceLock`, inside an actor."""

    def __init__(self, driver: ActorServer) -> None:
        self._driver = driver

    @asynccontextmanager
    async def __call__(self, work: Any) -> AsyncIterator[RemoteHold]:
        number = await self._driver.call("acquire", work)
        try:
            yield RemoteHold(self._driver, number)
        finally:
            self._driver.tell("release", number)


@dataclass(frozen=True)
class RemoteHold:
    """A `DeviceHold` inside an actor.

    Only the driver knows what waits. Therefore `wanted` is always true, and `give_way` returns at once if nothing
    waits.
    """

    driver: ActorServer
    number: int
    wanted: bool = True

    async def give_way(self) -> None:
        await self.driver.call("give_way", self.number)


class LockAnswers:
    """Answers `RemoteLock` in the driver. What a dead actor held is released (`forget`).

    Attributes:
        device_lock: the run's lock, once there is a run.
    """

    def __init__(self) -> None:
        self.device_lock = DeviceLock()
        self.answers = {"acquire": self.acquire, "release": self.release, "give_way": self.give_way}
        self._numbers = count(1)
        self._held: dict[int, tuple[ActorClient, Any, DeviceHold]] = {}

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
