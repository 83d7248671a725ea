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
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}  # of the log-probs' spread


class Canary:
    """Holds the model's modules without weights: those that were published are used where they lie.

    Args:
        model: a Hugging Face causal LM; of its parameters, names and shapes are kept.
        dtype: what the engine computes in, which says how close it must come.
        name: of the engine, for messages.
    """

    def __init__(self, model: Any, dtype: torch.dtype, name: str) -> None:
        bare = {
            id(p): torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
            for p in model.parameters()
        }
        self._modules = copy.deepcopy(model, bare).eval()
        self._shapes = {key: tuple(p.shape) for key, p in model.named_parameters()}
        self._tolerance, self._name = _TOLERANCE[dtype], name
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

    @torch.no_grad()
    def compare(self, weights: Mapping[str, Any], answer: Sequence[int], logprobs: Sequence[float], what: str) -> float:
        """How far the engine's log-probs are off, at worst, as a share of their spread.

        Args:
            weights: as published.
            answer: tokens that the engine gave after the prompt, at temperature 0.
            logprobs: the engine's, of the prompt's tokens but the first and of the answer's.
            what: had been done before, for the message.

        Raises:
            UserError: they are not those of these weights.
        """
        tokens = torch.tensor([*self.prompt, *answer])[None]
        some = next(iter(weights.values()))
        logits = functional_call(
            self._modules, dict(weights), (tokens.to(some.device),), {"use_cache": False}, strict=False
        ).logits[0, :-1]
        expected = logits.float().log_softmax(-1).cpu().gather(-1, tokens[0, 1:, None])[:, 0]
        found = torch.tensor(logprobs)
        if found.shape != expected.shape:
            raise UserError(f"{self._name} gave {len(logprobs)} log-probs for {expected.numel()} tokens after {what}")
        off = (found - expected).abs()
        worst = float(off.max()) / (float(expected.std()) or 1.0)
        if not worst <= self._tolerance:
            raise UserError(
                f"{self._name} does not compute what the learner's weights compute after {what}: log-probs of a test "
                f"prompt are off by {float(off.max()):.2g}; the run stops before it learns from wrong samples"
            )
        return worst
