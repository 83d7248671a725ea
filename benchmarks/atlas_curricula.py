"""Curricula of published designs that `atlas_arms.py` names by path.

They wrap the run's `ReplayCurriculum` and change the groups that it plans. `atlas.py` puts them in its place.
docs/reference/atlas.md states where each differs from its publication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gleanrl.experience.replay.curriculum import ReplayCurriculum
from gleanrl.experience.replay.restarts import beginning
from gleanrl.experience.replay.selection import ranked
from gleanrl.experience.replay.updates import ReplayedSuccess, ReplayUpdateLearner
from gleanrl.protocols import Metrics
from gleanrl.train import Run
from gleanrl.types import Group, GroupSpec, Segment, Trajectory


class Wrapped:
    """A curriculum that passes everything to the one of ``run``. Runs with it cannot be resumed."""

    def __init__(self, run: Run, *, seed: int) -> None:
        assert isinstance(run.plan.curriculum, ReplayCurriculum)
        self.inner, self._random, self._steps = run.plan.curriculum, np.random.default_rng([seed, 1]), 0

    async def propose(self, count: int) -> list[GroupSpec]:
        return await self.inner.propose(count)

    def observe(self, groups: Sequence[Group], training: Metrics) -> Metrics:
        self._steps += 1
        return self.inner.observe(groups, training)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError("the state of the random generator is not saved")


class AttachToEveryGroup(Wrapped):
    """Adds up to ``replay.per_group`` stored successes to every group whose task has some, and selects no tasks.

    Needs ``replay.task_ratio = 0``. `attach_replayed` does the same after sampling.
    """

    async def propose(self, count: int) -> list[GroupSpec]:
        specs, pool = await self.inner.propose(count), self.inner.pool
        names = [spec.task.id for spec in specs]
        retired, stored = pool.retired(names), pool.stored(names)
        attached, keys = [], []
        for spec in specs:
            own = [] if spec.task.id in retired else stored[spec.task.id]
            order = ranked(own, pool.settings.select, self._random, step=self._steps)
            chosen = [own[index] for index in order[: pool.settings.per_group]]
            keys += [each.key for each in chosen]
            attached.append(replace(spec, replayed=tuple(each.trajectory for each in chosen)))
        pool.used(keys)
        return attached


class AttachNewestOutcomes(Wrapped):
    """Adds the ``replay.per_group`` trajectories of its task that were sampled last to every group, of any score.

    Keeps them itself: the pool stores no success of a group without a failure, and keeps successes and failures by
    different rules.
    """

    def __init__(self, run: Run, *, seed: int) -> None:
        super().__init__(run, seed=seed)
        self._newest: dict[str, tuple[Trajectory, ...]] = {}

    async def propose(self, count: int) -> list[GroupSpec]:
        specs = await self.inner.propose(count)
        return [replace(spec, replayed=self._newest.get(spec.task.id, ())) for spec in specs]

    def observe(self, groups: Sequence[Group], training: Metrics) -> Metrics:
        most = self.inner.settings.per_group
        for group in groups:
            name = group.spec.task.id
            self._newest[name] = (*self._newest.get(name, ()), *group.valid_fresh)[-most:]
        return super().observe(groups, training)


class WithoutPrefix(Wrapped):
    """Plays the tasks that ``replay.restart_share`` restarts from their beginning."""

    async def propose(self, count: int) -> list[GroupSpec]:
        return [replace(spec, start=()) for spec in await self.inner.propose(count)]


class RandomCut(Wrapped):
    """Restarts the tasks that ``replay.restart_share`` restarts after a random number of turns of the same success.

    The number is drawn uniformly, from one turn to all but one. When a task is no longer restarted depends on the
    usual rule, as if its start had moved by it.
    """

    async def propose(self, count: int) -> list[GroupSpec]:
        specs = await self.inner.propose(count)
        stored = self.inner.pool.stored([spec.task.id for spec in specs if spec.start])
        cut: list[GroupSpec] = []
        for spec in specs:
            if spec.start:
                segments = [each.trajectory.segments[0] for each in reversed(stored[spec.task.id])]
                success = next(segment for segment in segments if _begins_with(segment, spec.start))
                turns = sum(turn.sampled for turn in success)
                spec = replace(spec, start=beginning(success, int(self._random.integers(1, turns))))
            cut.append(spec)
        return cut


def _begins_with(segment: Segment, start: Segment) -> bool:
    return len(segment) > len(start) and all(
        np.array_equal(own.tokens, turn.tokens) for own, turn in zip(segment, start, strict=False)
    )


class ChangedUpdates(Wrapped):
    """A curriculum that also changes the extra updates of the run's learner.

    ``names`` has the ids of the tasks that were played, and ``metrics`` are reported with those of the step.
    """

    def __init__(self, run: Run, *, seed: int) -> None:
        super().__init__(run, seed=seed)
        assert isinstance(run.learner, ReplayUpdateLearner)
        self.learner = run.learner
        self.names: dict[str, None] = {}
        self.metrics: dict[str, float] = {}

    def observe(self, groups: Sequence[Group], training: Metrics) -> Metrics:
        self.names.update((group.spec.task.id, None) for group in groups)
        return {**super().observe(groups, training), **self.metrics}


class ChangedSuccesses(ChangedUpdates):
    """A curriculum that also changes the successes on which an extra update trains.

    ``self._choose`` draws those that replay would train on.
    """

    def __init__(self, run: Run, *, seed: int) -> None:
        super().__init__(run, seed=seed)
        self._choose = self.learner.choose_from_pool
        self.learner.choose_from_pool = self.choose  # type: ignore[method-assign]

    async def choose(self, random: np.random.Generator, step: int) -> list[ReplayedSuccess]:
        raise NotImplementedError


class OwnStep(ChangedSuccesses):
    """A control: each extra update trains on successes of its own step, with as many tokens as on stored ones.

    The stored successes are drawn and counted as used all the same, so the pool plans as it does for replay. In their
    place come successes of the step, one at random from each of up to ``replay.pool_batch`` groups that have failures
    too. More are drawn from all these groups again until they have as many sampled tokens as the stored ones.
    """

    async def choose(self, random: np.random.Generator, step: int) -> list[ReplayedSuccess]:
        stored = await self._choose(random, step)
        wanted = sum(success.group.trajectories[0].sampled_tokens for success in stored)
        chosen: list[ReplayedSuccess] = []
        while wanted > 0 and (drawn := self.learner.choose_from_step(random)):
            for success in drawn:
                if wanted > 0:
                    chosen.append(success)
                    wanted -= success.group.trajectories[0].sampled_tokens
        return chosen
