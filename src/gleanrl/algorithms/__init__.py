"""Advantages, policy losses, corrections, KL, aggregation, batches and micro-batches.

The functions that a loop of your own needs:

    from gleanrl.algorithms import aggregate, estimate, kl_penalty, padded_policy_loss
"""

from __future__ import annotations

from gleanrl.algorithms.advantages import estimate
from gleanrl.algorithms.loss import aggregate, kl_penalty, padded_policy_loss

__all__ = ["aggregate", "estimate", "kl_penalty", "padded_policy_loss"]
