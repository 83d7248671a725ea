"""Tests of saving and loading a buffer's checkpoints: which targets may be replaced, kills, and flipped bits.

``native`` and ``pt`` are the two checkpoint formats; the second is RLinf's.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.buffer import TrajectoryReplayBuffer, transfer
from gleanrl.buffer.files import Files
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from tests.buffer.world import assert_same, flip, trajectory


def made(path: Path | None, *numbers: int, **how: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(path, seed=0, segment_bytes=1 << 18, **how)
    buffer.add_trajectories([trajectory(number) for number in numbers])
    return buffer


def occupy(path: Path, kind: str) -> None:
    """Create a file or folder of the given kind at the path where the test then saves a checkpoint."""
    if kind == "a file":
        path.write_text("mine")
    elif kind == "a buffer":
        made(path, 1).close()
    elif kind == "a checkpoint":
        made(None, 1, 2).save_checkpoint(path)
    elif kind == "RLinf's":
        made(None, 1, trajectory_format="pt").save_checkpoint(path)
    else:
        path.mkdir()
        if kind == "a model":
            (path / "model.pt").write_text("weights")
        elif kind == "a folder inside":
            (path / "runs").mkdir()


@pytest.mark.parametrize(
    "there", ["a model", "a folder inside", "a file", "a buffer", "RLinf's", "an empty folder", "a checkpoint"]
)
@pytest.mark.parametrize("form", ["native", "pt"])
def test_a_checkpoint_replaces_only_a_checkpoint(tmp_path: Path, there: str, form: str) -> None:
    target = tmp_path / "target"
    occupy(target, there)
    before = sorted(os.listdir(target)) if target.is_dir() else []
    with made(tmp_path / "buffer", 5, trajectory_format=form) as buffer:
        if there in ("an empty folder", "a checkpoint") or (there == "RLinf's" and form == "pt"):
            buffer.save_checkpoint(target)
            with TrajectoryReplayBuffer(target, read_only=True) as saved:
                assert len(saved) == 1
        else:
            with pytest.raises(UserError, match=f"{target}: "):
                buffer.save_checkpoint(target)
            assert there == "a file" or sorted(os.listdir(target)) == before
    assert sorted(os.listdir(tmp_path)) == ["buffer", "target"]


@pytest.mark.parametrize("form", ["native", "pt"])
def test_a_checkpoint_does_not_replace_its_own_buffer(tmp_path: Path, form: str) -> None:
    (tmp_path / "other").symlink_to(tmp_path / "buffer")
    with made(tmp_path / "buffer", 5, trajectory_format=form) as buffer:
        for target in ("buffer", "other", "buffer/../buffer"):
            with pytest.raises(UserError, match="the buffer itself is in there"):
                buffer.save_checkpoint(tmp_path / target)
        with pytest.raises(UserError, match=f"{tmp_path}: holds buffer, which is no part of a checkpoint"):
            buffer.save_checkpoint(tmp_path)
        assert buffer.add_trajectories([trajectory(6)]) == [1]
    with TrajectoryReplayBuffer(tmp_path / "buffer") as buffer:
        assert len(buffer) == 2


@pytest.mark.parametrize("form", ["native", "pt"])
def test_the_leftovers_of_a_killed_save_are_ignored_and_removed_by_the_next_save(tmp_path: Path, form: str) -> None:
    for rank, numbers in enumerate([(0, 1, 2), (10, 11, 12)]):
        with made(tmp_path / f"buffer-{rank}", *numbers, trajectory_format=form) as buffer:
            buffer.save_checkpoint(tmp_path / "ranks" / f"rank_{rank}")
    left = tmp_path / "ranks" / f"{atomic.TEMPORARY_PREFIX}0123abcd-rank_1"
    # A save writes to a temporary folder and renames it; a kill just before the rename leaves that folder behind.
    shutil.copytree(tmp_path / "ranks" / "rank_1", left)
    found = []
    for rank in range(2):
        with TrajectoryReplayBuffer(rank=rank) as own:
            own.load_checkpoint(tmp_path / "ranks", is_distributed=True, local_rank=rank, world_size=2)
            found += [int(own.trajectory(i).versions[0, 0, 0]) for i in range(len(own))]  # type: ignore[index]
    assert found == [0, 1, 2, 10, 11, 12]
    with made(None, 7, trajectory_format=form) as buffer:
        buffer.save_checkpoint(tmp_path / "ranks" / "rank_0")
        assert left.exists()
        buffer.save_checkpoint(tmp_path / "ranks" / "rank_1")
    assert sorted(os.listdir(tmp_path / "ranks")) == ["rank_0", "rank_1"]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "renameat2"), reason="not in one step here")
def test_a_checkpoint_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with made(None, 1) as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
        buffer.add_trajectories([trajectory(2)])

        real = os.replace

        def rename(old: Path, new: Path) -> None:
            assert new != tmp_path / "checkpoint"
            real(old, new)

        monkeypatch.setattr(os, "replace", rename)
        buffer.save_checkpoint(tmp_path / "checkpoint")
    with TrajectoryReplayBuffer(tmp_path / "checkpoint", read_only=True) as saved:
        assert len(saved) == 2
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_the_error_for_a_missing_checkpoint_names_the_copy_that_was_moved_aside(tmp_path: Path) -> None:
    with made(None, 1) as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
        aside = tmp_path / f"{atomic.TEMPORARY_PREFIX}0123abcd-checkpoint"
        # Without renameat2 a checkpoint is replaced by two renames; this is the state of a kill between them.
        (tmp_path / "checkpoint").rename(aside)
        with pytest.raises(UserError, match=f"no checkpoint of a buffer; .*; {aside} may be what was there"):
            buffer.load_checkpoint(tmp_path / "checkpoint")
        buffer.load_checkpoint(aside)
        assert_same(buffer.trajectory(0), trajectory(1))


def test_a_copy_of_a_checkpoint_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    with made(tmp_path / "buffer", *range(4)) as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
        width, row = buffer.storage.snapshot.tables[0].schema.record_nbytes, int(buffer.storage.record(2)["row"])  # type: ignore[attr-defined]
    source = tmp_path / "checkpoint"
    flip(next(source.glob("*-rows-*")), (row + 1) * width + 5)
    said = r"trajectory 2: its rows are not what was written \(checksum\)"
    for write in (
        lambda: transfer.merge(transfer.trajectories([source]), tmp_path / "merged"),
        lambda: transfer.export("rlinf", [source], tmp_path / "exported"),
        lambda: transfer.split(source, tmp_path / "split", 2),
    ):
        with pytest.raises(UserError, match=said):
            write()
    with made(tmp_path / "new", 9) as buffer:
        with pytest.raises(UserError, match=said):
            buffer.load_checkpoint(source, is_distributed=True, local_rank=1, world_size=2)
        assert_same(buffer.trajectory(0), trajectory(9))
        # Loading on one rank links the files and their checksums, so verify() still reports the flipped bit.
        buffer.load_checkpoint(source)
        assert len(buffer.verify()) == 1
        buffer.trajectory_format = "pt"
        with pytest.raises(UserError, match=said):
            buffer.save_checkpoint(tmp_path / "rlinf")
    assert sorted(os.listdir(tmp_path)) == ["buffer", "checkpoint", "new"]


@pytest.mark.parametrize("saved", [True, False])
def test_a_buffer_can_be_saved_or_loaded_by_others_while_its_writer_drops_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    small = [trajectory(number, wide=False) for number in range(90)]
    with (
        TrajectoryReplayBuffer(tmp_path / "live", segment_bytes=1 << 12, max_rows=30 * 18) as live,
        TrajectoryReplayBuffer(tmp_path / "live", read_only=True) as reader,
        TrajectoryReplayBuffer(tmp_path / "other") as other,
    ):
        live.add_trajectories(small[:30])
        real = Files.take

        def meanwhile(self: Files, source: Files, name: str, *args: Any, **more: Any) -> None:
            done = live.trajectory_counter
            if name.startswith("rows") and done < 90:
                live.add_trajectories(small[done : done + 30])
            real(self, source, name, *args, **more)

        monkeypatch.setattr(Files, "take", meanwhile)
        if saved:
            reader.save_checkpoint(tmp_path / "checkpoint")
        other.load_checkpoint(tmp_path / ("checkpoint" if saved else "live"))
        assert live.trajectory_counter == other.trajectory_counter == 90
        assert len(other) == len(live) < 90
        assert other.verify() == []
        assert_same(other.trajectory(89), small[89])


@pytest.mark.parametrize("form", ["native", "pt"])
def test_a_reader_saves_what_was_acknowledged_since_its_last_sample(tmp_path: Path, form: Any) -> None:
    with (
        made(tmp_path / "live", 0) as live,
        TrajectoryReplayBuffer(tmp_path / "live", read_only=True, trajectory_format=form) as reader,
    ):
        live.add_trajectories([trajectory(1)])
        reader.save_checkpoint(tmp_path / "checkpoint")
    with TrajectoryReplayBuffer(tmp_path / "checkpoint", read_only=True) as saved:
        assert_same(saved.trajectory(1), trajectory(1))


def test_a_flipped_bit_in_an_rlinf_checkpoint_prevents_loading_it(tmp_path: Path) -> None:
    with made(None, 1, 2, trajectory_format="pt") as buffer:
        buffer.save_checkpoint(tmp_path / "rlinf")
    file = next((tmp_path / "rlinf").glob("trajectory_1_*"))
    flip(file, file.read_bytes().index(torch.tensor([2000.0, 2001.0]).numpy().tobytes()) + 1)
    with made(None, 9) as buffer:
        with pytest.raises(UserError, match="is not what was written"):
            buffer.load_checkpoint(tmp_path / "rlinf")
        assert len(buffer) == 1


def test_checkpoints_that_an_earlier_save_of_more_ranks_left_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ranks in (3, 2):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        for rank in range(ranks):
            with made(None, 10 * ranks + rank, rank=rank) as buffer:
                buffer.save_checkpoint(tmp_path / "ranks" / f"rank_{rank}")
    with made(None, 1) as buffer:
        for how in ({}, {"is_distributed": True, "local_rank": 1, "world_size": 2}):
            with pytest.raises(UserError, match=r"ranks: .*\(rank_1 is one of 2, rank_2 is one of 3\)"):
                buffer.load_checkpoint(tmp_path / "ranks", **how)
        assert_same(buffer.trajectory(0), trajectory(1))
        shutil.rmtree(tmp_path / "ranks" / "rank_2")
        buffer.load_checkpoint(tmp_path / "ranks")
        assert_same(buffer.trajectory(1), trajectory(21))
