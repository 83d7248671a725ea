"""`OpenAISampler` publishes correctly after a learner has changed the model that the sampler was made with.

Learners add LoRA adapters to the model, or shard its parameters. The server is `CompletionsServer`.
"""

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

# `led` starts several processes. Tests that use it run in one worker of pytest-xdist, one after another.
pytestmark = pytest.mark.xdist_group("ranks")


async def publish_and_sample(server: CompletionsServer, sampler: OpenAISampler, weights: Any, first: bool) -> None:
    """Publish ``weights`` and check the log-probs. With ``first``, also open a session before the publication."""
    if first:
        assert_exact(server.model, [await converse(sampler, 0)])
    await sampler.publish(weights, 1)
    assert_exact(server.model, [await converse(sampler, 1)])
    await sampler.close()


def make_client(server: CompletionsServer, model: Any) -> OpenAISampler:
    return OpenAISampler(model, max_context=CONTEXT, base_url=server.url, served_model="m", update="vllm")


@pytest.mark.parametrize("first", [True, False])
def test_merged_weights_can_be_published_after_a_learner_added_adapters(first: bool) -> None:
    model = make_model()
    with CompletionsServer(make_model()).serving() as server:
        sampler = make_client(server, model)
        weights = merged_weights(add_adapters(model, LearnerSettings(lora_rank=2), 0))
        asyncio.run(publish_and_sample(server, sampler, weights, first))


def publish_from_sharded_learner(ranks: Ranks) -> str:
    model = make_model()
    with CompletionsServer(make_model()).serving() as server:
        sampler = make_client(server, model)
        engine = ShardedEngine(ranks, model, LearnerSettings(), LossSettings(), pad_token=0, temperature=1.0)
        asyncio.run(publish_and_sample(server, sampler, engine.weights(), False))
    return "published"


@pytest.mark.slow
def test_a_sharded_learner_of_two_ranks_can_publish() -> None:
    assert led(2, publish_from_sharded_learner) == "published"
