"""Chooses tasks whose episodes begin with the first turns of a stored success (``replay.restart_share``).

A task that is hardly ever solved is sampled from a point near the end of a success, where it is easier, and that point
moves towards the beginning as the policy solves it from there (PrefixRL, arXiv 2601.18795).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool.pool import ExperiencePool, Stored
from gleanrl.experience.replay import selection
from gleanrl.experience.replay.recall import ROUNDS, draw_from
from gleanrl.types import START_TURNS, Group, GroupSpec, Segment

EARLIER, LATER = 0.75, 0.25
"""The start of a task moves a turn towards the beginning if at least `EARLIER` of a group succeed, and a turn towards
the end if at most `LATER` of it do."""

Cut = list[int]
"""The start of a task: the pool's key of the stored success, the number of its turns that are repeated, and the number
of all its turns. It is a list, because it is part of a checkpoint in JSON."""


class Restarts:
    """Draws tasks to restart, and moves their starts.

    ``cuts`` maps the id of each task that was restarted to its `Cut`. A task whose start has reached the beginning
    keeps its entry, with 0 turns, and is not restarted again. ``group`` is the number of members of a group.
    """

    def __init__(self, pool: ExperiencePool, settings: ReplaySettings, group: int) -> None:
        self._pool, self._group = pool, group
        self.cuts: dict[str, Cut] = {}
        self._threshold = settings.success_threshold
        self._limited = [source for source, limit in settings.source_limits.items() if limit < 1]
        self._uniform = settings.model_copy(update={"tasks": "uniform"})

    def draw(
        self, count: int, random: np.random.Generator, taken: set[str], *, greedy: bool = False
    ) -> list[tuple[GroupSpec, Cut]]:
        """Draw up to ``count`` tasks that are not in ``taken``, and return a spec with a start and the cut of each.

        Tasks are drawn uniformly from those whose latest fresh group had at most one success, or a rate nearest to
        that, and that have a stored success of at least two turns. Successes of sources in ``source_limits`` are not
        used. Tasks whose start has reached the beginning are not drawn again. The ids of all tasks drawn are added to
        ``taken``. Nothing else is changed: `commit` stores the cuts.
        """
        done = {task for task, (_, turns, _) in self.cuts.items() if turns == 0}
        sizes = self._pool.buckets(self._limited)
        hard = {bucket: size for bucket, size in sizes.items() if selection.level(bucket, self._group) <= 1}
        found: list[tuple[GroupSpec, Cut]] = []
        for _ in range(ROUNDS):
            left = count - len(found)
            excluded = taken | done
            drawn = draw_from(self._pool, hard, left, self._group, self._uniform, random, excluded, self._limited)
            stored = self._pool.stored([task.id for task in drawn])
            for task in drawn:
                taken.add(task.id)
                own = [each for each in stored[task.id] if each.source not in self._limited]
                cut = self._cut(self.cuts.get(task.id), own)
                if cut is not None:
                    [success] = [each.trajectory for each in own if each.key == cut[0]]
                    spec = GroupSpec(task, self._group, greedy=greedy, start=beginning(success.segments[0], cut[1]))
                    found.append((spec, cut))
        return found

    def _cut(self, cut: Cut | None, stored: Sequence[Stored]) -> Cut | None:
        """Return the cut of a task: ``cut`` if its success is still stored, else a new one; None if there is none."""
        if cut is not None and any(each.key == cut[0] for each in stored):
            return cut
        for each in reversed(stored):  # the newest first
            turns = sum(1 for _ in each.trajectory.sampled_turns())
            if len(each.trajectory.segments) == 1 and turns > 1:
                return [each.key, max(1, turns - 2), turns]
        return None

    def commit(self, drawn: Sequence[tuple[GroupSpec, Cut]]) -> None:
        """Store the cuts of tasks that `draw` has returned."""
        self.cuts.update((spec.task.id, cut) for spec, cut in drawn)

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Move the starts of the tasks of restarted ``groups``, and return metrics.

        A success whose observations an environment did not repeat is evicted from the pool.
        """
        solved, turns, refused = [], [], 0
        for group in groups:
            cut = self.cuts.get(group.spec.task.id)
            if not group.spec.start or cut is None:
                continue
            if any(trajectory.info.get(START_TURNS) == 0 for trajectory in group.fresh):
                refused += 1
                # If another group of the task was refused before, the cut may be that of another success by now.
                stored = self._pool.stored([group.spec.task.id])[group.spec.task.id]
                success = next((each.trajectory for each in stored if each.key == cut[0]), None)
                if success is None or _begins_with(success.segments[0], group.spec.start):
                    self._pool.evict([cut[0]], "other_start")
                    del self.cuts[group.spec.task.id]
            elif valid := group.valid_fresh:
                rate = sum(trajectory.score.reaches(self._threshold) for trajectory in valid) / len(valid)
                solved.append(rate)
                turns.append(sum(turn.sampled for turn in group.spec.start))
                # Of groups that were planned ahead with the same start, only the first to be learned from moves it.
                if turns[-1] == cut[1]:
                    step = -1 if rate >= EARLIER else 1 if rate <= LATER else 0
                    cut[1] = min(max(cut[1] + step, 0), cut[2] - 1)
        metrics = {"restart/groups": float(len(solved)), "restart/refused": float(refused)}
        if solved:
            metrics |= {"restart/success": float(np.mean(solved)), "restart/turns": float(np.mean(turns))}
        return metrics


def beginning(segment: Segment, turns: int) -> Segment:
    """Return the turns of a segment up to the sampled turn number ``turns``, counted from 1."""
    sampled = [position for position, turn in enumerate(segment) if turn.sampled]
    return segment[: sampled[turns - 1] + 1]


def _begins_with(segment: Segment, start: Segment) -> bool:
    return all(np.array_equal(own.tokens, turn.tokens) for own, turn in zip(segment, start, strict=False))
