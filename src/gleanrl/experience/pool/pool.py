"""The experience pool: successes of partly solved tasks in one SQLite file, token-exact and durable.

One process writes, any number read. Every change is one transaction: after a crash the pool is what it was after the
last call that returned. What a call costs depends on what it is given, not on the size of the pool.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool import bucket_index, codec, integrity, marks, schema
from gleanrl.experience.pool.admission import Limits
from gleanrl.experience.pool.bucket_index import TaskRow
from gleanrl.experience.pool.integrity import Unfit
from gleanrl.experience.pool.pool_writer import PoolWriter
from gleanrl.types import Group, Task, Trajectory
from gleanrl.utils.errors import UserError

log = logging.getLogger(__name__)

DEFAULTS = ReplaySettings()


@dataclass(frozen=True, slots=True)
class Stored:
    """A trajectory in the pool."""

    key: int  # the pool's own id; never given to another trajectory
    trajectory: Trajectory
    entropy: float  # minus the mean recorded log-prob of its sampled tokens: estimates their entropy then
    version: int  # the oldest weights that sampled it
    temperature: float
    step: int  # when it was stored
    uses: int  # how often it was replayed


@dataclass(frozen=True, slots=True)
class PoolTask:
    """A task and what is known of it."""

    task: Task
    attempts: int  # valid members of its latest fresh group; 0 = seeded and never tried
    successes: int
    step: int
    live: int  # trajectories that can be replayed

    @property
    def rate(self) -> float:
        """Share of its latest fresh group that succeeded; 0 where it was never tried."""
        return self.successes / self.attempts if self.attempts else 0.0


@dataclass(frozen=True, slots=True)
class Incoming:
    """A success from elsewhere, as `ExperiencePool.add` takes it."""

    task: Task
    trajectory: Trajectory
    step: int = 0
    temperature: float = 1.0
    version: int | None = None
    attempts: int = 0
    successes: int = 0


class ExperiencePool:
    """Rules: docs/concepts/replay.md. Methods may be called from any thread.

    ``tokenizer`` is a fingerprint: the first one given to an empty pool is kept, and the pool refuses to open under
    another. A pool with trajectories and without a fingerprint takes one only with ``settings.trust_tokenizer``.
    Trajectories with token ids of ``vocabulary`` or above, or with more than ``max_context`` tokens in a segment, are
    neither admitted nor given out. ``run`` says whose marks are set: `rewind` undoes nothing of another run.

    Raises:
        UserError: the file is no pool of this version, is damaged, is (or may be) of another tokenizer, or another
            process writes it. Any later call: the disk is full, or the file turns out to be damaged.
    """

    def __init__(
        self,
        path: Path | str,
        settings: ReplaySettings = DEFAULTS,
        *,
        tokenizer: str | None = None,
        vocabulary: int | None = None,
        max_context: int | None = None,
        run: str | None = None,
        read_only: bool = False,
    ) -> None:
        self.path, self.settings, self.read_only = Path(path), settings, read_only
        self._limits, self._run = Limits(vocabulary, max_context), run
        self._guard = threading.RLock()
        self._lock = None if read_only else schema.WriterLock(self.path)
        try:
            self._db = schema.connect(self.path, read_only=read_only)
            self._writer = PoolWriter(self._db, settings, self._limits)
            try:
                self._bind(tokenizer)
            except BaseException:
                self._db.close()
                raise
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise

    # --- learning from what came back -----------------------------------------------------------
    def observe(self, groups: Sequence[Group], step: int, *, temperature: float = 1.0) -> dict[str, float]:
        """Task states, retirement and admission from the fresh members of ``groups``, then age; one transaction.

        A group without a valid fresh member changes nothing. Returns metrics under ``pool/``: counts of this call
        (what was evicted: since the last call) and the sizes that result.
        """
        seen: Counter[str] = Counter()
        with self._changing() as writer:
            if self.settings.max_age is not None:
                writer.evict_older(int(step) + 1 - self.settings.max_age)  # the next step is the first to use it
            for group in groups:
                if valid := group.valid_fresh:
                    seen += writer.observe(group.spec.task, valid, int(step), float(temperature))
            self._tell_replaced(writer)
            return writer.metrics(seen)

    def add(
        self,
        task: Task,
        trajectory: Trajectory,
        *,
        step: int = 0,
        temperature: float = 1.0,
        version: int | None = None,
        attempts: int = 0,
        successes: int = 0,
    ) -> bool:
        """Store one success from elsewhere (a demonstration, another run); whether it is in the pool now.

        ``attempts`` and ``successes`` are what is known of a task that the pool does not know yet. ``version``
        stands for the age of the trajectory where its own counts the steps of another run.
        """
        return self.add_all([Incoming(task, trajectory, step, temperature, version, attempts, successes)])[0]

    def add_all(self, incoming: Sequence[Incoming]) -> list[bool]:
        """`add` for each in turn, all in one transaction: after a crash all of it is there or none."""
        for each in incoming:
            if (theirs := each.trajectory.task_id) != each.task.id:
                raise ValueError(f"a trajectory of task {theirs!r} is not one of task {each.task.id!r}")
        with self._changing() as writer:
            return [
                writer.add(
                    *(each.task, each.trajectory, int(each.step), float(each.temperature), each.version),
                    (each.attempts, each.successes),
                )
                for each in incoming
            ]

    def update(self, tasks: Iterable[Task]) -> None:
        """These are the tasks of a run that begins. Where the pool knows another problem under the same id, its
        trajectories are evicted, and nothing that is known of it holds any more; others stay as they are.
        """
        with self._changing() as writer:
            writer.update(tasks)
            self._tell_replaced(writer)

    def used(self, keys: Sequence[int]) -> None:
        """Count one use of each; keys that are gone are ignored."""
        with self._writing() as db:
            db.executemany("UPDATE trajectories SET uses = uses + 1 WHERE id = ?", [(int(key),) for key in keys])

    def evict(self, keys: Sequence[int], cause: str) -> None:
        """Remove trajectories; keys that are gone are ignored."""
        with self._changing() as writer:
            writer.evict(keys, cause)

    # --- planning -------------------------------------------------------------------------------
    def buckets(self) -> dict[tuple[int, int], int]:
        """(successes, attempts) of the latest fresh group -> tasks that can be replayed; empty ones left out."""
        with self._reading() as db:
            rows = db.execute("SELECT id, size FROM buckets WHERE id >= 0 AND size > 0 ORDER BY id")
            return {bucket_index.bucket_of(bucket): size for bucket, size in rows}

    def draw(
        self, bucket: tuple[int, int], count: int, random: np.random.Generator, exclude: Collection[str] = ()
    ) -> list[PoolTask]:
        """Up to ``count`` tasks of a bucket, without those in ``exclude``, uniformly without replacement.

        A damaged task is logged, removed from its bucket and missing from the result.
        """
        return self._draw(bucket_index.bucket_id(bucket), count, random, exclude)

    def draw_retired(self, count: int, random: np.random.Generator, exclude: Collection[str] = ()) -> list[PoolTask]:
        """`draw` from the retired tasks."""
        return self._draw(bucket_index.RETIRED, count, random, exclude)

    def stored(self, task_ids: Sequence[str]) -> dict[str, list[Stored]]:
        """The live trajectories of each task, oldest first; an empty list where there is none.

        One that is damaged, or that this run cannot train on, is evicted, logged and left out.
        """
        found: dict[str, list[Stored]] = {name: [] for name in task_ids}
        faulty: dict[int, str] = {}
        query = (
            "SELECT t.id, t.entropy, t.version, t.temperature, t.step, t.uses, t.digest, CAST(b.data AS BLOB) "
            "FROM trajectories t LEFT JOIN blobs b USING (id) "
            "WHERE t.task = (SELECT id FROM tasks WHERE name = ?) ORDER BY t.id"
        )
        with self._reading() as db:
            for name, into in found.items():
                for key, *described, digest, data in db.execute(query, (name,)):
                    try:
                        trajectory = integrity.decoded(name, digest, data, self._limits)
                        into.append(Stored(key, trajectory, *integrity.noted(described)))
                    except Unfit as error:
                        faulty[key] = error.cause
                        log.warning("%s: trajectory %d of task %r is left out (%s)", self.path, key, name, error)
        if faulty and not self.read_only:
            with self._changing() as writer:
                for key, cause in faulty.items():
                    writer.evict([key], cause)
        return found

    def retired(self, task_ids: Sequence[str]) -> set[str]:
        """Those of them that are retired."""
        with self._reading() as db:
            query = "SELECT 1 FROM tasks WHERE name = ? AND retired"
            return {name for name in task_ids if db.execute(query, (name,)).fetchone()}

    def rates(self, task_ids: Sequence[str]) -> dict[str, float]:
        """Solve rate of the latest fresh group of each; a task that was never tried is missing."""
        with self._reading() as db:
            query = "SELECT 1.0 * successes / attempts FROM tasks WHERE name = ? AND attempts > 0"
            return {name: row[0] for name in task_ids if (row := db.execute(query, (name,)).fetchone())}

    # --- marks ----------------------------------------------------------------------------------
    def mark(self) -> int:
        """A name for the present state, on disk when this returns; numbers are never used twice."""
        with self._writing() as db:
            return marks.mark(db, self._run)

    def rewind(self, mark: int) -> None:
        """Put every task, trajectory, position and count back to what it was; the mark stands, later ones are gone.

        Raises:
            UserError: there is no such mark, or another run has set one since.
        """
        with self._writing() as db:
            if self._run is not None and (other := marks.other_owner(db, mark, self._run)):
                raise UserError(
                    f"another run ({other}) has used the experience pool {self.path} since, and going back would undo "
                    "that: resume with replay.path set to a copy of the file, or start a new run with it"
                )
            if not marks.rewind(db, schema.TRACKED, mark):
                raise UserError(
                    f"the experience pool {self.path} has no mark {mark}: it is not the pool of this checkpoint, or "
                    "went on without it; put its own pool back, or start a new run"
                )

    def forget(self, mark: int) -> None:
        """Drop the marks before ``mark`` and what is kept only for them."""
        with self._writing() as db:
            marks.forget(db, schema.TRACKED, mark)

    # --- the whole ------------------------------------------------------------------------------
    def stats(self) -> dict[str, Any]:
        """Sizes, tasks by bucket, evictions by cause, versions, marks; JSON-serialisable, at no cost that grows."""
        with self._reading() as db:
            return {"path": str(self.path), "file_bytes": self.path.stat().st_size, **_stats(db)}

    def verify(self, *, records: bool = True) -> list[str]:
        """What is wrong with the pool, one line each; it reads all of it, and decodes all of it with ``records``."""
        with self._reading() as db:
            return list(integrity.faults(db, records=records))

    def close(self) -> None:
        """Nothing is lost without it; it gives the file to the next writer."""
        with self._guard:
            self._db.close()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> ExperiencePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- parts ----------------------------------------------------------------------------------
    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        if self.read_only:
            raise UserError(f"the experience pool {self.path} is open read-only; open it for writing")
        with self._guard, schema.explained(self.path), schema.transaction(self._db):
            yield self._db

    @contextmanager
    def _changing(self) -> Iterator[PoolWriter]:
        with self._writing(), self._writer.change():
            yield self._writer

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._guard, schema.explained(self.path), schema.transaction(self._db, "DEFERRED"):
            yield self._db

    def _tell_replaced(self, writer: PoolWriter) -> None:
        if gone := writer.replaced:
            log.warning(
                "%s: %d tasks (%s is the first) differ, in prompt or payload, from those known under their ids; "
                "the %d trajectories of the old ones are evicted",
                *(self.path, len(gone), next(iter(gone)), sum(gone.values())),
            )

    def _bind(self, tokenizer: str | None) -> None:
        if tokenizer is None:
            return
        with self._reading() as db:
            found = db.execute("SELECT value FROM meta WHERE key = 'tokenizer'").fetchone()
            holds = db.execute("SELECT 1 FROM trajectories LIMIT 1").fetchone() is not None
        if found is None and holds and not self.settings.trust_tokenizer:
            raise UserError(
                f"the experience pool {self.path} does not say which tokenizer its token ids are of; if it is this "
                "one, set replay.trust_tokenizer = true, else give replay.path another file"
            )
        if found is not None and found[0] != tokenizer:
            raise UserError(
                f"the experience pool {self.path} holds tokens of another tokenizer ({found[0]}, not {tokenizer}); "
                "give replay.path another file"
            )
        if found is None and not self.read_only:
            with self._writing() as db:
                db.execute("INSERT INTO meta VALUES ('tokenizer', ?)", (tokenizer,))

    def _draw(self, bucket: int, count: int, random: np.random.Generator, exclude: Collection[str]) -> list[PoolTask]:
        drawn: list[PoolTask] = []
        lost: list[TaskRow] = []
        with self._reading() as db:
            for row in bucket_index.draw(db, bucket, count, random, exclude):
                found = db.execute("SELECT CAST(data AS BLOB) FROM bodies WHERE id = ?", (row.id,)).fetchone()
                try:
                    task = codec.decode_task(found[0] if found else b"")
                    if task.id != row.name:
                        raise codec.Damaged(f"it is another task ({task.id!r})")
                except codec.Damaged as error:
                    log.warning("%s: task %r is damaged (%s) and forgotten", self.path, row.name, error)
                    lost.append(row)
                else:
                    drawn.append(PoolTask(task, row.attempts, row.successes, row.step, row.live))
        if lost and not self.read_only:
            with self._changing() as writer:
                for row in lost:
                    writer.forget_task(row.id)
        return drawn


def _stats(db: sqlite3.Connection) -> dict[str, Any]:
    """Sizes, tasks by bucket, evictions by cause, versions, marks; JSON-serialisable."""
    counts = Counter(dict(db.execute("SELECT name, value FROM counters")))
    sizes = dict(db.execute("SELECT id, size FROM buckets WHERE size > 0 ORDER BY id"))
    oldest, newest = db.execute(
        "SELECT (SELECT min(version) FROM trajectories), (SELECT max(version) FROM trajectories)"
    ).fetchone()
    kept = [row[0] for row in db.execute("SELECT id FROM marks ORDER BY id")]
    buckets = {bucket_index.bucket_of(bucket): size for bucket, size in sizes.items() if bucket >= 0}
    return {
        "tasks": counts["tasks"],
        "eligible": sum(buckets.values()),
        "retired": sizes.get(bucket_index.RETIRED, 0),
        "trajectories": counts["trajectories"],
        "bytes": counts["bytes"],
        "oldest_version": oldest,
        "newest_version": newest,
        "buckets": {f"{successes}/{attempts}": size for (successes, attempts), size in buckets.items()},
        "evicted": {name[8:]: value for name, value in sorted(counts.items()) if name.startswith("evicted/")},
        "marks": kept,
    }
