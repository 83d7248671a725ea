"""The report of a run: one HTML file that needs nothing else, and a table for the terminal.

Both read only the run folder, so they work on a running, finished or crashed run, anywhere.
"""

from __future__ import annotations

from gleanrl.report.page import build
from gleanrl.report.summary import show
from gleanrl.report.transcript import transcript

__all__ = ["build", "show", "transcript"]
