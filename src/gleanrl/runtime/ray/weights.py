"""Moves published weights from the learner's actor to the sampler actors; the driver never holds the tensors.

* Through Ray's object store (``ray.transfer = "memory"``): the learner puts them there once, the samplers of a node map
  the same bytes without a copy, and Ray moves them between nodes.
* By a broadcast between the processes (``"broadcast"``): NCCL between GPUs. Afterwards the learner puts a copy into the
  store too, for a sampler that is restarted later.

`WeightSource` is the learner's end, `WeightReceiver` a sampler's, and `WeightHandle` is what the driver passes on.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from gleanrl.runtime.ray.actors import ActorClient, ActorDied, Service
from gleanrl.runtime.ray.broadcast import Backend, BroadcastGroup, Entry, Place, open_store
from gleanrl.runtime.ray.cluster import import_ray

T = TypeVar("T")
Way = Literal["memory", "broadcast"]
Weights = Mapping[str, torch.Tensor]


class LearnerLost(Exception):
    """The learner's actor is gone, and with it what it learned since the last checkpoint."""


class _Bytes(NamedTuple):
    """A tensor as numpy bytes, which Ray's store maps without a copy whatever the tensor's dtype (bfloat16, float8)."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray  # uint8, flat


def to_bytes(weights: Weights) -> dict[str, _Bytes]:
    """Return views of tensors that are contiguous on the CPU, copies of others."""
    converted = {}
    for name, tensor in weights.items():
        plain = tensor.detach().cpu().contiguous()
        dtype = str(plain.dtype).removeprefix("torch.")
        converted[name] = _Bytes(dtype, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy())
    return converted


def from_bytes(weights: Mapping[str, _Bytes]) -> dict[str, torch.Tensor]:
    """Return views, which must not be written to."""
    tensors = {}
    for name, (dtype_name, shape, data) in weights.items():
        dtype = getattr(torch, dtype_name)
        if not data.size:
            tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the array is not writable
            tensors[name] = torch.from_numpy(data).view(dtype).reshape(shape)
    return tensors


class Stored(NamedTuple):
    """Weights in Ray's store: ``[reference]``, in a list so that Ray passes the reference and not what it refers to."""

    reference: list[Any]


class Broadcast(NamedTuple):
    """Weights that a broadcast brings to ``rank``."""

    place: Place
    rank: int


class WeightSource(Service):
    """Sends a learner's weights to samplers; base class of the learner's service.

    ``number`` counts changes of the weights. A change waits (`changing`) until all readers have finished.
    """

    def __init__(self) -> None:
        self.number = 0
        self._reads: set[asyncio.Future[Any]] = set()
        self._stored: dict[int, asyncio.Future[Any]] = {}  # copies that a broadcast has left, by number
        self._place: tuple[Place, Any] | None = None
        self._group: BroadcastGroup | None = None

    def weights(self) -> Weights:
        """Return the current whole tensors. Called on a thread."""
        raise NotImplementedError

    async def ping(self) -> None:
        """Return at once: an answer shows that the actor lives."""

    async def changing(self) -> None:
        """Call it before the weights change."""
        self.number += 1
        if self._reads:
            await asyncio.wait(self._reads)

    async def put(self, number: int) -> list[Any]:
        """Return ``[reference]`` to the weights with this number in Ray's store."""
        stored = self._stored.pop(number, None)
        if stored is None:
            if number != self.number:
                raise RuntimeError(f"the weights have changed since number {number}, and no copy was kept")
            stored = self._read(self._put)
        return [await stored]

    async def meet(self, port: int, world: int, backend: Backend, number: int) -> Place:
        """Open a place where a broadcast group of ``world`` processes meets."""

        def describe() -> tuple[Entry, ...]:
            weights = self.weights().items()
            return tuple(Entry(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in weights)

        host = import_ray().util.get_node_ip_address()
        entries = await self._read(describe)
        self._group = self._place = None
        store = await asyncio.to_thread(open_store, host, port, world)
        self._place = (Place(host, store.port, world, backend, number, entries), store)
        return self._place[0]

    async def broadcast(self, number: int, keep: bool) -> None:
        """Send the weights. ``keep``: leave a copy for `put`, made while the samplers go on."""

        def send() -> None:
            assert self._place is not None
            try:
                self._group = self._group or BroadcastGroup(self._place[0], 0, self._place[1])
                self._group.send(self.weights())
            except BaseException:
                self._group = self._place = None
                raise

        await self._read(send)
        if keep:
            self._stored[number] = self._read(self._put)

    async def abort(self) -> None:
        """Stop waiting for the group, because a member is gone."""
        if self._group is not None:
            self._group.abort()

    def _put(self) -> Any:
        return import_ray().put(to_bytes(self.weights()))

    def _read(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``work``, which reads the weights, on a thread."""
        read = asyncio.ensure_future(asyncio.to_thread(work))
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        return read


class WeightReceiver:
    """Takes published weights, inside a sampler's actor."""

    def __init__(self) -> None:
        self._group: BroadcastGroup | None = None

    async def receive(self, source: Stored | Broadcast) -> Weights:
        if isinstance(source, Stored):
            return from_bytes(await source.reference[0])
        broadcast = source

        def join_and_receive() -> Weights:
            try:
                if self._group is None or self._group.place != broadcast.place:
                    self._group = None
                    self._group = BroadcastGroup(broadcast.place, broadcast.rank)
                return self._group.receive()
            except BaseException:
                self._group = None
                raise

        return await asyncio.to_thread(join_and_receive)

    def abort(self) -> None:
        """See `WeightSource.abort`."""
        if self._group is not None:
            self._group.abort()


class WeightHandle:
    """The learner's weights at one moment, in the driver. What needs them raises `LearnerLost` if the learner is gone.

    Ray frees the stored copy when the last handle that refers to it goes.
    """

    def __init__(self, learner: ActorClient, number: int) -> None:
        self.learner, self.number = learner, number
        self._reference: asyncio.Future[list[Any]] | None = None

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call the learner."""
        try:
            return await self.learner.ask(method, *arguments)
        except ActorDied as error:
            raise LearnerLost(str(error)) from None

    def put(self) -> asyncio.Future[list[Any]]:
        """Put the weights into Ray's store once."""
        if self._reference is None:
            self._reference = asyncio.ensure_future(self.ask("put", self.number))
        return self._reference

    async def stored(self) -> Stored:
        return Stored(await asyncio.shield(self.put()))

    async def check_learner(self) -> None:
        """Raise `LearnerLost` if the learner is gone: a sampler fails too if what it reads is lost with the learner."""
        await self.ask("ping")
