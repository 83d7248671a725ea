"""Sampling of batches: finds the rows that may be drawn, draws some of them, and reads their fields.

Rows are drawn uniformly with replacement from the newest trajectories, which are called the *window*. Under conditions
(`Only`), the draw is uniform over the rows of the window that meet the conditions. For drawing, the rows of the window
are numbered consecutively over all tables. Such a number is called a *position*, and `RowRanges` translate it to a row
of a table.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from pydantic import InstanceOf
from torch import Tensor

from gleanrl.buffer.arguments import Exponent, FieldNames, Flag, Indices, checked
from gleanrl.buffer.background import Ahead, RandomStream
from gleanrl.buffer.log import FAILURE, INTERVENED, SUCCESS
from gleanrl.buffer.priorities import Priorities
from gleanrl.buffer.reader import Reader, Snapshot
from gleanrl.buffer.table import INSTRUCTION, LEFT, Index, RowRanges, Schema, words
from gleanrl.buffer.trajectory import FLAGS, INSTRUCTIONS, FieldPath, put
from gleanrl.utils.errors import UserError
from gleanrl.utils.settings import Fraction, NonNegative, Positive

Batch = dict[str, Any]
"""Tensors [n, ...] by field name. Observations are nested dicts, ``task_descriptions`` is a list of n texts."""
RowFilter = Callable[[int, Tensor], Tensor]  # (number of a table, rows int64 [n]) -> bool [n], which may be drawn
# for each table: its number, places in the batch [n] (a slice if it is the only table), rows of the table [n]
Pieces = list[tuple[int, Tensor | slice, Tensor]]
TABLE_BIT = 48  # an entry of ``indices`` is (number of the table << TABLE_BIT) + row
SCANNED = 1 << 16  # number of rows that are examined at once
RECORDS = 1 << 16  # number of records that are examined at once
REMEMBERED = 8  # number of different conditions for which the matching trajectories are cached


@dataclass(frozen=True, slots=True, kw_only=True)
class Only:
    """Conditions that sampled chunk steps must meet. None: no condition.

    Attributes:
        success: the chunk step's trajectory was added with this value of ``success``.
        intervened: True: a human acted in the chunk step. False: only the policy acted.
        versions: lowest and highest allowed version of the weights that acted, both included. Chunk steps without
            versions do not meet the condition.
    """

    success: Flag | None = None
    intervened: Flag | None = None
    versions: tuple[float, float] | None = None

    def may_match(self, records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return bool ``[n]``: whether the trajectory of each record may have rows that meet the conditions.

        Where it is False, no row does. Where it is True, `row_filter` decides for each row.
        """
        found = np.ones(len(records), bool)
        if self.success is not None:
            found &= (records["flags"] & (SUCCESS if self.success else FAILURE)) > 0
        if self.intervened:
            found &= (records["flags"] & INTERVENED) > 0
        if self.versions is not None:
            low, high = self.versions
            found &= (records["version_high"] >= low) & (records["version_low"] <= high)
        return found

    def row_filter(self, now: Snapshot) -> RowFilter | None:
        """Return a function that checks the conditions for single rows; None if `may_match` already decides for all."""
        if self.intervened is None and self.versions is None:
            return None

        def accept(number: int, rows: Tensor) -> Tensor:
            table, found = now.tables[number], torch.ones(len(rows), dtype=torch.bool)
            wanted = [path for path in (("intervene_flags",), ("versions",)) if path in table.schema.paths]
            columns = table.read(rows, wanted)
            if self.intervened is not None:
                flags = columns.get(("intervene_flags",), torch.zeros(len(rows), 1))
                found &= flags.reshape(len(rows), -1).any(dim=1) == self.intervened
            if self.versions is not None:
                low, high = self.versions
                versions = columns.get(("versions",), torch.full((len(rows), 1), torch.nan))
                versions = versions.reshape(len(rows), -1).double()  # torch does not compare float8
                found &= ((versions >= low) & (versions <= high)).all(dim=1)
            return found

        return accept


Only.__init__ = checked(Only.__init__)


