"""Evaluates in the background of training, with a sampler and weights of its own, while training leaves the device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from gleanrl.config.settings import EvaluationSettings
from gleanrl.protocols import Metrics, Reward, Sampler
from gleanrl.rollout.player import Player
from gleanrl.runtime.evaluation import Evaluation, evaluate
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.schedule.device_lock import DeviceLock
from gleanrl.schedule.timeline import Timeline
from gleanrl.types import Task
from gleanrl.utils.progress import Progress


@dataclass
class BackgroundEvaluator:
    """Evaluates snapshots one after another; ``report`` receives the metrics of each, with its step."""

    player: Player  # training's player; its sampler is not used
    sampler: Sampler
    reward: Reward
    tasks: Sequence[Task]
    settings: EvaluationSettings
    seed: int
    weights: Callable[[], Any]
    report: Callable[[int, Metrics, Evaluation], None]
    progress: Progress
    done: frozenset[int] = frozenset()  # steps that are not evaluated again
    _running: asyncio.Task[None] | None = field(default=None, repr=False)

    async def start(self, step: int) -> None:
        """Take a snapshot of the current weights as step ``step``'s and evaluate it in the background."""
        if step in self.done:
            return
        await self.finish()  # one at a time: at most one snapshot in memory
        await self.sampler.publish(await asyncio.to_thread(self.weights), step)
        self._running = asyncio.create_task(self._evaluate(step))

    async def finish(self) -> None:
        """Wait for the running evaluation, if any."""
        running, self._running = self._running, None
        if running is not None:
            await running

    async def cancel(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def _evaluate(self, step: int) -> None:
        player = replace(self.player, sampler=self.sampler)
        episodes = len(self.tasks) * (self.settings.samples + self.settings.greedy)
        with self.progress.stage(f"evaluating step {step}", episodes) as stage:
            metrics, sampled = await evaluate(
                player,
                self.reward,
                self.tasks,
                seed=self.seed,
                samples=self.settings.samples,
                greedy=self.settings.greedy,
                done=stage.advance,
            )
        self.report(step, metrics, sampled)


@dataclass(frozen=True)
class EvaluationWork:
    """Makes the evaluation's sampler hold the device, and appear in the timeline, as "evaluate" instead of "sample"."""

    device: DeviceLock
    timeline: Timeline

    def device_lock(self, _work: Any) -> AbstractAsyncContextManager[Any]:
        return self.device("evaluate")

    def record(self, kind: str, start: float, end: float, **tags: Any) -> None:
        self.timeline.record("evaluate", start, end, what=kind, **tags)


def evaluated_steps(folder: RunFolder) -> frozenset[int]:
    """Return the steps that the run has evaluated already."""
    rows = folder.read_metrics()
    return frozenset(row.step for row in rows if any(name.startswith("eval/sampled") for name in row.metrics))
