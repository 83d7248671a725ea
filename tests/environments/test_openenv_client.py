"""The OpenEnv client against a server of ours that speaks the protocol: what is said, and to whom a token goes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from gleanrl.environments.adapters.openenv import Lost, OpenEnvTaskset, _described
from gleanrl.protocols import Observation
from gleanrl.rollout.tool_calls import Call, call_message
from gleanrl.types import Message
from gleanrl.utils.errors import UserError


def said(content: str, **fields: Any) -> Message:
    return Message(role="assistant", content=content, **fields)


@asynccontextmanager
async def speaking(schema: dict[str, Any], port: int = 0) -> AsyncIterator[tuple[str, list[Any]]]:
    """Its url, and what it hears."""
    serve = pytest.importorskip("websockets.asyncio.server").serve
    heard: list[Any] = []

    def answer(connection: Any, request: Any) -> Any:
        heard.append((request.path, request.headers.get("Authorization")))
        if request.path == "/moved/ws":
            moved = connection.respond(302, "")
            moved.headers["Location"] = "/ws"
            return moved
        told = {"/schema": {"action": schema}, "/metadata": {"name": "ours"}}.get(request.path.removeprefix("/moved"))
        return None if told is None else connection.respond(200, json.dumps(told))

    async def talk(connection: Any) -> None:
        async for message in connection:
            order = json.loads(message)
            heard.append(order)
            if order["type"] == "close":
                break
            data = {"observation": {"text": "go on", "tools": [{"name": "add"}]}, "done": False}
            await connection.send(json.dumps({"type": "observation", "data": data}))

    async with serve(talk, "127.0.0.1", port, process_request=answer) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard


async def resets(url: str, **options: Any) -> tuple[Any, Observation]:
    source = OpenEnvTaskset(url=url, name="ours", **options)
    environment = source.environment(source.tasks("train", 1)[0])
    return environment, await environment.reset()


def test_what_the_model_says_reaches_the_server_or_comes_back_as_an_error() -> None:
    async def episode() -> tuple[list[Observation], list[Any]]:
        async with speaking({"properties": {"a": {}, "b": {}}}) as (url, heard):
            environment, _ = await resets(url)
            texts = ['{"a": 1, "b": "\\ud800"}', '{"a": 1, "b": NaN}', '{"a": ' + "[" * 5000, '{"a": "ä", "b": 1}']
            answers = [await environment.step(said(text)) for text in texts]
            await environment.close()
            return answers, [order["data"] for order in heard if "data" in order and order["type"] == "step"]

    answers, steps = asyncio.run(episode())
    assert [answer.messages[0]["content"].startswith("error: ") for answer in answers] == [True, True, True, False]
    assert steps == [{"a": "ä", "b": 1}]


def test_arguments_that_no_parser_takes() -> None:
    async def episode() -> Observation:
        async with speaking({"title": "CallToolAction"}) as (url, _):
            environment, opening = await resets(url)
            assert [tool["function"]["name"] for tool in opening.tools] == ["add"]
            answer = await environment.step(said("", tool_calls=[call_message(Call("add", "[" * 100_000), 0)]))
            await environment.close()
            return answer

    assert asyncio.run(episode()).messages[0]["content"].startswith("error: ")


def test_a_server_that_takes_anothers_place_is_asked_anew() -> None:
    async def episodes() -> list[Any]:
        one, two = ({"properties": {name: {"type": "string"}}} for name in ("old", "new"))
        async with speaking(one) as (url, _):
            environment, _ = await resets(url)
        with pytest.raises(Lost):
            await environment.step(said("x"))
        await environment.close()
        async with speaking(two, int(url.rpartition(":")[2])) as (url, heard):
            environment, _ = await resets(url)
            await environment.step(said("x"))
            await environment.close()
            return [order["data"] for order in heard if isinstance(order, dict) and order["type"] == "step"]

    assert asyncio.run(episodes()) == [{"new": "x"}]


@pytest.mark.parametrize("path", ["/metadata", "/schema"])
def test_a_token_is_taken_to_no_other_server(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SESAME", "open")
    asked: list[str | None] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    class First(Other):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{other.server_port}{self.path}")
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Other) as other, HTTPServer(("127.0.0.1", 0), First) as first:
        for server in (other, first):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{first.server_port}"
        with pytest.raises(UserError, match=f"it redirects to http://127.0.0.1:{other.server_port}{path}"):
            _described(url, "SESAME", path)
        assert asked == []
        assert _described(url, None, path) == {}  # without a token one may go anywhere
        assert asked == [None]
        for server in (other, first):
            server.shutdown()


def test_a_session_with_a_token_goes_where_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SESAME", "open")

    async def episodes() -> list[Any]:
        async with speaking({}) as (url, heard):
            environment, _ = await resets(f"{url}/moved")
            await environment.close()
            heard.clear()
            with pytest.raises(Lost, match="302"):
                await resets(f"{url}/moved", token_env="SESAME")
            return heard

    assert [path for path, _ in asyncio.run(episodes())] == ["/moved/schema", "/moved/ws"]


def test_a_token_over_plain_text_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        OpenEnvTaskset(url="http://192.0.2.7:8000", name="far", token_env="SESAME").tasks("train", 1)
    for url in ("https://192.0.2.7", "wss://192.0.2.7", "http://127.0.0.1:1", "ws://localhost:1"):
        OpenEnvTaskset(url=url, name="far", token_env="SESAME").tasks("train", 1)
    (told,) = [record.getMessage() for record in caplog.records if "unencrypted" in record.getMessage()]
    assert "http://192.0.2.7:8000" in told
    assert "the token in SESAME" in told
