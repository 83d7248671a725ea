"""Divides the micro-batches of an update among replicas of a model that consist of one or more processes each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gleanrl.algorithms.batch import Sample
from gleanrl.algorithms.loss import Tokens
from gleanrl.algorithms.loss_statistics import OPTIONAL, Statistics
from gleanrl.algorithms.microbatch import MAX_PADDING
from gleanrl.learners.backend import Pass, Replicas, join_tokens
from gleanrl.learners.critic import CriticStatistics
from gleanrl.learners.distributed.ranks import Ranks

T = TypeVar("T")
_COLUMNS = ("logp", "old_logp", "advantages", "sequence", "off_policy", "behaviour_logp")
_NUMBERS = [field.name for field in fields(Pass) if field.name not in ("statistics", "critic")]


class RankReplicas(Replicas):
    """The replicas of a model over several processes.

    Args:
        ranks: the processes.
        shares: for each rank, the number of the replica to which it belongs.
        speakers: for each replica, the rank of one of its processes that gets the results of passes.
    """

    def __init__(self, ranks: Ranks, shares: Sequence[int], speakers: Sequence[int]) -> None:
        self._ranks, self._shares, self._speakers = ranks, shares, speakers
        self._share, self._speaks = shares[ranks.rank], ranks.rank in speakers
        self.ranks, self.leads = ranks.count, ranks.rank == 0

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
        # All columns are sent as one matrix in the dtype of the log-probs, in which 2**24 indices of sequences are
        # exact.
        own = join_tokens(parts) if parts else None
        shape = torch.zeros(2, dtype=torch.int64)
        if own is not None:
            shape = torch.tensor([own.logp.numel(), own.logp.dtype.itemsize])
        shapes = [torch.empty_like(shape) for _ in range(self._ranks.count)]
        dist.all_gather(shapes, shape, group=self._ranks.group)
        matrices = []
        for speaker in self._speakers:
            count, size = shapes[speaker].tolist()
            matrix = torch.zeros(len(_COLUMNS), count, dtype=torch.float64 if size == 8 else torch.float32)
            if own is not None and speaker == self._ranks.rank:
                for row, name in zip(matrix, _COLUMNS, strict=True):
                    if (column := getattr(own, name)) is not None:
                        row.copy_(column.detach())
            dist.broadcast(matrix, speaker, group=self._ranks.group)
            matrices.append(matrix)
        start = sum(matrix.shape[1] for matrix in matrices[: self._share])
        columns: dict[str, Any] = {}
        for name, values in zip(_COLUMNS, torch.cat(matrices, 1), strict=True):
            like = None if own is None else getattr(own, name)
            columns[name] = None if like is None else values.to(like.device, like.dtype)
        return Tokens(**columns), slice(start, start + matrices[self._share].shape[1])

    def total(self, seen: Pass) -> Pass:
        seen = seen if self._speaks else Pass.empty()
        numbers = {name: getattr(seen, name) for name in _NUMBERS}
        optional = {name: name in seen.statistics.measured for name in sorted(OPTIONAL)}
        # Counts are exact in float64.
        added = (
            seen.statistics.sums,
            seen.statistics.histogram,
            seen.critic.sums,
            torch.tensor([*numbers.values()], dtype=torch.float64),
        )
        greatest = seen.statistics.extrema, torch.tensor([*optional.values()])
        sums, histogram, critic, counted = self._reduced(added, dist.ReduceOp.SUM)
        extrema, measured = self._reduced(greatest, dist.ReduceOp.MAX)
        names = frozenset(name for name, there in zip(optional, measured.tolist(), strict=True) if there)
        statistics = Statistics(sums, extrema, histogram.long(), names)
        for (name, own), value in zip(numbers.items(), counted.tolist(), strict=True):
            numbers[name] = type(own)(value)
        return Pass(statistics, CriticStatistics(critic), **numbers)

    def _reduced(self, tensors: Sequence[Tensor], operation: Any) -> list[Tensor]:
        """Reduce tensors of all processes elementwise, in float64. The result is in the process that leads."""
        vector = torch.cat([tensor.flatten().double().cpu() for tensor in tensors])
        dist.reduce(vector, 0, operation, group=self._ranks.group)
        parts = vector.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def gather(self, results: Sequence[Tensor], sizes: Sequence[int], rows: int) -> list[Tensor]:
        own = torch.cat(list(results), 1) if results else torch.empty(rows, 0)
        if not self.leads:
            if self._speaks and own.numel():
                dist.send(own, 0, group=self._ranks.group)
            return []
        found = [torch.empty(0)] * len(sizes)
        for replica, speaker in enumerate(self._speakers):
            counts = list(sizes[replica :: len(self._speakers)])
            whole = torch.empty(rows, sum(counts)) if speaker else own
            if speaker and whole.numel():
                dist.recv(whole, speaker, group=self._ranks.group)
            found[replica :: len(self._speakers)] = whole.split(counts, 1)
        return found
