"""The environment ``tools`` of the settings, in whose episodes the model calls tools.

The tools are the typed methods of a user's class, a sandboxed Python interpreter, and search in a local corpus.
`ToolTaskset` makes the tasks, and `ToolEnvironment` plays an episode. The expert of a user's class yields calls that it
makes with `call`.
"""

from __future__ import annotations

from gleanrl.environments.tools.environment import ToolEnvironment, call
from gleanrl.environments.tools.schema import tools_of
from gleanrl.environments.tools.taskset import ToolTaskset

__all__ = ["ToolEnvironment", "ToolTaskset", "call", "tools_of"]
