"""Renders tool calls with a model's chat template, and parses them from the text that the model samples.

The format of calls is found out from the chat template, so no list of models is needed. `CallTemplate` renders a probe
(a known tool, a call and its result) with the template, and selects the first *reader* that parses the call exactly. A
reader is an object of this module that parses calls in one format (`CallReader`). If none parses the call and the
tokenizer has a ``response_template``, the reader that uses it (`ResponseTemplate`) is tried.

A call that cannot be parsed raises no error. It becomes a `Call` whose ``arguments`` are the sampled text, and the
environment decides how to answer it.

The module has three parts: functions for messages with calls (`call_message`, `read_calls`, `for_template`), readers
(`JsonCalls`, `NamedCalls`, `TaggedCalls`, `GemmaCalls`, `HarmonyCalls`, `ResponseTemplate`; `find_reader` selects one,
`AnswerReader` applies it after the model's thoughts), and `CallTemplate`, which `Renderer` uses.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

from gleanrl.protocols import Tools
from gleanrl.rollout.thinking import Thoughts
from gleanrl.types import Message
from gleanrl.utils.errors import UserError
from gleanrl.utils.text import first_line

PROBE_NAME = "gleantool"
PROBE_ARGUMENTS = {"gleana": "gleanfirst", "gleanb": 9, "gleanc": "gleanlast"}
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "gleandescription",
        "parameters": {
            "type": "object",
            "properties": {
                key: {"type": "integer" if isinstance(value, int) else "string", "description": key}
                for key, value in PROBE_ARGUMENTS.items()
            },
            "required": list(PROBE_ARGUMENTS),
        },
    },
}
_MARK = "gleanmark"  # placeholder for a text, by which the text that the template writes around it is found
_OPENING = (Message(role="user", content="."),)
_NO_TOOLS = (
    "there are tools, and the chat template of the model's tokenizer {}; take a model that was trained "
    "to call tools, or give its tokenizer a chat template that takes them"
)
_DECODER = json.JSONDecoder()
_MAX_DEPTH = 64  # largest number of nested lists and objects in arguments; deeper ones are replaced by "..."
_SPACE = " \t\r\n"


class ToolsUnknown(UserError):
    """Raised if the model's chat template does not support tools, so that no episode with tools can be played."""


# --- messages with calls ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. If the sampled arguments are not a JSON object, ``arguments`` is the sampled text."""

    name: str
    arguments: dict[str, Any] | str


def call_message(call: Call, number: int) -> dict[str, Any]:
    """Return the call as an entry of a message's ``tool_calls``.

    The id of the call is made from ``number``. It has exactly nine letters and digits, because some templates require
    this.
    """
    function = {"name": _storable(call.name), "arguments": _storable(call.arguments)}
    return {"id": f"call{number % 100_000:05d}", "type": "function", "function": function}


def next_call(messages: Sequence[Message]) -> int:
    """Return the smallest number for `call_message` that gives the next calls ids that no message has.

    It is the number of the conversation's calls, unless the conversation was shortened.
    """
    ids = [str(call.get("id")) for message in messages for call in message.get("tool_calls") or ()]
    taken = [int(id[4:]) + 1 for id in ids if re.fullmatch(r"call[0-9]{5}", id)]
    return max([len(ids), *taken])


def expert_message(said: Any, number: int) -> Message:
    """Return the message that an expert gives as a call, a list of calls, a text or a whole message of the assistant.

    ``number`` is that of the first call, see `next_call`. Raises `TypeError` if ``said`` is anything else.
    """
    calls = [said] if isinstance(said, Call) else said
    if isinstance(said, str):
        return Message(role="assistant", content=said)
    if isinstance(calls, Sequence) and calls and all(isinstance(entry, Call) for entry in calls):
        entries = [call_message(entry, number + offset) for offset, entry in enumerate(calls)]
        return Message(role="assistant", content="", tool_calls=entries)
    if isinstance(said, dict) and said.get("role") == "assistant":
        return cast(Message, said)
    raise TypeError(f"an expert gives calls, a text or an assistant message, not {type(said).__name__}")


