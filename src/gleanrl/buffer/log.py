"""The log: one record of fixed length for each trajectory, appended when its rows are safe on disk.

What has a record is there; what has none never was. The records are also the index: they are read where they lie, so a
million trajectories cost no memory of ours.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gleanrl.buffer.checksums import crc32
from gleanrl.buffer.files import Files, write_all
from gleanrl.buffer.space import PAGE, Space
from gleanrl.utils.errors import UserError

RECORD = np.dtype(
    [
        ("crc", "<u4"),  # of the rest of the record
        ("kind", "<u2"),
        ("flags", "<u2"),
        ("id", "<i8"),  # counts up from 0 and is never given twice
        ("row", "<i8"),  # its first row among those of its schema; of a drop: the first row that is kept
        ("final", "<i8"),  # its first row among the final observations
        ("text", "<i8"),  # where its text begins
        ("version_low", "<f8"),
        ("version_high", "<f8"),
        ("time", "<f8"),  # seconds since 1970
        ("reward", "<f8"),  # sum of all rewards
        ("text_nbytes", "<u4"),
        ("steps", "<u4"),  # T
        ("batch", "<u4"),  # B
        ("finals", "<u4"),  # how many final observations
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
ADD, DROP = 1, 2
SUCCESS, FAILURE, INTERVENED = 1, 2, 4  # flags; neither of the first two: not known
LONGEST = 1 << 31  # records in a log
BLOCK = 1 << 16  # records checked at once
ADDRESSES = 256 << 20  # bytes of address space that a log begins with
SALVAGE = "`gleanrl buffer FOLDER merge OUT --skip-damaged` writes what is left to a new buffer"


@dataclass(frozen=True, slots=True)
class Damage:
    """Where a log stops making sense."""

    record: int
    nbytes: int  # what follows, dropped by a writer
    why: str
    good: int = 0  # records from here on that were whole once: so no crash tore it

    def __str__(self) -> str:
        behind = f"{self.good} good record{'s' * (self.good > 1)}" if self.good else f"{self.nbytes} bytes"
        return f"{self.why} at record {self.record}; {behind} from there on do not count"


class Log:
    """Records of one file, readable as an array.

    Args:
        files: where it is.
        name: of the file; it is made if ``writable`` and missing.
        writable: append, and cut off what is torn at its end.
        limit: records that count; what follows is somebody else's.
        least: records that it is known to have had.
    """

    def __init__(self, files: Files, name: str, *, writable: bool, limit: int = LONGEST, least: int = 0) -> None:
        self._files, self.name, self._limit, self._least = files, name, limit, least
        self._file = files.create(name) if writable and name not in files.names() else files.open(name)
        self._use(Space(ADDRESSES))
        self.count = 0
        self.damage: Damage | None = None
        self.recovered: Damage | None = None  # what was cut off
        self.exposed = False  # readers may have seen records that do not count
        self.refresh()
        if writable and self.damage is not None:
            if self.damage.good:
                why = f"{self.damage}; a writer would drop them, so it stops here; {SALVAGE}"
                raise UserError(f"{files.where(name)}: {why}")
            os.ftruncate(self._file, self.count * RECORD.itemsize)
            files.sync([self._file])
            self.recovered, self.damage = self.damage, None

    @property
    def records(self) -> np.ndarray[Any, Any]:
        """All good records, as an array of `RECORD`; read only, and valid until `close`."""
        return self._all[: self.count]

    def refresh(self) -> int:
        """Take notice of what another process appended; how many records that were."""
        nbytes = min(os.fstat(self._file).st_size, self._limit * RECORD.itemsize)
        there = nbytes // RECORD.itemsize
        if there <= self.count and nbytes == self.count * RECORD.itemsize >= self._least * RECORD.itemsize:
            self.damage = None
            return 0
        self._map(there)
        before, self.damage = self.count, None
        for begin in range(before, there, BLOCK):
            good = self._good(begin, min(begin + BLOCK, there))
            self.count = begin + (len(good) if good.all() else int(np.argmin(good)))
            if not good.all():
                why = "a record's checksum does not match"
                settled = self._settled_after(self.count, there)
                self.damage = Damage(self.count, nbytes - self.count * RECORD.itemsize, why, settled)
                break
        if self.damage is None and nbytes % RECORD.itemsize:
            self.damage = Damage(there, nbytes - there * RECORD.itemsize, "half a record")
        if self.count < self._least:
            found = self.damage or Damage(self.count, 0, "the file is cut short")
            self.damage = replace(found, good=found.good or self._least - self.count)
        return self.count - before

    def every(self) -> np.ndarray[Any, Any]:
        """Also the good records behind a damaged one, to save what can be saved."""
        there = min(os.fstat(self._file).st_size, self._limit * RECORD.itemsize) // RECORD.itemsize
        self._map(there)
        return self._all[np.flatnonzero(self._good(0, there))]

    def append(self, records: np.ndarray[Any, Any]) -> None:
        """Make the records durable, then visible. After an error the log is as before, but see ``exposed``."""
        records = records.copy()
        lines: Any = records.view(np.uint8)
        records["crc"] = _sums(lines)
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

    def _good(self, first: int, end: int) -> np.ndarray[Any, Any]:
        """bool: whose checksum matches."""
        return np.array(_sums(self._bytes[first:end].numpy().reshape(-1))) == self._all["crc"][first:end]

    def _settled_after(self, bad: int, there: int) -> int:
        """Good records of later commits than the bad one's: they show that it was whole once."""
        good = bad + 1 + np.flatnonzero(self._good(bad + 1, there))
        return int((self._all["commit"][good] > self._all["id"][good] - (good - bad)).sum())

    def _map(self, count: int) -> None:
        if count > LONGEST:
            raise UserError(f"{self.name}: more than {LONGEST} records")
        pages = -(-count * RECORD.itemsize // PAGE) * PAGE
        if pages > self._space.nbytes:  # what was given out stays valid in the old one
            self._use(Space(max(4 * self._space.nbytes, pages)))
        if pages > self._mapped:
            self._space.map(self._file, self._mapped, self._mapped, pages - self._mapped)
            self._mapped = pages

    def _use(self, space: Space) -> None:
        """Address space, in which nothing is mapped yet."""
        self._space, self._mapped = space, 0
        self._bytes = space.rows(torch.uint8, (RECORD.itemsize,))
        self._all = self._bytes.numpy().view(RECORD).reshape(-1)


def _sums(lines: Any) -> list[int]:
    """The checksum of each of some records, given as an array of their bytes."""
    data = memoryview(lines)
    return [crc32(data[start + 4 : start + RECORD.itemsize]) for start in range(0, len(data), RECORD.itemsize)]
