"""Writes the metrics of a run to the file metrics.jsonl, which the report and other tools read."""

from __future__ import annotations

import json
import math
import time

from gleanrl.protocols import Metrics
from gleanrl.runtime.run_folder import RunInfo, read_json_lines
from gleanrl.utils import atomic


class FileMonitor:
    """Appends a JSON object such as ``{"step": 3, "time": Unix seconds, "reward/mean": 0.5, ...}`` for each `log`.

    Every line is flushed, so that a killed run keeps every step that it logged. NaN and infinities are written as null,
    which readers treat as missing. When a run is resumed, the lines after the resumed step are removed, because the run
    repeats these steps. A new run begins with an empty file.
    """

    def __init__(self, info: RunInfo) -> None:
        path = info.folder.metrics_path
        path.parent.mkdir(parents=True, exist_ok=True)
        last = info.resumed_step
        kept = [line for line in read_json_lines(path) if last is not None and line.get("step", 0) <= last]
        atomic.write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
