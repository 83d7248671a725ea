"""What samples are drawn from: our own store, or somebody else's files read in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from gleanrl.buffer.index import Index
from gleanrl.buffer.schema import Schema
from gleanrl.buffer.trajectory import Path


class Rowed(Protocol):
    """Rows of one schema, numbered from 0."""

    @property
    def number(self) -> int: ...

    @property
    def schema(self) -> Schema: ...

    def read(self, rows: Tensor, paths: Collection[Path]) -> dict[Path, Tensor]:
        """Fields ``[n, ...]`` of rows (int64 ``[n]``), in new tensors. Raises `UserError` where they are lost."""
        ...


class Snapshot(Protocol):
    """What counts at one moment: trajectories by id, as rows of tables."""

    @property
    def epoch(self) -> int:
        """Another number: nothing that was known of rows and ids counts any more."""
        ...

    @property
    def tables(self) -> Sequence[Rowed]: ...

    @property
    def first_id(self) -> int: ...

    @property
    def next_id(self) -> int: ...

    def rows(self, table: int) -> tuple[int, int]:
        """The first row of a table that is kept, and the one behind the last."""
        ...

    def records(self, since: int = 0) -> np.ndarray[Any, Any]:
        """As `log.RECORD`, of all trajectories that are kept, from ``since`` on; a view."""
        ...

    def records_of(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Of these trajectories; a copy."""
        ...

    def survey(self) -> np.ndarray[Any, Any]:
        """The records with all that is known of the trajectories."""
        ...

    def index(self, table: int) -> Index:
        """Where the trajectories of a table begin, also some that were dropped or came later."""
        ...

    def count_rows(self) -> int: ...

    @property
    def instructed(self) -> bool | None:
        """Whether any trajectory has an instruction; None: the files that were read had none."""
        ...

    def instruction(self, number: int) -> str: ...


class Readable(Protocol):
    """What has a state, which others change."""

    @property
    def snapshot(self) -> Snapshot:
        """The newest; numbers may be taken from it, rows and records only while `held` lasts."""
        ...

    def refresh(self) -> bool:
        """Take notice of what another process wrote; whether it did."""
        ...

    def held(self) -> AbstractContextManager[Snapshot]:
        """The newest state; what is dropped meanwhile can still be read."""
        ...
