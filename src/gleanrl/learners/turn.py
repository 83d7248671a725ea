"""The learner's turn on a device that others want too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import TypeVar

from gleanrl.schedule.device_lock import DeviceHold

T = TypeVar("T")


def in_turn(parts: Iterable[T], between: Callable[[], None]) -> Iterator[T]:
    """The parts, with a call of ``between`` before each but the first."""
    for number, part in enumerate(parts):
        if number:
            between()
        yield part


class DeviceSlice:
    """Work on a thread that gives way between two of its parts to those who go first: call it there.

    Made on the event loop that ``held`` belongs to. ``record(start, end)`` is told of each stretch of work, in seconds
    of `perf_counter`.
    """

    def __init__(self, held: DeviceHold | None, record: Callable[[float, float], None] | None) -> None:
        self._held, self._record = held, record
        self._loop = asyncio.get_running_loop() if held is not None else None
        self._started = perf_counter()
        self.away_s = 0.0
        """Seconds that others had the device."""

    def __call__(self) -> None:
        if self._held is None or self._loop is None or not self._held.wanted:
            return
        left = self.end()
        asyncio.run_coroutine_threadsafe(self._held.give_way(), self._loop).result()
        self._started = perf_counter()
        self.away_s += self._started - left

    def end(self) -> float:
        """The stretch of work has ended; when it did."""
        now = perf_counter()
        if self._record is not None:
            self._record(self._started, now)
        return now
