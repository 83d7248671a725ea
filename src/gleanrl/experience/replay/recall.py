"""Draws the tasks of a batch that come from the pool, and chooses the stored trajectories of each that are replayed."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool.pool import ExperiencePool, Stored
from gleanrl.experience.pool.ranking import RANKINGS
from gleanrl.experience.replay import selection
from gleanrl.types import Score, Task, Trajectory

log = logging.getLogger(__name__)

EstimatePolicy = Callable[[Sequence[Trajectory]], Awaitable[Sequence[tuple[float, float]]]]
"""A function that evaluates trajectories under the current policy: the learner's weights at the time of the call.

It makes one forward pass over all trajectories. For each trajectory it returns the mean entropy and the mean log-ratio
(log-prob under the current policy minus recorded log-prob) of the sampled tokens.
"""

Reverify = Callable[[Task, Trajectory], Awaitable[Score]]
"""A function that computes a new score of a stored trajectory, as `Reward.score` does.

It raises `Disagrees` if the episode, played again, does not end as recorded.
"""

COUNTS = ("missing", "too_old", "rejected", "reverified", "reverify_failed", "estimate_failed")
"""Names of the events that `Recall.counts` counts. The metrics ``replay/NAME`` and ``replay_update/NAME`` report
them."""

ROUNDS = 4  # tasks are drawn up to this often, to replace drawn tasks that have no usable trajectory
_EQUAL_SCORES = 1e-6


def draw_from(
    pool: ExperiencePool,
    sizes: dict[selection.Bucket, int],
    count: int,
    group: int,
    settings: ReplaySettings,
    random: np.random.Generator,
    taken: set[str],
    without: Sequence[str] = (),
) -> list[Task]:
    """Draw up to ``count`` tasks that are not in ``taken`` from the buckets ``sizes``, and add them to ``taken``.

    ``sizes`` maps each bucket to its number of tasks, and is reduced by those that are drawn or cannot be. The other
    arguments are those of `selection.tasks_by_bucket` and `ExperiencePool.draw`.
    """
    drawn: list[Task] = []
    while len(drawn) < count:
        wanted = selection.tasks_by_bucket(sizes, count - len(drawn), group, settings, random)
        if not wanted:
            break
        for bucket, number in wanted.items():
            tasks = [found.task for found in pool.draw(bucket, number, random, taken, without)]
            drawn += tasks
            taken.update(task.id for task in tasks)
            # If nothing was drawn, ``taken`` contains all tasks of the bucket. Size 0 excludes it from now on.
            sizes[bucket] = sizes[bucket] - number if tasks else 0
    return drawn


class Disagrees(Exception):
    """Raised if a stored trajectory that is scored again gets another score, or ends at another turn, than recorded.

    The message continues a sentence of the log that begins with "trajectory ID".
    """


@dataclass(frozen=True, slots=True)
class Recalled:
    """A task from the pool and its trajectories to replay, best first.

    ``stored`` is empty if ``replay.per_group`` is 0. Then only the task is taken from the pool, and all members of its
    group are sampled.
    """

    task: Task
    stored: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    stored: Stored
    entropy: float  # by which candidates are ranked: recorded, or under the current policy (`EstimatePolicy`)
    log_ratio: float | None  # mean log-ratio as in `EstimatePolicy`; None = not computed


class Recall:
    """Draws tasks from the pool, and chooses the trajectories of each that are replayed, by the rules of ``settings``.

    ``group`` is the number of fresh members of a group. ``counts`` holds how often each event in `COUNTS` occurred, and
    ``seconds`` the time spent on choosing trajectories. Both grow until the caller resets them.

    If ``reverify`` is given, each chosen trajectory is scored again. A trajectory whose new score differs from the
    recorded one is not replayed, but `recall` does not evict it yet: `settle` does. A checkpoint may be saved while
    `recall` waits for scores, and a run that resumes from that checkpoint must draw from the same pool again.
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
        self._disproved: list[int] = []  # keys of trajectories that `settle` will evict

    async def recall(
        self, count: int, random: np.random.Generator, taken: set[str], *, step: int = 0
    ) -> list[Recalled]:
        """Draw up to ``count`` tasks that are not in ``taken`` from the pool, and return them with their trajectories.

        All tasks drawn are added to ``taken``, including those that are not returned.

        ``step`` is the number of the step that will learn from the trajectories, from which their ages are counted; a
        trajectory older than ``max_age`` versions at that step is not used. No source has more of the
        ``count * per_group`` trajectories than ``source_limits`` allows. If all trajectories of a task are unreadable,
        too old or beyond these limits, another task is drawn in its place. If all are rejected for their ratio or their
        new score, the task is left out without replacement.
        """
        settings = self._settings
        limits = settings.source_limits
        if not settings.per_group:
            never = [source for source, limit in limits.items() if limit == 0]
            return [Recalled(task, ()) for task in self.draw_tasks(count, random, taken, never)]
        left = selection.source_places(limits, count * settings.per_group, random)
        found: list[tuple[Task, Sequence[Stored]]] = []
        for _ in range(ROUNDS):
            used_up = [source for source, number in left.items() if number == 0]
            drawn = self.draw_tasks(count - len(found), random, taken, used_up)
            if limits:
                # Tasks are drawn bucket by bucket. In that order the first buckets would get all places of a source.
                drawn = [drawn[index] for index in random.permutation(len(drawn))]
            readable = self._pool.stored([task.id for task in drawn])
            for task in drawn:
                own = [s for s in readable[task.id] if settings.max_age is None or step - s.version <= settings.max_age]
                if own:
                    if allowed := selection.within_limits(own, left, settings.per_group):
                        found.append((task, allowed))
                elif readable[task.id]:
                    self.counts["too_old"] += 1
                else:
                    self._miss(task, "none of its trajectories can be read")
            if not drawn or len(found) == count:
                break

        started = perf_counter()
        candidates = await self._make_candidates([stored for _, stored in found])
        choices = []
        for (task, _), own in zip(found, candidates, strict=True):
            stored, entropies = [each.stored for each in own], [each.entropy for each in own]
            order = selection.ranked(stored, settings.select, random, step=step, entropies=entropies)
            choices.append(self._choose(task, [own[index] for index in order]))
        chosen = await asyncio.gather(*choices)
        self.seconds += perf_counter() - started
        recalled: list[Recalled] = []
        for (task, _), stored in zip(found, chosen, strict=True):
            if stored:
                recalled.append(Recalled(task, tuple(stored)))
            else:
                self._miss(task, "none of its trajectories fits now")
        return recalled

    def settle(self) -> None:
        """Evict the trajectories that `recall` has scored again with a result that differs from the recorded one."""
        if self._disproved:
            self._pool.evict(self._disproved, "reverify")
            self._disproved = []

    def draw_tasks(
        self, count: int, random: np.random.Generator, taken: set[str], without: Sequence[str] = ()
    ) -> list[Task]:
        """Draw up to ``count`` tasks that are not in ``taken``, as ``settings.tasks`` says, and add them to ``taken``.

        Only tasks with a trajectory from another source than those in ``without`` are drawn.
        """
        sizes = self._pool.buckets(without)
        return draw_from(self._pool, sizes, count, self._group, self._settings, random, taken, without)

    async def _make_candidates(self, tasks: Sequence[Sequence[Stored]]) -> list[list[_Candidate]]:
        """Return one list of candidates for each task, with the entropy and the log-ratio of each candidate.

        The forward pass that computes both under the current policy (`EstimatePolicy`) covers only the tasks for which
        its result can change which trajectories are chosen. If the pass fails, the failure is logged and counted, and
        the recorded entropies are used without ratios.
        """
        settings = self._settings
        by_entropy = settings.entropy_from == "current" and RANKINGS.get(settings.select).by_entropy
        asked: list[Stored] = []
        for own in tasks:
            if settings.max_ratio is not None or (by_entropy and len(own) > settings.per_group):
                asked += own
        views: dict[int, tuple[float, float]] = {}  # entropy and log-ratio by key of the trajectory
        if self._estimate is not None and asked:
            try:
                answers = await self._estimate([stored.trajectory for stored in asked])
                if len(answers) != len(asked):
                    raise ValueError(f"{len(answers)} answers for {len(asked)} trajectories")
                if not all(math.isfinite(number) for answer in answers for number in answer):
                    raise ValueError("an entropy or ratio is not finite")
                views = {stored.key: answer for stored, answer in zip(asked, answers, strict=True)}
            except Exception as error:
                self.counts["estimate_failed"] += 1
                log.warning(
                    "replay: the current policy could not compute log-probs of stored trajectories (%s); this batch "
                    "uses the recorded entropies and no limit of ratios. If this recurs, set replay.entropy_from = "
                    "'recorded' and leave out replay.max_ratio",
                    f"{type(error).__name__}: {error}",
                )
        candidates: list[list[_Candidate]] = []
        for own in tasks:
            candidates.append([])
            for stored in own:
                entropy, log_ratio = views.get(stored.key, (stored.entropy, None))
                candidates[-1].append(_Candidate(stored, entropy if by_entropy else stored.entropy, log_ratio))
        return candidates

    async def _choose(self, task: Task, candidates: Sequence[_Candidate]) -> list[Stored]:
        """Return the first ``per_group`` candidates whose ratio is within ``max_ratio`` and whose score is confirmed.

        ``candidates`` are ordered best first.
        """
        limit, remaining = self._settings.max_ratio, iter(candidates)
        chosen: list[Stored] = []
        while True:
            wanted: list[Stored] = []
            while len(chosen) + len(wanted) < self._settings.per_group:
                candidate = next(remaining, None)
                if candidate is None:
                    break
                # The geometric mean of the token ratios is exp(log_ratio); it must be within [1 / limit, limit].
                if limit is not None and candidate.log_ratio is not None and abs(candidate.log_ratio) > math.log(limit):
                    self.counts["rejected"] += 1
                else:
                    wanted.append(candidate.stored)
            if not wanted:
                return chosen
            confirmed = await asyncio.gather(*(self._confirm_score(task, stored) for stored in wanted))
            chosen += [stored for stored, same in zip(wanted, confirmed, strict=True) if same]

    async def _confirm_score(self, task: Task, stored: Stored) -> bool:
        """Return whether the trajectory still gets its recorded score. Always true if no trajectory is scored again.

        If the score differs, `settle` will evict the trajectory. If the trajectory cannot be scored, for example
        because the environment fails, it is not replayed in this batch but stays in the pool.
        """
        if self._reverify is None:
            return True
        self.counts["reverified"] += 1
        trajectory = stored.trajectory
        try:
            score = await self._reverify(task, trajectory)
            recorded = trajectory.score.value
            if score.valid and abs(score.value - recorded) > _EQUAL_SCORES:
                raise Disagrees(f"scores {score.value:g} now, not {recorded:g} as recorded")
        except Disagrees as error:
            log.warning("replay: trajectory %s %s; evicted", trajectory.id, error)
            self._disproved.append(stored.key)
            return False
        except Exception as error:
            score = Score.failed(f"{type(error).__name__}: {error}")
        if not score.valid:
            self.counts["reverify_failed"] += 1
            log.warning("replay: trajectory %s could not be scored again: %s", trajectory.id, score.explanation)
        return score.valid

    def _miss(self, task: Task, why: str) -> None:
        self.counts["missing"] += 1
        log.warning("replay: task %s is not replayed in this batch: %s", task.id, why)
