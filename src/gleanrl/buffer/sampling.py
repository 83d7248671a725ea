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
from gleanrl.buffer.stream import Stream
from gleanrl.buffer.table import visible
from gleanrl.buffer.trajectory import FLAGS, INSTRUCTIONS, Path, put
from gleanrl.buffer.windows import Only, Windows
from gleanrl.utils.errors import UserError

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
        self.stream = Stream(generator)
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
            fields: ``actions``, ``curr_obs.image``, a whole ``curr_obs``, ``task_descriptions``; by default all
                that the trajectories of the window share.
            allow_short: give no more than there are rows in the window that meet the conditions; by default it is an
                error to ask for more.
            indices: add ``indices`` int64 [n], which `read` takes.

        Raises:
            UserError: there are too few rows, nothing meets the conditions, or a field is missing.
        """
        _check("num_chunks", num_chunks)
        ranges = self._windows.ranges(now, self.window, only)
        total = sum(own.total for own in ranges)
        if not total and only is not None:
            raise UserError("no row of the buffer meets the conditions")
        if num_chunks > total and (not allow_short or not total):
            raise _short(num_chunks, f"the window has {total}")
        positions = drawing.draw_no_more(num_chunks, total, ranges, _accept(now, only), self.generator)
        if len(positions) < num_chunks and not allow_short:
            raise _short(num_chunks, f"{len(positions)} of the window meet the conditions")
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
        _check("num_slices", num_slices)
        _check("length", length)
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
        return _reshaped(_read(now, found, num_slices * length, fields, _tables(ranges)), num_slices, length)

    @_holding
    def sample_n_step(self, now: Snapshot, num_chunks: int, n: int, gamma: float, *, only: Only | None = None) -> Batch:
        """As `sample`, with what follows in up to ``n`` chunk steps of the same episode.

        Any number may be asked for. ``next_obs`` is then the observation after the last of them; ``n_step_rewards``
        float32 [num_chunks] the rewards on the way, each discounted by ``gamma`` for every chunk step before it (a
        chunk's rewards up to the end of its episode are summed); ``n_step_discounts`` float32 [num_chunks] what the
        value of ``next_obs`` counts: gamma to the number of steps, and 0 where the episode was terminated. Without
        ``terminations`` that is where it is done and not truncated.
        """
        _check("num_chunks", num_chunks)
        _check("n", n)
        ranges = self._windows.ranges(now, self.window, only)
        if not sum(own.total for own in ranges):
            raise UserError("the buffer is empty")
        among = _tables(ranges)
        _fields(now, among, ("rewards", "next_obs"))
        positions = drawing.draw(num_chunks, ranges, _accept(now, only), self.generator)
        batch = _gather(now, positions, ranges, None)
        rewards, discounts = torch.zeros(num_chunks), torch.zeros(num_chunks)
        last: list[tuple[int, Tensor, Tensor]] = []
        for own, places, rows in drawing.pieces(positions, ranges):
            table = now.tables[own.table]
            left = table.read(rows, [LEFT])[LEFT].long().clamp(max=n)
            runs = _run(now, own.table, rows, left)
            given, terminated = _rewards(table, runs, left)
            steps = torch.arange(runs.shape[1])
            weights = torch.where(steps < left[:, None], gamma**steps, 0.0)
            rewards[places] = (given * weights).sum(dim=1).float()
            discounts[places] = gamma ** left.float() * ~terminated
            last.append((own.table, places, runs[:, -1]))
        batch |= _read(now, last, num_chunks, ("next_obs",), among)
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
        _check("num_chunks", num_chunks)
        drawn = torch.rand(num_chunks, generator=self.generator, dtype=torch.float64).numpy()
        now, tables, rows, chances = self._ranking().draw(self.store, drawn)
        found = []
        for number in np.unique(tables):
            [places] = np.nonzero(tables == number)
            found.append((int(number), torch.from_numpy(places), torch.from_numpy(rows[places])))
        indices = rows + (tables << TABLE_BIT)
        corrections = (now.count_rows() * chances) ** -beta
        kept = [table.number for table in now.tables if len(range(*now.rows(table.number)))]
        batch = _read(now, found, num_chunks, fields, kept)
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
        return _read(now, found, len(indices), fields, [table for table, _, _ in found])


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
    batch = _read(now, found, len(positions), fields, _tables(ranges))
    if indices:
        numbers = torch.empty(len(positions), dtype=torch.int64)
        for table, places, rows in found:
            numbers[places] = rows + (table << TABLE_BIT)
        batch["indices"] = numbers
    return batch


def _read(now: Snapshot, found: Pieces, count: int, fields: Collection[str] | None, among: Collection[int]) -> Batch:
    """Rows of one or several tables as one batch, with what the tables ``among`` share: no draw changes its fields."""
    paths = _fields(now, among, fields)
    asked, there = fields is not None and INSTRUCTIONS in fields, now.instructed
    instructed = asked or (fields is None and there is not False)
    read = (*paths, INSTRUCTION) if instructed else paths
    parts = [(places, now.tables[number].read(rows, read)) for number, places, rows in found]
    columns = parts[0][1] if len(parts) == 1 else _merged(parts, count)
    batch: Batch = {}
    for path in paths:
        put(batch, path, columns[path])
    if instructed:
        texts = columns[INSTRUCTION].tolist()
        known = {number: now.instruction(number) for number in set(texts) if number >= 0}
        if known or asked or there:
            batch[INSTRUCTIONS] = [known.get(number, "") for number in texts]
    return batch


def _rewards(table: Rowed, runs: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Of each chunk step ``[n, m]`` of runs inside an episode, its rewards' sum; and whether the last one of ``left``
    was terminated. In that one, what comes behind the episode's end does not count."""
    own = visible(table.schema)
    given = table.read(runs.reshape(-1), [("rewards",)])["rewards",].reshape(*runs.shape, -1)
    found = table.read(runs[:, -1], [(name,) for name in FLAGS if (name,) in own])
    flags = {path[0]: flag.reshape(len(runs), -1).ne(0) for path, flag in found.items()}
    shape = (len(runs), given.shape[2])
    if flags and shape[1] > 1 and all(flag.shape == shape for flag in flags.values()):
        ended = torch.stack(list(flags.values())).any(dim=0).long()
        acted = ended.cumsum(dim=1) == ended  # none ended before
        flags = {name: flag & acted for name, flag in flags.items()}
        every = torch.arange(len(runs))
        given[every, left - 1] = torch.where(acted, given[every, left - 1], 0)
    told = {name: flag.any(dim=1) for name, flag in flags.items()}
    never = torch.zeros(len(runs), dtype=torch.bool)
    terminated = (
        told["terminations"] if "terminations" in told else told.get("dones", never) & ~told.get("truncations", never)
    )
    return given.sum(dim=2), terminated


def _tables(ranges: Sequence[Ranges]) -> list[int]:
    return [own.table for own in ranges]


def _fields(now: Snapshot, among: Collection[int], fields: Collection[str] | None) -> tuple[Path, ...]:
    """The fields to read. Raises `UserError` where one of the tables lacks one that was named."""
    tables = now.tables
    return _chosen(tuple([tables[number].schema for number in among]), None if fields is None else tuple(fields))


@lru_cache(maxsize=256)
def _chosen(schemas: tuple[Schema, ...], fields: tuple[str, ...] | None) -> tuple[Path, ...]:
    by_path = [{field.path: field for field in schema.fields} for schema in schemas]
    shared = [path for path in visible(schemas[0]) if all(path in own for own in by_path)]
    chosen = shared if fields is None else list[Path]()
    for name in fields or ():
        own = [path for path in shared if name in (".".join(path), path[0])]
        if not own and name != INSTRUCTIONS:
            raise UserError(f"{name}: not every trajectory of the sample has it; they share {_names(shared)}")
        chosen += own
    for path in chosen:
        kinds = dict.fromkeys((own[path].shape, own[path].dtype) for own in by_path)
        if len(kinds) > 1:
            told = " and ".join(f"{list(shape)} {dtype}" for shape, dtype in kinds)
            raise UserError(f"{'.'.join(path)}: {told} in one batch; sample a window that holds one of both")
    return tuple(dict.fromkeys(chosen))


def _merged(parts: Sequence[tuple[Tensor, dict[Path, Tensor]]], count: int) -> dict[Path, Tensor]:
    """Rows of several tables in their places."""
    merged = {}
    for path, first in parts[0][1].items():
        out = torch.empty(count, *first.shape[1:], dtype=first.dtype)
        for places, columns in parts:
            out[places] = columns[path]
        merged[path] = out
    return merged


def _read_if_there(table: Rowed, rows: Tensor, path: Path) -> Tensor | None:
    """``[n, values of the row]``, or None where the table has no such field."""
    return table.read(rows, [path])[path].reshape(len(rows), -1) if path in visible(table.schema) else None


def _check(name: str, count: int) -> None:
    if count < 1:
        raise UserError(f"{name} = {count}: at least one")


def _short(count: int, there: str) -> UserError:
    return UserError(f"{count} chunk steps asked for, {there}; allow_short=True takes less")


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(".".join(path) for path in paths) or "nothing"


def _reshaped(batch: Any, *shape: int) -> Any:
    """The leading dimension of each tensor as ``shape``; lists are cut likewise."""
    if isinstance(batch, dict):
        return {name: _reshaped(value, *shape) for name, value in batch.items()}
    if isinstance(batch, Tensor):
        return batch.reshape(*shape, *batch.shape[1:])
    return [batch[i : i + shape[1]] for i in range(0, len(batch), shape[1])]
