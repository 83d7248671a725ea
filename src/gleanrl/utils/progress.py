"""The protocols through which long-running work reports its progress.

`gleanrl.tracking.monitors.Console` shows the progress on a terminal.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Stage(Protocol):
    """A piece of work that is in progress and consists of several parts, such as the tasks of an evaluation."""

    def advance(self, count: int = 1, **fields: float | str) -> None:
        """Report that ``count`` more parts are done.

        ``fields`` are values that are shown next to the progress bar, such as ``loss=0.4`` or ``tokens_per_s=5200``.
        """
        ...


class Progress(Protocol):
    """Receives the progress of a run. Preparation, training and evaluation each open a stage.

    Single events, such as a resume or the restart of an actor, are passed to `print` as a line of text.
    """

    def print(self, text: str) -> None:
        """Show ``text`` on a separate line."""
        ...

    def stage(
        self, name: str, total: int | None = None, *, done: int = 0, at_once: int = 1
    ) -> AbstractContextManager[Stage]:
        """Open a stage of ``total`` parts (None = the number is not known). Stages may be nested.

        ``done``: number of parts that were completed before the stage is opened, for example before a restart.
        ``at_once``: number of parts that are in progress at the same time. The first of them says little about the
        remaining time, so it is estimated only when that many are done.
        """
        ...


class Silent:
    """A `Progress` that shows nothing."""

    def print(self, text: str) -> None:
        """Do nothing."""

    def stage(
        self, name: str, total: int | None = None, *, done: int = 0, at_once: int = 1
    ) -> AbstractContextManager[Stage]:
        """Return a stage that shows nothing."""
        return nullcontext(_SilentStage())


class _SilentStage:
    def advance(self, count: int = 1, **fields: float | str) -> None:
        pass
