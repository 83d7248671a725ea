"""Trajectories of one shape as one block of rows: many small ones are stored at little more than the cost of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gleanrl.buffer.schema import Schema
from gleanrl.buffer.trajectory import Path, Rows, episode_ends, epoch_ends, steps_left

TOGETHER = 1 << 20  # bytes of a stack; what is larger is stored alone, which needs no copy


@dataclass(frozen=True)
class Stack:
    """n trajectories with the same T, B and fields."""

    members: Sequence[Rows]
    columns: dict[Path, Tensor]  # [n * T * B, ...], one trajectory behind the other

    @classmethod
    def of(cls, members: Sequence[Rows]) -> Stack:
        if len(members) == 1:
            return cls(members, members[0].columns)
        paths = members[0].columns
        return cls(members, {path: torch.cat([rows.columns[path] for rows in members]) for path in paths})

    @property
    def shape(self) -> tuple[int, int, int]:
        """n, T, B."""
        return len(self.members), self.members[0].steps, self.members[0].batch

    @property
    def each(self) -> int:
        """Rows of each."""
        return self.members[0].count

    @property
    def count(self) -> int:
        return len(self.members) * self.each

    @cached_property
    def schema(self) -> Schema:
        return Schema.of(self.members[0])

    @cached_property
    def ends(self) -> Tensor:
        """bool ``[n, T, B]``: an episode ends in this chunk step."""
        return episode_ends(self.columns, self.shape)

    def steps_left(self) -> Tensor:
        """int32 ``[n * T * B]``: steps up to the end of its episode or its rollout epoch, this one included."""
        cuts = self.ends
        if any(rows.epochs > 1 for rows in self.members):
            cuts = cuts | torch.stack([epoch_ends(rows.steps, rows.epochs) for rows in self.members])
        return steps_left(cuts).reshape(-1)


def stacks(trajectories: Sequence[Rows]) -> Iterator[Stack]:
    """All of them in order, those stacked that follow one another and are alike."""
    members: list[Rows] = []
    nbytes = 0
    for rows in trajectories:
        own = rows.nbytes
        if members and (nbytes + own > TOGETHER or not _alike(members[0], rows)):
            yield Stack.of(members)
            members, nbytes = [], 0
        members.append(rows)
        nbytes += own
    if members:
        yield Stack.of(members)


def _alike(one: Rows, other: Rows) -> bool:
    return (
        (one.steps, one.batch) == (other.steps, other.batch)
        and one.columns.keys() == other.columns.keys()
        and all(
            column.dtype == other.columns[path].dtype and column.shape == other.columns[path].shape
            for path, column in one.columns.items()
        )
    )
