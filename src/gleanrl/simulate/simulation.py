"""Predicts the cost of a schedule without a GPU, with the real training loop on a virtual clock.

The loop in `gleanrl.train`, `StalenessController`, `GroupQueue` and `DeviceLock` are the real ones. Only the work is
simulated: generating, log-prob passes, training and rewards take the seconds of a `Workload` and compute nothing. The
command `gleanrl simulate` calls `simulate` for each schedule:

    simulate(Workload(latency="constant:60"), "one_step_off").step_s
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
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
from gleanrl.simulate.parts import Device, Evaluator, Learner, Machines, Player, Sampler, Service
from gleanrl.simulate.workload import OVERHEADS, Cluster, Overhead, Preset, Workload
from gleanrl.train import Run, train
from gleanrl.types import Group, Task


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a simulated schedule.

    The numbers are means over the last `Workload.counted` steps, in which the run is in a steady state, or over all
    steps if `Workload.whole` is set. Evaluations count as part of the steps.
    """

    schedule: Preset
    step_s: float  # seconds per step
    idle_share: float  # share of the time in which the learner's device is idle
    reward_wait_s: float  # seconds per step in which this device is idle while rewards are pending
    staleness_mean: float  # age of the trained groups, in steps
    staleness_max: float  # age of the oldest trained group, in steps
    calls: float  # calls of the learner per step
    reward_s: float  # seconds from the first request for a reward to the last answer, of the samples of one version
    cluster: ClusterOutcome | None = None  # None if no cluster was given


@dataclass(frozen=True, slots=True)
class ClusterOutcome:
    """Throughput of a simulated cluster, and the load on its parts. Means over the same steps as in `Outcome`."""

    groups_per_s: float
    tokens_per_s: float  # sampled tokens per second; 0 if `Cluster.tokens` is 0
    sampler_idle_share: float  # share of the time in which a sampler's device is idle, averaged over the samplers
    drain_share: float  # share of the time that the learner waits for sampling to end before it publishes
    at_work: Mapping[Overhead, float]  # share of the time in which each part is busy

    @property
    def first(self) -> Overhead:
        """The part with the highest load, which saturates first if the load on all parts grows by the same factor."""
        return max(OVERHEADS, key=lambda name: self.at_work[name])

    @property
    def headroom(self) -> float:
        """The factor by which steps could become faster until `first` saturates; infinite if events cost nothing."""
        share = self.at_work[self.first]
        return 1 / share if share else math.inf


def simulate(workload: Workload, preset: Preset, cluster: Cluster | None = None) -> Outcome:
    """Simulate a run with the schedule ``preset``. The result is deterministic.

    Without a ``cluster``, sampler and learner share one device, and events cost nothing. The function starts an event
    loop, so it cannot be called from a coroutine.
    """
    collecting = gc.isenabled()
    gc.disable()  # the simulation makes no reference cycles, and garbage collection would take a quarter of its time
    try:
        return virtual_time.run(_simulate(workload, preset, cluster))
    finally:
        if collecting:
            gc.enable()


