"""Prints the tables of `overlap.py` from its JSON lines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gleanrl.simulate.simulation import Outcome, simulate
from gleanrl.simulate.workload import PRESETS, Latency, Workload

Row = Mapping[str, Any]
COMPUTE_S, LATENCY_S, SAMPLES_A_PLACE = 238.0, (1.0, 40.0), 20  # of the measurement in verl PR 2854; see `overlap.py`
SERIES = {
    "step_s": "time/step_s",
    "idle_share": "device/idle_share",
    "prefill_s": "time/prefill_s",
    "decode_s": "time/decode_s",
    "train_s": "time/train_s",
    "environment_s": "time/environment_s",
    "wait_s": "schedule/wait_s",
    "staleness_mean": "schedule/staleness_mean",
    "staleness_max": "schedule/staleness_max",
    "scored": "service/scored",
}
"""The time series that a row of results contains, each with the metric that it records."""
HEAD = [
    *("schedule", "places", "s/step", "wall s", "vs sync", "vs sync, same places", "idle", "waiting", "staleness"),
    *("simulated s/step", "simulated vs sync", "held-out success", "change of success"),
]
# Number of first steps that medians leave out, because schedules that sample ahead must first fill their queue.
WARM = 4
EXPLANATION = f"""
Columns of the tables:

* places: number of rewards that the service computes at the same time.
* s/step: median seconds per step, without the first {WARM} steps.
* wall s: seconds of all steps.
* vs sync: change of "wall s" compared with the schedule "sync" and the published ratio of places to samples.
* vs sync, same places: change of "wall s" compared with "sync" and the same number of places.
* idle: share of the time in which the device does no work, without the first {WARM} steps.
* waiting: the part of "idle" in which the learner waits for groups. With "sync" it includes the time in which the
  environments play. In the rest of the idle time the processor works on environments, batches and weights.
* staleness: mean (without the first {WARM} steps) and maximum.
* simulated: predictions of `gleanrl simulate`, from the times of sampling and training with instant rewards.
* held-out success: success rate on held-out tasks after training.
* change of success: compared with the run of the same seed with instant rewards.

