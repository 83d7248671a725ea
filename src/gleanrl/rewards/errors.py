"""How a scorer says whether trying again may help."""

from __future__ import annotations

from typing import Any

UNREACHABLE = "unreachable"  # cause of a try that no service heard


class Retryable(Exception):
    """The request may be tried again, not sooner than ``after_s`` seconds from now where that is known.

    ``cause`` is a word for the metrics: timeout, rate_limit, server, connection, answer, ... A try that is
    ``unreachable`` (nobody accepts connections) does not count where the service has answered before.
    """

    def __init__(self, message: str, after_s: float | None = None, *, cause: str = "retryable") -> None:
        super().__init__(message)
        self.after_s = after_s
        self.cause = cause

    def __reduce__(self) -> Any:
        return type(self), self.args, {"after_s": self.after_s, "cause": self.cause}


class Fatal(Exception):
    """Trying again cannot help; ``cause`` is a word for the metrics."""

    def __init__(self, message: str, *, cause: str = "fatal") -> None:
        super().__init__(message)
        self.cause = cause

    def __reduce__(self) -> Any:
        return type(self), self.args, {"cause": self.cause}


class NotApplicable(Fatal):
    """This reward says nothing of this trajectory: its score is invalid, but nothing failed."""

    def __init__(self, message: str = "the reward does not apply", *, cause: str = "not_applicable") -> None:
        super().__init__(message, cause=cause)
