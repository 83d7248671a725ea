"""Boundary failures: extra updates on pairs of a stored failure and a success of the same task.

`atlas_arms.py` names `BoundaryPairs` by path. The members of a pair have the same actions up to some turn, and only the
tokens from the first turn that differs on are trained. With p the task's solve rate in the pool, u the ratio of a
token's probability to the recorded one, l its current and b its recorded log-prob, the loss of a token is

* ``-(1 - p) min(u, 1 + loss.replay_clip_high)`` in the success, as in other extra updates, and
* ``p w log pi`` in the failure, where w = min(1, exp(mean(l - b))), without gradient, and the mean is over the trained
  tokens of the failure. A failure that the policy has left already thus weighs less.

Sources: TOPR (arXiv 2503.14286) for the loss of failures.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from atlas_curricula import ChangedUpdates
from gleanrl.algorithms.batch import Batch, Sample, build_samples, weighted_batch
from gleanrl.config.settings import LossSettings
from gleanrl.experience.pool.pool import ExperiencePool, Stored, StoredFailure
from gleanrl.experience.replay.recall import Recall
from gleanrl.train import Run
from gleanrl.types import TURN_ORDER, Group, GroupSpec, Task, Trajectory

if TYPE_CHECKING:
    from gleanrl.learners.engine import TokenScores

PAIRS = 4  # most pairs of an update, each of another task
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


class BoundaryPairs(ChangedUpdates):
    """Makes the extra updates of replay on up to `PAIRS` pairs, in place of ``replay.pool_batch`` successes.

    Needs ``replay.keep_failures`` and ``loss.replay_mode = "clip"``.
    """

    def __init__(self, run: Run, *, seed: int) -> None:
        super().__init__(run, seed=seed)
        config = self.learner.config
        assert config.replay.keep_failures > 0
        assert config.loss.replay_mode == "clip"
        self._recall = Recall(
            self.inner.pool, config.replay.model_copy(update={"per_group": 1}), group=config.schedule.group
        )
        self.learner.build_update = self.build_update  # type: ignore[method-assign]

    async def build_update(self, random: np.random.Generator, step: int) -> tuple[Batch, list[int]]:
        pool, config = self.inner.pool, self.learner.config
        bounds = entropy_bounds(pool, list(self.names))
        drawn = choose_pairs(pool, self._recall, random, bounds)
        built = await build_pairs(self.learner.learner.logprobs, drawn, config.loss, self.learner.max_context)
        members = [stored for pair in built.pairs for stored in (pair.success, pair.failure)]
        pool.used([stored.key for stored in members])
        self.metrics = {"replay_update/pairs": float(len(built.pairs))}
        if built.pairs:
            self.metrics["replay_update/pairs/shared_turns"] = float(np.mean([pair.shared for pair in built.pairs]))
            self.metrics["replay_update/pairs/failure_weight"] = float(np.mean(built.weights))
        return built.batch, [max(step - stored.version, 0) for stored in members]


def entropy_bounds(pool: ExperiencePool, names: Sequence[str]) -> tuple[float, float]:
    """Return the `PERCENTILES` of `StoredFailure.entropy` over all failures of the tasks ``names``.

    The first is rounded down to the entropy of a failure, the second up. NaN if there are no failures.
    """
    found = sorted(failure.entropy for own in pool.failures(names).values() for failure in own)
    if not found:
        return math.nan, math.nan
    low, high = (share * (len(found) - 1) for share in PERCENTILES)
    return found[int(low)], found[math.ceil(high)]


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
    pool: ExperiencePool, recall: Recall, random: np.random.Generator, bounds: tuple[float, float]
) -> list[Pair]:
    """Return up to `PAIRS` pairs of different tasks, which ``recall`` draws.

    Of a task, one failure is drawn from those whose entropy is within ``bounds``. Of the successes that share equally
    many turns with it, the newest is taken.
    """
    taken: set[str] = set()
    pairs: list[Pair] = []
    for _ in range(_ROUNDS):
        drawn = recall.draw_tasks(PAIRS - len(pairs), random, taken)
        names = [task.id for task in drawn]
        failures, successes, rates = pool.failures(names), pool.stored(names), pool.rates(names)
        for task in drawn:
            within = [failure for failure in failures[task.id] if bounds[0] <= failure.entropy <= bounds[1]]
            best: Pair | None = None
            if within:
                failure = within[int(random.integers(len(within)))]
                for success in successes[task.id]:
                    shared = shared_turns(success.trajectory, failure.trajectory)
                    if shared is not None and (best is None or shared >= best.shared):
                        best = Pair(task, success, failure, shared, rates.get(task.id, 0.0))
            if best is not None:
                pairs.append(best)
        if not drawn or len(pairs) >= PAIRS:
            break
    return pairs


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
    pairs: Sequence[Pair]
    weights: list[float]  # of each pair, w of the failure


async def build_pairs(
    score: Callable[[Sequence[Sample]], Awaitable[Sequence[TokenScores]]],
    pairs: Sequence[Pair],
    loss: LossSettings,
    max_context: int,
) -> PairBatch:
    """Compute the log-probs of ``pairs`` with ``score``, `ScoringLearner.logprobs`, and return their batch.

    The learner trains on the batch as on any other of replayed trajectories. A failure has the advantage ``-p w``, and
    its recorded log-probs are replaced by the current ones. The ratio is then 1, and the gradient of the replayed loss
    that of ``p w log pi``. So the weights must not change between this call and the update.
    """
    if not pairs:
        return PairBatch(Batch(()), [], [])
    groups: list[Group] = []
    for pair in pairs:
        for stored in (pair.success, pair.failure):
            trajectory = after(stored.trajectory, pair.shared)
            groups.append(Group(GroupSpec(pair.task, 0, (trajectory,)), (trajectory,), -1))
    samples = build_samples(groups, max_context).samples
    scores = await score(samples)
    current: list[list[np.ndarray]] = [[] for _ in groups]  # log-probs of each sample, by group
    sums = np.zeros((len(groups), 2))  # of each group: sum of l - b, and number of trained tokens
    for sample, scored in zip(samples, scores, strict=True):
        drift = scored.logprobs[sample.mask].astype(np.float64) - sample.behaviour[sample.mask]
        sums[sample.group] += drift.sum(), sample.mask.sum()
        current[sample.group].append(np.where(sample.mask, scored.logprobs, np.float32(0)))
    drifts = sums[:, 0] / np.maximum(sums[:, 1], 1)
    weights = [math.exp(min(0.0, float(drift))) for drift in drifts[1::2]]
    advantages: list[float] = []
    for pair, weight in zip(pairs, weights, strict=True):
        advantages += (1 - pair.rate, -pair.rate * weight)
    parts = list(weighted_batch(groups, advantages, loss, max_context).parts)
    for place in range(1, len(parts), 2):
        replaced = zip(parts[place].samples, current[place], strict=True)
        parts[place] = replace(parts[place], samples=tuple(replace(s, behaviour=b) for s, b in replaced))
    return PairBatch(Batch(tuple(parts)), pairs, weights)
