"""Samplers as actors: episodes are spread over them, and each stays where its computations are kept."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np

from gleanrl.protocols import Completion, EpisodeLost, Metrics, Sampler, SamplingParams, Session
from gleanrl.runtime.evaluator import EvaluationWork
from gleanrl.runtime.ray.crew import Crew
from gleanrl.runtime.ray.exchange import Parcelled, Receiver
from gleanrl.runtime.ray.link import ActorDied, Host, Link
from gleanrl.runtime.ray.parts import Plans, Spans
from gleanrl.runtime.ray.transfer import Transfer
from gleanrl.schedule.schedule import Schedule
from gleanrl.types import IntArray

Lane = Literal["train", "evaluate"]
LANES: tuple[Lane, ...] = ("train", "evaluate")


class SamplerService:
    """Inside an actor: a sampler for training and one for evaluation, as in the local runtime."""

    def __init__(self, host: Host, plans: Plans, lanes: tuple[Lane, ...] = LANES) -> None:
        self._host, self._plans, self._wanted = host, plans, lanes
        self._spans, self._receiver = Spans(), Receiver()
        self._lanes: dict[Lane, Sampler] = {}
        self._open: dict[int, tuple[AsyncExitStack, asyncio.Future[Session]]] = {}  # those too that wait for a row

    async def start(self) -> None:
        builder = await self._plans.builder()
        schedule, device_lock = Schedule.from_settings(builder.config.schedule), self._plans.device_lock(self._host)
        other = builder.config.sampler.evaluation_options
        beside = EvaluationWork(device_lock, self._spans)  # type: ignore[arg-type]
        makers: dict[Lane, Callable[[], Sampler]] = {
            "train": lambda: builder.sampler(schedule, device_lock, self._spans),
            "evaluate": lambda: builder.sampler(schedule, beside.device_lock, beside, **other),
        }
        self._lanes = {lane: makers[lane]() for lane in self._wanted}

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
            opening.cancel()  # its episode was given up before it had a row
            await asyncio.wait([opening])
            await stack.aclose()

    async def abort(self) -> None:
        """See `Receiver.abort`."""
        self._receiver.abort()

    async def publish(self, lane: Lane, parcel: Parcelled, version: int) -> float:
        """Take the weights; seconds that it took, once all sessions that had to end had ended."""
        weights = await self._receiver.received(parcel)
        started = perf_counter()
        await self._lanes[lane].publish(weights, version)
        return perf_counter() - started

    def news(self) -> tuple[dict[Lane, Metrics], list[Any]]:
        return {lane: sampler.stats() for lane, sampler in self._lanes.items()}, self._spans.drain()

    async def close(self) -> None:
        for sampler in self._lanes.values():
            await sampler.close()


class _Published(NamedTuple):
    weights: Mapping[str, Any]
    version: int


class SamplerCrew:
    """The sampler actors, and the weights that a new one must have before it takes episodes."""

    def __init__(self, crew: Crew, transfer: Transfer) -> None:
        self.crew, self.transfer = crew, transfer
        self.current: dict[Lane, _Published] = {}
        self.stats: dict[Link, dict[Lane, Metrics]] = {}
        self.ended: dict[Lane, Counter[str]] = {lane: Counter() for lane in LANES}  # totals of those that died
        crew.ready = self._ready
        crew.left.append(self._left)

    def sampler(self, lane: Lane) -> RaySampler:
        return RaySampler(self, lane)

    async def publish(self, lane: Lane, weights: Mapping[str, Any], version: int) -> None:
        """To all actors at work; who dies meanwhile is given them when it is back."""
        started = perf_counter()
        self.current[lane] = _Published(weights, version)
        seconds = await self.transfer.send(list(self.crew.members.values()), lane, weights, version)
        told = self.crew.cluster.seconds
        told["publish_s"] = told.get("publish_s", 0.0) + perf_counter() - started
        for name, spent in seconds.items():
            told[name] = told.get(name, 0.0) + spent

    async def _ready(self, link: Link) -> None:
        given: dict[Lane, _Published] = {}

        def lacking() -> list[Lane]:
            return [lane for lane, published in self.current.items() if given.get(lane) is not published]

        while lanes := lacking():
            lane = lanes[0]  # others may be published on the way
            given[lane] = published = self.current[lane]
            await self.transfer.send([link], lane, published.weights, published.version, late=True)

    async def _left(self, link: Link) -> None:
        for lane, stats in self.stats.pop(link, {}).items():
            self.ended[lane].update(stats)  # type: ignore[arg-type]


class RaySampler:
    """Sampler actors as one; satisfies `gleanrl.protocols.Sampler`. The crew is started and closed by its owner."""

    def __init__(self, crew: SamplerCrew, lane: Lane) -> None:
        self._crew = crew
        self._lane: Lane = lane
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    @asynccontextmanager
    async def session(self, seed: int) -> AsyncIterator[Session]:
        """See `Sampler.session`: on the least busy actor.

        Raises:
            EpisodeLost: that actor died.
            UserError: one died too often.
        """
        link = await self._crew.crew.member()
        session = _Session(self._crew, link)
        link.load += 1
        try:
            await session.ask("open", self._lane, session.number, seed)
            yield session
        finally:
            link.load -= 1
            link.tell("leave", session.number)

    async def publish(self, weights: Mapping[str, Any], version: int) -> None:
        """See `Sampler.publish`."""
        await self._crew.publish(self._lane, weights, version)
        self._version = version

    def stats(self) -> Metrics:
        """Sums over the actors, as far as they have told."""
        total = Counter(self._crew.ended[self._lane])
        for told in self._crew.stats.values():
            total.update(told.get(self._lane, {}))  # type: ignore[arg-type]
        return dict(total)

    async def close(self) -> None:
        """Nothing: the actors are their crew's."""


class _Session:
    _numbers = count(1)

    def __init__(self, crew: SamplerCrew, link: Link) -> None:
        self.number = next(self._numbers)
        self._crew, self._link = crew, link

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
        """See `Session.sample`. Raises `EpisodeLost` if the actor died."""
        answer: Completion = await self.ask("sample", self.number, prompt, params)
        # copies: one array would keep a whole batch of answers in Ray's store
        return Completion(
            np.array(answer.tokens), np.array(answer.logprobs), answer.version, answer.finish, answer.altered
        )

    async def ask(self, method: str, *arguments: Any) -> Any:
        try:
            return await self._link.call(method, *arguments)
        except ActorDied as error:
            self._crew.crew.cluster.counts["episodes_lost"] += 1
            raise EpisodeLost(str(error)) from None
