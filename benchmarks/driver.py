"""Measures the CPU time that the driver process spends on each turn, trajectory and group.

    python benchmarks/driver.py [--steps 6] [--observed 150] [--sampled 50] [--turns 10] [--repeats 3]

The training loop `gleanrl.train` runs with its real scheduler, player, context, renderer, advantages and batches. All
other parts cost nothing: the sampler returns scripted answers, the environment and its score are trivial, the learner
does nothing, and the weights are empty. A turn observes ``--observed`` words and samples ``--sampled`` tokens.

Each row of the first table is a run with the given groups per step, trajectories per group and turns per trajectory.
It shows the milliseconds of CPU time per step: the median over all steps but the first, of the fastest of ``--repeats``
runs. The second table is a least-squares fit of these rows:

    step = constant + groups * group + trajectories * trajectory + turns * turn + earlier turns * earlier

"earlier turns" is the sum over all turns of the number of turns before it in its episode; it is there because prompts
grow. Terms with a negative coefficient are within the noise and are left out. The last lines show the cost of a turn in
an episode of ``--turns`` turns, and the part of it that the tokenizer needs for the observation.

`gleanrl simulate` accepts the costs as --driver-group, --driver-trajectory and --driver-turn. They do not include
monitors, rollout files, checkpoints, the reward agent (benchmarks/reward_agent.py) and the pool (benchmarks/pool.py).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from gleanrl.algorithms.batch import Batch, build
from gleanrl.config.settings import ContextSettings, CreditSettings, LossSettings, ScheduleSettings
from gleanrl.curriculum.orders import TaskStream
from gleanrl.curriculum.plan import Plan
from gleanrl.learners.tiny import build_tokenizer
from gleanrl.protocols import Environment, Metrics, Observation
from gleanrl.rewards import EnvironmentReward
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Encoder, Renderer
from gleanrl.runtime.checkpoints import Checkpoints
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.schedule.controller import StalenessController
from gleanrl.schedule.schedule import Schedule
from gleanrl.schedule.timeline import Timeline
from gleanrl.train import Run, train
from gleanrl.types import Group, Message, Score, Task

SHAPES = ((4, 4, 1), (16, 4, 1), (4, 16, 1), (8, 8, 4), (16, 4, 4), (4, 16, 7), (4, 8, 10))
"""Groups a step, trajectories a group, turns a trajectory."""
CONTEXT = 1_000_000  # maximum context in tokens, so large that no episode is truncated


@dataclass
class Instant(Environment):
    """An environment whose episodes have ``turns`` turns. The score depends only on the last answer."""

    text: Callable[[], str]
    turns: int
    task: Task
    done: int = 0

    async def reset(self) -> Observation:
        return Observation((Message(role="user", content=self.text()),), score=Score(0.0))

    async def step(self, message: Message) -> Observation:
        self.done += 1
        won = float(message["content"].startswith("left"))
        ends = self.done == self.turns
        return Observation((Message(role="user", content=self.text()),), done=ends, score=Score(won))


class Idle:
    """A learner, evaluator and observer that do nothing but record the CPU time at the end of each step."""

    shares_sampler = False

    def __init__(self) -> None:
        self.readings: list[float] = []

    async def update(self, batch: Batch) -> Metrics:
        return {}

    def weights(self) -> dict[str, Any]:
        return {}

    def undo_step(self) -> bool:
        return False

    def save(self, folder: Path) -> None:
        pass

    async def start(self, step: int, on_error: Callable[[BaseException], None]) -> None:
        pass

    async def finish(self) -> None:
        pass

    async def cancel(self) -> None:
        pass

    def log(self, step: int, metrics: Metrics) -> None:
        pass

    def on_batch(self, groups: Sequence[Group], batch: Batch) -> None:
        pass

    def on_step(self, step: int, groups: Sequence[Group], metrics: Metrics, dropped: Sequence[Group] = ()) -> None:
        self.readings.append(time.process_time())


@dataclass
class World:
    """The observations and answers of all runs, and the parts of a run that produce them."""

    observed: int
    sampled: int
    renderer: Renderer = field(default_factory=lambda: Renderer(build_tokenizer(["say left or right"] * 8, 256)))

    def __post_init__(self) -> None:
        sides = (self.renderer.tokenizer(side, add_special_tokens=False)["input_ids"] for side in ("right ", "left "))
        self._answers = [[*(side * self.sampled)[: self.sampled - 1], self.renderer.end_of_turn] for side in sides]
        self._words = " ".join(["say left or right"] * -(-self.observed // 4))
        self._texts = 0

    def text(self) -> str:
        """Return the next observation. All differ, as in a real environment, so that no cache can help."""
        self._texts += 1
        return f"{self._texts} {self._words}"

    def tokenizing_s(self, times: int = 200) -> float:
        """Return the CPU seconds that the tokenizer needs for the observation of one turn."""
        texts, encoder = [self.text() for _ in range(times)], Encoder(self.renderer.tokenizer)
        before = time.process_time()
        for text in texts:
            encoder.ids(text)
        return (time.process_time() - before) / times

    def answer(self, prompt: Any, seed: int) -> Sequence[int]:
        return self._answers[seed % 2]

    def run(self, folder: Path, shape: tuple[int, int, int], steps: int) -> tuple[Run, Idle]:
        groups, members, turns = shape
        settings = ScheduleSettings(preset="sync", batch=groups, group=members, chunks=1)
        schedule = Schedule.from_settings(settings)
        idle = Idle()
        tasks = [Task(f"task-{number}") for number in range(groups)]

        async def batch(groups: Sequence[Group]) -> Batch:
            return build(groups, CreditSettings(), LossSettings(), CONTEXT)

        run = Run(
            seed=1,
            total_steps=steps,
            settings=settings,
            player=Player(
                lambda task: Instant(self.text, turns, task),
                ScriptedSampler(self.answer),
                self.renderer,
                ContextSettings(max_turns=turns, max_tokens_per_turn=self.sampled),
                1.0,
                CONTEXT,
            ),
            rewards=EnvironmentReward(),
            learner=cast(Any, idle),
            plan=Plan(TaskStream(tasks, members, seed=1), schedule.batch),
            make_batch=batch,
            evaluator=idle,
            checkpoints=Checkpoints(folder, keep=1),
            checkpoint_every=0,
            evaluate_every=0,
            observer=idle,
            timeline=Timeline(),
            controller=StalenessController(schedule, steps),
        )
        return run, idle


def step_s(world: World, shape: tuple[int, int, int], steps: int) -> float:
    """Make a run of ``steps`` steps, and return the median CPU seconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        run, idle = world.run(Path(folder), shape, steps)
        gc.collect()
        asyncio.run(train(run))
    return statistics.median(np.diff(idle.readings).tolist())


