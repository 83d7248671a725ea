"""Tables: the rows of all trajectories that have the same schema (the same fields with the same dtypes and shapes).

This module defines how a row is stored (`Schema`), how rows are written and read (`Table`), and which rows belong to
which trajectory (`Index`).

The fields of a row that have up to `PACKED_NBYTES` are packed into one record, because a gather of one record is faster
than a gather for each field. Every larger field has a column of its own. A large field of ``next_obs`` usually equals
the current observation of the next step in the same environment, which is B rows later. In this case it is not stored a
second time, and the record contains the number of that row instead. At the ends of episodes and trajectories the two
differ. There the next observation is stored in a second set of columns, the *final observations*.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.columns import PAGE, Columns, Field, as_array, octets
from gleanrl.buffer.files import CheckedJson, Files, crc32
from gleanrl.buffer.trajectory import FieldPath, TrajectoryBlock, steps_left
from gleanrl.utils.errors import UserError

SEGMENT_NBYTES = 128 << 20
PACKED_NBYTES = 1024  # a field with more bytes in each row has its own column
# Fields that the buffer adds to each record. In NEXT, an int64, a number r >= 0 means that the next observation equals
# the current observation of row r, and -1 - f means that it is final observation f.
NEXT = ("#next",)
LEFT = ("#left",)  # int32: number of chunk steps up to the end of the episode or rollout epoch, counting this one
INSTRUCTION = ("#instruction",)  # int64: number of the row's task description (see `log.Texts`); -1: none
SCHEMA_FILE = "schema-{:03d}.json"


class Schema:
    """The fields of a row, and where each field is stored. Schemas with equal fields have the same layout.

    Args:
        fields: the fields, sorted by path.

    Attributes:
        deduplicated: large fields of ``next_obs``, which are usually read from the column of the current observation.
        large: all other large fields, each of which has its own column.
        packed: path of a small field -> the field and its byte offset in the record. The widest dtypes come first, so
            that every field is aligned.
        record_nbytes: bytes of a record, a multiple of 16.
        row_nbytes: bytes of a row in all columns, without its final observation.
    """

    def __init__(self, fields: Iterable[Field]) -> None:
        self.fields = fields = tuple(fields)
        self._hash = hash(fields)
        self.paths = tuple(field.path for field in fields)
        by_path = {field.path: field for field in fields}
        small = [Field(LEFT, torch.int32, ()), Field(INSTRUCTION, torch.int64, ())]
        large, deduplicated = list[Field](), list[Field]()
        for field in fields:
            here = current(field.path)
            if field.nbytes <= PACKED_NBYTES:
                small.append(field)
            elif field.path[0] == "next_obs" and by_path.get(here) == Field(here, field.dtype, field.shape):
                deduplicated.append(field)
            else:
                large.append(field)
        if deduplicated:
            small.insert(2, Field(NEXT, torch.int64, ()))
        self.large, self.deduplicated = tuple(large), tuple(deduplicated)

        self.packed: dict[FieldPath, tuple[Field, int]] = {}
        offset = 0
        for field in sorted(small, key=lambda field: -field.dtype.itemsize):
            self.packed[field.path] = (field, offset)
            offset += field.nbytes
        self.record_nbytes = -(-offset // 16) * 16
        self.row_nbytes = self.record_nbytes + sum(field.nbytes for field in large)

        # a record as a NumPy dtype, whose elements are the bytes of a field each, and are named by the field's number
        places = {str(i): own for i, own in enumerate(self.packed.values()) if own[0].nbytes}
        self._record = np.dtype(
            {
                "names": list(places),
                "formats": [f"V{field.nbytes}" for field, _ in places.values()],
                "offsets": [offset for _, offset in places.values()],
                "itemsize": self.record_nbytes,
            }
        )
        self._parts = [(name, field.path, self._record[name]) for name, (field, _) in places.items()]
        # path of a packed field -> field, dtype of its elements in NumPy, index of the first one, and of that behind it
        self._elements: dict[FieldPath, tuple[Field, np.dtype[Any], int, int]] = {}
        for path, (field, offset) in self.packed.items():
            size, elements = field.dtype.itemsize, as_array(torch.empty(0, dtype=field.dtype)).dtype
            self._elements[path] = field, elements, offset // size, (offset + field.nbytes) // size

    def capacity(self, segment_nbytes: int) -> tuple[int, int]:
        """Return the capacity of a `Table` whose segments have about ``segment_nbytes``."""
        rows = segment_rows(segment_nbytes, [self.record_nbytes, *(field.nbytes for field in self.large)])
        if not self.deduplicated:
            return rows, 1
        return rows, segment_rows(segment_nbytes // 8, [field.nbytes for field in self.deduplicated])

    @staticmethod
    def of(columns: Mapping[FieldPath, Tensor]) -> Schema:
        """Return the schema of a trajectory's columns ``[n, ...]``."""
        return _schema(tuple([(path, column.dtype, column.shape[1:]) for path, column in sorted(columns.items())]))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Schema) and self.fields == other.fields)

    def __hash__(self) -> int:
        return self._hash

    def pack(self, columns: Mapping[FieldPath, Tensor], added: Mapping[FieldPath, Any], count: int) -> memoryview:
        """Pack the small fields of ``count`` rows into records, and return the bytes of these.

        Args:
            columns: the fields of the trajectories, contiguous tensors ``[count, ...]``.
            added: the fields that the buffer adds, contiguous arrays ``[count]``.
            count: number of rows.
        """
        records = np.zeros(count, self._record)
        for name, path, part in self._parts:
            column = added[path] if path in added else as_array(columns[path])
            records[name] = column.reshape(-1).view(part)
        return octets(records)

    def unpack(self, records: np.ndarray[Any, Any], paths: Iterable[FieldPath]) -> dict[FieldPath, Tensor]:
        """Return the fields ``paths`` of n records, each an element of ``records``, as new tensors ``[n, ...]``."""
        # NumPy and not torch, because its calls take less time, and most records are small
        found, views, count = {}, dict[np.dtype[Any], np.ndarray[Any, Any]](), len(records)
        for path in paths:
            field, elements, first, end = self._elements[path]
            if elements not in views:
                views[elements] = records.view(elements).reshape(count, self.record_nbytes // elements.itemsize)
            column = torch.from_numpy(views[elements][:, first:end].copy())
            if column.dtype is not field.dtype:
                column = column.view(field.dtype)
            found[path] = column if len(field.shape) == 1 else column.view(count, *field.shape)
        return found


@lru_cache(maxsize=256)
def _schema(fields: tuple[tuple[FieldPath, torch.dtype, tuple[int, ...]], ...]) -> Schema:
    return Schema(Field(path, dtype, tuple(shape)) for path, dtype, shape in fields)


def segment_rows(target_nbytes: int, widths: Iterable[int]) -> int:
    """Return the number of rows for a segment of about ``target_nbytes`` in which each column fills whole pages.

    ``widths``: for each column, the bytes of a row.
    """
    widths = list(widths)
    whole = math.lcm(*(PAGE // math.gcd(width, PAGE) for width in widths))
    return max(whole, target_nbytes // sum(widths) // whole * whole)


def current(path: FieldPath) -> FieldPath:
    """Return the path of the field of ``curr_obs`` that corresponds to a field of ``next_obs``."""
    return ("curr_obs", *path[1:])


def followed(columns: Mapping[FieldPath, Tensor], shape: tuple[int, int, int], deduplicated: Iterable[Field]) -> Tensor:
    """Return bool ``[n, T, B]``: whether each step's next observation equals the next step's current observation.

    The fields ``deduplicated`` are compared bit for bit. The result is False for the last step, T - 1.

    Args:
        columns: the columns ``[n * T * B, ...]`` of n trajectories.
        shape: n, T and B.
        deduplicated: fields of ``next_obs`` (see `Schema`).
    """
    found = torch.ones(shape, dtype=torch.bool)
    found[:, -1] = False
    for field in deduplicated:
        ours, theirs = (words(columns[path]).reshape(*shape, -1) for path in (field.path, current(field.path)))
        found[:, :-1] &= ~(ours[:, :-1] != theirs[:, 1:]).any(dim=3)
    return found


def words(column: Tensor) -> Tensor:
    """View a contiguous column as integers ``[n, m]`` of the widest possible dtype, which torch copies fastest."""
    flat = column.reshape(column.shape[0], -1).view(torch.uint8)
    width = math.gcd(flat.shape[1], 8)
    return flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])


@dataclass(frozen=True, slots=True)
class RowRanges:
    """``total`` rows of one table: the rows from ``first`` on, or the rows of some trajectories of an `Index`.

    In the first case ``starts`` and ``begins`` are None. In the second case they are int64 with an entry for each
    trajectory: ``starts`` is its first row, and ``begins`` the number of rows of all trajectories before it in the
    index. ``first`` then equals ``begins[0]``.
    """

    table: int
    first: int
    total: int
    starts: Tensor | None = None
    begins: Tensor | None = None

    def at(self, positions: Tensor) -> Tensor:
        """Translate positions (int64, from 0 to ``total`` - 1) to rows of the table."""
        found = positions + self.first if self.first else positions
        if self.starts is None or self.begins is None:
            return found
        run = torch.bucketize(found, self.begins, right=True) - 1
        return found - self.begins[run] + self.starts[run]


class Index:
    """The ids and first rows of some trajectories of a table, sorted by id. An append takes amortised constant time."""

    def __init__(self) -> None:
        # [3, capacity]: for each trajectory its id, its first row, and the number of rows of all trajectories before it
        self._all, self._count, self._rows = np.zeros((3, 1024), np.int64), 0, 0

    def append(self, records: np.ndarray[Any, Any], where: np.ndarray[Any, Any]) -> None:
        """Append the trajectories whose log records are ``records[where]``."""
        records, count = records[where], self._count + len(where)
        if count > self._all.shape[1]:
            grown = np.zeros((3, max(count, 2 * self._count)), np.int64)
            grown[:, : self._count] = self._all[:, : self._count]
            self._all = grown
        rows = np.multiply(records["steps"], records["batch"], dtype=np.int64)
        ends = self._rows + np.cumsum(rows)
        self._all[0, self._count : count] = records["id"]
        self._all[1, self._count : count] = records["row"]
        self._all[2, self._count : count] = ends - rows
        self._count, self._rows = count, int(ends[-1]) if len(ends) else self._rows

    def forget(self, first: int) -> None:
        """Free the memory of the trajectories with ids below ``first``, if these are more than half."""
        gone = int(np.searchsorted(self._all[0, : self._count], first))
        if gone > self._count // 2:
            # a copy, because `RowRanges` refer to the old array
            self._all, self._count = self._all[:, gone : self._count].copy(), self._count - gone

    @property
    def end(self) -> int:
        """The row after the last row of the newest trajectory; 0 if there is no trajectory."""
        if not self._count:
            return 0
        row, before = self._all[1:, self._count - 1].tolist()
        return row + self._rows - before

    def find(self, since: int) -> tuple[int, int] | None:
        """Return id and first row of the oldest trajectory with an id of at least ``since``; None if there is none."""
        at = int(np.searchsorted(self._all[0, : self._count], since))
        if at == self._count:
            return None
        number, row = self._all[:2, at].tolist()
        return number, row

    def holding(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return for each of ``rows`` the id of the trajectory to which it belongs."""
        return self._all[0, np.searchsorted(self._all[1, : self._count], rows, side="right") - 1]

    def ranges(self, table: int, since: int, end: int) -> RowRanges | None:
        """Return the rows of the trajectories with ids from ``since`` to ``end`` - 1; None if there are none."""
        at, to = np.searchsorted(self._all[0, : self._count], (since, end)).tolist()
        if at == to:
            return None
        starts, begins = torch.from_numpy(self._all[1:, at:to])
        before, behind = int(begins[0]), self._rows if to == self._count else int(self._all[2, to])
        return RowRanges(table, before, behind - before, starts, begins)


class RowSource(Protocol):
    """Interface for reading a table: rows of one schema, numbered from 0."""

    number: int
    index: Index

    @property
    def schema(self) -> Schema: ...

    def read(self, rows: Tensor, paths: Collection[FieldPath]) -> dict[FieldPath, Tensor]:
        """Return the fields ``paths`` of the rows (int64 ``[n]``) as new tensors ``[n, ...]``.

        Raises `UserError` if the file of a row is missing or too short.
        """
        ...


class Description(CheckedJson, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of a table's schema file."""

    fields: list[tuple[tuple[str, ...], str, tuple[int, ...]]]  # path, name of the dtype and shape of each field
    capacity: tuple[int, int]  # see `Table`


class Table:
    """The rows of all trajectories of one schema. Rows are numbered from 0 and keep their numbers.

    Args:
        files: the folder of the table's segments, or memory.
        number: number of the table, which is part of its file names.
        schema: the schema of the rows.
        capacity: number of rows in a segment of the columns, and in a segment of the final observations.
    """

    def __init__(self, files: Files, number: int, schema: Schema, capacity: tuple[int, int]) -> None:
        self.number, self.schema, self.capacity = number, schema, capacity
        self.schema_file = SCHEMA_FILE.format(number)
        self.index = Index()
        record = Field(("#record",), torch.uint8, (schema.record_nbytes,))
        self.columns = Columns(files, f"rows-{number:03d}-{{:06d}}", [record, *schema.large], capacity[0])
        self.final_columns = Columns(files, f"last-{number:03d}-{{:06d}}", schema.deduplicated, capacity[1])
        self.parts = (self.columns, self.final_columns)
        self._large = {field.path: 1 + i for i, field in enumerate(schema.large)}
        self._deduplicated = {field.path: i for i, field in enumerate(schema.deduplicated)}

    @classmethod
    def create(cls, files: Files, number: int, schema: Schema, capacity: tuple[int, int]) -> Table:
        """Create an empty table and write its schema file. Raises `OSError` if the file cannot be written."""
        table = cls(files, number, schema, capacity)
        fields = [(own.path, str(own.dtype).removeprefix("torch."), own.shape) for own in schema.fields]
        description = Description(fields=fields, capacity=table.capacity)
        files.write_text(table.schema_file, description.encode().decode())
        return table

    @classmethod
    def open(cls, files: Files, number: int) -> Table:
        """Open the table with this number by its schema file.

        Raises:
            FileNotFoundError: the schema file is missing.
            UserError: the schema file is damaged.
        """
        name = SCHEMA_FILE.format(number)
        try:
            found = Description.decode(files.read_text(name))
            fields = []
            for path, type_name, shape in found.fields:
                dtype = getattr(torch, type_name, None)
                if not isinstance(dtype, torch.dtype):
                    raise UserError(f"{files.where(name)}: names {type_name!r}, which is no type of tensor here")
                fields.append(Field(path, dtype, shape))
            return cls(files, number, Schema(tuple(fields)), found.capacity)
        except (msgspec.DecodeError, ValueError, TypeError, ArithmeticError) as error:
            raise UserError(f"{files.where(name)}: damaged ({error})") from None

    def write(self, block: TrajectoryBlock, instructions: np.ndarray[Any, Any], touched: set[int]) -> dict[str, Any]:
        """Append the rows of trajectories to ``columns`` and ``final_columns``.

        The rows can be read after `Columns.publish` was called for both.

        Args:
            block: the trajectories.
            instructions: int64 ``[n, T * B]``, for each row the number of its task description, or -1.
            touched: set to which the descriptors of the written files are added, because the caller must sync them.

        Returns:
            The fields of `log.RECORD` that state where the trajectories are stored, and the checksums of their rows.
        """
        row, final, n = self.columns.end, self.final_columns.end, len(block.members)
        added = {LEFT: steps_left(block.cuts), INSTRUCTION: instructions}
        finals, counts = list[memoryview](), np.zeros(n, np.int64)
        if self._deduplicated:
            last = ~followed(block.columns, block.shape, self.schema.deduplicated).reshape(-1)
            counts = last.reshape(n, -1).sum(dim=1).numpy()
            next_rows = row + block.batch + torch.arange(block.count)
            next_rows[last] = -1 - (final + torch.arange(int(counts.sum())))
            added[NEXT] = next_rows.numpy()
            finals = [octets(block.columns[path][last].contiguous()) for path in self._deduplicated]
        columns = [self.schema.pack(block.columns, added, block.count)]
        columns += [octets(block.columns[path]) for path in self._large]
        touched |= self.columns.write(columns, block.count)
        checksums, parts = [0] * n, [(columns, [block.rows_each] * n)]
        if count := int(counts.sum()):
            touched |= self.final_columns.write(finals, count)
            parts.append((finals, counts.tolist()))
        for columns, sizes in parts:
            for column in columns:
                width, begin = len(column) // sum(sizes), 0
                for i, size in enumerate(sizes):
                    end = begin + size * width
                    checksums[i] = crc32(column[begin:end], checksums[i])
                    begin = end
        return {
            "row": row + block.rows_each * np.arange(n),
            "final": final + np.cumsum(counts) - counts,
            "finals": counts,
            "data_crc": checksums,
            "schema": self.number,
        }

    def read(self, rows: Tensor, paths: Collection[FieldPath]) -> dict[FieldPath, Tensor]:
        """Return the fields ``paths`` of the rows (int64 ``[n]``) as new tensors ``[n, ...]``.

        Raises `UserError` if the file of a row is missing or too short.
        """
        deduplicated = [path for path in paths if path in self._deduplicated]
        small = [path for path in (*paths, *([NEXT] if deduplicated else [])) if path in self.schema.packed]
        large = [path for path in paths if path in self._large]
        found: dict[FieldPath, Tensor] = {}
        if small:
            found = self.schema.unpack(self.columns.gather_bytes(rows, 0), small)
        if large:
            found |= zip(large, self.columns.gather(rows, [self._large[path] for path in large]), strict=True)
        if deduplicated:
            next_rows = found.pop(NEXT)
            last = next_rows < 0
            at = torch.where(last, rows, next_rows)
            columns = self.columns.gather(at, [self._large[current(path)] for path in deduplicated])
            [places] = torch.where(last)
            if len(places):
                which = [self._deduplicated[path] for path in deduplicated]
                kept = self.final_columns.gather(-1 - next_rows[places], which)
                for column, values in zip(columns, kept, strict=True):
                    words(column).index_copy_(0, places, words(values))
            found |= zip(deduplicated, columns, strict=True)
        return found

    def stored_checksum(self, row: int, count: int, final: int, finals: int) -> int:
        """Return the checksum of a trajectory's rows as they are on disk now.

        If the rows are undamaged, it equals the ``data_crc`` that `write` has returned.

        Args:
            row, count: first row of the trajectory, and number of its rows.
            final, finals: its first final observation, and number of its final observations.
        """
        pieces = list[Tensor]()
        for i in range(1 + len(self._large)):
            pieces += self.columns.slice(i, row, count)
        for i in range(len(self._deduplicated)):
            pieces += self.final_columns.slice(i, final, finals)
        found = 0
        for piece in pieces:
            found = crc32(octets(piece), found)
        return found

    @property
    def nbytes(self) -> int:
        """Disk space that the table's segments occupy, in bytes."""
        return sum(part.nbytes(part.rows) for part in self.parts)

    def kept_files(self) -> dict[str, list[tuple[int, int]]]:
        """Return the files of the kept segments (see `Columns.kept_files`)."""
        return self.columns.kept_files() | self.final_columns.kept_files()

    def close(self) -> None:
        for part in self.parts:
            part.close()
