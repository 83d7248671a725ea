"""Computes how old the trained data were, in steps, for the report's page: in the whole run and in each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from gleanrl.config.settings import ScheduleSettings
from gleanrl.runtime.run_folder import Row
from gleanrl.schedule.schedule import Schedule
from gleanrl.schedule.step_metrics import GROUPS, TOKENS
from gleanrl.tracking.report.curves import thin
from gleanrl.utils.errors import UserError

MAX_AGES = 16
"""Maximum number of labels. If there are more ages, each label stands for a range of ages of equal length."""


def staleness(rows: Sequence[Row], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the histograms of the ages as ``{"bound", "labels", "groups", "tokens", "steps", "by_step"}``.

    A label is an age or a range of ages, youngest first. ``groups`` and ``tokens`` are the numbers of trained groups
    and tokens in the run, one number for each label. ``by_step`` has for each label a list with the number of groups in
    each step. ``bound`` is the staleness bound of the schedule, or None if the configuration does not contain it.

    Returns None if no ages were logged, or if all ages and the bound are 0.
    """
    counted = [row for row in rows if any(name.startswith(GROUPS) for name in row.metrics)]
    groups = [_read_ages(row, GROUPS) for row in counted]
    tokens = [_read_ages(row, TOKENS) for row in counted]
    oldest = max((age for ages in (*groups, *tokens) for age in ages), default=0)
    bound = None
    if "schedule" in config:
        with suppress(TypeError, ValidationError, UserError):  # if the section is invalid, the bound stays None
            bound = Schedule.from_settings(ScheduleSettings(**config["schedule"])).staleness
    if not counted or not (oldest or bound):
        return None

    oldest = max(oldest, bound or 0)
    size = -(-(oldest + 1) // MAX_AGES)  # number of ages that share a label
    starts = range(0, oldest + 1, size)
    group_total, token_total = [0.0] * len(starts), [0.0] * len(starts)
    table: list[list[Any]] = []
    for row, group_ages, token_ages in zip(counted, groups, tokens, strict=True):
        of_step = [0.0] * len(starts)
        for age, count in group_ages.items():
            of_step[age // size] += count
            group_total[age // size] += count
        for age, count in token_ages.items():
            token_total[age // size] += count
        table.append([row.step, *of_step])
    steps, *by_step = thin(table)
    return {
        "bound": bound,
        "labels": [str(start) if size == 1 else f"{start}-{start + size - 1}" for start in starts],
        "groups": group_total,
        "tokens": token_total,
        "steps": steps,
        "by_step": by_step,
    }


def _read_ages(row: Row, prefix: str) -> dict[int, float]:
    """Return the histogram, count by age, that consists of the metrics whose names are ``prefix`` and an age."""
    found = {name[len(prefix) :]: value for name, value in row.metrics.items() if name.startswith(prefix)}
    return {int(age): value for age, value in found.items() if age.isdecimal()}
