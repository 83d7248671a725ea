"""The reward agent for loops that are not asyncio: its event loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from gleanrl.config.settings import RewardSettings
from gleanrl.protocols import Metrics
from gleanrl.rewards.agent import RewardAgent
from gleanrl.rewards.delivery import Item, What
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError

Lane = Literal["train", "eval"]
T = TypeVar("T")
log = logging.getLogger(__name__)

_CLOSED = "the reward agent was closed"
_TEARDOWN_S = 5.0  # to wait for what a reward left on the loop; its thread holds nobody up after that


class BlockingRewardAgent:
    """A `RewardAgent` that any thread may call, many at once.

    It is open from when it is made to `close`, the end of its ``with`` block or of the interpreter, whichever comes
    first. What is under way then is given up, and who waits for it gets `UserError`.

    Args:
        reward, settings, journal, overrides: as of `gleanrl.rewards.RewardAgent`.

    Raises:
        UserError: there is no such reward, or a setting has no meaning.
    """

    def __init__(
        self,
        reward: Any = None,
        settings: RewardSettings | None = None,
        *,
        journal: Path | str | None = None,
        **overrides: Any,
    ) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()  # nothing is handed to the loop once it is told to stop
        self._closed, self._done = False, threading.Event()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        opened: Future[tuple[RewardAgent, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def main() -> None:
            try:
                async with RewardAgent(reward, settings, journal=journal, **overrides) as agent:
                    stop = asyncio.Event()
                    opened.set_result((agent, asyncio.get_running_loop(), stop))
                    await stop.wait()
            finally:
                with self._lock:
                    self._closed = True
                    self._done.set()

        self._thread = threading.Thread(target=self._serve, args=(main, opened), name="gleanrl-rewards", daemon=True)
        self._thread.start()
        try:
            self._agent, self._loop, self._stop = opened.result()
        except BaseException:  # a Ctrl-C while it opens, say
            opened.add_done_callback(_stop_what_opened)
            raise
        _open.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is under way and let go of everything; again, it does nothing.

        Raises:
            UserError: the journal could not be closed.
        """
        if os.getpid() != self._process:
            return  # a fork holds nothing of it
        with self._lock:
            self._closed = True
            if not self._done.is_set():
                self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is self._thread:
            return  # from a future's callback: the loop cannot wait for itself
        self._done.wait()
        self._thread.join(_TEARDOWN_S)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def score_groups(self, groups: Iterable[Sequence[Item]], *, lane: Lane = "train") -> list[list[Score]]:
        """The scores of all groups in the order in which they came, each group post-processed when it was complete.

        A group holds ``(task, what)``: ``what`` is a response, the messages of a conversation, or a `Trajectory`.

        Raises:
            UserError: the service is plainly down, the user made a mistake, or the agent was closed.
        """
        groups = list(groups)

        async def scored() -> list[list[Score]]:
            results = {index: scores async for index, scores in self._agent.score_groups(groups, lane=lane)}
            return [results[index] for index in range(len(groups))]

        if threading.current_thread() is self._thread:
            raise RuntimeError("score_groups would wait for itself: no reward and no callback may call it")
        future = self._start(scored)
        try:
            return future.result()
        except BaseException:  # a Ctrl-C, say: nobody waits any more
            future.cancel()
            raise

    def submit(self, task: Task, what: What, *, lane: Lane = "train") -> Future[Score]:
        """Ask for one score and go on. The future has it, or `UserError`; cancelling it gives the request up.

        ``what`` is as in `score_groups`. A single score is not post-processed. In a coroutine:
        ``await asyncio.wrap_future(agent.submit(task, what))``.
        """
        return self._start(lambda: self._agent.lane(lane).score(task, what))

    def metrics(self) -> Metrics:
        """What happened since the last call: docs/howto/rewards.md lists the names."""
        if threading.current_thread() is not self._thread:
            if not self._closed:
                return self._start(self._drained).result()
            self._done.wait()
        return self._agent.metrics()

    # --- the loop and its thread ------------------------------------------------------------------
    def _serve(self, main: Callable[[], Coroutine[Any, Any, None]], opened: Future[Any]) -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if opened.done():
                self._failure = error
            else:
                opened.set_exception(error)

    def _start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        if os.getpid() != self._process:
            raise UserError("the reward agent was opened before this process was forked: open one in each process")
        with self._lock:
            if self._closed:
                raise UserError(_CLOSED)
            future: Future[T] = Future()
            self._loop.call_soon_threadsafe(self._begin, work, future)
            return future

    def _begin(self, work: Callable[[], Coroutine[Any, Any, T]], future: Future[T]) -> None:
        """On the loop: do the work for the future's sake."""
        task = self._loop.create_task(self._told(work, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def left(future: Future[T]) -> None:
            if future.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

        future.add_done_callback(left)

    async def _told(self, work: Callable[[], Coroutine[Any, Any, T]], future: Future[T]) -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = await work()
        except asyncio.CancelledError:  # either the loop ends or, in vain here, the future was cancelled
            error = UserError(_CLOSED)
        except Exception as failure:
            error = failure
        if not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    async def _drained(self) -> Metrics:
        return self._agent.metrics()


def _stop_what_opened(opened: Future[tuple[RewardAgent, asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    if opened.exception() is None:
        _, loop, stop = opened.result()
        loop.call_soon_threadsafe(stop.set)


_open: weakref.WeakSet[BlockingRewardAgent] = weakref.WeakSet()


def _close_all() -> None:
    for agent in list(_open):
        try:
            agent.close()
        except Exception as error:
            log.warning("closing a reward agent at exit: %s", error)


# before the executors that agents close with are shut down, which is before `atexit`; private, hence the way out
getattr(threading, "_register_atexit", atexit.register)(_close_all)
