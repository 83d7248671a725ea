"""`VllmSampler`, which runs vLLM in this process, samples exact tokens and log-probs. Needs vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.protocols import SamplingParams
from tests.samplers.conversations import CONTEXT, STOP, VOCABULARY, assert_exact, converse, flatten

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed in this environment: make vllm", allow_module_level=True)

from gleanrl.samplers.vllm import VllmSampler
from tests.samplers.vllm_engine import MODELS, PROMPT, changed, make_model, make_sampler, run, weights_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def inflight(model: Any) -> Iterator[VllmSampler]:
    sampler = make_sampler(model, inflight=True)
    yield sampler
    asyncio.run(sampler.close())


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_greedy_tokens_are_exact_after_every_publication(name: str) -> None:
    model = make_model(name)

    async def test() -> None:
        sampler = make_sampler(model, max_rows=4)
        for version in range(4):
            records = await asyncio.gather(*(converse(sampler, seed) for seed in range(10)))
            assert_exact(model, records)
            turns = [turn for record in records for turn in record]
            assert {completion.version for _, _, completion in turns} == {version}
            for prompt, params, completion in turns:
                assert completion.tokens.size <= params.max_tokens
                assert (completion.finish == "stop") == (completion.tokens[-1] == STOP)
                if params.temperature == 0:
                    assert completion.tokens.tolist() == greedy(model, prompt, completion.tokens.size)
            changed(model)
            await sampler.publish(weights_of(model), version + 1)
        await sampler.close()

    run(test())


def greedy(model: Any, prompt: np.ndarray, count: int) -> list[int]:
    """Return the greedy completion of the Hugging Face model, computed by full forward passes."""
    tokens = prompt.tolist()
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[prompt.size :]


def test_first_tokens_of_many_sessions_follow_the_models_distribution(model: Any, inflight: VllmSampler) -> None:
    async def first(seed: int) -> int:
        async with inflight.session(seed) as session:
            return int((await session.sample(PROMPT, SamplingParams(1, (), 1.5))).tokens[0])

    async def test() -> list[int]:
        await inflight.publish(weights_of(model), 0)
        return list(await asyncio.gather(*map(first, range(2000))))

    tokens = run(test())
    with torch.inference_mode():
        expected = (model(torch.tensor(PROMPT).long()[None]).logits[0, -1] / 1.5).softmax(-1).numpy() * len(tokens)
    observed = np.bincount(tokens, minlength=VOCABULARY)
    large = expected >= 5
    statistic = ((observed - expected)[large] ** 2 / expected[large]).sum()
    freedom = large.sum()
    assert freedom > 3
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_more_prompt_tokens_than_fit_in_one_prefill_batch_are_sampled_exactly(model: Any) -> None:
    """On a CPU, vLLM fails if a seeded request is prefilled in several chunks, so the sampler must prevent chunking."""

    async def test() -> None:
        sampler = make_sampler(model, enable_prefix_caching=False)
        params = SamplingParams(4, ())

        async def one(seed: int) -> Any:
            prompt = np.random.default_rng(seed).integers(3, VOCABULARY, CONTEXT - 10).astype(np.int32)
            async with sampler.session(seed) as session:
                return [(prompt, params, await session.sample(prompt, params))]

        assert 16 * (CONTEXT - 10) > 2048
        assert_exact(model, await asyncio.gather(*map(one, range(16))))
        await sampler.close()

    run(test())


def test_tokens_and_log_probs_are_bitwise_equal_whatever_the_timing_of_requests(model: Any) -> None:
    async def once(sampler: VllmSampler, delay: float) -> list[bytes]:
        await sampler.publish(weights_of(model), 0)
        return flatten(await asyncio.gather(*(converse(sampler, seed, delay=delay) for seed in range(10))))

    async def test() -> None:
        sampler = make_sampler(model, deterministic=True)
        first = await once(sampler, 0.0)
        for delay in (0.001, 0.004, 0.01):
            assert await once(sampler, delay) == first
        await sampler.close()

    run(test())


def test_the_shared_prefix_of_successive_prompts_is_reused_from_the_cache(model: Any) -> None:
    async def test() -> dict[str, float]:
        sampler = make_sampler(model)
        prompt = np.arange(3, 61, dtype=np.int32)
        async with sampler.session(0) as session:
            for _ in range(3):
                completion = await session.sample(prompt, SamplingParams(8, ()))
                prompt = np.concatenate([prompt, completion.tokens, PROMPT])
        stats = sampler.stats()
        await sampler.close()
        return stats

    stats = run(test())
    assert stats["prompt_tokens"] == 58 + 69 + 80
    # vLLM reuses whole cache blocks, which have 32 tokens.
    assert stats["reused_tokens"] == 64 + 64
    assert stats["sampled_tokens"] == 24
    assert stats["prefill_s"] > 0
    assert stats["decode_s"] > 0
