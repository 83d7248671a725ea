"""Tests of `gleanrl.rollout.tool_calls`: calls are read in the format in which the chat template writes them, and text
in this format that cannot be read becomes a call without a name that keeps the text."""

from __future__ import annotations

import json
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.rollout.tool_calls import (
    Call,
    CallReader,
    GemmaCalls,
    JsonCalls,
    NamedCalls,
    ResponseTemplate,
    TaggedCalls,
    call_message,
    find_reader,
    for_template,
    read_calls,
)
from tests.strategies import examples

HERMES = "<tool_call>\n{}\n</tool_call>"


def say_hermes(calls: Any) -> str:
    return "\n".join(HERMES.format(json.dumps({"name": c.name, "arguments": c.arguments})) for c in calls)


def say_llama(calls: Any) -> str:
    return "; ".join(json.dumps({"name": c.name, "parameters": c.arguments}) for c in calls)


def say_mistral(calls: Any) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": c.name, "arguments": c.arguments, "id": "call00000"} for c in calls])


def say_named(calls: Any) -> str:
    return "".join(f"[TOOL_CALLS]{c.name}[ARGS]{json.dumps(c.arguments)}" for c in calls)


def say_tagged(calls: Any) -> str:
    def one(call: Any) -> str:
        given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call.arguments.items())
        return f"<tool_call>\n<function={call.name}>\n{given}</function>\n</tool_call>"

    return "\n".join(map(one, calls))


def say_keys(calls: Any) -> str:
    def one(call: Any) -> str:
        pairs = [f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>" for k, v in call.arguments.items()]
        return "\n".join([f"<tool_call>{call.name}", *pairs, "</tool_call>"])

    return "".join(map(one, calls))


FORMS = {
    "hermes": (say_hermes, JsonCalls),
    "llama": (say_llama, JsonCalls),
    "mistral": (say_mistral, JsonCalls),
    "named": (say_named, NamedCalls),
    "tagged": (say_tagged, TaggedCalls),
    "keys": (say_keys, TaggedCalls),
}
READINGS = {name: find_reader(say) for name, (say, _) in FORMS.items()}


def reading(name: str) -> CallReader:
    found = READINGS[name]
    assert found is not None
    return found


@pytest.mark.parametrize("name", FORMS)
def test_find_reader_recognises_the_call_format_of_a_template(name: str) -> None:
    assert isinstance(reading(name), FORMS[name][1])


def test_find_reader_returns_none_for_a_template_that_writes_no_calls() -> None:
    assert find_reader(lambda calls: "I called something.") is None


words = st.text(st.characters(codec="ascii", categories=("L", "Nd")), min_size=1, max_size=8)
plain = st.text("abc {}[]\"'\\,;:\n<>/é", max_size=12).map(str.strip)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | plain,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=examples(150))
@given(
    name=st.sampled_from(["hermes", "llama", "mistral", "named"]),
    calls=st.lists(st.builds(Call, words, st.dictionaries(words, values, max_size=3)), min_size=1, max_size=3),
)
def test_calls_in_json_are_read_back_as_written(name: str, calls: list[Call]) -> None:
    around, found = reading(name).read(FORMS[name][0](calls))
    assert found == calls
    assert not around


@settings(max_examples=examples(80))
@given(
    name=st.sampled_from(["tagged", "keys"]),
    calls=st.lists(
        st.builds(Call, words, st.dictionaries(words, st.text('abc \n"{}', max_size=8).map(str.strip), max_size=3)),
        min_size=1,
        max_size=3,
    ),
)
def test_calls_in_tags_are_read_back_as_written(name: str, calls: list[Call]) -> None:
    assert reading(name).read(FORMS[name][0](calls)) == ("", calls)


