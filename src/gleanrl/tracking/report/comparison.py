"""Compares runs: the settings in which they differ, and the names by which a comparison lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gleanrl.runtime.run_folder import RunFolder, RunInfo

NAMES = ("run.name", "run.folder")
"""Settings that only say where a run is stored."""


def differing_settings(runs: Sequence[RunFolder]) -> list[tuple[str, list[Any]]]:
    """Return the settings whose values differ, as pairs of the dotted key and the values of all runs, sorted by key.

    A value is None if the run's configuration does not contain the key. Raises `UserError` if a config.toml cannot be
    read.
    """
    flat = [RunInfo(run, config=run.read_config()).flat_config() for run in runs]
    found = []
    for key in sorted(set().union(*flat).difference(NAMES)):
        values = [config.get(key) for config in flat]
        if any(value != values[0] for value in values):
            found.append((key, values))
    return found


def run_names(runs: Sequence[RunFolder]) -> list[str]:
    """Return the name of each run, or the paths of all of them if two have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]
