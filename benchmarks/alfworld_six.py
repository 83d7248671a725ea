"""Measures success on ALFWorld's six kinds of tasks before and after training, on seen and on unseen room layouts.

    python benchmarks/alfworld_six.py show
    python benchmarks/alfworld_six.py run [--arms on-policy replay] [--seeds 0 1 2] [--section.key value ...]

A run is `gleanrl train alfworld_six`; in the arm `replay`, experience replay is enabled. The seed determines the
households of all splits, the demonstrations, the warm start and all samples, so the arms of a seed start equal. The
policy is evaluated before and after training, by sampled attempts on held-out households. Half of these have a layout
(kind of room and furniture) that also occurs in training ("seen"), the other half have layouts that do not ("unseen").

The 95 % confidence intervals are over households and do not include the variance between seeds; for that, the result
of each seed is printed too. `run` appends a JSON line to the results file for each run and skips runs that it already
contains. Each run uses one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "alfworld_six.jsonl"
ARMS: dict[str, dict[str, str]] = {"on-policy": {}, "replay": {"replay.enabled": "true"}}
KINDS = ("put", "examine", "clean", "heat", "cool", "put_two")
TASKS, SAMPLES = 480, 4  # number of held-out households, and of attempts at each

Rates = dict[str, list[float]]  # kind of task -> success rate on each household


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"], nargs="?", default="show")
    parser.add_argument("--save", type=Path, default=RESULTS, help="JSON lines")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args, rest = parser.parse_known_args()
    if args.what == "run":
        os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        done = {(row["arm"], row["seed"], tuple(row["settings"])) for row in read(args.save)}
        for seed in args.seeds:
            for arm in args.arms:
                if (arm, seed, tuple(rest)) not in done:
                    row = one_run(arm, seed, rest)
                    with args.save.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(f"{arm}, seed {seed}: {row['cpu_s']:.0f} s of CPU, {line(row)}", flush=True)
    show([row for row in read(args.save) if tuple(row["settings"]) == tuple(rest)])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def one_run(arm: str, seed: int, settings: Sequence[str]) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        return asyncio.run(measured(arm, seed, settings, Path(folder)))


async def measured(arm: str, seed: int, settings: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train once, and return a row of results with the success rates before and after training."""
    from gleanrl.cli.main import parse_overrides
    from gleanrl.config import loading as configuration
    from gleanrl.runtime.local import Builder
    from gleanrl.runtime.prepare import prepare
    from gleanrl.runtime.run_folder import RunFolder
    from gleanrl.tracking.monitors import Console, load_monitors
    from gleanrl.train import train

    own = {
        **{"run.seed": str(seed), "run.folder": str(folder), "run.threads": "1"},
        **{"environment.eval_tasks": str(TASKS), "environment.options.eval_split": "both"},
        **{"evaluation.every": "0", "evaluation.samples": "1", "evaluation.at_start": "false"},
        **{"checkpoint.every": "0", "monitor.use": '["file"]', "monitor.rollouts_per_step": "0"},
    }
    config = configuration.load("alfworld_six", [*own.items(), *ARMS[arm].items(), *parse_overrides(settings)])
    started, began = time.process_time(), time.perf_counter()
    run_folder, console = RunFolder(config.path), Console()
    prepared = prepare(config, console)
    prepare_s = time.process_time() - started
    builder = Builder(config, run_folder, prepared, console)
    before = await judged(builder, None)
    started = time.process_time()
    async with builder.run(partial(load_monitors, config.monitor, console=console), resume=False) as run:
        await train(run)
    train_s = time.process_time() - started
    checkpoint = max(run_folder.checkpoints_path.glob("step-*"), key=lambda path: int(path.name[5:]))
    after = await judged(builder, checkpoint)
    rows = [row.metrics for row in run_folder.read_metrics() if "reward/success" in row.metrics]
    return {
        **{"arm": arm, "seed": seed, "settings": list(settings), "steps": len(rows)},
        **{"prepare_s": prepare_s, "cpu_s": train_s, "wall_s": time.perf_counter() - began},
        **{"before": before, "after": after, "curve": [round(row["reward/success"], 4) for row in rows]},
    }


async def judged(builder: Any, checkpoint: Path | None) -> Rates:
    """Return the success rate of sampled attempts on each held-out household.

    The weights are those of ``checkpoint``, or those after the warm start if it is None.
    """
    from gleanrl.rewards import EnvironmentReward
    from gleanrl.runtime.evaluation import evaluate
    from gleanrl.runtime.local import closing
    from gleanrl.schedule.schedule import Schedule

    tasks, schedule = builder.prepared.evaluation, Schedule.from_settings(builder.config.schedule)
    async with closing(builder.sampler(schedule, None, None)) as sampler, builder.environment_pool() as pool:
        if checkpoint is not None:
            learner = builder.learner(None, None)
            learner.load(checkpoint)
            await sampler.publish(learner.weights(), 0)
        player, seed = builder.player(pool, sampler), builder.config.run.seed
        found = await evaluate(player, EnvironmentReward(), tasks, seed=seed, samples=SAMPLES, greedy=False)
    rates: Rates = defaultdict(list)
    for task, attempts in zip(tasks, found.sampled, strict=True):
        rates[task.kind].append(sum(t.score.reaches(found.success_threshold) for t in attempts) / len(attempts))
    return dict(rates)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        print("there are no results yet; `python benchmarks/alfworld_six.py run` measures them")
        return
    print("success rates with 95 % confidence intervals over households, before and after training")
    for layouts in ("unseen", "seen"):
        arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
        print(f"\nsuccess on {layouts} layouts" + "".join(f"{name:>24}" for name in ("before", *arms)))
        for kind in (*KINDS, "all six"):
            cells = [rates_of(rows, "before", kind, layouts)]
            cells += [rates_of([row for row in rows if row["arm"] == arm], "after", kind, layouts) for arm in arms]
            print(f"{kind:<{19 + len(layouts)}}" + "".join(f"{interval(cell):>24}" for cell in cells))
    print("\nsuccess on unseen layouts, all six kinds of tasks, before -> after training")
    for row in sorted(rows, key=lambda row: (row["seed"], row["arm"])):
        print(
            f"  seed {row['seed']}, {row['arm']:<10} {line(row)}, {row['cpu_s']:.0f} s of CPU for {row['steps']} steps"
        )


def rates_of(rows: Sequence[Mapping[str, Any]], when: str, kind: str, layouts: str) -> list[float]:
    """Return the success rate on each household of each seed, for one kind of task or "all six".

    For ``when`` = "before" only one arm of each seed is used, because all arms start from the same weights.
    """
    if when == "before":
        rows = list({row["seed"]: row for row in rows}.values())
    kinds = KINDS if kind == "all six" else (kind,)
    return [rate for row in rows for each in kinds for rate in row[when].get(f"{each}_{layouts}", [])]


def interval(rates: Sequence[float]) -> str:
    from gleanrl.runtime.evaluation import mean_interval

    mean, low, high = mean_interval(rates)
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def line(row: Mapping[str, Any]) -> str:
    before, after = (statistics.mean(rates_of([row], when, "all six", "unseen")) for when in ("before", "after"))
    return f"{before:.3f} -> {after:.3f}"


if __name__ == "__main__":
    main()