def _storable(value: Any, depth: int = 0) -> Any:
    """Return a copy of ``value`` without lone surrogates, NaN, infinities and deep nesting.

    Python's JSON module accepts these, but other JSON parsers reject them.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict | list) and depth == _MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {_storable(key): _storable(entry, depth + 1) for key, entry in value.items()}
    return [_storable(entry, depth + 1) for entry in value] if isinstance(value, list) else value


def read_calls(message: Message) -> list[Call]:
    """Return the calls in ``tool_calls`` of a message, where the arguments may be a mapping or JSON text."""
    found = []
    for entry in message.get("tool_calls") or ():
        function = entry.get("function", entry)
        found.append(Call(str(function.get("name") or ""), _arguments(function.get("arguments"))))
    return found


def _arguments(given: Any) -> dict[str, Any] | str:
    if isinstance(given, dict):
        return given
    if given is None:
        return {}
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except (ValueError, RecursionError):
            return given
        return found if isinstance(found, dict) else given
    return json.dumps(given)


def for_template(message: Message) -> dict[str, Any]:
    """Return the message in the form that chat templates expect.

    The content is a text and not None. Arguments of calls are mappings if they can be parsed, and every call has an id.
    A thought also has the name that the template of gpt-oss reads.
    """
    plain: dict[str, Any] = {**message, "content": message.get("content") or ""}
    if "reasoning_content" in message:
        plain["thinking"] = message["reasoning_content"]
    if calls := read_calls(message):
        plain["tool_calls"] = []
        for number, (call, entry) in enumerate(zip(calls, message.get("tool_calls") or (), strict=True)):
            shown = call_message(call, number)
            plain["tool_calls"].append({**shown, "id": entry.get("id") or shown["id"]})
    return plain


# --- readers ----------------------------------------------------------------------------------------------------------
class CallReader(Protocol):
    """Parses tool calls in the text of a model's answer."""

    def read(self, text: str) -> tuple[str, list[Call]]:
        """Return the text around the calls, and the calls in order. Must not raise an error."""
        ...


def find_reader(say: Callable[[Sequence[Call]], str], tools: Tools = ()) -> CallReader | None:
    """Return the first reader that parses the text which ``say`` writes for a call; None if no reader can.

    ``say`` renders calls as the chat template does. ``tools`` are the function schemas that give the types of arguments
    for models that write arguments as plain text.
    """
    text = say([Call(PROBE_NAME, dict(PROBE_ARGUMENTS))])
    readers: list[CallReader] = []
    # Find the first JSON object that contains both the name and the arguments of the call.
    for start in (match.start() for match in re.finditer(r"\{", text)):
        try:
            found, end = _DECODER.raw_decode(text, start)
        except ValueError:
            continue
        keys = {json.dumps(value, sort_keys=True): key for key, value in found.items()}
        name = keys.get(json.dumps(PROBE_NAME))
        arguments = keys.get(json.dumps(PROBE_ARGUMENTS, sort_keys=True))
        if name and arguments:
            opening, closing = text[:start].strip(), text[end:].strip()
            if opening.endswith("[") and closing.startswith("]"):
                opening, closing = opening[:-1].rstrip(), closing[1:].lstrip()
            readers.append(JsonCalls(opening, closing, name, arguments))
            break
    at = text.find(PROBE_NAME)
    start = text.find("{", at)
    if at >= 0 and start >= 0:
        with suppress(ValueError):
            _, end = _DECODER.raw_decode(text, start)
            opening, middle = text[:at].strip(), text[at + len(PROBE_NAME) : start].strip()
            if opening and middle:
                readers.append(NamedCalls(opening, middle, text[end:].strip()))
    readers += [TaggedCalls(*tags, (*tools, PROBE_TOOL)) for tags in _TAGS]
    # The general form `NamedCalls` would fit what the templates of these models write, but not what the models write.
    readers = [HarmonyCalls(), GemmaCalls(), *readers]
    return next((reader for reader in readers if _reads_probe(reader, text)), None)


