"""The environment ``agent`` and its endpoint: scores, failures that cost one trajectory, and refused requests."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gleanrl.algorithms.batch import build
from gleanrl.config.loading import load
from gleanrl.config.settings import ContextSettings, CreditSettings, EnvironmentSettings, LossSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.agent.endpoint import MAX_BODY_BYTES, Endpoint
from gleanrl.environments.agent.taskset import _as_dict
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.protocols import ModelAddress
from gleanrl.rewards.request import Request
from gleanrl.rollout.calls import ModelAnswer, ModelCall
from gleanrl.rollout.conversation import conversation
from gleanrl.rollout.conversations import PolicyModel
from gleanrl.rollout.player import Player, _warn_of_no_answer
from gleanrl.runtime.prepare import make_tasks
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.tracking.monitors import Silent
from gleanrl.types import Group, GroupSpec, Score, StopReason, Task, Trajectory
from gleanrl.utils.errors import UserError
from gleanrl.utils.serialize import decode, encode
from tests.environments.test_pool import gone
from tests.loop_world import renderer
from tests.rollout.test_tool_templates import renderer as templated

aiohttp = pytest.importorskip("aiohttp")

AGENT = """
import asyncio, json, os, time, urllib.request

def solve(task, base_url, api_key, model):
    messages = [{"role": "user", "content": task["prompt"]}]
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    for _ in range(task["turns"]):
        body = json.dumps({"model": model, "messages": messages}).encode()
        request = urllib.request.Request(base_url + "/chat/completions", body, headers)
        messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
        messages.append({"role": "user", "content": "left or right"})
        if "rewards" in task:
            body = json.dumps({"reward": task["rewards"].pop(0)}).encode()
            urllib.request.urlopen(urllib.request.Request(base_url + "/rewards", body, headers))
    match task["then"]:
        case "crash": os.abort()
        case "hang": time.sleep(1000)
        case "raise": raise ValueError("the agent broke")
    return task["then"]

def forces_json(task, base_url, api_key, model):
    body = json.dumps({"messages": [{"role": "user", "content": "left"}], "response_format": {"type": "json_object"}})
    headers = {"Authorization": f"Bearer {api_key}"}
    try:
        urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body.encode(), headers))
    except urllib.error.HTTPError:
        return task["then"]

def in_a_loop(**arguments):
    return asyncio.run(asyncio.to_thread(solve, **arguments))
"""


def play(
    folder: Path,
    *thens: Any,
    turns: int = 2,
    workers: int = 0,
    timeout_s: float = 60.0,
    options: Any = None,
    **more: Any,
) -> list[Trajectory]:
    """Play an episode for each value that the agent is to return, or for each way in which it is to fail, at once."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text('{"prompt": "say left or right", "solution": "left"}\n')
    options = options or {"agent": f"{folder / 'agent.py'}:solve"}
    options = {**options, "tasks": str(folder / "tasks.jsonl")}
    source = load_taskset(EnvironmentSettings(name="agent", options=options), 0)

    async def together() -> list[Trajectory]:
        async with EnvironmentPool(source, workers=workers, timeout_s=timeout_s) as pool:
            sampler = ScriptedSampler(lambda *_: renderer().spoken("left").tolist())
            settings = ContextSettings(max_turns=3)
            player = Player(pool.environment, sampler, renderer(), settings, 1.0, 1000, endpoint=pool.endpoint.open)
            tasks = [
                Task(str(i), payload={"prompt": "say left or right", "turns": turns, "then": then, **more})
                for i, then in enumerate(thens)
            ]
            return await asyncio.gather(*(player.play(task, trajectory_id=task.id, seed=1) for task in tasks))

    return asyncio.run(together())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_agent_costs_its_own_trajectory_only(workers: int, tmp_path: Path) -> None:
    crashed, raised, hung, fine = play(tmp_path, "crash", "raise", "hang", 0.5, workers=workers, timeout_s=4.0)
    assert (fine.score.value, fine.stop, fine.info["turns"]) == (0.5, StopReason.DONE, 2)
    assert [turn.sampled for segment in fine.segments for turn in segment] == [False, True, False, True]
    assert not any(t.score.valid for t in (crashed, raised, hung))
    assert "the agent broke" in str(raised.score.explanation)
    assert "SIGABRT" in str(crashed.score.explanation)
    assert hung.stop is StopReason.TIMEOUT


