"""The dialects, driven by the official clients of OpenAI and Anthropic over HTTP."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gleanrl.environments.agent.dialects import DIALECTS, Dialect
from gleanrl.rollout.calls import ModelAnswer, ModelCall, Refused, answer_message, message_key
from gleanrl.types import Message
from tests.strategies import examples, json_values

web = pytest.importorskip("aiohttp.web", reason="the test's server needs aiohttp")
openai = pytest.importorskip("openai", reason="the official client of OpenAI is missing")
anthropic = pytest.importorskip("anthropic", reason="the official client of Anthropic is missing")

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
NAMES = ("chat", "responses", "messages")


class World:
    """A server that answers calls with given answers, records the calls, and has a client for each dialect."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.run_coroutine = runner.run
        self.calls: list[ModelCall] = []
        self.answers: list[ModelAnswer | Refused] = []
        self.dialects: dict[str, Dialect] = dict(zip(NAMES, DIALECTS, strict=True))
        runner.run(self._start())

    async def _start(self) -> None:
        app = web.Application()
        for dialect in DIALECTS:
            app.router.add_post(dialect.path, lambda request, dialect=dialect: self._answer(dialect, request))
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0)

    async def _answer(self, dialect: Dialect, request: Any) -> Any:
        try:
            self.calls.append(dialect.read(await request.json()))
            answer = self.answers.pop(0)
            if isinstance(answer, Refused):
                raise answer
        except Refused as refused:
            return web.json_response(dialect.error(refused), status=refused.status)
        if self.calls[-1].stream:
            text = "".join(dialect.stream(answer, self.calls[-1], "policy"))
            return web.Response(text=text, content_type="text/event-stream")
        return web.json_response(dialect.write(answer, self.calls[-1], "policy"))

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()
        await self.runner.cleanup()

    def send(self, name: str, said: list[Any], stream: bool = False, **parameters: Any) -> Any:
        """Send a call with the official client, and return the client's own object of the whole response."""
        return self.run_coroutine(self._send(name, said, stream, parameters))

    def _send(self, name: str, said: list[Any], stream: bool, parameters: Any) -> Coroutine[Any, Any, Any]:
        async def send() -> Any:
            if name == "chat":
                asked = {"model": "policy", "messages": said, **parameters}
                if not stream:
                    return await self.openai.chat.completions.create(**asked)
                async with self.openai.chat.completions.stream(**asked) as events:
                    return await events.get_final_completion()
            if name == "responses":
                asked = {"model": "policy", "input": said, **parameters}
                if not stream:
                    return await self.openai.responses.create(**asked)
                async with self.openai.responses.stream(**asked) as events:
                    return await events.get_final_response()
            asked = {"model": "policy", "messages": said, "max_tokens": 50, **parameters}
            if not stream:
                return await self.anthropic.messages.create(**asked)
            async with self.anthropic.messages.stream(**asked) as events:
                return await events.get_final_message()

        return send()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with asyncio.Runner() as runner:
        made = World(runner)
        yield made
        runner.run(made.close())


# --- round trips ------------------------------------------------------------------------------------------------------
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
spaced = st.sampled_from([None, 1])  # how a client indents the JSON that it writes again


@st.composite
def sampled(draw: st.DrawFn) -> Message:
    """Draw a message as the renderer parses it: with a thought or not, with calls or not, with odd arguments."""
    message = Message(role="assistant", content=draw(words.filter(lambda text: "think>" not in text)))
    if draw(st.booleans()):
        message["reasoning_content"] = draw(words.filter(lambda text: "think>" not in text))
    arguments = st.dictionaries(words, json_values, max_size=3) | words | st.sampled_from(["[1]", "NaN", '{"a": NaN}'])
    for index in range(draw(st.integers(0, 2))):
        function = {"name": draw(st.sampled_from(["add", "find"])), "arguments": draw(arguments)}
        message.setdefault("tool_calls", []).append({"id": f"call{index}", "type": "function", "function": function})
    return message


