"""Fields of a dataclass as options of `gleanrl simulate`: how they are offered, and what their text stands for."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gleanrl.simulate.latency import Latency
from gleanrl.utils.errors import UserError

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def offer(parser: Any, options: Mapping[str, tuple[str, str]], default: Any) -> None:
    """``options`` has a metavar and a meaning for each field."""
    for name, (metavar, meaning) in options.items():
        flag = "--" + name.replace("_", "-")
        text = f"{meaning} (default {_shown(getattr(default, name))})"
        parser.add_argument(flag, dest=name, metavar=metavar, help=text, default=argparse.SUPPRESS)


def typed(kind: type, given: Mapping[str, str | None]) -> dict[str, Any]:
    """The fields of ``kind`` that were given, each of its own type. Raises `UserError` for what has another."""
    hints = get_type_hints(kind)
    return {
        f.name: _value(f.name, hints[f.name], text) for f in fields(kind) if (text := given.get(f.name)) is not None
    }


def _value(name: str, kind: Any, text: str) -> Any:
    """What an option's text stands for."""
    flag = "--" + name.replace("_", "-")
    if kind is Latency:
        return Latency.parse(text)
    if kind is bool:
        if text.lower() not in _WORDS:
            raise UserError(f"{flag} is {text!r}: it must be yes or no")
        return _WORDS[text.lower()]
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise UserError(f"{flag} is {text!r}: it must be {' or '.join(get_args(kind))}")
        return text
    try:
        return tuple(float(part) for part in text.split(",")) if get_origin(kind) is tuple else kind(text)
    except ValueError:
        if get_origin(kind) is tuple:
            raise UserError(f"{flag} is {text!r}: it must be numbers with commas between") from None
        raise UserError(f"{flag} is {text!r}: it must be a {'whole ' if kind is int else ''}number") from None


def _shown(value: Any) -> str:
    if isinstance(value, Latency):
        return value.name
    if isinstance(value, tuple):
        return ",".join(_shown(each) for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
