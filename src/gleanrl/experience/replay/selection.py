"""Pure functions that choose which tasks and which trajectories are replayed.

Tasks are in buckets ``(successes, attempts)`` of their latest fresh group. Groups differ in size where a rollout failed
or where replayed members took a place, so buckets are first brought to the levels ``0 .. n`` of a full group of ``n``:
two buckets of one level are one bucket in ExGRPO's sense (arXiv 2510.02245), and inside it all tasks are alike.
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
    """The bucket's solve rate in successes of ``group``. Only never is level 0, and only always is ``group``."""
    successes, attempts = bucket
    if successes == 0:
        return 0
    if successes == attempts:
        return group
    return min(max(math.floor(group * successes / attempts + 0.5), 1), max(group - 1, 1))


def log_weights(sizes: Mapping[int, int], group: int, settings: ReplaySettings) -> Numbers:
    """float64, the log weight of each level in ``sizes`` (level -> tasks, none empty), in its order; -inf = never.

    ``gaussian`` weighs levels as ExGRPO does, ``uniform_buckets`` levels too; ``uniform`` and ``rescue`` weigh tasks,
    so that a level counts with its size.
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
    """How many of ``total`` fall to each class: multinomial by log weights, no class over its capacity.

    What a full class cannot take is drawn again over the others. int64, of sum ``total``, or less where the classes of
    finite weight cannot hold it.
    """
    room = np.where(np.isfinite(weights), np.asarray(capacities, np.int64), 0)
    counts = np.zeros(len(room), np.int64)
    while (left := total - int(counts.sum())) > 0 and (open_ := counts < room).any():
        chances = np.zeros(len(room))
        chances[open_] = np.exp(weights[open_] - weights[open_].max())  # the best is 1, however small all are
        counts = np.minimum(counts + random.multinomial(left, chances / chances.sum()), room)
    return counts


def tasks_by_bucket(
    buckets: Mapping[Bucket, int], total: int, group: int, settings: ReplaySettings, random: np.random.Generator
) -> dict[Bucket, int]:
    """How many of ``total`` tasks to draw from each bucket (bucket -> eligible tasks), by ``settings.tasks``.

    Buckets that give none are left out; all together give fewer than ``total`` where they hold no more.
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
    """Indices of a task's trajectories (given oldest first), best first; of equal entropies the newer first."""
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
    """``int(share)``, but 29 for the product 100 * 0.29, which binary fractions put just below."""
    return math.floor(share + 1e-9)
