"""The job: sampling and learning as two tasks, with channels between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from gleanrl.embodied.actor import ActorWorker
from gleanrl.embodied.channel import Channel, Closed, LocalChannel
from gleanrl.embodied.rollout import Rollout, RolloutWorker, Weights

A = TypeVar("A")
R = TypeVar("R")


@dataclass
class Training:
    """Trajectory k is sampled by the policy of step k - lag, exactly, so timing has no say in what a run does.

    With lag 0 the two strictly alternate; with more, trajectories are sampled while the learner is at work.

    Args:
        sampled: told of each rollout as soon as it is there.
        step: told the steps done, the step's metrics, and when learning began and ended.
        boundary: called between two steps and before the first, in a thread; saves and evaluates.
        channel: makes a channel of a capacity.
    """

    worker: RolloutWorker
    actor: ActorWorker
    steps: int
    lag: int
    sampled: Callable[[Rollout], None]
    step: Callable[[int, dict[str, float], tuple[float, float]], None]
    boundary: Callable[[int], None]
    channel: Callable[[int], Channel[Any]] = LocalChannel
    trajectories: Channel[Rollout] = field(init=False)
    policies: Channel[Weights] = field(init=False)
    interrupted: bool = field(default=False, init=False)
    _work: list[asyncio.Future[Any]] = field(default_factory=list, init=False)

    def interrupt(self) -> None:
        """End at the next boundary."""
        self.interrupted = True

    async def run(self) -> None:
        """Train up to ``steps``, or until `interrupt`. Raises what either side raised."""
        self.trajectories, self.policies = self.channel(self.lag + 1), self.channel(self.lag + 1)
        first, *later = self.actor.published
        self.worker.load(first)
        for weights in later:
            await self.policies.put(weights)
        sampling = asyncio.create_task(self._sample(self.actor.step))
        try:
            await self._in_thread(self.boundary, self.actor.step)
            while self.actor.step < self.steps and not self.interrupted:
                await self._learn()
        finally:
            self.trajectories.close()
            self.policies.close()
            await asyncio.wait([sampling, *self._work])  # what they use is closed next

    async def _learn(self) -> None:
        rollout = await self.trajectories.get()
        started = perf_counter()
        metrics = await self._in_thread(self.actor.learn, rollout)
        await self.policies.put(self.actor.published[-1])
        self.step(self.actor.step, metrics, (started, perf_counter()))
        await self._in_thread(self.boundary, self.actor.step)

    async def _in_thread(self, function: Callable[[A], R], argument: A) -> R:
        """Cancelled or not, `run` ends after it."""
        self._work = [asyncio.ensure_future(asyncio.to_thread(function, argument))]
        return await asyncio.shield(self._work[0])

    async def _sample(self, first: int) -> None:
        """Sampling, from trajectory ``first`` on; an error is raised to who waits for trajectories."""
        try:
            for number in range(first, self.steps):
                while self.worker.version < number - self.lag:
                    self.worker.load(await self.policies.get())
                rollout = await asyncio.to_thread(self.worker.collect, number)
                self.sampled(rollout)
                await self.trajectories.put(rollout)
        except Closed:
            pass
        except Exception as error:
            self.trajectories.close(error)
