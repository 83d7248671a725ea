"""Errors that are the user's to mend, told apart from bugs."""

from __future__ import annotations


class UserError(Exception):
    """One clear line that names the file, the key or the value, and the mend. Never shown as a stack trace."""


class NoExpert(UserError):
    """A task that nobody can demonstrate, in a taskset that can demonstrate others."""
