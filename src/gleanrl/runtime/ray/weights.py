"""Transfers published weights from the learner's actor to the sampler actors, without passing through the driver.

The setting ``ray.transfer`` selects one of two ways:

* "memory": the learner writes the weights to Ray's object store once, bucket by bucket. All samplers on a node map the
  same memory without a copy, and Ray copies the weights between nodes.
* "broadcast": the learner and the samplers form a torch.distributed process group, with NCCL on GPUs and gloo on CPUs,
  and the learner broadcasts each tensor. If actors may be restarted, the learner afterwards also copies the weights to
  the object store, for samplers that start later.

If the learner trains adapters, their base weights go through the object store once, whichever way is selected, and each
publication transfers only the adapters.

`WeightSource` is the base class of the learner's service, `WeightReceiver` of the sampler's service. The driver passes
a `WeightHandle` from the learner to the samplers. The tests run broadcasts only with gloo, because NCCL needs a GPU for
each process. NCCL and gloo differ only in how a group is made and in how a waiting transfer is aborted.
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
from gleanrl.utils.weights import AdaptedWeights, Layout, buckets, layout_of

T = TypeVar("T")
Way = Literal["memory", "broadcast"]
Backend = Literal["nccl", "gloo"]
Weights = Mapping[str, torch.Tensor]
TIMEOUT = timedelta(seconds=60)  # limit for all members to join a group, and for each broadcast operation
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


# --- through Ray's store ------------------------------------------------------------------------------
class _Bytes(NamedTuple):
    """A tensor as a numpy array of bytes.

    Ray's object store maps numpy arrays without a copy, but numpy lacks dtypes such as bfloat16 and float8.
    """

    dtype: str  # name of the torch dtype, such as "bfloat16"
    shape: tuple[int, ...]
    data: np.ndarray  # uint8 [number of bytes]


def to_bytes(weights: Weights) -> dict[str, _Bytes]:
    """Convert tensors to bytes. The result shares memory with contiguous tensors on the CPU; others are copied."""
    converted = {}
    for name, tensor in weights.items():
        plain = tensor.detach().cpu().contiguous()
        dtype = str(plain.dtype).removeprefix("torch.")
        converted[name] = _Bytes(dtype, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy())
    return converted


def from_bytes(weights: Mapping[str, _Bytes]) -> dict[str, torch.Tensor]:
    """Convert the result of `to_bytes` to tensors. They share memory with the bytes and must not be modified."""
    tensors = {}
    for name, (dtype_name, shape, data) in weights.items():
        dtype = getattr(torch, dtype_name)
        if not data.size:
            tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that the mapped array is read-only
            tensors[name] = torch.from_numpy(data).view(dtype).reshape(shape)
    return tensors


class Base(NamedTuple):
    """The base weights of adapters in Ray's object store, to which they are written once."""

    references: list[Any]  # to their buckets
    scale: float  # `AdaptedWeights.scale`


class Stored(NamedTuple):
    """Weights in Ray's object store, as the source for `WeightReceiver.receive`.

    Each reference is to a bucket of them. A list of references is needed in any case, because Ray replaces a reference
    that is itself an argument by its value.
    """

    references: list[Any]
    base: Base | None = None  # if the stored weights are adapters


def sent(weights: Weights) -> Weights:
    """Return what every publication transfers: the adapters, or all weights if there are none."""
    return weights.adapters if isinstance(weights, AdaptedWeights) else weights


def store(weights: Weights) -> list[Any]:
    """Write ``weights`` to Ray's object store, one bucket at a time, and return a reference to each."""
    parts = ({name: weights[name] for name in names} for names in buckets(layout_of(weights)))
    return [import_ray().put(to_bytes(part)) for part in parts]


# --- by a broadcast -----------------------------------------------------------------------------------
class Place(NamedTuple):
    """Describes a broadcast group: where its members connect, and which tensors are broadcast."""

    host: str  # address of the TCPStore that the learner opens
    port: int
    world: int  # number of members, the learner included
    backend: Backend
    number: int  # number of the group, which distinguishes it from earlier groups of the run
    layout: dict[str, Layout]  # shapes and dtypes of the tensors by name, in the order in which they are sent
    base: Base | None = None  # if the tensors are adapters; base weights are not broadcast


class Broadcast(NamedTuple):
    """Weights that a sampler receives as member ``rank`` of a broadcast group, as the source for `receive`."""

    place: Place
    rank: int


