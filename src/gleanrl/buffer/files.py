"""Where a buffer's files are: a folder, or memory. Both give file descriptors, so nothing else knows the difference."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # never an old file: it may be a link to a checkpoint's
NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class Files(Protocol):
    """Files by name."""

    on_disk: bool

    def where(self, name: str) -> str:
        """What to call the file in a message."""
        ...

    def create(self, name: str, nbytes: int = 0) -> int:
        """A new file of that length, without space of its own. Raises `OSError` where it fails, and leaves nothing.

        One that is there already is a `FileExistsError`: nothing that was written is ever written over by another.
        """
        ...

    def reserve(self, file: int, at: int, nbytes: int) -> None:
        """Space on the disk for a part of a file, so that a full one is met now. Raises `OSError`."""
        ...

    def open(self, name: str) -> int:
        """Raises `FileNotFoundError`."""
        ...

    def is_still(self, name: str, file: int) -> bool:
        """Whether the name is still that of the open file; it may not be, where it was replaced."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """The file's new content, durable: the old one or the new one is there, never half of one."""
        ...

    def remove(self, name: str) -> None:
        """Who has it open keeps it."""
        ...

    def names(self) -> list[str]: ...

    def sync(self, files: Iterable[int]) -> None:
        """Return when their data would survive a power cut."""
        ...

    def share(self, name: str, folder: Path, nbytes: int | None = None) -> None:
        """The file's content in another folder too. Only its first ``nbytes``, as a copy; else a link, if possible."""
        ...

    def bring(self, source: Path, name: str, nbytes: int | None = None) -> None:
        """The other way round: the file ``source`` here too. Raises `FileExistsError` as `create` does."""
        ...


class DiskFiles:
    """Files in a folder."""

    on_disk = True

    def __init__(self, folder: Path, *, writable: bool) -> None:
        self._folder, self._mode = folder, os.O_RDWR if writable else os.O_RDONLY

    def where(self, name: str) -> str:
        return str(self._folder / name)

    def create(self, name: str, nbytes: int = 0) -> int:
        path = self._folder / name
        file = os.open(path, NEW, 0o644)
        try:
            os.ftruncate(file, nbytes)
            atomic.sync(self._folder)
        except BaseException:
            os.close(file)
            path.unlink()
            raise
        return file

    def reserve(self, file: int, at: int, nbytes: int) -> None:
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, at, nbytes)

    def open(self, name: str) -> int:
        return os.open(self._folder / name, self._mode | os.O_CLOEXEC)

    def is_still(self, name: str, file: int) -> bool:
        try:
            return os.path.samestat(os.stat(f"{self._folder}/{name}"), os.fstat(file))
        except FileNotFoundError:
            return False

    def replace(self, name: str, data: bytes) -> None:
        atomic.write_bytes(self._folder / name, data)

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir() if path.is_file())

    def sync(self, files: Iterable[int]) -> None:
        for file in files:
            os.fdatasync(file) if hasattr(os, "fdatasync") else os.fsync(file)

    def share(self, name: str, folder: Path, nbytes: int | None = None) -> None:
        _link_or_copy(self._folder / name, folder / name, nbytes)

    def bring(self, source: Path, name: str, nbytes: int | None = None) -> None:
        _link_or_copy(source, self._folder / name, nbytes)
        atomic.sync(self._folder)


class MemoryFiles:
    """Files without a folder, gone with the process."""

    on_disk = False

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    def where(self, name: str) -> str:
        return name

    def create(self, name: str, nbytes: int = 0) -> int:
        if name in self._files:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        if hasattr(os, "memfd_create"):
            file = os.memfd_create(name, os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as unnamed:  # already without a name
                file = os.dup(unnamed.fileno())
        os.ftruncate(file, nbytes)
        self._files[name] = os.dup(file)
        return file

    def reserve(self, file: int, at: int, nbytes: int) -> None:
        pass

    def open(self, name: str) -> int:
        if name not in self._files:
            raise FileNotFoundError(name)
        return os.dup(self._files[name])

    def is_still(self, name: str, file: int) -> bool:
        return False

    def replace(self, name: str, data: bytes) -> None:
        self.remove(name)
        file = self.create(name)
        write_all(file, memoryview(data), 0)
        os.close(file)

    def remove(self, name: str) -> None:
        if (file := self._files.pop(name, None)) is not None:
            os.close(file)

    def names(self) -> list[str]:
        return sorted(self._files)

    def sync(self, files: Iterable[int]) -> None:
        pass

    def share(self, name: str, folder: Path, nbytes: int | None = None) -> None:
        source = self.open(name)
        try:
            _copy(source, folder / name, nbytes)
        finally:
            os.close(source)

    def bring(self, source: Path, name: str, nbytes: int | None = None) -> None:
        file, target = os.open(source, os.O_RDONLY | os.O_CLOEXEC), self.create(name)
        try:
            _copy_data(file, target, nbytes)
        finally:
            os.close(file)
            os.close(target)

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)


class Named:
    """Files whose names begin with a prefix."""

    def __init__(self, files: Files, prefix: str) -> None:
        self._files, self._prefix, self.on_disk = files, prefix, files.on_disk

    def where(self, name: str) -> str:
        return self._files.where(self._prefix + name)

    def create(self, name: str, nbytes: int = 0) -> int:
        return self._files.create(self._prefix + name, nbytes)

    def reserve(self, file: int, at: int, nbytes: int) -> None:
        self._files.reserve(file, at, nbytes)

    def open(self, name: str) -> int:
        return self._files.open(self._prefix + name)

    def is_still(self, name: str, file: int) -> bool:
        return self._files.is_still(self._prefix + name, file)

    def replace(self, name: str, data: bytes) -> None:
        self._files.replace(self._prefix + name, data)

    def remove(self, name: str) -> None:
        self._files.remove(self._prefix + name)

    def names(self) -> list[str]:
        length = len(self._prefix)
        return [name[length:] for name in self._files.names() if name.startswith(self._prefix)]

    def sync(self, files: Iterable[int]) -> None:
        self._files.sync(files)

    def share(self, name: str, folder: Path, nbytes: int | None = None) -> None:
        self._files.share(self._prefix + name, folder, nbytes)

    def bring(self, source: Path, name: str, nbytes: int | None = None) -> None:
        self._files.bring(source, self._prefix + name, nbytes)


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
    """Without the holes: most of a new segment is one."""
    size = os.fstat(source).st_size if nbytes is None else nbytes
    os.ftruncate(target, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # nothing but a hole follows
            return
        end = min(size, os.lseek(source, at, os.SEEK_HOLE))
        while at < end:
            data = os.pread(source, min(1 << 22, end - at), at)
            if not data:
                return
            at += os.pwrite(target, data, at)


def write_all(file: int, data: memoryview, at: int) -> None:
    """All of the bytes from ``at`` on: one call may write fewer than it is given."""
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def write_whole(files: Files, name: str, text: str) -> None:
    """A new file with this text, durable; none where that fails."""
    file = files.create(name)
    try:
        write_all(file, memoryview(text.encode()), 0)
        files.sync([file])
    except BaseException:
        files.remove(name)
        raise
    finally:
        os.close(file)


def read_whole(files: Files, name: str) -> str:
    """Raises `FileNotFoundError`."""
    file = files.open(name)
    try:
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
    finally:
        os.close(file)


def lock(folder: Path) -> int:
    """The folder's writer lock, held until the file is closed. Raises `UserError` where somebody else writes there."""
    import fcntl

    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise UserError(f"{folder}: another process writes into this buffer; open it with read_only=True") from None
    return file
