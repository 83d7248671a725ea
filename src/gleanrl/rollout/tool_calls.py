"""Tool calls in a model's own words: how its chat template writes them, and how they are read from what it says.

No list of models: the template is asked to write a call that we know, and of the ways of reading below the first that
reads it back exactly is taken. A tokenizer that says itself how answers are read (``response_template``) comes first.

A call that cannot be read is no error here. It becomes a call whose ``arguments`` are the text as it was sampled, for
whoever runs the tools to answer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gleanrl.rollout.thinking import CLOSE, split_thought
from gleanrl.types import Message, Task

Tools = Sequence[Mapping[str, Any]]  # OpenAI function schemas

PROBE_NAME = "gleantool"
PROBE_ARGUMENTS = {"gleanone": "gleanfirst", "gleantwo": "gleanlast"}
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "gleandescription",
        "parameters": {
            "type": "object",
            "properties": {key: {"type": "string", "description": key} for key in PROBE_ARGUMENTS},
            "required": list(PROBE_ARGUMENTS),
        },
    },
}
_DECODER = json.JSONDecoder()
_DEEPEST = 64  # levels of arguments in arguments


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it was said; ``arguments`` is text where it is no JSON object."""

    name: str
    arguments: dict[str, Any] | str


class Reading(Protocol):
    """A way to read calls."""

    def read(self, text: str) -> tuple[str, list[Call]]:
        """The text around the calls, and the calls in order. Never raises."""
        ...


def call_message(call: Call, number: int) -> dict[str, Any]:
    """The call as a message carries it. Some templates want an id of exactly nine letters and digits."""
    function = {"name": _carried(call.name), "arguments": _carried(call.arguments)}
    return {"id": call_id(number), "type": "function", "function": function}


