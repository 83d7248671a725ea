"""Every change of a pool: task states, admission and eviction. The caller holds the transaction."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool import admission, bucket_index, codec
from gleanrl.experience.pool.bucket_index import TaskRow
from gleanrl.types import Task, Trajectory

Sampled = tuple[int, float, int]
"""Version, temperature and step of a trajectory."""


class PoolWriter:
    """Writes to the tables of one pool."""

    def __init__(self, db: sqlite3.Connection, settings: ReplaySettings, limits: admission.Limits) -> None:
        self.db, self.settings, self.limits = db, settings, limits
        self.counts: Counter[str] = Counter()  # the table of counters, while a change is under way
        self.replaced: dict[str, int] = {}  # tasks that became others in this change, and trajectories that went

    @contextmanager
    def change(self) -> Iterator[None]:
        """Around every use of the methods below: counters are read once and written once."""
        before = dict(self.db.execute("SELECT name, value FROM counters"))
        self.counts, self.replaced = Counter(before), {}
        yield
        for name, value in self.counts.items():
            if name not in before:
                self.db.execute("INSERT INTO counters (name, value) VALUES (?, ?)", (name, value))
            elif value != before[name]:
                self.db.execute("UPDATE counters SET value = ? WHERE name = ?", (value, name))

    def observe(self, task: Task, valid: Sequence[Trajectory], step: int, temperature: float) -> Counter[str]:
        """Task state, retirement and admission from the valid fresh members of one group; what happened, counted."""
        successes = [t for t in valid if t.score.value >= self.settings.success_threshold]
        row, same = self.row(task, step)
        if not same:
            self.replace(row, task)
        row.attempts, row.successes, row.step = len(valid), len(successes), step
        row.streak = row.streak + 1 if len(successes) == len(valid) else 0
        was, row.retired = row.retired, int(row.streak >= self.settings.retire_after)
        seen = Counter(newly_retired=int(row.retired > was), unretired=int(row.retired < was))
        if admission.is_admitted(len(successes) / len(valid), self.settings):
            seen += self.admit(row, successes, step, temperature, None)
        bucket_index.save(self.db, row)
        return seen

    def add(
        self,
        task: Task,
        trajectory: Trajectory,
        step: int,
        temperature: float,
        version: int | None,
        known: tuple[int, int],
    ) -> bool:
        """One success from elsewhere; ``known`` (attempts, successes) counts for a task never tried here.

        Not of another problem than the pool knows under the task's id.
        """
        score = trajectory.score
        succeeded = score.valid and score.value >= self.settings.success_threshold
        if not succeeded or self._refusal(trajectory, temperature):
            return False
        row, same = self.row(task, step)
        if not same and (row.live or row.attempts):
            return False
        if not same:
            self.replace(row, task)
        if row.attempts == 0:
            row.attempts, row.successes = known
        seen = self.admit(row, [trajectory], step, temperature, version)
        bucket_index.save(self.db, row)
        return bool(seen["admitted"])

    def row(self, task: Task, step: int) -> tuple[TaskRow, bool]:
        """What is known under a task's id, and whether that is this very task; a new one becomes known now."""
        row = bucket_index.find(self.db, task.id)
        if row is None:
            number = self._count("next_task") - 1
            self.db.execute("INSERT INTO tasks VALUES (?, ?, 0, 0, ?, 0, 0, 0, NULL, NULL)", (number, task.id, step))
            self._count("tasks")
            row = TaskRow(number, task.id, 0, 0, step, 0, 0, 0, None, None)
        body = self.db.execute("SELECT CAST(data AS BLOB) FROM bodies WHERE id = ?", (row.id,)).fetchone()
        if body is None:
            self.db.execute("INSERT INTO bodies VALUES (?, ?)", (row.id, codec.encode_task(task)))
            return row, True
        try:
            return row, codec.holds_task(body[0], task)
        except codec.Damaged:  # its trajectories are checked by themselves
            self._set_body(row, task)
            return row, True

    def replace(self, row: TaskRow, task: Task) -> int:
        """Another problem has this id now: nothing that is known of the old one holds, and its trajectories go.

        Changes ``row``, which the caller saves; how many trajectories there were.
        """
        self._set_body(row, task)
        gone = self._remove(self._keys(row.id), "other_task")
        row.live -= gone
        row.attempts = row.successes = row.streak = row.retired = 0
        self.replaced[row.name] = gone
        return gone

    def update(self, tasks: Iterable[Task]) -> None:
        """`replace` those of which the pool knows another problem under the same id; the others stay as they are."""
        for task in tasks:
            if (known := bucket_index.find(self.db, task.id)) is not None:
                row, same = self.row(task, known.step)
                if not same:
                    self.replace(row, task)
                    bucket_index.save(self.db, row)

    def _set_body(self, row: TaskRow, task: Task) -> None:
        self.db.execute("UPDATE bodies SET data = ? WHERE id = ?", (codec.encode_task(task), row.id))

    def _keys(self, task: int) -> list[int]:
        return [row[0] for row in self.db.execute("SELECT id FROM trajectories WHERE task = ?", (task,))]

    def admit(
        self,
        row: TaskRow,
        trajectories: Sequence[Trajectory],
        step: int,
        temperature: float,
        version: int | None,
    ) -> Counter[str]:
        """Store what may be stored, and make room; changes ``row.live``, which the caller saves."""
        stored = self.db.execute("SELECT id, entropy, digest FROM trajectories WHERE task = ?", (row.id,)).fetchall()
        known = {digest for _, _, digest in stored}
        candidates = [admission.Candidate(*each) for each in stored]
        order = self.counts["next_key"]
        new: dict[int, tuple[admission.Candidate, Trajectory]] = {}
        seen: Counter[str] = Counter()
        for trajectory in trajectories:
            reason = self._refusal(trajectory, temperature)
            digest = codec.token_digest(trajectory)
            if reason is None and digest in known:
                reason = "duplicate"
            if reason is not None:
                seen[f"refused/{reason}"] += 1
                continue
            known.add(digest)
            order += 1
            new[order] = (admission.Candidate(order, admission.entropy(trajectory), digest), trajectory)
        candidates += [candidate for candidate, _ in new.values()]
        given_up = {candidate.order for candidate in admission.surplus(candidates, self.settings)}
        row.live -= self._remove([key for key in given_up if key not in new], "capacity")
        kept = [
            (candidate, trajectory, (int(trajectory.version if version is None else version), temperature, step))
            for order, (candidate, trajectory) in new.items()
            if order not in given_up
        ]
        self._insert(row, kept)
        seen.update({"admitted": len(kept), "refused/full": len(new) - len(kept)})
        return +seen

    def _refusal(self, trajectory: Trajectory, temperature: float) -> str | None:
        if admission.altered(trajectory, temperature):
            return "altered"
        return "unfit" if admission.unfit(trajectory, self.limits) else None

    def _insert(self, row: TaskRow, new: Sequence[tuple[admission.Candidate, Trajectory, Sampled]]) -> None:
        described, blobs = [], []
        for candidate, trajectory, sampled in new:
            key, data = self._count("next_key"), codec.encode_trajectory(trajectory)
            described.append((key, row.id, candidate.digest, candidate.entropy, *sampled, 0, len(data)))
            blobs.append((key, data))
            self._count("trajectories")
            self._count("bytes", len(data))
        self.db.executemany("INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", described)
        self.db.executemany("INSERT INTO blobs VALUES (?, ?)", blobs)
        row.live += len(new)

    def evict_older(self, version: int) -> None:
        old = self.db.execute("SELECT id FROM trajectories WHERE version < ?", (version,)).fetchall()
        self.evict([row[0] for row in old], "age")

    def evict(self, keys: Sequence[int], cause: str) -> None:
        by_task: dict[int, list[int]] = {}
        for key in keys:
            if found := self.db.execute("SELECT task FROM trajectories WHERE id = ?", (int(key),)).fetchone():
                by_task.setdefault(found[0], []).append(int(key))
        for task, own in by_task.items():
            row = bucket_index.get(self.db, task)
            row.live -= self._remove(own, cause)
            bucket_index.save(self.db, row)

    def _remove(self, keys: Sequence[int], cause: str) -> int:
        """Delete trajectories of a task whose row the caller saves; how many there were."""
        removed = size = 0
        for key in sorted(set(keys)):
            found = self.db.execute("SELECT bytes FROM trajectories WHERE id = ?", (key,)).fetchone()
            self.db.execute("DELETE FROM trajectories WHERE id = ?", (key,))
            self.db.execute("DELETE FROM blobs WHERE id = ?", (key,))
            removed, size = removed + 1, size + found[0]
        if removed:
            self._count("trajectories", -removed)
            self._count("bytes", -size)
            self._count(f"evicted/{cause}", removed)
        return removed

    def _newly_evicted(self) -> Counter[str]:
        """What was evicted since this was asked last, by cause; a rewind takes it back too."""
        newly: Counter[str] = Counter()
        for name in [name for name in self.counts if name.startswith("evicted/")]:
            cause, count = name.removeprefix("evicted/"), self.counts[name]
            newly[cause] = count - self.counts[f"reported/{cause}"]
            self.counts[f"reported/{cause}"] = count
        return +newly

    def metrics(self, seen: Counter[str]) -> dict[str, float]:
        """Metrics ``pool/...`` after a change: counts ``seen`` in it, evictions since the last call, and sizes now."""
        counts, evicted = self.counts, self._newly_evicted()
        sizes = dict(self.db.execute("SELECT id, size FROM buckets ORDER BY id"))
        buckets = {bucket_index.bucket_of(bucket): size for bucket, size in sizes.items() if bucket >= 0}
        values: dict[str, float] = {
            "pool/tasks": counts["tasks"],
            "pool/eligible": sum(buckets.values()),
            "pool/retired": sizes.get(bucket_index.RETIRED, 0),
            "pool/trajectories": counts["trajectories"],
            "pool/bytes": counts["bytes"],
        }
        for name in ("admitted", "newly_retired", "unretired"):
            values[f"pool/{name}"] = seen[name]
        values |= {f"pool/{name}": count for name, count in seen.items()}
        for cause in ("capacity", "age", *evicted):
            values[f"pool/evicted/{cause}"] = evicted[cause]
        values |= {f"pool/bucket/{s}_of_{n}": size for (s, n), size in buckets.items()}
        return {name: float(value) for name, value in values.items()}

    def forget_task(self, task: int) -> None:
        """It is not drawn any more; the next fresh group on it makes it known again."""
        self.evict(self._keys(task), "damaged")
        self.db.execute("DELETE FROM bodies WHERE id = ?", (task,))
        row = bucket_index.get(self.db, task)
        row.retired = row.streak = 0
        bucket_index.save(self.db, row)

    def _count(self, name: str, by: int = 1) -> int:
        """Add to a counter; what it is then."""
        self.counts[name] += by
        return self.counts[name]
