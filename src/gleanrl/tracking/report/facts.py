"""Summarises a run in a few numbers: the improvement, its confidence interval, and the time it took.

The page and the terminal show the same facts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gleanrl.runtime.run_folder import Row

LATE = 3
"""Number of last evaluations whose mean stands for the end of a run, because a single one is noisy."""

MEASURES = {
    "eval/sampled/pass@1": "success, sampled",
    "eval/greedy/success": "success, greedy",
}
KINDS = re.compile(r"eval/kind/(.*)/(pass@1|success)")
"""The same measures for each kind of task, if there are several."""
RETURN = "eval/return"
"""The measure of an embodied run, which has no success rate."""
BASELINES = "eval/baseline/"


def facts(rows: Sequence[Row], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``headline`` (before, after, change), ``evaluation`` (table rows), ``baselines`` and totals of a run.

    A key is None or empty while the run lacks its metrics.
    """
    evaluation = [line for name in _measures(rows) if (line := _before_and_after(rows, name))]
    last = rows[-1].step if rows else 0
    return {
        "steps": last,
        "planned_steps": config.get("run", {}).get("steps"),
        "environment": config.get("environment", {}).get("name") or config.get("environment", {}).get("id"),
        "model": config.get("model", {}).get("init"),
        "schedule": config.get("schedule", {}).get("preset"),
        "seed": config.get("run", {}).get("seed"),
        "headline": evaluation[0] if evaluation else None,
        "evaluation": evaluation,
        "returns": _before_and_after(rows, RETURN),
        "baselines": _baselines(rows),
        "seconds": _total(rows, "time/step_s"),
        "step_seconds": _median(rows, "time/step_s"),
        "environment_steps": _last(rows, "environment/steps"),
        "tokens_sampled": _total(rows, "tokens/sampled"),
        "tokens_trained": _total(rows, "tokens/trained"),
        "sampler_rate": _median(rows, "sampler/tokens_per_s"),
        "learner_rate": _median(rows, "learner/tokens_per_s"),
        "reward": _ends(rows, "reward/mean"),
        "train_success": _ends(rows, "reward/success"),
    }


def _measures(rows: Sequence[Row]) -> list[str]:
    """Return the success measures of the held-out tasks: pass@1 and greedy, then other pass@k, then those by kind."""
    found = {name for row in rows for name in row.metrics}
    more = [n for n in found if n.startswith("eval/sampled/pass@") and n not in MEASURES and n.split("@")[1].isdigit()]
    kinds = sorted(n for n in found if KINDS.fullmatch(n))
    return [n for n in MEASURES if n in found] + sorted(more, key=lambda n: int(n.split("@")[1])) + kinds


def _label(name: str) -> str:
    if of_kind := KINDS.fullmatch(name):
        return f"{of_kind[1]}, {'sampled' if of_kind[2] == 'pass@1' else 'greedy'}"
    return MEASURES.get(name, name.rpartition("/")[2])


def _before_and_after(rows: Sequence[Row], name: str) -> dict[str, Any] | None:
    points = [row for row in rows if name in row.metrics]
    if not points:
        return None
    late = points[-LATE:] if len(points) > LATE else points[-1:]
    mean = sum(row.metrics[name] for row in late) / len(late)
    first, last = points[0], points[-1]
    return {
        "name": name,
        "label": _label(name),
        "before": _point(first, name),
        "after": _point(last, name) if last is not first else None,
        "late_mean": mean if len(late) > 1 else None,
        "late_steps": [row.step for row in late],
        "change": last.metrics[name] - first.metrics[name] if last is not first else None,
    }


def _point(row: Row, name: str) -> dict[str, float | None]:
    bounds = {end: row.metrics.get(f"{name}_{end}") for end in ("low", "high")}
    return {"step": row.step, "value": row.metrics[name], **bounds}


def _baselines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the reference policies on the held-out tasks, weakest first, with the newest value of each."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name, value in row.metrics.items():
            label = name.removeprefix(BASELINES)
            if label != name and not label.endswith(("_low", "_high")):
                bounds = {end: row.metrics.get(f"{name}_{end}") for end in ("low", "high")}
                found[label] = {"label": label.replace("_", " "), "value": value, **bounds}
    return sorted(found.values(), key=lambda baseline: baseline["value"])


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row.metrics[name] for row in rows if name in row.metrics]


def _total(rows: Sequence[Row], name: str) -> float | None:
    values = _values(rows, name)
    return sum(values) if values else None


def _median(rows: Sequence[Row], name: str) -> float | None:
    values = sorted(_values(rows, name))
    return values[len(values) // 2] if values else None


def _last(rows: Sequence[Row], name: str) -> float | None:
    values = _values(rows, name)
    return values[-1] if values else None


def _ends(rows: Sequence[Row], name: str) -> list[float] | None:
    values = _values(rows, name)
    return [values[0], values[-1]] if values else None