def _carried(value: Any, depth: int = 0) -> Any:
    """As files, databases and services take it: they refuse half characters, NaN and what is nested without end, all of
    which a model may say and Python's JSON reads."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict | list) and depth == _DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {_carried(key): _carried(entry, depth + 1) for key, entry in value.items()}
    return [_carried(entry, depth + 1) for entry in value] if isinstance(value, list) else value


def call_id(number: int) -> str:
    return f"call{number % 100_000:05d}"


def called(message: Message) -> list[Call]:
    """The calls of a message, in either shape that is in use: ``arguments`` as an object or as its JSON text."""
    found = []
    for entry in message.get("tool_calls") or ():
        function = entry.get("function", entry)
        found.append(Call(str(function.get("name") or ""), _arguments(function.get("arguments"))))
    return found


def for_template(message: Message) -> dict[str, Any]:
    """The message as chat templates take it: text for content, and objects for arguments."""
    plain: dict[str, Any] = {**message, "content": message.get("content") or ""}
    if calls := called(message):
        ids = [entry.get("id") or call_id(i) for i, entry in enumerate(message.get("tool_calls") or ())]
        plain["tool_calls"] = [{**call_message(call, 0), "id": own} for call, own in zip(calls, ids, strict=True)]
    return plain


def find_reading(say: Callable[[Sequence[Call]], str], own: Reading | None = None) -> Reading | None:
    """The way to read what ``say`` writes (the text of an answer that makes these calls); None if none reads it.

    ``own``: the tokenizer's own way, taken where it reads the call back.
    """
    probe = Call(PROBE_NAME, dict(PROBE_ARGUMENTS))
    text = say([probe])
    ways: list[Reading | None] = [own, _json_reading(text), _named_reading(text), *(Tagged(*tags) for tags in _TAGS)]
    for way in ways:
        if way is not None and _reads(way, text, probe):
            return way
    return None


def _reads(way: Reading, text: str, probe: Call) -> bool:
    around, calls = way.read(text)
    return calls == [probe] and not around.strip()


# --- a JSON object that holds name and arguments: Hermes, Qwen, Llama 3, older Mistral, Granite, Cohere ---------------
@dataclass(frozen=True, slots=True)
class JsonCalls:
    """``opening {"name": ..., "arguments": ...} closing``; several as one list, or one after the other."""

    opening: str  # may be empty: then an answer that begins as an object with the name's key is a call
    closing: str
    name: str
    arguments: str

    def read(self, text: str) -> tuple[str, list[Call]]:
        if self.opening:
            return _between(text, self.opening, self.closing, self._objects)
        body = text.strip().removeprefix("<|python_tag|>").strip()
        if not (body.startswith("{") and f'"{self.name}"' in body):
            return text, []
        return "", self._objects(body)[0]

    def _objects(self, body: str) -> tuple[list[Call], int]:
        """Calls at the start of ``body``, and where it goes on."""
        calls: list[Call] = []
        at = listed = 0
        while True:
            start = _skip(body, at, " \t\r\n,;[" if not calls else " \t\r\n,;")
            listed |= "[" in body[at:start]
            if start >= len(body) or body[start] != "{":
                break
            try:
                found, end = _DECODER.raw_decode(body, start)
            except (ValueError, RecursionError):
                end = _end_of(body, start, self.closing)
                return [*calls, Call("", body[start:end].strip())], end
            calls.append(self._call(found, body[start:end]))
            at = end
        if listed:
            end = _skip(body, at, " \t\r\n")
            at = end + 1 if body[end : end + 1] == "]" else at
        if not calls:
            end = _end_of(body, 0, self.closing)
            return [Call("", body[:end].strip())], end
        return calls, at

    def _call(self, found: Any, text: str) -> Call:
        name = found.get(self.name)
        if not isinstance(name, str):
            return Call("", text)
        given = found.get(self.arguments)
        if given is None:  # the other common key: models mix them up
            given = next((found[key] for key in ("arguments", "parameters") if found.get(key) is not None), {})
        return Call(name, _arguments(given))


def _json_reading(text: str) -> Reading | None:
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
            return JsonCalls(opening, closing, name, arguments)
    return None


# --- the name before a JSON object of arguments: newer Mistral, DeepSeek ----------------------------------------------
@dataclass(frozen=True, slots=True)
class NamedCalls:
    """``opening name middle {...} closing``."""

    opening: str
    middle: str
    closing: str

    def read(self, text: str) -> tuple[str, list[Call]]:
        return _between(text, self.opening, self.closing, self._call)

    def _call(self, body: str) -> tuple[list[Call], int]:
        name, middle, rest = body.partition(self.middle)
        try:
            if not middle:
                raise ValueError("no name")
            start = len(name) + len(middle) + _skip(rest, 0, " \t\r\n")
            found, end = _DECODER.raw_decode(body, start)
        except (ValueError, RecursionError):
            end = _end_of(body, 0, self.closing or self.opening)
            said = body[len(name) + len(middle) : end] if middle and len(name) < end else body[:end]
            return [Call(name.strip() if middle and len(name) < end else "", said.strip())], end
        return [Call(name.strip(), _arguments(found))], end


def _named_reading(text: str) -> Reading | None:
    at = text.find(PROBE_NAME)
    start = text.find("{", at)
    if at < 0 or start < 0:
        return None
    try:
        _, end = _DECODER.raw_decode(text, start)
    except ValueError:
        return None
    opening, middle = text[:at].strip(), text[at + len(PROBE_NAME) : start].strip()
    return NamedCalls(opening, middle, text[end:].strip()) if opening and middle else None


# --- tags around the name and each argument: Qwen 3.5 and its coders, GLM ---------------------------------------------
@dataclass(frozen=True, slots=True)
class Tagged:
    """Arguments as text between tags; `Cast` makes of it what the tool's schema wants."""

    call: str  # pattern: the name, and the text with the arguments
    argument: str  # pattern: key and value

    def read(self, text: str) -> tuple[str, list[Call]]:
        return _between(text, "<tool_call>", "</tool_call>", self._call)

    def _call(self, body: str) -> tuple[list[Call], int]:
        end = _end_of(body, 0, "</tool_call>")
        match = re.fullmatch(self.call, body[:end].strip(), re.DOTALL)
        if match is None or re.sub(self.argument, "", match[2], flags=re.DOTALL).strip():
            return [Call("", body[:end].strip())], end
        pairs = re.findall(self.argument, match[2], re.DOTALL)
        return [Call(match[1].strip(), dict(pairs))], end


