"""The index of tasks by difficulty: draws tasks of one bucket uniformly, at a cost that does not grow with the pool.

A bucket holds the tasks with the same successes and attempts in their latest fresh group. One more bucket holds the
retired tasks. The tasks of a bucket have the positions 0 .. size - 1 without gaps: a new task goes to the end, and when
a task leaves, the last one takes its position. So a uniform draw of tasks is a draw of positions, which an SQL index
finds. A task is in at most one bucket: that of retired tasks if it is retired, else that of its latest fresh group if
it has a trajectory, else in none.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

RETIRED = -1
ATTEMPTS = 1_000_000  # more than any group has attempts


@dataclass(slots=True)
class TaskRow:
    """One row of the table ``tasks``: the state of a task."""

    id: int
    name: str
    attempts: int
    successes: int
    step: int
    streak: int
    retired: int
    live: int
    bucket: int | None
    position: int | None

    @property
    def wanted_bucket(self) -> int | None:
        if self.retired:
            return RETIRED
        return bucket_id((self.successes, self.attempts)) if self.live else None


COLUMNS = ", ".join(TaskRow.__slots__)


def bucket_id(bucket: tuple[int, int]) -> int:
    successes, attempts = bucket
    return attempts * ATTEMPTS + successes


def bucket_of(bucket: int) -> tuple[int, int]:
    attempts, successes = divmod(bucket, ATTEMPTS)
    return successes, attempts


def find(db: sqlite3.Connection, name: str) -> TaskRow | None:
    found = db.execute(f"SELECT {COLUMNS} FROM tasks WHERE name = ?", (name,)).fetchone()
    return None if found is None else TaskRow(*found)


def get(db: sqlite3.Connection, task: int) -> TaskRow:
    return TaskRow(*db.execute(f"SELECT {COLUMNS} FROM tasks WHERE id = ?", (task,)).fetchone())


def save(db: sqlite3.Connection, row: TaskRow) -> None:
    """Write the row of a task, and move the task to the bucket in which it belongs now."""
    # read again, because another task that left the bucket may have moved this one
    row.bucket, row.position = db.execute("SELECT bucket, position FROM tasks WHERE id = ?", (row.id,)).fetchone()
    wanted = row.wanted_bucket
    if row.bucket != wanted:
        if row.bucket is not None:
            last = _size(db, row.bucket) - 1
            db.execute("UPDATE tasks SET bucket = NULL, position = NULL WHERE id = ?", (row.id,))
            move = "UPDATE tasks SET position = ? WHERE bucket = ? AND position = ?"
            db.execute(move, (row.position, row.bucket, last))
            db.execute("UPDATE buckets SET size = ? WHERE id = ?", (last, row.bucket))
            row.bucket = row.position = None
        if wanted is not None:
            row.bucket, row.position = wanted, _size(db, wanted)
            grow = "INSERT INTO buckets VALUES (?, 1) ON CONFLICT (id) DO UPDATE SET size = size + 1"
            db.execute(grow, (wanted,))
    db.execute(
        "UPDATE tasks SET attempts = ?, successes = ?, step = ?, streak = ?, retired = ?, live = ?, bucket = ?, "
        "position = ? WHERE id = ?",
        (
            *(row.attempts, row.successes, row.step, row.streak, row.retired, row.live, row.bucket, row.position),
            row.id,
        ),
    )


def sizes(db: sqlite3.Connection) -> dict[int, int]:
    """Return the number of tasks in each bucket, by the bucket's id."""
    return dict(db.execute("SELECT id, size FROM buckets ORDER BY id"))


def draw(
    db: sqlite3.Connection, bucket: int, count: int, random: np.random.Generator, exclude: Iterable[str]
) -> list[TaskRow]:
    """Draw up to ``count`` tasks of a bucket, uniformly without replacement, except those named in ``exclude``."""
    excluded: list[int] = []
    for name in set(exclude):
        found = db.execute("SELECT position FROM tasks WHERE name = ? AND bucket = ?", (name, bucket)).fetchone()
        if found is not None:
            excluded.append(found[0])
    excluded.sort()
    free = _size(db, bucket) - len(excluded)
    if count < 1 or free < 1:
        return []
    chosen = random.choice(free, min(count, free), replace=False)
    # the i-th free position is i + the number of excluded positions that have at most i free positions before them
    chosen += np.searchsorted(np.array(excluded, np.int64) - np.arange(len(excluded)), chosen, side="right")
    query = f"SELECT {COLUMNS} FROM tasks WHERE bucket = ? AND position = ?"
    return [TaskRow(*db.execute(query, (bucket, position)).fetchone()) for position in chosen.tolist()]


def _size(db: sqlite3.Connection, bucket: int) -> int:
    found = db.execute("SELECT size FROM buckets WHERE id = ?", (bucket,)).fetchone()
    return 0 if found is None else found[0]
