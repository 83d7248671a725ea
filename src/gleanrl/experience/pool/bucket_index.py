"""The pool's index of tasks by difficulty, which draws tasks of one difficulty uniformly at random.

The cost of a draw does not depend on the size of the pool. A *fresh* member of a group was sampled for the group and
not replayed, and a *fresh group* is a group with valid fresh members. A bucket contains the tasks whose latest fresh
group had the same number of attempts (valid fresh members) and the same number of successes among them. One additional
bucket contains the retired tasks. A task is in at most one bucket: a retired task is in the bucket of retired tasks,
any other task with a stored trajectory is in the bucket of its latest fresh group, and a task without a trajectory is
in none. A task outside the run's training tasks is in none either.

The tasks of a bucket are numbered by positions 0 .. size - 1 without gaps. A new task gets the position at the end, and
when a task leaves, the last task takes its position. So a uniform draw of tasks is a uniform draw of positions, and an
SQL index finds the task at a position.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

RETIRED = -1
ATTEMPTS = 1_000_000  # a bucket's id is attempts * ATTEMPTS + successes, so every group must have fewer successes


@dataclass(slots=True)
class TaskRow:
    """One row of the table ``tasks``, the state of a task. `schema.TABLES` explains the columns."""

    id: int
    name: str
    attempts: int
    successes: int
    step: int
    streak: int
    retired: int
    live: int
    outside: int
    bucket: int | None
    position: int | None

    @property
    def wanted_bucket(self) -> int | None:
        if self.outside:
            return None
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
    """Write the row of a task, and move the task to another bucket if its new state requires it."""
    # Read bucket and position again: since ``row`` was read, another task may have left the bucket, which can give its
    # position to this task.
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
        "UPDATE tasks SET attempts = ?, successes = ?, step = ?, streak = ?, retired = ?, live = ?, outside = ?, "
        "bucket = ?, position = ? WHERE id = ?",
        (
            *(row.attempts, row.successes, row.step, row.streak, row.retired, row.live, row.outside),
            *(row.bucket, row.position, row.id),
        ),
    )


def sizes(db: sqlite3.Connection, without: Collection[str] = ()) -> dict[int, int]:
    """Return the number of tasks in each bucket, by the bucket's id.

    With ``without``, the names of sources, only tasks with a trajectory from another source are counted, and retired
    tasks are left out. This takes time in proportion to the number of tasks, unlike all else in this module.
    """
    if not without:
        return dict(db.execute("SELECT id, size FROM buckets ORDER BY id"))
    query = f"SELECT bucket, count(*) FROM tasks WHERE bucket >= 0 AND {_has_other(without)} GROUP BY bucket"
    return dict(db.execute(f"{query} ORDER BY bucket", tuple(without)))


def draw(
    db: sqlite3.Connection,
    bucket: int,
    count: int,
    random: np.random.Generator,
    exclude: Iterable[str],
    without: Collection[str] = (),
) -> list[TaskRow]:
    """Draw up to ``count`` tasks of a bucket uniformly without replacement. Task ids in ``exclude`` are not drawn.

    With ``without``, only tasks that `sizes` counts with it are drawn.
    """
    excluded: list[int] = []
    for name in set(exclude):
        found = db.execute("SELECT position FROM tasks WHERE name = ? AND bucket = ?", (name, bucket)).fetchone()
        if found is not None:
            excluded.append(found[0])
    excluded.sort()
    if without:
        query = f"SELECT position FROM tasks WHERE bucket = ? AND {_has_other(without)}"
        others = {row[0] for row in db.execute(query, (bucket, *without))}
        excluded = sorted({*excluded, *range(_size(db, bucket))} - (others - set(excluded)))
    free = _size(db, bucket) - len(excluded)
    if count < 1 or free < 1:
        return []
    chosen = random.choice(free, min(count, free), replace=False)
    # ``chosen`` numbers the positions that are not excluded (the free positions), from 0. Convert it to positions: the
    # i-th free position is i + the number of excluded positions that have at most i free positions before them.
    chosen += np.searchsorted(np.array(excluded, np.int64) - np.arange(len(excluded)), chosen, side="right")
    query = f"SELECT {COLUMNS} FROM tasks WHERE bucket = ? AND position = ?"
    return [TaskRow(*db.execute(query, (bucket, position)).fetchone()) for position in chosen.tolist()]


def _has_other(sources: Collection[str]) -> str:
    """Return an SQL condition on a row of ``tasks``: it has a trajectory from none of the sources, which are bound."""
    names = ", ".join("?" * len(sources))
    return f"EXISTS (SELECT 1 FROM trajectories WHERE task = tasks.id AND source NOT IN ({names}))"


def _size(db: sqlite3.Connection, bucket: int) -> int:
    found = db.execute("SELECT size FROM buckets WHERE id = ?", (bucket,)).fetchone()
    return 0 if found is None else found[0]