class Sampler:
    """Draws batches of rows. `TrajectoryReplayBuffer` is a subclass that also adds trajectories.

    Args:
        storage: reader of the trajectories.
        window: number of the newest trajectories to sample from; 0: all.
        generator: random generator for all draws.
        priority_exponent: exponent of the priorities in `sample_prioritized`; None: no priorities are kept.
    """

    def __init__(
        self, storage: Reader, window: int, generator: torch.Generator, priority_exponent: float | None = None
    ) -> None:
        self.storage, self.window, self.generator = storage, window, generator
        self.stream = RandomStream(generator)
        self.windows = Windows()
        self.priorities = None if priority_exponent is None else Priorities(priority_exponent)

    def _held(self) -> AbstractContextManager[Snapshot]:
        """Return a context of the newest snapshot, which all reads of one sample must use to be consistent."""
        self.storage.refresh()
        return self.storage.held()

    @property
    def window_samples(self) -> int:
        """Number of chunk steps (rows) from which `sample` draws without conditions."""
        with self._held() as now:
            return _total(self.windows.ranges(now, self.window, None))

    @checked
    def sample(
        self,
        num_chunks: Positive,
        *,
        only: InstanceOf[Only] | None = None,
        fields: FieldNames | None = None,
        allow_short: Flag = False,
        indices: Flag = False,
    ) -> Batch:
        """Draw chunk steps uniformly with replacement from the window. The batch has tensors ``[num_chunks, ...]``.

        Args:
            num_chunks: number of chunk steps to draw.
            only: conditions that the chunk steps must meet.
            fields: fields to read, such as ``actions``, ``curr_obs.image``, ``curr_obs`` (all its fields) or
                ``task_descriptions``. By default, all fields that all trajectories of the window have.
            allow_short: what to do if fewer than ``num_chunks`` rows may be drawn. True draws as many chunk steps as
                there are such rows. False raises an error.
            indices: whether to add ``indices`` int64 ``[num_chunks]``, with which `read` returns the same rows again.

        Raises:
            UserError: there are too few rows, no row meets the conditions, or a field is missing.
        """
        with self._held() as now:
            ranges = self.windows.ranges(now, self.window, only)
            total = _total(ranges)
            if not total and only is not None:
                raise UserError("no row of the buffer meets the conditions")
            short = "{} chunk steps asked for, {}; allow_short=True takes less"
            if num_chunks > total and (not allow_short or not total):
                raise UserError(short.format(num_chunks, f"the window has {total}"))
            accept = None if only is None else only.row_filter(now)
            positions = draw(num_chunks, ranges, accept, self.generator, at_most_all=True)
            if len(positions) < num_chunks and not allow_short:
                raise UserError(short.format(num_chunks, f"{len(positions)} of the window meet the conditions"))
            found = pieces(positions, ranges)
            batch = _read(now, found, len(positions), fields, [own.table for own in ranges])
            if indices:
                batch["indices"] = _indices(found, len(positions))
            return batch

    @checked
    def sample_slices(
        self,
        num_slices: Positive,
        length: Positive,
        *,
        only: InstanceOf[Only] | None = None,
        fields: FieldNames | None = None,
    ) -> Batch:
        """Draw slices of ``length`` consecutive chunk steps, as tensors ``[num_slices, length, ...]``.

        The first chunk step of each slice is drawn uniformly with replacement from those after which the episode (and
        the rollout epoch) has enough chunk steps, so a slice never crosses the end of an episode. Only the first chunk
        step must meet the conditions ``only``.

        Raises:
            UserError: no episode is long enough, or the buffer is empty.
        """
        with self._held() as now:
            ranges = self.windows.ranges(now, self.window, only)
            if not _total(ranges):
                raise UserError("the buffer is empty")
            conditions = None if only is None else only.row_filter(now)

            def accept(table: int, rows: Tensor) -> Tensor:
                long = now.tables[table].read(rows, [LEFT])[LEFT] >= length
                return long if conditions is None else long & conditions(table, rows)

            found: Pieces = []
            for table, places, rows in pieces(draw(num_slices, ranges, accept, self.generator), ranges):
                runs = _runs(now, table, rows, torch.full_like(rows, length))
                if isinstance(places, Tensor):
                    places = (places[:, None] * length + torch.arange(length)).reshape(-1)
                found.append((table, places, runs.reshape(-1)))
            batch = _read(now, found, num_slices * length, fields, [own.table for own in ranges])
            texts = batch.pop(INSTRUCTIONS, None)
            batch = _map_tensors(batch, lambda tensor: tensor.reshape(num_slices, length, *tensor.shape[1:]))
            if texts is not None:
                batch[INSTRUCTIONS] = [texts[i : i + length] for i in range(0, len(texts), length)]
            return batch

    @checked
    def sample_n_step(
        self, num_chunks: Positive, n: Positive, gamma: Fraction, *, only: InstanceOf[Only] | None = None
    ) -> Batch:
        """Draw chunk steps as `sample` does, and add the n-step return of each.

        The return covers ``n`` chunk steps, the drawn one and those that follow it, or fewer if the episode or the
        rollout epoch ends before. Only the drawn chunk step must meet the conditions ``only``. Unlike in `sample`,
        ``num_chunks`` may exceed the number of rows. ``gamma`` is the discount of one environment step, as in the SAC
        of `gleanrl.embodied`: with rewards ``[T, B, C]``, a chunk step consists of C environment steps, which are
        discounted one by one. The batch has all shared fields, with these changes:

        * ``next_obs`` is the observation after the last of the covered chunk steps.
        * ``n_step_rewards``, float32 ``[num_chunks]``, is the sum of gamma^i * r_i over the environment steps
          i = 0, 1, ... of the covered chunk steps, where the episode's end inside a chunk ends the sum.
        * ``n_step_discounts``, float32 ``[num_chunks]``, is the factor for the value of ``next_obs``: gamma to the
          power of the number of these environment steps, or 0 if the episode terminated. If there is no field
          ``terminations``, an episode that is done and not truncated counts as terminated.

        Raises:
            UserError: the buffer is empty, no row meets the conditions, or ``rewards`` or ``next_obs`` is missing.
        """
        with self._held() as now:
            ranges = self.windows.ranges(now, self.window, only)
            if not _total(ranges):
                raise UserError("the buffer is empty")
            tables = [own.table for own in ranges]
            paths = _fields(tuple([now.tables[number].schema for number in tables]), ("rewards", "next_obs"))
            if ("rewards",) not in paths:
                raise UserError("rewards: several fields in one; an n-step return needs a single tensor")
            accept = None if only is None else only.row_filter(now)
            found = pieces(draw(num_chunks, ranges, accept, self.generator), ranges)
            batch = _read(now, found, num_chunks, None, tables)
            rewards, discounts = torch.zeros(num_chunks), torch.zeros(num_chunks)
            last: Pieces = []
            for number, places, rows in found:
                table = now.tables[number]
                left = table.read(rows, [LEFT])[LEFT].long().clamp(max=n)
                runs = _runs(now, number, rows, left)
                last.append((number, places, runs[:, -1]))
                own = table.read(runs.reshape(-1), [("rewards",)])["rewards",].reshape(*runs.shape, -1)
                if own.is_floating_point() and own.itemsize == 1:  # torch does not calculate with float8
                    own = own.float()
                flags = table.read(runs[:, -1], [(name,) for name in FLAGS if (name,) in table.schema.paths])
                ends = {path[0]: flag.reshape(len(runs), -1).ne(0) for path, flag in flags.items()}
                # [n, chunk steps, C]: whether the environment step was executed as a part of the n-step return
                acted = (torch.arange(runs.shape[1]) < left[:, None])[..., None].repeat(1, 1, own.shape[2])
                shape = (len(runs), own.shape[2])
                if ends and shape[1] > 1 and all(flag.shape == shape for flag in ends.values()):
                    # if an episode ends inside a chunk, the rewards and flags of the chunk's later actions are ignored
                    ended = torch.stack(list(ends.values())).any(dim=0).long()
                    before = ended.cumsum(dim=1) == ended
                    ends = {name: flag & before for name, flag in ends.items()}
                    acted[torch.arange(len(runs)), left - 1] = before
                powers = gamma ** torch.arange(acted[0].numel()).reshape(acted.shape[1:])
                rewards[places] = (torch.where(acted, own, 0) * powers).sum(dim=(1, 2)).float()
                never = torch.zeros(shape[0], dtype=torch.bool)
                ended_by = {name: flag.any(dim=1) for name, flag in ends.items()}
                terminated = ended_by.get("dones", never) & ~ended_by.get("truncations", never)
                terminated = ended_by.get("terminations", terminated)
                discounts[places] = gamma ** acted.sum(dim=(1, 2)).float() * ~terminated
            batch |= _read(now, last, num_chunks, ("next_obs",), tables)
            return {**batch, "n_step_rewards": rewards, "n_step_discounts": discounts}

    @checked
    def sample_prioritized(
        self, num_chunks: Positive, beta: Exponent = 0.4, *, fields: FieldNames | None = None
    ) -> Batch:
        """Draw chunk steps with probabilities in proportion to priority ** exponent.

        The draw is with replacement from all trajectories of the buffer, not only from the window. The batch also has

        * ``indices``, int64 ``[num_chunks]``, which `update_priorities` and `read` accept, and
        * ``weights``, float32 ``[num_chunks]``, the importance weights: (number of rows * probability) ** -``beta``,
          divided by the largest weight in the batch.

        Raises:
            UserError: the buffer is empty, or was made without ``priority_exponent``.
        """
        with self._held():
            drawn = torch.rand(num_chunks, generator=self.generator, dtype=torch.float64).numpy()
            now, drawn_rows, probabilities = self._priorities().draw(self.storage, drawn)
            found: Pieces = []
            for number, places, rows in drawn_rows:
                all_places = places if isinstance(places, slice) else torch.from_numpy(places)
                found.append((number, all_places, torch.from_numpy(rows)))
            kept = [number for number, (first, end) in enumerate(now.spans) if first < end]
            batch = _read(now, found, num_chunks, fields, kept)
            weights = (now.count_rows() * probabilities) ** -beta
            batch["indices"] = _indices(found, num_chunks)
            batch["weights"] = torch.from_numpy(weights / weights.max()).float()
            return batch

    @checked
    def update_priorities(self, indices: Indices, priorities: Tensor) -> None:
        """Set the priorities of the rows with these ``indices`` (see `sample_prioritized`).

        Rows that were dropped since are ignored.

        Raises:
            UserError: there are not as many priorities as indices, or a priority is not positive, or its power
                ``priority_exponent`` is not between 1e-100 and 1e100. No priority is set then.
        """
        values, numbers = priorities.detach().double().cpu().numpy().reshape(-1), indices.cpu().numpy().reshape(-1)
        if len(values) != len(numbers):
            raise UserError(f"{len(values)} priorities for {len(numbers)} indices; give one for each")
        with self._held():
            rows = numbers & ((1 << TABLE_BIT) - 1)
            self._priorities().update(self.storage, numbers >> TABLE_BIT, rows, values)

    def _priorities(self) -> Priorities:
        if self.priorities is None:
            raise UserError("the buffer keeps no priorities; make it with priority_exponent, e.g. 0.6")
        return self.priorities

    @checked
    def read(self, indices: Indices, fields: FieldNames | None = None) -> Batch:
        """Return the rows with these ``indices`` (see `sample`) as a batch, in the same order.

        Indices are valid until the content of the buffer is replaced by `TrajectoryReplayBuffer.load_checkpoint`.
        Afterwards the same indices are other rows, or none.

        Raises `UserError` if one of the rows was dropped since, or if the buffer is empty.
        """
        with self._held() as now:
            found: Pieces = []
            count = 0
            if not now.tables:
                raise UserError("the buffer is empty")
            if not len(indices):  # an empty piece, which gives the batch its fields
                found.append((now.tables[0].number, indices, indices))
            for table, (first, end) in zip(now.tables, now.spans, strict=True):
                [places] = torch.where(indices >> TABLE_BIT == table.number)
                rows = indices[places] & ((1 << TABLE_BIT) - 1)
                if len(rows) and int(rows.min()) >= first and int(rows.max()) < end:
                    found.append((table.number, places, rows))
                    count += len(rows)
            if count != len(indices):
                raise UserError("an index points to a chunk step that was evicted or never was")
            return _read(now, found, len(indices), fields, [table for table, _, _ in found])

    @checked
    def iterate(
        self,
        num_chunks: Positive,
        *,
        batches: NonNegative | None = None,
        prefetch: NonNegative = 2,
        pin_memory: Flag | None = None,
        device: torch.device | str | None = None,
        **how: Any,
    ) -> Generator[Batch]:
        """Yield batches of `sample`, which a background thread draws in advance.

        If the thread raises an error, the batches that it has finished are yielded first. A checkpoint stores the
        random state before the first batch that was not yielded yet. A resumed run therefore continues with this batch,
        unless the buffer was sampled in another way in between. A process that is forked later has no such thread, so
        it calls this method itself.

        Args:
            num_chunks: number of chunk steps in a batch.
            how: further arguments of `sample`.
            batches: number of batches to yield; None: no limit.
            prefetch: largest number of batches that are drawn in advance.
            pin_memory: whether batches are copied to page-locked memory; None: only if there is a GPU.
            device: device to which the tensors are moved; None: they stay on the CPU.
        """
        pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        ready: queue.SimpleQueue[tuple[Ahead, Batch] | BaseException | None] = queue.SimpleQueue()
        places, stop = threading.Semaphore(max(1, prefetch)), threading.Event()
        waiting: list[Ahead] = []
        process = os.getpid()

        def fill() -> None:
            made = 0
            try:
                while batches is None or made < batches:
                    places.acquire()
                    if stop.is_set():
                        return
                    waiting.append(ahead := self.stream.begin())
                    batch = self.sample(num_chunks, **how)
                    ahead.after = self.generator.get_state()
                    ready.put((ahead, _map_tensors(batch, Tensor.pin_memory) if pin else batch))
                    made += 1
                ready.put(None)
            except BaseException as error:
                ready.put(error)

        thread = threading.Thread(target=fill, name="buffer-prefetch", daemon=True)
        thread.start()
        try:
            while True:
                if os.getpid() != process:  # the thread is in the process that this one was forked from
                    raise UserError(
                        "iterate() was called before this process was forked; call it again in this process"
                    )
                if (found := ready.get()) is None:
                    return
                places.release()
                if isinstance(found, BaseException):
                    raise found
                ahead, batch = found
                waiting.remove(ahead)
                self.stream.end(ahead)
                yield batch if device is None else _map_tensors(batch, lambda t: t.to(device, non_blocking=pin))
        finally:
            stop.set()
            places.release()
            thread.join()
            for ahead in waiting:
                self.stream.end(ahead)


