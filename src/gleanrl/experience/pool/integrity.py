"""Checks a pool for damage: one trajectory whenever it is read, and the whole file on request.

`ExperiencePool.stored` calls `decode_record`, and `ExperiencePool.verify` calls `faults`.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gleanrl.experience.pool import admission, bucket_index, codec
from gleanrl.types import Trajectory


class Unfit(Exception):
    """Raised for a stored trajectory that must not be trained on.

    ``cause`` is "damaged" or one of `admission.DEFECTS`. The pool counts the eviction of the trajectory under it.
    """

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


def decode_record(
    name: str, digest: bytes, data: bytes | None, columns: Sequence[Any], limits: admission.Limits
) -> Trajectory:
    """Decode the stored trajectory ``data`` and check that it is intact and can be trained on. Raises `Unfit` if not.

    The trajectory must belong to the task with the id ``name`` and have the token digest ``digest``. ``columns`` holds
    its entropy, version, temperature, step, uses and source. Their types are checked, because SQLite does not enforce
    them.
    """
    try:
        trajectory = codec.decode_trajectory(data or b"")
    except codec.Damaged as error:
        raise Unfit("damaged", str(error)) from error
    if trajectory.task_id != name or codec.token_digest(trajectory) != digest or not trajectory.score.valid:
        raise Unfit("damaged", "it is not the one that was stored here")
    cause = admission.find_defect(trajectory, limits)
    if cause:
        raise Unfit(cause, admission.DEFECTS[cause])
    typed = [type(value) for value in columns] == [float, int, float, int, int, str]
    if not (typed and math.isfinite(columns[0]) and 0 < columns[2] < math.inf):
        raise Unfit("damaged", "its entropy, version, temperature, step, uses or source is no valid value")
    return trajectory


def faults(db: sqlite3.Connection, *, records: bool = True, done: Callable[[], object] = lambda: None) -> Iterator[str]:
    """Check the whole pool, and yield a line for each fault. Call this inside a transaction.

    Checks SQLite's own structures, and that the tables agree with one another. If ``records`` is true, every task,
    trajectory and failure is decoded and checked as well, and ``done`` is called after each trajectory.
    """
    yield from (row[0] for row in db.execute("PRAGMA integrity_check(20)") if row[0] != "ok")

    live = Counter(row[0] for row in db.execute("SELECT task FROM trajectories"))
    for found in db.execute(f"SELECT {bucket_index.COLUMNS} FROM tasks"):
        row = bucket_index.TaskRow(*found)
        if row.live != live.pop(row.id, 0):
            yield f"task {row.name!r} counts {row.live} trajectories and has another number of them"
        if row.bucket != row.wanted_bucket or (row.bucket is None) != (row.position is None):
            yield f"task {row.name!r} stands in another bucket than its own"
    if live:
        yield f"trajectories without a task: {live.total()}"

    query = "SELECT bucket, count(*), min(position), max(position) FROM tasks WHERE bucket IS NOT NULL GROUP BY bucket"
    places = {bucket: (count, low, high) for bucket, count, low, high in db.execute(query)}
    for bucket, size in bucket_index.sizes(db).items():
        if places.pop(bucket, (0, 0, -1)) != (size, 0, size - 1):
            yield f"the positions of {_bucket_name(bucket)} have gaps, or it has not {size} tasks"
    for bucket in places:
        yield f"{_bucket_name(bucket)} is not counted"

    counted = Counter(dict(db.execute("SELECT name, value FROM counters")))
    for name, query in {
        "tasks": "SELECT count(*) FROM tasks",
        "outside": "SELECT count(*) FROM tasks WHERE outside",
        "trajectories": "SELECT count(*) FROM trajectories",
        "bytes": "SELECT coalesce(sum(bytes), 0) FROM trajectories",
        "failures": "SELECT count(*) FROM failures",
        "failure_bytes": "SELECT coalesce(sum(bytes), 0) FROM failures",
    }.items():
        (real,) = db.execute(query).fetchone()
        if counted[name] != real:
            yield f"{name}: {counted[name]} counted, {real} there"
    (orphans,) = db.execute("SELECT count(*) FROM failures WHERE task NOT IN (SELECT id FROM tasks)").fetchone()
    if orphans:
        yield f"failures without a task: {orphans}"
    if db.execute("SELECT 1 FROM failures WHERE id >= 0 UNION ALL SELECT 1 FROM trajectories WHERE id < 0").fetchone():
        yield "a failure has the key of a success, or a success that of a failure"
    for table, blobs in (("trajectories", "blobs"), ("failures", "failure_blobs")):
        odd = f"SELECT count(*) FROM {table} LEFT JOIN {blobs} b USING (id) WHERE length(b.data) IS NOT bytes"
        (lost,) = db.execute(odd).fetchone()
        (loose,) = db.execute(f"SELECT count(*) FROM {blobs} WHERE id NOT IN (SELECT id FROM {table})").fetchone()
        if lost:
            yield f"{table} without a record of their length: {lost}"
        if loose:
            yield f"records of no {'trajectory' if table == 'trajectories' else 'failure'}: {loose}"
    if records:
        yield from _record_faults(db, done)


def _record_faults(db: sqlite3.Connection, done: Callable[[], object]) -> Iterator[str]:
    # A damaged task whose body was deleted has no bucket until its next group, so that is no fault.
    bodies = (
        "SELECT name, CAST(data AS BLOB) FROM tasks LEFT JOIN bodies USING (id) "
        "WHERE bucket IS NOT NULL OR data IS NOT NULL"
    )
    for name, data in db.execute(bodies):
        try:
            if codec.decode_task(data or b"").id != name:
                yield f"task {name!r}: it is another task"
        except codec.Damaged as error:
            yield f"task {name!r}: {error}"
    for table, blobs in (("trajectories", "blobs"), ("failures", "failure_blobs")):
        query = (
            "SELECT t.id, k.name, t.digest, t.score, t.length, CAST(b.data AS BLOB), t.entropy, t.version, "
            f"t.temperature, t.step, t.uses, t.source FROM {table} t "
            f"JOIN tasks k ON k.id = t.task JOIN {blobs} b ON b.id = t.id"
        )
        for key, name, digest, score, length, data, *columns in db.execute(query):
            try:
                trajectory = decode_record(name, digest, data, columns, admission.Limits())
            except Unfit as error:
                yield f"trajectory {key} of task {name!r}: {error}"
            else:
                if (score, length) != (trajectory.score.value, trajectory.sampled_tokens):
                    yield f"trajectory {key} of task {name!r}: the score or the length in the table is not its own"
            done()


def _bucket_name(bucket: int) -> str:
    if bucket == bucket_index.RETIRED:
        return "the retired tasks"
    successes, attempts = bucket_index.bucket_of(bucket)
    return f"bucket {successes}/{attempts}"
