"""Tests of `gleanrl.rollout.conversation`: it reads the messages of a trajectory, each once, from the segments that any
context policy has made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gleanrl.rollout.conversation import conversation, opening_turns, with_prompt
from gleanrl.types import Message, Score, StopReason, Trajectory, Turn


def turn(role: str, content: str, *, sampled: bool = False) -> Turn:
    tokens = np.arange(3, dtype=np.int32)
    return Turn(Message(role=role, content=content), tokens, np.zeros(3, np.float32) if sampled else None)


def sampled(t: Turn) -> Turn:
    return turn("assistant", t.message["content"], sampled=True)


def played(*segments: tuple[Turn, ...], **info: Any) -> Trajectory:
    return Trajectory("t/0", "t", segments, Score(1.0), StopReason.DONE, info)


SYSTEM, ASK, GO = turn("system", "be good"), turn("user", "find it"), turn("assistant", "<think>x</think>go east")
SEEN, TAKE, END = turn("user", "an egg"), turn("assistant", "take egg"), turn("user", "done")
LINEAR = (SYSTEM, ASK, sampled(GO), SEEN, sampled(TAKE), END)
REWRITTEN = ((SYSTEM, ASK, sampled(GO)), (SYSTEM, ASK, GO, SEEN, sampled(TAKE)), (SYSTEM, ASK, TAKE, END))


@pytest.mark.parametrize("segments", [(LINEAR,), REWRITTEN])
def test_conversation_holds_every_message_once(segments: tuple[Any, ...]) -> None:
    assert conversation(played(*segments)) == [t.message for t in LINEAR]


@pytest.mark.parametrize("segments", [(LINEAR,), REWRITTEN])
def test_conversation_leaves_out_experience_that_was_inserted_into_the_prompt(segments: tuple[Any, ...]) -> None:
    shown = turn("user", "Experience: look in the fridge\n\nfind it")
    guided = [tuple(shown if t is ASK else t for t in segment) for segment in segments]
    shown = conversation(played(*guided, guided="keep", unguided="find it"))
    assert shown == [t.message for t in LINEAR]


def test_conversation_has_the_opening_of_a_second_conversation_and_not_that_of_a_retry_or_a_fork() -> None:
    other = (turn("system", "summarise"), ASK, sampled(TAKE))
    second = (SYSTEM, SEEN, sampled(TAKE))
    retry, fork = (SYSTEM, ASK, sampled(TAKE)), (SYSTEM, ASK, GO, END, sampled(GO))
    shown = conversation(played(LINEAR, other, second, retry, fork))
    expected = [*LINEAR, *other, *second[1:], TAKE, END, GO]
    assert shown == [t.message for t in expected]


def test_an_empty_trajectory_has_no_messages() -> None:
    assert conversation(played()) == []
    assert opening_turns(played()) == ()


def test_opening_turns_end_before_the_first_answer() -> None:
    assert opening_turns(played(LINEAR)) == (SYSTEM, ASK)
    assert opening_turns(played((SYSTEM, ASK))) == (SYSTEM, ASK)


def test_with_prompt_replaces_the_last_user_message() -> None:
    opening = [t.message for t in (SYSTEM, ASK, END)]
    assert with_prompt(opening, "now") == [SYSTEM.message, ASK.message, Message(role="user", content="now")]
    with pytest.raises(ValueError, match="user"):
        with_prompt([SYSTEM.message], "now")
