"""The reward agent, which computes the scores of thousands of trajectories concurrently with any reward.

The training loop, its evaluation and users' scripts call `RewardAgent.score` or `RewardAgent.score_groups`. Each
request passes through these steps:

1. `RewardAgent.score` or `RewardLane.score` creates a `Request` from the trajectory.
2. `RewardAgent._submit` takes the score from the cache, or joins an identical request that is in flight, or starts an
   asyncio task. If the scorer divides the request, for example into votes, each part passes through these steps.
3. `RewardAgent._run` is that task. It reads and writes the journal, makes attempts, waits between them, and reports
   every result to the `ErrorBudget`. If the request fails, its score is ``Score.failed(reason)`` and never 0; the
   trajectory is then left out of the training batch.
4. `RewardAgent._attempt` makes one attempt. It waits for a slot and for the rate limits, calls the `Scorer` with a time
   limit, and counts the tokens that the attempt used. The scorer of a user's reward is a
   `gleanrl.rewards.adapter.RewardAdapter`, which calls the user's function on the event loop, in a thread or in a
   worker process, and converts its result to a `Score`.

With ``reward.name = "environment"`` a run has no agent: `gleanrl.rewards.request.EnvironmentReward` returns the score
that the environment gave.

Requests are independent of each other, so a request that hangs or fails does not affect the others.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import sys
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
from gleanrl.rewards.limits import CURRENT_PERMIT, Permit, RateLimiter, TokenEstimate, time_limit
from gleanrl.rewards.request import HEDGED, Answer, DeferredScore, Item, NotApplicable, Request, Scorer
from gleanrl.rewards.statistics import ErrorBudget, RecentQuantile, Statistics
from gleanrl.types import GROUP_SIZE, GROUP_UID, Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import (
    NOT_DELIVERED,
    REFUSED,
    Fatal,
    Retries,
    Retryable,
    RetryPolicy,
    cause_of,
    is_retryable,
    reason_of,
    wait_asked_for,
)

log = logging.getLogger(__name__)

LaneName = Literal["train", "eval"]

LONG_QUEUE_S = 10.0
"""If a request waits for a worker for this many seconds, a warning is logged once."""
_LONG_WAIT_S = 60.0
"""If a service asks for a wait of at least this many seconds, a warning is logged."""


class _Job(Permit):
    """A request in flight, with the futures of all callers that wait for its score."""

    __slots__ = ("key", "number", "refused_at", "request", "task", "waiters")

    def __init__(self, request: Request, lane: LaneName, key: str | None, number: int) -> None:
        super().__init__(lane)
        self.request, self.key, self.number = request, key, number
        self.waiters: set[asyncio.Future[Score]] = set()
        self.task: asyncio.Task[None] | None = None
        self.refused_at: float | None = None  # event loop time at which the service first refused the request

    def settle(self, outcome: Score | Exception) -> None:
        for waiter in self.waiters:
            # The caller was cancelled, and the callback that removes its future from the set has not run yet.
            if waiter.done():
                continue
            if isinstance(outcome, Score):
                waiter.set_result(outcome)
            else:
                waiter.set_exception(outcome)


@dataclass(frozen=True, slots=True)
class RewardLane:
    """A `gleanrl.protocols.Reward` that sends requests through one lane of an agent, for training or for evaluation.

    A lane is the queue of the requests of training or of evaluation. It has its own slots: the number of requests that
    may be in flight at the same time. So the requests of one lane do not wait for the slots of the other.
    """

    agent: RewardAgent
    name: LaneName

    async def score(self, task: Task, trajectory: Answer) -> Score:
        """See `RewardAgent.score`."""
        return await self.agent._submit(Request.of(task, trajectory), self.name)

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        """See `RewardAgent.finish`."""
        return await self.agent.finish(task, scores)


class RewardAgent:
    """Scores thousands of trajectories concurrently with any reward.

    The agent implements `gleanrl.protocols.Reward` for training; `lane` returns an implementation for evaluation. If a
    request fails, no error is raised: the returned score is invalid and its explanation is the reason. If the
    configuration is wrong or the service counts as down (``max_failed_fraction`` and ``down_after_s`` of
    `RewardSettings`), `UserError` is raised in all callers that wait for a score, and the agent accepts no further
    requests::

        async with RewardAgent("judge", options={...}, max_concurrency=500) as agent:
            async for index, scores in agent.score_groups(groups):
                ...

    Args:
        reward: any reward that `gleanrl.rewards.adapter.load_reward` accepts; None = the reward that the settings name.
        settings: limits and all other settings; None = the defaults.
        journal: path of a file that stores finished scores, so that they survive a crash; None = no file.
        overrides: values that replace single settings, by the name of the setting.

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
                settings = RewardSettings(**{**dict(settings), **overrides})
            except ValidationError as error:
                first = error.errors()[0]
                raise UserError(f"RewardAgent: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        self.settings = settings
        name = settings.name if reward is None else reward
        # The options in the settings of a run are those with which its scorer was made before.
        options = overrides.get("options") if isinstance(reward, Scorer) else settings.options
        self._scorer: Scorer = load_reward(name, options=options, settings=settings)
        self._max_concurrency = {"train": settings.max_concurrency, "eval": settings.eval_concurrency}
        lanes = {}
        for lane, share in (("train", 1.0 - settings.eval_share), ("eval", settings.eval_share)):
            limit = self._max_concurrency[lane]
            lanes[lane] = (min(limit, self._scorer.lane_slots or limit), share)
        own_rates = self._scorer.own_rates
        self._limiter = RateLimiter(
            lanes,
            slots=self._scorer.slots,
            requests_per_minute=None if own_rates else settings.requests_per_minute,
            tokens_per_minute=None if own_rates else settings.tokens_per_minute,
        )
        self._tokens = TokenEstimate(self._limiter, self._scorer.max_tokens)
        # Slots for post-processing, so that it uses as many threads as the calls of a lane do.
        self._finishing = RateLimiter({"train": (self._scorer.lane_slots or sys.maxsize, 1.0)})
        self._retry_policy = RetryPolicy(
            settings.attempts, settings.backoff_s, settings.max_backoff_s, settings.down_after_s
        )
        self._timeout_s = None if self._scorer.own_timeout else settings.timeout_s
        self._statistics = Statistics()
        self._budget = ErrorBudget(settings.max_failed_fraction, settings.failed_window, settings.down_after_s)
        self._recent_times = RecentQuantile(1.0 - settings.hedge_share) if settings.hedge_share else None
        self._warned = False  # whether the long wait for a worker was logged
        self._wait_logged_until = float("-inf")  # event loop time until which no further long wait is logged
        self._journal_path = Path(journal) if journal is not None else None
        self._journal: Journal | None = None
        self._cache: OrderedDict[str, Score] = OrderedDict()
        self._jobs: set[_Job] = set()
        self._jobs_by_key: dict[str, _Job] = {}
        self._tasks: set[asyncio.Task[Any]] = set()  # running tasks, including those of cancelled jobs
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
        """Cancel the requests in flight and release all resources. Callers that still wait get `UserError`."""
        self._stop("the reward agent was closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._scorer.aclose()
        finally:
            if self._journal is not None:
                journal, self._journal = self._journal, None
                await journal.aclose()

    # --- scoring ----------------------------------------------------------------------------------
    async def score(self, task: Task, trajectory: Answer) -> Score:
        """Return the score of a trajectory, of a response (a text) or of the messages of a conversation.

        The request uses the lane for training. If it fails, the returned score is invalid and its explanation is the
        reason.

        Raises:
            UserError: the service is down, the configuration is wrong, or the agent is not open.
        """
        return await self._submit(Request.of(task, trajectory), "train")

    async def score_again(self, task: Task, trajectory: Answer) -> Score:
        """Compute a new score as `score` does, without reading or writing the cache and the journal."""
        return await self._submit(replace(Request.of(task, trajectory), nonce=uuid.uuid4().hex), "train")

    async def finish(self, task: Task, scores: Sequence[Score]) -> list[Score]:
        """Return the scores of a complete group after the reward's post-processing.

        A reward that looks at the whole group (`Scorer.scores_groups`) is called here. If the post-processing fails,
        all scores of the group become invalid.
        """
        if self._scorer.scores_groups:
            scores = await self._score_group(task, scores)
        if not self._scorer.post_processes:
            return list(scores)
        lane = await self._finishing.acquire(Permit("train"))
        try:
            async with time_limit(self._timeout_s):
                return list(await self._scorer.finish(task, scores))
        except UserError as error:
            self._stop(str(error))
            raise
        except Exception as error:
            reason = f"post-processing the group: {reason_of(error)}"
            return [self._fail("finish", reason) if score.valid else score for score in scores]
        finally:
            self._finishing.release(lane)

    async def _score_group(self, task: Task, scores: Sequence[Score]) -> list[Score]:
        """Score all members whose score is a `DeferredScore` with one request, and return all scores in order."""
        scores = list(scores)
        deferred = {index: score for index, score in enumerate(scores) if isinstance(score, DeferredScore)}
        requests = [score.request for score in deferred.values() if score.request is not None]
        if not requests:
            return scores
        messages = tuple(message for request in requests for message in request.messages)
        whole = Request(task, messages, group=tuple(requests))
        outcome = await self._submit(whole, next(iter(deferred.values())).lane)
        lines = (outcome.explanation or "").splitlines()
        for member, index in enumerate(deferred):
            value, own = outcome.parts.get(str(member)), f"{member}/"
            said = "\n".join(line.partition(": ")[2] for line in lines if line.startswith(f"{member}: ")) or None
            if not outcome.valid:
                scores[index] = outcome
            elif value is None:
                scores[index] = replace(Score.failed("the reward does not apply"), applicable=False)
            elif math.isfinite(value):
                parts = {name.removeprefix(own): part for name, part in outcome.parts.items() if name.startswith(own)}
                scores[index] = Score(value, parts=parts, explanation=said)
            else:
                reason = said or f"the reward is {value}, not a finite number"
                scores[index] = self._fail("not_a_number", reason)
        return scores

    def lane(self, name: LaneName) -> RewardLane:
        """Return the lane ``name`` (see `RewardLane`). All lanes share the reward, cache, journal and rate limits."""
        return RewardLane(self, name)

    async def score_groups(
        self, groups: Iterable[Sequence[Item]] | AsyncIterable[Sequence[Item]], *, lane: LaneName = "train"
    ) -> AsyncIterator[tuple[int, list[Score]]]:
        """Yield ``(index, scores)`` of each group as soon as all its scores are computed and post-processed.

        A group is a sequence of pairs of a task and an answer. The answer is a response, the messages of a
        conversation, or a `Trajectory`. ``index`` is the position of the group in ``groups``.

        ``groups`` may be endless: the next group is taken from it only while the unfinished groups have fewer members
        than twice the ``max_concurrency`` of the lane. The first error that ``groups`` or the scoring of a group raises
        ends the iteration and cancels all other requests of this call.
        """
        loop = asyncio.get_running_loop()
        # Twice the number of requests in flight, so that no slot is idle while the next group is taken.
        room = 2 * self._max_concurrency[lane]
        results: asyncio.Queue[tuple[int, list[Score]] | Exception | None] = asyncio.Queue()  # None = no more groups
        sizes: dict[int, int] = {}  # number of members of each group that is taken but not yet yielded, by index
        members = 0  # sum of ``sizes``
        delivered = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        async def score_group(index: int, group: Sequence[Item]) -> None:
            try:
                identity = {GROUP_UID: uuid.uuid4().hex, GROUP_SIZE: len(group)}
                requests = [Request.of(task, answer) for task, answer in group]
                requests = [replace(request, info={**request.info, **identity}) for request in requests]
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
            except asyncio.CancelledError:
                if taking.cancelling():
                    raise
                results.put_nowait(RuntimeError("the source of the groups cancelled itself"))
            except Exception as error:
                results.put_nowait(error)

        taking = loop.create_task(take_groups())
        complete = False  # whether the last group was taken
        try:
            while sizes or not complete:
                result = await results.get()
                if isinstance(result, Exception):
                    raise result
                if result is None:
                    complete = True
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
        """Return the metrics of the time since the last call. docs/howto/rewards.md lists their names."""
        statistics, self._statistics = self._statistics, Statistics()
        return statistics.metrics(self._limiter.queued, self._limiter.in_flight)

    # --- one request ------------------------------------------------------------------------------
    def _submit(self, request: Request, lane: LaneName) -> asyncio.Future[Score]:
        """Return a future of the score.

        The score comes from the cache, from an identical request in flight, or from a new job. A job is cancelled when
        all futures that wait for it are cancelled. A request that the scorer divides (`Scorer.split`) is submitted in
        parts.
        """
        if self._stopped is not None:
            raise UserError(self._stopped)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Score] = loop.create_future()
        if self._scorer.scores_groups and GROUP_UID in request.info and not request.part:
            reason = "it is scored when its group is complete"
            waiter.set_result(DeferredScore(math.nan, False, explanation=reason, request=request, lane=lane))
            return waiter
        if pieces := self._scorer.split(request):
            combining = loop.create_task(self._combine(request, pieces, lane))
            self._tasks.add(combining)
            combining.add_done_callback(self._tasks.discard)
            return combining
        key: str | None = None
        if not request.nonce and (self.settings.cache or self._journal is not None):
            try:
                key = request.key(self._scorer.version)
            except (TypeError, ValueError, RecursionError) as error:  # the last two: it contains itself
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

    async def _combine(self, request: Request, pieces: Sequence[Request], lane: LaneName) -> Score:
        """Make the requests into which ``request`` is divided concurrently, and return the score of the whole."""
        scores = await asyncio.gather(*(self._submit(piece, lane) for piece in pieces))
        try:
            return self._scorer.combine(request, scores)
        except UserError:
            raise
        except Exception as error:
            return self._fail(cause_of(error), reason_of(error))

    async def _run(self, job: _Job) -> None:
        """Score the job's request, with retries, and pass the score or the error to all callers that wait for it."""
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
                self._statistics.counts["scored"] += 1
                self._statistics.total.add(loop.time() - started)
                budget.ended(not score.valid and score.applicable, score.explanation or "no reason given")
                if not score.valid:
                    self._statistics.failed["invalid" if score.applicable else "not_applicable"] += 1
                elif journal is not None and key is not None and _is_final(job.request, score):
                    await journal.put(key, score)
            if key is not None and self.settings.cache and _is_final(job.request, score):
                self._cache[key] = score
                if len(self._cache) > self.settings.cache:
                    self._cache.popitem(last=False)
            outcome = score
        except UserError as error:
            outcome = error
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                if job not in self._jobs:  # `_leave` or `_stop` has cancelled the task
                    raise
                error = Fatal("the reward cancelled itself", cause="cancelled")
            applicable, reason = not isinstance(error, NotApplicable), reason_of(error)
            try:
                budget.ended(applicable, reason)
                outcome = replace(self._fail(cause_of(error), reason), applicable=applicable)
            except UserError as down:
                outcome = down
        finally:
            # The task's context refers to the job (`CURRENT_PERMIT`). Without this line, job and task would form a
            # reference cycle, which only the garbage collector could free.
            job.task = None
        self._forget(job)
        job.settle(outcome)
        if isinstance(outcome, UserError):
            self._stop(str(outcome))

    async def _attempt(self, job: _Job, sent: asyncio.Future[float] | None = None) -> Score:
        """Wait for a slot and for the rate limits, then call the scorer once with the time limit.

        ``sent``: a future whose result becomes the event loop time at which the call of the scorer begins.
        """
        loop, limiter = asyncio.get_running_loop(), self._limiter
        tokens = self._tokens.of_call(job.request.messages)
        queued = loop.time()
        lane = await limiter.acquire(job, tokens)
        if self._scorer.lane_slots == lane.slots and not self._warned and loop.time() - queued > LONG_QUEUE_S:
            self._warned = True
            log.warning(
                "requests wait for %.0f s, because the reward is not async and %d of its calls run at once; write it "
                "as an async function, or raise reward.workers",
                *(loop.time() - queued, lane.slots),
            )
        cost: Mapping[str, float] = {}
        scored = False
        try:
            statistics = self._statistics
            statistics.most_queued = max(statistics.most_queued, limiter.queued)
            statistics.most_in_flight = max(statistics.most_in_flight, limiter.in_flight)
            started = loop.time()
            if sent is not None and not sent.done():
                sent.set_result(started)
            async with time_limit(self._timeout_s):
                score = await self._scorer(job.request)
            cost, scored = score.parts, True
        except (Retryable, Fatal) as error:
            cost = error.cost
            raise
        finally:
            self._statistics.add_cost(cost)
            if tokens is not None:
                tokens.correct(cost, scored=scored)
            limiter.release(lane)
        self._budget.succeeded(started)
        self._statistics.answer.add(loop.time() - started)
        return score

    async def _hedge(self, job: _Job) -> Score:
        """Make an attempt, and start a second one if the first takes longer than most recent attempts (hedging).

        "Longer than most" means longer than the quantile ``1 - hedge_share`` of recent durations. The first score is
        returned and the other attempt is cancelled. If both attempts fail, the error of the one that failed last is
        raised.
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
        """Count a failed attempt and return the number of seconds to wait before the next one.

        Must be called inside the ``except`` block of the attempt.

        Raises:
            Exception: ``error`` itself, if no further attempt is allowed.
            UserError: the service counts as down.
        """
        if isinstance(error, UserError | NotApplicable):
            raise error
        counts, now = self._statistics.counts, asyncio.get_running_loop().time()
        if cause_of(error) in NOT_DELIVERED:
            counts["unreachable"] += 1
        if job.refused_at is None and cause_of(error) in REFUSED:
            job.refused_at = now
        self._budget.attempt_failed(job.number, error, now)
        outage = self._budget.outage.explains(error, job.refused_at)
        try:
            seconds = retries.next_wait(error, outage=outage)
        except Exception as raised:
            if outage and raised is error and is_retryable(error) and cause_of(error) in REFUSED:
                self._budget.outage.given_up()
            raise
        asked_s = wait_asked_for(error)
        counts["retries"] += 1
        if cause_of(error) == "timeout":
            counts["timeouts"] += 1
        if asked_s >= _LONG_WAIT_S and now >= self._wait_logged_until:
            self._wait_logged_until = now + asked_s
            log.warning("the reward service asks to be left alone for %.0f s; the requests wait: %s", asked_s, error)
        return seconds

    def _fail(self, cause: str, reason: str) -> Score:
        """Count a failed request under its cause, and return an invalid score with the reason."""
        self._statistics.failed[cause] += 1
        if cause == "timeout":
            self._statistics.counts["timeouts"] += 1
        return Score.failed(reason)

    def _leave(self, job: _Job, waiter: asyncio.Future[Score]) -> None:
        """Remove ``waiter`` from the job. If ``waiter`` was cancelled and no other caller waits, cancel the job."""
        job.waiters.discard(waiter)
        if waiter.cancelled() and not job.waiters and job in self._jobs and job.task is not None:
            self._forget(job)
            job.task.cancel()

    def _forget(self, job: _Job) -> None:
        self._jobs.discard(job)
        if job.key is not None and self._jobs_by_key.get(job.key) is job:
            del self._jobs_by_key[job.key]

    def _stop(self, why: str) -> None:
        """Reject all further requests, and raise `UserError` with the message ``why`` in all callers that wait."""
        self._stopped = self._stopped or why
        jobs, self._jobs = self._jobs, set()
        self._jobs_by_key.clear()
        for job in jobs:
            job.settle(UserError(self._stopped))
            if job.task is not None:
                job.task.cancel()


def _is_final(request: Request, score: Score) -> bool:
    """Return whether a score may be stored: another attempt could not give a score that is missing from it."""
    return score.valid and not (request.group and any(math.isnan(part) for part in score.parts.values()))
