"""Errors that a user can fix, as opposed to bugs, and the lines of the user's own code that an error message names."""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

ADVICE = "; continue from the last checkpoint with --resume"
"""The end of messages about dead processes, which is left out where they are replaced."""


class UserError(Exception):
    """An error that the user can fix, shown without a stack trace.

    The message is one clear line that names the file, the key or the value, and the fix.
    """


class ProcessDied(UserError):
    """A process that a part of the run needs has died, so that the part cannot be used any more.

    On Ray, the part's actor then counts as dead too and is replaced.
    """


class NoExpert(UserError):
    """The taskset has no expert that could demonstrate this task, although it may have one for other tasks."""


def raised_at(error: BaseException) -> str:
    """Return the line of the user's own code that led to ``error``, as `` (mine.py:12)``, to be put after its message.

    This is the innermost line in the traceback that belongs neither to Glean RL nor to Python's library nor to an
    installed package. The result is empty if there is none.
    """
    return own_line(reversed(list(traceback.walk_tb(error.__traceback__))))


def own_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the place of the first of ``frames`` that executes the user's own code, in the form of `raised_at`."""
    foreign = [str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))]
    for frame, line in frames:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *(f"{folder}{os.sep}" for folder in foreign))):
            return f" ({_shown(file)}:{line})"
    return ""


def defined_at(function: Callable[..., Any]) -> str:
    """Return where a function or method is defined, as `` (mine.py:12)``, or an empty text if it is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({_shown(code.co_filename)}:{code.co_firstlineno})" if code else ""


def describe(error: BaseException) -> str:
    """Return an exception as one line, such as ``KeyError: 'x' (mine.py:12)``; see `raised_at` for its end."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":") + raised_at(error)


def _shown(file: str) -> str:
    """Return the path of a file as an error message shows it: relative to the current directory if it is below it."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
