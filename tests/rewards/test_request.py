"""Tests of `gleanrl.rewards.Request`: which messages it takes from a trajectory, and that its key is equal in all
processes and depends on everything that the score depends on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from gleanrl.rewards import Request
from gleanrl.types import Message, Score, StopReason, Task, Trajectory, Turn
from tests.rewards.worlds import make_task, make_trajectory

KEY = """
from gleanrl.rewards import Request
from gleanrl.types import Task, Score
task = Task("t", ({"role": "user", "content": "q"},), {"b": [1, 2.5], "a": {"y": None, "x": "\\u00e9"}})
print(Request(task, (*task.prompt, {"role": "assistant", "content": "a"}), own=Score(0.1)).key("v1"))
"""


def request(**changes: object) -> Request:
    task = make_task("t", a=1)
    return replace(Request.of(task, make_trajectory(task, "42")), **changes)


def test_a_request_holds_the_conversation_and_its_last_response() -> None:
    made = request()
    assert [message["role"] for message in made.messages] == ["user", "assistant"]
    assert made.response == "42"
    assert made.trajectory_id == "t.0"
    assert Request(made.task, made.task.prompt).response == ""


def test_the_key_is_the_same_in_every_process() -> None:
    keys = {
        subprocess.run(
            [sys.executable, "-c", KEY],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    (key,) = keys
    assert len(key) == 32
    int(key, 16)


def test_the_key_changes_with_everything_that_the_score_depends_on() -> None:
    base = request()
    others = [
        base.key("w"),
        request(messages=(*base.messages, Message(role="user", content="and?"))).key("v"),
        request(task=replace(base.task, id="u")).key("v"),
        request(task=replace(base.task, payload={"a": 2})).key("v"),
        request(own=Score(1.0)).key("v"),
    ]
    owns = [Score(0.0), Score(1.0), Score(0.0, turns=(0.5,))]
    others += [request(group=(replace(base, own=own), base)).key("v") for own in owns]
    assert len({base.key("v"), *others}) == 9
    assert request(trajectory_id="other", info={"turns": 3}).key("v") == base.key("v")


def test_payloads_with_arrays_have_a_key_and_payloads_with_other_objects_raise() -> None:
    assert request(task=Task("t", payload={"x": np.float32(0.5)})).key("v")
    with pytest.raises(TypeError, match="JSON"):
        request(task=Task("t", payload={"x": object()})).key("v")


def test_each_message_appears_once_although_the_context_was_rewritten() -> None:
    def turn(role: str, content: str, *, sampled: bool = False) -> Turn:
        return Turn(Message(role=role, content=content), np.arange(2), np.zeros(2) if sampled else None)

    first = (turn("user", "q"), turn("assistant", "<think>x</think>a", sampled=True))
    second = (turn("user", "q"), turn("assistant", "a"), turn("user", "more"), turn("assistant", "b", sampled=True))
    trajectory = Trajectory("x", "t", (first, second), Score(0.0), StopReason.DONE)
    contents = [message["content"] for message in Request.of(make_task(), trajectory).messages]
    assert contents == ["q", "<think>x</think>a", "more", "b"]


def test_experience_inserted_into_the_prompt_is_left_out_of_the_request() -> None:
    def turn(role: str, content: str, *, sampled: bool = False) -> Turn:
        return Turn(Message(role=role, content=content), np.arange(2), np.zeros(2) if sampled else None)

    played = (turn("user", "SECRET q"), turn("assistant", "a", sampled=True))
    trajectory = Trajectory("x", "t", (played,), Score(0.0), StopReason.DONE, {"unguided": "q"})
    assert [message["content"] for message in Request.of(make_task(), trajectory).messages] == ["q", "a"]
