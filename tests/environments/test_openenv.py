"""The OpenEnv client: conversion of text to actions and of observations to text, options, and real OpenEnv servers.

The tests in `TestServers` need the package openenv (make openenv).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gleanrl.cli.main import main
from gleanrl.config.settings import EnvironmentSettings, ModelSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.adapters.openenv import Lost, describe, to_action
from gleanrl.learners.tiny import build_model, build_tokenizer
from gleanrl.protocols import Observation, Taskset
from gleanrl.rollout.tool_calls import Call, call_message
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import Message
from gleanrl.utils.errors import UserError
from tests.environments.service.world import served

HERE = Path(__file__).parent
NUMBER = {"properties": {"number": {"type": "integer"}, "metadata": {}}, "required": ["number"]}


def taskset(url: str, **options: Any) -> Taskset:
    return load_taskset(EnvironmentSettings(name="openenv", options={"url": url, **options}), seed=0)


def said(content: str, **fields: Any) -> Message:
    return Message(role="assistant", content=content, **fields)


# --- actions, observations and options ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("I take 7, no, -8.", {"number": -8}),
        ("<think>7?</think> 8.0", {"number": 8}),
        ("between 2-3", {"number": 3}),
        ("x=\u22123", {"number": -3}),
        ('{"number": 3, "metadata": {"why": "so"}}', {"number": 3, "metadata": {"why": "so"}}),
        ('```json\n{"number": 4}\n```', {"number": 4}),
    ],
)
def test_the_last_number_or_a_json_object_in_a_message_is_the_action(text: str, action: dict[str, Any]) -> None:
    assert to_action(said(text), NUMBER) == action


def test_text_fills_an_action_of_one_text_field_and_json_fills_several_fields() -> None:
    one = {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["message"]}
    two = {"properties": {"name": {}, "arguments": {}}, "required": ["name", "arguments"]}
    assert to_action(said(" hello, {you} \n"), one) == {"message": "hello, {you}"}
    assert to_action(said('{"name": "a", "arguments": 1}'), two) == {"name": "a", "arguments": 1}
    with pytest.raises(ValueError, match="JSON object with name, arguments"):
        to_action(said("go"), two)
    with pytest.raises(ValueError, match="number is a number"):
        to_action(said("seven"), NUMBER)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"number": ' * 100_000, "9" * 400, "9" * 5000])
def test_text_that_no_parser_accepts_raises_a_value_error(text: str) -> None:
    for kind in ("integer", "number"):
        with pytest.raises(ValueError, match="number is a number"):
            to_action(said(text), {"properties": {"number": {"type": kind}}})


def test_describe_shows_prompt_messages_or_fields_of_an_observation() -> None:
    talk = {"prompt": "Rules.", "messages": [{"sender_id": 0, "content": "Go."}], "metadata": {"x": 1}}
    assert describe(talk, True) == "Rules.\nGo."
    assert describe(talk, False) == "Go."
    assert describe({"metadata": {"question": "1 + 2"}, "done": False}, True) == "1 + 2"
    assert describe({"echoed_message": "hi", "message_length": 2}, False) == "hi"
    assert json.loads(describe({"board": [[0]], "done": False, "turn": "x", "won": ""}, False)) == {
        "board": [[0]], "turn": "x", "won": ""
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"url": "localhost:8000"}, "url: http://"),
        ({"url": "http://127.0.0.1:1", "resets": []}, "resets: at least one"),
        ({"url": "http://127.0.0.1:1", "action": "json:duumps"}, "dumps"),
        ({"url": "http://127.0.0.1:1", "rewrad": "sum"}, "reward"),
        ({"url": "http://127.0.0.1:1", "token_env": "NO_SUCH_TOKEN"}, "NO_SUCH_TOKEN"),
    ],
)
def test_the_error_for_a_wrong_option_names_the_option(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        load_taskset(EnvironmentSettings(name="openenv", options=options), seed=0).tasks("train", 1)


def test_an_unreachable_server_raises_an_error_with_its_url() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(UserError, match=f"options.url = '{url}'"):
            taskset(url).tasks("train", 1)


def test_ids_depend_on_the_environments_name_and_the_options_not_on_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"http://a": "guess", "http://b": "guess", "http://c": "", "http://d": ""}
    monkeypatch.setattr(
        "gleanrl.environments.adapters.openenv.fetch_description",
        lambda url, token, path, *_: {"name": names[url]} if path == "/metadata" else None,
    )
    ids = {url: [task.id for task in taskset(url).tasks("train", 9)] for url in names}
    # Both servers have an environment of the same name, which is taken to be the same environment at another address.
    assert ids["http://a"] == ids["http://b"]
    # Servers without a name may have different environments, so that their ids must differ.
    assert not set(ids["http://c"]) & set(ids["http://d"])
    for options in ({"reward": "last"}, {"action": "json:loads"}, {"observe": "json:dumps"}):
        other = taskset("http://a", **options).tasks("train", 9)
        assert not {task.id for task in other} & set(ids["http://a"])
        plain = taskset("http://a").tasks("train", 9)
        assert [task.payload["reset"] for task in other] == [task.payload["reset"] for task in plain]


def test_all_resets_of_a_list_are_found_although_it_repeats_one_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gleanrl.environments.adapters.openenv.fetch_description", lambda *_: {"name": "guess"})
    source = taskset("http://a", resets=[{"seed": 0}] * 700 + [{"seed": seed} for seed in range(60)])
    assert [len(source.tasks(split, 3)) for split in ("train", "eval", "warm_start")] == [3, 3, 3]


# --- servers ----------------------------------------------------------------------------------------------
needs_package = [
    pytest.mark.openenv,
    pytest.mark.skipif(find_spec("openenv") is None, reason="openenv is not installed here: make openenv"),
]


@contextmanager
def serving(app: str, folder: Path) -> Iterator[str]:
    """Run a server of ``app`` and return its URL.

    The socket listens before the server starts, so that early connections wait and are not refused.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-m", "uvicorn", app, "--fd", str(listener.fileno()), "--log-level", "warning"]
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        server = subprocess.Popen(command, cwd=folder, env=environment, pass_fds=[listener.fileno()])
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=120) as answer:
            assert json.load(answer) == {"status": "healthy"}
        yield url
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a server with the environment that `openenv init` generates.

    The environment echoes the message, its reward grows with the length, and it allows one session at a time.
    """
    folder = tmp_path_factory.mktemp("openenv")
    command = [sys.executable, "-m", "openenv.cli", "init", "parrot_env"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    with serving("parrot_env.server.app:app", folder) as url:
        yield url


@pytest.fixture(scope="module")
def guess() -> Iterator[str]:
    with serving("openenv_servers:guess", HERE) as url:
        yield url


@pytest.fixture(scope="module")
def sums() -> Iterator[str]:
    with serving("openenv_servers:sums", HERE) as url:
        yield url


@pytest.fixture(scope="module")
def listed() -> Iterator[str]:
    with serving("openenv_servers:listed", HERE) as url:
        yield url


def play_episode(source: Taskset, *answers: str | Message, task: int = 0) -> list[Observation]:
    async def talk() -> list[Observation]:
        environment = source.environment(source.tasks("train", task + 1)[task])
        try:
            messages = [said(answer) if isinstance(answer, str) else answer for answer in answers]
            return [await environment.reset(), *[await environment.step(message) for message in messages]]
        finally:
            await environment.close()

    return asyncio.run(talk())


def scores(observations: list[Observation]) -> list[float | None]:
    return [None if o.score is None else round(o.score.value, 6) for o in observations]


class TestServers:
    pytestmark = needs_package

    def test_an_episode_on_the_generated_environment_has_its_texts_and_rewards(self, parrot: str) -> None:
        heard = play_episode(taskset(parrot), "hi there", "a longer answer")
        assert [o.messages[0]["content"] for o in heard][1:] == ["hi there", "a longer answer"]
        assert "ready" in heard[0].messages[0]["content"]
        assert scores(heard) == [0.0, 0.8, 1.8]
        assert [o.reward for o in heard] == [None, pytest.approx(0.8), pytest.approx(1.0)]
        last = play_episode(taskset(parrot, reward="last"), "hi there", "yes")
        assert (scores(last), [o.reward for o in last]) == ([0.0, 0.8, 0.3], [None] * 3)

    def test_more_sessions_than_the_server_allows_raise_until_one_closes(self, parrot: str) -> None:
        source = taskset(parrot)
        first, second, third = (source.environment(task) for task in source.tasks("train", 3))

        async def episodes() -> str:
            await first.reset()
            with pytest.raises(UserError, match=r"max_concurrent_envs.*sampler\.max_rows"):
                await second.reset()
            await second.close()
            _, observation = await asyncio.gather(first.close(), third.reset())
            await third.close()
            return observation.messages[0]["content"]

        assert "ready" in asyncio.run(episodes())

    def test_a_message_that_is_no_valid_action_gets_an_error_text(self, guess: str) -> None:
        source = taskset(guess, reset={"highest": 4})
        seed = source.tasks("train", 1)[0].payload["reset"]["seed"]
        opening, lost, refused, wrong, end = play_episode(source, "no idea", '{"number": "x"}', "0", str(seed % 4 + 1))
        assert opening.messages[0]["content"] == "Guess a number.\nBetween 1 and 4."
        assert lost.messages[0]["content"] == "error: number is a number"
        assert refused.messages[0]["content"].startswith("error: number: Input should be a valid integer")
        assert wrong.messages[0]["content"] == "higher"
        assert (end.done, end.messages[0]["content"]) == (True, "right")
        assert scores([opening, lost, refused, wrong, end]) == [None, None, None, -0.25, 0.75]

    def test_an_error_in_the_environment_ends_the_episode(self, guess: str) -> None:
        with pytest.raises(Lost, match="the engine broke"):
            play_episode(taskset(guess), "666")

    def test_tools_of_a_tool_server_are_declared_and_called(self, sums: str) -> None:
        source = taskset(sums)
        calls = [call_message(Call("add", arguments), n) for n, arguments in enumerate([{"a": 1, "b": 2}, '{"a": '])]
        wrong = call_message(Call("add", {"a": "one", "b": 2}), 7)
        opening, heard, refused, end = play_episode(
            source, said("", tool_calls=calls), said("", tool_calls=[wrong]), "It is three."
        )
        assert opening.messages[0]["content"] == "1 + 2"
        assert [tool["function"]["name"] for tool in opening.tools] == ["add"]
        assert sorted(opening.tools[0]["function"]["parameters"]["properties"]) == ["a", "b"]
        assert [m["tool_call_id"] for m in heard.messages] == ["call00000", "call00001"]
        assert heard.messages[0]["content"] == "3"
        assert heard.messages[1]["content"].startswith("error: ")
        assert refused.messages[0]["content"].startswith("error: ")
        assert (heard.done, end.done, end.messages) == (False, True, ())

    def test_user_defined_action_and_observe_functions_are_used(self, guess: str, tmp_path: Path) -> None:
        own = tmp_path / "own.py"
        own.write_text(
            "def act(message, schema):\n"
            "    if message['content'] == 'pass':\n        raise ValueError('one may not pass')\n"
            "    return {'number': len(message['content'])}\n\n"
            "def observe(observation, opening):\n"
            "    return [{'role': 'user', 'content': observation['messages'][0]['content'].upper()}]\n"
        )
        source = taskset(guess, action=f"{own}:act", observe=f"{own}:observe", resets=[{"seed": n} for n in range(40)])
        opening, refused, wrong = play_episode(source, "pass", "")
        assert opening.messages[0]["content"] == "BETWEEN 1 AND 10."
        assert refused.messages[0]["content"] == "error: one may not pass"
        assert wrong.messages[0]["content"] == "HIGHER"

    def test_a_model_can_be_trained_on_an_openenv_server(
        self, parrot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        tokenizer = build_tokenizer(["Parrot environment ready!", "hello you there"], 160)
        settings = ModelSettings(hidden_size=32, layers=2, max_context=256)
        build_model(settings, tokenizer, seed=0).save_pretrained("model")
        tokenizer.save_pretrained("model")
        Path("parrot.toml").write_text(
            f"""
