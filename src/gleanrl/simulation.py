"""What a schedule would cost, before anybody rents a GPU: the real training loop on a virtual clock.

`gleanrl.train`, the pacer, the chunks and the device lease run as they are. Only the work is simulated: generating,
log-prob passes, training and rewards take the seconds that they are given, and compute nothing.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gleanrl import virtual_time
from gleanrl.curriculum import Plan, TaskStream
from gleanrl.lease import Work, order
from gleanrl.protocols import Metrics
from gleanrl.schedule import Pacer, Schedule
from gleanrl.settings import ScheduleSettings
from gleanrl.simulated import Device, Evaluator, Learner, NoCheckpoints, Player, Sampler, Service
from gleanrl.timeline import Timeline
from gleanrl.train import Run, train
from gleanrl.types import Group, Task
from gleanrl.workload import Preset, Workload


@dataclass(frozen=True, slots=True)
class Outcome:
    """A schedule in its steady state: means over the steps that count, evaluations included."""

    schedule: Preset
    step_s: float
    idle_share: float  # of the device
    reward_wait_s: float  # a step in which the device had nothing to do while rewards were pending
    staleness_mean: float  # steps
    staleness_max: float
    calls: float  # of the learner, a step
    reward_s: float  # from asking for a batch's first reward to its last


def simulate(workload: Workload, preset: Preset) -> Outcome:
    """One schedule on a workload; the same numbers every time. Not from inside a running event loop."""
    collecting = gc.isenabled()
    gc.disable()  # the loop leaves no cycles, and looking for them takes a quarter of the time
    try:
        return virtual_time.run(_simulate(workload, preset))
    finally:
        if collecting:
            gc.enable()


async def _simulate(workload: Workload, preset: Preset) -> Outcome:
    settings = ScheduleSettings(
        preset=preset,
        batch=workload.batch,
        group=workload.group,
        chunks=workload.minibatches,
        staleness=workload.staleness,
        adaptive=workload.adaptive,
    )
    clock = asyncio.get_running_loop().time
    schedule = Schedule.from_settings(settings)
    total = workload.steps + schedule.staleness + 1  # it is stopped before its end, where there is less to overlap
    pacer = Pacer(schedule, total)
    device = Device(_device_order(workload, pacer), clock)
    service = Service(workload, device, clock, whole=schedule.chunk == schedule.batch)
    learner = Learner(workload, device)
    sampler = Sampler(workload, device, learner, inflight=schedule.inflight)
    observer = _Observer(workload, device, service, learner, clock)
    tasks = [Task(f"task-{number}") for number in range(workload.batch)]
    run = Run(
        seed=workload.seed,
        total_steps=total,
        schedule=schedule,
        settings=settings,
        player=cast(Any, Player(sampler)),
        rewards=service,
        learner=cast(Any, learner),
        plan=Plan(TaskStream(tasks, workload.group, workload.seed), schedule.batch),
        batch=cast(Any, learner.prepare),
        evaluator=Evaluator(workload, device, service),
        checkpoints=cast(Any, NoCheckpoints()),
        checkpoint_every=0,
        evaluate_every=workload.evaluate_every,
        observer=cast(Any, observer),
        timeline=Timeline(clock=clock),
        pacer=pacer,
        clock=clock,
    )
    observer.enough = run.interrupt
    await train(run)
    return observer.outcome(preset)


def _device_order(workload: Workload, pacer: Pacer) -> Callable[[], Sequence[Work]]:
    """Evaluating inline goes before everything, because the loop stands still for it."""
    beside = order(workload.first, lambda: pacer.ahead)
    if workload.evaluation == "beside":
        return beside
    return lambda: ("evaluate", *(work for work in beside() if work != "evaluate"))


class _Observer:
    """Takes a reading at each step's end, and ends the run after enough of them."""

    def __init__(
        self, workload: Workload, device: Device, service: Service, learner: Learner, clock: Callable[[], float]
    ) -> None:
        self._steps, self._counted = workload.steps, workload.counted
        self._device, self._service, self._learner, self._clock = device, service, learner, clock
        self._readings: list[tuple[float, ...]] = []  # time, busy, waited, calls, staleness mean and maximum
        self.enough: Callable[[], None] = lambda: None

    def log(self, step: int, metrics: Metrics) -> None:
        pass

    def learning(self, groups: Sequence[Group], batch: Any) -> None:
        pass

    def step(self, step: int, groups: Sequence[Group], metrics: Metrics) -> None:
        ages = (metrics["schedule/staleness_mean"], metrics["schedule/staleness_max"])
        self._readings.append((self._clock(), *self._device.reading(), self._learner.calls, *ages))
        if step == self._steps:
            self.enough()

    def outcome(self, preset: Preset) -> Outcome:
        warm = self._steps - self._counted
        counted = self._readings[warm:]
        first, last = self._readings[warm - 1], self._readings[-1]
        seconds, busy, waited, calls = (last[i] - first[i] for i in range(4))
        batches = [self._service.batch_s(version) for version in range(warm, self._steps - 2)]
        return Outcome(
            schedule=preset,
            step_s=seconds / len(counted),
            idle_share=1 - busy / seconds,
            reward_wait_s=waited / len(counted),
            staleness_mean=sum(reading[4] for reading in counted) / len(counted),
            staleness_max=max(reading[5] for reading in counted),
            calls=calls / len(counted),
            reward_s=sum(batches) / max(len(batches), 1),
        )
