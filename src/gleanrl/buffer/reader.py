"""Reading a buffer's folder: what one process writes, any number of others read at the same time."""

from __future__ import annotations

import base64
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.files import DiskFiles, Files, MemoryFiles, crc32
from gleanrl.buffer.log import FAILURE, LONGEST, RECORD, SALVAGE, SUCCESS, Log, Texts
from gleanrl.buffer.manifest import Manifest, ManifestWatcher
from gleanrl.buffer.schema import INSTRUCTION
from gleanrl.buffer.snapshot import Index, Reader, Snapshot
from gleanrl.buffer.table import Table
from gleanrl.buffer.trajectory import FlatTrajectory
from gleanrl.utils.errors import UserError


@dataclass
class OpenFiles:
    """The open files of one manifest."""

    manifest: Manifest
    files: Files
    log: Log
    texts: Texts
    tables: list[Table] = field(default_factory=list)
    indexes: list[Index] = field(default_factory=list)  # of each table
    seen: int = 0  # log records that the tables know

    @property
    def next_id(self) -> int:
        return self.manifest.base + self.seen

    def add_table(self, table: Table) -> None:
        self.tables.append(table)
        self.indexes.append(Index())

    def close(self) -> None:
        for table in self.tables:
            table.close()
        self.log.close()
        self.texts.close()


