"""Weights from one process to many at once: NCCL between GPUs, gloo between processors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

_BUCKET = 64 << 20  # bytes sent at once, unless one tensor alone has more
_PATIENCE = timedelta(seconds=60)  # for the others of a group: to come, and to take a bucket
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
Backend = Literal["nccl", "gloo"]


class Entry(NamedTuple):
    """What a receiver must know of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Place(NamedTuple):
    """Where a group meets. ``number`` tells it from earlier ones."""

    host: str
    port: int
    world: int
    backend: Backend
    number: int


class Group:
    """One process's part in a group; rank 0 sends. It meets when it is made, which waits for the others. An error of
    one call ends the group: the others must not wait for who has given up.

    Raises:
        RuntimeError: they did not come, or (later) one of them is gone or takes nothing for a minute.
    """

    def __init__(self, place: Place, rank: int, store: Any = None) -> None:
        self.place = place
        self._store = store or TCPStore(place.host, place.port, place.world, False, _PATIENCE)
        self.device = torch.device("cuda" if place.backend == "nccl" else "cpu")
        prefixed = PrefixStore(f"weights-{place.number}", self._store)
        if place.backend == "nccl":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = _PATIENCE
            with _errors_are_raised():
                self._group: Any = distributed.ProcessGroupNCCL(prefixed, rank, place.world, options)
        else:
            self._group = distributed.ProcessGroupGloo(prefixed, rank, place.world, _PATIENCE)

    def abort(self) -> None:
        """From any thread: end what waits for the others. Gloo sees by itself that a process is gone."""
        if self.place.backend == "nccl" and self._group is not None:
            self._group.abort()

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        entries = manifest(weights)
        for bucket in _buckets(entries):
            parts = [weights[entry.name].detach().to(self.device).contiguous().reshape(-1) for entry in bucket]
            self._broadcast(torch.cat([part.view(torch.uint8) for part in parts]))

    def receive(self, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        taken: dict[str, torch.Tensor] = {}
        for bucket in _buckets(entries):
            data = torch.empty(sum(entry.bytes for entry in bucket), dtype=torch.uint8, device=self.device)
            self._broadcast(data)
            parts = data.split([entry.bytes for entry in bucket])
            for entry, part in zip(bucket, parts, strict=True):
                # a copy where the bytes do not begin at a multiple of the type's size
                dtype = getattr(torch, entry.dtype)
                whole = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
                taken[entry.name] = whole.view(dtype).reshape(entry.shape)
        return taken

    def _broadcast(self, data: torch.Tensor) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            self._group.broadcast([data], options).wait()
            if data.is_cuda:
                torch.cuda.synchronize(data.device)
        except RuntimeError:
            with suppress(RuntimeError):
                self.abort()
            self._group = None  # closes its connections
            raise


@contextmanager
def _errors_are_raised() -> Iterator[None]:
    """A group of NCCL that is made meanwhile waits on the processor and raises. By default its watchdog ends the whole
    process: the learner, for a sampler that died."""
    before = os.environ.get(_BLOCKING)
    os.environ[_BLOCKING] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING]
        else:
            os.environ[_BLOCKING] = before


def meeting(host: str, port: int, world: int, backend: Backend, number: int) -> tuple[Place, Any]:
    """A place for a group of ``world``, and the store that its sender keeps open."""
    store = TCPStore(host, port, world, True, _PATIENCE, wait_for_workers=False)
    return Place(host, store.port, world, backend, number), store


def manifest(weights: Mapping[str, torch.Tensor]) -> list[Entry]:
    return [
        Entry(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.numel() * t.element_size())
        for name, t in weights.items()
    ]


def _buckets(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    bucket: list[Entry] = []
    size = 0
    for entry in entries:
        if bucket and size + entry.bytes > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += entry.bytes
    if bucket:
        yield bucket
