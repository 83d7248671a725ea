"""Evaluation of a policy: its mean action, on the same episodes every time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gleanrl.embodied.chunks import VectorEnvironments


@torch.no_grad()
def evaluate(
    act: Callable[[Tensor], Tensor], environments: VectorEnvironments, max_chunk_steps: int = 100_000
) -> dict[str, float]:
    """Return ``eval/return`` with its 95 % interval and ``eval/length`` over the first episode of each environment.

    Args:
        act: from observations [B, D] to actions [B, C * A] in [-1, 1].
        environments: reset first.
        max_chunk_steps: an episode that has not ended by then counts with its return so far.
    """
    obs = environments.reset()
    returns, lengths = np.zeros(environments.count), np.zeros(environments.count, int)
    running = np.ones(environments.count, bool)
    for _ in range(max_chunk_steps):
        done = environments.step(act(torch.from_numpy(obs)).numpy())
        ends = done.terminations | done.truncations
        ended = ends.any(axis=1)
        acted = np.where(ended, ends.argmax(axis=1) + 1, ends.shape[1])
        returns += running * done.rewards.sum(axis=1)
        lengths += running * acted
        running &= ~ended
        if not running.any():
            break
        obs = done.obs
    error = 1.96 * returns.std(ddof=1) / math.sqrt(len(returns)) if len(returns) > 1 else math.nan
    mean = float(returns.mean())
    interval = {"eval/return_low": mean - error, "eval/return_high": mean + error} if len(returns) > 1 else {}
    return {"eval/return": mean, **interval, "eval/length": float(lengths.mean())}
