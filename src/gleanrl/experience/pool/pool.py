"""The experience pool, which stores successful trajectories of partly solved tasks in one SQLite file.

With ``replay.keep_failures`` it also stores failures, in tables of their own, which only the methods that name failures
read. All else here that is said of trajectories is said of the successes.

A stored trajectory keeps the token ids and log-probs that were sampled, bit for bit. One process can write to the pool
and any number of processes can read it. Every method that changes the pool does so in one transaction. After a crash,
the pool is in the state that the last completed call left. The cost of a call depends on how much it reads or changes
and not on the size of the pool; only `ExperiencePool.verify` reads the whole file.

`ExperiencePool.observe` fills the pool, and `ReplayCurriculum` draws from it. The pool can also be used in the training
loop of another trainer::

    with ExperiencePool("experience.sqlite") as pool:
        pool.observe(groups, step)
        stored = pool.stored(["task-7"])["task-7"]
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool import admission, bucket_index, codec, integrity, marks, schema
from gleanrl.experience.pool.admission import Limits
from gleanrl.experience.pool.bucket_index import TaskRow
from gleanrl.experience.pool.integrity import Unfit
from gleanrl.experience.pool.ranking import RANKINGS, Candidate
from gleanrl.types import Group, Task, Trajectory
from gleanrl.utils.errors import UserError

log = logging.getLogger(__name__)

DEFAULTS = ReplaySettings()
StoredKind = TypeVar("StoredKind", "Stored", "StoredFailure")


@dataclass(frozen=True, slots=True)
class _Record:
    """What the pool contains about a trajectory."""

    key: int
    """The pool's id of the trajectory; never reused for another one. That of a failure is below 0."""
    trajectory: Trajectory
    """The stored trajectory."""
    entropy: float
    """Estimated mean entropy of the policy at its sampled tokens, in nats (`admission.entropy`)."""
    version: int
    """Version of the weights from which its age counts: the trajectory's own, unless another run sampled it."""
    temperature: float
    """Sampling temperature."""
    step: int
    """Step after which it was stored."""
    uses: int
    """How often it was replayed, or a failure trained on."""
    source: str
    """Where it came from: ``own``, ``earlier``, or the name that was given when it was copied into the pool."""


@dataclass(frozen=True, slots=True)
class Stored(_Record):
    """A trajectory in the pool: a success."""


@dataclass(frozen=True, slots=True)
class StoredFailure(_Record):
    """A failure in the pool: a trajectory with a valid score below ``success_threshold``.

    It is not a `Stored`, so that it cannot be passed where a success is needed.
    """


@dataclass(frozen=True, slots=True)
class PoolTask:
    """A task and its state in the pool."""

    task: Task
    """The task."""
    attempts: int
    """Number of valid fresh members of its latest group; 0 = unknown, because no group was observed."""
    successes: int
    """Number of these members that succeeded."""

    @property
    def rate(self) -> float:
        """Solve rate: the share of ``attempts`` that succeeded; 0 if there were no attempts."""
        return self.successes / self.attempts if self.attempts else 0.0


@dataclass(frozen=True, slots=True)
class Incoming:
    """A trajectory from another source, which `ExperiencePool.add_all` or `ExperiencePool.add_failures` stores."""

    task: Task
    """The task that was played."""
    trajectory: Trajectory
    """The trajectory to store."""
    step: int = 0
    """Step after which it is stored."""
    temperature: float = 1.0
    """Sampling temperature."""
    version: int | None = None
    """Version from which the age counts. None = the trajectory's own version; wrong if another run sampled it."""
    attempts: int = 0
    """Valid members of the task's latest group elsewhere. Used only if this pool has no attempts of the task."""
    successes: int = 0
    """Successes among these ``attempts``."""
    source: str = "import"
    """Name of where it comes from, by which ``replay.source_limits`` limits its use."""


