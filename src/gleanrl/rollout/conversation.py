"""A trajectory as the conversation that was held: each message once, whatever its contexts showed."""

from __future__ import annotations

from collections.abc import Sequence

from gleanrl.rollout.tool_calls import called, texts_of
from gleanrl.types import Message, Segment, Trajectory, Turn


def conversation(trajectory: Trajectory) -> list[Message]:
    """Every message once, in order, however often the context was rewritten; inserted experience is left out."""
    messages = [turn.message for segment in trajectory.segments[:1] for turn in segment]
    for segment in trajectory.segments[1:]:
        messages += [turn.message for turn in _new_turns(segment)]
    plain = trajectory.info.get("unguided")
    if plain is not None:
        opening = len(opening_turns(trajectory))
        messages[:opening] = with_prompt(messages[:opening], plain)
    return messages


def readable(message: Message) -> str:
    """What a message says, for a reader: its content, and each of its tool calls as a line."""
    return "\n".join(filter(None, [message.get("content") or "", *texts_of(called(message))]))


def opening_turns(trajectory: Trajectory) -> Segment:
    """The context turns before the first sampled one: the system prompt, the task's and the first observation."""
    first = trajectory.segments[0] if trajectory.segments else ()
    return first[: next((i for i, turn in enumerate(first) if turn.sampled), len(first))]


def with_prompt(messages: Sequence[Message], content: str) -> list[Message]:
    """The messages, with ``content`` in the last of the user. Raises ValueError if there is none."""
    index = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    if index < 0:
        raise ValueError("no message of the user")
    changed: Message = {**messages[index], "content": content}
    return [*messages[:index], changed, *messages[index + 1 :]]


def _new_turns(segment: Segment) -> Sequence[Turn]:
    """What a later segment adds: it shows the past as context, and the newest observation stands before its samples."""
    first = next((i for i, turn in enumerate(segment) if turn.sampled), len(segment))
    said = [i for i in range(first) if segment[i].message["role"] == "assistant"]
    return segment[said[-1] + 1 if said else first :]
