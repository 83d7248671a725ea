"""Compares the SAC of `gleanrl train pendulum` with that of Stable-Baselines3 (SB3), with the same hyperparameters.

    python benchmarks/embodied.py [--task TASK] [--steps N] [--seeds 3] [--every N]
                                  [--arms ours,sb3,demonstrations,control] [--update-ratio 1] [--out FILE.jsonl]

TASK is pendulum, mountain_car, inverted_pendulum or hopper. ``--steps`` counts environment steps. After every
``--every`` of them, the policy's mean action is evaluated on the same 16 episodes, with the same code for all arms:

* ``ours``, ``sb3``: the two libraries with equal networks, learning rates, batches and updates per step.
* ``demonstrations``: our SAC in the manner of RLPD, with layer norm in the critics and almost no random steps at the
  start. Half of each batch comes from 832 chunk steps of a scripted expert or, for tasks without one, from the buffer
  of the ``ours`` run with the same seed.
* ``control``: as ``demonstrations``, but without the demonstrations.

The table shows the mean return over seeds; for each seed, the environment steps after which the return was at least
``--goal`` in two evaluations in a row; and CPU seconds without evaluation.

Both libraries alternate ``chunk_steps`` steps of all environments with the same number of updates. SB3 handles
truncated episodes in its own way (its handling of time limits is on). Requires the extras `embodied` and `benchmarks`,
and `gymnasium[mujoco]` for the last two tasks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console as RichConsole
from torch import Tensor

from gleanrl.config.loading import load_job
from gleanrl.embodied.environments import Environments
from gleanrl.embodied.rollout import evaluate
from gleanrl.embodied.settings import EmbodiedConfig
from gleanrl.runtime import embodied
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.tracking.monitors import Console, load_monitors
from gleanrl.utils.seeding import derive

EPISODES = 16


@dataclass(frozen=True)
class Task:
    id: str
    steps: int
    goal: float
    expert: str | None = None
    settings: tuple[tuple[str, str], ...] = ()


TASKS = {
    "pendulum": Task("Pendulum-v1", 7_680, -250.0, "pendulum"),
    "mountain_car": Task("MountainCarContinuous-v0", 7_680, 90.0, "mountain_car"),
    "inverted_pendulum": Task("InvertedPendulum-v5", 15_360, 950.0, None, (("schedule.warmup", "16"),)),
    "hopper": Task(
        "Hopper-v5",
        300_032,
        2_500.0,
        None,
        (
            *(("schedule.warmup", "79"), ("learner.hidden_size", "256"), ("learner.batch", "256")),
            *((f"learner.{name}_lr", "3e-4") for name in ("actor", "critic", "temperature")),
        ),
    ),
}


@dataclass(frozen=True)
class Curve:
    """The result of a run: pairs of environment steps and mean return, and the CPU seconds without evaluation."""

    arm: str
    seed: int
    points: list[tuple[int, float]]
    cpu_s: float


class Stopwatch:
    """Measures the CPU seconds of this process since its construction, except those inside `left_out`."""

    def __init__(self) -> None:
        self._since, self._out = time.process_time(), 0.0

    @contextmanager
    def left_out(self) -> Iterator[None]:
        start = time.process_time()
        yield
        self._out += time.process_time() - start

    @property
    def seconds(self) -> float:
        return time.process_time() - self._since - self._out


def configured(task: Task, args: argparse.Namespace, seed: int, folder: Path, arm: str) -> EmbodiedConfig:
    rows = 64  # environment steps per training step, as in the preset
    own = {
        "run.folder": str(folder),
        "run.name": f"{arm}-{seed}",
        "run.seed": str(seed),
        "run.steps": str(args.steps // rows),
        "environment.id": task.id,
        "learner.update_ratio": str(args.update_ratio),
        "evaluation.every": str(args.every // rows),
        "evaluation.episodes": str(EPISODES),
        "checkpoint.every": "0",
        "monitor.use": '["file"]',
    }
    own |= dict(task.settings)
    if arm in ("demonstrations", "control"):
        own |= {"learner.layer_norm": "true", "schedule.warmup": "2"}
    if arm == "demonstrations":
        shown = {"expert": task.expert} if task.expert else {"path": str(folder / f"ours-{seed}")}
        own |= {f"demonstrations.{name}": value for name, value in shown.items()}
    config = load_job("pendulum", list(own.items()))
    assert isinstance(config, EmbodiedConfig)
    return config


def ours(config: EmbodiedConfig, arm: str) -> Curve:
    """Make a run as `gleanrl train` does, and return its curve."""
    watch = Stopwatch()
    real = embodied.evaluate

    def unmeasured(act: Callable[[Tensor], Tensor], environments: Any) -> dict[str, float]:
        with watch.left_out():
            return real(act, environments)

    embodied.evaluate = unmeasured
    try:
        silent = Console(RichConsole(quiet=True))
        embodied.run_training(config, resume=False, console=silent, monitors=partial(load_monitors, config.monitor))
    finally:
        embodied.evaluate = real
    rows = RunFolder(config.path).read_metrics()
    each = config.rows_per_step * config.environment.chunk
    points = [(row.step * each, row.metrics["eval/return"]) for row in rows if "eval/return" in row.metrics]
    return Curve(arm, config.run.seed, points, watch.seconds)


def sb3(config: EmbodiedConfig) -> Curve:
    """Train Stable-Baselines3's SAC with the same settings, and return its curve."""
    import gymnasium
    from stable_baselines3 import SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    learner, schedule, count = config.learner, config.schedule, config.environment.count
    assert learner.actor_lr == learner.critic_lr == learner.temperature_lr  # SB3 has a single learning rate
    seed, every = config.run.seed, config.evaluation.every * config.rows_per_step
    watch, points = Stopwatch(), list[tuple[int, float]]()
    tried = Environments(
        config.environment.id, {}, count=EPISODES, chunk=1, seed=derive(seed, "evaluation"), vectorization="sync"
    )
    model = SAC(
        "MlpPolicy",
        make_vec_env(lambda: gymnasium.make(config.environment.id), n_envs=count, seed=seed),
        learning_rate=learner.critic_lr,
        buffer_size=config.run.steps * config.rows_per_step,
        learning_starts=schedule.warmup * config.rows_per_step,
        batch_size=learner.batch,
        tau=learner.tau,
        gamma=learner.gamma,
        train_freq=(schedule.chunk_steps, "step"),
        gradient_steps=round(config.rows_per_step * learner.update_ratio),
        ent_coef=f"auto_{learner.initial_temperature}",
        policy_kwargs={"net_arch": [learner.hidden_size] * learner.layers},
        seed=seed,
        device="cpu",
    )

    def act(obs: Tensor) -> Tensor:
        actions, _ = model.predict(obs.numpy(), deterministic=True)
        return torch.from_numpy(np.asarray(model.policy.scale_action(actions), np.float32))

    class Trying(BaseCallback):
        def _on_rollout_start(self) -> None:  # called after all updates for the previous steps
            if self.num_timesteps % every == 0:
                with watch.left_out():
                    points.append((self.num_timesteps, evaluate(act, tried)["eval/return"]))

        def _on_step(self) -> bool:
            return True

    model.learn(config.run.steps * config.rows_per_step, callback=Trying(), log_interval=1_000_000)
    seconds = watch.seconds
    points.append((model.num_timesteps, evaluate(act, tried)["eval/return"]))
    tried.close()
    return Curve("sb3", seed, points, seconds)


