"""Sets marks in a pool, and rewinds the pool to a mark.

Each tracked table has a shadow table. When a row is first changed after a mark, a trigger copies the old row (or the
fact that there was no such row) into the shadow table. A rewind puts these rows back, so its cost depends on the rows
changed since the mark and not on the size of the pool. A row has at most one entry per mark, and forgetting a mark
drops its entries.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

CLOCK = (
    "CREATE TABLE clock (id INTEGER PRIMARY KEY CHECK (id = 1), mark INTEGER, next INTEGER NOT NULL)",
    "INSERT INTO clock VALUES (1, NULL, 1)",
    "CREATE TABLE marks (id INTEGER PRIMARY KEY)",
)
"""``clock.mark`` is the mark for which changes are logged; NULL: none are logged. No number of a mark is used twice."""

_OWNER = "mark/"  # prefix of a mark's number: key of the mark's owner in the table ``meta``, which is not tracked


def shadow_statements(table: str, columns: tuple[str, ...]) -> list[str]:
    """Return SQL that makes the shadow table and triggers of ``table``, whose first column must be its integer key."""
    key, names = columns[0], ", ".join(columns)
    seen = f"(SELECT mark FROM clock) IS NOT NULL AND NOT EXISTS (SELECT 1 FROM undo_{table} WHERE mark = "
    seen += f"(SELECT mark FROM clock) AND {key} = {{row}}.{key})"
    old = ", ".join(f"OLD.{name}" for name in columns)
    keep = f"INSERT INTO undo_{table} (mark, existed, {names}) SELECT mark, 1, {old} FROM clock"
    absent = f"INSERT INTO undo_{table} (mark, existed, {key}) SELECT mark, 0, NEW.{key} FROM clock"
    before, after = seen.format(row="OLD"), seen.format(row="NEW")
    return [
        f"CREATE TABLE undo_{table} (mark INTEGER, existed INTEGER, {names}, PRIMARY KEY (mark, {key}))",
        f"CREATE TRIGGER {table}_insert AFTER INSERT ON {table} WHEN {after} BEGIN {absent}; END",
        f"CREATE TRIGGER {table}_update BEFORE UPDATE ON {table} WHEN {before} BEGIN {keep}; END",
        f"CREATE TRIGGER {table}_delete BEFORE DELETE ON {table} WHEN {before} BEGIN {keep}; END",
    ]


def mark(db: sqlite3.Connection, owner: str | None = None) -> int:
    """Set a mark at the present state and return its number. Call this and the functions below in a transaction."""
    (number,) = db.execute("SELECT next FROM clock").fetchone()
    db.execute("INSERT INTO marks VALUES (?)", (number,))
    if owner is not None:
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"{_OWNER}{number}", owner))
    db.execute("UPDATE clock SET mark = ?, next = ?", (number, number + 1))
    return number


def other_owner(db: sqlite3.Connection, number: int, owner: str) -> str | None:
    """Return the first owner other than ``owner`` that set a mark after ``number``; None if there is no such owner."""
    query = f"SELECT value FROM marks JOIN meta ON key = '{_OWNER}' || id WHERE id > ? AND value != ? ORDER BY id"
    found = db.execute(query, (number, owner)).fetchone()
    return None if found is None else str(found[0])


def rewind(db: sqlite3.Connection, tracked: Mapping[str, tuple[str, ...]], number: int) -> bool:
    """Put every tracked table back to its state at a mark. The mark remains, and later marks are deleted.

    Returns False, without any change, if there is no such mark.
    """
    if db.execute("SELECT 1 FROM marks WHERE id = ?", (number,)).fetchone() is None:
        return False
    later = [row[0] for row in db.execute("SELECT id FROM marks WHERE id >= ? ORDER BY id DESC", (number,))]
    db.execute("UPDATE clock SET mark = NULL")  # the changes below are not logged
    for undone in later:  # newest first: after each round the tables are what they were at that mark
        for table, columns in tracked.items():
            key, names = columns[0], ", ".join(columns)
            db.execute(f"DELETE FROM {table} WHERE {key} IN (SELECT {key} FROM undo_{table} WHERE mark = ?)", (undone,))
            db.execute(
                f"INSERT INTO {table} ({names}) SELECT {names} FROM undo_{table} WHERE mark = ? AND existed = 1",
                (undone,),
            )
            db.execute(f"DELETE FROM undo_{table} WHERE mark = ?", (undone,))
    _delete_marks(db, "id > ?", number)
    db.execute("UPDATE clock SET mark = ?", (number,))
    return True


def forget(db: sqlite3.Connection, tracked: Mapping[str, tuple[str, ...]], number: int) -> None:
    """Drop the marks before ``number``, and the logged rows that only they need."""
    for table in tracked:
        db.execute(f"DELETE FROM undo_{table} WHERE mark < ?", (number,))
    _delete_marks(db, "id < ?", number)
    db.execute("UPDATE clock SET mark = (SELECT max(id) FROM marks)")


def _delete_marks(db: sqlite3.Connection, which: str, number: int) -> None:
    db.execute(f"DELETE FROM meta WHERE key IN (SELECT '{_OWNER}' || id FROM marks WHERE {which})", (number,))
    db.execute(f"DELETE FROM marks WHERE {which}", (number,))
