"""Limits the number of requests in flight, and the number of requests and tokens per minute.

Training and evaluation have separate lanes. A *lane* is a queue of requests with its own *slots*: a request occupies
one slot from its admission to its end, and waits while all slots of its lane are occupied. Resources that the lanes
share (rate limits, worker threads) are divided by weighted fair queueing, so that the requests of one lane cannot crowd
out the other's. All times are times of the event loop's clock. Nothing polls: a waiting request is woken when a slot
becomes free or the rate limits allow it.

Existing libraries for leaky buckets are not used. They cannot give back tokens that were estimated but not used, and
they do not follow the virtual clock of `gleanrl.simulate`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from gleanrl.rewards.statistics import COMPLETION_TOKENS, PROMPT_TOKENS
from gleanrl.types import Message
from gleanrl.utils.retry import Fatal, Retryable, Timeout, reason_of

_CHARACTERS_PER_TOKEN = 4
"""Average number of characters per token, by which the tokens of a request are estimated before it is sent."""
_TIMER_SLACK_S = 1e-6
"""Seconds by which a timer may fire early. A request is admitted if the rate limits allow it within this time."""


class LeakyBucket:
    """A rate limit: at most ``per_minute`` units in any 60 seconds, spread over the time rather than in one burst.

    Every amount taken fills the bucket, and the bucket leaks at a constant rate. An amount may be taken if
    the bucket contains at most ``burst`` units afterwards. An amount larger than ``burst`` may be taken when the bucket
    is empty; the next amount waits until enough of it has leaked out.

    ``unit`` is the smallest amount: 1 for requests, 0 for numbers of tokens, which are not whole because they are
    estimates.
    """

    def __init__(self, per_minute: float, *, unit: float) -> None:
        self.burst = max(unit, per_minute / 20)
        # At most burst + the amount leaked in 60 s can be taken in 60 s. The rate keeps this sum just below
        # per_minute + unit, so that at most per_minute whole units are taken.
        self._per_s = max(per_minute + unit - self.burst, unit / 2) / 60 * (1 - 1e-4)
        self._empty_at = float("-inf")  # event loop time at which the whole content has leaked out

    def ready_at(self, amount: float) -> float:
        """Return the event loop time from which ``amount`` may be taken."""
        return self._empty_at + (min(amount, self.burst) - self.burst) / self._per_s

    def take(self, amount: float, now: float) -> None:
        self._empty_at = max(self._empty_at, now) + amount / self._per_s

    def correct(self, difference: float) -> None:
        """Add ``difference`` to an amount that was taken; negative if less was used than taken."""
        self._empty_at += difference / self._per_s


@dataclass(slots=True, eq=False)
class Lane:
    """The requests of training or of evaluation, with their own slots and a share of the resources of all lanes."""

    name: str
    slots: int
    share: float
    in_flight: int = 0
    # The queue. A key is the future that `RateLimiter.acquire` awaits, its value estimates the request's tokens.
    waiting: OrderedDict[asyncio.Future[Lane], Callable[[], float] | None] = field(default_factory=OrderedDict)
    # Weighted fair queueing: a lane's tag grows by 1 / share with each of its requests that is admitted, and the next
    # request is admitted from the lane with the lowest tag.
    finish_tag: float = 0.0


class Permit:
    """The lanes in whose queues one request waits at a rate limiter.

    A request gets a second lane when an identical request is made in that lane. The request then waits in the queues of
    both lanes. When one lane admits the request, it occupies a slot of that lane and is removed from the other queue.
    """

    __slots__ = ("lanes", "pending")

    def __init__(self, lane: str) -> None:
        self.lanes = (lane,)
        # For each limiter at which the request waits: the limiter, the awaited future, and the estimate of its tokens.
        self.pending: tuple[tuple[RateLimiter, asyncio.Future[Lane], Callable[[], float] | None], ...] = ()

    def add_lane(self, lane: str) -> None:
        if lane not in self.lanes:
            self.lanes = (*self.lanes, lane)
            for limiter, waiter, tokens in self.pending:
                limiter.queue(lane, waiter, tokens)


CURRENT_PERMIT: ContextVar[Permit | None] = ContextVar("permit", default=None)
"""The permit of the request that the current asyncio task scores; None outside of a reward agent.

