"""Measures the time of each advantage estimator in milliseconds, with float32 rewards.

    python benchmarks/credit.py [--runs 5] [--threads 1] [--rows 1.0] [--clock cpu]

Shapes are trajectories x positions, with groups of 8 trajectories. Positions alternate as in a multi-turn episode: 7
trained ones, then 3 untrained ones. The reward is at the last trained token. The fastest run is printed, because other
load of the machine can only add time.

``--rows 0.1`` uses a tenth of the trajectories. ``--clock cpu`` measures CPU time instead of wall-clock time, for a
shared machine. With one thread on an idle machine, both are equal.
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
# Only these have token-level recursions, whose time per token grows with the logarithm of the length.
OF_TOKENS = ("reinforce_plus_plus", "gae")
MEMBERS, TURN = 8, 10


def make(rows: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    phase = torch.randint(TURN, (rows, 1), generator=generator)
    mask = (torch.arange(length) + phase) % TURN < 7  # a turn: 7 tokens of the model, then 3 of the environment
    last = length - 1 - mask.flip(-1).int().argmax(-1)
    scores = torch.rand(rows, generator=generator).round(decimals=1)
    return {
        "token_rewards": torch.zeros(rows, length).scatter_(1, last[:, None], scores[:, None]),
        "mask": mask,
        "group": torch.arange(rows) // MEMBERS,
        "values": torch.rand(rows, length, generator=generator),
        "reward_baselines": torch.rand(rows, generator=generator),
        "turns": (torch.arange(length) + phase) // TURN,
        "states": (torch.arange(length) + phase) // TURN,  # all members of a group take the same way
    }


def milliseconds(
    name: str, batch: dict[str, torch.Tensor], runs: int, clock: Callable[[], float], **options: Any
) -> float:
    wanted = {"token_rewards", "mask", "group", *ESTIMATORS.get(name).needs}
    arguments = {key: tensor for key, tensor in batch.items() if key in wanted}
    best = float("inf")
    for _ in range(runs + 1):  # one additional run, because the first one is slower
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
    shapes = [(MEMBERS * max(1, int(rows * args.rows / MEMBERS)), length) for rows, length in (*SHAPES, LONG)]
    for rows, length in shapes:
        batch = make(rows, length)
        names = OF_TOKENS if length == LONG[1] else ESTIMATORS.names()
        columns.append({name: milliseconds(name, batch, args.runs, clock) for name in names})
        if length > 1:
            ending = milliseconds("reinforce_plus_plus", batch, args.runs, clock, across_turns=False)
            columns[-1]["reinforce_plus_plus, last turn"] = ending
    print(
        f"{f'{args.clock} ms, fastest of {args.runs} runs':34}"
        + "".join(f"{f'{rows:,} x {length:,}':>16}" for rows, length in shapes)
    )
    for name in (*ESTIMATORS.names(), "reinforce_plus_plus, last turn"):
        print(f"{name:34}" + "".join(f"{column[name]:16.1f}" if name in column else f"{'':16}" for column in columns))


if __name__ == "__main__":
    main()
