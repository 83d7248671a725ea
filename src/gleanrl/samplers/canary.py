"""Checks that an engine such as vLLM samples with the published weights, by its log-probs of a short test prompt.

Such an engine keeps weights in its own layouts (fused, packed, captured in CUDA graphs). If new weights do not reach
one of these copies, the engine still reports success. Only a comparison of computed log-probs proves that all copies
were updated.

In half precision the engine's rounding errors are larger than the effect of one update, so log-probs of the old weights
could pass the comparison. Two measures prevent this. The code that loads weights first sets the old ones to NaN
(`gleanrl.samplers.vllm.forget_weights`). And the log-probs must be nearer to those of the new weights than to those of
the old weights, as soon as the two differ by clearly more than the engine's rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from gleanrl.utils.errors import UserError
from gleanrl.utils.weights import layers_of, layout_of

PROMPT, ANSWER = 64, 4  # length of the test prompt, and of vLLM's completion of it, in tokens
# Largest error allowed, by dtype, as a share of the standard deviation of the log-probs (of 1 nat if that is smaller).
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
# If the new weights' log-probs of the prompt are this many times the engine's rounding error away from the old ones, an
# engine with the new weights cannot be nearer to the old log-probs, whatever the direction of its rounding error.
CERTAIN = 2.0


def check_fit(expected: Mapping[str, torch.Tensor], weights: Mapping[str, Any]) -> None:
    """Check that ``weights`` contains every name of ``expected``, with a tensor of the same shape.

    Raises `ValueError` if a weight is missing or has another shape. Further weights are allowed.
    """
    layout = layout_of(weights)
    for name, tensor in expected.items():
        if name not in layout:
            raise ValueError(f"published weights lack {name!r}")
        found, needed = layout[name].shape, tuple(tensor.shape)
        if found != needed:
            raise ValueError(f"published weight {name!r} has shape {found}, not {needed}")


@dataclass(frozen=True)
class Reference:
    """The correct logits of a model for the test prompt and a completion, together n tokens."""

    tokens: torch.Tensor  # int64[n], ids of the prompt and of the completion
    logits: torch.Tensor  # float32[n - 1, vocabulary], logits that predict the second and all later tokens

    def logprobs(self, temperature: float = 1.0) -> np.ndarray:
        """Return float64[n - 1], the log-probs at ``temperature`` of all tokens but the first."""
        scaled = (self.logits / temperature).log_softmax(-1)
        return scaled.gather(-1, self.tokens[1:, None])[:, 0].double().numpy()

    def distance(self, found: Sequence[float], temperature: float = 1.0) -> tuple[float, float]:
        """Return (error, relative error) of ``found``, the engine's log-probs at ``temperature`` of the last tokens.

        The error is the largest absolute difference from the correct log-probs, in nats. The relative error is the same
        divided by the standard deviation of the correct log-probs, or by 1 nat if the deviation is smaller, as for a
        policy that is certain of its completion.
        """
        expected = self.logprobs(temperature)[-len(found) :]
        off = float(np.abs(np.array(found) - expected).max())
        return off, off / max(float(expected.std()), 1.0)


class Canary:
    """Compares the log-probs of an engine with those that a model computes with the published weights.

    The object has a copy of the model's modules without their weights, and runs them with the published tensors. So it
    takes almost no memory.

    Args:
        model: a Hugging Face causal LM with the names and shapes of the weights that will be published. It may be
            changed afterwards (adapters, sharding) without an effect on this object.
        dtype: the engine's compute dtype (a torch dtype or its name), which determines the tolerance.
        name: the engine's name in error messages.
        max_context: the engine's context in tokens. The test prompt has at most half this length.
    """

    def __init__(self, model: Any, dtype: torch.dtype | str, name: str, max_context: int = 4 * PROMPT) -> None:
        bare = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False) for p in model.parameters()}
        self._modules = copy.deepcopy(model, bare).eval()
        self.tolerance, self._name = TOLERANCE[str(dtype).removeprefix("torch.")], name
        vocabulary = int(model.config.get_text_config().vocab_size)
        length = max(2, min(PROMPT, max_context // 2))
        self.prompt: list[int] = np.random.default_rng(0).integers(vocabulary, size=length).tolist()
        # The correct log-probs of the prompt under the engine's previous weights; None until `remember` or the first
        # comparison has stored them.
        self._held: np.ndarray | None = None

    def check_fit(self, weights: Mapping[str, Any]) -> None:
        """Check the names and shapes of ``weights``.

        Raises `ValueError` if a weight of the model is missing or has another shape, or if ``weights`` contains a name
        that the model does not have.
        """
        expected = dict(self._modules.named_parameters())
        check_fit(expected, weights)
        if unknown := sorted(set(weights) - set(expected)):
            raise ValueError(f"published weight {unknown[0]!r} is none of the model's")

    @torch.no_grad()
    def reference(self, weights: Mapping[str, Any], answer: Sequence[int] = ()) -> Reference:
        """Compute the logits of ``weights`` for the test prompt and ``answer``, the engine's completion of it.

        The forward pass runs on the device of the model's buffers, in float32 or the dtype of the weights if that is
        wider. Weights are read, converted and moved to this device one layer at a time, because they may be gathered
        from other processes, and with Ray are in the object store, in main memory.
        """
        tokens = torch.tensor([*self.prompt, *answer])
        device = next((buffer.device for buffer in self._modules.buffers()), None)
        device = device or next(iter(weights.values())).device

        def read(name: str) -> torch.Tensor:
            weight = weights[name]
            return weight.to(device, torch.promote_types(weight.dtype, torch.float32))

        layers = list(layers_of(self._modules))
        names = {id(parameter): name for name, parameter in self._modules.named_parameters()}
        inside = {names[id(parameter)] for layer in layers for parameter in layer.parameters()}
        outside = {name: read(name) for name in names.values() if name not in inside}
        with _one_layer_at_a_time(layers, lambda parameter: read(names[id(parameter)])):
            arguments = (tokens[None, :-1].to(device),)
            output = functional_call(self._modules, outside, arguments, {"use_cache": False}, strict=False)
        return Reference(tokens, output.logits[0].float().cpu())

    def remember(self, reference: Reference) -> None:
        """Store the correct log-probs of the weights that the engine has before the first comparison.

        With these, the first comparison can also find that the engine still uses its initial weights.
        """
        self._held = reference.logprobs()[: len(self.prompt) - 1]

    def compare(self, reference: Reference, found: Sequence[float], when: str) -> None:
        """Compare ``found``, the engine's log-probs of all tokens but the first, with the correct ones.

        ``when`` is the part of the error message that says when they were compared, such as "after an update".

        Raises:
            UserError: if the log-probs differ by more than the tolerance, or are nearer to those of the previous
                weights (see `compare_with_held`).
        """
        off, share = reference.distance(found)
        if not share <= self.tolerance:
            raise UserError(
                f"{self._name} does not compute what the learner's weights compute {when}: log-probs of a test "
                f"prompt are off by {off:.2g}; the run stops before it learns from wrong samples"
            )
        self.compare_with_held(reference, found[: len(self.prompt) - 1], when)

    def compare_with_held(self, reference: Reference, found: Sequence[float], when: str) -> None:
        """Check that ``found``, the engine's log-probs of the prompt, are not those of its previous weights.

        If the correct log-probs of the new and the previous weights differ by less than `CERTAIN` times the engine's
        rounding error, nothing can be decided. Then the method returns, and the next comparison is still with the same
        previous weights, from which the weights will have moved further.

        Raises:
            UserError: if ``found`` is nearer to the log-probs of the previous weights than to those of the new ones.
        """
        now = reference.logprobs()[: len(self.prompt) - 1]
        if self._held is not None:
            move, moved = now - self._held, np.array(found) - self._held
            length = float(np.linalg.norm(move))
            share = float(moved @ move) / length**2 if length else 1.0
            rounding = float(np.linalg.norm(moved - share * move))
            if length <= CERTAIN * rounding:
                return
            if share < 0.5:
                raise UserError(
                    f"{self._name} does not compute what the learner's weights compute {when}, but what older ones do: "
                    f"log-probs of a test prompt should have moved by {length / len(now) ** 0.5:.2g} and went "
                    f"{share:.0%} of the way; the run stops before it learns from wrong samples"
                )
        self._held = now


@contextmanager
def _one_layer_at_a_time(layers: Sequence[nn.Module], read: Callable[[nn.Parameter], torch.Tensor]) -> Iterator[None]:
    """Give each of ``layers`` the weight ``read(p)`` for its parameter p, for the time in which the layer computes."""
    # For each module whose parameters were moved: its dict of parameters, and the dict's entries before.
    elsewhere: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def fetch(layer: nn.Module, _: Any) -> None:
        for module in layer.modules():
            own: dict[str, Any] = module._parameters
            elsewhere.append((own, dict(own)))
            own.update({key: read(parameter) for key, parameter in own.items() if parameter is not None})

    def restore(*_: Any) -> None:
        while elsewhere:
            parameters, held = elsewhere.pop()
            parameters.update(held)

    hooks = [layer.register_forward_pre_hook(fetch) for layer in layers]
    hooks += [layer.register_forward_hook(restore) for layer in layers]
    try:
        yield
    finally:
        restore()
        for hook in hooks:
            hook.remove()
