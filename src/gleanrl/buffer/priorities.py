"""Priorities of rows for `Sampler.sample_prioritized` (Schaul et al. 2016, "Prioritized Experience Replay").

Each table has a sum tree, from which rows are drawn in logarithmic time.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.reader import Reader, Snapshot
from gleanrl.utils.errors import UserError

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
LEAST, MOST = 1e-100, 1e100  # limits of priority ** exponent; sums of larger weights could overflow


class SumTree:
    """A tree of weights, from which positions are drawn with probabilities in proportion to their weights.

    A node has the sum of the weights below it, and the highest of them.

    A node has 32 children, and the highest level has up to 8192 nodes, so the tree has few levels. All operations are
    vectorised: they process many positions together, one level after the other. Each such call takes microseconds
    whatever it does, so a binary tree would be slower. Sums are float64. With 2^30 positions, rounding shifts the
    limits between positions by about 1e-7 of a weight.
    """

    CHILDREN_BITS = 5
    CHILDREN = 1 << CHILDREN_BITS
    HIGHEST = 8192

    def __init__(self, capacity: int = 1024) -> None:
        # the weights of the positions, then for each level the sums of `CHILDREN` consecutive values of the one below
        self._sums: list[Tensor] = []
        while not self._sums or capacity > self.HIGHEST:
            capacity = -(-capacity // self.CHILDREN) if self._sums else max(1, capacity)
            self._sums.append(torch.zeros(-(-capacity // self.CHILDREN) * self.CHILDREN, dtype=torch.float64))
        # the same weights, then for each level the highest of `CHILDREN` consecutive values of the one below
        self._maxima = [self._sums[0], *(torch.zeros_like(level) for level in self._sums[1:])]
        self._weights: Floats = self._sums[0].numpy()
        self.capacity = len(self._weights)

    @property
    def total(self) -> float:
        return float(self._sums[-1].sum())

    @property
    def highest(self) -> float:
        """The highest weight."""
        return float(self._maxima[-1].max())

    def at(self, positions: Ints) -> Floats:
        """Return the weights of ``positions``."""
        return self._weights[positions]

    def set(self, positions: Ints, weights: Floats | float) -> None:
        """Set the weights of ``positions``. If a position occurs twice, the last weight is used."""
        self._weights[positions] = weights
        for i in range(1, len(self._sums)):
            positions = positions >> self.CHILDREN_BITS
            if len(positions) > self.HIGHEST:  # consecutive positions, as of many new rows, have few different parents
                positions = positions[np.flatnonzero(np.diff(positions, prepend=-1))]
            nodes = torch.from_numpy(positions)
            below = self._sums[i - 1].view(-1, self.CHILDREN).index_select(0, nodes)
            self._sums[i].index_copy_(0, nodes, below.sum(dim=1))
            if i > 1:
                below = self._maxima[i - 1].view(-1, self.CHILDREN).index_select(0, nodes)
            self._maxima[i].index_copy_(0, nodes, below.amax(dim=1))

    def find(self, sums: Floats) -> Ints:
        """Return for each of ``sums``, in [0, total), the first position at which the cumulative weight exceeds it."""
        ends = self._sums[-1].cumsum(0).numpy()
        # without the minimum, rounding errors could lead behind the last position that has a weight
        left = np.minimum(sums, np.nextafter(ends[-1], 0.0))
        nodes = ends.searchsorted(left, side="right")
        before = np.where(nodes, ends[nodes - 1], 0.0)
        for level in self._sums[-2::-1]:
            # torch has a faster cumulative sum of rows than NumPy, and a binary search in each row
            cumulative = torch.from_numpy(level.numpy().reshape(-1, self.CHILDREN).take(nodes, axis=0)).cumsum(1)
            ends = cumulative.numpy()
            left = np.minimum(left - before, np.nextafter(ends[:, -1], 0.0))
            child = torch.searchsorted(cumulative, torch.from_numpy(left[:, None]), right=True).numpy()[:, 0]
            if level is not self._sums[0]:
                before = np.where(child, ends[np.arange(len(nodes)), child - 1], 0.0)
            nodes = (nodes << self.CHILDREN_BITS) + child
        return nodes


class TablePriorities:
    """The weights of the rows of one table. A row is drawn with a probability in proportion to its weight."""

    def __init__(self) -> None:
        self.first = self.end = 0  # the rows from `first` to `end` - 1 have a priority
        self.tree = SumTree()
        self.base = 0  # number of the row at position 0 of the tree

    def keep(self, first: int, end: int) -> None:
        """Remove the priorities of all rows that are not among the rows from ``first`` to ``end`` - 1."""
        end = max(first, min(end, self.end))
        if (first, end) == (self.first, self.end):
            return
        if first - self.base > max(self.tree.capacity // 2, end - first):
            kept = np.arange(max(first, self.first), self.end)
            weights = self.tree.at(kept - self.base)
            self.tree, self.base = SumTree(end - first), first
            self.tree.set(kept - first, weights)
        elif first > self.first:
            self.tree.set(np.arange(self.first, min(first, self.end)) - self.base, 0.0)
        if end < self.end:
            self.tree.set(np.arange(max(end, self.first), self.end) - self.base, 0.0)
        self.first, self.end = first, end

    def extend(self, end: int, weight: float) -> None:
        """Give ``weight`` to all rows from ``self.end`` to ``end`` - 1."""
        if end - self.base > self.tree.capacity:
            smaller, self.tree = self.tree, SumTree(max(end - self.base, 2 * self.tree.capacity))
            every = np.arange(smaller.capacity)
            self.tree.set(every, smaller.at(every))
        self.tree.set(np.arange(self.end, end) - self.base, weight)
        self.end = end


class Priorities:
    """The priorities of the rows of all tables. Any thread may call the methods.

    The weight of a row is priority ** ``exponent`` (alpha in the paper).

    All priorities are reset when the buffer's content is replaced. Every method uses the newest snapshot of the reader.
    With an older snapshot, a thread would remove the priorities of rows which another thread has added since.
    """

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent
        self._own: list[TablePriorities] = []  # priorities of each table, by its number
        self._epoch: Hashable = None
        self.lock = threading.Lock()

    def draw(self, reader: Reader, drawn: Floats) -> tuple[Snapshot, list[tuple[int, Ints | slice, Ints]], Floats]:
        """Draw a row for each of the uniform random numbers ``drawn``, ``[n]`` in [0, 1), with replacement.

        Returns:
            The snapshot from which the rows were drawn; for each table from which there are any, its number, the places
            of its rows in the draw (a slice if these are all), and the rows; and the probabilities ``[n]`` with which
            the rows were drawn.

        Raises:
            UserError: there are no rows.
        """
        with self.lock:
            now = self._cover(reader)
            totals = [own.tree.total for own in self._own]
            whole = sum(totals)
            if not whole:
                raise UserError("the buffer is empty")
            sums, probabilities, before = drawn * whole, np.empty(len(drawn)), 0.0
            found = list[tuple[int, Ints | slice, Ints]]()
            for number, (own, total) in enumerate(zip(self._own, totals, strict=True)):
                places: Ints | slice = slice(None)
                if total < whole:
                    end = before + total if any(totals[number + 1 :]) else np.inf
                    places = np.flatnonzero((sums >= before) & (sums < end))
                if total and (isinstance(places, slice) or len(places)):
                    positions = own.tree.find(sums[places] - before)
                    probabilities[places] = own.tree.at(positions) / whole
                    found.append((number, places, positions + own.base))
                before += total
            return now, found, probabilities

    def update(self, reader: Reader, tables: Ints, rows: Ints, priorities: Floats) -> None:
        """Set the priorities of rows. Rows that were dropped are ignored.

        Args:
            reader: the reader of the rows.
            tables, rows: ``[n]``, the number of the table and the row in this table.
            priorities: ``[n]``.

        Raises:
            UserError: a priority is not positive, or priority ** exponent is not between `LEAST` and `MOST`.
        """
        with np.errstate(all="ignore"):
            weights = priorities**self.exponent
        right = (priorities > 0) & (weights >= LEAST) & (weights <= MOST)
        if not right.all():
            allowed = f"a positive number whose power {self.exponent:g} is from {LEAST:g} to {MOST:g}"
            raise UserError(f"the priority {priorities[~right][0]:g}: a priority is {allowed}")
        with self.lock:
            self._cover(reader)
            for number, own in enumerate(self._own):
                mine = (tables == number) & (rows >= own.first) & (rows < own.end)
                if mine.any():
                    own.tree.set(rows[mine] - own.base, weights[mine])

    def states(self, reader: Reader) -> list[dict[str, Any]]:
        """Return the state of each table's priorities, for a checkpoint."""
        with self.lock:
            self._cover(reader)
            found = []
            for own in self._own:
                weights = own.tree.at(np.arange(own.first, own.end) - own.base)
                found.append({"first": own.first, "weights": weights})
            return found

    def restore(self, reader: Reader, states: Sequence[dict[str, Any]]) -> None:
        """Restore the priorities from a checkpoint that has the same rows."""
        with self.lock:
            self._own, self._epoch = [], reader.snapshot.epoch
            for state in states:
                own = TablePriorities()
                weights = np.asarray(state["weights"], np.float64)
                own.first = own.base = int(state["first"])
                own.end = own.first + len(weights)
                own.tree = SumTree(len(weights))
                own.tree.set(np.arange(len(weights)), weights)
                self._own.append(own)

    def _cover(self, reader: Reader) -> Snapshot:
        """Add rows that are new in the newest snapshot, remove dropped rows, and return the snapshot.

        New rows get the highest weight of the other rows of all tables, so that each of them is drawn soon, or 1 if
        there are none.
        """
        now = reader.snapshot
        if self._epoch != now.epoch:
            self._own, self._epoch = [], now.epoch
        del self._own[len(now.tables) :]
        for table in now.tables:
            if table.number == len(self._own):
                self._own.append(TablePriorities())
            self._own[table.number].keep(*now.spans[table.number])
        grown = [(own, end) for own, (_, end) in zip(self._own, now.spans, strict=True) if end > own.end]
        if grown:
            highest = max(own.tree.highest for own in self._own)
            for own, end in grown:
                own.extend(end, highest or 1.0)
        return now
