"""Writes files and folders that are either complete or absent.

The data are written to a temporary file or folder, which is synced to disk and then renamed. So a reader, or a run that
is resumed after a crash or a power cut, never sees a file that is only partly written.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gleanrl.utils.errors import UserError
from gleanrl.utils.text import format_bytes

TEMPORARY_PREFIX = ".partial-"


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write ``data`` to the file ``path``, replacing an old file of that name.

    Raises `UserError` if the disk is full. If writing fails, the old file is unchanged.
    """
    with file(path, needed=len(data)) as partial:
        partial.write_bytes(data)


def write_text(path: Path | str, text: str) -> None:
    """Write ``text`` to the file ``path`` as UTF-8, in the same way as `write_bytes`."""
    write_bytes(path, text.encode())


@contextmanager
def file(path: Path | str, *, needed: int | None = None) -> Iterator[Path]:
    """Yield the path of a temporary file to write. After the ``with`` block it is renamed to ``path``.

    If the block raises, the temporary file is removed instead. Missing parent folders of ``path`` are created.

    Args:
        path: the file to create or replace.
        needed: size of the data in bytes, if known. It is used only in the error message for a full disk.

    Raises:
        UserError: the disk is full.
    """
    path = Path(path)
    create_folder(path.parent)
    partial = _partial(path)
    try:
        with _explaining_full_disk(path, partial, needed):
            yield partial
            sync(partial)
            os.replace(partial, path)
            sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def directory(path: Path | str, *, needed: int | None = None) -> Iterator[Path]:
    """Yield an empty temporary folder to fill. After the ``with`` block it takes the place of the folder ``path``.

    If the block raises, the temporary folder is removed instead. Arguments and errors are those of `file`. Who may read
    the folder may read its files: some libraries write files that only their owner can read.

    The old and the new folder are exchanged in one step if the operating system supports this. Otherwise the old folder
    is renamed, then the new one. After a crash between these two renames, ``path`` is missing, and the old folder is
    found next to it under a name that begins with ``.partial-``.
    """
    path = Path(path)
    create_folder(path.parent)
    partial = _partial(path)
    _open_folders.add(partial.name)
    try:
        with _explaining_full_disk(path, partial, needed):
            partial.mkdir()
            yield partial
            mode = partial.stat().st_mode
            for entry in sorted(partial.rglob("*"), reverse=True):
                if entry.is_file():
                    entry.chmod(mode & 0o666)
                sync(entry)
            sync(partial)
            _put(partial, path)
            sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after an error the new folder, after an exchange the old one
        _open_folders.discard(partial.name)


def create_folder(path: Path) -> None:
    """Create a folder and its missing parents. They are on disk when this returns, so that they survive a power cut.

    Raises `UserError` if ``path`` or a parent is a file.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{path}: a file is there, or at one of its parents; name another folder") from None
    for folder in missing:
        sync(folder.parent)


def left_behind(path: Path) -> list[Path]:
    """Return the temporary folders next to ``path`` that are left from processes that were killed while they wrote it.

    Call this only if no other process is writing ``path``, because the folder that it fills would be returned too.
    """
    found = path.parent.glob(f"{TEMPORARY_PREFIX}????????-{glob.escape(path.name)}")
    return sorted(left for left in found if left.name not in _open_folders)


_open_folders = set[str]()  # names of the temporary folders that this process is filling


def _put(partial: Path, path: Path) -> None:
    """Rename the folder ``partial`` to ``path``, replacing an old folder of that name."""
    if not path.exists():
        os.replace(partial, path)
        return
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # the constants AT_FDCWD and RENAME_EXCHANGE of Linux
    if swap is not None and swap(here, os.fsencode(partial), here, os.fsencode(path), exchange) == 0:
        return  # the old folder now has the temporary name, and the caller removes it
    aside = _partial(path)
    os.replace(path, aside)
    try:
        os.replace(partial, path)
    except BaseException:
        os.replace(aside, path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _partial(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex[:8]}-{path.name}")


def sync(path: Path) -> None:
    """Flush the content of a file, or the list of names in a folder, to disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explaining_full_disk(path: Path, partial: Path, needed: int | None) -> Iterator[None]:
    """Raise `UserError` if the body fails because the disk is full; let any other error pass.

    A full disk is recognised even if a library has wrapped the `OSError` or has kept only its text.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
            if full or "No space left on device" in str(cause):
                break
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        files = [partial] if partial.is_file() else partial.rglob("*")
        written = sum(file.stat().st_size for file in files if file.is_file())
        if needed is not None:
            need = f"{format_bytes(needed)} needed, "
        else:  # the library that failed may have written nothing, or have removed what it wrote
            need = f"more than {format_bytes(written)} needed, " if written else ""
        free = format_bytes(shutil.disk_usage(path.parent).free + written)
        raise UserError(
            f"{path}: the disk is full: {need}{free} free; free some space or choose another folder"
        ) from error
