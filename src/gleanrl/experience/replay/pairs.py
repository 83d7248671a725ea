"""Pairs of a failure and a success of the same task, on which the extra updates of ``replay.pool_pairs`` train.

The members of a pair have the same actions up to some turn, and only the tokens from the first turn that differs on are
trained. With p the task's solve rate in the pool, u the ratio of a token's probability to the recorded one, l its
current and b its recorded log-prob, the loss of a token is

* ``-(1 - p) min(u, 1 + loss.replay_clip_high)`` in the success, as in other extra updates, and
* ``p w log pi`` in the failure, where w = min(1, exp(mean(l - b))), without gradient, and the mean is over the trained
  tokens of the failure. A failure that the policy has left already thus weighs less.

Sources: TOPR (arXiv 2503.14286) for the loss of failures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gleanrl.algorithms.batch import Batch, Sample, build_samples, weighted_batch
from gleanrl.config.settings import LossSettings, ReplaySettings
from gleanrl.experience.pool.pool import ExperiencePool, Stored, StoredFailure
from gleanrl.experience.replay.recall import Recall
from gleanrl.types import TURN_ORDER, Group, GroupSpec, Task, Trajectory

if TYPE_CHECKING:
    from gleanrl.learners.engine import TokenScores

_ROUNDS = 4  # tasks are drawn up to this often, to replace drawn tasks that give no pair
PERCENTILES = (0.2, 0.8)
"""Failures are paired only if their mean recorded log-prob lies between these quantiles of the pool's failures."""


class Pair(NamedTuple):
    """A failure and the success of its task that shares the longest prefix of actions with it."""

    task: Task
    success: Stored
    failure: StoredFailure
    shared: int  # number of sampled turns before the first one that differs
    rate: float  # solve rate of the task


def _in_time(trajectory: Trajectory) -> list[int]:
    """Return the indices of the sampled turns, as `Trajectory.sampled_turns` numbers them, in the order of time."""
    count = sum(1 for _ in trajectory.sampled_turns())
    places = trajectory.info.get(TURN_ORDER, range(count))
    return sorted(range(count), key=lambda index: places[index])


def shared_turns(one: Trajectory, other: Trajectory) -> int | None:
    """Return how many sampled turns, in the order of time, have the same token ids before the first one that differs.

    Returns None if there is no such turn, because one trajectory's actions are the beginning of the other's.
    """
    turns = [[own[index] for index in _in_time(each)] for each in (one, other) for own in [list(each.sampled_turns())]]
    for number, (left, right) in enumerate(zip(*turns, strict=False)):
        if not np.array_equal(left.tokens, right.tokens):
            return number
    return None


def choose_pairs(
    pool: ExperiencePool,
    recall: Recall,
    settings: ReplaySettings,
    random: np.random.Generator,
    *,
    step: int,
) -> tuple[list[Pair], Counter[str]]:
    """Return up to ``pool_pairs`` pairs of different tasks, for an update of ``step``.

    Also returns why other drawn tasks gave no pair: texts for the log, with the number of tasks of each.

    ``recall`` draws the tasks. Of a task, one failure is drawn from those within `PERCENTILES`. Of the successes that
    share equally many turns with it, the newest is taken. Trajectories older than ``max_age``, and those from a source
    that ``source_limits`` limits, are left out.
    """

    def usable(stored: Stored | StoredFailure) -> bool:
        young = settings.max_age is None or step - stored.version <= settings.max_age
        return young and settings.source_limits.get(stored.source, 1.0) >= 1.0

    lowest, highest = pool.failure_entropies(*PERCENTILES)
    taken: set[str] = set()
    pairs: list[Pair] = []
    reasons: Counter[str] = Counter()
    for _ in range(_ROUNDS):
        drawn = recall.draw_tasks(settings.pool_pairs - len(pairs), random, taken)
        names = [task.id for task in drawn]
        failures, successes, rates = pool.failures(names), pool.stored(names), pool.rates(names)
        for task in drawn:
            lost, won = list(filter(usable, failures[task.id])), list(filter(usable, successes[task.id]))
            within = [failure for failure in lost if lowest <= failure.entropy <= highest]
            best: Pair | None = None
            if within:
                failure = within[int(random.integers(len(within)))]
                for success in won:
                    shared = shared_turns(success.trajectory, failure.trajectory)
                    if shared is not None and (best is None or shared >= best.shared):
                        best = Pair(task, success, failure, shared, rates.get(task.id, 0.0))
            if best is not None:
                pairs.append(best)
            elif not failures[task.id]:
                reasons["have no stored failure (the run stores its own as it goes on)"] += 1
            elif not lost or not won:
                reasons["have only trajectories that replay.source_limits or replay.max_age leaves out of pairs"] += 1
            elif not within:
                reasons["have only failures of too high or too low log-prob (raise replay.keep_failures)"] += 1
            else:
                reasons["have no success whose actions depart from the failure's (others may be stored later)"] += 1
        if not drawn or len(pairs) >= settings.pool_pairs:
            break
    return pairs, reasons


