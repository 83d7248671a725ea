"""A directory of trajectories: one process writes, any number read, and after a crash what was acknowledged is there.

Order of a write: rows, sync; texts, sync; log record, sync; then it counts. Whatever a crash leaves behind the last
whole log record was never acknowledged, and is written over.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path as FilePath

import numpy as np
import torch

from gleanrl.buffer import limits
from gleanrl.buffer.files import DiskFiles, Named, lock, write_whole
from gleanrl.buffer.limits import Limits
from gleanrl.buffer.log import RECORD, Log
from gleanrl.buffer.manifest import Manifest
from gleanrl.buffer.notes import noted, text_checksum, text_of
from gleanrl.buffer.schema import Schema
from gleanrl.buffer.stack import Stack, stacks
from gleanrl.buffer.stored import SALVAGE, Stored, schema_name
from gleanrl.buffer.table import SEGMENT_NBYTES, Table
from gleanrl.buffer.trajectory import Rows
from gleanrl.utils.errors import UserError

OURS = re.compile(r"\d{3,}-((rows|last)-\d{3,}-\d{6,}|(log|texts)-\d{6,}|schema-\d{3,}\.json|instructions\.jsonl)")

SHORTEN = 1 << 20  # bytes of log and texts that are let lie, though nobody needs them


class Store(Stored):
    """Trajectories by id, counted from 0, to add to and to drop.

    Args:
        folder: where they are; None keeps them in memory.
        writable: add and drop; else read what another process writes.
        limits: of what is kept.
        segment_nbytes: about how large a file is; eviction is in these.
    """

    def __init__(
        self,
        folder: FilePath | None,
        *,
        writable: bool = True,
        limits: Limits | None = None,
        segment_nbytes: int = SEGMENT_NBYTES,
    ) -> None:
        self.limits, self._segment_nbytes = limits or Limits(), segment_nbytes
        self._provisional = False  # the manifest is not to be written yet
        self._begun = False  # a segment, since the manifest told how many trajectories there are
        self._held = _taken(folder) if folder is not None and writable else -1
        try:
            super().__init__(folder, writable=writable)
            if writable:
                self._tidy()
        except BaseException:
            self._let_go()
            raise

    # --- writing -----------------------------------------------------------------------------------
    def add(self, trajectories: Sequence[Rows]) -> list[int]:
        """Store trajectories, all or none; they are on disk when this returns.

        Raises:
            OSError: the disk is full, or fails; nothing was added.
            UserError: ``limits.nbytes`` has no room for one of them.
        """
        with self._lock:
            self._check_writable()
            if self._seen < self._log.count:  # an error came between the log and the tables
                self._notice()
            self._renew()
            limits.make_room(self, trajectories)
            try:
                ids = self._commit(trajectories)
            except BaseException:
                for table in self.tables:
                    table.forget()
                self._texts.forget()
                with suppress(OSError, UserError):
                    self._tidy()  # a file that nobody knows yet
                    self._renew()
                raise
            try:
                limits.evict(self)
                self.shorten()
            except (OSError, UserError) as error:  # what was added is there
                warnings.warn(f"the buffer keeps more than it should until the next add: {error}", stacklevel=2)
            if self._begun:
                self._tell()
            return ids

    def _commit(self, trajectories: Sequence[Rows]) -> list[int]:
        records, first = np.zeros(len(trajectories), RECORD), self.next_id
        records["id"], records["commit"], records["time"] = np.arange(len(records)) + first, first, time.time()
        touched: set[int] = set()
        done = 0
        for stack in stacks(trajectories):
            table = self.table_for(stack.schema)
            self._begun = self._begun or table.begins(stack.count)
            self._fit(table, *table.reach(stack.count))
            known = table.write(stack, self._numbers(stack), touched) | noted(stack) | self._noted_texts(stack)
            own = records[done : done + len(stack.members)]
            for name, value in known.items():
                own[name] = value
            done += len(own)
        self.files.sync(touched)
        self._texts.commit()
        self._log.append(records)
        self._notice()
        return list(range(first, first + len(trajectories)))

    def _tell(self) -> None:
        """Have the manifest say how many records the log has: one that is cut short later is then no log of a crash."""
        fresh = replace(self.manifest, known=self.next_id)
        with suppress(OSError, UserError):  # an older number is true as well
            if not self._provisional and fresh != self.manifest and Manifest.read(self._all) == self.manifest:
                fresh.write(self._all)
                self.manifest = fresh
        self._begun = False

    def _numbers(self, stack: Stack) -> torch.Tensor:
        """int32 ``[n * T * B]``: the numbers of the instructions."""
        found = torch.full((stack.count,), -1, dtype=torch.int32)
        for i, rows in enumerate(stack.members):
            if rows.instructions:
                numbers = self._texts.numbers(rows.instructions)
                found[i * stack.each : (i + 1) * stack.each] = torch.tensor(numbers, dtype=torch.int32)
        return found

    def _noted_texts(self, stack: Stack) -> dict[str, list[int]]:
        texts = [text_of(rows) for rows in stack.members]
        places = [self._texts.note(text) for text in texts]
        sums = [text_checksum(text, rows.instructions) for text, rows in zip(texts, stack.members, strict=True)]
        return {"text": [at for at, _ in places], "text_nbytes": [nbytes for _, nbytes in places], "text_crc": sums}

    def share(self, folder: FilePath) -> None:
        """A checkpoint of what there is now, as a folder that is a buffer to read: links, so it costs next to nothing.

        Segments only grow, and are removed but never written over, so a link keeps what it pointed to.
        """
        with self._lock:
            self._check_open()
            for why in self.lost():
                raise UserError(f"{why}; {SALVAGE}")
            names = [self._log.name, *self._texts.names]
            names += [name for table in self.tables for name in (*table.files(), schema_name(table.number))]
            for name in names:
                self.files.share(name, folder)
            manifest = replace(self.manifest, end=self.next_id)
            (folder / Manifest.NAME).write_text(manifest.text())

    def adopt(self, folder: FilePath, also: Callable[[], object] = bool) -> None:
        """Become what a checkpoint holds; what was here is forgotten. All or nothing, also in a crash.

        ``also`` is done before it counts; where it raises, nothing has changed.
        """
        with self._lock:
            self._check_writable()
            with closing(Stored(folder)) as source:
                self._become(source, also)

    def _renew(self) -> None:
        """Where readers may have seen records that do not count: go on in other files, and never over their rows."""
        if self._log.exposed and self.files.on_disk and not self._provisional:
            self._become(self)

    def _become(self, source: Stored, also: Callable[[], object] = bool) -> None:
        """Files of another buffer, or of this one, are this buffer's next epoch: links, copies of what will grow."""
        for why in source.lost():
            raise UserError(f"{why}; {SALVAGE}")
        told, count = source.manifest, source.next_id - source.manifest.base
        fresh = replace(told, epoch=self.manifest.epoch + 1, known=source.next_id, end=None)
        target = Named(self._all, fresh.prefix)

        def bring(name: str, nbytes: int | None = None, *, copy: bool = False) -> None:
            path = FilePath(source.files.where(name))
            target.bring(path, name, path.stat().st_size if copy and nbytes is None else nbytes)

        self._tidy()  # the next epoch's names are free, whatever failed before
        try:
            bring(told.log, count * RECORD.itemsize)
            for name in source._texts.names:
                bring(name, copy=True)
            for table in source.tables:
                bring(schema_name(table.number))
                for name in table.files():
                    bring(name, copy=name in table.unfinished())
            also()
            fresh.write(self._all)
        finally:
            if Manifest.read(self._all) == fresh:
                with self.replaced():
                    self._exchange(fresh)
            self._tidy()

    @contextmanager
    def afresh(self) -> Iterator[None]:
        """What is added meanwhile replaces all that was here. All or nothing, also in a crash."""
        with self._lock:
            self._check_writable()
            self._tidy()
            with self.replaced():
                self._provisional = True
                try:
                    self._exchange(Manifest(epoch=self.manifest.epoch + 1))
                    yield
                    replace(self.manifest, known=self.next_id).write(self._all)
                finally:
                    self._provisional = False
                    self._exchange(self._found())  # the new one only if it was written
                    self._tidy()

    def _exchange(self, manifest: Manifest) -> None:
        """Closed until it is open: where this fails, nothing goes on with half of it."""
        if not self._closed:
            self._closed = True
            self._release_all()
        self._open(manifest)
        self._closed = False

    def drop(self, before: int) -> None:
        """Forget the trajectories below an id, and the segments that held no other."""
        with self._lock:
            self._check_writable()
            if before <= self.first_id:
                return
            first = min(before, self.next_id)
            kept = [self._first_kept(table, first) for table in self.tables]
            rows, finals = (tuple(column) for column in zip(*kept, strict=True))
            fresh = replace(self.manifest, first=first, rows=rows, finals=finals, known=self.next_id)
            if not self._provisional:
                fresh.write(self._all)
            self.manifest = fresh
            self._release()

    def _first_kept(self, table: Table, first: int) -> tuple[int, int]:
        ids = self._indexes[table.number].ids(first)
        if not len(ids):
            return table.end()  # also the segments that are not full
        record = self._log.records[int(ids[0]) - self.manifest.base]
        return int(record["row"]), int(record["final"])

    @property
    def instructions_nbytes(self) -> int:
        """Of the task descriptions, which are kept for ever."""
        return self._texts.nbytes - self._texts.end

    def shorten(self, *, always: bool = False) -> bool:
        """Begin a new log and texts where more than half of them is of trajectories that are gone; whether that was so.

        Also whoever reads opens them anew. ``always``: however little it is.
        """
        kept, end = self.records(), self._texts.end
        begin = int(kept["text"][0]) if len(kept) else end  # places of texts only rise
        gone = (self.first_id - self.manifest.base) * RECORD.itemsize + begin
        left = len(kept) * RECORD.itemsize + end - begin
        least = 0 if always else max(left, min(SHORTEN, (self.limits.nbytes or SHORTEN) // 8))
        if self._provisional or gone <= least:
            return False
        number = int(self.manifest.log[-6:]) + 1
        fresh = replace(self.manifest, base=self.first_id, known=self.next_id)
        fresh = replace(fresh, log=f"log-{number:06d}", texts=f"texts-{number:06d}")
        moved = kept.copy()
        moved["text"] -= begin
        self._tidy()
        try:
            self._texts.copy(fresh.texts, begin)
            with closing(Log(self.files, fresh.log, writable=True)) as log:
                log.append(moved)
            fresh.write(self._all)
        finally:
            if Manifest.read(self._all) == fresh:
                with self.replaced():
                    self._reopen(fresh)
            self._tidy()
        return True

    @contextmanager
    def still(self) -> Iterator[None]:
        """Nothing is added or dropped meanwhile. Raises `RuntimeError` where the buffer is closed."""
        with self._lock:
            self._check_open()
            yield

    def close(self) -> None:
        with self._lock:
            if self._writable and not self._closed:
                self._tell()
            super().close()
            self._let_go()

    def _let_go(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    # --- inside ------------------------------------------------------------------------------------
    def _check_writable(self) -> None:
        self._check_open()
        if not self._writable:
            raise UserError(f"{self.folder}: the buffer was opened with read_only=True")

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the buffer is closed")

    def table_for(self, schema: Schema) -> Table:
        """The table of a schema; it is made where there is none."""
        for table in reversed(self.tables):
            if table.schema == schema:
                return table
        nbytes = self.limits.segment(self._segment_nbytes, schema)
        table = Table.new(self.files, len(self.tables), schema, nbytes)
        write_whole(self.files, schema_name(table.number), table.describe())
        self._add_table(table)
        return table

    def _tidy(self) -> None:
        """Remove what a crash or an error left behind: segments that nothing in the log mentions, and other epochs."""
        if self._closed or self._provisional:
            return  # what is open is not what counts
        known = {self._log.name, *self._texts.names, *(schema_name(table.number) for table in self.tables)}
        for table in self.tables:
            known |= set(table.files())
        keep = {"lock", Manifest.NAME, *(self.manifest.prefix + name for name in known)}
        for name in self._all.names():
            if name not in keep and OURS.fullmatch(name):
                self._all.remove(name)


def _taken(folder: FilePath) -> int:
    """The writer's lock of a folder; it is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    there = Manifest.read(DiskFiles(folder, writable=False))
    if there is not None and there.end is not None:
        why = "a checkpoint is not written into; load it into a buffer with a folder of its own"
        raise UserError(f"{folder}: {why}")
    return lock(folder)
