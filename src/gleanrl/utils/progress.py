"""How long-running work reports its progress. `gleanrl.tracking.monitors.Console` shows it on a terminal."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Stage(Protocol):
    """A piece of work that is in progress."""

    def advance(self, count: int = 1, **fields: float | str) -> None:
        """Report that ``count`` more parts are done.

        ``fields``, such as loss=0.4 or tokens_per_s=5200, are shown next to the progress bar.
        """
        ...


class Progress(Protocol):
    """Where a run reports its progress. Preparation, training and evaluation open stages; events are printed."""

    def print(self, text: str) -> None:
        """Show ``text`` on a separate line."""
        ...

    def stage(self, name: str, total: int | None = None, *, done: int = 0) -> AbstractContextManager[Stage]:
        """Open a stage of ``total`` parts (None = unknown), ``done`` of which were done earlier; stages may nest."""
        ...


class Silent:
    """A `Progress` that shows nothing."""

    def print(self, text: str) -> None:
        pass

    def stage(self, name: str, total: int | None = None, *, done: int = 0) -> AbstractContextManager[Stage]:
        return nullcontext(_SilentStage())


class _SilentStage:
    def advance(self, count: int = 1, **fields: float | str) -> None:
        pass
