"""A model call of an agent, its answer and its refusal, in a form that is the same for every API that clients speak.

A dialect (`gleanrl.environments.agent.dialects.Dialect`) reads a request of one API as a `ModelCall` and writes a
`ModelAnswer` as that API's response. Everything else that answers calls works with these two alone.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gleanrl.rollout.thinking import CLOSE, OPEN, written
from gleanrl.types import Message

RefusalKind = Literal["invalid_request", "authentication", "context_length", "too_large", "episode_over", "server"]
"""Why a call is refused. Each dialect has an error type of its own for each kind."""


class Refused(Exception):
    """Raised if a model call gets no answer. The agent gets the text as the error message of the response."""

    def __init__(self, message: str, *, status: int = 400, kind: RefusalKind = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A request for the model's next message."""

    messages: tuple[Message, ...]
    """The whole conversation, in the normal form: every content is a text, the arguments of a tool call are JSON text,
    and a message with the role "tool" has a ``tool_call_id``, and a ``name`` if it answers a call in the conversation.
    """
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that the model may call, as OpenAI function schemas."""
    max_tokens: int | None = None
    """Largest number of tokens of the answer; None = only the limits of the run."""
    temperature: float | None = None
    """Sampling temperature; None = that of the run."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, which does not contain them."""
    stream: bool = False
    """Whether the client wants the answer as server-sent events."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """The model's answer to a call."""

    message: Message
    """The message, as `answer_message` returns it."""
    prompt_tokens: int
    """Number of tokens that the model has read."""
    completion_tokens: int
    """Number of tokens that the model has sampled."""
    finish: Literal["stop", "length", "tool_calls"]
    """Why the answer ended: the model or a stop text ended it, a limit of tokens did, or it calls tools."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    """Name of the answer, in hexadecimal digits. The id of the response ends with it."""
    stop: str | None = None
    """The text of `ModelCall.stop` that ended the answer; None if none did."""


def answer_message(message: Message) -> Message:
    """Return a message that the model has sampled in the form in which agents get it.

    The thought is in ``reasoning_content``, without its tags. The arguments of tool calls are JSON text, exactly as
    sampled if they are not a JSON object.
    """
    content = written(message)
    thought, closed, answer = content.rpartition(CLOSE)
    if not closed and content.startswith(OPEN):  # the message was cut off in its thought
        thought, closed, answer = content, CLOSE, ""
    plain = Message(role="assistant", content=answer.lstrip("\n") if closed else content)
    if closed:
        plain["reasoning_content"] = thought.removeprefix(OPEN).strip("\n")
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = []
        for call in calls:
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": call["function"]["name"], "arguments": arguments}
            plain["tool_calls"].append({"id": call["id"], "type": "function", "function": function})
    return plain


def message_key(message: Message) -> str:
    """Return a text that is equal for two messages exactly if they are the same message of a conversation.

    A client that sends a message back may have dropped its thought or the name of a tool, and may have parsed the
    arguments of calls and written them again. These differences do not count. ``message`` is in the normal form.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        try:
            # 1.0 becomes 1, because JavaScript writes it so.
            parsed = json.loads(
                arguments or "{}", parse_float=lambda text: int(x) if (x := float(text)) % 1 == 0 else x
            )
            arguments = json.dumps(parsed, sort_keys=True)
        except (ValueError, OverflowError, RecursionError):
            pass  # no JSON; the text itself is compared
        calls.append([call["id"], call["function"]["name"], arguments])
    return json.dumps([message["role"], message["content"], message.get("tool_call_id"), calls])
