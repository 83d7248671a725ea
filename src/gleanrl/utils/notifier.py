"""A condition that tasks of one event loop wait for without polling."""

from __future__ import annotations

import asyncio


class Notifier:
    """`notify` wakes every task in `wait`. Each task then checks for itself whether its condition holds."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():  # done here means cancelled
                waiter.set_result(None)
