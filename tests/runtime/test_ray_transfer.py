"""How weights reach samplers in actors, each way, and what becomes of them when somebody dies meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.config.settings import RaySettings
from gleanrl.protocols import EpisodeLost
from gleanrl.runtime.ray import broadcast
from gleanrl.runtime.ray import cluster as clusters
from gleanrl.runtime.ray.crew import Crew
from gleanrl.runtime.ray.link import ActorDied, Link
from gleanrl.runtime.ray.samplers import SamplerCrew, SamplerService
from gleanrl.runtime.ray.transfer import Transfer
from gleanrl.runtime.ray.weights import LearnerLost, RemoteWeights
from gleanrl.samplers.burst import Counters
from gleanrl.samplers.sessions import SessionSampler
from gleanrl.tracking.monitors import Console
from tests.runtime.ray_weights import KINDS, PARAMS, Numbers, Teacher, tensors

pytestmark = pytest.mark.ray
PROMPT = np.zeros(1, np.int32)


@pytest.fixture(scope="module")
def cluster() -> Iterator[clusters.Cluster]:
    pytest.importorskip("ray", reason="ray is not installed")
    settings = RaySettings(max_restarts=2)
    with clusters.opened(settings, Console(), {"learner": 1, "sampler": 2}) as cluster:
        yield cluster


async def killed(link: Link) -> None:
    os.kill(await link.call("pid"), signal.SIGKILL)


@dataclass
class World:
    """A learner and two samplers at work."""

    learner: Link
    crew: Crew
    samplers: SamplerCrew
    weights: RemoteWeights = field(init=False)

    async def learn(self, value: float) -> None:
        self.weights = RemoteWeights(self.learner, await self.learner.call("learn", value))

    async def held(self) -> list[dict[str, tuple[float, int]]]:
        """What each sampler has: value and version by lane."""
        return [await self.crew.members[n].call("held") for n in sorted(self.crew.members)]

    async def whole(self) -> None:
        """Wait until both are at work."""
        while len(self.crew.members) < 2 or any(link.death for link in self.crew.members.values()):
            await asyncio.wait_for(self.crew._changed.wait(), 60)
            await self.crew.member()  # raises what keeps one from coming back


@asynccontextmanager
async def world(cluster: clusters.Cluster, folder: Path, way: Any, fall_back: bool = False) -> AsyncIterator[World]:
    async def heard(link: Link, news: Any) -> None:
        samplers.stats[link] = news[0]

    learner = Crew(cluster, "learner", 1, Teacher, (), restarts=0)
    crew = Crew(cluster, "sampler", 2, Numbers, (str(folder / "opened"),), answers={"news": heard})
    samplers = SamplerCrew(crew, Transfer(way, fall_back=fall_back, folder=folder, console=cluster.console))
    try:
        await asyncio.gather(learner.start(), crew.start())
        yield World(learner.members[0], crew, samplers)
    finally:
        await asyncio.gather(learner.close(), crew.close())
        samplers.transfer.close()
    assert not files(folder)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".weights*"))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["memory", "broadcast", "disk"])
def test_a_sampler_that_comes_late_has_what_the_others_have(
    cluster: clusters.Cluster, tmp_path: Path, way: Any
) -> None:
    async def main() -> None:
        async with world(cluster, tmp_path, way) as at:
            train, evaluate = at.samplers.sampler("train"), at.samplers.sampler("evaluate")
            await at.learn(1)
            await train.publish(at.weights, 1)
            await evaluate.publish(at.weights, 1)
            assert train.version == evaluate.version == 1
            assert await at.held() == [{"train": (1.0, 1), "evaluate": (1.0, 1)}] * 2
            await at.learn(2)
            assert (await at.learner.call("told"))["put"] == (1 if way == "memory" else 0)
            await train.publish(at.weights, 2)
            told = await at.learner.call("told")
            assert told == {"weights": 1, "put": 1 if way == "memory" else 0}  # put together once
            await at.learn(3)
            assert await at.held() == [{"train": (2.0, 2), "evaluate": (1.0, 1)}] * 2  # copies
            dead, asks, ready = at.crew.members[0], asyncio.Event(), at.crew.ready
            assert ready is not None

            async def late(link: Link) -> None:
                asks.set()
                await ready(link)

            at.crew.ready = late
            async with train.session(1) as one, train.session(2) as two:
                assert [at.crew.members[n].load for n in range(2)] == [1, 1]  # least busy first
                assert (await one.sample(PROMPT, PARAMS)).tokens.tolist() == [2, 2, 2]
                await killed(dead)
                with pytest.raises(EpisodeLost, match="sampler 0 died"):
                    await one.sample(PROMPT, PARAMS)
                assert (await two.sample(PROMPT, PARAMS)).version == 2
            await at.learner.call("trap", "hold")
            publishing = asyncio.ensure_future(train.publish(at.weights, 3))
            await asks.wait()  # it comes while they are on their way
            await at.learner.call("go")
            await publishing
            await at.whole()
            assert await at.held() == [{"train": (3.0, 3), "evaluate": (1.0, 1)}] * 2
            async with train.session(3) as again:  # the least busy is the new one
                assert (await again.sample(PROMPT, PARAMS)).tokens.tolist() == [3, 3, 3]
            assert (tmp_path / "opened").read_text().split() == ["2", "2", "3"]
            assert train.stats()["sampled_tokens"] == 15  # of three actors, the dead one included
            assert cluster.metrics()["service/episodes_lost"] == 1
            assert len(files(tmp_path)) == (2 if way == "disk" else 0)  # one for each lane

            await at.learn(4)
            await at.learner.call("trap", "die")
            with pytest.raises(LearnerLost, match="learner died"):
                await train.publish(at.weights, 4)
            with pytest.raises(LearnerLost, match="learner died"):
                dict(at.weights)

    asyncio.run(main())


@pytest.mark.slow
def test_a_broadcast_outlives_a_sampler_and_failing_it_gives_way_to_files(
    cluster: clusters.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with world(cluster, tmp_path, "broadcast", fall_back=True) as at:
            train, evaluate = at.samplers.sampler("train"), at.samplers.sampler("evaluate")
            await at.learn(1)
            await train.publish(at.weights, 1)
            await evaluate.publish(at.weights, 1)
            await at.learn(2)
            await at.learner.call("trap", "hold")
            publishing = asyncio.ensure_future(train.publish(at.weights, 2))
            await at.learner.call("told")  # it is under way
            await killed(at.crew.members[0])
            await at.learner.call("go")
            await publishing
            await at.whole()
            await at.learn(3)
            assert await at.held() == [{"train": (2.0, 2), "evaluate": (1.0, 1)}] * 2
            await at.learner.call("told")
            await train.publish(at.weights, 3)  # another group
            assert (await at.learner.call("told"))["put"] == 0
            assert not files(tmp_path)

            await at.learn(4)
            await at.learner.call("trap", "fail")
            await train.publish(at.weights, 4)
            assert len(files(tmp_path)) == 1
            await at.learn(5)
            await killed(at.crew.members[1])
            with pytest.raises(ActorDied):
                await at.crew.members[1].call("pid")
            await at.whole()
            assert await at.held() == [{"train": (4.0, 4), "evaluate": (1.0, 1)}] * 2

    asyncio.run(main())
    said = capsys.readouterr().err
    assert said.count("a broadcast of weights failed (no such network); from now on they go through files\n") == 1


def test_a_learner_that_died_before_a_sampler_comes_late_is_not_the_samplers_death(
    cluster: clusters.Cluster, tmp_path: Path
) -> None:
    async def ignored(*_: Any) -> None: ...

    async def main() -> None:
        cluster.metrics()
        learner = Crew(cluster, "learner", 1, Teacher, (), restarts=0)
        crew = Crew(cluster, "sampler", 1, Numbers, (str(tmp_path / "opened"),), answers={"news": ignored})
        samplers = SamplerCrew(crew, Transfer("memory", fall_back=False, folder=tmp_path, console=Console()))
        await asyncio.gather(learner.start(), crew.start())
        try:
            link, dead = learner.members[0], crew.members[0]
            await samplers.publish("evaluate", tensors(7), 3)  # of whom else, as tensors
            await samplers.publish("train", RemoteWeights(link, 0), 1)
            assert await dead.call("held") == {"evaluate": (7.0, 3), "train": (0.0, 1)}
            for each in (link, dead):
                await killed(each)
                with pytest.raises(ActorDied):
                    await each.call("pid")  # what lay in Ray's store for it is lost with the learner
            with pytest.raises(LearnerLost, match="learner died"):
                await crew.member()
            assert cluster.metrics()["service/actors_restarted"] == 1  # the one that was killed
        finally:
            await asyncio.gather(learner.close(), crew.close())

    asyncio.run(main())


# --- without actors -----------------------------------------------------------------------------------
def test_a_publication_while_a_sampler_comes_late_fetches_no_model_into_the_driver() -> None:
    class Learner:
        def call_blocking(self, *_: Any) -> Any:
            raise AssertionError("the driver fetches a model")

    class Sent:
        def __init__(self) -> None:
            self.sent: list[tuple[str, int]] = []
            self.asked = asyncio.Event()

        async def send(self, _links: Any, lane: str, _weights: Any, version: int, **_: Any) -> dict[str, float]:
            self.sent.append((lane, version))
            self.asked.set()
            await asyncio.sleep(0)
            return {}

    async def main() -> None:
        transfer, link = Sent(), Learner()
        crew: Any = SimpleNamespace(left=[], ready=None, members={}, cluster=SimpleNamespace(seconds={}))
        samplers = SamplerCrew(crew, transfer)  # type: ignore[arg-type]
        await samplers.publish("train", RemoteWeights(link, 0), 1)  # type: ignore[arg-type]
        transfer.asked.clear()
        late = asyncio.ensure_future(crew.ready("late"))
        await transfer.asked.wait()
        await samplers.publish("train", RemoteWeights(link, 1), 2)  # type: ignore[arg-type]
        await late
        assert transfer.sent == [("train", 1), ("train", 1), ("train", 2), ("train", 2)]

    asyncio.run(main())


def test_an_episode_that_is_given_up_before_it_has_a_row_takes_none() -> None:
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
        await service.leave(1)  # which gives 3 the row, and 3 leaves before it knows
        await service.leave(3)
        await asyncio.wait([seated])
        await asyncio.wait_for(sampler.publish({}, 1), 10)  # nobody is open any more
        await sampler.close()

    asyncio.run(main())


class Fellow:
    """A receiver, on a thread."""

    def __init__(self, place: broadcast.Place, rank: int) -> None:
        self.joined, self.go = threading.Event(), threading.Event()
        self.result: Future[Any] = Future()
        threading.Thread(target=self._work, args=(place, rank), daemon=True).start()

    def _work(self, place: broadcast.Place, rank: int) -> None:
        group = broadcast.Group(place, rank)
        self.joined.set()
        self.go.wait()
        try:
            self.result.set_result(group.receive(broadcast.manifest(tensors(0))))
        except RuntimeError as error:
            self.result.set_exception(error)
        threading.Event().wait()  # it keeps its group


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[broadcast.Group, list[Fellow]]]:
    """A sender and its receivers, each with its patience in seconds."""

    def met(*patience_s: float) -> tuple[broadcast.Group, list[Fellow]]:
        made = torch.distributed.ProcessGroupGloo
        monkeypatch.setattr(
            broadcast.distributed, "ProcessGroupGloo",
            lambda store, rank, world, _: made(store, rank, world, timedelta(seconds=patience_s[rank])),
        )  # fmt: skip
        place, store = broadcast.meeting("127.0.0.1", 0, len(patience_s), "gloo", 1)
        fellows = [Fellow(place, rank) for rank in range(1, len(patience_s))]
        group = broadcast.Group(place, 0, store)
        assert all(fellow.joined.wait(30) for fellow in fellows)
        return group, fellows

    return met


def test_a_broadcast_is_what_was_sent(meet: Callable[..., Any]) -> None:
    group, fellows = meet(30, 30, 30)
    for fellow in fellows:
        fellow.go.set()
    group.send(tensors(2))
    for fellow in fellows:
        taken = fellow.result.result(30)
        assert {name: (t.dtype, t.shape) for name, t in taken.items()} == KINDS
        assert all(bool((tensor == 2).all()) for tensor in taken.values())


def test_who_gives_up_a_broadcast_does_not_keep_the_others_waiting(meet: Callable[..., Any]) -> None:
    group, fellows = meet(300, 1, 300, 300)  # the first of them has no patience
    for fellow in fellows:
        fellow.go.set()
    with pytest.raises(RuntimeError):
        fellows[0].result.result(60)
    with pytest.raises(RuntimeError):  # at once, not after its own patience
        group.send(tensors(2))
    for fellow in fellows[1:]:
        with pytest.raises(RuntimeError):
            fellow.result.result(60)
