"""The sampling side: a policy acts in environments, and the results become trajectories."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer import TensorTrajectory
from gleanrl.embodied.chunks import ChunkStep, Floats, Progress, VectorEnvironments
from gleanrl.embodied.networks import Actor
from gleanrl.utils.seeding import derive

Policy = Callable[[Tensor], tuple[Tensor, Tensor]]  # observations [B, D] -> actions [B, C * A], log-probs [B]


@dataclass(frozen=True)
class Weights:
    """A published policy."""

    version: int
    state: Mapping[str, Tensor]  # of an `Actor`, on the CPU


@dataclass(frozen=True)
class Rollout:
    """A trajectory for the learner."""

    number: int
    version: int  # of the policy that acted
    trajectory: TensorTrajectory
    progress: Sequence[Progress]  # of the environments after it
    returns: tuple[float, ...] = ()  # of the episodes that ended in it
    lengths: tuple[int, ...] = ()
    started: float = 0.0  # seconds of `time.perf_counter`
    ended: float = 0.0


class RolloutWorker:
    """Steps environments with its own copy of the policy.

    Args:
        environments: used by this worker only.
        actor: the policy's network; `load` sets its weights.
        chunk_steps: T of a trajectory.
        warmup: number of first trajectories with random actions.
        seed: of the random draws of each trajectory.
        progress: state of the environments; None: the start of their first episodes.
    """

    def __init__(
        self,
        environments: VectorEnvironments,
        actor: Actor,
        *,
        chunk_steps: int,
        warmup: int,
        seed: int,
        progress: Sequence[Progress] | None = None,
    ) -> None:
        self.environments, self.actor = environments, actor
        self.chunk_steps, self.warmup, self.seed = chunk_steps, warmup, seed
        self.version = -1
        self._obs = environments.reset(progress)

    def load(self, weights: Weights) -> None:
        """Use these weights from now on."""
        self.actor.load_state_dict(weights.state)
        self.version = weights.version

    def collect(self, number: int) -> Rollout:
        """Sample trajectory ``number``: T chunk steps of all environments, with draws of its own."""
        generator = torch.Generator().manual_seed(derive(self.seed, "rollout", number))
        at_random = number < self.warmup
        return self.record(self._random(generator) if at_random else self._policy(generator), number, self.version)

    @torch.no_grad()
    def record(self, policy: Policy, number: int, version: int) -> Rollout:
        """Sample trajectory ``number`` with any policy."""
        environments, started = self.environments, perf_counter()
        steps = Steps(self.chunk_steps, environments)
        returns: list[float] = []
        lengths: list[int] = []
        for t in range(self.chunk_steps):
            actions, logprobs = policy(torch.from_numpy(self._obs))
            done = environments.step(actions.numpy())
            steps.put(t, self._obs, actions.numpy(), logprobs.numpy(), done)
            self._obs = done.obs
            returns += done.returns
            lengths += done.lengths
        trajectory = steps.trajectory(version, environments.max_episode_steps)
        progress = environments.progress()
        return Rollout(number, version, trajectory, progress, tuple(returns), tuple(lengths), started, perf_counter())

    def _policy(self, generator: torch.Generator) -> Policy:
        def act(obs: Tensor) -> tuple[Tensor, Tensor]:
            return self.actor.sample(obs, torch.randn(len(obs), self.actor.actions, generator=generator))

        return act

    def _random(self, generator: torch.Generator) -> Policy:
        def act(obs: Tensor) -> tuple[Tensor, Tensor]:
            actions = 2 * torch.rand(len(obs), self.actor.actions, generator=generator) - 1
            return actions, torch.full((len(obs),), -self.actor.actions * math.log(2))

        return act

    def close(self) -> None:
        self.environments.close()


@dataclass
class Steps:
    """Arrays ``[T, B, ...]`` that are filled step by step and become a trajectory."""

    count: int  # T
    environments: VectorEnvironments
    _arrays: dict[str, np.ndarray[Any, Any]] = field(init=False)

    def __post_init__(self) -> None:
        leading, own = (self.count, self.environments.count), self.environments
        flags = dict.fromkeys(("terminations", "truncations"), ((own.chunk,), np.bool_))
        shapes = {
            "obs": ((own.obs_size,), np.float32),
            "next_obs": ((own.obs_size,), np.float32),
            "actions": ((own.action_size,), np.float32),
            "logprobs": ((1,), np.float32),
            "rewards": ((own.chunk,), np.float32),
            **flags,
        }
        self._arrays = {name: np.empty((*leading, *shape), dtype) for name, (shape, dtype) in shapes.items()}

    def put(self, t: int, obs: Floats, actions: Floats, logprobs: Floats, done: ChunkStep) -> None:
        arrays = self._arrays
        arrays["obs"][t], arrays["actions"][t], arrays["logprobs"][t, :, 0] = obs, actions, logprobs
        arrays["next_obs"][t], arrays["rewards"][t] = done.next_obs, done.rewards
        arrays["terminations"][t], arrays["truncations"][t] = done.terminations, done.truncations

    def trajectory(self, version: int, max_episode_length: int) -> TensorTrajectory:
        found = {name: torch.from_numpy(array) for name, array in self._arrays.items()}
        return TensorTrajectory(
            max_episode_length=max_episode_length,
            model_weights_id=str(version),
            actions=found["actions"],
            rewards=found["rewards"],
            terminations=found["terminations"],
            truncations=found["truncations"],
            dones=found["terminations"] | found["truncations"],
            prev_logprobs=found["logprobs"],
            versions=torch.full((self.count, self.environments.count, 1), float(version)),
            curr_obs={"states": found["obs"]},
            next_obs={"states": found["next_obs"]},
        )