Times, shares and changes are means over seeds. Success and its change are given with half the 95 % confidence interval
over seeds (Student's t)."""
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # number of seeds -> t quantile (95 %)


def show(rows: Sequence[Row]) -> None:
    """Print a table for each combination of steps, threads and changed settings that was measured."""
    if rows:
        print(EXPLANATION)
    if not rows:
        print("there are no results yet; `python benchmarks/overlap.py run` measures them")
    for kind in dict.fromkeys(_kind(row) for row in rows):
        _table([row for row in rows if _kind(row) == kind])


def latency_s(compute_s: float) -> tuple[float, float]:
    """Return the shortest and longest latency of a reward in seconds, scaled to steps of ``compute_s`` seconds."""
    low, high = (seconds * compute_s / COMPUTE_S for seconds in LATENCY_S)
    return low, high


def published_places(row: Row) -> int:
    """Return the concurrency of the service that has the published ratio to the samples of a step.

    It is rounded up, which is to the advantage of the schedule "sync".
    """
    return math.ceil(row["samples"] / SAMPLES_A_PLACE)


def line(row: Row) -> str:
    """Format a run as one line of text."""
    rewards = f"{row['places']} places" if row["places"] else "instant rewards"
    return (
        f"seed {row['seed']}, {row['schedule']}, {rewards}: {row['compute_s']:.2f} s per step, "
        f"idle {_idle(row):.1%}, success {row['success']:.3f}"
    )


def _kind(row: Row) -> tuple[Any, ...]:
    return (row["steps"], row["threads"], str(row["overrides"]))


def _table(rows: Sequence[Row]) -> None:
    instant = {row["seed"]: row for row in rows if not row["places"]}
    first = next(iter(instant.values()))
    changed = " ".join(f"--{name} {value}" for name, value in first["overrides"])
    low, high = latency_s(statistics.mean(row["compute_s"] for row in instant.values()))
    print(
        f"\n{first['steps']} steps of {first['samples']} samples, {first['threads']} thread(s), seeds "
        f"{', '.join(map(str, instant))}; rewards take {low:.3f} to {high:.3f} s {changed}\n"
    )
    _line(HEAD)
    _line(["---"] * len(HEAD))
    own = list(instant.values())
    before = f" (before: {statistics.mean(row['before'] for row in own):.3f})"
    success = _interval([row["success"] for row in own]) + before
    _line(["sync, instant rewards", "", *_seconds(own), "", "", *_rest(own), "", "", success, ""])
    places = sorted({row["places"] for row in rows} - {0})
    runs = {
        (schedule, n): {r["seed"]: r for r in rows if r["schedule"] == schedule and r["places"] == n}
        for n in places
        for schedule in PRESETS
    }
    runs = {key: own for key, own in runs.items() if own}
    base = ("sync", published_places(first))
    expected = {key: simulated(list(instant.values()), *key).step_s for key in runs}
    for (schedule, n), own in runs.items():
        sync = runs.get(base, {})
        told = f"{expected[schedule, n] / expected[base] - 1:+.1%}" if base in expected else ""
        changes = [_change(own, sync), _change(own, runs.get(("sync", n), {}))]
        success = _interval([row["success"] for row in own.values()])
        gained = _interval([own[s]["success"] - instant[s]["success"] for s in own], "+")
        rest = [*_rest(list(own.values())), f"{expected[schedule, n]:.2f}", told, success, gained]
        _line([schedule, str(n), *_seconds(list(own.values())), *changes, *rest])


def simulated(instant: Sequence[Row], schedule: Any, places: int) -> Outcome:
    """Simulate a schedule with the times of sampling and training that were measured in runs with instant rewards."""
    seconds = statistics.mean(row["compute_s"] for row in instant)
    train = statistics.mean(statistics.median(row["train_s"][WARM:]) for row in instant)
    row = instant[0]
    low, high = latency_s(seconds)
    workload = Workload(
        g=seconds - train,
        logprobs=0.0,
        reference=0.0,
        train=train,
        samples=row["samples"],
        group=row["group"],
        latency=Latency.parse(f"uniform:{low}:{high}"),
        concurrency=places,
        minibatches=row["chunks"],
        staleness=row["staleness"],
        steps=row["steps"],
    )
    return simulate(workload, schedule)


def _seconds(rows: Sequence[Row]) -> list[str]:
    return [
        f"{statistics.mean(row['compute_s'] for row in rows):.2f}",
        f"{statistics.mean(sum(row['step_s']) for row in rows):.0f}",
    ]


def _rest(rows: Sequence[Row]) -> list[str]:
    mean = statistics.mean(statistics.mean(row["staleness_mean"][WARM:]) for row in rows)
    most = max(max(row["staleness_max"]) for row in rows)
    waited = statistics.mean(row["waiting_share"] for row in rows)
    return [f"{statistics.mean(map(_idle, rows)):.1%}", f"{waited:.1%}", f"{mean:.2f} / {most:.0f}"]


def _idle(row: Row) -> float:
    """Return the share of the time of all counted steps in which the device was idle."""
    steps = list(zip(row["idle_share"], row["step_s"], strict=True))[WARM:]
    return sum(share * seconds for share, seconds in steps) / sum(seconds for _, seconds in steps)


def _change(rows: Mapping[int, Row], base: Mapping[int, Row]) -> str:
    """Format the mean relative difference of the wall-clock time of all steps to ``base``, paired by seed."""
    changes = [sum(rows[s]["step_s"]) / sum(base[s]["step_s"]) - 1 for s in rows if s in base]
    return f"{statistics.mean(changes):+.1%}" if changes else ""


def _interval(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return ""
    mean = f"{statistics.mean(values):{sign}.3f}"
    if len(values) not in STUDENT:
        return mean
    return f"{mean} ± {STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values)):.3f}"


def _line(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |")
