"""Models and samplers for tests that run vLLM in this process. Importing this module needs vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gleanrl.protocols import SamplingParams
from gleanrl.samplers.vllm import VllmSampler
from tests.samplers.conversations import CONTEXT, STOP, VOCABULARY

PROMPT = np.array([5, 6, 7], np.int32)
LONG = SamplingParams(100, ())
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "bos_token_id": 2,
    "eos_token_id": STOP,
    "pad_token_id": 0,
}
MODELS: dict[str, Any] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=True)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, num_key_value_heads=2)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True)),
}


def make_model(name: str = "qwen2", seed: int = 0) -> Any:
    kind, config = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config).eval()
        changed(model)
    return model


def changed(model: Any, size: float = 0.05) -> None:
    """Add noise to every weight, in place, as a stand-in for a training step."""
    for parameter in model.parameters():
        parameter.data += size * torch.randn_like(parameter)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def make_sampler(model: Any, **options: Any) -> VllmSampler:
    made = {"max_rows": 16, "max_context": CONTEXT, "deterministic": False, "kv_cache_memory_bytes": 1 << 26}
    return VllmSampler(model, **made | options)


def run(test: Any) -> Any:
    return asyncio.run(asyncio.wait_for(test, 120))


async def begun(sampler: VllmSampler, tokens: int = 3) -> None:
    """Wait until a completion has ``tokens`` tokens. Polls the scheduler, because vLLM sends no event for a token."""
    requests = sampler._worker._engine.engine_core.engine_core.scheduler.requests
    while not any(request.num_output_tokens >= tokens for request in list(requests.values())):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
