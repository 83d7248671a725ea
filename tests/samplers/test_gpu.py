"""Samplers on a GPU: their log-probs equal those of a plain forward pass on the CPU."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.samplers.conversations import CONTEXT, assert_exact, converse, make_model, make_sampler, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"


async def sample_conversations(device: str, name: str, dtype: torch.dtype | None, publish: bool = False) -> list:
    sampler = make_sampler(make_model(name).to(device), dtype=dtype)
    try:
        if publish:
            await sampler.publish(dict(make_model(name, seed=1).named_parameters()), 1)
        return list(await asyncio.gather(*(converse(sampler, seed) for seed in range(8))))
    finally:
        await sampler.close()


@pytest.mark.parametrize("name", ["qwen2", "llama3 rope", "gpt neox"])
def test_float32_log_probs_on_a_gpu_equal_those_on_the_cpu(name: str) -> None:
    """Covers both engines (fused, and the model's own modules), before and after a publication."""
    for publish in (False, True):
        records = asyncio.run(sample_conversations(DEVICE, name, torch.float32, publish))
        assert_exact(make_model(name, seed=int(publish)), records, tolerance=1e-3)


def test_the_same_seeds_give_the_same_tokens_on_a_gpu() -> None:
    first, second = (asyncio.run(sample_conversations(DEVICE, "qwen2", torch.float32)) for _ in range(2))
    assert tokens_of(first) == tokens_of(second)


def test_the_default_dtype_on_a_gpu_is_bfloat16_within_0_3_nats() -> None:
    records = asyncio.run(sample_conversations(DEVICE, "qwen2", None))
    assert_exact(make_model("qwen2"), records, tolerance=0.3 if DEVICE == "cuda" else 1e-4)


VLLM: dict[str, Any] = {"max_rows": 16, "max_context": CONTEXT, "deterministic": False, "enforce_eager": True}
VLLM["gpu_memory_utilization"] = 0.2


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed in this environment")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-2), (torch.bfloat16, 0.3)], ids=str)
def test_vllm_on_a_gpu_has_the_log_probs_of_the_cpu(dtype: torch.dtype, tolerance: float) -> None:
    """Covers the weights at the start, a publication, and a publication to an engine that has slept."""
    from gleanrl.samplers.vllm import VllmSampler
    from tests.samplers import vllm_engine

    async def test() -> None:
        sampler = VllmSampler(vllm_engine.make_model("qwen2").to(DEVICE), dtype=dtype, enable_sleep_mode=True, **VLLM)
        for seed in range(3):
            model = vllm_engine.make_model("qwen2", seed)
            if seed:
                if seed == 2:
                    await sampler.rest()
                await sampler.publish(dict(model.named_parameters()), seed)
            records = await asyncio.gather(*(converse(sampler, number) for number in range(8)))
            assert_exact(model, records, tolerance=tolerance)
        await sampler.close()

    asyncio.run(test())


@pytest.mark.vllm
def test_vllm_on_a_gpu_applies_published_adapters() -> None:
    from tests.samplers.test_vllm_adapters import RANK, Policy, VllmSampler, make_model

    policy = Policy()

    async def test() -> None:
        sampler = VllmSampler(make_model().to(DEVICE), dtype=torch.float32, lora_rank=RANK, enable_lora=True, **VLLM)
        for version in range(2):
            await sampler.publish(policy.train(), version)
            records = await asyncio.gather(*(converse(sampler, number) for number in range(8)))
            assert_exact(policy.merged, records, tolerance=1e-2)
        await sampler.close()

    asyncio.run(test())