def after(trajectory: Trajectory, turns: int) -> Trajectory:
    """Return a copy whose first ``turns`` sampled turns are context, which is not trained."""
    context, number, segments = set(_in_time(trajectory)[:turns]), 0, []
    for segment in trajectory.segments:
        kept = []
        for turn in segment:
            if turn.sampled:
                if number in context:
                    turn = replace(turn, logprobs=None, version=-1, reward=None, state=None)
                number += 1
            kept.append(turn)
        segments.append(tuple(kept))
    return replace(trajectory, segments=tuple(segments))


class PairBatch(NamedTuple):
    """A batch of pairs. The groups of ``batch`` are the success and the failure of each pair, in turn."""

    batch: Batch
    pairs: list[Pair]
    weights: list[float]  # of each pair, w of the failure
    rejected: int  # number of pairs that ``max_ratio`` left out


async def build_pairs(
    score: Callable[[Sequence[Sample]], Awaitable[Sequence[TokenScores]]],
    pairs: Sequence[Pair],
    loss: LossSettings,
    max_context: int,
    max_ratio: float | None = None,
) -> PairBatch:
    """Compute the log-probs of ``pairs`` with ``score``, `ScoringLearner.logprobs`, and return their batch.

    The learner trains on the batch as on any other of replayed trajectories. A failure has the advantage ``-p w``, and
    its recorded log-probs are replaced by the current ones. The ratio is then 1, and the gradient of the replayed loss
    that of ``p w log pi``. So the weights must not change between this call and the update.

    A pair is left out if the geometric mean of u over the trained tokens of its success is outside
    [1 / ``max_ratio``, ``max_ratio``].
    """
    if not pairs:
        return PairBatch(Batch(()), [], [], 0)
    groups: list[Group] = []
    for pair in pairs:
        for stored in (pair.success, pair.failure):
            trajectory = after(stored.trajectory, pair.shared)
            groups.append(Group(GroupSpec(pair.task, 0, (trajectory,)), (trajectory,), -1))
    samples = build_samples(groups, max_context).samples
    scores = await score(samples)
    sums = np.zeros((len(groups), 2))  # of each group: sum of l - b, and number of trained tokens
    for sample, scored in zip(samples, scores, strict=True):
        drift = scored.logprobs[sample.mask].astype(np.float64) - sample.behaviour[sample.mask]
        sums[sample.group] += drift.sum(), sample.mask.sum()
    drifts = sums[:, 0] / np.maximum(sums[:, 1], 1)
    limit = math.inf if max_ratio is None else math.log(max_ratio)
    kept = [number for number in range(len(pairs)) if abs(drifts[2 * number]) <= limit]
    failure_weights = [math.exp(min(0.0, float(drifts[2 * number + 1]))) for number in kept]
    advantages: list[float] = []
    for number, weight in zip(kept, failure_weights, strict=True):
        advantages += (1 - pairs[number].rate, -pairs[number].rate * weight)
    chosen = [groups[2 * number + member] for number in kept for member in (0, 1)]
    current = {2 * number + 1: [] for number in kept}
    for sample, scored in zip(samples, scores, strict=True):
        if sample.group in current:
            current[sample.group].append(np.where(sample.mask, scored.logprobs, np.float32(0)))
    batch = weighted_batch(chosen, advantages, loss, max_context)
    parts = list(batch.parts)
    for place, number in enumerate(kept):
        part = parts[2 * place + 1]
        replaced = zip(part.samples, current[2 * number + 1], strict=True)
        parts[2 * place + 1] = replace(part, samples=tuple(replace(s, behaviour=b) for s, b in replaced))
    return PairBatch(Batch(tuple(parts)), [pairs[number] for number in kept], failure_weights, len(pairs) - len(kept))
