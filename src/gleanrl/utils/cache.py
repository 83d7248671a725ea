"""The folder for cached results, which are costly to compute and always the same."""

from __future__ import annotations

import os
from pathlib import Path

from gleanrl.utils.errors import UserError


def cache_dir(name: str) -> Path:
    """Return the folder for one kind of cached result, created if missing: under GLEANRL_CACHE or ~/.cache/gleanrl."""
    root = os.environ.get("GLEANRL_CACHE")
    folder = (Path(root).expanduser() if root else Path.home() / ".cache" / "gleanrl") / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cache folder {folder}: {error.strerror}; set GLEANRL_CACHE to a folder that you can write to"
        ) from error
    return folder
