"""Evaluates a policy: pass@k on held-out tasks with confidence intervals, greedy and sampled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gleanrl.protocols import Metrics, Reward
from gleanrl.rollout.player import Player
from gleanrl.train import score_trajectory
from gleanrl.types import Task, Trajectory
from gleanrl.utils.seeding import derive

_ENDS = ("", "_low", "_high")  # a mean and its interval


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Attempts on tasks: ``outcomes`` bool[tasks, attempts] and ``valid`` bool[tasks, attempts].

    An attempt without a valid score is a failure of the measurement and is left out.
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
        for k in _powers_up_to(outcomes.shape[1]):
            pairs = [(int(v.sum()), int((o & v).sum())) for o, v in zip(outcomes, valid, strict=True)]
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
    """Return the mean over tasks and its 95 % interval; tasks are the independent units.

    This is Wilson's interval on the mean with an effective number of trials. It stays inside [0, 1] and does
    not collapse if all tasks agree.
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
    """Return ``eval/kind/KIND/name``: success of one attempt with its interval; empty if there is one kind only."""
    kinds = dict.fromkeys(task.kind for task in tasks)
    if len(kinds) < 2:
        return {}
    out: dict[str, float] = {}
    for kind in kinds:
        own = tuple(row for task, row in zip(tasks, evaluation.trajectories, strict=True) if task.kind == kind)
        found = Evaluation(own).metrics("")
        out |= {
            f"eval/kind/{kind or 'other'}/{name}{end}": v
            for end in _ENDS
            if (v := found.get(f"/pass@1{end}")) is not None
        }
    return out


def _powers_up_to(count: int) -> list[int]:
    """Return 1, 2, 4, ... and ``count`` itself."""
    return sorted({*(2**i for i in range(count.bit_length()) if 2**i <= count), count})
