"""Rewards by name: the ones that come with Glean RL, and any other by its import path; and their options' names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack, get_args, get_origin, get_type_hints

from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.text import nearest

BUILT_IN: Mapping[str, str] = {
    "environment": "gleanrl.rewards.environment:own_score",
    "http": "gleanrl.rewards.http:HttpReward",
    "judge": "gleanrl.rewards.judge:Judge",
    "math": "gleanrl.rewards.math:MathReward",
    "model": "gleanrl.rewards.model:RewardModel",
    "pooling": "gleanrl.rewards.model:PoolingServer",
    "weighted": "gleanrl.rewards.compose:Weighted",
}


def find(name: str) -> Any:
    """What it names: a built-in reward, `package.module:name` or `file.py:name`. Raises `UserError` if nothing."""
    if ":" in name:
        return load_object(name)
    if name not in BUILT_IN:
        known = f"; there are {', '.join(BUILT_IN)}, or give `package.module:name` or `file.py:name`"
        raise UserError(f"no reward {name!r}{nearest(name, BUILT_IN) or known}")
    return load_object(BUILT_IN[name])


def check_options(name: str, takes: Callable[..., Any], options: Iterable[str], *, given: int = 0) -> None:
    """Raises `UserError` for the first option that a class or function does not take, or that it needs.

    ``given``: so many of its parameters, the first ones, are no options; -1: what it needs beside them is not known.
    """
    try:
        parameters = inspect.signature(takes).parameters.values()
    except (TypeError, ValueError):  # written in C: nobody knows
        return
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)][max(given, 0) :]
    rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
    further = _unpacked(takes, rest) if rest else []
    if further is not None:
        known = [*(p.name for p in named), *further]
        for option in options:
            if option not in known:
                takings = f"; it takes {', '.join(known)}" if known else "; it takes none"
                raise UserError(f"reward {name} has no option {option!r}{nearest(option, known) or takings}")
    for parameter in named if given >= 0 else ():
        if parameter.default is parameter.empty and parameter.name not in options:
            raise UserError(f"reward {name} needs the option {parameter.name!r}")


def _unpacked(takes: Callable[..., Any], rest: str) -> list[str] | None:
    """The names that ``**rest`` stands for, where a `TypedDict` says so; None if it may be any."""
    try:
        hint = get_type_hints(takes.__init__ if isinstance(takes, type) else takes).get(rest)
    except (NameError, TypeError):
        return None
    return list(get_type_hints(get_args(hint)[0])) if get_origin(hint) is Unpack else None