def sent_back(name: str, response: Any, indent: int | None, keep: bool) -> list[dict[str, Any]]:
    """Return what a client sends for the model's answer in its next call.

    ``keep``: as dumped by the client's classes. Otherwise a client has taken the answer apart and built it again, with
    thoughts dropped, contents as parts or missing, and the arguments of calls written as JSON by itself.
    """
    if name == "chat":
        message = response.choices[0].message
        if keep:
            return [message.model_dump()]
        calls = []
        for call in message.tool_calls or ():
            function = {"name": call.function.name, "arguments": rewritten(call.function.arguments, indent)}
            calls.append({"id": call.id, "type": "function", "function": function})
        content = [{"type": "text", "text": message.content}] if message.content else None
        return [{"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}]
    if name == "responses":
        if keep:
            return [item.model_dump(exclude_none=True) for item in response.output]
        items: list[dict[str, Any]] = []
        for item in response.output:
            if item.type == "message":
                items.append({"role": "assistant", "content": item.content[0].text})
            elif item.type == "function_call":
                text = rewritten(item.arguments, indent)
                items.append({"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": text})
        return items
    blocks = [block.model_dump(exclude_none=True) for block in response.content]
    if not keep:
        blocks = [block for block in blocks if block["type"] != "thinking"]
        if len(blocks) == 1 and blocks[0]["type"] == "text":
            return [{"role": "assistant", "content": blocks[0]["text"]}]
    return [{"role": "assistant", "content": blocks}]


def rewritten(arguments: str, indent: int | None) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=indent, ensure_ascii=False)
    except ValueError:
        return arguments


def results(name: str, calls: list[Any]) -> list[dict[str, Any]]:
    """Return the next turn: the results of calls, or a further question."""
    ids = [call["id"] for call in calls]
    if not ids:
        return [{"role": "user", "content": "go on"}]
    if name == "chat":
        return [{"role": "tool", "tool_call_id": call_id, "content": "7"} for call_id in ids]
    if name == "responses":
        return [{"type": "function_call_output", "call_id": call_id, "output": "7"} for call_id in ids]
    blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": "7"} for call_id in ids]
    return [{"role": "user", "content": blocks}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(sampled(), min_size=1, max_size=3), spaced, st.booleans())
def test_an_answer_that_comes_back_reads_as_the_message_that_was_sent(
    world: World, name: str, stream: bool, drawn: list[Message], indent: int | None, keep: bool
) -> None:
    world.calls.clear()
    sent = [answer_message(message) for message in drawn]
    said: list[Any] = [{"role": "user", "content": "begin"}]
    for message in sent:
        calls = message.get("tool_calls") or []
        world.answers = [ModelAnswer(message, 11, 5, "tool_calls" if calls else "stop")]
        said += sent_back(name, world.send(name, said, stream), indent, keep) + results(name, calls)
    world.answers = [ModelAnswer(answer_message(Message(role="assistant", content="end")), 1, 1, "stop")]
    world.send(name, said)
    conversation = world.calls[-1].messages
    assert [message_key(m) for m in conversation if m["role"] == "assistant"] == [message_key(m) for m in sent]
    thoughts = [m.get("reasoning_content", "") for m in conversation if m["role"] == "assistant"]
    if keep:
        assert thoughts == [m.get("reasoning_content", "") for m in sent]
    asked = {call["id"]: call["function"]["name"] for m in sent for call in m.get("tool_calls") or ()}
    assert {m.get("tool_call_id") for m in conversation if m["role"] == "tool"} == set(asked)
    for before, after in zip(world.calls, world.calls[1:], strict=False):  # every call extends the one before it
        keys = [message_key(m) for m in before.messages]
        assert [message_key(m) for m in after.messages][: len(keys)] == keys


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_clients_see_the_texts_the_calls_the_end_and_the_counts(world: World, name: str, stream: bool) -> None:
    call = {"id": "call0", "type": "function", "function": {"name": "add", "arguments": '{"a":  1}'}}
    message = Message(role="assistant", content="Adding.", reasoning_content="1 and", tool_calls=[call])
    ends = {}
    for finish in ("stop", "length", "tool_calls"):
        shown = message if finish == "tool_calls" else Message(role="assistant", content="Adding.")
        world.answers = [ModelAnswer(shown, 11, 5, finish)]
        said = [{"role": "user", "content": "1 + 1?"}]
        if name != "messages" and stream and finish == "length":
            ends[finish] = {"chat": "length", "responses": "incomplete"}[name]  # the helpers of OpenAI's client raise
            continue
        got = world.send(name, said, stream)
        if name == "chat":
            ends[finish] = got.choices[0].finish_reason
            assert got.choices[0].message.content == "Adding."
            used = (got.usage.prompt_tokens, got.usage.completion_tokens)
        elif name == "responses":
            ends[finish] = got.status
            assert got.output_text == "Adding."
            used = (got.usage.input_tokens, got.usage.output_tokens)
        else:
            ends[finish] = got.stop_reason
            assert [block.text for block in got.content if block.type == "text"] == ["Adding."]
            used = (got.usage.input_tokens, got.usage.output_tokens)
        assert used == (11, 5)
    if name == "chat":
        answer = got.choices[0].message
        assert answer.reasoning_content == "1 and"
        found = (answer.tool_calls[0].id, answer.tool_calls[0].function.name, answer.tool_calls[0].function.arguments)
    elif name == "responses":
        assert got.output[0].content[0].text == "1 and"
        found = (got.output[2].call_id, got.output[2].name, got.output[2].arguments)
    else:
        assert got.content[0].thinking == "1 and"
        found = (got.content[2].id, got.content[2].name, json.dumps(got.content[2].input))
    assert (*found[:2], json.loads(found[2])) == ("call0", "add", {"a": 1})
    assert (
        ends
        == {
            "chat": {"stop": "stop", "length": "length", "tool_calls": "tool_calls"},
            "responses": {"stop": "completed", "length": "incomplete", "tool_calls": "completed"},
            "messages": {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"},
        }[name]
    )


# --- what a call asks for ---------------------------------------------------------------------------------------------
def test_the_same_request_reads_the_same_in_every_dialect(world: World) -> None:
    schema = {"type": "object"}
    function = {"name": "add", "description": "Adds.", "parameters": schema}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer = ModelAnswer(Message(role="assistant", content="2"), 1, 1, "stop")
    world.calls.clear()
    world.answers = [answer] * 3
    said: list[Any] = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": [{"type": "text", "text": "1 +"}, {"type": "text", "text": " 1?"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "user", "content": "So?"},
    ]
    chat = {"max_completion_tokens": 9, "stop": "\n", "user": "me", "seed": 1, "n": 1, "metadata": {}, "top_p": 1}
    world.send("chat", said, tools=[{"type": "function", "function": {**function, "strict": True}}], **chat)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
        {"role": "user", "content": "So?"},
    ]
    tools: list[Any] = [{"type": "function", "strict": True, **function}]
    world.send("responses", items, instructions="Add.", tools=tools, max_output_tokens=9, store=False, include=[])
    turns = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "2"}]},
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    tools = [{"name": "add", "description": "Adds.", "input_schema": schema}]
    asked = {"system": [{"type": "text", "text": "Add."}], "stop_sequences": ["\n"], "metadata": {"user_id": "me"}}
    world.send("messages", turns, tools=tools, **{**asked, "max_tokens": 9})
    read, responses, messages = world.calls
    assert [m["role"] for m in read.messages] == ["system", "user", "assistant", "tool", "user"]
    assert read.messages[3] == {"role": "tool", "content": "2", "tool_call_id": "c", "name": "add"}
    assert read.tools == tuple(TOOLS)
    assert (read.max_tokens, read.temperature, read.stop, read.stream) == (9, None, ("\n",), False)
    assert messages == read
    assert (responses.messages, responses.tools, responses.max_tokens) == (read.messages, read.tools, 9)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    ("chat", None, {"n": 2}),
    ("chat", None, {"logprobs": True}),
    ("chat", None, {"top_p": 0.5}),
    ("chat", None, {"presence_penalty": 0.5}),
    ("chat", None, {"logit_bias": {"5": 1}}),
    ("chat", None, {"response_format": FORMAT}),
    ("chat", None, {"tools": TOOLS, "tool_choice": "required"}),
    ("chat", None, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}),
    ("chat", None, {"tools": TOOLS, "parallel_tool_calls": False}),
    ("chat", None, {"max_tokens": 0}),
    ("chat", None, {"temperature": -1}),
    ("chat", None, {"temperature": 1e-39}),
    ("chat", None, {"extra_body": {"top_k": 3}}),
    ("chat", [], {}),
    ("chat", [{"role": "user", "content": [IMAGE]}], {}),
    ("chat", [{"role": "tool", "content": "2"}], {}),
    ("responses", None, {"previous_response_id": "resp_1"}),
    ("responses", None, {"conversation": "conv_1"}),
    ("responses", None, {"background": True}),
    ("responses", None, {"include": ["message.output_text.logprobs"]}),
    ("responses", None, {"tools": [{"type": "web_search"}]}),
    ("responses", None, {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}),
    ("responses", [{"type": "item_reference", "id": "msg_1"}], {}),
    ("responses", [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}], {}),
    ("messages", None, {"extra_body": {"top_k": 3}}),
    ("messages", None, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
    ("messages", None, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("messages", None, {"tool_choice": {"type": "any"}}),
    ("messages", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is"}], {}),
    ("messages", [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}], {}),
]


@pytest.mark.parametrize(("name", "said", "asked"), REFUSED)
def test_what_the_policy_cannot_do_is_the_clients_error_of_a_bad_request(
    world: World, name: str, said: Any, asked: dict[str, Any]
) -> None:
    world.answers = [ModelAnswer(Message(role="assistant", content="2"), 1, 1, "stop")]
    client = anthropic if name == "messages" else openai
    with pytest.raises(client.BadRequestError) as caught:
        world.send(name, [{"role": "user", "content": "1 + 1?"}] if said is None else said, **asked)
    body = caught.value.body
    error = body["error"] if name == "messages" else body
    assert error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", NAMES)
def test_other_refusals_are_the_errors_that_clients_know(world: World, name: str) -> None:
    client = anthropic if name == "messages" else openai
    kinds: list[tuple[Refused, type[Exception]]] = [
        (Refused("wrong key", status=401, kind="authentication"), client.AuthenticationError),
        (Refused("the prompt is too long", kind="context_length"), client.BadRequestError),
        (Refused("broken", status=500, kind="server"), client.InternalServerError),
    ]
    for refused, expected in kinds:
        world.answers = [refused]
        with pytest.raises(expected, match=str(refused)) as caught:
            world.send(name, [{"role": "user", "content": "1 + 1?"}])
        if name != "messages" and refused.kind == "context_length":
            assert caught.value.code == "context_length_exceeded"  # pyright: ignore[reportAttributeAccessIssue]


BODIES: dict[str, Any] = {
    "chat": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "2"},
        ],
        "tools": TOOLS,
        "stop": ["a"],
    },
    "responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "2"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": {}}],
        "text": {"format": {"type": "text"}},
    },
    "messages": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{}]}]},
        ],
        "tools": [{"name": "add", "input_schema": {}}],
        "max_tokens": 5,
        "system": "a",
        "tool_choice": {"type": "auto"},
    },
}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(800))
@given(st.data())
def test_a_body_with_anything_anywhere_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """Replace a random part of a valid body by random JSON. What is read can be encoded by any tokenizer."""
    body = copy.deepcopy(BODIES[name])
    inside: Any = body
    while True:
        key = data.draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(len(inside))))
        if not isinstance(inside[key], dict | list) or not inside[key] or data.draw(st.booleans()):
            break
        inside = inside[key]
    inside[key] = data.draw(json_values)
    dialect = DIALECTS[NAMES.index(name)]
    try:
        call = dialect.read(body)
    except Refused as refused:
        json.dumps(dialect.error(refused))
        return
    assert call.messages
    for message in call.messages:
        assert isinstance(message["content"], str)
        message_key(message)
    json.dumps([call.messages, call.tools], ensure_ascii=False).encode()
