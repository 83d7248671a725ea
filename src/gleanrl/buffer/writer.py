"""Writes the folder of a buffer. Only one process at a time may write a folder.

`BufferWriter.add` first syncs the rows of a trajectory to disk, then its texts, and then its log record. The trajectory
belongs to the buffer once the log record is on disk, so a crash never leaves a partly written trajectory. Rows and
texts without a log record, which a crash may leave, are overwritten later.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from gleanrl.buffer.files import Files
from gleanrl.buffer.log import (
    FAILURE,
    INSTRUCTED,
    INTERVENED,
    RECORD,
    SALVAGE,
    SUCCESS,
    Log,
    Manifest,
    description_line,
)
from gleanrl.buffer.reader import BufferReader, text_checksum, text_of
from gleanrl.buffer.table import SEGMENT_NBYTES, Schema, Table, followed
from gleanrl.buffer.trajectory import FlatTrajectory, TrajectoryBlock, join_blocks
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

# names of the files that a buffer creates, and therefore may remove
OURS = re.compile(r"\d{3,}-((rows|last)-\d{3,}-\d{6,}|(log|texts)-\d{6,}|schema-\d{3,}\.json)")
# Segments are made small enough that this many fit into each limit, because dropping works by whole segments. If the
# rows are so large that the smallest possible segment exceeds this size, fewer segments fit.
PARTS = 4
# Bytes that `BufferWriter.add_all` adds in one commit. Each commit waits for the disk, so small commits would be slow.
COMMIT_NBYTES = 64 << 20
EXAMINED = 1 << 10  # number of log records whose ages are examined at once
SHORTEN = 1 << 20  # bytes of dropped trajectories up to which the log and the texts are not rewritten


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the trajectories that a buffer keeps. None: no limit."""

    rows: int | None = None  # number of rows
    nbytes: int | None = None  # total size of all files in bytes
    age_s: float | None = None  # seconds since a trajectory was added


