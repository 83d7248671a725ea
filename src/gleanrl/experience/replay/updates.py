"""Further optimizer updates on successes, after the update of each training step (``replay.pool_updates``).

`ReplayUpdateLearner` wraps the run's learner. It is what `gleanrl.train` sees as the learner of a run with replay, so
one call of its `update` may move the weights more often than once: by the groups of the step, then by successes from
the experience pool or from the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from gleanrl.algorithms.batch import Batch, Sample, build_samples, weighted_batch
from gleanrl.config.settings import Config
from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.replay.recall import EstimatePolicy, Recall, Reverify
from gleanrl.protocols import Learner, Metrics
from gleanrl.types import Group, GroupSpec, Task, Trajectory
from gleanrl.utils.seeding import derive

if TYPE_CHECKING:
    from gleanrl.learners.engine import TokenScores


class ScoringLearner(Protocol):
    """A learner that computes log-probs without training."""

    async def logprobs(self, samples: Sequence[Sample]) -> Sequence[TokenScores]:
        """Log-probs and entropies of the trained tokens of each sample, under the current weights."""
        ...


class UpdatableLearner(ScoringLearner, Learner, Protocol):
    """A learner that takes updates outside a step and can undo a step, as `gleanrl.learners.torch.TorchLearner`."""

    @property
    def step(self) -> int:
        """Steps whose groups are consumed."""
        ...

    async def replay_update(self, batch: Batch, step: int) -> Metrics: ...
    def undo_step(self) -> bool: ...


def make_policy_estimator(learner: ScoringLearner, max_context: int) -> EstimatePolicy:
    """A function that estimates trajectories under the learner's current weights, in one forward pass.

    For each trajectory it returns the mean entropy and the mean log-ratio (current - recorded) of the sampled tokens.
    """

    async def estimate(trajectories: Sequence[Trajectory]) -> list[tuple[float, float]]:
        by_task: dict[str, list[int]] = {}  # trajectories of one task share a prompt, which is then computed once
        for index, trajectory in enumerate(trajectories):
            by_task.setdefault(trajectory.task_id, []).append(index)
        order = [index for indices in by_task.values() for index in indices]
        groups = [
            replayed_group(Task(task), [trajectories[index] for index in indices]) for task, indices in by_task.items()
        ]
        built = build_samples(groups, max_context)
        scores = await learner.logprobs(built.samples)
        totals = np.zeros((len(trajectories), 3))
        for sample, score in zip(built.samples, scores, strict=True):
            mask = sample.mask
            drift = score.logprobs[mask] - sample.behaviour[mask]
            totals[order[sample.trajectory]] += (score.entropy[mask].sum(), drift.sum(), mask.sum())
        means = totals[:, :2] / np.maximum(totals[:, 2:], 1)
        return [(float(entropy), float(drift)) for entropy, drift in means]

    return estimate


def replayed_group(task: Task, trajectories: Sequence[Trajectory]) -> Group:
    """A group of replayed trajectories only."""
    return Group(GroupSpec(task, 0, tuple(trajectories)), tuple(trajectories), -1)


class _Success(NamedTuple):
    group: Group  # of one trajectory
    weight: float  # advantage of every token: 1 - solve rate of the task
    age: int | None  # in versions; None for a trajectory of this step


class ReplayUpdateLearner:
    """A `Learner` that makes ``replay.pool_updates`` further optimizer updates at the end of each step.

    Each takes ``replay.pool_batch`` successes, drawn from the pool as replay draws them (``replay.pool_from = "pool"``)
    or from the step's own groups (``"batch"``). Every token of a success has the advantage 1 - solve rate of its task.
    The updates begin with replay, when ``begun`` returns True. Everything else is passed on to ``learner``.
    """

    def __init__(
        self,
        learner: UpdatableLearner,
        pool: ExperiencePool,
        config: Config,
        *,
        seed: int,
        max_context: int,
        begun: Callable[[], bool],
        reverify: Reverify | None = None,
    ) -> None:
        self.learner, self._pool, self._config = learner, pool, config
        self._seed, self._max_context, self._begun = seed, max_context, begun
        self._recall = Recall(
            pool,
            config.replay.model_copy(update={"per_group": 1}),
            group=config.schedule.group,
            estimate=make_policy_estimator(learner, max_context),
            reverify=reverify,
        )
        self._groups: list[Group] = []  # of the current step
        self._consumed = 0

    def remember(self, groups: Sequence[Group]) -> None:
        """Note the groups that the next `update` learns from, as candidates for the updates after it."""
        self._groups += groups

    async def update(self, batch: Batch) -> Metrics:
        """The learner's own update; after the last groups of a step also the updates on successes."""
        metrics = dict(await self.learner.update(batch))
        self._consumed += batch.groups
        if self._consumed % self._config.schedule.batch:
            return metrics
        if self._begun():
            metrics |= await self._replay_updates(self.learner.step - 1)
        self._groups = []
        return metrics

    async def _replay_updates(self, step: int) -> dict[str, float]:
        """Make the updates on successes of a step; their metrics, ``replay_update/...``."""
        metrics: dict[str, float] = {}
        started, selecting_before, updating = perf_counter(), self._recall.seconds, 0.0
        for number in range(self._config.replay.pool_updates):
            random = np.random.default_rng(derive(self._seed, "practice", step, number))
            choose = self._from_pool if self._config.replay.pool_from == "pool" else self._from_step
            chosen = await choose(random, step)
            own: dict[str, float] = {}
            if chosen:
                groups, weights = [success.group for success in chosen], [success.weight for success in chosen]
                batch = weighted_batch(groups, weights, self._config.loss, self._max_context)
                update_started = perf_counter()
                reported = await self.learner.replay_update(batch, step)
                updating += perf_counter() - update_started
                own = {name: reported[name] for name in _REPORTED if name in reported}
            own["trajectories"] = float(len(chosen))
            ages = [success.age for success in chosen if success.age is not None]
            if ages:
                own |= {"age_mean": float(np.mean(ages)), "age_max": float(max(ages))}
            metrics |= {f"replay_update/{number}/{name}": value for name, value in own.items()}
        counts, selecting = self._recall.counts, self._recall.seconds - selecting_before
        metrics |= {f"replay_update/{name}": float(counts[name]) for name in _COUNTED}
        counts.clear()
        return metrics | {
            "time/replay_update_plan_s": perf_counter() - started - selecting - updating,
            "time/replay_update_select_s": selecting,
            "time/replay_update_update_s": updating,
        }

    async def _from_pool(self, random: np.random.Generator, step: int) -> list[_Success]:
        found = await self._recall.recall(self._config.replay.pool_batch, random, set(), step=step)
        self._recall.settle()
        self._pool.used([recalled.stored[0].key for recalled in found])
        rates = self._pool.rates([recalled.task.id for recalled in found])  # none for a task that was never tried
        chosen = []
        for recalled in found:
            stored = recalled.stored[0]
            group = replayed_group(recalled.task, [stored.trajectory])
            chosen.append(_Success(group, 1 - rates.get(recalled.task.id, 0.0), max(step - stored.version, 0)))
        return chosen

    async def _from_step(self, random: np.random.Generator, step: int) -> list[_Success]:
        """One success of each group of this step that is solved in part."""
        candidates: list[_Success] = []
        for group in self._groups:
            valid = group.valid_fresh
            successes = [t for t in valid if t.score.value >= self._config.replay.success_threshold]
            if successes and len(successes) < len(valid):
                pick = successes[int(random.integers(len(successes)))]
                weight = 1 - len(successes) / len(valid)
                candidates.append(_Success(replayed_group(group.spec.task, [pick]), weight, None))
        order = random.permutation(len(candidates))[: self._config.replay.pool_batch]
        return [candidates[index] for index in sorted(order.tolist())]

    def undo_step(self) -> bool:
        return self.learner.undo_step()

    def weights(self) -> Mapping[str, Any]:
        return self.learner.weights()

    def save(self, folder: Path) -> None:
        self.learner.save(folder)

    def load(self, folder: Path) -> None:
        self.learner.load(folder)

    def export(self, folder: Path) -> None:
        self.learner.export(folder)


_REPORTED = (
    "loss/policy",
    "learner/grad_norm",
    "loss/replayed/ratio/mean",
    "loss/replayed/clip_high",
    "tokens/trained",
)  # metrics of the learner
_COUNTED = ("missing", "too_old", "rejected", "reverified", "reverify_failed", "estimate_failed")  # counts of `Recall`
