"""Writing a buffer's folder: one process adds and drops trajectories, and what it acknowledged survives a crash.

The order of a write is: rows, sync; texts, sync; log record, sync; then the trajectory counts. Whatever a crash leaves
after the last intact log record was never acknowledged, and is overwritten.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gleanrl.buffer.files import DiskFiles, lock
from gleanrl.buffer.log import FAILURE, INTERVENED, RECORD, SALVAGE, SUCCESS, Log
from gleanrl.buffer.manifest import Manifest
from gleanrl.buffer.reader import BufferReader, text_checksum, text_of
from gleanrl.buffer.schema import Schema, followed
from gleanrl.buffer.table import SEGMENT_NBYTES, Table
from gleanrl.buffer.trajectory import FlatTrajectory, TrajectoryBlock, blocks
from gleanrl.utils.errors import UserError

# names of files that a buffer may remove
OURS = re.compile(r"\d{3,}-((rows|last)-\d{3,}-\d{6,}|(log|texts)-\d{6,}|schema-\d{3,}\.json|instructions\.jsonl)")
PARTS = 4  # segments that a limit is divided into, at least where rows are small
SHORTEN = 1 << 20  # bytes of dropped trajectories' records and texts that may stay in the log


@dataclass(frozen=True, slots=True)
class Limits:
    """What a buffer may keep: rows, bytes on disk, seconds. None: any amount."""

    rows: int | None = None
    nbytes: int | None = None
    age_s: float | None = None

    def segment_nbytes(self, nbytes: int, schema: Schema) -> int:
        """Return the size of a segment: ``nbytes``, or less so that a segment is only a part of what may be kept."""
        if self.rows is not None:
            nbytes = min(nbytes, self.rows // PARTS * schema.row_nbytes)
        return nbytes if self.nbytes is None else min(nbytes, self.nbytes // PARTS)


class BufferWriter(BufferReader):
    """A `BufferReader` that also adds and drops trajectories.

    Args:
        folder: created where it is missing; None: in memory.
        limits: of what is kept; the oldest trajectories are dropped first.
        segment_nbytes: about the size of a file. Eviction drops whole files where it can.

    Raises:
        UserError: another writer has the folder, it is a checkpoint, or the buffer is damaged.
    """

    def __init__(
        self, folder: Path | None, *, limits: Limits | None = None, segment_nbytes: int = SEGMENT_NBYTES
    ) -> None:
        self.limits, self._segment_nbytes = limits or Limits(), segment_nbytes
        self._uncommitted = False  # inside `replacing`: the manifest must not be written yet
        self._new_segment = False  # since the manifest's ``known`` was written
        self._lock_file = -1 if folder is None else _lock(folder)
        try:
            super().__init__(folder, writable=True)
            self._remove_leftovers()
        except BaseException:
            self._unlock()
            raise

    # --- adding ----------------------------------------------------------------------------------
    def add(self, trajectories: Sequence[FlatTrajectory]) -> list[int]:
        """Store all trajectories or none, and return their ids. They are on disk when this returns.

        Raises:
            OSError: the disk is full or fails.
            UserError: ``limits.nbytes`` has no room.
        """
        with self._lock:
            self._check_open()
            if self._opened.seen < self._opened.log.count:  # an earlier error came between the two
                self._notice()
            self._leave_exposed_records()
            self._make_room(trajectories)
            try:
                ids = self._commit(trajectories)
            except BaseException:
                for table in self.tables:
                    table.rollback()
                self._opened.texts.rollback()
                with suppress(OSError, UserError):
                    self._remove_leftovers()
                    self._leave_exposed_records()
                raise
            try:
                self._evict()
                self.shorten_log()
            except (OSError, UserError) as error:  # the trajectories are stored
                warnings.warn(f"the buffer keeps more than it should until the next add: {error}", stacklevel=2)
            if self._new_segment:
                self._write_known()
            return ids

    def _commit(self, trajectories: Sequence[FlatTrajectory]) -> list[int]:
        records, first = np.zeros(len(trajectories), RECORD), self.next_id
        records["id"], records["commit"], records["time"] = np.arange(len(records)) + first, first, time.time()
        touched: set[int] = set()
        done = 0
        for block in blocks(trajectories):
            table = self._table_for(Schema.of(block.members[0]))
            self._new_segment = self._new_segment or table.starts_segment(block.count)
            self._make_fit(table, *table.end_after(block.count))
            stored = table.write(block, self._number_instructions(block), touched)
            own = records[done : done + len(block.members)]
            for name, value in (stored | block_statistics(block) | self._add_texts(block)).items():
                own[name] = value
            done += len(own)
        self._opened.files.sync(touched)
        self._opened.texts.commit()
        self._opened.log.append(records)
        self._notice()
        return list(range(first, first + len(trajectories)))

    def _number_instructions(self, block: TrajectoryBlock) -> torch.Tensor:
        """Return int32 ``[n * T * B]``: the number of each row's instruction, -1 where it has none."""
        found = torch.full((block.count,), -1, dtype=torch.int32)
        for i, member in enumerate(block.members):
            if member.instructions:
                numbers = self._opened.texts.add_instructions(member.instructions)
                found[i * block.rows_each : (i + 1) * block.rows_each] = torch.tensor(numbers, dtype=torch.int32)
        return found

    def _add_texts(self, block: TrajectoryBlock) -> dict[str, list[int]]:
        """Queue the texts of a block, and return fields of `log.RECORD`."""
        texts = [text_of(member) for member in block.members]
        places = [self._opened.texts.add_text(text) for text in texts]
        sums = [text_checksum(text, member.instructions) for text, member in zip(texts, block.members, strict=True)]
        return {"text": [at for at, _ in places], "text_nbytes": [nbytes for _, nbytes in places], "text_crc": sums}

    def _table_for(self, schema: Schema) -> Table:
        """Return the table of a schema; create a missing one."""
        for table in reversed(self.tables):
            if table.schema == schema:
                return table
        nbytes = self.limits.segment_nbytes(self._segment_nbytes, schema)
        table = Table.create(self._opened.files, len(self.tables), schema, nbytes)
        self._opened.add_table(table)
        return table

    def _write_known(self) -> None:
        """Write the number of the log's records to the manifest, so that a log cut short is not taken for a crash."""
        fresh = self.manifest.replace(known=self.next_id)
        with suppress(OSError, UserError):  # an older number is true as well
            if not self._uncommitted and fresh != self.manifest and Manifest.read(self._all) == self.manifest:
                fresh.write(self._all)
                self._opened.manifest = fresh
        self._new_segment = False

    # --- dropping --------------------------------------------------------------------------------
    def drop(self, before: int) -> None:
        """Drop the trajectories with ids below ``before``, and the segments that held no others."""
        with self._lock:
            self._check_open()
            if before <= self.first_id:
                return
            first = min(before, self.next_id)
            kept = [self._first_kept(table, first) for table in self.tables]
            rows, finals = zip(*kept, strict=True)
            fresh = self.manifest.replace(first=first, rows=rows, finals=finals, known=self.next_id)
            if not self._uncommitted:
                fresh.write(self._all)
            self._opened.manifest = fresh
            self._drop_segments()

    def _first_kept(self, table: Table, first: int) -> tuple[int, int]:
        number = self._opened.indexes[table.number].first_id(first)
        if number is None:
            return table.segment_end()  # also drops the segment that is not full
        record = self.record(number)
        return int(record["row"]), int(record["final"])

    def _make_room(self, trajectories: Sequence[FlatTrajectory]) -> None:
        """Drop trajectories until these fit into ``limits.nbytes``.

        Raises:
            UserError: they do not fit even into an empty buffer. Nothing is dropped then.
        """
        if (quota := self.limits.nbytes) is None:
            return
        counts, texts = dict[Schema, tuple[int, int]](), 0
        for trajectory in trajectories:
            schema = Schema.of(trajectory)
            finals = 0
            if schema.deduplicated:
                shape = (1, trajectory.steps, trajectory.batch)
                finals = int((~followed(trajectory.columns, shape, schema.deduplicated)).sum())
            before = counts.get(schema, (0, 0))
            counts[schema] = before[0] + trajectory.count, before[1] + finals
            texts += RECORD.itemsize + len(text_of(trajectory).encode())
            texts += sum(len(json.dumps(text)) + 1 for text in set(trajectory.instructions))

        def needed(*, new_segment: bool) -> int:
            tables = ((self._table_for(schema), count) for schema, count in counts.items())
            return texts + sum(table.needed_nbytes(*count, new_segment=new_segment) for table, count in tables)

        least = self._opened.texts.instructions_nbytes + needed(new_segment=True)
        if least > quota:
            raise UserError(f"max_bytes = {quota}: what is added at once needs {least}")
        while self.nbytes + needed(new_segment=False) > quota:
            empty = self.first_id >= self.next_id
            if self.shorten_log(always=empty):
                continue
            if empty:  # only the log is left, and it cannot be shorter
                raise UserError(f"max_bytes = {quota}: there is no room for {least} more")
            self.drop(self.first_id + self._count_in_segment(0))

    def _evict(self) -> None:
        """Apply the limits of rows and age. The newest trajectory stays, however long it is."""
        if (limit := self.limits.rows) is not None and self.count_rows() > limit:
            kept = self.snapshot.records
            rows_after = self.count_rows() - np.cumsum(kept["steps"].astype(np.int64) * kept["batch"])
            few = min(int(np.argmax(rows_after <= limit)) + 1, len(kept) - 1)
            if few:
                # up to the end of a segment, so that eviction is rare and frees a file
                whole = few - 1 + self._count_in_segment(few - 1)
                self.drop(self.first_id + (whole if rows_after[whole - 1] >= limit * 3 / 4 else few))
        if self.limits.age_s is not None:
            old = int(np.searchsorted(self.snapshot.records["time"], time.time() - self.limits.age_s))
            self.drop(self.first_id + old)

    def _count_in_segment(self, position: int) -> int:
        """Count the trajectories, from a position of ``snapshot.records`` on, that begin in the first one's segment."""
        kept = self.snapshot.records[position:]
        boundary = self.tables[int(kept["schema"][0])].boundary(int(kept["row"][0]))
        later = (kept["schema"] != kept["schema"][0]) | (kept["row"] >= boundary)
        return int(np.argmax(later)) if later.any() else len(kept)

    def shorten_log(self, *, always: bool = False) -> bool:
        """Start a new log and new texts if more than half of them belong to dropped trajectories.

        Returns whether it did. Readers open the new files. ``always``: however little is dropped.
        """
        opened = self._opened
        kept, end = self.snapshot.records, opened.texts.end
        begin = int(kept["text"][0]) if len(kept) else end  # offsets of texts only grow
        dropped = (self.first_id - self.manifest.base) * RECORD.itemsize + begin
        left = len(kept) * RECORD.itemsize + end - begin
        least = 0 if always else max(left, min(SHORTEN, (self.limits.nbytes or SHORTEN) // 8))
        if self._uncommitted or dropped <= least:
            return False
        number = int(self.manifest.log[-6:]) + 1
        fresh = self.manifest.replace(
            base=self.first_id, known=self.next_id, log=f"log-{number:06d}", texts=f"texts-{number:06d}"
        )
        moved = kept.copy()
        moved["text"] -= begin
        self._remove_leftovers()
        try:
            opened.texts.copy(fresh.texts, begin)
            with closing(Log(opened.files, fresh.log, writable=True)) as log:
                log.append(moved)
            fresh.write(self._all)
        finally:
            if Manifest.read(self._all) == fresh:
                with self.exclusive():
                    self._reopen(fresh)
            self._remove_leftovers()
        return True

    # --- replacing everything --------------------------------------------------------------------
    def adopt(self, folder: Path, before_commit: Callable[[], object] = bool) -> None:
        """Replace the content by that of a checkpoint, all or nothing, also in a crash.

        ``before_commit`` is called when all files are in place; where it raises, nothing has changed.
        """
        with self._lock:
            self._check_open()
            with closing(BufferReader(folder)) as source:
                self._take_over(source, before_commit)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Replace the content by what is added inside the context, all or nothing, also in a crash."""
        with self._lock:
            self._check_open()
            self._remove_leftovers()
            with self.exclusive():
                self._uncommitted = True
                try:
                    self._exchange(Manifest(epoch=self.manifest.epoch + 1, rows=(), finals=()))
                    yield
                    self.manifest.replace(known=self.next_id).write(self._all)
                finally:
                    self._uncommitted = False
                    self._exchange(self._current_manifest())  # the new one only if it was written
                    self._remove_leftovers()

    def _leave_exposed_records(self) -> None:
        """Go on in new files where readers may have seen records that do not count, so that no row changes for them."""
        if self._opened.log.exposed and self._opened.files.on_disk and not self._uncommitted:
            self._take_over(self)

    def _take_over(self, source: BufferReader, before_commit: Callable[[], object] = bool) -> None:
        """Make the files of a buffer, maybe of this one, this buffer's next epoch: links, or copies of what grows."""
        for why in source.lost_files():
            raise UserError(f"{why}; {SALVAGE}")
        opened, count = source._opened, source.next_id - source.manifest.base
        fresh = source.manifest.replace(epoch=self.manifest.epoch + 1, known=source.next_id, end=None)
        target = self._all.with_prefix(fresh.prefix)

        def bring(name: str, *, copy: bool = False, nbytes: int | None = None) -> None:
            path = Path(opened.files.where(name))
            target.copy_from(path, name, path.stat().st_size if copy else nbytes)

        self._remove_leftovers()  # so that the next epoch's names are free
        try:
            bring(opened.log.name, nbytes=count * RECORD.itemsize)
            for name in opened.texts.names:
                bring(name, copy=True)
            for table in opened.tables:
                bring(table.schema_file)
                for name in table.files():
                    bring(name, copy=name in table.unfinished_files())
            before_commit()
            fresh.write(self._all)
        finally:
            if Manifest.read(self._all) == fresh:
                with self.exclusive():
                    self._exchange(fresh)
            self._remove_leftovers()

    def _exchange(self, manifest: Manifest) -> None:
        """Close all files and open those of a manifest. After an error the buffer is closed."""
        if not self._closed:
            self._closed = True
            self._opened.close()
        self._open(manifest)
        self._closed = False

    def _remove_leftovers(self) -> None:
        """Remove files of a crash or an error that the manifest and the log do not name."""
        if self._closed or self._uncommitted:
            return  # the open files are not those that count
        opened = self._opened
        known = {opened.log.name, *opened.texts.names, *(table.schema_file for table in opened.tables)}
        for table in opened.tables:
            known |= set(table.files())
        keep = {"lock", Manifest.NAME, *(self.manifest.prefix + name for name in known)}
        for name in self._all.names():
            if name not in keep and OURS.fullmatch(name):
                self._all.remove(name)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._write_known()
            super().close()
            self._unlock()

    def _unlock(self) -> None:
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1


def _lock(folder: Path) -> int:
    """Take the writer's lock of a folder, which is created where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    there = Manifest.read(DiskFiles(folder, writable=False))
    if there is not None and there.end is not None:
        why = "a checkpoint is not written into; load it into a buffer with a folder of its own"
        raise UserError(f"{folder}: {why}")
    return lock(folder)


def block_statistics(block: TrajectoryBlock) -> dict[str, Any]:
    """Return what `log.RECORD` says about each trajectory besides where it is stored."""
    n, steps, batch = block.shape
    outcomes = {None: 0, True: SUCCESS, False: FAILURE}
    found: dict[str, Any] = {
        "flags": np.array([outcomes[member.success] for member in block.members]),
        "version_low": -1.0,
        "version_high": -1.0,
        "reward": 0.0,
        "steps": steps,
        "batch": batch,
        "epochs": [member.epochs for member in block.members],
        "episodes": block.ends.reshape(n, -1).sum(dim=1).numpy(),
    }
    intervened = block.columns.get(("intervene_flags",))
    if intervened is not None:
        found["flags"] |= np.where(intervened.reshape(n, -1).any(dim=1).numpy(), INTERVENED, 0)
    versions = block.columns.get(("versions",))
    if versions is not None and versions.numel():
        each = versions.reshape(n, -1).double()
        found["version_low"], found["version_high"] = each.amin(dim=1).numpy(), each.amax(dim=1).numpy()
    rewards = block.columns.get(("rewards",))
    if rewards is not None:
        found["reward"] = rewards.reshape(n, -1).double().sum(dim=1).numpy()
    return found
