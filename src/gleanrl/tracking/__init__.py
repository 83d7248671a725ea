"""Monitors, which write or show the metrics of a run, and the report, which is made from a run's folder.

Neither changes the run: a monitor only receives metrics, and the report only reads files.
"""
