"""Measures how much each schedule gains if rewards are slow: a preset with a local reward service, several seeds.

    python benchmarks/overlap.py [show] [--save FILE]
    python benchmarks/overlap.py run [--steps 40] [--seeds 0 1 2] [--schedules NAME ...] [--section.key value ...]
    python benchmarks/overlap.py run --preset smollm2 --steps 4 --seeds 0 --attempts 0 --threads 2 \
        --schedule.batch 4 --schedule.group 5 --context.max_turns 6 --loss.entropy_coefficient 1e-6

A run (which needs `pip install 'gleanrl[rewards]'`) is `gleanrl train PRESET`, except that its rewards come over HTTP
from another process, which waits and then returns the environment's own score. The proportions are those of a published
measurement (verl PR 2854): 238 s of compute per step, rewards that take 1 to 40 s (uniformly distributed), and a
service that computes 1/20 of a step's rewards at the same time. For each seed, these runs are made:

1. The schedule "sync" with instant rewards. Its median step time c is this machine's compute time per step. From this
   run alone `gleanrl simulate` predicts the time of all others, before they begin.
2. Each schedule with rewards that take 1 to 40 s times c / 238, twice: with a concurrency of the service ("places") of
   1/20 of a step's samples, rounded up, and with an unlimited one.

The latency of a request depends only on the seed and on the trajectory's id, so it is the same in all schedules. Cache
and journal are off, because they would avoid some of the requests. The runs of a seed share the warm start. Success on
held-out tasks is measured by sampled attempts after a run and is not part of its time; with `--attempts 0` it is not
measured.

A learner leaves out samples without an advantage, such as those of a group that has solved nothing, so a step's work
depends on what was sampled. The second example's entropy term, which is too small to matter, makes it train on all.

`run` appends a JSON line to FILE (default: `results/overlap.jsonl`) for each run, and skips runs that it already
contains. `show` prints the results. The times are meaningful only on an otherwise idle machine.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import overlap_tables as tables
from gleanrl.cli.main import parse_overrides
from gleanrl.simulate.workload import PRESETS

RESULTS = Path(__file__).parent / "results" / "overlap.jsonl"
LIFTED = 4096  # concurrency of the service in the runs where it shall be no limit
BACKLOG = 4096  # maximum number of connections that wait to be accepted
HELD_OUT = 128  # number of tasks on which success is measured

Overrides = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Job:
    """One run.

    ``places`` is the number of rewards that the service computes at the same time; 0 = the environment gives the
    rewards, without a service.
    """

    preset: str
    seed: int
    schedule: str
    places: int
    steps: int
    threads: int
    attempts: int  # sampled attempts at each held-out task
    overrides: Overrides
    latency_s: tuple[float, float] = (0.0, 0.0)
    url: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        changes = sorted(list(change) for change in self.overrides)
        return (self.preset, self.seed, self.schedule, self.places, self.steps, self.threads, json.dumps(changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"], nargs="?", default="show")
    parser.add_argument("--save", type=Path, default=RESULTS, help="JSON lines")
    parser.add_argument("--preset", default="quickstart", help="what is trained (default: quickstart)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--schedules", nargs="+", default=list(PRESETS), choices=PRESETS, metavar="SCHEDULE")
    parser.add_argument(
        "--places",
        nargs="+",
        default=["published", "lifted"],
        choices=["published", "lifted"],
        help="concurrency of the reward service: 1/20 of a step's samples, or unlimited",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of concurrent runs; above 1 they slow each other down"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch in each run")
    parser.add_argument("--attempts", type=int, default=4, help="sampled attempts at each held-out task after a run")
    args, rest = parser.parse_known_args()
    if args.steps < 4:
        parser.error(f"--steps is {args.steps}; it must be at least 4")
    if args.what == "run":
        run(args, tuple(parse_overrides(rest)))
    elif rest:
        parser.error(f"unknown option {rest[0]}")
    tables.show(read(args.save))


def run(args: argparse.Namespace, overrides: Overrides) -> None:
    """Make all runs that FILE lacks. The runs with instant rewards come first, because the latencies depend on them."""
    from gleanrl.rewards.http import HttpReward

    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    sizes = (args.steps, args.threads, args.attempts, overrides)
    instant = [Job(args.preset, seed, "sync", 0, *sizes) for seed in args.seeds]
    # Each run has its own process, because a process keeps the memory that a learner has freed.
    with serving() as url, multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        HttpReward(url)  # raises an error if a package is missing that only the later runs need
        measure(instant, args.save, pool)
        rows = {row["seed"]: row for row in read(args.save) if row_key(row) in {job.key for job in instant}}
        slow = []
        for job in instant:
            row = rows[job.seed]
            latency_s = tables.latency_s(row["compute_s"])
            places = {"published": tables.published_places(row), "lifted": LIFTED}
            slow += [
                replace(job, schedule=schedule, places=places[name], latency_s=latency_s, url=url)
                for name in args.places
                for schedule in args.schedules
            ]
            for schedule, number in dict.fromkeys((job.schedule, job.places) for job in slow):
                seconds = tables.simulated(row, schedule, number).step_s
                print(f"seed {job.seed}, {schedule}, {number} places: predicted {seconds:.2f} s per step", flush=True)
        measure(slow, args.save, pool)
        pool.close()
        pool.join()


def measure(jobs: Sequence[Job], path: Path, pool: Any) -> None:
    done = {row_key(row) for row in read(path)}
    for row in pool.imap_unordered(one_run, [job for job in jobs if job.key not in done]):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(tables.line(row), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    changes = json.dumps(row["overrides"])
    return (tables.preset(row), row["seed"], row["schedule"], row["places"], row["steps"], row["threads"], changes)


# --- one run --------------------------------------------------------------------------------------
def one_run(job: Job) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        return asyncio.run(measured(job, Path(folder)))


def configured(job: Job, folder: Path) -> Any:
    """Return the preset's configuration with the schedule and rewards of ``job``.

    Checkpoints and evaluations during the run are switched off.
    """
    from gleanrl.config import loading as configuration

    settings = {
        **{"run.folder": str(folder), "run.seed": job.seed, "run.steps": job.steps, "run.threads": job.threads},
        **{"environment.eval_tasks": HELD_OUT, "evaluation.every": 0, "evaluation.at_start": "false"},
        **{"evaluation.samples": 1, "evaluation.greedy": "false", "checkpoint.every": 0, "monitor.use": '["file"]'},
        **{"monitor.rollouts_per_step": 0, "schedule.preset": job.schedule},
    }
    if job.places:
        low, high = job.latency_s
        fields = f"{{seed = {job.seed}, low = {low!r}, high = {high!r}}}"
        settings |= {
            **{"reward.name": "gleanrl.rewards.http:HttpReward", "reward.cache": 0, "reward.journal": "false"},
            **{"reward.options": f'{{url = "{job.url}", fields = {fields}}}', "reward.max_concurrency": job.places},
        }
    told = [(name, str(value)) for name, value in settings.items()]
    return configuration.load(job.preset, [*told, *job.overrides])


async def measured(job: Job, folder: Path) -> dict[str, Any]:
    """Train, evaluate the last weights, and return a row of results with the time series of each step."""
    import torch

    from gleanrl.runtime.local import Builder
    from gleanrl.runtime.prepare import prepare
    from gleanrl.runtime.run_folder import RunFolder
    from gleanrl.tracking.monitors import Console, load_monitors
    from gleanrl.train import train

    torch.set_num_threads(job.threads)
    config = configured(job, folder)
    run_folder, console = RunFolder(config.path), Console()
    prepared = prepare(config, console)
    held_out = prepared.evaluation
    # The run evaluates after training in any case, so let it do so on a single task to save time.
    builder = Builder(config, run_folder, replace(prepared, evaluation=held_out[:1]), console)
    before = None if job.places or not job.attempts else await evaluated(builder, None, held_out, job.attempts)
    async with builder.run(partial(load_monitors, config.monitor, console=console), resume=False) as running:
        await train(running)
    [checkpoint] = run_folder.checkpoints_path.glob("step-*")
    success = await evaluated(builder, checkpoint, held_out, job.attempts) if job.attempts else None
    steps = [row.metrics for row in run_folder.read_metrics() if "time/step_s" in row.metrics]
    series = {name: [round(step.get(metric, 0.0), 4) for step in steps] for name, metric in tables.SERIES.items()}
    return {
        **{"preset": job.preset, "seed": job.seed, "schedule": job.schedule, "places": job.places, "steps": job.steps},
        **{"threads": job.threads, "overrides": sorted(list(change) for change in job.overrides)},
        "samples": config.schedule.batch * config.schedule.group,
        **{name: getattr(config.schedule, name) for name in ("group", "chunks", "staleness")},
        "latency_s": job.latency_s,
        "compute_s": statistics.median(series["step_s"][tables.warm(job.steps) :]),
        "before": before,
        "success": success,
        "waiting_share": waiting(run_folder.timeline_path, sum(series["step_s"][tables.warm(job.steps) :])),
        **series,
    }


def waiting(timeline: Path, seconds: float) -> float:
    """Return the share of the run's last ``seconds`` in which the learner waited for groups and the device was idle."""
    from gleanrl.schedule.timeline import DEVICE_WORK, covered, read_timeline

    work, waits = [], []
    until = 0.0
    for span in read_timeline(timeline):
        times = (span["start"], span["end"])
        if span["kind"] in DEVICE_WORK:
            work.append(times)
        elif span["kind"] == "wait" and span["who"] == "train" and span["what"] == "groups":
            waits.append(times)
        if span["kind"] == "train":
            until = max(until, span["end"])
    since = until - seconds
    return round((covered([*work, *waits], since, until) - covered(work, since, until)) / seconds, 4)


