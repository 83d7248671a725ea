"""Shared by sampler and learner actors: building their parts, and spans for the driver's timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gleanrl.config.settings import Config
from gleanrl.learners.models import resolve_device
from gleanrl.runtime.local import Builder, set_up_libraries
from gleanrl.runtime.prepare import Prepared
from gleanrl.runtime.ray.actors import ActorClient, ActorServer
from gleanrl.runtime.ray.lock import RemoteLock
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.schedule.device_lock import DeviceLock, TakeDevice
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

    async def make_builder(self) -> Builder:
        """Make a builder whose model is this actor's own, on its device."""
        config = self.config
        set_up_libraries(config)
        device = "cpu" if config.model.device == "auto" and not self.gpus else config.model.device
        model = (await self.model[0]).to(resolve_device(device))
        config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
        no_tasks: Any = None
        prepared = Prepared(no_tasks, (), (), (), model, self.tokenizer)
        return Builder(config, self.folder, prepared, Silent())

    def make_device_lock(self, driver: ActorServer) -> TakeDevice:
        """Return the driver's lock if the device is shared with other actors, else one for the actor's own work."""
        return RemoteLock(driver) if self.colocated else DeviceLock()


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
