"""`OpenAISampler` samples exactly with a suitable server, and rejects a server that does not return what it needs.

The server is `CompletionsServer`, which runs in this process and is reached over HTTP.
"""

from __future__ import annotations

import asyncio
import copy
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.config import loading as configuration
from gleanrl.config import validate
from gleanrl.protocols import Completion, SamplingParams
from gleanrl.samplers import openai
from gleanrl.samplers.canary import PROMPT as PROMPT_TOKENS
from gleanrl.samplers.openai import OpenAISampler
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import RetryPolicy
from tests.samplers.completions_server import CompletionsServer, Twist
from tests.samplers.conversations import CONTEXT, STOP, assert_exact, converse, flatten, make_model

PROMPT = np.array([5, 6, 7], np.int32)
ONE = SamplingParams(1, (STOP,))


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[CompletionsServer]:
    with CompletionsServer(model).serving() as server:
        yield server


def make_client(server: CompletionsServer, model: Any = None, **options: Any) -> OpenAISampler:
    made = {"max_rows": 8, "max_context": CONTEXT, "base_url": server.url, "served_model": "m"}
    return OpenAISampler(model or server.model, **made | options)


def run(test: Any) -> Any:
    return asyncio.run(asyncio.wait_for(test, 60))


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def add_noise(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


# --- sampling -------------------------------------------------------------------------------------
def test_log_probs_are_exact_and_tokens_depend_only_on_the_sessions_seed(server: CompletionsServer, model: Any) -> None:
    async def once() -> Any:
        sampler = make_client(server)
        records = await asyncio.gather(*(converse(sampler, seed) for seed in range(10)))
        stats = sampler.stats()
        await sampler.close()
        return records, stats

    (records, stats), (again, _) = run(once()), run(once())
    assert_exact(model, records)
    turns = [turn for record in records for turn in record]
    for _, params, completion in turns:
        assert completion.tokens.size <= params.max_tokens
        assert (completion.finish == "stop") == (completion.tokens[-1] == STOP)
    tested = 1 + 1 + openai.TESTED
    assert stats["sampled_tokens"] == sum(c.tokens.size for _, _, c in turns) + tested
    assert stats["reused_tokens"] == stats["requests"] == len(turns) + 3
    # Tokens and log-probs alternate; only the tokens are compared, because batching changes the rounding of log-probs.
    assert flatten(records)[::2] == flatten(again)[::2]


def test_requests_ask_the_server_to_sample_from_the_full_distribution(server: CompletionsServer) -> None:
    async def test() -> None:
        sampler = make_client(server, extra={"no_stop_trim": True})
        async with sampler.session(0) as session:
            await session.sample(PROMPT, SamplingParams(50, (STOP,), 0.5))
            body = server.bodies[-1]
            for name, value in {
                **{"prompt": [5, 6, 7], "max_tokens": 50, "temperature": 0.5, "stop_token_ids": [STOP]},
                **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "ignore_eos": True, "return_token_ids": True},
                **{"model": "m", "no_stop_trim": True},
            }.items():
                assert body[name] == value
            with pytest.raises(ValueError, match="leaves nothing to sample"):
                await session.sample(np.full(CONTEXT, 5, np.int32), ONE)
            long = await session.sample(np.full(CONTEXT - 3, 5, np.int32), SamplingParams(50, ()))
            assert (long.tokens.size, long.finish) == (3, "length")
        await sampler.close()

    run(test())


def test_extra_fields_cannot_change_the_distribution(server: CompletionsServer) -> None:
    with pytest.raises(UserError, match=r"sampler.options.extra: top_p is 1.0 in every request"):
        make_client(server, extra={"top_p": 0.9})


