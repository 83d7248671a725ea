"""Checks whether the expert solves every generated ALFWorld household, for each of the six kinds of tasks.

    python benchmarks/alfworld_expert.py [--games 200] [--size full] [--seed 0]

A taskset discards households that the expert does not solve. This benchmark keeps them: the expert plays every
household that is drawn, once with its own commands only and once with 30 % of its commands replaced by random ones. The
column "open at start" counts households whose goal is not already reached at the start. Columns with three numbers are
minimum, median and maximum.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from gleanrl.environments.alfworld import AlfworldTaskset
from gleanrl.environments.alfworld.episode import Demonstration
from gleanrl.environments.alfworld.games import game_of, household_task
from gleanrl.environments.alfworld.households import GOALS, Household, draw
from gleanrl.utils.seeding import derive

NOISE = 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=200, help="of each kind")
    parser.add_argument("--size", choices=["small", "full"], default="full")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    heads = (
        "receptacles",
        "objects",
        "open at start",
        "won",
        "commands",
        "won, noisy",
        "noisy commands",
        "CPU ms/game",
    )
    print(f"{'':10}" + "".join(f"{head:>15}" for head in heads))
    for goal in GOALS:
        print(f"{goal:10}" + "".join(f"{cell:>15}" for cell in row(goal, args.size, args.games, args.seed)), flush=True)


def row(goal: str, size: str, games: int, seed: int) -> list[str]:
    households = drawn(goal, size, games, seed)
    began = time.process_time()
    tasks = [household_task(household) for household in households]
    open_at_start = sum(not game_of(task).won(game_of(task).start) for task in tasks)
    clean = [Demonstration(task, seed).play() for task in tasks]
    spent = time.process_time() - began
    noisy = [Demonstration(task, seed).play(NOISE) for task in tasks]
    return [
        spread([len(household.furniture) for household in households]),
        spread([sum(len(inside) for _, inside in household.furniture) for household in households]),
        f"{open_at_start}/{games}",
        *(cell for played in (clean, noisy) for cell in (f"{sum(p.won for p in played)}/{games}", commands(played))),
        f"{1e3 * spent / games:.0f}",
    ]


def drawn(goal: str, size: str, games: int, seed: int) -> list[Household]:
    """Return the first ``games`` different households that are drawn with ``seed``."""
    layout = AlfworldTaskset(goals=[goal], size=size).layout  # type: ignore[arg-type] - argparse checks the size
    found: dict[str, Household] = {}
    index = 0
    while len(found) < games:
        household = draw(layout, derive(seed, "alfworld", "household", index))
        index += 1
        if household is not None:
            found.setdefault(household.key, household)
    return list(found.values())


def commands(played: Sequence[Demonstration]) -> str:
    return spread([each.commands for each in played])


def spread(values: Sequence[int]) -> str:
    return f"{min(values)} {statistics.median(values):g} {max(values)}"


if __name__ == "__main__":
    main()
