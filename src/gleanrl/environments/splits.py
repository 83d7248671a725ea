"""Splits that are disjoint by construction: a problem's content alone decides its split. Used by most tasksets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from gleanrl.protocols import Split
from gleanrl.utils.errors import UserError

_SHARES: tuple[tuple[Split, float], ...] = (("train", 0.60), ("warm_start", 0.85), ("eval", 1.0))  # upper bounds
_PATIENCE = 500  # candidates in a row without a new problem of the split, before the split counts as exhausted

C = TypeVar("C")


def fingerprint(*content: str) -> str:
    """What identifies a problem: 32 hexadecimal digits of its content."""
    return hashlib.blake2b("\x1f".join(content).encode(), digest_size=16).hexdigest()


def split_of(mark: str) -> Split:
    """The split of the problem with this `fingerprint`, whatever seed found it."""
    place = int(mark[:8], 16) / 2**32
    return next(split for split, bound in _SHARES if place < bound)


def named(mark: str, unusual: Mapping[str, Any]) -> str:
    """The hash in an id: the mark that decides the split, and the options that differ from the defaults (the opponent,
    a step limit). So variants of a problem have their own ids and share its split."""
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
    """The first ``count`` distinct problems of ``split`` among ``(fingerprint, candidate)`` pairs; ``of`` gives a
    fingerprint's split. Candidates that are not ``endless`` are read to their end, however often they repeat.

    Raises:
        UserError: there are not so many.
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