class BroadcastGroup:
    """A process group that broadcasts weights from rank 0 (the learner) to the other ranks (the samplers).

    Each member constructs its own instance. After an error, the group cannot be used again and a new one is needed.

    Args:
        store: on rank 0, the TCPStore that listens at ``place``. On other ranks None, which means to connect to it.
    """

    def __init__(self, place: Place, rank: int, store: Any = None) -> None:
        self.place = place
        self._rank, self._store = rank, store
        self._group: Any = None

    def join(self) -> None:
        """Connect to the other members. Raises `RuntimeError` if not all members connect within `TIMEOUT`."""
        place = self.place
        self._store = self._store or TCPStore(place.host, place.port, place.world, False, TIMEOUT)
        prefixed = PrefixStore(f"weights-{place.number}", self._store)
        if place.backend == "gloo":
            self._group = distributed.ProcessGroupGloo(prefixed, self._rank, place.world, TIMEOUT)
            return
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        # By default NCCL's watchdog ends the process on an error, so the death of a sampler would end the learner.
        # With this variable, the error is raised in `transfer` instead.
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
        """Broadcast ``weights`` to all members (rank 0), or receive and return them (other ranks).

        All members must call it. The first call joins the group. Rank 0 returns an empty dict. A bucket is sent by one
        operation, because each operation waits for all members.

        Raises:
            RuntimeError: a member did not join or has died, or an operation took longer than `TIMEOUT`.
        """
        if not self._group:
            self.join()
        device = torch.device("cuda" if self.place.backend == "nccl" else "cpu")
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        received = {}
        try:
            for names in buckets(self.place.layout):
                layouts = [self.place.layout[name] for name in names]
                sizes = [math.prod(each.shape) for each in layouts]
                if weights is None:
                    data = torch.empty(sum(sizes), dtype=layouts[0].dtype, device=device)
                    for name, each, part in zip(names, layouts, data.split(sizes), strict=True):
                        received[name] = part.view(each.shape)
                else:
                    tensors = [weights[name].detach().to(device).reshape(-1) for name in names]
                    data = tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)
                if data.numel():
                    self._group.broadcast([data.view(torch.uint8)], options).wait()
                    if data.is_cuda:
                        torch.cuda.synchronize(data.device)
        except BaseException:  # also an error in reading weights, for which the other members would wait
            with suppress(RuntimeError):
                self.abort()
            self._group = None  # dropping the last reference makes the group close its connections
            raise
        return received

    def abort(self) -> None:
        """Abort a `transfer` that waits for other members. May be called from any thread.

        Does nothing with gloo, which raises an error by itself when the connection to a member is lost.
        """
        if self.place.backend == "nccl" and self._group is not None:
            self._group.abort()


# --- in the actors ------------------------------------------------------------------------------------
class BroadcastService(Service):
    """Base class of a service that is a member of broadcast groups. ``group`` is the present one, or None."""

    group: BroadcastGroup | None = None

    async def abort(self) -> None:
        """Abort the running transfer, if there is one. The driver calls it when another member has failed."""
        if self.group is not None:
            self.group.abort()


class WeightReceiver(BroadcastService):
    """Base class of the sampler's service: receives published weights from Ray's object store or by a broadcast."""

    # The references to the base weights of adapters that were received last, and these weights.
    _base: tuple[list[Any], Weights] | None = None

    async def receive(self, source: Stored | Broadcast) -> Weights:
        if isinstance(source, Stored):
            received, base = await self._fetch(source.references), source.base
        else:
            if self.group is None or self.group.place != source.place:
                self.group = BroadcastGroup(source.place, source.rank)
            try:
                received, base = await asyncio.to_thread(self.group.transfer), source.place.base
            except BaseException:
                self.group = None
                raise
        if base is None:
            return received
        if self._base is None or self._base[0] != base.references:
            self._base = base.references, await self._fetch(base.references)
        return AdaptedWeights(self._base[1], received, base.scale)

    async def _fetch(self, references: list[Any]) -> Weights:
        parts = await asyncio.gather(*references)
        return {name: tensor for part in parts for name, tensor in from_bytes(part).items()}


