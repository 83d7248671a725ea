"""Builds the report's HTML file from the data of a run, a style sheet and scripts."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import gleanrl
from gleanrl.rollout.conversation import readable_payload
from gleanrl.runtime.failures import describe_failures
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.tracking.report.comparison import differing_settings, run_names
from gleanrl.tracking.report.curves import curves
from gleanrl.tracking.report.experience import experience
from gleanrl.tracking.report.facts import facts
from gleanrl.tracking.report.gantt import windows
from gleanrl.tracking.report.rollouts import GROUPS_PER_STEP, sample_rollouts
from gleanrl.tracking.report.staleness import staleness
from gleanrl.types import Task
from gleanrl.utils import atomic

SCRIPTS = (
    "dom.js",
    "chart.js",
    "learning.js",
    "metrics.js",
    "time.js",
    "experience.js",
    "staleness.js",
    "gantt.js",
    "tasks.js",
    "rollouts.js",
    "comparison.js",
    "main.js",
)


def build(run: RunFolder | Path | str) -> Path:
    """Write ``report.html`` into the folder of a run or of an evaluation and return its path.

    The file contains its data, style and scripts, so it can be opened without a network. ``run`` may be the path of the
    folder.

    Raises:
        UserError: there is no such run, its config.toml cannot be read, or the disk is full.
    """
    folder = RunFolder.existing(run.path if isinstance(run, RunFolder) else run)
    rows, config, evaluation = folder.read_metrics(), folder.read_config(), folder.read_evaluation()
    shown = facts(rows, config)
    if failures := describe_failures(folder, rows):
        shown["hints"] = [failures, *shown["hints"]]
    groups = GROUPS_PER_STEP
    if evaluation is not None:
        groups = len(evaluation["tasks"])
        for task in evaluation["tasks"]:
            task["payload"] = readable_payload(Task(task["id"], payload=task["payload"]))
    data = {
        "name": folder.name,
        "facts": shown,
        "curves": curves(rows),
        "experience": experience(folder, rows, config),
        "staleness": staleness(rows, config),
        "config": config,
        "timeline": windows(folder.read_timeline()),
        "rollouts": sample_rollouts(folder, groups_per_step=groups),
        "evaluation": evaluation,
    }
    return _write(folder.report_path, folder.name, data)


def build_comparison(runs: Sequence[RunFolder], path: Path) -> Path:
    """Write a page that compares ``runs`` to the file ``path`` and return ``path``.

    It shows the curves of all runs in each chart, their results, and the settings that differ.

    Raises:
        UserError: a config.toml cannot be read, or the disk is full.
    """
    names = run_names(runs)
    shown = []
    for name, run in zip(names, runs, strict=True):
        rows = run.read_metrics()
        shown.append({"name": name, "facts": facts(rows, run.read_config()), "curves": curves(rows)})
    comparison = {"runs": shown, "settings": differing_settings(runs)}
    return _write(path, " and ".join(names), {"comparison": comparison})


def _write(path: Path, title: str, data: Mapping[str, Any]) -> Path:
    values = _finite({**data, "version": gleanrl.__version__})
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    assets = resources.files("gleanrl.tracking.report") / "assets"
    parts = {
        "title": html.escape(f"{title} · Glean RL"),
        "style": (assets / "report.css").read_text(encoding="utf-8"),
        # Escaped, because the text of a trajectory may contain "</script>", which would end the script element.
        "payload": text.replace("</", "<\\/").replace("<!--", "<\\u0021--"),
        "script": "\n".join((assets / script).read_text(encoding="utf-8") for script in SCRIPTS),
    }
    page = re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], (assets / "page.html").read_text(encoding="utf-8"))
    atomic.write_text(path, page)
    return path


def _finite(value: Any) -> Any:
    """Return ``value`` as JSON values that can be written to a UTF-8 file.

    NaN and infinities become None, because JSON does not have them, and unpaired surrogates are replaced, because UTF-8
    cannot encode them. Values of other types become text.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value if value is None or isinstance(value, (bool, int)) else str(value)
