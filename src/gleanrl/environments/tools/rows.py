"""Reads the rows of a data file: JSONL, JSON or parquet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gleanrl.utils.errors import UserError


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the file ``path`` one at a time, each as a dict.

    The suffix decides the format: ``.parquet``, ``.json`` (one list of objects), or else JSONL.

    Raises:
        UserError: the file is missing, damaged or has another format, or the package that reads it is not installed.
    """
    file = Path(path).expanduser()
    try:
        for number, row in enumerate(_read(file), 1):
            if not isinstance(row, dict):
                raise UserError(f"{file}, row {number}: not an object")
            yield row
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON: {error}") from error


def _read(file: Path) -> Iterable[Any]:
    if file.suffix == ".parquet":
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise UserError(f"{file}: parquet needs the extra: pip install 'gleanrl[parquet]'") from error
        try:
            with parquet.ParquetFile(file) as opened:
                for batch in opened.iter_batches():
                    yield from batch.to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{file}: no parquet file: {error}") from error
    elif file.suffix == ".json":
        rows = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise UserError(f"{file}: it holds no list of rows")
        yield from rows
    else:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        reason = str(error).partition(": line 1 column")[0]
                        raise UserError(f"{file}, line {number}: not JSON: {reason}") from error
                    yield row
