"""The actors' ends of a publication: a `Source` in the learner's, a `Receiver` in each sampler's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file, save_file

from gleanrl.runtime.ray.broadcast import Backend, Entry, Group, Place, manifest, meeting
from gleanrl.runtime.ray.cluster import library
from gleanrl.runtime.ray.weights import opened, put

T = TypeVar("T")
Way = Literal["memory", "broadcast", "disk"]
Weights = Mapping[str, torch.Tensor]


class Parcelled(NamedTuple):
    """What tells an actor where to take weights from."""

    way: Way
    where: Any  # [reference]; a place, a rank and the entries; or a file


class Source:
    """Gives a learner's weights away; the base of what runs inside its actor. `Transfer` asks it.

    Weights have a number: how often they have changed before. Those of now are read where they lie, and `changing`
    waits for who reads them; after a broadcast a copy is kept, in this process, for a sampler that comes late.
    """

    def __init__(self) -> None:
        self.number = 0
        self._reading: set[asyncio.Future[Any]] = set()  # work on the weights of now
        self._kept: dict[int, asyncio.Future[Weights]] = {}
        self._offered: Weights | None = None
        self._place: tuple[Place, Any] | None = None
        self._group: Group | None = None

    def weights(self) -> Weights:
        """Whole tensors, those of now. On a thread."""
        raise NotImplementedError

    async def changing(self) -> None:
        """Call it before the weights change: from now on they have another number, and nobody reads the old ones."""
        self.number += 1
        self._offered = None
        if self._reading:
            await asyncio.wait(self._reading)

    async def here(self) -> None:
        """That this is answered says that the actor lives."""

    async def put(self, number: int) -> list[Any]:
        """A reference to the weights in Ray's store, in a list so that it travels as it is."""
        return [await self._read(number, put)]

    async def write(self, number: int, path: Path) -> None:
        await self._read(number, lambda weights: _write(weights, path))

    async def meet(self, port: int, world: int, backend: Backend, number: int) -> Place:
        """A place for a group, whose own ``number`` it is."""
        host = library().util.get_node_ip_address()
        self._group = self._place = None
        self._place = await asyncio.to_thread(meeting, host, port, world, backend, number)
        return self._place[0]

    async def offer(self, number: int) -> list[Entry]:
        """What `broadcast` will send."""
        self._offered = await self._read(number, lambda weights: weights)
        return manifest(self._offered)

    async def broadcast(self, number: int, keep: bool) -> None:
        """Send what was offered; then the copy for who comes late is made while the samplers go on."""
        weights, self._offered = self._offered, None
        assert weights is not None
        await self._now(lambda: self._send(weights))
        if keep:
            self._kept[number] = self._now(lambda: _copied(weights))

    async def keep(self, number: int) -> None:
        """A copy, where there was nobody to broadcast to."""
        self._kept[number] = self._now(lambda: _copied(self.weights()))

    async def release(self, number: int) -> None:
        """Nobody will ask for these any more."""
        self._kept.pop(number, None)

    async def abort(self) -> None:
        """One of the group is gone: do not wait for it."""
        if self._group is not None:
            self._group.abort()

    async def _read(self, number: int, work: Callable[[Weights], T]) -> T:
        if (kept := self._kept.get(number)) is not None:
            return await asyncio.to_thread(work, await asyncio.shield(kept))
        if number != self.number:
            raise RuntimeError(f"the learner has changed its weights {number}, and no copy was kept")
        return await self._now(lambda: work(self.weights()))

    def _now(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Work, on a thread, that must end before the weights change."""
        reading = asyncio.ensure_future(asyncio.to_thread(work))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return reading

    def _send(self, weights: Weights) -> None:
        assert self._place is not None
        try:
            self._group = self._group or Group(self._place[0], 0, self._place[1])
            self._group.send(weights)
        except BaseException:
            self._group = self._place = None  # with the store at which others may still wait for this one
            raise


def _write(weights: Weights, path: Path) -> None:
    partial = path.with_name(f"{path.name}.partial")
    save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, partial)
    partial.replace(path)


def _copied(weights: Weights) -> Weights:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}


class Receiver:
    """Takes weights, inside a sampler's actor."""

    def __init__(self) -> None:
        self._group: Group | None = None

    async def received(self, parcel: Parcelled) -> Weights:
        if parcel.way == "memory":
            return opened(await parcel.where[0])
        if parcel.way == "disk":
            return await asyncio.to_thread(load_file, parcel.where)
        return await asyncio.to_thread(self._from_broadcast, *parcel.where)

    def abort(self) -> None:
        """See `Source.abort`."""
        if self._group is not None:
            self._group.abort()

    def _from_broadcast(self, place: Place, rank: int, entries: Sequence[Entry]) -> Weights:
        try:
            if self._group is None or self._group.place != place:
                self._group = None
                self._group = Group(place, rank)
            return self._group.receive(entries)
        except BaseException:
            self._group = None
            raise
