"""Retries and time limits of calls: which errors are retried, how long to wait, and when to give up.

Everything in Glean RL that calls a remote service uses `RetryPolicy`: the reward agent, the sampler that uses a model
server, the client of an environment service, and the adapters. A call that fails raises `Retryable` or `Fatal`::

    policy = RetryPolicy(attempts=4, backoff_s=1.0)
    answer = await policy.run(lambda: client.request("POST", "/score", body))
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from gleanrl.utils.errors import describe

T = TypeVar("T")

UNREACHABLE = "unreachable"
"""Cause of a failure: the service accepts no connections."""
NO_THREAD = "hung"
"""Cause of a failure: this process has no free thread in which to make the call."""
NOT_DELIVERED = frozenset({UNREACHABLE, NO_THREAD})
"""Causes of failures in which the call never reached the service."""
RATE_LIMIT, UNAVAILABLE = "rate_limit", "unavailable"
REFUSED = frozenset({RATE_LIMIT, UNAVAILABLE})
"""Causes of failures in which the service declines to work now, whatever the request: HTTP's 429, and 502, 503, 529."""

_STALL_S = 0.05
"""If a timer fires more than this many seconds late, the event loop was blocked."""
_MOST_EXTENSIONS = 9.0
"""Largest total extension of a `Timeout`, as a multiple of its original length."""
_NO_COST: Mapping[str, float] = MappingProxyType({})


class Fatal(Exception):
    """A call failed in a way that another attempt cannot change.

    Args:
        message: what went wrong.
        cause: kind of failure in one word, by which metrics count it: timeout, rate_limit, server, answer, ...
        cost: number of tokens that the failed attempt used, as ``cost/prompt_tokens`` and ``cost/completion_tokens``.
    """

    def __init__(self, message: str, *, cause: str = "fatal", cost: Mapping[str, float] = _NO_COST) -> None:
        super().__init__(message)
        self.cause = cause
        self.cost = dict(cost)

    def __reduce__(self) -> Any:
        return type(self), self.args, self.__dict__


class Retryable(Exception):
    """A call failed, but another attempt may succeed. ``cause`` and ``cost`` are as in `Fatal`.

    Args:
        after_s: shortest wait in seconds that the service asks for before the next attempt; None if it asks for none.
    """

    def __init__(
        self,
        message: str,
        after_s: float | None = None,
        *,
        cause: str = "retryable",
        cost: Mapping[str, float] = _NO_COST,
    ) -> None:
        super().__init__(message)
        self.after_s = after_s
        self.cause = cause
        self.cost = dict(cost)

    def __reduce__(self) -> Any:
        return type(self), self.args, self.__dict__


def is_retryable(error: BaseException) -> bool:
    """Return whether another attempt may succeed.

    True for `Retryable`, and for Python's `TimeoutError` and `ConnectionError`, which a user's code may raise.
    """
    return isinstance(error, Retryable | TimeoutError | ConnectionError)


def cause_of(error: BaseException) -> str:
    """Return the kind of an error in one word, by which metrics count it."""
    match error:
        case Retryable() | Fatal():
            return error.cause
        case TimeoutError():
            return "timeout"
        case ConnectionRefusedError():
            return UNREACHABLE
        case ConnectionError():
            return "connection"
    return "raised"


def reason_of(error: BaseException) -> str:
    """Return the error's message as one line of at most 1,000 characters."""
    text = str(error) if isinstance(error, Retryable | Fatal) else describe(error)
    return " ".join(text.split())[:1000]


