"""Pure functions that choose which tasks and which trajectories are replayed.

Tasks are in buckets ``(successes, attempts)`` of their latest fresh group. Groups differ in size if rollouts failed or
replayed members took places, so buckets are first mapped to the levels ``0 .. n`` of a full group of ``n``. The buckets
of one level together are a bucket as in ExGRPO (arXiv 2510.02245), in which all tasks are equally likely.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gleanrl.config.settings import ReplaySettings

Bucket = tuple[int, int]
"""Successes and attempts of a task's latest fresh group."""

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def level(bucket: Bucket, group: int) -> int:
    """Return the bucket's solve rate, rounded to successes out of ``group``.

    Level 0 is only for tasks never solved, and level ``group`` only for tasks always solved.
    """
    successes, attempts = bucket
    if successes == 0:
        return 0
    if successes == attempts:
        return group
    return min(max(math.floor(group * successes / attempts + 0.5), 1), max(group - 1, 1))


def log_weights(sizes: Mapping[int, int], group: int, settings: ReplaySettings) -> Numbers:
    """Return float64, the log weight of each level in ``sizes`` (level -> tasks, none empty). -inf: never drawn.

    ``gaussian`` (as in ExGRPO) and ``uniform_buckets`` weigh levels whatever their size. ``uniform`` and ``rescue``
    weigh tasks, so that the weight of a level grows with its size.
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
            with np.errstate(divide="ignore"):  # a task that is always solved is never rescued
                return tasks + group * np.log1p(-rates)


def allocate(weights: Numbers, capacities: Sequence[int], total: int, random: np.random.Generator) -> Counts:
    """Divide ``total`` among classes at random: multinomial by log weights, no class beyond its capacity.

    The excess of a full class is drawn again among the others. Returns int64 counts. Their sum is ``total``, or less if
    the classes of finite weight have less capacity.
    """
    room = np.where(np.isfinite(weights), np.asarray(capacities, np.int64), 0)
    counts = np.zeros(len(room), np.int64)
    while (left := total - int(counts.sum())) > 0 and (open_ := counts < room).any():
        chances = np.zeros(len(room))
        chances[open_] = np.exp(weights[open_] - weights[open_].max())  # scaled so that the largest is 1
        counts = np.minimum(counts + random.multinomial(left, chances / chances.sum()), room)
    return counts


def tasks_by_bucket(
    buckets: Mapping[Bucket, int], total: int, group: int, settings: ReplaySettings, random: np.random.Generator
) -> dict[Bucket, int]:
    """Return how many of ``total`` tasks to draw from each of ``buckets`` (bucket -> eligible tasks).

    ``settings.tasks`` decides. Buckets from which no task is drawn are left out. The sum is less than ``total`` if the
    buckets hold fewer tasks.
    """
    levels: defaultdict[int, list[Bucket]] = defaultdict(list)
    for bucket in sorted(buckets):  # the result must not depend on the pool's order
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


def ranked(entropies: Sequence[float], select: str, random: np.random.Generator) -> list[int]:
    """Return the indices of a task's trajectories (given oldest first), best first. Of equals the newer is first."""
    ages = np.arange(len(entropies))[::-1]  # 0 = newest
    match select:
        case "lowest_entropy":
            order = np.lexsort((ages, np.asarray(entropies, np.float64)))
        case "highest_entropy":
            order = np.lexsort((ages, -np.asarray(entropies, np.float64)))
        case "newest":
            order = np.argsort(ages)
        case "random":
            order = random.permutation(len(entropies))
        case _:
            raise ValueError(f"there is no way {select!r} to select trajectories")
    return [int(index) for index in order]


def whole(share: float) -> int:
    """Return ``int(share)``, tolerant of rounding: 100 * 0.29 gives 29, although the product is just below 29."""
    return math.floor(share + 1e-9)
