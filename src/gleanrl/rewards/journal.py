"""The journal stores scores on disk, so that a resumed run does not compute and pay for them again.

It is an SQLite file in WAL mode, which contains keys (hashes of requests) and scores, but no conversations.
`Journal.put` returns when its score is committed and synced to disk. Scores that arrive during a commit are written
together by the next commit.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from gleanrl.types import Score
from gleanrl.utils import serialize
from gleanrl.utils.errors import UserError

log = logging.getLogger(__name__)

_APPLICATION = 0x676C724B  # "glrK" in ASCII, SQLite's application_id in the file's header
_SCHEMA = "CREATE TABLE IF NOT EXISTS rewards (key BLOB PRIMARY KEY, score BLOB NOT NULL) WITHOUT ROWID"
_BUSY_S = 30.0  # maximum number of seconds to wait while another process writes to the file


class Journal:
    """Stores scores under the keys that `Request.key` returns.

    A damaged file is renamed with a warning, and a new file is started. Raises `UserError` if the file is another
    program's database or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._database = self._open()
            except sqlite3.OperationalError:
                raise  # the file is locked, not permitted, or the disk is full; it is not necessarily damaged
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
            # `get` reads on the event loop. If it used the connection that writes, it would block the event loop during
            # a commit.
            self._reader = sqlite3.connect(self.path, timeout=_BUSY_S)
        except (OSError, sqlite3.OperationalError) as error:
            raise UserError(f"the reward journal {self.path} cannot be opened: {error}") from None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gleanrl-journal")
        self._pending: list[tuple[bytes, bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    def _open(self) -> sqlite3.Connection:
        """Open the file, check that it is an undamaged journal, and create the table if it is missing.

        Raises `UserError` if the file is another program's database, `sqlite3.DatabaseError` if it is damaged.
        """
        database = sqlite3.connect(self.path, timeout=_BUSY_S, check_same_thread=False)
        try:
            (application,) = database.execute("PRAGMA application_id").fetchone()
            (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables and application != _APPLICATION:
                raise UserError(
                    f"{self.path} is not a reward journal of this version, but another database; give another path"
                )
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
        """Return the score stored under ``key``, or None. Raises `UserError` if the file cannot be read."""
        try:
            row = self._reader.execute("SELECT score FROM rewards WHERE key = ?", (bytes.fromhex(key),)).fetchone()
            return None if row is None else serialize.decode(row[0], Score)
        except (sqlite3.Error, serialize.DecodeError) as error:
            raise UserError(f"the reward journal {self.path} cannot be read: {error}; a restart repairs it") from None

    async def put(self, key: str, score: Score) -> None:
        """Store a valid score under ``key`` and return when it is on disk. A score already stored there is kept.

        Raises:
            UserError: the file cannot be written.
            ValueError: the score is invalid. A later attempt may give a valid one, so only valid scores are stored.
        """
        if not score.valid:
            raise ValueError("only a valid score is final; another may be tried again")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._pending.append((bytes.fromhex(key), serialize.encode(score), done))
        if self._writing is None:
            self._writing = loop.create_task(self._write())
        await done

    async def aclose(self) -> None:
        """Wait until all pending scores are written, and close the file."""
        if self._writing is not None:
            await self._writing
        self._thread.shutdown()
        self._reader.close()
        self._database.close()

    async def _write(self) -> None:
        """Write all pending scores in one commit, and repeat this until no score has arrived during a commit."""
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
