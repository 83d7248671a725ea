"""One test for each known defect of RLinf's replay buffer: this buffer does not have it.

Each docstring says what RLinf's buffer does; the test would fail there.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.buffer import MixedReplayBuffer, TensorTrajectory, TrajectoryReplayBuffer
from gleanrl.utils.errors import UserError
from tests.buffer.test_rlinf import fields, write
from tests.buffer.world import WAIT, assert_same, disk_usage, in_a_thread, numbers, same, trajectory


def test_sampling_right_after_an_add_returns_the_whole_new_trajectory(tmp_path: Path) -> None:
    """In RLinf, sampling right after an add meets missing or partly written files."""
    buffer = TrajectoryReplayBuffer(tmp_path, seed=0, sample_window_size=1)
    with buffer, TrajectoryReplayBuffer(tmp_path, seed=0, sample_window_size=1, read_only=True) as reader:
        for number in range(30):
            buffer.add_trajectories([trajectory(number)])
            for sampled in (buffer.sample(18), reader.sample(18)):
                assert numbers(sampled) == {number}
                assert torch.equal(sampled["curr_obs"]["state"][:, 0], sampled["actions"][:, 0])


def test_a_buffer_whose_last_record_was_cut_by_a_crash_keeps_the_earlier_trajectories(tmp_path: Path) -> None:
    """In RLinf, a kill while the index is written leaves half an index, and the whole buffer cannot be loaded."""
    with TrajectoryReplayBuffer(tmp_path / "whole", seed=0) as buffer:
        buffer.add_trajectories([trajectory(0)])
        log = next((tmp_path / "whole").glob("*-log-*"))
        before = log.stat().st_size
        buffer.add_trajectories([trajectory(1)])
        shutil.copytree(tmp_path / "whole", tmp_path / "killed")  # the files as they are before `close`
    log, after = tmp_path / "killed" / log.name, log.read_bytes()
    for length in range(before, len(after) + 1):  # the second record is cut at every length
        shutil.copytree(tmp_path / "killed", tmp_path / str(length), copy_function=os.link)
        log = tmp_path / str(length) / log.name
        log.unlink()
        log.write_bytes(after[:length])
        there = 2 if length == len(after) else 1
        with TrajectoryReplayBuffer(tmp_path / str(length), read_only=True) as reader:
            assert len(reader) == there
            assert len(reader.verify()) == (before < length < len(after))
        with TrajectoryReplayBuffer(tmp_path / str(length), seed=0) as buffer:
            assert buffer.verify() == []
            for number in range(there):
                assert_same(buffer.trajectory(number), trajectory(number))
    # This write comes last, because the copies of all lengths are hard links to one segment file.
    with TrajectoryReplayBuffer(tmp_path / str(before + 50), seed=0) as buffer:
        assert buffer.add_trajectories([trajectory(2)]) == [1]
        assert_same(buffer.trajectory(1), trajectory(2))


@pytest.mark.parametrize("auto_save", [True, False])
def test_save_checkpoint_contains_what_was_added_since_the_last_sample(tmp_path: Path, auto_save: bool) -> None:
    """In RLinf, a checkpoint lacks what was added after the last sample."""
    path = tmp_path / "buffer"
    with TrajectoryReplayBuffer(path, seed=0, auto_save=auto_save, sample_window_size=2, cache_size=1) as buffer:
        buffer.add_trajectories([trajectory(0), trajectory(1), trajectory(2)])
        buffer.sample(4)
        buffer.add_trajectories([trajectory(3)])
        buffer.add_trajectories([trajectory(4)], wait=False)
        assert path.exists() == auto_save
        buffer.save_checkpoint(tmp_path / "checkpoint")
    with TrajectoryReplayBuffer(seed=0) as other:
        other.load_checkpoint(tmp_path / "checkpoint")
        assert (len(other), other.total_samples, other.trajectory_counter) == (5, 90, 5)
        for number in range(5):
            assert_same(other.trajectory(number), trajectory(number))


def test_a_second_resume_keeps_the_trajectories_of_the_first(tmp_path: Path) -> None:
    """In RLinf, a checkpoint of a resumed run lacks the trajectories of the checkpoint that it resumed from."""
    for life in range(3):
        with TrajectoryReplayBuffer(tmp_path / f"buffer-{life}", seed=0) as buffer:
            if life:
                buffer.load_checkpoint(tmp_path / f"checkpoint-{life - 1}")
            assert buffer.add_trajectories([trajectory(2 * life), trajectory(2 * life + 1)]) == [2 * life, 2 * life + 1]
            buffer.save_checkpoint(tmp_path / f"checkpoint-{life}")
    with TrajectoryReplayBuffer(tmp_path / "checkpoint-2", read_only=True) as buffer:
        assert len(buffer) == 6
        for number in range(6):
            assert_same(buffer.trajectory(number), trajectory(number))


def test_prev_values_with_bootstrap_rows_stay_aligned_on_a_cache_miss(tmp_path: Path) -> None:
    """In RLinf, a trajectory that is read from its file has its `prev_values` shifted by the bootstrap rows."""

    def by_step(number: int, length: int) -> torch.Tensor:
        """A tensor ``[2 * length, 3, 1]`` whose values are step + 10 * epoch + 100 * trajectory."""
        values = torch.cat([torch.arange(float(length)) + 10 * epoch + 100 * number for epoch in range(2)])
        return values[:, None, None].expand(-1, 3, 1).contiguous()

    def made(number: int) -> dict[str, Any]:
        return {**fields(number), "rewards": by_step(number, 3), "prev_values": by_step(number, 4)}

    folder = write(tmp_path / "rlinf", [made(number) for number in range(4)])
    with TrajectoryReplayBuffer(tmp_path / "ours", seed=0) as ours:
        ours.add_trajectories([made(number) for number in range(4)])
        with TrajectoryReplayBuffer(folder, read_only=True, cache_size=1) as theirs:
            for buffer in (ours, theirs):
                sample = buffer.sample(72)
                assert torch.equal(sample["prev_values"], sample["rewards"])
                assert torch.equal(buffer.trajectory(3).prev_values, made(3)["prev_values"])  # type: ignore[arg-type]


def test_a_field_that_a_trajectory_lacks_is_left_out_of_the_sample(tmp_path: Path) -> None:
    """In RLinf, where a trajectory lacks a field, the sample holds rows of a trajectory evicted from the cache."""
    with TrajectoryReplayBuffer(tmp_path, seed=0, sample_window_size=2, cache_size=1) as buffer:
        for number in range(8):
            buffer.add_trajectories([trajectory(number, extra=number % 2 == 0)])
            sample = buffer.sample(18)
            assert ("forward_inputs" in sample) == (number == 0)
        with pytest.raises(UserError, match=r"forward_inputs.extra: not every trajectory of the sample has it"):
            buffer.sample(18, fields=["forward_inputs.extra"])
    with TrajectoryReplayBuffer(tmp_path, read_only=True, sample_window_size=1) as buffer:
        assert numbers(buffer.sample(18)) == {7}


def test_sampling_works_with_window_0_and_cache_size_0_without_auto_save() -> None:
    """In RLinf, these settings raise ZeroDivisionError."""
    with TrajectoryReplayBuffer(auto_save=False, sample_window_size=0, enable_cache=True, cache_size=0) as buffer:
        buffer.add_trajectories([trajectory(number) for number in range(5)])
        assert numbers(buffer.sample(90)) == set(range(5))


def draws(buffer: TrajectoryReplayBuffer) -> tuple[int, ...]:
    return tuple(buffer.sample(18, indices=True)["indices"].tolist())


def test_every_rank_draws_from_its_own_random_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In RLinf, all ranks draw the same random numbers."""

    def drawn(rank: int, load: str = "", **how: Any) -> tuple[int, ...]:
        monkeypatch.setenv("RANK", str(rank))
        with TrajectoryReplayBuffer(seed=3) as buffer:
            if load:
                buffer.load_checkpoint(tmp_path / load, **how)
            else:
                buffer.add_trajectories([trajectory(0)])
            return draws(buffer)

    made = [drawn(rank) for rank in range(4)]
    assert len(set(made)) == 4
    assert drawn(2) == made[2]
    with TrajectoryReplayBuffer(seed=3, rank=1) as buffer:
        buffer.add_trajectories([trajectory(0)])
        buffer.save_checkpoint(tmp_path / "native")
        goes_on = draws(buffer)
        buffer.save_checkpoint(tmp_path / "later")
        buffer.save_checkpoint(tmp_path / "parts" / "rank_0")
        buffer.save_checkpoint(tmp_path / "parts" / "rank_1")
        buffer.trajectory_format = "pt"
        buffer.save_checkpoint(tmp_path / "pt")
    halves: dict[str, Any] = {"is_distributed": True, "local_rank": 1, "world_size": 2}
    for load, how in (("native", {}), ("later", {}), ("pt", {}), ("parts", {}), ("parts", halves)):
        loaded = [drawn(rank, load, **how) for rank in range(4)]
        assert len(set(loaded)) == 4
        # Only the rank that saved the checkpoint continues its random stream.
        assert (loaded[1] == goes_on) == (load == "native")
        assert drawn(2, load, **how) == loaded[2]
    assert drawn(2, "later") != drawn(2, "native")  # two checkpoints of one run


