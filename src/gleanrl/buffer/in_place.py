"""RLinf's directories sampled where they lie: rows are taken from its memory-mapped files, and nothing is converted.

One table holds the rows of all trajectories in the order of RLinf's index, so the same seed and window draw the same
rows as RLinf does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.index import Index
from gleanrl.buffer.log import INTERVENED, RECORD
from gleanrl.buffer.manifest import Manifest
from gleanrl.buffer.notes import noted
from gleanrl.buffer.rlinf import Directory
from gleanrl.buffer.schema import INSTRUCTION, LEFT, Field, Schema
from gleanrl.buffer.stack import Stack
from gleanrl.buffer.store import Store
from gleanrl.buffer.trajectory import Path, Rows
from gleanrl.utils.errors import UserError

OPEN = 1024  # files mapped at once: a mapping costs address space and a few kB, opening one a millisecond


class Numbers:
    """Texts by number, for any number of threads."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._number: dict[str, int] = {}
        self._lock = threading.Lock()

    def of(self, texts: Sequence[str]) -> list[int]:
        with self._lock:
            for text in texts:
                if text not in self._number:
                    self._number[text] = len(self.texts)
                    self.texts.append(text)
            return [self._number[text] for text in texts]


class Opened:
    """A trajectory whose tensors are mapped from its file."""

    def __init__(self, rows: Rows, name: str, numbers: Numbers) -> None:
        self.rows, self.name = rows, name
        told = numbers.of(rows.instructions)
        self._instructions = torch.tensor(told or [-1] * rows.count, dtype=torch.int32)
        self._made: dict[Field, Tensor] = {}

    def column(self, field: Field) -> Tensor:
        """``[T * B, ...]``. Raises `UserError` where it is not as ``field``."""
        if (known := self._made.get(field)) is None:
            known = self._made[field] = self._make(field)
        return known

    def _make(self, field: Field) -> Tensor:
        if field.path == INSTRUCTION:
            return self._instructions
        column = self.rows.steps_left() if field.path == LEFT else self.rows.columns.get(field.path)
        if column is None or Field.of(field.path, column) != field:
            there_is = "no such field" if column is None else str(Field.of(field.path, column))
            raise UserError(f"{self.name}: {there_is}, where others have {field}")
        return column


class MappedRows:
    """The rows of a directory's trajectories, one behind the other, as a table.

    Args:
        directory: where the files are.
        ends: int64 ``[n]``, rows up to the end of each trajectory.
        open_files: how many are mapped at once; what was used longest ago is closed first.
    """

    number = 0

    def __init__(self, directory: Directory, ends: Tensor, open_files: int) -> None:
        self._directory, self._ends, self._limit = directory, ends, open_files
        self.rows = int(ends[-1]) if len(ends) else 0
        self._open: OrderedDict[int, Opened] = OrderedDict()
        self._lock = threading.Lock()
        self._schema: Schema | None = None
        self.instructions = Numbers()

    @property
    def schema(self) -> Schema:
        """The fields that all trajectories share, as the first has them.

        Files of the same length and shape are taken to be alike, so that a directory is not read through before its
        first sample; one that is not is met by `read`, which says so.
        """
        if self._schema is None:
            shared: dict[Path, Field] | None = None
            for index in self._directory.representatives():
                try:
                    columns = self.opened(index).rows.columns
                except UserError:
                    continue  # who reads it is told
                own = {path: Field.of(path, column) for path, column in columns.items()}
                shared = own if shared is None else {path: shared[path] for path in shared if path in own}
            self._schema = Schema(tuple(sorted((shared or {}).values(), key=lambda field: field.path)))
        return self._schema

    def opened(self, index: int) -> Opened:
        """A trajectory by its place in the index. Raises `UserError` where its file cannot be read."""
        with self._lock:
            if index in self._open:
                self._open.move_to_end(index)
                return self._open[index]
            rows, name = self._directory.trajectory(index), self._directory.name(index)
            first = int(self._ends[index - 1]) if index else 0
            if rows.count != int(self._ends[index]) - first:
                raise UserError(f"{name}: {rows.count} rows; the index says {int(self._ends[index]) - first}")
            self._open[index] = Opened(rows, name, self.instructions)
            while len(self._open) > self._limit:
                self._open.popitem(last=False)
            return self._open[index]

    def read(self, rows: Tensor, paths: Collection[Path]) -> dict[Path, Tensor]:
        own = {field.path: field for field in self.schema.fields}
        own |= {path: Field(path, torch.int32, ()) for path in (LEFT, INSTRUCTION)}
        indices = torch.bucketize(rows.contiguous(), self._ends, right=True)
        order = torch.argsort(indices, stable=True)
        there, counts = (column.tolist() for column in torch.unique_consecutive(indices[order], return_counts=True))
        sorted_rows = rows[order].split(counts)
        found = {path: torch.empty(len(rows), *own[path].shape, dtype=own[path].dtype) for path in paths}
        places = [found[path].split(counts) for path in paths]
        for index, wanted, *into in zip(there, sorted_rows, *places, strict=True):
            opened = self.opened(index)
            local = wanted - (int(self._ends[index]) - opened.rows.count)
            for path, place in zip(paths, into, strict=True):
                torch.index_select(opened.column(own[path]), 0, local, out=place)
        back = torch.argsort(order)
        return {path: torch.index_select(column, 0, back) for path, column in found.items()}

    def close(self) -> None:
        with self._lock:
            self._open.clear()


