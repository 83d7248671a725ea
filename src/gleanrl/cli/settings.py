"""`gleanrl settings [NAME]`: prints all settings with their defaults, or explains the settings that match NAME."""

from __future__ import annotations

import argparse
import json
import textwrap
import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from gleanrl.cli.common import guarded
from gleanrl.utils.errors import UserError

WIDTH = 100
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
"""Attribute of a constraint of pydantic -> how users read it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="explain a section (learner), a key (learner.lr), or all keys that contain NAME (clip)",
    )
    parser.add_argument("--job", choices=("embodied",), help="show the settings of an embodied run")
    parser.set_defaults(command=guarded(_settings))


def _settings(args: argparse.Namespace) -> int:
    from gleanrl.config.loading import JOBS, fields
    from gleanrl.config.settings import Config

    job = JOBS[args.job] if args.job else Config
    found, changeable = dict(fields(job)), set(job.changeable())
    if args.name is None:
        for name, field in found.items():
            print(f"{name} = {format_value(field.get_default(call_default_factory=True))}")
        return 0
    wanted = [name for name in found if name == args.name or name.startswith(f"{args.name}.")]
    wanted = wanted or [name for name in found if args.name in name]
    if not wanted:
        sections = dict.fromkeys(name.partition(".")[0] for name in found)
        raise UserError(f"no setting {args.name!r}; sections: {', '.join(sections)}")
    for name in wanted:
        field = found[name]
        default = format_value(field.get_default(call_default_factory=True))
        kind = describe_type(field.annotation, field.metadata)
        note = "; may change on --resume" if name in changeable else ""
        print(f"{name} = {default}    ({kind}{note})")
        for line in textwrap.wrap(" ".join((field.description or "").split()), WIDTH - 4, break_on_hyphens=False):
            print(f"    {line}")
    return 0


def format_value(value: Any) -> str:
    """Format a default value as TOML. TOML has no null value, so None is written as ``none``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_value, value))}]"
    return str(value)


def describe_type(annotation: Any, constraints: Sequence[Any] = ()) -> str:
    """Describe a type annotation for users, for example as ``"sync" or "pipelined"`` or ``number, above 0``.

    ``constraints`` are the metadata of the field, from which the bounds of a number are taken.
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(inner[0], [m for own in inner[1:] for m in getattr(own, "metadata", ())])
    if origin is Literal:
        return " or ".join(map(format_value, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe_type(own, constraints) for own in inner))
    if annotation is type(None):
        return "none"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", dict: "table"}
    bounds = [f", {word} {getattr(c, key):g}" for c in constraints for key, word in BOUNDS.items() if hasattr(c, key)]
    return names.get(origin or annotation, "list") + "".join(bounds)
