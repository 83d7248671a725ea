"""Asking a scorer for one score: slots and rates, the clock, further tries, a second request for slow ones."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards.clock import Within
from gleanrl.rewards.errors import NotApplicable
from gleanrl.rewards.limits import Claim, Gate
from gleanrl.rewards.request import SECOND, Request, Scorer
from gleanrl.rewards.statistics import COMPLETION_TOKENS, ErrorBudget, Recent, Statistics
from gleanrl.types import Score
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import NOT_DELIVERED, Fatal, Retryable, cause_of, is_retryable

log = logging.getLogger(__name__)

_CHARACTERS_PER_TOKEN = 4  # a first guess of what a request takes; corrected by what the service reports
_LONG_S = 60.0  # a wait that a service asks for and that the user is told of


class Asker:
    """Asks ``scorer`` as often as it takes, within the limits of ``gate``."""

    def __init__(
        self, scorer: Scorer, settings: RewardSettings, gate: Gate, statistics: Statistics, budget: ErrorBudget
    ) -> None:
        from tenacity import AsyncRetrying, retry_if_exception

        self._scorer = scorer
        self._gate, self._statistics, self._budget = gate, statistics, budget
        self._timeout_s = None if getattr(scorer, "keeps_time", False) else settings.timeout_s
        self._settings, self._down_after_s = settings, settings.down_after_s
        self._told_until = float("-inf")  # loop time until which the user knows that the service wants to be left alone
        self._recent = Recent(1.0 - settings.hedge_share) if settings.hedge_share else None
        self._completion = 0.0  # tokens, running mean
        self._requests = 0
        self._retrying = AsyncRetrying(retry=retry_if_exception(is_retryable), before_sleep=self._tried, reraise=True)

    async def ask(self, claim: Claim, request: Request) -> Score:
        """The score. Raises what the last try raised, or `UserError` where the service is down."""
        self._requests += 1
        number = self._requests
        try:
            return await self._try(claim, request, number)
        except Exception as error:
            if not is_retryable(error):
                raise
            failed = [error]

        async def again() -> Score:
            if failed:
                raise failed.pop()  # the first try, which needed none of this machinery
            return await self._try(claim, request, number)

        patience = _Patience(self._settings, self._budget)
        return await self._retrying.copy(after=patience.failed, wait=patience.wait, stop=patience.is_over)(again)

    async def _try(self, claim: Claim, request: Request, number: int) -> Score:
        try:
            score = await (self._once(claim, request) if self._recent is None else self._hedged(claim, request))
        except (UserError, NotApplicable):
            raise
        except Exception as error:
            if cause_of(error) in NOT_DELIVERED:
                self._statistics.counts["unreachable"] += 1
            self._budget.attempt_failed(number, error, asyncio.get_running_loop().time())
            if (after_s := getattr(error, "after_s", None) or 0.0) > self._down_after_s:
                wants = f"the service asks to be left alone for {after_s:.0f} s"
                limit = f"reward.down_after_s = {self._down_after_s:g}"
                raise Fatal(f"{wants}, more than {limit}: {error}", cause=cause_of(error)) from None
            raise
        self._budget.succeeded()
        return score

    async def _once(self, claim: Claim, request: Request, sent: asyncio.Future[float] | None = None) -> Score:
        """One call; ``sent`` tells when it began."""
        loop, gate = asyncio.get_running_loop(), self._gate
        tokens = self._estimate(request) if gate.counts_tokens else 0.0
        lane = await gate.enter(claim, tokens)
        self._statistics.occupied(gate.queued, gate.in_flight)
        try:
            started = loop.time()
            if sent is not None and not sent.done():
                sent.set_result(started)
            async with Within(self._timeout_s):
                score = await self._scorer(request)
        except (Retryable, Fatal) as error:
            if error.cost:
                self._charge(error.cost, tokens)
            raise
        finally:
            gate.leave(lane)
        self._statistics.answered(loop.time() - started)
        if score.parts and self._charge(score.parts, tokens):
            self._completion += (score.parts.get(COMPLETION_TOKENS, 0.0) - self._completion) / 16
        return score

    async def _hedged(self, claim: Claim, request: Request) -> Score:
        """Ask a second time where the first answer takes longer than most did; the loser is cancelled."""
        assert self._recent is not None
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[float] = loop.create_future()
        tasks = [loop.create_task(self._once(claim, request, sent))]
        try:
            await asyncio.wait([*tasks, sent], return_when=asyncio.FIRST_COMPLETED)
            if self._recent.value is not None:
                done, _ = await asyncio.wait(tasks, timeout=self._recent.value)
                if not done:
                    self._statistics.counts["hedged"] += 1
                    tasks.append(loop.create_task(self._once(claim, request), context=_second()))
            score = await _first_success(tasks)
            self._recent.add(loop.time() - sent.result())
            return score
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _charge(self, cost: Mapping[str, float], estimated: float) -> bool:
        """Count the tokens that a try has used, in place of those it was let through with; False if none are told."""
        used = self._statistics.spent(cost)
        if used and self._gate.counts_tokens:
            self._gate.correct(used - estimated)
        return used > 0

    def _estimate(self, request: Request) -> float:
        characters = sum(len(message["content"] or "") for message in request.messages)
        return characters / _CHARACTERS_PER_TOKEN + self._completion

    def _tried(self, state: Any) -> None:
        self._statistics.counts["retries"] += 1
        error, now = state.outcome.exception(), asyncio.get_running_loop().time()
        if cause_of(error) == "timeout":
            self._statistics.counts["timeouts"] += 1
        if (wait := _asked_for(state)) >= _LONG_S and now >= self._told_until:
            self._told_until = now + wait
            log.warning("the reward service asks to be left alone for %.0f s; the requests wait: %s", wait, error)


class _Patience:
    """How long a request waits before its next try, and when it is given up: after so many tries, without those that
    found nobody where somebody was before.

    A service that restarts refuses everybody at once, and within seconds all tries of whatever is in flight would be
    used up. Such tries end with the service's return, or after ``down_after_s``; and since nobody who is there asked
    for room, no wait between them is longer than the outage already was.
    """

    def __init__(self, settings: RewardSettings, budget: ErrorBudget) -> None:
        self._settings, self._budget = settings, budget
        self._heard = 0  # tries
        self._nobody_since: float | None = None
        self._nobody_s = 0.0

    def failed(self, state: Any) -> None:
        """A try has failed; comes before `wait` and `is_over`."""
        if self._budget.answered and cause_of(state.outcome.exception()) in NOT_DELIVERED:
            now = asyncio.get_running_loop().time()
            self._nobody_since = now if self._nobody_since is None else self._nobody_since
            self._nobody_s = now - self._nobody_since
        else:
            self._nobody_since = None
            self._heard += 1

    def wait(self, state: Any) -> float:
        """Seconds until the next try: random up to a bound, so that not all come at once."""
        settings = self._settings
        if self._nobody_since is None:
            bound = settings.backoff_s * 2.0 ** min(self._heard - 1, 64)
        else:
            bound = max(settings.backoff_s, self._nobody_s)
        return max(random.uniform(0.0, min(bound, settings.max_backoff_s)), _asked_for(state))

    def is_over(self, state: Any) -> bool:
        if self._nobody_since is None:
            return self._heard >= self._settings.attempts
        return self._nobody_s >= self._settings.down_after_s


def _second() -> contextvars.Context:
    """This context, but of a second request for the same."""
    context = contextvars.copy_context()
    context.run(SECOND.set, True)
    return context


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