def reached(points: list[tuple[int, float]], goal: float) -> int | None:
    """Return the environment steps at the first evaluation that met the goal and was followed by one that met it too.

    None if there is no such evaluation.
    """
    for (steps, value), (_, after) in zip(points, [*points[1:], points[-1]], strict=True):
        if min(value, after) >= goal:
            return steps
    return None


def table(curves: list[Curve], arms: list[str], goal: float) -> str:
    by_arm = {arm: [curve for curve in curves if curve.arm == arm] for arm in arms}
    width = 2 + max(16, 6 * len(by_arm[arms[0]]))  # some cells contain a number for each seed
    lines = [f"{'steps':>14}" + "".join(f"{arm:>{width}}" for arm in arms)]
    for i, (steps, _) in enumerate(curves[0].points):
        values = [[curve.points[i][1] for curve in by_arm[arm] if i < len(curve.points)] for arm in arms]
        means = (f"{statistics.fmean(own):.1f}" if own else "" for own in values)
        lines.append(f"{steps:>14}" + "".join(f"{mean:>{width}}" for mean in means))

    def row(name: str, show: Callable[[Curve], str]) -> str:
        return f"{name:>14}" + "".join(f"{' '.join(map(show, by_arm[arm])):>{width}}" for arm in arms)

    lines.append(row(f"steps to {goal:g}", lambda curve: str(reached(curve.points, goal) or "never")))
    lines.append(row("CPU seconds", lambda curve: f"{curve.cpu_s:.0f}"))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="pendulum")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int, default=640)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", default="ours,sb3,demonstrations,control")
    parser.add_argument("--update-ratio", type=float, default=1.0)
    parser.add_argument("--goal", type=float)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    task, arms = TASKS[args.task], args.arms.split(",")
    args.steps = args.steps or task.steps
    goal = task.goal if args.goal is None else args.goal
    torch.set_num_threads(1)
    curves: list[Curve] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for arm in arms:
                config = configured(task, args, seed, Path(folder), arm)
                curves.append(sb3(config) if arm == "sb3" else ours(config, arm))
                print(
                    f"# {arm}, seed {seed}: return {curves[-1].points[-1][1]:.1f}, {curves[-1].cpu_s:.0f} CPU s",
                    flush=True,
                )
                if args.out is not None:
                    with args.out.open("a") as file:
                        file.write(json.dumps({"task": args.task, **vars(curves[-1])}) + "\n")
    print(f"{task.id}, mean return of {EPISODES} episodes, {args.seeds} seeds, torch {torch.__version__}, 1 thread")
    print(table(curves, arms, goal))


if __name__ == "__main__":
    main()
