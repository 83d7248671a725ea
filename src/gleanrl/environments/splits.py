"""Divides problems into the splits ``train``, ``warm_start`` and ``eval`` by a hash of their content.

Only the content of a problem decides its split, so no problem is in two splits. Most tasksets use this module.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from gleanrl.protocols import Split
from gleanrl.utils.errors import UserError

# The shares of the splits are 60 %, 25 % and 15 %. The numbers are their cumulative sums.
_SHARES: tuple[tuple[Split, float], ...] = (("train", 0.60), ("warm_start", 0.85), ("eval", 1.0))
_PATIENCE = 500  # the search in endless candidates gives up after this many in a row without a new problem of the split

_C = TypeVar("_C")


def fingerprint(*content: str) -> str:
    """Return a hash of a problem's content, 32 hexadecimal digits. Equal hashes mean the same problem."""
    return hashlib.blake2b("\x1f".join(content).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def split_of(mark: str) -> Split:
    """Return the split of the problem whose `fingerprint` is ``mark``. The split does not depend on a run's seed."""
    place = int(mark[:8], 16) / 2**32
    return next(split for split, bound in _SHARES if place < bound)


def named(mark: str, unusual: Mapping[str, Any]) -> str:
    """Return the hash from which a task's id is made.

    ``mark`` is the `fingerprint` of the problem, and ``unusual`` holds the options that differ from their defaults. The
    result is ``mark`` if all options have their defaults, else a hash of both. `split_of` uses only ``mark``. So
    variants of a problem, such as another opponent or step limit, have different ids but are in the same split.
    """
    return fingerprint(mark, json.dumps(unusual, sort_keys=True, default=str)) if unusual else mark


def select(
    candidates: Iterable[tuple[str, _C]],
    split: Split,
    count: int,
    what: str,
    of: Callable[[str], Split] = split_of,
    *,
    endless: bool = True,
) -> Iterator[tuple[str, _C]]:
    """Yield the first ``count`` distinct problems of ``split`` among ``(fingerprint, candidate)`` pairs.

    ``what`` names the source of the problems in the error message. ``of`` returns the split of a fingerprint. Set
    ``endless`` if ``candidates`` never end: the search then gives up after many candidates in a row that are of another
    split or repeat a problem.

    Raises:
        UserError: fewer than ``count`` problems were found.
    """
    seen: set[str] = set()
    idle = 0
    for mark, candidate in candidates:
        if len(seen) == count:
            return
        if of(mark) != split or mark in seen:
            idle += 1
            if endless and idle > _PATIENCE:
                break
            continue
        idle = 0
        seen.add(mark)
        yield mark, candidate
    if len(seen) < count:
        raise UserError(
            f"{what}: found {len(seen)} different problems for {split!r}, of {count} asked for; "
            f"lower environment.{split}_tasks or widen environment.options"
        )
