"""The folder for results that are cached across runs, because they are slow to compute and do not change."""

from __future__ import annotations

import os
from pathlib import Path

from gleanrl.utils.errors import UserError


def cache_dir(name: str) -> Path:
    """Return the folder ``name``, for one kind of cached result. It is created if it is missing.

    It lies in the folder that the environment variable GLEANRL_CACHE names, by default ``~/.cache/gleanrl``. Raises
    `UserError` if it cannot be created.
    """
    root = os.environ.get("GLEANRL_CACHE")
    folder = (Path(root).expanduser() if root else Path.home() / ".cache" / "gleanrl") / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cache folder {folder}: {error.strerror}; set GLEANRL_CACHE to a folder that you can write to"
        ) from error
    return folder
