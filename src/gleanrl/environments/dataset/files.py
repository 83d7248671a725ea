"""Reads the rows of a data set: JSONL and JSON files, parquet files, a Hugging Face data set.

A `Source` is read from its start, as far as needed; any row can be read again by its position. So a file of a million
rows opens at once, and a row costs eight bytes of memory.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from gleanrl.utils.errors import UserError
from gleanrl.utils.text import first_line, nearest

Row = dict[str, Any]
FILES = (".jsonl", ".json", ".parquet")
_ROW_GROUPS = 4  # of a parquet file that stay in memory
_BATCH = 1024  # rows that are made Python objects together
_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?\Z")


class Source(Protocol):
    """Rows in order. A position is a number by which the source finds the row again."""

    @property
    def version(self) -> str:
        """Changes with its content."""
        ...

    def scan(self) -> Iterator[tuple[int, Row]]: ...
    def row(self, position: int) -> Row: ...
    def where(self, position: int) -> str:
        """The row, as an error message names it: its file and its number, counted from 1."""
        ...


def open_source(path: str | Sequence[str], split: str, subset: str | None, load: str) -> Source:
    """The rows at ``path``: a file, several (also `data/*.parquet`), a folder of Hugging Face's `save_to_disk`, or
    the id of a data set there. ``split``, ``subset`` and ``load`` (JSON, further arguments of `load_dataset`) are for
    those.

    Raises:
        UserError: there is no such thing, or a package that it needs is missing.
    """
    names = [path] if isinstance(path, str) else list(path)
    if not names:
        raise UserError("environment.options.path: name a file")
    if len(names) == 1 and not names[0].endswith(FILES):
        return _hugging_face(names[0], split, subset, load)
    files = [_file(file, _version(file)) for name in names for file in _found(name)]
    return files[0] if len(files) == 1 else _Several(files)


@lru_cache(maxsize=32)
def _file(file: str, version: str) -> Source:
    return _Parquet(file) if file.endswith(".parquet") else _json(file)


def _found(name: str) -> list[str]:
    if not name.endswith(FILES):
        raise UserError(f"environment.options.path: {name} is none of {', '.join(FILES)}")
    full = os.path.expanduser(name)
    found = sorted(glob.glob(full)) if glob.has_magic(full) and not os.path.exists(full) else [full]
    if not found:
        raise UserError(f"environment.options.path: no file matches {name}")
    for file in found:
        if not os.path.isfile(file):
            raise UserError(f"environment.options.path: no file {file}{_nearest_file(Path(file))}")
    return found


def _nearest_file(path: Path) -> str:
    return nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""


# --- JSON -----------------------------------------------------------------------------------------
def _json(file: str) -> Source:
    """The first character decides: some `.json` files have an object on each line, and some `.jsonl` files a list."""
    with open(file, "rb") as opened:
        start = opened.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    return _JsonList(file) if start == b"[" else _JsonLines(file)


class _JsonLines:
    """An object on each line. A position is where the line begins, in bytes."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._opened: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_file": self._file, "_opened": None}

    @property
    def version(self) -> str:
        return _version(self._file)

    def scan(self) -> Iterator[tuple[int, Row]]:
        position = 0
        with open(self._file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield position, self._parsed(line, number)
                position += len(line)

    def row(self, position: int) -> Row:
        if self._opened is None:
            self._opened = open(self._file, "rb")  # noqa: SIM115
        self._opened.seek(position)
        return self._parsed(self._opened.readline(), 0)

    def where(self, position: int) -> str:
        with open(self._file, "rb") as opened:
            return f"{self._file} line {opened.read(position).count(10) + 1}"

    def _parsed(self, line: bytes, number: int) -> Row:
        where = f"{self._file} line {number}" if number else f"{self._file} was changed while it was in use: a line"
        try:
            row = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
        except ValueError as error:
            raise UserError(f"{where} is not JSON: {first_line(error)}") from None
        if not isinstance(row, dict):
            raise UserError(f"{where} is {_kind(row)}, not an object")
        return row


class _JsonList:
    """A file that is one list of objects; it is read whole."""

    def __init__(self, file: str) -> None:
        self._file = file
        try:
            rows = json.loads(Path(file).read_bytes())
        except ValueError as error:
            raise UserError(f"{file} is not JSON: {first_line(error)}") from None
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise UserError(f"{file} row {number} is {_kind(row)}, not an object")
        self._rows: list[Row] = rows

    @property
    def version(self) -> str:
        return _version(self._file)

    def scan(self) -> Iterator[tuple[int, Row]]:
        yield from enumerate(self._rows)

    def row(self, position: int) -> Row:
        return self._rows[position]

    def where(self, position: int) -> str:
        return f"{self._file} row {position + 1}"


# --- parquet --------------------------------------------------------------------------------------
class _Parquet:
    """A position is the row's number. Reading a row reads its row group; a few groups stay in memory."""

    def __init__(self, file: str) -> None:
        try:
            import pyarrow as arrow
            import pyarrow.parquet as parquet
        except ImportError:
            raise UserError(f"{file}: parquet files need the extra: pip install 'gleanrl[parquet]'") from None
        self._file = file
        try:
            self._parquet = parquet.ParquetFile(file, memory_map=True)
        except (arrow.ArrowInvalid, OSError) as error:
            raise UserError(f"{file} is not a parquet file: {first_line(error)}") from None
        facts = self._parquet.metadata
        self._begins = [0, *accumulate(facts.row_group(i).num_rows for i in range(facts.num_row_groups))]
        self._held: dict[int, Any] = {}  # row group -> table, the one used last at the end

    def __reduce__(self) -> Any:
        return _Parquet, (self._file,)

    @property
    def version(self) -> str:
        return _version(self._file)

    def scan(self) -> Iterator[tuple[int, Row]]:
        number = 0
        for batch in self._parquet.iter_batches(batch_size=_BATCH):
            for row in batch.to_pylist():
                yield number, row
                number += 1

    def row(self, position: int) -> Row:
        group = next(i for i, end in enumerate(self._begins[1:]) if position < end)
        table = self._held.pop(group, None)
        if table is None:
            table = self._parquet.read_row_group(group)
        self._held[group] = table
        if len(self._held) > _ROW_GROUPS:
            del self._held[next(iter(self._held))]
        return table.slice(position - self._begins[group], 1).to_pylist()[0]

    def where(self, position: int) -> str:
        return f"{self._file} row {position + 1}"


# --- Hugging Face ---------------------------------------------------------------------------------
class _HuggingFace:
    """A position is the row's number; the rows lie in Arrow files that are mapped into memory."""

    def __init__(self, path: str, split: str, subset: str | None, load: str) -> None:
        self._arguments = (path, split, subset, load)
        self._name = f"{path} ({split})"
        try:
            import datasets
        except ImportError:
            raise UserError(f"{path}: Hugging Face data sets need the extra: pip install 'gleanrl[datasets]'") from None
        folder = Path(path).expanduser()
        saved = [name for name in ("dataset_dict.json", "state.json") if (folder / name).is_file()]
        if not folder.exists() and not _HUB.match(path):
            raise UserError(f"environment.options.path: no file or folder {path}")
        quiet = datasets.utils.logging
        shown = quiet.get_verbosity()
        quiet.set_verbosity_error()
        try:
            if saved:
                found: Any = datasets.load_from_disk(str(folder))
            else:
                found = datasets.load_dataset(str(folder) if folder.exists() else path, subset, **json.loads(load))
        except Exception as error:  # of many packages: no network, no such set, no such subset, a script
            raise UserError(f"environment.options.path: cannot load the data set {path}: {first_line(error)}") from None
        finally:
            quiet.set_verbosity(shown)
        if isinstance(found, Mapping):
            if split not in found:
                near = nearest(split, found) or f"; it has {', '.join(found)}"
                raise UserError(f"environment.options: data set {path} has no split {split!r}{near}")
            found = found[split]
        self._rows: Any = found

    def __reduce__(self) -> Any:
        return _HuggingFace, self._arguments

    @property
    def version(self) -> str:
        return f"{self._name} {self._rows._fingerprint}"

    def scan(self) -> Iterator[tuple[int, Row]]:
        yield from enumerate(self._rows)

    def row(self, position: int) -> Row:
        return self._rows[position]

    def where(self, position: int) -> str:
        return f"{self._name} row {position + 1}"


@lru_cache(maxsize=8)
def _hugging_face(path: str, split: str, subset: str | None, load: str) -> Source:
    return _HuggingFace(path, split, subset, load)


class _Several:
    """Files one after the other. A position is the file's own, with the file's number in the bits above it."""

    _FILE = 48  # bits below the file's number

    def __init__(self, files: Sequence[Source]) -> None:
        self._files = files

    @property
    def version(self) -> str:
        return " ".join(file.version for file in self._files)

    def scan(self) -> Iterator[tuple[int, Row]]:
        for number, file in enumerate(self._files):
            for position, row in file.scan():
                yield position | number << self._FILE, row

    def row(self, position: int) -> Row:
        return self._files[position >> self._FILE].row(position & (1 << self._FILE) - 1)

    def where(self, position: int) -> str:
        return self._files[position >> self._FILE].where(position & (1 << self._FILE) - 1)


def _version(file: str) -> str:
    facts = os.stat(file)
    return f"{os.path.abspath(file)} {facts.st_size} {facts.st_mtime_ns}"


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
    }
    return names.get(type(value), type(value).__name__)
