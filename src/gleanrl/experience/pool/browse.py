"""Read-only queries of a pool's file: its tasks by difficulty, and its trajectories by age, entropy or uses.

`gleanrl pool` and the report of a run use them. All queries within one `reading` see the same state of the pool, even
if a run writes to the pool at the same time::

    with reading(path) as db:
        for line in lines(db, limit=10):
            print(line.task, line.entropy)
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool import admission, codec, schema
from gleanrl.experience.pool.pool import Stored, StoredFailure
from gleanrl.experience.pool.ranking import Candidate
from gleanrl.types import Task

# The queries below read the successes. With ``.format(**_FAILURES)`` instead of ``.format(**_SUCCESSES)``, failures.
_SUCCESSES = {"table": "trajectories", "blobs": "blobs"}
_FAILURES = {"table": "failures", "blobs": "failure_blobs"}
_LINE = (
    "SELECT t.id, k.name, k.attempts, k.successes, k.retired, CAST(t.entropy AS REAL), CAST(t.version AS INTEGER), "
    "CAST(t.temperature AS REAL), CAST(t.step AS INTEGER), CAST(t.uses AS INTEGER), CAST(t.bytes AS INTEGER), "
    "CAST(t.source AS TEXT) "
    "FROM {table} t JOIN tasks k ON k.id = t.task "
)
_RECORD = (
    "SELECT t.digest, CAST(b.data AS BLOB), CAST(k.data AS BLOB) FROM {table} t "
    "LEFT JOIN {blobs} b USING (id) LEFT JOIN bodies k ON k.id = t.task WHERE t.id = ?"
)
_COLUMNS = ("entropy", "version", "uses")


@dataclass(frozen=True, slots=True)
class Line:
    """What the pool's tables contain about one trajectory. Its tokens and messages are not loaded."""

    key: int  # below 0 for a failure
    task: str  # id of its task
    attempts: int  # number of valid fresh members of the task's latest group
    successes: int  # number of these members that succeeded
    retired: int  # whether the task is retired: 0 or 1
    entropy: float  # mean over its sampled tokens, in nats; estimated when the trajectory was stored
    version: int  # version of the weights from which its age counts
    temperature: float  # sampling temperature
    step: int  # step after which it was stored
    uses: int  # how often it was replayed
    bytes: int  # size of its encoded form in the file
    source: str  # where it came from (`admission.OWN`)


@dataclass(frozen=True, slots=True)
class Entry:
    """A trajectory with all that the pool contains about it, and its task."""

    line: Line
    stored: Stored | StoredFailure
    task: Task


@dataclass(frozen=True, slots=True)
class Difficulty:
    """Counts over all tasks whose latest fresh group had ``successes`` successes in ``attempts`` attempts.

    Attempts are the group's valid fresh members: those with a valid score that were sampled for it and not replayed.
    """

    successes: int
    attempts: int  # 0 = unknown: the trajectories came from another source, and no group was observed
    tasks: int  # number of these tasks
    replayable: int  # number of them that have a stored trajectory, and are neither retired nor excluded from draws
    retired: int  # number of them that are retired
    trajectories: int  # number of their stored trajectories


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the pool at ``path`` for the functions below, within one read transaction.

    Raises:
        UserError: there is no pool at ``path``, or it cannot be read.
    """
    db = schema.connect(path, read_only=True)
    try:
        with schema.explained(path), schema.transaction(db, "DEFERRED"):
            yield db
    finally:
        db.close()


def tokenizer(db: sqlite3.Connection) -> str | None:
    """Return the fingerprint of the tokenizer of the pool's token ids, or None if the pool contains none."""
    found = db.execute("SELECT value FROM meta WHERE key = 'tokenizer'").fetchone()
    return None if found is None else str(found[0])


def newest_step(db: sqlite3.Connection) -> int:
    """Return the latest step of any task in the pool, or 0. `gleanrl pool` computes ages relative to it."""
    return int(db.execute("SELECT coalesce(max(step), 0) FROM tasks").fetchone()[0])


def difficulties(db: sqlite3.Connection) -> list[Difficulty]:
    """Count the tasks by the outcome of their latest fresh group, ordered by attempts and then by successes."""
    query = (
        "SELECT successes, attempts, count(*), sum(live > 0 AND NOT retired AND NOT outside), sum(retired), sum(live) "
        "FROM tasks GROUP BY attempts, successes ORDER BY attempts, successes"
    )
    return [Difficulty(*row) for row in db.execute(query)]


def sizes(db: sqlite3.Connection) -> tuple[int, int, int, int]:
    """Return the number of successes and of the tasks that have any, and then the same of failures."""
    query = "SELECT count(*), count(DISTINCT task) FROM "
    return *db.execute(query + "trajectories").fetchone(), *db.execute(query + "failures").fetchone()


def values(db: sqlite3.Connection, column: str) -> npt.NDArray[np.float64]:
    """Return float64 [trajectories]: one column of every trajectory, which is "entropy", "version" or "uses".

    Raises `ValueError` for any other column.
    """
    if column not in _COLUMNS:
        raise ValueError(f"{column!r} is none of {', '.join(_COLUMNS)}")
    rows = db.execute(f"SELECT CAST({column} AS REAL) FROM trajectories")
    return np.fromiter((row[0] for row in rows), np.float64)


