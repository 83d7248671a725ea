"""Whether another engine computes what the published weights compute: a short prompt, answered and compared.

Engines of their own keep weights in layouts of their own (fused, packed, captured), and an update that misses one of
these copies reports success. Comparing what was computed is the only proof that it did not.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.func import functional_call

from gleanrl.errors import UserError

PROMPT, ANSWER = 24, 4  # tokens
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}  # of the log-probs' spread, or nats where that is less


class Canary:
    """Holds the model's modules without weights: those that were published are used where they lie.

    Args:
        model: a Hugging Face causal LM; of its parameters, names and shapes are kept.
        dtype: what the engine computes in (a torch dtype or its name), which says how close it must come.
        name: of the engine, for messages.
    """

    def __init__(self, model: Any, dtype: torch.dtype | str, name: str) -> None:
        bare = {
            id(p): torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
            for p in model.parameters()
        }
        self._modules = copy.deepcopy(model, bare).eval()
        self._shapes = {key: tuple(p.shape) for key, p in model.named_parameters()}
        self.tolerance, self._name = TOLERANCE[str(dtype).removeprefix("torch.")], name
        vocabulary = int(model.config.get_text_config().vocab_size)
        self.prompt: list[int] = np.random.default_rng(0).integers(vocabulary, size=PROMPT).tolist()

    def check_fit(self, weights: Mapping[str, Any]) -> None:
        """Raises `ValueError` if a weight is missing, unknown or has another shape."""
        for key, shape in self._shapes.items():
            if key not in weights:
                raise ValueError(f"published weights lack {key!r}")
            if tuple(weights[key].shape) != shape:
                raise ValueError(f"published weight {key!r} has shape {tuple(weights[key].shape)}, not {shape}")
        if unknown := sorted(set(weights) - set(self._shapes)):
            raise ValueError(f"published weight {unknown[0]!r} is none of the model's")

    def compare(self, weights: Mapping[str, Any], answer: Sequence[int], logprobs: Sequence[float], when: str) -> None:
        """Compare with what these weights compute; arguments as of `distance`.

        Raises:
            UserError: they are not those of these weights; ``when`` says what had been done, for the message.
        """
        off, share = self.distance(weights, answer, logprobs)
        if not share <= self.tolerance:
            raise UserError(
                f"{self._name} does not compute what the learner's weights compute {when}: log-probs of a test "
                f"prompt are off by {off:.2g}; the run stops before it learns from wrong samples"
            )

    @torch.no_grad()
    def distance(
        self, weights: Mapping[str, Any], answer: Sequence[int], logprobs: Sequence[float], temperature: float = 1.0
    ) -> tuple[float, float]:
        """How far the engine's log-probs are off at worst, in nats and as a share of the log-probs' spread
        (of one nat where that is more, as with a policy that is sure of its answer).

        Args:
            weights: as published.
            answer: tokens that the engine gave after the prompt.
            logprobs: the engine's, of the answer's tokens or of some of the prompt's last ones too.
            temperature: of the engine's log-probs.
        """
        tokens = torch.tensor([*self.prompt, *answer])[None]
        some = next(iter(weights.values()))
        logits = functional_call(
            self._modules, dict(weights), (tokens.to(some.device),), {"use_cache": False}, strict=False
        ).logits[0, :-1]
        logits = logits.float() / temperature
        expected = logits.log_softmax(-1).cpu().gather(-1, tokens[0, 1:, None])[-len(logprobs) :, 0]
        off = float((torch.tensor(logprobs) - expected).abs().max())
        return off, off / max(float(expected.std(correction=0)), 1.0)
