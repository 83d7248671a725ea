"""Adding without waiting: a bounded queue and one thread that commits all that is waiting at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from gleanrl.buffer.in_place import InPlace
from gleanrl.buffer.store import Store
from gleanrl.buffer.trajectory import Rows

QUEUE_NBYTES = 256 << 20


class Writer:
    """Puts trajectories into a store from a thread of its own.

    Args:
        store: where they go.
        queue_nbytes: how much may wait; who brings more is held up until there is room.
    """

    def __init__(self, store: Store | InPlace, queue_nbytes: int = QUEUE_NBYTES) -> None:
        self._store, self._limit = store, queue_nbytes
        self._waiting: deque[tuple[list[Rows], int, Future[list[int]]]] = deque()
        self._nbytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = self._closed = False
        self._error: BaseException | None = None

    def submit(self, trajectories: Sequence[Rows]) -> Future[list[int]]:
        """Their ids, once they are on disk. Raises what an earlier write failed with, if nobody has seen it."""
        nbytes = sum(rows.nbytes for rows in trajectories)
        done: Future[list[int]] = Future()
        with self._changed:
            self.check()
            if self._closed:
                raise RuntimeError("the buffer is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="buffer-write", daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: not self._nbytes or self._nbytes + nbytes <= self._limit)
            self._waiting.append((list(trajectories), nbytes, done))
            self._nbytes += nbytes
            self._changed.notify_all()
        return done

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is being written."""
        return not self._waiting and not self._busy

    def flush(self) -> None:
        """Return when all that was submitted is on disk. Raises what a write failed with."""
        with self._changed:
            self._changed.wait_for(lambda: self.idle)
            self.check()

    def check(self) -> None:
        """Raise a failure that nobody has seen yet."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, *, wait: bool) -> None:
        """End the thread, after what waits (``wait``) or at once: what waits then fails."""
        with self._changed:
            self._closed = True
            if not wait:
                while self._waiting:
                    self._waiting.popleft()[2].cancel()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.check()

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
            try:
                ids = self._store.add([rows for trajectories, _, _ in batch for rows in trajectories])
            except BaseException as error:
                self._failed(batch, error)
            else:
                for trajectories, _, done in batch:
                    own, ids = ids[: len(trajectories)], ids[len(trajectories) :]
                    done.set_result(own)
            with self._changed:
                self._nbytes -= sum(nbytes for _, nbytes, _ in batch)

    def _failed(self, batch: list[tuple[list[Rows], int, Future[list[int]]]], error: BaseException) -> None:
        with self._changed:
            self._error = error
        for _, _, done in batch:
            done.set_exception(error)
