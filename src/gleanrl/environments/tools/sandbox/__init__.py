"""Python code of a model, run where it can do no harm: another process, no network, no files but its own.

Works alone: `PythonSandbox` runs code for a tool, or for a reward that tests programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Limits", "PythonSandbox", "Ran", "Session"]

if TYPE_CHECKING:
    from gleanrl.environments.tools.sandbox.client import PythonSandbox, Session
    from gleanrl.environments.tools.sandbox.limits import Limits, Ran


def __getattr__(name: str) -> Any:
    """Import on first use: the server of sandboxes imports this package too, and shall hold nothing else."""
    if name not in __all__:
        raise AttributeError(f"module 'gleanrl.environments.tools.sandbox' has no attribute {name!r}")
    from importlib import import_module

    part = "client" if name in ("PythonSandbox", "Session") else "limits"
    return getattr(import_module(f"gleanrl.environments.tools.sandbox.{part}"), name)
