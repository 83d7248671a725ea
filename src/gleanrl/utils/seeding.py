"""Derives the seeds of independent random streams from one seed.

The seed of a stream depends on the stream's name, and not on which streams were made before it.
"""

from __future__ import annotations

import hashlib


def derive(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for the random stream that ``names`` identify, derived from ``seed``.

    The result is the same on every machine and with every version of Python.
    """
    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
