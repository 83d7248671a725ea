"""Helpers for the buffer's two background threads.

`WriteQueue` belongs to the thread that writes trajectories (``add_trajectories(..., wait=False)``). `RandomStream`
records the random state for the thread that draws batches in advance (`Sampler.iterate`).
"""

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

# Largest total size in bytes of the trajectories that are queued or being written. `WriteQueue.submit` blocks while its
# trajectories do not fit. Trajectories larger than this are accepted when the queue is empty.
QUEUE_NBYTES = 256 << 20
Add = Callable[[Sequence[FlatTrajectory]], list[int]]  # stores trajectories and returns their ids (`BufferWriter.add`)


@dataclass(frozen=True, slots=True)
class Submission:
    """The trajectories of one call of `WriteQueue.submit`, and the future that receives their ids."""

    trajectories: Sequence[FlatTrajectory]
    nbytes: int
    done: Future[list[int]]
    awaited: bool  # whether the caller waits for the future, and so gets the error of a failed write


class WriteQueue:
    """A queue of trajectories, which a background thread writes to the buffer.

    The thread commits all queued trajectories together, because every commit waits for the disk.

    Args:
        add: function that stores trajectories and returns their ids. It is called in the background thread.
    """

    def __init__(self, add: Add) -> None:
        self._add = add
        self._waiting: deque[Submission] = deque()
        self._nbytes = 0  # total size of the trajectories that are queued or being written
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = self._closed = False
        self._error: BaseException | None = None

    def submit(self, trajectories: Sequence[FlatTrajectory], *, awaited: bool = False) -> Future[list[int]]:
        """Queue trajectories, and return a future of their ids. The future is done once the trajectories are on disk.

        Blocks while the queue is full. The tensors must not be modified until the future is done. With ``awaited``, the
        caller waits for the future, so only the future raises the error if writing fails, and no later call does.

        Raises the error of an earlier write if no call has raised it yet, and `RuntimeError` if the buffer is closed
        before the trajectories could be queued.
        """
        nbytes = sum(trajectory.nbytes for trajectory in trajectories)
        own = Submission(list(trajectories), nbytes, Future(), awaited)
        with self._changed:
            self.raise_error()
            self._changed.wait_for(lambda: self._closed or not self._nbytes or self._nbytes + nbytes <= QUEUE_NBYTES)
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
        """Whether no trajectory is queued or being written."""
        return not self._waiting and not self._busy

    def flush(self) -> None:
        """Block until all submitted trajectories are written. Raises the error of a failed write like `raise_error`."""
        with self._changed:
            self._changed.wait_for(lambda: self.idle)
            self.raise_error()

    def raise_error(self) -> None:
        """Raise the error of the first write that failed since the last call that raised one, if there is any."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, *, wait: bool) -> None:
        """Stop the background thread, and raise the error of a failed write as `raise_error` does.

        With ``wait``, the queued trajectories are written first. Otherwise they are discarded, and their futures are
        cancelled.
        """
        with self._changed:
            self._closed = True
            if not wait:
                while self._waiting:
                    own = self._waiting.popleft()
                    self._nbytes -= own.nbytes
                    own.done.cancel()
                    # `cancel` does not wake threads that block in `concurrent.futures.wait`, but this call does
                    own.done.set_running_or_notify_cancel()
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
            del batch, wanted  # their tensors would stay in memory while the thread waits

    def _commit(self, batch: Sequence[Submission]) -> None:
        """Write some submissions in one commit, and set the results of their futures.

        If the commit raises `UserError`, each submission is written in a commit of its own, so that only the future of
        the invalid submission gets the error.
        """
        try:
            ids = self._add([trajectory for own in batch for trajectory in own.trajectories])
        except BaseException as error:
            if len(batch) > 1 and isinstance(error, UserError):
                for own in batch:
                    self._commit([own])
                return
            with self._changed:
                if not all(own.awaited for own in batch):
                    # only the first error is kept, because later ones are often its consequences
                    self._error = self._error or error
            for own in batch:
                own.done.set_exception(error)
        else:
            for own in batch:
                mine, ids = ids[: len(own.trajectories)], ids[len(own.trajectories) :]
                own.done.set_result(mine)


@dataclass(eq=False)
class Ahead:
    """A batch that is drawn in advance and not yet yielded: the generator's states before and after the draw."""

    before: Tensor  # state when `RandomStream.begin` was called
    after: Tensor | None = None  # state directly after the draw; None until the batch is drawn


class RandomStream:
    """Records the states of a random generator from which batches are drawn in advance.

    A checkpoint must store the state before the first batch that was drawn but not yet yielded to the caller. Otherwise
    a resumed run would skip this batch.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._ahead: list[Ahead] = []
        self._lock = threading.Lock()

    def begin(self) -> Ahead:
        """Register a batch that is about to be drawn in advance."""
        with self._lock:
            batch = Ahead(self._generator.get_state())
            self._ahead.append(batch)
            return batch

    def end(self, batch: Ahead) -> None:
        """Unregister a batch that was yielded or discarded."""
        with self._lock:
            if batch in self._ahead:
                self._ahead.remove(batch)

    def state(self) -> Tensor:
        """Return the generator state that a checkpoint should store: the state before the first batch not yet yielded.

        If the generator was used for another draw after one of the batches, no single state reproduces all of them. In
        this case the state of the generator at the time of this call is returned.
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
        """Set the generator to ``state``, and unregister all batches that were drawn in advance."""
        with self._lock:
            self._ahead.clear()
            self._generator.set_state(state)
