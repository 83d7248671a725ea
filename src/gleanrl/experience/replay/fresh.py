"""Chooses the fresh part of a batch: tasks of the inner curriculum in its order, without retired or repeated ones."""

from __future__ import annotations

from collections.abc import Collection

from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.protocols import Curriculum
from gleanrl.types import GroupSpec

_BATCHES, _LEAST = 16, 64  # limit of further specs for one batch: 16 times its size, but at least 64


class FreshPicks:
    """The fresh specs of one batch of ``count``, picked from what the inner curriculum proposed.

    ``waiting`` holds all specs that were proposed and not yet used by a batch, oldest first. `ask` appends to it, and
    only `commit` removes specs. So if ``waiting`` is saved while a batch is being picked, a restarted run picks the
    same batch from it.
    """

    def __init__(self, inner: Curriculum, pool: ExperiencePool, waiting: list[GroupSpec], count: int) -> None:
        self._inner, self._pool, self._waiting = inner, pool, waiting
        self._may_ask = max(_BATCHES * count, _LEAST)  # specs beyond those that wait
        self._used: list[int] = []  # positions in ``waiting``, as in the next two lists
        self._retired: list[int] = []  # passed over because their tasks are retired
        self._repeated: list[int] = []  # passed over because their tasks are in the batch already
        self._next = 0  # position of the first spec not yet looked at
        self._seen: set[str] = set()
        self._repeats = 0  # specs in a row whose tasks were all seen before

    @property
    def specs(self) -> list[GroupSpec]:
        return [self._waiting[index] for index in self._used]

    @property
    def passed_over(self) -> int:
        """Specs left out because their tasks are retired."""
        return len(self._retired)

    async def ask(self, count: int) -> None:
        """Let the inner curriculum propose ``count`` more specs. Raises `ValueError` if it proposes none."""
        proposed = await self._inner.propose(count)
        if not proposed:
            raise ValueError(f"{type(self._inner).__name__}.propose({count}) proposed nothing")
        self._waiting += proposed

    async def take(self, count: int, taken: set[str]) -> int:
        """Pick ``count`` specs of tasks that are neither retired nor in ``taken``, and add these tasks to ``taken``.

        Returns how many specs are missing when the limit of further proposals is reached. The search ends earlier if
        the inner curriculum only repeats tasks: when each task comes once per epoch and ``n`` tasks were seen,
        ``2 n + 1`` repeats in a row prove that there is no other task.
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

    async def fill(self, count: int, taken: set[str], barred: Collection[str] = ()) -> int:
        """Pick ``count`` specs: first as `take` does, then of retired tasks, then of tasks already in the batch.

        Tasks in ``barred`` are not picked in any case. Returns how many specs are missing for that reason.
        """
        count = await self.take(count, taken)
        for index in list(self._retired):
            task = self._waiting[index].task.id
            if count and task not in taken:
                self._retired.remove(index)
                self._used.append(index)
                taken.add(task)
                count -= 1
        while count:
            free = [index for index in self._repeated if self._waiting[index].task.id not in barred][:count]
            self._repeated = [index for index in self._repeated if index not in free]
            self._used += free
            count -= len(free)
            if count:
                first = len(self._waiting)
                await self.ask(count)
                self._next = len(self._waiting)
                self._repeated += range(first, self._next)
                if all(spec.task.id in barred for spec in self._waiting[first:]):
                    break
        return count

    def commit(self) -> None:
        """Remove the picked specs, and those passed over because their tasks are retired, from ``waiting``."""
        gone = {*self._used, *self._retired}
        self._waiting[:] = [spec for index, spec in enumerate(self._waiting) if index not in gone]
