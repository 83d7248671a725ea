"""`VllmSampler.rest`: sessions wait while the engine sleeps or has no valid weights.

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
        self.calls: list[str] = []
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
        self.calls.append("load")
        if "wrong" in weights:
            raise ValueError("weights do not fit")
        if "broken" in weights:
            self.weights = "broken"
            raise UserError("weights did not arrive")
        self.weights = weights["name"]

    def sleep(self) -> None:
        self.calls.append("sleep")
        self.weights = "forgotten"

    def wake(self) -> None:
        self.calls.append("wake")

    def close(self) -> None: ...


def make_sleepy(monkeypatch: pytest.MonkeyPatch, enable_sleep_mode: bool) -> Any:
    monkeypatch.setattr(vllm, "VllmWorker", SleepyWorker)
    monkeypatch.setattr(vllm, "engine_arguments", lambda *_, **__: {})
    return vllm.VllmSampler(make_model(), max_context=8, deterministic=False, enable_sleep_mode=enable_sleep_mode)


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    return make_sleepy(monkeypatch, enable_sleep_mode=True)


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


def test_rest_waits_for_open_sessions_and_new_sessions_wait_for_a_publication(sampler: Any) -> None:
    async def test() -> None:
        await sampler.publish({"name": "old"}, 1)
        async with sampler.session(0) as session:
            falling = asyncio.create_task(sampler.rest())
            await session.sample(PROMPT, ONE)
            assert sampler._worker.calls == ["load"]
        await falling
        await sampler.rest()
        later = await kept_waiting(sampler)
        await sampler.publish({"name": "new"}, 2)
        assert await later == 2
        assert await episode(sampler) == 2
        assert sampler._worker.calls == ["load", "sleep", "wake", "load"]
        assert set(sampler._worker.sampled) == {("old", 1), ("new", 2)}
        await sampler.close()

    run(test())


def test_no_session_opens_after_a_rest_until_a_publication_succeeds(sampler: Any) -> None:
    async def test() -> None:
        await sampler.rest()
        later = await kept_waiting(sampler)
        with pytest.raises(ValueError, match="do not fit"):
            await sampler.publish({"wrong": 1}, 1)
        with pytest.raises(UserError, match="did not arrive"):
            await sampler.publish({"broken": 1}, 1)
        await sampler.rest()
        await asyncio.sleep(0.02)
        assert not later.done()
        await sampler.publish({"name": "new"}, 1)
        assert await later == 1
        assert sampler._worker.sampled == [("new", 1)]
        await sampler.close()

    run(test())


def test_cancelling_a_rest_that_waits_lets_new_sessions_open(sampler: Any) -> None:
    async def test() -> None:
        async with sampler.session(0):
            falling = asyncio.create_task(sampler.rest())
            waiting = await kept_waiting(sampler)
            falling.cancel()
            assert await waiting == 0
        assert sampler._worker.calls == []
        await sampler.close()

    run(test())


def test_rest_without_enable_sleep_mode_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make_sleepy(monkeypatch, enable_sleep_mode=False)

    async def test() -> None:
        await sampler.rest()
        assert await episode(sampler) == 0
        assert sampler._worker.calls == []
        await sampler.close()

    run(test())
