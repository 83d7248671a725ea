"""Tests that failed operations and calls after `close` change neither the buffer nor its checkpoints."""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gleanrl.buffer import Only, TensorTrajectory, TrajectoryReplayBuffer, files
from gleanrl.buffer.log import Manifest
from gleanrl.utils.errors import UserError
from tests.buffer.world import assert_same, rows, same, trajectory

SMALL = 1 << 18  # bytes of a segment; a few trajectories fit


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


def test_a_failed_load_that_is_tried_again_leaves_the_checkpoint_unchanged(tmp_path: Path) -> None:
    with filled(tmp_path / "old") as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
    with opened(tmp_path / "new") as buffer:
        buffer.add_trajectories([trajectory(77)])
        before = sorted(os.listdir(tmp_path / "new"))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL // 2, limits[1]))  # larger files fail
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
def test_a_load_that_is_interrupted_after_the_manifest_was_written_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distributed: bool
) -> None:
    """KeyboardInterrupt arrives just after the new manifest was written, so the load counts as done."""
    from gleanrl.utils import atomic

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


def test_files_are_copied_across_disks_and_existing_files_are_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_disk(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    with filled(tmp_path / "old") as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
    assert_whole(tmp_path / "checkpoint")
    (tmp_path / "buffer.json").write_text("mine")
    target, source = files.Files(tmp_path, writable=True), files.Files(tmp_path / "old", writable=False)
    for make in (
        lambda: target.create("buffer.json"),
        lambda: target.take(source, "buffer.json"),
        lambda: target.take(source, "buffer.json", 3),
    ):
        with pytest.raises(FileExistsError):
            make()
    assert (tmp_path / "buffer.json").read_text() == "mine"


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


def test_a_load_whose_files_cannot_be_opened_closes_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gleanrl.buffer import writer

    with filled(tmp_path / "old") as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
    with filled(tmp_path / "new", 3) as buffer:

        def fails(*_: Any, **__: Any) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(writer.BufferWriter, "_open", fails)
        with pytest.raises(OSError, match="Too many open files"):
            buffer.load_checkpoint(tmp_path / "checkpoint")
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="the buffer is closed"):
            buffer.add_trajectories([trajectory(0)])
    assert_whole(tmp_path / "new")


