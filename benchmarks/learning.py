"""Compares ways to train a policy after the same warm start: imitation of an expert or of its own successes, and RL.

    python benchmarks/learning.py [show [RECIPE]] [--save FILE ...] [--svg FILE]
    python benchmarks/learning.py run RECIPE [--arms NAME ...] [--seeds 0 1 2] [--equal seconds] [--points 1]
        [--save FILE] [--jobs 1] [--section.key value ...]

RECIPE is a preset or a TOML file; settings override its own. The seed determines the tasks of all three splits, the
demonstrations, the warm start and all samples. The arms of a seed start from the same warm-started weights:

* ``before``: no further training.
* ``continued sft``: the supervised training of the warm start continues on the same demonstrations.
* ``filtered bc``: filtered behaviour cloning. It is the same run as ``grpo``, but the advantage of a success is 1 and
  that of a failure is 0. So the policy imitates its own successes, without a baseline, and learns nothing from
  failures.
* ``grpo``: `gleanrl train RECIPE`.
* ``grpo with replay``: the same with `--replay.enabled true`.
* ``gigpo with replay``: this with `--credit.estimator gigpo`.

By default the arms train on an equal number of episodes. The arms with RL make the same steps, and replay trains on
stored successes in addition to its fresh episodes. Continued SFT makes as many updates as ``grpo``, on as many
demonstrations each as ``grpo`` has episodes in an update.

With ``--equal seconds``, continued SFT and filtered BC train for the seconds that the steps of ``grpo`` took with the
same seed. FILE must contain that run, or it is among the runs to make. Filtered BC makes up to 15 % more steps if they
fit into the time; the learning rate decays over this number. This needs a machine without other work.

Success is measured by sampled attempts on held-out tasks, `evaluation.samples` of them each. Checkpoints are evaluated
after the run, `--points` of them in equal distances. Seconds and CPU seconds are those of the training alone.

`run` appends a JSON line to FILE (default: `results/real_model.jsonl`) for each run, and skips runs that FILE already
contains. Each run is a process of its own with one thread; `--jobs` of them run at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gleanrl.algorithms.advantages import Rewards, estimator
from gleanrl.cli.main import parse_overrides
from gleanrl.config import loading as configuration
from gleanrl.config.settings import Config
from gleanrl.learners.models import compute_dtype
from gleanrl.learners.supervised import fine_tune
from gleanrl.protocols import Metrics
from gleanrl.runtime.local import Builder, evaluate_with, run_evaluation, set_up_libraries
from gleanrl.runtime.prepare import prepare, supervised_examples
from gleanrl.runtime.run_folder import Checkpoint, RunFolder
from gleanrl.tracking.monitors import Console, load_monitors
from gleanrl.train import train
from gleanrl.types import Group
from gleanrl.utils.seeding import derive
from replay_gain import processor, read, rows_of
from replay_tables import interval

RESULTS = Path(__file__).parent / "results" / "real_model.jsonl"
METRIC = "eval/sampled/pass@1"
ARMS: dict[str, list[tuple[str, str]]] = {
    "before": [],
    "grpo": [],  # second, because `--equal seconds` needs its time
    "continued sft": [],
    "filtered bc": [("credit.estimator", "filtered_bc")],
    "grpo with replay": [("replay.enabled", "true")],
    "gigpo with replay": [("replay.enabled", "true"), ("credit.estimator", "gigpo")],
}

SPENT = ("episodes", "seconds", "cpu_s")

Job = dict[str, Any]  # the settings that identify a run; part of its JSON line, so that `run` can skip finished runs


@estimator("filtered_bc", group_local=True)
def filtered_bc(rewards: Rewards) -> tuple[torch.Tensor, torch.Tensor]:
    """Use the score, which is 1 for a success and 0 for a failure, as the advantage of each token."""
    scores = rewards.scores[:, None]
    return scores, scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"], nargs="?", default="show")
    parser.add_argument("recipe", nargs="?", help="a preset or a TOML file; show: only its runs")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--equal", choices=["episodes", "seconds"], default="episodes")
    parser.add_argument("--points", type=int, default=1, help="evaluations of a run; several make the curve of --svg")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, one thread each")
    parser.add_argument("--save", type=Path, nargs="+", default=[RESULTS], help="`show` takes several files")
    parser.add_argument("--svg", type=Path, help="show: draw the curves of `grpo`, and the other arms as levels")
    args, rest = parser.parse_known_args()
    if args.what == "show":
        rows = [row for path in args.save for row in read(path) if args.recipe in (None, row["job"]["recipe"])]
        show(rows)
        if args.svg:
            args.svg.write_text(draw(rows))
        return
    if args.recipe is None:
        parser.error("run needs a preset or a TOML file")
    shared = {"recipe": args.recipe, "settings": rest, "equal": args.equal, "points": args.points}
    save = args.save[0]
    seen = [row["job"] for row in read(save)]
    # With `--equal seconds`, the arms of the second wave need the time of `grpo`.
    waves = [["before", "grpo"], [arm for arm in ARMS if arm not in ("before", "grpo")]]
    for wave in waves:
        # Arms are in the outer loop, so that the first run of a seed has cached its warm start for the others.
        jobs = [{**shared, "arm": arm, "seed": seed} for arm in wave if arm in args.arms for seed in args.seeds]
        for row in rows_of([job for job in jobs if job not in seen], partial(one_run, save=save), args.jobs):
            with save.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    show(read(save))


def one_run(job: Job, save: Path) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        return measured(job, Path(folder), save)


def measured(job: Job, folder: Path, save: Path) -> dict[str, Any]:
    """Train, evaluate, and return a row of results. Its curve has the success of each evaluation."""
    config, console, arm = configured(job, folder), Console(), job["arm"]
    set_up_libraries(config)
    row: dict[str, Any] = {"job": job, "episodes": 0, "seconds": 0.0, "cpu_s": 0.0, "curve": []}
    if arm == "before":
        return row | {"curve": [point(0, run_evaluation(config, None, console).metrics)]}
    limit = seconds_of_grpo(job, save) if job["equal"] == "seconds" and arm != "grpo" else None
    prepared = prepare(config, console)
    row |= {"start": digest(prepared.model), "processor": processor()}
    started, cpu_before = time.perf_counter(), time.process_time()
    if arm == "continued sft":
        fine_tune(
            prepared.model,
            [shown[:2] for shown in supervised_examples(config, prepared.tokenizer, prepared.demonstrations)],
            steps=config.run.steps * config.learner.updates_per_step if limit is None else 10**6,
            batch=config.schedule.batch * config.schedule.group // config.learner.updates_per_step,
            # The rate is half that of the warm start. A lower constant rate would waste the time, and a higher one
            # would undo the warm start.
            lr=config.warm_start.lr / 2,
            seed=derive(job["seed"], "continued"),
            compute_dtype=compute_dtype(config.model, prepared.model.device),
            deadline_s=limit,
        )
    else:
        # The run evaluates before and after training in any case, so let it do so on a single task to save time.
        single = replace(prepared, evaluation=prepared.evaluation[:1])
        asyncio.run(trained(Builder(config, RunFolder(config.path), single, console), limit))
    row |= {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu_before}
    if arm == "continued sft":
        evaluation = asyncio.run(evaluate_with(Builder(config, RunFolder(config.path), prepared, console), None))
        return row | {"curve": [point(config.run.steps, evaluation.metrics)]}
    del prepared, single  # an evaluation loads a model of its own
    paths = RunFolder(config.path).checkpoints_path.glob("step-*")
    checkpoints = sorted((Checkpoint(int(path.name[5:]), path) for path in paths), key=lambda found: found.step)
    row["curve"] = [point(found.step, run_evaluation(config, found, console).metrics) for found in checkpoints]
    return row | {"episodes": checkpoints[-1].step * config.schedule.batch * config.schedule.group}


def digest(model: torch.nn.Module) -> str:
    """Return a hash of a model's weights. Another processor rounds differently and warm-starts to other weights."""
    total = hashlib.sha256()
    for weights in model.state_dict().values():
        total.update(weights.detach().cpu().contiguous().view(torch.uint8).numpy())
    return total.hexdigest()[:16]