def test_an_agent_that_never_calls_the_model_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_no_answer.cache_clear()
    play(tmp_path, 0.5)
    assert not caplog.messages
    (silent, _) = play(tmp_path, 0.5, 1.0, turns=0)
    assert (silent.score.value, silent.sampled_tokens) == (0.5, 0)
    assert ["without a call of the model" in message for message in caplog.messages] == [True]


def test_an_agent_whose_calls_are_all_refused_is_logged_once_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_no_answer.cache_clear()
    options = {"agent": f"{tmp_path / 'agent.py'}:forces_json"}
    play(tmp_path, 0.0, 1.0, options=options)
    assert ["refused" in message and "response_format" in message for message in caplog.messages] == [True]


def test_a_sync_agent_may_run_an_event_loop_of_its_own(tmp_path: Path) -> None:
    (played,) = play(tmp_path, 0.5, options={"agent": f"{tmp_path / 'agent.py'}:in_a_loop"})
    assert (played.score.value, played.stop, played.info["turns"]) == (0.5, StopReason.DONE, 2)


def test_an_agent_gets_what_the_options_of_its_tasks_add_to_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?"}\n')

    def prompt(**shown: Any) -> Any:
        data = {"path": str(tmp_path / "rows.jsonl"), "eval_share": 0.0, **shown}
        options = {"command": "true", "tasks": {"name": "dataset", "options": data}}
        return _as_dict(load_taskset(EnvironmentSettings(name="agent", options=options), 0).tasks("train", 1)[0])[
            "prompt"
        ]

    assert (prompt(), prompt(instruction=" Box it.")) == ("1 + 1?", "1 + 1? Box it.")
    shown = prompt(system="Be brief.", few_shot=[["0 + 1?", "1"]])
    assert [message["content"] for message in shown] == ["Be brief.", "0 + 1?", "1", "1 + 1?"]


def test_a_text_is_the_answer_that_a_reward_reads_and_a_limit_has_a_score(tmp_path: Path) -> None:
    (answered,) = play(tmp_path, "in the end: left")
    assert not answered.score.valid
    assert [m["content"] for m in conversation(answered)[-2:]] == ["left", "in the end: left"]
    assert Request.of(Task("0"), answered).response == "in the end: left"
    (repeated,) = play(tmp_path, "left")
    assert [m["role"] for m in conversation(repeated)] == ["user", "assistant"] * 2
    assert answered.info["last_observation"] == [{"role": "assistant", "content": "in the end: left"}]
    (limited,) = play(tmp_path, 1.0, turns=4)
    assert (limited.stop, limited.score.value, limited.info["turns"]) == (StopReason.MAX_TURNS, 0.0, 3)


def test_posted_rewards_are_those_of_the_answers_before_them_and_their_sum_is_the_score(tmp_path: Path) -> None:
    (played,) = play(tmp_path, None, rewards=[0.5, -0.25])
    assert [turn.reward for turn in played.sampled_turns()] == [0.5, -0.25]
    assert played.score.value == 0.25
    for wrong in (float("nan"), "much", None, True):
        (refused,) = play(tmp_path, None, rewards=[wrong, 0.5])
        assert "400" in str(refused.score.explanation)


DELEGATES = """
import json, urllib.request

def solve(task, base_url, api_key, model):
    def post(path, body):
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(base_url + path, json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request))

    def ask(*messages):
        return post("/chat/completions", {"messages": messages})["choices"][0]["message"]

    question = {"role": "user", "content": "say left or right"}
    plan = ask(question)
    ask({"role": "user", "content": "a conversation of its own"})
    post("/rewards", {"reward": 0.5})
    ask(question, plan, {"role": "user", "content": "go on"})
    post("/rewards", {"reward": 1.0})
    return task["then"]
"""


