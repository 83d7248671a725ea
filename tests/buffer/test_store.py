"""What is written stays as it was written, whatever fails and whatever is called after `close`."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gleanrl.buffer import TrajectoryReplayBuffer, files
from tests.buffer.world import assert_same, trajectory

SMALL = 1 << 18  # bytes of a segment: a few trajectories


def opened(path: Path | None, **how: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(path, seed=0, segment_bytes=SMALL, **how)


def filled(path: Path | None, count: int = 10) -> TrajectoryReplayBuffer:
    buffer = opened(path)
    buffer.add_trajectories([trajectory(number, 20) for number in range(count)])
    return buffer


def assert_whole(path: Path, count: int = 10) -> None:
    with opened(path, read_only=True) as buffer:
        assert buffer.verify() == []
        assert len(buffer) == count
        assert_same(buffer.trajectory(count - 1), trajectory(count - 1, 20))


def test_a_load_that_failed_and_is_tried_again_leaves_the_checkpoint_as_it_was(tmp_path: Path) -> None:
    with filled(tmp_path / "old") as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
    with opened(tmp_path / "new") as buffer:
        buffer.add_trajectories([trajectory(77)])
        before = sorted(os.listdir(tmp_path / "new"))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL // 2, limits[1]))  # the kernel refuses, as on a full disk
        try:
            with pytest.raises(OSError, match="too large"):
                buffer.load_checkpoint(tmp_path / "checkpoint")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert_same(buffer.trajectory(0), trajectory(77))
        assert sorted(os.listdir(tmp_path / "new")) == before
        buffer.load_checkpoint(tmp_path / "checkpoint")
        assert_same(buffer.trajectory(9), trajectory(9, 20))
    assert_whole(tmp_path / "checkpoint")
    assert_whole(tmp_path / "new")


@pytest.mark.parametrize("distributed", [False, True])
def test_a_load_that_is_interrupted_at_its_end_is_either_done_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distributed: bool
) -> None:
    """The manifest is in place, and an error comes behind it: what is on disk is what counts."""
    from gleanrl import atomic

    with filled(tmp_path / "old") as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
    with opened(tmp_path / "new") as buffer:
        buffer.add_trajectories([trajectory(77)])
        real = atomic.write_bytes

        def late(*arguments: Any) -> None:
            real(*arguments)
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(atomic, "write_bytes", late)
        with pytest.raises(KeyboardInterrupt):
            buffer.load_checkpoint(tmp_path / "checkpoint", distributed)
        assert_same(buffer.trajectory(9), trajectory(9, 20))
        assert buffer.add_trajectories([trajectory(10, 20)]) == [10]
    assert_whole(tmp_path / "new", 11)


def test_files_of_another_disk_are_copied_and_an_old_file_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_disk(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    with filled(tmp_path / "old") as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
    assert_whole(tmp_path / "checkpoint")
    (tmp_path / "there").write_text("mine")
    for make in (
        lambda: files.DiskFiles(tmp_path, writable=True).create("there"),
        lambda: files.DiskFiles(tmp_path, writable=True).bring(tmp_path / "old" / "buffer.json", "there"),
        lambda: files.DiskFiles(tmp_path / "old", writable=False).share("buffer.json", tmp_path / "checkpoint", 3),
    ):
        with pytest.raises(FileExistsError):
            make()
    assert (tmp_path / "there").read_text() == "mine"


USES: list[Callable[[TrajectoryReplayBuffer], Any]] = [
    lambda buffer: buffer.add_trajectories([trajectory(0)]),
    TrajectoryReplayBuffer.clear,
    lambda buffer: buffer.save_checkpoint(buffer.path.parent / "checkpoint"),  # type: ignore[union-attr]
    lambda buffer: buffer.load_checkpoint(buffer.path.parent / "checkpoint"),  # type: ignore[union-attr]
    lambda buffer: buffer.load_checkpoint(buffer.path.parent / "checkpoint", True, 0, 2),  # type: ignore[union-attr]
]


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("use", USES)
def test_nothing_is_written_after_close(
    tmp_path: Path, use: Callable[[TrajectoryReplayBuffer], Any], read_only: bool
) -> None:
    with filled(tmp_path / "buffer") as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
    if read_only:
        buffer = opened(tmp_path / "buffer", read_only=True)
        buffer.close()
    with pytest.raises(RuntimeError, match="the buffer is closed"):
        use(buffer)
    assert_whole(tmp_path / "buffer")
    assert_whole(tmp_path / "checkpoint")


def test_a_load_that_cannot_open_what_it_brought_closes_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gleanrl.buffer import store

    with filled(tmp_path / "old") as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
    with filled(tmp_path / "new", 3) as buffer:

        def fails(*_: Any, **__: Any) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(store.Store, "_open", fails)
        with pytest.raises(OSError, match="Too many open files"):
            buffer.load_checkpoint(tmp_path / "checkpoint")
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="the buffer is closed"):
            buffer.add_trajectories([trajectory(0)])
    assert_whole(tmp_path / "new")


def test_leftovers_of_any_epoch_are_removed(tmp_path: Path) -> None:
    with filled(tmp_path / "old") as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
    for file in list((tmp_path / "old").glob("000-*")):
        file.rename(file.with_name(file.name.replace("000-", "998-", 1)))
    manifest = tmp_path / "old" / "buffer.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "epoch": 998}))
    with opened(tmp_path / "old") as buffer:
        for _ in range(4):
            buffer.load_checkpoint(tmp_path / "checkpoint")
    assert {name.split("-")[0] for name in os.listdir(tmp_path / "old")} == {"buffer.json", "lock", "1002"}
    assert_whole(tmp_path / "old")
