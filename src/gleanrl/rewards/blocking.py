"""The reward agent for synchronous code, such as TRL, verl or a script. Its event loop runs in a separate thread."""

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
from typing import Any, Self, TypeVar

from gleanrl.config.settings import RewardSettings
from gleanrl.protocols import Metrics
from gleanrl.rewards.agent import LaneName, RewardAgent
from gleanrl.rewards.request import Answer, Item
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError

T = TypeVar("T")
log = logging.getLogger(__name__)

_CLOSED = "the reward agent was closed"
_TEARDOWN_S = 5.0
"""How long `BlockingRewardAgent.close` waits for tasks that a reward left on the loop."""


class BlockingRewardAgent:
    """A `RewardAgent` that any thread may call, many at once.

    It is open from its construction until `close`, the end of its ``with`` block or the end of the interpreter.
    Unfinished requests are then cancelled, and their callers get `UserError`.

    Args:
        reward, settings, journal, overrides: see `gleanrl.rewards.RewardAgent`.

    Raises:
        UserError: there is no such reward, or a setting is invalid.
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
        self._lock = threading.Lock()  # prevents submitting to the loop after it was asked to stop
        self._closed, self._agent_closed = False, threading.Event()
        self._failure: BaseException | None = None
        opened: Future[tuple[RewardAgent, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def serve() -> None:
            try:
                async with RewardAgent(reward, settings, journal=journal, **overrides) as agent:
                    stop = asyncio.Event()
                    opened.set_result((agent, asyncio.get_running_loop(), stop))
                    await stop.wait()
            finally:
                with self._lock:
                    self._closed = True
                    self._agent_closed.set()

        def run() -> None:
            try:
                asyncio.run(serve())
            except BaseException as error:
                if opened.done():
                    self._failure = error
                else:
                    opened.set_exception(error)

        self._thread = threading.Thread(target=run, name="gleanrl-rewards", daemon=True)
        self._thread.start()
        try:
            self._agent, self._loop, self._stop = opened.result()
        except BaseException:  # Ctrl-C while the agent opens
            opened.add_done_callback(_stop_when_opened)
            raise
        _open_agents.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel unfinished requests and release all resources; closing twice is harmless.

        Raises:
            UserError: the journal could not be closed.
        """
        if os.getpid() != self._process:
            return  # a forked process does not own the agent
        with self._lock:
            self._closed = True
            if not self._agent_closed.is_set():
                self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is self._thread:
            return  # called from a future's callback: the loop cannot wait for itself
        self._agent_closed.wait()
        self._thread.join(_TEARDOWN_S)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def score_groups(self, groups: Iterable[Sequence[Item]], *, lane: LaneName = "train") -> list[list[Score]]:
        """Return the scores of all groups, in the order of ``groups``. Each complete group is post-processed.

        A group holds pairs of a task and an answer: a response, the messages of a conversation, or a `Trajectory`.

        Raises:
            UserError: the service is down, the configuration is wrong, or the agent was closed.
        """
        groups = list(groups)

        async def score() -> list[list[Score]]:
            results = {index: scores async for index, scores in self._agent.score_groups(groups, lane=lane)}
            return [results[index] for index in range(len(groups))]

        if threading.current_thread() is self._thread:
            raise RuntimeError("score_groups would wait for itself: no reward and no callback may call it")
        future = self._start(score)
        try:
            return future.result()
        except BaseException:  # Ctrl-C
            future.cancel()
            raise

    def submit(self, task: Task, answer: Answer, *, lane: LaneName = "train") -> Future[Score]:
        """Request one score and return its future at once. Cancelling the future cancels the request.

        The future may raise `UserError`. ``answer`` is as in `score_groups`. A single score is not post-processed. In a
        coroutine, write ``await asyncio.wrap_future(agent.submit(task, answer))``.
        """
        return self._start(lambda: self._agent.lane(lane).score(task, answer))

    def metrics(self) -> Metrics:
        """Return the metrics since the last call; docs/howto/rewards.md lists the names."""

        async def drain() -> Metrics:
            return self._agent.metrics()

        if threading.current_thread() is not self._thread:
            if not self._closed:
                return self._start(drain).result()
            self._agent_closed.wait()
        return self._agent.metrics()

    def _start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run ``work`` on the agent's loop."""
        if os.getpid() != self._process:
            raise UserError("the reward agent was opened before this process was forked: open one in each process")

        async def run() -> T:
            try:
                return await work()
            except asyncio.CancelledError:
                if self._closed and not future.cancelled():  # cancelled because the loop ends
                    raise UserError(_CLOSED) from None
                raise

        with self._lock:
            if self._closed:
                raise UserError(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        return future


def _stop_when_opened(opened: Future[tuple[RewardAgent, asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    if opened.exception() is None:
        _, loop, stop = opened.result()
        loop.call_soon_threadsafe(stop.set)


_open_agents: weakref.WeakSet[BlockingRewardAgent] = weakref.WeakSet()


def _close_all() -> None:
    for agent in list(_open_agents):
        try:
            agent.close()
        except Exception as error:
            log.warning("closing a reward agent at exit: %s", error)


# Agents must close before the executors that they use. Executors shut down before `atexit` runs, so that
# `threading._register_atexit` is needed. It is private to CPython; elsewhere `atexit` takes its place.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
