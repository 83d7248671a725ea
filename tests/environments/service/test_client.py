"""The taskset behind a service, over connections that break, servers that are replaced, and pools."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.pool import (
    EnvironmentDied,
    EnvironmentFailure,
    EnvironmentPool,
    EnvironmentRaised,
    EnvironmentTimeout,
)
from gleanrl.environments.service import client as http
from gleanrl.environments.service.app import Limits
from gleanrl.environments.service.client import ServiceTaskset
from gleanrl.protocols import EpisodeLost, Observation
from gleanrl.types import Message, Score, StopReason, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import RetryPolicy
from tests.environments.service.world import TOKEN, Echo, Line, client_of, served, serving
from tests.environments.troublesome import Troublesome
from tests.strategies import examples


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


@pytest.fixture(autouse=True)
def _new_clients() -> None:
    http.get_client.cache_clear()


def test_it_is_the_taskset_that_is_served() -> None:
    async def body() -> None:
        async with serving(Echo()) as (_, url):
            client = await client_of(url)
            assert client.has_expert
            assert client.weights
            assert (client.phrases, client.needs_reward, client.weights) == (Echo.phrases, True, Echo.weights)
            assert list(client.weights) == ["b", "a"]  # in order: a curriculum takes them as levels
            tools = await asyncio.to_thread(client.tools, Task("t"))
            assert tools == Echo().tools(Task("t"))
            tasks = await asyncio.to_thread(client.tasks, "eval", 5)
            assert tasks == Echo().tasks("eval", 5)
            shown = await asyncio.to_thread(lambda: client.demonstrate(tasks[0], seed=3, noise=0.5))
            assert shown == Echo().demonstrate(tasks[0], seed=3, noise=0.5)
            done: list[tuple[int, int]] = []
            await asyncio.to_thread(lambda: client.prepare(tasks, progress=lambda *at: done.append(at)))
            assert done[-1] == (5, 5)
            here, there = Echo().environment(tasks[0]), client.environment(tasks[0])
            assert await there.reset() == await here.reset()
            for text in ("look", "ünïcode \U0001f600", ""):
                assert await there.step(say(text)) == await here.step(say(text))
            with pytest.raises(RuntimeError, match="reset once"):
                await there.reset()
            assert await there.conclude(StopReason.MAX_TURNS) == Score(3.0, explanation="max_turns")
            await there.close()
            with pytest.raises(RuntimeError, match="reset before step"):
                await there.step(say("x"))

    asyncio.run(body())


def test_a_taskset_without_an_expert_has_none_here_either() -> None:
    async def body() -> None:
        async with serving(Troublesome()) as (_, url):
            client = await client_of(url)
            assert not client.has_expert
            assert not client.weights
            assert (client.phrases, client.needs_reward, client.tools(Task("t"))) == ((), False, ())
            environment: Any = client.environment(Task("t"))
            await environment.reset()
            assert await environment.conclude(StopReason.CONTEXT_FULL) is None

    asyncio.run(body())


def test_failures_are_those_of_the_pool_in_the_server() -> None:
    async def body() -> None:
        async with serving(Troublesome(), workers=1, timeout_s=1.0) as (_, url):
            client = await client_of(url)
            async with EnvironmentPool(client) as pool:

                async def heard(order: str) -> None:
                    environment = pool.environment(Task("bad"))
                    await environment.reset()
                    try:
                        await environment.step(say(order))
                    finally:
                        await environment.close()

                with pytest.raises(EnvironmentRaised, match=r"task 'bad': ValueError: no such door") as caught:
                    await heard("raise no such door")
                assert (caught.value.kind, caught.value.detail) == ("ValueError", "no such door")
                assert "in obey" in caught.value.traceback_text
                with pytest.raises(UserError, match="put the file there"):
                    await heard("mistake put the file there")
                with pytest.raises(EnvironmentTimeout, match=r"task 'bad': step took over 1 s"):
                    await heard("await 600")
                with pytest.raises(EnvironmentDied, match="was killed by SIGKILL"):
                    await heard("kill")
                await heard("go on")

    asyncio.run(body())


def test_it_works_in_worker_processes_too() -> None:
    async def body() -> None:
        async with serving(Troublesome()) as (service, url):
            client = pickle.loads(pickle.dumps(await client_of(url)))
            async with EnvironmentPool(client, workers=1) as pool:
                kept, environment = pool.environment(Task("kept")), pool.environment(Task("t"))
                await kept.reset()
                await environment.reset()
                assert (await environment.step(say("hi"))).messages[0]["content"] == "t: hi"
                await environment.close()
                assert service.episodes.live == 1
                await service.episodes.close()  # as a restarted server
                with pytest.raises(EpisodeLost, match="no episode"):
                    await kept.step(say("?"))

    asyncio.run(body())


def test_a_server_that_is_gone_loses_its_episodes_and_one_that_stays_away_fails_them() -> None:
    async def body() -> None:
        async with serving(Echo()) as (_, url):
            client = await client_of(url, patience_s=2.0)
            episodes = [client.environment(Task(f"t{i}")) for i in range(3)]
            for episode in episodes:
                await episode.reset()
        port = int(url.rpartition(":")[2])
        away = asyncio.ensure_future(episodes[0].step(say("while the server is away")))
        await asyncio.sleep(0.3)
        async with serving(Echo(), port=port):
            with pytest.raises(EpisodeLost, match="restarted"):
                await away
            again = client.environment(Task("t0"))
            await again.reset()
            assert (await again.step(say("from the start"))).messages[0]["content"] == "from the start"
        with pytest.raises(EnvironmentDied, match=r"no answer from http://127.0.0.1:.* for 2 s"):
            await episodes[1].step(say("x"))
        await episodes[2].close()  # never raises

    asyncio.run(body())


def test_a_full_server_is_waited_for() -> None:
    async def body() -> None:
        async with serving(Echo(), Limits(max_instances=1)) as (service, url):
            client = await client_of(url, patience_s=5.0)
            first, second = client.environment(Task("a")), client.environment(Task("b"))
            await first.reset()
            waiting = asyncio.ensure_future(second.reset())
            while not service.episodes.counts.refused:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await first.close()
            await waiting
            impatient = await client_of(url, patience_s=0.5)
            with pytest.raises(EnvironmentDied, match=r"1 episodes live here already \(--max-instances\)"):
                await impatient.environment(Task("c")).reset()

    asyncio.run(body())


def test_another_environment_at_the_same_address_is_refused() -> None:
    async def body() -> None:
        async with serving(Echo(), options={"rooms": 3}) as (_, url):
            client = await client_of(url)
        async with serving(Echo(), options={"rooms": 4}, port=int(url.rpartition(":")[2])):
            with pytest.raises(UserError, match="with other options than expected"):
                await client.environment(Task("a")).reset()

    asyncio.run(body())


def test_keys_of_a_message_that_no_type_knows_travel() -> None:
    class Odd(Echo):
        def environment(self, task: Task) -> Any:
            made = super().environment(task)
            made.seen = lambda: Observation(
                ({"role": "user", "content": "?", "more": [1.5]},), info={"nested": {"a": 1}}
            )
            return made

    async def body() -> None:
        async with serving(Odd()) as (_, url):
            task = Task("t", prompt=({"role": "user", "content": "x", "more": 2},), payload={"p": [1]})  # type: ignore[typeddict-unknown-key]
            here, there = Odd().environment(task), (await client_of(url)).environment(task)
            assert await there.reset() == await here.reset()
            message: Any = {"role": "assistant", "content": "x", "more": None}
            assert await there.step(message) == await here.step(message)

    asyncio.run(body())


@settings(max_examples=examples(10), phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32), st.sampled_from([0.2, 0.5]))
def test_over_a_line_that_breaks_nothing_is_lost_or_doubled(seed: int, share: float) -> None:
    """Episodes through a proxy that loses requests before, while and after the server works on them."""
    draw = random.Random(seed)
    fates = [draw.choice(["before", "meanwhile", "after"]) if draw.random() < share else "" for _ in range(4000)]

    async def play(client: Any, number: int) -> None:
        environment = client.environment(Task(f"t{number}"))
        await environment.reset()
        for step in range(6):
            seen = await environment.step(say(f"{number}.{step}"))
            heard = seen.messages[0]["content"].partition(": ")[2].split()
            assert heard == [f"{number}.{i}" for i in range(step + 1)]
        await environment.close()

    async def body() -> None:
        async with serving(Troublesome()) as (service, url):
            line = Line(url, lambda number: fates[number])
            async with line.open() as through:
                http.get_client.cache_clear()
                client = await client_of(through, patience_s=60.0)
                await asyncio.gather(*(play(client, number) for number in range(8)))
            assert line.lost > 0
            assert service.episodes.counts.created == 8
            assert service.episodes.counts.failed == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http, "RETRIES", RetryPolicy(attempts=None, backoff_s=0.001, max_backoff_s=0.01))
        asyncio.run(body())


def test_an_episode_that_is_given_up_while_it_begins_leaves_nothing_behind() -> None:
    async def body() -> None:
        async with serving(Troublesome()) as (service, url):
            async with EnvironmentPool(await client_of(url), timeout_s=0.2) as pool:
                environment = pool.environment(Task("slow", payload={"reset": "await 600"}))
                with pytest.raises(EnvironmentTimeout):
                    await environment.reset()
                await environment.close()
            assert service.episodes.live == 0

    asyncio.run(body())


def load(**options: Any) -> Any:
    return load_taskset(EnvironmentSettings(name="service", options=options), seed=0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "environment.options.url: 'service' needs it"),
        ({"url": "127.0.0.1:8765"}, "environment.options.url: give an address"),
        ({"url": "http://127.0.0.1:9"}, "environment.options.url: no answer from http://127.0.0.1:9 for 0.2 s"),
        ({"url": "http://key:x@127.0.0.1:9"}, "environment.options.url: the address holds a key"),
        ({"url": "http://127.0.0.1:9", "token": "abc"}, 'environment.options.token: write "env:NAME"'),
        ({"url": "http://127.0.0.1:9", "token": "env:NOT_SET"}, "the environment variable NOT_SET is not set"),
        ({"url": "http://127.0.0.1:9", "tokn": "x"}, "environment.options.tokn: 'service' has no such option"),
    ],
)
def test_a_mistake_is_one_clear_line(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load(**({"patience_s": 0.2} if options else {}), **options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_token_or_a_foreign_server_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_TOKEN", "wrong-0123456789")
    monkeypatch.setenv("RIGHT_TOKEN", TOKEN)

    async def body() -> None:
        async with serving(Echo(), token=TOKEN) as (_, url):
            with pytest.raises(UserError, match=r"options.token: .*: the token is another one \(that of env:OTHER"):
                await client_of(url, token="env:OTHER_TOKEN")
            with pytest.raises(UserError, match=r'a token is needed.*; set environment.options.token = "env:NAME"'):
                await client_of(url)
            client = await client_of(url, token="env:RIGHT_TOKEN")
            await client.environment(Task("t")).reset()
            assert TOKEN.encode() not in pickle.dumps(client)

    async def foreign(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n<html/>")
        await writer.drain()
        writer.close()

    async def elsewhere() -> None:
        async with await asyncio.start_server(foreign, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(UserError, match=r"options.url: .*<html/>"):
                await client_of(url)

    asyncio.run(body())
    asyncio.run(elsewhere())


def test_what_cannot_be_sent_is_a_failure_that_says_so() -> None:
    async def body() -> None:
        async with serving(Echo()) as (_, url):
            environment = (await client_of(url)).environment(Task("t"))
            await environment.reset()
            with pytest.raises(EnvironmentFailure, match="a value of type object"):
                await environment.step({"role": "assistant", "content": "", "tool_calls": object()})  # type: ignore[typeddict-item]

    asyncio.run(body())


def test_a_forked_process_has_a_client_of_its_own() -> None:
    with served("tests.environments.service.world:Echo") as (_, url):
        taskset = ServiceTaskset(url=url)
        taskset.tasks("train", 1)
        forked = multiprocessing.get_context("fork").Process(target=lambda: taskset.tasks("train", 1))
        forked.start()
        forked.join(30)
        assert forked.exitcode == 0
