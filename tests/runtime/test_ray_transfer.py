"""Tests of weight transfers to sampler actors, by Ray's object store and by broadcast, with processes that die."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.protocols import EpisodeLost
from gleanrl.runtime.ray import weights as transfer
from gleanrl.runtime.ray.actors import ActorClient, ActorDied, ActorPool, LearnerLost
from gleanrl.runtime.ray.cluster import Cluster
from gleanrl.runtime.ray.samplers import RaySampler, SamplerPool, SamplerService
from gleanrl.runtime.ray.weights import WeightHandle
from gleanrl.samplers.sessions import Counters, SessionSampler
from gleanrl.utils.weights import layout_of
from tests.runtime.ray_weights import KINDS, PARAMS, Numbers, Teacher, tensors

pytestmark = pytest.mark.ray
PROMPT = np.zeros(1, np.int32)
# in the object store, deaths go the same way as with a broadcast, which has more states
WAYS = [pytest.param("memory", marks=pytest.mark.heavy), "broadcast"]


async def killed(actor: ActorClient) -> None:
    os.kill(await actor.call("pid"), signal.SIGKILL)


@dataclass
class World:
    """A running learner actor and two sampler actors."""

    learner: ActorClient
    actors: ActorPool
    samplers: SamplerPool
    weights: WeightHandle = field(init=False)

    async def learn(self, value: float) -> None:
        self.weights = WeightHandle(self.learner, await self.learner.ask("learn", value))

    async def held(self) -> list[dict[str, tuple[float, int]]]:
        """Return each sampler's weights: value and version by lane."""
        return [await self.actors.members[n].ask("held") for n in sorted(self.actors.members)]

    async def whole(self) -> None:
        """Wait until both samplers are running."""
        while True:
            await self.actors.member()  # raises the error that prevents a restart
            if len(self.actors.members) == 2 and not any(actor.death for actor in self.actors.members.values()):
                return
            await self.actors.changed.wait()


@asynccontextmanager
async def world(cluster: Cluster, folder: Path, way: Any, fall_back: bool = False) -> AsyncIterator[World]:
    cluster.metrics()
    learner = ActorClient(cluster, "learner", Teacher, (), cluster.options("learner", 0))
    actors = ActorPool(cluster, "sampler", 2, Numbers, (str(folder / "opened"),))
    samplers = SamplerPool(actors, way, fall_back=fall_back)
    try:
        await asyncio.gather(learner.start(), actors.start())
        yield World(learner, actors, samplers)
    finally:
        await asyncio.gather(learner.close(), actors.close())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["memory", "broadcast"])
def test_a_sampler_that_starts_late_gets_the_weights_of_the_others(cluster: Cluster, tmp_path: Path, way: Any) -> None:
    async def main() -> None:
        async with world(cluster, tmp_path, way) as at:
            train, evaluate = RaySampler(at.samplers, "train"), RaySampler(at.samplers, "evaluate")
            await at.learn(1)
            await train.publish(at.weights, 1)
            await evaluate.publish(at.weights, 1)
            assert train.version == evaluate.version == 1
            assert await at.held() == [{"train": (1.0, 1), "evaluate": (1.0, 1)}] * 2
            await at.learn(2)
            if way == "memory":
                assert await at.learner.ask("asked") == 1  # the weights were put into the store once for both samplers
            await train.publish(at.weights, 2)
            await at.learn(3)
            assert (
                await at.held() == [{"train": (2.0, 2), "evaluate": (1.0, 1)}] * 2
            )  # copies, not the learner's tensors
            dead, starts, ready = at.actors.members[0], asyncio.Event(), at.actors.ready
            assert ready is not None

            async def late(actor: ActorClient) -> None:
                starts.set()
                await ready(actor)

            at.actors.ready = late
            async with train.session(1) as one, train.session(2) as two:
                assert [at.actors.members[n].load for n in range(2)] == [1, 1]  # least busy first
                assert (await one.sample(PROMPT, PARAMS)).tokens.tolist() == [2, 2, 2]
                await killed(dead)
                with pytest.raises(EpisodeLost, match="sampler 0 died"):
                    await one.sample(PROMPT, PARAMS)
                assert (await two.sample(PROMPT, PARAMS)).version == 2
            await at.learner.ask("trap", "hold")
            publishing = asyncio.ensure_future(train.publish(at.weights, 3))
            await starts.wait()  # the replacement starts during the transfer
            await at.learner.ask("go")
            await publishing
            await at.whole()
            assert await at.held() == [{"train": (3.0, 3), "evaluate": (1.0, 1)}] * 2
            async with train.session(3) as again:  # the session goes to the replacement, which has no other
                assert (await again.sample(PROMPT, PARAMS)).tokens.tolist() == [3, 3, 3]
            assert (tmp_path / "opened").read_text().split() == ["2", "2", "3"]
            assert train.stats()["sampled_tokens"] == 15  # of three actors, including the dead one
            assert cluster.metrics()["service/episodes_lost"] == 1

            await at.learn(4)
            await at.learner.ask("trap", "die")
            with pytest.raises(LearnerLost, match="learner died"):
                await train.publish(at.weights, 4)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["memory", "broadcast"])
