"""Moves published weights from the learner's actor to the sampler actors; the driver never holds the tensors.

* Through Ray's object store (``ray.transfer = "memory"``): the learner puts the weights there once, all samplers of a
  node map the same bytes without a copy, and Ray moves the weights between nodes.
* By a broadcast between the processes (``"broadcast"``): NCCL between GPUs, gloo between CPUs. Afterwards the learner
  also puts a copy into the store, for a sampler that is restarted later.

`WeightSource` is the learner's end, `WeightReceiver` is a sampler's end, and `WeightHandle` is what the driver passes
on. The tests run broadcasts with gloo only, because NCCL needs a GPU for each process. The two differ in how a group is
made, and in how a transfer that waits is aborted.
"""

from __future__ import annotations

import asyncio
import math
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gleanrl.runtime.ray.actors import ActorClient, Service
from gleanrl.runtime.ray.cluster import import_ray

T = TypeVar("T")
Way = Literal["memory", "broadcast"]
Backend = Literal["nccl", "gloo"]
Weights = Mapping[str, torch.Tensor]
TIMEOUT = timedelta(seconds=60)  # limit for all members of a group to join, and for the transfer of a tensor
_BUCKET = 32 << 20  # bytes; small tensors are sent together, because each broadcast waits for all members
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


# --- through Ray's store ------------------------------------------------------------------------------
class _Bytes(NamedTuple):
    """A tensor as numpy bytes, which Ray's store maps without a copy whatever the tensor's dtype (bfloat16, float8)."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray  # uint8, flat


def to_bytes(weights: Weights) -> dict[str, _Bytes]:
    """Convert tensors to bytes. Contiguous tensors on the CPU are not copied, others are."""
    converted = {}
    for name, tensor in weights.items():
        plain = tensor.detach().cpu().contiguous()
        dtype = str(plain.dtype).removeprefix("torch.")
        converted[name] = _Bytes(dtype, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy())
    return converted


def from_bytes(weights: Mapping[str, _Bytes]) -> dict[str, torch.Tensor]:
    """Convert bytes to tensors. The tensors are views of the bytes and must not be written to."""
    tensors = {}
    for name, (dtype_name, shape, data) in weights.items():
        dtype = getattr(torch, dtype_name)
        if not data.size:
            tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that the array is not writable
            tensors[name] = torch.from_numpy(data).view(dtype).reshape(shape)
    return tensors


class Stored(NamedTuple):
    """Weights in Ray's store: ``[reference]``, in a list so that Ray passes the reference and not the weights."""

    reference: list[Any]


# --- by a broadcast -----------------------------------------------------------------------------------
class Entry(NamedTuple):
    """Describes a tensor, so that its receiver can allocate it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Place(NamedTuple):
    """Where a broadcast group meets, and the tensors that it sends. ``number`` distinguishes it from earlier groups."""

    host: str
    port: int
    world: int
    backend: Backend
    number: int
    entries: tuple[Entry, ...]


class Broadcast(NamedTuple):
    """Weights that a sampler receives by a broadcast, as ``rank`` of the group at ``place``."""

    place: Place
    rank: int


class BroadcastGroup:
    """One process's membership in a group of ``place.world`` processes; rank 0 sends. The first error ends the group.

    Args:
        store: on the sender, the store that it has opened at ``place``; receivers pass None and connect to it.
    """

    def __init__(self, place: Place, rank: int, store: Any = None) -> None:
        self.place = place
        self._rank, self._store = rank, store
        self._group: Any = None

    def join(self) -> None:
        """Wait until all members have joined. Raises `RuntimeError` if one does not."""
        place = self.place
        self._store = self._store or TCPStore(place.host, place.port, place.world, False, TIMEOUT)
        prefixed = PrefixStore(f"weights-{place.number}", self._store)
        if place.backend == "gloo":
            self._group = distributed.ProcessGroupGloo(prefixed, self._rank, place.world, TIMEOUT)
            return
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        # By default NCCL's watchdog ends the process on an error, so that a sampler's death would end the learner.
        before = os.environ.get(_BLOCKING)
        os.environ[_BLOCKING] = "1"
        try:
            self._group = distributed.ProcessGroupNCCL(prefixed, self._rank, place.world, options)
        finally:
            if before is None:
                del os.environ[_BLOCKING]
            else:
                os.environ[_BLOCKING] = before

    def transfer(self, weights: Weights | None = None) -> dict[str, torch.Tensor]:
        """Send ``weights`` (on rank 0), or receive and return them (on the other ranks). First joins the group.

        Raises:
            RuntimeError: a member did not join, is gone, or received nothing for a minute.
        """
        if self._group is None:
            self.join()
        group: Any = self._group
        # a bucket holds consecutive tensors of one dtype, at most `_BUCKET` bytes in all; a larger tensor is alone
        buckets: list[list[Entry]] = []
        size = 0
        for entry in self.place.entries:
            needed = math.prod(entry.shape) * entry.dtype.itemsize
            if not buckets or entry.dtype != buckets[-1][0].dtype or size + needed > _BUCKET:
                buckets.append([])
                size = 0
            buckets[-1].append(entry)
            size += needed

        device = torch.device("cuda" if self.place.backend == "nccl" else "cpu")
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        received = {}
        for bucket in buckets:
            sizes = [math.prod(entry.shape) for entry in bucket]
            if weights is None:
                data = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=device)
                for entry, part in zip(bucket, data.split(sizes), strict=True):
                    received[entry.name] = part.view(entry.shape)
            else:
                tensors = [weights[entry.name].detach().to(device).reshape(-1) for entry in bucket]
                data = tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)
            if not data.numel():
                continue
            try:
                group.broadcast([data.view(torch.uint8)], options).wait()
                if data.is_cuda:
                    torch.cuda.synchronize(data.device)
            except RuntimeError:
                with suppress(RuntimeError):
                    self.abort()
                group = self._group = None  # without references, the group closes its connections
                raise
        return received

    def abort(self) -> None:
        """Abort a transfer that waits for other members; call it from any thread. Gloo notices a lost member itself."""
        if self.place.backend == "nccl" and self._group is not None:
            self._group.abort()


# --- in the actors ------------------------------------------------------------------------------------
class BroadcastService(Service):
    """Base class of a service that takes part in broadcasts."""

    group: BroadcastGroup | None = None

    async def abort(self) -> None:
        """Stop waiting for the group, because a member is gone."""
        if self.group is not None:
            self.group.abort()


class WeightReceiver(BroadcastService):
    """Receives published weights; base class of a sampler's service."""

    async def receive(self, source: Stored | Broadcast) -> Weights:
        if isinstance(source, Stored):
            return from_bytes(await source.reference[0])
        if self.group is None or self.group.place != source.place:
            self.group = BroadcastGroup(source.place, source.rank)
        try:
            return await asyncio.to_thread(self.group.transfer)
        except BaseException:
            self.group = None
            raise


