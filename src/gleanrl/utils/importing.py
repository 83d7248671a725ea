"""Import paths: how a user names an object of their own, `package.module:Name` or `file.py:Name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from gleanrl.utils.errors import UserError
from gleanrl.utils.text import nearest

_LARGE = 64 << 20  # bytes of a file that is not read to tell whether it has changed
_files: dict[str, str] = {}  # module name -> file, of every module loaded from a file by its path


def load_object(path: str) -> Any:
    """The object that ``path`` names: `package.module:Name` or `file.py:Name`; `Name` may be dotted.

    A relative file is looked up from the current directory. The same file is imported once.

    Raises:
        UserError: the path is malformed, the file, module or a package it imports is missing, or the
            name is not there (the message gives the nearest that is).
    """
    location, colon, name = path.rpartition(":")
    if not colon or not location or not name:
        raise UserError(f"import path {path!r}: write `package.module:Name` or `file.py:Name`")
    module = _load_file(Path(location), path) if location.endswith(".py") else _load_module(location, path)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"import path {path!r}: {location} has no {part!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def load_file(path: str) -> ModuleType:
    """The module that a ``file.py`` is, imported once. Raises `UserError` as `load_object` does."""
    return _load_file(Path(path), path)


def loaded_files() -> Mapping[str, str]:
    """Modules that came from files, name to absolute path: what another process needs to unpickle their objects."""
    return dict(_files)


def restore_files(files: Mapping[str, str]) -> None:
    """Import in this process what `loaded_files` listed in another one."""
    for file in files.values():
        _load_file(Path(file), file)


def file_versions(value: Any) -> list[str]:
    """What changes with the files that ``value`` (also deep inside) names: code by import path, as a class or a
    function, and files of data. Code that is imported in turn does not count; of a large file size and age do."""
    if isinstance(value, Mapping):
        return [found for entry in value.values() for found in file_versions(entry)]
    if isinstance(value, list | tuple):
        return [found for entry in value for found in file_versions(entry)]
    with suppress(OSError, ValueError):  # a text that can be no file's name
        if (file := _file_of(value)) is not None:
            about = file.stat()
            if about.st_size > _LARGE:
                return [f"{file.name} {about.st_size} {about.st_mtime_ns}"]
            return [f"{file.name} {hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()}"]
    return []


def _file_of(value: Any) -> Path | None:
    """None too of what is Glean RL's own, which has a version."""
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


def _load_file(file: Path, path: str) -> ModuleType:
    file = file.expanduser().resolve()
    # The name holds a hash of the whole path, so that two files of one name stay two modules.
    name = f"gleanrl_file_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise UserError(f"import path {path!r}: no file {file} (relative ones begin where the command is started)")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # always so for a .py file
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution, as `import` does: dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError):
            raise UserError(f"import path {path!r}: line {error.lineno}: {error.msg}") from error
        if isinstance(error, ModuleNotFoundError):
            raise UserError(f"import path {path!r}: {file.name} imports {error.name!r}, not installed here") from error
        raise
    _files[name] = str(file)
    return module


def _load_module(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(missing + "."):
            raise UserError(f"import path {path!r}: no module {missing!r}{_nearest_module(missing)}") from error
        raise UserError(f"import path {path!r}: {name} imports {missing!r}, which is not installed") from error
    except SyntaxError as error:
        raise UserError(f"import path {path!r}: {error.filename} line {error.lineno}: {error.msg}") from error


def _nearest_module(name: str) -> str:
    """The closest sibling inside a package that does exist."""
    package, _, leaf = name.rpartition(".")
    if not package or package not in sys.modules:
        return ""
    import pkgutil

    siblings = [m.name for m in pkgutil.iter_modules(getattr(sys.modules[package], "__path__", []))]
    return nearest(leaf, siblings)
