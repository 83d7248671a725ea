"""Checks that no data is lost when a process that adds to a buffer is killed, at hundreds of random moments.

    python benchmarks/buffer_kills.py [--kills 300] [--max-rows 0] [--segment-bytes 262144]

The writer process reports each id after `add_trajectories` has returned it, and saves a checkpoint from time to time.
After a random time it is killed with SIGKILL. The benchmark then checks that each reported trajectory is in the buffer
and complete, and that `verify` finds no fault in the buffer or in the checkpoint. Another process samples from the
buffer all the time and checks every row. The exit status is 1 if anything was lost or damaged.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer

WIDE = 520
FAULTS = (
    "reported but lost",
    "damaged trajectories",
    "different from what was written",
    "damaged trajectories in checkpoints",
)


def trajectory(number: int) -> TensorTrajectory:
    """Make a trajectory in which each value encodes its trajectory, step and environment, so that mix-ups show."""
    steps, batch = 1 + number % 20, 3
    t, b = torch.meshgrid(torch.arange(steps + 1), torch.arange(batch), indexing="ij")
    mark = (number * 1000 + t * 20 + b).double()[..., None]
    observed = mark.expand(-1, -1, WIDE).contiguous()
    return TensorTrajectory(
        actions=torch.cat([mark[:-1], -mark[:-1]], dim=2),
        rewards=mark[:-1] / 7,
        curr_obs={"state": observed[:-1]},
        next_obs={"state": observed[1:]},
        forward_inputs={"more": mark[:-1]} if number % 5 == 0 else {},
    )


def write(folder: Path, limit: int, segment: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    with TrajectoryReplayBuffer(folder / "buffer", max_rows=limit or None, segment_bytes=segment) as buffer:
        for number in range(buffer.trajectory_counter, 1 << 40):
            pipe.send(buffer.add_trajectories([trajectory(number)])[0])
            if number % 7 == 0:
                buffer.save_checkpoint(folder / "checkpoint")


def sample(folder: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    served = 0
    with TrajectoryReplayBuffer(folder / "buffer", seed=0, read_only=True) as buffer:
        while not pipe.poll():
            batch = buffer.sample(64, allow_short=True, fields=["actions", "rewards", "curr_obs", "next_obs"])
            mark = batch["actions"][:, :1]
            whole = (batch["actions"][:, 1:] == -mark) & (batch["rewards"] == mark / 7)
            whole = whole & (batch["curr_obs"]["state"] == mark) & (batch["next_obs"]["state"] == mark + 20)
            if not whole.all():
                raise SystemExit("sampled rows are incomplete or mixed up")
            served += len(mark)
    pipe.send(served)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--max-rows", type=int, default=0, help="0: nothing is evicted")
    parser.add_argument("--segment-bytes", type=int, default=1 << 18)
    parser.add_argument("--longest", type=float, default=0.3, help="seconds until a kill, at most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    fork, chance, counts = multiprocessing.get_context("fork"), random.Random(0), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with TrajectoryReplayBuffer(folder / "buffer", segment_bytes=args.segment_bytes) as buffer:
            buffer.add_trajectories([trajectory(0)])
        ours, theirs = fork.Pipe()
        sampler = fork.Process(target=sample, args=(folder, theirs))
        sampler.start()
        said = 0
        for _ in range(args.kills):
            hear, tell = fork.Pipe(duplex=False)
            writer = fork.Process(target=write, args=(folder, args.max_rows, args.segment_bytes, tell))
            writer.start()
            tell.close()
            time.sleep(chance.uniform(0, args.longest))
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join()
            try:
                while True:
                    said = max(said, hear.recv())
                    counts["trajectories reported as added"] += 1
            except EOFError:
                pass
            with TrajectoryReplayBuffer(folder / "buffer", segment_bytes=args.segment_bytes) as buffer:
                first, last = buffer.trajectory_counter - len(buffer), buffer.trajectory_counter - 1
                counts["reported but lost"] += max(0, said - last)
                counts["on disk but not yet reported"] += max(0, last - said)
                counts["damaged trajectories"] += len(buffer.verify())
                said = last
                for number in {first, (first + last) // 2, last}:
                    counts["trajectories compared with what was written"] += 1
                    wanted, found = trajectory(number), buffer.trajectory(number)
                    counts["different from what was written"] += not torch.equal(
                        found.next_obs["state"], wanted.next_obs["state"]
                    )
            if (folder / "checkpoint").exists():
                with TrajectoryReplayBuffer(folder / "checkpoint", read_only=True) as checkpoint:
                    counts["checkpoints verified"] += 1
                    counts["damaged trajectories in checkpoints"] += len(checkpoint.verify())
            if not sampler.is_alive():
                raise SystemExit(
                    "the sampling process ended: its rows were incomplete or mixed up, or an error occurred"
                )
        ours.send("stop")
        counts["rows sampled by the other process, all correct"] = ours.recv()
        sampler.join()
    print(f"{args.kills} kills")
    for what, count in counts.items():
        print(f"{count:>10,} {what}")
    if any(counts[fault] for fault in FAULTS):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
