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

    @property
    def end(self) -> int:
        """The row behind the last trajectory's last."""
        if not self._count:
            return 0
        row, before = self._all[1:, self._count - 1].tolist()
        return row + self._rows - before

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

    def ranges(self, table: int, since: int, end: int) -> Ranges | None:
        """The rows of all from ``since`` up to ``end``; None where there are none."""
        at, to = self._from(since), self._from(end)
        if at == to:
            return None
        starts, begins = torch.from_numpy(self._all[1:, at:to])
        before, behind = int(begins[0]), self._rows if to == self._count else int(self._all[2, to])
        return Ranges(table, before, behind - before, starts, begins)

    def _from(self, since: int) -> int:
        return int(np.searchsorted(self._all[0, : self._count], since))
