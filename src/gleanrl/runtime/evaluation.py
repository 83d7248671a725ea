"""Evaluates a policy, greedy and sampled, on held-out tasks: pass@k with confidence intervals, and the baselines.

`evaluate` plays the episodes. `BackgroundEvaluator` calls it while training continues.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gleanrl.config.settings import EvaluationSettings
from gleanrl.protocols import Metrics, Reward, Sampler, Taskset
from gleanrl.rollout.player import Player
from gleanrl.schedule.device_lock import TakeDevice
from gleanrl.schedule.timeline import SpanRecorder
from gleanrl.train import score_trajectory
from gleanrl.types import Message, Task, Trajectory
from gleanrl.utils.errors import NoExpert
from gleanrl.utils.progress import Progress
from gleanrl.utils.seeding import derive

BASELINES = {"expert": 0.0, "random": 1.0}
"""Share of a baseline's actions that are random valid actions instead of the expert's."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Attempts on tasks: ``outcomes`` bool[tasks, attempts] and ``valid`` bool[tasks, attempts].

    An attempt without a valid score could not be measured and is left out of the metrics.
    """

    trajectories: tuple[tuple[Trajectory, ...], ...]

    @property
    def valid(self) -> np.ndarray:
        return np.array([[t.score.valid for t in row] for row in self.trajectories])

    @property
    def outcomes(self) -> np.ndarray:
        return np.array([[t.score.solved for t in row] for row in self.trajectories])

    def metrics(self, prefix: str) -> dict[str, float]:
        outcomes, valid = self.outcomes, self.valid
        out: dict[str, float] = {f"{prefix}/valid": float(valid.mean())}
        attempts = outcomes.shape[1]
        pairs = [(int(v.sum()), int((o & v).sum())) for o, v in zip(outcomes, valid, strict=True)]
        ks = {2**i for i in range(attempts.bit_length()) if 2**i <= attempts} | {attempts}
        for k in sorted(ks):
            rates = [pass_at_k(n, c, k) for n, c in pairs if n >= k]
            if rates:
                mean, low, high = mean_interval(rates)
                out |= {f"{prefix}/pass@{k}": mean, f"{prefix}/pass@{k}_low": low, f"{prefix}/pass@{k}_high": high}
        flat = [t for row in self.trajectories for t in row if t.score.valid]
        out[f"{prefix}/turns"] = float(np.mean([t.info.get("turns", 0) for t in flat])) if flat else math.nan
        return {name: value for name, value in out.items() if math.isfinite(value)}


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Return the chance that k attempts drawn from these include a success (unbiased; Chen et al., 2021)."""
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def mean_interval(rates: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean over tasks and its 95 % interval, which takes tasks to be independent.

    This is Wilson's interval on the mean with an effective number of trials. It stays inside [0, 1], and its width is
    above 0 even if all tasks have the same rate.
    """
    x = np.asarray(rates, float)
    n, mean = x.size, float(x.mean())
    spread = float(x.var(ddof=1)) if n > 1 else mean * (1 - mean)
    effective = n if spread <= 0 or mean in (0.0, 1.0) else max(n * mean * (1 - mean) / spread, 1.0)
    z2 = 1.96**2 / effective
    centre = (mean + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (mean * (1 - mean) + z2 / 4)) / (1 + z2)
    return mean, max(0.0, centre - half), min(1.0, centre + half)


async def evaluate(
    player: Player,
    reward: Reward,
    tasks: Sequence[Task],
    *,
    seed: int,
    samples: int,
    greedy: bool,
    done: Callable[[], None] = lambda: None,
) -> tuple[Metrics, Evaluation]:
    """Play every task ``samples`` times at the player's temperature and, if ``greedy``, once at 0.

    ``done`` is called after each episode. Returns the metrics and the sampled attempts.
    """

    async def attempt(task: Task, index: int, temperature: float | None) -> Trajectory:
        name = "greedy" if temperature == 0 else str(index)
        trajectory = await player.play(
            task,
            trajectory_id=f"eval.{task.id}.{name}",
            seed=derive(seed, "eval", task.id, index),
            temperature=temperature,
        )
        trajectory = await score_trajectory(reward, task, trajectory)
        done()
        return trajectory

    async def rows(count: int, temperature: float | None) -> Evaluation:
        jobs: list[Awaitable[Trajectory]] = [attempt(t, i, temperature) for t in tasks for i in range(count)]
        flat = await asyncio.gather(*jobs)
        return Evaluation(tuple(tuple(flat[i * count : (i + 1) * count]) for i in range(len(tasks))))

    if not greedy:
        sampled = await rows(samples, None)
        return {**sampled.metrics("eval/sampled"), **by_kind(tasks, sampled, "pass@1")}, sampled
    sampled, best = await asyncio.gather(rows(samples, None), rows(1, 0.0))
    greedy_metrics = {name.replace("pass@1", "success"): v for name, v in best.metrics("eval/greedy").items()}
    kinds = by_kind(tasks, sampled, "pass@1") | by_kind(tasks, best, "success")
    return {**sampled.metrics("eval/sampled"), **greedy_metrics, **kinds}, sampled


def by_kind(tasks: Sequence[Task], evaluation: Evaluation, name: str) -> dict[str, float]:
    """Return one attempt's success with its interval as ``eval/kind/KIND/name``; empty if there is only one kind."""
    kinds = dict.fromkeys(task.kind for task in tasks)
    if len(kinds) < 2:
        return {}
    out: dict[str, float] = {}
    for kind in kinds:
        own = tuple(row for task, row in zip(tasks, evaluation.trajectories, strict=True) if task.kind == kind)
        found = Evaluation(own).metrics("")
        for end in ("", "_low", "_high"):
            if (value := found.get(f"/pass@1{end}")) is not None:
                out[f"eval/kind/{kind or 'other'}/{name}{end}"] = value
    return out


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
    done: Collection[int] = ()  # steps that are not evaluated again
    _running: asyncio.Task[None] | None = field(default=None, repr=False)

    async def start(self, step: int) -> None:
        """Take a snapshot of the weights of step ``step``, and start to evaluate it in the background."""
        if step in self.done:
            return
        await self.finish()  # so that at most one snapshot is in memory
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

    device: TakeDevice
    timeline: SpanRecorder

    def device_lock(self, _work: Any) -> AbstractAsyncContextManager[Any]:
        return self.device("evaluate")

    def record(self, kind: str, start: float, end: float, **tags: Any) -> None:
        self.timeline.record("evaluate", start, end, what=kind, **tags)


def measure_baselines(
    taskset: Taskset, tasks: Sequence[Task], *, max_turns: int, seed: int, progress: Progress
) -> dict[str, float]:
    """Return each baseline's success rate within ``max_turns`` actions as ``eval/baseline/NAME``, with its interval.

    The result is empty if the environment has no expert. The random policy is left out if noise changes no
    demonstration (tasks with a single answer).
    """
    if not taskset.has_expert:
        return {}
    out: dict[str, float] = {}
    played: dict[str, list[tuple[Message, ...]]] = {}
    with progress.stage("baselines", len(BASELINES) * len(tasks)) as stage:
        for name, noise in BASELINES.items():
            rates = []
            for task in tasks:
                try:
                    conversation, score = taskset.demonstrate(task, seed=derive(seed, "baseline", task.id), noise=noise)
                except NoExpert:  # a rate over the other tasks only would not be comparable
                    return {}
                played.setdefault(name, []).append(conversation)
                actions = sum(message["role"] == "assistant" for message in conversation)
                rates.append(float(score.solved and actions <= max_turns))
                stage.advance()
            if name == "expert" or played[name] != played["expert"]:
                mean, low, high = mean_interval(rates)
                key = f"eval/baseline/{name}"
                out |= {key: mean, f"{key}_low": low, f"{key}_high": high}
    return out
