"""`gleanrl settings [NAME]`: prints every setting with its default and meaning."""

from __future__ import annotations

import argparse
import json
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from gleanrl.cli.common import guarded
from gleanrl.utils.errors import UserError

WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a section (learner), a key (learner.lr) or a part of keys (clip)"
    )
    parser.add_argument("--job", choices=("embodied",), help="those of an embodied run")
    parser.set_defaults(command=guarded(_settings))


@dataclass(frozen=True, slots=True)
class _Key:
    name: str  # dotted
    kind: str
    default: str
    text: str


def _settings(args: argparse.Namespace) -> int:
    from gleanrl.config.loading import JOBS
    from gleanrl.config.settings import Config

    found = list(_keys(JOBS[args.job] if args.job else Config))
    if args.name is None:
        for key in found:
            print(f"{key.name} = {key.default}")
        return 0
    wanted = [key for key in found if key.name == args.name or key.name.startswith(f"{args.name}.")]
    wanted = wanted or [key for key in found if args.name in key.name]
    if not wanted:
        sections = dict.fromkeys(key.name.partition(".")[0] for key in found)
        raise UserError(f"no setting {args.name!r}; sections: {', '.join(sections)}")
    for key in wanted:
        print(f"{key.name} = {key.default}    ({key.kind})")
        for line in textwrap.wrap(key.text, WIDTH - 4):
            print(f"    {line}")
    return 0


def _keys(model: Any, prefix: str = "") -> Iterator[_Key]:
    for name, field in model.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            text = " ".join((field.description or "").split())
            yield _Key(f"{prefix}{name}", _kind(field.annotation), _shown(default), text)


def _shown(value: Any) -> str:
    """Format a default as in TOML, which has no literal for None."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value)


def _kind(annotation: Any) -> str:
    """Describe a type in words: ``"sync" or "pipelined"``, ``number``, ``table``."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return " or ".join(map(_shown, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_kind, inner)))
    names = {
        str: "text",
        int: "whole number",
        float: "number",
        bool: "true or false",
        dict: "table",
        type(None): "none",
    }
    return names.get(origin or annotation, "list")
