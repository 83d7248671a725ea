"""Milliseconds of each advantage estimator, one thread, float32 rewards and a mask with holes.

Shapes are trajectories x positions, in groups of 8. About 7 of 10 positions are trained, in turns, and the reward
stands on the last trained token. The best of the runs is printed: what the machine does meanwhile only adds.

    python benchmarks/credit.py [--runs 5] [--threads 1] [--rows 1.0] [--clock cpu]

``--rows 0.1`` takes a tenth of the trajectories. ``--clock cpu`` counts processor time instead of wall-clock time,
for a machine that others use too (with one thread both are the same on a quiet machine).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from gleanrl.algorithms.advantages import ESTIMATORS, estimate

SHAPES = ((1_000_000, 1), (1_000_000, 16), (65_536, 16), (4_096, 256))
LONG = (256, 8_192)
OF_TOKENS = ("reinforce_plus_plus", "gae")  # the only ones whose work grows with the logarithm of the length
MEMBERS, TURN = 8, 10


def make(rows: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    phase = torch.randint(TURN, (rows, 1), generator=generator)
    mask = (torch.arange(length) + phase) % TURN < 7  # seven tokens sampled, three answered
    last = length - 1 - mask.flip(-1).int().argmax(-1)
    scores = torch.rand(rows, generator=generator).round(decimals=1)
    return {
        "token_rewards": torch.zeros(rows, length).scatter_(1, last[:, None], scores[:, None]),
        "mask": mask,
        "group": torch.arange(rows) // MEMBERS,
        "values": torch.rand(rows, length, generator=generator),
        "reward_baselines": torch.rand(rows, generator=generator),
    }


def milliseconds(
    name: str, batch: dict[str, torch.Tensor], runs: int, clock: Callable[[], float], **options: Any
) -> float:
    wanted = {"token_rewards", "mask", "group", *ESTIMATORS.get(name).needs}
    arguments = {key: tensor for key, tensor in batch.items() if key in wanted}
    best = float("inf")
    for _ in range(runs + 1):  # one more, to warm up
        start = clock()
        estimate(name, **arguments, **options)
        best = min(best, clock() - start)
    return 1000 * best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=float, default=1.0, help="share of the trajectories of each shape")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    args = parser.parse_args()
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    torch.set_num_threads(args.threads)
    columns: list[dict[str, float]] = []
    shapes = [(max(MEMBERS, int(rows * args.rows)), length) for rows, length in (*SHAPES, LONG)]
    for rows, length in shapes:
        batch = make(rows, length)
        names = OF_TOKENS if length == LONG[1] else ESTIMATORS.names()
        columns.append({name: milliseconds(name, batch, args.runs, clock) for name in names})
        if length > 1:
            ending = milliseconds("reinforce_plus_plus", batch, args.runs, clock, across_turns=False)
            columns[-1]["reinforce_plus_plus to the turn"] = ending
    print(
        f"{f'{args.clock} ms, best of {args.runs}':34}"
        + "".join(f"{f'{rows:,} x {length:,}':>16}" for rows, length in shapes)
    )
    for name in (*ESTIMATORS.names(), "reinforce_plus_plus to the turn"):
        print(f"{name:34}" + "".join(f"{column[name]:16.1f}" if name in column else f"{'':16}" for column in columns))


if __name__ == "__main__":
    main()
