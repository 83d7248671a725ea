"""Settings of `gleanrl simulate`: the work of a training step (`Workload`) and the cluster that does it (`Cluster`).

Each field is an option of the command line, and the docstring under the field is the option's help text. A time is the
number of seconds that one device takes for a whole batch, unless the field's docstring defines it otherwise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Literal, Self, get_args

from pydantic import BeforeValidator, Field, InstanceOf, PlainSerializer, model_validator

from gleanrl.utils.errors import UserError
from gleanrl.utils.settings import Settings

Preset = Literal["sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
_MAX_SIGMA = 10.0  # a time one standard deviation above the median is then 22,000 times as long
FORMS = "constant:SECONDS, uniform:LOW:HIGH, exponential:MEAN, lognormal:MEDIAN:SIGMA, or a file of seconds, one a line"


@dataclass(frozen=True, slots=True)
class Latency:
    """The distribution of the time that one reward takes, in seconds."""

    name: str  # the text from which the distribution was read
    mean: float
    draw: Callable[[random.Random], float]  # draws a time with the given generator
    # Whether the standard deviation is above the mean. Rare long times then decide the result of a simulation, so that
    # results with different seeds differ much.
    heavy_tailed: bool = False

    @classmethod
    def parse(cls, text: str) -> Latency:
        """Read a distribution from a text in one of the `FORMS`, such as "uniform:1:40".

        Raises:
            UserError: the text has another form, or the file that it names contains no valid times.
        """
        kind, *words = text.split(":")
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            numbers = []
        if all(math.isfinite(number) and number >= 0 for number in numbers):
            match kind, numbers:
                case "constant", [seconds]:
                    return cls(text, seconds, lambda r: seconds)
                case "uniform", [low, high] if low <= high:
                    return cls(text, (low + high) / 2, lambda r: r.uniform(low, high))
                case "uniform", [low, high]:
                    raise UserError(f"--latency is {text!r}: {low:g} s is more than {high:g} s")
                case "exponential", [mean]:
                    return cls(text, mean, lambda r: r.expovariate(1 / mean) if mean else 0.0)
                case "lognormal", [median, sigma] if sigma > _MAX_SIGMA:
                    raise UserError(
                        f"--latency is {text!r}: SIGMA is the standard deviation of the logarithm of the seconds, "
                        f"at most {_MAX_SIGMA:g}"
                    )
                case "lognormal", [median, sigma]:
                    mean = median * math.exp(sigma**2 / 2)
                    heavy = sigma**2 > math.log(2)
                    return cls(text, mean, lambda r: median * math.exp(sigma * r.gauss(0.0, 1.0)), heavy)
        if not Path(text).is_file():
            raise UserError(f"--latency is {text!r}: it must be {FORMS}")
        measured: list[float] = []
        for number, line in enumerate(Path(text).read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if not line.strip():
                continue
            try:
                seconds = float(line)
            except ValueError:
                seconds = math.nan
            if not (math.isfinite(seconds) and seconds >= 0):
                raise UserError(f"{text}, line {number}: {line.strip()[:40]!r} is not a number of seconds")
            measured.append(seconds)
        if not measured:
            raise UserError(f"{text} holds no latency: it must hold seconds, one a line")
        mean = fmean(measured)
        return cls(text, mean, lambda r: r.choice(measured), pstdev(measured) > mean)


# The text in each annotation is the placeholder of the option's value in the command's help.
Seconds = Annotated[float, Field(ge=0, lt=1e9), "SECONDS"]
Micros = Annotated[float, Field(ge=0, lt=1e9), "MICROSECONDS"]
Gigabytes = Annotated[float, Field(ge=0, lt=1e9), "GB"]
Bandwidth = Annotated[float, Field(gt=0, allow_inf_nan=False), "GB/S"]
Count = Annotated[int, Field(ge=1), "N"]
CountOrNone = Annotated[int, Field(ge=0), "N"]
LatencyOption = Annotated[
    InstanceOf[Latency],
    BeforeValidator(lambda value: Latency.parse(value) if isinstance(value, str) else value),
    PlainSerializer(lambda latency: latency.name),
    "FORM",
]


class Workload(Settings):
    """The work of one training step, and the time that each kind of work takes."""

    g: Seconds = 40.0
    """time for generating a batch"""
    logprobs: Seconds = 45.0
    """time for computing the old log-probs of a batch; 0 if the log-probs of the sampler are used"""
    reference: Seconds = 36.0
    """time for computing the reference policy's log-probs of a batch"""
    train: Seconds = 117.0
    """time for training on a batch in one call of the learner"""
    call: Seconds = 0.0
    """additional time of each further call of the learner in a step, for loading and offloading"""
    samples: Count = 5120
    """number of trajectories that a step is trained on, called a batch"""
    group: Count = 5
    """number of trajectories in a group"""
    latency: LatencyOption = Latency.parse("uniform:1:40")
    """seconds that one reward takes: constant:SECONDS, uniform:LOW:HIGH, exponential:MEAN, lognormal:MEDIAN:SIGMA, or a
    file of seconds, one per line"""
    concurrency: Count = 256
    """number of rewards that the service computes at the same time for training; the same number again for an
    evaluation"""
    minibatches: Count = 4
    """number of chunks into which the pipelined schedules and bounded_async divide a batch. The learner can train on a
    chunk as soon as its rewards are known"""
    adaptive: bool = False
    """whether one call of the learner trains on all chunks that are ready, instead of a single chunk"""
    staleness: CountOrNone = 2
    """staleness bound of bounded_async, in steps"""
    bursts: Count = 20
    """number of bursts in which a batch is generated. The trajectories of a burst end at the same time, and their
    rewards are then requested"""
    microbatches: Count = 20
    """number of pieces into which training on a batch, or a log-prob pass over it, is divided. On a shared device,
    generating may run between two pieces"""
    passes: Literal["consumed", "generated"] = "consumed"
    """when log-probs are computed. consumed: for each chunk, before the learner trains on it. generated: for each
    burst, once it is generated"""
    service: Literal["stream", "batch", "verl"] = "stream"
    """stream: rewards are computed as they are requested. batch: the rewards of one burst are computed before those of
    the next. verl: like batch, and an evaluation waits in the same queue unless a batch is trained on in chunks"""
    evaluate_every: CountOrNone = 0
    """number of steps between two evaluations; 0 = no evaluations"""
    evaluation_g: Seconds = 27.0
    """time for generating the trajectories of an evaluation"""
    evaluation_samples: Count = 1319
    """number of trajectories of an evaluation, each of which gets a reward"""
    evaluation: Literal["background", "inline"] = "background"
    """background: training continues during an evaluation. inline: the evaluation pauses generating and training"""
    first: Literal["due", "sample", "train"] = "due"
    """which work has priority on a shared device, as the setting schedule.device_first"""
    steps: Annotated[int, Field(ge=4), "N"] = 12
    """number of simulated steps. The results leave out at least the first quarter, which is not in a steady state"""
    whole: bool = False
    """whether the results are means over all steps of a run that ends after --steps. In its first and last steps less
    work overlaps, which matters if the run is short"""
    seed: Annotated[int, "N"] = 0
    """seed of the random latencies"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.counted:
            raise UserError(f"--steps is {self.steps}: too few for an evaluation every {self.evaluate_every}")
        if self.g + self.logprobs + self.reference + self.train + self.latency.mean <= 0:
            raise UserError("a step takes no time at all: give --g, --train or --latency")
        if self.samples % self.group:
            raise UserError(f"--samples {self.samples} is not a multiple of --group {self.group}")
        if self.batch % self.minibatches:
            raise UserError(
                f"--minibatches {self.minibatches} does not divide the {self.batch} groups of a step "
                f"({self.samples} samples / {self.group} a group)"
            )
        return self

    @property
    def batch(self) -> int:
        """Groups per step."""
        return self.samples // self.group

    @property
    def evaluations(self) -> float:
        """Evaluations per step."""
        return 1 / self.evaluate_every if self.evaluate_every else 0.0

    @property
    def counted(self) -> int:
        """Number of steps at the end of the simulation over which results are averaged.

        Unless ``whole`` is set, it is at most three quarters of all steps, because the first steps are not in a steady
        state. It is a multiple of ``evaluate_every``, so that the evaluations have their share in the mean. It is also
        even, because the times of a one-step-off schedule may repeat every two steps.
        """
        if self.whole:
            return self.steps
        most = self.steps - self.steps // 4
        return most - most % math.lcm(2, self.evaluate_every or 1)

    @property
    def device_s(self) -> float:
        """Seconds of device work per step, evaluations included, if the learner is called once in each step."""
        return self.g + self.logprobs + self.reference + self.train + self.evaluation_g * self.evaluations

    @property
    def service_s(self) -> float:
        """Seconds that the reward service takes for the rewards of a step if it is always fully used.

        By Little's law, this is the number of rewards times the mean latency, divided by ``concurrency``.
        """
        return self.samples * self.latency.mean / self.concurrency

    @property
    def bound_s(self) -> float:
        """Lower bound on the mean seconds of a step in any schedule.

        It uses the mean latency, so steps may be slightly shorter if the random latencies are.
        """
        return max(self.device_s, self.service_s)


Overhead = Literal["driver", "players", "agent", "pool", "transfer"]
OVERHEADS: tuple[Overhead, ...] = get_args(Overhead)
"""Parts whose work grows with the number of events, and which may limit a large cluster."""


class Cluster(Settings):
    """The cluster of a simulation: its samplers and learners, the network, and the processor time of each event.

    By default, there is one device, and events take no time.
    """

    samplers: Count = 1
    """number of samplers. --g is the time that a single sampler takes for a batch"""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """colocated: samplers and learners take turns on the same devices. disaggregated: samplers have devices of their
    own"""
    slots: CountOrNone = 0
    """maximum number of trajectories in a burst of a sampler; 0 = the sampler's share of a batch, divided by
    --bursts"""
    floor: Annotated[float, Field(ge=0, le=1), "SHARE"] = 0.0
    """time of a burst with very few trajectories, as a share of the time of a full burst; needs --slots"""
    learners: Count = 1
    """number of data-parallel ranks of the learner. --train, --logprobs and --reference are the times of a single
    rank"""
    efficiency: Annotated[float, Field(gt=0, le=1), "SHARE"] = 1.0
    """speed-up that several learners reach, as a share of the ideal one. The time of the all-reduce of --gradients is
    added"""
    gradients: Gigabytes = 0.0
    """size of the gradients, 4 bytes for each parameter (float32). Each optimizer update waits for one all-reduce of
    them in a ring among the learners; what they exchange while they compute is part of --efficiency"""
    network: Bandwidth = 25.0
    """bandwidth between two learners"""
    updates: Count = 1
    """number of optimizer updates per step"""
    weights: Gigabytes = 0.0
    """size of the weights, which each publication sends to the samplers"""
    bandwidth: Bandwidth = 25.0
    """bandwidth of a transfer of weights, into each sampler and out of each sender"""
    broadcast: Literal["tree", "star", "chain"] = "tree"
    """tree: every part that has the weights sends them on, so that the number of senders doubles each time. star: the
    learner sends to one sampler after the other. chain: each sampler forwards the weights while it receives them.
    Colocated samplers all copy the weights at the same time"""
    overlap: bool = False
    """whether samplers continue to generate while weights are sent to them; the training loop waits for the transfer in
    any case"""
    driver_trajectory: Micros = 0.0
    """the driver's processor time for a trajectory (benchmarks/driver.py)"""
    driver_group: Micros = 0.0
    """the driver's processor time for a group"""
    driver_turn: Micros = 0.0
    """the driver's processor time for a turn"""
    turns: Count = 1
    """number of turns in a trajectory"""
    players: CountOrNone = 0
    """number of player processes, which do the work of --driver-turn; 0 = the driver does it"""
    agent_request: Micros = 0.0
    """the reward agent's processor time for a request, in its own process (benchmarks/reward_agent.py)"""
    pool_add: Micros = 0.0
    """the driver's processor time for storing a fresh trajectory in the experience pool (benchmarks/pool.py)"""
    pool_sample: Micros = 0.0
    """the driver's processor time for reading a replayed trajectory"""
    replayed: CountOrNone = 0
    """number of replayed trajectories per step"""
    tokens: CountOrNone = 0
    """number of sampled tokens in a trajectory, from which tokens per second are computed"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.floor and not self.slots:
            raise UserError("--floor is a share of a full burst: say how many trajectories that is with --slots")
        return self

    @property
    def engines(self) -> int:
        """Number of engines that generate independently.

        It is the number of samplers if they have their own devices. Samplers that share the learners' devices are
        simulated as one fast engine.
        """
        return self.samplers if self.placement == "disaggregated" else 1

    def burst(self, workload: Workload) -> int:
        """Return the largest number of trajectories in a burst of one engine."""
        if self.slots:
            return self.slots * self.samplers // self.engines
        return -(-workload.samples // (workload.bursts * self.engines))

    def burst_s(self, workload: Workload, count: int) -> float:
        """Return the seconds that an engine takes for a burst of ``count`` trajectories."""
        work = self.floor * self.burst(workload) + (1 - self.floor) * count
        return workload.g * work / workload.samples * self.engines / self.samplers

    def learning(self, workload: Workload) -> Workload:
        """Return the workload with the times of training and log-prob passes that all learners together take."""
        if self.learners == 1:
            return workload
        rate = self.learners * self.efficiency
        # A ring all-reduce among n learners sends 2 (n - 1) / n of the bytes over each link.
        reduce_s = 2 * (self.learners - 1) / self.learners * self.gradients / self.network
        return workload.model_copy(
            update={
                "train": workload.train / rate + self.updates * reduce_s,
                "logprobs": workload.logprobs / rate,
                "reference": workload.reference / rate,
            }
        )

    @property
    def transfer_s(self) -> float:
        """Seconds that it takes to send a publication's weights to all samplers."""
        if self.placement == "colocated" or self.broadcast == "chain":
            rounds = 1
        elif self.broadcast == "star":
            rounds = self.samplers
        else:
            rounds = math.ceil(math.log2(self.samplers + 1))
        return rounds * self.weights / self.bandwidth

    @property
    def episode_s(self) -> float:
        """Processor seconds for the turns of a trajectory, in a player process or, if there are none, in the driver."""
        return 1e-6 * self.turns * self.driver_turn

    @property
    def trajectory_s(self) -> float:
        """Processor seconds of the driver for a trajectory. They include the turns if there are no player processes."""
        return 1e-6 * self.driver_trajectory + (0.0 if self.players else self.episode_s)

    def pool_s(self, workload: Workload) -> float:
        """Return the processor seconds of the experience pool per step."""
        return 1e-6 * (workload.samples * self.pool_add + self.replayed * self.pool_sample)

    def demand(self, workload: Workload) -> Mapping[str, float]:
        """Return the seconds per step for which each part of the cluster works, without the time for which it waits."""
        scored = workload.samples + workload.evaluation_samples * workload.evaluations
        learning = self.learning(workload)
        samplers = (workload.g + workload.evaluation_g * workload.evaluations) / self.samplers
        learners = learning.logprobs + learning.reference + learning.train
        colocated = self.placement == "colocated"
        work = {"devices": samplers + learners} if colocated else {"samplers": samplers, "learners": learners}
        work["rewards"] = workload.service_s
        work["driver"] = scored * self.trajectory_s + workload.batch * 1e-6 * self.driver_group
        if self.players:
            work["players"] = scored * self.episode_s / self.players
        work["agent"] = scored * 1e-6 * self.agent_request
        work["pool"] = self.pool_s(workload)
        work["transfer"] = self.transfer_s
        return work

    def bound_s(self, workload: Workload) -> float:
        """Return a lower bound on the mean seconds of a step, which is the load of the busiest part.

        It uses the mean latency, so steps may be slightly shorter if the random latencies are.
        """
        demand = self.demand(workload)
        return max(*demand.values(), demand["driver"] + demand["pool"])  # the pool works in the driver's process
