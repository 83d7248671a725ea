"""A server's sampler beside learners that change the model which it was made with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gleanrl.config.settings import LearnerSettings, LossSettings
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.distributed.sharded import ShardedEngine
from gleanrl.learners.models import add_adapters, merged_weights
from gleanrl.samplers.openai import OpenAISampler
from tests.learners.many import led
from tests.samplers.completions_server import CompletionsServer
from tests.samplers.conversations import CONTEXT, assert_exact, converse, make_model

pytestmark = pytest.mark.xdist_group("ranks")  # tests.learners.many.led


async def published(server: CompletionsServer, sampler: OpenAISampler, weights: Any, first: bool) -> None:
    """``first``: a session opens before anything is published, and is compared with the model as it was."""
    if first:
        assert_exact(server.model, [await converse(sampler, 0)])
    await sampler.publish(weights, 1)
    assert_exact(server.model, [await converse(sampler, 1)])
    await sampler.close()


def make_client(server: CompletionsServer, model: Any) -> OpenAISampler:
    return OpenAISampler(model, max_context=CONTEXT, base_url=server.url, served_model="m", update="vllm")


@pytest.mark.parametrize("first", [True, False])
def test_adapters_that_a_learner_adds_to_the_model(first: bool) -> None:
    model = make_model()
    with CompletionsServer(make_model()).serving() as server:
        sampler = make_client(server, model)
        weights = merged_weights(add_adapters(model, LearnerSettings(lora_rank=2), 0))
        asyncio.run(published(server, sampler, weights, first))


def spread_out(ranks: Ranks) -> str:
    model = make_model()
    with CompletionsServer(make_model()).serving() as server:
        sampler = make_client(server, model)
        engine = ShardedEngine(ranks, model, LearnerSettings(), LossSettings(), pad_token=0, temperature=1.0)
        asyncio.run(published(server, sampler, engine.weights(), False))
    return "published"


@pytest.mark.slow
def test_a_learner_of_several_ranks() -> None:
    assert led(2, spread_out) == "published"
