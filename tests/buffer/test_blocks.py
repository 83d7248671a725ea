"""Tests of adding many trajectories in one call: the stored bytes equal those of one call per trajectory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer
from gleanrl.buffer.log import RECORD, Manifest
from gleanrl.buffer.trajectory import BLOCK_NBYTES, FlatTrajectory, TrajectoryBlock, join_blocks, steps_left
from tests.buffer.world import assert_same, trajectory


def several() -> list[TensorTrajectory]:
    """Twelve trajectories, some of equal schema and length, others with more steps, fields or bootstrap rows."""
    made = []
    for number in range(12):
        steps = 4 if number < 9 else 7
        ends = {(1, 0): "terminations", (2, 2): "truncations"} if number % 3 else {}
        instructions = [f"task {number % 2}", "other", "other"] if number in (2, 3, 7) else None
        success = (None, True, False)[number % 3]
        extra = number in (4, 5)
        acted = torch.zeros(steps, 3, 2, dtype=torch.bool)
        acted[0, 0] = number % 4 == 0
        made.append(
            trajectory(
                number,
                steps,
                ends=ends,
                extra=extra,
                task_descriptions=instructions,
                success=success,
                model_weights_id=str(number),
                intervene_flags=acted,
                prev_values=torch.full((steps + 1, 3, 1), float(number)) if number in (6, 7) else None,
            )
        )
    return made


def stored(
    folder: Path, calls: list[list[TensorTrajectory]]
) -> tuple[list[tuple[object, ...]], Manifest, dict[str, bytes]]:
    """Add each list of trajectories in one call.

    Returns the log records without times, the manifest without the buffer's random name, and the bytes of other files.
    """
    with TrajectoryReplayBuffer(folder, seed=0, segment_bytes=1 << 16) as buffer:
        for call in calls:
            buffer.add_trajectories(call)
        for number, own in enumerate(trajectory for call in calls for trajectory in call):
            assert_same(buffer.trajectory(number), own)
        assert buffer.verify() == []
        names = [name for name in RECORD.names or () if name not in ("crc", "time", "commit")]
        records = buffer.storage.snapshot.records[names].tolist()
    manifest = replace(buffer.storage.manifest, identity="")
    own = [file for file in folder.iterdir() if "log" not in file.name and file.name != Manifest.NAME]
    return records, manifest, {file.name: file.read_bytes() for file in own}


def test_one_call_stores_the_same_bytes_as_one_call_per_trajectory(tmp_path: Path) -> None:
    made = several()
    together, alone = stored(tmp_path / "a", [made]), stored(tmp_path / "b", [[own] for own in made])
    for one, other in zip(together, alone, strict=True):
        assert one == other


def test_only_small_trajectories_of_equal_shape_are_joined_into_a_block() -> None:
    rows = [FlatTrajectory.flatten(own) for own in several()]
    found = [[int(member.model_weights_id) for member in stack.members] for stack in join_blocks(rows)]
    assert found == [[0, 1, 2, 3], [4, 5], [6, 7], [8], [9, 10, 11]]
    large = [FlatTrajectory.flatten(TensorTrajectory(rewards=torch.zeros(BLOCK_NBYTES // 4, 1, 1)))] * 3
    assert [len(stack.members) for stack in join_blocks(large)] == [1, 1, 1]
    assert TrajectoryBlock(large[:1]).columns is large[0].columns  # no copy


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 2), (2, 40, 5)])
def test_steps_left_counts_the_steps_up_to_the_next_end_of_an_episode(shape: tuple[int, int, int]) -> None:
    ends = np.random.default_rng(0).random(shape) > 0.7
    found = steps_left(ends)
    assert found.dtype == np.int32
    for n in range(shape[0]):
        for b in range(shape[2]):
            left = 0
            for t in reversed(range(shape[1])):
                left = 1 if ends[n, t, b] else left + 1
                assert int(found[n, t, b]) == left
