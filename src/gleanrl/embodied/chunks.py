"""What environments that are stepped in action chunks take and give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class ChunkStep:
    """What B environments did with a chunk of C actions each.

    Where an episode ends inside a chunk, the rest of the chunk is not acted: its rewards are 0 and its flags False.
    """

    next_obs: Floats  # [B, D]: after the chunk; where an episode ended, its last observation
    obs: Floats  # [B, D]: what to act on next; where an episode ended, the first one of the next
    rewards: Floats  # [B, C]
    terminations: Flags  # [B, C]: the episode ended in this step, by what happened
    truncations: Flags  # [B, C]: it was cut off in this step, e.g. by a time limit; the state has a value still
    returns: tuple[float, ...]  # of the episodes that ended, in order of the environments
    lengths: tuple[int, ...]  # environment steps of them


@dataclass(frozen=True)
class Progress:
    """Where an environment is: it is there again after a reset as this episode and these chunks."""

    episode: int  # counted from 0
    actions: Floats  # [chunks since its reset, C * A]
    obs: Floats  # [D]


class VectorEnvironments(Protocol):
    """B environments that take C actions at once; `gleanrl.embodied.environments.Environments` is one."""

    count: int
    chunk: int
    obs_size: int
    action_size: int
    max_episode_steps: int

    def reset(self, progress: Sequence[Progress] | None = None) -> Floats: ...
    def step(self, actions: Floats) -> ChunkStep: ...
    def progress(self) -> list[Progress]: ...
    def close(self) -> None: ...
