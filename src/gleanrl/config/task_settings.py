"""In which order training meets its tasks; `gleanrl.curriculum.task_order` reads it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gleanrl.config.settings import Settings


class TaskSettings(Settings):
    """The order of fresh tasks. Replay's choice of stored ones is a section of its own and works with each of these."""

    order: str = "shuffled"
    """shuffled: every task once an epoch; the sources of a mixture by their weights, each in epochs of its own.
    levels: one source after the other, the next once the last is learned. solve_rate: tasks that are solved half the
    time come most often. Or an import path of a `Curriculum`, made as
    ``(tasks, *, weights, group, seed, greedy, **options)``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the order: of levels ``advance``, ``window``, ``review``; of solve_rate ``sigma``,
    ``memory``, ``explore``."""
