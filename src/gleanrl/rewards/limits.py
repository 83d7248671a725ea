"""Who may be asked now: slots for each lane, slots shared by all, requests and tokens a minute.

Everything follows the event loop's clock and nothing polls: a waiter wakes when a slot falls free or at the
moment at which a rate allows it. Rates are kept by an own leaky bucket, because the libraries for it can neither
give back what was reserved too much nor be relied on in virtual time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

_EARLY_S = 1e-6  # timers may fire this much early


class Rate:
    """A leaky bucket: at most ``per_minute`` units in any 60 seconds, spread out rather than in bursts.

    Amounts up to ``burst`` may go at once, so units that come one at a time never exceed the rate in any window. A
    larger amount goes when the bucket is empty and holds up those after it until it has leaked out.
    """

    def __init__(self, per_minute: float, *, unit: float) -> None:
        self.burst = max(unit, per_minute / 20)
        # of a window's end nothing can be taken any more: one unit fits beside burst + leak
        self._per_s = max(per_minute + unit - self.burst, unit / 2) / 60 * (1 - 1e-4)
        self._empty_at = float("-inf")  # when all that was taken will have leaked out

    def ready_at(self, amount: float) -> float:
        """Loop time from which ``amount`` may be taken."""
        return self._empty_at + (min(amount, self.burst) - self.burst) / self._per_s

    def take(self, amount: float, now: float) -> None:
        self._empty_at = max(self._empty_at, now) + amount / self._per_s

    def correct(self, difference: float) -> None:
        """What was taken turned out to be ``difference`` more (or less, if negative)."""
        self._empty_at += difference / self._per_s


@dataclass(slots=True, eq=False)
class Lane:
    """Requests of one kind: their own slots, and a share of what is common where all want it."""

    name: str
    slots: int
    share: float
    in_flight: int = 0
    waiting: OrderedDict[asyncio.Future[Lane], float] = field(default_factory=OrderedDict)  # with their tokens
    turn: float = 0.0  # grows by 1 / share with each request: the lane whose turn is lowest goes next


class Claim:
    """What one request asks slots for: the first of its lanes that has room lets it through."""

    __slots__ = ("lanes", "waiting")

    def __init__(self, lane: str) -> None:
        self.lanes = (lane,)
        self.waiting: tuple[tuple[Gate, asyncio.Future[Lane], float], ...] = ()  # with their tokens

    def join(self, lane: str) -> None:
        """Somebody in ``lane`` wants the same: it need not wait for the others' turn."""
        if lane in self.lanes:
            return
        self.lanes = (*self.lanes, lane)
        for gate, waiter, tokens in self.waiting:
            gate.also(lane, waiter, tokens)


_CLAIM: ContextVar[Claim] = ContextVar("claim")


def this_claim() -> Claim:
    """The claim of the request that is being asked here; training's outside of an agent."""
    return _CLAIM.get(None) or Claim("train")


def set_claim(claim: Claim) -> None:
    """From here on, in this task and those that it starts, a request of ``claim`` is asked."""
    _CLAIM.set(claim)


class Gate:
    """Lets requests through, one lane beside the other.

    Args:
        lanes: for each lane its slots and its share of whatever both want at once. A lane that alone wants it gets all.
        slots: slots over all lanes (worker threads or processes), None = no limit.
        requests_per_minute, tokens_per_minute: over all lanes, None = no limit.
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
        self._requests = Rate(requests_per_minute, unit=1) if requests_per_minute else None
        self._tokens = Rate(tokens_per_minute, unit=0) if tokens_per_minute else None
        self._timer: asyncio.TimerHandle | None = None
        self._turn = 0.0  # of the lane that went last

    @property
    def counts_tokens(self) -> bool:
        return self._tokens is not None

    async def enter(self, claim: Claim, tokens: float = 0.0) -> Lane:
        """Wait for a slot and for the rates; whoever returns from here must `leave` the lane that let it through."""
        loop = asyncio.get_running_loop()
        for name in claim.lanes:
            lane = self.lanes[name]
            if not lane.waiting and self._may_go(lane, tokens, loop.time()):
                lane.turn = max(lane.turn, self._turn)  # an idle lane saves up no claim
                self._let_through(lane, tokens, loop.time())
                return lane
        waiter: asyncio.Future[Lane] = loop.create_future()
        waits = (self, waiter, tokens)
        claim.waiting = (*claim.waiting, waits)
        self.queued += 1
        for name in claim.lanes:
            self.also(name, waiter, tokens)
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self.leave(waiter.result())  # let through and cancelled at once
            raise
        finally:
            self.queued -= 1
            claim.waiting = tuple(other for other in claim.waiting if other is not waits)
            if [name for name in claim.lanes if self.lanes[name].waiting.pop(waiter, None) is not None]:
                self._pump(loop)

    def also(self, name: str, waiter: asyncio.Future[Lane], tokens: float) -> None:
        """Let a waiter wait in the lane ``name`` (too)."""
        lane = self.lanes[name]
        if waiter.done():
            return
        if not lane.waiting:
            lane.turn = max(lane.turn, self._turn)
        lane.waiting[waiter] = tokens
        self._pump(asyncio.get_running_loop())

    def leave(self, lane: Lane) -> None:
        """Give the slot back."""
        lane.in_flight -= 1
        self.in_flight -= 1
        self._pump(asyncio.get_running_loop())

    def correct(self, tokens: float) -> None:
        """A request that has been answered took ``tokens`` more than it was let through with (less, if negative)."""
        if self._tokens is not None and tokens:
            self._tokens.correct(tokens)
            self._pump(asyncio.get_running_loop())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _pump(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let through all who may go now, and set the timer for the next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self.slots is None or self.in_flight < self.slots:
            open_lanes = [lane for lane in self.lanes.values() if lane.waiting and lane.in_flight < lane.slots]
            if not open_lanes:
                return
            lane = min(open_lanes, key=lambda lane: lane.turn)
            waiter, tokens = next(iter(lane.waiting.items()))
            if waiter.done():  # cancelled, or let through by another lane, just now
                del lane.waiting[waiter]
                continue
            now = loop.time()
            ready_at = self._ready_at(tokens)
            if ready_at > now + _EARLY_S:
                self._timer = loop.call_at(ready_at, self._pump, loop)
                return
            del lane.waiting[waiter]
            self._let_through(lane, tokens, now)
            waiter.set_result(lane)

    def _may_go(self, lane: Lane, tokens: float, now: float) -> bool:
        """Whether nobody has a better claim."""
        if lane.in_flight >= lane.slots or (self.slots is not None and self.in_flight >= self.slots):
            return False
        others = any(other.waiting and other.in_flight < other.slots for other in self.lanes.values())
        return not others and self._ready_at(tokens) <= now + _EARLY_S

    def _ready_at(self, tokens: float) -> float:
        at = self._requests.ready_at(1.0) if self._requests is not None else float("-inf")
        return max(at, self._tokens.ready_at(tokens)) if self._tokens is not None else at

    def _let_through(self, lane: Lane, tokens: float, now: float) -> None:
        if self._requests is not None:
            self._requests.take(1.0, now)
        if self._tokens is not None:
            self._tokens.take(tokens, now)
        self._turn = lane.turn
        lane.turn += 1.0 / lane.share
        lane.in_flight += 1
        self.in_flight += 1
