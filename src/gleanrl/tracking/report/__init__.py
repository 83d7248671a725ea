"""The report of a run: one HTML file that needs nothing else, and a table for the terminal.

Both read only the run folder, so they work on a running, finished or crashed run, anywhere.
"""

from __future__ import annotations

from gleanrl.rollout.transcript import transcript
from gleanrl.tracking.report.page import build
from gleanrl.tracking.report.summary import show

__all__ = ["build", "show", "transcript"]
