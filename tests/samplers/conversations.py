"""Random conversations for tests of samplers, and the log-probs of a plain forward pass to compare theirs with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from gleanrl.protocols import Completion, SamplingParams
from gleanrl.samplers.transformers import TransformersSampler
from gleanrl.types import IntArray

VOCABULARY, STOP, CONTEXT = 61, 1, 160
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "bos_token_id": 2,
    "eos_token_id": STOP,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "qwen2": Qwen2Config(**_SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "llama": LlamaConfig(**_SIZES, num_key_value_heads=1, attention_bias=True),
    "llama3 rope": LlamaConfig(
        **_SIZES,
        num_key_value_heads=4,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 40,
        },
    ),
    "qwen3": Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=16),
    "mistral": MistralConfig(**_SIZES, num_key_value_heads=2, sliding_window=None),
    "gpt neox": GPTNeoXConfig(**_SIZES),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.2,
        bos_token_id=2,
        eos_token_id=STOP,
    ),
}


def make_model(name: str = "qwen2", seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
        # Biases start as zeros and norm weights as ones. Noise makes sure that an error in using them has an effect.
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        return model


def make_sampler(model: Any, **options: Any) -> TransformersSampler:
    return TransformersSampler(model, **{"max_rows": 64, "max_context": CONTEXT, **options})


Record = list[tuple[IntArray, SamplingParams, Completion]]


async def converse(sampler: Any, seed: int, *, turns: int = 5, diverge: float = 0.3, delay: float = 0.0) -> Record:
    """Sample ``turns`` completions in one session, and return the prompts, parameters and completions.

    Most prompts extend the previous prompt and its completion. With probability ``diverge``, a prompt is first cut and
    sometimes changed at one token. ``delay`` is the longest pause before a request, in seconds.
    """
    random, pauses = np.random.default_rng(seed), np.random.default_rng()
    record: Record = []
    async with sampler.session(seed) as session:
        prompt = random.integers(3, VOCABULARY, int(random.integers(1, 9))).astype(np.int32)
        for _ in range(turns):
            params = SamplingParams(int(random.integers(1, 6)), (STOP,), float(random.choice([0.0, 0.7, 1.0, 1.5])))
            await asyncio.sleep(pauses.random() * delay)
            completion = await session.sample(prompt, params)
            record.append((prompt, params, completion))
            prompt = np.concatenate([prompt, completion.tokens])
            if random.random() < diverge:
                prompt = prompt[: int(random.integers(1, prompt.size + 1))].copy()
                if random.random() < 0.5:
                    prompt[int(random.integers(prompt.size))] = random.integers(3, VOCABULARY)
            if random.random() < 0.9:
                more = random.integers(3, VOCABULARY, int(random.integers(1, 9))).astype(np.int32)
                prompt = np.concatenate([prompt, more])
    return record


def plain_logprobs(model: Any, prompt: IntArray, params: SamplingParams, completion: Completion) -> np.ndarray:
    """Return the float32 log-probs of the completion's tokens from one full forward pass without a KV cache."""
    tokens = torch.tensor(np.concatenate([prompt, completion.tokens])).long()
    with torch.inference_mode():
        logits = model(tokens[None], use_cache=False).logits[0, prompt.size - 1 : -1].float()
    scaled = logits / (params.temperature or 1.0)
    return scaled.log_softmax(-1).gather(-1, tokens[prompt.size :, None])[:, 0].numpy()


def token_logprobs(model: Any, tokens: IntArray) -> list[float]:
    """Return the log-probs of all tokens but the first, at temperature 1. The model computes in its own dtype."""
    ids = torch.tensor(tokens).long()
    with torch.inference_mode():
        logprobs = model(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[1:, None])[:, 0].tolist()


def assert_exact(model: Any, records: Sequence[Record], tolerance: float = 1e-4) -> None:
    for record in records:
        for prompt, params, completion in record:
            np.testing.assert_allclose(
                completion.logprobs, plain_logprobs(model, prompt, params, completion), atol=tolerance, rtol=0
            )


def flatten(records: Sequence[Record]) -> list[bytes]:
    """Return the bytes of all sampled tokens and log-probs, for bitwise comparison of two runs."""
    return [part.tobytes() for record in records for _, _, c in record for part in (c.tokens, c.logprobs)]


def tokens_of(records: Sequence[Record]) -> list[bytes]:
    return [completion.tokens.tobytes() for record in records for _, _, completion in record]
