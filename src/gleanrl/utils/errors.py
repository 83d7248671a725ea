"""Errors that a user can fix, as opposed to bugs."""

from __future__ import annotations


class UserError(Exception):
    """One clear line that names the file, the key or the value, and the fix. Never shown as a stack trace."""


class NoExpert(UserError):
    """A task without an expert, in a taskset that has one for other tasks."""
