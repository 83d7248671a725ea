"""`VllmSampler` with ``enable_lora``: publications send only adapters, which vLLM applies. Needs vLLM and peft."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.config.settings import LearnerSettings
from gleanrl.learners.models import adapter_weights, add_adapters, merged_weights
from gleanrl.protocols import SamplingParams
from gleanrl.utils.errors import UserError
from gleanrl.utils.weights import AdaptedWeights
from tests.samplers.conversations import VOCABULARY, assert_exact, converse, plain_logprobs

if find_spec("vllm") is None or find_spec("peft") is None:
    pytest.skip("vLLM or peft is not installed in this environment: make vllm", allow_module_level=True)

import vllm.lora.model_manager

from gleanrl.samplers.vllm import VllmSampler
from tests.samplers.vllm_engine import LONG, PROMPT, begun, make_model, make_sampler, run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
RANK = 5
GREEDY = SamplingParams(12, (), 0.0)


class Policy:
    """A model with adapters, whose values are drawn at random as a stand-in for training."""

    def __init__(self) -> None:
        self.adapted = add_adapters(copy.deepcopy(make_model()), LearnerSettings(lora_rank=RANK, lora_alpha=7), 0)
        self.base = merged_weights(self.adapted, merge=False)
        self.merged = make_model()
        self.random = torch.Generator().manual_seed(1)

    def train(self, size: float = 0.1) -> AdaptedWeights:
        """Change the adapters, and return the weights to publish."""
        for name, parameter in self.adapted.named_parameters():
            if "lora_" in name:
                parameter.data = size * torch.randn(parameter.shape, generator=self.random)
        self.merged.load_state_dict(merged_weights(self.adapted), strict=False)
        return AdaptedWeights(self.base, adapter_weights(self.adapted), 7 / RANK)


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "tensor parallel"])
def sampler(request: pytest.FixtureRequest) -> Iterator[VllmSampler]:
    made = make_sampler(
        make_model(), inflight=True, tensor_parallel_size=request.param, lora_rank=RANK, enable_lora=True
    )
    yield made
    asyncio.run(made.close())


def test_published_adapters_answer_as_the_merged_weights_do_and_the_base_is_sent_once(
    sampler: VllmSampler, monkeypatch: Any
) -> None:
    policy = Policy()
    sent: list[int] = []
    for name in ("load_weights", "write_published"):  # in this process, and to the workers
        original = getattr(__import__("gleanrl.samplers.vllm", fromlist=[name]), name)

        def counted(first: Any, tensors: Any, *rest: Any, original: Any = original) -> Any:
            tensors = dict(tensors)
            sent.append(sum(tensor.nbytes for tensor in tensors.values()))
            return original(first, tensors if rest else tensors.items(), *rest)

        monkeypatch.setattr(f"gleanrl.samplers.vllm.{name}", counted)

    async def test() -> None:
        prompts = [np.random.default_rng(seed).integers(3, VOCABULARY, 9).astype(np.int32) for seed in range(20)]
        for version in range(3):
            weights = policy.train()
            await sampler.publish(weights, version)
            for prompt in prompts:
                async with sampler.session(0) as session:
                    completion = await session.sample(prompt, GREEDY)
                tokens = policy.merged.generate(
                    torch.tensor(prompt).long()[None], do_sample=False, max_new_tokens=12, eos_token_id=None
                )
                assert completion.tokens.tolist() == tokens[0, prompt.size :].tolist()
                expected = plain_logprobs(policy.merged, prompt, GREEDY, completion)
                np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
            assert_exact(policy.merged, [await converse(sampler, version)])
        whole, adapters = (sum(tensor.nbytes for tensor in sent.values()) for sent in (weights.base, weights.adapters))
        assert sent == [whole, adapters, adapters, adapters]
        assert adapters < whole / 2

    run(test())


def test_in_flight_adapters_load_between_two_tokens_and_later_log_probs_are_exact(sampler: VllmSampler) -> None:
    policy = Policy()

    async def test() -> None:
        await sampler.publish(policy.train(), 0)
        old = copy.deepcopy(policy.merged)
        async with sampler.session(0) as session, sampler.session(1) as second:
            answer = asyncio.create_task(session.sample(PROMPT, LONG))
            other = asyncio.create_task(second.sample(PROMPT, LONG))
            await begun(sampler)
            await sampler.publish(policy.train(), 3)
            assert not answer.done()
            assert not other.done()
            completion, _ = await asyncio.gather(answer, other)
        assert completion.version == 0
        before = np.abs(completion.logprobs - plain_logprobs(old, PROMPT, LONG, completion)) < 1e-4
        after = np.abs(completion.logprobs - plain_logprobs(policy.merged, PROMPT, LONG, completion)) < 1e-4
        switched = int(np.argmin(before))
        assert switched >= 3
        assert before[:switched].all()
        assert after[switched:].all()

    run(test())


def test_whole_weights_after_adapters_replace_both(sampler: VllmSampler) -> None:
    policy, other = Policy(), make_model(seed=3)

    async def test() -> None:
        await sampler.publish(policy.train(), 0)
        await sampler.publish(dict(other.named_parameters()), 1)
        assert_exact(other, [await converse(sampler, 1)])
        await sampler.publish(policy.train(), 2)
        assert_exact(policy.merged, [await converse(sampler, 2)])

    run(test())


@pytest.mark.parametrize("fault", ["not loaded", "old ones stay", "not requested", "one is missing"])
def test_adapters_that_are_not_applied_raise(monkeypatch: Any, fault: str) -> None:
    policy = Policy()
    # Adapters that are not loaded are found in half precision too, and even if they are those that the engine had.
    dtype = torch.bfloat16 if fault == "not loaded" else torch.float32

    async def test() -> None:
        sampler = make_sampler(make_model(), lora_rank=RANK, enable_lora=True, dtype=dtype)
        first = policy.train()
        await sampler.publish(first, 1)
        engine = sampler._worker._engine
        if fault == "not loaded":
            monkeypatch.setattr(engine, "add_lora", lambda request: True)
        elif fault == "old ones stay":
            monkeypatch.setattr(engine, "add_lora", lambda request: True)
            monkeypatch.setattr("gleanrl.samplers.vllm.forget_adapters", lambda worker: None)
        elif fault == "not requested":
            add = engine.add_request
            monkeypatch.setattr(engine, "add_request", lambda *given, lora_request: add(*given))
        else:
            write = __import__("gleanrl.samplers.vllm", fromlist=["write_adapters"]).write_adapters

            def lossy(folder: Any, weights: AdaptedWeights, *rest: Any) -> None:
                kept = {name: each for name, each in weights.adapters.items() if "layers.1.mlp.down_proj" not in name}
                write(folder, AdaptedWeights(weights.base, kept, weights.scale), *rest)

            monkeypatch.setattr("gleanrl.samplers.vllm.write_adapters", lossy)
        with pytest.raises(UserError, match="does not compute what the learner's weights compute"):
            await sampler.publish(first if fault == "not loaded" else policy.train(), 2)
        assert sampler.version == 1
        await sampler.close()

    run(test())


def test_adapters_that_vllm_cannot_apply_are_refused_before_the_engine_starts(monkeypatch: Any) -> None:
    monkeypatch.setattr("gleanrl.samplers.vllm._make_engine", None)
    for options, why in (
        ({"enable_lora": True}, r"set learner\.lora_rank"),
        ({"enable_lora": True, "lora_rank": 513}, r"sampler\.options\.enable_lora = false"),
        ({"enable_lora": True, "lora_rank": 8, "max_lora_rank": 16}, "max_lora_rank"),
    ):
        with pytest.raises(UserError, match=why):
            make_sampler(make_model(), **options)


def test_targets_that_vllm_cannot_adapt_are_refused_when_the_sampler_is_made(monkeypatch: Any) -> None:
    """As in a model with a layer that vLLM has no adapters for."""
    original = vllm.lora.model_manager.get_supported_lora_modules
    monkeypatch.setattr(
        vllm.lora.model_manager, "get_supported_lora_modules", lambda m: [n for n in original(m) if n != "down_proj"]
    )
    lora = {"lora_rank": RANK, "enable_lora": True}
    with pytest.raises(UserError, match=r"learner\.lora_targets.*down_proj") as refused:
        make_sampler(make_model(), **lora)
    assert "\n" not in str(refused.value)
    sampler = make_sampler(make_model(), **lora, lora_targets="q_proj, o_proj")
    asyncio.run(sampler.close())
