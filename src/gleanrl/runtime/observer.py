"""Records what a run does: writes metrics, rollout files and sample texts, and advances the progress bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter

from gleanrl.algorithms.batch import Batch
from gleanrl.protocols import Metrics, Monitor, TextMonitor
from gleanrl.rollout.conversation import transcript
from gleanrl.runtime.evaluation import Evaluation
from gleanrl.runtime.failures import record_failures
from gleanrl.runtime.records import RolloutRecord, group_records, write_rollouts
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.schedule.timeline import DEVICE_WORK, Timeline
from gleanrl.types import Group
from gleanrl.utils import atomic
from gleanrl.utils.progress import Stage

TRANSCRIPTS = 4  # number of attempts of an evaluation that are written to `samples/` as readable text


class RunObserver:
    """Passes the metrics of each step and evaluation to the monitors, and writes rollouts to the run folder.

    The training loop calls `on_batch` and `on_step`, the `BackgroundEvaluator` calls `evaluated`.

    Args:
        rollouts_per_step: number of trajectories of each step that are written to the rollout files; -1 = all.
        counters: returns totals since the start of the process: the sampler's counters, and ``environment_s``, the
            seconds spent in environments. The increase over a step is logged as a metric of that step.
        gauges: returns the reward agent's metrics since the last call.
        training: the progress bar of the training.
    """

    def __init__(
        self,
        folder: RunFolder,
        monitors: Monitor,
        timeline: Timeline,
        *,
        rollouts_per_step: int,
        counters: Callable[[], Metrics],
        gauges: Callable[[], Metrics] = dict,
        training: Stage,
    ) -> None:
        self._folder, self._monitors, self._timeline = folder, monitors, timeline
        self._rollouts_per_step = rollouts_per_step
        self._advantages: dict[tuple[int, int], float] = {}  # by the group's ticket and the place in the group
        self._counters, self._before = counters, dict(counters())
        self._gauges = gauges
        self._training = training
        self._since = perf_counter()

    def on_batch(self, groups: Sequence[Group], batch: Batch) -> None:
        """Remember the mean advantage of each trajectory in ``batch``, which `on_step` writes to its rollout record.

        Called for each batch, before the learner is updated with it.
        """
        valid = [(group.ticket, n) for group in groups for n, t in enumerate(group.trajectories) if t.score.valid]
        sums: dict[tuple[int, int], list[float]] = {}  # sum and number of the advantages over all segments
        for sample in batch.samples:
            total = sums.setdefault(valid[sample.trajectory], [0.0, 0.0])
            total[0] += float(sample.advantages[sample.mask].sum())
            total[1] += float(sample.mask.sum())
        self._advantages |= {key: total / number for key, (total, number) in sums.items() if number}

    def on_step(self, step: int, groups: Sequence[Group], metrics: Metrics, dropped: Sequence[Group] = ()) -> None:
        """Log the metrics of a finished step, and write its rollouts and the reasons of failed episodes.

        ``step`` counts finished steps, from 1. ``dropped`` are the groups that were dropped since the step before.
        """
        now = perf_counter()
        after = dict(self._counters())
        grown = {name: value - self._before.get(name, 0.0) for name, value in after.items()}
        self._before = after
        environment_s = grown.pop("environment_s", 0.0)
        sampler = {f"sampler/{name}": value for name, value in grown.items()}
        seconds = grown.get("prefill_s", 0.0) + grown.get("decode_s", 0.0)
        if seconds > 0:
            sampler["sampler/tokens_per_s"] = grown.get("sampled_tokens", 0.0) / seconds
        self._monitors.log(step, {**metrics, **self._gauges(), **self._measure_times(now, environment_s), **sampler})
        self._since = now

        record_failures(self._folder, "training", step, [t for group in (*groups, *dropped) for t in group.fresh])
        known, self._advantages = self._advantages, {}
        records: list[RolloutRecord] = []
        for group in groups:
            advantages = [known.get((group.ticket, number), math.nan) for number in range(len(group.trajectories))]
            records += group_records(group, step, advantages)
        if self._rollouts_per_step >= 0:
            records = records[: self._rollouts_per_step]
        if records:
            write_rollouts(self._folder.rollout_path(step), records)
        self._training.advance(1)

    def log(self, step: int, metrics: Metrics) -> None:
        if metrics:
            self._monitors.log(step, metrics)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Log the metrics of an evaluation, and the first attempt at a few of its tasks as text."""
        self.log(step, evaluation.metrics())
        record_failures(self._folder, "evaluation", step, evaluation.attempts())
        texts = {}
        for task, attempts in list(zip(evaluation.tasks, evaluation.sampled, strict=True))[:TRANSCRIPTS]:
            # Texts of environments may hold lone surrogates, which UTF-8 cannot encode. They are written as ``\udcff``.
            texts[task.id] = transcript(attempts[0], task).encode("utf-8", "backslashreplace").decode()
        atomic.write_text(self._folder.path / "samples" / f"step-{step:06d}.txt", "\n\n".join(texts.values()))
        if isinstance(self._monitors, TextMonitor):
            self._monitors.log_texts(step, texts)

    def _measure_times(self, now: float, environment_s: float) -> dict[str, float]:
        """Split the time since the last step, up to ``now``, among the activities of the run, in seconds.

        Activities overlap. Time in which the device works counts only as device work. The rest counts as waiting for
        rewards while a score is pending. From what remains, the seconds spent in environments (``environment_s``) are
        subtracted, and the rest is idle time. ``device/idle_share`` is the share of time without device work.
        """
        timeline, since = self._timeline, self._since
        busy = {f"time/{kind}_s": timeline.busy(kind, since, now) for kind in DEVICE_WORK}
        seconds = now - since
        worked = timeline.busy(DEVICE_WORK, since, now)
        share = 1.0 - worked / seconds if seconds > 0 else 0.0
        idle = share * seconds
        times = {}
        if timeline.spans("score"):  # rewards that take less than 1 ms, such as environments' own scores, have no span
            at_work_or_waiting = timeline.busy((*DEVICE_WORK, "score"), since, now)
            times["time/reward_wait_s"] = max(0.0, at_work_or_waiting - worked)
            idle = max(0.0, idle - times["time/reward_wait_s"])
        environment = min(environment_s, idle)
        times |= {"time/environment_s": environment, "time/idle_s": idle - environment}
        return {**busy, **times, "device/idle_share": share}
