"""The agents of examples/agents: their demonstrations are what training would show, and a run trains them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gleanrl.config.loading import load
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.runtime.prepare import prepare, supervised_examples
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.tracking.monitors import Silent
from gleanrl.types import Segment, segment_arrays

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "plain": "openai",
    "openai_agents": "agents",
    "langgraph_agent": "langgraph",
    "smolagents_agent": "smolagents",
}
TINY = "[model]\nmax_context = 256\nhidden_size = 96\nlayers = 3"
SMALL = {
    "environment.train_tasks": "16",
    "environment.eval_tasks": "4",
    "environment.warm_start_tasks": "8",
    "warm_start.demonstrations": "4",
    "warm_start.steps": "1",
    "warm_start.batch": "32",
    "warm_start.lr": "2e-3",
    "learner.lr": "1e-4",
}


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLEANRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """The file of a run of the agents with a tiny model, which takes seconds where the pretrained one takes minutes."""
    text, count = re.subn(r"\[model\][^\[]*(?=\n\n\[)", TINY, Path("examples/agents/calculator.toml").read_text())
    assert count == 1
    (tmp_path / "tiny.toml").write_text(text)
    return str(tmp_path / "tiny.toml")


def options(name: str) -> dict[str, str]:
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    path = f"examples/agents/{name}.py"
    expert = {"environment.options.expert": f"{path}:expert"} if "def expert" in Path(path).read_text() else {}
    return {"environment.options.agent": f"{path}:solve", **expert, **SMALL}


@pytest.mark.parametrize("name", PACKAGES)
def test_demonstrations_have_the_tokens_of_the_agent_s_episodes(name: str, recipe: str) -> None:
    """An episode in which the model samples the expert's answers has the prompts and tools of the demonstration."""
    config = load(recipe, list(options(name).items()))
    prepared = prepare(config, Silent())
    shown = [example[:2] for example in supervised_examples(config, prepared.tokenizer, prepared.demonstrations)]
    renderer = Renderer(prepared.tokenizer)
    tasks = prepared.taskset.tasks("warm_start", len(prepared.demonstrations))

    async def play() -> list[Segment]:
        async with EnvironmentPool(prepared.taskset) as pool:
            segments: list[Segment] = []
            for task, one in zip(tasks, prepared.demonstrations, strict=True):
                answers = iter(
                    [renderer.with_tools(tools).spoken(messages[-1]) for messages, tools in one.conversations]
                )
                sampler = ScriptedSampler(lambda *_, answers=answers: next(answers).tolist())
                player = Player(
                    pool.environment, sampler, renderer, config.context, 1.0, 256, endpoint=pool.endpoint.open
                )
                trajectory = await player.play(task, trajectory_id=task.id, seed=1)
                assert trajectory.score.value == 1.0
                segments += trajectory.segments
            return segments

    played = asyncio.run(play())
    assert len(played) == len(shown)
    for segment, (tokens, mask) in zip(played, shown, strict=True):
        assert np.array_equal(segment_arrays(segment)[0], tokens)
        assert np.array_equal(segment_arrays(segment)[1], mask)
        assert "calculate(a, b, operation)" in prepared.tokenizer.decode(tokens[: int(mask.argmax())])
        assert mask.any()


@pytest.mark.timeout(300)
def test_the_plain_agent_is_warm_started_and_trained_with_replay(tmp_path: Path, recipe: str) -> None:
    changes = {
        **options("plain"),
        "run.folder": str(tmp_path), "run.steps": "2", "environment.warm_start_tasks": "64",
        "warm_start.demonstrations": "64", "warm_start.steps": "80", "schedule.batch": "4", "schedule.group": "4",
        "evaluation.at_start": "false",
    }  # fmt: skip
    command = [sys.executable, "-m", "gleanrl", "train", recipe]
    given = [part for key, value in changes.items() for part in (f"--{key}", value)]
    done = subprocess.run([*command, *given], capture_output=True, text=True, timeout=280, env={**os.environ})
    assert done.returncode == 0, done.stderr + done.stdout
    folder = next(path.parent for path in tmp_path.rglob("metrics.jsonl"))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum("tokens/trained" in step for step in steps) == 2
    played = [record.trajectory for record in RunFolder(folder).read_rollouts(1)]
    called = [turn.message["tool_calls"] for one in played for turn in one.turns() if turn.message.get("tool_calls")]
    assert sum(calls[0]["function"]["name"] == "calculate" for calls in called) > len(played) / 2
