"""Makes the reports of runs and evaluations.

`build` writes a self-contained HTML page on a run or an evaluation, `build_comparison` one on several runs, and `show`
prints a table on the terminal. All read only the run folders. So they work on any machine that has these folders, and
for runs that are in progress, have finished or have crashed.
"""

from __future__ import annotations

from gleanrl.rollout.conversation import transcript
from gleanrl.tracking.report.page import build, build_comparison
from gleanrl.tracking.report.summary import show

__all__ = ["build", "build_comparison", "show", "transcript"]