@pytest.mark.parametrize(("estimator", "options"), [("reinforce_plus_plus", {"whiten": False}), ("remax", {})])
def test_a_reward_reaches_all_turns_that_came_before_it_in_time(
    estimator: str, options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "delegates.py").write_text(DELEGATES)
    path = {"agent": f"{tmp_path / 'delegates.py'}:solve"}
    (earned,) = play(tmp_path, None, options=path)
    assert [[turn.reward for turn in s if turn.sampled] for s in earned.segments] == [[None, 1.0], [0.5]]
    assert earned.info["turn_order"] == [0, 2, 1]
    answers = [turn.message for turn in earned.sampled_turns()]
    assert Request.of(Task("0"), earned).messages[-1] is answers[1]  # the last one in time
    for returned in (answers[1]["content"], answers[2]["content"], "another"):
        (told,) = play(tmp_path, returned, options=path)
        assert Request.of(Task("0"), told).response == returned
    earned = decode(encode(earned), Trajectory)  # as a pool keeps it
    greedy = replace(earned, score=Score(0.0))
    group = Group(GroupSpec(Task("0"), 1, greedy=True), (earned,), 0, greedy)
    batch = build([group], CreditSettings(estimator=estimator, options=options), LossSettings(), 1000)
    ends = [sample.advantages[sample.mask][[0, -1]].tolist() for sample in batch.samples]
    assert ends == [[1.5, 1.0], [1.5, 1.5]]


def test_rewards_of_answers_at_once_are_posted_by_the_ids_of_their_responses() -> None:
    asked: dict[str, Any] = {
        "chat/completions": {"messages": [{"role": "user", "content": "say left"}]},
        "responses": {"input": "left"},
        "messages": {"messages": [{"role": "user", "content": "right"}], "max_tokens": 9},
    }

    async def talk() -> None:
        sampler = ScriptedSampler(lambda *_: renderer().spoken("left").tolist())
        endpoint = Endpoint()
        async with sampler.session(0) as session, aiohttp.ClientSession() as client:
            policy = PolicyModel(renderer(), session, seed=1, temperature=1.0, max_context=77, max_tokens=9)
            opened = endpoint.open(policy.answer, earn=policy.conversations.earn, max_context=77)
            async with opened as address:

                async def send(path: str, body: Any) -> tuple[int, Any]:
                    headers = {"Authorization": f"Bearer {address.key}"}
                    method, url = "GET" if body is None else "POST", f"{address.url}/v1/{path}"
                    async with client.request(method, url, json=body, headers=headers) as response:
                        return response.status, await response.json()

                answers = await asyncio.gather(*(send(path, body) for path, body in asked.items()))
                ids = [answer["id"] for _, answer in answers]
                for number, name in reversed([*enumerate(ids, 1)]):
                    for reward in (number, 0.5):
                        assert (await send("rewards", {"id": name, "reward": reward}))[0] == 200
                for wrong in ("chatcmpl-0", ids[0][:-1], "", 7, None):
                    assert (await send("rewards", {"id": wrong, "reward": 1.0}))[0] == (200 if wrong is None else 400)
                assert (await send("rewards", {"id": ids[0]}))[0] == 400
                assert (await send("models", None))[1]["data"][0]["max_model_len"] == 77
            segments = policy.conversations.segments()
        await endpoint.close()
        earned = {segment[0].message["content"]: segment[1].reward for segment in segments}
        last = segments[-1][0].message["content"]  # None is the latest answer
        earned[last] = (earned[last] or 0.0) - 1.0
        assert earned == {"say left": 1.5, "left": 2.5, "right": 3.5}

    asyncio.run(talk())


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_says_which_text_ended_the_answer(stream: bool) -> None:
    said = renderer().spoken("left or right").tolist()
    user = [{"role": "user", "content": "say left"}]

    async def talk() -> list[str]:
        sampler = ScriptedSampler(lambda *_: said)
        endpoint, answers = Endpoint(), []
        async with sampler.session(0) as session, aiohttp.ClientSession() as client:
            policy = PolicyModel(renderer(), session, seed=1, temperature=1.0, max_context=77, max_tokens=9)
            async with endpoint.open(policy.answer, key="") as address:
                for stops, limit in ((["right", " or"], 9), ([" or"], 2), ([" or"], 1), (["up"], 9)):
                    body = {"messages": user, "max_tokens": limit, "stream": stream}
                    for path, name in (("messages", "stop_sequences"), ("chat/completions", "stop")):
                        async with client.post(f"{address.url}/v1/{path}", json={**body, name: stops}) as response:
                            answers.append(await response.text())
        await endpoint.close()
        return answers

    assert len(said) == 4  # left, or, right, and the end of the turn
    found = [
        re.findall(r'"(?:stop_reason|stop_sequence|finish_reason)": ("[^"]*"|null)', text)[
            -2 if place % 2 == 0 else -1 :
        ]
        for place, text in enumerate(asyncio.run(talk()))
    ]
    assert found == [
        *(['"stop_sequence"', '" or"'], ['"stop"']),
        *(['"stop_sequence"', '" or"'], ['"stop"']),  # the limit and the text end the answer at the same token
        *(['"max_tokens"', "null"], ['"length"']),
        *(['"end_turn"', "null"], ['"stop"']),
    ]


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": None},
        {"properties": ["a"]},
        {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": None},
    ],
)
def test_a_call_of_a_tool_whose_schema_gives_no_types_is_answered(parameters: dict[str, Any]) -> None:
    """Some clients write null for the properties of a tool without arguments."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    body = {"messages": [{"role": "user", "content": "add"}], "tools": tools}
    called = "\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
    qwen = templated("qwen3_5_think")
    said = [*qwen.tokenizer(called, add_special_tokens=False)["input_ids"], qwen.end_of_calls]

    async def talk() -> Any:
        sampler = ScriptedSampler(lambda *_: said)
        endpoint = Endpoint()
        async with sampler.session(0) as session, aiohttp.ClientSession() as client:
            policy = PolicyModel(qwen, session, seed=1, temperature=1.0, max_context=9000, max_tokens=900)
            opened = endpoint.open(policy.answer, key="")
            async with opened as address, client.post(f"{address.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                answer = await response.json()
        await endpoint.close()
        assert [turn.tokens.tolist() for segment in policy.conversations.segments() for turn in segment][-1] == said
        return answer["choices"][0]["message"]["tool_calls"][0]["function"]

    assert asyncio.run(talk()) == {"name": "add", "arguments": '{"a": "3"}'}


COMMAND = """
import json, os, urllib.error, urllib.request

