"""The training loop of an embodied run, in which one task samples trajectories and another learns from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from gleanrl.embodied.actor import ActorWorker
from gleanrl.embodied.rollout import Rollout, RolloutWorker, Weights

A = TypeVar("A")
R = TypeVar("R")


@dataclass
class Training:
    """Alternates or overlaps sampling and learning until the run has made ``steps`` steps.

    Trajectory k is sampled with the weights published after step k - lag (for k < lag with the initial ones), however
    long sampling and learning take. So timing does not affect the results of a run. With lag 0, sampling and learning
    alternate. With a larger lag, the worker samples while the learner is working.

    Args:
        worker: samples trajectories.
        actor: learns from them.
        steps: total number of steps of the run, including those before it was resumed.
        lag: number of steps by which the sampling policy may be older than the learner's, as described above.
        sampled: called with each rollout as soon as it is complete.
        step: called after each step with the number of steps done, the step's metrics, and the times at which learning
            began and ended, in seconds of `time.perf_counter`.
        boundary: called in a thread with the number of steps done, before the first step and after each one. It saves
            checkpoints and evaluates.
    """

    worker: RolloutWorker
    actor: ActorWorker
    steps: int
    lag: int
    sampled: Callable[[Rollout], None]
    step: Callable[[int, dict[str, float], tuple[float, float]], None]
    boundary: Callable[[int], None]
    interrupted: bool = field(default=False, init=False)
    learning: bool = field(default=False, init=False)  # whether a step is under way; stays True if learning fails
    _thread_work: list[asyncio.Future[Any]] = field(default_factory=list, init=False)

    def interrupt(self) -> None:
        """Stop training before the next step."""
        self.interrupted = True

    async def run(self) -> None:
        """Train until ``steps`` steps are done or `interrupt` has been called. Raises any error of the worker or the
        actor.
        """
        # Neither queue needs a limit, because sampling is never more than lag + 1 trajectories ahead of learning.
        trajectories: asyncio.Queue[Rollout | Exception] = asyncio.Queue()
        policies: asyncio.Queue[Weights | None] = asyncio.Queue()  # None: stop sampling
        first, *later = self.actor.published
        self.worker.load(first)
        for weights in later:
            policies.put_nowait(weights)
        stopping = asyncio.Event()
        sampling = asyncio.create_task(self._sample(trajectories, policies, stopping))
        try:
            await self._in_thread(self.boundary, self.actor.step)
            while self.actor.step < self.steps and not self.interrupted:
                rollout = await trajectories.get()
                if isinstance(rollout, Exception):
                    raise rollout
                started = perf_counter()
                self.learning = True
                metrics = await self._in_thread(self.actor.learn, rollout)
                self.learning = False
                policies.put_nowait(self.actor.published[-1])
                self.step(self.actor.step, metrics, (started, perf_counter()))
                await self._in_thread(self.boundary, self.actor.step)
        finally:
            stopping.set()
            policies.put_nowait(None)
            # The caller closes the environments and buffers when this method has returned, so no thread may use them.
            await asyncio.wait([sampling, *self._thread_work])

    async def _sample(
        self,
        trajectories: asyncio.Queue[Rollout | Exception],
        policies: asyncio.Queue[Weights | None],
        stopping: asyncio.Event,
    ) -> None:
        """Sample the remaining trajectories and put them into the queue ``trajectories``.

        If that raises an error, the error is put into the queue, and `run` raises it.
        """
        try:
            for number in range(self.actor.step, self.steps):
                while self.worker.version < number - self.lag:
                    weights = await policies.get()
                    if weights is None:
                        return
                    self.worker.load(weights)
                if stopping.is_set():
                    return
                rollout = await asyncio.to_thread(self.worker.collect, number)
                self.sampled(rollout)
                trajectories.put_nowait(rollout)
        except Exception as error:
            trajectories.put_nowait(error)

    async def _in_thread(self, function: Callable[[A], R], argument: A) -> R:
        """Call ``function`` in a thread and return its result.

        If the caller is cancelled before that, the function continues, and `run` does not end until it has returned.
        """
        self._thread_work = [asyncio.ensure_future(asyncio.to_thread(function, argument))]
        return await asyncio.shield(self._thread_work[0])
