"""The loop of an embodied job: one task samples trajectories, and another one learns from them."""

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
    """Trains up to ``steps``.

    Trajectory k is always sampled by the policy of step k - lag, so timing has no effect on a run. With lag 0, sampling
    and learning alternate. With a larger lag, trajectories are sampled while the learner is working.

    Args:
        worker: samples trajectories.
        actor: learns from them.
        steps: number of the step at which training ends.
        lag: see above.
        sampled: called with each rollout as soon as it is complete.
        step: called with the number of steps done, the step's metrics, and the times at which learning began and ended.
        boundary: called in a thread before the first step and after each step, to save and evaluate.
    """

    worker: RolloutWorker
    actor: ActorWorker
    steps: int
    lag: int
    sampled: Callable[[Rollout], None]
    step: Callable[[int, dict[str, float], tuple[float, float]], None]
    boundary: Callable[[int], None]
    interrupted: bool = field(default=False, init=False)
    _thread_work: list[asyncio.Future[Any]] = field(default_factory=list, init=False)

    def interrupt(self) -> None:
        """Stop training before the next step."""
        self.interrupted = True

    async def run(self) -> None:
        """Train up to ``steps``, or until `interrupt`. Raises any error of the worker or the actor."""
        # neither queue needs a limit: the sampler is never more than lag + 1 trajectories ahead
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
                metrics = await self._in_thread(self.actor.learn, rollout)
                policies.put_nowait(self.actor.published[-1])
                self.step(self.actor.step, metrics, (started, perf_counter()))
                await self._in_thread(self.boundary, self.actor.step)
        finally:
            stopping.set()
            policies.put_nowait(None)
            await asyncio.wait([sampling, *self._thread_work])  # the caller closes the environments and buffers after

    async def _sample(
        self,
        trajectories: asyncio.Queue[Rollout | Exception],
        policies: asyncio.Queue[Weights | None],
        stopping: asyncio.Event,
    ) -> None:
        """Sample the trajectories that are still missing. An error goes to the learner in place of a trajectory."""
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
        """Call a function in a thread and return its result.

        If the caller is cancelled meanwhile, `run` still waits until the function has returned.
        """
        self._thread_work = [asyncio.ensure_future(asyncio.to_thread(function, argument))]
        return await asyncio.shield(self._thread_work[0])
