"""The networks of SAC: a tanh Gaussian policy, and an ensemble of critics computed with batched products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOG_STD = (-20.0, 2.0)


class Ensemble(nn.Module):
    """``members`` perceptrons computed together: ``[N, D]`` or ``[members, N, D]`` -> ``[members, N, out]``.

    Weights are initialised as in `torch.nn.Linear`, from ``generator``.
    """

    def __init__(
        self, members: int, sizes: Sequence[int], generator: torch.Generator, *, layer_norm: bool = False
    ) -> None:
        super().__init__()
        self.members, self.layer_norm = members, layer_norm
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for width, out in pairwise(sizes):
            bound = 1 / math.sqrt(width)
            shapes = ((members, width, out), (members, 1, out))
            weight, bias = (torch.empty(shape).uniform_(-bound, bound, generator=generator) for shape in shapes)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(bias))
        hidden = sizes[1:-1] if layer_norm else []
        self.scales = nn.ParameterList(torch.ones(members, 1, width) for width in hidden)
        self.shifts = nn.ParameterList(torch.zeros(members, 1, width) for width in hidden)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            x = x.expand(self.members, -1, -1)
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if i < last:
                if self.layer_norm:
                    x = F.layer_norm(x, x.shape[-1:]) * self.scales[i] + self.shifts[i]
                x = torch.relu(x)
        return x


class Actor(nn.Module):
    """A policy whose actions have a Gaussian distribution squashed by tanh to [-1, 1]."""

    def __init__(self, obs: int, actions: int, hidden: int, layers: int, generator: torch.Generator) -> None:
        super().__init__()
        self.actions = actions
        self.body = Ensemble(1, [obs, *[hidden] * layers, 2 * actions], generator)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation before tanh, float32 ``[N, A]`` each, of observations ``[N, D]``."""
        mean, log_std = self.body(obs)[0].chunk(2, dim=-1)
        return mean, log_std.clamp(*LOG_STD).exp()

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions ``[N, A]`` and their log-density ``[N]``, from standard normal ``noise`` ``[N, A]``."""
        mean, std = self(obs)
        before = mean + std * noise
        normal = -0.5 * noise.square() - std.log() - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh(u)^2), exact also for large |u|
        squash = 2 * (math.log(2) - before - F.softplus(-2 * before))
        return torch.tanh(before), (normal - squash).sum(dim=-1)

    def mean(self, obs: Tensor) -> Tensor:
        """Return the deterministic actions ``[N, A]`` that are used in an evaluation."""
        return torch.tanh(self(obs)[0])


class Critics(nn.Module):
    """Critics that return values ``[critics, N]`` of observations and actions."""

    def __init__(
        self,
        critics: int,
        obs: int,
        actions: int,
        hidden: int,
        layers: int,
        generator: torch.Generator,
        *,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        sizes = [obs + actions, *[hidden] * layers, 1]
        self.body = Ensemble(critics, sizes, generator, layer_norm=layer_norm)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        return self.body(torch.cat([obs, actions], dim=-1)).squeeze(-1)
