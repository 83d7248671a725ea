"""Logs the metrics of a run to MLflow, on the server that the environment variable ``MLFLOW_TRACKING_URI`` names."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

from gleanrl.protocols import Metrics
from gleanrl.runtime.run_folder import RunInfo

_NOT_ALLOWED = re.compile(r"[^\w\-./ :]")  # characters that MLflow rejects in metric names: `pass@4` becomes `pass_4`
_PARAMETER_LENGTH = 6000


class MlflowMonitor:
    """Logs to one MLflow run, which a resumed run continues. The configuration is logged once, as parameters."""

    def __init__(self, info: RunInfo) -> None:
        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(info.project)
        experiment = found.experiment_id if found else self._client.create_experiment(info.project)
        created: list[str] = []

        def create() -> str:
            created.append(self._client.create_run(experiment, run_name=info.name).info.run_id)
            return created[0]

        self._run_id = info.remembered_id("mlflow", create)
        if not created:
            self._client.set_terminated(self._run_id, status="RUNNING")
            return
        for name, value in info.flat_config().items():
            self._client.log_param(self._run_id, name, str(value)[:_PARAMETER_LENGTH])

    def log(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        values = [Metric(_NOT_ALLOWED.sub("_", name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=values)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for number, text in enumerate(texts.values()):
            self._client.log_text(self._run_id, text, f"samples/step-{step:06d}-{number}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