def fitted_costs(events: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds per event of each kind, by a least-squares fit of relative errors.

    With absolute errors, the largest run would dominate the fit. ``events`` is [runs, kinds], ``seconds`` is [runs].
    """
    kept = list(range(events.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(events[:, kept] / seconds[:, None], np.ones_like(seconds), rcond=None)
        if (found >= 0).all():
            costs = np.zeros(events.shape[1])
            costs[kept] = found
            return costs
        kept.pop(int(found.argmin()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=10, help="turns of the episode that the last lines are about")
    parser.add_argument("--observed", type=int, default=150, help="words a turn")
    parser.add_argument("--sampled", type=int, default=50, help="tokens a turn")
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = World(args.observed, args.sampled)
    tokens = len(world.renderer.tokenizer(world.text())["input_ids"])
    print(f"a turn observes {args.observed} words ({tokens} tokens) and samples {args.sampled} tokens")
    print(f"{'groups':>8}{'members':>9}{'turns':>8}{'CPU ms/step':>13}{'fitted':>8}")
    step_s(world, SHAPES[0], 3)  # imports modules and fills caches, which shall not be measured
    measured = [min(step_s(world, shape, args.steps) for _ in range(args.repeats)) for shape in SHAPES]
    events = np.array([(1, g, g * m, g * m * t, g * m * t * (t - 1) / 2) for g, m, t in SHAPES], float)
    seconds = np.array(measured)
    fit = fitted_costs(events, seconds)
    for (groups, members, turns), took, fitted in zip(SHAPES, measured, events @ fit, strict=True):
        print(f"{groups:>8}{members:>9}{turns:>8}{1000 * took:>13.1f}{1000 * fitted:>8.1f}")
    print("\nmicroseconds of CPU time for each")
    for name, cost in zip(("step (constant)", "group", "trajectory", "turn", "earlier turn"), fit, strict=True):
        print(f"{name:<20}{1e6 * cost:>8.0f}")
    print(f"{f'mean turn of {args.turns}':<20}{1e6 * (fit[3] + fit[4] * (args.turns - 1) / 2):>8.0f}")
    print(f"{'- of it tokenizing':<20}{1e6 * world.tokenizing_s():>8.0f}")


if __name__ == "__main__":
    main()
