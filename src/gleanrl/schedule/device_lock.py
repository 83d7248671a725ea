"""Who may use a device now: sampler and learner take turns where they share one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal

from gleanrl.schedule.timeline import Timeline

Work = Literal["sample", "train", "evaluate"]
First = Literal["due", "sample", "train"]

SHARED: Mapping[Work, str] = {"train": "device", "sample": "device", "evaluate": "device"}
SEPARATE: Mapping[Work, str] = {"train": "learner", "sample": "sampler", "evaluate": "sampler"}
SAMPLE_FIRST: Sequence[Work] = ("sample", "train", "evaluate")
"""Rewards are asked for as early as can be. Groups of a schedule with weights in flight get as old as its bound."""
TRAIN_FIRST: Sequence[Work] = ("train", "sample", "evaluate")
"""What is learned from is as young as can be. The next rewards are asked for later."""


def order(first: First, ahead: Callable[[], bool]) -> Callable[[], Sequence[Work]]:
    """Who goes before whom now. ``due`` puts sampling first until ``ahead()``, then training (`Pacer.ahead`)."""
    if first == "due":
        return lambda: TRAIN_FIRST if ahead() else SAMPLE_FIRST
    return lambda: TRAIN_FIRST if first == "train" else SAMPLE_FIRST


class DeviceLease:
    """Serialises the work on each device: ``async with lease("train"): ...``.

    ``devices`` names the device of each kind of work (`SHARED`, `SEPARATE`); kinds of one device take turns in the
    ``order`` that holds when it is handed on, first come first served within one, and kinds of different devices never
    meet. It is work-conserving: a device is free only while nobody waits for it. A lease is not taken away, so hold it
    for a burst (a decoding step, a micro-batch), not for an episode, or give way in between (`Held`). Whoever asks
    again in the same turn of the event loop is compared with those who wait. One event loop only.
    """

    def __init__(
        self,
        devices: Mapping[Work, str] = SHARED,
        *,
        order: Callable[[], Sequence[Work]] = lambda: SAMPLE_FIRST,
        timeline: Timeline | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.order = order
        """Most urgent first; may be replaced at any time."""
        self._timeline = timeline
        self._clock = clock
        self._created = clock()
        named = {name: _Device(self) for name in devices.values()}
        self._devices = {work: named[name] for work, name in devices.items()}
        self._names = dict(devices)
        self._busy = dict.fromkeys(devices, 0.0)  # seconds
        self._waited = dict.fromkeys(devices, 0.0)  # seconds
        self._since: dict[Work, float] = {}  # start of the lease now held

    def __call__(self, work: Work) -> AbstractAsyncContextManager[Held]:
        return self._hold(work)

    @asynccontextmanager
    async def _hold(self, work: Work) -> AsyncIterator[Held]:
        held = Held(self, work)
        await held._take()
        try:
            yield held
        finally:
            held._leave()

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


class Held:
    """A lease while it is held."""

    def __init__(self, lease: DeviceLease, work: Work) -> None:
        self._lease = lease
        self._work: Work = work
        self._device = lease._devices[work]
        self._holds = False

    @property
    def wanted(self) -> bool:
        """Whether somebody waits who goes before this work. May be asked from any thread."""
        return self._device.wanted_before(self._work)

    async def give_way(self) -> None:
        """Let those who go first have the device, and wait until it comes back."""
        self._leave()
        await self._take()

    async def _take(self) -> None:
        lease, work = self._lease, self._work
        asked = lease._clock()
        await self._device.acquire(work)
        self._holds = True
        start = lease._since[work] = lease._clock()
        lease._waited[work] += start - asked
        if lease._timeline is not None and start > asked:
            lease._timeline.record("wait", asked, start, who=work, what="device")

    def _leave(self) -> None:
        if not self._holds:  # cancelled while it gave way
            return
        self._holds = False
        lease = self._lease
        lease._busy[self._work] += lease._clock() - lease._since.pop(self._work)
        self._device.release()


class _Device:
    """A lock for several kinds of work; it is handed on directly, so nobody can slip in between."""

    def __init__(self, lease: DeviceLease) -> None:
        self._lease = lease
        self._held = False
        self._waiting: dict[Work, deque[asyncio.Future[None]]] = {work: deque() for work in SAMPLE_FIRST}

    def wanted_before(self, work: Work) -> bool:
        order = self._lease.order()
        return any(self._waiting[earlier] for earlier in order[: order.index(work)])

    async def acquire(self, work: Work) -> None:
        if not self._held:
            self._held = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[work].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was ours already: hand it on
                self.release()
            raise

    def release(self) -> None:
        """Hand the device on at the end of this turn of the event loop, so that whoever asks again is in the line."""
        asyncio.get_running_loop().call_soon(self._hand_on)

    def _hand_on(self) -> None:
        for work in self._lease.order():
            while self._waiting[work]:
                turn = self._waiting[work].popleft()
                if not turn.done():  # done here means cancelled
                    turn.set_result(None)
                    return
        self._held = False
