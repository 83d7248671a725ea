"""Where trajectories begin: all of a table, or those that may meet some conditions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gleanrl.buffer.drawing import Ranges


class Index:
    """Of trajectories with rising ids: id, first row, rows before it. Appended in constant time, on average."""

    def __init__(self) -> None:
        self._all, self._count, self._rows = np.zeros((3, 1024), np.int64), 0, 0

    def append(self, records: np.ndarray[Any, Any], where: np.ndarray[Any, Any]) -> None:
        """Of `log.RECORD`s, those at ``where``."""
        count = self._count + len(where)
        if count > self._all.shape[1]:
            grown = np.zeros((3, max(count, 2 * self._count)), np.int64)
            grown[:, : self._count] = self._all[:, : self._count]
            self._all = grown
        rows = records["steps"][where].astype(np.int64) * records["batch"][where]
        ends = self._rows + np.cumsum(rows)
        self._all[:, self._count : count] = records["id"][where], records["row"][where], ends - rows
        self._count, self._rows = count, int(ends[-1]) if len(ends) else self._rows

    def ids(self, since: int) -> np.ndarray[Any, Any]:
        """From ``since`` on."""
        return self._all[0, self._from(since) : self._count]

    def first_row(self, since: int) -> int | None:
        """Of the first trajectory from ``since`` on; None where there is none."""
        at = self._from(since)
        return int(self._all[1, at]) if at < self._count else None

    def holding(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Ids of the trajectories that hold these rows, which are there."""
        return self._all[0, np.searchsorted(self._all[1, : self._count], rows, side="right") - 1]

    def ranges(self, table: int, since: int) -> Ranges | None:
        """The rows of all from ``since`` on; None where there are none."""
        at = self._from(since)
        if at == self._count:
            return None
        starts, begins = torch.from_numpy(self._all[1:, at : self._count])
        before = int(begins[0])
        return Ranges(table, before, self._rows - before, starts, begins)

    def _from(self, since: int) -> int:
        return int(np.searchsorted(self._all[0, : self._count], since))