def _map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with ``change`` applied to each tensor, also in nested dicts. Other values stay as they are."""
    if isinstance(batch, dict):
        return {name: _map_tensors(value, change) for name, value in batch.items()}
    return change(batch) if isinstance(batch, Tensor) else batch


# --- which rows may be drawn -------------------------------------------------------------------------
class Windows:
    """Finds the rows of the window that may meet some conditions.

    For each `Only`, the trajectories that may match are cached, so that each call examines only new log records.
    """

    def __init__(self) -> None:
        # conditions -> (for each table, an index of the trajectories that may match; the first id not examined yet)
        self.indexes: dict[Only, tuple[list[Index], int]] = {}
        self._epoch: Hashable = None
        self._last: tuple[Hashable, list[RowRanges]] = ((), [])
        self._lock = threading.Lock()

    def ranges(self, now: Snapshot, window: int, only: Only | None) -> list[RowRanges]:
        """Return the rows of those of the newest ``window`` trajectories (0: all) that may meet the conditions."""
        since = max(now.first_id, now.next_id - window) if window else now.first_id
        key = (now.epoch, since, now.next_id, only)
        known, found = self._last
        if key != known:
            found = []
            if only is not None:
                found = self._find_matching(now, since, only)
            else:
                for table, (_, end) in zip(now.tables, now.spans, strict=True):
                    begin = table.index.find(since)
                    if begin is not None and begin[1] < end:
                        found.append(RowRanges(table.number, begin[1], end - begin[1]))
            self._last = key, found
        return found

    def _find_matching(self, now: Snapshot, since: int, only: Only) -> list[RowRanges]:
        with self._lock:
            if self._epoch != now.epoch:
                self.indexes.clear()
                self._epoch = now.epoch
            indexes, seen = self.indexes.pop(only, ([], now.first_id))
            fresh = now.records[max(0, seen - now.first_id) :]
            for begin in range(0, len(fresh), RECORDS):
                records = fresh[begin : begin + RECORDS]
                matches = only.may_match(records)
                while len(indexes) <= int(records["schema"].max()):
                    indexes.append(Index())
                for number in np.unique(records["schema"][matches]):
                    indexes[number].append(records, np.flatnonzero(matches & (records["schema"] == number)))
            self.indexes[only] = indexes, int(fresh["id"][-1]) + 1 if len(fresh) else seen
            if len(self.indexes) > REMEMBERED:
                del self.indexes[next(iter(self.indexes))]
            for index in indexes:
                index.forget(now.first_id)
            found = [index.ranges(number, since, now.next_id) for number, index in enumerate(indexes)]
        return [own for own in found if own is not None]


# --- which rows are drawn ----------------------------------------------------------------------------
def _total(ranges: Sequence[RowRanges]) -> int:
    return sum(own.total for own in ranges)


def pieces(positions: Tensor, ranges: Sequence[RowRanges]) -> Pieces:
    """Group positions by table, and translate them to rows of the tables.

    A position is a number of a row of the window, counted over all tables (see the module docstring).
    """
    if len(ranges) == 1:
        return [(ranges[0].table, slice(None), ranges[0].at(positions))]
    found, before = [], 0
    for own in ranges:
        [places] = torch.where((positions >= before) & (positions < before + own.total))
        if len(places):
            found.append((own.table, places, own.at(positions[places] - before)))
        before += own.total
    return found


def draw(
    count: int,
    ranges: Sequence[RowRanges],
    accept: RowFilter | None,
    generator: torch.Generator,
    *,
    at_most_all: bool = False,
) -> Tensor:
    """Draw ``count`` positions (int64) uniformly with replacement from those whose rows ``accept`` accepts.

    If ``accept`` is None, all positions are accepted. With ``at_most_all``, fewer than ``count`` positions are drawn if
    fewer are accepted: as many as there are accepted ones.

    Raises:
        UserError: no row is accepted.
    """
    total = _total(ranges)
    if accept is None:
        return torch.randint(total, (min(count, total) if at_most_all else count,), generator=generator)

    def accepted(positions: Tensor) -> Tensor:
        found = torch.zeros(len(positions), dtype=torch.bool)
        for table, places, rows in pieces(positions, ranges):
            found[places] = accept(table, rows)
        return positions[found]

    found, drawn = torch.empty(0, dtype=torch.int64), 0
    while len(found) < count and drawn < total:
        # each round draws as many as all before it, so the time is in proportion to 1 / (share of accepted rows)
        size = max(2 * count, min(drawn, SCANNED))
        found = torch.cat([found, accepted(torch.randint(total, (size,), generator=generator))])
        drawn += size
    if len(found) < count:  # so few rows are accepted, or none, that all rows are examined
        parts = [torch.empty(0, dtype=torch.int64)]
        for begin in range(0, total, SCANNED):
            parts.append(accepted(torch.arange(begin, min(begin + SCANNED, total))))
        every = torch.cat(parts)
        if not len(every):
            raise UserError("no row of the buffer meets the conditions")
        found = every[torch.randint(len(every), (count,), generator=generator)]
        return found[: len(every)] if at_most_all else found
    # if `count` different positions were drawn, there are enough accepted ones; otherwise they must be counted
    if at_most_all and len(found.unique()) < count:
        there, begin, length = 0, 0, 4 * count
        while there < count and begin < total:
            there += len(accepted(torch.arange(begin, min(begin + length, total))))
            begin, length = begin + length, min(2 * length, max(SCANNED, 4 * count))
        count = min(count, there)
    return found[:count]


def _indices(found: Pieces, count: int) -> Tensor:
    """Return the entries of ``indices`` (int64 ``[count]``) of the drawn rows."""
    if len(found) == 1:
        [(table, _, rows)] = found
        return rows + (table << TABLE_BIT)
    indices = torch.empty(count, dtype=torch.int64)
    for table, places, rows in found:
        indices[places] = rows + (table << TABLE_BIT)
    return indices


def _runs(now: Snapshot, table: int, rows: Tensor, left: Tensor) -> Tensor:
    """Return for each row the rows of ``left`` consecutive chunk steps of its environment, starting with itself.

    The result is int64 ``[n, left.max()]``. Where ``left`` is smaller than the maximum, the last row is repeated.
    """
    ids = now.tables[table].index.holding(rows.numpy())
    batch = torch.from_numpy(now.records["batch"][ids - now.first_id].astype(np.int64))
    steps = torch.arange(int(left.max())).expand(len(rows), -1)
    return rows[:, None] + batch[:, None] * torch.minimum(steps, left[:, None] - 1)


# --- reading the drawn rows --------------------------------------------------------------------------
def _read(now: Snapshot, found: Pieces, count: int, fields: Collection[str] | None, tables: Collection[int]) -> Batch:
    """Read the drawn rows, ``found``, into a batch of ``count`` rows.

    Without ``fields``, the batch has the fields that all of ``tables`` have. These are all tables from which rows could
    have been drawn, so the fields of the batch do not depend on which rows were drawn.
    """
    paths = _fields(tuple([now.tables[number].schema for number in tables]), None if fields is None else tuple(fields))
    asked, there = fields is not None and INSTRUCTIONS in fields, now.texts.instructed
    instructed = asked or (fields is None and there is not False)
    wanted = (*paths, INSTRUCTION) if instructed else paths
    parts = [(places, now.tables[number].read(rows, wanted)) for number, places, rows in found]
    columns = parts[0][1]
    if len(parts) > 1:
        columns = {}
        for path, first in parts[0][1].items():
            columns[path] = torch.empty(count, *first.shape[1:], dtype=first.dtype)
            for places, own in parts:
                # as integers of their width, because torch cannot set elements of some dtypes, such as uint16
                words(columns[path])[places] = words(own[path])
    batch: Batch = {}
    for path in paths:
        put(batch, path, columns[path])
    if instructed:
        numbers = columns[INSTRUCTION].tolist()
        texts = {number: now.texts.instruction(number) for number in set(numbers) if number >= 0}
        if texts or asked or there:
            batch[INSTRUCTIONS] = [texts.get(number, "") for number in numbers]
    return batch


@lru_cache(maxsize=256)
def _fields(schemas: tuple[Schema, ...], fields: tuple[str, ...] | None) -> tuple[FieldPath, ...]:
    """Return the paths of the fields to read: those that ``fields`` names, or by default all that the schemas share.

    Raises `UserError` if a named field is missing in a schema, or if its dtypes or shapes differ.
    """
    by_path = [{field.path: field for field in schema.fields} for schema in schemas]
    shared = [path for path in schemas[0].paths if all(path in own for own in by_path)]
    chosen = shared if fields is None else list[FieldPath]()
    for name in fields or ():
        own = [path for path in shared if name in (".".join(path), path[0])]
        if not own and name != INSTRUCTIONS:
            names = ", ".join(".".join(path) for path in shared) or "nothing"
            raise UserError(f"{name}: not every trajectory of the sample has it; they share {names}")
        chosen += own
    for path in chosen:
        kinds = dict.fromkeys((own[path].shape, own[path].dtype) for own in by_path)
        if len(kinds) > 1:
            several = " and ".join(f"{list(shape)} {dtype}" for shape, dtype in kinds)
            raise UserError(f"{'.'.join(path)}: {several} in one batch; sample a window that holds one of both")
    return tuple(dict.fromkeys(chosen))
