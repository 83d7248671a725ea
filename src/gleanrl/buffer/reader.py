"""Reading trajectories: the interface between storage and sampling, and the reader of a buffer's folder.

A `Reader` has a state that other threads and processes change. A `Snapshot` is that state at one moment: trajectories
by id, and their rows by table. A table holds the rows of all trajectories of one schema. `BufferReader` reads our own
files, which one process writes and any number of others read at the same time. `rlinf.RLinfReader` reads RLinf's.
"""

from __future__ import annotations

import base64
import os
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from gleanrl.buffer.files import Files, crc32
from gleanrl.buffer.log import FAILURE, LONGEST, RECORD, SALVAGE, SUCCESS, Log, Manifest, Texts
from gleanrl.buffer.table import INSTRUCTION, RowSource, Table
from gleanrl.buffer.trajectory import FlatTrajectory
from gleanrl.utils.errors import UserError


class Instructions(Protocol):
    """Task descriptions by number."""

    @property
    def instructed(self) -> bool | None:
        """Whether there is any task description; None if the files read so far have none and others may have."""
        ...

    def instruction(self, number: int) -> str: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The trajectories that a reader has at one moment.

    ``tables`` and the memory under ``records`` may grow later, but the rows and records of this snapshot do not change
    while it is held (`Reader.held`).
    """

    epoch: int  # changes when the whole content is replaced; row numbers and ids are valid within one epoch
    first_id: int
    next_id: int
    tables: tuple[RowSource, ...]  # indexes of the tables may contain further trajectories, not in this snapshot
    spans: tuple[tuple[int, int], ...]  # for each table: the first row that is kept, and the row after the last
    records: np.ndarray[Any, Any]  # a `log.RECORD` for each trajectory, in the order of ids
    texts: Instructions

    def count_rows(self) -> int:
        return sum(end - first for first, end in self.spans)

    def position(self, number: int) -> int:
        """Return a trajectory's position in ``records``. Raises `UserError` if there is no such trajectory."""
        if self.first_id == self.next_id:
            raise UserError(f"no trajectory {number}: the buffer is empty")
        if not self.first_id <= number < self.next_id:
            raise UserError(f"no trajectory {number}: the buffer has {self.first_id} to {self.next_id - 1}")
        return number - self.first_id


