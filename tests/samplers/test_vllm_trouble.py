"""`VllmSampler` after cancelled episodes, engine errors and wrong options. Needs vLLM."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from gleanrl.protocols import SamplingParams
from gleanrl.utils.errors import UserError
from tests.samplers.conversations import CONTEXT, assert_exact, converse

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed in this environment: make vllm", allow_module_level=True)

from gleanrl.samplers.vllm import engine_arguments
from tests.samplers.vllm_engine import LONG, PROMPT, begun, changed, make_model, make_sampler, run, weights_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


def test_a_cancelled_episode_is_aborted_in_the_engine_whenever_it_is_cancelled(model: Any) -> None:
    async def test() -> None:
        sampler = make_sampler(model, max_rows=2)
        random = np.random.default_rng(0)
        for seed in range(12):
            doomed = asyncio.create_task(converse(sampler, seed, turns=20))
            neighbour = asyncio.create_task(converse(sampler, 100 + seed, turns=2))
            await asyncio.sleep(float(random.random()) * 0.02)
            doomed.cancel()
            results = await asyncio.gather(doomed, neighbour, return_exceptions=True)
            assert_exact(model, [r for r in results if not isinstance(r, BaseException)])
            assert not isinstance(results[1], BaseException)
        async with sampler.session(0) as session:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.sample(PROMPT, SamplingParams(150, ())), 0.02)
            await session.sample(PROMPT, SamplingParams(1, ()))
        assert not sampler._worker._engine.has_unfinished_requests()
        await sampler.close()
        await sampler.close()

    run(test())


def test_a_cancelled_request_stops_decoding(model: Any) -> None:
    async def test() -> None:
        sampler = make_sampler(model)
        async with sampler.session(0) as session:
            answer = asyncio.create_task(session.sample(PROMPT, SamplingParams(150, ())))
            await begun(sampler)
            answer.cancel()
            await asyncio.wait([answer])
            await sampler._until(lambda: not sampler._working)
            assert sampler.stats()["decode_steps"] < 140
            assert not sampler._worker._engine.has_unfinished_requests()
        await sampler.close()

    run(test())


def test_an_engine_error_raises_in_all_waiting_requests_and_later_ones_succeed(model: Any) -> None:
    async def test() -> None:
        sampler = make_sampler(model)
        works, calls = sampler._worker._engine.step, iter(range(10_000))

        def broken() -> Any:
            if next(calls) == 6:
                raise MemoryError("no room")
            return works()

        sampler._worker._engine.step = broken
        results = await asyncio.gather(*(converse(sampler, seed) for seed in range(5)), return_exceptions=True)
        assert all(isinstance(r, RuntimeError) and "MemoryError: no room" in str(r) for r in results)
        assert_exact(model, [await converse(sampler, 1)])
        await sampler.close()

    run(test())


@pytest.mark.heavy
@pytest.mark.parametrize("moment", ["while sampling", "before a publication"])
def test_the_death_of_a_tensor_parallel_worker_is_a_user_error_that_names_it(moment: str) -> None:
    model = make_model()

    async def test() -> None:
        sampler = make_sampler(model, inflight=True, tensor_parallel_size=2, lora_rank=2, enable_lora=True)
        doomed = next(child for child in psutil.Process().children() if child.name().endswith("TP1"))
        async with sampler.session(0) as session:
            answer = asyncio.create_task(session.sample(PROMPT, LONG))
            await begun(sampler)
            doomed.kill()
            waiting: Any = answer
            if moment == "before a publication":
                waiting = sampler.publish(weights_of(model), 1)
            with pytest.raises(UserError, match=r"VllmWorker-1.*-9") as died:
                await waiting
            assert "\n" not in str(died.value)
            await asyncio.wait([answer])
            assert answer.exception() is not None
        await sampler.close()

    run(test())


def test_two_samplers_in_one_process_keep_separate_weights() -> None:
    """A run has one sampler for training and may have another for evaluation."""
    models = [make_model(seed=seed) for seed in (1, 2)]

    async def test() -> None:
        samplers = [make_sampler(model) for model in models]
        for _ in range(3):
            both = await asyncio.gather(*(converse(sampler, seed) for sampler in samplers for seed in range(4)))
            assert_exact(models[0], both[:4])
            assert_exact(models[1], both[4:])
            changed(models[0])
            await samplers[0].publish(weights_of(models[0]), 1)
        await samplers[0].close()
        assert_exact(models[1], [await converse(samplers[1], 1)])
        await samplers[1].close()

    run(test())


def test_wrong_engine_options_raise_a_user_error(model: Any) -> None:
    for options, why in (
        ({"max_model_len": 5}, "max_model_len of vLLM follows from the run's other settings"),
        ({"enable_prefix_cachin": True}, "no engine argument 'enable_prefix_cachin'; did you mean"),
        ({"enable_sleep_mode": True}, "vLLM cannot sleep on a CPU"),
    ):
        with pytest.raises(UserError, match=why):
            engine_arguments(options, 4, CONTEXT, torch.float32, cpu=True)


def test_a_model_class_unknown_to_vllm_raises_a_one_line_error(model: Any) -> None:
    class Strange(type(model)):
        pass

    strange = Strange(model.config)
    with pytest.raises(UserError, match="vLLM cannot serve a Strange") as refused:
        make_sampler(strange)
    assert "\n" not in str(refused.value)
