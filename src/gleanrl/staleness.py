"""How old the experience is that a step learns from, and how long the step waited for it."""

from __future__ import annotations

from collections.abc import Iterable

from gleanrl.types import Group


class StepLog:
    """Account of one step. Ages are in steps: the consuming step minus the version that sampled."""

    def __init__(self) -> None:
        self.wait = 0.0  # seconds
        self._chunks = 0
        self._ages: list[int] = []  # of groups with anything sampled, by their oldest version
        self._tokens = 0
        self._token_age = 0

    def add(self, groups: Iterable[Group], step: int) -> None:
        """A chunk was consumed in ``step``."""
        self._chunks += 1
        for group in groups:
            if group.version >= 0:
                self._ages.append(step - group.version)
            for trajectory in group.valid_fresh:
                for turn in trajectory.sampled_turns():
                    self._tokens += turn.tokens.size
                    self._token_age += turn.tokens.size * (step - turn.version)

    def metrics(self) -> dict[str, float]:
        """Mean and maximum age of groups, mean age of sampled tokens, seconds waited, chunks taken."""
        return {
            "schedule/staleness_mean": sum(self._ages) / max(len(self._ages), 1),
            "schedule/staleness_max": float(max(self._ages, default=0)),
            "schedule/staleness_tokens": self._token_age / max(self._tokens, 1),
            "schedule/wait_s": self.wait,
            "schedule/chunks": float(self._chunks),
        }
