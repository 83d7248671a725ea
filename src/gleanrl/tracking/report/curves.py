"""Converts the metrics of a run to the curves that the report's page draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gleanrl.runtime.run_folder import Row
from gleanrl.schedule.step_metrics import GROUPS, TOKENS

MAX_POINTS = 1500
"""Maximum number of points of a curve. The points of a longer curve are averaged in bins (see `thin`)."""

FIRST = (
    "reward/mean",
    "reward/success",
    "eval/sampled/pass@1",
    "eval/sampled/score",
    "eval/greedy/success",
    "eval/return",
    "loss/policy",
    "loss/approx_kl_k3",
    "loss/entropy",
    "learner/grad_norm",
    "schedule/staleness_mean",
    "groups/zero_variance",
    "sampler/tokens_per_s",
    "learner/tokens_per_s",
    "device/idle_share",
    "time/step_s",
)
"""The most important metrics, which the page shows first, in this order."""


def curves(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the curve of every metric: first those of `FIRST`, in this order, then the others by name.

    A curve is ``{"name", "steps", "times", "values"}``, where ``times`` are seconds since the first row. If there are
    metrics ``x_low`` and ``x_high``, they have no curve: they become ``"low"`` and ``"high"``, the confidence interval,
    in the curve of ``x``. The histograms of staleness are left out, because `gleanrl.tracking.report.staleness` reads
    them.
    """
    origin = rows[0].time if rows else 0.0
    names = {name for row in rows for name in row.metrics if not name.startswith((GROUPS, TOKENS))}
    ends = ("_low", "_high")
    bounds = {f"{name}{end}" for name in names if all(f"{name}{one}" in names for one in ends) for end in ends}
    first = {name: place for place, name in enumerate(FIRST)}
    found = []
    for name in sorted(names - bounds, key=lambda name: (first.get(name, len(FIRST)), name)):
        columns = {"values": name}
        if f"{name}_low" in bounds:
            columns |= {"low": f"{name}_low", "high": f"{name}_high"}
        table = []
        for row in rows:
            if name in row.metrics:
                table.append([row.step, row.time - origin, *(row.metrics.get(column) for column in columns.values())])
        found.append({"name": name, **dict(zip(("steps", "times", *columns), thin(table), strict=True))})
    return found


def thin(table: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Return the columns of ``table``, whose rows are reduced to at most `MAX_POINTS`.

    If there are more rows, they are divided into bins of the same number of rows, and each bin becomes its mean. Values
    that are None do not count for the mean; a bin without other values becomes None.
    """
    size = -(-len(table) // MAX_POINTS)
    columns: list[list[float | None]] = []
    for column in zip(*table, strict=True):
        means: list[float | None] = []
        for start in range(0, len(column), size):
            known = [value for value in column[start : start + size] if value is not None]
            means.append(float(f"{sum(known) / len(known):.6g}") if known else None)
        columns.append(means)
    return columns