def test_sessions_beyond_max_rows_open_in_order_of_arrival(server: CompletionsServer) -> None:
    async def test() -> list[int]:
        sampler, order = make_client(server, max_rows=2), []

        async def episode(seed: int) -> None:
            async with sampler.session(seed) as session:
                assert sampler._open <= 2
                order.append(seed)
                await session.sample(PROMPT, ONE)

        first = [asyncio.create_task(episode(seed)) for seed in (98, 99)]
        waiting = [asyncio.create_task(episode(seed)) for seed in range(5)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.gather(*first, *waiting, return_exceptions=True)
        await sampler.close()
        return order

    order = run(test())
    assert sorted(order[:2]) == [98, 99]
    assert order[2:] == [0, 2, 3, 4]


def test_a_request_that_fails_with_503_is_retried_up_to_the_limit(server: CompletionsServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(openai, "RETRIES", RetryPolicy(attempts=4, backoff_s=0.01))

    async def test() -> None:
        sampler = make_client(server)
        async with sampler.session(0) as session:
            server.failing = 3
            await session.sample(PROMPT, ONE)
            server.failing = 4
            with pytest.raises(UserError, match=r"tried 4 times: .*status 503: overloaded"):
                await session.sample(PROMPT, ONE)
        await sampler.close()

    run(test())


def test_closing_the_sampler_raises_in_sessions_that_wait_to_open(server: CompletionsServer) -> None:
    async def test() -> None:
        sampler = make_client(server, max_rows=1)
        async with sampler.session(0):
            queued = asyncio.create_task(converse(sampler, 1))
            await asyncio.sleep(0.01)
            await sampler.close()
            with pytest.raises(RuntimeError, match="has closed"):
                await queued
        await sampler.close()

    run(test())


# --- what a server must return ------------------------------------------------------------------
def _no_ids(body: dict[str, Any], choice: dict[str, Any]) -> None:
    del choice["token_ids"]
    choice["logprobs"]["tokens"] = ["a"] * len(choice["logprobs"]["tokens"])


def _no_logprobs(body: dict[str, Any], choice: dict[str, Any]) -> None:
    choice["logprobs"] = None


def _other_prompt(body: dict[str, Any], choice: dict[str, Any]) -> None:
    choice["prompt_token_ids"] = [*body["prompt"][:-1], body["prompt"][-1] + 1]


def _no_stop_token(body: dict[str, Any], choice: dict[str, Any]) -> None:
    if choice["finish_reason"] == "stop":
        choice["token_ids"] = choice["token_ids"][:-1] or [9]
        choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][: len(choice["token_ids"])]


def _logprobs_of_temperature_1(body: dict[str, Any], choice: dict[str, Any]) -> None:
    from tests.samplers.conversations import plain_logprobs

    tokens = np.array(choice["token_ids"], np.int32)
    completion = Completion(tokens, np.zeros(0, np.float32), 0, "length")
    raw = plain_logprobs(make_model(), np.array(body["prompt"], np.int32), SamplingParams(1, ()), completion)
    choice["logprobs"]["token_logprobs"] = raw.tolist()


def _more_logprobs_than_tokens(body: dict[str, Any], choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"].append(-1.0)


@pytest.mark.parametrize(
    ("twist", "why"),
    [
        (_no_ids, "returns no token ids"),
        (_no_logprobs, "returns no log-probs"),
        (_other_prompt, "of another prompt"),
        (_no_stop_token, "no stop token, or does not return it"),
        (_logprobs_of_temperature_1, "log-probs of temperature 1, not of the sampling temperature"),
        (_more_logprobs_than_tokens, "returned 1 tokens and 2 log-probs"),
    ],
)
@pytest.mark.parametrize("first", ["session", "publication"])
def test_a_server_without_the_needed_outputs_is_rejected_before_the_first_episode(
    model: Any, twist: Twist, why: str, first: str
) -> None:
    async def test(server: CompletionsServer) -> None:
        sampler = make_client(server, update="vllm")
        asked = sampler.publish(weights_of(model), 0) if first == "publication" else converse(sampler, 0)
        with pytest.raises(UserError, match=why) as refused:
            await asked
        assert [body["prompt"] for body in server.bodies if len(body["prompt"]) != PROMPT_TOKENS] == []
        assert "\n" not in str(refused.value)
        await sampler.close()

    with CompletionsServer(model, twist).serving() as server:
        run(test(server))


def test_token_ids_may_be_returned_in_place_of_the_tokens_texts(model: Any) -> None:
    def ids_as_texts(body: dict[str, Any], choice: dict[str, Any]) -> None:
        del choice["token_ids"]

    async def test(server: CompletionsServer) -> None:
        sampler = make_client(server)
        assert_exact(model, [await converse(sampler, 1)])
        await sampler.close()

    with CompletionsServer(model, ids_as_texts).serving() as server:
        run(test(server))


def test_a_server_with_other_weights_and_no_update_method_is_rejected(server: CompletionsServer) -> None:
    async def test() -> None:
        sampler = make_client(server, make_model(seed=1))
        with pytest.raises(UserError, match=r"does not serve these weights .* cannot take them"):
            async with sampler.session(0):
                raise AssertionError("it opened")
        await sampler.close()

    run(test())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"base_url": ""}, "base_url: give an address"),
        ({"served_model": ""}, "served_model: give the model's name"),
        ({"update": "magic"}, "update = 'magic': none or vllm"),
        ({"server_dtype": "int4"}, "server_dtype = 'int4'"),
        ({"time_out_s": 3}, "no 'time_out_s'; did you mean 'timeout_s'"),
    ],
)
def test_wrong_options_raise_a_user_error(server: CompletionsServer, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        make_client(server, **options)


# --- publication ----------------------------------------------------------------------------------
@pytest.mark.parametrize("inflight", [False, True])
def test_publish_updates_the_servers_weights_and_waits_for_sessions_unless_in_flight(inflight: bool) -> None:
    model = make_model()

    async def test(server: CompletionsServer) -> None:
        sampler = make_client(server, update="vllm", inflight=inflight)
        for version in range(3):
            await sampler.publish(weights_of(model), version)
            records = await asyncio.gather(*(converse(sampler, seed) for seed in range(4)))
            assert_exact(model, records)
            assert {completion.version for record in records for _, _, completion in record} == {version}
            add_noise(model)
        async with sampler.session(0) as session:
            publication = asyncio.create_task(sampler.publish(weights_of(model), 3))
            if inflight:
                await publication
            else:
                await asyncio.sleep(0.05)
                assert not publication.done()
            assert (await session.sample(PROMPT, ONE)).version == (3 if inflight else 2)
        await publication
        await sampler.close()

    # The server starts with other weights, which the first publication replaces.
    served = make_model(seed=1)
    with CompletionsServer(served).serving() as server:
        server.model = model
        run(test(server))
    update = ["/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache?reset_running_requests=true", "/resume"]
    assert server.admin == 4 * update


def test_an_update_that_the_server_confirms_but_does_not_load_raises(model: Any) -> None:
    async def test(server: CompletionsServer) -> None:
        sampler = make_client(server, update="vllm")
        await sampler.publish(weights_of(model), 1)
        server.lossy = True
        with pytest.raises(UserError, match="does not compute what the learner's weights compute after an update"):
            await sampler.publish(weights_of(add_noise(make_model())), 2)
        assert sampler.version == 1
        assert server.running.is_set()
        await sampler.close()

    with CompletionsServer(model).serving() as server:
        run(test(server))


def test_an_update_that_the_server_does_not_confirm_raises(model: Any) -> None:
    """In bfloat16 the first update changes log-probs by less than rounding does, so that they cannot reveal it."""

    async def test(server: CompletionsServer) -> None:
        sampler = make_client(server, update="vllm", server_dtype="bfloat16")
        server.deaf = True
        with pytest.raises(UserError, match="does not say that it took new weights"):
            await sampler.publish(weights_of(model), 1)
        assert server.running.is_set()
        await sampler.close()

    with CompletionsServer(model).serving() as server:
        run(test(server))


@pytest.mark.parametrize("cancelled", [False, True])
def test_the_server_resumes_if_its_answer_to_the_pause_is_an_error_or_not_awaited(model: Any, cancelled: bool) -> None:
    async def test(server: CompletionsServer) -> None:
        sampler = make_client(server, update="vllm")
        server.pause_status, server.pausing_s = 400, 0.5 if cancelled else 0.0
        publication = asyncio.create_task(sampler.publish(weights_of(model), 1))
        if cancelled:
            while server.running.is_set():  # noqa: ASYNC110 - the server runs in another thread
                await asyncio.sleep(0.01)
            publication.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else UserError):
            await publication
        assert server.running.is_set()
        server.pause_status = 200
        await sampler.publish(weights_of(model), 1)
        assert_exact(model, [await converse(sampler, 1)])
        await sampler.close()

    with CompletionsServer(model).serving() as server:
        run(test(server))


