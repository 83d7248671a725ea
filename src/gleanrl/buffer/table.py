"""Rows of one schema: their columns, the final observations beside them, and how a row is put together again."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.checksums import crc32
from gleanrl.buffer.columns import Columns
from gleanrl.buffer.files import Files
from gleanrl.buffer.schema import INSTRUCTION, INTERNAL, LEFT, NEXT, Field, Schema, current, following, words
from gleanrl.buffer.space import octets
from gleanrl.buffer.stack import Stack
from gleanrl.buffer.trajectory import Path

SEGMENT_NBYTES = 128 << 20


class Table:
    """Rows of one schema, numbered from 0 for ever.

    Args:
        files: where its segments are.
        number: of the schema, part of the files' names.
        schema: of its rows.
        capacity: rows of a segment, and final observations of one of theirs.
    """

    def __init__(self, files: Files, number: int, schema: Schema, capacity: tuple[int, int]) -> None:
        self.number, self.schema, self.capacity = number, schema, capacity
        record = Field(("#record",), torch.uint8, (schema.record_nbytes,))
        self.columns = Columns(files, f"rows-{number:03d}-{{:06d}}", [record, *schema.large], capacity[0])
        self._finals = Columns(files, f"last-{number:03d}-{{:06d}}", schema.stored_once, capacity[1])
        self._large = {field.path: 1 + i for i, field in enumerate(schema.large)}
        self._once = {field.path: i for i, field in enumerate(schema.stored_once)}
        self._split = lru_cache(maxsize=64)(self._sorted)
        self.rows = 0  # that count: the next trajectory's first
        self.finals = 0
        self._next = (0, 0)  # row and final observation behind what is written but does not count yet

    @classmethod
    def new(cls, files: Files, number: int, schema: Schema, segment_nbytes: int) -> Table:
        """A table without rows, and its description on disk."""
        widths = [schema.record_nbytes, *(field.nbytes for field in schema.large)]
        once = [field.nbytes for field in schema.stored_once]
        rows = schema.rows_in(segment_nbytes, widths)
        finals = schema.rows_in(segment_nbytes // 8, once) if once else 1
        return cls(files, number, schema, (rows, finals))

    def describe(self) -> str:
        return json.dumps({"fields": json.loads(self.schema.json()), "capacity": list(self.capacity)})

    @classmethod
    def described(cls, files: Files, number: int, text: str) -> Table:
        told = json.loads(text)
        return cls(files, number, Schema.parse(json.dumps(told["fields"])), tuple(told["capacity"]))

    # --- writing -----------------------------------------------------------------------------------
    def needs(self, rows: int, finals: int, *, alone: bool = False) -> int:
        """Bytes of the disk that so many more would take; ``alone``: if they began a segment."""
        row, final = self.end() if alone else self._next
        more = self.columns.nbytes(row + rows) - self.columns.nbytes(row)
        return more + self._finals.nbytes(final + finals) - self._finals.nbytes(final)

    def begins(self, count: int) -> bool:
        """Whether so many rows would begin a segment."""
        row, capacity = self._next[0], self.capacity[0]
        return (row + count - 1) // capacity > (row - 1) // capacity

    def write(self, stack: Stack, instructions: Tensor, touched: set[int]) -> dict[str, Any]:
        """Put trajectories behind the last one; ``touched`` gets the files to sync. They count once `show` says so.

        Where each is, as fields of `log.RECORD`.
        """
        (row, final), n = self._next, len(stack.members)
        packed = {**stack.columns, LEFT: stack.steps_left(), INSTRUCTION: instructions}
        finals, counts = list[Tensor](), np.zeros(n, np.int64)
        if self._once:
            last = ~following(stack.columns, stack.shape, self.schema.stored_once).reshape(-1)
            counts = last.reshape(n, -1).sum(dim=1).numpy()
            numbers = row + stack.members[0].batch + torch.arange(stack.count)
            numbers[last] = -1 - (final + torch.arange(int(counts.sum())))
            packed[NEXT] = numbers
            finals = [stack.columns[path][last].contiguous() for path in self._once]
        record = self.schema.pack(packed, stack.count)
        columns = [record, *(stack.columns[path] for path in self._large)]
        touched |= self.columns.write(row, columns)
        if counts.any():
            touched |= self._finals.write(final, finals)
        rows = np.full(n, stack.each)
        self._next = (row + stack.count, final + int(counts.sum()))
        return {
            "row": row + stack.each * np.arange(n),
            "final": final + np.cumsum(counts) - counts,
            "finals": counts,
            "data_crc": checksums([*((own, rows) for own in columns), *((own, counts) for own in finals)], n),
            "schema": self.number,
        }

    def forget(self) -> None:
        """What was written but does not count was never there: the next call writes at its place."""
        self._next = (self.rows, self.finals)

    # --- reading -----------------------------------------------------------------------------------
    def _sorted(self, paths: tuple[Path, ...]) -> tuple[list[Path], list[Path], list[Path]]:
        """Those that are packed, have a column of their own, are stored once."""
        once = [path for path in paths if path in self._once]
        small = [path for path in (*paths, *([NEXT] if once else [])) if path in self.schema.packed]
        return small, [path for path in paths if path in self._large], once

    def read(self, rows: Tensor, paths: Collection[Path]) -> dict[Path, Tensor]:
        """Fields ``[n, ...]`` of rows (int64 ``[n]``), in new tensors."""
        small, large, once = self._split(tuple(paths))
        found: dict[Path, Tensor] = {}
        if small:
            [record] = self.columns.gather(rows, [0])
            found = self.schema.unpack(record, small)
        if large:
            found |= zip(large, self.columns.gather(rows, [self._large[path] for path in large]), strict=True)
        if once:
            found |= self._following(rows, found.pop(NEXT), once)
        return found

    def _following(self, rows: Tensor, numbers: Tensor, once: list[Path]) -> dict[Path, Tensor]:
        last = numbers < 0
        at = torch.where(last, rows, numbers)
        out = self.columns.gather(at, [self._large[current(path)] for path in once])
        [places] = torch.where(last)
        if len(places):
            kept = self._finals.gather(-1 - numbers[places], [self._once[path] for path in once])
            for column, values in zip(out, kept, strict=True):
                words(column).index_copy_(0, places, words(values))
        return dict(zip(once, out, strict=True))

    def stored_checksum(self, row: int, count: int, final: int, finals: int) -> int:
        """Of what lies on disk for a trajectory."""
        parts = [self.columns.slice(i, row, count) for i in range(1 + len(self._large))]
        parts += [self._finals.slice(i, final, finals) for i in range(len(self._once))]
        return checksum(piece for column in parts for piece in column)

    def show(self, rows: int, finals: int, *, without: bool = False) -> None:
        """These rows count. ``without`` segments that cannot be read, or else one of them raises `OSError`."""
        self.columns.show(rows, without=without)
        if finals:
            self._finals.show(finals, without=without)
        self.rows, self.finals = self._next = max(self.rows, rows), max(self.finals, finals)

    def drop(self, row: int, final: int, number: int, *, remove: bool) -> bool:
        """Give up the segments of which all rows are below; whether there are any. `Columns.drop`."""
        self.rows, self.finals = self._next = max(self.rows, row), max(self.finals, final)
        rows = self.columns.drop(row, number, remove=remove)
        return self._finals.drop(final, number, remove=remove) or rows

    def release(self, number: int) -> bool:
        """`Columns.release`."""
        rows = self.columns.release(number)
        return self._finals.release(number) or rows

    def fits(self, rows: int, finals: int) -> bool:
        """Whether there is address space for so many."""
        return self.columns.fits(rows) and self._finals.fits(finals)

    def grow(self, rows: int, finals: int) -> None:
        """`Columns.grow`, where it is needed."""
        for columns, count in ((self.columns, rows), (self._finals, finals)):
            if not columns.fits(count):
                columns.grow(count)

    def reach(self, count: int) -> tuple[int, int]:
        """Rows and final observations there would be with so many rows more, at most."""
        return self._next[0] + count, self._next[1] + (count if self._once else 0)

    def end(self) -> tuple[int, int]:
        """Where the first row would go that shares no segment with those that count."""
        return tuple(-(-n // c) * c for n, c in zip((self.rows, self.finals), self.capacity, strict=True))  # type: ignore[return-value]

    def lost(self) -> list[str]:
        """Of each segment that cannot be read: its file, and why."""
        return [*self.columns.lost.values(), *self._finals.lost.values()]

    def files(self) -> list[str]:
        """Names of its segments."""
        return [name for columns in (self.columns, self._finals) for name, _ in columns.segments()]

    def unfinished(self) -> set[str]:
        """Names of the segments that more will be written into."""
        both = ((self.columns, self.rows), (self._finals, self.finals))
        return {name for columns, end in both for name, first in columns.segments() if first + columns.capacity > end}

    @property
    def nbytes(self) -> int:
        """Of its files, on the disk."""
        return self.columns.nbytes(self.rows) + self._finals.nbytes(self.finals)

    def boundary(self, row: int) -> int:
        """First row of the segment behind the one that holds ``row``."""
        return (row // self.capacity[0] + 1) * self.capacity[0]

    def close(self) -> None:
        self.columns.close()
        self._finals.close()


def checksum(columns: Iterable[Tensor]) -> int:
    """CRC-32 of the columns' bytes, one behind the other."""
    found = 0
    for column in columns:
        found = crc32(octets(column), found)
    return found


def checksums(columns: Iterable[tuple[Tensor, np.ndarray[Any, Any]]], count: int) -> list[int]:
    """`checksum` of each of ``count`` trajectories, by columns and how many rows of them are of each."""
    found = [0] * count
    for column, counts in columns:
        data, width, begin = octets(column), column[:1].nbytes, 0
        for i, rows in enumerate(counts.tolist()):
            end = begin + rows * width
            found[i] = crc32(data[begin:end], found[i])
            begin = end
    return found


def visible(schema: Schema) -> tuple[Path, ...]:
    """Fields as a caller knows them."""
    return tuple(field.path for field in schema.fields if field.path not in INTERNAL)
