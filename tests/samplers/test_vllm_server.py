"""A real vLLM server as sampler, in an environment of its own: exact, updated in place, refused where it is not."""

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
    """A server that Glean RL can train with: the options that docs/howto/vllm.md gives."""

    options = (
        "--served-model-name policy --enforce-eager --dtype float32 --max-model-len 4096 --block-size 32 "
        "--max-num-batched-tokens 4096 --no-enable-chunked-prefill "
        "--generation-config vllm --logprobs-mode processed_logprobs "
        "--worker-extension-cls gleanrl.samplers.vllm.WorkerExtension"
    )
    # the extension is this checkout's, whatever else is installed beside vLLM
    environment: Mapping[str, str] = {**Server.environment, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": SOURCE}


class Plain(Updatable):
    options = Updatable.options.replace("processed_logprobs", "raw_logprobs")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random model of 0.3 M parameters; ``folder`` is where it was saved."""
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


def total(server: Server, name: str) -> float:
    """A metric, as the server says itself."""
    with urllib.request.urlopen(f"{server.url.removesuffix('/v1')}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def test_conversations_are_exact_after_every_publication(server: Server, model: Any) -> None:
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


def test_weights_come_between_two_tokens_of_an_answer(server: Server, model: Any) -> None:
    prompt, long, old = np.array([5, 6, 7], np.int32), SamplingParams(4000, ()), weights_of(model)

    async def attempt(sampler: Any, version: int) -> Completion | None:
        """None where a busy machine published only after the last token."""
        model.load_state_dict(old, strict=False)
        await sampler.publish(weights_of(model), version)
        async with sampler.session(0) as session:
            said = total(server, "generation_tokens_total")
            answer = asyncio.create_task(session.sample(prompt, long))
            while total(server, "generation_tokens_total") < said + 5:  # noqa: ASYNC110 - nothing is told in between
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
        assert after[switched:].all()  # the context of the old weights was computed again
        await sampler.close()

    try:
        asyncio.run(test())
    finally:
        model.load_state_dict(old, strict=False)


def test_the_prompts_log_probs_say_which_weights_they_are_of(server: Server, model: Any) -> None:
    """Of temperature 1, whatever is asked for."""

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


def test_a_cancelled_request_ends_on_the_server(server: Server, model: Any) -> None:
    async def test() -> None:
        sampler = make_sampler(server, model, update="vllm")
        await sampler.publish(weights_of(model), 0)
        async with sampler.session(0) as session:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.sample(np.array([5], np.int32), SamplingParams(4000, ())), 0.5)
            await asyncio.sleep(0.5)  # an answer takes several seconds
            assert total(server, "num_requests_running") == 0
            await session.sample(np.array([5], np.int32), SamplingParams(1, ()))
        await sampler.close()

    asyncio.run(test())


def test_a_server_with_other_log_probs_is_refused(server: Server, model: Any) -> None:
    server.kill()  # one at a time
    for plain in serve(Plain(Path(model.folder))):
        sampler = make_sampler(plain, model)
        with pytest.raises(UserError, match="start vLLM with --logprobs-mode processed_logprobs"):
            asyncio.run(converse(sampler, 0))
