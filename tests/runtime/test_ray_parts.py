"""Tests of the parts of the Ray runtime (actor calls, device lock, environments, rewards), on a local Ray."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.config.settings import EnvironmentSettings, RaySettings, RewardSettings
from gleanrl.environments.pool import EnvironmentRaised
from gleanrl.experience.replay.reverify import Rescoring
from gleanrl.protocols import EpisodeLost
from gleanrl.runtime.ray import cluster as clusters
from gleanrl.runtime.ray.actors import ActorClient, ActorDied, ActorPool, ActorRaised, LearnerLost
from gleanrl.runtime.ray.environments import EnvironmentService, RayEnvironments, pickle_taskset
from gleanrl.runtime.ray.rewards import RewardActor, make_reward_source
from gleanrl.runtime.ray.weights import from_bytes, to_bytes
from gleanrl.schedule.device_lock import DeviceLock
from gleanrl.schedule.timeline import Timeline
from gleanrl.tracking.monitors import Console
from gleanrl.types import Message, Score, StopReason, Task
from gleanrl.utils.errors import UserError
from tests.cli.parity import Parity
from tests.environments.service.world import Echo
from tests.runtime.ray_services import Asked, MortalEnvironments

pytestmark = pytest.mark.ray


async def killed(actor: ActorClient) -> None:
    os.kill(await actor.call("pid"), signal.SIGKILL)


@asynccontextmanager
async def started(pool: ActorPool) -> AsyncIterator[ActorPool]:
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def test_concurrent_calls_return_their_results_and_errors_and_a_dead_actor_is_replaced(
    cluster: clusters.Cluster,
) -> None:
    async def main() -> None:
        async with started(ActorPool(cluster, "sampler", 1, Asked, ())) as pool:
            actor = await pool.member()
            waiting = asyncio.ensure_future(actor.call("hang"))
            assert await asyncio.gather(*(actor.call("echo", n) for n in range(300))) == list(range(300))
            for how, kind, text in (("mistake", UserError, "yours"), ("value", ValueError, "mine")):
                with pytest.raises(kind, match=text):
                    await actor.call("fail", how)
            with pytest.raises(ActorRaised, match="Odd: odd"):
                await actor.call("fail", "odd")
            assert actor.ask_blocking("echo", 5) == 5
            with pytest.raises(ValueError, match="mine"):
                actor.ask_blocking("fail", "value")

            for bad, said in ((threading.Lock(), "pickle"), (Unreadable(), "not here")):
                # calls of one turn of the event loop are sent together
                calls = [actor.call("echo", value) for value in (1, bad, 2)]
                one, none, two = await asyncio.gather(*calls, return_exceptions=True)
                assert (one, two) == (1, 2)
                assert isinstance(none, UserError)
                assert re.search(rf"echo .*{said}", str(none)), none
            with pytest.raises(UserError, match="unsendable"):
                await actor.call("unsendable")
            assert await actor.call("echo", 3) == 3

            await killed(actor)
            for death in (waiting, actor.call("echo", 1)):
                with pytest.raises(ActorDied, match="sampler died: its worker process has died"):
                    await death
            assert await pool.call("echo", 7) == 7  # answered by the replacement
            assert await pool.member() is not actor
            assert cluster.metrics()["service/actors_restarted"] == 1

    asyncio.run(main())


class Unreadable:
    """An object that can be pickled, but raises when it is unpickled in another process."""

    def __reduce__(self) -> Any:
        return unread, (os.getpid(),)


def unread(pid: int) -> None:
    if pid != os.getpid():
        raise ValueError("not here")


def test_an_actor_that_cannot_start_is_an_error_of_one_line(cluster: clusters.Cluster, tmp_path: Path) -> None:
    async def main(start: str) -> None:
        async with started(ActorPool(cluster, "sampler", 2, Asked, (start,))) as pool:
            (tmp_path / "no").touch()  # from now on no actor can start
            (first, _) = pool.members.values()
            await killed(first)
            with pytest.raises(ActorDied):
                await first.call("hang")
            second = await pool.member()
            assert second is not first
            await killed(second)
            await pool.call("hang")

    often = r"^sampler \d died: .*; it was started again 2 times before \(ray.max_restarts\)$"
    for start, said in (("mistake", "^no such thing$"), ("dies", often), (str(tmp_path / "no"), often)):
        with pytest.raises(UserError, match=said):
            asyncio.run(main(start))


def test_a_learner_that_dies_while_a_sampler_starts_is_not_counted_as_a_sampler_restart(
    cluster: clusters.Cluster,
) -> None:
    async def ready(actor: ActorClient) -> None:
        assert await actor.call("echo", 1) == 1
        raise LearnerLost("learner died")

    async def main() -> None:
        pool = ActorPool(cluster, "sampler", 1, Asked, ())
        pool.ready = ready
        with pytest.raises(LearnerLost, match="learner died"):
            await pool.start()
        assert cluster.counts["actors_restarted"] == 0

    cluster.metrics()
    asyncio.run(main())


def test_a_learner_that_dies_while_actors_start_is_lost_as_one_that_dies_later(cluster: clusters.Cluster) -> None:
    async def main(start: str) -> None:
        learner = ActorClient(cluster, "learner", Asked, (start,), cluster.options("learner", 0))
        try:
            await learner.start()
            await killed(learner)
            await learner.ask("echo", 1)
        finally:
            await learner.close()

    for start in ("dies", ""):
        with pytest.raises(LearnerLost):
            asyncio.run(main(start))


def test_the_driver_s_device_lock_is_released_when_the_actor_that_has_it_dies(cluster: clusters.Cluster) -> None:
    async def main() -> None:
        async with started(ActorPool(cluster, "sampler", 2, Asked, ())) as pool:
            first, second = pool.members.values()
            holding = asyncio.ensure_future(first.call("hold"))
            await first.call("echo", 1)
            waiting = asyncio.ensure_future(second.call("worked", "train"))
            await second.call("echo", 1)
            assert not waiting.done()
            await killed(first)
            await waiting  # the lock of the dead actor was released
            with pytest.raises(ActorDied):
                await holding
            async with cluster.device_lock("train"):
                pass

    asyncio.run(main())


class FullDisk(Timeline):
    """A timeline whose file cannot be written, as on a full disk."""

    def record(self, kind: str, start: float, end: float, **tags: Any) -> None:
        raise UserError("no space left")


def test_a_timeline_that_cannot_be_written_blocks_no_call(
    cluster: clusters.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "timeline", FullDisk())
    monkeypatch.setattr(cluster, "device_lock", DeviceLock(timeline=FullDisk()))

    async def main() -> None:
        async with started(ActorPool(cluster, "sampler", 1, Asked, ())) as pool, asyncio.timeout(30):
            actor = await pool.member()
            assert await actor.call("timed", 1) == 1
            async with cluster.device_lock("train"):
                waiting = asyncio.ensure_future(actor.call("worked", "sample"))
                await actor.call("echo", 1)
            with pytest.raises(UserError, match="no space left"):
                await waiting
            await actor.call("worked", "sample")  # the failed call released the device

    asyncio.run(main())


def test_environment_errors_and_lost_episodes_are_those_of_the_local_runtime(cluster: clusters.Cluster) -> None:
    async def main() -> None:
        given = pickle_taskset(Parity(trouble={"train-1": "raise", "train-2": "kill"}))
        arguments = (given, EnvironmentSettings())
        async with started(ActorPool(cluster, "environment", 1, EnvironmentService, arguments)) as pool:
            environments = RayEnvironments(pool)
            said = Message(role="assistant", content="left")
            good, bad, worse = (environments.environment(Task(f"train-{n}", payload={"start": 1})) for n in range(3))
            for environment in (good, bad, worse):
                assert "door 1" in (await environment.reset()).messages[0]["content"]
            assert not (await good.step(said)).done
            with pytest.raises(EnvironmentRaised, match=r"train-1.*the door is stuck") as error:
                await bad.step(said)
            assert error.value.kind == "RuntimeError"
            for environment in (worse, good):
                with pytest.raises(EpisodeLost, match="environment died"):
                    await environment.step(said)
                await environment.close()
            again = environments.environment(Task("train-0", payload={"start": 1}))
            await again.reset()
            assert (await again.step(said)).score is not None

    asyncio.run(main())


@pytest.mark.parametrize("workers", [0, 1])
def test_conclude_passes_the_stop_reason_to_the_environment_in_its_actor(
    cluster: clusters.Cluster, workers: int
) -> None:
    async def main() -> None:
        arguments = (pickle_taskset(Echo()), EnvironmentSettings(workers=workers))
        async with started(ActorPool(cluster, "environment", 1, MortalEnvironments, arguments)) as pool:
            environment = RayEnvironments(pool).environment(Task("train-0"))
            assert await environment.conclude(StopReason.MAX_TURNS) is None  # the episode has not begun
            await environment.reset()
            await environment.step(Message(role="assistant", content="left"))
            score = await environment.conclude(StopReason.CONTEXT_FULL)
            assert score == Score(1.0, explanation="context_full")
            await environment.close()
            other = RayEnvironments(pool).environment(Task("train-1"))
            await other.reset()
            await killed(pool.members[0])  # type: ignore[arg-type]
            with pytest.raises(EpisodeLost, match="environment died"):
                await other.conclude(StopReason.MAX_TURNS)

    asyncio.run(main())


def test_score_again_of_a_reward_actor_bypasses_its_cache(cluster: clusters.Cluster, tmp_path: Path) -> None:
    async def main() -> None:
        settings = RewardSettings(name="tests.runtime.ray_services:counted")
        arguments = (None, settings, tmp_path / "rewards.sqlite", {})
        async with started(ActorPool(cluster, "reward", 1, RewardActor, arguments)) as pool:
            source = make_reward_source(pool, cluster)
            assert isinstance(source.train, Rescoring)
            reward: Any = source.train
            task = Task("t")
            assert [(await reward.score(task, "a")).value for _ in range(2)] == [1, 1]  # the second is from the cache
            assert (await reward.score_again(task, "a")).value == 2
            assert (await reward.score(task, "a")).value == 1

    asyncio.run(main())


def test_weights_keep_dtype_and_values_through_serialization() -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    weights = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).to(torch.bfloat16),
        "c": torch.randn(4, 4).t(),
        "none": torch.empty(0),
    }
    back = from_bytes(to_bytes(weights))
    assert back.keys() == weights.keys()
    for name, tensor in back.items():
        assert tensor.dtype == weights[name].dtype
        assert torch.equal(tensor, weights[name])


def test_actor_resources_follow_the_settings_and_the_placement() -> None:
    kinds = {"learner": 1, "sampler": 3, "environment": 2, "reward": 1}
    places, bundles = clusters.place_actors(RaySettings(sampler_cpus=2), kinds, gpus=True)
    assert bundles == [{"CPU": 1, "GPU": 1}, *[{"CPU": 2, "GPU": 1}] * 3, *[{"CPU": 1}] * 2, {"CPU": 0.001}]
    assert [places[kind][0] for kind in kinds] == [0, 1, 4, 6]
    places, bundles = clusters.place_actors(RaySettings(placement="colocated"), kinds, gpus=True)
    assert bundles == [{"CPU": 4, "GPU": 1}, {"CPU": 1}, {"CPU": 1}, {"CPU": 0.001}]
    assert places["sampler"] == (0, {"CPU": 1, "GPU": 0.25})
    assert [places[kind][0] for kind in kinds] == [0, 0, 1, 3]


def test_each_rank_of_the_learner_gets_a_gpu_of_its_own() -> None:
    kinds = {"learner": 4, "sampler": 1}
    places, bundles = clusters.place_actors(RaySettings(), kinds, gpus=True)
    assert bundles == [{"CPU": 1, "GPU": 1}] * 5
    assert [places[kind] for kind in kinds] == [(0, {"CPU": 1, "GPU": 1}), (4, {"CPU": 1, "GPU": 1})]
    asked = RaySettings(learner_gpus=0, learner_cpus=2)  # a learner on CPUs gets no more of them than configured
    assert clusters.place_actors(asked, kinds, gpus=True)[1] == [*[{"CPU": 2}] * 4, {"CPU": 1, "GPU": 1}]
    assert clusters.place_actors(RaySettings(), kinds, gpus=False)[1] == [{"CPU": 1}] * 5
    colocated = RaySettings(placement="colocated")
    assert clusters.place_actors(colocated, kinds, gpus=False)[1] == [{"CPU": 5}]
    for few, said in ((RaySettings(learner_gpus=0.5), "learner_gpus is 0.5"), (colocated, "disagg")):
        with pytest.raises(UserError, match=f"learner.ranks = 4: each rank needs a GPU of its own, .*{said}"):
            clusters.place_actors(few, kinds, gpus=True)


def test_a_ray_that_does_not_start_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a bare Exception if the machine is too busy to start its processes in time."""
    ray = pytest.importorskip("ray")

    def time_out(**_: Any) -> None:
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", time_out)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with (
        pytest.raises(UserError, match="Ray did not start on this machine: The current node timed out"),
        clusters.open_cluster(RaySettings(), Console(), {}),
    ):
        pass


def test_a_missing_ray_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(UserError, match=r"the Ray runtime needs Ray: pip install 'gleanrl\[ray\]'"),
        clusters.open_cluster(RaySettings(), Console(), {}),
    ):
        pass
