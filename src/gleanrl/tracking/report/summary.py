"""Prints the key figures of a run on the terminal: its improvement with confidence intervals, and its cost."""

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
    """Print the results of the first and the last evaluation, the baselines, and the run's times and tokens.

    ``run`` may be the path of the run folder. ``console`` is where to print; None = standard output.

    Raises:
        UserError: there is no such run, or its config.toml cannot be read.
    """
    folder = RunFolder.existing(run.path if isinstance(run, RunFolder) else run)
    found = facts(folder.read_metrics(), folder.read_config())
    planned = f" of {found['planned_steps']}" if found["planned_steps"] else ""
    lines: list[Any] = [Text(f"{folder.name}: {found['steps']}{planned} steps", style="bold")]
    if found["evaluation"]:
        lines.append(_make_table(found))
    elif returns := found["returns"]:
        last = returns["after"] or returns["before"]
        before = f"{returns['before']['value']:.1f} -> " if returns["after"] else ""
        interval = f" [{last['low']:.1f}, {last['high']:.1f}]" if last["low"] is not None else ""
        lines.append(Text(f"evaluation return {before}{last['value']:.1f}{interval}"))
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
    out = console or rich.console.Console(highlight=False)
    out.print(Group(*lines))


def _make_table(found: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("held-out tasks")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for line in found["evaluation"]:
        change = f"{100 * line['change']:+.1f} points" if line["change"] is not None else ""
        table.add_row(Text(line["label"]), _with_interval(line["before"]), _with_interval(line["after"]), change)
        if (late := line["late_mean"]) is not None:
            change = f"{100 * (late - line['before']['value']):+.1f} points"
            table.add_row(f"  mean of last {len(line['late_steps'])}", "", f"{100 * late:.1f} %", change)
    for baseline in found["baselines"]:
        table.add_row(Text(f"{baseline['label']} (baseline)"), "", _with_interval(baseline), "", style="dim")
    return table


def _with_interval(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return ""
    text = f"{100 * point['value']:.1f} %"
    if point["low"] is None or point["high"] is None:
        return text
    return f"{text} [{100 * point['low']:.1f}, {100 * point['high']:.1f}]"
