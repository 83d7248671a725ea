"""Measures how stale the training data of each schedule is, and how success depends on the staleness.

    python benchmarks/staleness.py [show] [--save FILE ...] [--svg FILE]
    python benchmarks/staleness.py run histogram [--steps 16] [--seeds 0]
    python benchmarks/staleness.py run curves [--domain NAME] [--bounds 0 1 2 4 8] [--modes plain decoupled]
        [--lrs 4e-4] [--seeds 0 1 2] [--steps 60]

`histogram` runs the quickstart with each schedule, in steps of 8 groups of 4. The environment's reward is given either
at once, or after a random time of `--latency` seconds that depends only on the attempt.

`curves` runs the schedule `bounded_async` with each staleness bound. The sampler is faster than the learner and has
room for all episodes that the bound allows. So it samples ahead up to the bound in the first step, and from then on
each step is trained on data that is about as old as the bound, mostly one step less. There are two losses. `plain` is
PPO's clipped loss with the sampler's log-probs. `decoupled` recomputes the log-probs with the weights at the start of
the step (the proximal policy), clips the ratio to these, weights each token by its proximal / behaviour probability,
and masks tokens whose weight is above 5. All else is equal: tasks, warm start, fresh rollouts and updates. Checkpoints
are evaluated after the run, by sampled attempts.

`run` appends a JSON line to FILE (default: `results/staleness.jsonl`) for each run, and skips runs that it already
contains. `show` prints the results.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import staleness_tables as tables
from replay_arms import DOMAINS
from replay_gain import evaluated, nested, read

RESULTS = Path(__file__).parent / "results" / "staleness.jsonl"
HELD_OUT = 256  # number of held-out tasks on which success is measured
POINTS = 5  # number of evaluations of a run, without the one before training
SAMPLES = 4  # number of attempts at each task in the last evaluation; the others make one
PRESETS = ("sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async")
BOUNDS = (0, 1, 2, 4, 8)
MODES: dict[str, dict[str, Any]] = {
    "plain": {"learner.old_logprobs": "sampler"},
    "decoupled": {"learner.old_logprobs": "recompute", "loss.correction": "mask"},
}
TOLD = ("loss/", "reward/", "schedule/", "learner/grad_norm", "groups/")

Job = dict[str, Any]  # the settings that identify a run; part of its JSON line, so that `run` can skip finished runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"], nargs="?", default="show")
    parser.add_argument("part", choices=["histogram", "curves"], nargs="?", default="curves")
    parser.add_argument("--save", type=Path, nargs="+", default=[RESULTS], help="`show` takes several files")
    parser.add_argument("--svg", type=Path, help="show: draw the curves there")
    parser.add_argument("--domain", default="spell_backward", choices=list(DOMAINS), metavar="NAME")
    parser.add_argument("--schedules", nargs="+", default=list(PRESETS), choices=PRESETS, metavar="PRESET")
    parser.add_argument("--latency", type=float, nargs=2, default=(0.2, 6.0), help="of the slow reward, seconds")
    parser.add_argument("--bounds", type=int, nargs="+")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES), metavar="MODE")
    parser.add_argument("--lrs", type=float, nargs="+", default=[4e-4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, one thread each")
    args = parser.parse_args()
    if args.what == "show":
        rows = [row for path in args.save for row in read(path)]
        tables.show(rows)
        if args.svg:
            args.svg.write_text(tables.draw([row for row in rows if row["job"]["part"] == "curves"]))
        return
    save = args.save[0]
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = [row["job"] for row in read(save)]
    wanted = [job for job in (histograms if args.part == "histogram" else curves)(args) if job not in done]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for row in pool.imap_unordered(one_run, wanted):
            with save.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(tables.line(row), flush=True)


def histograms(args: argparse.Namespace) -> Iterator[Job]:
    for seed in args.seeds:
        for latency in (None, list(args.latency)):
            for preset in args.schedules:
                for bound in (args.bounds or (2, 8)) if preset == "bounded_async" else (None,):
                    name = {"part": "histogram", "schedule": preset, "bound": bound, "latency": latency}
                    yield {**name, "seed": seed, "steps": args.steps or 16}


def curves(args: argparse.Namespace) -> Iterator[Job]:
    for seed in args.seeds:
        for lr in args.lrs:
            for bound in args.bounds or BOUNDS:
                for mode in args.modes:
                    name = {"part": "curves", "domain": args.domain, "bound": bound, "mode": mode, "lr": lr}
                    yield {**name, "seed": seed, "steps": args.steps or DOMAINS[args.domain]["run.steps"]}


def one_run(job: Job) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        start = time.process_time()
        row = asyncio.run(measured(job, Path(folder)))
    return {"job": job, **row, "cpu_s": round(time.process_time() - start, 1)}


def settings_of(job: Job) -> dict[str, Any]:
    if job["part"] == "histogram":
        slow = {"reward.name": f"{__file__}:Slow", "reward.options": {"latency": job["latency"]}}
        slow |= {"reward.cache": 0, "reward.journal": False}  # otherwise the reward of a repeated answer has no latency
        return {
            **{"schedule.preset": job["schedule"], "schedule.staleness": job["bound"] or 0},
            **{"schedule.batch": 8, "schedule.group": 4, "learner.updates_per_step": 2},
            **{"environment.train_tasks": 64, "environment.eval_tasks": 1},
            **(slow if job["latency"] else {}),
        }
    points = {"checkpoint.every": job["steps"] // POINTS, "checkpoint.keep": POINTS + 1}
    settings = {**DOMAINS[job["domain"]], **MODES[job["mode"]], "learner.lr": job["lr"], **points}
    settings = {name: value for name, value in settings.items() if "." in name}  # without those of `replay_gain.py`
    rows = (max(BOUNDS) + 1) * int(settings["schedule.batch"]) * int(settings["schedule.group"])
    bounded = {"schedule.preset": "bounded_async", "schedule.staleness": job["bound"], "schedule.chunks": 1}
    return {**settings, **bounded, "sampler.max_rows": rows, "environment.eval_tasks": HELD_OUT}


def configured(job: Job, folder: Path) -> Any:
    """Return the configuration of a run: the settings of ``job``, and those that all runs share."""
    from gleanrl.config.settings import Config

    settings = {
        **{"checkpoint.every": 0, **settings_of(job)},
        **{"run.folder": str(folder), "run.name": "run", "run.seed": job["seed"], "run.threads": 1},
        **{"run.steps": job["steps"], "evaluation.every": 0, "evaluation.samples": 1, "evaluation.greedy": False},
        **{"monitor.use": ["file"], "monitor.rollouts_per_step": 0},
    }
    quickstart = (resources.files("gleanrl.config") / "presets" / "quickstart.toml").read_text()
    return Config.model_validate(nested(settings, tomllib.loads(quickstart) if job["part"] == "histogram" else {}))


class Slow:
    """A reward that returns the environment's own score after a latency that depends only on the attempt."""

    def __init__(self, latency: Sequence[float]) -> None:
        self.latency = latency

    async def compute_score(self, request: Any) -> Any:
        draw = int(hashlib.sha256(request.trajectory_id.encode()).hexdigest()[:8], 16) / 16**8
        low, high = self.latency
        await asyncio.sleep(low + (high - low) * draw)
        return request.own


