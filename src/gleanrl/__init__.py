"""Glean RL: RL post-training for LLM agents that wastes neither experience nor time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Group", "GroupSpec", "Message", "Schedule", "Score", "StopReason", "Task", "Trajectory", "Turn"]

if TYPE_CHECKING:
    from gleanrl.schedule.schedule import Schedule
    from gleanrl.types import Group, GroupSpec, Message, Score, StopReason, Task, Trajectory, Turn


def __getattr__(name: str) -> Any:
    """Import on first use: `import gleanrl` itself stays instant."""
    if name not in __all__:
        raise AttributeError(f"module 'gleanrl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("gleanrl.schedule.schedule" if name == "Schedule" else "gleanrl.types"), name)