def test_a_rank_that_loads_another_rank_s_part_draws_from_its_own_random_stream(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(seed=3, rank=0) as buffer:
        buffer.add_trajectories([trajectory(0)])
        buffer.save_checkpoint(tmp_path / "rank_0")
        goes_on = draws(buffer)
    found = []
    for rank in range(2):
        with TrajectoryReplayBuffer(seed=3, rank=rank) as buffer:
            buffer.load_checkpoint(tmp_path / "rank_0")
            found.append(draws(buffer))
    assert found[0] == goes_on
    assert found[1] != goes_on


@pytest.mark.parametrize("ranks", [1, 2])
def test_loading_a_checkpoint_restores_the_random_state(tmp_path: Path, ranks: int) -> None:
    """In RLinf, loading a checkpoint resets the random generator to the seed."""
    wanted = []
    for rank in range(ranks):
        with TrajectoryReplayBuffer(seed=3, rank=rank) as buffer:
            buffer.add_trajectories([trajectory(0)])
            first = buffer.sample(10, indices=True)["indices"]
            buffer.save_checkpoint(tmp_path / "checkpoint" / f"rank_{rank}")
            wanted.append(buffer.sample(10, indices=True)["indices"])
            assert not torch.equal(first, wanted[-1])
    for rank in range(ranks):
        with TrajectoryReplayBuffer(seed=99, rank=rank) as buffer:
            buffer.load_checkpoint(tmp_path / "checkpoint", ranks > 1, rank, ranks)
            assert torch.equal(buffer.sample(10, indices=True)["indices"], wanted[rank])
            assert buffer.seed == 3


def test_a_full_write_queue_blocks_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In RLinf, the queue of trajectories to write grows without bound where the disk is slow."""
    from gleanrl.buffer import background

    go_on, written, limit = threading.Event(), threading.Event(), 1 << 18
    real = os.fdatasync

    def slow(file: int) -> None:
        written.set()
        assert go_on.wait(WAIT)
        real(file)

    with TrajectoryReplayBuffer(tmp_path, seed=0) as buffer:
        buffer.add_trajectories([trajectory(0)])
        monkeypatch.setattr(background, "QUEUE_NBYTES", limit)
        monkeypatch.setattr(os, "fdatasync", slow)
        added: list[int] = []

        def fill() -> None:
            for number in range(1, 60):  # 75 kB each
                buffer.add_trajectories([trajectory(number)], wait=False)
                added.append(number)

        thread = threading.Thread(target=fill)
        thread.start()
        assert written.wait(WAIT)
        thread.join(0.3)
        assert thread.is_alive(), "nothing held the caller up"
        # One limit for the batch being written and one for the queue, plus the trajectory that exceeds it.
        assert len(added) * 75_000 <= 2 * limit + 75_000
        go_on.set()
        thread.join(WAIT)
        buffer.flush()
        assert len(buffer) == 60


def test_disk_space_of_evicted_trajectories_is_freed(tmp_path: Path) -> None:
    """In RLinf, files of evicted trajectories stay on disk."""
    most = 0
    with TrajectoryReplayBuffer(tmp_path, seed=0, max_rows=300, segment_bytes=1 << 18) as buffer:
        for number in range(60):
            buffer.add_trajectories([trajectory(number, 20)])
            most = max(most, disk_usage(tmp_path))
        written = 60 * 60 * (2 * 2080 + 64)
        assert most < written / 3
        assert len(buffer) < 10
        buffer.clear()
        assert disk_usage(tmp_path) < most / 2


def test_a_checkpoint_contains_the_demonstration_buffer(tmp_path: Path) -> None:
    """In RLinf, a checkpoint does not contain the demonstration buffer."""

    def mixed() -> MixedReplayBuffer:
        return MixedReplayBuffer(TrajectoryReplayBuffer(seed=1), TrajectoryReplayBuffer(seed=2))

    before, after = mixed(), mixed()
    before.online.add_trajectories([trajectory(0)])
    before.demonstrations.add_trajectories([trajectory(1), trajectory(2)])
    before.save_checkpoint(tmp_path)
    after.load_checkpoint(tmp_path)
    assert same(after.sample(20), before.sample(20))
    assert numbers(after.sample(30)) == {0, 1, 2}


def test_an_error_in_the_prefetch_thread_is_raised_to_the_consumer(tmp_path: Path) -> None:
    """In RLinf, an error in the prefetch thread leaves the consumer waiting for ever."""
    with TrajectoryReplayBuffer(tmp_path, seed=0) as buffer:
        buffer.add_trajectories([trajectory(0)])
        stream = buffer.iterate(18, prefetch=2)
        next(stream)
        buffer.clear()
        [error] = in_a_thread(lambda: list(stream))
        assert isinstance(error, UserError)


def test_language_instructions_are_stored_and_sampled(tmp_path: Path) -> None:
    """In RLinf, the language instructions of a trajectory are not stored."""
    content = ["lift the cup", "öffne 門", ""]
    given = trajectory(0, wide=False, task_descriptions=content)
    within = trajectory(1, wide=False)
    within = TensorTrajectory.of(
        {
            **{name: getattr(within, name) for name in TensorTrajectory.__dataclass_fields__},
            "curr_obs": {**within.curr_obs, "task_descriptions": content},
        }
    )
    with TrajectoryReplayBuffer(tmp_path / "buffer", seed=0, trajectory_format="pt") as buffer:
        buffer.add_trajectories([given, within, trajectory(2, wide=False)])
        for number in (0, 1):
            assert tuple(buffer.trajectory(number).task_descriptions or ()) == tuple(content)
        buffer.save_checkpoint(tmp_path / "rlinf")
        buffer.trajectory_format = "native"
        buffer.save_checkpoint(tmp_path / "native")
    for name in ("native", "rlinf"):
        with TrajectoryReplayBuffer(tmp_path / name, read_only=True) as buffer:
            sample = buffer.sample(50)
            for action, text in zip(sample["actions"], sample["task_descriptions"], strict=True):
                number, environment = divmod(int(action[0]), 1000)
                assert text == ("" if number == 2 else content[environment % 20])
