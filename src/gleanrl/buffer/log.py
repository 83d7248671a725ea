"""The manifest of a buffer and its append-only files: the log of trajectories, and the files of texts.

The manifest (``buffer.json``) names the files that belong to the buffer, and states which trajectories are kept. It is
replaced atomically, so a reader sees either the old or the new manifest.

The log has one record of fixed length for each trajectory. The record is appended after the trajectory's rows and texts
are on disk, so a trajectory exists if and only if it has a record. The log is also the index of trajectories: it is
mapped into memory and read in place. Even with a million trajectories, the process keeps no copy of it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import torch

from gleanrl.buffer.columns import PAGE, AddressSpace
from gleanrl.buffer.files import Files, crc32, write_all
from gleanrl.utils.errors import UserError

RECORD = np.dtype(
    [
        ("crc", "<u4"),  # checksum of all other bytes of the record
        ("kind", "<u2"),  # unused
        ("flags", "<u2"),  # a combination of SUCCESS, FAILURE and INTERVENED
        ("id", "<i8"),  # ids count up from 0 and are never used twice
        ("row", "<i8"),  # the trajectory's first row in the table `schema`
        ("final", "<i8"),  # the first of its final observations (see `table`), which have row numbers of their own
        ("text", "<i8"),  # byte offset of the trajectory's text in the file of texts
        ("version_low", "<f8"),  # lowest version of the weights that acted; -1 if versions are unknown
        ("version_high", "<f8"),  # highest version of the weights that acted; -1 if versions are unknown
        ("time", "<f8"),  # time at which the trajectory was added, seconds since 1970
        ("reward", "<f8"),  # sum of all rewards of the trajectory
        ("text_nbytes", "<u4"),
        ("steps", "<u4"),  # T
        ("batch", "<u4"),  # B
        ("finals", "<u4"),  # number of final observations
        ("episodes", "<u4"),  # number of chunk steps at which an episode ends
        ("epochs", "<u4"),  # number of rollout epochs with bootstrap entries; 0 if there are no such entries
        ("data_crc", "<u4"),  # checksum of the bytes of the trajectory's rows on disk
        ("schema", "<u4"),  # number of the table that has the rows
        ("commit", "<i8"),  # id of the first trajectory of the commit in which this one was written
        ("text_crc", "<u4"),  # checksum of the trajectory's text and task descriptions
        ("unused", "V12"),
    ]
)
assert RECORD.itemsize == 128
SUCCESS, FAILURE, INTERVENED = 1, 2, 4  # bits of `flags`; with neither SUCCESS nor FAILURE, the outcome is unknown
LONGEST = 1 << 31  # largest number of records in a log
CHECKED = 1 << 16  # number of records whose checksums are verified at once
ADDRESSES = 256 << 20  # initial address space of a log, bytes
# advice at the end of error messages about damage
SALVAGE = "`gleanrl buffer FOLDER merge OUT --skip-damaged` writes what is left to a new buffer"


FORMAT = 1  # version of the file format, which covers the manifest and all files that it names
Count = Annotated[int, msgspec.Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of ``buffer.json``: the files that belong to a buffer, and which of their rows and records are kept.

    Instances are immutable. `msgspec.structs.replace` makes a changed copy.
    """

    NAME: ClassVar[str] = "buffer.json"

    format: Count = FORMAT
    epoch: Count = 0  # number with which all file names begin; increases when the whole content is replaced
    log: str = "log-000000"
    texts: str = "texts-000000"
    base: Count = 0  # id of the first record in the log, which may be of a dropped trajectory
    first: Count = 0  # id of the oldest trajectory that is kept
    rows: tuple[Count, ...]  # for each table, the first row that is kept
    finals: tuple[Count, ...]  # for each table, the first final observation that is kept
    known: Count = 0  # all ids below this one were written to the log, so a missing record is damage
    # Only in a checkpoint: the id after its last trajectory. The linked files may contain further trajectories,
    # which the buffer has added later.
    end: Count | None = None

    @classmethod
    def read(cls, files: Files) -> Manifest | None:
        """Return the manifest of a folder; None if it has none. Raises `UserError` for damage or another format."""
        try:
            found = msgspec.json.decode(files.read_text(cls.NAME), type=cls)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            where = files.where(cls.NAME)
            raise UserError(f"{where}: no manifest of a buffer, or a damaged one ({error})") from None
        if found.format != FORMAT:
            where = files.where(cls.NAME)
            raise UserError(f"{where}: a buffer of format {found.format}; this version reads {FORMAT}")
        return found

    def write(self, files: Files) -> None:
        """Write this manifest to a folder, replacing an old one atomically. It is on disk when this returns."""
        files.replace(self.NAME, msgspec.json.encode(self))

    @property
    def prefix(self) -> str:
        """Prefix of the names of all files that the manifest names, for example ``000-``."""
        return f"{self.epoch:03d}-"

    def kept(self, table: int) -> tuple[int, int]:
        """Return the first row and the first final observation that are kept in the table with number ``table``."""
        return (self.rows[table], self.finals[table]) if table < len(self.rows) else (0, 0)


