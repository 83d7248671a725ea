"""Logs the metrics of a run to Trackio, the local-first experiment tracker of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping

import trackio  # pyright: ignore[reportMissingImports]

from gleanrl.protocols import Metrics
from gleanrl.runtime.run_folder import RunInfo


class TrackioMonitor:
    """Logs to one Trackio run, which a resumed run continues.

    Trackio identifies a run by its name. So the name contains an id, which is stored in the run folder.
    """

    def __init__(self, info: RunInfo) -> None:
        name = f"{info.name}-{info.remembered_id('trackio')}"
        self._run = trackio.init(project=info.project, name=name, config=dict(info.config), resume="allow")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        table = trackio.Table(columns=["task", "attempt"], data=[list(item) for item in texts.items()])
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()
