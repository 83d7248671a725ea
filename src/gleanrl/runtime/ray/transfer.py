"""How published weights reach the samplers: through Ray's store, a broadcast between the processes, or a file."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from gleanrl.monitors import Console
from gleanrl.runtime.ray.broadcast import Entry, Group, Place, manifest, meeting
from gleanrl.runtime.ray.link import ActorDied, Link
from gleanrl.runtime.ray.weights import RemoteWeights, opened, put

Way = Literal["memory", "broadcast", "disk"]


class Parcelled(NamedTuple):
    """What tells an actor where to take weights from."""

    way: Way
    where: Any  # [reference]; a place, a rank and the entries; or a file


class Transfer:
    """Sends weights to sampler actors.

    Args:
        way: `ray.transfer`, but ``auto`` decided.
        fall_back: where a broadcast fails, write files from then on.
        folder: for files; of the run, on storage that all nodes see.
        nccl: whether every actor of the broadcast has a GPU of its own.
        port: `ray.port`.
    """

    def __init__(
        self, way: Way, *, fall_back: bool, folder: Path, console: Console, nccl: bool = False, port: int = 0
    ) -> None:
        self.way: Way = way
        self._fall_back, self._folder, self._console, self._port = fall_back, folder, console, port
        self._backend: Literal["nccl", "gloo"] = "nccl" if nccl else "gloo"
        self._numbers = count(1)
        self._met: tuple[list[Link], Place, Link] | None = None  # the group that stands, and who sends in it
        self._files: dict[str, Path] = {}  # by lane

    async def send(
        self, links: Sequence[Link], lane: str, weights: Mapping[str, Any], version: int, *, late: bool = False
    ) -> dict[str, float]:
        """Give ``weights`` to all of ``links``; seconds by metric.

        An actor that dies meanwhile is passed over, but where it comes ``late``, alone, after the others had theirs:
        then `ActorDied` is raised.
        """
        started = perf_counter()
        way = "memory" if (late and self.way == "broadcast") or not isinstance(weights, RemoteWeights) else self.way
        if way == "disk" and isinstance(weights, RemoteWeights):
            parcel = Parcelled("disk", await self._file(lane, weights, version, late=late))
        elif isinstance(weights, RemoteWeights):
            parcel = Parcelled("memory", [await weights.reference()])  # for a broadcast too: others may come late
        else:
            parcel = Parcelled("memory", [await asyncio.to_thread(put, weights)])
        offered = perf_counter() - started
        if way == "broadcast" and links:
            assert isinstance(weights, RemoteWeights)
            try:
                taken = await self._broadcast(list(links), lane, weights, version)
            except RuntimeError as error:
                self._met = None
                if not self._fall_back:
                    raise
                self.way = "disk"
                why = str(error).strip().splitlines()[0]
                self._console.print(f"a broadcast of weights failed ({why}); from now on they go through files")
                return await self.send(links, lane, weights, version)
        else:
            taken = _times(await _all(links, lane, [parcel] * len(links), version), strict=late)
        return {"publish_offer_s": offered, "publish_take_s": max(taken, default=0.0)}

    async def _file(self, lane: str, weights: RemoteWeights, version: int, *, late: bool) -> Path:
        if late and lane in self._files:
            return self._files[lane]
        path = self._folder / f".weights-{lane}-{version}.safetensors"
        await weights.learner.call("write", path)
        before, self._files[lane] = self._files.get(lane), path
        if before is not None and before != path:
            before.unlink(missing_ok=True)
        return path

    def close(self) -> None:
        """Remove what files there are."""
        for path in self._files.values():
            path.unlink(missing_ok=True)

    async def _broadcast(self, links: list[Link], lane: str, weights: RemoteWeights, version: int) -> list[float]:
        sender = weights.learner
        if self._met is None or self._met[0] != links or self._met[2] is not sender:
            terms = (self._port, len(links) + 1, self._backend, next(self._numbers))
            self._met = (links, await sender.call("meet", *terms), sender)
        place, entries = self._met[1], await sender.call("entries")
        parcels = [Parcelled("broadcast", (place, rank, entries)) for rank in range(1, len(links) + 1)]
        answers, _ = await asyncio.gather(
            _all(links, lane, parcels, version), sender.call("broadcast"), return_exceptions=True
        )
        if isinstance(_, BaseException):
            died = isinstance(answers, list) and any(isinstance(answer, ActorDied) for answer in answers)
            if not died:
                raise _
            self._met = None  # a group without one of its members is none: the others take them from the store
            parcel = Parcelled("memory", [await weights.reference()])
            left = [link for link in links if link.death is None]
            return _times(await _all(left, lane, [parcel] * len(left), version), strict=False)
        return _times(answers, strict=False)


async def _all(links: Sequence[Link], lane: str, parcels: Sequence[Parcelled], version: int) -> list[Any]:
    work = (link.call("publish", lane, parcel, version) for link, parcel in zip(links, parcels, strict=True))
    return await asyncio.gather(*work, return_exceptions=True)


def _times(answers: Any, *, strict: bool) -> list[float]:
    """Seconds of those who took the weights. Raises what an actor raised, its death only where ``strict``."""
    for answer in answers:
        if isinstance(answer, BaseException) and (strict or not isinstance(answer, ActorDied)):
            raise answer
    return [answer for answer in answers if isinstance(answer, float)]


# --- inside the actors --------------------------------------------------------------------------------
class Receiver:
    """Takes weights, inside a sampler's actor."""

    def __init__(self) -> None:
        self._group: Group | None = None

    async def received(self, parcel: Parcelled) -> Mapping[str, Any]:
        if parcel.way == "memory":
            return opened(await parcel.where[0])
        if parcel.way == "disk":
            return await asyncio.to_thread(load_file, parcel.where)
        return await asyncio.to_thread(self._from_broadcast, *parcel.where)

    def _from_broadcast(self, place: Place, rank: int, entries: Sequence[Entry]) -> Mapping[str, Any]:
        if self._group is None or self._group.place != place:
            self._group = None
            self._group = Group(place, rank)
        return self._group.receive(entries)


class Sender:
    """Sends weights, inside the learner's actor; every method runs on a thread."""

    def __init__(self) -> None:
        self._place: tuple[Place, Any] | None = None
        self._group: Group | None = None

    def meet(self, host: str, port: int, world: int, backend: Literal["nccl", "gloo"], number: int) -> Place:
        self._group = self._place = None
        self._place = meeting(host, port, world, backend, number)
        return self._place[0]

    def broadcast(self, weights: Mapping[str, torch.Tensor]) -> None:
        assert self._place is not None
        if self._group is None:
            self._group = Group(self._place[0], 0, self._place[1])
        self._group.send(weights)

    @staticmethod
    def entries(weights: Mapping[str, torch.Tensor]) -> list[Entry]:
        return manifest(weights)

    @staticmethod
    def write(weights: Mapping[str, torch.Tensor], path: Path) -> None:
        partial = path.with_name(f"{path.name}.partial")
        save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, partial)
        partial.replace(path)