def test_publications_of_adapters_send_the_base_weights_once(cluster: Cluster, tmp_path: Path, way: Any) -> None:
    async def main() -> None:
        async with world(cluster, tmp_path, way) as at:
            train = RaySampler(at.samplers, "train")
            await at.learner.ask("adapt")
            for value in (1, 2, 3):
                await at.learn(value)
                await train.publish(at.weights, value)
                assert await at.held() == [{"train": (value, value)}] * 2
            assert [await actor.ask("bases") for actor in at.actors.members.values()] == [1, 1]
            await killed(at.actors.members[0])
            with pytest.raises(ActorDied):
                await at.actors.members[0].call("pid")
            await at.whole()
            assert await at.held() == [{"train": (3.0, 3)}] * 2

    asyncio.run(main())


@pytest.mark.slow
def test_a_broadcast_survives_a_dead_sampler_and_falls_back_to_the_object_store(
    cluster: Cluster, tmp_path: Path
) -> None:
    async def main() -> None:
        async with world(cluster, tmp_path, "broadcast", fall_back=True) as at:
            train, evaluate = RaySampler(at.samplers, "train"), RaySampler(at.samplers, "evaluate")
            await at.learn(1)
            await train.publish(at.weights, 1)
            await evaluate.publish(at.weights, 1)
            await at.learn(2)
            await at.learner.ask("trap", "hold")
            publishing = asyncio.ensure_future(train.publish(at.weights, 2))
            await at.learner.ask("held")  # the broadcast has begun
            await killed(at.actors.members[0])
            await at.learner.ask("go")
            await publishing
            await at.whole()
            await at.learn(3)
            assert await at.held() == [{"train": (2.0, 2), "evaluate": (1.0, 1)}] * 2
            await train.publish(at.weights, 3)  # with a new broadcast group
            assert at.samplers.way == "broadcast"

            await at.learn(4)
            await at.learner.ask("trap", "fail")
            await train.publish(at.weights, 4)
            assert at.samplers.way == "memory"
            await at.learn(5)
            await killed(at.actors.members[1])
            with pytest.raises(ActorDied):
                await at.actors.members[1].call("pid")
            await at.whole()
            assert await at.held() == [{"train": (4.0, 4), "evaluate": (1.0, 1)}] * 2

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_sampler_whose_engine_has_lost_a_process_counts_as_dead(cluster: Cluster, tmp_path: Path, way: Any) -> None:
    async def main() -> None:
        async with world(cluster, tmp_path, way) as at:
            train = RaySampler(at.samplers, "train")
            await at.learn(1)
            await train.publish(at.weights, 1)
            first, second = (at.actors.members[number] for number in range(2))
            async with train.session(1) as one, train.session(2) as two:
                await first.ask("lose")
                with pytest.raises(EpisodeLost, match=r"^sampler 0 died: worker 1 died with exit code -9$"):
                    await one.sample(PROMPT, PARAMS)
                assert (await two.sample(PROMPT, PARAMS)).version == 1
            await first.ended.wait()  # the call failed before the driver noticed the end of the actor
            await at.whole()
            await at.learn(2)
            await second.ask("lose")
            await train.publish(at.weights, 2)
            await second.ended.wait()
            await at.whole()
            assert await at.held() == [{"train": (2.0, 2)}] * 2
            assert at.samplers.way == way
            assert {first.death, second.death} == {f"sampler {n} died: worker 1 died with exit code -9" for n in (0, 1)}
            assert cluster.metrics()["service/actors_restarted"] == 2

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_samplers_that_are_all_dead_at_a_publication_get_its_weights_when_they_start(
    cluster: Cluster, tmp_path: Path, way: Any
) -> None:
    async def main() -> None:
        async with world(cluster, tmp_path, way) as at:
            await at.learn(1)
            published, ready = asyncio.Event(), at.actors.ready
            assert ready is not None

            async def late(actor: ActorClient) -> None:
                await published.wait()
                await ready(actor)

            at.actors.ready = late
            for dead in list(at.actors.members.values()):
                await killed(dead)
                await dead.ended.wait()
            assert not at.actors.members
            await at.samplers.publish("train", at.weights, 1)
            await at.learn(2)
            published.set()
            await at.whole()
            assert await at.held() == [{"train": (1.0, 1)}] * 2

    asyncio.run(main())


