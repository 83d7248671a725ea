"""Support for background threads: a queue of trajectories to write, and the random state of batches drawn ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from gleanrl.buffer.trajectory import FlatTrajectory
from gleanrl.utils.errors import UserError

QUEUE_NBYTES = 256 << 20
Add = Callable[[Sequence[FlatTrajectory]], list[int]]  # see `BufferWriter.add`


@dataclass(frozen=True, slots=True)
class Submission:
    """The trajectories of one call of `WriteQueue.submit`."""

    trajectories: Sequence[FlatTrajectory]
    nbytes: int
    done: Future[list[int]]


class WriteQueue:
    """Adds trajectories in a thread, which commits all waiting trajectories together.

    Args:
        add: function that stores trajectories and returns their ids.
        queue_nbytes: bytes of trajectories that may wait. `submit` blocks while the queue has no room.
    """

    def __init__(self, add: Add, queue_nbytes: int = QUEUE_NBYTES) -> None:
        self._add, self.queue_nbytes = add, queue_nbytes
        self._waiting: deque[Submission] = deque()
        self._nbytes = 0  # bytes of trajectories that wait or are being written
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = self._closed = False
        self._error: BaseException | None = None

    def submit(self, trajectories: Sequence[FlatTrajectory]) -> Future[list[int]]:
        """Return a future of the ids, which is done once the trajectories are on disk.

        Raises the error of an earlier write if it was not raised yet, and `RuntimeError` if the buffer is closed or is
        closed while this call waits for room.
        """
        nbytes = sum(trajectory.nbytes for trajectory in trajectories)
        own = Submission(list(trajectories), nbytes, Future())
        with self._changed:
            self.raise_error()
            self._changed.wait_for(
                lambda: self._closed or not self._nbytes or self._nbytes + nbytes <= self.queue_nbytes
            )
            if self._closed:
                raise RuntimeError("the buffer is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="buffer-write", daemon=True)
                self._thread.start()
            self._waiting.append(own)
            self._nbytes += nbytes
            self._changed.notify_all()
        return own.done

    @property
    def idle(self) -> bool:
        """Whether no trajectory waits or is being written."""
        return not self._waiting and not self._busy

    def flush(self) -> None:
        """Wait until all submitted trajectories are on disk. Raises the error of a failed write."""
        with self._changed:
            self._changed.wait_for(lambda: self.idle)
            self.raise_error()

    def raise_error(self) -> None:
        """Raise the error of a failed write if it was not raised yet."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, *, wait: bool) -> None:
        """End the thread. With ``wait``, waiting trajectories are written first, else their futures are cancelled."""
        with self._changed:
            self._closed = True
            if not wait:
                while self._waiting:
                    own = self._waiting.popleft()
                    self._nbytes -= own.nbytes
                    own.done.cancel()
                    own.done.set_running_or_notify_cancel()  # wakes callers of `concurrent.futures.wait`
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.raise_error()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                batch, self._busy = list(self._waiting), True
                self._waiting.clear()
            if wanted := [own for own in batch if own.done.set_running_or_notify_cancel()]:
                self._commit(wanted)
            with self._changed:
                self._nbytes -= sum(own.nbytes for own in batch)

    def _commit(self, batch: Sequence[Submission]) -> None:
        """Commit submissions together.

        If one is refused, each is committed separately, so that only the future of the refused one gets the error.
        """
        try:
            ids = self._add([trajectory for own in batch for trajectory in own.trajectories])
        except BaseException as error:
            if len(batch) > 1 and isinstance(error, UserError):
                for own in batch:
                    self._commit([own])
                return
            with self._changed:
                self._error = error
            for own in batch:
                own.done.set_exception(error)
        else:
            for own in batch:
                mine, ids = ids[: len(own.trajectories)], ids[len(own.trajectories) :]
                own.done.set_result(mine)


@dataclass(eq=False)
class Ahead:
    """A batch that was not handed out yet, with the states of the generator before and after it was drawn."""

    before: Tensor  # state at `RandomStream.begin`
    after: Tensor | None = None  # state right after the draw; None until the batch is drawn


class RandomStream:
    """The state of a generator from which batches are drawn ahead.

    A checkpoint holds the state before the first batch that was drawn but not handed out, so that a resumed run gets
    that batch.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._ahead: list[Ahead] = []
        self._lock = threading.Lock()

    def begin(self) -> Ahead:
        """Register a batch that is about to be drawn ahead."""
        with self._lock:
            batch = Ahead(self._generator.get_state())
            self._ahead.append(batch)
            return batch

    def end(self, batch: Ahead) -> None:
        """Unregister a batch that was handed out or discarded."""
        with self._lock:
            if batch in self._ahead:
                self._ahead.remove(batch)

    def state(self) -> Tensor:
        """Return the state to resume from.

        If something else was drawn between two batches, no state repeats both draws. The generator's current state is
        returned then.
        """
        with self._lock:
            now = self._generator.get_state()
            if not self._ahead:
                return now
            following = [batch.before for batch in self._ahead[1:]] + [now]
            for batch, state in zip(self._ahead, following, strict=True):
                if batch.after is not None and not torch.equal(batch.after, state):
                    return now
            return self._ahead[0].before

    def restore(self, state: Tensor) -> None:
        """Continue from ``state``. Batches that were drawn ahead before are forgotten."""
        with self._lock:
            self._ahead.clear()
            self._generator.set_state(state)
