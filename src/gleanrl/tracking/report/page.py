"""Builds the report's HTML file from a run's data and the page's style and script."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import gleanrl
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.tracking.report.curves import curves
from gleanrl.tracking.report.experience import experience
from gleanrl.tracking.report.facts import facts
from gleanrl.tracking.report.gantt import windows
from gleanrl.tracking.report.rollouts import sample_rollouts
from gleanrl.tracking.report.staleness import staleness
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
    "rollouts.js",
    "main.js",
)


def build(run: RunFolder | Path | str) -> Path:
    """Write ``report.html`` into the run folder and return its path.

    The file holds its data, style and script, and needs no network.

    Raises:
        UserError: there is no run, its config.toml is broken, or the disk is full.
    """
    folder = RunFolder.existing(run.path if isinstance(run, RunFolder) else run)
    rows, config = folder.read_metrics(), folder.read_config()
    data = {
        "name": folder.name,
        "version": gleanrl.__version__,
        "facts": facts(rows, config),
        "curves": curves(rows),
        "experience": experience(folder, rows, config),
        "staleness": staleness(rows, config),
        "config": config,
        "timeline": windows(folder.read_timeline()),
        "rollouts": sample_rollouts(folder),
    }
    text = json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    assets = resources.files("gleanrl.tracking.report") / "assets"
    parts = {
        "title": html.escape(f"{folder.name} · Glean RL"),
        "style": (assets / "report.css").read_text(encoding="utf-8"),
        # escaped so that no content of a trajectory can end the script element
        "payload": text.replace("</", "<\\/").replace("<!--", "<\\u0021--"),
        "script": "\n".join((assets / script).read_text(encoding="utf-8") for script in SCRIPTS),
    }
    page = re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], (assets / "page.html").read_text(encoding="utf-8"))
    atomic.write_text(folder.report_path, page)
    return folder.report_path


def _finite(value: Any) -> Any:
    """Replace NaN by null, because JSON has none, and unpaired surrogates, because UTF-8 cannot encode them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value if value is None or isinstance(value, (bool, int)) else str(value)
