"""What a schedule would cost, before anybody rents a GPU: the real training loop on a virtual clock.

`gleanrl.train`, the controller, the chunks and the device lock run as they are. Only the work is simulated: generating,
log-prob passes, training and rewards take the seconds that they are given, and compute nothing.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from gleanrl.config.settings import ScheduleSettings
from gleanrl.curriculum.orders import TaskStream
from gleanrl.curriculum.plan import Plan
from gleanrl.protocols import Metrics
from gleanrl.schedule.controller import StalenessController
from gleanrl.schedule.device_lock import Work, make_order
from gleanrl.schedule.schedule import Schedule
from gleanrl.schedule.timeline import Timeline
from gleanrl.simulate import virtual_time
from gleanrl.simulate.cluster import OVERHEADS, Cluster, Overhead
from gleanrl.simulate.simulated import Device, Evaluator, Learner, NoCheckpoints, Player, Sampler, Service
from gleanrl.simulate.simulated_cluster import Machines
from gleanrl.simulate.workload import Preset, Workload
from gleanrl.train import Run, train
from gleanrl.types import Group, Task


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
    cluster: ClusterOutcome | None = None  # of a simulation on one


@dataclass(frozen=True, slots=True)
class ClusterOutcome:
    """What a cluster's parts did, a step or as a share of the time; failures of learners are in ``step_s`` only."""

    groups_per_s: float
    tokens_per_s: float  # sampled; 0 where their number is not given
    sampler_idle_share: float
    drain_share: float  # the learner waits for sampling to end before it publishes
    loss_share: float  # of ``step_s``: what failures of learners add
    lost: float  # trajectories and requests a step that began again
    at_work: Mapping[Overhead, float]  # shares of the time

    @property
    def first(self) -> Overhead:
        """What saturates first as everything grows alike."""
        return max(OVERHEADS, key=lambda name: self.at_work[name])

    @property
    def headroom(self) -> float:
        """How many times as fast steps could become before it does; infinite where no event costs anything."""
        share = self.at_work[self.first]
        return 1 / share if share else math.inf


def simulate(workload: Workload, preset: Preset, cluster: Cluster | None = None) -> Outcome:
    """One schedule on a workload; the same numbers every time. Not from inside a running event loop.

    Without a ``cluster`` sampler and learner share one device, nothing fails, and events cost nothing.
    """
    collecting = gc.isenabled()
    gc.disable()  # the loop leaves no cycles, and looking for them takes a quarter of the time
    try:
        return virtual_time.run(_simulate(workload, preset, cluster))
    finally:
        if collecting:
            gc.enable()


async def _simulate(workload: Workload, preset: Preset, cluster: Cluster | None) -> Outcome:
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
    controller = StalenessController(schedule, total)
    machines = Machines(cluster or Cluster(), workload, clock)
    device, samplers = _devices(machines, _device_order(workload, controller))
    service = Service(device, machines, whole=schedule.chunk == schedule.batch)
    learner = Learner(machines.cluster.learning(workload), device)
    sampler = Sampler(samplers, learner, machines, inflight=schedule.inflight)
    observer = _Observer(device, samplers, service, learner, machines)
    tasks = [Task(f"task-{number}") for number in range(workload.batch)]
    run = _Run(
        seed=workload.seed,
        total_steps=total,
        settings=settings,
        player=cast(Any, Player(sampler, machines)),
        rewards=service,
        learner=cast(Any, learner),
        plan=Plan(TaskStream(tasks, workload.group, workload.seed), schedule.batch),
        make_batch=cast(Any, learner.prepare),
        evaluator=Evaluator(samplers, service, machines),
        checkpoints=cast(Any, NoCheckpoints()),
        checkpoint_every=machines.cluster.checkpoint_every if machines.cluster.checkpoint else 0,
        evaluate_every=workload.evaluate_every,
        observer=cast(Any, observer),
        timeline=Timeline(clock=clock),
        controller=controller,
        clock=clock,
        checkpoint_s=machines.cluster.checkpoint,
    )
    observer.enough = run.interruption.interrupt
    await train(run)
    outcome = observer.outcome(preset)
    return outcome if cluster is None else observer.on_cluster(outcome)


