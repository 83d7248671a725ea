"""Defines what sampler and learner actors receive to build their parts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gleanrl.config.settings import Config
from gleanrl.learners.models import resolve_device
from gleanrl.runtime.local import Builder, set_up_libraries
from gleanrl.runtime.prepare import Prepared
from gleanrl.runtime.ray.actors import ActorServer
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.schedule.device_lock import DeviceLock
from gleanrl.utils.progress import Silent


@dataclass(frozen=True)
class Plans:
    """The settings and the model that an actor builds its parts from."""

    config: Config
    folder: RunFolder
    model: list[Any]  # [reference] to the model, in a list so that Ray does not fetch it on the way
    tokenizer: Any
    colocated: bool  # the actor shares its device with others, and the driver's lock makes them take turns
    gpus: float  # number of GPUs of the actor, or its share of one

    async def make_builder(self, driver: ActorServer) -> tuple[Builder, Any]:
        """Return a builder that has a copy of the model on this actor's device, and the lock of that device."""
        config = self.config
        set_up_libraries(config)
        device = "cpu" if config.model.device == "auto" and not self.gpus else config.model.device
        model = (await self.model[0]).to(resolve_device(device))
        config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
        no_tasks: Any = None
        prepared = Prepared(no_tasks, (), (), (), model, self.tokenizer)
        lock = driver.device_lock if self.colocated else DeviceLock()
        return Builder(config, self.folder, prepared, Silent()), lock
