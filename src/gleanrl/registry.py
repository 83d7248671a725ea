"""Functions by name, with an error that names the nearest when the name is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from gleanrl.errors import UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """What can be chosen by name for one setting, e.g. every advantage estimator."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._entries: dict[str, T] = {}

    def add(self, name: str) -> Callable[[T], T]:
        """Decorator: register under ``name``; a name is taken once."""

        def register(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.key} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return register

    def get(self, name: str) -> T:
        """Raises `UserError` naming the nearest registered name."""
        if name not in self._entries:
            raise UserError(f"{self.key}: unknown value {name!r}{suggestion(name, self._entries)}")
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._entries))


def suggestion(name: str, known: Iterable[str]) -> str:
    """What to say after an unknown name: the nearest known one, or all of them."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; known are {', '.join(known) or 'none'}"
