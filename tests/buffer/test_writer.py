"""Tests of ``add_trajectories(wait=False)``, which queues trajectories and returns a future."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import pytest
import torch

from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer, background
from gleanrl.utils.errors import UserError
from tests.buffer.world import WAIT, assert_same, in_a_thread, trajectory


class Gate:
    """Blocks a buffer's writes until ``open`` is called; ``entered`` is set when a write has begun."""

    def __init__(self, buffer: TrajectoryReplayBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self._go_on = threading.Event(), threading.Event()
        real = buffer.storage.add

        def add(rows: Any) -> Any:
            self.entered.set()
            assert self._go_on.wait(WAIT)
            return real(rows)

        monkeypatch.setattr(buffer.storage, "add", add)

    def open(self) -> None:
        self._go_on.set()


@pytest.fixture
def buffer() -> Iterator[TrajectoryReplayBuffer]:
    with TrajectoryReplayBuffer(segment_bytes=1 << 16, max_bytes=1 << 20) as buffer:
        yield buffer


@pytest.fixture
def gate(buffer: TrajectoryReplayBuffer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(buffer, monkeypatch)
    yield gate
    gate.open()


def queued(buffer: TrajectoryReplayBuffer, number: int, steps: int = 6) -> Future[list[int]]:
    return buffer.add_trajectories([trajectory(number, steps, wide=False)], wait=False)  # type: ignore[return-value]


def test_a_cancelled_trajectory_is_not_written_and_the_next_one_is(buffer: TrajectoryReplayBuffer, gate: Gate) -> None:
    first = queued(buffer, 0)
    assert gate.entered.wait(WAIT)
    second, third = queued(buffer, 1), queued(buffer, 2)
    assert second.cancel()
    assert not first.cancel()  # its write has begun
    gate.open()
    assert in_a_thread(buffer.flush) == [None]
    assert (first.result(WAIT), third.result(WAIT)) == ([0], [1])
    assert_same(buffer.trajectory(1), trajectory(2, wide=False))
    alone = queued(buffer, 3)
    assert alone.result(WAIT) == [2]


@pytest.mark.parametrize("wait_for_all", [True, False])
def test_a_caller_that_waits_for_room_in_the_queue_is_released_by_close(
    buffer: TrajectoryReplayBuffer, gate: Gate, monkeypatch: pytest.MonkeyPatch, wait_for_all: bool
) -> None:
    writing = queued(buffer, 0)
    assert gate.entered.wait(WAIT)
    waiting = queued(buffer, 1)
    monkeypatch.setattr(background, "QUEUE_NBYTES", 1)
    outcome: list[Any] = []
    producer = threading.Thread(target=lambda: outcome.extend(in_a_thread(lambda: queued(buffer, 2))), daemon=True)
    begun, real = threading.Event(), buffer.write_queue._changed.wait_for

    def wait_for(*args: Any) -> Any:
        begun.set()
        return real(*args)

    buffer.write_queue._changed.wait_for = wait_for  # type: ignore[method-assign]
    producer.start()
    assert begun.wait(WAIT)
    closing = threading.Thread(target=lambda: buffer.close(wait=wait_for_all), daemon=True)
    closing.start()
    producer.join(WAIT)
    assert [str(error) for error in outcome] == ["the buffer is closed"]
    gate.open()
    closing.join(WAIT)
    assert not closing.is_alive()
    assert writing.result(WAIT) == [0]
    done, _ = wait([waiting], WAIT)
    assert done == {waiting}
    if wait_for_all:
        assert waiting.result() == [1]
    else:
        with pytest.raises(CancelledError):
            waiting.result()


def test_a_refused_trajectory_does_not_fail_others_of_the_same_write(
    buffer: TrajectoryReplayBuffer, gate: Gate
) -> None:
    first = queued(buffer, 0)
    assert gate.entered.wait(WAIT)
    large = TensorTrajectory(actions=torch.zeros(4000, 8, 64))
    second, refused, third = queued(buffer, 1), buffer.add_trajectories([large], wait=False), queued(buffer, 2)
    gate.open()
    assert (first.result(WAIT), second.result(WAIT), third.result(WAIT)) == ([0], [1], [2])
    with pytest.raises(UserError, match="max_bytes = 1048576"):
        refused.result(WAIT)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="max_bytes = 1048576"):
        buffer.flush()
    assert_same(buffer.trajectory(2), trajectory(2, wide=False))


def test_the_first_of_several_failed_writes_is_reported(buffer: TrajectoryReplayBuffer, gate: Gate) -> None:
    broken = [TensorTrajectory(actions=torch.zeros(4000, 8, size)) for size in (64, 128)]
    first = buffer.add_trajectories([broken[0]], wait=False)
    assert gate.entered.wait(WAIT)
    second = buffer.add_trajectories([broken[1]], wait=False)
    gate.open()
    wait([first, second], WAIT)  # type: ignore[list-item]
    with pytest.raises(UserError) as raised:
        buffer.flush()
    assert raised.value is first.exception()  # type: ignore[union-attr]
    buffer.flush()


def test_an_error_that_the_waiting_caller_gets_is_not_raised_by_later_calls(
    buffer: TrajectoryReplayBuffer, gate: Gate
) -> None:
    first = queued(buffer, 0)
    assert gate.entered.wait(WAIT)
    threading.Timer(0.1, gate.open).start()
    with pytest.raises(UserError, match="max_bytes = 1048576"):  # waits behind the first one in the queue
        buffer.add_trajectories([TensorTrajectory(actions=torch.zeros(4000, 8, 64))])
    assert first.result(WAIT) == [0]
    assert buffer.add_trajectories([trajectory(1, wide=False)]) == [1]


def test_the_queued_copies_are_freed_once_they_are_written(
    buffer: TrajectoryReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[weakref.ref[torch.Tensor]] = []
    submit = buffer.write_queue.submit

    def watched(trajectories: Any) -> Any:
        copies.append(weakref.ref(trajectories[0].columns[("actions",)]))
        return submit(trajectories)

    monkeypatch.setattr(buffer.write_queue, "submit", watched)
    assert queued(buffer, 0).result(WAIT) == [0]
    buffer.flush()
    end = time.monotonic() + WAIT
    while copies[0]() is not None and time.monotonic() < end:
        time.sleep(0.001)
    assert copies[0]() is None


def test_queued_trajectories_are_copies(buffer: TrajectoryReplayBuffer, gate: Gate) -> None:
    flags = torch.zeros(7, 3, 1, dtype=torch.bool)  # with a bootstrap row before the first step
    given = TensorTrajectory(**{**vars(trajectory(3)), "dones": flags})
    array = given.rewards.numpy()  # type: ignore[union-attr]
    wanted = TensorTrajectory(**{**vars(trajectory(3)), "dones": flags.clone()})
    done = buffer.add_trajectories([{**vars(given), "rewards": array}], wait=False)
    for tensor in (given.actions, given.rewards, flags, given.curr_obs["state"], given.next_obs["deep"]["small"]):
        tensor.fill_(1)  # type: ignore[union-attr]
    array.fill(9)
    gate.open()
    assert done.result(WAIT) == [0]  # type: ignore[union-attr]
    assert_same(buffer.trajectory(0), wanted)
    assert buffer.verify() == []
