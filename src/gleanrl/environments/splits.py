"""Makes splits that are disjoint, because a problem's content alone decides its split. Most tasksets use this."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from gleanrl.protocols import Split
from gleanrl.utils.errors import UserError

_SHARES: tuple[tuple[Split, float], ...] = (("train", 0.60), ("warm_start", 0.85), ("eval", 1.0))  # cumulative shares
_PATIENCE = 500  # the search ends after this many candidates in a row without a new problem of the split

C = TypeVar("C")


def fingerprint(*content: str) -> str:
    """Return a hash of a problem's content that identifies the problem, 32 hexadecimal digits."""
    return hashlib.blake2b("\x1f".join(content).encode(), digest_size=16).hexdigest()


def split_of(mark: str) -> Split:
    """Return the split of the problem with the `fingerprint` ``mark``. It does not depend on a seed."""
    place = int(mark[:8], 16) / 2**32
    return next(split for split, bound in _SHARES if place < bound)


def named(mark: str, unusual: Mapping[str, Any]) -> str:
    """Return the hash for a task's id: ``mark``, hashed with the options that differ from the defaults, if any do.

    ``mark`` alone decides the split. So variants of a problem, such as another opponent or step limit, have ids of
    their own and stay in its split.
    """
    return fingerprint(mark, json.dumps(unusual, sort_keys=True, default=str)) if unusual else mark


def select(
    candidates: Iterable[tuple[str, C]],
    split: Split,
    count: int,
    what: str,
    of: Callable[[str], Split] = split_of,
    *,
    endless: bool = True,
) -> Iterator[tuple[str, C]]:
    """Yield the first ``count`` distinct problems of ``split`` among ``(fingerprint, candidate)`` pairs.

    ``of`` returns a fingerprint's split. If the candidates are ``endless``, the search gives up after many repetitions;
    otherwise all candidates are read.

    Raises:
        UserError: there are fewer than ``count`` problems.
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
