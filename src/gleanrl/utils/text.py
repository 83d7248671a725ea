"""Texts that several packages print: sizes, the first line of an error, the nearest known name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def format_bytes(count: float) -> str:
    """Format a size in bytes: ``512 B``, ``1.5 KiB``, ``23.0 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def first_line(error: BaseException | str, limit: int = 300) -> str:
    """Return the first line of an error's text, cut to ``limit`` characters; its class name if it has none."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()[:limit]
    return "" if isinstance(error, str) else type(error).__name__


def nearest(name: str, known: Iterable[str], *, list_all: bool = False) -> str:
    """Return the end of a message about an unknown ``name``: ``"; did you mean 'x'?"`` with the nearest known name.

    If no public name in ``known`` is close to ``name``, return all names (``"; known are a, b"``) with ``list_all``,
    else an empty text.
    """
    public = sorted(key for key in known if not key.startswith("_"))
    matches = get_close_matches(name, public, n=1)
    if matches:
        return f"; did you mean {matches[0]!r}?"
    return f"; known are {', '.join(public) or 'none'}" if list_all else ""