def _reads_probe(reader: CallReader, text: str) -> bool:
    around, calls = reader.read(text)
    return calls == [Call(PROBE_NAME, dict(PROBE_ARGUMENTS))] and not around.strip()


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Parses calls of the form ``opening {"name": ..., "arguments": ...} closing``.

    Hermes, Qwen, Llama 3, older Mistral, Granite and Cohere models use this form. Several calls are written as a JSON
    list or one after the other.
    """

    # Text before a call. If it is empty, an answer is a call if it begins with an object that has `name` and arguments,
    # or with "{" and these two keys in an object that cannot be parsed.
    opening: str
    closing: str  # text after a call; may be empty
    name: str  # key of the tool's name in the JSON object
    arguments: str  # key of the arguments in the JSON object

    def read(self, text: str) -> tuple[str, list[Call]]:
        if self.opening:
            return _between(text, self.opening, self.closing, self._objects)
        tagged = text.strip().startswith("<|python_tag|>")
        body = text.strip().removeprefix("<|python_tag|>").strip()
        if not body.startswith("{"):
            return text, []
        keys = {self.arguments, "arguments", "parameters"}
        try:
            found, _ = _DECODER.raw_decode(body)
            calls = isinstance(found.get(self.name), str) and (tagged or bool(keys & found.keys()))
        except (ValueError, RecursionError):
            calls = f'"{self.name}"' in body and (tagged or any(f'"{key}"' in body for key in keys))
        if not calls:
            return text, []
        read, end = self._objects(body)
        rest = body[end:].lstrip(_SPACE + ",;").removeprefix(self.closing)
        return rest.lstrip(_SPACE + ",;"), read

    def _objects(self, body: str) -> tuple[list[Call], int]:
        """Return the calls at the start of ``body``, and the offset at which they end."""
        calls: list[Call] = []
        at = listed = 0
        while True:
            start = _skip(body, at, _SPACE + (",;" if calls else ",;["))
            listed |= "[" in body[at:start]
            if start >= len(body) or body[start] != "{":
                break
            try:
                found, end = _DECODER.raw_decode(body, start)
            except (ValueError, RecursionError):
                end = _end_of(body, start, self.closing)
                return [*calls, Call("", body[start:end].strip())], end
            at = end
            name = found.get(self.name)
            if not isinstance(name, str):
                calls.append(Call("", body[start:end]))
                continue
            # Models confuse the two usual keys of arguments, so both are accepted.
            given = [found.get(key) for key in (self.arguments, "arguments", "parameters")]
            calls.append(Call(name, _arguments(next((value for value in given if value is not None), None))))
        if listed:
            end = _skip(body, at, _SPACE)
            at = end + 1 if body[end : end + 1] == "]" else at
        if not calls:
            end = _end_of(body, 0, self.closing)
            return [Call("", body[:end].strip())], end
        return calls, at


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """Parses calls of the form ``opening name middle {...} closing``, in which the JSON object contains the arguments.

    Newer Mistral and DeepSeek models use this form.
    """

    opening: str  # text before the name
    middle: str  # text between the name and the arguments
    closing: str  # text after the arguments; may be empty

    def read(self, text: str) -> tuple[str, list[Call]]:
        return _between(text, self.opening, self.closing, self._call)

    def _call(self, body: str) -> tuple[list[Call], int]:
        name, middle, rest = body.partition(self.middle)
        try:
            if not middle:
                raise ValueError("no name")
            start = len(name) + len(middle) + _skip(rest, 0, _SPACE)
            found, end = _DECODER.raw_decode(body, start)
        except (ValueError, RecursionError):
            end = _end_of(body, 0, self.closing or self.opening)
            if not middle or len(name) >= end:
                return [Call("", body[:end].strip())], end
            return [Call(name.strip(), body[len(name) + len(middle) : end].strip())], end
        return [Call(name.strip(), _arguments(found))], end


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Parses calls with tags around the name and around each argument, as Qwen 3.5, Qwen coders and GLM write them.

    An argument is a text. If the tool's schema gives it another type, its text is parsed as JSON. Qwen 3.5 writes
    booleans and null as Python does.
    """

    call: str  # regular expression of a call: group 1 is the name, group 2 the text that contains the arguments
    argument: str  # regular expression of an argument: group 1 is the key, group 2 the value
    tools: Tools = ()  # schemas that give the types of the arguments

    def read(self, text: str) -> tuple[str, list[Call]]:
        return _between(text, "<tool_call>", "</tool_call>", self._call)

    def _call(self, body: str) -> tuple[list[Call], int]:
        end = _end_of(body, 0, "</tool_call>")
        match = re.fullmatch(self.call, body[:end].strip(), re.DOTALL)
        inside = "" if match is None else match[2].strip()
        # One argument after the other, because a search for all of them takes quadratic time where many begin and none
        # ends.
        argument, at = re.compile(self.argument + r"\s*", re.DOTALL), 0
        arguments: dict[str, Any] = {}
        while found := argument.match(inside, at):
            arguments[found[1]], at = found[2], found.end()
        if match is None or at < len(inside):
            return [Call("", body[:end].strip())], end
        name = match[1].strip()
        for tool in self.tools:
            if tool["function"]["name"] == name:
                schema = tool["function"].get("parameters", {})
                for key, text in arguments.items():
                    # A schema may hold anything. Some clients write null for the properties of a tool without any.
                    with suppress(ValueError, TypeError, AttributeError, RecursionError):
                        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else json.loads(text)
                        if _json_type(value) in _schema_types(schema.get("properties", {}).get(key), schema):
                            arguments[key] = value
                break
        return [Call(name, arguments)], end


