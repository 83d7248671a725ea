"""Which task stands in which bucket, so that a uniform draw costs the same in a pool of any size.

A shelf is one bucket (successes, attempts) or the retired tasks. The tasks of a shelf stand at positions 0 .. size - 1
without a gap: a new one goes to the end, and when one leaves the last takes its place. Then a uniform draw is a draw
of positions, and each is found by an index. A task stands on at most one shelf: that of its latest fresh group if it
can be replayed, the retired shelf if it is retired, on none otherwise.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

RETIRED = -1
ATTEMPTS = 1_000_000  # above any number of attempts in one group


@dataclass(slots=True)
class Row:
    """What is known of a task; the columns of ``tasks``."""

    id: int
    name: str
    attempts: int
    successes: int
    step: int
    streak: int
    retired: int
    live: int
    shelf: int | None
    position: int | None

    @property
    def wanted_shelf(self) -> int | None:
        if self.retired:
            return RETIRED
        return shelf_of((self.successes, self.attempts)) if self.live else None


COLUMNS = ", ".join(Row.__slots__)


def shelf_of(bucket: tuple[int, int]) -> int:
    successes, attempts = bucket
    return attempts * ATTEMPTS + successes


def bucket_of(shelf: int) -> tuple[int, int]:
    attempts, successes = divmod(shelf, ATTEMPTS)
    return successes, attempts


def find(db: sqlite3.Connection, name: str) -> Row | None:
    found = db.execute(f"SELECT {COLUMNS} FROM tasks WHERE name = ?", (name,)).fetchone()
    return None if found is None else Row(*found)


def get(db: sqlite3.Connection, task: int) -> Row:
    return Row(*db.execute(f"SELECT {COLUMNS} FROM tasks WHERE id = ?", (task,)).fetchone())


def save(db: sqlite3.Connection, row: Row) -> None:
    """Write what is known of a task, and put it where it belongs now."""
    here = db.execute("SELECT shelf, position FROM tasks WHERE id = ?", (row.id,)).fetchone()
    row.shelf, row.position = here  # another task's leaving may have moved it since the row was read
    wanted = row.wanted_shelf
    if row.shelf != wanted:
        if row.shelf is not None:
            _leave(db, row)
        if wanted is not None:
            row.shelf, row.position = wanted, _grow(db, wanted)
    db.execute(
        "UPDATE tasks SET attempts = ?, successes = ?, step = ?, streak = ?, retired = ?, live = ?, shelf = ?, "
        "position = ? WHERE id = ?",
        (
            *(row.attempts, row.successes, row.step, row.streak, row.retired, row.live, row.shelf, row.position),
            row.id,
        ),
    )


def size(db: sqlite3.Connection, shelf: int) -> int:
    found = db.execute("SELECT size FROM shelves WHERE id = ?", (shelf,)).fetchone()
    return 0 if found is None else found[0]


def draw(
    db: sqlite3.Connection, shelf: int, count: int, random: np.random.Generator, exclude: Iterable[str]
) -> list[Row]:
    """Up to ``count`` tasks of a shelf, without those named, uniformly without replacement."""
    barred = sorted(
        row[0]
        for name in set(exclude)
        if (row := db.execute("SELECT position FROM tasks WHERE name = ? AND shelf = ?", (name, shelf)).fetchone())
    )
    free = size(db, shelf) - len(barred)
    if count < 1 or free < 1:
        return []
    chosen = random.choice(free, min(count, free), replace=False)
    # the i-th free position: as many barred ones lie before it as have at most i free ones before them
    chosen += np.searchsorted(np.array(barred, np.int64) - np.arange(len(barred)), chosen, side="right")
    query = f"SELECT {COLUMNS} FROM tasks WHERE shelf = ? AND position = ?"
    return [Row(*db.execute(query, (shelf, position)).fetchone()) for position in chosen.tolist()]


def _grow(db: sqlite3.Connection, shelf: int) -> int:
    """Room for one more at the end; its position."""
    if db.execute("UPDATE shelves SET size = size + 1 WHERE id = ?", (shelf,)).rowcount:
        return size(db, shelf) - 1
    db.execute("INSERT INTO shelves VALUES (?, 1)", (shelf,))
    return 0


def _leave(db: sqlite3.Connection, row: Row) -> None:
    last = size(db, row.shelf or 0) - 1
    db.execute("UPDATE tasks SET shelf = NULL, position = NULL WHERE id = ?", (row.id,))
    if row.position != last:
        db.execute("UPDATE tasks SET position = ? WHERE shelf = ? AND position = ?", (row.position, row.shelf, last))
    db.execute("UPDATE shelves SET size = ? WHERE id = ?", (last, row.shelf))
    row.shelf = row.position = None