async def measured(job: Job, folder: Path) -> dict[str, Any]:
    """Train, evaluate all checkpoints, and return a row of results.

    It has the staleness histograms, the means of metrics in the last quarter of the steps, and the success rate of each
    checkpoint.
    """
    import torch

    from gleanrl.runtime.local import Builder
    from gleanrl.runtime.prepare import prepare
    from gleanrl.runtime.run_folder import RunFolder
    from gleanrl.tracking.monitors import Console, load_monitors
    from gleanrl.train import train

    torch.set_num_threads(1)
    config = configured(job, folder)
    run_folder, console = RunFolder(config.path), Console()
    prepared = prepare(config, console)
    held_out = prepared.evaluation
    # The run evaluates before and after training in any case, so let it do so on a single task to save time.
    builder = Builder(config, run_folder, replace(prepared, evaluation=held_out[:1]), console)
    curve = []
    if job["part"] == "curves":
        curve.append({"step": 0, **await evaluated(builder, None, held_out, samples=(1, 1))})
    async with builder.run(partial(load_monitors, config.monitor, console=console), resume=False) as run:
        await train(run)
    steps = [row.metrics for row in run_folder.read_metrics() if "time/step_s" in row.metrics]
    for checkpoint in sorted(run_folder.checkpoints_path.glob("step-*"), key=lambda path: int(path.name[5:])):
        if job["part"] == "curves":
            step = int(checkpoint.name[5:])
            samples = SAMPLES if step == job["steps"] else 1
            curve.append({"step": step, **await evaluated(builder, checkpoint, held_out, samples=(samples, samples))})
    late = steps[-len(steps) // 4 :]
    names = sorted({name for metrics in late for name in metrics if name.startswith(TOLD)})
    told = {name: statistics.mean(metrics.get(name, 0.0) for metrics in late) for name in names}
    return {
        "groups": ages(steps, "schedule/staleness/"),
        "tokens": ages(steps, "schedule/token_staleness/"),
        "dropped": sum(step.get("groups/dropped_stale", 0) for step in steps),
        "reward": [round(metrics["reward/success"], 4) for metrics in steps],
        "curve": curve,
        "late": told,
    }


def ages(steps: Sequence[Any], prefix: str) -> dict[str, int]:
    """Sum the metrics ``prefix`` + staleness over all steps: the number of groups or tokens of each staleness."""
    counts: Counter[int] = Counter()
    for metrics in steps:
        counts.update({int(name[len(prefix) :]): int(n) for name, n in metrics.items() if name.startswith(prefix)})
    return {str(age): counts[age] for age in sorted(counts)}


if __name__ == "__main__":
    main()
