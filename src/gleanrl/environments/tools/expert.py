"""Demonstrations with tools: an expert says what it does, and the episode is played for real."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from gleanrl.environments.tools.environment import ToolEnvironment
from gleanrl.rollout.tool_calls import Call, call_message
from gleanrl.types import Message, Score

Expert = Generator[Any, Any, None]
"""Yields what the agent says: calls of `call`, one or a list, or a text, which is the answer; or a whole message. Gets
the result of a call, or a list of results."""


def call(name: str, **arguments: Any) -> Call:
    """A call of the tool ``name``, for an expert to yield."""
    return Call(name, arguments)


async def played(environment: ToolEnvironment, expert: Expert) -> tuple[tuple[Message, ...], Score]:
    """The conversation that an expert has, and what it earned; it ends as the environment says."""
    answer: Any = None
    conversation: list[Message] = []
    try:
        observation = await environment.reset()
        conversation, number = list(observation.messages), 0
        while not observation.done:
            said = expert.send(answer)
            message = _message(said, number)
            number += len(message.get("tool_calls", ()))
            observation = await environment.step(message)
            conversation += [message, *observation.messages]
            results = [result["content"] for result in observation.messages]
            answer = results[0] if isinstance(said, Call) else results
    except StopIteration:  # it has nothing more to say, and the episode goes on: no demonstration
        return tuple(conversation), Score(0.0)
    finally:
        await environment.close()
    return tuple(conversation), observation.score or Score.failed("the environment gave no score")


def _message(said: Any, number: int) -> Message:
    if isinstance(said, str):
        return Message(role="assistant", content=said)
    if isinstance(said, Call):
        said = [said]
    if isinstance(said, Sequence) and said and all(isinstance(entry, Call) for entry in said):
        entries = [call_message(entry, number + offset) for offset, entry in enumerate(said)]
        return Message(role="assistant", content="", tool_calls=entries)
    if isinstance(said, dict) and said.get("role") == "assistant":
        return said  # type: ignore[return-value]
    raise TypeError(f"an expert yields calls, a text or an assistant message, not {type(said).__name__}")