def post(path, body, key=os.environ["OPENAI_API_KEY"]):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        return error.code

task = json.loads(os.environ["GLEANRL_TASK"])
said = {"messages": [{"role": "user", "content": task["prompt"]}]}
got = [post("/rewards", {"reward": 9}), post("/chat/completions", said), post("/rewards", {"reward": 9}, "sk-wrong")]
got.append(post("/rewards", {"reward": 0.5}))
got.append(post("/chat/completions", {**said, "user": "x" * (1 << 24)}))
got += [post("/chat/completions", said) for _ in range(task["turns"])]
assert got == [400, 200, 401, 200, 413] + [200] * 2 + [400] * (task["turns"] - 2), got
assert not task["then"], task["then"]
"""


def test_a_command_that_floods_the_endpoint_has_the_rewards_that_count(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(COMMAND)
    command = [sys.executable, str(tmp_path / "command.py")]
    (flooded,) = play(tmp_path, None, turns=200, options={"command": command})
    assert (flooded.stop, flooded.score.value, flooded.info["turns"]) == (StopReason.MAX_TURNS, 0.5, 3)
    assert sorted(turn.reward or 0.0 for turn in flooded.sampled_turns()) == [0.0, 0.0, 0.5]
    for limit_score, expected in ((0.0, 0.0), (-1.0, -1.0), (None, 0.5)):
        options = {"command": command, "limit_score": limit_score}
        (failed,) = play(tmp_path, "fail", turns=5, options=options)
        assert (failed.stop, failed.score.value) == (StopReason.MAX_TURNS, expected)


def test_endless_output_of_a_command_costs_one_trajectory(tmp_path: Path) -> None:
    (endless,) = play(tmp_path, None, timeout_s=1.0, options={"command": "yes"})
    assert (endless.stop, endless.score.valid) == (StopReason.TIMEOUT, False)


@pytest.mark.parametrize("background", ["sleep 60 &", "setsid sleep 60 & sleep 0.2;"])
def test_a_process_that_a_command_leaves_behind_does_not_hold_up_its_episode(background: str, tmp_path: Path) -> None:
    options = {"command": ["sh", "-c", f"{background} echo 0.5"]}
    (left,) = play(tmp_path, None, timeout_s=20.0, options=options)
    assert (left.stop, left.score.value) == (StopReason.DONE, 0.5)
    assert left.info["episode_s"] < 10
    options = {"command": ["sh", "-c", f"{background} sleep 60"]}
    (hung,) = play(tmp_path, None, timeout_s=1.0, options=options)
    assert (hung.stop, hung.score.valid) == (StopReason.TIMEOUT, False)


@pytest.mark.parametrize("printed", ["true", "NaN", "1e999", "0,5", '"0.5"', "[" * 60_000, "9" * 5_000, r"\377"])
def test_a_last_line_that_is_no_number_is_an_answer_without_a_score(printed: str, tmp_path: Path) -> None:
    (answered,) = play(tmp_path, None, options={"command": ["printf", printed]})
    assert (answered.stop, answered.score.valid) == (StopReason.DONE, False)
    assert answered.score.explanation == "the environment gave no score"
    assert len(answered.info["last_observation"][0]["content"]) == (1 if printed == r"\377" else len(printed))


@pytest.mark.parametrize("command", ["", [], "no-such-program --fast", "/etc/passwd", "echo 'open"])
def test_a_command_that_cannot_be_started_is_a_mistake_that_one_line_reports(command: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(repr(command))) as caught:
        play(tmp_path, None, options={"command": command})
    assert "\n" not in str(caught.value)


def test_a_dict_without_score_and_answer_is_an_error_that_names_what_it_has(tmp_path: Path) -> None:
    (wrong,) = play(tmp_path, {"reward": 1.0})
    assert "neither 'score' nor 'answer', but reward" in str(wrong.score.explanation)


def test_processes_that_a_command_leaves_running_are_killed_with_it(tmp_path: Path) -> None:
    (played,) = play(tmp_path, None, options={"command": ["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; echo 1"]})
    assert (played.stop, played.score.value) == (StopReason.DONE, 1.0)
    assert gone([int((tmp_path / "pid").read_text())])


def test_agents_cannot_be_served_by_the_environment_service(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "say left or right", "solution": "left"}\n' * 3)
    options = ["--environment.options.command", "ls", "--environment.options.tasks", str(tmp_path / "tasks.jsonl")]
    command = [sys.executable, "-m", "gleanrl", "serve-env", "agent", "--port", "0", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert len(ended.stderr.splitlines()) == 1
    assert "cannot be served" in ended.stderr


def test_a_request_without_the_key_of_a_running_episode_or_with_a_huge_body_is_refused() -> None:
    answered: list[str] = []

    async def answer(call: ModelCall) -> ModelAnswer:
        answered.append(call.messages[0]["content"])
        return ModelAnswer({"role": "assistant", "content": "left"}, 3, 1, "stop")

    async def ask(address: ModelAddress, key: str, body: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = aiohttp.ClientSession(headers=headers)
        async with client, client.post(f"{address.url}/v1/chat/completions", json=body) as response:
            return response.status, await response.json()

    async def talk() -> None:
        endpoint = Endpoint()
        body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
        async with endpoint.open(answer) as running:
            async with endpoint.open(answer) as finished:
                assert finished.key != running.key
            for key in ("", "sk-wrong", finished.key):
                status, refusal = await ask(running, key, body)
                assert status == 401
                assert refusal["error"]["message"]
            huge = {**body, "user": "x" * MAX_BODY_BYTES}
            assert (await ask(running, running.key, huge))[0] == 413
            assert (await ask(running, running.key, [1]))[0] == 400
            assert not answered
            status, given = await ask(running, running.key, body)
            assert (status, given["choices"][0]["message"]["content"]) == (200, "left")
        await endpoint.close()

    asyncio.run(talk())
    assert answered == ["hello"]


@pytest.mark.parametrize("path", ["chat/completions", "rewards"])
def test_a_client_that_dies_while_it_sends_logs_nothing(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def talk() -> None:
        endpoint = Endpoint()
        async with endpoint.open(lambda call: asyncio.sleep(0, ModelAnswer({}, 3, 1, "stop"))) as address:
            _, writer = await asyncio.open_connection("127.0.0.1", int(address.url.rpartition(":")[2]))
            head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nx-api-key: {address.key}\r\nContent-Length: 99\r\n\r\n"
            writer.write(head.encode() + b'{"mess')
            await writer.drain()
            await asyncio.sleep(0.1)  # the server waits for the rest
            writer.close()
            await asyncio.sleep(0.1)
        await endpoint.close()

    asyncio.run(talk())
    assert not caplog.records, caplog.text


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat/completions", b'{"messages": [{"role": "user", "content": "hello"}]}'), ("rewards", b'{"reward": 1}')],
)
def test_a_body_that_is_complete_only_after_its_episode_has_ended_is_refused(path: str, body: bytes) -> None:
    taken: list[Any] = []

    async def answer(call: ModelCall) -> ModelAnswer:
        taken.append(call)
        return ModelAnswer({"role": "assistant", "content": "left"}, 3, 1, "stop")

    async def talk() -> int:
        endpoint, begun, ended = Endpoint(), asyncio.Event(), asyncio.Event()

        async def halves() -> Any:
            yield body[:5]
            begun.set()
            await ended.wait()
            yield body[5:]

        async def send(address: ModelAddress) -> int:
            headers = {"Authorization": f"Bearer {address.key}"}
            client = aiohttp.ClientSession(headers=headers)
            async with client, client.post(f"{address.url}/v1/{path}", data=halves()) as response:
                return response.status

        async with endpoint.open(answer, earn=lambda reward, answer_id: taken.append(reward)) as address:
            sending = asyncio.ensure_future(send(address))
            await begun.wait()
            await asyncio.sleep(0.1)  # the server has the first half
        ended.set()
        status = await sending
        await endpoint.close()
        return status

    assert asyncio.run(talk()) == 401
    assert not taken


def test_a_body_that_cannot_be_read_is_the_client_s_error_and_an_error_of_the_policy_is_not() -> None:
    async def answer(call: ModelCall) -> ModelAnswer:
        raise ValueError("a bug")

    async def talk() -> list[tuple[int, str]]:
        endpoint, found = Endpoint(), []
        bodies = [(b"x", {"Content-Encoding": "gzip"}), (b"{", {}), (b"[" * 100_000, {}), (b"\xff", {})]
        bodies.append((b'{"messages": [{"role": "user", "content": "x"}]}', {}))
        async with endpoint.open(answer) as address:
            for body, headers in bodies:
                headers = {"Authorization": f"Bearer {address.key}", **headers}
                client = aiohttp.ClientSession(headers=headers)
                async with client, client.post(f"{address.url}/v1/chat/completions", data=body) as response:
                    found.append((response.status, await response.text()))
        await endpoint.close()
        return found

    *wrong, bug = asyncio.run(talk())
    assert [status for status, _ in wrong] == [400] * 4
    assert all("is not JSON" in text for _, text in wrong)
    assert bug[0] == 500


REFUSED = [
    {"context.policy": "strip_thinking"},
    {"context.policy": "window"},
    {"context.system_prompt": "be brief"},
    {"guidance.enabled": "true"},
    {"replay.enabled": "true", "replay.reverify": "true"},
    {"ray.enabled": "true", "ray.environments": "1"},
]


@pytest.mark.parametrize("settings", REFUSED, ids=lambda settings: [*settings][-1])
@pytest.mark.parametrize("mixed", [False, True])
def test_settings_that_do_not_act_on_the_calls_of_agents_are_refused(
    settings: dict[str, str], mixed: bool, tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "say left or right", "solution": "left"}\n' * 3)
    options: dict[str, Any] = {"command": "true", "tasks": str(tmp_path / "tasks.jsonl")}
    environment: dict[str, Any] = {"name": "agent", "options": options}
    if mixed:
        environment = {"name": "mixture", "options": {"parts": [environment]}}
    config = load("quickstart", [("context.policy", "linear"), *settings.items()])
    config = config.model_copy(update={"environment": config.environment.model_copy(update=environment)})
    with pytest.raises(UserError, match=re.escape([*settings][-1])) as caught:
        make_tasks(config, Silent())
    assert "\n" not in str(caught.value)


def test_agents_need_aiohttp(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "aiohttp" else found(name))
    with pytest.raises(UserError, match=r"gleanrl\[agent\]"):
        load_taskset(EnvironmentSettings(name="agent", options={"command": "true", "tasks": "rows.jsonl"}), 0)
