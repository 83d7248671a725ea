"""The key-value cache of the transformers sampler, whose rows hold conversations of different lengths.

`KeyValueStore` stores keys and values, one row for each conversation, so that a turn computes only its new tokens. A
`Feed` describes one forward pass: the tokens that it appends to some of the rows. These tokens are packed one after
another without padding. Only attention needs grids: a `Grid` has a line for each of some rows, padded on the left.

Entries of the store beyond a row's length have no effect: the attention mask hides them, and the row's next tokens
overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from gleanrl.types import IntArray


class Grid:
    """The tokens that a forward pass appends to L rows of a `KeyValueStore`, as a grid ``[L, T]`` for attention.

    A row gets at most T tokens, and the longest has E positions afterwards. A row's tokens are at the right end of its
    line. The tensors are on the model's device:

    * ``tokens``: which of the pass's packed tokens belong to the grid. There are N of them.
    * ``positions``: int64[L, T], the position of the token in each cell; 0 in empty cells.
    * ``mask``: float32[L, T, E], added to attention scores: 0 for the keys at earlier positions and the token's own,
      -inf for others. An empty cell attends to position 0, because attention to no key at all gives NaN.

    Args:
        tokens: see above.
        lines: row of the store for each line, in ascending order.
        rows: int64, the rows that get tokens, in ascending order. Lines of other rows have empty cells only.
        starts: int64, number of tokens that each of ``rows`` has already.
        counts: int64, number of new tokens of each of ``rows``.
        device: the model's device.
    """

    def __init__(
        self,
        tokens: slice,
        lines: Sequence[int],
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        device: torch.device,
    ) -> None:
        self.tokens, self.size, self.columns = tokens, len(lines), int(counts.max())
        self.extent = int((starts + counts).max())
        ends = np.cumsum(counts)
        inside = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        line = np.searchsorted(np.asarray(lines), rows)
        cells = np.repeat((line + 1) * self.columns - counts, counts) + inside
        positions = np.zeros(self.size * self.columns, np.int64)
        positions[cells] = np.repeat(starts, counts) + inside
        # All index tensors are packed into one array, so that a single copy moves them to the device.
        packed = torch.from_numpy(np.concatenate([cells, positions, lines], dtype=np.int64))
        parts = packed.to(device, non_blocking=True).split([cells.size, positions.size, self.size])
        self._cells, self._lines = parts[0], parts[2]
        self.positions = parts[1].view(self.size, self.columns)
        self._full = cells.size == positions.size
        hidden = torch.arange(self.extent, device=device) > self.positions[:, :, None]
        self.mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
        low, high = lines[0], lines[-1] + 1
        self._span = (low, high) if high - low == self.size else None

    def select(self, buffer: torch.Tensor) -> torch.Tensor:
        """Select this grid's rows and the first E positions of a buffer of the store.

        ``buffer`` is ``[rows, heads, capacity, dim]``, the result ``[L, heads, E, dim]``. It is a view if the lines are
        adjacent rows.
        """
        if self._span is not None:
            return buffer[self._span[0] : self._span[1], :, : self.extent]
        return buffer[:, :, : self.extent].index_select(0, self._lines)

    def arrange(self, packed: torch.Tensor) -> torch.Tensor:
        """Arrange a tensor of this grid's packed tokens ``[N, ...]`` as ``[L, T, ...]``, with zeros in empty cells."""
        if self._full:
            return packed.view(self.size, self.columns, *packed.shape[1:])
        grid = packed.new_zeros(self.size * self.columns, *packed.shape[1:])
        return grid.index_copy_(0, self._cells, packed).view(self.size, self.columns, *packed.shape[1:])

    def pack(self, grid: torch.Tensor) -> torch.Tensor:
        """Pack a tensor ``[L, T, ...]`` to ``[N, ...]``, leaving out empty cells. The inverse of `arrange`."""
        flat = grid.reshape(self.size * self.columns, *grid.shape[2:])
        return flat if self._full else flat.index_select(0, self._cells)


