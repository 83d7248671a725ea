"""What a row is: small fields packed side by side into one record, large ones in a column each.

Small fields together cost one gather instead of ten. Of observations the next one is usually the current one of the
row B further on, so it is stored once; where it is not (at the ends of episodes and trajectories) it lies in a column
of its own, and the record says where.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gleanrl.buffer.space import PAGE
from gleanrl.buffer.trajectory import Path, Rows
from gleanrl.utils.errors import UserError

PACKED = 1024  # bytes; a larger field has a column of its own
NEXT = ("#next",)  # int64: row of the next observation among the current ones, or -1 - its row among the final ones
LEFT = ("#left",)  # int32: steps up to the end of the episode or the rollout epoch, this one included
INSTRUCTION = ("#instruction",)  # int32: number of its text, -1 = none
INTERNAL = frozenset({NEXT, LEFT, INSTRUCTION})


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a row."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @classmethod
    def of(cls, path: Path, column: Tensor) -> Field:
        return cls(path, column.dtype, tuple(column.shape[1:]))

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Schema:
    """The fields of a row, in a fixed order. Equal schemas have equal files."""

    fields: tuple[Field, ...]

    @cached_property
    def _hash(self) -> int:
        return hash(self.fields)

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, rows: Rows) -> Schema:
        found = [Field.of(path, column) for path, column in rows.columns.items()]
        return cls(tuple(sorted(found, key=lambda field: field.path)))

    @classmethod
    def parse(cls, text: str) -> Schema:
        return cls(tuple(Field(tuple(path), _dtype(dtype), tuple(shape)) for path, dtype, shape in json.loads(text)))

    def json(self) -> str:
        told = [[list(field.path), str(field.dtype).removeprefix("torch."), list(field.shape)] for field in self.fields]
        return json.dumps(told)

    @cached_property
    def stored_once(self) -> tuple[Field, ...]:
        """Large fields of ``next_obs`` which are found among the current observations."""
        by_path = {field.path: field for field in self.fields}
        return tuple(
            field
            for field in self.fields
            if field.path[0] == "next_obs"
            and field.nbytes > PACKED
            and by_path.get(current(field.path)) == Field(current(field.path), field.dtype, field.shape)
        )

    @cached_property
    def large(self) -> tuple[Field, ...]:
        """Fields with a column of their own."""
        once = set(self.stored_once)
        return tuple(field for field in self.fields if field.nbytes > PACKED and field not in once)

    @cached_property
    def packed(self) -> Mapping[Path, tuple[Field, int]]:
        """Small fields and their offset in the record; the widest first, so that each is aligned."""
        own = [Field(LEFT, torch.int32, ()), Field(INSTRUCTION, torch.int32, ())]
        own += [Field(NEXT, torch.int64, ())] if self.stored_once else []
        small = [*own, *(field for field in self.fields if field.nbytes <= PACKED)]
        placed, offset = {}, 0
        for field in sorted(small, key=lambda field: -field.dtype.itemsize):
            placed[field.path] = (field, offset)
            offset += field.nbytes
        return placed

    @cached_property
    def record_nbytes(self) -> int:
        """Of the packed fields of a row, up to a multiple of 16."""
        return -(-sum(field.nbytes for field, _ in self.packed.values()) // 16) * 16

    @cached_property
    def row_nbytes(self) -> int:
        return self.record_nbytes + sum(field.nbytes for field in self.large)

    def rows_in(self, target_nbytes: int, widths: Iterable[int]) -> int:
        """Rows of a segment of about ``target_nbytes``, such that each column fills whole pages."""
        widths = list(widths)
        whole = math.lcm(*(PAGE // math.gcd(width, PAGE) for width in widths))
        return max(whole, target_nbytes // sum(widths) // whole * whole)

    def pack(self, columns: Mapping[Path, Tensor], count: int) -> Tensor:
        """uint8 ``[count, record_nbytes]`` of the small fields."""
        record = torch.zeros(count, self.record_nbytes, dtype=torch.uint8)
        for path, (field, offset) in self.packed.items():
            if field.nbytes:
                column = columns[path].reshape(count, -1).view(torch.uint8)
                record[:, offset : offset + field.nbytes] = column
        return record

    def unpack(self, record: Tensor, paths: Iterable[Path]) -> dict[Path, Tensor]:
        """Columns ``[n, ...]`` of records, contiguous."""
        found, words, count = {}, dict[torch.dtype, Tensor](), record.shape[0]
        for path in paths:
            dtype, shape, strides, at = self._placed[path]
            if dtype not in words:
                words[dtype] = record.view(dtype)
            found[path] = torch.as_strided_copy(words[dtype], (count, *shape), strides, at)
        return found

    @cached_property
    def _placed(self) -> Mapping[Path, tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]]:
        """Of packed fields: type, shape, strides from row to row and inside, and offset, counted in values."""
        found = {}
        for path, (field, offset) in self.packed.items():
            inside = [math.prod(field.shape[i + 1 :]) for i in range(len(field.shape))]
            strides = (self.record_nbytes // field.dtype.itemsize, *inside)
            found[path] = field.dtype, field.shape, strides, offset // field.dtype.itemsize
        return found

    def differs(self, other: Schema) -> str:
        """How this schema differs from another one, for a message."""
        mine, theirs = ({field.path: field for field in schema.fields} for schema in (self, other))
        for path in sorted(mine.keys() | theirs.keys()):
            if mine.get(path) != theirs.get(path):
                return f"{theirs.get(path) or 'no ' + '.'.join(path)} against {mine.get(path) or 'none'}"
        return "nothing"


def current(path: Path) -> Path:
    """Where the current observation's field of the same name is."""
    return ("curr_obs", *path[1:])


def following(columns: Mapping[Path, Tensor], shape: tuple[int, int, int], once: Iterable[Field]) -> Tensor:
    """bool ``[n, T, B]``, the ``shape``: the next observation is, bit for bit, the current one of the next step."""
    found = torch.ones(shape, dtype=torch.bool)
    found[:, -1] = False
    for field in once:
        ours, theirs = (words(columns[path]).reshape(*shape, -1) for path in (field.path, current(field.path)))
        found[:, :-1] &= ~(ours[:, :-1] != theirs[:, 1:]).any(dim=3)
    return found


def words(column: Tensor) -> Tensor:
    """``[n, m]`` integers of a contiguous column's bits, as wide as a row allows: torch copies value by value."""
    flat = column.reshape(column.shape[0], -1).view(torch.uint8)
    width = math.gcd(flat.shape[1], 8)
    return flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise UserError(f"the buffer's schema names {name!r}, which is no type of tensor here")
    return found