def configured(job: Job, folder: Path) -> Config:
    """Return the configuration of a run: its recipe, the overrides, its arm, and what is the same in all runs."""

    def load(*more: tuple[str, str]) -> Config:
        own = [("run.seed", str(job["seed"])), ("run.folder", str(folder)), ("run.threads", "1")]
        own += [("evaluation.every", "0"), ("evaluation.greedy", "false"), ("monitor.use", '["file"]')]
        return configuration.load(job["recipe"], [*parse_overrides(job["settings"]), *ARMS[job["arm"]], *own, *more])

    steps = load().run.steps
    if job["equal"] == "seconds" and job["arm"] == "filtered bc":
        steps = math.ceil(1.15 * steps)
    every, keep = str(steps // job["points"]), str(job["points"] + 1)
    return load(("run.steps", str(steps)), ("checkpoint.every", every), ("checkpoint.keep", keep))


def seconds_of_grpo(job: Job, save: Path) -> float:
    [seconds] = [row["seconds"] for row in read(save) if row["job"] == {**job, "arm": "grpo"}]
    return seconds


async def trained(builder: Builder, limit: float | None) -> None:
    """Train until all steps are done or, if there is a limit, the steps have taken ``limit`` seconds."""
    builder.folder.path.mkdir(parents=True)
    monitors = partial(load_monitors, builder.config.monitor, console=builder.console)
    async with builder.run(monitors, resume=False) as run:
        on_step, left = run.observer.on_step, math.inf if limit is None else limit

        def counted(step: int, groups: Sequence[Group], metrics: Metrics, dropped: Sequence[Group] = ()) -> None:
            nonlocal left
            on_step(step, groups, metrics, dropped)
            left -= metrics["time/step_s"]
            if left <= 0:
                run.interruption.interrupt()

        run.observer.on_step = counted  # type: ignore[method-assign]
        await train(run)


def point(step: int, metrics: Metrics) -> dict[str, float]:
    """Return the success of an evaluation, and its 95 % interval over tasks."""
    return {
        "step": step,
        "success": metrics[METRIC],
        "low": metrics[f"{METRIC}_low"],
        "high": metrics[f"{METRIC}_high"],
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table for each recipe with its settings: the success after each arm, and what the arm took."""
    for recipe, settings, equal in dict.fromkeys(map(kind, rows)):
        own = [row for row in rows if kind(row) == (recipe, settings, equal)]
        seeds = sorted({row["job"]["seed"] for row in own})
        print(f"\n## {' '.join([recipe, *settings])}, equal {equal}\n")
        print("Success on held-out tasks, with 95 % intervals: over tasks for each seed, over seeds for their mean and")
        print("for the gain over `before`, which is paired by seed. Episodes, minutes and CPU seconds are means.\n")
        heads = ["arm", *(f"seed {seed}" for seed in seeds), "mean", "gain", "episodes", "minutes", "CPU s"]
        print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
        ends = {(row["job"]["arm"], row["job"]["seed"]): row["curve"][-1] for row in own}
        for arm in ARMS:
            runs = {row["job"]["seed"]: row for row in own if row["job"]["arm"] == arm}
            if not runs:
                continue
            cells = [arm]
            for seed in seeds:
                end = ends.get((arm, seed))
                cells.append(f"{end['success']:.3f} ({end['low']:.2f} to {end['high']:.2f})" if end else "")
            cells.append(with_interval([ends[arm, seed]["success"] for seed in runs]))
            paired = [seed for seed in runs if ("before", seed) in ends and arm != "before"]
            gains = [ends[arm, seed]["success"] - ends["before", seed]["success"] for seed in paired]
            cells.append(with_interval(gains, "+") if gains else "")
            episodes, seconds, cpu_s = (statistics.mean(row[name] for row in runs.values()) for name in SPENT)
            print(f"| {' | '.join(cells)} | {episodes:.0f} | {seconds / 60:.1f} | {cpu_s:.0f} |")


def kind(row: dict[str, Any]) -> tuple[str, tuple[str, ...], str]:
    """Return what the rows of a table have in common: the recipe, its settings, and what is equal for all arms."""
    return row["job"]["recipe"], tuple(row["job"]["settings"]), row["job"]["equal"]


def with_interval(values: Sequence[float], sign: str = "") -> str:
    mean = f"{statistics.mean(values):{sign}.3f}"
    return f"{mean} ± {interval(values):.3f}" if len(values) > 2 else mean


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """Draw an SVG and return its text.

    It shows the success of ``grpo`` on held-out tasks by step, with a line for each seed and one for their mean, and
    the mean success of the other arms as horizontal lines.
    """
    start = {row["job"]["seed"]: row["curve"] for row in rows if row["job"]["arm"] == "before"}
    curves = [start[row["job"]["seed"]] + row["curve"] for row in rows if row["job"]["arm"] == "grpo"]
    steps = [found["step"] for found in curves[0]]
    mean = [statistics.mean(found["success"] for found in column) for column in zip(*curves, strict=True)]
    width, height, left, bottom, last = 720, 360, 52, 40, steps[-1]

    def at(step: float, value: float) -> str:
        x = left + (width - left - 150) * step / last
        return f"{x:.1f},{height - bottom - (height - bottom - 16) * value:.1f}"

    def line(points: Iterable[tuple[float, float]], style: str) -> str:
        return f'<polyline fill="none" points="{" ".join(at(*point) for point in points)}" {style}/>'

    def label(step: float, value: float, text: str, style: str, dx: int = 8) -> str:
        x, y = at(step, value).split(",")
        return f'<text x="{float(x) + dx:.1f}" y="{float(y) + 4:.1f}" {style}>{text}</text>'

    grey, blue = 'fill="#777"', 'fill="#2563eb" font-weight="bold"'
    parts = [line([(0, v), (last, v)], 'stroke="#8884" stroke-width="1"') for v in (0, 0.25, 0.5, 0.75, 1)]
    parts += [label(0, v, f"{v:.0%}", grey + ' text-anchor="end"', -8) for v in (0, 0.25, 0.5, 0.75, 1)]
    for curve in curves:
        points = [(found["step"], found["success"]) for found in curve]
        parts += [line(points, 'stroke="#2563eb" stroke-opacity="0.35" stroke-width="1.5"')]
    parts += [
        line(zip(steps, mean, strict=True), 'stroke="#2563eb" stroke-width="3"'),
        label(last, mean[-1] + 0.055, f"GRPO {mean[-1]:.0%}", blue),
    ]
    for arm in ARMS:
        ends = [row["curve"][-1]["success"] for row in rows if row["job"]["arm"] == arm != "grpo"]
        if ends:
            level = statistics.mean(ends)
            parts += [line([(0, level), (last, level)], 'stroke="#777" stroke-width="1.5" stroke-dasharray="5 5"')]
            parts += [label(last, level, f"{arm} {level:.0%}", grey)]
    below = grey + ' text-anchor="middle" dy="20"'
    parts += [label(last * quarter / 4, 0, f"{last * quarter // 4}", below, 0) for quarter in range(4)]
    parts += [label(last, 0, f"{last} steps", below, 0)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
    return head + 'font-size="13">' + "".join(parts) + "</svg>\n"


if __name__ == "__main__":
    main()
