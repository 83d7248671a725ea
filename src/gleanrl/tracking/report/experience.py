"""Collects data about experience replay for the report's page.

The metrics show how the experience pool grew and how many tokens were replayed. The pool's file shows how often each
trajectory was replayed.
"""

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
"""Number of trajectories in the page's table of those that were replayed most often."""
MAX_RATES = 9
"""Maximum number of solve rates with separate labels. If there are more, each label stands for a range of rates."""
USES = {"1": (1, 1), "2-3": (2, 3), "4-7": (4, 7), "8 or more": (8, np.inf)}
"""Ranges of the number of replays for the page's histogram: label -> (lowest, highest) number."""

_EXTRA_TOKENS = re.compile(r"replay_update/\d+/tokens/trained")
_BUCKET = re.compile(r"pool/bucket/(\d+)_of_(\d+)")


def experience(folder: RunFolder, rows: Sequence[Row], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``{"buckets", "share", "extra_share", "pool", "problem"}`` of a run with replay, None for any other run.

    ``buckets`` is the result of `buckets`. ``share`` and ``extra_share`` are curves: the share of the trained tokens
    that belong to replayed members of groups, and the share that belong to the extra updates on replayed trajectories.
    They are None if the run has no such tokens. ``pool`` describes the trajectories in the pool's file. If the file
    cannot be read, ``pool`` is None and ``problem`` is the error message.
    """
    replaying = [row for row in rows if "replay/on" in row.metrics]
    if not config.get("replay", {}).get("enabled") and not replaying:
        return None

    replayed = "loss/replayed/token_share"
    shares = [[row.step, row.metrics.get(replayed, 0.0)] for row in replaying]
    in_groups = any(replayed in row.metrics for row in rows)

    extra_shares, updated = [], False
    for row in rows:
        extra = sum(value for name, value in row.metrics.items() if _EXTRA_TOKENS.fullmatch(name))
        updated = updated or extra > 0
        if "tokens/trained" in row.metrics:
            extra_shares.append([row.step, extra / max(row.metrics["tokens/trained"] + extra, 1.0)])

    pool = problem = None
    try:
        pool = _read_pool(folder)
    except (UserError, sqlite3.Error) as error:
        problem = str(error)
    return {
        "buckets": buckets(rows),
        "share": dict(zip(("steps", "values"), thin(shares), strict=True)) if in_groups else None,
        "extra_share": dict(zip(("steps", "values"), thin(extra_shares), strict=True)) if updated else None,
        "pool": pool,
        "problem": problem,
    }


def buckets(rows: Sequence[Row]) -> dict[str, Any]:
    """Count the replayable tasks by their solve rate in each step. Returns ``{"labels", "steps", "values"}``.

    A task's solve rate is that of its latest fresh group, and each label stands for one rate or a range of rates.
    ``values`` has a list for each label, with the number of tasks in each step. The labels are sorted by solve rate,
    lowest first. Before them comes the label of tasks that have no fresh group yet.
    """
    counts: dict[str, tuple[int, int]] = {}  # metric -> successes, attempts
    for row in rows:
        for name in row.metrics:
            if found := _BUCKET.fullmatch(name):
                counts[name] = int(found[1]), int(found[2])
    in_bands = len(set(counts.values())) > MAX_RATES
    label_of: dict[str, str] = {}
    for name in sorted(counts, key=lambda name: (_rate(*counts[name]), counts[name])):
        successes, attempts = counts[name]
        if not attempts:
            label_of[name] = "not tried"
        elif in_bands:
            label_of[name] = _band(successes / attempts)
        else:
            label_of[name] = f"{successes} of {attempts}"
    labels = list(dict.fromkeys(label_of.values()))
    table: list[list[Any]] = []
    for row in rows:
        if "pool/tasks" in row.metrics:
            sizes = dict.fromkeys(labels, 0.0)
            for name in counts.keys() & row.metrics.keys():
                sizes[label_of[name]] += row.metrics[name]
            table.append([row.step, *sizes.values()])
    steps, *values = thin(table) if table else [[], *([] for _ in labels)]
    return {"labels": labels, "steps": steps, "values": values}


def _rate(successes: int, attempts: int) -> float:
    return successes / attempts if attempts else -1.0


def _band(rate: float) -> str:
    """Return the label of the range that contains a solve rate. The rates 0 and 1 have separate labels."""
    if rate in (0, 1):
        return f"{100 * rate:.0f} %"
    inner = MAX_RATES - 2
    band = min(int(rate * inner), inner - 1)
    return f"{100 * band / inner:.0f}-{100 * (band + 1) / inner:.0f} %"


def _read_pool(folder: RunFolder) -> dict[str, Any]:
    """Return the number of trajectories in the pool, a histogram of their uses, and the most used trajectories.

    The uses of a trajectory are the number of times that it was replayed. Raises `UserError` or `sqlite3.Error` if the
    pool cannot be read.
    """
    most: list[dict[str, Any]] = []
    with browse.reading(folder.pool_path()) as db:
        now, uses = browse.newest_step(db), browse.values(db, "uses")
        for line in browse.most_used(db, MOST_USED):
            try:
                found = browse.entry(db, line.key)
            except codec.Damaged:
                found = None
            most.append(
                {
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
            )
    counts = [["0", int((uses == 0).sum())]]
    for label, (low, high) in USES.items():
        counts.append([label, int(((uses >= low) & (uses <= high)).sum())])
    return {"trajectories": uses.size, "uses": counts, "most": most}