_PYTHON = {"True": True, "False": False, "None": None}


def _schema_types(schema: Any, whole: Mapping[str, Any]) -> set[str]:
    """Return the types of JSON other than "string" that ``schema``, a part of the schema ``whole``, allows."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type", ())
    types = {declared} if isinstance(declared, str) else set(declared)
    for union in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(union, ()):
            types |= _schema_types(choice, whole)
    if "$ref" in schema:
        types |= _schema_types(whole.get("$defs", {}).get(str(schema["$ref"]).rpartition("/")[2]), whole)
    if "number" in types:
        types.add("integer")
    return types - {"string"}


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "string")


_TAGS = (
    (r"<function=([^>\n]+)>(.*)</function>", r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"),
    (r"([^<\n]+)(.*)", r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
)


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """Parses calls of the form ``<|tool_call>call:name{key:value}<tool_call|>``, as Gemma 4 writes them.

    A value is JSON, except that keys have no quotes and texts stand between two tokens ``<|"|>``.
    """

    def read(self, text: str) -> tuple[str, list[Call]]:
        return _between(text, "<|tool_call>", "<tool_call|>", self._call)

    def _call(self, body: str) -> tuple[list[Call], int]:
        written, end, closing, quote = "", 0, -1, '<|"|>'
        while True:
            closing = closing if closing >= end else _end_of(body, end, "<tool_call|>")
            opens = body.find(quote, end, closing)
            closes = body.find(quote, opens + len(quote)) if opens >= 0 else -1
            inside = body[end : closing if closes < 0 else opens]
            quoted = re.sub(r'([{,]\s*)([^\s{}\[\],:"]+(?:\s+[^\s{}\[\],:"]+)*)\s*:', r'\1"\2":', inside)
            # Some versions of the template write null as Python does.
            written += re.sub(r"([:\[,]\s*)None(?=\s*[,\]}])", r"\1null", quoted)
            if closes < 0:
                end = closing
                break
            written += json.dumps(body[opens + len(quote) : closes])
            end = closes + len(quote)
        head, brace, rest = written.partition("{")
        name = head.strip().removeprefix("call:").strip()
        try:
            arguments = json.loads(brace + rest)
        except (ValueError, RecursionError):
            return [Call(name if brace else "", body[:end].partition("{")[2] if brace else body[:end].strip())], end
        return [Call(name, _arguments(arguments))], end


@dataclass(frozen=True, slots=True)
class HarmonyCalls:
    """Parses calls of gpt-oss: messages to ``functions.name`` with JSON as their text.

    The text around the calls is that of all other messages, without their headers.
    """

    def read(self, text: str) -> tuple[str, list[Call]]:
        around, calls = [], []
        for part in text.split("<|start|>assistant"):
            header, mark, body = part.partition("<|message|>")
            body = re.split(r"<\|(?:end|call|return)\|>", body if mark else header)[0]
            # The recipient stands before or after the channel. Models write both.
            recipient = re.search(r"\bto=functions\.([^\s<]+)", header) if mark else None
            if recipient:
                calls.append(Call(recipient[1], _arguments(body)))
            else:
                around.append(body)
        return "\n".join(filter(None, around)), calls


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed turn of a model: its thought without tags or None, the text around the calls, and the calls."""

    reasoning: str | None
    content: str
    calls: list[Call]


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Parses a turn of a model. Calls within a thought are ignored."""

    thoughts: Thoughts
    """Format of the model's thoughts."""
    calls: CallReader | None = None
    """Parses the text after the thoughts; None = calls are text like any other."""

    def read(self, text: str, opened: bool = False) -> Answer:
        """Return the parts of the turn with the sampled ``text``. Raises no error.

        ``opened``: whether the generation prompt has opened the first thought.
        """
        reasoning, said = self.thoughts.split(text, opened)
        close = self.thoughts.close
        if self.calls is None or not said:
            return Answer(reasoning, said, [])
        around, calls = self.calls.read(said)
        if reasoning is None and close and close in said:
            # The closing tag either ends a thought that begins later in the text, or it is part of a call's arguments.
            # It is part of the arguments if all calls in the text can be parsed and no tag remains outside of them.
            if calls and close not in around and not any(isinstance(call.arguments, str) for call in calls):
                return Answer(None, around, calls)
            head, mark, said = said.rpartition(close)
            around, calls = self.calls.read(said)
            around = head + mark + around
        return Answer(reasoning, around, calls)


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """Parses calls with the tokenizer's ``response_template``. A text that it cannot parse is a call without a name.

    ``parse`` is the tokenizer's ``parse_response``, which applies the template to a text.
    """

    parse: Callable[[str], Mapping[str, Any]]

    def read(self, text: str) -> tuple[str, list[Call]]:
        try:
            found = self.parse(text)
            entries = found.get("tool_calls") or []
            calls = read_calls({"role": "assistant", "content": "", "tool_calls": list(entries)})
        except Exception:  # for malformed JSON, `parse` raises errors of many types
            return "", [Call("", text)]
        return (str(found.get("content") or ""), calls) if calls else (text, [])


