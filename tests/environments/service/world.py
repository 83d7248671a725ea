"""Environments, servers and an unreliable proxy, for the tests of the environment service."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.environments.service.app import Limits, Service
from gleanrl.environments.service.client import ServiceTaskset
from gleanrl.environments.service.server import run_server
from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.types import Message, Score, StopReason, Task
from gleanrl.utils.place import Place

ROOT = Path(__file__).parents[3]
TOKEN = "a-token-of-the-tests-0123456789"


@dataclass(frozen=True)
class Echo(Taskset):
    """A taskset with all optional methods and attributes, whose environment answers with all messages so far."""

    phrases = ("Nothing happens.",)
    needs_reward = True
    has_expert = True
    version = "of the tests"
    weights: ClassVar = {"b": 2.0, "a": 1.0}
    turns: int = 1_000_000

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        return [Task(f"{split}-{i}", payload={"number": i}, kind="a") for i in range(min(count, 100))]

    def environment(self, task: Task) -> EchoEpisode:
        return EchoEpisode(self.turns)

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return (tool(task.id),)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        return ({"role": "user", "content": task.id}, {"role": "assistant", "content": f"{seed} {noise}"}), Score(1.0)

    def prepare(
        self, tasks: Sequence[Task], *, workers: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> None: ...


class EchoEpisode(Environment):
    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.heard: list[str] = []

    async def reset(self) -> Observation:
        return self.seen()

    async def step(self, message: Message) -> Observation:
        self.heard.append(str(message["content"]))
        return replace(self.seen(), reward=-0.25)

    async def conclude(self, stop: StopReason) -> Score | None:
        return Score(float(len(self.heard)), explanation=stop.value)

    def seen(self) -> Observation:
        text = "|".join(self.heard)
        done = len(self.heard) >= self.turns
        score = Score(float(len(self.heard)))
        return Observation(
            ({"role": "user", "content": text},), done, score, state=f"after {text}", tools=(tool("say"),)
        )


def tool(name: str) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


class Stuck(Echo):
    """A taskset whose method `tasks` blocks for 10 minutes."""

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        time.sleep(600)
        return []


# --- a server in this process -------------------------------------------------------------------
@asynccontextmanager
async def serving(
    taskset: Taskset,
    limits: Limits | None = None,
    *,
    workers: int = 0,
    timeout_s: float = 30.0,
    token: str | None = None,
    port: int = 0,
    options: dict[str, Any] | None = None,
    listen: bool = True,
    hosts: frozenset[str] | None = None,
    openenv: bool = False,
) -> AsyncIterator[tuple[Service, str]]:
    """Run a service on this event loop. Yields the service and its URL.

    Without ``listen``, no socket is opened, and the service can only be used by ASGI clients.
    """
    settings = EnvironmentSettings(name="here", options=options or {}, workers=workers, timeout_s=timeout_s)
    stop, ready = asyncio.Event(), asyncio.Event()
    async with EnvironmentPool(taskset, workers=workers, timeout_s=timeout_s) as pool:
        made = Service(taskset, pool, settings, limits or Limits(), token=token, hosts=hosts, openenv=openenv)
        if not listen:
            try:
                yield made, "http://here"
            finally:
                await made.close()
            return
        with Place(port=port).bind() as listening:
            running = asyncio.ensure_future(run_server(made, listening, stop, ready.set))
            await ready.wait()
            try:
                yield made, f"http://127.0.0.1:{listening.getsockname()[1]}"
            finally:
                stop.set()
                await running
                await made.close()


async def client_of(url: str, **options: Any) -> ServiceTaskset:
    """Return the client's taskset. It is made in a thread, because the server runs on this event loop."""
    return await asyncio.to_thread(ServiceTaskset, url=url, **options)


# --- a server in another process ----------------------------------------------------------------
@contextmanager
def served(
    name: str, *arguments: str, port: int = 0, token: bool = False
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `gleanrl serve-env` and yield its process and URL. It is killed at the end if it still runs."""
    command = [sys.executable, "-m", "gleanrl", "serve-env", name, "--port", str(port), "--workers", "1", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))), "SERVICE_TOKEN": TOKEN}
    command += ["--token", "env:SERVICE_TOKEN"] if token else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://\S+", said)
        assert found is not None, said + (process.stderr.read() if process.stderr else "")
        yield process, found[0]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()


# --- an unreliable connection -------------------------------------------------------------------
class Line:
    """A TCP proxy in front of a server that drops connections.

    ``cut(n)`` returns the fate of the ``n``-th request. The connection is dropped "before" the request is forwarded,
    "meanwhile" (directly after it was forwarded) or "after" the server's response. All other requests succeed.
    """

    def __init__(self, url: str, cut: Callable[[int], str]) -> None:
        self._port = int(url.rpartition(":")[2])
        self._cut = cut
        self.requests = 0
        self.lost = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = None, None
        try:
            while True:
                request = await _message(reader)
                number, self.requests = self.requests, self.requests + 1
                fate = self._cut(number)
                if fate == "before":
                    break
                if back is None:
                    onward, back = await asyncio.open_connection("127.0.0.1", self._port)
                assert onward is not None
                back.write(request)
                if fate == "meanwhile":
                    await asyncio.sleep(0)
                    break
                answer = await _message(onward)
                if fate == "after":
                    break
                writer.write(answer)
            self.lost += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
            if back is not None:
                back.transport.abort()


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return head + (await reader.readexactly(int(length[1])) if length else b"")
