"""Pure functions that decide which trajectories may enter the pool, and which ones a full task evicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gleanrl.config.settings import ReplaySettings
from gleanrl.types import Trajectory

ROUNDING = 1e-3  # how far float32 rounding may raise an engine's log-prob above 0

DEFECTS = {
    "nothing_sampled": "nothing of it was sampled",
    "vocabulary": "it holds token ids outside the vocabulary",
    "first_token_sampled": "a segment of it begins with a sampled token, which has no log-prob",
    "too_long": "it is longer than the model's context",
    "not_finite": "a log-prob of it is not finite",
    "positive_logprob": "a log-prob of it is above 0",
    "zero_logprobs": "its log-probs are all 0, so they were never recorded",
}
"""Reasons why a trajectory can never be trained on. The key is the cause under which its eviction is counted."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the model; None = not known."""

    vocabulary: int | None = None  # token ids must be below this
    context: int | None = None  # maximum tokens of a segment, up to its last sampled one


@dataclass(frozen=True, slots=True)
class Candidate:
    """The properties of a trajectory, stored or new, that the capacity rule uses. ``order`` grows with time."""

    order: int
    entropy: float
    digest: bytes


def entropy(trajectory: Trajectory) -> float:
    """Return minus the mean recorded log-prob of the sampled tokens, in nats.

    This estimates the policy's mean entropy from one draw. If the trajectory was not drawn from the policy it
    estimates nothing; then ``info["policy_entropy"]`` holds the entropy, and is returned.
    """
    known = trajectory.info.get("policy_entropy")
    if isinstance(known, float) and 0 <= known < float("inf"):
        return known
    logprobs = [turn.logprobs for turn in trajectory.turns() if turn.logprobs is not None]
    sampled = np.concatenate(logprobs) if logprobs else np.empty(0, np.float32)
    return -float(sampled.mean(dtype=np.float64)) if sampled.size else float("nan")


def find_defect(trajectory: Trajectory, limits: Limits) -> str | None:
    """Return why the trajectory can never be trained on, as a key of `DEFECTS`, or None if it can."""
    turns = list(trajectory.turns())
    logprobs = [turn.logprobs for turn in turns if turn.logprobs is not None]
    if not any(each.size for each in logprobs):
        return "nothing_sampled"
    tokens = np.concatenate([turn.tokens for turn in turns])
    if tokens.min() < 0 or (limits.vocabulary is not None and tokens.max() >= limits.vocabulary):
        return "vocabulary"
    for segment in trajectory.segments:
        first = end = None  # token positions: begin of the first sampled turn, end of the last
        position = 0
        for turn in segment:
            if turn.sampled and turn.tokens.size:
                first = position if first is None else first
                end = position + turn.tokens.size
            position += turn.tokens.size
        if first == 0:
            return "first_token_sampled"
        if limits.context is not None and end is not None and end > limits.context:
            return "too_long"
    recorded = np.concatenate(logprobs)
    if not np.isfinite(recorded).all():
        return "not_finite"
    if recorded.max() > ROUNDING:
        return "positive_logprob"
    return None if recorded.any() else "zero_logprobs"


def refusal(trajectory: Trajectory, temperature: float, limits: Limits) -> str | None:
    """Return why a trajectory is not admitted, "altered" or "unfit", or None if it is admitted.

    Altered: its log-probs are not those of the policy on the prompt that training would use. This is so after guidance
    that training strips (any ``info["guided"]`` except keep), after truncated or otherwise altered sampling
    (``info["altered_sampling"]``), and after greedy decoding. Unfit: it has one of the `DEFECTS`.
    """
    stripped = trajectory.info.get("guided") not in (None, False, "keep")
    if stripped or trajectory.info.get("altered_sampling") or not temperature > 0:
        return "altered"
    return "unfit" if find_defect(trajectory, limits) else None


def surplus(candidates: Sequence[Candidate], settings: ReplaySettings) -> list[Candidate]:
    """Return the candidates that a full task evicts: the last ones in the order of ``select``, of equals the older.

    ``random`` keeps the candidates with the smallest digests. Digests are uniform, so these are a uniform sample of all
    distinct trajectories that the task ever had (bottom-k sampling), and no random state is needed.
    """
    excess = len(candidates) - settings.capacity_per_task
    if excess <= 0:
        return []
    match settings.select:
        case "lowest_entropy":
            order = sorted(candidates, key=lambda c: (-c.entropy, c.order))
        case "highest_entropy":
            order = sorted(candidates, key=lambda c: (c.entropy, c.order))
        case "random":
            order = sorted(candidates, key=lambda c: (bytes(255 - byte for byte in c.digest), c.order))
        case "newest":
            order = sorted(candidates, key=lambda c: c.order)
    return order[:excess]