def test_a_bfloat16_server_of_the_base_model_is_rejected_when_a_checkpoint_is_published(model: Any) -> None:
    """The served log-probs must be nearer to those of the checkpoint than to those of the base model."""
    trained = make_model()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 2e-3 * torch.randn_like(parameter)

    async def test(server: CompletionsServer, start: Any, published: Any) -> None:
        sampler = make_client(server, start, server_dtype="bfloat16")
        try:
            await sampler.publish(weights_of(published), 0)
            assert_exact(published, [await converse(sampler, 1)])
        finally:
            await sampler.close()

    with CompletionsServer(model).serving() as server:
        with pytest.raises(UserError, match=r"does not compute .* at the start, but what older ones do"):
            run(test(server, model, trained))
        run(test(server, trained, model))


def test_sessions_wait_or_raise_after_a_failed_update_until_the_next_publication() -> None:
    model = make_model()

    async def test(server: CompletionsServer) -> None:
        sampler = make_client(server, update="vllm", inflight=True)
        await sampler.publish(weights_of(model), 1)
        add_noise(model)
        async with sampler.session(0) as session:
            server.lossy = True
            with pytest.raises(UserError, match="does not compute"):
                await sampler.publish(weights_of(model), 2)
            with pytest.raises(RuntimeError, match="not known which weights"):
                await session.sample(PROMPT, ONE)
            episode = asyncio.create_task(converse(sampler, 1))
            await asyncio.sleep(0.05)
            assert not episode.done()
            server.lossy = False
            await sampler.publish(weights_of(model), 2)
            assert (await session.sample(PROMPT, ONE)).version == 2
        record = await episode
        assert_exact(model, [record])
        assert {completion.version for _, _, completion in record} == {2}
        await sampler.close()

    with CompletionsServer(copy.deepcopy(model)).serving() as server:
        run(test(server))


