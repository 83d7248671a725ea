"""The house's dataclasses as JSON and back, field by field as their types say: a new field goes through by itself.

JSON has no number for what is not finite: where a field is a float, NaN is null and the infinities are the texts
"Infinity" and "-Infinity". So `Score.failed` survives. Tuples of a free-form mapping come back as lists.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Converter = Callable[[Any], Any]
INFINITE: Mapping[str, float] = {"Infinity": math.inf, "-Infinity": -math.inf}


class NotJson(ValueError):
    """A value that has no form in JSON; the message says where it is."""


def encode(value: Any) -> bytes:
    """JSON of a dataclass, or of a mapping or list that holds some; arrays and numpy's numbers as JSON has them.

    Raises:
        NotJson: something in it is not JSON, and where.
    """
    try:
        return _ENCODER.encode(value).encode()
    except (TypeError, ValueError, RecursionError):
        try:
            fault = _fault(value, "")
        except RecursionError:
            fault = "it holds itself"
        raise NotJson(fault or "it cannot be written as JSON") from None


def decode(kind: type[T], data: Any) -> T:
    """The dataclass ``kind`` from parsed JSON; fields that it does not have are left out.

    Raises:
        TypeError, ValueError, KeyError: that is no such thing.
    """
    return _reader(kind)(data)


def plain(value: Any) -> dict[str, Any]:
    """A dataclass's fields; dataclasses and unusual numbers in them as JSON has them."""
    return {
        name: getattr(value, name) if write is None else write(getattr(value, name))
        for name, write in _writers(type(value))
    }


def required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


@cache
def hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def inner(hint: Any) -> tuple[Any, bool]:
    """``(X, True)`` of ``X | None``, else ``(hint, False)``."""
    if get_origin(hint) in (Union, UnionType):
        rest = [one for one in get_args(hint) if one is not NoneType]
        if len(rest) == 1:
            return rest[0], True
    return hint, False


def many(hint: Any) -> Any:
    """The type of each member of a tuple or sequence of any length; None for any other type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (tuple, list, Sequence) and arguments and (origin is not tuple or arguments[1:] == (...,)):
        return arguments[0]
    return None


def named(hint: Any) -> Any:
    """The type of each value of a mapping by names; None for any other type."""
    return get_args(hint)[1] if get_origin(hint) in (dict, Mapping) else None


# --- to JSON ------------------------------------------------------------------------------------
@cache
def _writers(kind: type) -> tuple[tuple[str, Converter | None], ...]:
    return tuple((field.name, _writer(hints(kind)[field.name])) for field in fields(kind))


def _writer(hint: Any) -> Converter | None:
    """How a field of this type is written; None: as it is."""
    hint, optional = inner(hint)
    if is_dataclass(hint):
        write: Converter | None = plain
    elif hint is float:
        write = _number
    elif (member := many(hint)) is not None:
        one = _writer(member)
        write = one and (lambda values: [one(value) for value in values])
    elif (member := named(hint)) is not None:
        every = _writer(member)
        write = every and (lambda values: {name: every(value) for name, value in values.items()})
    else:
        write = None
    if write is None or not optional:
        return write
    certain = write
    return lambda value: None if value is None else certain(value)


def _number(value: float) -> float | str | None:
    if math.isfinite(value):
        return value
    return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _other(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return plain(value)
    if isinstance(value, Mapping):
        return dict(value)
    if (as_list := getattr(value, "tolist", None)) is not None:
        return as_list()
    raise TypeError


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_other)


def _fault(value: Any, where: str) -> str:
    """The first thing in it that is not JSON, in words; empty if there is none."""
    if isinstance(value, Mapping | list | tuple):
        mapping = isinstance(value, Mapping)
        for key, one in value.items() if mapping else enumerate(value):
            if mapping and not isinstance(key, str | int | float | bool | None):
                return f"{where or 'the value'} has a key {key!r}"
            if found := _fault(one, f"{where}.{key}".lstrip(".")):
                return found
        return ""
    if is_dataclass(value) and not isinstance(value, type):
        return _fault(plain(value), where)
    if (as_list := getattr(value, "tolist", None)) is not None:
        value = as_list()
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where} is {value}, which JSON does not have"
    if value is None or isinstance(value, str | int | float | bool | list):
        return ""
    return f"{where} is a {type(value).__name__}, which JSON does not have"


# --- from JSON ----------------------------------------------------------------------------------
@cache
def _reader(hint: Any) -> Converter:
    hint, optional = inner(hint)
    if is_dataclass(hint):
        read = _dataclass_reader(hint)
    elif hint is float:
        read = _float
    elif (member := many(hint)) is not None:
        one = _reader(member)
        gather = list if get_origin(hint) is list else tuple
        read = gather if one is _same else lambda values: gather(one(value) for value in values)
    elif (member := named(hint)) is not None and _reader(member) is not _same:
        every = _reader(member)
        read = lambda values: {name: every(value) for name, value in values.items()}  # noqa: E731
    else:
        return _same
    if not optional:
        return read
    return lambda value: None if value is None else read(value)


def _dataclass_reader(kind: Any) -> Converter:
    by_name = {field.name: _reader(hints(kind)[field.name]) for field in fields(kind) if field.init}
    return lambda data: kind(**{name: read(data[name]) for name, read in by_name.items() if name in data})


def _float(value: Any) -> float:
    return math.nan if value is None else INFINITE[value] if isinstance(value, str) else float(value)


def _same(value: Any) -> Any:
    return value
