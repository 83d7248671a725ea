"""A timeout that is fair to a service where this process was too busy to listen.

Computing, imports or a crowded machine may keep the event loop from turning for seconds. Answers that came meanwhile
are read in the same turn in which their time is up: a plain timeout throws them away, and they are asked (and paid)
for again.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

_STALL_S = 0.05  # a timer that fires so much late tells of a loop that stood still
_MOST = 9  # times a timeout's seconds that may be given back


class Clock:
    """Raises `TimeoutError` after ``seconds`` as `asyncio.timeout` does, but puts its end off where the loop stood
    still: what was lost is given back, and again for as long as the loop is that late (thousands of answers at once on
    a crowded machine), up to nine times ``seconds`` in all. Use it as ``async with Clock(30)``.
    """

    __slots__ = ("_due", "_handle", "_limit", "_loop", "_seconds", "_spare")

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._seconds, self._spare = seconds, _MOST * seconds

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._set(self._seconds)
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        self._handle.cancel()
        return await self._limit.__aexit__(*error)

    def expired(self) -> bool:
        return self._limit.expired()

    def _set(self, seconds: float) -> None:
        self._due = self._loop.time() + seconds
        self._handle = self._loop.call_at(self._due, self._ring)

    def _ring(self) -> None:
        lost = min(self._loop.time() - self._due, self._spare)
        if lost > _STALL_S:
            self._spare -= lost
            self._set(lost)
        else:
            self._limit.reschedule(self._loop.time())
