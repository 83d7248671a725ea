"""Metrics of one step: the age of the groups that it consumes, and how long it waited for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gleanrl.types import Group

GROUPS, TOKENS = "schedule/staleness/", "schedule/token_staleness/"
"""Prefixes of the histograms' names; the age follows."""


class StepLog:
    """Account of one step. Ages are in steps: the consuming step minus the version that sampled."""

    def __init__(self) -> None:
        self.wait = 0.0  # seconds
        self._chunks = 0
        self._groups: Counter[int] = Counter()  # by age of the oldest version; groups with sampled tokens only
        self._tokens: Counter[int] = Counter()  # sampled tokens by age

    def add(self, groups: Iterable[Group], step: int) -> None:
        """Count a chunk that was consumed in ``step``."""
        self._chunks += 1
        for group in groups:
            if group.version >= 0:
                self._groups[step - group.version] += 1
            for trajectory in group.valid_fresh:
                for turn in trajectory.sampled_turns():
                    self._tokens[step - turn.version] += turn.tokens.size

    def metrics(self) -> dict[str, float]:
        """Mean and maximum age of groups, mean age of sampled tokens, seconds waited, chunks taken.

        Also the histograms ``schedule/staleness/K`` (groups) and ``schedule/token_staleness/K`` (sampled tokens) for
        each age ``K`` that occurred.
        """
        return {
            "schedule/staleness_mean": _mean(self._groups),
            "schedule/staleness_max": float(max(self._groups, default=0)),
            "schedule/staleness_tokens": _mean(self._tokens),
            "schedule/wait_s": self.wait,
            "schedule/chunks": float(self._chunks),
            **{f"{GROUPS}{age}": float(self._groups[age]) for age in sorted(self._groups)},
            **{f"{TOKENS}{age}": float(self._tokens[age]) for age in sorted(self._tokens)},
        }


def _mean(counts: Counter[int]) -> float:
    return sum(age * count for age, count in counts.items()) / max(counts.total(), 1)
