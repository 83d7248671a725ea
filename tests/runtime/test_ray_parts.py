"""The parts of the Ray runtime, each against a small service, on a local Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.environments.failures import EnvironmentRaised
from gleanrl.errors import UserError
from gleanrl.lease import DeviceLease
from gleanrl.monitors import Console
from gleanrl.protocols import Completion, EpisodeLost, SamplingParams
from gleanrl.ray_settings import RaySettings
from gleanrl.runtime.ray import cluster as clusters
from gleanrl.runtime.ray.crew import Crew
from gleanrl.runtime.ray.environments import EnvironmentService, RayEnvironments, taskset_bytes
from gleanrl.runtime.ray.lease import Leases
from gleanrl.runtime.ray.link import ActorDied, ActorRaised, Host, Link
from gleanrl.runtime.ray.samplers import SamplerCrew
from gleanrl.runtime.ray.transfer import Parcelled, Receiver, Transfer
from gleanrl.runtime.ray.weights import opened, packed, stored, unpacked
from gleanrl.settings import EnvironmentSettings
from gleanrl.types import Message, Task
from tests.cli.parity import Parity
from tests.runtime.ray_services import Service

pytestmark = pytest.mark.ray
PARAMS = SamplingParams(4, (0,))


@pytest.fixture(scope="module")
def cluster() -> Iterator[clusters.Cluster]:
    pytest.importorskip("ray", reason="ray is not installed")
    settings = RaySettings(max_restarts=2)
    with clusters.opened(settings, Console(), {"sampler": 2, "environment": 1}) as cluster:
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


def test_the_drivers_lease_serves_actors_and_outlives_them(cluster: clusters.Cluster) -> None:
    async def main() -> None:
        leases = Leases()
        leases.lease = lease = DeviceLease()
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
            async with lease("train"):
                pass
        finally:
            await crew.close()

    asyncio.run(main())


def note(file: str, text: str) -> None:
    with open(file, "a") as out:
        out.write(text)


class Numbers:
    """A sampler's actor whose tokens are its weights; ``file`` notes what was published before the first session."""

    def __init__(self, _host: Host, file: str) -> None:
        self._file, self._receiver = file, Receiver()
        self._weights: torch.Tensor | None = None
        self._version = 0

    async def pid(self) -> int:
        return os.getpid()

    async def publish(self, _lane: str, parcel: Parcelled, version: int) -> float:
        self._weights = (await self._receiver.received(parcel))["w"].clone()
        self._version = version
        return 0.0

    async def open(self, _lane: str, number: int, _seed: int) -> None:
        note(self._file, f"{self._version}\n")

    async def sample(self, _number: int, _prompt: Any, _params: SamplingParams) -> Completion:
        assert self._weights is not None
        tokens = self._weights.to(torch.int32).numpy()
        return Completion(tokens, np.zeros(tokens.size, np.float32), self._version, "stop")

    async def leave(self, _number: int) -> None: ...

    def news(self) -> Any:
        return {"train": {"sampled_tokens": 5.0}}, []


@pytest.mark.parametrize("way", ["memory"])
def test_a_sampler_that_died_has_the_weights_before_it_gets_episodes(
    cluster: clusters.Cluster, tmp_path: Path, way: Any
) -> None:
    async def main() -> None:
        async def heard(link: Link, news: Any) -> None:
            samplers.stats[link] = news[0]

        crew = Crew(cluster, "sampler", 2, Numbers, (str(tmp_path / "opened"),), answers={"news": heard})
        samplers = SamplerCrew(crew, Transfer(way, fall_back=False, folder=tmp_path, console=Console()))
        sampler = samplers.sampler("train")
        await crew.start()
        try:
            await sampler.publish({"w": torch.tensor([3.0, 4.0], dtype=torch.bfloat16)}, 7)
            assert sampler.version == 7
            first = crew.members[0]
            async with sampler.session(1) as one, sampler.session(2) as two:
                assert [crew.members[n].load for n in range(2)] == [1, 1]  # least busy first
                assert (await one.sample(np.zeros(1, np.int32), PARAMS)).tokens.tolist() == [3, 4]
                await killed(first)
                with pytest.raises(EpisodeLost, match="sampler 0 died"):
                    await one.sample(np.zeros(1, np.int32), PARAMS)
                assert (await two.sample(np.zeros(1, np.int32), PARAMS)).version == 7
            while crew.members.get(0) in (None, first):
                await crew._changed.wait()
            async with sampler.session(3) as again:  # the least busy is the new one
                assert (await again.sample(np.zeros(1, np.int32), PARAMS)).tokens.tolist() == [3, 4]
            assert set((tmp_path / "opened").read_text().split()) == {"7"}
            assert sampler.stats()["sampled_tokens"] == 15  # of three actors, the dead one included
            assert cluster.metrics()["service/episodes_lost"] == 1
        finally:
            await crew.close()

    asyncio.run(main())


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


def test_without_ray_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(UserError, match=r"the Ray runtime needs Ray: pip install 'gleanrl\[ray\]'"),
        clusters.opened(RaySettings(), Console(), {}),
    ):
        pass
