"""Tests of a buffer on a full disk or with lost or damaged files.

The error names the file, acknowledged trajectories are kept, and those that lie in other files stay readable.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer, transfer
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from tests.buffer.world import assert_same, flip, trajectory

SMALL = 1 << 18  # bytes of a segment; a few trajectories fit


def opened(path: Path, **how: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(path, seed=0, segment_bytes=SMALL, **how)


class FullDisk:
    """Makes every call that needs disk space fail with ENOSPC after ``left`` such calls have succeeded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None  # None: all calls succeed
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
def test_a_full_disk_loses_no_acknowledged_trajectory(
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
                # The first of these overwrites the rows of the failed add with other values.
                fresh = [trajectory(3, 2), *fresh]
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


def test_an_eviction_that_fails_is_done_by_the_next_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_rows_that_are_being_written_are_not_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_making_room_for_one_trajectory_of_a_call_does_not_evict_another_of_the_call(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as buffer:
        buffer.add_trajectories([trajectory(0)])
        [table] = buffer.storage.snapshot.tables
        steps, quota = table.capacity[0] // 2, table.nbytes + table.columns.segment_nbytes + (1 << 16)
    with TrajectoryReplayBuffer(tmp_path / "b", segment_bytes=SMALL, max_bytes=quota) as buffer:
        buffer.add_trajectories([trajectory(0, steps, 1), trajectory(1, steps, 1)])  # fill the first segment
        # Two of these fill the second segment, and the last begins a third, which exceeds the quota.
        fresh = [trajectory(2, steps, 1), trajectory(3, steps, 1), trajectory(4, 4, 1)]
        assert buffer.add_trajectories(fresh) == [2, 3, 4]
        assert len(buffer) == 3
        assert buffer.verify() == []
        for number in range(2, 5):
            assert_same(buffer.trajectory(number), fresh[number - 2])


# --- damaged files --------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a buffer with trajectories 0 to 9, in several segments and two schemas, with instructions."""
    with opened(tmp_path / "buffer") as buffer:
        for number in range(10):
            buffer.add_trajectories([example(number)])
        buffer.save_checkpoint(tmp_path / "checkpoint")
    return tmp_path / "buffer"


def example(number: int) -> TensorTrajectory:
    return trajectory(number, 20, extra=number == 4, task_descriptions=[f"lift {number}"] * 3)


def segment_of(folder: Path, number: int) -> tuple[Path, set[int]]:
    """Return the segment file in which a trajectory begins, and the ids of all trajectories with rows in it."""
    with opened(folder, read_only=True) as buffer:
        record, store = buffer.storage.record(number), buffer.storage
        capacity = store.snapshot.tables[int(record["schema"])].capacity[0]  # type: ignore[attr-defined]
        segment = int(record["row"]) // capacity
        others = {
            int(other["id"])
            for other in store.snapshot.records
            if other["schema"] == record["schema"]
            and int(other["row"]) // capacity <= segment <= (int(other["row"]) + 59) // capacity
        }
        return folder / f"000-rows-{int(record['schema']):03d}-{segment:06d}", others


@pytest.mark.parametrize("harm", ["remove", "cut short", "forbid"])
def test_a_lost_segment_is_named_and_trajectories_in_other_segments_are_readable(folder: Path, harm: str) -> None:
    path, lost = segment_of(folder, 5)
    if harm == "cut short":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    if harm == "forbid":
        path.symlink_to(path)  # opening a link to itself fails for root too, whom file modes do not stop
    assert 0 < len(lost) < 8
    with opened(folder, read_only=True) as buffer:
        for number in range(10):
            if number in lost:
                with pytest.raises(UserError, match=f"{path}: .*; its rows are lost"):
                    buffer.trajectory(number)
            else:
                assert_same(buffer.trajectory(number), example(number))
        with pytest.raises(UserError, match=f"{path}: .*; its rows are lost"):
            buffer.sample(500)
        assert [line.split(":")[0] for line in buffer.verify()] == [f"trajectory {number}" for number in sorted(lost)]
        with pytest.raises(UserError, match="merge OUT --skip-damaged"):
            buffer.save_checkpoint(folder.parent / "other")
    with pytest.raises(UserError, match=f"{path}: .*merge OUT --skip-damaged"):
        opened(folder)
    with pytest.raises(UserError, match=f"{path}: .*merge OUT --skip-damaged"):  # the first try released the lock
        opened(folder)
    left_out: list[str] = []
    found = list(transfer.trajectories([folder], left_out=left_out))
    assert len(found) == 10 - len(lost)
    assert len(left_out) == len(lost)
    assert_same(found[-1].unflatten(), example(9))


@pytest.mark.parametrize("column", ["packed", "large"])
def test_verify_names_the_trajectory_in_which_a_bit_flipped(folder: Path, column: str) -> None:
    path, _ = segment_of(folder, 5)
    with opened(folder, read_only=True) as buffer:
        record, store = buffer.storage.record(5), buffer.storage
        table = store.snapshot.tables[0]
        width = table.schema.record_nbytes if column == "packed" else 2080  # type: ignore[attr-defined]
        begin = 0 if column == "packed" else table.capacity[0] * table.schema.record_nbytes  # type: ignore[attr-defined]
        row = int(record["row"]) + 2
        place = begin + row % table.capacity[0] * width + 5  # type: ignore[attr-defined]
    flip(path, place)
    with opened(folder) as buffer:
        assert buffer.verify() == ["trajectory 5: its rows are not what was written (checksum)"]
        if column == "large":
            assert buffer.trajectory(5).task_descriptions == ("lift 5",) * 3
        else:  # the flipped bit is in the number of the row that has the next observation
            with pytest.raises(UserError, match="damaged"):
                buffer.read(torch.tensor([row]))
        with pytest.raises(UserError, match="trajectory 5: "):
            buffer.trajectory(5, verify=True)
        assert_same(buffer.trajectory(6), example(6))
        assert buffer.add_trajectories([example(10)]) == [10]


@pytest.mark.parametrize("description", [True, False])
def test_verify_names_the_trajectories_whose_text_has_a_flipped_bit(folder: Path, description: bool) -> None:
    path = folder / "000-texts-000000"
    flip(path, path.read_bytes().index(b'"lift 5') + 3 if description else 2)
    with opened(folder, read_only=True) as buffer:
        wrong = buffer.verify()
        assert wrong
        assert all(str(path.parent) in line for line in wrong)
        assert len(wrong) == (1 if description else 10)  # all ten share the other text
        assert wrong[0].startswith("trajectory 5:" if description else "trajectory 0:")
    if not description:
        return
    assert len(list(transfer.trajectories([folder], left_out=[]))) == 9
    with opened(folder) as buffer:
        for read in (lambda: buffer.trajectory(5), lambda: buffer.sample(600)):
            with pytest.raises(UserError, match=f"{path}: "):
                read()
        assert "task_descriptions" not in buffer.sample(600, fields=["actions"])
        assert_same(buffer.trajectory(6), example(6))
        assert buffer.add_trajectories([example(11)]) == [10]
        assert_same(buffer.trajectory(10), example(11))


@pytest.mark.parametrize("length", [0, 7 * 128, 7 * 128 + 50])
def test_a_log_that_lost_acknowledged_records_is_refused_rather_than_repaired(folder: Path, length: int) -> None:
    log, lost = folder / "000-log-000000", 10 - length // 128
    os.truncate(log, length)
    why = "half a record" if length % 128 else "the file is cut short"
    said = f"{log}: {why} at record {10 - lost}; {lost} good records from there on do not count"
    with opened(folder, read_only=True) as buffer:
        assert len(buffer) == 10 - lost
        assert buffer.verify() == [said]
    before = sorted(os.listdir(folder))
    with pytest.raises(UserError, match=f"{said}; .*merge OUT --skip-damaged"):
        opened(folder)
    assert sorted(os.listdir(folder)) == before
    with pytest.raises(UserError, match=said):
        list(transfer.trajectories([folder]))
    left_out: list[str] = []
    found = list(transfer.trajectories([folder], left_out=left_out))
    assert len(found) == 10 - lost
    assert left_out == [f"{folder}: {said}"]


def test_a_damaged_log_record_prevents_writing_so_that_later_records_are_kept(folder: Path) -> None:
    log = folder / "000-log-000000"
    flip(log, 6 * 128 + 40)
    said = f"{log}: a record's checksum does not match at record 6; 3 good records from there on do not count"
    with opened(folder, read_only=True) as buffer:
        assert buffer.verify() == [said]
        for number in range(6):
            assert_same(buffer.trajectory(number), example(number))
    with pytest.raises(UserError, match=f"{said}; "):
        opened(folder)
    assert log.stat().st_size == 10 * 128
    found = list(transfer.trajectories([folder], left_out=[]))
    assert len(found) == 9
    assert_same(found[-1].unflatten(), example(9))


def test_a_partly_written_commit_of_several_trajectories_is_dropped(folder: Path) -> None:
    """A kill during a commit of several records may leave any part of them on disk. None was acknowledged.

    A reader that has mapped the records of the commit would be killed if the log became shorter.
    """
    with opened(folder) as buffer:
        # so short that no new segment is begun, and so many that their records reach into another page
        buffer.add_trajectories([trajectory(10 + i, 1, 1) for i in range(25)])
        shutil.copytree(folder, folder.parent / "killed")
    folder = folder.parent / "killed"
    log = folder / "000-log-000000"
    with opened(folder, read_only=True) as reader:
        assert len(reader) == 35
        flip(log, 10 * 128 + 40)
        with opened(folder) as buffer:
            assert len(buffer) == 10
            assert log.stat().st_size == 35 * 128
            assert buffer.add_trajectories([example(12)]) == [10]
            assert buffer.verify() == []
        assert len(reader) == 11
        assert_same(reader.trajectory(10), example(12))
        assert reader.verify() == []


@pytest.mark.parametrize("name", ["000-log-000000", "000-texts-000000", "000-schema-000.json"])
@pytest.mark.parametrize("read_only", [True, False])
def test_a_missing_log_texts_instructions_or_schema_file_is_named(folder: Path, name: str, read_only: bool) -> None:
    before = sorted(path.name for path in folder.iterdir())
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{folder / name}: missing"):
        opened(folder, read_only=read_only)
    assert sorted([*(path.name for path in folder.iterdir()), name]) == before


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        *[("buffer.json", content, "no manifest") for content in ("", "{", "[]", "{}")],
        ("buffer.json", '{"format": 2, "rows": [], "finals": [], "first": "x"}', "no manifest"),
        ("buffer.json", '{"format": 2, "rows": [], "finals": []}', "no manifest"),
        ("buffer.json", '{"format": 9, "of": "a later version"}', "a buffer of format 9"),
        *[("000-schema-000.json", content, "damaged") for content in ("{}", "\ud800", "[]")],
        ("000-schema-000.json", '{"fields": [], "capacity": "x"}', "damaged"),
    ],
)
def test_a_damaged_manifest_or_schema_is_named_and_no_file_is_changed(
    folder: Path, name: str, content: str, said: str
) -> None:
    (folder / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    before = {path.name: path.stat().st_size for path in folder.iterdir()}
    for read_only in (True, False):
        with pytest.raises(UserError, match=f"{folder}/{name}: {said}"):
            opened(folder, read_only=read_only)
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["buffer.json", "000-schema-001.json", "../checkpoint/state.json"])
def test_a_changed_byte_of_a_small_file_is_never_read_as_another_value(folder: Path, name: str) -> None:
    path, opened_at = folder / name, folder.parent / "checkpoint" if "state" in name else folder
    before = path.read_bytes()
    for place in range(0, len(before), max(1, len(before) // 60)):
        flip(path, place)
        with TrajectoryReplayBuffer(seed=0) as buffer, pytest.raises(UserError, match=Path(name).name):
            buffer.load_checkpoint(opened_at)
        path.unlink()
        path.write_bytes(before)


RANK = '"rank": 0, "ranks": null'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", b""),
        ("state.json", b"{}"),
        ("state.json", f'{{"seed": "x", "generator": "", {RANK}}}'.encode()),
        ("state.json", f'{{"seed": 1, "generator": "AAAA", {RANK}}}'.encode()),
        ("state.json", f'{{"seed": 1, "generator": "é", {RANK}}}'.encode()),
        ("priorities.npz", b"PK\x03\x04nothing"),
        ("000-rows-000-000001", None),
        ("000-log-000000", 3 * 128),
    ],
)
def test_loading_a_damaged_checkpoint_leaves_the_buffer_unchanged(
    folder: Path, name: str, content: bytes | int | None
) -> None:
    """``content`` is the file's damaged content, or the length that it is cut to; None removes the file."""
    file = folder.parent / "checkpoint" / name
    before = file.read_bytes() if file.exists() else b""
    file.unlink(missing_ok=True)  # the file is a hard link: writing to it would change the buffer's own file
    if content is not None:
        file.write_bytes(before[:content] if isinstance(content, int) else content)
    with opened(folder.parent / "mine", priority_exponent=1.0) as buffer:
        buffer.add_trajectories([trajectory(77)])
        for how in ({}, {"is_distributed": True, "world_size": 2}):
            if how and name in ("state.json", "priorities.npz"):
                continue  # loading onto another number of ranks does not read these files
            with pytest.raises(UserError, match=name):
                buffer.load_checkpoint(folder.parent / "checkpoint", **how)
        assert_same(buffer.trajectory(0), trajectory(77))
        assert len(buffer) == 1


