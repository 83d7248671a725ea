"""Glean RL: reinforcement learning (RL) that post-trains LLM agents, with experience replay and asynchronous rewards.

This module exports the data types of a run. `gleanrl.protocols` defines the interfaces that users implement, and
`gleanrl.train` is the training loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Group", "GroupSpec", "Message", "Schedule", "Score", "StopReason", "Task", "Trajectory", "Turn"]

if TYPE_CHECKING:
    from gleanrl.schedule.schedule import Schedule
    from gleanrl.types import Group, GroupSpec, Message, Score, StopReason, Task, Trajectory, Turn


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used, so that `import gleanrl` itself takes almost no time."""
    if name not in __all__:
        raise AttributeError(f"module 'gleanrl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("gleanrl.schedule.schedule" if name == "Schedule" else "gleanrl.types"), name)
