"""`ToolEnvironment`: tool calls run in order, errors are returned to the model as results, and rewards are computed.

A property test checks that no tool call of the model raises.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.environments.tools import ToolEnvironment
from gleanrl.environments.tools.environment import close_all, same_answer
from gleanrl.protocols import Observation
from gleanrl.rollout.player import conclude_score
from gleanrl.rollout.tool_calls import Call, call_message
from gleanrl.types import Message, Score, StopReason
from gleanrl.utils.errors import UserError
from tests.strategies import examples


class Counter:
    """An environment class with tools, in the form that TRL's `environment_factory` accepts."""

    def __init__(self) -> None:
        self.count, self.done, self.closed = 0, False, False
        self.log: list[str] = []

    def reset(self, start: int = 0, **row: Any) -> str | None:
        self.count = start
        return f" Start at {start}." if start else None

    def add(self, n: int) -> int:
        """Add."""
        self.count += n
        self.log.append(f"add {n}")
        return self.count

    async def slowly(self, n: int) -> dict[str, int]:
        """Add later."""
        await asyncio.sleep(0)
        self.log.append(f"slowly {n}")
        self.count += n
        return {"count": self.count}

    def long(self, n: int) -> str:
        """Say much."""
        return "x" * n

    def fail(self) -> None:
        """Fail."""
        raise KeyError("broken")

    def finish(self) -> None:
        """End it."""
        self.done = True

    def get_reward(self) -> float:
        return float(self.count)

    async def close(self) -> None:
        self.closed = True


def message(*calls: Any, content: str = "") -> Message:
    entries = [
        call_message(Call(name, given), number) if not isinstance(name, dict) else name
        for number, (name, given) in enumerate(calls)
    ]
    return Message(role="assistant", content=content, tool_calls=entries)


def play(*messages: Message, holders: Any = None, **options: Any) -> list[Observation]:
    async def episode() -> list[Observation]:
        environment = ToolEnvironment(holders or [Counter()], **options)
        seen = [await environment.reset(), *[await environment.step(said) for said in messages]]
        await environment.close()
        return seen

    return asyncio.run(episode())


def contents(observation: Observation) -> list[str]:
    return [said["content"] for said in observation.messages]


def test_tool_calls_run_in_order_and_the_final_answer_ends_the_episode() -> None:
    prompt = [Message(role="user", content="Count to 7.")]
    counter = Counter()
    opening, first, last = play(
        message(("add", {"n": 3}), ("slowly", {"n": 2})),
        Message(role="assistant", content="7"),
        holders=[counter],
        prompt=prompt,
        row={"start": 2},
    )
    assert opening.messages == ({"role": "user", "content": "Count to 7. Start at 2."},)
    assert [tool["function"]["name"] for tool in opening.tools] == ["add", "slowly", "long", "fail", "finish"]
    assert first.messages == (
        {"role": "tool", "content": "5", "tool_call_id": "call00000", "name": "add"},
        {"role": "tool", "content": '{"count": 7}', "tool_call_id": "call00001", "name": "slowly"},
    )
    assert counter.log == ["add 3", "slowly 2"]
    assert not first.done
    assert first.score == Score(7.0, parts={"tool_calls": 2.0, "tool_errors": 0.0})
    assert last.done
    assert last.score == first.score
    assert counter.closed


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("add", '{"n": '), "the call is not valid JSON"),
        (("", '{"tool": 1}'), "the call names no tool; there are: add, slowly"),
        (("ad", {}), "there is no tool 'ad'; there are: add, slowly"),
        (("reset", {}), "there is no tool 'reset'"),
        (("_own", {}), "there is no tool '_own'"),
        (("add", {}), "add: argument n is missing"),
        (("add", {"n": 1, "m": 2}), "there is no argument m"),
        (("add", {"n": "one"}), "argument n: input should be a valid integer"),
        (("add", "[1]"), "an object of arguments"),
        (("fail", {}), "KeyError: 'broken'"),
    ],
)
def test_a_wrong_call_gets_an_error_result_and_is_counted_as_a_tool_error(call: Any, said: str) -> None:
    _, wrong, right = play(message(call), message(("add", {"n": 1})))
    (answer,) = wrong.messages
    assert answer["role"] == "tool"
    assert answer["tool_call_id"] == "call00000"
    assert answer["content"].startswith("Error: ")
    assert said in answer["content"]
    assert not wrong.done
    assert wrong.score is not None
    assert wrong.score.parts == {"tool_calls": 1.0, "tool_errors": 1.0}
    assert contents(right) == ["1"]
    assert right.score is not None
    assert right.score.parts == {"tool_calls": 2.0, "tool_errors": 1.0}


def test_the_result_of_a_call_without_an_id_is_a_user_message() -> None:
    entry = {"type": "function", "function": {"name": "add", "arguments": '{"n": 4}'}}
    _, seen = play(message((entry, None)))
    assert seen.messages == ({"role": "user", "content": "4"},)


def test_calls_over_max_calls_are_not_run_and_results_over_max_output_are_cut() -> None:
    _, seen = play(message(*[("add", {"n": 1})] * 3), max_calls=2)
    assert contents(seen)[:2] == ["1", "2"]
    assert contents(seen)[2] == "Error: not run: at most 2 calls in one message"
    _, seen = play(message(("long", {"n": 100})), max_output=10)
    assert contents(seen) == [f"{'x' * 10}\n[90 more characters left out]"]


def test_a_tool_that_sets_done_ends_the_episode() -> None:
    _, seen = play(message(("finish", {}), ("add", {"n": 1})))
    assert seen.done
    assert contents(seen) == [""]
    assert seen.score is not None
    assert seen.score.value == 0.0


