"""A scripted HTTP scoring service on loopback that can show every failure of a real judge or reward service.

It implements the necessary part of HTTP/1.1 itself, because a server library would prevent half responses and dropped
connections. The content of a request and a seed decide how the service treats it, so every run is the same."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import re
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gleanrl.rewards import RewardAgent
from gleanrl.rewards.request import Item
from gleanrl.types import Score

Latency = Callable[[random.Random], float]  # seconds
WORTH = re.compile(r"worth (-?\d+(?:\.\d+)?)")
FAULTS = ("429", "500", "503", "hang", "half", "garbage", "drop", "no_score")


def expected(text: str) -> float:
    """The score that the service gives to a text: the number after its last "worth", else 0 to 10 by its hash."""
    said = WORTH.findall(text)
    return float(said[-1]) if said else float(hashlib.sha256(text.encode()).digest()[0] % 11)


@dataclass
class Plan:
    """How the service behaves. ``faults`` gives each fault its share of all requests; the others are answered well."""

    faults: Mapping[str, float] = field(default_factory=dict)  # one of FAULTS -> share
    repeats: int = 1  # how many times the same request meets its fault before it is answered; 0 = always
    latency: Latency = lambda random: 0.0
    retry_after: str | None = "0.02"
    seed: int = 0
    key: str | None = None  # the bearer token that every request must carry; None = none is needed
    # computes what the judge writes from the request's body; None = its score in the requested format
    says: Callable[[Mapping[str, Any]], str] | None = None
    # computes status and JSON of every answer from path and body
    answer: Callable[[str, Mapping[str, Any]], tuple[int, Any]] | None = None
    # (n, seconds): at the n-th request the service closes for so many seconds and refuses connections
    outage: tuple[int, float] | None = None
    again_after_s: float | None = None  # each complete answer is sent a second time after so many seconds
    echoes: bool = False  # answers repeat the header Idempotency-Key of their request
    redirect: str | None = None  # every request is redirected to this address


class Service:
    """The server, which records all requests. ``async with`` runs it in the test's own event loop. `serving` runs it in
    a thread, for blocking callers that send few requests (two busy threads would compete for the interpreter lock).

    Attributes:
        asked: number of requests with each content.
        met: number of requests that met each fault.
        bodies, headers: of all requests, in the order of their arrival.
        scored: the ``Idempotency-Key`` of each complete answer that contained a score.
        outages: number of outages that have ended.
        connections: number of connections opened so far.
        busy, most: number of requests in work now, and the largest such number so far.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan or Plan()
        self.asked: Counter[str] = Counter()
        self.met: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.scored: list[str] = []
        self.outages = 0
        self.connections = self.busy = self.most = 0
        self.port = 0
        self._handlers: set[asyncio.Task[None]] = set()
        self._outage: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Service:
        _allow_files(8192)  # both ends of a thousand connections are open files of this process
        await self._listen()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._outage is not None:
            self._outage.cancel()
        await self._close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, backlog=4096, limit=1 << 24)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    async def _go_away(self, seconds: float) -> None:
        await self._close()
        await asyncio.sleep(seconds)
        await self._listen()
        self.outages += 1

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        self.connections += 1
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client closed the connection
        except asyncio.CancelledError:
            pass  # the test is over; an exception that left this handler would be logged by asyncio
        finally:
            self._handlers.discard(task)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        path = head[0].split()[1]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
        self.bodies.append(body)
        self.headers.append(headers)
        if self.plan.outage is not None and len(self.bodies) == self.plan.outage[0]:
            self._outage = asyncio.create_task(self._go_away(self.plan.outage[1]))
        self.busy += 1
        self.most = max(self.most, self.busy)
        try:
            return await self._answer(path, headers, body, reader, writer)
        finally:
            self.busy -= 1

    async def _answer(
        self,
        path: str,
        headers: Mapping[str, str],
        body: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Answer one request. Return False if the connection cannot be used any more."""
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if self.plan.key is not None and given != self.plan.key:
            message = f"Incorrect API key provided: {given}. It is neither {given[:5]}*********{given[-4:]}."
            return await _send(writer, 401, {"error": {"message": message}})
        content = json.dumps([path, body], sort_keys=True)
        draws = random.Random(f"{self.plan.seed} {content}")
        fault = self._fault(content, draws.random())
        if fault == "hang":
            await reader.read(1)  # blocks until the client closes the connection
            return False
        await asyncio.sleep(self.plan.latency(draws))
        if fault == "drop":
            writer.transport.abort()
            return False
        if fault in ("429", "500", "503"):
            extra = {"Retry-After": self.plan.retry_after} if fault != "500" and self.plan.retry_after else {}
            return await _send(writer, int(fault), {"error": {"message": f"no luck: {fault}"}}, extra)
        status, answer = self._judged(path, body, fault == "no_score")
        if fault == "garbage":
            return await _send(writer, 200, None, text=json.dumps(answer)[: -len(json.dumps(answer)) // 3])
        if status == 200 and fault is None:
            self.scored.append(headers.get("idempotency-key", ""))
        extra = {"Idempotency-Key": headers["idempotency-key"]} if self.plan.echoes else {}
        if self.plan.redirect is not None:
            return await _send(writer, 307, {}, {"Location": self.plan.redirect})
        if self.plan.again_after_s is not None:
            again = asyncio.create_task(self._send_again(self.plan.again_after_s, writer, status, answer, extra))
            self._handlers.add(again)
            again.add_done_callback(self._handlers.discard)
        return await _send(writer, status, answer, extra, half=fault == "half")

    async def _send_again(self, seconds: float, writer: asyncio.StreamWriter, *answer: Any) -> None:
        await asyncio.sleep(seconds)
        if not writer.is_closing():
            with contextlib.suppress(ConnectionError):
                await _send(writer, *answer)

    def _fault(self, content: str, draw: float) -> str | None:
        self.asked[content] += 1
        if self.plan.repeats and self.asked[content] > self.plan.repeats:
            return None
        for fault in FAULTS:
            draw -= self.plan.faults.get(fault, 0.0)
            if draw < 0:
                self.met[fault] += 1
                return fault
        return None

    def _judged(self, path: str, body: dict[str, Any], mute: bool) -> tuple[int, Any]:
        if self.plan.answer is not None:
            return self.plan.answer(path, body)
        prompt = "\n".join(message["content"] for message in body.get("messages", ()))
        score = expected(prompt)
        if path == "/v1/chat/completions":
            said = "I would rather not say." if mute else self.plan.says(body) if self.plan.says else _said(body, score)
            usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(said.split())}
            message = {"role": "assistant", "content": said}
            return 200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
        if path == "/score":
            return 200, {"score": None if mute else score, "explanation": "by its worth", "parts": {"length": 3.0}}
        if path == "/classify":
            return 200, {"data": [{"index": 0, "probs": [score], "num_classes": 1}], "usage": {"prompt_tokens": 5}}
        if path == "/pooling":
            return 200, {"data": [{"index": 0, "object": "pooling", "data": [score]}], "usage": {"prompt_tokens": 5}}
        return 404, {"error": {"message": f"no such path: {path}"}}


def _said(body: Mapping[str, Any], score: float) -> str:
    if "response_format" in body:
        return json.dumps({"reasoning": "It is what it is.", "score": score})
    return f"It is what it is.\nScore: {score:g}"


async def _send(
    writer: asyncio.StreamWriter,
    status: int,
    answer: Any,
    extra: Mapping[str, str] | None = None,
    *,
    text: str | None = None,
    half: bool = False,
) -> bool:
    body = (json.dumps(answer) if text is None else text).encode()
    fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(extra or {})}
    head = f"HTTP/1.1 {status} -\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n"
    writer.write(head.encode() + (body[: len(body) // 2] if half else body))
    await writer.drain()
    return not half


@contextlib.contextmanager
def serving(plan: Plan | None = None) -> Iterator[Service]:
    """Run a service in a thread, and stop it at the end even if requests hang in it."""
    service, started, loops = Service(plan), threading.Event(), []

    async def serve() -> None:
        stopped = asyncio.Event()
        async with service:
            loops.append((asyncio.get_running_loop(), stopped))
            started.set()
            await stopped.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield service
    finally:
        loop, stopped = loops[0]
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10)
        assert not thread.is_alive()


async def group_scored(agent: RewardAgent, group: Sequence[Item]) -> list[Score]:
    """Score one group and return its scores."""
    async for _, scores in agent.score_groups([group]):
        return scores
    raise AssertionError("no group came back")


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard < 0 else min(count, hard), hard))
