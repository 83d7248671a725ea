"""Runs that train an agent with replay: kills, interrupts, the seeding of the pool, and the processes of episodes."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from gleanrl.experience import ExperiencePool
from tests.cli.conftest import CONFIG, ENVIRONMENT, CommandLine, assert_same, outcome
from tests.cli.test_resume import APPLY, EPISODES, PLAY
from tests.environments.test_pool import gone

pytest.importorskip("aiohttp")

# The same conversation as in `parity`. The process writes down that it has begun an episode.
AGENT = """
import json, os, sys, urllib.request
from pathlib import Path

def solve(task, base_url, api_key, model):
    with open(Path(__file__).parent / "pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    messages, good = [], 0
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    for turn in range(2):
        messages.append({"role": "user", "content": f"door {task['start'] + turn}: say left or go right"})
        body = json.dumps({"model": model, "messages": messages}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        good += len(answer["content"]) % 2 == 0
        messages.append(answer)
    return good / 2

if __name__ == "__main__":
    environment = os.environ
    task = json.loads(environment["GLEANRL_TASK"])
    print(solve(task, environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"], environment["GLEANRL_MODEL"]))
"""
KINDS = {"function": 'agent = "{folder}/agent.py:solve"', "command": 'command = ["{python}", "{folder}/agent.py"]'}
REPLAY = ("--replay.enabled", "true", "--replay.probe_fraction", "0", "--replay.pool_updates", "1")


CALL = "gleanrl.environments.agent.endpoint:Endpoint._respond"  # a model call of an agent


def prepared(gleanrl: CommandLine, kind: str = "function") -> CommandLine:
    """Let ``gleanrl.train`` train the agent."""
    (gleanrl.folder / "agent.py").write_text(AGENT)
    agent = KINDS[kind].format(folder=gleanrl.folder, python=sys.executable)
    settings = f'name = "agent"\noptions = {{ {agent}, tasks = {{ name = "{ENVIRONMENT}:Parity" }} }}'
    (gleanrl.folder / "tiny.toml").write_text(CONFIG.replace(f'name = "{ENVIRONMENT}:Parity"', settings))
    return gleanrl


def episodes_ended(gleanrl: CommandLine) -> int:
    """Wait until no process of an episode is alive, and return how many there have been."""
    pids = [int(line) for line in (gleanrl.folder / "pids").read_text().split()]
    assert gone(pids)
    return len(pids)


@pytest.fixture(scope="module")
def undisturbed(make_gleanrl: Callable[[], CommandLine]) -> CommandLine:
    gleanrl = prepared(make_gleanrl())
    ended = gleanrl.train("run", *REPLAY)
    assert ended.status == 0, ended.stderr
    return gleanrl


def test_a_run_of_an_agent_replays_and_starts_a_process_for_each_episode(undisturbed: CommandLine) -> None:
    steps = [row.metrics for row in undisturbed.run("run").read_metrics() if "updates/done" in row.metrics]
    assert len(steps) == 6
    assert sum(metrics["replay/trajectories"] for metrics in steps[3:]) > 0
    assert episodes_ended(undisturbed) == 20 + 3 * 9 + 6 * EPISODES  # demonstrations, evaluations and steps


@pytest.mark.parametrize(
    ("kind", "function", "call"),
    [
        pytest.param("function", PLAY, 9 + 4 * EPISODES + 3, marks=pytest.mark.heavy),
        ("function", CALL, 2 * (9 + 3 * EPISODES) + 5),
        pytest.param("function", APPLY, 4, marks=pytest.mark.heavy),
        ("command", CALL, 2 * (9 + 3 * EPISODES) + 5),
    ],
)
def test_a_run_of_an_agent_that_is_killed_and_resumed_equals_an_undisturbed_one(
    gleanrl: CommandLine, undisturbed: CommandLine, kind: str, function: str, call: int
) -> None:
    prepared(gleanrl, kind)
    assert gleanrl.train("run", *REPLAY, at=(function, call, "SIGKILL")).status == -9
    episodes_ended(gleanrl)
    ended = gleanrl.train("run", *REPLAY, "--resume")
    assert ended.status == 0, ended.stderr
    episodes_ended(gleanrl)
    assert_same(gleanrl.run("run"), undisturbed.run("run"))


@pytest.mark.parametrize(
    ("kind", "count"), [pytest.param("function", 1, marks=pytest.mark.heavy), ("function", 2), ("command", 1)]
)
def test_ctrl_c_ends_a_run_of_an_agent_and_its_processes_and_the_run_continues(
    gleanrl: CommandLine, undisturbed: CommandLine, kind: str, count: int
) -> None:
    prepared(gleanrl, kind)
    triggers = [{"at": PLAY, "call": 9 + 4 * EPISODES + 5, "event": "SIGINT"}] * count
    ended = gleanrl("train", "tiny.toml", "--run.name", "run", *REPLAY, triggers=triggers)
    assert ended.status == 130, ended.stderr
    assert ended.complaint.startswith("interrupted; continue with: gleanrl train tiny.toml --run.name=run")
    assert gleanrl.run("run").checkpoints()
    episodes_ended(gleanrl)
    resumed = gleanrl.train("run", *REPLAY, "--resume")
    assert resumed.status == 0, resumed.stderr
    here, there = outcome(gleanrl.run("run")), outcome(undisturbed.run("run"))
    assert here["rollouts"] == there["rollouts"]
    assert here["weights"]["model/model.safetensors"] == there["weights"]["model/model.safetensors"]


def test_the_pool_of_a_run_of_an_agent_is_seeded_with_demonstrations(
    make_gleanrl: Callable[[], CommandLine], undisturbed: CommandLine
) -> None:
    ended = undisturbed("pool", "run", "seed", "--demonstrations", "5")
    assert ended.status == 0, ended.stderr
    assert ended.stdout.startswith("stored 5 successes\n")
    episodes_ended(undisturbed)
    with ExperiencePool(undisturbed.run("run").experience_path, read_only=True) as pool:
        stored = [one for found in pool.stored([f"train-{i}" for i in range(10)]).values() for one in found]
    shown = [one.trajectory for one in stored if one.trajectory.info.get("origin") == "demonstration"]
    assert len(shown) == 5
    for trajectory in shown:
        assert trajectory.score.value == 1.0
        assert {turn.message["content"] for turn in trajectory.sampled_turns()} <= {"left", "go right"}
    source = str(undisturbed.run("run").path)
    other = prepared(make_gleanrl())
    start = ("--model.init", f"{source}/model", "--warm_start.enabled", "false", "--run.steps", "2")
    assert other.train("run", *REPLAY, *start, "--replay.seed_from", source).status == 0
    rows = [row.metrics for row in other.run("run").read_metrics() if "replay/trajectories" in row.metrics]
    assert sum(metrics["replay/trajectories"] for metrics in rows) > 0
