"""Which rows a sample holds: uniform over the rows that may be drawn, exactly, whatever the conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gleanrl.errors import UserError

Accept = Callable[[int, Tensor], Tensor]  # number of a table, its rows [n] -> bool [n]

ROUNDS = 8  # of drawing again what was refused, before all rows are looked at
SCANNED = 1 << 16  # rows looked at at once


@dataclass(frozen=True, slots=True)
class Ranges:
    """Rows of one table: ``total`` from ``first`` on, or else [starts[i], ends[i] - ends[i - 1] further) for each i."""

    table: int
    first: int
    total: int
    starts: Tensor | None = None  # int64
    ends: Tensor | None = None  # int64, of the positions: sums of the ranges' lengths

    def at(self, positions: Tensor) -> Tensor:
        """The rows at positions 0 to ``total`` - 1."""
        if self.starts is None or self.ends is None:
            return positions + self.first
        index = torch.bucketize(positions, self.ends, right=True)
        before = torch.where(index > 0, self.ends[index - 1], 0)
        return positions - before + self.starts[index]


def pieces(positions: Tensor, ranges: Sequence[Ranges]) -> list[tuple[Ranges, Tensor, Tensor]]:
    """Positions over all ranges together -> for each: (ranges, places in the batch, rows)."""
    if len(ranges) == 1:
        return [(ranges[0], torch.arange(len(positions)), ranges[0].at(positions))]
    found, before = [], 0
    for own in ranges:
        [places] = torch.where((positions >= before) & (positions < before + own.total))
        if len(places):
            found.append((own, places, own.at(positions[places] - before)))
        before += own.total
    return found


def draw(count: int, ranges: Sequence[Ranges], accept: Accept | None, generator: torch.Generator) -> Tensor:
    """Positions int64 ``[count]`` over all ranges together, uniform with replacement over what is accepted.

    Raises:
        UserError: nothing is.
    """
    total = sum(own.total for own in ranges)
    if accept is None:
        return torch.randint(total, (count,), generator=generator)
    found = torch.empty(0, dtype=torch.int64)
    for _ in range(ROUNDS):
        tried = torch.randint(total, (2 * count,), generator=generator)
        found = torch.cat([found, tried[accepted(tried, ranges, accept)]])
        if len(found) >= count:
            return found[:count]
    every = scan(total, ranges, accept)
    if not len(every):
        raise UserError("no row of the buffer meets the conditions")
    return every[torch.randint(len(every), (count,), generator=generator)]


def accepted(positions: Tensor, ranges: Sequence[Ranges], accept: Accept) -> Tensor:
    """bool ``[n]``."""
    found = torch.zeros(len(positions), dtype=torch.bool)
    for own, places, rows in pieces(positions, ranges):
        found[places] = accept(own.table, rows)
    return found


def scan(total: int, ranges: Sequence[Ranges], accept: Accept) -> Tensor:
    """All positions that are accepted."""
    parts = []
    for begin in range(0, total, SCANNED):
        positions = torch.arange(begin, min(begin + SCANNED, total))
        parts.append(positions[accepted(positions, ranges, accept)])
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def of_trajectories(table: int, starts: np.ndarray, counts: np.ndarray) -> Ranges:
    """The rows of some trajectories: first row and number of rows of each."""
    ends = torch.from_numpy(np.cumsum(counts.astype(np.int64)))
    return Ranges(table, 0, int(ends[-1]), torch.from_numpy(starts.astype(np.int64)), ends)
