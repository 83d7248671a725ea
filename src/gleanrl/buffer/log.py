"""The manifest and the append-only files of a buffer: the log of trajectories, and their texts.

The manifest says which files of a folder make up the buffer, and what is kept of them. It is replaced atomically, so a
reader never sees half of a change.

The log has one record of fixed length for each trajectory, appended once its rows and texts are safe on disk. A
trajectory exists if and only if it has a record. The log is also the index: records are mapped and read in place, so a
million trajectories need no memory of the process.
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
        ("crc", "<u4"),  # of the rest of the record
        ("kind", "<u2"),  # unused
        ("flags", "<u2"),
        ("id", "<i8"),  # counts up from 0; an id is never used twice
        ("row", "<i8"),  # first row in the table of its schema
        ("final", "<i8"),  # first row among the final observations
        ("text", "<i8"),  # offset of its text
        ("version_low", "<f8"),
        ("version_high", "<f8"),
        ("time", "<f8"),  # seconds since 1970
        ("reward", "<f8"),  # sum of all rewards
        ("text_nbytes", "<u4"),
        ("steps", "<u4"),  # T
        ("batch", "<u4"),  # B
        ("finals", "<u4"),  # number of final observations
        ("episodes", "<u4"),  # ends of episodes
        ("epochs", "<u4"),
        ("data_crc", "<u4"),  # of its rows as they are stored
        ("schema", "<u4"),
        ("commit", "<i8"),  # id of the first trajectory that was written together with this one
        ("text_crc", "<u4"),  # of its text and its instructions
        ("unused", "V12"),
    ]
)
assert RECORD.itemsize == 128
SUCCESS, FAILURE, INTERVENED = 1, 2, 4  # flags; neither of the first two: unknown
LONGEST = 1 << 31  # records in a log
CHECKED = 1 << 16  # records whose checksums are compared at once
ADDRESSES = 256 << 20  # bytes of address space that a log starts with
SALVAGE = "`gleanrl buffer FOLDER merge OUT --skip-damaged` writes what is left to a new buffer"


FORMAT = 1  # of the manifest and of everything that it names
Count = Annotated[int, msgspec.Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What counts in a buffer's folder. Change it with `msgspec.structs.replace`."""

    NAME: ClassVar[str] = "buffer.json"

    format: Count = FORMAT
    epoch: Count = 0  # number at the start of the files' names
    log: str = "log-000000"
    texts: str = "texts-000000"
    base: Count = 0  # id of the log's first record
    first: Count = 0  # oldest id that is kept
    rows: tuple[Count, ...]  # first row that is kept, of each schema
    finals: tuple[Count, ...]  # first final observation that is kept, of each schema
    known: Count = 0  # the log has had all records below this id
    end: Count | None = None  # of a checkpoint: the first id that no longer belongs to it, whatever its files hold

    @classmethod
    def read(cls, files: Files) -> Manifest | None:
        """Return the folder's manifest, or None. Raises `UserError` where it is damaged or of another format."""
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
        """Replace the folder's manifest durably and atomically."""
        files.replace(self.NAME, msgspec.json.encode(self))

    @property
    def prefix(self) -> str:
        """Start of the names of the buffer's files."""
        return f"{self.epoch:03d}-"

    def kept(self, table: int) -> tuple[int, int]:
        """Return the first row and the first final observation of a table that are kept."""
        return (self.rows[table], self.finals[table]) if table < len(self.rows) else (0, 0)


@dataclass(frozen=True, slots=True)
class Damage:
    """Where a log becomes unreadable."""

    record: int
    nbytes: int  # from there to the end; a writer cuts them off
    why: str
    good: int = 0  # intact records after it that were committed later, so it is no torn write of a crash

    def __str__(self) -> str:
        rest = f"{self.good} good record{'s' * (self.good > 1)}" if self.good else f"{self.nbytes} bytes"
        return f"{self.why} at record {self.record}; {rest} from there on do not count"


