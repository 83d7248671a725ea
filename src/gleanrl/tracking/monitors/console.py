"""Shows a run on the terminal with progress bars, or in a log with plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import rich.console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from gleanrl.protocols import Metrics
from gleanrl.utils.progress import Stage

SHOWN = {
    "reward/mean": "reward",
    "reward/success": "success",
    "eval/sampled/pass@1": "held-out",
    "eval/greedy/success": "held-out greedy",
    "eval/return": "evaluation return",
    "loss/policy": "loss",
    "sampler/tokens_per_s": "tokens/s",
    "time/step_s": "s/step",
}
"""The metrics in a line of the console, if the step has them, and their names there."""

MOSTLY = 0.5  # share of a step's turns; cutting off more is not intended
MORE_ROOM = "by context.max_tokens_per_turn or a full context (model.max_context)"


class Console:
    """A `Progress` and a `Monitor` on one terminal or log.

    Args:
        console: where to write; default: standard error, as a terminal if it is one.
        interval_s: seconds between two plain lines of one stage.
        clock: monotonic seconds, exchangeable in tests.
    """

    def __init__(
        self,
        console: rich.console.Console | None = None,
        *,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or rich.console.Console(stderr=True)
        self._clock, self._interval_s = clock, interval_s
        self._stages: list[_Stage] = []
        self._bars: RichProgress | None = None
        self._told_of_cuts = False

    @property
    def terminal(self) -> bool:
        return self._console.is_terminal

    def print(self, text: str) -> None:
        """Print a line of its own, above the bars."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, total: int | None = None, *, done: int = 0) -> Iterator[Stage]:
        """Show a stage until the block ends, and then print how long it took.

        ``done`` parts were finished before (a resumed run): they count, but not for the speed.
        """
        stage = self._open(name, total, done)
        try:
            yield stage
        except BaseException:
            self._close(stage, "stopped after")
            raise
        self._close(stage, "in")

    def log(self, step: int, metrics: Metrics) -> None:
        cut = metrics.get("episode/cut_turns", 0.0)
        if cut > MOSTLY and not self._told_of_cuts:
            self._told_of_cuts = True
            self.print(f"step {step}: {100 * cut:.0f} % of the turns were cut off, {MORE_ROOM}")
        fields = {label: metrics[name] for name, label in SHOWN.items() if name in metrics}
        if not fields:
            return
        if self._stages:
            self._stages[0].show(fields)  # training's; a background evaluation has a stage of its own
        if not self.terminal or any(name.startswith("eval/") for name in metrics):
            self.print(f"step {step}: {describe(fields)}")

    def close(self) -> None:
        for stage in list(self._stages):
            self._close(stage, "stopped after")

    def _open(self, name: str, total: int | None, done: int) -> _Stage:
        if self.terminal and self._bars is None:
            self._bars = _bars(self._console)
            self._bars.start()
        bar = self._bars.add_task(name, total=total, completed=done, fields="") if self._bars else None
        stage = _Stage(self, name, total, done, self._clock(), bar)
        self._stages.append(stage)
        if bar is None:
            self.print(f"{name}: {total - done} to do" if total else f"{name} ...")
        return stage

    def _close(self, stage: _Stage, how: str) -> None:
        if stage not in self._stages:
            return
        self._stages.remove(stage)
        if self._bars and stage.bar is not None:
            self._bars.remove_task(stage.bar)
        self.print(f"{stage.name}: {stage.count()} {how} {duration(self._clock() - stage.started)}{stage.suffix()}")
        if self._bars and not self._stages:
            self._bars.stop()
            self._bars = None


class _Stage:
    def __init__(
        self, console: Console, name: str, total: int | None, done: int, started: float, bar: TaskID | None
    ) -> None:
        self.name, self.total, self.done, self.started, self.bar = name, total, done, started, bar
        self._before = done
        self._console, self._said, self._fields = console, started, {}

    def advance(self, count: int = 1, **fields: float | str) -> None:
        self.done += count
        self.show(fields)
        now = self._console._clock()
        if self.bar is None and now - self._said >= self._console._interval_s:
            self._said = now
            self._console.print(f"{self.name}: {self.count()}{self._left(now)}{self.suffix()}")

    def show(self, fields: dict[str, Any]) -> None:
        self._fields.update(fields)
        bars = self._console._bars
        if bars is not None and self.bar is not None:
            bars.update(self.bar, completed=self.done, fields=escape(describe(self._fields)))

    def count(self) -> str:
        return f"{self.done}/{self.total}" if self.total else str(self.done)

    def suffix(self) -> str:
        return f" · {describe(self._fields)}" if self._fields else ""

    def _left(self, now: float) -> str:
        new = self.done - self._before
        if not self.total or not new:
            return ""
        return f", {duration((now - self.started) / new * (self.total - self.done))} left"


def describe(fields: dict[str, Any]) -> str:
    """Format fields as ``reward 0.531 · tokens/s 5,210``: three significant digits, whole numbers from 1000 on."""
    return " · ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in fields.items())


def duration(seconds: float) -> str:
    """Format seconds as ``0.8 s``, ``42 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _bars(console: rich.console.Console) -> RichProgress:
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[fields]}", style="dim"),
        console=console,
        transient=True,
    )
