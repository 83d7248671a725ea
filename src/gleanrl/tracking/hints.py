"""Advice about metrics that show a common problem of a run. The console prints it once, and reports show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gleanrl.protocols import Metrics

MANY = 0.75
"""Minimum share of groups without variance for which there is advice."""
ENOUGH = 8
"""Minimum number of groups for which there is advice."""


def equal_scores(counts: Metrics) -> str | None:
    """Return advice if most groups have members with equal scores and no advantage, and None otherwise.

    ``counts`` are the metrics ``groups/...`` of one step, or their sums over several steps. Groups of equal scores can
    have an advantage, for example if the parts of the scores are compared (``credit.per_part``).
    """
    consumed, equal = counts.get("groups/consumed", 0.0), counts.get("groups/zero_variance", 0.0)
    equal = min(equal, counts.get("groups/without_advantage", equal))
    if consumed < ENOUGH or equal < MANY * consumed:
        return None
    text = f"{equal:.0f} of {consumed:.0f} groups have fresh members with equal scores and thus no advantage: "
    if counts.get("groups/all_solved", 0.0) > counts.get("groups/none_solved", 0.0):
        return text + 'most tasks are always solved; use harder tasks or tasks.order = "solve_rate"'
    return text + (
        "most tasks are never solved; use easier tasks, a warm start, a larger schedule.group or a reward that "
        "gives partial credit"
    )


def collapses(series: Mapping[str, Sequence[float]]) -> str | None:
    """Return a text that says how often success has collapsed (`gleanrl.schedule.collapse`); None if it has not.

    ``series`` are the values of each metric in the order of steps.
    """
    noticed = series.get("collapse/noticed")
    if not noticed:
        return None
    returns = series["collapse/returns"][-1]
    back = f"the weights went back to an earlier checkpoint {_times(returns)}" if returns else "the run went on"
    return f"success collapsed {_times(noticed[-1])}, and {back}; run.log says when, and what changed with it"


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count:.0f} times"
