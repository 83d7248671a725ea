"""What each route took: requests, statuses, latency, processor time of the event loop; and what processes hold."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
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
        p50, p99 = (1e3 * ordered[ceil(share * len(ordered)) - 1] if ordered else 0.0 for share in (0.5, 0.99))
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


@dataclass(frozen=True, slots=True)
class Process:
    """A line of the system's table; ``resident`` is in bytes."""

    pid: int
    parent: int
    group: int
    resident: int


def processes() -> dict[int, Process]:
    """All that the system tells of, by process id; empty where it does not."""
    page, found = os.sysconf("SC_PAGE_SIZE"), {}
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError, ValueError, IndexError):  # it may be gone
                with open(f"/proc/{name}/stat", "rb", buffering=0) as stat:
                    fields = stat.read(4096).rpartition(b")")[2].split()
                found[int(name)] = Process(int(name), int(fields[1]), int(fields[2]), page * int(fields[21]))
    return found


def family(roots: Sequence[int], table: Mapping[int, Process]) -> dict[int, list[Process]]:
    """Of each root: itself, its descendants, and who is in the process group that it leads."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for process in table.values():
        children[process.parent].append(process.pid)
    found: dict[int, list[Process]] = {}
    for root in roots:
        members, ahead = {}, [root, *(process.pid for process in table.values() if process.group == root)]
        while ahead:
            pid = ahead.pop()
            if pid in table and pid not in members:
                members[pid] = table[pid]
                ahead += children[pid]
        found[root] = list(members.values())
    return found


def resident(members: Iterable[Process]) -> int:
    """Bytes that processes hold; what two share counts twice."""
    return sum(process.resident for process in members)


def proportional(members: Iterable[Process]) -> int:
    """Bytes that processes hold, with a share only of what they share with others; resident ones where nobody says."""
    return sum(_proportional(process) for process in members)


def _proportional(process: Process) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return process.resident


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
