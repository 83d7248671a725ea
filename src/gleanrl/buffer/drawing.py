"""Which rows a sample holds: uniform over the rows that may be drawn, exactly, whatever the conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gleanrl.utils.errors import UserError

Accept = Callable[[int, Tensor], Tensor]  # number of a table, its rows [n] -> bool [n]

ROUNDS = 8  # of drawing again what was refused, before all rows are looked at
SCANNED = 1 << 16  # rows looked at at once


@dataclass(frozen=True, slots=True)
class Ranges:
    """Rows of one table: ``total`` from ``first`` on, or else the runs that begin at ``starts``.

    Of those, ``begins`` says how many rows are before each, and ``first`` how many before the first that counts.
    """

    table: int
    first: int
    total: int
    starts: Tensor | None = None  # int64
    begins: Tensor | None = None  # int64

    def at(self, positions: Tensor) -> Tensor:
        """The rows at positions 0 to ``total`` - 1."""
        found = positions + self.first if self.first else positions
        if self.starts is None or self.begins is None:
            return found
        run = torch.bucketize(found, self.begins, right=True) - 1
        return found - self.begins[run] + self.starts[run]


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
    if accept is None:
        return torch.randint(sum(own.total for own in ranges), (count,), generator=generator)
    return _tried(count, ranges, accept, generator)[0][:count]


def draw_no_more(
    count: int, total: int, ranges: Sequence[Ranges], accept: Accept | None, generator: torch.Generator
) -> Tensor:
    """As `draw`, but no more positions than there are to draw from; ``total``: of all ranges."""
    if accept is None:
        return torch.randint(total, (min(count, total),), generator=generator)
    found, there = _tried(count, ranges, accept, generator)
    if there is None and len(found.unique()) < count:  # else they show themselves that there are enough
        there = _at_least(count, total, ranges, accept)
    return found[: count if there is None else min(count, there)]


def _tried(
    count: int, ranges: Sequence[Ranges], accept: Accept, generator: torch.Generator
) -> tuple[Tensor, int | None]:
    """At least ``count`` positions that are accepted; and how many there are, if all were looked at."""
    total = sum(own.total for own in ranges)
    found = torch.empty(0, dtype=torch.int64)
    for _ in range(ROUNDS):
        tried = torch.randint(total, (2 * count,), generator=generator)
        found = torch.cat([found, tried[accepted(tried, ranges, accept)]])
        if len(found) >= count:
            return found, None
    every = scan(total, ranges, accept)
    if not len(every):
        raise UserError("no row of the buffer meets the conditions")
    return every[torch.randint(len(every), (count,), generator=generator)], len(every)


def _at_least(count: int, total: int, ranges: Sequence[Ranges], accept: Accept) -> int:
    """How many positions are accepted, looked at one behind the other until it is ``count``."""
    found, begin, length = 0, 0, 4 * count
    while found < count and begin < total:
        positions = torch.arange(begin, min(begin + length, total))
        found += int(accepted(positions, ranges, accept).sum())
        begin, length = begin + length, min(2 * length, max(SCANNED, 4 * count))
    return found


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
