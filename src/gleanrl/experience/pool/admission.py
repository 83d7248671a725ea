"""The rules of admission and eviction, as pure functions: what may enter the pool, and what leaves a full task."""

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
"""Why a trajectory can never be trained on, by the cause that its eviction is counted under."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model takes; None = not known."""

    vocabulary: int | None = None  # token ids must be below this
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


def find_defect(trajectory: Trajectory, limits: Limits) -> str | None:
    """Why it can never be trained on again, a key of `DEFECTS`, or None."""
    turns = list(trajectory.turns())
    logprobs = [turn.logprobs for turn in turns if turn.logprobs is not None]
    if not any(each.size for each in logprobs):
        return "nothing_sampled"
    tokens = np.concatenate([turn.tokens for turn in turns])
    if tokens.min() < 0 or (limits.vocabulary is not None and tokens.max() >= limits.vocabulary):
        return "vocabulary"
    for segment in trajectory.segments:
        first = end = None  # where its first sampled turn begins and its last one ends, in tokens
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
    """Why a trajectory is not admitted, as its refusal is counted: "altered", "unfit", or None where it is.

    Altered: its log-probs are not those of the policy on the very prompt that training would use. That holds under
    guidance that training strips (``info["guided"]`` says anything but keep), under truncated or otherwise altered
    sampling (``info["altered_sampling"]``), and under greedy decoding.
    """
    stripped = trajectory.info.get("guided") not in (None, False, "keep")
    if stripped or trajectory.info.get("altered_sampling") or not temperature > 0:
        return "altered"
    return "unfit" if find_defect(trajectory, limits) else None


def surplus(candidates: Sequence[Candidate], settings: ReplaySettings) -> list[Candidate]:
    """The candidates that a full task evicts: the order of ``select`` reversed, the older of equals first.

    ``random`` keeps those with the smallest digests: digests are uniform, so what stays is a uniform sample of all
    distinct trajectories that the task ever had (bottom-k sampling), and it needs no random state.
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
