"""Runs coroutines from synchronous code, on an event loop that lasts as long as the program.

Tasksets that need asynchronous libraries use this loop, because the methods of a taskset are synchronous and may be
called while another event loop runs in the same thread. Connections and other resources that the coroutines open stay
open between calls and are closed when the program ends.
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
_END_S = 5.0  # seconds that unfinished coroutines have to close their resources when the program ends


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine ``work`` on the background loop and return its result. Blocks the calling thread meanwhile."""
    with _making:
        loop = _loop()
    return asyncio.run_coroutine_threadsafe(work, loop).result()


_making = threading.Lock()  # `cache` lets two threads that call a function for the first time both run it


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="gleanrl-background", daemon=True).start()
    atexit.register(_end, loop, os.getpid())
    return loop


def _forget() -> None:
    """Let a forked child make a loop of its own, because it has no thread that runs the parent's."""
    _making.release()
    _loop.cache_clear()


def _end(loop: asyncio.AbstractEventLoop, process: int) -> None:
    async def cancel() -> None:
        lasting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in lasting:
            task.cancel()
        await asyncio.gather(*lasting, return_exceptions=True)

    if os.getpid() == process:  # a forked child inherits this exit handler, but not the thread that runs the loop
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(cancel(), loop).result(_END_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_forget)
