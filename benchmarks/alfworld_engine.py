"""Compares our ALFWorld engine with the original one: speed, memory, and whether both give the same observations.

    python benchmarks/alfworld_engine.py [--games 6] [--steps 60] [--seed 0]

The original ("stock") engine is the one that the package alfworld uses: TextWorld's PddlEnv with alfworld's demangler,
with feedback, win flag and admissible commands requested. A "cold" step is the first one with its combination of state
and command; a "warm" step repeats a combination, whose result our engine has cached. All times are CPU seconds of this
process, so that they do not depend on the other load of the machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.environments import alfworld_stock as stock

from gleanrl.environments.alfworld import AlfworldTaskset
from gleanrl.environments.alfworld.engine import Game
from gleanrl.types import Task

GOALS = ("put", "heat", "cool", "clean", "put_two")
SIZES = {
    "small": {"receptacles": (5, 6), "objects": (4, 6)},
    "large": {"receptacles": (20, 25), "objects": (20, 25), "same_kind": 3},  # the size of ALFWorld's published games
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    AlfworldTaskset().tasks("train", 1)  # imports modules and parses the grammar, which shall not be measured
    generation()
    print(f"\n{'household':10}{'engine':8}{'load ms':>9}{'cold steps/s':>14}{'warm steps/s':>14}{'KB/game':>11}")
    for size, layout in SIZES.items():
        tasks = AlfworldTaskset(goals=GOALS, seed=options.seed, **layout).tasks("eval", options.games)
        ours(size, tasks)
        against_stock(size, tasks, options.steps, options.seed)


def generation() -> None:
    began = time.process_time()
    taskset = AlfworldTaskset(seed=1)
    count = len(taskset.tasks("train", 300)) + len(taskset.tasks("eval", 100))
    seconds = time.process_time() - began
    print(f"{count} households drawn and solved by the expert: {seconds:.2f} s, {1e3 * seconds / count:.1f} ms each")


def ours(size: str, tasks: Sequence[Task]) -> None:
    loads: list[float] = []
    tracemalloc.start()
    games = [Game(task.payload["problem"], task.payload["task"]) for task in tasks]
    for game in games:
        walk(game, random.Random(0), 200)
    memory = tracemalloc.get_traced_memory()[0] / len(games) / 1024
    tracemalloc.stop()
    cold = warm = 0.0
    for task in tasks:
        began = time.process_time()
        game = Game(task.payload["problem"], task.payload["task"])
        loads.append(time.process_time() - began)
        path = walk(game, random.Random(1), 200)
        fresh = Game(task.payload["problem"], task.payload["task"])
        known: set[tuple[int, str]] = set()
        distinct = [move for move in path if not (move in known or known.add(move))]
        began = time.process_time()
        for move in distinct:
            fresh.step(*move)
        cold += (time.process_time() - began) / len(distinct)
        began = time.process_time()
        for move in path:
            fresh.step(*move)
        warm += (time.process_time() - began) / len(path)
    row(size, "ours", sorted(loads)[len(loads) // 2], len(tasks) / cold, len(tasks) / warm, memory)


def walk(game: Game, rng: random.Random, steps: int) -> list[tuple[int, str]]:
    state, path = game.start, []
    for _ in range(steps):
        command = rng.choice(game.admissible(state))
        path.append((state, command))
        state = game.step(state, command).state
    return path


def against_stock(size: str, tasks: Sequence[Task], steps: int, seed: int) -> None:
    loads, seconds, commands, differences = [], 0.0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        for number, task in enumerate(tasks):
            file = stock.game_file(task, Path(folder) / "game.tw-pddl")
            began = time.process_time()
            env = stock.start(file)
            env.reset()
            loads.append(time.process_time() - began)
            episodes = [stock.play(env, 1000 * seed + 10 * number + i, steps) for i in range(2)]
            seconds += sum(episode.seconds for episode in episodes)
            order = [i for i in range(2) for _ in range(steps + 1)]
            random.Random(number).shuffle(order)
            game = Game(task.payload["problem"], task.payload["task"])
            differences += stock.differences(game, [episode.moves for episode in episodes], order)
            commands += 2 * steps
    row(size, "stock", sorted(loads)[len(loads) // 2], commands / seconds, None, None)
    print(f"{size}: {commands} commands compared, {len(differences)} answered otherwise")
    for difference in differences[:5]:
        print(" ", difference)


def row(size: str, engine: str, load: float, cold: float, warm: float | None, memory: float | None) -> None:
    tail = "".join(f"{value:>{width},.0f}" if value else " " * width for value, width in ((warm, 14), (memory, 11)))
    print(f"{size:10}{engine:8}{1e3 * load:>9.1f}{cold:>14,.0f}{tail}", flush=True)


if __name__ == "__main__":
    main()
