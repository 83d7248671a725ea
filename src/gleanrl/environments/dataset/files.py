"""Reads the rows of a data set: JSONL, JSON or parquet files, or a Hugging Face data set.

A `Source` yields rows with their positions, and reads any row again by its position. Only a file that is one JSON list
is loaded as a whole; all others are read lazily. So a file of a million rows opens at once, and a caller that keeps
only the positions needs eight bytes of memory per row.
"""

from __future__ import annotations

import glob
import json
import os
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from gleanrl.utils.errors import UserError
from gleanrl.utils.text import first_line, nearest

Row = dict[str, Any]
FILES = (".jsonl", ".json", ".parquet")
_ROW_GROUPS = 4  # number of row groups of each parquet file that are cached in memory
_BATCH = 1024  # number of parquet rows that are converted to Python objects at once
_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?\Z")


@dataclass(eq=False)
class Source(ABC):
    """The rows of a data set. A position is an integer with which `row` finds a row again."""

    name: str  # name of the source in error messages
    version: str  # a text that changes when the rows change

    @abstractmethod
    def scan(self) -> Iterator[tuple[int, Row]]:
        """Yield the position and the content of each row, in order."""

    @abstractmethod
    def row(self, position: int) -> Row: ...

    def where(self, position: int) -> str:
        """Return where the row is, for error messages: its file and its number, counted from 1."""
        return f"{self.name} row {position + 1}"


def open_source(path: str | Sequence[str], split: str, subset: str | None, load: str) -> Source:
    """Open the rows at ``path``.

    ``path`` is a file, several files, a pattern such as `data/*.parquet`, a folder written by Hugging Face's
    `save_to_disk`, or the id of a Hugging Face data set. Only Hugging Face data sets use ``split``, ``subset`` and
    ``load`` (further arguments of `load_dataset`, as a JSON object).

    Raises:
        UserError: ``path`` does not exist, cannot be read, or needs a package that is missing.
    """
    names = [path] if isinstance(path, str) else list(path)
    if not names:
        raise UserError("environment.options.path: name a file")
    if len(names) == 1 and not names[0].endswith(FILES):
        return _load_hugging_face(names[0], split, subset, load)
    sources = []
    for name in names:
        if not name.endswith(FILES):
            raise UserError(f"environment.options.path: {name} is none of {', '.join(FILES)}")
        full = os.path.expanduser(name)
        found = sorted(glob.glob(full)) if glob.has_magic(full) and not os.path.exists(full) else [full]
        if not found:
            raise UserError(f"environment.options.path: no file matches {name}")
        for file in found:
            if not os.path.isfile(file):
                if os.path.exists(file):
                    raise UserError(f"environment.options.path: {file} is not a file")
                folder = Path(file).parent
                hint = nearest(Path(file).name, os.listdir(folder)) if folder.is_dir() else ""
                raise UserError(f"environment.options.path: no file {file}{hint}")
            facts = os.stat(file)
            sources.append(_open_file(file, f"{os.path.abspath(file)} {facts.st_size} {facts.st_mtime_ns}"))
    if len(sources) == 1:
        return sources[0]
    return _Several(", ".join(s.name for s in sources), " ".join(s.version for s in sources), sources)


