"""Extra optimizer updates on successful trajectories at the end of each training step (``replay.pool_updates``).

`ReplayUpdateLearner` wraps the run's learner, and `gleanrl.train` uses it in place of that learner. One call of
`ReplayUpdateLearner.update` may update the weights several times: first on the groups of the step, then on successes
from the experience pool or from the step itself.
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
from gleanrl.experience.replay.recall import COUNTS, EstimatePolicy, Recall, Reverify
from gleanrl.protocols import Learner, Metrics
from gleanrl.types import Group, GroupSpec, Task, Trajectory
from gleanrl.utils.seeding import derive

if TYPE_CHECKING:
    from gleanrl.learners.engine import TokenScores

_REPORTED = (
    "loss/policy",
    "learner/grad_norm",
    "loss/replayed/ratio/mean",
    "loss/replayed/clip_high",
    "tokens/trained",
)
"""Names of the learner's metrics that are reported for each extra update."""


class ScoringLearner(Protocol):
    """A learner that can also compute log-probs without training."""

    async def logprobs(self, samples: Sequence[Sample]) -> Sequence[TokenScores]:
        """Return the log-probs and entropies of the trained tokens of each sample under the current weights."""
        ...


class UpdatableLearner(ScoringLearner, Learner, Protocol):
    """A learner that can make updates outside a step and undo a step, e.g. `gleanrl.learners.torch.TorchLearner`."""

    @property
    def step(self) -> int:
        """Number of steps of which the learner has consumed all groups."""
        ...

    # Makes one extra optimizer update after those of ``step``. Its groups do not count as consumed.
    async def replay_update(self, batch: Batch, step: int) -> Metrics: ...

    # Forgets the groups of an unfinished step, so that `save` writes the state at the start of the step. Returns False,
    # and forgets nothing, if the step has already updated the weights.
    def undo_step(self) -> bool: ...


def make_policy_estimator(learner: ScoringLearner, max_context: int) -> EstimatePolicy:
    """Return a function that computes, for each trajectory, the mean entropy and mean log-ratio of its sampled tokens.

    The function computes both under the weights that the learner has at the time of the call, in one forward pass over
    all trajectories. The log-ratio of a token is its log-prob under these weights minus the recorded one.
    """

    async def estimate(trajectories: Sequence[Trajectory]) -> list[tuple[float, float]]:
        # Group the trajectories by task. Those of one task share a prompt, which the learner then computes only once.
        by_task: dict[str, list[int]] = {}
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
    """Return a group of ``task`` whose members are all replayed."""
    return Group(GroupSpec(task, 0, tuple(trajectories)), tuple(trajectories), -1)


class ReplayedSuccess(NamedTuple):
    """A success on which an extra update trains."""

    group: Group  # group with the trajectory as its only member
    weight: float  # advantage of every sampled token: 1 - solve rate of the task
    age: int | None  # age in versions; None for a trajectory of the current step


