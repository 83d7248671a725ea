"""Prioritised sampling: a sum tree over rows (Schaul et al. 2016, "Prioritized Experience Replay")."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from gleanrl.buffer.reader import Reader, Snapshot
from gleanrl.utils.errors import UserError

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


class SumTree:
    """Weights by position. Positions are drawn with probabilities in proportion to their weights.

    Each operation handles many positions, one level of the tree at a time. With float64 sums, a draw from 2^30 rows is
    exact to about 1e-7 of a weight.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = 1 << max(0, capacity - 1).bit_length()
        self._nodes: Floats = np.zeros(2 * self.capacity)  # node i has children 2i and 2i + 1; leaves are last

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    def at(self, positions: Ints) -> Floats:
        """Return the weights of ``positions``."""
        return self._nodes[self.capacity + positions]

    def set(self, positions: Ints, weights: Floats | float) -> None:
        """Set the weights of ``positions``. If a position occurs twice, the last weight is used."""
        nodes = self.capacity + positions
        self._nodes[nodes] = weights
        while len(nodes) and nodes[0] > 1:
            nodes = np.unique(nodes >> 1)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, sums: Floats) -> Ints:
        """Return the first position at which the running sum of weights exceeds each of ``sums`` (in [0, total))."""
        nodes = np.ones(len(sums), np.int64)
        left = sums.copy()
        while nodes[0] < self.capacity:
            nodes *= 2
            weight = self._nodes[nodes]
            right = (left >= weight) & (self._nodes[nodes + 1] > 0)  # never into an empty part by rounding
            left -= np.where(right, weight, 0.0)
            nodes += right
        return nodes - self.capacity


class TablePriorities:
    """Priorities of a table's rows, by row number.

    Args:
        exponent: alpha. With 0 draws are uniform, with 1 in proportion to the priorities.
    """

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent
        self.first = self.end = 0  # rows first to end - 1 have a priority
        self.highest = 1.0  # highest priority so far, which new rows get, so that each is drawn soon
        self.tree = SumTree()
        self.base = 0  # row at position 0 of the tree

    def cover(self, first: int, end: int) -> None:
        """Give each row from ``first`` to ``end`` - 1 a priority if it has none, and remove those of all other rows."""
        if first - self.base > max(self.tree.capacity // 2, end - first):
            kept = np.arange(max(first, self.first), self.end)
            weights = self.tree.at(kept - self.base)
            self.tree, self.base = SumTree(end - first), first
            self.tree.set(kept - first, weights)
        elif first > self.first:
            self.tree.set(np.arange(self.first, min(first, self.end)) - self.base, 0.0)
        if end < self.end:
            self.tree.set(np.arange(max(end, self.first), self.end) - self.base, 0.0)
        if end - self.base > self.tree.capacity:
            smaller, self.tree = self.tree, SumTree(end - self.base)
            every = np.arange(smaller.capacity)
            self.tree.set(every, smaller.at(every))
        self.tree.set(np.arange(max(self.end, first), end) - self.base, self.highest**self.exponent)
        self.first, self.end = first, end


class Priorities:
    """Priorities of all tables, for any number of threads. All are reset when the buffer's content is replaced.

    Each call uses the newest snapshot, so that no thread removes rows which another thread has added.
    """

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent
        self._own: list[TablePriorities] = []  # priorities of each table, by its number
        self._epoch = -1
        self._lock = threading.Lock()

    def draw(self, reader: Reader, drawn: Floats) -> tuple[Snapshot, Ints, Ints, Floats]:
        """Draw a row for each of the uniform random numbers ``drawn`` in [0, 1).

        Returns:
            The snapshot that was drawn from, and the table, row and probability of each draw, ``[n]`` each.

        Raises:
            UserError: there are no rows.
        """
        with self._lock:
            now = self._cover(reader)
            totals = np.array([own.tree.total for own in self._own])
            if not totals.sum():
                raise UserError("the buffer is empty")
            ends, sums = np.cumsum(totals), drawn * totals.sum()
            tables = np.minimum(np.searchsorted(ends, sums, side="right"), len(totals) - 1)
            rows, weights = np.empty(len(sums), np.int64), np.empty(len(sums))
            for number in np.unique(tables):
                [places] = np.nonzero(tables == number)
                own = self._own[number]
                positions = own.tree.find(sums[places] - (ends - totals)[number])
                rows[places], weights[places] = positions + own.base, own.tree.at(positions)
            return now, tables, rows, weights / totals.sum()

    def update(self, reader: Reader, tables: Ints, rows: Ints, priorities: Floats) -> None:
        """Set the priorities of ``rows``, which must be positive. Dropped rows are ignored."""
        with self._lock:
            self._cover(reader)
            for number, own in enumerate(self._own):
                mine = (tables == number) & (rows >= own.first) & (rows < own.end)
                if mine.any():
                    own.tree.set(rows[mine] - own.base, priorities[mine] ** own.exponent)
                    own.highest = max(own.highest, float(priorities[mine].max()))

    def states(self, reader: Reader) -> list[dict[str, Any]]:
        """Return each table's state for a checkpoint."""
        with self._lock:
            self._cover(reader)
            found = []
            for own in self._own:
                weights = own.tree.at(np.arange(own.first, own.end) - own.base)
                found.append({"first": own.first, "highest": own.highest, "weights": weights})
            return found

    def restore(self, reader: Reader, states: Sequence[dict[str, Any]]) -> None:
        """Restore the priorities from a checkpoint that holds the same rows."""
        with self._lock:
            self._own, self._epoch = [], reader.snapshot.epoch
            for state in states:
                own = TablePriorities(self.exponent)
                weights = np.asarray(state["weights"], np.float64)
                own.first = own.base = int(state["first"])
                own.end, own.highest = own.first + len(weights), float(state["highest"])
                own.tree = SumTree(len(weights))
                own.tree.set(np.arange(len(weights)), weights)
                self._own.append(own)

    def _cover(self, reader: Reader) -> Snapshot:
        """Give added rows a priority, forget dropped rows, and return the newest snapshot."""
        now = reader.snapshot
        if self._epoch != now.epoch:
            self._own, self._epoch = [], now.epoch
        del self._own[len(now.tables) :]
        for table in now.tables:
            if table.number == len(self._own):
                self._own.append(TablePriorities(self.exponent))
            self._own[table.number].cover(*now.spans[table.number])
        return now