class WeightSource(BroadcastService):
    """Base class of the learner's service: sends the weights to Ray's object store or by a broadcast.

    The weights are read by threads while the learner's actor serves other calls. The learner therefore calls `changing`
    before it modifies the weights, which waits until these threads have finished. ``number`` identifies a state of the
    weights: it increases by 1 with each change.
    """

    def __init__(self) -> None:
        self.number = 0
        self._reads: set[asyncio.Future[Any]] = set()
        # number of the weights -> reference to the copy in the object store that was made after their broadcast
        self._stored: dict[int, asyncio.Future[Stored]] = {}
        self._base: tuple[Weights, Base] | None = None  # the base weights in the object store, if there are adapters

    def weights(self) -> Weights:
        """Return the current weights as full tensors, not shards. Called, and read, on a thread of its own."""
        raise NotImplementedError

    async def changing(self) -> None:
        """Increase ``number`` and wait until no thread reads the weights. Must be called before each change of them."""
        self.number += 1
        if self._reads:
            await asyncio.wait(self._reads)

    async def put(self, number: int) -> Stored:
        """Write the weights to Ray's object store. Base weights of adapters are written by the first call only.

        If the weights with this ``number`` were broadcast before, the copy made then is used. Otherwise they must be
        the current weights.

        Raises:
            RuntimeError: the weights have changed since ``number`` and no copy was made.
        """
        stored = self._stored.pop(number, None)
        if stored is None:
            if number != self.number:
                raise RuntimeError(f"the weights have changed since number {number}, and no copy was kept")
            stored = self._read(self._write)
        return await stored

    def _write(self, weights: Weights) -> Stored:
        base = self._store_base(weights)
        return Stored(store(sent(weights)), base)

    def _store_base(self, weights: Weights) -> Base | None:
        if not isinstance(weights, AdaptedWeights):
            return None
        if self._base is None or self._base[0] is not weights.base:
            self._base = weights.base, Base(store(weights.base), weights.scale)
        return self._base[1]

    async def meet(self, port: int, world: int, backend: Backend, number: int) -> Place:
        """Start a TCPStore for a new broadcast group of ``world`` members, and return the group's `Place`.

        ``port`` 0 selects a free port. ``number`` is the number of the group.
        """
        layout, base = await self._read(lambda weights: (dict(layout_of(sent(weights))), self._store_base(weights)))
        host = import_ray().util.get_node_ip_address()
        self.group = None  # deletes the old group, whose store may listen on the same port
        store = await asyncio.to_thread(TCPStore, host, port, world, True, TIMEOUT, wait_for_workers=False)
        place = Place(host, store.port, world, backend, number, layout, base)
        self.group = BroadcastGroup(place, 0, store)
        return place

    async def broadcast(self, number: int, keep: bool) -> None:
        """Broadcast the current weights to the group that `meet` has created.

        With ``keep``, then start to copy the weights to Ray's object store, from where a later `put` of the same
        ``number`` takes them. Does not wait for the copy.
        """
        assert self.group is not None
        try:
            group = self.group
            await self._read(lambda weights: group.transfer(sent(weights)))
        except BaseException:
            self.group = None
            raise
        if keep:
            self._stored[number] = self._read(self._write)

    def _read(self, use: Callable[[Weights], T]) -> asyncio.Future[T]:
        """Call ``use`` with the weights on a thread, and return a future of its result. `changing` waits for it."""
        read = asyncio.ensure_future(asyncio.to_thread(lambda: use(self.weights())))
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        return read


# --- in the driver ------------------------------------------------------------------------------------
class WeightHandle:
    """Refers to a state of the learner's weights without containing the tensors. The driver passes it to samplers.

    The handle keeps the copy in Ray's object store alive, if there is one: Ray deletes the copy when the handle is
    deleted.
    """

    def __init__(self, learner: ActorClient, number: int) -> None:
        self.learner, self.number = learner, number
        self._stored: asyncio.Future[Stored] | None = None

    @property
    def is_put(self) -> bool:
        """Whether `put` was called."""
        return self._stored is not None

    def put(self) -> asyncio.Future[Stored]:
        """Make the learner write the weights to Ray's object store. Returns a future of where they are.

        Further calls return the same future. Awaiting it raises `LearnerLost` if the learner has died.
        """
        if self._stored is None:
            self._stored = asyncio.ensure_future(self.learner.ask("put", self.number))
            # Without this, asyncio prints the error of a future that is not awaited.
            self._stored.add_done_callback(lambda future: future.cancelled() or future.exception())
        return self._stored
