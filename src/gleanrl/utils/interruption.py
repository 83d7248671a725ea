"""A flag that asks a program to stop, and that cancels what the program is waiting for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class Interruption:
    """A flag that is set to stop a program, for example on Ctrl-C.

    When it is set, work that is awaited through `unless_interrupted` is cancelled.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._waiting: asyncio.Future[Any] | None = None
        self._cancelled: asyncio.Future[Any] | None = None

    def interrupt(self) -> None:
        self.interrupted = True
        self.cancel_waiting()

    def cancel_waiting(self) -> None:
        """Cancel the work that is awaited through `unless_interrupted` now, without setting the flag."""
        self._cancelled = self._waiting
        if self._waiting is not None:
            self._waiting.cancel()

    async def unless_interrupted(self, work: Awaitable[T]) -> T | None:
        """Await ``work`` and return its result, or None if `interrupt` or `cancel_waiting` cancelled it.

        Only one caller at a time may wait. If the flag is set already, ``work`` is cancelled at once.
        """
        waiting = self._waiting = asyncio.ensure_future(work)
        if self.interrupted:
            self.cancel_waiting()
        try:
            return await waiting
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            caller_is_cancelled = caller is not None and caller.cancelling() > 0
            if waiting is self._cancelled and waiting.cancelled() and not caller_is_cancelled:
                return None
            raise
        finally:
            self._waiting = self._cancelled = None
