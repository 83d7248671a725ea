"""What of a store counts at one moment: a sample is drawn from one of these, whatever happens meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gleanrl.buffer.index import Index
from gleanrl.buffer.log import Log
from gleanrl.buffer.manifest import Manifest
from gleanrl.buffer.table import Table
from gleanrl.buffer.texts import Texts


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """See `readable.Snapshot`. What it is made of only grows behind ``next_id`` and ``ends``.

    ``ends``: of each table, the row behind that of the last trajectory below ``next_id``.
    """

    manifest: Manifest
    next_id: int
    tables: tuple[Table, ...]
    indexes: tuple[Index, ...]
    ends: tuple[int, ...]
    log: Log
    texts: Texts

    @property
    def epoch(self) -> int:
        return self.manifest.epoch

    @property
    def first_id(self) -> int:
        return self.manifest.first

    def rows(self, table: int) -> tuple[int, int]:
        return self.manifest.kept(table)[0], self.ends[table]

    def records(self, since: int = 0) -> np.ndarray[Any, Any]:
        base = self.manifest.base
        return self.log.records[max(since, self.first_id) - base : self.next_id - base]

    def records_of(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self.log.records[ids - self.manifest.base]

    def survey(self) -> np.ndarray[Any, Any]:
        return self.records()

    def index(self, table: int) -> Index:
        return self.indexes[table]

    def count_rows(self) -> int:
        return sum(end - self.manifest.kept(table)[0] for table, end in enumerate(self.ends))

    @property
    def instructed(self) -> bool:
        return self.texts.instructed

    def instruction(self, number: int) -> str:
        return self.texts.instruction(number)
