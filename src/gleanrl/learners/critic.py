"""The critic of PPO: predicts a value for the state before each trained token, with its own optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gleanrl.algorithms.loss import value_loss
from gleanrl.algorithms.microbatch import MicroBatch, row_layout
from gleanrl.config.settings import CriticSettings
from gleanrl.learners.optim import adamw, zero_gradients


@dataclass(frozen=True, slots=True)
class CriticStatistics:
    """Sums over tokens, kept on their device. ``a + b`` holds the sums of both."""

    sums: Tensor  # float64 [7]: count, loss, value, return, return^2, error, error^2

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> CriticStatistics:
        return cls(torch.zeros(7, dtype=torch.float64, device=device))

    def __add__(self, other: CriticStatistics) -> CriticStatistics:
        return CriticStatistics(self.sums + other.sums)

    def metrics(self) -> dict[str, float]:
        """Return ``critic/...``. Explained variance: 1 - var(return - value) / var(return), 0 for a constant return."""
        count, loss, value, target, squares, error, squared_error = self.sums.tolist()
        if not count:
            return {}
        variance = squares / count - (target / count) ** 2
        unexplained = squared_error / count - (error / count) ** 2
        return {
            "critic/loss": loss / count,
            "critic/value": value / count,
            "critic/return": target / count,
            "critic/explained_variance": 1 - unexplained / variance if variance > 1e-12 else 0.0,
        }


class Critic:
    """A scalar head on the hidden states of the policy, or of the critic's own copy of it.

    A new head returns 0 everywhere. ``place`` is `Placement.place`. With ``critic.model = "shared"`` the gradient of
    the value loss, times ``critic.coefficient``, flows through the states of `capture` into the policy's weights, which
    the policy's optimizer updates.
    """

    def __init__(
        self, policy: Any, settings: CriticSettings, place: Callable[[nn.Module], None] = lambda _: None
    ) -> None:
        self.settings = settings
        reference = next(policy.parameters())
        self.head = nn.Linear(
            policy.get_output_embeddings().in_features, 1, device=reference.device, dtype=reference.dtype
        )
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.body: Any = copy.deepcopy(decoder(policy)).requires_grad_() if settings.model == "own" else None
        for part in filter(None, (self.head, self.body)):
            place(part)
        self.module = nn.ModuleDict({"head": self.head} | ({"body": self.body} if self.body is not None else {}))
        self.parameters = list(self.module.parameters())
        self.optimizer = adamw(self.module, lr=settings.lr, betas=(0.9, 0.999), weight_decay=0.0)
        zero_gradients(self.parameters)

    def values(self, micro: MicroBatch, hidden: Tensor | None = None) -> Tensor:
        """Return float [T] with gradient. ``hidden`` [B, L, H]: the policy's last states, if the model is shared."""
        if self.body is not None:
            layout = row_layout(micro.places, micro.owners, self.head.weight.dtype)
            hidden = self.body(input_ids=micro.tokens, use_cache=False, **layout).last_hidden_state
        assert hidden is not None
        states = hidden.flatten(0, 1).index_select(0, micro.index)
        values = self.head(states.to(self.head.weight.dtype)).squeeze(-1)
        return values.to(self.head.weight.dtype)  # autocast may have changed the dtype

    def loss(self, micro: MicroBatch, values: Tensor) -> tuple[Tensor, CriticStatistics]:
        """Return the clipped value loss of the tokens of a micro-batch, float [T], and its statistics."""
        assert micro.values is not None
        assert micro.returns is not None
        losses = value_loss(values, micro.values, micro.returns, self.settings.clip)
        value, target = values.detach(), micro.returns.double()
        error = target - value.double()
        columns = (torch.ones_like(target), losses.detach(), value, target, target**2, error, error**2)
        return losses, CriticStatistics(torch.stack([column.double().sum() for column in columns]))


def decoder(model: Any) -> Any:
    """Return the transformer without its language-model head, for a plain or a peft model."""
    plain = model.get_base_model() if hasattr(model, "peft_config") else model
    return plain.base_model


@contextmanager
def capture(model: Any) -> Iterator[list[Tensor]]:
    """Append the last hidden states [B, L, H], with gradient, of each pass of ``model`` in the context to the list."""
    caught: list[Tensor] = []

    def keep(_: nn.Module, _args: Any, output: Any) -> None:
        caught.append(output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0])

    hook = decoder(model).register_forward_hook(keep)
    try:
        yield caught
    finally:
        hook.remove()
