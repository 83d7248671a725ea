"""Tests of sampling in one thread while another loads a checkpoint, evicts trajectories or closes the buffer.

Also tests of forked processes, which have a copy of the buffer and none of its threads.
"""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from gleanrl.buffer import Batch, TrajectoryReplayBuffer
from gleanrl.utils.errors import UserError
from tests.buffer.world import WAIT, numbers, trajectory


class Sampling:
    """A thread that samples until ``end`` is called and checks every row."""

    def __init__(self, buffer: TrajectoryReplayBuffer) -> None:
        self.count, self.error = 0, None
        self._buffer, self._stop, self._sampled = buffer, False, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop:
                batch = self._buffer.sample(200)
                mark = batch["actions"][:, :1]
                assert (batch["versions"] == mark // 1000).all()
                assert (batch["curr_obs"]["state"] == mark).all()
                assert (mark >= 1000).all(), "zeros were served"
                self.count += 1
                self._sampled.set()
        except BaseException as error:
            self.error = error

    def once_more(self) -> None:
        """Wait until another sample was taken."""
        self._sampled.clear()
        assert self._sampled.wait(WAIT), self.error

    def end(self) -> BaseException | None:
        self._stop = True
        self._thread.join(WAIT)
        assert not self._thread.is_alive()
        return self.error


def filled(path: Path | None, first: int) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(path, seed=0, segment_bytes=1 << 18)
    buffer.add_trajectories([trajectory(first + i, 40) for i in range(5)])
    return buffer


def test_a_thread_can_sample_while_checkpoints_are_loaded(tmp_path: Path) -> None:
    with filled(None, 100) as other:
        other.save_checkpoint(tmp_path / "checkpoint")
    with filled(tmp_path / "buffer", 1) as buffer:
        sampling = Sampling(buffer)
        reader = TrajectoryReplayBuffer(tmp_path / "buffer", seed=0, read_only=True)
        reading = Sampling(reader)
        for i in range(12):
            sampling.once_more()
            buffer.load_checkpoint(tmp_path / "checkpoint", is_distributed=i % 2 == 1)
            reading.once_more()
        assert sampling.end() is None
        assert reading.end() is None
        reader.close()


def test_a_thread_can_sample_while_the_oldest_trajectories_are_evicted(tmp_path: Path) -> None:
    with filled(tmp_path, 1) as buffer:
        sampling = Sampling(buffer)
        for i in range(6, 40):
            sampling.once_more()
            buffer.add_trajectories([trajectory(i, 40)])
            buffer.storage.drop(i - 5)
        assert sampling.end() is None


def closed(buffer: TrajectoryReplayBuffer) -> Any:
    return buffer.sample(200)


@pytest.mark.parametrize("path", [None, "buffer"])
@pytest.mark.parametrize("use", [closed, TrajectoryReplayBuffer.get_stats, TrajectoryReplayBuffer.verify])
def test_a_closed_buffer_raises_that_it_is_closed(
    tmp_path: Path, path: str | None, use: Callable[[TrajectoryReplayBuffer], Any]
) -> None:
    buffer = filled(tmp_path / path if path else None, 1)
    sampling = Sampling(buffer)
    sampling.once_more()
    buffer.close()
    error = sampling.end()
    assert error is None or (isinstance(error, RuntimeError) and str(error) == "the buffer is closed")
    with pytest.raises(RuntimeError, match="the buffer is closed"):
        use(buffer)
    buffer.close()


# --- forked processes -----------------------------------------------------------------------------
def use_in_a_forked_process(buffer: TrajectoryReplayBuffer, stream: Iterator[Batch], pipe: Connection) -> None:
    torch.set_num_threads(1)  # torch's OpenMP hangs in a process that is forked from one where it has worked
    refused = 0
    for use in (
        lambda: next(stream),
        lambda: buffer.add_trajectories([trajectory(8)]),
        lambda: buffer.add_trajectories([trajectory(8)], wait=False).result(WAIT),  # type: ignore[union-attr]
        buffer.clear,
    ):
        try:
            use()
        except UserError:
            refused += 1
    pipe.send(refused)
    while pipe.recv():
        pipe.send(numbers(buffer.sample(200, allow_short=True)))
    buffer.close()


@pytest.mark.parametrize("where", ["buffer", None])
def test_a_forked_process_reads_the_buffer_and_neither_writes_nor_locks_it(tmp_path: Path, where: str | None) -> None:
    path = tmp_path / where if where else None
    here, there = multiprocessing.Pipe()
    with filled(path, 1) as buffer:
        stream = buffer.iterate(20)
        next(stream)
        queued = buffer.add_trajectories([trajectory(6)], wait=False)
        fork: Any = multiprocessing.get_context("fork").Process
        child = fork(target=use_in_a_forked_process, args=(buffer, stream, there))
        child.start()
        stream.close()
        try:
            assert here.poll(WAIT)
            assert here.recv() == 4
            assert queued.result(WAIT) == [5]  # type: ignore[union-attr]
            assert buffer.add_trajectories([trajectory(7)]) == [6]
            here.send(True)
            assert here.poll(WAIT)
            assert here.recv() >= {1, 2, 3, 4, 5} | ({6, 7} if where else set())
            assert buffer.verify() == []
            buffer.close()
            if path is not None:
                with TrajectoryReplayBuffer(path) as again:  # the child is alive and does not hold the lock
                    assert again.add_trajectories([trajectory(8)]) == [7]
                    here.send(True)
                    assert here.poll(WAIT)
                    assert here.recv() == set(range(1, 9))
            here.send(False)
            child.join(WAIT)
            assert child.exitcode == 0
        finally:
            child.kill()
            child.join()


class Draws(IterableDataset):
    def __init__(self, buffer: TrajectoryReplayBuffer) -> None:
        self.buffer = buffer

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        for _ in range(2):
            yield tuple(self.buffer.sample(50, indices=True)["indices"].tolist())


def test_forked_workers_of_a_data_loader_draw_different_batches_that_repeat() -> None:
    def drawn() -> list[tuple[int, ...]]:
        with filled(None, 1) as buffer:
            loader = DataLoader(Draws(buffer), batch_size=None, num_workers=2, multiprocessing_context="fork")
            return [
                *map(tuple, loader),
                *map(tuple, loader),
                tuple(buffer.sample(50, indices=True)["indices"].tolist()),
            ]

    found = drawn()
    assert len(set(found)) == len(found) == 9
    assert drawn() == found


def test_a_pickled_buffer_reads_the_folder_with_a_random_stream_of_its_own(tmp_path: Path) -> None:
    """A `DataLoader` that spawns its workers pickles the buffer once for each of them."""
    with TrajectoryReplayBuffer(tmp_path / "buffer", seed=3, sample_window_size=2, priority_exponent=1.0) as buffer:
        buffer.add_trajectories([trajectory(number) for number in range(3)])
        first, second = pickle.dumps(buffer), pickle.dumps(buffer)
        drawn = []
        for content in (first, first, second):
            with pickle.loads(content) as copy:
                drawn.append(copy.sample(16)["actions"])
                copy.sample_prioritized(4)
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])
        with pickle.loads(first) as copy:
            buffer.add_trajectories([trajectory(3)])
            assert numbers(copy.sample(36)) == {2, 3}
            with pytest.raises(UserError, match="read_only"):
                copy.add_trajectories([trajectory(4)])
    with TrajectoryReplayBuffer() as buffer, pytest.raises(UserError, match="memory"):
        pickle.dumps(buffer)
