"""`ServiceTaskset`, the client of the environment service: episodes, errors, lost connections and restarted servers.

The server runs in this process and is reached over HTTP.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import random
import re
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


def test_the_client_has_the_attributes_tasks_and_episodes_of_the_served_taskset() -> None:
    async def body() -> None:
        async with serving(Echo()) as (_, url):
            client = await client_of(url)
            assert client.has_expert
            assert client.weights
            assert (client.phrases, client.needs_reward, client.weights) == (Echo.phrases, True, Echo.weights)
            # The order is kept, because a curriculum takes the names as levels.
            assert list(client.weights) == ["b", "a"]
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


def test_the_client_of_a_taskset_without_optional_methods_lacks_them_too() -> None:
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


def test_errors_of_the_servers_pool_are_raised_unchanged_in_the_client() -> None:
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
                assert caught.value.kind == "ValueError"
                assert re.fullmatch(r"no such door \(.*troublesome.py:\d+\)", caught.value.detail)
                assert "in obey" in caught.value.traceback_text
                with pytest.raises(UserError, match="put the file there"):
                    await heard("mistake put the file there")
                with pytest.raises(EnvironmentTimeout, match=r"task 'bad': step took over 1 s"):
                    await heard("await 600")
                with pytest.raises(EnvironmentDied, match="was killed by SIGKILL"):
                    await heard("kill")
                await heard("go on")

    asyncio.run(body())


def test_a_pickled_client_works_in_worker_processes() -> None:
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
                # The server loses all episodes, as if it had been restarted.
                await service.episodes.close()
                with pytest.raises(EpisodeLost, match="no episode"):
                    await kept.step(say("?"))

    asyncio.run(body())


def test_a_restarted_server_raises_episode_lost_and_an_absent_one_environment_died() -> None:
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
        # `close` never raises, even without a server.
        await episodes[2].close()

    asyncio.run(body())


def test_reset_waits_while_the_server_is_full_up_to_patience_s() -> None:
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


def test_a_server_with_other_options_at_the_same_address_is_rejected() -> None:
    async def body() -> None:
        async with serving(Echo(), options={"rooms": 3}) as (_, url):
            client = await client_of(url)
        async with serving(Echo(), options={"rooms": 4}, port=int(url.rpartition(":")[2])):
            with pytest.raises(UserError, match="with other options than expected"):
                await client.environment(Task("a")).reset()

    asyncio.run(body())


def test_unknown_keys_of_messages_are_kept_in_both_directions() -> None:
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
def test_over_a_connection_that_breaks_every_step_is_executed_exactly_once(seed: int, share: float) -> None:
    """The proxy drops connections before, while and after the server executes a request."""
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


def test_an_episode_that_times_out_during_reset_is_released_on_the_server() -> None:
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
def test_a_bad_option_raises_a_one_line_error(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load(**({"patience_s": 0.2} if options else {}), **options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_token_or_another_kind_of_server_raises_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_message_that_cannot_be_serialised_raises_with_the_reason() -> None:
    async def body() -> None:
        async with serving(Echo()) as (_, url):
            environment = (await client_of(url)).environment(Task("t"))
            await environment.reset()
            with pytest.raises(EnvironmentFailure, match="a value of type object"):
                await environment.step({"role": "assistant", "content": "", "tool_calls": object()})  # type: ignore[typeddict-item]

    asyncio.run(body())


def test_a_taskset_can_be_used_in_a_forked_process() -> None:
    with served("tests.environments.service.world:Echo") as (_, url):
        taskset = ServiceTaskset(url=url)
        taskset.tasks("train", 1)
        forked = multiprocessing.get_context("fork").Process(target=lambda: taskset.tasks("train", 1))
        forked.start()
        forked.join(30)
        assert forked.exitcode == 0
