"""Address space in which the files of a column lie one behind the other, so that the column is one array.

A gather over many files is then a single `index_select`, as fast as over one tensor in memory. Python's `mmap` cannot
place a mapping, so the C library is called.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any

import torch

PAGE = mmap.PAGESIZE
_FIXED = 0x10  # MAP_FIXED, the same on Linux and macOS
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().sysname == "Linux" else 0x40)
_FAILED = ctypes.c_void_p(-1).value


class Space:
    """A range of addresses without memory; parts of files are mapped into it and taken out again.

    Args:
        nbytes: how long the range is, a multiple of the page size. It costs no memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._base = _mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
        # reading where nothing is mapped gives zeros and not a crash

    def rows(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The whole range as rows of ``shape``; valid where something is mapped, and until `close`.

        Who has them keeps the range, though nobody else knows it any more.
        """
        nbytes = dtype.itemsize * _product(shape)
        count = self.nbytes // nbytes
        memory: Any = (ctypes.c_char * (count * nbytes)).from_address(self._base)
        memory.space = self
        return torch.frombuffer(memory, dtype=dtype).view(count, *shape)

    def map(self, file: int, offset: int, at: int, nbytes: int) -> None:
        """Show ``nbytes`` of ``file`` from ``offset`` at byte ``at`` of the range, for reading. All in whole pages."""
        _mmap(self._base + at, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, file, offset)

    def unmap(self, at: int, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        _mmap(self._base + at, nbytes, mmap.PROT_READ, flags, -1, 0)

    def resident(self, at: int, nbytes: int) -> bool:
        """Whether reading these bytes would wait for no disk."""
        first, pages = self._pages(at, nbytes)
        seen = ctypes.create_string_buffer(pages)
        if _library().mincore(first, pages * PAGE, seen):
            return True  # it cannot be told: then the ordinary way
        return all(page & 1 for page in seen.raw)

    def expect(self, at: int, nbytes: int) -> None:
        """These bytes will be read soon: have them fetched, without waiting."""
        first, pages = self._pages(at, nbytes)
        _library().madvise(first, pages * PAGE, mmap.MADV_WILLNEED)

    def _pages(self, at: int, nbytes: int) -> tuple[int, int]:
        """Address of the first page of a range, and how many there are."""
        first = at // PAGE * PAGE
        return self._base + first, -(-(at + nbytes - first) // PAGE)

    def close(self) -> None:
        """Give the range back. Nothing that `rows` gave may be used afterwards."""
        if self._base:
            _library().munmap(ctypes.c_void_p(self._base), ctypes.c_size_t(self.nbytes))
            self._base = 0

    def __del__(self) -> None:
        if hasattr(self, "_base"):
            self.close()


def octets(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, where they lie."""
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


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
