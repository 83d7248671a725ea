"""What is costly to make and the same every time is kept on disk, by content."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gleanrl.errors import UserError


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


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``path`` whole or not at all, also when several processes write it at once.

    Raises:
        UserError: the disk is full or the folder cannot be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; free some space or set GLEANRL_CACHE") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)  # gone already where the rename succeeded
