"""The manifest of a buffer and its append-only files: the log of trajectories, and the file of texts.

The manifest (``buffer.json``) names the files that belong to the buffer, and states which trajectories are kept. It is
replaced atomically, so a reader sees either the old or the new manifest.

The log has one record of fixed length for each trajectory. The record is appended after the trajectory's rows and texts
are on disk, so a trajectory exists if and only if it has a record. The log is also the index of trajectories: it is
mapped into memory and read in place. Even with a million trajectories, the process keeps no copy of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import torch

from gleanrl.buffer.columns import PAGE, AddressSpace
from gleanrl.buffer.files import CheckedJson, Files, crc32, write_all
from gleanrl.utils.errors import UserError

RECORD = np.dtype(
    [
        ("crc", "<u4"),  # checksum of all other bytes of the record
        ("kind", "<u2"),  # unused
        ("flags", "<u2"),  # a combination of SUCCESS, FAILURE, INTERVENED and INSTRUCTED
        ("id", "<i8"),  # ids count up from 0 and are never used twice
        ("row", "<i8"),  # the trajectory's first row in the table `schema`
        ("final", "<i8"),  # the first of its final observations (see `table`), which have row numbers of their own
        ("text", "<i8"),  # offset of the trajectory's text (see `Texts`)
        ("version_low", "<f8"),  # lowest version of the weights that acted, without NaN; -1 if versions are unknown
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
        ("text_begin", "<i8"),  # a lower bound of the offsets of its text, its task descriptions and all later ones
        ("unused", "V4"),
    ]
)
assert RECORD.itemsize == 128
# bits of `flags`; with neither SUCCESS nor FAILURE, the outcome is unknown; INSTRUCTED: there are task descriptions
SUCCESS, FAILURE, INTERVENED, INSTRUCTED = 1, 2, 4, 8
LONGEST = 1 << 31  # largest number of records in a log
CHECKED = 1 << 16  # number of records whose checksums are verified at once
ADDRESSES = 256 << 20  # initial address space of a log, bytes
REUSED_NBYTES = 1 << 12  # a text that equals one of about this many bytes before it is not stored again
CACHED = 1 << 16  # largest number of task descriptions that are kept in memory
# advice at the end of error messages about damage
SALVAGE = "`gleanrl buffer FOLDER merge OUT --skip-damaged` writes what is left to a new buffer"


FORMAT = 2  # version of the file format, which covers the manifest and all files that it names
Count = Annotated[int, msgspec.Meta(ge=0)]


class AnyManifest(msgspec.Struct):
    """What the manifests of all formats have in common."""

    format: int


class Manifest(CheckedJson, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of ``buffer.json``: the files that belong to a buffer, and the rows and records that are kept."""

    NAME: ClassVar[str] = "buffer.json"

    format: Count = FORMAT
    # random name of the buffer; another buffer that is made later in the same folder has another one
    identity: str = msgspec.field(default_factory=lambda: os.urandom(8).hex())
    epoch: Count = 0  # number with which all file names begin; increases when the whole content is replaced
    log: str = "log-000000"
    texts: str = "texts-000000"
    texts_begin: Count = 0  # offset of the first byte in the file of texts
    base: Count = 0  # id of the first record in the log, which may be of a dropped trajectory
    first: Count = 0  # id of the oldest trajectory that is kept
    rows: tuple[Count, ...] = ()  # for each table, the first row that is kept
    finals: tuple[Count, ...] = ()  # for each table, the first final observation that is kept
    known: Count = 0  # all ids below this one were written to the log, so a missing record is damage
    # Only in a checkpoint: the id after its last trajectory. The linked files may contain further trajectories,
    # which the buffer has added later.
    end: Count | None = None

    @classmethod
    def read(cls, files: Files) -> Manifest | None:
        """Return the manifest of a folder; None if it has none. Raises `UserError` for damage or another format."""
        where = files.where(cls.NAME)
        try:
            text = files.read_text(cls.NAME)
            if (found := msgspec.json.decode(text, type=AnyManifest).format) != FORMAT:
                raise UserError(f"{where}: a buffer of format {found}; this version reads {FORMAT}")
            return cls.decode(text)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise UserError(f"{where}: no manifest of a buffer, or a damaged one ({error})") from None

    def write(self, files: Files) -> None:
        """Write this manifest to a folder, replacing an old one atomically. It is on disk when this returns."""
        files.replace(self.NAME, self.encode())

    @property
    def files(self) -> tuple[str, str, int, int | None]:
        """What differs between two manifests if a reader of one has to open the files of the other."""
        return self.identity, self.log, self.epoch, self.end

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
    nbytes: int  # bytes from that record to the end of the file
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
        writable: whether records can be appended. If there are incomplete records at the end, which a crash leaves,
            ``exposed`` is True, and records must not be appended to this file.
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
        # Whether there are records behind the last one that counts, of an `append` that failed or of a crash. Readers
        # may have mapped them, and would be killed if the file became shorter. So the writer continues in another file.
        self.exposed = False
        self.refresh()
        if writable and self.damage is not None:
            if self.damage.good:
                why = f"{self.damage}; a writer would drop them, so it stops here; {SALVAGE}"
                raise UserError(f"{self.path}: {why}")
            self.exposed, self.damage = True, None

    @property
    def records(self) -> np.ndarray[Any, Any]:
        """All records before the first damaged one, as a read-only array of dtype `RECORD`, valid until `close`."""
        return self._all[: self.count]

    def refresh(self) -> None:
        """Update ``count`` and ``damage`` to what another process has written.

        ``count`` becomes smaller if the other process has taken back records because `append` failed.
        """
        nbytes = min(os.fstat(self._file).st_size, self._limit * RECORD.itemsize)
        there = nbytes // RECORD.itemsize
        last = self._all[self.count - 1 : self.count]
        if there < self.count or _checksums(last.view(np.uint8)) != last["crc"].tolist():
            self.count = 0  # all records are examined again
        if there <= self.count and nbytes == self.count * RECORD.itemsize >= self._least * RECORD.itemsize:
            self.damage = None
            return
        self._map(there)
        self.damage = None
        for begin in range(self.count, there, CHECKED):
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

    def all_intact(self) -> np.ndarray[Any, Any]:
        """Return a copy of all records with matching checksums, including those after a damaged record."""
        there = min(os.fstat(self._file).st_size, self._limit * RECORD.itemsize) // RECORD.itemsize
        self._map(there)
        return self._all[np.flatnonzero(self._intact(0, there))]

    def append(self, records: np.ndarray[Any, Any]) -> None:
        """Fill in the checksums of ``records``, append them to the file, and sync it to disk.

        After an error the new records do not count, and ``exposed`` is True if they are in the file.
        """
        lines: Any = records.view(np.uint8)
        records["crc"] = _checksums(lines)
        at = self.count * RECORD.itemsize
        try:
            write_all(self._file, memoryview(lines), at)
            self._files.sync([self._file])
        except BaseException:
            written = (os.fstat(self._file).st_size - at) // RECORD.itemsize
            self.exposed = written > 0
            if self.exposed:
                # the records stay there, with checksums that do not match
                records["crc"] = ~records["crc"]
                write_all(self._file, memoryview(lines[: written * RECORD.itemsize]), at)
            else:
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
    """The texts of trajectories and the task descriptions (instructions), in one append-only file.

    Every text has an offset, which counts from the first byte that was ever written. So it stays valid when the oldest
    part of the file is left out of a new file. A trajectory's text (`reader.text_of`) is found by its offset and
    length, which are in the log record. A task description is found by its number, which is in the trajectory's rows
    and is the offset of a line with its checksum and itself.

    Args:
        files: the folder of the file, or memory.
        name: name of the file. If ``writable``, a missing file is created.
        begin: offset of the file's first byte.
        writable: whether texts can be added.
    """

    def __init__(self, files: Files, name: str, begin: int, *, writable: bool) -> None:
        self._files, self.name, self.begin = files, name, begin
        self._file = files.create(name) if writable and name not in files.names() else files.open(name)
        self.end = begin + os.fstat(self._file).st_size  # offset after the last byte
        self.instructed = False  # whether the buffer has had a task description since it was opened
        self._cached: dict[int, str] = {}  # task descriptions by number
        self._pending = bytearray()  # texts that `commit` writes
        # Texts that may be used again, by their offset and length. None of them begins before `_reused_from`, which
        # increases from time to time, so that a text which is always in use does not keep all later ones.
        self._recent: dict[str, tuple[int, int]] = {}
        self._reused_from = self.end

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.end - self.begin

    def add(self, text: str, instructions: Sequence[str]) -> tuple[tuple[int, int, int], list[int]]:
        """Queue the text and the task descriptions of a trajectory for `commit`.

        Returns:
            The fields ``text_begin``, ``text`` and ``text_nbytes`` of the log record, and the numbers of
            ``instructions``.
        """
        if self.end + len(self._pending) - self._reused_from > REUSED_NBYTES:
            self._forget()
        place = (self._reused_from, *self._add(text))
        numbers = {own: self._add(description_line(own))[0] for own in dict.fromkeys(instructions)}
        return place, [numbers[own] for own in instructions]

    def commit(self) -> None:
        """Write the queued texts to disk, and sync them. Raises `OSError` if that fails."""
        if self._pending:
            write_all(self._file, memoryview(bytes(self._pending)), self.nbytes)
            self._files.sync([self._file])
            self.end += len(self._pending)
            self._pending = bytearray()

    def rollback(self) -> None:
        """Discard the queued texts, after the write of their trajectories has failed."""
        self._pending = bytearray()
        self._forget()

    def text(self, at: int, nbytes: int) -> str:
        return os.pread(self._file, nbytes, at - self.begin).decode(errors="replace")

    def instruction(self, number: int) -> str:
        """Return the task description with this number. Raises `UserError` if it is damaged or missing."""
        found = self._cached.get(number)
        if found is None:
            at, nbytes, line = number - self.begin, 1 << 9, b""
            if 0 <= at < os.fstat(self._file).st_size:
                line = os.pread(self._file, nbytes, at)
            while b"\n" not in line and len(line) == nbytes:
                nbytes *= 8
                line = os.pread(self._file, nbytes, at)
            checksum, _, content = line.partition(b"\n")[0].partition(b" ")
            if checksum != b"%08x" % crc32(content):
                raise UserError(f"{self._files.where(self.name)}: task description {number} is damaged or missing")
            found = json.loads(content)
            if len(self._cached) >= CACHED:
                self._cached.clear()
            self._cached[number] = found
        return found

    def copy(self, name: str, begin: int) -> None:
        """Copy all texts from offset ``begin`` on into the new file ``name``, and sync it to disk."""
        file = self._files.create(name)
        try:
            for at in range(begin, self.end, 1 << 22):
                data = os.pread(self._file, min(1 << 22, self.end - at), at - self.begin)
                write_all(file, memoryview(data), at - begin)
            self._files.sync([file])
        finally:
            os.close(file)

    def close(self) -> None:
        os.close(self._file)

    def _add(self, text: str) -> tuple[int, int]:
        """Queue a text unless an equal one was added recently, and return its offset and its length in bytes."""
        found = self._recent.get(text)
        if found is None:
            data = text.encode()
            found = self._recent[text] = (self.end + len(self._pending), len(data))
            self._pending += data
        return found

    def _forget(self) -> None:
        """Store all further texts again, even if equal ones are in the file."""
        self._recent, self._reused_from = {}, self.end + len(self._pending)


def description_line(description: str) -> str:
    """Return a task description as a line of the file of texts."""
    content = json.dumps(description)
    return f"{crc32(content.encode()):08x} {content}\n"
