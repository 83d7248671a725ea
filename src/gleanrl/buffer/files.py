"""The files of a buffer: in a folder, or in memory. Both hand out file descriptors, so callers see no difference."""

from __future__ import annotations

import copy
import errno
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

try:
    from isal.isal_zlib import crc32  # at memory speed; the same sums as zlib's
except ModuleNotFoundError:
    from zlib import crc32

__all__ = ["DiskFiles", "Files", "MemoryFiles", "crc32", "lock", "write_all"]

NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # never an existing file: it may be a checkpoint's hard link
NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class Files(ABC):
    """Files by name. Names get a common prefix on disk."""

    on_disk: bool
    prefix = ""

    def with_prefix(self, prefix: str) -> Self:
        """Return the same files, seen without a prefix that their names have."""
        found = copy.copy(self)
        found.prefix = prefix
        return found

    @abstractmethod
    def where(self, name: str) -> str:
        """Return the file's path, for messages and links."""

    @abstractmethod
    def create(self, name: str, nbytes: int = 0) -> int:
        """Create a sparse file of that length and return its descriptor.

        Raises `FileExistsError` where the name is taken, since no file is ever overwritten, or another `OSError`; no
        file is left then.
        """

    @abstractmethod
    def reserve(self, file: int, at: int, nbytes: int) -> None:
        """Allocate disk space for a part of a file, so that a full disk is noticed now. Raises `OSError`."""

    @abstractmethod
    def open(self, name: str) -> int:
        """Return a descriptor. Raises `FileNotFoundError`."""

    @abstractmethod
    def still_named(self, name: str, file: int) -> bool:
        """Return whether the name still belongs to the open file, i.e. was not replaced."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Replace the file's content durably and atomically."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file if it exists. Open descriptors and mappings stay valid."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names that have the prefix, without it, sorted."""

    @abstractmethod
    def sync(self, files: Iterable[int]) -> None:
        """Return when the data of these descriptors would survive a power cut."""

    @abstractmethod
    def copy_to(self, name: str, folder: Path, nbytes: int | None = None) -> None:
        """Put a file into another folder: as a hard link where possible, or a copy of its first ``nbytes``."""

    @abstractmethod
    def copy_from(self, source: Path, name: str, nbytes: int | None = None) -> None:
        """Take over the file ``source``, see `copy_to`. Raises `FileExistsError` as `create` does."""

    def read_text(self, name: str) -> str:
        """Return a file's content. Raises `FileNotFoundError`."""
        file = self.open(name)
        try:
            return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
        finally:
            os.close(file)

    def write_text(self, name: str, text: str) -> None:
        """Create a file durably. No file is left where that fails."""
        file = self.create(name)
        try:
            write_all(file, memoryview(text.encode()), 0)
            self.sync([file])
        except BaseException:
            self.remove(name)
            raise
        finally:
            os.close(file)


class DiskFiles(Files):
    """Files in a folder."""

    on_disk = True

    def __init__(self, folder: Path, *, writable: bool) -> None:
        self._folder, self._mode = folder, os.O_RDWR if writable else os.O_RDONLY

    def where(self, name: str) -> str:
        return f"{self._folder}/{self.prefix}{name}"

    def create(self, name: str, nbytes: int = 0) -> int:
        path = self.where(name)
        file = os.open(path, NEW, 0o644)
        try:
            os.ftruncate(file, nbytes)
            atomic.sync(self._folder)
        except BaseException:
            os.close(file)
            os.unlink(path)
            raise
        return file

    def reserve(self, file: int, at: int, nbytes: int) -> None:
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, at, nbytes)

    def open(self, name: str) -> int:
        return os.open(self.where(name), self._mode | os.O_CLOEXEC)

    def still_named(self, name: str, file: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.where(name)), os.fstat(file))
        except FileNotFoundError:
            return False

    def replace(self, name: str, data: bytes) -> None:
        atomic.write_bytes(self.where(name), data)

    def remove(self, name: str) -> None:
        Path(self.where(name)).unlink(missing_ok=True)

    def names(self) -> list[str]:
        found = [path.name for path in self._folder.iterdir() if path.is_file()]
        return sorted(name.removeprefix(self.prefix) for name in found if name.startswith(self.prefix))

    def sync(self, files: Iterable[int]) -> None:
        for file in files:
            os.fdatasync(file) if hasattr(os, "fdatasync") else os.fsync(file)

    def copy_to(self, name: str, folder: Path, nbytes: int | None = None) -> None:
        _link_or_copy(Path(self.where(name)), folder / (self.prefix + name), nbytes)

    def copy_from(self, source: Path, name: str, nbytes: int | None = None) -> None:
        _link_or_copy(source, Path(self.where(name)), nbytes)
        atomic.sync(self._folder)


