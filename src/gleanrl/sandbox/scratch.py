"""The folder of a session that lies on a file system of the machine's: how much is in it, and how it ends.

Only Python's library: the server of sandboxes holds nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

from gleanrl.sandbox.limits import MAX_FILES, Limits

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MB = 1 << 20


def make(inside: str) -> str:
    """A folder that nobody else can read. Raises OSError."""
    path = os.path.join(inside, f"gleanrl-sandbox-{os.urandom(8).hex()}")
    os.mkdir(path, 0o700)
    return path


def exceeded(process: int, folder: str, limits: Limits) -> str | None:
    """Why the process of a session has to end, or None. Looks at no more files than it may have."""
    try:
        if _threads(process) > limits.threads + 1:
            return f"it had more than {limits.threads} threads"
        used = 0
        for number, size in enumerate((*_nameless(process), *_named(folder))):
            used += size
            if number >= MAX_FILES:
                return f"it had more than {MAX_FILES} files"
            if used > limits.disk_mb * _MB:
                return f"its files took more than {limits.disk_mb} MB"
    except (FileNotFoundError, ProcessLookupError):  # it has just ended, or removed what it had just made
        return None
    except OSError as error:  # a path longer than the kernel takes
        return f"its files cannot be looked at: {error.strerror}"
    return None


def remove(folder: str) -> None:
    """With all that is in it, however deep: each folder inside is moved to the top before it is emptied.

    Raises OSError where something cannot be removed.
    """
    mark, numbers, waiting = os.urandom(8).hex(), count(), [""]
    top = os.open(folder, _FOLDER)
    try:
        while waiting:
            inner = waiting.pop()
            descriptor = os.open(inner, _FOLDER, dir_fd=top) if inner else top
            try:
                for name in os.listdir(descriptor):
                    try:
                        os.unlink(name, dir_fd=descriptor)
                    except IsADirectoryError:
                        _take(name, descriptor)
                        waiting.append(f"{mark}-{next(numbers)}")
                        os.rename(name, waiting[-1], src_dir_fd=descriptor, dst_dir_fd=top)
            finally:
                if inner:
                    os.close(descriptor)
            if inner:
                os.rmdir(inner, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(folder)


def _take(name: str, inside: int) -> None:
    """The rights to a folder that was made without them."""
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
    finally:
        os.close(descriptor)


def _threads(process: int) -> int:
    with open(f"/proc/{process}/status") as status:
        return next((int(line.split()[1]) for line in status if line.startswith("Threads:")), 0)


def _named(folder: str) -> Iterator[int]:
    """Bytes of each file and folder that is in it."""
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    yield entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)


def _nameless(process: int) -> Iterator[int]:
    """Bytes of each open file that is in no folder any more."""
    for name in os.listdir(f"/proc/{process}/fd"):
        with suppress(FileNotFoundError):
            held = os.stat(f"/proc/{process}/fd/{name}")
            if not held.st_nlink:
                yield held.st_blocks * 512
