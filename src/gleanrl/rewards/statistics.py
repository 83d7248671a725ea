"""Counts the reward agent's requests, and detects that a service is down."""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Mapping

import numpy as np

from gleanrl.protocols import Metrics
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import NOT_DELIVERED, REFUSED, cause_of

# Names of the token counts in `Score.parts`.
PROMPT_TOKENS, COMPLETION_TOKENS = "cost/prompt_tokens", "cost/completion_tokens"
log = logging.getLogger(__name__)

# A service counts as down only if the calls of at least this many different requests fail, because calls of a single
# request may fail for a reason that lies in the request.
_DOWN_REQUESTS = 4
_WARN_AFTER_S = 10.0  # seconds without a successful call after which a warning is logged
_QUANTILES = (50, 95, 99)


class Reservoir:
    """A uniform random sample of at most ``size`` of all added values (algorithm R of reservoir sampling)."""

    def __init__(self, size: int = 2048) -> None:
        self._size = size
        self._random = random.Random(0)
        self.values: list[float] = []
        self._seen = 0

    def add(self, value: float) -> None:
        self._seen += 1
        if len(self.values) < self._size:
            self.values.append(value)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self.values[place] = value

    def percentiles(self, name: str) -> dict[str, float]:
        """Return ``{name_p50_s, name_p95_s, name_p99_s}``; empty if no value was added."""
        if not self.values:
            return {}
        values = np.percentile(self.values, _QUANTILES)
        return {f"{name}_p{q}_s": float(value) for q, value in zip(_QUANTILES, values, strict=True)}


class RecentQuantile:
    """A quantile of the latest ``size`` values, by which the agent decides when to hedge a request.

    It is available after ``least`` values, and computed again after every further ``least`` values.
    """

    def __init__(self, quantile: float, *, least: int = 32, size: int = 1024) -> None:
        self._quantile, self._least = quantile, least
        self._values: deque[float] = deque(maxlen=size)
        self._added = 0
        self.value: float | None = None  # None = fewer than ``least`` values were added

    def add(self, value: float) -> None:
        self._values.append(value)
        self._added += 1
        if len(self._values) >= self._least and self._added % self._least == 0:
            self.value = float(np.quantile(self._values, self._quantile))