class ReplayUpdateLearner:
    """Wraps a learner, and makes ``replay.pool_updates`` extra optimizer updates at the end of each step.

    Each extra update learns from up to ``replay.pool_batch`` successes. With ``replay.pool_from = "pool"`` they are
    drawn from the pool in the same way as `ReplayCurriculum` draws them, one per task. With ``"batch"`` they are chosen
    from the groups of the step. Every sampled token of a success has the advantage 1 - solve rate of its task.

    There are no extra updates before replay has begun, that is while ``begun()`` is false. All other methods call the
    same method of ``learner``.
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
        self.learner, self.pool, self.config, self.max_context, self.begun = learner, pool, config, max_context, begun
        self._seed = seed
        self._recall = Recall(
            pool,
            config.replay.model_copy(update={"per_group": 1}),
            group=config.schedule.group,
            estimate=make_policy_estimator(learner, max_context),
            reverify=reverify,
        )
        self._groups: list[Group] = []  # groups of the current step, for ``pool_from = "batch"``
        self._consumed = 0  # number of groups that `update` was called with so far

    def remember(self, groups: Sequence[Group]) -> None:
        """Store the groups from which the batch of the next `update` was built.

        Extra updates with ``replay.pool_from = "batch"`` choose their successes from these groups.
        """
        self._groups += groups

    async def update(self, batch: Batch) -> Metrics:
        """Update the wrapped learner on ``batch``. If the batch completes a step, make the extra updates too.

        Metrics of the extra updates are named ``replay_update/...`` and ``time/replay_update_...``.
        """
        metrics = dict(await self.learner.update(batch))
        self._consumed += batch.groups
        if self._consumed % self.config.schedule.batch:
            return metrics
        if not self.begun():
            self._groups = []
            return metrics
        step = self.learner.step - 1
        started, selecting_before, updating = perf_counter(), self._recall.seconds, 0.0
        for number in range(self.config.replay.pool_updates):
            # "practice" only distinguishes this random stream from others that the run derives from its seed.
            random = np.random.default_rng(derive(self._seed, "practice", step, number))
            prefix = f"replay_update/{number}"
            extra, ages = await self.build_update(random, step)
            if extra.groups:
                update_started = perf_counter()
                reported = await self.learner.replay_update(extra, step)
                updating += perf_counter() - update_started
                metrics |= {f"{prefix}/{name}": reported[name] for name in _REPORTED if name in reported}
            metrics[f"{prefix}/trajectories"] = float(extra.groups)
            if ages:
                metrics[f"{prefix}/age_mean"] = float(np.mean(ages))
                metrics[f"{prefix}/age_max"] = float(max(ages))
        for name in COUNTS:
            metrics[f"replay_update/{name}"] = float(self._recall.counts[name])
        self._recall.counts.clear()
        selecting = self._recall.seconds - selecting_before
        metrics["time/replay_update_plan_s"] = perf_counter() - started - selecting - updating
        metrics["time/replay_update_select_s"] = selecting
        metrics["time/replay_update_update_s"] = updating
        self._groups = []
        return metrics

    async def build_update(self, random: np.random.Generator, step: int) -> tuple[Batch, list[int]]:
        """Return the batch of an extra update after ``step``, and the ages of its stored trajectories in versions."""
        if self.config.replay.pool_from == "pool":
            chosen = await self.choose_from_pool(random, step)
        else:
            chosen = self.choose_from_step(random)
        batch = Batch(())
        if chosen:
            groups, weights = [success.group for success in chosen], [success.weight for success in chosen]
            batch = weighted_batch(groups, weights, self.config.loss, self.max_context)
        return batch, [success.age for success in chosen if success.age is not None]

    async def choose_from_pool(self, random: np.random.Generator, step: int) -> list[ReplayedSuccess]:
        """Draw up to ``pool_batch`` successes from the pool, each of another task, and count their uses."""
        found = await self._recall.recall(self.config.replay.pool_batch, random, set(), step=step)
        self._recall.settle()
        self.pool.used([recalled.stored[0].key for recalled in found])
        # A task has no rate if its trajectories came from a source without solve rates, such as demonstrations, and the
        # run has not played it yet.
        rates = self.pool.rates([recalled.task.id for recalled in found])
        chosen = []
        for recalled in found:
            stored = recalled.stored[0]
            group = replayed_group(recalled.task, [stored.trajectory])
            chosen.append(ReplayedSuccess(group, 1 - rates.get(recalled.task.id, 0.0), max(step - stored.version, 0)))
        return chosen

    def choose_from_step(self, random: np.random.Generator) -> list[ReplayedSuccess]:
        """Return up to ``pool_batch`` successes of this step, each from another group.

        Only groups in which some fresh members succeeded and some failed are eligible, and no restarted ones, whose
        rates are not those of their tasks.
        """
        candidates: list[ReplayedSuccess] = []
        for group in self._groups:
            valid = [] if group.spec.start else group.valid_fresh
            successes = [t for t in valid if t.score.reaches(self.config.replay.success_threshold)]
            if successes and len(successes) < len(valid):
                pick = successes[int(random.integers(len(successes)))]
                weight = 1 - len(successes) / len(valid)
                candidates.append(ReplayedSuccess(replayed_group(group.spec.task, [pick]), weight, None))
        order = random.permutation(len(candidates))[: self.config.replay.pool_batch]
        return [candidates[index] for index in sorted(order.tolist())]

    def undo_step(self) -> bool:
        undone = self.learner.undo_step()
        if undone:
            self._consumed -= self._consumed % self.config.schedule.batch
            self._groups = []
        return undone

    def weights(self) -> Mapping[str, Any]:
        return self.learner.weights()

    def save(self, folder: Path) -> None:
        self.learner.save(folder)

    def load(self, folder: Path) -> None:
        self.learner.load(folder)

    def return_to(self, folder: Path) -> None:
        self.learner.return_to(folder)

    def export(self, folder: Path) -> None:
        self.learner.export(folder)
