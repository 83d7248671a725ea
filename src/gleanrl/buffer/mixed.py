"""Batches of two buffers in one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gleanrl.buffer.replay_buffer import TrajectoryReplayBuffer
from gleanrl.buffer.sampling import Batch
from gleanrl.buffer.trajectory import INSTRUCTIONS
from gleanrl.errors import UserError


class MixedReplayBuffer:
    """Batches of which a share comes from demonstrations (RLPD, Ball et al. 2023, takes one half).

    Args:
        online: what the policy did.
        demonstrations: what somebody showed.
        share: of demonstrations in a batch, rounded to whole chunk steps.
    """

    def __init__(
        self, online: TrajectoryReplayBuffer, demonstrations: TrajectoryReplayBuffer, share: float = 0.5
    ) -> None:
        if not 0 <= share <= 1:
            raise UserError(f"share = {share:g}: between 0 and 1")
        self.online, self.demonstrations, self.share = online, demonstrations, share

    def sample(self, num_chunks: int, **how: Any) -> Batch:
        """As `TrajectoryReplayBuffer.sample`; ``demonstration`` bool [num_chunks] says where each comes from."""
        shown = round(num_chunks * self.share)
        parts = [
            buffer.sample(count, **how)
            for buffer, count in ((self.online, num_chunks - shown), (self.demonstrations, shown))
            if count
        ]
        batch = parts[0] if len(parts) == 1 else _joined(*parts)
        return {**batch, "demonstration": torch.arange(num_chunks) >= num_chunks - shown}

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Both of them."""
        for name, buffer in self._both():
            buffer.save_checkpoint(Path(path) / name)

    def load_checkpoint(self, path: str | os.PathLike[str], **how: Any) -> None:
        """Both of them; raises `UserError` where one is missing."""
        for name, buffer in self._both():
            buffer.load_checkpoint(Path(path) / name, **how)

    def _both(self) -> tuple[tuple[str, TrajectoryReplayBuffer], ...]:
        return ("online", self.online), ("demonstrations", self.demonstrations)


def _count(batch: Any) -> int:
    """Chunk steps of a batch."""
    while isinstance(batch, dict):
        batch = next(iter(batch.values()))
    return len(batch)


def _joined(first: Batch, second: Batch) -> Batch:
    """The fields that both have, one behind the other; who was told nothing has empty instructions."""
    joined: Batch = {}
    if INSTRUCTIONS in first or INSTRUCTIONS in second:
        first, second = ({INSTRUCTIONS: [""] * _count(own), **own} for own in (first, second))
    for name in first.keys() & second.keys():
        ours, theirs = first[name], second[name]
        if isinstance(ours, dict):
            joined[name] = _joined(ours, theirs)
        elif isinstance(ours, Tensor):
            if ours.shape[1:] != theirs.shape[1:] or ours.dtype != theirs.dtype:
                told = f"{list(ours.shape[1:])} {ours.dtype} and {list(theirs.shape[1:])} {theirs.dtype}"
                raise UserError(f"{name}: online and demonstrations differ: {told}")
            joined[name] = torch.cat([ours, theirs])
        else:
            joined[name] = [*ours, *theirs]
    return joined
