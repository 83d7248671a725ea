"""Steps per second of the environments that come with Glean RL, and what the worker pool adds to a step.

    python benchmarks/environments.py [--seconds 5] [--workers 2]

Each row plays whole groups of episodes (8 of a task) with random valid commands, in this process and in the
pool. "new" counts steps that nobody played before, "again" the same episodes once more: engines remember.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import BUILT_IN, load_taskset
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import UserError


@dataclass(frozen=True)
class Nothing(Taskset):
    """Environments that do nothing at once: what is left is the pool."""

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        return [Task(f"{split}-{i}") for i in range(count)]

    def environment(self, task: Task) -> NothingEpisode:
        return NothingEpisode()


class NothingEpisode(Environment):
    seen = Observation(({"role": "user", "content": "You see nothing special. " * 10},), score=Score(0.0))

    async def reset(self) -> Observation:
        return self.seen

    async def step(self, message: Message) -> Observation:
        return self.seen


Policy = Callable[[Observation, random.Random], str]


def wander(observation: Observation, draw: random.Random) -> str:
    """A random command of those that a TextWorld or ALFWorld observation offers."""
    offered = (
        observation.info.get("admissible_commands") or observation.messages[-1]["content"].rpartition("You can: ")[2]
    )
    commands = offered if not isinstance(offered, str) else offered.rstrip(".").split(", ")
    return draw.choice(list(commands))


async def episodes(pool: EnvironmentPool, tasks: Sequence[Task], policy: Policy, turns: int, group: int) -> int:
    """Play ``group`` episodes of each task at once; the same draws every time."""

    async def one(task: Task, number: int) -> int:
        draw = random.Random(f"{task.id}-{number}")
        environment = pool.environment(task)
        observation = await environment.reset()
        taken = 0
        while taken < turns and not observation.done:
            observation = await environment.step({"role": "assistant", "content": policy(observation, draw)})
            taken += 1
        await environment.close()
        return taken

    return sum(await asyncio.gather(*(one(task, number) for task in tasks for number in range(group))))


async def rates(taskset: Taskset, tasks: Sequence[Task], policy: Policy, workers: int, seconds: float) -> list[float]:
    """Steps per second the first time, then again."""
    async with EnvironmentPool(taskset, workers=workers) as pool:
        await episodes(pool, tasks[:workers], policy, turns=1, group=1)  # each worker imports what it needs
        found, until = [], len(tasks)
        for _ in range(2):
            steps, spent = 0, 0.0
            for at in range(workers, until, 8):
                started = time.perf_counter()
                steps += await episodes(pool, tasks[at : at + 8], policy, turns=12, group=8)
                spent += time.perf_counter() - started
                if spent > seconds and not found:
                    until = at + 8
                    break
            found.append(steps / spent)
        return found


async def overhead(workers: int, live: int, steps: int = 4000) -> float:
    """Seconds a step of an environment that does nothing, with ``live`` episodes at once; the median of 5."""
    found = []
    async with EnvironmentPool(Nothing(), workers=workers) as pool:
        for _ in range(6):
            tasks = [Task(f"t{i}") for i in range(live)]
            started = time.perf_counter()
            taken = await episodes(pool, tasks, lambda *_: "look around", turns=steps // live, group=1)
            found.append((time.perf_counter() - started) / taken)
    return statistics.median(found[1:])


def known(name: str, options: dict[str, Any], count: int) -> tuple[Taskset, Sequence[Task]] | None:
    try:
        taskset = load_taskset(EnvironmentSettings(name=name, options=options), seed=0)
        tasks = taskset.tasks("train", count)
    except UserError as error:
        print(f"{name}: {error}")
        return None
    taskset.prepare(tasks)
    return taskset, tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="per figure")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=["pool", *BUILT_IN])
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)

    if arguments.only in (None, "pool"):
        print(f"{'pool: what it adds to a step':<40}{'us':>8}")
        for workers, live in ((0, 1), (1, 1), (1, 8), (1, 64), (arguments.workers, 64)):
            print(
                f"{f'  {workers} workers, {live} live episodes':<40}{asyncio.run(overhead(workers, live)) * 1e6:>8.0f}"
            )
    rows = [
        ("textworld", "textworld, coin_collector", {}, wander),
        ("textworld", "textworld, custom", {"game": "custom", "rooms": 4}, wander),
        ("reasoning_gym", "reasoning_gym, spell_backward", {"task": "spell_backward"}, lambda *_: "<answer>x</answer>"),
    ]
    print(f"\n{'steps/s':<40}{'new':>10}{'again':>10}{'new, pool':>12}{'again, pool':>13}")
    for name, title, options, policy in rows:
        if arguments.only not in (None, name) or not (found := known(name, options, 64)):
            continue
        here = asyncio.run(rates(*found, policy, 0, arguments.seconds))
        there = asyncio.run(rates(*found, policy, arguments.workers, arguments.seconds))
        print(f"{title:<40}{here[0]:>10.0f}{here[1]:>10.0f}{there[0]:>12.0f}{there[1]:>13.0f}")


if __name__ == "__main__":
    main()
