"""Chooses the replayed part of a batch: tasks from the pool, and the stored trajectories of each."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.replay import selection
from gleanrl.types import Score, Task, Trajectory

if TYPE_CHECKING:
    from gleanrl.experience.pool.pool import ExperiencePool, PoolTask, Stored

log = logging.getLogger(__name__)

EstimatePolicy = Callable[[Sequence[Trajectory]], Awaitable[Sequence[tuple[float, float]]]]
"""Of each trajectory under the current policy, in one forward pass: the mean entropy over its sampled tokens, and their
mean log-ratio, current minus recorded log-prob."""

Reverify = Callable[[Task, Trajectory], Awaitable[Score]]
"""Scores a stored trajectory again, as `Reward.score` does. Raises `Disagrees` where its episode goes otherwise now."""

_ROUNDS = 4  # of drawing again for tasks whose trajectories could not be read
_EQUAL_SCORES = 1e-6


class Disagrees(Exception):
    """Played again, an episode ends earlier or later than it did; the message completes "trajectory x ..."."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """A task from the pool and what is replayed of it, best first; nothing where the pool only chooses tasks."""

    task: Task
    stored: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    stored: Stored
    entropy: float
    log_ratio: float | None  # None = not known


class Recall:
    """Draws tasks and chooses trajectories, as `ReplaySettings` says.

    ``counts`` (missing, too_old, rejected, reverified, reverify_failed, estimate_failed) and ``seconds`` spent on
    choosing trajectories grow until someone resets them.

    What scores otherwise now is left out at once and evicted by `settle`: a checkpoint taken while `recall` waits must
    see the pool from which it drew.
    """

    def __init__(
        self,
        pool: ExperiencePool,
        settings: ReplaySettings,
        *,
        group: int,
        estimate: EstimatePolicy | None = None,
        reverify: Reverify | None = None,
    ) -> None:
        self._pool, self._settings, self._group = pool, settings, group
        self._estimate, self._reverify = estimate, reverify
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self._disproved: list[int] = []  # keys, not evicted yet

    async def recall(
        self, count: int, random: np.random.Generator, taken: set[str], *, step: int = 0
    ) -> list[Recalled]:
        """Up to ``count`` tasks that are not in ``taken``, to which theirs are added; fewer where the pool has no more.

        ``step``: the one that will learn from them, in which none may be older than ``max_age``. A task none of whose
        trajectories can be read, or is young enough, is replaced by another from the pool. One whose trajectories are
        all turned down for their ratio or score is left out.
        """
        if not self._settings.per_group:
            return [Recalled(task.task, ()) for task in self._draw(count, random, taken)]
        found = self._find(count, random, taken, step)
        started = perf_counter()
        candidates = await self._estimated([stored for _, stored in found])
        orders = [selection.ranked([c.entropy for c in own], self._settings.select, random) for own in candidates]
        chosen = await asyncio.gather(
            *(
                self._choose(task, [own[index] for index in order])
                for (task, _), own, order in zip(found, candidates, orders, strict=True)
            )
        )
        self.seconds += perf_counter() - started
        for (task, _), stored in zip(found, chosen, strict=True):
            if not stored:
                self._missed(task, "none of its trajectories fits now")
        return [Recalled(task, stored) for (task, _), stored in zip(found, chosen, strict=True) if stored]

    def _find(
        self, count: int, random: np.random.Generator, taken: set[str], step: int
    ) -> list[tuple[Task, Sequence[Stored]]]:
        limit = self._settings.max_age
        found: list[tuple[Task, Sequence[Stored]]] = []
        for _ in range(_ROUNDS):
            drawn = self._draw(count - len(found), random, taken)
            stored = self._pool.stored([task.task.id for task in drawn])
            for task in drawn:
                readable = stored.get(task.task.id, [])
                if own := [each for each in readable if limit is None or step - each.version <= limit]:
                    found.append((task.task, own))
                elif readable:
                    self.counts["too_old"] += 1
                else:
                    self._missed(task.task, "none of its trajectories can be read")
            if not drawn or len(found) == count:
                break
        return found

    def _draw(self, count: int, random: np.random.Generator, taken: set[str]) -> list[PoolTask]:
        sizes = dict(self._pool.buckets())
        drawn: list[PoolTask] = []
        while len(drawn) < count:
            wanted = selection.tasks_by_bucket(sizes, count - len(drawn), self._group, self._settings, random)
            if not wanted:
                break
            for bucket, number in wanted.items():
                tasks = self._pool.draw(bucket, number, random, exclude=taken)
                drawn += tasks
                taken.update(task.task.id for task in tasks)
                sizes[bucket] = sizes[bucket] - number if tasks else 0  # all the rest of it is taken
        return drawn

    async def _estimated(self, tasks: Sequence[Sequence[Stored]]) -> list[list[_Candidate]]:
        """All candidates, with what the current policy says of them where that can decide anything."""
        settings = self._settings
        by_entropy = settings.entropy_from == "current" and settings.select.endswith("entropy")
        asked = [
            stored
            for own in tasks
            for stored in own
            if settings.max_ratio is not None or (by_entropy and len(own) > settings.per_group)
        ]
        views = await self._views([stored.trajectory for stored in asked])
        seen = {stored.key: view for stored, view in zip(asked, views, strict=True)} if views else {}
        return [[_candidate(stored, seen.get(stored.key), current=by_entropy) for stored in own] for own in tasks]

    async def _views(self, trajectories: Sequence[Trajectory]) -> Sequence[tuple[float, float]] | None:
        """None where the policy could not be asked: what was recorded must do then."""
        if self._estimate is None or not trajectories:
            return None
        try:
            views = await self._estimate(trajectories)
            if len(views) != len(trajectories):
                raise ValueError(f"{len(views)} answers for {len(trajectories)} trajectories")
            if not all(math.isfinite(number) for view in views for number in view):
                raise ValueError("an entropy or ratio is not finite")
        except Exception as error:
            self.counts["estimate_failed"] += 1
            why = f"{type(error).__name__}: {error}"
            log.warning("replay: the current policy's view is not to be had (%s); what was recorded decides", why)
            return None
        return views

    def settle(self) -> None:
        """Evict what `recall` found to score otherwise than recorded."""
        if self._disproved:
            self._pool.evict(self._disproved, "reverify")
            self._disproved = []

    async def _choose(self, task: Task, candidates: Sequence[_Candidate]) -> tuple[Stored, ...]:
        chosen: list[Stored] = []
        fitting = (candidate.stored for candidate in candidates if self._fits(candidate))
        while wanted := list(islice(fitting, self._settings.per_group - len(chosen))):
            verdicts = await asyncio.gather(*(self._verified(task, stored) for stored in wanted))
            chosen += [stored for stored, holds in zip(wanted, verdicts, strict=True) if holds]
        return tuple(chosen)

    def _fits(self, candidate: _Candidate) -> bool:
        limit, log_ratio = self._settings.max_ratio, candidate.log_ratio
        if limit is None or log_ratio is None or selection.inside_band(log_ratio, limit):
            return True
        self.counts["rejected"] += 1
        return False

    async def _verified(self, task: Task, stored: Stored) -> bool:
        """Whether it scores as it did; where no score can be had it stays in the pool, and out of this batch."""
        if self._reverify is None:
            return True
        self.counts["reverified"] += 1
        trajectory = stored.trajectory
        try:
            score = await self._reverify(task, trajectory)
        except Disagrees as error:
            return self._disprove(stored, str(error))
        except Exception as error:
            score = Score.failed(f"{type(error).__name__}: {error}")
        if not score.valid:
            self.counts["reverify_failed"] += 1
            log.warning("replay: trajectory %s could not be scored again: %s", trajectory.id, score.explanation)
            return False
        if abs(score.value - trajectory.score.value) <= _EQUAL_SCORES:
            return True
        return self._disprove(stored, f"scores {score.value:g} now, not {trajectory.score.value:g} as recorded")

    def _disprove(self, stored: Stored, why: str) -> bool:
        log.warning("replay: trajectory %s %s; evicted", stored.trajectory.id, why)
        self._disproved.append(stored.key)
        return False

    def _missed(self, task: Task, why: str) -> None:
        self.counts["missing"] += 1
        log.warning("replay: task %s is not replayed in this batch: %s", task.id, why)


def _candidate(stored: Stored, view: tuple[float, float] | None, *, current: bool) -> _Candidate:
    if view is None:
        return _Candidate(stored, stored.entropy, None)
    return _Candidate(stored, view[0] if current else stored.entropy, view[1])
