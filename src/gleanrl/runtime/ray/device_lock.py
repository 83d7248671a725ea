"""The driver's device lock, for actors that share a device."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from gleanrl.runtime.ray.link import Host, Link
from gleanrl.schedule.device_lock import DeviceHold, DeviceLock


class RemoteLease:
    """`gleanrl.schedule.device_lock.DeviceLock` of the driver, asked by an actor."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @asynccontextmanager
    async def __call__(self, work: Any) -> AsyncIterator[RemoteHold]:
        number = await self._host.ask("device_lock", work)
        try:
            yield RemoteHold(self._host, number)
        finally:
            self._host.tell("release", number)


class RemoteHold:
    """As `DeviceHold`. Only the driver knows who waits: `give_way` returns at once if nobody does."""

    wanted = True

    def __init__(self, host: Host, number: int) -> None:
        self._host, self._number = host, number

    async def give_way(self) -> None:
        await self._host.ask("give_way", self._number)


class Leases:
    """Answers `RemoteLease`; what an actor that dies has held is given on."""

    def __init__(self) -> None:
        self.device_lock = DeviceLock()
        """The run's, once there is one."""
        self._numbers = count(1)
        self._held: dict[int, tuple[Link, Any, DeviceHold]] = {}

    @property
    def answers(self) -> dict[str, Callable[..., Any]]:
        return {"device_lock": self.take, "release": self.release, "give_way": self.give_way}

    async def take(self, link: Link, work: Any) -> int:
        context = self.device_lock(work)
        held = await context.__aenter__()
        number = next(self._numbers)
        self._held[number] = (link, context, held)
        return number

    async def release(self, _link: Link, number: int) -> None:
        if (found := self._held.pop(number, None)) is not None:
            await found[1].__aexit__(None, None, None)

    async def give_way(self, _link: Link, number: int) -> None:
        held = self._held[number][2]
        if held.wanted:
            await held.give_way()

    async def forget(self, link: Link) -> None:
        for number in [number for number, (owner, _, _) in self._held.items() if owner is link]:
            await self.release(link, number)
