"""The layout of a row on disk.

Fields of up to `PACKED_NBYTES` are packed into one record, since one gather is faster than ten. A larger field has a
column of its own. A large field of ``next_obs`` usually equals the current observation of the following step (the row
B further on), so it is not stored again: the record holds the number of that row. Where the two differ, at the ends of
episodes and trajectories, the observation is stored in a second set of columns, the *final observations*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gleanrl.buffer.columns import PAGE, Field
from gleanrl.buffer.trajectory import FieldPath, FlatTrajectory
from gleanrl.utils.errors import UserError

PACKED_NBYTES = 1024  # a larger field has a column of its own
# fields that the buffer adds to each record
NEXT = ("#next",)  # int64: row of the next observation among the current ones, or -1 - its row among the final ones
LEFT = ("#left",)  # int32: see `FlatTrajectory.steps_left`
INSTRUCTION = ("#instruction",)  # int32: number of the task description, -1 = none


@dataclass(frozen=True)
class Schema:
    """The fields of a row in a fixed order. Equal schemas have equal layouts."""

    fields: tuple[Field, ...]

    @cached_property
    def _hash(self) -> int:
        return hash(self.fields)

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, trajectory: FlatTrajectory) -> Schema:
        found = [Field.of(path, column) for path, column in trajectory.columns.items()]
        return cls(tuple(sorted(found, key=lambda field: field.path)))

    @classmethod
    def from_json(cls, fields: Iterable[tuple[tuple[str, ...], str, tuple[int, ...]]]) -> Schema:
        """Build a schema from `to_json`. Raises `UserError` where a type is unknown."""
        return cls(tuple(Field(tuple(path), _dtype(dtype), tuple(shape)) for path, dtype, shape in fields))

    def to_json(self) -> list[Any]:
        return [[field.path, str(field.dtype).removeprefix("torch."), field.shape] for field in self.fields]

    @cached_property
    def paths(self) -> tuple[FieldPath, ...]:
        return tuple(field.path for field in self.fields)

    @cached_property
    def deduplicated(self) -> tuple[Field, ...]:
        """Large fields of ``next_obs`` that are looked up among the current observations."""
        by_path = {field.path: field for field in self.fields}
        return tuple(
            field
            for field in self.fields
            if field.path[0] == "next_obs"
            and field.nbytes > PACKED_NBYTES
            and by_path.get(current(field.path)) == Field(current(field.path), field.dtype, field.shape)
        )

    @cached_property
    def large(self) -> tuple[Field, ...]:
        """Fields with a column of their own."""
        elsewhere = set(self.deduplicated)
        return tuple(field for field in self.fields if field.nbytes > PACKED_NBYTES and field not in elsewhere)

    @cached_property
    def packed(self) -> Mapping[FieldPath, tuple[Field, int]]:
        """Small fields and their offset in the record; the widest types come first, so that each is aligned."""
        small = [Field(LEFT, torch.int32, ()), Field(INSTRUCTION, torch.int32, ())]
        if self.deduplicated:
            small.append(Field(NEXT, torch.int64, ()))
        small += [field for field in self.fields if field.nbytes <= PACKED_NBYTES]
        placed, offset = {}, 0
        for field in sorted(small, key=lambda field: -field.dtype.itemsize):
            placed[field.path] = (field, offset)
            offset += field.nbytes
        return placed

    @cached_property
    def record_nbytes(self) -> int:
        """Bytes of a record, a multiple of 16."""
        return -(-sum(field.nbytes for field, _ in self.packed.values()) // 16) * 16

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes of a row in all columns."""
        return self.record_nbytes + sum(field.nbytes for field in self.large)

    def pack(self, columns: Mapping[FieldPath, Tensor], count: int) -> Tensor:
        """Return the records uint8 ``[count, record_nbytes]`` of small columns."""
        record = torch.zeros(count, self.record_nbytes, dtype=torch.uint8)
        for path, (field, offset) in self.packed.items():
            if field.nbytes:
                column = columns[path].reshape(count, -1).view(torch.uint8)
                record[:, offset : offset + field.nbytes] = column
        return record

    def unpack(self, record: Tensor, paths: Iterable[FieldPath]) -> dict[FieldPath, Tensor]:
        """Return columns ``[n, ...]`` of records, contiguous."""
        found, views, count = {}, dict[torch.dtype, Tensor](), record.shape[0]
        for path in paths:
            dtype, shape, strides, at = self._strided[path]
            if dtype not in views:
                views[dtype] = record.view(dtype)
            found[path] = torch.as_strided_copy(views[dtype], (count, *shape), strides, at)
        return found

    @cached_property
    def _strided(self) -> Mapping[FieldPath, tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]]:
        """Type, shape, strides and offset of each packed field, for `torch.as_strided_copy`."""
        found = {}
        for path, (field, offset) in self.packed.items():
            inside = [math.prod(field.shape[i + 1 :]) for i in range(len(field.shape))]
            strides = (self.record_nbytes // field.dtype.itemsize, *inside)
            found[path] = field.dtype, field.shape, strides, offset // field.dtype.itemsize
        return found


def segment_rows(target_nbytes: int, widths: Iterable[int]) -> int:
    """Return the rows of a segment of about ``target_nbytes`` in which each column fills whole pages.

    ``widths``: bytes of a row in each column.
    """
    widths = list(widths)
    whole = math.lcm(*(PAGE // math.gcd(width, PAGE) for width in widths))
    return max(whole, target_nbytes // sum(widths) // whole * whole)


def current(path: FieldPath) -> FieldPath:
    """Return the path of the current observation for one of ``next_obs``."""
    return ("curr_obs", *path[1:])


def followed(columns: Mapping[FieldPath, Tensor], shape: tuple[int, int, int], deduplicated: Iterable[Field]) -> Tensor:
    """Return bool ``[n, T, B]``: the next observation equals, bit for bit, the current one of the next step.

    ``shape``: n, T, B.
    """
    found = torch.ones(shape, dtype=torch.bool)
    found[:, -1] = False
    for field in deduplicated:
        ours, theirs = (words(columns[path]).reshape(*shape, -1) for path in (field.path, current(field.path)))
        found[:, :-1] &= ~(ours[:, :-1] != theirs[:, 1:]).any(dim=3)
    return found


def words(column: Tensor) -> Tensor:
    """View a contiguous column's bytes as ``[n, m]`` integers as wide as possible: torch copies them faster."""
    flat = column.reshape(column.shape[0], -1).view(torch.uint8)
    width = math.gcd(flat.shape[1], 8)
    return flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise UserError(f"the buffer's schema names {name!r}, which is no type of tensor here")
    return found
