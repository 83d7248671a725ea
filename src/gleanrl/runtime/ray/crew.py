"""The actors of one kind: started together, each replaced when it dies, a few times at most."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

from gleanrl.runtime.ray.cluster import Cluster
from gleanrl.runtime.ray.link import ActorDied, Link, stop
from gleanrl.utils.errors import UserError
from gleanrl.utils.notifier import Notifier

_LEAD = 16  # episodes that a key's own actor may have more than the least busy one


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once; the first error of any ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


class Crew:
    """Actors that do the same work.

    Args:
        kind: "sampler", "environment", "reward" or "learner".
        make, arguments: of each actor's service, see `Host`.
        answers: see `Link`.
        restarts: how often an actor is replaced; default `ray.max_restarts`.

    Attributes:
        members: those at work, by number.
        ready: called with an actor that was started, at first or again, before it gets work. Raises `ActorDied` if it
            died meanwhile.
        left: each is called with an actor that died, before another is started.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: str,
        count: int,
        make: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        answers: Mapping[str, Callable[..., Awaitable[Any]]] | None = None,
        restarts: int | None = None,
    ) -> None:
        self.cluster, self.kind, self.count = cluster, kind, count
        self.ready: Callable[[Link], Awaitable[None]] | None = None
        self.left: list[Callable[[Link], Awaitable[None]]] = []
        self.members: dict[int, Link] = {}
        self.answers = dict(answers or {})
        self._make, self._arguments = make, arguments
        self._restarts = cluster.settings.max_restarts if restarts is None else restarts
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._deaths: Counter[int] = Counter()
        self._failure: Exception | None = None
        self._changed = Notifier()
        self._closed = False

    async def start(self, started: Callable[[], None] = lambda: None) -> None:
        """Start all, and wait until each is ready, of which ``started`` is told. Raises what their services do."""

        async def one(index: int) -> None:
            await self._start(index)
            started()

        await together(one(index) for index in range(self.count))

    async def member(self, key: str | None = None) -> Link:
        """The least busy actor, or that of ``key`` where it is not much busier; waits while all are being replaced.

        Raises:
            UserError: one died too often.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if self.members:
                index = min(self.members, key=lambda index: (self.members[index].load, index))
                if key is not None:
                    home = zlib.crc32(key.encode()) % self.count
                    if home in self.members and self.members[home].load <= self.members[index].load + _LEAD:
                        index = home
                return self.members[index]
            await self._changed.wait()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Ask any actor; asked again of the next one where it dies."""
        while True:
            try:
                return await (await self.member()).call(method, *arguments)
            except ActorDied:
                continue

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(stop(task) for task in self._starting.values()))
        members, self.members = self.members, {}
        await asyncio.gather(*(member.close() for member in members.values()))
        self._changed.notify()

    async def _start(self, index: int) -> None:
        """Start one, again and again while it dies on the way."""
        name = self.kind if self.count == 1 else f"{self.kind} {index}"
        while True:
            link = Link(
                name,
                self._make,
                self._arguments,
                options=self.cluster.options(self.kind, index),
                answers=self.answers,
                died=lambda link: self._lost(index, link),
            )
            try:
                await link.begin()
                if self.ready is not None:
                    await self.ready(link)
                break
            except ActorDied as error:
                if link.death is None:  # it waited for another one, which is not its fault
                    await link.close()
                    raise
                self._count(index, error)  # raises once it was too often
            except BaseException:
                await link.close()
                raise
        self.members[index] = link
        self._changed.notify()

    def _lost(self, index: int, link: Link) -> None:
        if self.members.get(index) is not link or self._closed:  # it died on the way: `_start` goes on
            return
        del self.members[index]
        task = self._starting[index] = asyncio.create_task(self._again(index, link))
        task.add_done_callback(lambda _: self._starting.pop(index, None))

    async def _again(self, index: int, dead: Link) -> None:
        try:
            for left in self.left:
                await left(dead)
            self._count(index, ActorDied(f"{dead.name} {dead.death}"))
            await self._start(index)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._failure = error
            self._changed.notify()

    def _count(self, index: int, death: ActorDied) -> None:
        """Note a death. Raises `UserError` if the actor is not to be started again."""
        self._deaths[index] += 1
        deaths = self._deaths[index]
        if deaths > self._restarts:
            before = f"it was started again {self._restarts} times before" if self._restarts else "it is not replaced"
            raise UserError(f"{death}; {before} (ray.max_restarts)")
        self.cluster.counts["actors_restarted"] += 1
        self.cluster.console.print(f"{death}; starting another ({deaths} of {self._restarts})")
