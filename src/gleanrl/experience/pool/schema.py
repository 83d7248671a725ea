"""The file of a pool: its tables, how it is opened, the lock of its writer, and clear errors for a bad file."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from gleanrl.experience.pool import marks
from gleanrl.utils.errors import UserError

try:
    import fcntl
except ImportError:  # no such locks on this system: SQLite's own still keep the file whole
    fcntl = None

_CUT = "its last page is cut off"
_NOT_TEXT = "Could not decode to UTF-8"

APPLICATION = 0x474C5250  # "GLRP"
VERSION = 2

TABLES = {
    # what is known of each task; bucket and position (bucket_index.py) are NULL where it cannot be drawn
    "tasks": (
        "id INTEGER PRIMARY KEY",
        "name TEXT NOT NULL UNIQUE",
        "attempts INTEGER NOT NULL",  # valid members of its latest fresh group
        "successes INTEGER NOT NULL",
        "step INTEGER NOT NULL",
        "streak INTEGER NOT NULL",  # perfect fresh groups in a row
        "retired INTEGER NOT NULL",
        "live INTEGER NOT NULL",  # its trajectories
        "bucket INTEGER",
        "position INTEGER",
    ),
    "bodies": ("id INTEGER PRIMARY KEY", "data BLOB NOT NULL"),  # the tasks themselves
    "trajectories": (
        "id INTEGER PRIMARY KEY",
        "task INTEGER NOT NULL",
        "digest BLOB NOT NULL",
        "entropy REAL NOT NULL",
        "version INTEGER NOT NULL",
        "temperature REAL NOT NULL",
        "step INTEGER NOT NULL",
        "uses INTEGER NOT NULL",
        "bytes INTEGER NOT NULL",
    ),
    "blobs": ("id INTEGER PRIMARY KEY", "data BLOB NOT NULL"),  # of trajectories; apart, so that counting uses is cheap
    "buckets": ("id INTEGER PRIMARY KEY", "size INTEGER NOT NULL"),
    "counters": ("id INTEGER PRIMARY KEY", "name TEXT NOT NULL UNIQUE", "value INTEGER NOT NULL"),
}
"""Everything that a mark binds; each has an integer key, for the shadow tables of `marks`."""

INDEXES = (
    "CREATE UNIQUE INDEX tasks_place ON tasks (bucket, position) WHERE bucket IS NOT NULL",
    "CREATE UNIQUE INDEX trajectories_tokens ON trajectories (task, digest)",
    "CREATE INDEX trajectories_version ON trajectories (version)",
)

TRACKED = {table: tuple(column.split()[0] for column in columns) for table, columns in TABLES.items()}


def statements() -> list[str]:
    """Everything that makes an empty pool."""
    made = [f"CREATE TABLE {table} ({', '.join(columns)})" for table, columns in TABLES.items()]
    made += [*INDEXES, "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)", *marks.CLOCK]
    for table, columns in TRACKED.items():
        made += marks.shadow(table, columns)
    return made


# --- opening ------------------------------------------------------------------------------------
def connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """A connection to the pool at ``path``, which is made where it is absent (unless ``read_only``).

    Raises:
        UserError: there is none to read, it cannot be opened, or it is no pool of this version.
    """
    if read_only and not path.is_file():
        raise UserError(f"there is no experience pool at {path}")
    with explained(path):
        if not read_only:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"cannot make {path.parent} for an experience pool: {error.strerror}") from error
        db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=30.0,
            cached_statements=256,
        )
        try:
            _prepare(db, path, read_only)
        except BaseException:
            db.close()
            raise
        return db


def _prepare(db: sqlite3.Connection, path: Path, read_only: bool) -> None:
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "cache_size = -16000"):
        db.execute(f"PRAGMA {pragma}")
    if _is_cut(db, path):
        raise sqlite3.DatabaseError(_CUT)
    if not read_only and _is_empty(db):
        db.execute("PRAGMA page_size = 8192")
        db.execute("PRAGMA journal_mode = WAL")
        with transaction(db):
            for statement in statements():
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION}")
            db.execute(f"PRAGMA user_version = {VERSION}")
    _check(db, path)
    if not read_only:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")  # a checkpoint names a mark: after a power cut it must be there
        db.execute("PRAGMA journal_size_limit = 67108864")


def _is_cut(db: sqlite3.Connection, path: Path) -> bool:
    """Whether the last page is cut off, which SQLite would read as zeros. A write-ahead log heals that."""
    log = path.with_name(path.name + "-wal")
    size = path.stat().st_size
    return size % _pragma(db, "page_size") != 0 and not (log.exists() and log.stat().st_size)


def _is_empty(db: sqlite3.Connection) -> bool:
    return (
        _pragma(db, "application_id") == 0
        and _pragma(db, "user_version") == 0
        and db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    )


def _check(db: sqlite3.Connection, path: Path) -> None:
    if _pragma(db, "application_id") != APPLICATION:
        raise UserError(f"{path} is not an experience pool, although it is an SQLite file; give another path")
    version = _pragma(db, "user_version")
    if version != VERSION:
        raise UserError(
            f"{path} is an experience pool of schema {version}, and this version of Glean RL reads {VERSION}"
        )
    if _schema(db) != _expected_schema():
        raise UserError(f"{path} has other tables or triggers than an experience pool; it is not used")


def _schema(db: sqlite3.Connection) -> frozenset[tuple[str, str]]:
    return frozenset(db.execute("SELECT name, coalesce(sql, '') FROM sqlite_schema WHERE name NOT LIKE 'sqlite_stat%'"))


@cache
def _expected_schema() -> frozenset[tuple[str, str]]:
    db = sqlite3.connect(":memory:")
    for statement in statements():
        db.execute(statement)
    found = _schema(db)
    db.close()
    return found


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return db.execute(f"PRAGMA {name}").fetchone()[0]


@contextmanager
def transaction(db: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """All or nothing; ``DEFERRED`` gives a reader one unchanging view."""
    db.execute(f"BEGIN {kind}")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            if db.in_transaction:
                db.execute("ROLLBACK")
        raise


# --- one writer ---------------------------------------------------------------------------------
class WriterLock:
    """Held while a pool is open for writing; the system releases it when the process ends, however it ends.

    Raises:
        UserError: another process, or another pool object of this one, holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"cannot open {self._path}: {error.strerror}; open the pool read-only") from error
        try:
            if fcntl is not None:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            self._descriptor = None
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(f"cannot lock {self._path}: {error.strerror}") from error
            raise UserError(
                f"the experience pool {path} is being written by another process; wait for it, or open it read-only"
            ) from error

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


# --- what goes wrong ----------------------------------------------------------------------------
@contextmanager
def explained(path: Path) -> Iterator[None]:
    """SQLite's errors as one line that says what to do; anything that is our mistake is raised as it is."""
    try:
        yield
    except sqlite3.Error as error:
        line = _line(path, error)
        if line is None:
            raise
        raise UserError(line) from error


def _line(path: Path, error: sqlite3.Error) -> str | None:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_NOTADB:
        return f"{path} is not an experience pool (not an SQLite file); give another path"
    if code == sqlite3.SQLITE_CORRUPT or str(error).startswith((_CUT, _NOT_TEXT)):
        return f"the experience pool {path} is damaged ({error}); restore a copy, or delete it to start empty"
    if code == sqlite3.SQLITE_FULL:
        return f"{path}: the disk is full; what was not yet stored is undone; free some space and resume"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"the experience pool {path} is locked by another process; close what holds it"
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return f"the experience pool {path} cannot be written ({error})"
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR):
        return f"the experience pool {path} cannot be opened or read ({error})"
    return None
