"""A directory of trajectories: one process writes, any number read, and after a crash what was acknowledged is there.

Order of a write: rows, sync; texts, sync; log record, sync; then it counts. Whatever a crash leaves behind the last
whole log record was never acknowledged, and is written over.
"""

from __future__ import annotations

import base64
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.files import DiskFiles, Files, MemoryFiles, Named, lock
from gleanrl.buffer.log import FAILURE, INTERVENED, LONGEST, RECORD, SUCCESS, Log
from gleanrl.buffer.manifest import Manifest
from gleanrl.buffer.schema import INSTRUCTION, Schema
from gleanrl.buffer.table import SEGMENT_NBYTES, Table, visible
from gleanrl.buffer.texts import Texts
from gleanrl.buffer.trajectory import Rows
from gleanrl.errors import UserError

OURS = re.compile(r"\d{3}-(rows|last|log|texts|schema|instructions)\b")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a buffer may keep; the oldest go, by whole segments."""

    rows: int | None = None
    nbytes: int | None = None
    age_s: float | None = None


class Ids:
    """Rising ids, appended in constant time on average."""

    def __init__(self) -> None:
        self._all, self._count = np.zeros(1024, np.int64), 0

    def append(self, ids: np.ndarray[Any, Any]) -> None:
        count = self._count + len(ids)
        if count > len(self._all):
            self._all = np.concatenate([self._all[: self._count], np.zeros(max(count, self._count), np.int64)])
        self._all[self._count : count] = ids
        self._count = count

    def since(self, first: int) -> np.ndarray[Any, Any]:
        known = self._all[: self._count]
        return known[np.searchsorted(known, first) :]


class Store:
    """Trajectories by id, counted from 0.

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
        self.folder, self.limits, self._segment_nbytes = folder, limits or Limits(), segment_nbytes
        self._lock = threading.RLock()
        self._held, self._closed = -1, False
        self._provisional = False  # the manifest is not to be written yet
        if folder is not None and writable:
            folder.mkdir(parents=True, exist_ok=True)
            self._held = lock(folder)
        elif folder is not None and not folder.is_dir():
            raise UserError(f"{folder}: no such buffer")
        self._all: Files = MemoryFiles() if folder is None else DiskFiles(folder, writable=writable)
        self._writable = writable
        manifest = Manifest.read(self._all)
        if manifest is None:
            if not writable:
                raise UserError(f"{folder}: no buffer is in there")
            manifest = Manifest()
            manifest.write(self._all)
        if manifest.end is not None and writable:
            raise UserError(
                f"{folder}: a checkpoint is not written into; load it into a buffer with a folder of its own"
            )
        self._open(manifest)
        if writable:
            self._tidy()

    def _open(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.files: Files = Named(self._all, manifest.prefix)
        self.tables: list[Table] = []
        self._ids: list[Ids] = []  # of each table's trajectories
        limit = LONGEST if manifest.end is None else manifest.end - manifest.base
        self._log = Log(self.files, manifest.log, writable=self._writable, limit=limit)
        self._texts = Texts(self.files, manifest.texts, writable=self._writable)
        self._seen = 0  # log records that the tables know
        self._notice()

    # --- what is there -----------------------------------------------------------------------------
    @property
    def next_id(self) -> int:
        return self.manifest.base + self._seen

    @property
    def first_id(self) -> int:
        return self.manifest.first

    def records(self) -> np.ndarray[Any, Any]:
        """The log records of all trajectories that are kept, in order of their ids."""
        return self._log.records[self.first_id - self.manifest.base : self._seen]

    def record(self, number: int) -> np.void:
        """Of one trajectory. Raises `UserError` where it is not there."""
        if not self.first_id <= number < self.next_id:
            raise UserError(f"no trajectory {number}: {self._span()}")
        return self._log.records[number - self.manifest.base]

    def ids(self, table: int, since: int = 0) -> np.ndarray[Any, Any]:
        """Ids of a table's trajectories that are kept, from ``since`` on."""
        return self._ids[table].since(max(since, self.first_id))

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(table.nbytes for table in self.tables) + self._log.count * RECORD.itemsize + self._texts.nbytes

    def refresh(self) -> bool:
        """Take notice of what the writer did; whether it did anything."""
        if self._writable:
            return False
        with self._lock:
            manifest = Manifest.read(self._all) or self.manifest
            if (manifest.epoch, manifest.log) != (self.manifest.epoch, self.manifest.log):
                self._release_all()
                self._open(manifest)
                return True
            dropped, self.manifest = manifest != self.manifest, manifest
            grown = self._log.refresh() > 0
            if grown or dropped:
                self._notice()
            return grown or dropped

    # --- writing -----------------------------------------------------------------------------------
    def add(self, trajectories: Sequence[Rows]) -> list[int]:
        """Store trajectories, all or none; they are on disk when this returns.

        Raises:
            OSError: the disk is full, or fails; nothing was added.
            UserError: ``limits.nbytes`` has no room for one of them.
        """
        with self._lock:
            counters = [(table.rows, table.finals) for table in self.tables]
            try:
                return self._commit(trajectories)
            except BaseException:
                for table, (rows, finals) in zip(self.tables, counters, strict=False):
                    table.rows, table.finals = rows, finals
                for table in self.tables[len(counters) :]:
                    table.rows = table.finals = 0
                self._texts.forget()
                raise

    def _commit(self, trajectories: Sequence[Rows]) -> list[int]:
        records = np.zeros(len(trajectories), RECORD)
        touched: set[int] = set()
        for i, rows in enumerate(trajectories):
            table = self._table_for(Schema.of(rows))
            self._make_room(table.needs(rows))
            numbers = torch.tensor(self._texts.numbers(rows.instructions) or [-1] * rows.count, dtype=torch.int32)
            placed = table.write(rows, numbers, touched)
            text, nbytes = self._texts.note(_text(rows))
            low, high = _versions(rows)
            records[i] = np.array(
                (
                    *(0, 0, _flags(rows), self.next_id + i, placed.row, placed.final, text, low, high, time.time()),
                    *(_total(rows), nbytes, rows.steps, rows.batch, placed.finals, int(rows.ends().sum())),
                    *(rows.epochs, placed.data_crc, table.number, b""),
                ),
                RECORD,
            )
        self.files.sync(touched)
        self._texts.commit()
        self._log.append(records)
        first = self.next_id
        self._notice()
        self._evict()
        return list(range(first, first + len(trajectories)))

    def share(self, folder: FilePath) -> None:
        """A checkpoint of what there is now, as a folder that is a buffer to read: links, so it costs next to nothing.

        Segments only grow, and are removed but never written over, so a link keeps what it pointed to.
        """
        with self._lock:
            names = [self._log.name, *self._texts.names]
            names += [name for table in self.tables for name in (*table.files(), _schema_name(table.number))]
            for name in names:
                self.files.share(name, folder)
            manifest = replace(self.manifest, end=self.next_id)
            (folder / Manifest.NAME).write_text(manifest.text())

    def adopt(self, folder: FilePath) -> None:
        """Become what a checkpoint holds; what was here is forgotten. All or nothing, also in a crash."""
        source = Store(folder, writable=False)
        try:
            told, count = source.manifest, source.next_id - source.manifest.base
            fresh = replace(told, epoch=self.manifest.epoch + 1, end=None)
            target = Named(self._all, fresh.prefix)

            def bring(name: str, nbytes: int | None = None, *, copy: bool = False) -> None:
                path = folder / (told.prefix + name)
                target.bring(path, name, path.stat().st_size if copy and nbytes is None else nbytes)

            bring(told.log, count * RECORD.itemsize)
            for name in source._texts.names:
                bring(name, copy=True)
            for table in source.tables:
                bring(_schema_name(table.number))
                for name in table.files():
                    bring(name, copy=name in table.unfinished())
        finally:
            source.close()
        with self._lock:
            fresh.write(self._all)
            self._release_all()
            self._open(fresh)
            self._tidy()

    @contextmanager
    def afresh(self) -> Iterator[None]:
        """What is added meanwhile replaces all that was here. All or nothing, also in a crash."""
        with self._lock:
            old = self.manifest
            self._release_all()
            self._provisional = True
            try:
                self._open(Manifest(epoch=old.epoch + 1))
                yield
                self._provisional = False
                self.manifest.write(self._all)
            except BaseException:
                self._provisional = False
                self._release_all()
                self._open(old)
                raise
            finally:
                self._tidy()

    def drop(self, before: int) -> None:
        """Forget the trajectories below an id, and the segments that held no other."""
        with self._lock:
            if before <= self.first_id:
                return
            first = min(before, self.next_id)
            kept = [self._first_kept(table, first) for table in self.tables]
            rows, finals = (tuple(column) for column in zip(*kept, strict=True))
            self.manifest = replace(self.manifest, first=first, rows=rows, finals=finals)
            if not self._provisional:
                self.manifest.write(self._all)
            self._release()

    def _first_kept(self, table: Table, first: int) -> tuple[int, int]:
        ids = self._ids[table.number].since(first)
        if not len(ids):
            return table.rows, table.finals
        record = self._log.records[int(ids[0]) - self.manifest.base]
        return int(record["row"]), int(record["final"])

    # --- reading -----------------------------------------------------------------------------------
    def trajectory(self, number: int) -> Rows:
        """A whole trajectory, as it was added."""
        record = self.record(number)
        table = self.tables[int(record["schema"])]
        count = int(record["steps"]) * int(record["batch"])
        rows = int(record["row"]) + torch.arange(count)
        columns = table.read(rows, [*visible(table.schema), INSTRUCTION])
        told = json.loads(self._texts.read(int(record["text"]), int(record["text_nbytes"])))
        texts = [self._texts.instruction(i) for i in columns.pop(INSTRUCTION).tolist() if i >= 0]
        return Rows(
            int(record["steps"]),
            int(record["batch"]),
            int(record["epochs"]),
            columns,
            {tuple(path): _unpacked(columns[tuple(path)], record, text) for path, text in told["bootstrap"]},
            tuple(texts),
            told["weights"],
            told["max_episode_length"],
            {SUCCESS: True, FAILURE: False}.get(int(record["flags"]) & (SUCCESS | FAILURE)),
        )

    def damage(self) -> Iterator[str]:
        """What is not as it was written, a line for each trajectory; then what the log has lost."""
        for record in self.records():
            table = self.tables[int(record["schema"])]
            count = int(record["steps"]) * int(record["batch"])
            found = table.stored_checksum(int(record["row"]), count, int(record["final"]), int(record["finals"]))
            if found != record["data_crc"]:
                yield f"trajectory {record['id']}: its rows are not what was written (checksum)"
        if (lost := self._log.damage) is not None:
            yield f"{self._log.name}: {lost.why} at record {lost.record}; {lost.nbytes} bytes behind it do not count"

    def instruction(self, number: int) -> str:
        """A task description by its number."""
        return self._texts.instruction(number)

    def close(self) -> None:
        """Give everything back, once. Nothing is lost: what was added is on disk."""
        with self._lock:
            if self._closed:  # its numbers of files may be somebody else's by now
                return
            self._closed = True
            self._release_all()
            if self._held >= 0:
                os.close(self._held)
                self._held = -1

    def _release_all(self) -> None:
        for table in self.tables:
            table.close()
        self._log.close()
        self._texts.close()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Nothing is added or dropped meanwhile."""
        with self._lock:
            yield

    # --- inside ------------------------------------------------------------------------------------
    def _table_for(self, schema: Schema) -> Table:
        for table in reversed(self.tables):
            if table.schema == schema:
                return table
        table = Table.new(self.files, len(self.tables), schema, self._segment_nbytes)
        _write_whole(self.files, _schema_name(table.number), table.describe())
        self._add_table(table)
        return table

    def _add_table(self, table: Table) -> None:
        self.tables.append(table)
        self._ids.append(Ids())

    def _notice(self) -> None:
        """Bring tables and ids up to the log."""
        try:
            self._notice_log()
        except FileNotFoundError:  # a segment that was dropped since the manifest was read
            manifest = Manifest.read(self._all) or self.manifest
            if manifest == self.manifest:
                raise
            self.manifest = manifest
            self._notice()

    def _notice_log(self) -> None:
        fresh = self._log.records[self._seen :]
        for number in range(len(self.tables), int((fresh["schema"] + 1).max(initial=0))):
            text = _read_whole(self.files, _schema_name(number))
            self._add_table(Table.described(self.files, number, text))
        self._release()
        for table in self.tables:
            own = fresh[fresh["schema"] == table.number]
            if len(own):
                last = own[-1]
                rows = int(last["row"]) + int(last["steps"]) * int(last["batch"])
                table.show(rows, int(last["final"]) + int(last["finals"]))
                self._ids[table.number].append(own["id"])
        self._seen = self._log.count

    def _release(self) -> None:
        """Let go of the segments of dropped trajectories."""
        for table in self.tables:
            row, final = self.manifest.kept(table.number)
            table.drop(row, final, remove=self._writable)

    def _tidy(self) -> None:
        """Remove what a crash left behind: segments that nothing in the log mentions, and older epochs."""
        known = {self._log.name, *self._texts.names, *(_schema_name(table.number) for table in self.tables)}
        for table in self.tables:
            known |= set(table.files())
        keep = {"lock", Manifest.NAME, *(self.manifest.prefix + name for name in known)}
        for name in self._all.names():
            if name not in keep and OURS.match(name):
                self._all.remove(name)

    def _make_room(self, needed: int) -> None:
        """Evict until so many bytes more are allowed."""
        quota = self.limits.nbytes
        while quota is not None and needed and self.nbytes + needed > quota:
            if self.first_id >= self.next_id:
                raise UserError(f"max_bytes = {quota}: one trajectory needs {self.nbytes + needed} (whole segments)")
            self._drop_segment()

    def _evict(self) -> None:
        """Keep to the limits of rows and age."""
        while (rows := self.limits.rows) is not None and self.count_rows() > rows:
            before = self.first_id
            self._drop_segment()
            if self.first_id == before:
                break
        if self.limits.age_s is not None:
            kept = self.records()
            old = int(np.searchsorted(kept["time"], time.time() - self.limits.age_s))
            self.drop(self.first_id + old)

    def _drop_segment(self) -> None:
        """Forget what begins in the oldest segment."""
        record = self.record(self.first_id)
        table = self.tables[int(record["schema"])]
        boundary = table.boundary(int(record["row"]))
        kept = self.records()
        later = (kept["schema"] != record["schema"]) | (kept["row"] >= boundary)
        self.drop(self.first_id + (int(np.argmax(later)) if later.any() else len(kept)))

    def count_rows(self) -> int:
        """Of the trajectories that are kept."""
        return sum(table.rows - self.manifest.kept(table.number)[0] for table in self.tables)

    def _span(self) -> str:
        if self.first_id == self.next_id:
            return "the buffer is empty"
        return f"the buffer has {self.first_id} to {self.next_id - 1}"


def _schema_name(number: int) -> str:
    return f"schema-{number:03d}.json"


def _write_whole(files: Files, name: str, text: str) -> None:
    file = files.create(name)
    try:
        os.pwrite(file, text.encode(), 0)
        files.sync([file])
    finally:
        os.close(file)


def _read_whole(files: Files, name: str) -> str:
    file = files.open(name)
    try:
        return os.pread(file, os.fstat(file).st_size, 0).decode()
    finally:
        os.close(file)


def _text(rows: Rows) -> str:
    """What has no place in a record of fixed length."""
    bootstrap = [[list(path), _packed(tensor)] for path, tensor in rows.bootstrap.items()]
    told = {"weights": rows.weights, "max_episode_length": rows.max_episode_length, "bootstrap": bootstrap}
    return json.dumps(told)


def _packed(tensor: Tensor) -> str:
    return base64.b64encode(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()


def _unpacked(column: Tensor, record: np.void, text: str) -> Tensor:
    """A field's bootstrap rows, which are shaped as its others."""
    values = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return values.view(column.dtype).reshape(int(record["epochs"]), int(record["batch"]), *column.shape[1:])


def _flags(rows: Rows) -> int:
    intervened = rows.columns.get(("intervene_flags",))
    known = {None: 0, True: SUCCESS, False: FAILURE}[rows.success]
    return known | (INTERVENED if intervened is not None and bool(intervened.any()) else 0)


def _versions(rows: Rows) -> tuple[float, float]:
    versions = rows.columns.get(("versions",))
    return (float(versions.min()), float(versions.max())) if versions is not None else (-1.0, -1.0)


def _total(rows: Rows) -> float:
    rewards = rows.columns.get(("rewards",))
    return float(rewards.double().sum()) if rewards is not None else 0.0
