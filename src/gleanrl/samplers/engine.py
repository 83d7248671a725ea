"""Defines engines, which compute next-token logits, and copies published weights into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from gleanrl.samplers.kv_cache import Feed, KeyValueStore


class CannotServe(Exception):
    """This engine cannot compute that model exactly; the message says why."""


class Engine(Protocol):
    """Computes logits with its own copy of the weights. It holds no conversations; those are in the store."""

    @property
    def targets(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors (or views) that published weights are copied into, by Hugging Face parameter name."""
        ...

    @property
    def device(self) -> torch.device: ...

    def logits(self, feed: Feed, store: KeyValueStore) -> torch.Tensor:
        """Append ``feed`` to ``store``; return float32 ``[B, vocabulary]`` after the last token of each row."""
        ...


def copy_weights(targets: Mapping[str, torch.Tensor], weights: Mapping[str, Any]) -> None:
    """Copy ``weights`` into ``targets``, converting dtype and device. Nothing is copied if any does not fit.

    Raises:
        ValueError: a weight is missing or has another shape.
    """
    for name, target in targets.items():
        if name not in weights:
            raise ValueError(f"published weights lack {name!r}")
        if weights[name].shape != target.shape:
            found, expected = tuple(weights[name].shape), tuple(target.shape)
            raise ValueError(f"published weight {name!r} has shape {found}, not {expected}")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(weights[name])
