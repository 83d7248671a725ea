"""Runs coroutines from code that does not await, on an event loop that lasts as long as the program.

Tasksets use it: their methods are synchronous and may be called while another loop runs in the same thread. What the
coroutines leave open, such as connections, stays open between calls and is closed at the end of the program.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
_END_S = 5.0  # for what is open to close itself


def run(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns. Blocks this thread until then."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="gleanrl-background", daemon=True).start()
    atexit.register(_end, loop, os.getpid())
    return loop


def _end(loop: asyncio.AbstractEventLoop, process: int) -> None:
    async def cancel() -> None:
        lasting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in lasting:
            task.cancel()
        await asyncio.gather(*lasting, return_exceptions=True)

    if os.getpid() == process:  # a forked child has no such thread
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(cancel(), loop).result(_END_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_loop.cache_clear)
