"""What tests ask of an actor; loads little, since each actor is a new process."""

from __future__ import annotations

import asyncio
import os
import threading
from itertools import count
from pathlib import Path
from typing import Any

from gleanrl.runtime.ray.actors import ActorServer, Service
from gleanrl.utils.errors import UserError


class Odd(Exception):
    """It cannot be pickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


class Asked(Service):
    """What a test asks of an actor."""

    def __init__(self, driver: ActorServer, start: str = "") -> None:
        if start == "mistake":
            raise UserError("no such thing")
        if start == "dies" or (start and Path(start).exists()):
            os._exit(3)
        self._device_lock, self._record = driver.device_lock, driver.record

    async def echo(self, value: Any) -> Any:
        return value

    async def pid(self) -> int:
        return os.getpid()

    async def unsendable(self) -> Any:
        return threading.Lock()

    async def hang(self) -> None:
        await asyncio.Event().wait()

    async def fail(self, how: str) -> None:
        raise {"mistake": UserError("yours"), "value": ValueError("mine"), "odd": Odd(1, 2)}[how]

    async def worked(self, work: str) -> None:
        async with self._device_lock(work):
            await asyncio.sleep(0)

    async def timed(self, value: Any) -> Any:
        self._record("train", 0.0, 1.0)
        return value

    async def hold(self) -> None:
        async with self._device_lock("sample"):
            await asyncio.Event().wait()


ASKED = count(1)


def counted(request: Any) -> float:
    """A reward that says how often it was asked."""
    return float(next(ASKED))
