"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905) on chunk steps sampled from a buffer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from gleanrl.embodied.networks import Actor, Critics
from gleanrl.embodied.settings import LearnerSettings
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive

FIELDS = ("curr_obs.states", "next_obs.states", "actions", "rewards", "terminations", "truncations")
"""Names of the buffer's fields that SAC reads of each chunk step."""


@dataclass(frozen=True)
class Transitions:
    """A batch of N transitions, each of which is one chunk step."""

    obs: Tensor  # [N, D]
    actions: Tensor  # [N, C * A]
    rewards: Tensor  # [N]: sum of gamma^i * reward i over the executed steps i of the chunk
    discounts: Tensor  # [N]: gamma^(number of executed steps), or 0 if the episode terminated
    next_obs: Tensor  # [N, D]

    @classmethod
    def of(cls, batch: Mapping[str, Any], gamma: float, device: torch.device) -> Transitions:
        """Make float32 transitions on ``device`` from a batch of chunk steps that a buffer has returned.

        Steps of a chunk after the end of its episode were not executed, so their rewards are ignored.
        """
        rewards, terminated, truncated = batch["rewards"], batch["terminations"].bool(), batch["truncations"].bool()
        ended = (terminated | truncated).long()
        before = ended.cumsum(dim=1) - ended  # number of episode ends before each step of the chunk
        acted = before == 0
        powers = gamma ** torch.arange(rewards.shape[1])
        steps = acted.sum(dim=1)
        discounts = gamma ** steps.float() * (~(terminated & acted).any(dim=1)).float()
        # not a product with `acted`, because an environment may have left NaN where no step was executed
        returns = (torch.where(acted, rewards, 0) * powers).sum(dim=1)
        found = (batch["curr_obs"]["states"], batch["actions"], returns, discounts, batch["next_obs"]["states"])
        return cls(*(tensor.float().to(device) for tensor in found))

    @classmethod
    def joined(cls, parts: Sequence[Transitions]) -> Transitions:
        """Return one batch with the transitions of all ``parts``, in order."""
        return cls(*(torch.cat([getattr(part, own.name) for part in parts]) for own in fields(cls)))


class SAC:
    """The networks and optimizers of SAC, and its update.

    Args:
        obs, actions: sizes of an observation (D) and of an action chunk (C * A).
        settings: settings of the learner.
        seed: seed of the initial weights.

    Raises:
        UserError: the device in ``settings`` cannot be used.
    """

    def __init__(self, obs: int, actions: int, settings: LearnerSettings, seed: int) -> None:
        self.settings = settings
        try:
            self.device = torch.device(settings.device)
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"learner.device = {settings.device!r}: {str(error).splitlines()[0]}") from None
        generator = torch.Generator().manual_seed(derive(seed, "networks"))
        shape = (settings.hidden_size, settings.layers, generator)
        self.actor = Actor(obs, actions, *shape).to(self.device)
        self.critics = Critics(settings.critics, obs, actions, *shape, layer_norm=settings.layer_norm).to(self.device)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        start = torch.full((), settings.initial_temperature, device=self.device).log()
        self.log_temperature = start.requires_grad_(True)
        self.target_entropy = -float(actions) if settings.target_entropy is None else settings.target_entropy
        self._of_actor: list[Tensor] = list(self.actor.parameters())
        self._of_critics: list[Tensor] = list(self.critics.parameters())
        self._of_targets = list(self.target_critics.parameters())
        self._optimizers = {
            "actor": torch.optim.Adam(self._of_actor, settings.actor_lr, fused=True),
            "critics": torch.optim.Adam(self._of_critics, settings.critic_lr, fused=True),
            "temperature": torch.optim.Adam([self.log_temperature], settings.temperature_lr, fused=True),
        }

    def update(self, transitions: Transitions, generator: torch.Generator) -> dict[str, Tensor]:
        """Update the critics, the policy, the temperature and the target critics once.

        Returns metrics, which are scalar tensors without gradient. ``generator`` is on the CPU, so that the random
        draws are the same for every device.
        """
        noise = torch.randn(2, *transitions.actions.shape, generator=generator).to(self.device)
        temperature = self.log_temperature.detach().exp()
        with torch.no_grad():
            next_actions, next_logprobs = self.actor.sample(transitions.next_obs, noise[0])
            next_values = self.target_critics(transitions.next_obs, next_actions)
            if len(next_values) > 2:  # the minimum is taken over two critics, drawn at random as in REDQ and RLPD
                next_values = next_values[torch.randperm(len(next_values), generator=generator)[:2].to(self.device)]
            soft = next_values.amin(dim=0) - temperature * next_logprobs
            targets = transitions.rewards + transitions.discounts * soft
        values = self.critics(transitions.obs, transitions.actions)
        # Half of each critic's mean squared error, summed over the critics.
        of_critics = 0.5 * (values - targets).square().mean(dim=1).sum()
        self._apply("critics", of_critics, self._of_critics)

        actions, logprobs = self.actor.sample(transitions.obs, noise[1])
        valued = self.critics(transitions.obs, actions)
        valued = valued.amin(dim=0) if len(valued) == 2 else valued.mean(dim=0)
        of_actor = (temperature * logprobs - valued).mean()
        self._apply("actor", of_actor, self._of_actor)
        # Minimising this loss raises the temperature while the policy's entropy is below its target, and lowers it
        # while the entropy is above.
        of_temperature = -(self.log_temperature * (logprobs.detach() + self.target_entropy)).mean()
        self._apply("temperature", of_temperature, [self.log_temperature])
        with torch.no_grad():
            for target, own in zip(self._of_targets, self._of_critics, strict=True):
                target.lerp_(own, self.settings.tau)
        return {
            "loss/critic": of_critics.detach(),
            "loss/policy": of_actor.detach(),
            "sac/value": values.detach().mean(),
            "sac/target": targets.mean(),
            "sac/entropy": -logprobs.detach().mean(),
            "sac/temperature": temperature,
        }

    def _apply(self, name: str, loss: Tensor, parameters: list[Tensor]) -> None:
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        self._optimizers[name].step()

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs in order to continue exactly: networks, temperature and optimizers."""
        return {
            "actor": self.actor.state_dict(),
            "critics": self.critics.state_dict(),
            "target_critics": self.target_critics.state_dict(),
            "log_temperature": self.log_temperature.detach(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ``state``. Hyperparameters of the optimizers, such as learning rates, keep the values of this object's
        settings.

        Raises `UserError` if the sizes of the networks differ.
        """
        try:
            self.actor.load_state_dict(state["actor"])
            self.critics.load_state_dict(state["critics"])
            self.target_critics.load_state_dict(state["target_critics"])
        except RuntimeError as error:
            raise UserError(f"the checkpoint is of other networks: {' '.join(str(error).split())}") from None
        with torch.no_grad():
            self.log_temperature.copy_(state["log_temperature"])
        for name, optimizer in self._optimizers.items():
            # The hyperparameters come from the settings and not from the checkpoint, because a resumed run may change
            # them.
            options = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({**state["optimizers"][name], "param_groups": options})
