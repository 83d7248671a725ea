"""Tests of eviction under ``max_rows`` and ``max_bytes``.

The oldest trajectories are evicted first, no more than necessary, and never those that were just added.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer
from gleanrl.buffer.log import Manifest
from gleanrl.utils.errors import UserError
from tests.buffer.world import WAIT, assert_same, disk_usage, trajectory

SLACK = 1 << 16  # bytes of the manifest, of schemas, and of pages that are not full


def plain(number: int, steps: int = 60) -> TensorTrajectory:
    """A trajectory with rows of 2 KiB; all its values are ``number``."""
    return TensorTrajectory(
        rewards=torch.full((steps, 1, 1), float(number)),
        curr_obs={"state": torch.full((steps, 1, 512), float(number))},
    )


@contextmanager
def sampling(buffer: TrajectoryReplayBuffer) -> Iterator[None]:
    """While the block runs, another thread holds the buffer as a running sample does."""
    begun, end = threading.Event(), threading.Event()

    def run() -> None:
        with buffer.storage.held():
            begun.set()
            assert end.wait(WAIT)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(WAIT)
    try:
        yield
    finally:
        end.set()
        thread.join(WAIT)


def test_max_bytes_holds_while_another_thread_samples(tmp_path: Path) -> None:
    quota = 12 << 17
    with TrajectoryReplayBuffer(tmp_path / "buffer", segment_bytes=1 << 17, max_bytes=quota) as buffer:
        for number in range(14):
            buffer.add_trajectories([plain(number)])
        before = len(buffer)
        assert before > 6
        with sampling(buffer):
            for number in range(14, 22):
                buffer.add_trajectories([plain(number)])
                assert len(buffer) >= before - 2
                assert disk_usage(tmp_path / "buffer") <= quota + SLACK
            # The checkpoint must not contain the evicted segments that the sample keeps mapped.
            buffer.save_checkpoint(tmp_path / "checkpoint")
            assert buffer.storage.unmap_pending
        assert not buffer.storage.unmap_pending
        assert buffer.verify() == []
    with TrajectoryReplayBuffer(tmp_path / "checkpoint", read_only=True) as saved:
        assert saved.verify() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_evicted_segments_are_unmapped_although_some_sample_is_always_running(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path, segment_bytes=1 << 17, max_rows=400) as buffer:
        mapped = list[int]()
        one = sampling(buffer)
        one.__enter__()
        for number in range(30):
            buffer.add_trajectories([plain(number)])
            other = sampling(buffer)  # this sample begins before the previous one ends
            other.__enter__()
            one.__exit__(None, None, None)
            one = other
            mapped.append(Path("/proc/self/maps").read_text().count(f"{tmp_path}/000-rows-"))
        one.__exit__(None, None, None)
        assert 0 < max(mapped) <= 2 * mapped[12] + 4


def test_a_running_sample_can_read_rows_that_are_evicted_meanwhile(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path, segment_bytes=1 << 17, max_rows=400) as buffer:
        buffer.add_trajectories([plain(1), plain(2)])
        table = buffer.storage.snapshot.tables[0]
        with buffer.storage.held():
            for number in range(3, 20):
                with buffer.storage.held():  # a second sample, which begins after and ends before the first
                    buffer.add_trajectories([plain(number)])
            found = table.read(torch.arange(120), [("rewards",), ("curr_obs", "state")])
        assert found[("rewards",)].reshape(-1).tolist() == [1.0] * 60 + [2.0] * 60
        assert (found[("curr_obs", "state")] == found[("rewards",)]).all()
        assert buffer.storage.snapshot.first_id > 8


def test_a_call_that_exceeds_max_bytes_alone_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path, segment_bytes=1 << 17, max_bytes=1 << 20) as buffer:
        buffer.add_trajectories([plain(1), plain(2)])
        with pytest.raises(UserError, match="max_bytes = 1048576: what is added at once needs"):
            buffer.add_trajectories([plain(3, 600)])
        with pytest.raises(UserError, match="max_bytes = 1048576: what is added at once needs"):
            buffer.add_trajectories([plain(number) for number in range(10)])
        assert len(buffer) == 2


@pytest.mark.parametrize("instructions", [False, True])
def test_max_bytes_includes_the_log_and_the_texts(tmp_path: Path, instructions: bool) -> None:
    quota = 1 << 18
    flags = torch.zeros(5, 64, 1, dtype=torch.bool)
    with TrajectoryReplayBuffer(tmp_path, segment_bytes=1 << 15, max_bytes=quota) as buffer:
        for number in range(60):
            own = TensorTrajectory(
                actions=torch.full((4, 64, 1), float(number)),
                dones=flags,
                prev_values=torch.rand(5, 64, 2),
                task_descriptions=["lift"] * 64 if instructions else None,
            )
            assert buffer.add_trajectories([own]) == [number]
            if number % 10 == 0:
                assert disk_usage(tmp_path) <= quota + SLACK
                assert_same(buffer.trajectory(number), own)
        assert len(buffer) > 8
        assert buffer.storage.manifest.base > 20
        assert buffer.verify() == []
        assert set(buffer.sample(200)["actions"].int().reshape(-1).tolist()) <= set(range(60 - len(buffer), 60))
        first = buffer.trajectory_counter - len(buffer)
        kept = buffer.trajectory(first)
        buffer.save_checkpoint(tmp_path / "checkpoint")
    with TrajectoryReplayBuffer(tmp_path, segment_bytes=1 << 16) as again:
        assert again.trajectory_counter - len(again) == first
        assert_same(again.trajectory(first), kept)
        assert again.verify() == []
        again.load_checkpoint(tmp_path / "checkpoint")
        assert_same(again.trajectory(first), kept)


def test_a_reader_follows_a_log_that_the_writer_shortens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gleanrl.buffer import writer

    monkeypatch.setattr(writer, "SHORTEN", 256)
    buffer = TrajectoryReplayBuffer(tmp_path, seed=0, segment_bytes=1 << 18, max_rows=100)
    with buffer, TrajectoryReplayBuffer(tmp_path, seed=0, read_only=True) as reader:
        logs = set[str]()
        for number in range(40):
            buffer.add_trajectories([trajectory(number, extra=number % 3 == 0)])
            logs.add(buffer.storage.manifest.log)
            mark = reader.sample(18)["actions"][:, 0]
            assert (mark >= (number - 6) * 1000).all()
            assert (len(reader), reader.trajectory_counter) == (len(buffer), number + 1)
            assert_same(reader.trajectory(number), trajectory(number, extra=number % 3 == 0))
        assert len(logs) > 3
        assert reader.verify() == []
        assert len(list(tmp_path.glob("*-log-*"))) == 1


def test_task_descriptions_of_evicted_trajectories_are_freed(tmp_path: Path) -> None:
    quota = 1 << 18

    def described(number: int) -> TensorTrajectory:
        own = TensorTrajectory(actions=torch.full((2, 2, 1), float(number)))
        return replace(own, task_descriptions=["always the same", f"{number} " * 100])

    with TrajectoryReplayBuffer(tmp_path, segment_bytes=1 << 15, max_bytes=quota) as buffer:
        for number in range(1500):  # their descriptions have 700 kB
            buffer.add_trajectories([described(number)])
        assert disk_usage(tmp_path) <= quota + SLACK
        assert len(buffer) > 100
        buffer.clear()
        for number in range(1500, 1600):
            buffer.add_trajectories([described(number)])
        assert len(buffer) == 100
        for source in (buffer, TrajectoryReplayBuffer(tmp_path, read_only=True)):
            batch = source.sample(400)
            for action, text in zip(batch["actions"].int().tolist(), batch["task_descriptions"], strict=True):
                assert text in described(action[0]).task_descriptions  # type: ignore[operator]
            assert source.verify() == []


def test_checkpoints_of_several_ranks_are_loaded_up_to_max_bytes(tmp_path: Path) -> None:
    for rank in range(2):
        with TrajectoryReplayBuffer(tmp_path / f"work-{rank}") as buffer:
            buffer.add_trajectories([trajectory(10 * rank + number, steps=30) for number in range(10)])
            buffer.save_checkpoint(tmp_path / f"ranks/rank_{rank}")
    with TrajectoryReplayBuffer(tmp_path / "loaded", max_bytes=1 << 20) as buffer:
        buffer.load_checkpoint(tmp_path / "ranks")
        assert 1 <= len(buffer) < 20
        assert buffer.get_stats()["bytes"] <= 1 << 20
        newest = buffer.trajectory(buffer.trajectory_counter - 1, verify=True)
        assert_same(newest, trajectory(19, steps=30))


def test_many_small_trajectories_are_loaded_up_to_max_bytes(tmp_path: Path) -> None:
    """Each of them takes more bytes of the log and of its record than its tensors have."""
    quota = 500_000
    small = [TensorTrajectory(actions=torch.full((1, 1, 20), float(number))) for number in range(10_000)]
    with TrajectoryReplayBuffer() as source:
        source.add_trajectories(small)
        source.save_checkpoint(tmp_path / "checkpoint")
    with TrajectoryReplayBuffer(tmp_path / "added", max_bytes=quota) as added:
        for begin in range(0, len(small), 250):
            added.add_trajectories(small[begin : begin + 250])
        kept = len(added)
    with TrajectoryReplayBuffer(tmp_path / "loaded", max_bytes=quota) as loaded:
        loaded.load_checkpoint(tmp_path / "checkpoint")
        assert kept / 2 < len(loaded) < len(small)
        assert disk_usage(tmp_path / "loaded") <= quota + SLACK
        assert loaded.verify() == []
        assert_same(loaded.trajectory(loaded.trajectory_counter - 1), small[-1])


@pytest.mark.parametrize("quota", [None, 1 << 20])
def test_max_bytes_holds_after_a_checkpoint_is_loaded(tmp_path: Path, quota: int | None) -> None:
    with TrajectoryReplayBuffer(tmp_path / "work", max_bytes=quota) as buffer:
        for number in range(5):
            buffer.add_trajectories([plain(number)])
        buffer.save_checkpoint(tmp_path / "checkpoint")
        for number in range(5, 12):  # rows in a file that the checkpoint shares
            buffer.add_trajectories([plain(number)])
    for part, limit in (("small", 1 << 19), ("enough", 1 << 20)):
        with TrajectoryReplayBuffer(tmp_path / part, max_bytes=limit) as loaded:
            loaded.load_checkpoint(tmp_path / "checkpoint")
            for number in range(5, 25):
                assert 0 < disk_usage(tmp_path / part) <= limit + SLACK
                assert_same(loaded.trajectory(loaded.trajectory_counter - 1, verify=True), plain(number - 1))
                loaded.add_trajectories([plain(number)])
            assert len(loaded) >= 1


@pytest.mark.parametrize("limit", ["max_rows", "max_bytes", "max_age"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_that_keeps_nothing_is_refused(tmp_path: Path, limit: str, value: float) -> None:
    with pytest.raises(UserError, match=limit):
        TrajectoryReplayBuffer(tmp_path / "buffer", **{limit: value})  # type: ignore[arg-type]
    assert not (tmp_path / "buffer").exists()


@pytest.mark.parametrize("steps", [8, 40])
def test_max_rows_holds_although_a_segment_has_room_for_more(tmp_path: Path, steps: int) -> None:
    small = [TensorTrajectory(rewards=torch.full((steps, 2, 1), float(number))) for number in range(20)]
    with TrajectoryReplayBuffer(tmp_path, max_rows=100) as buffer:
        for number in range(20):
            buffer.add_trajectories([small[number]])
            assert min(75, (number + 1) * 2 * steps) <= buffer.total_samples <= 100
            assert_same(buffer.trajectory(number), small[number])
        assert buffer.add_trajectories([small[0], small[1], small[2]]) == [20, 21, 22]
        assert 0 < buffer.total_samples <= 100
        first = buffer.trajectory_counter - len(buffer)
        with pytest.raises(UserError, match=f"no trajectory {first - 1}"):
            buffer.trajectory(first - 1)
        long = TensorTrajectory(rewards=torch.ones(300, 2, 1))
        buffer.add_trajectories([small[0], long])
        assert (len(buffer), buffer.total_samples) == (1, 600)
        buffer.add_trajectories([small[0]])
        assert (len(buffer), buffer.total_samples) == (1, 2 * steps)


def test_a_segment_is_smaller_than_max_rows_and_max_bytes(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path / "rows", max_rows=5000) as buffer:
        buffer.add_trajectories([plain(0)])
        assert buffer.storage.snapshot.tables[0].capacity[0] <= 1250  # type: ignore[attr-defined]
    with TrajectoryReplayBuffer(tmp_path / "bytes", max_bytes=1 << 20) as buffer:
        for number in range(30):
            buffer.add_trajectories([plain(number)])
        assert len(buffer) >= 4


def test_max_bytes_drops_everything_that_must_go_with_one_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trajectories of two schemas take turns, so that the oldest ones of a segment do not follow each other."""
    writes, write = list[int](), Manifest.write
    monkeypatch.setattr(
        Manifest, "write", lambda manifest, files: writes.append(manifest.first) or write(manifest, files)
    )
    quota = 1 << 20
    with TrajectoryReplayBuffer(tmp_path / "buffer", max_bytes=quota) as buffer:
        for number in range(700):
            before = len(writes)
            buffer.add_trajectories([{"actions": torch.zeros(4, 1, 16 + number % 2), "state": torch.zeros(4, 1, 100)}])
            # one for the dropped trajectories, one for a shorter log, one for a new segment
            assert len(writes) <= before + 3
            assert disk_usage(tmp_path / "buffer") <= quota + SLACK
        assert 100 < len(buffer) < 600


