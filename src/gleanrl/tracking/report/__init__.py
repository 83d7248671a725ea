"""Makes the report of a run: one self-contained HTML file, and a table for the terminal.

Both read only the run folder, so they work for a running, finished or crashed run, on any machine.
"""

from __future__ import annotations

from gleanrl.rollout.conversation import transcript
from gleanrl.tracking.report.page import build
from gleanrl.tracking.report.summary import show

__all__ = ["build", "show", "transcript"]
