"""Prints a run's summary on the terminal: its improvement with intervals, and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich.console
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gleanrl.runtime.run_folder import RunFolder
from gleanrl.tracking.monitors.console import duration
from gleanrl.tracking.report.facts import facts


def show(run: RunFolder | Path | str, console: rich.console.Console | None = None) -> None:
    """Print the evaluation before and after with intervals, the baselines, times and tokens.

    Raises:
        UserError: there is no run, or its config.toml is broken.
    """
    folder = RunFolder.existing(run.path if isinstance(run, RunFolder) else run)
    found = facts(folder.read_metrics(), folder.read_config())
    out = console or rich.console.Console(highlight=False)
    if found["evaluation"]:
        parts = [_evaluation(found)]
    else:
        parts = [Text(_return(found["returns"]))] if found["returns"] else [Text("no evaluation yet", style="dim")]
    out.print(Group(Text(_title(folder, found), style="bold"), *parts, *map(Text, _costs(found))))


def _title(folder: RunFolder, found: Mapping[str, Any]) -> str:
    planned = f" of {found['planned_steps']}" if found["planned_steps"] else ""
    return f"{folder.name}: {found['steps']}{planned} steps"


def _return(line: Mapping[str, Any]) -> str:
    last = line["after"] or line["before"]
    before = f"{line['before']['value']:.1f} -> " if line["after"] else ""
    interval = f" [{last['low']:.1f}, {last['high']:.1f}]" if last["low"] is not None else ""
    return f"evaluation return {before}{last['value']:.1f}{interval}"


def _evaluation(found: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("held-out tasks")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for line in found["evaluation"]:
        change = f"{100 * line['change']:+.1f} points" if line["change"] is not None else ""
        table.add_row(line["label"], _with_interval(line["before"]), _with_interval(line["after"]), change)
        if line["late_mean"] is not None:
            late = line["late_mean"] - line["before"]["value"]
            table.add_row(
                f"  mean of last {len(line['late_steps'])}",
                "",
                _percent(line["late_mean"]),
                f"{100 * late:+.1f} points",
            )
    for baseline in found["baselines"]:
        table.add_row(f"{baseline['label']} (baseline)", "", _with_interval(baseline), "", style="dim")
    return table


def _costs(found: Mapping[str, Any]) -> list[str]:
    lines = []
    if found["seconds"] is not None:
        lines.append(f"time in steps {duration(found['seconds'])}, median step {duration(found['step_seconds'])}")
    rates = {"sampled": ("tokens_sampled", "sampler_rate"), "trained": ("tokens_trained", "learner_rate")}
    for what, (total, rate) in rates.items():
        if found[total] is not None:
            speed = f" at {found[rate]:,.0f}/s" if found[rate] is not None else ""
            lines.append(f"tokens {what}: {found[total]:,.0f}{speed}")
    return lines


def _with_interval(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return ""
    if point["low"] is None or point["high"] is None:
        return _percent(point["value"])
    return f"{_percent(point['value'])} [{100 * point['low']:.1f}, {100 * point['high']:.1f}]"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
