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
from gleanrl.utils.errors import UserError

ONLINE, DEMONSTRATIONS = "online", "demonstrations"  # folders of a checkpoint


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
        online, shown = parts(num_chunks, self.share)
        sources = ((self.online, online, False), (self.demonstrations, shown, True))
        drawn = [
            (buffer.sample(count, **{**how, "indices": True}), is_shown)  # which say how many there are
            for buffer, count, is_shown in sources
            if count or not num_chunks
        ]
        told = [torch.full((len(batch["indices"]),), is_shown) for batch, is_shown in drawn]
        batch = drawn[0][0] if len(drawn) == 1 else _joined(*(batch for batch, _ in drawn))
        if not how.get("indices"):
            del batch["indices"]
        return {**batch, "demonstration": torch.cat(told)}

    def save_checkpoint(self, save_path: str | os.PathLike[str]) -> None:
        """Both of them."""
        self.online.save_checkpoint(Path(save_path) / ONLINE)
        self.demonstrations.save_checkpoint(Path(save_path) / DEMONSTRATIONS)

    def load_checkpoint(self, load_path: str | os.PathLike[str], **how: Any) -> None:
        """Both of them, or neither: `UserError` where one is missing or damaged."""

        def other() -> None:
            self.demonstrations.load_checkpoint(Path(load_path) / DEMONSTRATIONS, **how)

        self.online.load_checkpoint(Path(load_path) / ONLINE, **how, also=other)


def parts(num_chunks: int, share: float) -> tuple[int, int]:
    """How many of so many chunk steps are the policy's, and how many were shown."""
    shown = round(num_chunks * share)
    return num_chunks - shown, shown


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
