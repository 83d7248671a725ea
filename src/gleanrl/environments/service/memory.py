"""How much memory the server and its workers hold, and what is done about too much."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from gleanrl.environments.service.meter import MIB, Process, family, process_memory, processes, proportional, resident

WATCH_S, FRESH_S = 1.0, 2.0  # between two looks while anything runs; for so long one counts
OVER = 1.1  # of --max-memory, above which a worker is ended
SHARE = 0.8  # of the machine's memory, or of what this process may have of it, that is --max-memory where nobody says
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes: of all, and of each worker with all that it started, by its process id."""

    total: int | None
    workers: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Memory:
    """Bounds, in MiB; None = none. Where the system does not say what a process holds, nothing is bounded.

    Above ``most`` over all processes there is no room for a further episode, and a tenth above it the worker that
    holds the most is ended; so is one above ``worker_most``. That costs its live episodes, and another takes its
    place. What a worker started counts as the worker's.
    """

    pids: Callable[[], Sequence[int]]
    most: float | None
    worker_most: float | None
    _measured_at: float = float("-inf")
    _why: str = ""
    _watching: asyncio.Task[None] | None = None

    def held(self) -> Held:
        """What is held now, as far as it is known."""
        return _held(self.pids(), *self._bytes)

    def room(self) -> str:
        """Why there is no room for a further episode; empty where there is."""
        if self._bounded and asyncio.get_running_loop().time() - self._measured_at > FRESH_S:
            self._judge(self.held())
        return self._why

    def watch(self, runs: Callable[[], bool]) -> None:
        """Look every second from now on, for as long as ``runs()``."""
        if self._bounded and self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch(runs))

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    @property
    def _bounded(self) -> bool:
        return self.most is not None or self.worker_most is not None

    async def _watch(self, runs: Callable[[], bool]) -> None:
        try:
            while runs():  # no event tells that a process has grown
                await asyncio.sleep(WATCH_S)
                self._judge(await asyncio.to_thread(_held, self.pids(), *self._bytes))
        finally:
            self._watching = None

    def _judge(self, held: Held) -> None:
        self._measured_at, self._why = asyncio.get_running_loop().time(), ""
        most, worker_most = self._bytes
        for pid, size in held.workers.items():
            if size > worker_most:
                self._end(pid, size, "--max-worker-memory")
        if held.total is None or held.total <= most:
            return
        self._why = f"the server and its workers hold {held.total / MIB:.0f} MiB of {most / MIB:.0f} (--max-memory)"
        if held.total > OVER * most and sum(held.workers.values()) > held.total - most:
            self._end(*max(held.workers.items(), key=lambda item: item[1]), "--max-memory")

    @property
    def _bytes(self) -> tuple[float, float]:
        most, worker_most = (inf if bound is None else bound * MIB for bound in (self.most, self.worker_most))
        return most, worker_most

    def _end(self, pid: int, size: float, option: str) -> None:
        if pid in self.pids():
            _log.warning("worker %d holds %.0f MiB (%s): it is ended", pid, size / MIB, option)
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)  # the pool ends its group


def _held(pids: Sequence[int], most: float, worker_most: float) -> Held:
    """Resident bytes count what processes share for each of them; so what is above a bound is looked at again."""
    table = processes()
    if not table:
        return Held(process_memory(os.getpid()))
    workers = family(pids, table)
    own = {process for members in (*workers.values(), *family((os.getpid(),), table).values()) for process in members}
    sizes = {pid: _at_most(members, worker_most) for pid, members in workers.items()}
    if (total := resident(own)) > most:
        total, sizes = proportional(own), {pid: proportional(members) for pid, members in workers.items()}
    return Held(total, sizes)


def _at_most(members: Sequence[Process], bound: float) -> int:
    size = resident(members)
    return size if size <= bound else proportional(members)


def default_most() -> float | None:
    """MiB that server and workers may hold where nobody says: a share of what is there; None where nobody knows."""
    known: list[int] = []
    with suppress(OSError, ValueError, AttributeError):
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max", or there is none
            known.append(int(Path(limit).read_text()))
    return SHARE * min(known) / MIB if known else None
