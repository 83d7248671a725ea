"""`VllmSampler.sleep` and `wake`: sessions wait while the engine sleeps or has no valid weights.

The worker is replaced by `SleepyWorker`, so that neither vLLM nor a GPU is needed. The engine itself is not tested.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from gleanrl.protocols import SamplingParams
from gleanrl.samplers import vllm
from gleanrl.samplers.sessions import Counters, Request
from gleanrl.utils.errors import UserError
from tests.samplers.conversations import make_model

PROMPT = np.array([5, 6, 7], np.int32)
ONE = SamplingParams(1, (1,))


class SleepyWorker:
    """Replaces the vLLM worker. It returns one token at once and records the calls and the weights it sampled with."""

    def __init__(self, *_: Any) -> None:
        self.counters = Counters()
        self.weights: Any = "first"
        self.told: list[str] = []
        self.sampled: list[tuple[Any, int]] = []

    def burst(
        self,
        requests: Sequence[Request],
        version: int,
        interrupted: Callable[[int], bool],
        deliver: Callable[[list[Request]], None],
    ) -> list[Request]:
        for request in requests:
            self.sampled.append((self.weights, version))
            request.version, request.tokens, request.logprobs, request.finish = version, [1], [0.0], "stop"
        deliver(list(requests))
        return []

    def load(self, weights: Mapping[str, Any]) -> None:
        self.told.append("load")
        if "wrong" in weights:
            raise ValueError("weights do not fit")
        if "broken" in weights:
            self.weights = "broken"
            raise UserError("weights did not arrive")
        self.weights = weights["name"]

    def sleep(self, level: int) -> None:
        self.told.append(f"sleep {level}")
        if level == 2:
            self.weights = "forgotten"

    def wake(self) -> None:
        self.told.append("wake")

    def close(self) -> None: ...


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(vllm, "VllmWorker", SleepyWorker)
    monkeypatch.setattr(vllm, "engine_arguments", lambda *_, **__: {})
    return vllm.VllmSampler(make_model(), max_context=8, deterministic=False, enable_sleep_mode=True)


def run(test: Any) -> Any:
    return asyncio.run(asyncio.wait_for(test, 30))


async def episode(sampler: Any) -> int:
    async with sampler.session(0) as session:
        return (await session.sample(PROMPT, ONE)).version


async def kept_waiting(sampler: Any) -> asyncio.Task[int]:
    """Start an episode and check that its session does not open."""
    waiting = asyncio.create_task(episode(sampler))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    return waiting


def test_sleep_waits_for_open_sessions_and_new_sessions_wait_for_wake(sampler: Any) -> None:
    async def test() -> None:
        async with sampler.session(0) as session:
            falling = asyncio.create_task(sampler.sleep())
            await session.sample(PROMPT, ONE)
            assert sampler._worker.told == []
        await falling
        await sampler.sleep()
        later = await kept_waiting(sampler)
        await sampler.wake()
        assert await later == 0
        await sampler.wake()
        assert sampler._worker.told == ["sleep 1", "wake"]
        await sampler.close()

    run(test())


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("woken", [False, True])
def test_no_session_samples_with_weights_that_sleep_discarded(sampler: Any, level: int, woken: bool) -> None:
    async def test() -> None:
        await sampler.publish({"name": "old"}, 1)
        await sampler.sleep(level)
        later = await kept_waiting(sampler)
        if woken:
            await sampler.wake()
            await asyncio.sleep(0.02)
            # Sleep level 1 keeps the weights. Level 2 discards them, so that sessions wait for the next publication.
            assert later.done() == (level == 1)
        await sampler.publish({"name": "new"}, 2)
        assert await later == (1 if woken and level == 1 else 2)
        assert await episode(sampler) == 2
        assert sampler._worker.told == ["load", f"sleep {level}", "wake", "load"]
        assert set(sampler._worker.sampled) <= {("old", 1), ("new", 2)}
        await sampler.close()

    run(test())


def test_a_failed_publication_does_not_end_a_sleep_that_discarded_the_weights(sampler: Any) -> None:
    async def test() -> None:
        await sampler.sleep(2)
        later = await kept_waiting(sampler)
        with pytest.raises(ValueError, match="do not fit"):
            await sampler.publish({"wrong": 1}, 1)
        await asyncio.sleep(0.02)
        assert not later.done()
        await sampler.publish({"name": "new"}, 1)
        assert await later == 1
        assert sampler._worker.sampled == [("new", 1)]
        await sampler.close()

    run(test())


@pytest.mark.parametrize("asleep", [False, True])
def test_wake_does_not_let_sessions_sample_after_a_failed_publication(sampler: Any, asleep: bool) -> None:
    async def test() -> None:
        if asleep:
            await sampler.sleep()
        with pytest.raises(UserError, match="did not arrive"):
            await sampler.publish({"broken": 1}, 1)
        await sampler.sleep()
        await sampler.wake()
        later = await kept_waiting(sampler)
        await sampler.publish({"name": "new"}, 1)
        assert await later == 1
        assert sampler._worker.sampled == [("new", 1)]
        await sampler.close()

    run(test())


def test_cancelling_a_sleep_that_waits_lets_new_sessions_open(sampler: Any) -> None:
    async def test() -> None:
        async with sampler.session(0):
            falling = asyncio.create_task(sampler.sleep())
            waiting = await kept_waiting(sampler)
            falling.cancel()
            assert await waiting == 0
        assert sampler._worker.told == []
        await sampler.close()

    run(test())


def test_sleep_without_enable_sleep_mode_raises(sampler: Any) -> None:
    sampler._sleeps = False
    with pytest.raises(UserError, match="enable_sleep_mode"):
        run(sampler.sleep())
    run(sampler.close())
