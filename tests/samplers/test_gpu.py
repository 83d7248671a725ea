"""`TransformersSampler` on a GPU: its log-probs equal those of a plain forward pass on the CPU."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.samplers.conversations import assert_exact, converse, make_model, make_sampler, tokens_of

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