@settings(max_examples=examples(300))
@given(
    name=st.sampled_from(list(FORMS)),
    pieces=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", '{"name": "f", "arguments": {"a": 1}}',
             '{"name": ', "{", "}", "[", "]", '"', "text", "\n", ", ", "<function=f>", "</function>",
             "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "[" * 50]
        ),
        max_size=8,
    ),
)  # fmt: skip
def test_no_text_of_a_model_makes_a_reader_raise(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    around, calls = reading(name).read(text)
    assert calls or around == text
    for call in calls:
        assert isinstance(call.arguments, dict | str)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (HERMES.format('{"name": "f", "arguments": {"a": 1}'), [Call("", '{"name": "f", "arguments": {"a": 1}')]),
        ('<tool_call>\n{"name": "f", "arguments": {"a"', [Call("", '{"name": "f", "arguments": {"a"')]),
        (HERMES.format("add 1 and 2"), [Call("", "add 1 and 2")]),
        (
            HERMES.format('{"name": "f", "arguments": {}} and more'),
            [Call("", '{"name": "f", "arguments": {}} and more')],
        ),
        (HERMES.format('{"tool": "f"}'), [Call("", '{"tool": "f"}')]),
        (HERMES.format('{"name": "f"}'), [Call("f", {})]),
        (HERMES.format('{"name": "f", "parameters": {"a": 1}}'), [Call("f", {"a": 1})]),
        (HERMES.format('{"name": "f", "arguments": "{\\"a\\": 1}"}'), [Call("f", {"a": 1})]),
        (HERMES.format('{"name": "f", "arguments": [1]}'), [Call("f", "[1]")]),
        (HERMES.format('{"name": "f", "arguments": ' + "[" * 100_000), None),
    ],
)
def test_a_call_that_cannot_be_read_keeps_its_text(text: str, calls: list[Call] | None) -> None:
    around, found = reading("hermes").read(text)
    assert not around
    if calls is None:
        assert [call.name for call in found] == [""]
    else:
        assert found == calls


def test_an_unreadable_named_call_ends_where_the_next_one_begins() -> None:
    text = '[TOOL_CALLS]f[ARGS]{"a": [TOOL_CALLS]g[ARGS]{"a": 1}'
    assert reading("named").read(text) == ("", [Call("f", '{"a":'), Call("g", {"a": 1})])


def test_text_around_calls_becomes_the_content() -> None:
    text = f"First I add.\n{say_hermes([Call('add', {'a': 1}), Call('sub', {})])}\nThen I see."
    around, calls = reading("hermes").read(text)
    assert around.split("\n")[0] == "First I add."
    assert around.endswith("Then I see.")
    assert [call.name for call in calls] == ["add", "sub"]
    for tag in ("", "<|python_tag|>"):
        text = f"{tag}{say_llama([Call('add', {'a': 1}), Call('sub', {})])}; \nThen I see."
        assert reading("llama").read(text) == ("Then I see.", [Call("add", {"a": 1}), Call("sub", {})])


def test_an_answer_in_json_is_no_call_unless_it_names_a_tool_and_arguments() -> None:
    for answer in ('{"answer": 3}', '{"name": "Ada", "born": 1815}', '{"people": [{"name": "Ada"}]}', '{"name": {}}'):
        assert reading("llama").read(answer) == (answer, [])
    assert reading("llama").read('{"name": "f", "arguments": {}}') == ("", [Call("f", {})])
    for cut in ('{"name": "Ada", "born": 18', '{"name": "Ada", "born": 1815,}'):
        assert reading("llama").read(cut) == (cut, [])
    for cut in ('{"name": "f", "parameters": {"a', '{"name": "f" "parameters": {}}'):
        assert reading("llama").read(cut) == ("", [Call("", cut)])
    assert reading("llama").read('<|python_tag|>{"name": "f", "parameters": {}}') == ("", [Call("f", {})])


