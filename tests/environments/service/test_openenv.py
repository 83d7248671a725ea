"""`gleanrl serve-env --openenv`: OpenEnv's clients see the same tasks, observations and scores as the run's process."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.adapters.openenv import OpenEnvTaskset
from gleanrl.environments.service.app import Limits
from gleanrl.protocols import Environment, Observation, Split
from gleanrl.types import Message, Task
from gleanrl.utils.errors import UserError
from tests.environments.service.test_parity import rows
from tests.environments.service.test_serving import ECHO, asked
from tests.environments.service.world import TOKEN, Echo, EchoEpisode, served, serving

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("websockets")


async def played(environment: Environment, messages: list[Message]) -> list[tuple[list[str], bool, float | None]]:
    """Play an episode; return the text, the end and the score of each observation."""
    observations = [await environment.reset()]
    for message in messages:
        observations.append(await environment.step(message))
    await environment.close()
    return [
        (
            "\n".join(m["content"] for m in seen.messages).splitlines(),
            seen.done,
            seen.score.value if seen.score is not None and seen.score.valid else None,
        )
        for seen in observations
    ]


def test_an_openenv_client_plays_what_the_run_would_play(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", 60)
    tasksets: dict[str, dict[str, Any]] = {
        "alfworld": {"receptacles": [5, 6]},
        "dataset": {"path": str(path)},
        ECHO: {"turns": 3},
    }
    counts: list[tuple[Split, int]] = [("train", 6), ("eval", 2), ("warm_start", 2)]
    for name, options in tasksets.items():
        within = load_taskset(EnvironmentSettings(name=name, options=options), seed=0)
        arguments = ["--openenv"]
        for key, value in options.items():
            arguments += [f"--environment.options.{key}", value if isinstance(value, str) else json.dumps(value)]
        for key, number in counts:
            arguments += [f"--environment.{key}_tasks", str(number)]
        with served(name, *arguments) as (_, url):
            there = OpenEnvTaskset(url=url)
            for split, count in counts[: 2 if name == "dataset" else 3]:
                own = within.tasks(split, count)
                listed = there.tasks(split, count)
                assert [task.payload["reset"] for task in listed] == [
                    {"split": split, "index": index} for index in range(count)
                ]
                for index in (0, count - 1):
                    messages: list[Message] = [{"role": "assistant", "content": word} for word in ("one", "2", "three")]
                    if name == "alfworld":
                        talk, _ = within.demonstrate(own[index], seed=0)
                        messages = [message for message in talk if message["role"] == "assistant"]
                    messages = messages[: 1 if name == "dataset" else None]
                    here = asyncio.run(played(within.environment(own[index]), messages))
                    prompt = [line for message in own[index].prompt for line in message["content"].splitlines()]
                    here[0] = ([*prompt, *here[0][0]], *here[0][1:])
                    assert asyncio.run(played(there.environment(listed[index]), messages)) == here
                    assert here[-1][1]
            if name == "alfworld":
                assert here[-1][2] == 1.0
            with pytest.raises(UserError, match="found 6"):
                there.tasks("train", 7)
            described = asked(url, f"/{name.replace('.', '_').replace(':', '_')}/splits")
            assert [split["type"] for split in described] == ["train", "test", "train"]


def test_wrong_messages_get_an_error_and_the_session_goes_on() -> None:
    wrong = [
        "{",
        "[]",
        "{}",
        '{"type": "dance"}',
        '{"type": "step", "data": {"message": "before the reset"}}',
        '{"type": "reset", "data": {"split": "test"}}',
        '{"type": "reset", "data": {"index": 100}}',
        '{"type": "reset", "data": {"index": -1}}',
    ]
    later = ['{"type": "step", "data": {}}', '{"type": "step", "data": {"message": 3}}', '{"type": "step"}']

    async def main() -> None:
        async with (
            serving(Echo(turns=2), Limits(max_instances=1), openenv=True) as (service, url),
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{url}/ws") as socket,
        ):

            async def said(text: str) -> Any:
                await socket.send_str(text)
                return json.loads((await socket.receive()).data)

            for text in wrong:
                assert (await said(text))["type"] == "error"
            assert (await said('{"type": "state"}'))["data"] == {"episode_id": None, "step_count": 0}
            first = await said('{"type": "reset", "data": {"seed": 103, "episode_id": "mine"}}')
            assert first["data"]["observation"]["tools"][0]["function"]["name"] == "say"
            assert (first["data"]["reward"], first["data"]["done"]) == (0.0, False)
            for text in later:
                assert (await said(text))["data"]["code"] == "VALIDATION_ERROR"
            async with session.ws_connect(f"{url}/ws") as other:
                await other.send_str('{"type": "reset"}')
                assert json.loads((await other.receive()).data)["data"]["code"] == "CAPACITY_REACHED"
            heard = [await said('{"type": "step", "data": {"message": "a"}}') for _ in range(3)]
            assert [answer["data"].get("reward") for answer in heard[:2]] == [1.0, 1.0]
            assert heard[1]["data"]["done"]
            assert heard[2]["type"] == "error"  # the episode is over
            again = await said('{"type": "reset"}')
            assert again["data"]["observation"]["messages"] == [{"role": "user", "content": ""}]
            await socket.send_str('{"type": "close"}')
            assert (await socket.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
            async with asyncio.timeout(5):
                while service.episodes.live:  # noqa: ASYNC110 - the server ends the episode
                    await asyncio.sleep(0.01)

    asyncio.run(main())


class Earning(Echo):
    """Episodes of two steps, which earn turn rewards and have a score at the end or none at all."""

    scored = False

    def environment(self, task: Task) -> EchoEpisode:
        scored = self.scored

        class Episode(EchoEpisode):
            def seen(self) -> Observation:
                seen = super().seen()
                return seen if scored and seen.done else replace(seen, score=None)

        return Episode(2)


class Scored(Earning):
    scored = True


@pytest.mark.parametrize(("taskset", "rewards"), [(Earning(), [None, -0.25, -0.25]), (Scored(), [None, -0.25, 2.25])])
def test_turn_rewards_are_rewards_and_those_of_an_episode_sum_to_its_score(
    taskset: Earning, rewards: list[float | None]
) -> None:
    async def main() -> list[float | None]:
        async with (
            serving(taskset, openenv=True) as (_, url),
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{url}/ws") as socket,
        ):
            await socket.send_bytes(b'{"type": "reset"}')  # the protocol has texts
            assert json.loads((await socket.receive()).data)["data"]["code"] == "VALIDATION_ERROR"
            given = []
            for said in ('{"type": "reset"}', *['{"type": "step", "data": {"message": "a"}}'] * 2):
                await socket.send_str(said)
                given.append(json.loads((await socket.receive()).data)["data"]["reward"])
            return given

    assert asyncio.run(main()) == rewards


def test_a_lost_connection_ends_its_episode_and_a_web_page_or_a_wrong_token_gets_no_session() -> None:
    async def main() -> None:
        hosts = frozenset({"127.0.0.1"})
        async with serving(Echo(), openenv=True, hosts=hosts) as (service, url), aiohttp.ClientSession() as session:
            socket = await session.ws_connect(f"{url}/ws", headers={"Origin": url})
            await socket.send_str('{"type": "reset"}')
            await socket.receive()
            assert service.episodes.live == 1
            socket._response.close()  # the connection breaks without a goodbye
            async with asyncio.timeout(5):
                while service.episodes.live:  # noqa: ASYNC110 - the server notices it
                    await asyncio.sleep(0.01)
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect(f"{url}/ws", headers={"Origin": "https://elsewhere.example"})
        async with serving(Echo(), openenv=True, token=TOKEN) as (_, url), aiohttp.ClientSession() as session:
            for headers in ({}, {"Authorization": "Bearer another"}):
                with pytest.raises(aiohttp.WSServerHandshakeError):
                    await session.ws_connect(f"{url}/ws", headers=headers)
            await (await session.ws_connect(f"{url}/ws", headers={"Authorization": f"Bearer {TOKEN}"})).close()
        async with serving(Echo()) as (_, url), aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.WSServerHandshakeError):  # without --openenv there are no sessions
                await session.ws_connect(f"{url}/ws")

    asyncio.run(main())
