"""Asking a scorer for one score: slots and rates, the clock, further tries, a second request for slow ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gleanrl.errors import UserError
from gleanrl.rewards.clock import Clock
from gleanrl.rewards.errors import UNREACHABLE, Fatal, NotApplicable, Retryable
from gleanrl.rewards.forms import as_score
from gleanrl.rewards.limits import Gate, Lane
from gleanrl.rewards.request import Request, Scorer
from gleanrl.rewards.statistics import ErrorBudget, Recent, Statistics
from gleanrl.settings import RewardSettings
from gleanrl.types import Score

_CHARACTERS_PER_TOKEN = 4  # a first guess of what a request takes; corrected by what the service reports


class Asker:
    """Asks ``scorer`` as often as it takes, within the limits of ``gate``."""

    def __init__(
        self, scorer: Scorer, settings: RewardSettings, gate: Gate, statistics: Statistics, budget: ErrorBudget
    ) -> None:
        from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

        self._scorer = scorer
        self._gate, self._statistics, self._budget = gate, statistics, budget
        self._timeout_s = settings.timeout_s
        self._attempts, self._down_after_s = settings.attempts, settings.down_after_s
        self._own_clock = bool(getattr(scorer, "keeps_time", False))
        self._recent = Recent(1.0 - settings.hedge_share) if settings.hedge_share else None
        self._completion = 0.0  # tokens, running mean
        self._requests = 0
        backoff = wait_random_exponential(multiplier=settings.backoff_s, max=settings.max_backoff_s)
        self._retrying = AsyncRetrying(
            retry=retry_if_exception(_may_pass),
            wait=lambda state: max(backoff(state), _asked_for(state)),
            before_sleep=self._tried,
            reraise=True,
        )

    async def ask(self, lane: Lane, request: Request) -> Score:
        """The score. Raises what the last try raised, or `UserError` where the service is down."""
        self._requests += 1
        number = self._requests
        try:
            return await self._try(lane, request, number)
        except Exception as error:
            if not _may_pass(error):
                raise
            failed = [error]

        async def again() -> Score:
            if failed:
                raise failed.pop()  # the first try, which needed none of this machinery
            return await self._try(lane, request, number)

        patience = _Patience(self._attempts, self._down_after_s, self._budget)
        return await self._retrying.copy(stop=patience)(again)

    async def _try(self, lane: Lane, request: Request, number: int) -> Score:
        try:
            score = await (self._once(lane, request) if self._recent is None else self._hedged(lane, request))
        except (UserError, NotApplicable):
            raise
        except Exception as error:
            if cause_of(error) == UNREACHABLE:
                self._statistics.counts["unreachable"] += 1
            self._budget.attempt_failed(number, error, asyncio.get_running_loop().time())
            raise
        self._budget.succeeded()
        return score

    async def _once(self, lane: Lane, request: Request, sent: asyncio.Future[float] | None = None) -> Score:
        """One call; ``sent`` tells when it began."""
        loop, gate = asyncio.get_running_loop(), self._gate
        tokens = self._estimate(request) if gate.counts_tokens else 0.0
        await gate.enter(lane, tokens)
        clock = asyncio.timeout(None) if self._own_clock else Clock(self._timeout_s)
        self._statistics.occupied(gate.queued, gate.in_flight)
        try:
            started = loop.time()
            if sent is not None and not sent.done():
                sent.set_result(started)
            async with clock:
                score = as_score(await self._scorer(request))
        except TimeoutError as error:
            reason = f"no score within {self._timeout_s:g} s" if clock.expired() else f"timeout: {error}"
            raise Retryable(reason, cause="timeout") from None
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            raise Fatal("the reward cancelled itself", cause="cancelled") from None
        finally:
            gate.leave(lane)
        used = self._statistics.answered(score, loop.time() - started)
        if gate.counts_tokens and used:
            gate.correct(used - tokens)
            self._completion += (score.parts.get("cost/completion_tokens", 0.0) - self._completion) / 16
        return score

    async def _hedged(self, lane: Lane, request: Request) -> Score:
        """Ask a second time where the first answer takes longer than most did; the loser is cancelled."""
        assert self._recent is not None
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[float] = loop.create_future()
        tasks = [loop.create_task(self._once(lane, request, sent))]
        try:
            await asyncio.wait([*tasks, sent], return_when=asyncio.FIRST_COMPLETED)
            if self._recent.value is not None:
                done, _ = await asyncio.wait(tasks, timeout=self._recent.value)
                if not done:
                    self._statistics.counts["hedged"] += 1
                    tasks.append(loop.create_task(self._once(lane, request)))
            score = await _first_success(tasks)
            self._recent.add(loop.time() - sent.result())
            return score
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _estimate(self, request: Request) -> float:
        characters = sum(len(message["content"] or "") for message in request.messages)
        return characters / _CHARACTERS_PER_TOKEN + self._completion

    def _tried(self, state: Any) -> None:
        self._statistics.counts["retries"] += 1
        if cause_of(state.outcome.exception()) == "timeout":
            self._statistics.counts["timeouts"] += 1


class _Patience:
    """When a request is given up: after so many tries, without those that found nobody where somebody was before.

    A service that restarts refuses everybody at once, and within seconds all tries of whatever is in flight would be
    used up. Such tries end with the service's return, or after ``down_after_s``.
    """

    def __init__(self, attempts: int, down_after_s: float, budget: ErrorBudget) -> None:
        self._left, self._down_after_s, self._budget = attempts, down_after_s, budget
        self._nobody_since: float | None = None

    def __call__(self, state: Any) -> bool:
        """Whether the try that just failed was the last."""
        if self._budget.answered and cause_of(state.outcome.exception()) == UNREACHABLE:
            now = asyncio.get_running_loop().time()
            self._nobody_since = now if self._nobody_since is None else self._nobody_since
            return now - self._nobody_since >= self._down_after_s
        self._nobody_since = None
        self._left -= 1
        return self._left <= 0


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, Retryable | TimeoutError | ConnectionError)


def cause_of(error: BaseException) -> str:
    """A word for the metrics."""
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
    """Why a score could not be had, in one line."""
    text = str(error) if isinstance(error, Retryable | Fatal) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:1000]


async def _first_success(tasks: Sequence[asyncio.Task[Score]]) -> Score:
    """The first result of any; the error of the last where all fail."""
    pending = set(tasks)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled() and task.exception() is None:
                return task.result()
        if not pending:
            return done.pop().result()


def _asked_for(state: Any) -> float:
    """Seconds that a service asked to be left alone for."""
    return getattr(state.outcome.exception(), "after_s", None) or 0.0


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