def test_done_may_be_a_bool_of_numpy_and_a_tool_called_done_ends_nothing() -> None:
    class Board:
        done = np.bool_(True)

        def look(self) -> str:
            """Look."""
            return "full"

    class Named:
        def done(self) -> str:
            """Report."""
            return "not yet"

    assert play(message(("look", {})), holders=[Board()])[-1].done
    assert not play(message(("done", {})), holders=[Named()])[-1].done


@pytest.mark.parametrize("calls", [(), (("finish", {}),)])
def test_a_reward_of_the_answer_is_asked_once_and_with_no_answer_at_a_limit(calls: Any) -> None:
    answers: list[str] = []

    class Judge:
        def get_reward(self, answer: str) -> float:
            answers.append(answer)
            return 0.5

    environment = ToolEnvironment([Judge(), Counter()])

    async def go() -> Score | None:
        score = (await environment.reset()).score
        for said in (message(("add", {"n": 1})), *(message(call) for call in calls)):
            score = (await environment.step(said)).score
        return await conclude_score(environment, StopReason.MAX_TURNS, score)

    score = asyncio.run(go())
    assert (score and score.value, answers) == (0.5, [""])


def test_all_tools_are_closed_if_closing_one_of_them_fails() -> None:
    class Broken:
        def close(self) -> None:
            raise AttributeError("never opened")

    counter = Counter()
    with pytest.raises(AttributeError, match="never opened"):
        asyncio.run(close_all([Broken(), counter]))
    assert counter.closed


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@pytest.mark.parametrize(("said", "value"), [("7", 1.0), (" 7.0\n", 1.0), ("<think>8?</think>7", 1.0), ("8", 0.0)])
def test_function_tools_without_a_reward_are_scored_by_the_answer_of_the_row(said: str, value: float) -> None:
    opening, seen, last = play(
        message(("add", {"a": 3, "b": 4})), Message(role="assistant", content=said), holders=[add], row={"answer": 7}
    )
    assert contents(seen) == ["7"]
    assert opening.score is not None
    assert opening.score.value == 0.0
    assert last.score is not None
    assert last.score.value == value


def test_without_a_reward_or_an_answer_the_score_is_none() -> None:
    assert [seen.score for seen in play(Message(role="assistant", content="7"), holders=[add])] == [None, None]


def test_the_reward_may_be_an_attribute_a_score_or_none() -> None:
    class Plain:
        reward = 0.5

    class Judged:
        async def get_reward(self, answer: str) -> Score:
            return Score(2.0, parts={"style": 1.0}, explanation=answer)

    class Silent:
        def get_reward(self) -> None: ...

    end = Message(role="assistant", content="done")
    *_, last = play(end, holders=[Plain(), add])
    assert last.score is not None
    assert last.score.value == 0.5
    opening, last = play(end, holders=[Judged(), add])
    assert opening.score is None
    assert last.score == Score(2.0, parts={"tool_calls": 0.0, "tool_errors": 0.0, "style": 1.0}, explanation="done")
    for thought, answer in (("<think>hm</think>\n\ndone", "done"), ("<think>done", "")):
        *_, last = play(Message(role="assistant", content=thought), holders=[Judged(), add])
        assert last.score is not None
        assert last.score.explanation == answer
    *_, last = play(end, holders=[Silent(), add])
    assert last.score is not None
    assert math.isnan(last.score.value)
    assert not last.score.applicable


def test_two_tools_with_the_same_name_raise() -> None:
    with pytest.raises(UserError, match="two tools are called 'add'"):
        ToolEnvironment([Counter(), add])


def test_an_object_that_is_called_but_no_function_is_refused_as_a_tool() -> None:
    with pytest.raises(UserError, match="cannot be a tool"):
        ToolEnvironment([partial(add, b=1)])


def test_a_tool_that_raises_system_exit_gets_an_error_result() -> None:
    def parsed(line: str) -> str:
        """Parse a command line.

        Args:
            line: the line.
        """
        return str(argparse.ArgumentParser(prog="p").parse_args(line.split()))

    _, heard = play(message(("parsed", {"line": "--unknown"})), holders=[parsed])
    assert heard.messages[0]["content"] == "Error: SystemExit: 2"


def test_a_user_error_in_a_tool_is_raised_and_not_shown_to_the_model() -> None:
    def broken() -> None:
        """Broken."""
        raise UserError("no sandbox here")

    with pytest.raises(UserError, match="no sandbox"):
        play(message(("broken", {})), holders=[broken])


def test_same_answer_compares_numbers_or_normalised_text() -> None:
    assert same_answer("1,234", 1234)
    assert same_answer(" The  Fox ", "the fox")
    assert not same_answer("1234a", 1234)
    assert not same_answer("12", "1,2")
    assert not same_answer("12", "1_2")
    assert same_answer("NaN", "nan")
    assert same_answer("1,234,567.50", "1234567.5")
    assert not same_answer("", 0)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@settings(max_examples=examples(150))
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["add", "slowly", "fail", "", "x"]),
            anything | st.dictionaries(st.sampled_from(["n", "m"]), anything, max_size=2) | st.just('{"n": 1'),
        ),
        min_size=1,
        max_size=4,
    ),
    most=st.integers(1, 4),
)
def test_every_call_gets_one_result_in_order_whatever_its_name_and_arguments(calls: list[Any], most: int) -> None:
    _, seen = play(message(*calls), max_calls=most)
    assert [said.get("tool_call_id") for said in seen.messages] == [f"call{n:05d}" for n in range(len(calls))]
    assert not seen.done
    assert seen.score is not None
    errors = sum(text.startswith("Error: ") for text in contents(seen))
    assert seen.score.parts == {"tool_calls": float(len(calls)), "tool_errors": float(errors)}
    json.dumps(seen.messages)
