"""The columns of rows of one schema, over segment files of a fixed number of rows.

Row r of a column lies in segment ``r // capacity``, so a row's number says where it is, and all segments of a column
lie one behind the other in one address space: a gather is one `index_select`, however many files there are.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.files import Files, write_all
from gleanrl.buffer.schema import Field
from gleanrl.buffer.space import PAGE, Space, octets
from gleanrl.errors import UserError

ADDRESSES = 4 << 40  # bytes of address space for the columns of a table; less where a limit says so
PROBES = 8  # rows that tell whether a gather would wait for the disk


class Columns:
    """Rows of some fields, numbered from 0 for ever; the oldest segments can be dropped.

    Args:
        files: where the segments are.
        name: of the segment files, with the segment's number for ``{}``.
        fields: one column each.
        capacity: rows in a segment; each column then fills whole pages (see `Schema.rows_in`).
    """

    def __init__(self, files: Files, name: str, fields: Sequence[Field], capacity: int) -> None:
        self._files, self._name, self._fields, self.capacity = files, name, tuple(fields), capacity
        self._widths = [field.nbytes for field in fields]
        self.segment_nbytes = capacity * sum(self._widths)
        self._offsets = [capacity * sum(self._widths[:i]) for i in range(len(self._widths))]  # in a segment's file
        self._spaces, self._slots = _spaces([capacity * width for width in self._widths])
        self._views = [
            space.rows(field.dtype, field.shape) for space, field in zip(self._spaces, self._fields, strict=True)
        ]
        self._open: dict[int, int] = {}  # segment -> file
        self.lost: dict[int, str] = {}  # segment -> why it cannot be read
        self._reading, self._lock = 0, threading.Lock()
        self._dropped, self._later = set[int](), set[int]()  # to be unmapped: as soon as may be, or at `release`
        self._warm, self._faults = self._all_warm(), _faults()  # of each column, whether rows are likely in memory

    # --- writing -----------------------------------------------------------------------------------
    def write(self, first: int, columns: Sequence[Tensor]) -> set[int]:
        """Put rows from number ``first`` on, and say which files to sync. Raises `OSError` where the disk is full."""
        count = len(columns[0])
        for segment, begin, end in self._pieces(first, count):
            if segment not in self._open:
                self._map(segment, self._files.create(self._name.format(segment), self.segment_nbytes))
            file = self._open[segment]
            row = first + begin - segment * self.capacity
            for column, width, offset in zip(columns, self._widths, self._offsets, strict=True):
                write_all(file, octets(column[begin:end]), offset + row * width)
        return {self._open[segment] for segment, _, _ in self._pieces(first, count)}

    def show(self, rows: int, *, without: bool = False) -> None:
        """Map the segments of all rows below ``rows`` which are not dropped yet.

        ``without``: go on without those that cannot be read, see ``lost``; else one of them raises `OSError`.
        """
        last = (rows - 1) // self.capacity
        known = max([*self._open, *self.lost], default=None)
        for segment in range(self._first if known is None else known + 1, last + 1):
            try:
                self._map(segment, self._whole(self._name.format(segment)))
            except OSError as error:
                if not without:
                    raise
                name = self._files.where(self._name.format(segment))
                self.lost[segment] = f"{name}: {error.strerror or error}; its rows are lost"

    _first = 0

    def drop(self, rows: int, *, remove: bool, now: bool = True) -> None:
        """Forget the segments that hold only rows below ``rows``; ``remove`` their files too.

        Not ``now``: they can be read until `release`.
        """
        with self._lock:
            self._first = max(self._first, rows // self.capacity)
            gone = {segment for segment in self._open if segment < self._first}
            (self._dropped if now else self._later).update(gone)
            self.lost = {segment: why for segment, why in self.lost.items() if segment >= self._first}
            if remove:
                for segment in gone:
                    self._files.remove(self._name.format(segment))
            self._forget()

    def release(self) -> None:
        """Forget what was dropped and could still be read."""
        with self._lock:
            self._dropped |= self._later
            self._later.clear()
            self._forget()

    def segments(self) -> list[tuple[str, int]]:
        """Names of the files there are, and the number of the first row in each."""
        return [(self._name.format(segment), segment * self.capacity) for segment in sorted(self._open)]

    # --- reading -----------------------------------------------------------------------------------
    def gather(self, rows: Tensor, which: Sequence[int]) -> list[Tensor]:
        """Rows of the columns ``which``: ``[n, ...]`` each, in new tensors. int64 ``rows`` [n]."""
        self.check(rows)
        with self._lock:
            self._reading += 1
        try:
            slots = rows % (self._slots * self.capacity)  # also brings back what damage has sent out of range
            for i in which:
                if not self._warm[i]:
                    self._bring(slots, i)
            found = [torch.index_select(self._views[i], 0, slots) for i in which]
        finally:
            with self._lock:
                self._reading -= 1
                self._forget()
        if (faults := _faults()) != self._faults:  # somebody waited for a disk
            self._faults, self._warm = faults, self._all_warm()
        return found

    def check(self, rows: Tensor) -> None:
        """Raises `UserError` where the file of one of these rows is lost."""
        if self.lost and len(rows):
            for segment in (rows // self.capacity).unique().tolist():
                if segment in self.lost:
                    raise UserError(self.lost[segment])

    def slice(self, which: int, first: int, count: int) -> list[Tensor]:
        """Consecutive rows of a column, by segment, without a copy: valid until the next `drop`.

        Raises `UserError` where a segment is lost.
        """
        if self.lost:
            self.check(torch.arange(first, first + count))
        view = self._views[which]
        found = []
        for segment, begin, end in self._pieces(first, count):
            at = self._slot(segment) * self.capacity + first + begin - segment * self.capacity
            found.append(view[at : at + end - begin])
        return found

    def close(self) -> None:
        self._views.clear()
        for space in self._spaces:
            space.close()
        for file in self._open.values():
            os.close(file)
        self._open.clear()
        self._dropped.clear()
        self._later.clear()

    # --- inside ------------------------------------------------------------------------------------
    def _pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(segment, begin, end) of consecutive rows; begin and end count from ``first``."""
        begin = 0
        while begin < count:
            segment = (first + begin) // self.capacity
            end = min(count, (segment + 1) * self.capacity - first)
            yield segment, begin, end
            begin = end

    def _slot(self, segment: int) -> int:
        return segment % self._slots

    def _whole(self, name: str) -> int:
        """The file, open. Raises `OSError` where it is shorter than it was made: reading it would end the process."""
        file = self._files.open(name)
        if os.fstat(file).st_size < self.segment_nbytes:
            os.close(file)
            raise OSError("the file is cut short")
        return file

    def _map(self, segment: int, file: int) -> None:
        for space, width, offset in zip(self._spaces, self._widths, self._offsets, strict=True):
            nbytes = self.capacity * width
            if nbytes:
                space.map(file, offset, self._slot(segment) * nbytes, nbytes)
        self._open[segment] = file

    def _forget(self) -> None:
        if self._reading:
            return
        for segment in self._dropped:
            for space, width in zip(self._spaces, self._widths, strict=True):
                if width:
                    space.unmap(self._slot(segment) * self.capacity * width, self.capacity * width)
            os.close(self._open.pop(segment))
        self._dropped.clear()

    def _all_warm(self) -> list[bool]:
        return [not self._files.on_disk] * len(self._fields)

    def _bring(self, slots: Tensor, which: int) -> None:
        """Ask for all of these rows at once where some are not in memory: the disk likes company."""
        space, width = self._spaces[which], self._widths[which]
        probes = slots[:: max(1, len(slots) // PROBES)].tolist()
        self._warm[which] = all(space.resident(slot * width, width) for slot in probes)
        if not self._warm[which]:
            begins = np.sort(slots.numpy()) * width
            gaps = np.flatnonzero(begins[1:] > begins[:-1] + width + PAGE)
            first, last = [0, *(gaps + 1).tolist()], [*gaps.tolist(), len(begins) - 1]
            for begin, end in zip(begins[first].tolist(), begins[last].tolist(), strict=True):
                space.expect(begin, end + width - begin)


def _spaces(widths: Sequence[int]) -> tuple[list[Space], int]:
    """An address space for each column, with room for as many segments (the second value) as the limits allow."""
    slots = max(1, ADDRESSES // max(1, sum(widths)))
    while True:
        made: list[Space] = []
        try:
            made.extend(Space(max(1, slots * width)) for width in widths)
            return made, slots
        except OSError:
            for space in made:
                space.close()
            if slots < 4:
                raise
            slots //= 2


def _faults() -> int:
    """Pages that this process has waited for a disk for, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
