"""What a chat template does with tools: learnt once, by showing it a tool, a call and a result that we know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gleanrl.rollout.thinking import CLOSE
from gleanrl.rollout.tool_calls import (
    PROBE_ARGUMENTS,
    PROBE_NAME,
    PROBE_TOOL,
    AfterThought,
    Call,
    Cast,
    Reading,
    ResponseTemplate,
    Tagged,
    Tools,
    call_message,
    called,
    find_reading,
)
from gleanrl.types import Message
from gleanrl.utils.errors import UserError

MARK = "gleanmark"  # stands for a text while the template around it is read
_OPENING = (Message(role="user", content="."),)
_NO_TOOLS = (
    "the environment has tools, and the chat template of the model's tokenizer {}; take a model that was trained "
    "to call tools, or give its tokenizer a chat template that takes them"
)


class ToolsUnknown(UserError):
    """The model's chat template does not know tools: no episode with tools can be played."""


class Template(Protocol):
    """A chat template: a conversation as text."""

    def __call__(self, messages: Sequence[Message], *, generate: bool, tools: Tools = ()) -> str: ...


class CallTemplate:
    """How a template writes calls and results, and how calls are read from what a model says.

    Args:
        template: it.
        closing: what it writes behind an answer.
        parse: the tokenizer's own ``parse_response``, where it has a response template.
        thinking: its generation prompt opens a thought.

    Raises:
        ToolsUnknown: it has no place for tools, for a call or for a result.
    """

    def __init__(
        self, template: Template, closing: str, tools: Tools, parse: Any = None, *, thinking: bool = False
    ) -> None:
        self._template, self._closing, self._thinking = template, closing.rstrip(), thinking
        try:
            if PROBE_NAME not in template(_OPENING, generate=True, tools=[PROBE_TOOL]):
                raise ToolsUnknown("shows no tools")
            self.reading = self._find_reading(tools, parse)
            self.results_need_calls = not self._shows_result(after_call=False)
            if self.results_need_calls and not self._shows_result(after_call=True):
                raise ToolsUnknown("shows no results of tools")
        except ToolsUnknown as error:
            raise ToolsUnknown(_NO_TOOLS.format(error)) from None
        except Exception as error:  # templates raise what they like
            raise ToolsUnknown(_NO_TOOLS.format(f"refuses tool calls ({error})")) from error

    def spoken(self, message: Message) -> str:
        """What a model says to give this message: its content and its calls.

        Raises:
            UserError: the template shows no text beside calls.
        """
        calls, content = called(message), message.get("content") or ""
        if not calls:
            return content
        if not content:
            return self._said(calls)
        marked = self._said(calls, MARK)
        if not marked.startswith(MARK):
            raise UserError(f"the chat template shows no text beside tool calls; leave out {content[:40]!r}")
        return content + marked[len(MARK) :]

    def after_calls(self, messages: Sequence[Message], *, generate: bool) -> str:
        """The text from the end of the answer on whose calls the first ``messages`` are the results of."""
        results = [message for message in messages if message["role"] == "tool"]
        calls = _probe_calls(len(results))
        for call, result in zip(calls, results, strict=True):
            call["id"] = result.get("tool_call_id", call["id"])
        before = [*_OPENING, Message(role="assistant", content="", tool_calls=calls)]
        alone = self._template(before, generate=False)
        tail = alone[alone.rindex(list(PROBE_ARGUMENTS.values())[-1]) : alone.rindex(self._closing)]
        text = self._template([*before, *messages], generate=generate)
        return text[text.rindex(tail) + len(tail) :]

    def _find_reading(self, tools: Tools, parse: Any) -> Reading:
        reading = find_reading(self._said)
        if isinstance(reading, Tagged):
            reading = Cast(reading, tools)
        if reading is not None:
            reading = AfterThought(reading, self._thinking)
        if parse is not None:
            prompt = self._template(_OPENING, generate=True)
            own = ResponseTemplate(lambda text: parse(text, prefix=prompt, tools=list(tools)), reading)
            reading = find_reading(self._said, own)
        if reading is None:
            raise ToolsUnknown("writes tool calls in a way that cannot be read back")
        return reading

    def _shows_result(self, *, after_call: bool) -> bool:
        (call,) = _probe_calls(1)
        result = Message(role="tool", content=MARK, name=PROBE_NAME, tool_call_id=call["id"])
        answer = Message(role="assistant", content=".")
        if after_call:
            answer = Message(role="assistant", content="", tool_calls=[call])
        try:
            return MARK in self._template([*_OPENING, answer, result], generate=True)
        except Exception:  # one may want the call before its result
            return False

    def _said(self, calls: Sequence[Call], content: str = "") -> str:
        """What an answer with these calls holds."""
        entries = [call_message(call, number) for number, call in enumerate(calls)]
        answer = Message(role="assistant", content=content, tool_calls=entries)
        whole = self._template([*_OPENING, answer], generate=False)
        prompt = self._template(_OPENING, generate=True)
        text = whole[common_length(whole, prompt) :].rstrip()
        if not text.endswith(self._closing):
            raise ToolsUnknown("ends a turn with a call otherwise than one with text")
        text = text[: len(text) - len(self._closing)]
        return text.rpartition(CLOSE)[2].lstrip("\n")  # some show that nothing was thought


def common_length(one: str, other: str) -> int:
    """Of the common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _probe_calls(count: int) -> list[dict[str, Any]]:
    return [call_message(Call(PROBE_NAME, dict(PROBE_ARGUMENTS)), number) for number in range(count)]
