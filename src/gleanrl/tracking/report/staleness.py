"""Histograms of the trained trajectories' ages for the page: one of the run, and one of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from gleanrl.config.settings import ScheduleSettings
from gleanrl.runtime.run_folder import Row
from gleanrl.schedule.schedule import Schedule
from gleanrl.schedule.staleness import GROUPS, TOKENS
from gleanrl.tracking.report.curves import thin
from gleanrl.utils.errors import UserError

MAX_AGES = 16
"""Ages shown separately; more are grouped in equal bands."""


def staleness(rows: Sequence[Row], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``{"bound", "labels", "groups", "tokens", "steps", "by_step"}``; None if all data is always fresh.

    ``groups`` and ``tokens`` count over the run and have one number for each label, youngest first. ``by_step`` has a
    list of groups per step for each label. ``bound`` is None if the configuration does not contain it.
    """
    counted = [row for row in rows if any(name.startswith(GROUPS) for name in row.metrics)]
    groups = [_ages(row, GROUPS) for row in counted]
    tokens = [_ages(row, TOKENS) for row in counted]
    oldest = max((age for ages in (*groups, *tokens) for age in ages), default=0)
    bound = _bound(config)
    if not counted or not (oldest or bound):
        return None
    labels, size = _bands(max(oldest, bound or 0))
    table = [[row.step, *_binned(ages, len(labels), size)] for row, ages in zip(counted, groups, strict=True)]
    steps, *by_step = thin(table)
    totals = [_binned(ages, len(labels), size) for ages in tokens]
    return {
        "bound": bound,
        "labels": labels,
        "groups": [sum(column) for column in zip(*(row[1:] for row in table), strict=True)],
        "tokens": [sum(column) for column in zip(*totals, strict=True)],
        "steps": steps,
        "by_step": by_step,
    }


def _ages(row: Row, prefix: str) -> dict[int, float]:
    found = {name[len(prefix) :]: value for name, value in row.metrics.items() if name.startswith(prefix)}
    return {int(age): value for age, value in found.items() if age.isdecimal()}


def _bands(oldest: int) -> tuple[list[str], int]:
    """Return the label of each band of ages, and how many ages a band holds."""
    size = -(-(oldest + 1) // MAX_AGES)
    starts = range(0, oldest + 1, size)
    return [str(start) if size == 1 else f"{start}-{start + size - 1}" for start in starts], size


def _binned(ages: Mapping[int, float], bands: int, size: int) -> list[float]:
    out = [0.0] * bands
    for age, count in ages.items():
        out[age // size] += count
    return out


def _bound(config: Mapping[str, Any]) -> int | None:
    if "schedule" not in config:
        return None
    try:
        return Schedule.from_settings(ScheduleSettings(**config["schedule"])).staleness
    except (TypeError, ValidationError, UserError):
        return None
