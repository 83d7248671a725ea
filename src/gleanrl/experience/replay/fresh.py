"""Picks the groups of a batch that contain no replayed members.

`ReplayCurriculum` takes some groups of a batch from the pool, and the others from the curriculum that it wraps (the
inner curriculum). This module picks the latter, in the order in which the inner curriculum proposes them. It skips
tasks that are retired and tasks that the batch contains already.
"""

from __future__ import annotations

from collections.abc import Collection

from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.protocols import Curriculum
from gleanrl.types import GroupSpec

# For a batch of n groups, `FreshPicks.take` requests at most max(16 n, 64) further specs from the inner curriculum.
# If nearly all tasks are retired, a search without a limit would take long.
_BATCHES, _LEAST = 16, 64


class FreshPicks:
    """Picks specs for one batch of ``count`` groups from those that the inner curriculum has proposed.

    ``waiting`` is the caller's list of the specs that the inner curriculum has proposed and no batch has used yet,
    oldest first. `ask` appends to this list, and only `commit` removes specs from it. So a checkpoint that is saved
    while a batch is being picked contains all proposed specs, and a run that resumes from it picks the same batch.
    """

    def __init__(self, inner: Curriculum, pool: ExperiencePool, waiting: list[GroupSpec], count: int) -> None:
        self._inner, self._pool, self._waiting = inner, pool, waiting
        self._may_ask = max(_BATCHES * count, _LEAST)  # specs that `take` may still request
        # These three lists hold positions in ``waiting``.
        self._used: list[int] = []  # picked specs
        self._retired: list[int] = []  # specs that were skipped because their tasks are retired
        self._repeated: list[int] = []  # specs that were skipped because the batch contains their tasks already
        self._next = 0  # position in ``waiting`` of the first spec that was not examined yet
        self._seen: set[str] = set()  # ids of the tasks of all examined specs
        self._repeats = 0  # number of specs examined since the last one whose task had not been seen before

    @property
    def specs(self) -> list[GroupSpec]:
        return [self._waiting[index] for index in self._used]

    @property
    def passed_over(self) -> int:
        """Number of specs that were skipped because their tasks are retired."""
        return len(self._retired)

    async def ask(self, count: int) -> None:
        """Let the inner curriculum propose ``count`` specs, and append them to ``waiting``.

        Raises `ValueError` if it proposes none.
        """
        proposed = await self._inner.propose(count)
        if not proposed:
            raise ValueError(f"{type(self._inner).__name__}.propose({count}) proposed nothing")
        self._waiting += proposed

    async def take(self, count: int, taken: set[str]) -> int:
        """Pick ``count`` specs of tasks that are neither retired nor in ``taken``, and add these tasks to ``taken``.

        Returns how many of the ``count`` specs were not found. The search stops at the limit of further proposals, or
        earlier if the inner curriculum only repeats tasks. The search assumes that no other task exists once more than
        ``2 n`` specs in a row repeat a task, where ``n`` is the number of distinct tasks seen. If the inner curriculum
        proposes each task once per epoch, that many repeats prove it.
        """
        while count > 0:
            retired = self._pool.retired([spec.task.id for spec in self._waiting[self._next :]])
            while count > 0 and self._next < len(self._waiting):
                task = self._waiting[self._next].task.id
                self._repeats = self._repeats + 1 if task in self._seen else 0
                self._seen.add(task)
                if task in taken:
                    self._repeated.append(self._next)
                elif task in retired:
                    self._retired.append(self._next)
                else:
                    taken.add(task)
                    self._used.append(self._next)
                    count -= 1
                self._next += 1
            asked = min(count, self._may_ask)
            if not asked or self._repeats > 2 * len(self._seen):
                break
            self._may_ask -= asked
            await self.ask(asked)
        return count

    async def fill(self, count: int, taken: set[str]) -> None:
        """Pick ``count`` specs, and allow retired tasks and repeated tasks if there are too few others.

        Picks first as `take` does, then specs of retired tasks, then specs of tasks that the batch contains already, in
        the order of the inner curriculum.
        """
        count = await self.take(count, taken)
        for index in list(self._retired):
            task = self._waiting[index].task.id
            if count and task not in taken:
                self._retired.remove(index)
                self._used.append(index)
                taken.add(task)
                count -= 1
        while count > len(self._repeated):
            first = len(self._waiting)
            await self.ask(count - len(self._repeated))
            self._next = len(self._waiting)
            self._repeated += range(first, self._next)
        self._used += self._repeated[:count]
        self._repeated = self._repeated[count:]

    def commit(self, replayed: Collection[str]) -> None:
        """Remove from ``waiting`` the picked specs, and the specs that were skipped because their tasks are retired.

        Of the specs that were skipped because their tasks are in ``replayed``, the ids of the batch's replayed tasks,
        one per task stays. So the list stays short, even if a task is replayed in every batch.
        """
        gone = {*self._used, *self._retired}
        kept: set[str] = set()
        for index in self._repeated:
            task = self._waiting[index].task.id
            if task in kept:
                gone.add(index)
            elif task in replayed:
                kept.add(task)
        self._waiting[:] = [spec for index, spec in enumerate(self._waiting) if index not in gone]
