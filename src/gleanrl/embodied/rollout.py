"""The sampling side of an embodied run. `RolloutWorker` records trajectories, and `evaluate` measures a policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer import TensorTrajectory
from gleanrl.embodied.chunks import Progress
from gleanrl.embodied.networks import Actor
from gleanrl.utils.seeding import derive

if TYPE_CHECKING:
    from gleanrl.embodied.environments import Environments

Policy = Callable[[Tensor], tuple[Tensor, Tensor]]  # observations [B, D] -> actions [B, C * A], log-probs [B]


@dataclass(frozen=True)
class Weights:
    """The weights of a policy that the learner has published for sampling."""

    version: int  # number of steps of the run before these weights were published
    state: Mapping[str, Tensor]  # state dict of an `Actor`, on the CPU


@dataclass(frozen=True)
class Rollout:
    """A trajectory of all environments, with the information about it that the learner and the metrics need."""

    number: int
    version: int  # version of the policy that acted
    trajectory: TensorTrajectory
    progress: Sequence[Progress]  # states of the environments after the trajectory
    returns: tuple[float, ...] = ()  # returns of the episodes that ended in the trajectory
    lengths: tuple[int, ...] = ()  # lengths of these episodes, in environment steps
    started: float = 0.0  # when sampling began, in seconds of `time.perf_counter`
    ended: float = 0.0  # when sampling ended, on the same clock


class RolloutWorker:
    """Samples trajectories by stepping environments with its own copy of the policy.

    Args:
        environments: the environments. No other worker may step them.
        actor: the policy's network, into which `load` loads published weights.
        chunk_steps: T, the number of chunk steps in a trajectory.
        warmup: number of trajectories at the start whose actions are random.
        seed: seed of the random draws of all trajectories.
        progress: states to which the environments are restored; None: they start their first episodes.
    """

    def __init__(
        self,
        environments: Environments,
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
        """Load ``weights`` into the policy that samples the following trajectories."""
        self.actor.load_state_dict(weights.state)
        self.version = weights.version

    def collect(self, number: int) -> Rollout:
        """Sample trajectory ``number``: T chunk steps of all environments.

        Its random draws depend only on the worker's seed and ``number``, so a resumed run repeats them.
        """
        generator = torch.Generator().manual_seed(derive(self.seed, "rollout", number))
        width, at_random = self.actor.actions, number < self.warmup

        def act(obs: Tensor) -> tuple[Tensor, Tensor]:
            if at_random:
                actions = 2 * torch.rand(len(obs), width, generator=generator) - 1
                return actions, torch.full((len(obs),), -width * math.log(2))
            return self.actor.sample(obs, torch.randn(len(obs), width, generator=generator))

        return self.record(act, number, self.version)

    @torch.no_grad()
    def record(self, policy: Policy, number: int, version: int) -> Rollout:
        """Sample a trajectory of T chunk steps with ``policy`` instead of the worker's own.

        ``version`` is stored with each chunk step as the version of the policy's weights. ``number`` becomes the
        `Rollout.number`.
        """
        environments, started = self.environments, perf_counter()
        shape = (self.chunk_steps, environments.count)
        obs, next_obs = (np.empty((*shape, environments.obs_size), np.float32) for _ in range(2))
        actions = np.empty((*shape, environments.action_size), np.float32)
        logprobs, rewards = np.empty((*shape, 1), np.float32), np.empty((*shape, environments.chunk), np.float32)
        terminations, truncations = (np.empty((*shape, environments.chunk), np.bool_) for _ in range(2))
        returns: list[float] = []
        lengths: list[int] = []
        for t in range(self.chunk_steps):
            acted, logprob = policy(torch.from_numpy(self._obs))
            done = environments.step(acted.numpy())
            obs[t], actions[t], logprobs[t, :, 0] = self._obs, acted.numpy(), logprob.numpy()
            next_obs[t], rewards[t] = done.next_obs, done.rewards
            terminations[t], truncations[t] = done.terminations, done.truncations
            self._obs = done.obs
            returns += done.returns
            lengths += done.lengths
        trajectory = TensorTrajectory(
            max_episode_length=environments.max_episode_steps,
            model_weights_id=str(version),
            actions=torch.from_numpy(actions),
            rewards=torch.from_numpy(rewards),
            terminations=torch.from_numpy(terminations),
            truncations=torch.from_numpy(truncations),
            dones=torch.from_numpy(terminations | truncations),
            prev_logprobs=torch.from_numpy(logprobs),
            versions=torch.full((*shape, 1), float(version)),
            curr_obs={"states": torch.from_numpy(obs)},
            next_obs={"states": torch.from_numpy(next_obs)},
        )
        progress = environments.progress()
        return Rollout(number, version, trajectory, progress, tuple(returns), tuple(lengths), started, perf_counter())

    def close(self) -> None:
        """Close the environments."""
        self.environments.close()


@torch.no_grad()
def evaluate(
    act: Callable[[Tensor], Tensor], environments: Environments, max_chunk_steps: int = 100_000
) -> dict[str, float]:
    """Return the mean return and the mean length of one episode per environment, as metrics.

    The metrics are ``eval/return``, ``eval/length`` in environment steps and, if there are several environments, the
    bounds of the return's 95 % confidence interval, ``eval/return_low`` and ``eval/return_high``.

    Args:
        act: function from observations [B, D] to actions [B, C * A] in [-1, 1].
        environments: the environments, which are reset first.
        max_chunk_steps: limit on the chunk steps of an episode. An episode that has not ended by then counts with its
            return so far.
    """
    obs = environments.reset()
    returns, lengths = np.zeros(environments.count), np.zeros(environments.count, int)
    running = np.ones(environments.count, bool)
    for _ in range(max_chunk_steps):
        done = environments.step(act(torch.from_numpy(obs)).numpy())
        ends = done.terminations | done.truncations
        ended = ends.any(axis=1)
        acted = np.where(ended, ends.argmax(axis=1) + 1, ends.shape[1])
        returns += running * done.rewards.sum(axis=1)
        lengths += running * acted
        running &= ~ended
        if not running.any():
            break
        obs = done.obs
    error = 1.96 * returns.std(ddof=1) / math.sqrt(len(returns)) if len(returns) > 1 else math.nan
    mean = float(returns.mean())
    interval = {"eval/return_low": mean - error, "eval/return_high": mean + error} if len(returns) > 1 else {}
    return {"eval/return": mean, **interval, "eval/length": float(lengths.mean())}
