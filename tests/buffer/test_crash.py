"""A writing process is killed at random moments while another process samples from the same buffer.

Every acknowledged trajectory must survive, and neither process may read a partly written one.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from gleanrl.buffer import TrajectoryReplayBuffer
from tests.buffer.world import assert_same, trajectory

ROUNDS = 4  # benchmarks/buffer_kills.py does hundreds


def write(acknowledge: Connection, folder: Path, limit: int, checkpoint: Path) -> None:
    """Add trajectories until this process is killed, and send the id of each after it was added."""
    with TrajectoryReplayBuffer(folder, seed=0, segment_bytes=1 << 18, max_rows=limit or None) as buffer:
        for number in itertools.count(buffer.trajectory_counter):
            ids = buffer.add_trajectories([trajectory(number, 1 + number % 20, extra=number % 5 == 0)])
            acknowledge.send(ids[0])
            if number % 7 == 0:
                buffer.save_checkpoint(checkpoint)


def sample(begun: Connection, folder: Path) -> None:
    """Sample until this process is killed; exit with an error after reading a partly written trajectory."""
    with TrajectoryReplayBuffer(folder, seed=0, read_only=True) as buffer:
        begun.send(True)
        while True:
            batch = buffer.sample(32, allow_short=True, fields=["actions", "rewards", "curr_obs", "next_obs"])
            mark = batch["actions"][:, :1]
            assert (batch["actions"][:, 1:] == -mark).all(), batch["actions"]
            assert (batch["rewards"] == mark / 7).all()
            assert (batch["curr_obs"]["state"] == mark).all()
            assert (batch["next_obs"]["state"] == mark + 20).all()
            time.sleep(0.005)  # leave processor time to the writer


@contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """Start ``target`` in a process; yield the process and the connection on which it sends. Kill it at the end.

    The process forks from a server that has already imported the libraries, which saves seconds for each start.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    said, says = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(says, *arguments), daemon=True)
    process.start()
    says.close()
    try:
        yield process, said
    finally:
        process.kill()
        process.join()
        said.close()


def all_said(said: Connection) -> Iterator[int]:
    """Yield the messages that a dead process had sent and that were not received yet."""
    try:
        while True:
            yield said.recv()
    except EOFError:
        return


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 400])
def test_acknowledged_trajectories_survive_a_kill_of_the_writer(tmp_path: Path, limit: int) -> None:
    chance = random.Random(limit)
    acknowledged = -1
    with TrajectoryReplayBuffer(tmp_path / "buffer", seed=0, segment_bytes=1 << 18) as buffer:
        buffer.add_trajectories([trajectory(0)])
    with started(sample, tmp_path / "buffer") as (sampler, begun):
        assert begun.recv()
        for _ in range(ROUNDS):
            with started(write, tmp_path / "buffer", limit, tmp_path / "checkpoint") as (writer, said):
                for _ in range(chance.randrange(1, 25)):
                    acknowledged = max(acknowledged, said.recv())
                writer.kill()
                writer.join()
                acknowledged = max([acknowledged, *all_said(said)])
            assert sampler.is_alive(), "the sampling process met a torn trajectory"
            with TrajectoryReplayBuffer(tmp_path / "buffer", seed=0, segment_bytes=1 << 18) as buffer:
                # One more trajectory may be on disk: written, but killed before its id was sent.
                assert buffer.trajectory_counter - 1 in (acknowledged, acknowledged + 1)
                acknowledged = buffer.trajectory_counter - 1
                assert buffer.verify() == []
                first = buffer.trajectory_counter - len(buffer)
                assert limit or first == 0
                for number in {first, (first + acknowledged) // 2, acknowledged}:
                    if number:
                        wanted = trajectory(number, 1 + number % 20, extra=number % 5 == 0)
                        assert_same(buffer.trajectory(number), wanted)
            if (tmp_path / "checkpoint").exists():
                with TrajectoryReplayBuffer(tmp_path / "checkpoint", read_only=True) as checkpoint:
                    assert checkpoint.verify() == []
