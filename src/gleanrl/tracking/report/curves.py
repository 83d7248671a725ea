"""Converts metrics to curves: steps, values and, if the run has one, an interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gleanrl.runtime.run_folder import Row
from gleanrl.schedule.step_metrics import GROUPS, TOKENS

MAX_POINTS = 1500
"""Points per curve in the page; longer curves are averaged in bins."""

FIRST = (
    "reward/mean",
    "reward/success",
    "eval/sampled/pass@1",
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
"""Metrics that come first; all others follow by name."""


def curves(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return ``{"name", "steps", "times", "values"}``, with ``"low", "high"`` if known, of every metric, in order.

    ``times`` are seconds since the first row. ``x_low`` and ``x_high`` become the interval of ``x``. The histograms of
    staleness are left out; `gleanrl.tracking.report.staleness` draws them.
    """
    origin = rows[0].time if rows else 0.0
    names = {name for row in rows for name in row.metrics if not name.startswith((GROUPS, TOKENS))}
    bounds = {name for name in names if name.endswith(("_low", "_high")) and name.rpartition("_")[0] in names}
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
    """Return the columns of the table. A table of more than `MAX_POINTS` rows is reduced to the means of equal bins."""
    size = -(-len(table) // MAX_POINTS)
    columns: list[list[float | None]] = []
    for column in zip(*table, strict=True):
        means: list[float | None] = []
        for start in range(0, len(column), size):
            known = [value for value in column[start : start + size] if value is not None]
            means.append(float(f"{sum(known) / len(known):.6g}") if known else None)
        columns.append(means)
    return columns
