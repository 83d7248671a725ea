"""What a step of training is made of, as `gleanrl simulate` takes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from gleanrl.simulate.latency import Latency
from gleanrl.utils.errors import UserError

Preset = Literal["sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async"]
PRESETS: tuple[Preset, ...] = ("sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async")


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step is made of. Times are seconds of the device for a whole batch, or of the reward service."""

    g: float = 40.0
    """Generating a batch."""
    logprobs: float = 45.0
    """The pass for old log-probs; 0 where the sampler's are used."""
    reference: float = 36.0
    """The pass for the reference policy's log-probs."""
    train: float = 117.0
    """Training on a batch in one call of the learner."""
    call: float = 0.0
    """What each further call of the learner adds, for loading and offloading."""
    samples: int = 5120
    """Trajectories a step."""
    group: int = 5
    """Trajectories a group."""
    latency: Latency = field(default_factory=lambda: Latency.parse("uniform:1:40"))
    """Of one reward."""
    concurrency: int = 256
    """Rewards that the service works on at once."""
    minibatches: int = 4
    """Chunks a step that the pipelined schedules cut a batch into."""
    adaptive: bool = False
    """Train on all chunks that are ready at once."""
    staleness: int = 2
    """Bound of bounded_async, in steps."""
    bursts: int = 20
    """Generating takes the device so many times; an equal share of the trajectories ends with each and is sent to be
    scored. 1: all are sent when the whole batch has been generated."""
    microbatches: int = 20
    """Training on a batch takes the device so many times, and so does a pass over it."""
    passes: Literal["consumed", "generated"] = "consumed"
    """When log-probs are computed: for a chunk before it is trained on, or for a batch once it is generated."""
    service: Literal["stream", "batch", "verl"] = "stream"
    """stream: any reward may be asked for at any time. batch: what one burst ended is scored before the next. verl:
    the same, and unless a batch is trained on in chunks, an evaluation waits in that line too."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 = none."""
    evaluation_g: float = 27.0
    """Generating for an evaluation."""
    evaluation_samples: int = 1319
    """Rewards of an evaluation; they have ``concurrency`` places of their own."""
    evaluation: Literal["beside", "inline"] = "beside"
    """beside: everything goes on meanwhile. inline: nothing is generated or trained on until its rewards are in."""
    first: Literal["due", "sample", "train"] = "due"
    """Who gets the device where both could: see ``device_first`` of the settings of a schedule."""
    steps: int = 12
    """Steps simulated; the first quarter or more warms up and does not count."""
    seed: int = 0
    """Of the latencies."""

    def __post_init__(self) -> None:
        for name in ("g", "logprobs", "reference", "train", "call", "evaluation_g"):
            if not 0 <= getattr(self, name) < 1e9:
                raise UserError(f"{_option(name)} is {getattr(self, name):g}: it must be 0 or more seconds")
        for name in ("samples", "group", "concurrency", "minibatches", "bursts", "microbatches", "evaluation_samples"):
            if getattr(self, name) < 1:
                raise UserError(f"{_option(name)} is {getattr(self, name)}: it must be 1 or more")
        for name, least in (("staleness", 0), ("evaluate_every", 0), ("steps", 4)):
            if getattr(self, name) < least:
                raise UserError(f"{_option(name)} is {getattr(self, name)}: it must be {least} or more")
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

    @property
    def batch(self) -> int:
        """Groups a step."""
        return self.samples // self.group

    @property
    def evaluations(self) -> float:
        """Evaluations a step."""
        return 1 / self.evaluate_every if self.evaluate_every else 0.0

    @property
    def counted(self) -> int:
        """The last steps, up to three quarters of all, that hold whole evaluations and are even in number, because a
        schedule one step off may take two steps in one round trip."""
        most = self.steps - self.steps // 4
        return most - most % math.lcm(2, self.evaluate_every or 1)

    @property
    def device_s(self) -> float:
        """Seconds of work for the device, a step in one call of the learner."""
        own = self.g + self.logprobs + self.reference + self.train
        return own + self.evaluation_g * self.evaluations

    @property
    def service_s(self) -> float:
        """Seconds a step that the reward service is busy for, with every place taken (Little's law)."""
        return self.samples * self.latency.mean / self.concurrency

    @property
    def bound_s(self) -> float:
        """No schedule is faster than this, but for the luck of the latencies."""
        return max(self.device_s, self.service_s)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
