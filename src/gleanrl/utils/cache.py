"""The folder for results that are cached across runs, because they are slow to compute and do not change."""

from __future__ import annotations

import os
from pathlib import Path

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
