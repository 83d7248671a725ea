"""A process that adds is killed at random moments while another samples: what was acknowledged is there, whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gleanrl.buffer import TrajectoryReplayBuffer
from tests.buffer.world import assert_same, trajectory

ROUNDS = 4  # benchmarks/buffer_kills.py does hundreds

WRITER = """
import sys
from gleanrl.buffer import TrajectoryReplayBuffer
from tests.buffer.world import trajectory
with TrajectoryReplayBuffer(sys.argv[1], seed=0, segment_bytes=1 << 18, max_rows=int(sys.argv[2]) or None) as buffer:
    print("ready", flush=True)
    for number in range(buffer.trajectory_counter, 10**6):
        ids = buffer.add_trajectories([trajectory(number, 1 + number % 20, extra=number % 5 == 0)])
        print(ids[0], flush=True)
        if number % 7 == 0:
            buffer.save_checkpoint(sys.argv[3])
"""
SAMPLER = """
import sys, time
from gleanrl.buffer import TrajectoryReplayBuffer
with TrajectoryReplayBuffer(sys.argv[1], seed=0, read_only=True) as buffer:
    print("ready", flush=True)
    while True:
        sample = buffer.sample(32, allow_short=True, fields=["actions", "rewards", "curr_obs", "next_obs"])
        mark = sample["actions"][:, :1]
        assert (sample["actions"][:, 1:] == -mark).all(), sample["actions"]
        assert (sample["rewards"] == mark / 7).all()
        assert (sample["curr_obs"]["state"] == mark).all()
        assert ((sample["next_obs"]["state"] == mark + 20)).all()
        time.sleep(0.005)  # leaves the core to the writer
"""


def started(script: str, *arguments: object) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    made = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=env
    )
    assert made.stdout is not None
    assert made.stdout.readline() == "ready\n"
    return made


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 400])
def test_what_was_acknowledged_survives_a_kill(tmp_path: Path, limit: int) -> None:
    chance = random.Random(limit)
    acknowledged = -1
    with TrajectoryReplayBuffer(tmp_path / "buffer", seed=0, segment_bytes=1 << 18) as buffer:
        buffer.add_trajectories([trajectory(0)])
    sampler = started(SAMPLER, tmp_path / "buffer")
    try:
        for _ in range(ROUNDS):
            writer = started(WRITER, tmp_path / "buffer", limit, tmp_path / "checkpoint")
            assert writer.stdout is not None
            for _ in range(chance.randrange(1, 25)):
                acknowledged = max(acknowledged, int(writer.stdout.readline()))
            writer.send_signal(signal.SIGKILL)
            rest, _ = writer.communicate()
            acknowledged = max([acknowledged, *(int(line) for line in rest.split())])  # said before it died
            assert sampler.poll() is None, "the sampling process met a torn trajectory"
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
    finally:
        sampler.kill()
        sampler.communicate()
