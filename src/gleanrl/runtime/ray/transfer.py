"""How published weights reach the samplers: through Ray's store, a broadcast between the processes, or a file."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from gleanrl.runtime.ray.broadcast import Backend, Place
from gleanrl.runtime.ray.exchange import Parcelled, Way
from gleanrl.runtime.ray.link import ActorDied, Link
from gleanrl.runtime.ray.weights import LearnerLost, RemoteWeights, put
from gleanrl.utils.progress import Progress

_FILES = ".weights-{name}-{number}.safetensors"


class Transfer:
    """Sends weights to sampler actors.

    Args:
        way: `ray.transfer`, but ``auto`` decided.
        fall_back: where a broadcast fails, write files from then on.
        folder: for files; of the run, on storage that all nodes see.
        name: of the files. Those of that name which a killed process has left are removed.
        nccl: whether every actor of the broadcast has a GPU of its own.
        port: `ray.port`.
        latecomers: whether actors may come late, for whom a copy of what was broadcast is kept.
    """

    def __init__(
        self,
        way: Way,
        *,
        fall_back: bool,
        folder: Path,
        console: Progress,
        name: str = "train",
        nccl: bool = False,
        port: int = 0,
        latecomers: bool = True,
    ) -> None:
        self.way: Way = way
        self._fall_back, self._folder, self._console, self._port = fall_back, folder, console, port
        self._name, self._latecomers = name, latecomers
        self._backend: Backend = "nccl" if nccl else "gloo"
        self._meetings = count(1)
        self._met: tuple[list[Link], Place, Link] | None = None  # the group that stands, and who sends in it
        self._lanes: dict[str, RemoteWeights] = {}  # what each holds
        self._users: Counter[RemoteWeights] = Counter()  # how many sends of them are under way
        self.close()

    async def send(
        self, links: Sequence[Link], lane: str, weights: Mapping[str, Any], version: int, *, late: bool = False
    ) -> dict[str, float]:
        """Give ``weights`` to all of ``links``; seconds by metric.

        An actor that dies meanwhile is passed over, but where it comes ``late``, alone, after the others had theirs:
        then `ActorDied` is raised. It gets what they got, whatever the learner has learned since.

        Raises:
            LearnerLost: the learner is gone before all of them have their weights.
        """
        if not isinstance(weights, RemoteWeights):
            started = perf_counter()
            parcel = Parcelled("memory", [await asyncio.to_thread(put, weights)])
            return await self._give(links, lane, parcel, version, perf_counter() - started, late=late)
        if not late:
            self._lanes[lane] = weights
        with self._using(weights):
            try:
                return await self._send(list(links), lane, weights, version, late=late)
            except (ActorDied, LearnerLost):
                raise
            except Exception:
                await weights.ask("here")  # what dies with the learner is missed by a sampler first
                raise

    def close(self) -> None:
        """Remove what files there are."""
        for path in self._folder.glob(_FILES.format(name=self._name, number="*") + "*"):
            path.unlink(missing_ok=True)

    @contextmanager
    def _using(self, weights: RemoteWeights) -> Iterator[None]:
        """What no lane holds and no actor takes any more is let go, but not before."""
        self._users[weights] += 1
        try:
            yield
        finally:
            self._users[weights] -= 1
            held = set(self._lanes.values())
            for old in [old for old, users in self._users.items() if not users and old not in held]:
                del self._users[old]
                old.release()

    async def _send(
        self, links: list[Link], lane: str, weights: RemoteWeights, version: int, *, late: bool
    ) -> dict[str, float]:
        started = perf_counter()
        if self.way == "broadcast" and not late:
            try:
                return await self._broadcast(links, lane, weights, version)
            except RuntimeError as error:
                self._met = None
                await weights.ask("here")
                if not self._fall_back:
                    raise
                self.way = "disk"
                why = str(error).strip().splitlines()[0]
                self._console.print(f"a broadcast of weights failed ({why}); from now on they go through files")
        # who comes late takes them the way they were sent before, in which they are held
        if weights.in_file or (self.way == "disk" and not late):
            path = self._folder / _FILES.format(name=self._name, number=weights.number)
            parcel = Parcelled("disk", await weights.file(path))
        else:
            parcel = Parcelled("memory", [await weights.reference()])
        return await self._give(links, lane, parcel, version, perf_counter() - started, late=late)

    async def _broadcast(self, links: list[Link], lane: str, weights: RemoteWeights, version: int) -> dict[str, float]:
        started, sender = perf_counter(), weights.learner
        if not links:
            await weights.ask("keep", weights.number)
            return _told(perf_counter() - started, ())
        if self._met is None or self._met[0] != links or self._met[2] is not sender:
            terms = (self._port, len(links) + 1, self._backend, next(self._meetings))
            self._met = (links, await weights.ask("meet", *terms), sender)
        place, entries = self._met[1], await weights.ask("offer", weights.number)
        offered = perf_counter() - started

        async def together(work: Any) -> Any:
            try:
                return await work
            except BaseException:
                for each in (sender, *links):
                    each.tell("abort")
                raise

        taking = [
            link.call("publish", lane, Parcelled("broadcast", (place, rank, entries)), version)
            for rank, link in enumerate(links, start=1)
        ]
        sending = weights.ask("broadcast", weights.number, self._latecomers)
        sent, *answers = await asyncio.gather(*map(together, (sending, *taking)), return_exceptions=True)
        without = [link for link, answer in zip(links, answers, strict=True) if _is_error(answer)]
        if isinstance(sent, BaseException) or without:
            self._met = None
            if isinstance(sent, LearnerLost) or not any(isinstance(answer, ActorDied) for answer in answers):
                raise sent if isinstance(sent, BaseException) else next(filter(_is_error, answers))
            # a group without one of its members is none: the others take them from the store
            parcel = Parcelled("memory", [await weights.reference()])
            again = await _all(without, lane, parcel, version)
            answers = [answer for answer in answers if not _is_error(answer)] + again
        return _told(offered, _times(answers, strict=False))

    async def _give(
        self, links: Sequence[Link], lane: str, parcel: Parcelled, version: int, offered: float, *, late: bool
    ) -> dict[str, float]:
        return _told(offered, _times(await _all(links, lane, parcel, version), strict=late))


def _told(offered: float, taken: Sequence[float]) -> dict[str, float]:
    return {"publish_offer_s": offered, "publish_take_s": max(taken, default=0.0)}


async def _all(links: Sequence[Link], lane: str, parcel: Parcelled, version: int) -> list[Any]:
    work = (link.call("publish", lane, parcel, version) for link in links)
    return await asyncio.gather(*work, return_exceptions=True)


def _is_error(answer: Any) -> bool:
    """Whether an actor raised; its death is another matter."""
    return isinstance(answer, BaseException) and not isinstance(answer, ActorDied)


def _times(answers: Sequence[Any], *, strict: bool) -> list[float]:
    """Seconds of those who took the weights. Raises what an actor raised, its death only where ``strict``."""
    for answer in answers:
        if isinstance(answer, BaseException) and (strict or not isinstance(answer, ActorDied)):
            raise answer
    return [answer for answer in answers if isinstance(answer, float)]
