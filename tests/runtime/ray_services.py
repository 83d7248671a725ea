"""Services that the tests run in actors. The module imports little, because each actor is a new process."""

from __future__ import annotations

import asyncio
import os
import threading
from itertools import count
from pathlib import Path
from typing import Any

from gleanrl.runtime.ray.actors import ActorServer, Service
from gleanrl.runtime.ray.environments import EnvironmentService
from gleanrl.utils.errors import UserError


class Odd(Exception):
    """An exception that cannot be pickled, because its arguments are not those of ``__init__``."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


class Asked(Service):
    """A service whose calls return, raise, hang or exit as a test needs.

    ``start``: "mistake" raises UserError at the start; "dies", or the path of an existing file, ends the process.
    """

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
    """A reward whose score is the number of calls so far."""
    return float(next(ASKED))


class MortalEnvironments(EnvironmentService):
    """Environments whose process a test can kill."""

    async def handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return os.getpid() if method == "pid" else await super().handle(method, arguments)
