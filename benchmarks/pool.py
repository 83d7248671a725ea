"""Measures how the costs of the experience pool grow with its size: milliseconds per call, file size and memory.

    python benchmarks/pool.py [--tasks 100000] [--tokens 1000] [--repeats 9] [--folder .]

The pool is filled to 1,000, 10,000, ... tasks up to ``--tasks``. Each task has one stored trajectory of ``--tokens``
tokens, of which three quarters are context, and a success rate from 1/8 to 7/8. At each size, these calls are measured:

    observe   store 64 fresh groups of 8, half of them on known tasks, with 4 successes each: encode 256 trajectories,
              update task states, admit, and flush to disk, with a mark to which the pool can be rewound
    plan      compute bucket sizes, and draw 32 tasks over the buckets
    stored    read and decode the trajectories of these 32 tasks
    used      count their uses
    mark      make a mark
    rewind    undo everything since the first mark

The median over the repeats is printed, in wall-clock time, or with ``--clock cpu`` in CPU time, which does not depend
on the other load of the machine and does not include waiting for the disk. Memory is the peak of the process so far.
A million tasks need about 3 GB in ``--folder`` and ten minutes to fill. The file is deleted at the end.
"""

from __future__ import annotations

import argparse
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.experience.pool import admission, bucket_index, codec
from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.types import Group, GroupSpec, Score, StopReason, Task, Trajectory, Turn

GROUPS, MEMBERS, SUCCESSES, DRAWN = 64, 8, 4, 32
TURNS, VOCABULARY = 5, 50_000
ROUND = 2_000  # number of tasks that are written in one transaction when the pool is filled
COLUMNS = ("observe", "plan", "stored", "used", "mark", "rewind")


class Episodes:
    """Makes trajectories of equal length. Their random arrays are drawn in advance, so that this is not measured."""

    def __init__(self, tokens: int, random: np.random.Generator) -> None:
        self.random = random
        self.context, self.sampled = tokens * 3 // (4 * TURNS), tokens // (4 * TURNS)
        self._ranks = np.minimum(random.zipf(1.3, 1_000_000), VOCABULARY - 1).astype(np.int32)
        sure = random.random(1_000_000) < 0.6
        chances = np.where(sure, 1 - 1e-3 * random.random(sure.size), random.uniform(0.01, 1.0, sure.size))
        self._logprobs = np.log(chances).astype(np.float32)

    def one(self, name: str, score: float, number: int = 0) -> Trajectory:
        turns: list[Turn] = []
        starts = self.random.integers(0, 900_000, (TURNS, 3))
        for a, b, c in starts.tolist():
            seen, sampled = self._ranks[a : a + self.context], self._ranks[b : b + self.sampled]
            turns.append(Turn({"role": "user", "content": "You are in the middle of a room."}, seen))
            logprobs = self._logprobs[c : c + self.sampled]
            turns.append(Turn({"role": "assistant", "content": "go to fridge 1"}, sampled, logprobs, number))
        return Trajectory(f"{name}/{number}", name, (tuple(turns),), Score(score), StopReason.DONE, {"turns": TURNS})

    def group(self, name: str) -> Group:
        members = tuple(self.one(name, float(i < SUCCESSES), i) for i in range(MEMBERS))
        return Group(GroupSpec(task(name), MEMBERS), members, 0)


def task(name: str) -> Task:
    return Task(name, ({"role": "user", "content": "Put a clean mug on the coffee machine."},), {"seed": name})


