"""A lock on each device: sampler, learner and evaluation take turns where they share one.

A run builds one `DeviceLock`; the samplers and the learner receive it and hold it for short pieces of work:

    async with device_lock("train") as hold:
        for micro_batch in batch:
            train(micro_batch)
            if hold.wanted:
                await hold.give_way()
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal

from gleanrl.schedule.timeline import Timeline

Work = Literal["sample", "train", "evaluate"]
First = Literal["due", "sample", "train"]
TakeDevice = Callable[[Any], AbstractAsyncContextManager[Any]]
"""What samplers and learners need of a `DeviceLock`: ``async with take_device("train") as hold``."""

SHARED: Mapping[Work, str] = {"train": "device", "sample": "device", "evaluate": "device"}
SEPARATE: Mapping[Work, str] = {"train": "learner", "sample": "sampler", "evaluate": "sampler"}
SAMPLE_FIRST: Sequence[Work] = ("sample", "train", "evaluate")
"""Rewards are requested as early as possible. Groups of a schedule with weights in flight get as old as its bound."""
TRAIN_FIRST: Sequence[Work] = ("train", "sample", "evaluate")
"""Groups are as young as possible when they are trained on. The next rewards are requested later."""


def make_order(first: First, ahead: Callable[[], bool]) -> Callable[[], Sequence[Work]]:
    """Returns a function that gives the present priority of the kinds of work, most urgent first.

    ``due`` puts sampling first until ``ahead()`` is true (`StalenessController.ahead`), then training.
    """
    if first == "due":
        return lambda: TRAIN_FIRST if ahead() else SAMPLE_FIRST
    return lambda: TRAIN_FIRST if first == "train" else SAMPLE_FIRST


class DeviceLock:
    """Serialises the work on each device: ``async with device_lock("train"): ...``.

    ``devices`` maps each kind of work to its device (`SHARED`, `SEPARATE`). Kinds of work on one device take turns in
    the ``order`` that holds when the device is released, first come first served within a kind. The lock is
    work-conserving: a device is free only while no work waits for it. It is never taken away, so hold it for a short
    piece of work (a decoding step, a micro-batch), not for an episode, or give way in between (`DeviceHold`). A caller
    that asks again in the same iteration of the event loop competes with those who wait. One event loop only.
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
        queues = {name: _Queue(self) for name in devices.values()}
        self._queues = {work: queues[name] for work, name in devices.items()}
        self._devices = dict(devices)
        self._busy = dict.fromkeys(devices, 0.0)  # seconds
        self._waited = dict.fromkeys(devices, 0.0)  # seconds
        self._since: dict[Work, float] = {}  # when the present hold of this work began

    def __call__(self, work: Work) -> AbstractAsyncContextManager[DeviceHold]:
        return self._hold(work)

    @asynccontextmanager
    async def _hold(self, work: Work) -> AsyncIterator[DeviceHold]:
        hold = DeviceHold(self, work)
        await hold._acquire()
        try:
            yield hold
        finally:
            hold._release()

    def stats(self) -> dict[str, float]:
        """Seconds since creation: ``busy_s/WORK``, ``wait_s/WORK``, and ``idle_s/DEVICE``, ``idle_share/DEVICE``."""
        now = self._clock()
        elapsed = now - self._created
        stats: dict[str, float] = {}
        idle = dict.fromkeys(self._devices.values(), elapsed)
        for work, device in self._devices.items():
            busy = self._busy[work]
            if work in self._since:
                busy += now - self._since[work]
            idle[device] -= busy
            stats[f"busy_s/{work}"] = busy
            stats[f"wait_s/{work}"] = self._waited[work]
        for device, seconds in idle.items():
            stats[f"idle_s/{device}"] = max(seconds, 0.0)
            stats[f"idle_share/{device}"] = max(seconds, 0.0) / elapsed if elapsed > 0 else 0.0
        return stats


class DeviceHold:
    """A device while one piece of work holds it."""

    def __init__(self, lock: DeviceLock, work: Work) -> None:
        self._lock = lock
        self._work: Work = work
        self._queue = lock._queues[work]
        self._holds = False

    @property
    def wanted(self) -> bool:
        """Whether more urgent work waits for the device. May be read from any thread."""
        return self._queue.wanted_before(self._work)

    async def give_way(self) -> None:
        """Release the device to more urgent work and wait until it comes back."""
        self._release()
        await self._acquire()

    async def _acquire(self) -> None:
        lock, work = self._lock, self._work
        asked = lock._clock()
        await self._queue.acquire(work)
        self._holds = True
        start = lock._since[work] = lock._clock()
        lock._waited[work] += start - asked
        if lock._timeline is not None and start > asked:
            lock._timeline.record("wait", asked, start, who=work, what="device")

    def _release(self) -> None:
        if not self._holds:  # cancelled while it gave way
            return
        self._holds = False
        lock = self._lock
        lock._busy[self._work] += lock._clock() - lock._since.pop(self._work)
        self._queue.release()


class _Queue:
    """Who holds one device and who waits for it. The device is passed on directly, so that no caller can slip in."""

    def __init__(self, lock: DeviceLock) -> None:
        self._lock = lock
        self._held = False
        self._waiting: dict[Work, deque[asyncio.Future[None]]] = {work: deque() for work in SAMPLE_FIRST}

    def wanted_before(self, work: Work) -> bool:
        order = self._lock.order()
        return any(self._waiting[earlier] for earlier in order[: order.index(work)])

    async def acquire(self, work: Work) -> None:
        if not self._held:
            self._held = True
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting[work].append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # the device was ours already: pass it on
                self.release()
            raise

    def release(self) -> None:
        """Pass the device on after this iteration of the event loop, so that callers that ask again are queued."""
        asyncio.get_running_loop().call_soon(self._pass_on)

    def _pass_on(self) -> None:
        for work in self._lock.order():
            while self._waiting[work]:
                granted = self._waiting[work].popleft()
                if not granted.done():  # done here means cancelled
                    granted.set_result(None)
                    return
        self._held = False
