"""The data that `gleanrl.embodied.environments.Environments` returns.

This module imports neither gymnasium nor torch, so that every other module can use these types.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class ChunkStep:
    """The result of executing a chunk of C actions in each of B environments.

    If an episode ends inside a chunk, the rest of the chunk is not executed: its rewards are 0 and its flags False.
    """

    next_obs: Floats  # [B, D]: observation after the chunk, or the last one of an episode that ended in the chunk
    # [B, D]: observation for which the policy chooses the next action. If an episode ended in the chunk, it is the
    # first observation of the next episode.
    obs: Floats
    rewards: Floats  # [B, C]
    terminations: Flags  # [B, C]: the episode ended in this step, in a terminal state
    truncations: Flags  # [B, C]: the episode was cut off in this step, e.g. by a time limit, so targets bootstrap
    returns: tuple[float, ...]  # returns of the episodes that ended, in the order of the environments
    lengths: tuple[int, ...]  # lengths of these episodes, in environment steps


@dataclass(frozen=True)
class Progress:
    """The state of one environment, in a form from which it can be restored.

    To restore it, the environment starts the episode and executes the action chunks again. The observation that results
    is compared with ``obs``.
    """

    episode: int  # number of the episode, counted from 0
    actions: Floats  # [number of chunks executed in the episode so far, C * A]
    obs: Floats  # [D]: observation in this state
