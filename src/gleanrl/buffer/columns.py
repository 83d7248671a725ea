"""Columns of rows in segment files, mapped so that each column is one array.

Row r of a column is in segment ``r // capacity``. All segments of a column are mapped one after the other into one
range of addresses, so a gather over many files is a single `torch.index_select`, as fast as over one tensor in memory.
The range is used as a ring: a new segment takes the place of a dropped one. Python's `mmap` cannot map to a given
address, so `AddressSpace` calls the C library.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.files import Files, write_all
from gleanrl.buffer.trajectory import FieldPath
from gleanrl.utils.errors import UserError

PAGE = mmap.PAGESIZE
ADDRESSES = 16 << 30  # bytes of address space that a table starts with; fewer where the system limits them
STEPS = 32  # number of steps in which disk space is reserved for a segment
PROBES = 8  # rows that are checked to find out whether a gather would wait for the disk
_FIXED = 0x10  # MAP_FIXED, which has this value on Linux and macOS
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().sysname == "Linux" else 0x40)
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class Field:
    """The name, type and shape of one tensor of a row."""

    path: FieldPath
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @classmethod
    def of(cls, path: FieldPath, column: Tensor) -> Field:
        return cls(path, column.dtype, tuple(column.shape[1:]))

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class AddressSpace:
    """A range of addresses without memory, into which parts of files are mapped for reading.

    Args:
        nbytes: length of the range, a multiple of the page size.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # where no file is mapped, reads return zeros and do not crash the process
        self._base = _mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)

    def rows(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a view of the whole range as rows of ``shape``.

        Rows are valid where a file is mapped, until `close`. The tensor keeps the range alive.
        """
        nbytes = dtype.itemsize * math.prod(shape)
        count = self.nbytes // nbytes
        memory: Any = (ctypes.c_char * (count * nbytes)).from_address(self._base)
        memory.space = self
        return torch.frombuffer(memory, dtype=dtype).view(count, *shape)

    def map(self, file: int, offset: int, at: int, nbytes: int) -> None:
        """Map ``nbytes`` of a file from ``offset`` to byte ``at`` of the range. All are multiples of the page size."""
        _mmap(self._base + at, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, file, offset)

    def unmap(self, at: int, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        _mmap(self._base + at, nbytes, mmap.PROT_READ, flags, -1, 0)

    def resident(self, at: int, nbytes: int) -> bool:
        """Return whether these bytes are in memory. True if the system cannot find out."""
        first, pages = self._pages(at, nbytes)
        seen = ctypes.create_string_buffer(pages)
        if _library().mincore(first, pages * PAGE, seen):
            return True
        return all(page & 1 for page in seen.raw)

    def prefetch(self, at: int, nbytes: int) -> None:
        """Start reading these bytes from disk, without waiting for them."""
        first, pages = self._pages(at, nbytes)
        _library().madvise(first, pages * PAGE, mmap.MADV_WILLNEED)

    def _pages(self, at: int, nbytes: int) -> tuple[int, int]:
        """Return the address of the page in which byte ``at`` lies, and the number of pages that ``nbytes`` touch."""
        first = at // PAGE * PAGE
        return self._base + first, -(-(at + nbytes - first) // PAGE)

    def close(self) -> None:
        """Release the range. Tensors from `rows` must not be used afterwards."""
        if self._base:
            _library().munmap(ctypes.c_void_p(self._base), ctypes.c_size_t(self.nbytes))
            self._base = 0

    def __del__(self) -> None:
        if hasattr(self, "_base"):
            self.close()


class Columns:
    """Rows of some fields, numbered from 0 and never renumbered. The oldest segments can be dropped.

    A row is *published* once it may be read and belongs to the buffer. Rows that were written but not published are
    overwritten by the next write after an error.

    Args:
        files: the folder of the segments, or memory.
        name: name of a segment's file, with ``{}`` in place of its number.
        fields: the fields, with one column each.
        capacity: rows in a segment, such that each column fills whole pages (`table.segment_rows`).
    """

    def __init__(self, files: Files, name: str, fields: Sequence[Field], capacity: int) -> None:
        self._files, self._name, self._fields, self.capacity = files, name, tuple(fields), capacity
        self._widths = [field.nbytes for field in fields]
        self.segment_nbytes = capacity * sum(self._widths)
        # offset of each column in a segment's file
        self._offsets = [capacity * sum(self._widths[:i]) for i in range(len(self._widths))]
        self._step = -(-capacity // STEPS)  # number of rows for which disk space is reserved at once
        self.rows = 0  # published rows
        self.end = 0  # end of the written rows, the unpublished ones included
        self._use(*self._reserve_addresses(ADDRESSES // max(1, self.segment_nbytes)))
        self._mapped = dict[int, int]()  # slot -> the segment mapped there, which may be a dropped one
        self._first = 0  # first segment that is kept
        self._dropped: dict[int, int] = {}  # dropped segment that is still mapped -> number of its drop
        self._open: dict[int, int] = {}  # segment that is being filled -> file descriptor
        self.lost: dict[int, str] = {}  # segment -> why it cannot be read
        self._in_memory = [files.folder is None] * len(self._widths)  # for each column, whether it seems to be cached
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt  # major page faults at the last gather

    # --- writing ---------------------------------------------------------------------------------
    def write(self, columns: Sequence[Tensor]) -> set[int]:
        """Write rows at ``end`` and return the descriptors to sync. The rows can be read once they are published.

        There must be address space for the rows (`fits`). Raises `OSError` if the disk is full.
        """
        touched = set[int]()
        first, count = self.end, len(columns[0])
        for segment, begin, end in self._pieces(first, count):
            if segment not in self._open:
                name = self._name.format(segment)
                if self._mapped.get(segment % self.slots) == segment:
                    self._open[segment] = self._files.open(name)
                else:
                    file = self._files.create(name, self.segment_nbytes)
                    try:
                        self._map(segment, file)
                    except BaseException:
                        os.close(file)
                        self._files.remove(name)
                        raise
                    self._open[segment] = file
            file, row = self._open[segment], first + begin - segment * self.capacity
            touched.add(file)
            reserved, needed = self._reserved(row), self._reserved(row + end - begin)
            for column, width, offset in zip(columns, self._widths, self._offsets, strict=True):
                if needed > reserved:
                    self._files.reserve(file, offset + reserved * width, (needed - reserved) * width)
                write_all(file, octets(column[begin:end]), offset + row * width)
        self.end = first + count
        return touched

    def nbytes(self, rows: int) -> int:
        """Return the bytes of disk space that the kept segments use when they are written up to row ``rows``."""
        segments, more = divmod(rows, self.capacity)
        return ((segments - self._first) * self.capacity + self._reserved(more)) * sum(self._widths)

    @property
    def segment_end(self) -> int:
        """First row of the first segment that holds no published row."""
        return -(-self.rows // self.capacity) * self.capacity

    def publish(self, rows: int, *, skip_unreadable: bool = False) -> None:
        """Publish all rows below ``rows``, and map their segments.

        Raises:
            OSError: a segment cannot be read. With ``skip_unreadable`` it is added to ``lost`` instead.
        """
        known = max([*self._mapped.values(), *self.lost], default=-1)
        for segment in range(max(self._first, known + 1), (rows - 1) // self.capacity + 1):
            try:
                self._open_and_map(segment)
            except OSError as error:
                if not skip_unreadable:
                    raise
                name = self._files.where(self._name.format(segment))
                self.lost[segment] = f"{name}: {error.strerror or error}; its rows are lost"
        for segment in [own for own in self._open if (own + 1) * self.capacity <= rows]:
            os.close(self._open.pop(segment))  # the segment is full
        self.rows = self.end = max(self.rows, rows)

    def drop(self, rows: int, number: int, *, remove: bool) -> bool:
        """Drop the segments that hold only rows below ``rows``, and return whether there were any.

        Dropped segments can be read until `release` is called with this drop's ``number``. With ``remove``, their files
        are removed.
        """
        self.rows = self.end = max(self.rows, rows)
        first, self._first = self._first, max(self._first, rows // self.capacity)
        if first == self._first:
            return False
        gone = [segment for segment in self._mapped.values() if first <= segment < self._first]
        self._dropped.update(dict.fromkeys(gone, number))
        self.lost = {segment: why for segment, why in self.lost.items() if segment >= self._first}
        for segment in gone:
            if segment in self._open:
                os.close(self._open.pop(segment))
            if remove:
                self._files.remove(self._name.format(segment))
        return bool(gone)

    def release(self, number: int) -> bool:
        """Unmap the segments of drops up to ``number``, and return whether any dropped segments are still mapped."""
        for segment in [own for own, dropped in self._dropped.items() if dropped <= number]:
            slot = segment % self.slots
            for space, width in zip(self._spaces, self._widths, strict=True):
                if width:
                    space.unmap(slot * self.capacity * width, self.capacity * width)
            del self._mapped[slot]
            del self._dropped[segment]
        return bool(self._dropped)

    def fits(self, rows: int) -> bool:
        """Return whether there is address space for rows up to ``rows``, and for dropped rows that are still mapped."""
        first = min(self._dropped, default=self._first)
        return (rows - 1) // self.capacity - first < self.slots

    def grow(self, rows: int) -> None:
        """Move to a larger address space with room for rows up to ``rows``. No thread may be reading meanwhile.

        Raises:
            OSError: the system has no such address space.
        """
        needed = (rows - 1) // self.capacity - self._first + 1
        old, slots, mapped = self._spaces, self.slots, self._mapped
        self._use(*self._reserve_addresses(max(4 * slots, needed), needed))
        self._mapped = {}
        try:
            for segment in mapped.values():
                self._open_and_map(segment)
        except BaseException:
            self._use(old, slots)
            self._mapped = mapped
            raise
        for space in old:
            space.close()

    def kept_files(self) -> dict[str, bool]:
        """Return the file names of the kept segments, each with whether more rows will be written to it."""
        kept = [segment for segment in sorted(self._mapped.values()) if segment >= self._first]
        return {self._name.format(segment): (segment + 1) * self.capacity > self.rows for segment in kept}

    # --- reading ---------------------------------------------------------------------------------
    def gather(self, rows: Tensor, which: Sequence[int]) -> list[Tensor]:
        """Return rows (int64 ``[n]``) of the columns ``which`` as new tensors ``[n, ...]``.

        Raises:
            UserError: the file of a row is lost.
        """
        if self.lost:
            self._check_not_lost(rows)
        slots = rows % (self.slots * self.capacity)  # also keeps a damaged row number inside the range
        for i in which:
            if self._in_memory[i]:
                continue
            # a disk serves many requests at once, so all rows are requested before the first one is read
            space, width = self._spaces[i], self._widths[i]
            probes = slots[:: max(1, len(slots) // PROBES)].tolist()
            self._in_memory[i] = all(space.resident(slot * width, width) for slot in probes)
            if not self._in_memory[i]:
                begins = np.sort(slots.numpy()) * width
                gaps = np.flatnonzero(begins[1:] > begins[:-1] + width + PAGE)
                first, last = [0, *(gaps + 1).tolist()], [*gaps.tolist(), len(begins) - 1]
                for begin, end in zip(begins[first].tolist(), begins[last].tolist(), strict=True):
                    space.prefetch(begin, end + width - begin)
        found = [torch.index_select(self._views[i], 0, slots) for i in which]
        if (faults := resource.getrusage(resource.RUSAGE_SELF).ru_majflt) != self._faults:
            self._faults = faults  # a thread of this process waited for the disk
            self._in_memory = [self._files.folder is None] * len(self._widths)
        return found

    def slice(self, which: int, first: int, count: int) -> list[Tensor]:
        """Return consecutive rows of a column, one view for each segment, valid until the next `release`.

        Raises:
            UserError: the file of a row is lost.
        """
        if self.lost:
            self._check_not_lost(torch.arange(first, first + count))
        view = self._views[which]
        found = []
        for segment, begin, end in self._pieces(first, count):
            at = segment % self.slots * self.capacity + first + begin - segment * self.capacity
            found.append(view[at : at + end - begin])
        return found

    def close(self) -> None:
        self._views.clear()
        for space in self._spaces:
            space.close()
        for file in self._open.values():
            os.close(file)
        self._open.clear()
        self._mapped.clear()
        self._dropped.clear()

    # --- inside ----------------------------------------------------------------------------------
    def _check_not_lost(self, rows: Tensor) -> None:
        for segment in (rows // self.capacity).unique().tolist():
            if segment in self.lost:
                raise UserError(self.lost[segment])

    def _pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Split ``count`` rows, from row ``first`` on, by segment.

        Yields (segment, begin, end): rows ``first + begin`` to ``first + end`` (exclusive) lie in this segment.
        """
        begin = 0
        while begin < count:
            segment = (first + begin) // self.capacity
            end = min(count, (segment + 1) * self.capacity - first)
            yield segment, begin, end
            begin = end

    def _reserved(self, row: int) -> int:
        """Return the number of rows for which a segment has disk space when it is written up to ``row``."""
        return min(self.capacity, -(-row // self._step) * self._step)

    def _open_and_map(self, segment: int) -> None:
        file = self._files.open(self._name.format(segment))
        try:
            if os.fstat(file).st_size < self.segment_nbytes:  # reading past a file's end would kill the process
                raise OSError("the file is cut short")
            self._map(segment, file)
        finally:
            os.close(file)

    def _map(self, segment: int, file: int) -> None:
        slot = segment % self.slots
        for space, width, offset in zip(self._spaces, self._widths, self._offsets, strict=True):
            if width:
                space.map(file, offset, slot * self.capacity * width, self.capacity * width)
        self._mapped[slot] = segment

    def _reserve_addresses(self, slots: int, least: int = 1) -> tuple[list[AddressSpace], int]:
        """Reserve an address space for each column. Return the address spaces and the number of segments that fit.

        That number is ``slots``, or less if the system does not allow it. Raises `OSError` if it is below ``least``.
        """
        slots = max(least, slots)
        while True:
            made: list[AddressSpace] = []
            try:
                made.extend(AddressSpace(max(1, slots * self.capacity * width)) for width in self._widths)
                return made, slots
            except OSError:
                for space in made:
                    space.close()
                if slots == least:
                    raise
                slots = max(least, slots // 2)

    def _use(self, spaces: list[AddressSpace], slots: int) -> None:
        """Use address spaces with room for ``slots`` segments."""
        self._spaces, self.slots = spaces, slots
        self._views = [space.rows(field.dtype, field.shape) for space, field in zip(spaces, self._fields, strict=True)]


def octets(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor without a copy."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(array)


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, file: int, offset: int) -> int:
    found = _library().mmap(address, nbytes, protection, flags, file, offset)
    if found is None or found == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {nbytes} bytes: {os.strerror(error)}")
    return found


@cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    ]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
