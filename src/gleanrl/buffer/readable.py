"""What samples are drawn from: our own store, or somebody else's files read in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from gleanrl.buffer.index import Index
from gleanrl.buffer.manifest import Manifest
from gleanrl.buffer.schema import Schema
from gleanrl.buffer.trajectory import Path


class Rowed(Protocol):
    """Rows of one schema, numbered from 0."""

    @property
    def number(self) -> int: ...

    @property
    def schema(self) -> Schema: ...

    @property
    def rows(self) -> int:
        """How many there are; the next one's number."""
        ...

    def read(self, rows: Tensor, paths: Collection[Path]) -> dict[Path, Tensor]:
        """Fields ``[n, ...]`` of rows (int64 ``[n]``), in new tensors. Raises `UserError` where they are lost."""
        ...


class Readable(Protocol):
    """Trajectories by id, as rows of tables."""

    @property
    def tables(self) -> Sequence[Rowed]: ...

    @property
    def manifest(self) -> Manifest:
        """What is kept of the tables."""
        ...

    @property
    def first_id(self) -> int: ...

    @property
    def next_id(self) -> int: ...

    def refresh(self) -> bool:
        """Take notice of what another process wrote; whether it did."""
        ...

    def held(self) -> AbstractContextManager[None]:
        """What is dropped meanwhile can still be read."""
        ...

    def records(self, since: int = 0) -> np.ndarray[Any, Any]:
        """As `log.RECORD`, of all trajectories that are kept, from ``since`` on; a view."""
        ...

    def records_of(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Of these trajectories, which are kept or were when `held` began; a copy."""
        ...

    def index(self, table: int) -> Index:
        """Where the trajectories of a table begin, also some that were dropped."""
        ...

    def count_rows(self) -> int: ...

    @property
    def instructed(self) -> bool:
        """Whether any trajectory may have an instruction."""
        ...

    def instruction(self, number: int) -> str: ...