@dataclass
class _Run(Run):
    checkpoint_s: float = 0.0

    async def save(self, state: dict[str, Any] | None = None) -> None:
        await asyncio.sleep(self.checkpoint_s)


def _devices(machines: Machines, order: Callable[[], Sequence[Work]]) -> tuple[Device, list[Device]]:
    """The learners', and those of the samplers."""
    learner = Device(order, machines.clock)
    if machines.cluster.placement == "colocated":
        return learner, [learner]
    return learner, [Device(order, machines.clock) for _ in machines.cluster.engines]


def _device_order(workload: Workload, controller: StalenessController) -> Callable[[], Sequence[Work]]:
    """Evaluating inline goes before everything, because the loop stands still for it."""
    beside = make_order(workload.first, lambda: controller.ahead)
    if workload.evaluation == "beside":
        return beside
    return lambda: ("evaluate", *(work for work in beside() if work != "evaluate"))


class _Observer:
    """Takes a reading at each step's end, and ends the run after enough of them."""

    def __init__(
        self, device: Device, samplers: Sequence[Device], service: Service, learner: Learner, machines: Machines
    ) -> None:
        self._workload, self._cluster, self._clock = machines.workload, machines.cluster, machines.clock
        self._steps, self._counted = self._workload.steps, self._workload.counted
        self._device, self._samplers, self._service, self._learner = device, samplers, service, learner
        self._machines = machines
        self._readings: list[tuple[float, ...]] = []  # time, busy, waited, calls, staleness mean and maximum
        self._of_cluster: list[Mapping[str, float]] = []
        self._saved_at = 0.0
        self._loss_s = 0.0
        self.enough: Callable[[], None] = lambda: None

    def log(self, step: int, metrics: Metrics) -> None:
        pass

    def on_batch(self, groups: Sequence[Group], batch: Any) -> None:
        pass

    def on_step(self, step: int, groups: Sequence[Group], metrics: Metrics) -> None:
        ages = (metrics["schedule/staleness_mean"], metrics["schedule/staleness_max"])
        self._read_cluster(step)
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

    def on_cluster(self, outcome: Outcome) -> Outcome:
        """With what failures of learners add, and what the cluster's parts did."""
        first, last = self._of_cluster[self._steps - self._counted - 1], self._of_cluster[-1]
        grown = {name: value - first[name] for name, value in last.items()}
        seconds = outcome.step_s * self._counted
        step_s = outcome.step_s + grown["loss_s"] / self._counted
        tokens = self._workload.samples * self._cluster.tokens
        return replace(
            outcome,
            step_s=step_s,
            cluster=ClusterOutcome(
                groups_per_s=self._workload.batch / step_s,
                tokens_per_s=tokens / step_s,
                sampler_idle_share=1 - grown["sampling_s"] / len(self._samplers) / seconds,
                drain_share=grown["drained_s"] / seconds,
                loss_share=grown["loss_s"] / self._counted / step_s,
                lost=grown["lost"] / self._counted,
                at_work={name: grown[name] / seconds for name in OVERHEADS},
            ),
        )

    def _read_cluster(self, step: int) -> None:
        now, machines = self._clock(), self._machines
        began = self._readings[-1][0] if self._readings else 0.0
        self._loss_s += machines.learner_loss_s(now - began, began - self._saved_at)
        if step % self._cluster.checkpoint_every == 0:
            self._saved_at = now
        self._of_cluster.append(
            {
                **machines.at_work(),
                "sampling_s": sum(device.reading()[0] for device in self._samplers),
                "drained_s": machines.drained_s,
                "lost": float(machines.lost),
                "loss_s": self._loss_s,
            }
        )
