"""Notices when a run's success has collapsed, and names what changed with it.

A step that moves the policy too far can destroy in a few steps what a run has learned, and the run seldom recovers.
`CollapseWatch` compares the last steps with the best ones of the run. A run can then go back to its last good
checkpoint (``checkpoint.return_on_collapse``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from gleanrl.protocols import Metrics

WINDOW = 10
"""Number of steps over which metrics are averaged."""
FALL = 0.5
"""Success has collapsed if it is at most this share of the run's best, and the difference is not chance."""
GOOD = 0.8
"""A checkpoint is good if success, from it to the next call of `CollapseWatch.saved`, was at least this share of the
run's best."""
DEVIATIONS = 4.0
"""Standard errors that a fall must exceed. All attempts at one task count as one observation in it."""
CHANGED = 2.0
"""Factor by which a metric must have changed to be named."""

_SUCCESS, _GROUPS = "reward/success", "groups/consumed"
_NAMED = {
    "loss/entropy": "entropy in nats",
    "loss/ratio/p99": "99th percentile of the ratio",
    "episode/tokens": "tokens of an episode",
    "episode/cut_turns": "share of turns cut off",
}


@dataclass
class CollapseWatch:
    """Follows the metrics of a run's steps. All attributes are part of the run's checkpoints."""

    recent: list[dict[str, float]] = field(default_factory=list)
    """The watched metrics of the last steps, at most `WINDOW`."""
    best: dict[str, float] = field(default_factory=dict)
    """Mean metrics of the `WINDOW` steps with the highest success."""
    good: int | None = None
    """Step of the newest checkpoint that is known to be good; None if there is none."""
    newest: int | None = None
    """Step of the newest checkpoint, of which this is not known yet; None if there is none since the last return."""
    noticed: int = 0
    """Number of collapses so far."""
    fallen: bool = False
    """Whether a collapse was noticed from which the run has neither recovered nor gone back."""
    returns: int = 0
    """Number of times that the run has gone back to a good checkpoint."""

    @property
    def kept_steps(self) -> list[int]:
        """Steps of the checkpoints to which the run may go back, so that they are not deleted."""
        return [step for step in (self.good, self.newest) if step is not None]

    def observe(self, metrics: Metrics) -> str | None:
        """Note the metrics of a step. If success has collapsed, return a text that says so.

        A collapse is reported once, until success is again as high as at a good checkpoint or `returned` was called. A
        step without a valid score is ignored.
        """
        if _SUCCESS not in metrics:
            return None
        names = (_SUCCESS, _GROUPS, *_NAMED)
        self.recent = [*self.recent, {name: metrics[name] for name in names if name in metrics}][-WINDOW:]
        now = self._means()
        if now is None:
            return None
        if not self.best or now[_SUCCESS] >= self.best[_SUCCESS]:
            self.best = now
            return None
        high, low = self.best[_SUCCESS], now[_SUCCESS]
        self.fallen = self.fallen and low < GOOD * high
        middle, count = (high + low) / 2, WINDOW * now.get(_GROUPS, 1.0)
        error = math.sqrt(2 * middle * (1 - middle) / max(count, 1.0))
        if self.fallen or low > FALL * high or high - low < DEVIATIONS * error:
            return None
        changes = [
            f"{label} {self.best[name]:.3g} -> {now[name]:.3g}"
            for name, label in _NAMED.items()
            if name in now and name in self.best and _changed(self.best[name], now[name])
        ]
        text = f"success has fallen from {high:.2f} to {low:.2f} (means of {WINDOW} steps); "
        text += f"with it changed: {', '.join(changes)}" if changes else "no other watched metric has changed with it"
        self.noticed, self.fallen = self.noticed + 1, True
        return text

    def returned(self) -> None:
        """Note that the run has gone back to the good checkpoint. The steps until now no longer count.

        The newest checkpoint was saved before the return, so the steps from now on do not say whether it is good.
        """
        self.returns, self.fallen, self.recent, self.newest = self.returns + 1, False, [], None

    def saved(self, step: int) -> None:
        """Note that a checkpoint of ``step``, the number of finished steps, is about to be saved.

        The steps since the checkpoint before it, at most the last `WINDOW`, say whether that one is good. In the first
        steps, which have no best mean yet, they are compared with the mean of all steps.
        """
        since = [] if self.newest is None else self.recent[self.newest - step :]
        if since and not self.fallen:
            success = fmean(row[_SUCCESS] for row in since)
            best = self.best[_SUCCESS] if self.best else fmean(row[_SUCCESS] for row in self.recent)
            if success > 0 and success >= GOOD * best:
                self.good = self.newest
        self.newest = step

    def _means(self) -> dict[str, float] | None:
        """Return the means over the window, of the metrics that all its steps have; None until it is full."""
        if len(self.recent) < WINDOW:
            return None
        shared = set.intersection(*(set(row) for row in self.recent))
        return {name: fmean(row[name] for row in self.recent) for name in shared}

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


def _changed(before: float, now: float) -> bool:
    """Return whether a metric has changed at least by the factor `CHANGED`; a difference below 0.05 never counts."""
    small, large = sorted((before, now))
    return large - small >= 0.05 and large >= CHANGED * small
