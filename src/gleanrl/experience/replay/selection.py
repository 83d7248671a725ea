"""Pure functions that choose which tasks and which trajectories are replayed.

The pool puts each task into the bucket ``(successes, attempts)`` of its latest fresh group. The number of attempts
varies, because rollouts can fail and replayed members can take the place of fresh ones. Therefore each bucket is first
mapped to a level ``0 .. n``, the number of successes in a group of ``n`` with the same solve rate. All buckets of one
level together correspond to one bucket in ExGRPO (arXiv 2510.02245), and their tasks are equally likely to be drawn.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool.pool import Stored
from gleanrl.experience.pool.ranking import RANKINGS, TaskTrajectories

Bucket = tuple[int, int]
"""The pair (successes, attempts) of a task's latest fresh group."""

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def level(bucket: Bucket, group: int) -> int:
    """Return the level of a bucket: its solve rate times ``group``, rounded to an integer.

    Rounding never gives level 0 to a task with a success, nor level ``group`` to a task with a failure (``group`` > 1).
    """
    successes, attempts = bucket
    if successes == 0:
        return 0
    if successes == attempts:
        return group
    return min(max(math.floor(group * successes / attempts + 0.5), 1), max(group - 1, 1))


def log_weights(sizes: Mapping[int, int], group: int, settings: ReplaySettings) -> Numbers:
    """Return float64 [levels], the log of the weight with which ``settings.tasks`` draws each level in ``sizes``.

    ``sizes`` maps each level to its number of tasks, at least 1. A level with the log weight -inf is never drawn.

    With ``gaussian`` (as in ExGRPO), ``uniform_buckets`` and ``difficulty``, the weight of a level does not depend on
    how many tasks it has. ``uniform`` and ``rescue`` give each task a weight, and the weight of a level is the sum over
    its tasks.
    """
    levels = np.array(list(sizes), np.float64)
    tasks = np.log(np.array(list(sizes.values()), np.float64))
    rates = levels / group
    match settings.tasks:
        case "gaussian":
            return -((rates - 0.5) ** 2) / (2 * settings.sigma**2)
        case "uniform":
            return tasks
        case "uniform_buckets":
            return np.zeros_like(rates)
        case "difficulty":
            return np.where(levels == settings.difficulty, 0.0, -np.inf)
        case "rescue":
            with np.errstate(divide="ignore"):  # log1p(-1) = -inf is right: a task that is always solved is never drawn
                return tasks + group * np.log1p(-rates)


def allocate(weights: Numbers, capacities: Sequence[int], total: int, random: np.random.Generator) -> Counts:
    """Draw ``total`` items from classes at random, and return int64 [classes], how many are of each class.

    The counts are multinomial with probabilities proportional to ``exp(weights)``. If a class is drawn more often than
    its capacity allows, the excess is drawn again from the other classes. The counts sum to ``total``, or to the
    capacity of all classes with a finite weight if that is less.
    """
    room = np.where(np.isfinite(weights), np.asarray(capacities, np.int64), 0)
    counts = np.zeros(len(room), np.int64)
    while (left := total - int(counts.sum())) > 0 and (open_ := counts < room).any():
        chances = np.zeros(len(room))
        # Subtract the maximum, so that the largest chance is 1 and the sum cannot be 0 by underflow.
        chances[open_] = np.exp(weights[open_] - weights[open_].max())
        counts = np.minimum(counts + random.multinomial(left, chances / chances.sum()), room)
    return counts


def tasks_by_bucket(
    buckets: Mapping[Bucket, int], total: int, group: int, settings: ReplaySettings, random: np.random.Generator
) -> dict[Bucket, int]:
    """Return how many of ``total`` tasks to draw from each bucket. Buckets from which none is drawn are left out.

    ``buckets`` maps each bucket to its number of eligible tasks. The numbers for the levels follow ``settings.tasks``;
    within a level, all tasks are equally likely, whatever their bucket. The returned numbers sum to less than ``total``
    if too few tasks can be drawn.
    """
    levels: defaultdict[int, list[Bucket]] = defaultdict(list)
    for bucket in sorted(buckets):  # sorted, so that the result does not depend on the order of the dictionary
        if buckets[bucket] > 0:
            levels[level(bucket, group)].append(bucket)
    if not levels:
        return {}
    sizes = {at: sum(buckets[bucket] for bucket in members) for at, members in levels.items()}
    counts = allocate(log_weights(sizes, group, settings), list(sizes.values()), total, random)
    drawn: dict[Bucket, int] = {}
    for members, count in zip(levels.values(), counts, strict=True):
        parts = random.multivariate_hypergeometric([buckets[b] for b in members], int(count), method="marginals")
        drawn |= {bucket: int(part) for bucket, part in zip(members, parts, strict=True) if part}
    return drawn


def source_places(limits: Mapping[str, float], places: int, random: np.random.Generator) -> dict[str, int]:
    """Return how many of ``places`` replayed trajectories may come from each source in ``limits``.

    The number is ``limit * places``, rounded up or down at random such that its mean is exact. So a source with a low
    limit is used now and then also in small batches. Nothing is drawn from ``random`` if ``limits`` is empty.
    """
    numbers: dict[str, int] = {}
    for source, limit in limits.items():
        low = whole(limit * places)
        numbers[source] = low + int(random.random() < limit * places - low)
    return numbers


def within_limits(stored: Sequence[Stored], left: dict[str, int], per_group: int) -> list[Stored]:
    """Return those of a task's trajectories whose sources have places left, and take these places from ``left``.

    ``left`` maps each limited source to its number of places; other sources are not limited. A source gives as many
    places to the task as the task could use, which is ``per_group`` or the number of its trajectories from that source.
    If it has fewer left, none of its trajectories is returned.
    """
    taken: dict[str, bool] = {}
    for source, number in Counter(each.source for each in stored).items():
        needed = min(number, per_group)
        taken[source] = source not in left or needed <= left[source]
        if source in left and taken[source]:
            left[source] -= needed
    return [each for each in stored if taken[each.source]]


def ranked(
    stored: Sequence[Stored],
    select: str,
    random: np.random.Generator,
    *,
    step: int,
    entropies: Sequence[float] | None = None,
) -> list[int]:
    """Rank a task's trajectories as ``select`` (`ReplaySettings.select`) says, and return their indices, best first.

    Args:
        stored: the trajectories, oldest first.
        step: number of the step that will learn from them, from which their ages are counted.
        entropies: their mean entropies; None = the recorded ones.
    """
    if entropies is None:
        entropies = [each.entropy for each in stored]
    trajectories = TaskTrajectories(
        entropy=np.asarray(entropies, np.float64),
        uses=np.array([each.uses for each in stored], np.int64),
        age=np.array([max(step - each.version, 0) for each in stored], np.int64),
        score=np.array([each.trajectory.score.value for each in stored], np.float64),
        length=np.array([each.trajectory.sampled_tokens for each in stored], np.int64),
    )
    return RANKINGS.get(select)(trajectories, random)


def whole(share: float) -> int:
    """Round down to an integer, but tolerate float rounding: 100 * 0.29 gives 29, although the product is below 29."""
    return math.floor(share + 1e-9)
