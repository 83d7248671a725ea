"""Stores the columns of a table in segment files, which are mapped into memory such that each column is one array.

A *segment* is a file with ``capacity`` rows of every column. Row r is in segment ``r // capacity``. For each column,
all segments are mapped one after the other into one range of addresses. A gather over many files is therefore a single
`torch.index_select`, as fast as on one tensor in memory. The range is a ring buffer of *slots*, one for each segment: a
new segment is mapped into the slot of a dropped one. Python's `mmap` cannot map a file to a given address, so
`AddressSpace` calls the C library.
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
ADDRESSES = 16 << 30  # initial address space of a `Columns`, bytes; less where the system limits it
STEPS = 32  # disk space for a segment is allocated in this many steps while the segment is filled
PROBES = 8  # number of rows that a gather checks to find out whether its rows must be read from disk
_FIXED = 0x10  # MAP_FIXED, which has this value on Linux and macOS
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().sysname == "Linux" else 0x40)
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class Field:
    """The path, dtype and shape of one tensor in a row."""

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
    """A reserved range of virtual addresses, into which parts of files are mapped for reading.

    The reservation itself occupies no memory.

    Args:
        nbytes: length of the range, a multiple of the page size.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # an anonymous mapping: where no file is mapped yet, reads return zeros instead of crashing the process
        self._base = _mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)

    def rows(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the whole range as a tensor ``[n, *shape]`` without a copy. Rows where no file is mapped are zeros.

        The range is not unmapped while the tensor exists, unless `close` is called. After `close`, reading the tensor
        crashes the process.
        """
        nbytes = dtype.itemsize * math.prod(shape)
        count = self.nbytes // nbytes
        memory: Any = (ctypes.c_char * (count * nbytes)).from_address(self._base)
        memory.space = self
        return torch.frombuffer(memory, dtype=dtype).view(count, *shape)

    def map(self, file: int, offset: int, at: int, nbytes: int) -> None:
        """Map ``nbytes`` of the open file ``file`` from its byte ``offset`` on to byte ``at`` of the range.

        ``offset``, ``at`` and ``nbytes`` are multiples of the page size.
        """
        _mmap(self._base + at, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, file, offset)

    def unmap(self, at: int, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        _mmap(self._base + at, nbytes, mmap.PROT_READ, flags, -1, 0)

    def resident(self, at: int, nbytes: int) -> bool:
        """Return whether these bytes of the range are cached in memory. True if the system cannot report it."""
        first, pages = self._pages(at, nbytes)
        seen = ctypes.create_string_buffer(pages)
        if _library().mincore(first, pages * PAGE, seen):
            return True
        return all(page & 1 for page in seen.raw)

    def prefetch(self, at: int, nbytes: int) -> None:
        """Start to read these bytes of the range from disk into memory, and return without waiting for them."""
        first, pages = self._pages(at, nbytes)
        _library().madvise(first, pages * PAGE, mmap.MADV_WILLNEED)

    def _pages(self, at: int, nbytes: int) -> tuple[int, int]:
        """Return the address of the page that contains byte ``at``, and the number of pages that ``nbytes`` span."""
        first = at // PAGE * PAGE
        return self._base + first, -(-(at + nbytes - first) // PAGE)

    def close(self) -> None:
        """Unmap and release the range. Reading a tensor from `rows` afterwards crashes the process."""
        if self._base:
            _library().munmap(ctypes.c_void_p(self._base), ctypes.c_size_t(self.nbytes))
            self._base = 0

    def __del__(self) -> None:
        if hasattr(self, "_base"):
            self.close()


class Columns:
    """The columns of some fields in segment files.

    Rows are numbered from 0 in the order in which they are written. They keep their numbers when the oldest segments
    are dropped. A written row is *published* once it belongs to the buffer and may be read. If an error occurs between
    `write` and `publish`, the next write overwrites the rows.

    Args:
        files: the folder of the segments, or memory.
        name: format of the segments' file names, with ``{}`` in place of the segment's number.
        fields: the fields. Each has one column.
        capacity: number of rows in a segment. `table.segment_rows` returns one such that each column fills whole pages.
    """

    def __init__(self, files: Files, name: str, fields: Sequence[Field], capacity: int) -> None:
        self._files, self._name, self._fields, self.capacity = files, name, tuple(fields), capacity
        self._widths = [field.nbytes for field in fields]
        self.segment_nbytes = capacity * sum(self._widths)
        # for each column, its byte offset in a segment's file
        self._offsets = [capacity * sum(self._widths[:i]) for i in range(len(self._widths))]
        self._step = -(-capacity // STEPS)  # number of rows for which disk space is allocated at once
        self.rows = 0  # the row after the last published row
        self.end = 0  # the row after the last written row, published or not
        self._use(*self._reserve_addresses(ADDRESSES // max(1, self.segment_nbytes)))
        self._mapped = dict[int, int]()  # slot -> segment that is mapped there, also if it was dropped
        self._first = 0  # oldest segment that was not dropped
        # dropped segment that is still mapped -> the argument ``number`` of the call of `drop` that dropped it
        self._dropped: dict[int, int] = {}
        self._open: dict[int, int] = {}  # segment that is not full yet -> file descriptor
        self.lost: dict[int, str] = {}  # segment whose file is missing or too short -> error message
        # for each column, whether the rows of the last checked gather were cached in memory
        self._in_memory = [files.folder is None] * len(self._widths)
        # number of major page faults (reads that waited for the disk) of this process at the last gather
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt

    # --- writing ---------------------------------------------------------------------------------
    def write(self, columns: Sequence[memoryview], count: int) -> set[int]:
        """Write rows after the last written row, and return the descriptors of files that the caller must sync.

        The rows can be read after `publish`. The caller makes sure that there is address space for them (`fits`).

        Args:
            columns: for each field, the bytes of the rows (see `octets`).
            count: number of rows.

        Raises:
            OSError: the disk is full or fails.
        """
        touched = set[int]()
        first = self.end
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
                write_all(file, column[begin * width : end * width], offset + row * width)
        self.end = first + count
        return touched

    def nbytes(self, rows: int, kept: int = 0) -> int:
        """Return the disk space in bytes of the kept segments once all rows below ``rows`` are written.

        Segments with only rows below ``kept`` do not count.
        """
        segments, more = divmod(rows, self.capacity)
        segments -= max(self._first, kept // self.capacity)
        return (segments * self.capacity + self._reserved(more)) * sum(self._widths)

    @property
    def segment_end(self) -> int:
        """The first row of the first segment without published rows."""
        return -(-self.rows // self.capacity) * self.capacity

    def publish(self, rows: int, *, skip_unreadable: bool = False) -> None:
        """Publish all rows below ``rows``: map their segments, so that they can be read.

        Raises:
            OSError: the file of a segment is missing or too short. With ``skip_unreadable`` no error is raised, and the
                segment is added to ``lost``.
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
            # all rows of the segment are written, so its descriptor is not needed for writing any more
            os.close(self._open.pop(segment))
        self.rows = self.end = max(self.rows, rows)

    def drop(self, rows: int, number: int, *, remove: bool) -> bool:
        """Drop the segments in which all rows are below ``rows``, and return whether there were any.

        Other threads may be reading these segments, so they stay mapped until `release` is called with ``number`` or a
        higher number. The caller chooses ``number``, and increases it with each drop. With ``remove``, the files of the
        segments are deleted at once.
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
        """Unmap the segments that were dropped by calls of `drop` with numbers up to ``number``.

        Returns whether any dropped segments are still mapped.
        """
        for segment in [own for own, dropped in self._dropped.items() if dropped <= number]:
            slot = segment % self.slots
            for space, width in zip(self._spaces, self._widths, strict=True):
                if width:
                    space.unmap(slot * self.capacity * width, self.capacity * width)
            del self._mapped[slot]
            del self._dropped[segment]
        return bool(self._dropped)

    def fits(self, rows: int) -> bool:
        """Return whether the address space has room for all rows below ``rows`` and the dropped rows still mapped."""
        first = min(self._dropped, default=self._first)
        return (rows - 1) // self.capacity - first < self.slots

    def grow(self, rows: int) -> None:
        """Map all segments into a larger address space, which has room for all rows below ``rows``.

        The old address space is unmapped, so no other thread may be reading rows.

        Raises:
            OSError: the system does not provide so many addresses, or a segment cannot be mapped.
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

    def kept_files(self) -> dict[str, list[tuple[int, int]]]:
        """Return a dict with the file name of each kept segment.

        The value is empty for a full segment. Else it is the parts of the file that have published rows, as begin and
        end for each column. The other parts may have rows that the writer adds later, also to a file which a
        checkpoint shares with it.
        """
        found = dict[str, list[tuple[int, int]]]()
        for segment in sorted(self._mapped.values()):
            if segment >= self._first:
                count, parts = self.rows - segment * self.capacity, list[tuple[int, int]]()
                if count < self.capacity:
                    parts = [(at, at + count * width) for at, width in zip(self._offsets, self._widths, strict=True)]
                found[self._name.format(segment)] = parts
        return found

    # --- reading ---------------------------------------------------------------------------------
    def gather(self, rows: Tensor, which: Sequence[int]) -> list[Tensor]:
        """Return rows of some columns, as a new tensor ``[n, ...]`` for each column.

        Args:
            rows: int64 ``[n]``, numbers of published rows.
            which: indices of the columns in ``fields``.

        Raises:
            UserError: the segment of a row is lost.
        """
        slots = self._request(rows, which)
        try:
            found = [torch.index_select(self._views[i], 0, slots) for i in which]
        except IndexError:  # the number of a row is read from a file where it refers to a next observation
            raise UserError(f"{self._files.where(self._name.format('*'))}: damaged (it refers to no row)") from None
        self._notice_faults()
        return found

    def gather_bytes(self, rows: Tensor, which: int) -> np.ndarray[Any, Any]:
        """Return rows of a column as a new array ``[n]``, whose elements are the bytes of a row.

        For rows of few bytes, this takes a third of the time of `gather`. Its arguments and errors are the same.
        """
        slots = self._request(rows, [which])
        found = self._views[which].numpy().view(f"V{self._widths[which]}").reshape(-1).take(slots.numpy())
        self._notice_faults()
        return found

    def slice(self, which: int, first: int, count: int) -> list[Tensor]:
        """Return ``count`` consecutive rows of the column with index ``which``, without a copy.

        The result has one tensor for each segment. The tensors are valid until the next call of `release` or `grow`.

        Raises:
            UserError: the segment of a row is lost.
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
    def _request(self, rows: Tensor, which: Sequence[int]) -> Tensor:
        """Return the indices of rows in the arrays of the columns. Rows that are on disk are requested from it.

        A disk is fastest with many requests at once, so all rows are requested before the first is waited for.
        """
        if self.lost:
            self._check_not_lost(rows)
        slots = rows
        if self.rows > self.slots * self.capacity:  # some segments are mapped into the slots of dropped ones
            slots = rows % (self.slots * self.capacity)
        for i in which:
            if self._in_memory[i]:
                continue
            space, width = self._spaces[i], self._widths[i]
            probes = slots[:: max(1, len(slots) // PROBES)].tolist()
            self._in_memory[i] = all(space.resident(slot * width, width) for slot in probes)
            if not self._in_memory[i]:
                begins = np.sort(slots.numpy()) * width
                gaps = np.flatnonzero(begins[1:] > begins[:-1] + width + PAGE)
                first, last = [0, *(gaps + 1).tolist()], [*gaps.tolist(), len(begins) - 1]
                for begin, end in zip(begins[first].tolist(), begins[last].tolist(), strict=True):
                    space.prefetch(begin, end + width - begin)
        return slots

    def _notice_faults(self) -> None:
        """Make the next gather check whether its rows are cached if a thread of this process waited for the disk."""
        if self._files.folder is None:
            return
        if (faults := resource.getrusage(resource.RUSAGE_SELF).ru_majflt) != self._faults:
            self._faults = faults
            self._in_memory = [False] * len(self._widths)

    def _check_not_lost(self, rows: Tensor) -> None:
        for segment in (rows // self.capacity).unique().tolist():
            if segment in self.lost:
                raise UserError(self.lost[segment])

    def _pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Split the ``count`` rows from row ``first`` on at the boundaries of segments.

        Yields (segment, begin, end): the rows from ``first + begin`` to ``first + end - 1`` are in this segment.
        """
        begin = 0
        while begin < count:
            segment = (first + begin) // self.capacity
            end = min(count, (segment + 1) * self.capacity - first)
            yield segment, begin, end
            begin = end

    def _reserved(self, row: int) -> int:
        """Return for how many rows of a segment disk space is allocated once its first ``row`` rows are written."""
        return min(self.capacity, -(-row // self._step) * self._step)

    def _open_and_map(self, segment: int) -> None:
        file = self._files.open(self._name.format(segment))
        try:
            # reading a mapped page behind the end of its file would kill the process (SIGBUS)
            if os.fstat(file).st_size < self.segment_nbytes:
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
        """Reserve an address space for each column, with room for ``slots`` segments or as many as the system allows.

        Returns the address spaces and the number of segments that fit. Raises `OSError` if fewer than ``least`` fit.
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
        """Make ``spaces`` the address spaces of the columns. They have room for ``slots`` segments."""
        self._spaces, self.slots = spaces, slots
        self._views = [space.rows(field.dtype, field.shape) for space, field in zip(spaces, self._fields, strict=True)]


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a CPU tensor as an array, without a copy. Elements of a dtype that NumPy lacks appear as integers."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_INTEGERS[tensor.dtype.itemsize]).numpy()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def octets(data: Tensor | np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of a contiguous CPU tensor or array as a `memoryview`, without a copy."""
    array: Any = data if isinstance(data, np.ndarray) else as_array(data)
    return memoryview(array.reshape(-1).view(np.uint8))


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
