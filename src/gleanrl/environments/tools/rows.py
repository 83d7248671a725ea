"""Rows of a data file: JSONL, JSON or parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gleanrl.utils.errors import UserError


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """One at a time.

    Raises:
        UserError: the file is missing, of another kind or damaged, or its package is not installed.
    """
    file = Path(path).expanduser()
    try:
        if file.suffix == ".parquet":
            yield from _parquet(file)
        elif file.suffix == ".json":
            yield from _checked(json.loads(file.read_text(encoding="utf-8")), file)
        else:
            with file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield from _checked([json.loads(line)], file, number)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}") from error


def _checked(rows: Any, file: Path, number: int = 1) -> list[dict[str, Any]]:
    if not isinstance(rows, list):
        raise UserError(f"{file}: it holds no list of rows")
    for offset, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{file}, row {number + offset}: not an object")
    return rows


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
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
