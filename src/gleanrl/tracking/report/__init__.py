"""Makes the report of a run: `build` writes a self-contained HTML page, and `show` prints a table on the terminal.

Both read only the run folder. So they work on any machine that has this folder, and for runs that are in progress, have
finished or have crashed.
"""

from __future__ import annotations

from gleanrl.rollout.conversation import transcript
from gleanrl.tracking.report.page import build
from gleanrl.tracking.report.summary import show

__all__ = ["build", "show", "transcript"]
