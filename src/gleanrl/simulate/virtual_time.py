"""An event loop with a virtual clock, on which hours of waiting take no real time and every run has the same result.

Code that uses `asyncio.sleep`, asyncio's timeouts or ``loop.time`` runs on it unchanged, because all of them use the
loop's clock. So it also serves to test code that is hard to test with a real clock, such as rate limits and retries.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class Deadlock(RuntimeError):
    """Raised if no task can ever continue, because every task waits, no timer is set and no callback is due."""


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0  # seconds

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("every task waits and no timer is set: nothing can ever happen again")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while callbacks run, and then jumps to the next timer. It starts at 0 s.

    `run_in_executor` runs the function immediately in the calling thread, which takes no virtual time. The loop never
    waits for sockets, so network traffic does not work.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:  # type: ignore[override]
        """Run the function at once, and return a future that holds its result."""
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine as `asyncio.run` does, in virtual time.

    Raises:
        Deadlock: on a real event loop the coroutine would wait forever.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
