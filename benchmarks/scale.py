"""Computes the figures of `docs/concepts/scale.md` for clusters of 8, 64 and 1,024 GPUs by simulation.

    python benchmarks/scale.py [--only NAME ...]        # about four minutes; no GPU, no torch

First the assumptions about a GPU and a trajectory are printed. Then, for each cluster size and its variants, the
`gleanrl simulate` command and its output are printed. The commands also contain the measured costs of single events.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping

from gleanrl.cli.main import main as gleanrl

ASSUMED: Mapping[str, float] = {
    "tokens that a GPU samples per second, with 64 concurrent trajectories": 2_500,
    "tokens that a GPU trains on per second": 8_000,
    "tokens of a trajectory: 10 turns, 600 observed and 200 sampled each": 8_000,
    "tokens of a trajectory that are sampled": 2_000,
}
_SAMPLING, _TRAINING, _ALL, _SAMPLED = ASSUMED.values()
COMMON = (
    "--logprobs 0 --reference 0 --group 8 --latency lognormal:2:0.8 --slots 64 --floor 0.5 --updates 4"
    " --gradients 30 --weights 15 --network 25 --bandwidth 25 --turns 10 --tokens 2000"
)
MEASURED = (
    "--driver-turn 944 --driver-trajectory 30 --driver-group 185 --agent-request 147 --pool-add 191 --pool-sample 537"
)


def plan(samples: int, machines: str, replayed: int, schedules: str, own: str = "") -> str:
    """Return the options of `gleanrl simulate` for a step of ``samples`` trajectories.

    The times --g and --train are those that a single GPU would take; ``machines`` has the options for the cluster.
    """
    times = f"--g {samples * _SAMPLED / _SAMPLING:g} --train {samples * _ALL / _TRAINING:g}"
    size = f"--samples {samples} --concurrency {samples // 2} --replayed {replayed}"
    return " ".join(filter(None, [times, size, COMMON, MEASURED, machines, own, f"--schedules {schedules}"]))


_ALONE = "--samplers 8 --learners 8"
_NODES = "--samplers 28 --learners 36 --placement disaggregated --efficiency 0.9"
_MANY = "--samplers 448 --learners 576 --placement disaggregated --efficiency 0.75 --steps 8"
_BOTH = "pipelined_one_step_off,bounded_async"
PLANS: Mapping[str, str] = {
    "8": plan(512, _ALONE, 64, "sync,pipelined,one_step_off,pipelined_one_step_off,bounded_async"),
    "64": plan(4096, _NODES, 512, "sync,one_step_off,pipelined_one_step_off,bounded_async"),
    "64-players": plan(4096, _NODES, 512, _BOTH, "--players 16"),
    "1024": plan(16384, _MANY, 2048, _BOTH),
    "1024-players": plan(16384, _MANY, 2048, _BOTH, "--players 64"),
    "1024-star": plan(16384, _MANY, 2048, "bounded_async", "--players 64 --broadcast star"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PLANS), default=list(PLANS), metavar="NAME")
    args = parser.parse_args()
    for what, value in ASSUMED.items():
        print(f"{value:>8,.0f}  {what}")
    for name in args.only:
        print(f"\n# {name}\n$ gleanrl simulate {PLANS[name]}", flush=True)
        if status := gleanrl(["simulate", *shlex.split(PLANS[name])]):
            sys.exit(status)


if __name__ == "__main__":
    main()
