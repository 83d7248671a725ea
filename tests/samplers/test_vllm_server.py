"""`OpenAISampler` with a real vLLM server: sampling is exact, weights are updated in place, wrong options are rejected.

The server runs in its own Python environment; see `tests.rewards.test_vllm`.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gleanrl
from gleanrl.protocols import Completion, SamplingParams
from gleanrl.samplers.openai import OpenAISampler
from gleanrl.utils.errors import UserError
from tests.rewards.test_vllm import START_S, Server, command
from tests.samplers.conversations import assert_exact, converse, plain_logprobs, token_logprobs

CONTEXT = 4096
SOURCE = str(Path(gleanrl.__file__).parents[1])

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3 * START_S)]


class Updatable(Server):
    """A vLLM server that Glean RL can train with. It has the options that docs/howto/vllm.md recommends."""

    options = (
        "--served-model-name policy --enforce-eager --dtype float32 --max-model-len 4096 --block-size 32 "
        "--max-num-batched-tokens 4096 --no-enable-chunked-prefill "
        "--generation-config vllm --logprobs-mode processed_logprobs "
        "--worker-extension-cls gleanrl.samplers.vllm.WorkerExtension"
    )
    # PYTHONPATH makes the server import the worker extension from this checkout.
    environment: Mapping[str, str] = {**Server.environment, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": SOURCE}


class RawLogprobsServer(Updatable):
    options = Updatable.options.replace("processed_logprobs", "raw_logprobs")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a random model of 0.3 million parameters, saved in the folder that is its attribute ``folder``."""
    from gleanrl.config.settings import ModelSettings
    from gleanrl.learners.tiny import build_model, build_tokenizer

    tokenizer = build_tokenizer(["what a tokenizer is made of"], vocabulary=256)
    sizes = ModelSettings(hidden_size=128, layers=2, heads=4, kv_heads=2, max_context=CONTEXT)
    model = build_model(sizes, tokenizer, seed=0).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("policy")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.folder = folder
    return model


def serve(server: Server) -> Iterator[Server]:
    command()
    server.start()
    yield server
    if server.process.poll() is None:
        server.kill()


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Server]:
    yield from serve(Updatable(Path(model.folder)))


def make_sampler(server: Server, model: Any, **options: Any) -> OpenAISampler:
    made = {"max_rows": 16, "max_context": CONTEXT, "base_url": server.url, "served_model": "policy"}
    return OpenAISampler(model, **made | options)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def read_metric(server: Server, name: str) -> float:
    """Return the sum of a Prometheus metric of the server over all its labels."""
    with urllib.request.urlopen(f"{server.url.removesuffix('/v1')}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def test_log_probs_are_exact_after_every_publication(server: Server, model: Any) -> None:
    async def test() -> dict[str, float]:
        sampler = make_sampler(server, model, update="vllm")
        for version in range(3):
            await sampler.publish(weights_of(model), version)
            records = await asyncio.gather(*(converse(sampler, seed) for seed in range(8)))
            assert_exact(model, records)
            for parameter in model.parameters():
                parameter.data += 0.05 * torch.randn_like(parameter)
        stats = sampler.stats()
        await sampler.close()
        return stats

    before = weights_of(model)
    asyncio.run(test())
    model.load_state_dict(before, strict=False)


def test_in_flight_weights_load_between_two_tokens_of_a_completion(server: Server, model: Any) -> None:
    prompt, long, old = np.array([5, 6, 7], np.int32), SamplingParams(4000, ()), weights_of(model)

    async def attempt(sampler: Any, version: int) -> Completion | None:
        """Publish during a completion and return it; None if the last token was sampled before the publication."""
        model.load_state_dict(old, strict=False)
        await sampler.publish(weights_of(model), version)
        async with sampler.session(0) as session:
            said = read_metric(server, "generation_tokens_total")
            answer = asyncio.create_task(session.sample(prompt, long))
            # The server sends no event when it has sampled a token, so its metric is polled.
            while read_metric(server, "generation_tokens_total") < said + 5:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            for parameter in model.parameters():
                parameter.data += 0.05 * torch.randn_like(parameter)
            await sampler.publish(weights_of(model), version + 1)
            late = answer.done()
            completion = await answer
            assert completion.version == version
            return None if late else completion

    async def test() -> None:
        sampler = make_sampler(server, model, update="vllm", inflight=True)
        completion = None
        for version in range(0, 10, 2):
            completion = completion or await attempt(sampler, version)
        assert completion is not None
        after = np.abs(completion.logprobs - plain_logprobs(model, prompt, long, completion)) < 1e-4
        model.load_state_dict(old, strict=False)
        before = np.abs(completion.logprobs - plain_logprobs(model, prompt, long, completion)) < 1e-4
        switched = int(np.argmin(before))
        assert 0 < switched < 4000
        assert before[:switched].all()
        # The log-probs can only be exact if the KV cache was recomputed with the new weights.
        assert after[switched:].all()
        await sampler.close()

    try:
        asyncio.run(test())
    finally:
        model.load_state_dict(old, strict=False)


def test_prompt_log_probs_are_those_of_the_published_weights_at_temperature_1(server: Server, model: Any) -> None:
    """vLLM computes prompt log-probs at temperature 1, whatever temperature the request has."""

    async def test() -> None:
        sampler = make_sampler(server, model, update="vllm")
        for version in range(2):
            await sampler.publish(weights_of(model), version)
            said = await sampler._ask(sampler._canary.prompt, 1, 0.7, 0, (), prompt_logprobs=0)
            expected = token_logprobs(model, np.array(sampler._canary.prompt, np.int32))
            np.testing.assert_allclose(said.prompt or [], expected, atol=1e-4)
            for parameter in model.parameters():
                parameter.data += 0.05 * torch.randn_like(parameter)
        await sampler.close()

    before = weights_of(model)
    asyncio.run(test())
    model.load_state_dict(before, strict=False)


def test_cancelling_a_request_also_aborts_it_on_the_server(server: Server, model: Any) -> None:
    async def test() -> None:
        sampler = make_sampler(server, model, update="vllm")
        await sampler.publish(weights_of(model), 0)
        async with sampler.session(0) as session:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.sample(np.array([5], np.int32), SamplingParams(4000, ())), 0.5)
            # The whole completion would take several seconds.
            await asyncio.sleep(0.5)
            assert read_metric(server, "num_requests_running") == 0
            await session.sample(np.array([5], np.int32), SamplingParams(1, ()))
        await sampler.close()

    asyncio.run(test())


def test_a_server_that_returns_raw_log_probs_is_rejected(server: Server, model: Any) -> None:
    # Only one server runs at a time.
    server.kill()
    for plain in serve(RawLogprobsServer(Path(model.folder))):
        sampler = make_sampler(plain, model)
        with pytest.raises(UserError, match="start vLLM with --logprobs-mode processed_logprobs"):
            asyncio.run(converse(sampler, 0))