class MemoryFiles(Files):
    """Files without a folder. They are gone with the process."""

    on_disk = False

    def __init__(self) -> None:
        self._files: dict[str, _Descriptor] = {}  # shared by all prefixes

    def where(self, name: str) -> str:
        return self.prefix + name

    def create(self, name: str, nbytes: int = 0) -> int:
        name = self.where(name)
        if name in self._files:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        if hasattr(os, "memfd_create"):
            file = os.memfd_create(name, os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as unnamed:
                file = os.dup(unnamed.fileno())
        os.ftruncate(file, nbytes)
        self._files[name] = _Descriptor(os.dup(file))
        return file

    def reserve(self, file: int, at: int, nbytes: int) -> None:
        pass

    def open(self, name: str) -> int:
        if self.where(name) not in self._files:
            raise FileNotFoundError(self.where(name))
        return os.dup(self._files[self.where(name)].number)

    def still_named(self, name: str, file: int) -> bool:
        return False

    def replace(self, name: str, data: bytes) -> None:
        self.remove(name)
        file = self.create(name)
        write_all(file, memoryview(data), 0)
        os.close(file)

    def remove(self, name: str) -> None:
        self._files.pop(self.where(name), None)

    def names(self) -> list[str]:
        return sorted(name.removeprefix(self.prefix) for name in self._files if name.startswith(self.prefix))

    def sync(self, files: Iterable[int]) -> None:
        pass

    def copy_to(self, name: str, folder: Path, nbytes: int | None = None) -> None:
        source = self.open(name)
        try:
            _copy(source, folder / (self.prefix + name), nbytes)
        finally:
            os.close(source)

    def copy_from(self, source: Path, name: str, nbytes: int | None = None) -> None:
        file, target = os.open(source, os.O_RDONLY | os.O_CLOEXEC), self.create(name)
        try:
            _copy_data(file, target, nbytes)
        finally:
            os.close(file)
            os.close(target)


class _Descriptor:
    """A file descriptor that is closed with the last reference to it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def _link_or_copy(source: Path, target: Path, nbytes: int | None) -> None:
    if nbytes is None:
        try:
            os.link(source, target)
            return
        except OSError as error:  # another disk, or a file system without links
            if error.errno not in NO_LINKS:
                raise
    file = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _copy(file, target, nbytes)
    finally:
        os.close(file)


def _copy(source: int, path: Path, nbytes: int | None) -> None:
    target = os.open(path, NEW, 0o644)
    try:
        _copy_data(source, target, nbytes)
        os.fsync(target)
    finally:
        os.close(target)


def _copy_data(source: int, target: int, nbytes: int | None) -> None:
    """Copy without the holes: most of a new segment is one."""
    size = os.fstat(source).st_size if nbytes is None else nbytes
    os.ftruncate(target, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # only a hole follows
            return
        end = min(size, os.lseek(source, at, os.SEEK_HOLE))
        while at < end:
            data = os.pread(source, min(1 << 22, end - at), at)
            if not data:
                return
            at += os.pwrite(target, data, at)


def write_all(file: int, data: memoryview, at: int) -> None:
    """Write all bytes at an offset; a single call of the system may write fewer."""
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def lock(folder: Path) -> int:
    """Take the folder's writer lock, which is held until the returned descriptor is closed.

    Raises:
        UserError: another process or buffer holds it.
    """
    import fcntl

    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise UserError(f"{folder}: another process writes into this buffer; open it with read_only=True") from None
    return file