class Feed:
    """The tokens that one forward pass appends to B rows of a `KeyValueStore`.

    The pass has N tokens in total, and the longest row has ``extent`` positions afterwards. The tensors are on the
    model's device:

    * ``tokens``, ``positions``, ``row_of``: int64[N], for each token its id, its position in the conversation and the
      index of its row in the store. The tokens of a row are consecutive.
    * ``last``: int64[B], the index among the N tokens of each row's last token.

    Args:
        rows: indices of the B rows in the store, in ascending order.
        starts: number of tokens that each row has already.
        tokens: the new tokens of each row, at least one, int32[n].
        device: the model's device.
    """

    def __init__(
        self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[IntArray], device: torch.device
    ) -> None:
        self._rows, self._starts = np.array(rows, np.int64), np.array(starts, np.int64)
        self._counts = np.array([piece.size for piece in tokens], np.int64)
        self._device = device
        self.size, self.extent = len(rows), int((self._starts + self._counts).max())
        ends = np.cumsum(self._counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - self._counts - self._starts, self._counts)
        packed = np.concatenate(
            [*tokens, positions, np.repeat(self._rows, self._counts), ends - 1], dtype=np.int64
        )  # one array, so that a single copy moves it to the device
        parts = torch.from_numpy(packed).to(device, non_blocking=True).split([int(ends[-1])] * 3 + [self.size])
        self.tokens, self.positions, self.row_of, self.last = parts

    @cached_property
    def grid(self) -> Grid:
        """All tokens in one grid, with a line for each row of the feed."""
        every = slice(0, int(self._counts.sum()))
        return Grid(every, self._rows.tolist(), self._rows, self._starts, self._counts, self._device)

    def grids(self, waste: int, *, last: bool = False) -> list[Grid]:
        """Split the rows into grids of adjacent rows, for which `Grid.select` copies nothing.

        Rows between two rows of the feed are lines without tokens. A grid is extended by the feed's next row as long as
        this adds at most ``waste`` pairs of a cell and a key that are not needed.

        Args:
            waste: see above.
            last: whether the grids have only the last token of each row.
        """
        counts = np.ones_like(self._counts) if last else self._counts
        extents, ends = self._starts + self._counts, np.cumsum(counts)
        parts: list[Grid] = []
        begin = columns = extent = cells = 0
        for index, (row, count, length) in enumerate(
            zip(self._rows.tolist(), counts.tolist(), extents.tolist(), strict=True)
        ):
            wider, longer = max(columns, count), max(extent, length)
            lines = row - int(self._rows[begin]) + 1
            if lines * wider * longer - cells - count * length > waste:
                parts.append(self._part(begin, index, counts, ends))
                begin, lines, wider, longer = index, 1, count, length
            columns, extent, cells = wider, longer, lines * wider * longer
        return [*parts, self._part(begin, self.size, counts, ends)]

    def _part(self, begin: int, stop: int, counts: np.ndarray, ends: np.ndarray) -> Grid:
        """Return the grid of the feed's rows from ``begin`` to ``stop``, each with its last ``counts`` tokens."""
        rows, counts = self._rows[begin:stop], counts[begin:stop]
        starts = (self._starts + self._counts)[begin:stop] - counts
        tokens = slice(int(ends[begin] - counts[0]), int(ends[stop - 1]))
        return Grid(tokens, range(int(rows[0]), int(rows[-1]) + 1), rows, starts, counts, self._device)


class KeyValueStore:
    """Stores the keys and values of all conversations, in one pair of buffers for each layer.

    A buffer is ``[rows, heads, capacity, dim]``; ``capacity`` is a number of tokens. Buffers grow as needed.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self._rows, self._capacity = 1, 1

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` rows of ``length`` tokens each. Stored keys and values are kept.

        A buffer that is too small grows by at least half of its size, so that it is copied rarely.
        """
        if rows <= self._rows and length <= self._capacity:
            return
        if rows > self._rows:
            self._rows = max(rows, self._rows * 3 // 2)
        if length > self._capacity:
            self._capacity = -(-max(length, self._capacity * 3 // 2) // 64) * 64
        for pair in self._buffers.values():
            for index, old in enumerate(pair):
                # New memory is set to zero, because it could contain NaN, and 0 * NaN is NaN: masked values enter the
                # weighted sum of attention with weight 0.
                pair[index] = old.new_zeros(self._rows, old.shape[1], self._capacity, old.shape[3])
                pair[index][: old.shape[0], :, : old.shape[2]] = old

    def append(
        self, layer: int, feed: Feed, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values of a layer, and return its buffers, for `Grid.select`.

        ``keys`` and ``values`` are packed, ``[N, heads, dim]``.
        """
        if layer not in self._buffers:
            self._buffers[layer] = [
                new.new_zeros(self._rows, new.shape[1], self._capacity, new.shape[2]) for new in (keys, values)
            ]
        pair = self._buffers[layer]
        for buffer, new in zip(pair, (keys, values), strict=True):
            buffer[feed.row_of, :, feed.positions] = new
        return pair[0], pair[1]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` keys and values of row ``source`` to row ``target``, in all layers."""
        self.reserve(target + 1, length)
        for pair in self._buffers.values():
            for buffer in pair:
                buffer[target, :, :length] = buffer[source, :, :length]
