"""Short hashes of content: cache keys, ids of problems, whether two things are the same."""

from __future__ import annotations

import hashlib


def fingerprint(*parts: str | bytes, size: int = 16) -> str:
    """Hex digest of ``size`` bytes (BLAKE2b) of all parts in order; ``("ab", "c")`` and ``("a", "bc")`` differ.

    Text is encoded as UTF-8, lone surrogates included.
    """
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
