"""A reward agent for synchronous code, such as TRL, verl or a script. Its event loop runs in a separate thread."""

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
"""Seconds that `BlockingRewardAgent.close` waits for tasks that a reward has left running on the event loop."""


class BlockingRewardAgent:
    """A `RewardAgent` with blocking methods, which several threads may call at the same time.

    The agent is open from its construction until `close` is called, its ``with`` block ends or the interpreter exits.
    Requests that are unfinished at that time are cancelled, and their callers get `UserError`.

    Args:
        reward: the reward or its name. This argument and the others are those of `gleanrl.rewards.RewardAgent`.
        settings: settings of the agent.
        journal: path of the journal.
        overrides: single settings, by name.

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
        self._lock = threading.Lock()  # held while a coroutine is submitted, so that none is submitted after `close`
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
        except BaseException:
            # After Ctrl-C the thread may still open the agent. No caller could close it, so it is stopped once it is
            # open. If opening has failed, the callback does nothing.
            opened.add_done_callback(_stop_when_opened)
            raise
        _open_agents.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel unfinished requests and release all resources. May be called more than once.

        If releasing a resource fails, for example in the reward's own ``close`` method, that error is raised. If tasks
        that the reward has left running do not end within `_TEARDOWN_S` seconds, a warning is logged.
        """
        if os.getpid() != self._process:
            return  # in a forked child process the agent's thread does not run, so there is nothing to close
        with self._lock:
            self._closed = True
            if not self._agent_closed.is_set():
                self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is self._thread:
            return  # a future's callback has called this method in the agent's thread, which cannot wait for itself
        self._agent_closed.wait()
        self._thread.join(_TEARDOWN_S)
        if self._thread.is_alive():
            log.warning("a task that the reward has left running does not end; its thread goes on in the background")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def score_groups(self, groups: Iterable[Sequence[Item]], *, lane: LaneName = "train") -> list[list[Score]]:
        """Wait until all groups are scored and post-processed. Returns their scores in the order of ``groups``.

        A group is a sequence of pairs of a task and an answer. The answer is a response, the messages of a
        conversation, or a `Trajectory`.

        Raises:
            UserError: the service is down, the configuration is wrong, or the agent was closed.
            RuntimeError: a reward or a future's callback called this method in the agent's own thread.
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
        """Request one score, without post-processing, and return its future at once.

        ``answer`` is a response, the messages of a conversation, or a `Trajectory`. If the future is cancelled, the
        request is cancelled too. The future raises `UserError` in the cases in which `score_groups` does. In a
        coroutine, write ``await asyncio.wrap_future(agent.submit(task, answer))``.
        """
        return self._start(lambda: self._agent.lane(lane).score(task, answer))

    def metrics(self) -> Metrics:
        """Return the metrics of the time since the last call. docs/howto/rewards.md lists their names."""

        async def drain() -> Metrics:
            return self._agent.metrics()

        if threading.current_thread() is not self._thread:
            if not self._closed:
                return self._start(drain).result()
            self._agent_closed.wait()
        return self._agent.metrics()

    def _start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start the coroutine that ``work`` returns on the agent's event loop, and return its future.

        Raises `UserError` if the agent is closed, or was opened by the parent of this process.
        """
        if os.getpid() != self._process:
            raise UserError("the reward agent was opened before this process was forked: open one in each process")

        async def run() -> T:
            try:
                return await work()
            except asyncio.CancelledError:
                if self._closed and not future.cancelled():  # cancelled because the event loop ends, not by the caller
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


# Agents must be closed before the executors that they use are shut down. `concurrent.futures` shuts its executors down
# before the callbacks of `atexit` run. A callback of `threading._register_atexit` runs before the executors shut down.
# This function is private to CPython, so other interpreters use `atexit`.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
