"""Reading of trajectories: `Reader`, the interface between storage and sampling, and `BufferReader`.

While a `Reader` is open, other threads and processes may add and drop trajectories. A `Snapshot` describes which
trajectories there are at one moment: a log record for each trajectory, and their rows in tables. A table holds the rows
of all trajectories with the same schema (the same fields with the same dtypes and shapes).

`BufferReader` reads the native format. One process may write a folder while any number of processes read it.
`rlinf.RLinfReader` reads the directories of RLinf.
"""

from __future__ import annotations

import base64
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from gleanrl.buffer.files import Files, crc32
from gleanrl.buffer.log import FAILURE, INSTRUCTED, LONGEST, RECORD, SALVAGE, SUCCESS, Log, Manifest, Texts
from gleanrl.buffer.table import INSTRUCTION, RowSource, Table
from gleanrl.buffer.trajectory import FlatTrajectory
from gleanrl.utils.errors import UserError

ENDS = ["row", "steps", "batch", "final", "finals"]  # fields of a record that tell which rows come after its own


class Instructions(Protocol):
    """Returns task descriptions by their numbers."""

    @property
    def instructed(self) -> bool | None:
        """Whether there is any task description; None if this is unknown until further files are read."""
        ...

    def instruction(self, number: int) -> str: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The trajectories that a reader has at one moment.

    Tables and log may grow later, but the rows and records of this snapshot do not change inside the context
    (`Reader.held`) that yielded it.
    """

    epoch: Hashable  # changes when the whole content is replaced; row numbers and ids are valid within one epoch
    first_id: int  # id of the oldest trajectory
    next_id: int  # id after that of the newest trajectory
    tables: tuple[RowSource, ...]  # may also contain newer trajectories, which are not part of this snapshot
    spans: tuple[tuple[int, int], ...]  # for each table: the first row that is kept, and the row after the last
    records: np.ndarray[Any, Any]  # [n] of dtype `log.RECORD`: a record for each trajectory, in the order of ids
    texts: Instructions

    def count_rows(self) -> int:
        return sum(end - first for first, end in self.spans)

    def position(self, number: int) -> int:
        """Return the position in ``records`` of the trajectory with this id. Raises `UserError` if there is none."""
        if self.first_id == self.next_id:
            raise UserError(f"no trajectory {number}: the buffer is empty")
        if not self.first_id <= number < self.next_id:
            raise UserError(f"no trajectory {number}: the buffer has {self.first_id} to {self.next_id - 1}")
        return number - self.first_id


class Reader(ABC):
    """Interface for reading a set of trajectories, each of which has an id.

    Attributes:
        folder: folder of the trajectories; None: they are in memory.
        snapshot: the newest snapshot. Its rows and records may be read only inside `held`.
        lock: while a thread holds this lock, no other thread changes ``snapshot``.
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
        """Update ``snapshot`` to the changes that another process has written, and return whether there were any."""

    @abstractmethod
    def held(self) -> AbstractContextManager[Snapshot]:
        """Yield the newest snapshot, and keep all its rows readable until the context is left.

        Other threads may meanwhile drop trajectories or call `close`.

        Raises:
            RuntimeError: the buffer is closed.
        """

    @abstractmethod
    def full_records(self) -> np.ndarray[Any, Any]:
        """Return the records of all trajectories with all their fields filled in. This may open every file."""

    @abstractmethod
    def trajectory(self, number: int, *, verify: bool = False) -> FlatTrajectory:
        """Return the whole trajectory with id ``number``. With ``verify``, the checksums of its data are verified.

        Raises:
            UserError: the trajectory does not exist, cannot be read, or is damaged.
        """

    @abstractmethod
    def checked(self, *, salvage: bool = False) -> Iterator[FlatTrajectory | UserError]:
        """Read all trajectories and verify their checksums. For a damaged one, a `UserError` is yielded, not raised.

        With ``salvage``, trajectories after a damaged record of the log are read too. Their rows are then published in
        the tables without being part of the snapshot, so the only method that may be called afterwards is `close`.
        """

    @abstractmethod
    def lost_files(self) -> list[str]:
        """Return an error message for each file that is missing or too short."""

    @abstractmethod
    def write_checkpoint(self, folder: Path) -> bool:
        """Write all present trajectories to an empty folder, which `BufferReader` can open.

        Returns whether all rows have the same tables and numbers there. The caller must hold ``lock``.
        """

    @abstractmethod
    def close(self) -> None: ...

    def after_fork(self) -> None:
        """Make the reader usable in a forked process, where no other thread will release a lock that it held."""
        self.lock = threading.RLock()

    def verified_all(self) -> Iterator[FlatTrajectory]:
        """Yield all trajectories with verified checksums. Raises `UserError` for the first missing or damaged one."""
        for why in self.lost_files():
            raise UserError(f"{why}; {SALVAGE}")
        for found in self.checked():
            if isinstance(found, UserError):
                raise found
            yield found

    def damage(self, done: Callable[[], object] = lambda: None) -> Iterator[str]:
        """Yield an error message for each damaged trajectory. ``done`` is called after each trajectory."""
        for found in self.checked():
            if isinstance(found, UserError):
                yield str(found)
            done()


