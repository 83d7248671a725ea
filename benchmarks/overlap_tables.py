"""Prints the tables of `overlap.py` from its JSON lines."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gleanrl.simulate.simulation import Outcome, simulate
from gleanrl.simulate.workload import PRESETS, Latency, Workload
from replay_tables import interval

Row = Mapping[str, Any]
COMPUTE_S, LATENCY_S, SAMPLES_A_PLACE = 238.0, (1.0, 40.0), 20  # of the measurement in verl PR 2854; see `overlap.py`
SERIES = {
    "step_s": "time/step_s",
    "idle_share": "device/idle_share",
    "prefill_s": "time/prefill_s",
    "decode_s": "time/decode_s",
    "train_s": "time/train_s",
    "updates": "updates/done",
    "turns": "episode/turns",
    "rounds": "sampler/bursts",
    "environment_s": "time/environment_s",
    "wait_s": "schedule/wait_s",
    "staleness_mean": "schedule/staleness_mean",
    "staleness_max": "schedule/staleness_max",
    "scored": "service/scored",
}
"""The time series that a row of results contains, each with the metric that it records."""
HEAD = [
    *(
        "schedule",
        "places",
        "s/step",
        "wall s",
        "vs sync",
        "vs sync, same places",
        "idle",
        "idle later",
        "waiting",
        "staleness",
    ),
    *("predicted wall s", "predicted vs sync", "held-out success", "change of success"),
]
EXPLANATION = """
Columns of the tables:

* places: number of rewards that the service computes at the same time.
* s/step: median seconds per step, without the first four steps, or the first quarter if that is less.
* wall s: seconds of all steps.
* vs sync: change of "wall s" compared with the schedule "sync" and the published ratio of places to samples.
* vs sync, same places: change of "wall s" compared with "sync" and the same number of places.
* idle: share of the time of all steps in which the device does no work.
* idle later: the same without these first steps, in which schedules that sample ahead fill their queue.
* waiting: the part of "idle later" in which the learner waits for groups. With "sync" it includes the time in which the
  environments play. In the rest of the idle time the processor works on environments, batches and weights.
* staleness: mean (without these first steps) and maximum.
* predicted: by `gleanrl simulate`, for as many steps, from what the run with instant rewards has measured and nothing
  else. So `run` prints the predictions before it measures the schedules.
* held-out success: success rate on held-out tasks after training.
* change of success: compared with the run of the same seed with instant rewards.

