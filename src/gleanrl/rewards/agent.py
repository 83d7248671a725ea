"""The reward agent: scores trajectories by any reward, thousands at once, each request on its own.

The training loop, its evaluation and users' scripts call `RewardAgent.score` or `RewardAgent.score_groups`. A request
takes these steps:

1. `RewardAgent.score` (or that of a `RewardLane`) makes a `Request` of the trajectory.
2. `RewardAgent._submit` answers from the cache, joins an identical request that is under way, or starts a task.
3. `RewardAgent._run` is that task. It reads and writes the journal, makes attempts with waits between them, and keeps
   the error budget. A request that fails gets ``Score.failed(reason)``, which the batch leaves out. It is never zero.
4. `RewardAgent._attempt` makes one attempt: it waits for slots and rates, calls the `Scorer` under the time limit, and
   counts costs. The scorer of a user's reward is a `gleanrl.rewards.adapter.RewardAdapter`, which calls the user's
   function on the event loop, in a thread or in a worker process, and reads the score in its result.

With ``reward.name = "environment"`` there is no agent: `gleanrl.rewards.request.EnvironmentReward` answers at once.

Requests are independent of each other, so one that hangs or fails does not affect the others.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError

from gleanrl.config.settings import RewardSettings
from gleanrl.protocols import Metrics
from gleanrl.rewards.adapter import load_reward
from gleanrl.rewards.journal import Journal
from gleanrl.rewards.limits import CURRENT_PERMIT, Permit, RateLimiter, time_limit
from gleanrl.rewards.request import HEDGED, Answer, Item, NotApplicable, Request, Scorer
from gleanrl.rewards.statistics import COMPLETION_TOKENS, ErrorBudget, RecentQuantile, Statistics
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import (
    NOT_DELIVERED,
    Fatal,
    Retries,
    Retryable,
    RetryPolicy,
    cause_of,
    reason_of,
    wait_asked_for,
)

log = logging.getLogger(__name__)

LaneName = Literal["train", "eval"]

_CHARACTERS_PER_TOKEN = 4
"""Used to estimate a request's tokens before it is sent. The number that the service reports corrects the estimate."""
_LONG_WAIT_S = 60.0
"""A wait that a service asks for is logged if it is at least this long."""


class _Job(Permit):
    """A request under way, with the futures of all callers that wait for its score."""

    __slots__ = ("key", "number", "request", "task", "waiters")

    def __init__(self, request: Request, lane: LaneName, key: str | None, number: int) -> None:
        super().__init__(lane)
        self.request, self.key, self.number = request, key, number
        self.waiters: set[asyncio.Future[Score]] = set()
        self.task: asyncio.Task[None] | None = None

    def settle(self, outcome: Score | Exception) -> None:
        for waiter in self.waiters:
            if waiter.done():  # cancelled in this turn of the loop
                continue
            if isinstance(outcome, Score):
                waiter.set_result(outcome)
            else:
                waiter.set_exception(outcome)


@dataclass(frozen=True, slots=True)
class RewardLane:
    """A `Reward` with slots of its own, for training or for evaluation."""

    agent: RewardAgent
    name: LaneName

    async def score(self, task: Task, trajectory: Answer) -> Score:
        """See `RewardAgent.score`."""
        return await self.agent._submit(Request.of(task, trajectory), self.name)

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        """See `RewardAgent.finish`."""
        return await self.agent.finish(task, scores)


