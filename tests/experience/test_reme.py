"""Tests of `gleanrl.experience.interop.reme.ReMeRetriever` against a scripted HTTP server on loopback that answers,
fails, returns nonsense or hangs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from gleanrl.experience.interop.reme import PATIENCE, ReMeRetriever, ServiceError
from gleanrl.types import Message, Score, StopReason, Task, Trajectory, Turn

GOOD = {"answer": "look in the fridge", "success": True, "metadata": {"memory_list": []}}
TASK = Task("t", (Message(role="system", content="be good"), Message(role="user", content="find an egg")))


class Server:
    """Answers each request with ``reply``: a JSON value, a status, raw bytes, or None to hang."""

    def __init__(self) -> None:
        self.reply: Any = GOOD
        self.delay = 0.0
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.url = ""
        self.at_once = self.most_at_once = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                headers: dict[str, str] = {}
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(": ")
                    headers[name.lower()] = value
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append((line.decode().split()[1], json.loads(body), headers))
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                await asyncio.sleep(3600 if self.reply is None else self.delay)
                self.at_once -= 1
                status = self.reply if isinstance(self.reply, int) else 200
                sent = self.reply if isinstance(self.reply, bytes) else json.dumps(self.reply).encode()
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    served = Server()
    server = await asyncio.start_server(served.handle, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.close()


def run(test: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(20), serving() as server:
            await test(server)

    asyncio.run(whole())


def success(number: int = 0) -> Trajectory:
    def turn(role: Any, content: str, sampled: bool = False) -> Turn:
        return Turn(Message(role=role, content=content), np.zeros(2, np.int32), np.zeros(2) if sampled else None)

    segment = (turn("user", "find an egg"), turn("assistant", f"open fridge {number}", True), turn("user", "an egg"))
    return Trajectory(f"{number}", "t", (segment,), Score(1.0), StopReason.DONE)


def test_a_query_has_the_format_of_the_service_and_returns_its_texts() -> None:
    async def test(server: Server) -> None:
        client = ReMeRetriever(server.url + "/", "egg", headers={"X-Team": "x"})
        assert await client.retrieve(TASK, 2) == ["look in the fridge"]
        (path, body, headers) = server.requests[0]
        assert path == "/retrieve_task_memory"
        assert body == {"workspace_id": "egg", "query": "find an egg", "top_k": 2}
        assert headers["x-team"] == "x"
        memories = [{"when_to_use": "eggs", "content": f"{n}", "score": 1} for n in range(3)]
        server.reply = {"answer": "", "metadata": {"memory_list": [{"content": "bare"}, 7, *memories]}}
        assert await client.retrieve(TASK, 3) == ["bare", "eggs\n0", "eggs\n1"]
        server.reply = {"answer": "", "metadata": {}}
        assert await client.retrieve(TASK, 3) == []
        await client.close()

    run(test)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (500, "500"),
        (302, "302"),
        (b"<html>", "no JSON"),
        (b"\xff\xfe{", "no JSON"),
        ([1], "no success"),
        ({"success": False, "answer": "out of credit"}, "out of credit"),
        ({"answer": 3}, "without text"),
        ({"answer": None, "metadata": {"memory_list": "none"}}, "without text"),
        (None, "0.3 s"),
    ],
)
def test_a_failing_service_raises_a_one_line_error_and_later_queries_work(reply: Any, said: str) -> None:
    async def test(server: Server) -> None:
        server.reply = reply
        client = ReMeRetriever(server.url, timeout_s=0.3 if reply is None else 10)
        with pytest.raises(ServiceError, match=said) as error:
            await client.retrieve(TASK, 1)
        assert "\n" not in str(error.value)
        server.reply = GOOD
        assert await client.retrieve(TASK, 1) == ["look in the fridge"]
        await client.close()

    run(test)


def test_an_address_without_a_service_raises_a_service_error() -> None:
    async def test(server: Server) -> None:
        client = ReMeRetriever("http://127.0.0.1:9", timeout_s=5)
        with pytest.raises(ServiceError, match=r"127\.0\.0\.1:9/retrieve_task_memory"):
            await client.retrieve(TASK, 1)
        await client.close()

    run(test)


def test_queries_to_a_slow_service_run_concurrently() -> None:
    async def test(server: Server) -> None:
        server.delay = 0.5
        client = ReMeRetriever(server.url)
        answers = await asyncio.gather(*(client.retrieve(TASK, 1) for _ in range(8)))
        assert answers == [["look in the fridge"]] * 8
        assert server.most_at_once == 8
        await client.close()

    run(test)


def test_a_service_that_keeps_failing_is_not_called_for_rest_s() -> None:
    async def test(server: Server) -> None:
        server.reply = 500
        client = ReMeRetriever(server.url, rest_s=0.4)
        for _ in range(PATIENCE + 3):
            with pytest.raises(ServiceError):
                await client.retrieve(TASK, 1)
        assert len(server.requests) == PATIENCE
        server.reply = GOOD
        await asyncio.sleep(0.5)
        assert await client.retrieve(TASK, 1) == ["look in the fridge"]
        await client.close()

    run(test)


def test_successes_are_sent_in_the_background_once_each() -> None:
    async def test(server: Server) -> None:
        client = ReMeRetriever(server.url, "egg", timeout_s=5)
        for number in range(20):
            client.add(TASK, success(number))
        assert not server.requests
        await client.close()
        assert {path for path, _, _ in server.requests} == {"/summary_task_memory"}
        sent = [t for _, body, _ in server.requests for t in body["trajectories"]]
        assert [t["messages"][1]["content"] for t in sent] == [f"open fridge {n}" for n in range(20)]
        assert all(t["score"] == 1.0 for t in sent)
        assert len(server.requests) == 3
        assert client.metrics() == {"reme_sent": 20.0, "reme_lost": 0.0, "reme_waiting": 0.0}

    run(test)


def test_successes_that_cannot_be_sent_are_counted_and_closing_does_not_hang() -> None:
    async def test(server: Server) -> None:
        server.reply = 500
        client = ReMeRetriever(server.url, waiting=2, timeout_s=0.3)
        for number in range(3):
            client.add(TASK, success(number))
        while client.metrics()["reme_lost"] < 3.0:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
        assert client.metrics()["reme_lost"] == 3.0
        server.reply = None
        client.add(TASK, success())
        await client.close()
        assert client.metrics() == {"reme_sent": 0.0, "reme_lost": 4.0, "reme_waiting": 0.0}

    run(test)


@pytest.mark.parametrize("retrieves", [True, False])
def test_a_success_added_outside_an_event_loop_is_sent_by_the_next_retrieval_or_by_closing(retrieves: bool) -> None:
    async def test(server: Server) -> None:
        client = await asyncio.to_thread(early, server.url)
        if retrieves:
            await client.retrieve(TASK, 1)
        await client.close()
        assert client.metrics()["reme_sent"] == 1.0

    def early(url: str) -> ReMeRetriever:
        client = ReMeRetriever(url)
        client.add(TASK, success())
        return client

    run(test)
