"""RLinf's directories sampled where they lie: rows are taken from its memory-mapped files, and nothing is converted.

One table holds the rows of all trajectories in the order of RLinf's index, so the same seed and window draw the same
rows as RLinf does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator
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
from gleanrl.errors import UserError

OPEN = 1024  # files mapped at once: a mapping costs address space and a few kB, opening one a millisecond


class Opened:
    """A trajectory whose tensors are mapped from its file."""

    def __init__(self, rows: Rows, name: str) -> None:
        self.rows, self.name = rows, name
        self._made: dict[Path, Tensor] = {}

    def column(self, path: Path, numbers: dict[str, int]) -> Tensor | None:
        """``[T * B, ...]``; None where the trajectory has no such field. ``numbers``: of the known instructions."""
        if path == INSTRUCTION:
            return self._instructions(numbers)
        if path == LEFT and LEFT not in self._made:
            self._made[LEFT] = self.rows.steps_left()
        return self._made[LEFT] if path == LEFT else self.rows.columns.get(path)

    def _instructions(self, numbers: dict[str, int]) -> Tensor:
        if INSTRUCTION not in self._made:
            told = [numbers.setdefault(text, len(numbers)) for text in self.rows.instructions]
            self._made[INSTRUCTION] = torch.tensor(told or [-1] * self.rows.count, dtype=torch.int32)
        return self._made[INSTRUCTION]


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
        self.instructions: dict[str, int] = {}  # text -> number

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
            self._open[index] = Opened(rows, name)
            while len(self._open) > self._limit:
                self._open.popitem(last=False)
            return self._open[index]

    def read(self, rows: Tensor, paths: Collection[Path]) -> dict[Path, Tensor]:
        own = {field.path: field for field in self.schema.fields}
        own |= {path: Field(path, torch.int32, ()) for path in (LEFT, INSTRUCTION)}
        found = {path: torch.empty(len(rows), *own[path].shape, dtype=own[path].dtype) for path in paths}
        indices = torch.bucketize(rows.contiguous(), self._ends, right=True)
        order = torch.argsort(indices, stable=True)
        there, counts = torch.unique_consecutive(indices[order], return_counts=True)
        for index, places in zip(there.tolist(), torch.split(order, counts.tolist()), strict=True):
            opened = self.opened(index)
            local = rows[places] - (self._ends[index] - opened.rows.count)
            for path in paths:
                column = opened.column(path, self.instructions)
                if column is None or Field.of(path, column) != own[path]:
                    there_is = "no such field" if column is None else str(Field.of(path, column))
                    raise UserError(f"{opened.name}: {there_is}, where others have {own[path]}")
                found[path][places] = column[local]
        return found

    def close(self) -> None:
        with self._lock:
            self._open.clear()


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
        self.manifest = Manifest()
        self._load()

    def _load(self) -> None:
        self._directory = Directory(self.folder, pickles=self._pickles)
        counts = np.array(self._directory.counts(), np.int64)
        ends = np.cumsum(counts)
        self.tables = [MappedRows(self._directory, torch.from_numpy(ends), self._open_files)]
        self._records = np.zeros(len(counts), RECORD)
        self._records["id"], self._records["row"] = np.arange(len(counts)), ends - counts
        self._records["steps"], self._records["batch"] = self._directory.shapes()
        # what only the files know counts as possible
        self._records["flags"] = INTERVENED
        self._records["version_low"], self._records["version_high"] = -np.inf, np.inf
        self._index = Index()
        self._index.append(self._records, np.arange(len(counts)))
        self._surveyed: np.ndarray[Any, Any] | None = None
        self.manifest = replace(self.manifest, epoch=self.manifest.epoch + 1)  # nothing that was known counts any more

    # --- what is there -----------------------------------------------------------------------------
    @property
    def first_id(self) -> int:
        return 0

    @property
    def next_id(self) -> int:
        return len(self._records)

    @property
    def nbytes(self) -> int:
        """Of its files."""
        return self._directory.nbytes

    def refresh(self) -> bool:
        """Take notice of what RLinf added since; while it writes its index, what was there before counts."""
        if not self._directory.changed():
            return False
        try:
            self._load()
        except UserError:
            return False
        return True

    def records(self, since: int = 0) -> np.ndarray[Any, Any]:
        return self._records[since:]

    def records_of(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self._records[ids]

    def record(self, number: int) -> np.void:
        """Raises `UserError` where there is no such trajectory."""
        if not 0 <= number < len(self._records):
            there = f"the directory has 0 to {len(self._records) - 1}" if len(self._records) else "there is none"
            raise UserError(f"no trajectory {number}: {there}")
        return self._records[number]

    def survey(self) -> np.ndarray[Any, Any]:
        """The records with what only the files know: episodes, versions, rewards. Each file is opened once.

        Of a file that cannot be read nothing is known.
        """
        if self._surveyed is None:
            self._surveyed = self._records.copy()
            self._surveyed["flags"], self._surveyed["version_low"], self._surveyed["version_high"] = 0, -1, -1
            for number in range(self.next_id):
                with suppress(UserError):
                    stack = Stack.of([self.tables[0].opened(number).rows])
                    for name, value in noted(stack).items():
                        self._surveyed[name][number : number + 1] = value
        return self._surveyed

    def index(self, table: int) -> Index:
        return self._index

    def ids(self, table: int) -> np.ndarray[Any, Any]:
        return self._records["id"]

    def count_rows(self) -> int:
        return self.tables[0].rows

    @property
    def instructed(self) -> bool:
        return True

    def instruction(self, number: int) -> str:
        return list(self.tables[0].instructions)[number]

    def trajectory(self, number: int) -> Rows:
        self.record(number)
        return self.tables[0].opened(number).rows

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
        for number in range(self.next_id):
            try:
                rows = self.trajectory(number)
                self._directory.check(number)
                yield rows
            except UserError as error:
                yield UserError(f"trajectory {number}: {error}")

    def lost(self) -> list[str]:
        """Files that the index names and that are not there."""
        return [f"{self._directory.name(i)}: missing" for i in self._directory.missing()]

    def share(self, folder: FilePath) -> None:
        """Write a checkpoint of ours; here every row is copied."""
        with closing(Store(folder)) as store:
            for number in range(self.next_id):
                store.add([self.trajectory(number)])
            manifest = replace(store.manifest, end=store.next_id)
        (folder / Manifest.NAME).write_text(manifest.text())

    @contextmanager
    def held(self) -> Iterator[None]:
        yield

    @contextmanager
    def still(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        self.tables[0].close()

    # --- what it is not for ------------------------------------------------------------------------
    def add(self, trajectories: Any) -> NoReturn:
        self._refuse()

    def drop(self, before: int) -> NoReturn:
        self._refuse()

    def adopt(self, folder: FilePath) -> NoReturn:
        self._refuse()

    def afresh(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UserError(f"{self.folder}: RLinf's directory is read in place; load it into a buffer to write")
