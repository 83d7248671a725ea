"""Where the parts of a run live on Ray; `gleanrl.runtime.ray` reads it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gleanrl.config.settings import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Settings


class RaySettings(Settings):
    """A run whose samplers, environments, reward agent and learner are Ray actors; docs/howto/ray.md."""

    enabled: bool = False
    """`--runtime ray` sets it."""
    address: str | None = None
    """Of the cluster to join, which `--ray-address` sets ("auto": the one that this machine is part of). None starts
    one on this machine for the run."""
    samplers: Positive = 1
    environments: NonNegative = 1
    """Actors that play the environments, each with `environment.workers` worker processes; 0 plays them in the
    driver."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """colocated: sampler and learner actors share one bundle of resources and take turns on its device, one GPU at
    most. disaggregated: each has its own and all work at once."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How Ray lays disaggregated actors over the nodes."""
    sampler_cpus: NonNegativeFloat = 1.0
    sampler_gpus: NonNegativeFloat | None = None
    """Of each sampler. None: 1 on a cluster with GPUs, or, colocated, an equal share of one GPU."""
    learner_cpus: NonNegativeFloat | None = None
    """None: 1 for each of `learner.ranks`."""
    learner_gpus: NonNegativeFloat | None = None
    """None: as of a sampler, for each of `learner.ranks`."""
    environment_cpus: NonNegativeFloat = 1.0
    """Of each environment actor."""
    reward_cpus: NonNegativeFloat = 0.0
    transfer: Literal["auto", "memory", "broadcast", "disk"] = "auto"
    """How weights reach the samplers. memory: Ray's object store, which the actors of a node share. broadcast: NCCL
    between GPUs, else gloo. disk: a file in the run folder. auto: memory on one node, broadcast between several, and
    disk where that fails."""
    max_restarts: NonNegative = 3
    """How often one actor may die and be started again; one that dies once more ends the run."""
    wait_s: PositiveFloat = 300.0
    """How long to wait for the resources of the cluster."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Where the learner waits for the samplers of a broadcast; 0 takes a free one."""
