"""Measures whether experience replay improves success at equal budgets, in several environments and with several seeds.

    python benchmarks/replay_gain.py [show] [--save FILE ...] [--domains NAME ...] [--arms NAME ...] [--svg FILE]
    python benchmarks/replay_gain.py sizes [--save FILE ...] [--svg FILE]
    python benchmarks/replay_gain.py run [--save FILE] [--domains NAME ...] [--arms NAME ...] [--lrs RATE ...]
        [--seeds 0] [--points N]

A run is `gleanrl train` with the settings of its domain and arm (`replay_arms.py`) and a learning rate: that of the
domain, or 1e-4. Several rates are measured for each arm, and arms are compared at their best rate. The seed determines
the households or words, the demonstrations, the warm start and all samples, so the arms of a seed start equal.
(TextWorld games are the same for all seeds, because they take minutes to compile.)

Checkpoints are evaluated after the run, by sampled attempts on held-out and on training tasks. The CPU seconds of a run
are therefore those of training alone; with one thread, they are the time on a core that no other process uses.

`run` appends a JSON line to FILE (default: `results/replay_gain.jsonl`) for each run, and skips runs that it already
contains. `show` prints the results. `sizes` prints the gain of replay by the size of the model, from the runs of the
domains that `SIZES` contains. `run` and `show` leave these domains out unless they are named.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import replay_tables as tables
from replay_arms import ARMS, DOMAINS, HEADLINE, SIZES, Settings

RESULTS = Path(__file__).parent / "results" / "replay_gain.jsonl"
HELD_OUT = 128  # number of held-out tasks on which success is measured
POINTS = 6  # number of evaluations of a run, without the one before training
TOLD = ("replay/", "loss/", "pool/", "reward/", "tokens/", "replay_update/", "groups/", "time/")

Job = tuple[str, str, float, int]  # domain, arm, learning rate, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show", "sizes"], nargs="?", default="show")
    parser.add_argument(
        "--save", type=Path, nargs="+", default=[RESULTS], help="JSON lines; `show` takes several files"
    )
    parser.add_argument("--svg", type=Path, help="show: draw the curves of --arms there; sizes: the gains")
    parser.add_argument("--domains", nargs="+", choices=list(DOMAINS), metavar="DOMAIN")
    parser.add_argument("--arms", nargs="+", default=HEADLINE, choices=list(ARMS), metavar="ARM")
    parser.add_argument("--lrs", type=float, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--points", type=int, help="run: evaluations of a run, without the one before training")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    args = parser.parse_args()
    # The sizes are run only if they are named, because the largest one takes minutes a run.
    args.domains = args.domains or [domain for domain in DOMAINS if (domain in SIZES) == (args.what == "sizes")]
    rows = [row for path in args.save for row in read(path) if row["domain"] in args.domains]
    if args.what == "sizes":
        tables.show_sizes(rows)
        if args.svg:
            args.svg.write_text(tables.draw_sizes(rows))
        return
    if args.what == "show":
        tables.show(rows, args.arms)
        if args.svg:
            args.svg.write_text(tables.draw([row for row in rows if row["arm"] in args.arms]))
        return
    wanted: list[Any] = [
        (domain, arm, lr, seed)
        for seed in args.seeds
        for domain in args.domains
        for lr in args.lrs or [DOMAINS[domain].get("learner.lr", 1e-4)]
        for arm in args.arms
    ]
    run_all(wanted, partial(one_run, points=args.points), args.save[0], args.jobs)


def run_all(wanted: Sequence[Job], one_run: Callable[[Job], dict[str, Any]], save: Path, jobs: int) -> None:
    """Make the ``wanted`` runs that ``save`` does not contain yet, ``jobs`` at once, and append a row for each."""
    done = {(row["domain"], row["arm"], row["lr"], row["seed"]) for row in read(save)}
    for row in rows_of([job for job in wanted if job not in done], one_run, jobs):
        with save.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(tables.line(row), flush=True)


def rows_of(wanted: Sequence[Any], one_run: Callable[[Any], dict[str, Any]], jobs: int) -> Iterator[dict[str, Any]]:
    """Make the ``wanted`` runs, ``jobs`` at once, and yield the row of each when it is done.

    A run that fails does not end the others. Raises `SystemExit` at the end if there were any.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    failed: list[str] = []
    with ThreadPoolExecutor(jobs) as threads:
        started = {threads.submit(alone, one_run, job): job for job in wanted}
        for future in as_completed(started):
            try:
                row = future.result()
            except Exception as error:
                failed.append(f"{started[future]}: {type(error).__name__}: {error}")
                print(f"failed: {failed[-1]}", flush=True)
            else:
                yield row
    if failed:
        raise SystemExit("\n".join([f"{len(failed)} runs failed:", *failed]))


