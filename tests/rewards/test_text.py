"""Tests of the ready-made rewards on format, length and repetition, which a run selects by name."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.rewards import Request
from gleanrl.rewards.adapter import check_reward, load_reward
from gleanrl.rewards.adapter import trl as as_trl
from gleanrl.types import Message, Score, StopReason, Task, Trajectory, Turn
from gleanrl.utils.errors import UserError

TASK = Task("t", (Message(role="user", content="?"),))
IDS = st.lists(st.integers(0, 4), max_size=60)


def played(*answers: list[int], text: str = "") -> Trajectory:
    """Return a trajectory in which the model has sampled these tokens, a turn for each list."""
    turns = [Turn(TASK.prompt[0], np.array([9, 9]))]
    for ids in answers:
        turns.append(Turn(Message(role="assistant", content=text), np.array(ids), np.zeros(len(ids)), version=0))
        turns.append(Turn(Message(role="user", content="and?"), np.array([8, 8, 8, 8])))
    return Trajectory("0", TASK.id, (tuple(turns),), Score(0.0), StopReason.DONE)


def score(name: Any, scored: Trajectory | str, **options: Any) -> float:
    return asyncio.run(load_reward(name, options=options)(Request.of(TASK, scored))).value


@given(ids=IDS, limit=st.integers(1, 60), cache=st.integers(1, 60), n=st.integers(1, 4))
def test_overlong_and_repetition_equal_trls_functions_for_one_turn(
    ids: list[int], limit: int, cache: int, n: int
) -> None:
    trl = pytest.importorskip("trl.rewards")
    cache = min(cache, limit)
    theirs = trl.get_soft_overlong_punishment(limit, cache)
    assert score("overlong", played(ids), limit=limit, cache=cache) == pytest.approx(score(as_trl(theirs), played(ids)))
    theirs = trl.get_repetition_penalty_reward(n, -1.0)
    assert score("repetition", played(ids), n=n) == pytest.approx(score(as_trl(theirs), played(ids)))


def test_lengths_are_summed_over_the_turns_and_repetitions_are_counted_inside_a_turn() -> None:
    turns = played([1, 2, 3], [1, 2, 3], [1, 1, 1, 1])
    assert score("length", turns, target=12) == -2.0
    assert score("length", turns, target=0) == -10.0
    assert score("overlong", turns, limit=12, cache=4) == -0.5
    assert score("repetition", turns, n=2) == pytest.approx(-2 / 7)  # of 2 + 2 + 3 pairs the last turn repeats two
    assert score("repetition", played(), n=2) == score("overlong", played(), limit=4, cache=2) == 0.0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>2 and 2</think>\n<answer>4</answer>", True),
        ("2 and 2\n</think> <answer>4</answer>\n", True),  # the chat template has opened the thought
        ("<think>2 and 2</think>4", False),
        ("<think>a</think><think>b</think><answer>4</answer>", False),
        ("<think>a</think><answer>3</answer><answer>4</answer>", False),
        ("<answer>4</answer>", False),
    ],
)
def test_the_default_format_is_one_thought_and_one_answer_in_tags(text: str, right: bool) -> None:
    assert score("format", text) == score("format", played([1], text=text)) == right


def test_a_format_is_any_regular_expression_that_matches_the_whole_message() -> None:
    assert score("format", "so:\n\\boxed{4}", pattern=r".*\\boxed\{.+\}") == 1.0
    assert score("format", "\\boxed{4} I think", pattern=r".*\\boxed\{.+\}") == 0.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("format", {"pattern": "("}),
        ("length", {}),
        ("length", {"target": "100"}),
        ("overlong", {"limit": 10, "cache": 11}),
        ("overlong", {"limit": 10, "cache": 0}),
        ("repetition", {"n": 0}),
    ],
)
def test_wrong_options_are_found_before_a_run_starts(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        check_reward(name, options=options)
    assert "\n" not in str(error.value)


def test_a_text_without_tokens_has_no_length() -> None:
    with pytest.raises(UserError, match="length"):
        score("length", "four", target=3)


def test_the_sum_on_the_page_can_be_made() -> None:
    pytest.importorskip("math_verify")
    page = Path(__file__).parents[2] / "docs" / "howto" / "ready_rewards.md"
    (block,) = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    settings = tomllib.loads(block)["reward"]
    check_reward(settings["name"], options=settings["options"])
    (pattern,) = [part["options"]["pattern"] for name, part in settings["options"]["parts"].items() if name == "format"]
    assert score("format", "so\n\\boxed{4}.", pattern=pattern) == 1.0
