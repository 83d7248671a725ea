"""What of a fresh group goes into the pool, and who makes room: rules, without the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gleanrl.settings import ReplaySettings
from gleanrl.types import Trajectory

Rank = Callable[["Candidate"], tuple[float | bytes, int]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """What capacity asks of a trajectory, stored or about to be; ``order`` grows with time."""

    order: int
    entropy: float
    digest: bytes


def entropy(trajectory: Trajectory) -> float:
    """Minus the mean recorded log-prob of its sampled tokens: one draw's estimate of their mean entropy, in nats."""
    logprobs = [turn.logprobs for turn in trajectory.turns() if turn.logprobs is not None]
    sampled = np.concatenate(logprobs) if logprobs else np.empty(0, np.float32)
    return -float(sampled.mean(dtype=np.float64)) if sampled.size else float("nan")


def unfit(trajectory: Trajectory, vocabulary: int | None) -> str | None:
    """Why it can never be trained on again, or None; the reason is also the cause of an eviction."""
    logprobs = [turn.logprobs for turn in trajectory.turns() if turn.logprobs is not None]
    if not any(each.size for each in logprobs):
        return "nothing_sampled"
    tokens = np.concatenate([turn.tokens for turn in trajectory.turns()])
    if tokens.min() < 0 or (vocabulary is not None and tokens.max() >= vocabulary):
        return "vocabulary"
    return None if np.isfinite(np.concatenate(logprobs)).all() else "not_finite"


def altered(trajectory: Trajectory, temperature: float) -> bool:
    """Whether its log-probs are not those of the policy on the very prompt that training would use.

    True under guidance that training strips (``info["guided"]``), truncated or otherwise altered sampling
    (``info["altered_sampling"]``), and greedy decoding.
    """
    return bool(trajectory.info.get("guided") or trajectory.info.get("altered_sampling")) or not temperature > 0


def is_admitted(rate: float, settings: ReplaySettings) -> bool:
    """Whether a fresh group with this solve rate stores its successes; both bounds are exclusive."""
    return settings.min_rate < rate < settings.max_rate


def surplus(candidates: Sequence[Candidate], settings: ReplaySettings) -> list[Candidate]:
    """Those that a full task gives up: selection's order reversed, ties to the older.

    ``random`` keeps those with the smallest digests: digests are uniform, so what stays is a uniform sample of all
    distinct trajectories that the task ever had (bottom-k sampling), and it needs no random state.
    """
    excess = len(candidates) - settings.capacity_per_task
    if excess <= 0:
        return []
    rank: dict[str, Rank] = {
        "lowest_entropy": lambda c: (-c.entropy, c.order),
        "highest_entropy": lambda c: (c.entropy, c.order),
        "random": lambda c: (bytes(255 - byte for byte in c.digest), c.order),
        "newest": lambda c: (0.0, c.order),
    }
    return sorted(candidates, key=rank[settings.select])[:excess]
