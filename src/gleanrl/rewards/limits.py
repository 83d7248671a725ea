"""Limits the requests in flight, and the requests and tokens per minute.

Training and evaluation have lanes of their own. Each lane has its own slots; shared resources (rates, worker threads)
are divided by weighted fair queueing, so that neither lane delays the other. All times follow the event loop's clock,
and nothing polls: a request is woken when a slot becomes free, or when a rate allows it.

Existing libraries for leaky buckets are not used, because they cannot return a reservation that was too large, and do
not run in virtual time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from gleanrl.utils.retry import Fatal, Retryable, Timeout

_TIMER_SLACK_S = 1e-6
"""Timers may fire this much early."""


class LeakyBucket:
    """Allows at most ``per_minute`` units in any 60 seconds, spread out rather than in bursts.

    Amounts up to ``burst`` pass at once, so units that come one at a time never exceed the rate in any window. A
    larger amount passes when the bucket is empty, and delays later ones until it has leaked out.
    """

    def __init__(self, per_minute: float, *, unit: float) -> None:
        self.burst = max(unit, per_minute / 20)
        # burst + the amount leaked in 60 s stays just below per_minute + unit: at most per_minute whole units pass
        self._per_s = max(per_minute + unit - self.burst, unit / 2) / 60 * (1 - 1e-4)
        self._empty_at = float("-inf")  # loop time at which the whole content has leaked out

    def ready_at(self, amount: float) -> float:
        """Return the loop time from which ``amount`` may be taken."""
        return self._empty_at + (min(amount, self.burst) - self.burst) / self._per_s

    def take(self, amount: float, now: float) -> None:
        self._empty_at = max(self._empty_at, now) + amount / self._per_s

    def correct(self, difference: float) -> None:
        """Correct the amount taken by ``difference`` (negative: less was used)."""
        self._empty_at += difference / self._per_s


@dataclass(slots=True, eq=False)
class Lane:
    """Requests of one kind, with slots of their own and a share of the resources that all lanes use."""

    name: str
    slots: int
    share: float
    in_flight: int = 0
    waiting: OrderedDict[asyncio.Future[Lane], float] = field(default_factory=OrderedDict)  # request -> its tokens
    finish_tag: float = 0.0  # weighted fair queueing: grows by 1 / share per request; the lowest goes next


class Permit:
    """The lanes through which one request may pass a rate limiter. It passes through the first lane with room.

    A request gets a second lane when an identical request is made in that lane, so that it passes through the shorter
    of the two queues.
    """

    __slots__ = ("lanes", "pending")

    def __init__(self, lane: str) -> None:
        self.lanes = (lane,)
        self.pending: tuple[tuple[RateLimiter, asyncio.Future[Lane], float], ...] = ()  # waiting places, with tokens

    def add_lane(self, lane: str) -> None:
        if lane not in self.lanes:
            self.lanes = (*self.lanes, lane)
            for limiter, waiter, tokens in self.pending:
                limiter.queue(lane, waiter, tokens)


CURRENT_PERMIT: ContextVar[Permit | None] = ContextVar("permit", default=None)
"""The permit of the request that this task scores; None outside a reward agent.

Used by rewards with a limiter of their own: the parts of a sum, and a reward model.
"""


class RateLimiter:
    """Lets requests through as slots and rates allow.

    Args:
        lanes: slots of each lane, and its share of the common resources. While only one lane has requests, it gets all
            of these resources.
        slots: slots over all lanes (worker threads or processes); None = no limit.
        requests_per_minute, tokens_per_minute: rates over all lanes; None = no limit.
    """

    def __init__(
        self,
        lanes: Mapping[str, tuple[int, float]],
        *,
        slots: int | None = None,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
    ) -> None:
        self.lanes = {name: Lane(name, own, share) for name, (own, share) in lanes.items()}
        self.slots = slots
        self.in_flight = self.queued = 0
        self._requests = LeakyBucket(requests_per_minute, unit=1) if requests_per_minute else None
        self._tokens = LeakyBucket(tokens_per_minute, unit=0) if tokens_per_minute else None
        self.counts_tokens = self._tokens is not None
        self._timer: asyncio.TimerHandle | None = None
        self._virtual_time = 0.0  # finish tag of the lane that went last

    async def acquire(self, permit: Permit, tokens: float = 0.0) -> Lane:
        """Wait for a slot and for the rates. Returns the lane that let the request through, for `release`."""
        waiter: asyncio.Future[Lane] = asyncio.get_running_loop().create_future()
        entry = (self, waiter, tokens)
        permit.pending = (*permit.pending, entry)
        self.queued += 1
        for name in permit.lanes:
            self.queue(name, waiter, tokens)
        try:
            return await waiter  # returns at once if there was room
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self.release(waiter.result())  # admitted and cancelled in the same turn of the loop
            raise
        finally:
            self.queued -= 1
            permit.pending = tuple(other for other in permit.pending if other is not entry)
            left = [self.lanes[name].waiting.pop(waiter, None) for name in permit.lanes]
            if any(tokens is not None for tokens in left):
                self._pump()

    def queue(self, name: str, waiter: asyncio.Future[Lane], tokens: float) -> None:
        """Add a waiter to the lane ``name``."""
        lane = self.lanes[name]
        if waiter.done():
            return
        if not lane.waiting:
            lane.finish_tag = max(lane.finish_tag, self._virtual_time)  # an idle lane gains no priority
        lane.waiting[waiter] = tokens
        self._pump()

    def release(self, lane: Lane) -> None:
        """Free the slot of a request that has ended."""
        lane.in_flight -= 1
        self.in_flight -= 1
        self._pump()

    def correct(self, tokens: float) -> None:
        """Correct the tokens of an admitted request by ``tokens`` (negative: it used fewer)."""
        if self._tokens is not None and tokens:
            self._tokens.correct(tokens)
            self._pump()

    def _pump(self) -> None:
        """Admit all requests that may go now, and set the timer for the next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self.slots is None or self.in_flight < self.slots:
            lane = None
            for other in self.lanes.values():
                is_open = other.waiting and other.in_flight < other.slots
                if is_open and (lane is None or other.finish_tag < lane.finish_tag):
                    lane = other
            if lane is None:
                return
            waiter, tokens = next(iter(lane.waiting.items()))
            if waiter.done():  # cancelled, or admitted through another lane, in this turn of the loop
                del lane.waiting[waiter]
                continue
            loop = waiter.get_loop()
            now, ready_at = loop.time(), float("-inf")
            if self._requests is not None:
                ready_at = self._requests.ready_at(1.0)
            if self._tokens is not None:
                ready_at = max(ready_at, self._tokens.ready_at(tokens))
            if ready_at > now + _TIMER_SLACK_S:
                self._timer = loop.call_at(ready_at, self._pump)
                return
            if self._requests is not None:
                self._requests.take(1.0, now)
            if self._tokens is not None:
                self._tokens.take(tokens, now)
            del lane.waiting[waiter]
            self._virtual_time = lane.finish_tag
            lane.finish_tag += 1.0 / lane.share
            lane.in_flight += 1
            self.in_flight += 1
            waiter.set_result(lane)


@asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[None]:
    """Limit the duration of a reward's call; None = no limit.

    Raises:
        Retryable: the call took longer, or ran into a timeout of its own.
        Fatal: the call cancelled itself.
    """
    limit = Timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        said = f"no score within {seconds:g} s" if limit.expired() else f"timeout: {str(error) or 'of its own'}"
        raise Retryable(said, cause="timeout") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Fatal("the reward cancelled itself", cause="cancelled") from None
