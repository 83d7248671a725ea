"""Measures the overhead of the Ray runtime compared with the local runtime: seconds per step and per group.

    python benchmarks/ray_overhead.py [--steps 6] [--rounds 3] [--samplers 1 2] [--section.key value ...]

The same job (by default the quickstart's, without evaluations during training) makes ``--steps`` steps in the local
runtime, then ``--steps`` steps with Ray actors. This is repeated ``--rounds`` times, in one process. The actors are
started only once; each round has a new run folder.

The time of a step is the metric ``time/step_s``, which includes sampling, rewards, update and publication. Medians and
quartiles are printed, without the first step of each round. "cpu" is the CPU time per step of all processes, Ray's
included, over whole rounds; on a shared machine it is the better measure. Each round ends with an evaluation of one
attempt per task, which is part of "cpu" but not of the time of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import rich.console

from gleanrl.cli.main import parse_overrides
from gleanrl.config import loading as configuration
from gleanrl.config.settings import Config
from gleanrl.runtime.local import Builder, set_up_libraries, train_with
from gleanrl.runtime.prepare import prepare
from gleanrl.runtime.ray.cluster import open_cluster
from gleanrl.runtime.ray.run import RayBuilder
from gleanrl.runtime.ray.samplers import LANES
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.tracking.monitors import Console, load_monitors

SETTINGS = (
    *(("evaluation.every", "0"), ("evaluation.at_start", "false"), ("checkpoint.every", "0")),
    *(("evaluation.samples", "1"), ("evaluation.greedy", "false")),
    ("monitor.use", '["file"]'),
)


async def measure(
    config: Config, args: argparse.Namespace, place: Path, console: Console
) -> dict[str, tuple[list[float], float]]:
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    cpu: defaultdict[str, float] = defaultdict(float)
    numbers = iter(range(1_000_000))

    def folder() -> RunFolder:
        run = RunFolder(place / f"run-{next(numbers)}")
        run.path.mkdir()
        run.config_path.write_text(config.to_toml())
        return run

    async def taken(name: str, runtime: Builder) -> None:
        before = processor_s()
        await train_with(runtime, partial(load_monitors, config.monitor), resume=False)
        cpu[name] += processor_s() - before
        run = runtime.folder
        times = [row.metrics["time/step_s"] for row in run.read_metrics() if "time/step_s" in row.metrics]
        seconds[name] += times[1:]

    prepared = prepare(config, console)
    for samplers in args.samplers:
        ray = config.ray.model_copy(update={"samplers": samplers, "environments": args.environments})
        own = config.model_copy(update={"ray": ray})
        kinds = {"learner": 1, "sampler": samplers, "environment": args.environments}
        with open_cluster(ray, console, {kind: count for kind, count in kinds.items() if count}) as cluster:
            builder = RayBuilder.make(own, folder(), prepared, console, cluster)
            async with builder.start_actors(LANES, training=True) as started:
                for _ in range(args.rounds):
                    await taken(f"local, beside {samplers}", Builder(config, folder(), prepared, console))
                    await taken(f"Ray, samplers {samplers}", replace(started, folder=folder()))
    return {name: (times, cpu[name] / (args.rounds * args.steps)) for name, times in seconds.items()}


def processor_s() -> float:
    """Return the CPU seconds of this process and its present descendants so far. Linux only."""
    parents, spent = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        parents[int(path.parent.name)], spent[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:13]))
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(spent[pid] for pid in own) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samplers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--environments", type=int, default=1)
    args, rest = parser.parse_known_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    overrides = [*SETTINGS, ("run.steps", str(args.steps)), ("run.threads", "1"), *parse_overrides(rest)]
    config = configuration.load(args.preset, overrides)
    set_up_libraries(config)
    console = Console(rich.console.Console(file=open(os.devnull, "w")))  # noqa: SIM115
    with tempfile.TemporaryDirectory(prefix="ray-overhead-", dir=".") as name:
        seconds = asyncio.run(measure(config, args, Path(name).absolute(), console))
    batch = config.schedule.batch
    print(f"steps of {batch} groups of {config.schedule.group} episodes, {os.cpu_count()} cores")
    print(f"{'runtime':24}{'steps':>7}{'s/step':>10}{'quartiles':>16}{'ms/group':>12}{'CPU s/step':>14}")
    for name, (times, cpu) in seconds.items():
        low, middle, high = np.percentile(times, [25, 50, 75])
        quartiles = f"{low:.3f}-{high:.3f}"
        print(
            f"{name:24}{len(times):>7}{middle:10.3f}{quartiles:>16}{1e3 * middle / batch:12.1f}{cpu:14.2f}", flush=True
        )


if __name__ == "__main__":
    main()