def test_weights_of_a_wrong_shape_are_not_sent_to_the_server(server: CompletionsServer, model: Any) -> None:
    async def test() -> None:
        sampler = make_client(server, update="vllm")
        with pytest.raises(ValueError, match=r"has shape \(3,\), not \(32,\)"):
            await sampler.publish({**weights_of(model), "model.norm.weight": torch.zeros(3)}, 1)
        assert server.admin == []
        await sampler.close()

    run(test())


def test_without_an_update_method_only_the_served_weights_can_be_published(
    server: CompletionsServer, model: Any
) -> None:
    async def test() -> None:
        sampler = make_client(server)
        await sampler.publish(weights_of(model), 0)
        assert_exact(model, [await converse(sampler, 1)])
        with pytest.raises(UserError, match="cannot take them"):
            await sampler.publish(weights_of(add_noise(make_model())), 1)
        await sampler.close()

    run(test())


def test_the_settings_in_the_vllm_howto_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    # The page assumes that vLLM is installed, and the settings are only accepted then.
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    page = (Path(__file__).parents[2] / "docs" / "howto" / "vllm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    [adapters] = [block for block in blocks if "[learner]" in block]
    blocks.remove(adapters)
    settings = tomllib.loads(adapters)
    flags = [("sampler.name", "vllm"), ("learner.lora_rank", str(settings["learner"]["lora_rank"]))]
    flags += [(f"sampler.options.{key}", str(value)) for key, value in settings["sampler"]["options"].items()]
    validate.check(configuration.load("quickstart", flags))
    assert len(blocks) == 4
    for main, own in zip(blocks[::2], blocks[1::2], strict=True):
        options = tomllib.loads(f"{main}\n{own}")["sampler"]
        flags = [(f"sampler.{key}", value) for key, value in options.items() if not isinstance(value, dict)]
        flags += [
            (f"sampler.{table}.{key}", str(value))
            for table in ("options", "evaluation_options")
            for key, value in options[table].items()
        ]
        validate.check(configuration.load("quickstart", flags))
        if options["name"] == "openai":
            OpenAISampler(make_model(), max_context=CONTEXT, **options["options"])
