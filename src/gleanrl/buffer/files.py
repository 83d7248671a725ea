"""The files of a buffer: in a folder, or in memory. Both hand out file descriptors, so callers see no difference."""

from __future__ import annotations

import copy
import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from gleanrl.utils import atomic

try:
    from isal.isal_zlib import crc32  # at memory speed; the same sums as zlib's
except ModuleNotFoundError:
    from zlib import crc32

__all__ = ["Files", "crc32", "write_all"]

NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class MemoryFile:
    """A file without a name, which is gone with the last reference to it and its last descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class Files:
    """Files by name. A file is never overwritten by another one, since it may be a checkpoint's hard link.

    Args:
        folder: where they are; None: in memory, gone with the process.
        writable: open files for writing too.
    """

    def __init__(self, folder: Path | None, *, writable: bool) -> None:
        self.folder, self._mode = folder, os.O_RDWR if writable else os.O_RDONLY
        self.prefix = ""  # start of all names on disk
        self._in_memory: dict[str, MemoryFile] = {}

    def with_prefix(self, prefix: str) -> Self:
        """Return the same files, seen without a prefix that their names have."""
        found = copy.copy(self)
        found.prefix = prefix
        return found

    def where(self, name: str) -> str:
        """Return the file's path, for messages and links."""
        return self.prefix + name if self.folder is None else f"{self.folder}/{self.prefix}{name}"

    def create(self, name: str, nbytes: int = 0) -> int:
        """Create a sparse file of that length and return its descriptor.

        Raises `FileExistsError` where the name is taken, or another `OSError`; no file is left then.
        """
        path = self.where(name)
        if self.folder is not None:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        elif path in self._in_memory:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        elif hasattr(os, "memfd_create"):
            file = os.memfd_create(path, os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as unnamed:
                file = os.dup(unnamed.fileno())
        try:
            os.ftruncate(file, nbytes)
            if self.folder is None:
                self._in_memory[path] = MemoryFile(os.dup(file))
            else:
                atomic.sync(self.folder)
        except BaseException:
            os.close(file)
            self.remove(name)
            raise
        return file

    def reserve(self, file: int, at: int, nbytes: int) -> None:
        """Allocate disk space for a part of a file, so that a full disk is noticed now. Raises `OSError`."""
        if nbytes and self.folder is not None and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, at, nbytes)

    def open(self, name: str) -> int:
        """Return a descriptor. Raises `FileNotFoundError`."""
        path = self.where(name)
        if self.folder is not None:
            return os.open(path, self._mode | os.O_CLOEXEC)
        if path not in self._in_memory:
            raise FileNotFoundError(path)
        return os.dup(self._in_memory[path].descriptor)

    def replace(self, name: str, data: bytes) -> None:
        """Replace the file's content durably and atomically."""
        if self.folder is not None:
            atomic.write_bytes(self.where(name), data)
            return
        self.remove(name)
        file = self.create(name)
        write_all(file, memoryview(data), 0)
        os.close(file)

    def remove(self, name: str) -> None:
        """Remove a file if it exists. Open descriptors and mappings stay valid."""
        if self.folder is not None:
            Path(self.where(name)).unlink(missing_ok=True)
        else:
            self._in_memory.pop(self.where(name), None)

    def names(self) -> list[str]:
        """Return the names that have the prefix, without it, sorted."""
        if self.folder is not None:
            found = [path.name for path in self.folder.iterdir() if path.is_file()]
        else:
            found = list(self._in_memory)
        return sorted(name.removeprefix(self.prefix) for name in found if name.startswith(self.prefix))

    def sync(self, files: Iterable[int]) -> None:
        """Return when the data of these descriptors would survive a power cut."""
        if self.folder is not None:
            for file in files:
                os.fdatasync(file) if hasattr(os, "fdatasync") else os.fsync(file)

    def take(self, source: Files, name: str, nbytes: int | None = None) -> None:
        """Take over a file of other files: as a hard link where possible, or a copy of its first ``nbytes``.

        A new name survives a power cut only once its folder was synced. Raises `FileExistsError` as `create` does.
        """
        if nbytes is None and self.folder is not None and source.folder is not None:
            try:
                os.link(source.where(name), self.where(name))
                return
            except OSError as error:  # another disk, or a file system without links
                if error.errno not in NO_LINKS:
                    raise
        file, target = source.open(name), self.create(name)
        try:
            size = os.fstat(file).st_size if nbytes is None else nbytes
            os.ftruncate(target, size)
            at = 0
            while at < size:
                try:
                    at = os.lseek(file, at, os.SEEK_DATA)  # without the holes: most of a new segment is one
                except OSError:  # only a hole follows
                    break
                end = min(size, os.lseek(file, at, os.SEEK_HOLE))
                while at < end and (data := os.pread(file, min(1 << 22, end - at), at)):
                    at += os.pwrite(target, data, at)
            self.sync([target])
        finally:
            os.close(file)
            os.close(target)

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


def write_all(file: int, data: memoryview, at: int) -> None:
    """Write all bytes at an offset; a single call of the system may write fewer."""
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
