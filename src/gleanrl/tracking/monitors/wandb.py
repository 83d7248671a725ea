"""Logs the metrics of a run to Weights & Biases.

With the environment variable ``WANDB_MODE=offline``, all data stay in the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping

import wandb  # pyright: ignore[reportMissingImports]

from gleanrl.protocols import Metrics
from gleanrl.runtime.run_folder import RunInfo


class WandbMonitor:
    """Logs to one W&B run, which a resumed run continues.

    The step is logged as a metric ``step``, which is the x-axis of all others. W&B's own step counter is not used,
    because it cannot decrease, and a resumed run repeats the steps after its checkpoint.
    """

    def __init__(self, info: RunInfo) -> None:
        info.folder.path.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=info.project,
            name=info.name,
            id=info.remembered_id("wandb"),
            dir=str(info.folder.path),
            config=dict(info.config),
            resume="allow",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **{name: float(value) for name, value in metrics.items()}})

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        table = wandb.Table(columns=["task", "attempt"], data=[list(item) for item in texts.items()])
        self._run.log({"step": step, "samples": table})

    def close(self) -> None:
        self._run.finish()
