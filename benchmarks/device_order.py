"""Simulates each value of `schedule.device_first`, which decides whether sampler or learner uses a shared device first.

python benchmarks/device_order.py                          # about a minute; no GPU, no torch
python benchmarks/device_order.py --samples 400 --steps 48

Each schedule is simulated with several workloads. A step takes 157 s of device time, mostly for training or mostly for
sampling. A reward takes from a tenth of this time to four times as long, with constant or random latencies. The reward
service can compute 80 % of the rewards that the device could use, or any number at the same time.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from gleanrl.schedule.device_lock import First
from gleanrl.simulate.simulation import Outcome, simulate
from gleanrl.simulate.workload import PRESETS, Latency, Preset, Workload

ORDERS: Sequence[First] = ("train", "sample", "due")
WORK = ((40.0, 117.0), (117.0, 40.0))  # seconds of sampling and of training per step
LATENCIES = ("constant:15", "uniform:0:120", "constant:200", "exponential:100", "constant:600")
UNLIMITED = 100_000


def workloads(samples: int, steps: int, staleness: int) -> list[Workload]:
    made = []
    for (g, train), latency, scarce in itertools.product(WORK, LATENCIES, (True, False)):
        taken = Latency.parse(latency)
        places = max(1, round(0.8 * samples * taken.mean / (g + train))) if scarce else UNLIMITED
        options = {"logprobs": 0.0, "reference": 0.0, "steps": steps, "staleness": staleness}
        made.append(Workload(g=g, train=train, samples=samples, group=5, latency=taken, concurrency=places, **options))
    return made


def compared(workload: Workload, preset: Preset) -> dict[First, Outcome]:
    outcomes = {}
    for first in ORDERS:
        outcomes[first] = simulate(workload.model_copy(update={"first": first}), preset)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=80, help="trajectories a step")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--staleness", type=int, default=4, help="bound of bounded_async")
    given = parser.parse_args()
    print(
        "Seconds per step, with the mean staleness in brackets, for each value of schedule.device_first. G and T:"
        "\nseconds of sampling and of training per step. Places: number of rewards that the service computes at the"
        "\nsame time. Idle: share of the time in which the device does no work, with `due`.\n"
    )
    head = f"{'schedule':<24}{'G':>5}{'T':>5}  {'latency':<16}{'places':>7}"
    print(head + "".join(f"{first:>16}" for first in ORDERS) + f"{'idle':>7}")
    changes: dict[tuple[Preset, First], list[float]] = {}
    for preset in PRESETS:
        for workload in workloads(given.samples, given.steps, given.staleness):
            outcomes = compared(workload, preset)
            for first in ORDERS[1:]:
                ratio = outcomes[first].step_s / outcomes["train"].step_s
                changes.setdefault((preset, first), []).append(100 * (ratio - 1))
            places = "any" if workload.concurrency == UNLIMITED else workload.concurrency
            shown = f"{preset:<24}{workload.g:>5.0f}{workload.train:>5.0f}  {workload.latency.name:<16}{places:>7}"
            for outcome in outcomes.values():
                shown += f"{outcome.step_s:>9.1f} ({outcome.staleness_mean:.2f})"
            print(f"{shown}{100 * outcomes['due'].idle_share:>6.0f}%", flush=True)
    print("\nChange of the time per step compared with `train`, in percent:\n")
    print(f"{'schedule':<24}{'first':<8}{'mean':>8}{'best':>8}{'worst':>8}")
    for (preset, first), values in changes.items():
        mean = sum(values) / len(values)
        print(f"{preset:<24}{first:<8}{mean:>+8.1f}{min(values):>+8.1f}{max(values):>+8.1f}")


if __name__ == "__main__":
    main()
