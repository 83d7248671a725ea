"""Short hashes of content, used as cache keys, as ids of problems and to compare two values."""

from __future__ import annotations

import hashlib


def fingerprint(*parts: str | bytes, size: int = 16) -> str:
    """Return a BLAKE2b digest of ``size`` bytes, in hexadecimal, of all parts in order.

    The digests of ``("ab", "c")`` and ``("a", "bc")`` differ. Text is encoded as UTF-8, lone surrogates included.
    """
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
