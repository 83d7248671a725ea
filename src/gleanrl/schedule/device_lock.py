"""A lock with which sampler, learner and evaluation take turns on a device that they share.

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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal

from gleanrl.schedule.timeline import Timeline

Work = Literal["sample", "train", "evaluate"]
First = Literal["due", "sample", "train"]
TakeDevice = Callable[[Any], AbstractAsyncContextManager[Any]]
"""The part of `DeviceLock` that samplers and learners call: ``async with take_device("train") as hold``."""

SAMPLE_FIRST: Sequence[Work] = ("sample", "train", "evaluate")
"""Order in which rewards are requested as early as possible.

If the sampler takes new weights during episodes, groups become as old as the staleness bound allows.
"""
TRAIN_FIRST: Sequence[Work] = ("train", "sample", "evaluate")
"""Order in which groups are as young as possible when they are trained on, but the next rewards are requested later."""


def make_order(first: First, ahead: Callable[[], bool]) -> Callable[[], Sequence[Work]]:
    """Return a function that returns the kinds of work in their present order, most urgent first.

    ``due`` puts sampling first until ``ahead()`` is true (`StalenessController.ahead`), then training.
    """
    if first == "due":
        return lambda: TRAIN_FIRST if ahead() else SAMPLE_FIRST
    return lambda: TRAIN_FIRST if first == "train" else SAMPLE_FIRST


class DeviceLock:
    """Serialises the work on a device: ``async with device_lock("train"): ...``.

    When the device is released, it goes to the most urgent work in ``order``, first come first served within a kind. It
    is passed on directly, so it is free only while no work waits for it. The lock never interrupts its holder: hold it
    for a short piece of work (a decoding step, a micro-batch), not for an episode, or give way in between
    (`DeviceHold`). A caller that asks again in the same iteration of the event loop competes with those that wait. Use
    a lock in one event loop only.
    """

    def __init__(
        self,
        *,
        order: Callable[[], Sequence[Work]] = lambda: SAMPLE_FIRST,
        timeline: Timeline | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.order = order
        """Returns the kinds of work, most urgent first. May be replaced at any time."""
        self.waiting: dict[Work, deque[asyncio.Future[None]]] = {work: deque() for work in SAMPLE_FIRST}
        self._timeline, self._clock = timeline, clock
        self._held = False

    @asynccontextmanager
    async def __call__(self, work: Work) -> AsyncIterator[DeviceHold]:
        await self.acquire(work)
        hold = DeviceHold(self, work)
        try:
            yield hold
        finally:
            if hold.held:
                self.release()

    async def acquire(self, work: Work) -> None:
        """Wait for the device. Called by ``async with``."""
        if not self._held:
            self._held = True
            return
        asked = self._clock()
        granted = asyncio.get_running_loop().create_future()
        self.waiting[work].append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # the device was granted before the caller was cancelled
                self.release()
            raise
        start = self._clock()
        if self._timeline is not None and start > asked:
            try:
                self._timeline.record("wait", asked, start, who=work, what="device")
            except BaseException:  # e.g. the disk is full; no caller releases a device whose `acquire` has failed
                self.release()
                raise

    def release(self) -> None:
        """Pass the device on in the next iteration of the event loop.

        A caller that asks for it before then is queued with those that already wait.
        """

        def pass_on() -> None:
            for work in self.order():
                while self.waiting[work]:
                    granted = self.waiting[work].popleft()
                    if not granted.done():  # done here means cancelled
                        granted.set_result(None)
                        return
            self._held = False

        asyncio.get_running_loop().call_soon(pass_on)


class DeviceHold:
    """The hold of one piece of work on the device, which can give way to more urgent work."""

    def __init__(self, lock: DeviceLock, work: Work) -> None:
        self._lock = lock
        self._work: Work = work
        self.held = True  # False while the work gives way

    @property
    def wanted(self) -> bool:
        """Whether more urgent work waits for the device. May be read from any thread."""
        order = self._lock.order()
        return any(self._lock.waiting[earlier] for earlier in order[: order.index(self._work)])

    async def give_way(self) -> None:
        """Release the device to more urgent work and wait until it comes back."""
        self.held = False
        self._lock.release()
        await self._lock.acquire(self._work)
        self.held = True
