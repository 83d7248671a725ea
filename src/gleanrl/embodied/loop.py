"""The job: sampling and learning as two tasks, with channels between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from gleanrl.embodied.actor import ActorWorker
from gleanrl.embodied.channel import Channel, Closed, LocalChannel
from gleanrl.embodied.rollout import Rollout, RolloutWorker, Weights


@dataclass
class Training:
    """Trajectory k is sampled by the policy of step k - lag, exactly, so timing has no say in what a run does.

    With lag 0 the two strictly alternate; with more, trajectories are sampled while the learner is at work.

    Args:
        sampled: told of each rollout as soon as it is there.
        step: told the steps done, the step's metrics, and when learning began and ended.
        boundary: called between two steps and before the first, in a thread; saves and evaluates.
    """

    worker: RolloutWorker
    actor: ActorWorker
    steps: int
    lag: int
    sampled: Callable[[Rollout], None]
    step: Callable[[int, dict[str, float], tuple[float, float]], None]
    boundary: Callable[[int], None]
    trajectories: Channel[Rollout] = field(init=False)
    policies: Channel[Weights] = field(init=False)
    interrupted: bool = field(default=False, init=False)

    def interrupt(self) -> None:
        """End at the next boundary."""
        self.interrupted = True

    async def run(self) -> None:
        """Train up to ``steps``, or until `interrupt`. Raises what either side raised."""
        self.trajectories, self.policies = LocalChannel(self.lag + 1), LocalChannel(self.lag + 1)
        first, *later = self.actor.published
        self.worker.load(first)
        for weights in later:
            await self.policies.put(weights)
        sampling = asyncio.create_task(self._sample(self.actor.step))
        try:
            await asyncio.to_thread(self.boundary, self.actor.step)
            while self.actor.step < self.steps and not self.interrupted:
                await self._learn()
        finally:
            self.trajectories.close()
            self.policies.close()
            await sampling

    async def _learn(self) -> None:
        rollout = await self.trajectories.get()
        started = perf_counter()
        metrics = await asyncio.to_thread(self.actor.learn, rollout)
        await self.policies.put(self.actor.published[-1])
        self.step(self.actor.step, metrics, (started, perf_counter()))
        await asyncio.to_thread(self.boundary, self.actor.step)

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
