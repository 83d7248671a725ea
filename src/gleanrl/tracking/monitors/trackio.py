"""Logs to Trackio, the local-first tracker of Hugging Face."""

from __future__ import annotations

import trackio  # pyright: ignore[reportMissingImports]

from gleanrl.protocols import Metrics
from gleanrl.runtime.run_folder import RunInfo


class TrackioMonitor:
    """Logs to one Trackio run. Trackio identifies a run by its name, so the name holds an id that is kept on resume."""

    def __init__(self, info: RunInfo) -> None:
        name = f"{info.name}-{info.remembered_id('trackio')}"
        self._run = trackio.init(project=info.project, name=name, config=dict(info.config), resume="allow")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._run.finish()
