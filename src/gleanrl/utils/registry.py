"""A registry of functions, from which a setting chooses one by its registered name or its import path.

`check_values` checks the options of such a function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.text import nearest


class Entry(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def function(self) -> Callable[..., Any]: ...


T = TypeVar("T", bound=Entry)


class Registry(Generic[T]):
    """Maps names to entries of one kind, for example to all advantage estimators. An entry wraps one function.

    Args:
        key: name of the setting that chooses an entry.
        kind: class of the entries.
        decorator: name of the decorator that turns a user's function into an entry, for error messages.
    """

    def __init__(self, key: str, kind: type[T], decorator: str) -> None:
        self.key, self._kind, self._decorator = key, kind, decorator
        self._entries: dict[str, T] = {}

    def add(self, entry: T) -> T:
        """Register ``entry`` under its name and return it.

        A function that is registered a second time replaces its first entry. This happens if a notebook cell runs twice
        or a script is also imported. Raises `UserError` if a function with another qualified name has this name.
        """
        known = self._entries.get(entry.name)
        if known is not None and known.function.__qualname__ != entry.function.__qualname__:
            holder = f"{known.function.__module__}.{known.function.__qualname__}"
            raise UserError(f"{self.key} {entry.name!r} is taken by {holder}; choose another name")
        self._entries[entry.name] = entry
        return entry

    def get(self, name: str) -> T:
        """Return the entry with a registered name or an import path (`package.module:Name` or `file.py:Name`).

        Raises `UserError` if there is no such entry. The message suggests the nearest registered name, or says what is
        wrong with the import path.
        """
        if ":" in name:
            found = load_object(name)
            if not isinstance(found, self._kind):
                raise UserError(
                    f"{self.key} = {name!r} is a plain {type(found).__name__}; put {self._decorator} over it"
                )
            return found
        if name not in self._entries:
            raise UserError(f"{self.key}: unknown value {name!r}{nearest(name, self._entries, list_all=True)}")
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._entries))


def check_values(setting: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Check that the values of ``options`` have the types, and are in the ranges, that ``function`` is annotated with.

    They are checked as JSON, because they come from a configuration: a list may be a tuple, but no text is a number.
    Options whose parameter has no annotation that pydantic understands, and values that JSON lacks, are not checked.

    Raises `UserError`, which names the option as a key of ``setting``.
    """
    for name, value in options.items():
        # A loss is looked up with its options for every micro-batch. A callable object may have no hash.
        type_ = (_type_of if isinstance(function, Hashable) else _type_of.__wrapped__)(function, name)
        if type_ is None:
            continue
        try:
            type_.validate_json(to_json(value, inf_nan_mode="constants"), strict=True)
        except PydanticSerializationError:
            continue
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise UserError(f"{setting}.{name} = {value!r}: {reason[0].lower()}{reason[1:]}") from None


@lru_cache(maxsize=256)
def _type_of(function: Callable[..., Any], parameter: str) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(get_type_hints(function, include_extras=True)[parameter])
    except Exception:  # there is none, or it is anything that a type checker understands but pydantic does not
        return None
