"""Divides the micro-batches of an update among replicas of a model that consist of one or more processes each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gleanrl.algorithms.loss import Tokens
from gleanrl.algorithms.microbatch import MAX_PADDING, MicroBatch
from gleanrl.learners.backend import Pass, Replicas, join_tokens
from gleanrl.learners.distributed.ranks import Ranks

T = TypeVar("T")
HOST = torch.device("cpu")


class RankReplicas(Replicas):
    """The replicas of a model over several processes.

    Args:
        ranks: the processes.
        speakers: for each replica, the rank of one of its processes that gets the results of passes.
        share: number of the replica to which this process belongs.
    """

    def __init__(self, ranks: Ranks, speakers: Sequence[int], share: int) -> None:
        self._ranks, self._speakers, self._share, self._shares = ranks, speakers, share, len(speakers)
        self.ranks, self.leads = ranks.count, ranks.rank == 0

    def budget(self, tokens: int, limit: int) -> int:
        rounds = math.ceil(tokens / (limit * self._shares)) or 1
        return max(1, min(limit, math.ceil((1 + MAX_PADDING) * tokens / (rounds * self._shares))))

    def deal(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        mine = list(micros[self._share :: self._shares])
        if len(mine) * self._shares < len(micros):
            mine.append(micros[0].nothing())
        return mine

    def join(self, parts: Sequence[Tokens]) -> tuple[Tokens, slice]:
        gathered = self._results([_moved(part, HOST) for part in parts])
        start = sum(part.logp.numel() for before in gathered[: self._share] for part in before)
        own = slice(start, start + sum(part.logp.numel() for part in gathered[self._share]))
        return _moved(join_tokens([part for given in gathered for part in given]), self._ranks.device), own

    def total(self, seen: Pass) -> Pass:
        here = replace(seen, statistics=_moved(seen.statistics, HOST), critic=_moved(seen.critic, HOST))
        first, *others = self._results(here)
        return sum(others, first)

    def gather(self, rows: Mapping[int, T]) -> Mapping[int, T]:
        return {key: value for given in self._ranks.gather(dict(rows)) for key, value in given.items()}

    def _results(self, value: T) -> list[T]:
        """Return the values that the replicas' speakers pass."""
        everyone = self._ranks.gather(value)
        return [everyone[rank] for rank in self._speakers]


def _moved(record: Any, device: torch.device) -> Any:
    """Return a copy of the dataclass ``record`` with its tensors on ``device`` and detached from the graph."""
    tensors = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{k: v.detach().to(device) for k, v in tensors.items() if isinstance(v, Tensor)})