class Statistics:
    """Counts and durations of the reward agent's requests since the last call of `RewardAgent.metrics`.

    The memory used does not grow with the number of requests.

    Attributes:
        counts: number of events, by the event's name in `metrics`.
        failed: number of failed requests by cause.
        total: seconds from the submission of a request to its score, including retries.
        answer: seconds of single attempts that returned a score, without the waits for slots and rate limits.
        most_queued, most_in_flight: the largest number of requests that were queued or in flight at the same time.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self.total, self.answer = Reservoir(), Reservoir()
        self.most_queued = self.most_in_flight = 0

    def add_cost(self, cost: Mapping[str, float]) -> None:
        """Count the tokens that an attempt used.

        ``cost`` holds them under the keys `PROMPT_TOKENS` and `COMPLETION_TOKENS`, as `Score.parts` does.
        """
        prompt, completion = cost.get(PROMPT_TOKENS, 0.0), cost.get(COMPLETION_TOKENS, 0.0)
        if prompt or completion:
            self._tokens["prompt"] += round(prompt)
            self._tokens["completion"] += round(completion)

    def metrics(self, queued: int, in_flight: int) -> Metrics:
        """Return the metrics: durations and queue lengths as ``time/...``, numbers of requests as ``service/...``.

        Neither is reproducible, because a resumed run sends fewer requests than an uninterrupted one.
        """
        names = ("scored", "retries", "timeouts", "unreachable", "hedged", "cache_hits", "journal_hits")
        return {
            **{f"service/{name}": float(self.counts[name]) for name in names},
            **{f"service/failed/{cause}": float(count) for cause, count in sorted(self.failed.items())},
            **{f"service/{kind}_tokens": float(count) for kind, count in self._tokens.items()},
            **self.total.percentiles("time/reward"),
            **self.answer.percentiles("time/reward_answer"),
            "time/reward_queued": float(queued),
            "time/reward_queued_most": float(self.most_queued),
            "time/reward_in_flight": float(in_flight),
            "time/reward_in_flight_most": float(self.most_in_flight),
        }


class OutageDetector:
    """Detects that a service answers no request, from the results of all calls.

    Attributes:
        answered: whether any call has returned a score.
        since: event loop time of the first failure after the last score; None if no call has failed since.
    """

    def __init__(self) -> None:
        self.answered = False
        self.since: float | None = None
        self._failing: set[int] = set()
        self._scored_at = float("-inf")  # event loop time at which the latest of the calls that were scored began
        self._refuses_single = False  # whether a refused request has used up the time that an outage may last

    def succeeded(self, began: float) -> None:
        """Record that a call has returned a score, even an invalid one. It ``began`` at this event loop time."""
        self.answered, self.since = True, None
        self._failing.clear()
        self._scored_at = max(self._scored_at, began)

    def failed(self, request: int, now: float) -> None:
        """Record that a call failed at the event loop time ``now``. ``request`` identifies the request."""
        self.since = now if self.since is None else self.since
        if len(self._failing) < _DOWN_REQUESTS:
            self._failing.add(request)

    def given_up(self) -> None:
        """Record that a request has failed because the outage that was to explain its failures lasted too long.

        If at least four requests fail, this says nothing. Otherwise the service probably refuses single requests, so
        that later refusals of fewer than four requests are no outage.
        """
        self._refuses_single = self._refuses_single or not self.only_failures

    @property
    def only_failures(self) -> bool:
        """Whether calls of several requests have failed since the last score."""
        return len(self._failing) >= _DOWN_REQUESTS

    def explains(self, error: BaseException, refused_at: float | None) -> bool:
        """Return whether an outage of the service is the reason of ``error``, so that it says nothing of the request.

        A service that cannot be reached is one only if it has answered before; else its address is probably wrong. A
        refusal is one if calls of at least four requests have failed since the last score. With fewer requests it is
        one as long as no call that began after this request was first refused has been scored: a service that answers
        others meanwhile refuses this request.

        ``refused_at`` is the event loop time at which the request was first refused; None if it was not refused.
        """
        cause = cause_of(error)
        if cause in NOT_DELIVERED:
            return self.answered
        if cause not in REFUSED or refused_at is None:
            return False
        return self.only_failures or not (self._refuses_single or self._scored_at >= refused_at)


class ErrorBudget:
    """Decides when a service counts as down.

    Args:
        max_failed_fraction: the service counts as down if more than this share of the last ``window`` requests failed.
            The share is checked once 32 requests have ended.
        down_after_s: the service also counts as down if no call has returned a score for this many seconds, and the
            calls that failed meanwhile belong to at least four requests.
    """

    def __init__(self, max_failed_fraction: float, window: int, down_after_s: float) -> None:
        self._limit, self._down_after_s = max_failed_fraction, down_after_s
        self._last: deque[bool] = deque(maxlen=max(32, window))
        self._failed = 0
        self._warned = False
        self.outage = OutageDetector()

    def succeeded(self, began: float) -> None:
        """Record that a call has returned a score, even an invalid one. It ``began`` at this event loop time."""
        self._warned = False
        self.outage.succeeded(began)

    def attempt_failed(self, request: int, error: BaseException, now: float) -> None:
        """Record that a call of the request with number ``request`` failed at the event loop time ``now``.

        Raises `UserError` if the service counts as down.
        """
        self.outage.failed(request, now)
        seconds = now - (now if self.outage.since is None else self.outage.since)
        if seconds >= self._down_after_s and self.outage.only_failures:
            raise UserError(
                f"the reward has only failed for {seconds:.0f} s (reward.down_after_s = {self._down_after_s:g}); "
                f"the last error: {error}; resume the run once it answers"
            )
        if seconds >= _WARN_AFTER_S and not self._warned:
            self._warned = True
            log.warning("the reward has only failed for %.0f s; the last error: %s", seconds, error)

    def ended(self, failed: bool, reason: str = "") -> None:
        """Record that a request has ended. Raises `UserError` if too large a share of the last requests failed."""
        if len(self._last) == self._last.maxlen:
            self._failed -= self._last[0]
        self._last.append(failed)
        self._failed += failed
        share = self._failed / len(self._last)
        if failed and len(self._last) >= 32 and share > self._limit:
            raise UserError(
                f"{share:.0%} of the last {len(self._last)} rewards failed, more than reward.max_failed_fraction = "
                f"{self._limit:g}; the last one: {reason}; resume the run once this is fixed"
            )
