"""Measures the time that experience replay adds to a step: planning, selecting trajectories, and storing successes.

    python benchmarks/replay_cost.py [--arms default ...] [--steps 12] [--clock cpu] [--section.key value ...]

Each arm is the quickstart (ALFWorld, 16 groups of 8, one thread) with other replay settings. A first run of ``--fill``
steps on few tasks fills a pool with several successes per task. All arms start from the same warm start and from this
pool. Arms:

* ``off``: without replay.
* ``default``: the default settings, which include extra updates on stored successes (pool updates).
* ``default-current``: as ``default``, but trajectories are selected by their entropy under the current policy.
* ``restarts``, ``failures``, ``observation loss``, ``gigpo``: the default with this mechanism.
* PLACEMENT-PER_GROUP-ENTROPY_FROM, such as ``add-1-current``: these three settings, without extra updates.

A row shows medians in milliseconds over all steps but the first two: the time of the step; of planning (plan) and
selecting (select) trajectories for the batch; of storing successes (store); of planning and selecting for the extra
updates (x-plan, x-select); and of the extra updates themselves (x-update). "share" is the share of the step that these
parts take, without x-update, because that is training.

With ``--clock cpu`` (the default), times are CPU time of this process, which depends little on other load of the
machine. With ``--clock wall``, they are wall-clock time. The time of a step is that from the end of the step before to
its own end.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from gleanrl.cli.main import parse_overrides
from gleanrl.config import loading as configuration
from gleanrl.experience import ExperiencePool
from gleanrl.experience.replay import curriculum, recall, updates
from gleanrl.protocols import Metrics
from gleanrl.runtime.local import run_training
from gleanrl.tracking.monitors import Console

ARMS = [
    f"{placement}-{per_group}-{source}"
    for placement, per_group, source in product(("add", "replace"), (1, 2), ("current", "recorded"))
]
NAMED = {
    "default": {},
    "default-current": {"replay.entropy_from": "current"},
    "restarts": {"replay.restart_share": "0.25"},
    "failures": {"replay.keep_failures": "2"},
    "observation loss": {"loss.observation_coefficient": "0.03"},
    "gigpo": {"credit.estimator": "gigpo"},
}
PARTS = {
    **{part: f"time/replay_{part}_s" for part in ("plan", "select", "store")},
    **{f"x-{part}": f"time/replay_update_{part}_s" for part in ("plan", "select", "update")},
}
LEARNING = "x-update"
COLD = 2  # number of first steps of a run that are not counted
ENDED = "ended"  # name of the time at the end of a step, next to its metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=["off", *NAMED, *ARMS], default=["off", *NAMED, *ARMS])
    parser.add_argument("--steps", type=int, default=12, help="of an arm")
    parser.add_argument("--fill", type=int, default=24, help="steps of the run that fills the pool")
    parser.add_argument("--pool", type=Path, help="a pool to begin with instead, or where to keep the one made")
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    args, rest = parser.parse_known_args()
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    for module in (curriculum, recall, updates):
        module.perf_counter = clock  # type: ignore[attr-defined]
    settings = [
        *[("run.threads", "1"), ("environment.train_tasks", "128"), ("evaluation.every", "0")],
        *[("environment.eval_tasks", "1"), ("checkpoint.every", "0")],
        *[("monitor.rollouts_per_step", "0"), *parse_overrides(rest)],
    ]
    with tempfile.TemporaryDirectory() as folder:
        pool = args.pool or Path(folder) / "pool.sqlite"
        if not pool.exists():
            stored = [*replay("failures"), ("replay.path", str(pool))]
            run("fill", args.fill, Path(folder), [*settings, *stored], clock)
        describe(pool)
        heading = f"{'arm':<20}{'step':>9}" + "".join(f"{part:>9}" for part in PARTS)
        print(f"{heading}{'share':>9}{'replayed':>10}{'extra':>7}   (ms of {args.clock} time)", flush=True)
        for arm in args.arms:
            own = [] if arm == "off" else [("replay.seed_from", str(pool)), *replay(arm)]
            show(arm, run(arm, args.steps, Path(folder), [*settings, *own], clock))


def replay(arm: str) -> list[tuple[str, str]]:
    if arm in NAMED:
        return [("replay.enabled", "true"), *NAMED[arm].items()]
    placement, per_group, source = arm.split("-")
    values = {"placement": placement, "per_group": per_group, "entropy_from": source, "pool_updates": "0"}
    return [("replay.enabled", "true"), *((f"replay.{name}", value) for name, value in values.items())]


class StepClock:
    """A `Monitor` that keeps the metrics of each step, with the time of ``clock`` at its end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.steps: list[Metrics] = []

    def log(self, step: int, metrics: Metrics) -> None:
        if "time/step_s" in metrics:  # not in the metrics of an evaluation
            self.steps.append({**metrics, ENDED: self._clock()})

    def close(self) -> None:
        pass


def run(
    name: str, steps: int, folder: Path, overrides: Sequence[tuple[str, str]], clock: Callable[[], float]
) -> list[Metrics]:
    """Make a run as `gleanrl train` does, and return the metrics of each step."""
    own = [("run.folder", str(folder)), ("run.name", name.replace(" ", "-")), ("run.steps", str(steps))]
    config = configuration.load("quickstart", [*own, *overrides])
    monitor = StepClock(clock)
    run_training(config, resume=False, console=Console(), monitors=lambda info: monitor)
    return monitor.steps


def describe(path: Path) -> None:
    with ExperiencePool(path, read_only=True) as pool:
        stats = pool.stats()
    print(f"pool: {stats['trajectories']} trajectories, {stats['eligible']} of {stats['tasks']} tasks replayable")


def show(arm: str, every: Sequence[Metrics]) -> None:
    steps = every[COLD:]
    took = [now[ENDED] - before[ENDED] for before, now in zip(every[COLD - 1 :], steps, strict=False)]

    def median(name: str) -> float:
        return statistics.median(metrics.get(name, 0.0) for metrics in steps)

    step, parts = statistics.median(took), {part: median(name) for part, name in PARTS.items()}
    times = "".join(f"{1000 * seconds:>9.1f}" for seconds in parts.values())
    share = sum(seconds for part, seconds in parts.items() if part != LEARNING) / step
    counts = median("replay/trajectories"), median("replay_update/0/trajectories")
    print(f"{arm:<20}{1000 * step:>9.0f}{times}{share:>9.2%}{counts[0]:>10.0f}{counts[1]:>7.0f}", flush=True)


if __name__ == "__main__":
    main()
