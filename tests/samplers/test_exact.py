"""The log-probs of `TransformersSampler` equal those of a full forward pass of the model.

This is tested for all supported architectures, both engines, and random conversations that share KV caches and batches.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2ForCausalLM,
)

from gleanrl.protocols import SamplingParams
from gleanrl.samplers.engines import CannotServe, FusedEngine, ModuleEngine, choose_engine, probe
from gleanrl.samplers.kv_cache import Feed, KeyValueStore
from gleanrl.utils.errors import UserError
from tests.samplers.conversations import (
    CONFIGS,
    CONTEXT,
    STOP,
    VOCABULARY,
    assert_exact,
    converse,
    make_model,
    make_sampler,
    tokens_of,
)
from tests.strategies import examples

FUSED = ("qwen2", "llama", "llama3 rope", "qwen3", "mistral")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("deterministic", [True, False])
def test_log_probs_of_conversations_are_exact_for_every_architecture(name: str, deterministic: bool) -> None:
    model = make_model(name)

    async def run():
        sampler = make_sampler(model, deterministic=deterministic, max_rows=4, prefill_tokens=16)
        records = await asyncio.gather(*(converse(sampler, seed) for seed in range(12)))
        stats = sampler.stats()
        await sampler.close()
        return records, stats

    records, stats = asyncio.run(run())
    assert_exact(model, records)
    turns = [turn for record in records for turn in record]
    assert stats["sampled_tokens"] == sum(c.tokens.size for _, _, c in turns)
    assert stats["prompt_tokens"] == sum(prompt.size for prompt, _, _ in turns)
    assert 0 < stats["prefill_tokens"] < 0.7 * stats["prompt_tokens"]


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(0, 2**62), min_size=1, max_size=7, unique=True),
    st.integers(1, 4),
    st.sampled_from([3, 64]),
    st.booleans(),
)
def test_concurrent_sessions_are_exact_and_sample_the_same_tokens_as_alone(seeds, rows, prefill, deterministic) -> None:
    model = make_model()

    async def together():
        sampler = make_sampler(model, max_rows=rows, prefill_tokens=prefill, deterministic=deterministic)
        return await asyncio.gather(*(converse(sampler, seed, delay=0.002) for seed in seeds))

    async def alone():
        sampler = make_sampler(model)
        return [await converse(sampler, seed) for seed in seeds]

    records = asyncio.run(together())
    assert_exact(model, records)
    # Batching changes the rounding of probabilities. A drawn token could only differ if the rounding moved a boundary
    # of the cumulative distribution across the session's random number, which is too rare to occur in this test.
    assert tokens_of(records) == tokens_of(asyncio.run(alone()))


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_engine_computes_the_same_logits_as_the_models_modules(name: str) -> None:
    model = make_model(name)
    engines = [build(model, CONTEXT, torch.float32) for build in (FusedEngine, ModuleEngine)]
    assert isinstance(choose_engine(model, CONTEXT, torch.float32), FusedEngine)
    random = np.random.default_rng(0)
    stores, lengths = [KeyValueStore(), KeyValueStore()], np.zeros(6, int)
    for _ in range(8):
        rows = sorted(random.choice(6, int(random.integers(1, 7)), replace=False).tolist())
        pieces = [random.integers(VOCABULARY, size=int(random.integers(1, 7))).astype(np.int32) for _ in rows]
        starts = [int(lengths[row]) for row in rows]
        answers = []
        for engine, store in zip(engines, stores, strict=True):
            feed = Feed(rows, starts, pieces, engine.device)
            store.reserve(max(rows) + 1, feed.extent)
            with torch.inference_mode():
                answers.append(engine.logits(feed, store))
        torch.testing.assert_close(answers[0], answers[1], atol=2e-5, rtol=1e-5)
        for row, piece in zip(rows, pieces, strict=True):
            lengths[row] += piece.size


def test_attention_is_the_same_however_the_rows_of_a_feed_are_split_into_grids() -> None:
    random = np.random.default_rng(0)
    sizes = []
    for _ in range(20):
        rows = sorted(random.choice(12, 6, replace=False).tolist())
        starts = random.integers(0, 40, 6).tolist()
        tokens = [np.zeros(int(random.choice([1, 1, 5, 9])), np.int32) for _ in rows]
        feed = Feed(rows, starts, tokens, torch.device("cpu"))
        store = KeyValueStore()
        store.reserve(12, feed.extent)
        buffers = store.append(0, feed, *torch.zeros(2, feed.tokens.shape[0], 2, 4))
        for buffer in buffers:
            buffer.normal_()
        queries = torch.randn(feed.tokens.shape[0], 2, 4)
        for last, asked in ((False, queries), (True, queries[feed.last])):
            results = []
            for grids in ([feed.grid], *(feed.grids(waste, last=last) for waste in (0, 60, 10**9))):
                result = torch.full_like(queries, torch.nan)
                for grid in grids:
                    keys, values = map(grid.select, buffers)
                    some = queries if grids[0] is feed.grid else asked
                    arranged = grid.arrange(some[grid.tokens]).transpose(1, 2)
                    attended = F.scaled_dot_product_attention(arranged, keys, values, attn_mask=grid.mask[:, None])
                    result[grid.tokens] = grid.pack(attended.transpose(1, 2))
                results.append(result[feed.last] if last and grids[0] is feed.grid else result[: asked.shape[0]])
                sizes.append(len(grids))
            for result in results[1:]:
                torch.testing.assert_close(result, results[0])
    assert len(set(sizes)) > 2


def test_a_prompt_shared_by_several_sessions_is_prefilled_once_and_stays_exact() -> None:
    model, params = make_model(), SamplingParams(6, (STOP,))
    opening = np.random.default_rng(0).integers(3, VOCABULARY, 40).astype(np.int32)

    async def episode(sampler, seed: int):
        record, prompt = [], opening
        async with sampler.session(seed) as session:
            for _ in range(3):
                completion = await session.sample(prompt, params)
                record.append((prompt, params, completion))
                prompt = np.concatenate([prompt, completion.tokens, np.array([3 + seed], np.int32)])
        return record

    async def run():
        sampler = make_sampler(model, prefill_tokens=16)
        first = [record[:1] for record in await asyncio.gather(*(episode(sampler, seed) for seed in range(8)))]
        stats = sampler.stats()
        return first, stats, await asyncio.gather(*(episode(sampler, seed) for seed in range(8)))

    first, stats, records = asyncio.run(run())
    assert_exact(model, [*first, *records])
    assert len(set(tokens_of(first))) > 1
    assert stats["prefill_tokens"] < 40 + 8 * 2 * 8 < 8 * 40


def test_greedy_completions_equal_those_of_generate() -> None:
    model = make_model("llama")
    prompts = [np.random.default_rng(i).integers(3, VOCABULARY, 4 + i).astype(np.int32) for i in range(8)]

    async def run():
        sampler = make_sampler(model)

        async def one(prompt):
            async with sampler.session(0) as session:
                return await session.sample(prompt, SamplingParams(20, (STOP,), 0.0))

        return await asyncio.gather(*map(one, prompts))

    for prompt, completion in zip(prompts, asyncio.run(run()), strict=True):
        ids = torch.tensor(prompt).long()[None]
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=STOP
        )[0, prompt.size :]
        assert completion.tokens.tolist() == expected.tolist()
        assert completion.finish == ("stop" if expected[-1] == STOP else "length")


def test_bfloat16_log_probs_are_within_half_a_nat_of_float32() -> None:
    model = make_model()

    async def run():
        sampler = make_sampler(model, dtype=torch.bfloat16)
        return await asyncio.gather(*(converse(sampler, seed) for seed in range(4)))

    assert_exact(model, asyncio.run(run()), tolerance=0.5)


@pytest.mark.parametrize("build", [FusedEngine, ModuleEngine])
def test_bfloat16_keeps_the_positions_of_long_sequences(build: type) -> None:
    """Frequencies of rotary positions that are rounded to bfloat16 give an error of 0.15."""
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.2}
    config = LlamaConfig(
        **sizes, vocab_size=VOCABULARY, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=4096
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    prompt = np.random.default_rng(0).integers(3, VOCABULARY, 1200).astype(np.int32)
    engine, store = build(model, 4096, torch.bfloat16), KeyValueStore()
    feed = Feed([0], [0], [prompt], engine.device)
    store.reserve(1, feed.extent)
    with torch.inference_mode():
        wanted = model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1]
        error = (engine.logits(feed, store)[0] - wanted).square().mean().sqrt() / wanted.std()
    assert error < 0.1


def test_probe_raises_if_the_engine_has_a_wrong_weight() -> None:
    model = make_model()
    engine = FusedEngine(model, CONTEXT, torch.float32)
    probe(engine, model, torch.float32)
    weights = dict(model.named_parameters())
    name = "model.layers.1.self_attn.q_proj.weight"
    engine.load({**weights, name: -weights[name]})
    with pytest.raises(CannotServe, match="differs from its full pass"):
        probe(engine, model, torch.float32)


def test_models_and_contexts_that_cannot_be_served_exactly_raise() -> None:
    with pytest.raises(UserError, match="cannot serve a BloomForCausalLM exactly"):
        make_sampler(BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)))
    windowed = MistralForCausalLM(
        MistralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, sliding_window=8, max_position_embeddings=64,
        )
    )  # fmt: skip
    with pytest.raises(UserError, match="window is 8 tokens"):
        make_sampler(windowed, max_context=9)
    make_sampler(windowed, max_context=8)
    with pytest.raises(UserError, match=f"longer than the model's {CONTEXT} positions"):
        make_sampler(make_model(), max_context=CONTEXT + 1)


def test_training_the_model_does_not_change_the_weights_of_the_sampler() -> None:
    model = make_model()
    model.train()
    sampler = make_sampler(model)
    assert model.training
    original = Qwen2ForCausalLM(model.config)
    original.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_exact(original.eval(), [asyncio.run(converse(sampler, 0))])