@lru_cache(maxsize=32)
def _open_file(file: str, version: str) -> Source:
    if file.endswith(".parquet"):
        return _Parquet(file, version)
    with open(file, "rb") as opened:
        start = opened.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    # The first character decides the format and not the file's name, because some `.json` files have an object on each
    # line, and some `.jsonl` files are one list.
    if start != b"[":
        return _JsonLines(file, version)
    try:
        rows = json.loads(Path(file).read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {first_line(error)}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{file} row {number} is of type {type(row).__name__}, not an object")
    return _Rows(file, version, rows)


@dataclass(eq=False)
class _Rows(Source):
    """The rows of a JSON list, held in memory, or of a Hugging Face data set, whose Arrow files are memory-mapped.

    A position is a row's index.
    """

    rows: Any

    def scan(self) -> Iterator[tuple[int, Row]]:
        yield from enumerate(self.rows)

    def row(self, position: int) -> Row:
        return self.rows[position]


class _JsonLines(Source):
    """A file with a JSON object on each line. A position is the offset of a line in bytes."""

    def scan(self) -> Iterator[tuple[int, Row]]:
        position = 0
        with open(self.name, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield position, self._parse(line, f"{self.name} line {number}")
                position += len(line)

    def row(self, position: int) -> Row:
        with open(self.name, "rb") as opened:
            opened.seek(position)
            return self._parse(opened.readline(), f"{self.name} was changed while it was in use: a line")

    def where(self, position: int) -> str:
        with open(self.name, "rb") as opened:
            return f"{self.name} line {opened.read(position).count(10) + 1}"

    def _parse(self, line: bytes, where: str) -> Row:
        try:
            row = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
        except UnicodeDecodeError:
            raise UserError(f"{where} is not UTF-8; save the file in this encoding") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON: {first_line(error)}") from None
        if not isinstance(row, dict):
            raise UserError(f"{where} is of type {type(row).__name__}, not an object")
        return row


class _Parquet(Source):
    """A parquet file. A position is a row's index. To read a row, its whole row group is read and cached."""

    def __init__(self, file: str, version: str) -> None:
        super().__init__(file, version)
        try:
            import pyarrow as arrow
            import pyarrow.parquet as parquet
        except ImportError:
            raise UserError(f"{file}: parquet files need the extra: pip install 'gleanrl[parquet]'") from None
        self._errors = (arrow.ArrowException, OSError)
        with self._explaining("is not a parquet file"):
            self._parquet = parquet.ParquetFile(file, memory_map=True)
        facts = self._parquet.metadata
        self._begins = [0, *accumulate(facts.row_group(i).num_rows for i in range(facts.num_row_groups))]
        self._read_group = lru_cache(maxsize=_ROW_GROUPS)(self._parquet.read_row_group)

    def __reduce__(self) -> Any:
        return _Parquet, (self.name, self.version)

    def scan(self) -> Iterator[tuple[int, Row]]:
        number = 0
        with self._explaining("is damaged"):
            for batch in self._parquet.iter_batches(batch_size=_BATCH):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1

    def row(self, position: int) -> Row:
        group = bisect_right(self._begins, position) - 1
        with self._explaining("is damaged"):
            return self._read_group(group).slice(position - self._begins[group], 1).to_pylist()[0]

    @contextmanager
    def _explaining(self, fault: str) -> Iterator[None]:
        """Raise `UserError` with the text ``fault`` if the body cannot read the file."""
        try:
            yield
        except self._errors as error:
            raise UserError(f"{self.name} {fault}: {first_line(error)}") from None


@dataclass(eq=False)
class _Several(Source):
    """Several files, read one after the other.

    The lower 48 bits of a position are the row's position in its file. The bits above are the index of the file.
    """

    files: Sequence[Source]

    def scan(self) -> Iterator[tuple[int, Row]]:
        for number, file in enumerate(self.files):
            for position, row in file.scan():
                yield position | number << 48, row

    def row(self, position: int) -> Row:
        return self.files[position >> 48].row(position & (1 << 48) - 1)

    def where(self, position: int) -> str:
        return self.files[position >> 48].where(position & (1 << 48) - 1)


@lru_cache(maxsize=8)
def _load_hugging_face(path: str, split: str, subset: str | None, load: str) -> Source:
    folder = Path(path).expanduser()
    if folder.is_file():
        raise UserError(f"environment.options.path: {path} is none of {', '.join(FILES)}; convert it to one of them")
    try:
        import datasets
    except ImportError:
        raise UserError(f"{path}: Hugging Face data sets need the extra: pip install 'gleanrl[datasets]'") from None
    if not folder.exists() and not _HUB.match(path):
        raise UserError(f"environment.options.path: no file or folder {path}")
    verbosity = datasets.utils.logging.get_verbosity()
    datasets.utils.logging.set_verbosity_error()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            rows: Any = datasets.load_from_disk(str(folder))
        else:
            rows = datasets.load_dataset(str(folder) if folder.exists() else path, subset, **json.loads(load))
    # The library raises errors of many types, for example without a network or if there is no such data set.
    except Exception as error:
        raise UserError(f"environment.options.path: cannot load the data set {path}: {first_line(error)}") from None
    finally:
        datasets.utils.logging.set_verbosity(verbosity)
    if isinstance(rows, Mapping):
        if split not in rows:
            hint = nearest(split, rows) or f"; it has {', '.join(rows)}"
            raise UserError(f"environment.options: data set {path} has no split {split!r}{hint}")
        rows = rows[split]
    name = f"{path} ({split})"
    return _Rows(name, f"{name} {rows._fingerprint}", rows)