def alone(one_run: Callable[[Any], dict[str, Any]], job: Any) -> dict[str, Any]:
    """Make a run in a process of its own, so that neither its caches nor its memory are those of another run."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(one_run, job).result()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def one_run(job: Job, *, points: int | None = None) -> dict[str, Any]:
    settings = {**DOMAINS[job[0]], **ARMS[job[1]]} | ({} if points is None else {"points": points})
    with quiet_folder() as folder:
        row = asyncio.run(measured(job, configured(job, folder, settings)))
    return row | {"processor": processor()}


def processor() -> str:
    """Return the name of the processor, and the instructions that decide how fast and how exact products are."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    flags = sorted(set(text.split()) & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return " ".join([*names[:1], *flags])


@contextlib.contextmanager
def quiet_folder() -> Iterator[Path]:
    """Yield a temporary folder for a run. Until it is deleted, nothing is written to stderr."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        yield Path(folder)


def configured(job: Job, folder: Path, settings: Settings) -> Any:
    """Return the configuration of a run: the ``settings`` of its domain and arm, and those that all runs share."""
    from gleanrl.config.settings import Config

    _, _, lr, seed = job
    values: dict[str, Any] = dict(settings)
    points = values.pop("points", POINTS)
    values |= {
        **{"run.folder": str(folder), "run.seed": seed, "run.threads": 1, "learner.lr": lr},
        **{"environment.eval_tasks": values.pop("held_out", HELD_OUT)},
        **{"evaluation.every": 0, "evaluation.samples": 1, "evaluation.greedy": False},
        **{"checkpoint.every": values["run.steps"] // points, "checkpoint.keep": points + 1},
        **{"monitor.use": ["file", f"{__file__}:Clock"], "monitor.rollouts_per_step": 0},
    }
    return Config.model_validate(nested(values, {}))


def nested(settings: Mapping[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Set each ``section.key`` of ``settings`` in ``data``, a nested configuration as read from TOML, and return it."""
    for name, value in settings.items():
        *sections, last = name.split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = dict(value) if isinstance(value, dict) else value
    return data


class Clock:
    """A monitor that records the CPU seconds of this process at the end of each step."""

    def __init__(self, info: Any) -> None:
        self._path = info.folder.path / "clock.jsonl"

    def log(self, step: int, metrics: Any) -> None:
        if "time/step_s" in metrics:
            with self._path.open("a") as file:
                file.write(json.dumps([step, time.process_time()]) + "\n")

    def close(self) -> None:
        pass


