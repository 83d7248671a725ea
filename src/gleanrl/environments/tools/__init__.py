"""Tools: a Python class whose typed methods a model calls, a sandboxed Python, and search in a local corpus."""

from __future__ import annotations

from gleanrl.environments.tools.environment import ToolEnvironment, call
from gleanrl.environments.tools.schema import tools_of
from gleanrl.environments.tools.taskset import ToolTaskset

__all__ = ["ToolEnvironment", "ToolTaskset", "call", "tools_of"]