def test_files_of_every_earlier_epoch_are_removed(tmp_path: Path) -> None:
    with filled(tmp_path / "old") as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
    for file in list((tmp_path / "old").glob("000-*")):
        file.rename(file.with_name(file.name.replace("000-", "998-", 1)))
    folder = files.Files(tmp_path / "old", writable=True)
    manifest = Manifest.read(folder)
    assert manifest is not None
    msgspec.structs.replace(manifest, epoch=998).write(folder)
    with opened(tmp_path / "old") as buffer:
        for _ in range(4):
            buffer.load_checkpoint(tmp_path / "checkpoint")
    assert {name.split("-")[0] for name in os.listdir(tmp_path / "old")} == {"buffer.json", "lock", "1002"}
    assert_whole(tmp_path / "old")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_readers_drop_records_whose_sync_failed_and_their_rows_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Readers see records before they are synced. If the sync fails, their rows must not be overwritten."""
    with filled(tmp_path, 1) as buffer, opened(tmp_path, read_only=True) as reader:
        log, real = buffer.storage._opened.log, os.fdatasync  # type: ignore[union-attr]

        def fails(file: int) -> None:
            if file == log._file:
                assert len(reader) == 2  # the reader sees the record already
                raise error
            real(file)

        monkeypatch.setattr(os, "fdatasync", fails)
        with pytest.raises(type(error)):
            buffer.add_trajectories([trajectory(1, 20)])
        monkeypatch.undo()
        with reader.storage.held():  # a sample that began before the next add
            table = reader.storage.snapshot.tables[0]
            assert buffer.add_trajectories([trajectory(2, 30)]) == [1]
            found = table.read(torch.arange(60, 120), [("curr_obs", "state")])[("curr_obs", "state")]
            assert same(found, rows(trajectory(1, 20))["curr_obs"]["state"])
        assert (len(buffer), buffer.total_samples) == (2, 150)
        assert (len(reader), reader.total_samples) == (2, 150)
        assert_same(reader.trajectory(0), trajectory(0, 20))
        assert_same(reader.trajectory(1), trajectory(2, 30))
        assert reader.verify() == buffer.verify() == []


def test_readers_survive_a_failed_sync_of_the_log_while_no_new_files_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that became shorter would kill a process that has its pages mapped."""
    small = trajectory(1, 1, 1, wide=False, success=True)
    with filled(tmp_path, 1) as buffer, opened(tmp_path, read_only=True) as reader, ExitStack() as samples:
        log, real = buffer.storage._opened.log, os.fdatasync  # type: ignore[union-attr]

        def fails(file: int) -> None:
            if file == log._file:
                assert len(reader) == 201
                samples.enter_context(reader.storage.held())  # a sample that is under way
                raise OSError(errno.EIO, "Input/output error")
            real(file)

        def full(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fdatasync", fails)
        monkeypatch.setattr(files.Files, "take", full)
        with pytest.raises(OSError, match="Input/output"):
            buffer.add_trajectories([small] * 200)
        assert os.path.getsize(log.path) == 201 * 128
        assert (reader.storage.snapshot.records["flags"][1:] > 0).all()
        samples.close()
        for own in (buffer, reader):
            assert (len(own), own.total_samples) == (1, 60)
            with pytest.raises(UserError, match="no row of the buffer meets"):
                own.sample(1, only=Only(success=True))
        with opened(tmp_path, read_only=True) as later:
            assert len(later) == 1
        monkeypatch.undo()
        assert buffer.add_trajectories([small]) == [1]
        assert (len(buffer), len(reader)) == (2, 2)
        assert_same(reader.trajectory(1), small)
        assert reader.verify() == buffer.verify() == []


def test_a_log_whose_write_failed_before_any_record_was_visible_stays_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gleanrl.buffer import log

    with filled(tmp_path, 1) as buffer:

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(log, "write_all", full)
        with pytest.raises(OSError, match="No space left"):
            buffer.add_trajectories([trajectory(1, 20)])
        monkeypatch.undo()
        assert buffer.add_trajectories([trajectory(1, 20)]) == [1]
        assert buffer.storage.manifest.epoch == 0
    assert_whole(tmp_path, 2)


def test_an_rlinf_checkpoint_contains_the_trajectories_present_when_the_save_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gleanrl.buffer import rlinf

    buffer = opened(tmp_path / "buffer", trajectory_format="pt", max_rows=60 * 10)
    with buffer:
        buffer.add_trajectories([trajectory(number, 20) for number in range(10)])
        real = rlinf._saved

        def meanwhile(own: TensorTrajectory, weights: str) -> dict[str, Any]:
            number = buffer.trajectory_counter
            if number < 30:  # as if another thread added trajectories, which evicts the oldest
                buffer.add_trajectories([trajectory(number, 20)])
            return real(own, weights)

        monkeypatch.setattr(rlinf, "_saved", meanwhile)
        buffer.save_checkpoint(tmp_path / "checkpoint")
        assert buffer.storage.snapshot.first_id > 5
    with opened(tmp_path / "checkpoint", read_only=True) as saved:
        assert len(saved) == 10
        for number in range(10):
            assert_same(saved.trajectory(number), trajectory(number, 20))


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="counts files in memory by their name in /proc")
def test_a_closed_buffer_in_memory_frees_its_files() -> None:
    gc.collect()  # buffers of other tests
    before = files_in_memory()
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([trajectory(0)])
    assert files_in_memory() > before
    buffer.close()
    assert files_in_memory() == before


def files_in_memory() -> int:
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("memfd:" in link for link in links)


def test_a_process_with_too_many_open_files_gets_an_error_that_says_what_to_change(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for path in (None, tmp_path / "buffer"):
        with TrajectoryReplayBuffer(path) as buffer:
            buffer.add_trajectories([{"rewards": torch.zeros(1, 1, 1)}])
            used = set(map(int, os.listdir("/dev/fd")))
            limit = [number for number in range(soft) if number not in used][20]
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            try:
                with pytest.raises(UserError, match=rf"limit of {limit} open files: .*ulimit -n"):
                    add_shapes(buffer)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert buffer.verify() == []
            buffer.add_trajectories([{"rewards": torch.zeros(1, 1, 60)}])


def add_shapes(buffer: TrajectoryReplayBuffer) -> None:
    for width in range(2, 60):
        buffer.add_trajectories([{"rewards": torch.zeros(1, 1, width)}])


def test_the_names_of_new_folders_are_synced_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = set[Path](), files.atomic.sync

    def watched(path: Path) -> None:
        synced.add(path)
        sync(path)

    monkeypatch.setattr("gleanrl.utils.atomic.sync", watched)
    with TrajectoryReplayBuffer(tmp_path / "a" / "b") as buffer:
        buffer.save_checkpoint(tmp_path / "c" / "d")
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "c"} <= synced
