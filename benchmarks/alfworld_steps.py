"""ALFWorld steps per second beside alfworld's own batch environment, on the same full-size game files, in one run.

    python benchmarks/alfworld_steps.py [--games 12] [--episodes 48] [--turns 40] [--workers 2] [--seed 0]

Both sides play random admissible commands, which both have to list after every step. Stock is `AlfredTWEnv` with
`init_env(batch_size)`: one game at a time in this process, or several in lock-step, each in a process of its own. Ours
is the environment of the taskset, through the pool that a run uses: in this process or in worker processes, many
episodes at once. "new" is the first time that a game is played, "again" the same episodes ten times more.
Loading games is apart, as CPU ms a game. Steps are given per second of the clock, and per second of CPU of all
processes together, which is what a core does in a second and which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
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
    """Clock and CPU seconds, of this process and all below it, spent inside `measure`."""

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
    parser.add_argument("--episodes", type=int, default=48, help="of ours; stock plays fewer, it is slow")
    parser.add_argument("--turns", type=int, default=40, help="of an episode, at most")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ALFWORLD_DATA"] = folder
        generated = AlfworldTaskset(goals=list(GOALS), size="full", seed=args.seed).tasks("train", args.games)
        for number, task in enumerate(generated):
            write(Path(folder), task, number)
        print(f"{'':36}{'load':>12}{'steps/s of':>14}{'steps/s of':>14}")
        print(f"{'':36}{'ms/game':>12}{'the clock':>14}{'CPU':>14}")
        for batch in (1, args.workers):
            rounds = max(1, args.games // 2 // batch)
            row(f"stock, batch of {batch}", *play_stock(Path(folder), batch, rounds, args.turns, args.seed))
        taskset = AlfworldTaskset(goals=list(GOALS), source="alfworld_data", admissible_commands=True)
        tasks = list(taskset.tasks("train", args.games))
        for workers in (0, args.workers):
            asyncio.run(play_ours(taskset, tasks, workers, args.episodes, args.turns))


def write(root: Path, task: Task, number: int) -> None:
    """A game as the published data has it."""
    kind = GOALS[task.payload["goal"]].library
    file = stock.game_file(task, root / "json_2.1.1" / "train" / f"{kind}-{number}" / "trial" / "game.tw-pddl")
    file.with_name("traj_data.json").write_text(json.dumps({"task_type": kind}))


def play_stock(root: Path, batch: int, rounds: int, turns: int, seed: int) -> tuple[int, int, Meter, Meter]:
    """Episodes, steps, and what loading and stepping took."""
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
    env.reset()  # what is loaded once a process is not what an episode costs
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


async def play_ours(taskset: AlfworldTaskset, tasks: Sequence[Task], workers: int, episodes: int, turns: int) -> None:
    where = f"{workers} processes" if workers else "in process"
    async with EnvironmentPool(taskset, workers=workers) as pool:
        await asyncio.gather(*(episode(pool, tasks[0], number, 1) for number in range(2 * max(1, workers))))
        loading = Meter()
        with loading.measure():  # the game itself; episodes of one task share it
            await asyncio.gather(*(episode(pool, task, 0, 0) for task in tasks))
        for title, rounds in (("new", 1), ("again", 10)):
            stepping, steps = Meter(), 0
            with stepping.measure():
                for _ in range(rounds):
                    numbered = [(tasks[number % len(tasks)], number) for number in range(episodes)]
                    steps += sum(await asyncio.gather(*(episode(pool, task, n, turns) for task, n in numbered)))
            row(f"ours, {where}, {episodes} at once, {title}", len(tasks), steps, loading, stepping)


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
    rates = (steps / stepping.wall, steps / stepping.cpu)
    print(f"{title:36}{1e3 * loading.cpu / episodes:>12.1f}" + "".join(f"{rate:>14,.0f}" for rate in rates), flush=True)


if __name__ == "__main__":
    main()