_TAGS = (
    (r"<function=([^>\n]+)>(.*)</function>", r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"),
    (r"([^<\n]+)(.*)", r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
)


@dataclass(frozen=True, slots=True)
class Cast:
    """Calls read by tags, with each argument that its tool's schema wants as another type read as JSON."""

    reading: Tagged
    tools: Tools

    def read(self, text: str) -> tuple[str, list[Call]]:
        around, calls = self.reading.read(text)
        return around, [self._cast(call) for call in calls]

    def _cast(self, call: Call) -> Call:
        functions = (tool["function"] for tool in self.tools)
        schema = next((function for function in functions if function["name"] == call.name), None)
        if schema is None or isinstance(call.arguments, str):
            return call
        properties = schema.get("parameters", {}).get("properties", {})
        return Call(call.name, {key: _cast(value, properties.get(key, {})) for key, value in call.arguments.items()})


def _cast(value: Any, schema: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or (schema.get("type", "string") == "string" and "anyOf" not in schema):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


# --- behind a thought -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class AfterThought:
    """Reads what stands behind a model's thoughts, whose calls are none. ``opened``: the prompt opens the first."""

    reading: Reading
    opened: bool = False

    def read(self, text: str) -> tuple[str, list[Call]]:
        thought, said = split_thought(text, self.opened)
        if not thought and CLOSE in text:  # it ends a thought that does not begin the text, or stands in a call
            around, calls = self.reading.read(text)
            if calls and CLOSE not in around and not any(isinstance(call.arguments, str) for call in calls):
                return around, calls
            head, mark, said = text.rpartition(CLOSE)
            thought = head + mark
        around, calls = self.reading.read(said) if said else ("", [])
        return (thought + around, calls) if calls else (text, [])


# --- the tokenizer's own way ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """By the tokenizer's ``response_template``. What it cannot read goes to the way that the chat template shows."""

    parse: Callable[[str], Mapping[str, Any]]
    otherwise: Reading | None = None

    def read(self, text: str) -> tuple[str, list[Call]]:
        try:
            found = self.parse(text)
            entries = found.get("tool_calls") or []
            calls = called({"role": "assistant", "content": "", "tool_calls": list(entries)})
            around = str(found.get("content") or "")
        except Exception:  # it raises whatever malformed JSON makes it raise
            return self.otherwise.read(text) if self.otherwise else ("", [Call("", text)])
        if not calls and self.otherwise:
            return self.otherwise.read(text)
        return around, calls


# --- parts ------------------------------------------------------------------------------------------------------------
def _between(
    text: str, opening: str, closing: str, read: Callable[[str], tuple[list[Call], int]]
) -> tuple[str, list[Call]]:
    """Apply ``read`` behind each ``opening``; what is left of the text, and all calls."""
    around, calls, at = [], [], 0
    while (start := text.find(opening, at)) >= 0:
        around.append(text[at:start])
        body = text[start + len(opening) :]
        found, end = read(body)
        calls += found
        after = _skip(body, end, " \t\r\n")
        if closing and body.startswith(closing, after):
            end = after + len(closing)
        elif closing and (further := body.find(closing, end)) >= 0:  # something stands between the call and its end
            calls[-1] = Call("", body[:further].strip())
            end = further + len(closing)
        elif closing:  # cut off
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


def texts_of(calls: Sequence[Call]) -> Iterator[str]:
    """Each call as a reader would write it: ``name({"a": 1})``."""
    for call in calls:
        given = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
        yield f"{call.name or '?'}({given})"


def tools_of(taskset: object, task: Task) -> Tools:
    """What a taskset says in ``tool_schemas`` that the environment of ``task`` declares."""
    declared: Tools | Callable[[Task], Tools] = getattr(taskset, "tool_schemas", ())
    return declared(task) if callable(declared) else declared
