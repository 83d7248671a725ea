"""What each route took: requests, statuses, latency, and the event loop's processor time."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
RECENT = 1024  # requests of a route that its quantiles are of
MEASURED = 8  # of so many requests of a route, one has its processor time taken: to ask for it takes a while itself
MIB = 1 << 20


class Route:
    """What was asked of one address."""

    __slots__ = ("cpu_s", "latency_s", "measured", "requests", "statuses")

    def __init__(self) -> None:
        self.requests = 0
        self.statuses: Counter[int] = Counter()
        self.latency_s: deque[float] = deque(maxlen=RECENT)
        self.measured = 0  # requests whose processor time was taken ...
        self.cpu_s = 0.0  # ... and how much that was

    def profile(self, name: str) -> dict[str, Any]:
        ordered = sorted(self.latency_s)
        p50, p99 = (1e3 * ordered[int(share * (len(ordered) - 1))] if ordered else 0.0 for share in (0.5, 0.99))
        return {
            "route": name,
            "requests": self.requests,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "latency_p50_ms": p50,
            "latency_p99_ms": p99,
            "cpu_ms": 1e3 * self.cpu_s / max(self.measured, 1),
        }


class Metered(Awaitable[T]):
    """Awaits ``call`` and adds to ``route`` the processor time of each stretch in which it really ran."""

    __slots__ = ("_call", "_route")

    def __init__(self, call: Awaitable[T], route: Route) -> None:
        self._call, self._route = call, route

    def __await__(self) -> Generator[Any, Any, T]:
        inner: Any = self._call.__await__()
        route, clock = self._route, time.thread_time
        send, value = inner.send, None
        while True:
            began = clock()
            try:
                awaited = send(value)
            except StopIteration as end:
                return end.value
            finally:
                route.cpu_s += clock() - began
            try:
                value, send = (yield awaited), inner.send
            except BaseException as error:  # into the call, which may catch it
                value, send = error, inner.throw


def process_memory(pid: int) -> int | None:
    """Resident bytes; None where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if pid == os.getpid():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return None


def process_cpu_s(pid: int) -> float | None:
    """Processor seconds since the process began; None where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")
    return None
