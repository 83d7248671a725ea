"""Which rows may be sampled: those of the newest trajectories, and of them those that meet conditions."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gleanrl.buffer.drawing import Ranges
from gleanrl.buffer.index import Index
from gleanrl.buffer.log import FAILURE, INTERVENED, SUCCESS
from gleanrl.buffer.readable import Readable

BLOCK = 1 << 16  # records looked at at once
KEPT = 8  # conditions of which the trajectories are known


@dataclass(frozen=True, slots=True, kw_only=True)
class Only:
    """Conditions on what is sampled; None asks for nothing.

    success: of trajectories whose ``success`` was said when they were added.
    intervened: chunk steps in which a human acted (True), or none did (False).
    versions: lowest and highest weights version of a chunk step, both included.
    """

    success: bool | None = None
    intervened: bool | None = None
    versions: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.versions is not None:
            object.__setattr__(self, "versions", tuple(self.versions))

    def possible(self, records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """bool: trajectories that may hold a row which meets the conditions."""
        found = np.ones(len(records), bool)
        if self.success is not None:
            found &= (records["flags"] & (SUCCESS if self.success else FAILURE)) > 0
        if self.intervened:
            found &= (records["flags"] & INTERVENED) > 0
        if self.versions is not None:
            low, high = self.versions
            found &= (records["version_high"] >= low) & (records["version_low"] <= high)
        return found


class Windows:
    """Which rows a window holds. What was found is kept, and only what was added since is looked at."""

    def __init__(self, store: Readable) -> None:
        self._store = store
        self._found: dict[Only, tuple[list[Index], int]] = {}  # of each table; and the id up to which was looked
        self._epoch = -1
        self._last: tuple[Hashable, list[Ranges]] = ((), [])
        self._lock = threading.Lock()

    def ranges(self, window: int, only: Only | None) -> list[Ranges]:
        """Of the newest ``window`` trajectories (0 = all), without those that cannot meet the conditions."""
        store = self._store
        end = store.next_id
        since = max(store.first_id, end - window) if window else store.first_id
        key = (store.manifest.epoch, since, end, only)
        known, found = self._last
        if key != known:
            found = self._all(since) if only is None else self._meeting(only, since)
            self._last = key, found
        return found

    def _all(self, since: int) -> list[Ranges]:
        firsts = ((table, self._store.index(table.number).first_row(since)) for table in self._store.tables)
        return [Ranges(table.number, first, table.rows - first) for table, first in firsts if first is not None]

    def _meeting(self, only: Only, since: int) -> list[Ranges]:
        with self._lock:
            if self._epoch != self._store.manifest.epoch:
                self._found.clear()
                self._epoch = self._store.manifest.epoch
            tables, seen = self._found.pop(only, ([], self._store.first_id))
            self._found[only] = tables, self._look(only, tables, seen)
            if len(self._found) > KEPT:
                del self._found[next(iter(self._found))]
            found = [index.ranges(number, since) for number, index in enumerate(tables)]
        return [own for own in found if own is not None]

    def _look(self, only: Only, tables: list[Index], seen: int) -> int:
        fresh = self._store.records(seen)
        for begin in range(0, len(fresh), BLOCK):
            block = fresh[begin : begin + BLOCK]
            possible, schemas = only.possible(block), block["schema"]
            while len(tables) <= int(schemas.max()):
                tables.append(Index())
            for number in np.unique(schemas[possible]):
                tables[number].append(block, np.flatnonzero(possible & (schemas == number)))
        return int(fresh["id"][-1]) + 1 if len(fresh) else seen
