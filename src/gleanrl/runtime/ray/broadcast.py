"""Broadcasts weights from the learner's process to many others: NCCL between GPUs, gloo between CPUs.

Called by `gleanrl.runtime.ray.weights` on threads. The tests run it with gloo; NCCL differs in how a group is made and
how a waiting one is aborted, and needs a machine with a GPU for each process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

_TIMEOUT = timedelta(seconds=60)  # for the other members of a group to join, and to receive a tensor
_BUCKET = 32 << 20  # bytes; small tensors are sent together, because each broadcast waits for all members
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
Backend = Literal["nccl", "gloo"]


class Entry(NamedTuple):
    """Describes a tensor to its receiver."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Place(NamedTuple):
    """Where a group meets, and what it sends. ``number`` distinguishes it from earlier groups."""

    host: str
    port: int
    world: int
    backend: Backend
    number: int
    entries: tuple[Entry, ...]


def open_store(host: str, port: int, world: int) -> TCPStore:
    """Open the store at which ``world`` processes meet; the sender keeps it."""
    return TCPStore(host, port, world, True, _TIMEOUT, wait_for_workers=False)


class BroadcastGroup:
    """One process's part in a group; rank 0 sends. Making it waits for the others. The first error ends the group.

    Raises:
        RuntimeError: a member did not join, is gone, or receives nothing for a minute.
    """

    def __init__(self, place: Place, rank: int, store: Any = None) -> None:
        self.place = place
        self._store = store or TCPStore(place.host, place.port, place.world, False, _TIMEOUT)
        self._device = torch.device("cuda" if place.backend == "nccl" else "cpu")
        prefixed = PrefixStore(f"weights-{place.number}", self._store)
        if place.backend == "nccl":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            # By default NCCL's watchdog ends the process on an error: the learner's, if a sampler dies.
            before = os.environ.get(_BLOCKING)
            os.environ[_BLOCKING] = "1"
            try:
                self._group: Any = distributed.ProcessGroupNCCL(prefixed, rank, place.world, options)
            finally:
                if before is None:
                    del os.environ[_BLOCKING]
                else:
                    os.environ[_BLOCKING] = before
        else:
            self._group = distributed.ProcessGroupGloo(prefixed, rank, place.world, _TIMEOUT)

    def abort(self) -> None:
        """End a call that waits for the others; works from any thread. Gloo itself notices that a process is gone."""
        if self.place.backend == "nccl" and self._group is not None:
            self._group.abort()

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        for bucket in _buckets(self.place.entries):
            tensors = [weights[entry.name].detach().to(self._device).reshape(-1) for entry in bucket]
            self._broadcast(tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors))

    def receive(self) -> dict[str, torch.Tensor]:
        received = {}
        for bucket in _buckets(self.place.entries):
            sizes = [math.prod(entry.shape) for entry in bucket]
            data = torch.empty(sum(sizes), dtype=getattr(torch, bucket[0].dtype), device=self._device)
            self._broadcast(data)
            for entry, part in zip(bucket, data.split(sizes), strict=True):
                received[entry.name] = part.view(entry.shape)
        return received

    def _broadcast(self, data: torch.Tensor) -> None:
        if not data.numel():
            return
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            self._group.broadcast([data.view(torch.uint8)], options).wait()
            if data.is_cuda:
                torch.cuda.synchronize(data.device)
        except RuntimeError:
            with suppress(RuntimeError):
                self.abort()
            self._group = None  # closes its connections
            raise


def _buckets(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Consecutive tensors of one dtype, together at most `_BUCKET` bytes; a larger one comes alone."""
    bucket: list[Entry] = []
    size = 0
    for entry in entries:
        needed = math.prod(entry.shape) * getattr(torch, entry.dtype).itemsize
        if bucket and (entry.dtype != bucket[0].dtype or size + needed > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += needed
    if bucket:
        yield bucket