async def measured(
    job: Job,
    config: Any,
    *,
    at_start: bool = True,
    samples: tuple[int, int] = (4, 4),
    curriculum: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Train, evaluate all checkpoints, and return a row of results.

    Its curve has the success rates of each checkpoint, with the steps, fresh rollouts, sampled tokens and CPU seconds
    that were spent until then.

    Args:
        at_start: whether the curve begins with the policy after the warm start.
        samples: number of attempts at each held-out and at each training task with the checkpoints at the end and at
            half of the steps. With others, it is one.
        curriculum: returns the curriculum that takes the place of the one of the run that it gets.
    """
    import torch

    from gleanrl.runtime.local import Builder
    from gleanrl.runtime.prepare import prepare
    from gleanrl.runtime.run_folder import RunFolder
    from gleanrl.tracking.monitors import Console, load_monitors
    from gleanrl.train import train

    domain, arm, lr, seed = job
    torch.set_num_threads(1)
    run_folder, console = RunFolder(config.path), Console()
    prepared = prepare(config, console)
    held_out = prepared.evaluation
    # The run evaluates before and after training in any case, so let it do so on a single task to save time.
    builder = Builder(config, run_folder, replace(prepared, evaluation=held_out[:1]), console)
    curve: list[dict[str, float]] = []
    if at_start:
        success = await evaluated(builder, None, held_out, samples=(1, 1))
        curve.append({"step": 0, "rollouts": 0, "tokens": 0, "cpu_s": 0.0, **success})
    start = time.process_time()
    async with builder.run(partial(load_monitors, config.monitor, console=console), resume=False) as run:
        if curriculum is not None:
            run.plan.curriculum = curriculum(run)
        await train(run)
    clock = [json.loads(text) for text in (run_folder.path / "clock.jsonl").read_text().splitlines()]
    rows = [row for row in run_folder.read_metrics() if "time/step_s" in row.metrics]
    folders = sorted(run_folder.checkpoints_path.glob("step-*"), key=lambda path: int(path.name[5:]))
    for checkpoint in folders:
        step = int(checkpoint.name[5:])
        so_far = [row.metrics for row in rows if row.step <= step]
        counts = 2 * step == config.run.steps or checkpoint == folders[-1]
        success = await evaluated(builder, checkpoint, held_out, samples=samples if counts else (1, 1))
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
    row = {"domain": domain, "arm": arm, "lr": lr, "seed": seed, "curve": curve, "late": means}
    row["parameters"] = sum(parameter.numel() for parameter in prepared.model.parameters())
    return row | ({"uses": spread_of_uses(run_folder.experience_path)} if config.replay.enabled else {})


def spread_of_uses(pool: Path) -> dict[str, float]:
    """Return how evenly a run has used the trajectories that are in its pool at the end.

    These are the numbers of all of them and of those never used, and the share of all uses that the most used
    trajectories of the tasks have, one of each task.
    """
    from gleanrl.experience.pool import browse

    by_task: dict[str, list[int]] = {}
    with browse.reading(pool) as db:
        for line in browse.lines(db):
            by_task.setdefault(line.task, []).append(line.uses)
    uses = [count for counts in by_task.values() for count in counts]
    most = sum(max(counts) for counts in by_task.values())
    return {"stored": len(uses), "never": uses.count(0), "most": most / sum(uses) if any(uses) else 0.0}


async def evaluated(
    builder: Any, checkpoint: Path | None, held_out: Sequence[Any], *, samples: tuple[int, int]
) -> dict[str, float]:
    """Return the success rates of sampled attempts on held-out tasks and on training tasks.

    The weights are those of ``checkpoint``, or those after the warm start if it is None. ``samples`` are the numbers of
    attempts at each held-out and at each training task.
    """
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
        splits = {"held_out": held_out, "train": builder.prepared.train[:HELD_OUT]}
        for (name, tasks), number in zip(splits.items(), samples, strict=True):
            seed = builder.config.run.seed
            found = await evaluate(player, EnvironmentReward(), tasks, seed=seed, samples=number, greedy=False)
            success[name] = found.metrics()["eval/sampled/pass@1"]
    return success


def instead(config: Any, steps: Sequence[Any]) -> float:
    """Return how many fresh rollouts were not sampled because stored trajectories replaced them (placement "replace").

    0 if stored trajectories are added to groups.
    """
    if not config.replay.enabled or config.replay.placement == "add":
        return 0
    return sum(metrics["replay/trajectories"] for metrics in steps)


if __name__ == "__main__":
    main()
