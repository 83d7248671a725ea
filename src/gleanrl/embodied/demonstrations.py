"""Provides demonstrations: chunk steps that are loaded from an earlier buffer or recorded from a scripted expert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer import TrajectoryReplayBuffer
from gleanrl.embodied.chunks import Floats
from gleanrl.embodied.rollout import RolloutWorker
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object, nearest

VERSION = -1  # stored with demonstrations as the version of the weights, because no policy of the run sampled them
Expert = Callable[[Floats], Floats]  # observations [B, D] -> actions [B, C * A] in [-1, 1]


def load(buffer: TrajectoryReplayBuffer, path: Path) -> None:
    """Load the content of another buffer into ``buffer``; see `find_buffer` for ``path``.

    Raises:
        UserError: there is no such buffer or checkpoint, or it is damaged.
    """
    buffer.load_checkpoint(find_buffer(path))


def find_buffer(path: Path) -> Path:
    """Return the folder of the buffer or of its checkpoint that ``demonstrations.path`` stands for.

    ``path`` is this folder or that of a run. Of a run, the result is the buffer in its newest checkpoint or, if there
    is none, the buffer in the run folder. Raises `UserError` if ``path`` is no folder.
    """
    if not path.is_dir():
        raise UserError(f"demonstrations.path = {str(path)!r}: no such folder")
    checkpoints = [p for p in path.glob("checkpoints/step-*") if p.name[5:].isdigit()]
    newest = max(checkpoints, key=lambda p: int(p.name[5:]), default=None)
    candidates = [*([newest / "buffer" / "online"] if newest else []), path / "buffer" / "online"]
    return next((candidate for candidate in candidates if candidate.is_dir()), path)


def record(buffer: TrajectoryReplayBuffer, worker: RolloutWorker, expert: Expert, chunk_steps: int) -> float:
    """Add trajectories of ``expert`` to ``buffer``, with at least ``chunk_steps`` chunk steps of each environment.

    Returns the mean return of the episodes that ended, or NaN if none ended.

    Raises:
        UserError: the expert's actions have the wrong shape, or are not in [-1, 1].
    """
    wanted = (worker.environments.count, worker.environments.action_size)

    def act(obs: Tensor) -> tuple[Tensor, Tensor]:
        actions = np.asarray(expert(obs.numpy()), np.float32)
        if actions.shape != wanted:
            raise UserError(f"demonstrations.expert gave actions {list(actions.shape)}, not {list(wanted)}")
        if not (np.abs(actions) <= 1 + 1e-6).all():
            raise UserError(
                "demonstrations.expert gave actions outside of [-1, 1], which stands for the whole action space"
            )
        return torch.from_numpy(actions), torch.zeros(len(actions))

    count = -(-chunk_steps // worker.chunk_steps)
    rollouts = [worker.record(act, number, VERSION) for number in range(count)]
    buffer.add_trajectories([rollout.trajectory for rollout in rollouts])
    returns = [value for rollout in rollouts for value in rollout.returns]
    return float(np.mean(returns)) if returns else float("nan")


def pendulum(obs: Floats) -> Floats:
    """Swing the pendulum of ``Pendulum-v1`` up by pumping energy, and balance it upright."""
    cosine, sine, speed = obs[:, 0], obs[:, 1], obs[:, 2]
    # The energy is 0 when the pendulum stands upright at rest. Mass and length are 1, the moment of inertia is 1/3 and
    # gravity is 10.
    energy = speed**2 / 6 + 5 * (cosine - 1)
    pump = np.where(energy < 0, 2.0, -2.0) * np.where(speed >= 0, 1.0, -1.0)
    hold = -10 * np.arctan2(sine, cosine) - 2.5 * speed
    torque = np.where((cosine > 0.9) & (np.abs(speed) < 3), hold, pump)
    return (np.clip(torque, -2, 2) / 2).astype(np.float32)[:, None]


def mountain_car(obs: Floats) -> Floats:
    """Drive the car of ``MountainCarContinuous-v0`` up the hill by always pushing in its direction of motion."""
    return np.where(obs[:, 1:] >= 0, 1.0, -1.0).astype(np.float32)


EXPERTS: dict[str, Expert] = {"mountain_car": mountain_car, "pendulum": pendulum}


def find_expert(name: str) -> Expert:
    """Return the expert with this name or import path. Raises `UserError` if there is no such expert."""
    if name in EXPERTS:
        return EXPERTS[name]
    if ":" in name:
        return load_object(name)
    hint = nearest(name, EXPERTS) or f"; known: {', '.join(EXPERTS)}, or an import path"
    raise UserError(f"demonstrations.expert = {name!r}: no such expert{hint}")
