"""Runs samplers in Ray actors.

`SamplerService` runs inside an actor. In the driver, `SamplerPool` publishes weights to all sampler actors, and
`RaySampler` is the `Sampler` that the run uses: it distributes sessions over the actors.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any, Literal

from gleanrl.protocols import Completion, Metrics, Sampler, SamplingParams, Session
from gleanrl.runtime.ray.actors import ActorClient, ActorDied, ActorPool, ActorServer, LearnerLost
from gleanrl.runtime.ray.parts import Plans
from gleanrl.runtime.ray.weights import Backend, Broadcast, Place, Stored, Way, WeightHandle, WeightReceiver
from gleanrl.schedule.schedule import Schedule
from gleanrl.types import IntArray
from gleanrl.utils.text import first_line

Lane = Literal["train", "evaluate"]
LANES: tuple[Lane, ...] = ("train", "evaluate")


class SamplerService(WeightReceiver):
    """The service of a sampler actor. It has one sampler for each of ``lanes``: "train", "evaluate" or both."""

    def __init__(self, driver: ActorServer, plans: Plans, lanes: tuple[Lane, ...] = LANES) -> None:
        self._driver, self._plans, self._wanted = driver, plans, lanes
        self._lanes: dict[Lane, Sampler] = {}
        # number of a session -> its lane, the stack that closes it, and the session itself, once the sampler opened it
        self._open: dict[int, tuple[Lane, AsyncExitStack, asyncio.Future[Session]]] = {}

    async def start(self) -> None:
        builder, lock = await self._plans.make_builder(self._driver)
        schedule = Schedule.from_settings(builder.config.schedule)
        for lane in self._wanted:
            make = builder.sampler if lane == "train" else builder.evaluation_sampler
            self._lanes[lane] = make(schedule, lock, self._driver)

    async def open(self, lane: Lane, number: int, seed: int) -> None:
        stack = AsyncExitStack()
        opening = asyncio.ensure_future(stack.enter_async_context(self._lanes[lane].session(seed)))
        self._open[number] = (lane, stack, opening)
        await opening

    async def sample(self, number: int, prompt: IntArray, params: SamplingParams) -> tuple[Completion, Metrics]:
        """Sample in the session ``number``. Returns the completion and the `Sampler.stats` of its sampler."""
        lane, _, opening = self._open[number]
        return await opening.result().sample(prompt, params), self._lanes[lane].stats()

    async def leave(self, number: int) -> None:
        if (found := self._open.pop(number, None)) is not None:
            _, stack, opening = found
            # Cancel a session that is not open yet, because its episode was cancelled while it waited for the sampler.
            # This has no effect if the session is open.
            opening.cancel()
            await asyncio.wait([opening])
            await stack.aclose()

    async def publish(self, lane: Lane, source: Stored | Broadcast, version: int) -> float:
        """Receive weights from ``source`` and publish them to the lane's sampler as ``version``.

        Returns the seconds that the sampler took after the weights had arrived.
        """
        weights = await self.receive(source)
        started = perf_counter()
        await self._lanes[lane].publish(weights, version)
        return perf_counter() - started

    async def rest(self, lane: Lane) -> None:
        await self._lanes[lane].rest()

    async def close(self) -> None:
        for sampler in self._lanes.values():
            await sampler.close()


@dataclass(frozen=True)
class _Published:
    weights: WeightHandle
    version: int


@dataclass(frozen=True)
class _Group:
    """The broadcast group of the last publication, which is used again if learner and sampler actors are the same."""

    learner: ActorClient
    members: list[ActorClient]
    place: Place


class SamplerPool:
    """Publishes weights to the sampler actors, including actors that are started later.

    A lane is "train" or "evaluate". Each actor has a sampler for each lane that the run uses, with its own weights.

    Args:
        way: "memory" or "broadcast"; see `gleanrl.runtime.ray.weights`.
        fall_back: whether a broadcast that fails, although no actor died, makes the pool use "memory" from then on. If
            False, the error is raised.
        backend: the torch.distributed backend of broadcasts.

    Attributes:
        current: the weights that were published last, for each lane.
        stats: the `Sampler.stats` that each actor returned last, for each lane. Entries of dead actors are kept, so
            that the sums never decrease.
    """

    def __init__(self, actors: ActorPool, way: Way, *, fall_back: bool = True, backend: Backend = "gloo") -> None:
        self.actors, self.way = actors, way
        self.current: dict[Lane, _Published] = {}
        self.stats: dict[tuple[ActorClient, Lane], Metrics] = {}
        self._fall_back, self._backend = fall_back, backend
        self._group: _Group | None = None
        self._meetings = count(1)
        actors.ready = self._give_current

    async def publish(self, lane: Lane, weights: WeightHandle, version: int) -> None:
        """Publish weights to the samplers of ``lane`` in all actors, and wait until all use them.

        If a sampler actor dies meanwhile, this is no error, because its replacement receives the weights when it
        starts.

        Raises:
            LearnerLost: the learner died before all actors had received the weights. An actor that loses the weights
                because of this may raise another error first.
        """
        self.current[lane] = _Published(weights, version)
        members = list(self.actors.members.values())
        started = perf_counter()
        offered, taken = 0.0, [0.0]
        if self.way == "broadcast" and members:
            offered, taken, members = await self._broadcast(members, lane, weights, version)
        # The copy is made even if all actors are being replaced. They need it when they have started, and the learner
        # may have changed the weights by then.
        if members or (self.actors.cluster.settings.max_restarts and not weights.is_put):
            source = await asyncio.shield(weights.put())
            offered = offered or perf_counter() - started
            asked = (member.ask("publish", lane, source, version) for member in members)
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(answer, ActorDied):  # the actor's replacement receives the weights by `_give_current`
                    continue
                if isinstance(answer, BaseException):
                    raise answer
                taken.append(answer)
        seconds = self.actors.cluster.seconds
        spent = {"publish_s": perf_counter() - started, "publish_offer_s": offered, "publish_take_s": max(taken)}
        for name, value in spent.items():
            seconds[name] = seconds.get(name, 0.0) + value

    async def _broadcast(
        self, members: list[ActorClient], lane: Lane, weights: WeightHandle, version: int
    ) -> tuple[float, list[float], list[ActorClient]]:
        """Broadcast weights from the learner to ``members``.

        A new broadcast group is formed unless the last one had the same members.

        Returns:
            The seconds until the broadcast began, the seconds that each sampler took after it had received the weights,
            and the members that did not receive the weights because the broadcast failed.
        """
        started = perf_counter()
        learner, cluster = weights.learner, self.actors.cluster
        keep = cluster.settings.max_restarts > 0 and not weights.is_put
        group = self._group
        if group is None or group.learner is not learner or group.members != members:
            terms = (cluster.settings.port, len(members) + 1, self._backend, next(self._meetings))
            group = self._group = _Group(learner, members, await learner.ask("meet", *terms))
        offered = perf_counter() - started

        async def run_or_abort(work: Awaitable[Any]) -> Any:
            try:
                return await work
            except BaseException:
                for each in (learner, *members):
                    each.tell("abort")  # otherwise the other members would wait until the timeout of one minute
                raise

        work = [run_or_abort(learner.ask("broadcast", weights.number, keep))]
        for rank, member in enumerate(members, start=1):
            work.append(run_or_abort(member.ask("publish", lane, Broadcast(group.place, rank), version)))
        sent, *answers = await asyncio.gather(*work, return_exceptions=True)
        failures = [answer for answer in (sent, *answers) if isinstance(answer, BaseException)]
        if not failures:
            if keep:
                # The learner now copies the weights to Ray's object store, for actors that are restarted later. Ray
                # deletes the copy if nothing refers to it, so the handle stores a reference to it.
                weights.put()
            taken: list[Any] = answers
            return offered, taken, []
        self._group = None
        if isinstance(sent, LearnerLost):
            raise sent
        if not any(isinstance(failure, ActorDied) for failure in failures):
            if not self._fall_back:
                raise failures[0]
            self.way = "memory"
            cluster.console.print(
                f"a broadcast of weights failed ({first_line(failures[0])}); from now on they go through Ray's object "
                "store"
            )
        without = [member for member, answer in zip(members, answers, strict=True) if isinstance(answer, Exception)]
        return offered, [0.0], without

    async def _give_current(self, actor: ActorClient) -> None:
        """Publish the weights in `current`, for each lane, to an actor that was just started.

        If other weights are published meanwhile, those are published to the actor too before it becomes a member.
        """
        given: dict[Lane, _Published] = {}
        while True:
            missing: list[Lane] = [lane for lane, it in self.current.items() if given.get(lane) is not it]
            if not missing:
                return
            lane = missing[0]
            published = given[lane] = self.current[lane]
            source = await asyncio.shield(published.weights.put())
            await actor.ask("publish", lane, source, published.version)


@dataclass
class RaySampler:
    """The driver's `gleanrl.protocols.Sampler` for one lane ("train" or "evaluate"), which uses all sampler actors.

    It neither starts nor closes the actors.
    """

    samplers: SamplerPool
    lane: Lane
    version: int = 0

    @asynccontextmanager
    async def session(self, seed: int) -> AsyncIterator[Session]:
        """Open a session on the actor that plays the fewest episodes; see `Sampler.session`.

        Raises:
            EpisodeLost: the actor died.
            UserError: an actor has died more than ``ray.max_restarts`` times.
        """
        actor = await self.samplers.actors.member()
        session = _Session(self, actor, next(_SESSIONS))
        actor.load += 1
        try:
            await actor.play("open", self.lane, session.number, seed)
            yield session
        finally:
            actor.load -= 1
            actor.tell("leave", session.number)

    async def publish(self, weights: Any, version: int) -> None:
        """See `Sampler.publish`; ``weights`` is a `WeightHandle`."""
        await self.samplers.publish(self.lane, weights, version)
        self.version = version

    async def rest(self) -> None:
        """See `Sampler.rest`. An actor that dies meanwhile is replaced as usual."""
        members = list(self.samplers.actors.members.values())
        for answer in await asyncio.gather(*(m.ask("rest", self.lane) for m in members), return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, ActorDied):
                raise answer

    def stats(self) -> Metrics:
        """Return the sums over all actors of the totals that each returned with its last completion."""
        total: Counter[str] = Counter()
        for (_, lane), stats in self.samplers.stats.items():
            if lane == self.lane:
                total.update(stats)  # type: ignore[arg-type]
        return dict(total)

    async def close(self) -> None:
        """Do nothing. The `ActorPool` closes the actors."""


_SESSIONS = count(1)


@dataclass(frozen=True)
class _Session:
    sampler: RaySampler
    actor: ActorClient
    number: int

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
        """See `Session.sample`. Raises `EpisodeLost` if the actor died."""
        completion, stats = await self.actor.play("sample", self.number, prompt, params)
        self.sampler.samplers.stats[self.actor, self.sampler.lane] = stats
        return completion
