"""The experience pool: successes of partly solved tasks in one SQLite file, token-exact and durable.

One process writes, and any number of processes read. Every change is one transaction: after a crash the pool is what it
was after the last call that returned. The cost of a call depends on its arguments, not on the size of the pool.

`ExperiencePool.observe` fills the pool and `ReplayCurriculum` draws from it. Both also work in other trainers' loops::

    with ExperiencePool("experience.sqlite") as pool:
        pool.observe(groups, step)
        stored = pool.stored(["task-7"])["task-7"]
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool import admission, bucket_index, codec, integrity, marks, schema
from gleanrl.experience.pool.admission import Candidate, Limits
from gleanrl.experience.pool.bucket_index import TaskRow
from gleanrl.experience.pool.integrity import Unfit
from gleanrl.types import Group, Task, Trajectory
from gleanrl.utils.errors import UserError

log = logging.getLogger(__name__)

DEFAULTS = ReplaySettings()


@dataclass(frozen=True, slots=True)
class Stored:
    """A trajectory in the pool."""

    key: int  # the pool's own id; never given to another trajectory
    trajectory: Trajectory
    entropy: float  # minus the mean recorded log-prob of its sampled tokens: their estimated entropy when sampled
    version: int  # version of the oldest weights that sampled it
    temperature: float
    step: int  # step in which it was stored
    uses: int  # how often it was replayed


@dataclass(frozen=True, slots=True)
class PoolTask:
    """A task and its state in the pool."""

    task: Task
    attempts: int  # valid members of its latest fresh group; 0 = seeded and never tried
    successes: int
    step: int
    live: int  # trajectories that can be replayed

    @property
    def rate(self) -> float:
        """Share of the latest fresh group that succeeded; 0 if the task was never tried."""
        return self.successes / self.attempts if self.attempts else 0.0


@dataclass(frozen=True, slots=True)
class Incoming:
    """A success from another source, in the form for `ExperiencePool.add_all`."""

    task: Task
    trajectory: Trajectory
    step: int = 0
    temperature: float = 1.0
    version: int | None = None  # version from which its age counts, if its own version is of another run
    attempts: int = 0  # attempts and successes elsewhere, used for a task that was never tried here
    successes: int = 0


class ExperiencePool:
    """Stores successes by the rules in docs/concepts/replay.md. Methods may be called from any thread.

    ``tokenizer`` is a fingerprint. The first one given to an empty pool is kept, and the pool then refuses any other. A
    pool with trajectories but without a fingerprint takes one only with ``settings.trust_tokenizer``. Trajectories with
    token ids of ``vocabulary`` or above, or with more than ``max_context`` tokens in a segment, are neither admitted
    nor returned. ``run`` is recorded as the owner of marks, so that `rewind` does not undo the work of another run.

    Raises:
        UserError: the file is no pool of this version, is damaged, is (or may be) of another tokenizer, or another
            process writes it. Later calls raise it if the disk is full, or if the file turns out to be damaged.
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
        self._counts: Counter[str] = Counter()  # the table of counters, while a transaction is open
        self._replaced: dict[str, int] = {}  # tasks replaced in this transaction -> trajectories evicted
        with ExitStack() as opened:
            if not read_only:
                opened.enter_context(schema.writer_lock(self.path))
            self._db = opened.enter_context(closing(schema.connect(self.path, read_only=read_only)))
            self._bind(tokenizer)
            self._opened = opened.pop_all()

    # --- learning from what came back -----------------------------------------------------------
    def observe(self, groups: Sequence[Group], step: int, *, temperature: float = 1.0) -> dict[str, float]:
        """Update task states, retire tasks and admit successes by the fresh members of ``groups``, in one transaction.

        Trajectories that are too old are evicted. A group without a valid fresh member changes nothing. Returns metrics
        under ``pool/``: counts of this call (evictions: since the last call) and the resulting sizes.
        """
        settings, step = self.settings, int(step)
        seen: Counter[str] = Counter()
        with self._writing() as db:
            if settings.max_age is not None:
                oldest = step + 1 - settings.max_age  # the next step is the first that uses the remaining ones
                rows = db.execute("SELECT id FROM trajectories WHERE version < ?", (oldest,)).fetchall()
                self._evict([key for (key,) in rows], "age")
            for group in groups:
                valid = group.valid_fresh
                if not valid:
                    continue
                successes = [t for t in valid if t.score.value >= settings.success_threshold]
                row, same = self._find_or_add(group.spec.task, step)
                if not same:
                    self._replace(row, group.spec.task)
                was_retired = row.retired
                row.attempts, row.successes, row.step = len(valid), len(successes), step
                row.streak = row.streak + 1 if len(successes) == len(valid) else 0
                row.retired = int(row.streak >= settings.retire_after)
                seen["newly_retired"] += row.retired > was_retired
                seen["unretired"] += row.retired < was_retired
                if settings.min_rate < len(successes) / len(valid) < settings.max_rate:
                    seen += self._admit(row, successes, step, float(temperature), None)
                bucket_index.save(db, row)
            self._log_replaced()

            evicted: Counter[str] = Counter()  # evictions since the last call, from counters that a rewind restores too
            for name in [name for name in self._counts if name.startswith("evicted/")]:
                cause = name.removeprefix("evicted/")
                evicted[cause] = self._counts[name] - self._counts[f"reported/{cause}"]
                self._counts[f"reported/{cause}"] = self._counts[name]
            sizes = bucket_index.sizes(db)
            retired = sizes.pop(bucket_index.RETIRED, 0)
            metrics: dict[str, float] = {
                "pool/tasks": self._counts["tasks"],
                "pool/eligible": sum(sizes.values()),
                "pool/retired": retired,
                "pool/trajectories": self._counts["trajectories"],
                "pool/bytes": self._counts["bytes"],
            }
            for name in dict.fromkeys(("admitted", "newly_retired", "unretired", *seen)):
                metrics[f"pool/{name}"] = seen[name]
            for cause in dict.fromkeys(("capacity", "age", *evicted)):
                if evicted[cause] or cause in ("capacity", "age"):
                    metrics[f"pool/evicted/{cause}"] = evicted[cause]
            for bucket, size in sizes.items():
                solved, attempts = bucket_index.bucket_of(bucket)
                metrics[f"pool/bucket/{solved}_of_{attempts}"] = size
        return {name: float(value) for name, value in metrics.items()}

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
        """Store one success from another source (a demonstration, another run). Returns whether it was stored.

        ``attempts`` and ``successes`` are used if the task was never tried in this pool. The age of the trajectory
        counts from ``version``; give it if the trajectory's own version counts the steps of another run.
        """
        return self.add_all([Incoming(task, trajectory, step, temperature, version, attempts, successes)])[0]

    def add_all(self, incoming: Sequence[Incoming]) -> list[bool]:
        """Call `add` for each item in one transaction: after a crash, either all of them are stored or none."""
        for each in incoming:
            if (theirs := each.trajectory.task_id) != each.task.id:
                raise ValueError(f"a trajectory of task {theirs!r} is not one of task {each.task.id!r}")
        with self._writing():
            return [self._add(each) for each in incoming]

    def update(self, tasks: Iterable[Task]) -> None:
        """Compare the tasks of a run that begins with those of the pool.

        If the pool holds another problem under the same id, that problem is replaced: its trajectories are evicted and
        its state is reset. All other tasks stay as they are.
        """
        with self._writing() as db:
            for task in tasks:
                known = bucket_index.find(db, task.id)
                if known is not None:
                    row, same = self._find_or_add(task, known.step)
                    if not same:
                        self._replace(row, task)
                        bucket_index.save(db, row)
            self._log_replaced()

    def used(self, keys: Sequence[int]) -> None:
        """Count one use of each trajectory. Keys that are no longer in the pool are ignored."""
        with self._writing() as db:
            db.executemany("UPDATE trajectories SET uses = uses + 1 WHERE id = ?", [(int(key),) for key in keys])

    def evict(self, keys: Sequence[int], cause: str) -> None:
        """Remove trajectories, counted under ``cause``. Keys that are no longer in the pool are ignored."""
        with self._writing():
            self._evict(keys, cause)

    # --- planning -------------------------------------------------------------------------------
    def buckets(self) -> dict[tuple[int, int], int]:
        """Return the number of tasks that can be replayed in each bucket that has any.

        A bucket is (successes, attempts) of a task's latest fresh group.
        """
        with self._reading() as db:
            sizes = bucket_index.sizes(db)
        sizes.pop(bucket_index.RETIRED, None)
        return {bucket_index.bucket_of(bucket): size for bucket, size in sizes.items() if size}

    def draw(
        self, bucket: tuple[int, int] | None, count: int, random: np.random.Generator, exclude: Collection[str] = ()
    ) -> list[PoolTask]:
        """Draw up to ``count`` tasks of a bucket, except those in ``exclude``, uniformly without replacement.

        ``bucket`` None draws from the retired tasks. A damaged task is logged, removed from its bucket and left out of
        the result.
        """
        number = bucket_index.RETIRED if bucket is None else bucket_index.bucket_id(bucket)
        drawn: list[PoolTask] = []
        damaged: list[int] = []
        with self._reading() as db:
            for row in bucket_index.draw(db, number, count, random, exclude):
                found = db.execute("SELECT CAST(data AS BLOB) FROM bodies WHERE id = ?", (row.id,)).fetchone()
                try:
                    task = codec.decode_task(found[0] if found else b"")
                    if task.id != row.name:
                        raise codec.Damaged(f"it is another task ({task.id!r})")
                except codec.Damaged as error:
                    log.warning("%s: task %r is damaged (%s) and forgotten", self.path, row.name, error)
                    damaged.append(row.id)
                else:
                    drawn.append(PoolTask(task, row.attempts, row.successes, row.step, row.live))
        if damaged and not self.read_only:
            with self._writing() as db:
                for task_id in damaged:  # the next fresh group of the task stores the task again
                    self._evict(_keys_of(db, task_id), "damaged")
                    db.execute("DELETE FROM bodies WHERE id = ?", (task_id,))
                    row = bucket_index.get(db, task_id)
                    row.retired = row.streak = 0
                    bucket_index.save(db, row)
        return drawn

    def stored(self, task_ids: Sequence[str]) -> dict[str, list[Stored]]:
        """Return the live trajectories of each task, oldest first; an empty list for a task without any.

        A trajectory that is damaged, or that this run cannot train on, is evicted, logged and left out.
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
                for key, *columns, digest, data in db.execute(query, (name,)):
                    try:
                        trajectory = integrity.decode_record(name, digest, data, columns, self._limits)
                        into.append(Stored(key, trajectory, *columns))
                    except Unfit as error:
                        faulty[key] = error.cause
                        log.warning("%s: trajectory %d of task %r is left out (%s)", self.path, key, name, error)
        if faulty and not self.read_only:
            with self._writing():
                for key, cause in faulty.items():
                    self._evict([key], cause)
        return found

    def retired(self, task_ids: Sequence[str]) -> set[str]:
        """Return the ids of those tasks that are retired."""
        with self._reading() as db:
            query = "SELECT 1 FROM tasks WHERE name = ? AND retired"
            return {name for name in task_ids if db.execute(query, (name,)).fetchone()}

    def rates(self, task_ids: Sequence[str]) -> dict[str, float]:
        """Return the solve rate of each task's latest fresh group. Tasks that were never tried are left out."""
        with self._reading() as db:
            query = "SELECT 1.0 * successes / attempts FROM tasks WHERE name = ? AND attempts > 0"
            return {name: row[0] for name in task_ids if (row := db.execute(query, (name,)).fetchone())}

    # --- marks ----------------------------------------------------------------------------------
    def mark(self) -> int:
        """Mark the present state and return the mark's number, which is on disk then and is never used twice."""
        with self._writing() as db:
            return marks.mark(db, self._run)

    def rewind(self, mark: int) -> None:
        """Put all tasks, trajectories, positions and counts back to their state at ``mark``, and delete later marks.

        Raises:
            UserError: there is no such mark, or another run has set a mark since.
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
        """Drop the marks before ``mark``, and the data that is kept only for them."""
        with self._writing() as db:
            marks.forget(db, schema.TRACKED, mark)

    # --- the whole ------------------------------------------------------------------------------
    def stats(self) -> dict[str, Any]:
        """Return sizes, tasks by bucket, evictions by cause, versions and marks, JSON-serialisable.

        The cost does not grow with the pool.
        """
        with self._reading() as db:
            counts = Counter(dict(db.execute("SELECT name, value FROM counters")))
            sizes = bucket_index.sizes(db)
            versions = "SELECT (SELECT min(version) FROM trajectories), (SELECT max(version) FROM trajectories)"
            oldest, newest = db.execute(versions).fetchone()
            kept = [row[0] for row in db.execute("SELECT id FROM marks ORDER BY id")]
        retired = sizes.pop(bucket_index.RETIRED, 0)
        buckets = {bucket_index.bucket_of(bucket): size for bucket, size in sizes.items() if size}
        evicted = {n.removeprefix("evicted/"): v for n, v in sorted(counts.items()) if n.startswith("evicted/")}
        return {
            "path": str(self.path),
            "file_bytes": self.path.stat().st_size,
            "tasks": counts["tasks"],
            "eligible": sum(buckets.values()),
            "retired": retired,
            "trajectories": counts["trajectories"],
            "bytes": counts["bytes"],
            "oldest_version": oldest,
            "newest_version": newest,
            "buckets": {f"{successes}/{attempts}": size for (successes, attempts), size in buckets.items()},
            "evicted": evicted,
            "marks": kept,
        }

    def verify(self, *, records: bool = True) -> list[str]:
        """Read the whole pool and return its faults, one line each. ``records``: decode every record as well."""
        with self._reading() as db:
            return list(integrity.faults(db, records=records))

    def close(self) -> None:
        """Close the file, so that another process can write it. No data is lost if this is not called."""
        with self._guard:
            self._opened.close()

    def __enter__(self) -> ExperiencePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- transactions ---------------------------------------------------------------------------
    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._guard, schema.explained(self.path), schema.transaction(self._db, "DEFERRED"):
            yield self._db

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction. ``self._counts`` is read when it begins and written when it ends."""
        if self.read_only:
            raise UserError(f"the experience pool {self.path} is open read-only; open it for writing")
        with self._guard, schema.explained(self.path), schema.transaction(self._db):
            before = dict(self._db.execute("SELECT name, value FROM counters"))
            self._counts, self._replaced = Counter(before), {}
            yield self._db
            for name, value in self._counts.items():
                if name not in before:
                    self._db.execute("INSERT INTO counters (name, value) VALUES (?, ?)", (name, value))
                elif value != before[name]:
                    self._db.execute("UPDATE counters SET value = ? WHERE name = ?", (value, name))

    def _bind(self, tokenizer: str | None) -> None:
        """Check that the pool's tokenizer is that of the run. If the pool has none, the run's is written into it."""
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

    # --- parts of a change: each is called inside `_writing` --------------------------------------
    def _find_or_add(self, task: Task, step: int) -> tuple[TaskRow, bool]:
        """Return the row of a task's id, and whether that row is of this very task.

        A task whose id is not in the pool is added.
        """
        row = bucket_index.find(self._db, task.id)
        if row is None:
            number = self._counts["next_task"]
            self._counts.update(next_task=1, tasks=1)
            self._db.execute("INSERT INTO tasks VALUES (?, ?, 0, 0, ?, 0, 0, 0, NULL, NULL)", (number, task.id, step))
            row = TaskRow(number, task.id, 0, 0, step, 0, 0, 0, None, None)
        body = self._db.execute("SELECT CAST(data AS BLOB) FROM bodies WHERE id = ?", (row.id,)).fetchone()
        try:
            if body is not None:
                return row, codec.is_same_task(body[0], task)
        except codec.Damaged:  # the task is written again below; its trajectories are checked when they are read
            pass
        # INSERT OR REPLACE would delete the old row without firing the trigger that keeps it for a rewind.
        write = "INSERT INTO bodies VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET data = excluded.data"
        self._db.execute(write, (row.id, codec.encode_task(task)))
        return row, True

    def _replace(self, row: TaskRow, task: Task) -> None:
        """Replace the task of ``row`` by another one with the same id.

        Evicts the trajectories of the old task and resets its state in ``row``, which the caller must save.
        """
        self._db.execute("UPDATE bodies SET data = ? WHERE id = ?", (codec.encode_task(task), row.id))
        removed = self._remove(_keys_of(self._db, row.id), "other_task")
        row.live -= removed
        row.attempts = row.successes = row.streak = row.retired = 0
        self._replaced[row.name] = removed

    def _log_replaced(self) -> None:
        if self._replaced:
            log.warning(
                "%s: %d tasks (%s is the first) differ, in prompt or payload, from those known under their ids; "
                "the %d trajectories of the old ones are evicted",
                *(self.path, len(self._replaced), next(iter(self._replaced)), sum(self._replaced.values())),
            )

    def _add(self, incoming: Incoming) -> bool:
        """Store one success from another source, unless the pool has another problem under the task's id."""
        trajectory, temperature, score = incoming.trajectory, float(incoming.temperature), incoming.trajectory.score
        succeeded = score.valid and score.value >= self.settings.success_threshold
        if not succeeded or admission.refusal(trajectory, temperature, self._limits):
            return False
        row, same = self._find_or_add(incoming.task, int(incoming.step))
        if not same:
            if row.live or row.attempts:
                return False
            self._replace(row, incoming.task)
        if row.attempts == 0:
            row.attempts, row.successes = incoming.attempts, incoming.successes
        seen = self._admit(row, [trajectory], int(incoming.step), temperature, incoming.version)
        bucket_index.save(self._db, row)
        return bool(seen["admitted"])

    def _admit(
        self,
        row: TaskRow,
        trajectories: Sequence[Trajectory],
        step: int,
        temperature: float,
        version: int | None,
    ) -> Counter[str]:
        """Store the trajectories that are admitted, and evict others for them. The caller must save ``row``."""
        stored = self._db.execute("SELECT id, entropy, digest FROM trajectories WHERE task = ?", (row.id,)).fetchall()
        known = {digest for _, _, digest in stored}
        new: list[tuple[Candidate, Trajectory]] = []
        seen: Counter[str] = Counter()
        for trajectory in trajectories:
            reason = admission.refusal(trajectory, temperature, self._limits)
            digest = codec.token_digest(trajectory)
            if reason is None and digest in known:
                reason = "duplicate"
            if reason is not None:
                seen[f"refused/{reason}"] += 1
                continue
            known.add(digest)
            order = self._counts["next_key"] + len(new) + 1  # newer than all stored ones
            new.append((Candidate(order, admission.entropy(trajectory), digest), trajectory))
        candidates = [*(Candidate(*each) for each in stored), *(candidate for candidate, _ in new)]
        surplus = {candidate.order for candidate in admission.surplus(candidates, self.settings)}
        row.live -= self._remove([key for key, _, _ in stored if key in surplus], "capacity")
        for candidate, trajectory in new:
            if candidate.order in surplus:
                seen["refused/full"] += 1
                continue
            data = codec.encode_trajectory(trajectory)
            self._counts.update(next_key=1, trajectories=1, bytes=len(data))
            key, since = self._counts["next_key"], int(trajectory.version if version is None else version)
            columns = (key, row.id, candidate.digest, candidate.entropy, since, temperature, step, 0, len(data))
            self._db.execute("INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", columns)
            self._db.execute("INSERT INTO blobs VALUES (?, ?)", (key, data))
            row.live += 1
            seen["admitted"] += 1
        return seen

    def _evict(self, keys: Sequence[int], cause: str) -> None:
        by_task: dict[int, list[int]] = {}
        for key in keys:
            found = self._db.execute("SELECT task FROM trajectories WHERE id = ?", (int(key),)).fetchone()
            if found is not None:
                by_task.setdefault(found[0], []).append(int(key))
        for task, own in by_task.items():
            row = bucket_index.get(self._db, task)
            row.live -= self._remove(own, cause)
            bucket_index.save(self._db, row)

    def _remove(self, keys: Sequence[int], cause: str) -> int:
        """Delete trajectories of a task and return how many there were. The caller must save the task's row."""
        distinct = sorted(set(keys))
        for key in distinct:
            (size,) = self._db.execute("SELECT bytes FROM trajectories WHERE id = ?", (key,)).fetchone()
            self._db.execute("DELETE FROM trajectories WHERE id = ?", (key,))
            self._db.execute("DELETE FROM blobs WHERE id = ?", (key,))
            self._counts.update({"trajectories": -1, "bytes": -size, f"evicted/{cause}": 1})
        return len(distinct)


def _keys_of(db: sqlite3.Connection, task: int) -> list[int]:
    return [row[0] for row in db.execute("SELECT id FROM trajectories WHERE task = ?", (task,))]
