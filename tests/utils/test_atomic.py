"""`gleanrl.utils.atomic` replaces files and directories atomically, also when writing fails or the disk is full.

The tests write below ``tmp_path`` and simulate a full disk or a missing system call by patching.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError


def test_a_file_is_replaced_and_no_temporary_file_remains(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "a.txt"
    atomic.write_text(target, "one")
    atomic.write_text(target, "zwei ß")
    assert target.read_text(encoding="utf-8") == "zwei ß"
    assert os.listdir(target.parent) == ["a.txt"]


def test_an_error_while_writing_keeps_the_old_file_and_removes_the_temporary_one(tmp_path: Path) -> None:
    target = tmp_path / "a.bin"
    atomic.write_bytes(target, b"old")
    with pytest.raises(ZeroDivisionError), atomic.file(target) as partial:
        partial.write_bytes(bytes([1 // 0]))
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_directory_appears_only_when_complete_and_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "step-1"
    for content in ("one", "two"):
        with atomic.directory(target) as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / f"{content}.txt").write_text(content)
            assert not (target / "sub" / f"{content}.txt").exists()
    assert os.listdir(target / "sub") == ["two.txt"]
    assert os.listdir(tmp_path) == ["step-1"]


def test_who_may_read_a_directory_may_read_its_files(tmp_path: Path) -> None:
    with atomic.directory(tmp_path / "model") as folder:
        (folder / "weights").mkdir()
        (folder / "weights" / "a.bin").touch(mode=0o600)
    modes = [path.stat().st_mode & 0o444 for path in (folder.parent / "model").rglob("*")]
    assert modes == [(tmp_path / "model").stat().st_mode & 0o444] * 2


def test_an_error_while_a_directory_is_written_keeps_the_old_directory(tmp_path: Path) -> None:
    target = tmp_path / "step-1"
    with atomic.directory(target) as folder:
        (folder / "a").write_text("kept")
    with pytest.raises(ZeroDivisionError), atomic.directory(target) as folder:
        (folder / "b").write_text(f"lost {1 // 0}")
    assert os.listdir(target) == ["a"]
    assert os.listdir(tmp_path) == ["step-1"]


def _raise_disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_raises_a_one_line_error_with_path_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "big.bin"
    atomic.write_bytes(target, b"old")
    monkeypatch.setattr(os, "fsync", _raise_disk_full)
    with pytest.raises(UserError, match=r"big\.bin: the disk is full: 2\.0 KiB needed") as caught:
        atomic.write_bytes(target, b"x" * 2048)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"more than 3 B needed"), atomic.directory(tmp_path / "d") as folder:
        (folder / "f").write_bytes(b"abc")
    monkeypatch.undo()
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["big.bin"]


def test_a_full_disk_is_recognised_by_the_message_of_an_error_without_errno(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="disk is full") as caught, atomic.file(tmp_path / "m.safetensors"):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    assert "needed" not in str(caught.value), "it is not known how much is needed, as nothing was written"


@pytest.mark.parametrize("fails", [False, True])
def test_a_directory_is_replaced_or_restored_on_systems_without_renameat2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    target, real = tmp_path / "step-1", os.replace
    with atomic.directory(target) as folder:
        (folder / "a").write_text("old")
    # This C library has no `renameat2`, so that two directories cannot be exchanged in one step.
    # The old directory is renamed first, the new one takes its name, and if that fails, the old one is renamed back.
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: None)
    if fails:
        moves = iter([real, _raise_disk_full, real])
        monkeypatch.setattr(os, "replace", lambda one, other: next(moves)(one, other))
        with pytest.raises(UserError, match="disk is full"), atomic.directory(target) as folder:
            (folder / "a").write_text("new")
    else:
        with atomic.directory(target) as folder:
            (folder / "a").write_text("new")
    assert (target / "a").read_text() == ("old" if fails else "new")
    assert os.listdir(tmp_path) == ["step-1"]


def test_left_behind_lists_the_leftovers_of_killed_writers_but_not_running_writes(tmp_path: Path) -> None:
    left = tmp_path / f"{atomic.TEMPORARY_PREFIX}0123abcd-step-1"
    left.mkdir()
    (tmp_path / f"{atomic.TEMPORARY_PREFIX}0123abcd-step-10").mkdir()
    with atomic.directory(tmp_path / "step-1"):
        assert atomic.left_behind(tmp_path / "step-1") == [left]
    assert atomic.left_behind(tmp_path / "step-1") == [left]
