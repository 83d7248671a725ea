"""Agents that make any calls whatever over HTTP: streams that are cut off, clients that give up, episodes at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gleanrl.environments.agent.endpoint import Endpoint
from gleanrl.protocols import ModelAddress
from gleanrl.rollout.calls import ModelAnswer, ModelCall, Refused
from gleanrl.types import Message
from tests.rollout.hostile import Episode, plain, play
from tests.strategies import NIGHTLY

aiohttp = pytest.importorskip("aiohttp")


DELAY_S = 0.005  # longest duration of a completion


class Client:
    """The client of an episode, which speaks OpenAI's chat completions."""

    def __init__(self, session: Any, address: ModelAddress, episode: Episode, random: Random) -> None:
        self.session, self.url, self.episode, self.random = session, f"{address.url}/v1", episode, random
        self.sent = 0
        self.headers = {"Authorization": f"Bearer {address.key}"}

    async def ask(self, call: ModelCall) -> ModelAnswer:
        body: dict[str, Any] = {"messages": call.messages, "tools": call.tools, "stop": call.stop}
        body |= {"max_tokens": call.max_tokens, "stream": call.stream}
        cut_off = self.random.random() < 0.1
        self.sent += 1
        request = self.session.post(f"{self.url}/chat/completions", json=body, headers=self.headers)
        patience_s = self.random.random() * DELAY_S if self.random.random() < 0.1 else None
        async with asyncio.timeout(patience_s), request as response:
            if response.status == 400:
                raise Refused((await response.json())["error"]["message"])
            assert response.status == 200
            if cut_off:
                await response.content.read(10)
                response.close()
                raise TimeoutError
            text = await response.text()
        if call.stream:
            chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
            assert text.endswith("data: [DONE]\n\n")
            whole, choice = chunks[-1], chunks[-1]["choices"][0]
            message = chunks[0]["choices"][0]["delta"]
            for entry in message.get("tool_calls") or ():
                del entry["index"]
        else:
            whole = json.loads(text)
            (choice,) = whole["choices"]
            message = choice["message"]
        used = whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]
        answer = ModelAnswer(message, *used, choice["finish_reason"], whole["id"].removeprefix("chatcmpl-"))
        (asked,) = [one for one in self.episode.asked if one.answer and one.answer.id == answer.id]
        assert asked.answer is not None
        assert replace(asked.answer, stop=None) == answer  # chat completions do not say which text ended an answer
        assert plain(asked.call.messages) == plain(call.messages)
        assert replace(asked.call, messages=()) == replace(call, messages=())
        return answer

    async def earn(self, reward: float, answer_id: str | None) -> None:
        body = {"reward": reward} if answer_id is None else {"reward": reward, "id": f"chatcmpl-{answer_id}"}
        async with self.session.post(f"{self.url}/rewards", json=body, headers=self.headers) as response:
            assert (response.status, await response.json()) == (200, {"object": "reward", **body})


async def episode(endpoint: Endpoint, session: Any, seed: int, rounds: int) -> None:
    random = Random(seed)
    played = Episode(random, delay=DELAY_S)
    policy = played.policy
    opened = endpoint.open(played.answer, earn=policy.conversations.earn, max_context=played.max_context)
    async with opened as address:
        client = Client(session, address, played, random)
        earned = await play(random, rounds, client.ask, client.earn)
        assert len(played.asked) <= client.sent
        assert not any(one.cancelled for one in played.asked)  # whatever the client has given up
        running, answered = played.running(), policy.turns
    assert all(one.cancelled for one in running)
    body = {"messages": [Message(role="user", content="left")]}
    async with session.post(f"{client.url}/chat/completions", json=body, headers=client.headers) as late:
        assert late.status == 401
    played.check(earned)
    assert policy.turns == answered


@pytest.fixture(scope="module")
def play_at_once() -> Iterator[Callable[[list[tuple[int, int]]], None]]:
    """A function that plays episodes of these seeds and numbers of rounds at once, all of them at one endpoint."""

    async def start() -> Any:
        return aiohttp.ClientSession()

    async def end() -> None:
        await session.close()
        await endpoint.close()

    async def together(agents: list[tuple[int, int]]) -> None:
        await asyncio.gather(*(episode(endpoint, session, *agent) for agent in agents))

    with asyncio.Runner() as runner:
        endpoint, session = Endpoint(), runner.run(start())
        yield lambda agents: runner.run(together(agents))
        runner.run(end())


@pytest.mark.timeout(3600)  # for 10,000 sequences on a busy machine
@settings(max_examples=10_000 if NIGHTLY else 75, deadline=None, phases=[Phase.generate])  # seeds cannot be shrunk
@given(agents=st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 8)), min_size=1, max_size=2))
def test_each_sampled_token_is_trained_exactly_once_whatever_arrives_over_http(
    play_at_once: Callable[[list[tuple[int, int]]], None], agents: list[tuple[int, int]]
) -> None:
    """Episodes at once, streams that are cut off, calls that their client gives up, and turn rewards by id."""
    play_at_once(agents)
