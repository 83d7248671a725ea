"""A directory of trajectories, to read: what one process writes, any number of others read at the same time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from gleanrl.buffer.files import DiskFiles, Files, MemoryFiles, Named, read_whole
from gleanrl.buffer.index import Index
from gleanrl.buffer.log import LONGEST, RECORD, SALVAGE, Log
from gleanrl.buffer.manifest import Manifest, Watched
from gleanrl.buffer.notes import restored, text_checksum
from gleanrl.buffer.schema import INSTRUCTION
from gleanrl.buffer.snapshot import StoredSnapshot
from gleanrl.buffer.table import Table, visible
from gleanrl.buffer.texts import Texts
from gleanrl.buffer.trajectory import Rows
from gleanrl.utils.errors import UserError

# what belongs to one manifest
OPENED = ("manifest", "files", "tables", "_indexes", "_log", "_texts", "_seen", "_snapshot")


class Stored:
    """Trajectories by id, counted from 0.

    Args:
        folder: where they are; None keeps them in memory.
        writable: a `Store` will add to them.
    """

    def __init__(self, folder: FilePath | None, *, writable: bool = False) -> None:
        self.folder, self._writable = folder, writable
        self._lock = threading.RLock()
        self._replacing = self._closed = False  # whether new samples wait, or fail
        self._holders = Counter[int]()  # samples under way, by how many drops there had been when they began
        self._drops = 0
        self._changed = threading.Condition()
        self._late = False  # something was dropped and is still mapped
        if folder is not None and not folder.is_dir():
            raise UserError(f"{folder}: no such buffer")
        self._all: Files = MemoryFiles() if folder is None else DiskFiles(folder, writable=writable)
        self._watched = Watched(self._all)
        self._open_newest(self._found())

    def _found(self) -> Manifest:
        manifest = Manifest.read(self._all)
        if manifest is None:
            if not self._writable:
                raise UserError(f"{self.folder}: no buffer is in there")
            manifest = Manifest()
            manifest.write(self._all)
        return manifest

    def _open(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.files: Files = Named(self._all, manifest.prefix)
        self.tables: list[Table] = []
        self._indexes: list[Index] = []  # of each table
        limit = LONGEST if manifest.end is None else manifest.end - manifest.base
        least = max(manifest.known, manifest.end or 0) - manifest.base
        named = (manifest.log, manifest.texts, Texts.INSTRUCTIONS)
        there = set(self.files.names())
        lost = [name for name in named if name not in there]
        if lost and (not self._writable or there - {*named}):  # else the buffer is new
            raise UserError(f"{self.files.where(lost[0])}: missing; without it the others cannot be read")
        self._log = Log(self.files, manifest.log, writable=self._writable, limit=limit, least=least)
        self._texts = Texts(self.files, manifest.texts, writable=self._writable)
        self._seen = 0  # log records that the tables know
        try:
            self._notice()
        except BaseException:
            self._release_all()
            raise

    # --- what is there -----------------------------------------------------------------------------
    @property
    def next_id(self) -> int:
        return self.manifest.base + self._seen

    @property
    def first_id(self) -> int:
        return self.manifest.first

    def records(self, since: int = 0) -> np.ndarray[Any, Any]:
        """The log records of the trajectories that are kept, from ``since`` on, in order of their ids."""
        return self._log.records[max(since, self.first_id) - self.manifest.base : self._seen]

    def record(self, number: int) -> np.void:
        """Of one trajectory. Raises `UserError` where it is not there."""
        if not self.first_id <= number < self.next_id:
            raise UserError(f"no trajectory {number}: {self._span()}")
        return self._log.records[number - self.manifest.base]

    def survey(self) -> np.ndarray[Any, Any]:
        """The records with all that is known of the trajectories."""
        return self.records()

    @property
    def snapshot(self) -> StoredSnapshot:
        """What counts now: numbers that belong together, whatever other threads do."""
        with self._changed:
            return self._snapshot

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(table.nbytes for table in self.tables) + self._log.count * RECORD.itemsize + self._texts.nbytes

    def count_rows(self) -> int:
        """Of the trajectories that are kept."""
        return self.snapshot.count_rows()

    def refresh(self) -> bool:
        """Take notice of what the writer did; whether it did anything."""
        if self._writable or self._closed:
            return False
        with self._lock:
            if self._closed:
                return False
            manifest = self._newest()
            if not self._replaced_by(manifest):
                try:
                    return self._catch_up(manifest)
                except OSError:
                    manifest = self._newest()
                    if not self._replaced_by(manifest):
                        raise
            self._reopen(manifest)
            return True

    def _newest(self) -> Manifest:
        return self._watched.read() or self.manifest

    def _replaced_by(self, manifest: Manifest) -> bool:
        """Whether other files than those that are open are meant by it."""
        return (manifest.epoch, manifest.log) != (self.manifest.epoch, self.manifest.log)

    def _catch_up(self, manifest: Manifest) -> bool:
        dropped, self.manifest = manifest != self.manifest, manifest
        grown = self._log.refresh() > 0 or self._seen < self._log.count  # the latter where an error came between
        if grown or dropped:
            self._notice()
        return grown or dropped

    def _reopen(self, manifest: Manifest) -> None:
        """Show what the writer put in the place of everything; where that fails, all is as before."""
        with self.replaced():
            before = {name: getattr(self, name) for name in OPENED}
            try:
                self._open_newest(manifest)
            except BaseException:
                vars(self).update(before)
                raise
            _release(before["tables"], before["_log"], before["_texts"])

    def _open_newest(self, manifest: Manifest) -> None:
        """The writer may replace everything once more meanwhile."""
        try:
            self._open(manifest)
        except (OSError, UserError):
            again = self._found()
            if again == manifest:
                raise
            self._open_newest(again)

    # --- reading -----------------------------------------------------------------------------------
    def trajectory(self, number: int) -> Rows:
        """A whole trajectory, as it was added. Raises `UserError` where it is not there, or damaged."""
        return self._read(self.record(number))

    def _read(self, record: np.void) -> Rows:
        table = self.tables[int(record["schema"])]
        rows = int(record["row"]) + torch.arange(int(record["steps"]) * int(record["batch"]))
        columns = table.read(rows, [*visible(table.schema), INSTRUCTION])
        instructions = [self._texts.instruction(i) for i in columns.pop(INSTRUCTION).tolist() if i >= 0]
        text = self._texts.read(int(record["text"]), int(record["text_nbytes"]))
        if text_checksum(text, instructions) != record["text_crc"]:
            where = self.files.where(self._texts.names[0])
            raise UserError(f"{where}: its text or its instructions are not what was written (checksum)")
        return restored(record, columns, text, instructions)

    def damage(self) -> Iterator[str]:
        """What is not as it was written, a line for each trajectory; then what the log has lost."""
        for found in map(self._checked, self.records()):
            if isinstance(found, UserError):
                yield str(found)
        if (lost := self._log.damage) is not None:
            yield f"{self.files.where(self._log.name)}: {lost}"

    def salvaged(self) -> Iterator[Rows | UserError]:
        """Each trajectory that is as it was written, and why each other one is not; nothing else works afterwards.

        Those behind a damaged record of the log are among them.
        """
        every, log = self._log.every(), self._log.damage
        self._show(every, without=True)
        yield from map(self._checked, every[every["id"] >= self.first_id])
        if log is not None and log.good:
            yield UserError(f"{self.files.where(self._log.name)}: {log}")

    def whole(self) -> Iterator[Rows]:
        """All that are kept now. Raises `UserError` at the first thing that is not as it was written."""
        for why in self.lost():
            raise UserError(f"{why}; {SALVAGE}")
        for record in self.records():
            if isinstance(found := self._checked(record), UserError):
                raise found
            yield found

    def checked(self, number: int) -> Rows:
        """`trajectory`, if it is as it was written; else raises `UserError`."""
        if isinstance(found := self._checked(self.record(number)), UserError):
            raise found
        return found

    def _checked(self, record: np.void) -> Rows | UserError:
        table, count = self.tables[int(record["schema"])], int(record["steps"]) * int(record["batch"])
        try:
            found = table.stored_checksum(int(record["row"]), count, int(record["final"]), int(record["finals"]))
            rows = self._read(record)
        except UserError as error:
            return UserError(f"trajectory {record['id']}: {error}")
        if found != record["data_crc"]:
            return UserError(f"trajectory {record['id']}: its rows are not what was written (checksum)")
        return rows

    def lost(self) -> list[str]:
        """Of each file that was whole once and cannot be read, or not to its end: its name, and why."""
        log = self._log.damage
        cut = [f"{self.files.where(self._log.name)}: {log}"] if log is not None and log.good else []
        return [why for table in self.tables for why in table.lost()] + cut

    @contextmanager
    def held(self) -> Iterator[StoredSnapshot]:
        """What counts now can be read, also if it is dropped, replaced or closed meanwhile.

        Raises `RuntimeError` where the buffer is closed.
        """
        with self._changed:
            while self._replacing:
                self._changed.wait()
            if self._closed:
                raise RuntimeError("the buffer is closed")
            since, now = self._drops, self._snapshot
            self._holders[since] += 1
        try:
            yield now
        finally:
            with self._changed:
                self._holders[since] -= 1
                if not self._holders[since]:
                    del self._holders[since]
                if self._late:
                    self._unmap()
                if not self._holders:
                    self._changed.notify_all()

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Everything is released meanwhile: wait for the samples under way, and let new ones wait.

        For who has the lock; it may be within another one.
        """
        with self._changed:
            outer, self._replacing = self._replacing, True
            self._changed.wait_for(lambda: not self._holders)
        try:
            yield
        finally:
            with self._changed:
                self._replacing = outer
                self._changed.notify_all()

    def close(self) -> None:
        """Give everything back. Nothing is lost: what was added is on disk."""
        with self._lock, self.replaced():
            if not self._closed:
                self._closed = True
                self._watched.close()
                self._release_all()

    # --- inside ------------------------------------------------------------------------------------
    def _release_all(self) -> None:
        _release(self.tables, self._log, self._texts)

    def _add_table(self, table: Table) -> None:
        self.tables.append(table)
        self._indexes.append(Index())

    def _notice(self) -> None:
        """Bring tables and ids up to the log."""
        try:
            self._notice_log()
        except OSError as error:
            manifest = self._newest()
            if self._replaced_by(manifest):  # its rows are in other files: who opens those goes on
                raise
            if manifest != self.manifest:  # the segment was dropped since the manifest was read
                self.manifest = manifest
                return self._notice()
            try:
                self._notice_log(without=True)
            except FileNotFoundError:
                raise UserError(f"{error.filename}: missing, though the log names its trajectories") from None
            if self._writable:
                raise UserError(f"{self.lost()[0]}; {SALVAGE}") from None

    def _notice_log(self, *, without: bool = False) -> None:
        count = self._log.count
        fresh = self._log.records[self._seen : count]
        with self._changed:  # nobody begins a sample of what is only half known
            self._show(fresh, without=without)
            for number, index in enumerate(self._indexes):
                index.append(fresh, np.flatnonzero(fresh["schema"] == number))
            self._seen = count
            self._publish()

    def _publish(self) -> None:
        """What is known counts from now on, all of it at once."""
        indexes = tuple(self._indexes)
        ends = tuple(max(index.end, self.manifest.kept(table)[0]) for table, index in enumerate(indexes))
        next_id = max(self.next_id, self.first_id)  # a reader knows of drops before it has looked at the log
        self._snapshot = StoredSnapshot(
            self.manifest, next_id, tuple(self.tables), indexes, ends, self._log, self._texts
        )

    def _show(self, records: np.ndarray[Any, Any], *, without: bool) -> None:
        """The rows of these records count; ``without`` the files that cannot be read, or else they are an `OSError`."""
        known = max(int((records["schema"] + 1).max(initial=0)), len(self.manifest.rows))
        for number in range(len(self.tables), known):
            self._add_table(self._described(number))
        self._release()
        for table in self.tables:
            own = np.flatnonzero(records["schema"] == table.number)
            if len(own):
                last = records[own[-1]]
                rows = int(last["row"]) + int(last["steps"]) * int(last["batch"])
                finals = int(last["final"]) + int(last["finals"])
                self._fit(table, rows, finals)
                table.show(rows, finals, without=without)

    def _described(self, number: int) -> Table:
        name = schema_name(number)
        try:
            return Table.described(self.files, number, read_whole(self.files, name))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{self.files.where(name)}: damaged ({error})") from None

    def _release(self) -> None:
        """Let go of the segments of dropped trajectories, as soon as no sample that began before reads them."""
        with self._changed:
            self._publish()
            number, dropped = self._drops + 1, False
            for table in self.tables:
                dropped = table.drop(*self.manifest.kept(table.number), number, remove=self._writable) or dropped
            if dropped:
                self._drops = number
                self._unmap()

    def _unmap(self) -> None:
        oldest = min(self._holders, default=self._drops)
        left = [table.release(oldest) for table in self.tables]
        self._late = any(left)

    def _fit(self, table: Table, rows: int, finals: int) -> None:
        """See to it that a table has address space. Raises `UserError` where there is none."""
        if not table.fits(rows, finals):
            try:
                with self.replaced():
                    table.grow(rows, finals)
            except OSError as error:
                raise UserError(f"{self.folder or 'buffer'}: no address space for more rows ({error})") from None

    def _span(self) -> str:
        if self.first_id == self.next_id:
            return "the buffer is empty"
        return f"the buffer has {self.first_id} to {self.next_id - 1}"


def _release(tables: Sequence[Table], log: Log, texts: Texts) -> None:
    for table in tables:
        table.close()
    log.close()
    texts.close()


def schema_name(number: int) -> str:
    return f"schema-{number:03d}.json"
