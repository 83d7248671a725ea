"""Imports objects that a user names by import path, `package.module:Name` or `file.py:Name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from gleanrl.utils.errors import UserError, describe
from gleanrl.utils.text import nearest

_LARGE = 64 << 20  # size in bytes; of a larger file, size and time are compared instead of the content
_files: dict[str, str] = {}  # absolute path of each file that `load_file` has loaded, keyed by module name


def load_object(path: str, implements: type | None = None) -> Any:
    """Return the object that ``path`` names, in the form `package.module:Name` or `file.py:Name`.

    `Name` may be dotted, as in `Class.method`. A relative file name is relative to the current directory. The same file
    is imported only once.

    Args:
        implements: a protocol or an abstract class. If the object is a class, it must have the methods that this
            requires.

    Raises:
        UserError: the path is malformed; the file, the module or a package that it imports is missing; the code is not
            valid Python or raises an error; the module has no such name (the message suggests the nearest name); or
            the class lacks a method.
    """
    location, colon, name = path.rpartition(":")
    if not colon or not location or not name:
        raise UserError(f"import path {path!r}: write `package.module:Name` or `file.py:Name`")
    found: Any = load_file(location, path) if location.endswith(".py") else _load_module(location, path)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"import path {path!r}: {location} has no {part!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    if implements is not None and isinstance(found, type):
        abstract = getattr(found, "__abstractmethods__", ())
        needed = implements.__abstractmethods__ or [  # type: ignore[attr-defined] - empty for a protocol
            name for name, value in vars(implements).items() if callable(value) and not name.startswith("_")
        ]
        missing = [name for name in needed if name in abstract or not hasattr(found, name)]
        if missing:
            raise UserError(f"import path {path!r}: {found.__name__} does not implement {', '.join(sorted(missing))}")
    return found


def load_file(file: str, path: str | None = None) -> ModuleType:
    """Import a Python file by its path and return the module. The same file is imported only once.

    Error messages quote ``path``, which is the import path that the user gave; by default they quote ``file``.

    Raises:
        UserError: the file or a package that it imports is missing, or the file is not valid Python or raises an error.
    """
    location, path = Path(file).expanduser().resolve(), path or file
    # The name holds a hash of the whole path, so that files with equal names in different folders are two modules.
    name = f"gleanrl_file_{location.stem}_{hashlib.blake2b(str(location).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not location.is_file():
        raise UserError(f"import path {path!r}: no file {location} (relative paths start at the current directory)")
    spec = importlib.util.spec_from_file_location(name, location)
    assert spec is not None  # it is None only for an unknown file type, not for a .py file
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before execution, as `import` does, because dataclasses and pickle look the module up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ModuleNotFoundError):
            missing = f"{location.name} imports {error.name!r}, not installed here"
            raise UserError(f"import path {path!r}: {missing}") from error
        _refuse(path, error, str(location))
        raise
    _files[name] = str(location)
    return module


def loaded_files() -> Mapping[str, str]:
    """Return the absolute path of each file that `load_file` has loaded, keyed by the name of its module.

    Another process must pass them to `restore_files` before it can unpickle objects of their classes.
    """
    return dict(_files)


def restore_files(files: Mapping[str, str]) -> None:
    """Let this process import the ``files`` that `loaded_files` returned in another process.

    A file is imported when its module is first needed, for example by `pickle.loads`. So a worker process does not
    spend time and memory on files that only other parts of the run use. An import raises the errors of `load_file`.
    """
    _restored.files.update(files)
    if _restored not in sys.meta_path:
        sys.meta_path.append(_restored)


class _RestoredFiles(MetaPathFinder):
    """Finds the modules of `restore_files`. ``files`` has the path of each file, keyed by module name."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.files.get(fullname)
        return None if file is None else ModuleSpec(fullname, _RestoredFile(file))


class _RestoredFile(Loader):
    """Loads one file of `restore_files`."""

    def __init__(self, file: str) -> None:
        self._file = file

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return load_file(self._file)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because `load_file` has already executed the module."""


_restored = _RestoredFiles()


def file_versions(value: Any) -> list[str]:
    """Return a text for each file that ``value`` refers to, at any depth. The text changes whenever the file changes.

    The path of a file refers to that file. The import path of an object, a class and a function refer to the source
    file that defines them. Source files of Glean RL and modules that a source file imports are not included. The text
    consists of the name of the file and a hash of its content, or for a file above 64 MiB its size and modification
    time.
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
    """Return the data file or source file that ``value`` refers to (see `file_versions`), or None.

    The result is None for an object of Glean RL itself, because the version of the package identifies its code.
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
    except BaseException as error:
        if name.partition(".")[0] != __name__.partition(".")[0]:  # an error of Glean RL itself is a bug
            _refuse(path, error, name)
        raise


def _refuse(path: str, error: BaseException, source: str) -> None:
    """Raise `UserError` for an error in the code that is imported. Return for an error that is passed on unchanged.

    ``source`` is the file or the module that is imported.
    """
    if isinstance(error, SyntaxError) and error.lineno:
        raise UserError(f"import path {path!r}: {error.msg} ({error.filename}:{error.lineno})") from error
    if isinstance(error, SyntaxError):  # the decoder knows no line
        raise UserError(f"import path {path!r}: {source}: {error.msg}; is the file saved as UTF-8?") from error
    if isinstance(error, Exception | SystemExit) and not isinstance(error, UserError):
        raise UserError(f"import path {path!r}: {describe(error)}") from error
