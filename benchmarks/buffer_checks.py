"""Measures what it costs to verify the checksums of rows in a trajectory buffer.

    python benchmarks/buffer_checks.py [--trajectories 40] [--rounds 20]

The trajectories have T = 100 and B = 8, and rows of 24.9 kB with two image observations. All rows are in memory when
they are read. The benchmark prints medians of the milliseconds to sample 256 rows, to read a trajectory without and
with its checksum, and to verify the whole buffer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer, files

STEPS, BATCH, PIXELS = 100, 8, 64 * 64 * 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, TrajectoryReplayBuffer(folder, seed=0) as buffer:
        for _ in range(args.trajectories):
            images = torch.randint(0, 256, (STEPS + 1, BATCH, PIXELS), dtype=torch.uint8)
            buffer.add_trajectories(
                [
                    TensorTrajectory(
                        actions=torch.randn(STEPS, BATCH, 56),
                        rewards=torch.randn(STEPS, BATCH, 8),
                        curr_obs={"image": images[:-1]},
                        next_obs={"image": images[1:]},
                    )
                ]
            )
        megabytes = buffer.get_stats()["bytes"] / args.trajectories / 1e6
        print(f"{args.trajectories} trajectories of {megabytes:.1f} MB on disk; checksums by {files.crc32.__module__}")

        def show(name: str, rounds: int, read: Callable[[int], Any]) -> None:
            times = []
            for i in range(rounds):
                begin = time.perf_counter()
                read(i % args.trajectories)
                times.append(time.perf_counter() - begin)
            print(f"{name}: {statistics.median(times) * 1e3:.2f} ms")

        show("verify()", 3, lambda _: buffer.verify())
        show("sample(256)", args.rounds, lambda _: buffer.sample(256))
        show("trajectory(id)", args.rounds, buffer.trajectory)
        show("trajectory(id, verify=True)", args.rounds, lambda i: buffer.trajectory(i, verify=True))


if __name__ == "__main__":
    main()
