"""Samples in Ray actors: episodes are spread over them, and published weights reach all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any, Literal

from gleanrl.protocols import Completion, EpisodeLost, Metrics, Sampler, SamplingParams, Session
from gleanrl.runtime.ray.actors import ActorClient, ActorDied, ActorPool, ActorServer, Service
from gleanrl.runtime.ray.broadcast import Backend, Place
from gleanrl.runtime.ray.parts import Plans, Spans
from gleanrl.runtime.ray.weights import Broadcast, LearnerLost, Stored, Way, WeightHandle, WeightReceiver
from gleanrl.schedule.schedule import Schedule
from gleanrl.types import IntArray
from gleanrl.utils.text import first_line

Lane = Literal["train", "evaluate"]
LANES: tuple[Lane, ...] = ("train", "evaluate")


class SamplerService(Service):
    """Inside an actor: a sampler for training and one for evaluation, as in the local runtime."""

    def __init__(self, driver: ActorServer, plans: Plans, lanes: tuple[Lane, ...] = LANES) -> None:
        self._driver, self._plans, self._wanted = driver, plans, lanes
        self._spans, self._receiver = Spans(), WeightReceiver()
        self._lanes: dict[Lane, Sampler] = {}
        self._open: dict[int, tuple[AsyncExitStack, asyncio.Future[Session]]] = {}  # also those that wait for a row

    async def start(self) -> None:
        builder = await self._plans.make_builder()
        schedule = Schedule.from_settings(builder.config.schedule)
        lock: Any = self._plans.make_device_lock(self._driver)
        spans: Any = self._spans
        for lane in self._wanted:
            if lane == "train":
                self._lanes[lane] = builder.sampler(schedule, lock, spans)
            else:
                self._lanes[lane] = builder.evaluation_sampler(schedule, lock, spans)

    async def open(self, lane: Lane, number: int, seed: int) -> None:
        stack = AsyncExitStack()
        opening = asyncio.ensure_future(stack.enter_async_context(self._lanes[lane].session(seed)))
        self._open[number] = (stack, opening)
        await opening

    async def sample(self, number: int, prompt: IntArray, params: SamplingParams) -> Completion:
        return await self._open[number][1].result().sample(prompt, params)

    async def leave(self, number: int) -> None:
        if (found := self._open.pop(number, None)) is not None:
            stack, opening = found
            opening.cancel()  # the episode may be given up while it waits for a row
            await asyncio.wait([opening])
            await stack.aclose()

    async def publish(self, lane: Lane, source: Stored | Broadcast, version: int) -> float:
        """Take the weights. Returns the seconds from their arrival until the sampler uses them."""
        weights = await self._receiver.receive(source)
        started = perf_counter()
        await self._lanes[lane].publish(weights, version)
        return perf_counter() - started

    async def abort(self) -> None:
        """See `WeightReceiver.abort`."""
        self._receiver.abort()

    def news(self) -> tuple[dict[Lane, Metrics], list[Any]]:
        return {lane: sampler.stats() for lane, sampler in self._lanes.items()}, self._spans.drain()

    async def close(self) -> None:
        for sampler in self._lanes.values():
            await sampler.close()


@dataclass(frozen=True)
class _Published:
    weights: WeightHandle
    version: int


@dataclass(frozen=True)
class _Group:
    """A broadcast group whose members are connected."""

    learner: ActorClient
    members: list[ActorClient]
    place: Place


class SamplerPool:
    """The sampler actors and the weights that each must have before it takes episodes.

    Args:
        way: how weights are published; see `gleanrl.runtime.ray.weights`.
        fall_back: where a broadcast fails for another reason than a death, use the store from then on.
        backend: of broadcasts.
    """

    def __init__(self, actors: ActorPool, way: Way, *, fall_back: bool = True, backend: Backend = "gloo") -> None:
        self.actors, self.way = actors, way
        self.current: dict[Lane, _Published] = {}
        self.stats: dict[ActorClient, dict[Lane, Metrics]] = {}
        self.ended: dict[Lane, Counter[str]] = {lane: Counter() for lane in LANES}  # totals of actors that died
        self._fall_back, self._backend = fall_back, backend
        self._group: _Group | None = None
        self._meetings = count(1)
        actors.ready = self._give_current
        actors.left.append(self._keep_totals)

    async def publish(self, lane: Lane, weights: WeightHandle, version: int) -> None:
        """Give weights to all actors at work. One that dies meanwhile gets them when it is back.

        Raises:
            LearnerLost: the learner is gone before all have their weights.
        """
        self.current[lane] = _Published(weights, version)
        members = list(self.actors.members.values())
        started = perf_counter()
        try:
            if self.way == "broadcast" and members:
                offered, taken = await self._broadcast(members, lane, weights, version)
            else:
                source = await weights.stored()
                offered = perf_counter() - started
                taken = await self._give(members, lane, source, version)
        except LearnerLost:
            raise
        except Exception:
            await weights.check_learner()
            raise
        seconds = self.actors.cluster.seconds
        spent = {"publish_s": perf_counter() - started, "publish_offer_s": offered, "publish_take_s": taken}
        for name, value in spent.items():
            seconds[name] = seconds.get(name, 0.0) + value

    async def _give(self, members: Sequence[ActorClient], lane: Lane, source: Stored, version: int) -> float:
        """Give weights to members; return the longest time that one took. Deaths are ignored, other errors raised."""
        work = (member.ask("publish", lane, source, version) for member in members)
        answers = await asyncio.gather(*work, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ActorDied):
                raise answer
        return max((answer for answer in answers if isinstance(answer, float)), default=0.0)

    async def _broadcast(
        self, members: list[ActorClient], lane: Lane, weights: WeightHandle, version: int
    ) -> tuple[float, float]:
        """Broadcast weights; return the seconds until they were offered, and those of the slowest receiver."""
        started = perf_counter()
        learner, cluster = weights.learner, self.actors.cluster
        keep = cluster.settings.max_restarts > 0
        group = self._group
        if group is None or group.learner is not learner or group.members != members:
            terms = (cluster.settings.port, len(members) + 1, self._backend, next(self._meetings))
            group = self._group = _Group(learner, members, await weights.ask("meet", *terms))
        offered = perf_counter() - started

        async def run_or_abort(work: Awaitable[Any]) -> Any:
            try:
                return await work
            except BaseException:
                for each in (learner, *members):
                    each.tell("abort")  # otherwise the other members wait a minute for this one
                raise

        sending = run_or_abort(weights.ask("broadcast", weights.number, keep))
        taking = [
            run_or_abort(member.ask("publish", lane, Broadcast(group.place, rank), version))
            for rank, member in enumerate(members, start=1)
        ]
        sent, *answers = await asyncio.gather(sending, *taking, return_exceptions=True)
        failures = [answer for answer in (sent, *answers) if isinstance(answer, BaseException)]
        if not failures:
            if keep:
                weights.put()  # the copy that the learner makes now, held for an actor that is restarted later
            return offered, max(seconds for seconds in answers if isinstance(seconds, float))
        self._group = None
        if isinstance(sent, LearnerLost):
            raise sent
        await weights.check_learner()
        if not any(isinstance(failure, ActorDied) for failure in failures):
            if not self._fall_back:
                raise failures[0]
            self.way = "memory"
            cluster.console.print(
                f"a broadcast of weights failed ({first_line(failures[0])}); from now on they go through Ray's object "
                "store"
            )
        without = [member for member, answer in zip(members, answers, strict=True) if isinstance(answer, Exception)]
        return offered, await self._give(without, lane, await weights.stored(), version)

    async def _give_current(self, actor: ActorClient) -> None:
        """Give a started actor the weights that the others have; more may be published meanwhile."""
        given: dict[Lane, _Published] = {}
        while True:
            missing: list[Lane] = [lane for lane, it in self.current.items() if given.get(lane) is not it]
            if not missing:
                return
            lane = missing[0]
            published = given[lane] = self.current[lane]
            try:
                await actor.ask("publish", lane, await published.weights.stored(), published.version)
            except (ActorDied, LearnerLost):
                raise
            except Exception:
                await published.weights.check_learner()
                raise

    async def _keep_totals(self, actor: ActorClient) -> None:
        for lane, stats in self.stats.pop(actor, {}).items():
            self.ended[lane].update(stats)  # type: ignore[arg-type]


class RaySampler:
    """All sampler actors as one `gleanrl.protocols.Sampler`. Its owner starts and closes the pool."""

    def __init__(self, samplers: SamplerPool, lane: Lane) -> None:
        self._samplers = samplers
        self._lane: Lane = lane
        self.version = 0

    @asynccontextmanager
    async def session(self, seed: int) -> AsyncIterator[Session]:
        """See `Sampler.session`; on the least busy actor.

        Raises:
            EpisodeLost: that actor died.
            UserError: one died too often.
        """
        actor = await self._samplers.actors.member()
        session = _Session(self._samplers, actor)
        actor.load += 1
        try:
            await session.call("open", self._lane, session.number, seed)
            yield session
        finally:
            actor.load -= 1
            actor.tell("leave", session.number)

    async def publish(self, weights: Any, version: int) -> None:
        """See `Sampler.publish`; ``weights`` is a `WeightHandle`."""
        await self._samplers.publish(self._lane, weights, version)
        self.version = version

    def stats(self) -> Metrics:
        """Return sums over the actors, as they last reported them."""
        total = Counter(self._samplers.ended[self._lane])
        for stats in self._samplers.stats.values():
            total.update(stats.get(self._lane, {}))  # type: ignore[arg-type]
        return dict(total)

    async def close(self) -> None:
        """Do nothing: the actors belong to their pool."""


class _Session:
    _numbers = count(1)

    def __init__(self, samplers: SamplerPool, actor: ActorClient) -> None:
        self.number = next(self._numbers)
        self._samplers, self._actor = samplers, actor

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
        """See `Session.sample`. Raises `EpisodeLost` if the actor died."""
        return await self.call("sample", self.number, prompt, params)

    async def call(self, method: str, *arguments: Any) -> Any:
        try:
            return await self._actor.call(method, *arguments)
        except ActorDied as error:
            self._samplers.actors.cluster.counts["episodes_lost"] += 1
            raise EpisodeLost(str(error)) from None
