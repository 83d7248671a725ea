"""Who may use a device now: sampler and learner take turns where they share one."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal

from gleanrl.timeline import Timeline

Work = Literal["sample", "train", "evaluate"]

PRIORITIES: Mapping[Work, int] = {"train": 0, "sample": 1, "evaluate": 2}
"""Lower goes first. Training does: it frees memory, and new weights let further tickets start."""
SHARED: Mapping[Work, str] = {"train": "device", "sample": "device", "evaluate": "device"}
SEPARATE: Mapping[Work, str] = {"train": "learner", "sample": "sampler", "evaluate": "sampler"}


class DeviceLease:
    """Serialises the work on each device: ``async with lease("train"): ...``.

    ``devices`` names the device of each kind of work (`SHARED`, `SEPARATE`); kinds of one device take
    turns by priority, first come first served within one, kinds of different devices never meet. It is
    work-conserving: a device is free only while nobody waits for it. A lease is not taken away, so hold
    it for a burst (a decoding step, a micro-batch), not for an episode. One event loop only.
    """

    def __init__(
        self,
        devices: Mapping[Work, str] = SHARED,
        *,
        priorities: Mapping[Work, int] = PRIORITIES,
        timeline: Timeline | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._priorities = dict(priorities)
        self._timeline = timeline
        self._clock = clock
        self._created = clock()
        named = {name: _Device() for name in devices.values()}
        self._devices = {work: named[name] for work, name in devices.items()}
        self._names = dict(devices)
        self._busy = dict.fromkeys(devices, 0.0)  # seconds
        self._waited = dict.fromkeys(devices, 0.0)  # seconds
        self._since: dict[Work, float] = {}  # start of the lease now held

    def __call__(self, work: Work) -> AbstractAsyncContextManager[None]:
        return self._hold(work)

    @asynccontextmanager
    async def _hold(self, work: Work) -> AsyncIterator[None]:
        device = self._devices[work]
        asked = self._clock()
        await device.acquire(self._priorities[work])
        start = self._since[work] = self._clock()
        self._waited[work] += start - asked
        try:
            if self._timeline is not None and start > asked:
                self._timeline.record("wait", asked, start, who=work, what="device")
            yield
        finally:
            del self._since[work]
            self._busy[work] += self._clock() - start
            device.release()

    def stats(self) -> dict[str, float]:
        """Seconds since creation: ``busy_s/WORK``, ``wait_s/WORK``, and ``idle_s/DEVICE``, ``idle_share/DEVICE``."""
        now = self._clock()
        elapsed = now - self._created
        stats: dict[str, float] = {}
        idle = dict.fromkeys(self._names.values(), elapsed)
        for work, name in self._names.items():
            busy = self._busy[work] + (now - self._since[work] if work in self._since else 0.0)
            idle[name] -= busy
            stats[f"busy_s/{work}"] = busy
            stats[f"wait_s/{work}"] = self._waited[work]
        for name, seconds in idle.items():
            stats[f"idle_s/{name}"] = max(seconds, 0.0)
            stats[f"idle_share/{name}"] = max(seconds, 0.0) / elapsed if elapsed > 0 else 0.0
        return stats


class _Device:
    """A lock whose waiters have priorities; it is handed on directly, so nobody can slip in between."""

    def __init__(self) -> None:
        self._held = False
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    async def acquire(self, priority: int) -> None:
        if not self._held:
            self._held = True
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was ours already: hand it on
                self.release()
            raise

    def release(self) -> None:
        while self._queue:
            turn = heapq.heappop(self._queue)[2]
            if not turn.done():  # done here means cancelled
                turn.set_result(None)
                return
        self._held = False
