"""Files are whole or absent, whatever fails in between."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "a.txt"
    atomic.write_text(target, "one")
    atomic.write_text(target, "zwei ß")
    assert target.read_text(encoding="utf-8") == "zwei ß"
    assert os.listdir(target.parent) == ["a.txt"]


def test_an_error_keeps_the_old_file_and_removes_the_new_one(tmp_path: Path) -> None:
    target = tmp_path / "a.bin"
    atomic.write_bytes(target, b"old")
    with pytest.raises(ZeroDivisionError), atomic.file(target) as partial:
        partial.write_bytes(bytes([1 // 0]))
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_directory_appears_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "step-1"
    for content in ("one", "two"):
        with atomic.directory(target) as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / f"{content}.txt").write_text(content)
            assert not (target / "sub" / f"{content}.txt").exists()
    assert os.listdir(target / "sub") == ["two.txt"]
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_failing_directory_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "step-1"
    with atomic.directory(target) as folder:
        (folder / "a").write_text("kept")
    with pytest.raises(ZeroDivisionError), atomic.directory(target) as folder:
        (folder / "b").write_text(f"lost {1 // 0}")
    assert os.listdir(target) == ["a"]
    assert os.listdir(tmp_path) == ["step-1"]


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_line_with_path_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "big.bin"
    atomic.write_bytes(target, b"old")
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(UserError, match=r"big\.bin: the disk is full: 2\.0 KiB needed") as caught:
        atomic.write_bytes(target, b"x" * 2048)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"more than 3 B needed"), atomic.directory(tmp_path / "d") as folder:
        (folder / "f").write_bytes(b"abc")
    monkeypatch.undo()
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["big.bin"]


def test_a_full_disk_is_recognised_through_a_library_that_hides_the_errno(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="disk is full"), atomic.file(tmp_path / "m.safetensors"):
        raise RuntimeError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("fails", [False, True])
def test_where_names_cannot_be_exchanged_the_old_directory_is_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    target, real = tmp_path / "step-1", os.replace
    with atomic.directory(target) as folder:
        (folder / "a").write_text("old")
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: None)  # a C library without renameat2
    if fails:
        moves = iter([real, _full, real])
        monkeypatch.setattr(os, "replace", lambda one, other: next(moves)(one, other))
        with pytest.raises(UserError, match="disk is full"), atomic.directory(target) as folder:
            (folder / "a").write_text("new")
    else:
        with atomic.directory(target) as folder:
            (folder / "a").write_text("new")
    assert (target / "a").read_text() == ("old" if fails else "new")
    assert os.listdir(tmp_path) == ["step-1"]


def test_what_killed_writers_left_is_found_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    left = tmp_path / f"{atomic.TEMPORARY_PREFIX}0123abcd-step-1"
    left.mkdir()
    (tmp_path / f"{atomic.TEMPORARY_PREFIX}0123abcd-step-10").mkdir()
    with atomic.directory(tmp_path / "step-1"):
        assert atomic.left_behind(tmp_path / "step-1") == [left]
    assert atomic.left_behind(tmp_path / "step-1") == [left]
