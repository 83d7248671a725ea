"""A sample is drawn from one state of the buffer, whatever another thread or process does at the worst moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from gleanrl.buffer import TrajectoryReplayBuffer
from gleanrl.buffer.files import Files
from gleanrl.buffer.manifest import Manifest
from tests.buffer.world import trajectory

WAIT = 60.0  # seconds until something counts as hung


def numbers(buffer: TrajectoryReplayBuffer, count: int = 200) -> set[int]:
    return set(buffer.sample(count, allow_short=True)["versions"].reshape(-1).tolist())


@pytest.mark.parametrize("opening", [False, True])
def test_everything_is_replaced_just_behind_a_reader_s_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: bool
) -> None:
    path, looked, real = tmp_path / "buffer", [], Manifest.read.__func__
    with TrajectoryReplayBuffer(path, segment_bytes=1 << 16) as writer:
        writer.add_trajectories([trajectory(1, 40)])
        writer.save_checkpoint(tmp_path / "checkpoint")
        reader = None if opening else TrajectoryReplayBuffer(path, read_only=True)

        def read(cls: type[Manifest], files: Files) -> Manifest | None:
            found = real(cls, files)
            if not looked:
                looked.append(found)
                writer.add_trajectories([trajectory(7, 40), trajectory(8, 40)])
                writer.load_checkpoint(tmp_path / "checkpoint")
            return found

        monkeypatch.setattr(Manifest, "read", classmethod(read))
        reader = reader or TrajectoryReplayBuffer(path, read_only=True)
        assert (len(reader), numbers(reader)) == (1, {1})
        writer.add_trajectories([trajectory(2)])
        assert (len(reader), numbers(reader)) == (2, {1, 2})
        assert reader.verify() == []
        reader.close()


def test_a_reader_that_cannot_open_what_replaced_its_files_can_later(
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
            assert numbers(reader) == {1, 2}
