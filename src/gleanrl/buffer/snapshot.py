"""The interface between storage and sampling. It is implemented for our files (`reader`) and for RLinf's (`rlinf`).

A `Reader` has a state that other threads and processes change. A `Snapshot` is that state at one moment: trajectories
by id, and their rows by table, which hold all trajectories of one schema.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.log import SALVAGE
from gleanrl.buffer.schema import Schema
from gleanrl.buffer.trajectory import FieldPath, FlatTrajectory
from gleanrl.utils.errors import UserError


class RowSource(Protocol):
    """A table: rows of one schema, numbered from 0."""

    @property
    def number(self) -> int: ...

    @property
    def schema(self) -> Schema: ...

    def read(self, rows: Tensor, paths: Collection[FieldPath]) -> dict[FieldPath, Tensor]:
        """Return fields ``[n, ...]`` of rows (int64 ``[n]``) as new tensors. Raises `UserError` where they are lost."""
        ...


class Instructions(Protocol):
    """Task descriptions by number."""

    @property
    def instructed(self) -> bool | None:
        """Whether there is any; None: not in the files that were read so far."""
        ...

    def instruction(self, number: int) -> str: ...


@dataclass(frozen=True, slots=True)
class RowRanges:
    """Rows of one table: ``total`` rows from ``first`` on, or, with ``starts``, runs of consecutive rows.

    ``starts`` (int64) is the first row of each run, and ``begins`` (int64) the number of rows in earlier runs.
    ``first`` then is the value of ``begins`` at which counting starts.
    """

    table: int
    first: int
    total: int
    starts: Tensor | None = None
    begins: Tensor | None = None

    def at(self, positions: Tensor) -> Tensor:
        """Return the rows at positions from 0 to ``total`` - 1."""
        found = positions + self.first if self.first else positions
        if self.starts is None or self.begins is None:
            return found
        run = torch.bucketize(found, self.begins, right=True) - 1
        return found - self.begins[run] + self.starts[run]


class Index:
    """Where some trajectories of a table begin, in order of their ids. Appending takes constant time on average."""

    def __init__(self) -> None:
        # for each trajectory: its id, its first row, the number of rows of earlier ones
        self._all, self._count, self._rows = np.zeros((3, 1024), np.int64), 0, 0

    def append(self, records: np.ndarray[Any, Any], where: np.ndarray[Any, Any]) -> None:
        """Append the trajectories of the `log.RECORD` entries at positions ``where``."""
        count = self._count + len(where)
        if count > self._all.shape[1]:
            grown = np.zeros((3, max(count, 2 * self._count)), np.int64)
            grown[:, : self._count] = self._all[:, : self._count]
            self._all = grown
        rows = records["steps"][where].astype(np.int64) * records["batch"][where]
        ends = self._rows + np.cumsum(rows)
        self._all[:, self._count : count] = records["id"][where], records["row"][where], ends - rows
        self._count, self._rows = count, int(ends[-1]) if len(ends) else self._rows

    @property
    def end(self) -> int:
        """The row after the last trajectory."""
        if not self._count:
            return 0
        row, before = self._all[1:, self._count - 1].tolist()
        return row + self._rows - before

    def first_id(self, since: int) -> int | None:
        """Return the first id that is at least ``since``, or None."""
        at = self._position(since)
        return int(self._all[0, at]) if at < self._count else None

    def first_row(self, since: int) -> int | None:
        """Return the first row of the first trajectory with an id of at least ``since``, or None."""
        at = self._position(since)
        return int(self._all[1, at]) if at < self._count else None

    def holding(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the ids of the trajectories that hold these rows."""
        return self._all[0, np.searchsorted(self._all[1, : self._count], rows, side="right") - 1]

    def ranges(self, table: int, since: int, end: int) -> RowRanges | None:
        """Return the rows of the trajectories with ids from ``since`` to ``end`` - 1, or None."""
        at, to = self._position(since), self._position(end)
        if at == to:
            return None
        starts, begins = torch.from_numpy(self._all[1:, at:to])
        before, behind = int(begins[0]), self._rows if to == self._count else int(self._all[2, to])
        return RowRanges(table, before, behind - before, starts, begins)

    def _position(self, since: int) -> int:
        return int(np.searchsorted(self._all[0, : self._count], since))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The trajectories of one moment.

    ``tables``, ``indexes`` and what the arrays view may grow later; nothing in the range of this snapshot changes while
    it is held (`Reader.held`).
    """

    epoch: int  # changes when everything is replaced: row numbers and ids of another epoch mean nothing here
    first_id: int
    next_id: int
    tables: tuple[RowSource, ...]
    spans: tuple[tuple[int, int], ...]  # of each table: the first row that is kept, and the one after the last
    indexes: tuple[Index, ...]  # of each table; they may also contain trajectories outside of this snapshot
    records: np.ndarray[Any, Any]  # a `log.RECORD` for each trajectory, by id
    texts: Instructions

    def count_rows(self) -> int:
        return sum(end - first for first, end in self.spans)

    def records_of(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return copies of the records of some trajectories."""
        return self.records[ids - self.first_id]


class Reader(ABC):
    """A set of trajectories by id, to read."""

    folder: Path | None

    @property
    @abstractmethod
    def snapshot(self) -> Snapshot:
        """The newest state. Its rows and records may be read only inside `held`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all files."""

    @property
    def tables(self) -> Sequence[RowSource]:
        return self.snapshot.tables

    @property
    def first_id(self) -> int:
        return self.snapshot.first_id

    @property
    def next_id(self) -> int:
        return self.snapshot.next_id

    def count_rows(self) -> int:
        return self.snapshot.count_rows()

    @abstractmethod
    def refresh(self) -> bool:
        """Notice what another process wrote, and return whether it did."""

    @abstractmethod
    def held(self) -> AbstractContextManager[Snapshot]:
        """Hold the newest state: it stays readable even if it is dropped, replaced or closed meanwhile.

        Raises:
            RuntimeError: the buffer is closed.
        """

    @abstractmethod
    def unchanged(self) -> AbstractContextManager[None]:
        """Let nothing be added, dropped or noticed meanwhile. Raises `RuntimeError` where the buffer is closed."""

    @abstractmethod
    def full_records(self) -> np.ndarray[Any, Any]:
        """Return the records of all trajectories with every value known; this may read each file."""

    @abstractmethod
    def trajectory(self, number: int) -> FlatTrajectory:
        """Return a whole trajectory. Raises `UserError` where it does not exist or cannot be read."""

    @abstractmethod
    def checked(self) -> Iterator[FlatTrajectory | UserError]:
        """Yield each trajectory that counts now if its checksums match, else an error."""

    @abstractmethod
    def salvage(self) -> Iterator[FlatTrajectory | UserError]:
        """Yield each intact trajectory, and an error for each other one. Then only `close` may be called."""

    @abstractmethod
    def lost_files(self) -> list[str]:
        """Return a line for each file that is missing or cut short."""

    @abstractmethod
    def write_checkpoint(self, folder: Path) -> None:
        """Write what counts now to an empty folder, as a buffer that can be read."""

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
        """Yield a line for each damaged trajectory."""
        yield from (str(found) for found in self.checked() if isinstance(found, UserError))

    def _check_number(self, number: int) -> None:
        if not self.first_id <= number < self.next_id:
            there = f"the buffer has {self.first_id} to {self.next_id - 1}"
            empty = self.first_id == self.next_id
            raise UserError(f"no trajectory {number}: {'the buffer is empty' if empty else there}")
