"""How long work says how far it is: a stage has a name, a total and something to show."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Stage(Protocol):
    def advance(self, count: int = 1, **fields: float | str) -> None:
        """``count`` more are done; ``fields`` (loss=0.4, tokens_per_s=5200) are shown beside the bar."""
        ...


class Progress(Protocol):
    """What households, demonstrations, warm start, training and evaluation report to."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Stage]:
        """Open a stage of ``total`` parts (None = unknown); stages may nest."""
        ...


class Silent:
    """A `Progress` that shows nothing."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Stage]:
        return nullcontext(_SilentStage())


class _SilentStage:
    def advance(self, count: int = 1, **fields: float | str) -> None:
        pass
