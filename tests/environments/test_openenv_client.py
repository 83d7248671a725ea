"""The OpenEnv client with a minimal server of the protocol: messages, replaced servers, redirects and tokens.

The server runs in the test's event loop and records what it receives. The package openenv is not needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gleanrl.environments.adapters.openenv import Lost, OpenEnvTaskset, _Session
from gleanrl.protocols import Observation
from gleanrl.rollout.tool_calls import Call, call_message
from gleanrl.types import Message
from gleanrl.utils.errors import UserError


def said(content: str, **fields: Any) -> Message:
    return Message(role="assistant", content=content, **fields)


@asynccontextmanager
async def protocol_server(
    schema: dict[str, Any], port: int = 0, *, closes: bool = True
) -> AsyncIterator[tuple[str, list[Any]]]:
    """Run a server whose actions have the given schema. Yields its URL and the list of what it receives.

    If ``closes`` is False, the server ignores requests to close a session. When a connection is gone, "gone" is added
    to the list.
    """
    web = pytest.importorskip("aiohttp.web")
    heard: list[Any] = []

    async def describe(request: Any) -> Any:
        heard.append((request.path, request.headers.get("Authorization")))
        return web.json_response({"schema": {"action": schema}, "metadata": {"name": "ours"}}[request.path[1:]])

    async def talk(request: Any) -> Any:
        heard.append((request.path, request.headers.get("Authorization")))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            order = message.json()
            heard.append(order)
            if order["type"] == "close":
                if closes:
                    break
                continue
            data = {"observation": {"text": "go on", "tools": [{"name": "add"}]}, "done": False}
            if order["type"] == "step" and order["data"].get("type") == "call_tool":
                data["reward"] = order["data"]["arguments"]["worth"]
            await socket.send_json({"type": "observation", "data": data})
        heard.append("gone")
        return socket

    app = web.Application()
    app.add_routes([web.get("/schema", describe), web.get("/metadata", describe), web.get("/ws", talk)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", heard
    finally:
        await runner.cleanup()


async def resets(url: str, **options: Any) -> tuple[Any, Observation]:
    # The reset has a seed, so the server, which runs in this event loop, is not asked for its tasks.
    source = OpenEnvTaskset(url=url, name="ours", reset={"seed": 0}, **options)
    environment = source.environment(source.tasks("train", 1)[0])
    return environment, await environment.reset()


def test_a_message_is_sent_as_an_action_or_answered_with_an_error() -> None:
    async def episode() -> tuple[list[Observation], list[Any]]:
        async with protocol_server({"properties": {"a": {}, "b": {}}}) as (url, heard):
            environment, _ = await resets(url)
            texts = ['{"a": 1, "b": "\\ud800"}', '{"a": 1, "b": NaN}', '{"a": ' + "[" * 5000, '{"a": "ä", "b": 1}']
            answers = [await environment.step(said(text)) for text in texts]
            await environment.close()
            return answers, [order["data"] for order in heard if "data" in order and order["type"] == "step"]

    answers, steps = asyncio.run(episode())
    assert [answer.messages[0]["content"].startswith("error: ") for answer in answers] == [True, True, True, False]
    assert steps == [{"a": "ä", "b": 1}]


def test_the_connection_is_closed_if_the_server_does_not_answer_and_closing_is_cancelled() -> None:
    async def episode() -> None:
        async with protocol_server({"properties": {"a": {}}}, closes=False) as (url, heard):
            environment, _ = await resets(url)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(environment.close(), 0.2)
            async with asyncio.timeout(2):
                while "gone" not in heard:  # noqa: ASYNC110 - the server fills the list
                    await asyncio.sleep(0.01)

    asyncio.run(episode())


def test_tool_arguments_that_no_parser_accepts_are_answered_with_an_error() -> None:
    async def episode() -> Observation:
        async with protocol_server({"title": "CallToolAction"}) as (url, _):
            environment, opening = await resets(url)
            assert [tool["function"]["name"] for tool in opening.tools] == ["add"]
            answer = await environment.step(said("", tool_calls=[call_message(Call("add", "[" * 100_000), 0)]))
            await environment.close()
            return answer

    assert asyncio.run(episode()).messages[0]["content"].startswith("error: ")


@pytest.mark.parametrize(("kind", "earned"), [("sum", 1.5), ("last", 0.5)])
def test_each_tool_call_of_a_message_earns_its_reward(kind: str, earned: float) -> None:
    async def episode() -> Observation:
        async with protocol_server({"title": "CallToolAction"}) as (url, _):
            environment, _ = await resets(url, reward=kind)
            calls = [call_message(Call("add", {"worth": worth}), n) for n, worth in enumerate((1.0, 0.5))]
            answer = await environment.step(said("", tool_calls=[*calls, call_message(Call("add", "[" * 100_000), 2)]))
            await environment.close()
            return answer

    answer = asyncio.run(episode())
    assert answer.score is not None
    assert answer.score.value == earned
    assert answer.reward == (earned if kind == "sum" else None)


def test_the_action_schema_is_read_again_after_the_server_was_replaced() -> None:
    async def episodes() -> list[Any]:
        one, two = ({"properties": {name: {"type": "string"}}} for name in ("old", "new"))
        async with protocol_server(one) as (url, _):
            environment, _ = await resets(url)
        with pytest.raises(Lost):
            await environment.step(said("x"))
        await environment.close()
        async with protocol_server(two, int(url.rpartition(":")[2])) as (url, heard):
            environment, _ = await resets(url)
            await environment.step(said("x"))
            await environment.close()
            return [order["data"] for order in heard if isinstance(order, dict) and order["type"] == "step"]

    assert asyncio.run(episodes()) == [{"new": "x"}]


@asynccontextmanager
async def redirecting(target: str) -> AsyncIterator[str]:
    """Run a server that redirects every request to the same path of ``target``. Yields its URL."""
    web = pytest.importorskip("aiohttp.web")

    async def redirect(request: Any) -> Any:
        raise web.HTTPFound(target + request.path)

    app = web.Application()
    app.router.add_get("/{path}", redirect)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("token_env", ["SESAME", None])
def test_a_redirect_of_the_metadata_request_raises_an_error_with_the_target(
    token_env: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SESAME", "open-sesame")

    async def episode() -> list[Any]:
        async with protocol_server({}) as (url, heard), redirecting(url) as first:
            taskset = OpenEnvTaskset(url=first, token_env=token_env)
            with pytest.raises(UserError, match=f"{url}/metadata"):
                await asyncio.to_thread(taskset.tasks, "train", 1)
            return heard

    assert asyncio.run(episode()) == []


def test_the_token_is_not_sent_to_the_target_of_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SESAME", "open-sesame")

    async def episode() -> list[Any]:
        async with protocol_server({}) as (url, heard), redirecting(url) as first:
            session, _ = await _Session.open(first, "SESAME", {})
            await session.close()
            session, _ = await _Session.open(url, "SESAME", {})
            await session.close()
            return [entry for entry in heard if isinstance(entry, tuple)]

    assert asyncio.run(episode()) == [("/ws", None), ("/ws", "Bearer open-sesame")]


def test_sending_a_token_unencrypted_to_another_machine_warns_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SESAME", "open-sesame")
    for _ in range(2):
        OpenEnvTaskset(url="http://192.0.2.7:8000", name="far", token_env="SESAME", reset={"seed": 1}).tasks("train", 0)
    for url in ("https://192.0.2.7", "wss://192.0.2.7", "http://127.0.0.1:1", "ws://localhost:1"):
        OpenEnvTaskset(url=url, name="far", token_env="SESAME", reset={"seed": 1}).tasks("train", 0)
    (named,) = [record.getMessage() for record in caplog.records if "unencrypted" in record.getMessage()]
    assert "http://192.0.2.7:8000" in named
    assert "the token in SESAME" in named
