"""The columns of rows of one schema, over segment files of a fixed number of rows.

Row r of a column lies in segment ``r // capacity``, so a row's number says where it is, and all segments of a column
lie one behind the other in one address space: a gather is one `index_select`, however many files there are.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.files import Files, write_all
from gleanrl.buffer.schema import Field
from gleanrl.buffer.space import PAGE, Space, octets
from gleanrl.utils.errors import UserError

ADDRESSES = 16 << 30  # bytes of address space that columns begin with; less where a limit says so
STEPS = 32  # in which a segment gets its space on the disk
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
        self._step = -(-capacity // STEPS)  # rows
        self._use(*_spaces(self._segment_widths, ADDRESSES // max(1, self.segment_nbytes)))
        self._mapped = dict[int, int]()  # slot -> the segment in it
        self._first = 0  # of the segments that are not dropped
        self._dropped: dict[int, int] = {}  # mapped segment -> which drop, until nobody reads it
        self._files_open: dict[int, int] = {}  # segment that is written into -> file
        self.lost: dict[int, str] = {}  # segment -> why it cannot be read
        self._warm, self._faults = self._all_warm(), _faults()  # of each column, whether rows are likely in memory

    @property
    def _segment_widths(self) -> list[int]:
        return [self.capacity * width for width in self._widths]

    def _use(self, spaces: list[Space], slots: int) -> None:
        """Address space for so many segments."""
        self._spaces, self._slots = spaces, slots
        self._views = [space.rows(field.dtype, field.shape) for space, field in zip(spaces, self._fields, strict=True)]

    # --- writing -----------------------------------------------------------------------------------
    def write(self, first: int, columns: Sequence[Tensor]) -> set[int]:
        """Put rows from number ``first`` on, and say which files to sync. Raises `OSError` where the disk is full.

        There must be address space for them: `fits`.
        """
        touched = set[int]()
        for segment, begin, end in self._pieces(first, len(columns[0])):
            file, row = self._writable(segment), first + begin - segment * self.capacity
            touched.add(file)
            reserved, needed = (self._reserved(at) for at in (row, row + end - begin))
            for column, width, offset in zip(columns, self._widths, self._offsets, strict=True):
                if needed > reserved:
                    self._files.reserve(file, offset + reserved * width, (needed - reserved) * width)
                write_all(file, octets(column[begin:end]), offset + row * width)
        return touched

    def nbytes(self, rows: int) -> int:
        """On the disk, of the segments that are kept, where ``rows`` are written."""
        segments, more = divmod(rows, self.capacity)
        return ((segments - self._first) * self.capacity + self._reserved(more)) * sum(self._widths)

    def show(self, rows: int, *, without: bool = False) -> None:
        """Map the segments of all rows below ``rows`` which are not dropped yet.

        ``without``: go on without those that cannot be read, see ``lost``; else one of them raises `OSError`.
        """
        known = max([*self._mapped.values(), *self.lost], default=-1)
        for segment in range(max(self._first, known + 1), (rows - 1) // self.capacity + 1):
            try:
                file = self._whole(self._name.format(segment))
                try:
                    self._map(segment, file)
                finally:
                    os.close(file)
            except OSError as error:
                if not without:
                    raise
                name = self._files.where(self._name.format(segment))
                self.lost[segment] = f"{name}: {error.strerror or error}; its rows are lost"
        for segment in [own for own in self._files_open if (own + 1) * self.capacity <= rows]:
            os.close(self._files_open.pop(segment))  # it is full

    def drop(self, rows: int, number: int, *, remove: bool) -> bool:
        """Forget the segments that hold only rows below ``rows``; whether there are any. ``remove`` their files too.

        They can be read until `release` is told that nobody does who began before the drop with this ``number``.
        """
        first, self._first = self._first, max(self._first, rows // self.capacity)
        if first == self._first:
            return False
        gone = [segment for segment in self._mapped.values() if first <= segment < self._first]
        self._dropped.update(dict.fromkeys(gone, number))
        self.lost = {segment: why for segment, why in self.lost.items() if segment >= self._first}
        for segment in gone:
            if segment in self._files_open:
                os.close(self._files_open.pop(segment))
            if remove:
                self._files.remove(self._name.format(segment))
        return bool(gone)

    def release(self, number: int) -> bool:
        """Unmap what was dropped up to this drop; whether anything is left that was."""
        for segment in [own for own, dropped in self._dropped.items() if dropped <= number]:
            for space, nbytes in zip(self._spaces, self._segment_widths, strict=True):
                if nbytes:
                    space.unmap(self._slot(segment) * nbytes, nbytes)
            del self._mapped[self._slot(segment)]
            del self._dropped[segment]
        return bool(self._dropped)

    def fits(self, rows: int) -> bool:
        """Whether there is address space for the rows up to ``rows``, beside those that may still be read."""
        first = min(self._dropped, default=self._first)
        return (rows - 1) // self.capacity - first < self._slots

    def grow(self, rows: int) -> None:
        """Move to an address space that has room for the rows up to ``rows``. Nobody may read meanwhile.

        Raises:
            OSError: there is none.
        """
        needed = (rows - 1) // self.capacity - self._first + 1
        old, slots, mapped = self._spaces, self._slots, self._mapped
        self._use(*_spaces(self._segment_widths, max(4 * slots, needed), needed))
        self._mapped = {}
        try:
            for segment in mapped.values():
                file = self._files.open(self._name.format(segment))
                try:
                    self._map(segment, file)
                finally:
                    os.close(file)
        except BaseException:
            self._use(old, slots)
            self._mapped = mapped
            raise
        for space in old:
            space.close()

    def segments(self) -> list[tuple[str, int]]:
        """Names of the files there are, and the number of the first row in each."""
        kept = sorted(segment for segment in self._mapped.values() if segment >= self._first)
        return [(self._name.format(segment), segment * self.capacity) for segment in kept]

    # --- reading -----------------------------------------------------------------------------------
    def gather(self, rows: Tensor, which: Sequence[int]) -> list[Tensor]:
        """Rows of the columns ``which``: ``[n, ...]`` each, in new tensors. int64 ``rows`` [n]."""
        self.check(rows)
        slots = rows % (self._slots * self.capacity)  # also brings back what damage has sent out of range
        for i in which:
            if not self._warm[i]:
                self._bring(slots, i)
        found = [torch.index_select(self._views[i], 0, slots) for i in which]
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
        """Consecutive rows of a column, by segment, without a copy: valid until the next `release`.

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
        for file in self._files_open.values():
            os.close(file)
        self._files_open.clear()
        self._mapped.clear()
        self._dropped.clear()

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

    def _reserved(self, row: int) -> int:
        """Rows of a segment that have their space on the disk once it is written up to ``row``."""
        return min(self.capacity, -(-row // self._step) * self._step)

    def _writable(self, segment: int) -> int:
        """The segment's file, open; it is made where there is none."""
        if segment not in self._files_open:
            name = self._name.format(segment)
            if self._mapped.get(self._slot(segment)) == segment:
                self._files_open[segment] = self._files.open(name)
            else:
                file = self._files.create(name, self.segment_nbytes)
                try:
                    self._map(segment, file)
                except BaseException:
                    os.close(file)
                    self._files.remove(name)
                    raise
                self._files_open[segment] = file
        return self._files_open[segment]

    def _map(self, segment: int, file: int) -> None:
        if self._slot(segment) in self._mapped:
            raise OSError(f"{self._name.format(segment)}: another segment lies where it would")
        for space, nbytes, offset in zip(self._spaces, self._segment_widths, self._offsets, strict=True):
            if nbytes:
                space.map(file, offset, self._slot(segment) * nbytes, nbytes)
        self._mapped[self._slot(segment)] = segment

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


def _spaces(widths: Sequence[int], slots: int, least: int = 1) -> tuple[list[Space], int]:
    """An address space for each column, with room for so many segments, or as many (the second value) as there is for.

    Raises:
        OSError: there is room for fewer than ``least``.
    """
    slots = max(least, slots)
    while True:
        made: list[Space] = []
        try:
            made.extend(Space(max(1, slots * width)) for width in widths)
            return made, slots
        except OSError:
            for space in made:
                space.close()
            if slots == least:
                raise
            slots = max(least, slots // 2)


def _faults() -> int:
    """Pages that this process has waited for a disk for, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