@dataclass(frozen=True, slots=True)
class Damage:
    """The place from which on a log is unreadable, and the reason."""

    record: int  # position in the log of the first unreadable record
    nbytes: int  # bytes from that record to the end of the file; a writer truncates the file by this number
    why: str
    # Number of records from there on that are known to have been complete on disk. If it is positive, the damage cannot
    # come from a crash during an append.
    good: int = 0

    def __str__(self) -> str:
        rest = f"{self.good} good record{'s' * (self.good > 1)}" if self.good else f"{self.nbytes} bytes"
        return f"{self.why} at record {self.record}; {rest} from there on do not count"


class Log:
    """A log file, whose records are mapped into memory as an array.

    Args:
        files: the folder of the log, or memory.
        name: name of the file. If ``writable``, a missing file is created.
        writable: whether records can be appended. Incomplete records at the end, which a crash leaves, are then removed
            from the file.
        limit: largest number of records to read. A checkpoint shares this file with a buffer that may append to it;
            the limit excludes the records that were appended after the checkpoint.
        least: number of records that are known to have been written. If there are fewer, the log is damaged.

    Raises:
        UserError: the log is ``writable`` and damaged in a way that a crash cannot cause.
    """

    def __init__(self, files: Files, name: str, *, writable: bool, limit: int = LONGEST, least: int = 0) -> None:
        self._files, self.name, self._limit, self._least = files, name, limit, least
        self.path = files.where(name)
        self._file = files.create(name) if writable and name not in files.names() else files.open(name)
        self._use(AddressSpace(ADDRESSES))
        self.count = 0
        self.damage: Damage | None = None
        self.exposed = False  # whether other processes may have read records of an `append` that failed
        self.refresh()
        if writable and self.damage is not None:
            if self.damage.good:
                why = f"{self.damage}; a writer would drop them, so it stops here; {SALVAGE}"
                raise UserError(f"{self.path}: {why}")
            os.ftruncate(self._file, self.count * RECORD.itemsize)
            files.sync([self._file])
            self.damage = None

    @property
    def records(self) -> np.ndarray[Any, Any]:
        """All records before the first damaged one, as a read-only array of dtype `RECORD`, valid until `close`."""
        return self._all[: self.count]

    def refresh(self) -> int:
        """Read the records that another process has appended, return their number, and update ``damage``."""
        nbytes = min(os.fstat(self._file).st_size, self._limit * RECORD.itemsize)
        there = nbytes // RECORD.itemsize
        if there <= self.count and nbytes == self.count * RECORD.itemsize >= self._least * RECORD.itemsize:
            self.damage = None
            return 0
        self._map(there)
        before, self.damage = self.count, None
        for begin in range(before, there, CHECKED):
            good = self._intact(begin, min(begin + CHECKED, there))
            self.count = begin + (len(good) if good.all() else int(np.argmin(good)))
            if not good.all():
                # A commit begins after the commit before it is on disk. So if there is an intact record of a later
                # commit, the damaged record was once complete, and the damage does not come from a crash.
                later = self.count + 1 + np.flatnonzero(self._intact(self.count + 1, there))
                settled = int((self._all["commit"][later] > self._all["id"][later] - (later - self.count)).sum())
                why = "a record's checksum does not match"
                self.damage = Damage(self.count, nbytes - self.count * RECORD.itemsize, why, settled)
                break
        if self.damage is None and nbytes % RECORD.itemsize:
            self.damage = Damage(there, nbytes - there * RECORD.itemsize, "half a record")
        if self.count < self._least:
            found = self.damage or Damage(self.count, 0, "the file is cut short")
            self.damage = replace(found, good=found.good or self._least - self.count)
        return self.count - before

    def all_intact(self) -> np.ndarray[Any, Any]:
        """Return a copy of all records with matching checksums, including those after a damaged record."""
        there = min(os.fstat(self._file).st_size, self._limit * RECORD.itemsize) // RECORD.itemsize
        self._map(there)
        return self._all[np.flatnonzero(self._intact(0, there))]

    def append(self, records: np.ndarray[Any, Any]) -> None:
        """Append records to the file, sync it to disk, and then add them to ``records``. Their checksums are filled in.

        After an error the log is unchanged, but ``exposed`` is True if other processes may have read the new records.
        """
        records = records.copy()
        lines: Any = records.view(np.uint8)
        records["crc"] = _checksums(lines)
        at = self.count * RECORD.itemsize
        try:
            write_all(self._file, memoryview(lines), at)
            self._files.sync([self._file])
        except BaseException:
            self.exposed = os.fstat(self._file).st_size >= at + RECORD.itemsize
            os.ftruncate(self._file, at)
            raise
        self._map(self.count + len(records))
        self.count += len(records)

    def close(self) -> None:
        self._all = self._all[:0]
        self._space.close()
        os.close(self._file)

    def _intact(self, first: int, end: int) -> np.ndarray[Any, Any]:
        """Return bool ``[end - first]``: whether the checksum of each record from ``first`` to ``end - 1`` matches."""
        return np.array(_checksums(self._bytes[first:end].numpy().reshape(-1))) == self._all["crc"][first:end]

    def _map(self, count: int) -> None:
        if count > LONGEST:
            raise UserError(f"{self.name}: more than {LONGEST} records")
        pages = -(-count * RECORD.itemsize // PAGE) * PAGE
        if pages > self._space.nbytes:  # the old address space stays mapped while arrays from `records` refer to it
            self._use(AddressSpace(max(4 * self._space.nbytes, pages)))
        if pages > self._mapped:
            self._space.map(self._file, self._mapped, self._mapped, pages - self._mapped)
            self._mapped = pages

    def _use(self, space: AddressSpace) -> None:
        """Make ``space``, in which nothing is mapped yet, the address space of the log."""
        self._space, self._mapped = space, 0
        self._bytes = space.rows(torch.uint8, (RECORD.itemsize,))
        self._all = self._bytes.numpy().view(RECORD).reshape(-1)


def _checksums(lines: Any) -> list[int]:
    """Return the checksum of each record. ``lines``: the bytes of all records, as a uint8 array."""
    data = memoryview(lines)
    return [crc32(data[start + 4 : start + RECORD.itemsize]) for start in range(0, len(data), RECORD.itemsize)]


class Texts:
    """The texts of trajectories and the task descriptions (instructions), in two append-only files.

    A trajectory's text (`reader.text_of`) is read by its byte offset and length, which are in the log record. A task
    description is read by its number, which is in the trajectory's rows. Equal task descriptions are stored once.

    Args:
        files: the folder of the two files, or memory.
        name: name of the file of texts. The task descriptions are in ``instructions.jsonl``, one JSON string per line.
        writable: whether texts can be added. Missing files are then created.
    """

    INSTRUCTIONS = "instructions.jsonl"

    def __init__(self, files: Files, name: str, *, writable: bool) -> None:
        self._files, self.names = files, (name, self.INSTRUCTIONS)
        there = files.names() if writable else ()
        opened = [files.create(n) if writable and n not in there else files.open(n) for n in self.names]
        self._texts, self._lines = opened
        self.end = os.fstat(self._texts).st_size  # size of the file of texts in bytes
        self._known: list[str | None] = []  # task descriptions by number; None if the line is damaged
        self.instructions_nbytes = 0  # bytes of the lines in `_known`; `_lock` protects both
        self._lock = threading.Lock()
        self._read_more()
        if writable:
            os.ftruncate(self._lines, self.instructions_nbytes)  # a crash may have left an incomplete last line
        self._number = {text: number for number, text in enumerate(self._known) if text is not None}
        self._pending, self._fresh = bytearray(), list[str]()
        self._last = ("", (0, 0))  # the text that was added last, and its offset and length

    @property
    def nbytes(self) -> int:
        """Bytes of both files."""
        return self.end + self.instructions_nbytes

    @property
    def instructed(self) -> bool:
        """Whether the buffer has any task description."""
        return bool(self._known) or os.fstat(self._lines).st_size > 0

    def add_text(self, text: str) -> tuple[int, int]:
        """Queue a text for `commit`, and return its offset in the file and its length, both in bytes.

        A text that equals the text added before it is not stored again.
        """
        if text != self._last[0]:
            data = text.encode()
            self._last = (text, (self.end + len(self._pending), len(data)))
            self._pending += data
        return self._last[1]

    def add_instructions(self, instructions: Sequence[str]) -> list[int]:
        """Return the number of each task description. Those that are not stored yet are queued for `commit`."""
        for text in dict.fromkeys(instructions):
            if text not in self._number:
                self._number[text] = len(self._known) + len(self._fresh)
                self._fresh.append(text)
        return [self._number[text] for text in instructions]

    def commit(self) -> None:
        """Write the queued texts and task descriptions to disk, and sync them. Raises `OSError` if that fails."""
        lines = "".join(json.dumps(text) + "\n" for text in self._fresh).encode()
        touched = set()
        if self._pending:
            write_all(self._texts, memoryview(bytes(self._pending)), self.end)
            touched.add(self._texts)
        if lines:
            write_all(self._lines, memoryview(lines), self.instructions_nbytes)
            touched.add(self._lines)
        self._files.sync(touched)
        self.end += len(self._pending)
        with self._lock:
            self.instructions_nbytes += len(lines)
            self._known += self._fresh
        self._pending, self._fresh = bytearray(), []

    def rollback(self) -> None:
        """Discard the queued texts and task descriptions, after the write of their trajectories has failed."""
        for text in self._fresh:
            del self._number[text]
        self._pending, self._fresh, self._last = bytearray(), [], ("", (0, 0))

    def text(self, at: int, nbytes: int) -> str:
        return os.pread(self._texts, nbytes, at).decode(errors="replace")

    def instruction(self, number: int) -> str:
        """Return the task description with this number. Raises `UserError` if its line is damaged or missing."""
        if number >= len(self._known):
            with self._lock:
                if number >= len(self._known):  # another thread may have read more lines meanwhile
                    self._read_more()
        text = self._known[number] if number < len(self._known) else None
        if text is None:
            raise UserError(f"{self._files.where(self.INSTRUCTIONS)}: line {number + 1} is damaged or missing")
        return text

    def copy(self, name: str, begin: int) -> None:
        """Copy all texts at byte offset ``begin`` and above into the new file ``name``, and sync it to disk."""
        file = self._files.create(name)
        try:
            for at in range(begin, self.end, 1 << 22):
                data = os.pread(self._texts, min(1 << 22, self.end - at), at)
                write_all(file, memoryview(data), at - begin)
            self._files.sync([file])
        finally:
            os.close(file)

    def close(self) -> None:
        os.close(self._texts)
        os.close(self._lines)

    def _read_more(self) -> None:
        """Read the complete lines of task descriptions that another process has appended."""
        data = os.pread(self._lines, os.fstat(self._lines).st_size - self.instructions_nbytes, self.instructions_nbytes)
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:
            try:
                text = json.loads(line)
            except ValueError:
                text = None
            self._known.append(text if isinstance(text, str) else None)
        self.instructions_nbytes += len(whole)
