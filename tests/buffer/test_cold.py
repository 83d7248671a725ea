"""Tests of reading rows that the page cache does not hold, and of when a reader parses the manifest again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gleanrl.buffer import TrajectoryReplayBuffer
from gleanrl.buffer.columns import PAGE, AddressSpace, Columns, Field, octets
from gleanrl.buffer.files import Files
from gleanrl.buffer.log import Manifest
from tests.buffer.world import same, trajectory

WIDTH = 1536  # bytes of a row, less than a page, so that rows share pages


@pytest.fixture
def columns(tmp_path: Path) -> Columns:
    """1,024 rows in two files; every value of a row is the row's number."""
    own = Columns(Files(tmp_path, writable=True), "rows-{}", [Field(("x",), torch.int64, (WIDTH // 8,))], 512)
    own.write([octets(torch.arange(1024)[:, None].expand(-1, WIDTH // 8).contiguous())], 1024)
    return own


def test_rows_that_are_not_in_memory_are_prefetched_before_any_row_is_read(
    columns: Columns, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(AddressSpace, "resident", lambda *_: False)
    monkeypatch.setattr(AddressSpace, "prefetch", lambda _, at, nbytes: asked.append((at, at + nbytes)))
    rows = torch.tensor([900, 3, 3, 4, 511, 512, 77])
    for _ in range(2):  # prefetching a row once must not mark it as resident
        asked.clear()
        [found] = columns.gather(rows, [0])
        assert torch.equal(found[:, 0], rows)
        assert all(any(a <= row * WIDTH and (row + 1) * WIDTH <= b for a, b in asked) for row in rows.tolist())
        assert len(asked) == 4  # adjacent rows are prefetched by one call
        assert sum(b - a for a, b in asked) < 7 * WIDTH + 3 * PAGE  # little more than the rows themselves


def test_samples_are_the_same_after_the_files_left_the_page_cache(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path / "b", seed=3) as buffer:
        buffer.add_trajectories([trajectory(number) for number in range(20)])
        wanted = buffer.sample(64)
    for path in (tmp_path / "b").iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    with TrajectoryReplayBuffer(tmp_path / "b", seed=3, read_only=True) as reader:
        assert same(reader.sample(64), wanted)


def test_a_manifest_is_parsed_again_only_when_it_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TrajectoryReplayBuffer(tmp_path) as writer, TrajectoryReplayBuffer(tmp_path, read_only=True) as reader:
        parsed, real = list[object](), Manifest.read
        monkeypatch.setattr(Manifest, "read", lambda files: (parsed.append(files), real(files))[1])
        # Many rounds, because the file system reuses inode numbers: a new manifest may have the old one's inode.
        for number in range(20):
            writer.add_trajectories([trajectory(number)])
            writer.clear()
            parsed.clear()
            assert (len(reader), reader.trajectory_counter) == (0, number + 1)
            assert len(reader) == 0
            assert len(parsed) == 1
