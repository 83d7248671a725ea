"""What samplers and learners in actors have in common: a builder of parts, spans for the driver, the device lease."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from gleanrl.config import Config
from gleanrl.learners.models import resolve_device
from gleanrl.lease import DeviceLease, Held
from gleanrl.monitors import Console
from gleanrl.runfolder import RunFolder
from gleanrl.runtime.local import Builder, set_up_libraries
from gleanrl.runtime.prepare import Prepared
from gleanrl.runtime.ray.link import Host, Link
from gleanrl.runtime.ray.weights import unpacked
from gleanrl.timeline import Timeline

Span = tuple[str, float, float, dict[str, Any]]


class Spans:
    """Records spans until the driver gets them."""

    def __init__(self) -> None:
        self._kept: list[Span] = []

    def record(self, kind: str, start: float, end: float, **tags: Any) -> None:
        self._kept.append((kind, start, end, tags))

    def drain(self) -> list[Span]:
        kept, self._kept = self._kept, []
        return kept


def recorded(timeline: Timeline | None, link: Link, spans: list[Span]) -> None:
    """Put an actor's spans onto the driver's timeline."""
    if timeline is not None:
        for kind, start, end, tags in spans:
            timeline.record(kind, start + link.clock_offset, end + link.clock_offset, **tags)


@dataclass(frozen=True)
class Plans:
    """What an actor builds its parts from."""

    config: Config
    folder: RunFolder
    model: list[Any]  # a reference to a `Parcel`, in a list so that Ray does not fetch it on the way
    tokenizer: Any
    leased: bool  # the device is shared with other actors, and the driver says whose turn it is
    gpus: float  # share that the actor has

    async def builder(self) -> Builder:
        """A builder whose model is this actor's own, on its device."""
        config = self.config
        set_up_libraries(config)
        device = "cpu" if config.model.device == "auto" and not self.gpus else config.model.device
        model = unpacked(await self.model[0]).to(resolve_device(device))
        config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
        no_tasks: Any = None
        prepared = Prepared(no_tasks, (), (), (), model, self.tokenizer)
        return Builder(config, self.folder, prepared, Console())

    def lease(self, host: Host) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
        """Whose turn it is on the actor's device: the driver's word, or among its own work only."""
        return RemoteLease(host) if self.leased else DeviceLease()


# --- the device lease, held by the driver ---------------------------------------------------------
class RemoteLease:
    """`gleanrl.lease.DeviceLease` of the driver, asked by an actor."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @asynccontextmanager
    async def __call__(self, work: Any) -> AsyncIterator[RemoteHeld]:
        number = await self._host.ask("lease", work)
        try:
            yield RemoteHeld(self._host, number)
        finally:
            self._host.tell("release", number)


class RemoteHeld:
    """As `gleanrl.lease.Held`. Only the driver knows who waits: `give_way` returns at once if nobody does."""

    wanted = True

    def __init__(self, host: Host, number: int) -> None:
        self._host, self._number = host, number

    async def give_way(self) -> None:
        await self._host.ask("give_way", self._number)


class Leases:
    """Answers `RemoteLease`; what an actor that dies has held is given on."""

    def __init__(self) -> None:
        self.lease = DeviceLease()
        """The run's, once there is one."""
        self._numbers = count(1)
        self._held: dict[int, tuple[Link, Any, Held]] = {}

    @property
    def answers(self) -> dict[str, Callable[..., Any]]:
        return {"lease": self.take, "release": self.release, "give_way": self.give_way}

    async def take(self, link: Link, work: Any) -> int:
        context = self.lease(work)
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


def without_model(prepared: Prepared) -> Prepared:
    """What the driver keeps: of the model only what it asks about."""
    return replace(prepared, model=ModelShape(prepared.model.config))


@dataclass(frozen=True)
class ModelShape:
    """A model's configuration, without its weights."""

    config: Any
