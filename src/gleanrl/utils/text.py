"""Formats texts that several packages print: sizes, first lines of errors, suggestions for a misspelt name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def format_bytes(count: float) -> str:
    """Return a number of bytes as text with a unit, such as ``512 B``, ``1.5 KiB`` or ``23.0 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def first_line(error: BaseException | str, limit: int = 300) -> str:
    """Return the first line of an error's text that is not empty, cut to ``limit`` characters.

    If there is no such line, return the name of the exception's class, or an empty text if ``error`` is a text.
    """
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()[:limit]
    return "" if isinstance(error, str) else type(error).__name__


def nearest(name: str, known: Iterable[str], *, list_all: bool = False) -> str:
    """Return the end of an error message about an unknown ``name``, such as ``"; did you mean 'x'?"``.

    The suggestion is the name in ``known`` that is most similar to ``name``. If none is similar, the result lists all
    known names (``"; known are a, b"``) if ``list_all`` is true, and is empty otherwise. Names that begin with an
    underscore are ignored.
    """
    public = sorted(key for key in known if not key.startswith("_"))
    matches = get_close_matches(name, public, n=1)
    if matches:
        return f"; did you mean {matches[0]!r}?"
    return f"; known are {', '.join(public) or 'none'}" if list_all else ""
