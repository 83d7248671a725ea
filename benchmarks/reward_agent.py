"""Compares the reward agent with 10,000 concurrent slow rewards in one process with a thread pool that is polled.

    python benchmarks/reward_agent.py [--requests 10000] [--latency 1 4] [--threads 256] [--poll 0.1] [--arms ...]

Each arm is a process of its own. A reward waits for a random time (uniform between the two values of ``--latency`` in
seconds, the same in each arm) and returns a number. A group of ``--group`` rewards is delivered when it is complete.

* ``bare``: only asyncio.sleep, the minimum that asyncio costs.
* ``agent``, ``journal``: `RewardAgent` with all requests in flight, without and with a journal on disk.
* ``pool``: ``--threads`` threads, and a loop that checks every ``--poll`` seconds which groups are complete.

Columns: seconds until the last group is delivered; the minimum with this concurrency (for ``pool``, the sum of all
latencies divided by the number of threads); rewards per second, and their share of the rate at that minimum;
microseconds of CPU time per reward; milliseconds from the last reward of a group until the group is delivered; and
megabytes of memory that the run added.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.rewards import Request, RewardAgent
from gleanrl.types import Task

ARMS = ("bare", "agent", "journal", "pool")
TEXT = "The quick brown fox jumps over the lazy dog. " * 20  # a response of about 200 tokens


class Clocked:
    """The latency of each request, and measurements of when the rewards of a group arrive and are delivered."""

    def __init__(self, args: argparse.Namespace) -> None:
        draws = random.Random(0)
        low, high = args.latency
        self.group = args.group
        self.seconds = [draws.uniform(low, high) for _ in range(args.requests)]
        self.groups = [range(i, min(i + args.group, args.requests)) for i in range(0, args.requests, args.group)]
        self.complete = [0.0] * len(self.groups)
        self.delays: list[float] = []

    def answered(self, number: int) -> float:
        self.complete[number // self.group] = time.perf_counter()  # the group's last reward overwrites earlier times
        return float(number)

    def delivered(self, index: int, values: Sequence[float]) -> None:
        self.delays.append(time.perf_counter() - self.complete[index])
        assert list(values) == list(self.groups[index])


async def bare(clocked: Clocked, args: argparse.Namespace) -> None:
    async def one(number: int) -> float:
        await asyncio.sleep(clocked.seconds[number])
        return clocked.answered(number)

    async def group(index: int) -> None:
        clocked.delivered(index, await asyncio.gather(*map(one, clocked.groups[index])))

    await asyncio.gather(*map(group, range(len(clocked.groups))))


async def agent(clocked: Clocked, args: argparse.Namespace, journal: Path | None = None) -> None:
    async def reward(request: Request) -> float:
        number = request.task.payload["numbers"][request.response]
        await asyncio.sleep(clocked.seconds[number])
        return clocked.answered(number)

    def groups() -> Any:
        for index, members in enumerate(clocked.groups):
            answers = {f"{number}: {TEXT}": number for number in members}
            task = Task(f"task-{index}", ({"role": "user", "content": TEXT},), {"numbers": answers})
            yield [(task, answer) for answer in answers]

    async with RewardAgent(reward, max_concurrency=args.requests, journal=journal) as rewards:
        async for index, scores in rewards.score_groups(groups()):
            clocked.delivered(index, [score.value for score in scores])


def pool(clocked: Clocked, args: argparse.Namespace) -> None:
    def one(number: int) -> float:
        time.sleep(clocked.seconds[number])
        return clocked.answered(number)

    with ThreadPoolExecutor(args.threads) as threads:
        waiting: dict[int, list[Future[float]]] = {
            index: [threads.submit(one, number) for number in members] for index, members in enumerate(clocked.groups)
        }
        while waiting:
            for index in [i for i, futures in waiting.items() if all(future.done() for future in futures)]:
                clocked.delivered(index, [future.result() for future in waiting.pop(index)])
            time.sleep(args.poll)


def measure(arm: str, args: argparse.Namespace) -> dict[str, float]:
    clocked = Clocked(args)
    RewardAgent(len)  # imports modules, which shall not be measured
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu, started = time.process_time(), time.perf_counter()
    if arm == "pool":
        pool(clocked, args)
    elif arm == "journal":
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(agent(clocked, args, Path(folder) / "rewards.sqlite"))
    else:
        asyncio.run((bare if arm == "bare" else agent)(clocked, args))
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    longest = max(clocked.seconds)
    least = max(longest, sum(clocked.seconds) / args.threads) if arm == "pool" else longest
    p50, p99 = np.percentile(clocked.delays, [50, 99]) * 1000
    return {"wall": wall, "least": least, "cpu": cpu / args.requests * 1e6, "p50": float(p50), "p99": float(p99),
            "memory": (after - before) / 1024}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--latency", type=float, nargs=2, default=(1.0, 4.0), metavar=("LOW", "HIGH"))
    parser.add_argument("--threads", type=int, default=256, help="of the pool")
    parser.add_argument("--poll", type=float, default=0.1, help="seconds between two looks of the pool's loop")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--measure", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    print(f"{args.requests} rewards of {args.latency[0]:g} to {args.latency[1]:g} s in groups of {args.group}")
    print(f"{'arm':<9}{'s':>9}{'minimum':>9}{'per s':>9}{'share':>8}{'CPU us':>9}{'p50 ms':>9}{'p99 ms':>9}{'MB':>8}")
    for arm in args.arms:
        command = [sys.executable, __file__, *sys.argv[1:], "--measure", arm]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"{arm:<9}{row['wall']:>9.2f}{row['least']:>9.2f}{args.requests / row['wall']:>9.0f}"
            f"{row['least'] / row['wall']:>8.1%}{row['cpu']:>9.0f}{row['p50']:>9.2f}{row['p99']:>9.2f}"
            f"{row['memory']:>8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
