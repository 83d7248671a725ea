"""Compares the steps per second of our ALFWorld environment and of alfworld's own batch environment on the same games.

    python benchmarks/alfworld_steps.py [--games 12] [--episodes 48] [--turns 40] [--workers 2] [--seed 0]

Both play random admissible commands on full-size games, and both compute the list of admissible commands after each
step. "stock" is alfworld's `AlfredTWEnv` with `init_env(batch_size)`: one game at a time in this process, or several in
lock-step, each in a process of its own. "ours" is the taskset's environment in the `EnvironmentPool` that a run uses,
in this process or in worker processes, with many episodes at the same time. "new" episodes are played for the first
time; "again" repeats the same episodes ten times.

The time to load a game is measured separately, in CPU milliseconds per game. Steps are given per wall-clock second, and
per CPU second of all processes together. The latter is the throughput of one core, and depends little on the other load
of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.environments import alfworld_stock as stock

from gleanrl.environments.alfworld import AlfworldTaskset
from gleanrl.environments.alfworld.households import GOALS
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.types import Task


@dataclass
class Meter:
    """Sums of the wall-clock seconds, and of the CPU seconds of this process and its descendants, inside `measure`."""

    wall: float = 0.0
    cpu: float = 0.0

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), cpu_seconds()
        yield
        self.wall += time.perf_counter() - wall
        self.cpu += cpu_seconds() - cpu


def cpu_seconds() -> float:
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=12)
    parser.add_argument(
        "--episodes",
        type=int,
        default=48,
        help="concurrent episodes of our environment; the stock one plays fewer, because it is slow",
    )
    parser.add_argument("--turns", type=int, default=40, help="of an episode, at most")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ALFWORLD_DATA"] = folder
        # A game more per worker than is measured: with it, the worker loads what it loads once.
        count = args.games + max(1, args.workers)
        generated = AlfworldTaskset(goals=list(GOALS), size="full", seed=args.seed).tasks("train", count)
        for number, task in enumerate(generated):
            write(Path(folder), task, number)
        print(f"{'':44}{'load, CPU':>12}{'steps per':>14}{'steps per':>14}")
        print(f"{'':44}{'ms/game':>12}{'second':>14}{'CPU second':>14}")
        for batch in (1, args.workers):
            rounds = max(1, args.games // 2 // batch)
            row(f"stock, batch of {batch}", *play_stock(Path(folder), batch, rounds, args.turns, args.seed))
        taskset = AlfworldTaskset(goals=list(GOALS), source="alfworld_data", admissible_commands=True)
        tasks = list(taskset.tasks("train", count))
        measured, others = tasks[: args.games], tasks[args.games :]
        for workers in (0, args.workers):
            asyncio.run(play_ours(taskset, measured, others, workers, args.episodes, args.turns))


def write(root: Path, task: Task, number: int) -> None:
    """Write a game to the folder ``root`` in the format of ALFWorld's published data."""
    kind = GOALS[task.payload["goal"]].library
    file = stock.game_file(task, root / "json_2.1.1" / "train" / f"{kind}-{number}" / "trial" / "game.tw-pddl")
    file.with_name("traj_data.json").write_text(json.dumps({"task_type": kind}))


def play_stock(root: Path, batch: int, rounds: int, turns: int, seed: int) -> tuple[int, int, Meter, Meter]:
    """Play episodes in alfworld's environment. Returns the numbers of episodes and steps, and the times of both."""
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    config: dict[str, Any] = {
        "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6], "domain_randomization": False}
        | {"expert_type": "handcoded"},
        "dataset": {"data_path": str(root / "json_2.1.1" / "train"), "num_train_games": -1},
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": turns}},
    }
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        env = AlfredTWEnv(config, train_eval="train").init_env(batch_size=batch)
    rng, loading, stepping, steps = random.Random(seed), Meter(), Meter(), 0
    env.reset()  # loads what is loaded once per process, which shall not be measured
    for _ in range(rounds):
        with loading.measure():
            _, infos = env.reset()
        done = [False] * batch
        with stepping.measure():
            while not all(done):
                commands = [rng.choice(offered) for offered in infos["admissible_commands"]]
                steps += batch - sum(done)
                _, _, done, infos = env.step(commands)
    env.close()
    return rounds * batch, steps, loading, stepping


async def play_ours(
    taskset: AlfworldTaskset, tasks: Sequence[Task], others: Sequence[Task], workers: int, episodes: int, turns: int
) -> None:
    """Play ``tasks`` and print a row. ``others`` are played before anything is measured."""
    where = f"{workers} processes" if workers else "in process"
    async with EnvironmentPool(taskset, workers=workers) as pool:
        await asyncio.gather(*(episode(pool, task, 0, 1) for task in others))
        loading = Meter()
        with loading.measure():  # loads the games; all later episodes of a task use the loaded one
            await asyncio.gather(*(episode(pool, task, 0, 0) for task in tasks))
        for title, rounds in (("new", 1), ("again", 10)):
            stepping, steps = Meter(), 0
            with stepping.measure():
                for _ in range(rounds):
                    numbered = [(tasks[number % len(tasks)], number) for number in range(episodes)]
                    steps += sum(await asyncio.gather(*(episode(pool, task, n, turns) for task, n in numbered)))
            row(f"ours, {where}, {episodes} concurrent episodes, {title}", len(tasks), steps, loading, stepping)


async def episode(pool: EnvironmentPool, task: Task, number: int, turns: int) -> int:
    rng = random.Random(f"{task.id}-{number}")
    environment = pool.environment(task)
    observation = await environment.reset()
    taken = 0
    while taken < turns and not observation.done:
        command = rng.choice(observation.info["admissible_commands"])
        observation = await environment.step({"role": "assistant", "content": command})
        taken += 1
    await environment.close()
    return taken


def row(title: str, episodes: int, steps: int, loading: Meter, stepping: Meter) -> None:
    rates = (steps / stepping.wall, steps / stepping.cpu if stepping.cpu else math.nan)
    print(f"{title:44}{1e3 * loading.cpu / episodes:>12.1f}" + "".join(f"{rate:>14,.0f}" for rate in rates), flush=True)


if __name__ == "__main__":
    main()