def _between(
    text: str, opening: str, closing: str, read: Callable[[str], tuple[list[Call], int]]
) -> tuple[str, list[Call]]:
    """Parse the text after each ``opening`` with ``read``. Returns the text outside of the calls, and all calls.

    ``read`` takes the text after ``opening``. It returns the calls at the start of this text and the offset at which
    they end.
    """
    around, calls, at = [], [], 0
    while (start := text.find(opening, at)) >= 0:
        around.append(text[at:start])
        body = text[start + len(opening) :]
        found, end = read(body)
        calls += found
        after = _skip(body, end, _SPACE)
        if closing and body.startswith(closing, after):
            end = after + len(closing)
        elif closing and (further := body.find(closing, end)) >= 0:
            # There is other text between the call and `closing`, so the call is malformed.
            calls[-1] = Call("", body[:further].strip())
            end = further + len(closing)
        elif closing:  # `closing` is missing, because the answer was cut off within the call
            calls[-1] = Call("", body.strip())
            end = len(body)
        at = start + len(opening) + end
    around.append(text[at:])
    return ("".join(around).strip() if calls else text), calls


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _end_of(body: str, start: int, closing: str) -> int:
    end = body.find(closing, start) if closing else -1
    return len(body) if end < 0 else end


# --- what a chat template does with tools -----------------------------------------------------------------------------
class Template(Protocol):
    """A function that renders a conversation to text with a chat template.

    The text ends with the generation prompt if ``generate`` is true.
    """

    def __call__(self, messages: Sequence[Message], *, generate: bool, tools: Tools = ()) -> str: ...