class WeightSource(BroadcastService):
    """Sends a learner's weights to samplers; base class of the learner's service.

    ``number`` counts changes of the weights. `changing` delays a change until all readers have finished.
    """

    def __init__(self) -> None:
        self.number = 0
        self._reads: set[asyncio.Future[Any]] = set()
        self._stored: dict[int, asyncio.Future[Any]] = {}  # copies made after a broadcast, by number

    def weights(self) -> Weights:
        """Return the current weights as whole tensors, not shards. Called on a thread."""
        raise NotImplementedError

    async def ping(self) -> None:
        """Return at once: an answer shows that the actor lives."""

    async def changing(self) -> None:
        """Count a change of the weights and wait for all readers. Must be called before the weights change."""
        self.number += 1
        if self._reads:
            await asyncio.wait(self._reads)

    async def put(self, number: int) -> list[Any]:
        """Put the weights with this number into Ray's store, unless they are there, and return ``[reference]``."""
        stored = self._stored.pop(number, None)
        if stored is None:
            if number != self.number:
                raise RuntimeError(f"the weights have changed since number {number}, and no copy was kept")
            stored = self._read(lambda weights: import_ray().put(to_bytes(weights)))
        return [await stored]

    async def meet(self, port: int, world: int, backend: Backend, number: int) -> Place:
        """Open a place where a broadcast group of ``world`` processes meets."""
        weights = await self._read(dict)
        entries = tuple(Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items())
        host = import_ray().util.get_node_ip_address()
        self.group = None  # drop the old group, because its store may listen on the same port
        store = await asyncio.to_thread(TCPStore, host, port, world, True, TIMEOUT, wait_for_workers=False)
        place = Place(host, store.port, world, backend, number, entries)
        self.group = BroadcastGroup(place, 0, store)
        return place

    async def broadcast(self, number: int, keep: bool) -> None:
        """Send the weights to the group. ``keep``: then start to make a copy for `put`, without waiting for it."""
        assert self.group is not None
        try:
            await self._read(self.group.transfer)
        except BaseException:
            self.group = None
            raise
        if keep:
            self._stored[number] = self._read(lambda weights: import_ray().put(to_bytes(weights)))

    def _read(self, use: Callable[[Weights], T]) -> asyncio.Future[T]:
        """Run ``use`` on the weights in a thread, and return a future of its result."""
        read = asyncio.ensure_future(asyncio.to_thread(lambda: use(self.weights())))
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        return read


# --- in the driver ------------------------------------------------------------------------------------
class WeightHandle:
    """The learner's weights at one moment, in the driver.

    Ray frees the stored copy once no handle refers to it.
    """

    def __init__(self, learner: ActorClient, number: int) -> None:
        self.learner, self.number = learner, number
        self._reference: asyncio.Future[list[Any]] | None = None

    def put(self) -> asyncio.Future[list[Any]]:
        """Put the weights into Ray's store once; the result is ``[reference]``. Raises `LearnerLost`."""
        if self._reference is None:
            self._reference = asyncio.ensure_future(self.learner.ask("put", self.number))
        return self._reference
