"""The reward agent: the whole life of every reward request.

A request is looked up (in memory, in the journal), joins an identical one that is under way, or starts on its own: it
waits for a slot and for the rates, is asked with a clock running, tried again where that may help, and ends as a score
or as a failure with its reason. Requests know nothing of one another, so one that hangs or breaks costs only itself.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError

from gleanrl.config.settings import RewardSettings
from gleanrl.protocols import Metrics
from gleanrl.rewards import forms
from gleanrl.rewards.asking import Asker
from gleanrl.rewards.delivery import Item, What, in_completion_order, request_of
from gleanrl.rewards.errors import NotApplicable
from gleanrl.rewards.journal import Journal
from gleanrl.rewards.limits import Claim, Gate, set_claim
from gleanrl.rewards.request import Request
from gleanrl.rewards.statistics import ErrorBudget, Statistics
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import cause_of, reason_of


class _Flight(Claim):
    """A request under way, and all who wait for it."""

    __slots__ = ("key", "task", "waiters")

    def __init__(self, lane: str, key: str | None) -> None:
        super().__init__(lane)
        self.key = key
        self.waiters: set[asyncio.Future[Score]] = set()
        self.task: asyncio.Task[None] | None = None

    def settle(self, score: Score | None = None, error: Exception | None = None) -> None:
        for waiter in self.waiters:
            if waiter.done():  # cancelled just now
                continue
            if score is not None:
                waiter.set_result(score)
            elif error is not None:
                waiter.set_exception(error)


class RewardLane:
    """A `Reward` with slots of its own: training's or evaluation's."""

    def __init__(self, agent: RewardAgent, lane: str) -> None:
        self._agent, self._lane = agent, lane

    async def score(self, task: Task, trajectory: What) -> Score:
        return await self._agent._submit(self._lane, request_of((task, trajectory)))

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        return await self._agent._finish(task, scores)


class RewardAgent:
    """Scores trajectories by any reward, thousands at once; a `Reward` for training, `lane("eval")` for evaluation.

    Use it as ``async with RewardAgent(...) as agent``. `score` waits for as long as the limits ask, and never raises
    for a request that fails: its score is invalid and says why. It raises `UserError` for everybody once the service
    is plainly down (`RewardSettings.max_failed_fraction`, ``down_after_s``), or the reward says that the user made a
    mistake.

    Args:
        reward: what `gleanrl.rewards.forms.load` takes; None: what the settings name.
        settings: limits and all else; ``overrides`` are settings by name: ``RewardAgent(fn, max_concurrency=500)``.
        journal: a file in which finished rewards survive a crash; None: only memory.

    Raises:
        UserError: there is no such reward, or a setting has no meaning.
    """

    def __init__(
        self,
        reward: Any = None,
        settings: RewardSettings | None = None,
        *,
        journal: Path | str | None = None,
        **overrides: Any,
    ) -> None:
        settings = self.settings = _with_overrides(settings or RewardSettings(), overrides)
        self._scorer: Any = forms.of_settings(settings, reward)
        self._gate = Gate(
            {
                "train": (settings.max_concurrency, 1.0 - settings.eval_share),
                "eval": (settings.eval_concurrency, settings.eval_share),
            },
            slots=self._scorer.slots,
            requests_per_minute=settings.requests_per_minute,
            tokens_per_minute=settings.tokens_per_minute,
        )
        self._lanes = {name: RewardLane(self, name) for name in self._gate.lanes}
        self._statistics = Statistics()
        self._budget = ErrorBudget(settings.max_failed_fraction, settings.failed_window, settings.down_after_s)
        self._asker = Asker(self._scorer, settings, self._gate, self._statistics, self._budget)
        self._journal_path = Path(journal) if journal is not None else None
        self._journal: Journal | None = None
        self._cache: OrderedDict[str, Score] = OrderedDict()
        self._flights: dict[str, _Flight] = {}
        self._flying: set[_Flight] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # those of flights that were given up and still end included
        self._stopped: str | None = "the reward agent is not open: use `async with`"

    # --- the agent's own life ---------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        if self._journal_path is not None:
            self._journal = Journal(self._journal_path)
        self._scorer.use_journal(self._journal)
        self._stopped = None
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give up what is under way and let go of everything. Whoever still waits gets `UserError`."""
        self._stop("the reward agent was closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._gate.close()
        await self._scorer.aclose()
        if self._journal is not None:
            journal, self._journal = self._journal, None
            await journal.aclose()

    # --- scoring ----------------------------------------------------------------------------------
    async def score(self, task: Task, trajectory: What) -> Score:
        """The score in training of a trajectory, a response or the messages of a conversation; invalid, with the
        reason, where it could not be had."""
        return await self._lanes["train"].score(task, trajectory)

    async def score_anew(self, task: Task, what: What) -> Score:
        """The same, asked for whatever was scored before: neither cache nor journal answers or keeps it."""
        request = replace(request_of((task, what)), anew=uuid.uuid4().hex)
        return await self._submit("train", request)

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        """Post-process a complete group; as they are, where the reward has no post-processing."""
        return await self._finish(task, scores)

    def lane(self, name: Literal["train", "eval"]) -> RewardLane:
        """The same reward, cache, journal and rates, but slots of its own."""
        return self._lanes[name]

    def score_groups(
        self,
        groups: Iterable[Sequence[Item]] | AsyncIterable[Sequence[Item]],
        *,
        lane: Literal["train", "eval"] = "train",
    ) -> AsyncIterator[tuple[int, list[Score]]]:
        """``(index, scores)`` of each group, as soon as it is complete and post-processed, whichever comes first.

        A group holds ``(task, what)``: ``what`` is a response, the messages of a conversation, or a `Trajectory`.
        Groups are taken as there is room for them, so ``groups`` may be endless.
        """

        async def scored(group: Sequence[Item]) -> list[Score]:
            if not group:
                return []
            requests = [request_of(item) for item in group]
            scores = await asyncio.gather(*(self._submit(lane, request) for request in requests))
            return list(await self._finish(requests[0].task, scores))

        room = 2 * self._gate.lanes[lane].slots  # so that slots never wait for a group to be taken
        return in_completion_order(groups, scored, room)

    def metrics(self) -> Metrics:
        """What happened since the last call: docs/howto/rewards.md lists the names."""
        return self._statistics.drain(self._gate.queued, self._gate.in_flight)

    # --- one request ------------------------------------------------------------------------------
    def _submit(self, lane: str, request: Request) -> asyncio.Future[Score]:
        """Its score, some time; nobody but those who wait for the future keeps the request going."""
        if self._stopped is not None:
            raise UserError(self._stopped)
        waiter: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        key: str | None = None
        if not request.anew and (self.settings.cache or self._journal is not None):
            try:
                key = request.key(self._scorer.version)
            except TypeError as error:
                waiter.set_result(self._failed("payload", f"the payload of task {request.task.id!r}: {error}"))
                return waiter
        if key is not None and (hit := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            self._statistics.counts["cache_hits"] += 1
            waiter.set_result(hit)
            return waiter
        flight = self._flights.get(key) if key is not None and self.settings.cache else None
        if flight is None:
            flight = self._start(lane, request, key)
        else:
            flight.join(lane)
            self._statistics.counts["cache_hits"] += 1
        flight.waiters.add(waiter)
        waiter.add_done_callback(partial(self._left, flight))
        return waiter

    def _left(self, flight: _Flight, waiter: asyncio.Future[Score]) -> None:
        """One who waited has what it wanted, or gave up."""
        flight.waiters.discard(waiter)
        if waiter.cancelled() and not flight.waiters and flight in self._flying and flight.task is not None:
            self._forget(flight)  # nobody wants it any more
            flight.task.cancel()

    def _start(self, lane: str, request: Request, key: str | None) -> _Flight:
        flight = _Flight(lane, key)
        task = flight.task = asyncio.get_running_loop().create_task(self._fly(flight, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._flying.add(flight)
        if key is not None and self.settings.cache:
            self._flights[key] = flight
        return flight

    async def _fly(self, flight: _Flight, request: Request) -> None:
        if self._scorer.sets_limits:  # nobody else asks for it, and it costs
            set_claim(flight)
        try:
            score = await self._obtained(flight, request)
        except UserError as error:
            self._forget(flight)
            flight.settle(error=UserError(str(error)))
            self._stop(str(error))
        except Exception as error:
            self._forget(flight)
            flight.settle(error=error)
        else:
            self._forget(flight)
            flight.settle(score)
        finally:
            flight.task = None  # each would keep the other

    async def _obtained(self, flight: _Flight, request: Request) -> Score:
        """The score from the journal or the scorer; what is valid is kept before it is handed out."""
        journal, key = self._journal, flight.key
        if journal is not None and key is not None and (found := journal.get(key)) is not None:
            self._statistics.counts["journal_hits"] += 1
            self._keep(key, found)
            return found
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            score = await self._asker.ask(flight, request)
        except UserError:
            raise
        except NotApplicable as error:
            self._budget.ended(False)
            return replace(self._failed(error.cause, reason_of(error)), applicable=False)
        except Exception as error:
            self._budget.ended(True, reason_of(error))
            return self._failed(cause_of(error), reason_of(error))
        self._statistics.scored(loop.time() - started)
        self._budget.ended(not score.valid, score.explanation or "no reason given")
        if not score.valid:
            self._statistics.failed["invalid"] += 1
        elif key is not None:
            if journal is not None:
                await journal.put(key, score)
            self._keep(key, score)
        return score

    async def _finish(self, task: Task, scores: Sequence[Score]) -> list[Score]:
        if not self._scorer.finishes:
            return list(scores)
        try:
            async with asyncio.timeout(None if self._scorer.keeps_time else self.settings.timeout_s):
                return await self._scorer.finish(task, scores)
        except UserError as error:
            self._stop(str(error))
            raise
        except Exception as error:
            return [self._failed("finish", f"post-processing the group: {reason_of(error)}") for _ in scores]

    def _failed(self, cause: str, reason: str) -> Score:
        self._statistics.failed[cause] += 1
        if cause == "timeout":
            self._statistics.counts["timeouts"] += 1
        return Score.failed(reason)

    def _keep(self, key: str, score: Score) -> None:
        if not self.settings.cache:
            return
        self._cache[key] = score
        if len(self._cache) > self.settings.cache:
            self._cache.popitem(last=False)

    def _forget(self, flight: _Flight) -> None:
        self._flying.discard(flight)
        if flight.key is not None and self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def _stop(self, why: str) -> None:
        """Take nothing more, and tell all who wait."""
        self._stopped = self._stopped or why
        flights, self._flying = self._flying, set()
        self._flights.clear()
        for flight in flights:
            flight.settle(error=UserError(self._stopped))
            assert flight.task is not None
            flight.task.cancel()


def _with_overrides(settings: RewardSettings, overrides: dict[str, Any]) -> RewardSettings:
    try:
        return RewardSettings(**{**settings.model_dump(), **overrides}) if overrides else settings
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"RewardAgent: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