class ExperiencePool:
    """Stores successful trajectories by the rules in docs/concepts/replay.md, and returns them for replay.

    Methods may be called from any thread.

    Args:
        path: the SQLite file. It is created if it does not exist, unless ``read_only``.
        settings: rules of admission, capacity, age and retirement.
        tokenizer: fingerprint of the run's tokenizer. An empty pool stores it, and can be opened only with the same
            fingerprint from then on. A pool that contains trajectories but no fingerprint stores it only if
            ``settings.trust_tokenizer`` is on. None: the tokenizer is not checked.
        vocabulary: size of the model's vocabulary. Trajectories with token ids not below it are not admitted, and are
            evicted if the pool contains them. None: no check.
        max_context: largest number of tokens in a segment, up to its last sampled token. Longer trajectories are
            treated in the same way. None: no check.
        run: name of the run that opens the pool. It is stored with the marks of this object, so that `rewind` can
            refuse a mark that another run has set, and to undo the changes of another run. None: `rewind` does not
            check this.
        read_only: do not take the lock of the writer. Methods that change the pool then raise `UserError`.

    Raises:
        UserError: the file is not a pool of this version, is damaged, contains (or may contain) tokens of another
            tokenizer, another process is writing to it, or ``settings.select`` is unknown. Methods raise it if the disk
            is full, or if they find that the file is damaged.
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
        self._counts: Counter[str] = Counter()  # content of the table ``counters`` while a write transaction is open
        # id of each task replaced in this transaction -> number of its evicted trajectories
        self._replaced: dict[str, int] = {}
        with ExitStack() as opened:
            if not read_only:
                RANKINGS.get(settings.select)  # raises for an unknown one
                opened.enter_context(schema.writer_lock(self.path))
            self._db = opened.enter_context(closing(schema.connect(self.path, read_only=read_only)))
            self._bind(tokenizer)
            self._opened = opened.pop_all()

    # --- methods that change trajectories and tasks ---------------------------------------------
    def observe(self, groups: Sequence[Group], step: int, *, temperature: float = 1.0) -> dict[str, float]:
        """Update the pool with the groups of ``step``: store successes, update solve rates and retire tasks.

        Only fresh members with a valid score count; a group without any changes nothing. The successes of a group are
        stored if its solve rate is strictly between ``min_rate`` and ``max_rate`` and `admission.refusal` does not
        refuse them. Of all groups, the newest ``keep_failures`` distinct failures of each task are stored as well,
        unless refused. A failure with the same tokens as a stored one replaces it. Trajectories and failures that are
        older than ``max_age`` versions at the next step are evicted. ``temperature`` is the sampling temperature of the
        groups. All changes are one transaction.

        Returns metrics under ``pool/``: what this call changed, evictions since the last call, and the new sizes.
        """
        settings, step = self.settings, int(step)
        seen: Counter[str] = Counter()
        with self._writing() as db:
            if settings.max_age is not None:
                # This step has already trained, so the next one that can learn from the pool is step + 1.
                oldest = step + 1 - settings.max_age
                rows = db.execute("SELECT id FROM trajectories WHERE version < ?", (oldest,)).fetchall()
                self._evict([key for (key,) in rows], "age")
                rows = db.execute("SELECT id FROM failures WHERE version < ?", (oldest,)).fetchall()
                self._remove_failures([key for (key,) in rows], "age")
            # If the run keeps none but the pool has some, those of a task are removed with its next group.
            failures_kept = settings.keep_failures > 0 or self._counts["failures"] > 0
            for group in groups:
                valid = group.valid_fresh
                if not valid:
                    continue
                successes = [t for t in valid if t.score.reaches(settings.success_threshold)]
                row, same = self._find_or_add(group.spec.task, step)
                if not same:
                    self._replace(row, group.spec.task)
                if row.outside:
                    row.outside = 0
                    self._counts["outside"] -= 1
                was_retired = row.retired
                row.attempts, row.successes, row.step = len(valid), len(successes), step
                row.streak = row.streak + 1 if len(successes) == len(valid) else 0
                row.retired = int(row.streak >= settings.retire_after)
                seen["newly_retired"] += row.retired > was_retired
                seen["unretired"] += row.retired < was_retired
                if settings.min_rate < len(successes) / len(valid) < settings.max_rate:
                    seen += self._admit(row, successes, step, float(temperature), None, admission.OWN)
                if failures_kept:
                    failures = [t for t in valid if not t.score.reaches(settings.success_threshold)]
                    stored = self._keep_failures(row.id, failures, step, float(temperature), None, admission.OWN)
                    seen["failures_stored"] += stored
                bucket_index.save(db, row)
            self._log_replaced()

            # Evictions since the last call, by cause. They are the difference of two counters in the database, because
            # other methods evict too, and because a rewind must restore the counts.
            evicted: Counter[str] = Counter()
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
                "pool/outside": self._counts["outside"],
                "pool/trajectories": self._counts["trajectories"],
                "pool/bytes": self._counts["bytes"],
            }
            if failures_kept:
                metrics["pool/failures"] = self._counts["failures"]
                metrics["pool/failure_bytes"] = self._counts["failure_bytes"]
                seen["failures_stored"] += 0  # so that it is reported if it is 0
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
        source: str = "import",
    ) -> bool:
        """Store a successful trajectory from another source, such as a demonstration or another run.

        Returns whether it was stored. It is not stored if its score is invalid or below ``success_threshold``, if
        `admission.refusal` refuses it, if the pool contains its tokens already, if the task is at capacity and
        ``select`` ranks it last, or if the pool contains a different task with the same id.

        Args:
            task: the task of the trajectory.
            trajectory: the trajectory, with the sampled token ids and log-probs.
            step: step of this run after which the trajectory is stored.
            temperature: temperature at which it was sampled.
            version: version from which its age counts; None = the trajectory's own. Must be given if another run
                sampled the trajectory, because its own version counts the updates of that run.
            attempts: number of members of the task's latest group elsewhere; used if this pool has no attempts of the
                task.
            successes: number of these members that succeeded.
            source: name of where the trajectory comes from, by which ``replay.source_limits`` limits its use.

        Raises:
            ValueError: the trajectory belongs to another task, or ``source`` is no valid name.
        """
        return self.add_all([Incoming(task, trajectory, step, temperature, version, attempts, successes, source)])[0]

    def add_all(self, incoming: Sequence[Incoming]) -> list[bool]:
        """Store each item as `add` does, but all in one transaction. Returns for each whether it was stored."""
        _check_incoming(incoming)
        with self._writing():
            return [self._add(each) for each in incoming]

    def add_failures(self, incoming: Sequence[Incoming]) -> list[bool]:
        """Store failures from another source in one transaction, and return for each whether it was stored.

        ``incoming`` is ordered newest first. A failure is not stored if its score is invalid or at least
        ``success_threshold``, if `admission.refusal` refuses it, if the pool contains a different task with the same
        id, if its task has a failure with the same tokens, or if it has ``keep_failures`` failures already. So no
        stored failure is replaced. The state of the task does not change.

        Raises:
            ValueError: a trajectory belongs to another task, or a source is no valid name.
        """
        _check_incoming(incoming)
        stored: list[bool] = []
        new: list[tuple[int, bytes, Incoming]] = []
        known: dict[int, set[bytes]] = {}  # id of each task -> token digests of its failures, those in ``new`` included
        with self._writing() as db:
            for each in incoming:
                stored.append(False)
                score = each.trajectory.score
                failed = score.valid and not score.reaches(self.settings.success_threshold)
                if not failed or admission.refusal(each.trajectory, float(each.temperature), self._limits):
                    continue
                row, same = self._find_or_add(each.task, int(each.step))
                if not same:
                    continue
                if row.id not in known:
                    found = db.execute("SELECT digest FROM failures WHERE task = ?", (row.id,))
                    known[row.id] = {digest for (digest,) in found}
                digest = codec.token_digest(each.trajectory)
                if digest not in known[row.id] and len(known[row.id]) < self.settings.keep_failures:
                    known[row.id].add(digest)
                    new.append((row.id, digest, each))
                    stored[-1] = True
            for number, digest, each in reversed(new):  # the newest last, because the order of the keys is that of age
                given = (int(each.step), float(each.temperature), each.version, each.source)
                self._insert_failure(number, digest, each.trajectory, *given)
        return stored

    def set_tasks(self, tasks: Iterable[Task]) -> None:
        """Restrict the pool to the training tasks of a run, which calls this when it starts.

        All other tasks are not drawn from now on, neither for replay nor as retired tasks, because they may be held-out
        tasks or those of another environment. They and their trajectories stay in the file, for runs that have these
        tasks. A task is drawn again after the next call with it in ``tasks``, or once `observe` gets a group of it.

        A task in the pool is replaced if the task in ``tasks`` with the same id has another prompt or payload. Its
        trajectories are then evicted and its state is reset.
        """
        ids: set[str] = set()
        with self._writing() as db:
            for task in tasks:
                ids.add(task.id)
                known = bucket_index.find(db, task.id)
                if known is not None:
                    row, same = self._find_or_add(task, known.step)
                    if not same:
                        self._replace(row, task)
                        bucket_index.save(db, row)
            self._log_replaced()
            states = db.execute("SELECT id, name, outside FROM tasks").fetchall()
            for number in [number for number, name, outside in states if (name not in ids) != outside]:
                row = bucket_index.get(db, number)
                row.outside = 1 - row.outside
                self._counts["outside"] += 1 if row.outside else -1
                bucket_index.save(db, row)
            first, lost = db.execute("SELECT min(name), sum(live) FROM tasks WHERE outside").fetchone()
        if lost:
            log.warning(
                "%s: %d of %d tasks (%s is one) are not training tasks of this run; their %d trajectories are not "
                "replayed",
                *(self.path, self._counts["outside"], len(states), first, lost),
            )

    def start_run(self, step: int = 0) -> None:
        """Shift steps and versions so that a run that starts at ``step`` counts ages on from those of earlier runs.

        The newest of what the pool contains then has the version ``step`` and so the age 0, and all others have lower
        versions. What earlier runs have sampled gets the source ``earlier``. A run calls this once, before it writes to
        the pool for the first time.
        """
        with self._writing() as db:
            newest = (
                "SELECT max(version) FROM trajectories UNION ALL SELECT max(version) FROM failures "
                "UNION ALL SELECT max(step) FROM tasks"
            )
            shift = max(value or 0 for (value,) in db.execute(newest)) - step
            if shift:
                db.execute("UPDATE trajectories SET version = version - ?, step = step - ?", (shift, shift))
                db.execute("UPDATE failures SET version = version - ?, step = step - ?", (shift, shift))
                db.execute("UPDATE tasks SET step = step - ?", (shift,))
            for table in ("trajectories", "failures"):
                relabel = f"UPDATE {table} SET source = ? WHERE source = ?"
                db.execute(relabel, (admission.EARLIER, admission.OWN))

    def used(self, keys: Sequence[int]) -> None:
        """Add 1 to the count of uses of each trajectory or failure. Keys no longer in the pool are ignored."""
        with self._writing() as db:
            for table in ("trajectories", "failures"):  # no key is in both
                db.executemany(f"UPDATE {table} SET uses = uses + 1 WHERE id = ?", [(int(key),) for key in keys])

    def evict(self, keys: Sequence[int], cause: str) -> None:
        """Evict trajectories and failures. Keys not in the pool are ignored.

        The metric ``pool/evicted/CAUSE`` counts the trajectories, and `stats` the failures.
        """
        with self._writing():
            self._evict(keys, cause)

    # --- methods that read tasks and trajectories -----------------------------------------------
    def buckets(self, without: Collection[str] = ()) -> dict[tuple[int, int], int]:
        """Return the number of tasks in each bucket: tasks with a stored trajectory that are not retired.

        A bucket (successes, attempts) contains the tasks whose latest fresh group had these numbers. Tasks that
        `set_tasks` has excluded are not counted. Empty buckets are left out.

        With ``without``, the names of sources, only tasks with a trajectory from another source are counted. This takes
        time in proportion to the number of tasks.
        """
        with self._reading() as db:
            sizes = bucket_index.sizes(db, without)
        sizes.pop(bucket_index.RETIRED, None)
        return {bucket_index.bucket_of(bucket): size for bucket, size in sizes.items() if size}

    def draw(
        self,
        bucket: tuple[int, int] | None,
        count: int,
        random: np.random.Generator,
        exclude: Collection[str] = (),
        without: Collection[str] = (),
    ) -> list[PoolTask]:
        """Draw up to ``count`` tasks of a bucket uniformly without replacement. Task ids in ``exclude`` are not drawn.

        With ``without``, only tasks that `buckets` counts with it are drawn. If ``bucket`` is None, retired tasks are
        drawn. A task whose data is damaged is logged and left out of the result; unless the pool is read-only, its
        trajectories are evicted too.
        """
        number = bucket_index.RETIRED if bucket is None else bucket_index.bucket_id(bucket)
        drawn: list[PoolTask] = []
        damaged: list[int] = []
        with self._reading() as db:
            for row in bucket_index.draw(db, number, count, random, exclude, without):
                found = db.execute("SELECT CAST(data AS BLOB) FROM bodies WHERE id = ?", (row.id,)).fetchone()
                try:
                    task = codec.decode_task(found[0] if found else b"")
                    if task.id != row.name:
                        raise codec.Damaged(f"it is another task ({task.id!r})")
                except codec.Damaged as error:
                    log.warning("%s: task %r is damaged (%s) and forgotten", self.path, row.name, error)
                    damaged.append(row.id)
                else:
                    drawn.append(PoolTask(task, row.attempts, row.successes))
        if damaged and not self.read_only:
            with self._writing() as db:
                # The row in ``tasks`` stays. `observe` stores the task in ``bodies`` again with the task's next group.
                for task_id in damaged:
                    self._evict(_keys_of(db, task_id), "damaged")
                    self._remove_failures(_keys_of(db, task_id, "failures"), "damaged")
                    db.execute("DELETE FROM bodies WHERE id = ?", (task_id,))
                    row = bucket_index.get(db, task_id)
                    row.retired = row.streak = 0
                    bucket_index.save(db, row)
        return drawn

    def stored(self, task_ids: Sequence[str]) -> dict[str, list[Stored]]:
        """Return the stored trajectories of each task, oldest first; an empty list for a task without any.

        A trajectory that is damaged, that this run cannot train on, or whose score is no success by the present
        ``success_threshold`` is logged and left out. Unless the pool is read-only, it is also evicted.
        """
        return self._read(task_ids, "trajectories", "blobs", Stored)

    def has_task(self, task: Task) -> bool:
        """Return whether the pool's task with this id has the same prompt and payload. False if it is damaged."""
        query = "SELECT CAST(data AS BLOB) FROM bodies WHERE id = (SELECT id FROM tasks WHERE name = ?)"
        with self._reading() as db:
            body = db.execute(query, (task.id,)).fetchone()
        try:
            return body is not None and codec.is_same_task(body[0], task)
        except codec.Damaged as error:
            log.warning("%s: task %r is damaged (%s)", self.path, task.id, error)
            return False

    def failures(self, task_ids: Sequence[str]) -> dict[str, list[StoredFailure]]:
        """Return the stored failures of each task, oldest first; an empty list for a task without any.

        A failure that is damaged, that this run cannot train on, or whose score is a success by the present
        ``success_threshold`` is treated as `stored` treats a damaged trajectory.
        """
        return self._read(task_ids, "failures", "failure_blobs", StoredFailure)

    def _read(
        self, task_ids: Sequence[str], table: str, blobs: str, kind: Callable[..., StoredKind]
    ) -> dict[str, list[StoredKind]]:
        found: dict[str, list[StoredKind]] = {name: [] for name in task_ids}
        faulty: dict[int, str] = {}
        query = (
            "SELECT t.id, t.entropy, t.version, t.temperature, t.step, t.uses, t.source, t.digest, "
            f"CAST(b.data AS BLOB) FROM {table} t LEFT JOIN {blobs} b USING (id) "
            "WHERE t.task = (SELECT id FROM tasks WHERE name = ?) ORDER BY abs(t.id)"
        )
        with self._reading() as db:
            for name, into in found.items():
                for key, *columns, digest, data in db.execute(query, (name,)):
                    try:
                        trajectory = integrity.decode_record(name, digest, data, columns, self._limits)
                        succeeded = trajectory.score.reaches(self.settings.success_threshold)
                        if key < 0 and succeeded:
                            raise Unfit("success", "it is no failure by the present success_threshold")
                        if key > 0 and not succeeded:
                            raise Unfit("no_success", "it is no success by the present success_threshold")
                        into.append(kind(key, trajectory, *columns))
                    except Unfit as error:
                        faulty[key] = error.cause
                        log.warning("%s: trajectory %d of task %r is left out (%s)", self.path, key, name, error)
        if faulty and not self.read_only:
            with self._writing():
                for key, cause in faulty.items():
                    self._evict([key], cause)
        return found

    def sources(self) -> dict[str, int]:
        """Return the number of stored trajectories from each source, by its name. Reads the row of every trajectory."""
        with self._reading() as db:
            return dict(db.execute("SELECT source, count(*) FROM trajectories GROUP BY source ORDER BY source"))

    def retired(self, task_ids: Sequence[str]) -> set[str]:
        """Return the ids in ``task_ids`` whose tasks are retired."""
        with self._reading() as db:
            query = "SELECT 1 FROM tasks WHERE name = ? AND retired"
            return {name for name in task_ids if db.execute(query, (name,)).fetchone()}

    def rates(self, task_ids: Sequence[str]) -> dict[str, float]:
        """Return the solve rate of each task's latest fresh group. Tasks without attempts are left out."""
        with self._reading() as db:
            query = "SELECT 1.0 * successes / attempts FROM tasks WHERE name = ? AND attempts > 0"
            return {name: row[0] for name in task_ids if (row := db.execute(query, (name,)).fetchone())}

    # --- marks ----------------------------------------------------------------------------------
    def mark(self) -> int:
        """Set a mark at the present state, to which `rewind` can return, and return its number.

        The mark is on disk when this method returns. No number is ever used for another mark.
        """
        with self._writing() as db:
            return marks.mark(db, self._run)

    def last_run(self) -> str | None:
        """Return the name of the run that set the latest mark; None if there is no mark or it has no name."""
        with self._reading() as db:
            return marks.last_owner(db)

    def has_mark(self, mark: int) -> bool:
        """Return whether `rewind` finds ``mark``: whether there is such a mark and it is of the run of this object."""
        with self._reading() as db:
            if self._run is not None:
                return marks.is_owner(db, mark, self._run)
            return db.execute("SELECT 1 FROM marks WHERE id = ?", (mark,)).fetchone() is not None

    def adopt_marks(self) -> bool:
        """Let `rewind` undo the changes of other runs since the first mark of the run of this object.

        For a copy of a file, which those runs do not use. Returns whether the run has set a mark in it.
        """
        assert self._run is not None
        with self._writing() as db:
            return marks.adopt(db, self._run)

    def rewind(self, mark: int) -> None:
        """Restore all tasks, trajectories and counts to their state at ``mark``, and delete later marks.

        ``mark`` itself remains, so that the pool can be rewound to it again.

        Raises:
            UserError: there is no such mark, another run has set it, or another run has set a later mark, so that its
                changes would be lost.
        """
        found = self.has_mark(mark)
        with self._writing() as db:
            if found and self._run is not None and (other := marks.other_owner(db, mark, self._run)):
                raise UserError(
                    f"another run ({other}) has used the experience pool {self.path} since, and going back would undo "
                    "that: resume with replay.path set to a copy of the file, or start a new run with it"
                )
            if not found or not marks.rewind(db, schema.TRACKED, mark):
                raise UserError(
                    f"the experience pool {self.path} has no mark {mark} of this run: it is not the pool of this "
                    "checkpoint, or went on without it; put its own pool back, or start a new run"
                )

    def forget(self, mark: int) -> None:
        """Delete all marks before ``mark``, and the old data that only a rewind to them would need."""
        with self._writing() as db:
            marks.forget(db, schema.TRACKED, mark)

    # --- methods for the whole file -------------------------------------------------------------
    def stats(self) -> dict[str, Any]:
        """Return a JSON-serialisable summary: sizes, tasks by bucket, evictions by cause, versions and marks.

        The summary comes from counters, so its cost does not grow with the pool.
        """
        with self._reading() as db:
            counts = Counter(dict(db.execute("SELECT name, value FROM counters")))
            sizes = bucket_index.sizes(db)
            versions = "SELECT (SELECT min(version) FROM trajectories), (SELECT max(version) FROM trajectories)"
            oldest, newest = db.execute(versions).fetchone()
            kept = [row[0] for row in db.execute("SELECT id FROM marks ORDER BY id")]
        retired = sizes.pop(bucket_index.RETIRED, 0)
        buckets = {bucket_index.bucket_of(bucket): size for bucket, size in sizes.items() if size}
        evicted, lost = (
            {name.removeprefix(prefix): count for name, count in sorted(counts.items()) if name.startswith(prefix)}
            for prefix in ("evicted/", "failures_evicted/")
        )
        return {
            "path": str(self.path),
            "file_bytes": self.path.stat().st_size,
            "tasks": counts["tasks"],
            "eligible": sum(buckets.values()),
            "retired": retired,
            "outside": counts["outside"],
            "trajectories": counts["trajectories"],
            "bytes": counts["bytes"],
            "oldest_version": oldest,
            "newest_version": newest,
            "buckets": {f"{successes}/{attempts}": size for (successes, attempts), size in buckets.items()},
            "evicted": evicted,
            "failures": counts["failures"],
            "failure_bytes": counts["failure_bytes"],
            "failures_evicted": lost,
            "marks": kept,
        }

    def verify(self, *, records: bool = True, done: Callable[[], object] = lambda: None) -> list[str]:
        """Check the whole file for damage, and return a line for each fault.

        If ``records`` is true, every task and trajectory is decoded and checked as well, and ``done`` is called after
        each trajectory.
        """
        with self._reading() as db:
            return list(integrity.faults(db, records=records, done=done))

    def close(self) -> None:
        """Close the file and release the lock of the writer. No data is lost if a process ends without this call."""
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
        """Run the block as one write transaction.

        ``self._counts`` is read from the database at its start, and the changed counts are written at its end.
        """
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
        """Check that the pool's tokenizer is that of the run. If the pool has none, store that of the run in it."""
        if tokenizer is None:
            return
        with self._reading() as db:
            found = db.execute("SELECT value FROM meta WHERE key = 'tokenizer'").fetchone()
            query = "SELECT EXISTS (SELECT 1 FROM trajectories) OR EXISTS (SELECT 1 FROM failures)"
            (holds,) = db.execute(query).fetchone()
        if found is None and holds and not self.settings.trust_tokenizer:
            raise UserError(
                f"the experience pool {self.path} does not say which tokenizer its token ids are of; if it is this "
                "one, set replay.trust_tokenizer = true, else give replay.path another file"
            )
        if found is not None and found[0] != tokenizer:
            raise UserError(
                f"the experience pool {self.path} holds tokens of another tokenizer ({found[0]}, not {tokenizer}), "
                "chat template or context.template_options; give replay.path another file"
            )
        if found is None and not self.read_only:
            with self._writing() as db:
                db.execute("INSERT INTO meta VALUES ('tokenizer', ?)", (tokenizer,))

    # --- parts of a write transaction; call them only inside `_writing` ---------------------------
    def _find_or_add(self, task: Task, step: int) -> tuple[TaskRow, bool]:
        """Return the row with the id of ``task``, and whether the pool's task with this id is the same task.

        Tasks are the same if their prompts and payloads are. If the pool has no task with this id, or its data is
        missing, the given task is written and counts as the same. A task whose data is damaged counts as another one.
        """
        row = bucket_index.find(self._db, task.id)
        if row is None:
            number = self._counts["next_task"]
            self._counts.update(next_task=1, tasks=1)
            self._db.execute(
                "INSERT INTO tasks VALUES (?, ?, 0, 0, ?, 0, 0, 0, 0, NULL, NULL)", (number, task.id, step)
            )
            row = TaskRow(number, task.id, 0, 0, step, 0, 0, 0, 0, None, None)
        body = self._db.execute("SELECT CAST(data AS BLOB) FROM bodies WHERE id = ?", (row.id,)).fetchone()
        try:
            if body is not None:
                return row, codec.is_same_task(body[0], task)
        except codec.Damaged:
            return row, False  # it cannot be known whether the trajectories are of the given task
        # INSERT OR REPLACE would delete the old row without firing the trigger that saves it for a rewind (`marks`).
        write = "INSERT INTO bodies VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET data = excluded.data"
        self._db.execute(write, (row.id, codec.encode_task(task)))
        return row, True

    def _replace(self, row: TaskRow, task: Task) -> None:
        """Replace the task of ``row`` by ``task``, a different task with the same id.

        Evicts trajectories and failures of the old task, and resets its state in ``row``. The caller must save ``row``.
        """
        self._db.execute("UPDATE bodies SET data = ? WHERE id = ?", (codec.encode_task(task), row.id))
        removed = self._remove(_keys_of(self._db, row.id), "other_task")
        self._remove_failures(_keys_of(self._db, row.id, "failures"), "other_task")
        row.live -= removed
        row.attempts = row.successes = row.streak = row.retired = 0
        self._replaced[row.name] = removed

    def _log_replaced(self) -> None:
        if self._replaced:
            log.warning(
                "%s: %d tasks (%s is the first) differ, in prompt or payload, from those known under their ids, or the "
                "known ones are damaged; the %d trajectories of the old ones are evicted",
                *(self.path, len(self._replaced), next(iter(self._replaced)), sum(self._replaced.values())),
            )

    def _add(self, incoming: Incoming) -> bool:
        """Store a trajectory from another source, and return whether it was stored.

        The docstring of `add` lists the reasons for which a trajectory is not stored. A different task under
        the same id is replaced if it has neither trajectories nor attempts; otherwise the trajectory is not stored.
        """
        trajectory, temperature, score = incoming.trajectory, float(incoming.temperature), incoming.trajectory.score
        succeeded = score.reaches(self.settings.success_threshold)
        if not succeeded or admission.refusal(trajectory, temperature, self._limits):
            return False
        row, same = self._find_or_add(incoming.task, int(incoming.step))
        if not same:
            if row.live or row.attempts:
                return False
            self._replace(row, incoming.task)
        if row.attempts == 0:
            row.attempts, row.successes = incoming.attempts, incoming.successes
        seen = self._admit(row, [trajectory], int(incoming.step), temperature, incoming.version, incoming.source)
        bucket_index.save(self._db, row)
        return bool(seen["admitted"])

    def _admit(
        self,
        row: TaskRow,
        trajectories: Sequence[Trajectory],
        step: int,
        temperature: float,
        version: int | None,
        source: str,
    ) -> Counter[str]:
        """Store those of the trajectories that are admitted, and evict the trajectories above the task's capacity.

        Returns how many were ``admitted``, and how many were refused as ``refused/REASON``. ``version`` is the version
        from which their age counts; None = each trajectory's own. The caller must save ``row``.
        """
        query = "SELECT id, entropy, score, length, digest FROM trajectories WHERE task = ?"
        stored = [Candidate(*each) for each in self._db.execute(query, (row.id,))]
        known = {candidate.digest for candidate in stored}
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
            # Larger than the keys of all stored trajectories, because new trajectories rank as newer.
            order = self._counts["next_key"] + len(new) + 1
            new.append((_candidate(order, trajectory, digest), trajectory))
        candidates = [*stored, *(candidate for candidate, _ in new)]
        surplus = {candidate.order for candidate in admission.surplus(candidates, self.settings)}
        row.live -= self._remove([each.order for each in stored if each.order in surplus], "capacity")
        for candidate, trajectory in new:
            if candidate.order in surplus:
                seen["refused/full"] += 1
                continue
            data = codec.encode_trajectory(trajectory)
            self._counts.update(next_key=1, trajectories=1, bytes=len(data))
            key, since = self._counts["next_key"], int(trajectory.version if version is None else version)
            self._insert("trajectories", row.id, replace(candidate, order=key), since, temperature, step, data, source)
            self._db.execute("INSERT INTO blobs VALUES (?, ?)", (key, data))
            row.live += 1
            seen["admitted"] += 1
        return seen

    def _insert(
        self,
        table: str,
        task: int,
        candidate: Candidate,
        version: int,
        temperature: float,
        step: int,
        data: bytes,
        source: str,
    ) -> None:
        """Add a row with the key ``candidate.order`` to ``table``. ``data`` is the encoded trajectory."""
        columns = {
            "id": candidate.order,
            "task": task,
            "digest": candidate.digest,
            "entropy": candidate.entropy,
            "score": candidate.score,
            "length": candidate.length,
            "version": version,
            "temperature": temperature,
            "step": step,
            "uses": 0,
            "bytes": len(data),
            "source": source,
        }
        names = ", ".join(columns)
        values = ", ".join(f":{name}" for name in columns)
        self._db.execute(f"INSERT INTO {table} ({names}) VALUES ({values})", columns)

    def _keep_failures(
        self,
        task: int,
        failures: Sequence[Trajectory],
        step: int,
        temperature: float,
        version: int | None,
        source: str,
    ) -> int:
        """Store the newest ``keep_failures`` of a task's failures, and return how many of ``failures`` were stored.

        ``failures`` are newer than the stored ones, and ordered oldest first. Of those with equal tokens, the newest
        counts. The arguments are those of `_admit`.
        """
        limit = self.settings.keep_failures
        new: dict[bytes, Trajectory] = {}  # by token digest, newest first
        for trajectory in reversed(failures):
            if len(new) < limit and admission.refusal(trajectory, temperature, self._limits) is None:
                new.setdefault(codec.token_digest(trajectory), trajectory)
        query = "SELECT id, digest FROM failures WHERE task = ? ORDER BY id"  # newest first
        stored = self._db.execute(query, (task,)).fetchall()
        others = [key for key, digest in stored if digest not in new]
        self._remove_failures([key for key, digest in stored if digest in new], "repeated")
        self._remove_failures(others[limit - len(new) :], "newer")
        for digest, trajectory in reversed(new.items()):
            self._insert_failure(task, digest, trajectory, step, temperature, version, source)
        return len(new)

    def _insert_failure(
        self,
        task: int,
        digest: bytes,
        trajectory: Trajectory,
        step: int,
        temperature: float,
        version: int | None,
        source: str,
    ) -> None:
        data = codec.encode_trajectory(trajectory)
        self._counts.update(next_failure=1, failures=1, failure_bytes=len(data))
        key, since = -self._counts["next_failure"], int(trajectory.version if version is None else version)
        self._insert("failures", task, _candidate(key, trajectory, digest), since, temperature, step, data, source)
        self._db.execute("INSERT INTO failure_blobs VALUES (?, ?)", (key, data))

    def _remove_failures(self, keys: Sequence[int], cause: str) -> None:
        for key in set(keys):
            found = self._db.execute("SELECT bytes FROM failures WHERE id = ?", (key,)).fetchone()
            if found is not None:
                self._db.execute("DELETE FROM failures WHERE id = ?", (key,))
                self._db.execute("DELETE FROM failure_blobs WHERE id = ?", (key,))
                self._counts.update({"failures": -1, "failure_bytes": -found[0], f"failures_evicted/{cause}": 1})

    def _evict(self, keys: Sequence[int], cause: str) -> None:
        self._remove_failures([int(key) for key in keys if key < 0], cause)
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
        """Delete trajectories of one task, and return how many were deleted.

        The caller must subtract that number from ``live`` in the task's row and save the row.
        """
        distinct = sorted(set(keys))
        for key in distinct:
            (size,) = self._db.execute("SELECT bytes FROM trajectories WHERE id = ?", (key,)).fetchone()
            self._db.execute("DELETE FROM trajectories WHERE id = ?", (key,))
            self._db.execute("DELETE FROM blobs WHERE id = ?", (key,))
            self._counts.update({"trajectories": -1, "bytes": -size, f"evicted/{cause}": 1})
        return len(distinct)


def _candidate(order: int, trajectory: Trajectory, digest: bytes) -> Candidate:
    entropy = admission.entropy(trajectory)
    return Candidate(order, entropy, trajectory.score.value, trajectory.sampled_tokens, digest)


def _check_incoming(incoming: Sequence[Incoming]) -> None:
    """Raise `ValueError` if a trajectory belongs to another task, or a source is no valid name."""
    for each in incoming:
        if (theirs := each.trajectory.task_id) != each.task.id:
            raise ValueError(f"a trajectory of task {theirs!r} is not one of task {each.task.id!r}")
        if not admission.SOURCE_NAME.fullmatch(each.source):
            raise ValueError(f"{each.source!r} is no name of a source: up to 32 letters, digits, - and _")


def _keys_of(db: sqlite3.Connection, task: int, table: str = "trajectories") -> list[int]:
    return [row[0] for row in db.execute(f"SELECT id FROM {table} WHERE task = ?", (task,))]
