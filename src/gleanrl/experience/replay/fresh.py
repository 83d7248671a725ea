"""Chooses the fresh part of a batch: the inner curriculum's tasks in its order, without retired ones, none twice."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from gleanrl.protocols import Curriculum
from gleanrl.types import GroupSpec

if TYPE_CHECKING:
    from gleanrl.experience.pool.pool import ExperiencePool

_PATIENCE, _LEAST_PATIENCE = 16, 64  # batches of further specs that one batch may ask for, and specs at least


class FreshStream:
    """What the inner curriculum proposed and no batch has used yet, oldest first.

    ``waiting`` holds it all at any time, also while a batch is being picked: saved in the middle of that, it is what
    the same batch starts from after a restart.
    """

    def __init__(self, inner: Curriculum, pool: ExperiencePool) -> None:
        self.inner, self.pool = inner, pool
        self.waiting: list[GroupSpec] = []

    async def open(self, count: int) -> Picks:
        """Begin to pick a batch of ``count``: so many specs wait afterwards at least."""
        if count > len(self.waiting):
            await self.ask(count - len(self.waiting))
        return Picks(self, max(_PATIENCE * count, _LEAST_PATIENCE))

    async def ask(self, count: int) -> None:
        """Let the inner curriculum propose ``count`` more. `ValueError` if it proposes none."""
        proposed = await self.inner.propose(count)
        if not proposed:
            raise ValueError(f"{type(self.inner).__name__}.propose({count}) proposed nothing")
        self.waiting += proposed


class Picks:
    """The fresh specs of one batch. Nothing leaves the stream before `commit`.

    ``patience``: how many specs may be asked for beyond those that wait.
    """

    def __init__(self, stream: FreshStream, patience: int) -> None:
        self._stream, self._patience = stream, patience
        self._used: list[int] = []  # positions in the stream's ``waiting``, as are the others
        self._retired: list[int] = []  # passed over
        self._repeated: list[int] = []  # passed over: their tasks are in the batch
        self._next = 0  # the first not looked at
        self._seen: set[str] = set()
        self._repeats = 0  # specs in a row whose tasks were all seen before

    @property
    def specs(self) -> list[GroupSpec]:
        return [self._stream.waiting[index] for index in self._used]

    @property
    def passed_over(self) -> int:
        """Specs left out because their tasks are retired."""
        return len(self._retired)

    async def take(self, count: int, taken: set[str]) -> int:
        """Pick ``count`` specs of tasks that are neither retired nor in ``taken``, to which theirs are added.

        Returns how many could not be had, after as much asking as `patience` allows. It ends early where the inner
        curriculum goes round in tasks already seen: of tasks that come once an epoch, ``2 n + 1`` repeats in a row
        among ``n`` seen prove that there is no other.
        """
        while (count := count - self._scan(count, taken)) > 0:
            asked = min(count, self._patience)
            if not asked or self._repeats > 2 * len(self._seen):
                break
            self._patience -= asked
            await self._stream.ask(asked)
        return count

    async def fill(self, count: int, taken: set[str], barred: Collection[str] = ()) -> int:
        """Pick ``count`` specs whatever it takes: as `take` does, then retired tasks, then tasks already in the batch.

        Only tasks in ``barred`` are never taken; returns how many could not be had for that reason.
        """
        count = await self.take(count, taken)
        waiting = self._stream.waiting
        for index in list(self._retired):
            if count and waiting[index].task.id not in taken:
                self._retired.remove(index)
                self._used.append(index)
                taken.add(waiting[index].task.id)
                count -= 1
        while count:
            free = [index for index in self._repeated if waiting[index].task.id not in barred][:count]
            self._repeated = [index for index in self._repeated if index not in free]
            self._used += free
            count -= len(free)
            if count:
                first = self._next = len(waiting)
                await self._stream.ask(count)
                self._next = len(waiting)
                self._repeated += range(first, self._next)
                if all(spec.task.id in barred for spec in waiting[first:]):
                    break
        return count

    def commit(self) -> None:
        """Take what was picked, and retired tasks passed over, out of the stream."""
        gone = {*self._used, *self._retired}
        self._stream.waiting = [spec for index, spec in enumerate(self._stream.waiting) if index not in gone]

    def _scan(self, count: int, taken: set[str]) -> int:
        """Look at what waits until ``count`` are picked; how many were."""
        waiting = self._stream.waiting
        retired = self._stream.pool.retired([spec.task.id for spec in waiting[self._next :]]) if count else set()
        picked = 0
        while picked < count and self._next < len(waiting):
            task = waiting[self._next].task.id
            self._repeats = self._repeats + 1 if task in self._seen else 0
            self._seen.add(task)
            if task in taken:
                self._repeated.append(self._next)
            elif task in retired:
                self._retired.append(self._next)
            else:
                taken.add(task)
                self._used.append(self._next)
                picked += 1
            self._next += 1
        return picked