class Reader(ABC):
    """Reads a set of trajectories by id.

    Attributes:
        folder: folder of the trajectories; None: in memory.
        snapshot: the newest state. Its rows and records may be read only inside `held`.
        lock: while a thread holds this lock, ``snapshot`` does not change.
    """

    folder: Path | None
    snapshot: Snapshot
    lock: threading.RLock

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Total bytes of all files."""

    @abstractmethod
    def refresh(self) -> bool:
        """Update ``snapshot`` to what another process has written, and return whether it has changed."""

    @abstractmethod
    def held(self) -> AbstractContextManager[Snapshot]:
        """Yield the newest snapshot. It can be read inside the context even if the buffer is changed or closed.

        Raises:
            RuntimeError: the buffer is closed.
        """

    @abstractmethod
    def full_records(self) -> np.ndarray[Any, Any]:
        """Return the records of all trajectories with all values filled in. This may read each file."""

    @abstractmethod
    def trajectory(self, number: int, *, verify: bool = False) -> FlatTrajectory:
        """Return a whole trajectory. With ``verify``, its checksums are compared.

        Raises:
            UserError: the trajectory does not exist, cannot be read, or is damaged.
        """

    @abstractmethod
    def checked(self, *, salvage: bool = False) -> Iterator[FlatTrajectory | UserError]:
        """Yield for each trajectory of the buffer the trajectory itself if its checksums match, else an error.

        With ``salvage``, trajectories after a damaged record of the log are included. After that, only `close` may be
        called.
        """

    @abstractmethod
    def lost_files(self) -> list[str]:
        """Return a line of text for each file that is missing or too short."""

    @abstractmethod
    def write_checkpoint(self, folder: Path) -> None:
        """Write the present content to an empty folder, as a buffer that can be read."""

    @abstractmethod
    def close(self) -> None: ...

    def verified_all(self) -> Iterator[FlatTrajectory]:
        """Yield all trajectories. Raises `UserError` at the first damage."""
        for why in self.lost_files():
            raise UserError(f"{why}; {SALVAGE}")
        for found in self.checked():
            if isinstance(found, UserError):
                raise found
            yield found

    def damage(self) -> Iterator[str]:
        """Yield a line of text for each damaged trajectory."""
        for found in self.checked():
            if isinstance(found, UserError):
                yield str(found)


@dataclass
class OpenFiles:
    """The open files of one manifest."""

    manifest: Manifest
    files: Files
    log: Log
    texts: Texts
    tables: list[Table] = field(default_factory=list)
    seen: int = 0  # number of log records whose rows the tables have published

    def close(self) -> None:
        for table in self.tables:
            table.close()
        self.log.close()
        self.texts.close()


class BufferReader(Reader):
    """Reads the trajectories in a folder, or in memory.

    Args:
        folder: folder of the buffer; None: in memory.
        writable: True if the instance is a `BufferWriter`.

    Raises:
        UserError: the folder is not a buffer, or the buffer is damaged.
    """

    def __init__(self, folder: Path | None, *, writable: bool = False) -> None:
        self.folder, self._writable = folder, writable
        self.lock = threading.RLock()
        self._exclusive = self._closed = False  # new calls of `held` wait if `_exclusive`, and fail if `_closed`
        self._holders = Counter[int]()  # number of holders by the value of `_drops` when they began
        self._drops = 0
        self._changed = threading.Condition()
        self.unmap_pending = False  # whether a dropped segment is still mapped
        if folder is not None and not folder.is_dir():
            raise UserError(f"{folder}: no such buffer")
        self._all = Files(folder, writable=writable)
        self._manifest_file = -1  # the manifest stays open, so that its inode number is not given to another file
        self._manifest_read: Manifest | None = None  # content of `_manifest_file`
        self._open_newest(self._current_manifest())

    @property
    def manifest(self) -> Manifest:
        return self._opened.manifest

    @property
    def nbytes(self) -> int:
        opened = self._opened
        return sum(table.nbytes for table in opened.tables) + opened.log.count * RECORD.itemsize + opened.texts.nbytes

    def record(self, number: int) -> np.void:
        """Return a trajectory's log record. Raises `UserError` if there is no such trajectory."""
        now = self.snapshot
        return now.records[now.position(number)]

    def full_records(self) -> np.ndarray[Any, Any]:
        return self.snapshot.records

    # --- while others write ----------------------------------------------------------------------
    def refresh(self) -> bool:
        if self._writable or self._closed:
            return False
        with self.lock:
            if self._closed:
                return False
            manifest = self._newest_manifest()
            if not self._is_replaced_by(manifest):
                try:
                    opened = self._opened
                    dropped, opened.manifest = manifest != opened.manifest, manifest
                    # after an earlier error, the log may have more records than the tables have published
                    changed = opened.log.refresh() > 0 or opened.seen < opened.log.count or dropped
                    if changed:
                        self._notice()
                    return changed
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
            since, now = self._drops, self.snapshot
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
        """Wait until no thread is inside `held`, and let new callers wait, so that all files may be replaced.

        The caller must hold ``lock``. Contexts may be nested.
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

    def close(self) -> None:
        with self.lock, self.exclusive():
            if not self._closed:
                self._closed = True
                if self._manifest_file >= 0:
                    os.close(self._manifest_file)
                self._opened.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the buffer is closed")

    # --- trajectories ----------------------------------------------------------------------------
    def trajectory(self, number: int, *, verify: bool = False) -> FlatTrajectory:
        return self._read(self.record(number), verify=verify)

    def checked(self, *, salvage: bool = False) -> Iterator[FlatTrajectory | UserError]:
        log = self._opened.log
        records, damage = self.snapshot.records, log.damage
        if salvage:
            records = log.all_intact()
            self._publish_rows(records, skip_unreadable=True)
            records = records[records["id"] >= self.snapshot.first_id]
        for record in records:
            try:
                yield self._read(record, verify=True)
            except UserError as error:
                yield error
        if salvage and damage is not None and damage.good:
            yield UserError(f"{log.path}: {damage}")

    def damage(self) -> Iterator[str]:
        yield from super().damage()
        log = self._opened.log
        if log.damage is not None:
            yield f"{log.path}: {log.damage}"

    def lost_files(self) -> list[str]:
        lost, log = list[str](), self._opened.log
        for table in self._opened.tables:
            lost += [*table.columns.lost.values(), *table.final_columns.lost.values()]
        if log.damage is not None and log.damage.good:
            lost.append(f"{log.path}: {log.damage}")
        return lost

    def write_checkpoint(self, folder: Path) -> None:
        """Write the present content to an empty folder, as hard links, which takes almost no time.

        Segments only grow, and are removed but never overwritten, so the content of a link does not change.
        """
        with self.lock:
            self._check_open()
            for why in self.lost_files():
                raise UserError(f"{why}; {SALVAGE}")
            opened, target = self._opened, Files(folder, writable=True)
            names = [opened.log.name, *opened.texts.names]
            for table in opened.tables:
                names += [table.schema_file, *table.kept_files()]
            for name in names:
                target.with_prefix(opened.manifest.prefix).take(opened.files, name)
            replace(opened.manifest, end=self.snapshot.next_id).write(target)

    def _read(self, record: np.void, *, verify: bool) -> FlatTrajectory:
        opened = self._opened
        table = opened.tables[int(record["schema"])]
        steps, batch, epochs = int(record["steps"]), int(record["batch"]), int(record["epochs"])
        first, count, data_crc = int(record["row"]), steps * batch, record["data_crc"]
        try:
            if verify:
                data_crc = table.stored_checksum(first, count, int(record["final"]), int(record["finals"]))
            columns = table.read(first + torch.arange(count), [*table.schema.paths, INSTRUCTION])
            instructions = [opened.texts.instruction(i) for i in columns.pop(INSTRUCTION).tolist() if i >= 0]
            text = opened.texts.text(int(record["text"]), int(record["text_nbytes"]))
            if text_checksum(text, instructions) != record["text_crc"]:
                where = opened.files.where(opened.texts.names[0])
                raise UserError(f"{where}: its text or its instructions are not what was written (checksum)")
            if data_crc != record["data_crc"]:
                raise UserError("its rows are not what was written (checksum)")
        except UserError as error:
            raise UserError(f"trajectory {record['id']}: {error}") from None
        values = msgspec.json.decode(text)
        bootstrap = {}
        for keys, data in values["bootstrap"]:
            column = columns[tuple(keys)]
            entries = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8).view(column.dtype)
            bootstrap[tuple(keys)] = entries.reshape(epochs, batch, *column.shape[1:])
        return FlatTrajectory(
            steps,
            batch,
            epochs,
            columns,
            bootstrap,
            tuple(instructions),
            values["weights"],
            values["max_episode_length"],
            {SUCCESS: True, FAILURE: False}.get(int(record["flags"]) & (SUCCESS | FAILURE)),
        )

    # --- opening files ---------------------------------------------------------------------------
    def _current_manifest(self) -> Manifest:
        """Return the manifest on disk. A writer creates it if it is missing."""
        manifest = Manifest.read(self._all)
        if manifest is None:
            if not self._writable:
                raise UserError(f"{self.folder}: no buffer is in there")
            manifest = Manifest(rows=(), finals=())
            manifest.write(self._all)
        return manifest

    def _newest_manifest(self) -> Manifest:
        """Return the manifest on disk, or the present one if there is no file. Decodes the file only if it is new."""
        if self.folder is None:
            return Manifest.read(self._all) or self.manifest
        try:
            now = os.stat(self._all.where(Manifest.NAME))
            if self._manifest_file < 0 or not os.path.samestat(now, os.fstat(self._manifest_file)):
                if self._manifest_file >= 0:
                    os.close(self._manifest_file)
                self._manifest_file, self._manifest_read = -1, None
                file = self._all.open(Manifest.NAME)
                try:
                    self._manifest_read = Manifest.read(self._all)  # content of the opened file, or of a newer one
                except BaseException:
                    os.close(file)
                    raise
                self._manifest_file = file
        except FileNotFoundError:
            return self.manifest
        return self._manifest_read or self.manifest

    def _is_replaced_by(self, manifest: Manifest) -> bool:
        """Return whether ``manifest`` names other files than those that are open."""
        return (manifest.epoch, manifest.log) != (self.manifest.epoch, self.manifest.log)

    def _open_newest(self, manifest: Manifest) -> None:
        """Open the files of ``manifest``, or of a newer manifest if the writer replaces the files meanwhile."""
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
        """Close the open files and open those of ``manifest``. After an error, the old files stay open."""
        with self.exclusive():
            before, snapshot = self._opened, self.snapshot
            try:
                self._open_newest(manifest)
            except BaseException:
                self._opened, self.snapshot = before, snapshot
                raise
            before.close()

    # --- following the log -----------------------------------------------------------------------
    def _notice(self) -> None:
        """Update tables and indexes to the records of the log."""
        try:
            self._notice_records()
        except OSError as error:
            manifest = self._newest_manifest()
            if self._is_replaced_by(manifest):  # the rows are in other files, which the caller opens
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
        with self._changed:  # so that no thread enters `held` between the two updates
            self._publish_rows(fresh, skip_unreadable=skip_unreadable)
            for table in opened.tables:
                table.index.append(fresh, np.flatnonzero(fresh["schema"] == table.number))
            opened.seen = count
            self._publish_snapshot()

    def _publish_snapshot(self) -> None:
        opened, manifest = self._opened, self._opened.manifest
        spans = []
        for table in opened.tables:
            first = manifest.kept(table.number)[0]
            spans.append((first, max(table.index.end, first)))
        # a reader may have read the manifest of a drop before it has read the log
        next_id = max(manifest.base + opened.seen, manifest.first)
        records = opened.log.records[manifest.first - manifest.base : next_id - manifest.base]
        self.snapshot = Snapshot(
            manifest.epoch, manifest.first, next_id, tuple(opened.tables), tuple(spans), records, opened.texts
        )

    def _publish_rows(self, records: np.ndarray[Any, Any], *, skip_unreadable: bool) -> None:
        """Map the rows of these records. Raises `OSError` if a file cannot be read."""
        opened = self._opened
        known = max(int((records["schema"] + 1).max(initial=0)), len(opened.manifest.rows))
        for number in range(len(opened.tables), known):
            opened.tables.append(Table.open(opened.files, number))
        self._drop_segments()
        for table in opened.tables:
            own = np.flatnonzero(records["schema"] == table.number)
            if len(own):
                last = records[own[-1]]
                rows = int(last["row"]) + int(last["steps"]) * int(last["batch"])
                finals = int(last["final"]) + int(last["finals"])
                self._make_fit(table, (rows, finals))
                for part, end in zip(table.parts, (rows, finals), strict=True):
                    part.publish(end, skip_unreadable=skip_unreadable)

    def _drop_segments(self) -> None:
        """Drop the segments that hold no trajectory the manifest keeps, and unmap them as soon as possible."""
        with self._changed:
            self._publish_snapshot()
            number, dropped = self._drops + 1, False
            for table in self._opened.tables:
                for part, first in zip(table.parts, self.manifest.kept(table.number), strict=True):
                    dropped = part.drop(first, number, remove=self._writable) or dropped
            if dropped:
                self._drops = number
                self._unmap()

    def _unmap(self) -> None:
        """Unmap the dropped segments that no thread inside `held` can read."""
        oldest = min(self._holders, default=self._drops)
        left = [part.release(oldest) for table in self._opened.tables for part in table.parts]
        self.unmap_pending = any(left)

    def _make_fit(self, table: Table, ends: Sequence[int]) -> None:
        """Give a table enough address space for rows and final observations up to ``ends``.

        Raises:
            UserError: the system has no such address space.
        """
        for part, end in zip(table.parts, ends, strict=True):
            if not part.fits(end):
                try:
                    with self.exclusive():
                        part.grow(end)
                except OSError as error:
                    where = self.folder or "buffer"
                    raise UserError(f"{where}: no address space for more rows ({error})") from None


def text_of(trajectory: FlatTrajectory) -> str:
    """Return the values of a trajectory that do not fit into a record of fixed length, as JSON."""
    bootstrap = []
    for path, tensor in trajectory.bootstrap.items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        bootstrap.append((path, base64.b64encode(data).decode()))
    weights, longest = trajectory.model_weights_id, trajectory.max_episode_length
    return msgspec.json.encode({"weights": weights, "max_episode_length": longest, "bootstrap": bootstrap}).decode()


def text_checksum(text: str, instructions: Sequence[str]) -> int:
    """Return the checksum of a trajectory's text and of the instructions of its rows."""
    return crc32("\0".join([text, *dict.fromkeys(instructions)]).encode())