Times and shares are means over seeds. Changes and success are given with half the 95 % confidence interval of their
mean over seeds (Student's t)."""


def show(rows: Sequence[Row]) -> None:
    """Print a table for each combination of steps, threads and changed settings that was measured."""
    if rows:
        print(EXPLANATION)
    if not rows:
        print("there are no results yet; `python benchmarks/overlap.py run` measures them")
    for kind in dict.fromkeys(_kind(row) for row in rows):
        _table([row for row in rows if _kind(row) == kind])


def preset(row: Row) -> str:
    """Return the preset that a run trains. Rows that do not name it are of the quickstart."""
    return row.get("preset", "quickstart")


def warm(steps: int) -> int:
    """Return the number of first steps that medians leave out: schedules that sample ahead first fill their queue."""
    return min(4, steps // 4)


def latency_s(compute_s: float) -> tuple[float, float]:
    """Return the shortest and longest latency of a reward in seconds, scaled to steps of ``compute_s`` seconds."""
    low, high = (seconds * compute_s / COMPUTE_S for seconds in LATENCY_S)
    return low, high


def latency(seed: int, trajectory_id: str, latency_s: tuple[float, float]) -> float:
    """Return the seconds that a reward takes. They are the same if it is requested again, and in every schedule."""
    return random.Random(f"{seed}/{trajectory_id}").uniform(*latency_s)


def published_places(row: Row) -> int:
    """Return the concurrency of the service that has the published ratio to the samples of a step.

    It is rounded up, which is to the advantage of the schedule "sync".
    """
    return math.ceil(row["samples"] / SAMPLES_A_PLACE)


def line(row: Row) -> str:
    """Format a run as one line of text."""
    rewards = f"{row['places']} places" if row["places"] else "instant rewards"
    success = "" if row["success"] is None else f", success {row['success']:.3f}"
    return (
        f"seed {row['seed']}, {row['schedule']}, {rewards}: {sum(row['step_s']) / row['steps']:.2f} s per step on "
        f"average, median {row['compute_s']:.2f}, idle {_idle(row):.1%}{success}"
    )


def _kind(row: Row) -> tuple[Any, ...]:
    return (preset(row), row["steps"], row["threads"], str(row["overrides"]))


def _table(rows: Sequence[Row]) -> None:
    instant = {row["seed"]: row for row in rows if not row["places"]}
    first = next(iter(instant.values()))
    changed = " ".join(f"--{name} {value}" for name, value in first["overrides"])
    low, high = latency_s(statistics.mean(row["compute_s"] for row in instant.values()))
    print(
        f"\n{preset(first)}: {first['steps']} steps of {first['samples']} samples, {first['threads']} thread(s), seeds "
        f"{', '.join(map(str, instant))}; rewards take {low:.3f} to {high:.3f} s {changed}\n"
    )
    succeeded = all(row["success"] is not None for row in rows)
    head = HEAD if succeeded else HEAD[:-2]
    _line(head)
    _line(["---"] * len(head))
    own = list(instant.values())
    success = []
    if succeeded:
        before = f" (before: {statistics.mean(row['before'] for row in own):.3f})"
        success = [_interval([row["success"] for row in own]) + before, ""]
    _line(["sync, instant rewards", "", *_seconds(own), "", "", *_rest(own), "", "", *success])
    places = sorted({row["places"] for row in rows} - {0})
    runs = {
        (schedule, n): {r["seed"]: r for r in rows if r["schedule"] == schedule and r["places"] == n}
        for n in places
        for schedule in PRESETS
    }
    runs = {key: own for key, own in runs.items() if own}
    base = ("sync", published_places(first))
    expected = {
        (schedule, n): {seed: simulated(instant[seed], schedule, n).step_s for seed in own}
        for (schedule, n), own in runs.items()
    }
    for (schedule, n), own in runs.items():
        sync = runs.get(base, {})
        predicted, of_sync = expected[schedule, n], expected.get(base, {})
        told = [predicted[seed] / of_sync[seed] - 1 for seed in predicted if seed in of_sync]
        changes = [_change(own, sync), _change(own, runs.get(("sync", n), {}))]
        if succeeded:
            gained = _interval([own[s]["success"] - instant[s]["success"] for s in own], "+")
            success = [_interval([row["success"] for row in own.values()]), gained]
        seconds = f"{statistics.mean(predicted.values()) * first['steps']:.0f}"
        rest = [*_rest(list(own.values())), seconds, _percent(told)]
        _line([schedule, str(n), *_seconds(list(own.values())), *changes, *rest, *success])


def simulated(instant: Row, schedule: Any, places: int) -> Outcome:
    """Predict a run of as many steps as ``instant`` from the times that this run with instant rewards has measured.

    The rewards take as long as the service will take for them.
    """
    low, high = latency_s(instant["compute_s"])
    trajectories = (
        f"{ticket:06d}.0.{member}"
        for ticket in range(instant["steps"] * instant["samples"] // instant["group"])
        for member in range(instant["group"])
    )
    train = statistics.mean(instant["train_s"])
    measured: dict[str, Any] = {}
    if "turns" in instant:  # older rows lack these series; for them the simulator's defaults are used
        # Episodes end after this share of a batch's sampling, on average. Those of n equal bursts end after
        # (n + 1) / 2n of it, so this is the number of bursts that request rewards as early as the episodes do.
        share = statistics.mean(instant["turns"]) / statistics.mean(instant["rounds"])
        measured["bursts"] = min(20, max(1, round(1 / max(2 * share - 1, 0.05))))
        measured["microbatches"] = max(1, round(statistics.mean(instant["updates"])))
    workload = Workload(
        g=statistics.mean(instant["step_s"]) - train,
        logprobs=0.0,
        reference=0.0,
        train=train,
        samples=instant["samples"],
        group=instant["group"],
        latency=Latency(
            "as served", (low + high) / 2, lambda _: latency(instant["seed"], next(trajectories), (low, high))
        ),
        concurrency=places,
        minibatches=instant["chunks"],
        staleness=instant["staleness"],
        steps=instant["steps"],
        whole=True,
        **measured,
    )
    return simulate(workload, schedule)


def _seconds(rows: Sequence[Row]) -> list[str]:
    return [
        f"{statistics.mean(row['compute_s'] for row in rows):.2f}",
        f"{statistics.mean(sum(row['step_s']) for row in rows):.0f}",
    ]


def _rest(rows: Sequence[Row]) -> list[str]:
    mean = statistics.mean(statistics.mean(row["staleness_mean"][warm(row["steps"]) :]) for row in rows)
    most = max(max(row["staleness_max"]) for row in rows)
    waited = statistics.mean(row["waiting_share"] for row in rows)
    later = statistics.mean(_idle(row, warm(row["steps"])) for row in rows)
    return [f"{statistics.mean(map(_idle, rows)):.1%}", f"{later:.1%}", f"{waited:.1%}", f"{mean:.2f} / {most:.0f}"]


def _idle(row: Row, first: int = 0) -> float:
    """Return the share of the time of all steps from ``first`` on in which the device was idle."""
    steps = list(zip(row["idle_share"], row["step_s"], strict=True))[first:]
    return sum(share * seconds for share, seconds in steps) / sum(seconds for _, seconds in steps)


def _change(rows: Mapping[int, Row], base: Mapping[int, Row]) -> str:
    """Format the mean relative difference of the wall-clock time of all steps to ``base``, paired by seed."""
    changes = [sum(rows[s]["step_s"]) / sum(base[s]["step_s"]) - 1 for s in rows if s in base]
    return _percent(changes)


def _percent(changes: Sequence[float]) -> str:
    if not changes:
        return ""
    mean = f"{statistics.mean(changes):+.1%}"
    return f"{mean} ± {interval(changes):.1%}" if len(changes) > 1 else mean


def _interval(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return ""
    mean = f"{statistics.mean(values):{sign}.3f}"
    return f"{mean} ± {interval(values):.3f}" if len(values) > 1 else mean


def _line(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |")
