"""Sets marks in a pool, and rewinds the pool to the state that it had at a mark.

A run sets a mark for each checkpoint, and rewinds the pool when it resumes from that checkpoint. Each tracked table has
a shadow table. When a row is changed for the first time after a mark, a trigger copies the old row into the shadow
table, or notes that there was no such row. A rewind copies these rows back. So the cost of a rewind depends on the
number of rows changed since the mark, and not on the size of the pool. A row has at most one entry per mark in the
shadow table, and the entries of a mark are deleted with it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

CLOCK = (
    "CREATE TABLE clock (id INTEGER PRIMARY KEY CHECK (id = 1), mark INTEGER, next INTEGER NOT NULL)",
    "INSERT INTO clock VALUES (1, NULL, 1)",
    "CREATE TABLE marks (id INTEGER PRIMARY KEY)",
)
"""SQL statements that create the tables of marks.

``clock.mark`` is the mark since which changes are logged; NULL means that changes are not logged. ``clock.next`` is the
number of the next mark. It only grows, so that no number is used twice.
"""

# The table ``meta`` stores the owner of mark N under the key "mark/N". The table is not tracked, so that a rewind does
# not change it.
_OWNER = "mark/"


def shadow_statements(table: str, columns: tuple[str, ...]) -> list[str]:
    """Return the SQL statements that create the shadow table of ``table`` and its triggers.

    The first column must be the integer primary key of the table.
    """
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
    """Set a mark at the present state and return its number. ``owner`` is the name of the run that sets it.

    Call this function and those below within a transaction.
    """
    (number,) = db.execute("SELECT next FROM clock").fetchone()
    db.execute("INSERT INTO marks VALUES (?)", (number,))
    if owner is not None:
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"{_OWNER}{number}", owner))
    db.execute("UPDATE clock SET mark = ?, next = ?", (number, number + 1))
    return number


def other_owner(db: sqlite3.Connection, number: int, owner: str) -> str | None:
    """Return the first owner other than ``owner`` that has set a mark after mark ``number``; None if there is none."""
    query = f"SELECT value FROM marks JOIN meta ON key = '{_OWNER}' || id WHERE id > ? AND value != ? ORDER BY id"
    found = db.execute(query, (number, owner)).fetchone()
    return None if found is None else str(found[0])


def is_owner(db: sqlite3.Connection, number: int, owner: str) -> bool:
    """Return whether there is a mark ``number`` and ``owner`` has set it."""
    query = f"SELECT 1 FROM marks JOIN meta ON key = '{_OWNER}' || id WHERE id = ? AND value = ?"
    return db.execute(query, (number, owner)).fetchone() is not None


def adopt(db: sqlite3.Connection, owner: str) -> bool:
    """Make ``owner`` the owner of all marks since the first one that it has set. Returns whether it has set any."""
    own = f"SELECT min(id) FROM marks JOIN meta ON key = '{_OWNER}' || id WHERE value = ?"
    since = f"SELECT '{_OWNER}' || id FROM marks WHERE id > ({own})"
    db.execute(f"UPDATE meta SET value = ? WHERE key IN ({since})", (owner, owner))
    return db.execute(own, (owner,)).fetchone()[0] is not None


def last_owner(db: sqlite3.Connection) -> str | None:
    """Return the owner of the latest mark; None if there is no mark or it has no owner."""
    query = f"SELECT value FROM meta WHERE key = '{_OWNER}' || (SELECT max(id) FROM marks)"
    found = db.execute(query).fetchone()
    return None if found is None else str(found[0])


def rewind(db: sqlite3.Connection, tracked: Mapping[str, tuple[str, ...]], number: int) -> bool:
    """Restore every tracked table to its state at mark ``number``. That mark remains, and later marks are deleted.

    ``tracked`` maps each table to its columns, the key first. Returns False and changes nothing if there is no such
    mark.
    """
    if db.execute("SELECT 1 FROM marks WHERE id = ?", (number,)).fetchone() is None:
        return False
    later = [row[0] for row in db.execute("SELECT id FROM marks WHERE id >= ? ORDER BY id DESC", (number,))]
    db.execute("UPDATE clock SET mark = NULL")  # the triggers must not log the changes below
    for undone in later:  # newest mark first; after each iteration, the tables are in their state at that mark
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
    """Delete the marks before mark ``number``, and the logged rows that only a rewind to them would need."""
    for table in tracked:
        db.execute(f"DELETE FROM undo_{table} WHERE mark < ?", (number,))
    _delete_marks(db, "id < ?", number)
    db.execute("UPDATE clock SET mark = (SELECT max(id) FROM marks)")


def _delete_marks(db: sqlite3.Connection, which: str, number: int) -> None:
    db.execute(f"DELETE FROM meta WHERE key IN (SELECT '{_OWNER}' || id FROM marks WHERE {which})", (number,))
    db.execute(f"DELETE FROM marks WHERE {which}", (number,))
