"""Checks that another engine computes with the published weights, by comparing its log-probs of a short prompt.

External engines keep weights in layouts of their own (fused, packed, captured). An update that misses one of these
copies still reports success. Comparing computed log-probs is the only proof that all copies were updated.

In half precision an engine's rounding error exceeds the effect of one update. Therefore its log-probs must also be
nearer to those of the new weights than to those of the old weights, as soon as the two differ by more than the engine's
rounding. In addition, the code that writes weights first invalidates the old ones
(`gleanrl.samplers.vllm.forget_weights`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from gleanrl.utils.errors import UserError

PROMPT, ANSWER = 64, 4  # tokens
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}  # share of the log-probs' spread, at least of 1 nat
# If an update moved the prompt's log-probs by this many times an engine's rounding, a correct engine cannot be nearer
# to the old log-probs, whatever the direction of its rounding.
CERTAIN = 2.0


def check_fit(expected: Mapping[str, torch.Tensor], weights: Mapping[str, Any]) -> None:
    """Check names and shapes of published weights. Raises `ValueError` if one is missing or has another shape."""
    for name, tensor in expected.items():
        if name not in weights:
            raise ValueError(f"published weights lack {name!r}")
        if tuple(weights[name].shape) != tuple(tensor.shape):
            found, needed = tuple(weights[name].shape), tuple(tensor.shape)
            raise ValueError(f"published weight {name!r} has shape {found}, not {needed}")


@dataclass(frozen=True)
class Reference:
    """The logits of given weights for the test prompt and an answer."""

    tokens: torch.Tensor  # int64[n]
    logits: torch.Tensor  # float32[n - 1, vocabulary]

    def logprobs(self, temperature: float = 1.0) -> np.ndarray:
        """Return float64[n - 1], the log-probs of all tokens but the first."""
        scaled = (self.logits / temperature).log_softmax(-1)
        return scaled.gather(-1, self.tokens[1:, None])[:, 0].double().numpy()

    def distance(self, found: Sequence[float], temperature: float = 1.0) -> tuple[float, float]:
        """Return the largest error of the last tokens' log-probs, in nats and as a share of the log-probs' spread.

        If the spread is below one nat, as for a policy that is certain of its answer, the share is of one nat.
        """
        expected = self.logprobs(temperature)[-len(found) :]
        off = float(np.abs(np.array(found) - expected).max())
        return off, off / max(float(expected.std()), 1.0)


class Canary:
    """Compares an engine with the published weights. Holds the model's modules, but no weights of its own.

    Args:
        model: a Hugging Face causal LM; the names and shapes of its parameters are kept. Later changes to it
            (adapters, sharding) have no effect here.
        dtype: the engine's compute dtype (a torch dtype or its name), which determines the tolerance.
        name: the engine's name, for messages.
        max_context: the engine's context in tokens, which limits the length of the test prompt.
    """

    def __init__(self, model: Any, dtype: torch.dtype | str, name: str, max_context: int = 4 * PROMPT) -> None:
        bare = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False) for p in model.parameters()}
        self._modules = copy.deepcopy(model, bare).eval()
        self.tolerance, self._name = TOLERANCE[str(dtype).removeprefix("torch.")], name
        vocabulary = int(model.config.get_text_config().vocab_size)
        length = max(2, min(PROMPT, max_context // 2))
        self.prompt: list[int] = np.random.default_rng(0).integers(vocabulary, size=length).tolist()
        self._held: np.ndarray | None = None  # the prompt's log-probs under the weights that the engine last had

    def check_fit(self, weights: Mapping[str, Any]) -> None:
        """Check names and shapes. Raises `ValueError` if a weight is missing, unknown or has another shape."""
        expected = dict(self._modules.named_parameters())
        check_fit(expected, weights)
        if unknown := sorted(set(weights) - set(expected)):
            raise ValueError(f"published weight {unknown[0]!r} is none of the model's")

    @torch.no_grad()
    def reference(self, weights: Mapping[str, Any], answer: Sequence[int] = ()) -> Reference:
        """Compute the logits of published ``weights`` for the prompt and the engine's answer to it.

        Runs on the device of the model's buffers. Weights elsewhere (with Ray: in its store) are copied layer by layer.
        """
        tokens = torch.tensor([*self.prompt, *answer])
        some = next(iter(weights.values()))
        device = next((buffer.device for buffer in self._modules.buffers()), some.device)
        layers = _layers(self._modules) if device != some.device else {}
        inside = {f"{name}.{key}" for name, layer in layers.items() for key, _ in layer.named_parameters()}
        given = {key: weight if key in inside else weight.to(device) for key, weight in weights.items()}
        with _one_layer_at_a_time(tuple(layers.values()), device):
            arguments = (tokens[None, :-1].to(device),)
            output = functional_call(self._modules, given, arguments, {"use_cache": False}, strict=False)
        return Reference(tokens, output.logits[0].float().cpu())

    def remember(self, reference: Reference) -> None:
        """Remember the log-probs of the weights that the engine has before the first comparison."""
        self._held = reference.logprobs()[: len(self.prompt) - 1]

    def compare(self, reference: Reference, found: Sequence[float], when: str) -> None:
        """Compare the engine's log-probs, of all tokens but the first, with those of the weights.

        Raises:
            UserError: if the log-probs differ. Its message says ``when`` they do.
        """
        off, share = reference.distance(found)
        if not share <= self.tolerance:
            raise UserError(
                f"{self._name} does not compute what the learner's weights compute {when}: log-probs of a test "
                f"prompt are off by {off:.2g}; the run stops before it learns from wrong samples"
            )
        self.compare_with_held(reference, found[: len(self.prompt) - 1], when)

    def compare_with_held(self, reference: Reference, found: Sequence[float], when: str) -> None:
        """Check that the engine's log-probs of the prompt are nearer to these weights' than to its last weights'.

        Nothing is checked if the log-probs of the two differ by less than the engine's rounding.

        Raises:
            UserError: if they are nearer to those of the last weights.
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


def _layers(modules: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated layers, which hold most of a model's weights, by name."""
    lists = {name: part for name, part in modules.named_modules() if isinstance(part, nn.ModuleList)}
    outer = {name: part for name, part in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    return {f"{name}.{key}": layer for name, part in outer.items() for key, layer in part.named_children()}


@contextmanager
def _one_layer_at_a_time(layers: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Keep each layer's weights on ``device`` only while it computes."""
    elsewhere: list[tuple[dict[str, Any], dict[str, Any]]] = []  # a module's parameters, and their former values

    def fetch(layer: nn.Module, _: Any) -> None:
        for module in layer.modules():
            own: dict[str, Any] = module._parameters
            elsewhere.append((own, dict(own)))
            own.update({key: weight.to(device) for key, weight in own.items() if weight is not None})

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