class RewardAgent:
    """Scores trajectories by any reward, thousands at once.

    The agent is itself the `Reward` for training; `lane` returns the one for evaluation. A request that fails does not
    raise: its score is invalid and says why. All callers that wait get `UserError` when the service is down
    (`RewardSettings.max_failed_fraction`, ``down_after_s``) or the configuration is wrong::

        async with RewardAgent("judge", options={...}, max_concurrency=500) as agent:
            async for index, scores in agent.score_groups(groups):
                ...

    Args:
        reward: any reward that `gleanrl.rewards.adapter.load_reward` takes; None: the one that the settings name.
        settings: limits and all other settings. ``overrides`` replace single settings by name.
        journal: a file in which finished rewards survive a crash; None: they are kept in memory only.

    Raises:
        UserError: there is no such reward, or a setting is invalid.
    """

    def __init__(
        self,
        reward: Any = None,
        settings: RewardSettings | None = None,
        *,
        journal: Path | str | None = None,
        **overrides: Any,
    ) -> None:
        settings = settings or RewardSettings()
        if overrides:
            try:
                settings = RewardSettings(**{**settings.model_dump(), **overrides})
            except ValidationError as error:
                first = error.errors()[0]
                raise UserError(f"RewardAgent: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        self.settings = settings
        name = settings.name if reward is None else reward
        self._scorer: Scorer = load_reward(name, options=settings.options, settings=settings)
        self._limiter = RateLimiter(
            {
                "train": (settings.max_concurrency, 1.0 - settings.eval_share),
                "eval": (settings.eval_concurrency, settings.eval_share),
            },
            slots=self._scorer.slots,
            requests_per_minute=settings.requests_per_minute,
            tokens_per_minute=settings.tokens_per_minute,
        )
        self._retry_policy = RetryPolicy(
            settings.attempts, settings.backoff_s, settings.max_backoff_s, settings.down_after_s
        )
        self._timeout_s = None if self._scorer.own_timeout else settings.timeout_s
        self._statistics = Statistics()
        self._budget = ErrorBudget(settings.max_failed_fraction, settings.failed_window, settings.down_after_s)
        self._recent_times = RecentQuantile(1.0 - settings.hedge_share) if settings.hedge_share else None
        self._mean_completion_tokens = 0.0
        self._wait_logged_until = float("-inf")  # loop time
        self._journal_path = Path(journal) if journal is not None else None
        self._journal: Journal | None = None
        self._cache: OrderedDict[str, Score] = OrderedDict()
        self._jobs: set[_Job] = set()
        self._jobs_by_key: dict[str, _Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # also those of cancelled jobs, which end a little later
        self._submitted = 0
        self._stopped: str | None = "the reward agent is not open: use `async with`"

    async def __aenter__(self) -> Self:
        if self._journal_path is not None:
            self._journal = Journal(self._journal_path)
        self._scorer.use_journal(self._journal)
        self._stopped = None
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel requests under way and release all resources. Callers that still wait get `UserError`."""
        self._stop("the reward agent was closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._scorer.aclose()
        if self._journal is not None:
            journal, self._journal = self._journal, None
            await journal.aclose()

    # --- scoring ----------------------------------------------------------------------------------
    async def score(self, task: Task, trajectory: Answer) -> Score:
        """Return the score of a trajectory, a response or the messages of a conversation, in the lane of training.

        If no score can be had, an invalid one with the reason is returned.
        """
        return await self._submit(Request.of(task, trajectory), "train")

    async def score_again(self, task: Task, trajectory: Answer) -> Score:
        """Score as `score` does, but neither read nor write the cache and the journal."""
        return await self._submit(replace(Request.of(task, trajectory), nonce=uuid.uuid4().hex), "train")

    async def finish(self, task: Task, scores: Sequence[Score]) -> list[Score]:
        """Post-process the scores of a complete group. If that fails, all its scores become invalid."""
        if not self._scorer.post_processes:
            return list(scores)
        try:
            async with time_limit(self._timeout_s):
                return list(await self._scorer.finish(task, scores))
        except UserError as error:
            self._stop(str(error))
            raise
        except Exception as error:
            reason = f"post-processing the group: {reason_of(error)}"
            return [self._fail("finish", reason) if score.valid else score for score in scores]

    def lane(self, name: LaneName) -> RewardLane:
        """Return a lane, which has slots of its own and shares reward, cache, journal and rates with the agent."""
        return RewardLane(self, name)

    async def score_groups(
        self, groups: Iterable[Sequence[Item]] | AsyncIterable[Sequence[Item]], *, lane: LaneName = "train"
    ) -> AsyncIterator[tuple[int, list[Score]]]:
        """Yield ``(index, scores)`` of each group, as soon as the group is complete and post-processed.

        A group holds pairs of a task and what is scored: a response, the messages of a conversation, or a `Trajectory`.
        Groups are taken from ``groups`` only when there is room for them, so ``groups`` may be endless. The first error
        of ``groups`` or of a group ends the iteration and cancels all other requests.
        """
        loop = asyncio.get_running_loop()
        room = 2 * self._limiter.lanes[lane].slots  # so that slots never wait for the next group
        results: asyncio.Queue[tuple[int, list[Score]] | Exception | None] = asyncio.Queue()  # None: no more groups
        sizes: dict[int, int] = {}  # members of each group taken and not yet delivered, by index
        members = 0  # sum of these sizes
        delivered = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        async def score_group(index: int, group: Sequence[Item]) -> None:
            try:
                requests = [Request.of(task, answer) for task, answer in group]
                scores = await asyncio.gather(*(self._submit(request, lane) for request in requests))
                if requests:
                    scores = await self.finish(requests[0].task, scores)
                results.put_nowait((index, scores))
            except Exception as error:
                results.put_nowait(error)

        async def take_groups() -> None:
            nonlocal members
            taken = 0
            try:
                source = aiter(groups) if isinstance(groups, AsyncIterable) else iter(groups)
                while True:
                    group = await anext(source, None) if isinstance(source, AsyncIterator) else next(source, None)
                    if group is None:
                        break
                    sizes[taken] = len(group)
                    members += len(group)
                    task = loop.create_task(score_group(taken, group))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    taken += 1
                    while members >= room:
                        delivered.clear()
                        await delivered.wait()
                results.put_nowait(None)
            except Exception as error:
                results.put_nowait(error)

        taking = loop.create_task(take_groups())
        try:
            while sizes or not taking.done():
                result = await results.get()
                if isinstance(result, Exception):
                    raise result
                if result is None:
                    await taking
                    continue
                members -= sizes.pop(result[0])
                delivered.set()
                yield result
        finally:
            left = [taking, *tasks]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def metrics(self) -> Metrics:
        """Return the metrics since the last call. docs/howto/rewards.md lists their names."""
        statistics, self._statistics = self._statistics, Statistics()
        return statistics.metrics(self._limiter.queued, self._limiter.in_flight)

    # --- one request ------------------------------------------------------------------------------
    def _submit(self, request: Request, lane: LaneName) -> asyncio.Future[Score]:
        """Return a future of the score: from the cache, from an identical request under way, or from a new job.

        A job is cancelled once all futures that wait for it are cancelled.
        """
        if self._stopped is not None:
            raise UserError(self._stopped)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Score] = loop.create_future()
        key: str | None = None
        if not request.nonce and (self.settings.cache or self._journal is not None):
            try:
                key = request.key(self._scorer.version)
            except TypeError as error:
                waiter.set_result(self._fail("payload", f"the payload of task {request.task.id!r}: {error}"))
                return waiter
        if key is not None and key in self._cache:
            self._cache.move_to_end(key)
            self._statistics.counts["cache_hits"] += 1
            waiter.set_result(self._cache[key])
            return waiter
        job = self._jobs_by_key.get(key) if key is not None else None
        if job is not None:
            self._statistics.counts["cache_hits"] += 1
            job.add_lane(lane)
        else:
            self._submitted += 1
            job = _Job(request, lane, key, self._submitted)
            job.task = loop.create_task(self._run(job))
            self._tasks.add(job.task)
            job.task.add_done_callback(self._tasks.discard)
            self._jobs.add(job)
            if key is not None and self.settings.cache:
                self._jobs_by_key[key] = job
        job.waiters.add(waiter)
        waiter.add_done_callback(partial(self._leave, job))
        return waiter

    async def _run(self, job: _Job) -> None:
        """Score the job's request, with retries, and give the result to all that wait for it."""
        CURRENT_PERMIT.set(job)
        loop, budget, journal, key = asyncio.get_running_loop(), self._budget, self._journal, job.key
        retries = Retries(self._retry_policy)
        started = loop.time()
        outcome: Score | Exception
        try:
            score = journal.get(key) if journal is not None and key is not None else None
            if score is not None:
                self._statistics.counts["journal_hits"] += 1
            else:
                while score is None:
                    try:
                        score = await (self._attempt(job) if self._recent_times is None else self._hedge(job))
                    except Exception as error:
                        await asyncio.sleep(self._wait_before_retry(job, retries, error))
                budget.succeeded()
                self._statistics.counts["scored"] += 1
                self._statistics.total.add(loop.time() - started)
                budget.ended(not score.valid and score.applicable, score.explanation or "no reason given")
                if not score.valid:
                    self._statistics.failed["invalid" if score.applicable else "not_applicable"] += 1
                elif journal is not None and key is not None:
                    await journal.put(key, score)
            if score.valid and key is not None and self.settings.cache:
                self._cache[key] = score
                if len(self._cache) > self.settings.cache:
                    self._cache.popitem(last=False)
            outcome = score
        except UserError as error:
            outcome = error
        except Exception as error:
            applicable, reason = not isinstance(error, NotApplicable), reason_of(error)
            try:
                budget.ended(applicable, reason)
                outcome = replace(self._fail(cause_of(error), reason), applicable=applicable)
            except UserError as down:
                outcome = down
        finally:
            job.task = None  # breaks a reference cycle: the task's context refers to the job
        self._forget(job)
        job.settle(outcome)
        if isinstance(outcome, UserError):
            self._stop(str(outcome))

    async def _attempt(self, job: _Job, sent: asyncio.Future[float] | None = None) -> Score:
        """Call the scorer once, within the limits. ``sent`` gets the loop time at which the call began."""
        loop, limiter = asyncio.get_running_loop(), self._limiter
        tokens = 0.0  # an estimate, corrected by what the service reports
        if limiter.counts_tokens:
            characters = sum(len(message["content"] or "") for message in job.request.messages)
            tokens = characters / _CHARACTERS_PER_TOKEN + self._mean_completion_tokens
        lane = await limiter.acquire(job, tokens)
        try:
            statistics = self._statistics
            statistics.most_queued = max(statistics.most_queued, limiter.queued)
            statistics.most_in_flight = max(statistics.most_in_flight, limiter.in_flight)
            started = loop.time()
            if sent is not None and not sent.done():
                sent.set_result(started)
            async with time_limit(self._timeout_s):
                score = await self._scorer(job.request)
        except (Retryable, Fatal) as error:
            self._charge(error.cost, tokens)
            raise
        finally:
            limiter.release(lane)
        self._statistics.answer.add(loop.time() - started)
        if score.parts and self._charge(score.parts, tokens):
            completion = score.parts.get(COMPLETION_TOKENS, 0.0)
            self._mean_completion_tokens += (completion - self._mean_completion_tokens) / 16
        return score

    async def _hedge(self, job: _Job) -> Score:
        """Make an attempt, and a second one at the same time if the first takes longer than most others did.

        Returns the first result, and cancels the other attempt. Raises the last error if both fail.
        """
        assert self._recent_times is not None
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[float] = loop.create_future()
        tasks = [loop.create_task(self._attempt(job, sent))]
        try:
            await asyncio.wait([*tasks, sent], return_when=asyncio.FIRST_COMPLETED)
            if self._recent_times.value is not None:
                done, _ = await asyncio.wait(tasks, timeout=self._recent_times.value)
                if not done:
                    self._statistics.counts["hedged"] += 1
                    context = contextvars.copy_context()
                    context.run(HEDGED.set, True)
                    tasks.append(loop.create_task(self._attempt(job), context=context))
            score, pending = None, set(tasks)
            while score is None:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not task.cancelled() and task.exception() is None:
                        score = task.result()
                if score is None and not pending:
                    score = done.pop().result()  # raises the attempt's error
            self._recent_times.add(loop.time() - sent.result())
            return score
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _wait_before_retry(self, job: _Job, retries: Retries, error: Exception) -> float:
        """Count a failed attempt. Returns the seconds until the next one.

        Raises:
            Exception: ``error`` itself, if there is no further attempt.
            UserError: the service is down.
        """
        if isinstance(error, UserError | NotApplicable):
            raise error
        counts, now = self._statistics.counts, asyncio.get_running_loop().time()
        if cause_of(error) in NOT_DELIVERED:
            counts["unreachable"] += 1
        self._budget.attempt_failed(job.number, error, now)
        seconds, asked_s = retries.next_wait(error, answered_before=self._budget.answered), wait_asked_for(error)
        counts["retries"] += 1
        if cause_of(error) == "timeout":
            counts["timeouts"] += 1
        if asked_s >= _LONG_WAIT_S and now >= self._wait_logged_until:
            self._wait_logged_until = now + asked_s
            log.warning("the reward service asks to be left alone for %.0f s; the requests wait: %s", asked_s, error)
        return seconds

    def _fail(self, cause: str, reason: str) -> Score:
        """Count a failed request, and return its score."""
        self._statistics.failed[cause] += 1
        if cause == "timeout":
            self._statistics.counts["timeouts"] += 1
        return Score.failed(reason)

    def _charge(self, cost: Mapping[str, float], estimated: float) -> bool:
        """Count the tokens that an attempt used, instead of the estimated ones. Returns whether any were reported."""
        used = self._statistics.add_cost(cost)
        if used and self._limiter.counts_tokens:
            self._limiter.correct(used - estimated)
        return used > 0

    def _leave(self, job: _Job, waiter: asyncio.Future[Score]) -> None:
        """Remove a waiter that has its score or was cancelled. Cancels the job if that was the last waiter."""
        job.waiters.discard(waiter)
        if waiter.cancelled() and not job.waiters and job in self._jobs and job.task is not None:
            self._forget(job)
            job.task.cancel()

    def _forget(self, job: _Job) -> None:
        self._jobs.discard(job)
        if job.key is not None and self._jobs_by_key.get(job.key) is job:
            del self._jobs_by_key[job.key]

    def _stop(self, why: str) -> None:
        """Accept no further request, and raise `UserError` in all callers that wait."""
        self._stopped = self._stopped or why
        jobs, self._jobs = self._jobs, set()
        self._jobs_by_key.clear()
        for job in jobs:
            job.settle(UserError(self._stopped))
            if job.task is not None:
                job.task.cancel()
