"""How large a pool is and what went in and out of it, at no cost that grows with it."""

from __future__ import annotations

import sqlite3
from collections import Counter
from typing import Any

from gleanrl.experience.pool import shelves
from gleanrl.experience.pool.keeper import Keeper


def stats(db: sqlite3.Connection) -> dict[str, Any]:
    """Sizes, tasks by bucket, evictions by cause, versions, marks; JSON-serialisable."""
    counts = Counter(dict(db.execute("SELECT name, value FROM counters")))
    sizes = dict(db.execute("SELECT id, size FROM shelves WHERE size > 0 ORDER BY id"))
    oldest, newest = db.execute(
        "SELECT (SELECT min(version) FROM trajectories), (SELECT max(version) FROM trajectories)"
    ).fetchone()
    marks = [row[0] for row in db.execute("SELECT id FROM marks ORDER BY id")]
    buckets = {shelves.bucket_of(shelf): size for shelf, size in sizes.items() if shelf >= 0}
    return {
        "tasks": counts["tasks"],
        "eligible": sum(buckets.values()),
        "retired": sizes.get(shelves.RETIRED, 0),
        "trajectories": counts["trajectories"],
        "bytes": counts["bytes"],
        "oldest_version": oldest,
        "newest_version": newest,
        "buckets": {f"{successes}/{attempts}": size for (successes, attempts), size in buckets.items()},
        "evicted": {name[8:]: value for name, value in sorted(counts.items()) if name.startswith("evicted/")},
        "marks": marks,
    }


def metrics(keeper: Keeper, seen: Counter[str]) -> dict[str, float]:
    """``pool/...`` after a change: what was ``seen`` in it, evicted since this was asked last, and is there now."""
    counts, evicted = keeper.counts, keeper.newly_evicted()
    sizes = dict(keeper.db.execute("SELECT id, size FROM shelves ORDER BY id"))
    buckets = {shelves.bucket_of(shelf): size for shelf, size in sizes.items() if shelf >= 0}
    told: dict[str, float] = {
        "pool/tasks": counts["tasks"],
        "pool/eligible": sum(buckets.values()),
        "pool/retired": sizes.get(shelves.RETIRED, 0),
        "pool/trajectories": counts["trajectories"],
        "pool/bytes": counts["bytes"],
    }
    for name in ("admitted", "newly_retired", "unretired"):
        told[f"pool/{name}"] = seen[name]
    told |= {f"pool/{name}": count for name, count in seen.items()}
    for cause in ("capacity", "age", *evicted):
        told[f"pool/evicted/{cause}"] = evicted[cause]
    told |= {f"pool/bucket/{s}_of_{n}": size for (s, n), size in buckets.items()}
    return {name: float(value) for name, value in told.items()}
