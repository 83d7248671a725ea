"""Imports objects that a user names by import path, `package.module:Name` or `file.py:Name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from gleanrl.utils.errors import UserError
from gleanrl.utils.text import nearest

_LARGE = 64 << 20  # bytes; a larger file is not read to find out whether it has changed
_files: dict[str, str] = {}  # module name -> file, for every module that was loaded by the path of its file


def load_object(path: str) -> Any:
    """Return the object that ``path`` names: `package.module:Name` or `file.py:Name`; `Name` may be dotted.

    A relative file name is relative to the current directory. The same file is imported only once.

    Raises:
        UserError: the path is malformed; the file, the module or a package that it imports is missing; or the
            module has no such name (the message suggests the nearest name).
    """
    location, colon, name = path.rpartition(":")
    if not colon or not location or not name:
        raise UserError(f"import path {path!r}: write `package.module:Name` or `file.py:Name`")
    found: Any = load_file(location, path) if location.endswith(".py") else _load_module(location, path)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"import path {path!r}: {location} has no {part!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def load_file(file: str, path: str | None = None) -> ModuleType:
    """Return the module in a ``file.py``, imported once. ``path`` is the name in messages, by default the file.

    Raises:
        UserError: the file or a package that it imports is missing, or it is not valid Python.
    """
    location, path = Path(file).expanduser().resolve(), path or file
    # The name holds a hash of the whole path, so that two files of one name stay two modules.
    name = f"gleanrl_file_{location.stem}_{hashlib.blake2b(str(location).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not location.is_file():
        raise UserError(f"import path {path!r}: no file {location} (relative ones begin where the command is started)")
    spec = importlib.util.spec_from_file_location(name, location)
    assert spec is not None  # always so for a .py file
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution, as `import` does, because dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError):
            raise UserError(f"import path {path!r}: line {error.lineno}: {error.msg}") from error
        if isinstance(error, ModuleNotFoundError):
            missing = f"{location.name} imports {error.name!r}, not installed here"
            raise UserError(f"import path {path!r}: {missing}") from error
        raise
    _files[name] = str(location)
    return module


def loaded_files() -> Mapping[str, str]:
    """Return the modules loaded by `load_file` (name -> absolute path), which another process needs to unpickle."""
    return dict(_files)


def restore_files(files: Mapping[str, str]) -> None:
    """Import in this process the ``files`` that `loaded_files` returned in another one."""
    for file in files.values():
        load_file(file)


def file_versions(value: Any) -> list[str]:
    """Return a text for each file that ``value`` names, at any depth. The text changes whenever the file changes.

    The files are data files, and source files of code that is named by import path, as a class or as a function. Code
    that these import is not included. The text holds a hash of the content, for a large file its size and time.
    """
    if isinstance(value, Mapping):
        return [found for entry in value.values() for found in file_versions(entry)]
    if isinstance(value, list | tuple):
        return [found for entry in value for found in file_versions(entry)]
    with suppress(OSError, ValueError):  # raised for a text that cannot be a file name
        if (file := _find_file(value)) is not None:
            about = file.stat()
            if about.st_size > _LARGE:
                return [f"{file.name} {about.st_size} {about.st_mtime_ns}"]
            return [f"{file.name} {hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()}"]
    return []


def _find_file(value: Any) -> Path | None:
    """Return the file that a value names or comes from; None if there is none.

    Glean RL's own code has no file here, because its version is known.
    """
    if not isinstance(value, str):
        name = getattr(value, "__module__", None)
    else:
        location, colon, _ = value.rpartition(":")
        file = Path(location if colon and location.endswith(".py") else value).expanduser()
        if file.is_file():
            return file
        name = location
    own = isinstance(name, str) and name.partition(".")[0] == __name__.partition(".")[0]
    source = None if own or name in (None, "builtins") else getattr(sys.modules.get(str(name)), "__file__", None)
    return Path(source) if source and source.endswith(".py") else None


def _load_module(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name != missing and not name.startswith(f"{missing}."):
            raise UserError(f"import path {path!r}: {name} imports {missing!r}, which is not installed") from error
        package, _, leaf = missing.rpartition(".")
        siblings: list[str] = []
        if package in sys.modules:
            siblings = [m.name for m in pkgutil.iter_modules(getattr(sys.modules[package], "__path__", []))]
        raise UserError(f"import path {path!r}: no module {missing!r}{nearest(leaf, siblings)}") from error
    except SyntaxError as error:
        raise UserError(f"import path {path!r}: {error.filename} line {error.lineno}: {error.msg}") from error
