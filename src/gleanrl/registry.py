"""What can be chosen by name for one setting: built in, or a user's own by import path."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from gleanrl.errors import UserError
from gleanrl.importing import load_object


class Entry(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Entry)


class Registry(Generic[T]):
    """Entries of one kind, e.g. every advantage estimator.

    ``key`` is the setting that chooses one, ``kind`` the entries' class and ``decorator`` what makes a user's
    function one, as an error message says it.
    """

    def __init__(self, key: str, kind: type[T], decorator: str) -> None:
        self.key, self._kind, self._decorator = key, kind, decorator
        self._entries: dict[str, T] = {}

    def add(self, entry: T) -> T:
        """Register ``entry`` under its name, which is taken once; returns it."""
        if self._entries.setdefault(entry.name, entry) is not entry:
            raise ValueError(f"{self.key} {entry.name!r} is registered twice")
        return entry

    def get(self, name: str) -> T:
        """The entry of a registered ``name``, or that of an import path, `package.module:Name` or `file.py:Name`.

        Raises `UserError` naming the nearest registered name, or what is wrong with the import path.
        """
        if ":" in name:
            found = load_object(name)
            if not isinstance(found, self._kind):
                raise UserError(
                    f"{self.key} = {name!r} is a plain {type(found).__name__}; put {self._decorator} over it"
                )
            return found
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
