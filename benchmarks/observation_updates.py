"""Observations from memory: one more update a step, on the environment's answers in trajectories of any age.

`atlas_arms.py` names `ObservationsFromMemory` and `ObservationsOfStep` by path. The target of an observation token,
p(observation | history, action), is the environment's own distribution, which does not depend on the policy that chose
the actions. So trajectories of any age and outcome can be trained on, without a probability ratio and a clip.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atlas_curricula import ChangedUpdates
from gleanrl.algorithms.batch import Batch, GroupSamples, build_samples
from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.protocols import Metrics
from gleanrl.train import Run
from gleanrl.types import Group, GroupSpec, Task, Trajectory

TRAJECTORIES = 8  # most trajectories of an update
COEFFICIENT = 0.1  # factor of the observation loss


class ObservationsFromMemory(ChangedUpdates):
    """Makes one more update after the extra ones of replay, on observations in `TRAJECTORIES` stored trajectories.

    They are successes and, with ``replay.keep_failures``, failures of tasks that are drawn uniformly from those that
    were played.
    """

    def __init__(self, run: Run, *, seed: int) -> None:
        super().__init__(run, seed=seed)
        run.player.renderer.bodies = True  # where the observations are is found while a trajectory is sampled
        self._groups: list[Group] = []  # of the current step
        self._update, self._remember = self.learner.update, self.learner.remember
        self.learner.update = self.update  # type: ignore[method-assign]
        self.learner.remember = self.remember  # type: ignore[method-assign]

    def remember(self, groups: Sequence[Group]) -> None:
        self._groups += groups
        self._remember(groups)

    async def update(self, batch: Batch) -> Metrics:
        before = self.learner.learner.step
        metrics = await self._update(batch)
        step = self.learner.learner.step - 1
        if step < before:
            return metrics
        groups, self._groups = self._groups, []
        if self.learner.begun():
            shown = self.trajectories(groups)
            extra = observation_batch(shown, self.learner.max_context, COEFFICIENT)
            self.metrics = {"replay_update/observations/trajectories": float(extra.groups)}
            if extra.groups:
                reported = await self.learner.learner.replay_update(extra, step)
                self.metrics["replay_update/observations/loss"] = reported["loss/observation"]
        return metrics

    def trajectories(self, groups: Sequence[Group]) -> list[Trajectory]:
        """Return the trajectories of an update after the step with ``groups``."""
        return choose_from_pool(self.inner.pool, list(self.names), self._random)


class ObservationsOfStep(ObservationsFromMemory):
    """A control: the observations of as many fresh trajectories of the step itself."""

    def trajectories(self, groups: Sequence[Group]) -> list[Trajectory]:
        return choose_from_step(groups, self._random)


def has_observations(trajectory: Trajectory) -> bool:
    """Return whether the trajectory has the span of an observation (`Turn.body`)."""
    return any(turn.body is not None for turn in (*trajectory.turns(), *trajectory.ending))


def choose_from_pool(pool: ExperiencePool, names: Sequence[str], random: np.random.Generator) -> list[Trajectory]:
    """Draw up to `TRAJECTORIES` stored trajectories, successes or failures with observations, of different tasks."""
    chosen: list[Trajectory] = []
    for index in random.permutation(len(names)):
        name = names[int(index)]
        found = [*pool.stored([name])[name], *pool.failures([name])[name]]
        usable = [stored.trajectory for stored in found if has_observations(stored.trajectory)]
        if usable:
            chosen.append(usable[int(random.integers(len(usable)))])
        if len(chosen) == TRAJECTORIES:
            break
    return chosen


def choose_from_step(groups: Sequence[Group], random: np.random.Generator) -> list[Trajectory]:
    """Draw up to `TRAJECTORIES` of the valid fresh members of ``groups`` that have observations."""
    members = [member for group in groups for member in group.valid_fresh if has_observations(member)]
    return [members[index] for index in random.permutation(len(members))[:TRAJECTORIES]]


def observation_batch(trajectories: Sequence[Trajectory], max_context: int, coefficient: float) -> Batch:
    """Return a batch of which only the observation loss is trained, with the factor ``coefficient``."""
    parts: list[GroupSamples] = []
    for trajectory in trajectories:
        # As a fresh member, because only samples of fresh members mark their observations.
        group = Group(GroupSpec(Task(trajectory.task_id), 1), (trajectory,), -1)
        samples = build_samples([group], max_context, observations=True).samples
        observed = tuple(sample.only_observed() for sample in samples if sample.observed is not None)
        if observed:
            parts.append(GroupSamples(observed, tokens=0, sequences=0, invalid=0, zero_variance=False))
    return Batch(tuple(parts), observation_coefficient=coefficient)
