"""Metrics of one step: rewards, lengths and ages of its groups, and the learner's metrics.

The learner receives the groups of a step in one or more chunks (see `GroupQueue.chunks`), and returns metrics for each
chunk. They are combined to metrics of the step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from gleanrl.protocols import Metrics
from gleanrl.types import SUCCESS, Group, StopReason

GROUPS, TOKENS = "schedule/staleness/", "schedule/token_staleness/"
"""Prefixes of the metrics that form the two histograms of staleness. An age in steps follows the prefix."""
_NAMES = ("greedy", "mean", "std", "success", "valid")  # of metrics reward/NAME that are not parts of scores
_SUMS = ("tokens/", "time/", "samples/", "updates/", "groups/")


class StepMetrics:
    """Combines the learner's metrics of all chunks of a step.

    The name of a metric decides how its values are combined. Names that begin with ``tokens/``, ``time/``,
    ``samples/``, ``updates/`` or ``groups/`` are summed. Names that end with ``/max`` or ``/min`` keep the largest or
    the smallest value. All others are averaged, weighted by the number of groups in each chunk.

    ``success_threshold`` is the minimum score of a solved task.
    """

    def __init__(self, success_threshold: float = SUCCESS) -> None:
        self._success_threshold = success_threshold
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._extremes: dict[str, float] = {}

    def add(self, metrics: Metrics, weight: float) -> None:
        for name, value in metrics.items():
            if name.endswith(("/max", "/min")):
                choose = max if name.endswith("max") else min
                self._extremes[name] = choose(value, self._extremes.get(name, value))
            elif name.startswith(_SUMS):
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._weights[name] = 1.0
            else:
                self._sums[name] = self._sums.get(name, 0.0) + weight * value
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def result(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the combined metrics of the learner, and the `group_metrics` of the groups that the step consumed."""
        combined = {name: total / self._weights[name] for name, total in self._sums.items() if self._weights[name]}
        return {**group_metrics(groups, self._success_threshold), **combined, **self._extremes}


def group_metrics(groups: Sequence[Group], success_threshold: float = SUCCESS) -> dict[str, float]:
    """Return metrics about the rewards, lengths and stop reasons of a batch.

    They are computed from the fresh members, and not from replayed ones. Only ``reward/greedy`` is the mean score of
    the greedy episodes. A trajectory counts as solved if its score is at least ``success_threshold``. Of groups that
    begin with turns of an earlier episode (`GroupSpec.start`) only tokens are counted.
    """
    fresh = [t for group in groups for t in group.fresh]
    valid = [t for t in fresh if t.score.valid]
    out = {
        "reward/valid": len(valid) / max(len(fresh), 1),
        "groups/consumed": float(len(groups)),
        "tokens/sampled": float(sum(t.sampled_tokens for t in fresh)),
        "tokens/context": float(sum(t.total_tokens - t.sampled_tokens for t in fresh)),
    }
    groups = [group for group in groups if not group.spec.start]
    fresh = [t for group in groups for t in group.fresh]
    valid = [t for t in fresh if t.score.valid]
    values = [[t.score.value for t in group.valid_fresh] for group in groups]
    out["groups/zero_variance"] = float(sum(len(set(v)) < 2 for v in values))
    solved = [[value >= success_threshold for value in v] for v in values]
    out["groups/none_solved"] = float(sum(not any(s) for s in solved))
    out["groups/all_solved"] = float(sum(all(s) for s in solved))
    greedy = [group.greedy.score.value for group in groups if group.greedy is not None and group.greedy.score.valid]
    if greedy:
        out["reward/greedy"] = float(np.mean(greedy))
    if not valid:
        return out
    rewards = np.array([t.score.value for t in valid])
    turns = [t.info.get("turns", 0) for t in valid]
    out |= {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/success": float(np.mean(rewards >= success_threshold)),
        "episode/cut_turns": sum(t.info.get("cut_turns", 0) for t in valid) / max(sum(turns), 1),
        "episode/turns": float(np.mean(turns)),
        "episode/tokens": float(np.mean([t.total_tokens for t in valid])),
    }
    for reason in StopReason:
        out[f"stop/{reason}"] = float(np.mean([t.stop == reason for t in fresh]))
    for part in sorted({name for t in valid for name in t.score.parts}):
        values = [t.score.parts[part] for t in valid if math.isfinite(t.score.parts.get(part, math.nan))]
        if values:
            # A part may have the name of one of the metrics above, such as "success".
            out[f"reward/part/{part}" if part in _NAMES else f"reward/{part}"] = float(np.mean(values))
    by_turn: dict[int, list[float]] = {}
    for trajectory in valid:
        for number, turn in enumerate(trajectory.sampled_turns(), 1):
            if turn.reward is not None:
                by_turn.setdefault(number, []).append(turn.reward)
    for number, earned in sorted(by_turn.items()):
        out[f"turn_reward/{number:02}"] = float(np.mean(earned))
    return out


class StalenessLog:
    """Records the age of the groups that one step consumes, and how long the step waited for them.

    The age of a group or a token is the number of the consuming step minus the version of the weights that sampled it.
    """

    def __init__(self) -> None:
        self.wait_s = 0.0
        self._chunks = 0
        self._groups: Counter[int] = Counter()  # groups with sampled tokens, by the age of the oldest version
        self._tokens: Counter[int] = Counter()  # sampled tokens of valid fresh members, by age

    def add(self, groups: Iterable[Group], step: int) -> None:
        """Count a chunk of groups that ``step`` has consumed."""
        self._chunks += 1
        for group in groups:
            if group.version >= 0:
                self._groups[step - group.version] += 1
            for trajectory in group.valid_fresh:
                for turn in trajectory.sampled_turns():
                    self._tokens[step - turn.version] += turn.tokens.size

    def metrics(self) -> dict[str, float]:
        """Return the mean and maximum age of groups, mean age of sampled tokens, seconds waited and number of chunks.

        Two histograms are included: ``schedule/staleness/K`` (groups) and ``schedule/token_staleness/K`` (sampled
        tokens), for each age ``K`` that occurred.
        """
        groups, tokens = self._groups, self._tokens
        return {
            "schedule/staleness_mean": sum(age * n for age, n in groups.items()) / max(groups.total(), 1),
            "schedule/staleness_max": float(max(groups, default=0)),
            "schedule/staleness_tokens": sum(age * n for age, n in tokens.items()) / max(tokens.total(), 1),
            "schedule/wait_s": self.wait_s,
            "schedule/chunks": float(self._chunks),
            **{f"{GROUPS}{age}": float(groups[age]) for age in sorted(groups)},
            **{f"{TOKENS}{age}": float(tokens[age]) for age in sorted(tokens)},
        }
