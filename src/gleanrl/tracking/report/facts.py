"""Computes the key figures of a run: its improvement, the confidence intervals, and the time that it took.

Both forms of the report, the page and the table on the terminal, show these figures. So does the report of an
evaluation, whose folder has the same files as a run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gleanrl.runtime.run_folder import Row
from gleanrl.tracking.hints import collapses, equal_scores
from gleanrl.types import SUCCESS

LATE = 3
"""Number of evaluations at the end of a run whose mean is also shown, because a single evaluation is noisy."""

MEASURES = {
    "eval/sampled/pass@1": "success, sampled",
    "eval/greedy/success": "success, greedy",
}
SCORES = {
    "eval/sampled/score": "mean score, sampled",
    "eval/greedy/score": "mean score, greedy",
}
"""Measures that are shown only if scores are graded. Otherwise they equal the success rates."""
KINDS = re.compile(r"eval/kind/(.*)/(pass@1|success|score)")
"""Pattern of the names of such measures for one kind of task (`Task.kind`); logged if a run has several kinds."""
OF_KIND = {"pass@1": "sampled", "success": "greedy", "score": "mean score"}
RETURN = "eval/return"
"""The metric that compares evaluations of an embodied run, in which no success rate is measured."""
BASELINES = "eval/baseline/"


def facts(rows: Sequence[Row], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key figures of a run as JSON values.

    ``evaluation`` compares the first and the last evaluation. It has an entry for each measure: pass@1 and greedy
    success; the mean scores, if scores other than 0 and 1 were given; pass@k for other k; then the measures by kind of
    task. ``headline`` is its first entry, ``score`` that of the mean score. ``hints`` are texts of advice.
    ``baselines`` are the results of the baseline policies. The other figures are settings and totals of the run. A
    figure is None or empty as long as the metrics for it have not been logged.
    """
    series: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.metrics.items():
            series[name].append(value)
    passes = [
        n for n in series if n.startswith("eval/sampled/pass@") and n not in MEASURES and n.split("@")[1].isdigit()
    ]
    passes.sort(key=lambda name: int(name.split("@")[1]))
    graded = any(
        abs(row.metrics[score] - row.metrics[success]) > 1e-9
        for score, success in zip(SCORES, MEASURES, strict=True)
        for row in rows
        if score in row.metrics and success in row.metrics
    )
    scores = [name for name in SCORES if graded and name in series]
    kinds = sorted(name for name in series if KINDS.fullmatch(name) and (graded or not name.endswith("/score")))
    measures = [*(name for name in MEASURES if name in series), *scores, *passes, *kinds]
    evaluation = [_compare(rows, name) for name in measures]
    _name_own_steps(evaluation)
    advice = equal_scores({name: sum(values) for name, values in series.items() if name.startswith("groups/")})

    def total(name: str) -> float | None:
        return sum(series[name]) if name in series else None

    def median(name: str) -> float | None:
        return sorted(series[name])[len(series[name]) // 2] if name in series else None

    def ends(name: str) -> list[float] | None:
        return [series[name][0], series[name][-1]] if name in series else None

    return {
        "steps": rows[-1].step if rows else 0,
        "planned_steps": config.get("run", {}).get("steps"),
        "environment": config.get("environment", {}).get("name") or config.get("environment", {}).get("id"),
        "model": config.get("model", {}).get("init"),
        "schedule": config.get("schedule", {}).get("preset"),
        "seed": config.get("run", {}).get("seed"),
        "headline": evaluation[0] if evaluation else None,
        "score": next((line for line in evaluation if line["name"] in SCORES), None),
        "success_threshold": config.get("reward", {}).get("success_threshold", SUCCESS),
        "hints": [text for text in (advice, collapses(series)) if text],
        "evaluation": evaluation,
        "returns": _compare(rows, RETURN) if RETURN in series else None,
        "baselines": _find_baselines(rows),
        "seconds": total("time/step_s"),
        "step_seconds": median("time/step_s"),
        "environment_steps": series["environment/steps"][-1] if "environment/steps" in series else None,
        "tokens_sampled": total("tokens/sampled"),
        "tokens_trained": total("tokens/trained"),
        "sampler_rate": median("sampler/tokens_per_s"),
        "learner_rate": median("learner/tokens_per_s"),
        "reward": ends("reward/mean"),
        "train_success": ends("reward/success"),
    }


def _name_own_steps(lines: Sequence[dict[str, Any]]) -> None:
    """Add the steps of a line to its label if they are not those of the first line, which tables have as headings."""
    for line in lines[1:]:
        own, heads = ([each[end] and each[end]["step"] for end in ("first", "last")] for each in (line, lines[0]))
        if own != heads:
            steps = " and ".join(str(step) for step in own if step is not None)
            line["label"] += f" (step {steps})"


def _compare(rows: Sequence[Row], name: str) -> dict[str, Any]:
    """Compare the first and the last evaluation that contain the measure ``name``.

    Returns both values with their intervals, their difference, and the mean of the last `LATE` evaluations. ``last``
    and ``change`` are None if there is only one evaluation. ``late_mean`` is None unless there are more than `LATE`.
    ``unit`` is "rate" for a share between 0 and 1, and "score" for a value in the reward's unit.
    """
    points = [row for row in rows if name in row.metrics]
    late = points[-LATE:] if len(points) > LATE else points[-1:]
    first, last = points[0], points[-1]
    if of_kind := KINDS.fullmatch(name):
        label = f"{of_kind[1]}, {OF_KIND[of_kind[2]]}"
    else:
        label = (MEASURES | SCORES).get(name, name.rpartition("/")[2])
    return {
        "name": name,
        "label": label,
        "unit": "score" if name == RETURN or name.endswith("/score") else "rate",
        "first": {"step": first.step, **_read_value(first, name)},
        "last": {"step": last.step, **_read_value(last, name)} if last is not first else None,
        "late_mean": sum(row.metrics[name] for row in late) / len(late) if len(late) > 1 else None,
        "late_steps": [row.step for row in late],
        "change": last.metrics[name] - first.metrics[name] if last is not first else None,
    }


def _find_baselines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the latest result of each baseline policy on the held-out tasks, lowest result first."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name in row.metrics:
            label = name.removeprefix(BASELINES)
            if label != name and not label.endswith(("_low", "_high")):
                found[label] = {"label": label.replace("_", " "), **_read_value(row, name)}
    return sorted(found.values(), key=lambda baseline: baseline["value"])


def _read_value(row: Row, name: str) -> dict[str, float | None]:
    """Return a metric and both ends of its confidence interval, which are None if no interval was logged."""
    metrics = row.metrics
    return {"value": metrics[name], "low": metrics.get(f"{name}_low"), "high": metrics.get(f"{name}_high")}
