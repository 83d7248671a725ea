"""Records a run while it is under way: metrics, rollouts and the progress bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter

from gleanrl.algorithms.batch import Batch
from gleanrl.protocols import Metrics, Monitor
from gleanrl.rollout.conversation import transcript
from gleanrl.runtime.evaluation import Evaluation
from gleanrl.runtime.records import RolloutRecord, group_records, write_rollouts
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.schedule.timeline import DEVICE_WORK, Timeline
from gleanrl.types import Group
from gleanrl.utils import atomic
from gleanrl.utils.progress import Stage

TRANSCRIPTS = 4  # number of evaluation attempts written as text


class RunObserver:
    """Writes each step and evaluation to the run folder and reports it to the monitors.

    Args:
        rollouts_per_step: how many trajectories of each step are kept; -1 = all.
        counters: returns running totals (the sampler's, and ``environment_s``). Their growth over a step becomes
            metrics of the step.
        gauges: returns the reward agent's metrics since the last call.
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
        self._advantages: dict[str, float] = {}
        self._counters, self._before = counters, dict(counters())
        self._gauges = gauges
        self._training = training
        self._since = perf_counter()

    def on_batch(self, groups: Sequence[Group], batch: Batch) -> None:
        """Keep each trajectory's mean advantage for its record. Called before the learner gets the batch."""
        valid = [t.id for group in groups for t in group.trajectories if t.score.valid]
        for sample in batch.samples:
            self._advantages[valid[sample.trajectory]] = float(sample.advantages[sample.mask].mean())

    def on_step(self, step: int, groups: Sequence[Group], metrics: Metrics) -> None:
        """Record a step. ``step`` is the number of steps done, this one included."""
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

        known, self._advantages = self._advantages, {}
        records: list[RolloutRecord] = []
        for group in groups:
            records += group_records(group, step, [known.get(t.id, math.nan) for t in group.trajectories])
        if self._rollouts_per_step >= 0:
            records = records[: self._rollouts_per_step]
        if records:
            write_rollouts(self._folder.rollout_path(step), records)
        self._training.advance(1)

    def log(self, step: int, metrics: Metrics) -> None:
        if metrics:
            self._monitors.log(step, metrics)

    def evaluated(self, step: int, metrics: Metrics, sampled: Evaluation) -> None:
        """Record an evaluation: its metrics, and a few attempts as readable text in ``samples/``."""
        self.log(step, metrics)
        shown = [row[0] for row in sampled.trajectories[:TRANSCRIPTS]]
        text = "\n\n".join(transcript(trajectory) for trajectory in shown)
        atomic.write_text(self._folder.path / "samples" / f"step-{step:06d}.txt", text)

    def _measure_times(self, now: float, environment_s: float) -> dict[str, float]:
        """Return how many seconds of the step each activity took.

        While several are under way, the time counts as the device's work, else as waiting for rewards, else as
        environments; the rest of the time is idle.
        """
        timeline, since = self._timeline, self._since
        busy = {f"time/{kind}_s": timeline.busy(kind, since, now) for kind in DEVICE_WORK}
        seconds = now - since
        worked = timeline.busy(DEVICE_WORK, since, now)
        share = 1.0 - worked / seconds if seconds > 0 else 0.0
        idle = share * seconds
        times = {}
        if timeline.spans("score"):  # without such spans the run never waits for rewards
            at_work_or_waiting = timeline.busy((*DEVICE_WORK, "score"), since, now)
            times["time/reward_wait_s"] = max(0.0, at_work_or_waiting - worked)
            idle = max(0.0, idle - times["time/reward_wait_s"])
        environment = min(environment_s, idle)
        times |= {"time/environment_s": environment, "time/idle_s": idle - environment}
        return {**busy, **times, "device/idle_share": share}
