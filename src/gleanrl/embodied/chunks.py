"""What environments that are stepped in action chunks return. Imports neither gymnasium nor torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class ChunkStep:
    """The result of a chunk of C actions in each of B environments.

    Where an episode ends inside a chunk, the rest of the chunk is skipped: its rewards are 0 and its flags False.
    """

    next_obs: Floats  # [B, D]: after the chunk; where an episode ended, its last observation
    obs: Floats  # [B, D]: input of the next action; where an episode ended, the next one's first observation
    rewards: Floats  # [B, C]
    terminations: Flags  # [B, C]: the episode ended in this step, in a terminal state
    truncations: Flags  # [B, C]: it was cut off in this step, e.g. by a time limit; the state still has a value
    returns: tuple[float, ...]  # of the episodes that ended, by environment
    lengths: tuple[int, ...]  # of these episodes, in environment steps


@dataclass(frozen=True)
class Progress:
    """The state of an environment, which a reset to this episode and these chunks restore."""

    episode: int  # counted from 0
    actions: Floats  # [chunks since its reset, C * A]
    obs: Floats  # [D]