run = {{ name = "parrot", steps = 2, threads = 1 }}
model = {{ init = "model", max_context = 256 }}
warm_start = {{ enabled = false }}
context = {{ max_turns = 2, max_tokens_per_turn = 4 }}
schedule = {{ batch = 2, group = 3 }}
sampler = {{ max_rows = 1 }}
evaluation = {{ every = 0, at_start = false, samples = 1 }}
environment = {{ name = "openenv", train_tasks = 4, eval_tasks = 2, options = {{ url = "{parrot}" }} }}
"""
        )
        assert main(["train", "parrot.toml"]) == 0
        rows = [row.metrics for row in RunFolder("runs/parrot").read_metrics()]
        assert len(rows) == 2
        assert all(row["stop/max_turns"] == row["reward/valid"] == 1.0 for row in rows)
        assert all(row["reward/mean"] > 0 and row["learner/grad_norm"] > 0 for row in rows)

    def test_tasks_are_deterministic_and_splits_share_none(self, guess: str) -> None:
        source = taskset(guess)
        splits = [source.tasks(split, 12) for split in ("train", "warm_start", "eval")]
        assert len({task.id for tasks in splits for task in tasks}) == 36
        assert [task.id for task in taskset(guess).tasks("eval", 12)] == [task.id for task in splits[2]]
        assert splits[0][0].id.startswith("GuessEnvironment-")

    def test_tasks_that_a_server_lists_are_taken_from_its_splits(self, listed: str) -> None:
        source = taskset(listed)
        taken = {split: source.tasks(split, count) for split, count in (("train", 2), ("eval", 3), ("warm_start", 1))}
        resets = {split: [task.payload["reset"] for task in tasks] for split, tasks in taken.items()}
        assert resets["eval"] == [{"split": "test", "index": index} for index in range(3)]
        own = [tuple(reset.values()) for split in ("train", "warm_start") for reset in resets[split]]
        assert {split for split, _ in own} == {"train"}
        assert len(set(own)) == 3
        assert play_episode(source, task=1)[0].messages[0]["content"] == "Guess a number.\ntrain {}".format(
            resets["train"][1]["index"]
        )
        with pytest.raises(UserError, match="found 3"):
            source.tasks("eval", 4)

    def test_openenvs_own_client_plays_what_this_project_serves(self) -> None:
        from openenv import GenericEnvClient

        arguments = ("--openenv", "--environment.options.receptacles", "[5, 6]")
        with served("alfworld", *arguments) as (_, url), GenericEnvClient(base_url=url) as client:
            opened = client.reset(split="eval", index=1)
            tasks = load_taskset(EnvironmentSettings(name="alfworld", options={"receptacles": [5, 6]}), seed=0)
            messages, score = tasks.demonstrate(tasks.tasks("eval", 2)[1], seed=0)
            assert (
                opened.observation["messages"][-1]["content"]
                == messages[len(opened.observation["messages"]) - 1]["content"]
            )
            rewards, done = [opened.reward or 0.0], False
            for message in messages:
                if message["role"] == "assistant":
                    assert not done
                    result = client.step({"message": message["content"]})
                    rewards.append(result.reward or 0.0)
                    done = result.done
            assert done
            assert sum(rewards) == score.value == 1.0
            with pytest.raises(RuntimeError, match="index"):
                client.reset(split="eval", index=10_000)
