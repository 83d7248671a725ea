"""How tasks of an event loop wait for one another without looking again and again."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes everyone who waits; each looks again for what it wanted."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def ring(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():  # done here means cancelled
                waiter.set_result(None)