def test_arguments_in_tags_are_converted_to_the_types_of_the_schema() -> None:
    properties = {
        "n": {"type": "integer"},
        "s": {"type": "string"},
        "l": {"anyOf": [{"type": "array"}]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "flag": {"type": ["boolean", "null"]},
        "point": {"$ref": "#/$defs/Point"},
    }
    parameters = {"properties": properties, "$defs": {"Point": {"type": "object"}}}
    typed = find_reader(say_tagged, [{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert typed is not None
    written = {"n": "3", "s": "3", "l": "[1]", "other": "3", "maybe": "3", "flag": "True", "point": '{"x": 1}'}
    read = {"n": 3, "s": "3", "l": [1], "other": "3", "maybe": "3", "flag": True, "point": {"x": 1}}
    text = say_tagged([Call("f", written), Call("g", {"n": "3"}), Call("f", {"maybe": "None"})])
    assert typed.read(text)[1] == [Call("f", read), Call("g", {"n": "3"}), Call("f", {"maybe": None})]
    for unreadable in ("three", "[" * 100_000):
        assert typed.read(say_tagged([Call("f", {"n": unreadable})]))[1] == [Call("f", {"n": unreadable})]


def test_an_error_of_the_tokenizer_s_parser_is_a_call_that_keeps_the_text() -> None:
    def parse(text: str) -> dict[str, Any]:
        return {"content": "own", "tool_calls": [{"type": "function", "function": json.loads(text[12:-13])}]}

    reader = ResponseTemplate(parse)
    assert reader.read(say_hermes([Call("f", {"a": 1})])) == ("own", [Call("f", {"a": 1})])
    assert reader.read("broken") == ("", [Call("", "broken")])
    assert ResponseTemplate(lambda text: {"content": text.strip()}).read(" plain ") == (" plain ", [])


def test_openai_tool_calls_are_read_and_converted_for_chat_templates() -> None:
    openai = {"id": "call_x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message: Any = {"role": "assistant", "content": None, "tool_calls": [openai]}
    assert read_calls(message) == [Call("f", {"a": 1})]
    shown = for_template(message)
    assert shown["content"] == ""
    assert shown["tool_calls"] == [
        {"id": "call_x", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]
    assert message["tool_calls"] == [openai]
    assert len(call_message(Call("f", {}), 7)["id"]) == 9  # Mistral's templates require nine characters


@pytest.mark.parametrize(
    ("arguments", "carried"),
    [
        ('{"a": "\\ud800b", "\\udc00": 1}', {"a": "?b", "?": 1}),
        ('{"a": NaN, "b": [-Infinity, 1e999, 1.5]}', {"a": "nan", "b": ["-inf", "inf", 1.5]}),
        ('{"a": ' + "[" * 500 + "]" * 500 + "}", None),
    ],
)
def test_values_that_are_no_strict_json_or_utf8_are_replaced(arguments: str, carried: Any) -> None:
    around, (call,) = JsonCalls("<tool_call>", "</tool_call>", "name", "arguments").read(
        HERMES.format(f'{{"name": "\\ud800", "arguments": {arguments}}}')
    )
    message = call_message(call, 0)
    text = json.dumps(message, ensure_ascii=False, allow_nan=False)
    assert text.encode().decode() == text
    assert (around, message["function"]["name"]) == ("", "?")
    assert len(text) < 300
    if carried is not None:
        assert message["function"]["arguments"] == carried


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        ("tagged", "<tool_call><function=f>" + "<parameter=a>" * 8_000 + "</function></tool_call>"),
        ("tagged", "<tool_call><function=f>" + "<parameter=" * 8_000 + "</function></tool_call>"),
        ("keys", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 4_000 + "</tool_call>"),
        ("gemma", "<|tool_call>call:f{a" + " " * 200_000),
    ],
)
def test_a_long_text_is_read_in_linear_time(reader: str, text: str) -> None:
    """A quadratic reading takes minutes, in which no other episode goes on."""
    begun = process_time()
    _, calls = (GemmaCalls() if reader == "gemma" else reading(reader)).read(text)
    assert calls
    assert process_time() - begun < 5


def test_a_gemma_call_may_have_several_words_as_a_key() -> None:
    _, [call] = GemmaCalls().read("<|tool_call>call:f{two  words : 1, b: [2], c: {d: null}}<tool_call|>")
    assert call.arguments == {"two  words": 1, "b": [2], "c": {"d": None}}


def test_a_gemma_call_with_a_text_that_does_not_end_keeps_its_name_and_ends_at_its_tag() -> None:
    text = 'a:<|"|>x<|"|><|"|>y}'
    read = GemmaCalls().read(f"<|tool_call>call:f{{{text}<tool_call|>Then I see.")
    assert read == ("Then I see.", [Call("f", text)])
