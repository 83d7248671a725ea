"""Pure functions that decide which trajectories the pool admits, and which it evicts if a task is above capacity."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool.ranking import RANKINGS, Candidate
from gleanrl.types import Trajectory

# Log-probs up to this value are accepted, because float32 rounding in an inference engine can give values above 0.
ROUNDING = 1e-3

OWN, EARLIER = "own", "earlier"
"""Sources of trajectories that a run sampled itself: the present run of the pool's file, and runs before it.

Trajectories that were copied into the pool have other sources: by default ``seed``, ``demonstrations`` or ``import``.
"""

DEMONSTRATION = "demonstration"
"""Value of ``info["origin"]`` in the demonstrations of an expert, whatever their source is called."""

SOURCE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
"""The whole name of a source matches this."""

DEFECTS = {
    "nothing_sampled": "nothing of it was sampled",
    "vocabulary": "it holds token ids outside the vocabulary",
    "first_token_sampled": "a segment of it begins with a sampled token, which has no log-prob",
    "too_long": "it is longer than the model's context",
    "not_finite": "a log-prob of it is not finite",
    "positive_logprob": "a log-prob of it is above 0",
    "zero_logprobs": "its log-probs are all 0, so they were never recorded",
}
"""The properties that make a trajectory unusable for training: name -> description in an error message.

If a trajectory with a defect is evicted, the eviction is counted under the name.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the model that trains on the trajectories. None = not checked."""

    vocabulary: int | None = None  # token ids must be below this
    context: int | None = None  # largest number of tokens in a segment, counted up to its last sampled token


def entropy(trajectory: Trajectory) -> float:
    """Return an estimate of the policy's mean entropy at the sampled tokens, in nats; NaN if nothing was sampled.

    The estimate is minus the mean recorded log-prob of the sampled tokens. It is meaningful only if the policy sampled
    the trajectory. For other trajectories, such as demonstrations, ``info["policy_entropy"]`` may hold the mean entropy
    of the policy. If it does, that value is returned.
    """
    known = trajectory.info.get("policy_entropy")
    if isinstance(known, float) and 0 <= known < float("inf"):
        return known
    logprobs = [turn.logprobs for turn in trajectory.turns() if turn.logprobs is not None]
    sampled = np.concatenate(logprobs) if logprobs else np.empty(0, np.float32)
    return -float(sampled.mean(dtype=np.float64)) if sampled.size else float("nan")


def find_defect(trajectory: Trajectory, limits: Limits) -> str | None:
    """Return the reason why a model with these limits can never train on the trajectory, or None if it can.

    The reason is a key of `DEFECTS`.
    """
    turns = list(trajectory.turns())
    logprobs = [turn.logprobs for turn in turns if turn.logprobs is not None]
    if not any(each.size for each in logprobs):
        return "nothing_sampled"
    tokens = np.concatenate([turn.tokens for turn in turns])
    if tokens.min() < 0 or (limits.vocabulary is not None and tokens.max() >= limits.vocabulary):
        return "vocabulary"
    for segment in trajectory.segments:
        first = end = None  # positions in the segment: its first sampled token, and the end of its last sampled turn
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


def has_removed_guidance(trajectory: Trajectory) -> bool:
    """Return whether a trajectory was sampled with a guidance text that training leaves out of its prompt."""
    return trajectory.info.get("guided") not in (None, False, "keep")


def refusal(trajectory: Trajectory, temperature: float, limits: Limits) -> str | None:
    """Return why a trajectory is not admitted to the pool, "altered" or "unfit", or None if it is admitted.

    A trajectory is altered if its log-probs are not those of the policy, given the prompt that training would use.
    There are three cases: `has_removed_guidance`, the sampler altered the distribution, for example by top-p
    (``info["altered_sampling"]``), or it was decoded greedily (``temperature`` is 0). A trajectory is unfit if it has
    one of the `DEFECTS`.
    """
    if has_removed_guidance(trajectory) or trajectory.info.get("altered_sampling") or not temperature > 0:
        return "altered"
    return "unfit" if find_defect(trajectory, limits) else None


def surplus(candidates: Sequence[Candidate], settings: ReplaySettings) -> list[Candidate]:
    """Return which of a task's candidates to evict, so that ``capacity_per_task`` remain.

    Those with the smallest key ``keep`` of the ranking ``select`` are evicted (`ranking`).
    """
    excess = len(candidates) - settings.capacity_per_task
    if excess <= 0:
        return []
    return sorted(candidates, key=RANKINGS.get(settings.select).keep)[:excess]
