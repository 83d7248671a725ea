"""How much memory the server and its workers hold, and what is done about too much; measured when an episode begins."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gleanrl.environments.service.meter import MIB, process_memory

_log = logging.getLogger(__name__)
_FRESH_S = 0.5  # for so long a measurement counts


@dataclass(slots=True)
class Memory:
    """Bounds, in MiB; None = none. Where the system does not say what a process holds, nothing is bounded.

    Above ``most`` over all processes there is no room for a further episode; a worker above ``worker_most`` is ended,
    which costs its live episodes, and another takes its place.
    """

    pids: Callable[[], Sequence[int]]
    most: float | None
    worker_most: float | None
    _measured_at: float = float("-inf")
    _why: str = ""

    def total(self) -> int | None:
        """Resident bytes of this process and the workers, as far as they are known."""
        known = [held for pid in (os.getpid(), *self.pids()) if (held := process_memory(pid)) is not None]
        return sum(known) if known else None

    def room(self) -> str:
        """Why there is no room for a further episode; empty where there is."""
        if self.most is None and self.worker_most is None:
            return ""
        now = asyncio.get_running_loop().time()
        if now - self._measured_at > _FRESH_S:
            self._measured_at, self._why = now, self._measure()
        return self._why

    def _measure(self) -> str:
        for pid in self.pids() if self.worker_most is not None else ():
            if (
                self.worker_most is not None
                and (held := process_memory(pid)) is not None
                and held > self.worker_most * MIB
            ):
                _log.warning("worker %d holds %.0f MiB (--max-worker-memory): it is ended", pid, held / MIB)
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        total = self.total() if self.most is not None else None
        if self.most is None or total is None or total <= self.most * MIB:
            return ""
        return f"the server and its workers hold {total / MIB:.0f} MiB of {self.most:.0f} (--max-memory)"
