"""A request to stop, which also ends a wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class Interruption:
    """A flag that Ctrl-C sets, for example. Setting it cancels work that is awaited through `unless_interrupted`."""

    def __init__(self) -> None:
        self.interrupted = False
        self._waiting: asyncio.Future[Any] | None = None

    def interrupt(self) -> None:
        self.interrupted = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def unless_interrupted(self, work: Awaitable[T]) -> T | None:
        """Return the result of ``work``, or None if an interruption cancelled it. One caller may wait at a time."""
        waiting = self._waiting = asyncio.ensure_future(work)
        if self.interrupted:
            waiting.cancel()
        try:
            return await waiting
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            caller_is_cancelled = caller is not None and caller.cancelling() > 0
            if self.interrupted and waiting.cancelled() and not caller_is_cancelled:
                return None
            raise
        finally:
            self._waiting = None
