"""How a scorer says whether trying again may help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNREACHABLE, HUNG = "unreachable", "hung"
UNHEARD = frozenset({UNREACHABLE, HUNG})  # causes of a try that nobody heard: no service, or no thread to ask it in

_NOTHING: Mapping[str, float] = {}


class Retryable(Exception):
    """The request may be tried again, not sooner than ``after_s`` seconds from now where that is known.

    ``cause`` is a word for the metrics: timeout, rate_limit, server, connection, answer, ... A try that is
    ``unreachable`` (nobody accepts connections) does not count where the service has answered before. ``cost``: what
    the try has used all the same, as `Score.parts` has it (``cost/prompt_tokens``, ``cost/completion_tokens``).
    """

    def __init__(
        self,
        message: str,
        after_s: float | None = None,
        *,
        cause: str = "retryable",
        cost: Mapping[str, float] = _NOTHING,
    ) -> None:
        super().__init__(message)
        self.after_s = after_s
        self.cause = cause
        self.cost = cost

    def __reduce__(self) -> Any:
        return type(self), self.args, self.__dict__


class Fatal(Exception):
    """Trying again cannot help; ``cause`` is a word for the metrics, ``cost`` as in `Retryable`."""

    def __init__(self, message: str, *, cause: str = "fatal", cost: Mapping[str, float] = _NOTHING) -> None:
        super().__init__(message)
        self.cause = cause
        self.cost = cost

    def __reduce__(self) -> Any:
        return type(self), self.args, self.__dict__


class NotApplicable(Fatal):
    """This reward says nothing of this trajectory: its score is invalid, but nothing failed."""

    def __init__(self, message: str = "the reward does not apply", *, cause: str = "not_applicable") -> None:
        super().__init__(message, cause=cause)


def may_pass(error: BaseException) -> bool:
    """Whether trying again may help."""
    return isinstance(error, Retryable | TimeoutError | ConnectionError)


def cause_of(error: BaseException) -> str:
    """A word for the metrics."""
    match error:
        case Retryable() | Fatal():
            return error.cause
        case TimeoutError():
            return "timeout"
        case ConnectionRefusedError():
            return UNREACHABLE
        case ConnectionError():
            return "connection"
    return "raised"


def reason_of(error: BaseException) -> str:
    """Why a score could not be had, in one line."""
    text = str(error) if isinstance(error, Retryable | Fatal) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:1000]