def fill(pool: ExperiencePool, start: int, stop: int, episodes: Episodes) -> None:
    """Add tasks and trajectories to the pool by writing rows to its tables directly, for speed.

    The rows are the same as those that `ExperiencePool.observe` would write.
    """
    db = pool._db
    sizes = dict(db.execute("SELECT id, size FROM buckets"))
    counts = dict(db.execute("SELECT name, value FROM counters"))
    key = counts.get("next_key", 0)
    db.execute("PRAGMA synchronous = OFF")
    for first in range(start, stop, ROUND):
        rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in ("tasks", "bodies", "trajectories", "blobs")}
        for index in range(first, min(first + ROUND, stop)):
            key, name, bucket = key + 1, f"task-{index}", bucket_index.bucket_id((1 + index % 7, MEMBERS))
            trajectory = episodes.one(name, 1.0)
            data, digest = codec.encode_trajectory(trajectory), codec.token_digest(trajectory)
            number, place = counts.get("next_task", 0), sizes.get(bucket, 0)
            rows["tasks"].append((number, name, MEMBERS, 1 + index % 7, 0, 0, 0, 1, 0, bucket, place))
            rows["bodies"].append((number, codec.encode_task(task(name))))
            entropy, score, length = admission.entropy(trajectory), trajectory.score.value, trajectory.sampled_tokens
            rows["trajectories"].append((key, number, digest, entropy, score, length, 0, 1.0, 0, 0, len(data), "own"))
            rows["blobs"].append((key, data))
            sizes[bucket] = place + 1
            for counter, by in (("next_task", 1), ("tasks", 1), ("trajectories", 1), ("bytes", len(data))):
                counts[counter] = counts.get(counter, 0) + by
        counts["next_key"] = key
        db.execute("BEGIN IMMEDIATE")
        for table, values in rows.items():
            db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values[0]))})", values)
        db.execute("DELETE FROM buckets")
        db.executemany("INSERT INTO buckets VALUES (?, ?)", sizes.items())
        db.execute("DELETE FROM counters")
        db.executemany("INSERT INTO counters (name, value) VALUES (?, ?)", counts.items())
        db.execute("COMMIT")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def measure(
    pool: ExperiencePool, size: int, episodes: Episodes, repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    spent: dict[str, list[float]] = {name: [] for name in COLUMNS}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = clock()
        result = call()
        spent[name].append(1000 * (clock() - start))
        return result

    start_mark = pool.mark()
    for repeat in range(repeats):
        known = [f"task-{index}" for index in episodes.random.choice(size, GROUPS // 2, replace=False)]
        new = [f"new-{size}-{repeat}-{index}" for index in range(GROUPS // 2)]
        groups = [episodes.group(name) for name in (*known, *new)]
        timed("observe", lambda groups=groups: pool.observe(groups, 1))
        drawn = timed("plan", lambda: list(plan(pool, episodes.random)))
        stored = timed("stored", lambda drawn=drawn: pool.stored(drawn))
        keys = [each.key for held in stored.values() for each in held]
        timed("used", lambda keys=keys: pool.used(keys))
        timed("mark", pool.mark)
    timed("rewind", lambda: pool.rewind(start_mark))
    return {name: statistics.median(values) for name, values in spent.items()}


def plan(pool: ExperiencePool, random: np.random.Generator) -> Iterator[str]:
    buckets = pool.buckets()
    weights = np.array([count * np.exp(-((s / n - 0.5) ** 2) / (2 * 0.125**2)) for (s, n), count in buckets.items()])
    for bucket, count in zip(buckets, random.multinomial(DRAWN, weights / weights.sum()).tolist(), strict=True):
        yield from (each.task.id for each in pool.draw(bucket, count, random))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the pool's file may grow meanwhile")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # on SIGTERM too, leave the `with` block, which deletes files
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    episodes = Episodes(args.tokens, np.random.default_rng(0))
    sizes = [10**power for power in range(3, 9) if 10**power < args.tasks] + [args.tasks]
    print(f"{f'{args.clock} ms, median of {args.repeats}':26}" + "".join(f"{name:>10}" for name in COLUMNS), end="")
    print(f"{'fill s':>10}{'file MB':>10}{'memory MB':>11}")
    with tempfile.TemporaryDirectory(prefix="pool-benchmark-", dir=args.folder) as folder:
        path, filled = Path(folder) / "pool.sqlite", 0
        with ExperiencePool(path, vocabulary=VOCABULARY) as pool:
            for size in sizes:
                start = time.perf_counter()
                fill(pool, filled, size, episodes)
                filled, took = size, time.perf_counter() - start
                figures = measure(pool, size, episodes, args.repeats, clock)
                pool.forget(pool.mark() + 1)  # drop all marks, because `fill` does not record how to undo its rows
                print(f"{f'{size:,} tasks x {args.tokens:,}':26}", end="")
                print("".join(f"{figures[name]:10.2f}" for name in COLUMNS), end="")
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                print(f"{took:10.1f}{path.stat().st_size / 1e6:10.1f}{memory:11.1f}", flush=True)
            if faults := pool.verify(records=False):
                raise SystemExit(f"the pool does not hold together: {faults[0]}")


if __name__ == "__main__":
    main()
