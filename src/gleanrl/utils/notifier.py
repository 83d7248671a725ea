"""Lets asyncio tasks wait, without polling, until another task of the same event loop reports a change."""

from __future__ import annotations

import asyncio


class Notifier:
    """Wakes waiting tasks: `notify` ends the `wait` of every task that waits at that moment.

    A task that waits for a condition must check it after each `wait`, because `notify` does not say what has changed.
    """

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():  # a waiter that is already done was cancelled
                waiter.set_result(None)
