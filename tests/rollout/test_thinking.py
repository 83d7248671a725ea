"""Tests of `gleanrl.rollout.thinking` and of its users: where a thought ends, also if the chat template opened it or
if it was truncated, and that a tool call inside a thought is not executed."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.config.settings import ContextSettings
from gleanrl.environments.adapters.openenv import to_action
from gleanrl.environments.textworld.taskset import command_of
from gleanrl.environments.tools.environment import same_answer
from gleanrl.learners.tiny import build_tokenizer
from gleanrl.protocols import Completion
from gleanrl.rollout.context import make_context
from gleanrl.rollout.renderer import Renderer
from gleanrl.rollout.thinking import CLOSE, OPEN, ThoughtTags, answer_of, written
from gleanrl.rollout.tool_calls import AnswerReader, Call, JsonCalls
from gleanrl.types import Message

HERMES = JsonCalls("<tool_call>", "</tool_call>", "name", "arguments")
CALL = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
TOOL: Any = {
    "type": "function",
    "function": {"name": "rm", "description": "Remove.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4", "4"),
        ("<think>2 or 3</think>4", "4"),
        ("2 or 3</think>4", "4"),  # the template opened the thought
        ("<think>2 or 3", ""),
        ("<think>1</think>2<think>3</think>4", "4"),
        ("<think>1</think>2<think>3", "2"),
        ("", ""),
    ],
)
def test_the_answer_is_the_text_after_the_last_closed_thought(text: str, answer: str) -> None:
    assert answer_of(text) == answer


@given(st.lists(st.sampled_from([OPEN, CLOSE, "a", " ", "\n", CALL]), max_size=8), st.booleans())
def test_a_split_text_is_whole_again_and_its_rest_begins_with_no_thought(pieces: list[str], opened: bool) -> None:
    text = "".join(pieces)
    thought, said = ThoughtTags().split(text, opened)
    assert not said.lstrip().startswith(OPEN)
    assert (thought is None) == (not opened and not text.lstrip().startswith(OPEN))
    if thought is None:
        assert said == text
    else:
        inside = text.lstrip().removeprefix(OPEN) if text.lstrip().startswith(OPEN) else text
        assert inside in (thought + CLOSE + said, thought)


@pytest.mark.parametrize(
    ("text", "opened", "calls"),
    [
        (CALL, False, [Call("rm", {})]),
        (f"<think>maybe {CALL} no</think>The answer is 4", False, []),
        (f"maybe {CALL} no</think>The answer is 4", True, []),
        (f"maybe {CALL} no</think>The answer is 4", False, []),  # closed without an opening tag
        (f"Well. <think>maybe {CALL} no</think>The answer is 4", False, []),
        ("<think>I could use <tool_call> here</think>The answer is 4", False, []),
        ("I could use <tool_call> here</think>The answer is 4", False, []),
        (f"<think>cut off {CALL}", False, []),
        (f"cut off {CALL}", True, []),
        (f"<think>why</think>{CALL}", False, [Call("rm", {})]),
        (f"why</think>\n\n{CALL} done", True, [Call("rm", {})]),
        (CALL.replace("{}", '{"text": "</think>"}'), False, [Call("rm", {"text": "</think>"})]),
        ("<think>a</think>" + CALL.replace("{}", '{"t": "</think>"}'), False, [Call("rm", {"t": "</think>"})]),
    ],
)
def test_a_call_inside_a_thought_is_not_read_as_a_call(text: str, opened: bool, calls: list[Call]) -> None:
    answer = AnswerReader(ThoughtTags(), HERMES).read(text, opened)
    assert answer.calls == calls
    assert (answer.reasoning == "why") == ("why" in text)
    whole = (
        answer.content
        if answer.reasoning is None
        else written(Message(role="assistant", content=answer.content, reasoning_content=answer.reasoning))
    )
    assert calls or whole.removeprefix(OPEN * opened) == text


@lru_cache
def renderer(name: str, tools: bool = False) -> Renderer:
    """Return a renderer with the chat template of a reasoning model, which is taken from trl."""
    found = importlib.util.find_spec("trl")
    path = Path(found.origin or "").parent / "chat_templates" / f"{name}.jinja" if found else Path()
    if not path.is_file():
        pytest.skip("trl, which carries models' chat templates, is not installed")
    made: Any = build_tokenizer(["maybe no", "The answer is 4", CALL, "why"] * 5, 512)
    special = ["<|im_start|>", "<|im_end|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]
    made.add_special_tokens({"extra_special_tokens": [*made.extra_special_tokens, *special]})
    made.add_tokens([OPEN, CLOSE, "<tool_call>", "</tool_call>"])
    made.chat_template = path.read_text()
    return Renderer(made, [TOOL] if tools else ())


def said(template: str, text: str, *, tools: bool = False) -> Message:
    r = renderer(template, tools)
    ids = r.tokenizer(text, add_special_tokens=False)["input_ids"]
    return r.parse(np.array([*ids, r.end_of_turn], np.int32))


@pytest.mark.parametrize(
    ("template", "opens"), [("qwen3_5_think", True), ("deepseek_r1_distill", True), ("qwen3", False)]
)
def test_the_thought_of_a_turn_is_a_field_of_its_message(template: str, opens: bool) -> None:
    cut, closed, plain = (said(template, text) for text in ("maybe no", "maybe no</think>4", "<think>no"))
    assert plain == {"role": "assistant", "content": "", "reasoning_content": plain["reasoning_content"]}
    assert plain["reasoning_content"].endswith("no")
    if opens:
        assert cut == {"role": "assistant", "content": "", "reasoning_content": "maybe no"}
        assert closed == {"role": "assistant", "content": "4", "reasoning_content": "maybe no"}
    else:  # such text is no thought, but rewards and environments leave out what precedes a closing tag
        assert cut == {"role": "assistant", "content": "maybe no"}
        assert closed == {"role": "assistant", "content": "maybe no</think>4"}
    assert answer_of(written(closed)) == "4"
    assert answer_of(written(cut)) == ("" if opens else "maybe no")


@pytest.mark.parametrize("template", ["qwen3_5_think", "deepseek_r1_distill", "qwen3"])
def test_a_demonstration_is_read_as_answer_even_if_the_template_opens_a_thought(template: str) -> None:
    r = renderer(template)
    for text in ("why", "<think>maybe no</think>why", "<think>\nmaybe no\n</think>\n\nwhy", "maybe no</think>why"):
        asked = Message(role="user", content="Q")
        turns = r.demonstration([asked, Message(role="assistant", content=text)] * 2)
        read = [r.parse(turn.tokens) for turn in turns if turn.sampled]
        assert [answer_of(written(message)).strip() for message in read] == ["why", "why"]
        whole = r.tokenizer.decode(np.concatenate([turn.tokens for turn in turns]))
        assert whole.count(OPEN) <= whole.count(CLOSE), whole
    assert r.tokenizer.decode(r.spoken("why")[:-1]) == ("why" if template == "qwen3" else "\n</think>\n\nwhy")


def test_a_demonstrated_call_is_read_as_call_even_if_the_template_opens_a_thought() -> None:
    r = renderer("qwen3_5_think", True)
    call = {"id": "call00000", "type": "function", "function": {"name": "rm", "arguments": {}}}
    for content in ("", "so"):
        read = r.parse(r.spoken(Message(role="assistant", content=content, tool_calls=[call])))
        assert read.get("tool_calls") == [call]
        assert read["content"] == content


def test_calls_are_read_only_after_the_thought_that_the_template_opened() -> None:
    thought = {"role": "assistant", "reasoning_content": "why"}
    assert said("qwen3_5_think", "why</think>4", tools=True) == {**thought, "content": "4"}
    call = "<tool_call>\n<function=rm>\n</function>\n</tool_call>"
    called = said("qwen3_5_think", f"why</think>\n\n{call}", tools=True)
    assert [entry["function"]["name"] for entry in called.pop("tool_calls", ())] == ["rm"]
    assert called == {**thought, "content": ""}
    for thought in (f"maybe {call} no</think>4", f"maybe {call}"):
        assert "tool_calls" not in said("qwen3_5_think", thought, tools=True)


def test_whether_a_thought_is_open_depends_on_the_prompt_of_the_turn() -> None:
    """As in templates with a switch in the system prompt, and in that of Gemma 4 after a result."""
    made: Any = build_tokenizer(["maybe no", "The answer is 4", "be quick", "why"] * 5, 512)
    made.add_tokens([OPEN, CLOSE])
    made.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}{% if "
        "add_generation_prompt %}<|assistant|>{% if messages[-1].content != 'be quick' %}<think>{% endif %}{% endif %}"
    )
    context = make_context(Renderer(made), ContextSettings())
    for asked, text, right in (
        ("why", "maybe no", {"content": "", "reasoning_content": "maybe no"}),
        ("be quick", "4", {"content": "4"}),
    ):
        context.observe((Message(role="user", content=asked),))
        ids = np.array(made(f"{text}<|end|>", add_special_tokens=False)["input_ids"], np.int32)
        assert context.act(Completion(ids, np.zeros(ids.size, np.float32), 0, "stop")) == {"role": "assistant", **right}


def test_an_open_thought_is_found_only_at_the_end_of_a_prompt() -> None:
    opening = ThoughtTags().opening
    assert opening("<|im_start|>assistant\n<think>\n") == "<think>\n"
    assert opening("<|Assistant|><think>") == "<think>"
    for prompt in ("<|im_start|>assistant\n", "<think>\n\n</think>\n\n", "Think in <think> tags.\nassistant\n", ""):
        assert opening(prompt) == ""


def test_environments_ignore_the_thought_in_an_answer() -> None:
    number = {"properties": {"guess": {"type": "integer"}}}
    assert same_answer("<think>no</think> 4", 4)
    assert not same_answer("<think>4", "<think>4")
    assert command_of("<think>hm\n</think>Go west") == "go west"
    assert command_of("<think>go west") == ""
    assert to_action({"role": "assistant", "content": "3?</think>4"}, number) == {"guess": 4}
    with pytest.raises(ValueError, match="guess is a number"):
        to_action({"role": "assistant", "content": "<think>4"}, number)