Some rewards limit or order their calls themselves, for example the parts of a weighted sum and reward models. They read
from the permit whether the request is one of training, of evaluation, or of both.
"""


class RateLimiter:
    """Admits requests as the slots and the rate limits allow.

    Args:
        lanes: for each lane, by name, the number of its slots and its share (a fraction) of the resources that all
            lanes use. While only one lane has requests, it gets all of these resources.
        slots: total number of slots of all lanes, such as worker threads or processes; None = no limit.
        requests_per_minute, tokens_per_minute: rate limits of all lanes together; None = no limit.
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
        self.tokens_per_minute = tokens_per_minute
        self._timer: asyncio.TimerHandle | None = None
        self._virtual_time = 0.0  # `Lane.finish_tag` of the lane that admitted the last request, before that admission

    async def acquire(self, permit: Permit, tokens: Callable[[], float] | None = None) -> Lane:
        """Wait until slots and rate limits admit the request. Returns the lane to be passed to `release`.

        ``tokens`` returns the estimated number of tokens that the request will use. It is called again while the
        request waits, because the answers to other requests make the estimate better; None = no tokens.
        """
        waiter: asyncio.Future[Lane] = asyncio.get_running_loop().create_future()
        entry = (self, waiter, tokens)
        permit.pending = (*permit.pending, entry)
        self.queued += 1
        for name in permit.lanes:
            self.queue(name, waiter, tokens)
        try:
            return await waiter  # the future is already done if `queue` has admitted the request at once
        except asyncio.CancelledError:
            if not waiter.cancelled():
                # The request was admitted and then cancelled in the same iteration of the event loop.
                self.release(waiter.result())
            raise
        finally:
            self.queued -= 1
            permit.pending = tuple(other for other in permit.pending if other is not entry)
            waited = [name for name in permit.lanes if waiter in self.lanes[name].waiting]
            for name in waited:
                del self.lanes[name].waiting[waiter]
            if waited:
                self._pump()

    def queue(self, name: str, waiter: asyncio.Future[Lane], tokens: Callable[[], float] | None) -> None:
        """Add a request to the queue of lane ``name``. ``waiter`` is the future that the request awaits."""
        lane = self.lanes[name]
        if waiter.done():
            return
        if not lane.waiting:
            # The tag of an idle lane does not grow. Without this line, the lane would overtake all others afterwards.
            lane.finish_tag = max(lane.finish_tag, self._virtual_time)
        lane.waiting[waiter] = tokens
        self._pump()

    def release(self, lane: Lane) -> None:
        """Free the slot of a request that has ended. ``lane`` is the lane that `acquire` returned."""
        lane.in_flight -= 1
        self.in_flight -= 1
        self._pump()

    def correct(self, tokens: float) -> None:
        """Add ``tokens`` to the estimate of an admitted request; negative if it used fewer tokens than estimated."""
        if self._tokens is not None:
            self._tokens.correct(tokens)
            self._pump()

    def _pump(self) -> None:
        """Admit all requests that slots and rate limits allow now, and set a timer for the next one."""
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
            waiter, estimate = next(iter(lane.waiting.items()))
            if waiter.done():  # cancelled, or admitted through another lane, in this iteration of the event loop
                del lane.waiting[waiter]
                continue
            loop = waiter.get_loop()
            now, ready_at = loop.time(), float("-inf")
            if self._requests is not None:
                ready_at = self._requests.ready_at(1.0)
            tokens = 0.0
            if self._tokens is not None:
                tokens = 0.0 if estimate is None else estimate()
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


class TokenEstimate:
    """Estimates the tokens of a reward's calls, and corrects a rate limiter by the tokens that they used.

    The tokens of an answer are the running mean of those that the reward has reported. Before the first report they are
    ``max_tokens``, the most that an answer may have. If that is None too, a call counts as a whole minute's tokens, so
    that the others wait until its answer shows how many there are.
    """

    def __init__(self, limiter: RateLimiter, max_tokens: int | None) -> None:
        self.limiter, self.max_tokens = limiter, max_tokens
        self.answer: float | None = None  # running mean of the tokens of an answer; None = not known yet

    def of_call(self, messages: Sequence[Message]) -> CallTokens | None:
        """Return the tokens of a call with these messages; None if the tokens are not limited."""
        return None if self.limiter.tokens_per_minute is None else CallTokens(self, messages)


class CallTokens:
    """The tokens of one call: those that `RateLimiter.acquire` takes, and their correction after the call."""

    __slots__ = ("_of_reward", "_taken", "_text")

    def __init__(self, of_reward: TokenEstimate, messages: Sequence[Message]) -> None:
        self._of_reward = of_reward
        self._text = sum(len(message["content"] or "") for message in messages) / _CHARACTERS_PER_TOKEN
        self._taken = 0.0

    def __call__(self) -> float:
        """Return the present estimate. The last one before the call is what the rate limiter has taken for it."""
        answer, unknown = self._of_reward.answer, self._of_reward.max_tokens
        if unknown is None:
            unknown = self._of_reward.limiter.tokens_per_minute or 0
        self._taken = self._text + (unknown if answer is None else answer)
        return self._taken

    def correct(self, cost: Mapping[str, float], *, scored: bool) -> None:
        """Correct the rate limiter after the call.

        ``cost`` holds the tokens that the reward reports for this call. If it reports none, the estimate remains, but
        an answer of unknown length then counts nothing. ``scored`` says whether the call returned a score.
        """
        reward = self._of_reward
        answer = cost.get(COMPLETION_TOKENS, 0.0)
        used = cost.get(PROMPT_TOKENS, 0.0) + answer
        unknown = reward.answer is None and reward.max_tokens is None
        if scored and used:
            reward.answer = answer if reward.answer is None else reward.answer + (answer - reward.answer) / 16
        elif scored and unknown:
            reward.answer = 0.0  # this reward reports no tokens
        if used or unknown:
            reward.limiter.correct((used or self._text) - self._taken)


@asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[None]:
    """Limit the duration of a reward's call, in seconds; None = no limit.

    Raises:
        Retryable: the call took longer than the limit, or raised `TimeoutError` itself.
        Fatal: the call raised `CancelledError` although its task was not cancelled, or another exception that would end
            the run, such as `SystemExit`. Ctrl-C (`KeyboardInterrupt`) is passed on.
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
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise Fatal(reason_of(error), cause="raised") from None
