"""What samplers and learners in actors have in common: a builder of parts, spans for the driver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from gleanrl.config.settings import Config
from gleanrl.learners.models import resolve_device
from gleanrl.runtime.local import Builder, set_up_libraries
from gleanrl.runtime.prepare import Prepared
from gleanrl.runtime.ray.device_lock import RemoteLease
from gleanrl.runtime.ray.link import Host, Link
from gleanrl.runtime.ray.weights import unpacked
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.schedule.device_lock import DeviceLock
from gleanrl.schedule.timeline import Timeline
from gleanrl.utils.progress import Silent

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
        return Builder(config, self.folder, prepared, Silent())

    def device_lock(self, host: Host) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
        """Whose turn it is on the actor's device: the driver's word, or among its own work only."""
        return RemoteLease(host) if self.leased else DeviceLock()


def without_model(prepared: Prepared) -> Prepared:
    """What the driver keeps: of the model only what it asks about."""
    return replace(prepared, model=ModelShape(prepared.model.config))


@dataclass(frozen=True)
class ModelShape:
    """A model's configuration, without its weights."""

    config: Any
