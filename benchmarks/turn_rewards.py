"""Measures whether turn rewards improve learning where a single turn of an episode decides its score.

    python benchmarks/turn_rewards.py [show]
    python benchmarks/turn_rewards.py run [--seeds 0 1 2 3 4] [--arms NAME ...]

The environment is `Errand`: a walk of 12 turns with a parcel. The first message names the house that the parcel is
for. In the third turn the agent names the house to which it gives the parcel, which earns 1 if it is the right one. In
every other turn it names the side of the street on which it walks on, which costs 0.02 if there is a hole. The score
of an episode is the sum of all this, at most 1; it is above 0.5 if and only if the parcel is at the right house.

The arms differ only in where the rewards are earned. With turn rewards, `Observation.reward` says after each message
what it earned. Without them, the score is known at the end of the episode. The score is the same, and so are the
settings of both estimators (PPO's `gae` with a critic, and `reinforce_plus_plus`). The seed determines the tasks, the
demonstrations, the warm start and all samples, so the arms of a seed start equal.

`run` appends a JSON line to ``results/turn_rewards.jsonl`` for each run, and skips runs that it already contains. Each
run uses one thread. `show` prints the share of held-out episodes with the parcel at the right house, and the
difference between the arms as a mean over seeds with a 95 % interval (Student's t, paired by seed).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.types import Message, Score, Task
from gleanrl.utils.seeding import derive

RESULTS = Path(__file__).parent / "results" / "turn_rewards.jsonl"
TURNS, DELIVERY, HOLE = 12, 3, 0.02
HOUSES = ("red", "blue", "green", "white", "black", "brown")
SIDES = ("left", "right")
STEPS, POINTS = 40, (0, 10, 20, 30, 40)
SETTINGS: dict[str, Any] = {
    "run": {"steps": STEPS, "threads": 1},
    "environment": {"train_tasks": 512, "eval_tasks": 64, "warm_start_tasks": 128},
    "model": {"hidden_size": 64, "max_context": 256},
    "warm_start": {"demonstrations": 256, "noise": 0.7, "steps": 150, "lr": 4e-3},
    "context": {"max_turns": TURNS, "max_tokens_per_turn": 4},
    "schedule": {"batch": 8, "group": 4},
    "learner": {"lr": 3e-4, "updates_per_step": 2},
    "evaluation": {"every": STEPS // (len(POINTS) - 1), "samples": 4, "greedy": False},
    "checkpoint": {"every": 0},
    "monitor": {"use": ["file"], "rollouts_per_step": 0},
}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {"estimator": "gae", "options": {"lam": 0.95}},
    "reinforce_plus_plus": {"estimator": "reinforce_plus_plus"},
}
ARMS = [f"{estimator} {how} turn rewards" for estimator in ESTIMATORS for how in ("without", "with")]


# --- the environment ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Errand(Taskset):
    """Deliver a parcel on a walk. The fields are the options of ``environment.options``."""

    turn_rewards: bool = True
    seed: int = 0

    has_expert = True

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        share = {"train": range(6), "warm_start": (6, 7), "eval": (8, 9)}[split]  # of ten: no walk is in two
        random, found = Random(derive(self.seed, "errand")), dict[str, Task]()
        while len(found) < count:
            house, holes = random.choice(HOUSES), [random.choice(SIDES) for _ in range(TURNS)]
            name = f"errand-{house}-{''.join(side[0] for side in holes)}"
            if derive(0, name) % 10 in share:
                found[name] = Task(name, payload={"house": house, "holes": holes})
        return list(found.values())

    def environment(self, task: Task) -> Walk:
        return Walk(task, self.turn_rewards)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        random, walk, score = Random(derive(seed, task.id)), Walk(task, turn_rewards=False), 0.0
        conversation: list[Message] = []
        for _ in range(TURNS):
            words = HOUSES if walk.turn + 1 == DELIVERY else SIDES
            said = random.choice(words) if random.random() < noise else walk.right()
            conversation += [walk.seen(), Message(role="assistant", content=said)]
            score += walk.answer(said)
        return tuple(conversation), Score(score)


class Walk(Environment):
    def __init__(self, task: Task, turn_rewards: bool) -> None:
        self.house, self.holes = task.payload["house"], task.payload["holes"]
        self.turn_rewards, self.turn, self.earned = turn_rewards, 0, 0.0

    def seen(self) -> Message:
        text = "which house" if self.turn + 1 == DELIVERY else f"hole {self.holes[self.turn]}"
        return Message(role="user", content=f"parcel for {self.house} {text}" if self.turn == 0 else text)

    def right(self) -> str:
        """Return the best word to say in this turn."""
        return self.house if self.turn + 1 == DELIVERY else SIDES[self.holes[self.turn] == SIDES[0]]

    def answer(self, said: str) -> float:
        """End the turn with what the agent said, and return what that earned."""
        best, delivery = said == self.right(), self.turn + 1 == DELIVERY
        self.turn += 1
        return float(best) if delivery else 0.0 if best else -HOLE

    async def reset(self) -> Observation:
        return Observation((self.seen(),), score=Score(0.0))

    async def step(self, message: Message) -> Observation:
        reward = self.answer(message["content"].strip())
        self.earned += reward
        done = self.turn == TURNS
        seen = () if done else (self.seen(),)
        return Observation(seen, done, Score(self.earned), reward if self.turn_rewards else None)


# --- the runs -------------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"], nargs="?", default="show")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS, metavar="ARM")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    for seed in args.seeds if args.what == "run" else ():
        for arm in args.arms:
            if not any((row["arm"], row["seed"]) == (arm, seed) for row in rows):
                rows.append(one_run(arm, seed))
                with RESULTS.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(arm, seed, rows[-1]["curve"], f"{rows[-1]['cpu_s']:.0f} CPU seconds", flush=True)
    show(rows)


def one_run(arm: str, seed: int) -> dict[str, Any]:
    from gleanrl.config.settings import Config
    from gleanrl.runtime.local import run_training
    from gleanrl.runtime.run_folder import RunFolder
    from gleanrl.tracking.monitors import Console, load_monitors

    estimator, how, *_ = arm.split()
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
        contextlib.redirect_stdout(nowhere),
    ):
        settings = {name: dict(section) for name, section in SETTINGS.items()}
        settings["run"] |= {"folder": folder, "seed": seed}
        settings["environment"] |= {"name": f"{__file__}:Errand"}
        settings["environment"]["options"] = {"turn_rewards": how == "with", "seed": seed}
        settings["credit"] = ESTIMATORS[estimator]
        config, console, started = Config.model_validate(settings), Console(), time.process_time()
        monitors = partial(load_monitors, config.monitor, console=console)
        run_training(config, resume=False, console=console, monitors=monitors)
        metrics = RunFolder(config.path).read_metrics()
    name = "eval/sampled/pass@1"
    curve = {str(row.step): row.metrics[name] for row in metrics if name in row.metrics}
    return {"arm": arm, "seed": seed, "curve": curve, "cpu_s": time.process_time() - started}


# --- the tables -----------------------------------------------------------------------------------
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # by sample size


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the share of delivered parcels after each evaluated step, and the paired differences between arms."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        curve = [row["curve"][str(step)] for step in POINTS]
        found[row["arm"], row["seed"]] = [*curve, statistics.fmean(curve[1:])]
    heads = ["delivered on held-out tasks, after step", *map(str, POINTS), f"mean of steps {POINTS[1]} to {POINTS[-1]}"]
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for estimator in ESTIMATORS:
        without, with_turns = (arm for arm in ARMS if arm.startswith(f"{estimator} "))
        seeds = sorted(seed for arm, seed in found if arm == with_turns and (without, seed) in found)
        if len(seeds) < 2:
            continue
        tables = [[found[arm, seed] for seed in seeds] for arm in (without, with_turns)]
        for arm, table in zip((without, with_turns), tables, strict=True):
            print(f"| {arm} | {' | '.join(f'{statistics.fmean(column):.3f}' for column in zip(*table, strict=True))} |")
        cells = []
        for column in zip(*(zip(*pair, strict=True) for pair in zip(*tables, strict=True)), strict=True):
            differences = [after - before for before, after in column]
            half = T_95[len(seeds)] * statistics.stdev(differences) / len(seeds) ** 0.5
            cells.append(f"{statistics.fmean(differences):+.3f} ± {half:.3f}")
        print(f"| {estimator}: difference, {len(seeds)} seeds | {' | '.join(cells)} |")
    print(f"\n{sum(row['cpu_s'] for row in rows):.0f} CPU seconds in all")


if __name__ == "__main__":
    main()
