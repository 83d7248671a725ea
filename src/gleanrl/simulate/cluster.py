"""On how many machines a simulated step runs, and what each event there costs; with all defaults, on one device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from gleanrl.simulate.workload import Workload
from gleanrl.utils.errors import UserError

Overhead = Literal["driver", "players", "agent", "pool", "transfer"]
OVERHEADS: tuple[Overhead, ...] = get_args(Overhead)
"""What a larger cluster may saturate, beside its samplers, its learners and the reward service."""

_MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class Cluster:
    """Samplers and learners, what joins them, what fails, and what each event costs the processes that see it."""

    samplers: int = 1
    """Engines that generate. ``g`` of the workload is the seconds in which one alone, at speed 1, generates a batch."""
    sampler_speeds: tuple[float, ...] = (1.0,)
    """Of the samplers, one after the other and again from the first; 1 = as ``g`` says."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """colocated: all samplers lie on the learners' devices and take turns with them. disaggregated: on their own."""
    slots: int = 0
    """Trajectories that one sampler decodes at once: the largest burst; 0 = its share of a batch / bursts."""
    floor: float = 0.0
    """Share of a full burst's time that a burst takes however few are in it; 0 = in proportion to them."""
    learners: int = 1
    """Data-parallel ranks; log-prob passes and training of the workload are the seconds of one alone."""
    efficiency: float = 1.0
    """Share of their ideal speed-up that the learners reach, without the all-reduce."""
    gradients: float = 0.0
    """GB that an optimizer update reduces over the learners, in a ring."""
    network: float = 25.0
    """GB/s between two learners."""
    updates: int = 1
    """Optimizer updates a step."""
    weights: float = 0.0
    """GB of a publication."""
    bandwidth: float = 25.0
    """GB/s into a sampler and out of whoever sends to it."""
    broadcast: Literal["tree", "star", "chain"] = "tree"
    """tree: who has the weights sends them on, so that their holders double. star: the learner sends to one sampler
    after the other. chain: all pass on what they get at once. Samplers on shared devices each copy their own."""
    overlap: bool = False
    """Samplers generate on while weights travel. The loop waits for a publication either way."""
    driver_trajectory: float = 0.0
    """Microseconds of the driver's processor for a trajectory."""
    driver_group: float = 0.0
    """Microseconds of the driver's processor for a group."""
    driver_turn: float = 0.0
    """Microseconds of the driver's processor for a turn."""
    turns: int = 1
    """Turns a trajectory."""
    players: int = 0
    """Processes that play the episodes, and so have the turns' work; 0 = the driver does."""
    agent_request: float = 0.0
    """Microseconds of the reward agent's processor for a request."""
    agent: Literal["own", "driver"] = "own"
    """Process of the reward agent: one of its own, or the driver's."""
    pool_add: float = 0.0
    """Microseconds for each fresh trajectory that the experience pool observes; in the driver's process."""
    pool_sample: float = 0.0
    """Microseconds for each replayed trajectory that the pool chooses and reads; in the driver's process."""
    replayed: int = 0
    """Replayed trajectories a step."""
    sampler_mtbf: float = 0.0
    """Mean hours between two failures of one sampler; 0 = never. What it was generating is generated again."""
    environment_mtbf: float = 0.0
    """Mean hours of episodes between two failures of an environment; 0 = never. The episode is played again."""
    agent_mtbf: float = 0.0
    """Mean hours between two failures of the reward agent; 0 = never. Requests in flight are asked again."""
    learner_mtbf: float = 0.0
    """Mean hours between two failures of one learner; 0 = never. Each sets the run back to its last checkpoint."""
    restart: float = 60.0
    """Seconds until a sampler, the reward agent or the learners are back."""
    environment_restart: float = 5.0
    """Seconds until an environment is back."""
    checkpoint_every: int = 10
    """Steps between checkpoints."""
    checkpoint: float = 0.0
    """Seconds that the loop waits for a checkpoint."""
    tokens: int = 0
    """Sampled tokens a trajectory, for the tokens a second."""

    def __post_init__(self) -> None:
        for name in ("samplers", "learners", "updates", "turns", "checkpoint_every"):
            _check(getattr(self, name) >= 1, name, self, "1 or more")
        for name in ("slots", "players", "replayed", "tokens"):
            _check(getattr(self, name) >= 0, name, self, "0 or more")
        for name in _AMOUNTS:
            _check(0 <= getattr(self, name) < 1e9, name, self, "0 or more")
        for name in ("network", "bandwidth"):
            _check(0 < getattr(self, name) < math.inf, name, self, "more than 0 GB/s")
        _check(0 < self.efficiency <= 1, "efficiency", self, "more than 0 and at most 1")
        _check(0 <= self.floor <= 1, "floor", self, "between 0 and 1")
        if not self.sampler_speeds or not all(0 < speed < math.inf for speed in self.sampler_speeds):
            raise UserError("--sampler-speeds must be numbers over 0 with commas between")
        if self.floor and not self.slots:
            raise UserError("--floor is a share of a full burst: say how many trajectories that is with --slots")

    @property
    def engines(self) -> tuple[float, ...]:
        """Speeds of the samplers that work apart: on shared devices they work as one."""
        speeds = [self.sampler_speeds[index % len(self.sampler_speeds)] for index in range(self.samplers)]
        return tuple(speeds) if self.placement == "disaggregated" else (sum(speeds),)

    def burst(self, workload: Workload) -> int:
        """The most trajectories in a burst of one of the `engines`."""
        if self.slots:
            return self.slots * self.samplers // len(self.engines)
        return -(-workload.samples // (workload.bursts * len(self.engines)))

    def burst_s(self, workload: Workload, count: int, speed: float) -> float:
        """Seconds in which an engine generates so many at once."""
        least = self.floor * self.burst(workload)
        return workload.g * (least + (1 - self.floor) * count) / workload.samples / speed

    def learning(self, workload: Workload) -> Workload:
        """The workload with the times that all learners take together."""
        if self.learners == 1:
            return workload
        rate = self.learners * self.efficiency
        return replace(
            workload,
            train=workload.train / rate + self.updates * self.reduce_s,
            logprobs=workload.logprobs / rate,
            reference=workload.reference / rate,
        )

    @property
    def reduce_s(self) -> float:
        """Seconds of an all-reduce: a ring sends 2 (n - 1) / n of the bytes over each link."""
        return 2 * (self.learners - 1) / self.learners * self.gradients / self.network

    @property
    def transfer_s(self) -> float:
        """Seconds from the first byte of a publication to the last."""
        if self.placement == "colocated" or self.broadcast == "chain":
            rounds = 1
        else:
            rounds = self.samplers if self.broadcast == "star" else math.ceil(math.log2(self.samplers + 1))
        return rounds * self.weights / self.bandwidth

    @property
    def trajectory_s(self) -> float:
        """Seconds of the driver for a trajectory, with its turns unless others play."""
        return _MICRO * self.driver_trajectory + (0.0 if self.players else self.episode_s)

    @property
    def episode_s(self) -> float:
        """Seconds of whoever plays for a trajectory's turns."""
        return _MICRO * self.turns * self.driver_turn

    @property
    def group_s(self) -> float:
        """Seconds of the driver for a group beside its trajectories."""
        return _MICRO * self.driver_group

    @property
    def request_s(self) -> float:
        """Seconds of the reward agent for a request."""
        return _MICRO * self.agent_request

    def pool_s(self, workload: Workload) -> float:
        """Seconds of the pool for a step."""
        return _MICRO * (workload.samples * self.pool_add + self.replayed * self.pool_sample)

    def demand(self, workload: Workload) -> Mapping[str, float]:
        """On paper: seconds a step that each part is at work for, at its best and without failures."""
        scored = workload.samples + workload.evaluation_samples * workload.evaluations
        generating = workload.g + workload.evaluation_g * workload.evaluations
        learning = self.learning(workload)
        work = {
            "samplers": generating / sum(self.engines),
            "learners": learning.logprobs + learning.reference + learning.train,
            "rewards": workload.service_s,
            "driver": scored * self.trajectory_s + workload.batch * self.group_s,
            **({"players": scored * self.episode_s / self.players} if self.players else {}),
            "agent": scored * self.request_s,
            "pool": self.pool_s(workload),
            "transfer": self.transfer_s,
        }
        if self.placement == "colocated":
            return {"devices": work.pop("samplers") + work.pop("learners"), **work}
        return work

    def bound_s(self, workload: Workload) -> float:
        """No schedule is faster than this, but for the luck of the latencies."""
        demand = dict(self.demand(workload))
        demand["driver's process"] = demand["driver"] + demand["pool"]
        if self.agent == "driver":
            demand["driver's process"] += demand["agent"]
        return max(demand.values())


_AMOUNTS = (
    *("gradients", "weights", "driver_trajectory", "driver_group", "driver_turn", "agent_request", "pool_add"),
    *("pool_sample", "sampler_mtbf", "environment_mtbf", "agent_mtbf", "learner_mtbf", "restart", "checkpoint"),
    "environment_restart",
)


def _check(holds: bool, name: str, cluster: Cluster, must: str) -> None:
    if not holds:
        raise UserError(f"--{name.replace('_', '-')} is {getattr(cluster, name):g}: it must be {must}")


_HOPELESS = 30.0  # failures in a stretch of work that must be without any: one in 10**13 is


def expected_loss_s(length_s: float, since_s: float, rate: float, restart_s: float) -> float:
    """Mean seconds that failures add to ``length_s`` of work that begins ``since_s`` after a checkpoint.

    Failures come at ``rate`` a second. Each costs ``restart_s`` and all work since the checkpoint, which may fail again
    (Daly 2006: so much work from a checkpoint takes ``(1 / rate + restart_s) * (exp(rate * work) - 1)`` seconds).
    Raises `UserError` where they come so often that the next checkpoint is as good as never reached.
    """
    if not rate:
        return 0.0
    if rate * (since_s + length_s) > _HOPELESS:
        raise UserError(
            f"learners that fail every {1 / rate:.3g} s never finish the {since_s + length_s:.3g} s of work from one "
            "checkpoint to the next; raise --learner-mtbf, or lower --checkpoint-every"
        )
    again_s = (1 / rate + restart_s) * math.expm1(rate * (since_s + length_s))
    fails = -math.expm1(-rate * length_s)
    return fails / rate + fails * (restart_s + again_s) - length_s
