"""Tests that a sample is drawn from one state of the buffer while another thread or process changes it.

The change is made at the worst moment by patching a function that runs in the middle of the operation.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gleanrl.buffer import Only, TensorTrajectory, TrajectoryReplayBuffer
from gleanrl.buffer.log import Manifest
from gleanrl.buffer.priorities import SumTree, TablePriorities
from gleanrl.buffer.reader import BufferReader
from gleanrl.buffer.rlinf import Directory, MappedTable
from gleanrl.buffer.table import Index
from gleanrl.utils.errors import UserError
from tests.buffer.test_rlinf import fields, write
from tests.buffer.world import in_a_thread, numbers, trajectory


@pytest.mark.parametrize("opening", [False, True])
def test_a_reader_whose_files_are_replaced_after_it_read_the_manifest_reads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: bool
) -> None:
    path, looked = tmp_path / "buffer", []
    look: Any = Manifest.read if opening else BufferReader._newest_manifest
    owner, name = (Manifest, "read") if opening else (BufferReader, "_newest_manifest")
    with TrajectoryReplayBuffer(path, segment_bytes=1 << 16) as writer:
        writer.add_trajectories([trajectory(1, 40)])
        writer.save_checkpoint(tmp_path / "checkpoint")
        reader = None if opening else TrajectoryReplayBuffer(path, read_only=True)

        def read(*where: Any) -> Manifest | None:
            found = look(*where)
            if not looked:
                looked.append(found)
                writer.add_trajectories([trajectory(7, 40), trajectory(8, 40)])
                writer.load_checkpoint(tmp_path / "checkpoint")
            return found

        monkeypatch.setattr(owner, name, read)
        reader = reader or TrajectoryReplayBuffer(path, read_only=True)
        assert (len(reader), numbers(reader.sample(200, allow_short=True))) == (1, {1})
        writer.add_trajectories([trajectory(2)])
        assert (len(reader), numbers(reader.sample(200, allow_short=True))) == (2, {1, 2})
        assert reader.verify() == []
        reader.close()


def test_a_reader_follows_a_folder_that_was_made_again_and_the_old_writer_does_not_write_into_it(
    tmp_path: Path,
) -> None:
    path, success = tmp_path / "buffer", Only(success=True)
    reader = None
    writers = list[TrajectoryReplayBuffer]()
    for first in (1, 11, 21):
        shutil.rmtree(path, ignore_errors=True)
        writers.append(TrajectoryReplayBuffer(path, segment_bytes=1 << 18))
        writers[-1].add_trajectories([trajectory(first, success=True), trajectory(first + 1, success=False)])
        reader = reader or TrajectoryReplayBuffer(path, read_only=True, priority_exponent=1.0)
        assert numbers(reader.sample(36)) == {first, first + 1}
        assert numbers(reader.sample(18, only=success)) == {first}
        assert numbers(reader.sample_prioritized(300)) == {first, first + 1}
        reader.update_priorities(torch.arange(18), torch.full((18,), 1e-9))
        assert numbers(reader.sample_prioritized(300)) == {first + 1}
    for writer in writers[:2]:
        for change in (lambda own=writer: own.add_trajectories([trajectory(5)]), writer.clear):
            with pytest.raises(UserError, match=str(path)):
                change()
        writer.close()
    assert writers[-1].add_trajectories([trajectory(23)]) == [2]
    assert reader is not None
    assert numbers(reader.sample(54)) == {21, 22, 23}


def test_a_reader_of_a_checkpoint_follows_its_replacement(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path / "buffer") as writer:
        writer.add_trajectories([trajectory(1)])
        writer.save_checkpoint(tmp_path / "checkpoint")
        with TrajectoryReplayBuffer(tmp_path / "checkpoint", read_only=True) as reader:
            assert numbers(reader.sample(18)) == {1}
            writer.add_trajectories([trajectory(2)])
            assert len(reader) == 1
            writer.save_checkpoint(tmp_path / "checkpoint")
            assert numbers(reader.sample(36)) == {1, 2}


def test_a_reader_that_failed_to_open_replaced_files_succeeds_once_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TrajectoryReplayBuffer(tmp_path / "buffer") as writer:
        writer.add_trajectories([trajectory(1)])
        writer.save_checkpoint(tmp_path / "checkpoint")
        with TrajectoryReplayBuffer(tmp_path / "buffer", read_only=True) as reader:
            writer.load_checkpoint(tmp_path / "checkpoint")
            writer.add_trajectories([trajectory(2)])
            [log] = (tmp_path / "buffer").glob("*-log-*")
            hidden = log.rename(log.with_suffix(".hidden"))
            for _ in range(2):
                with pytest.raises(Exception, match="missing"):
                    reader.sample(4)
            hidden.rename(log)
            assert numbers(reader.sample(200, allow_short=True)) == {1, 2}


def once(real: Callable[..., Any], meanwhile: Callable[[], Any], *, after: bool = False) -> Callable[..., Any]:
    """Wrap ``real`` so that ``meanwhile`` runs before (or ``after``) its first call."""
    calls: list[bool] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        first = len(calls) == 1
        if first and not after:
            meanwhile()
        found = real(*args, **kwargs)
        if first and after:
            meanwhile()
        return found

    return run


def instructed(number: int) -> TensorTrajectory:
    return trajectory(number, 2, 1, wide=False, task_descriptions=[f"task {number}"])


def assert_instructed(batch: Any) -> None:
    assert batch["task_descriptions"] == [f"task {number}" for number in batch["versions"].reshape(-1).tolist()]


def test_two_threads_may_read_the_same_new_instructions_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TrajectoryReplayBuffer(tmp_path) as writer, TrajectoryReplayBuffer(tmp_path, read_only=True) as reader:
        writer.add_trajectories([instructed(0)])
        assert_instructed(reader.sample(2))
        writer.add_trajectories([instructed(1), instructed(2)])
        other: list[Any] = []
        meanwhile = once(os.pread, lambda: other.append(in_a_thread(lambda: reader.sample(6), 0.2)), after=True)
        monkeypatch.setattr("gleanrl.buffer.log.os", SimpleNamespace(pread=meanwhile, fstat=os.fstat, close=os.close))
        assert_instructed(reader.sample(6))
        assert other
        writer.add_trajectories([instructed(3)])
        for _ in range(4):
            assert_instructed(reader.sample(8))


def test_slices_ignore_rows_whose_trajectory_id_is_not_yet_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    with TrajectoryReplayBuffer(sample_window_size=1, seed=0) as buffer:
        buffer.add_trajectories([trajectory(1, 4, 1)])
        drawn: list[torch.Tensor] = []

        def draw() -> None:  # runs when the rows of the next trajectory are stored and its id is not
            drawn.append(buffer.sample_slices(64, 3)["actions"][..., 0])

        monkeypatch.setattr(Index, "append", once(Index.append, draw))
        buffer.add_trajectories([trajectory(2, 4, 5)])
        assert (drawn[0].diff(dim=1) == 20).all()
        assert (drawn[0] // 1000 == 1).all()
        assert buffer.sample(20)["versions"].unique().tolist() == [2]


@pytest.mark.parametrize("only", [None, Only(intervened=False)])
def test_counts_agree_with_one_another_during_an_add(monkeypatch: pytest.MonkeyPatch, only: Only | None) -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([trajectory(1)])
        seen: list[Any] = []

        def look() -> None:
            stats = buffer.get_stats()
            seen.append((len(buffer), buffer.total_samples, stats["num_trajectories"], stats["total_samples"]))
            with pytest.raises(UserError, match="the window has 18"):
                buffer.sample(36, only=only)

        monkeypatch.setattr(Index, "append", once(Index.append, look))
        buffer.add_trajectories([trajectory(2)])
        assert seen == [(1, 18, 1, 18)]
        assert numbers(buffer.sample(200, allow_short=True)) == {1, 2}


def test_samples_are_consistent_while_rlinf_adds_trajectories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [fields(number) for number in range(6)]
    for number, made in enumerate(every):
        made["versions"] = torch.full((6, 3, 1), number)
        made["curr_obs"] = {**made["curr_obs"], "task_descriptions": [f"task {number}"] * 3}
    folder = write(tmp_path, every[:3])
    with TrajectoryReplayBuffer(folder, read_only=True, seed=3, priority_exponent=1.0) as buffer:
        assert_instructed(buffer.sample(50))
        buffer.update_priorities(torch.arange(54), torch.tensor([1.0] + [1e-9] * 53))

        def add() -> None:
            write(folder, every)
            assert len(buffer) == 6

        monkeypatch.setattr(MappedTable, "read", once(MappedTable.read, add, after=True))
        assert_instructed(buffer.sample(50))
        batch = buffer.sample(100)
        assert_instructed(batch)
        assert set(batch["versions"].reshape(-1).tolist()) == set(range(6))
        # the low priorities of rows 1 to 53 were kept
        assert not set(range(1, 54)) & set(buffer.sample_prioritized(200)["indices"].tolist())
        with pytest.MonkeyPatch.context() as patch:  # one thread samples while another has read half of the new index
            write(folder, every[:2])
            found: list[Any] = []
            meanwhile = lambda: found.append(in_a_thread(lambda: buffer.sample(30), 0.2))  # noqa: E731
            patch.setattr(Directory, "shapes", once(Directory.shapes, meanwhile))
            batch = buffer.sample(36)
        assert found
        assert_instructed(batch)
        assert set(batch["versions"].reshape(-1).tolist()) == {0, 1}


def test_two_threads_may_take_the_first_prioritized_sample_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with TrajectoryReplayBuffer(priority_exponent=1.0, seed=0) as buffer:
        buffer.add_trajectories([trajectory(1)])
        other: list[Any] = []
        monkeypatch.setattr(
            "gleanrl.buffer.priorities.SumTree.__init__",
            once(
                SumTree.__init__,
                lambda: other.append(in_a_thread(lambda: buffer.sample_prioritized(8), 0.2)),
            ),
        )
        assert len(buffer.sample_prioritized(8)["indices"]) == 8
        assert other
        buffer.add_trajectories([trajectory(2)])
        indices = buffer.sample_prioritized(400)["indices"]
        assert set(indices.tolist()) == set(range(36))


def test_rows_of_a_replaced_buffer_are_not_in_a_prioritized_sample(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path / "buffer") as writer:
        writer.add_trajectories([trajectory(1)])
        writer.save_checkpoint(tmp_path / "checkpoint")
        writer.add_trajectories([trajectory(number) for number in range(2, 9)])
        with TrajectoryReplayBuffer(tmp_path / "buffer", read_only=True, priority_exponent=1.0) as reader:
            reader.update_priorities(torch.arange(144), torch.full((144,), 100.0))
            writer.load_checkpoint(tmp_path / "checkpoint")
            batch = reader.sample_prioritized(300)
            assert int(batch["indices"].max()) < 18
            assert batch["versions"].unique().tolist() == [1]


def test_priorities_of_rows_that_are_no_longer_covered_are_dropped() -> None:
    own = TablePriorities()
    own.extend(100, 1.0)
    own.keep(0, 10)
    assert own.tree.total == 10
    own.extend(20, 1.0)
    assert own.tree.total == 20
