"""Errors that a user can fix, as opposed to bugs."""

from __future__ import annotations


class UserError(Exception):
    """An error that the user can fix, shown without a stack trace.

    The message is one clear line that names the file, the key or the value, and the fix.
    """


class NoExpert(UserError):
    """The taskset has no expert that could demonstrate this task, although it may have one for other tasks."""
