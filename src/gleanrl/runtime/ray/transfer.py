"""How published weights reach the samplers: through Ray's store, a broadcast between the processes, or a file."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Literal, NamedTuple

from gleanrl.runtime.ray.link import ActorDied, Link
from gleanrl.runtime.ray.weights import RemoteWeights, opened, put


class Parcelled(NamedTuple):
    """What tells an actor where to take weights from."""

    way: Literal["memory", "broadcast", "disk"]
    where: Any  # [reference]; a place and rank; or a file


async def received(parcel: Parcelled) -> Mapping[str, Any]:
    """The weights, inside the actor that takes them."""
    return opened(await parcel.where[0])


class Transfer:
    """Sends weights to sampler actors."""

    async def send(
        self, links: Sequence[Link], lane: str, weights: Mapping[str, Any], version: int, *, strict: bool = False
    ) -> dict[str, float]:
        """Give ``weights`` to all of ``links``; seconds by metric. An actor that dies meanwhile only counts where
        ``strict``: then `ActorDied` is raised."""
        started = perf_counter()
        if isinstance(weights, RemoteWeights):
            reference = await weights.reference()
        else:
            reference = await asyncio.to_thread(put, weights)
        offered = perf_counter() - started
        parcel = Parcelled("memory", [reference])
        answers = await asyncio.gather(
            *(link.call("publish", lane, parcel, version) for link in links), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException) and (strict or not isinstance(answer, ActorDied)):
                raise answer
        taken = [answer for answer in answers if isinstance(answer, float)]
        return {"publish_offer_s": offered, "publish_take_s": max(taken, default=0.0)}
