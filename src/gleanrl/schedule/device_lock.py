"""A lock with which sampler, learner and evaluation take turns on a device that they share.

A run creates one `DeviceLock` and passes it to the samplers and the learner, which acquire it for short pieces of work:

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
"""Type of the callable with which samplers and learners acquire the device: ``async with take_device("train") as
hold``. A `DeviceLock` is one."""

SAMPLE_FIRST: Sequence[Work] = ("sample", "train", "evaluate")
"""Order of priority that puts sampling first, so that rewards are requested as early as possible.

If the sampler switches to new weights during episodes, groups become as old as the staleness bound allows.
"""
TRAIN_FIRST: Sequence[Work] = ("train", "sample", "evaluate")
"""Order of priority that puts training first: groups are as young as possible when the learner consumes them, but the
next rewards are requested later."""


def make_order(first: First, ahead: Callable[[], bool]) -> Callable[[], Sequence[Work]]:
    """Return a function that returns the kinds of work in their current order of priority, most urgent first.

    If ``first`` is ``sample`` or ``train``, that kind of work is always the most urgent. If it is ``due``, sampling is
    more urgent than training until ``ahead()`` is true, i.e. until enough groups have been sampled
    (`StalenessController.ahead`).
    """
    if first == "due":
        return lambda: TRAIN_FIRST if ahead() else SAMPLE_FIRST
    return lambda: TRAIN_FIRST if first == "train" else SAMPLE_FIRST


class DeviceLock:
    """Allows one piece of work at a time on a device: ``async with device_lock("train"): ...``.

    When the holder releases the device, the lock grants it to the most urgent kind of work that waits, as `order`
    states, and within a kind to the caller that has waited longest. A caller that requests the device again in the same
    iteration of the event loop in which it has released it competes with the callers that wait. The device is free
    only if no work waits for it.

    The lock never interrupts its holder. Hold it for a short piece of work, such as a decoding step or a micro-batch,
    and not for a whole episode, or give way in between (`DeviceHold`). Use a lock in one event loop only.
    """

    def __init__(
        self,
        *,
        order: Callable[[], Sequence[Work]] = lambda: SAMPLE_FIRST,
        timeline: Timeline | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.order = order
        """A function that returns the kinds of work in their current order of priority, most urgent first.

        It may be replaced at any time.
        """
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
        """Wait until the device is granted. ``async with`` calls this method."""
        if self._held:
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
                except BaseException:
                    # The span could not be written, e.g. because the disk is full. If `acquire` raises, its caller does
                    # not release the device.
                    self.release()
                    raise
        self._held = True
        if self._timeline is not None:
            # The work records its spans when they end. A burst of an evaluation may end long after a step of training.
            self._timeline.begin(self, work)

    def release(self) -> None:
        """Grant the device to the next caller, in the next iteration of the event loop.

        A caller that requests the device before that is queued with the callers that already wait.
        """

        def pass_on() -> None:
            for work in self.order():
                while self.waiting[work]:
                    granted = self.waiting[work].popleft()
                    if not granted.done():  # a future that is already done was cancelled
                        granted.set_result(None)
                        return
            self._held = False

        if self._timeline is not None:
            self._timeline.end(self)
        asyncio.get_running_loop().call_soon(pass_on)


class DeviceHold:
    """Represents the device while one piece of work holds it, and lets this work give way to more urgent work."""

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
        """Release the device to more urgent work, and wait until it is granted to this work again."""
        self.held = False
        self._lock.release()
        await self._lock.acquire(self._work)
        self.held = True
