"""The SQLite file of a pool: defines its tables, opens it, locks it for one writer, and explains errors of SQLite.

`gleanrl.experience.pool.pool` uses all of this, and `gleanrl.experience.pool.browse` uses it to read a pool.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from gleanrl.experience.pool import marks
from gleanrl.utils.errors import UserError

try:
    import fcntl
except ImportError:
    # Windows has no fcntl. There `writer_lock` does not exclude a second writer, but SQLite's own locks keep the
    # transactions of two writers apart.
    fcntl = None

_CUT = "its last page is cut off"
_NOT_TEXT = "Could not decode to UTF-8"
_SCHEMA = "SELECT name, coalesce(sql, '') FROM sqlite_schema WHERE name NOT LIKE 'sqlite_stat%'"

APPLICATION = 0x474C5250  # "GLRP"
VERSION = 7

_TRAJECTORY = (
    "id INTEGER PRIMARY KEY",
    "task INTEGER NOT NULL",
    "digest BLOB NOT NULL",
    "entropy REAL NOT NULL",
    "score REAL NOT NULL",
    "length INTEGER NOT NULL",  # number of sampled tokens
    "version INTEGER NOT NULL",
    "temperature REAL NOT NULL",
    "step INTEGER NOT NULL",
    "uses INTEGER NOT NULL",
    "bytes INTEGER NOT NULL",
    "source TEXT NOT NULL",  # where it came from (`admission.OWN`)
)

TABLES = {
    # The state of each task. ``bucket`` and ``position`` (see bucket_index.py) are NULL if the task cannot be drawn.
    "tasks": (
        "id INTEGER PRIMARY KEY",
        "name TEXT NOT NULL UNIQUE",
        "attempts INTEGER NOT NULL",  # number of valid fresh members of its latest group
        "successes INTEGER NOT NULL",  # number of these members that succeeded
        "step INTEGER NOT NULL",  # step of its latest group
        "streak INTEGER NOT NULL",  # number of its latest groups in a row in which every valid fresh member succeeded
        "retired INTEGER NOT NULL",  # 0 or 1
        "live INTEGER NOT NULL",  # number of its stored trajectories
        "outside INTEGER NOT NULL",  # 0 or 1: whether `ExperiencePool.set_tasks` has excluded it from draws
        "bucket INTEGER",
        "position INTEGER",
    ),
    "bodies": ("id INTEGER PRIMARY KEY", "data BLOB NOT NULL"),  # each task, encoded by `codec`
    "trajectories": _TRAJECTORY,  # the successes
    # Each trajectory, encoded by `codec`. The table is separate so that an update of ``uses`` does not copy the blob.
    "blobs": ("id INTEGER PRIMARY KEY", "data BLOB NOT NULL"),
    # The failures. They have tables of their own, so that no query for successes can return one. Their ids are -1, -2,
    # ..., so that the id of a failure is never that of a success.
    "failures": _TRAJECTORY,
    "failure_blobs": ("id INTEGER PRIMARY KEY", "data BLOB NOT NULL"),
    "buckets": ("id INTEGER PRIMARY KEY", "size INTEGER NOT NULL"),
    "counters": ("id INTEGER PRIMARY KEY", "name TEXT NOT NULL UNIQUE", "value INTEGER NOT NULL"),
}
"""The tables that a rewind restores: name -> definitions of its columns. The first column of each is an integer primary
key, which the shadow tables of `marks` need."""

INDEXES = (
    "CREATE UNIQUE INDEX tasks_place ON tasks (bucket, position) WHERE bucket IS NOT NULL",
    "CREATE UNIQUE INDEX trajectories_tokens ON trajectories (task, digest)",
    "CREATE INDEX trajectories_version ON trajectories (version)",
    "CREATE UNIQUE INDEX failures_tokens ON failures (task, digest)",
    "CREATE INDEX failures_version ON failures (version)",
)

TRACKED = {table: tuple(column.split()[0] for column in columns) for table, columns in TABLES.items()}


def statements() -> list[str]:
    """Return the SQL statements that create the tables, indexes and triggers of an empty pool."""
    made = [f"CREATE TABLE {table} ({', '.join(columns)})" for table, columns in TABLES.items()]
    made += [*INDEXES, "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)", *marks.CLOCK]
    for table, columns in TRACKED.items():
        made += marks.shadow_statements(table, columns)
    return made


# --- opening ------------------------------------------------------------------------------------
def connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """Open the pool at ``path`` and check its schema. Unless ``read_only``, create the pool if it does not exist.

    The folder of the file must exist.

    Raises:
        UserError: with ``read_only``, there is no such file; or the file cannot be opened, is damaged, or is not a pool
            of this version.
    """
    if read_only and not path.is_file():
        raise UserError(f"there is no experience pool at {path}")
    with explained(path), ExitStack() as opened:
        uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        options: dict[str, Any] = {"isolation_level": None, "check_same_thread": False, "cached_statements": 256}
        db = opened.enter_context(closing(sqlite3.connect(uri, uri=True, timeout=30.0, **options)))
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "cache_size = -16000"):
            db.execute(f"PRAGMA {pragma}")

        # If the file ends within a page, because it was copied incompletely, SQLite would read the rest of that page as
        # zeros. Only a write-ahead log that is not empty may still contain the whole page.
        real = path.resolve()  # SQLite keeps the log next to the file itself, not next to a symbolic link to it
        log = real.with_name(real.name + "-wal")
        whole = path.stat().st_size % _pragma(db, "page_size") == 0
        if not whole and not (log.exists() and log.stat().st_size):
            raise sqlite3.DatabaseError(_CUT)

        unmarked = _pragma(db, "application_id") == 0 and _pragma(db, "user_version") == 0
        if not read_only and unmarked and not db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            db.execute("PRAGMA page_size = 8192")
            db.execute("PRAGMA journal_mode = WAL")
            with transaction(db):
                for statement in statements():
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION}")
                db.execute(f"PRAGMA user_version = {VERSION}")

        if _pragma(db, "application_id") != APPLICATION:
            raise UserError(f"{path} is not an experience pool, although it is an SQLite file; give another path")
        version = _pragma(db, "user_version")
        if version != VERSION:
            raise UserError(
                f"{path} is an experience pool of schema {version}, and this version of Glean RL reads {VERSION}"
            )
        if frozenset(db.execute(_SCHEMA)) != _expected_schema():
            raise UserError(f"{path} has other tables or triggers than an experience pool; it is not used")
        if not read_only:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")  # a mark that a checkpoint refers to must survive a power failure
            db.execute("PRAGMA journal_size_limit = 67108864")
        opened.pop_all()
        return db


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return db.execute(f"PRAGMA {name}").fetchone()[0]


@cache
def _expected_schema() -> frozenset[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as db:
        for statement in statements():
            db.execute(statement)
        return frozenset(db.execute(_SCHEMA))


@contextmanager
def transaction(db: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Run the block as one transaction, and roll it back if the block raises.

    A writer uses the kind ``IMMEDIATE``, which acquires SQLite's write lock at once. A reader uses ``DEFERRED``, and
    all its queries see the same state of the file.
    """
    db.execute(f"BEGIN {kind}")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            if db.in_transaction:
                db.execute("ROLLBACK")
        raise


