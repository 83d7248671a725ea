"""How a scorer says whether trying again may help."""

from __future__ import annotations


class Retryable(Exception):
    """The request may be tried again, not sooner than ``after_s`` seconds from now where that is known.

    ``cause`` is a word for the metrics: timeout, rate_limit, server, connection, answer, ...
    """

    def __init__(self, message: str, after_s: float | None = None, *, cause: str = "retryable") -> None:
        super().__init__(message)
        self.after_s = after_s
        self.cause = cause


class Fatal(Exception):
    """Trying again cannot help; ``cause`` is a word for the metrics."""

    def __init__(self, message: str, *, cause: str = "fatal") -> None:
        super().__init__(message)
        self.cause = cause
