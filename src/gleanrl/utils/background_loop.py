"""Runs coroutines from synchronous code, on an event loop that lasts as long as the program.

Tasksets use this loop, because their methods are synchronous and may be called while another loop runs in the same
thread. Connections and other resources that the coroutines open stay open between calls. They are closed at the end of
the program.
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
_END_S = 5.0  # time for open resources to be closed at the end of the program


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the background loop and return its result. Blocks this thread until then."""
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

    if os.getpid() == process:  # a forked child does not have the loop's thread
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(cancel(), loop).result(_END_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_loop.cache_clear)