def average(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the means over the outcomes of one schedule with several seeds, and the largest of their maximum ages."""
    averaged = _mean(outcomes)
    return replace(averaged, staleness_max=max(outcome.staleness_max for outcome in outcomes))


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, int | float):
        return sum(values) / len(values)
    if isinstance(first, Mapping):
        return {name: _mean([value[name] for value in values]) for name in first}
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        return type(first)(**{name: _mean([getattr(value, name) for value in values]) for name in names})
    return first


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
    # In the last steps of a run less work overlaps, because no further groups are sampled. If they shall not count, the
    # run gets more steps, and is interrupted after ``workload.steps``.
    total_steps = workload.steps + (0 if workload.whole else schedule.staleness + 1)
    controller = StalenessController(schedule, total_steps)
    machines = Machines(cluster or Cluster(), workload, clock)

    order = training_order = make_order(workload.first, lambda: controller.ahead)

    def order_with_evaluation_first() -> Sequence[Work]:
        return "evaluate", *(work for work in training_order() if work != "evaluate")

    if workload.evaluation == "inline":  # the training loop waits for an inline evaluation, so it has priority
        order = order_with_evaluation_first
    device = Device(order, clock)
    samplers = [device]
    if machines.cluster.placement == "disaggregated":
        samplers = [Device(order, clock) for _ in range(machines.cluster.engines)]
    service = Service(device, machines, whole=schedule.chunk == schedule.batch)
    learner = Learner(machines.cluster.learning(workload), device)
    sampler = Sampler(samplers, learner, machines, inflight=schedule.inflight)
    observer = _Observer(device, samplers, learner, machines)
    tasks = [Task(f"task-{number}") for number in range(workload.batch)]
    run = Run(
        seed=workload.seed,
        total_steps=total_steps,
        settings=settings,
        player=cast(Any, Player(sampler, machines)),
        rewards=service,
        learner=cast(Any, learner),
        plan=Plan(TaskStream(tasks, workload.group, workload.seed), schedule.batch),
        make_batch=cast(Any, learner.prepare),
        evaluator=Evaluator(samplers, service, machines),
        checkpoints=cast(Any, _NoCheckpoints()),
        checkpoint_every=0,
        evaluate_every=workload.evaluate_every,
        observer=cast(Any, observer),
        timeline=Timeline(clock=clock),
        controller=controller,
        clock=clock,
    )
    if not workload.whole:
        observer.interrupt = run.interruption.interrupt
    await train(run)
    if workload.whole:
        observer.on_end()
    return observer.outcome(preset, service, of_cluster=cluster is not None)


class _NoCheckpoints:
    def save(self, *_: Any) -> None:
        pass


class _Observer:
    """The simulated `Observer`. It reads all counters after each step, and interrupts the run after the last one."""

    def __init__(self, device: Device, samplers: Sequence[Device], learner: Learner, machines: Machines) -> None:
        self._device, self._samplers, self._learner, self._machines = device, samplers, learner, machines
        self._workload = machines.workload
        # For each step, the values of all counters at its end, and the mean and maximum age of its groups.
        self._readings: list[dict[str, float]] = []
        self.interrupt: Callable[[], None] = lambda: None

    def on_batch(self, groups: Sequence[Group], batch: Any) -> None:
        pass

    def on_step(self, step: int, groups: Sequence[Group], metrics: Metrics, dropped: Sequence[Group] = ()) -> None:
        ages = {"age_mean": metrics["schedule/staleness_mean"], "age_max": metrics["schedule/staleness_max"]}
        self._readings.append({**self._read(), **ages})
        if step == self._workload.steps:
            self.interrupt()

    def on_end(self) -> None:
        """Read the counters of the last step again, because the last evaluation ends after it."""
        self._readings[-1] |= self._read()

    def _read(self) -> dict[str, float]:
        busy_s, reward_wait_s = self._device.read_times()
        return {
            "now_s": self._machines.clock(),
            "busy_s": busy_s,
            "reward_wait_s": reward_wait_s,
            "calls": self._learner.calls,
            "sampling_s": sum(device.read_times()[0] for device in self._samplers),
            "drained_s": self._machines.drained_s,
            **self._machines.at_work,
        }

    def outcome(self, preset: Preset, service: Service, *, of_cluster: bool) -> Outcome:
        workload, count = self._workload, self._workload.counted
        warm = workload.steps - count
        counted = self._readings[warm:]
        before = self._readings[warm - 1] if warm else dict.fromkeys(counted[-1], 0.0)
        grown = {name: value - before[name] for name, value in counted[-1].items()}
        seconds = grown["now_s"]
        # When the run ends, rewards of the samples of the last two versions may be pending.
        answered = [version for version in sorted(service.times) if version < workload.steps - 2]
        versions = [version for version in answered if version >= warm] or answered[-1:]
        reward_s = sum(last - first for first, last in (service.times[version] for version in versions))
        cluster = None
        if of_cluster:
            tokens = workload.samples * self._machines.cluster.tokens
            cluster = ClusterOutcome(
                groups_per_s=workload.batch * count / seconds,
                tokens_per_s=tokens * count / seconds,
                sampler_idle_share=1 - grown["sampling_s"] / len(self._samplers) / seconds,
                drain_share=grown["drained_s"] / seconds,
                at_work={name: grown[name] / seconds for name in OVERHEADS},
            )
        return Outcome(
            schedule=preset,
            step_s=seconds / count,
            idle_share=1 - grown["busy_s"] / seconds,
            reward_wait_s=grown["reward_wait_s"] / count,
            staleness_mean=sum(reading["age_mean"] for reading in counted) / count,
            staleness_max=max(reading["age_max"] for reading in counted),
            calls=grown["calls"] / count,
            reward_s=reward_s / len(versions),
            cluster=cluster,
        )
