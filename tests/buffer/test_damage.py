"""A full disk, lost and damaged files: clear errors, nothing acknowledged is lost, the rest is readable."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl import atomic
from gleanrl.buffer import TrajectoryReplayBuffer
from gleanrl.errors import UserError
from tests.buffer.world import assert_same, trajectory

SMALL = 1 << 18  # bytes of a segment: a few trajectories


def opened(path: Path, **how: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(path, seed=0, segment_bytes=SMALL, **how)


class FullDisk:
    """Makes the n-th call that needs space fail, and those after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None  # calls that still succeed; None = all
        for name in ("posix_fallocate", "pwrite"):
            monkeypatch.setattr(os, name, self.limited(getattr(os, name)))
        monkeypatch.setattr(atomic, "write_bytes", self.limited(atomic.write_bytes))

    def limited(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if self.left is not None:
                if not self.left:
                    raise OSError(errno.ENOSPC, "No space left on device")
                self.left -= 1
            return call(*arguments)

        return run


@pytest.mark.filterwarnings("ignore:the buffer keeps more than it should")
@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="space is reserved otherwise here")
@pytest.mark.parametrize("limits", [{}, {"max_rows": 60}])
def test_a_full_disk_costs_nothing_that_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict
) -> None:
    disk = FullDisk(monkeypatch)
    failed = 0
    for calls in range(100):
        known = {number: trajectory(number) for number in range(3)}
        disk.left = None
        with opened(tmp_path / str(calls), **limits) as buffer:
            buffer.add_trajectories(list(known.values()))
            disk.left = calls
            fresh = [trajectory(3, 40), trajectory(4, 30, extra=True, task_descriptions=["lift"] * 3)]
            refused = disk_is_full(lambda new=fresh: buffer.add_trajectories(new))
            disk.left = None
            if refused:
                failed += 1
                assert len(buffer) == 3
                assert buffer.verify() == []
                fresh = [trajectory(3, 2), *fresh]  # others than those that failed lie in their place
                assert buffer.add_trajectories(fresh) == [3, 4, 5]
            known |= dict(enumerate(fresh, 3))
            check(buffer, known)
        with opened(tmp_path / str(calls), **limits) as buffer:
            check(buffer, known)
        if not refused:
            break
    assert failed > 8


def disk_is_full(call: Callable[[], Any]) -> bool:
    try:
        call()
    except OSError as error:
        return error.errno == errno.ENOSPC
    return False


def check(buffer: TrajectoryReplayBuffer, known: dict) -> None:
    assert buffer.verify() == []
    assert buffer.trajectory_counter == len(known)
    for number in range(buffer.trajectory_counter - len(buffer), len(known)):
        assert_same(buffer.trajectory(number), known[number])


def test_what_cannot_be_evicted_now_is_evicted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, max_rows=1000) as buffer:
        buffer.add_trajectories([trajectory(number, 40) for number in range(8)])
        real = atomic.write_bytes

        def full(*_: Any) -> None:
            raise UserError("the disk is full")

        monkeypatch.setattr(atomic, "write_bytes", full)
        with pytest.warns(UserWarning, match="keeps more than it should until the next add: the disk is full"):
            assert buffer.add_trajectories([trajectory(8, 40)]) == [8]
        assert len(buffer) == 9
        assert_same(buffer.trajectory(8), trajectory(8, 40))
        monkeypatch.setattr(atomic, "write_bytes", real)
        assert buffer.add_trajectories([trajectory(9, 40)]) == [9]
        assert buffer.total_samples <= 1000
        assert_same(buffer.trajectory(9), trajectory(9, 40))


def test_rows_that_are_being_written_are_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(0)])
        seen: list[set[int]] = []
        real = os.fdatasync

        def sync(file: int) -> None:
            seen.append(set(buffer.sample(18)["versions"].reshape(-1).tolist()))
            real(file)

        monkeypatch.setattr(os, "fdatasync", sync)
        buffer.add_trajectories([trajectory(1, 200)])
        monkeypatch.undo()
        assert len(seen) >= 2
        assert set().union(*seen) == {0}


def test_making_room_for_one_of_several_does_not_remove_another(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as buffer:
        buffer.add_trajectories([trajectory(0)])
        [table] = buffer._store.tables
        steps, quota = table.capacity[0] // 2, table.nbytes + table.columns.segment_nbytes + (1 << 16)
    with TrajectoryReplayBuffer(tmp_path / "b", segment_bytes=SMALL, max_bytes=quota) as buffer:
        buffer.add_trajectories([trajectory(0, steps, 1), trajectory(1, steps, 1)])  # the first segment, full
        fresh = [trajectory(2, steps, 1), trajectory(3, steps, 1), trajectory(4, 4, 1)]  # the second; and a third
        assert buffer.add_trajectories(fresh) == [2, 3, 4]
        assert len(buffer) == 3
        assert buffer.verify() == []
        for number in range(2, 5):
            assert_same(buffer.trajectory(number), fresh[number - 2])


def test_what_is_evicted_while_a_sample_is_drawn_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gleanrl.buffer import drawing

    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(1, 100)])  # more than a segment
        real = drawing.draw

        def draw(*arguments: Any) -> torch.Tensor:
            drawn = real(*arguments)
            buffer._store.drop(buffer._store.next_id)  # as another thread would
            return drawn

        monkeypatch.setattr(drawing, "draw", draw)
        sample = buffer.sample(300)
        assert set(sample["versions"].reshape(-1).tolist()) == {1}
        assert (sample["curr_obs"]["state"] == sample["actions"][:, :1]).all()
