"""Stores keys and values of many conversations of different lengths, one row for each conversation.

A `Feed` holds the tokens that one forward pass appends to some of the rows. The tokens are packed one after
another without padding; only attention pads them to ``[rows, columns]``, aligned right. `KeyValueStore` keeps
the computed keys and values, so that a turn computes only its new tokens. Cells beyond a row's length are never
read: a mask hides them, and the next feed overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gleanrl.types import IntArray


class Feed:
    """The tokens that one forward pass appends, and the position of each.

    With ``N`` tokens for ``B`` rows, at most ``T`` for one row, and keys up to position ``E``:

    * ``tokens``, ``positions``, ``row_of``: int64[N], packed row by row; ``last``: int64[B], each row's last index;
    * ``cells``: int64[N], the index of each token in a right-aligned ``[B, T]`` grid;
    * ``mask``: float32[B, T, E], 0 where a query may attend and -inf elsewhere; an empty cell attends to position 0.
    """

    def __init__(
        self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[IntArray], device: torch.device
    ) -> None:
        counts = np.array([piece.size for piece in tokens], np.int64)
        ends = np.cumsum(counts)
        first = np.array(starts, np.int64)
        inside = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        positions = np.repeat(first, counts) + inside
        self.size = len(rows)
        self.columns = int(counts.max())
        self.extent = int((first + counts).max())
        cells = np.repeat(np.arange(self.size) * self.columns + self.columns - counts, counts) + inside
        grid = np.zeros(self.size * self.columns, np.int64)
        grid[cells] = positions
        # One host-to-device copy for everything.
        lengths = [ends[-1]] * 4 + [self.size, grid.size, self.size]
        row_of = np.repeat(np.array(rows, np.int64), counts)
        packed = np.concatenate([*tokens, positions, row_of, cells, ends - 1, grid, np.array(rows)], dtype=np.int64)
        parts = torch.from_numpy(packed).to(device, non_blocking=True).split([int(n) for n in lengths])
        self.tokens, self.positions, self.row_of, self.cells, self.last, grid_positions, self._rows = parts
        self.grid_positions = grid_positions.view(self.size, self.columns)
        self.full = int(ends[-1]) == self.size * self.columns
        hidden = torch.arange(self.extent, device=device) > self.grid_positions[:, :, None]
        self.mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
        low = rows[0]
        adjacent = rows[-1] - low + 1 == self.size and all(row == low + i for i, row in enumerate(rows))
        self._span = (low, low + self.size) if adjacent else None

    def select(self, buffer: torch.Tensor) -> torch.Tensor:
        """Select this feed's rows up to its extent: ``[rows, heads, capacity, dim]`` -> ``[B, heads, E, dim]``."""
        if self._span is not None:
            return buffer[self._span[0] : self._span[1], :, : self.extent]
        return buffer[:, :, : self.extent].index_select(0, self._rows)

    def to_grid(self, packed: torch.Tensor) -> torch.Tensor:
        """Convert ``[N, ...]`` to ``[B, T, ...]``, with zeros in empty cells."""
        if self.full:
            return packed.view(self.size, self.columns, *packed.shape[1:])
        grid = packed.new_zeros(self.size * self.columns, *packed.shape[1:])
        return grid.index_copy_(0, self.cells, packed).view(self.size, self.columns, *packed.shape[1:])

    def from_grid(self, grid: torch.Tensor) -> torch.Tensor:
        """Convert ``[B, T, ...]`` to ``[N, ...]``."""
        flat = grid.reshape(self.size * self.columns, *grid.shape[2:])
        return flat if self.full else flat.index_select(0, self.cells)


class KeyValueStore:
    """Growing buffers ``[rows, heads, capacity, dim]`` of keys and of values, one pair for each layer."""

    def __init__(self) -> None:
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self._rows, self._capacity = 1, 1

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` of ``length``. Contents are kept. Buffers grow by at least half, so rarely."""
        if rows <= self._rows and length <= self._capacity:
            return
        if rows > self._rows:
            self._rows = max(rows, self._rows * 3 // 2)
        if length > self._capacity:
            self._capacity = -(-max(length, self._capacity * 3 // 2) // 64) * 64
        for pair in self._buffers.values():
            for index, old in enumerate(pair):
                # Zeros, because a masked NaN would still spoil a weighted sum.
                pair[index] = old.new_zeros(self._rows, old.shape[1], self._capacity, old.shape[3])
                pair[index][: old.shape[0], :, : old.shape[2]] = old

    def append(
        self, layer: int, feed: Feed, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store packed keys and values ``[N, heads, dim]``; return all of the feed's rows, ``[B, heads, E, dim]``."""
        if layer not in self._buffers:
            self._buffers[layer] = [
                new.new_zeros(self._rows, new.shape[1], self._capacity, new.shape[2]) for new in (keys, values)
            ]
        pair = self._buffers[layer]
        for buffer, new in zip(pair, (keys, values), strict=True):
            buffer[feed.row_of, :, feed.positions] = new
        return feed.select(pair[0]), feed.select(pair[1])

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of row ``source`` to row ``target``."""
        self.reserve(target + 1, length)
        for pair in self._buffers.values():
            for buffer in pair:
                buffer[target, :, :length] = buffer[source, :, :length]
