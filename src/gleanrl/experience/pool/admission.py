"""The rules of admission and eviction, as pure functions: what may enter the pool, and what leaves a full task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gleanrl.config.settings import ReplaySettings
from gleanrl.types import Segment, Trajectory

Rank = Callable[["Candidate"], tuple[float | bytes, int]]

ROUNDING = 1e-3  # an engine's float32 log-prob may lie so far above 0

UNFIT = {
    "nothing_sampled": "nothing of it was sampled",
    "vocabulary": "it holds token ids outside the vocabulary",
    "first_token_sampled": "a segment of it begins with a sampled token, which has no log-prob",
    "too_long": "it is longer than the model's context",
    "not_finite": "a log-prob of it is not finite",
    "positive_logprob": "a log-prob of it is above 0",
    "zero_logprobs": "its log-probs are all 0, so they were never recorded",
}
"""Why a trajectory can never be trained on, by the cause that its eviction is counted under."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model takes; None = not known."""

    vocabulary: int | None = None  # token ids are below
    context: int | None = None  # tokens of a segment, up to its last sampled one


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the capacity rule needs of a trajectory, stored or new; ``order`` grows with time."""

    order: int
    entropy: float
    digest: bytes


def entropy(trajectory: Trajectory) -> float:
    """Minus the mean recorded log-prob of its sampled tokens: one draw's estimate of their mean entropy, in nats.

    Of what was not drawn from the policy that is no estimate; there ``info["policy_entropy"]`` says it.
    """
    known = trajectory.info.get("policy_entropy")
    if isinstance(known, float) and 0 <= known < float("inf"):
        return known
    logprobs = [turn.logprobs for turn in trajectory.turns() if turn.logprobs is not None]
    sampled = np.concatenate(logprobs) if logprobs else np.empty(0, np.float32)
    return -float(sampled.mean(dtype=np.float64)) if sampled.size else float("nan")


def unfit(trajectory: Trajectory, limits: Limits) -> str | None:
    """Why it can never be trained on again, a key of `UNFIT`, or None."""
    turns = list(trajectory.turns())
    logprobs = [turn.logprobs for turn in turns if turn.logprobs is not None]
    if not any(each.size for each in logprobs):
        return "nothing_sampled"
    tokens = np.concatenate([turn.tokens for turn in turns])
    if tokens.min() < 0 or (limits.vocabulary is not None and tokens.max() >= limits.vocabulary):
        return "vocabulary"
    spans = [span for segment in trajectory.segments if (span := _trained_span(segment)) is not None]
    if any(first == 0 for first, _ in spans):
        return "first_token_sampled"
    if limits.context is not None and max(end for _, end in spans) > limits.context:
        return "too_long"
    recorded = np.concatenate(logprobs)
    if not np.isfinite(recorded).all():
        return "not_finite"
    if recorded.max() > ROUNDING:
        return "positive_logprob"
    return None if recorded.any() else "zero_logprobs"


def _trained_span(segment: Segment) -> tuple[int, int] | None:
    """Where the first sampled turn of a segment begins and the last one ends, in tokens; None without any."""
    first = end = None
    at = 0
    for turn in segment:
        if turn.sampled and turn.tokens.size:
            first = at if first is None else first
            end = at + turn.tokens.size
        at += turn.tokens.size
    return None if first is None or end is None else (first, end)


def altered(trajectory: Trajectory, temperature: float) -> bool:
    """Whether its log-probs are not those of the policy on the very prompt that training would use.

    True under guidance that training strips (``info["guided"]`` says anything but keep), truncated or otherwise altered
    sampling (``info["altered_sampling"]``), and greedy decoding.
    """
    stripped = trajectory.info.get("guided") not in (None, False, "keep")
    return stripped or bool(trajectory.info.get("altered_sampling")) or not temperature > 0


def is_admitted(rate: float, settings: ReplaySettings) -> bool:
    """Whether a fresh group with this solve rate stores its successes; both bounds are exclusive."""
    return settings.min_rate < rate < settings.max_rate


def surplus(candidates: Sequence[Candidate], settings: ReplaySettings) -> list[Candidate]:
    """The candidates that a full task evicts: the order of ``select`` reversed, the older of equals first.

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
