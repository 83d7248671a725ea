"""Divides the micro-batches of an update among replicas of a model that consist of one or more processes each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gleanrl.algorithms.batch import Sample
from gleanrl.algorithms.loss import Tokens
from gleanrl.algorithms.microbatch import MAX_PADDING
from gleanrl.learners.backend import Pass, Replicas, join_tokens
from gleanrl.learners.distributed.ranks import Ranks

T = TypeVar("T")
_HOST = torch.device("cpu")


class RankReplicas(Replicas):
    """The replicas of a model over several processes.

    Args:
        ranks: the processes.
        shares: for each rank, the number of the replica to which it belongs.
        speakers: for each replica, the rank of one of its processes that gets the results of passes; ascending.
        peers: process group of this process and of those that have the same part of the other replicas.
    """

    def __init__(self, ranks: Ranks, shares: Sequence[int], speakers: Sequence[int], peers: Any) -> None:
        self._ranks, self._shares, self._speakers, self._peers = ranks, shares, speakers, peers
        self.ranks, self.leads = ranks.count, ranks.rank == 0
        self._reporting: Any = ranks.among(sorted({0, *speakers}))

    def budget(self, tokens: int, limit: int) -> int:
        replicas = len(self._speakers)
        rounds = math.ceil(tokens / (limit * replicas)) or 1
        return max(1, min(limit, math.ceil((1 + MAX_PADDING) * tokens / (rounds * replicas))))

    def deal(self, parts: Sequence[Sequence[Sample]]) -> list[Sequence[Sample]]:
        if not self.leads:
            return self._ranks.scatter(None)
        replicas = len(self._speakers)
        padding = [[parts[0][0].start()]] * (-len(parts) % replicas) if parts else []
        padded = [*parts, *padding]
        return self._ranks.scatter([padded[share::replicas] for share in self._shares])

    def agree(self, decide: Callable[[], T]) -> T:
        return self._ranks.share(decide() if self.leads else None)  # type: ignore[return-value]

    def join(self, parts: Sequence[Tokens]) -> tuple[Tokens, slice]:
        tokens: list[Any] = [None] * len(self._speakers)
        dist.all_gather_object(tokens, _moved(join_tokens(parts), _HOST), group=self._peers)
        share = self._shares[self._ranks.rank]
        start = sum(part.logp.numel() for part in tokens[:share])
        own = slice(start, start + tokens[share].logp.numel())
        return _moved(join_tokens(tokens), self._ranks.device), own

    def total(self, seen: Pass) -> Pass:
        here = replace(seen, statistics=_moved(seen.statistics, _HOST), critic=_moved(seen.critic, _HOST))
        return sum(self._reported(here), Pass.empty())

    def gather(self, results: Sequence[Tensor]) -> list[Tensor]:
        return [result for together in zip(*self._reported(results), strict=True) for result in together]

    def _reported(self, value: T) -> list[T]:
        """Return the values of the speakers, in the order of replicas, in the process that leads."""
        values: list[Any] | None = [None] * len({0, *self._speakers}) if self.leads else None
        if self.leads or self._ranks.rank in self._speakers:
            dist.gather_object(value, values, 0, group=self._reporting)
        return values[-len(self._speakers) :] if values else []


def _moved(record: Any, device: torch.device) -> Any:
    """Return a copy of the dataclass ``record`` with its tensors on ``device``."""
    tensors = {field.name: getattr(record, field.name) for field in fields(record)}
    return replace(record, **{name: each.to(device) for name, each in tensors.items() if isinstance(each, Tensor)})
