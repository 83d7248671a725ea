"""Retries and time limits: which errors are retried, how long to wait, and when to give up.

Everything in Glean RL that calls a remote service uses this policy: the reward agent, the sampler behind a server, the
client of an environment service, adapters. A call raises `Retryable` or `Fatal` if it fails::

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

T = TypeVar("T")

UNREACHABLE = "unreachable"
"""Cause of a failure: the service accepts no connections."""
NO_THREAD = "hung"
"""Cause of a failure: this process has no free thread in which to make the call."""
NOT_DELIVERED = frozenset({UNREACHABLE, NO_THREAD})
"""Causes of attempts that never reached the service."""

_STALL_S = 0.05
"""A timer that fires this many seconds late means that the event loop was blocked."""
_MOST_EXTENSIONS = 9.0
"""Limit of the total extension of a `Timeout`, as a multiple of its length."""
_NO_COST: Mapping[str, float] = MappingProxyType({})


class Fatal(Exception):
    """Trying again cannot help.

    Args:
        message: what went wrong.
        cause: one word for the metrics: timeout, rate_limit, server, connection, answer, ...
        cost: tokens that the failed attempt has used, as ``cost/prompt_tokens`` and ``cost/completion_tokens``.
    """

    def __init__(self, message: str, *, cause: str = "fatal", cost: Mapping[str, float] = _NO_COST) -> None:
        super().__init__(message)
        self.cause = cause
        self.cost = dict(cost)

    def __reduce__(self) -> Any:
        return type(self), self.args, self.__dict__


class Retryable(Exception):
    """The call may be tried again. ``cause`` and ``cost`` are as in `Fatal`.

    Args:
        after_s: shortest wait in seconds before the next attempt, as the service asked; None if it did not ask.
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
    """Whether trying again may help. True for `Retryable`, and for timeouts and connection errors of a user's code."""
    return isinstance(error, Retryable | TimeoutError | ConnectionError)


def cause_of(error: BaseException) -> str:
    """Return the cause of an error in one word, for the metrics."""
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
    """Return what went wrong, in one line of at most 1,000 characters."""
    text = str(error) if isinstance(error, Retryable | Fatal) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:1000]


def wait_asked_for(error: BaseException) -> float:
    """Return the seconds that the service asked the client to wait; 0 if it did not ask."""
    return (error.after_s or 0.0) if isinstance(error, Retryable) else 0.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter, within bounds.

    The wait before attempt n + 1 is uniform between 0 and ``backoff_s * 2**(n - 1)``, at most ``max_backoff_s``, and
    never shorter than what the service asked for (``Retry-After``). Because of the jitter, requests that failed
    together are not repeated all at once.

    Attributes:
        attempts: largest number of attempts of a call, the first included; None: as many as ``outage_s`` allows.
        backoff_s: bound of the first wait, in seconds.
        max_backoff_s: bound of every wait, in seconds.
        outage_s: longest outage, in seconds, that a call waits for. An outage is a time in which a service that has
            answered before accepts no connections. Attempts in an outage do not count, because a restart of the service
            would otherwise use up all attempts of all requests within seconds. No wait in an outage is longer than the
            outage has been so far. A call fails if the service asks for a wait that is longer than ``outage_s``.
    """

    attempts: int | None = 5
    backoff_s: float = 0.5
    max_backoff_s: float = 60.0
    outage_s: float = 600.0

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``call``, which is repeated as long as its errors are retryable.

        Raises:
            Exception: the error of the last attempt, or the first error that is not retryable.
        """
        retries = Retries(self)
        while True:
            try:
                return await call()
            except Exception as error:
                await asyncio.sleep(retries.next_wait(error))


class Retries:
    """Counts the attempts of one call under a policy, for callers that do other work between two attempts."""

    __slots__ = ("_counted", "_outage_since", "_policy")

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._counted = 0
        self._outage_since: float | None = None

    def next_wait(self, error: Exception, *, answered_before: bool = False) -> float:
        """Count a failed attempt and return the seconds until the next one.

        Must be called inside the ``except`` block of the attempt. ``answered_before``: the service has answered some
        call before, so an attempt that does not reach it means an outage.

        Raises:
            Exception: ``error`` itself, if it is not retryable or the policy allows no further attempt.
            Fatal: the service asks for a longer wait than the policy allows.
        """
        policy = self._policy
        if not is_retryable(error):
            raise error
        asked_s = wait_asked_for(error)
        if asked_s > policy.outage_s:
            raise Fatal(
                f"the service asks to be left alone for {asked_s:.0f} s, more than {policy.outage_s:g} s: {error}",
                cause=cause_of(error),
            ) from error
        now = asyncio.get_running_loop().time()
        if policy.attempts is None or (answered_before and cause_of(error) in NOT_DELIVERED):
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
    """A time limit like `asyncio.timeout`, but time in which the event loop is blocked does not count.

    Computation, imports or a busy machine may block the loop for seconds. Answers that arrive meanwhile are read in the
    same iteration of the loop in which their time is up. `asyncio.timeout` drops them, so they are requested and paid
    for again. This limit is extended by the time by which its timer fires late, up to nine times ``seconds`` in all.

        async with Timeout(30.0):
            await answer()

    Args:
        seconds: the limit; None = no limit.

    Raises:
        TimeoutError: the time is up.
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
        """Whether the time was up."""
        return self._limit.expired()

    def _end(self, due: float) -> None:
        late_s = min(self._loop.time() - due, self._spare_s)
        if late_s > _STALL_S:
            self._spare_s -= late_s
            due = self._loop.time() + late_s
            self._handle = self._loop.call_at(due, self._end, due)
        else:
            self._limit.reschedule(self._loop.time())
