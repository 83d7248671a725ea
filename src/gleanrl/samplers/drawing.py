"""Draws the next token of each row, with its exact log-prob under the distribution that it was drawn from."""

from __future__ import annotations

import torch


def draw(logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw by inverting the cumulative distribution of ``softmax(logits / temperature)``.

    Args:
        logits: float32 ``[B, V]``.
        temperature: float32 ``[B]``; 0 takes the most likely token, whose log-prob is that at temperature 1.
        uniforms: float64 ``[B]`` in ``[0, 1)``; a row's draw depends on its own uniform and logits alone.

    Returns:
        tokens int64 ``[B]`` and log-probs float32 ``[B]``.
    """
    greedy = temperature == 0
    logprobs = (logits / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    # float64, so that rounding neither reaches a token of probability zero nor runs past the last one.
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    drawn = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
