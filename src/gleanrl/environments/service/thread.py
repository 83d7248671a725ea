"""One thread for what a taskset computes itself: nobody promised that it may be in two at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from gleanrl.environments.service.episodes import Refused

_Work = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class OneThread:
    """Runs one call after the other. A call that never returns does not keep the process from ending."""

    def __init__(self) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._pending: set[asyncio.Future[Any]] = set()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="taskset", daemon=True).start()

    async def call(self, call: Callable[[], Any]) -> Any:
        """What ``call`` returns. Raises `Refused` where it raises, or where the thread was closed meanwhile."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.add(future)
        self._work.put((call, future))
        try:
            return await future
        finally:
            self._pending.discard(future)

    def close(self) -> None:
        """Refuse what is not done."""
        self._work.put(None)
        for future in self._pending:
            if not future.done():
                future.set_exception(Refused.draining())

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            call, future = work
            if future.done():  # nobody waits for it any more
                continue
            value, error = None, None
            try:
                value = call()
            except BaseException as raised:  # SystemExit too: a taskset that exits costs its request
                error = Refused.of(raised)
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(_settle, future, value, error)


def _settle(future: asyncio.Future[Any], value: Any, error: Refused | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
