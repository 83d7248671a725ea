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
from gleanrl.buffer.readable import Snapshot

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

    def __init__(self) -> None:
        self._found: dict[Only, tuple[list[Index], int]] = {}  # of each table; and the id up to which was looked
        self._epoch = -1
        self._last: tuple[Hashable, list[Ranges]] = ((), [])
        self._lock = threading.Lock()

    def ranges(self, now: Snapshot, window: int, only: Only | None) -> list[Ranges]:
        """Of the newest ``window`` trajectories (0 = all), without those that cannot meet the conditions."""
        end = now.next_id
        since = max(now.first_id, end - window) if window else now.first_id
        key = (now.epoch, since, end, only)
        known, found = self._last
        if key != known:
            found = _all(now, since) if only is None else self._meeting(now, only, since)
            self._last = key, found
        return found

    def _meeting(self, now: Snapshot, only: Only, since: int) -> list[Ranges]:
        with self._lock:
            if self._epoch != now.epoch:
                self._found.clear()
                self._epoch = now.epoch
            tables, seen = self._found.pop(only, ([], now.first_id))
            self._found[only] = tables, _look(now, only, tables, seen)
            if len(self._found) > KEPT:
                del self._found[next(iter(self._found))]
            found = [index.ranges(number, since, now.next_id) for number, index in enumerate(tables)]
        return [own for own in found if own is not None]


def _all(now: Snapshot, since: int) -> list[Ranges]:
    found = []
    for table in now.tables:
        first, end = now.index(table.number).first_row(since), now.rows(table.number)[1]
        if first is not None and first < end:
            found.append(Ranges(table.number, first, end - first))
    return found


def _look(now: Snapshot, only: Only, tables: list[Index], seen: int) -> int:
    """Look at what was added since; up to which id that is."""
    fresh = now.records(seen)
    for begin in range(0, len(fresh), BLOCK):
        block = fresh[begin : begin + BLOCK]
        possible, schemas = only.possible(block), block["schema"]
        while len(tables) <= int(schemas.max()):
            tables.append(Index())
        for number in np.unique(schemas[possible]):
            tables[number].append(block, np.flatnonzero(possible & (schemas == number)))
    return int(fresh["id"][-1]) + 1 if len(fresh) else seen
