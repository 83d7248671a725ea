"""Tests of segments: the file descriptors, address space and disk space that many segments take."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer, columns, log
from gleanrl.utils.errors import UserError
from tests.buffer.world import disk_usage

ROWS = 256  # rows of 2 KiB in a segment


def full(number: int) -> TensorTrajectory:
    """A trajectory that fills one segment exactly; all its values are ``number``."""
    return TensorTrajectory(
        rewards=torch.full((ROWS, 1, 1), float(number)),
        curr_obs={"state": torch.full((ROWS, 1, 512), float(number))},
    )


def opened(path: Path | None, **how: object) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(path, seed=0, segment_bytes=5 << 17, **how)  # type: ignore[arg-type]


def assert_all_there(buffer: TrajectoryReplayBuffer, first: int, end: int) -> None:
    batch = buffer.read(torch.arange(first * ROWS, end * ROWS))
    wanted = torch.arange(first, end).repeat_interleave(ROWS).float()
    assert torch.equal(batch["rewards"][:, 0], wanted)
    assert torch.equal(batch["curr_obs"]["state"][:, 511], wanted)


def test_segments_hold_no_file_descriptors(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    with opened(tmp_path) as buffer:
        buffer.add_trajectories([full(0)])
        assert buffer.storage.snapshot.tables[0].capacity[0] == ROWS  # type: ignore[attr-defined]
        before = descriptors()
        buffer.add_trajectories([full(number) for number in range(1, 20)])
        assert descriptors() <= before + 1
        with opened(tmp_path, read_only=True) as reader:
            assert descriptors() <= before + 6
            assert_all_there(reader, 0, 20)
        buffer.add_trajectories([TensorTrajectory(actions=torch.zeros(2, 1, width)) for width in range(1, 9)])
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 8, limits[1]))
        try:
            for number in range(28, 40):
                buffer.add_trajectories([full(number)])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("path", [None, "buffer"])
def test_address_space_grows_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    monkeypatch.setattr(columns, "ADDRESSES", 2 << 20)  # three segments
    monkeypatch.setattr(log, "ADDRESSES", 1 << 12)  # 32 records
    folder = tmp_path / path if path else None
    with opened(folder) as buffer:
        buffer.add_trajectories([full(0)])
        first = buffer.storage.snapshot.records
        reader = opened(folder, read_only=True) if folder else None
        for number in range(1, 20):
            buffer.add_trajectories([full(number)])
            if reader and number % 7 == 0:
                assert_all_there(reader, 0, number + 1)
        assert_all_there(buffer, 0, 20)
        assert first["id"].tolist() == [0]  # a view taken before the address space grew stays valid
        # The new rows need more than four times the present address space.
        buffer.add_trajectories([full(number) for number in range(20, 120)])
        assert_all_there(buffer, 0, 120)
        assert len(buffer) == 120
        if reader:
            reader.storage.refresh()
            assert_all_there(reader, 0, 120)
            reader.close()


def test_addresses_of_evicted_segments_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "ADDRESSES", 5 << 20)
    with opened(tmp_path, max_rows=4 * ROWS) as buffer:
        for number in range(12):
            buffer.add_trajectories([full(number)])
            assert_all_there(buffer, buffer.trajectory_counter - len(buffer), number + 1)
        assert buffer.storage.snapshot.tables[0].columns.slots == 9  # type: ignore[attr-defined]
        with buffer.storage.held():  # the addresses of rows that a sample may still read are not reused
            rows = torch.arange(8 * ROWS, 9 * ROWS)
            table = buffer.storage.snapshot.tables[0]
            for number in range(12, 14):
                buffer.add_trajectories([full(number)])
            assert table.read(rows, [("rewards",)])[("rewards",)].unique().tolist() == [8.0]


def test_a_lack_of_address_space_is_a_user_error_and_loses_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "ADDRESSES", 2 << 20)
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([full(0), full(1)])

        def none_left(*_: object) -> None:
            raise OSError(12, "cannot map 1 bytes: Cannot allocate memory")

        monkeypatch.setattr(columns, "AddressSpace", none_left)
        with pytest.raises(UserError, match="no address space for more rows"):
            buffer.add_trajectories([full(number) for number in range(2, 9)])
        assert_all_there(buffer, 0, 2)
        monkeypatch.undo()
        buffer.add_trajectories([full(2)])
        assert_all_there(buffer, 0, 3)


def test_many_schemas_take_little_address_space_and_disk(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path, seed=0) as buffer:
        before = addresses()
        wide = {"curr_obs": {"s": torch.zeros(2, 1, 600)}, "next_obs": {"s": torch.ones(2, 1, 600)}}
        for width in range(1, 21):
            buffer.add_trajectories([TensorTrajectory(actions=torch.zeros(2, 1, width), **wide)])
        assert addresses() - before < 1 << 40
        assert disk_usage(tmp_path) < 20 * (6 << 20)
        assert buffer.get_stats()["bytes"] < 20 * (6 << 20)
        buffer.clear()
        assert disk_usage(tmp_path) < 1 << 20


def addresses() -> int:
    """Return the bytes of address space that this process uses."""
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("the system does not say")
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="address space is not limited elsewhere")
def test_a_buffer_works_with_3_gib_of_address_space(tmp_path: Path) -> None:
    script = """
import resource, sys, torch
from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (3 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with TrajectoryReplayBuffer(sys.argv[1], seed=0) as buffer:
    buffer.add_trajectories([TensorTrajectory(actions=torch.ones(4, 2, 3))])
    print(int(buffer.sample(8)["actions"].sum()))
"""
    found = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert found.stdout == "24\n", found.stderr


def test_a_reader_reports_no_lost_files_after_segments_were_evicted_during_its_sample(tmp_path: Path) -> None:
    with opened(tmp_path / "buffer", max_rows=4 * ROWS) as buffer:
        buffer.add_trajectories([full(0)])
        with opened(tmp_path / "buffer", read_only=True) as reader:
            with reader.storage.held():
                for number in range(1, 12):
                    buffer.add_trajectories([full(number)])
                reader.storage.refresh()
                assert reader.storage.lost_files() == []
            assert reader.verify() == []
            reader.save_checkpoint(tmp_path / "checkpoint")
    with opened(tmp_path / "checkpoint", read_only=True) as saved:
        assert_all_there(saved, 12 - len(saved), 12)
