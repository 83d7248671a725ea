"""The folder for results that are cached across runs, because they are slow to compute and do not change."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError


def cache_dir(name: str) -> Path:
    """Return the folder ``name``, for one kind of cached result. It is created if it is missing.

    It lies in the folder that the environment variable GLEANRL_CACHE names. The default is ``gleanrl`` in the folder
    that XDG_CACHE_HOME names, or in ``~/.cache``. Raises `UserError` if it cannot be created.
    """
    root = os.environ.get("GLEANRL_CACHE")
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():  # the XDG specification says that a relative path must be ignored
        caches = Path.home() / ".cache"
    folder = (Path(root).expanduser() if root else caches / "gleanrl") / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cache folder {folder}: {error.strerror}; set GLEANRL_CACHE to a folder that you can write to"
        ) from error
    return folder


@contextmanager
def one_at_a_time(folder: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let one process at a time make the cached ``folder`` inside the ``with`` block, if it is missing; others wait.

    The folder must be written by `gleanrl.utils.atomic.directory`. What a killed process has left of it is removed.
    After a wait the folder exists, unless the other process has failed.

    Args:
        on_wait: called before the wait, if there is one.
    """
    if folder.exists():  # it is complete; a cache that it can only read is enough for a process that makes nothing
        yield
        return
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        # The operating system releases the lock if the process is killed.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in atomic.left_behind(folder):
            shutil.rmtree(left, ignore_errors=True)
        yield
