"""The key-value cache of the transformers sampler, whose rows hold conversations of different lengths.

`KeyValueStore` stores keys and values, one row for each conversation, so that a turn computes only its new tokens. A
`Feed` describes one forward pass: the tokens that it appends to some of the rows. These tokens are packed one after
another without padding. Only attention needs a grid ``[rows, columns]``, in which each row is padded on the left.

Entries of the store beyond a row's length have no effect: the attention mask hides them, and the row's next tokens
overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gleanrl.types import IntArray


class Feed:
    """The tokens that one forward pass appends to B rows of a `KeyValueStore`, as tensors on the model's device.

    The pass has N tokens in total, at most T in one row, and the longest row has E positions afterwards. The grid
    ``[B, T]`` has one line for each row, with the row's tokens at its right end.

    * ``tokens``, ``positions``, ``row_of``: int64[N], for each token its id, its position in the conversation and the
      index of its row in the store. The tokens of a row are consecutive.
    * ``last``: int64[B], the index among the N tokens of each row's last token.
    * ``cells``: int64[N], the index of each token in the flattened grid.
    * ``grid_positions``: int64[B, T], the position of the token in each cell; 0 in empty cells.
    * ``mask``: float32[B, T, E], added to attention scores: 0 for the keys at earlier positions and the token's own,
      -inf for others. An empty cell attends to position 0, because attention to no key at all gives NaN.

    Args:
        rows: indices of the B rows in the store.
        starts: number of tokens that each row has already.
        tokens: the new tokens of each row, at least one, int32[n].
        device: the model's device.
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
        # All index tensors are packed into one array, so that a single copy moves them to the device.
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
        """Select this feed's rows and the first E positions of a buffer of the store.

        ``buffer`` is ``[rows, heads, capacity, dim]``, the result ``[B, heads, E, dim]``. It is a view if the rows are
        adjacent.
        """
        if self._span is not None:
            return buffer[self._span[0] : self._span[1], :, : self.extent]
        return buffer[:, :, : self.extent].index_select(0, self._rows)

    def to_grid(self, packed: torch.Tensor) -> torch.Tensor:
        """Arrange a tensor of packed tokens ``[N, ...]`` as a grid ``[B, T, ...]``, with zeros in empty cells."""
        if self.full:
            return packed.view(self.size, self.columns, *packed.shape[1:])
        grid = packed.new_zeros(self.size * self.columns, *packed.shape[1:])
        return grid.index_copy_(0, self.cells, packed).view(self.size, self.columns, *packed.shape[1:])

    def from_grid(self, grid: torch.Tensor) -> torch.Tensor:
        """Pack a grid ``[B, T, ...]`` to ``[N, ...]``, leaving out empty cells. The inverse of `to_grid`."""
        flat = grid.reshape(self.size * self.columns, *grid.shape[2:])
        return flat if self.full else flat.index_select(0, self.cells)


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
        """Store the new keys and values of a layer, and return all keys and values of the feed's rows.

        ``keys`` and ``values`` are packed, ``[N, heads, dim]``. The results are ``[B, heads, E, dim]``.
        """
        if layer not in self._buffers:
            self._buffers[layer] = [
                new.new_zeros(self._rows, new.shape[1], self._capacity, new.shape[2]) for new in (keys, values)
            ]
        pair = self._buffers[layer]
        for buffer, new in zip(pair, (keys, values), strict=True):
            buffer[feed.row_of, :, feed.positions] = new
        return feed.select(pair[0]), feed.select(pair[1])

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` keys and values of row ``source`` to row ``target``, in all layers."""
        self.reserve(target + 1, length)
        for pair in self._buffers.values():
            for buffer in pair:
                buffer[target, :, :length] = buffer[source, :, :length]
