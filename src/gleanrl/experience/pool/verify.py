"""Whether a pool holds together: the file, the counts, the shelves, and every record in it."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator

from gleanrl.experience.pool import codec, integrity, shelves


def faults(db: sqlite3.Connection, *, records: bool = True) -> Iterator[str]:
    """What is wrong, one line each, inside the caller's transaction; reads the whole pool.

    ``records``: decode every task and trajectory too.
    """
    yield from (row[0] for row in db.execute("PRAGMA integrity_check(20)") if row[0] != "ok")
    yield from _tasks(db)
    yield from _shelves(db)
    yield from _counters(db)
    if records:
        yield from _records(db)


def _tasks(db: sqlite3.Connection) -> Iterator[str]:
    live = Counter(row[0] for row in db.execute("SELECT task FROM trajectories"))
    for found in db.execute(f"SELECT {shelves.COLUMNS} FROM tasks"):
        row = shelves.Row(*found)
        if row.live != live.pop(row.id, 0):
            yield f"task {row.name!r} counts {row.live} trajectories and has another number of them"
        if row.shelf != row.wanted_shelf or (row.shelf is None) != (row.position is None):
            yield f"task {row.name!r} stands in another bucket than its own"
    if live:
        yield f"{live.total()} trajectories have no task"


def _shelves(db: sqlite3.Connection) -> Iterator[str]:
    query = "SELECT shelf, count(*), min(position), max(position) FROM tasks WHERE shelf IS NOT NULL GROUP BY shelf"
    found = {shelf: (count, low, high) for shelf, count, low, high in db.execute(query)}
    for shelf, size in db.execute("SELECT id, size FROM shelves"):
        if found.pop(shelf, (0, 0, -1)) != (size, 0, size - 1):
            yield f"the positions of {_shelf_name(shelf)} have gaps, or it has not {size} tasks"
    for shelf in found:
        yield f"{_shelf_name(shelf)} is not counted"


def _shelf_name(shelf: int) -> str:
    if shelf == shelves.RETIRED:
        return "the retired tasks"
    successes, attempts = shelves.bucket_of(shelf)
    return f"bucket {successes}/{attempts}"


def _counters(db: sqlite3.Connection) -> Iterator[str]:
    counted = Counter(dict(db.execute("SELECT name, value FROM counters")))
    for name, query in {
        "tasks": "SELECT count(*) FROM tasks",
        "trajectories": "SELECT count(*) FROM trajectories",
        "bytes": "SELECT coalesce(sum(bytes), 0) FROM trajectories",
    }.items():
        (real,) = db.execute(query).fetchone()
        if counted[name] != real:
            yield f"{name}: {counted[name]} counted, {real} there"
    odd = "SELECT count(*) FROM trajectories LEFT JOIN blobs b USING (id) WHERE length(b.data) IS NOT bytes"
    (lost,) = db.execute(odd).fetchone()
    (loose,) = db.execute("SELECT count(*) FROM blobs WHERE id NOT IN (SELECT id FROM trajectories)").fetchone()
    if lost:
        yield f"{lost} trajectories have no record, or one of another length"
    if loose:
        yield f"{loose} records belong to no trajectory"


def _records(db: sqlite3.Connection) -> Iterator[str]:
    bodies = db.execute(
        "SELECT name, CAST(data AS BLOB) FROM tasks LEFT JOIN bodies USING (id) WHERE shelf IS NOT NULL"
    )
    for name, data in bodies:
        try:
            if codec.decode_task(data or b"").id != name:
                yield f"task {name!r}: it is another task"
        except codec.Damaged as error:
            yield f"task {name!r}: {error}"
    query = (
        "SELECT t.id, k.name, t.digest, CAST(b.data AS BLOB), t.entropy, t.version, t.temperature, t.step, t.uses "
        "FROM trajectories t JOIN tasks k ON k.id = t.task JOIN blobs b ON b.id = t.id"
    )
    for key, name, digest, data, *columns in db.execute(query):
        try:
            integrity.decoded(name, digest, data)
            integrity.noted(columns)
        except integrity.Unfit as error:
            yield f"trajectory {key} of task {name!r}: {error}"