class CallTemplate:
    """Renders tool calls and their results with a chat template. Its `reader` parses the calls in a model's answers.

    Args:
        template: the chat template.
        closing: the text that the template writes after an answer.
        tools: function schemas of the tools that the model may call.
        thoughts: format of the model's thoughts.
        last_special: returns the special token with which a text ends, as text; empty if it ends with none.
        parse: the tokenizer's ``parse_response`` if the tokenizer has a response template, else None.

    Raises:
        ToolsUnknown: the template cannot render tools, calls or results, or no reader can parse its calls.
    """

    def __init__(
        self,
        template: Template,
        closing: str,
        tools: Tools,
        thoughts: Thoughts,
        last_special: Callable[[str], str],
        parse: Any = None,
    ) -> None:
        self._template, self._thoughts = template, thoughts
        self._in_content = False
        try:
            shown = template(_OPENING, generate=True, tools=[PROBE_TOOL])
            if PROBE_NAME not in shown:
                raise ToolsUnknown("shows no tools")
            probe = [Call(PROBE_NAME, dict(PROBE_ARGUMENTS))]
            # SmolLM 3 is asked for calls as in Hermes, but its template leaves the calls of a message out.
            self._in_content = "<tool_call>" in shown and PROBE_NAME not in self._turn(probe)
            turn = self._turn(probe)
            self.closing = closing.rstrip() if turn.endswith(closing.rstrip()) else last_special(turn)
            """The text with which the template ends a turn with calls. It may differ from that of other turns."""
            if not turn.endswith(self.closing or closing.rstrip()):
                raise ToolsUnknown("ends a turn with a call otherwise than one with text, and not with a special token")
            reader = find_reader(self._said, tools)
            if reader is None and parse is not None:
                # `AnswerReader` removes thoughts before this parses the text, so the prompt must not open one.
                prompt, known = template(_OPENING, generate=True), [*tools, PROBE_TOOL]
                prompt = prompt.removesuffix(thoughts.opening(prompt))
                reader = ResponseTemplate(lambda text: parse(text, prefix=prompt, tools=known))
                plain = reader.read(_MARK) == (_MARK, [])
                if not (plain and _reads_probe(reader, self._said(probe))):
                    reader = None
            if reader is None:
                raise ToolsUnknown("writes tool calls in a way that cannot be read back")
            self.reader: CallReader = reader
            self.results_need_calls = not self._shows_result(after_call=False)
            if self.results_need_calls and not self._shows_result(after_call=True):
                raise ToolsUnknown("shows no results of tools")
        except ToolsUnknown as error:
            raise ToolsUnknown(_NO_TOOLS.format(error)) from None
        except Exception as error:  # templates raise many types of errors
            raise ToolsUnknown(
                _NO_TOOLS.format(f"refuses tool calls ({first_line(error.__cause__ or error)})")
            ) from error

    def spoken(self, message: Message) -> str:
        """Return the text of an assistant turn with the content and the calls of ``message``.

        Raises:
            UserError: the message has both content and calls, and the template does not render content before calls; or
                it has several calls, and the template does not render all of them.
        """
        calls, content = read_calls(message), message.get("content") or ""
        shown = len(self.reader.read(self._said(calls))[1])
        if shown < len(calls):
            raise UserError(
                f"the chat template shows {shown} of {len(calls)} calls in one turn; give each its own turn"
            )
        if not content:
            return self._said(calls)
        marked = self._said(calls, _MARK)
        if not marked.startswith(_MARK):
            raise UserError(f"the chat template shows no text next to tool calls; leave out {content[:40]!r}")
        return content + marked[len(_MARK) :]

    def after_calls(self, system: Sequence[Message], messages: Sequence[Message], *, generate: bool) -> str:
        """Return the text that the template writes after an answer with calls if ``messages`` follow it.

        ``messages`` must begin with the results of these calls. ``system`` are the first messages of the conversation.
        """
        calls = []
        for result in messages:
            if result["role"] == "tool":
                call = _probe_call(len(calls))
                # Some templates write the name of the called tool next to its result.
                call["function"]["name"] = result.get("name") or "unknown"
                calls.append({**call, "id": result.get("tool_call_id", call["id"])})
        before = [*system, *_OPENING, Message(role="assistant", content="", tool_calls=calls)]
        alone = self._template(before, generate=False)
        tail = alone[alone.rindex(list(PROBE_ARGUMENTS.values())[-1]) : alone.rindex(self.closing)]
        text = self._template([*before, *messages], generate=generate)
        return text[text.rindex(tail) + len(tail) :]

    def _shows_result(self, *, after_call: bool) -> bool:
        call = _probe_call(0)
        result = Message(role="tool", content=_MARK, name=PROBE_NAME, tool_call_id=call["id"])
        answer = Message(role="assistant", content=".")
        if after_call:
            answer = Message(role="assistant", content="", tool_calls=[call])
        try:
            return _MARK in self._template([*_OPENING, answer, result], generate=True)
        except Exception:  # a template may raise an error if no call precedes a result
            return False

    def _said(self, calls: Sequence[Call], content: str = "") -> str:
        """Return the text of an assistant turn with these calls, as the template renders it, without its closing."""
        turn = self._turn(calls, content)
        return turn[: len(turn) - len(self.closing)]

    def _turn(self, calls: Sequence[Call], content: str = "") -> str:
        """Return what the template writes for an assistant turn with these calls, after the generation prompt."""
        entries = [call_message(call, number) for number, call in enumerate(calls)]
        answer = Message(role="assistant", content=content, tool_calls=entries)
        if self._in_content:
            texts = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
            lines = [f"<tool_call>\n{text}\n</tool_call>" for text in texts]
            answer = Message(role="assistant", content="\n".join([content, *lines] if content else lines))
        whole, prompt = self._template([*_OPENING, answer], generate=False), self._template(_OPENING, generate=True)
        common = common_length(whole, prompt)
        opened = bool(self._thoughts.opening(prompt[:common]))
        # Some templates write an empty thought before each answer.
        return self._thoughts.split(whole[common:], opened)[1].strip("\n").rstrip()


def _probe_call(number: int) -> dict[str, Any]:
    return call_message(Call(PROBE_NAME, dict(PROBE_ARGUMENTS)), number)


def common_length(one: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts.

    A binary search that compares slices is faster than a loop over single characters.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
