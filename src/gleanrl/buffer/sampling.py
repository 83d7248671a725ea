"""Samples of a store: chunk steps, runs of them, and what follows in n steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer import drawing
from gleanrl.buffer.drawing import Ranges
from gleanrl.buffer.priorities import Ranking
from gleanrl.buffer.readable import Readable, Rowed, Snapshot
from gleanrl.buffer.schema import INSTRUCTION, LEFT, Schema
from gleanrl.buffer.table import visible
from gleanrl.buffer.trajectory import INSTRUCTIONS, Path, put
from gleanrl.buffer.windows import Only, Windows
from gleanrl.errors import UserError

Batch = dict[str, Any]  # tensors [n, ...] by name; observations nested; task_descriptions a list of str
Pieces = Sequence[tuple[int, Tensor, Tensor]]  # number of a table, places in the batch, rows of the table
P = ParamSpec("P")
TABLE_BIT = 48  # an index is the table's number in the high bits and the row's in the low ones


def _holding(method: Callable[Concatenate[Sampler, Snapshot, P], Batch]) -> Callable[Concatenate[Sampler, P], Batch]:
    """On what is there now, all of which stays until it is read; the method gets it and looks at nothing else."""

    @wraps(method)
    def run(self: Sampler, *args: P.args, **kwargs: P.kwargs) -> Batch:
        self.store.refresh()
        with self.store.held() as now:
            return method(self, now, *args, **kwargs)

    return run


class Sampler:
    """Draws rows of the newest ``window`` trajectories (0 = all) and reads them."""

    def __init__(self, store: Readable, window: int, generator: torch.Generator, exponent: float | None = None) -> None:
        self.store, self.window, self.generator = store, window, generator
        self._windows = Windows()
        self.ranking = None if exponent is None else Ranking(exponent)

    def count_rows(self) -> int:
        """Rows of the window."""
        self.store.refresh()
        with self.store.held() as now:
            return sum(own.total for own in self._windows.ranges(now, self.window, None))

    @_holding
    def sample(
        self,
        now: Snapshot,
        num_chunks: int,
        *,
        only: Only | None = None,
        fields: Collection[str] | None = None,
        allow_short: bool = False,
        indices: bool = False,
    ) -> Batch:
        """Chunk steps, uniform with replacement over the rows of the window, as ``[num_chunks, ...]``.

        Args:
            num_chunks: how many.
            only: conditions on them.
            fields: ``actions``, ``curr_obs.image``, a whole ``curr_obs``; by default all that the trajectories share.
            allow_short: give fewer where the window has fewer rows; by default that is an error.
            indices: add ``indices`` int64 [n], which `read` takes.

        Raises:
            UserError: the window has too few rows, nothing meets the conditions, or a field is missing.
        """
        ranges = self._windows.ranges(now, self.window, only)
        total = sum(own.total for own in ranges)
        if not total and only is not None:
            raise UserError("no row of the buffer meets the conditions")
        if num_chunks > total:
            if not allow_short or not total:
                raise UserError(
                    f"{num_chunks} chunk steps asked for, the window has {total}; allow_short=True takes less"
                )
            num_chunks = total
        accept = _accept(now, only)
        positions = drawing.draw(num_chunks, ranges, accept, self.generator)
        return _gather(now, positions, ranges, fields, indices=indices)

    @_holding
    def sample_slices(
        self,
        now: Snapshot,
        num_slices: int,
        length: int,
        *,
        only: Only | None = None,
        fields: Collection[str] | None = None,
    ) -> Batch:
        """Runs of ``length`` chunk steps inside one episode, ``[num_slices, length, ...]``, uniform over all of them.

        Raises:
            UserError: there is none that long.
        """
        ranges = self._windows.ranges(now, self.window, only)
        if not sum(own.total for own in ranges):
            raise UserError("the buffer is empty")
        conditions = _accept(now, only)

        def accept(table: int, rows: Tensor) -> Tensor:
            long = now.tables[table].read(rows, [LEFT])[LEFT] >= length
            return long if conditions is None else long & conditions(table, rows)

        positions = drawing.draw(num_slices, ranges, accept, self.generator)
        found = []
        for own, places, rows in drawing.pieces(positions, ranges):
            runs = _run(now, own.table, rows, torch.full_like(rows, length))
            found.append((own.table, (places[:, None] * length + torch.arange(length)).reshape(-1), runs.reshape(-1)))
        return _reshaped(_read(now, found, num_slices * length, fields), num_slices, length)

    @_holding
    def sample_n_step(self, now: Snapshot, num_chunks: int, n: int, gamma: float, *, only: Only | None = None) -> Batch:
        """As `sample`, with what follows in up to ``n`` chunk steps of the same episode.

        ``next_obs`` is then the observation after the last of them; ``n_step_rewards`` float32 [num_chunks] the rewards
        on the way, each discounted by ``gamma`` for every chunk step before it (a chunk's C rewards are summed);
        ``n_step_discounts`` float32 [num_chunks] what the value of ``next_obs`` counts: gamma to the number of steps,
        and 0 where the episode was terminated.
        """
        if n < 1:
            raise UserError(f"n = {n}: at least one chunk step")
        ranges = self._windows.ranges(now, self.window, only)
        if not sum(own.total for own in ranges):
            raise UserError("the buffer is empty")
        positions = drawing.draw(num_chunks, ranges, _accept(now, only), self.generator)
        batch = _gather(now, positions, ranges, None)
        rewards, discounts = torch.zeros(num_chunks), torch.zeros(num_chunks)
        last: list[tuple[int, Tensor, Tensor]] = []
        for own, places, rows in drawing.pieces(positions, ranges):
            table = now.tables[own.table]
            left = table.read(rows, [LEFT])[LEFT].long().clamp(max=n)
            runs = _run(now, own.table, rows, left)
            given = _read_if_there(table, runs.reshape(-1), ("rewards",))
            if given is None:
                raise UserError("rewards: the trajectories have none")
            steps = torch.arange(runs.shape[1])
            weights = torch.where(steps < left[:, None], gamma**steps, 0.0)
            rewards[places] = (given.sum(dim=1).reshape(runs.shape) * weights).sum(dim=1).float()
            ends = runs[:, -1]
            ended = _read_if_there(table, ends, ("terminations",))
            goes_on = 1.0 if ended is None else (~ended.bool().any(dim=1)).float()
            discounts[places] = gamma ** left.float() * goes_on
            last.append((own.table, places, ends))
        batch |= _read(now, last, num_chunks, ["next_obs"])
        return {**batch, "n_step_rewards": rewards, "n_step_discounts": discounts}

    @_holding
    def sample_prioritized(
        self, now: Snapshot, num_chunks: int, beta: float, *, fields: Collection[str] | None = None
    ) -> Batch:
        """Chunk steps drawn in proportion to priority ** exponent, over all that is kept (no window).

        Adds ``indices`` int64 [n] for `update_priorities`, and ``weights`` float32 [n]: (rows * probability) ** -beta,
        divided by the largest of the batch.

        Raises:
            UserError: the buffer is empty, or was made without ``priority_exponent``.
        """
        drawn = torch.rand(num_chunks, generator=self.generator, dtype=torch.float64).numpy()
        now, tables, rows, chances = self._ranking().draw(self.store, drawn)
        found = []
        for number in np.unique(tables):
            [places] = np.nonzero(tables == number)
            found.append((int(number), torch.from_numpy(places), torch.from_numpy(rows[places])))
        indices = rows + (tables << TABLE_BIT)
        corrections = (now.count_rows() * chances) ** -beta
        batch = _read(now, found, num_chunks, fields)
        weights = torch.from_numpy(corrections / corrections.max()).float()
        return {**batch, "indices": torch.from_numpy(indices), "weights": weights}

    def update_priorities(self, indices: Tensor, priorities: Tensor) -> None:
        """New priorities (positive, finite) of the chunk steps with these indices; those evicted are passed over."""
        values = priorities.detach().double().cpu().numpy().reshape(-1)
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise UserError("priorities are positive and finite")
        places = indices.cpu().numpy()
        self.store.refresh()
        with self.store.held():
            self._ranking().update(self.store, places >> TABLE_BIT, places & ((1 << TABLE_BIT) - 1), values)

    def _ranking(self) -> Ranking:
        if self.ranking is None:
            raise UserError("the buffer keeps no priorities; make it with priority_exponent, e.g. 0.6")
        return self.ranking

    @_holding
    def read(self, now: Snapshot, indices: Tensor, fields: Collection[str] | None = None) -> Batch:
        """The chunk steps with these ``indices``, as `sample` gives them. Raises `UserError` where one is gone."""
        found = []
        for table in now.tables:
            [places] = torch.where(indices >> TABLE_BIT == table.number)
            rows = indices[places] & ((1 << TABLE_BIT) - 1)
            first, end = now.rows(table.number)
            if len(rows) and (int(rows.min()) < first or int(rows.max()) >= end):
                raise UserError("an index points to a chunk step that was evicted or never was")
            if len(rows):
                found.append((table.number, places, rows))
        if sum(len(places) for _, places, _ in found) != len(indices):
            raise UserError("an index points to a chunk step that was evicted or never was")
        return _read(now, found, len(indices), fields)


# --- which rows ------------------------------------------------------------------------------------
def _accept(now: Snapshot, only: Only | None) -> drawing.Accept | None:
    """Conditions on single rows."""
    if only is None or (only.intervened is None and only.versions is None):
        return None

    def accept(number: int, rows: Tensor) -> Tensor:
        table, found = now.tables[number], torch.ones(len(rows), dtype=torch.bool)
        if only.intervened is not None:
            flags = _read_if_there(table, rows, ("intervene_flags",))
            found &= (torch.zeros_like(found) if flags is None else flags.any(dim=1)) == only.intervened
        if only.versions is not None:
            low, high = only.versions
            versions = _read_if_there(table, rows, ("versions",))
            found &= torch.zeros_like(found) if versions is None else ((versions >= low) & (versions <= high)).all(1)
        return found

    return accept


def _run(now: Snapshot, table: int, rows: Tensor, left: Tensor) -> Tensor:
    """int64 ``[n, left.max()]``: each row and those that follow it; beyond ``left`` the last one again."""
    ids = now.index(table).holding(rows.numpy())
    batch = torch.from_numpy(now.records_of(ids)["batch"].astype(np.int64))
    steps = torch.arange(int(left.max())).expand(len(rows), -1)
    return rows[:, None] + batch[:, None] * torch.minimum(steps, left[:, None] - 1)


# --- what is in them -------------------------------------------------------------------------------
def _gather(
    now: Snapshot,
    positions: Tensor,
    ranges: Sequence[Ranges],
    fields: Collection[str] | None,
    *,
    indices: bool = False,
) -> Batch:
    found = [(own.table, places, rows) for own, places, rows in drawing.pieces(positions, ranges)]
    batch = _read(now, found, len(positions), fields)
    if indices:
        numbers = torch.empty(len(positions), dtype=torch.int64)
        for table, places, rows in found:
            numbers[places] = rows + (table << TABLE_BIT)
        batch["indices"] = numbers
    return batch


def _read(now: Snapshot, found: Pieces, count: int, fields: Collection[str] | None) -> Batch:
    """Rows of one or several tables as one batch."""
    tables = [now.tables[number] for number, _, _ in found]
    paths = _chosen(tuple(table.schema for table in tables), None if fields is None else tuple(fields))
    instructed = fields is None and now.instructed is not False
    read = (*paths, INSTRUCTION) if instructed else paths
    parts = [(places, table.read(rows, read)) for table, (_, places, rows) in zip(tables, found, strict=True)]
    columns = parts[0][1] if len(parts) == 1 else _merged(parts, count)
    batch: Batch = {}
    for path in paths:
        put(batch, path, columns[path])
    if instructed:
        texts = columns[INSTRUCTION].tolist()
        known = {number: now.instruction(number) for number in set(texts) if number >= 0}
        if known:
            batch[INSTRUCTIONS] = [known.get(number, "") for number in texts]
    return batch


@lru_cache(maxsize=256)
def _chosen(schemas: tuple[Schema, ...], fields: tuple[str, ...] | None) -> tuple[Path, ...]:
    """The fields to read. Raises `UserError` where a table lacks one that was named."""
    shared = [p for p in visible(schemas[0]) if all(p in visible(schema) for schema in schemas[1:])]
    if fields is None:
        return tuple(shared)
    chosen = []
    for name in fields:
        own = [path for path in shared if name in (".".join(path), path[0])]
        if not own:
            raise UserError(f"{name}: not every trajectory of the sample has it; they share {_names(shared)}")
        chosen += own
    return tuple(dict.fromkeys(chosen))


def _merged(parts: Sequence[tuple[Tensor, dict[Path, Tensor]]], count: int) -> dict[Path, Tensor]:
    """Rows of several tables in their places. Raises `UserError` where a field changed its type or shape."""
    merged = {}
    for path, first in parts[0][1].items():
        for _, columns in parts[1:]:
            if columns[path].dtype != first.dtype or columns[path].shape[1:] != first.shape[1:]:
                told = " and ".join(f"{list(own.shape[1:])} {own.dtype}" for own in (first, columns[path]))
                raise UserError(f"{'.'.join(path)}: {told} in one batch; sample a window that holds one of both")
        out = torch.empty(count, *first.shape[1:], dtype=first.dtype)
        for places, columns in parts:
            out[places] = columns[path]
        merged[path] = out
    return merged


def _read_if_there(table: Rowed, rows: Tensor, path: Path) -> Tensor | None:
    """``[n, values of the row]``, or None where the table has no such field."""
    return table.read(rows, [path])[path].reshape(len(rows), -1) if path in visible(table.schema) else None


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(".".join(path) for path in paths) or "nothing"


def _reshaped(batch: Any, *shape: int) -> Any:
    """The leading dimension of each tensor as ``shape``; lists are cut likewise."""
    if isinstance(batch, dict):
        return {name: _reshaped(value, *shape) for name, value in batch.items()}
    if isinstance(batch, Tensor):
        return batch.reshape(*shape, *batch.shape[1:])
    return [batch[i : i + shape[1]] for i in range(0, len(batch), shape[1])]
