"""Measures the steps per second of Glean RL's built-in environments, and the overhead of the worker pool per step.

    python benchmarks/environments.py [--seconds 5] [--workers 2]

Each row plays groups of 8 episodes per task with random valid commands, in this process and in worker processes. "new"
is the speed of episodes that are played for the first time. "again" is the speed when the same episodes are repeated,
which is higher because engines cache states.
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
    """A taskset of trivial environments, which return at once, so that only the overhead of the pool is measured."""

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
    """Choose a random command among those that an observation of TextWorld or ALFWorld lists."""
    offered = (
        observation.info.get("admissible_commands") or observation.messages[-1]["content"].rpartition("You can: ")[2]
    )
    commands = offered if not isinstance(offered, str) else offered.rstrip(".").split(", ")
    return draw.choice(list(commands))


async def episodes(pool: EnvironmentPool, tasks: Sequence[Task], policy: Policy, turns: int, group: int) -> int:
    """Play ``group`` episodes of each task concurrently, and return the number of steps.

    The random choices depend only on the task and the number of the episode, so each call plays the same episodes.
    """

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
    """Return the steps per second of new episodes and of the same episodes played again."""
    async with EnvironmentPool(taskset, workers=workers) as pool:
        await episodes(pool, tasks[:workers], policy, turns=1, group=1)  # so that workers' imports are not measured
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
    """Return the seconds per step of a trivial environment with ``live`` concurrent episodes; the median of 5 runs."""
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
        print(f"{'overhead of the worker pool':<40}{'us/step':>8}")
        for workers, live in ((0, 1), (1, 1), (1, 8), (1, 64), (arguments.workers, 64)):
            title = f"  {workers} workers, {live} concurrent episodes"
            print(f"{title:<40}{asyncio.run(overhead(workers, live)) * 1e6:>8.0f}")
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