def lines(
    db: sqlite3.Connection, task: str | None = None, limit: int = -1, *, failures: bool = False
) -> Iterator[Line]:
    """Yield the trajectories of the task with the id ``task``, or of all tasks if it is None, newest first.

    At most ``limit`` trajectories are yielded; a negative limit means all. With ``failures``, the stored failures are
    yielded instead.
    """
    where, given = ("WHERE k.name = ? ", (task,)) if task is not None else ("", ())
    query = _LINE.format(**(_FAILURES if failures else _SUCCESSES))
    for row in db.execute(f"{query}{where}ORDER BY abs(t.id) DESC LIMIT ?", (*given, limit)):
        yield Line(*row)


def most_used(db: sqlite3.Connection, limit: int) -> Iterator[Line]:
    """Yield up to ``limit`` trajectories that were replayed most often, most uses first, newer ones first among equals.

    Trajectories that were never replayed are left out.
    """
    query = _LINE.format(**_SUCCESSES)
    for row in db.execute(f"{query}WHERE t.uses > 0 ORDER BY t.uses DESC, t.id DESC LIMIT ?", (limit,)):
        yield Line(*row)


def entry(db: sqlite3.Connection, key: int) -> Entry | None:
    """Return the trajectory or failure with the key ``key`` and its task, or None if the pool has none with this key.

    Raises:
        codec.Damaged: the trajectory or its task is damaged.
    """
    query = _LINE.format(**(_FAILURES if key < 0 else _SUCCESSES))
    found = db.execute(f"{query}WHERE t.id = ?", (key,)).fetchone()
    return None if found is None else _entry(db, Line(*found))


def entries(db: sqlite3.Connection, *, failures: bool = False) -> Iterator[Entry | tuple[int, codec.Damaged]]:
    """Yield every trajectory, oldest first. For a damaged one, yield its key and the error instead.

    With ``failures``, the stored failures are yielded instead, task by task and newest first, which is the order that
    `ExperiencePool.add_failures` needs.
    """
    query = _LINE.format(**(_FAILURES if failures else _SUCCESSES))
    for row in db.execute(f"{query}ORDER BY {'t.task, t.id' if failures else 't.id'}"):
        line = Line(*row)
        try:
            yield _entry(db, line)
        except codec.Damaged as error:
            yield line.key, error


def prunable(
    db: sqlite3.Connection,
    *,
    max_age: int | None,
    keep: int | None,
    retired: bool,
    settings: ReplaySettings,
    source: str | None = None,
    keep_failures: int | None = None,
) -> dict[str, list[int]]:
    """Return the keys of the trajectories that `gleanrl pool prune` evicts, by cause. Causes without any are left out.

    The cause ``age`` applies to a trajectory whose version is more than ``max_age`` below the newest step (None =
    never), ``retired`` to the trajectories of retired tasks if ``retired`` is true, and ``source`` to those from the
    source with this name (None = none). The cause ``capacity`` applies to those that a task still has in excess of
    ``keep`` (None = never); `ReplaySettings.select` chooses them. The first three causes apply to failures too. Of the
    failures that are then left, ``newer`` applies to all but the ``keep_failures`` newest of each task (None = never).
    """
    chosen: dict[str, list[int]] = {"age": [], "retired": [], "source": [], "capacity": [], "newer": []}
    oldest = None if max_age is None else newest_step(db) - max_age
    left: dict[int, list[Candidate]] = {}
    failures: Counter[int] = Counter()  # number of failures that each task keeps
    columns = "t.id, t.task, k.retired, t.version, t.entropy, t.score, t.length, t.digest, t.source"
    query = (
        f"SELECT {columns} FROM trajectories t JOIN tasks k ON k.id = t.task UNION ALL "
        f"SELECT {columns} FROM failures t JOIN tasks k ON k.id = t.task ORDER BY 1"
    )
    # In this order, the failures come first, newest first, because their keys are -1, -2, ...
    for key, task, is_retired, version, *properties, its_source in db.execute(query):
        if oldest is not None and version < oldest:
            chosen["age"].append(key)
        elif retired and is_retired:
            chosen["retired"].append(key)
        elif its_source == source:
            chosen["source"].append(key)
        elif key < 0:
            failures[task] += 1
            if keep_failures is not None and failures[task] > keep_failures:
                chosen["newer"].append(key)
        elif keep is not None:
            left.setdefault(task, []).append(Candidate(key, *properties))
    if keep is not None:
        limited = settings.model_copy(update={"capacity_per_task": keep})
        for candidates in left.values():
            chosen["capacity"] += [candidate.order for candidate in admission.surplus(candidates, limited)]
    return {cause: keys for cause, keys in chosen.items() if keys}


def _entry(db: sqlite3.Connection, line: Line) -> Entry:
    query = _RECORD.format(**(_FAILURES if line.key < 0 else _SUCCESSES))
    digest, record, body = db.execute(query, (line.key,)).fetchone()
    trajectory, task = codec.decode_trajectory(record or b""), codec.decode_task(body or b"")
    same = trajectory.task_id == task.id == line.task and codec.token_digest(trajectory) == digest
    if not same or not trajectory.score.valid:
        raise codec.Damaged("it is not the one that was stored here")
    noted = (line.entropy, line.version, line.temperature, line.step, line.uses, line.source)
    kind = StoredFailure if line.key < 0 else Stored
    return Entry(line, kind(line.key, trajectory, *noted), task)
