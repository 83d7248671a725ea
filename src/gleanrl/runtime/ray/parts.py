"""Defines `Plans`, from which a sampler actor builds its samplers and a learner actor its learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gleanrl.config.settings import Config
from gleanrl.learners.mapped import use_stored
from gleanrl.learners.models import resolve_device
from gleanrl.runtime.local import Builder, set_up_libraries
from gleanrl.runtime.prepare import Prepared
from gleanrl.runtime.ray.actors import ActorServer
from gleanrl.runtime.ray.weights import from_bytes
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.schedule.device_lock import DeviceLock
from gleanrl.utils.progress import Silent


@dataclass(frozen=True)
class Plans:
    """The settings and the model that the driver sends to each sampler and learner actor."""

    config: Config
    folder: RunFolder
    # One reference to the model in Ray's object store: its `skeleton` and, as bytes, its `stored_weights`. It is in a
    # list, because Ray replaces a reference that is itself an argument by its value.
    model: list[Any]
    tokenizer: Any
    colocated: bool  # whether the actor shares its device with other actors, which take turns by the driver's lock
    gpus: float  # number of GPUs that the actor has, which may be a fraction of one

    async def make_builder(self, driver: ActorServer) -> tuple[Builder, Any]:
        """Return a builder for this actor's device, and the lock to acquire for work on the device.

        The model's weights stay in the object store, and so cannot be trained in place (see `gleanrl.learners.mapped`).
        Called inside the actor. A colocated actor uses the driver's lock, any other actor a lock of its own.
        """
        config = self.config
        set_up_libraries(config)
        device = "cpu" if config.model.device == "auto" and not self.gpus else config.model.device
        model, stored = await self.model[0]
        use_stored(model, from_bytes(stored), resolve_device(device))
        config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
        no_tasks: Any = None
        prepared = Prepared(no_tasks, (), (), (), model, self.tokenizer)
        lock = driver.device_lock if self.colocated else DeviceLock()
        return Builder(config, self.folder, prepared, Silent()), lock
