"""Prints the key figures of a run on the terminal: its improvement with confidence intervals, and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich.console
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gleanrl.runtime.failures import describe_failures
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.tracking.monitors.console import duration
from gleanrl.tracking.report.facts import facts


def show(run: RunFolder | Path | str, console: rich.console.Console | None = None) -> None:
    """Print the results of the first and the last evaluation, the baselines, and the run's times and tokens.

    ``run`` may be the path of the run folder, or of the folder of an evaluation, of which only the results are printed.
    ``console`` is where to print; None = standard output.

    Raises:
        UserError: there is no such run, or its config.toml cannot be read.
    """
    folder = RunFolder.existing(run.path if isinstance(run, RunFolder) else run)
    rows = folder.read_metrics()
    found, evaluation = facts(rows, folder.read_config()), folder.read_evaluation()
    if evaluation is not None:
        tasks = f", {len(evaluation['tasks'])} held-out tasks" if evaluation["tasks"] else ""
        lines: list[Any] = [Text(f"{evaluation['evaluated']}{tasks}", style="bold")]
    else:
        planned = f" of {found['planned_steps']}" if found["planned_steps"] else ""
        lines = [Text(f"{folder.name}: {found['steps']}{planned} steps", style="bold")]
    if found["evaluation"]:
        lines.append(_make_table(found))
        if found["score"]:
            lines.append(Text(f"success is a score of at least {found['success_threshold']:g}", style="dim"))
    elif returns := found["returns"]:
        last = returns["last"] or returns["first"]
        first = f"{returns['first']['value']:.1f} -> " if returns["last"] else ""
        interval = f" [{last['low']:.1f}, {last['high']:.1f}]" if last["low"] is not None else ""
        lines.append(Text(f"evaluation return {first}{last['value']:.1f}{interval}"))
    else:
        lines.append(Text("no evaluation yet", style="dim"))
    if found["seconds"] is not None:
        times = f"time in steps {duration(found['seconds'])}, median step {duration(found['step_seconds'])}"
        lines.append(Text(times))
    for what, of in {"sampled": "sampler", "trained": "learner"}.items():
        total, rate = found[f"tokens_{what}"], found[f"{of}_rate"]
        if total is not None:
            speed = f" at {rate:,.0f}/s" if rate is not None else ""
            lines.append(Text(f"tokens {what}: {total:,.0f}{speed}"))
    if failures := describe_failures(folder, rows):
        lines.append(Text(failures))
    lines += [Text(hint, style="dim") for hint in found["hints"]]
    out = console or rich.console.Console(highlight=False)
    out.print(Group(*lines))


def _make_table(found: Mapping[str, Any]) -> Table:
    """Return a table with a line for each measure, and columns for the first and the last evaluation.

    If there is only one evaluation, it has one column, and there is no column for the change.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("held-out tasks")
    head = found["headline"]
    table.add_column(f"step {head['first']['step']}", justify="right")
    compared = any(line["last"] for line in found["evaluation"])
    if compared:
        table.add_column(f"step {(head['last'] or head['first'])['step']}", justify="right")
        table.add_column("change", justify="right")
    for line in found["evaluation"]:
        cells = [Text(line["label"]), _with_interval(line["first"], line["unit"])]
        if compared:
            cells += [_with_interval(line["last"], line["unit"]), _change(line["change"], line["unit"])]
        table.add_row(*cells)
        if (late := line["late_mean"]) is not None:
            change = _change(late - line["first"]["value"], line["unit"])
            table.add_row(f"  mean of last {len(line['late_steps'])}", "", _value(late, line["unit"]), change)
    for baseline in found["baselines"]:
        empty = [""] if compared else []
        table.add_row(Text(f"{baseline['label']} (baseline)"), *empty, _with_interval(baseline, "rate"), style="dim")
    return table


def _value(value: float, unit: str) -> str:
    return f"{100 * value:.1f} %" if unit == "rate" else f"{value:.3g}"


def _change(change: float | None, unit: str) -> str:
    if change is None:
        return ""
    return f"{100 * change:+.1f} points" if unit == "rate" else f"{change:+.3g}"


def _with_interval(point: Mapping[str, Any] | None, unit: str) -> str:
    if point is None:
        return ""
    text, low, high = _value(point["value"], unit), point["low"], point["high"]
    if low is None or high is None:
        return text
    return f"{text} [{100 * low:.1f}, {100 * high:.1f}]" if unit == "rate" else f"{text} [{low:.3g}, {high:.3g}]"