@contextmanager
def writer_lock(path: Path) -> Iterator[None]:
    """Hold the writer's lock of the pool while the block runs, so that no second writer opens the pool.

    The lock is an flock on ``PATH.lock``, where PATH contains no symbolic links. The operating system releases it when
    the process ends, even if it is killed.

    Raises:
        UserError: another process, or another pool object of this process, holds the lock, or the lock file cannot be
            opened.
    """
    real = path.resolve()  # all symbolic links to one pool share its lock, as they share SQLite's log
    lock = real.with_name(real.name + ".lock")
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"cannot open {lock}: {error.strerror}; open the pool read-only") from error
    try:
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise UserError(f"cannot lock {lock}: {error.strerror}") from error
                message = f"the experience pool {path} is being written by another process"
                raise UserError(f"{message}; wait for it, or open it read-only") from error
        yield
    finally:
        os.close(descriptor)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Convert SQLite's errors in the block to a `UserError` that says in one line what to do.

    Errors that indicate a bug, such as invalid SQL, are raised unchanged.
    """
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_NOTADB:
            line = f"{path} is not an experience pool (not an SQLite file); give another path"
        elif code == sqlite3.SQLITE_CORRUPT or str(error).startswith((_CUT, _NOT_TEXT)):
            line = f"the experience pool {path} is damaged ({error}); restore a copy, or delete it to start empty"
        elif code == sqlite3.SQLITE_FULL:
            line = f"{path}: the disk is full; what was not yet stored is undone; free some space and resume"
        elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            line = f"the experience pool {path} is locked by another process; close what holds it"
        elif code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            line = f"the experience pool {path} cannot be written ({error})"
        elif code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR):
            line = f"the experience pool {path} cannot be opened or read ({error})"
        else:
            raise
        raise UserError(line) from error
