"""Computes short hashes of content, which serve as cache keys, as ids of problems and to compare values."""

from __future__ import annotations

import hashlib


def fingerprint(*parts: str | bytes, size: int = 16) -> str:
    """Return a BLAKE2b digest of the sequence of ``parts``: ``size`` bytes, written in hexadecimal.

    The boundaries between parts count: the digests of ``("ab", "c")`` and ``("a", "bc")`` differ. A part that is text
    is encoded as UTF-8, and may contain lone surrogates.
    """
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
