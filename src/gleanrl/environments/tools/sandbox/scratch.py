"""The folder of a session that lies on a file system of the machine's: how much is in it, and how it ends.

Only Python's library: the server of sandboxes holds nothing else.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress

from gleanrl.environments.tools.sandbox.limits import MAX_FILES, Limits

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEEPEST = 100  # folder in a folder: what is deeper takes long to look at
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
    except OSError as error:
        return f"its files cannot be looked at: {error.strerror}"
    return None


def remove(folder: str) -> None:
    """With all that is in it, however deep: one folder is open at a time.

    Raises OSError where something cannot be removed.
    """
    here, names = os.open(folder, _FOLDER), [folder]
    left = [_without_files(here)]  # the folders still in each of those on the way down
    try:
        while left:
            if left[-1]:
                names.append(left[-1].pop())
                there = _opened(names[-1], here)
                left.append(_without_files(there))
            else:
                left.pop()
                there = os.open("..", _FOLDER, dir_fd=here)
            os.close(here)
            here = there
            if len(names) > len(left):
                os.rmdir(os.path.basename(names.pop()), dir_fd=here)
    finally:
        os.close(here)


def _without_files(descriptor: int) -> list[str]:
    """The folders in a folder, once all else is removed from it."""
    folders = []
    for name in os.listdir(descriptor):
        try:
            os.unlink(name, dir_fd=descriptor)
        except IsADirectoryError:
            folders.append(name)
    return folders


def _opened(name: str, inside: int) -> int:
    """A folder, with the rights to it, which it may have been made without."""
    named = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
    try:
        if os.fstat(named).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{named}", 0o700)
        return os.open(name, _FOLDER, dir_fd=inside)
    finally:
        os.close(named)


def _threads(process: int) -> int:
    with open(f"/proc/{process}/status") as status:
        return next((int(line.split()[1]) for line in status if line.startswith("Threads:")), 0)


def _named(folder: str) -> Iterator[int]:
    """Bytes of each file and folder that is in it."""
    waiting = [(folder, 0)]
    while waiting:
        path, depth = waiting.pop()
        if depth > _DEEPEST:
            raise OSError(errno.ENAMETOOLONG, f"folders in folders, more than {_DEEPEST}")
        with suppress(FileNotFoundError), os.scandir(path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    yield entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))


def _nameless(process: int) -> Iterator[int]:
    """Bytes of each open file that is in no folder any more. A thread may have descriptors of its own."""
    found = {}
    for thread in os.listdir(f"/proc/{process}/task"):
        with suppress(FileNotFoundError):
            for name in os.listdir(f"/proc/{process}/task/{thread}/fd"):
                with suppress(FileNotFoundError):
                    held = os.stat(f"/proc/{process}/task/{thread}/fd/{name}")
                    if not held.st_nlink:
                        found[held.st_dev, held.st_ino] = held.st_blocks * 512
    yield from found.values()
