"""Evaluates a policy on held-out tasks and reports pass@k with 95 % confidence intervals.

`evaluate` plays the episodes: several per task at the sampling temperature, and optionally one per task at temperature
0 (greedy). `BackgroundEvaluator` calls it while training continues. `measure_baselines` measures the success rates of
the environment's expert and of a random policy, for comparison.
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
"""Name of a baseline -> probability that a random valid action replaces the expert's next action."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The attempts of an evaluation, as ``trajectories[task][attempt]``; each task has the same number of attempts.

    `valid` (bool [tasks, attempts]) states which attempts have a score. Attempts whose scoring failed are left out of
    the metrics. `outcomes` (bool [tasks, attempts]) states which attempts solved their task.
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
    """Return the unbiased estimate of pass@k for one task (Chen et al., 2021, arXiv:2107.03374).

    This is the probability that ``k`` attempts, drawn without replacement from the ``attempts`` that were made, include
    at least one of the ``successes``. ``k`` must be at most ``attempts``.
    """
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def mean_interval(rates: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the tasks' success rates and the lower and upper bound of its 95 % confidence interval.

    The interval assumes that tasks are independent. It is Wilson's score interval, in which the number of trials is
    replaced by the effective number of trials that follows from the variance between tasks. The interval lies inside
    [0, 1], and its width is above 0 even if all tasks have the same rate.
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
    """Play every task ``samples`` times at the player's temperature and, if ``greedy``, once more at temperature 0.

    All episodes are started at once. ``done`` is called after each episode. Returns the metrics of both kinds of
    attempts, and the sampled attempts (without the greedy ones).
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
    """Return pass@1 and its interval for each kind of task, under the keys ``eval/kind/KIND/name``, ``..._low``, etc.

    The result is empty if all tasks are of the same kind.
    """
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
    """Evaluates snapshots of the policy in the background, one at a time, while training continues.

    ``weights`` returns the learner's weights at the time of the call. ``report`` is called with the step, the metrics
    and the sampled attempts of each evaluation.
    """

    player: Player  # the player that training uses; evaluation replaces its sampler by `sampler`
    sampler: Sampler
    reward: Reward
    tasks: Sequence[Task]
    settings: EvaluationSettings
    seed: int
    weights: Callable[[], Any]
    report: Callable[[int, Metrics, Evaluation], None]
    progress: Progress
    done: Collection[int] = ()  # steps for which `start` does nothing, because they were evaluated before a resume
    _running: asyncio.Task[None] | None = field(default=None, repr=False)

    async def start(self, step: int) -> None:
        """Copy the current weights, which are those of ``step``, to the evaluation's sampler, and start an evaluation.

        First waits for the previous evaluation. Returns without waiting for the new one.
        """
        if step in self.done:
            return
        await self.finish()  # the sampler can hold only one snapshot, and the previous evaluation still samples from it
        await self.sampler.publish(await asyncio.to_thread(self.weights), step)
        self._running = asyncio.create_task(self._evaluate(step))

    async def finish(self) -> None:
        """Wait until the running evaluation, if there is one, has been reported."""
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
    """Wraps the device lock and the timeline for the evaluation's sampler.

    A sampler acquires the device and records spans under names such as "sample" and "decode". This wrapper replaces
    them by "evaluate", so that evaluation has its own priority at the `DeviceLock` and its own spans in the timeline.
    """

    device: TakeDevice
    timeline: SpanRecorder

    def device_lock(self, _work: Any) -> AbstractAsyncContextManager[Any]:
        return self.device("evaluate")

    def record(self, kind: str, start: float, end: float, **tags: Any) -> None:
        self.timeline.record("evaluate", start, end, what=kind, **tags)


def measure_baselines(
    taskset: Taskset, tasks: Sequence[Task], *, max_turns: int, seed: int, progress: Progress
) -> dict[str, float]:
    """Return the success rates of the expert and of a random policy on ``tasks``, each with its 95 % interval.

    The keys are ``eval/baseline/expert`` and ``eval/baseline/random``, with the suffixes ``_low`` and ``_high`` for the
    interval. An episode counts as solved only if it needs at most ``max_turns`` actions. The result is empty if the
    environment has no expert for one of the tasks. The random policy is left out if it always takes the same actions as
    the expert, which happens if each task has only one valid action.
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
                except NoExpert:
                    # A rate over the remaining tasks would not be comparable with the policy's rate over all tasks.
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
