"""vLLM inside this process: exact tokens and log-probs, and no publication that is only said to have arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gleanrl.errors import UserError
from gleanrl.protocols import SamplingParams
from tests.samplers.conversations import CONTEXT, STOP, VOCABULARY, assert_exact, converse, flatten, plain_logprobs

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed in this environment: make vllm", allow_module_level=True)

from gleanrl.samplers.vllm import VllmSampler, VllmWorker, engine_arguments

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

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
    """As a training step would change it: every weight."""
    for parameter in model.parameters():
        parameter.data += size * torch.randn_like(parameter)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def make_sampler(model: Any, **options: Any) -> VllmSampler:
    made = {"max_rows": 16, "max_context": CONTEXT, "deterministic": False, "kv_cache_memory_bytes": 1 << 26}
    return VllmSampler(model, **made | options)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def inflight(model: Any) -> Iterator[VllmSampler]:
    sampler = make_sampler(model, inflight=True)
    yield sampler
    asyncio.run(sampler.close())


def run(test: Any) -> Any:
    return asyncio.run(asyncio.wait_for(test, 120))


async def begun(sampler: VllmSampler, tokens: int = 3) -> None:
    """Until an answer has some tokens. Nothing is told in between, so the engine is asked."""
    requests = sampler._worker._engine.engine_core.engine_core.scheduler.requests
    while not any(request.num_output_tokens >= tokens for request in list(requests.values())):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


# --- exactness ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_conversations_are_exact_and_stay_so_after_every_publication(name: str) -> None:
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
    """What Hugging Face answers at temperature 0, by full passes."""
    tokens = prompt.tolist()
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[prompt.size :]


def test_answers_follow_the_models_distribution(model: Any, inflight: VllmSampler) -> None:
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


def test_more_prompts_than_are_computed_at_once(model: Any) -> None:
    """On a CPU vLLM fails where a seeded request is prefilled in parts."""

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


def test_timing_changes_no_bit(model: Any) -> None:
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


def test_the_prefix_of_a_conversation_is_computed_once(model: Any) -> None:
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
    assert stats["reused_tokens"] == 64 + 64  # whole blocks of 32 tokens
    assert stats["sampled_tokens"] == 24
    assert stats["prefill_s"] > 0
    assert stats["decode_s"] > 0


# --- publication ----------------------------------------------------------------------------------
def test_in_flight_weights_come_between_two_tokens_and_the_rest_is_exact(inflight: VllmSampler) -> None:
    old, new = make_model(), make_model(seed=1)

    async def test() -> None:
        await inflight.publish(weights_of(old), 0)
        async with inflight.session(0) as session:
            answer = asyncio.create_task(session.sample(PROMPT, LONG))
            await begun(inflight)
            await inflight.publish(weights_of(new), 3)
            assert not answer.done()
            completion = await answer
            assert completion.version == 0
            assert completion.tokens.size == 100
            before = np.abs(completion.logprobs - plain_logprobs(old, PROMPT, LONG, completion)) < 1e-4
            after = np.abs(completion.logprobs - plain_logprobs(new, PROMPT, LONG, completion)) < 1e-4
            switched = int(np.argmin(before))
            assert switched >= 3
            assert before[:switched].all()
            assert after[switched:].all()  # the context of the old weights was computed again
            later = await session.sample(PROMPT, SamplingParams(5, ()))
            assert later.version == 3
            assert_exact(new, [[(PROMPT, SamplingParams(5, ()), later)]])

    run(test())


def test_no_prefix_of_older_weights_is_used() -> None:
    model, prompt = make_model(), np.arange(100, dtype=np.int32) % (VOCABULARY - 3) + 3

    async def test() -> None:
        sampler = make_sampler(model)
        for version in range(3):
            async with sampler.session(version) as session:
                for _ in range(2):  # the second time from the cache
                    completion = await session.sample(prompt, SamplingParams(5, ()))
                    assert_exact(model, [[(prompt, SamplingParams(5, ()), completion)]])
            assert sampler.stats()["reused_tokens"] == 96 * (version + 1)
            changed(model)
            await sampler.publish(weights_of(model), version + 1)
        sampler._worker._engine.reset_prefix_cache = lambda **_: False
        with pytest.raises(UserError, match="kept prefixes that older weights computed"):
            await sampler.publish(weights_of(model), 9)
        await sampler.close()

    run(test())


def test_publishing_waits_for_open_sessions_unless_in_flight(model: Any) -> None:
    async def test() -> None:
        sampler = make_sampler(model)
        async with sampler.session(0) as session:
            publication = asyncio.create_task(sampler.publish(weights_of(model), 1))
            assert (await session.sample(PROMPT, LONG)).version == 0
            assert not publication.done()
        await publication
        assert sampler.version == 1
        await sampler.close()

    run(test())


@pytest.mark.parametrize("missed", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_an_update_that_misses_one_weight_stops_the_run(monkeypatch: Any, missed: str) -> None:
    model = make_model()

    async def test() -> None:
        sampler = make_sampler(model)
        rpc = sampler._worker._engine.collective_rpc
        old = weights_of(model)[missed].clone()

        def lossy(method: Any, kwargs: Any = None, **rest: Any) -> Any:
            if method == "reload_weights":
                kwargs = {"weights_iterator": ((k, old if k == missed else v) for k, v in kwargs["weights_iterator"])}
            return rpc(method, kwargs=kwargs, **rest)

        monkeypatch.setattr(sampler._worker._engine, "collective_rpc", lossy)
        await sampler.publish(weights_of(model), 1)  # nothing has changed yet
        changed(model, 0.01)
        with pytest.raises(UserError, match="does not compute what the learner's weights compute") as refused:
            await sampler.publish(weights_of(model), 2)
        assert "\n" not in str(refused.value)
        assert sampler.version == 1
        await sampler.close()

    run(test())


def test_what_vllm_calls_a_reload_alone_is_found_out(monkeypatch: Any) -> None:
    """The packed copy of a tied output head stays behind; `_pack_embeddings` is what renews it."""
    monkeypatch.setattr("gleanrl.samplers.vllm._pack_embeddings", lambda worker: None)
    with pytest.raises(UserError, match="vLLM does not compute what the learner's weights compute"):
        make_sampler(make_model())


def test_weights_that_do_not_fit_leave_the_old_ones_in_place(model: Any, inflight: VllmSampler) -> None:
    async def test() -> None:
        weights = weights_of(model)
        await inflight.publish(weights, 0)
        for wrong, why in (
            ({k: v * 0 for k, v in weights.items() if k != "model.norm.weight"}, r"lack 'model.norm.weight'"),
            ({**weights, "model.norm.weight": torch.zeros(3)}, r"has shape \(3,\), not \(64,\)"),
            ({**weights, "model.other": torch.zeros(3)}, r"'model.other' is none of the model's"),
        ):
            with pytest.raises(ValueError, match=why):
                await inflight.publish(wrong, 1)
        assert inflight.version == 0
        assert_exact(model, [await converse(inflight, 1)])

    run(test())


# --- what goes wrong ------------------------------------------------------------------------------
def test_a_cancelled_episode_is_aborted_at_any_moment(model: Any) -> None:
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


def test_nothing_more_is_sampled_for_an_answer_that_was_given_up(model: Any) -> None:
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


def test_a_failing_step_fails_everybody_who_waits_and_then_works_again(model: Any) -> None:
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


def test_two_samplers_work_side_by_side_with_weights_of_their_own() -> None:
    """As training's and evaluation's do."""
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


def test_mistakes_get_one_line(model: Any) -> None:
    for options, why in (
        ({"max_model_len": 5}, "max_model_len of vLLM follows from the run's other settings"),
        ({"enable_prefix_cachin": True}, "no engine argument 'enable_prefix_cachin'; did you mean"),
        ({"enable_sleep_mode": True}, "vLLM cannot sleep on a CPU"),
    ):
        with pytest.raises(UserError, match=why):
            engine_arguments(options, 4, CONTEXT, torch.float32, cpu=True)


def test_a_model_that_vllm_does_not_know_is_refused_in_one_line(model: Any) -> None:
    class Strange(type(model)):
        pass

    strange = Strange(model.config)
    with pytest.raises(UserError, match="vLLM cannot serve a Strange") as refused:
        make_sampler(strange)
    assert "\n" not in str(refused.value)


def test_sleep_is_refused_where_it_was_not_asked_for(inflight: VllmSampler) -> None:
    with pytest.raises(UserError, match="enable_sleep_mode"):
        run(inflight.sleep())


def test_sleep_waits_for_sessions_and_waking_lets_them_in(model: Any, monkeypatch: Any) -> None:
    """What the engine does then needs a GPU; who may go on, and when, does not."""
    told: list[str] = []
    monkeypatch.setattr(VllmWorker, "sleep", lambda self, level: told.append(f"sleep {level}"))
    monkeypatch.setattr(VllmWorker, "wake", lambda self: told.append("wake"))

    async def test() -> None:
        sampler = make_sampler(model)
        sampler._sleeps = True
        async with sampler.session(0) as session:
            falling = asyncio.create_task(sampler.sleep(2))
            await session.sample(PROMPT, SamplingParams(3, ()))
            assert told == []
        await falling
        assert told == ["sleep 2"]
        later = asyncio.create_task(converse(sampler, 1))
        await asyncio.sleep(0.05)
        assert not later.done()
        await sampler.publish(weights_of(model), 1)  # wakes it
        assert_exact(model, [await later])
        assert told == ["sleep 2", "wake"]
        await sampler.close()

    run(test())