class Log:
    """The records of a log file as an array.

    Args:
        files: where it is.
        name: of the file; created if ``writable`` and missing.
        writable: allow `append`, and cut off a torn end.
        limit: records that count, e.g. in a checkpoint that shares the file with a buffer.
        least: records that the log is known to have had.

    Raises:
        UserError: ``writable``, and the log is damaged by something else than a crash.
    """

    def __init__(self, files: Files, name: str, *, writable: bool, limit: int = LONGEST, least: int = 0) -> None:
        self._files, self.name, self._limit, self._least = files, name, limit, least
        self.path = files.where(name)
        self._file = files.create(name) if writable and name not in files.names() else files.open(name)
        self._use(AddressSpace(ADDRESSES))
        self.count = 0
        self.damage: Damage | None = None
        self.exposed = False  # readers may have seen records that do not count
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
        """All intact records as an array of `RECORD`, read only, valid until `close`."""
        return self._all[: self.count]

    def refresh(self) -> int:
        """Notice records that another process appended, and return how many."""
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
                # intact records of later commits show that the bad one was intact once
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
        """Return all intact records, also those after a damaged one."""
        there = min(os.fstat(self._file).st_size, self._limit * RECORD.itemsize) // RECORD.itemsize
        self._map(there)
        return self._all[np.flatnonzero(self._intact(0, there))]

    def append(self, records: np.ndarray[Any, Any]) -> None:
        """Append records durably, then make them visible. After an error the log is as before; see ``exposed``."""
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
        """Return bool ``[end - first]``: the record's checksum matches."""
        return np.array(_checksums(self._bytes[first:end].numpy().reshape(-1))) == self._all["crc"][first:end]

    def _map(self, count: int) -> None:
        if count > LONGEST:
            raise UserError(f"{self.name}: more than {LONGEST} records")
        pages = -(-count * RECORD.itemsize // PAGE) * PAGE
        if pages > self._space.nbytes:  # arrays that were handed out keep the old space alive
            self._use(AddressSpace(max(4 * self._space.nbytes, pages)))
        if pages > self._mapped:
            self._space.map(self._file, self._mapped, self._mapped, pages - self._mapped)
            self._mapped = pages

    def _use(self, space: AddressSpace) -> None:
        """Use an address space in which nothing is mapped yet."""
        self._space, self._mapped = space, 0
        self._bytes = space.rows(torch.uint8, (RECORD.itemsize,))
        self._all = self._bytes.numpy().view(RECORD).reshape(-1)


def _checksums(lines: Any) -> list[int]:
    """Return the checksum of each record, given an array of their bytes."""
    data = memoryview(lines)
    return [crc32(data[start + 4 : start + RECORD.itemsize]) for start in range(0, len(data), RECORD.itemsize)]


class Texts:
    """Texts of trajectories by offset, and task descriptions by number, each stored once.

    Two append-only files. What is written counts once a log record refers to it.

    Args:
        files: where they are.
        name: of the file of texts. The task descriptions are in ``instructions.jsonl``, one JSON string a line.
        writable: allow `commit`; missing files are created.
    """

    INSTRUCTIONS = "instructions.jsonl"

    def __init__(self, files: Files, name: str, *, writable: bool) -> None:
        self._files, self.names = files, (name, self.INSTRUCTIONS)
        there = files.names() if writable else ()
        opened = [files.create(n) if writable and n not in there else files.open(n) for n in self.names]
        self._texts, self._lines = opened
        self.end = os.fstat(self._texts).st_size  # bytes of the texts
        self._known: list[str | None] = []  # task descriptions; None: the line is damaged
        self.instructions_nbytes = 0  # up to where they are read; the lock is held to change both
        self._lock = threading.Lock()
        self._read_more()
        if writable:
            os.ftruncate(self._lines, self.instructions_nbytes)  # half a line of a crash
        self._number = {text: number for number, text in enumerate(self._known) if text is not None}
        self._pending, self._fresh = bytearray(), list[str]()
        self._last = ("", (0, 0))

    @property
    def nbytes(self) -> int:
        """Bytes of both files."""
        return self.end + self.instructions_nbytes

    @property
    def instructed(self) -> bool:
        """Whether there is any task description."""
        return bool(self._known) or os.fstat(self._lines).st_size > 0

    def add_text(self, text: str) -> tuple[int, int]:
        """Queue a text for `commit`; return its offset and length in bytes. A repeated text is stored once."""
        if text != self._last[0]:
            data = text.encode()
            self._last = (text, (self.end + len(self._pending), len(data)))
            self._pending += data
        return self._last[1]

    def add_instructions(self, instructions: Sequence[str]) -> list[int]:
        """Queue new task descriptions for `commit`; return the number of each."""
        for text in dict.fromkeys(instructions):
            if text not in self._number:
                self._number[text] = len(self._known) + len(self._fresh)
                self._fresh.append(text)
        return [self._number[text] for text in instructions]

    def commit(self) -> None:
        """Write what is queued durably. Raises `OSError`."""
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
        """Forget what is queued."""
        for text in self._fresh:
            del self._number[text]
        self._pending, self._fresh, self._last = bytearray(), [], ("", (0, 0))

    def text(self, at: int, nbytes: int) -> str:
        return os.pread(self._texts, nbytes, at).decode(errors="replace")

    def instruction(self, number: int) -> str:
        """Return a task description. Raises `UserError` where its line is lost."""
        if number >= len(self._known):
            with self._lock:
                if number >= len(self._known):  # another thread may have read them meanwhile
                    self._read_more()
        text = self._known[number] if number < len(self._known) else None
        if text is None:
            raise UserError(f"{self._files.where(self.INSTRUCTIONS)}: line {number + 1} is damaged or missing")
        return text

    def copy(self, name: str, begin: int) -> None:
        """Copy the texts from an offset on to a new file, durably."""
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
        """Read task descriptions that another process appended."""
        data = os.pread(self._lines, os.fstat(self._lines).st_size - self.instructions_nbytes, self.instructions_nbytes)
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:
            try:
                text = json.loads(line)
            except ValueError:
                text = None
            self._known.append(text if isinstance(text, str) else None)
        self.instructions_nbytes += len(whole)
