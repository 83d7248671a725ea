"""The networks of SAC: a tanh Gaussian policy, and an ensemble of critics that are evaluated together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOG_STD = (-20.0, 2.0)


class Ensemble(nn.Module):
    """An ensemble of ``members`` multi-layer perceptrons with ReLU, evaluated with batched matrix products.

    The input is ``[N, D]``, the same for all members, or ``[members, N, D]``. The output is ``[members, N, out]``.
    ``sizes`` are the widths of the input, of each hidden layer and of the output. Weights are initialised as in
    `torch.nn.Linear`, from ``generator``. With ``layer_norm``, each hidden layer is normalised before its ReLU.
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
        # This equals log(1 - tanh(u)^2) for u = before, but does not become log(0) when |u| is large.
        squash = 2 * (math.log(2) - before - F.softplus(-2 * before))
        return torch.tanh(before), (normal - squash).sum(dim=-1)

    def mean(self, obs: Tensor) -> Tensor:
        """Return the deterministic actions ``[N, A]`` for observations ``[N, D]``. Evaluations use them."""
        return torch.tanh(self(obs)[0])


class Critics(nn.Module):
    """An ensemble of Q-functions, which returns values ``[critics, N]`` of observations ``[N, D]`` and actions ``[N,
    A]``.
    """

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
