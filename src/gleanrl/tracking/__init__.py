"""Monitors and the report: they only read what a run wrote or logged."""
