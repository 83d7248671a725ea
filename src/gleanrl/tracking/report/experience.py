"""Data of the experience pool for the page: its growth from the metrics, and replay counts from its file."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gleanrl.experience.pool import browse, codec
from gleanrl.runtime.run_folder import Row, RunFolder
from gleanrl.tracking.report.curves import thin
from gleanrl.utils.errors import UserError

MOST_USED = 20
"""Trajectories in the page's table."""
SHELVES = 9
"""Solve rates shown separately; more are grouped in bands."""
USES = ((0, 0), (1, 1), (2, 3), (4, 7), (8, None))
"""Ranges (from, to) of replay counts that the page shows."""

_EXTRA_TOKENS = re.compile(r"replay_update/\d+/tokens/trained")
_BUCKET = re.compile(r"pool/bucket/(\d+)_of_(\d+)")


def experience(folder: RunFolder, rows: Sequence[Row], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``{"buckets", "share", "extra_share", "pool", "problem"}`` of a run with replay, None for any other.

    ``share`` and ``extra_share`` are the tokens replayed in groups and in extra updates, as shares of those trained.
    ``pool`` is None if the file cannot be read; ``problem`` then says why in one line.
    """
    if not config.get("replay", {}).get("enabled") and not any("replay/on" in row.metrics for row in rows):
        return None
    pool = problem = None
    try:
        pool = _pool(folder)
    except (UserError, sqlite3.Error) as error:
        problem = str(error)
    shares = {"share": _share(rows), "extra_share": _extra_share(rows)}
    return {"buckets": buckets(rows), **shares, "pool": pool, "problem": problem}


def buckets(rows: Sequence[Row]) -> dict[str, Any]:
    """Return ``{"labels", "steps", "values"}``: replayable tasks by the solve rate of their latest fresh group.

    ``values`` has one list for each label, hardest first, with one number per step.
    """
    known = {name: (int(found[1]), int(found[2])) for row in rows for name in row.metrics if (found := _named(name))}
    labels = _labels(set(known.values()))
    order = list(dict.fromkeys(labels[bucket] for bucket in sorted(labels, key=lambda b: (_rate(b), b))))
    table: list[list[Any]] = []
    for row in rows:
        if "pool/tasks" in row.metrics:
            sizes = dict.fromkeys(order, 0.0)
            for name in known.keys() & row.metrics.keys():
                sizes[labels[known[name]]] += row.metrics[name]
            table.append([row.step, *sizes.values()])
    steps, *values = thin(table) if table else [[], *([] for _ in order)]
    return {"labels": order, "steps": steps, "values": values}


def _named(name: str) -> re.Match[str] | None:
    return _BUCKET.fullmatch(name)


def _rate(bucket: tuple[int, int]) -> float:
    successes, attempts = bucket
    return successes / attempts if attempts else -1.0


def _labels(known: set[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """Return the label of each bucket (successes, attempts); buckets with the same label are shown as one."""
    if len(known) <= SHELVES:
        return {(s, n): f"{s} of {n}" if n else "not tried" for s, n in known}
    return {bucket: _band(_rate(bucket)) for bucket in known}


def _band(rate: float) -> str:
    if rate < 0:
        return "not tried"
    if rate in (0, 1):
        return f"{100 * rate:.0f} %"
    inner = SHELVES - 2
    band = min(int(rate * inner), inner - 1)
    return f"{100 * band / inner:.0f}-{100 * (band + 1) / inner:.0f} %"


def _share(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return replayed tokens as a share of those with a loss; 0 in steps without replay."""
    name = "loss/replayed/token_share"
    if not any(name in row.metrics for row in rows):
        return None
    steps, values = thin([[row.step, row.metrics.get(name, 0.0)] for row in rows if "replay/on" in row.metrics])
    return {"steps": steps, "values": values}


def _extra_share(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the tokens of a step's extra updates as a share of all trained tokens; 0 in steps without any."""
    table: list[list[float]] = []
    for row in rows:
        if "tokens/trained" in row.metrics:
            extra = sum(value for name, value in row.metrics.items() if _EXTRA_TOKENS.fullmatch(name))
            table.append([row.step, extra / max(row.metrics["tokens/trained"] + extra, 1.0)])
    if not any(share for _, share in table):
        return None
    shown, values = thin(table)
    return {"steps": shown, "values": values}


def _pool(folder: RunFolder) -> dict[str, Any]:
    with browse.reading(folder.pool_path()) as db:
        now, uses = browse.newest_step(db), browse.values(db, "uses")
        most = [_trajectory(db, line, now) for line in browse.most_used(db, MOST_USED)]
    counts = [[_span(low, high), int(np.sum((uses >= low) & (uses <= (high or np.inf))))] for low, high in USES[1:]]
    return {"trajectories": uses.size, "uses": [["0", int((uses == 0).sum())], *counts], "most": most}


def _span(low: int, high: int | None) -> str:
    if high is None:
        return f"{low} or more"
    return str(low) if low == high else f"{low}-{high}"


def _trajectory(db: sqlite3.Connection, line: browse.Line, now: int) -> dict[str, Any]:
    try:
        found = browse.entry(db, line.key)
    except codec.Damaged:
        found = None
    return {
        "key": line.key,
        "task": line.task,
        "solved": f"{line.successes} of {line.attempts}" if line.attempts else "not tried",
        "retired": bool(line.retired),
        "uses": line.uses,
        "age": max(now - line.version, 0),
        "entropy": line.entropy,
        "reward": None if found is None else found.stored.trajectory.score.value,
        "damaged": found is None,
    }
