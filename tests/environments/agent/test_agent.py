"""The environment ``agent`` and its endpoint: scores, failures that cost one trajectory, and refused requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gleanrl.config.settings import ContextSettings, EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.agent.endpoint import MAX_BODY_BYTES, Endpoint
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.protocols import ModelAddress
from gleanrl.rollout.calls import ModelAnswer, ModelCall
from gleanrl.rollout.conversation import conversation
from gleanrl.rollout.player import Player
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.types import StopReason, Task, Trajectory
from tests.loop_world import renderer

aiohttp = pytest.importorskip("aiohttp")

AGENT = """
import json, os, time, urllib.request

def solve(task, base_url, api_key, model):
    messages = [{"role": "user", "content": task["prompt"]}]
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    for _ in range(task["turns"]):
        body = json.dumps({"model": model, "messages": messages}).encode()
        request = urllib.request.Request(base_url + "/chat/completions", body, headers)
        messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
        messages.append({"role": "user", "content": "left or right"})
    match task["then"]:
        case "crash": os.abort()
        case "hang": time.sleep(1000)
        case "raise": raise ValueError("the agent broke")
    return task["then"]
"""


def play(folder: Path, *thens: Any, turns: int = 2, workers: int = 0, timeout_s: float = 60.0) -> list[Trajectory]:
    """Play an episode for each value that the agent is to return, or for each way in which it is to fail, at once."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text('{"prompt": "say left or right", "solution": "left"}\n')
    options = {"agent": f"{folder / 'agent.py'}:solve", "tasks": str(folder / "tasks.jsonl")}
    source = load_taskset(EnvironmentSettings(name="agent", options=options), 0)

    async def together() -> list[Trajectory]:
        async with EnvironmentPool(source, workers=workers, timeout_s=timeout_s) as pool:
            sampler = ScriptedSampler(lambda *_: renderer().spoken("left").tolist())
            settings = ContextSettings(max_turns=3)
            player = Player(pool.environment, sampler, renderer(), settings, 1.0, 1000, endpoint=pool.endpoint.open)
            tasks = [
                Task(str(i), payload={"prompt": "say left or right", "turns": turns, "then": then})
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


def test_a_text_is_the_answer_that_a_reward_reads_and_a_limit_has_a_score(tmp_path: Path) -> None:
    (answered,) = play(tmp_path, "in the end: left")
    assert not answered.score.valid
    assert conversation(answered)[-1]["content"] == "left"
    assert answered.info["last_observation"] == [{"role": "assistant", "content": "in the end: left"}]
    (limited,) = play(tmp_path, 1.0, turns=4)
    assert (limited.stop, limited.score.value, limited.info["turns"]) == (StopReason.MAX_TURNS, 0.0, 3)


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
