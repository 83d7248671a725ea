"""Whether a model can compute rows that several samples share, decided by trying."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gleanrl.learners.logprobs import trained_logprobs

TOLERANCE = 1e-4  # nats; float32 rounding stays far below, a mask or place that is ignored far above


@torch.no_grad()
def can_share_rows(model: Any) -> bool:
    """Two samples with a common prefix in one row must get the log-probs that they get alone.

    False too for a model with attention layers other than full ones: a mask of our own would lift their window.
    """
    try:
        config = model.config.get_text_config()
        if set(getattr(config, "layer_types", None) or ()) - {"full_attention"} or _windowed(config):
            return False
        prefix, first, second = _probe(int(config.vocab_size), next(model.parameters()).device)
        shared = _shared(model, prefix, first, second)
        alone = torch.cat([_alone(model, torch.cat([prefix, rest])) for rest in (first, second)])
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, NotImplementedError):
        return False  # it does not take places or a mask
    return bool((shared - alone).abs().max() < TOLERANCE)


def _windowed(config: Any) -> bool:
    window = getattr(config, "sliding_window", None)
    return (
        window is not None and not getattr(config, "layer_types", None) and getattr(config, "use_sliding_window", True)
    )


def _probe(vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a prefix and of two remainders."""
    tokens = (torch.arange(1, 13, device=device) * 7919) % vocabulary
    return tokens[:5], tokens[5:9], tokens[9:]


def _alone(model: Any, tokens: Tensor) -> Tensor:
    """Log-probs of all tokens but the first."""
    index = torch.arange(tokens.numel() - 1, device=tokens.device)
    return trained_logprobs(model, tokens[None, :-1], index, tokens[1:], 1.0)[0]


def _shared(model: Any, prefix: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The same as two of `_alone`, from one row."""
    p, a, b = prefix.numel(), first.numel() - 1, second.numel() - 1
    places = torch.cat([torch.arange(p), torch.arange(p, p + a), torch.arange(p, p + b)])
    owners = torch.cat([torch.zeros(p), torch.ones(a), torch.full((b,), 2.0)]).long()
    index = torch.cat([torch.arange(p + a), torch.arange(p), torch.arange(p + a, p + a + b)])
    targets = torch.cat([prefix[1:], first, prefix[1:], second])
    tokens = torch.cat([prefix, first[:-1], second[:-1]])
    places, owners, index = (tensor.to(prefix.device) for tensor in (places, owners, index))
    return trained_logprobs(model, tokens[None], index, targets, 1.0, places=places[None], owners=owners[None])[0]