@pytest.mark.parametrize("back", [0.0, 100.0])
def test_max_age_keeps_young_trajectories_although_the_clock_was_set_back(
    back: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr("time.time", lambda: clock)
    with TrajectoryReplayBuffer(max_age=50) as buffer:
        buffer.add_trajectories([plain(0), plain(1)])
        clock -= back
        buffer.add_trajectories([plain(2), plain(3)])
        clock = 1001.0
        buffer.add_trajectories([plain(4)])
        assert len(buffer) == 5
        clock = 1040.0
        buffer.add_trajectories([plain(5)])
        clock = 1060.0
        buffer.add_trajectories([plain(6)])
        assert buffer.trajectory_counter - len(buffer) == 5
        clock = 2000.0
        buffer.add_trajectories([plain(7)])
        assert len(buffer) == 1


def test_max_age_keeps_the_newest_trajectory() -> None:
    with TrajectoryReplayBuffer(max_age=1e-9) as buffer:
        for number in range(3):
            buffer.add_trajectories([plain(number)])
            assert len(buffer) == 1


def test_a_quota_of_less_than_two_files_is_a_warning_that_names_the_field() -> None:
    def image(width: int) -> dict[str, torch.Tensor]:
        return {"rewards": torch.zeros(100, 1, 1), "image": torch.zeros(100, 1, width, dtype=torch.uint8)}

    with TrajectoryReplayBuffer(max_bytes=4 << 20) as buffer:
        buffer.add_trajectories([image(1280)])
        with pytest.warns(UserWarning, match=r"pad image uint8\[1281\], so that its 1281 bytes"):
            buffer.add_trajectories([image(1281)])
