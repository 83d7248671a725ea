"""Tests that tools and tool calls survive everything that plays, stores, exports, shows or rewrites a trajectory."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.config.settings import ContextSettings
from gleanrl.environments.tools import ToolEnvironment
from gleanrl.experience import ExperiencePool
from gleanrl.experience.guidance.guidance import insert, strip_trajectory
from gleanrl.experience.guidance.retrieval import compact
from gleanrl.experience.pool import transfer
from gleanrl.experience.pool.codec import decode_trajectory, encode_trajectory
from gleanrl.learners.tiny import build_tokenizer
from gleanrl.rollout.conversation import conversation, readable, transcript
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.rollout.tool_calls import ToolsUnknown
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.types import Message, StopReason, Task, Trajectory
from gleanrl.utils import serialize
from tests.rollout.test_tool_templates import USER, asks, result, tokenizer


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


CALL = asks({"a": 3, "b": 4}, content="I add.")
WRONG = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
TASK = Task("add/3", (USER,), {"answer": 7})


def play(*answers: str | Message, renderer_: Renderer | None = None, task: Task = TASK) -> Trajectory:
    """Play an episode through the real `Player`, in which the model gives these answers."""
    schemas = asyncio.run(ToolEnvironment([add]).reset()).tools
    left = iter(answers)
    plain = renderer_ or Renderer(tokenizer("own"))

    def script(prompt: Any, seed: int) -> list[int]:
        return plain.with_tools(schemas).spoken(next(left)).tolist()

    def environment(task: Task) -> ToolEnvironment:
        return ToolEnvironment([add], row=task.payload)

    player = Player(environment, ScriptedSampler(script), plain, ContextSettings(max_tokens_per_turn=64), 1.0, 4096)
    return asyncio.run(player.play(task, trajectory_id="t", seed=0))


PLAYED = play(WRONG, CALL, "7")


def test_the_player_plays_an_episode_with_tool_calls() -> None:
    assert PLAYED.stop is StopReason.DONE
    assert PLAYED.score.value == 1.0
    assert PLAYED.score.parts == {"tool_calls": 2.0, "tool_errors": 1.0}
    messages = conversation(PLAYED)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert messages[2]["content"] == "Error: add: argument b is missing"
    assert messages[3]["tool_calls"] == [{**CALL["tool_calls"][0], "id": "call00001"}]
    assert messages[4] == result("7", 1)
    opening = tokenizer("own").decode(PLAYED.segments[0][0].tokens.tolist())
    assert "<tools>\nadd(a, b)\n</tools>" in opening
    assert PLAYED.info["tools"][0]["function"]["name"] == "add"


def test_a_template_without_tools_raises_instead_of_failing_the_episode() -> None:
    made = build_tokenizer(["add"] * 3, 256)
    made.chat_template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    with pytest.raises(ToolsUnknown, match="shows no tools"):
        play("7", renderer_=Renderer(made))


def same(one: Trajectory, other: Trajectory) -> bool:
    def shown(trajectory: Trajectory) -> list[Any]:
        return [(turn.message, turn.tokens.tolist(), turn.version) for turn in trajectory.turns()]

    return shown(one) == shown(other) and one.info == other.info


def test_json_records_and_pool_blobs_keep_tool_calls() -> None:
    assert same(serialize.from_json(serialize.to_json(PLAYED), Trajectory), PLAYED)
    assert same(decode_trajectory(encode_trajectory(PLAYED)), PLAYED)


def test_a_parquet_export_keeps_tool_calls(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with ExperiencePool(tmp_path / "one.sqlite") as one, ExperiencePool(tmp_path / "two.sqlite") as two:
        assert one.add(TASK, PLAYED)
        transfer.export_parquet(tmp_path / "one.sqlite", tmp_path / "all.parquet")
        transfer.import_parquet(two, tmp_path / "all.parquet")
        (stored,) = two.stored([TASK.id])[TASK.id]
        assert same(stored.trajectory, PLAYED)


def test_an_observation_with_tools_can_be_pickled_for_worker_processes() -> None:
    observation = asyncio.run(ToolEnvironment([add], row=TASK.payload).reset())
    assert pickle.loads(pickle.dumps(observation)) == observation
    assert observation.tools


def test_readable_texts_show_tool_calls() -> None:
    assert readable(CALL) == 'I add.\nadd({"a": 3, "b": 4})'
    assert readable(asks({"a": 1}, {"b": 2})) == 'add({"a": 1})\nadd({"b": 2})'
    assert '> I add.\nadd({"a": 3, "b": 4})' in transcript(PLAYED)
    assert "[tool]\n7" in transcript(PLAYED)
    assert '> I add. add({"a": 3, "b": 4})\n7\n> 7' in compact(PLAYED)
    assert readable(PLAYED.segments[0][3].message) == 'I add.\nadd({"a": 3, "b": 4})'


def test_guidance_is_removed_from_an_opening_with_tools() -> None:
    guided = replace(TASK, prompt=tuple(insert("{experience} {prompt}", TASK.prompt, "7")))
    shown = play(WRONG, CALL, "7", task=guided)
    shown = replace(shown, info={**shown.info, "guided": "discard", "unguided": USER["content"]})
    plain = strip_trajectory(shown, Renderer(tokenizer("own")))
    for with_text, without in zip(plain.turns(), PLAYED.turns(), strict=True):
        np.testing.assert_array_equal(with_text.tokens, without.tokens)
        assert with_text.message == without.message
