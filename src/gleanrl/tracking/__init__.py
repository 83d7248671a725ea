"""Monitors and the report. They only read what a run has written or logged."""
