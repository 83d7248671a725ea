"""The critic of PPO, a value function with its own optimizer.

It predicts, at the position before each trained token, the return of the remaining trajectory. A backend makes a
`Critic` if the advantage estimator needs values, and an engine computes its loss by `critic_loss`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gleanrl.algorithms.loss import value_loss
from gleanrl.algorithms.microbatch import MicroBatch
from gleanrl.config.settings import CriticSettings
from gleanrl.learners.optim import adamw, zero_gradients


@dataclass(frozen=True, slots=True)
class CriticStatistics:
    """Sums over tokens from which the critic's metrics are computed.

    The sums stay on the device, so that adding them up does not wait for it. ``a + b`` adds the sums of two passes.
    """

    sums: Tensor  # float64 [7]: count, loss, value, return, return^2, error, error^2

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> CriticStatistics:
        return cls(torch.zeros(7, dtype=torch.float64, device=device))

    def __add__(self, other: CriticStatistics) -> CriticStatistics:
        return CriticStatistics(self.sums + other.sums)

    def metrics(self) -> dict[str, float]:
        """Return the metrics ``critic/...``; an empty dict if no token was counted.

        Explained variance is 1 - var(return - value) / var(return). It is reported as 0 if all returns are equal.
        """
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
    """A linear head that computes a scalar value from each hidden state.

    With ``critic.model = "own"`` the hidden states are those of a copy of the policy's transformer, which the critic
    trains. With ``"shared"`` they are the policy's own, recorded by `capture`. Then the gradient of the value loss also
    flows into the policy's weights, which the policy's optimizer updates, multiplied by ``critic.coefficient``. That of
    the head is not multiplied, because the head has its own learning rate.

    The weights of a new head are 0, so every value is 0 until the first update. ``place`` puts a module on its device
    or shards it; a backend passes `Placement.place`.
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
        """Return the value before each of the T trained tokens, float [T] with gradient.

        ``hidden`` [B, L, H] holds the last hidden states of the policy for ``micro``. It is needed only if the critic
        shares the policy's transformer.
        """
        if self.body is not None:
            layout = micro.packing.arguments() if micro.packing is not None else {}
            hidden = self.body(input_ids=micro.tokens, use_cache=False, **layout).last_hidden_state
        assert hidden is not None
        states = hidden.flatten(0, 1).index_select(0, micro.index).to(self.head.weight.dtype)
        if self.body is None:  # the same values, with the coefficient in the gradient of the states
            states = states.detach() + self.settings.coefficient * (states - states.detach())
        # In the precision of the head: rounding a value to bfloat16 would change it by up to 0.4 %.
        with torch.autocast(states.device.type, enabled=False):
            return self.head(states).squeeze(-1)  # type: ignore[no-any-return]


def critic_loss(micro: MicroBatch, values: Tensor, clip: float | None) -> tuple[Tensor, CriticStatistics]:
    """Return the clipped value loss of each trained token, float [T], and statistics of the micro-batch.

    ``values`` float [T] are the critic's current values. The micro-batch has the values before the update, around which
    the loss is clipped, and the returns, which are the targets.
    """
    assert micro.values is not None
    assert micro.returns is not None
    losses = value_loss(values, micro.values, micro.returns, clip)
    value, target = values.detach(), micro.returns.double()
    error = target - value.double()
    columns = (torch.ones_like(target), losses.detach(), value, target, target**2, error, error**2)
    return losses, CriticStatistics(torch.stack([column.double().sum() for column in columns]))


def decoder(model: Any) -> Any:
    """Return the transformer inside ``model``, without the language-model head. ``model`` may be a peft model."""
    plain = model.get_base_model() if hasattr(model, "peft_config") else model
    return plain.base_model


@contextmanager
def capture(model: Any) -> Iterator[list[Tensor]]:
    """Record the last hidden states of each forward pass of ``model`` that runs inside the ``with`` block.

    They are appended to the list that the context manager returns, one tensor [B, L, H] with gradient for each pass.
    """
    caught: list[Tensor] = []

    def keep(_: nn.Module, _args: Any, output: Any) -> None:
        caught.append(output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0])

    hook = decoder(model).register_forward_hook(keep)
    try:
        yield caught
    finally:
        hook.remove()