# --- without actors -----------------------------------------------------------------------------------
def test_an_episode_that_is_cancelled_before_it_gets_a_row_takes_none() -> None:
    class Worker:
        counters = Counters()

        def load(self, _weights: Any) -> None: ...
        def close(self) -> None: ...

    async def main() -> None:
        worker: Any = Worker()
        sampler = SessionSampler(
            lambda: worker, max_rows=1, max_context=8, deterministic=True, inflight=False, device_lock=None
        )
        nothing: Any = None
        service = SamplerService(nothing, nothing)
        service._lanes = {"train": sampler}
        await service.open("train", 1, 0)
        waiting = asyncio.ensure_future(service.open("train", 2, 0))
        await asyncio.sleep(0)
        await service.leave(2)
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        seated = asyncio.ensure_future(service.open("train", 3, 0))
        await asyncio.sleep(0)
        await service.leave(1)  # the row goes to session 3, which leaves before its open() returns
        await service.leave(3)
        await asyncio.wait([seated])
        await asyncio.wait_for(sampler.publish({}, 1), 10)  # no session is open any more
        await sampler.close()

    asyncio.run(main())


class Fellow:
    """A receiver of a broadcast in a thread; it joins the group at once and transfers when ``go`` is set."""

    def __init__(self, place: transfer.Place, rank: int) -> None:
        self.joined, self.go = threading.Event(), threading.Event()
        self.result: Future[Any] = Future()
        threading.Thread(target=self._work, args=(place, rank), daemon=True).start()

    def _work(self, place: transfer.Place, rank: int) -> None:
        group = transfer.BroadcastGroup(place, rank)
        group.join()
        self.joined.set()
        self.go.wait()
        try:
            self.result.set_result(group.transfer())
        except RuntimeError as error:
            self.result.set_exception(error)
        threading.Event().wait()  # keep the group open


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[transfer.BroadcastGroup, list[Fellow]]]:
    """Make a sender and its receivers, with one timeout in seconds for each of them."""

    def met(*patience_s: float) -> tuple[transfer.BroadcastGroup, list[Fellow]]:
        made = torch.distributed.ProcessGroupGloo
        monkeypatch.setattr(
            transfer.distributed, "ProcessGroupGloo",
            lambda store, rank, world, _: made(store, rank, world, timedelta(seconds=patience_s[rank])),
        )  # fmt: skip
        store = transfer.TCPStore("127.0.0.1", 0, len(patience_s), True, timedelta(seconds=60), wait_for_workers=False)
        place = transfer.Place("127.0.0.1", store.port, len(patience_s), "gloo", 1, dict(layout_of(tensors(0))))
        fellows = [Fellow(place, rank) for rank in range(1, len(patience_s))]
        group = transfer.BroadcastGroup(place, 0, store)
        group.join()
        assert all(fellow.joined.wait(30) for fellow in fellows)
        return group, fellows

    return met


def test_every_receiver_of_a_broadcast_gets_the_sent_tensors(meet: Callable[..., Any]) -> None:
    group, fellows = meet(30, 30, 30)
    for fellow in fellows:
        fellow.go.set()
    group.transfer(tensors(2))
    for fellow in fellows:
        taken = fellow.result.result(30)
        assert {name: (t.dtype, t.shape) for name, t in taken.items()} == KINDS
        assert all(bool((tensor == 2).all()) for tensor in taken.values())


def test_weights_that_cannot_be_read_fail_the_broadcast_for_all_at_once(meet: Callable[..., Any]) -> None:
    group, fellows = meet(300, 300, 300)
    for fellow in fellows:
        fellow.go.set()
    with pytest.raises(KeyError):
        group.transfer({})
    for fellow in fellows:
        with pytest.raises(RuntimeError):
            fellow.result.result(60)


def test_a_receiver_that_times_out_fails_the_broadcast_for_all_at_once(meet: Callable[..., Any]) -> None:
    group, fellows = meet(300, 1, 300, 300)  # the first receiver's timeout is one second
    for fellow in fellows:
        fellow.go.set()
    with pytest.raises(RuntimeError):
        fellows[0].result.result(60)
    with pytest.raises(RuntimeError):  # at once, not after its own timeout
        group.transfer(tensors(2))
    for fellow in fellows[1:]:
        with pytest.raises(RuntimeError):
            fellow.result.result(60)