class BufferWriter(BufferReader):
    """A `BufferReader` that also adds and drops trajectories.

    Args:
        folder: folder of the buffer, created if it is missing; None: the buffer is in memory.
        limits: limits of the trajectories to keep. Beyond them, `add` drops the oldest trajectories.
        segment_nbytes: approximate size of a segment in bytes. Where possible, whole segments are dropped.

    Raises:
        UserError: another process writes to the folder, the folder is a checkpoint, or the buffer is damaged.
    """

    def __init__(
        self, folder: Path | None, *, limits: Limits | None = None, segment_nbytes: int = SEGMENT_NBYTES
    ) -> None:
        self.limits, self._segment_nbytes = limits or Limits(), segment_nbytes
        self._uncommitted = False  # True inside `replacing`, where the manifest on disk must not be changed yet
        self._new_segment = False  # whether a segment was started since `Manifest.known` was last written
        self._lock_file = -1
        if folder is not None:
            atomic.create_folder(folder)
            there = Manifest.read(Files(folder, writable=False))
            if there is not None and there.end is not None:
                why = "a checkpoint is not written into; load it into a buffer with a folder of its own"
                raise UserError(f"{folder}: {why}")
            self._lock_file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self._unlock()
                why = "another process writes into this buffer; open it with read_only=True"
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    why = f"its file system cannot lock files ({error.strerror}), so use a folder on another one"
                raise UserError(f"{folder}: {why}") from None
        try:
            super().__init__(folder, writable=True)
            self._remove_leftovers()
        except BaseException:
            self._unlock()
            raise

    # --- adding ----------------------------------------------------------------------------------
    def add(self, trajectories: Sequence[FlatTrajectory]) -> list[int]:
        """Store all given trajectories or none of them, and return their ids. They are on disk when this returns.

        Raises:
            OSError: the disk is full or fails.
            UserError: ``limits.nbytes`` is too small for the trajectories.
        """
        with self.lock:
            self._check_writable()
            if self._opened.seen < self._opened.log.count:
                # an earlier call failed after it had appended to the log, so its trajectories are published now
                self._notice()
            self._leave_exposed_records()
            self._make_room(trajectories)
            try:
                ids = self._commit(trajectories)
            except BaseException:
                for table in self._opened.tables:
                    for part in table.parts:
                        part.end = part.rows  # the next write overwrites the rows of this failed one
                self._opened.texts.rollback()
                with suppress(OSError, UserError):
                    self._remove_leftovers()
                    self._leave_exposed_records()
                raise
            try:
                self._evict()
                self.shorten_log()
            except (OSError, UserError) as error:  # only a warning, because the new trajectories are stored
                warnings.warn(f"the buffer keeps more than it should until the next add: {error}", stacklevel=2)
            if self._new_segment:
                self._write_known()
            return ids

    def add_all(self, trajectories: Iterable[FlatTrajectory]) -> None:
        """Add trajectories in commits of up to `COMMIT_NBYTES`, so that only one commit is held in memory.

        A commit takes at most a quarter of ``limits.nbytes``, unless a single trajectory is larger.
        """
        most = min(COMMIT_NBYTES, (self.limits.nbytes or 4 * COMMIT_NBYTES) // 4)
        batch: list[FlatTrajectory] = []
        nbytes = 0
        for trajectory in trajectories:
            more = Schema.of(trajectory.columns).row_nbytes * trajectory.count + _log_and_text_nbytes(trajectory)
            if batch and nbytes + more > most:
                self.add(batch)
                batch, nbytes = [], 0
            batch.append(trajectory)
            nbytes += more
        if batch:
            self.add(batch)

    def _commit(self, trajectories: Sequence[FlatTrajectory]) -> list[int]:
        records, first = np.zeros(len(trajectories), RECORD), self.snapshot.next_id
        records["id"], records["commit"], records["time"] = np.arange(len(records)) + first, first, time.time()
        texts = self._opened.texts
        touched: set[int] = set()
        done = 0
        for block in join_blocks(trajectories):
            table = self._table_for(Schema.of(block.columns))
            row, capacity = table.columns.end, table.columns.capacity
            starts_segment = (row + block.count - 1) // capacity > (row - 1) // capacity
            self._new_segment = self._new_segment or starts_segment
            self._make_fit(table, [part.end + block.count for part in table.parts])

            own = records[done : done + len(block.members)]
            done += len(own)
            instructions = np.full((len(own), block.rows_each), -1)
            for i, member in enumerate(block.members):
                text = text_of(member)
                place, numbers = texts.add(text, member.instructions)
                own["text_begin"][i], own["text"][i], own["text_nbytes"][i] = place
                own["text_crc"][i] = text_checksum(text, member.instructions)
                if numbers:
                    instructions[i] = numbers
            stored = table.write(block, instructions, touched)
            for name, value in (stored | block_statistics(block)).items():
                own[name] = value
        self._opened.files.sync(touched)
        texts.commit()
        self._opened.log.append(records)
        self._notice()
        return list(range(first, first + len(trajectories)))

    def _table_for(self, schema: Schema) -> Table:
        """Return the table of a schema. If there is none, it is created."""
        tables = self._opened.tables
        for table in reversed(tables):
            if table.schema == schema:
                return table
        table = Table.create(self._opened.files, len(tables), schema, self._capacity(schema))
        tables.append(table)
        quota, nbytes = self.limits.nbytes, table.columns.segment_nbytes
        uneven = [field for field in schema.large if field.nbytes % 16]  # `segment_rows` is large because of these
        if quota is not None and uneven and nbytes > quota // 2:
            field = min(uneven, key=lambda field: math.gcd(field.nbytes, 16))
            warnings.warn(
                f"max_bytes = {quota} is little for files of {nbytes} bytes, so at times few trajectories are left; "
                f"raise it, or pad {field}, so that its {field.nbytes} bytes become a multiple of 16",
                stacklevel=2,
            )
        return table

    def _capacity(self, schema: Schema) -> tuple[int, int]:
        """Return the capacity of the tables that this writer creates."""
        # segments are smaller than requested if the limits allow fewer than `PARTS` of that size
        nbytes, limits = self._segment_nbytes, self.limits
        if limits.rows is not None:
            nbytes = min(nbytes, limits.rows // PARTS * schema.row_nbytes)
        if limits.nbytes is not None:
            nbytes = min(nbytes, limits.nbytes // PARTS)
        return schema.capacity(nbytes)

    def _write_known(self) -> None:
        """Write the id after the last record to the manifest, so that the loss of log records is detected as damage."""
        fresh = replace(self.manifest, known=self.snapshot.next_id)
        with suppress(OSError, UserError):  # if this fails, the manifest keeps an older and smaller id, which is valid
            if not self._uncommitted and fresh != self.manifest and Manifest.read(self._all) == self.manifest:
                fresh.write(self._all)
                self._opened.manifest = fresh
        self._new_segment = False

    # --- dropping --------------------------------------------------------------------------------
    def drop(self, before: int) -> None:
        """Drop all trajectories with ids below ``before``, and remove the segments that have no row of a kept one."""
        with self.lock:
            self._check_writable()
            now = self.snapshot
            if before <= now.first_id:
                return
            first = min(before, now.next_id)
            kept = [self._kept_from(table, first) for table in self._opened.tables]
            rows, finals = tuple(row for row, _ in kept), tuple(final for _, final in kept)
            fresh = replace(self.manifest, first=first, rows=rows, finals=finals, known=now.next_id)
            if not self._uncommitted:
                fresh.write(self._all)
            self._opened.manifest = fresh
            self._drop_segments()

    def _kept_from(self, table: Table, first: int) -> tuple[int, int]:
        """Return the first row and the first final observation of a table that belong to ids from ``first`` on."""
        if (found := table.index.find(first)) is not None:
            record = self.record(found[0])
            return int(record["row"]), int(record["final"])
        # the table has no such trajectories, so its last segment is dropped even if it is not full
        return table.columns.segment_end, table.final_columns.segment_end

    def _make_room(self, trajectories: Sequence[FlatTrajectory]) -> None:
        """Drop the oldest trajectories until the new ``trajectories`` fit into ``limits.nbytes``.

        Raises:
            UserError: the new trajectories do not fit even into an empty buffer. No trajectory is dropped then.
        """
        if (quota := self.limits.nbytes) is None:
            return
        # for each schema the numbers of new rows and of new final observations; bytes of new records and texts
        counts, texts = dict[Schema, tuple[int, int]](), 0
        for trajectory in trajectories:
            schema = Schema.of(trajectory.columns)
            finals = 0
            if schema.deduplicated:
                shape = (1, trajectory.steps, trajectory.batch)
                finals = int((~followed(trajectory.columns, shape, schema.deduplicated)).sum())
            before = counts.get(schema, (0, 0))
            counts[schema] = before[0] + trajectory.count, before[1] + finals
            texts += _log_and_text_nbytes(trajectory)
        added = {self._table_for(schema).number: count for schema, count in counts.items()}

        def nbytes_of_rows(first: int) -> int:
            """Return the bytes of all segments once ids below ``first`` are dropped and the new rows are added."""
            total = 0
            for table in self._opened.tables:
                new = added.get(table.number, (0, 0))
                for part, kept, count in zip(table.parts, self._kept_from(table, first), new, strict=True):
                    total += part.nbytes(max(part.end, kept) + count, kept)
            return total

        def fits(first: int) -> bool:
            """Return whether the new ones fit once ids below ``first`` are dropped. If so, this holds for later ids."""
            dropped, left = self._log_nbytes(first)
            if self._is_worth_shortening(dropped, left):
                dropped = 0
            return nbytes_of_rows(first) + dropped + left + texts <= quota

        least = nbytes_of_rows(self.snapshot.next_id) + texts
        if least > quota:
            raise UserError(f"max_bytes = {quota}: what is added at once needs {least}")
        while True:
            now = self.snapshot
            if nbytes_of_rows(now.first_id) + sum(self._log_nbytes(now.first_id)) + texts <= quota:
                return
            empty = now.first_id >= now.next_id
            if self.shorten_log(always=empty):
                continue
            if empty:  # all trajectories are dropped, and the files that remain cannot be made smaller
                raise UserError(f"max_bytes = {quota}: there is no room for {least} more")
            # All trajectories that must go are dropped together, because each drop writes a manifest to the disk.
            following = now.first_id + 1
            self.drop(following + bisect_left(range(following, now.next_id), True, key=fits))

    def _evict(self) -> None:
        """Drop the trajectories that exceed the limits of rows and age.

        The newest trajectory is always kept. A trajectory is never dropped before all that were added before it.
        """
        now, limit = self.snapshot, self.limits.rows
        if limit is not None and now.count_rows() > limit:
            rows_after = now.count_rows() - np.cumsum(now.records["steps"].astype(np.int64) * now.records["batch"])
            few = min(int(np.argmax(rows_after <= limit)) + 1, len(now.records) - 1)
            if few:
                # Trajectories are dropped up to the end of a segment, so that evictions are rare and each of them frees
                # a file, unless this would leave less than three quarters of the limit.
                whole = few - 1 + self._count_in_segment(few - 1)
                self.drop(now.first_id + (whole if rows_after[whole - 1] >= limit * 3 / 4 else few))
        if self.limits.age_s is not None:
            now = self.snapshot
            since, old, last = time.time() - self.limits.age_s, 0, len(now.records) - 1
            # The times need not increase, because the clock may have been set back. So the search ends at the first
            # trajectory that is young enough, which is usually among the first records.
            while old < last:
                young = now.records["time"][old : min(old + EXAMINED, last)] >= since
                old += int(np.argmax(young)) if young.any() else len(young)
                if young.any():
                    break
            self.drop(now.first_id + old)

    def _count_in_segment(self, position: int) -> int:
        """Return the number of consecutive trajectories that begin in the same segment, from ``position`` on.

        ``position`` is an index into ``snapshot.records``. The first trajectory that begins in another segment or
        belongs to another table ends the sequence.
        """
        kept = self.snapshot.records[position:]
        schema, capacity = kept["schema"][0], self._opened.tables[int(kept["schema"][0])].columns.capacity
        later = (kept["schema"] != schema) | (kept["row"] // capacity > kept["row"][0] // capacity)
        return int(np.argmax(later)) if later.any() else len(kept)

    def shorten_log(self, *, always: bool = False) -> bool:
        """Rewrite the log and the texts without dropped trajectories if these occupy more than half of the bytes.

        The kept records and texts are copied to new files, which readers open at their next refresh. With ``always``,
        this is done if dropped trajectories occupy any bytes. Returns whether new files were made.
        """
        now = self.snapshot
        dropped, left = self._log_nbytes(now.first_id)
        if not (self._is_worth_shortening(dropped, left) or (always and dropped)):
            return False
        texts, begin = self._opened.texts, self._texts_begin(now.first_id)
        number = int(self.manifest.log[-6:]) + 1
        fresh = replace(
            self.manifest,
            base=now.first_id,
            known=now.next_id,
            log=f"log-{number:06d}",
            texts=f"texts-{number:06d}",
            texts_begin=begin,
        )
        with self._replacing_files(fresh):
            texts.copy(fresh.texts, begin)
            with closing(Log(self._opened.files, fresh.log, writable=True)) as log:
                log.append(now.records.copy())
        return True

    def _texts_begin(self, first: int) -> int:
        """Return the offset from which on the trajectories with ids from ``first`` on have their texts."""
        kept = self.snapshot.records[first - self.snapshot.first_id :]
        return int(kept["text_begin"][0]) if len(kept) else self._opened.texts.end

    def _log_nbytes(self, first: int) -> tuple[int, int]:
        """Return how many bytes of the log and the texts are of ids below ``first``, and how many of all others."""
        texts, begin = self._opened.texts, self._texts_begin(first)
        dropped = (first - self.manifest.base) * RECORD.itemsize + begin - texts.begin
        return dropped, (self.snapshot.next_id - first) * RECORD.itemsize + texts.end - begin

    def _is_worth_shortening(self, dropped: int, left: int) -> bool:
        """Return whether `shorten_log` rewrites the log and the texts, for numbers of bytes from `_log_nbytes`."""
        return dropped > max(left, min(SHORTEN, (self.limits.nbytes or SHORTEN) // 8))

    # --- replacing everything --------------------------------------------------------------------
    def can_adopt(self, source: BufferReader) -> bool:
        """Return whether the files of ``source`` fit into ``limits.nbytes``, and its segments are small enough for it.

        Larger segments than this writer creates could not be dropped one after the other to make room.
        """
        if self.limits.nbytes is None:
            return True
        small = all(own.capacity[0] <= self._capacity(own.schema)[0] for own in source._opened.tables)
        return small and source.nbytes <= self.limits.nbytes

    def adopt(self, source: BufferReader, before_commit: Callable[[], object] = bool) -> None:
        """Replace the content by that of another buffer or checkpoint, completely or not at all, even after a crash.

        The files of ``source`` are added to this folder under the names of a new epoch. Files to which data may still
        be appended are copied without what is not part of ``source``, and all others are hard links. ``before_commit``
        is called after all files are added and before they replace the old content. If it raises an error, the buffer
        keeps its old content.
        """
        with self.lock:
            self._check_writable()
            for why in source.lost_files():
                raise UserError(f"{why}; {SALVAGE}")
            opened, next_id, ours = source._opened, source.snapshot.next_id, self.manifest
            fresh = replace(source.manifest, identity=ours.identity, epoch=ours.epoch + 1, known=next_id, end=None)
            target = self._all.with_prefix(fresh.prefix)
            with self._replacing_files(fresh):
                target.take(opened.files, opened.log.name, (next_id - source.manifest.base) * RECORD.itemsize)
                target.take(opened.files, opened.texts.name, opened.texts.nbytes)
                for table in opened.tables:
                    target.take(opened.files, table.schema_file)
                    for name, parts in table.kept_files().items():
                        target.take(opened.files, name, parts=parts)
                if self.folder is not None:
                    atomic.sync(self.folder)
                before_commit()

    @contextmanager
    def _replacing_files(self, fresh: Manifest) -> Iterator[None]:
        """Make ``fresh`` the manifest after the block, which creates the files that it names, and open them.

        After an error or a crash in the block, the old files stay in use. If the new files cannot be opened, the buffer
        is closed. Inside `replacing`, the manifest on disk stays as it is.
        """
        self._remove_leftovers()  # files of an interrupted call could have the names of the new ones
        try:
            yield
            if self._uncommitted:
                self._exchange(fresh)
            else:
                fresh.write(self._all)
        finally:
            if Manifest.read(self._all) == fresh:
                with self.exclusive():
                    self._exchange(fresh)
            self._remove_leftovers()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Replace the content by the trajectories that are added inside the context.

        The replacement takes effect at the end of the context. After an error or a crash inside it, the buffer has its
        old content.
        """
        with self.lock:
            self._check_writable()
            self._remove_leftovers()
            before = self.manifest
            with self.exclusive():
                self._uncommitted = True
                try:
                    self._exchange(Manifest(identity=before.identity, epoch=before.epoch + 1))
                    yield
                    replace(self.manifest, known=self.snapshot.next_id).write(self._all)
                finally:
                    self._uncommitted = False
                    # opens the new files if their manifest was written, else the old files
                    self._exchange(Manifest.read(self._all) or before)
                    self._remove_leftovers()

    def _leave_exposed_records(self) -> None:
        """Continue in new files if other processes may have read log records of a failed write or of a crashed writer.

        Such a process may be reading these records and their rows, which the next write would otherwise overwrite.
        """
        if self._opened.log.exposed and self.folder is not None and not self._uncommitted:
            self.adopt(self)

    def _exchange(self, manifest: Manifest) -> None:
        """Close all open files and open those of ``manifest``. After an error the buffer is closed."""
        if not self._closed:
            self._closed = True
            self._opened.close()
        self._open(manifest)
        self._closed = False

    def _remove_leftovers(self) -> None:
        """Remove the buffer's files that are not in use, which a crash or an error has left behind."""
        if self._closed:
            return
        opened = self._opened
        known = {opened.log.name, opened.texts.name}
        for table in opened.tables:
            known |= {table.schema_file, *table.kept_files()}
        keep = {"lock", Manifest.NAME, *(self.manifest.prefix + name for name in known)}
        for name in self._all.names():
            # inside `replacing`, the manifest on disk names the files of another epoch, which must be kept
            is_mine = name.startswith(self.manifest.prefix) if self._uncommitted else OURS.fullmatch(name)
            if is_mine and name not in keep:
                self._all.remove(name)

    def _check_writable(self) -> None:
        """Raise an error if this object must not change the folder."""
        self._check_open()
        if not self._writable:
            raise UserError(f"{self.folder or 'buffer'}: a forked process can only read the buffer of the first one")
        if self.folder is not None:
            try:
                ours = os.path.samestat(os.stat(self.folder / "lock"), os.fstat(self._lock_file))
            except FileNotFoundError:
                ours = False
            if not ours:
                raise UserError(f"{self.folder}: was removed or replaced while this process had it open for writing")

    def after_fork(self) -> None:
        super().after_fork()
        self._unlock()  # closes only the copy of the descriptor, so the first process keeps the lock

    def close(self) -> None:
        with self.lock:
            if not self._closed and self._writable:
                self._write_known()
            super().close()
            self._unlock()

    def _unlock(self) -> None:
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1


def _log_and_text_nbytes(trajectory: FlatTrajectory) -> int:
    """Return the bytes of a trajectory's log record and of all its texts."""
    descriptions = sum(len(description_line(text)) for text in set(trajectory.instructions))
    return RECORD.itemsize + len(text_of(trajectory).encode()) + descriptions


def block_statistics(block: TrajectoryBlock) -> dict[str, Any]:
    """Return for each trajectory of a block the fields of `log.RECORD` that are computed from its content."""
    n, steps, batch = block.shape
    outcomes = {None: 0, True: SUCCESS, False: FAILURE}
    flags = [outcomes[member.success] | (INSTRUCTED if member.instructions else 0) for member in block.members]
    found: dict[str, Any] = {
        "flags": np.array(flags),
        "version_low": -1.0,
        "version_high": -1.0,
        "reward": 0.0,
        "steps": steps,
        "batch": batch,
        "epochs": [member.epochs for member in block.members],
        "episodes": block.ends.reshape(n, -1).sum(axis=1),
    }
    intervened = block.columns.get(("intervene_flags",))
    if intervened is not None:
        found["flags"] |= np.where(intervened.reshape(n, -1).any(dim=1).numpy(), INTERVENED, 0)
    versions = block.columns.get(("versions",))
    if versions is not None and versions.numel():
        values = versions.reshape(n, -1).double().numpy()
        known = ~np.isnan(values)
        for name, extreme, start in (("version_low", np.min, np.inf), ("version_high", np.max, -np.inf)):
            found[name] = np.where(known.any(axis=1), extreme(values, axis=1, initial=start, where=known), -1.0)
    rewards = block.columns.get(("rewards",))
    if rewards is not None:
        found["reward"] = rewards.double().numpy().reshape(n, -1).sum(axis=1)
    return found
