"""Where demonstrations come from: an earlier buffer, or an expert that acts now."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer import TrajectoryReplayBuffer
from gleanrl.embodied.experts import Expert
from gleanrl.embodied.rollout import RolloutWorker
from gleanrl.utils.errors import UserError

VERSION = -1  # of no policy of the run


def load(buffer: TrajectoryReplayBuffer, path: Path) -> None:
    """Fill a buffer from another one, a checkpoint of one, or the newest checkpoint or the live buffer of a run.

    Raises:
        UserError: there is none, or it is damaged.
    """
    if not path.is_dir():
        raise UserError(f"demonstrations.path = {str(path)!r}: no such folder")
    buffer.load_checkpoint(_buffer_of(path))


def _buffer_of(path: Path) -> Path:
    checkpoints = [p for p in path.glob("checkpoints/step-*") if p.name[5:].isdigit()]
    newest = max(checkpoints, key=lambda p: int(p.name[5:]), default=None)
    candidates = [*([newest / "buffer" / "online"] if newest else []), path / "buffer" / "online"]
    return next((candidate for candidate in candidates if candidate.is_dir()), path)


def show(buffer: TrajectoryReplayBuffer, worker: RolloutWorker, expert: Expert, chunk_steps: int) -> float:
    """Let an expert act and keep what it did; its mean return (NaN where no episode ended).

    Raises:
        UserError: what it gives is not of the shape of actions.
    """
    wanted = (worker.environments.count, worker.environments.action_size)

    def act(obs: Tensor) -> tuple[Tensor, Tensor]:
        actions = np.asarray(expert(obs.numpy()), np.float32)
        if actions.shape != wanted:
            raise UserError(f"demonstrations.expert gave actions {list(actions.shape)}, not {list(wanted)}")
        return torch.from_numpy(actions), torch.zeros(len(actions))

    count = -(-chunk_steps // worker.chunk_steps)
    rollouts = [worker.record(act, number, VERSION) for number in range(count)]
    buffer.add_trajectories([rollout.trajectory for rollout in rollouts])
    returns = [value for rollout in rollouts for value in rollout.returns]
    return float(np.mean(returns)) if returns else float("nan")
