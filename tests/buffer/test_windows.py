"""Tests of conditional sampling: a buffer that keeps its record of matching rows samples like a fresh one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gleanrl.buffer import Only, TrajectoryReplayBuffer, sampling
from tests.buffer.world import same, trajectory

CONDITIONS = (Only(success=True), Only(success=False), Only(versions=(2, 20)), Only(intervened=False))


def add(buffer: TrajectoryReplayBuffer, numbers: range) -> None:
    for number in numbers:
        extra = number % 5 == 0  # these go into another table
        buffer.add_trajectories([trajectory(number, 3 + number % 2, extra=extra, success=number % 3 == 0)])


def draw(buffer: TrajectoryReplayBuffer, only: Only) -> Any:
    buffer.generator.manual_seed(7)
    return [buffer.sample(64, only=only, allow_short=True), buffer.sample_slices(8, 2, only=only)]


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("block", [2, sampling.RECORDS])
def test_conditional_samples_follow_additions_and_evictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, block: int
) -> None:
    monkeypatch.setattr(sampling, "RECORDS", block)
    with TrajectoryReplayBuffer(tmp_path / "b", seed=0, sample_window_size=window) as buffer:
        for begin in range(0, 24, 6):
            add(buffer, range(begin, begin + 6))
            if begin == 12:
                buffer.storage.drop(13)  # more than half of what is known of some conditions
            for only in CONDITIONS:
                with TrajectoryReplayBuffer(tmp_path / "b", seed=0, sample_window_size=window, read_only=True) as fresh:
                    for ours, theirs in zip(draw(buffer, only), draw(fresh, only), strict=True):
                        assert same(ours, theirs)


def test_what_is_known_of_a_condition_does_not_grow_with_dropped_trajectories() -> None:
    only = Only(success=True)
    with TrajectoryReplayBuffer(seed=0, max_rows=1000) as buffer:
        for _ in range(12):
            buffer.add_trajectories([trajectory(0, 1, 1, wide=False, success=True)] * 500)
            buffer.sample(8, only=only)
        assert buffer.windows.indexes[only][0][0]._all.shape[1] <= 3000


def test_conditional_samples_follow_a_loaded_checkpoint(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path / "one", seed=0) as other:
        add(other, range(31, 43))
        other.save_checkpoint(tmp_path / "saved")
        wanted = draw(other, CONDITIONS[0])
    with TrajectoryReplayBuffer(tmp_path / "two", seed=0) as buffer:
        add(buffer, range(12))
        assert not same(draw(buffer, CONDITIONS[0])[0], wanted[0])
        buffer.load_checkpoint(tmp_path / "saved")
        assert same(draw(buffer, CONDITIONS[0])[0], wanted[0])


def test_versions_of_a_condition_may_be_a_list() -> None:
    assert Only(versions=[1, 2]) == Only(versions=(1, 2))  # type: ignore[arg-type]
    assert hash(Only(versions=[1, 2])) == hash(Only(versions=(1, 2)))  # type: ignore[arg-type]
