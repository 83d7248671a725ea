"""Shows the progress and the metrics of a run: as progress bars on a terminal, and as plain lines in a log file."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import rich.console
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from gleanrl.protocols import Metrics
from gleanrl.tracking.hints import equal_scores
from gleanrl.utils.progress import Stage

SHOWN = {
    "reward/mean": "reward",
    "reward/success": "success",
    "eval/sampled/pass@1": "held-out",
    "eval/sampled/score": "held-out score",
    "eval/greedy/success": "held-out greedy",
    "eval/return": "evaluation return",
    "loss/policy": "loss",
    "sampler/tokens_per_s": "tokens/s",
    "time/step_s": "s/step",
}
"""The metrics that the console shows, if a step has them: name of the metric -> name on the console."""

MANY_CUT = 0.5  # if more than this share of a step's turns are cut off, a warning is printed, once in a run
RECENT = 5  # number of steps whose groups are looked at for equal scores
MORE_ROOM = "by context.max_tokens_per_turn or a full context (model.max_context)"


class Console:
    """Shows progress and metrics on one terminal or in one log. It is both a `Progress` and a `Monitor`.

    Args:
        console: where to write; None = standard error. Progress bars are shown only if this is a terminal.
        interval_s: without progress bars, the minimum number of seconds between two lines about the same stage.
        clock: returns monotonic seconds; tests replace it.
    """

    def __init__(
        self,
        console: rich.console.Console | None = None,
        *,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or rich.console.Console(stderr=True)
        self.clock, self.interval_s = clock, interval_s
        self.bars: RichProgress | None = None  # None in a log, and while no stage is open
        self._stages: list[_Stage] = []
        self._warned_of_cuts = self._warned_of_equal_scores = False
        self._groups: deque[Metrics] = deque(maxlen=RECENT)  # metrics of the latest steps

    @property
    def terminal(self) -> bool:
        """Whether progress bars can be shown."""
        return self._console.is_terminal

    def print(self, text: str) -> None:
        """Print ``text`` on a separate line, above the bars."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, total: int | None = None, *, done: int = 0, at_once: int = 1) -> Iterator[Stage]:
        """Show a stage until the block ends, and then print how long it took.

        ``total`` is the number of its parts; None = not known. ``done`` is the number of parts that were finished
        before the run was resumed. They are shown as done, but do not count in the estimate of the remaining time,
        which a log shows once ``at_once`` parts are finished.
        """
        if self.terminal and self.bars is None:
            self.bars = _Bars(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=max(6, min(24, self._console.width // 5))),
                MofNCompleteColumn(),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=self._console,
                transient=True,
                # Otherwise the results that a command prints to a file while a stage is open would go to the terminal.
                redirect_stdout=sys.stdout.isatty(),
            )
            self.bars.start()
        bar = self.bars.add_task(name, total=total, completed=done, fields="") if self.bars else None
        stage = _Stage(self, name, total, done, at_once, bar)
        self._stages.append(stage)
        if bar is None:
            self.print(f"{name}: {total - done} to do" if total else f"{name} ...")
        try:
            yield stage
        except BaseException:
            self._end(stage, "stopped after")
            raise
        self._end(stage, "in")

    def log(self, step: int, metrics: Metrics) -> None:
        """Show the metrics of a step that are in `SHOWN`.

        Warn once if most turns are cut off, and once if most groups have equal scores.
        """
        cut = metrics.get("episode/cut_turns", 0.0)
        if cut > MANY_CUT and not self._warned_of_cuts:
            self._warned_of_cuts = True
            self.print(f"step {step}: {100 * cut:.0f} % of the turns were cut off, {MORE_ROOM}")
        if "groups/consumed" in metrics and not self._warned_of_equal_scores:
            self._groups.append(metrics)
            names = [name for name in metrics if name.startswith("groups/")]
            if advice := equal_scores({name: sum(row.get(name, 0.0) for row in self._groups) for name in names}):
                self._warned_of_equal_scores = True
                steps = f"in the last {len(self._groups)} steps, " if len(self._groups) > 1 else ""
                self.print(f"step {step}: {steps}{advice}")
        fields = {label: metrics[name] for name, label in SHOWN.items() if name in metrics}
        if abs(fields.get("held-out score", 0.0) - fields.get("held-out", 0.0)) < 1e-9:  # every score is 0 or 1
            fields.pop("held-out score", None)
        if not fields:
            return
        if self._stages:
            # Show the metrics of a step in the training's stage, which is the first one. A background evaluation may
            # have opened another stage after it.
            self._stages[0].show(fields)
        if not self.terminal or any(name.startswith("eval/") for name in metrics):
            self.print(f"step {step}: {describe(fields)}")

    def close(self) -> None:
        """End all stages that are still open."""
        for stage in list(self._stages):
            self._end(stage, "stopped after")

    def _end(self, stage: _Stage, how: str) -> None:
        if stage not in self._stages:
            return
        self._stages.remove(stage)
        if self.bars and stage.bar is not None:
            self.bars.remove_task(stage.bar)
        self.print(stage.describe(f" {how} {duration(self.clock() - stage.started)}"))
        if self.bars and not self._stages:
            self.bars.stop()
            self.bars = None


class _Bars(RichProgress):
    """Progress bars whose fields are on lines of their own, so that they do not displace the bars."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        described = [task for task in self.tasks if task.fields["fields"]]
        for task in described:
            name = f"{task.description}: " if len(described) > 1 else ""
            yield Text(f"  {name}{task.fields['fields']}", style="dim", no_wrap=True, overflow="ellipsis")


class _Stage:
    """A stage on the console: a progress bar on a terminal, or lines at intervals in a log."""

    def __init__(
        self, console: Console, name: str, total: int | None, done: int, at_once: int, bar: TaskID | None
    ) -> None:
        self.bar, self.started = bar, console.clock()
        self._console, self._name, self._total, self._done = console, name, total, done
        self._done_before, self._printed_at, self._at_once = done, self.started, at_once
        self._fields: dict[str, Any] = {}

    def advance(self, count: int = 1, **fields: float | str) -> None:
        self._done += count
        self.show(fields)
        now = self._console.clock()
        if self.bar is not None or now - self._printed_at < self._console.interval_s:
            return
        self._printed_at = now
        left, new = "", self._done - self._done_before
        if self._total and new >= min(self._at_once, self._total):
            left = f", {duration((now - self.started) / new * (self._total - self._done))} left"
        self._console.print(self.describe(left))

    def show(self, fields: dict[str, Any]) -> None:
        self._fields.update(fields)
        bars = self._console.bars
        if bars is not None and self.bar is not None:
            bars.update(self.bar, completed=self._done, fields=describe(self._fields))

    def describe(self, about: str) -> str:
        """Return a line with the stage's name, the number of finished parts, the text ``about``, and the fields."""
        count = f"{self._done}/{self._total}" if self._total else str(self._done)
        return f"{self._name}: {count}{about}{f' · {describe(self._fields)}' if self._fields else ''}"


def describe(fields: dict[str, Any]) -> str:
    """Format fields as ``reward 0.531 · tokens/s 5,210``.

    Numbers have three significant digits, and from 1000 on they are rounded to whole numbers.
    """
    texts = []
    for name, value in fields.items():
        if not isinstance(value, str):
            value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        texts.append(f"{name.replace('_', ' ')} {value}")
    return " · ".join(texts)


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
