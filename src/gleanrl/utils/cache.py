"""What is costly to make and the same every time is kept on disk, by content."""

from __future__ import annotations

import os
from pathlib import Path

from gleanrl.utils.errors import UserError


def cache_dir(name: str) -> Path:
    """The folder of one kind of cached thing, made if need be, under GLEANRL_CACHE or ~/.cache/gleanrl."""
    root = os.environ.get("GLEANRL_CACHE")
    folder = (Path(root).expanduser() if root else Path.home() / ".cache" / "gleanrl") / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cache folder {folder}: {error.strerror}; set GLEANRL_CACHE to a folder that you can write to"
        ) from error
    return folder
