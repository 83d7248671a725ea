"""Builds the report's HTML file from the data of a run, a style sheet and scripts."""

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

    The file contains its data, style and scripts, so it can be opened without a network. ``run`` may be the path of the
    run folder.

    Raises:
        UserError: there is no such run, its config.toml cannot be read, or the disk is full.
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
        # Escaped, because the text of a trajectory may contain "</script>", which would end the script element.
        "payload": text.replace("</", "<\\/").replace("<!--", "<\\u0021--"),
        "script": "\n".join((assets / script).read_text(encoding="utf-8") for script in SCRIPTS),
    }
    page = re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], (assets / "page.html").read_text(encoding="utf-8"))
    atomic.write_text(folder.report_path, page)
    return folder.report_path


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