@dataclass
class OpenFiles:
    """The open files that one manifest names."""

    manifest: Manifest
    files: Files
    log: Log
    texts: Texts
    tables: list[Table] = field(default_factory=list)
    seen: int = 0  # number of log records whose rows are published in `tables`
    dropped: Manifest | None = None  # the manifest according to which segments were dropped last

    def close(self) -> None:
        for table in self.tables:
            table.close()
        self.log.close()
        self.texts.close()


class BufferReader(Reader):
    """Reads the trajectories of a buffer or of a checkpoint in the native format.

    Args:
        folder: folder of the buffer; None: the buffer is in memory.
        writable: whether the files are opened for writing too. Only `BufferWriter` sets it.

    Raises:
        UserError: the folder is not a buffer, or the buffer is damaged.
    """

    def __init__(self, folder: Path | None, *, writable: bool = False) -> None:
        self.folder, self._writable = folder, writable
        self.lock = threading.RLock()
        # `held` blocks while `_exclusive` is True, and raises `RuntimeError` once `_closed` is True
        self._exclusive = self._closed = False
        # value of `_drops` -> number of threads that entered `held` when `_drops` had this value and are still inside
        self._holders = dict[int, int]()
        self._drops = 0  # number of times that segments were dropped
        self._changed = threading.Condition()
        self.unmap_pending = False  # whether a dropped segment stays mapped because a thread may be reading it
        if folder is not None and not folder.is_dir():
            raise UserError(f"{folder}: no such buffer")
        self._all = Files(folder, writable=writable)
        # A new manifest is recognised by its inode number. The old file stays open, so that the file system cannot give
        # its number to the new one.
        self._manifest_file = -1
        self._manifest_read: Manifest | None = None  # the decoded content of `_manifest_file`
        self._stale = False  # whether all files are opened again at the next refresh
        manifest = Manifest.read(self._all)
        if manifest is None and not writable:
            raise UserError(f"{self.folder}: no buffer is in there")
        self._open_newest(manifest or Manifest())
        if manifest is None:
            # written after the files that it names, so that a reader never finds them missing
            self.manifest.write(self._all)

    @property
    def manifest(self) -> Manifest:
        return self._opened.manifest

    @property
    def nbytes(self) -> int:
        opened = self._opened
        return sum(table.nbytes for table in opened.tables) + opened.log.count * RECORD.itemsize + opened.texts.nbytes

    def record(self, number: int) -> np.void:
        """Return the log record of the trajectory with id ``number``. Raises `UserError` if there is none."""
        now = self.snapshot
        return now.records[now.position(number)]

    def full_records(self) -> np.ndarray[Any, Any]:
        return self.snapshot.records

    # --- while other processes write -------------------------------------------------------------
    def refresh(self) -> bool:
        if self._writable or self._closed or self.folder is None:
            return False
        with self.lock:
            if self._closed:
                return False
            manifest = self._newest_manifest()
            if not self._is_replaced_by(manifest):
                try:
                    opened = self._opened
                    dropped, opened.manifest = manifest != opened.manifest, manifest
                    opened.log.refresh()
                    if opened.seen <= opened.log.count:
                        # if an earlier refresh failed after it had read the log, some records are still unpublished
                        changed = opened.seen < opened.log.count or dropped
                        if changed:
                            self._notice()
                        return changed
                    # the writer has taken back records, so the rows of these must be unpublished
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
            self._holders[since] = self._holders.get(since, 0) + 1
        try:
            yield now
        finally:
            with self._changed:
                left = self._holders.pop(since, 0) - 1
                if left > 0:  # negative in a process that was forked inside this context
                    self._holders[since] = left
                if self.unmap_pending:
                    self._unmap()
                if self._exclusive and not self._holders:
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Block new calls of `held` and wait until no thread is inside `held`, so that all files may be replaced.

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

    def after_fork(self) -> None:
        super().after_fork()
        self._changed, self._exclusive = threading.Condition(), False
        self._holders.clear()
        # The process that was forked may still write, so this one follows it like any other reader. It opens all files
        # again, because another thread may have been changing this object during the fork.
        self._writable, self._stale = False, True

    def close(self) -> None:
        with self.lock, self.exclusive():
            if not self._closed:
                self._closed = True
                if self._manifest_file >= 0:
                    os.close(self._manifest_file)
                self._opened.close()
            self._all.close()

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

    def damage(self, done: Callable[[], object] = lambda: None) -> Iterator[str]:
        yield from super().damage(done)
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

    def write_checkpoint(self, folder: Path) -> bool:
        """Write all present trajectories to an empty folder as hard links to the buffer's files.

        On the same disk this takes milliseconds for any size, otherwise the files are copied. The links stay valid,
        because the buffer only appends to its files or removes them, and never changes written rows.
        """
        while True:
            self._check_open()
            for why in self.lost_files():
                raise UserError(f"{why}; {SALVAGE}")
            opened, target = self._opened, Files(folder, writable=True)
            names = [opened.log.name, opened.texts.name]
            for table in opened.tables:
                names += [table.schema_file, *table.kept_files()]
            try:
                for name in names:
                    target.with_prefix(opened.manifest.prefix).take(opened.files, name)
            except FileNotFoundError:
                # the process that writes the buffer may have removed files, and it has then written what it keeps
                if not self.refresh():
                    raise
                for file in folder.iterdir():
                    file.unlink()
            else:
                replace(opened.manifest, end=self.snapshot.next_id).write(target)
                return True

    def _read(self, record: np.void, *, verify: bool) -> FlatTrajectory:
        opened = self._opened
        table = opened.tables[int(record["schema"])]
        steps, batch, epochs = int(record["steps"]), int(record["batch"]), int(record["epochs"])
        first, count = int(record["row"]), steps * batch
        final, finals = int(record["final"]), int(record["finals"])
        try:
            if verify and table.stored_checksum(first, count, final, finals) != record["data_crc"]:
                raise UserError("its rows are not what was written (checksum)")
            columns = table.read(first + torch.arange(count), [*table.schema.paths, INSTRUCTION])
            instructions = [opened.texts.instruction(i) for i in columns.pop(INSTRUCTION).tolist() if i >= 0]
            text = opened.texts.text(int(record["text"]), int(record["text_nbytes"]))
            if text_checksum(text, instructions) != record["text_crc"]:
                where = opened.files.where(opened.texts.name)
                raise UserError(f"{where}: its text or its instructions are not what was written (checksum)")
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
    def _newest_manifest(self) -> Manifest:
        """Return the manifest on disk, or that of the open files if it is missing. A file is decoded only once."""
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
                    # If the file was replaced after `open`, this reads the newer file, while `_manifest_file` is the
                    # older one. The next call notices the difference and reads the newer file once more.
                    self._manifest_read = Manifest.read(self._all)
                except BaseException:
                    os.close(file)
                    raise
                self._manifest_file = file
        except FileNotFoundError:
            return self.manifest
        return self._manifest_read or self.manifest

    def _is_replaced_by(self, manifest: Manifest) -> bool:
        """Return whether ``manifest`` names other files than the open ones, so that all files must be reopened."""
        return self._stale or manifest.files != self.manifest.files

    def _open_newest(self, manifest: Manifest) -> None:
        """Open the files of ``manifest``, or of a newer manifest if the writer has replaced the files meanwhile."""
        try:
            self._open(manifest)
        except (OSError, UserError):
            newer = Manifest.read(self._all)
            if newer is None or newer == manifest:
                raise
            self._open_newest(newer)

    def _open(self, manifest: Manifest) -> None:
        files = self._all.with_prefix(manifest.prefix)
        needed = {manifest.log, manifest.texts}
        there = set(files.names())
        # a writer creates missing files, but only if there are no others, because the buffer is new then
        if (missing := sorted(needed - there)) and (not self._writable or there - needed):
            raise UserError(f"{files.where(missing[0])}: missing; without it the others cannot be read")
        limit = LONGEST if manifest.end is None else manifest.end - manifest.base
        least = max(manifest.known, manifest.end or 0) - manifest.base
        log = Log(files, manifest.log, writable=self._writable, limit=limit, least=least)
        texts = Texts(files, manifest.texts, manifest.texts_begin, writable=self._writable)
        self._opened, self._stale = OpenFiles(manifest, files, log, texts), False
        try:
            self._notice()
        except BaseException:
            self._opened.close()
            raise

    def _reopen(self, manifest: Manifest) -> None:
        """Open the files of ``manifest``, and then close the old files. After an error, the old files stay open."""
        with self.exclusive():
            before, snapshot = self._opened, self.snapshot
            try:
                self._open_newest(manifest)
            except BaseException:
                self._opened, self.snapshot, self._stale = before, snapshot, True
                raise
            before.close()

    # --- following the log -----------------------------------------------------------------------
    def _notice(self) -> None:
        """Update the tables, their indexes and ``snapshot`` to all records of the log."""
        try:
            self._notice_records()
        except OSError as error:
            manifest = self._newest_manifest()
            if self._is_replaced_by(manifest):  # the writer has replaced all files, and the caller opens the new ones
                raise
            if manifest != self.manifest:  # the writer has dropped the missing segment since the manifest was read
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
        with self._changed:  # no thread may enter `held` before the tables and the snapshot are both updated
            for table, own in self._publish_rows(fresh, skip_unreadable=skip_unreadable):
                table.index.append(fresh, own)
            opened.texts.instructed = opened.texts.instructed or bool((fresh["flags"] & INSTRUCTED).any())
            opened.seen = count
            self._publish_snapshot()

    def _publish_snapshot(self) -> None:
        opened, manifest = self._opened, self._opened.manifest
        spans = []
        for table in opened.tables:
            first = manifest.kept(table.number)[0]
            spans.append((first, max(table.index.end, first)))
        # the manifest may already name a first trajectory whose log record this process has not read yet
        next_id = max(manifest.base + opened.seen, manifest.first)
        records = opened.log.records[manifest.first - manifest.base : next_id - manifest.base]
        epoch = (manifest.identity, manifest.epoch)
        self.snapshot = Snapshot(
            epoch, manifest.first, next_id, tuple(opened.tables), tuple(spans), records, opened.texts
        )

    def _publish_rows(
        self, records: np.ndarray[Any, Any], *, skip_unreadable: bool
    ) -> list[tuple[Table, np.ndarray[Any, Any]]]:
        """Publish the rows of these log records, and open their tables if needed. For errors see `Columns.publish`.

        Returns the tables that have any of the records, each with the indices of its records.
        """
        opened = self._opened
        known = max(int((records["schema"] + 1).max(initial=0)), len(opened.manifest.rows))
        for number in range(len(opened.tables), known):
            opened.tables.append(Table.open(opened.files, number))
        if opened.dropped is not opened.manifest:
            self._drop_segments()
        found = []
        for table in opened.tables:
            own = np.flatnonzero(records["schema"] == table.number)
            if len(own):
                found.append((table, own))
                row, steps, batch, final, finals = records[ENDS][own[-1]].item()
                ends = row + steps * batch, final + finals
                self._make_fit(table, ends)
                for part, end in zip(table.parts, ends, strict=True):
                    part.publish(end, skip_unreadable=skip_unreadable)
        return found

    def _drop_segments(self) -> None:
        """Drop the segments that have no trajectory kept by the manifest, and unmap them once no thread reads them."""
        with self._changed:
            self._publish_snapshot()
            number, dropped = self._drops + 1, False
            for table in self._opened.tables:
                for part, first in zip(table.parts, self.manifest.kept(table.number), strict=True):
                    dropped = part.drop(first, number, remove=self._writable) or dropped
            if dropped:
                self._drops = number
                self._unmap()
            self._opened.dropped = self.manifest

    def _unmap(self) -> None:
        """Unmap the dropped segments that no thread can be reading.

        These are the segments that were dropped before the first of the threads now inside `held` has entered it.
        """
        oldest = min(self._holders, default=self._drops)
        left = [part.release(oldest) for table in self._opened.tables for part in table.parts]
        self.unmap_pending = any(left)

    def _make_fit(self, table: Table, ends: Sequence[int]) -> None:
        """Enlarge the address spaces of a table if they are too small for rows and final observations below ``ends``.

        Raises:
            UserError: the system does not provide so many addresses.
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
    """Return as JSON the values of a trajectory that are neither in its rows nor in its log record.

    These are ``model_weights_id``, ``max_episode_length`` and the bootstrap entries.
    """
    bootstrap = []
    for path, tensor in trajectory.bootstrap.items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        bootstrap.append((path, base64.b64encode(data).decode()))
    weights, longest = trajectory.model_weights_id, trajectory.max_episode_length
    return msgspec.json.encode({"weights": weights, "max_episode_length": longest, "bootstrap": bootstrap}).decode()


def text_checksum(text: str, instructions: Sequence[str]) -> int:
    """Return the checksum of a trajectory's text (from `text_of`) and of its task descriptions."""
    return crc32("\0".join([text, *dict.fromkeys(instructions)]).encode())
