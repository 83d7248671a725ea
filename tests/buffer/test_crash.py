"""A process that adds is killed at random moments while another samples: what was acknowledged is there, whole."""

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
    """Add trajectories until this process is killed, and say the id of each."""
    with TrajectoryReplayBuffer(folder, seed=0, segment_bytes=1 << 18, max_rows=limit or None) as buffer:
        for number in itertools.count(buffer.trajectory_counter):
            ids = buffer.add_trajectories([trajectory(number, 1 + number % 20, extra=number % 5 == 0)])
            acknowledge.send(ids[0])
            if number % 7 == 0:
                buffer.save_checkpoint(checkpoint)


def sample(begun: Connection, folder: Path) -> None:
    """Sample until this process is killed; it ends with an error if it meets a torn trajectory."""
    with TrajectoryReplayBuffer(folder, seed=0, read_only=True) as buffer:
        begun.send(True)
        while True:
            batch = buffer.sample(32, allow_short=True, fields=["actions", "rewards", "curr_obs", "next_obs"])
            mark = batch["actions"][:, :1]
            assert (batch["actions"][:, 1:] == -mark).all(), batch["actions"]
            assert (batch["rewards"] == mark / 7).all()
            assert (batch["curr_obs"]["state"] == mark).all()
            assert (batch["next_obs"]["state"] == mark + 20).all()
            time.sleep(0.005)  # leaves the core to the writer


@contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """A process, which is killed at the end, and what it says. It forks from one that has loaded the libraries."""
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
    """What a process that is dead had still said."""
    try:
        while True:
            yield said.recv()
    except EOFError:
        return


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 400])
def test_what_was_acknowledged_survives_a_kill(tmp_path: Path, limit: int) -> None:
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
                acknowledged = max([acknowledged, *all_said(said)])  # said before it died
            assert sampler.is_alive(), "the sampling process met a torn trajectory"
            with TrajectoryReplayBuffer(tmp_path / "buffer", seed=0, segment_bytes=1 << 18) as buffer:
                assert buffer.trajectory_counter - 1 in (acknowledged, acknowledged + 1)  # one may be on disk unsaid
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
