"""`gleanrl serve-env` as a process: signals and shutdown, its OpenAPI document, and a thousand concurrent episodes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gleanrl.environments.pool import EnvironmentDied
from gleanrl.environments.service.app import default_memory
from gleanrl.environments.service.client import ServiceTaskset, Unanswered
from gleanrl.types import Message, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.place import Place
from tests.environments.service.world import ROOT, TOKEN, served
from tests.environments.test_pool import gone
from tests.strategies import NIGHTLY

ECHO = "tests.environments.service.world:Echo"
TROUBLESOME = "tests.environments.troublesome:Troublesome"


def asked(url: str, path: str) -> Any:
    request = urllib.request.Request(url + path, headers={"authorization": f"Bearer {TOKEN}"})
    return json.loads(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30).read())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_and_its_workers_and_closes_the_environments(number: int, tmp_path: Path) -> None:
    with served(TROUBLESOME, "--environment.options.marks", str(tmp_path)) as (process, url):
        taskset = ServiceTaskset(url=url)

        async def begin() -> None:
            environment = taskset.environment(Task("left-open"))
            await environment.reset()
            waiting = asyncio.ensure_future(taskset.environment(Task("slow", payload={"reset": "await 600"})).reset())
            await asyncio.sleep(0.2)
            process.send_signal(number)
            waiting.cancel()

        profile = asked(url, "/profile")
        # The server was started without --max-memory.
        assert 0 < profile["max_memory_mib"] == pytest.approx(default_memory())
        pids = profile["workers"]
        asyncio.run(begin())
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "Traceback" not in err
        assert err.endswith("gleanrl: the server has ended\n")
        assert out == ""
        assert (tmp_path / "left-open").read_text() == "closed"
        assert gone(pids)


@pytest.mark.heavy
def test_an_environment_that_blocks_its_worker_does_not_delay_shutdown() -> None:
    with served(TROUBLESOME, "--workers", "1") as (process, url):
        taskset = ServiceTaskset(url=url, patience_s=0.1)

        async def begin() -> None:
            blocked = asyncio.ensure_future(taskset.environment(Task("t", payload={"reset": "block 50"})).reset())
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGINT)
            with pytest.raises(EnvironmentDied, match="the server is shutting down"):
                await blocked

        began = time.monotonic()
        asyncio.run(begin())
        process.communicate(timeout=30)
        assert process.returncode == 0
        assert time.monotonic() - began < 25.0


def test_a_taskset_call_that_blocks_does_not_delay_shutdown() -> None:
    with served("tests.environments.service.world:Stuck") as (process, url):
        taskset = ServiceTaskset(url=url, patience_s=0.1)

        async def ask() -> None:
            asking = asyncio.ensure_future(taskset.client.ask("/tasks", {"split": "train", "count": 1}))
            # Gives the server time to begin the call of the taskset.
            await asyncio.sleep(0.5)
            environment = taskset.environment(Task("t"))
            # The blocked call does not block the server's event loop.
            await environment.reset()
            process.send_signal(signal.SIGINT)
            with pytest.raises(Unanswered, match="the server is shutting down"):
                await asking

        asyncio.run(ask())
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert err == "gleanrl: the server has ended\n"


def test_an_address_that_one_server_has_bound_cannot_be_bound_by_another() -> None:
    """Also before the first server answers requests."""
    with Place(port=0).bind() as first, pytest.raises(UserError, match="cannot listen"):
        Place(port=first.getsockname()[1]).bind()


def test_a_signal_during_startup_ends_the_server() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    command = [sys.executable, "-X", "importtime", "-m", "gleanrl", "serve-env", ECHO, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            # This is the last module that is imported. The workers are started next.
            if "gleanrl.environments.service.server" in line:
                break
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    # The signal kills the process if its handlers are not installed yet.
    assert process.returncode in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_the_server_conforms_to_its_openapi_document(tmp_path: Path) -> None:
    """schemathesis runs all its checks with valid and invalid data, and with sequences of requests."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "SCHEMATHESIS_HOOKS": "tests.environments.service.schemathesis_hooks",
    }
    with served(ECHO, token=True) as (process, url):
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", "all"]
        command += ["-H", f"Authorization: Bearer {TOKEN}", "--max-examples", "12" if NIGHTLY else "4"]
        command += ["--seed", "1", "--no-color"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert process.poll() is None
    assert "Stateful" in done.stdout
    assert re.search(r"API Links: +[1-9]", done.stdout)


@pytest.mark.slow
def test_of_a_thousand_concurrent_episodes_fifty_are_played_to_their_end() -> None:
    """The episodes are on ALFWorld households, over HTTP, all alive at the same time.

    One of each household replays a whole demonstration, and the others only its first step.
    """
    episodes, households = 1000, 50
    with served("alfworld", "--max-instances", str(episodes)) as (process, url):
        taskset: Any = ServiceTaskset(url=url, timeout_s=60.0)
        tasks = taskset.tasks("train", households)
        shown = [taskset.demonstrate(task, seed=0) for task in tasks]
        begun, barrier = Counter[str](), asyncio.Event()

        async def play(number: int) -> None:
            conversation, score = shown[number % households]
            whole, exchanges = number < households, pairs(conversation)
            environment = taskset.environment(tasks[number % households])
            seen = await environment.reset()
            begun["episodes"] += 1
            if begun["episodes"] == episodes:
                barrier.set()
            await barrier.wait()
            for said, answer in exchanges if whole else exchanges[:1]:
                assert seen.messages[-1]["content"] == said["content"]
                seen = await environment.step(answer)
            if whole:
                assert seen.done
                assert seen.score == score
                assert score.value == 1.0
            else:
                assert seen.messages[-1]["content"] == exchanges[1][0]["content"]
            await environment.close()

        async def all_at_once() -> None:
            async with asyncio.timeout(60):
                playing = [asyncio.ensure_future(play(number)) for number in range(episodes)]
                await barrier.wait()
                begun["alive"] = (await taskset.client.ask("/profile"))["instances"]
                await asyncio.gather(*playing)

        began = time.perf_counter()
        asyncio.run(all_at_once())
        assert time.perf_counter() - began < 60.0
        assert begun["alive"] == episodes
        profile = asked(url, "/profile")
        assert (profile["instances"], profile["created"], profile["failed"]) == (0, episodes, 0)
        assert process.poll() is None


def pairs(conversation: tuple[Message, ...]) -> list[tuple[Message, Message]]:
    """Return the pairs of an observation and the expert's message that answers it."""
    return list(zip(conversation[::2], conversation[1::2], strict=True))
