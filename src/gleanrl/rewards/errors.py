"""What a reward raises where it has no score. `Retryable` and `Fatal` are those of `gleanrl.utils.retry`."""

from __future__ import annotations

from gleanrl.utils.retry import Fatal


class NotApplicable(Fatal):
    """The reward has nothing to say about this trajectory: its score is invalid, but nothing has failed."""

    def __init__(self, message: str = "the reward does not apply", *, cause: str = "not_applicable") -> None:
        super().__init__(message, cause=cause)
