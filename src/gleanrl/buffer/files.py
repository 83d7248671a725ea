"""The files of a buffer by name, either in a folder or in memory.

An open file is a file descriptor in both cases, so the rest of the buffer has no separate code for files in memory.
"""

from __future__ import annotations

import copy
import errno
import os
import resource
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace

from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

try:
    from isal.isal_zlib import crc32  # computes the same checksums as zlib, but faster
except ModuleNotFoundError:
    from zlib import crc32

__all__ = ["CheckedJson", "Files", "crc32", "write_all"]

# errors of `os.link` that mean that the file system cannot link the file, for example because it is on another disk
NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


@contextmanager
def explaining_open_files() -> Iterator[None]:
    """Raise `UserError` if the block fails because this process has too many open files; let any other error pass."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise UserError(
            f"this process has its limit of {limit} open files: a buffer has one or two for each set of fields and "
            "shapes of its trajectories, and in memory also one for each file of about segment_bytes; raise the limit "
            "(ulimit -n), choose a larger segment_bytes, or pad fields to fewer shapes"
        ) from error


class MemoryFile:
    """A file in memory. Its memory is freed once this object is deleted and all other descriptors of it are closed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class Files:
    """Creates, opens, replaces and removes the files of a buffer by name.

    No method writes new content into an existing file, because a checkpoint may have a hard link to the same file.

    Args:
        folder: folder of the files; None: the files are in memory and are lost when the process ends.
        writable: whether `open` opens files for writing as well as for reading.
    """

    def __init__(self, folder: Path | None, *, writable: bool) -> None:
        self.folder, self._mode = folder, os.O_RDWR if writable else os.O_RDONLY
        self.prefix = ""  # the name of every file on disk begins with it; callers pass names without it
        self._in_memory: dict[str, MemoryFile] = {}

    def with_prefix(self, prefix: str) -> Self:
        """Return a `Files` for those files of this folder whose names start with ``prefix``.

        Its methods take and return names without the prefix.
        """
        found = copy.copy(self)
        found.prefix = prefix
        return found

    def where(self, name: str) -> str:
        """Return the path of a file on disk, or the full name of a file in memory."""
        return self.prefix + name if self.folder is None else f"{self.folder}/{self.prefix}{name}"

    @explaining_open_files()
    def create(self, name: str, nbytes: int = 0) -> int:
        """Create a file of ``nbytes`` zeros, without allocating disk space (see `reserve`), and return its descriptor.

        Raises `FileExistsError` if a file of this name exists. After any other `OSError`, the file does not exist.
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
        """Allocate disk space for the ``nbytes`` of a file from offset ``at`` on. Raises `OSError` if the disk is full.

        Otherwise a full disk would be noticed only after a part of the data was written.
        """
        if nbytes and self.folder is not None and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, at, nbytes)

    @explaining_open_files()
    def open(self, name: str) -> int:
        """Open a file and return its descriptor. Raises `FileNotFoundError` if there is no such file."""
        path = self.where(name)
        if self.folder is not None:
            return os.open(path, self._mode | os.O_CLOEXEC)
        if path not in self._in_memory:
            raise FileNotFoundError(path)
        return os.dup(self._in_memory[path].descriptor)

    @explaining_open_files()
    def replace(self, name: str, data: bytes) -> None:
        """Create the file ``name``, or replace it atomically. The data are on disk when this returns."""
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

    def close(self) -> None:
        """Free all files in memory."""
        self._in_memory.clear()

    def names(self) -> list[str]:
        """Return the names of all files that start with the prefix, sorted and without the prefix."""
        if self.folder is not None:
            found = [path.name for path in self.folder.iterdir() if path.is_file()]
        else:
            found = list(self._in_memory)
        return sorted(name.removeprefix(self.prefix) for name in found if name.startswith(self.prefix))

    def sync(self, files: Iterable[int]) -> None:
        """Block until all data that were written to these descriptors are on disk, where they survive a power cut."""
        if self.folder is not None:
            for file in files:
                os.fdatasync(file) if hasattr(os, "fdatasync") else os.fsync(file)

    def take(
        self, source: Files, name: str, nbytes: int | None = None, *, parts: Iterable[tuple[int, int]] = ()
    ) -> None:
        """Add the file ``name`` of ``source`` under the same name, as a hard link if possible and else as a copy.

        With ``nbytes``, the new file is always a copy, of the first ``nbytes``. With ``parts``, it is always a copy of
        the same size. It has only the bytes from ``begin`` to ``end`` - 1 for each part ``(begin, end)``, and zeros
        elsewhere, which occupy no disk space. A hard link survives a power cut only after the caller has synced this
        folder. Raises `FileExistsError` if a file of this name exists.
        """
        if nbytes is None and not parts and self.folder is not None and source.folder is not None:
            try:
                os.link(source.where(name), self.where(name))
                return
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
        file, target = source.open(name), self.create(name)
        try:
            size = os.fstat(file).st_size if nbytes is None else nbytes
            os.ftruncate(target, size)
            for at, part_end in parts or [(0, size)]:
                while at < part_end:
                    try:
                        # holes of a sparse file are skipped, because a new segment consists mostly of one hole
                        at = os.lseek(file, at, os.SEEK_DATA)
                    except OSError:  # there are no data behind `at`
                        break
                    end = min(part_end, os.lseek(file, at, os.SEEK_HOLE))
                    while at < end and (data := os.pread(file, min(1 << 22, end - at), at)):
                        at += os.pwrite(target, data, at)
            self.sync([target])
        finally:
            os.close(file)
            os.close(target)

    def read_text(self, name: str) -> str:
        """Return the content of a file as text. Raises `FileNotFoundError` if there is no such file."""
        file = self.open(name)
        try:
            return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
        finally:
            os.close(file)

    def write_text(self, name: str, text: str) -> None:
        """Create a file with the content ``text``, and sync it to disk. If writing fails, the file is removed."""
        file = self.create(name)
        try:
            write_all(file, memoryview(text.encode()), 0)
            self.sync([file])
        except BaseException:
            self.remove(name)
            raise
        finally:
            os.close(file)


class CheckedJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class for the content of a JSON file that has a checksum of its other values.

    Instances are immutable. `msgspec.structs.replace` makes a changed copy.
    """

    crc: int = 0  # CRC-32 of the JSON with ``crc`` = 0; 0 in memory, where it is not used

    def encode(self) -> bytes:
        return msgspec.json.encode(replace(self, crc=crc32(msgspec.json.encode(self))))

    @classmethod
    def decode(cls, text: str | bytes) -> Self:
        """Return the content of a file. Raises `msgspec.DecodeError` if it is not what `encode` has returned."""
        found = msgspec.json.decode(text, type=cls)
        content = replace(found, crc=0)
        if crc32(msgspec.json.encode(content)) != found.crc:
            raise msgspec.DecodeError("its checksum does not match")
        return content


def write_all(file: int, data: memoryview, at: int) -> None:
    """Write all of ``data`` to a file at offset ``at``. `os.pwrite` is repeated, because it may write only a part."""
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
