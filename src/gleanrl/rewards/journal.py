"""Keeps finished rewards on disk, so that a resumed run does not pay for them again.

The journal is an SQLite file in WAL mode. `Journal.put` returns once its row is committed and synced; rows that arrive
during a commit share the next one. It holds keys (hashes) and scores, but no conversations.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

from gleanrl.types import Score
from gleanrl.utils import serialize
from gleanrl.utils.errors import UserError

log = logging.getLogger(__name__)

_APPLICATION = 0x676C724B  # "glrK", in the file's header
_SCHEMA = "CREATE TABLE IF NOT EXISTS rewards (key BLOB PRIMARY KEY, score BLOB NOT NULL) WITHOUT ROWID"
_BUSY_S = 30.0  # maximum wait while another process writes


class Journal:
    """Stores scores by `Request.key`.

    A damaged file is moved aside with a warning, and a new one is started. Raises `UserError` if the file belongs to
    another program or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._database = self._open()
            except sqlite3.OperationalError:
                raise  # locked, no permission, disk full: the file itself may be intact
            except sqlite3.DatabaseError as error:
                names = (self.path.with_name(f"{self.path.name}.damaged-{number}") for number in count(1))
                aside = next(name for name in names if not name.exists())
                for suffix in ("", "-wal", "-shm"):
                    part = self.path.with_name(self.path.name + suffix)
                    if part.exists():
                        part.rename(aside.with_name(aside.name + suffix))
                text = "the reward journal %s is damaged (%s); moved to %s, and the rewards in it are requested again"
                log.warning(text, self.path, " ".join(str(error).split()), aside.name)
                self._database = self._open()
            # reads on the event loop need a connection of their own, or they would wait for commits
            self._reader = sqlite3.connect(self.path, timeout=_BUSY_S)
        except (OSError, sqlite3.OperationalError) as error:
            raise UserError(f"the reward journal {self.path} cannot be opened: {error}") from None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gleanrl-journal")
        self._pending: list[tuple[bytes, bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    def _open(self) -> sqlite3.Connection:
        """Open the file and check its content."""
        database = sqlite3.connect(self.path, timeout=_BUSY_S, check_same_thread=False)
        try:
            (application,) = database.execute("PRAGMA application_id").fetchone()
            (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables and application != _APPLICATION:
                raise UserError(f"{self.path} is another program's database, no reward journal; give another path")
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            database.execute(f"PRAGMA application_id = {_APPLICATION}")
            with database:
                database.execute(_SCHEMA)
            return database
        except BaseException:
            database.close()
            raise

    def get(self, key: str) -> Score | None:
        """Return the score under ``key``, exactly as it was put. Raises `UserError` if the file cannot be read."""
        try:
            row = self._reader.execute("SELECT score FROM rewards WHERE key = ?", (bytes.fromhex(key),)).fetchone()
            return None if row is None else serialize.decode(row[0], Score)
        except (sqlite3.Error, serialize.DecodeError) as error:
            raise UserError(f"the reward journal {self.path} cannot be read: {error}; a restart repairs it") from None

    async def put(self, key: str, score: Score) -> None:
        """Store a valid score; it is on disk when this returns. Raises `UserError` if it cannot be written."""
        if not score.valid:
            raise ValueError("only a valid score is final; another may be tried again")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        parts = {name: float(part) for name, part in score.parts.items()}  # a bool would not be read back
        score = replace(score, value=float(score.value), parts=parts)
        self._pending.append((bytes.fromhex(key), serialize.encode(score), done))
        if self._writing is None:
            self._writing = loop.create_task(self._write())
        await done

    async def aclose(self) -> None:
        """Write pending scores and close the file."""
        if self._writing is not None:
            await self._writing
        self._thread.shutdown()
        self._reader.close()
        self._database.close()

    async def _write(self) -> None:
        """Commit pending scores until none are left. Scores that arrive during a commit share the next one."""
        loop = asyncio.get_running_loop()
        try:
            while self._pending:
                batch, self._pending = self._pending, []
                error: Exception | None = None
                try:
                    await loop.run_in_executor(self._thread, self._commit, [(key, data) for key, data, _ in batch])
                except sqlite3.Error as failure:
                    error = UserError(f"the reward journal {self.path} cannot be written: {failure}")
                for _, _, done in batch:
                    if done.done():  # its caller was cancelled
                        continue
                    if error is None:
                        done.set_result(None)
                    else:
                        done.set_exception(error)
        finally:
            self._writing = None

    def _commit(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        with self._database:
            self._database.executemany("INSERT OR IGNORE INTO rewards VALUES (?, ?)", rows)
