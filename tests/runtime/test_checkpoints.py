"""Tests of Checkpoints: a checkpoint is written completely or not at all, and damage is found when it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from gleanrl.runtime.checkpoints import Checkpoints
from gleanrl.utils.errors import UserError


def write(text: str):
    def into(folder: Path) -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "model.bin").write_text(text)

    return into


def test_the_newest_checkpoints_are_kept_and_the_latest_is_found(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert store.latest() is None
    for step in (2, 4, 10):
        store.save(step, {"extra": step}, write(f"weights {step}"))
    assert sorted(p.name for p in store.folder.iterdir()) == ["step-10", "step-4"]
    folder, state = store.latest() or pytest.fail("nothing found")
    assert state == {"step": 10, "extra": 10}
    assert (folder / "weights" / "model.bin").read_text() == "weights 10"


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_checkpoint_falls_back_with_a_warning_and_no_good_one_is_an_error(
    tmp_path: Path, damage: str
) -> None:
    store = Checkpoints(tmp_path, keep=3)
    store.save(1, {}, write("weights of 1"))
    store.save(2, {}, write("weights of 2"))

    def harm(folder: Path) -> None:
        path = folder / "weights" / "model.bin"
        if damage == "flip":
            path.write_text("weights of X")
        elif damage == "truncate":
            path.write_text("weights")
        elif damage == "remove":
            path.unlink()
        else:
            (folder / "manifest.json").write_text("[]")

    harm(tmp_path / "step-2")
    with pytest.warns(UserWarning, match=r"step-2 is damaged .*continuing from step-1"):
        folder, state = store.latest() or pytest.fail("nothing found")
    assert state["step"] == 1
    harm(folder)
    with pytest.raises(UserError, match="is damaged"):
        store.latest()


def test_a_failed_save_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=1)
    store.save(1, {}, write("good"))

    def broken(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="space"):
        store.save(2, {}, broken)
    _, state = store.latest() or pytest.fail("nothing found")
    assert state["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