class Loaded:
    """A directory as its index was at one moment; see `readable.Snapshot`.

    Args:
        before: what was loaded before; its ``epoch`` goes on where the directory has only grown.
    """

    def __init__(self, directory: Directory, open_files: int, before: Loaded | None = None) -> None:
        self.directory = directory
        grown = before is not None and directory.continues(before.directory)
        self.epoch = 0 if before is None else before.epoch + (not grown)
        counts = np.array(directory.counts(), np.int64)
        ends = np.cumsum(counts)
        self.table = MappedRows(directory, torch.from_numpy(ends), open_files)
        self.tables = (self.table,)
        self._records = np.zeros(len(counts), RECORD)
        self._records["id"], self._records["row"] = np.arange(len(counts)), ends - counts
        self._records["steps"], self._records["batch"] = directory.shapes()
        # what only the files know counts as possible
        self._records["flags"] = INTERVENED
        self._records["version_low"], self._records["version_high"] = -np.inf, np.inf
        self._index = Index()
        self._index.append(self._records, np.arange(len(counts)))
        self._surveyed: np.ndarray[Any, Any] | None = None

    @property
    def first_id(self) -> int:
        return 0

    @property
    def next_id(self) -> int:
        return len(self._records)

    def rows(self, table: int) -> tuple[int, int]:
        return 0, self.table.rows

    def records(self, since: int = 0) -> np.ndarray[Any, Any]:
        return self._records[since:]

    def records_of(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self._records[ids]

    def survey(self) -> np.ndarray[Any, Any]:
        """The records with what only the files know: episodes, versions, rewards. Each file is opened once.

        Of a file that cannot be read nothing is known.
        """
        if self._surveyed is None:
            surveyed = self._records.copy()
            surveyed["flags"], surveyed["version_low"], surveyed["version_high"] = 0, -1, -1
            for number in range(self.next_id):
                with suppress(UserError):
                    stack = Stack.of([self.table.opened(number).rows])
                    for name, value in noted(stack).items():
                        surveyed[name][number : number + 1] = value
            self._surveyed = surveyed
        return self._surveyed

    def index(self, table: int) -> Index:
        return self._index

    def count_rows(self) -> int:
        return self.table.rows

    @property
    def instructed(self) -> bool | None:
        return True if self.table.instructions.texts else None

    def instruction(self, number: int) -> str:
        return self.table.instructions.texts[number]

    def trajectory(self, number: int) -> Rows:
        """Raises `UserError` where there is no such trajectory, or its file cannot be read."""
        if not 0 <= number < self.next_id:
            there = f"the directory has 0 to {self.next_id - 1}" if self.next_id else "there is none"
            raise UserError(f"no trajectory {number}: {there}")
        return self.table.opened(number).rows


class InPlace:
    """RLinf's directory, to read. Trajectories are numbered from 0 in the order of its index.

    Args:
        folder: the directory.
        open_files: how many of its files are mapped at once.
        pickles: read ``.pkl`` files too: `Directory`.
    """

    def __init__(self, folder: FilePath, *, open_files: int = OPEN, pickles: bool = False) -> None:
        if open_files < 1:
            raise UserError(f"cache_size = {open_files}: at least one file is open at a time")
        self.folder, self._pickles, self._open_files = folder, pickles, open_files
        self._closed, self._loading, self._still = False, threading.Lock(), 0
        self.snapshot = Loaded(Directory(folder, pickles=pickles), open_files)  # a sample keeps the one it began with

    def refresh(self) -> bool:
        """Take notice of what RLinf added since; while it writes its index, what was there before counts."""
        with self._loading:
            if self._still or not self.snapshot.directory.changed():
                return False
            try:
                directory = Directory(self.folder, pickles=self._pickles)
                self.snapshot = Loaded(directory, self._open_files, self.snapshot)
            except UserError:
                return False
            return True

    @contextmanager
    def held(self) -> Iterator[Loaded]:
        if self._closed:
            raise RuntimeError("the buffer is closed")
        yield self.snapshot

    @contextmanager
    def still(self) -> Iterator[None]:
        """Nothing is taken notice of meanwhile."""
        with self._loading:
            self._still += 1
        try:
            yield
        finally:
            with self._loading:
                self._still -= 1

    def close(self) -> None:
        self._closed = True
        self.snapshot.table.close()

    # --- what is there -----------------------------------------------------------------------------
    @property
    def first_id(self) -> int:
        return 0

    @property
    def next_id(self) -> int:
        return self.snapshot.next_id

    @property
    def tables(self) -> tuple[MappedRows, ...]:
        return self.snapshot.tables

    @property
    def nbytes(self) -> int:
        """Of its files."""
        return self.snapshot.directory.nbytes

    def survey(self) -> np.ndarray[Any, Any]:
        return self.snapshot.survey()

    def count_rows(self) -> int:
        return self.snapshot.count_rows()

    def trajectory(self, number: int) -> Rows:
        return self.snapshot.trajectory(number)

    def whole(self) -> Iterator[Rows]:
        """All of them. Raises `UserError` at the first that is not as it was written."""
        for found in self.salvaged():
            if isinstance(found, UserError):
                raise found
            yield found

    def damage(self) -> Iterator[str]:
        """A line for each trajectory that cannot be read, or is not as it was written."""
        return (str(found) for found in self.salvaged() if isinstance(found, UserError))

    def salvaged(self) -> Iterator[Rows | UserError]:
        """Each trajectory that is as it was written, and why each other one is not."""
        now = self.snapshot
        for number in range(now.next_id):
            try:
                rows = now.trajectory(number)
                now.directory.check(number)
                yield rows
            except UserError as error:
                yield UserError(f"trajectory {number}: {error}")

    def lost(self) -> list[str]:
        """Files that the index names and that are not there."""
        directory = self.snapshot.directory
        return [f"{directory.name(i)}: missing" for i in directory.missing()]

    def share(self, folder: FilePath) -> None:
        """Write a checkpoint of ours; here every row is copied."""
        now = self.snapshot
        with closing(Store(folder)) as store:
            for number in range(now.next_id):
                store.add([now.trajectory(number)])
            manifest = replace(store.manifest, end=store.next_id)
        (folder / Manifest.NAME).write_text(manifest.text())

    # --- what it is not for ------------------------------------------------------------------------
    def add(self, trajectories: Any) -> NoReturn:
        self._refuse()

    def drop(self, before: int) -> NoReturn:
        self._refuse()

    def adopt(self, folder: FilePath, also: Any = None) -> NoReturn:
        self._refuse()

    def afresh(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UserError(f"{self.folder}: RLinf's directory is read in place; load it into a buffer to write")
