"""Evaluation and training from the command line on a taskset that verifiers ships: TextArena's Hangman."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.cli.main import main
from gleanrl.config.settings import ContextSettings, EnvironmentSettings, ModelSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.learners.supervised import fine_tune
from gleanrl.learners.tiny import build_model, build_tokenizer
from gleanrl.rollout.conversation import conversation
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.types import Message, StopReason, Trajectory, segment_arrays
from gleanrl.utils import serialize

for package in ("verifiers", "textarena", "nltk"):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed in this environment: make verifiers", allow_module_level=True)

pytestmark = [pytest.mark.verifiers, pytest.mark.slow]

WORDS = ("apple", "bread", "kettle", "garden", "letter", "orange", "pencil", "silver", "table", "window")
OPTIONS = {"id": "textarena", "args": {"game": "Hangman-v0"}}


@pytest.fixture(scope="module", autouse=True)
def dictionary(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Replace the word list that the game downloads, because the tests have no network."""
    import nltk

    data = tmp_path_factory.mktemp("nltk")
    (data / "corpora" / "words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (data / "corpora" / "words" / name).write_text("\n".join(WORDS) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk.data, "path", [str(data)])
        patch.setattr(nltk, "download", lambda *_, **__: True)
        yield


def played(*answers: str) -> Trajectory:
    """Play a game of at most as many turns as there are answers, with these answers."""
    source = load_taskset(EnvironmentSettings(name="verifiers", options=OPTIONS), seed=0)
    renderer, turn = Renderer(build_tokenizer(list(answers), 300)), iter(answers)
    sampler = ScriptedSampler(lambda *_: renderer.spoken(next(turn)).tolist())

    async def play() -> Trajectory:
        async with EnvironmentPool(source) as pool:
            settings = ContextSettings(max_turns=len(answers), max_tokens_per_turn=32)
            episodes = Player(pool.environment, sampler, renderer, settings, 1.0, 20_000, endpoint=pool.endpoint.open)
            return await episodes.play(source.tasks("train", 1)[0], trajectory_id="t", seed=0)

    return asyncio.run(play())


def test_the_games_observations_and_final_reward_are_returned() -> None:
    messages = conversation(played("I say [e].", "[q]"))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert "You are playing Hangman" in messages[1]["content"]
    # The board shows the guessed letter at its place in the word.
    assert "  E  " in messages[3]["content"]
    end = played(*(f"[{letter}]" for letter in "xyz"), "[q]", "[j]", "[f]")
    assert end.stop is StopReason.DONE
    assert end.score.parts == {"game_reward": 0.0}


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model that was fine-tuned to answer with an arbitrary letter in brackets."""
    letters = [f"[{letter}]" for letter in "abcdefghijklmnopqrstuvwxyz"]
    messages = conversation(played("[e]", "[e]"))
    tokenizer = build_tokenizer([message["content"] for message in messages] + 20 * letters, 384)
    model = build_model(ModelSettings(hidden_size=64, layers=2, max_context=2048), tokenizer, seed=0)
    renderer = Renderer(tokenizer)
    examples = [
        segment_arrays(renderer.demonstration([*messages[:2], Message(role="assistant", content=letter)]))[:2]
        for letter in letters
    ]
    fine_tune(model, examples, steps=40, batch=8, lr=3e-3, seed=0)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def config(tmp_path: Path, player: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("hangman.toml").write_text(
        f"""
run = {{ name = "hangman", steps = 3, threads = 1 }}
model = {{ init = "{player}" }}
warm_start = {{ enabled = false }}
context = {{ max_turns = 8, max_tokens_per_turn = 6 }}
schedule = {{ batch = 2, group = 4 }}
learner = {{ lr = 1e-3 }}
evaluation = {{ every = 0, samples = 2 }}

[environment]
name = "verifiers"
train_tasks = 6
eval_tasks = 3
options = {{ id = "textarena", args = {{ game = "Hangman-v0" }} }}
"""
    )
    return "hangman.toml"


def test_a_model_can_be_evaluated_on_a_verifiers_taskset(config: str) -> None:
    assert main(["evaluate", config, "--out", "evaluated"]) == 0
    [found] = RunFolder("evaluated").read_metrics()
    assert found.metrics["eval/sampled/valid"] == 1.0
    assert found.metrics["eval/sampled/turns"] > 2.0


def test_a_model_can_be_trained_on_a_verifiers_taskset(config: str) -> None:
    assert main(["train", config]) == 0
    run = RunFolder("runs/hangman")
    rows = [row.metrics for row in run.read_metrics() if row.step > 0]
    assert len(rows) == 3
    assert all(row["reward/valid"] == 1.0 and np.isfinite(row["loss/policy"]) for row in rows)
    assert any(row["reward/game_reward"] > 0 for row in rows)
    assert any(row["learner/grad_norm"] > 0 for row in rows)
    records = [record for step in run.rollout_steps() for record in run.read_rollouts(step)]
    named = serialize.to_json(records).decode()
    assert "game_reward" in named
    assert "You are playing Hangman" in named
