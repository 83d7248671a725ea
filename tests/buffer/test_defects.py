"""One test for each known defect of RLinf's buffer, after which it is named; each of them would be met here."""

from __future__ import annotations

import json
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


def test_sampling_right_after_add_meets_missing_or_partial_files(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer(tmp_path, seed=0, sample_window_size=1)
    with buffer, TrajectoryReplayBuffer(tmp_path, seed=0, sample_window_size=1, read_only=True) as reader:
        for number in range(30):
            buffer.add_trajectories([trajectory(number)])
            for sampled in (buffer.sample(18), reader.sample(18)):
                assert numbers(sampled) == {number}
                assert torch.equal(sampled["curr_obs"]["state"][:, 0], sampled["actions"][:, 0])


def test_a_crash_tears_the_index_and_the_whole_buffer_is_unloadable(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path / "whole", seed=0) as buffer:
        buffer.add_trajectories([trajectory(0)])
        log = next((tmp_path / "whole").glob("*-log-*"))
        before = log.stat().st_size
        buffer.add_trajectories([trajectory(1)])
        shutil.copytree(tmp_path / "whole", tmp_path / "killed")  # what would be there without a `close`
    log, after = tmp_path / "killed" / log.name, log.read_bytes()
    for length in range(before, len(after) + 1):  # the second write of the index stops anywhere
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
    with TrajectoryReplayBuffer(tmp_path / str(before + 50), seed=0) as buffer:  # last, since all share its segment
        assert buffer.add_trajectories([trajectory(2)]) == [1]
        assert_same(buffer.trajectory(1), trajectory(2))


@pytest.mark.parametrize("auto_save", [True, False])
def test_save_checkpoint_omits_what_was_added_since_the_last_sample(tmp_path: Path, auto_save: bool) -> None:
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


def test_a_second_resume_drops_the_first_s_data(tmp_path: Path) -> None:
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


def test_prev_values_with_bootstrap_rows_are_misaligned_on_a_cache_miss(tmp_path: Path) -> None:
    def by_step(number: int, length: int) -> torch.Tensor:
        """``[2 * length, 3, 1]``: step, 10 * epoch, 100 * trajectory."""
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


def test_a_trajectory_lacking_a_field_serves_an_evicted_one_s_rows(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path, seed=0, sample_window_size=2, cache_size=1) as buffer:
        for number in range(8):
            buffer.add_trajectories([trajectory(number, extra=number % 2 == 0)])
            sample = buffer.sample(18)
            assert ("forward_inputs" in sample) == (number == 0)
        with pytest.raises(UserError, match=r"forward_inputs.extra: not every trajectory of the sample has it"):
            buffer.sample(18, fields=["forward_inputs.extra"])
    with TrajectoryReplayBuffer(tmp_path, read_only=True, sample_window_size=1) as buffer:
        assert numbers(buffer.sample(18)) == {7}


def test_window_0_without_auto_save_divides_by_zero() -> None:
    with TrajectoryReplayBuffer(auto_save=False, sample_window_size=0, enable_cache=True, cache_size=0) as buffer:
        buffer.add_trajectories([trajectory(number) for number in range(5)])
        assert numbers(buffer.sample(90)) == set(range(5))


def draws(buffer: TrajectoryReplayBuffer) -> tuple[int, ...]:
    return tuple(buffer.sample(18, indices=True)["indices"].tolist())


def test_all_ranks_share_one_random_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        loaded = [drawn(rank, load, **how) for rank in range(4)]  # all of them the same trajectories
        assert len(set(loaded)) == 4
        assert (loaded[1] == goes_on) == (load == "native")  # whose stream it is
        assert drawn(2, load, **how) == loaded[2]
    assert drawn(2, "later") != drawn(2, "native")  # who resumes twice does not draw the same twice


def test_a_part_that_another_rank_saved_is_drawn_from_by_a_stream_of_its_own(tmp_path: Path) -> None:
    """Also where what was saved does not say whose it is, as of earlier versions."""
    with TrajectoryReplayBuffer(seed=3, rank=0) as buffer:
        buffer.add_trajectories([trajectory(0)])
        buffer.save_checkpoint(tmp_path / "rank_0")
        goes_on = draws(buffer)
    state = tmp_path / "rank_0" / "state.json"
    content = json.loads(state.read_text())
    assert content.pop("rank") == 0
    state.write_text(json.dumps(content))
    found = []
    for rank in range(2):
        with TrajectoryReplayBuffer(seed=3, rank=rank) as buffer:
            buffer.load_checkpoint(tmp_path / "rank_0")
            found.append(draws(buffer))
    assert found[0] == goes_on
    assert found[1] != goes_on


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_random_state_is_reset_on_load(tmp_path: Path, ranks: int) -> None:
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


def test_the_write_queue_is_unbounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gleanrl.buffer import background

    go_on, written, limit = threading.Event(), threading.Event(), 1 << 18
    real = os.fdatasync

    def slow(file: int) -> None:
        written.set()
        assert go_on.wait(WAIT)
        real(file)

    with TrajectoryReplayBuffer(tmp_path, seed=0) as buffer:
        buffer.add_trajectories([trajectory(0)])
        buffer.write_queue = background.WriteQueue(buffer.storage.add, queue_nbytes=limit)
        monkeypatch.setattr(os, "fdatasync", slow)
        added: list[int] = []

        def fill() -> None:
            for number in range(1, 60):  # of 75 kB each
                buffer.add_trajectories([trajectory(number)], wait=False)
                added.append(number)

        thread = threading.Thread(target=fill)
        thread.start()
        assert written.wait(WAIT)
        thread.join(0.3)
        assert thread.is_alive(), "nothing held the caller up"
        assert len(added) * 75_000 <= 2 * limit + 75_000  # what is being written, and what waits
        go_on.set()
        thread.join(WAIT)
        buffer.flush()
        assert len(buffer) == 60


def test_the_disk_never_shrinks(tmp_path: Path) -> None:
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


def test_the_demonstration_buffer_is_never_checkpointed(tmp_path: Path) -> None:
    def mixed() -> MixedReplayBuffer:
        return MixedReplayBuffer(TrajectoryReplayBuffer(seed=1), TrajectoryReplayBuffer(seed=2))

    before, after = mixed(), mixed()
    before.online.add_trajectories([trajectory(0)])
    before.demonstrations.add_trajectories([trajectory(1), trajectory(2)])
    before.save_checkpoint(tmp_path)
    after.load_checkpoint(tmp_path)
    assert same(after.sample(20), before.sample(20))
    assert numbers(after.sample(30)) == {0, 1, 2}


def test_a_prefetch_thread_s_error_hangs_the_consumer(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path, seed=0) as buffer:
        buffer.add_trajectories([trajectory(0)])
        stream = buffer.iterate(18, prefetch=2)
        next(stream)
        buffer.clear()
        [error] = in_a_thread(lambda: list(stream))
        assert isinstance(error, UserError)


def test_language_instructions_are_lost(tmp_path: Path) -> None:
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