def test_a_folder_without_a_buffer_is_named_and_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "000-rows.txt").write_text("mine")
    (tmp_path / "notes" / "metadata.json").write_text("{}")
    with pytest.raises(UserError, match=f"{tmp_path}/notes: no buffer is in there"):
        opened(tmp_path / "notes", read_only=True)
    with pytest.raises(UserError, match=f"{tmp_path}/nowhere: no such buffer"):
        opened(tmp_path / "nowhere", read_only=True)
    with opened(tmp_path / "mine") as buffer:
        for name in ("notes", "nowhere"):
            with pytest.raises(UserError, match=f"{tmp_path}/{name}: no checkpoint of a buffer"):
                buffer.load_checkpoint(tmp_path / name)
        buffer.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(UserError, match="a checkpoint is not written into"):
        opened(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint" / "lock").exists()
    assert (tmp_path / "notes" / "000-rows.txt").read_text() == "mine"


def test_a_file_system_without_locks_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=os.strerror(errno.ENOLCK)):
        opened(tmp_path)


def test_a_read_only_buffer_refuses_every_change(folder: Path) -> None:
    with opened(folder, read_only=True) as reader:
        for write in (
            lambda: reader.add_trajectories([trajectory(0)]),
            lambda: reader.add_trajectories([trajectory(0, batch=5)], wait=False).result(),  # type: ignore[union-attr]
            reader.clear,
            lambda: reader.load_checkpoint(folder.parent / "checkpoint"),
            lambda: reader.load_checkpoint(folder.parent / "checkpoint", True, 0, 2),
        ):
            with pytest.raises(UserError, match="was opened with read_only=True"):
                write()
    with opened(folder) as buffer:
        assert len(buffer) == 10
        assert buffer.verify() == []
