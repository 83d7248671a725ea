"""Evaluates a policy on held-out tasks and reports pass@k and the mean score with 95 % confidence intervals.

`evaluate` plays the episodes: several per task at the sampling temperature, and optionally one per task at temperature
0 (greedy). `BackgroundEvaluator` calls it while training continues. `measure_baselines` measures the success rates of
the environment's expert and of a random policy, for comparison.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np

from gleanrl.config.settings import EvaluationSettings
from gleanrl.protocols import Metrics, Reward, Sampler, Taskset
from gleanrl.rollout.player import Player
from gleanrl.schedule.device_lock import TakeDevice
from gleanrl.schedule.timeline import SpanRecorder
from gleanrl.train import score_trajectory
from gleanrl.types import SUCCESS, Message, Score, Task, Trajectory
from gleanrl.utils.errors import NoExpert
from gleanrl.utils.progress import Progress
from gleanrl.utils.seeding import derive

BASELINES = {"expert": 0.0, "random": 1.0}
"""Name of a baseline -> probability that a random valid action replaces the expert's next action."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The attempts of an evaluation."""

    tasks: Sequence[Task]
    """The tasks that were played."""
    sampled: Sequence[Sequence[Trajectory]]
    """``sampled[task][attempt]``: the sampled attempts, as many for each task."""
    greedy: Sequence[Trajectory] = ()
    """``greedy[task]``: the attempts at temperature 0; empty if there are none."""
    success_threshold: float = SUCCESS
    """Score from which an attempt is solved."""

    def metrics(self) -> dict[str, float]:
        """Return pass@k, the mean score and their 95 % intervals, for all tasks and, if there are several, by kind.

        Attempts whose scoring failed are left out; ``eval/sampled/valid`` is the share of the others, and
        ``eval/failed`` of ``eval/attempts`` is their number. A metric is missing if no task has enough valid attempts
        for it.
        """
        out = self._describe("eval/sampled", self.sampled)
        made = self.attempts()
        out["eval/attempts"] = float(len(made))
        out["eval/failed"] = float(sum(t.score.applicable and not t.score.valid for t in made))
        greedy = [[trajectory] for trajectory in self.greedy]
        if greedy:
            for name, value in self._describe("eval/greedy", greedy).items():
                out[name.replace("pass@1", "success")] = value
        kinds = dict.fromkeys(task.kind or "other" for task in self.tasks)
        for kind in kinds if len(kinds) > 1 else ():
            prefix, own = f"eval/kind/{kind}", [(task.kind or "other") == kind for task in self.tasks]
            found = self._describe("", list(compress(self.sampled, own)))
            best = self._describe("", list(compress(greedy, own))) if greedy else {}
            for end in ("", "_low", "_high"):
                for name, source, measure in (
                    ("pass@1", found, "pass@1"), ("success", best, "pass@1"), ("score", found, "score"),
                ):  # fmt: skip
                    if (value := source.get(f"/{measure}{end}")) is not None:
                        out[f"{prefix}/{name}{end}"] = value
        return out

    def attempts(self) -> list[Trajectory]:
        """Return all attempts: the sampled ones, then the greedy ones."""
        return [*(trajectory for row in self.sampled for trajectory in row), *self.greedy]

    def _describe(self, prefix: str, attempts: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Return the metrics of ``attempts[task][attempt]``, under names that begin with ``prefix``."""
        valid = [[t for t in row if t.score.valid] for row in attempts]
        solved = [sum(t.score.reaches(self.success_threshold) for t in row) for row in valid]
        made = len(attempts[0])
        out = {f"{prefix}/valid": sum(map(len, valid)) / (made * len(attempts))}
        for k in sorted({2**i for i in range(made.bit_length())} | {made}):
            rates = [pass_at_k(len(row), count, k) for row, count in zip(valid, solved, strict=True) if len(row) >= k]
            if rates:
                out |= with_interval(f"{prefix}/pass@{k}", mean_interval(rates))
        if any(valid):
            means = [sum(t.score.value for t in row) / len(row) for row in valid if row]
            out |= with_interval(f"{prefix}/score", score_interval(means))
            out[f"{prefix}/turns"] = float(np.mean([t.info.get("turns", 0) for row in valid for t in row]))
        return out


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of pass@k for one task (Chen et al., 2021, arXiv:2107.03374).

    This is the probability that ``k`` attempts, drawn without replacement from the ``attempts`` that were made, include
    at least one of the ``successes``. ``k`` must be at most ``attempts``.
    """
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def with_interval(name: str, interval: tuple[float, float, float]) -> dict[str, float]:
    """Return a mean and the finite bounds of its interval as the metrics ``name``, ``name_low`` and ``name_high``."""
    named = zip((name, f"{name}_low", f"{name}_high"), interval, strict=True)
    return {key: value for key, value in named if math.isfinite(value)}


def score_interval(scores: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the tasks' scores and the lower and upper bound of its 95 % confidence interval.

    The interval assumes that tasks are independent and that their number is large: it is 1.96 standard errors wide on
    each side. It is infinite if all tasks have the same score, because then nothing is known about its width.
    """
    x = np.asarray(scores, float)
    mean = float(x.mean())
    deviation = float(x.std(ddof=1)) if np.ptp(x) > 0 else math.inf
    half = 1.96 * deviation / math.sqrt(x.size)
    return mean, mean - half, mean + half


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


@dataclass(frozen=True)
class EvaluationResult:
    """What a job's ``run_evaluation`` returns."""

    metrics: Metrics
    """The metrics, those of the baselines included."""
    attempts: Evaluation | None = None
    """The attempts; None for a job that trains no language model."""
    tokenizer: Any = None
    """The model's tokenizer, of transformers; None for a job that trains no language model."""


async def evaluate(
    player: Player,
    reward: Reward,
    tasks: Sequence[Task],
    *,
    seed: int,
    samples: int,
    greedy: bool,
    success_threshold: float = SUCCESS,
    done: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Play every task ``samples`` times at the player's temperature and, if ``greedy``, once more at temperature 0.

    All episodes are started at once. ``done`` is called after each episode.
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

    sampled = [attempt(task, index, None) for task in tasks for index in range(samples)]
    best = [attempt(task, 0, 0.0) for task in tasks] if greedy else []
    attempts = [asyncio.ensure_future(each) for each in (*sampled, *best)]
    try:
        played = await asyncio.gather(*attempts)
    except BaseException:
        for each in attempts:
            each.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)  # none plays on when the caller closes the parts
        raise
    rows = [played[i * samples : (i + 1) * samples] for i in range(len(tasks))]
    return Evaluation(tasks, rows, played[len(sampled) :], success_threshold)


@dataclass
class BackgroundEvaluator:
    """Evaluates snapshots of the policy in the background, one at a time, while training continues.

    ``weights`` returns the learner's weights at the time of the call. ``report`` is called with the step and the
    evaluation.
    """

    player: Player  # the player that training uses; evaluation replaces its sampler by `sampler`
    sampler: Sampler  # may be training's sampler, which gets no new weights then until an evaluation has ended
    reward: Reward
    tasks: Sequence[Task]
    settings: EvaluationSettings
    success_threshold: float
    seed: int
    weights: Callable[[], Any]
    report: Callable[[int, Evaluation], None]
    progress: Progress
    at_once: int = 1  # number of episodes that the sampler can play at the same time
    done: Collection[int] = ()  # steps for which `start` does nothing, because they were evaluated before a resume
    _running: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def shares_sampler(self) -> bool:
        return self.sampler is self.player.sampler

    async def start(self, step: int, on_error: Callable[[BaseException], None]) -> None:
        """Start an evaluation of the current weights, which are those of ``step``.

        They are copied to the evaluation's sampler. Training's sampler has them already.

        First waits for the previous evaluation. Returns without waiting for the new one. If the new one fails,
        ``on_error`` is called with the error.
        """
        if step in self.done:
            return
        await self.finish()  # the sampler can hold only one snapshot, and the previous evaluation still samples from it
        if not self.shares_sampler:
            await self.sampler.publish(await asyncio.to_thread(self.weights), step)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                error = task.exception()
            elif task.cancelling():  # the run has cancelled the evaluation
                error = None
            else:
                error = RuntimeError(f"the evaluation of step {step} was cancelled by the code that it calls")
            if error is not None:
                on_error(error)

        self._running = asyncio.create_task(self._evaluate(step))
        self._running.add_done_callback(ended)

    async def finish(self) -> None:
        """Wait until the running evaluation, if there is one, has been reported or has failed."""
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None

    async def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()
        await self.finish()

    async def _evaluate(self, step: int) -> None:
        player = replace(self.player, sampler=self.sampler)
        episodes = len(self.tasks) * (self.settings.samples + self.settings.greedy)
        with self.progress.stage(f"evaluating step {step}", episodes, at_once=self.at_once) as stage:
            evaluation = await evaluate(
                player,
                self.reward,
                self.tasks,
                seed=self.seed,
                samples=self.settings.samples,
                greedy=self.settings.greedy,
                success_threshold=self.success_threshold,
                done=stage.advance,
            )
        self.report(step, evaluation)
        if not self.shares_sampler:
            await self.sampler.rest()


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
    taskset: Taskset,
    tasks: Sequence[Task],
    *,
    max_turns: int,
    seed: int,
    progress: Progress,
    success_threshold: float = SUCCESS,
) -> dict[str, float]:
    """Return the success rates of the expert and of a random policy on ``tasks``, each with its 95 % interval.

    The keys are ``eval/baseline/expert`` and ``eval/baseline/random``, with the suffixes ``_low`` and ``_high`` for the
    interval. An episode counts as solved if its score is at least ``success_threshold`` and it needs at most
    ``max_turns`` actions. The result is empty if the environment has no expert for one of the tasks, or has agents. The
    random policy is left out if it always takes the same actions as the expert, which happens if each task has only one
    valid action.
    """
    if not taskset.has_expert or taskset.agents:  # a demonstration is not what an agent does with its expert's answers
        return {}
    out: dict[str, float] = {}
    played: dict[str, list[tuple[Message, ...]]] = {}
    with progress.stage("baselines", len(BASELINES) * len(tasks)) as stage:
        for name, noise in BASELINES.items():
            rates = []
            for task in tasks:
                try:
                    conversation, given = taskset.demonstrate(task, seed=derive(seed, "baseline", task.id), noise=noise)
                except NoExpert:
                    # A rate over the remaining tasks would not be comparable with the policy's rate over all tasks.
                    return {}
                played.setdefault(name, []).append(conversation)
                actions = sum(message["role"] == "assistant" for message in conversation)
                rates.append(float(Score.of(given).reaches(success_threshold) and actions <= max_turns))
                stage.advance()
            if name == "expert" or played[name] != played["expert"]:
                out |= with_interval(f"eval/baseline/{name}", mean_interval(rates))
    return out
