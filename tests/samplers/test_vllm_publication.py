"""`VllmSampler.publish`: vLLM samples with the published weights, and an incomplete update raises. Needs vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.protocols import SamplingParams
from gleanrl.utils.errors import UserError
from tests.samplers.conversations import VOCABULARY, assert_exact, converse, plain_logprobs

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed in this environment: make vllm", allow_module_level=True)

from gleanrl.samplers.vllm import VllmSampler, load_weights
from tests.samplers.vllm_engine import LONG, PROMPT, begun, changed, make_model, make_sampler, run, weights_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "tensor parallel"])
def inflight(model: Any, request: pytest.FixtureRequest) -> Iterator[VllmSampler]:
    sampler = make_sampler(model, inflight=True, tensor_parallel_size=request.param)
    yield sampler
    asyncio.run(sampler.close())


def test_in_flight_weights_load_between_two_tokens_and_later_log_probs_are_exact(inflight: VllmSampler) -> None:
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
            # The log-probs can only be exact if the KV cache was recomputed with the new weights.
            assert after[switched:].all()
            later = await session.sample(PROMPT, SamplingParams(5, ()))
            assert later.version == 3
            assert_exact(new, [[(PROMPT, SamplingParams(5, ()), later)]])

    run(test())


def test_cached_prefixes_of_older_weights_are_not_reused_after_a_publication() -> None:
    model, prompt = make_model(), np.arange(100, dtype=np.int32) % (VOCABULARY - 3) + 3

    async def test() -> None:
        sampler = make_sampler(model)
        for version in range(3):
            async with sampler.session(version) as session:
                # The second request reads the prompt from the prefix cache.
                for _ in range(2):
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


def test_publish_waits_for_open_sessions(model: Any) -> None:
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
def test_an_update_that_leaves_one_weight_unchanged_raises(monkeypatch: Any, missed: str) -> None:
    model = make_model()

    async def test() -> None:
        sampler = make_sampler(model)
        rpc = sampler._worker._engine.collective_rpc
        old = weights_of(model)[missed].clone()

        def lossy(method: Any, args: Any = ()) -> Any:
            if method is load_weights:
                args = (((name, old if name == missed else weight) for name, weight in args[0]),)
            return rpc(method, args=args)

        monkeypatch.setattr(sampler._worker._engine, "collective_rpc", lossy)
        # The weights have not changed yet, so that this incomplete update is not noticed.
        await sampler.publish(weights_of(model), 1)
        changed(model, 0.01)
        with pytest.raises(UserError, match="does not compute what the learner's weights compute") as refused:
            await sampler.publish(weights_of(model), 2)
        assert "\n" not in str(refused.value)
        assert sampler.version == 1
        await sampler.close()

    run(test())


MISSED = [None, "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]


@pytest.mark.parametrize("missed", MISSED)
def test_an_incomplete_update_of_a_bfloat16_engine_raises_however_small_the_change(
    monkeypatch: Any, missed: str | None
) -> None:
    """The update leaves out the weight ``missed``, or all weights if it is None.

    The change of the weights is far smaller than rounding errors, so that old values could not be told from new ones.
    The worker therefore sets all weights to NaN before an update.
    """
    model = make_model()

    async def test() -> None:
        sampler = make_sampler(model, dtype=torch.bfloat16)
        rpc = sampler._worker._engine.collective_rpc

        def lossy(method: Any, args: Any = ()) -> Any:
            if method is load_weights:
                args = (((name, weight) for name, weight in args[0] if missed not in (None, name)),)
            return rpc(method, args=args)

        changed(model, 1e-6)
        await sampler.publish(weights_of(model), 1)
        monkeypatch.setattr(sampler._worker._engine, "collective_rpc", lossy)
        changed(model, 1e-6)
        with pytest.raises(UserError, match="log-probs of a test prompt are off by nan"):
            await sampler.publish(weights_of(model), 2)
        await sampler.close()

    run(test())


def test_a_bfloat16_engine_accepts_40_small_updates() -> None:
    model = make_model()

    async def test() -> None:
        sampler = make_sampler(model, dtype=torch.bfloat16)
        for version in range(40):
            changed(model, 1e-3)
            await sampler.publish(weights_of(model), version)
        assert_exact(model, [await converse(sampler, 1)], tolerance=0.3)
        await sampler.close()

    run(test())


def test_reloading_weights_without_repacking_tied_embeddings_raises(monkeypatch: Any) -> None:
    """vLLM's reload does not update the packed copy of a tied output head. `pack_embeddings` makes the copy again."""
    monkeypatch.setattr("gleanrl.samplers.vllm.pack_embeddings", lambda worker: None)
    with pytest.raises(UserError, match="vLLM does not compute what the learner's weights compute"):
        make_sampler(make_model())


def test_weights_that_do_not_fit_raise_and_the_old_ones_stay(model: Any, inflight: VllmSampler) -> None:
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
