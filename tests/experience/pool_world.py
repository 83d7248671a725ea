"""Small episodes and groups for tests of the pool, and a function that reads all tables of a pool's file."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.experience.pool.schema import TRACKED
from gleanrl.types import Group, GroupSpec, Score, StopReason, Task, Trajectory, Turn


def task(name: str) -> Task:
    return Task(name, ({"role": "user", "content": f"do {name}"},), {"seed": len(name), "of": ["a", 1.5]})


def episode(
    name: str,
    score: float | None = 1.0,
    tokens: Sequence[int] = (7, 8),
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    info: Mapping[str, Any] | None = None,
) -> Trajectory:
    """One context turn and one sampled turn; ``score`` None = could not be computed."""
    given = [-0.5] * len(tokens) if logprobs is None else logprobs
    segment = (
        Turn({"role": "user", "content": "?"}, np.array([1, 2, 3], np.int32)),
        Turn({"role": "assistant", "content": "!"}, np.array(tokens), np.array(given), version),
    )
    scored = Score.failed("no answer") if score is None else Score(score)
    return Trajectory(f"{name}/{tokens}", name, (segment,), scored, StopReason.DONE, info or {})


def group(name: str, fresh: Sequence[Trajectory], replayed: Sequence[Trajectory] = ()) -> Group:
    return Group(GroupSpec(task(name), len(fresh), tuple(replayed)), (*fresh, *replayed), 0)


def solved(name: str, successes: int, attempts: int, *, first: int = 0, version: int = 0) -> Group:
    """Return a fresh group whose member ``i`` has the tokens ``(first + i, 5)``, so that all members differ."""
    return group(
        name,
        [episode(name, float(i < successes), (first + i, 5), version=version) for i in range(attempts)],
    )


def contents(path: Path, *, marks: bool = False) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of the tables that `rewind` restores; with ``marks``, of the marks and the undo log too."""
    tables = list(TRACKED)
    if marks:
        tables += ["clock", "marks", *(f"undo_{table}" for table in TRACKED)]
    db = sqlite3.connect(path)
    try:
        return {table: sorted(db.execute(f"SELECT * FROM {table}"), key=repr) for table in tables}
    finally:
        db.close()
