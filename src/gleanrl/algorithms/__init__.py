"""Algorithms: advantages, policy losses, importance corrections, KL terms, loss aggregation, batches, micro-batches.

A training loop of another library, or one that you write yourself, needs only these functions:

    from gleanrl.algorithms import aggregate, estimate, kl_penalty, padded_policy_loss
"""

from __future__ import annotations

from gleanrl.algorithms.advantages import estimate
from gleanrl.algorithms.loss import aggregate, kl_penalty, padded_policy_loss

__all__ = ["aggregate", "estimate", "kl_penalty", "padded_policy_loss"]
