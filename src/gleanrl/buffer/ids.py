"""Ids of trajectories, as they come."""

from __future__ import annotations

from typing import Any

import numpy as np


class Ids:
    """Rising ids, appended in constant time on average."""

    def __init__(self) -> None:
        self._all, self._count = np.zeros(1024, np.int64), 0

    def append(self, ids: np.ndarray[Any, Any]) -> None:
        count = self._count + len(ids)
        if count > len(self._all):
            self._all = np.concatenate([self._all[: self._count], np.zeros(max(count, self._count), np.int64)])
        self._all[self._count : count] = ids
        self._count = count

    def since(self, first: int) -> np.ndarray[Any, Any]:
        known = self._all[: self._count]
        return known[np.searchsorted(known, first) :]
