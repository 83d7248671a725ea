"""The parts of the Ray runtime, each against a small service, on a local Ray."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.config.loading import load
from gleanrl.config.settings import EnvironmentSettings, RaySettings, RewardSettings
from gleanrl.environments.pool import EnvironmentRaised
from gleanrl.experience.replay.reverify import Rescoring
from gleanrl.protocols import Concluding, EpisodeLost
from gleanrl.runtime.ray import cluster as clusters
from gleanrl.runtime.ray import run
from gleanrl.runtime.ray.crew import Crew
from gleanrl.runtime.ray.device_lock import Leases
from gleanrl.runtime.ray.environments import EnvironmentService, RayEnvironments, taskset_bytes
from gleanrl.runtime.ray.link import ActorDied, ActorRaised, Link
from gleanrl.runtime.ray.rewards import reward_crew, scored_by
from gleanrl.runtime.ray.weights import LearnerLost, opened, packed, stored, unpacked
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.schedule.device_lock import DeviceLock
from gleanrl.tracking.monitors import Console
from gleanrl.types import Message, Score, StopReason, Task
from gleanrl.utils.errors import UserError
from tests.cli.parity import Parity
from tests.environments.service.world import Echo
from tests.runtime.ray_services import Service

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[clusters.Cluster]:
    pytest.importorskip("ray", reason="ray is not installed")
    settings = RaySettings(max_restarts=2)
    with clusters.opened(settings, Console(), {"sampler": 2, "environment": 1, "reward": 1}) as cluster:
        yield cluster


async def killed(link: Link) -> None:
    os.kill(await link.call("pid"), signal.SIGKILL)


def test_calls_are_answered_in_any_order_and_errors_come_as_they_are(cluster: clusters.Cluster) -> None:
    async def main() -> None:
        crew = Crew(cluster, "sampler", 1, Service, ())
        await crew.start()
        link = await crew.member()
        try:
            waiting = asyncio.ensure_future(link.call("hang"))
            assert await asyncio.gather(*(link.call("echo", n) for n in range(300))) == list(range(300))
            for how, kind, text in (("mistake", UserError, "yours"), ("value", ValueError, "mine")):
                with pytest.raises(kind, match=text):
                    await link.call("fail", how)
            with pytest.raises(ActorRaised, match="Odd: odd"):
                await link.call("fail", "odd")
            assert link.call_blocking("echo", 5) == 5
            with pytest.raises(ValueError, match="mine"):
                link.call_blocking("fail", "value")
            await killed(link)
            for death in (waiting, link.call("echo", 1)):
                with pytest.raises(ActorDied, match="sampler died: its worker process has died"):
                    await death
            assert await crew.call("echo", 7) == 7  # of the one in its place
            assert await crew.member() is not link
            assert cluster.metrics()["service/actors_restarted"] == 1
        finally:
            await crew.close()

    asyncio.run(main())


def test_who_cannot_start_ends_the_run_in_one_line(cluster: clusters.Cluster, tmp_path: Path) -> None:
    async def main(start: str) -> None:
        crew = Crew(cluster, "sampler", 2, Service, (start,))
        try:
            await crew.start()
            (tmp_path / "no").touch()  # from now on none starts
            (first, _) = crew.members.values()
            await killed(first)
            with pytest.raises(ActorDied):
                await first.call("hang")
            second = await crew.member()
            assert second is not first
            await killed(second)
            await crew.call("hang")
        finally:
            await crew.close()

    for start, said in (
        ("mistake", "^no such thing$"),
        ("dies", r"^sampler \d died: .*; it was started again 2 times before \(ray.max_restarts\)$"),
        (str(tmp_path / "no"), r"^sampler \d died: .*; it was started again 2 times before"),
    ):
        with pytest.raises(UserError, match=said):
            asyncio.run(main(start))


def test_a_death_that_an_actor_waits_for_is_not_its_own(cluster: clusters.Cluster) -> None:
    async def ready(link: Link) -> None:
        assert await link.call("echo", 1) == 1
        raise ActorDied("another died")

    async def main() -> None:
        crew = Crew(cluster, "sampler", 1, Service, ())
        crew.ready = ready
        with pytest.raises(ActorDied, match="another died"):
            await crew.start()
        assert cluster.counts["actors_restarted"] == 0

    cluster.metrics()
    asyncio.run(main())


def test_the_drivers_lease_serves_actors_and_outlives_them(cluster: clusters.Cluster) -> None:
    async def main() -> None:
        leases = Leases()
        leases.device_lock = device_lock = DeviceLock()
        crew = Crew(cluster, "sampler", 2, Service, (), answers=leases.answers)
        crew.left.append(leases.forget)
        await crew.start()
        try:
            first, second = crew.members.values()
            holding = asyncio.ensure_future(first.call("hold"))
            await first.call("echo", 1)
            waiting = asyncio.ensure_future(second.call("worked", "train"))
            await second.call("echo", 1)
            assert not waiting.done()
            await killed(first)
            await waiting  # it was handed on
            with pytest.raises(ActorDied):
                await holding
            async with device_lock("train"):
                pass
        finally:
            await crew.close()

    asyncio.run(main())


def test_what_cannot_be_sent_is_told_to_who_sent_it_and_to_nobody_else(cluster: clusters.Cluster) -> None:
    async def main() -> None:
        crew = Crew(cluster, "sampler", 1, Service, ())
        await crew.start()
        link = await crew.member()
        try:
            for bad, said in ((threading.Lock(), "pickle"), (Unreadable(), "not here")):
                calls = [link.call("echo", value) for value in (1, bad, 2)]  # in one turn: they travel together
                one, none, two = await asyncio.gather(*calls, return_exceptions=True)
                assert (one, two) == (1, 2)
                assert isinstance(none, UserError)
                assert re.match(rf"sampler cannot be asked to echo: .*{said}", str(none)), none
            assert await link.call("echo", 3) == 3
        finally:
            await crew.close()

    asyncio.run(main())


def test_an_actor_that_cannot_send_an_answer_makes_room_for_another(cluster: clusters.Cluster) -> None:
    async def main() -> None:
        crew = Crew(cluster, "environment", 1, Service, ())  # one has room at a time
        await crew.start()
        link = await crew.member()
        try:
            with pytest.raises(ActorDied, match="cannot pickle"):
                await link.call("unsendable")
            assert await asyncio.wait_for(crew.call("echo", 7), 120) == 7
        finally:
            await crew.close()

    asyncio.run(main())


class Unreadable:
    """Pickled well, but not read in another process."""

    def __reduce__(self) -> Any:
        return unread, (os.getpid(),)


def unread(pid: int) -> None:
    if pid != os.getpid():
        raise ValueError("not here")


def test_environments_fail_as_they_do_in_the_local_runtime(cluster: clusters.Cluster) -> None:
    async def main() -> None:
        given = taskset_bytes(Parity(trouble={"train-1": "raise", "train-2": "kill"}))
        crew = Crew(cluster, "environment", 1, EnvironmentService, (given, EnvironmentSettings()))
        await crew.start()
        environments = RayEnvironments(crew)
        said = Message(role="assistant", content="left")
        try:
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
        finally:
            await crew.close()

    asyncio.run(main())


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_actor_is_told_why_an_episode_ends(cluster: clusters.Cluster, workers: int) -> None:
    async def main() -> None:
        crew = Crew(
            cluster, "environment", 1, EnvironmentService, (taskset_bytes(Echo()), EnvironmentSettings(workers=workers))
        )
        await crew.start()
        try:
            environment = RayEnvironments(crew).environment(Task("train-0"))
            assert isinstance(environment, Concluding)
            assert await environment.conclude(StopReason.MAX_TURNS) is None  # it has not begun
            await environment.reset()
            await environment.step(Message(role="assistant", content="left"))
            score = await environment.conclude(StopReason.CONTEXT_FULL)
            assert score == Score(1.0, explanation="context_full")
            await environment.close()
            other = RayEnvironments(crew).environment(Task("train-1"))
            await other.reset()
            os.kill(crew.members[0].begun.pid, signal.SIGKILL)  # type: ignore[union-attr]
            with pytest.raises(EpisodeLost, match="environment died"):
                await other.conclude(StopReason.MAX_TURNS)
        finally:
            await crew.close()

    asyncio.run(main())


def test_a_reward_actor_is_asked_anew(cluster: clusters.Cluster, tmp_path: Path) -> None:
    async def main() -> None:
        crew = reward_crew(cluster, RewardSettings(name="tests.runtime.ray_services:counted"), RunFolder(tmp_path))
        assert crew is not None
        await crew.start()
        try:
            async with scored_by(crew, cluster) as source:
                assert isinstance(source.train, Rescoring)
                task = Task("t")
                assert [(await source.train.score(task, "a")).value for _ in range(2)] == [1, 1]  # remembered
                assert (await source.train.score_again(task, "a")).value == 2  # type: ignore[arg-type]
                assert (await source.train.score(task, "a")).value == 1
        finally:
            await crew.close()

    asyncio.run(main())


def test_weights_and_models_travel_as_they_are() -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    weights = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).to(torch.bfloat16),
        "c": torch.randn(4, 4).t(),
        "none": torch.empty(0),
    }
    for name, tensor in opened(stored(weights)).items():
        assert tensor.dtype == weights[name].dtype
        assert torch.equal(tensor, weights[name])
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    parcel = packed(model)
    assert len(parcel.body) < 5000
    for array in parcel.tensors:
        array.flags.writeable = False  # as Ray's store has them
    there = unpacked(parcel)
    assert there[2].weight is there[0].weight
    assert not there[0].bias.requires_grad
    for name, tensor in model.state_dict().items():
        assert torch.equal(there.state_dict()[name], tensor)
    with torch.no_grad():
        there[0].weight.zero_()
    assert model[0].weight.abs().sum() > 0


def test_resources_are_asked_for_as_the_settings_say() -> None:
    kinds = {"learner": 1, "sampler": 3, "environment": 2, "reward": 1}
    places, bundles = clusters._places(RaySettings(sampler_cpus=2), kinds, gpus=True)
    assert bundles == [{"CPU": 1, "GPU": 1}, *[{"CPU": 2, "GPU": 1}] * 3, *[{"CPU": 1}] * 2, {"CPU": 0.001}]
    assert [places[kind][0] for kind in kinds] == [0, 1, 4, 6]
    places, _ = clusters._places(RaySettings(), kinds, gpus=True, ranks=4)
    assert (places["learner"][1]["GPU"], places["sampler"][1]["GPU"]) == (4, 1)
    places, bundles = clusters._places(RaySettings(placement="colocated"), kinds, gpus=True)
    assert bundles == [{"CPU": 4, "GPU": 1}, {"CPU": 1}, {"CPU": 1}, {"CPU": 0.001}]
    assert places["sampler"] == (0, {"CPU": 1, "GPU": 0.25})
    assert [places[kind][0] for kind in kinds] == [0, 0, 1, 3]


def test_each_rank_of_the_learner_has_a_gpu_of_its_own() -> None:
    kinds = {"learner": 1, "sampler": 1}
    places, bundles = clusters._places(RaySettings(), kinds, gpus=True, ranks=4)
    assert bundles == [{"CPU": 4, "GPU": 4}, {"CPU": 1, "GPU": 1}]
    assert places["learner"] == (0, {"CPU": 4, "GPU": 4})
    asked = RaySettings(learner_gpus=0, learner_cpus=2)  # on processors, and no more of them than asked
    assert clusters._places(asked, kinds, gpus=True, ranks=4)[1] == [{"CPU": 2}, {"CPU": 1, "GPU": 1}]
    assert clusters._places(RaySettings(), kinds, gpus=False, ranks=4)[1] == [{"CPU": 4}, {"CPU": 1}]
    for few, said in (
        (RaySettings(learner_gpus=3), "learner_gpus is 3"),
        (RaySettings(placement="colocated"), "disagg"),
    ):
        with pytest.raises(UserError, match=f"learner.ranks = 4: each rank needs a GPU of its own, .*{said}"):
            clusters._places(few, kinds, gpus=True, ranks=4)


def test_without_ray_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(UserError, match=r"the Ray runtime needs Ray: pip install 'gleanrl\[ray\]'"),
        clusters.opened(RaySettings(), Console(), {}),
    ):
        pass


def test_an_evaluation_whose_learner_dies_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def evaluate(builder: Any, checkpoint: Any) -> Any:
        raise LearnerLost("learner died: its worker process has died")

    monkeypatch.setattr(run, "opened", lambda *_, **__: nullcontext())
    monkeypatch.setattr(run, "prepare", lambda *_: None)
    monkeypatch.setattr(run.RayBuilder, "of", lambda *_: None)
    monkeypatch.setattr(run, "_evaluate", evaluate)
    config = load("quickstart", [("run.folder", str(tmp_path))])
    with pytest.raises(UserError, match=r"^learner died: its worker process has died; its checkpoint was not"):
        run.run_evaluation(config, tmp_path, Console())