def wait_asked_for(error: BaseException) -> float:
    """Return the seconds that the service asked the client to wait; 0 if it did not ask."""
    return (error.after_s or 0.0) if isinstance(error, Retryable) else 0.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A policy of exponential backoff with random waits (full jitter).

    The wait before attempt n + 1 is drawn uniformly between 0 and ``backoff_s * 2**(n - 1)`` seconds, but at most
    ``max_backoff_s``. If the service asks for a longer wait (``Retry-After``), the wait is that long. Because waits are
    random, requests that failed at the same time are not repeated at the same time.

    Attributes:
        attempts: largest number of attempts of one call, including the first. None = the number is not limited, and the
            call fails when its attempts have failed for ``outage_s`` seconds.
        backoff_s: upper bound of the first wait, in seconds.
        max_backoff_s: upper bound of every wait that the policy chooses, in seconds.
        outage_s: longest time, in seconds, for which a call is repeated during an outage. An outage is a time in which
            a service answers no call, for example because it restarts; the caller decides what is one. Attempts in an
            outage do not count towards ``attempts``, because otherwise a restart would use up all attempts of all calls
            within seconds. During an outage the upper bound of a wait is the time that the outage has lasted so far,
            but at least ``backoff_s``. A call fails at once if the service asks for a wait that is longer than
            ``outage_s``.
    """

    attempts: int | None = 5
    backoff_s: float = 0.5
    max_backoff_s: float = 60.0
    outage_s: float = 600.0

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``call``, which is called again after each retryable error while the policy allows it.

        Raises:
            Exception: the error of the last attempt that the policy allows, or the first error that is not retryable.
        """
        retries = Retries(self)
        while True:
            try:
                return await call()
            except Exception as error:
                await asyncio.sleep(retries.next_wait(error))


class Retries:
    """Counts the attempts of one call under a policy.

    For callers that do other work between two attempts; `RetryPolicy.run` is enough for all others.
    """

    __slots__ = ("_counted", "_outage_since", "_policy")

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._counted = 0
        self._outage_since: float | None = None

    def next_wait(self, error: Exception, *, outage: bool = False) -> float:
        """Count a failed attempt and return the number of seconds to wait before the next one.

        Must be called inside the ``except`` block of the attempt.

        Args:
            error: the error of the attempt.
            outage: whether the attempt failed because of an outage of the service, so that it does not count.

        Raises:
            Exception: ``error`` itself, if it is not retryable or the policy allows no further attempt.
            Fatal: the service asks for a wait that is longer than ``outage_s`` of the policy.
        """
        policy = self._policy
        if not is_retryable(error):
            raise error
        asked_s = wait_asked_for(error)
        if asked_s > policy.outage_s:
            raise Fatal(
                f"the service asks for a wait of {asked_s:.0f} s, and the limit is {policy.outage_s:g} s: {error}",
                cause=cause_of(error),
            ) from error
        now = asyncio.get_running_loop().time()
        if policy.attempts is None or outage:
            if self._outage_since is None:
                self._outage_since = now
            outage_s = now - self._outage_since
            if outage_s >= policy.outage_s or outage_s + asked_s > policy.outage_s:
                raise error
            bound = max(policy.backoff_s, outage_s)
        else:
            self._outage_since = None
            self._counted += 1
            if self._counted >= policy.attempts:
                raise error
            bound = policy.backoff_s * 2.0 ** min(self._counted - 1, 64)
        return max(random.uniform(0.0, min(bound, policy.max_backoff_s)), asked_s)


class Timeout:
    """A time limit like `asyncio.timeout`, except that time in which the event loop is blocked does not count.

    Computation, imports or a busy machine may block the loop for seconds. When the loop continues, it reads the answers
    that arrived meanwhile in the same iteration in which it finds that their time limit is over. `asyncio.timeout`
    would drop these answers, and they would be requested and paid for again. This limit is extended instead. If its
    timer fires n seconds late, the limit is extended by n seconds, in total by at most nine times ``seconds``.

        async with Timeout(30.0):
            await answer()

    Args:
        seconds: the time limit in seconds; None = no limit.

    Raises:
        TimeoutError: the time limit is reached.
    """

    __slots__ = ("_handle", "_limit", "_loop", "_seconds", "_spare_s")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._limit = asyncio.timeout(None)
        self._handle: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        if self._seconds is not None:
            self._loop = asyncio.get_running_loop()
            self._spare_s = _MOST_EXTENSIONS * self._seconds
            due = self._loop.time() + self._seconds
            self._handle = self._loop.call_at(due, self._end, due)

    async def __aexit__(self, *raised: Any) -> None:
        if self._handle is not None:
            self._handle.cancel()
        await self._limit.__aexit__(*raised)

    def expired(self) -> bool:
        """Return whether the time limit was reached."""
        return self._limit.expired()

    def _end(self, due: float) -> None:
        late_s = min(self._loop.time() - due, self._spare_s)
        if late_s > _STALL_S:
            self._spare_s -= late_s
            due = self._loop.time() + late_s
            self._handle = self._loop.call_at(due, self._end, due)
        else:
            self._limit.reschedule(self._loop.time())