async def evaluated(builder: Any, checkpoint: Path | None, tasks: Sequence[Any], attempts: int) -> float:
    """Return the success rate of sampled attempts at ``tasks``.

    The weights are those of ``checkpoint``, or those after the warm start if it is None.
    """
    from gleanrl.rewards import EnvironmentReward
    from gleanrl.runtime.evaluation import evaluate
    from gleanrl.runtime.local import closing
    from gleanrl.schedule.schedule import Schedule

    schedule = Schedule.from_settings(builder.config.schedule)
    async with closing(builder.sampler(schedule, None, None)) as sampler, builder.environment_pool() as pool:
        if checkpoint is not None:
            learner = builder.learner(None, None)
            learner.load(checkpoint)
            await sampler.publish(learner.weights(), 0)
        player, seed = builder.player(pool, sampler), builder.config.run.seed
        found = await evaluate(player, EnvironmentReward(), tasks, seed=seed, samples=attempts, greedy=False)
    return found.metrics()["eval/sampled/pass@1"]


# --- the reward service ---------------------------------------------------------------------------
@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Start the process of the reward service, yield its address, and end it with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()


def serve(parent: Connection) -> None:
    from gleanrl.utils.http import connection_limit

    connection_limit(2 * LIFTED)

    async def forever() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=BACKLOG, limit=1 << 20)
        parent.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(forever())


async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection: a minimal HTTP/1.1 server for a client that reuses its connections."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            size = int(head.partition("content-length:")[2].partition("\r\n")[0])
            asked = json.loads(await reader.readexactly(size))
            await asyncio.sleep(tables.latency(asked["seed"], asked["trajectory_id"], (asked["low"], asked["high"])))
            body = json.dumps({"score": asked["environment_score"]}).encode()
            fields = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(f"HTTP/1.1 200 OK\r\n{fields}".encode() + body)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    main()