class BufferReader(Reader):
    """The trajectories of a folder, or of memory.

    Args:
        folder: where they are; None: in memory.
        writable: the instance is a `BufferWriter`.

    Raises:
        UserError: the folder is no buffer, or the buffer is damaged.
    """

    def __init__(self, folder: Path | None, *, writable: bool = False) -> None:
        self.folder, self._writable = folder, writable
        self._lock = threading.RLock()
        self._exclusive = self._closed = False  # whether new samples wait, or fail
        self._holders = Counter[int]()  # samples under way, by the number of drops when they began
        self._drops = 0
        self._changed = threading.Condition()
        self.unmap_pending = False  # something was dropped and is still mapped
        if folder is not None and not folder.is_dir():
            raise UserError(f"{folder}: no such buffer")
        self._all: Files = MemoryFiles() if folder is None else DiskFiles(folder, writable=writable)
        self._watcher = ManifestWatcher(self._all)
        self._open_newest(self._current_manifest())

    @property
    def manifest(self) -> Manifest:
        return self._opened.manifest

    # --- what counts -----------------------------------------------------------------------------
    @property
    def snapshot(self) -> Snapshot:
        with self._changed:
            return self._snapshot

    @property
    def tables(self) -> list[Table]:
        return self._opened.tables

    @property
    def nbytes(self) -> int:
        opened = self._opened
        return sum(table.nbytes for table in opened.tables) + opened.log.count * RECORD.itemsize + opened.texts.nbytes

    def record(self, number: int) -> np.void:
        """Return a trajectory's log record. Raises `UserError` where it does not exist."""
        self._check_number(number)
        now = self.snapshot
        return now.records[number - now.first_id]

    def full_records(self) -> np.ndarray[Any, Any]:
        return self.snapshot.records

    def refresh(self) -> bool:
        if self._writable or self._closed:
            return False
        with self._lock:
            if self._closed:
                return False
            manifest = self._newest_manifest()
            if not self._is_replaced_by(manifest):
                try:
                    return self._catch_up(manifest)
                except OSError:
                    manifest = self._newest_manifest()
                    if not self._is_replaced_by(manifest):
                        raise
            self._reopen(manifest)
            return True

    @contextmanager
    def held(self) -> Iterator[Snapshot]:
        with self._changed:
            while self._exclusive:
                self._changed.wait()
            self._check_open()
            since, now = self._drops, self._snapshot
            self._holders[since] += 1
        try:
            yield now
        finally:
            with self._changed:
                self._holders[since] -= 1
                if not self._holders[since]:
                    del self._holders[since]
                if self.unmap_pending:
                    self._unmap()
                if not self._holders:
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait for the samples under way and let new ones wait, so that all files may be exchanged.

        The caller holds ``_lock``. May be nested.
        """
        with self._changed:
            outer, self._exclusive = self._exclusive, True
            self._changed.wait_for(lambda: not self._holders)
        try:
            yield
        finally:
            with self._changed:
                self._exclusive = outer
                self._changed.notify_all()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        with self._lock:
            self._check_open()
            yield

    def close(self) -> None:
        with self._lock, self.exclusive():
            if not self._closed:
                self._closed = True
                self._watcher.close()
                self._opened.close()

    # --- trajectories ----------------------------------------------------------------------------
    def trajectory(self, number: int) -> FlatTrajectory:
        return self._read(self.record(number))

    def verified(self, number: int) -> FlatTrajectory:
        """Return a trajectory whose checksums match. Raises `UserError` where it is damaged."""
        return self._read_verified(self.record(number))

    def checked(self) -> Iterator[FlatTrajectory | UserError]:
        yield from map(self._checked, self.snapshot.records)

    def damage(self) -> Iterator[str]:
        yield from super().damage()
        if (damage := self._opened.log.damage) is not None:
            yield f"{self._log_path}: {damage}"

    def salvage(self) -> Iterator[FlatTrajectory | UserError]:
        """See `Reader.salvage`. Trajectories after a damaged record of the log are among them."""
        log = self._opened.log
        records, damage = log.all_intact(), log.damage
        self._publish_rows(records, skip_unreadable=True)
        yield from map(self._checked, records[records["id"] >= self.first_id])
        if damage is not None and damage.good:
            yield UserError(f"{self._log_path}: {damage}")

    def lost_files(self) -> list[str]:
        damage = self._opened.log.damage
        log = [f"{self._log_path}: {damage}"] if damage is not None and damage.good else []
        return [why for table in self.tables for why in table.lost()] + log

    def write_checkpoint(self, folder: Path) -> None:
        """See `Reader.write_checkpoint`. The files are hard links, so this takes almost no time.

        Segments only grow, and are removed but never overwritten, so a link keeps its content.
        """
        with self._lock:
            self._check_open()
            for why in self.lost_files():
                raise UserError(f"{why}; {SALVAGE}")
            opened = self._opened
            names = [opened.log.name, *opened.texts.names]
            names += [name for table in opened.tables for name in (*table.files(), table.schema_file)]
            for name in names:
                opened.files.copy_to(name, folder)
            (folder / Manifest.NAME).write_bytes(opened.manifest.replace(end=self.next_id).to_json())

    @property
    def _log_path(self) -> str:
        return self._opened.files.where(self._opened.log.name)

    def _read(self, record: np.void) -> FlatTrajectory:
        opened = self._opened
        table = opened.tables[int(record["schema"])]
        rows = int(record["row"]) + torch.arange(int(record["steps"]) * int(record["batch"]))
        columns = table.read(rows, [*table.schema.paths, INSTRUCTION])
        instructions = [opened.texts.instruction(i) for i in columns.pop(INSTRUCTION).tolist() if i >= 0]
        text = opened.texts.text(int(record["text"]), int(record["text_nbytes"]))
        if text_checksum(text, instructions) != record["text_crc"]:
            where = opened.files.where(opened.texts.names[0])
            raise UserError(f"{where}: its text or its instructions are not what was written (checksum)")
        values = json.loads(text)
        return FlatTrajectory(
            int(record["steps"]),
            int(record["batch"]),
            int(record["epochs"]),
            columns,
            {tuple(path): _bootstrap(columns[tuple(path)], record, data) for path, data in values["bootstrap"]},
            tuple(instructions),
            values["weights"],
            values["max_episode_length"],
            {SUCCESS: True, FAILURE: False}.get(int(record["flags"]) & (SUCCESS | FAILURE)),
        )

    def _read_verified(self, record: np.void) -> FlatTrajectory:
        table, count = self.tables[int(record["schema"])], int(record["steps"]) * int(record["batch"])
        try:
            found = table.stored_checksum(int(record["row"]), count, int(record["final"]), int(record["finals"]))
            trajectory = self._read(record)
        except UserError as error:
            raise UserError(f"trajectory {record['id']}: {error}") from None
        if found != record["data_crc"]:
            raise UserError(f"trajectory {record['id']}: its rows are not what was written (checksum)")
        return trajectory

    def _checked(self, record: np.void) -> FlatTrajectory | UserError:
        try:
            return self._read_verified(record)
        except UserError as error:
            return error

    # --- opening files ---------------------------------------------------------------------------
    def _current_manifest(self) -> Manifest:
        """Return the manifest on disk; a writer creates a missing one."""
        manifest = Manifest.read(self._all)
        if manifest is None:
            if not self._writable:
                raise UserError(f"{self.folder}: no buffer is in there")
            manifest = Manifest(rows=(), finals=())
            manifest.write(self._all)
        return manifest

    def _newest_manifest(self) -> Manifest:
        return self._watcher.read() or self.manifest

    def _is_replaced_by(self, manifest: Manifest) -> bool:
        """Return whether a manifest names other files than those that are open."""
        return (manifest.epoch, manifest.log) != (self.manifest.epoch, self.manifest.log)

    def _open_newest(self, manifest: Manifest) -> None:
        """Open a manifest's files, or those of a newer one if the writer replaces everything meanwhile."""
        try:
            self._open(manifest)
        except (OSError, UserError):
            newer = self._current_manifest()
            if newer == manifest:
                raise
            self._open_newest(newer)

    def _open(self, manifest: Manifest) -> None:
        files = self._all.with_prefix(manifest.prefix)
        needed = {manifest.log, manifest.texts, Texts.INSTRUCTIONS}
        there = set(files.names())
        if (missing := sorted(needed - there)) and (not self._writable or there - needed):  # else the buffer is new
            raise UserError(f"{files.where(missing[0])}: missing; without it the others cannot be read")
        limit = LONGEST if manifest.end is None else manifest.end - manifest.base
        least = max(manifest.known, manifest.end or 0) - manifest.base
        log = Log(files, manifest.log, writable=self._writable, limit=limit, least=least)
        self._opened = OpenFiles(manifest, files, log, Texts(files, manifest.texts, writable=self._writable))
        try:
            self._notice()
        except BaseException:
            self._opened.close()
            raise

    def _reopen(self, manifest: Manifest) -> None:
        """Open the files that replace everything. After an error all is as before."""
        with self.exclusive():
            before, snapshot = self._opened, self._snapshot
            try:
                self._open_newest(manifest)
            except BaseException:
                self._opened, self._snapshot = before, snapshot
                raise
            before.close()

    def _catch_up(self, manifest: Manifest) -> bool:
        opened = self._opened
        dropped, opened.manifest = manifest != opened.manifest, manifest
        grown = opened.log.refresh() > 0 or opened.seen < opened.log.count  # the latter after an earlier error
        if grown or dropped:
            self._notice()
        return grown or dropped

    # --- following the log -----------------------------------------------------------------------
    def _notice(self) -> None:
        """Bring tables and indexes up to the log."""
        try:
            self._notice_records()
        except OSError as error:
            manifest = self._newest_manifest()
            if self._is_replaced_by(manifest):  # its rows are in other files, which the caller opens
                raise
            if manifest != self.manifest:  # the segment was dropped after the manifest was read
                self._opened.manifest = manifest
                self._notice()
                return
            try:
                self._notice_records(skip_unreadable=True)
            except FileNotFoundError:
                raise UserError(f"{error.filename}: missing, though the log names its trajectories") from None
            if self._writable:
                raise UserError(f"{self.lost_files()[0]}; {SALVAGE}") from None

    def _notice_records(self, *, skip_unreadable: bool = False) -> None:
        opened = self._opened
        count = opened.log.count
        fresh = opened.log.records[opened.seen : count]
        with self._changed:  # no sample begins while only half of this is done
            self._publish_rows(fresh, skip_unreadable=skip_unreadable)
            for number, index in enumerate(opened.indexes):
                index.append(fresh, np.flatnonzero(fresh["schema"] == number))
            opened.seen = count
            self._publish_snapshot()

    def _publish_snapshot(self) -> None:
        opened, manifest = self._opened, self._opened.manifest
        spans = []
        for number, index in enumerate(opened.indexes):
            first = manifest.kept(number)[0]
            spans.append((first, max(index.end, first)))
        next_id = max(opened.next_id, manifest.first)  # a reader may know of a drop before it has read the log
        self._snapshot = Snapshot(
            manifest.epoch,
            manifest.first,
            next_id,
            tuple(opened.tables),
            tuple(spans),
            tuple(opened.indexes),
            opened.log.records[manifest.first - manifest.base : next_id - manifest.base],
            opened.texts,
        )

    def _publish_rows(self, records: np.ndarray[Any, Any], *, skip_unreadable: bool) -> None:
        """Map the rows of these records. Raises `OSError` where a file cannot be read."""
        opened = self._opened
        known = max(int((records["schema"] + 1).max(initial=0)), len(opened.manifest.rows))
        for number in range(len(opened.tables), known):
            opened.add_table(Table.open(opened.files, number))
        self._drop_segments()
        for table in opened.tables:
            own = np.flatnonzero(records["schema"] == table.number)
            if len(own):
                last = records[own[-1]]
                rows = int(last["row"]) + int(last["steps"]) * int(last["batch"])
                finals = int(last["final"]) + int(last["finals"])
                self._make_fit(table, rows, finals)
                table.publish(rows, finals, skip_unreadable=skip_unreadable)

    def _drop_segments(self) -> None:
        """Drop the segments of trajectories that the manifest no longer keeps, and unmap them as soon as possible."""
        with self._changed:
            self._publish_snapshot()
            number, dropped = self._drops + 1, False
            for table in self.tables:
                dropped = table.drop(*self.manifest.kept(table.number), number, remove=self._writable) or dropped
            if dropped:
                self._drops = number
                self._unmap()

    def _unmap(self) -> None:
        """Unmap the dropped segments that no sample under way can read."""
        oldest = min(self._holders, default=self._drops)
        left = [table.release(oldest) for table in self.tables]
        self.unmap_pending = any(left)

    def _make_fit(self, table: Table, rows: int, finals: int) -> None:
        """Give a table the address space that it needs. Raises `UserError` where there is none."""
        if not table.fits(rows, finals):
            try:
                with self.exclusive():
                    table.grow(rows, finals)
            except OSError as error:
                raise UserError(f"{self.folder or 'buffer'}: no address space for more rows ({error})") from None

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the buffer is closed")


def text_of(trajectory: FlatTrajectory) -> str:
    """Return what has no place in a record of fixed length, as JSON."""
    bootstrap = [
        (path, base64.b64encode(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).decode())
        for path, tensor in trajectory.bootstrap.items()
    ]
    return json.dumps(
        {
            "weights": trajectory.model_weights_id,
            "max_episode_length": trajectory.max_episode_length,
            "bootstrap": bootstrap,
        }
    )


def text_checksum(text: str, instructions: list[str] | tuple[str, ...]) -> int:
    """Return the checksum of a trajectory's text and of the instructions of its rows."""
    return crc32("\0".join([text, *dict.fromkeys(instructions)]).encode())


def _bootstrap(column: Tensor, record: np.void, data: str) -> Tensor:
    """Decode a field's bootstrap entries ``[E, B, ...]``, which have the type and shape of its rows."""
    values = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
    return values.view(column.dtype).reshape(int(record["epochs"]), int(record["batch"]), *column.shape[1:])
