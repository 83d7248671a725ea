"""What the commands that look into files share: quiet pipes, harmless text, tables and sizes."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Command = Callable[[argparse.Namespace, list[tuple[str, str]]], int]


def guarded(command: Command) -> Command:
    """A reader that went away (`| head`) ends the command quietly; no text of a file can break the terminal."""

    def run(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        status = 0
        with quiet_pipe():
            status = command(args, overrides)
        return status

    return run


@contextmanager
def quiet_pipe() -> Iterator[None]:
    """Around what is printed: a reader of standard output that went away ends it, and is no error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def safe(text: str, *, lines: bool = False) -> str:
    """Text of a stored episode, without what a terminal would obey."""
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], left: int = 0) -> None:
    """Columns aligned to the right, the last ``left`` of them to the left."""
    cells = [[str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        aligned = [
            cell.ljust(width) if place >= len(headings) - left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(aligned).rstrip())


def as_size(count: float) -> str:
    """Bytes in their unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def spread(values: npt.NDArray[np.float64], form: str) -> str:
    """Smallest, largest and median."""
    import numpy as np

    low, middle, high = np.quantile(values, [0.0, 0.5, 1.0]).tolist()
    return f"{low:{form}} to {high:{form}}, median {middle:{form}}"


def natural(text: str) -> int:
    """An argument of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def positive(text: str) -> int:
    """An argument of 1 or more."""
    if (number := natural(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return number
