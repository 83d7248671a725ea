"""Adding without waiting: a bounded queue and one thread that commits all that is waiting at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from gleanrl.buffer.in_place import InPlace
from gleanrl.buffer.store import Store
from gleanrl.buffer.trajectory import Rows
from gleanrl.utils.errors import UserError

QUEUE_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Submission:
    """Trajectories that somebody waits for."""

    trajectories: Sequence[Rows]
    nbytes: int
    done: Future[list[int]]


class Writer:
    """Puts trajectories into a store from a thread of its own.

    Args:
        store: where they go.
        queue_nbytes: how much may wait; who brings more is held up until there is room.
    """

    def __init__(self, store: Store | InPlace, queue_nbytes: int = QUEUE_NBYTES) -> None:
        self._store, self._limit = store, queue_nbytes
        self._waiting: deque[Submission] = deque()
        self._nbytes = 0  # of what waits and of what is being written
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = self._closed = False
        self._error: BaseException | None = None

    def submit(self, trajectories: Sequence[Rows]) -> Future[list[int]]:
        """Their ids, once they are on disk. Raises what an earlier write failed with, if nobody has seen it.

        Raises `RuntimeError` where the buffer is closed, or is while this waits for room.
        """
        nbytes = sum(rows.nbytes for rows in trajectories)
        own = Submission(list(trajectories), nbytes, Future())
        with self._changed:
            self.check()
            self._changed.wait_for(lambda: self._closed or not self._nbytes or self._nbytes + nbytes <= self._limit)
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
                    own = self._waiting.popleft()
                    self._nbytes -= own.nbytes
                    own.done.cancel()
                    own.done.set_running_or_notify_cancel()  # who waits for several futures hears of it
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
            if wanted := [own for own in batch if own.done.set_running_or_notify_cancel()]:
                self._commit(wanted)
            with self._changed:
                self._nbytes -= sum(own.nbytes for own in batch)

    def _commit(self, batch: Sequence[Submission]) -> None:
        """All at once; where one of them cannot be stored, each alone, so that only its own caller hears of it."""
        try:
            ids = self._store.add([rows for own in batch for rows in own.trajectories])
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
