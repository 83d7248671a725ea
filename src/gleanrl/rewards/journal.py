"""Keeps finished rewards on disk, so that a resumed run does not pay for them again.

The journal is an SQLite file in WAL mode. `Journal.put` returns once its row is committed and synced; rows that arrive
during a commit share the next one. It holds keys (hashes) and scores, but no conversations.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gleanrl.types import Score
from gleanrl.utils.errors import UserError

log = logging.getLogger(__name__)

_APPLICATION = 0x676C726A  # "glrj", in the file's header
_SCHEMA = "CREATE TABLE IF NOT EXISTS rewards (key BLOB PRIMARY KEY, score TEXT NOT NULL) WITHOUT ROWID"
_BUSY_S = 30.0  # maximum wait for another process that writes


class Journal:
    """Scores by `Request.key`.

    A damaged file is moved aside with a warning, and a new one is started. Raises `UserError` if the file belongs to
    another program or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._database = self._opened()
            # reads on the event loop need a connection of their own, or they would wait for commits
            self._reader = sqlite3.connect(self.path, timeout=_BUSY_S)
        except (OSError, sqlite3.OperationalError) as error:
            raise UserError(f"the reward journal {self.path} cannot be opened: {error}") from None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gleanrl-journal")
        self._pending: list[tuple[bytes, str, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return self._reader.execute("SELECT count(*) FROM rewards").fetchone()[0]

    def get(self, key: str) -> Score | None:
        """Return the score under ``key``, exactly as it was put. Raises `UserError` if the file cannot be read."""
        try:
            row = self._reader.execute("SELECT score FROM rewards WHERE key = ?", (bytes.fromhex(key),)).fetchone()
        except sqlite3.Error as error:
            raise UserError(f"the reward journal {self.path} cannot be read: {error}; a restart repairs it") from None
        if row is None:
            return None
        value, parts, explanation = json.loads(row[0])
        return Score(value, parts=parts, explanation=explanation)

    async def put(self, key: str, score: Score) -> None:
        """Store a valid score; it is on disk when this returns. Raises `UserError` if it cannot be written."""
        if not score.valid:
            raise ValueError("only a valid score is final; another may be tried again")
        text = json.dumps([score.value, dict(score.parts), score.explanation])
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._pending.append((bytes.fromhex(key), text, done))
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
                    await loop.run_in_executor(self._thread, self._commit, [(key, text) for key, text, _ in batch])
                except sqlite3.Error as failure:
                    error = UserError(f"the reward journal {self.path} cannot be written: {failure}")
                for _, _, done in batch:
                    if done.done():  # its caller was cancelled
                        continue
                    done.set_result(None) if error is None else done.set_exception(error)
        finally:
            self._writing = None

    def _commit(self, rows: Sequence[tuple[bytes, str]]) -> None:
        with self._database:
            self._database.executemany("INSERT OR IGNORE INTO rewards VALUES (?, ?)", rows)

    def _opened(self) -> sqlite3.Connection:
        try:
            return self._checked()
        except sqlite3.OperationalError:
            raise  # locked, no permission, disk full: the file itself may be intact
        except sqlite3.DatabaseError as error:
            aside = _free_name(self.path)
            for suffix in ("", "-wal", "-shm"):
                part = self.path.with_name(self.path.name + suffix)
                if part.exists():
                    part.rename(aside.with_name(aside.name + suffix))
            why = " ".join(str(error).split())
            text = "the reward journal %s is damaged (%s); moved to %s, and the rewards in it are asked for again"
            log.warning(text, self.path, why, aside.name)
            return self._checked()

    def _checked(self) -> sqlite3.Connection:
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


def _free_name(path: Path) -> Path:
    names: Any = (path.with_name(f"{path.name}.damaged-{number}") for number in range(1, 10_000))
    return next(name for name in names if not name.exists())
