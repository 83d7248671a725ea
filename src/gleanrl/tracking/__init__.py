"""Monitors and the report of a run. Both only read what the run has written or logged."""
