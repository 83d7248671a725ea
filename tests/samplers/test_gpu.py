"""The sampler on a GPU: its log-probs are those of a plain pass on a CPU."""

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


async def talk(device: str, name: str, dtype: torch.dtype | None, publish: bool = False) -> list:
    sampler = make_sampler(make_model(name).to(device), dtype=dtype)
    try:
        if publish:
            await sampler.publish(dict(make_model(name, seed=1).named_parameters()), 1)
        return list(await asyncio.gather(*(converse(sampler, seed) for seed in range(8))))
    finally:
        await sampler.close()


@pytest.mark.parametrize("name", ["qwen2", "llama3 rope", "gpt neox"])
def test_log_probs_in_float32_are_those_of_a_cpu(name: str) -> None:
    """Both engines (fused and the model's own modules), to 1e-3; and the weights that were published."""
    for publish in (False, True):
        records = asyncio.run(talk(DEVICE, name, torch.float32, publish))
        assert_exact(make_model(name, seed=int(publish)), records, tolerance=1e-3)


def test_the_same_seed_gives_the_same_answers() -> None:
    first, second = (asyncio.run(talk(DEVICE, "qwen2", torch.float32)) for _ in range(2))
    assert tokens_of(first) == tokens_of(second)


def test_bfloat16_is_the_default_and_near() -> None:
    records = asyncio.run(talk(DEVICE, "qwen2", None))
    assert_exact(make_model("qwen2"), records, tolerance=0.3 if DEVICE == "cuda" else 1e-4)
