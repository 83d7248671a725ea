"""The rows of one schema: their columns, the final observations, and how a row is put together again."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.columns import Columns, Field, octets
from gleanrl.buffer.files import Files, crc32
from gleanrl.buffer.schema import INSTRUCTION, LEFT, NEXT, Schema, current, followed, segment_rows, words
from gleanrl.buffer.trajectory import FieldPath, TrajectoryBlock
from gleanrl.utils.errors import UserError

SEGMENT_NBYTES = 128 << 20


class Description(msgspec.Struct, forbid_unknown_fields=True):
    """Content of a table's schema file."""

    fields: list[tuple[tuple[str, ...], str, tuple[int, ...]]]
    capacity: tuple[int, int]


class Table:
    """Rows of one schema, numbered from 0 and never renumbered.

    Args:
        files: where its segments are.
        number: of the schema; part of the files' names.
        schema: of its rows.
        capacity: rows of a segment of the columns, and of one of the final observations.
    """

    def __init__(self, files: Files, number: int, schema: Schema, capacity: tuple[int, int]) -> None:
        self.number, self.schema, self.capacity = number, schema, capacity
        record = Field(("#record",), torch.uint8, (schema.record_nbytes,))
        self.columns = Columns(files, f"rows-{number:03d}-{{:06d}}", [record, *schema.large], capacity[0])
        self.final_columns = Columns(files, f"last-{number:03d}-{{:06d}}", schema.deduplicated, capacity[1])
        self._large = {field.path: 1 + i for i, field in enumerate(schema.large)}
        self._deduplicated = {field.path: i for i, field in enumerate(schema.deduplicated)}
        self._sort = lru_cache(maxsize=64)(self._sort_paths)
        self.rows = self.finals = 0  # that count; the next trajectory is written there
        self._next = (0, 0)  # the same, after what is written but does not count yet

    @classmethod
    def create(cls, files: Files, number: int, schema: Schema, segment_nbytes: int) -> Table:
        """Make an empty table and write its schema file. Raises `OSError`."""
        rows = segment_rows(segment_nbytes, [schema.record_nbytes, *(field.nbytes for field in schema.large)])
        finals = 1
        if schema.deduplicated:
            finals = segment_rows(segment_nbytes // 8, [field.nbytes for field in schema.deduplicated])
        table = cls(files, number, schema, (rows, finals))
        description = Description(fields=schema.to_json(), capacity=table.capacity)
        files.write_text(table.schema_file, msgspec.json.encode(description).decode())
        return table

    @classmethod
    def open(cls, files: Files, number: int) -> Table:
        """Open a table by its schema file.

        Raises:
            FileNotFoundError: it is missing.
            UserError: it is damaged.
        """
        name = schema_file(number)
        try:
            found = msgspec.json.decode(files.read_text(name), type=Description)
            return cls(files, number, Schema.from_json(found.fields), found.capacity)
        except (msgspec.DecodeError, ValueError, TypeError, ArithmeticError) as error:
            raise UserError(f"{files.where(name)}: damaged ({error})") from None

    @property
    def schema_file(self) -> str:
        return schema_file(self.number)

    # --- writing ---------------------------------------------------------------------------------
    def write(self, block: TrajectoryBlock, instructions: Tensor, touched: set[int]) -> dict[str, Any]:
        """Write trajectories after the last one. They count only after `publish`.

        Args:
            instructions: int32 ``[n * T * B]``, numbers of the task descriptions.
            touched: the descriptors to sync are added to it.

        Returns:
            Fields of `log.RECORD`.
        """
        (row, final), n = self._next, len(block.members)
        packed = {**block.columns, LEFT: block.steps_left(), INSTRUCTION: instructions}
        finals, counts = list[Tensor](), np.zeros(n, np.int64)
        if self._deduplicated:
            last = ~followed(block.columns, block.shape, self.schema.deduplicated).reshape(-1)
            counts = last.reshape(n, -1).sum(dim=1).numpy()
            next_rows = row + block.members[0].batch + torch.arange(block.count)
            next_rows[last] = -1 - (final + torch.arange(int(counts.sum())))
            packed[NEXT] = next_rows
            finals = [block.columns[path][last].contiguous() for path in self._deduplicated]
        columns = [self.schema.pack(packed, block.count), *(block.columns[path] for path in self._large)]
        touched |= self.columns.write(row, columns)
        if counts.any():
            touched |= self.final_columns.write(final, finals)
        rows = np.full(n, block.rows_each)
        self._next = (row + block.count, final + int(counts.sum()))
        return {
            "row": row + block.rows_each * np.arange(n),
            "final": final + np.cumsum(counts) - counts,
            "finals": counts,
            "data_crc": _checksums([*((own, rows) for own in columns), *((own, counts) for own in finals)], n),
            "schema": self.number,
        }

    def rollback(self) -> None:
        """Forget what was written but does not count; the next call writes at its place."""
        self._next = (self.rows, self.finals)

    def needed_nbytes(self, rows: int, finals: int, *, new_segment: bool = False) -> int:
        """Return the disk space that more rows would take; ``new_segment``: if they started one."""
        row, final = self.segment_end() if new_segment else self._next
        more = self.columns.nbytes(row + rows) - self.columns.nbytes(row)
        return more + self.final_columns.nbytes(final + finals) - self.final_columns.nbytes(final)

    def starts_segment(self, count: int) -> bool:
        """Return whether writing so many rows would create a segment."""
        row, capacity = self._next[0], self.capacity[0]
        return (row + count - 1) // capacity > (row - 1) // capacity

    def end_after(self, count: int) -> tuple[int, int]:
        """Return an upper bound of rows and final observations after ``count`` more rows."""
        return self._next[0] + count, self._next[1] + (count if self._deduplicated else 0)

    def segment_end(self) -> tuple[int, int]:
        """Return the first row and final observation that share no segment with those that count."""
        rows, finals = self.capacity
        return -(-self.rows // rows) * rows, -(-self.finals // finals) * finals

    def boundary(self, row: int) -> int:
        """Return the first row of the segment after the one that holds ``row``."""
        return (row // self.capacity[0] + 1) * self.capacity[0]

    # --- reading ---------------------------------------------------------------------------------
    def read(self, rows: Tensor, paths: Collection[FieldPath]) -> dict[FieldPath, Tensor]:
        """Return fields ``[n, ...]`` of rows (int64 ``[n]``) as new tensors. Raises `UserError` where they are lost."""
        small, large, deduplicated = self._sort(tuple(paths))
        found: dict[FieldPath, Tensor] = {}
        if small:
            [record] = self.columns.gather(rows, [0])
            found = self.schema.unpack(record, small)
        if large:
            found |= zip(large, self.columns.gather(rows, [self._large[path] for path in large]), strict=True)
        if deduplicated:
            found |= self._read_next(rows, found.pop(NEXT), deduplicated)
        return found

    def _sort_paths(self, paths: tuple[FieldPath, ...]) -> tuple[list[FieldPath], list[FieldPath], list[FieldPath]]:
        """Split fields into packed ones, those with a column, and deduplicated ones."""
        deduplicated = [path for path in paths if path in self._deduplicated]
        small = [path for path in (*paths, *([NEXT] if deduplicated else [])) if path in self.schema.packed]
        return small, [path for path in paths if path in self._large], deduplicated

    def _read_next(self, rows: Tensor, next_rows: Tensor, paths: list[FieldPath]) -> dict[FieldPath, Tensor]:
        last = next_rows < 0
        at = torch.where(last, rows, next_rows)
        out = self.columns.gather(at, [self._large[current(path)] for path in paths])
        [places] = torch.where(last)
        if len(places):
            kept = self.final_columns.gather(-1 - next_rows[places], [self._deduplicated[path] for path in paths])
            for column, values in zip(out, kept, strict=True):
                words(column).index_copy_(0, places, words(values))
        return dict(zip(paths, out, strict=True))

    def stored_checksum(self, row: int, count: int, final: int, finals: int) -> int:
        """Return the checksum of a trajectory's bytes on disk."""
        parts = [self.columns.slice(i, row, count) for i in range(1 + len(self._large))]
        parts += [self.final_columns.slice(i, final, finals) for i in range(len(self._deduplicated))]
        found = 0
        for column in parts:
            for piece in column:
                found = crc32(octets(piece), found)
        return found

    # --- what counts -----------------------------------------------------------------------------
    def publish(self, rows: int, finals: int, *, skip_unreadable: bool = False) -> None:
        """Let all rows below these numbers count and map their segments, see `Columns.map_until`."""
        self.columns.map_until(rows, skip_unreadable=skip_unreadable)
        if finals:
            self.final_columns.map_until(finals, skip_unreadable=skip_unreadable)
        self.rows, self.finals = self._next = max(self.rows, rows), max(self.finals, finals)

    def drop(self, row: int, final: int, number: int, *, remove: bool) -> bool:
        """Drop the segments with only older rows, see `Columns.drop`."""
        self.rows, self.finals = self._next = max(self.rows, row), max(self.finals, final)
        dropped = self.columns.drop(row, number, remove=remove)
        return self.final_columns.drop(final, number, remove=remove) or dropped

    def release(self, number: int) -> bool:
        """See `Columns.release`."""
        left = self.columns.release(number)
        return self.final_columns.release(number) or left

    def fits(self, rows: int, finals: int) -> bool:
        """See `Columns.fits`."""
        return self.columns.fits(rows) and self.final_columns.fits(finals)

    def grow(self, rows: int, finals: int) -> None:
        """Get more address space where it is needed, see `Columns.grow`."""
        for columns, count in ((self.columns, rows), (self.final_columns, finals)):
            if not columns.fits(count):
                columns.grow(count)

    def lost(self) -> list[str]:
        """Return for each segment that cannot be read its file and why."""
        return [*self.columns.lost.values(), *self.final_columns.lost.values()]

    def files(self) -> list[str]:
        """Return the names of its segments."""
        return [name for columns in (self.columns, self.final_columns) for name, _ in columns.segments()]

    def unfinished_files(self) -> set[str]:
        """Return the names of the segments that more rows will be written to."""
        both = ((self.columns, self.rows), (self.final_columns, self.finals))
        return {name for columns, end in both for name, first in columns.segments() if first + columns.capacity > end}

    @property
    def nbytes(self) -> int:
        """Disk space of its segments."""
        return self.columns.nbytes(self.rows) + self.final_columns.nbytes(self.finals)

    def close(self) -> None:
        self.columns.close()
        self.final_columns.close()


def schema_file(number: int) -> str:
    return f"schema-{number:03d}.json"


def _checksums(columns: Iterable[tuple[Tensor, np.ndarray[Any, Any]]], count: int) -> list[int]:
    """Return the checksum of each of ``count`` trajectories, given columns and each trajectory's rows in them."""
    found = [0] * count
    for column, counts in columns:
        data, width, begin = octets(column), column[:1].nbytes, 0
        for i, rows in enumerate(counts.tolist()):
            end = begin + rows * width
            found[i] = crc32(data[begin:end], found[i])
            begin = end
    return found
