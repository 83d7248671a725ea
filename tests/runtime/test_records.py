"""Tests of rollout files: records are read back bit for bit, and a damaged file still gives its intact records."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.runtime.records import RolloutRecord, group_records, read_rollouts, write_rollouts
from gleanrl.types import Group, GroupSpec, Score, StopReason, Task, Trajectory, Turn
from gleanrl.utils.errors import UserError
from tests.strategies import examples, same, trajectories


def example(name: str, value: float, version: int = 4) -> Trajectory:
    segment = (
        Turn({"role": "user", "content": "You are in a room. ☕"}, np.array([1, 2, 3], np.int32)),
        Turn({"role": "assistant", "content": "go"}, np.array([4, 5]), np.array([-0.25, -1e-8]), version),
    )
    return Trajectory(name, "task-1", (segment,), Score(value), StopReason.DONE, {"won": np.bool_(True)})


def record(trajectory: Trajectory) -> RolloutRecord:
    return RolloutRecord(3, 0, False, None, trajectory)


@given(written=st.lists(trajectories, max_size=3))
@settings(max_examples=examples(50))
def test_trajectories_are_read_back_from_a_file_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, written: list[Trajectory]
) -> None:
    path = tmp_path_factory.mktemp("rollouts") / "step-000001.jsonl.zst"
    write_rollouts(path, map(record, written))
    assert same([found.trajectory for found in read_rollouts(path)], written)


def test_the_records_of_a_group_mark_replayed_members_and_their_advantages(tmp_path: Path) -> None:
    stored = example("old", 1.0, version=1)
    spec = GroupSpec(Task("task-1"), fresh=2, replayed=(stored,))
    group = Group(spec, (example("a", 0.0), example("b", 1.0), stored), ticket=17)
    path = tmp_path / "step-000002.jsonl.zst"
    write_rollouts(path, group_records(group, 2, [-0.5, 0.5, math.nan]))

    records = list(read_rollouts(path))
    assert [r.replayed for r in records] == [False, False, True]
    assert [r.advantage for r in records] == [-0.5, 0.5, None]
    assert all((r.step, r.ticket) == (2, 17) for r in records)
    assert records[0].trajectory.info == {"won": True}
    assert records[2].trajectory.version == 1


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_gives_its_intact_records_and_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: float
) -> None:
    path = tmp_path / "step-000001.jsonl.zst"
    noise = np.random.default_rng(0)
    written = []
    for index in range(400):
        tokens, logprobs = noise.integers(0, 9, 300, np.int32), noise.normal(size=300).astype(np.float32)
        turn = Turn({"role": "assistant", "content": "x"}, tokens, logprobs, 1)
        written.append(record(Trajectory(str(index), "t", ((turn,),), Score(1.0), StopReason.DONE)))
    write_rollouts(path, written)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])

    with caplog.at_level(logging.WARNING):
        found = list(read_rollouts(path))
    assert same(found, written[: len(found)])
    assert len(found) < len(written)
    assert path.name in caplog.text
    if keep == 0.9:
        assert len(found) > 200  # most of the remaining records are readable


def test_a_complete_file_is_read_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "step-000001.jsonl.zst"
    write_rollouts(path, [])
    assert list(read_rollouts(path)) == []
    write_rollouts(path, [record(example("a", 1.0))])
    assert len(list(read_rollouts(path))) == 1
    assert not caplog.records


def test_a_line_that_is_not_a_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step-000001.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(b'{"step": 1}\n'))
    with pytest.raises(UserError, match="line 1"):
        list(read_rollouts(path))


def test_an_info_that_cannot_be_json_is_named_and_no_file_is_written(tmp_path: Path) -> None:
    trajectory = Trajectory("a", "t", (), Score(0.0), StopReason.DONE, {"handle": object()})
    with pytest.raises(TypeError, match="object"):
        write_rollouts(tmp_path / "x.jsonl.zst", [record(trajectory)])
    assert not list(tmp_path.iterdir())
