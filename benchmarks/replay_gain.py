"""Does replay pay? Arms with a learning-rate sweep each, several environments, several seeds, equal budgets.

    python benchmarks/replay_gain.py [show] [--domains NAME ...] [--arms NAME ...] [--svg FILE]
    python benchmarks/replay_gain.py run [--save FILE] [--domains NAME ...] [--arms NAME ...] [--lrs 1e-4] [--seeds 0]

A run is what `gleanrl train` does with the settings of its domain, arm and rate (`replay_arms.py`). A seed redraws the
households or words, the demonstrations, the warm start and every sample (the TextWorld games stay: they take minutes to
compile); the arms of a seed share all of that. Checkpoints are evaluated when the run is over, by sampled attempts on
held-out and on training tasks, so the CPU seconds of a run are those of training alone: with one thread, what it would
take on a core of its own. `run` adds a JSON line for each run to FILE and skips those that are there; `show` prints
what was measured. FILE is `results/replay_gain.jsonl` unless said otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import replay_tables as tables
from replay_arms import ARMS, DOMAINS, HEADLINE

RESULTS = Path(__file__).parent / "results" / "replay_gain.jsonl"
HELD_OUT = 128  # tasks
POINTS = 6  # evaluations of a run after the first
TOLD = ("replay/", "loss/", "pool/", "reward/", "tokens/", "replay_update/", "groups/", "time/")

Job = tuple[str, str, float, int]  # domain, arm, learning rate, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"], nargs="?", default="show")
    parser.add_argument(
        "--save", type=Path, nargs="+", default=[RESULTS], help="JSON lines; `show` takes several files"
    )
    parser.add_argument("--svg", type=Path, help="show: draw the curves of --arms there")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=list(DOMAINS), metavar="DOMAIN")
    parser.add_argument("--arms", nargs="+", default=HEADLINE, choices=list(ARMS), metavar="ARM")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    args = parser.parse_args()
    if args.what == "show":
        rows = [row for path in args.save for row in read(path) if row["domain"] in args.domains]
        tables.show(rows, args.arms)
        if args.svg:
            args.svg.write_text(tables.draw([row for row in rows if row["arm"] in args.arms]))
        return
    save = args.save[0]
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = {(row["domain"], row["arm"], row["lr"], row["seed"]) for row in read(save)}
    wanted = [
        (domain, arm, lr, seed)
        for seed in args.seeds
        for domain in args.domains
        for lr in args.lrs
        for arm in args.arms
        if (domain, arm, lr, seed) not in done
    ]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for row in pool.imap_unordered(one_run, wanted):
            with save.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(tables.line(row), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def one_run(job: Job) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        return asyncio.run(measured(job, Path(folder)))


def configured(job: Job, folder: Path) -> Any:
    """The configuration of a run: its domain's settings, its arm's, and what all runs share."""
    from gleanrl.config.settings import Config

    domain, arm, lr, seed = job
    settings: dict[str, Any] = {**DOMAINS[domain], **ARMS[arm]}
    points = settings.pop("points", POINTS)
    settings |= {
        **{"run.folder": str(folder), "run.seed": seed, "run.threads": 1, "learner.lr": lr},
        **{"environment.eval_tasks": settings.pop("held_out", HELD_OUT)},
        **{"evaluation.every": 0, "evaluation.samples": 1, "evaluation.greedy": False},
        **{"checkpoint.every": settings["run.steps"] // points, "checkpoint.keep": points + 1},
        **{"monitor.use": ["file", f"{__file__}:Clock"], "monitor.rollouts_per_step": 0},
    }
    return Config.model_validate(nested(settings, {}))


def nested(settings: Mapping[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """``data``, a configuration as it is read from TOML, with each ``section.key`` of the settings put in its place."""
    for name, value in settings.items():
        *sections, last = name.split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = dict(value) if isinstance(value, dict) else value
    return data


class Clock:
    """A monitor: CPU seconds of this process at the end of each step."""

    def __init__(self, info: Any) -> None:
        self._path = info.folder.path / "clock.jsonl"

    def log(self, step: int, metrics: Any) -> None:
        if "time/step_s" in metrics:
            with self._path.open("a") as file:
                file.write(json.dumps([step, time.process_time()]) + "\n")

    def close(self) -> None:
        pass


async def measured(job: Job, folder: Path) -> dict[str, Any]:
    """Train, then evaluate every checkpoint: success over steps, fresh rollouts, sampled tokens and CPU seconds."""
    import torch

    from gleanrl.runtime.local import Builder
    from gleanrl.runtime.prepare import prepare
    from gleanrl.runtime.run_folder import RunFolder
    from gleanrl.tracking.monitors import Console, load_monitors
    from gleanrl.train import train

    domain, arm, lr, seed = job
    torch.set_num_threads(1)
    config = configured(job, folder)
    run_folder, console = RunFolder(config.path), Console()
    prepared = prepare(config, console)
    held_out = prepared.evaluation
    # the run's own evaluations, before and after, would only cost time
    builder = Builder(config, run_folder, replace(prepared, evaluation=held_out[:1]), console)
    at_first = await evaluated(builder, None, held_out, samples=1)
    curve = [{"step": 0, "rollouts": 0, "tokens": 0, "cpu_s": 0.0, **at_first}]
    start = time.process_time()
    async with builder.run(partial(load_monitors, config.monitor, console=console), resume=False) as run:
        await train(run)
    clock = [json.loads(text) for text in (run_folder.path / "clock.jsonl").read_text().splitlines()]
    rows = [row for row in run_folder.read_metrics() if "time/step_s" in row.metrics]
    folders = sorted(run_folder.checkpoints_path.glob("step-*"), key=lambda path: int(path.name[5:]))
    for checkpoint in folders:
        step = int(checkpoint.name[5:])
        so_far = [row.metrics for row in rows if row.step <= step]
        success = await evaluated(builder, checkpoint, held_out, samples=4 if checkpoint == folders[-1] else 1)
        curve.append(
            {
                "step": step,
                "rollouts": step * config.schedule.batch * config.schedule.group - instead(config, so_far),
                "tokens": sum(metrics["tokens/sampled"] for metrics in so_far),
                "cpu_s": max(cpu for at, cpu in clock if at <= step) - start,
                **success,
            }
        )
    late = [row.metrics for row in rows[-len(rows) // 4 :]]
    names = sorted({name for metrics in late for name in metrics if name.startswith(TOLD)})
    means = {name: statistics.mean(metrics.get(name, 0.0) for metrics in late) for name in names}
    return {"domain": domain, "arm": arm, "lr": lr, "seed": seed, "curve": curve, "late": means}


async def evaluated(
    builder: Any, checkpoint: Path | None, held_out: Sequence[Any], *, samples: int
) -> dict[str, float]:
    """Success of sampled attempts with a checkpoint's weights, or the warm start's."""
    from gleanrl.rewards import EnvironmentReward
    from gleanrl.runtime.evaluation import evaluate
    from gleanrl.runtime.local import closing
    from gleanrl.schedule.schedule import Schedule

    schedule = Schedule.from_settings(builder.config.schedule)
    success = {}
    async with closing(builder.sampler(schedule, None, None)) as sampler, builder.environment_pool() as pool:
        if checkpoint is not None:
            learner = builder.learner(None, None)
            learner.load(checkpoint)
            await sampler.publish(learner.weights(), 0)
        player = builder.player(pool, sampler)
        for name, tasks in {"held_out": held_out, "train": builder.prepared.train[:HELD_OUT]}.items():
            seed = builder.config.run.seed
            metrics, _ = await evaluate(player, EnvironmentReward(), tasks, seed=seed, samples=samples, greedy=False)
            success[name] = metrics["eval/sampled/pass@1"]
    return success


def instead(config: Any, steps: Sequence[Any]) -> float:
    """Fresh rollouts whose places stored ones took."""
    if not config.replay.enabled or config.replay.placement == "add":
        return 0
    return sum(metrics["replay/trajectories"] for metrics in steps)


if __name__ == "__main__":
    main()
