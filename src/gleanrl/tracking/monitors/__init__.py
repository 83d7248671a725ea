"""Monitors, which receive the metrics of a run and write them to a file, the console or an experiment tracker.

Each implements the protocol `gleanrl.protocols.Monitor`. `load_monitors` makes the monitors of a run from its settings.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from gleanrl.protocols import Metrics, Monitor, TextMonitor
from gleanrl.runtime.run_folder import RunInfo
from gleanrl.tracking.monitors.console import Console
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.progress import Progress, Silent, Stage
from gleanrl.utils.settings import MonitorSettings
from gleanrl.utils.text import nearest

__all__ = ["Console", "Monitors", "Progress", "RunInfo", "Silent", "Stage", "load_monitors"]

log = logging.getLogger(__name__)

BUILT_IN = {
    "file": "FileMonitor",
    "tensorboard": "TensorboardMonitor",
    "wandb": "WandbMonitor",
    "trackio": "TrackioMonitor",
    "mlflow": "MlflowMonitor",
}
"""Name of a monitor -> its class, in the module of the same name in `gleanrl.tracking.monitors`.

A module is imported only if its monitor is used, because most of them need a third-party package."""


class Monitors:
    """Passes metrics on to several monitors.

    An error of a monitor never stops the run. The first error of each monitor is logged as a warning.
    """

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._monitors = tuple(monitors)
        self._warned: set[int] = set()

    def log(self, step: int, metrics: Metrics) -> None:
        """Pass the metrics of a step to each monitor."""
        for index, monitor in enumerate(self._monitors):
            with self._guard(index):
                monitor.log(step, metrics)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Pass texts to each monitor that can show them."""
        for index, monitor in enumerate(self._monitors):
            if isinstance(monitor, TextMonitor):
                with self._guard(index):
                    monitor.log_texts(step, texts)

    def close(self) -> None:
        """Close each monitor."""
        for index, monitor in enumerate(self._monitors):
            with self._guard(index):
                monitor.close()

    @contextmanager
    def _guard(self, index: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if index not in self._warned:
                self._warned.add(index)
                name = type(self._monitors[index]).__name__
                log.warning("monitor %s failed (%s: %s); the run goes on", name, type(error).__name__, error)


def check(settings: MonitorSettings) -> None:
    """Check that the monitors in ``settings.use`` exist and that their packages are installed, without making them.

    Raises:
        UserError: a name is unknown, a package is not installed, or a class lacks a method.
    """
    for name in settings.use:
        if name != "console":
            _find_class(name)


def load_monitors(settings: MonitorSettings, info: RunInfo, *, console: Console | None = None) -> Monitors:
    """Make the monitors in ``settings.use``.

    ``console`` is used as the monitor "console". The caller passes it because it also shows the run's progress bars;
    None = make a new one.

    Raises:
        UserError: a name is unknown, a package is not installed, or a tracker fails to start.
    """
    made: list[Monitor] = []
    for name in settings.use:
        if name == "console":
            made.append(console or Console())
            continue
        try:
            made.append(_find_class(name)(info))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"monitor {name!r} cannot start: {type(error).__name__}: {error}") from error
    return Monitors(made)


def _find_class(name: str) -> Any:
    if name not in BUILT_IN:
        if ":" in name:
            return load_object(name, Monitor)
        known = ("console", *BUILT_IN)
        hint = nearest(name, known) or f"; known: {', '.join(known)}, or an import path"
        raise UserError(f"unknown monitor {name!r}{hint}")
    try:
        return getattr(import_module(f"gleanrl.tracking.monitors.{name}"), BUILT_IN[name])
    except ModuleNotFoundError as error:
        message = f"monitor {name!r} needs the package {error.name!r}: pip install 'gleanrl[{name}]'"
        raise UserError(message) from None
